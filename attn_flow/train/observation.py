"""What a trained stack learned: its tokens as a Trajectory, its layers as Attentions with limits."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.geometry import Sphere
from attn_flow.nn.stack import DeepStack
from attn_flow.observe.quantities import clusters, effective_rank
from attn_flow.prediction.finite_n import resolution
from attn_flow.prediction.limit_map import limit
from attn_flow.prediction.timeline import split, w2_curve
from attn_flow.train.recipes import generator_of
from attn_flow.train.tasks import Task

CLOUDS = 16  # inputs looked at
TOGETHER = 0.2  # tokens closer than this part of their norm are one cluster


@dataclass(frozen=True, eq=False)
class Learned:
    """The path of some held-out inputs through depth, and numbers (plain JSON) layer by layer."""

    path: Trajectory
    numbers: dict[str, Any]

    def words(self) -> list[str]:
        """What each layer learned and does, a sentence or two each."""
        return [layer_words(layer) for layer in self.numbers["layers"]]


@torch.no_grad()
def what_was_learned(stack: DeepStack, task: Task, seed: int = 0, clouds: int = CLOUDS) -> Learned:
    """What each layer learned and does: beta, the limit of its Q, K, V, W2 to that limit, clusters, phases."""
    batch = task.held_out(clouds, generator_of(seed, "learned")).to(stack.head.weight.device)
    layers = [
        {"layer": l, **_layer(stack, attention, path, batch.mask)}
        for l, ((path, _), attention) in enumerate(zip(stack.paths(batch.x, batch.mask), stack.attentions()))
    ]
    return Learned(
        stack.trajectory(batch.x, batch.mask),
        {"inputs": int(batch.y.shape[0]), "clusters_within": TOGETHER, "layers": layers},
    )


def _layer(stack: DeepStack, attention: Attention, path: Tensor, mask: Tensor | None) -> dict[str, Any]:
    found = limit(attention)
    seen = resolution(attention, path[0], mask=mask, warn=False)
    numbers: dict[str, Any] = {
        "beta": torch.as_tensor(attention.beta).reshape(-1).expand(attention.heads).tolist(),
        "limit": {
            "case": found.case,
            "dimension": found.dimension,
            "gap": None if found.gap is None or math.isinf(found.gap) else found.gap,
            "rate": found.rate_w2,
            "because": found.evidence["because"],
        },
        "resolution": {"number": float(seen.number.max()), "verdict": seen.verdict},
        "rank": _ends(path, lambda x: effective_rank(x, mask=mask)),
        "clusters": _ends(path, lambda x: count_clusters(x, mask)),
        "w2": None,
        "phases": None,
    }
    curve, why = to_limit(stack, attention, path, mask)
    if curve is None:
        return numbers | {"w2_missing": why}
    w2, error = curve.mean(-1), float(curve[-1].std() / math.sqrt(curve.shape[1]))
    numbers["w2"] = {"start": float(w2[0]), "end": float(w2[-1]), "standard_error": error, "curve": w2.tolist()}
    if len(w2) >= 3:
        t = torch.linspace(0, _horizon(stack), len(w2))
        numbers["phases"] = [asdict(phase) for phase in split(t, w2, {"concentrating": found.rate_w2})]
    return numbers


LIMITS = {
    "fixed": "send every token to a fixed place that its start decides",
    "rotating": "keep tokens rotating for ever",
    "jordan": "draw tokens to one direction slowly, like 1/t",
    "stationary": "leave tokens where they are",
    "nonlinear": "draw tokens to places that several heads decide together",
    "undefined": "send tokens to no place that is established",
}


def layer_words(layer: dict[str, Any]) -> str:
    """A layer's numbers, as `what_was_learned` gives them, in words."""
    betas = layer["beta"]
    sharp = f"{min(betas):.3g}" if len(betas) == 1 else f"{min(betas):.3g} to {max(betas):.3g}"
    begins, ends = layer["clusters"]["start"], layer["clusters"]["end"]
    rank = layer["rank"]
    if ends < 0.8 * begins:
        did = f"gathers its tokens: {begins:.1f} groups become {ends:.1f}"
    elif ends > 1.25 * begins:
        did = f"tells its tokens apart: {begins:.1f} groups become {ends:.1f}"
    else:
        did = f"keeps its tokens apart as they were ({begins:.1f} groups, then {ends:.1f})"
    filled = f"they fill {rank['end']:.1f} directions, {rank['start']:.1f} before"
    words = f"Layer {layer['layer']} (beta {sharp}) {did}; {filled}."
    case = layer["limit"]["case"]
    if layer["w2"] is None:
        return f"{words} Where its weights would lead in the long run is not compared: {layer['w2_missing']}."
    start, end = layer["w2"]["start"], layer["w2"]["end"]
    share = (start - end) / start if start > 0 else 0.0
    way = (
        f"it goes {share:.0%} of the way there" if share > 0.1
        else "it does not go there" if share > -0.1
        else "it goes away from there"
    )  # fmt: skip
    return f"{words} Run for ever at zero temperature, its weights would {LIMITS.get(case, case)}: {way}."


def _horizon(stack: DeepStack) -> float:
    return float(stack.layers[0].horizon)  # type: ignore[arg-type]


def _ends(path: Tensor, measure: Any) -> dict[str, float]:
    return {"start": float(measure(path[0]).double().mean()), "end": float(measure(path[-1]).double().mean())}


def count_clusters(x: Tensor, mask: Tensor | None = None, within: float = TOGETHER) -> Tensor:
    """Clusters of each cloud of directions, single linkage within a chord of `within`, (batch,)."""
    return clusters(x / x.norm(dim=-1, keepdim=True), within, mask=mask).counts


def to_limit(
    stack: DeepStack, attention: Attention, path: Tensor, mask: Tensor | None = None
) -> tuple[Tensor | None, str]:
    """W2 of a layer's clouds (T, batch, n, d) to the limit its own weights predict for the first, (T, batch).

    None, and why, where no limit is established: other geometries, tokens without a certified limit.
    """
    if not isinstance(stack.geometry, Sphere) or stack.placement.name != "post":
        return None, "the limit map is for tokens on the sphere, normalised after each step"
    t = torch.linspace(0, _horizon(stack), path.shape[0], dtype=torch.float64)
    try:
        return w2_curve(Trajectory(t, path.double(), None, mask), limit(attention.to(torch.float64))), ""
    except ValueError as error:
        return None, str(error)
