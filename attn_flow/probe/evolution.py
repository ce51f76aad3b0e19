"""How the cloud of a text's tokens changes through depth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_flow.base.threads import limit_threads
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
        numbers = {name: value.mean(-1).tolist() for name, value in vars(self).items()}
        change = {name: bootstrap(value[-1] - value[0], seed) for name, value in vars(self).items()}
        is_closer = bool(change["cosine"].low > 0)
        gathers = bool(change["centred_cosine"].low > 0.05)
        loses_rank = bool(change["effective_rank"].high < -0.1 * self.effective_rank[0].mean())
        cosine, centred = (_span(numbers[name]) for name in ("cosine", "centred_cosine"))
        rank = "{:.0f} to {:.0f}".format(numbers["effective_rank"][0], numbers["effective_rank"][-1])
        if is_closer and not (gathers or loses_rank):
            text = (
                f"Tokens gain a common direction and do not gather: mean cosine {cosine}, centred {centred}; "
                f"effective rank {rank}."
            )
        elif gathers or loses_rank:
            what = "Tokens gather" if gathers else "The cloud loses dimensions"
            text = f"{what} through depth: mean cosine {cosine}, centred {centred}; effective rank {rank}."
        else:
            text = f"Tokens do not come closer through depth: mean cosine {cosine}; effective rank {rank}."
        return Finding(None, text, numbers)


def measure_evolution(recording: Recording) -> Evolution:
    """The numbers of `Evolution` for the first texts of a recording."""
    values: list[list[list[float]]] = [[], [], []]
    for level in recording.states:
        rows = []
        for z in level[:TEXTS]:
            x = directions(z)
            with limit_threads(1):
                rows.append((_mean_cosine(x), _mean_cosine(directions(x - x.mean(0))), float(effective_rank(x))))
        for value, column in zip(values, zip(*rows)):
            value.append(list(column))
    return Evolution(*(torch.tensor(value, dtype=torch.float64) for value in values))


def _mean_cosine(x: Tensor) -> float:
    """Mean of <x_i, x_j> over i != j, for unit vectors x (n, d)."""
    n = len(x)
    return float((x.sum(0).square().sum() - n) / (n * (n - 1)))


def _span(values: list[float]) -> str:
    """The first and the last number; never -0.00."""
    return " to ".join(f"{round(value, 2) + 0.0:.2f}" for value in (values[0], values[-1]))
