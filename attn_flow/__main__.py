"""The entry point of `attn-flow` and `python -m attn_flow`, which torchrun can start. It needs nothing optional."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line, or say what to install for it."""
    # Threads of torch that wait for work would otherwise keep the processor busy. It is read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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
