"""The command `train`: train a small stack, whose recipe's fields are options."""

from __future__ import annotations

import inspect
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

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
from attn_flow.train.recipes import Recipe, recipe

TASK, *CHANGEABLE = fields(Recipe)


def train(
    task: Annotated[str, typer.Argument(help=TASK.metadata["help"])],
    *,
    device: Device = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="Folder of checkpoint, log and numbers; runs/train/TASK if not given.")
    ] = None,
    save_every: Annotated[int, typer.Option(help="Updates between checkpoints.")] = 100,
    evaluate_every: Annotated[int, typer.Option(help="Updates between evaluations on held-out inputs.")] = 100,
    learned: Annotated[bool, typer.Option(help="Measure what was learned: limits, W2, clusters.")] = True,
    as_json: Json = False,
    quiet: Quiet = False,
    **changes: Any,
) -> None:
    """Train a small stack and measure what it learned.

    Options not given are the task's own. A folder that holds a checkpoint of the same options is resumed, a finished
    one goes on with more --updates; Ctrl-C writes a checkpoint.
    Several processes: torchrun --nproc-per-node 2 -m attn_flow train ...

    Example: attn-flow train side --out runs/side
    """
    changes = {name: value for name, value in changes.items() if value is not None}
    chosen = replace(recipe(task), **changes)
    out = require_writable(out or Path("runs/train") / task)
    device = require_device(device)
    numbers = _run(chosen, out, device, save_every, evaluate_every, learned, progress=not (quiet or as_json))
    if numbers is None:
        return
    if as_json:
        print_json(numbers)
    else:
        _print(numbers, out)


def _signature() -> inspect.Signature:
    """train's own signature with an option for every field of a Recipe in the place of **changes."""
    own = list(inspect.signature(train, eval_str=True).parameters.values())
    types = get_type_hints(Recipe)
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[types[field.name] | None, typer.Option(help=field.metadata["help"])],
        )
        for field in CHANGEABLE
    ]
    return inspect.Signature([own[0], *options, *own[1:-1]])


train.__signature__ = _signature()  # type: ignore[attr-defined]


def _run(
    chosen: Recipe, out: Path, device: str, save_every: int, evaluate_every: int, learned: bool, progress: bool
) -> dict[str, Any] | None:
    """Train, measure and write OUT/run.json; the numbers, or None for all but the first process of several."""
    from attn_flow.base.files import versions, write_json
    from attn_flow.train.loop import train_stack
    from attn_flow.train.observation import what_was_learned

    trained = train_stack(
        chosen, out, device=device, save_every=save_every, evaluate_every=evaluate_every, progress=progress
    )
    if int(os.environ.get("RANK", "0")) > 0:
        return None
    numbers = dict(trained.summary)
    if learned:
        result = what_was_learned(trained.stack, trained.task, chosen.seed)
        result.path.save(out / "trajectory.safetensors")
        numbers["learned"] = {"layers": result.layers, "sentences": result.sentences()}
    write_json({**numbers, "versions": versions()}, out / "run.json")
    return numbers


def _print(numbers: dict[str, Any], out: Path) -> None:
    stated = numbers["stated_accuracy"]
    rows = [
        ["accuracy on held-out inputs", numbers["accuracy"]],
        ["stated for the task's own options", "none (other options)" if stated is None else stated],
        ["accuracy of a guess", numbers["chance"]],
        ["loss", numbers["loss"]],
    ]
    title = f"{numbers['task']}: {numbers['updates']} updates in {numbers['seconds']} seconds, seed"
    print_table(f"{title} {numbers['recipe']['seed']}.", ["quantity", "value"], rows)
    if "learned" in numbers:
        columns = ["layer", "beta", "limit", "W2 before", "after", "clusters before", "after"]
        print_table(
            "What the layers learned, with W2 to their limits:",
            columns,
            [_layer_row(each) for each in numbers["learned"]["layers"]],
        )
        for sentence in numbers["learned"]["sentences"]:
            paragraph(sentence)
    echo(f"Written to {out}.")


def _layer_row(layer: dict[str, Any]) -> list[Any]:
    beta = ", ".join(f"{b:.3g}" for b in layer["beta"])
    w2 = layer["w2"] or {"start": "none", "end": "none"}
    clusters = layer["clusters"]
    return [layer["layer"], beta, layer["limit"]["case"], w2["start"], w2["end"], clusters["start"], clusters["end"]]
