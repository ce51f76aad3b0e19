"""A trained layer iterated with its own weights on real tokens, against the phases of low-temperature attention.

Alcalde, Bungert, Riedl, Roith, arXiv 2605.10931. The theorem wants one head, no bias, and keys that fill the sphere.
Three steps lead from there to a trained layer: (ideal) one trained head whose keys do fill the sphere, moving real
tokens; (real) all heads and biases, real tokens attending to each other, at the trained beta and colder; (terminal)
where that ends, x' = P_x (V x + c) if every cluster sees only itself. Tokens are a layer's own, gain and bias of its
norm folded into the weights, on the sphere of radius sqrt(d). That real tokens do not concentrate is a claim too:
they are too few for their dimension, which `resolution` says beforehand, and a W2 that falls to half would refute it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attn_flow import Attention, Sphere, Trajectory, UniformSphere, euler, flow, limit, resolution, rk4, wasserstein
from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import bound, claim
from attn_flow.experiments.figures import THEORY, caption, label, panels, shades
from attn_flow.observe.quantities import clusters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from attn_flow.hooks import Norm

TOKENS = 64
APART = 0.1  # tokens closer than this on the unit sphere are one cluster


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    """Everything is deterministic; `seed` is only passed on."""
    layers = [("MiniLM", 3), ("ALBERT", 6)] if quick else [("MiniLM", 1), ("MiniLM", 3), ("MiniLM", 5), ("ALBERT", 6)]
    colder, horizon = ((1.0,), 20.0) if quick else ((1.0, 4.0, 16.0), 60.0)
    runs, missing = [], []
    with progress_bar("wrapped_layer", len(layers), progress) as advance:
        for name, layer in layers:
            try:
                model, inputs = encoder(name)
                runs.append(one_layer(name, model, inputs, layer, colder, horizon))
            except ModuleNotFoundError as absent:
                missing.append(f"{name}: {absent}")
            advance()
    claims = [c for run in runs for c in run.pop("claims")]
    return {"seed": seed, "horizon": horizon, "runs": runs, "missing": missing, "claims": claims}


def encoder(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A trained model, and one real text of at most 64 tokens."""
    from attn_flow.experiments.encoders import load_rxnmapper, textbook_reactions
    from attn_flow.hooks.demo import minilm, topics

    model, tokenizer = minilm() if name == "MiniLM" else load_rxnmapper()
    text = topics(1)[0] if name == "MiniLM" else textbook_reactions()[4]
    options = {"return_tensors": "pt", "truncation": True, "max_length": TOKENS, "return_token_type_ids": False}
    return model.double(), dict(tokenizer([text], **options))


def fold_norm(attention: Attention, norm: Norm) -> Attention:
    """The attention that acts on tokens u before gain g and bias c of their norm.

    Q(g u + c) + b = (Q diag g) u + (Q c + b), and K c cancels in the softmax.
    """
    weights = attention.tensors
    Q, K, V = (weights[name] * norm.gain for name in ("Q", "K", "V"))
    if norm.bias is None:
        return replace(attention, Q=Q, K=K, V=V)
    b, drift = weights["Q"] @ norm.bias, (attention.OV @ norm.bias).sum(0)
    if attention.query_bias is not None:
        b = b + attention.query_bias
    if attention.value_bias is not None:
        drift = drift + attention.value_bias
    return replace(attention, Q=Q, K=K, V=V, query_bias=b, value_bias=drift)


