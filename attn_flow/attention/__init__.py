"""Who attends to whom: `Attention`, and the vector fields that are built from it."""

from attn_flow.attention.attention import Attention
from attn_flow.attention.fields import Drift, Field, Layers, Sum, Transformed
from attn_flow.attention.normalisation import layer_norm_scaling, ngpt, peri_norm, pre_norm

__all__ = [
    "Attention",
    "Drift",
    "Field",
    "Layers",
    "Sum",
    "Transformed",
    "layer_norm_scaling",
    "ngpt",
    "peri_norm",
    "pre_norm",
]
