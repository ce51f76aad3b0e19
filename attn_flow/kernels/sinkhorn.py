"""Doubly stochastic attention (Sander et al., arXiv 2110.11773): averages under balanced weights.

The weights P_ij = exp(scale <q_i, k_j> + f_i + g_j) w_j have sum_j P_ij = 1 for every row and sum_i w_i P_ij = w_j for
every column. A sweep of Sinkhorn's algorithm chooses g so that the columns are balanced and then f for the rows.
Given g, f is what a softmax over the keys divides by. So balanced attention is softmax attention with the log-weights
g + log w.

Sweeps contract by the second eigenvalue of J, which averages over the rows of each column and then over the columns of
each row. It is close to 1 for large logits. Each sweep is therefore followed by a Newton step, (I - J)^{-1} times the
step of the sweep: as a matrix for small clouds, by conjugate gradients for large ones. Large logits are reached by
doubling small ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_flow.base.checks import can_read
from attn_flow.kernels import dense

MAX_STEPS = 200  # sweeps with their Newton steps
MAX_MATRIX = 2048  # tokens up to which a Newton step solves an n x n system
MAX_GRADIENT_STEPS = 200  # steps of conjugate gradients beyond
BLIND_SWEEPS = 100  # sweeps without Newton steps where values cannot be read (torch.compile, torch.func, meta)
WARM_LOGIT, WARM_ERROR = 4.0, 1e-2  # logits are doubled from this size on, once their row sums are right to this error


class NotBalanced(FloatingPointError):
    """Sinkhorn's algorithm did not converge."""


def softmax_average(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_weights: Tensor | None = None,
    *,
    scale: float | Tensor = 1.0,
) -> Tensor:
    """The average of the values under doubly stochastic weights, (..., n, v), for as many queries as keys.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]], dtype=torch.float64)
        >>> weights = softmax_average(x, x, torch.eye(3, dtype=torch.float64), scale=5.0)
        >>> weights.sum(0)  # the columns sum to one too
        tensor([1.0000, 1.0000, 1.0000], dtype=torch.float64)
    """
    queries = scale * queries
    log_w = keys.new_full(keys.shape[-2:-1], -math.log(keys.shape[-2])) if log_weights is None else log_weights
    return dense.softmax_average(queries, keys, values, potential(queries, keys, log_w) + log_w)


def potential(queries: Tensor, keys: Tensor, log_w: Tensor) -> Tensor:
    """g (..., n) of the module's text for logits <q_i, k_j> and log-weights (..., n) whose exponentials sum to one.

    The columns are balanced exactly. The error of the rows, sum_i w_i |sum_j P_ij - 1|, is brought down to the rounding
    of the logits; otherwise `NotBalanced` is raised. Where values cannot be read, a fixed number of sweeps is made,
    which is enough for logits below ten.
    """
    shape = torch.broadcast_shapes(queries.shape[:-1], keys.shape[:-1], log_w.shape)
    if not can_read(queries, keys, log_w):
        logits, f = Logits(queries, keys, log_w), torch.zeros(shape, dtype=queries.dtype, device=queries.device)
        for _ in range(BLIND_SWEEPS):
            f = logits.sweep(f)
        return logits.balance_columns(f)
    q, k = (z.double().expand(*shape, z.shape[-1]).reshape(-1, *z.shape[-2:]) for z in (queries, keys))
    logits = Logits(q, k, log_w.double().expand(shape).reshape(-1, shape[-1]))
    with torch.no_grad():
        f = _balance(logits, queries.dtype)
    if torch.is_grad_enabled() and any(z.requires_grad for z in (queries, keys, log_w)):
        f = _with_implicit_gradient(logits, f)
    return logits.balance_columns(f).reshape(shape).to(queries.dtype)


