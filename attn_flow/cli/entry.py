"""attn-flow: simulate, predict, probe, reproduce, train and measure from the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from attn_flow.cli import encoders, zoo
from attn_flow.cli.console import (
    Json,
    Quiet,
    Seed,
    complain,
    echo,
    number_name,
    refuse_beside,
    reporting,
    say,
    table,
    writable,
)
from attn_flow.cli.training import predict, train

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Self-attention as a flow of particles: simulate it, predict where it goes, see whether encoders go there.",
)

Matrix = Annotated[str, typer.Option(help='"3,0;0,1" (rows ; entries ,) or a .npy, .pt, .safetensors file.')]


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a subcommand."""
    return app.command()(reporting(function))


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from attn_flow import __version__

        echo(__version__)
        raise typer.Exit


@command
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
    from attn_flow.cli.matrices import parse_matrix, parse_numbers, square
    from attn_flow.prediction.limit_map import limit as limit_map

    attention = Attention.from_matrices(square(parse_matrix(G, "G"), "G"), square(parse_matrix(V, "V"), "V"))
    found = limit_map(attention, tol=tol)
    numbers = found.as_dict()
    if beta is not None:
        betas = parse_numbers(beta, "beta")
        if found.g is not None and found.case != "jordan":
            numbers["times"] = [{"beta": b, "t_beta": found.t_beta(b), "t_min": found.t_min(b)} for b in betas]
    if as_json:
        say(numbers)
        return
    evidence, _ = numbers.pop("evidence"), numbers.pop("requires")
    times = numbers.pop("times", [])
    rows = [[name, _short(value)] for name, value in numbers.items() if value is not None]
    table(f"limit map: {found.case}, {evidence['because']}", ["what", "value"], rows)
    echo("requires:")
    for need in found.requires:
        echo(f"  {need}")
    if times:
        table("times", ["beta", "t_beta", "t_min"], [list(row.values()) for row in times])


def _short(value: Any) -> str:
    from attn_flow.base.files import plain

    if isinstance(value, (list, dict)):
        return json.dumps(_rounded(plain(value)))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    return round(value, 4) if isinstance(value, float) else value


