"""From the law alone: tokens drawn from the mean and covariance of a text's input cloud, carried through the encoder.

No word of the text enters, only two moments of its first cloud (special tokens, the same in every text, stay). How
much of the law of the last layer is then predicted? Clouds of drawn tokens are compared as clouds (W2), and by their
mean and covariance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_flow.measures import Cloud
from attn_flow.probe.propagation import Bench, compare_passes


@dataclass(frozen=True, eq=False)
class LawAlone:
    """w2 (levels, texts): over W2 between texts; embedding_cosine (texts,): of the means of the last clouds.

    covariance_cosine (texts,): <C, C'>/(|C| |C'|) of the last covariances. another_text_*: the same numbers of
    another text's true cloud, which a prediction must beat.
    """

    w2: Tensor
    embedding_cosine: Tensor
    covariance_cosine: Tensor
    another_text_embedding_cosine: Tensor
    another_text_covariance_cosine: Tensor


def carry_law(bench: Bench, generator: torch.Generator) -> LawAlone:
    """Draw tokens from N(mean, covariance) of every text's input cloud in the place of its words; run the encoder."""

    def drawn(text: int) -> Tensor:
        x, special = bench.true.states[text][0].double(), bench.clouds.special[text]
        mean, cov = Cloud(x[~special]).moments()
        values, vectors = torch.linalg.eigh(cov)
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
        return torch.where(special[:, None], x, mean + noise * values.clamp_min(0).sqrt() @ vectors.mT)

    found = bench.run(None, drawn)
    scored = compare_passes(found, bench.true, bench.between, bench.transport)
    true = [states[-1] for states in bench.true.states]
    T = len(true)
    covariance = [_covariance_cosine(a[-1], b) for a, b in zip(found.states, true)]
    other = [_covariance_cosine(true[(t + 1) % T], true[t]) for t in range(T)]
    e = bench.true.embeddings
    return LawAlone(
        scored.w2,
        scored.embedding_cosine,
        torch.tensor(covariance, dtype=torch.float64),
        (e * e.roll(-1, 0)).sum(-1).double().cpu(),
        torch.tensor(other, dtype=torch.float64),
    )


def _covariance_cosine(x: Tensor, y: Tensor) -> float:
    C, D = (Cloud(z.double()).moments()[1] for z in (x, y))
    return float((C * D).sum() / (C.norm() * D.norm()))
