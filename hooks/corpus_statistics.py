"""What a run over a corpus leaves: moments and a sample of tokens, one file, and the merging of shards."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_flow.base import checks
from attn_flow.base.files import read_tensors, write_tensors
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.hooks.moments import Moments, Reservoir
from attn_flow.hooks.tape import DEPTH

FORMAT = "attn_flow.Statistics"
# What two runs must share to be parts of one, and what to call it.
SAME = {
    "model": "the weights",
    "dtype": "the dtype",
    "altered": "what is wrapped or scaled",
    "tokenizer": "the tokenizer",
    "points": "points",
    "special": "special",
    "batch": "batch",
    "max_length": "max_length",
    "limit": "the length limit",
    "depth": "depth",
    "reservoir": "reservoir",
    "seed": "seed",
    "states": "states",
    "versions": "the versions of packages or of this one's source",
}


@dataclass(eq=False)
class Statistics:
    """Moments in float64 and a uniform sample of tokens at every recorded point: what `record_corpus` returns.

    about: what made it (plain JSON). done: whether the run came to its end. texts, truncated: how many texts were read,
    and how many of them were cut. unknown: how many of `content` tokens the tokenizer did not know.

    Example:
        >>> from attn_flow.hooks import record_corpus
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, tokenizer = tiny_bert()
        >>> statistics = record_corpus(model, tokenizer, ["a b c", "b d"])
        >>> statistics.n, statistics.mean.shape, statistics.covariance.shape
        (9, torch.Size([3, 16]), torch.Size([3, 16, 16]))
    """

    about: dict[str, Any]
    moments: Moments
    sample: Reservoir
    done: bool = False
    batches: int = 0
    texts: int = 0
    truncated: int = 0
    unknown: int = 0
    content: int = 0
    digest: str = field(default_factory=lambda: hashlib.sha256(b"").hexdigest())
    files: list[dict[str, Any]] = field(default_factory=list)

    def __repr__(self) -> str:
        shape = tuple(self.moments.first.shape)
        return (
            f"Statistics(n={self.n}, texts={self.texts}, points x d={shape}, sample={self.sample.size}, "
            f"done={self.done}, architecture={self.about.get('architecture')!r})"
        )

    @property
    def n(self) -> int:
        """Tokens counted."""
        return self.moments.n

    @property
    def mean(self) -> Tensor:
        """(points, d), float64."""
        return self.moments.mean

    @property
    def covariance(self) -> Tensor:
        """(points, d, d), float64."""
        return self.moments.covariance

    @property
    def unknown_share(self) -> float:
        """The share of tokens, special ones aside, that the tokenizer did not know."""
        return self.unknown / max(1, self.content)

    def trajectory(self) -> Trajectory:
        """The sample as a path x (points, m, d): one cloud of tokens from many texts."""
        labels = self.sample.labels()
        names = [point.rsplit(".", 1) for point in self.about["points"]]
        t = torch.tensor([int(i) + DEPTH.get(kind, 0.0) for kind, i in names], dtype=torch.float64)
        counts = {"texts": self.texts, "tokens": self.n, "truncated": self.truncated}
        about = {**self.about, **counts, "unknown_share": self.unknown_share}
        return Trajectory(t, self.sample.x, about=about, labels=labels)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Everything in one safetensors file with a digest, replaced in one step."""
        tensors = {"first": self.moments.first, "second": self.moments.second}
        tensors |= {f"sample.{name}": t for name, t in self.sample.tensors().items()}
        words: dict[str, Any] = {name: getattr(self, name) for name in (*COUNTS, "about")}
        words |= {"n": self.moments.n, "token": self.sample.token}
        write_tensors(tensors, path, {"format": FORMAT, "state": json.dumps(words)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Statistics:
        """A saved state; a folder means the one in it. A damaged file, or one of another kind, is a ValueError."""
        checks.instance("path", path, (str, os.PathLike), "the name of a file or folder")
        path = Path(path)
        path = path / "statistics.safetensors" if path.is_dir() else path
        tensors, words = read_tensors(path)
        if words.get("format") != FORMAT:
            raise ValueError(f"{path} holds no Statistics; expected a file written by Statistics.save.")
        state = json.loads(words["state"])
        about = state["about"]
        # A copy lies where torch aligns it, a tensor of the file need not: the last bits of later sums depend on that.
        moments = Moments(state["n"], tensors["first"].clone(), tensors["second"].clone())
        x, key, text, position = (tensors[f"sample.{name}"] for name in ("x", "key", "text", "position"))
        reservoir = Reservoir(about["reservoir"], about["seed"], x, key, text, position, state["token"])
        return cls(about, moments, reservoir, **{name: state[name] for name in COUNTS})


COUNTS = ("done", "batches", "texts", "truncated", "unknown", "content", "digest", "files")


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What two runs do not share, in words."""
    found = []
    for name, words in SAME.items():
        there, here = before.get(name), now.get(name)
        if isinstance(there, dict) and isinstance(here, dict):
            there, here = ({k: z[k] for k in z if there.get(k) != here.get(k)} for z in (there, here))
        if there != here:
            found.append(f"{words} ({there!r} there, {here!r} now)")
    return found


def merge_shards(parts: str | os.PathLike[str] | Sequence[Statistics | str | os.PathLike[str]]) -> Statistics:
    """The statistics of the whole from those of its shards.

    parts: the folder that holds the shards' files, or a list of Statistics or files, in any order.
    Returns Statistics: tokens counted and sampled are those of one process exactly; moments differ by the order of
    float64 sums. ValueError if a shard is missing, unfinished, or of another run.

    Example:
        >>> from attn_flow.hooks import record_corpus
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, tokenizer = tiny_bert()
        >>> texts = ["a b c", "b d", "c", "d d a"]
        >>> shards = [record_corpus(model, tokenizer, texts, batch=1, shard=(i, 2)) for i in range(2)]
        >>> [shard.n for shard in shards], merge_shards(shards).n
        ([8, 9], 17)
    """
    if isinstance(parts, str | os.PathLike):
        folder = Path(parts)
        parts = sorted(folder.glob("statistics-*-of-*.safetensors"))
        if not parts:
            raise ValueError(f"{folder} holds no statistics-<i>-of-<n>.safetensors; expected the shards of a run.")
    checks.instance("parts", parts, Sequence, "a folder, or a list of Statistics or files")
    held = [part if isinstance(part, Statistics) else Statistics.load(part) for part in parts]
    if not held:
        raise ValueError("no shards to merge; expected a folder, or a list of Statistics or files.")
    held.sort(key=lambda s: s.about["shard"][0])
    first = held[0]
    n = first.about["shard"][1]
    got = [s.about["shard"][0] for s in held]
    if got != list(range(n)):
        missing = sorted(set(range(n)) - set(got))
        raise ValueError(f"shards {got} of {n} do not make a whole: missing {missing}, expected each of them once.")
    for i, s in enumerate(held):
        if not s.done:
            raise ValueError(f"shard {i} of {n} is not finished; run it again, it resumes.")
        differs = differences(first.about, s.about)
        if differs:
            raise ValueError(f"shard {i} is of another run than shard 0: {'; '.join(differs)}.")
        if s.digest != first.digest:
            raise ValueError(f"shard {i} has read other texts than shard 0.")
    whole = Statistics({**first.about, "shard": [0, 1]}, first.moments, first.sample, True, first.batches)
    whole.digest = first.digest
    for s in held:
        whole.files += s.files
        for name in ("texts", "truncated", "unknown", "content"):
            setattr(whole, name, getattr(whole, name) + getattr(s, name))
    for s in held[1:]:
        whole.moments, whole.sample = whole.moments + s.moments, whole.sample + s.sample
    return whole


def parse_shard(shard: tuple[int, int] | str) -> tuple[int, int]:
    """(i, n) or "i/n", counted from 0."""
    try:
        i, n = (int(v) for v in (shard.split("/") if isinstance(shard, str) else shard))
    except (TypeError, ValueError):
        raise ValueError(f"shard = {shard!r}, expected 'i/n' such as '0/4'.") from None
    if not 0 <= i < n:
        raise ValueError(f"shard = {shard!r}, expected i/n with 0 <= i < n, counted from 0.")
    return i, n
