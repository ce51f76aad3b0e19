"""A toy deep encoder: embedding, L residual attention layers in continuous time, a head.

`stack(ids)` are the logits, `stack.trajectory(ids)` the tokens through depth, `stack.attentions()` what was learned.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attn_flow.attention import Attention
from attn_flow.base import checks, memory
from attn_flow.dynamics.kicks import Kick, independent
from attn_flow.dynamics.placement import Placement, peri, post, pre
from attn_flow.dynamics.steppers import Adaptive, Step, Velocity, euler, named_step, rk4
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.geometry import Euclidean, Geometry, known_geometry
from attn_flow.nn.layer import ContinuousAttentionLayer

# nGPT is missing: a layer hands its stepper P_x A, and P_x A/|A| cannot be had from it.
PLACEMENTS: dict[str, Placement] = {placement.name: placement for placement in (post, pre, peri)}
Readout = Literal["mean", "token"]


class DeepStack(nn.Module):
    """x_0 = embedding, x_l = layer_l(x_{l-1}) for l = 1..depth, logits = head(x_depth).

    inputs: size of the vocabulary of ids (batch, n), or (batch, n, fields) whose embeddings are summed; with
        `points=True` the width of real vectors (batch, n, inputs).
    outputs, readout: classes; "mean" asks once per cloud, "token" once per token.
    length: the longest input, for learned positions (`waves` at first); None leaves tokens exchangeable.
    depth, shared: how many layers, each its own weights, or one layer's applied `depth` times.
    horizon, steps, step: each layer's time, in so many steps, by name ("euler", "rk4", "dopri5") or function. One Euler
        step is the ordinary discrete layer.
    beta, learn_beta: inverse temperature at the start, one per head if learned.
    geometry, placement: where tokens live and where they are normalised: "post" on the geometry; "pre" and "peri"
        (Euclidean only) let the radius move, and normalise what attention, FFN and head see.
    ffn: hidden width of x <- retract(x + P_x FFN(x)) after each layer; 0 for none.
    noise: sigma of independent kicks sqrt(h) sigma xi after each step, in training mode only, as dropout.
    checkpoint: recompute each step in the backward pass instead of keeping it.

    Example:
        >>> stack = DeepStack(inputs=20, outputs=4, length=16, depth=2, horizon=2.0, beta=4.0)
        >>> ids = torch.randint(20, (8, 16))
        >>> stack(ids).shape, stack.trajectory(ids)
        (torch.Size([8, 4]), Trajectory(...))
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        dim: int = 32,
        heads: int = 1,
        head_dim: int | None = None,
        depth: int = 1,
        shared: bool = False,
        horizon: float = 1.0,
        steps: int = 4,
        step: str | Step = rk4,
        beta: float = 4.0,
        learn_beta: bool = False,
        geometry: Geometry | None = None,
        placement: str = "post",
        ffn: int = 0,
        noise: float = 0.0,
        length: int | None = None,
        points: bool = False,
        readout: Readout = "mean",
        bias: bool = False,
        checkpoint: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("inputs", inputs), ("outputs", outputs), ("dim", dim), ("depth", depth)):
            checks.whole(name, value)
        checks.whole("ffn", ffn, 0)
        checks.nonnegative("noise", noise)
        if length is not None:
            checks.whole("length", length)
        checks.inverse_temperature(beta)
        checks.flags(shared=shared, points=points)
        checks.one_of("placement", placement, tuple(PLACEMENTS))
        checks.one_of("readout", readout, ("mean", "token"))
        checks.made_with(dtype, None)
        rows = max(inputs, outputs, ffn, length or 1, 1 if shared else depth)
        memory.require_tensor(rows, dim, dtype=dtype)
        geometry = known_geometry(geometry, PLACEMENTS[placement].flat)
        if PLACEMENTS[placement].flat and not isinstance(geometry, Euclidean):
            raise ValueError(f"placement {placement!r} moves the radius of tokens; expected geometry Euclidean().")
        self.depth, self.shared, self.noise, self.step = depth, shared, float(noise), equal_step(step)
        self.placement, self.readout, self.points = PLACEMENTS[placement], readout, points
        self.embedding: nn.Module = (
            nn.Linear(inputs, dim, dtype=dtype) if points else nn.Embedding(inputs, dim, dtype=dtype)
        )
        self.positions = None if length is None else nn.Parameter(waves(length, dim).to(dtype or torch.float32))
        own = 1 if shared else depth
        self.layers = nn.ModuleList(
            ContinuousAttentionLayer(
                dim,
                heads,
                head_dim,
                beta=beta,
                learn_beta=learn_beta,
                horizon=horizon,
                steps=steps,
                geometry=geometry,
                bias=bias,
                checkpoint=checkpoint,
                dtype=dtype,
            )
            for _ in range(own)
        )
        self.ffns = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, ffn, dtype=dtype), nn.GELU(), nn.Linear(ffn, dim, dtype=dtype))
            for _ in range(own if ffn else 0)
        )
        self.head = nn.Linear(dim, outputs, dtype=dtype)
        self.train()

    def train(self, mode: bool = True) -> DeepStack:
        """Training mode has noise, evaluation has none."""
        super().train(mode)
        noise = independent(self.noise) if mode and self.noise > 0 else None
        for layer in self.layers:
            layer.step = placed(self.step, self.placement, noise)  # type: ignore[assignment]
        return self

    @property
    def geometry(self) -> Geometry:
        return self._layer(0).geometry

    # --- what it computes ---------------------------------------------------------------------------------------

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits (batch, outputs), or (batch, n, outputs) for readout="token"; mask (batch, n), True for tokens."""
        x = self.embed(inputs)
        for l in range(self.depth):
            x = self._after(l, self._layer(l)(x, mask))
        if self.readout == "mean":
            shown = torch.ones_like(x[..., :1]) if mask is None else mask[..., None].to(x.dtype)
            x = (x if not self.placement.flat else _unit(x)).mul(shown).sum(-2) / shown.sum(-2)
            return self.head(x)
        return self.head(_unit(x) if self.placement.flat else x)

    def embed(self, inputs: Tensor) -> Tensor:
        """The tokens before the first layer, (batch, n, dim)."""
        expected = "(batch, n, inputs) real vectors" if self.points else "(batch, n) or (batch, n, fields) ids"
        checks.tensor("inputs", inputs, expected)
        if inputs.is_floating_point() != self.points or inputs.ndim not in ((3,) if self.points else (2, 3)):
            raise ValueError(f"inputs have shape {tuple(inputs.shape)} and dtype {inputs.dtype}, expected {expected}.")
        checks.same_device("inputs", inputs, "the stack", self.head.weight)
        self._check_ids(inputs)
        x = self.embedding(inputs)
        x = x.sum(-2) if x.ndim == 4 else x
        if self.positions is not None:
            if x.shape[-2] > self.positions.shape[0]:
                raise ValueError(
                    f"inputs have {x.shape[-2]} tokens, expected at most length = {self.positions.shape[0]}."
                )
            x = x + self.positions[: x.shape[-2]]
        return x.to(self.head.weight.dtype)  # under autocast the tokens stay in full precision

    def _check_ids(self, inputs: Tensor) -> None:
        """Ids that the embedding has, or vectors as wide as it takes."""
        if isinstance(self.embedding, nn.Embedding):
            most = self.embedding.num_embeddings
            if inputs.dtype not in (torch.int32, torch.int64):
                raise ValueError(f"inputs have dtype {inputs.dtype}, expected ids; use inputs.long().")

            def look() -> None:
                low, high = int(inputs.min()), int(inputs.max())
                raise ValueError(f"inputs hold ids from {low} to {high}, expected 0 to {most - 1}.")

            if checks.can_look(inputs):
                checks.look_if(((inputs < 0) | (inputs >= most)).any(), look)
        elif inputs.shape[-1] != self.embedding.in_features:
            raise ValueError(
                f"inputs have shape {tuple(inputs.shape)}, expected (batch, n, {self.embedding.in_features})."
            )

    def _layer(self, l: int) -> ContinuousAttentionLayer:
        return self.layers[0 if self.shared else l]  # type: ignore[return-value]

    def _after(self, l: int, x: Tensor) -> Tensor:
        """The FFN after layer l, where there is one."""
        if len(self.ffns) == 0:
            return x
        step = self.ffns[0 if self.shared else l](_unit(x) if self.placement.flat else x)
        x = self.geometry.retract(x + self.geometry.tangent(x, step.to(x.dtype)))
        if checks.can_look(x) and not bool(torch.isfinite(x).all()):
            raise FloatingPointError(f"tokens left the range of {x.dtype} in the FFN after layer {l}; use the sphere.")
        return x

    # --- what it is ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def paths(self, inputs: Tensor, mask: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        """Layer by layer: the clouds of its flow (steps + 1, batch, n, dim), and the cloud after its FFN; no noise."""
        was = self.training
        self.eval()
        try:
            x, found = self.embed(inputs), []
            for l in range(self.depth):
                path = self._layer(l)(x, mask, return_path=True)
                x = self._after(l, path[-1])
                found.append((path, x))
        finally:
            self.train(was)
        return found

    def trajectory(self, inputs: Tensor, mask: Tensor | None = None) -> Trajectory:
        """The tokens through depth, (depth steps + 1, batch, n, dim), without noise; t counts all layers' time.

        A layer's last cloud is taken after its FFN, so that it is the next layer's first.
        """
        kept: list[Tensor] = []
        for path, x in self.paths(inputs, mask):
            kept[-1:] = [*path[:-1], x]
        first = self._layer(0)
        t = torch.linspace(0, self.depth * first.horizon, len(kept), dtype=torch.float64)
        about = {
            "stack": "DeepStack",
            "depth": self.depth,
            "shared": self.shared,
            "horizon": first.horizon,
            "steps": first.steps,
            "step": getattr(self.step, "name", getattr(self.step, "__name__", "custom")),
            "geometry": type(self.geometry).__name__,
            "placement": self.placement.name,
            "beta": [self._layer(l).beta.tolist() for l in range(self.depth)],
        }
        return Trajectory(t, torch.stack(kept), None, mask, about)

    def attentions(self) -> list[Attention]:
        """What the layers learned, one Attention per layer (the same `depth` times if shared), without gradient."""
        frozen = []
        for l in range(self.depth):
            with torch.no_grad():
                found = self._layer(l).attention()
            parts = {name: getattr(found, name) for name in ("Q", "K", "V", "O", "query_bias", "value_bias", "beta")}
            detached: dict[str, Any] = {name: p.detach() for name, p in parts.items() if isinstance(p, Tensor)}
            frozen.append(replace(found, **detached))
        return frozen

    def rerun(
        self,
        *,
        horizon: float | None = None,
        steps: int | None = None,
        step: str | Step | None = None,
        depth: int | None = None,
        beta_factor: float = 1.0,
    ) -> DeepStack:
        """A copy with the same parameters, run otherwise: longer, finer, deeper (if shared), at beta_factor * beta."""
        checks.positive_finite("beta_factor", beta_factor)
        if depth is not None and not self.shared:
            raise ValueError(
                f"depth = {depth}: a stack with own weights has {self.depth} layers; expected shared=True."
            )
        for name, size in (("steps", steps), ("depth", depth)):
            if size is not None:
                checks.whole(name, size)
        other = copy.deepcopy(self)
        other.depth = self.depth if depth is None else depth
        other.step = self.step if step is None else equal_step(step)
        for layer in other.layers:
            assert isinstance(layer, ContinuousAttentionLayer)
            if horizon is not None:
                checks.positive_finite("horizon", horizon)
                layer.horizon = horizon
            layer.steps = layer.steps if steps is None else steps
            layer.beta = layer.beta.detach() * beta_factor
        return other.train(self.training)

    def discrete_twin(self) -> DeepStack:
        """The ordinary residual stack with these parameters: a layer is one Euler step, retract(x + T P_x A(x))."""
        return self.rerun(step=euler, steps=1)


def equal_step(step: str | Step) -> Step:
    """A step by its name or itself; adaptive ones are refused."""
    found = named_step(step)
    if isinstance(found, Adaptive):
        raise ValueError(f"step = {step}, expected one of fixed size such as 'rk4': a layer takes equal steps.")
    return found


def waves(length: int, dim: int) -> Tensor:
    """Positions to begin with, (length, dim): sqrt(2) cos and sin of p omega, omega from 1 down to 1/length.

    A shift of p is a rotation of these, hence a linear map that Q and K can be: from random positions a stack needs
    thousands of updates to look at its neighbours.
    """
    omega = length ** -torch.linspace(0, 1, (dim + 1) // 2)
    phase = torch.arange(length)[:, None] * omega
    return math.sqrt(2) * torch.stack([phase.cos(), phase.sin()], dim=-1).flatten(-2)[:, :dim]


def placed(step: Step, placement: Placement, noise: Kick | None = None) -> Step:
    """The step of the placed velocity, followed by a kick: what normalisation and noise make of a stepper.

    In flat space a layer's velocity is its drift A, which is what `placement.velocity` is made of.
    """
    if placement is post and noise is None:
        return step

    def moved(velocity: Velocity, t: float, x: Tensor, h: float, geometry: Geometry) -> Tensor:
        x = step(lambda t, x: placement.velocity(velocity, t, x), t, x, h, geometry)
        return x if noise is None else geometry.retract(x + math.sqrt(h) * noise(x, None))

    moved.__name__ = f"{placement.name} {getattr(step, 'name', 'custom')}"
    return moved


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)
