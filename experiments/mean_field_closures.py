"""Closures on exchangeable tokens: how few numbers may stand for the rows of a table, layer by layer and through depth.

A closure turns the training rows, as a head sees them, into a field: for any query its head average and its log Z. Rows
held out meet the same field and themselves, as TabPFN has it, and were not there when it was found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_flow.experiments.encoders.tables import TableEncoder
from attn_flow.experiments.mean_field_chaos import Law, after_attention, size, spread_of
from attn_flow.hooks.weights import attentions
from attn_flow.measures import Cloud, Gaussian, Measure, Mixture
from attn_flow.probe.agreement import compare
from attn_flow.probe.head_space import HeadSpace, as_heads_see
from attn_flow.probe.quantised import MOST, Atoms, k_means, quantise

Field = Callable[[HeadSpace], tuple[Tensor, Tensor]]  # queries -> head averages (heads, m, v), log Z (heads, m)
Fit = Callable[[HeadSpace], tuple[Field, float]]  # training rows -> their field, and its numbers a head

RESIDUAL = 0.15  # of the spread 1.5 that atoms leave
RIDGE = 1e-3  # of the mean diagonal, when values are fitted again


def exact(space: HeadSpace) -> tuple[Field, float]:
    """All rows: attention itself."""

    def field(queries: HeadSpace) -> tuple[Tensor, Tensor]:
        scores = _scores(queries, space.y)
        return scores.softmax(-1) @ space.y[..., space.k :], scores.logsumexp(-1)

    return field, float(space.n * space.y.shape[-1])


def by_measure(measure: Callable[[HeadSpace], Measure], numbers: Callable[[HeadSpace], float]) -> Fit:
    """A law in the place of the cloud; its mass is the number of rows."""

    def fit(space: HeadSpace) -> tuple[Field, float]:
        mu = measure(space)

        def field(queries: HeadSpace) -> tuple[Tensor, Tensor]:
            log_Z = queries.beta * mu.log_partition(queries.g, queries.beta) + math.log(space.n)
            return queries.per_head(mu), log_Z

        return field, numbers(space)

    return fit


def gaussians(number: int) -> Fit:
    """A mixture of Gaussians, one for each cluster of k-means on the tokens, saturating at sqrt(2 log n_c)."""

    def measure(space: HeadSpace) -> Measure:
        x = space.x[None] / space.x.std(0).norm()
        label = k_means(x, torch.full_like(x[..., 0], 1 / space.n), 0.0, number)[0][0]
        groups = [label == c for c in range(number) if int((label == c).sum())]
        laws = [
            Gaussian.fit(Cloud(space.y[:, g]), shrinkage=0.0, cap=math.sqrt(2 * math.log(max(2, int(g.sum())))))
            for g in groups
        ]
        return Mixture(laws, torch.tensor([float(g.sum()) for g in groups]).to(space.y))

    return by_measure(measure, lambda s: number * (1 + _moments(s)))


def random_rows(number: int, generator: torch.Generator) -> Fit:
    """Rows drawn at random: what n = number would do."""

    def measure(space: HeadSpace) -> Measure:
        return Cloud(space.y[:, torch.randperm(space.n, generator=generator)[:number]])

    return by_measure(measure, lambda s: number * float(s.y.shape[-1]))


def atoms(refitted: bool, generator: torch.Generator | None = None, most: float = MOST) -> Fit:
    """The probe's weighted atoms of each head; refitted: with values that fit the rows' own averages best (ridge).

    generator: groups at random instead of clusters, the control. most: atoms over sqrt(n), at most.
    """

    def fit(space: HeadSpace) -> tuple[Field, float]:
        found = quantise(space, residual=RESIDUAL, most=most, generator=generator)
        values = _refitted(space, found) if refitted else found.y[..., space.k :]

        def field(queries: HeadSpace) -> tuple[Tensor, Tensor]:
            scores = _scores(queries, found.y) + found.log_mass[:, None]
            return scores.softmax(-1) @ values, scores.logsumexp(-1)

        return field, float(found.counts.double().mean()) * (space.y.shape[-1] + 1)

    return fit


def _refitted(space: HeadSpace, found: Atoms) -> Tensor:
    """Values u of the atoms: least |W u - averages|^2 with W the atoms' weights, near the clusters' means."""
    target = space.logits.softmax(-1) @ space.y[..., space.k :]
    W = (_scores(space, found.y) + found.log_mass[:, None]).softmax(-1)
    start = found.y[..., space.k :]
    gram = W.mT @ W
    eye = torch.eye(gram.shape[-1]).to(gram)
    ridge = RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    return start + torch.linalg.solve(gram + ridge * eye, W.mT @ (target - W @ start))


def _scores(queries: HeadSpace, y: Tensor) -> Tensor:
    """beta <q, k> for every query and key, (heads, m, K)."""
    k = queries.k
    return (queries.beta[..., None] * queries.g[..., :k]) @ y[..., :k].mT


def _moments(space: HeadSpace) -> float:
    """Numbers of a mean and of the parts of a covariance that a query meets."""
    k, v = space.k, space.y.shape[-1] - space.k
    return k + v + k * (k + 1) / 2 + k * v


def tails(space: HeadSpace) -> float:
    """A query's largest logit less their mean, in standard deviations, over the sqrt(2 log n) of a normal."""
    logits = space.logits
    top = (logits.amax(-1) - logits.mean(-1)) / logits.std(-1)
    return float(top.mean()) / math.sqrt(2 * math.log(space.n))


