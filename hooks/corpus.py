"""Record a corpus of any size to files, in constant memory.

The state of a run is one file, which is replaced in one step: sums, sample, and position in the texts. A run that was
interrupted or killed continues from the last one and ends with the same bits, given the same machine, threads and
versions. Batch b belongs to shard b mod n, so that n processes see the batches of one process and their sums merge to
its own.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attn_flow.base import checks
from attn_flow.base.files import lock_for_writing, versions
from attn_flow.base.processes import ALONE, processes
from attn_flow.base.progress import progress_bar
from attn_flow.hooks.evaluation import list_changes
from attn_flow.hooks.fingerprints import fingerprint, tokenizer_fingerprint
from attn_flow.hooks.inputs import TokenBatch, pieces, refuse_unknown, text_limit, warn_of_truncation
from attn_flow.hooks.layout import encoder_inside, evaluation_mode
from attn_flow.hooks.recorder import ActivationCache, recording, run_batch
from attn_flow.hooks.self_check import first_tokens, self_check
from attn_flow.hooks.statistics import Statistics, list_differences, merge_shards

REMEDY = "use another folder, or start over (again=True, --again)"


def record_corpus(
    model: nn.Module,
    source: Any,
    texts: Iterable[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    *,
    points: str | Sequence[str] = "resid",
    special: bool = True,
    batch: int = 16,
    max_length: int | None = None,
    reservoir: int = 1024,
    seed: int = 0,
    shard: tuple[int, int] | str | None = None,
    max_unknown: float = 0.1,
    check: bool = True,
    again: bool = False,
    every: float = 30.0,
    progress: bool = False,
) -> Statistics:
    """Mean, covariance and a sample of tokens at every point, over any number of texts, in constant memory.

    Args:
        model, source, texts: as in `record`; texts may be a generator.
        folder: where the run is kept; the same call continues it after Ctrl-C or a kill. None keeps it in memory. A
            folder that holds a run of other weights, texts or options is refused, with what differs.

    Other arguments:
        points, special, batch, max_length, max_unknown, check: as in `record`.
        reservoir, seed: how many tokens to sample, and which; the sample depends on seed, text and position alone.
        shard: (i, n) or "i/n", this part of the batches (see `merge_shards`). By default the rank under torchrun, whose
            ranks merge at the end.
        again: start over, whatever the folder holds of this run.
        every: seconds between two saves.
        progress: show a bar with rate and remaining time.

    Returns:
        Statistics: mean (points, d), covariance (points, d, d), and `trajectory()`, the sample x (points, m, d).

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, tokenizer = tiny_bert()  # or from_pretrained("bert-base-uncased")
        >>> statistics = record_corpus(model, tokenizer, ["a b c", "b d"], reservoir=4)
        >>> statistics.n, statistics.mean.shape, statistics.trajectory().x.shape
        (9, torch.Size([3, 16]), torch.Size([3, 4, 16]))
    """
    checks.require_nonnegative(reservoir=reservoir, every=every, seed=seed)
    if folder is not None and not str(folder):
        raise ValueError('folder is an empty name, expected that of a folder; "." is this one.')
    model = encoder_inside(model)
    own_shard = None if shard is None else _parse_shard(shard)
    tokenizer = source if texts is not None else None
    with recording(model, points) as cache, evaluation_mode(model):
        stream = pieces(model, source, texts, batch, max_length)
        world = processes() if own_shard is None else ALONE
        about = {
            **cache.about(),
            "weights": fingerprint(model),
            "changes": list_changes(model),
            "tokenizer": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
            "special": special,
            "batch": batch,
            "max_length": max_length,
            "limit": None if tokenizer is None else text_limit(tokenizer, model, max_length),
            "reservoir": reservoir,
            "seed": seed,
            "versions": versions(),
            "shard": list(own_shard or (world.rank, world.count)),
        }
        run = _Run(cache, None if folder is None else Path(folder), about)
        total = len(texts) if hasattr(texts, "__len__") else None  # type: ignore[arg-type]
        with (
            nullcontext() if run.folder is None else lock_for_writing(run.path),
            progress_bar("record", total, progress) as advance,
        ):
            resumed = run.load(again)
            digest, b = hashlib.sha256(b"").hexdigest(), -1
            saved = started = time.monotonic()
            n = run.part.n
            for b, piece in enumerate(stream):
                digest = hashlib.sha256(digest.encode() + piece.content()).hexdigest()
                if b + 1 == resumed and digest != run.part.digest:
                    end = piece.first + piece.size
                    raise ValueError(
                        f"{folder} holds a run over other texts (of the first {end}, some differ); {REMEDY}."
                    )
                if b < resumed:
                    advance(piece.size, note="already done")
                    continue
                if b % run.n == run.i:
                    tokens = piece.make()
                    try:
                        run_batch(model, cache, tokens)
                    except KeyboardInterrupt:  # the sums are still those of whole batches
                        run.save()
                        raise
                    run.add(tokens, piece.size)
                    if check:
                        self_check(model, first_tokens(tokens.inputs))
                        check = False
                    refuse_unknown(tokenizer, run.part.unknown, run.part.content, max_unknown, last=False)
                run.part.batches, run.part.digest, run.part.done = b + 1, digest, False
                advance(piece.size, note=f"{(run.part.n - n) / max(time.monotonic() - started, 1e-9):.0f} tokens/s")
                if time.monotonic() - saved >= every:
                    run.save()
                    saved = time.monotonic()
            part = run.part
            if b + 1 < resumed:
                raise ValueError(f"{folder} holds a run over more texts than these; {REMEDY}.")
            if part.n == 0:
                raise ValueError(f"shard {run.i}/{run.n} got no batch; expected at most as many shards as batches.")
            refuse_unknown(tokenizer, part.unknown, part.content, max_unknown)
            part.done = True
            run.save()
            warn_of_truncation(part.truncated, about["limit"])
    if world.count > 1:
        part = merge_shards(world.gather_objects(part))
        if run.folder is not None and world.is_first:
            part.save(run.folder / "statistics.safetensors")
    return part


class _Run:
    """The statistics of one shard, and its files."""

    def __init__(self, cache: ActivationCache, folder: Path | None, about: dict[str, Any]) -> None:
        self.cache, self.folder, self.about = cache, folder, about
        self.i, self.n = about["shard"]
        self.part = Statistics.empty(about, 0)  # the width is known after the first batch
        self.suffix = "" if self.n == 1 else f"-{self.i}-of-{self.n}"

    @property
    def path(self) -> Path:
        """The file with the state of the run."""
        assert self.folder is not None  # called only for runs with a folder
        return self.folder / f"statistics{self.suffix}.safetensors"

    def load(self, again: bool) -> int:
        """Take up what an earlier run of this shard left; returns its number of batches."""
        if self.folder is None:
            return 0
        unfinished = list(self.folder.glob(f".{self.path.name}*"))  # from a run that was killed
        for file in unfinished + ([self.path] if again else []):
            file.unlink(missing_ok=True)
        if self.path.exists():
            before = Statistics.load(self.path)
            differences = list_differences(before.about, self.about)
            if differences:
                raise ValueError(
                    f"{self.path} holds another run; what differs: {'; '.join(differences)}. U{REMEDY[1:]}."
                )
            self.part = before
        return self.part.batches

    def save(self) -> None:
        """Write the state of the run."""
        if self.folder is not None and self.part.n:
            self.part.save(self.path)

    def add(self, batch: TokenBatch, texts: int) -> None:
        """Add the tokens of a batch that has just run."""
        cache = self.cache
        is_kept, _ = cache.kept_tokens(batch, self.about["special"])
        where, index = is_kept.nonzero().cpu(), is_kept.flatten().nonzero()[:, 0]
        text, position = where[:, 0] + batch.first, where[:, 1]
        states = [cache[name].flatten(0, 1) for name in cache.points]  # (batch * pos, d) each
        states = [(x if len(index) == len(x) else x.index_select(0, index.to(x.device))).cpu() for x in states]
        if self.part.n == 0:
            self.part = Statistics.empty(self.about, states[0].shape[-1])
        part = self.part
        part.add_moments(states)
        chosen, key = part.candidates(text, position)
        if len(chosen):
            strings = cache.strings(batch)
            token = [strings[row][column] for row, column in where[chosen].tolist()]
            part.add_sample(torch.stack([x[chosen] for x in states]), key, text[chosen], position[chosen], token)
        part.texts, part.truncated = part.texts + texts, part.truncated + batch.truncated
        part.unknown, part.content = part.unknown + batch.unknown, part.content + batch.content


def _parse_shard(shard: tuple[int, int] | str) -> tuple[int, int]:
    """(i, n) of a shard (i, n) or "i/n", counted from 0."""
    match = re.fullmatch(r"(\d+)/(\d+)", shard if isinstance(shard, str) else "/".join(map(str, shard)))
    i, n = (int(match[1]), int(match[2])) if match else (0, 0)
    if i >= n:
        raise ValueError(f"shard = {shard!r}, expected 'i/n' such as '0/4', with i counted from 0 to n - 1.")
    return i, n
