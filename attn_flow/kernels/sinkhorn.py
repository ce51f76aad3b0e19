"""Doubly stochastic attention (Sander et al., arXiv 2110.11773): averages under balanced weights.

The weights P_ij = exp(scale <q_i, k_j> + f_i + g_j) w_j have sum_j P_ij = 1 for every row and sum_i w_i P_ij = w_j for
every column. A sweep of Sinkhorn's algorithm chooses g so that the columns are balanced, and then f for the rows. Given
g, f is what a softmax over the keys divides by. So balanced attention is softmax attention with the log-weights
g + log w.

Sweeps contract slowly if logits are large: by about 1 - (d - 1) / beta for beta <x_i, x_j> on a sphere. Where queries
are keys, f = g is the fixed point of one half of a sweep, and the mean of f and that half contracts by 1/2 or better.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_flow.base.checks import can_read
from attn_flow.kernels import dense

MAX_SWEEPS = 2000
BLIND_SWEEPS = 100  # where values cannot be read (torch.compile, torch.func, meta): enough for logits below ten


def softmax_average(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_weights: Tensor | None = None,
    *,
    scale: float | Tensor = 1.0,
) -> Tensor:
    """The average of the values under doubly stochastic weights, (..., n, v), for as many queries as keys.

    FloatingPointError if the weights are not balanced to the rounding of the logits after `MAX_SWEEPS`.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]], dtype=torch.float64)
        >>> weights = softmax_average(x, x, torch.eye(3, dtype=torch.float64), scale=5.0)
        >>> weights.sum(0)  # the columns sum to one too
        tensor([1.0000, 1.0000, 1.0000], dtype=torch.float64)
    """
    log_w = keys.new_full(keys.shape[-2:-1], -math.log(keys.shape[-2])) if log_weights is None else log_weights
    g = Balance(scale * queries, keys, log_w, is_symmetric=queries is keys).solve()
    return dense.softmax_average(queries, keys, values, g.to(keys.dtype) + log_w, scale=scale)


class Balance:
    """The equation f = step(f) of balanced weights, for logits <q_i, k_j> and log-weights that are normalised.

    Args:
        q, k: (..., n, k).
        log_w: (..., n).
        is_symmetric: whether <q_i, k_j> = <q_j, k_i>.
    """

    def __init__(self, q: Tensor, k: Tensor, log_w: Tensor, is_symmetric: bool) -> None:
        self.can_read = can_read(q, k, log_w)
        self.has_gradient = self.can_read and torch.is_grad_enabled() and any(z.requires_grad for z in (q, k, log_w))
        self.eps = 16 * torch.finfo(torch.float64).eps if q.dtype == torch.float64 else torch.finfo(torch.float32).eps
        self.q, self.k, self.log_w = (z.double() for z in (q, k, log_w)) if self.can_read else (q, k, log_w)
        self.is_symmetric = is_symmetric

    def balance_columns(self, f: Tensor) -> Tensor:
        """g (..., n) that balances every column, given f."""
        return -dense.average_and_log_sum(self.k, self.q, self.q[..., :1], f + self.log_w)[1]

    def step(self, f: Tensor) -> Tensor:
        """f after a sweep, or the mean of f and half a sweep."""
        g = self.balance_columns(f)
        if self.is_symmetric:
            return (f + g) / 2
        return -dense.average_and_log_sum(self.q, self.k, self.k[..., :1], g + self.log_w)[1]  # balances every row

    def solve(self) -> Tensor:
        """g (..., n) of the module's text."""
        f = torch.zeros_like(self.q[..., 0] + self.k[..., 0] + self.log_w).detach()
        if self.can_read:
            with torch.no_grad():
                f = self._iterate(f)
        else:
            for _ in range(BLIND_SWEEPS):
                f = self.step(f)
        if self.has_gradient:
            f, fixed = self.step(f), f
            f.register_hook(lambda gradient: self._solve_transposed(gradient, fixed))
        return f if self.is_symmetric else self.balance_columns(f)

    def _iterate(self, f: Tensor) -> Tensor:
        """f after steps until its rows sum to one, up to what rounding of the logits changes."""
        w = self.log_w.exp()
        tolerance = self.eps * (1 + float((self.q.norm(dim=-1).amax(-1) * self.k.norm(dim=-1).amax(-1)).amax()))
        for _ in range(MAX_SWEEPS):
            f, previous = self.step(f), f
            error = float((w * (previous - f).expm1().where(w > 0, 0.0).abs()).sum(-1).amax())
            if error <= tolerance:
                return f
        raise FloatingPointError(
            f"the row sums of Sinkhorn attention are off by {error:.1e} after {MAX_SWEEPS} sweeps; use a smaller beta."
        )

    def _solve_transposed(self, gradient: Tensor | None, f: Tensor) -> Tensor | None:
        """(I - J)^-T gradient for the derivative J of the step at its fixed point f: u = gradient + J^T u, iterated.

        An average over rows or columns is self-adjoint for the weights w, so that J^T (w z) = w J z.
        """
        if gradient is None:
            return None
        if torch.is_grad_enabled():
            raise NotImplementedError("Sinkhorn attention has no second derivatives; use torch.func.hessian.")
        w, g = self.log_w.exp(), f if self.is_symmetric else self.balance_columns(f)
        # A constant added to f changes no weight, so the gradients sum to zero up to rounding.
        b = gradient - w * gradient.sum(-1, keepdim=True)
        b = z = torch.where(w > 0, b / w, 0.0)
        for _ in range(MAX_SWEEPS):
            mean = dense.softmax_average(self.k, self.q, z[..., None], f + self.log_w)
            if self.is_symmetric:
                image = (z - mean[..., 0]) / 2
            else:
                image = dense.softmax_average(self.q, self.k, mean, g + self.log_w)[..., 0]
            z, previous = b + image, z
            if bool((z - previous).abs().amax() <= self.eps * z.abs().amax()):
                break
        return w * z