def one_layer(
    name: str, model: nn.Module, inputs: dict[str, Tensor], layer: int, colder: tuple[float, ...], horizon: float
) -> dict[str, Any]:
    from attn_flow.hooks import attentions, norms, record

    norm = norms(model)[layer]
    if norm is None:
        raise ValueError(f"layer {layer} of {name} has no norm before it; expected tokens on a sphere.")
    attention = fold_norm(attentions(model)[layer], norm)
    z = record(model, inputs, points=f"blocks.{layer}.attn.hook_in").x[0, 0]
    sphere = Sphere(attention.dim**0.5)
    x0 = sphere.retract(z / norm.gain if norm.bias is None else (z - norm.bias) / norm.gain)
    where = f"{name} layer {layer}: "
    run: dict[str, Any] = {"name": name, "layer": layer, "n": x0.shape[0], "d": attention.dim, "heads": attention.heads}
    error = wrapped_against_flow(model, inputs, layer, z)
    claims = [bound(where + "wrapped layer against the flow of its weights, relative", error, at_most=1e-6)]
    run["ideal"] = ideal(attention, x0 / sphere.radius)
    ideal_run = run["ideal"]
    claims.append(
        bound(
            where + f"head {ideal_run['head']}, keys fill the sphere: W2 to P_# mu_0 at the end over its start",
            ideal_run["w2"][-1] / ideal_run["w2"][0],
            at_most=0.1,
        )
    )
    claims.append(
        claim(
            where + "the same: slope of log |x - P(x)| of the median token over the predicted g",
            ideal_run["measured"] / ideal_run["g"],
            1.0,
            0.25,
        )
    )
    # What all heads together predict at zero temperature, token by token.
    cold = cold_flow(attention, x0, torch.tensor([0.0, 2 * horizon]), h=0.5).x[-1]
    drift = attention.with_beta(float("inf")).drift(cold, UniformSphere(attention.dim))
    run["cold_speed"] = float(sphere.tangent(cold, drift).norm(dim=-1).max()) / sphere.radius
    run["real"] = [real(attention, x0, cold, factor, horizon) for factor in colder]
    for path in run["real"]:
        at = where + f"real tokens, beta x {path['factor']:g}: "
        if path["factor"] == 1:
            claims.append(
                bound(
                    at + "too few tokens to fill the sphere, beta |Gx| n^(-2/(d-1))", path["resolution"], at_least=1.0
                )
            )
            claims.append(bound(at + "clusters at the end", path["clusters"][-1], at_most=1))
        least = min(path["w2"]) / path["w2"][0]
        claims.append(bound(at + "no concentration on P_# mu_0, least W2 over its start", least, at_least=0.5))
        # One cluster sees only itself; where tokens are still apart V alone does not move them.
        if path["clusters"][-1] == 1:
            claims.append(bound(at + "drift at the end against V x + c, relative", path["self_only"], at_most=0.05))
        else:
            apart = f"{path['clusters'][-1]} clusters, so that the drift at the end is not V x + c, relative"
            claims.append(bound(at + apart, path["self_only"], at_least=0.05))
    run["claims"] = claims
    return run


def wrapped_against_flow(model: nn.Module, inputs: dict[str, Tensor], layer: int, z: Tensor, steps: int = 4) -> float:
    """`wrap` inside the model and `flow` outside it: the same Euler steps on the norm's ellipsoid, relative error."""
    from attn_flow.hooks import attentions, blocks, geometries, record, wrap

    ellipsoid, block = geometries(model)[layer], blocks(model)[layer]
    with wrap(model, [layer], steps=steps, horizon=1.0, geometry=ellipsoid):
        got = record(model, inputs, points=f"blocks.{layer}.hook_resid_mid").x[0, 0]
    moved = flow(attentions(model)[layer], z, [0.0, 1.0], geometry=ellipsoid, step=euler, h=1 / steps).x[-1]
    with torch.no_grad():
        expected = block[block.architecture.norm1](moved)
    return float((got - expected).norm() / expected.norm())


def cold_flow(attention: Attention, x0: Tensor, t: Tensor, h: float) -> Trajectory:
    """The zero-temperature flow with keys that fill the sphere: every token by itself, in fixed steps."""
    sphere, filled = Sphere(float(x0.norm(dim=-1).mean())), UniformSphere(attention.dim)
    return flow(attention.with_beta(float("inf")).with_context(filled), x0, t, geometry=sphere, step=rk4, h=h)


def heads(attention: Attention) -> list[Attention]:
    """Every head alone, without biases: what the theorem speaks of."""
    parts: Any = {name: getattr(attention, name) for name in ("Q", "K", "V", "O")}
    alone = [slice(h, h + 1) for h in range(attention.heads)]
    beta = torch.as_tensor(attention.beta, dtype=torch.float64).expand(attention.heads)
    return [Attention(beta=beta[h], **{name: w[h] for name, w in parts.items()}) for h in alone]


def small_spectrum(head: Attention) -> Tensor:
    """The nonzero eigenvalues of M = O V K^T Q, from the small matrix Q O V K^T (k, k), largest real part first."""
    Q, K, V, O = (head.tensors[name][0] for name in "QKVO")
    found = torch.linalg.eigvals(Q @ O @ V @ K.mT)
    return found[found.real.argsort(descending=True)]