@dataclass(frozen=True, eq=False)
class Logits:
    """Logits scale <q_i, k_j> of tokens with weights w, and averages under their exponentials, in linear memory.

    Args:
        q, k: (clouds, n, k).
        log_w: (clouds, n).
    """

    q: Tensor
    k: Tensor
    log_w: Tensor
    scale: float = 1.0

    def over_rows(self, f: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The average of v (..., n, c) over the rows of every column, and the log-sum (..., n)."""
        return dense.average_and_log_sum(self.k, self.q, v, f + self.log_w, scale=self.scale)

    def over_columns(self, g: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The average of v (..., n, c) over the columns of every row, and the log-sum (..., n)."""
        return dense.average_and_log_sum(self.q, self.k, v, g + self.log_w, scale=self.scale)

    def balance_columns(self, f: Tensor) -> Tensor:
        """g (..., n) that balances every column, given f."""
        return -self.over_rows(f, self.q[..., :1])[1]

    def balance_rows(self, g: Tensor) -> Tensor:
        """f (..., n) that balances every row, given g."""
        return -self.over_columns(g, self.k[..., :1])[1]

    def sweep(self, f: Tensor) -> Tensor:
        """f after the columns and then the rows are balanced."""
        return self.balance_rows(self.balance_columns(f))

    def J(self, f: Tensor, g: Tensor, z: Tensor) -> Tensor:
        """z (..., n) averaged over the rows of each column, and then over the columns of each row."""
        return self.over_columns(g, self.over_rows(f, z[..., None])[0])[0][..., 0]


def _balance(logits: Logits, dtype: torch.dtype) -> Tensor:
    """f (clouds, n) with row sums right to rounding."""
    is_token = logits.log_w > -math.inf
    q, k = (z.norm(dim=-1).where(is_token, 0.0).amax(-1) for z in (logits.q, logits.k))
    largest = float((q * k).amax())
    eps = 16 * torch.finfo(torch.float64).eps if dtype == torch.float64 else torch.finfo(torch.float32).eps
    tolerance = eps * (1 + largest)  # rounding logits of this size changes the row sums by that much
    doublings = math.ceil(math.log2(max(1.0, largest / WARM_LOGIT)))
    f = torch.zeros_like(logits.log_w)
    for s in range(doublings, 0, -1):
        f = 2 * _newton(replace(logits, scale=2.0**-s), f, WARM_ERROR)[0]
    f, error = _newton(logits, f, tolerance)
    if not error <= tolerance:
        raise NotBalanced(
            f"the row sums of Sinkhorn attention are off by {error:.1e} after {MAX_STEPS} steps; use a smaller beta."
        )
    return f


def _newton(logits: Logits, f: Tensor, tolerance: float) -> tuple[Tensor, float]:
    """f after sweeps and Newton steps until the row sums are right to the tolerance, and their error.

    A Newton step z is shortened by log(1 + width) / width, width = max z - min z, which generalised self-concordance
    proves to decrease the dual function: no line search is needed.
    """
    w, error, previous = logits.log_w.exp(), math.inf, math.inf
    for _ in range(MAX_STEPS):
        g = logits.balance_columns(f)
        swept = logits.balance_rows(g)
        row_sums = (f - swept).exp().where(w > 0, 1.0)
        previous, error = error, float((w * (row_sums - 1).abs()).sum(-1).amax())
        if error <= tolerance:
            break
        if error <= previous / 4:  # sweeps are fast enough
            f = swept
            continue
        b, mass = 1 / row_sums - 1, w * row_sums
        accuracy = max(min(0.1, error), 0.3 * tolerance / error)
        z = _solve(logits, f, g, b, mass, ridge=0.01 * min(1.0, error), accuracy=accuracy)
        width = (z.amax(-1) - z.amin(-1))[:, None]
        f = f + z * torch.where(width > 0, width.log1p() / width, 1.0)
    return f, error


def _solve(logits: Logits, f: Tensor, g: Tensor, b: Tensor, mass: Tensor, ridge: float, accuracy: float) -> Tensor:
    """z (clouds, n) with ((1 + ridge) I - J) z = b.

    J is self-adjoint for the weights `mass`, and sum_i mass_i b_i = 0. The ridge keeps directions that hardly change
    the weights from delaying the others.
    """
    if b.shape[-1] > MAX_MATRIX:
        return _conjugate_gradients(logits, f, g, b, mass, ridge, accuracy)
    clouds = zip(logits.q, logits.k, logits.log_w, f, g, b, mass)
    return torch.stack([_solve_matrix(*cloud, scale=logits.scale, ridge=ridge) for cloud in clouds])


def _solve_matrix(
    q: Tensor, k: Tensor, log_w: Tensor, f: Tensor, g: Tensor, b: Tensor, mass: Tensor, *, scale: float, ridge: float
) -> Tensor:
    """z (n,) of one cloud from the symmetric matrix (1 + ridge) I - N N^T + sqrt(mass) sqrt(mass)^T.

    N_ij^2 is the share of j in row i times the share of i in column j; the last term lifts the null vector sqrt(mass).
    """
    scores, is_token = scale * (q @ k.mT), mass > 0
    by_row = (scores + (g + log_w)[None, :]).log_softmax(-1)
    by_column = (scores + (f + log_w)[:, None]).log_softmax(-2)
    N = ((by_row + by_column) / 2).exp()
    root = mass.where(is_token, 1.0).sqrt()
    null = (root * is_token)[:, None]
    diagonal = 1 + max(ridge, len(b) * torch.finfo(b.dtype).eps)
    A = diagonal * torch.eye(len(b), dtype=b.dtype, device=b.device) - N @ N.mT + null @ null.mT
    return (torch.linalg.solve(A, null * b[:, None])[:, 0] / root).where(is_token, 0.0)


def _conjugate_gradients(
    logits: Logits, f: Tensor, g: Tensor, b: Tensor, mass: Tensor, ridge: float, accuracy: float
) -> Tensor:
    """z (clouds, n), with a residual that is `accuracy` times as long as b."""

    def dot(u: Tensor, v: Tensor) -> Tensor:
        return (mass * u * v).sum(-1, keepdim=True)

    def centre(u: Tensor) -> Tensor:
        return u - dot(u, torch.ones_like(u)) / mass.sum(-1, keepdim=True)

    residual = direction = centre(b)
    z, square = torch.zeros_like(b), dot(residual, residual)
    goal = accuracy**2 * square
    for _ in range(MAX_GRADIENT_STEPS):
        image = centre((1 + ridge) * direction - logits.J(f, g, direction))
        curvature = dot(direction, image)
        is_open = (square > goal) & (curvature > 0)
        if not bool(is_open.any()):
            break
        length = torch.where(is_open, square / curvature, 0.0)
        z, residual = z + length * direction, residual - length * image
        square, before = dot(residual, residual), square
        direction = torch.where(is_open, residual + square / before * direction, 0.0)
    return z


def _with_implicit_gradient(logits: Logits, f: Tensor) -> Tensor:
    """f with the gradient of the solution of f = sweep(f): one sweep is differentiated, and solved for (I - J)^-T."""
    with torch.no_grad():
        g, w = logits.balance_columns(f), logits.log_w.exp()

    def solve_transposed(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        if torch.is_grad_enabled():
            raise NotImplementedError("Sinkhorn attention has no second derivatives; use torch.func.hessian.")
        # A constant added to f changes no weight, so the gradients sum to zero up to rounding.
        b = torch.where(w > 0, gradient / w - gradient.sum(-1, keepdim=True) / w.sum(-1, keepdim=True), 0.0)
        return w * _solve(logits, f, g, b, w, ridge=0.0, accuracy=1e-10)

    swept = logits.sweep(f)
    swept.register_hook(solve_transposed)
    return swept
