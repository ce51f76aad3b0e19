"""Deep stacks of continuous attention layers, from ids or vectors to classes."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attn_flow.attention.attention import Attention
from attn_flow.base import checks
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.nn.layer import ContinuousAttentionLayer
from attn_flow.nn.module import require_input
from attn_flow.nn.options import FlowOptions


class DeepStack(nn.Module):
    """x_0 = embedding, x_l = layer_l(x_{l-1}) for l = 1..depth, logits = head(x_depth).

    Args:
        inputs: the size of the vocabulary, for ids (batch, n) or (batch, n, fields), whose embeddings are summed; or,
            with points=True, the width of real vectors (batch, n, inputs).
        outputs: the number of classes.
        dim, depth: the width of the tokens, and the number of layers.
        ffn: hidden width of a feed-forward network x <- retract(x + P_x FFN(x)) after each layer; 0 for none.
        length: the largest number of tokens, for learned positions; None for exchangeable tokens.
        points: whether inputs are real vectors.
        readout: "mean" for one answer per cloud, "token" for one per token.
        options: of `ContinuousAttentionLayer`, such as heads, beta and horizon; four RK4 steps by default.

    Example:
        >>> stack = DeepStack(inputs=20, outputs=4, length=16, depth=2, horizon=2.0, beta=4.0)
        >>> ids = torch.randint(20, (8, 16))
        >>> stack(ids).shape, stack.trajectory(ids)
        (torch.Size([8, 4]), Trajectory(9 times from 0 to 4, x (9, 8, 16, 32) float32))
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        dim: int = 32,
        depth: int = 1,
        ffn: int = 0,
        length: int | None = None,
        points: bool = False,
        readout: Literal["mean", "token"] = "mean",
        **options: Any,
    ) -> None:
        super().__init__()
        checks.require_count(inputs=inputs, outputs=outputs, depth=depth, length=1 if length is None else length)
        checks.require_choice("readout", readout, ("mean", "token"))
        self.depth, self.readout, self.points = depth, readout, points
        self.embedding: Any = (nn.Linear if points else nn.Embedding)(inputs, dim)
        self.positions = None if length is None else nn.Parameter(waves(length, dim))
        options.setdefault("steps", 4)
        self.layers: Any = nn.ModuleList(ContinuousAttentionLayer(dim, **options) for _ in range(depth))
        networks = (nn.Sequential(nn.Linear(dim, ffn), nn.GELU(), nn.Linear(ffn, dim)) for _ in range(depth))
        self.ffns = nn.ModuleList(networks if ffn else ())
        self.head = nn.Linear(dim, outputs)

    @property
    def options(self) -> FlowOptions:
        """The options of every layer's flow."""
        return self.layers[0].options

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits (batch, outputs), or (batch, n, outputs) with readout="token"; mask (batch, n) is True for tokens."""
        x = self.embed(inputs)
        for l, layer in enumerate(self.layers):
            x = self._feed_forward(l, layer(x, mask))
        if self.readout == "mean":
            weights = torch.ones_like(x[..., :1]) if mask is None else mask[..., None].to(x.dtype)
            x = (x * weights).sum(-2) / weights.sum(-2).clamp_min(1)
        return self.head(x)

    def embed(self, inputs: Tensor) -> Tensor:
        """The tokens before the first layer, (batch, n, dim)."""
        expected = "(batch, n, inputs) real vectors" if self.points else "(batch, n) or (batch, n, fields) ids"
        if inputs.is_floating_point() != self.points or inputs.ndim not in ((3,) if self.points else (2, 3)):
            raise ValueError(f"inputs have shape {tuple(inputs.shape)} and dtype {inputs.dtype}, expected {expected}.")
        if self.points:
            require_input("inputs", inputs, self.embedding.in_features, self.embedding.weight)
        x = self.embedding(inputs)
        x = x.sum(-2) if x.ndim == 4 else x
        if self.positions is not None:
            if x.shape[-2] > self.positions.shape[0]:
                raise ValueError(f"inputs have {x.shape[-2]} tokens, expected at most length = {len(self.positions)}.")
            x = x + self.positions[: x.shape[-2]]
        return x.to(self.head.weight.dtype)  # under autocast the tokens stay in full precision

    def _feed_forward(self, l: int, x: Tensor) -> Tensor:
        """The tokens after the FFN of layer l, if there is one."""
        geometry = self.options.geometry
        return geometry.retract(x + geometry.tangent(x, self.ffns[l](x).to(x.dtype))) if len(self.ffns) else x

    @torch.no_grad()
    def paths(self, inputs: Tensor, mask: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        """For every layer the clouds of its flow (steps + 1, batch, n, dim), and the cloud after its FFN."""
        x, paths = self.embed(inputs), []
        for l, layer in enumerate(self.layers):
            path = layer(x, mask, return_path=True)
            x = self._feed_forward(l, path[-1])
            paths.append((path, x))
        return paths

    def trajectory(self, inputs: Tensor, mask: Tensor | None = None) -> Trajectory:
        """The tokens through depth as a `Trajectory` (depth * steps + 1, batch, n, dim); time adds up over the layers.

        A layer's last cloud is taken after its FFN: it is the next layer's first.
        """
        states: list[Tensor] = []
        for path, x in self.paths(inputs, mask):
            states[-1:] = [*path[:-1], x]
        t = torch.linspace(0, self.depth * self.options.horizon, len(states), dtype=torch.float64)
        is_token = None if mask is None else mask > 0
        return Trajectory(t, torch.stack(states), None, is_token, {"stack": "DeepStack", "layer": str(self.options)})

    def attentions(self) -> list[Attention]:
        """One `Attention` per layer, without gradient."""
        attentions = [layer.attention() for layer in self.layers]
        return [a.copy_with(**{name: z.detach() for name, z in a.tensors.items()}) for a in attentions]

    def rerun(self, *, beta_factor: float = 1.0, **options: Any) -> DeepStack:
        """A copy with the same weights, every beta times a factor, and other `FlowOptions` (horizon, steps, step)."""
        stack = copy.deepcopy(self)
        for layer in stack.layers:
            layer.options = replace(layer.options, **options)
            layer.beta = layer.beta.detach() * beta_factor
        return stack


def waves(length: int, dim: int) -> Tensor:
    """Initial positions (length, dim): sqrt(2) cos and sin of p omega, omega from 1 down to 1/length.

    A shift of p is a rotation, which Q and K learn quickly; random positions would take thousands of updates.
    """
    omega = length ** -torch.linspace(0, 1, (dim + 1) // 2)
    phase = torch.arange(length)[:, None] * omega
    return math.sqrt(2) * torch.stack([phase.cos(), phase.sin()], dim=-1).flatten(-2)[:, :dim]
