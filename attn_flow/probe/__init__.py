"""Four questions about a trained encoder, answered with intervals and baselines.

`probe(model, tokenizer, texts)` is the one door. It returns a `ProbeResult`: `findings` by question (averaging,
clusters, temperature, limit), `to_frame()`, `as_json()` and `report(folder)`.
"""

from attn_flow.probe.findings import Finding
from attn_flow.probe.recording import Heads, Recording
from attn_flow.probe.result import ProbeResult
from attn_flow.probe.run import ProbeRun, prepare, probe
from attn_flow.probe.untrained import untrained_copy

__all__ = ["Finding", "Heads", "ProbeResult", "ProbeRun", "Recording", "prepare", "probe", "untrained_copy"]
