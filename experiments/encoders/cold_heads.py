"""Low temperature in trained heads: where n tokens resolve it, does a head's own flow go to the predicted projection?

The theorem (Alcalde, Bungert, Riedl, Roith, arXiv 2605.10931) has one head, unchanging weights and a cloud on a sphere:
    x' = P_x V (m_beta[mu_t](G x + b) - mean of mu_t),
here with the weights of one trained head, the tokens that reach it as mu_0 and beta a multiple of the trained one; the
mean value, a drift common to all tokens, is left out, as the theorem has none (`common=True` keeps it). Cold and
resolved are counted, not guessed from a dimension: exp(entropy) tokens share a query's attention, and the mean logit is
so much of the way from the average to the largest. The prediction is P(x) = Pi x/|Pi x| with M = V S G, S the cloud's
covariance. All heads of several encoders; baselines are the projections of the layer's other heads, of the head with
its queries rotated, the principal axis of what it writes, that of the cloud, and random ones. Ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import bound
from attn_flow.experiments.encoders import fetched, load_fetched, sample_inputs
from attn_flow.experiments.encoders.cold_heads_figure import plot as plot
from attn_flow.experiments.encoders.reactions import ReactionEncoder, of_one_size
from attn_flow.experiments.encoders.tables import TableEncoder, draw_table
from attn_flow.experiments.parts import kept_part
from attn_flow.hooks.fingerprints import fingerprint
from attn_flow.probe.recording import record_encoder

ENCODERS = ("tabpfn", "rxnmapper", "rxnmap", "sapiens", "sapiens-light", "minilm", "antiberty", "m3e")
TIED = ("rxnmapper", "rxnmap")  # one block fired again and again
FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # of the trained beta
SHARED = 10.0  # tokens that share a query's attention where n resolves beta
COLD = 0.8  # of the way from the mean logit to the largest
QUERIES = 256  # by which a head is judged
TRIED = 4  # of the best heads, until one does not rotate with more tokens
RANDOM = 4  # axes drawn from the cloud's law
STRIDE = 0.15  # radians that a token goes in a step, on average at first


@dataclass(frozen=True, eq=False)
class Head:
    """One head on n tokens x of length R: weights q, k, v, o, bias of queries, beta as trained."""

    x: Tensor
    Q: Tensor
    K: Tensor
    V: Tensor
    O: Tensor
    bias: Tensor
    beta: float

    @property
    def R(self) -> Tensor:
        return self.x[0].norm()


def head_of(attention: Attention, z: Tensor, h: int) -> Head:
    """Head h of a layer on the tokens z (n, d), put on one sphere."""
    assert attention.Q is not None  # attentions of encoders have all four
    assert attention.K is not None
    assert attention.V is not None
    assert attention.O is not None
    x = z / z.norm(dim=-1, keepdim=True) * z.norm(dim=-1).mean()
    Q = attention.Q[h]
    bias = torch.zeros_like(Q[:, 0]) if attention.query_bias is None else attention.query_bias[h]
    beta = float(torch.as_tensor(attention.beta, dtype=torch.float64).expand(attention.heads)[h])
    return Head(x, Q, attention.K[h], attention.V[h], attention.O[h], bias, beta)


def resolved(head: Head, factors: Sequence[float] = FACTORS) -> list[dict[str, float]]:
    """By factor of beta: shared, the median of exp(entropy) over queries, and cold, the share of the way to the top."""
    logits = head.beta * (head.x[:QUERIES] @ head.Q.mT + head.bias) @ (head.x @ head.K.mT).mT
    mean, top = logits.mean(-1), logits.amax(-1)
    found = []
    for factor in factors:
        P = (factor * logits).softmax(-1)
        reached = ((P * logits).sum(-1) - mean) / (top - mean)
        shared = torch.special.entr(P).sum(-1).exp().median()
        found.append({"factor": factor, "shared": float(shared), "cold": float(reached.mean())})
    return found


def seen_dimension(head: Head) -> float:
    """Dimensions of the keys as the queries tell them apart: (sum s)^2 / sum s^2 of the covariance's eigenvalues s."""
    q, k = (head.x @ head.Q.mT + head.bias).double(), (head.x @ head.K.mT).double()
    s = torch.linalg.eigvals(torch.cov(k.mT) @ (q.mT @ q / len(q))).real.clamp_min(0)
    return float(s.sum() ** 2 / s.square().sum())


