"""Who attends to whom: `Attention`, its weights and its drift; and the fields it is part of: `Drift`, `Layers`."""

from attn_flow.attention.fields import Drift, Field, Layers
from attn_flow.attention.multihead import Attention

__all__ = ["Attention", "Drift", "Field", "Layers"]
