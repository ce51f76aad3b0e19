"""The trainable layer: residual self-attention in continuous time, (batch, n, dim) -> (batch, n, dim)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from attn_flow.attention.attention import Attention, Kind
from attn_flow.base import checks
from attn_flow.nn.masks import token_mask
from attn_flow.nn.module import FlowModule, require_input
from attn_flow.nn.options import FlowKeywords

WEIGHTS = ("Q", "K", "V", "O", "query_bias", "value_bias")


class ContinuousAttentionLayer(FlowModule):
    """x(horizon) of the flow x' = P_x F(x) of multi-head attention F, from x(0) = x.

    The residual connection is inside: the layer returns x(horizon) and not a displacement to be added. (In place of an
    nn.MultiheadAttention, use `ContinuousMultiheadAttention`, which returns the displacement.)

    Args:
        dim: the width d of the tokens.
        heads: the number of heads.
        head_dim: the width of a head, by default dim / heads.
        beta: the inverse temperature of the scores <Q x, K y>, a number or one per head. The default,
            dim / (2 sqrt(head_dim) r^2) for tokens of length r, gives logits at initialisation the same spread, 1/2, as
            an nn.MultiheadAttention has on layer-normalised tokens. `layer.beta` reads it and `layer.beta = 8.0` sets
            it. The state dict has it as `log_beta`. Weight decay would pull a learned beta to 1, which
            `parameter_groups` avoids.
        learn_beta: train beta.
        horizon, steps, step, geometry, checkpoint: see `FlowOptions`. By default one RK4 step on the unit sphere, which
            costs about 4 times an nn.MultiheadAttention. Inputs are first retracted to the geometry.

    Other arguments:
        kind, causal: see `Attention`.
        bias: with a bias of the queries and a constant drift.
        validate: check the values of the input and whether logits need float64, with one read from the device per
            forward pass. Compiled code does neither.

    Gradients are those of the discrete steps. The continuous adjoint is not offered: the flow contracts, its reversal
    expands, and the adjoint's gradients are off by several per cent at T = 5 and useless at T = 10.

    Example:
        >>> layer = ContinuousAttentionLayer(dim=64, heads=4, beta=4.0, learn_beta=True)
        >>> layer(torch.randn(8, 32, 64)).norm(dim=-1).mean()  # tokens of length 1
        tensor(1., grad_fn=<MeanBackward0>)
        >>> layer.options.evaluations
        4
    """

    def __init__(
        self,
        dim: int,
        heads: int = 1,
        head_dim: int | None = None,
        *,
        beta: float | Tensor | None = None,
        kind: Kind = "softmax",
        causal: bool = False,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[FlowKeywords],
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(dim, heads, head_dim, beta, 0.5, factory, **options)
        k = self.head_dim
        # The weights are put in at every evaluation, because modules may exchange them.
        self._attention = Attention(dim=dim, kind=kind, causal=causal, kernel="dense")
        self.Q = nn.Parameter(torch.empty(heads, k, dim, **factory))
        self.K = nn.Parameter(torch.empty(heads, k, dim, **factory))
        self.V = nn.Parameter(torch.empty(heads, k, dim, **factory))
        self.O = nn.Parameter(torch.empty(heads, dim, k, **factory))
        self.query_bias = nn.Parameter(torch.empty(heads, k, **factory)) if bias else None
        self.value_bias = nn.Parameter(torch.empty(dim, **factory)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw Q, K, V, O with |Q x|, ... of order |x|; set biases to zero and beta to its initial value."""
        for weight in (self.Q, self.K, self.V):
            nn.init.normal_(weight, std=1 / math.sqrt(self.dim))
        nn.init.normal_(self.O, std=1 / math.sqrt(self.heads * self.head_dim))
        for bias in (self.query_bias, self.value_bias):
            if bias is not None:
                nn.init.zeros_(bias)
        self.beta = self._initial_beta

    def attention(self) -> Attention:
        """The attention with the weights of the layer, without the checks of a new `Attention`."""
        return self._attention.copy_with(beta=self.beta, **{name: getattr(self, name) for name in WEIGHTS})

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        return_path: bool = False,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """The tokens after the horizon.

        Args:
            x: tokens (..., n, dim).
            mask: padding, True (or 1) for tokens, (..., n); or one of HuggingFace's extended masks, see `token_mask`.
            return_path: return all states.
            attention_mask: HuggingFace's name for `mask`.

        Returns:
            A tensor like x, or (steps + 1, ..., n, dim) with return_path. Padding comes out as it went in.
        """
        require_input("x", x, self.dim, self.Q)
        if mask is not None and attention_mask is not None:
            raise ValueError("mask and attention_mask are two names of one argument; pass one of them.")
        mask = attention_mask if mask is None else mask
        tokens = log_weights = None
        start = x
        if mask is not None:
            tokens = token_mask(mask, x)
            count = tokens.sum(-1, keepdim=True).clamp_min(1).to(x.dtype)
            log_weights = torch.where(tokens, -count.log(), -torch.inf)
            unit = torch.arange(self.dim, device=x.device).eq(0).to(x.dtype)
            start = torch.where(tokens[..., None], x, unit)  # padding may hold zeros, which have no direction
        attention, geometry, dtype = self.attention(), self.geometry, x.dtype
        if self.validate and checks.can_read(x, self.Q, self.log_beta):
            is_empty = None if tokens is None else ~tokens.any(-1)
            if self.needs_float64({"x": start.detach()}, self._logit_bound(start, attention), is_empty):
                attention, dtype = attention.in_float64(), torch.float64

        def velocity(t: float, y: Tensor) -> Tensor:
            drift = attention(t, y, log_weights).to(y.dtype)
            return geometry.tangent(y, drift if tokens is None else torch.where(tokens[..., None], drift, 0.0))

        def output(y: Tensor) -> Tensor:
            return y.to(x.dtype) if tokens is None else torch.where(tokens[..., None], y.to(x.dtype), x)

        start = geometry.retract(start.to(dtype))
        if return_path:
            return torch.stack([output(y) for y in (start, *self.options.states(velocity, start))])
        return output(self.options.run(velocity, start))

    @torch.no_grad()
    def _logit_bound(self, x: Tensor, attention: Attention) -> Tensor:
        """An upper bound on the logits, (); only float32 needs it. In flat space tokens may grow to twice their length."""
        if x.dtype != torch.float32:
            return torch.zeros(())
        radius = self.geometry.max_norm
        return attention.logit_bound(2 * x.norm(dim=-1).amax() if radius is None else radius)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self._attention.kind}{', causal' * self._attention.causal}"