@dataclass(frozen=True, eq=False)
class Axis:
    """A predicted limit +-e: tokens go to the side of `left`. None of it where the leading eigenvalues rotate."""

    e: Tensor
    left: Tensor
    leading: float
    gap: float

    def sides(self, x: Tensor) -> Tensor:
        """P(x) = side e, for tokens x (n, d): 1 or -1, (n,)."""
        return (x.double() @ self.left).sign().to(x)


def predicted(head: Head) -> Axis | None:
    """The leading eigenvector of M = O V S K^T Q, by the small matrix Q O V S K^T that has the same eigenvalues."""
    S = torch.cov(head.x.double().mT)
    B = head.O.double() @ head.V.double() @ S @ head.K.double().mT  # (d, k)
    values, right = torch.linalg.eig(head.Q.double() @ B)
    order = values.real.argsort(descending=True)
    first = int(order[0])
    if abs(float(values[first].imag)) > 1e-9 * float(values.abs().max()):
        return None
    e = B @ right[:, first].real
    left = torch.linalg.inv(right)[first].real @ head.Q.double()
    e = e / e.norm()
    return Axis(e, left / (left @ e), float(values[first].real), float((values[first] - values[order[1]]).real))


def baseline_axes(head: Head, others: dict[str, Axis | None], generator: torch.Generator) -> dict[str, Axis]:
    """Other axes: of the other heads, of this head with its queries rotated, its values', and the cloud's.

    The first know the layer, "rotated" and "values" know what this head writes but not whom it attends to; the cloud's
    are its principal axis and random ones of its covariance.
    """
    spread, axes = torch.linalg.eigh(torch.cov(head.x.double().mT))
    root = axes * spread.clamp_min(0).sqrt()  # a covariance has none below
    found = {name: axis for name, axis in others.items() if axis is not None}
    turn = torch.linalg.qr(torch.randn(len(head.Q), len(head.Q), generator=generator))[0].to(head.Q)
    rotated = predicted(replace(head, Q=turn @ head.Q))
    if rotated is not None:
        found["rotated"] = rotated
    written = torch.linalg.svd(head.O.double() @ (head.V.double() @ root), full_matrices=False)[0][:, 0]
    drawn = {"values": written, "principal": axes[:, -1]}
    for i in range(RANDOM):
        drawn[f"random {i}"] = root @ torch.randn(len(spread), generator=generator).double()
    for name, e in drawn.items():
        e = e / e.norm()
        found[name] = Axis(e, e, math.nan, math.nan)
    return found


def own_flow(
    head: Head,
    factor: float,
    targets: dict[str, Axis],
    steps: int,
    *,
    common: bool = False,
    frozen: bool = False,
    as_theory: bool = False,
) -> dict[str, Any]:
    """The head's flow from its tokens: by target the largest fraction of the way, 1 - W2(x_t, P x_0) / W2(x_0, P x_0).

    common: with the mean value. frozen: tokens in the field of mu_0. as_theory: in the field of the
    ellipsoid with the covariance of mu_0 at zero temperature, V S g / sqrt(<g, S g>) up to a factor of time.
    Returns by target fraction and time, in units of the layer's step; and the last spread of directions over the first.
    """
    x, R = head.x, head.R
    axes = torch.stack([axis.e for axis in targets.values()], -1).to(x)  # (d, targets)
    sides = torch.stack([axis.sides(x) for axis in targets.values()], -1).sort(0).values  # (n, targets)

    def away(x: Tensor) -> Tensor:
        """W2 to two atoms +-e: tokens in the order of <x, e> fill them, and |x/R -+ e|^2 = 2 -+ 2 <x/R, e>."""
        return (2 - 2 * (sides * (x @ axes / R).sort(0).values).double().mean(0)).clamp_min(0).sqrt()

    start = away(x)
    best, when = torch.zeros_like(start), torch.zeros_like(start)
    keys, values = x @ head.K.mT, x @ head.V.mT
    joint, own = (keys - keys.mean(0)).mT @ (values - values.mean(0)), torch.cov(keys.mT)
    t, h = 0.0, 0.0
    for step in range(steps):
        if not frozen:
            keys, values = x @ head.K.mT, x @ head.V.mT
        q = x @ head.Q.mT + head.bias
        if as_theory:
            drift = q @ (joint / (len(x) - 1)) @ head.O.mT / ((q @ own) * q).sum(-1, keepdim=True).sqrt()
        else:
            P = (factor * head.beta * q @ keys.mT).softmax(-1)
            drift = (P @ values - (0.0 if common else values.mean(0))) @ head.O.mT
        velocity = drift - (drift * x).sum(-1, keepdim=True) * x / R**2
        speed = velocity.norm(dim=-1) / R
        if step == 0:
            h = STRIDE / float(speed.mean())
        pace = min(h, 3 * STRIDE / float(speed.max()))
        x, t = x + pace * velocity, t + pace
        x = x / x.norm(dim=-1, keepdim=True) * R
        way = 1 - away(x) / start
        when = torch.where(way > best, t, when)
        best = torch.maximum(way, best)
    spread = lambda x: float((x - x.mean(0)).square().sum(-1).mean().sqrt() / R)
    found = {name: [float(best[i]), float(when[i])] for i, name in enumerate(targets)}
    return {"fraction": found, "spread": spread(x) / spread(head.x)}


