"""At low temperature tokens concentrate on P_# mu_0, rest there for times of order log beta, and then V takes over.

Alcalde, Bungert, Riedl, Roith, arXiv 2605.10931. Mean-field laws are weighted quadrature clouds on the circle, as the
paper's explicit Euler steps with renormalisation (h = .04); at beta = inf the flow is solved exactly. Beyond the paper:
the sharp rates c_p, the time t_min ~ log(beta)/(2g), what follows (exits, layers), and what finitely many tokens do.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attn_flow.experiments.claims import bound, claim
from attn_flow.experiments.figures import COLOURS, THEORY, caption, label, panels, shades
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.flow import flow
from attn_flow.geometry import Sphere
from attn_flow.limit import LimitMap, limit, resolution
from attn_flow.measures import Cloud
from attn_flow.phases import phases, w2_curve
from attn_flow.progress import progress as progress_bar
from attn_flow.quadrature import circle
from attn_flow.steppers import euler
from attn_flow.trajectory import Trajectory
from attn_flow.zero_temperature import zero_temperature_flow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BETAS = (1.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
f64 = torch.float64


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    with progress_bar("concentration", 7, progress) as advance:
        field = mean_field(400 if quick else 800, 0.4 if quick else 0.2)
        advance()
        zero = zero_temperature()
        advance()
        tokens = [token_runs(n, field, seed) for n in ((100, 300) if quick else (100, 300, 1000))]
        advance()
        three = sphere_runs(1500, 8.0 if quick else 20.0, seed)
        advance()
        skew = oblique(2000, seed)
        advance()
        stays = [stay(*case) for case in STAY]
        advance()
        cases = spectral_cases()
        advance()
    found: dict[str, Any] = {
        "seed": seed, "quick": quick, "mean_field": field, "zero": zero, "tokens": tokens, "three": three,
        "oblique": skew, "stay": stays, "cases": cases,
    }  # fmt: skip
    return found | {"claims": claims(found)}


def attention(G: Any, V: Any, beta: float | Tensor = math.inf) -> Attention:
    """Matrices given as rows, or as diagonals."""
    first, second = (torch.tensor(A, dtype=f64) for A in (G, V))
    matrix = lambda A: A if A.ndim == 2 else torch.diag(A)
    return Attention.from_matrices(matrix(first), matrix(second), beta)


G, V = (3.0, 1.0), (1.0, 2.0)  # the running example: E = e1, V's top is e2, g = 1/3, exit rate 1


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
    t = torch.arange(0, 30 + every / 2, every, dtype=f64)
    betas = torch.tensor(BETAS, dtype=f64)
    path = flow(attention(G, V, betas[:, None]), cloud.x, t, step=euler, h=0.04, weights=cloud.weights)
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
        "g": target.g, "rate_w2": target.rate_w2, "C": target.C, "exit_rate": target.exit_rate,
        "t_beta": [target.t_beta(b) for b in BETAS[1:]],
    }  # fmt: skip


def run(path: Trajectory, b: int, beta: float, target: LimitMap, curve: Tensor) -> dict[str, Any]:
    one = Trajectory(path.t, path.x[:, b], path.weights, about={"attention": {"beta": beta}})
    found = phases(one, target, w2=curve, warn=False)
    t_min, min_w2 = vertex(np.array(found.t), np.array(found.w2))
    return found.as_dict() | {"beta": beta, "t_min": t_min, "min_w2": min_w2}


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
        found = limit(A)
        away = (zero_temperature_flow(A, cloud.x, t).x - found.push_forward(cloud.x)).norm(dim=-1)
        w = [((away**p) @ cloud.weights) ** (1 / p) for p in (1, 2)]  # the L^p identity: M is normal
        fits = [float(-torch.log(c[-1] / c[24]) / (t[-1] - t[24])) for c in w]
        rates.append({"G": g, "V": v, "measured": fits, "predicted": [found.rate_w1, found.rate_w2]})
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
    found = limit(A)
    return {"measured": rate, "predicted": [found.rate_w1, found.rate_w2], "two_levels": [1.0, 0.5]}


def token_runs(n: int, field: dict[str, Any], seed: int) -> dict[str, Any]:
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
    number = [float(resolution(attention(G, V, beta), x, warn=False).number) for beta in BETAS]
    hard = w2_curve(flow(attention(G, V), x, t, step=euler, h=0.04), limit(attention(G, V)))
    return {
        "n": n, "betas": list(BETAS), "t": t.tolist(), "w2": curves.mT.tolist(), "resolution": number,
        "min_w2": curves.amin(0).tolist(), "t_min": t[curves.argmin(0)].tolist(),
        "hardmax_min_w2": float(hard.min()),
    }  # fmt: skip


def sphere_runs(n: int, T: float, seed: int) -> dict[str, Any]:
    """d = 3: n tokens, where a colder softmax resolves its argmax worse and worse."""
    x = Sphere().uniform(n, 3, generator=torch.Generator().manual_seed(seed), dtype=f64)
    g, v = (3.0, 1.0, 1.0), (1.0, 2.0, 1.0)
    target = limit(attention(g, v))
    t = torch.arange(0, T + 0.1, 0.4, dtype=f64)
    runs = []
    for beta in (1.0, 10.0, 100.0, 1000.0):
        path = flow(attention(g, v, beta), x, t, step=euler, h=0.1)
        w = w2_curve(path, target)
        found = resolution(attention(g, v, beta), x, warn=False)
        runs.append(
            {
                "beta": beta,
                "t": t.tolist(),
                "w2": w.tolist(),
                "min_w2": float(w.min()),
                "t_min": float(t[w.argmin()]),
                "resolution": float(found.number),
                "self_argmax": float(found.self_argmax),
            }
        )
    y = Sphere().uniform(1000, 10, generator=torch.Generator().manual_seed(seed), dtype=f64)
    ten = resolution(attention((3.0, *[1.0] * 9), (1.0,) * 10, 100.0), y, warn=False)
    return {"n": n, "runs": runs, "ten": {"self_argmax": float(ten.self_argmax), "resolution": float(ten.number)}}


def oblique(n: int, seed: int) -> dict[str, Any]:
    """V = I, G = [[2, .5], [0, 1]]: tokens follow the oblique projector, not the orthogonal one."""
    A = attention([[2.0, 0.5], [0.0, 1.0]], (1.0, 1.0), 50.0)
    x = Sphere().uniform(n, 2, generator=torch.Generator().manual_seed(seed), dtype=f64)
    end = flow(A, x, [0.0, 12.0], step=euler, h=0.1).x[-1]
    right = limit(A).push_forward(x)
    wrong = torch.stack([torch.sign(x[:, 0]), torch.zeros(n, dtype=f64)], -1)
    angle = lambda y: (torch.rad2deg(torch.atan2(y[:, 1], y[:, 0]) + math.pi / 2) % 360 - 90).tolist()
    distance = [float((end - y).square().sum(-1).mean().sqrt()) for y in (right, wrong)]
    return {
        "n": n,
        "start": angle(x),
        "end": angle(end),
        "limit": angle(right),
        "orthogonal": angle(wrong),
        "l2": distance,
    }


STAY = (
    # G, V, and what the clusters at +-e1 do
    ((1.0, 2.0), (-1.0, -3.0), "permanent layer"),
    ((1.0, -2.0), (-1.0, 2.0), "layer, then exit"),
    ((-3.0, 1.0), (-1.0, 2.0), "antipodes, then exit"),
)


def stay(g: tuple[float, float], v: tuple[float, float], name: str) -> dict[str, Any]:
    """Two clusters slightly off centre at beta = 300: their width and the growth of their offset."""
    beta, T = 300.0, 12.0
    A = attention(g, v, beta)
    cloud = circle(300, lambda theta: torch.exp(-20 * theta.sin() ** 2) * (1 + 0.001 * theta.sin()))
    t = torch.linspace(0, T, 61, dtype=f64)
    path = flow(A, cloud.x, t, h=0.1, weights=cloud.weights)
    found = limit(A)
    right = cloud.probabilities * (cloud.x[:, 0] > 0)
    right = right / right.sum()
    offset = (path.x[..., 1] @ right).abs()
    width = (path.x[..., 1].square() @ right).sqrt()
    grows = (offset > 1e-3) & (offset < 0.02) & (t > 2.0)
    rate = float(np.polyfit(t[grows].numpy(), offset[grows].log().numpy(), 1)[0]) if int(grows.sum()) > 3 else None
    return {
        "name": name, "G": g, "V": v, "beta": beta, "t": t.tolist(), "offset": offset.tolist(), "width": width.tolist(),
        "exit_rate": found.exit_rate, "measured_exit": rate,
        "predicted_width": None if found.layer is None else found.width(beta),
        "y": path.x[-1, cloud.x[:, 0] > 0, 1].tolist(), "mass": right[cloud.x[:, 0] > 0].tolist(),
    }  # fmt: skip


def spectral_cases() -> dict[str, Any]:
    """Rotating pair, Jordan block and dim E = 2 at beta = inf."""
    A = attention([[1.0, -0.7, 0], [0.7, 1.0, 0], [0, 0, 0.2]], (1.0, 1.0, 1.0))
    found = limit(A)
    x = Sphere().uniform(300, 3, generator=torch.Generator().manual_seed(1), dtype=f64)
    t = torch.linspace(0, 24, 17, dtype=f64)
    path = zero_temperature_flow(A, x, t)
    # Equivariance: W2 is at most the paired distance, and equals it for this normal M (the L^p identity).
    moving = [float((y - found.push_forward(x, s)).square().sum(-1).mean().sqrt()) for s, y in zip(t.tolist(), path.x)]
    frozen = [float((y - found.push_forward(x, 0.0)).square().sum(-1).mean().sqrt()) for y in path.x]
    rotating = {"t": t.tolist(), "moving": moving, "frozen": frozen, "case": found.case, "g": found.g}

    A = attention([[1.0, 1.0], [0.0, 1.0]], (1.0, 1.0))
    found, lattice = limit(A), circle(2000, towards=0.0)
    t = torch.tensor([0.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0], dtype=f64)
    away = (zero_temperature_flow(A, lattice.x, t).x - found.push_forward(lattice.x)).norm(dim=-1)
    w = [((away**p) @ lattice.weights) ** (1 / p) for p in (1, 2)]
    slopes = [float(torch.log2(c[-1] / c[-2])) for c in w]
    jordan = {
        "t": t.tolist(), "w1": w[0].tolist(), "w2": w[1].tolist(), "slopes": slopes, "case": found.case,
        "median": float(away[-1].median() * t[-1]),
    }  # fmt: skip

    # dim E = 2: one meridian carries the law, by symmetry; weights sin(phi) of the polar angle around e_3.
    A = attention((1.0, 1.0, 3.0), (2.0, 2.0, 1 / 3))
    found = limit(A)
    u = torch.linspace(-18, 18, 1001, dtype=f64)
    phi = 2 * torch.atan(u.exp())
    x = torch.stack([phi.sin(), torch.zeros_like(phi), phi.cos()], -1)
    mass = phi.sin() ** 2 / (phi.sin() ** 2).sum()  # sin(phi) dphi = sin(phi)^2 du
    t = torch.linspace(0, 16, 33, dtype=f64)
    away = (zero_temperature_flow(A, x, t).x - found.push_forward(x)).norm(dim=-1)
    w = [((away**p) @ mass) ** (1 / p) for p in (1, 2)]
    plane = {
        "t": t.tolist(), "w1": w[0].tolist(), "w2": w[1].tolist(), "dimension": found.dimension,
        "measured": [float(-torch.log(c[-1] / c[16]) / (t[-1] - t[16])) for c in w],
        "predicted": [found.rate_w1, found.rate_w2],
    }  # fmt: skip
    return {"rotating": rotating, "jordan": jordan, "plane": plane}


def claims(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Every number of THEORY 1, and what was found beyond it."""
    field, zero = found["mean_field"], found["zero"]
    runs = {r["beta"]: r for r in field["runs"]}
    s = [math.sqrt(1 - math.exp(-2 * t)) for t in (1, 2)]
    held = [
        claim(
            f"beta = inf, G = I, V = diag(2,1): W2 at t = {t}", w, math.sqrt(2 - 4 / math.pi * math.asin(r) / r), 2e-6
        )
        for t, w, r in zip((1, 2), zero["w2"][1:], s)
    ]
    for row in zero["rates"]:
        for p in (0, 1):
            what = f"beta = inf, G = diag{row['G']}, V = diag{row['V']}: rate of W{p + 1}"
            held.append(claim(what, row["measured"][p], row["predicted"][p], 0.01))
    for p in (0, 1):
        what = f"beta = inf, M = diag(3,2,1), |G e_3| = 10: rate of W{p + 1} (two levels alone: {1 / (p + 1):g})"
        held.append(claim(what, zero["tail"]["measured"][p], zero["tail"]["predicted"][p], 0.005))
    tolerance = 0.3 if found["quick"] else 0.15
    for beta, w, t in ((10.0, 0.511, 3.6), (100.0, 0.182, 7.0), (1000.0, 0.061, 10.6)):
        held.append(claim(f"mean field, beta = {beta:g}: min W2", runs[beta]["min_w2"], w, 0.004))
        held.append(claim(f"mean field, beta = {beta:g}: time of min W2", runs[beta]["t_min"], t, tolerance))
        held.append(claim(f"mean field, beta = {beta:g}: W2 at the end", runs[beta]["w2"][-1], math.sqrt(2), 1e-3))
    held.append(claim("mean field: t_min per log beta, against 1/(2g) = 1.5", field["slope"][0], 1.52, 0.06))
    held.append(claim("mean field: exponent of min W2 in beta, against -1/2", field["exponent"][0], -0.48, 0.04))
    held.append(
        claim("beta = 1 never concentrates: min W2 / W2(0)", runs[1.0]["min_w2"] / runs[1.0]["w2"][0], 1.0, 0.02)
    )
    held.append(bound("beta = inf never leaves: W2 at t = 30", runs["inf"]["w2"][-1], at_most=1e-4))
    cold = runs[1000.0]
    terminal = next(p for p in cold["phases"] if p["phase"] == "terminal")
    held.append(claim("beta = 1000: exit rate of the clusters", terminal["rate"], field["exit_rate"], 0.1))
    held.append(claim("beta = 100: rate of the final approach", runs[100.0]["settling"]["rate"], 1.0, 0.05))
    layer, leaves, antipodes = found["stay"]
    held.append(
        claim("V = diag(-1,-3), G = diag(1,2), beta = 300: width of the layer", layer["width"][-1], 0.0258, 3e-4)
    )
    held.append(bound("the same: offset of the layer at the end", layer["offset"][-1], at_most=1e-6))
    held.append(claim("V = diag(-1,2), G = diag(1,-2): the layer is left at rate", leaves["measured_exit"], 1.5, 0.05))
    held.append(claim("V = diag(-1,2), G = diag(-3,1): exit rate", antipodes["measured_exit"], 1.0, 0.03))
    # One draw of tokens each: the numbers of THEORY 1 are those of seed 0, other draws scatter by the wider tolerance.
    drawn = found["seed"] == 0
    skew, three = found["oblique"]["l2"], found["three"]
    held.append(
        claim("oblique M, beta = 50, t = 12: L2 to the oblique limit", skew[0], 0.085, 0.005 if drawn else 0.12)
    )
    held.append(claim("the same, L2 to the orthogonal projection", skew[1], 0.763, 0.005 if drawn else 0.03))
    for row, w, scatter in zip(three["runs"], (0.34, 0.22, 0.28, 0.62), (0.12, 0.07, 0.07, 0.25)):
        what = f"d = 3, n = 1500, beta = {row['beta']:g}: min W2"
        held.append(claim(what, row["min_w2"], w, 0.015 if drawn else scatter))
    best = min(three["runs"], key=lambda r: r["min_w2"])
    held.append(claim("d = 3, n = 1500: the best beta", best["beta"], 10.0, 0.0))
    held.append(claim("d = 10, n = 1000: tokens that are their own argmax", three["ten"]["self_argmax"], 0.94, 0.02))
    cases = found["cases"]
    held.append(
        bound("rotating pair: W2 to the moving push-forward at t = 24", cases["rotating"]["moving"][-1], at_most=1e-4)
    )
    held.append(
        bound("rotating pair: L2 to the push-forward without rotation", cases["rotating"]["frozen"][-1], at_least=0.5)
    )
    held.append(claim("Jordan block: t times the median distance", cases["jordan"]["median"], 1.0, 0.05))
    held.append(claim("Jordan block: exponent of W1 in t", cases["jordan"]["slopes"][0], -1.0, 0.05))
    held.append(claim("Jordan block: exponent of W2 in t", cases["jordan"]["slopes"][1], -0.5, 0.03))
    for p in (0, 1):
        row = cases["plane"]
        held.append(claim(f"dim E = 2: rate of W{p + 1}", row["measured"][p], row["predicted"][p], 0.03))
    return held


