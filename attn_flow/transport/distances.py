"""Wasserstein distances between clouds of tokens, with their error, plan and potentials.

    W_p(a, b) = ( minimum over couplings P of sum_ij P_ij c(x_i, y_j)^p )^{1/p},   c = |x - y| or the geodesic distance

Every distance is returned with an error that was proved, and within a relative tolerance, or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attn_flow.base import checks
from attn_flow.measures.cloud import Cloud, as_cloud
from attn_flow.transport.exact import SOLVERS, exact_distance
from attn_flow.transport.ground_cost import GroundCost
from attn_flow.transport.pair import Pair, Solution
from attn_flow.transport.plan import Plan
from attn_flow.transport.sinkhorn import sinkhorn_distance
from attn_flow.transport.sliced import Sliced, sliced_distance

MAX_P = 200  # costs c^p leave the range of float64 beyond
METHODS = ("auto", *SOLVERS, "sinkhorn", "sliced")
# Errors below these parts of the size of the clouds, RESOLUTION and ROUNDING^{1/p}, are rounding errors of the costs.
RESOLUTION, ROUNDING = 1e-6, 1e-13


class CertificateError(ValueError):
    """The error that was proved for a distance is larger than the tolerance rtol."""


@dataclass(frozen=True, eq=False, repr=False)
class Transport:
    """Distances W_p of a batch of pairs of clouds, with |value - W_p| <= error.

    Args:
        value: the distances, of the batch shape, in the units of the tokens.
        error: proved error bounds of the batch shape, up to rounding; for the method "sliced", which is another
            distance, the standard error of its random directions.
        method: the name of the solver, joined by "+" if the pairs of a batch have different ones.
        p, cost: as in `wasserstein`.
        plan: a sparse tensor (..., n, m) whose row sums are the probabilities of the first cloud and whose column
            sums are those of the second; None for "sinkhorn" and "sliced", which have no sparse plan.
        potentials: dual potentials u (..., n) and v (..., m) with u_i + v_j <= c(x_i, y_j)^p. They prove the lower
            bound <a, u> + <b, v> of W_p^p, and are its derivatives in the probabilities. Padding has zeros. None for
            "assignment", "circle" and "sliced".

    Example:
        >>> result = solve(torch.tensor([[0.0], [1.0]]), torch.tensor([[2.0], [3.0]]))
        >>> result
        Transport(2 +- 0, method='line', p=2, euclidean)
        >>> result.plan.to_dense()
        tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]])
    """

    value: Tensor
    error: Tensor
    method: str
    p: float
    cost: str
    plan: Tensor | None = None
    potentials: tuple[Tensor, Tensor] | None = None

    def __repr__(self) -> str:
        if self.value.ndim:
            numbers = f"value of shape {tuple(self.value.shape)}, error up to {float(self.error.max()):.2g}"
        else:
            numbers = f"{self.value.item():.6g} +- {self.error.item():.2g}"
        return f"Transport({numbers}, method={self.method!r}, p={self.p:g}, {self.cost})"


def wasserstein(
    a: Tensor | Cloud,
    b: Tensor | Cloud,
    p: float = 2,
    *,
    cost: str = "euclidean",
    method: str | Sliced = "auto",
    rtol: float = 0.01,
) -> Tensor:
    """The Wasserstein distance W_p between two clouds of tokens.

    Args:
        a, b: tokens (..., n, d) and (..., m, d), or `Cloud`s with weights and masks. Leading axes broadcast.
        p: the exponent, 1 <= p <= 200.

    Other arguments:
        cost: "euclidean", or "geodesic" for arc lengths on the sphere around the origin that the tokens lie on.
        method: "auto", "line", "circle", "assignment", "shortlist", "simplex", "sinkhorn" or "sliced", see `solve`.
        rtol: the largest relative error; a distance that is not proved to be within it raises `CertificateError`.

    Returns:
        The distances, of the batch shape, in the units and the dtype of the tokens. They are differentiable in the
        tokens and the weights.

    Example:
        >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
        >>> wasserstein(x, x + torch.tensor([3.0, 4.0]))  # a translation by 5
        tensor(5.)
        >>> wasserstein(Cloud(x, weights=torch.tensor([1.0, 0.0])), x, p=1)  # half of the mass moves by 1
        tensor(0.5000)
    """
    return solve(a, b, p, cost=cost, method=method, rtol=rtol, with_plan=False).value


def solve(
    a: Tensor | Cloud,
    b: Tensor | Cloud,
    p: float = 2,
    *,
    cost: str = "euclidean",
    method: str | Sliced = "auto",
    rtol: float = 0.01,
    with_plan: bool = True,
) -> Transport:
    """W_p between two clouds of tokens, with its proved error, the optimal plan and the dual potentials.

    Methods:
        "line": d = 1, and "circle": d = 2 with cost "geodesic"; exact, in time n log n.
        "assignment": exact for up to 5,000 tokens of equal weight in both clouds.
        "simplex": exact for up to 5,000 tokens of any weights, by the network simplex.
        "shortlist": a linear program over few pairs, in memory linear in n, with a proved error of 1e-6 of the
            distance, or of the rounding error of the costs. 100,000 tokens take minutes.
        "sinkhorn": the Sinkhorn divergence of geomloss with proved bounds, for p = 2 and cost "euclidean", on the
            device of the tokens and for up to 5,000 of them. Its blur decreases until the error is within rtol.
        "sliced" or `Sliced(...)`: the p-th mean of W_p over random lines, which is another distance.
        "auto": the fastest exact method. It and "shortlist" merge coincident tokens (1e-10 of the size of the clouds)
            first, and count how far they moved as an error.

    "simplex" and "shortlist", and gradients in the weights, need the optional package POT; without it "auto" takes
    "assignment" for all clouds of equal weights. All methods but "sinkhorn" copy tokens of a CUDA device to the CPU.

    Args:
        a, b, p, cost, rtol: as in `wasserstein`. A distance below 1e-6 of the size of the clouds is rounding, and is
            returned with its error whatever rtol is.
        method: one of the above.
        with_plan: whether to compute the plan and the potentials.

    Returns:
        A `Transport` with value, error, plan and potentials.

    Example:
        >>> solve(torch.zeros(1, 1), torch.ones(1, 1), p=1)
        Transport(1 +- 0, method='line', p=1, euclidean)
    """
    if not 1 <= p <= MAX_P:
        raise ValueError(f"p = {p}, expected a number from 1 to {MAX_P}.")
    checks.require_choice("cost", cost, ("euclidean", "geodesic"))
    checks.require_positive(rtol=rtol)
    if not isinstance(method, Sliced):
        checks.require_choice("method", method, METHODS)
        method = Sliced() if method == "sliced" else method
    first, second = as_cloud(a, "a"), as_cloud(b, "b")
    x, y = first.x, second.x
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(f"tokens have shapes {tuple(x.shape)} and {tuple(y.shape)}, expected the same dimension d.")
    checks.require_same_device("b", y, "a", x)
    if not torch.compiler.is_compiling() and not checks.can_read(x, y):
        raise ValueError(
            "distances need values, which meta tensors and torch.func transforms do not have; use autograd."
        )
    batch = checks.broadcast_axes({"a": x.shape[:-2], "b": y.shape[:-2]})
    ground_cost = GroundCost(float(p), cost)
    pairs = [Pair(*arrays, ground_cost) for arrays in zip(*_measures(first, batch), *_measures(second, batch))]
    solutions = [
        _solve_pair(pair, method, rtol, with_plan, f"pair {k} of {len(pairs)}") for k, pair in enumerate(pairs)
    ]
    dtype, device = torch.promote_types(x.dtype, y.dtype), x.device
    to_batch = lambda z: z.reshape((*batch, *z.shape[1:])).to(device, dtype)
    plan = potentials = None
    plans = [solution.plan for solution in solutions if solution.plan is not None]
    if with_plan and plans:
        plan = _plan_tensor(plans, (*batch, x.shape[-2], y.shape[-2])).to(device, dtype)
    us_and_vs = [solution.potentials for solution in solutions if solution.potentials is not None]
    if with_plan and us_and_vs:
        u, v = (to_batch(torch.stack(z))[..., None] for z in zip(*us_and_vs))
        potentials = first.zero_padding(u)[..., 0], second.zero_padding(v)[..., 0]
    return Transport(
        value=to_batch(torch.stack([solution.value for solution in solutions])),
        error=to_batch(torch.tensor([solution.error for solution in solutions], dtype=torch.float64)),
        method="+".join(dict.fromkeys(solution.method for solution in solutions)),
        p=float(p),
        cost=cost,
        plan=plan,
        potentials=potentials,
    )


def _measures(cloud: Cloud, batch: torch.Size) -> tuple[Tensor, Tensor]:
    """Tokens (B, n, d) and probabilities (B, n) in float64 for all B pairs of the batch; padding has no mass."""
    n, d = cloud.x.shape[-2:]
    x, a = cloud.filled().double(), cloud.probabilities.double()
    a = a / a.sum(-1, keepdim=True)
    return x.expand(*batch, n, d).reshape(-1, n, d), a.expand(*batch, n).reshape(-1, n)


def _solve_pair(pair: Pair, method: str | Sliced, rtol: float, with_potentials: bool, name: str) -> Solution:
    """The distance of a pair; `CertificateError` unless its error is within rtol or a rounding error."""
    if isinstance(method, Sliced):
        return sliced_distance(pair.cpu(), method)
    if method == "sinkhorn":
        solution = sinkhorn_distance(pair, rtol)
    else:
        solution = exact_distance(pair.cpu(), method, with_potentials)
    p, value, error = pair.cost.p, solution.value.item(), solution.error
    if error > max(rtol * value, max(RESOLUTION, ROUNDING ** (1 / p)) * pair.size()):
        raise CertificateError(
            f"method {solution.method!r} proves W_{p:g} = {value:.6g} of {name} only up to {error:.3g}, more than "
            f"rtol = {rtol:g} of it. Use a larger rtol, a smaller p, an exact method ('auto', 'simplex') instead of "
            "'sinkhorn', or remove points far from all others."
        )
    return solution


def _plan_tensor(plans: list[Plan], shape: tuple[int, ...]) -> Tensor:
    """The plans of all pairs as one sparse tensor of this shape, (..., n, m)."""
    pair = np.repeat(np.arange(len(plans)), [len(plan.mass) for plan in plans])
    place = np.unravel_index(pair, (1, *shape[:-2]))[1:]
    i, j = np.concatenate([plan.i for plan in plans]), np.concatenate([plan.j for plan in plans])
    indices = torch.from_numpy(np.stack([*place, i, j]))
    mass = torch.from_numpy(np.concatenate([plan.mass for plan in plans]))
    return torch.sparse_coo_tensor(indices, mass, shape, check_invariants=False).coalesce()
