"""Question 4: does a layer move its tokens towards the limit that its weights predict?

In the Gaussian description with the covariance S of all texts the heads of a layer add M x and a constant to a token,
M = sum_h beta_h O_h V_h S G_h, and the flow x' = P_x M x on the sphere has the limit map P(x) = Pi x/|Pi x|, with the
spectral projector Pi of M on its leading subspace (arXiv 2605.10931). The progress of a token is what it gains in
<x, P(x)>, half of what its squared distance to its limit loses. The statistic of a text is its agreement: the cosine,
over tokens, between the progress through the layer and the progress that the flow would make. It is 1 where the layer
is the flow. Its mean over texts and layers is ranked among those of weights with randomly rotated G, which keep the
values and the cloud, so that what follows from these alone is no evidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attn_flow.measures import Cloud
from attn_flow.probe import findings
from attn_flow.probe.findings import Finding
from attn_flow.probe.limit_flow import SMALL, GaussianFlow, Weights, leading_subspace, read_weights
from attn_flow.probe.recording import Recording, directions
from attn_flow.probe.replacement import w2

LEVEL = 0.05  # of every test
MAX_TEXTS = 16  # whose tokens are followed; the covariance is that of all texts
MAX_TOKENS = 1024  # followed in a layer
MAX_TRANSPORT_TOKENS = 256  # of a text, in W2
EXCEEDANCES = 20  # rotations that do as well as the weights, after which no more are drawn


@dataclass(frozen=True, eq=False)
class LimitApproach:
    """Progress of tokens towards the limits of their layers."""

    agreement: Tensor  # (layers, texts), cosine between the progress of tokens and the progress of the flow
    rotated: Tensor  # (layers, rotations), its mean over texts for rotated weights; NaN where no more were needed
    permuted_heads: Tensor  # (shifts,), its mean over texts and layers if G_h stands with the values of a later head
    other_layers: Tensor  # (shifts,), the same if every layer has the weights of a later one
    reduction: Tensor  # (layers, texts), 1 - W2(after, limit) / W2(before, limit) of the layer
    flow_reduction: Tensor  # (layers, texts), the same of the flow

    @cached_property
    def global_p(self) -> float:
        """p value of the mean agreement of all layers among joint rotations."""
        return sequential_p(float(self.agreement.mean()), self.rotated[:, ~self.rotated.isnan().any(0)].mean(0))

    @cached_property
    def p_values(self) -> list[float]:
        """p value of every layer by itself."""
        return [sequential_p(float(own.mean()), row[~row.isnan()]) for own, row in zip(self.agreement, self.rotated)]

    def finding(self, seed: int = 0) -> Finding:
        """The verdict and its numbers.

        "supported": the global p value is at most 0.05, the weights agree better than every shift of heads and of
        layers, and at least half of the layers pass by themselves after Holm's correction. "partly": fewer layers do.
        """
        named, (L, texts) = holm(self.p_values), self.agreement.shape
        own, made, expected, rotated = (
            z.nanmean(-1) for z in (self.agreement, self.reduction, self.flow_reduction, self.rotated)
        )
        shifted = {"permuted_heads": self.permuted_heads, "other_layers": self.other_layers}
        rivals = {name: float(z.mean()) for name, z in shifted.items() if len(z)}
        beaten = {name: bool(own.mean() > z.max()) for name, z in shifted.items() if len(z)}
        share = float(made.mean() / expected.mean()) if expected.mean() > 0 else math.nan
        numbers = {
            "p_value": self.p_values,
            "fraction": torch.where(expected > 0, made / expected, torch.nan),
            "global_p": self.global_p,
            "named_layers": named,
            "percent_of_distance": 100 * made,
            "percent_of_flow": 100 * expected,
            "mean_fraction": share,
            "agreement": own,
            "rotated": rotated,
            "rivals": {name: rivals.get(name) for name in shifted},
            "rivals_beaten": {name: beaten.get(name) for name in shifted},
            "rotations": (~self.rotated.isnan()).sum(-1),
        }
        unbeaten = " and ".join(name.replace("_", " ") for name, is_beaten in beaten.items() if not is_beaten)
        if self.global_p > LEVEL:
            verdict, words = "not supported", "Layers follow the limit of their weights no more than of rotated weights"
        elif unbeaten:
            verdict, words = "not supported", f"The limit of {unbeaten} is followed as well as that of the weights"
        else:
            verdict = "supported" if 2 * len(named) >= L else "partly"
            passing = findings.layers_named(named, L)
            words = f"Layers move their tokens towards the limit of their weights ({passing} after correction)"
        percent = 100 * float(made.mean())
        measured = f"W2 to the limit {'shrinks' if percent >= 0 else 'grows'} by {abs(percent):.1f}% a layer"
        if verdict != "not supported" and not math.isnan(share):
            measured += f", {share:.2f} of what the flow would do"
        measured += f"; p = {self.global_p:.2g} against rotated weights"
        value = f"p = {self.global_p:.2g}; agreement {float(own.mean()):z.2f}"
        baselines = {"rotated weights": float(rotated.mean()), **rivals}
        best = max(baselines, key=lambda name: baselines[name])
        baseline = f"{best.replace('_', ' ')}: {baselines[best]:z.2f}"
        return findings.answer(verdict, words, measured, texts, numbers, value, baseline)


def sequential_p(own: float, draws: Tensor) -> float:
    """p value of a statistic among draws of the null hypothesis, by the sequential test of Besag and Clifford (1991).

    It is 20/k if the 20th draw that is at least as large is draw k, else (1 + exceedances)/(1 + draws).

    Example:
        >>> sequential_p(1.0, torch.tensor([2.0, 0.0, 0.0])), sequential_p(0.0, torch.ones(20))
        (0.5, 1.0)
    """
    exceeding = (draws >= own).nonzero()[:, 0]
    if len(exceeding) >= EXCEEDANCES:
        return EXCEEDANCES / (int(exceeding[EXCEEDANCES - 1]) + 1)
    return (1 + len(exceeding)) / (1 + len(draws))


def holm(p_values: Sequence[float], level: float = LEVEL) -> list[int]:
    """Indices of the hypotheses that Holm's procedure rejects.

    Example:
        >>> holm([0.01, 0.2, 0.02, 0.04]), holm([0.01, 0.015, 0.02, 0.04])
        ([0], [0, 1, 2, 3])
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    passed = 0
    while passed < len(order) and p_values[order[passed]] * (len(order) - passed) <= level:
        passed += 1
    return sorted(order[:passed])