def plot(numbers: dict[str, Any]) -> Figure:
    figure, axes = panels(3, 3, "Low-temperature concentration of self-attention")
    _curves(axes[0], numbers["mean_field"])
    _times(axes[1], numbers["mean_field"])
    _depths(axes[2], numbers)
    _oblique(axes[3], numbers["oblique"])
    _cases(axes[4], numbers["cases"])
    _rates(axes[5], numbers)
    _exits(axes[6], numbers["stay"])
    _layer(axes[7], numbers["stay"][0])
    _sphere(axes[8], numbers["three"])
    field = numbers["mean_field"]
    caption(
        figure,
        f"(a-c) d = 2, G = diag(3,1), V = diag(1,2), density exp(cos(theta - 1)), {field['n']} weighted nodes, Euler "
        f"h = .04; tokens in (c) drawn with seed {numbers['seed']}. (d) V = I, G = [[2,.5],[0,1]], n = "
        f"{numbers['oblique']['n']}, beta = 50, t = 12. (e, f) beta = inf, exact flow. (g, h) beta = 300, 300 nodes. "
        f"(i) n = {numbers['three']['n']} tokens, G = diag(3,1,1), V = diag(1,2,1), h = .1. W2 is exact throughout.",
    )
    return figure


def _curves(axis: Any, field: dict[str, Any]) -> None:
    finite = [r for r in field["runs"] if r["beta"] != "inf"]
    t = np.array(field["t"])
    for colour, r in zip(shades(len(finite)), finite):
        axis.semilogy(r["t"], r["w2"], color=colour, linewidth=1.4, label=f"{r['beta']:g}")
        axis.plot(r["t_min"], r["min_w2"], "o", color=colour, markersize=3.5)
    cold = field["runs"][-1]
    axis.semilogy(cold["t"], cold["w2"], color=COLOURS[1], linewidth=1.6, label=r"$\infty$")
    c, beta = field["rate_w2"], BETAS[-1]
    axis.semilogy(t, 1.5 * np.exp(-c * t), **THEORY, label=r"$e^{-c_2t}$")
    with np.errstate(over="ignore"):
        whole = np.sqrt(np.log(beta + 1) / beta) * np.exp(field["C"] * t) + np.exp(-c * t)
    axis.semilogy(t, 1.5 * whole, color="#888888", linestyle=":", linewidth=1.4, label="bound, 1000")
    axis.set_ylim(8e-4, 3)
    label(axis, r"$W_2(\mu_t,\,P_\#\mu_0)$, mean field", "time t", r"$W_2$", legend=False)
    axis.legend(fontsize=7, frameon=False, ncol=2, title=r"$\beta$", title_fontsize=8, loc="lower left")


