"""The training loop: AdamW, warm-up and cosine, clipping; killed at any moment it resumes to the same loss curve.

Nothing random has a state: batch k and kick k are functions of (seed, k). The checkpoint of update k is written
when the loss of update k is known to be finite and before its step, so that the last one is always good.

The curve is the same to the last bit on one machine with the same versions, instruction set, and numbers of threads
and processes. Where one of them differs sums round differently, and training makes that grow.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_flow.base.files import in_one_step, writing_alone
from attn_flow.base.progress import progress_bar
from attn_flow.dynamics.distributed import Processes, processes
from attn_flow.nn.stack import DeepStack
from attn_flow.train import checkpoint
from attn_flow.train.recipes import Recipe, generator_of, seed_of
from attn_flow.train.tasks import NO_QUESTION, Batch, Task

HELD_OUT = 1000  # inputs of an evaluation
Metric = Callable[[Tensor, Tensor], float]
DIVERGED = 10.0  # times log(classes), the loss of a guess


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained stack, its task, and the numbers of the run (plain JSON)."""

    stack: DeepStack
    task: Task
    summary: dict[str, Any]


def train_stack(
    recipe: Recipe,
    out: str | Path | None = None,
    *,
    task: Task | None = None,
    metrics: Mapping[str, Metric] | None = None,
    device: str | torch.device = "cpu",
    save_every: int = 100,
    evaluate_every: int = 100,
    tensorboard: bool = True,
    progress: bool = False,
) -> Trained:
    """Train a stack by the recipe; `out` is the folder of the checkpoint and the log, resumed if it holds them.

    task: data of your own, such as `text_task(texts, labels)` or `tensor_task(x, y, ...)`; the recipe's task is then
    "own" (Recipe("own", updates=200)). metrics: name: function(logits, y) -> number, taken on held-out inputs along
    with loss and accuracy. A finished run whose recipe has more updates now goes on, its learning rate from where the
    longer cosine is. Under torchrun every process takes its share of each batch. Raises FloatingPointError if the loss
    diverges.
    """
    for name, value in (("save_every", save_every), ("evaluate_every", evaluate_every)):
        if value < 1:
            raise ValueError(f"{name} = {value}, expected at least 1 update.")
    with ExitStack() as held:
        world = processes(device)
        held.enter_context(_deterministic(world.device))
        if recipe.batch % world.count:
            raise ValueError(f"batch = {recipe.batch}, expected a multiple of the {world.count} processes.")
        if (task is None) == (recipe.task == "own"):
            raise ValueError(f"task {recipe.task!r}: expected task=... with Recipe('own', ...), and only there.")
        task = recipe.make_task() if task is None else task
        measured = dict(metrics or {})
        stack = recipe.make_stack(DeepStack, **task.stack_options).to(world.device)
        optimiser = torch.optim.AdamW(stack.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
        precision = _precision(recipe, world.device)
        scaler = torch.amp.GradScaler(world.device.type, enabled=precision is torch.float16)
        folder = None if out is None else Path(out)
        if folder is not None and world.first:
            held.enter_context(writing_alone(folder / checkpoint.CHECKPOINT))
        start = 0 if folder is None else _resume(folder, recipe, task, stack, optimiser, scaler, world)
        world.wait()  # everyone has read before anyone writes
        log = held.enter_context(_log(folder if world.first else None, start, tensorboard))
        advance = held.enter_context(progress_bar(f"train {task.name}", recipe.updates, progress and world.first))
        advance(start)
        run = _Run(recipe, task, stack, optimiser, scaler, precision, world, folder)
        began, last = time.perf_counter(), {"loss": math.nan, "accuracy": math.nan}
        for update in range(start, recipe.updates):
            last = run.gradient(update)
            if update % save_every == 0 and (update > start or start == 0):
                run.save(update)
            if update % evaluate_every == 0:
                last |= evaluate(stack, task, recipe.seed, metrics=measured)
            log({"update": update, **last, **_betas(recipe, stack)})
            run.step()
            advance(1, note=f"loss {last['loss']:.4f}  accuracy {last['accuracy']:.3f}")
        recipe.set_beta_at(stack, recipe.updates)
        final = evaluate(stack, task, recipe.seed, metrics=measured)
        if not math.isfinite(final["held_out_loss"]):
            raise run.diverged(recipe.updates, f"held-out loss {final['held_out_loss']}")
        run.save(recipe.updates)
        log({"update": recipe.updates, **final, **_betas(recipe, stack)})
        stack.eval()
        summary = {
            "task": task.name,
            "updates": recipe.updates,
            "resumed_at": start,
            "loss": final["held_out_loss"],
            "accuracy": final["held_out_accuracy"],
            "chance": task.chance,
            "metrics": {name: final[name] for name in measured},
            "stated_accuracy": recipe.stated_accuracy,
            "beta": [layer.beta.tolist() for layer in stack.layers],  # type: ignore[operator, union-attr]
            "parameters": checkpoint.count(stack),
            "processes": world.count,
            "device": str(world.device),
            "seconds": round(time.perf_counter() - began, 1),
            "recipe": recipe.as_dict(),
        }
    return Trained(stack, task, summary)


class _Run:
    """The moving parts of one run."""

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        stack: DeepStack,
        optimiser: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        precision: torch.dtype | None,
        world: Processes,
        out: Path | None,
    ) -> None:
        self.recipe, self.task, self.stack, self.optimiser, self.scaler = recipe, task, stack, optimiser, scaler
        self.precision, self.world, self.out = precision, world, out
        self.model = world.shared(stack)
        self.saved: int | None = None

    def gradient(self, update: int) -> dict[str, float]:
        """Loss, accuracy and clipped gradient of one batch."""
        recipe, world = self.recipe, self.world
        recipe.set_beta_at(self.stack, update)
        self.stack.train()
        for group in self.optimiser.param_groups:
            group["lr"] = recipe.lr_at(update)
        whole = self.task.draw(recipe.batch, generator_of(recipe.seed, "training", update))
        asked = max(1, int((whole.y != NO_QUESTION).sum()))
        part = whole.part(world.rank, world.count).to(world.device)
        self.optimiser.zero_grad(set_to_none=True)
        try:
            with _kicks(recipe, update, world), _autocast(world.device, self.precision):
                loss, right = _sums(self.model, part)
            # Processes average their gradients: each brings its share of the mean over all that is asked.
            self.scaler.scale(loss * (world.count / asked)).backward()
        except FloatingPointError as error:
            raise self.diverged(update, str(error)) from None
        self.scaler.unscale_(self.optimiser)
        norm = float(nn.utils.clip_grad_norm_(self.stack.parameters(), recipe.clip))
        mean = world.total(torch.stack([loss.detach().double(), right.double()])) / asked
        numbers = {"loss": float(mean[0]), "accuracy": float(mean[1]), "gradient": norm, "lr": recipe.lr_at(update)}
        if not numbers["loss"] <= DIVERGED * math.log(max(2, self.task.outputs)):
            raise self.diverged(update, f"loss {numbers['loss']:.4g}")
        if not math.isfinite(norm) and not self.scaler.is_enabled():  # a scaler skips such a step and lowers its scale
            raise self.diverged(update, f"gradient norm {norm}")
        return numbers

    def step(self) -> None:
        self.scaler.step(self.optimiser)
        self.scaler.update()

    def save(self, update: int) -> None:
        if self.out is not None and self.world.first:
            path = self.out / checkpoint.CHECKPOINT
            checkpoint.save(path, self.recipe, self.task, update, self.stack, self.optimiser, self.scaler)
        self.saved = update

    def diverged(self, update: int, what: str) -> FloatingPointError:
        kept = ""
        if self.out is not None and (self.out / checkpoint.CHECKPOINT).is_file():
            kept = f" The last good checkpoint is kept: {self.out / checkpoint.CHECKPOINT}."
        return FloatingPointError(
            f"training diverged at update {update}: {what}. Use a lower --lr (now {self.recipe.lr:g}, try "
            f"{self.recipe.lr / 5:g}), a longer --warmup or a shorter --horizon, and another --out.{kept}"
        )


