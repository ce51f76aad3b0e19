"""The leading spectral subspace of many large matrices: by Arnoldi iteration, with the Schur form where it fails."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse.linalg import ArpackError, ArpackNoConvergence, eigs
from torch import Tensor

from attn_flow.prediction.spectrum import Array, spectrum

SMALL = 64  # dimensions up to which the Schur form is as fast
KRYLOV = 40  # dimension of the Krylov space
RTOL = 1e-6


def leading_subspace(M: Tensor) -> tuple[Tensor, Tensor]:
    """An orthonormal basis U (d, k) of the leading subspace of M (d, d), and coordinates W (k, d) with Pi = U W.

    The leading subspace E belongs to the eigenvalues with the largest real part, and Pi projects on it along the other
    invariant subspace, as in `attn_flow.prediction.spectrum`. Above dimension 64 one real eigenvalue or one complex
    pair is found, which is the generic case: right and left eigenvectors by Arnoldi iteration.

    Args:
        M: a real matrix (d, d).

    Returns:
        U and W, in float64 on the device of M.

    Example:
        >>> U, W = leading_subspace(torch.tensor([[2.0, 0.5], [0.0, 1.0]]))
        >>> U @ W
        tensor([[1.0000, 0.5000],
                [0.0000, 0.0000]], dtype=torch.float64)
    """
    right = left = None
    if len(M) > SMALL:
        matrix = M.detach().double().cpu().numpy()
        right, left = _leading_vectors(matrix), _leading_vectors(np.ascontiguousarray(matrix.T))
    if right is None or left is None or not _agree(right, left):
        limit = spectrum(M)
        return limit.basis, limit.basis.mT @ limit.direction
    U, rows = np.linalg.qr(right[1])[0], left[1].T
    W = np.ascontiguousarray(np.linalg.solve(rows @ U, rows))
    return torch.from_numpy(U).to(M.device), torch.from_numpy(W).to(M.device)


def _leading_vectors(matrix: Array) -> tuple[complex, Array] | None:
    """The eigenvalue with the largest real part and the real span (d, 1 or 2) of its eigenvector."""
    start = np.random.default_rng(0).standard_normal(len(matrix))
    try:
        values, vectors = eigs(matrix, k=2, which="LR", ncv=KRYLOV, tol=RTOL, v0=start)
    except (ArpackNoConvergence, ArpackError):
        return None
    i = int(np.argmax(values.real))
    value, vector = complex(values[i]), vectors[:, i]
    if abs(value) <= RTOL * np.abs(matrix).max():
        return None  # a kernel has any dimension
    if abs(value.imag) <= RTOL * abs(value):
        return value, np.ascontiguousarray(vector.real[:, None])
    return value, np.stack([vector.real, vector.imag], 1)


def _agree(right: tuple[complex, Array], left: tuple[complex, Array]) -> bool:
    """Whether both iterations found the same eigenvalue, up to conjugation."""
    a, b = right[0], left[0]
    return right[1].shape == left[1].shape and abs(complex(a.real, abs(a.imag)) - complex(b.real, abs(b.imag))) <= (
        1e-3 * abs(a)
    )
