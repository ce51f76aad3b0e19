"""Texts and tensors as the batches that a model takes, with a label for each token.

Nothing is lost silently: texts that are too long are truncated with a warning; empty ones, and ids that the model has
no embedding for, are errors. Batches are padded on the right.
"""

from __future__ import annotations

import inspect
import reprlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.base import checks
from attn_flow.base.processes import Processes

EARLY = 1000  # tokens after which texts with too many unknown ones are refused before the last is read


@dataclass
class TokenBatch:
    """The inputs of one forward pass, and what is known of its tokens, text by text."""

    inputs: dict[str, Tensor]
    first: int = 0  # the number of its first text
    special: list[list[bool]] | None = None
    tokens: list[list[str]] | None = None
    truncated: int = 0  # texts that were longer than `limit`
    limit: int | None = None
    unknown: int = 0  # tokens that the tokenizer does not know, of `content` tokens that are not special
    content: int = 0


@dataclass(frozen=True)
class Piece:
    """A batch that is not made yet: its first text, its number of texts, and how to make it."""

    first: int
    size: int
    make: Callable[[], TokenBatch]


@dataclass
class Tally:
    """Counts over the batches of a run, by which too many unknown tokens are refused and truncation is reported."""

    max_unknown: float
    truncated: int = 0
    unknown: int = 0
    content: int = 0
    limit: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.max_unknown <= 1:
            raise ValueError(f"max_unknown = {self.max_unknown}, expected a share from 0 to 1.")

    def add(self, batch: TokenBatch) -> None:
        """Count a batch."""
        self.truncated += batch.truncated
        self.unknown += batch.unknown
        self.content += batch.content
        self.limit = batch.limit
        if self.content >= EARLY:
            self._refuse_unknown()

    def finish(self, world: Processes) -> None:
        """Add the counts of the other processes, and judge them all."""
        shares = world.gather_objects((self.truncated, self.unknown, self.content))
        self.truncated, self.unknown, self.content = map(sum, zip(*shares))
        self._refuse_unknown()
        if self.truncated and world.is_first:
            warnings.warn(f"{self.truncated} texts were longer than {self.limit} tokens and truncated.", stacklevel=3)

    def _refuse_unknown(self) -> None:
        if self.unknown > self.max_unknown * self.content:
            raise ValueError(
                f"{self.unknown} of {self.content} tokens are unknown to the tokenizer "
                f"({self.unknown / self.content:.0%}, expected at most {self.max_unknown:.0%}): is it this model's "
                "tokenizer, are these its texts? max_unknown=1 (--max-unknown 1 in the terminal) records them anyway."
            )


def pieces(
    model: nn.Module, source: Any, texts: Iterable[str] | None, size: int, max_length: int | None = None
) -> Iterator[Piece]:
    """The batches of a tokenizer and texts, or of the model's own inputs, in their order."""
    checks.require_count(batch=size)
    if texts is not None:
        return _text_pieces(model, source, texts, size, max_length)
    if not isinstance(source, Mapping | Tensor):
        raise ValueError(f"inputs are a {type(source).__name__}, expected a dict of tensors, or tokenizer and texts.")
    inputs = {_argument_name(model, source): source} if isinstance(source, Tensor) else source
    return _tensor_pieces(inputs, size, _vocabulary(model), whole="src" in inputs and not _batch_first(model, inputs))


def _vocabulary(model: Any) -> int | None:
    """How many token ids the model has an embedding for, if it embeds ids."""
    try:
        return getattr(model.get_input_embeddings(), "num_embeddings", None)
    except (AttributeError, NotImplementedError):
        return None


# --- texts ---


def _text_pieces(
    model: nn.Module, tokenizer: Any, texts: Iterable[str], size: int, max_length: int | None
) -> Iterator[Piece]:
    limit, vocabulary = length_limit(tokenizer, model), _vocabulary(model)
    if max_length is not None:
        checks.require_count(max_length=max_length)
        if limit is not None and max_length > limit:
            raise ValueError(f"max_length = {max_length}, but this model takes at most {limit} tokens.")
        limit = max_length
    parameters = inspect.signature(model.forward).parameters

    def make(chunk: list[str], first: int) -> TokenBatch:
        batch = tokenise(tokenizer, chunk, first=first, limit=limit, vocabulary=vocabulary)
        if "token_type_ids" not in parameters:
            batch.inputs.pop("token_type_ids", None)
        return batch

    stream, first = row_texts(texts), 0
    while chunk := list(islice(stream, size)):
        yield Piece(first, len(chunk), partial(make, chunk, first))
        first += len(chunk)
    if first == 0:
        raise ValueError("texts is empty, expected at least one text.")


def row_texts(rows: Iterable[Any]) -> Iterator[str]:
    """The texts of an iterable of strings, or of rows with an entry "text" as a datasets.Dataset gives them.

    Nothing is read ahead, so that streams work.
    """
    if isinstance(rows, str | Mapping) or hasattr(rows, "columns"):  # a table would give the names of its columns
        raise ValueError(f"texts is one {type(rows).__name__}, expected several strings: [text], or table['text'].")
    for i, row in enumerate(rows):
        text = row.get("text") if isinstance(row, Mapping) else row
        if not isinstance(text, str) or not text.strip():
            raise ValueError(
                f"texts[{i}] is {reprlib.repr(row)}, expected a string with at least one word, or a row with 'text'."
            )
        yield text


