"""Averages of values under softmax and hardmax weights, in memory linear in the number of tokens.

Shapes: queries q (..., m, k), keys k (..., n, k), values v (..., n, v), key_bias (..., n) the log weights of the
keys (-inf hides one). Logits are scale <q_i, k_j> + key_bias_j. Under `causal` and `exclude_self` query i is token
first + i of the cloud of keys. A query that sees no key at all has average zero.

Softmax goes through torch's fused attention wherever that is linear in memory. Its CPU kernel silently falls
back to the full matrix for 3-D inputs, unequal key and value widths, a strided last axis, or a bias that needs
a gradient; those are brought into shape here. The kernel itself, called by its name, also takes a bias under a causal
mask and returns the log-sum-exp, which joins averages over segments of the keys. Everything else runs in blocks of
rows, recomputed in the backward pass. So does every average in forward mode, of which the kernel knows nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_flow.base import checks

BLOCK = 2**18  # logits held at once by the blocked path: 1 MB of float32
SEGMENT = 256  # queries whose own keys are treated one by one when they do not see themselves
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
LOGIT_RANGE = 200.0  # beyond it float32 logits are wrong by more than 1e-5


def loses_digits(q: Tensor, k: Tensor, beta: float | Tensor = 1.0) -> bool:
    """Whether float32 is too coarse for logits beta <q,k> of this size (beta ~ 200 on the unit sphere).

    Callers then repeat the computation in float64, from the tokens on: a rounded query is already too coarse. Logits
    that may leave the range of float64 raise FloatingPointError: a row of -inf looks like a query that sees nobody.
    """
    if q.dtype not in (torch.float32, torch.float64) or not checks.can_look(q, k):
        return False
    if torch.is_autocast_enabled(q.device.type):
        return False
    if isinstance(beta, Tensor):
        if not checks.can_look(beta):
            return False
        beta = float(beta.detach().amax())
    q, k = q.detach(), k.detach()
    sizes = largest(q), largest(k)
    bound = q.shape[-1] * sizes[0] * sizes[1]  # of <q,k>: |q_i| <= sqrt(d) max_ij |q_ij|
    known = torch.finfo(q.dtype)
    if q.dtype == torch.float64:
        if not bound * (beta if 1 < beta < math.inf else 1.0) < known.max:
            raise FloatingPointError(
                f"logits beta <q, k> leave the range of torch.float64: tokens reach {sizes[0]:.1e} as queries and "
                f"{sizes[1]:.1e} as keys, beta = {beta:g}. Use smaller tokens or a smaller beta."
            )
        return False
    if 0 < beta < known.tiny:  # float32 has few digits of it, or none
        return True
    if max(1.0, sizes[0]) * beta > known.max:  # beta or beta q overflows, whatever beta <q, k> is
        return True
    if bound * beta <= LOGIT_RANGE:
        return False
    if not max(sizes) < math.inf:
        return True
    return float(lengths(q).amax()) * float(lengths(k).amax()) * beta > LOGIT_RANGE


def largest(z: Tensor) -> float:
    """max |z|."""
    low, high = torch.aminmax(z)
    return max(-float(low), float(high))


def lengths(z: Tensor) -> Tensor:
    """|z| (...,) of vectors (..., k) whose squares may leave the floating-point range: over their largest entry."""
    size = largest_entry(z)
    return size[..., 0] * torch.linalg.vector_norm(z / size, dim=-1)


def largest_entry(z: Tensor) -> Tensor:
    """max_i |z_i| (..., 1) of every vector, a constant to divide by: 1 for z = 0."""
    size = z.detach().abs().amax(-1, keepdim=True)
    return torch.where(size > 0, size, 1.0)


def broadcast(*shapes: torch.Size) -> torch.Size:
    """torch.broadcast_shapes, which takes as long as a small attention, only where shapes differ."""
    first = shapes[0]
    return first if all(shape == first for shape in shapes) else torch.broadcast_shapes(*shapes)


def softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_bias: Tensor | None = None,
    causal: bool = False,
    exclude_self: bool = False,
    first: int = 0,
    scale: float = 1.0,
) -> Tensor:
    """sum_j softmax_j(scale <q_i,k_j> + bias_j) v_j, (..., m, v)."""
    q, scale = _seen_scale(q, scale)
    whole = not exclude_self and not (causal and (first > 0 or q.shape[-2] < k.shape[-2]))
    fused = whole and not checks.forward_mode()
    if fused and not (key_bias is not None and (causal or key_bias.requires_grad)):
        q4, k4, v4, bias, batch = _four_axes(q, k, v, key_bias)
        out = F.scaled_dot_product_attention(q4, k4, v4, attn_mask=bias, is_causal=causal, scale=scale)
        return out[..., : v.shape[-1]].reshape(*batch, q.shape[-2], v.shape[-1])
    if fused and _has_flash(q, k, v, key_bias):
        return _flash(q, k, v, key_bias, causal, scale)[0]
    return softmax_and_log_sum(
        q, k, v, key_bias=key_bias, causal=causal, exclude_self=exclude_self, first=first, scale=scale
    )[0]


def _seen_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Queries and scale for the fused kernel, which multiplies the -inf of hidden keys by the scale: not by 0.

    A scale below the dtype's smallest normal number may be flushed to 0 there, and is 0 beside any logit.
    """
    return (torch.zeros_like(q), 1.0) if scale < torch.finfo(q.dtype).tiny else (q, scale)


