"""A real encoder: what recording, statistics and metrics cost beside its forward pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_flow.bench.measure import Ratio, interleaved, keep_pages


def encoder_ratios(quick: bool) -> Iterator[Ratio]:
    """MiniLM: recording every level, its statistics, and the scalar metrics of clouds, against the forward pass.

    In processor time of all threads, with pages kept: parts of one hundredth drown in the wall time of a machine that
    others use, and in page faults.
    """
    from attn_flow.hooks import record, record_corpus
    from attn_flow.hooks.demo import minilm, topics
    from attn_flow.observe import quantities

    keep_pages()
    model, tokenizer = minilm()
    long = [text for text in topics() if len(text) > 2500]
    options = {"return_tensors": "pt", "padding": True, "truncation": True, "max_length": 223}
    few, many = (dict(tokenizer(long[:texts], **options)) for texts in ((1, 2) if quick else (2, 16)))

    def forward(inputs: dict[str, Tensor]) -> Any:
        with torch.no_grad():
            return model(**inputs)

    states = record(model, few).x  # of texts that are as long: no padding

    def metrics() -> None:
        u = states / states.norm(dim=-1, keepdim=True)
        quantities.pairwise_cosines(u)
        quantities.effective_rank(u)
        for beta in (1.0, 4.0, 16.0, 64.0):
            quantities.log_energy(u, beta)

    cases: list[tuple[dict[str, Tensor], dict[str, Callable[[], Any]]]] = [
        (many, {"record": lambda: record(model, many), "statistics": lambda: record_corpus(model, many)}),
        (few, {"metrics": metrics}),
    ]
    for inputs, functions in cases:
        seconds = interleaved(
            {"forward": partial(forward, inputs), **functions}, 3 if quick else 9, clock=time.process_time
        )
        for name in functions:
            yield {
                "case": f"MiniLM {name}, {int(inputs['attention_mask'].sum())} tokens, all levels",
                "against": "plain forward pass",
                "ratio": seconds[name] / seconds["forward"],
                "ours_s": seconds[name],
            }
