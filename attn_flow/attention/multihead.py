"""Multi-head attention: its weights, the products that decide who attends to whom, and its drift.

F(x) = sum_h O_h V_h m_beta[mu](G_h x + K_h^T b_h) + c with mu the cloud or any measure. Scores are <Q x + b, K y>, so
G = K^T Q and the query bias acts through K^T b. A key bias would be constant in y; softmax cancels it. Heads are
summed. Matrices act on column vectors: tokens are rows, so code reads x @ Q.mT.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from attn_flow.attention import drift, truncated
from attn_flow.attention.fields import Field, Function, View
from attn_flow.attention.projections import Kind, Projections
from attn_flow.averages import dense, pointwise
from attn_flow.base import checks, memory
from attn_flow.measures import Cloud, Measure

AXES = {"Q": 3, "K": 3, "V": 3, "O": 3, "query_bias": 2, "value_bias": 1, "beta": 1}  # of one attention; more: batch


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Attention(Field):
    """Multi-head attention with factored weights and inverse temperature beta; it does not change once made.

    Args:
        Q, K: (..., heads, k, d), queries and keys; K = None is the identity (k = d). One head may drop its axis.
        V, O: (..., heads, v, d) and (..., heads, d, v), values and output; None is the identity (v = d).
        beta: inverse temperature of the scores <Q x + b, K y>: a number, or a tensor whose last axis is heads (or 1);
            `beta[:, None]` is one beta per batch element. inf is hardmax. Kept as a tensor (..., heads).
        query_bias: b (..., heads, k), added to Q x.
        value_bias: c (..., d), a constant drift.
        kind: what a pair's score s = beta <Q x_i + b, K x_j> weighs in A_ij. "softmax" e^s / sum_j e^s, "hardmax" the
            same at beta = inf, "sinkhorn" doubly stochastic; and, not shared out among the keys, "unnormalised"
            e^s / n, "linear" s / n, "relu" max(s, 0) / n, "sigmoid" 1 / (n (1 + e^{-s})). Masses w_j take the place
            of 1 / n; it stays where masks hide keys.
        causal: token i sees the tokens j <= i.
        self_attention: False hides every token from itself.
        truncation: the share of each query's attention that large, cold clouds may leave out to be fast; 1e-6 for
            tokens in float32 and 1e-12 in float64 unless given, 0 for none.

    Leading axes of weights broadcast against those of the tokens. Weights share one floating dtype and one device.

    Example:
        >>> attention = Attention(torch.eye(3), V=torch.diag(torch.tensor([1.0, 2.0, 1.0])), beta=4.0)
        >>> attention
        Attention(heads=1, dim=3, k=3, v=3, beta=4, softmax, float32)
        >>> attention.drift(torch.eye(3)).shape  # three tokens
        torch.Size([3, 3])
    """

    Q: Tensor
    K: Tensor | None
    V: Tensor | None
    O: Tensor | None
    beta: Tensor
    query_bias: Tensor | None
    value_bias: Tensor | None
    kind: Kind
    causal: bool
    self_attention: bool
    truncation: float | None
    _number: float | None = field(init=False, repr=False)
    _identity: bool = field(init=False, repr=False)
    _logit_terms: list[float] = field(init=False, repr=False)  # at beta = 1, once asked for; of all temperatures

    def __init__(
        self,
        Q: Tensor,
        K: Tensor | None = None,
        V: Tensor | None = None,
        O: Tensor | None = None,
        beta: float | Tensor = 1.0,
        query_bias: Tensor | None = None,
        value_bias: Tensor | None = None,
        kind: Kind = "softmax",
        causal: bool = False,
        self_attention: bool = True,
        truncation: float | None = None,
    ) -> None:
        checks.floating("Q", Q, "(heads, k, d) or (k, d)")
        one_head = lambda z, axes: z[None] if isinstance(z, Tensor) and z.ndim == axes else z
        given: dict[str, Any] = {"Q": Q, "K": K, "V": V, "O": O, "query_bias": query_bias, "value_bias": value_bias}
        weights = {name: one_head(z, AXES[name] - 1) if AXES[name] > 1 else z for name, z in given.items()}
        _check_weights(weights)
        checks.one_of("kind", kind, get_args(Kind))
        checks.flags(causal=causal, self_attention=self_attention)
        if truncation is not None:
            checks.number("truncation", truncation, "a share of the weights")
            if not 0 <= truncation < 1:
                raise ValueError(f"truncation = {truncation}, expected a share of the weights, 0 <= truncation < 1.")
        if kind == "hardmax":
            kind, beta = "softmax", math.inf
        number, beta = _beta(beta, weights["Q"])
        _check_limit(kind, number)
        if kind == "sinkhorn" and (causal or not self_attention):
            raise ValueError("kind = 'sinkhorn' needs every pair; expected causal=False and self_attention=True.")
        flags = {"kind": kind, "causal": causal, "self_attention": self_attention, "truncation": truncation}
        identity = _is_identity(weights["Q"], weights["K"])
        vars(self).update(weights, beta=beta, **flags, _number=number, _identity=identity, _logit_terms=[])

    # --- constructors -------------------------------------------------------------------------------------------

    @classmethod
    def from_matrices(
        cls,
        G: Tensor,
        V: Tensor,
        beta: float | Tensor = 1.0,
        *,
        query_bias: Tensor | None = None,
        value_bias: Tensor | None = None,
        kind: Kind = "softmax",
        causal: bool = False,
        self_attention: bool = True,
        truncation: float | None = None,
    ) -> Attention:
        """Scores <G x, y> and values V y, for G and V of shape (d, d) or (heads, d, d); the rest as in `Attention`.

        Example:
            >>> Attention.from_matrices(G=torch.eye(2), V=-torch.eye(2), beta=torch.tensor([1.0])).M
            tensor([[[-1.,  0.],
                     [ 0., -1.]]])
        """
        for name, matrix in (("G", G), ("V", V)):
            checks.tensor(name, matrix, "(d, d) or (heads, d, d)")
            if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
                raise ValueError(f"{name} has shape {tuple(matrix.shape)}, expected (d, d) or (heads, d, d).")
        return cls(G, None, V, None, beta, query_bias, value_bias, kind, causal, self_attention, truncation)

    @classmethod
    def identity(
        cls,
        d: int,
        beta: float | Tensor = 1.0,
        *,
        query_bias: Tensor | None = None,
        value_bias: Tensor | None = None,
        kind: Kind = "softmax",
        causal: bool = False,
        self_attention: bool = True,
        truncation: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Attention:
        """Q = K = V = I in dimension d, the model of most papers; the rest as in `Attention`.

        Example:
            >>> Attention.identity(8, beta=2.0, kind="unnormalised")
            Attention(heads=1, dim=8, k=8, v=8, beta=2, unnormalised, float32)
        """
        checks.whole("d", d)
        checks.made_with(dtype, device)
        memory.require_tensor(d, d, dtype=dtype, device=device)
        eye = torch.eye(d, dtype=dtype, device=device)
        return cls(eye, None, None, None, beta, query_bias, value_bias, kind, causal, self_attention, truncation)

    @classmethod
    def random(
        cls,
        d: int,
        heads: int = 1,
        head_dim: int | None = None,
        law: Literal["gaussian", "symmetric", "orthogonal", "goe"] = "gaussian",
        beta: float | Tensor = 1.0,
        *,
        query_bias: Tensor | None = None,
        value_bias: Tensor | None = None,
        kind: Kind = "softmax",
        causal: bool = False,
        self_attention: bool = True,
        truncation: float | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Attention:
        """Random weights, scaled so that |G x| and |V x| are of order |x|; the rest as in `Attention`.

        gaussian: Q, K, V, O with independent entries of variance 1/d, of rank head_dim (default d / heads).
        symmetric: G = V = (A + A^T)/sqrt(2), entries of variance 1/d, so that V_h = G_h (a gradient flow).
        orthogonal: G and V Haar-distributed rotations or reflections. goe: G = I, V from the Gaussian orthogonal
        ensemble with off-diagonal variance 1/d, as in the phase diagrams of arXiv 2312.10794.

        Example:
            >>> Attention.random(16, heads=4, generator=torch.Generator().manual_seed(0)).Q.shape
            torch.Size([4, 4, 16])
        """
        checks.one_of("law", law, ("gaussian", "symmetric", "orthogonal", "goe"))
        for name, number in (("d", d), ("heads", heads), ("head_dim", 1 if head_dim is None else head_dim)):
            checks.whole(name, number)
        checks.made_with(dtype, device, generator)
        memory.require_tensor(heads, max(d, head_dim or 1), d, dtype=dtype, device=device)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=dtype, device=device) / math.sqrt(d)

        def symmetric() -> Tensor:
            A = normal(heads, d, d)
            return (A + A.mT) / math.sqrt(2)

        def orthogonal() -> Tensor:
            rotation, R = torch.linalg.qr(normal(heads, d, d))
            return rotation * torch.diagonal(R, dim1=-2, dim2=-1).sign()[..., None, :]

        Q: Tensor
        K, O = None, None
        if law == "gaussian":
            k = head_dim or max(1, d // heads)
            Q, K, V, O = normal(heads, k, d), normal(heads, k, d), normal(heads, k, d), normal(heads, d, k)
        elif law == "symmetric":
            Q = V = symmetric()
        elif law == "orthogonal":
            Q, V = orthogonal(), orthogonal()
        else:
            Q, V = torch.eye(d, dtype=dtype, device=device).expand(heads, d, d), symmetric()
        return cls(Q, K, V, O, beta, query_bias, value_bias, kind, causal, self_attention, truncation)

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
        return self._number == math.inf

    @property
    def common_beta(self) -> float | None:
        """The beta of all heads and clouds, where it is one number; None where they differ or it is being learned."""
        return self._number

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

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its weights and beta by name, those that are not the identity."""
        return {name: z for name in AXES if isinstance(z := getattr(self, name), Tensor)}

    def summary(self) -> dict[str, Any]:
        """What a path remembers of the attention that made it, as plain JSON."""
        beta: Any = self._number
        if beta is None:
            beta = self.beta.tolist() if checks.can_look(self.beta) else f"tensor {tuple(self.beta.shape)}"
        elif not math.isfinite(beta):
            beta = "inf"
        words = {"kind": self.kind, "causal": self.causal, "self_attention": self.self_attention}
        return {"heads": self.heads, "dim": self.dim, "beta": beta, **words}

    def __repr__(self) -> str:
        beta = f"tensor {tuple(self.beta.shape)}" if self._number is None else f"{self._number:g}"
        v = self.dim if self.V is None else self.V.shape[-2]
        marks = [self.kind, "causal" * self.causal, "no self-attention" * (not self.self_attention)]
        batch = self.batch_shape()
        shape = (
            f"batch={tuple(batch)}, " * bool(batch) + f"heads={self.heads}, dim={self.dim}, k={self.Q.shape[-2]}, v={v}"
        )
        device = [] if self.Q.device.type == "cpu" else [str(self.Q.device)]
        words = [shape, f"beta={beta}", *filter(None, marks), str(self.Q.dtype).removeprefix("torch."), *device]
        return f"Attention({', '.join(words)})"

    def with_beta(self, beta: float | Tensor) -> Attention:
        """The same attention at another inverse temperature."""
        number, tensor = _beta(beta, self.Q)
        _check_limit(self.kind, number)
        made = copy.copy(self)
        vars(made).update(beta=tensor, _number=number)
        return made

    def to(self, *args: Any, **kwargs: Any) -> Attention:
        """The same attention with its tensors moved or cast, as `Tensor.to`."""
        checks.moves(*args, **kwargs)
        given: dict[str, Any] = {
            name: getattr(self, name) for name in ("kind", "causal", "self_attention", "truncation")
        }
        given |= {name: z.to(*args, **kwargs) for name, z in self.tensors.items()}
        return Attention(**(given if self._number is None else given | {"beta": self._number}))  # all its digits

    def batch_shape(self, *others: torch.Size) -> torch.Size:
        """The leading axes of the drift: those of the weights and beta, and of other tensors, broadcast."""
        own = {name: z.shape[: z.ndim - AXES[name]] for name, z in self.tensors.items()}
        try:
            return dense.broadcast(*others, *own.values())
        except RuntimeError:
            named = [f"tokens {tuple(shape)}" for shape in dict.fromkeys(others)] + [
                f"{name} {tuple(z)}" for name, z in own.items()
            ]
            raise ValueError(
                f"batch shapes do not broadcast: {', '.join(z for z in named if not z.endswith('()'))}; for one beta "
                "per batch element pass beta[:, None]."
            ) from None

    def prepared(self, radius: float | None = None) -> Projections:
        """The weights as drifts want them; a flow prepares them once.

        radius: no token is longer. The precision is then chosen here, where values may be looked at, and not at every
        drift: the first time one number is read of the weights, which `with_beta` shares.
        """
        p = Projections.of(
            self.Q,
            self.K,
            self.V,
            self.O,
            self.beta if self._number is None else self._number,
            self.query_bias,
            self.value_bias,
            kind=self.kind,
            causal=self.causal,
            self_attention=self.self_attention,
            truncation=self.truncation,
            identity_query=self._identity,
            batch=self.batch_shape(),
        )
        if radius is None or self.cold:
            return p
        if torch.compiler.is_compiling() and self.Q.dtype == torch.float32:
            if not self._logit_terms or self._number is None:
                raise ValueError(
                    "compiled code cannot choose the precision of its logits; call attention.needs_float64(1.0) once "
                    "before, with a beta that is one number, or use float64."
                )
        elif not checks.can_look(self.beta, *p.tensors):
            return p
        return replace(p, precise=self.needs_float64(radius))

    def prepared_along(self, view: View) -> Callable[[], Projections]:
        """() -> the weights as `prepared`, again whenever the longest token that the flow knows of has changed."""
        radius, p = view.longest, self.prepared(view.longest)

        def prepared() -> Projections:
            nonlocal radius, p
            if view.longest != radius:
                radius, p = view.longest, self.prepared(view.longest)
            return p

        return prepared

    def needs_float64(self, radius: float) -> bool:
        """Whether logits of tokens of at most this length may be too large for float32."""
        if self.cold:
            return False
        trained = not torch.compiler.is_compiling() and any(z.requires_grad for z in self.tensors.values())
        if not self._logit_terms or trained:
            with torch.no_grad():
                warm = Projections.of(self.Q, self.K, None, None, 1.0, self.query_bias, identity_query=self._identity)
                self._logit_terms[:] = checks.read(*warm.logit_terms)
        a, b = self._logit_terms
        largest = self._number if self._number is not None else checks.read(self.beta.amax())[0]
        return largest * (a * radius + b) * radius > dense.LOGIT_RANGE

    # --- as a field of a flow -----------------------------------------------------------------------------------

    @property
    def tells_apart(self) -> tuple[str, ...]:
        """Why tokens at one place may move differently."""
        reasons = {"a causal mask": self.causal, "self_attention=False": not self.self_attention}
        return tuple(why for why, here in reasons.items() if here)

    def admit(self, cloud: Cloud, context: Measure | None = None) -> torch.Size:
        """Raise ValueError for a cloud or context it cannot act on; the leading axes of the drift."""
        self.check_tokens(cloud.x)
        p = cloud.probabilities
        batch = self.batch_shape(cloud.x.shape[:-2], p.shape[:-1])

        def look() -> None:
            raise ValueError(
                "self_attention=False leaves a cloud of one token nobody to attend to; expected two or more."
            )

        if not self.self_attention and checks.can_look(cloud.x):
            checks.look_if((p > 0).sum(-1).min() < 2, look)
        if context is not None:
            mu = self.checked_context(cloud.x, context)
            batch = dense.broadcast(batch, mu.x.shape[:-2]) if isinstance(mu, Cloud) else batch
        return batch

    def seen(self, view: View) -> Function:
        """(t, x) -> the drift of the tokens x of a flow."""
        prepared = self.prepared_along(view)

        def F(t: float, x: Tensor) -> Tensor:
            p = prepared()
            with checks.unseen(self.kind != "sinkhorn"):  # whose sweeps are to converge
                if view.context is not None:
                    return drift.against(p, x, view.context)
                return drift.against_cloud(p, x, view.part.everyone(x), view.log_weights, view.part.first)

        return F

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

        Args:
            x: tokens (..., n, d).
            context: a measure, or tokens (..., m, d) of equal weight, to attend to instead.
            weights: (..., n), nonnegative masses of the tokens; they are normalised.
            mask: (..., n), True for tokens and False for padding.

        Example:
            >>> from attn_flow import UniformSphere
            >>> Attention.identity(3, beta=math.inf).drift(torch.eye(3), UniformSphere(3))  # V G x / |G x|
            tensor([[1., 0., 0.],
                    [0., 1., 0.],
                    [0., 0., 1.]])
        """
        if context is not None and (weights is not None or mask is not None):
            raise ValueError(
                "weights and mask describe the cloud x; with context= put them into Cloud(y, weights, mask)."
            )
        longest: list[float] = []
        with checks.together():  # on an accelerator all is read once, and the range of the result is not looked at
            if context is None:
                cloud = self.cloud(x, weights, mask)
                tokens, seen = cloud.shown, [cloud.shown]
            else:
                checks.tokens("x", x)
                mu, tokens = self.checked_context(x, context), x
                seen = [x, mu.shown] if isinstance(mu, Cloud) else [x]
            if x.device.type != "cpu" and checks.can_look(x):
                checks.tell(torch.stack([dense.lengths(z.detach()).amax() for z in seen]).amax(), longest.append)
        p = self.prepared(*longest)
        with checks.unseen(bool(longest) and self.kind != "sinkhorn"):  # whose sweeps are to converge
            if context is None:
                F = drift.against_cloud(p, tokens, tokens, cloud.log_weights)
            else:
                F = drift.against(p, x, mu)
        if not longest:
            checks.in_range("the drift", F)
        return F if mask is None else F.masked_fill(~mask[..., None], 0.0)

    def checked_context(self, x: Tensor, context: Measure | Tensor) -> Measure:
        """The measure that tokens x are to attend to, if they can; else ValueError."""
        self.check_tokens(x)
        if self.causal or not self.self_attention:
            raise ValueError("causal and self_attention=False compare tokens of one cloud; with context= use neither.")
        if self.kind == "sinkhorn":
            raise ValueError("kind = 'sinkhorn' balances a cloud with itself; it has no drift against a context.")
        mu: Measure = Cloud(context) if isinstance(context, Tensor) else context
        if not hasattr(mu, "tilted_mean"):
            raise ValueError(f"context is a {type(mu).__name__}, expected a measure, such as Cloud(y), or tokens.")
        if self.kind in pointwise.PHI and not isinstance(mu, Cloud):
            raise ValueError(
                f"kind = {self.kind!r} has no drift against a {type(mu).__name__}: only softmax and unnormalised "
                "attention are tilted means; expected a Cloud, such as a sample or quadrature of it."
            )
        if isinstance(mu, Cloud):
            self.check_tokens(mu.x, "context")
            self.batch_shape(x.shape[:-2], mu.x.shape[:-2])
        return mu

    def matrix(self, x: Tensor, *, weights: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """The attention matrix A (..., heads, n, n), dense; rows sum to one where the kind shares out attention.

        weights, mask: as in `drift`. Sinkhorn balances the tokens shown: the row of a hidden one means nothing there.

        Example:
            >>> Attention.identity(2, beta=0.0).matrix(torch.eye(2))
            tensor([[[0.5000, 0.5000],
                     [0.5000, 0.5000]]])
        """
        cloud = self.cloud(x, weights, mask)
        entries = math.prod(self.batch_shape(x.shape[:-2])) * self.heads * x.shape[-2] ** 2
        what = f"the attention matrix of {x.shape[-2]} tokens and {self.heads} heads"
        memory.require(3 * entries * x.element_size(), what, "drift(x) never holds it; or take fewer tokens", x.device)
        A = drift.matrix(self.prepared(), x, cloud.log_weights)
        checks.in_range("the attention matrix", A)
        return A

    def truncated_drift(
        self, x: Tensor, *, weights: Tensor | None = None, mask: Tensor | None = None
    ) -> truncated.Truncated:
        """The drift over the keys that matter with a bound on its error, whether that is faster or not.

        `drift` does the same for large clouds wherever it is faster; `truncation` says how much may be left out.
        """
        cloud, p = self.cloud(x, weights, mask), self.prepared()
        x, log_weights = cloud.shown, cloud.log_weights
        with torch.no_grad():
            found = truncated.over_near_keys(p, x, x, p.key_bias(x, log_weights), always=True)
            if found is None:  # every key matters: nothing is shared out, or a masked hardmax, or truncation = 0
                F = drift.against_cloud(p, x, x, log_weights)
                found = truncated.Truncated(F, torch.zeros_like(F[..., 0]), 1.0)
        if mask is None:
            return found
        shown = found.drift.masked_fill(~mask[..., None], 0.0)
        return truncated.Truncated(shown, found.error.masked_fill(~mask, 0.0), found.pairs)

    def check_tokens(self, x: Tensor, name: str = "x") -> None:
        """Raise ValueError unless tokens x have this attention's width, dtype and device."""
        if x.shape[-1] != self.dim:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, expected (..., n, {self.dim}) to match Q {tuple(self.Q.shape)}."
            )
        if x.dtype != self.Q.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"{name} has dtype {x.dtype} and the weights {self.Q.dtype}; use attention.to({x.dtype}).")
        checks.same_device(name, x, "Q", self.Q)

    def cloud(self, x: Tensor, weights: Tensor | None, mask: Tensor | None) -> Cloud:
        """The tokens as a measure that this attention can act on."""
        cloud = Cloud(x, weights, mask)
        self.admit(cloud)
        return cloud