@dataclass(frozen=True, eq=False)
class Passage:
    """The tokens that a layer is followed on, all texts one after the other."""

    start: Tensor  # (n, d), directions of the tokens whose limits are the targets
    before: Tensor  # (n, d), tokens before the layer
    after: Tensor  # (n, d), their directions after it
    start_cov: Tensor  # (d, d), covariance of the tokens of all texts at the start
    cov: Tensor  # (d, d), the same before the layer
    text: Tensor  # (n,), the text of every token
    max_shift: float  # see `GaussianFlow`
    horizon: float  # the time that the layer lasts
    steps: int  # of the flow in that time

    def agreement(self, weights: Weights) -> Tensor:
        """The agreement of every text with the flow of these weights, (texts,)."""
        flow = GaussianFlow(weights, self.start_cov, self.max_shift)
        U, W = (z.to(self.start) for z in leading_subspace(flow.M))
        target = _unit(self.start @ W.mT)  # in coordinates of the leading subspace
        along = lambda x: ((x @ U) * target).sum(-1)
        here = along(_unit(self.before))
        made, expected = along(self.after) - here, along(_unit(self.move(self.before, flow))) - here
        sums = torch.zeros(3, int(self.text[-1]) + 1, dtype=torch.float64, device=self.text.device)
        products = torch.stack([made * expected, made.square(), expected.square()]).double()
        product, a, b = sums.index_add(1, self.text, products)
        return (product / (a * b).sqrt().clamp(min=1e-30)).cpu()

    def move(self, x: Tensor, flow: GaussianFlow) -> Tensor:
        """Tokens x (n, d) after the flow, each with its own norm."""
        norms = x.norm(dim=-1, keepdim=True)
        for _ in range(self.steps):
            x = norms * _unit(x + self.horizon / self.steps * flow.drift(x))
        return x


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)