def _times(axis: Any, field: dict[str, Any]) -> None:
    runs = [r for r in field["runs"] if r["beta"] not in (1.0, "inf")]
    beta = np.array([r["beta"] for r in runs])
    line = np.geomspace(6, 1500, 50)
    axis.semilogx(line, np.polyval(field["slope"], np.log(line)), color=COLOURS[0], linewidth=1, alpha=0.6)
    axis.semilogx(
        beta, [r["t_min"] for r in runs], "o", color=COLOURS[0], label=f"measured, slope {field['slope'][0]:.2f}"
    )
    axis.semilogx(line, np.log(line) / (2 * field["g"]), **THEORY, label=r"$\log\beta/(2g)$, slope 1.50")
    start, end = zip(*[_plateau(r) for r in runs])
    axis.fill_between(beta, start, end, color=COLOURS[0], alpha=0.13, linewidth=0, label=r"metastable: $W_2<2\min W_2$")
    axis.semilogx(beta, field["t_beta"], "s", color=COLOURS[6], markersize=4, label=r"balance of the bound, $t_\beta$")
    label(axis, r"time of smallest $W_2$", r"$\beta$", "time t")


def _plateau(r: dict[str, Any]) -> tuple[float, float]:
    rest = next(p for p in r["phases"] if p["phase"] == "metastable")
    return rest["start"], rest["end"]


