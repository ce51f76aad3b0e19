"""What the report shows token by token: where tokens attend, how widely, and which tokens receive attention."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from attn_flow.probe.recording import Recording

SHOWN_TEXTS = 4
DECORATION = 4  # so many equal signs in a row are a line, not words
WEIGHTS = 600_000  # attention weights kept, all of the first text


@dataclass(frozen=True, eq=False)
class Reading:
    """A few texts, one after another on the axis of tokens.

    Args:
        texts: their numbers in the recording.
        lengths: their numbers of tokens.
        keys: (layers, heads, tokens), exp(entropy) of a query's attention: over how many keys it is spread.
        received: (layers, tokens), attention that a token receives over its fair share 1, mean over heads and queries.
        weights: (layers, heads, m, m), attention among the first m tokens of the first of these texts.
    """

    texts: Tensor
    lengths: Tensor
    keys: Tensor
    received: Tensor
    weights: Tensor


def read_tokens(recording: Recording) -> Reading:
    """Read the first texts, those that begin with words before others."""
    order = sorted(range(recording.texts), key=lambda t: not begins_with_words(recording.tokens[t]))
    texts = order[:SHOWN_TEXTS]
    heads = recording.attentions[0].heads
    m = min(len(recording.special[texts[0]]), max(8, math.isqrt(WEIGHTS // (recording.layers * heads))))
    keys, received, weights = [], [], []
    for layer in range(recording.layers):
        rows = [recording.heads(layer, t).logits.softmax(-1).double().cpu() for t in texts]
        keys.append(torch.cat([torch.special.entr(P).sum(-1).exp() for P in rows], -1))
        received.append(torch.cat([P.mean((0, 1)) * P.shape[-1] for P in rows]))
        weights.append(rows[0][:, :m, :m])
    lengths = torch.tensor([len(recording.special[t]) for t in texts])
    return Reading(torch.tensor(texts), lengths, torch.stack(keys), torch.stack(received), torch.stack(weights))


def begins_with_words(tokens: list[str]) -> bool:
    """Whether a text begins with words, and not with a line of asterisks or the like.

    >>> begins_with_words(["[CLS]", *"****", "the"]), begins_with_words(["[CLS]", "the", "cat"])
    (False, True)
    """
    return not any(length >= DECORATION for _, length in _repeats(tokens[:32]))


def as_words(tokens: list[str]) -> list[tuple[str, bool]]:
    """Every token as it reads, and whether it continues the word before it.

    Knows the marks of WordPiece (##), SentencePiece and byte-level vocabularies; others are left as they are. A line of
    equal signs is shown by its first one with their number, and "" for the others.

    >>> as_words(["tab", "##ula", "rasa", *"===="])
    [('tab', False), ('ula', True), ('rasa', False), ('= ×4', False), ('', True), ('', True), ('', True)]
    """
    special = re.compile(r"\[\w+\]|<[^>]+>")
    marks = "".join(mark for mark in "▁Ġ" if any(token.startswith(mark) for token in tokens))
    words, is_first = [], True
    for token in tokens:
        if marks:
            starts = is_first or token[:1] in marks or bool(special.fullmatch(token))
            words.append((token.lstrip(marks) or " ", not starts))
            is_first = bool(special.fullmatch(token))
        else:
            continues = len(token) > 2 and token.startswith("##")
            words.append((token[2:], True) if continues else (token, False))
    for start, length in _repeats(tokens):
        if length >= DECORATION:
            words[start] = (f"{words[start][0]} ×{length}", words[start][1])
            words[start + 1 : start + length] = [("", True)] * (length - 1)
    return words


def _repeats(tokens: list[str]) -> list[tuple[int, int]]:
    """(start, length) of the runs of one and the same sign."""
    runs, start = [], 0
    for token, group in groupby(tokens):
        length = len(list(group))
        if not any(c.isalnum() for c in token):
            runs.append((start, length))
        start += length
    return runs
