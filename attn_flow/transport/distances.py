"""How far two token clouds are: Wasserstein distances with their error, exact wherever exact is affordable.

    W_p(mu, nu) = ( min over couplings P of sum_ij P_ij c(x_i, y_j)^p )^{1/p},   c = |x - y| or the geodesic distance.

No number is returned whose error is not known: `solve` gives
the distance within `rtol` of W_p, with the bound it proved, or refuses.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_flow.base import checks, memory
from attn_flow.base.words import brief
from attn_flow.transport.accelerators import batch_on_device, on_host, stays_on_device
from attn_flow.transport.coupling import SOLVERS, Ground, Plan
from attn_flow.transport.entropic import certified
from attn_flow.transport.plans import Limits, in_units, solve_pair
from attn_flow.transport.scales import radius_of, unit_of, without_hermits
from attn_flow.transport.slices import sliced_distance

LARGEST_P = 200
METHODS = ("auto", *SOLVERS, "shortlist", "sinkhorn", "geomloss", "sliced")


@dataclass(frozen=True, eq=False, repr=False)
class Transport:
    """W_p of a batch of pairs of clouds: |distance - W_p| <= error, in the units of x (arc length if geodesic).

    error is 0 where the solver is exact, the proved gap where it is certified; for "sliced", which is another
    distance, the Monte Carlo standard error. method: the solver of every pair, joined by "+" if they differ;
    "merged " before it says that coincident points were made atoms first.

    >>> solve(torch.tensor([[0.0], [1.0]]), torch.tensor([[2.0], [3.0]]))
    Transport(2 +- 0, method='line', p=2, euclidean)
    """

    distance: Tensor
    error: Tensor
    method: str
    p: float
    cost: str

    def __repr__(self) -> str:
        if self.distance.ndim:
            numbers = f"distance={brief(self.distance)}, error up to {float(self.error.max()):.2g}"
        else:
            numbers = f"{self.distance.item():.6g} +- {self.error.item():.2g}"
        return f"Transport({numbers}, method={self.method!r}, p={self.p:g}, {self.cost})"


def wasserstein(
    x: Tensor,
    y: Tensor,
    p: float = 2,
    *,
    weights_x: Tensor | None = None,
    weights_y: Tensor | None = None,
    mask_x: Tensor | None = None,
    mask_y: Tensor | None = None,
    cost: str = "euclidean",
    method: str = "auto",
    rtol: float = 0.01,
    merge_tol: float | None = None,
    blur: float | None = None,
    scaling: float = 0.9,
    n_projections: int = 200,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The Wasserstein distance W_p of two clouds of tokens, within rtol of the truth or refused.

    W_p(mu, nu) = ( min over couplings P of sum_ij P_ij c(x_i, y_j)^p )^{1/p}. `solve` is the same with the error it
    proved and the method it took, and says more about the options.

    Args:
        x, y: clouds (..., n, d) and (..., m, d); leading axes broadcast.
        p: 1 <= p <= 200.
        weights_x, weights_y: masses (..., n), (..., m), of any total; equal ones if not given.
        mask_x, mask_y: True for tokens; a token hidden by its mask is not there.
        cost: "euclidean", |x - y|, or "geodesic", arc length on the sphere the tokens lie on.
        method: "auto", or a solver by name (`solve`).
        rtol: the relative error allowed.
        merge_tol, blur, scaling, n_projections, generator: of the solvers.

    Returns:
        The distance, of the batch shape, in the units of x; differentiable in x, y and the weights.

    Example:
        >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
        >>> wasserstein(x, x + torch.tensor([3.0, 4.0]))  # a translation by 5
        tensor(5.)
        >>> wasserstein(x, x, weights_x=torch.tensor([1.0, 0.0]), p=1)  # half of the mass goes from 0 to 1
        tensor(0.5000)
    """
    return solve(
        x,
        y,
        p,
        weights_x=weights_x,
        weights_y=weights_y,
        mask_x=mask_x,
        mask_y=mask_y,
        cost=cost,
        method=method,
        rtol=rtol,
        merge_tol=merge_tol,
        blur=blur,
        scaling=scaling,
        n_projections=n_projections,
        generator=generator,
    ).distance


