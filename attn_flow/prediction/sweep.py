"""A grid of flows: attentions, betas, noise, numbers of tokens and seeds, each compared with its predicted limit."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.base import checks
from attn_flow.base.files import digest, lock_for_writing, write_bytes, write_json
from attn_flow.base.imports import require_extra
from attn_flow.base.progress import progress_bar
from attn_flow.drawing import lines_figure
from attn_flow.dynamics.flow import flow
from attn_flow.measures import Cloud, VonMisesFisher, as_cloud, quadrature
from attn_flow.observe.quantities import clusters
from attn_flow.prediction.limit_map import LimitMap, limit
from attn_flow.prediction.phases import Phases, phases

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AXES = ("attention", "beta", "noise", "n", "seed")
COMPARED = ("w2_min", "t_min", "t_min_predicted", "w2_end", "phases", "exit_rate", "exit_rate_predicted", "unmet", "w2")
TOKENS_AT_ONCE = 2**16  # tokens of the clouds that run as one batch
CLUSTER_DISTANCE = 0.05  # tokens that are nearer than this are one cluster


def starting_cloud(d: int, n: int, seed: int = 0, *, random: bool | None = None) -> Cloud:
    """Tokens of the von Mises-Fisher distribution (kappa = 1) around (1, ..., d), which no reflection of an axis keeps.

    Args:
        d: the dimension.
        n: the number of tokens.
        seed: of random tokens.
        random: True: independent tokens. False: weighted nodes of a quadrature, without sampling noise, for d = 2, 3.
            None: nodes where they exist.

    Returns:
        A `Cloud` (n, d) on the unit sphere, float64.

    Example:
        >>> starting_cloud(2, 100), starting_cloud(5, 100)
        (Cloud(x (100, 2) float64, weights), Cloud(x (100, 5) float64))
    """
    checks.require_count(d=d, n=n)
    random = d not in (2, 3) if random is None else random
    direction = torch.arange(1, d + 1, dtype=torch.float64)
    mu = VonMisesFisher(direction / direction.norm(), 1.0)
    if random:
        return Cloud(mu.sample(n, generator=torch.Generator().manual_seed(seed)))
    if d == 3:
        return quadrature.fibonacci(n, mu.density)
    if d != 2:
        raise ValueError(f"d = {d}: quadrature nodes exist for d = 2 and 3; use random tokens.")
    angle = 2 * math.pi * (torch.arange(n, dtype=torch.float64) + (math.sqrt(5) - 1) / 2) / n  # no node on an axis
    x = torch.stack([angle.cos(), angle.sin()], dim=-1)
    return Cloud(x, mu.density(x))


@dataclass(frozen=True, eq=False, repr=False)
class Sweep:
    """The runs of a grid, one row each, as `sweep` returns them.

    Attributes:
        t: (T,), the times at which W2 was measured.
        rows: dictionaries with the keys of the grid ("attention", "beta", "noise", "n", "seed"); "w2", the distances to
            the predicted limit at the times t; "w2_min" and "t_min", the least of them and its time; "w2_end";
            "t_min_predicted"; "phases", their names; "exit_rate" and "exit_rate_predicted"; "clusters" at the end; and
            "unmet", the requirements of the prediction that the run does not meet. None: not predicted or not measured.

    Example:
        >>> runs = sweep(Attention.from_matrices(torch.eye(2), torch.eye(2)), 1.0, betas=[1, 4], n=[50])
        >>> runs.values("beta"), runs.rows[0]["n"]
        ([1.0, 4.0], 50)
    """

    t: Tensor
    rows: tuple[dict[str, Any], ...]

    def __repr__(self) -> str:
        sizes = (f"{len(values)} {name}" for name in AXES if len(values := self.values(name)) > 1)
        return f"Sweep({len(self.rows)} runs: {' x '.join(sizes) or 'one'}, {len(self.t)} times to {self.t[-1]:g})"

    def __len__(self) -> int:
        return len(self.rows)

    def values(self, name: str) -> list[Any]:
        """The values of one axis of the grid, in the order in which they were given."""
        return list(dict.fromkeys(row[name] for row in self.rows))

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row a run; the column "w2" holds lists. It needs pandas."""
        return require_extra("pandas").DataFrame(list(self.rows))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the rows without the curves as comma-separated values."""
        text = io.StringIO()
        table = csv.DictWriter(text, [name for name in self.rows[0] if name != "w2"], extrasaction="ignore")
        table.writeheader()
        table.writerows(self.rows)
        write_bytes(text.getvalue().encode(), path)

    def plot(self, against: str | None = None) -> Figure:
        """The least W2 and its time against an axis of the grid ("beta", "n", "noise", "attention"); needs matplotlib.

        There is one line for every combination of the other axes, with bars for the standard deviation over seeds and
        dashes for predicted times. By default the first axis with several values is taken.
        """
        names = ("beta", "n", "noise", "attention")
        varied = [name for name in names if len(self.values(name)) > 1]
        against = against or (varied or ["beta"])[0]
        checks.require_choice("against", against, names)
        lines: dict[str, list[list[dict[str, Any]]]] = {}  # label: the rows at every value
        for row in self.rows:
            label = ", ".join(f"{name} {row[name]}" for name in varied if name != against)
            points = lines.setdefault(label, [[] for _ in self.values(against)])
            points[self.values(against).index(row[against])].append(row)
        return lines_figure(against, self.values(against), list(lines.items()))


def sweep(
    attentions: Attention | Sequence[Attention] | Mapping[str, Attention],
    t: float | Sequence[float] | Tensor,
    *,
    betas: Sequence[float] | None = None,
    noise: Sequence[float] = (0.0,),
    n: Sequence[int] = (800,),
    seeds: Sequence[int] = (0,),
    clouds: Callable[[int, int], Tensor | Cloud] | None = None,
    h: float = 0.05,
    folder: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> Sweep:
    """Run a grid of flows on the sphere and compare each with its predicted limit.

    Runs that differ in beta and seed only are one batch. A run depends on its own settings alone, not on the others.

    Args:
        attentions: an `Attention`, or several of one dimension, which may have names.
        t: the times at which W2 is measured; one number T stands for 101 times from 0 to T.
        betas: inverse temperatures; by default that of each attention.
        noise: standard deviations of independent noise per unit of time (0: none).
        n: numbers of tokens.
        seeds: seeds of the tokens and of the noise.

    Other arguments:
        clouds: a function (n, seed) -> tokens (n, d) or a `Cloud` of n tokens; by default `starting_cloud`.
        h: the longest step in time.
        folder: where finished batches are kept (sweep.json). The same call continues there after it was stopped.
        progress: show a progress bar on standard error.

    Returns:
        A `Sweep`: `rows`, `to_frame()`, `to_csv(path)`, `plot()`.

    Example:
        >>> G, V = torch.diag(torch.tensor([3.0, 1.0])), torch.diag(torch.tensor([1.0, 2.0]))
        >>> result = sweep(Attention.from_matrices(G, V), 12.0, betas=[10, 100, 1000], n=[200], h=0.1)
        >>> result
        Sweep(3 runs: 3 beta, 101 times to 12)
        >>> [round(row["w2_min"], 2) for row in result.rows]  # colder is nearer
        [0.53, 0.18, 0.06]
    """
    if isinstance(attentions, Attention):
        attentions = [attentions]
    fields = dict(attentions if isinstance(attentions, Mapping) else {str(i): a for i, a in enumerate(attentions)})
    if len({each.dim for each in fields.values()}) != 1 or any(each.G.ndim != 3 for each in fields.values()):
        shapes = [tuple(each.G.shape) for each in fields.values()]
        raise ValueError(f"attentions with G of shapes {shapes}, expected (heads, d, d) with the same dimension d.")
    axes: dict[str, list[Any]] = {
        "attention": list(fields),
        "noise": [float(sigma) for sigma in noise],
        "n": [int(count) for count in n],
        "beta": [None] if betas is None else sorted(map(float, betas), key=math.isinf),  # hardmax is a batch: last
        "seed": [int(seed) for seed in seeds],
    }
    if empty := [name for name, values in axes.items() if not values]:
        raise ValueError(f"the axis {empty[0]} of the grid is empty, expected at least one value.")
    checks.require_positive(h=h)
    checks.require_nonnegative(**{"the largest noise": max(noise), "the least noise": min(noise)})
    d = next(iter(fields.values())).dim
    make = clouds or (lambda count, seed: starting_cloud(d, count, seed))
    times, batches = torch.tensor(checks.time_grid(t), dtype=torch.float64), _batches(axes)
    file, rows, settings = None if folder is None else Path(folder) / "sweep.json", [], ""
    with ExitStack() as contexts:
        if file is not None:
            contexts.enter_context(lock_for_writing(file))
            starts = {f"{count} tokens": as_cloud(make(count, seeds[0])).x for count in n}
            settings = _digest_of_settings(fields, {"t": times, **starts}, f"{batches} {h}")
            rows = _stored_rows(file, settings)
        advance = contexts.enter_context(progress_bar("sweep", sum(map(len, batches)), progress))
        for batch, done in zip(batches, itertools.accumulate(map(len, batches))):
            if len(rows) < done:
                rows += _run(batch, fields[batch[0]["attention"]], make, times, h)
                if file is not None:
                    write_json({"settings": settings, "rows": rows}, file)
            advance(len(batch), note=", ".join(f"{name} {batch[0][name]}" for name in ("attention", "n", "noise")))
    return Sweep(times, tuple(rows))


def _batches(axes: Mapping[str, Sequence[Any]]) -> list[list[dict[str, Any]]]:
    """The grid as lists of runs that differ in beta and seed only; hardmax (beta = inf) is a batch of its own."""
    grid = (dict(zip(axes, values)) for values in itertools.product(*axes.values()))
    key = lambda run: (run["attention"], run["noise"], run["n"], run["beta"] == math.inf)
    batches = []
    for _, group in itertools.groupby(grid, key):
        runs = list(group)
        size = max(1, TOKENS_AT_ONCE // runs[0]["n"])
        batches += [runs[i : i + size] for i in range(0, len(runs), size)]
    return batches


def _digest_of_settings(fields: Mapping[str, Attention], tensors: dict[str, Tensor], words: str) -> str:
    """A digest of everything that the rows depend on."""
    options = {"grid": words}
    for name, attention in fields.items():
        tensors |= {f"{name}.{key}": value for key, value in attention.tensors.items()}
        options[name] = f"{attention.summary()}"
    return digest(tensors, options)


def _stored_rows(file: Path, settings: str) -> list[dict[str, Any]]:
    """The rows of an interrupted sweep with these settings."""
    if not file.exists():
        return []
    content = json.loads(file.read_text())
    if content["settings"] != settings:
        raise ValueError(f"{file} is of a sweep with other settings; choose another folder, or remove the file.")
    return [{name: math.inf if value == "inf" else value for name, value in row.items()} for row in content["rows"]]


def _run(
    batch: list[dict[str, Any]],
    attention: Attention,
    make: Callable[[int, int], Tensor | Cloud],
    times: Tensor,
    h: float,
) -> list[dict[str, Any]]:
    """The rows of one batch."""
    starts = [as_cloud(make(run["n"], run["seed"])) for run in batch]
    weights = None if starts[0].weights is None else torch.stack([each.probabilities for each in starts])
    cloud, beta, sigma = Cloud(torch.stack([each.x for each in starts]), weights), batch[0]["beta"], batch[0]["noise"]
    attention = attention.to(cloud.x.dtype)
    if beta is not None:
        betas = torch.tensor([run["beta"] for run in batch], dtype=cloud.x.dtype)[:, None]
        attention = replace(attention, beta=beta if beta == math.inf else betas.expand(-1, attention.heads))
    # The noise of each cloud comes from a generator of its own, so that a run does not depend on its batch.
    generators = [torch.Generator().manual_seed(run["seed"]) for run in batch]
    draw = lambda x: torch.stack([torch.randn(x.shape[1:], generator=each, dtype=x.dtype) for each in generators])
    path = flow(attention, cloud, times, h=h, noise=(lambda x: sigma * draw(x).to(x.device)) if sigma else None)
    counts = clusters(Cloud(path.x[-1], weights), tol=CLUSTER_DISTANCE).counts.tolist()
    own = {"beta": float(torch.as_tensor(attention.beta).flatten()[0])} if beta is None else {}
    rows = [run | own | {"clusters": count} for run, count in zip(batch, counts)]
    try:
        target = limit(attention)
        results = phases(path, target, warn=False)
    except ValueError:  # this kind of attention has no limit map, or a token has no certified limit
        return [row | dict.fromkeys(COMPARED) for row in rows]
    return [row | _comparison(row, target, result) for row, result in zip(rows, results)]


def _comparison(row: dict[str, Any], target: LimitMap, result: Phases) -> dict[str, Any]:
    """The numbers of one run that need its limit."""
    is_predicted = 1 < row["beta"] < math.inf and not row["noise"]
    return {
        "w2_min": float(result.min_w2),
        "t_min": float(result.t_min),
        "t_min_predicted": target.t_min(row["beta"]) if is_predicted else None,
        "w2_end": float(result.w2[-1]),
        "phases": ", ".join(phase.name for phase in result.intervals),
        "exit_rate": next((phase.rate for phase in result.intervals if phase.name == "terminal"), None),
        "exit_rate_predicted": target.exit_rate,
        "unmet": ", ".join(need.name for need in result.requires if need.met is False),
        "w2": result.w2.tolist(),
    }
