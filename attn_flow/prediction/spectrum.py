"""The leading spectral subspace of a matrix, from its ordered real Schur form.

The direction of e^{tau M} x tends to the invariant subspace E of the eigenvalues with the largest real part, along
the spectral projector Pi, which is oblique unless M is normal (arXiv 2605.10931). The Schur form is used
because eigenvectors do not exist for Jordan blocks and are inaccurate near them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import schur
from scipy.linalg.lapack import dtrsen, dtrsyl
from torch import Tensor

from attn_flow.base import checks

Array = NDArray[np.float64]
ROUNDING = 100 * float(np.finfo(np.float64).eps)  # times d: a generous backward error of a dense eigenvalue solver


@dataclass(frozen=True, eq=False, repr=False)
class Spectrum:
    """What e^{tau M} does to the direction of a vector for large tau. Tensors are float64.

    Attributes:
        case: "fixed" (directions converge), "rotating" (complex leading eigenvalues), "jordan" (the leading
            eigenvalue is defective) or "stationary" (M is a multiple of the identity).
        leading: the largest real part of the eigenvalues of M.
        gap: its distance to the next real part; infinite if E is the whole space.
        basis: (d, k), an orthonormal basis of E.
        projector: Pi (d, d), the projector onto E along the complementary invariant subspace.
        direction: (d, d); x tends to the direction of direction @ x. It is Pi, or N^{q-1} Pi at a Jordan block.
        index: the size q of the largest leading Jordan block, 1 if there is none.
        frequencies: the imaginary parts b > 0 of the leading eigenvalues a +- ib.
    """

    case: str
    leading: float
    gap: float
    basis: Tensor
    projector: Tensor
    direction: Tensor
    index: int = 1
    frequencies: tuple[float, ...] = ()

    def __repr__(self) -> str:
        return f"Spectrum({self.case}, dim E = {self.dimension}, leading {self.leading:.6g}, gap {self.gap:.6g})"

    @property
    def dimension(self) -> int:
        """The dimension k of E."""
        return self.basis.shape[1]

    @property
    def limit_basis(self) -> Tensor:
        """An orthonormal basis of the image of `direction`: E, or at a Jordan block the part of E where tokens go."""
        U, sizes, _ = torch.linalg.svd(self.direction)
        return U[:, sizes > 1e-6 * sizes[0]]


def spectrum(M: Tensor, tol: float = 1e-6) -> Spectrum:
    """The leading spectral subspace of a real matrix (d, d).

    E is cut at the first gap between real parts that is larger than tol |M| and larger than what rounding makes of a
    multiple eigenvalue, eps |M| |Pi|: a Jordan block of size q comes out of any solver as q eigenvalues eps^{1/q}
    apart. With M = Q [[T11, T12], [0, T22]] Q^T, leading block first, Pi = Q_1 [I, -Y] Q^T, T11 Y - Y T22 = -T12.

    Example:
        >>> spectrum(torch.tensor([[2.0, 0.5], [0.0, 1.0]])).projector  # oblique: M is not normal
        tensor([[1.0000, 0.5000],
                [0.0000, 0.0000]], dtype=torch.float64)
    """
    checks.require_floating("M", M)
    if M.ndim != 2 or M.shape[0] != M.shape[1]:
        raise ValueError(f"M has shape {tuple(M.shape)}, expected a square matrix (d, d).")
    checks.require_finite("M", M)
    A = M.detach().double().cpu().numpy()  # LAPACK's reordering of the Schur form exists on the CPU only
    d, size = A.shape[0], float(np.linalg.norm(A, 2))
    form = schur(A, output="real")
    diagonal = np.diagonal(form[0])  # the real parts: a block a +- ib has a twice on its diagonal
    real = np.sort(diagonal)[::-1]
    block, basis, Pi, gap = A, np.eye(d), np.eye(d), math.inf  # E is everything unless there is a gap
    for k in range(1, d):
        if real[k - 1] - real[k] <= tol * size:
            continue
        cut = (real[k - 1] + real[k]) / 2
        T, Q, order, *_, error = dtrsen(diagonal > cut, *form, job="N")
        if error or not np.array_equal(order > cut, np.arange(d) < k):
            continue  # the reordering could not separate the two groups
        Y, scale, _ = dtrsyl(T[:k, :k], T[k:, k:], -T[:k, k:], isgn=-1)
        projector = Q[:, :k] @ np.hstack([np.eye(k), -Y / scale]) @ Q.T
        if real[k - 1] - real[k] > ROUNDING * d * size * np.linalg.norm(projector, 2):
            block, basis, Pi, gap = T[:k, :k], Q[:, :k], projector, float(real[k - 1] - real[k])
            break
    leading, k = float(np.trace(block) / len(block)), len(block)
    case, frequencies, index, power = _leading_block(block - leading * np.eye(k), size, tol)
    case = "stationary" if case == "fixed" and gap == math.inf else case
    E, P, direction = (torch.tensor(B, device=M.device) for B in (basis, Pi, basis @ power @ basis.T @ Pi))
    return Spectrum(case, leading, gap, E, P, direction, index, frequencies)


def _leading_block(A: Array, size: float, tol: float) -> tuple[str, tuple[float, ...], int, Array]:
    """The case, frequencies, Jordan index q and A^{q-1} of the leading block a I + A, of eigenvalues a + i b."""
    k, norm = len(A), float(np.linalg.norm(A, 2))
    if norm <= tol * size:
        return "fixed", (), 1, np.eye(k)
    mu, vectors = np.linalg.eig(A)
    is_defective = np.linalg.cond(vectors) > 1e6
    # The eigenvalues of a Jordan block of size q <= k come out of the solver eps^{1/q} apart.
    spread = size * ((ROUNDING * k) ** (1 / k) if is_defective else tol)
    imag = np.sort(mu.imag[mu.imag > max(spread, tol * size)])
    if len(imag):
        groups = np.split(imag, np.flatnonzero(np.diff(imag) > spread) + 1)
        return "jordan" if is_defective else "rotating", tuple(float(b.mean()) for b in groups), 1, np.eye(k)
    # The last power of A that is above rounding and above the spread of eigenvalues merged by tol.
    merged = float(np.abs(mu).max())
    least = ROUNDING * k * norm + (k * merged if merged <= tol * size else 0.0)
    q, power = 1, np.eye(k)
    while q < k and np.linalg.norm(power @ A, 2) > least * norm ** (q - 1):
        q, power = q + 1, power @ A
    return "jordan", (), q, power