def tokens(model: Any, tokenizer: Any, name: str, n: int, generator: torch.Generator) -> tuple[list[Attention], Any]:
    """The attention of every layer, and n of the tokens that reach it, (layers, n, d): one table, or texts pooled."""
    with torch.no_grad():
        if isinstance(model, TableEncoder):
            recording = record_encoder(
                model, {"src": model.rows(*draw_table(n, spread=0.5, generator=generator))[None]}, None
            )
        elif isinstance(model, ReactionEncoder):
            chosen = of_one_size(sample_inputs(name), 8, 128)
            recording = record_encoder(model, {"src": torch.stack([model.atoms(r) for r in chosen])}, None)
        else:
            texts = sorted(sample_inputs(name)[:100], key=len, reverse=True)[: max(4, n // 64)]
            recording = record_encoder(model, tokenizer, texts, max_length=128)
    pooled = [torch.cat(level) for level in recording.states[:-1]]
    chosen_rows = torch.randperm(len(pooled[0]), generator=generator)[:n]
    return recording.attentions, [level[chosen_rows] for level in pooled]


def one_encoder(name: str, n: int, steps: int, seed: int) -> list[dict[str, Any]]:
    """Every head of every layer: its resolution, and its own flow at the coldest beta that n resolves."""
    model, tokenizer = load_fetched(name)
    generator = torch.Generator().manual_seed(seed)
    attentions, clouds = tokens(model, tokenizer, name, n, generator)
    found = []
    with torch.no_grad():
        for layer, (attention, z) in enumerate(zip(attentions, clouds)):
            heads = [head_of(attention, z, h) for h in range(attention.heads)]
            axes = [predicted(head) for head in heads]
            for h, (head, axis) in enumerate(zip(heads, axes)):
                found.append({"layer": layer, "head": h, **one_head(head, axis, axes, h, steps, generator)})
    return found


def one_head(
    head: Head, axis: Axis | None, axes: list[Axis | None], h: int, steps: int, generator: torch.Generator
) -> dict[str, Any]:
    """The numbers of one head; "fraction" is None unless it is cold and resolved at some beta, and does not rotate."""
    seen = resolved(head)
    fit = [s for s in seen if s["shared"] >= SHARED and s["cold"] >= COLD]
    found: dict[str, Any] = {
        "n": len(head.x),
        "dimension": seen_dimension(head),
        "seen": seen,
        "factor": fit[-1]["factor"] if fit else None,
        "rotates": axis is None,
        "fraction": None,
    }
    if not fit or axis is None:
        return found
    others = {f"head {i}": other for i, other in enumerate(axes) if i != h}
    targets = {"own": axis, **baseline_axes(head, others, generator)}
    run = own_flow(head, fit[-1]["factor"], targets, steps)
    best = max(way for name, (way, _) in run["fraction"].items() if name != "own")
    in_theory = own_flow(head, 1.0, {"own": axis}, steps, as_theory=True)["fraction"]["own"][0]
    return found | {
        "if_theory": in_theory,
        "leading": axis.leading,
        "gap": axis.gap,
        "fraction": run["fraction"]["own"][0],
        "baseline": best,
        "best baseline": max((n for n in run["fraction"] if n != "own"), key=lambda n: run["fraction"][n][0]),
        "baselines": len(targets) - 1,
        "spread": run["spread"],
    }


def colder(name: str, places: list[list[int]], n: int, steps: int, seed: int) -> dict[str, Any] | None:
    """A head at every beta, with n tokens: its fraction of the way, when, and two other flows at the coldest.

    The first of `places`, (layer, head), whose axis does not rotate on these tokens; None if all do.
    """
    model, tokenizer = load_fetched(name)
    generator = torch.Generator().manual_seed(seed)
    attentions, clouds = tokens(model, tokenizer, name, n, generator)
    with torch.no_grad():
        for layer, h in places:
            heads = [head_of(attentions[layer], clouds[layer], i) for i in range(attentions[layer].heads)]
            axes = [predicted(head) for head in heads]
            head, axis = heads[h], axes[h]
            if axis is not None:
                break
        if axis is None:
            return None
        others = {f"head {i}": other for i, other in enumerate(axes) if i != h}
        targets = {"own": axis, **baseline_axes(head, others, generator)}
        seen = resolved(head)
        runs = [{**s, **_best(own_flow(head, s["factor"], targets, steps))} for s in seen]
        coldest = max((s["factor"] for s in seen if s["shared"] >= SHARED), default=FACTORS[0])
        frozen = _best(own_flow(head, coldest, targets, steps, frozen=True))
        common = _best(own_flow(head, coldest, targets, steps, common=True))
        in_theory = _best(own_flow(head, 1.0, targets, steps, as_theory=True))
    about = {"encoder": name, "layer": layer, "head": h, "n": len(head.x), "rate": rate(head, axis)}
    return {**about, "coldest": coldest, "runs": runs, "frozen": frozen, "common": common, "if_theory": in_theory}


def _best(flow: dict[str, Any]) -> dict[str, float]:
    """Fraction and time of the own projection, and the best fraction of a baseline."""
    others = [way for target, (way, _) in flow["fraction"].items() if target != "own"]
    return {"fraction": flow["fraction"]["own"][0], "t": flow["fraction"]["own"][1], "baseline": max(others)}


def resolution_of_tables(n: int, seed: int) -> dict[str, float]:
    """TabPFN on one table of n rows: of all heads, the share that is cold and resolved at some beta."""
    model, tokenizer = load_fetched("tabpfn")
    with torch.no_grad():
        attentions, clouds = tokens(model, tokenizer, "tabpfn", n, torch.Generator().manual_seed(seed))
        seen = [resolved(head_of(A, z, h)) for A, z in zip(attentions, clouds) for h in range(A.heads)]
    fit = [any(s["shared"] >= SHARED and s["cold"] >= COLD for s in head) for head in seen]
    return {"n": n, "heads": len(fit), "resolved": sum(fit) / len(fit)}


def rate(head: Head, axis: Axis) -> float:
    """g of THEORY 1 with an ellipsoid sqrt(2 log n) S as support: gap sqrt(2 log n) / (R |S^{1/2} G e|)."""
    S = torch.cov(head.x.double().mT)
    g = head.K.double().mT @ head.Q.double() @ axis.e
    return float(axis.gap * math.sqrt(2 * math.log(len(head.x))) / (head.R * (g @ S @ g).sqrt()))


def compute(
    quick: bool = False,
    seed: int = 0,
    progress: bool = False,
    parts: Path | None = None,
    names: tuple[str, ...] = (),
    n: int = 512,
    large: int = 2048,
) -> dict[str, Any]:
    """names: which encoders, ENCODERS that were fetched unless given. n: tokens of every cloud; large: of the best head
    of TabPFN, whose resolution is counted with twice as many, too. parts: see `kept_part`."""
    wanted = names or (("sapiens",) if quick else ENCODERS)
    n, large, steps = (256, 256, 20) if quick else (n, large, 40)
    here = [name for name in wanted if fetched(name) is not None]
    heads: dict[str, list[dict[str, Any]]] = {}
    cold: list[dict[str, Any]] = []
    tables: dict[str, float] | None = None
    with progress_bar("cold heads", 2 * len(here), progress) as advance:
        for name in here:
            advance(0, note=name)
            asked = {"n": n, "steps": steps, "seed": seed, "weights": fingerprint(load_fetched(name)[0])}
            heads[name] = kept_part(parts, f"heads-{name}", asked, partial(one_encoder, name, n, steps, seed))
            if name == "tabpfn" and not quick:
                many = {"n": 2 * large, "seed": seed}
                run = partial(resolution_of_tables, 2 * large, seed)
                tables = kept_part(parts, "tables", {**many, "weights": asked["weights"]}, run)
            advance(note=name)
            places = [[head["layer"], head["head"]] for head in by_advance(heads[name])][:TRIED]
            if places and name in ("tabpfn", *TIED):
                size = large if name == "tabpfn" else n
                asked = {"weights": asked["weights"], "places": places, "n": size, "steps": steps, "seed": seed}
                case = kept_part(parts, f"colder-{name}", asked, partial(colder, name, places, size, steps, seed))
                cold += [case] if case else []
            advance(note=name)
    return {
        "seed": seed,
        "n": n,
        "steps": steps,
        "heads": heads,
        "colder": cold,
        "tables": tables,
        "shares": {name: shares(found) for name, found in heads.items()},
        "missing": [name for name in wanted if name not in here],
        "claims": _claims(heads, cold),
    }


def by_advance(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The heads that were run, first those that go farthest beyond their baselines."""
    return sorted(
        (head for head in found if head["fraction"] is not None), key=lambda head: head["baseline"] - head["fraction"]
    )


def shares(found: list[dict[str, Any]]) -> dict[str, float]:
    """Of all heads those cold and resolved at some beta; of those that do not rotate, what became of them."""
    fit = [head for head in found if head["factor"] is not None]
    run = [head for head in fit if head["fraction"] is not None]
    ways = sorted(head["fraction"] for head in run)
    best = next(iter(by_advance(found)), None)
    return {
        "heads": len(found),
        "resolved": len(fit) / len(found),
        "rotate": sum(head["rotates"] for head in fit) / max(1, len(fit)),
        "run": len(run),
        "above baselines": sum(head["fraction"] > head["baseline"] for head in run) / max(1, len(run)),
        "half way": sum(head["fraction"] > 0.5 * head["if_theory"] for head in run) / max(1, len(run)),
        "chance": sum(1 / (1 + head["baselines"]) for head in run) / max(1, len(run)),
        "median": ways[len(ways) // 2] if ways else math.nan,
        "median if theory held": sorted(head["if_theory"] for head in run)[len(run) // 2] if run else math.nan,
        "dimension": sorted(head["dimension"] for head in found)[len(found) // 2],
        "best": best["fraction"] if best else math.nan,
        "best of baselines": best["baseline"] if best else math.nan,
        "best if theory held": best["if_theory"] if best else math.nan,
    }


def slope(case: dict[str, Any]) -> float:
    """Of the time of the best fraction in log beta, over the betas that n resolves; NaN for fewer than three."""
    runs = [run for run in case["runs"] if run["shared"] >= SHARED]
    if len(runs) < 3:
        return math.nan
    x = torch.tensor([math.log(run["factor"]) for run in runs])
    y = torch.tensor([run["t"] for run in runs])
    return float(((x - x.mean()) * y).sum() / (x - x.mean()).square().sum())


def _claims(heads: dict[str, list[dict[str, Any]]], cold: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Shares over all heads; the chance beside the second is that of one axis among its baselines."""
    every = [head for found in heads.values() for head in found]
    if not every or not any(head["fraction"] is not None for head in every):
        return []
    found = shares(every)
    claims = [
        bound("share of heads cold and resolved at some beta", found["resolved"], at_least=0.5),
        bound(
            f"of these, own projection nearer than every baseline (chance {found['chance']:.2f}), share",
            found["above baselines"],
            at_least=3 * found["chance"],
        ),
        bound("most: own projection nearer than every baseline, share", found["above baselines"], at_least=0.5),
        bound(
            "best case: fraction of the way over that if theory held",
            found["best"] / found["best if theory held"],
            at_least=0.5,
        ),
        bound("most: more than half of what theory gives, share", found["half way"], at_least=0.5),
    ]
    for case in cold:
        where = f"{case['encoder']} layer {case['layer']} head {case['head']}"
        if not math.isnan(slope(case)):
            claims.append(
                bound(f"{where}: time against log beta, in units of 1/(2g)", 2 * case["rate"] * slope(case), at_least=0)
            )
    return claims
