"""attn-flow train: the fields of a Recipe as options, the run, and what it says at the end."""

from __future__ import annotations

import inspect
import os
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from attn_flow.cli.console import Device, Json, Quiet, check_device, echo, say, table, writable
from attn_flow.train.fields import Fields

if TYPE_CHECKING:
    from attn_flow.train.recipes import Recipe

TASK, *CHANGEABLE = fields(Fields)


def train(
    task: Annotated[str, typer.Argument(help=TASK.metadata["help"])],
    *,
    device: Device = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="Folder of checkpoint, log and numbers; runs/train/TASK if not given.")
    ] = None,
    save_every: Annotated[int, typer.Option(help="Updates between checkpoints.")] = 100,
    evaluate_every: Annotated[int, typer.Option(help="Updates between evaluations on held-out inputs.")] = 100,
    tensorboard: Annotated[bool, typer.Option(help="Log to OUT/tensorboard too, if it is installed.")] = True,
    learned: Annotated[bool, typer.Option(help="Measure what was learned: limits, clusters, phases.")] = True,
    as_json: Json = False,
    quiet: Quiet = False,
    **changes: Any,
) -> None:
    """Train a small stack of continuous attention and look at what it learned. Options not given are the task's own.

    A folder that holds a checkpoint of the same options is resumed, a finished one goes on with more --updates. Several
    processes: torchrun --nproc-per-node 2 -m attn_flow train ...

    Example: attn-flow train majority --beta 2 --beta-mode learned --out runs/majority
    """
    from attn_flow.train.recipes import recipe

    chosen = replace(recipe(task), **{name: value for name, value in changes.items() if value is not None})
    run(
        chosen,
        writable(out or Path("runs/train") / task),
        device=check_device(device),
        save_every=save_every,
        evaluate_every=evaluate_every,
        tensorboard=tensorboard,
        learned=learned,
        as_json=as_json,
        quiet=quiet,
    )


def _signature() -> inspect.Signature:
    """train's own signature with an option for every field of a Recipe in the place of **changes."""
    own = list(inspect.signature(train, eval_str=True).parameters.values())
    types = get_type_hints(Fields)
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


def run(
    recipe: Recipe,
    out: Path,
    *,
    device: str = "cpu",
    save_every: int = 100,
    evaluate_every: int = 100,
    tensorboard: bool = True,
    learned: bool = True,
    as_json: bool = False,
    quiet: bool = False,
) -> dict[str, Any] | None:
    """Train, measure, write OUT/run.json and say what came out; only the first process of several speaks."""
    from attn_flow.base.figures import save_figure
    from attn_flow.base.files import versions, write_json
    from attn_flow.train.checkpoint import LOG
    from attn_flow.train.figures import read_log, run_figure
    from attn_flow.train.loop import train_stack
    from attn_flow.train.observation import what_was_learned

    with warnings.catch_warnings():
        warnings.filterwarnings("default", message=".*texts are longer than.*")
        trained = train_stack(
            recipe,
            out,
            device=device,
            save_every=save_every,
            evaluate_every=evaluate_every,
            tensorboard=tensorboard,
            progress=not (quiet or as_json),
        )
    if int(os.environ.get("RANK", "0")) > 0:
        return None
    numbers = dict(trained.summary)
    if learned:
        found = what_was_learned(trained.stack, trained.task, recipe.seed)
        found.path.save(out / "trajectory.safetensors")
        numbers["learned"] = {**found.numbers, "words": found.words()}
        figure = run_figure(read_log(out / LOG), found.path, numbers)
        save_figure(figure, out / "training.png")
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
    if learned:
        columns = ["layer", "beta", "limit", "W2 to limit", "at start", "clusters", "at start"]
        table("what the layers learned", columns, [_row(layer) for layer in numbers["learned"]["layers"]])
        for words in numbers["learned"]["words"]:
            echo(words)
    echo(
        f"written to {out}: checkpoint.safetensors, log.jsonl, run.json"
        + ", trajectory.safetensors, training.png" * learned
    )
    return numbers


def predict(
    run: Annotated[Path, typer.Argument(help="The folder of a run of `attn-flow train text` or `train masked`.")],
    texts: Annotated[list[str] | None, typer.Argument(help="Texts; hidden characters are written _.")] = None,
    file: Annotated[Path | None, typer.Option(help="A file of texts instead: .txt, .jsonl, .csv, ...")] = None,
    as_json: Json = False,
) -> None:
    """What a trained stack says of your texts: the label of each, or its hidden characters filled in.

    Example: attn-flow predict runs/train/text "what a good day"
    """
    from attn_flow.hooks.loading import load_texts
    from attn_flow.train.checkpoint import load

    given = [*(texts or []), *([] if file is None else load_texts(file))]
    if not given:
        raise ValueError("no text to predict; give some after the folder, or --file.")
    answers = load(run).predict(given)
    if as_json:
        say([{"text": text, "label": a.label, "probability": a.probability} for text, a in zip(given, answers)])
        return
    rows = [[text, a.label, a.probability] for text, a in zip(given, answers)]
    table(f"{run}", ["text", "answer", "probability"], rows)


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