def measure_limit(
    recording: Recording,
    generator: torch.Generator,
    *,
    rotations: int | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> LimitApproach:
    """Progress of the tokens of a recording towards the limits of its layers, beside rotated and shifted weights.

    Layers that follow each other with the same weights are one flow: their targets are the limits of the tokens before
    the first of them. There are at most `rotations` joint rotations, by default 199, or 20 times the number of layers
    if that is more, so that a single layer can pass Holm's correction.
    """
    A, L = recording.attentions, recording.layers
    dtype = torch.float64 if A[0].dim <= SMALL else torch.float32
    weights = [read_weights(a, dtype, recording.device) for a in A]
    groups = [next(j for j in range(L) if weights[i].equals(weights[j])) for i in range(L)]
    first = [next(j for j in range(i + 1) if len(set(groups[j : i + 1])) == 1) for i in range(L)]
    passages = [_read_passage(recording, l, first[l], dtype) for l in range(L)]

    def mean_agreement(shifted: Sequence[Weights]) -> Tensor:
        return torch.stack([p.agreement(w).mean() for p, w in zip(passages, shifted)]).mean()

    own = torch.stack([p.agreement(w) for p, w in zip(passages, weights)])
    reductions = []
    for l in range(L):
        reductions.append(_reductions(recording, l, first[l], passages[l], weights[l]))
        progress(0.1 * (l + 1) / L)
    made, expected = torch.tensor(reductions, dtype=torch.float64).permute(2, 0, 1)
    shifts = range(1, L) if len(set(groups)) > 1 else ()
    layers = [mean_agreement(weights[by:] + weights[:by]) for by in shifts]
    heads = [mean_agreement([w.shift_heads(by) for w in weights]) for by in range(1, max(a.heads for a in A))]
    by_head, by_layer = (torch.tensor(draws, dtype=torch.float64) for draws in (heads, layers))
    progress(0.2)
    rotations = max(199, 20 * L - 1) if rotations is None else rotations
    rotated = _rotate(passages, weights, groups, own.mean(-1), rotations, generator, progress)
    return LimitApproach(own, rotated, by_head, by_layer, made, expected)


def _rotate(
    passages: list[Passage],
    weights: list[Weights],
    groups: list[int],
    own: Tensor,
    rotations: int,
    generator: torch.Generator,
    progress: Callable[[float], None],
) -> Tensor:
    """Agreement (layers, draws) of rotated weights, equal ones rotated alike; NaN where no test needs the draw."""
    L, d = len(passages), passages[0].start.shape[1]
    drawn = torch.full((L, rotations), torch.nan, dtype=torch.float64)
    exceedances, joint_exceedances = torch.zeros(L), 0
    for k in range(rotations):
        is_joint = joint_exceedances < EXCEEDANCES
        layers = [l for l in range(L) if is_joint or exceedances[l] < EXCEEDANCES]
        if not layers:
            break
        turned = {g: random_rotation(d, generator).to(passages[0].start) for g in sorted({groups[l] for l in layers})}
        for l in layers:
            drawn[l, k] = passages[l].agreement(weights[l].rotate(turned[groups[l]])).mean()
        exceedances += drawn[:, k] >= own  # NaN exceeds nothing
        joint_exceedances += bool(is_joint and drawn[:, k].mean() >= own.mean())
        progress(0.2 + 0.8 * (k + 1) / rotations)
    progress(1.0)
    return drawn


def random_rotation(d: int, generator: torch.Generator) -> Tensor:
    """An orthogonal matrix drawn uniformly."""
    Q, R = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64 if d <= SMALL else torch.float32))
    return Q * R.diagonal().sign()


def _read_passage(recording: Recording, layer: int, first: int, dtype: torch.dtype) -> Passage:
    """The tokens that are followed through a layer: at most MAX_TOKENS, evenly spaced in every text."""
    T = min(MAX_TEXTS, recording.texts)
    lengths = [len(x) for x in recording.states[layer][:T]]
    rows = [_evenly(n, MAX_TOKENS // T).to(recording.device) for n in lengths]
    pick = lambda level: torch.cat([recording.states[level][t][rows[t]] for t in range(T)])
    cov, start_cov = (Cloud(torch.cat(recording.states[l]).double()).moments()[1].to(dtype) for l in (layer, first))
    return Passage(
        directions(pick(first)).to(dtype),
        pick(layer).to(dtype),
        directions(pick(layer + 1)).to(dtype),
        start_cov,
        cov,
        torch.repeat_interleave(torch.arange(T), torch.tensor([len(r) for r in rows])).to(recording.device),
        math.sqrt(min(cov.shape[0], 2 * math.log(sum(lengths) / T))),
        recording.horizon,
        recording.steps,
    )


def _evenly(n: int, count: int) -> Tensor:
    """At most `count` indices below n at equal distances."""
    return torch.arange(n) if n <= count else (torch.arange(count) * n) // count


def _reductions(
    recording: Recording, layer: int, first: int, passage: Passage, weights: Weights
) -> list[tuple[float, float]]:
    """By how much W2 to the limit shrinks in every text, of itself: through the layer, and through its flow."""
    U, W = leading_subspace(GaussianFlow(weights, passage.start_cov, passage.max_shift).M)
    flow = GaussianFlow(weights, passage.cov, passage.max_shift)  # in the tokens as they are now
    rows = []
    for t in range(min(MAX_TEXTS, recording.texts)):
        keep = _evenly(len(recording.special[t]), MAX_TRANSPORT_TOKENS).to(recording.device)
        start, x, after = (recording.states[level][t][keep].double() for level in (first, layer, layer + 1))
        target = directions(start @ (U @ W).mT)
        moved = passage.move(x.to(passage.start), flow)
        distance, *ends = (w2(directions(cloud), target) for cloud in (x, after, moved))
        rows.append((1 - ends[0] / distance, 1 - ends[1] / distance) if distance > 1e-9 else (0.0, 0.0))
    return rows