def _depths(axis: Any, numbers: dict[str, Any]) -> None:
    runs = [r for r in numbers["mean_field"]["runs"] if r["beta"] != "inf"]
    beta = np.array([r["beta"] for r in runs])
    axis.loglog(beta, [r["min_w2"] for r in runs], "o-", color=COLOURS[0], label="mean field")
    for colour, row in zip((COLOURS[4], COLOURS[1], COLOURS[2]), numbers["tokens"]):
        axis.loglog(
            row["betas"], row["min_w2"], "^--", color=colour, markersize=4, linewidth=1, label=f"n = {row['n']}"
        )
        axis.loglog([4000], [row["hardmax_min_w2"]], "^", color=colour, markersize=4)
    line = np.geomspace(10, 1000, 20)
    axis.loglog(line, runs[-1]["min_w2"] * np.sqrt(1000 / line), **THEORY, label=r"$\beta^{-1/2}$")
    axis.set_xticks([1, 10, 100, 1000, 4000], ["1", "10", "100", "1000", r"$\infty$"])
    axis.xaxis.minorticks_off()
    label(axis, r"smallest $W_2$ over time, d = 2", r"$\beta$", r"$\min_t W_2$")


def _oblique(axis: Any, row: dict[str, Any]) -> None:
    order = np.argsort(row["start"])
    start = np.array(row["start"])[order]
    axis.plot(start, np.array(row["limit"])[order], **THEORY | {"linewidth": 2.2}, label="oblique limit")
    axis.plot(
        start, np.array(row["orthogonal"])[order], color=COLOURS[6], linestyle=":", linewidth=1.6, label="orthogonal"
    )
    axis.plot(start, np.array(row["end"])[order], ".", color=COLOURS[1], markersize=2.5, label="tokens, t = 12")
    axis.set_xticks([-90, 0, 90, 180, 270])
    axis.set_yticks([-90, 0, 90, 180, 270])
    axis.set_ylim(-70, 300)
    label(axis, "where tokens go when M is not normal", "angle at t = 0", "angle at t = 12")


