"""Toy deep stacks of continuous attention: train them, then measure what they learned.

trained = train_stack(replace(recipe("side"), learn_beta=True), out="runs/side")
learned = what_was_learned(trained.stack, trained.task)
learned.path, learned.layers  # a Trajectory through depth; limit, W2 and clusters by layer
"""

from attn_flow.nn.stack import DeepStack
from attn_flow.train.checkpoint import load
from attn_flow.train.loop import Trained, evaluate, train_stack
from attn_flow.train.observation import Learned, what_was_learned
from attn_flow.train.recipes import TASKS, Recipe, recipe
from attn_flow.train.tasks import Batch, Task, tensor_task

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
