"""Continuous attention in place of an nn.MultiheadAttention: the same call, the same shapes."""

from __future__ import annotations

import copy
import math
import warnings
from collections import OrderedDict
from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from attn_flow.base import checks
from attn_flow.geometry import Euclidean
from attn_flow.nn.masks import logit_mask
from attn_flow.nn.module import FlowModule, require_input
from attn_flow.nn.options import FlowKeywords

PROJECTIONS = ("q_proj", "k_proj", "v_proj")  # in the order of nn.MultiheadAttention's in_proj_weight


class _NotFused:
    """Stands where torch's encoders look for a packed weight; with it they do not take their fused path."""

    @classmethod
    def __torch_function__(cls, *_: object) -> object:
        return NotImplemented


class ContinuousMultiheadAttention(FlowModule):
    """nn.MultiheadAttention in continuous time: it returns the displacement x(horizon) - x, which a residual adds.

    One Euler step of size one is nn.MultiheadAttention itself. With more steps the tokens move and attend again.
    nn.TransformerEncoderLayer takes it as `self_attn`; torch's fused path then stays off. The projections q_proj,
    k_proj, v_proj and out_proj are nn.Linear; `load_state_dict` also takes the state of an nn.MultiheadAttention.

    Args:
        embed_dim, num_heads, bias, batch_first, device, dtype: as in nn.MultiheadAttention. Its other arguments do not
            exist, because keys and values are tokens; dropout has to be 0.
        beta: the inverse temperature, a number or one per head; 1 / sqrt(head width) by default, as in
            nn.MultiheadAttention. On a sphere of radius r it is embed_dim / r^2 times that.
        learn_beta, validate: as in `ContinuousAttentionLayer`.
        horizon, steps, step, geometry, checkpoint: see `FlowOptions`. Flat space is the default geometry.

    Example:
        >>> layer = nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True)
        >>> layer.self_attn = ContinuousMultiheadAttention.from_multihead(layer.self_attn, horizon=1.0, steps=2)
        >>> layer(torch.randn(8, 10, 32)).shape
        torch.Size([8, 10, 32])
    """

    # torch's encoders read these before they call self_attn.
    _qkv_same_embed_dim = False
    in_proj_bias = None
    in_proj_weight = _NotFused()

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[FlowKeywords],
    ) -> None:
        if dropout != 0:
            raise ValueError(f"dropout = {dropout}, expected 0: a flow is deterministic. Put dropout around the layer.")
        options.setdefault("geometry", Euclidean())
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads, None, 1.0, factory, **options)
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias, **factory)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias, **factory)  # softmax ignores the bias of the keys
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias, **factory)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as nn.MultiheadAttention does, and set beta to its initial value."""
        self.out_proj.reset_parameters()
        for projection in (self.q_proj, self.k_proj, self.v_proj):  # as the packed weight (3 embed_dim, embed_dim)
            nn.init.xavier_uniform_(projection.weight, gain=math.sqrt(0.5))
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
        self.beta = self._initial_beta

    @classmethod
    def from_multihead(cls, multihead: nn.MultiheadAttention, **options: Unpack[FlowKeywords]) -> Self:
        """With the weights of an nn.MultiheadAttention; by default one Euler step of size one, which equals it.

        Args:
            multihead: frozen weights stay frozen. Attention dropout is left out, with a warning.
            options: keyword arguments of the constructor. beta is 1 / sqrt(head width) by default.

        Example:
            >>> multihead = nn.MultiheadAttention(8, 2, batch_first=True)
            >>> x = torch.randn(3, 5, 8)
            >>> continuous = ContinuousMultiheadAttention.from_multihead(multihead)
            >>> torch.allclose(continuous(x, x, x)[0], multihead(x, x, x)[0], atol=1e-6)
            True
            >>> torch.allclose(continuous.to_multihead().in_proj_weight, multihead.in_proj_weight)
            True
        """
        if multihead.bias_k is not None or multihead.add_zero_attn or multihead.in_proj_weight is None:
            raise ValueError("the nn.MultiheadAttention has add_bias_kv, add_zero_attn, kdim or vdim; expected none.")
        if multihead.dropout:
            warnings.warn(f"attention dropout {multihead.dropout} is left out: a flow is deterministic.", stacklevel=2)
        options.setdefault("step", "euler")
        options.setdefault("beta", 1 / math.sqrt(multihead.head_dim))
        has_bias, weight = multihead.in_proj_bias is not None, multihead.in_proj_weight
        factory: Any = {"bias": has_bias, "device": weight.device, "dtype": weight.dtype}
        module = cls(multihead.embed_dim, multihead.num_heads, batch_first=multihead.batch_first, **factory, **options)
        module.load_state_dict(multihead.state_dict())
        frozen = {name for name, p in multihead.named_parameters() if not p.requires_grad}
        for name, p in module.named_parameters():
            packed = f"in_proj_{name.rpartition('.')[2]}" if name.startswith(PROJECTIONS) else name
            p.requires_grad_(packed not in frozen)
        return module.train(multihead.training)

    @torch.no_grad()
    def to_multihead(self) -> nn.MultiheadAttention:
        """An nn.MultiheadAttention with these weights and beta in its queries; the options of the flow are lost."""
        has_bias, weight = self.q_proj.bias is not None, self.q_proj.weight
        factory: Any = {"bias": has_bias, "device": weight.device, "dtype": weight.dtype}
        multihead = nn.MultiheadAttention(self.embed_dim, self.num_heads, batch_first=self.batch_first, **factory)
        factor = (self.beta * math.sqrt(self.head_dim)).repeat_interleave(self.head_dim)  # torch divides by sqrt(k)
        state = {"in_proj_weight": torch.cat([weight * factor[:, None], self.k_proj.weight, self.v_proj.weight])}
        if has_bias:
            state["in_proj_bias"] = torch.cat([self.q_proj.bias * factor, self.k_proj.bias, self.v_proj.bias])
        multihead.load_state_dict(state | self.out_proj.state_dict(prefix="out_proj."))
        return multihead.train(self.training)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for kind in ("weight", "bias"):  # the packed projections of an nn.MultiheadAttention
            packed = state_dict.pop(f"{prefix}in_proj_{kind}", None)
            if packed is not None:
                state_dict.update(zip((f"{prefix}{name}.{kind}" for name in PROJECTIONS), packed.chunk(3)))
                state_dict.setdefault(f"{prefix}log_beta", self.log_beta.detach())
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

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
        """As nn.MultiheadAttention.forward: the displacement, and the attention weights at the start if need_weights.

        Args:
            query, key, value: one tensor three times, or views of one storage (unless compiled), means self-attention.
                Otherwise key, which must be value, is a context that stays where it is (cross-attention).
            key_padding_mask: ([batch,] m), True hides a key, or numbers that are added to the logits.
            attn_mask: the same for pairs, (n, m) or (batch * heads, n, m); is_causal replaces it by the causal mask.
        """
        weight = getattr(self.q_proj, "weight", None)
        weight = weight if isinstance(weight, Tensor) and weight.is_floating_point() else None  # None: quantised
        for name, z in (("query", query), ("key", key), ("value", value)):
            require_input(name, z, self.embed_dim, weight)
        is_sequence_first = query.ndim == 3 and not self.batch_first
        x, y = (z.transpose(0, 1) if is_sequence_first else z for z in (query, key))  # ([batch,] n or m, embed_dim)
        if x.ndim > 3 or x.shape[:-2] != y.shape[:-2]:
            shapes = f"query has shape {tuple(query.shape)} and key {tuple(key.shape)}"
            raise ValueError(f"{shapes}, expected ([batch,] n, {self.embed_dim}) with one batch.")
        if not _is_same(key, value):
            raise ValueError("key and value are different tensors, expected one: a flow attends to one cloud.")
        context = None if _is_same(query, key) else (self._split(self.k_proj(y)), self._split(self.v_proj(y)))
        if is_causal and context is not None and attn_mask is None:
            raise ValueError("is_causal is for self-attention; expected an attn_mask where key is not query.")

        def project(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Queries times beta, keys and values of tokens z, ([batch,] heads, n or m, head_dim) each."""
            q = self._split(self.q_proj(z))
            k, v = (self._split(self.k_proj(z)), self._split(self.v_proj(z))) if context is None else context
            return q * self.beta[:, None, None].to(q.dtype), k, v

        start = project(self.options.geometry.retract(x))
        q, k, _ = start
        bias, is_blind = logit_mask(q, k, key_padding_mask, attn_mask, is_causal and context is None)
        is_empty = None if is_blind is None else is_blind.all(-3).all(-2, keepdim=True)  # ([batch,] 1, 1)
        if self.validate and checks.can_read(q, k):
            # The logits while tokens at most double their length. In memory the heads are last but one: faster norms.
            lengths = [z.detach().transpose(-2, -3).norm(dim=-1).amax().float() for z in (q, k)]
            clouds = {"query": x.detach(), "key": y.detach()}
            if self.needs_float64(clouds, 4 * lengths[0] * lengths[1], is_empty) and weight is not None:
                options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
                return self._forward_in_float64(query, query if context is None else key, *options)
        known = [] if self.options.checkpoint else [start]  # a checkpoint has to compute it again

        def velocity(t: float, z: Tensor) -> Tensor:
            q, k, v = known.pop() if known else project(z)
            average = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
            average = average if is_blind is None else torch.where(is_blind, 0.0, average)
            return self.options.geometry.tangent(z, self.out_proj(average.transpose(-2, -3).flatten(-2)).to(z.dtype))

        shift = self.options.displacement(velocity, x)
        shift = shift if is_empty is None else torch.where(is_empty, 0.0, shift)
        shift = shift.transpose(0, 1) if is_sequence_first else shift
        if not need_weights:
            return shift, None
        weights = (q @ k.mT if bias is None else q @ k.mT + bias).softmax(-1)
        weights = weights if is_blind is None else torch.where(is_blind, 0.0, weights)
        return shift, weights.mean(-3) if average_attn_weights else weights

    def _forward_in_float64(self, query: Tensor, key: Tensor, *options: Any) -> tuple[Tensor, Tensor | None]:
        """The forward pass with weights and tokens in float64, returned in the dtype of the tokens."""
        tensors = [*self.named_parameters(), *self.named_buffers()]
        weights = {name: z.double() for name, z in tensors if z.is_floating_point()}
        x = query.double()
        y = x if key is query else key.double()
        module = copy.copy(self)  # which does not checkpoint: steps that are computed again would have other weights
        hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # run by self
        vars(module).update({name: OrderedDict() for name in hooks}, options=replace(self.options, checkpoint=False))
        shift, attention = torch.func.functional_call(module, weights, (x, y, y, *options))
        return shift.to(query.dtype), None if attention is None else attention.to(query.dtype)

    def _split(self, z: Tensor) -> Tensor:
        """([batch,] n, heads * k) -> ([batch,] heads, n, k)."""
        return z.unflatten(-1, (self.heads, -1)).transpose(-2, -3)


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one: the same object, or the same entries of one storage."""
    if a is b:
        return True
    if a.shape != b.shape or not checks.can_read(a, b) or a.requires_grad != b.requires_grad:
        return False
    return a.device == b.device and a.stride() == b.stride() and a.data_ptr() == b.data_ptr()
