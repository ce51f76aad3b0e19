"""The trainable module: residual self-attention in continuous time, (batch, n, dim) -> (batch, n, dim)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn_flow import checks
from attn_flow.attention import Attention, Kind
from attn_flow.flow import on_points
from attn_flow.geometry import Geometry, Sphere
from attn_flow.steppers import Step, rk4


class ContinuousAttentionLayer(nn.Module):
    """x(horizon) of x' = P_x sum_h O_h V_h m_beta[x](K_h^T Q_h x), in `steps` equal steps; deterministic, no dropout.

    dim, heads, head_dim: widths; head_dim defaults to dim / heads.
    beta: inverse temperature, one number or one per head; 1/sqrt(head_dim) by default. `learn_beta=True` makes log
        beta a parameter; `beta_schedule`, a function of s = t/horizon in [0, 1], multiplies beta along the depth.
    horizon, steps, step: how long, in how many steps, with which stepper (euler, rk4, dopri5 or your own).
    geometry: where tokens live, the unit sphere by default; inputs are retracted to it.
    checkpoint: recompute each step in the backward pass: memory of one step instead of all of them.

    Gradients differentiate the discrete steps. The continuous adjoint is not offered: this flow contracts, its
    reversal expands, and the adjoint's gradients are wrong by tens of per cent within a few units of time.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 1,
        head_dim: int | None = None,
        *,
        beta: float | Tensor | None = None,
        learn_beta: bool = False,
        beta_schedule: Callable[[float], float] | None = None,
        horizon: float = 1.0,
        steps: int = 8,
        step: Step = rk4,
        geometry: Geometry | None = None,
        kind: Kind = "softmax",
        causal: bool = False,
        self_attention: bool = True,
        bias: bool = False,
        checkpoint: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if head_dim is None and dim % heads:
            raise ValueError(f"dim = {dim} is no multiple of heads = {heads}; give head_dim.")
        if int(steps) != steps or steps < 1:
            raise ValueError(f"steps = {steps}, expected a whole number of at least 1.")
        checks.positive("horizon", horizon)
        k = head_dim or dim // heads
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        beta = torch.as_tensor(1 / math.sqrt(k) if beta is None else beta, **{**make, "dtype": dtype or torch.float32})
        checks.inverse_temperature(beta)
        if beta.ndim > 1 or (beta.ndim == 1 and beta.shape[0] not in (1, heads)):
            raise ValueError(f"beta has shape {tuple(beta.shape)}, expected () or (heads,) = ({heads},).")
        self.dim, self.heads, self.head_dim = dim, heads, k
        self.horizon, self.steps, self.step = horizon, int(steps), step
        self.geometry: Geometry = Sphere() if geometry is None else geometry
        self.kind, self.causal, self.self_attention, self.checkpoint = kind, causal, self_attention, checkpoint
        self.beta_schedule = beta_schedule
        self.Q = nn.Parameter(torch.empty(heads, k, dim, **make))
        self.K = nn.Parameter(torch.empty(heads, k, dim, **make))
        self.V = nn.Parameter(torch.empty(heads, k, dim, **make))
        self.O = nn.Parameter(torch.empty(heads, dim, k, **make))
        self.query_bias = nn.Parameter(torch.empty(heads, k, **make)) if bias else None
        self.value_bias = nn.Parameter(torch.empty(dim, **make)) if bias else None
        if learn_beta:
            if checks.can_look(beta) and not bool((beta > 0).all() & torch.isfinite(beta).all()):
                raise ValueError(f"beta = {beta.tolist()} cannot be learned; expected positive and finite.")
            self.log_beta = nn.Parameter(beta.log())
        else:
            self.register_buffer("fixed_beta", beta)
        self.learn_beta = learn_beta
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Q, K, V, O with entries of variance 1/dim, so that |Q x|, ... are of order |x|; biases zero."""
        for weight in (self.Q, self.K, self.V):
            nn.init.normal_(weight, std=1 / math.sqrt(self.dim))
        nn.init.normal_(self.O, std=1 / math.sqrt(self.heads * self.head_dim))
        for bias in (self.query_bias, self.value_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    @classmethod
    def from_attention(cls, attention: Attention, **options: Any) -> ContinuousAttentionLayer:
        """The layer with an `Attention`'s weights; options as in the constructor (horizon, steps, geometry, ...)."""
        if attention.Q.ndim != 3:
            raise ValueError(
                f"Q has shape {tuple(attention.Q.shape)}; a layer takes one attention, not a batch of them."
            )
        eye = torch.eye(attention.dim, dtype=attention.Q.dtype, device=attention.Q.device)
        eye = eye.expand(attention.heads, -1, -1)
        parts = {
            "Q": attention.Q,
            "K": eye if attention.K is None else attention.K,
            "V": eye if attention.V is None else attention.V,
            "O": eye if attention.O is None else attention.O,
        }
        layer = cls(
            attention.dim,
            attention.heads,
            attention.Q.shape[-2],
            beta=attention.beta if not attention.cold else math.inf,
            kind=attention.kind,
            causal=attention.causal,
            self_attention=attention.self_attention,
            bias=attention.query_bias is not None or attention.value_bias is not None,
            dtype=attention.Q.dtype,
            device=attention.Q.device,
            **options,
        )
        if layer.query_bias is not None and attention.query_bias is not None:
            parts["query_bias"] = attention.query_bias
        if layer.value_bias is not None and attention.value_bias is not None:
            parts["value_bias"] = attention.value_bias
        for name, weight in parts.items():
            setattr(layer, name, nn.Parameter(weight.detach().clone()))
        return layer

    @classmethod
    def from_pretrained(cls, model: nn.Module, layer: int, **options: Any) -> ContinuousAttentionLayer:
        """The flow of one layer's own weights, read from a pretrained encoder (see `attn_flow.hooks`)."""
        from attn_flow.hooks import attentions

        found = attentions(model)
        if not -len(found) <= layer < len(found):
            raise ValueError(f"layer = {layer}, expected an index into the model's {len(found)} layers.")
        return cls.from_attention(found[layer], **options)

    @property
    def beta(self) -> Tensor:
        """The inverse temperature, () or (heads,)."""
        return self.log_beta.exp() if self.learn_beta else self.fixed_beta

    def attention(self, s: float = 0.0) -> Attention:
        """The attention at the depth s = t/horizon."""
        beta: float | Tensor = self.beta
        if not self.learn_beta and beta.ndim == 0 and checks.can_look(beta):
            beta = float(beta)
        if self.beta_schedule is not None:
            beta = beta * self.beta_schedule(s)
        return Attention(
            self.Q,
            self.K,
            self.V,
            self.O,
            beta,
            self.query_bias,
            self.value_bias,
            self.kind,
            self.causal,
            self.self_attention,
        )

    def forward(self, x: Tensor, mask: Tensor | None = None, return_path: bool = False) -> Tensor:
        """x (..., n, dim) after the horizon; with return_path all steps + 1 clouds, (steps + 1, ..., n, dim).

        mask: padding in any of HuggingFace's forms (see `token_mask`). Padding comes out as it went in.
        """
        if x.shape[-1] != self.dim or x.ndim < 2:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (..., n, dim) = (..., n, {self.dim}).")
        checks.tokens("x", x)
        tokens = None if mask is None else token_mask(mask, x)
        log_weights = None if tokens is None else torch.zeros_like(x[..., 0]).masked_fill(~tokens, -torch.inf)

        def velocity(t: float, x: Tensor) -> Tensor:
            drift = self.attention(t / self.horizon).self_drift(x, log_weights, tokens)
            return self.geometry.tangent(x, drift.to(x.dtype))

        h = self.horizon / self.steps
        now = self.geometry.retract(on_points(x, tokens))
        path = [now]
        for i in range(self.steps):
            if self.checkpoint and torch.is_grad_enabled():
                now = checkpoint(self.step, velocity, i * h, now, h, self.geometry, use_reentrant=False)
            else:
                now = self.step(velocity, i * h, now, h, self.geometry)
            path.append(now)
        if tokens is not None:
            path = [torch.where(tokens[..., None], y, x) for y in (path if return_path else path[-1:])]
        return torch.stack(path) if return_path else path[-1]

    def extra_repr(self) -> str:
        step = getattr(self.step, "name", getattr(self.step, "__name__", "custom"))
        return (
            f"dim={self.dim}, heads={self.heads}, head_dim={self.head_dim}, horizon={self.horizon}, "
            f"steps={self.steps}, step={step}, geometry={self.geometry}, kind={self.kind}, learn_beta={self.learn_beta}"
        )


def token_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Any HuggingFace padding mask as bool (..., n), True for tokens.

    Known forms: (batch, n) with 1 or True for tokens; (batch, 1, 1, n) and (batch, 1, n, n), bool with True = attend
    or additive with 0 = attend and a large negative number = hide.
    """
    keep = mask if mask.dtype == torch.bool else mask >= -1e-6 if _additive(mask) else mask > 0
    if keep.ndim == x.ndim + 1 and keep.shape[-3] == 1:
        keep = keep.any(-2)[..., 0, :]  # a key is a token if some query may attend to it
    if keep.shape != x.shape[:-1]:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, expected (batch, n), (batch, 1, 1, n) or (batch, 1, n, n) with "
            f"(batch, n) = {tuple(x.shape[:-1])}."
        )
    checks.token_mask(keep, x)
    return keep


def _additive(mask: Tensor) -> bool:
    """A 4-D floating mask adds to the logits; a 2-D one, of any dtype, counts tokens."""
    return mask.is_floating_point() and mask.ndim > 2