def _cases(axis: Any, cases: dict[str, Any]) -> None:
    rotating, jordan, plane = cases["rotating"], cases["jordan"], cases["plane"]
    axis.loglog(jordan["t"][1:], jordan["w1"][1:], "o-", color=COLOURS[1], markersize=3, label="Jordan, $W_1$")
    axis.loglog(jordan["t"][1:], jordan["w2"][1:], "o-", color=COLOURS[4], markersize=3, label="Jordan, $W_2$")
    t = np.array(jordan["t"][2:])
    axis.loglog(t, jordan["w1"][-1] * t[-1] / t, **THEORY)
    axis.loglog(t, jordan["w2"][-1] * np.sqrt(t[-1] / t), **THEORY, label=r"$t^{-1}$, $t^{-1/2}$")
    axis.loglog(rotating["t"][1:], rotating["moving"][1:], color=COLOURS[0], label="rotating, moving")
    axis.loglog(rotating["t"][1:], rotating["frozen"][1:], color=COLOURS[0], linestyle=":", label="rotating, frozen")
    axis.loglog(plane["t"][1:], plane["w2"][1:], color=COLOURS[2], label="dim E = 2")
    axis.set_ylim(1e-4, 4)
    label(axis, "spectral cases", "time t", "distance to the limit")


