"""Multi-head attention and its drift.

The drift of token x_i in a cloud of tokens x_j with weights w_j is

    F(x_i) = sum_h O_h sum_j A_ij V_h x_j + c,    A_ij = softmax_j(beta_h <Q_h x_i + b_h, K_h x_j> + log w_j),

that is sum_h O_h V_h m_beta[mu](G_h x + K_h^T b_h) + c with G = K^T Q and mu the cloud, or another measure (`context`).
Matrices act on column vectors and tokens are rows, so the code reads x @ Q.mT. A bias of the keys would add the same
number to all logits of a query, which softmax and Sinkhorn attention ignore.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from attn_flow.attention import weights
from attn_flow.attention.fields import Field
from attn_flow.base import checks
from attn_flow.kernels import dense, near, series, sinkhorn
from attn_flow.kernels.auto import choose_kernel
from attn_flow.measures.cloud import Cloud, as_cloud
from attn_flow.measures.measure import Measure

Kind = Literal["softmax", "unnormalised", "sinkhorn"]
Kernel = Literal["auto", "dense", "near", "series"]


@dataclass(frozen=True, eq=False, repr=False)
class Attention(Field):
    """Multi-head attention with inverse temperature beta, as a vector field of a cloud of tokens.

    Leading axes of the weights are a batch and broadcast against the batch of the tokens. A single head may leave out
    its axis. A matrix that is None is the identity.

    Args:
        Q, K: queries and keys (..., heads, k, d).
        V, O: values (..., heads, v, d) and output (..., heads, d, v).
        beta: inverse temperature: a number, or a tensor whose last axis is heads (or 1); `beta[:, None]` is one beta
            per batch element. Infinity means hardmax attention: tokens attend to the highest score.
        query_bias, value_bias: b, (..., heads, k), and c, (..., d).

    Other arguments:
        kind: "softmax"; "unnormalised", A_ij = w_j e^{s_ij} without the normaliser (1/n for w_j without weights);
            "sinkhorn", doubly stochastic weights.
        causal: token i sees only the tokens j <= i.
        kernel: how softmax averages are computed (`attn_flow.kernels`): "dense", "near" (large cold clouds), "series"
            (the circle), or "auto". "near" and "series" have no derivatives.
        context: a fixed measure to attend to instead of the cloud itself; tokens then do not interact.
        dim: d, which is needed only if all matrices are None.
        tolerance: the accuracy of the kernels "near" and "series"; by default 1e-6 in float32 and 1e-12 in float64.

    Example:
        >>> attention = Attention(V=torch.diag(torch.tensor([1.0, 2.0, 1.0])), beta=4.0)
        >>> attention
        Attention(heads=1, dim=3, beta=4, softmax)
        >>> attention.drift(torch.eye(3)).shape  # three tokens
        torch.Size([3, 3])
    """

    Q: Tensor | None = None
    K: Tensor | None = None
    V: Tensor | None = None
    O: Tensor | None = None
    beta: float | Tensor = 1.0
    query_bias: Tensor | None = None
    value_bias: Tensor | None = None
    kind: Kind = "softmax"
    causal: bool = False
    kernel: Kernel = "auto"
    context: Measure | None = None
    dim: int = 0
    tolerance: float | None = None

    def __post_init__(self) -> None:
        checks.require_choice("kind", self.kind, get_args(Kind))
        checks.require_choice("kernel", self.kernel, get_args(Kernel))
        named = {name: getattr(self, name) for name in weights.AXES if name != "beta"}
        named, dim = weights.check_weights(named, self.dim)
        vars(self).update(named, dim=dim, beta=weights.as_beta(self.beta))
        self._checked()

    def _checked(self) -> Attention:
        """Itself; an error if options contradict each other or batch axes do not broadcast."""
        if self.is_hardmax and self.kind != "softmax":
            raise ValueError(f"beta = inf with kind = {self.kind!r}; only softmax attention has a limit (hardmax).")
        if self.kernel in ("near", "series") and (self.causal or self.kind != "softmax"):
            raise ValueError(f"kernel = {self.kernel!r} needs kind = 'softmax' and causal = False; use kernel='auto'.")
        if self.causal + (self.kind == "sinkhorn") + (self.context is not None) > 1:
            raise ValueError("causal, kind = 'sinkhorn' and a context exclude each other; keep one of them.")
        if self.context is not None and not hasattr(self.context, "tilted_mean"):
            raise TypeError(f"context is a {type(self.context).__name__}, expected a measure, such as Cloud(tokens).")
        checks.require_positive(tolerance=1.0 if self.tolerance is None else self.tolerance)
        _ = self.leading_axes
        return self

    @classmethod
    def from_matrices(cls, G: Tensor, V: Tensor, beta: float | Tensor = 1.0, **options: Any) -> Attention:
        """Attention with logits beta <G x, y> and values V y, for G and V of shape (d, d) or (..., heads, d, d).

        `options` are further arguments of `Attention`.

        Example:
            >>> Attention.from_matrices(torch.eye(2), -torch.eye(2)).M
            tensor([[[-1.,  0.],
                     [ 0., -1.]]])
        """
        for name, z in (("G", G), ("V", V)):
            checks.require_tensor(name, z)
        if G.shape[-1:] != V.shape[-1:]:
            raise ValueError(f"G has shape {tuple(G.shape)} and V {tuple(V.shape)}, expected one dimension d of both.")
        return cls(Q=G, V=V, beta=beta, **options)

    @classmethod
    def identity(cls, d: int, beta: float | Tensor = 1.0, **options: Any) -> Attention:
        """Attention with Q = K = V = O = I in dimension d, the model of most papers. It takes tokens of any dtype.

        `options` are further arguments of `Attention`.

        Example:
            >>> Attention.identity(8, beta=2.0, kind="unnormalised")
            Attention(heads=1, dim=8, beta=2, unnormalised)
        """
        checks.require_count(d=d)
        return cls(beta=beta, dim=d, **options)

    @classmethod
    def random(
        cls,
        d: int,
        heads: int = 1,
        head_dim: int | None = None,
        beta: float | Tensor = 1.0,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Attention:
        """Random weights with independent Gaussian entries of variance 1/d, so that |Q x| and |O y| are of order one.

        Args:
            head_dim: the rank k of every head, d / heads by default.
            options: further arguments of `Attention`.

        Example:
            >>> Attention.random(16, heads=4, generator=torch.Generator().manual_seed(0)).Q.shape
            torch.Size([4, 4, 16])
        """
        checks.require_count(d=d, heads=heads, head_dim=1 if head_dim is None else head_dim)
        k = head_dim or max(1, d // heads)
        shapes = ((heads, k, d), (heads, k, d), (heads, k, d), (heads, d, k))
        Q, K, V, O = (torch.randn(shape, generator=generator, dtype=dtype) / math.sqrt(d) for shape in shapes)
        return cls(Q, K, V, O, beta, **options)

    def drift(self, cloud: Tensor | Cloud) -> Tensor:
        """The drift of every token of a cloud, before any projection to a geometry.

        Args:
            cloud: tokens (..., n, d), or a `Cloud` with weights and a mask.

        Returns:
            A tensor (..., n, d) in the dtype of the tokens, with zeros on padding. Logits that float32 cannot resolve
            are computed in float64. A token that sees no token feels no attention.

        Example:
            >>> from attn_flow import UniformSphere
            >>> Attention.identity(3, beta=math.inf).with_context(UniformSphere(3)).drift(torch.eye(3))  # V G x / |G x|
            tensor([[1., 0., 0.],
                    [0., 1., 0.],
                    [0., 0., 1.]])
        """
        cloud = as_cloud(cloud)
        self.check_cloud(cloud)
        attention, x = self._in_working_precision(cloud)
        drift = attention(0.0, x, cloud.log_weights).to(cloud.x.dtype)
        if not checks.is_finite(drift):
            raise FloatingPointError("the drift is not finite: logits or values overflow. Use smaller tokens or beta.")
        return cloud.zero_padding(drift)

    def _in_working_precision(self, cloud: Cloud) -> tuple[Attention, Tensor]:
        """The attention and the tokens, in float64 if float32 cannot resolve their logits; padding is zero."""
        x = cloud.zero_padding(cloud.x)
        if checks.working_dtype(x.dtype, self.logit_bound(cloud.max_norm)) == x.dtype:
            return self, x
        return self.in_float64(), x.double()

    def __call__(self, t: float, x: Tensor, log_weights: Tensor | None = None) -> Tensor:
        tokens = others = x[..., None, :, :]  # (..., 1, n, d)
        queries = self._queries(tokens)  # (..., heads or 1, n, k)
        if isinstance(self.context, Cloud):
            others = self.context.zero_padding(self.context.x)[..., None, :, :]
            log_weights = self.context.log_weights
        if self.context is None or isinstance(self.context, Cloud):
            keys, values = weights.project(others, self.K), weights.project(others, self.V)
            log_weights = None if log_weights is None else log_weights[..., None, :]  # (..., 1, n)
            average = self._average(queries, keys, values, log_weights)  # (..., heads or 1, n, v)
        else:
            average = self._average_of_measure(queries, self.context)
        drift = weights.sum_heads(average, self.O)
        return drift if self.value_bias is None else drift + self.value_bias[..., None, :]

    def _queries(self, tokens: Tensor) -> Tensor:
        """Q x + b, (..., heads or 1, n, k)."""
        queries = weights.project(tokens, self.Q)
        return queries if self.query_bias is None else queries + self.query_bias[..., None, :]

    def _average(self, queries: Tensor, keys: Tensor, values: Tensor, log_weights: Tensor | None) -> Tensor:
        """The average of the values under the weights of this kind, (..., heads or 1, n, v), by a kernel."""
        inputs = (queries, keys, values, log_weights)
        scale = self.beta[..., None, None].to(queries) if isinstance(self.beta, Tensor) else self.beta
        if self.kind == "sinkhorn":
            return sinkhorn.softmax_average(*inputs, scale=scale)
        if self.kind == "unnormalised":
            average, log_sum = dense.average_and_log_sum(*inputs, scale=scale, causal=self.causal)
            log_sum = log_sum if log_weights is not None else log_sum - math.log(keys.shape[-2])
            return average * log_sum.exp()[..., None]
        kernel = "dense" if self.is_hardmax or self.causal else self.kernel
        if kernel == "auto":
            kernel = choose_kernel(*inputs, scale, self.tolerance)
        if kernel == "dense":
            return dense.softmax_average(*inputs, scale=scale, causal=self.causal)
        if not torch.compiler.is_compiling() and not dense.is_plain(*inputs, scale):
            raise NotImplementedError(f"kernel {kernel!r} has no derivatives and no torch.func; use kernel='auto'.")
        approximate = near.softmax_average if kernel == "near" else series.softmax_average
        return approximate(*inputs, scale=scale, tolerance=self.tolerance)

    def _average_of_measure(self, queries: Tensor, mu: Measure) -> Tensor:
        """V_h m_beta[mu](K_h^T q), times e^{beta L_beta[mu]} if unnormalised, (..., heads, n, v)."""
        g = queries if self.K is None else queries @ self.K  # (..., heads or 1, n, d)
        g, beta, n = g.expand(*g.shape[:-3], self.heads, -1, -1), self.beta, g.shape[-2]
        if isinstance(beta, Tensor):
            beta = beta[..., None].to(g).expand(*beta.shape[:-1], self.heads, n).flatten(-2)
        g = g.flatten(-3, -2)  # a measure takes the queries of all heads one after the other
        mean = mu.tilted_mean(g, beta)
        if self.kind == "unnormalised":
            mean = mean * (beta * mu.log_partition(g, beta)).exp()[..., None]
        average = mean.unflatten(-2, (self.heads, n))
        return average if self.V is None else average @ self.V.mT

    def matrix(self, cloud: Tensor | Cloud) -> Tensor:
        """The attention matrix A (..., heads, n, n) of a cloud that attends to itself. `drift` never forms it.

        Example:
            >>> Attention.identity(2, beta=0.0).matrix(torch.eye(2))
            tensor([[[0.5000, 0.5000],
                     [0.5000, 0.5000]]])
        """
        if self.context is not None:
            raise ValueError("attention to a context has no matrix of one cloud; use with_context(None).matrix(x).")
        cloud = as_cloud(cloud)
        self.check_cloud(cloud)
        attention, x = self._in_working_precision(cloud)
        tokens, n = x[..., None, :, :], x.shape[-2]
        queries, keys = attention._queries(tokens), weights.project(tokens, attention.K)
        log_weights = None if cloud.log_weights is None else cloud.log_weights[..., None, :]
        eye = torch.eye(n).to(x).expand(*keys.shape[:-2], n, n)  # averages of unit vectors are rows of the matrix
        A = attention.copy_with(kernel="dense")._average(queries, keys, eye, log_weights)
        return A.expand(*A.shape[:-3], self.heads, n, n).to(cloud.x.dtype)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its weights and beta by name, those that are tensors."""
        return {name: z for name in weights.AXES if isinstance(z := getattr(self, name), Tensor)}

    @property
    def leading_axes(self) -> torch.Size:
        """The axes (..., heads) of the weights and of beta, broadcast."""
        shapes = {name: z.shape[: z.ndim - weights.AXES[name] + 1] for name, z in self.tensors.items()}
        if self.value_bias is not None:
            shapes["value_bias"] = torch.Size((*self.value_bias.shape[:-1], 1))
        return checks.broadcast_axes({"one head": torch.Size((1,)), **shapes}, "expected one number of heads")

    @property
    def heads(self) -> int:
        """The number of heads."""
        return self.leading_axes[-1]

    @property
    def batch_shape(self) -> torch.Size:
        """The batch axes of the weights and of beta, broadcast."""
        return self.leading_axes[:-1]

    @property
    def is_hardmax(self) -> bool:
        """Whether beta is infinite."""
        return dense.is_infinite(self.beta)

    @property
    def G(self) -> Tensor:
        """K^T Q, (..., heads, d, d): the logits are beta <G x, y>."""
        return self._matrix(self.K).mT @ self._matrix(self.Q)

    @property
    def G_bias(self) -> Tensor | None:
        """K^T b, (..., heads, d), which is added to G x; None without a query bias."""
        return None if self.query_bias is None else (self._matrix(self.K).mT @ self.query_bias[..., None])[..., 0]

    @property
    def OV(self) -> Tensor:
        """O V, (..., heads, d, d)."""
        return self._matrix(self.O) @ self._matrix(self.V)

    @property
    def M(self) -> Tensor:
        """O V K^T Q, (..., heads, d, d): its spectrum decides the limit of low temperature."""
        return self.OV @ self.G

    @property
    def _first_weight(self) -> Tensor | None:
        """A weight, whose dtype and device the others share; None if there is none."""
        return next((z for name, z in self.tensors.items() if name != "beta"), None)

    def _matrix(self, weight: Tensor | None) -> Tensor:
        """A weight, or the identity (heads, d, d) if it is None."""
        first = self._first_weight
        like = torch.empty(0) if first is None else first
        return torch.eye(self.dim).to(like).expand(self.heads, -1, -1) if weight is None else weight

    def with_beta(self, beta: float | Tensor) -> Attention:
        """The same attention at another inverse temperature."""
        return self.copy_with(beta=weights.as_beta(beta))._checked()

    def with_context(self, context: Measure | Tensor | None) -> Attention:
        """The same attention to a fixed measure, or to tokens (..., m, d), instead of the cloud itself."""
        context = as_cloud(context, "context") if isinstance(context, Tensor) else context
        return self.copy_with(context=context)._checked()

    def to(self, *args: Any, **kwargs: Any) -> Attention:
        """The same attention with its tensors moved or cast, as `Tensor.to`."""
        context = None if self.context is None else self.context.to(*args, **kwargs)
        return self.copy_with(context=context, **{name: z.to(*args, **kwargs) for name, z in self.tensors.items()})

    def in_float64(self) -> Attention:
        # The tokens were given in float32, so the approximate kernels keep the accuracy of float32.
        return self.to(torch.float64).copy_with(tolerance=self.tolerance or 1e-6)

    def copy_with(self, **fields: Any) -> Attention:
        """A copy with other fields, which are not checked: for modules, whose weights change."""
        attention = object.__new__(type(self))
        vars(attention).update(vars(self) | fields)
        return attention

    def check_cloud(self, cloud: Cloud) -> torch.Size:
        checks.require_fit("x", cloud.x, self.dim, "the attention", self._first_weight)
        shapes = {"x": cloud.x.shape[:-2], "the weights": self.batch_shape}
        if isinstance(self.context, Cloud):
            checks.require_fit("context", self.context.x, self.dim, "x", cloud.x)
            shapes["context"] = self.context.x.shape[:-2]
        return checks.broadcast_axes(shapes, "for one beta per batch element pass beta[:, None]")

    def logit_bound(self, radius: float | Tensor) -> Tensor:
        if self.is_hardmax:  # scores are compared and not exponentiated
            return torch.zeros(())
        key_radius = self.context.max_norm if isinstance(self.context, Cloud) else radius
        with torch.no_grad():
            queries = weights.bound_projection(radius, self.Q, self.query_bias)  # (..., heads)
            return torch.as_tensor(self.beta * queries * weights.bound_projection(key_radius, self.K)).amax()

    @property
    def not_exchangeable_because(self) -> tuple[str, ...]:
        return ("a causal mask",) * self.causal

    def summary(self) -> dict[str, Any]:
        beta: Any = "inf" if self.is_hardmax else self.beta
        if isinstance(beta, Tensor):
            beta = beta.tolist() if checks.can_read(beta) else f"tensor {tuple(beta.shape)}"
        return {"beta": beta, **super().summary()}

    def __repr__(self) -> str:
        beta = f"tensor {tuple(self.beta.shape)}" if isinstance(self.beta, Tensor) else f"{self.beta:g}"
        words = [f"heads={self.heads}, dim={self.dim}, beta={beta}", self.kind]
        words += ["causal"] * self.causal
        words += [f"batch={tuple(self.batch_shape)}"] * bool(self.batch_shape)
        words += [f"context={type(self.context).__name__}"] * (self.context is not None)
        return f"Attention({', '.join(words)})"
