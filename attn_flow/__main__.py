"""The entry point of `attn-flow` and `python -m attn_flow`, which torchrun can start. It needs nothing optional."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line, or say what to install for it."""
    # Threads of torch that wait for work, and those of numpy beside them, would otherwise keep the processor busy. Both
    # settings are read at the first import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from attn_flow.cli.app import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        print('attn-flow needs typer; install it with: pip install "attn-flow[cli]"', file=sys.stderr)  # noqa: T201
        sys.exit(2)
    try:
        app(prog_name="attn-flow")
    finally:
        if "WORLD_SIZE" in os.environ and "torch" in sys.modules:
            from attn_flow.base.processes import leave

            leave()  # before Python ends: threads that still communicate would abort the process


if __name__ == "__main__":
    main()
