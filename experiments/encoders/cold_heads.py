"""Low temperature in trained heads: where n tokens resolve it, does a head's own flow go to the predicted projection?

The theorem (Alcalde, Bungert, Riedl, Roith, arXiv 2605.10931) has one head, constant weights and a cloud on a sphere:
    x' = P_x V (m_beta[mu_t](G x + b) - mean of mu_t),
here with the weights of one trained head, the tokens that reach it as mu_0 and beta a multiple of the trained one; the
mean value, a drift common to all tokens, is left out, as the theorem has none. Cold and resolved are counted:
exp(entropy) tokens share a query's attention, and the mean logit is so much of the way from the average to the largest.
The prediction is P(x) = Pi x/|Pi x| with M = V S G, S the cloud's covariance. Baselines are the projections of the
layer's other heads, of the head with its queries rotated, the principal axis of what it writes, that of the cloud, and
random ones. The experiment is ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_least
from attn_flow.experiments.encoders import fetched, load_fetched, of_one_size, sample_inputs
from attn_flow.experiments.encoders.reactions import ReactionEncoder, count_atoms
from attn_flow.experiments.encoders.tables import TableEncoder, draw_table
from attn_flow.experiments.figures import COLOURS, THEORY, caption, label, panels
from attn_flow.experiments.parts import kept_part
from attn_flow.hooks import attentions, record
from attn_flow.hooks.corpus import fingerprint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENCODERS = ("tabpfn", "rxnmapper", "rxnmap", "sapiens", "sapiens-light", "minilm", "antiberty", "m3e")
FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # of the trained beta
SHARED = 10.0  # tokens that share a query's attention where n resolves beta
COLD = 0.8  # of the way from the mean logit to the largest
QUERIES = 256  # by which a head is judged
RANDOM = 4  # axes drawn from the cloud's covariance
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
    rows = []
    for factor in factors:
        P = (factor * logits).softmax(-1)
        reached = ((P * logits).sum(-1) - mean) / (top - mean)
        shared = torch.special.entr(P).sum(-1).exp().median()
        rows.append({"factor": factor, "shared": float(shared), "cold": float(reached.mean())})
    return rows


def key_dimension(head: Head) -> float:
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
    baselines = {name: axis for name, axis in others.items() if axis is not None}
    turn = torch.linalg.qr(torch.randn(len(head.Q), len(head.Q), generator=generator))[0].to(head.Q)
    rotated = predicted(replace(head, Q=turn @ head.Q))
    if rotated is not None:
        baselines["rotated"] = rotated
    written = torch.linalg.svd(head.O.double() @ (head.V.double() @ root), full_matrices=False)[0][:, 0]
    drawn = {"values": written, "principal": axes[:, -1]}
    for i in range(RANDOM):
        drawn[f"random {i}"] = root @ torch.randn(len(spread), generator=generator).double()
    for name, e in drawn.items():
        e = e / e.norm()
        baselines[name] = Axis(e, e, math.nan, math.nan)
    return baselines


def own_flow(
    head: Head, factor: float, targets: dict[str, Axis], steps: int, *, as_theory: bool = False
) -> tuple[dict[str, float], float]:
    """The head's flow from its tokens at a multiple of the trained beta.

    as_theory: in the field of the ellipsoid with the covariance of mu_0 at zero temperature, V S g / sqrt(<g, S g>) up
    to a factor of time.

    Returns by target the largest fraction of the way, 1 - W2(x_t, P x_0) / W2(x_0, P x_0), and the last spread of
    directions over the first.
    """
    x, R = head.x, head.R
    axes = torch.stack([axis.e for axis in targets.values()], -1).to(x)  # (d, targets)
    sides = torch.stack([axis.sides(x) for axis in targets.values()], -1).sort(0).values  # (n, targets)

    def distance(x: Tensor) -> Tensor:
        """W2 to two atoms +-e: tokens in the order of <x, e> fill them, and |x/R -+ e|^2 = 2 -+ 2 <x/R, e>."""
        return (2 - 2 * (sides * (x @ axes / R).sort(0).values).double().mean(0)).clamp_min(0).sqrt()

    start = distance(x)
    best = torch.zeros_like(start)
    keys, values = x @ head.K.mT, x @ head.V.mT
    joint = (keys - keys.mean(0)).mT @ (values - values.mean(0)) / (len(x) - 1)
    covariance = torch.cov(keys.mT)
    h = 0.0
    for step in range(steps):
        q = x @ head.Q.mT + head.bias
        if as_theory:
            drift = q @ joint @ head.O.mT / ((q @ covariance) * q).sum(-1, keepdim=True).sqrt()
        else:
            keys, values = x @ head.K.mT, x @ head.V.mT
            P = (factor * head.beta * q @ keys.mT).softmax(-1)
            drift = (P @ values - values.mean(0)) @ head.O.mT
        velocity = drift - (drift * x).sum(-1, keepdim=True) * x / R**2
        speed = velocity.norm(dim=-1) / R
        if step == 0:
            h = STRIDE / float(speed.mean())
        x = x + min(h, 3 * STRIDE / float(speed.max())) * velocity
        x = x / x.norm(dim=-1, keepdim=True) * R
        best = torch.maximum(1 - distance(x) / start, best)
    spread = lambda x: float((x - x.mean(0)).square().sum(-1).mean().sqrt() / R)
    return dict(zip(targets, best.tolist())), spread(x) / spread(head.x)


def tokens(model: Any, tokenizer: Any, name: str, n: int, generator: torch.Generator) -> list[Tensor]:
    """For every layer n of the tokens that reach it, (n, d): of one table, or of texts pooled."""
    with torch.no_grad():
        if isinstance(model, TableEncoder):
            inputs = {"src": model.rows(*draw_table(n, spread=0.5, generator=generator))[None]}
            path = record(model, inputs, points="attn.hook_in")
        elif isinstance(model, ReactionEncoder):
            chosen = of_one_size(sample_inputs(name), count_atoms, 8, 128)
            path = record(model, {"src": torch.stack([model.atoms(r) for r in chosen])}, points="attn.hook_in")
        else:
            texts = sorted(sample_inputs(name)[:100], key=len, reverse=True)[: max(4, n // 64)]
            path = record(model, tokenizer, texts, points="attn.hook_in", max_length=128)
    assert path.mask is not None  # recorded paths have one
    pooled = [x[path.mask] for x in path.x]
    rows = torch.randperm(len(pooled[0]), generator=generator)[:n]
    return [level[rows] for level in pooled]


def one_encoder(name: str, n: int, steps: int, seed: int) -> list[dict[str, Any]]:
    """Every head of every layer: its resolution, and its own flow at the coldest beta that n resolves."""
    model, tokenizer = load_fetched(name)
    generator = torch.Generator().manual_seed(seed)
    clouds = tokens(model, tokenizer, name, n, generator)
    rows = []
    with torch.no_grad():
        for layer, (attention, z) in enumerate(zip(attentions(model), clouds)):
            heads = [head_of(attention, z, h) for h in range(attention.heads)]
            axes = [predicted(head) for head in heads]
            for h, (head, axis) in enumerate(zip(heads, axes)):
                rows.append({"layer": layer, "head": h, **one_head(head, axis, axes, h, steps, generator)})
    return rows


def one_head(
    head: Head, axis: Axis | None, axes: list[Axis | None], h: int, steps: int, generator: torch.Generator
) -> dict[str, Any]:
    """The numbers of one head; "fraction" is None unless it is cold and resolved at some beta, and does not rotate."""
    by_factor = resolved(head)
    fit = [s for s in by_factor if s["shared"] >= SHARED and s["cold"] >= COLD]
    numbers: dict[str, Any] = {
        "n": len(head.x),
        "dimension": key_dimension(head),
        "by_factor": by_factor,
        "factor": fit[-1]["factor"] if fit else None,
        "rotates": axis is None,
        "fraction": None,
    }
    if not fit or axis is None:
        return numbers
    others = {f"head {i}": other for i, other in enumerate(axes) if i != h}
    targets = {"own": axis, **baseline_axes(head, others, generator)}
    ways, spread = own_flow(head, fit[-1]["factor"], targets, steps)
    own = ways.pop("own")
    name = max(ways, key=lambda name: ways[name])
    return numbers | {
        "if_theory": own_flow(head, 1.0, {"own": axis}, steps, as_theory=True)[0]["own"],
        "leading": axis.leading,
        "gap": axis.gap,
        "fraction": own,
        "baseline": ways[name],
        "best baseline": name,
        "baselines": len(ways),
        "spread": spread,
    }


def compute(
    quick: bool = False,
    seed: int = 0,
    progress: bool = False,
    parts: Path | None = None,
    names: tuple[str, ...] = (),
    n: int = 512,
) -> dict[str, Any]:
    """Run every head of some encoders.

    Args:
        quick: one small encoder and few tokens.
        seed: of tokens and baselines.
        progress: show a progress bar.
        parts: a folder for finished encoders, see `kept_part`.
        names: which encoders; by default those of ENCODERS that were fetched.
        n: tokens of every cloud.
    """
    wanted = names or (("sapiens",) if quick else ENCODERS)
    n, steps = (256, 20) if quick else (n, 40)
    present = [name for name in wanted if fetched(name) is not None]
    heads: dict[str, list[dict[str, Any]]] = {}
    with progress_bar("cold heads", len(present), progress) as advance:
        for name in present:
            advance(0, note=name)
            options = {"n": n, "steps": steps, "seed": seed, "weights": fingerprint(load_fetched(name)[0])}
            heads[name] = kept_part(parts, f"heads-{name}", options, partial(one_encoder, name, n, steps, seed))
            advance(note=name)
    return {
        "seed": seed,
        "n": n,
        "steps": steps,
        "heads": heads,
        "shares": {name: shares(rows) for name, rows in heads.items()},
        "missing": [name for name in wanted if name not in present],
        "claims": _claims([head for rows in heads.values() for head in rows]),
    }


def shares(heads: list[dict[str, Any]]) -> dict[str, float]:
    """Of all heads those cold and resolved at some beta; of those that do not rotate, what became of them."""
    fit = [head for head in heads if head["factor"] is not None]
    run = [head for head in fit if head["fraction"] is not None]
    best = max(run, key=lambda head: head["fraction"] - head["baseline"], default=None)
    mean = lambda values: sum(values) / max(1, len(run))
    median = lambda key: sorted(head[key] for head in run)[len(run) // 2] if run else math.nan
    return {
        "heads": len(heads),
        "resolved": len(fit) / len(heads),
        "rotate": sum(head["rotates"] for head in fit) / max(1, len(fit)),
        "run": len(run),
        "above baselines": mean([head["fraction"] > head["baseline"] for head in run]),
        "half way": mean([head["fraction"] > 0.5 * head["if_theory"] for head in run]),
        "chance": mean([1 / (1 + head["baselines"]) for head in run]),
        "median": median("fraction"),
        "median if theory held": median("if_theory"),
        "best": best["fraction"] if best else math.nan,
        "best if theory held": best["if_theory"] if best else math.nan,
    }


def _claims(heads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Shares over all heads; the chance beside the second is that of one axis among its baselines."""
    if not any(head["fraction"] is not None for head in heads):
        return []
    share = shares(heads)
    chance, above = share["chance"], share["above baselines"]
    of_theory = share["best"] / share["best if theory held"]
    return [
        at_least("share of heads cold and resolved at some beta", share["resolved"], 0.5),
        at_least(f"own projection nearer than every baseline (chance {chance:.2f}), share", above, 3 * chance),
        at_least("most: own projection nearer than every baseline, share", above, 0.5),
        at_least("best case: fraction of the way over that if theory held", of_theory, 0.5),
        at_least("most: more than half of what theory gives, share", share["half way"], 0.5),
    ]


