"""What the report shows of tokens: how their cloud changes through depth, and where they attend."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_flow.base.processes import limit_threads
from attn_flow.observe.quantities import effective_rank
from attn_flow.probe.findings import Finding, Reading, bootstrap
from attn_flow.probe.recording import MEASURED_TEXTS, Recording, directions

SHOWN_TEXTS = 4  # in the view of tokens
WEIGHTS = 600_000  # attention weights kept, all of the first text


@dataclass(frozen=True, eq=False)
class Evolution:
    """Clouds of directions x/|x| level by level, (levels, texts) each."""

    cosine: Tensor  # mean cosine of different tokens of a text
    centred_cosine: Tensor  # the same after the mean of the text is taken away
    effective_rank: Tensor  # exp of the entropy of the normalised singular values of a text's directions

    def finding(self, seed: int = 0) -> Finding:
        """Whether tokens gather, or only gain a direction that all of them share."""
        means = {name: value.mean(-1) for name, value in vars(self).items()}
        change = {name: bootstrap(value[-1] - value[0], seed) for name, value in vars(self).items()}
        if change["cosine"].low.isnan():
            text = "One text does not say how tokens change through depth"
        elif change["centred_cosine"].low > 0.05:
            text = "Tokens gather through depth"
        elif change["effective_rank"].high < -0.1 * means["effective_rank"][0]:
            text = "The cloud loses dimensions through depth"
        elif change["cosine"].low > 0:
            text = "Tokens gain a common direction and do not gather"
        else:
            text = "Tokens do not come closer through depth"
        cosine, centred, rank = ((mean[0], mean[-1]) for mean in means.values())
        cosines = f"mean cosine {cosine[0]:z.2f} to {cosine[1]:z.2f}, centred {centred[0]:z.2f} to {centred[1]:z.2f}"
        return Finding(None, f"{text}: {cosines}; effective rank {rank[0]:.0f} to {rank[1]:.0f}.", means)


def measure_evolution(recording: Recording) -> Evolution:
    """The numbers of `Evolution` for the first texts of a recording."""
    rows = []
    with limit_threads(1):
        for level in recording.states:
            clouds = [directions(x) for x in level[:MEASURED_TEXTS]]
            centred = [directions(x - x.mean(0)) for x in clouds]
            ranks = [float(effective_rank(x)) for x in clouds]
            rows.append([[_mean_cosine(x) for x in clouds], [_mean_cosine(x) for x in centred], ranks])
    return Evolution(*torch.tensor(rows, dtype=torch.float64).transpose(0, 1))


def _mean_cosine(x: Tensor) -> float:
    """Mean of <x_i, x_j> over i != j, for unit vectors x (n, d)."""
    n = len(x)
    return float((x.sum(0).square().sum() - n) / (n * (n - 1)))


def read_tokens(recording: Recording) -> Reading:
    """The attention of the first texts, token by token."""
    recording = recording.first(SHOWN_TEXTS)
    heads = recording.attentions[0].heads
    m = min(len(recording.special[0]), max(8, math.isqrt(WEIGHTS // (recording.layers * heads))))
    keys, received, weights = [], [], []
    for layer in range(recording.layers):
        rows = [recording.heads(layer, t).logits.softmax(-1).double().cpu() for t in range(recording.texts)]
        keys.append(torch.cat([torch.special.entr(P).sum(-1).exp() for P in rows], -1))
        received.append(torch.cat([P.mean((0, 1)) * P.shape[-1] for P in rows]))
        weights.append(rows[0][:, :m, :m])
    lengths = torch.tensor([len(special) for special in recording.special])
    return Reading(lengths, torch.stack(keys), torch.stack(received), torch.stack(weights))
