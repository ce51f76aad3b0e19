"""What a trained stack has learned: its tokens as a Trajectory, and the limit that its layers' weights predict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention.attention import Attention
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.geometry import Sphere
from attn_flow.measures.cloud import Cloud
from attn_flow.nn.stack import DeepStack
from attn_flow.observe.quantities import clusters
from attn_flow.prediction.limit_map import limit
from attn_flow.prediction.phases import w2_curve
from attn_flow.train.tasks import Task, generator_of

INPUTS = 16  # held-out inputs that are followed through depth
CLUSTER_WIDTH = 0.2  # tokens whose directions are closer than this are one cluster


@dataclass(frozen=True, eq=False)
class Learned:
    """The path of some held-out inputs through depth, and numbers of every layer as plain JSON."""

    path: Trajectory
    layers: list[dict[str, Any]]

    def sentences(self) -> list[str]:
        """What each layer does, in a sentence or two."""
        return [_describe(layer) for layer in self.layers]


@torch.no_grad()
def what_was_learned(stack: DeepStack, task: Task, seed: int = 0) -> Learned:
    """Beta, the limit of the weights, W2 to that limit and the number of clusters, for every layer of a trained stack.

    They are measured on held-out inputs of its task, drawn with the seed, whose trajectory is in the result.
    """
    batch = task.held_out(INPUTS, generator_of(seed, "learned")).to(stack.head.weight.device)
    layers = [
        {"layer": l, **_measure_layer(stack, attention, path, batch.mask)}
        for l, ((path, _), attention) in enumerate(zip(stack.paths(batch.x, batch.mask), stack.attentions()))
    ]
    return Learned(stack.trajectory(batch.x, batch.mask), layers)


def _measure_layer(stack: DeepStack, attention: Attention, path: Tensor, mask: Tensor | None) -> dict[str, Any]:
    """The numbers of a layer with clouds (T, batch, n, d); W2 only where the weights have a certified limit."""
    target = limit(attention.to(torch.float64))
    about = target.as_dict()
    directions = torch.nn.functional.normalize(path[[0, -1]], dim=-1)  # padding may be zero
    start, end = clusters(Cloud(directions, mask=mask), CLUSTER_WIDTH).counts.double().mean(-1).tolist()
    numbers: dict[str, Any] = {
        "beta": torch.as_tensor(attention.beta).reshape(-1).expand(attention.heads).tolist(),
        "limit": {name: about[name] for name in ("case", "dimension", "rate_w2", "reason")},
        "clusters": {"start": start, "end": end},
        "w2": None,
    }
    if not isinstance(stack.options.geometry, Sphere):
        return numbers | {"w2_missing": "the limit map is for tokens on the sphere"}
    t = torch.linspace(0, stack.options.horizon, path.shape[0], dtype=torch.float64)
    try:
        curve = w2_curve(Trajectory(t, path.double(), None, mask), target)
    except ValueError as failure:  # tokens without a certified limit
        return numbers | {"w2_missing": str(failure)}
    w2 = curve.mean(-1).tolist()
    return numbers | {"w2": {"start": w2[0], "end": w2[-1], "curve": w2}}


def _describe(layer: dict[str, Any]) -> str:
    """The numbers of a layer in words."""
    betas = ", ".join(f"{beta:.3g}" for beta in layer["beta"])
    start, end = layer["clusters"]["start"], layer["clusters"]["end"]
    text = f"Layer {layer['layer']} (beta {betas}): {start:.1f} clusters become {end:.1f}."
    if layer["w2"] is None:
        return f"{text} The limit of its weights is not compared: {layer['w2_missing']}."
    w2 = layer["w2"]
    share = (w2["start"] - w2["end"]) / w2["start"] if w2["start"] > 0 else 0.0
    way = f"goes {share:.0%} of the way" if share > 0.1 else "moves away" if share < -0.1 else "does not move"
    return f"{text} Measured by W2 it {way} to the limit of its weights (case: {layer['limit']['case']})."
