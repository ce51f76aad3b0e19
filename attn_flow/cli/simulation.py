"""The commands `limit` and `simulate`: the predicted limit of G and V, and the flow compared with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
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
    paragraph,
    print_json,
    print_table,
    refuse_options,
    require_writable,
)

if TYPE_CHECKING:
    from torch import Tensor

    from attn_flow import Attention, Cloud, LimitMap, Trajectory

MAX_DISTANCES = 200  # times at which W2 is measured if only the end is given
FILES = ("simulate.json", "simulate.png", "simulate.html", "path_beta_*.safetensors", "clouds_beta_*.png")

Matrix = Annotated[str, typer.Option(help='"3,0;0,1" (rows ; entries ,) or a .npy, .pt or .safetensors file.')]
Heads = Annotated[
    str | None, typer.Option(help='"3,0;0,1", several heads as "3,0;0,1 | 1,0;0,1", or a .npy, .pt, .safetensors file.')
]
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
    from attn_flow.prediction.words import limit_sentences, why_no_t_min

    target = predict_limit(Attention.from_matrices(parse_square(G, "G"), parse_square(V, "V")), tol=tol)
    numbers = target.as_dict()
    betas = [] if beta is None else parse_numbers(beta, "beta")
    if betas and target.rates is not None:
        numbers["times"] = [{"beta": b, "t_beta": target.t_beta(b), "t_min": target.t_min(b)} for b in betas]
    if as_json:
        print_json(numbers)
        return
    paragraph(" ".join(limit_sentences(numbers)))
    paragraph(f"How this is known: {target.reason}.")
    if target.case == "fixed" and len(numbers["projector"]) <= 4:
        entries = "; ".join(", ".join(f"{entry:.4g}" for entry in row) for row in numbers["projector"])
        paragraph(f"A token x goes to Pi x / |Pi x| with the projector Pi = [{entries}].")
    if "times" in numbers:
        rows = [["not predicted" if v is None else v for v in row.values()] for row in numbers["times"]]
        columns = ["beta", "terms of the bound are equal (t_beta)", "W2 is least (t_min)"]
        print_table("Predicted times, in units of t", columns, rows)
        if any(row["t_min"] is None for row in numbers["times"]):
            paragraph(f"No t_min is predicted: {why_no_t_min(numbers)}.")
    echo("The prediction assumes:")
    for need in target.requires:
        paragraph(f"- {need}")


def simulate(
    context: typer.Context,
    G: Heads = None,
    V: Heads = None,
    beta: Beta = "10,100",
    tokens: Annotated[int, typer.Option(min=1, max=10**7, help="Tokens, or nodes of the quadrature.")] = 1000,
    dim: Annotated[int | None, typer.Option(help="Dimension; by default that of G.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Random heads in dimension --dim, without --G, --V.")] = None,
    kind: Annotated[str, typer.Option(help="softmax, unnormalised or sinkhorn.")] = "softmax",
    noise: Annotated[float, typer.Option(min=0.0, help="Noise of every token, per unit of time.")] = 0.0,
    x0: Annotated[str | None, typer.Option(help="Your own tokens (n, d), a matrix or a file.")] = None,
    random: Annotated[bool, typer.Option("--random", help="Random tokens also in d = 2, 3.")] = False,
    density: Annotated[float | None, typer.Option(hidden=True)] = None,
    t: Annotated[str, typer.Option(help="The end T (W2 is then measured at up to 200 times), or the times.")] = "20",
    h: Annotated[float, typer.Option(help="The step in time.")] = 0.1,
    step: Annotated[str, typer.Option(help="euler, rk4 or dopri5.")] = "rk4",
    seed: Seed = 0,
    sweep: Annotated[str | None, typer.Option(help='A grid: "beta=10,100 n=500,1000 noise=0,.1 seed=0,1".')] = None,
    figure: Annotated[Path | None, typer.Option(help="A .svg, .pdf or .png of the distances, transparent.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for simulate.html, .json, .png and the paths.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the flow for your own matrices and compare the cloud with the predicted limit, beta by beta.

    In d = 2 and 3 tokens are weighted nodes of a quadrature, which show the temperature and not the chance of a sample.

    Examples:

      attn-flow simulate --G "3,0;0,1" --V "1,0;0,2" --beta 10,100,1000 --out runs/simulate

      attn-flow simulate --G "3,0;0,1" --V "1,0;0,2" --sweep "beta=10,100 noise=0,.1 seed=0,1,2" --out runs/sweep
    """
    from attn_flow import Cloud
    from attn_flow.base.files import lock_for_writing
    from attn_flow.cli.matrices import parse_matrix, parse_numbers
    from attn_flow.cli.sweep import parse_axes, run_sweep
    from attn_flow.prediction import starting_cloud

    if density is not None:
        raise ValueError(f"`simulate --density {density:g}` is now `attn-flow density --kappa {density:g}`.")
    attention = _attention(G, V, dim, heads, kind, seed)
    if out is not None:
        require_writable(out)
    progress = not (quiet or as_json)
    if sweep is not None:
        refuse_options(context, "--sweep names the values", "beta", "noise", "x0", "step")
        axes = parse_axes(sweep, beta=parse_numbers(beta, "beta"), n=[tokens], noise=[noise], seed=[seed])
        where: dict[str, Any] = {"out": out, "figure": figure, "as_json": as_json, "progress": progress}
        run_sweep(attention, axes, parse_numbers(t, "t"), h=h, random=random, **where)
        return
    if x0 is not None:
        refuse_options(context, "--x0 gives the tokens", "tokens", "random")
        cloud = Cloud(parse_matrix(x0, "x0"))
        if cloud.x.shape[-1] != attention.dim:
            raise ValueError(f"x0 has shape {tuple(cloud.x.shape)}, expected (n, {attention.dim}) to match G.")
    else:
        cloud = starting_cloud(attention.dim, tokens, seed, random=random or None)
    betas, times = parse_numbers(beta, "beta"), parse_numbers(t, "t")
    with nullcontext() if out is None else lock_for_writing(out / "simulate.json"):
        numbers = run_simulation(
            attention, betas, cloud, times, h, step, noise=noise, seed=seed, out=out, figure=figure, progress=progress
        )
    if as_json:
        print_json(numbers)
    else:
        _print_simulation(numbers, out)


