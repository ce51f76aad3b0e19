"""The number of threads of torch, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Let torch use at most this many threads inside the context, and as many as before afterwards.

    One thread is best for eigenvalues and singular values of matrices of up to about a thousand rows: LAPACK computes
    them in hundreds of small products, and threads take longer to wake up than to work.

    >>> with limit_threads(1):
    ...     torch.get_num_threads()
    1
    """
    previous = torch.get_num_threads()
    torch.set_num_threads(min(previous, count))
    try:
        yield
    finally:
        torch.set_num_threads(previous)
