"""The spectra of every head's G, V and M = V G."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.base.figures import style
from attn_flow.prediction import spectrum

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class HeadSpectrum:
    """The spectrum of one head's M = V G.

    Args:
        layer, head: which head.
        case: the spectral case of the limit map of M, see `attn_flow.prediction.spectrum`.
        leading: the leading real part.
        gap: its distance to the next one.
        singular_G, singular_V: the singular values of G and of O V, the largest first.
        real, imaginary: the eigenvalues of M that are not zero by its rank.
    """

    layer: int
    head: int
    case: str
    leading: float
    gap: float
    singular_G: list[float]
    singular_V: list[float]
    real: list[float]
    imaginary: list[float]


def head_spectra(attentions: list[Attention]) -> list[HeadSpectrum]:
    """The spectrum of every head of every layer.

    Example:
        >>> head = head_spectra([Attention.identity(3, beta=2.0)])[0]
        >>> head.case, head.real
        ('stationary', [1.0, 1.0, 1.0])
    """
    return [
        _head_spectrum(attention.to(torch.float64), layer, head)
        for layer, attention in enumerate(attentions)
        for head in range(attention.heads)
    ]


def _head_spectrum(A: Attention, layer: int, head: int) -> HeadSpectrum:
    matrix = _small_matrix(A, head)
    limit, eigenvalues = spectrum(matrix), torch.linalg.eigvals(matrix)
    case, leading, gap = limit.case, limit.leading, limit.gap
    if len(matrix) < A.dim:  # M has the eigenvalue 0, too
        if leading <= 0:
            case, leading, gap = "undefined", 0.0, -leading  # ker M leads: tokens run into ker G
        else:
            case, gap = "fixed" if case == "stationary" else case, min(gap, leading)
    singular_G, singular_V = (torch.linalg.svdvals(z[head])[: len(matrix)].tolist() for z in (A.G, A.OV))
    real, imaginary = eigenvalues.real.tolist(), eigenvalues.imag.tolist()
    return HeadSpectrum(layer, head, case, leading, gap, singular_G, singular_V, real, imaginary)


def _small_matrix(A: Attention, head: int) -> Tensor:
    """V K^T Q O (k x k), which has the eigenvalues of M = O V K^T Q but for 0; M itself if it is not smaller."""
    if A.Q is None or A.K is None or A.V is None or A.O is None or A.Q.shape[-2] >= A.dim:
        return A.M[head]
    return A.V[head] @ A.K[head].T @ A.Q[head] @ A.O[head]


def spectra_as_json(spectra: list[HeadSpectrum]) -> dict[str, Any]:
    """The spectra as plain values."""
    return {"layers": 1 + max(head.layer for head in spectra), "heads": [asdict(head) for head in spectra]}


def spectra_figure(spectra: list[HeadSpectrum], name: str) -> Figure:
    """Eigenvalues of M = V G of every head in the complex plane, one panel per layer."""
    layers = 1 + max(head.layer for head in spectra)
    columns = min(layers, 4)
    rows = -(-layers // columns)
    with style(2.6 * columns) as pyplot:
        figure, panels = pyplot.subplots(rows, columns, figsize=(2.6 * columns, 2.5 * rows), squeeze=False)
        for axes in panels.flat[layers:]:
            axes.set_visible(False)
        for layer, axes in enumerate(panels.flat[:layers]):
            heads = [head for head in spectra if head.layer == layer]
            for i, head in enumerate(heads):
                colour = pyplot.get_cmap("viridis")(i / max(1, len(heads) - 1))
                axes.plot(head.real, head.imaginary, ".", markersize=3, color=colour)
            axes.axvline(0, color="0.6", linewidth=0.8, zorder=0)
            axes.set(title=f"layer {layer}", xlabel="real part", ylabel="imaginary" if layer % columns == 0 else "")
        figure.suptitle(f"{name}: eigenvalues of M = V G, one colour per head", x=0.01, ha="left")
    return figure
