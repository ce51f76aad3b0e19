"""Texts and tensors as the batches that a model takes, with a label for each token.

Nothing is lost silently: texts that are too long are truncated with a warning; blank ones, and ids that the model has
no embedding for, are errors. Batches are padded on the right.
"""

from __future__ import annotations

import inspect
import math
import reprlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from attn_flow.base import checks
from attn_flow.base.processes import ALONE, Processes

EARLY = 1000  # tokens after which texts with too many unknown ones are refused before the last is read


@dataclass
class TokenBatch:
    """The inputs of one forward pass, and what is known of its tokens, text by text.

    `counts` has the number of texts that were longer than `limit` ("truncated"), of tokens that are not special
    ("content"), and of those that the tokenizer does not know ("unknown").
    """

    inputs: dict[str, Tensor]
    first: int = 0  # the number of its first text
    special: list[list[bool]] | None = None
    tokens: list[list[str]] | None = None
    limit: int | None = None
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def size(self) -> int:
        """Number of texts."""
        return len(next(iter(self.inputs.values())))


def batches(
    model: Any,
    source: Any,
    texts: Iterable[str] | None,
    size: int,
    max_length: int | None = None,
    world: Processes = ALONE,
) -> Iterator[TokenBatch]:
    """The batches of a tokenizer and texts, or of the model's own inputs; of several processes each takes its share."""
    checks.require_count(batch=size)
    if texts is not None:
        if not callable(source):
            raise TypeError(f"source is a {type(source).__name__}, expected the tokenizer of these texts.")
        stream = _text_batches(model, source, texts, size, max_length, world)
    elif isinstance(source, Mapping | Tensor):
        stream = _tensor_batches(model, source, size, world)
    else:
        raise ValueError(f"inputs are a {type(source).__name__}, expected a dict of tensors, or tokenizer and texts.")
    for batch in stream:
        if "input_ids" in batch.inputs:
            least, largest = (int(value) for value in batch.inputs["input_ids"].aminmax())
            embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
            count = getattr(embedding, "num_embeddings", math.inf)
            if not 0 <= least <= largest < count:
                raise ValueError(
                    f"input_ids go from {least} to {largest}, but this model embeds ids 0 to {count - 1}: they are of "
                    "another model's tokenizer. Load both from the same name."
                )
        yield batch


def tally(
    stream: Iterable[TokenBatch], counts: Counter[str], max_unknown: float, world: Processes
) -> Iterator[TokenBatch]:
    """Pass batches on, add up their counts, and refuse too many unknown tokens.

    In the end `counts` is that of all processes, and truncated texts are reported.
    """
    if not 0 <= max_unknown <= 1:
        raise ValueError(f"max_unknown = {max_unknown}, expected a share from 0 to 1.")
    limit = None
    for batch in stream:
        counts.update(batch.counts)
        limit = batch.limit
        if counts["content"] >= EARLY:
            _refuse_unknown(counts, max_unknown)
        yield batch
    shares = world.gather_objects(dict(counts))
    counts.clear()
    for share in shares:
        counts.update(share)
    _refuse_unknown(counts, max_unknown)
    if counts["truncated"] and world.is_first:
        warnings.warn(f"{counts['truncated']} texts were longer than {limit} tokens and truncated.", stacklevel=3)


def _refuse_unknown(counts: Counter[str], max_unknown: float) -> None:
    unknown, content = counts["unknown"], counts["content"]
    if unknown > max_unknown * content:
        raise ValueError(
            f"{unknown} of {content} tokens are unknown to the tokenizer ({unknown / content:.0%}, expected at most "
            f"{max_unknown:.0%}): is it this model's tokenizer, are these its texts? max_unknown=1 (--max-unknown 1 in "
            "the terminal) records them anyway."
        )


# --- texts ---


def _text_batches(
    model: nn.Module, tokenizer: Any, texts: Iterable[str], size: int, max_length: int | None, world: Processes
) -> Iterator[TokenBatch]:
    limit = length_limit(tokenizer, model)
    if max_length is not None:
        checks.require_count(max_length=max_length)
        if limit is not None and max_length > limit:
            raise ValueError(f"max_length = {max_length}, but this model takes at most {limit} tokens.")
        limit = max_length
    takes_types = "token_type_ids" in inspect.signature(model.forward).parameters
    stream = row_texts(texts)
    chunks = enumerate(iter(lambda: list(islice(stream, size)), []))
    for b, chunk in islice(chunks, world.rank, None, world.count):
        batch = tokenise(tokenizer, chunk, first=b * size, limit=limit)
        if not takes_types:
            batch.inputs.pop("token_type_ids", None)
        yield batch


