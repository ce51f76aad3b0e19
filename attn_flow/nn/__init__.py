"""Trainable modules: the continuous layer, its form of nn.MultiheadAttention, and deep stacks."""

from attn_flow.nn.layer import ContinuousAttentionLayer
from attn_flow.nn.module import parameter_groups
from attn_flow.nn.multihead import ContinuousMultiheadAttention
from attn_flow.nn.options import FlowOptions
from attn_flow.nn.stack import DeepStack

__all__ = [
    "ContinuousAttentionLayer",
    "ContinuousMultiheadAttention",
    "DeepStack",
    "FlowOptions",
    "parameter_groups",
]
