"""The commands `limit` and `simulate`: the predicted limit of G and V, and the flow compared with it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from attn_flow.cli.console import (
    Json,
    Quiet,
    Seed,
    echo,
    paragraph,
    print_json,
    print_table,
    refuse_options,
    require_writable,
)

Matrix = Annotated[str, typer.Option(help='"3,0;0,1" (rows ; entries ,) or a .npy, .pt or .safetensors file.')]
Heads = Annotated[
    str | None, typer.Option(help='A matrix such as "3,0;0,1" or a file; several heads: "3,0;0,1 | 1,0;0,1".')
]
Beta = Annotated[str, typer.Option(help="Inverse temperatures, such as 10,100,inf.")]


def limit(
    G: Matrix,
    V: Matrix,
    beta: Annotated[str | None, typer.Option(help="Betas for t_min, such as 10,100.")] = None,
    tol: Annotated[float, typer.Option(help="Relative gap below which eigenvalues count as equal.")] = 1e-6,
    as_json: Json = False,
) -> None:
    """Predict where tokens go at low temperature, from G and V alone.

    G is K^T Q: a token x attends to y with the logit beta <G x, y>.

    Example: attn-flow limit --G "2,.5;0,1" --V "1,0;0,1"
    """
    from attn_flow import Attention
    from attn_flow import limit as predict_limit
    from attn_flow.cli.matrices import parse_numbers, parse_square
    from attn_flow.prediction.words import limit_sentences, why_no_t_min

    target = predict_limit(Attention.from_matrices(parse_square(G, "G"), parse_square(V, "V")), tol=tol)
    numbers = target.as_dict()
    betas = [] if beta is None else parse_numbers(beta, "beta")
    if betas and target.rates is not None:
        numbers["times"] = [{"beta": b, "t_min": target.t_min(b)} for b in betas]
    if as_json:
        print_json(numbers)
        return
    paragraph(" ".join(limit_sentences(numbers)))
    paragraph(f"How this is known: {target.reason}.")
    if target.case == "fixed" and len(numbers["projector"]) <= 4:
        entries = "; ".join(", ".join(f"{entry:.4g}" for entry in row) for row in numbers["projector"])
        paragraph(f"A token x goes to Pi x / |Pi x| with the projector Pi = [{entries}].")
    if "times" in numbers:
        columns = ["beta", "W2 is least (t_min)"]
        rows = [["not predicted" if v is None else v for v in row.values()] for row in numbers["times"]]
        print_table("Predicted times, in units of t:", columns, rows)
        if any(row["t_min"] is None for row in numbers["times"]):
            paragraph(f"No t_min is predicted: {why_no_t_min(numbers)}.")
    needs = numbers["requires"]
    names = {met: ", ".join(need["name"] for need in needs if need["met"] is met) for met in (True, None)}
    if names[True]:
        paragraph(f"Assumptions that G and V meet: {names[True]}.")
    if names[None]:
        paragraph(f"Assumptions about the tokens, which are not known here: {names[None]}.")
    for need in needs:
        if need["met"] is False:
            paragraph(f"- not met: {need['name']} ({need['text']}).")


def simulate(
    context: typer.Context,
    G: Heads = None,
    V: Heads = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Random heads, without --G and --V; with --dim.")] = None,
    dim: Annotated[int | None, typer.Option(min=1, help="Dimension of the tokens of random heads.")] = None,
    beta: Beta = "10,100",
    tokens: Annotated[int, typer.Option(help="Tokens, or nodes of the quadrature.")] = 1000,
    kind: Annotated[str, typer.Option(help="softmax, unnormalised or sinkhorn.")] = "softmax",
    noise: Annotated[float, typer.Option(help="Noise of every token, per unit of time.")] = 0.0,
    x0: Annotated[str | None, typer.Option(help="Your own tokens (n, d), a matrix or a file.")] = None,
    random: Annotated[bool, typer.Option("--random", help="Random tokens also in d = 2, 3.")] = False,
    t: Annotated[str, typer.Option(help="The end T, or at least three times at which W2 is measured.")] = "20",
    h: Annotated[float, typer.Option(help="The step in time.")] = 0.1,
    step: Annotated[str, typer.Option(help="euler, rk4 or dopri5.")] = "rk4",
    seed: Seed = 0,
    sweep: Annotated[str | None, typer.Option(help='A grid: "beta=10,100 n=500,1000 noise=0,.1 seed=0,1".')] = None,
    figure: Annotated[Path | None, typer.Option(help="A .svg, .pdf or .png of the distances, transparent.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for a page, figures and paths; clears an earlier run.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the flow of G and V and compare it with its limit.

    Every beta is a run of its own. In d = 2 and 3 tokens are the weighted nodes of a tilted distribution, so that no
    random sample adds to the effect of temperature.

    Example: attn-flow simulate --G "3,0;0,1" --V "1,0;0,2" --out runs/simulate
    """
    from attn_flow.base.figures import save_figure
    from attn_flow.base.files import lock_for_writing
    from attn_flow.cli.matrices import parse_heads, parse_matrix, parse_numbers, random_heads
    from attn_flow.measures.cloud import Cloud
    from attn_flow.pages.figures import simulation_figure
    from attn_flow.pages.simulation import run_simulation
    from attn_flow.prediction import starting_cloud

    if G is not None and V is not None:
        refuse_options(context, "--G and --V give the heads", "heads", "dim")
        attention = parse_heads(G, V, kind)
    else:
        refuse_options(context, 'both are needed (the identity in d = 2 is "1,0;0,1")', "G", "V")
        attention = random_heads(heads, dim, kind, seed)
    if out is not None:
        require_writable(out)
    betas, times, progress = parse_numbers(beta, "beta"), parse_numbers(t, "t"), not (quiet or as_json)
    if sweep is not None:
        from attn_flow import sweep as run_sweep
        from attn_flow.cli.sweep import parse_axes, print_sweep

        refuse_options(context, "--sweep names the values", "beta", "noise", "x0", "step")
        axes = parse_axes(sweep, betas=betas, n=[tokens], noise=[noise], seeds=[seed])
        clouds = lambda n, seed: starting_cloud(attention.dim, n, seed, random=random or None)
        end = times[0] if len(times) == 1 else times
        result = run_sweep(attention, end, **axes, clouds=clouds, h=h, folder=out, progress=progress)
        if figure is not None:
            save_figure(result.plot(), figure, transparent=True)
        print_sweep(result, out, as_json)
        return
    if x0 is not None:
        refuse_options(context, "--x0 gives the tokens", "tokens", "random")
        cloud = Cloud(parse_matrix(x0, "x0"))
        if cloud.x.shape[-1] != attention.dim:
            raise ValueError(f"x0 has shape {tuple(cloud.x.shape)}, expected (n, {attention.dim}) to match G.")
    else:
        cloud = starting_cloud(attention.dim, tokens, seed, random=random or None)
    with nullcontext() if out is None else lock_for_writing(out / "simulate.json"):
        numbers = run_simulation(
            attention, betas, cloud, times, h, step, noise=noise, seed=seed, out=out, progress=progress
        )
    if figure is not None:
        save_figure(simulation_figure(numbers), figure, transparent=True)
    if as_json:
        print_json(numbers)
        return
    _print_simulation(numbers)
    if out is not None:
        echo(f"Written to {out}; open {out / 'simulate.html'} in a browser.")


