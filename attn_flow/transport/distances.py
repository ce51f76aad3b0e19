"""Wasserstein distances between clouds of tokens, with their error, plan and potentials.

    W_p(a, b) = ( minimum over couplings P of sum_ij P_ij c(x_i, y_j)^p )^{1/p},   c = |x - y| or the geodesic distance

Every distance is returned with an error that was proved, and within a relative tolerance, or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attn_flow.base import checks
from attn_flow.measures.cloud import Cloud, as_cloud
from attn_flow.transport.exact import SOLVERS, CertificateError, Pair, Solution, solve_pair
from attn_flow.transport.ground_cost import GroundCost
from attn_flow.transport.sinkhorn import Sinkhorn, sinkhorn_distance
from attn_flow.transport.sliced import Sliced, sliced_distance

MAX_P = 200  # costs c^p leave the range of float64 beyond
METHODS = ("auto", *SOLVERS, "sinkhorn", "sliced")


@dataclass(frozen=True, eq=False, repr=False)
class Transport:
    """Distances W_p of a batch of pairs of clouds, with |value - W_p| <= error.

    Args:
        value: the distances, of the batch shape, in the units of the tokens.
        error: proved error bounds of the batch shape, up to rounding; for the method "sliced", which is another
            distance, the standard error of its random directions.
        method: the name of the solver, joined by "+" if the pairs of a batch have different ones. "merged " before it
            says that coincident points were merged first.
        p: the exponent.
        cost: "euclidean" or "geodesic".
        plan: a sparse tensor (..., n, m) whose row sums are the probabilities of the first cloud and whose column
            sums are those of the second; None for "sinkhorn" and "sliced", which have no sparse plan.
        potentials: dual potentials u (..., n) and v (..., m) with u_i + v_j <= c(x_i, y_j)^p. They prove the lower
            bound <a, u> + <b, v> of W_p^p, and are its derivatives in the probabilities. Padding has zeros. None for
            "circle" and "sliced", and where far points that both clouds share were set aside.

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
    method: str | Sinkhorn | Sliced = "auto",
    rtol: float = 0.01,
    merge_tol: float | None = None,
) -> Tensor:
    """The Wasserstein distance W_p between two clouds of tokens.

    Args:
        a, b: tokens (..., n, d) and (..., m, d), or `Cloud`s with weights and masks. Leading axes broadcast.
        p: the exponent, 1 <= p <= 200.

    Other arguments:
        cost: "euclidean", or "geodesic" for arc lengths on the sphere around the origin that the tokens lie on.
        method: "auto", or the name of a method as in `solve`.
        rtol: the largest relative error; a distance that is not proved to be within it raises `CertificateError`.
        merge_tol: merge tokens that are closer than this; see `solve`.

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
    return solve(a, b, p, cost=cost, method=method, rtol=rtol, merge_tol=merge_tol, with_plan=False).value


def solve(
    a: Tensor | Cloud,
    b: Tensor | Cloud,
    p: float = 2,
    *,
    cost: str = "euclidean",
    method: str | Sinkhorn | Sliced = "auto",
    rtol: float = 0.01,
    merge_tol: float | None = None,
    with_plan: bool = True,
) -> Transport:
    """W_p between two clouds of tokens, with its proved error, the optimal plan and the dual potentials.

    Methods:
        "line": d = 1, and "circle": d = 2 with cost "geodesic"; exact, in time n log n.
        "assignment": exact for up to 5,000 tokens of equal weight in both clouds.
        "simplex": exact for up to 5,000 tokens of any weights, by the network simplex.
        "shortlist": a linear program over few pairs, in memory linear in n, with a proved error of 1e-6 of the
            distance, or of the rounding error of the costs.
        "sinkhorn" or `Sinkhorn(...)`: the Sinkhorn divergence of geomloss with proved bounds, for p = 2 and cost
            "euclidean"; all pairs of a batch at once, on the device of the tokens.
        "sliced" or `Sliced(...)`: the p-th mean of W_p over random lines, which is another distance.
        "auto": the fastest exact method.

    "shortlist", and "simplex" beyond 300 x 300 tokens, need the optional package POT; without it "auto" takes
    "assignment" for all clouds of equal weights. All methods but "sinkhorn" copy tokens of a CUDA device to the CPU.

    Args:
        a, b, p, cost, rtol: as in `wasserstein`. A distance below 1e-6 of the size of the clouds is rounding, and is
            returned with its error whatever rtol is.
        method: one of the above.
        merge_tol: merge tokens that are closer than this; the distance that they move is part of the error. None
            merges coincident tokens (1e-10 of the size of the clouds) with the methods "auto" and "shortlist".
        with_plan: whether to compute the plan and the potentials.

    Returns:
        A `Transport` with value, error, plan and potentials.

    Example:
        >>> x = torch.tensor([[0.0], [1.0]])
        >>> solve(x, x + 0.25, p=1)
        Transport(0.25 +- 0, method='line', p=1, euclidean)
    """
    if not 1 <= p <= MAX_P:
        raise ValueError(f"p = {p}, expected a number from 1 to {MAX_P}.")
    checks.require_choice("cost", cost, ("euclidean", "geodesic"))
    checks.require_positive(rtol=rtol)
    if merge_tol is not None:
        checks.require_nonnegative(merge_tol=merge_tol)
    if isinstance(method, str):
        checks.require_choice("method", method, METHODS)
        method = Sinkhorn() if method == "sinkhorn" else Sliced() if method == "sliced" else method
    first, second = as_cloud(a, "a"), as_cloud(b, "b")
    x, y = first.x, second.x
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(f"tokens have shapes {tuple(x.shape)} and {tuple(y.shape)}, expected the same dimension d.")
    checks.require_same_device("b", y, "a", x)
    try:
        batch = torch.broadcast_shapes(_batch_shape(first), _batch_shape(second))
    except RuntimeError:
        shapes = tuple(_batch_shape(first)), tuple(_batch_shape(second))
        raise ValueError(f"a has batch shape {shapes[0]} and b {shapes[1]}, expected shapes that broadcast.") from None
    ground_cost = GroundCost(float(p), cost)
    dtype = torch.promote_types(x.dtype, y.dtype)
    measures: tuple[Tensor, ...] = (*_measure(first, batch), *_measure(second, batch))
    if isinstance(method, Sinkhorn):
        result = _solve_batch(measures, ground_cost, method, rtol, torch.promote_types(dtype, torch.float32))
    else:
        measures = tuple(z.cpu() for z in measures)
        result = _solve_pairs(measures, batch, ground_cost, method, rtol, merge_tol, with_plan)
    to_batch = lambda z: z.reshape((*batch, *z.shape[1:])).to(x.device, dtype)
    plan, potentials = result.plan, result.potentials
    return replace(
        result,
        value=to_batch(result.value),
        error=to_batch(result.error),
        plan=None if plan is None else plan.coalesce().to(x.device, dtype),
        potentials=None if potentials is None else (to_batch(potentials[0]), to_batch(potentials[1])),
    )


def _batch_shape(cloud: Cloud) -> torch.Size:
    """The common shape of the leading axes of tokens, weights and mask."""
    return torch.broadcast_shapes(
        *(z.shape[:-1] for z in (cloud.x[..., 0], cloud.weights, cloud.mask) if z is not None)
    )


def _measure(cloud: Cloud, batch: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (B, n, d) and probabilities (B, n) in float64, and the mask (B, n), for all B pairs of the batch."""
    n, d = cloud.x.shape[-2:]
    ones = torch.ones_like(cloud.x[..., 0])
    mask = ones.bool() if cloud.mask is None else cloud.mask
    weights = torch.where(mask, (ones if cloud.weights is None else cloud.weights).double(), 0.0)
    weights = weights / weights.detach().amax(-1, keepdim=True)  # so that the sum cannot overflow
    weights = weights / weights.sum(-1, keepdim=True)
    x, weights, mask = cloud.x.expand(*batch, n, d), weights.expand(*batch, n), mask.expand(*batch, n)
    return x.double().reshape(-1, n, d), weights.reshape(-1, n), mask.reshape(-1, n)


