"""Continuous attention in place of an nn.MultiheadAttention: the same call, the same shapes."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from attn_flow.base import checks
from attn_flow.geometry import Euclidean, place
from attn_flow.kernels import dense
from attn_flow.nn.masks import Masks, torch_masks
from attn_flow.nn.module import FlowModule, default_beta
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
    k_proj, v_proj and out_proj are nn.Linear modules, and `load_state_dict` also takes the state of an
    nn.MultiheadAttention.

    Args:
        embed_dim, num_heads, bias, batch_first, device, dtype: as in nn.MultiheadAttention.
        dropout, add_bias_kv, add_zero_attn, kdim, vdim: as there, but only with their default values.
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
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        beta: float | Tensor | None = None,
        **options: Unpack[FlowKeywords],
    ) -> None:
        if dropout != 0:
            raise ValueError(f"dropout = {dropout}, expected 0: a flow is deterministic. Put dropout around the layer.")
        if add_bias_kv or add_zero_attn or any(width not in (None, embed_dim) for width in (kdim, vdim)):
            raise ValueError("add_bias_kv, add_zero_attn, kdim and vdim are not supported: keys and values are tokens.")
        checks.require_count(embed_dim=embed_dim, num_heads=num_heads)
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim = {embed_dim} is not a multiple of num_heads = {num_heads}.")
        geometry = options["geometry"] = options.get("geometry") or Euclidean()
        if beta is None:
            beta = default_beta(embed_dim, embed_dim // num_heads, geometry)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(num_heads, beta, factory, **options)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.dropout, self.batch_first = 0.0, batch_first
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias, **factory)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias, **factory)  # softmax ignores the bias of the keys
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias, **factory)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as nn.MultiheadAttention does, and set beta to its initial value."""
        bound = math.sqrt(6 / (4 * self.embed_dim))  # xavier_uniform_ of the packed weight (3 embed_dim, embed_dim)
        self.out_proj.reset_parameters()
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if projection is not self.out_proj:
                nn.init.uniform_(projection.weight, -bound, bound)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        self.beta = self._initial_beta

    @classmethod
    def from_multihead(
        cls, multihead: nn.MultiheadAttention, *, beta: float | Tensor | None = None, **options: Unpack[FlowKeywords]
    ) -> ContinuousMultiheadAttention:
        """With the weights of an nn.MultiheadAttention; by default one Euler step of size one, which equals it.

        Args:
            multihead: frozen weights stay frozen. Attention dropout is left out, with a warning.
            beta, options: keyword arguments of the constructor. beta is 1 / sqrt(head width) by default.

        Example:
            >>> multihead = nn.MultiheadAttention(8, 2, batch_first=True)
            >>> x = torch.randn(3, 5, 8)
            >>> continuous = ContinuousMultiheadAttention.from_multihead(multihead)
            >>> torch.allclose(continuous(x, x, x)[0], multihead(x, x, x)[0], atol=1e-6)
            True
        """
        if multihead.bias_k is not None or multihead.add_zero_attn or multihead.in_proj_weight is None:
            raise ValueError("the nn.MultiheadAttention has add_bias_kv, add_zero_attn, kdim or vdim; expected none.")
        if multihead.dropout:
            warnings.warn(f"attention dropout {multihead.dropout} is left out: a flow is deterministic.", stacklevel=2)
        options.setdefault("step", "euler")
        module = cls(
            multihead.embed_dim,
            multihead.num_heads,
            bias=multihead.in_proj_bias is not None,
            batch_first=multihead.batch_first,
            device=multihead.in_proj_weight.device,
            dtype=multihead.in_proj_weight.dtype,
            beta=1 / math.sqrt(multihead.embed_dim // multihead.num_heads) if beta is None else beta,
            **options,
        )
        module.load_state_dict(multihead.state_dict())
        for kind in ("weight", "bias"):
            packed, out = getattr(multihead, f"in_proj_{kind}"), getattr(multihead.out_proj, kind)
            if packed is not None:
                for name in PROJECTIONS:
                    getattr(getattr(module, name), kind).requires_grad_(packed.requires_grad)
                getattr(module.out_proj, kind).requires_grad_(out.requires_grad)
        return module.train(multihead.training)

    @torch.no_grad()
    def to_multihead(self) -> nn.MultiheadAttention:
        """An nn.MultiheadAttention with these weights. Beta is folded into its queries; other options are lost.

        Example:
            >>> multihead = nn.MultiheadAttention(8, 2)
            >>> again = ContinuousMultiheadAttention.from_multihead(multihead).to_multihead()
            >>> torch.allclose(again.in_proj_weight, multihead.in_proj_weight)
            True
        """
        if self._is_hardmax:
            raise ValueError("beta = inf: an nn.MultiheadAttention has no hardmax attention; set a finite beta.")
        has_bias, weight = self.q_proj.bias is not None, self.q_proj.weight
        multihead = nn.MultiheadAttention(
            self.embed_dim,
            self.num_heads,
            bias=has_bias,
            batch_first=self.batch_first,
            device=weight.device,
            dtype=weight.dtype,
        )
        factor = (self.beta * math.sqrt(self.head_dim)).repeat_interleave(self.head_dim)  # torch divides by sqrt(k)
        weights = [self.q_proj.weight * factor[:, None], self.k_proj.weight, self.v_proj.weight]
        state = {"in_proj_weight": torch.cat(weights)}
        if has_bias:
            state["in_proj_bias"] = torch.cat([self.q_proj.bias * factor, self.k_proj.bias, self.v_proj.bias])
        multihead.load_state_dict(state | self.out_proj.state_dict(prefix="out_proj."))
        multihead.in_proj_weight.requires_grad_(self.q_proj.weight.requires_grad)
        for name, parameter in self.out_proj.named_parameters():
            getattr(multihead.out_proj, name).requires_grad_(parameter.requires_grad)
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
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As nn.MultiheadAttention.forward: the displacement, and the attention weights at the start if need_weights.

        Args:
            query, key, value: one tensor three times means self-attention; views of the same storage count as one.
                Otherwise key, which must be value, is a context that stays where it is (cross-attention). Compiled
                code compares the objects.
            key_padding_mask: ([batch,] m), True hides a key, or numbers that are added to the logits.
            attn_mask: (n, m) or (batch * heads, n, m), the same for pairs.
            is_causal: the causal mask, which replaces attn_mask.
            attention_mask: HuggingFace's padding mask, 1 for tokens: see `attn_flow.nn.masks.token_mask`.
        """
        x, y, is_self = self._check_shapes(query, key, value)
        causal = is_causal and is_self
        masks = torch_masks(x, y, self.num_heads, key_padding_mask, attn_mask, causal, attention_mask)
        if masks.pairs is not None and self._is_hardmax:
            raise ValueError("attn_mask with beta = inf; expected a finite beta, or is_causal for the causal mask.")
        start = self.geometry.retract(x)
        q, k = self._split(self.q_proj(start)), self._split(self.k_proj(start if is_self else y))
        if self.validate and checks.can_read(q, k, self.log_beta) and self._needs_float64(x, y, q, k, masks):
            options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal, attention_mask)
            return self._forward_in_float64(query, query if is_self else key, *options)
        # The first evaluation has its queries and keys; a checkpoint has to compute them again.
        first = [] if self.options.checkpoint else [(q, k)]
        context = None if is_self else (k, self._split(self.v_proj(y)))

        def velocity(t: float, z: Tensor) -> Tensor:
            if first:
                q, k = first.pop()
            else:
                q = self._split(self.q_proj(z))
                k = self._split(self.k_proj(z)) if context is None else context[0]
            v = self._split(self.v_proj(z)) if context is None else context[1]
            average = self._average(q, k, v, masks)
            return self.geometry.tangent(z, self.out_proj(average.transpose(-2, -3).flatten(-2)).to(z.dtype))

        shift = self.options.displacement(velocity, x)
        if masks.log_weights is not None:  # a cloud without keys does not move
            shift = torch.where(masks.log_weights.isneginf().all(-1)[..., None, None], 0.0, shift)
        weights = self._weights(q, k, masks) if need_weights else None
        if weights is not None and average_attn_weights:
            weights = weights.mean(-3)
        return (shift if query.ndim == 2 or self.batch_first else shift.transpose(0, 1)), weights

    def _forward_in_float64(self, query: Tensor, key: Tensor, *options: Any) -> tuple[Tensor, Tensor | None]:
        """The forward pass with weights and tokens in float64, returned in the dtype of the tokens."""
        tensors = [*self.named_parameters(), *self.named_buffers()]
        weights = {name: z.double() for name, z in tensors if z.is_floating_point()}
        x = query.double()
        y = x if key is query else key.double()
        shift, attention = torch.func.functional_call(self, weights, (x, y, y, *options))
        return shift.to(query.dtype), None if attention is None else attention.to(query.dtype)

    def _split(self, z: Tensor) -> Tensor:
        """([batch,] n, heads * k) -> ([batch,] heads, n, k)."""
        return z.unflatten(-1, (self.num_heads, -1)).transpose(-2, -3)

    def _average(self, q: Tensor, k: Tensor, v: Tensor, masks: Masks) -> Tensor:
        """The attention averages ([batch,] heads, n, k)."""
        scale = math.inf if self._is_hardmax else self.beta[:, None, None].to(q.dtype)
        if masks.pairs is None:
            log_weights = None if masks.log_weights is None else masks.log_weights[..., None, :]
            return dense.softmax_average(q, k, v, log_weights, scale=scale, causal=masks.causal)
        # The kernels have no mask of pairs. A finite number stands for -inf: a query that sees no key has no NaN.
        is_hidden = masks.pairs.isneginf()
        pairs = torch.where(is_hidden, torch.finfo(q.dtype).min / 4, masks.pairs.to(q.dtype))
        average = F.scaled_dot_product_attention(q * scale, k, v, pairs, scale=1.0)
        return torch.where(is_hidden.all(-1, keepdim=True), 0.0, average)

    def _weights(self, q: Tensor, k: Tensor, masks: Masks) -> Tensor:
        """The attention weights at the start, ([batch,] heads, n, m)."""
        bias = q.new_zeros(q.shape[-2], k.shape[-2]) if masks.pairs is None else masks.pairs.to(q.dtype)
        if masks.pairs is None and masks.log_weights is not None:
            bias = bias + masks.log_weights[..., None, None, :].to(q.dtype)
        if masks.causal:
            bias = bias + torch.full_like(bias[..., :1, :], -torch.inf).expand_as(bias).triu(1)
        if self._is_hardmax:
            return dense.hardmax_weights(q, k, q.new_zeros(k.shape[-2]), bias.isneginf())[0]
        return dense.normalised_exp((q * self.beta[:, None, None].to(q.dtype)) @ k.mT + bias)[0]

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Tokens x ([batch,] n, d) and keys y ([batch,] m, d), and whether they are the same."""
        is_self = _is_same(query, key)
        if not _is_same(key, value):
            raise ValueError("key and value are different tensors, expected one: a flow attends to one cloud.")
        for name, z in (("query", query), ("key", key)):
            checks.require_floating(name, z)
            if z.ndim not in (2, 3) or 0 in z.shape or z.shape[-1] != self.embed_dim:
                raise ValueError(f"{name} has shape {tuple(z.shape)}, expected ([batch,] n >= 1, {self.embed_dim}).")
        is_transposed = query.ndim == 3 and not self.batch_first
        x = query.transpose(0, 1) if is_transposed else query
        y = x if is_self else key.transpose(0, 1) if is_transposed else key
        if x.shape[:-2] != y.shape[:-2]:
            raise ValueError(f"query has shape {tuple(query.shape)} and key {tuple(key.shape)}, expected one batch.")
        return x, y, is_self

    @torch.no_grad()
    def _needs_float64(self, x: Tensor, y: Tensor, q: Tensor, k: Tensor, masks: Masks) -> bool:
        """Check finite tokens and the mask, and choose the precision, with one read from the device."""
        # The heads are last but one in memory, where norms are faster.
        bound = torch.linalg.vector_norm(q.transpose(-2, -3), dim=-1).amax()
        bound = bound * torch.linalg.vector_norm(k.transpose(-2, -3), dim=-1).amax()
        if not self._is_hardmax:  # tokens may grow: the bound allows twice their length
            bound = bound * self.beta.amax() * 4
        flags = [bound.double()]
        if masks.log_weights is not None:
            flags.append(masks.log_weights.isneginf().all(-1).any().double())
        if masks.is_padding is not None:
            flags.append((~masks.is_padding).double())
        size, is_empty, is_wrong = (torch.stack(flags).tolist() + [0.0, 0.0])[:3]
        if not math.isfinite(size):
            checks.require_finite("query", x)
            checks.require_finite("key", y)
            place("query", x, self.geometry)
        if is_wrong:
            raise ValueError("attention_mask hides tokens from some queries only, expected padding; use attn_mask.")
        if is_empty:
            warnings.warn("a mask hides every token of a cloud, whose output is zero.", stacklevel=6)
        if self._is_hardmax or torch.is_autocast_enabled(x.device.type):
            return False
        return checks.working_dtype(x.dtype, torch.tensor(size)) != x.dtype

    def extra_repr(self) -> str:
        beta = "learned" if self.learn_beta else "fixed"
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, beta {beta}, {self.options}"


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one: the same object, or the same entries of one storage."""
    if a is b:
        return True
    if a.shape != b.shape or not checks.can_read(a, b) or a.requires_grad != b.requires_grad:
        return False
    return a.device == b.device and a.stride() == b.stride() and a.data_ptr() == b.data_ptr()
