"""Record a corpus of any size to files, one for each batch, in constant memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from attn_flow.base.files import digest, lock_for_writing, read_json, versions, write_json
from attn_flow.base.processes import ALONE, Processes
from attn_flow.base.progress import progress_bar
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.hooks.capture import record_batch
from attn_flow.hooks.evaluation import describe_changes
from attn_flow.hooks.inputs import batches, tally
from attn_flow.hooks.layout import encoder_inside, evaluation_mode
from attn_flow.hooks.recorder import recording


def record_corpus(
    model: nn.Module,
    source: Any,
    texts: Iterable[str] | None,
    folder: str | os.PathLike[str],
    *,
    points: str | Sequence[str] = "resid",
    batch: int = 16,
    max_length: int | None = None,
    max_unknown: float = 0.1,
    progress: bool = False,
    world: Processes = ALONE,
) -> tuple[Path, ...]:
    """Record any number of texts to files, a batch at a time; after Ctrl-C or a kill the same call continues.

    Args:
        model, source, texts: as in `record`; texts may be a generator.
        folder: where batch-00000.safetensors, ... are written. One that holds the recording of another model, other
            texts, options or versions is refused.

    Other arguments:
        points, batch, max_length, max_unknown, world: as in `record`.
        progress: show a bar, if the number of texts is known.

    Returns:
        The files of all batches in the order of the texts; `Trajectory.load(file)` reads one.

    Example:
        >>> import tempfile
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, tokenizer = tiny_bert()  # or from_pretrained("bert-base-uncased")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     files = record_corpus(model, tokenizer, ["a b c", "b d", "c"], folder, batch=2)
        ...     [Trajectory.load(file).x.shape for file in files]
        [torch.Size([3, 2, 5, 16]), torch.Size([3, 1, 3, 16])]
    """
    model, folder = encoder_inside(model), Path(folder)
    file_of = lambda b: folder / f"batch-{b:05}.safetensors"
    counts: Counter[str] = Counter()
    own, total = 0, len(texts) / world.count if isinstance(texts, Sized) else 0
    with (
        recording(model, points) as cache,
        evaluation_mode(model),
        lock_for_writing(folder / f"process-{world.rank}"),
        progress_bar("record", total, progress and total > 0 and world.is_first) as advance,
    ):
        options = {"batch": batch, "max_length": max_length, "changes": list(map(describe_changes, cache.blocks))}
        about = {**cache.about(), **options, "versions": versions(), "weights": fingerprint(model)}
        _require_same(about, folder)
        for tokens in tally(batches(model, source, texts, batch, max_length, world), counts, max_unknown, world):
            file, key = file_of(tokens.first // batch), digest(tokens.inputs)
            if not file.exists():
                path = record_batch(model, cache, tokens)
                replace(path, about={**path.about, "inputs": key}).save(file)
            elif Trajectory.load(file).about.get("inputs") != key:
                raise ValueError(f"{file} holds other texts, or tokens of another tokenizer; use another folder.")
            own += 1
            advance(tokens.size)
    return tuple(file_of(b) for b in range(sum(world.gather_objects(own))))


def _require_same(about: dict[str, Any], folder: Path) -> None:
    """Describe a recording in a file of its folder; ValueError if that describes another one."""
    path = folder / "recording.json"
    if not any(folder.glob("batch-*.safetensors")):
        write_json(about, path)
    before = read_json(path)
    other = [name for name in about if name != "model" and before.get(name) != about[name]]  # the name may be a path
    if other:
        raise ValueError(f"{folder} holds a recording with other {', '.join(other)}; use another folder.")


def fingerprint(model: nn.Module) -> str:
    """A name of a model that changes with any of its weights and saved buffers."""
    state = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    return f"{type(model).__name__} {digest(state)[:16]}"
