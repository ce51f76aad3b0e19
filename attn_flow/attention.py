"""Who attends to whom: the drift F(x) = sum_h O_h V_h m_beta[mu](G_h x + b_h) + c, with mu the cloud or any measure.

Scores are <Q x + b, K y>, so G = K^T Q and the query bias acts through K^T b. A key bias would be constant in y and
cancel. Heads are summed. Matrices act on column vectors: tokens are rows, so code reads x @ Q.mT.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from attn_flow import checks, drift, kernels
from attn_flow.measures import Cloud, Measure

Kind = Literal["softmax", "unnormalised", "hardmax", "sinkhorn"]
KINDS: tuple[Kind, ...] = ("softmax", "unnormalised", "hardmax", "sinkhorn")


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
            return drift.against_cloud(self, x, context.x, context.log_weights)
        return drift.against_measure(self, x, context)

    def weights(self, x: Tensor, *, weights: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """The attention matrix A (..., heads, n, n), dense; rows sum to one but for kind='unnormalised'."""
        return drift.weights(self, x, self._cloud(x, weights, mask).log_weights)

    def self_drift(self, x: Tensor, log_weights: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """The drift of tokens against themselves, unchecked: what integrators call at every stage.

        log_weights (..., n) has -inf where mask is False, as `Cloud.log_weights`.
        """
        F = drift.against_cloud(self, x, x, log_weights)
        return F if mask is None else F.masked_fill(~mask[..., None], 0.0)

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
