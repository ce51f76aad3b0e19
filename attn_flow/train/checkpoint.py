"""What a run leaves on disk so that it can be killed at any moment: one checkpoint, one log.

checkpoint.safetensors holds the weights, AdamW's moments and the recipe at the start of some update; it is replaced
in one step. log.jsonl has one line per update; lines the checkpoint does not know of are dropped on resuming, and
then come out again the same.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.base.files import read_tensors, versions, write_tensors
from attn_flow.nn.stack import DeepStack
from attn_flow.train.recipes import Recipe
from attn_flow.train.tasks import Task
from attn_flow.train.texts import HIDDEN, UNKNOWN, Vocabulary

FORMAT = "attn_flow.train"
CHECKPOINT, LOG = "checkpoint.safetensors", "log.jsonl"
HIDE = "_"  # a character to be filled in
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
PARTS = ("update", "recipe", "decided", "scaler", "reads", "versions")


@dataclass(frozen=True, eq=False)
class Saved:
    """A checkpoint as read: the state before update number `update`."""

    path: Path
    update: int
    recipe: dict[str, Any]
    decided: dict[str, Any]  # what the task decided of the stack
    digest: str
    scaler: dict[str, Any]
    reads: dict[str, Any] | None
    versions: dict[str, str]
    tensors: dict[str, Tensor]

    def weights(self) -> dict[str, Tensor]:
        return {name[6:]: tensor for name, tensor in self.tensors.items() if name.startswith("stack.")}

    def fill(self, stack: DeepStack) -> None:
        """Weights into a stack."""
        try:
            stack.load_state_dict(self.weights())
        except RuntimeError:
            raise ValueError(f"{self.path} holds the weights of another stack; move it away to start over.") from None

    def restore(self, stack: DeepStack, optimiser: torch.optim.Optimizer) -> None:
        """Weights and moments into a stack and its optimiser."""
        self.fill(stack)
        names = {parameter: name for name, parameter in stack.named_parameters()}
        for group in optimiser.param_groups:
            for parameter in group["params"]:
                held = {m: self.tensors.get(f"{m}.{names[parameter]}") for m in MOMENTS}
                if held["step"] is not None:  # no moments before the first update
                    optimiser.state[parameter] = {
                        m: z.cpu() if m == "step" else z.to(parameter.device)  # type: ignore[union-attr]
                        for m, z in held.items()
                    }


def save(
    path: Path, recipe: Recipe, task: Task, update: int, stack: DeepStack, optimiser: torch.optim.Optimizer, scaler: Any
) -> None:
    """The state before `update`, in one step: a kill leaves the old checkpoint or the new one."""
    tensors = {f"stack.{name}": tensor for name, tensor in stack.state_dict().items()}
    for name, parameter in stack.named_parameters():
        for moment, tensor in optimiser.state.get(parameter, {}).items():
            tensors[f"{moment}.{name}"] = tensor
    words = {
        "format": FORMAT,
        "update": str(update),
        "recipe": json.dumps(recipe.as_dict()),
        "decided": json.dumps(task.stack_options),
        "digest": task.digest,
        "reads": json.dumps(None if task.reads is None else asdict(task.reads)),
        "scaler": json.dumps(scaler.state_dict()),
        "versions": json.dumps(versions()),
    }
    write_tensors(tensors, path, words)


def read(path: str | Path) -> Saved:
    """A checkpoint file, or the folder of a run."""
    path = Path(path)
    path = path / CHECKPOINT if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"no checkpoint {path}; expected a run's folder or its {CHECKPOINT}.")
    tensors, words = read_tensors(path)
    if words.get("format") != FORMAT:
        raise ValueError(f"{path} is no checkpoint of attn-flow train; use another --out.")
    try:
        loaded = {name: json.loads(words[name]) for name in PARTS}
        return Saved(path, digest=words["digest"], tensors=tensors, **loaded)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} lacks a part of a checkpoint ({error}); move it away to start over.") from None


def check_same(saved: Saved, recipe: Recipe, task: Task) -> None:
    """A checkpoint continues only the run it came from."""
    now = recipe.as_dict()
    there = {**saved.recipe}
    there["file"] = now["file"]  # where the file lies does not matter, what it says does
    if saved.update == there["updates"] < now["updates"]:  # a finished run goes on
        if recipe.beta_mode == "annealed":
            raise ValueError(
                f"{saved.path} has annealed its beta; more updates would heat it again. Use another --out."
            )
        there["updates"] = now["updates"]
    changed = [
        f"{name} {there.get(name, 'unknown')} (there) and {now.get(name, 'unknown')} (now)"
        for name in sorted({*there, *now})
        if there.get(name) != now.get(name)
    ]
    if changed:
        raise ValueError(
            f"{saved.path} was trained with other options: {'; '.join(changed)}. Resume with the same options, or use "
            "another --out."
        )
    code = versions()
    other = [name for name in code if saved.versions.get(name) != code[name]]
    if other:
        told = "; ".join(
            f"{name} {saved.versions.get(name, 'unknown')} (there) and {code[name]} (now)" for name in other
        )
        raise ValueError(f"{saved.path} was written by other code: {told}. Use another --out, or move it away.")
    if saved.digest != task.digest:
        raise ValueError(f"the text of {recipe.file} has changed since {saved.path} was written; use another --out.")


@dataclass(frozen=True)
class Answer:
    """What a stack says of a text: a label and its probability; of hidden characters, the text filled in.

    Example:
        >>> Answer("yes", 0.9).label
        'yes'
    """

    label: str
    probability: float


class TrainedStack(DeepStack):
    """A DeepStack with what its run knew: the recipe, and the vocabulary and labels where it was trained on texts."""

    recipe: Recipe
    reads: Vocabulary | None = None

    @torch.no_grad()
    def predict(self, texts: Sequence[str]) -> list[Answer]:
        """An Answer for each text. A stack of task "masked" fills in the characters written as `_`.

        Texts without a word that the stack was trained on are told by a warning: their answers are guesses.
        """
        if isinstance(texts, str):
            raise ValueError("texts is one string, expected a list of strings; pass [text].")
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise ValueError(f"texts[{i}] is {text!r}, expected a string.")
        if self.reads is None:
            raise ValueError(f"this stack was trained on {self.recipe.task!r}, not on texts; call it with its inputs.")
        if not texts:
            return []
        was = self.training
        self.eval()
        x, mask = self.reads.encode(texts)
        strange = int((x <= UNKNOWN).all(-1).sum())
        if self.reads.labels and strange:
            message = f"{strange} of {len(texts)} texts hold no word that the stack was trained on; it guesses."
            warnings.warn(message, stacklevel=3)  # no_grad stands between
        if not self.reads.labels:
            hidden = torch.tensor(
                [[c == HIDE for c in text.ljust(self.reads.longest)[: self.reads.longest]] for text in texts]
            )
            x = x.masked_fill(hidden & mask, HIDDEN)
        device = self.head.weight.device
        best = self(x.to(device), mask.to(device)).softmax(-1).max(-1)
        self.train(was)
        if self.reads.labels:
            return [Answer(self.reads.labels[int(i)], float(p)) for i, p in zip(best.indices, best.values)]
        answers = []
        for text, row, chance, asked in zip(texts, best.indices, best.values, hidden):
            filled = [self.reads.words[int(row[j])] if j < len(asked) and asked[j] else c for j, c in enumerate(text)]
            answers.append(Answer("".join(filled), float(chance[asked].prod())))
        return answers


def load(path: str | Path) -> TrainedStack:
    """The trained stack of a run, in evaluation mode on the CPU: `load("runs/train/text").predict(["good day"])`.

    path: the run's folder, or its checkpoint. Returns a TrainedStack, a DeepStack with `recipe` and `predict`.
    """
    saved = read(path)
    try:
        stack = Recipe(**saved.recipe).make_stack(TrainedStack, **saved.decided)
    except TypeError as error:
        raise ValueError(f"{saved.path} is of another version ({error}).") from None
    saved.fill(stack)
    stack.recipe = Recipe(**saved.recipe)
    if saved.reads is not None:
        parts = saved.reads
        stack.reads = Vocabulary(tuple(parts["words"]), tuple(parts["labels"]), parts["longest"])
    stack.eval()
    return stack


def tidy(out: Path) -> None:
    """Remove what a kill in the middle of a write left beside the checkpoint."""
    for left in out.glob(f".{CHECKPOINT}.*"):
        left.unlink(missing_ok=True)


def kept_lines(log: Path, before: int) -> list[str]:
    """The log's whole lines of updates before `before`; a line a kill cut short is not whole."""
    if not log.is_file():
        return []
    kept = []
    for line in log.read_text(errors="replace").splitlines():
        try:
            if json.loads(line)["update"] < before:
                kept.append(line)
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return kept


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
