"""attn-flow train: options of the command line as a recipe, the run, and what it says at the end."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer


def train(
    task: Annotated[str, typer.Argument(help="majority, recall, clusters, parity, text or masked.")],
    file: Annotated[
        Path | None, typer.Option(help="text: label<TAB>text lines, .csv or .jsonl; masked: any plain text.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of one input (the longest, for texts).")] = None,
    dim: Annotated[int | None, typer.Option(help="Dimension of the tokens.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of a head; dim / heads if not given.")] = None,
    depth: Annotated[int | None, typer.Option(help="Layers.")] = None,
    shared: Annotated[bool | None, typer.Option(help="One layer's weights for all layers.")] = None,
    horizon: Annotated[float | None, typer.Option(help="Time of each layer's flow.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of each layer; 1 with --step euler: discrete.")] = None,
    step: Annotated[str | None, typer.Option(help="euler, rk4 or dopri5.")] = None,
    geometry: Annotated[str | None, typer.Option(help="sphere, euclidean or layer-norm.")] = None,
    placement: Annotated[str | None, typer.Option(help="Norms: post, or pre and peri (euclidean).")] = None,
    ffn: Annotated[int | None, typer.Option(help="Hidden width of the FFN after each layer; 0: none.")] = None,
    noise: Annotated[float | None, typer.Option(help="Sigma of the kicks between steps while training.")] = None,
    beta: Annotated[float | None, typer.Option(help="Inverse temperature.")] = None,
    beta_mode: Annotated[
        str | None, typer.Option(help="fixed; learned (from beta); annealed (from beta-start to beta).")
    ] = None,
    beta_start: Annotated[float | None, typer.Option(help="Where annealing begins.")] = None,
    checkpointing: Annotated[
        bool | None, typer.Option(help="Recompute steps in the backward pass: less memory, more time.")
    ] = None,
    updates: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    batch: Annotated[int | None, typer.Option(help="Inputs per update, over all processes.")] = None,
    lr: Annotated[float | None, typer.Option(help="Largest learning rate of the cosine.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="AdamW's.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Updates until the largest learning rate.")] = None,
    clip: Annotated[float | None, typer.Option(help="Largest norm of the gradient.")] = None,
    amp: Annotated[bool, typer.Option(help="Mixed precision, on CUDA only.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of every random number.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="Folder of checkpoint, log and probe; runs/train/TASK if not given.")
    ] = None,
    save_every: Annotated[int, typer.Option(help="Updates between checkpoints.")] = 100,
    evaluate_every: Annotated[int, typer.Option(help="Updates between evaluations on held-out inputs.")] = 100,
    tensorboard: Annotated[bool, typer.Option(help="Log to OUT/tensorboard too, if it is installed.")] = True,
    probe: Annotated[bool, typer.Option(help="Measure what was learned: limits, clusters, phases.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")] = False,
) -> None:
    """Train a small stack of continuous attention and look at what it learned. Options not given are the task's own.

    A folder that holds a checkpoint of the same options is resumed. Several processes: torchrun --nproc-per-node 2
    -m attn_flow.cli train ...

    Example: attn-flow train majority --beta 2 --beta-mode learned --out runs/majority
    """
    given = dict(locals())
    from attn_flow.train.recipes import Recipe, recipe

    chosen = recipe(**{name: _plain(value) for name, value in given.items() if name in Recipe.__dataclass_fields__})
    run(
        chosen,
        out or Path("runs/train") / task,
        device=device,
        save_every=save_every,
        evaluate_every=evaluate_every,
        tensorboard=tensorboard,
        probe=probe,
        as_json=as_json,
        quiet=quiet,
    )


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def run(
    recipe: Any, out: Path, *, device: str, probe: bool, as_json: bool, quiet: bool, **options: Any
) -> dict[str, Any] | None:
    """Train, probe, write OUT/run.json and say what came out; only the first process of several speaks."""
    from attn_flow.base.files import versions, write_json
    from attn_flow.cli.console import say, table
    from attn_flow.train.loop import train as train_stack
    from attn_flow.train.observation import probe as probe_stack

    with warnings.catch_warnings():
        warnings.filterwarnings("default", message=".*texts are longer than.*")
        trained = train_stack(recipe, out, device=device, progress=not (quiet or as_json), **options)
    if int(os.environ.get("RANK", "0")) > 0:
        return None
    numbers = dict(trained.summary)
    if probe:
        found = probe_stack(trained.stack, trained.task, recipe.seed)
        found.path.save(out / "trajectory.safetensors")
        numbers["probe"] = found.numbers
    write_json({**numbers, "versions": versions()}, out / "run.json")
    if as_json:
        say(numbers)
        return numbers
    stated = numbers["stated_accuracy"]
    rows = [
        ["accuracy on held-out inputs", numbers["accuracy"]],
        ["stated for the task's own options", "- (other options)" if stated is None else stated],
        ["accuracy of a guess", numbers["chance"]],
        ["loss", numbers["loss"]],
        ["seconds", numbers["seconds"]],
    ]
    table(f"train {recipe.task}: {numbers['updates']} updates, seed {recipe.seed}", ["what", "value"], rows)
    if probe:
        columns = ["layer", "beta", "limit", "W2 to limit", "at start", "clusters", "at start"]
        table("what the layers learned", columns, [_row(layer) for layer in numbers["probe"]["layers"]])
    typer.echo(f"written to {out}: checkpoint.safetensors, log.jsonl, run.json" + ", trajectory.safetensors" * probe)
    return numbers


def _row(layer: dict[str, Any]) -> list[Any]:
    w2 = layer["w2"]
    return [
        layer["layer"],
        ", ".join(f"{b:.3g}" for b in layer["beta"]),
        layer["limit"]["case"],
        "-" if w2 is None else f"{w2['end']:.3f}",
        "-" if w2 is None else f"{w2['start']:.3f}",
        f"{layer['clusters']['end']:.2f}",
        f"{layer['clusters']['start']:.2f}",
    ]
