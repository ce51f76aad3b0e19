"""Where it ends: the limit map, the flow at zero temperature, rates, certificates, what n tokens resolve, phases."""

from attn_flow.prediction.certificate import Settled, settle
from attn_flow.prediction.finite_n import Resolution, ResolutionWarning, resolution
from attn_flow.prediction.limit_map import LimitMap, limit
from attn_flow.prediction.requirements import Requirement
from attn_flow.prediction.statistics import (
    Bound,
    Chaos,
    OverSeeds,
    PhasesOverSeeds,
    certified_over_seeds,
    fit_bound,
    over_seeds,
    phases_over_seeds,
    propagation_of_chaos,
)
from attn_flow.prediction.timeline import Phase, Phases, phases
from attn_flow.prediction.zero_temperature import zero_temperature_flow

__all__ = [
    "Bound",
    "Chaos",
    "LimitMap",
    "OverSeeds",
    "Phase",
    "Phases",
    "PhasesOverSeeds",
    "Requirement",
    "Resolution",
    "ResolutionWarning",
    "Settled",
    "certified_over_seeds",
    "fit_bound",
    "limit",
    "over_seeds",
    "phases",
    "phases_over_seeds",
    "propagation_of_chaos",
    "resolution",
    "settle",
    "zero_temperature_flow",
]
