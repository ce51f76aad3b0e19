"""Doubly stochastic attention: the potential that balances a matrix of scores (Sander et al., arXiv 2110.11773).

Sinkhorn's sweeps f -> g -> f contract by the second eigenvalue of J, "to the columns and back to the rows", which is
next to 1 once scores are large. So scores start small and are doubled, and where sweeps are slow Newton's method on
the dual takes over: a sweep steps by b, Newton by (I - J)^{-1} b.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_flow.averages import dense
from attn_flow.base import checks

STEPS, PATIENCE = 100, 20  # sweeps and Newton steps in all, and those in which the error has to halve
WARM_RANGE, WARM_ERROR = 4.0, 1e-2  # scores to start from, and how well they are balanced before they are doubled
SLOW = 0.5  # of the error left by a sweep: from here on Newton
RIDGE = 0.01  # added to I - J, times the error: directions that hardly move the plan do not hold up the others
DENSE = 2048  # tokens up to which Newton's system is solved as a matrix where conjugate gradients are slow
CONJUGATE_STEPS, UNSEEN_STEPS = 200, 20  # beyond, and how many an accelerator takes between two looks
UNSEEN_SWEEPS = 100  # where values cannot be looked at (compiling, vmap, meta)


class NotBalanced(FloatingPointError):
    """Sweeps and Newton steps did not end."""


def potential(q: Tensor, k: Tensor, log_w: Tensor) -> Tensor:
    """g (..., n) such that P_ij = e^{<q_i,k_j> + f_i + g_j} w_j has sum_j P_ij = 1 and sum_i w_i P_ij = w_j.

    f_i is then what a row softmax divides by: attention with the key bias g + log w is the balanced one. Columns are
    balanced exactly; the error of the rows, delta = sum_i w_i |sum_j P_ij - 1|, bounds that of the plan for any scores,

        sum_ij w_i |P_ij - P*_ij| <= (n - 1) delta,

    because the plan follows its marginals like the currents in a network of conductances w_i P_ij, which are an average
    of currents along spanning trees. delta is brought down to the rounding of the scores, or it raises. Inside
    torch.func's transforms, which show no values, there are UNSEEN_SWEEPS instead: enough while scores are below ten.
    """
    shape = torch.broadcast_shapes(q.shape[:-1], k.shape[:-1], log_w.shape)
    if not checks.can_look(q, k, log_w):
        if not (q.is_meta or torch.compiler.is_compiling()):
            warnings.warn(
                f"Sinkhorn attention inside a transform of torch.func: {UNSEEN_SWEEPS} sweeps whose error nobody "
                "looks at, 1e-4 where scores beta <q, k> reach 10 and .1 where they reach 40. Plain gradients and dual "
                "numbers (torch.autograd.forward_ad) are checked.",
                stacklevel=2,
            )
        scores, f = Scores(q, k, log_w), torch.zeros(shape, dtype=q.dtype, device=q.device)
        for _ in range(UNSEEN_SWEEPS):
            f = scores.sweep(f)
        return scores.columns(f)
    q_flat, k_flat = (z.double().expand(*shape, z.shape[-1]).reshape(-1, *z.shape[-2:]) for z in (q, k))
    scores = Scores(q_flat, k_flat, log_w.double().expand(shape).reshape(-1, shape[-1]))
    with torch.no_grad():
        f = _balanced(scores, q.dtype)
    if torch.is_grad_enabled() and any(z.requires_grad for z in (q, k, log_w)):
        f = _with_gradient(scores, f)
    return scores.columns(f).reshape(shape).to(q.dtype)


@dataclass(frozen=True)
class Scores:
    """Logits scale <q_i, k_j> of tokens with weights w, and averages under their exponentials, in linear memory."""

    q: Tensor  # (..., n, k)
    k: Tensor
    log_w: Tensor  # (..., n)
    scale: float = 1.0

    def columns(self, f: Tensor) -> Tensor:
        """g that balances every column, given f."""
        return -self._over_rows(f, self.q[..., :1])[1]

    def rows(self, g: Tensor) -> Tensor:
        """f that balances every row, given g."""
        return -self._over_columns(g, self.k[..., :1])[1]

    def sweep(self, f: Tensor) -> Tensor:
        return self.rows(self.columns(f))

    def there_and_back(self, f: Tensor, g: Tensor, z: Tensor) -> Tensor:
        """J z: z (..., n) averaged over the rows of each column, and this over the columns of each row."""
        return self._over_columns(g, self._over_rows(f, z[..., None])[0])[0][..., 0]

    def _over_rows(self, f: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return dense.softmax_and_log_sum(self.k, self.q, v, key_bias=f + self.log_w, scale=self.scale)

    def _over_columns(self, g: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return dense.softmax_and_log_sum(self.q, self.k, v, key_bias=g + self.log_w, scale=self.scale)

    def __getitem__(self, clouds: Tensor | slice) -> Scores:
        return replace(self, q=self.q[clouds], k=self.k[clouds], log_w=self.log_w[clouds])

    @property
    def largest(self) -> float:
        """A bound of |<q_i, k_j>| over tokens that have weight."""
        q, k = (dense.lengths(z.detach()).where(self.log_w > -math.inf, 0.0).amax(-1) for z in (self.q, self.k))
        return float((q * k).amax())


def _balanced(scores: Scores, dtype: torch.dtype) -> Tensor:
    """f with rows right to rounding; doubled scores start from twice the potential."""
    f, largest = torch.zeros_like(scores.log_w), scores.largest
    # What rounding scores of this size to dtype does to sums of their exponentials; everything here is float64.
    eps = 16 * torch.finfo(dtype).eps if dtype == torch.float64 else torch.finfo(torch.float32).eps
    tol = eps * (1 + largest)
    doublings = math.ceil(math.log2(max(1.0, largest / WARM_RANGE)))
    for s in range(doublings, 0, -1):
        f = 2 * _refined(replace(scores, scale=2.0**-s), f, WARM_ERROR)[0]
    f, error, steps = _refined(scores, f, tol)
    if not error <= tol:
        raise NotBalanced(
            f"Sinkhorn's row sums are off by {error:.1e} after {steps} steps, expected {tol:.1e}; use a smaller beta."
        )
    return f


def _refined(scores: Scores, f: Tensor, tol: float) -> tuple[Tensor, float, int]:
    """f, its error and the steps taken until tol, STEPS or standstill.

    Newton's direction z is shortened by log(1 + width)/width, which the third derivative allows (generalised
    self-concordance), so that there is no line search. While z is long the error need not fall: a little mass that has
    to cross a barrier is missing until f has walked all the way.
    """
    w, newton, errors, width = scores.log_w.exp(), False, [math.inf], torch.zeros_like(scores.log_w[:, :1])
    while len(errors) <= STEPS:
        g = scores.columns(f)
        after = scores.rows(g)
        sums = (f - after).exp().where(w > 0, 1.0)
        delta = (w * (sums - 1).abs()).sum(-1)
        error, longest = torch.stack([delta.amax(), width.amax()]).tolist()
        errors.append(error)
        stands = longest <= 1 and len(errors) > PATIENCE and errors[-1] > errors[-PATIENCE] / 2
        if errors[-1] <= tol or stands:
            break
        newton = newton or errors[-1] > SLOW * errors[-2]
        if newton:
            open_ = _which(delta > tol)
            b, m = 1 / sums[open_] - 1, (w * sums)[open_]
            rtol = max(min(0.1, errors[-1]), 0.3 * tol / errors[-1])
            z = _solved(scores[open_], f[open_], g[open_], b, m, RIDGE * errors[-1], rtol)
            width = (z.amax(-1) - z.amin(-1))[:, None]
            z = z * torch.where(width > 0, width.log1p() / width, 1.0)
            f = f.index_add(0, open_, z) if isinstance(open_, Tensor) else f + z
        else:
            f = after
    return after, errors[-1], len(errors) - 1


def _which(clouds: Tensor) -> Tensor | slice:
    """Those of the clouds (c,) that are asked for; on an accelerator, which would have to be waited for, all."""
    return clouds.nonzero()[:, 0] if clouds.device.type == "cpu" else slice(None)


def _solved(scores: Scores, f: Tensor, g: Tensor, b: Tensor, m: Tensor, ridge: float, rtol: float) -> Tensor:
    """z with ((1 + ridge) I - J) z = b; J is self-adjoint for the weights m, and sum_i m_i b_i = 0."""
    n = b.shape[-1]
    if n > DENSE:
        return _conjugate_gradients(scores, f, g, b, m, ridge, rtol, CONJUGATE_STEPS)[0]
    if b.device.type == "cpu":
        z, left = _conjugate_gradients(scores, f, g, b, m, ridge, rtol, n // 32)
        parts = left.nonzero()[:, 0]
    else:  # a matrix is solved without looking
        z, parts = torch.empty_like(b), torch.arange(len(b), device=b.device)
    for part in parts.split(DENSE**2 // n**2):
        z[part] = _solved_as_matrix(scores[part], f[part], g[part], b[part], m[part], ridge)
    return z


def _solved_as_matrix(scores: Scores, f: Tensor, g: Tensor, b: Tensor, m: Tensor, ridge: float) -> Tensor:
    """Symmetric: I - N N^T, N_ij^2 = (share of j in row i)(share of i in column j), its null vector sqrt(m) lifted."""
    n, logits = b.shape[-1], scores.scale * (scores.q @ scores.k.mT)
    row = (logits + (g + scores.log_w)[:, None, :]).log_softmax(-1)
    column = (logits + (f + scores.log_w)[:, :, None]).log_softmax(-2)
    there = m > 0
    length = m.where(there, 1.0).sqrt()[..., None]  # the square root of 0 has no derivative, forward or backward
    N, root = ((row + column) / 2).exp(), length * there[..., None]
    diagonal = (1 + max(ridge, n * torch.finfo(b.dtype).eps)) * torch.eye(n, dtype=b.dtype, device=b.device)
    z = torch.linalg.solve(diagonal - N @ N.mT + root @ root.mT, root * b[..., None]) / length
    return z[..., 0].where(there, 0.0)


def _conjugate_gradients(
    scores: Scores, f: Tensor, g: Tensor, b: Tensor, m: Tensor, ridge: float, rtol: float, steps: int
) -> tuple[Tensor, Tensor]:
    """z, and in which clouds more steps were needed."""

    def dot(u: Tensor, v: Tensor) -> Tensor:
        return (m * u * v).sum(-1, keepdim=True)

    def centred(u: Tensor) -> Tensor:
        return u - dot(u, torch.ones_like(u)) / m.sum(-1, keepdim=True)

    r = p = centred(b)
    z, rr = torch.zeros_like(b), dot(r, r)
    goal = rtol**2 * rr
    unseen = 1 if b.device.type == "cpu" else UNSEEN_STEPS
    for step in range(1, steps + 1):
        Ap = centred((1 + ridge) * p - scores.there_and_back(f, g, p))
        curvature = dot(p, Ap)
        going = (rr > goal) & (curvature > 0)
        if step % unseen == 0 and not bool(going.any()):
            break
        length = torch.where(going, rr / curvature, 0.0)
        z, r, before = z + length * p, r - length * Ap, rr
        rr = dot(r, r)
        p = torch.where(going, r + rr / before * p, 0.0)
    return z, (rr > goal)[:, 0]


def _with_gradient(scores: Scores, f: Tensor) -> Tensor:
    """f = sweep(f) with the gradient of its solution: one sweep is differentiated, dL/df goes through (I - J)^{-T}."""
    with torch.no_grad():
        g, w = scores.columns(f), scores.log_w.exp()

    def through_the_fixed_point(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # of an output that nothing depends on
            return None
        if torch.is_grad_enabled():
            raise NotImplementedError("Sinkhorn attention has no second derivatives here; torch.func has (hessian).")
        # A constant added to f changes no plan, so gradients sum to 0: what is left of a sum is rounding.
        b = torch.where(w > 0, gradient / w - gradient.sum(-1, keepdim=True) / w.sum(-1, keepdim=True), 0.0)
        z = _solved(scores, f, g, b, w, 0.0, 1e-10)
        missing = b - z + scores.there_and_back(f, g, z)
        if not bool(((w * missing**2).sum(-1) <= 1e-12 * (w * b**2).sum(-1)).all()):
            raise NotBalanced("the gradient of Sinkhorn attention did not converge; use a smaller beta.")
        return w * z

    after = scores.sweep(f)
    after.register_hook(through_the_fixed_point)
    return after
