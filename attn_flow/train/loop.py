"""The training loop: AdamW, warm-up and cosine, clipping. A run that is killed resumes to the same loss curve.

Nothing random has a state: batch k is a function of (seed, k). The checkpoint before update k is written when the loss
of update k is known to be finite, so that the last one is always good.

The curve is the same to the last bit on one CPU with the same versions, instruction set, and numbers of threads and
processes. Where one of them differs sums round differently, and training makes that grow.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_flow.base import checks
from attn_flow.base.files import lock_for_writing
from attn_flow.base.processes import Processes, processes
from attn_flow.base.progress import progress_bar
from attn_flow.nn.module import parameter_groups
from attn_flow.nn.stack import DeepStack
from attn_flow.train.checkpoint import CHECKPOINT, RunFiles
from attn_flow.train.recipes import Recipe
from attn_flow.train.stacks import make_stack
from attn_flow.train.tasks import IGNORE, Batch, Task, generator_of

HELD_OUT = 1000  # inputs of an evaluation
DIVERGED = 10.0  # a loss above this many times log(classes), the loss of a guess


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained stack, its task, and the numbers of the run as plain JSON."""

    stack: DeepStack
    task: Task
    summary: dict[str, Any]


def train_stack(
    recipe: Recipe,
    out: str | Path | None = None,
    *,
    task: Task | None = None,
    device: str | torch.device = "cpu",
    save_every: int = 20,
    evaluate_every: int = 100,
    progress: bool = False,
) -> Trained:
    """Train a stack by a recipe.

    Args:
        recipe: see `Recipe`.
        out: the folder of the checkpoint and the log. A run that is there already is resumed; a finished one goes on if
            the recipe has more updates now. A run that is interrupted writes a checkpoint first.
        task: data of your own, such as `tensor_task(x, y, ...)`, with Recipe("own", ...).
        device: "cpu" or "cuda". Under torchrun every process takes its share of each batch.
        save_every, evaluate_every: updates between checkpoints and between evaluations.
        progress: show a progress bar.

    Returns:
        `Trained`. FloatingPointError if the loss diverges.
    """
    checks.require_count(save_every=save_every, evaluate_every=evaluate_every)
    if (task is None) == (recipe.task == "own"):
        raise ValueError(f"task {recipe.task!r}: expected task=... with Recipe('own', ...), and only there.")
    world = processes(device)
    if recipe.batch % world.count:
        raise ValueError(f"batch = {recipe.batch}, expected a multiple of the {world.count} processes.")
    task, start_time = recipe.make_task() if task is None else task, time.perf_counter()
    stack = make_stack(recipe, task.stack_options).to(world.device)
    groups = [group for group in parameter_groups(stack, recipe.weight_decay) if group["params"]]
    optimiser = torch.optim.AdamW(groups, lr=recipe.lr)
    files = None if out is None else RunFiles(Path(out), recipe, task)
    written = files if world.is_first else None  # one process writes
    with ExitStack() as contexts:
        if written is not None:
            contexts.enter_context(lock_for_writing(written.folder / CHECKPOINT))
        start = 0 if files is None else files.resume(stack, optimiser)
        world.wait()  # all have read before one writes
        if written is not None:
            written.start_log(start)
        bar = progress_bar(f"train {task.name}", recipe.updates, progress and world.is_first)
        advance = contexts.enter_context(bar)
        advance(start)
        complete: int | None = start  # updates that are done; None while the weights change
        try:
            for update in range(start, recipe.updates + 1):
                is_last = update == recipe.updates
                numbers = {} if is_last else _compute_gradient(recipe, task, world, stack, optimiser, update)
                if is_last or update % evaluate_every == 0:
                    numbers |= evaluate(stack, task, recipe.seed)
                _require_convergence(numbers, recipe, task, update)
                if written is not None:
                    if is_last or update % save_every == 0:
                        written.save(update, stack, optimiser)
                    betas = {"beta": [layer.beta.tolist() for layer in stack.layers]} if recipe.learn_beta else {}
                    written.log({"update": update, **numbers, **betas})
                if is_last:
                    break
                complete = None
                optimiser.step()
                complete = update + 1
                advance(1, note=f"loss {numbers['loss']:.4f}  accuracy {numbers['accuracy']:.3f}")
        except KeyboardInterrupt:
            if written is not None and complete is not None:
                written.save(complete, stack, optimiser)
            raise
    summary = {
        "task": task.name,
        "updates": recipe.updates,
        "resumed_at": start,
        "loss": numbers["held_out_loss"],
        "accuracy": numbers["held_out_accuracy"],
        "chance": task.chance,
        "beta": [layer.beta.tolist() for layer in stack.layers],
        "seconds": round(time.perf_counter() - start_time, 1),
        "recipe": asdict(recipe),
    }
    return Trained(stack.eval(), task, summary)


