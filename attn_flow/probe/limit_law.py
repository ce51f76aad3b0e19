"""Does a layer bring its cloud nearer to the limiting law of its weights? With the power to say no.

Under the Gaussian closure with the texts' mean m and covariance S the heads add up to an affine drift,
    F(x) = M x + c,   M = sum_h beta_h V_h S G_h,   c = sum_h V_h (m + beta_h S K_h^T b_h) + constant drift,
and the theorem's flow x' = P_x M x has the limit map P(x) = Pi x/|Pi x|. It speaks of one head, unchanging weights and
no c, feed-forward part or norm gain; what they do shows as the distance between a layer and "if theory held".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.measures import Cloud, Gaussian
from attn_flow.prediction import Spectrum, spectrum
from attn_flow.probe.clouds import Clouds, directions
from attn_flow.probe.nulls import rotated
from attn_flow.probe.transports import w2

CASES = ("fixed", "rotating", "jordan", "stationary", "undefined", "nonlinear")
TEXTS = 16  # on which distances are measured; the covariance is that of all


@dataclass(frozen=True, eq=False)
class LimitLaw:
    """Distances to the limiting law, text by text; (layers, texts) unless said.

    real: W2(cloud after the layer, P before) / W2(before, P before). if_held: the same after x + M x in the layer's
    place. real_rotated: towards the limit of a rotated G. cosine: of what attention adds with M x + c, both
    tangential; cosine_without_c: with M x alone; block_cosine: of the whole block's displacement, feed-forward part and
    norm included, with M x + c. size_of_Mx, size_of_c: over |x|. stability (layers,): overlap of E from the two halves
    of the texts, 1 for the same subspace. case, dimension, gap (layers,): of the limit map.
    """

    real: Tensor
    if_held: Tensor
    real_rotated: Tensor
    cosine: Tensor
    cosine_without_c: Tensor
    block_cosine: Tensor
    size_of_Mx: Tensor
    size_of_c: Tensor
    stability: Tensor
    case: Tensor
    dimension: Tensor
    gap: Tensor

    @property
    def cases(self) -> list[str]:
        return [CASES[int(code)] for code in self.case]


def affine_drift(attention: Attention, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """M (d, d) and c (d,) of F(x) = M x + c, all heads together, under the Gaussian closure."""
    A = attention.to(torch.float64)
    beta = torch.as_tensor(A.beta, dtype=torch.float64, device=A.G.device).expand(A.heads)
    M = torch.einsum("h,hab,bc,hcd->ad", beta, A.OV, cov.double(), A.G)
    mu = Gaussian(mean.double(), cov.double())
    c = Attention(A.Q, A.K, A.V, A.O, A.beta, query_bias=A.query_bias, value_bias=A.value_bias).drift(
        torch.zeros_like(mean.double())[None], mu
    )[0]
    return M, c


def limit_matrix(limit: Spectrum, M: Tensor) -> Tensor:
    """The matrix (d, d) along whose images tokens end under x' = P_x M x: Pi, or Pi e^M, at time 1, where it turns."""
    return limit.projector @ torch.linalg.matrix_exp(M) if limit.frequencies else limit.direction


def approach_to_limits(clouds: Clouds, generator: torch.Generator, method: str = "auto") -> LimitLaw:
    """The numbers of `LimitLaw`; distances by the solver `method` of attn_flow.transport."""
    T = min(TEXTS, clouds.texts)
    per_text: dict[str, list[list[float]]] = {}
    per_layer: dict[str, list[float]] = {name: [] for name in ("stability", "case", "dimension", "gap")}
    for layer, A in enumerate(clouds.attentions):
        z = clouds.z[layer]
        moments = Cloud(torch.cat(z).double()).moments()
        M, c = affine_drift(A, *moments)
        M_rotated = affine_drift(rotated(A, generator), *moments)[0]
        P = spectrum(M)
        ends = limit_matrix(P, M), limit_matrix(spectrum(M_rotated), M_rotated)
        rows = [
            _distances(z[t], clouds.z[layer + 1][t], M, *ends, method)
            | _displacements(z[t], clouds.out[layer][t], clouds.z[layer + 1][t], M, c)
            for t in range(T)
        ]
        for name in rows[0]:
            per_text.setdefault(name, []).append([row[name] for row in rows])
        halves = [torch.cat(z[i::2]).double() for i in range(2)] if clouds.texts > 1 else []
        bases = [spectrum(affine_drift(A, *Cloud(x).moments())[0]).basis for x in halves]
        per_layer["stability"].append(_overlap(bases))
        per_layer["case"].append(CASES.index(P.case))
        per_layer["dimension"].append(float(P.dimension))
        per_layer["gap"].append(P.gap)
    found = {name: torch.tensor(v, dtype=torch.float64) for name, v in {**per_text, **per_layer}.items()}
    return LimitLaw(**found)


def _distances(
    before: Tensor, after: Tensor, M: Tensor, end: Tensor, end_rotated: Tensor, method: str
) -> dict[str, float]:
    """Distances to the limiting law in units of the distance before the layer; `end` takes tokens to it."""
    x, x_after, held = directions(before), directions(after), directions(before.double() + before.double() @ M.mT)

    def ratios(matrix: Tensor, *clouds: Tensor) -> list[float]:
        target = directions(x @ matrix.mT)
        start = w2(x, target, method)
        return [w2(cloud, target, method) / start for cloud in clouds]

    real, if_held = ratios(end, x_after, held)
    return {"real": real, "if_held": if_held, "real_rotated": ratios(end_rotated, x_after)[0]}


def _displacements(before: Tensor, pushed: Tensor, after: Tensor, M: Tensor, c: Tensor) -> dict[str, float]:
    x, linear, size = directions(before), before.double() @ M.mT, before.double().norm(dim=-1)

    def cosine(a: Tensor, b: Tensor) -> float:
        return float(torch.nn.functional.cosine_similarity(_tangent(x, a), _tangent(x, b), dim=-1).mean())

    return {
        "cosine": cosine(pushed.double(), linear + c),
        "cosine_without_c": cosine(pushed.double(), linear),
        "block_cosine": cosine(directions(after) - x, linear + c),
        "size_of_Mx": float((linear.norm(dim=-1) / size).mean()),
        "size_of_c": float((c.norm() / size).mean()),
    }


def _tangent(x: Tensor, v: Tensor) -> Tensor:
    return v - (v * x).sum(-1, keepdim=True) * x


def _overlap(bases: list[Tensor]) -> float:
    """|U^T W|^2 / max(dim): 1 where two subspaces are the same; NaN where there is only one text."""
    if len(bases) < 2:
        return float("nan")
    U, W = bases[0], bases[1]
    return float((U.mT @ W).square().sum()) / max(U.shape[1], W.shape[1])
