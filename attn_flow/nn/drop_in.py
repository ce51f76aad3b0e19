"""Continuous attention in the place of an nn.MultiheadAttention: the same call, the same shapes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_flow.attention import Attention, drift
from attn_flow.attention.projections import Projections
from attn_flow.averages import dense
from attn_flow.base import checks
from attn_flow.dynamics.steppers import Step, rk4
from attn_flow.geometry import Euclidean, Geometry
from attn_flow.nn.layer import ContinuousAttentionLayer


class _NotFused:
    """Stands where torch's encoders look for weights to fuse: what overrides torch's functions they leave alone."""

    weight = bias = None

    @classmethod
    def __torch_function__(cls, *_: object) -> object:
        return NotImplemented


class ContinuousMultiheadAttention(nn.Module):
    """nn.MultiheadAttention in continuous time: it returns the displacement x(horizon) - x, which a residual adds.

    With one Euler step of size one it is nn.MultiheadAttention itself; more steps let the tokens move and look again.
    `nn.TransformerEncoderLayer`s take it as their `self_attn` (their fused fast path then stays off).

    Args:
        embed_dim, num_heads, dropout, bias, batch_first, device, dtype: as in nn.MultiheadAttention. dropout must be 0:
            a flow is deterministic.
        add_bias_kv, add_zero_attn, kdim, vdim: as there, and refused unless they say nothing.
        beta, learn_beta, beta_schedule, horizon, steps, step, checkpoint, validate: as in `ContinuousAttentionLayer`.
        geometry: flat space unless given; on another one the displacement leads from x to the geometry.

    Example:
        >>> layer = nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True)
        >>> layer.self_attn = ContinuousMultiheadAttention.from_multihead(layer.self_attn, horizon=1.0, steps=2)
        >>> layer(torch.randn(8, 10, 32)).shape
        torch.Size([8, 10, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        beta: float | Tensor | None = None,
        learn_beta: bool = False,
        beta_schedule: Callable[[float], float] | None = None,
        horizon: float = 1.0,
        steps: int = 1,
        step: str | Step = rk4,
        geometry: Geometry | None = None,
        checkpoint: bool = False,
        validate: bool = True,
    ) -> None:
        super().__init__()
        if dropout != 0:
            raise ValueError(f"dropout = {dropout}, expected 0: a flow is deterministic. Put dropout around the layer.")
        checks.flags(batch_first=batch_first)
        if add_bias_kv or add_zero_attn or any(width not in (None, embed_dim) for width in (kdim, vdim)):
            raise ValueError(
                f"add_bias_kv = {add_bias_kv}, add_zero_attn = {add_zero_attn}, kdim = {kdim}, vdim = {vdim}: expected "
                "none of them; keys are the tokens that flow, of width embed_dim."
            )
        self.embed_dim, self.num_heads, self.dropout, self.batch_first = embed_dim, num_heads, 0.0, batch_first
        self.flow = ContinuousAttentionLayer(
            embed_dim,
            num_heads,
            beta=beta,
            learn_beta=learn_beta,
            beta_schedule=beta_schedule,
            horizon=horizon,
            steps=steps,
            step=step,
            geometry=Euclidean() if geometry is None else geometry,
            bias=bias,
            checkpoint=checkpoint,
            validate=validate,
            device=device,
            dtype=dtype,
        )

    # What torch's encoders ask of their self_attn before they bypass it by a fused kernel, or pack a padded batch for
    # one: neither must be.
    _qkv_same_embed_dim = False
    in_proj_bias = None
    in_proj_weight = out_proj = _NotFused()

    @classmethod
    def from_multihead(
        cls,
        multihead: nn.MultiheadAttention,
        *,
        beta: float | Tensor | None = None,
        learn_beta: bool = False,
        beta_schedule: Callable[[float], float] | None = None,
        horizon: float = 1.0,
        steps: int = 1,
        step: str | Step = "euler",
        geometry: Geometry | None = None,
        checkpoint: bool = False,
        validate: bool = True,
    ) -> ContinuousMultiheadAttention:
        """With the weights of an nn.MultiheadAttention; by default one Euler step of size one, which equals it.

        beta: 1/sqrt(head width) unless given. The key bias is left out: softmax cancels it. Attention dropout is left
        out too, with a warning.

        Example:
            >>> theirs = nn.MultiheadAttention(8, 2, batch_first=True)
            >>> x = torch.randn(3, 5, 8)
            >>> ours = ContinuousMultiheadAttention.from_multihead(theirs)
            >>> torch.allclose(ours(x, x, x)[0], theirs(x, x, x)[0], atol=1e-6)
            True
        """
        for name in ("bias_k", "bias_v"):
            if getattr(multihead, name) is not None:
                raise ValueError(f"the nn.MultiheadAttention has {name} (add_bias_kv=True), expected none.")
        if multihead.add_zero_attn or multihead.in_proj_weight is None:
            raise ValueError("the nn.MultiheadAttention has add_zero_attn, kdim or vdim; expected none of them.")
        if multihead.dropout:
            message = f"attention dropout {multihead.dropout} is left out: a flow is deterministic."
            warnings.warn(message, stacklevel=2)
        heads, d = multihead.num_heads, multihead.embed_dim
        with torch.no_grad():
            Q, K, V = multihead.in_proj_weight.reshape(3, heads, -1, d)
            O = multihead.out_proj.weight.reshape(d, heads, -1).transpose(0, 1)
            query_bias = value_bias = None
            if multihead.in_proj_bias is not None:
                query_bias, _, b = multihead.in_proj_bias.reshape(3, heads, -1)
                value_bias = torch.einsum("hdk,hk->d", O, b) + multihead.out_proj.bias
            own = Attention(Q, K, V, O, 1 / math.sqrt(d // heads), query_bias, value_bias)
        module = cls(d, heads, bias=query_bias is not None, batch_first=multihead.batch_first)
        module.flow = ContinuousAttentionLayer.from_attention(
            own,
            beta=beta,
            learn_beta=learn_beta,
            beta_schedule=beta_schedule,
            horizon=horizon,
            steps=steps,
            step=step,
            geometry=Euclidean() if geometry is None else geometry,
            checkpoint=checkpoint,
            validate=validate,
        )
        return module.train(multihead.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As nn.MultiheadAttention.forward: the displacement, and the attention at the start if need_weights.

        query is key: tokens attend to themselves. Otherwise key, which must be value, is a context that stays where it
        is (cross-attention). Masks have torch's convention, True HIDES, or are added to the logits: key_padding_mask
        (batch, m), attn_mask (n, m) or (batch * heads, n, m). is_causal says that attn_mask is the causal one.
        """
        if key is not value:
            raise ValueError("key and value are different tensors; a flow has one cloud to attend to, pass it as both.")
        if is_causal and attn_mask is None:
            raise ValueError("is_causal without attn_mask; expected both, is_causal says that the mask is causal.")
        for name, z in (("query", query), ("key", key)):
            checks.tensor(name, z, "(n, embed_dim), or a batch of them")
            if 0 in z.shape:
                raise ValueError(f"{name} has shape {tuple(z.shape)}: nothing to attend; expected at least one token.")
        batched = query.ndim == 3
        itself = query is key
        x, y = (z.transpose(0, 1) if batched and not self.batch_first else z for z in (query, key))
        self.flow._check(x)
        if x.ndim != y.ndim or x.shape[:-2] != y.shape[:-2] or y.shape[-1] != x.shape[-1]:
            shapes = f"query has shape {tuple(query.shape)} and key {tuple(key.shape)}"
            raise ValueError(f"{shapes}, expected the same batch and width of both.")
        log_weights = None if key_padding_mask is None else self._log_weights(key_padding_mask, y)
        causal = is_causal and itself
        pairs = None if attn_mask is None or causal else self._pairs(attn_mask, x, y, log_weights)

        def field(p: Projections, x: Tensor) -> Tensor:
            against = x if itself else y
            if pairs is None:
                masked = replace(p, causal=True) if causal else p
                return drift.against_cloud(masked, x, against, log_weights, at_once=True)
            q, k = p.queries(x), p.keys(against)
            if p.loses_digits(q, k, p.scale):
                p, against = p.double, against.double()
                q, k = p.queries(x.double()), p.keys(against)
            average = F.scaled_dot_product_attention(q, k, p.values(against), pairs.to(q.dtype), scale=p.scale)
            return p.with_constant(p.summed(average))

        moved = self.flow.evolve(x, field) - x
        weights = self._weights(x, y, log_weights, pairs, causal) if need_weights else None
        if weights is not None and average_attn_weights:
            weights = weights.mean(-3)
        return (moved.transpose(0, 1) if batched and not self.batch_first else moved), weights

    def _weights(self, x: Tensor, y: Tensor, log_weights: Tensor | None, pairs: Tensor | None, causal: bool) -> Tensor:
        """The attention at the start, ([batch,] heads, n, m)."""
        p = self.flow.attention().prepared()
        q, k = p.queries(x), p.keys(y)
        bias = None if log_weights is None else log_weights[..., None, :]
        if p.cold:
            return dense.winners(q, k, bias, causal)[0]
        if p.loses_digits(q, k, p.scale):
            p = p.double
            q, k = p.queries(x.double()), p.keys(y.double())
        logits = dense.logits(q * p.scale, k, bias, causal) if pairs is None else q @ k.mT * p.scale + pairs
        return dense.probabilities(logits)[0].to(x.dtype)

    def _log_weights(self, key_padding_mask: Tensor, y: Tensor) -> Tensor:
        """What is added to the logits of every key, (batch, m)."""
        hidden = _additive("key_padding_mask", key_padding_mask, y.dtype)
        checks.token_mask(~hidden.isneginf(), y)
        return hidden

    def _pairs(self, attn_mask: Tensor, x: Tensor, y: Tensor, log_weights: Tensor | None) -> Tensor:
        """What is added to the logits of every pair, hidden keys among them, (n, m) or ([batch,] heads or 1, n, m)."""
        if self.flow._cold:
            raise ValueError("attn_mask with beta = inf; expected a finite beta, or is_causal for the causal mask.")
        n, m, batch = x.shape[-2], y.shape[-2], math.prod(x.shape[:-2])
        checks.tensor("attn_mask", attn_mask, "(n, m) or (batch * heads, n, m)")
        if attn_mask.shape not in ((n, m), (batch * self.num_heads, n, m)):
            raise ValueError(
                f"attn_mask has shape {tuple(attn_mask.shape)}, expected (n, m) = {(n, m)} or (batch * heads, n, m) = "
                f"{(batch * self.num_heads, n, m)}."
            )
        pairs = _additive("attn_mask", attn_mask, x.dtype)
        pairs = pairs if pairs.ndim == 2 else pairs.unflatten(0, (*x.shape[:-2], self.num_heads))
        return pairs if log_weights is None else pairs + log_weights[..., None, None, :]


def _additive(name: str, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """torch's masks, True = hide or additive, as additive ones."""
    checks.tensor(name, mask, "(batch, m) or (n, m)")
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
    if not mask.is_floating_point():
        raise ValueError(f"{name} has dtype {mask.dtype}, expected bool (True hides) or float.")
    return mask.to(dtype)
