"""Tasks on files: labelled texts (label, text), and hidden characters of plain text."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from attn_flow.base import checks, memory
from attn_flow.base.texts import csv_rows, lines, parse_json, read_text
from attn_flow.train.tasks import NO_QUESTION, Batch, Task

WORD = re.compile(r"\w+|[^\w\s]")
PADDING, UNKNOWN = 0, 1  # ids of the vocabulary's first two rows
HIDDEN = 0  # the id of a hidden character
SPLIT_SEED = 0  # which texts are held out is a fact about the file, not about the run


def read_labelled(path: str | Path) -> list[tuple[str, str]]:
    """(label, text) of every line: `label<TAB>text`, or CSV with two columns (.csv), or {"label", "text"} (.jsonl).

    A first line that says `label` and `text` is a header. Empty lines are skipped; half a line is an error.
    """
    content = read_text(path)
    kind = Path(path).suffix.lower()
    pairs: list[tuple[str, str]] = []
    entries: Iterable[tuple[int, str | list[str]]]
    entries = csv_rows(content, str(path)) if kind == ".csv" else lines(content)
    for number, line in entries:
        where = f"{path}, {'row' if kind == '.csv' else 'line'} {number}"
        if kind == ".jsonl":
            fields = _json_fields(str(line), where)
        else:
            fields = line if isinstance(line, list) else str(line).split("\t", 1)
        if len(fields) != 2:
            shape = "two columns" if kind == ".csv" else "label<TAB>text"
            raise ValueError(f"{where} has {len(fields)} field(s), expected {shape}: {str(line)[:60]!r}.")
        label, text = (field.strip() for field in fields)
        if not pairs and (label.lower(), text.lower()) == ("label", "text"):
            continue
        if not label or not text:
            missing = "label" if not label else "text"
            raise ValueError(f"{where} has an empty {missing}; fill it in or drop the line.")
        pairs.append((label, text))
    return pairs


def _json_fields(line: str, where: str) -> list[str]:
    entry = parse_json(line, where)
    missing = [name for name in ("label", "text") if not isinstance(entry, dict) or entry.get(name) in (None, "")]
    if missing:
        raise ValueError(f"{where} has no {' and no '.join(missing)}; expected a label and a text.")
    return [str(entry["label"]), str(entry["text"])]


@dataclass(frozen=True)
class Vocabulary:
    """How a stack reads texts: its words or characters in the order of their ids, the labels it answers with.

    words: of ids 2, 3, ... (0 is padding or a hidden character, 1 unknown). labels: names of the classes; empty where
    the classes are the characters themselves. longest: tokens of a text, cut there.

    Example:
        >>> Vocabulary(words=("good", "bad"), labels=("no", "yes"), longest=3).encode(["Good day", "bad"])[0]
        tensor([[2, 1, 0],
                [3, 0, 0]])
    """

    words: tuple[str, ...]
    labels: tuple[str, ...]
    longest: int

    def __post_init__(self) -> None:
        for name in ("words", "labels"):
            checks.instance(name, getattr(self, name), (list, tuple), "strings")
            if not all(isinstance(word, str) for word in getattr(self, name)):
                raise ValueError(f"{name} holds what are no strings, expected strings.")
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ValueError(f"{name} holds one twice, expected each once: its place is its id.")
        checks.whole("longest", self.longest)

    def encode(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Ids (batch, longest) and the mask of tokens."""
        ids = {word: 2 + i for i, word in enumerate(self.words)}
        cut = [_words(text)[: self.longest] if self.labels else list(text)[: self.longest] for text in texts]
        rows = [[ids.get(word, UNKNOWN) for word in row] or [UNKNOWN] for row in cut]
        x = torch.tensor([row + [PADDING] * (self.longest - len(row)) for row in rows])
        mask = torch.arange(self.longest) < torch.tensor([len(row) for row in rows])[:, None]
        return x, mask


def labelled(path: str | Path, n: int = 32, vocabulary: int = 2000) -> Task:
    """`text_task` of a file, see `read_labelled`."""
    pairs = read_labelled(path)
    return text_task([text for _, text in pairs], [label for label, _ in pairs], n, vocabulary, where=str(path))


