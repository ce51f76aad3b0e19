"""Averages of values under softmax and hardmax weights, in memory linear in the number of tokens.

Shapes: queries q (..., m, k), keys k (..., n, k), values v (..., n, v), key_bias (..., n) the log weights of the
keys (-inf hides one). Logits are <q_i, k_j> + key_bias_j: scale q by beta before.

Softmax goes through torch's fused attention wherever that is linear in memory. Its CPU kernel silently falls
back to the full matrix for 3-D inputs, unequal key and value widths, a strided last axis, or a bias that needs
a gradient; those are brought into shape here, and what it cannot do at all (a bias or a hidden diagonal under a
causal mask, the log-sum-exp) runs in blocks of rows, recomputed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_flow import checks

BLOCK = 2**19  # logits held at once by the blocked path: 2 MB of float32
LOGIT_RANGE = 200.0  # beyond it float32 logits are wrong by more than 1e-5, and are computed in float64


def softmax(
    q: Tensor, k: Tensor, v: Tensor, *, key_bias: Tensor | None = None, causal: bool = False, exclude_self: bool = False
) -> Tensor:
    """sum_j softmax_j(<q_i,k_j> + bias_j) v_j, (..., m, v)."""
    if _needs_double(q, k):
        double = softmax(
            q.double(), k.double(), v.double(), key_bias=key_bias, causal=causal, exclude_self=exclude_self
        )
        return double.to(q.dtype)
    needs_rows = exclude_self or (causal and key_bias is not None)
    if needs_rows or (key_bias is not None and key_bias.requires_grad):
        return softmax_and_log_sum(q, k, v, key_bias=key_bias, causal=causal, exclude_self=exclude_self)[0]
    return _fused(q, k, v, key_bias, causal)


def _needs_double(q: Tensor, k: Tensor) -> bool:
    """Float32 loses the logits' last digits once |q||k| is large (beta ~ 200 on the unit sphere)."""
    if q.dtype != torch.float32 or not checks.can_look(q, k) or torch.is_autocast_enabled(q.device.type):
        return False
    with torch.no_grad():
        return float(q.norm(dim=-1).amax() * k.norm(dim=-1).amax()) > LOGIT_RANGE


def _fused(q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None, causal: bool) -> Tensor:
    width = max(q.shape[-1], v.shape[-1])
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q4, k4, v4 = (_four_axes(_padded(z, width), batch) for z in (q, k, v))
    bias = None
    if key_bias is not None:
        bias = key_bias.to(q.dtype).expand(*batch, key_bias.shape[-1])
        bias = bias.reshape(*q4.shape[:2], 1, -1)
    out = F.scaled_dot_product_attention(q4, k4, v4, attn_mask=bias, is_causal=causal, scale=1.0)
    return out[..., : v.shape[-1]].reshape(*batch, q.shape[-2], v.shape[-1])


def _padded(z: Tensor, width: int) -> Tensor:
    z = F.pad(z, (0, width - z.shape[-1])) if z.shape[-1] < width else z
    return z if z.stride(-1) == 1 else z.contiguous()


def _four_axes(z: Tensor, batch: torch.Size) -> Tensor:
    z = z.expand(*batch, *z.shape[-2:])
    heads = batch[-1] if batch else 1
    return z.reshape(-1, heads, *z.shape[-2:])


def softmax_and_log_sum(
    q: Tensor, k: Tensor, v: Tensor, *, key_bias: Tensor | None = None, causal: bool = False, exclude_self: bool = False
) -> tuple[Tensor, Tensor]:
    """The softmax average (..., m, v), and log sum_j e^{<q_i,k_j> + bias_j} (..., m)."""
    if _needs_double(q, k):
        average, log_sum = softmax_and_log_sum(
            q.double(), k.double(), v.double(), key_bias=key_bias, causal=causal, exclude_self=exclude_self
        )
        return average.to(q.dtype), log_sum.to(q.dtype)

    def rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, first: int) -> tuple[Tensor, Tensor]:
        logits = _logits(q, k, bias, first, causal, exclude_self)
        log_sum = torch.logsumexp(logits, dim=-1)
        return (logits - log_sum[..., None]).exp() @ v, log_sum

    average, log_sum = _in_blocks(rows, q, k, v, key_bias)
    return average, log_sum


def hardmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_bias: Tensor | None = None,
    causal: bool = False,
    exclude_self: bool = False,
) -> tuple[Tensor, Tensor]:
    """The mean of v_j over argmax_j <q_i,k_j> weighted by e^{bias_j} (..., m, v), and the maximum (..., m).

    Scores that differ by rounding alone (16 ulp of |q_i| max|k_j|) are ties.
    """

    def rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, first: int) -> tuple[Tensor, Tensor]:
        hidden = None if bias is None else torch.where(bias.isneginf(), bias, torch.zeros_like(bias))
        scores = _logits(q, k, hidden, first, causal, exclude_self)
        top = scores.amax(-1)
        ulp = 16 * torch.finfo(q.dtype).eps * q.norm(dim=-1) * k.norm(dim=-1).amax(-1, keepdim=True)
        won = (scores >= (top - ulp)[..., None]).to(v.dtype)
        if bias is not None:
            won = won * (bias - bias.amax(-1, keepdim=True)).exp()[..., None, :]
        return (won / won.sum(-1, keepdim=True)) @ v, top

    mean, top = _in_blocks(rows, q, k, v, key_bias)
    return mean, top


def _logits(q: Tensor, k: Tensor, bias: Tensor | None, first: int, causal: bool, exclude_self: bool) -> Tensor:
    """Logits of the rows first, first + 1, ... with the hidden entries at -inf."""
    logits = q @ k.mT
    if bias is not None:
        logits = logits + bias[..., None, :]
    if causal or exclude_self:
        i = torch.arange(first, first + q.shape[-2], device=q.device)[:, None]
        j = torch.arange(k.shape[-2], device=q.device)
        hidden = (j > i) if causal else torch.zeros_like(j > i)
        hidden = hidden | (j == i) if exclude_self else hidden
        logits = logits.masked_fill(hidden, -torch.inf)
    return logits


def _in_blocks(
    rows: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Apply `rows` to blocks of clouds and of query rows; the backward pass recomputes one block at a time."""
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    m, n = q.shape[-2], k.shape[-2]
    q, k, v = (z.expand(*batch, *z.shape[-2:]).reshape(-1, *z.shape[-2:]) for z in (q, k, v))
    bias = None if bias is None else bias.to(q.dtype).expand(*batch, n).reshape(-1, n)
    clouds = max(1, min(q.shape[0], BLOCK // (m * n)))
    step = max(16, BLOCK // (n * clouds))
    blocks = [(c, i) for c in range(0, q.shape[0], clouds) for i in range(0, m, step)]
    recompute = len(blocks) > 1 and torch.is_grad_enabled() and any(z.requires_grad for z in (q, k, v))
    parts = []
    for c, i in blocks:
        b = None if bias is None else bias[c : c + clouds]
        block = (q[c : c + clouds, i : i + step], k[c : c + clouds], v[c : c + clouds], b, i)
        parts.append(checkpoint(rows, *block, use_reentrant=False) if recompute else rows(*block))
    per_cloud = len(range(0, m, step))
    values = _join([p[0] for p in parts], per_cloud)
    sums = _join([p[1] for p in parts], per_cloud)
    return values.reshape(*batch, m, v.shape[-1]), sums.reshape(*batch, m)


def _join(parts: list[Tensor], per_cloud: int) -> Tensor:
    """Row blocks back together, then clouds."""
    if len(parts) == 1:
        return parts[0]
    clouds = [torch.cat(parts[i : i + per_cloud], dim=1) for i in range(0, len(parts), per_cloud)]
    return clouds[0] if len(clouds) == 1 else torch.cat(clouds)
