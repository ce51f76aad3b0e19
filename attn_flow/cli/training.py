"""The command `train`: train a small stack and measure what it learned."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from attn_flow.cli import console


def train(
    task: Annotated[str, typer.Argument(help="majority (the commonest class), recall (a value) or side (of a plane).")],
    tokens: Annotated[int | None, typer.Option(help="Tokens of one input.", show_default="16, 9, 200")] = None,
    dim: Annotated[int | None, typer.Option(help="Dimension of the tokens.", show_default="16, 32, 3")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.", show_default="1")] = None,
    depth: Annotated[int | None, typer.Option(help="Layers.", show_default="1")] = None,
    horizon: Annotated[float | None, typer.Option(help="Time of each layer's flow.", show_default="1, 2, 5")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of each layer.", show_default="2, 2, 20")] = None,
    beta: Annotated[float | None, typer.Option(help="Inverse temperature.", show_default="4, 8, 20")] = None,
    learn_beta: Annotated[bool, typer.Option("--learn-beta", help="Train one beta per head.")] = False,
    updates: Annotated[int | None, typer.Option(help="Optimiser steps.", show_default="300")] = None,
    batch: Annotated[int | None, typer.Option(help="Inputs per update.", show_default="64, 64, 16")] = None,
    lr: Annotated[float | None, typer.Option(help="Largest learning rate.", show_default="0.01, 0.01, 0.02")] = None,
    seed: Annotated[int | None, typer.Option(help="Of every random number.", show_default="0")] = None,
    device: console.Device = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder of the run.", show_default="runs/train/TASK")] = None,
    as_json: console.Json = False,
    quiet: console.Quiet = False,
) -> None:
    """Train a small stack and measure what it learned.

    It takes a minute or two; the same command continues a run that was stopped. Where there are three defaults, they
    are those of majority, recall and side.

    Example: attn-flow train side --out runs/side
    """
    options = dict(locals())
    from dataclasses import fields, replace

    from attn_flow.base.files import versions, write_json
    from attn_flow.train.loop import train_stack
    from attn_flow.train.observation import what_was_learned
    from attn_flow.train.recipes import recipe

    default = recipe(task)
    names = [field.name for field in fields(default) if options.get(field.name) is not None]
    chosen = replace(default, **{name: options[name] for name in names})
    out = out or Path("runs/train") / task
    console.require_writable(out)
    trained = train_stack(chosen, out, device=console.require_device(device), progress=not (quiet or as_json))
    if int(os.environ.get("RANK", "0")) > 0:  # one process of several writes and prints
        return
    learned = what_was_learned(trained.stack, trained.task, chosen.seed)
    learned.path.save(out / "trajectory.safetensors")
    numbers = {**trained.summary, "learned": {"layers": learned.layers, "sentences": learned.sentences()}}
    write_json({**numbers, "versions": versions()}, out / "run.json")
    if as_json:
        console.print_json(numbers)
        return
    rows = [
        ["accuracy on held-out inputs", numbers["accuracy"]],
        ["accuracy of a guess", numbers["chance"]],
        ["loss", numbers["loss"]],
    ]
    title = f"{task}: {chosen.updates} updates in {numbers['seconds']} seconds, seed {chosen.seed}."
    console.print_table(title, ["quantity", "value"], rows)
    for sentence in learned.sentences():
        console.paragraph(sentence)
    console.echo(f"Written to {out}.")
