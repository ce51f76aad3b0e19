"""The limits on time and memory that a release keeps, measured on an otherwise idle machine.

python benchmarks/targets.py              all of them, about ten minutes; exit code 1 if one is missed
python benchmarks/targets.py drift near   those whose names contain one of the words
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does

import torch
from cases import Result, _our_memory, drift, drop_in, fixed_steps, recording, tokens, transport
from measure import machine, peak_megabytes

from attn_flow import Attention, flow


def ratio(case: Callable[[], Result], largest_error: float | None = None) -> float:
    """Our time over theirs; infinity if the result errs more than it may."""
    result = case()
    if largest_error is not None and (result.error is None or result.error > largest_error):
        return float("inf")
    return 1 / result.factor


def plateau_evaluations() -> float:
    """Evaluations of the drift until t = 3e6, through all plateaus."""
    path = flow(Attention.identity(3, beta=12.0), tokens(64, 3, torch.float64), [0.0, 3e6], step="adaptive")
    return float(path.about["evaluations"])


def trained(case: Callable[[], Result]) -> float:
    """The ratio of a case that needs gradients."""
    with torch.enable_grad():
        return ratio(case)


TARGETS: dict[str, tuple[Callable[[], float], float]] = {  # name: (measured, largest value)
    **{
        f"drift of 1,000 tokens, d = {d}, over the plain loop": (partial(ratio, partial(drift, 1000, d, "plain")), 1.0)
        for d in (2, 3, 16, 64, 128, 384)
    },
    "drift of 4,000 tokens, d = 64, over the plain loop": (partial(ratio, partial(drift, 4000, 64, "plain")), 0.5),
    "near kernel, 65,536 tokens, over fused attention": (
        partial(ratio, partial(drift, 65536, 3, "fused", beta=1000.0), 1e-5),
        1 / 8,
    ),
    "series, 16,384 tokens of the circle, over fused attention": (
        partial(ratio, partial(drift, 16384, 2, "fused", beta=100.0, dtype=torch.float64), 1e-5),
        1 / 14,
    ),
    "flow of 256 tokens, 500 RK4 steps, over ten plain lines": (partial(ratio, fixed_steps), 1.2),
    "evaluations through the plateaus until t = 3e6": (plateau_evaluations, 2000),
    "megabytes of a drift of 200,000 tokens": (partial(peak_megabytes, _our_memory, 200_000), 50),
    "certified W2 of 10,000 tokens, over POT": (partial(ratio, transport), 0.1),
    "drop-in, 32 x 128 tokens, over nn.MultiheadAttention": (partial(trained, drop_in), 1.1),
    "drop-in, 1 x 16 tokens, over nn.MultiheadAttention": (partial(trained, partial(drop_in, 1, 16, 64, 4)), 4.0),
    "recording, over a forward pass": (partial(ratio, recording), 1.05),
}


def main() -> int:
    words = sys.argv[1:] or [""]
    torch.set_flush_denormal(True)  # denormal numbers slow down the plain loops and would flatter our ratios
    missed = 0
    for name, (measure, largest) in TARGETS.items():
        if any(word in name for word in words):
            with torch.no_grad():
                value = measure()
            is_met = value <= largest
            missed += not is_met
            print(f"{name:60} {value:9.3g}  at most {largest:<8.3g} {'met' if is_met else 'missed'}", flush=True)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
