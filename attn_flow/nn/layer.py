"""The trainable module: residual self-attention in continuous time, (batch, n, dim) -> (batch, n, dim)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn_flow.attention import Attention, drift
from attn_flow.attention.projections import Kind
from attn_flow.base import checks
from attn_flow.dynamics.steppers import Adaptive, Step, named_step, rk4
from attn_flow.geometry import Geometry, Sphere, placed


class ContinuousAttentionLayer(nn.Module):
    """x(horizon) of x' = P_x sum_h O_h V_h m_beta[x](K_h^T Q_h x), in `steps` equal steps; deterministic, no dropout.

    dim, heads, head_dim: widths; head_dim defaults to dim / heads.
    beta: inverse temperature, one number or one per head; 1/sqrt(head_dim) by default. `learn_beta=True` makes log
        beta a parameter; `beta_schedule`, a function of s = t/horizon in [0, 1], multiplies beta along the depth.
    horizon, steps, step: how long, in how many steps, with which stepper (euler, rk4, dopri5 or your own).
    geometry: where tokens live, the unit sphere by default; inputs are retracted to it.
    checkpoint: recompute each step in the backward pass: memory of one step instead of all of them.

    Gradients differentiate the discrete steps. The continuous adjoint is not offered: this flow contracts, its
    reversal expands, and the adjoint's gradients are wrong by per cents at T = 5 and useless at T = 10.
    """

    log_beta: Tensor
    fixed_beta: Tensor

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
        step: str | Step = rk4,
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
        if dim < 1 or heads < 1 or (head_dim is not None and head_dim < 1):
            raise ValueError(f"dim = {dim}, heads = {heads}, head_dim = {head_dim}: expected at least one of each.")
        if head_dim is None and dim % heads:
            raise ValueError(f"dim = {dim} is no multiple of heads = {heads}; give head_dim.")
        if int(steps) != steps or steps < 1:
            raise ValueError(f"steps = {steps}, expected a whole number of at least 1.")
        if not 0 < horizon < math.inf:
            raise ValueError(f"horizon = {horizon}, expected a positive, finite number.")
        checks.one_of("kind", kind, get_args(Kind))
        chosen = named_step(step)
        if isinstance(chosen, Adaptive):
            raise ValueError(f"step = {step}, expected a step function such as rk4: a layer takes equal steps.")
        k = head_dim or dim // heads
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        beta = 1 / math.sqrt(k) if beta is None else beta
        if not isinstance(beta, Tensor):
            beta = torch.tensor(beta, dtype=torch.float64)  # a float has its digits, whatever torch's default dtype
        beta = beta.detach().to(device, dtype or torch.float32).clone()
        checks.inverse_temperature(beta)
        if beta.ndim > 1 or (beta.ndim == 1 and beta.shape[0] not in (1, heads)):
            raise ValueError(f"beta has shape {tuple(beta.shape)}, expected () or (heads,) = ({heads},).")
        self.dim, self.heads, self.head_dim = dim, heads, k
        self.horizon, self.steps, self.step = horizon, int(steps), chosen
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
            beta=attention.beta if attention.common_beta is None else attention.common_beta,
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
        from attn_flow.hooks import attentions  # type: ignore[import-not-found]

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
        now = self.beta if self.beta_schedule is None else self.beta * self.beta_schedule(s)
        number = not self.learn_beta and now.ndim == 0 and checks.can_look(now)
        beta = float(now) if number else now
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
        checks.tokens("x", x)
        if x.shape[-1] != self.dim:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (..., n, dim) = (..., n, {self.dim}).")
        tokens = None if mask is None else token_mask(mask, x, self.causal)
        attention = self.attention()
        attention.check_tokens(x)
        log_weights = None
        if tokens is not None:  # log(1/n) over the tokens, -inf for padding
            count = tokens.sum(-1, keepdim=True).to(x.dtype)
            log_weights = (-count.log()).expand(tokens.shape).masked_fill(~tokens, -torch.inf)

        prepared = attention.prepared()

        def velocity(t: float, x: Tensor) -> Tensor:
            p = prepared if self.beta_schedule is None else self.attention(t / self.horizon).prepared()
            F = drift.against_cloud(p, x, x, log_weights)
            F = F if tokens is None else F.masked_fill(~tokens[..., None], 0.0)
            return self.geometry.tangent(x, F.to(x.dtype))

        def outside(now: Tensor) -> Tensor:
            return now if tokens is None else torch.where(tokens[..., None], now, x)

        h = self.horizon / self.steps
        now = placed("x", x, tokens, self.geometry)
        path = [outside(now)] if return_path else []
        for i in range(self.steps):
            if self.checkpoint and torch.is_grad_enabled():
                now = checkpoint(self.step, velocity, i * h, now, h, self.geometry, use_reentrant=False)
            else:
                now = self.step(velocity, i * h, now, h, self.geometry)
            if checks.can_look(now) and not checks.all_finite(now):
                raise FloatingPointError(
                    f"tokens left the range of {now.dtype} at t = {(i + 1) * h:.6g} of {self.horizon:.6g}; use more "
                    "steps, a shorter horizon, or a wider dtype."
                )
            if return_path:
                path.append(outside(now))
        return torch.stack(path) if return_path else outside(now)

    def extra_repr(self) -> str:
        step = getattr(self.step, "name", getattr(self.step, "__name__", "custom"))
        return (
            f"dim={self.dim}, heads={self.heads}, head_dim={self.head_dim}, horizon={self.horizon}, "
            f"steps={self.steps}, step={step}, geometry={self.geometry}, kind={self.kind}, learn_beta={self.learn_beta}"
        )


def token_mask(mask: Tensor, x: Tensor, causal: bool = False) -> Tensor:
    """Any HuggingFace padding mask as bool (..., n), True for tokens.

    Known forms: (batch, n), (batch, n, n), (batch, 1, 1, n) and (batch, 1, n, n); bool or numbers with 1 = attend, or
    additive with 0 = attend and a large negative number = hide. A mask that hides a token from some queries only says
    more than padding and is refused, but for the causal one with `causal`.
    """
    checks.tensor("mask", mask, "(batch, n), (batch, n, n), (batch, 1, 1, n) or (batch, 1, n, n)")
    additive = (
        mask.is_floating_point() and mask.ndim >= x.ndim and not (checks.can_look(mask) and bool((mask > 0).any()))
    )
    keep = mask if mask.dtype == torch.bool else mask >= 0 if additive else mask > 0
    if keep.ndim == x.ndim + 1 and keep.shape[-3] == 1:
        keep = keep[..., 0, :, :]
    queries = keep if keep.ndim == x.ndim else None  # (batch, 1 or n, n)
    keep = keep if queries is None else queries.any(-2)  # a token is what some query may attend to
    if keep.ndim != x.ndim - 1 or keep.shape[-1] != x.shape[-2] or not checks.broadcasts(keep.shape, x.shape[:-1]):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, expected (batch, n), (batch, n, n), (batch, 1, 1, n) or "
            f"(batch, 1, n, n) with (batch, n) = {tuple(x.shape[:-1])}."
        )
    if queries is not None and checks.can_look(queries):
        n, real = x.shape[-2], keep[..., None] if queries.shape[-2] > 1 else keep.any(-1)[..., None, None]
        seen = keep[..., None, :].expand_as(queries)
        later = torch.ones(n, n, dtype=torch.bool, device=mask.device).triu(1)
        if bool(((queries != seen) & real).any()) and not (
            causal and queries.shape[-2] == n and bool(((queries == seen & ~later) | ~real).all())
        ):
            raise ValueError(
                f"mask of shape {tuple(mask.shape)} hides tokens from some queries and not from others; expected "
                "padding. For the causal mask build the layer with causal=True."
            )
    keep = keep.expand(x.shape[:-1])
    checks.token_mask(keep, x)
    return keep
