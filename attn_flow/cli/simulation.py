"""The commands `limit` and `simulate`: the predicted limit of G and V, and the flow compared with it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attn_flow.cli.console import (
    Json,
    Quiet,
    Seed,
    complain,
    echo,
    number_name,
    print_json,
    print_table,
    refuse_options,
    require_writable,
)

if TYPE_CHECKING:
    from torch import Tensor

    from attn_flow import Attention, Cloud, LimitMap

MAX_DISTANCES = 200  # times at which W2 is measured if only the end is given
FILES = ("simulate.json", "simulate.png", "simulate.html", "path_beta_*.safetensors", "clouds_beta_*.png")

Matrix = Annotated[str, typer.Option(help='"3,0;0,1" (rows ; entries ,) or a .npy, .pt or .safetensors file.')]
Beta = Annotated[str, typer.Option(help="Inverse temperatures, such as 10,100,inf.")]


def limit(
    G: Matrix,
    V: Matrix,
    beta: Annotated[str | None, typer.Option(help="Betas for t_beta and t_min, such as 10,100.")] = None,
    tol: Annotated[float, typer.Option(help="Relative gap below which eigenvalues count as equal.")] = 1e-6,
    as_json: Json = False,
) -> None:
    """Where tokens go at low temperature, from G = K^T Q and V alone.

    Example: attn-flow limit --G "2,.5;0,1" --V "1,0;0,1"
    """
    from attn_flow.attention import Attention
    from attn_flow.cli.matrices import parse_numbers, parse_square
    from attn_flow.prediction import limit as predict_limit

    target = predict_limit(Attention.from_matrices(parse_square(G, "G"), parse_square(V, "V")), tol=tol)
    numbers = target.as_dict()
    betas = [] if beta is None else parse_numbers(beta, "beta")
    if betas and target.rates is not None:
        numbers["times"] = [{"beta": b, "t_beta": target.t_beta(b), "t_min": target.t_min(b)} for b in betas]
    if as_json:
        print_json(numbers)
        return
    words = {
        "dimension": "dimension of E, where tokens concentrate",
        "basis": "basis of E (rows: coordinates)",
        "projector": "projector onto E",
        "leading": "largest real part of the eigenvalues of V G",
        "gap": "its distance to the next",
        "frequencies": "rotation frequencies (radians per unit of time)",
        "g": "rate g of a typical token (per unit of time)",
        "rate_w1": "decay rate of W1 (per unit of time)",
        "rate_w2": "decay rate of W2 (per unit of time)",
        "exit_rate": "rate at which clusters leave E (per unit of time)",
        "width": "beta W2^2 of clusters that stay",
        "terminal_basis": "leading directions of V, where clusters end",
    }
    rows = [[words[name], _short(numbers[name])] for name in words if numbers[name] not in (None, [])]
    print_table(f"The limit is {target.case}: {target.reason}.", ["quantity", "value"], rows)
    echo("The prediction requires:")
    for requirement in target.requires:
        echo(f"  {requirement}")
    if "times" in numbers:
        rows = [["not predicted" if v is None else v for v in row.values()] for row in numbers["times"]]
        print_table("Times, in units of t", ["beta", "bound balances (t_beta)", "least W2 (t_min)"], rows)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return json.dumps(_rounded(value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _rounded(value: Any) -> Any:
    return [_rounded(entry) for entry in value] if isinstance(value, list) else round(value, 4)


def simulate(
    context: typer.Context,
    G: Matrix,
    V: Matrix,
    beta: Beta = "10,100",
    tokens: Annotated[int, typer.Option(min=1, max=10**7, help="Tokens, or nodes with --quadrature.")] = 1000,
    dim: Annotated[int | None, typer.Option(help="Dimension; by default that of G.")] = None,
    x0: Annotated[str | None, typer.Option(help="Your own tokens (n, d), a matrix or a file.")] = None,
    quadrature: Annotated[bool, typer.Option(help="Weighted nodes instead of random tokens, d = 2, 3.")] = False,
    density: Annotated[float | None, typer.Option(hidden=True)] = None,
    t: Annotated[str, typer.Option(help="The end T (W2 is then measured at up to 200 times), or the times.")] = "20",
    h: Annotated[float, typer.Option(help="The step in time.")] = 0.1,
    step: Annotated[str, typer.Option(help="euler, rk4 or dopri5.")] = "rk4",
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for simulate.html, .json, .png and the paths.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the flow for your own matrices and compare the cloud with the predicted limit, beta by beta.

    Example: attn-flow simulate --G "3,0;0,1" --V "1,0;0,2" --beta 10,100,1000 --tokens 1000 --t 30
    """
    from attn_flow.base.files import lock_for_writing
    from attn_flow.cli.matrices import parse_matrix, parse_numbers, parse_square

    if density is not None:
        raise ValueError(f"`simulate --density {density:g}` is now `attn-flow density --kappa {density:g}`.")
    G_matrix, V_matrix = parse_square(G, "G"), parse_square(V, "V")
    d = G_matrix.shape[0]
    if dim is not None and dim != d:
        raise ValueError(f"--dim {dim} but G is {tuple(G_matrix.shape)}; leave --dim out or give a matrix to match.")
    if x0 is not None:
        refuse_options(context, "--x0 gives the tokens", "tokens", "quadrature")
    cloud = initial_cloud(d, tokens, None if x0 is None else parse_matrix(x0, "x0"), quadrature, seed)
    betas, times, progress = parse_numbers(beta, "beta"), parse_numbers(t, "t"), not (quiet or as_json)
    if out is not None:
        require_writable(out)
    with nullcontext() if out is None else lock_for_writing(out / "simulate.json"):
        numbers = run_simulation(G_matrix, V_matrix, betas, cloud, times, h, step, out=out, progress=progress)
    if as_json:
        print_json(numbers)
    else:
        _print_simulation(numbers, f"{len(cloud.x)} tokens in d = {d}, seed {seed}", out)


