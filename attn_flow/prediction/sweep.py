"""A grid of flows: attentions, betas, noise, numbers of tokens and seeds, each compared with its predicted limit."""

from __future__ import annotations

import csv
import io
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_flow.attention.attention import Attention
from attn_flow.base import checks
from attn_flow.base.files import digest, lock_for_writing, read_json, source_digest, write_bytes, write_json
from attn_flow.base.progress import progress_bar
from attn_flow.drawing import lines_figure
from attn_flow.dynamics.flow import flow
from attn_flow.measures import quadrature
from attn_flow.measures.cloud import Cloud, as_cloud
from attn_flow.measures.von_mises_fisher import VonMisesFisher
from attn_flow.observe.quantities import clusters
from attn_flow.prediction.limit_map import limit
from attn_flow.prediction.phases import phases

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AXES = ("beta", "n", "noise", "attention", "seed")
COMPARED = ("w2_min", "t_min", "t_min_predicted", "w2_end", "phases", "exit_rate", "exit_rate_predicted", "unmet", "w2")
TOKENS_AT_ONCE = 2**16  # tokens of the clouds that run as one batch
CLUSTER_DISTANCE = 0.05  # tokens that are nearer than this are one cluster


def starting_cloud(d: int, n: int, seed: int = 0, *, random: bool = False) -> Cloud:
    """Tokens of the von Mises-Fisher distribution (kappa = 1) around (1, ..., d), which no reflection of an axis keeps.

    In d = 2 and 3 they are weighted nodes of a quadrature, without sampling noise, unless random=True.

    Example:
        >>> starting_cloud(2, 100), starting_cloud(5, 100)
        (Cloud(x (100, 2) float64, weights), Cloud(x (100, 5) float64))
    """
    checks.require_count(d=d, n=n)
    direction = torch.arange(1, d + 1, dtype=torch.float64)
    mu = VonMisesFisher(direction / direction.norm(), 1.0)
    if random or d not in (2, 3):
        return Cloud(mu.sample(n, generator=torch.Generator().manual_seed(seed)))
    if d == 3:
        return quadrature.fibonacci(n, mu.density)
    angle = 2 * math.pi * (torch.arange(n, dtype=torch.float64) + (math.sqrt(5) - 1) / 2) / n  # no node on an axis
    x = torch.stack([angle.cos(), angle.sin()], dim=-1)
    return Cloud(x, mu.density(x))


@dataclass(frozen=True, eq=False, repr=False)
class Sweep:
    """The runs of a grid, one row each, as `sweep` returns them; `pandas.DataFrame(runs.rows)` is a table.

    Attributes:
        t: (T,), the times of the curves.
        rows: dictionaries with the settings "attention", "noise", "n", "beta", "seed"; "clusters", their number at the
            end; "w2", the distances (T,) to the predicted limit; "w2_min", "t_min", the least of them and its time;
            "t_min_predicted"; "w2_end"; "phases", their names; "exit_rate" and "exit_rate_predicted"; "unmet", the
            requirements of the prediction that the run does not meet. None: not predicted or not measured.

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

    def values(self, name: str) -> list[Any]:
        """The values of one axis of the grid, in the order in which they were given."""
        return list(dict.fromkeys(row[name] for row in self.rows))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the rows without the curves as comma-separated values."""
        text = io.StringIO()
        table = csv.DictWriter(text, [name for name in self.rows[0] if name != "w2"], extrasaction="ignore")
        table.writeheader()
        table.writerows(self.rows)
        write_bytes(text.getvalue().encode(), path)

    def plot(self) -> Figure:
        """The least W2 and its time against the first axis of the grid with several values.

        There is one line for every combination of the other axes, with bars for the standard deviation over seeds and
        dashes for predicted times. It needs matplotlib.
        """
        varied = [name for name in AXES[:-1] if len(self.values(name)) > 1]
        against = (varied or ["beta"])[0]
        lines: dict[str, list[list[dict[str, Any]]]] = {}  # label: the rows at every value
        for row in self.rows:
            label = ", ".join(f"{name} {row[name]}" for name in varied if name != against)
            points = lines.setdefault(label, [[] for _ in self.values(against)])
            points[self.values(against).index(row[against])].append(row)
        return lines_figure(against, self.values(against), list(lines.items()))


