"""Doubly stochastic attention: the potential that balances a matrix of scores (Sander et al., arXiv 2110.11773)."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_flow import checks, kernels

SWEEPS = 1000
UNSEEN_SWEEPS = 100  # where values cannot be looked at (compiling, vmap, meta)
MEMORY = 8  # sweeps that Anderson's extrapolation remembers


def potential(q: Tensor, k: Tensor, log_w: Tensor) -> Tensor:
    """g (..., n) such that P_ij = e^{<q_i,k_j> + f_i + g_j} w_j has sum_j P_ij = 1 and sum_i w_i P_ij = w_j.

    f_i is then what a row softmax divides by: attention with the key bias g + log w is the balanced one. Sinkhorn's
    sweeps f -> g -> f contract slowly once scores are large, so Anderson's extrapolation (the combination of the last
    sweeps with the smallest residual) speeds them up; with gradients the plain sweeps are differentiated. Row sums are
    right to eps^(3/4), or to eps^(3/8) where SWEEPS did not get there; worse ones raise.
    """

    def columns(f: Tensor) -> Tensor:
        return -kernels.softmax_and_log_sum(k, q, q[..., :1], key_bias=f + log_w)[1]

    def sweep(f: Tensor) -> Tensor:
        return -kernels.softmax_and_log_sum(q, k, k[..., :1], key_bias=columns(f) + log_w)[1]

    f = torch.zeros(torch.broadcast_shapes(q.shape[:-1], log_w.shape), dtype=q.dtype, device=q.device)
    if not checks.can_look(q, k, log_w):
        for _ in range(UNSEEN_SWEEPS):
            f = sweep(f)
        return columns(f)
    gradient = torch.is_grad_enabled() and any(z.requires_grad for z in (q, k, log_w))
    residuals: list[Tensor] = []
    following: list[Tensor] = []
    for _ in range(SWEEPS):
        after = sweep(f)
        residual = (after - f).detach()
        error, eps = float(residual.abs().amax()), torch.finfo(f.dtype).eps * (1 + float(after.detach().abs().amax()))
        if error <= eps**0.75:
            return columns(after)
        f = after
        if not gradient:
            residuals, following = [*residuals, residual][-MEMORY:], [*following, after][-MEMORY:]
            f = _extrapolated(residuals, following)
    if error <= eps**0.375:
        return columns(f)
    raise FloatingPointError(f"Sinkhorn's row sums are off by {error:.1e} after {SWEEPS} sweeps; use a smaller beta.")


def _extrapolated(residuals: list[Tensor], following: list[Tensor]) -> Tensor:
    """sum_s a_s following_s with sum_s a_s = 1 and the smallest |sum_s a_s residual_s|."""
    last, after = residuals[-1], following[-1]
    if len(residuals) == 1:
        return after
    differences = torch.stack([r - last for r in residuals[:-1]], dim=-1)  # (..., n, sweeps)
    a = torch.linalg.pinv(differences) @ -last[..., None]
    return after + (torch.stack([z - after for z in following[:-1]], dim=-1) @ a)[..., 0]