def _print_simulation(numbers: dict[str, Any], words: str, out: Path | None) -> None:
    runs = numbers["runs"]
    print_table(
        f"Distance W2 to the predicted limit ({numbers['limit']['case']}); {words}",
        ["beta", "smallest W2", "at time", "W2 at the end", "tokens resolve it", "phases (times)"],
        [
            [r["beta"], r["min_w2"], r["t_min"], r["w2"][-1], r["resolution"]["verdict"], _phase_words(r["phases"])]
            for r in runs
        ],
    )
    requirements: dict[str, list[bool | None]] = {}
    for requirement in (requirement for run in runs for requirement in run["requires"]):
        requirements.setdefault(requirement["name"], []).append(requirement["met"])
    for met, label in ((True, "met"), (None, "not checked")):
        if names := ", ".join(name for name, values in requirements.items() if all(v is met for v in values)):
            echo(f"Requirements {label}: {names}.")
    for doubt in {doubt: None for run in runs for doubt in run["doubts"]}:
        betas = ", ".join(number_name(float(run["beta"])) for run in runs if doubt in run["doubts"])
        echo(f"Doubt (beta {betas}): {doubt}")
    if out is not None:
        echo(f"Written to {out}.")


def _phase_words(phases: list[dict[str, Any]]) -> str:
    return ", ".join(f"{p['phase']} {p['start']:.3g} to {p['end']:.3g}" for p in phases)