def _sums(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over what is asked, and how many answers are right."""
    logits = model(batch.x, batch.mask).float()
    loss = F.cross_entropy(logits.flatten(0, -2), batch.y.flatten(), reduction="sum", ignore_index=NO_QUESTION)
    return loss, (logits.argmax(-1) == batch.y).sum()


@torch.no_grad()
def evaluate(
    stack: DeepStack, task: Task, seed: int, size: int = HELD_OUT, metrics: Mapping[str, Metric] | None = None
) -> dict[str, float]:
    """Loss, accuracy and your metrics on held-out inputs, always the same for the same seed."""
    stack.eval()
    device = stack.head.weight.device
    batch = task.held_out(size, generator_of(seed, "held out"))
    loss, right = 0.0, 0.0
    for first in range(0, batch.y.shape[0], 250):
        sums = _sums(stack, batch.each(lambda z, i=first: z[i : i + 250].to(device)))  # type: ignore[misc]
        loss, right = loss + float(sums[0]), right + float(sums[1])
    asked = max(1, int((batch.y != NO_QUESTION).sum()))
    numbers = {"held_out_loss": loss / asked, "held_out_accuracy": right / asked}
    if metrics:
        logits = stack(batch.x.to(device), None if batch.mask is None else batch.mask.to(device)).cpu()
        numbers |= {name: float(metric(logits, batch.y)) for name, metric in metrics.items()}
    return numbers


def _betas(recipe: Recipe, stack: DeepStack) -> dict[str, float]:
    """Every layer's and head's beta, where it moves."""
    if recipe.beta_mode == "fixed":
        return {}
    return {
        f"beta.{l}.{h}": float(b)
        for l, layer in enumerate(stack.layers)
        for h, b in enumerate(layer.beta.tolist())  # type: ignore[operator, union-attr]
    }


def _resume(
    out: Path,
    recipe: Recipe,
    task: Task,
    stack: DeepStack,
    optimiser: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    world: Processes,
) -> int:
    """The update to begin with: that of the folder's checkpoint, or 0."""
    if not (out / checkpoint.CHECKPOINT).is_file():
        return 0
    saved = checkpoint.read(out)
    checkpoint.check_same(saved, recipe, task)
    saved.restore(stack, optimiser)
    scaler.load_state_dict(saved.scaler)
    return saved.update


@contextmanager
def _log(out: Path | None, start: int, tensorboard: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that writes one line per update, and the same to TensorBoard where it is installed."""
    if out is None:
        yield lambda line: None
        return
    out.mkdir(parents=True, exist_ok=True)
    checkpoint.tidy(out)
    path = out / checkpoint.LOG
    kept = checkpoint.kept_lines(path, start)
    in_one_step(path, lambda beside: Path(beside).write_text("".join(f"{line}\n" for line in kept)))
    board = _tensorboard(out, start) if tensorboard else None
    with path.open("a", buffering=1) as file:  # a whole line reaches the system at once

        def write(line: dict[str, Any]) -> None:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            if board is not None:
                for name, value in line.items():
                    if name != "update":
                        board.add_scalar(name, value, line["update"])

        try:
            yield write
        finally:
            if board is not None:
                board.close()


def _tensorboard(out: Path, start: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(out / "tensorboard"), purge_step=start)


def _precision(recipe: Recipe, device: torch.device) -> torch.dtype | None:
    """bfloat16 on CUDA where it exists, float16 where not; None: full precision."""
    if not recipe.amp or device.type != "cuda":
        return None
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


@contextmanager
def _autocast(device: torch.device, precision: torch.dtype | None) -> Iterator[None]:
    with torch.autocast(device.type, dtype=precision or torch.bfloat16, enabled=precision is not None):
        yield


@contextmanager
def _kicks(recipe: Recipe, update: int, world: Processes) -> Iterator[None]:
    """The noise of one update: a function of seed, update and process."""
    if not recipe.noise:
        yield
        return
    devices = [world.device] if world.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed_of(recipe.seed, "noise", update, world.rank))
        yield


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)
