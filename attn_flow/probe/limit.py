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

import torch
from torch import Tensor

from attn_flow.attention.attention import Attention
from attn_flow.measures.cloud import Cloud
from attn_flow.probe import findings
from attn_flow.probe.findings import Finding
from attn_flow.probe.limit_flow import SMALL, GaussianFlow, leading_subspace, read_weights, rotate
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

    def finding(self, seed: int = 0) -> Finding:
        """The verdict and its numbers.

        "supported": the p value of the mean agreement among joint rotations of all layers is at most 0.05, the weights
        agree better than every shift of heads and of layers, and at least half of the layers pass by themselves after
        Holm's correction. "partly": fewer layers do.
        """
        L, texts = self.agreement.shape
        own, made, expected = (z.mean(-1) for z in (self.agreement, self.reduction, self.flow_reduction))
        joint = self.rotated[:, ~self.rotated.isnan().any(0)].mean(0)
        global_p = sequential_p(float(self.agreement.mean()), joint)
        p_values = [sequential_p(float(mean), draws[~draws.isnan()]) for mean, draws in zip(own, self.rotated)]
        named = holm(p_values)
        shifts = {"permuted_heads": self.permuted_heads, "other_layers": self.other_layers}
        best_shifts = {name: float(draws.max()) if len(draws) else math.nan for name, draws in shifts.items()}
        low, high = (self.rotated.nanquantile(q, dim=-1) for q in (0.05, 0.95))
        share = float(made.mean() / expected.mean()) if expected.mean() > 0 else math.nan
        numbers = {
            "global_p": global_p,
            "p_value": p_values,
            "named_layers": named,
            "agreement": own,
            "rotated": self.rotated.nanmean(-1),
            "rotated_low": low,
            "rotated_high": high,
            "rotations": (~self.rotated.isnan()).sum(-1),
            "rivals": best_shifts,  # NaN where there is no shift
            "percent_of_distance": 100 * made,
            "percent_of_flow": 100 * expected,
            "fraction": torch.where(expected > 0, made / expected, torch.nan),
        }
        unbeaten = [name.replace("_", " ") for name, best in best_shifts.items() if own.mean() <= best]
        if global_p > LEVEL:
            verdict, words = "not supported", "Layers follow the limit of their weights no more than of rotated weights"
        elif unbeaten:
            words = f"The limit of {' and '.join(unbeaten)} is followed as well as that of the weights"
            verdict = "not supported"
        else:
            verdict = "supported" if 2 * len(named) >= L else "partly"
            passing = findings.layers_named(named, L)
            words = f"Layers move their tokens towards the limit of their weights ({passing} after correction)"
        percent = 100 * float(made.mean())
        measured = f"W2 to the limit {'shrinks' if percent >= 0 else 'grows'} by {abs(percent):.1f}% a layer"
        if verdict != "not supported" and not math.isnan(share):
            measured += f", {share:.2f} of what the flow would do"
        measured += f"; p = {global_p:.2g} against rotated weights"
        value = f"p = {global_p:.2g}; agreement {float(own.mean()):z.2f}"
        baselines = {"rotated weights": float(self.rotated.nanmean(-1).mean())}
        baselines |= {name.replace("_", " "): best for name, best in best_shifts.items() if not math.isnan(best)}
        best, agreement = max(baselines.items(), key=lambda item: item[1])
        return findings.answer(verdict, words, measured, texts, numbers, value, f"{best}: {agreement:z.2f}")


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


