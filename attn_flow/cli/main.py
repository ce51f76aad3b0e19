"""The entry point of `attn-flow`. It imports nothing that may be missing."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

INTERRUPTED = 130  # the exit code after Ctrl-C
GRACE = 1.5  # seconds after Ctrl-C for a command to keep what is finished


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
    _end_soon_after_interrupt()
    try:
        app(prog_name="attn-flow")
    except SystemExit as end:
        if end.code != INTERRUPTED and "WORLD_SIZE" not in os.environ:
            raise
        # Files are closed by now. After Ctrl-C Python would take seconds to unload torch and transformers; under
        # torchrun communication threads of torch may still run while Python ends, which aborts the process.
        if "torch" in sys.modules:
            from attn_flow.base.processes import leave

            leave()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(end.code or 0))


def _end_soon_after_interrupt() -> None:
    """End the process GRACE seconds after Ctrl-C, which Python itself would notice only after a long call of torch.

    Files are written atomically and locks end with the process, so that nothing finished is lost.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)  # gets the number of a signal at once

    def watch() -> None:
        while reader.recv(1) != bytes([signal.SIGINT]):
            pass
        time.sleep(GRACE)
        os._exit(INTERRUPTED)

    threading.Thread(target=watch, daemon=True).start()
