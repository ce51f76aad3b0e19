"""How far two ways to the same number may end apart: from the numbers at hand, on any processor."""

import torch
from torch import Tensor


def rounding(x: Tensor, terms: int, dtype: torch.dtype | None = None) -> float:
    """eps max|x| terms: what rounding does at most to sums of `terms` numbers, of sizes that end up as x.

    dtype: that of the sums where it is not that of x.
    """
    return torch.finfo(dtype or x.dtype).eps * float(x.detach().abs().max()) * terms
