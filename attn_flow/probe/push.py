"""Where attention pushes tokens: every closure against what the layer computes, and the nulls it must beat."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.attention import Attention
from attn_flow.probe.closures import SUPPORTS, agreement, closure, head_space
from attn_flow.probe.clouds import Clouds, record_clouds

NULLS = {
    "rotated": "G rotated at random (its spectrum kept)",
    "permuted": "the weights of another layer",
    "shuffled": "tokens shuffled between texts",
    "random": "a randomly initialised twin of the model",
}
NULL_TEXTS = 16  # texts on which nulls are evaluated


def support_agreement(clouds: Clouds, name: str) -> dict[str, Tensor]:
    """Cosine and explained fraction of one support, each (layers, texts)."""
    predict = SUPPORTS[name][1]
    scores = [
        [
            agreement(predict(head_space(A, clouds.z[level][t], clouds.special[t])), clouds.out[level][t])
            for t in range(clouds.texts)
        ]
        for level, A in enumerate(clouds.attentions)
    ]
    both = torch.tensor(scores, dtype=torch.float64)
    return {f"cosine/{name}": both[..., 0].clone(), f"explained/{name}": both[..., 1].clone()}


def null_agreement(
    clouds: Clouds,
    name: str,
    model: nn.Module,
    source: Any,
    texts: Sequence[str] | None,
    batch: int,
    max_length: int | None,
    beta_factor: float,
    seed: int,
) -> dict[str, Tensor]:
    """The closure's cosine and explained fraction under a null, (layers, texts)."""
    generator = torch.Generator().manual_seed(seed + 1)
    few = replace(
        clouds,
        z=[level[:NULL_TEXTS] for level in clouds.z],
        out=[level[:NULL_TEXTS] for level in clouds.out],
        special=clouds.special[:NULL_TEXTS],
        tokens=clouds.tokens[:NULL_TEXTS],
    )
    if name == "random":
        twin = random_twin(model, seed)
        few, _, _ = record_clouds(
            twin, source, texts if texts is None else texts[:NULL_TEXTS], batch, max_length, beta_factor
        )
    elif name == "rotated":
        few = replace(few, attentions=[rotated(A, generator) for A in clouds.attentions])
    elif name == "permuted":
        if clouds.layers < 2:
            raise ValueError("the null 'permuted' needs two layers or more; leave it out of nulls.")
        shift = 1 + int(torch.randint(clouds.layers - 1, (), generator=generator))
        order = [(level + shift) % clouds.layers for level in range(clouds.layers)]
        few = replace(few, attentions=[clouds.attentions[i] for i in order])
    scores = []
    for level, A in enumerate(few.attentions):
        row = []
        for t in range(few.texts):
            seen = head_space(A, few.z[level][t], few.special[t])
            if name == "shuffled":
                other = _shuffled(few.z[level], few.special, t, generator)
                mu = closure(replace(seen, x=other))
            else:
                mu = closure(seen)
            row.append(agreement(seen.drift(mu), few.out[level][t]))
        scores.append(row)
    both = torch.tensor(scores, dtype=torch.float64)
    return {f"null_cosine/{name}": both[..., 0].clone(), f"null_explained/{name}": both[..., 1].clone()}


def rotated(attention: Attention, generator: torch.Generator) -> Attention:
    """G -> R^T G R with R a random rotation: the same spectrum in other directions."""
    d, like = attention.dim, attention.Q
    gaussian = torch.randn(d, d, generator=generator, dtype=torch.float64).to(like)
    R = torch.linalg.qr(gaussian)[0]
    K = torch.eye(d).to(like).expand(attention.heads, d, d) if attention.K is None else attention.K
    return replace(attention, Q=attention.Q @ R, K=K @ R)


def random_twin(model: nn.Module, seed: int) -> nn.Module:
    """The same architecture with freshly initialised weights."""
    twin = copy.deepcopy(model)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = getattr(model, "config", None)
        if config is not None:
            twin = type(model)(config).to(next(model.parameters()))
        else:
            for module in twin.modules():
                for reset in ("reset_parameters", "_reset_parameters"):
                    if callable(getattr(module, reset, None)):
                        getattr(module, reset)()
    return twin.eval()


def _shuffled(z: list[Tensor], special: list[Tensor], t: int, generator: torch.Generator) -> Tensor:
    """Text t with every ordinary token replaced by one of another text; special tokens stay."""
    others = [z[s][~special[s]] for s in range(len(z)) if s != t] or [z[t][~special[t]]]
    pool = torch.cat(others)
    x = z[t].clone()
    chosen = torch.randint(len(pool), (int((~special[t]).sum()),), generator=generator).to(x.device)
    x[~special[t]] = pool[chosen]
    return x
