"""A real encoder as a Trajectory: its residual stream, attention outputs and feed-forward outputs, token by token.

The model leaves as it came, also after an exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from attn_flow.base import checks
from attn_flow.dynamics.distributed import ALONE, Processes
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.hooks.attach import deepened, evaluating
from attn_flow.hooks.inputs import pieces, report_truncation
from attn_flow.hooks.layout import encoder_inside
from attn_flow.hooks.tape import forward, recording
from attn_flow.hooks.trust import build, check_on_few, refuse_unknown
from attn_flow.nn.stack import DeepStack


def record(
    model: nn.Module,
    source: Any,
    texts: Iterable[str] | None = None,
    *,
    points: str | Sequence[str] = "resid",
    special: bool = True,
    batch: int = 16,
    max_length: int | None = None,
    depth: int | None = None,
    dtype: torch.dtype | None = None,
    max_unknown: float = 0.1,
    check: bool = True,
    world: Processes = ALONE,
) -> Trajectory:
    """The path of real tokens through an encoder: `record(model, tokenizer, texts)` or `record(model, inputs)`.

    model: a known encoder, or what holds one (a SentenceTransformer, a pipeline, a compiled model), or a DeepStack.
    source, texts: a tokenizer and strings, or inputs as the model takes them: token ids, pixel values, embeddings.
    points: what to keep, one or several of POINTS; TransformerLens names such as "blocks.3.hook_resid_post" do too.
    special: keep [CLS], [SEP], class tokens. Padding is always left out.
    batch: texts at a time. max_length: tokens kept of each text; by default what the model takes.
    depth: runs a model of one shared block (ALBERT) beyond its trained depth.
    dtype: of the states; by default the model's, half precision as float32.
    max_unknown: the share of unknown tokens above which the texts are refused (see `unknown_share`).
    check: first compare the weights as read with what the layers compute, on a few tokens (see `self_check`).
    world: `processes()`, which share the batches; each of them returns the path of all texts.

    Returns a Trajectory: x (points, texts, n, d), mask (texts, n), t counting layers, one label per token. For a corpus
    too large for memory see `record_corpus`.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, tokenizer = tiny_bert()
        >>> path = record(model, tokenizer, ["a b c", "b d"])
        >>> path.x.shape, path.t.tolist(), path.labels["token"][1]
        (torch.Size([3, 2, 5, 16]), [0.0, 1.0, 2.0], ['[CLS]', 'b', 'd', '[SEP]'])
    """
    model = encoder_inside(model)
    if isinstance(model, DeepStack):
        if texts is not None or points != "resid":
            raise ValueError("a DeepStack takes ids or vectors and has the points 'resid': record(stack, inputs).")
        return model.trajectory(source)
    checks.made_with(dtype, None)
    checks.flags(special=special, check=check)
    checks.instance("world", world, Processes, "processes()")
    tokenizer = source if texts is not None else None
    paths: list[Trajectory] = []
    truncated, limit, unknown, content = 0, None, 0, 0
    as_built = build(model) if check else None  # before hooks are attached
    with deepened(model, depth), recording(model, points) as tape, evaluating(model):
        for b, piece in enumerate(pieces(model, source, texts, batch, max_length)):
            if b % world.count != world.rank:
                continue
            part = piece.make()
            unknown, content = unknown + part.unknown, content + part.content
            refuse_unknown(tokenizer, unknown, content, max_unknown, last=False)
            if check and not paths:
                check_on_few(model, part, as_built)
            forward(model, tape, part)
            paths.append(_cast(tape.trajectory(part, special=special, tokenizer=tokenizer), dtype))
            truncated, limit = truncated + part.truncated, part.limit
    if world.count > 1:
        paths, counts = _of_all(paths, (truncated, unknown, content), world)
        truncated, unknown, content = counts
    refuse_unknown(tokenizer, unknown, content, max_unknown)
    if world.first:
        report_truncation(truncated, limit)
    share = {} if tokenizer is None else {"unknown_share": unknown / max(1, content)}
    return joined(paths, {"truncated": truncated, "special": special, "depth": depth, **share})


def _of_all(
    paths: list[Trajectory], counts: tuple[int, int, int], world: Processes
) -> tuple[list[Trajectory], list[int]]:
    """The batches of all processes in the order of the texts, on this process's device, and the sums of counts."""
    home = [replace(path, x=path.x.cpu(), mask=None if path.mask is None else path.mask.cpu()) for path in paths]
    shares = world.gathered_objects((home, counts))
    batches = sum(len(share) for share, _ in shares)
    whole = [shares[b % world.count][0][b // world.count] for b in range(batches)]
    if paths:
        device = paths[0].x.device
        whole = [replace(p, x=p.x.to(device), mask=None if p.mask is None else p.mask.to(device)) for p in whole]
    return whole, [sum(column) for column in zip(*(numbers for _, numbers in shares))]


def _cast(path: Trajectory, dtype: torch.dtype | None) -> Trajectory:
    half = path.x.dtype in (torch.float16, torch.bfloat16)
    dtype = dtype or (torch.float32 if half else path.x.dtype)
    return replace(path, x=path.x.to(dtype))


def joined(paths: Sequence[Trajectory], about: Mapping[str, Any]) -> Trajectory:
    """Batches of one run side by side, padded to the longest text."""
    if len(paths) == 1:
        return replace(paths[0], about={**paths[0].about, **about})
    n = max(path.x.shape[-2] for path in paths)
    x = paths[0].x.new_empty(len(paths[0]), sum(p.x.shape[1] for p in paths), n, paths[0].x.shape[-1])
    first = 0
    for p in paths:
        here = x[:, first : first + p.x.shape[1]]
        here[:, :, : p.x.shape[2]] = p.x
        here[:, :, p.x.shape[2] :] = 0
        first += p.x.shape[1]
    masks = [p.mask for p in paths if p.mask is not None]
    mask = torch.cat([nn.functional.pad(m, (0, n - m.shape[-1])) for m in masks])
    labels: dict[str, list] = {key: [row for p in paths for row in p.labels[key]] for key in paths[0].labels}
    return Trajectory(paths[0].t, x, mask=mask, about={**paths[0].about, **about}, labels=labels)
