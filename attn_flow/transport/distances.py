"""How far two token clouds are: Wasserstein distances with their error, exact wherever exact is affordable.

    W_p(mu, nu) = ( min over couplings P of sum_ij P_ij c(x_i, y_j)^p )^{1/p},   c = |x - y| or the geodesic distance.

Every exact solver finds the plan without gradients; the distance is then the cost of that fixed plan, whose gradient
in x and y is the gradient of W_p (envelope theorem). No number is returned whose error is not known: `solve` gives
the distance within `rtol` of W_p, with the bound it proved, or refuses.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_flow.base import checks
from attn_flow.base.words import brief
from attn_flow.transport import batched
from attn_flow.transport.candidates import TREE_DIMENSION, nearest, shortlist
from attn_flow.transport.coupling import SOLVERS, Array, Ground, Index, Plan, leak, potential
from attn_flow.transport.entropic import certified

# Points closer than this part of the clouds' extent are one atom; the distance moved is part of the error.
COINCIDENT = 1e-10
# Leaders tried before a cloud counts as spread.
LEADERS = 64
# An error below this part of the extent is rounding: costs are sums of p-th powers in float64.
RESOLUTION = 1e-6
# Rounding of a cost of size one: sums of thousands of terms in float64.
ROUNDING = 1e-13
# Mass by which a plan of the pair before may miss the masses of this one.
FEASIBLE = 1e-12
# Norms may differ by this much on what is called a sphere.
SPHERE_RTOL = 1e-4

METHODS = ("auto", *SOLVERS, "shortlist", "sinkhorn", "geomloss", "sliced")


@dataclass(frozen=True)
class Limits:
    """What "auto" takes on by itself; a solver asked for by name is not held to it.

    >>> x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    >>> solve(x, x + 1, limits=Limits(dense=10)).method
    'shortlist'
    """

    dense: int = 1_000  # points a side up to which the dense solvers are fastest, in low dimension
    dense_high_dimension: int = 3_000  # and beyond a k-d tree's reach
    shortlist: int = 100_000  # points a side up to which it is affordable: minutes and a few hundred megabytes
    sinkhorn_seconds: float = 1e-6  # for every pair of points: schedule and interval of one blur, float64 on the CPU
    patience: float = 900.0  # seconds taken without being asked for


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
        p: 1 <= p < inf.
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
        p: 1 <= p < inf.
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
    limits = limits or Limits()
    given = {"x": x, "y": y, "weights_x": weights_x, "weights_y": weights_y, "mask_x": mask_x, "mask_y": mask_y}
    on_device = isinstance(x, Tensor) and x.device.type != "cpu"
    if on_device and not _stays(x, y, p, cost, method, limits):
        found = solve(
            **_on_host(given),
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
        checks.positive("blur", blur)
    if merge_tol is not None:
        checks.nonnegative("merge_tol", merge_tol, "distance")
    checks.whole("n_projections", n_projections, 2)  # one has no standard error
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
    if math.prod(batch) == 0:
        raise ValueError(f"x and y have the batch shape {tuple(batch)}: no cloud at all; expected at least one.")
    x, y = (z.expand(*batch, *z.shape[-2:]) for z in (x, y))
    a, b, there_x, there_y = (z.expand(*batch, z.shape[-1]) for z in (a, b, there_x, there_y))
    if on_device:
        name = "sinkhorn" if method == "auto" else method
        distance, bound = _batch_on_device(x, y, a, b, there_x, there_y, ground, rtol, blur, scaling, name, dtype)
        return Transport(distance.reshape(batch).to(dtype), bound.reshape(batch).to(dtype), name, float(p), cost)
    distances, errors = [], []
    used: dict[str, None] = {}
    plans: dict[tuple[int, ...], tuple[Plan, float]] = {}
    for k in itertools.product(*map(range, batch)):
        keep_x, keep_y = there_x[k], there_y[k]
        xi, yi, ai, bi = (z[keep].double() for z, keep in zip((x[k], y[k], a[k], b[k]), (keep_x, keep_y) * 2))
        ai, bi = (w / w.detach().max() for w in (ai, bi))  # whose sum may overflow
        ai, bi = ai / ai.sum(), bi / bi.sum()
        unit = _unit(xi, yi)
        xi, yi = xi / unit, yi / unit
        radius = _radius(xi, yi, unit) if cost == "geodesic" else 1.0
        if cost == "geodesic":
            xi, yi = (z / z.norm(dim=-1, keepdim=True) for z in (xi, yi))
        share = 1.0
        if method == "auto" and cost == "euclidean" and not (ai.requires_grad or bi.requires_grad):
            xi, ai, yi, bi, share = _without_hermits(xi, ai, yi, bi, float(p))
        if method == "sliced":
            distance, error = _sliced(xi, ai, yi, bi, ground, n_projections, generator)
            name = method
        elif method in ("sinkhorn", "geomloss"):
            width = None if blur is None else blur / unit
            distance, error = certified(xi, ai, yi, bi, ground, rtol, width, scaling, method, dtype)
            name = method
        else:
            tol = None if merge_tol is None else merge_tol / (radius * unit)
            before = _in_units(plans.pop((k[0] - 1, *k[1:]), None) if k else None, unit, ground.p)
            distance, error, name, plan = _pair(xi, ai, yi, bi, ground, method, rtol, tol, before, limits)
            if plan is not None and share == 1:
                plans[k] = plan, unit
        size = radius * unit * share ** (1 / ground.p)
        distances.append(distance * size)
        errors.append(error * size)
        used[name] = None
    stack = torch.stack(distances).reshape(batch)
    bound = torch.tensor(errors, dtype=dtype, device=x.device).reshape(batch)
    return Transport(stack.to(dtype), bound, "+".join(used), float(p), cost)


def _stays(x: Tensor, y: Tensor, p: float, cost: str, method: str, limits: Limits) -> bool:
    """Whether clouds on an accelerator are compared there: by Sinkhorn, also where "auto" could do nothing else."""
    many = isinstance(y, Tensor) and min(x.ndim, y.ndim) > 1 and max(x.shape[-2], y.shape[-2]) > limits.shortlist
    return method in ("sinkhorn", "geomloss") or (method == "auto" and many and p == 2 and cost == "euclidean")


def _on_host(given: dict[str, Any]) -> dict[str, Any]:
    """The same tensors on the CPU by one copy, which gradients pass; what is no tensor of that device stays."""
    device = given["x"].device
    moved = {name: z for name, z in given.items() if isinstance(z, Tensor) and z.device == device}
    dtype = given["x"].dtype
    for z in moved.values():
        dtype = torch.promote_types(dtype, z.dtype)
    packed = torch.cat([z.to(dtype).flatten() for z in moved.values()]).cpu()
    parts = packed.split([z.numel() for z in moved.values()])
    return given | {name: part.reshape(z.shape).to(z.dtype) for (name, z), part in zip(moved.items(), parts)}


def _batch_on_device(
    x: Tensor,
    y: Tensor,
    a: Tensor,
    b: Tensor,
    there_x: Tensor,
    there_y: Tensor,
    ground: Ground,
    rtol: float,
    blur: float | None,
    scaling: float,
    method: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Distances and errors of all pairs, (B,), in one call that stays on the accelerator."""
    if ground != Ground(2.0, "euclidean"):
        raise ValueError(f"method {method!r} got p = {ground.p:g}, {ground.cost} cost; expected p = 2, euclidean.")
    masses = []
    for w, there in ((a, there_x), (b, there_y)):
        w = torch.where(there, w.double(), 0.0).reshape(-1, w.shape[-1])
        w = w / w.detach().amax(-1, keepdim=True)  # whose sum may overflow
        masses.append(w / w.sum(-1, keepdim=True))
    x, y = (z.double().reshape(-1, *z.shape[-2:]) for z in (x, y))
    return batched.certified(x, masses[0], y, masses[1], rtol, blur, scaling, method, dtype)


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