def _rates(axis: Any, numbers: dict[str, Any]) -> None:
    rows = [(r["measured"], r["predicted"]) for r in numbers["zero"]["rates"]]
    rows.append((numbers["cases"]["plane"]["measured"], numbers["cases"]["plane"]["predicted"]))
    rows.append((numbers["zero"]["tail"]["measured"], numbers["zero"]["tail"]["predicted"]))
    names = ("tail\nslow", "bulk\nslow", "dim E\n= 2", "lower\nlevel")
    place = np.arange(len(rows))
    for p, shift in ((0, -0.17), (1, 0.17)):
        axis.bar(
            place + shift, [r[0][p] for r in rows], 0.3, color=COLOURS[p], alpha=0.75, label=f"$W_{p + 1}$ measured"
        )
        for i, r in enumerate(rows):
            axis.plot([i + shift - 0.17, i + shift + 0.17], [r[1][p]] * 2, color="black", linewidth=1.6)
    wrong = numbers["zero"]["tail"]["two_levels"]
    axis.plot([3 - 0.17, 3 + 0.17], wrong, "x", color="black", markersize=6, label=r"$\min(g, k\kappa/p)$ alone")
    axis.plot([], [], color="black", linewidth=1.6, label=r"predicted $c_p$")
    axis.set_xticks(place, names)
    axis.set_ylim(0, 1.45)
    label(axis, r"rates at $\beta=\infty$", "", "rate", legend=False)
    axis.legend(fontsize=7, frameon=False, ncol=2, loc="upper left")


