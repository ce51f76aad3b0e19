"""The files of a run, which can be killed at any moment: a checkpoint and a log.

checkpoint.safetensors has the weights, the state of the optimiser and the recipe before some update, and is replaced
atomically. log.jsonl has one line per update. A resumed run drops the lines after its checkpoint and writes them again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from attn_flow.base.files import read_tensors, write_bytes, write_tensors
from attn_flow.nn.stack import DeepStack
from attn_flow.train.recipes import Recipe
from attn_flow.train.stacks import make_stack
from attn_flow.train.tasks import Task

FORMAT = "attn_flow.train"
CHECKPOINT, LOG = "checkpoint.safetensors", "log.jsonl"


def write_checkpoint(
    folder: Path, recipe: Recipe, task: Task, update: int, stack: DeepStack, optimiser: Optimizer
) -> None:
    """Write the state before `update` atomically: a kill leaves the old checkpoint or the new one."""
    tensors = {f"stack.{name}": z for name, z in stack.state_dict().items()}
    for index, state in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{index}.{name}": z for name, z in state.items()}
    about = {"update": update, "recipe": asdict(recipe), "stack": task.stack_options, "digest": task.digest}
    write_tensors(tensors, folder / CHECKPOINT, {"format": FORMAT, "about": json.dumps(about)})


def read_checkpoint(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and description of a checkpoint file, or of the one in the folder of a run."""
    path = Path(path)
    path = path / CHECKPOINT if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"no checkpoint {path}; expected a run's folder or its {CHECKPOINT}.")
    tensors, words = read_tensors(path)
    if words.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of attn-flow train; use another --out.")
    return tensors, json.loads(words["about"])


def resume(folder: Path, recipe: Recipe, task: Task, stack: DeepStack, optimiser: Optimizer) -> int:
    """Load the checkpoint of the folder, if there is one, and return the number of the next update.

    ValueError if it belongs to another run. A finished run may get more updates.
    """
    path = folder / CHECKPOINT
    if not path.is_file():
        return 0
    tensors, about = read_checkpoint(path)
    then, now = {**about["recipe"]}, asdict(recipe)
    if about["update"] == then["updates"] < now["updates"]:
        then["updates"] = now["updates"]
    names = [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
    if names:
        changes = "; ".join(f"{name} {then.get(name)} (there) and {now.get(name)} (now)" for name in names)
        raise ValueError(f"{path} was trained with other options: {changes}. Use them, or another --out.")
    if about["digest"] != task.digest:
        raise ValueError(f"the data of {task.name!r} have changed since {path} was written; use another --out.")
    _load_weights(stack, tensors, path)
    states: dict[int, dict[str, Tensor]] = {}
    for name, z in tensors.items():
        if name.startswith("optimiser."):
            _, index, key = name.split(".")
            states.setdefault(int(index), {})[key] = z
    optimiser.load_state_dict(optimiser.state_dict() | {"state": states})
    return int(about["update"])


def _load_weights(stack: DeepStack, tensors: dict[str, Tensor], path: str | Path) -> None:
    weights = {name.removeprefix("stack."): z for name, z in tensors.items() if name.startswith("stack.")}
    try:
        stack.load_state_dict(weights)
    except RuntimeError:
        raise ValueError(f"{path} has the weights of another stack; move it away to start over.") from None


@contextmanager
def open_log(folder: Path | None, start: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that writes one line per update, from update `start` on; without a folder it does nothing."""
    if folder is None:
        yield lambda line: None
        return
    folder.mkdir(parents=True, exist_ok=True)
    for temporary in folder.glob(f".{CHECKPOINT}.*"):  # left by a kill during a write
        temporary.unlink(missing_ok=True)
    path = folder / LOG
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    write_bytes("".join(f"{line}\n" for line in lines[:start]).encode(), path)
    with path.open("a", buffering=1) as log:  # line by line
        yield lambda line: print(json.dumps(line, allow_nan=False), file=log)


def load(path: str | Path) -> DeepStack:
    """The trained stack of a run, in evaluation mode on the CPU.

    Args:
        path: the folder of the run, or its checkpoint.

    Returns:
        A `DeepStack`.
    """
    tensors, about = read_checkpoint(path)
    stack = make_stack(Recipe(**about["recipe"]), about["stack"])
    _load_weights(stack, tensors, path)
    return stack.eval()