def ideal(attention: Attention, x0: Tensor) -> dict[str, Any]:
    """The head with the clearest real leading eigenvalue, its keys filling the sphere: tokens move one by one."""
    found = []
    for h, head in enumerate(heads(attention)):
        values = small_spectrum(head)
        if abs(float(values[0].imag)) < 1e-9 and float(values[0].real) > 0:
            found.append((float(values[0].real - values[1].real) / float(values[0].real), h))
    h = max(found)[1] if found else 0
    head = heads(attention)[h]
    target = limit(head)
    assert target.spectrum is not None  # one head without biases
    assert target.rates is not None
    g = target.rates.g
    t = torch.linspace(0, 6 / g, 61)
    path = cold_flow(head, x0, t, h=0.1 / g)
    goal = target.push_forward(x0)
    away = (path.x - goal).norm(dim=-1)  # tokens move by themselves: the pairing is optimal for dim E = 1
    median = away.median(-1).values
    inside = (median < 0.3) & (median > 1e-3)
    slope = _slope(path.t[inside], median[inside].log()) if int(inside.sum()) > 2 else float("nan")
    return {
        "head": h,
        "case": target.case,
        "real_leading": len(found),
        "leading": target.spectrum.leading,
        "gap": target.spectrum.gap,
        "g": g,
        "measured": -slope,
        "t": path.t.tolist(),
        "w2": away.square().mean(-1).sqrt().tolist(),
        "median": median.tolist(),
    }


def _slope(t: Tensor, y: Tensor) -> float:
    t = (t - t.mean()).to(y)
    return float((t * y).sum() / t.square().sum())


def real(attention: Attention, x0: Tensor, cold: Tensor, factor: float, horizon: float) -> dict[str, Any]:
    """All heads and biases, tokens attending to each other."""
    sphere = Sphere(attention.dim**0.5)
    warm = attention.with_beta(attention.beta * factor)
    path = flow(warm, x0, torch.linspace(0, horizon, 21), geometry=sphere, step=rk4, h=0.25)
    unit = path.x / sphere.radius
    n = x0.shape[0]
    cosines = ((unit @ unit.mT).sum((-1, -2)) - n) / (n * n - n)
    last = path.x[-1]
    V = attention.OV.sum(0)
    alone = last @ V.mT if attention.value_bias is None else last @ V.mT + attention.value_bias
    drift = warm.drift(last)
    return {
        "factor": factor,
        "t": path.t.tolist(),
        "w2": [float(wasserstein(x / sphere.radius, cold / sphere.radius)) for x in path.x],
        "cosine": cosines.tolist(),
        "clusters": [int(clusters(x, tol=APART).counts) for x in unit],
        "speed": float((sphere.tangent(last, drift).norm(dim=-1) / sphere.radius).max()),
        "self_only": float((drift - alone).norm() / alone.norm()),
        "resolution": float(resolution(warm, x0, warn=False).number.max()),
    }


def plot(numbers: dict[str, Any]) -> Figure:
    runs = numbers["runs"]
    figure, axes = panels(max(len(runs), 1), 3, title="A trained layer iterated with its own weights on real tokens")
    for j, run in enumerate(runs):
        name = f"{run['name']} layer {run['layer']}"
        top, middle, bottom = (axes[row * len(runs) + j] for row in range(3))
        one = run["ideal"]
        t = torch.tensor(one["t"])
        top.semilogy(t, one["w2"], label=r"$W_2$ to $P_\#\mu_0$")
        top.semilogy(t, one["median"], label="median token")
        start = one["median"][len(t) // 3]
        top.semilogy(t, start * torch.exp(-one["g"] * (t - t[len(t) // 3])), label="slope $g$", **THEORY)
        label(top, f"{name}: head {one['head']}, keys fill the sphere", "t", "distance")
        for path, colour in zip(run["real"], shades(len(run["real"]))):
            words = rf"$\beta\times{path['factor']:g}$"
            middle.plot(path["t"], path["w2"], color=colour, label=words)
            bottom.plot(path["t"], path["cosine"], color=colour, label=f"{words}, clusters: {path['clusters'][-1]}")
        middle.set_ylim(bottom=0)
        bottom.set_ylim(-0.1, 1.05)
        label(middle, f"{name}: all heads, real tokens", "t", r"$W_2$ to $P_\#\mu_0$")
        label(bottom, f"{name}: tokens come together", "t", "mean cosine")
    held = sum(c["holds"] for c in numbers["claims"])
    words = ", ".join(f"{r['name']} layer {r['layer']}: n={r['n']}, d={r['d']}, {r['heads']} heads" for r in runs)
    missing = f" Not run: {'; '.join(numbers['missing'])}." if numbers["missing"] else ""
    caption(
        figure,
        f"{words}. {held} of {len(numbers['claims'])} claims hold. Keys that fill the sphere follow the limit map; a "
        f"few dozen real tokens do not fill it.{missing}",
    )
    return figure