def _solve_batch(
    measures: tuple[Tensor, ...], cost: GroundCost, method: Sinkhorn, rtol: float, dtype: torch.dtype
) -> Transport:
    """All pairs at once by entropic transport, on the device of the tokens."""
    if not cost.is_squared_euclidean:
        raise ValueError(f"method 'sinkhorn' needs p = 2 and cost 'euclidean', got p = {cost.p:g} and {cost.name!r}.")
    x, a, _, y, b, _ = measures
    bounds = sinkhorn_distance(x, a, y, b, method, rtol, dtype)
    excess = bounds.error - rtol * bounds.value.detach()
    if bool((excess > 0).any()):
        k = int(excess.argmax())
        raise CertificateError(
            f"method 'sinkhorn' proves only {float(bounds.low[k]):.6g} <= W_2 <= {float(bounds.high[k]):.6g} for pair "
            f"{k} of {len(x)}, which is wider than rtol = {rtol:g}: the clouds are clustered, or close to each other "
            "for their number of points. Use method='auto', which is exact, a smaller blur, or a larger rtol."
        )
    return Transport(bounds.value, bounds.error, "sinkhorn", cost.p, cost.name, potentials=(bounds.u, bounds.v))


def _solve_pairs(
    measures: tuple[Tensor, ...],
    batch: torch.Size,
    cost: GroundCost,
    method: str | Sliced,
    rtol: float,
    merge_tol: float | None,
    with_plan: bool,
) -> Transport:
    """One pair after the other on the CPU."""
    solutions, indices, masses, us, vs = [], [], [], [], []
    for k, (x, a, mask_x, y, b, mask_y) in enumerate(zip(*measures)):
        pair = Pair(x[mask_x], a[mask_x], y[mask_y], b[mask_y], cost)
        if isinstance(method, Sliced):
            solution = Solution(*sliced_distance(pair, method), "sliced")
        else:
            solution = solve_pair(pair, method, rtol, merge_tol, with_plan)
        solutions.append(solution)
        plan = solution.plan
        if plan is not None and with_plan:
            rows, columns = mask_x.nonzero()[:, 0], mask_y.nonzero()[:, 0]
            place = torch.tensor(np.unravel_index(k, batch), dtype=torch.long)[:, None].expand(-1, len(plan.i))
            indices.append(torch.cat([place, rows[plan.i][None], columns[plan.j][None]]))
            masses.append(torch.from_numpy(plan.mass))
            if solution.potentials is not None:
                u, v = map(torch.from_numpy, solution.potentials)
                us.append(x.new_zeros(len(x)).index_copy(0, rows, u))
                vs.append(y.new_zeros(len(y)).index_copy(0, columns, v))
    plan_tensor = None
    if len(masses) == len(solutions):
        shape = (*batch, measures[0].shape[1], measures[3].shape[1])
        plan_tensor = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(masses), shape, check_invariants=False)
    return Transport(
        torch.stack([solution.value for solution in solutions]),
        torch.tensor([solution.error for solution in solutions], dtype=torch.float64),
        "+".join(dict.fromkeys(solution.method for solution in solutions)),
        cost.p,
        cost.name,
        plan_tensor,
        (torch.stack(us), torch.stack(vs)) if len(us) == len(solutions) else None,
    )