def plot(numbers: dict[str, Any]) -> Figure:
    """How cold each head can be, and how far its tokens go towards its limit and towards the best baseline."""
    figure, (a, b) = panels(2, title="Trained heads at low temperature")
    for i, (name, rows) in enumerate(numbers["heads"].items()):
        mark: dict[str, Any] = {"color": COLOURS[i % 7], "linestyle": "", "marker": "os"[i // 7], "markersize": 3}
        coldest = {head["dimension"]: [s["cold"] for s in head["by_factor"] if s["shared"] >= SHARED] for head in rows}
        a.plot(*zip(*[(dimension, max(cold)) for dimension, cold in coldest.items() if cold]), **mark, label=name)
        run = [head for head in rows if head["fraction"] is not None]
        b.plot([head["baseline"] for head in run], [head["fraction"] for head in run], **mark)
    a.axhline(COLD, **THEORY)
    a.set(xscale="log", ylim=(0.2, 1.0))  # room for the legend below
    b.axline((0, 0), slope=1, **THEORY)
    has_heads = bool(numbers["heads"])
    label(
        a,
        "heads where ten tokens can share",
        "dimensions of keys that queries tell apart",
        "coldness at the coldest such beta",
        has_heads,
    )
    label(b, "at the coldest beta resolved", "fraction of the way to the best baseline", "to its own limit", False)
    medians = [row["median if theory held"] for row in numbers["shares"].values() if row["run"]]
    theory = f" In theory the medians in (b) are {min(medians):.2f} to {max(medians):.2f}." if medians else ""
    missing = f" Not run: {', '.join(numbers['missing'])}." if numbers["missing"] else ""
    caption(
        figure,
        f"n = {numbers['n']} tokens, {numbers['steps']} steps, seed {numbers['seed']}. (a) heads above the dashed line "
        f"are cold and resolved. (b) above the dashed line a head goes nearer to its own limit.{theory}{missing}",
    )
    return figure
