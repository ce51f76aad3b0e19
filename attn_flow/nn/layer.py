"""The trainable module: residual self-attention in continuous time, (batch, n, dim) -> (batch, n, dim)."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn_flow.attention import Attention, drift
from attn_flow.attention.projections import Kind, Projections
from attn_flow.averages import dense
from attn_flow.base import checks, memory
from attn_flow.dynamics.steppers import Adaptive, RungeKutta, Step, euler, named_step, rk4
from attn_flow.geometry import Euclidean, Geometry, check_placed, known_geometry, placed


class ContinuousAttentionLayer(nn.Module):
    """x(horizon) of x' = P_x sum_h O_h V_h m_beta[x](K_h^T Q_h x), in `steps` equal steps; deterministic, no dropout.

    The residual is inside: the layer returns x(horizon), not a displacement to be added (for that, in the place of an
    nn.MultiheadAttention, see `ContinuousMultiheadAttention`).

    Args:
        dim: width d of the tokens.
        heads: number of heads.
        head_dim: width of a head, dim / heads by default.
        beta: inverse temperature of the scores <Q x, K y>, one number or (heads,); 1/sqrt(head_dim) by default. It is
            part of the state under the key `log_beta` (heads,), learned or not: `load_state_dict` sets it. `layer.beta`
            reads it and `layer.beta = 8.0` sets it.
        learn_beta: make `log_beta` a parameter.
        beta_schedule: a function of s = t/horizon in [0, 1] that multiplies beta along the depth, such as those of
            `attn_flow.nn.schedules`, which pickle.
        horizon: how long tokens flow.
        steps, step: in how many equal steps, by which stepper: "euler", "rk4", "dopri5" or a function. A step costs 1,
            4 or 7 attentions: the default, one RK4 step, about 4 times an nn.MultiheadAttention.
        geometry: where tokens live, the unit sphere by default; inputs are retracted to it. Its tensors are buffers.
        kind, causal, self_attention: as in `Attention`.
        bias: a query bias and a constant drift.
        checkpoint: recompute each step in the backward pass: memory of one step instead of all of them.
        validate: look at the input once per forward, for finite entries and for logits that need float64 (one read
            from an accelerator); False looks at nothing. Compiled code, which cannot look, keeps the precision of the
            last forward pass that did: run the layer once before compiling it at a large beta.

    Gradients differentiate the discrete steps. The continuous adjoint is not offered: this flow contracts, its
    reversal expands, and the adjoint's gradients are wrong by per cents at T = 5 and useless at T = 10.

    Example:
        >>> layer = ContinuousAttentionLayer(dim=64, heads=4, beta=4.0, learn_beta=True)
        >>> layer(torch.randn(8, 32, 64)).norm(dim=-1).shape  # tokens of length 1
        torch.Size([8, 32])
        >>> layer.evaluations
        4
    """

    log_beta: Tensor

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
        steps: int = 1,
        step: str | Step = rk4,
        geometry: Geometry | None = None,
        kind: Kind = "softmax",
        causal: bool = False,
        self_attention: bool = True,
        bias: bool = False,
        checkpoint: bool = False,
        validate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"dim": dim, "heads": heads, "head_dim": 1 if head_dim is None else head_dim, "steps": steps}
        for name, size in sizes.items():
            checks.whole(name, size)
        flags = {"learn_beta": learn_beta, "causal": causal, "self_attention": self_attention, "bias": bias}
        checks.flags(**flags, checkpoint=checkpoint, validate=validate)
        if beta_schedule is not None:
            checks.function("beta_schedule", beta_schedule, "of s = t/horizon that multiplies beta")
        if head_dim is None and dim % heads:
            raise ValueError(f"dim = {dim} is no multiple of heads = {heads}; give head_dim.")
        if not isinstance(horizon, int | float) or not 0 < horizon < math.inf:
            raise ValueError(f"horizon = {horizon}, expected a positive, finite number.")
        checks.one_of("kind", kind, get_args(Kind))
        checks.made_with(dtype, device)
        chosen = named_step(step)
        if isinstance(chosen, Adaptive):
            raise ValueError(f"step = {step}, expected a step function such as rk4: a layer takes equal steps.")
        k = head_dim or dim // heads
        memory.require_tensor(4, heads, k, dim, dtype=dtype, device=device)
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        self.dim, self.heads, self.head_dim, self.learn_beta = dim, heads, k, learn_beta
        self.horizon, self.steps, self.step = horizon, int(steps), chosen
        self.kind, self.causal, self.self_attention, self.checkpoint = kind, causal, self_attention, checkpoint
        self.beta_schedule, self.validate, self._precise = beta_schedule, validate, False
        self._keep_geometry(known_geometry(geometry))
        self.Q = nn.Parameter(torch.empty(heads, k, dim, **make))
        self.K = nn.Parameter(torch.empty(heads, k, dim, **make))
        self.V = nn.Parameter(torch.empty(heads, k, dim, **make))
        self.O = nn.Parameter(torch.empty(heads, dim, k, **make))
        self.query_bias = nn.Parameter(torch.empty(heads, k, **make)) if bias else None
        self.value_bias = nn.Parameter(torch.empty(dim, **make)) if bias else None
        log_beta = torch.empty(heads, device=device, dtype=dtype or torch.float32)
        if learn_beta:
            self.log_beta = nn.Parameter(log_beta)
        else:
            self.register_buffer("log_beta", log_beta)
        self.beta = 1 / math.sqrt(k) if beta is None else beta
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
    def from_attention(
        cls,
        attention: Attention,
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
    ) -> ContinuousAttentionLayer:
        """The layer with an `Attention`'s weights and its beta, unless another is given; the rest as in `__init__`.

        Example:
            >>> ContinuousAttentionLayer.from_attention(Attention.identity(3, beta=2.0), steps=4).beta
            tensor([2.])
        """
        if not isinstance(attention, Attention):
            raise ValueError(f"a layer takes an Attention alone, got {attention!r}; put other fields between layers.")
        if attention.Q.ndim != 3:
            raise ValueError(
                f"Q has shape {tuple(attention.Q.shape)}; a layer takes one attention, not a batch of them."
            )
        eye = torch.eye(attention.dim, dtype=attention.Q.dtype, device=attention.Q.device)
        weights = {name: eye.expand(attention.heads, -1, -1) for name in "QKVO"} | attention.tensors
        own = weights.pop("beta")
        if beta is None:
            beta = own if attention.common_beta is None else attention.common_beta
        layer = cls(
            attention.dim,
            attention.heads,
            attention.Q.shape[-2],
            beta=beta,
            learn_beta=learn_beta,
            beta_schedule=beta_schedule,
            horizon=horizon,
            steps=steps,
            step=step,
            geometry=geometry,
            kind=attention.kind,
            causal=attention.causal,
            self_attention=attention.self_attention,
            bias=attention.query_bias is not None or attention.value_bias is not None,
            checkpoint=checkpoint,
            validate=validate,
            dtype=attention.Q.dtype,
            device=attention.Q.device,
        )
        for name, weight in weights.items():
            setattr(layer, name, nn.Parameter(weight.detach().clone()))
        return layer

    @classmethod
    def from_pretrained(
        cls,
        model: nn.Module,
        layer: int,
        *,
        beta: float | Tensor | None = None,
        learn_beta: bool = False,
        beta_schedule: Callable[[float], float] | None = None,
        horizon: float = 1.0,
        steps: int = 1,
        step: str | Step = euler,
        geometry: Geometry | None = None,
        checkpoint: bool = False,
        validate: bool = True,
    ) -> ContinuousAttentionLayer:
        """The flow of one layer's own weights, read from a pretrained encoder (see `attn_flow.hooks`).

        By default it is that layer's attention with its residual, x + attention(x): one Euler step of size one in
        flat space at the trained beta, of tokens as attention sees them. Arguments as in the constructor.
        """
        # By name: encoders stand above layers, and wrap them.
        found = importlib.import_module("attn_flow.hooks").attentions(model)
        if not -len(found) <= layer < len(found):
            raise ValueError(f"layer = {layer}, expected an index into the model's {len(found)} layers.")
        return cls.from_attention(
            found[layer],
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

    # --- temperature and geometry ---------------------------------------------------------------------------------

    @property
    def beta(self) -> Tensor:
        """The inverse temperature, (heads,)."""
        return self.log_beta.exp()

    @beta.setter
    def beta(self, beta: float | Tensor) -> None:
        if not isinstance(beta, Tensor):
            try:
                beta = torch.tensor(beta, dtype=torch.float64)  # a float has its digits, whatever torch's default dtype
            except (TypeError, ValueError, RuntimeError):
                raise ValueError(f"beta is a {type(beta).__name__}, expected a number or one per head.") from None
        checks.inverse_temperature(beta)
        if beta.ndim > 1 or (beta.ndim == 1 and beta.shape[0] not in (1, self.heads)):
            raise ValueError(f"beta has shape {tuple(beta.shape)}, expected () or (heads,) = ({self.heads},).")
        if self.learn_beta and checks.can_look(beta) and not bool((beta > 0).all() & torch.isfinite(beta).all()):
            raise ValueError(f"beta = {beta.tolist()} cannot be learned; expected positive and finite.")
        with torch.no_grad():
            self.log_beta.copy_(beta.detach().double().log().expand(self.heads))
        self._note_cold()

    def _note_cold(self) -> None:
        """Whether beta = inf, known without a look at a device."""
        infinite = self.log_beta.detach() == math.inf if checks.can_look(self.log_beta) else None
        if infinite is not None and bool(infinite.any()) and not bool(infinite.all()):
            raise ValueError("beta mixes finite and infinite entries; expected one or the other for all heads.")
        self._cold = infinite is not None and bool(infinite.all())
        if self._cold and self.kind not in ("softmax", "hardmax"):
            raise ValueError(f"beta = inf with kind = {self.kind!r}; only softmax has a zero-temperature limit.")

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._note_cold()

    def _keep_geometry(self, geometry: Geometry) -> None:
        """The geometry, with its tensors as buffers, so that they move and are saved with the layer."""
        self._geometry = geometry
        self._geometry_from: dict[str, Tensor] = {}
        fields: tuple[Any, ...] = dataclasses.fields(geometry) if dataclasses.is_dataclass(geometry) else ()
        for field in fields:
            value = getattr(geometry, field.name)
            if field.init and isinstance(value, Tensor):
                self.register_buffer(f"geometry_{field.name}", value)
                self._geometry_from[field.name] = value

    @property
    def geometry(self) -> Geometry:
        now = {name: getattr(self, f"geometry_{name}") for name in self._geometry_from}
        if any(now[name] is not before for name, before in self._geometry_from.items()):  # moved, cast or loaded
            self._geometry = replace(self._geometry, **now)  # type: ignore[type-var]
            self._geometry_from = now
        return self._geometry

    @geometry.setter
    def geometry(self, geometry: Geometry) -> None:
        for name in self._geometry_from:
            delattr(self, f"geometry_{name}")
        self._keep_geometry(geometry)

    @property
    def evaluations(self) -> int | None:
        """Attentions computed in one forward pass; None for a stepper of your own."""
        return self.steps * (1 + len(self.step.a)) if isinstance(self.step, RungeKutta) else None

    def attention(self, s: float = 0.0) -> Attention:
        """The attention at the depth s = t/horizon."""
        beta = self._beta_at(s)
        weights = (self.Q, self.K, self.V, self.O, beta, self.query_bias, self.value_bias)
        return Attention(*weights, self.kind, self.causal, self.self_attention)

    def _beta_at(self, s: float) -> float | Tensor:
        if self._cold or self.kind == "hardmax":
            return math.inf
        return self.beta if self.beta_schedule is None else self.beta * self.beta_schedule(s)

    def _prepared(self, s: float) -> Projections:
        """What `attention(s).prepared()` is, unchecked: the weights are the layer's own."""
        return Projections.of(
            self.Q,
            self.K,
            self.V,
            self.O,
            self._beta_at(s),
            self.query_bias,
            self.value_bias,
            kind="softmax" if self.kind == "hardmax" else self.kind,
            causal=self.causal,
            self_attention=self.self_attention,
        )

    # --- the flow -------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, mask: Tensor | None = None, return_path: bool = False) -> Tensor:
        """x (..., n, dim) after the horizon; with return_path all steps + 1 clouds, (steps + 1, ..., n, dim).

        mask: padding in any of HuggingFace's forms (see `token_mask`). Padding comes out as it went in.
        """
        self._check(x)
        tokens = None if mask is None else token_mask(mask, x, self.causal)
        log_weights = None if tokens is None else uniform_log_weights(tokens, x.dtype)

        def field(p: Projections, x: Tensor) -> Tensor:
            F = drift.against_cloud(p, x, x, log_weights, at_once=True)
            return F if tokens is None else F.masked_fill(~tokens[..., None], 0.0)

        return self.evolve(x, field, tokens, return_path)

    def evolve(
        self,
        x: Tensor,
        field: Callable[[Projections, Tensor], Tensor],
        tokens: Tensor | None = None,
        return_path: bool = False,
    ) -> Tensor:
        """x after the horizon under the drift field(weights, x), with the layer's weights as they are at that depth.

        tokens: (..., n), True for tokens; the others come out as they went in.
        """
        h = self.horizon / self.steps
        now = placed("x", x, tokens, self.geometry, look=False)
        prepared = self._prepared(0.0)
        looks = self.validate and checks.can_look(x, *prepared.tensors)
        precise = self._looked(x, now, prepared) if looks else self.validate and self._precise
        prepared = replace(prepared, precise=precise)

        def velocity(t: float, x: Tensor) -> Tensor:
            scheduled = self.beta_schedule is not None
            p = replace(self._prepared(t / self.horizon), precise=precise) if scheduled else prepared
            return self.geometry.tangent(x, field(p, x).to(x.dtype))

        def outside(now: Tensor) -> Tensor:
            return now if tokens is None else torch.where(tokens[..., None], now, x)

        path, start = [outside(now)] if return_path else [], now
        for i in range(self.steps):
            if self.checkpoint and torch.is_grad_enabled():
                now = checkpoint(self.step, velocity, i * h, now, h, self.geometry, use_reentrant=False)
            else:
                now = self.step(velocity, i * h, now, h, self.geometry)
            if i == 0 and looks:
                self._precise = precise.found(prepared, start) if isinstance(precise, FirstLook) else precise
            # An accelerator would have to wait for every step.
            if looks and now.device.type == "cpu" and not checks.all_finite(now):
                raise FloatingPointError(
                    f"tokens left the range of {now.dtype} at t = {(i + 1) * h:.6g} of {self.horizon:.6g}; use more "
                    "steps, a shorter horizon, or a wider dtype."
                )
            if return_path:
                path.append(outside(now))
        return torch.stack(path) if return_path else outside(now)

    def _check(self, x: Tensor) -> None:
        checks.floating("x", x, "(..., n, dim)")
        if x.ndim < 2 or x.shape[-1] != self.dim or x.shape[-2] == 0:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (..., n, dim) = (..., n, {self.dim}), n >= 1.")
        if x.dtype != self.Q.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"x has dtype {x.dtype} and the layer {self.Q.dtype}; use x.to({self.Q.dtype}).")
        checks.same_device("x", x, "the layer", self.Q)
        if not self.self_attention and x.shape[-2] < 2:
            raise ValueError(
                "self_attention=False leaves a cloud of one token nobody to attend to; expected two or more."
            )

    def _looked(self, x: Tensor, start: Tensor, p: Projections) -> bool | FirstLook:
        """Whether logits need float64, or who will tell; ValueError for tokens x not finite or without a place.

        On a bounded geometry the logits have a bound for all times. One read of a device, now or at the first drift.
        """

        def check(total: float) -> None:
            if not math.isfinite(total):
                checks.finite("x", x)
                check_placed("x", start, self.geometry)

        with torch.no_grad():
            total = start.sum()
            coarse = start.dtype == torch.float32 and not torch.is_autocast_enabled(start.device.type) and not p.cold
            bound, longest = torch.zeros_like(total), self.geometry.longest
            if coarse and longest is None:
                return FirstLook(total, check, 4 * self._colder())
            if coarse and longest is not None:
                bound = self._colder() * p.logit_bound(longest)
            seen, size = checks.read(total, bound)
        check(seen)
        return not size <= dense.LOGIT_RANGE

    def _colder(self) -> float:
        """The largest beta of the schedule, over the first: at the ends and the middle of every step."""
        if self.beta_schedule is None:
            return 1.0
        betas = [float(self.beta_schedule(i / (2 * self.steps))) for i in range(2 * self.steps + 1)]
        return max(betas) / betas[0] if betas[0] > 0 else math.inf

    def extra_repr(self) -> str:
        step = getattr(self.step, "name", getattr(self.step, "__name__", "custom"))
        n = self.evaluations
        cost = "" if n is None else f" ({n} attention{'s' * (n > 1)} a forward pass)"
        return (
            f"dim={self.dim}, heads={self.heads}, head_dim={self.head_dim}, horizon={self.horizon}, "
            f"steps={self.steps}, step={step}{cost}, geometry={self.geometry}, kind={self.kind}, "
            f"learn_beta={self.learn_beta}"
        )