def _attention(G: str | None, V: str | None, dim: int | None, heads: int | None, kind: str, seed: int) -> Attention:
    """The attention of the options: given matrices, or random heads."""
    import torch

    from attn_flow import Attention
    from attn_flow.cli.matrices import parse_square

    if G is None and V is None:
        if dim is None or heads is None:
            raise ValueError("give --G and --V, or --dim and --heads for random heads.")
        return Attention.random(
            dim, heads, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, kind=kind
        )
    if G is None or V is None:
        raise ValueError('give both --G and --V; the identity in d = 2 is "1,0;0,1".')
    parts = {name: [parse_square(head, name) for head in text.split("|")] for name, text in (("G", G), ("V", V))}
    shapes = {tuple(matrix.shape) for matrices in parts.values() for matrix in matrices}
    if len(shapes) > 1 or len(parts["G"]) != len(parts["V"]):
        counts = ", ".join(f"{name}: {len(each)} of {tuple(each[0].shape)}" for name, each in parts.items())
        raise ValueError(f"heads of G and V differ ({counts}); expected as many, of one size.")
    if heads is not None and heads != len(parts["G"]):
        raise ValueError(f'--heads {heads} but G has {len(parts["G"])}; separate heads by "|".')
    d = parts["G"][0].shape[0]
    if dim is not None and dim != d:
        raise ValueError(f"--dim {dim} but G is {(d, d)}; leave --dim out or give a matrix to match.")
    return Attention.from_matrices(torch.stack(parts["G"]), torch.stack(parts["V"]), kind=kind)


