"""What a closure must beat, and the one interface that closures and nulls share: a `Prediction` of a layer's output.

Random nulls draw anew for every text and layer, so that an interval over texts is one over draws as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.attention import Attention
from attn_flow.measures import Measure, Mixture, PerQueryCloud
from attn_flow.probe.agreement import Agreement, compare
from attn_flow.probe.closures import LADDER, ORACLE, ORACLE_STEP, Closure, gaussian
from attn_flow.probe.clouds import Clouds
from attn_flow.probe.head_space import HeadSpace
from attn_flow.probe.quantised import quantise

Prediction = Callable[[HeadSpace, int, int], Tensor]  # (a text as a layer's heads see it, layer, text) -> (n, d)

NULLS = {
    "mean_output": "a constant, the mean output",
    "uniform": "uniform attention: the mean of all values",
    "rotated": "G rotated at random, its spectrum kept",
    "another_layer": "the weights of another layer",
    "another_text": "own queries against another text's law",
    "random_tokens": f"a Gaussian and {ORACLE} tokens drawn at random",
    "removed": "attention removed",
    "untrained": "a randomly initialised twin of the model",
}
CONTROLS = {  # closures with an ingredient spoilt: what is left must be worse
    "text_mean_closure": "one atom a head: the text's own mean output",
    "random_clusters_closure": "atoms of clusters drawn at random",
}
CROSS_FITTED = "cross_fitted_closure"
LAYER_NULLS = tuple(name for name in NULLS if name != "removed")
DEPTH_NULLS = ("mean_output", "uniform", "rotated", "removed", "another_text")


def main_closure(clouds: Clouds) -> Closure:
    """The closure that findings speak of and that nulls disturb: the best one whose numbers all queries share."""
    return LADDER["window_closure" if clouds.partial else "quantised_closure"]


def steps(clouds: Clouds) -> dict[str, Closure]:
    """The ladder as far as it is defined for this encoder, and the oracle."""
    ladder = {name: step for name, step in LADDER.items() if step.partial or not clouds.partial}
    return {**ladder, ORACLE_STEP.name: ORACLE_STEP}


def by_closure(closure: Closure) -> Prediction:
    """What a closure predicts."""
    return lambda space, layer, text: space.drift(closure.measure(space))


def cross_fitted(space: HeadSpace, layer: int, text: int) -> Tensor:
    """The quantised closure where each half of the queries meets atoms found from the other half's.

    A law of the text that only served the queries it was found with would fail here.
    """
    even = torch.arange(space.n, device=space.x.device) % 2 == 0
    by_odd, by_even = (space.per_head(quantise(space, queries=half).law(space)) for half in (~even, even))
    return space.assembled(torch.where(even[:, None], by_odd, by_even))


def by_control(name: str, generator: torch.Generator) -> Prediction:
    """What a control predicts."""

    def text_mean(space: HeadSpace, layer: int, text: int) -> Tensor:
        average = (space.logits.softmax(-1) @ space.y[..., space.k :]).mean(-2, keepdim=True)
        return space.assembled(average.expand(-1, space.n, -1))

    def random_clusters(space: HeadSpace, layer: int, text: int) -> Tensor:
        return space.drift(quantise(space, generator=generator).law(space))

    return {"text_mean_closure": text_mean, "random_clusters_closure": random_clusters}[name]


def by_null(name: str, clouds: Clouds, generator: torch.Generator, *, corpus_mean: bool = False) -> Prediction:
    """What a null predicts. `corpus_mean`: the mean output over all other texts instead of the text's own."""
    closure = main_closure(clouds)

    def mean_output(space: HeadSpace, layer: int, text: int) -> Tensor:
        level = clouds.out[layer]
        others = level[:text] + level[text + 1 :] if corpus_mean and len(level) > 1 else [level[text]]
        return torch.cat(others).mean(0).expand(space.x.shape)

    def uniform(space: HeadSpace, layer: int, text: int) -> Tensor:
        values = space.y[..., space.k :]
        if space.sees is None:
            return space.assembled(values.mean(-2, keepdim=True).expand(values.shape))
        sees = space.sees.to(values)
        return space.assembled(sees / sees.sum(-1, keepdim=True) @ values)

    def turned(space: HeadSpace, layer: int, text: int) -> Tensor:
        other = replace(space, attention=rotated(space.attention, generator))
        return other.drift(closure.measure(other))

    def another_layer(space: HeadSpace, layer: int, text: int) -> Tensor:
        others = of_other_weights(clouds, layer)
        if not others:
            raise ValueError("the null 'another_layer' needs layers of different weights; leave it out of nulls.")
        chosen = others[int(torch.randint(len(others), (), generator=generator))]
        other = clouds.seen_by(layer, space.x, space.special, clouds.attentions[chosen])
        return other.drift(closure.measure(other))

    def another_text(space: HeadSpace, layer: int, text: int) -> Tensor:
        return space.drift(closure.measure(clouds.space(layer, (text + 1) % clouds.texts)))

    def random_tokens(space: HeadSpace, layer: int, text: int) -> Tensor:
        return space.drift(_random_tokens(space, generator))

    def removed(space: HeadSpace, layer: int, text: int) -> Tensor:
        return torch.zeros_like(space.x)

    table: dict[str, Prediction] = {
        "mean_output": mean_output,
        "uniform": uniform,
        "rotated": turned,
        "another_layer": another_layer,
        "another_text": another_text,
        "random_tokens": random_tokens,
        "removed": removed,
    }
    return table[name]