def closures(n: int, generator: torch.Generator) -> dict[str, Fit]:
    """What is compared; the last two are controls of about as many numbers as the refitted atoms have."""
    return {
        "one Gaussian": gaussians(1),
        "16 Gaussians": gaussians(16),
        "atoms": atoms(refitted=False),
        "refitted atoms": atoms(refitted=True),
        "random groups, refitted": atoms(refitted=True, generator=generator),
        "random rows": random_rows(min(n, math.ceil(4 * math.sqrt(n))), generator),
    }


def carried(model: TableEncoder, train: Tensor, held_out: Tensor, fit: Fit) -> dict[str, Any]:
    """One closure in every layer, against the encoder itself: training rows (n, d), rows held out (m, d).

    Returns by layer explained (on the encoder's own states), error of training and held-out rows over the training
    rows' spread, numbers a head; and the last states of held-out rows, "last" and with the encoder itself "own".
    """
    own, own_out, x, out = train, held_out, train, held_out
    found: dict[str, Any] = {name: [] for name in ("explained", "error", "held_out", "numbers")}
    for layer, attention in zip(model.layers, attentions(model)):
        here = as_heads_see(attention, own)
        true, (field, _) = exact(here)[0], fit(here)
        answer = here.assembled(true(here)[0])
        found["explained"].append(float(compare(here.assembled(field(here)[0]), answer).explained))
        own_out = _beside(layer, as_heads_see(attention, own_out), true)
        own = after_attention(layer, own, answer)
        space = as_heads_see(attention, x)
        field, numbers = fit(space)
        out = _beside(layer, as_heads_see(attention, out), field)
        x = after_attention(layer, x, space.assembled(field(space)[0]))
        found["error"].append(size(x - own) / spread_of(own))
        found["held_out"].append(size(out - own_out) / spread_of(own))
        found["numbers"].append(numbers)
    return {**found, "last": out, "own": own_out}


def _beside(layer: Any, rows: HeadSpace, field: Field) -> Tensor:
    """Held-out rows after a layer: they attend to the field and each to itself."""
    average, log_Z = field(rows)
    k = rows.k
    itself = rows.beta * (rows.g[..., :k] * rows.y[..., :k]).sum(-1)
    w = (itself - log_Z).sigmoid()[..., None]
    return after_attention(layer, rows.x, rows.assembled((1 - w) * average + w * rows.y[..., k:]))


def table_task(model: TableEncoder, law: Law, n: int, m: int, seed: int) -> dict[str, Any]:
    """n training rows and m held out of one law: every closure's errors, and the accuracy of the classifier's head."""
    generator = torch.Generator().manual_seed(seed)
    x, y = law.draw(n + m, generator)
    tokens = model.rows(x, y)
    held_out = tokens[n:] - model.y_encoder(y[n:, None])
    found = {}
    for name, fit in closures(n, generator).items():
        run = carried(model, tokens[:n], held_out, fit)
        own, last = (model.decoder(run.pop(key))[:, : law.classes].argmax(-1) for key in ("own", "last"))
        run["accuracy"] = float((last == y[n:]).float().mean())
        run["agreement"] = float((last == own).float().mean())
        run["numbers"] = sum(run["numbers"]) / len(run["numbers"])
        found[name] = run
    centres = torch.stack([x[:n][y[:n] == c].mean(0) for c in y[:n].unique()])
    nearest = y[:n].unique()[torch.cdist(x[n:], centres).argmin(-1)]
    return {
        "closures": found,
        "accuracy": float((own == y[n:]).float().mean()),
        "nearest_mean": float((nearest == y[n:]).float().mean()),
        "largest_class": float((y[n:] == y[:n].mode().values).float().mean()),
        "rows_numbers": float(n * 2 * tokens.shape[-1] / attentions(model)[0].heads),
    }


def more_atoms(model: TableEncoder, law: Law, n: int, mosts: tuple[float, ...], seed: int) -> dict[str, list[float]]:
    """Error of training rows after the last layer with refitted atoms, at most so many times sqrt(n), and the control.

    error, control (random groups) and atoms, their mean number a head, by entry of `mosts`.
    """
    generator = torch.Generator().manual_seed(seed)
    x = model.rows(*law.draw(n, generator))
    heads = attentions(model)[0].heads
    found: dict[str, list[float]] = {"error": [], "control": [], "atoms": []}
    for most in mosts:
        run = carried(model, x, x[:1], atoms(refitted=True, most=most))
        control = carried(model, x, x[:1], atoms(refitted=True, generator=generator, most=most))
        found["error"].append(run["error"][-1])
        found["control"].append(control["error"][-1])
        found["atoms"].append(sum(run["numbers"]) / len(run["numbers"]) / (2 * x.shape[-1] / heads + 1))
    return found


def components(model: TableEncoder, law: Law, n: int, numbers: tuple[int, ...], seed: int) -> dict[str, Any]:
    """Explained variance by layer of mixtures of so many Gaussians on the encoder's own states, and the tails there."""
    x = model.rows(*law.draw(n, torch.Generator().manual_seed(seed)))
    explained: dict[str, list[float]] = {str(number): [] for number in numbers}
    far = []
    for layer, attention in zip(model.layers, attentions(model)):
        space = as_heads_see(attention, x)
        answer = space.assembled(exact(space)[0](space)[0])
        for number in numbers:
            predicted = space.assembled(gaussians(number)(space)[0](space)[0])
            explained[str(number)].append(float(compare(predicted, answer).explained))
        far.append(tails(space))
        x = after_attention(layer, x, answer)
    return {"explained": explained, "tails": far}
