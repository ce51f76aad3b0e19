"""The flow that the weights of a layer make of tokens whose distribution is Gaussian, and where it leads."""

from __future__ import annotations

from inspect import signature

import numpy as np
import torch
from scipy.sparse.linalg import ArpackError, LinearOperator, eigs
from torch import Tensor

from attn_flow.attention.attention import Attention
from attn_flow.base.processes import limit_threads
from attn_flow.prediction.spectrum import spectrum

SMALL = 64  # dimensions up to which the Schur form is as fast as Arnoldi iteration
RTOL = 1e-6  # of eigenvalues
# scipy 1.17 and later restart an iteration that broke down with random numbers: the same ones in every run.
SEED = {"rng": 0} if "rng" in signature(eigs).parameters else {}


def read_weights(attention: Attention, dtype: torch.dtype, device: torch.device) -> Attention:
    """The same attention in another dtype, with identity matrices written out and one beta per head."""
    identity = torch.eye(attention.dim)
    matrices = {name: getattr(attention, name) for name in ("Q", "K", "V", "O")}
    written = {
        name: (identity if matrix is None else matrix).to(device, dtype).expand(attention.heads, -1, -1)
        for name, matrix in matrices.items()
    }
    beta = torch.as_tensor(attention.beta, dtype=dtype, device=device).expand(attention.heads)
    return attention.copy_with(**written, beta=beta)


def rotate(attention: Attention, R: Tensor) -> Attention:
    """Attention with R^T G_h R in place of G_h for all heads: the same spectrum in other directions."""
    Q, K = ((z.reshape(-1, len(R)) @ R).view(z.shape) for z in (attention.tensors["Q"], attention.tensors["K"]))
    return attention.copy_with(Q=Q, K=K)


class GaussianFlow:
    """What the heads of a layer add to a token if the other tokens are Gaussian, without the constant part.

    A head adds beta O V S g with g = G x and the covariance S, which in a cold head leaves the range of the tokens: the
    shift of their mean is s standard deviations, s^2 = beta^2 <g, S g>. It is divided by sqrt(1 + s^2/max_shift^2).

    Args:
        attention: from `read_weights`.
        cov: S, (d, d).
        max_shift: the number of standard deviations at which the shift saturates.
    """

    def __init__(self, attention: Attention, cov: Tensor, max_shift: float) -> None:
        Q, K, V, O, beta = (attention.tensors[name] for name in ("Q", "K", "V", "O", "beta"))
        H, k, d = Q.shape
        beta = beta[:, None, None]
        self.Q, self.O = Q.reshape(H * k, d), O.transpose(0, 1).reshape(d, -1)
        key_cov = ((K.reshape(H * k, d) @ cov).view(H, k, d)).mT  # S K^T
        self.values = beta * (V @ key_cov)  # (H, v, k)
        self.spread = beta.square() * (K @ key_cov) / max_shift**2  # (H, k, k)
        self.M = (O @ self.values).transpose(0, 1).reshape(d, H * k) @ self.Q  # without saturation

    def drift(self, x: Tensor) -> Tensor:
        """What is added to tokens x (n, d)."""
        H, _, k = self.values.shape
        q = (x @ self.Q.mT).view(-1, H, k).transpose(0, 1)  # (H, n, k)
        shift = ((q @ self.spread) * q).sum(-1, keepdim=True).clamp(min=0)
        averages = (q * (1 + shift).rsqrt()) @ self.values.mT  # (H, n, v)
        return averages.transpose(0, 1).reshape(len(x), -1) @ self.O.mT


def leading_subspace(M: Tensor) -> tuple[Tensor, Tensor]:
    """An orthonormal basis U (d, k) of the leading subspace of M (d, d), and coordinates W (k, d) with Pi = U W.

    The leading subspace belongs to the eigenvalues with the largest real part, and Pi projects on it along the other
    invariant subspace, as in `attn_flow.prediction.spectrum`. Above dimension 64 one real eigenvalue or one complex
    pair is found, which is the generic case, by Arnoldi iteration. U and W are in float64 on the device of M.
    """
    if len(M) > SMALL:
        matrix = M.detach().double().cpu()
        with limit_threads(1):  # of hundreds of products with one vector
            right, left = _leading_vectors(matrix), _leading_vectors(matrix.mT)
        if right and left and abs(right[0] - left[0]) <= 1e-3 * abs(right[0]):
            U, rows = torch.linalg.qr(right[1])[0], left[1].mT
            return U.to(M.device), torch.linalg.solve(rows @ U, rows).to(M.device)
    limit = spectrum(M)
    return limit.basis, limit.basis.mT @ limit.direction


def _leading_vectors(matrix: Tensor) -> tuple[complex, Tensor] | None:
    """The eigenvalue with the largest real part, the upper one of a pair, and the real span (d, 1 or 2) of its vector.

    None if the iteration does not converge, or if the eigenvalue is 0, whose space may have any dimension.
    """
    start = torch.randn(len(matrix), generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
    # Products by torch: numpy would use as many threads as there are cores in every stage of a probe.
    product = lambda vector: (matrix @ torch.from_numpy(vector)).numpy()
    operator = LinearOperator(matrix.shape, matvec=product, dtype=np.float64)
    try:
        values, vectors = eigs(operator, k=2, which="LR", v0=start, tol=RTOL, **SEED)
    except ArpackError:
        return None
    i = int(np.lexsort((values.imag, values.real.round(12)))[-1])
    value, vector = complex(values[i]), vectors[:, i]
    if abs(value) <= RTOL * float(matrix.abs().max()):
        return None
    is_real = abs(value.imag) <= RTOL * abs(value)
    parts = [vector.real] if is_real else [vector.real, vector.imag]
    return value, torch.from_numpy(np.stack(parts, 1))