def solve(
    x: Tensor,
    y: Tensor,
    p: float = 2,
    *,
    weights_x: Tensor | None = None,
    weights_y: Tensor | None = None,
    mask_x: Tensor | None = None,
    mask_y: Tensor | None = None,
    cost: str = "euclidean",
    method: str = "auto",
    rtol: float = 0.01,
    merge_tol: float | None = None,
    blur: float | None = None,
    scaling: float = 0.9,
    n_projections: int = 200,
    generator: torch.Generator | None = None,
    limits: Limits | None = None,
) -> Transport:
    """W_p with the error that was proved and the method that proved it.

    Along the first batch axis the shortlist starts each pair from the plan of the one before, where that is feasible
    and close: a finely sampled path takes a fraction of the time of its clouds one by one, and is proved as well.

    Args:
        x, y: clouds (..., n, d) and (..., m, d); leading axes broadcast. Any scale from 1e-300 to 1e300 will do.
        p: 1 <= p <= 200.
        weights_x, weights_y: masses (..., n), (..., m), normalised to probabilities.
        mask_x, mask_y: where False the point is not there.
        cost: "euclidean", or "geodesic": arc length on the sphere the points lie on (any radius); gradients are
            tangent to it.
        method: "line" (d = 1), "circle" (geodesic, d = 2), "assignment" (equal numbers, equal weights), "simplex",
            "shortlist" (certified to 1e-6 of the distance, or to the rounding of its potentials where that is more:
            n eps of the largest cost), "sinkhorn" and "geomloss" (Euclidean p = 2, certified interval, refused beyond
            rtol), "sliced" (another distance: the p-th mean of W_p over `n_projections` random directions), or "auto".
        rtol: |distance - W_p| <= rtol W_p is proved or refused; a distance below 1e-6 of the extent of nine tenths
            of the mass is rounding, and returned with its error.
        merge_tol: points closer than this are merged into atoms; default 1e-10 of that extent.
        blur, scaling: the Sinkhorn schedule, as in geomloss; by default the blur is lowered until rtol is proved.
        n_projections, generator: of "sliced".
        limits: how many points and seconds "auto" takes on; `Limits()` if not given.

    Clouds on an accelerator: "sinkhorn" and "geomloss" (and "auto" beyond the shortlist) compare the whole batch there
    at once; the others copy the clouds to the CPU once and the distances back.

    Returns:
        A `Transport`: distance and error of the batch shape in the units of x, method, p and cost.

    Example:
        >>> x = torch.tensor([[0.0], [1.0]])
        >>> solve(x, x + 0.25, p=1)
        Transport(0.25 +- 0, method='line', p=1, euclidean)
    """
    if not (isinstance(p, (int, float)) and 1 <= p < math.inf):
        raise ValueError(f"p = {p}, expected a number with 1 <= p < inf.")
    if p > LARGEST_P:
        raise ValueError(f"p = {p:g}, expected at most {LARGEST_P}: costs c^p leave the range of float64 beyond.")
    limits = Limits() if limits is None else limits
    checks.instance("limits", limits, Limits, "Limits(...)")
    checks.made_with(None, None, generator)
    given = {"x": x, "y": y, "weights_x": weights_x, "weights_y": weights_y, "mask_x": mask_x, "mask_y": mask_y}
    for name, z in (("x", x), ("y", y)):
        if isinstance(z, Tensor):
            checks.held(name, z)
    on_device = isinstance(x, Tensor) and x.device.type != "cpu"
    if on_device and not stays_on_device(x, y, p, cost, method, limits):
        found = solve(
            **on_host(given),
            p=p,
            cost=cost,
            method=method,
            rtol=rtol,
            merge_tol=merge_tol,
            blur=blur,
            scaling=scaling,
            n_projections=n_projections,
            generator=generator,
            limits=limits,
        )
        return replace(found, distance=found.distance.to(x.device), error=found.error.to(x.device))
    checks.one_of("cost", cost, ("euclidean", "geodesic"))
    checks.one_of("method", method, METHODS)
    checks.positive("rtol", rtol)
    checks.positive("scaling", scaling)
    if not scaling < 1:
        raise ValueError(f"scaling = {scaling}, expected a number between 0 and 1.")
    if blur is not None:
        checks.positive_finite("blur", blur)
    if merge_tol is not None:
        checks.nonnegative("merge_tol", merge_tol, "distance")
    checks.whole("n_projections", n_projections, 2)  # one has no standard error
    if method == "sliced" and isinstance(x, Tensor) and x.ndim:
        memory.require_tensor(n_projections, x.shape[-1], dtype=torch.float64)
    with checks.together():
        x, a, there_x = _cloud("x", x, weights_x, mask_x)
        y, b, there_y = _cloud("y", y, weights_y, mask_y)
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}, expected the same dimension d in (..., n, d)."
        )
    checks.same_device("y", y, "x", x)
    if not checks.broadcasts(x.shape[:-2], y.shape[:-2]):
        raise ValueError(
            f"x has batch shape {tuple(x.shape[:-2])} and y {tuple(y.shape[:-2])}, expected shapes that broadcast."
        )
    ground = Ground(float(p), cost)
    dtype = torch.promote_types(x.dtype, y.dtype)
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    x, y = (z.expand(*batch, *z.shape[-2:]) for z in (x, y))
    a, b, there_x, there_y = (z.expand(*batch, z.shape[-1]) for z in (a, b, there_x, there_y))
    if on_device:
        name = "sinkhorn" if method == "auto" else method
        distance, bound = batch_on_device(x, y, a, b, there_x, there_y, ground, rtol, blur, scaling, name, dtype)
        return Transport(distance.reshape(batch).to(dtype), bound.reshape(batch).to(dtype), name, float(p), cost)
    distances, errors = [], []
    used: dict[str, None] = {}
    plans: dict[tuple[int, ...], tuple[Plan, float]] = {}
    for k in itertools.product(*map(range, batch)):
        keep_x, keep_y = there_x[k], there_y[k]
        xi, yi, ai, bi = (z[keep].double() for z, keep in zip((x[k], y[k], a[k], b[k]), (keep_x, keep_y) * 2))
        ai, bi = (w / w.detach().max() for w in (ai, bi))  # whose sum may overflow
        ai, bi = ai / ai.sum(), bi / bi.sum()
        unit = unit_of(xi, yi)
        xi, yi = xi / unit, yi / unit
        radius = radius_of(xi, yi, unit) if cost == "geodesic" else 1.0
        if cost == "geodesic":
            xi, yi = (z / z.norm(dim=-1, keepdim=True) for z in (xi, yi))
        share = 1.0
        if method == "auto" and cost == "euclidean" and not (ai.requires_grad or bi.requires_grad):
            xi, ai, yi, bi, share = without_hermits(xi, ai, yi, bi, float(p))
        if method == "sliced":
            distance, error = sliced_distance(xi, ai, yi, bi, ground, n_projections, generator)
            name = method
        elif method in ("sinkhorn", "geomloss"):
            width = None if blur is None else blur / unit
            distance, error = certified(xi, ai, yi, bi, ground, rtol, width, scaling, method, dtype)
            name = method
        else:
            tol = None if merge_tol is None else merge_tol / (radius * unit)
            before = in_units(plans.pop((k[0] - 1, *k[1:]), None) if k else None, unit, ground.p)
            distance, error, name, plan = solve_pair(xi, ai, yi, bi, ground, method, rtol, tol, before, limits)
            if plan is not None and share == 1:
                plans[k] = plan, unit
        size = radius * unit * share ** (1 / ground.p)
        distances.append(distance * size)
        errors.append(error * size)
        used[name] = None
    stack = torch.stack(distances).reshape(batch)
    bound = torch.tensor(errors, dtype=dtype, device=x.device).reshape(batch)
    return Transport(stack.to(dtype), bound, "+".join(used), float(p), cost)


def _cloud(name: str, x: Tensor, weights: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The checked cloud (..., n, d), its weights and its mask (..., n); what is masked may hold anything."""
    try:
        if mask is not None and isinstance(x, Tensor) and x.ndim >= 2:
            checks.token_mask(mask, x)
            x = torch.where(mask[..., None], x, 0.0)
            weights = None if weights is None else torch.where(mask, weights, 0.0)
        checks.tokens(name, x)
        if weights is not None:
            checks.token_weights(weights, x, mask)
    except ValueError as error:
        raise ValueError(f"cloud {name}: {error}") from None
    batch = torch.broadcast_shapes(x.shape[:-1], *(z.shape for z in (weights, mask) if z is not None))
    ones = torch.ones(batch, dtype=x.dtype, device=x.device)
    there = torch.ones_like(ones, dtype=torch.bool) if mask is None else mask.expand(batch)
    masses = ones if weights is None else weights.expand(batch)  # in their own precision, which may be the higher
    return x.expand(*batch, x.shape[-1]), masses, there
