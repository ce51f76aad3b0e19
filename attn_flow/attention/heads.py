"""The weights of attention heads: checked shapes, and the products that decide who attends to whom."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from attn_flow.averages import dense
from attn_flow.base import checks

if TYPE_CHECKING:
    from typing import Self

Kind = Literal["softmax", "unnormalised", "hardmax", "sinkhorn"]
KINDS: tuple[Kind, ...] = ("softmax", "unnormalised", "hardmax", "sinkhorn")


@dataclass(frozen=True, eq=False)
class Heads:
    """The factored weights of some heads and their inverse temperature.

    Q, K (..., heads, k, d); V (..., heads, v, d); O (..., heads, d, v). None stands for the identity (k = d or
    v = d). One head may drop its axis. beta is a number or a tensor whose last axis is heads (or 1): `beta[:, None]`
    gives one beta per batch element; inf is hardmax. query_bias (..., heads, k) is added to Q x; value_bias (..., d)
    is a constant drift. Leading axes of weights broadcast against those of the tokens. truncation: the share of each
    query's attention that large, cold clouds may leave out to be fast (near.py); 1e-6 for tokens in float32 and 1e-12
    in float64 unless given, 0 for none.
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
    truncation: float | None = None
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
        if self.truncation is not None and not 0 <= self.truncation < 1:
            raise ValueError(f"truncation = {self.truncation}, expected a share of the weights, 0 <= truncation < 1.")
        if self.kind == "sinkhorn" and (self.causal or not self.self_attention):
            raise ValueError("kind = 'sinkhorn' needs every pair; expected causal=False and self_attention=True.")

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

    def with_beta(self, beta: float | Tensor) -> Self:
        return replace(self, beta=beta)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The same attention with its tensors moved or cast, as `Tensor.to`."""
        moved: dict[str, Any] = {name: z.to(*args, **kwargs) for name, z in self._tensors().items()}
        return replace(self, **moved)

    def _tensors(self) -> dict[str, Tensor]:
        names = ("Q", "K", "V", "O", "query_bias", "value_bias", "beta")
        found = {name: getattr(self, name) for name in names}
        return {name: z for name, z in found.items() if isinstance(z, Tensor)}

    def _batch(self, *others: torch.Size) -> torch.Size:
        """The leading axes of the drift: those of the weights and beta, and the others given, broadcast."""
        axes = {"Q": 3, "K": 3, "V": 3, "O": 3, "query_bias": 2, "value_bias": 1, "beta": 1}
        own = {name: z.shape[: max(0, z.ndim - axes[name])] for name, z in self._tensors().items()}
        try:
            return dense.broadcast(*others, *own.values())
        except RuntimeError:
            named = [f"tokens {tuple(shape)}" for shape in others] + [f"{name} {tuple(z)}" for name, z in own.items()]
            raise ValueError(
                f"batch shapes do not broadcast: {', '.join(z for z in named if not z.endswith('()'))}; for one beta "
                "per batch element pass beta[:, None]."
            ) from None
