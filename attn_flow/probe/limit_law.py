"""The limiting law of each layer, and whether the cloud comes nearer to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.measures import Cloud
from attn_flow.observe import quantities
from attn_flow.prediction.spectral import Spectrum, spectrum
from attn_flow.probe.clouds import Clouds, directions
from attn_flow.probe.push import rotated
from attn_flow.transport.distances import wasserstein

CASES = ("fixed", "rotating", "jordan", "stationary", "undefined", "nonlinear")


def case_names(codes: Tensor) -> list[str]:
    return [CASES[int(code)] for code in codes]


def layer_matrix(attention: Attention, cov: Tensor) -> Tensor:
    """M = sum_h beta_h V_h S G_h, (d, d): the heads together, under the Gaussian closure with the cloud's covariance S.

    Heads with a Gaussian law add up linearly, x' = P_x M x (centred part), so that one spectral projector gives the
    limit; the zero-temperature flow of several heads is nonlinear and has none.
    """
    A = attention.to(torch.float64)
    beta = torch.as_tensor(A.beta, dtype=torch.float64, device=A.Q.device).expand(A.heads)
    return torch.einsum("h,hab,bc,hcd->ad", beta, A.values, cov.double(), A.G)


def approach_to_limits(clouds: Clouds, generator: torch.Generator) -> dict[str, Tensor]:
    """W2 of the cloud after a layer to the push-forward of the cloud before it, relative to where it started.

    Clouds are compared as directions, text by text. "input" is the same for the cloud at the encoder's input; "null"
    the ratio with G rotated; E and V the squared length inside the leading subspaces of M and of the values' sum.
    "curve" (layers + 1, texts) is W2 of every level to the push-forward of the input under the last layer's limit map.
    """
    L, T = clouds.layers, clouds.texts
    names = (
        "w2_before",
        "w2_after",
        "w2_input",
        "w2_input_after",
        "w2_null",
        "E_before",
        "E_after",
        "V_before",
        "V_after",
    )
    found = {name: torch.zeros(L, T, dtype=torch.float64) for name in names}
    predicted: list[Spectrum] = []
    curve = torch.zeros(L + 1, T, dtype=torch.float64)
    for level, A in enumerate(clouds.attentions):
        cov = Cloud(torch.cat(clouds.z[level]).double()).moments()[1]
        M = layer_matrix(A, cov)
        E = _spectrum(M)
        P, P_null = _limit_map(M, E), _limit_map(layer_matrix(rotated(A, generator), cov))
        V = _spectrum(A.to(torch.float64).values.sum(0))
        predicted.append(E)
        for t in range(T):
            first, before, after = (directions(clouds.z[i][t]) for i in (0, level, level + 1))
            row: dict[str, Any] = {
                "w2_before": wasserstein(before, P(before)),
                "w2_after": wasserstein(after, P(before)),
                "w2_input": wasserstein(first, P(first)),
                "w2_input_after": wasserstein(after, P(first)),
                "w2_null": wasserstein(after, P_null(before)) / wasserstein(before, P_null(before)),
                "E_before": _inside(before, E.basis),
                "E_after": _inside(after, E.basis),
                "V_before": _inside(before, V.basis),
                "V_after": _inside(after, V.basis),
            }
            for name, value in row.items():
                found[name][level, t] = float(value)
    for t in range(T):
        target = P(directions(clouds.z[0][t]))  # of the last layer, for the whole path through the encoder
        for level in range(L + 1):
            curve[level, t] = wasserstein(directions(clouds.z[level][t]), target)
    numbers = {f"limit/{name}": value for name, value in found.items()}
    numbers["limit/curve"] = curve
    numbers["limit_case"] = torch.tensor([CASES.index(E.case) for E in predicted])
    numbers["limit/dimension"] = torch.tensor([float(E.dimension) for E in predicted], dtype=torch.float64)
    numbers["limit/gap"] = torch.tensor([E.gap for E in predicted], dtype=torch.float64)
    return numbers


def _spectrum(M: Tensor) -> Spectrum:
    return spectrum(M.detach().cpu().numpy())


def _limit_map(M: Tensor, found: Spectrum | None = None) -> Callable[[Tensor], Tensor]:
    """P(x) = Pi x/|Pi x| of x' = P_x M x; a rotating pair as it stands one layer on, e^M Pi x."""
    found = _spectrum(M) if found is None else found
    A = torch.from_numpy(found.limit.copy()).to(M)
    if found.frequencies:
        shifted = M - found.leading * torch.eye(len(M), dtype=M.dtype, device=M.device)
        A = torch.linalg.matrix_exp(shifted) @ torch.from_numpy(found.projector.copy()).to(M)
    return lambda x: directions(x @ A.mT)


def _inside(x: Tensor, basis: NDArray[np.float64]) -> float:
    """Mean squared length of the part of unit vectors inside a subspace."""
    return float(quantities.alignment(x, torch.from_numpy(basis.copy())).mean())
