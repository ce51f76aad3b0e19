"""The files of a run, which can be killed at any moment: a checkpoint and a log.

checkpoint.safetensors has the weights, the state of the optimiser and the recipe before some update, and is replaced
atomically. log.jsonl has one line per update. A resumed run drops the lines after its checkpoint and writes them again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class RunFiles:
    """The files of one run in a folder."""

    folder: Path
    recipe: Recipe
    task: Task

    def save(self, update: int, stack: DeepStack, optimiser: Optimizer) -> None:
        """Write the state before `update` atomically: a kill leaves the old checkpoint or the new one."""
        tensors = {f"stack.{name}": z for name, z in stack.state_dict().items()}
        for index, state in optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{index}.{name}": z for name, z in state.items()}
        task = self.task
        about = {"update": update, "recipe": asdict(self.recipe), "stack": task.stack_options, "digest": task.digest}
        write_tensors(tensors, self.folder / CHECKPOINT, {"format": FORMAT, "about": json.dumps(about)})

    def resume(self, stack: DeepStack, optimiser: Optimizer) -> int:
        """Load the checkpoint, if there is one, and return the number of the next update.

        ValueError if it belongs to another run. A finished run may get more updates.
        """
        path = self.folder / CHECKPOINT
        if not path.is_file():
            return 0
        tensors, about = _read(path)
        then, now = {**about["recipe"]}, asdict(self.recipe)
        if about["update"] == then["updates"] < now["updates"]:
            then["updates"] = now["updates"]
        names = [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
        if names:
            changes = "; ".join(f"{name} {then.get(name)} (there) and {now.get(name)} (now)" for name in names)
            raise ValueError(f"{path} was trained with other options: {changes}. Use them, or another folder.")
        if about["digest"] != self.task.digest:
            raise ValueError(f"the data have changed since {path} was written; use another folder.")
        _load_weights(stack, tensors, path)
        states: dict[int, dict[str, Tensor]] = {}
        for name, z in tensors.items():
            if name.startswith("optimiser."):
                _, index, key = name.split(".")
                states.setdefault(int(index), {})[key] = z
        optimiser.load_state_dict(optimiser.state_dict() | {"state": states})
        return int(about["update"])

    def start_log(self, start: int) -> None:
        """Keep the lines of the log before update `start`, and remove what a kill during a write has left."""
        for temporary in self.folder.glob(f".{CHECKPOINT}.*"):
            temporary.unlink(missing_ok=True)
        path = self.folder / LOG
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        write_bytes("".join(f"{line}\n" for line in lines[:start]).encode(), path)

    def log(self, line: dict[str, Any]) -> None:
        """Add a line to the log."""
        with (self.folder / LOG).open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


def load(path: str | Path) -> DeepStack:
    """The trained stack of a run, in evaluation mode on the CPU; `path` is the run's folder or its checkpoint."""
    path = Path(path)
    tensors, about = _read(path / CHECKPOINT if path.is_dir() else path)
    stack = make_stack(Recipe(**about["recipe"]), about["stack"])
    _load_weights(stack, tensors, path)
    return stack.eval()


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the description of a checkpoint."""
    if not path.is_file():
        raise ValueError(f"no checkpoint {path}; expected a run's folder or its {CHECKPOINT}.")
    tensors, words = read_tensors(path)
    if words.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of attn-flow train; use another folder.")
    return tensors, json.loads(words["about"])


def _load_weights(stack: DeepStack, tensors: dict[str, Tensor], path: Path) -> None:
    weights = {name.removeprefix("stack."): z for name, z in tensors.items() if name.startswith("stack.")}
    try:
        stack.load_state_dict(weights)
    except RuntimeError:
        raise ValueError(f"{path} has the weights of another stack; move it away to start over.") from None