def attention_alone(what: str, given: object) -> None:
    """Refuse, in the name of a prediction, fields that it has no theory for."""
    if not isinstance(given, Attention):
        raise ValueError(f"{what} has no theory for {given!r}, expected an Attention alone.")


def _check_weights(weights: dict[str, Any]) -> None:
    """Shapes, dtypes, devices and finite entries of Q, K, V, O and the biases, those that are there."""
    Q, K, V, O = (weights[name] for name in "QKVO")
    for name, z in weights.items():
        if isinstance(z, Tensor) and 0 in z.shape:
            raise ValueError(
                f"{name} has shape {tuple(z.shape)}: it holds nothing; expected at least one of each axis."
            )
    if Q.ndim < 3:
        raise ValueError(f"Q has shape {tuple(Q.shape)}, expected (heads, k, d) or (k, d).")
    heads, k, d = Q.shape[-3:]
    v = d if V is None or O is None or not isinstance(V, Tensor) or V.ndim < 3 else V.shape[-2]
    expected = {
        "Q": ((heads, k, d), "(heads, k, d)"),
        "K": ((heads, k, d), "(heads, k, d)"),
        "V": ((heads, v, d), "(heads, d, d)" if O is None else "(heads, v, d)"),
        "O": ((heads, d, v), "(heads, d, v)"),
        "query_bias": ((heads, k), "(heads, k)"),
        "value_bias": ((d,), "(d,)"),
    }
    if K is None and k != d:
        raise ValueError(f"K is None (the identity) but Q has shape {tuple(Q.shape)}; expected k = d = {d}.")
    for name, (shape, words) in expected.items():
        z = weights[name]
        if z is None:
            continue
        checks.floating(name, z, words)
        if tuple(z.shape[-len(shape) :]) != shape:
            raise ValueError(
                f"{name} has shape {tuple(z.shape)}, expected {words} = {shape} to match Q of shape {tuple(Q.shape)}."
            )
        if z.dtype != Q.dtype:
            raise ValueError(f"{name} has dtype {z.dtype} and Q {Q.dtype}; use one dtype for all weights.")
        checks.same_device(name, z, "Q", Q)
        checks.finite(name, z)