def sweep(
    attentions: Attention | Mapping[str, Attention],
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
        attentions: an `Attention`, or several by name.
        t: the times at which W2 is measured; one number T stands for 101 times from 0 to T.
        betas: inverse temperatures; by default that of each attention.
        noise: standard deviations of independent noise per unit of time (0: none).
        n, seeds: numbers of tokens; seeds of the tokens and of the noise.
        clouds: a function (n, seed) -> tokens (n, d) or a `Cloud` of n tokens; by default `starting_cloud`.
        h: the longest step in time.
        folder: where finished batches are kept (sweep.json); those of the same code are not run again.
        progress: show a progress bar on standard error.

    Example:
        >>> G, V = torch.diag(torch.tensor([3.0, 1.0])), torch.diag(torch.tensor([1.0, 2.0]))
        >>> result = sweep(Attention.from_matrices(G, V), 12.0, betas=[10, 100, 1000], n=[200], h=0.1)
        >>> result
        Sweep(3 runs: 3 beta, 101 times to 12)
        >>> [round(row["w2_min"], 2) for row in result.rows]  # colder is nearer
        [0.53, 0.18, 0.06]
    """
    fields = {"0": attentions} if isinstance(attentions, Attention) else attentions
    times = torch.tensor(checks.time_grid(t), dtype=torch.float64)
    for name, each in fields.items():
        if each.with_beta(1.0).batch_shape or (betas is None and torch.as_tensor(each.beta).numel() > 1):
            raise ValueError(f"attention {name!r} has several weights or betas; pass them one by one, or use betas=.")
    batches: list[list[dict[str, Any]]] = []
    for name, sigma, count in itertools.product(fields, noise, n):
        checks.require_nonnegative(noise=sigma)
        checks.require_count(n=count)
        settings: dict[str, Any] = {"attention": name, "noise": float(sigma), "n": int(count)}
        own = [fields[name].beta] if betas is None else betas
        runs = [settings | {"beta": float(beta), "seed": int(seed)} for beta in own for seed in seeds]
        for is_hardmax in (False, True):  # a batch has finite betas only
            group = [run for run in runs if math.isinf(run["beta"]) == is_hardmax]
            size = max(1, TOKENS_AT_ONCE // count)
            batches += [group[i : i + size] for i in range(0, len(group), size)]
    if not batches:
        raise ValueError("the grid is empty; expected at least one attention, beta, noise, n and seed.")
    file, rows = None if folder is None else Path(folder) / "sweep.json", []
    finished: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as contexts:
        if file is not None:
            contexts.enter_context(lock_for_writing(file))
            finished = read_json(file) if file.exists() else {}
        advance = contexts.enter_context(progress_bar("sweep", sum(map(len, batches)), progress))
        for batch in batches:
            attention = fields[batch[0]["attention"]]
            make = clouds or partial(starting_cloud, attention.dim)
            starts = [as_cloud(make(run["n"], run["seed"])) for run in batch]
            x, p = (torch.stack(z) for z in zip(*((each.filled(), each.probabilities) for each in starts)))
            weights = None if all(each.weights is None for each in starts) else p
            cloud = Cloud(x, weights, None if all(each.mask is None for each in starts) else p > 0)
            tensors = {"x": x, "p": p, "t": times, **attention.tensors}
            if attention.context is not None:  # it may be any measure, and shows in the velocity
                tensors["drift"] = attention.to(x.dtype).drift(cloud)
            about = f"{batch} {attention.summary()} {h} {weights is None}"
            key = digest(tensors, {"runs": about, "source": source_digest()})
            if key not in finished:
                finished[key] = _run(batch, attention, cloud, times, h)
                if file is not None:
                    write_json(finished, file)
            rows += [row | run for row, run in zip(finished[key], batch)]  # JSON has no infinite beta
            advance(len(batch), note=", ".join(f"{name} {batch[0][name]}" for name in ("attention", "noise", "n")))
    return Sweep(times, tuple(rows))


def _run(
    batch: list[dict[str, Any]], attention: Attention, cloud: Cloud, times: Tensor, h: float
) -> list[dict[str, Any]]:
    """The rows of one batch, whose runs have the clouds (runs, n, d)."""
    betas = torch.tensor([run["beta"] for run in batch], dtype=cloud.x.dtype)
    attention, sigma = attention.to(cloud.x.dtype).with_beta(betas[:, None]), batch[0]["noise"]
    # The noise of each cloud comes from a generator of its own, so that a run does not depend on its batch.
    generators = [torch.Generator().manual_seed(run["seed"]) for run in batch]
    draw = lambda x: torch.stack([torch.randn(x.shape[1:], generator=each, dtype=x.dtype) for each in generators])
    path = flow(attention, cloud, times, h=h, noise=(lambda x: sigma * draw(x).to(x.device)) if sigma else None)
    counts = clusters(Cloud(path.x[-1], cloud.weights, cloud.mask), tol=CLUSTER_DISTANCE).counts.tolist()
    rows = [run | {"clusters": count} for run, count in zip(batch, counts)]
    try:
        target = limit(attention)
        results = phases(path, target)
    except ValueError:  # this kind of attention has no limit map, or a token has no established limit
        return [row | dict.fromkeys(COMPARED) for row in rows]
    for row, result in zip(rows, results.elements):
        is_predicted = 1 < row["beta"] < math.inf and not sigma
        row |= {
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
    return rows