def length_limit(tokenizer: Any, model: nn.Module) -> int | None:
    """The longest input that the tokenizer and the position table both allow; None if neither has a limit."""
    limits = [getattr(tokenizer, "model_max_length", None)]
    for name, module in model.named_modules():
        if name.endswith(("position_embeddings", "wpe")) and isinstance(module, nn.Embedding):
            # RoBERTa and MPNet count positions from padding_idx + 1.
            offset = 0 if module.padding_idx is None else module.padding_idx + 1
            limits.append(module.num_embeddings - offset)
            break
    else:
        limits.append(getattr(getattr(model, "config", None), "max_position_embeddings", None))
    return min((n for n in limits if isinstance(n, int) and 0 < n < 10**9), default=None)


def tokenise(
    tokenizer: Any, texts: Sequence[str], *, first: int = 0, limit: int | None = None, vocabulary: int | None = None
) -> TokenBatch:
    """One padded batch of texts, with the strings of its tokens and marks of special ones."""
    options: dict[str, Any] = {"return_special_tokens_mask": True, "return_attention_mask": False, "verbose": False}
    rows = dict(tokenizer(list(texts), **options))
    long = [i for i, ids in enumerate(rows["input_ids"]) if limit is not None and len(ids) > limit]
    if long:
        cut = tokenizer([texts[i] for i in long], truncation=True, max_length=limit, **options)
        for name in rows:
            for i, row in zip(long, cut[name]):
                rows[name][i] = row
    ids = rows["input_ids"]
    for i, row in enumerate(ids, start=first):
        if not row:
            raise ValueError(f"texts[{i}] has no token for this tokenizer; expected at least one.")
        if vocabulary is not None and max(row) >= vocabulary:
            raise ValueError(
                f"texts[{i}] has token id {max(row)} but the model embeds {vocabulary} ids: tokenizer "
                f"{type(tokenizer).__name__} does not belong to this model. Load both from the same name."
            )
    special = [[bool(s) for s in row] for row in rows.pop("special_tokens_mask")]
    n, pad = max(map(len, ids)), getattr(tokenizer, "pad_token_id", None)
    fill = lambda name: pad if name == "input_ids" and pad is not None else 0
    inputs = {
        name: torch.tensor([row + [fill(name)] * (n - len(row)) for row in table]) for name, table in rows.items()
    }
    inputs["attention_mask"] = torch.tensor([[1] * len(row) + [0] * (n - len(row)) for row in ids])
    strings = [tokenizer.convert_ids_to_tokens(row) for row in ids]
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown == getattr(tokenizer, "eos_token_id", None):
        unknown = None  # GPT-2 has one token for everything special
    content = [t for row, marks in zip(ids, special) for t, mark in zip(row, marks) if not mark or t == unknown]
    return TokenBatch(inputs, first, special, strings, len(long), limit, content.count(unknown), len(content))


# --- tensors ---


def _tensor_pieces(inputs: Mapping[str, Tensor], size: int, vocabulary: int | None, *, whole: bool) -> Iterator[Piece]:
    """The model's own inputs in batches along their first axis, or all at once."""
    tensors = {name: t for name, t in inputs.items() if isinstance(t, Tensor)}
    if len(tensors) < len(inputs) or not tensors:
        others = sorted(set(inputs) - set(tensors))
        raise ValueError(f"inputs {', '.join(others)} hold no tensors; tokenise with return_tensors='pt'.")
    marks = tensors.pop("special_tokens_mask", None)
    name, leading = next(iter(tensors.items()))
    n, ids = leading.shape[0], tensors.get("input_ids")
    if leading.numel() == 0:
        raise ValueError(f"{name} has shape {tuple(leading.shape)}: no tokens; expected at least one text and token.")
    if ids is not None and vocabulary is not None and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ValueError(
            f"input_ids go from {int(ids.min())} to {int(ids.max())}, but this model embeds ids 0 to {vocabulary - 1}: "
            "they come from another model's tokenizer."
        )

    def make(first: int, size: int) -> TokenBatch:
        chosen = slice(first, first + size)
        part = {k: t[chosen] if not whole and t.ndim and t.shape[0] == n else t for k, t in tensors.items()}
        return TokenBatch(part, first, None if marks is None else marks[chosen].bool().tolist())

    size = n if whole else size
    for first in range(0, n, size):
        yield Piece(first, min(size, n - first), partial(make, first, size))


def _argument_name(model: nn.Module, x: Tensor) -> str:
    """The name of a single tensor among the model's inputs."""
    if isinstance(model, nn.TransformerEncoder):
        return "src"
    if not x.is_floating_point():
        return "input_ids"
    return "pixel_values" if x.ndim == 4 else "inputs_embeds"


def _batch_first(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Whether the first axis of `src` counts texts, and no (n, n) mask has to stay whole."""
    layers: Any = getattr(model, "layers", ())
    first = [getattr(getattr(layer, "self_attn", None), "batch_first", False) for layer in layers]
    return bool(first) and all(first) and inputs.get("mask") is None
