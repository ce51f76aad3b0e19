"""Statistics of the tokens of a corpus in constant memory: moments and a uniform sample, which shards merge.

Both depend on the set of tokens alone and not on their order, so that parts can be computed apart.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_flow.base.files import read_tensors, write_tensors
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.hooks.points import depth_of

FORMAT = "attn_flow.Statistics 0.3"
AT_ONCE = 1024  # tokens whose products are summed in float32 before they are added in float64
TENSORS = ("first", "second", "x", "key", "text", "position")


def random_keys(seed: int, text: Tensor, position: Tensor) -> Tensor:
    """A pseudo-random int64 for every token that depends on seed, text and position alone (splitmix64)."""
    golden = 0x9E3779B97F4A7C15 - 2**64
    z = _mix(torch.full_like(text, seed) * golden)
    return _mix(_mix(z + text * golden) + position * golden)


def _mix(z: Tensor) -> Tensor:
    """The finaliser of splitmix64. Products of int64 wrap, and a mask makes the shift a logical one."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ ((z >> shift) & (2 ** (64 - shift) - 1))) * (factor - 2**64)
    return z ^ ((z >> 31) & (2**33 - 1))


@dataclass(eq=False)
class Statistics:
    """Moments in float64 and a uniform sample of tokens at every recorded point: what `record_corpus` returns.

    The sample is without replacement: the tokens with the smallest random keys, at most `reservoir` of them.

    Args:
        about: the model and the options of the run, as plain JSON.
        n, first, second: number of tokens, sum x (points, d), and sum x x^T (points, d, d).
        x: the sampled tokens (points, m, d).
        key, text, position, token: random keys, texts, positions and strings of the sampled tokens, (m,).
        done: whether the run is complete.
        batches, texts, truncated: how many batches and texts were read, and how many texts were truncated.
        unknown, content: how many tokens the tokenizer did not know, of how many.
        digest: a digest of the texts.

    Example:
        >>> from attn_flow.hooks import record_corpus
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> statistics = record_corpus(*tiny_bert(), ["a b c", "b d"], reservoir=4)
        >>> statistics.texts, statistics.covariance.shape  # at three levels
        (2, torch.Size([3, 16, 16]))
    """

    about: dict[str, Any]
    n: int
    first: Tensor
    second: Tensor
    x: Tensor
    key: Tensor
    text: Tensor
    position: Tensor
    token: list[str]
    done: bool = False
    batches: int = 0
    texts: int = 0
    truncated: int = 0
    unknown: int = 0
    content: int = 0
    digest: str = hashlib.sha256(b"").hexdigest()

    @classmethod
    def empty(cls, about: dict[str, Any], d: int) -> Statistics:
        """The statistics of no tokens of width d."""
        points, none = len(about["points"]), torch.zeros(0, dtype=torch.int64)
        second = torch.zeros(points, d, d, dtype=torch.float64)
        return cls(about, 0, second.sum(-1), second, torch.zeros(points, 0, d), none, none, none, [])

    def __repr__(self) -> str:
        return (
            f"Statistics(n={self.n}, texts={self.texts}, points x d={tuple(self.first.shape)}, "
            f"sample={len(self.key)}, done={self.done}, architecture={self.about.get('architecture')!r})"
        )

    def add_moments(self, states: Sequence[Tensor]) -> None:
        """Add tokens (n, d), one tensor for every point, to the moments.

        Products of float32 tokens are computed in float32, for at most b = 1,024 tokens at a time and about their mean.
        With S the scatter within these b tokens an entry is wrong by at most (b + 2) 2^-24 sqrt(S_ii S_jj), which is
        less than the rounding of the states themselves in practice.
        """
        self.n += len(states[0])
        for x, first, second in zip(states, self.first, self.second):
            for part in (x if x.dtype == torch.float64 else x.float()).split(AT_ONCE):
                b, total = len(part), part.sum(0, dtype=torch.float64)
                first += total
                near = (total / b).to(part.dtype)
                u, c = part - near, near.double()
                # sum x x^T = sum u u^T + c s^T + (s - b c) c^T with u = x - c and s = sum x, for any c.
                second.addmm_(torch.stack([c, total - b * c], 1), torch.stack([total, c]))
                second += u.mT @ u

    def candidates(self, text: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Which of these tokens belong to the sample, as indices, and their keys."""
        key = random_keys(self.about["seed"], text, position)
        smallest = torch.cat([self.key, key]).sort().values[: self.about["reservoir"]]
        index = (key <= smallest[-1]).nonzero()[:, 0] if len(smallest) else text.new_zeros(0)
        return index, key[index]

    def add_sample(self, x: Tensor, key: Tensor, text: Tensor, position: Tensor, token: list[str]) -> None:
        """Add tokens x (points, m, d) to the sample and keep those with the smallest keys."""
        key = torch.cat([self.key, key])
        order = key.argsort()[: self.about["reservoir"]]
        self.x = torch.cat([self.x, x.to(self.x.dtype)], dim=1)[:, order]
        self.key, self.text = key[order], torch.cat([self.text, text])[order]
        self.position = torch.cat([self.position, position])[order]
        tokens = self.token + token
        self.token = [tokens[i] for i in order.tolist()]

    @property
    def mean(self) -> Tensor:
        """E x, (points, d), float64."""
        return self.first / self.n

    @property
    def covariance(self) -> Tensor:
        """E x x^T - E x E x^T, (points, d, d), float64."""
        return self.second / self.n - self.mean[:, :, None] * self.mean[:, None, :]

    @property
    def unknown_share(self) -> float:
        """The share of tokens, without special ones, that the tokenizer did not know."""
        return self.unknown / max(1, self.content)

    def trajectory(self) -> Trajectory:
        """The sample as a path x (points, m, d): one cloud of tokens from many texts."""
        if not len(self.key):
            raise ValueError("no tokens were sampled; record with reservoir=1024, or use mean and covariance.")
        t = torch.tensor([depth_of(name) for name in self.about["points"]], dtype=torch.float64)
        counts = {"texts": self.texts, "tokens": self.n, "truncated": self.truncated}
        about = {**self.about, **counts, "unknown_share": self.unknown_share}
        labels = {"text": self.text.tolist(), "position": self.position.tolist(), "token": list(self.token)}
        return Trajectory(t, self.x, about=about, labels=labels)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one safetensors file with a digest, which replaces an older one in one step."""
        state = {name: value for name, value in vars(self).items() if name not in TENSORS}
        tensors = {name: getattr(self, name) for name in TENSORS}
        write_tensors(tensors, path, {"format": FORMAT, "state": json.dumps(state)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Statistics:
        """Read a file, or the one in a folder. ValueError if it is damaged or of another kind."""
        path = Path(path)
        path = path / "statistics.safetensors" if path.is_dir() else path
        tensors, metadata = read_tensors(path)
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} holds no Statistics; expected a file written by Statistics.save.")
        # Copied, because the last bits of later sums depend on how a tensor is aligned in memory.
        return cls(**{**json.loads(metadata["state"]), **{name: tensors[name].clone() for name in TENSORS}})

    def merge(self, other: Statistics) -> Statistics:
        """The statistics of the tokens of both."""
        names = ("n", "first", "second", "texts", "truncated", "unknown", "content")
        total = replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})
        total.add_sample(other.x, other.key, other.text, other.position, other.token)
        return total


