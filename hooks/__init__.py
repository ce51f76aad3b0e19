"""Real encoders in the terms of attn_flow: activations as a Trajectory, layers as Attention, layers as flows."""

from attn_flow.hooks.architectures import Architecture, register
from attn_flow.hooks.attention_interface import register_attention
from attn_flow.hooks.capture import record
from attn_flow.hooks.corpus import record_corpus
from attn_flow.hooks.layer_flow import LayerFlow, flows
from attn_flow.hooks.layout import Block, blocks
from attn_flow.hooks.loading import load, load_encoder, register_encoder
from attn_flow.hooks.recorder import POINTS, ActivationCache, recording
from attn_flow.hooks.replacing import replace_attention, restore_attention
from attn_flow.hooks.self_check import Check, self_check
from attn_flow.hooks.texts import load_texts
from attn_flow.hooks.weights import attentions, encoder_facts, geometries
from attn_flow.hooks.wrapping import scale_beta, wrap

__all__ = [
    "POINTS",
    "ActivationCache",
    "Architecture",
    "Block",
    "Check",
    "LayerFlow",
    "attentions",
    "blocks",
    "encoder_facts",
    "flows",
    "geometries",
    "load",
    "load_encoder",
    "load_texts",
    "record",
    "record_corpus",
    "recording",
    "register",
    "register_attention",
    "register_encoder",
    "replace_attention",
    "restore_attention",
    "scale_beta",
    "self_check",
    "wrap",
]
