"""The leading spectral subspace of many large matrices: by Arnoldi iteration, with the Schur form where it fails."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_flow.base.processes import limit_threads
from attn_flow.prediction.spectrum import spectrum

SMALL = 64  # dimensions up to which the Schur form is as fast
KRYLOV, RESTARTED, ROUNDS = 40, 8, 30  # dimension of the Krylov space, eigenvalues kept in a restart, restarts
RTOL = 1e-6


def leading_subspace(M: Tensor) -> tuple[Tensor, Tensor]:
    """An orthonormal basis U (d, k) of the leading subspace of M (d, d), and coordinates W (k, d) with Pi = U W.

    The leading subspace E belongs to the eigenvalues with the largest real part, and Pi projects on it along the other
    invariant subspace, as in `attn_flow.prediction.spectrum`. Above dimension 64 one real eigenvalue or one complex
    pair is found, which is the generic case: right and left eigenvectors by Arnoldi iteration.

    Returns:
        U and W, in float64 on the device of M.

    Example:
        >>> U, W = leading_subspace(torch.tensor([[2.0, 0.5], [0.0, 1.0]]))
        >>> U @ W
        tensor([[1.0000, 0.5000],
                [0.0000, 0.0000]], dtype=torch.float64)
    """
    matrix = M.detach().double().cpu()
    if len(M) > SMALL:
        with limit_threads(1):  # of hundreds of products with one vector
            right, left = _leading_vectors(matrix), _leading_vectors(matrix.mT.contiguous())
            if right and left and abs(right[0] - left[0]) <= 1e-3 * abs(right[0]):
                U, rows = torch.linalg.qr(right[1])[0], left[1].mT
                return U.to(M.device), torch.linalg.solve(rows @ U, rows).to(M.device)
    limit = spectrum(M)
    return limit.basis, limit.basis.mT @ limit.direction


def _leading_vectors(matrix: Tensor) -> tuple[complex, Tensor] | None:
    """The eigenvalue with the largest real part, the upper one of a pair, and the real span (d, 1 or 2) of its vector.

    Arnoldi iteration, restarted with the leading Ritz vectors. None if it does not converge, or if the eigenvalue is 0,
    whose space may have any dimension.
    """
    d, known = len(matrix), 0
    basis, images = matrix.new_zeros(KRYLOV + 1, d), matrix.new_zeros(KRYLOV, d)
    start = torch.randn(d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    basis[0] = start / start.norm()
    for _ in range(ROUNDS):
        for j in range(known, KRYLOV):
            w = images[j] = matrix @ basis[j]
            for _ in range(2):  # a second time against rounding
                w = w - (basis[: j + 1] @ w) @ basis[: j + 1]
            basis[j + 1] = w / w.norm().clamp_min(1e-300)
        values, vectors = torch.linalg.eig(basis[:KRYLOV] @ images.mT)
        order = values.real.argsort(descending=True)
        order = order[values.imag[order] >= 0][:RESTARTED]
        value, vector = complex(values[order[0]]), vectors[:, order[0]]
        ritz, image = vector @ basis[:KRYLOV].to(vector), vector @ images.to(vector)
        if float((image - value * ritz).norm()) <= RTOL * abs(value):
            is_real = abs(value.imag) <= RTOL * abs(value)
            span = ritz.real[:, None] if is_real else torch.stack([ritz.real, ritz.imag], 1)
            return None if abs(value) <= RTOL * float(matrix.abs().max()) else (value, span)
        pairs = values.imag[order] > 0
        Q = torch.linalg.qr(torch.cat([vectors[:, order].real, vectors[:, order[pairs]].imag], 1))[0]
        known = Q.shape[1]
        images[:known] = Q.mT @ images
        basis[: known + 1] = torch.cat([Q.mT @ basis[:KRYLOV], basis[KRYLOV:]])
    return None