def _exits(axis: Any, rows: list[dict[str, Any]]) -> None:
    for colour, r in zip((COLOURS[0], COLOURS[1], COLOURS[2]), rows):
        name = f"V=({r['V'][0]:g},{r['V'][1]:g}), G=({r['G'][0]:g},{r['G'][1]:g})"
        axis.semilogy(r["t"], r["offset"], color=colour, linewidth=1.5, label=name)
        if r["exit_rate"]:
            t, y = np.array(r["t"]), np.array(r["offset"])
            i = int(np.argmin(np.abs(y - 3e-3) + 10 * (t < 2)))
            near = np.abs(t - t[i]) < 2.2
            axis.semilogy(t[near], 2.2 * y[i] * np.exp(r["exit_rate"] * (t[near] - t[i])), **THEORY)
            axis.text(t[i] - 0.9, 3.4 * y[i], f"{r['exit_rate']:g}", fontsize=8)
    axis.set_ylim(1e-8, 10)
    label(axis, "do clusters stay? (all have v$_1$ < 0)", "time t", "offset of the cluster")


def _layer(axis: Any, r: dict[str, Any]) -> None:
    y, w = np.array(r["y"]), np.array(r["mass"])
    s = r["predicted_width"]
    edges = np.linspace(-4 * s, 4 * s, 33)
    density, _ = np.histogram(y, edges, weights=w, density=True)
    axis.stairs(density, edges, fill=True, color=COLOURS[0], alpha=0.45, label=f"cluster, width {r['width'][-1]:.4f}")
    line = np.linspace(-4 * s, 4 * s, 200)
    axis.plot(line, np.exp(-((line / s) ** 2) / 2) / (s * math.sqrt(2 * math.pi)), **THEORY, label=f"Gaussian, {s:.4f}")
    axis.set_ylim(0, 23)
    label(axis, "the permanent layer, V = (-1,-3), G = (1,2)", "offset from $e_1$", "density")


def _sphere(axis: Any, three: dict[str, Any]) -> None:
    for colour, r in zip(shades(len(three["runs"])), three["runs"]):
        words = f"{r['beta']:g}   ({r['resolution']:.2g})"
        axis.plot(r["t"], r["w2"], color=colour, linewidth=1.4, label=words)
        axis.plot(r["t_min"], r["min_w2"], "o", color=colour, markersize=4)
    axis.set_ylim(0, 1.9)
    label(axis, "finite n, d = 3: colder is not better", "time t", r"$W_2$", legend=False)
    title = r"$\beta$ (resolution $\beta|Gx|n^{-2/(d-1)}$)"
    axis.legend(fontsize=7, frameon=False, title=title, title_fontsize=8, loc="upper left")