def holm(p_values: Sequence[float]) -> list[int]:
    """Indices of the hypotheses that Holm's procedure rejects.

    Example:
        >>> holm([0.01, 0.2, 0.02, 0.04]), holm([0.01, 0.015, 0.02, 0.04])
        ([0], [0, 1, 2, 3])
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    passed = 0
    while passed < len(order) and p_values[order[passed]] * (len(order) - passed) <= LEVEL:
        passed += 1
    return sorted(order[:passed])


@dataclass(frozen=True, eq=False)
class Passage:
    """The tokens that a layer is followed on, all texts one after the other, evenly spaced in every text."""

    start: Tensor  # (n, d), directions of the tokens whose limits are the targets
    before: Tensor  # (n, d), tokens before the layer
    after: Tensor  # (n, d), their directions after it
    start_cov: Tensor  # (d, d), covariance of the tokens of all texts at the start
    cov: Tensor  # (d, d), the same before the layer
    lengths: list[int]  # the number of these tokens in every text
    max_shift: float  # see `GaussianFlow`
    horizon: float  # the time that the layer lasts
    steps: int  # of the flow in that time

    def agreement(self, weights: Attention) -> Tensor:
        """The agreement of every text with the flow of these weights, (texts,)."""
        flow = GaussianFlow(weights, self.start_cov, self.max_shift)
        U, W = (z.to(self.start) for z in leading_subspace(flow.M))
        target = _unit(self.start @ W.mT)  # in coordinates of the leading subspace
        along = lambda x: ((x @ U) * target).sum(-1)
        here = along(_unit(self.before))
        made, expected = along(self.after) - here, along(_unit(self.move(self.before, flow))) - here
        pairs = zip(made.double().split(self.lengths), expected.double().split(self.lengths))
        return torch.stack([a @ b / (a.norm() * b.norm()).clamp(min=1e-30) for a, b in pairs]).cpu()

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
    are_equal = lambda a, b: all(torch.equal(a.tensors[name], b.tensors[name]) for name in ("Q", "K", "V", "O", "beta"))
    groups = [next(j for j in range(L) if are_equal(weights[i], weights[j])) for i in range(L)]
    first = [next(j for j in range(i + 1) if len(set(groups[j : i + 1])) == 1) for i in range(L)]
    passages = [_read_passage(recording, l, first[l], dtype) for l in range(L)]

    def mean_agreement(shifted: Sequence[Attention]) -> Tensor:
        return torch.stack([p.agreement(w).mean() for p, w in zip(passages, shifted)]).mean()

    def shift_heads(by: int) -> list[Attention]:
        return [w.copy_with(**{name: w.tensors[name].roll(by, 0) for name in ("Q", "K", "beta")}) for w in weights]

    own = torch.stack([p.agreement(w) for p, w in zip(passages, weights)])
    reductions = [_reductions(recording, l, first[l], passages[l], weights[l]) for l in range(L)]
    made, expected = torch.tensor(reductions, dtype=torch.float64).permute(2, 0, 1)
    heads = [mean_agreement(shift_heads(by)) for by in range(1, max(a.heads for a in A))]
    layers = [mean_agreement(weights[by:] + weights[:by]) for by in range(1, L) if len(set(groups)) > 1]
    by_head, by_layer = (torch.tensor(draws, dtype=torch.float64) for draws in (heads, layers))
    count = max(199, 20 * L - 1) if rotations is None else rotations
    rotated = torch.full((L, count), torch.nan, dtype=torch.float64)
    for k in range(count):
        progress(0.2 + 0.8 * k / count)
        needed = (rotated >= own.mean(-1, keepdim=True)).sum(-1) < EXCEEDANCES  # NaN exceeds nothing
        if (rotated.mean(0) >= own.mean()).sum() < EXCEEDANCES:
            needed[:] = True  # a joint rotation is one of all layers
        rotations_of: dict[int, Tensor] = {}  # equal weights are rotated alike
        for l in needed.nonzero()[:, 0].tolist():
            if groups[l] not in rotations_of:
                rotations_of[groups[l]] = random_rotation(A[0].dim, generator).to(passages[0].start)
            rotated[l, k] = passages[l].agreement(rotate(weights[l], rotations_of[groups[l]])).mean()
    progress(1.0)
    return LimitApproach(own, rotated, by_head, by_layer, made, expected)


def random_rotation(d: int, generator: torch.Generator) -> Tensor:
    """An orthogonal matrix drawn uniformly."""
    Q, R = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64 if d <= SMALL else torch.float32))
    return Q * R.diagonal().sign()


def _read_passage(recording: Recording, layer: int, first: int, dtype: torch.dtype) -> Passage:
    T = min(MAX_TEXTS, recording.texts)
    lengths = [len(x) for x in recording.states[layer][:T]]
    rows = [_evenly(n, MAX_TOKENS // T).to(recording.device) for n in lengths]
    pick = lambda level: torch.cat([recording.states[level][t][rows[t]] for t in range(T)])
    cov, start_cov = (Cloud(torch.cat(recording.states[l]).double()).moments()[1].to(dtype) for l in (layer, first))
    return Passage(
        start=directions(pick(first)).to(dtype),
        before=pick(layer).to(dtype),
        after=directions(pick(layer + 1)).to(dtype),
        start_cov=start_cov,
        cov=cov,
        lengths=[len(r) for r in rows],
        max_shift=math.sqrt(min(cov.shape[0], 2 * math.log(sum(lengths) / T))),
        horizon=recording.horizon,
        steps=recording.steps,
    )


def _evenly(n: int, count: int) -> Tensor:
    """At most `count` indices below n at equal distances."""
    return torch.arange(min(n, count)) * n // min(n, count)


def _reductions(
    recording: Recording, layer: int, first: int, passage: Passage, weights: Attention
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
