"""The path of real tokens through an encoder, in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from attn_flow.base.processes import ALONE, Processes
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.hooks.inputs import TokenBatch, batches, tally
from attn_flow.hooks.layout import encoder_inside, evaluation_mode
from attn_flow.hooks.positions import as_float
from attn_flow.hooks.recorder import ActivationCache, recording, run_batch


def record(
    model: nn.Module,
    source: Any,
    texts: Iterable[str] | None = None,
    *,
    points: str | Sequence[str] = "resid",
    batch: int = 16,
    max_length: int | None = None,
    max_unknown: float = 0.1,
    world: Processes = ALONE,
) -> Trajectory:
    """The path of real tokens through an encoder: `record(model, tokenizer, texts)` or `record(model, inputs)`.

    `recording` gives activations by name instead, in your own forward passes. `record_corpus` writes those of a corpus
    that is too large for memory to files.

    Args:
        model: a known encoder, or something that holds one (a SentenceTransformer, a pipeline, a compiled model).
        source, texts: a tokenizer and strings; or the model's own inputs: token ids, pixel values, embeddings.

    Other arguments:
        points: the activations to keep, as in `recording`; "resid" is the residual stream at all levels.
        batch: texts at a time.
        max_length: tokens kept of each text; by default as many as the model takes.
        max_unknown: share of unknown tokens above which the texts are refused: it is probably not the model's own
            tokenizer, or the texts are of another kind than it was made for. `about["unknown_share"]` has the share.
        world: `processes()`, which share the batches; each of them returns the path of all texts.

    Returns:
        A Trajectory: x (points, texts, n, d) in the model's dtype, but float32 for half precision, mask (texts, n), and
        t, which counts layers. Every token has labels: its text, position, string, id, and whether it is special.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, tokenizer = tiny_bert()  # or from_pretrained("bert-base-uncased")
        >>> path = record(model, tokenizer, ["a b c", "b d"])
        >>> path.x.shape, path.t.tolist(), path.labels["token"][1]
        (torch.Size([3, 2, 5, 16]), [0.0, 1.0, 2.0], ['[CLS]', 'b', 'd', '[SEP]'])
    """
    model = encoder_inside(model)
    paths: list[Trajectory] = []
    counts: Counter[str] = Counter()
    with recording(model, points) as cache, evaluation_mode(model):
        own_batches = batches(model, source, texts, batch, max_length, world)
        for tokens in tally(own_batches, counts, max_unknown, world):
            paths.append(record_batch(model, cache, tokens))
    if world.count > 1:
        paths = _gather(paths, world)
    share = {} if texts is None else {"unknown_share": counts["unknown"] / max(1, counts["content"])}
    return _join(paths, {"truncated": counts["truncated"], **share})


def record_batch(model: nn.Module, cache: ActivationCache, batch: TokenBatch) -> Trajectory:
    """The path of one batch, in float32 for a model in half precision."""
    run_batch(model, cache, batch)
    path = cache.trajectory(batch)
    return replace(path, x=as_float(path.x))


def _gather(paths: list[Trajectory], world: Processes) -> list[Trajectory]:
    """The batches of all processes in the order of the texts, on this process's device."""
    on = lambda path, device: replace(path, x=path.x.to(device), mask=path.mask.to(device))
    shares = world.gather_objects([on(path, "cpu") for path in paths])
    ordered = [shares[b % world.count][b // world.count] for b in range(sum(map(len, shares)))]
    return [on(path, paths[0].x.device) for path in ordered] if paths else ordered


def _join(paths: Sequence[Trajectory], about: Mapping[str, Any]) -> Trajectory:
    """Several batches of texts as one, padded to the longest text."""
    if len(paths) == 1:
        return replace(paths[0], about={**paths[0].about, **about})
    n = max(path.x.shape[-2] for path in paths)
    # Filled in place: padded copies of all batches would need twice the memory.
    x = paths[0].x.new_zeros(len(paths[0]), sum(p.x.shape[1] for p in paths), n, paths[0].x.shape[-1])
    first = 0
    for p in paths:
        x[:, first : first + p.x.shape[1], : p.x.shape[2]] = p.x
        first += p.x.shape[1]
    masks = [p.mask for p in paths if p.mask is not None]
    mask = torch.cat([nn.functional.pad(m, (0, n - m.shape[-1])) for m in masks])
    labels: dict[str, list] = {key: [row for p in paths for row in p.labels[key]] for key in paths[0].labels}
    return Trajectory(paths[0].t, x, mask=mask, about={**paths[0].about, **about}, labels=labels)