def _check_limit(kind: str, beta: float | None) -> None:
    if kind != "softmax" and beta == math.inf:
        raise ValueError(f"beta = inf with kind = {kind!r}; only softmax has a zero-temperature limit (hardmax).")


def _beta(beta: float | Tensor, Q: Tensor) -> tuple[float | None, Tensor]:
    """beta as one number, or None where it is none, and as a tensor (..., heads)."""
    checks.inverse_temperature(beta)
    heads = Q.shape[-3]
    if not isinstance(beta, Tensor):
        return float(beta), torch.full((heads,), float(beta), dtype=torch.float64, device=Q.device)
    if beta.ndim > 0 and beta.shape[-1] not in (1, heads):
        raise ValueError(
            f"beta has shape {tuple(beta.shape)}, expected () or (..., heads) = (..., {heads}); for one beta per batch "
            "element pass beta[:, None]."
        )
    number = None
    if checks.can_look(beta):
        values = beta.detach().flatten().tolist()
        if math.inf in values and min(values) < math.inf:
            raise ValueError("beta mixes finite and infinite entries; run beta = inf (hardmax) as a call of its own.")
        same = math.inf in values or (beta.ndim < 2 and not beta.requires_grad and min(values) == max(values))
        number = values[0] if same else None
    beta = beta[None] if beta.ndim == 0 else beta
    return number, beta.expand(*beta.shape[:-1], heads)


def _is_identity(Q: Tensor, K: Tensor | None) -> bool:
    """Whether the queries and keys are the tokens themselves, as far as one may look."""
    if K is not None or Q.requires_grad or not checks.can_look(Q):
        return False
    ones = bool((torch.diagonal(Q, dim1=-2, dim2=-1) == 1).all())
    return ones and int(Q.count_nonzero()) == Q[..., 0].numel()
