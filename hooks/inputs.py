"""Texts, ready tensors and images as batches a model takes, each token with its label.

Nothing is lost silently: texts too long are cut with their number said, empty ones and ids the model has no row for
are errors. Batches are padded on the right; `TokenBatch.mask` says which places are tokens.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.base import checks
from attn_flow.base.files import digest


@dataclass
class TokenBatch:
    """Inputs of one forward pass, and what is known of its tokens: per text a list each."""

    inputs: dict[str, Tensor]
    first: int = 0
    special: list[list[bool]] | None = None
    tokens: list[list[str]] | None = None
    truncated: int = 0
    limit: int | None = None
    unknown: int = 0  # of so many tokens of content, those the tokenizer does not know
    content: int = 0


def length_limit(tokenizer: Any, model: nn.Module) -> int | None:
    """The longest input the tokenizer and the position table both allow; None if neither has a limit."""
    limits = [getattr(tokenizer, "model_max_length", None)]
    for name, module in model.named_modules():
        if name.endswith(("position_embeddings", "wpe")) and isinstance(module, nn.Embedding):
            # RoBERTa and MPNet count positions from padding_idx + 1.
            offset = 0 if module.padding_idx is None else module.padding_idx + 1
            limits.append(module.num_embeddings - offset)
            break
    else:
        limits.append(getattr(getattr(model, "config", None), "max_position_embeddings", None))
    found = [n for n in limits if isinstance(n, int) and 0 < n < 10**9]
    return min(found) if found else None


def text_limit(tokenizer: Any, model: nn.Module, max_length: int | None) -> int | None:
    """Tokens kept of each text: `max_length`, if the model takes so many and a text keeps a token of its own."""
    limit = length_limit(tokenizer, model)
    if max_length is None:
        return limit
    added = tokenizer.num_special_tokens_to_add() if hasattr(tokenizer, "num_special_tokens_to_add") else 0
    if not isinstance(max_length, int) or max_length <= added:
        beside = f" beside the {added} that this tokenizer adds" if added else ""
        raise ValueError(f"max_length = {max_length}, expected at least {added + 1}: one token of the text{beside}.")
    if limit is not None and max_length > limit:
        raise ValueError(f"max_length = {max_length}, but this model takes at most {limit} tokens.")
    return max_length


def check_texts(texts: Sequence[Any], first: int = 0) -> None:
    """Strings with something in them."""
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"texts[{first + i}] is a {type(text).__name__}, expected str; read files as text.")
        if not text.strip():
            raise ValueError(f"texts[{first + i}] is empty; expected at least one word. Drop empty lines.")
        if "\x00" in text:
            raise ValueError(f"texts[{first + i}] holds a NUL character: this is no text but a binary file.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"texts[{first + i}] holds half a character (place {error.start}), no text.") from None


def row_texts(rows: Iterable[Any], field: str = "text") -> Iterator[str]:
    """The texts of an iterable: of strings themselves, of rows (as a datasets.Dataset gives them) the entry `field`.

    Nothing is read ahead, so that a stream stays one. ValueError for a row without the field.

    Example:
        >>> list(row_texts([{"text": "a b", "label": 0}, "c"]))
        ['a b', 'c']
    """
    if isinstance(rows, str):
        raise ValueError("texts is one string, expected a list of strings; pass [text].")
    if not isinstance(rows, Iterable):
        raise ValueError(f"texts is a {type(rows).__name__}, expected strings, or rows with {field!r}.")
    if isinstance(rows, Mapping) or hasattr(rows, "columns"):  # which would give the names of its columns
        names = ", ".join(map(str, rows if isinstance(rows, Mapping) else rows.columns))
        raise ValueError(
            f"texts is a {type(rows).__name__} of columns ({names}), expected strings: pass one column, such as "
            f"rows[{field!r}]."
        )
    for i, row in enumerate(rows):
        if isinstance(row, Mapping) and field not in row:
            raise ValueError(
                f"texts[{i}] has no {field!r} (found {', '.join(map(str, row))}); expected strings, or rows with it: "
                f"pass a column, such as (row[{next(iter(row), field)!r}] for row in rows)."
            )
        yield row[field] if isinstance(row, Mapping) else row


def tokenise(
    tokenizer: Any, texts: Sequence[str], *, first: int = 0, limit: int | None = None, vocabulary: int | None = None
) -> TokenBatch:
    """One padded batch of texts, with token strings, and special tokens marked."""
    options: dict[str, Any] = {"return_special_tokens_mask": True, "return_attention_mask": False, "verbose": False}
    rows = dict(tokenizer(list(texts), **options))
    long = [i for i, ids in enumerate(rows["input_ids"]) if limit is not None and len(ids) > limit]
    if long:
        cut = tokenizer([texts[i] for i in long], truncation=True, max_length=limit, **options)
        for name in rows:
            for i, row in zip(long, cut[name]):
                rows[name][i] = row
    ids = rows["input_ids"]
    for i, row in enumerate(ids):
        if not row:
            raise ValueError(f"texts[{first + i}] has no token for this tokenizer; expected at least one.")
        if vocabulary is not None and max(row) >= vocabulary:
            raise ValueError(
                f"texts[{first + i}] has token id {max(row)} but the model embeds {vocabulary} ids: tokenizer "
                f"{type(tokenizer).__name__} does not belong to this model. Load both from the same name."
            )
        if limit is not None and len(row) > limit:
            raise ValueError(
                f"texts[{first + i}] has {len(row)} tokens, but {type(tokenizer).__name__} did not cut it to {limit}; "
                "cut it yourself."
            )
    special = [[bool(s) for s in row] for row in rows.pop("special_tokens_mask")]
    unknown, content = count_unknown(tokenizer, ids, special)
    n = max(map(len, ids))
    pad = getattr(tokenizer, "pad_token_id", None)
    fills = {"input_ids": 0 if pad is None else pad}
    inputs = {
        name: torch.tensor([row + [fills.get(name, 0)] * (n - len(row)) for row in table])
        for name, table in rows.items()
    }
    inputs["attention_mask"] = torch.tensor([[1] * len(row) + [0] * (n - len(row)) for row in ids])
    strings = [tokenizer.convert_ids_to_tokens(row) for row in ids]
    return TokenBatch(inputs, first, special, strings, len(long), limit, unknown, content)


def count_unknown(tokenizer: Any, ids: Sequence[Sequence[int]], special: Sequence[Sequence[bool]]) -> tuple[int, int]:
    """How many tokens the tokenizer does not know, of how many that are not special."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown == getattr(tokenizer, "eos_token_id", None):
        unknown = None  # GPT-2 has one token for everything special: there it is no sign
    content = [t for row, marks in zip(ids, special) for t, mark in zip(row, marks) if not mark or t == unknown]
    return sum(t == unknown for t in content), len(content)


