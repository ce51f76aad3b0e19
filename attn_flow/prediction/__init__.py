"""Where a flow ends: the limit map, zero-temperature flows, rates, what n tokens resolve, phases."""

from attn_flow.prediction.bound import Bound, fit_bound
from attn_flow.prediction.limit_map import LimitMap, limit
from attn_flow.prediction.phases import OverSeeds, Phase, Phases, phases, phases_over_seeds, w2_curve
from attn_flow.prediction.rates import Rates, TerminalPhase
from attn_flow.prediction.requirements import Requirement, Resolution, resolution
from attn_flow.prediction.spectrum import Spectrum, spectrum
from attn_flow.prediction.sweep import Sweep, starting_cloud, sweep
from attn_flow.prediction.zero_temperature import zero_temperature_flow

__all__ = [
    "Bound",
    "LimitMap",
    "OverSeeds",
    "Phase",
    "Phases",
    "Rates",
    "Requirement",
    "Resolution",
    "Spectrum",
    "Sweep",
    "TerminalPhase",
    "fit_bound",
    "limit",
    "phases",
    "phases_over_seeds",
    "resolution",
    "spectrum",
    "starting_cloud",
    "sweep",
    "w2_curve",
    "zero_temperature_flow",
]
