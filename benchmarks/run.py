"""Speed of attn_flow against other implementations: one table, on an otherwise idle machine.

python benchmarks/run.py                       all cases, a few minutes
python benchmarks/run.py near transport        some of them
python benchmarks/run.py --quick               small sizes: whether everything runs, not how fast it is
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does

import torch
from cases import CASES, GROWTH, Result, growth
from measure import machine

COLUMNS = ("what", "against", "ours", "theirs", "times faster", "relative error")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}, growth; all by default")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers")
    options = parser.parse_args()
    names = options.cases or [*CASES, "growth"]
    unknown = [name for name in names if name not in (*CASES, "growth")]
    if unknown:
        parser.error(f"no case {', '.join(unknown)}; expected some of {', '.join(CASES)}, growth")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    # Denormal numbers slow down a plain softmax at low temperature, which would flatter our ratios.
    torch.set_flush_denormal(True)
    results, missing = [], []
    with torch.no_grad():
        for name in (name for name in names if name != "growth"):
            try:
                with torch.enable_grad() if name == "drop_in" else torch.no_grad():
                    results.append(CASES[name](options.quick))
            except ModuleNotFoundError as error:
                missing.append(f"{name}: not run, {error.name} is not installed")
        exponents = {}
        for name, (*case, sizes) in GROWTH.items() if "growth" in names else ():
            exponents[name] = growth(*case, sizes[:2] if options.quick else sizes)
    facts = machine()
    print_table(results)
    for name, exponent in exponents.items():
        print(f"Time of a drift of n tokens, {name}: grows like n^{exponent:.2f}")
    for line in missing:
        print(line)
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    if options.out is not None:
        rows = [{**asdict(result), "factor": result.factor} for result in results]
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"machine": facts, "rows": rows, "growth": exponents}, indent=1) + "\n")


def print_table(results: list[Result]) -> None:
    """One row a result, with columns as wide as their entries."""
    rows = [COLUMNS]
    for result in results:
        error = "" if result.error is None else f"{result.error:.1e}"
        times = (f"{value:.3g} {result.unit}" for value in (result.ours, result.theirs))
        rows.append((result.what, result.against, *times, f"{result.factor:.2f}", error))
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for row in rows:
        print("  ".join(entry.ljust(width) for entry, width in zip(row, widths)).rstrip())


if __name__ == "__main__":
    main()