def row_texts(rows: Iterable[Any]) -> Iterator[str]:
    """The texts of an iterable of strings, or of rows with an entry "text" as a datasets.Dataset gives them.

    Nothing is read ahead, so that streams work.
    """
    if isinstance(rows, str | Mapping) or hasattr(rows, "columns"):  # a table would give the names of its columns
        raise ValueError(f"texts is one {type(rows).__name__}, expected several strings: [text], or table['text'].")
    i = -1
    for i, row in enumerate(rows):
        text = row.get("text") if isinstance(row, Mapping) else row
        if not isinstance(text, str) or not text.strip():
            raise ValueError(
                f"texts[{i}] is {reprlib.repr(row)}, expected a string with at least one word, or a row with 'text'."
            )
        yield text
    if i < 0:
        raise ValueError("texts is empty, expected at least one text.")


def length_limit(tokenizer: Any, model: nn.Module) -> int | None:
    """The longest input that the tokenizer and the position table both allow; None if neither has a limit."""
    limits = [getattr(tokenizer, "model_max_length", None)]
    names = ("position_embeddings", "wpe")
    tables = [m for name, m in model.named_modules() if name.endswith(names) and isinstance(m, nn.Embedding)]
    if tables:  # RoBERTa and MPNet count positions from padding_idx + 1
        limits.append(tables[0].num_embeddings - (-1 if tables[0].padding_idx is None else tables[0].padding_idx) - 1)
    else:
        limits.append(getattr(getattr(model, "config", None), "max_position_embeddings", None))
    return min((n for n in limits if isinstance(n, int) and 0 < n < 10**9), default=None)


def tokenise(tokenizer: Any, texts: Sequence[str], *, first: int = 0, limit: int | None = None) -> TokenBatch:
    """One padded batch of texts, with the strings of its tokens and marks of special ones."""
    options: dict[str, Any] = {"return_special_tokens_mask": True, "return_attention_mask": False, "verbose": False}
    rows = dict(tokenizer(list(texts), **options))
    too_long = lambda: 0 if limit is None else sum(len(row) > limit for row in rows["input_ids"])
    truncated = too_long()
    if truncated:
        rows = dict(tokenizer(list(texts), truncation=True, max_length=limit, **options))
        if too_long():
            raise ValueError(f"max_length = {limit} is less than the special tokens that this tokenizer adds.")
    ids, special = rows["input_ids"], [[bool(s) for s in row] for row in rows.pop("special_tokens_mask")]
    rows["attention_mask"] = [[1] * len(row) for row in ids]
    padding = {"input_ids": getattr(tokenizer, "pad_token_id", None) or 0}
    inputs = {}
    for name, table in rows.items():
        tensors = [torch.tensor(row, dtype=torch.long) for row in table]
        inputs[name] = pad_sequence(tensors, batch_first=True, padding_value=padding.get(name, 0))
    strings = [tokenizer.convert_ids_to_tokens(row) for row in ids]
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown == getattr(tokenizer, "eos_token_id", None):
        unknown = None  # GPT-2 has one token for everything special
    content = [t for row, marks in zip(ids, special) for t, mark in zip(row, marks) if not mark or t == unknown]
    counts = Counter(truncated=truncated, unknown=content.count(unknown), content=len(content))
    return TokenBatch(inputs, first, special, strings, limit, counts)


# --- tensors ---


def _tensor_batches(model: nn.Module, source: Any, size: int, world: Processes) -> Iterator[TokenBatch]:
    """The model's own inputs in batches along their first axis, or all at once."""
    if isinstance(source, Tensor):
        kind = "pixel_values" if source.ndim == 4 else "inputs_embeds" if source.is_floating_point() else "input_ids"
        source = {"src" if isinstance(model, nn.TransformerEncoder) else kind: source}
    tensors = {name: t for name, t in source.items() if isinstance(t, Tensor)}
    if len(tensors) < len(source):
        others = sorted(set(source) - set(tensors))
        raise ValueError(f"inputs {', '.join(others)} hold no tensors; tokenise with return_tensors='pt'.")
    marks = tensors.pop("special_tokens_mask", None)
    if not tensors or not all(t.numel() for t in tensors.values()):
        raise ValueError("inputs are empty, expected at least one token.")
    if "input_ids" in tensors and tensors["input_ids"].ndim != 2:
        raise ValueError(f"input_ids has shape {tuple(tensors['input_ids'].shape)}, expected (batch, n).")
    n = len(next(iter(tensors.values())))
    # torch's encoder may have texts second, and a mask of all pairs of tokens.
    has_texts_second = any(isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in model.modules())
    whole = "src" in tensors and (has_texts_second or "mask" in tensors)
    size = n if whole else size
    for first in islice(range(0, n, size), world.rank, None, world.count):
        rows = slice(first, first + size)
        part = {k: t[rows] if not whole and t.ndim and len(t) == n else t for k, t in tensors.items()}
        yield TokenBatch(part, first, None if marks is None else marks[rows].bool().tolist())
