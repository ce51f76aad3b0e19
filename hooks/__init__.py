"""Real encoders as the core's nouns: a Trajectory of their states, an Attention per layer, a layer as a flow."""

from attn_flow.hooks.architectures import ROWS, Row, register
from attn_flow.hooks.capture import record, recording
from attn_flow.hooks.corpus import Statistics, merge
from attn_flow.hooks.demo import load
from attn_flow.hooks.layout import Block, blocks
from attn_flow.hooks.tape import KINDS, Tape
from attn_flow.hooks.temperature import scale_beta
from attn_flow.hooks.weights import Check, Norm, attentions, check, describe, folded, geometries, norms
from attn_flow.hooks.wrapping import wrap

__all__ = [
    "KINDS",
    "ROWS",
    "Block",
    "Check",
    "Norm",
    "Row",
    "Statistics",
    "Tape",
    "attentions",
    "blocks",
    "check",
    "describe",
    "folded",
    "geometries",
    "load",
    "merge",
    "norms",
    "record",
    "recording",
    "register",
    "scale_beta",
    "wrap",
]