def run_simulation(
    attention: Attention,
    betas: Sequence[float],
    cloud: Cloud,
    t: Sequence[float],
    h: float,
    step: str = "rk4",
    *,
    noise: float = 0.0,
    seed: int = 0,
    out: str | Path | None = None,
    figure: str | Path | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Run a flow for every beta and measure its distance to the predicted limit.

    Args:
        attention: the attention, whose own beta is not used.
        cloud: the initial tokens (n, d).
        t: one end T, or at least three increasing times.
        noise, seed: independent noise of every token per unit of time, and its seed.
        out: a folder for the paths, figures, a page and simulate.json; files of an earlier run there are removed.
        figure: a .svg, .pdf or .png file for the figure of the distances, without background.

    Returns:
        "limit" (None where no limit is known, for the reason "no_limit"), "sentences", "caption", "n", "d", and "runs":
        for every beta t, mean_length (the length of the mean token), and where there is a limit w2, t_min, min_w2,
        phases, requires, doubts, resolution.
    """
    from attn_flow import flow
    from attn_flow.base.checks import require_choice
    from attn_flow.base.files import to_plain
    from attn_flow.prediction.words import limit_sentences

    require_choice("step", step, ("euler", "rk4", "dopri5"))
    target, no_limit = _limit_for(attention, cloud)
    times = _saved_times(t, h)
    attentions = [replace(attention, beta=beta) for beta in betas]  # a wrong beta is refused before the first run
    runs, paths = [], []
    for beta, one in zip(betas, attentions):
        path = flow(one, cloud, times, step=step, h=h, noise=_noise(noise, seed), progress=progress)
        runs.append(_run_numbers(one, beta, target, path, noise))
        paths.append(path if out is not None else None)
    n, d = cloud.x.shape
    words = "tokens" if cloud.weights is None else "weighted nodes"
    caption = f"{n} {words} in d = {d}, {attention.kind}, {step}, steps of {h:.3g}"
    caption += f", noise {noise:g} with seed {seed}" if noise else ""
    limit_numbers = None if target is None else target.as_dict()
    sentences = [no_limit] if limit_numbers is None else limit_sentences(limit_numbers)
    if noise and target is not None:
        sentences.append("This prediction is for the flow without noise.")
    numbers: dict[str, Any] = {"limit": limit_numbers, "no_limit": no_limit, "sentences": sentences, "runs": runs}
    numbers |= {"n": n, "d": d, "caption": caption + "."}
    if out is not None:
        _write(Path(out), numbers, paths, target)
    if figure is not None:
        from attn_flow.base.figures import save_figure
        from attn_flow.pages.figures import simulation_figure

        save_figure(simulation_figure(numbers), figure, transparent=True)
    return dict(to_plain(numbers))


def _limit_for(attention: Attention, cloud: Cloud) -> tuple[LimitMap | None, str]:
    """The predicted limit of this cloud, or None and the reason in words."""
    from attn_flow import limit as predict_limit

    try:
        target = predict_limit(attention)
        if not target.rotates:
            target.push_forward(cloud)
    except ValueError as error:
        return None, f"No limit is predicted, so that no distance is measured: {error}"
    return target, ""


def _noise(sigma: float, seed: int) -> Any:
    """The noise of a run, from a generator of its own; None without noise."""
    import torch

    from attn_flow.dynamics.noise import independent

    return independent(sigma, torch.Generator().manual_seed(seed)) if sigma else None


def _run_numbers(
    attention: Attention, beta: float, target: LimitMap | None, path: Trajectory, noise: float
) -> dict[str, Any]:
    """The numbers of one run: distances, phases, resolution, and what is predicted at this beta."""
    from attn_flow import Cloud, phases, resolution

    length = Cloud(path.x, path.weights).mean.norm(dim=-1)
    run: dict[str, Any] = {"beta": beta, "t": path.t.tolist(), "mean_length": length.tolist(), "w2": None, "phases": []}
    run |= {"t_min_predicted": None, "doubts": [], "note": ""}
    if target is None:
        return run
    measured = resolution(attention, path.cloud(0), warn=False)
    is_cold = 1 < beta < math.inf and not noise
    stays = target.terminal is not None and target.terminal.exit_rate == 0 and target.width is not None
    return {
        **run,
        **phases(path, target, warn=False).as_dict(),
        "t_min_predicted": target.t_min(beta) if is_cold else None,
        "min_w2_predicted": target.width.w2(beta) if is_cold and stays and target.width else None,
        "resolution": {
            "verdict": measured.verdict,
            "self_argmax": measured.self_argmax.tolist(),
            "number": measured.number.tolist(),
        },
    }


def _print_simulation(numbers: dict[str, Any], out: Path | None) -> None:
    from attn_flow.prediction.words import phase_words, why_no_t_min

    runs, title = numbers["runs"], f"{numbers['caption']} Times in units of t."
    paragraph(" ".join(numbers["sentences"]))
    if numbers["limit"] is None:
        rows = [[run["beta"], run["t"][-1], run["mean_length"][0], run["mean_length"][-1]] for run in runs]
        print_table(title, ["beta", "time", "length of the mean token at the start", "at the end"], rows)
    else:
        columns = ["beta", "least W2", "at time", "predicted", "W2 at the end", "its course"]
        rows = [
            [run["beta"], run["min_w2"], run["t_min"], _or_none(run["t_min_predicted"]), run["w2"][-1]]
            + [phase_words(run["phases"])]
            for run in runs
        ]
        print_table(f"Distance W2 to the predicted limit. {title}", columns, rows)
        if any(run["t_min_predicted"] is None for run in runs) and not numbers["limit"]["exit_rate"]:
            paragraph(f"No time of least W2 is predicted: {why_no_t_min(numbers['limit'])}.")
        doubts = {doubt: None for run in runs for doubt in run["doubts"]}
        for doubt in doubts:
            betas = ", ".join(number_name(float(run["beta"])) for run in runs if doubt in run["doubts"])
            paragraph(f"Beta {betas} does not meet an assumption of the prediction: {doubt}.")
        if not doubts:
            echo("The cloud meets every assumption of the prediction that can be checked.")
    if out is not None:
        echo(f"Written to {out}; open {out / 'simulate.html'} in a browser.")


def _or_none(value: float | None) -> Any:
    return "none" if value is None else value


def _write(out: Path, numbers: dict[str, Any], paths: list[Any], target: LimitMap | None) -> None:
    """Write the paths, figures, page and numbers of a run, and remove those of an earlier one."""
    from attn_flow.base.figures import save_figure
    from attn_flow.base.files import versions, write_json
    from attn_flow.drawing import clouds_figure
    from attn_flow.pages.figures import beta_words, simulation_figure
    from attn_flow.pages.simulation import page_clouds, write_simulation

    old = sorted(file for pattern in FILES for file in out.glob(pattern))
    if old:
        complain(f"{out} has an earlier run; removed: {', '.join(file.name for file in old)}", "cyan")
    for file in old:
        file.unlink()
    bases = (None, None) if target is None else (target.basis, target.terminal.basis if target.terminal else None)
    for run, path in zip(numbers["runs"], paths):
        name = number_name(run["beta"])
        path.save(out / f"path_beta_{name}.safetensors")
        if path.x.shape[-1] in (2, 3):
            title, least = beta_words(run["beta"], numbers["n"]), len(path) // 2
            if run["w2"] is not None:
                least = run["w2"].index(min(run["w2"]))
                title += f": nearest to the predicted limit at $t = {path.t[least]:.3g}$"
            shown = sorted({0, least // 3, least, (least + len(path) - 1) // 2, len(path) - 1})
            save_figure(clouds_figure(path.t, path.x, shown, *bases, title), out / f"clouds_beta_{name}.png")
    save_figure(simulation_figure(numbers), out / "simulate.png")
    write_simulation(out / "simulate.html", numbers, [page_clouds(path) for path in paths])
    write_json({**numbers, "versions": versions()}, out / "simulate.json")


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