def _compute_gradient(
    recipe: Recipe, task: Task, world: Processes, stack: DeepStack, optimiser: torch.optim.Optimizer, update: int
) -> dict[str, float]:
    """Compute the clipped gradient of batch number `update`; returns its loss and accuracy."""
    stack.train()
    for group in optimiser.param_groups:
        group["lr"] = recipe.lr_at(update)
    batch = task.draw(recipe.batch, generator_of(recipe.seed, "training", update))
    count, size = max(1, int((batch.y != IGNORE).sum())), recipe.batch // world.count
    share = batch.map(lambda z: z[world.rank * size : (world.rank + 1) * size]).to(world.device)
    optimiser.zero_grad(set_to_none=True)
    loss, correct = _sums(stack, share)
    (loss / count).backward()  # this process's share of the mean over all answers
    world.sum_gradients(stack)
    norm = float(nn.utils.clip_grad_norm_(stack.parameters(), recipe.clip))
    mean = (world.sum(torch.stack([loss.detach().double(), correct.double()])) / count).tolist()
    return {"loss": mean[0], "accuracy": mean[1], "gradient": norm, "lr": recipe.lr_at(update)}


def _require_convergence(numbers: dict[str, float], recipe: Recipe, task: Task, update: int) -> None:
    """FloatingPointError if the loss is far above that of a guess, or a number is not finite."""
    loss = numbers.get("loss", numbers.get("held_out_loss", 0.0))
    if loss <= DIVERGED * math.log(max(2, task.stack_options["outputs"])) and all(map(math.isfinite, numbers.values())):
        return
    reason = ", ".join(f"{name} {number:.4g}" for name, number in numbers.items())
    raise FloatingPointError(
        f"training diverged at update {update}: {reason}. Use a lower lr (now {recipe.lr:g}, try {recipe.lr / 5:g}), a "
        "longer warmup or a shorter horizon, and another folder; its checkpoint is from before."
    )


def _sums(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The cross-entropy summed over the answers, and the number of correct ones."""
    logits = model(batch.x, batch.mask).float()
    loss = F.cross_entropy(logits.flatten(0, -2), batch.y.flatten(), reduction="sum", ignore_index=IGNORE)
    return loss, (logits.argmax(-1) == batch.y).sum()


@torch.no_grad()
def evaluate(stack: DeepStack, task: Task, seed: int = 0, size: int = HELD_OUT) -> dict[str, float]:
    """The means over `size` held-out inputs: {"held_out_loss": ..., "held_out_accuracy": ...}.

    The inputs are the same for the same seed.
    """
    stack.eval()
    device = stack.head.weight.device
    batch = task.held_out(size, generator_of(seed, "held out"))
    sums = torch.zeros(2, dtype=torch.float64)
    for rows in torch.arange(batch.y.shape[0]).split(100):
        part = batch.map(lambda z, rows=rows: z[rows]).to(device)  # type: ignore[misc]
        sums += torch.stack(_sums(stack, part)).double().cpu()
    mean = (sums / max(1, int((batch.y != IGNORE).sum()))).tolist()
    return {"held_out_loss": mean[0], "held_out_accuracy": mean[1]}