def _four_axes(
    q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, torch.Size]:
    """What the fused kernel wants: (batch, heads, n, one width), last axis dense, bias (batch, heads, 1, n)."""
    width = max(q.shape[-1], v.shape[-1])
    batch = broadcast(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    heads = batch[-1] if batch else 1
    q, k, v = (_padded(z, width).expand(*batch, z.shape[-2], width) for z in (q, k, v))
    bias = None
    if key_bias is not None:
        bias = key_bias.to(q.dtype).expand(*batch, k.shape[-2]).reshape(-1, heads, 1, k.shape[-2])
    return *(z.reshape(-1, heads, *z.shape[-2:]) for z in (q, k, v)), bias, batch  # type: ignore[return-value]


def _padded(z: Tensor, width: int) -> Tensor:
    z = F.pad(z, (0, width - z.shape[-1])) if z.shape[-1] < width else z
    return z if z.stride(-1) == 1 else z.contiguous()


def _has_flash(q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None) -> bool:
    """Whether the CPU kernel may be called by its name: no transform, no tangents, no gradient of the bias."""
    plain = q.device.type == "cpu" and checks.is_plain(q, k, v) and q.dtype == k.dtype == v.dtype
    return plain and not checks.forward_mode() and not (key_bias is not None and key_bias.requires_grad)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax average and log-sum-exp by torch's CPU kernel; the average is differentiable, the log-sum-exp is not."""
    q4, k4, v4, bias, batch = _four_axes(q, k, v, key_bias)
    out, log_sum = _FLASH(q4, k4, v4, 0.0, causal, attn_mask=bias, scale=scale)
    if bias is not None:  # the kernel's log-sum-exp is 0 where nothing is seen
        seen = ~bias[..., 0, :].isneginf()
        seen = seen.cumsum(-1) > 0 if causal else seen.any(-1, keepdim=True)
        log_sum = log_sum.masked_fill(~seen, -torch.inf)
    m = q.shape[-2]
    return out[..., : v.shape[-1]].reshape(*batch, m, v.shape[-1]), log_sum.to(q.dtype).reshape(*batch, m)


def softmax_and_log_sum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_bias: Tensor | None = None,
    causal: bool = False,
    exclude_self: bool = False,
    first: int = 0,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The softmax average (..., m, v), and log sum_j e^{scale <q_i,k_j> + bias_j} (..., m)."""
    q, scale = _seen_scale(q, scale)
    inputs = [z for z in (q, k, v, key_bias) if z is not None]
    if _has_flash(q, k, v, key_bias) and not (torch.is_grad_enabled() and any(z.requires_grad for z in inputs)):
        return _in_segments(q, k, v, key_bias, causal, exclude_self, first, scale)

    def rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, i: int) -> tuple[Tensor, Tensor]:
        shares, log_sum = probabilities(logits(q * scale, k, bias, causal, exclude_self, first + i))
        return shares @ v, log_sum

    return in_blocks(rows, q, k, v, key_bias, first if causal else None)


def _in_segments(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, exclude_self: bool, first: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The keys before, beside and after the queries, averaged by themselves and joined by their log-sum-exps."""
    m, n = q.shape[-2], k.shape[-2]
    if exclude_self and m > SEGMENT:
        starts = range(0, m, SEGMENT)
        rows = [q[..., i : i + SEGMENT, :] for i in starts]
        parts = [_in_segments(z, k, v, bias, causal, True, first + i, scale) for z, i in zip(rows, starts)]
        return torch.cat([p[0] for p in parts], dim=-2), torch.cat([p[1] for p in parts], dim=-1)
    if not causal and not exclude_self:
        return _flash(q, k, v, bias, False, scale)

    def keys(start: int, end: int) -> tuple[Tensor, Tensor, Tensor | None]:
        return k[..., start:end, :], v[..., start:end, :], None if bias is None else bias[..., start:end]

    parts = [_flash(q, *keys(0, first), False, scale)] if first > 0 else []
    if not causal and first + m < n:
        parts.append(_flash(q, *keys(first + m, n), False, scale))
    beside = keys(first, first + m)
    if exclude_self:
        shares, log_sum = probabilities(logits(q * scale, beside[0], beside[2], causal, exclude_self=True))
        parts.append((shares @ beside[1], log_sum))
    else:
        parts.append(_flash(q, *beside, True, scale))
    if len(parts) == 1:
        return parts[0]
    shares, log_sum = probabilities(torch.stack([part[1] for part in parts], dim=-1))
    average = parts[0][0] * shares[..., 0, None]
    for i, part in enumerate(parts[1:], start=1):
        average = average + part[0] * shares[..., i, None]
    return average, log_sum


def pairwise(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As `softmax_and_log_sum` for (clouds, m, k), with a bias (clouds, m, n) for every pair.

    Without gradients; the log-sum-exp of a query that sees nothing is meaningless.
    """
    if not _has_flash(q, k, v, bias):
        shares, log_sum = probabilities(torch.baddbmm(bias, q, k.mT, alpha=scale))
        return shares @ v, log_sum
    width = max(q.shape[-1], v.shape[-1])
    q4, k4, v4 = (_padded(z, width)[:, None] for z in (q, k, v))
    out, log_sum = _FLASH(q4, k4, v4, 0.0, False, attn_mask=bias[:, None], scale=scale)
    return out[:, 0, :, : v.shape[-1]], log_sum[:, 0]


def hardmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_bias: Tensor | None = None,
    causal: bool = False,
    exclude_self: bool = False,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """The mean of v_j over argmax_j <q_i,k_j> weighted by e^{bias_j} (..., m, v), and the maximum (..., m)."""

    def rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, i: int) -> tuple[Tensor, Tensor]:
        won, top = winners(q, k, bias, causal, exclude_self, first + i)
        return won @ v, top

    return in_blocks(rows, q, k, v, key_bias, first if causal else None)


def winners(
    q: Tensor, k: Tensor, bias: Tensor | None, causal: bool = False, exclude_self: bool = False, first: int = 0
) -> tuple[Tensor, Tensor]:
    """The hardmax weights (..., m, n), shared by e^{bias_j} among ties, and the maximal score (..., m).

    Scores that differ by rounding alone (16 ulp of |q_i| max|k_j|) are ties.
    """
    only_hides = None if bias is None else torch.where(bias.isneginf(), bias, 0.0)
    scores = logits(q, k, only_hides, causal, exclude_self, first)
    top = scores.amax(-1)
    ulp = 16 * torch.finfo(q.dtype).eps * q.norm(dim=-1) * k.norm(dim=-1).amax(-1, keepdim=True)
    lowest = torch.finfo(q.dtype).min  # also where top is -inf: nobody wins there
    lost = scores < (top - ulp).clamp_min(lowest)[..., None]
    del scores  # as large as everything else together
    share = q.new_zeros(()) if bias is None else bias[..., None, :]
    return probabilities(share.expand(lost.shape).masked_fill(lost, -torch.inf))[0], top


def logits(
    q: Tensor, k: Tensor, bias: Tensor | None, causal: bool = False, exclude_self: bool = False, first: int = 0
) -> Tensor:
    """<q_i,k_j> + bias_j, (..., m, n), with the hidden entries at -inf."""
    scores = q @ k.mT
    if bias is not None:
        scores = scores + bias[..., None, :]
    if causal or exclude_self:
        i = torch.arange(first, first + q.shape[-2], device=q.device)[:, None]
        j = torch.arange(k.shape[-2], device=q.device)
        scores = scores.masked_fill(hidden(i, j, causal, exclude_self), -torch.inf)
    return scores


def hidden(i: Tensor, j: Tensor, causal: bool, exclude_self: bool) -> Tensor:
    """Which tokens j token i does not see, given one of the two masks."""
    if not exclude_self:
        return j > i
    return j >= i if causal else j == i


def probabilities(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over the last axis and its log-sum-exp; 0 and -inf, with gradient zero, where nothing is seen."""
    top = logits.detach().amax(-1, keepdim=True)
    nobody = top.isneginf()
    shares = (logits - torch.where(nobody, 0.0, top)).exp()
    total = torch.where(nobody, 1.0, shares.sum(-1, keepdim=True))
    return shares / total, (total.log() + top)[..., 0]


def log_mean_exp(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """log sum_j w_j e^{<q_i,k_j>} (..., m) for weights that sum to one and keys of mean zero."""

    def rows(q: Tensor, k: Tensor, _: Tensor, w: Tensor | None, i: int) -> tuple[Tensor, Tensor]:
        assert w is not None  # it is the `weights` above
        log_mean = log_mean_of_exp(q @ k.mT, w[..., None, :])
        return log_mean[..., None], log_mean

    return in_blocks(rows, q, k, k[..., :1], weights)[1]


def log_mean_of_exp(t: Tensor, w: Tensor) -> Tensor:
    """log sum_j w_j e^{t_j} over the last axis, for sum_j w_j = 1 and sum_j w_j t_j = 0.

    It is of second order in t, so small t go through expm1 and log1p; Jensen keeps log1p's argument nonnegative.
    """
    near = t.amax(-1) <= 1
    small = torch.where(near[..., None], t, 0.0)
    return torch.where(near, torch.log1p((w * torch.expm1(small)).sum(-1)), torch.logsumexp(t + w.log(), dim=-1))


def in_blocks(
    rows: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal_from: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply `rows` to blocks of clouds and of query rows; the backward pass recomputes one block at a time.

    `causal_from` = the token of the first query, if later keys are hidden from each of them: they are left out.
    """
    batch = broadcast(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    m, n = q.shape[-2], k.shape[-2]
    q, k, v = (z.expand(*batch, *z.shape[-2:]).reshape(-1, *z.shape[-2:]) for z in (q, k, v))
    bias = None if bias is None else bias.to(q.dtype).expand(*batch, n).reshape(-1, n)
    clouds = max(1, min(q.shape[0], BLOCK // (m * n)))
    step = max(16, BLOCK // (n * clouds))
    blocks = [(c, i) for c in range(0, q.shape[0], clouds) for i in range(0, m, step)]
    tracked = [z for z in (q, k, v, bias) if z is not None and z.requires_grad]
    plain = checks.is_plain(*tracked) and not checks.forward_mode()  # tangents are gone when blocks are recomputed
    recompute = len(blocks) > 1 and torch.is_grad_enabled() and bool(tracked) and plain
    parts = []
    for c, i in blocks:
        end = n if causal_from is None else min(n, causal_from + i + step)
        b = None if bias is None else bias[c : c + clouds, :end]
        block = (q[c : c + clouds, i : i + step], k[c : c + clouds, :end], v[c : c + clouds, :end], b, i)
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
