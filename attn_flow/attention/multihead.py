"""Who attends to whom: the drift F(x) = sum_h O_h V_h m_beta[mu](G_h x + b_h) + c, with mu the cloud or any measure.

Scores are <Q x + b, K y>, so G = K^T Q and the query bias acts through K^T b. A key bias would be constant in y and
cancel. Heads are summed. Matrices act on column vectors: tokens are rows, so code reads x @ Q.mT.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from attn_flow.attention import drifts
from attn_flow.attention.heads import Heads
from attn_flow.attention.projections import key_bias
from attn_flow.attention.truncated import Truncated, truncated_drift
from attn_flow.base import checks, memory
from attn_flow.measures import Cloud, Measure


@dataclass(frozen=True, eq=False)
class Attention(Heads):
    """Multi-head attention with factored weights and inverse temperature beta; its fields are those of `Heads`."""

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
            return drifts.against_cloud(self, x, context.x, context.log_weights)
        return drifts.against_measure(self, x, context)

    def weights(self, x: Tensor, *, weights: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """The attention matrix A (..., heads, n, n), dense; rows sum to one but for kind='unnormalised'."""
        cloud = self._cloud(x, weights, mask)
        entries = math.prod(self._batch(x.shape[:-2])) * self.heads * x.shape[-2] ** 2
        what = f"the attention matrix of {x.shape[-2]} tokens and {self.heads} heads"
        memory.require(3 * entries * x.element_size(), what, "drift(x) never holds it; or take fewer tokens", x.device)
        return drifts.weights(self, x, cloud.log_weights)

    def truncated_drift(self, x: Tensor, *, weights: Tensor | None = None, mask: Tensor | None = None) -> Truncated:
        """The drift over the keys that matter with a bound on its error, whether that is faster or not.

        `drift` does the same for large clouds wherever it is faster; `truncation` says how much may be left out.
        """
        log_weights = self._cloud(x, weights, mask).log_weights
        with torch.no_grad():
            found = truncated_drift(self, x, x, key_bias(self, x, log_weights), always=True)
            if found is None:  # every key matters: unnormalised, or a masked hardmax, or truncation = 0
                F = self.self_drift(x, log_weights)
                found = Truncated(F, torch.zeros_like(F[..., 0]), 1.0)
        if mask is None:
            return found
        shown = found.drift.masked_fill(~mask[..., None], 0.0)
        return Truncated(shown, found.error.masked_fill(~mask, 0.0), found.pairs)

    def self_drift(self, x: Tensor, log_weights: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """The drift of tokens against themselves, unchecked: what integrators call at every stage.

        log_weights (..., n) has -inf where mask is False, as `Cloud.log_weights`.
        """
        F = drifts.against_cloud(self, x, x, log_weights)
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
