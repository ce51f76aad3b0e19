"""The regime of each head: how sharply it attends, its spectrum, and how well the closure fits it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.observe.quantities import effective_beta
from attn_flow.prediction import spectrum
from attn_flow.probe.agreement import compare
from attn_flow.probe.clouds import Clouds
from attn_flow.probe.head_space import HeadSpace
from attn_flow.probe.limit_law import CASES
from attn_flow.probe.nulls import main_closure

TEXTS = 8  # on which heads are looked at


@dataclass(frozen=True, eq=False)
class HeadRegimes:
    """Layers x heads, means over texts.

    entropy, largest_weight, logit_std, effective_beta: see `sharpness`. explained: variance of the head's average that
    the closure explains. leading, gap, case: of the spectrum of M_h = V_h G_h.
    """

    entropy: Tensor
    largest_weight: Tensor
    logit_std: Tensor
    effective_beta: Tensor
    explained: Tensor
    leading: Tensor
    gap: Tensor
    case: Tensor

    @property
    def cases(self) -> list[list[str]]:
        return [[CASES[int(code)] for code in row] for row in self.case]


def head_regimes(clouds: Clouds) -> HeadRegimes:
    """How every head of every layer attends, its spectrum, and the variance of it that the closure explains."""
    closure = main_closure(clouds)
    found: dict[str, list[list[Tensor]]] = {}
    spectra = []
    for layer, A in enumerate(clouds.attentions):
        rows: dict[str, list[Tensor]] = {}
        for t in range(min(TEXTS, clouds.texts)):
            space = clouds.space(layer, t)
            computed = space.logits.softmax(-1) @ space.y[..., space.k :]
            predicted = space.per_head(closure.measure(space))
            explained = torch.stack([compare(p, c).explained for p, c in zip(predicted, computed)])
            for name, value in {**sharpness(space), "explained": explained}.items():
                rows.setdefault(name, []).append(value.double().cpu())
        for name, values in rows.items():
            found.setdefault(name, []).append(values)
        spectra.append([_head_spectrum(A, h) for h in range(A.heads)])
    means = {name: torch.stack([torch.stack(v).mean(0) for v in layers]) for name, layers in found.items()}
    leading, gap, case = (torch.tensor([[s[i] for s in row] for row in spectra], dtype=torch.float64) for i in range(3))
    return HeadRegimes(**means, leading=leading, gap=gap, case=case)


def sharpness(space: HeadSpace) -> dict[str, Tensor]:
    """How sharply heads attend, means over queries (heads,): entropy over log n, largest weight, spread of logits.

    From all that enters the scores, places too, over the keys that a query sees. And `effective_beta`, of contents
    alone.
    """
    logits = space.logits.double()
    P, seen = logits.softmax(-1), logits.isfinite()
    count, shown = seen.sum(-1, keepdim=True), torch.where(seen, logits, 0.0)
    centred = torch.where(seen, shown - shown.sum(-1, keepdim=True) / count, 0.0)
    return {
        "entropy": torch.special.entr(P).sum(-1).mean(-1) / math.log(space.n),
        "largest_weight": P.amax(-1).mean(-1),
        "logit_std": (centred.square().sum(-1, keepdim=True) / count).sqrt().mean((-2, -1)),
        "effective_beta": effective_beta(space.attention, space.x),
    }


def _head_spectrum(A: Attention, h: int) -> tuple[float, float, int]:
    """Leading real part, gap and case of M_h = O V K^T Q, from V K^T Q O (k x k): the same but for 0."""
    part = A.to(torch.float64)
    small = _small(part, h)
    found = spectrum(small)
    if small.shape[0] == part.dim:
        return found.leading, found.gap, CASES.index(found.case)
    if found.leading <= 0:
        return 0.0, -found.leading, CASES.index("undefined")  # ker M leads: tokens run into ker G
    # The 0 of ker M is an eigenvalue, too: nothing stays where it is, and no gap is wider than the leading one.
    case = "fixed" if found.case == "stationary" else found.case
    return found.leading, min(found.gap, found.leading), CASES.index(case)


def _small(A: Attention, h: int) -> Tensor:
    """V K^T Q O (k x k) where the head has low rank, else M_h itself."""
    if A.Q is None or A.K is None or A.V is None or A.O is None or A.Q.shape[-2] >= A.dim:
        return A.M[h]
    return A.V[h] @ A.K[h].T @ A.Q[h] @ A.O[h]


def head_spectra(found: list[Attention]) -> dict[str, Any]:
    """Every head's nonzero eigenvalues of M = V G and singular values of G and V, with the case of M: plain lists."""
    heads = []
    for layer, A in enumerate(found):
        part = A.to(torch.float64)
        for h in range(A.heads):
            leading, gap, case = _head_spectrum(A, h)
            G, V = (torch.linalg.svdvals(matrix[h]) for matrix in (part.G, part.OV))
            rank = A.tensors["Q"].shape[-2]
            eigenvalues = torch.linalg.eigvals(_small(part, h))
            heads.append(
                {
                    "layer": layer,
                    "head": h,
                    "case": CASES[case],
                    "leading": leading,
                    "gap": gap,
                    "norm_G": float(G[0]),
                    "norm_V": float(V[0]),
                    "singular_G": G[:rank].tolist(),
                    "singular_V": V[:rank].tolist(),
                    "real": eigenvalues.real.tolist(),
                    "imaginary": eigenvalues.imag.tolist(),
                }
            )
    return {"layers": len(found), "heads": heads}
