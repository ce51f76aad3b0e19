"""Trainable modules: the continuous layer, deep stacks of it."""

from attn_flow.nn.layer import ContinuousAttentionLayer

__all__ = ["ContinuousAttentionLayer"]