def initial_cloud(d: int, n: int, x: Tensor | None = None, use_quadrature: bool = False, seed: int = 0) -> Cloud:
    """Tokens x (n, d) as a cloud, n nodes of a quadrature of the uniform distribution, or n uniform random tokens."""
    import torch

    from attn_flow import Cloud, Sphere
    from attn_flow.measures import quadrature

    if x is not None:
        if x.shape[-1] != d:
            raise ValueError(f"x0 has shape {tuple(x.shape)}, expected (n, {d}) to match G.")
        return Cloud(x)
    if use_quadrature:
        if d not in (2, 3):
            raise ValueError(f"d = {d}: quadrature nodes exist for d = 2 and 3; leave --quadrature out.")
        return quadrature.circle(n) if d == 2 else quadrature.fibonacci(n)
    return Cloud(Sphere().uniform(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def run_simulation(
    G: Tensor,
    V: Tensor,
    betas: list[float],
    cloud: Cloud,
    t: Sequence[float],
    h: float,
    step: str = "rk4",
    *,
    out: str | Path | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Run a flow for every beta and measure its distance to the predicted limit.

    Args:
        G, V: matrices (d, d).
        cloud: the initial tokens (n, d).
        t: one end T, or at least three increasing times.
        out: a folder for the paths, figures, a page and simulate.json; files of an earlier run there are removed.

    Returns:
        "limit", "caption", "n", and "runs": for every beta t, w2, t_min, min_w2, phases, requires, doubts, resolution.
    """
    from attn_flow import Attention, flow
    from attn_flow import limit as predict_limit
    from attn_flow.base.checks import require_choice
    from attn_flow.base.files import to_plain

    require_choice("step", step, ("euler", "rk4", "dopri5"))
    target = predict_limit(Attention.from_matrices(G, V))
    times = _saved_times(t, h)
    attentions = [Attention.from_matrices(G, V, beta) for beta in betas]  # a wrong beta is refused before the first run
    if progress:
        seconds = len(betas) * estimate_seconds(attentions[0], target, cloud, times, h, step)
        complain(f"About {seconds:.2g} s: {len(betas)} betas, {len(times)} distances each.", "cyan")
    runs, paths = [], []
    for beta, attention in zip(betas, attentions):
        path = flow(attention, cloud, times, step=step, h=h, progress=progress)
        runs.append(_run_numbers(attention, beta, target, path))
        paths.append(path if out is not None else None)
    kind = "tokens" if cloud.weights is None else "weighted nodes"
    caption = f"{len(cloud.x)} {kind} in d = {cloud.x.shape[-1]}, {step}, $h = {h:.3g}$; limit case: {target.case}."
    coarse = ", ".join(number_name(r["beta"]) for r in runs if r["resolution"]["verdict"] == "unresolved")
    unmet = {
        requirement["name"]: None for run in runs for requirement in run["requires"] if requirement["met"] is False
    }
    if coarse:
        caption += rf" Too few points for the prediction at $\beta$ = {coarse}."
    if unmet:
        caption += f" Requirements that are not met: {', '.join(unmet)}."
    numbers = {"limit": target.as_dict(), "runs": runs, "n": len(cloud.x), "caption": caption}
    if out is not None:
        _write(Path(out), numbers, paths, target)
    return dict(to_plain(numbers))


def _run_numbers(attention: Attention, beta: float, target: LimitMap, path: Any) -> dict[str, Any]:
    """The numbers of one run: distances, phases, resolution, and what is predicted at this beta."""
    from attn_flow import phases, resolution

    measured = resolution(attention, path.cloud(0), warn=False)
    is_cold = 1 < beta < math.inf
    stays = target.terminal is not None and target.terminal.exit_rate == 0 and target.width is not None
    return {
        "beta": beta,
        **phases(path, target, warn=False).as_dict(),
        "t_min_predicted": target.t_min(beta) if is_cold else None,
        "min_w2_predicted": target.width.w2(beta) if is_cold and stays and target.width else None,
        "resolution": {
            "verdict": measured.verdict,
            "self_argmax": measured.self_argmax.tolist(),
            "number": measured.number.tolist(),
        },
    }


def _write(out: Path, numbers: dict[str, Any], paths: list[Any], target: LimitMap) -> None:
    """Write the paths, figures, page and numbers of a run, and remove those of an earlier one."""
    from attn_flow.base.figures import save_figure
    from attn_flow.base.files import versions, write_json
    from attn_flow.pages.figures import beta_words, clouds_figure, simulation_figure
    from attn_flow.pages.simulation import page_clouds, write_simulation

    old = sorted(file for pattern in FILES for file in out.glob(pattern))
    if old:
        complain(f"{out} has an earlier run; removed: {', '.join(file.name for file in old)}", "cyan")
    for file in old:
        file.unlink()
    for run, path in zip(numbers["runs"], paths):
        name = number_name(run["beta"])
        path.save(out / f"path_beta_{name}.safetensors")
        if path.x.shape[-1] in (2, 3):
            least = run["w2"].index(min(run["w2"]))
            shown = sorted({0, least // 3, least, (least + len(path) - 1) // 2, len(path) - 1})
            title = (
                f"{beta_words(run['beta'], numbers['n'])}: nearest to the predicted limit at $t = {path.t[least]:.3g}$"
            )
            save_figure(clouds_figure(path, shown, target, title), out / f"clouds_beta_{name}.png")
    save_figure(simulation_figure(numbers), out / "simulate.png")
    write_simulation(out / "simulate.html", numbers, [page_clouds(path) for path in paths])
    write_json({**numbers, "versions": versions()}, out / "simulate.json")


def estimate_seconds(attention: Attention, target: LimitMap, cloud: Cloud, times: Tensor, h: float, step: str) -> float:
    """Processor seconds of one beta, from one step and one distance that are measured here."""
    import torch

    from attn_flow import Trajectory, flow
    from attn_flow.prediction import w2_curve

    still = Trajectory(torch.zeros(1), cloud.x[None], cloud.weights)
    steps = sum(math.ceil(float(interval) / h - 1e-9) for interval in times.diff())
    work = (lambda: flow(attention, cloud, [0.0, h], step=step, h=h), lambda: w2_curve(still, target))
    seconds = 0.0
    for run, count in zip(work, (steps, len(times))):
        run()  # the first call also loads modules
        start = time.process_time()
        run()
        seconds += count * (time.process_time() - start)
    return seconds


def _saved_times(t: Sequence[float], h: float) -> Tensor:
    """The times themselves, or up to MAX_DISTANCES equal parts of [0, T], each of one step or more."""
    import torch

    if not 0 < h < math.inf:
        raise ValueError(f"h = {h}, expected a positive, finite step.")
    times = torch.tensor(t, dtype=torch.float64)
    if not bool(torch.isfinite(times).all()) or float(times[-1]) <= 0 or bool((times.diff() <= 0).any()):
        raise ValueError(f"t = {', '.join(map(str, t))}: expected one positive, finite end, or increasing times.")
    if len(t) == 2:
        raise ValueError(f"t = {t[0]:g}, {t[1]:g}: expected one end, or at least three times, which phases need.")
    if len(t) > 2:
        return times
    parts = min(MAX_DISTANCES, max(2, math.ceil(t[0] / h * (1 - 1e-12))))
    return torch.linspace(0, t[0], parts + 1, dtype=torch.float64)
