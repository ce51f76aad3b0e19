"""Toy deep stacks of continuous attention: train them, then measure what they learned.

trained = train_stack(replace(recipe("side"), learn_beta=True), out="runs/side")
learned = what_was_learned(trained.stack, trained.task)
learned.path, learned.layers  # a Trajectory through depth; limit, W2 and clusters by layer
"""

from typing import TYPE_CHECKING

from attn_flow.base.imports import lazy_names

if TYPE_CHECKING:
    from attn_flow.nn.stack import DeepStack
    from attn_flow.train.checkpoint import load
    from attn_flow.train.loop import Trained, evaluate, train_stack
    from attn_flow.train.observation import Learned, what_was_learned
    from attn_flow.train.recipes import TASKS, Recipe, recipe
    from attn_flow.train.tasks import Batch, Task, tensor_task
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "attn_flow.nn.stack": ("DeepStack",),
            "attn_flow.train.checkpoint": ("load",),
            "attn_flow.train.loop": ("Trained", "evaluate", "train_stack"),
            "attn_flow.train.observation": ("Learned", "what_was_learned"),
            "attn_flow.train.recipes": ("TASKS", "Recipe", "recipe"),
            "attn_flow.train.tasks": ("Batch", "Task", "tensor_task"),
        },
    )

__all__ = [
    "TASKS",
    "Batch",
    "DeepStack",
    "Learned",
    "Recipe",
    "Task",
    "Trained",
    "evaluate",
    "load",
    "recipe",
    "tensor_task",
    "train_stack",
    "what_was_learned",
]
