"""Real encoders as the core's nouns: a Trajectory of their states, an Attention per layer, a layer as a flow."""

from attn_flow.hooks.architectures import Architecture, register
from attn_flow.hooks.capture import record
from attn_flow.hooks.corpus import record_corpus
from attn_flow.hooks.corpus_statistics import Statistics, merge_shards
from attn_flow.hooks.layout import Block, blocks
from attn_flow.hooks.loading import load_texts
from attn_flow.hooks.named import load_encoder
from attn_flow.hooks.replacing import LayerFlow, flows, load, replace_attention
from attn_flow.hooks.tape import POINTS, Tape, recording
from attn_flow.hooks.temperature import scale_beta
from attn_flow.hooks.trust import Check, self_check, unknown_share
from attn_flow.hooks.weights import Norm, attentions, encoder_facts, geometries, norms
from attn_flow.hooks.wrapping import wrap

__all__ = [
    "POINTS",
    "Architecture",
    "Block",
    "Check",
    "LayerFlow",
    "Norm",
    "Statistics",
    "Tape",
    "attentions",
    "blocks",
    "encoder_facts",
    "flows",
    "geometries",
    "load",
    "load_encoder",
    "load_texts",
    "merge_shards",
    "norms",
    "record",
    "record_corpus",
    "recording",
    "register",
    "replace_attention",
    "scale_beta",
    "self_check",
    "unknown_share",
    "wrap",
]
