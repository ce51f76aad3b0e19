"""A corpus of any size through an encoder in constant memory: `record_corpus(model, tokenizer, texts, folder)`.

The state of a run is one file, replaced in one step: sums, sample, position in the texts. A run killed at any moment
goes on from the last one and ends with the same bits, if the machine, its threads and the versions of torch and
transformers are the same; else with the same numbers to rounding. Batch b belongs to shard b mod n, so that n
processes see the very batches of one process, and their sums merge to its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.base import checks
from attn_flow.base.files import versions, write_json, write_tensors, writing_alone
from attn_flow.base.progress import progress_bar
from attn_flow.dynamics.distributed import ALONE, Processes, processes
from attn_flow.hooks.attach import deepened, evaluating
from attn_flow.hooks.corpus_statistics import Statistics, differences, merge_shards, parse_shard
from attn_flow.hooks.inputs import Piece, TokenBatch, pieces, report_truncation, text_limit
from attn_flow.hooks.layout import encoder_inside
from attn_flow.hooks.moments import Moments, Reservoir
from attn_flow.hooks.tape import Tape, forward, recording
from attn_flow.hooks.trust import altered, build, check_on_few, fingerprint, refuse_unknown, tokenizer_fingerprint


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
    depth: int | None = None,
    reservoir: int = 1024,
    seed: int = 0,
    shard: tuple[int, int] | str | None = None,
    states: bool = False,
    max_unknown: float = 0.1,
    check: bool = True,
    again: bool = False,
    every: float = 30.0,
    progress: bool = False,
) -> Statistics:
    """Moments and a sample of tokens over any number of texts: mean and covariance at every point, constant memory.

    model, source, texts, points, special, batch, max_length, depth, max_unknown, check: as in `record`; texts may be a
    generator. folder: where the run lives, and where the same call resumes after a kill; None keeps it in memory. A
    folder that holds a run of other weights, dtype, tokenizer, texts or options is refused with what differs.
    reservoir, seed: how many tokens to sample, and which: the sample depends on seed, text and position alone.
    shard: (i, n) or "i/n", this part of the batches (see `merge_shards`); by default the rank under torchrun, whose
    ranks merge at the end. states: also write all states, as safetensors files with a manifest.json.
    again: forget what the folder holds of this run, and start over. every: seconds between two saves of the run's
    state. progress: a bar with rate and remaining time.

    Returns Statistics: mean (points, d), covariance (points, d, d), and `trajectory()`, the sample x (points, m, d).

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, tokenizer = tiny_bert()
        >>> statistics = record_corpus(model, tokenizer, ["a b c", "b d"], reservoir=4)
        >>> statistics.n, statistics.mean.shape, statistics.trajectory().x.shape
        (9, torch.Size([3, 16]), torch.Size([3, 4, 16]))
    """
    checks.whole("reservoir", reservoir)
    checks.whole("seed", seed, 0)
    checks.nonnegative("every", every, "time in seconds")
    checks.flags(special=special, states=states, check=check, again=again)
    if folder is not None:
        checks.instance("folder", folder, (str, os.PathLike), "the name of a folder")
        if not str(folder):
            raise ValueError('folder is an empty name, expected that of a folder; "." is this one.')
    if states and folder is None:
        raise ValueError("states=True needs a folder to write to.")
    model = encoder_inside(model)
    given = None if shard is None else parse_shard(shard)
    tokenizer = source if texts is not None else None
    look = partial(check_on_few, model, as_built=build(model)) if check else None  # before hooks are attached
    with deepened(model, depth), recording(model, points) as tape, evaluating(model):
        stream = pieces(model, source, texts, batch, max_length)
        world = processes() if given is None else ALONE
        about = {
            **tape.about(),
            "model": fingerprint(model),
            "altered": altered(model),
            "tokenizer": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
            "special": special,
            "batch": batch,
            "max_length": max_length,
            "limit": None if tokenizer is None else text_limit(tokenizer, model, max_length),
            "depth": depth,
            "reservoir": reservoir,
            "seed": seed,
            "states": states,
            "versions": versions(),
            "shard": list(given or (world.rank, world.count)),
        }
        run = _Run(None if folder is None else Path(folder), about, every, max_unknown, look)
        with nullcontext() if run.folder is None else writing_alone(run.path):
            part = run.held(again) or run.empty(len(tape.points), 0)  # d is known from the first batch on
            total = len(texts) if hasattr(texts, "__len__") else None  # type: ignore[arg-type]
            with progress_bar("record", total, progress) as advance:  # type: ignore[arg-type]
                run.through(model, tape, tokenizer, stream, part, advance)
    return _together(run, part, world) if world.count > 1 else part


class _Run:
    """One process at work on its shard, and its files."""

    def __init__(
        self,
        folder: Path | None,
        about: dict[str, Any],
        every: float,
        max_unknown: float,
        look: Callable[[TokenBatch], None] | None,
    ) -> None:
        self.folder, self.about, self.every, self.max_unknown, self.look = folder, about, every, max_unknown, look
        self.i, self.n = about["shard"]
        self.buffer: list[dict[str, Any]] = []  # states not yet written

    # --- its files ----------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        assert self.folder is not None  # asked for by runs that have one
        return self.folder / f"statistics{self._of_shards}.safetensors"

    @property
    def _of_shards(self) -> str:
        return "" if self.n == 1 else f"-{self.i}-of-{self.n}"

    def held(self, again: bool) -> Statistics | None:
        """What an earlier run of this shard left, if it was the same run."""
        if self.folder is None:
            return None
        names = [self.path.name, f"states-{self.i}-of-{self.n}-", f"manifest{self._of_shards}.json"]
        for name in names:
            for half_written in self.folder.glob(f".{name}*"):  # by a run of this shard that was killed
                half_written.unlink(missing_ok=True)
        if again:
            for file in [file for name in names for file in self.folder.glob(f"{name}*")]:
                file.unlink(missing_ok=True)
        if not self.path.exists():
            return None
        before = Statistics.load(self.path)
        differs = differences(before.about, self.about)
        if differs:
            raise ValueError(
                f"{self.path} holds another run; what differs: {'; '.join(differs)}. Use another folder, or start over "
                "(again=True, --again)."
            )
        return before

    def empty(self, points: int, d: int) -> Statistics:
        sample = Reservoir.empty(self.about["reservoir"], self.about["seed"], points, d)
        return Statistics(self.about, Moments.zero(points, d), sample)

    def save(self, part: Statistics) -> None:
        if self.folder is None:
            return
        if self.buffer:
            # Named by its first batch: what a killed run wrote beyond its saved state is written over.
            name = f"states-{self.i}-of-{self.n}-{self.buffer[0]['batch']:08d}.safetensors"
            along = {"x": 1, "text": 0, "position": 0}
            tensors = {k: torch.cat([each[k] for each in self.buffer], dim=dim) for k, dim in along.items()}
            write_tensors(tensors, self.folder / name, {"points": json.dumps(self.about["points"])})
            texts = [int(v) for v in (tensors["text"][0], tensors["text"][-1])]
            part.files.append({"file": name, "tokens": tensors["x"].shape[1], "texts": texts})
            self.buffer.clear()
        part.save(self.path)
        if part.files:
            manifest = {"points": self.about["points"], "files": part.files, "about": self.about}
            write_json(manifest, self.folder / f"manifest{self._of_shards}.json")

    # --- its work -----------------------------------------------------------------------------------------------

    def through(
        self, model: nn.Module, tape: Tape, tokenizer: Any, stream: Iterable[Piece], part: Statistics, advance: Any
    ) -> None:
        """Every batch of this shard that is not in the sums yet; those that are, are only compared."""
        digest, resumed, skipped = hashlib.sha256(b"").hexdigest(), part.batches, part.digest
        saved = started = time.monotonic()
        seen, b, look = 0, -1, self.look
        for b, piece in enumerate(stream):
            digest = hashlib.sha256(digest.encode() + piece.content()).hexdigest()
            if b + 1 == resumed and digest != skipped:
                raise ValueError(
                    f"{self.folder} holds a run over other texts (they differ within the first "
                    f"{piece.first + piece.size}); use another folder, or start over (again=True, --again)."
                )
            if b < resumed:
                advance(piece.size, note="already done")
                continue
            if b % self.n == self.i:
                made = piece.make()
                if look is not None:
                    look(made)
                    look = None
                forward(model, tape, made)
                seen += self._add(tape, made, tokenizer, part)
                part.texts, part.truncated = part.texts + piece.size, part.truncated + made.truncated
                part.unknown, part.content = part.unknown + made.unknown, part.content + made.content
                refuse_unknown(tokenizer, part.unknown, part.content, self.max_unknown, last=False)
            part.batches, part.digest, part.done = b + 1, digest, False
            spent = time.monotonic() - started
            advance(piece.size, note=f"{seen / max(spent, 1e-9):.0f} tokens/s")
            if time.monotonic() - saved >= self.every and part.n:
                self.save(part)
                saved = time.monotonic()
        if b + 1 < resumed:
            raise ValueError(
                f"{self.folder} holds a run over more texts than given; use another folder, or start over "
                "(again=True, --again)."
            )
        if part.n == 0:
            raise ValueError(f"shard {self.i}/{self.n} got no batch; expected at most as many shards as batches.")
        refuse_unknown(tokenizer, part.unknown, part.content, self.max_unknown)
        part.done = True
        self.save(part)
        report_truncation(part.truncated, self.about["limit"])

    def _add(self, tape: Tape, made: TokenBatch, tokenizer: Any, part: Statistics) -> int:
        keep, _ = tape.kept(made, self.about["special"], tokenizer)
        where = keep.nonzero().cpu()
        text, position = where[:, 0] + made.first, where[:, 1]
        index = keep.flatten().nonzero()[:, 0]
        all_places = [tape.state(point).flatten(0, 1) for point in tape.points]
        flat: list[Tensor] = [x if len(index) == len(x) else x.index_select(0, index.to(x.device)) for x in all_places]
        if part.n == 0:
            fresh = self.empty(len(flat), flat[0].shape[-1])
            part.moments, part.sample = fresh.moments, fresh.sample
        part.moments.n += len(text)
        for p, x in enumerate(flat):
            part.moments.add(p, x.cpu())
        chosen, key = part.sample.chosen(text, position)
        if bool(chosen.any()):
            picked = chosen.nonzero()[:, 0]
            names = tape.strings(made, tokenizer)
            token = [names[row][place] for row, place in where[picked].tolist()]
            x = torch.stack([x[picked.to(x.device)].cpu() for x in flat])
            part.sample.add(x, key[picked], text[picked], position[picked], token)
        if self.about["states"]:
            x = torch.stack([x.cpu() for x in flat])
            self.buffer.append({"batch": part.batches, "x": x, "text": text, "position": position})
        return len(text)


def _together(run: _Run, part: Statistics, world: Processes) -> Statistics:
    """The merged statistics of all ranks, on each of them; the first writes them into the folder."""
    part.sample.settle()
    whole = merge_shards(world.gathered_objects(part))
    if run.folder is not None and world.first:
        whole.save(run.folder / "statistics.safetensors")
    return whole
