"""The leading spectral subspace of a matrix, from its ordered real Schur form.

e^{tau M} x / |e^{tau M} x| tends to the invariant subspace E of the eigenvalues of largest REAL part, along the
(oblique, when M is not normal) spectral projector Pi (Alcalde, Bungert, Riedl, Roith, arXiv 2605.10931; THEORY 1).
Eigenvectors are not used for it: they do not exist for Jordan blocks and are meaningless near them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, qr, schur, solve_sylvester
from scipy.linalg.lapack import dtrsen, dtrsyl

Array = NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class Spectrum:
    """What e^{tau M} does to a direction for large tau; every array is float64 NumPy."""

    case: str  # "fixed", "rotating", "jordan" or "stationary"
    leading: float  # largest real part of the eigenvalues
    gap: float  # distance to the next real part; inf if E is the whole space
    gap_error: float  # what rounding alone can do to the gap; E is cut only where gap > max(tol |M|, gap_error)
    basis: Array  # (d, k) orthonormal, spans E
    projector: Array  # (d, d) Pi, onto E along the complementary invariant subspace
    limit: Array  # (d, d) the limit direction is limit @ x: Pi, or N^{q-1} Pi for a Jordan block of index q
    index: int  # q: 1 where E is semisimple
    frequencies: tuple[float, ...]  # imaginary parts b > 0 of the leading eigenvalues a +- ib
    condition: float  # |Pi|: 1 for a normal M
    tol: float

    def __repr__(self) -> str:
        return f"Spectrum({self.case}, dim E = {self.dimension}, leading {self.leading:.6g}, gap {self.gap:.6g})"

    @property
    def dimension(self) -> int:
        """dim E."""
        return self.basis.shape[1]


def spectrum(M: Array, tol: float = 1e-6) -> Spectrum:
    """Leading spectral subspace of M (d, d), cut at the first gap between real parts that exceeds its own uncertainty.

    With M = Q [[T11, T12], [0, T22]] Q^T, leading block first: T11 Y - Y T22 = -T12, Pi = Q_1 [I, -Y] Q^T.
    A gap counts when it is larger than tol |M| and larger than what rounding can make of a multiple eigenvalue,
    eps |M| |Pi|: a Jordan block of size q comes out of any eigenvalue solver as q eigenvalues eps^{1/q} apart.

    >>> spectrum(np.array([[2.0, 0.5], [0.0, 1.0]])).projector  # oblique: M is not normal
    array([[1. , 0.5],
           [0. , 0. ]])
    """
    if np.iscomplexobj(M):
        raise ValueError(f"M has dtype {np.asarray(M).dtype}, expected real entries: a linear map of real tokens.")
    M = np.asarray(M, dtype=np.float64)
    if M.ndim != 2 or M.shape[0] != M.shape[1]:
        raise ValueError(f"M has shape {M.shape}, expected a square matrix (d, d).")
    if not np.isfinite(M).all():
        raise ValueError("M has entries that are not finite; check the weights it was built from.")
    d, size = M.shape[0], float(np.linalg.norm(M, 2))
    form = schur(M, output="real")
    eigenvalues = np.diagonal(form[0])  # their real parts: a block a +- ib has a twice on its diagonal
    real = np.sort(eigenvalues)[::-1]
    for k in range(1, d):
        if (gap := float(real[k - 1] - real[k])) <= tol * size:
            continue
        cut = (real[k - 1] + real[k]) / 2
        T, Q, moved, *_, failed = dtrsen(eigenvalues > cut, *form, job="N")
        if failed or not np.array_equal(moved > cut, np.arange(d) < k):
            continue  # the reordering itself could not tell the two groups apart
        Y, scale, _ = dtrsyl(T[:k, :k], T[k:, k:], -T[:k, k:], isgn=-1)
        Pi = Q[:, :k] @ np.hstack([np.eye(k), -Y / scale]) @ Q.T
        condition = float(np.linalg.norm(Pi, 2))
        gap_error = _rounding(d) * size * condition
        if gap > gap_error:
            return _describe(T[:k, :k], Q[:, :k], Pi, size, gap, gap_error, condition, tol)
    return _describe(M, np.eye(d), np.eye(d), size, float("inf"), _rounding(d) * size, 1.0, tol)


def _rounding(d: int) -> float:
    """Relative backward error allowed to a dense eigenvalue solver: a generous multiple of d eps."""
    return 100 * d * float(np.finfo(np.float64).eps)


def _describe(
    block: Array, basis: Array, Pi: Array, size: float, gap: float, gap_error: float, condition: float, tol: float
) -> Spectrum:
    """Case of the leading block T11 = a I + A, all of whose eigenvalues have real part a up to the tolerance."""
    k = block.shape[0]
    leading = float(np.trace(block) / k)
    A = block - leading * np.eye(k)
    frequencies, nilpotent = _imaginary_parts(A, size, tol)
    index, power = 1, np.eye(k)
    if np.linalg.norm(A, 2) <= tol * size:
        case, frequencies = ("stationary" if gap == np.inf else "fixed"), ()
    elif frequencies:
        case = "jordan" if nilpotent > tol * size else "rotating"
    else:
        case = "jordan"
        index, power = _last_power(A, size, tol)
    return Spectrum(
        case=case,
        leading=leading,
        gap=gap,
        gap_error=gap_error,
        basis=basis,
        projector=Pi,
        limit=basis @ power @ basis.T @ Pi,
        index=index,
        frequencies=frequencies,
        condition=condition,
        tol=tol,
    )


def _last_power(A: Array, size: float, tol: float) -> tuple[int, Array]:
    """(q, A^{q-1}): the last power of A that is more than rounding, or than the spread of eigenvalues tol merged."""
    k, a = A.shape[0], float(np.linalg.norm(A, 2))
    spread = float(np.abs(np.linalg.eigvals(A)).max())
    merged = k * spread if spread <= tol * size else 0.0
    q, power = 1, np.eye(k)
    while q < k and np.linalg.norm(power @ A, 2) > (merged + _rounding(k) * a) * a ** (q - 1):
        q, power = q + 1, power @ A
    return q, power


def _imaginary_parts(A: Array, size: float, tol: float) -> tuple[tuple[float, ...], float]:
    """Distinct imaginary parts b > 0 of A, and the norm of its nilpotent part sum_g (A - mu_g) P_g over groups g.

    Eigenvalues are grouped until every group is further from its neighbour than tol |M| and than rounding can
    move it, eps |M| |P_g|; only then is a spread of eigenvalues a frequency and not a broken Jordan block.
    """
    k = A.shape[0]
    mu, W = np.linalg.eig(A)
    if np.linalg.cond(W) < 1e6:  # diagonalisable with room to spare: nothing to group
        b = np.sort(mu.imag[mu.imag > tol * size])
        return tuple(b[np.diff(b, prepend=-np.inf) > tol * size].tolist()), 0.0  # of a group the first
    groups = [[j] for j in range(k)]
    while len(groups) > 1:
        for g, group in enumerate(groups):
            distance, nearest = min(
                (min(abs(mu[i] - mu[j]) for i in group for j in other), h) for h, other in enumerate(groups) if h != g
            )
            P = _group_projector(A, mu, group)
            if P is None or distance <= max(tol * size, _rounding(k) * size * np.linalg.norm(P, 2)):
                groups[nearest] = groups[nearest] + group
                del groups[g]
                break
        else:
            break
    centres = [complex(mu[group].mean()) for group in groups]
    nilpotent = A.astype(complex)
    for centre, group in zip(centres, groups):
        P = _group_projector(A, mu, group)
        nilpotent = nilpotent - centre * (np.eye(k) if P is None else P)
    return tuple(sorted(c.imag for c in centres if c.imag > tol * size)), float(np.linalg.norm(nilpotent, 2))


def _group_projector(A: Array, mu: NDArray[np.complex128], group: list[int]) -> NDArray[np.complex128] | None:
    """Spectral projector of A for a group of its eigenvalues; None where they cannot be reordered to the front."""
    k, m = A.shape[0], len(group)
    if m == k:
        return np.eye(k, dtype=complex)
    rest = np.delete(mu, group)
    try:
        T, Q, found = schur(A, "complex", sort=lambda z: np.abs(mu[group] - z).min() < np.abs(rest - z).min())
    except LinAlgError:
        return None
    if found != m:
        return None
    Y = solve_sylvester(T[:m, :m], -T[m:, m:], -T[:m, m:])
    return Q[:, :m] @ np.hstack([np.eye(m), -Y]) @ Q.conj().T


def levels(M: Array, tol: float = 1e-6) -> list[tuple[float, Array, Array]]:
    """Eigenvalues of M grouped by real part, largest first: (real part, imaginary parts, orthonormal basis (d, m)).

    Used for the speeds of tokens that linger near a lower level, where a defective group may miss directions.
    """
    eigenvalues, W = np.linalg.eig(np.asarray(M, dtype=np.float64))
    order = np.argsort(-eigenvalues.real)
    eigenvalues, W = eigenvalues[order], W[:, order]
    size, found, start = float(np.linalg.norm(M, 2)), [], 0
    for stop in range(1, len(eigenvalues) + 1):
        if stop < len(eigenvalues) and eigenvalues.real[stop - 1] - eigenvalues.real[stop] <= tol * size:
            continue
        span = np.hstack([W[:, start:stop].real, W[:, start:stop].imag])
        basis, R, _ = qr(span, mode="economic", pivoting=True)
        rank = int((np.abs(np.diag(R)) > tol * abs(R[0, 0])).sum())
        group = eigenvalues[start:stop]
        found.append((float(group.real.mean()), group.imag, basis[:, :rank]))
        start = stop
    return found