def text_task(
    texts: Sequence[str], labels: Sequence[str], tokens: int = 32, vocabulary: int = 2000, where: str = "the list"
) -> Task:
    """A task of labelled texts: word ids (batch, tokens) with padding, y the label; a fifth of the texts is held out.

    texts, labels: as many of each. tokens: of the longest text, others are cut. vocabulary: at most so many words,
    the most frequent. where: what errors call the texts. Returns a Task for `train_stack(recipe, task=...)`.

    Example:
        >>> text_task(["good day", "bad day"] * 10, ["yes", "no"] * 10, tokens=4).outputs
        2
    """
    for name, words in (("texts", texts), ("labels", labels)):
        checks.instance(name, words, (list, tuple), "a list of strings")
        odd = [word for word in words if not isinstance(word, str)]
        if odd:
            raise ValueError(f"{name} holds a {type(odd[0]).__name__}, expected strings.")
    checks.whole("tokens", tokens)
    checks.whole("vocabulary", vocabulary)
    checks.instance("where", where, str, "the name of the texts in errors")
    memory.require(16 * len(texts) * tokens, f"{len(texts)} texts of {tokens} tokens", "ask for fewer tokens")
    if len(texts) != len(labels):
        raise ValueError(f"{len(texts)} texts and {len(labels)} labels, expected as many of each.")
    return _labelled(list(zip(labels, texts)), tokens, vocabulary, where)


def _labelled(pairs: list[tuple[str, str]], n: int, vocabulary: int, path: str) -> Task:
    labels = sorted({label for label, _ in pairs})
    if len(pairs) < 10 or len(labels) < 2:
        raise ValueError(
            f"{path} has {len(pairs)} texts and {len(labels)} label(s) {labels[:5]}; expected at least 10 texts and 2 "
            "labels."
        )
    different = sorted({text for _, text in pairs})  # a text listed twice must not sit on both sides
    order = torch.randperm(len(different), generator=torch.Generator().manual_seed(SPLIT_SEED)).tolist()
    hidden = {different[i] for i in order[: max(1, len(different) // 5)]}
    words = Counter(word for _, text in pairs if text not in hidden for word in _words(text))
    if not words:
        raise ValueError(f"{path} has no words in its training texts.")
    reads = Vocabulary(tuple(word for word, _ in words.most_common(vocabulary)), tuple(labels), n)
    cut = sum(len(_words(text)) > n for _, text in pairs)
    if cut:
        warnings.warn(f"{cut} of {len(pairs)} texts are longer than {n} tokens and were cut there.", stacklevel=2)

    def table(chosen: list[tuple[str, str]]) -> Batch:
        x, mask = reads.encode([text for _, text in chosen])
        return Batch(x, torch.tensor([labels.index(label) for label, _ in chosen]), mask)

    seen = table([pair for pair in pairs if pair[1] not in hidden])
    held = table([pair for pair in pairs if pair[1] in hidden])
    most = held.y.bincount().max() / held.y.numel()

    def draw(size: int, generator: torch.Generator) -> Batch:
        chosen = torch.randint(seen.y.numel(), (size,), generator=generator)
        return seen.each(lambda z: z[chosen])

    def held_out(size: int, generator: torch.Generator) -> Batch:
        return held.each(lambda z: z[:size])

    return Task(
        "text",
        inputs=2 + len(reads.words),
        outputs=len(labels),
        draw=draw,
        held_out=held_out,
        chance=float(most),
        length=n,
        digest=_digest(repr(pairs)),
        reads=reads,
    )


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def masked(path: str | Path | None = None, n: int = 32, hide: float = 0.15, alphabet: int = 200) -> Task:
    """Characters (batch, n) of which a share `hide`, at least one, is hidden and asked; the last tenth is held out.

    Without a path the text is the manual in Python's own `pydoc_data.topics`.
    """
    text = python_manual() if path is None else read_text(path)
    if len(text) < 20 * n:
        raise ValueError(f"{path} has {len(text)} characters, expected at least 20 * tokens = {20 * n}.")
    counts = Counter(text).most_common(alphabet)
    ids = {character: 2 + i for i, (character, _) in enumerate(sorted(counts))}
    line = torch.tensor([ids.get(character, UNKNOWN) for character in text])
    border = len(text) * 9 // 10
    seen, held = line[:border], line[border:]

    def windows(of: Tensor, size: int, generator: torch.Generator) -> Batch:
        start = torch.randint(of.numel() - n + 1, (size, 1), generator=generator)
        x = of[start + torch.arange(n)]
        asked = torch.rand(size, n, generator=generator) < hide
        asked.scatter_(1, torch.randint(n, (size, 1), generator=generator), True)
        return Batch(torch.where(asked, HIDDEN, x), torch.where(asked & (x != UNKNOWN), x - 2, NO_QUESTION))

    return Task(
        "masked",
        inputs=2 + len(ids),
        outputs=len(ids),
        draw=lambda size, generator: windows(seen, size, generator),
        held_out=lambda size, generator: windows(held, size, generator),
        chance=float(held.bincount().max() / held.numel()),
        readout="token",
        length=n,
        digest=_digest(text),
        reads=Vocabulary(tuple(ids), (), n),
    )


def python_manual() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
