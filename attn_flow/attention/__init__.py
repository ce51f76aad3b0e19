"""Who attends to whom: `Attention`, its weights and its drift."""

from attn_flow.attention.multihead import Attention

__all__ = ["Attention"]
