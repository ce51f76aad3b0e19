"""How a replaced layer flows: the module that `replace_attention` adds to it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from attn_flow.geometry import Euclidean
from attn_flow.hooks.layout import ENTRY, blocks
from attn_flow.nn.options import FlowOptions

StepName = Literal["euler", "rk4", "dopri5"]


class LayerFlow(nn.Module):
    """How one replaced layer flows: to time `horizon` in `steps` steps, at beta_factor times the trained temperature.

    `beta_factor` (heads,) can be read and set; it is exp(log_beta_factor), and the state dict holds the logarithm.
    `horizon`, `steps` and `step` can be set too.

    Args:
        heads: number of heads of the layer.
        horizon, steps, step: as in `replace_attention`.
        learn_beta: make log_beta_factor a parameter.

    Example:
        >>> flow = LayerFlow(heads=2, horizon=1.0, steps=4, step="rk4", learn_beta=True)
        >>> flow.beta_factor = 2.0
        >>> flow, flow.beta_factor.tolist()
        (LayerFlow(heads=2, horizon=1.0, steps=4, step=rk4, learn_beta=True), [2.0, 2.0])
    """

    log_beta_factor: Tensor

    def __init__(
        self,
        heads: int,
        horizon: float = 1.0,
        steps: int = 1,
        step: StepName = "euler",
        learn_beta: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.horizon, self.steps, self.step, self.learn_beta = heads, horizon, steps, step, learn_beta
        _ = self.options  # checked
        zero = torch.zeros(heads, device=device, dtype=dtype)
        if learn_beta:
            self.log_beta_factor = nn.Parameter(zero)
        else:
            self.register_buffer("log_beta_factor", zero)

    @property
    def options(self) -> FlowOptions:
        """How the layer flows."""
        return FlowOptions(self.horizon, self.steps, self.step, Euclidean())

    @property
    def beta_factor(self) -> Tensor:
        """The multiple of the trained inverse temperature, (heads,), with its gradient."""
        return self.log_beta_factor.exp()

    @beta_factor.setter
    def beta_factor(self, beta_factor: float | Tensor) -> None:
        factor = torch.as_tensor(beta_factor, dtype=torch.float64)
        is_valid = torch.isfinite(factor) & (factor > 0 if self.learn_beta else factor >= 0)
        if factor.shape not in ((), (1,), (self.heads,)) or not bool(is_valid.all()):
            least = "above 0" if self.learn_beta else "from 0"
            raise ValueError(f"beta_factor = {factor.tolist()}, expected 1 or {self.heads} finite numbers {least}.")
        with torch.no_grad():
            self.log_beta_factor.copy_(factor.log().expand(self.heads))

    def reset_parameters(self) -> None:
        """The trained temperature: beta_factor = 1."""
        nn.init.zeros_(self.log_beta_factor)

    def forward(self) -> Tensor:
        """The factor (heads,) of the inverse temperature."""
        return self.beta_factor

    def extra_repr(self) -> str:
        names = ("heads", "horizon", "steps", "step", "learn_beta")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


def flows(model: nn.Module) -> dict[int, LayerFlow]:
    """The flows of a model's replaced layers, by layer.

    Args:
        model: a known encoder, or something that holds one.

    Returns:
        layer: LayerFlow; empty if none was replaced. The layers of a shared block have one flow.

    Example:
        >>> from attn_flow.hooks import replace_attention
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model = replace_attention(tiny_bert()[0], beta_factor=2.0)
        >>> [flow.beta_factor.tolist() for flow in flows(model).values()]
        [[2.0, 2.0], [2.0, 2.0]]
    """
    children = {block.index: getattr(block.attn, ENTRY, None) for block in blocks(model)}
    return {i: child for i, child in children.items() if child is not None}