@dataclass(frozen=True)
class Piece:
    """A batch not yet made: its place in the source, its content as bytes, and how to make it."""

    first: int
    size: int
    content: Callable[[], bytes]
    make: Callable[[], TokenBatch]


def pieces(
    model: nn.Module, source: Any, texts: Iterable[str] | None, size: int, max_length: int | None = None
) -> Iterator[Piece]:
    """The batches of tokenizer and texts, or of ready inputs, in their order."""
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"batch = {size}, expected at least one text at a time.")
    if texts is not None:
        checks.function("source", source, "of texts: a tokenizer, as HuggingFace's are")
        return _text_pieces(model, source, texts, size, max_length)
    if not isinstance(source, Mapping | Tensor):
        raise ValueError(f"inputs are a {type(source).__name__}, expected a dict of tensors, or tokenizer and texts.")
    inputs = {argument_name(model, source): source} if isinstance(source, Tensor) else source
    return _ready_pieces(inputs, size, embedded_ids(model), whole="src" in inputs and not _batch_first(model, inputs))


def embedded_ids(model: nn.Module) -> int | None:
    """How many token ids the model has an embedding for, if it embeds ids."""
    encoder: Any = model
    try:
        embed = encoder.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return getattr(embed, "num_embeddings", None)


def _text_pieces(
    model: nn.Module, tokenizer: Any, texts: Iterable[str], size: int, max_length: int | None
) -> Iterator[Piece]:
    limit = text_limit(tokenizer, model, max_length)
    vocabulary = embedded_ids(model)
    known = inspect.signature(model.forward).parameters

    def make(chunk: list[str], first: int) -> TokenBatch:
        batch = tokenise(tokenizer, chunk, first=first, limit=limit, vocabulary=vocabulary)
        if "token_type_ids" not in known:
            batch.inputs.pop("token_type_ids", None)
        return batch

    stream, first = row_texts(texts), 0
    while chunk := list(islice(stream, size)):
        check_texts(chunk, first)
        yield Piece(first, len(chunk), partial(_encoded, chunk), partial(make, chunk, first))
        first += len(chunk)
    if first == 0:
        raise ValueError("texts is empty, expected at least one text.")


