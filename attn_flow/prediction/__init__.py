"""Where it ends: the limit map, the flow at zero temperature, rates, certificates, what n tokens resolve, phases."""

from attn_flow.prediction.certificate import Settled, settle
from attn_flow.prediction.finite_n import Resolution, ResolutionWarning, resolution
from attn_flow.prediction.limit_map import LimitMap, limit
from attn_flow.prediction.requirements import Requirement
from attn_flow.prediction.timeline import Phase, Phases, phases
from attn_flow.prediction.zero_temperature import zero_temperature_flow

__all__ = [
    "LimitMap",
    "Phase",
    "Phases",
    "Requirement",
    "Resolution",
    "ResolutionWarning",
    "Settled",
    "limit",
    "phases",
    "resolution",
    "settle",
    "zero_temperature_flow",
]
