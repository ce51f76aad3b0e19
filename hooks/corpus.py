"""A corpus of any size through an encoder in constant memory: `record(model, tokenizer, texts, sink=Statistics(...))`.

The state of a run is one file, replaced in one step: sums, sample, position in the texts. A run killed at any moment
goes on from the last one and ends with the same bits. Batch b belongs to shard b mod n, so that n processes see the
very batches of one process, and their sums merge to its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from attn_flow.base.files import write_json, write_tensors
from attn_flow.base.progress import progress_bar
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.hooks.attach import deepened, evaluating
from attn_flow.hooks.capture import forward, recording
from attn_flow.hooks.inputs import Piece, TokenBatch, pieces, report_truncation
from attn_flow.hooks.moments import Moments, Reservoir
from attn_flow.hooks.tape import DEPTH, Tape

FORMAT = "attn_flow.Statistics"
SAME = ("model", "points", "special", "batch", "max_length", "depth", "reservoir", "seed")


class Statistics:
    """Moments in float64 and a uniform sample of tokens at every recorded point, of as many texts as there are.

    folder: where the run lives, and where it resumes from; None keeps it in memory.
    reservoir, seed: how many tokens to sample, and which: the sample depends on seed, text and position alone.
    shard: (i, n), this part of the batches; by default the rank under torchrun, whose ranks merge at the end.
    states: also write all states, as safetensors files with a manifest.json.
    every: seconds between two saves of the run's state. progress: a bar with rate and remaining time.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        reservoir: int = 1024,
        seed: int = 0,
        shard: tuple[int, int] | str | None = None,
        states: bool = False,
        every: float = 30.0,
        progress: bool = False,
    ) -> None:
        if reservoir < 1:
            raise ValueError(f"reservoir = {reservoir}, expected at least one token.")
        if states and folder is None:
            raise ValueError("states=True needs a folder to write to.")
        self.folder = None if folder is None else Path(folder)
        self.shard, self.states, self.every, self.progress = parse_shard(shard), states, every, progress
        self.about: dict[str, Any] = {"reservoir": reservoir, "seed": seed}
        self.done, self.batches, self.texts, self.truncated = False, 0, 0, 0
        self.digest = hashlib.sha256(b"").hexdigest()
        self.files: list[dict[str, Any]] = []
        self.moments: Moments | None = None
        self.sample: Reservoir | None = None

    # --- results ------------------------------------------------------------------------------------------------

    def _held(self) -> tuple[Moments, Reservoir]:
        if self.moments is None or self.sample is None:
            raise ValueError("nothing recorded yet; pass this as record(..., sink=statistics).")
        return self.moments, self.sample

    @property
    def n(self) -> int:
        """Tokens counted."""
        return self._held()[0].n

    @property
    def mean(self) -> Tensor:
        """(points, d), float64."""
        return self._held()[0].mean

    @property
    def covariance(self) -> Tensor:
        """(points, d, d), float64."""
        return self._held()[0].covariance

    def trajectory(self) -> Trajectory:
        """The sample as a path x (points, m, d): one cloud of tokens from many texts."""
        _, sample = self._held()
        labels = sample.labels()
        names = [point.rsplit(".", 1) for point in self.about["points"]]
        t = torch.tensor([int(i) + DEPTH.get(kind, 0.0) for kind, i in names], dtype=torch.float64)
        about = {**self.about, "texts": self.texts, "tokens": self.n, "truncated": self.truncated}
        return Trajectory(t, sample.x, about=about, labels=labels)

    # --- a run --------------------------------------------------------------------------------------------------

    def consume(
        self,
        model: nn.Module,
        source: Any,
        texts: Iterable[str] | None,
        *,
        points: str | Sequence[str],
        special: bool,
        batch: int,
        max_length: int | None,
        depth: int | None,
    ) -> Trajectory:
        """What `record(..., sink=self)` does."""
        with distributed() as ranks, deepened(model, depth), recording(model, points) as tape, evaluating(model):
            i, n = self.shard or ranks or (0, 1)
            self.about |= {
                **tape.about(),
                "model": fingerprint(model),
                "special": special,
                "batch": batch,
                "max_length": max_length,
                "depth": depth,
                "shard": [i, n],
            }
            self._resume()
            tokenizer = source if texts is not None else None
            self._run(model, tape, tokenizer, pieces(model, source, texts, batch, max_length), _length(texts))
            merged = gathered(self) if ranks is not None and self.shard is None else self
        if merged is not self:
            self.__dict__.update(merged.__dict__)
        return self.trajectory()

    def _run(self, model: nn.Module, tape: Tape, tokenizer: Any, stream: Iterable[Piece], total: int | None) -> None:
        """Every batch of this shard that is not in the sums yet; those that are, are only compared."""
        i, n = self.about["shard"]
        digest, resumed, skipped = hashlib.sha256(b"").hexdigest(), self.batches, self.digest
        buffer: list[dict[str, Any]] = []
        saved = started = time.monotonic()
        seen, b = 0, -1
        with progress_bar("record", total, self.progress) as advance:  # type: ignore[arg-type]
            for b, piece in enumerate(stream):
                digest = hashlib.sha256(digest.encode() + piece.content()).hexdigest()
                if b + 1 == resumed and digest != skipped:
                    raise ValueError(
                        f"{self.folder} holds a run over other texts (they differ within the first "
                        f"{piece.first + piece.size}); use another folder, or delete it."
                    )
                if b < resumed:
                    advance(piece.size, note="already done")
                    continue
                if b % n == i:
                    part = piece.make()
                    forward(model, tape, part)
                    tokens = self._add(tape, part, tokenizer, buffer)
                    self.texts, self.truncated = self.texts + piece.size, self.truncated + part.truncated
                    seen, self.about["limit"] = seen + tokens, part.limit
                self.batches, self.digest = b + 1, digest
                spent = time.monotonic() - started
                advance(piece.size, note=f"{seen / max(spent, 1e-9):.0f} tokens/s")
                if time.monotonic() - saved >= self.every:
                    self._save(buffer)
                    saved = time.monotonic()
        if b + 1 < resumed:
            raise ValueError(f"{self.folder} holds a run over more texts than given; use another folder, or delete it.")
        if self.moments is None:
            raise ValueError(f"shard {i}/{n} got no batch; expected at most as many shards as batches.")
        self.done = True
        self._save(buffer)
        report_truncation(self.truncated, self.about.get("limit"))

    def _add(self, tape: Tape, part: TokenBatch, tokenizer: Any, buffer: list[dict[str, Any]]) -> int:
        keep, _ = tape.kept(part, self.about["special"], tokenizer)
        where = keep.nonzero().cpu()
        text, position = where[:, 0] + part.first, where[:, 1]
        index = keep.flatten().nonzero()[:, 0]
        states = [tape.state(point).flatten(0, 1) for point in tape.points]
        flat = [x if len(index) == len(x) else x.index_select(0, index.to(x.device)) for x in states]
        if self.moments is None or self.sample is None:
            d = flat[0].shape[-1]
            self.moments = Moments.zero(len(flat), d)
            self.sample = Reservoir.empty(self.about["reservoir"], self.about["seed"], len(flat), d)
        self.moments.n += len(text)
        for p, x in enumerate(flat):
            self.moments.add(p, x.cpu())
        chosen, key = self.sample.chosen(text, position)
        if bool(chosen.any()):
            picked = chosen.nonzero()[:, 0]
            names = tape.strings(part, tokenizer)
            token = [names[row][place] for row, place in where[picked].tolist()]
            x = torch.stack([x[picked.to(x.device)].cpu() for x in flat])
            self.sample.add(x, key[picked], text[picked], position[picked], token)
        if self.states:
            x = torch.stack([x.cpu() for x in flat])
            buffer.append({"batch": self.batches, "x": x, "text": text, "position": position})
        return len(text)

    # --- its state ----------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        i, n = self.about.get("shard", (0, 1))
        assert self.folder is not None  # asked for by runs that have one
        return self.folder / ("statistics.safetensors" if n == 1 else f"statistics-{i}-of-{n}.safetensors")

    def _save(self, buffer: list[dict[str, Any]]) -> None:
        if self.folder is None or (self.moments is None and not self.done):
            return
        if buffer:
            # Named by its first batch: what a killed run wrote beyond its saved state is written over.
            i, n = self.about["shard"]
            name = f"states-{i}-of-{n}-{buffer[0]['batch']:08d}.safetensors"
            along = {"x": 1, "text": 0, "position": 0}
            tensors = {k: torch.cat([part[k] for part in buffer], dim=dim) for k, dim in along.items()}
            write_tensors(tensors, self.folder / name, {"points": json.dumps(self.about["points"])})
            texts = [int(v) for v in (tensors["text"][0], tensors["text"][-1])]
            self.files.append({"file": name, "tokens": tensors["x"].shape[1], "texts": texts})
            buffer.clear()
        self.save(self.path)
        if self.files:
            i, n = self.about["shard"]
            manifest = {"points": self.about["points"], "files": self.files, "about": self.about}
            name = f"manifest-{i}-of-{n}.json" if n > 1 else "manifest.json"
            write_json(manifest, self.folder / name)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Everything in one safetensors file, replaced in one step."""
        moments, sample = self._held()
        tensors = {"first": moments.first, "second": moments.second}
        tensors |= {f"sample.{name}": t for name, t in sample.tensors().items()}
        names = ("done", "batches", "texts", "truncated", "digest", "files", "about")
        words: dict[str, Any] = {name: getattr(self, name) for name in names}
        words |= {"n": moments.n, "token": sample.token}
        write_tensors(tensors, path, {"format": FORMAT, "state": json.dumps(words)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Statistics:
        """A saved state; a folder means the one in it."""
        path = Path(path)
        path = path / "statistics.safetensors" if path.is_dir() else path
        with safe_open(path, framework="pt") as file:
            words = file.metadata() or {}
            if words.get("format") != FORMAT:
                raise ValueError(f"{path} holds no Statistics; expected a file written by Statistics.save.")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        state = json.loads(words["state"])
        about = state["about"]
        held = cls(None, reservoir=about["reservoir"], seed=about["seed"])
        held.about, held.done, held.batches, held.texts = about, state["done"], state["batches"], state["texts"]
        held.truncated, held.digest, held.files = state["truncated"], state["digest"], state["files"]
        # A copy lies where torch aligns it, a tensor of the file need not: the last bits of later sums depend on that.
        held.moments = Moments(state["n"], tensors["first"].clone(), tensors["second"].clone())
        sample = {name: tensors[f"sample.{name}"] for name in ("x", "key", "text", "position")}
        held.sample = Reservoir(about["reservoir"], about["seed"], **sample, token=state["token"])
        return held

    def _resume(self) -> None:
        if self.folder is None:
            return
        i, n = self.about["shard"]
        for name in (self.path.name, f"states-{i}-of-{n}-", f"manifest-{i}-of-{n}" if n > 1 else "manifest.json"):
            for half_written in self.folder.glob(f".{name}*"):  # by a run of this shard that was killed
                half_written.unlink(missing_ok=True)
        if not self.path.exists():
            return
        before = Statistics.load(self.path)
        for name in SAME:
            if before.about.get(name) != self.about.get(name):
                raise ValueError(
                    f"{self.path} was recorded with {name} = {before.about.get(name)!r}, now {self.about.get(name)!r}; "
                    "use another folder, or delete it."
                )
        for name in ("done", "batches", "texts", "truncated", "digest", "files", "moments", "sample"):
            setattr(self, name, getattr(before, name))


def merge_shards(parts: str | os.PathLike[str] | Sequence[Statistics | str | os.PathLike[str]]) -> Statistics:
    """The statistics of the whole from those of its shards: Statistics, their files, or the folder that holds them.

    Tokens counted and sampled are those of one process exactly; moments differ by the order of float64 sums.
    """
    if isinstance(parts, str | os.PathLike):
        folder = Path(parts)
        parts = sorted(folder.glob("statistics-*-of-*.safetensors"))
        if not parts:
            raise ValueError(f"{folder} holds no statistics-<i>-of-<n>.safetensors; expected the shards of a run.")
    held = [part if isinstance(part, Statistics) else Statistics.load(part) for part in parts]
    held.sort(key=lambda s: s.about["shard"][0])
    n = held[0].about["shard"][1]
    got = [s.about["shard"][0] for s in held]
    if got != list(range(n)):
        missing = sorted(set(range(n)) - set(got))
        raise ValueError(f"shards {got} of {n} do not make a whole: missing {missing}, expected each of them once.")
    for s in held:
        if not s.done:
            raise ValueError(f"shard {s.about['shard'][0]} of {n} is not finished; run it again, it resumes.")
        for name in (*SAME, "digest"):
            mine, first = (x.digest if name == "digest" else x.about.get(name) for x in (s, held[0]))
            if mine != first:
                raise ValueError(f"shard {s.about['shard'][0]} has {name} = {mine!r}, shard 0 has {first!r}.")
    whole = Statistics(None, reservoir=held[0].about["reservoir"], seed=held[0].about["seed"])
    whole.about = {**held[0].about, "shard": [0, 1]}
    whole.done, whole.batches, whole.digest = True, held[0].batches, held[0].digest
    whole.texts, whole.truncated = sum(s.texts for s in held), sum(s.truncated for s in held)
    whole.files = [file for s in held for file in s.files]
    whole.moments, whole.sample = held[0]._held()
    for s in held[1:]:
        moments, sample = s._held()
        whole.moments, whole.sample = whole.moments + moments, whole.sample + sample
    return whole


def parse_shard(shard: tuple[int, int] | str | None) -> tuple[int, int] | None:
    """(i, n) or "i/n", counted from 0."""
    if shard is None:
        return None
    try:
        i, n = (int(v) for v in (shard.split("/") if isinstance(shard, str) else shard))
    except ValueError:
        raise ValueError(f"shard = {shard!r}, expected 'i/n' such as '0/4'.") from None
    if not 0 <= i < n:
        raise ValueError(f"shard = {shard!r}, expected i/n with 0 <= i < n, counted from 0.")
    return i, n


@contextmanager
def distributed() -> Iterator[tuple[int, int] | None]:
    """(rank, ranks) under torchrun or in a process group of one's own; None in a single process."""
    from torch import distributed as dist

    if not dist.is_available() or (int(os.environ.get("WORLD_SIZE", "1")) < 2 and not dist.is_initialized()):
        yield None
        return
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("gloo")  # the statistics live on the CPU, whatever computes the states
    try:
        yield (dist.get_rank(), dist.get_world_size()) if dist.get_world_size() > 1 else None
    finally:
        if mine:
            dist.destroy_process_group()


def gathered(part: Statistics) -> Statistics:
    """The merged statistics of all ranks, on each of them; rank 0 writes them into the folder."""
    from torch import distributed as dist

    parts: list[Any] = [None] * dist.get_world_size()
    if part.sample is not None:
        part.sample.settle()
    dist.all_gather_object(parts, part)
    whole = merge_shards(parts)
    whole.folder = part.folder
    if whole.folder is not None and dist.get_rank() == 0:
        whole.save(whole.path)
    return whole


def fingerprint(model: nn.Module) -> str:
    """A name that changes when the weights do: a digest of 64 entries of every parameter."""
    digest = hashlib.sha256()
    for p in model.parameters():
        flat = p.detach().flatten()
        digest.update(flat[:: max(1, flat.numel() // 64)].double().cpu().numpy().tobytes())
    return f"{type(model).__name__} {digest.hexdigest()[:16]}"


def _length(texts: Any) -> int | None:
    return len(texts) if hasattr(texts, "__len__") else None
