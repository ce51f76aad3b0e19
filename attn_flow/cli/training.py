"""The command `train`: train a small stack and measure what it learned."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from attn_flow.cli.console import (
    Device,
    Json,
    Quiet,
    echo,
    paragraph,
    print_json,
    print_table,
    require_device,
    require_writable,
)


def train(
    task: Annotated[
        str,
        typer.Argument(
            help="majority (the most frequent class), recall (a key's value) or side (of a plane, of most tokens)."
        ),
    ],
    tokens: Annotated[int | None, typer.Option(help="Tokens of one input.")] = None,
    dim: Annotated[int | None, typer.Option(help="Dimension of the tokens.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    depth: Annotated[int | None, typer.Option(help="Layers.")] = None,
    horizon: Annotated[float | None, typer.Option(help="Time of each layer's flow.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of each layer.")] = None,
    beta: Annotated[float | None, typer.Option(help="Inverse temperature.")] = None,
    learn_beta: Annotated[bool | None, typer.Option("--learn-beta", help="Train one beta per head.")] = None,
    updates: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    batch: Annotated[int | None, typer.Option(help="Inputs per update, over all processes.")] = None,
    lr: Annotated[float | None, typer.Option(help="Largest learning rate.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every random number.")] = None,
    device: Device = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/train/TASK if not given.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a small stack and measure what it learned.

    Options not given are the task's own; it takes a minute or two. The same command continues a run that was stopped.

    Example: attn-flow train side --out runs/side
    """
    options = dict(locals())
    from dataclasses import fields, replace

    from attn_flow.base.files import versions, write_json
    from attn_flow.train import recipe, train_stack, what_was_learned

    default = recipe(task)
    names = [field.name for field in fields(default) if options.get(field.name) is not None]
    chosen = replace(default, **{name: options[name] for name in names})
    out = require_writable(out or Path("runs/train") / task)
    trained = train_stack(chosen, out, device=require_device(device), progress=not (quiet or as_json))
    if int(os.environ.get("RANK", "0")) > 0:  # one process of several writes and prints
        return
    learned = what_was_learned(trained.stack, trained.task, chosen.seed)
    learned.path.save(out / "trajectory.safetensors")
    numbers = {**trained.summary, "learned": {"layers": learned.layers, "sentences": learned.sentences()}}
    write_json({**numbers, "versions": versions()}, out / "run.json")
    if as_json:
        print_json(numbers)
        return
    stated = numbers["stated_accuracy"]
    rows = [
        ["accuracy on held-out inputs", numbers["accuracy"]],
        ["stated for the task's own options", "none (other options)" if stated is None else stated],
        ["accuracy of a guess", numbers["chance"]],
        ["loss", numbers["loss"]],
    ]
    title = f"{task}: {chosen.updates} updates in {numbers['seconds']} seconds, seed {chosen.seed}."
    print_table(title, ["quantity", "value"], rows)
    columns = ["layer", "beta", "limit", "W2 before", "after", "clusters before", "after"]
    print_table("What the layers learned, with W2 to their limits:", columns, list(map(_layer_row, learned.layers)))
    for sentence in learned.sentences():
        paragraph(sentence)
    echo(f"Written to {out}.")


def _layer_row(layer: dict[str, Any]) -> list[Any]:
    beta = ", ".join(f"{b:.3g}" for b in layer["beta"])
    w2 = layer["w2"] or {"start": "none", "end": "none"}
    clusters = layer["clusters"]
    return [layer["layer"], beta, layer["limit"]["case"], w2["start"], w2["end"], clusters["start"], clusters["end"]]
