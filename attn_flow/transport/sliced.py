"""The sliced Wasserstein distance: the p-th mean of W_p over projections on random lines."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch

from attn_flow.transport.one_dimension import line
from attn_flow.transport.pair import Pair, Solution


@dataclass(frozen=True)
class Sliced:
    """The method "sliced" with its options. It is another distance than W_p, and at most as large.

    Args:
        n_projections: the number of random directions, at least 2.
        generator: the random generator of the directions; None stands for torch's own.

    Example:
        >>> from attn_flow.transport import solve
        >>> x = torch.zeros(1, 1)
        >>> solve(x, x + 3, method=Sliced(n_projections=10))  # every direction of the line gives 3
        Transport(3 +- 0, method='sliced', p=2, euclidean)
    """

    n_projections: int = 200
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if operator.index(self.n_projections) < 2:
            raise ValueError(f"n_projections = {self.n_projections}, expected at least 2 for a standard error.")


def sliced_distance(pair: Pair, options: Sliced) -> Solution:
    """(mean over directions t of W_p(<t, x>, <t, y>)^p)^{1/p}, with its Monte Carlo standard error."""
    if pair.cost.name != "euclidean":
        raise ValueError(f"method 'sliced' projects on lines and needs cost 'euclidean', got {pair.cost.name!r}.")
    pair, unit = pair.scaled()
    x, y, p, generator = pair.x, pair.y, pair.cost.p, options.generator
    device = "cpu" if generator is None else generator.device
    directions = torch.randn(options.n_projections, x.shape[1], generator=generator, dtype=x.dtype, device=device)
    powers = []
    for direction in directions.cpu():
        direction = direction / direction.norm()
        projected = replace(pair, x=(x @ direction)[:, None], y=(y @ direction)[:, None])  # (n, 1) and (m, 1)
        powers.append(projected.cost_of(line(*projected.arrays(), pair.cost)) ** p)
    power = torch.stack(powers)
    mean = power.mean()
    if mean == 0:  # the p-th root has no derivative at zero
        return Solution(mean * unit, 0.0, "sliced")
    error = float(power.detach().std() / len(power) ** 0.5 * mean.detach() ** (1 / p - 1) / p)
    return Solution(mean ** (1 / p) * unit, error * unit, "sliced")
