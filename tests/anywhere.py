"""The suite as other machines would run it: instruction sets, threads, order and random numbers changed.

    anywhere.py             every instruction set torch has here, with one and two threads, shuffled, new random numbers
    anywhere.py --foreign   one instruction set that is not this machine's, numerical packages, the laws' usual examples
    anywhere.py --seed 7    the order of an earlier run, and the numbers of its `generator`

Each configuration runs all numerical packages, one of each instruction set the whole suite. It prints a table and ends
with 1 if any failed. torch's kernels, MKL, oneDNN and OpenBLAS all use the instruction set.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
NUMERICAL = ("kernels", "measures", "attention", "dynamics", "prediction", "nn", "transport", "observe", "theory")
NUMERICAL += ("hooks", "test_geometry.py")
# The least first; a machine has those up to its own.
SETS = {
    "default": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41", "OPENBLAS_CORETYPE": "Nehalem"},
    "avx2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OPENBLAS_CORETYPE": "Haswell"},
    "avx512": {},
}


def run(name: str, threads: int, whole: bool, seed: int, explore: bool) -> tuple[int, str]:
    """pytest's exit code and its last line."""
    instructions = {} if name == own() else {"ATEN_CPU_CAPABILITY": name, **SETS[name]}
    varied = {"ATTN_FLOW_TEST_THREADS": str(threads), "ATTN_FLOW_TEST_SEED": str(seed)}
    varied |= {"HYPOTHESIS_RANDOM": "1"} if explore else {}
    paths = ["tests"] if whole else [f"tests/{package}" for package in NUMERICAL]
    command = [sys.executable, "-m", "pytest", "-n", "2", "-m", "not slow and not docs", *paths]
    print(f"\n== {name}, {threads} thread(s), seed {seed}: {' '.join(paths)}", flush=True)
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **instructions, **varied}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line.strip() or last  # pytest's last line counts what passed
    return process.wait(), last


def own() -> str:
    return torch.backends.cpu.get_cpu_capability().lower()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--foreign", action="store_true")
    parser.add_argument("--seed", type=int, default=random.randrange(1, 10**6))
    options = parser.parse_args()
    known = list(SETS)
    here = [*known[: known.index(own())], own()] if own() in SETS else [own()]
    if options.foreign:
        if len(here) == 1:
            print(f"torch has no instruction set but {own()} here: nothing foreign to run.")
            return 0
        plans = [(here[-2], 1, False)]
    else:
        # The whole suite once for each set, with one thread and two in turn.
        plans = [(name, threads, (i + threads) % 2 == 1) for i, name in enumerate(here) for threads in (1, 2)]
    rows = []
    for k, (name, threads, whole) in enumerate(plans):
        start = time.monotonic()
        code, last = run(name, threads, whole, options.seed + k, explore=not options.foreign)
        minutes = (time.monotonic() - start) / 60
        rows.append((code, f"{name:8} {threads:7} {options.seed + k:7} {minutes:8.1f}  {last}"))
    print(f"\n{'set':8} threads    seed  minutes  result")
    for code, row in rows:
        print(row if code == 0 else f"{row}  <- FAILED")
    return int(any(code for code, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
