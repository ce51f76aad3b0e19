"""The commands `limit` and `simulate`: the predicted limit of G and V, and the flow compared with it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from attn_flow.cli import console

Heads = Annotated[str | None, typer.Option(help='A matrix as of `limit`; several heads: "3,0;0,1 | 1,0;0,1".')]


def limit(
    G: console.Matrix,
    V: console.Matrix,
    beta: Annotated[str | None, typer.Option(help="Betas for t_min, such as 10,100.")] = None,
    as_json: console.Json = False,
) -> None:
    """Predict where tokens go at low temperature, from G and V alone.

    G is K^T Q: a token x attends to y with the logit beta <G x, y>.

    Example: attn-flow limit --G "2,.5;0,1" --V "1,0;0,1"
    """
    from attn_flow.attention.attention import Attention
    from attn_flow.cli.matrices import parse_numbers, parse_square
    from attn_flow.prediction.limit_map import limit as predict_limit
    from attn_flow.prediction.words import limit_sentences, why_no_t_min

    target = predict_limit(Attention.from_matrices(parse_square(G, "G"), parse_square(V, "V")))
    numbers = target.as_dict()
    betas = [] if beta is None else parse_numbers(beta, "beta")
    if betas:
        numbers["times"] = [{"beta": b, "t_min": target.t_min(b)} for b in betas]
    if as_json:
        console.print_json(numbers)
        return
    console.paragraph(" ".join(limit_sentences(numbers)))
    console.paragraph(f"How this is known: {target.reason}.")
    if target.case == "fixed" and len(numbers["projector"]) <= 4:
        entries = "; ".join(", ".join(f"{entry:.4g}" for entry in row) for row in numbers["projector"])
        console.paragraph(f"A token x goes to Pi x / |Pi x| with the projector Pi = [{entries}].")
    if betas and numbers["times"][0]["t_min"] is None:  # whether there is one does not depend on beta
        console.paragraph(f"No t_min is predicted: {why_no_t_min(numbers)}.")
    elif betas:
        rows = [list(row.values()) for row in numbers["times"]]
        console.print_table("Predicted times, in units of t:", ["beta", "W2 is least (t_min)"], rows)
    for met, words in ((True, "that G and V meet"), (None, "about the tokens, which are not known here")):
        names = [need["name"] for need in numbers["requires"] if need["met"] is met]
        if names:
            console.paragraph(f"Assumptions {words}: {', '.join(names)}.")
    for need in numbers["requires"]:
        if need["met"] is False:
            console.paragraph(f"- not met: {need['name']} ({need['text']}).")


def simulate(
    context: typer.Context,
    G: Heads = None,
    V: Heads = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Random heads, without --G and --V.")] = None,
    dim: Annotated[int | None, typer.Option(min=2, help="Dimension of the tokens of random heads.")] = None,
    beta: console.Beta = "10,100",
    tokens: Annotated[int, typer.Option(help="Tokens, or nodes of the quadrature.")] = 1000,
    kind: Annotated[str, typer.Option(help="softmax, unnormalised or sinkhorn.")] = "softmax",
    noise: Annotated[float, typer.Option(help="Noise of every token, per unit of time.")] = 0.0,
    x0: Annotated[str | None, typer.Option(help="Your own tokens (n, d), a matrix or a file.")] = None,
    random: Annotated[bool, typer.Option("--random", help="Random tokens also in d = 2, 3.")] = False,
    t: Annotated[str, typer.Option(help="The end T, or three or more times at which W2 is measured.")] = "20",
    h: Annotated[float, typer.Option(help="The step in time.")] = 0.1,
    step: Annotated[str, typer.Option(help="euler, rk4 or dopri5.")] = "rk4",
    seed: console.Seed = 0,
    sweep: Annotated[str | None, typer.Option(help='A grid: "beta=10,100 n=500,1000 noise=0,.1 seed=0,1".')] = None,
    figure: Annotated[Path | None, typer.Option(help="A .svg, .pdf or .png of the distances, transparent.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for a page and figures; clears an earlier run.")] = None,
    as_json: console.Json = False,
    quiet: console.Quiet = False,
) -> None:
    """Run the flow of G and V and compare it with its limit.

    Every beta is a run of its own. In d = 2 and 3 tokens are the weighted nodes of a tilted distribution, so that no
    random sample adds to the effect of temperature.

    Example: attn-flow simulate --G "3,0;0,1" --V "1,0;0,2" --out runs/simulate
    """
    from attn_flow.base.figures import save_figure
    from attn_flow.base.files import lock_for_writing
    from attn_flow.cli.matrices import parse_heads, parse_matrix, parse_numbers, random_heads
    from attn_flow.cli.sweep import parse_axes, show_sweep
    from attn_flow.measures.cloud import Cloud
    from attn_flow.pages.figures import simulation_figure
    from attn_flow.pages.simulation import run_simulation
    from attn_flow.prediction.sweep import starting_cloud
    from attn_flow.prediction.sweep import sweep as run_sweep

    if G is not None and V is not None:
        console.refuse_options(context, "--G and --V give the heads", "heads", "dim")
        attention = parse_heads(G, V, kind)
    elif G is not None or V is not None:
        name = "G" if V is None else "V"
        raise ValueError(f'--{name} alone: expected --G and --V together; the identity in d = 2 is "1,0;0,1".')
    else:
        attention = random_heads(heads, dim, kind, seed)
    console.require_writable(out)
    if figure is not None and figure.suffix.lower() not in (".png", ".svg", ".pdf"):  # the run may be long
        raise ValueError(f"--figure {figure}: expected a name that ends in .png, .svg or .pdf.")
    betas, times, progress = parse_numbers(beta, "beta"), parse_numbers(t, "t"), not (quiet or as_json)
    if sweep is not None:
        console.refuse_options(context, "--sweep names the values", "beta", "noise", *["tokens"] * ("n=" in sweep))
        console.refuse_options(context, "a sweep starts from drawn tokens and takes the default step", "x0", "step")
        axes = parse_axes(sweep, betas=betas, n=[tokens], noise=[noise], seeds=[seed])
        clouds = lambda n, seed: starting_cloud(attention.dim, n, seed, random=random)
        end = times[0] if len(times) == 1 else times
        result = run_sweep(attention, end, **axes, clouds=clouds, h=h, folder=out, progress=progress)
        show_sweep(result, out, figure, as_json)
        return
    if x0 is not None:
        console.refuse_options(context, "--x0 gives the tokens", "tokens", "random")
        cloud = Cloud(parse_matrix(x0, "x0"))
        if cloud.x.shape[-1] != attention.dim:
            raise ValueError(f"x0 has shape {tuple(cloud.x.shape)}, expected (n, {attention.dim}) to match G.")
    else:
        cloud = starting_cloud(attention.dim, tokens, seed, random=random)
    options: dict[str, Any] = {"noise": noise, "seed": seed, "out": out, "progress": progress}
    with nullcontext() if out is None else lock_for_writing(out / "simulate.json"):
        numbers = run_simulation(attention, betas, cloud, times, h, step, **options)
    if figure is not None:
        save_figure(simulation_figure(numbers), figure, transparent=True)
    if as_json:
        console.print_json(numbers)
        return
    _print_simulation(numbers)
    if out is not None:
        console.echo(f"Written to {out}; open {out / 'simulate.html'} in a browser.")


def _print_simulation(numbers: dict[str, Any]) -> None:
    from attn_flow.prediction.words import phase_words, why_no_t_min

    runs, limit, caption = numbers["runs"], numbers["limit"], f"{numbers['caption']} Times in units of t."
    console.paragraph(" ".join(numbers["sentences"]))
    if limit is None:
        rows = [[run["beta"], run["t"][-1], run["mean_length"][0], run["mean_length"][-1]] for run in runs]
        console.print_table(caption, ["beta", "time", "length of the mean token at the start", "at the end"], rows)
        return
    names = ("beta", "min_w2", "t_min", "t_min_predicted")
    rows = [[*(run[name] for name in names), run["w2"][-1], phase_words(run["phases"])] for run in runs]
    columns = ["beta", "least W2", "at time", "predicted", "W2 at the end", "its course"]
    console.print_table(f"Distance W2 to the predicted limit. {caption}", columns, rows)
    if any(run["t_min_predicted"] is None for run in runs) and not limit["exit_rate"]:
        console.paragraph(f"No time of least W2 is predicted: {why_no_t_min(limit)}.")
    doubts = dict.fromkeys(doubt for run in runs for doubt in run["doubts"])
    for doubt in doubts:
        betas = ", ".join(f"{run['beta']:g}" for run in runs if doubt in run["doubts"])
        console.paragraph(f"Beta {betas} does not meet an assumption of the prediction: {doubt}.")
    if not doubts:
        console.echo("The cloud meets every assumption of the prediction that can be checked.")