def _print_simulation(numbers: dict[str, Any]) -> None:
    from attn_flow.prediction.words import phase_words, why_no_t_min

    runs, limit, caption = numbers["runs"], numbers["limit"], f"{numbers['caption']} Times in units of t."
    paragraph(" ".join(numbers["sentences"]))
    if limit is None:
        rows = [[run["beta"], run["t"][-1], run["mean_length"][0], run["mean_length"][-1]] for run in runs]
        print_table(caption, ["beta", "time", "length of the mean token at the start", "at the end"], rows)
        return
    rows = []
    for run in runs:
        predicted = "none" if run["t_min_predicted"] is None else f"{run['t_min_predicted']:.4g}"
        rows.append([run["beta"], run["min_w2"], run["t_min"], predicted, run["w2"][-1], phase_words(run["phases"])])
    columns = ["beta", "least W2", "at time", "predicted", "W2 at the end", "its course"]
    print_table(f"Distance W2 to the predicted limit. {caption}", columns, rows)
    if any(run["t_min_predicted"] is None for run in runs) and not limit["exit_rate"]:
        paragraph(f"No time of least W2 is predicted: {why_no_t_min(limit)}.")
    doubts = dict.fromkeys(doubt for run in runs for doubt in run["doubts"])
    for doubt in doubts:
        betas = ", ".join(f"{run['beta']:g}" for run in runs if doubt in run["doubts"])
        paragraph(f"Beta {betas} does not meet an assumption of the prediction: {doubt}.")
    if not doubts:
        echo("The cloud meets every assumption of the prediction that can be checked.")
