"""How the cloud of a text's tokens changes through depth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_flow.base.processes import limit_threads
from attn_flow.observe.quantities import effective_rank
from attn_flow.probe.findings import Finding, bootstrap
from attn_flow.probe.recording import Recording, directions

TEXTS = 16  # more texts do not change the means


@dataclass(frozen=True, eq=False)
class Evolution:
    """Clouds of directions x/|x| level by level, (levels, texts) each.

    Args:
        cosine: mean cosine of different tokens of a text.
        centred_cosine: the same after the mean of the text is taken away.
        effective_rank: exp of the entropy of the eigenvalues of the second-moment matrix of a text's directions.
    """

    cosine: Tensor
    centred_cosine: Tensor
    effective_rank: Tensor

    def finding(self, seed: int = 0) -> Finding:
        """Whether tokens gather, or only gain a direction that all of them share."""
        means = {name: value.mean(-1) for name, value in vars(self).items()}
        change = {name: bootstrap(value[-1] - value[0], seed) for name, value in vars(self).items()}
        gathers = bool(change["centred_cosine"].low > 0.05)
        loses_rank = bool(change["effective_rank"].high < -0.1 * means["effective_rank"][0])
        if gathers or loses_rank:
            text = "Tokens gather through depth" if gathers else "The cloud loses dimensions through depth"
        elif change["cosine"].low > 0:
            text = "Tokens gain a common direction and do not gather"
        else:
            text = "Tokens do not come closer through depth"
        cosine, centred = (_ends(means[name]) for name in ("cosine", "centred_cosine"))
        rank = _ends(means["effective_rank"], digits=0)
        return Finding(None, f"{text}: mean cosine {cosine}, centred {centred}; effective rank {rank}.", means)


def measure_evolution(recording: Recording) -> Evolution:
    """The numbers of `Evolution` for the first texts of a recording."""
    rows = []
    with limit_threads(1):
        for level in recording.states:
            clouds = [directions(z) for z in level[:TEXTS]]
            centred = [directions(x - x.mean(0)) for x in clouds]
            cosines = [[_mean_cosine(x) for x in group] for group in (clouds, centred)]
            rows.append([*cosines, [float(effective_rank(x)) for x in clouds]])
    return Evolution(*torch.tensor(rows, dtype=torch.float64).transpose(0, 1))


def _mean_cosine(x: Tensor) -> float:
    """Mean of <x_i, x_j> over i != j, for unit vectors x (n, d)."""
    n = len(x)
    return float((x.sum(0).square().sum() - n) / (n * (n - 1)))


def _ends(values: Tensor, digits: int = 2) -> str:
    """The first and the last number; never -0.00."""
    return " to ".join(f"{round(float(value), digits) + 0.0:.{digits}f}" for value in (values[0], values[-1]))