def _encoded(chunk: list[str]) -> bytes:
    return "\x00".join(chunk).encode("utf-8", "surrogatepass")


def report_truncation(count: int, limit: int | None) -> None:
    """Says how many texts were cut, so that no one mistakes a part for the whole."""
    if count:
        warnings.warn(f"{count} texts were longer than {limit} tokens and were truncated.", stacklevel=3)


def _batch_first(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Whether the first axis of `src` counts texts; a torch.nn.TransformerEncoder may have it second, a mask none."""
    layers: Any = getattr(model, "layers", ())
    first = [getattr(getattr(layer, "self_attn", None), "batch_first", False) for layer in layers]
    return bool(first) and all(first) and inputs.get("mask") is None


def _ready_pieces(inputs: Mapping[str, Tensor], size: int, vocabulary: int | None, *, whole: bool) -> Iterator[Piece]:
    """Tensors as the model takes them, cut into batches along their first axis, unless they are to stay whole."""
    tensors = {name: t for name, t in inputs.items() if isinstance(t, Tensor)}
    if len(tensors) < len(inputs) or not tensors:
        odd = sorted(set(inputs) - set(tensors))
        raise ValueError(f"inputs {', '.join(odd)} hold no tensors; tokenise with return_tensors='pt'.")
    marks = tensors.pop("special_tokens_mask", None)
    leading = next(iter(tensors.values()))
    n = leading.shape[0]
    if leading.numel() == 0:
        name = next(iter(tensors))
        raise ValueError(f"{name} has shape {tuple(leading.shape)}: no tokens; expected at least one text and token.")
    ids = tensors.get("input_ids")
    if ids is not None and (ids.is_floating_point() or ids.is_complex()):
        raise ValueError(f"input_ids have dtype {ids.dtype}, expected whole numbers; use input_ids.long().")
    if ids is not None and vocabulary is not None and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ValueError(
            f"input_ids go from {int(ids.min())} to {int(ids.max())}, but this model embeds ids 0 to {vocabulary - 1}: "
            "they come from another model's tokenizer."
        )

    def make(first: int) -> TokenBatch:
        if whole:
            return TokenBatch(dict(tensors))
        chosen = slice(first, first + size)
        part = {k: t[chosen] if t.ndim and t.shape[0] == n else t for k, t in tensors.items()}
        special = None if marks is None else marks[chosen].bool().tolist()
        return TokenBatch(part, first, special)

    def content(first: int) -> bytes:
        return digest(make(first).inputs).encode()

    for first in range(0, n, n if whole else size):
        yield Piece(first, n if whole else min(size, n - first), partial(content, first), partial(make, first))


def argument_name(model: nn.Module, x: Tensor) -> str:
    """The name of a single tensor among the model's inputs."""
    if isinstance(model, nn.TransformerEncoder):
        return "src"
    if not x.is_floating_point():
        return "input_ids"
    return "pixel_values" if x.ndim == 4 else "inputs_embeds"
