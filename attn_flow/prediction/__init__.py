"""Where it ends: the limit map, the flow at zero temperature, rates, certificates, what n tokens resolve, phases."""

from attn_flow.prediction.finite_n import resolution
from attn_flow.prediction.limit_map import LimitMap, limit, zero_temperature_flow
from attn_flow.prediction.timeline import phases

__all__ = ["LimitMap", "limit", "phases", "resolution", "zero_temperature_flow"]