def _unit(x: Tensor, y: Tensor) -> float:
    """1, or for tiny and huge clouds a power of two of the order of their extent.

    Dividing by it is exact, and p-th powers of distances then neither overflow nor vanish.
    """
    both = torch.cat([x, y]).detach()
    top = float(both.abs().max())
    if top == 0:
        return 1.0
    scale = math.ldexp(1.0, math.frexp(top)[1] - 1)
    extent = float((both.amax(0) / scale - both.amin(0) / scale).max())
    scale *= math.ldexp(1.0, math.frexp(extent)[1] - 1) if extent > 0 else 1.0
    return 1.0 if 1e-20 < scale < 1e20 else scale


def _in_units(before: tuple[Plan, float] | None, unit: float, p: float) -> Plan | None:
    """The plan of the pair before, its potential in the units of this one."""
    if before is None:
        return None
    plan, other = before
    return plan if plan.v is None else replace(plan, v=plan.v * (other / unit) ** p)


def _without_hermits(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, p: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """The clouds without far points that both have, and the share of mass that is left.

    A point z that holds the same mass in both clouds, at distances of at least D from all others, which are less than
    2^{1/p} D apart, stays where it is: sending mass out of z and other mass into it costs 2 D^p, more than sending that
    mass directly. Left in, it would set the scale of rounding.
    """
    both = torch.cat([x, y]).detach()
    if _extent(both, torch.cat([a, b]).detach(), 1.0) <= 1e3 * _extent(both, torch.cat([a, b]).detach(), 0.5):
        return x, a, y, b, 1.0
    share = 1.0
    while True:
        centre = torch.cat([x, y]).detach().median(0).values
        i = int((x.detach() - centre).norm(dim=-1).argmax())
        same_x, same_y = ((z.detach() == x.detach()[i]).all(-1) for z in (x, y))
        mass = float(a.detach()[same_x].sum())
        rest = torch.cat([x.detach()[~same_x], y.detach()[~same_y]])
        if not len(rest) or not (same_y.any() and abs(float(b.detach()[same_y].sum()) - mass) <= 1e-15):
            break
        far = float((rest - x.detach()[i]).norm(dim=-1).min())
        across = 2 * float((rest - rest.mean(0)).norm(dim=-1).max())  # at least their diameter
        if not across < 2 ** (1 / p) * far:
            break
        x, a, y, b = x[~same_x], a[~same_x], y[~same_y], b[~same_y]
        share *= float(a.detach().sum())
        a, b = a / a.sum(), b / b.sum()
    return x, a, y, b, share


def _extent(z: Tensor, w: Tensor, part: float) -> float:
    """The largest side of the box around the median that holds `part` of the mass, along each axis by itself."""
    columns = z.mT.contiguous()
    away = (columns - columns.median(-1, keepdim=True).values).abs()
    if part == 1:
        return 2 * float(away[:, w > 0].max())
    if float(w.max() - w.min()) <= 1e-12 * float(w.max()):  # equal masses need a k-th value, and no order
        return 2 * float(away.kthvalue(math.ceil(part * (1 - 1e-12) * len(z))).values.max())
    away, order = away.sort(-1)
    held = w[order].cumsum(-1) / w.sum()
    first = (held < part * (1 - 1e-12)).sum(-1, keepdim=True).clamp(max=len(z) - 1)
    return 2 * float(away.gather(-1, first).max())


def _radius(x: Tensor, y: Tensor, unit: float) -> float:
    norm = torch.cat([x, y]).detach().norm(dim=-1)
    radius = float(norm.mean())
    if radius == 0 or float((norm - radius).abs().max()) > SPHERE_RTOL * radius:
        low, high = (float(bound) * unit for bound in (norm.min(), norm.max()))
        raise ValueError(
            f"the geodesic cost got points with norms from {low:.6g} to {high:.6g}, "
            "expected one sphere around the origin; use Sphere(radius).retract, or cost='euclidean'."
        )
    return radius


def _pair(
    x: Tensor,
    a: Tensor,
    y: Tensor,
    b: Tensor,
    ground: Ground,
    method: str,
    rtol: float,
    merge_tol: float | None,
    start: Plan | None,
    limits: Limits,
) -> tuple[Tensor, float, str, Plan | None]:
    """W_p of one pair, its error bound, the solver's name and its plan, of atoms where points were merged."""
    # Of nine tenths of the mass: a few far points must not set what counts as coincident, or as rounding.
    extent = _extent(torch.cat([x, y]).detach(), torch.cat([a, b]).detach(), 0.9)
    mass_gradient = a.requires_grad or b.requires_grad
    # Equal points tie in every shortlist, so it too starts from atoms.
    if merge_tol is not None or (method in ("auto", "shortlist") and not mass_gradient):
        merged = _merged(x, a, y, b, ground, COINCIDENT * extent if merge_tol is None else merge_tol, limits)
        name = method if method != "auto" or merged is None else _choose(*merged[:4], ground, limits)
        if merged is not None and name != "beyond":
            distance, error, plan = _exact(*merged[:4], ground, name, start)
            error += merged[4]
            if _good(distance, error, rtol, extent, ground.p):
                return distance, error, f"merged {name}", plan
            if merge_tol is not None:
                raise ValueError(
                    f"merging within merge_tol = {merge_tol:.3g} gives {distance.item():.6g} with an error up to "
                    f"{error:.3g}, more than rtol = {rtol:g} of it; lower merge_tol."
                )
    name = _choose(x, a, y, b, ground, limits) if method == "auto" else method
    if name == "beyond":
        return *_beyond(x, a, y, b, ground, rtol, extent, limits), None
    distance, error, plan = _exact(x, a, y, b, ground, name, start)
    if not _good(distance, error, rtol, extent, ground.p):
        raise ValueError(
            f"method {name!r} proved only {distance.item():.6g} with an error up to {error:.3g}, more than "
            f"rtol = {rtol:g} of it; raise rtol, leave out points far from all others, or use method='assignment' or "
            "'simplex'."
        )
    return distance, error, name, plan


def _exact(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, ground: Ground, method: str, start: Plan | None = None
) -> tuple[Tensor, float, Plan]:
    """The cost of the solver's plan, as a distance, the error that its gap allows, and the plan."""
    plan = _plan(x, a, y, b, ground, method, start)
    distance = _cost(x, a, y, b, ground, plan)
    return distance, _in_distance(distance.item(), plan.gap, ground.p), plan


def _good(distance: Tensor, error: float, rtol: float, extent: float, p: float) -> bool:
    """Within rtol, or no more than rounding, which costs of size extent^p turn into a distance by their p-th root."""
    return error <= max(rtol * distance.item(), RESOLUTION * extent, ROUNDING ** (1 / p) * extent)


def _in_distance(distance: float, gap: float, p: float) -> float:
    """W - (W^p - gap)^{1/p}: a gap of the cost as an error of the distance, without cancellation for small gaps."""
    if gap == 0:
        return 0.0
    share = gap / distance**p if distance > 0 else 1.0
    return distance * -math.expm1(math.log1p(-share) / p) if share < 1 else gap ** (1 / p)


def _choose(x: Tensor, a: Tensor, y: Tensor, b: Tensor, ground: Ground, limits: Limits) -> str:
    """The cheapest exact solver for these sizes, or "beyond"."""
    (n, d), m = x.shape, len(y)
    mass_gradient = a.requires_grad or b.requires_grad
    if d == 1 and ground.cost == "euclidean":
        return "line"
    if d == 2 and ground.cost == "geodesic" and not mass_gradient:
        return "circle"
    if n * m <= (limits.dense if d <= TREE_DIMENSION else limits.dense_high_dimension) ** 2:
        uniform = n == m and all(float(w.max() - w.min()) <= 1e-12 / n for w in (a.detach(), b.detach()))
        return "assignment" if uniform and not mass_gradient else "simplex"
    return "shortlist" if max(n, m) <= limits.shortlist else "beyond"


def _beyond(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, ground: Ground, rtol: float, extent: float, limits: Limits
) -> tuple[Tensor, float, str]:
    """More points than the shortlist affords: merge as far as rtol allows, else Sinkhorn with its interval."""
    tol = rtol * extent / 8
    for _ in range(2):
        merged = _merged(x, a, y, b, ground, tol, limits)
        name = "beyond" if merged is None else _choose(*merged[:4], ground, limits)
        if merged is None or name == "beyond":
            break
        distance, error, _ = _exact(*merged[:4], ground, name)
        error += merged[4]
        if _good(distance, error, rtol, extent, ground.p):
            return distance, error, f"merged {name}"
        tol = rtol * distance.item() / 8
    if ground != Ground(2.0, "euclidean"):
        raise ValueError(
            f"clouds of {len(x)} and {len(y)} points, p = {ground.p:g}, {ground.cost} cost: beyond "
            f"{limits.shortlist} points only the Euclidean p = 2 distance is certified. "
            "Subsample, or use method='sliced'."
        )
    seconds = limits.sinkhorn_seconds * len(x) * len(y)
    if seconds > limits.patience:
        raise ValueError(
            f"clouds of {len(x)} and {len(y)} points would take about {seconds / 3600:.1f} hours of method='sinkhorn'; "
            "subsample, merge near points by merge_tol, use method='sliced', or ask for method='sinkhorn' or "
            "'shortlist' by name."
        )
    return (*certified(x, a, y, b, ground, rtol, None, 0.9, "sinkhorn", torch.float64), "sinkhorn")


def _plan(x: Tensor, a: Tensor, y: Tensor, b: Tensor, ground: Ground, method: str, start: Plan | None = None) -> Plan:
    """The solver's plan on the points that carry mass, with indices of all points."""
    X, A, Y, B = (z.detach().cpu().numpy() for z in (x, a, y, b))
    i, j = np.flatnonzero(A), np.flatnonzero(B)
    centre = Y.mean(0) if ground.cost == "euclidean" else 0.0
    both = np.concatenate([X, Y])
    # Coordinates of order one: solvers stop at absolute tolerances. W_p scales with them.
    unit = float(np.ptp(both, 0).max()) if ground.cost == "euclidean" else 1.0
    unit = unit or 1.0
    scaled = (X[i] - centre) / unit, A[i], (Y[j] - centre) / unit, B[j]
    if method == "shortlist":
        plan = shortlist(*scaled, ground, start=_feasible(start, A, B, unit**ground.p))
    else:
        plan = SOLVERS[method](*scaled, ground)
    v = None
    if plan.v is not None:
        v = np.full(len(Y), -np.inf)
        v[j] = plan.v * unit**ground.p
    return Plan(i[plan.i], j[plan.j], plan.mass, plan.gap * unit**ground.p, v)


def _feasible(start: Plan | None, A: Array, B: Array, unit: float) -> Plan | None:
    """The plan in costs of size `unit`, if it moves A to B: it is then feasible whatever the points are."""
    if start is None or start.v is None or len(start.v) != len(B) or start.i.max() >= len(A):
        return None
    moves = (A > 0).all() and (B > 0).all() and leak(start, A, B) < FEASIBLE
    return replace(start, v=start.v / unit) if moves else None


def _cost(x: Tensor, a: Tensor, y: Tensor, b: Tensor, ground: Ground, plan: Plan) -> Tensor:
    """(sum_k mass_k c(x_i, y_j)^p)^{1/p} of the fixed plan: its gradients in x, y, and in a, b by the potentials."""
    i, j, mass = (torch.from_numpy(z).to(x.device) for z in (plan.i, plan.j, plan.mass))
    c = ground.distance(x[i], y[j])
    top = c.detach().max()
    # The p-th root has no derivative at zero; the distance has the subgradient zero there, as c itself has.
    if top == 0:
        return (mass * c).sum()
    total = (mass * (c / top) ** ground.p).sum()
    if a.requires_grad or b.requires_grad:
        u, v = (torch.from_numpy(z).to(x) for z in _potentials(x, y, ground, plan))
        total = total + ((a - a.detach()) @ u + (b - b.detach()) @ v) / top**ground.p
    return top * total ** (1 / ground.p)


def _potentials(x: Tensor, y: Tensor, ground: Ground, plan: Plan) -> tuple[Array, Array]:
    """u_i = min_j c_ij - v_j and v_j = min_i c_ij - u_i: dW_p^p/da and dW_p^p/db, at points without mass too."""
    X, Y = x.detach().cpu().numpy(), y.detach().cpu().numpy()
    v = potential(plan)
    known = np.isfinite(v)
    u = nearest(X, Y[known], v[known], 1, ground)[2]
    return u, nearest(Y, X, u, 1, ground)[2]


def _merged(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, ground: Ground, tol: float, limits: Limits
) -> tuple[Tensor, Tensor, Tensor, Tensor, float] | None:
    """Both clouds as atoms, and the distance they moved: W_p changes by no more. None where it would not pay."""
    owner_x, owner_y = _atoms(x, tol), _atoms(y, tol)
    atoms = 1 + int(owner_x.max()), 1 + int(owner_y.max())
    # Small uniform clouds lose the assignment solver by merging; large ones gain by any atom.
    worth = 0.25 if len(x) * len(y) <= limits.dense**2 else 0.95
    if atoms[0] * atoms[1] > worth * len(x) * len(y):
        return None
    X, A, moved_x = _merge(x, a, owner_x, ground)
    Y, B, moved_y = _merge(y, b, owner_y, ground)
    return X, A, Y, B, moved_x + moved_y


def _atoms(x: Tensor, tol: float) -> Index:
    """Labels (n,) such that points of one label are within tol of its first point."""
    z = x.detach().cpu().numpy()
    n = len(z)
    label = np.full(n, -1)
    free = np.arange(n)
    k = 0
    while len(free):
        near = np.abs(z[free, 0] - z[free[0], 0]) <= tol  # one coordinate rules out nearly all in a spread cloud
        near[near] = np.square(z[free[near]] - z[free[0]]).sum(1) <= tol**2
        label[free[near]] = k
        free = free[~near]
        k += 1
        # What is left is spread: each leader costs a pass over the points and gains little.
        if k >= LEADERS and n - len(free) < 4 * k:
            label[free] = k + np.arange(len(free))
            break
    return label


def _merge(x: Tensor, a: Tensor, owner: Index, ground: Ground) -> tuple[Tensor, Tensor, float]:
    """The first point of every label with the label's mass, and (sum a c(x, its atom)^p)^{1/p}."""
    first = torch.from_numpy(np.unique(owner, return_index=True)[1]).to(x.device)
    label = torch.from_numpy(owner).to(x.device)
    mass = torch.zeros(len(first), dtype=a.dtype, device=a.device).index_add(0, label, a)
    leader = x.detach()[first]
    share = torch.where(mass[label] > 0, a / mass[label], 0.0).detach()
    # The value is the leader's, exactly; the gradient is shared by all it stands for.
    pull = torch.zeros_like(leader).index_add(0, label, share[:, None] * (x - x.detach()))
    far = ground.distance(x.detach(), leader[label])
    top = float(far.max())
    moved = top * float((a.detach() * (far / top) ** ground.p).sum()) ** (1 / ground.p) if top > 0 else 0.0
    return leader + pull, mass, moved


def _sliced(
    x: Tensor,
    a: Tensor,
    y: Tensor,
    b: Tensor,
    ground: Ground,
    n_projections: int,
    generator: torch.Generator | None,
) -> tuple[Tensor, float]:
    """(mean over directions theta of W_p(<theta, x>, <theta, y>)^p)^{1/p} and its Monte Carlo standard error."""
    if ground.cost != "euclidean":
        raise ValueError("method 'sliced' projects on lines, so it needs cost='euclidean'.")
    device = "cpu" if generator is None else generator.device
    theta = torch.randn(n_projections, x.shape[1], generator=generator, dtype=x.dtype, device=device).to(x.device)
    theta = theta / theta.norm(dim=-1, keepdim=True)
    top = torch.cat([x, y]).detach().abs().max()
    if top == 0:
        return (x.sum() + y.sum()) * 0.0, 0.0
    costs = []
    for direction in theta:
        s, t = (x / top) @ direction, (y / top) @ direction
        plan = _plan(s[:, None], a, t[:, None], b, ground, "line")
        costs.append(_cost(s[:, None], a, t[:, None], b, ground, plan) ** ground.p)
    cost = torch.stack(costs)
    mean = cost.mean()
    if mean == 0:
        return mean * top, 0.0
    error = float(cost.detach().std() / n_projections**0.5 * mean.detach() ** (1 / ground.p - 1) / ground.p * top)
    return top * mean ** (1 / ground.p), error