@command
def simulate(
    context: typer.Context,
    G: Matrix,
    V: Matrix,
    beta: Annotated[str, typer.Option(help="Betas, such as 10,100,inf.")] = "10,100",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens, uniform on the sphere (nodes with --quadrature).")] = 1000,
    dim: Annotated[int | None, typer.Option(help="Dimension; that of G if not given.")] = None,
    x0: Annotated[str | None, typer.Option(help="Your own tokens (n, d), a matrix or a file.")] = None,
    quadrature: Annotated[bool, typer.Option(help="Weighted nodes, d = 2, 3: the mean-field run.")] = False,
    density: Annotated[
        float | None,
        typer.Option(help="Solve for the density instead (d = 2, 3), from a von Mises-Fisher law of this kappa."),
    ] = None,
    diffusion: Annotated[float, typer.Option(help="With --density: noise, as D times a Laplacian.")] = 0.0,
    bandwidth: Annotated[int | None, typer.Option(help="With --density: the largest degree of a mode.")] = None,
    t: Annotated[str, typer.Option(help="The end T (W2 is then measured at up to 200 times), or the times.")] = "20",
    h: Annotated[float, typer.Option(help="The step in time.")] = 0.1,
    step: Annotated[str, typer.Option(help="euler, rk4 or dopri5.")] = "rk4",
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for simulate.html, .json, .png and the paths.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the flow for your own matrices and compare the cloud with the predicted limit, beta by beta.

    Several processes share the tokens: torchrun --nproc-per-node 2 -m attn_flow simulate ...

    Example: attn-flow simulate --G "3,0;0,1" --V "1,0;0,2" --beta 10,100,1000 --tokens 1000 --t 30
    """
    from attn_flow.base.files import writing_alone
    from attn_flow.cli.matrices import parse_matrix, parse_numbers, square
    from attn_flow.cli.simulation import simulate as run
    from attn_flow.cli.simulation import start
    from attn_flow.dynamics.distributed import processes

    G_matrix, V_matrix = square(parse_matrix(G, "G"), "G"), square(parse_matrix(V, "V"), "V")
    if dim is not None and dim != G_matrix.shape[0]:
        raise ValueError(f"--dim {dim} but G is {tuple(G_matrix.shape)}; leave --dim out or give a matrix to match.")
    if density is not None:
        why = "starts from a law, has no tokens and chooses its own steps"
        refuse_beside(context, "--density", why, "x0", "quadrature", "tokens", "h", "step")
        _density(G_matrix, V_matrix, beta, density, t, diffusion, bandwidth, out, as_json)
        return
    if diffusion or bandwidth is not None:
        raise ValueError("--diffusion and --bandwidth are of --density KAPPA; without it leave them out.")
    if x0 is not None:
        refuse_beside(context, "--x0", "gives the tokens", "tokens", "quadrature")
    cloud = start(G_matrix.shape[0], tokens, None if x0 is None else parse_matrix(x0, "x0"), quadrature, seed)
    betas, times, show = parse_numbers(beta, "beta"), parse_numbers(t, "t"), not (quiet or as_json)
    if out is not None:
        writable(out)
    world = processes(patience=timedelta(days=1))  # while the first process measures W2, the others wait
    alone = nullcontext() if out is None or not world.first else writing_alone(out / "simulate.json")
    with alone:
        numbers = run(G_matrix, V_matrix, betas, cloud, times, h, step, out=out, progress=show, world=world)
    if numbers is None:
        return
    if as_json:
        say(numbers)
        return
    table(
        f"limit: {numbers['limit']['case']}; n = {cloud.x.shape[0]}, d = {cloud.x.shape[1]}, seed {seed}",
        ["beta", "min W2", "at t", "W2 at the end", "resolved", "phases"],
        [
            [r["beta"], r["min_w2"], r["t_min"], r["w2"][-1], r["resolution"]["verdict"], _phase_words(r["phases"])]
            for r in numbers["runs"]
        ],
    )
    needs: dict[str, list[bool | None]] = {need["name"]: [] for need in numbers["runs"][0]["requires"]}
    for need in (need for r in numbers["runs"] for need in r["requires"]):
        needs[need["name"]].append(need["met"])
    for met, words in ((True, "met"), (None, "not checked")):
        if names := ", ".join(name for name, found in needs.items() if all(each is met for each in found)):
            echo(f"requires, {words}: {names}")
    doubts = {doubt: None for r in numbers["runs"] for doubt in r["doubts"]}
    for doubt in doubts:
        beta_words = ", ".join(number_name(float(r["beta"])) for r in numbers["runs"] if doubt in r["doubts"])
        echo(f"doubt (beta {beta_words}): {doubt}")
    if out is not None:
        echo(f"written to {out}")


def _density(
    G: Any,
    V: Any,
    beta: str,
    kappa: float,
    t: str,
    diffusion: float,
    bandwidth: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """`simulate --density`: modes of the mean-field density, and its distance to the predicted limit."""
    from attn_flow.cli.densities import simulate_density
    from attn_flow.cli.matrices import parse_numbers

    if out is not None:
        writable(out)
    betas, times = parse_numbers(beta, "beta"), parse_numbers(t, "t")
    numbers = simulate_density(G, V, betas, kappa, times, diffusion=diffusion, bandwidth=bandwidth, out=out)
    if as_json:
        say(numbers)
        return
    rows = []
    for r in numbers["runs"]:
        modes = ", ".join(f"{a:.3g}" for a in r["amplitudes"][-1])
        rows.append([r["beta"], r["t"][-1], modes, "-" if r["w2"] is None else r["w2"][-1], r["steps"]])
    table(numbers["caption"], ["beta", "t", "modes 1, 2, ...", "W2 at the end", "steps"], rows)
    if out is not None:
        echo(f"written to {out}")


def _phase_words(phases: list[dict[str, Any]]) -> str:
    return ", ".join(f"{p['phase']} [{p['start']:.3g}, {p['end']:.3g}]" for p in phases)


@command
def play(
    out: Annotated[Path, typer.Option(help="The page to write; it needs no other file.")] = Path("runs/play.html"),
    open_it: Annotated[bool, typer.Option("--open/--no-open", help="Show it in the browser.")] = True,
) -> None:
    """A playground in the browser: tokens move live on the circle or the sphere, beside what is predicted of them.

    Example: attn-flow play
    """
    import webbrowser

    from attn_flow.pages.playground import write_playground

    if out.suffix not in (".html", ".htm"):
        raise ValueError(f"--out {out}: expected a page to write, such as {out}/play.html.")
    path = write_playground(out).resolve()
    echo(f"written to {out}")
    if open_it and not webbrowser.open(path.as_uri()):
        echo("no browser was found here; open the file in one.")


def _experiments(incomplete: str) -> list[str]:
    from attn_flow.experiments import NAMES

    return [name for name in (*NAMES, "all") if name.startswith(incomplete)]


@command
def reproduce(
    name: Annotated[str | None, typer.Argument(help="An experiment, or 'all'.", autocompletion=_experiments)] = None,
    list_them: Annotated[bool, typer.Option("--list", help="List the experiments and their claims.")] = False,
    quick: Annotated[bool, typer.Option(help="Small sizes, seconds instead of minutes.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for NAME.json and NAME.png.")] = Path("runs/reproduce"),
    strict: Annotated[bool, typer.Option(help="Exit code 1 where a claim does not hold.")] = False,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Reproduce a paper's result: numbers, figure, and which claims hold.

    Example: attn-flow reproduce concentration --quick
    """
    from attn_flow.base.files import writing_alone
    from attn_flow.cli.reproduction import failed
    from attn_flow.cli.reproduction import reproduce as run
    from attn_flow.experiments import NAMES, title

    if list_them:
        titles = {each: title(each) for each in NAMES}
        say(titles) if as_json else table("experiments", ["name", "claim"], [list(row) for row in titles.items()])
        return
    if name is None:
        raise ValueError("which experiment? Name one, or 'all'; --list shows them.")
    if name != "all":
        title(name)  # an unknown one is refused before a folder is made
    writable(out)
    missed = 0
    everything = {}
    for each in NAMES if name == "all" else (name,):
        with writing_alone(out / f"{each}.json"):
            numbers = run(each, out, quick=quick, seed=seed, progress=not (quiet or as_json))
        missed += len(failed(numbers))
        everything[each] = numbers
        if not as_json:
            rows = [["yes" if c["holds"] else "NO", c["claim"], c["value"], _expected(c)] for c in numbers["claims"]]
            table(f"{each} ({numbers['run']['seconds']} s)", ["holds", "claim", "value", "expected"], rows)
            echo(f"written: {out / each}.json, {out / each}.png")
    if as_json:
        say(everything if name == "all" else everything[name])
    if missed:
        complain(f"{missed} claims do not hold")
    if missed and strict:  # nature's answer is no error of the program
        raise typer.Exit(1)


def _expected(claim: dict[str, Any]) -> str:
    """The number with its tolerance, and how often chance would pass it where that is more than one in twenty."""
    from attn_flow.experiments.claims import chance

    if claim["expected"] is None:
        return ""
    often = chance(claim) or 0.0
    return f"{claim['expected']:.4g} +- {claim['tolerance']:.2g}" + f" (chance {often:.0%})" * (often > 0.05)


@command
def bench(
    cases: Annotated[
        list[str] | None,
        typer.Argument(
            help="drift, cold, circle, kernel, choice, precision, memory, growth, sweep, plateau, transport, job, "
            "encoder, sharding, layer, compile, reads; all of them if none is named."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option(help="Small sizes.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="Threads of torch.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for bench.json, and growth.png of `growth`.")] = None,
    as_json: Json = False,
) -> None:
    """Speed and memory against the alternatives, run side by side: ratios below 1 are in our favour.

    Example: attn-flow bench drift memory
    """
    from attn_flow.base.files import versions, write_json
    from attn_flow.bench import ratios

    if out is not None:
        writable(out)
    found = ratios(cases, quick=quick, threads=threads, progress=not as_json)
    if out is not None:
        write_json({**found, "versions": versions()}, out / "bench.json")
        if grown := [row for row in found["rows"] if "sizes" in row]:
            from attn_flow.base.figures import save_figure
            from attn_flow.bench.growth_plot import growth_figure

            save_figure(growth_figure(grown, found["processor"]), out / "growth.png")
    if as_json:
        say(found)
        return
    rows = [[row["case"], row["against"], row["ratio"], _rest(row)] for row in found["rows"]]
    table(f"{found['processor']}, {found['threads']} threads", ["case", "against", "ratio", "measured"], rows)


def _rest(row: dict[str, Any]) -> str:
    """The numbers behind a ratio."""
    known = ("case", "against", "ratio")
    numbers = {name: value for name, value in row.items() if name not in known and isinstance(value, (int, float))}
    return ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())


for each in (encoders.probe, encoders.encoder, encoders.spectra, encoders.record, encoders.merge, train, predict):
    command(each)
app.add_typer(zoo.app, name="encoders")

if __name__ == "__main__":
    sys.exit(app())
