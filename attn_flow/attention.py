"""Who attends to whom: the drift F(x) = sum_h O_h V_h m_beta[mu](G_h x + b_h) + c, with mu the cloud or any measure.

Scores are <Q x + b, K y>, so G = K^T Q and the query bias acts through K^T b. A key bias would be constant in y and
cancel. Heads are summed. Matrices act on column vectors: tokens are rows, so code reads x @ Q.mT.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_flow import checks, kernels, sinkhorn
from attn_flow.measures import Cloud, Measure

Kind = Literal["softmax", "unnormalised", "hardmax", "sinkhorn"]
KINDS: tuple[Kind, ...] = ("softmax", "unnormalised", "hardmax", "sinkhorn")
# Entries of queries, keys, values and averages beyond which the drift is computed in parts, with and without gradient.
AT_ONCE, AT_ONCE_WITH_GRADIENT = 2**21, 2**22
ROWS = 1024  # tokens in a part


@dataclass(frozen=True, eq=False)
class Attention:
    """Multi-head attention with factored weights and inverse temperature beta.

    Q, K (..., heads, k, d); V (..., heads, v, d); O (..., heads, d, v). None stands for the identity (k = d or
    v = d). One head may drop its axis. beta is a number or a tensor whose last axis is heads (or 1): `beta[:, None]`
    gives one beta per batch element; inf is hardmax. query_bias (..., heads, k) is added to Q x; value_bias (..., d)
    is a constant drift. Leading axes of weights broadcast against those of the tokens.
    """

    Q: Tensor
    K: Tensor | None = None
    V: Tensor | None = None
    O: Tensor | None = None
    beta: float | Tensor = 1.0
    query_bias: Tensor | None = None
    value_bias: Tensor | None = None
    kind: Kind = "softmax"
    causal: bool = False
    self_attention: bool = True
    _Q_is_identity: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        checks.floating("Q", self.Q, "(heads, k, d) or (k, d)")
        for name in ("Q", "K", "V", "O"):
            weight = getattr(self, name)
            if weight is not None and weight.ndim == 2:
                object.__setattr__(self, name, weight[None])
        if self.query_bias is not None and self.query_bias.ndim == 1:
            object.__setattr__(self, "query_bias", self.query_bias[None])
        if self.kind == "hardmax":
            object.__setattr__(self, "kind", "softmax")
            object.__setattr__(self, "beta", math.inf)
        self._check()

    def _check(self) -> None:
        checks.one_of("kind", self.kind, KINDS)
        Q = self.Q
        if Q.ndim < 3:
            raise ValueError(f"Q has shape {tuple(Q.shape)}, expected (heads, k, d) or (k, d).")
        heads, k, d = Q.shape[-3:]
        v = d if self.V is None or self.O is None else self.V.shape[-2]
        expected = {
            "Q": ((heads, k, d), "(heads, k, d)"),
            "K": ((heads, k, d), "(heads, k, d)"),
            "V": ((heads, v, d), "(heads, d, d)" if self.O is None else "(heads, v, d)"),
            "O": ((heads, d, v), "(heads, d, v)"),
            "query_bias": ((heads, k), "(heads, k)"),
            "value_bias": ((d,), "(d,)"),
        }
        if self.K is None and k != d:
            raise ValueError(f"K is None (the identity) but Q has shape {tuple(Q.shape)}; expected k = d = {d}.")
        for name, (shape, words) in expected.items():
            tensor = getattr(self, name)
            if tensor is None:
                continue
            checks.floating(name, tensor, words)
            if tuple(tensor.shape[-len(shape) :]) != shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, expected {words} = {shape} to match Q of shape "
                    f"{tuple(Q.shape)}."
                )
            if tensor.dtype != Q.dtype:
                raise ValueError(f"{name} has dtype {tensor.dtype} and Q {Q.dtype}; use one dtype for all weights.")
            checks.same_device(name, tensor, "Q", Q)
            checks.finite(name, tensor)
        if self.K is None and checks.can_look(Q) and not Q.requires_grad:
            ones = bool((torch.diagonal(Q, dim1=-2, dim2=-1) == 1).all())
            object.__setattr__(self, "_Q_is_identity", ones and int(Q.count_nonzero()) == Q[..., 0].numel())
        checks.inverse_temperature(self.beta)
        if isinstance(self.beta, Tensor) and self.beta.ndim > 0 and self.beta.shape[-1] not in (1, heads):
            raise ValueError(
                f"beta has shape {tuple(self.beta.shape)}, expected () or (..., heads) = (..., {heads}); for one beta "
                "per batch element pass beta[:, None]."
            )
        if isinstance(self.beta, Tensor) and checks.can_look(self.beta) and bool(torch.isinf(self.beta).any()):
            if not bool(torch.isinf(self.beta).all()):
                raise ValueError(
                    "beta mixes finite and infinite entries; run beta = inf (hardmax) as a call of its own."
                )
            object.__setattr__(self, "beta", math.inf)
        if self.kind != "softmax" and self.cold:
            raise ValueError(
                f"beta = inf with kind = {self.kind!r}; only softmax has a zero-temperature limit (hardmax)."
            )
        if self.kind == "sinkhorn" and (self.causal or not self.self_attention):
            raise ValueError("kind = 'sinkhorn' needs every pair; expected causal=False and self_attention=True.")

    # --- constructors -------------------------------------------------------------------------------------------

    @classmethod
    def from_matrices(cls, G: Tensor, V: Tensor, beta: float | Tensor = 1.0, **options: Any) -> Attention:
        """Scores <G x, y> and values V y, for G and V of shape (d, d) or (heads, d, d)."""
        for name, matrix in (("G", G), ("V", V)):
            if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
                raise ValueError(f"{name} has shape {tuple(matrix.shape)}, expected (d, d) or (heads, d, d).")
        return cls(Q=G, V=V, beta=beta, **options)

    @classmethod
    def identity(
        cls,
        d: int,
        beta: float | Tensor = 1.0,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> Attention:
        """Q = K = V = I: the model of most papers."""
        return cls(Q=torch.eye(d, dtype=dtype, device=device), beta=beta, **options)

    @classmethod
    def random(
        cls,
        d: int,
        heads: int = 1,
        head_dim: int | None = None,
        law: Literal["gaussian", "symmetric", "orthogonal", "goe"] = "gaussian",
        beta: float | Tensor = 1.0,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> Attention:
        """Random weights, scaled so that |G x| and |V x| are of order |x|.

        gaussian: Q, K, V, O with independent entries of variance 1/d, of rank head_dim (default d / heads).
        symmetric: G = V = (A + A^T)/sqrt(2), entries of variance 1/d, so that V_h = G_h (a gradient flow).
        orthogonal: G and V Haar-distributed rotations or reflections. goe: G = I, V from the Gaussian orthogonal
        ensemble with off-diagonal variance 1/d, as in the phase diagrams of arXiv 2312.10794.
        """
        checks.one_of("law", law, ("gaussian", "symmetric", "orthogonal", "goe"))
        if heads < 1 or d < 1:
            raise ValueError(f"heads = {heads}, d = {d}: expected at least one of each.")

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=dtype, device=device) / math.sqrt(d)

        def symmetric() -> Tensor:
            A = normal(heads, d, d)
            return (A + A.mT) / math.sqrt(2)

        def orthogonal() -> Tensor:
            rotation, R = torch.linalg.qr(normal(heads, d, d))
            return rotation * torch.diagonal(R, dim1=-2, dim2=-1).sign()[..., None, :]

        if law == "gaussian":
            k = head_dim or max(1, d // heads)
            return cls(
                normal(heads, k, d), normal(heads, k, d), normal(heads, k, d), normal(heads, d, k), beta, **options
            )
        if law == "symmetric":
            G = symmetric()
            return cls(Q=G, V=G, beta=beta, **options)
        if law == "orthogonal":
            return cls(Q=orthogonal(), V=orthogonal(), beta=beta, **options)
        eye = torch.eye(d, dtype=dtype, device=device).expand(heads, d, d)
        return cls(Q=eye, V=symmetric(), beta=beta, **options)

    # --- what it is ---------------------------------------------------------------------------------------------

    @property
    def heads(self) -> int:
        return self.Q.shape[-3]

    @property
    def dim(self) -> int:
        return self.Q.shape[-1]

    @property
    def cold(self) -> bool:
        """Whether beta = inf."""
        return not isinstance(self.beta, Tensor) and math.isinf(self.beta)

    @property
    def G(self) -> Tensor:
        """K^T Q, (..., heads, d, d)."""
        return self.Q if self.K is None else self.K.mT @ self.Q

    @property
    def G_bias(self) -> Tensor | None:
        """K^T b, (..., heads, d)."""
        if self.query_bias is None or self.K is None:
            return self.query_bias
        return (self.K.mT @ self.query_bias[..., None])[..., 0]

    @property
    def values(self) -> Tensor:
        """O V, (..., heads, d, d)."""
        if self.V is None:
            eye = torch.eye(self.dim, dtype=self.Q.dtype, device=self.Q.device).expand(self.heads, -1, -1)
            return eye if self.O is None else self.O
        return self.V if self.O is None else self.O @ self.V

    @property
    def M(self) -> Tensor:
        """V G, (..., heads, d, d): its spectrum rules the low-temperature limit."""
        return self.values @ self.G

    def with_beta(self, beta: float | Tensor) -> Attention:
        return replace(self, beta=beta)

    def to(self, *args: Any, **kwargs: Any) -> Attention:
        """The same attention with its tensors moved or cast, as `Tensor.to`."""
        moved: dict[str, Any] = {name: z.to(*args, **kwargs) for name, z in self._tensors().items()}
        return replace(self, **moved)

    # --- what it does -------------------------------------------------------------------------------------------

    def drift(
        self,
        x: Tensor,
        context: Measure | Tensor | None = None,
        *,
        weights: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """sum_h O_h V_h m_beta[mu](G_h x + K_h^T b_h) + c, (..., n, d), the ambient drift of every token.

        mu is the cloud x itself (with `weights`, and True in `mask` for tokens; hidden tokens do not move), or
        the measure `context`: then tokens do not interact, and this is the mean-field drift. A token that may
        attend to nobody (the first one, under causal=True with self_attention=False) feels no attention.
        """
        if context is None:
            return self.self_drift(x, self._cloud(x, weights, mask).log_weights, mask)
        checks.tokens("x", x)
        self._check_tokens(x)
        if weights is not None or mask is not None:
            raise ValueError(
                "weights and mask describe the cloud x; with context= put them into Cloud(y, weights, mask)."
            )
        if self.causal or not self.self_attention:
            raise ValueError("causal and self_attention=False compare tokens of one cloud; with context= use neither.")
        if self.kind == "sinkhorn":
            raise ValueError("kind = 'sinkhorn' balances a cloud with itself; it has no drift against a context.")
        if isinstance(context, Tensor):
            context = Cloud(context)
        if isinstance(context, Cloud):
            self._check_tokens(context.x, "context")
            self._batch(x.shape[:-2], context.x.shape[:-2])
            return self._cloud_drift(x, context.x, context.log_weights)
        return self._measure_drift(x, context)

    def weights(self, x: Tensor, *, weights: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """The attention matrix A (..., heads, n, n), dense; rows sum to one but for kind='unnormalised'."""
        bias = self._key_bias(x, self._cloud(x, weights, mask).log_weights)
        q, k = self._queries(x), self._keys(x)
        if kernels.loses_digits(q, k, self._scale):
            return self.to(torch.float64).weights(x.double(), weights=weights, mask=mask).to(x.dtype)
        if self.cold:
            return kernels.winners(q, k, bias, self.causal, not self.self_attention)[0]
        logits = kernels.logits(q * self._scale, k, bias, self.causal, not self.self_attention)
        if self.kind == "unnormalised":
            return (logits if bias is not None else logits - math.log(x.shape[-2])).exp()
        return kernels.probabilities(logits)[0]

    def self_drift(self, x: Tensor, log_weights: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """The drift of tokens against themselves, unchecked: what integrators call at every stage.

        log_weights (..., n) has -inf where mask is False, as `Cloud.log_weights`.
        """
        drift = self._cloud_drift(x, x, log_weights)
        return drift if mask is None else drift.masked_fill(~mask[..., None], 0.0)

    def _check_tokens(self, x: Tensor, name: str = "x") -> None:
        if x.shape[-1] != self.dim:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, expected (..., n, {self.dim}) to match Q {tuple(self.Q.shape)}."
            )
        if x.dtype != self.Q.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"{name} has dtype {x.dtype} and the weights {self.Q.dtype}; use attention.to({x.dtype}).")
        checks.same_device(name, x, "Q", self.Q)

    def _cloud(self, x: Tensor, weights: Tensor | None, mask: Tensor | None) -> Cloud:
        """The tokens as a measure that this attention can act on."""
        cloud = Cloud(x, weights, mask)
        self._check_tokens(x)
        self._batch(x.shape[:-2])
        if not self.self_attention and checks.can_look(x) and int((cloud.probabilities > 0).sum(-1).min()) < 2:
            raise ValueError(
                "self_attention=False leaves a cloud of one token nobody to attend to; expected two or more."
            )
        return cloud

    def _cloud_drift(self, x: Tensor, y: Tensor, log_weights: Tensor | None) -> Tensor:
        """The drift of x against the tokens y: all at once if that is small, else in parts that are."""
        if y.stride(-1) != 1 and (self._keys_stay or self._values_stay):  # they are then read many times
            x, y = (y.contiguous(),) * 2 if x is y else (x, y.contiguous())
        bias = self._key_bias(y, log_weights)
        tensors = [z for z in (x, y, bias, *self._tensors().values()) if z is not None]
        gradient = torch.is_grad_enabled() and any(z.requires_grad for z in tensors)
        key_width = self.dim if self._keys_stay else self.Q.shape[-2]
        value_width = self.dim if self.V is None or self._values_stay else self.V.shape[-2]
        entries = 2 * (key_width + value_width) * self.heads * math.prod(x.shape[:-1])
        if self.cold or self.kind == "unnormalised" or not self.self_attention:
            entries *= 2  # not the fused kernel: parts and their sum at the same time
        if entries <= (AT_ONCE_WITH_GRADIENT if gradient else AT_ONCE) or not checks.can_look(*tensors):
            drift = self._attend(x, y, self._keys(y), self._values(y), bias)
        elif gradient:
            drift = self._drift_head_by_head(x, y, bias)
        else:
            drift = self._drift_in_parts(x, y, bias)
        return drift if self.value_bias is None else drift + self.value_bias[..., None, :]

    def _drift_head_by_head(self, x: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
        """The backward pass computes every head again instead of holding them all."""

        def one(x: Tensor, y: Tensor, head: slice) -> Tensor:
            return self._attend(x, y, self._keys(y, head), self._values(y, head), bias, head)

        drift = checkpoint(one, x, y, slice(0, 1), use_reentrant=False)
        for h in range(1, self.heads):
            drift = drift + checkpoint(one, x, y, slice(h, h + 1), use_reentrant=False)
        return drift

    def _drift_in_parts(self, x: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
        """Head by head and in blocks of rows, into one result: little more memory than that."""
        key_batch = () if bias is None else bias.shape[:-2]
        batch = self._batch(x.shape[:-2], y.shape[:-2], torch.Size(key_batch))
        drift = x.new_zeros(*batch, *x.shape[-2:])
        for h in range(self.heads):
            head = slice(h, h + 1)
            k, v = _in_blocks(self._keys, y, head), _in_blocks(self._values, y, head)
            for first in range(0, x.shape[-2], ROWS):
                rows = slice(first, first + ROWS)
                drift[..., rows, :] += self._attend(x[..., rows, :], y, k, v, bias, head, first)
            del k, v  # before those of the next head
        return drift

    def _attend(
        self,
        x: Tensor,
        y: Tensor,
        k: Tensor,
        v: Tensor,
        key_bias: Tensor | None,
        heads: slice = slice(None),
        first: int = 0,
    ) -> Tensor:
        """The sum over some heads of O_h sum_j A_ij v_j, for queries x that are the tokens first, first + 1, ... of y.

        k and v are the keys and values of y in these heads.
        """
        q = self._queries(x, heads)
        if kernels.loses_digits(q, k, self._scale):
            exact, y = self.to(torch.float64), y.double()
            k, v = exact._keys(y, heads), exact._values(y, heads)
            return exact._attend(x.double(), y, k, v, key_bias, heads, first).to(x.dtype)
        if key_bias is not None and key_bias.shape[-2] > 1:
            key_bias = key_bias[..., heads, :]
        options: dict[str, Any] = {
            "key_bias": key_bias,
            "causal": self.causal,
            "exclude_self": not self.self_attention,
            "first": first,
        }
        if self.cold:
            average = kernels.hardmax(q, k, v, **options)[0]
        elif self.kind != "unnormalised":
            average = kernels.softmax(q, k, v, scale=self._scale, **options)
        else:
            average, log_sum = kernels.softmax_and_log_sum(q, k, v, scale=self._scale, **options)
            if key_bias is None:  # the weights 1/n, which a softmax cancels
                log_sum = log_sum - math.log(y.shape[-2])
            average = average * log_sum.exp()[..., None]
        return self._output(average, heads)

    # beta is applied once: as the kernel's scale if it is a number, to the queries if it is a tensor.

    @property
    def _scale(self) -> float:
        return 1.0 if isinstance(self.beta, Tensor) or self.cold else float(self.beta)

    def _queries(self, x: Tensor, heads: slice = slice(None)) -> Tensor:
        """Q x + b in the space where keys live, times beta if that is a tensor, (..., heads, n, k or d)."""
        if self._Q_is_identity:
            q = x[..., None, :, :].expand(*x.shape[:-2], self.Q[..., heads, 0, 0].shape[-1], *x.shape[-2:])
        else:
            q = _per_head(x, self.Q[..., heads, :, :])
        if self.query_bias is not None:
            q = q + self.query_bias[..., heads, None, :]
        if self.K is not None and self._keys_stay:
            q = q @ self.K[..., heads, :, :]
        return q * self._beta(heads, x)[..., None, None] if isinstance(self.beta, Tensor) else q

    def _beta(self, heads: slice, x: Tensor) -> Tensor:
        """beta as a tensor of shape (..., heads or 1)."""
        beta = torch.as_tensor(self.beta, dtype=x.dtype, device=x.device)
        return beta[None] if beta.ndim == 0 else beta[..., heads] if beta.shape[-1] > 1 else beta

    @property
    def _keys_stay(self) -> bool:
        """Whether K acts on the queries: cheaper once its rank reaches d, since keys are then the tokens."""
        return self.K is None or self.K.shape[-2] >= self.dim

    @property
    def _values_stay(self) -> bool:
        """Whether V acts after the average, on one token instead of all of them."""
        return self.V is None or self.O is None or self.V.shape[-2] >= self.dim

    def _keys(self, y: Tensor, heads: slice = slice(None)) -> Tensor:
        if self.K is None or self._keys_stay:
            return y[..., None, :, :]
        return _per_head(y, self.K[..., heads, :, :])

    def _values(self, y: Tensor, heads: slice = slice(None)) -> Tensor:
        if self.V is None or self._values_stay:
            return y[..., None, :, :]
        return _per_head(y, self.V[..., heads, :, :])

    def _output(self, average: Tensor, heads: slice = slice(None)) -> Tensor:
        """sum_h O_h (average)_h, or O_h V_h where the tokens themselves were averaged: (..., n, d)."""
        if self.V is None and self.O is None:
            return average[..., 0, :, :] if average.shape[-3] == 1 else average.sum(-3)
        O = self.O if self.O is not None and not self._values_stay else self.values
        stacked = O[..., heads, :, :].mT.flatten(-3, -2)  # (..., heads * v, d)
        return average.transpose(-2, -3).flatten(-2) @ stacked

    def _key_bias(self, x: Tensor, log_weights: Tensor | None) -> Tensor | None:
        """Log weights of the keys (..., 1, n); with Sinkhorn's potential added, (..., heads, n)."""
        log_w = None if log_weights is None else log_weights[..., None, :]
        if self.kind != "sinkhorn":
            return log_w
        if log_w is None:
            log_w = torch.full_like(x[..., 0], -math.log(x.shape[-2]))[..., None, :]
        return sinkhorn.potential(self._queries(x) * self._scale, self._keys(x), log_w) + log_w

    def _measure_drift(self, x: Tensor, mu: Measure) -> Tensor:
        plain = replace(self, beta=1.0)
        beta: float | Tensor = self.beta
        drift = torch.zeros_like(x)
        for h in range(self.heads):
            head = slice(h, h + 1)
            g = plain._queries(x, head)
            if self.K is not None and not self._keys_stay:
                g = g @ self.K[..., head, :, :]
            g = g[..., 0, :, :]
            if isinstance(self.beta, Tensor):
                beta = self._beta(head, x)
            if not self.cold and kernels.loses_digits(g, x, beta):
                return self.to(torch.float64)._measure_drift(x.double(), mu.to(torch.float64)).to(x.dtype)
            average = mu.tilted_mean(g, beta)
            if self.kind == "unnormalised":
                average = average * (beta * mu.log_partition(g, beta)).exp()[..., None]
            for weight in (self.V, self.O):  # one after the other: of rank k, never multiplied out
                average = average if weight is None else average @ weight[..., h, :, :].mT
            drift = drift + average
        return drift if self.value_bias is None else drift + self.value_bias[..., None, :]

    def _tensors(self) -> dict[str, Tensor]:
        names = ("Q", "K", "V", "O", "query_bias", "value_bias", "beta")
        found = {name: getattr(self, name) for name in names}
        return {name: z for name, z in found.items() if isinstance(z, Tensor)}

    def _batch(self, *others: torch.Size) -> torch.Size:
        """The leading axes of the drift: those of the weights and beta, and the others given, broadcast."""
        axes = {"Q": 3, "K": 3, "V": 3, "O": 3, "query_bias": 2, "value_bias": 1, "beta": 1}
        own = {name: z.shape[: max(0, z.ndim - axes[name])] for name, z in self._tensors().items()}
        try:
            return kernels.broadcast(*others, *own.values())
        except RuntimeError:
            named = [f"tokens {tuple(shape)}" for shape in others] + [f"{name} {tuple(z)}" for name, z in own.items()]
            raise ValueError(
                f"batch shapes do not broadcast: {', '.join(z for z in named if not z.endswith('()'))}; for one beta "
                "per batch element pass beta[:, None]."
            ) from None


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """Every head's weight on every token: x (..., n, d), weight (..., heads, k, d) -> (..., heads, n, k)."""
    heads, k, _ = weight.shape[-3:]
    return (x @ weight.flatten(-3, -2).mT).unflatten(-1, (heads, k)).transpose(-2, -3)


def _in_blocks(project: Callable[[Tensor, slice], Tensor], y: Tensor, head: slice) -> Tensor:
    """project(y, head), in blocks of rows if y is strided: a product copies what it cannot read in place."""
    if y.stride(-1) == 1:
        return project(y, head)
    return torch.cat([project(rows, head) for rows in y.split(ROWS, dim=-2)], dim=-2)
