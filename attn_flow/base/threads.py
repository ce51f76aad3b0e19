"""How many threads torch may use, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def at_most(threads: int) -> Iterator[None]:
    """Run what is inside with no more than so many threads of torch; afterwards as before.

    One is best for the eigenvalues and singular values of matrices of up to about a thousand rows: LAPACK gets them
    by hundreds of small products one after the other, and threads that sleep between them take longer to wake than
    to work (223 x 384 with two threads: 24 ms, with one 4.6).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, threads))
    try:
        yield
    finally:
        torch.set_num_threads(before)
