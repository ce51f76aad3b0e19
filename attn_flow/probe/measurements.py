"""What a probe measures: what was probed, and one record per question."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from attn_flow.probe.averaging import Averaging
from attn_flow.probe.clusters import Clusters
from attn_flow.probe.evolution import Evolution
from attn_flow.probe.findings import QUESTIONS, Finding
from attn_flow.probe.limit import LimitApproach
from attn_flow.probe.reading import Reading
from attn_flow.probe.temperature import Temperature

RECORDS: dict[str, Callable[..., Any]] = {
    "averaging": Averaging,
    "clusters": Clusters,
    "temperature": Temperature,
    "limit": LimitApproach,
    "evolution": Evolution,
    "reading": Reading,
}


@dataclass(frozen=True)
class About:
    """What was probed.

    Args:
        encoder: the facts of `hooks.encoder_facts`.
        weights, inputs: digests.
        texts, tokens: how many were probed.
        skipped: the texts that were too short, by their numbers.
        truncated: how many texts were cut to `max_length`.
        unknown_share: share of tokens that the tokenizer does not know.
        max_length, batch, beta_factor, seed: the options.
        dtype, device: of the computation.
        versions: of the packages.
        key: a digest of all of the above. Equal keys, equal results.
        checks: the weights as read against what the layers compute, one `LayerCheck` per layer.
    """

    encoder: dict[str, Any]
    weights: str
    inputs: str
    texts: int
    tokens: int
    skipped: list[int]
    truncated: int
    unknown_share: float
    max_length: int | None
    batch: int
    beta_factor: float
    seed: int
    dtype: str
    device: str
    versions: dict[str, str]
    key: str = ""
    checks: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Measurements:
    """What a probe measured.

    Args:
        about: what was probed.
        averaging, clusters, temperature, limit: the measurements of the four questions.
        evolution: how the cloud changes through depth.
        reading: attention token by token, of a few texts.
        tokens: the tokens of these texts.
    """

    about: About
    averaging: Averaging
    clusters: Clusters
    temperature: Temperature
    limit: LimitApproach
    evolution: Evolution
    reading: Reading
    tokens: list[list[str]]

    @cached_property
    def findings(self) -> dict[str, Finding]:
        """The answer to each question: averaging, clusters, temperature, limit."""
        return {name: getattr(self, name).finding(seed=self.about.seed) for name in QUESTIONS}
