"""Is a trained encoder a mean-field flow? Closures, nulls, propagation, limits, heads; figures, a page."""

from attn_flow.probe.closures import LADDER, Closure
from attn_flow.probe.findings import Finding
from attn_flow.probe.nulls import NULLS
from attn_flow.probe.propagation import Propagated, propagate
from attn_flow.probe.result import Probe
from attn_flow.probe.run import probe

__all__ = ["LADDER", "NULLS", "Closure", "Finding", "Probe", "Propagated", "probe", "propagate"]