def list_differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What two runs do not share, in words, but for the shard and the name of the model, whose weights count."""
    differences = []
    for name in sorted({*before, *now} - {"shard", "model"}):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            old, new = ({key: z[key] for key in z if old.get(key) != new.get(key)} for z in (old, new))
        if old != new:
            differences.append(f"{name} ({old!r} there, {new!r} now)")
    return differences


def merge_shards(parts: str | os.PathLike[str] | Sequence[Statistics | str | os.PathLike[str]]) -> Statistics:
    """The statistics of a corpus from those of its shards.

    Args:
        parts: the folder that holds the files of the shards, or a list of Statistics or files in any order.

    Returns:
        Statistics. The counts and the sample are exactly those of one process; moments differ by the order of float64
        sums. ValueError if a shard is missing, unfinished, or of another run.

    Example:
        >>> from attn_flow.hooks import record_corpus
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, tokenizer = tiny_bert()  # or from_pretrained("bert-base-uncased")
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
    shards = [part if isinstance(part, Statistics) else Statistics.load(part) for part in parts]
    if not shards:
        raise ValueError("no shards to merge; expected a folder, or a list of Statistics or files.")
    shards.sort(key=lambda shard: shard.about["shard"][0])
    first, indices = shards[0], [shard.about["shard"][0] for shard in shards]
    n = first.about["shard"][1]
    if indices != list(range(n)):
        missing = sorted(set(range(n)) - set(indices))
        raise ValueError(f"shards {indices} of {n}: missing {missing}, expected each of them once.")
    total = first
    for i, shard in enumerate(shards):
        if not shard.done:
            raise ValueError(f"shard {i} of {n} is not finished; run it again, it resumes.")
        differences = list_differences(first.about, shard.about)
        if differences:
            raise ValueError(f"shard {i} is of another run than shard 0: {'; '.join(differences)}.")
        if shard.digest != first.digest:
            raise ValueError(f"shard {i} has read other texts than shard 0.")
        total = total if shard is first else total.merge(shard)
    return replace(total, about={**first.about, "shard": [0, 1]})