class FirstLook:
    """Whether a flow in flat space needs float64 for its logits, told by the queries and keys of its first drift.

    total: the sum of all tokens; `check` is handed it in the same read of a device. room: logits may grow so many
    times later; 4 is for tokens twice as long.
    """

    precise: bool | None = None

    def __init__(self, total: Tensor, check: Callable[[float], None], room: float) -> None:
        self.total, self.check, self.room = total, check, room

    def __call__(self, q: Tensor, k: Tensor, scale: float) -> bool:
        if self.precise is None and checks.can_look(q, k):
            with torch.no_grad():
                # Heads last but one: as they lie in memory, which is faster.
                lengths = (torch.linalg.vector_norm(z.transpose(-2, -3), dim=-1).amax() for z in (q, k))
                total, size = checks.read(self.total, self.room * scale * math.prod(lengths))
            self.check(total)
            self.precise = not size <= dense.LOGIT_RANGE
        return bool(self.precise)

    def found(self, p: Projections, start: Tensor) -> bool:
        """The same after that drift, which looks at nothing where a few near keys are enough."""
        return self(p.queries(start), p.keys(start), p.scale) if self.precise is None else self.precise


def uniform_log_weights(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """log(1/n) over the n tokens of a cloud, -inf for padding, (..., n)."""
    count = tokens.sum(-1, keepdim=True).to(dtype)
    return (-count.log()).expand(tokens.shape).masked_fill(~tokens, -torch.inf)


def token_mask(mask: Tensor, x: Tensor, causal: bool = False) -> Tensor:
    """Any HuggingFace padding mask as bool (..., n), True for tokens.

    Known forms: (batch, n), (batch, n, n), (batch, 1, 1, n) and (batch, 1, n, n); bool or numbers with 1 = attend, or
    additive with 0 = attend and a large negative number = hide. A mask that hides a token from some queries only says
    more than padding and is refused, but for the causal one with `causal`.
    """
    checks.tensor("mask", mask, "(batch, n), (batch, n, n), (batch, 1, 1, n) or (batch, 1, n, n)")
    if mask.is_complex():
        raise ValueError(f"mask has dtype {mask.dtype}, expected bool, or real numbers with 1 = attend.")
    additive = (
        mask.is_floating_point() and mask.ndim >= x.ndim and not (checks.can_look(mask) and bool((mask > 0).any()))
    )
    keep = mask if mask.dtype == torch.bool else mask >= 0 if additive else mask > 0
    if keep.ndim == x.ndim + 1 and keep.shape[-3] == 1:
        keep = keep[..., 0, :, :]
    queries = keep if keep.ndim == x.ndim else None  # (batch, 1 or n, n)
    keep = keep if queries is None else queries.any(-2)  # a token is what some query may attend to
    rows = 1 if queries is None else queries.shape[-2]
    if (
        rows not in (1, x.shape[-2])
        or keep.ndim != x.ndim - 1
        or keep.shape[-1] != x.shape[-2]
        or not checks.broadcasts(keep.shape, x.shape[:-1])
    ):
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
