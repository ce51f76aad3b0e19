"""A real encoder as a Trajectory: its residual stream, attention outputs and feed-forward outputs, token by token.

The model leaves as it came, also after an exception.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.hooks.attach import deepened, evaluating, padded
from attn_flow.hooks.inputs import TokenBatch, pieces, report_truncation
from attn_flow.hooks.tape import Tape

if TYPE_CHECKING:
    pass


@contextmanager
def recording(model: nn.Module, points: str | Sequence[str] = "resid") -> Iterator[Tape]:
    """Listens to every forward pass inside the `with`: `tape.trajectory()` is the last one, gradients and all."""
    with ExitStack() as stack:
        tape = Tape(model, points)
        stack.enter_context(padded(tape.blocks[0].root))
        tape.attach(stack)
        yield tape


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
    sink: Any = None,
) -> Trajectory:
    """The path of real tokens through an encoder: x (points, texts, n, d), mask (texts, n), one label per token.

    record(model, tokenizer, texts) or record(model, inputs), inputs as the model takes them: token ids, pixel values,
    or embeddings. `points` names what to keep (see POINTS; TransformerLens names such as "blocks.3.hook_resid_post" do
    too); t counts layers. Padding is always left out; `special=False` leaves out [CLS], [SEP], class tokens as well.
    `depth` runs a model of one shared block (ALBERT) beyond its trained depth. Half precision is returned as float32
    unless `dtype` says otherwise. With `sink`, a `Statistics`, states go there batch by batch and only its reservoir, a
    uniform sample of tokens x (points, m, d), is returned: any corpus in constant memory.
    """
    if sink is not None:
        return sink.consume(
            model, source, texts, points=points, special=special, batch=batch, max_length=max_length, depth=depth
        )
    paths, truncated, limit = [], 0, None
    with deepened(model, depth), recording(model, points) as tape, evaluating(model):
        for piece in pieces(model, source, texts, batch, max_length):
            part = piece.make()
            forward(model, tape, part)
            path = tape.trajectory(part, special=special, tokenizer=source if texts is not None else None)
            paths.append(_cast(path, dtype))
            truncated, limit = truncated + part.truncated, part.limit
    report_truncation(truncated, limit)
    return joined(paths, {"truncated": truncated, "special": special, "depth": depth})


def forward(model: nn.Module, tape: Tape, batch: TokenBatch) -> None:
    """One pass for the tape to hear."""
    device = next(model.parameters()).device
    # A cache of keys and values is of no use here, and a wrapped decoder refuses it.
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    model(**{name: t.to(device) for name, t in batch.inputs.items()}, **options)
    if not bool(torch.isfinite(tape.state(tape.points[-1])[tape.mask]).all()):
        raise ValueError(
            f"the model gave NaN or infinite states in {tape.about()['dtype']} (texts from {batch.first}); load it "
            "with dtype=torch.float32."
        )


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
