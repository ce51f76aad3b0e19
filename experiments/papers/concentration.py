"""Cold attention pushes tokens onto predictable points; they are nearest after a time that grows like log beta.

Alcalde, Bungert, Riedl, Roith, arXiv 2605.10931. The matrix M = V G (G = K^T Q) has a leading eigenvector; P sends a
token along its eigenprojection onto the sphere, and P_# mu_0 is the start distribution mu_0 after that map: the
predicted limit.

Panels (a) to (c) have d = 2, G = diag(3,1), V = diag(1,2) and the density exp(cos(angle - 1)), as 800 weighted nodes.
(a) The Wasserstein distance W2 to the limit falls at the rate c_2 = g = 1/3 and rises when V takes over; beta
is the inverse temperature. (b) The time of the least W2 is log(beta)/(2g). (c) The least W2 falls like beta^(-1/2), but
n random tokens gain nothing from a beta that they cannot resolve. (d) V = I, G = [[2,0.5],[0,1]], beta = 50: tokens
follow the oblique eigenprojection, not the orthogonal one. The paper's explicit Euler steps with renormalisation have h
= 0.04; at beta = inf the flow is solved exactly.

Beyond the paper: the sharp rates, the time of the least W2, what follows (exits, layers), and what finitely many tokens
do.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_flow import (
    Attention,
    Cloud,
    LimitMap,
    Sphere,
    Trajectory,
    euler,
    flow,
    limit,
    phases,
    resolution,
    wasserstein,
    zero_temperature_flow,
)
from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_least, at_most, claim
from attn_flow.experiments.papers.concentration_figure import plot
from attn_flow.measures.quadrature import circle
from attn_flow.prediction import w2_curve

__all__ = ["compute", "plot"]

BETAS = (1.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
f64 = torch.float64


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    with progress_bar("concentration", 7, progress) as advance:
        field = mean_field(400 if quick else 800, 0.4 if quick else 0.2)
        advance()
        zero = zero_temperature()
        advance()
        tokens = [token_runs(n, seed) for n in ((100, 300) if quick else (100, 300, 1000))]
        advance()
        three = sphere_runs(1500, 8.0 if quick else 20.0, seed)
        advance()
        skew = oblique(2000, seed)
        advance()
        stays = [stay(*case) for case in STAY]
        advance()
        cases = spectral_cases()
        advance()
    numbers: dict[str, Any] = {
        "seed": seed, "quick": quick, "mean_field": field, "zero": zero, "tokens": tokens, "three": three,
        "oblique": skew, "stay": stays, "cases": cases,
    }  # fmt: skip
    return numbers | {"claims": claims(numbers)}


def attention(G: Any, V: Any, beta: float | Tensor = math.inf) -> Attention:
    """Matrices given as rows, or as diagonals."""
    first, second = (torch.tensor(A, dtype=f64) for A in (G, V))
    matrix = lambda A: A if A.ndim == 2 else torch.diag(A)
    return Attention.from_matrices(matrix(first), matrix(second), beta)


G, V = (3.0, 1.0), (1.0, 2.0)  # the running example: E = e1, V's top is e2, g = 1/3, exit rate 1


def decay_rates(target: LimitMap) -> list[float]:
    """The rates c_1 and c_2 of W_1 and W_2."""
    assert target.rates is not None
    return [target.rates.decay(1), target.rates.decay(2)]


def density(theta: Tensor) -> Tensor:
    return torch.exp(torch.cos(theta - 1))


def nodes(n: int, towards: float, tail: float = 16.0) -> Cloud:
    """Half of the nodes evenly in angle, half evenly in log tan(phi/2): the bulk resolves the softmax at beta = 1000,
    the rest the mass that leaves the repelling axis last. Midpoint rule in the variable that is even."""
    u = np.linspace(-tail, tail, 200_001)
    phi = 2 * np.arctan(np.exp(u))
    even = 0.5 * phi / np.pi + 0.5 * (u + tail) / (2 * tail)
    share = (np.arange(n // 2) + 0.5) / (n // 2) * (even[-1] - even[0]) + even[0]
    u = np.interp(share, even, u)
    weight = 1 / (0.5 / np.pi + 0.5 * np.cosh(u) / (2 * tail))  # dphi / d(even), with dphi = du / cosh(u)
    phi = 2 * np.arctan(np.exp(u))
    theta = torch.from_numpy(np.concatenate([towards + phi, towards - phi]))
    w = torch.from_numpy(np.tile(weight, 2)) * density(theta)
    return Cloud(torch.stack([theta.cos(), theta.sin()], -1), w / w.sum())


def mean_field(n: int, every: float) -> dict[str, Any]:
    """W2(mu_t, P_# mu_0) for every beta, and its phases."""
    cloud = nodes(n, math.pi / 2)
    target = limit(attention(G, V))
    rates, terminal = target.rates, target.terminal
    assert rates is not None
    assert terminal is not None
    t = torch.arange(0, 30 + every / 2, every, dtype=f64)
    betas = torch.tensor(BETAS, dtype=f64)
    path = flow(attention(G, V, betas[:, None]), cloud, t, step=euler, h=0.04)
    curves = w2_curve(path, target)
    runs = [run(path, b, beta, target, curves[:, b]) for b, beta in enumerate(BETAS)]
    cold = zero_temperature_flow(attention(G, V), cloud.x, t)
    cold = Trajectory(t, cold.x, cloud.weights)
    infinite = phases(cold, target).as_dict() | {"beta": "inf"}
    far = [r for r in runs if r["beta"] >= 30]
    slope = np.polyfit(np.log([r["beta"] for r in far]), [r["t_min"] for r in far], 1)
    exponent = np.polyfit(np.log([r["beta"] for r in far]), np.log([r["min_w2"] for r in far]), 1)
    return {
        "n": n, "t": t.tolist(), "runs": [*runs, infinite], "slope": slope.tolist(), "exponent": exponent.tolist(),
        "g": rates.g, "rate_w2": rates.decay(2), "exit_rate": terminal.exit_rate,
    }  # fmt: skip


def run(path: Trajectory, b: int, beta: float, target: LimitMap, curve: Tensor) -> dict[str, Any]:
    one = Trajectory(path.t, path.x[:, b], path.weights, about={"field": {"beta": beta}})
    result = phases(one, target, w2=curve)
    t_min, min_w2 = vertex(result.t.numpy(), result.w2.numpy())
    return result.as_dict() | {"beta": beta, "t_min": t_min, "min_w2": min_w2, "approach": final_approach(one)}


def final_approach(path: Trajectory) -> float:
    """The rate at which the mean tangent x_1/x_2 of the tokens decays near e_2; NaN if they are not there."""
    offset = (path.x[..., 0] / path.x[..., 1] @ path.cloud(0).probabilities).abs().numpy()
    near = (np.arange(len(offset)) > np.flatnonzero(offset > 0.1).max(initial=-1)) & (offset > 1e-12)
    return float(-np.polyfit(path.t.numpy()[near], np.log(offset[near]), 1)[0]) if near.sum() > 3 else math.nan


def vertex(t: np.ndarray, w: np.ndarray) -> tuple[float, float]:
    """The minimum of the parabola through log W2 at the smallest value and its neighbours."""
    i = int(w.argmin())
    if i in (0, len(t) - 1):
        return float(t[i]), float(w[i])
    a, b, c = np.polyfit(t[i - 1 : i + 2] - t[i], np.log(w[i - 1 : i + 2]), 2)
    return float(t[i] - b / (2 * a)), float(np.exp(c - b * b / (4 * a)))


def zero_temperature() -> dict[str, Any]:
    """Closed form of W2, and the rates of W1 and W2, on a circle refined towards the repelling axis."""
    lattice = circle(4096)
    A = attention((1.0, 1.0), (2.0, 1.0))
    path = zero_temperature_flow(A, lattice.x, torch.tensor([0.0, 1.0, 2.0], dtype=f64))
    w2 = w2_curve(path, limit(A)).tolist()
    t = torch.linspace(0, 24, 49, dtype=f64)
    rates = []
    for g, v in (((1.0, 3.0), (3.0, 0.5)), ((3.0, 1.0), (1.0, 2.0))):
        A, cloud = attention(g, v), circle(2000, towards=math.pi / 2)
        target = limit(A)
        away = (zero_temperature_flow(A, cloud.x, t).x - target.push_forward(cloud.x)).norm(dim=-1)
        w = [((away**p) @ cloud.weights) ** (1 / p) for p in (1, 2)]  # the L^p identity: M is normal
        fits = [float(-torch.log(c[-1] / c[24]) / (t[-1] - t[24])) for c in w]
        rates.append({"G": g, "V": v, "measured": fits, "predicted": decay_rates(target)})
    return {"t": [0, 1, 2], "w2": w2, "rates": rates, "tail": lower_level()}


def lower_level() -> dict[str, Any]:
    """M = diag(3,2,1), |G e_3| = 10: the mass near e_3 is the last to leave, which min(g, kappa/p) does not see."""
    A = attention((0.5, 1.0, 10.0), (6.0, 2.0, 0.1))
    u = torch.linspace(-22, 22, 61, dtype=f64).exp()
    a, b = (c.flatten() for c in torch.meshgrid(u, u, indexing="ij"))
    y = torch.stack([a, b, torch.ones_like(a)], -1)  # gnomonic coordinates of one octant, evenly in their logarithms
    w = a * b / y.norm(dim=-1) ** 3
    path = zero_temperature_flow(A, Sphere().retract(y), torch.tensor([0.0, 16.0, 26.0], dtype=f64)).x
    away = (path - torch.tensor([1.0, 0, 0], dtype=f64)).norm(dim=-1)
    rate = [float(torch.log((away[1] ** p @ w) / (away[2] ** p @ w)) / p / 10) for p in (1, 2)]
    target = limit(A)
    return {"measured": rate, "predicted": decay_rates(target)}


def token_runs(n: int, seed: int) -> dict[str, Any]:
    """The running example with n tokens drawn from the same density."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.linspace(0, 2 * math.pi, 20_001, dtype=f64)
    mass = torch.cumsum(density(grid), 0)
    draws = torch.searchsorted(mass / mass[-1], torch.rand(n, generator=generator, dtype=f64))
    x = torch.stack([grid[draws].cos(), grid[draws].sin()], -1)
    betas = torch.tensor(BETAS, dtype=f64)
    t = torch.arange(0, 16.1, 0.4, dtype=f64)
    path = flow(attention(G, V, betas[:, None]), x, t, step=euler, h=0.04)
    curves = w2_curve(path, limit(attention(G, V)))
    number = [float(resolution(attention(G, V, beta), x).number) for beta in BETAS]
    return {"n": n, "betas": list(BETAS), "min_w2": curves.amin(0).tolist(), "resolution": number}


def sphere_runs(n: int, T: float, seed: int) -> dict[str, Any]:
    """d = 3: n tokens, where a colder softmax resolves its argmax worse and worse."""
    x = Sphere().uniform(n, 3, generator=torch.Generator().manual_seed(seed), dtype=f64)
    g, v = (3.0, 1.0, 1.0), (1.0, 2.0, 1.0)
    target = limit(attention(g, v))
    t = torch.arange(0, T + 0.1, 0.4, dtype=f64)
    runs = []
    for beta in (1.0, 10.0, 100.0, 1000.0):
        path = flow(attention(g, v, beta), x, t, step=euler, h=0.1)
        runs.append({"beta": beta, "min_w2": float(w2_curve(path, target).min())})
    y = Sphere().uniform(1000, 10, generator=torch.Generator().manual_seed(seed), dtype=f64)
    ten = resolution(attention((3.0, *[1.0] * 9), (1.0,) * 10, 100.0), y)
    return {"n": n, "runs": runs, "ten": {"self_argmax": float(ten.self_argmax)}}


def oblique(n: int, seed: int) -> dict[str, Any]:
    """V = I, G = [[2, 0.5], [0, 1]]: tokens follow the oblique projector, not the orthogonal one."""
    A = attention([[2.0, 0.5], [0.0, 1.0]], (1.0, 1.0), 50.0)
    x = Sphere().uniform(n, 2, generator=torch.Generator().manual_seed(seed), dtype=f64)
    end = flow(A, x, [0.0, 12.0], step=euler, h=0.1).x[-1]
    right = limit(A).push_forward(x)
    wrong = torch.stack([torch.sign(x[:, 0]), torch.zeros(n, dtype=f64)], -1)
    angle = lambda y: (torch.rad2deg(torch.atan2(y[:, 1], y[:, 0]) + math.pi / 2) % 360 - 90).tolist()
    distance = [float((end - y).square().sum(-1).mean().sqrt()) for y in (right, wrong)]
    angles = {"start": angle(x), "end": angle(end), "limit": angle(right), "orthogonal": angle(wrong)}
    return {"n": n, "l2": distance, **angles}


STAY = (  # G, V, and what the clusters at +-e1 do
    ((1.0, 2.0), (-1.0, -3.0)),  # permanent layer
    ((1.0, -2.0), (-1.0, 2.0)),  # layer, then exit
    ((-3.0, 1.0), (-1.0, 2.0)),  # antipodes, then exit
)


def stay(g: tuple[float, float], v: tuple[float, float]) -> dict[str, Any]:
    """Two clusters slightly off centre at beta = 300: their width and the growth of their offset."""
    beta, T = 300.0, 12.0
    A = attention(g, v, beta)
    cloud = circle(300, lambda theta: torch.exp(-20 * theta.sin() ** 2) * (1 + 0.001 * theta.sin()))
    t = torch.linspace(0, T, 61, dtype=f64)
    path = flow(A, cloud, t, h=0.1)
    target = limit(A)
    right = cloud.probabilities * (cloud.x[:, 0] > 0)
    right = right / right.sum()
    offset = (path.x[..., 1] @ right).abs()
    width = (path.x[..., 1].square() @ right).sqrt()
    grows = (offset > 1e-3) & (offset < 0.02) & (t > 2.0)
    is_seen = int(grows.sum()) > 3
    rate = float(np.polyfit(t[grows].numpy(), offset[grows].log().numpy(), 1)[0]) if is_seen else math.nan
    ends = {"offset": float(offset[-1]), "width": float(width[-1])}
    return {**ends, "measured_exit": rate, "predicted_width": target.width(beta)}


def spectral_cases() -> dict[str, Any]:
    """Rotating pair, Jordan block and dim E = 2 at beta = inf."""
    A = attention([[1.0, -0.7, 0], [0.7, 1.0, 0], [0, 0, 0.2]], (1.0, 1.0, 1.0))
    target = limit(A)
    x = Sphere().uniform(300, 3, generator=torch.Generator().manual_seed(1), dtype=f64)
    end = zero_temperature_flow(A, x, torch.tensor([0.0, 24.0], dtype=f64)).x[-1]
    # Equivariance: W2 is at most the paired distance, and equals it for this normal M (the L^p identity).
    paired = lambda y: float((end - y).square().sum(-1).mean().sqrt())
    rotating = {"moving": paired(target.push_forward(x, 24.0)), "frozen": paired(target.push_forward(x, 0.0))}

    A = attention((1.0, 1.0), [[1.0, 1.0], [0.0, 1.0]])
    target, t = limit(A), torch.tensor([0.0, 5.0, 10.0, 20.0, 40.0, 80.0], dtype=f64)
    jordan: dict[str, Any] = {}
    for name, uneven in (("uneven", 0.9), ("even", 0.0)):
        # The mass that crosses at time t started within 1/t of +-e1, and where W2 ~ 1/t in a part of it of width t^-2.
        tilted = partial(lambda size, theta: 1 + size * torch.cos(theta - 0.5), uneven)
        start = circle(8000, tilted, towards=0.0)
        clouds, goal = zero_temperature_flow(A, start.x, t).x, target.push_forward(start.x)
        away = (clouds - goal).norm(dim=-1)
        w2 = wasserstein(Cloud(clouds, start.weights), Cloud(goal, start.weights))
        l2 = (away.square() @ start.weights).sqrt()
        slope = lambda c: float(torch.log(c[-1] / c[-3]) / math.log(4))
        jordan[name] = {"w2_slope": slope(w2), "l2_slope": slope(l2)}
        jordan["median"] = float(away[-1].median() * t[-1])

    # dim E = 2: one meridian carries the density, by symmetry; weights sin(phi) of the polar angle around e_3.
    A = attention((1.0, 1.0, 3.0), (2.0, 2.0, 1 / 3))
    target = limit(A)
    u = torch.linspace(-18, 18, 1001, dtype=f64)
    phi = 2 * torch.atan(u.exp())
    x = torch.stack([phi.sin(), torch.zeros_like(phi), phi.cos()], -1)
    mass = phi.sin() ** 2 / (phi.sin() ** 2).sum()  # sin(phi) dphi = sin(phi)^2 du
    t = torch.linspace(0, 16, 33, dtype=f64)
    away = (zero_temperature_flow(A, x, t).x - target.push_forward(x)).norm(dim=-1)
    w = [((away**p) @ mass) ** (1 / p) for p in (1, 2)]
    measured = [float(-torch.log(c[-1] / c[16]) / (t[-1] - t[16])) for c in w]
    plane = {"measured": measured, "predicted": decay_rates(target)}
    return {"rotating": rotating, "jordan": jordan, "plane": plane}


def claims(numbers: dict[str, Any]) -> list[dict[str, Any]]:
    """Closed forms, rates and times against simulation. Numbers of one run only are in the tests."""
    field, zero = numbers["mean_field"], numbers["zero"]
    runs = {r["beta"]: r for r in field["runs"]}
    rows = []
    for beta in (10.0, 100.0, 1000.0):
        expected = math.log(beta) / (2 * field["g"])
        what = f"mean field, beta = {beta:g}: time of the least W2, against log(beta) / (2g)"
        rows.append(claim(what, runs[beta]["t_min"], expected, 0.3))
        what = f"mean field, beta = {beta:g}: W2 at the end, all tokens at V's leading direction"
        rows.append(claim(what, runs[beta]["w2"][-1], math.sqrt(2), 1e-3, "theorem"))
    for t, w2 in zip((1, 2), zero["w2"][1:]):
        s = math.sqrt(1 - math.exp(-2 * t))
        expected = math.sqrt(2 - 4 / math.pi * math.asin(s) / s)
        rows.append(claim(f"beta = inf, G = I, V = diag(2,1): W2 at t = {t}", w2, expected, 2e-6))
    for row in zero["rates"]:
        rows += rate_claims(f"beta = inf, G = diag{row['G']}, V = diag{row['V']}", row, 0.01)
    rows += rate_claims("beta = inf, M = diag(3,2,1), |G e_3| = 10 (two levels alone: 1, 0.5)", zero["tail"], 0.005)
    terminal = next(p for p in runs[1000.0]["phases"] if p["name"] == "terminal")
    layer, leaves, antipodes = numbers["stay"]
    skew, least = numbers["oblique"]["l2"], [row["min_w2"] for row in numbers["three"]["runs"]]
    cases, width = numbers["cases"], "V = diag(-1,-3), G = diag(1,2), beta = 300: width of the layer"
    rotating, even, uneven = cases["rotating"], cases["jordan"]["even"], cases["jordan"]["uneven"]
    orthogonal = "oblique M, beta = 50, t = 12: L2 to the oblique limit over L2 to the orthogonal projection"
    few = "d = 3, n = 1500: least W2 at beta = 1000 over that of the best beta (too few tokens)"
    return [
        claim("mean field: time of the least W2 per log beta, 1/(2g)", field["slope"][0], 1.5, 0.08),
        claim("mean field: exponent of the least W2 in beta", field["exponent"][0], -0.5, 0.05),
        at_most("beta = inf never leaves: W2 at t = 30", runs["inf"]["w2"][-1], 1e-4, "derived"),
        claim("beta = 1000: exit rate of the clusters", terminal["rate"], field["exit_rate"], 0.1),
        claim("beta = 100: rate of the final approach", runs[100.0]["approach"], 1.0, 0.05),
        *rows,
        claim(width, layer["width"], layer["predicted_width"], 3e-4),
        at_most("the same: offset of the layer at the end", layer["offset"], 1e-6, "derived"),
        claim("V = diag(-1,2), G = diag(1,-2): the layer is left at rate", leaves["measured_exit"], 1.5, 0.05),
        claim("V = diag(-1,2), G = diag(-3,1): exit rate", antipodes["measured_exit"], 1.0, 0.03),
        at_most(orthogonal, skew[0] / skew[1], 0.3),
        at_least(few, least[-1] / min(least), 1.5),
        at_most("rotating pair: W2 to the moving push-forward at t = 24", rotating["moving"], 1e-4, "derived"),
        at_least("rotating pair: L2 to the push-forward without rotation", rotating["frozen"], 0.5, "derived"),
        claim("Jordan block: t times the median distance", cases["jordan"]["median"], 1.0, 0.05),
        claim("Jordan block, unequal crossing masses: exponent of W2 in t", uneven["w2_slope"], -0.5, 0.03),
        claim("Jordan block, even density: exponent of W2 in t", even["w2_slope"], -1.0, 0.06),
        claim("Jordan block, even density: exponent of the paired L2 in t", even["l2_slope"], -0.5, 0.03),
        *rate_claims("dim E = 2", cases["plane"], 0.03),
    ]


def rate_claims(what: str, row: dict[str, Any], tolerance: float) -> list[dict[str, Any]]:
    """The rates of W1 and W2 against their predictions."""
    pairs = zip((1, 2), row["measured"], row["predicted"])
    return [claim(f"{what}: rate of W{p}", measured, expected, tolerance) for p, measured, expected in pairs]
