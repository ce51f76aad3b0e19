"""What a reader looks at token by token: how badly the closure misses each, where attention goes, row against row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_flow.probe.agreement import misses
from attn_flow.probe.clouds import Clouds
from attn_flow.probe.nulls import main_closure
from attn_flow.probe.quantised import quantise

TEXTS = 4  # shown with every token coloured
ENTRIES = 600_000  # attention weights kept of the text whose rows can be looked at


@dataclass(frozen=True, eq=False)
class Reading:
    """Of the first few texts, one after the other: layers x tokens.

    missed: |predicted - computed|^2 over the text's mean |computed - mean|^2, so that 1 is no better than a constant.
    received: attention a token receives, mean over heads and queries, times n: 1 is its fair share. lengths (texts,).
    true_rows, closure_rows (layers, heads, m, m): attention weights of the first m tokens of the first text, each row
    scaled to its own sum; closure_rows is empty where the closure has no rows.
    """

    missed: Tensor
    received: Tensor
    lengths: Tensor
    true_rows: Tensor
    closure_rows: Tensor


def read_tokens(clouds: Clouds) -> Reading:
    """Look at the first texts token by token."""
    closure = main_closure(clouds)
    shown = min(TEXTS, clouds.texts)
    missed, received = [], []
    true_rows, closure_rows = [], []
    heads = clouds.attentions[0].heads
    m = min(len(clouds.special[0]), max(8, math.isqrt(ENTRIES // (clouds.layers * heads))))
    for layer in range(clouds.layers):
        row, share = [], []
        for t in range(shown):
            space = clouds.space(layer, t)
            row.append(misses(space.drift(closure.measure(space)), clouds.out[layer][t]))
            P = space.logits.softmax(-1)
            share.append(P.mean((0, 1)).double() * space.n)
            if t == 0:
                true_rows.append(P[:, :m, :m])
                if space.sees is None:
                    closure_rows.append(quantise(space).rows(space)[:, :m, :m])
        missed.append(torch.cat(row))
        received.append(torch.cat(share))
    empty = torch.zeros(0)
    return Reading(
        torch.stack(missed).float().cpu(),
        torch.stack(received).float().cpu(),
        torch.tensor([len(clouds.special[t]) for t in range(shown)]),
        torch.stack(true_rows).float().cpu(),
        torch.stack(closure_rows).float().cpu() if closure_rows else empty,
    )
