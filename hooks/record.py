"""A real encoder as a Trajectory: its residual stream, attention outputs and feed-forward outputs, token by token.

The model leaves as it came, also after an exception.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attn_flow.trajectory import Trajectory

from .attach import deepened, evaluating, padded
from .tape import Tape
from .texts import Batch, argument_name, ready_batches, report_truncation, text_batches

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
    or embeddings. `points` names what to keep (see KINDS; TransformerLens names such as "blocks.3.hook_resid_post" do
    too); t counts layers. Padding is always left out; `special=False` leaves out [CLS], [SEP], class tokens as well.
    `depth` runs a model of one shared block (ALBERT) beyond its trained depth. Half precision is returned as float32
    unless `dtype` says otherwise. With `sink`, a `Statistics`, states go there batch by batch and only its reservoir, a
    uniform sample of tokens x (points, m, d), is returned: any corpus in constant memory.
    """
    if sink is not None:
        return sink.consume(
            model, source, texts, points=points, special=special, batch=batch, max_length=max_length, depth=depth
        )
    paths, truncated = [], 0
    with deepened(model, depth), recording(model, points) as tape, evaluating(model):
        for part, path in run(model, tape, source, texts, batch=batch, special=special, max_length=max_length):
            truncated += part.truncated
            paths.append(_cast(path, dtype))
    return joined(paths, {"truncated": truncated, "special": special, "depth": depth})


def run(
    model: nn.Module,
    tape: Tape,
    source: Any,
    texts: Iterable[str] | None,
    *,
    batch: int,
    special: bool,
    max_length: int | None,
    skip: int = 0,
) -> Iterator[tuple[Batch, Trajectory]]:
    """Every batch of the source through the model, as a Trajectory each."""
    tokenizer = source if texts is not None else None
    if texts is None and not isinstance(source, Mapping | Tensor):
        raise ValueError(f"inputs are a {type(source).__name__}, expected a dict of tensors, or tokenizer and texts.")
    source = {argument_name(model, source): source} if isinstance(source, Tensor) else source
    if not special and texts is None and not ("special_tokens_mask" in source or "pixel_values" in source):
        raise ValueError("special=False needs to know the special tokens; pass special_tokens_mask in the inputs.")
    device = next(model.parameters()).device
    parts = (
        ready_batches(model, source, batch)
        if texts is None
        else text_batches(model, tokenizer, texts, batch, max_length=max_length, skip=skip)
    )
    # A cache of keys and values is of no use here, and a wrapped decoder refuses it.
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    truncated, limit = 0, None
    for part in parts:
        model(**{name: t.to(device) for name, t in part.inputs.items()}, **options)
        path = tape.trajectory(part, special=special, tokenizer=tokenizer)
        if not bool(torch.isfinite(path.x[-1]).all()):
            raise ValueError(
                f"the model gave NaN or infinite states in {path.about['dtype']} (texts from {part.first}); load it "
                "with dtype=torch.float32."
            )
        truncated, limit = truncated + part.truncated, part.limit
        yield part, path
    report_truncation(truncated, limit)


def _cast(path: Trajectory, dtype: torch.dtype | None) -> Trajectory:
    half = path.x.dtype in (torch.float16, torch.bfloat16)
    dtype = dtype or (torch.float32 if half else path.x.dtype)
    return Trajectory(path.t, path.x.to(dtype), mask=path.mask, about=path.about, labels=path.labels)


def joined(paths: Sequence[Trajectory], about: Mapping[str, Any]) -> Trajectory:
    """Batches of one run side by side, padded to the longest text."""
    n = max(path.x.shape[-2] for path in paths)
    x = torch.cat([nn.functional.pad(p.x, (0, 0, 0, n - p.x.shape[-2])) for p in paths], dim=1)
    masks = [p.mask for p in paths if p.mask is not None]
    mask = torch.cat([nn.functional.pad(m, (0, n - m.shape[-1])) for m in masks])
    labels: dict[str, list] = {key: [row for p in paths for row in p.labels[key]] for key in paths[0].labels}
    return Trajectory(paths[0].t, x, mask=mask, about={**paths[0].about, **about}, labels=labels)
