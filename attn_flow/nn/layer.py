"""The trainable layer: residual self-attention in continuous time, (batch, n, dim) -> (batch, n, dim)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from attn_flow.attention.attention import Attention
from attn_flow.base import checks
from attn_flow.nn.module import FlowModule, require_input
from attn_flow.nn.options import FlowKeywords


class ContinuousAttentionLayer(FlowModule):
    """x(horizon) of the flow x' = P_x F(x) of multi-head attention F, from x(0) = x.

    The residual connection is inside. (`ContinuousMultiheadAttention`, in place of an nn.MultiheadAttention, returns
    the displacement x(horizon) - x.)

    Args:
        dim, heads: the width of the tokens, and the number of heads.
        head_dim: the width of a head, by default dim / heads.
        beta: the inverse temperature of the scores <Q x, K y>, a number or one per head. The default,
            dim / (2 sqrt(head_dim) r^2) for tokens of length r, gives logits at initialisation the same spread, 1/2, as
            an nn.MultiheadAttention has on layer-normalised tokens. `layer.beta` reads it and `layer.beta = 8.0` sets
            it; the state dict has its logarithm, `log_beta`.
        learn_beta: train beta; see `parameter_groups` for weight decay, which would pull it to 1.
        horizon, steps, step, geometry, checkpoint: see `FlowOptions`. By default one RK4 step on the unit sphere, which
            costs about 4 times an nn.MultiheadAttention. Inputs are first retracted to the geometry.
        causal: token i sees only the tokens j <= i.
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
        causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[FlowKeywords],
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(dim, heads, head_dim, 0.5, factory, **options)
        # The weights are put in at every evaluation, because modules may exchange them.
        self._attention = Attention(dim=dim, causal=causal, kernel="dense")
        self.Q = nn.Parameter(torch.empty(heads, self.head_dim, dim, **factory))
        self.K = nn.Parameter(torch.empty(heads, self.head_dim, dim, **factory))
        self.V = nn.Parameter(torch.empty(heads, self.head_dim, dim, **factory))
        self.O = nn.Parameter(torch.empty(heads, dim, self.head_dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw Q, K, V, O with |Q x|, ... of order |x|, and set beta to its initial value."""
        for weight in (self.Q, self.K, self.V):
            nn.init.normal_(weight, std=1 / math.sqrt(self.dim))
        nn.init.normal_(self.O, std=1 / math.sqrt(self.heads * self.head_dim))
        self.beta = self._initial_beta

    def attention(self) -> Attention:
        """The attention with the weights of the layer, without the checks of a new `Attention`."""
        return self._attention.copy_with(Q=self.Q, K=self.K, V=self.V, O=self.O, beta=self.beta)

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
            mask: (..., n), True or 1 for tokens and False or 0 for padding.
            return_path: return all states.
            attention_mask: HuggingFace's name for `mask`.

        Returns:
            A tensor like x, or (steps + 1, ..., n, dim) with return_path. Padding comes out as it went in.
        """
        require_input("x", x, self.dim, self.Q)
        if mask is not None and attention_mask is not None:
            raise ValueError("mask and attention_mask are two names of one argument; pass one of them.")
        mask = attention_mask if mask is None else mask
        attention, geometry, start = self.attention(), self.options.geometry, x
        is_token = log_weights = None
        if mask is not None:
            checks.require_same_device("mask", mask, "x", x)
            if mask.shape != x.shape[:-1]:
                raise ValueError(f"mask has shape {tuple(mask.shape)}, expected (..., n) = {tuple(x.shape[:-1])}.")
            if mask.is_floating_point():  # such as numbers that are added to logits
                raise TypeError(f"mask has dtype {mask.dtype}, expected True or the integer 1 for tokens.")
            is_token, log_weights = (mask > 0)[..., None], torch.where(mask > 0, 0.0, -torch.inf)
            start = torch.where(is_token, x, torch.eye(1, self.dim).to(x))  # padding of zeros has no direction
        if self.validate and checks.can_read(x, self.Q, self.log_beta):
            radius = geometry.max_norm or 2 * start.detach().norm(dim=-1).amax()  # in flat space tokens may grow
            bound = attention.logit_bound(radius) if x.dtype == torch.float32 else torch.zeros(())
            is_empty = None if is_token is None else ~is_token.any(-2)
            if self.needs_float64({"x": start.detach()}, bound, is_empty):
                attention, start = attention.in_float64(), start.double()

        def velocity(t: float, y: Tensor) -> Tensor:
            return geometry.tangent(y, attention(t, y, log_weights).to(y.dtype))

        def output(y: Tensor) -> Tensor:
            return y.to(x.dtype) if is_token is None else torch.where(is_token, y.to(x.dtype), x)

        start = geometry.retract(start)
        if return_path:
            return torch.stack([output(y) for y in (start, *self.options.states(velocity, start))])
        return output(self.options.run(velocity, start))

    def extra_repr(self) -> str:
        return super().extra_repr() + ", causal" * self._attention.causal
