"""Tasks of labelled texts."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from attn_flow.base import checks
from attn_flow.base.texts import csv_rows, lines, read_text
from attn_flow.train.tasks import Batch, Task, draw_from, first_of

WORD = re.compile(r"\w+|[^\w\s]")
PADDING, UNKNOWN = 0, 1  # the first two ids of a vocabulary
SPLIT_SEED = 0  # which texts are held out depends on the file and not on the run


@dataclass(frozen=True)
class Vocabulary:
    """How a stack reads texts.

    Args:
        words: the words of the ids 2, 3, ... (0 is padding, 1 is unknown).
        labels: the names of the classes.
        longest: the number of words at which texts are cut.

    Example:
        >>> Vocabulary(words=("good", "bad"), labels=("no", "yes"), longest=3).encode(["Good day", "bad"])[0]
        tensor([[2, 1, 0],
                [3, 0, 0]])
    """

    words: tuple[str, ...]
    labels: tuple[str, ...]
    longest: int

    def encode(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Ids (batch, longest) and the mask of tokens."""
        ids = {word: 2 + i for i, word in enumerate(self.words)}
        rows = [[ids.get(word, UNKNOWN) for word in _words(text)[: self.longest]] or [UNKNOWN] for text in texts]
        x = torch.tensor([row + [PADDING] * (self.longest - len(row)) for row in rows])
        mask = torch.arange(self.longest) < torch.tensor([len(row) for row in rows])[:, None]
        return x, mask


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def read_labelled(path: str | Path) -> list[tuple[str, str]]:
    """(label, text) of every row of a table with two columns: commas in a .csv file, otherwise tabs.

    A first row with `label` and `text` is a header. Empty rows are skipped.
    """
    content, is_csv = read_text(path), Path(path).suffix.lower() == ".csv"
    rows = csv_rows(content, str(path)) if is_csv else ((i, line.split("\t", 1)) for i, line in lines(content))
    pairs: list[tuple[str, str]] = []
    for number, fields in rows:
        if len(fields) != 2 or not all(field.strip() for field in fields):
            shape = "label,text" if is_csv else "label<TAB>text"
            raise ValueError(f"{path}, row {number}: got {str(fields)[:60]}, expected {shape}; mend or drop the row.")
        pair = (fields[0].strip(), fields[1].strip())
        if pairs or (pair[0].lower(), pair[1].lower()) != ("label", "text"):
            pairs.append(pair)
    return pairs


def labelled(path: str | Path, tokens: int = 32) -> Task:
    """`text_task` of a file, see `read_labelled`."""
    pairs = read_labelled(path)
    return text_task([text for _, text in pairs], [label for label, _ in pairs], tokens, source=str(path))


def text_task(
    texts: Sequence[str], labels: Sequence[str], tokens: int = 32, vocabulary: int = 2000, source: str = "the list"
) -> Task:
    """A task of labelled texts: word ids (batch, tokens) with padding; a fifth of the texts is held out.

    Args:
        texts, labels: one label for each text.
        tokens: texts are cut after so many words.
        vocabulary: the number of words that are known, the most frequent ones.
        source: the name of the texts in errors.

    Returns:
        A `Task` for `train_stack(recipe, task=...)`.

    Example:
        >>> text_task(["good day", "bad day"] * 10, ["yes", "no"] * 10, tokens=4).outputs
        2
    """
    checks.require_count(tokens=tokens, vocabulary=vocabulary)
    classes, pairs = sorted(set(labels)), list(zip(labels, texts, strict=True))
    if len(pairs) < 10 or len(classes) < 2:
        raise ValueError(f"{source} has {len(pairs)} texts and {len(classes)} label(s); expected at least 10 and 2.")
    different = sorted(set(texts))  # a text listed twice must not be on both sides
    order = torch.randperm(len(different), generator=torch.Generator().manual_seed(SPLIT_SEED)).tolist()
    held_out = {different[i] for i in order[: max(1, len(different) // 5)]}
    counts = Counter(word for _, text in pairs if text not in held_out for word in _words(text))
    if not counts:
        raise ValueError(f"{source} has no words in its training texts.")
    words = Vocabulary(tuple(word for word, _ in counts.most_common(vocabulary)), tuple(classes), tokens)
    long = sum(len(_words(text)) > tokens for text in texts)
    if long:
        warnings.warn(f"{long} of {len(pairs)} texts are longer than {tokens} tokens and were cut there.", stacklevel=2)

    def batch(is_test: bool) -> Batch:
        chosen = [(label, text) for label, text in pairs if (text in held_out) == is_test]
        x, mask = words.encode([text for _, text in chosen])
        return Batch(x, torch.tensor([classes.index(label) for label, _ in chosen]), mask)

    test = batch(is_test=True)
    return Task(
        "text",
        inputs=2 + len(words.words),
        outputs=len(classes),
        draw=draw_from(batch(is_test=False)),
        held_out=first_of(test),
        chance=float(test.y.bincount().max() / test.y.numel()),
        length=tokens,
        digest=hashlib.sha256(repr(pairs).encode()).hexdigest()[:16],
        vocabulary=words,
    )
