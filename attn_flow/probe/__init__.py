"""Does an encoder go where its weights predict? Closures, limits, heads, evolution; figures and a page."""

from attn_flow.probe.result import Probe
from attn_flow.probe.run import probe

__all__ = ["Probe", "probe"]
