"""Toy deep stacks on continuous attention: train them, then probe what they learned.

trained = train(recipe("majority", beta=2.0, beta_mode="learned"), out="runs/majority")
path, numbers = trained.stack.trajectory(x), probe(trained.stack, trained.task).numbers
"""

from attn_flow.nn.stack import DeepStack
from attn_flow.train.checkpoint import load
from attn_flow.train.loop import Trained, evaluate, train
from attn_flow.train.recipes import TASKS, Recipe, recipe
from attn_flow.train.tasks import Batch, Task

__all__ = [
    "TASKS",
    "Batch",
    "DeepStack",
    "Recipe",
    "Task",
    "Trained",
    "evaluate",
    "load",
    "recipe",
    "train",
]
