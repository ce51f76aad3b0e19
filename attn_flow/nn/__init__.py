"""Trainable modules: the continuous layer, its form of nn.MultiheadAttention, deep stacks of it."""

from attn_flow.nn.drop_in import ContinuousMultiheadAttention
from attn_flow.nn.layer import ContinuousAttentionLayer
from attn_flow.nn.stack import DeepStack

__all__ = ["ContinuousAttentionLayer", "ContinuousMultiheadAttention", "DeepStack"]
