"""The regime of each head: how sharply it attends, its spectrum, and where the closure holds."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.prediction.spectral import spectrum
from attn_flow.probe.closures import HeadSpace, closure, head_space
from attn_flow.probe.clouds import Clouds
from attn_flow.probe.limit_law import CASES


def head_regimes(clouds: Clouds) -> dict[str, Tensor]:
    """Layers x heads: how each attends, its spectrum, and the cosine of the closure with what it computes.

    entropy (of the weights, as a fraction of log n), largest (weight), logit_std, effective_beta (beta mean|G x|
    mean|y|, the beta of the unit sphere with G = I), self_argmax (how often a token is its own best match), closure.
    """
    found: dict[str, list[Tensor]] = {}
    spectra = []
    for level, A in enumerate(clouds.attentions):
        rows = [_one_text(head_space(A, x, special)) for x, special in zip(clouds.z[level], clouds.special)]
        for name in rows[0]:
            found.setdefault(name, []).append(torch.stack([row[name] for row in rows]).double().mean(0))
        spectra.append([_head_spectrum(A, h) for h in range(A.heads)])
    numbers = {f"head/{name}": torch.stack(values) for name, values in found.items()}
    numbers["head/leading"] = torch.tensor([[s[0] for s in row] for row in spectra], dtype=torch.float64)
    numbers["head/gap"] = torch.tensor([[s[1] for s in row] for row in spectra], dtype=torch.float64)
    numbers["head_case"] = torch.tensor([[CASES.index(s[2]) for s in row] for row in spectra])
    return numbers


def _one_text(space: HeadSpace) -> dict[str, Tensor]:
    """The numbers of one text, each (heads,)."""
    A, x = space.attention, space.x
    assert A.K is not None  # filled in by `head_space`
    k, n = A.Q.shape[-2], len(x)
    beta = torch.as_tensor(A.beta, dtype=x.dtype, device=x.device).expand(A.heads)
    q, keys, values = space.g[..., :k], space.y[..., :k], space.y[..., k:]
    W = A.matrix(x)
    computed, predicted = W @ values, space.per_head(closure(space))
    return {
        "entropy": torch.special.entr(W).sum(-1).mean(-1) / math.log(n),
        "largest": W.amax(-1).mean(-1),
        "logit_std": beta * (q @ keys.mT).std(-1).mean(-1),
        "effective_beta": beta * (q @ A.K).norm(dim=-1).mean(-1) * x.norm(dim=-1).mean(),
        "self_argmax": (W.argmax(-1) == torch.arange(n, device=x.device)).double().mean(-1),
        "closure": torch.nn.functional.cosine_similarity(predicted, computed, dim=-1).mean(-1),
    }


def _head_spectrum(A: Attention, h: int) -> tuple[float, float, str]:
    """Leading real part, gap and case of M_h = O V K^T Q, from V K^T Q O (k x k): the same but for 0."""
    part = A.to(torch.float64)
    small = _small(part, h)
    found = spectrum(small.cpu().numpy())
    if found.leading <= 0 and small.shape[0] < part.dim:
        return 0.0, -found.leading, "undefined"  # ker M leads: tokens run into ker G
    return found.leading, found.gap, found.case


def _small(A: Attention, h: int) -> Tensor:
    """V K^T Q O (k x k) where the head has low rank, else M_h itself."""
    if A.K is None or A.V is None or A.O is None or A.Q.shape[-2] >= A.dim:
        return A.M[h]
    return A.V[h] @ A.K[h].T @ A.Q[h] @ A.O[h]


def spectra(found: list[Attention]) -> dict[str, Any]:
    """Every head's nonzero eigenvalues of M = V G and singular values of G and V, with the case of M: plain lists."""
    heads = []
    for level, A in enumerate(found):
        part = A.to(torch.float64)
        for h in range(A.heads):
            leading, gap, case = _head_spectrum(A, h)
            G, V = (torch.linalg.svdvals(matrix[h]) for matrix in (part.G, part.values))
            rank = A.Q.shape[-2]
            eigenvalues = torch.linalg.eigvals(_small(part, h))
            heads.append(
                {
                    "layer": level,
                    "head": h,
                    "case": case,
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