def allowed(names: Sequence[str], clouds: Clouds) -> list[str]:
    """The nulls that this encoder and this many texts have."""
    impossible = set()
    if clouds.partial:  # a law shared by all queries is not defined where tokens see a part of the text
        impossible.add("another_text")
    if clouds.texts < 2:
        impossible.add("another_text")
    if not of_other_weights(clouds, 0):  # one layer, or one block fired many times
        impossible.add("another_layer")
    return [name for name in names if name not in impossible]


def of_other_weights(clouds: Clouds, layer: int) -> list[int]:
    """The layers that do not share this one's weights, from the next on and round."""
    own = clouds.attentions[layer].tensors
    after = [(layer + shift) % clouds.layers for shift in range(1, clouds.layers)]
    same = lambda i: all(torch.equal(z, own[name]) for name, z in clouds.attentions[i].tensors.items() if name in own)
    return [i for i in after if not same(i)]


def agreement_of(clouds: Clouds, predict: Prediction) -> Agreement:
    """A prediction against what every layer computed on every text, each number (layers, texts)."""
    rows = [
        [compare(predict(clouds.space(layer, t), layer, t), clouds.out[layer][t]) for t in range(clouds.texts)]
        for layer in range(clouds.layers)
    ]
    columns = (
        torch.stack([torch.stack([getattr(a, name) for a in row]) for row in rows])
        for name in ("explained", "centred_cosine", "cosine")
    )
    return Agreement(*columns)


def rotated(attention: Attention, generator: torch.Generator) -> Attention:
    """G -> R^T G R with R a random rotation: the same spectrum in other directions."""
    d, like = attention.dim, attention.Q
    R = torch.linalg.qr(torch.randn(d, d, generator=generator).to(like))[0]
    K = torch.eye(d).to(like).expand(attention.heads, d, d) if attention.K is None else attention.K
    return replace(attention, Q=attention.Q @ R, K=K @ R)


def untrained_twin(model: nn.Module, seed: int) -> nn.Module:
    """The same architecture with freshly initialised weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = getattr(model, "config", None)
        if config is not None:
            return type(model)(config).to(next(model.parameters())).eval()
        twin: Any = copy.deepcopy(model)
        for module in twin.modules():
            for reset in ("reset_parameters", "_reset_parameters"):
                if callable(getattr(module, reset, None)):
                    getattr(module, reset)()
    return twin.eval()


def _random_tokens(space: HeadSpace, generator: torch.Generator) -> Measure:
    """The Gaussian, and for each query a few tokens drawn among those it sees."""
    n = space.n
    draw = torch.rand(n, n, generator=generator).to(space.x.device)
    if space.sees is not None:
        draw = draw.masked_fill(~space.sees, -1.0)
    top = draw.topk(min(ORACLE, n), dim=-1)
    own = PerQueryCloud(space.y[:, top.indices], (top.values >= 0).to(space.y).expand(len(space.y), -1, -1))
    bulk = gaussian(space)
    if space.sees is not None:
        return Mixture([bulk, own], torch.ones(2).to(space.y))
    return Mixture([bulk, own], torch.tensor([float(n), 1.0]).to(space.y))
