"""What continuous modules share: the options of their flow, the inverse temperature, and the check of their inputs."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from attn_flow.base import checks
from attn_flow.geometry import Ellipsoid, place
from attn_flow.nn.options import FlowKeywords, FlowOptions


class FlowModule(nn.Module):
    """A module with the options of a flow, and one inverse temperature per head, stored as `log_beta` (heads,).

    `log_beta` is a parameter if beta is learned and a buffer otherwise, so that `load_state_dict` sets it either way.
    """

    log_beta: Tensor

    def __init__(
        self, dim: int, heads: int, head_dim: int | None, spread: float, factory: Any, **options: Unpack[FlowKeywords]
    ) -> None:
        """A beta of None is spread / sqrt(head_dim) dim / r^2; r is the radius of the sphere, or sqrt(dim) if flat."""
        super().__init__()
        checks.require_count(dim=dim, heads=heads, head_dim=1 if head_dim is None else head_dim)
        if head_dim is None and dim % heads:
            raise ValueError(f"the width {dim} is not a multiple of the {heads} heads; choose another number of heads.")
        self.dim, self.heads, self.head_dim = dim, heads, dim // heads if head_dim is None else head_dim
        beta, self.learn_beta = options.pop("beta", None), options.pop("learn_beta", False)
        self.validate = options.pop("validate", True)
        self.options = FlowOptions(**options)  # type: ignore[misc]
        if isinstance(self.options.geometry, Ellipsoid):
            checks.require_shape("the centre of the geometry", self.options.geometry.centre, (dim,))
        if beta is None:
            radius = self.options.geometry.max_norm
            beta = spread * dim / (math.sqrt(self.head_dim) * (dim if radius is None else radius**2))
        log_beta = torch.empty(heads, **factory)
        if self.learn_beta:
            self.log_beta = nn.Parameter(log_beta)
        else:
            self.register_buffer("log_beta", log_beta)
        self._initial_beta = beta.detach().clone() if isinstance(beta, Tensor) else beta
        self.beta = beta

    @property
    def beta(self) -> Tensor:
        """The inverse temperature, (heads,)."""
        return self.log_beta.exp()

    @beta.setter
    def beta(self, beta: float | Tensor) -> None:
        device = None if isinstance(beta, Tensor) else "cpu"  # under torch.device("meta") it would have no value
        value = torch.as_tensor(beta, dtype=torch.float64, device=device).detach()
        if value.shape not in ((), (1,), (self.heads,)):
            raise ValueError(f"beta has shape {tuple(value.shape)}, expected () or (heads,) = ({self.heads},).")
        checks.require((value > 0) & value.isfinite(), f"beta = {beta}, expected positive, finite numbers.")
        with torch.no_grad():
            self.log_beta.copy_(value.log().expand(self.heads))

    @torch.no_grad()
    def needs_float64(self, clouds: dict[str, Tensor], logit_bound: Tensor, is_empty: Tensor | None) -> bool:
        """Whether float32 cannot resolve the logits. Values are checked on the way, with one read from the device.

        `clouds` has tokens (..., n, d) by their names in errors, first those that flow; `is_empty` says of which
        clouds a mask hides every token.
        """
        (name, x), *_ = clouds.items()
        wide = torch.promote_types(x.dtype, torch.float32)  # float16 could not hold the sums
        # NaN if a token has no direction, infinite if it is too long to square.
        size = self.options.geometry.retract(x).sum(dtype=wide) + torch.linalg.vector_norm(x, dtype=wide)
        has_empty = torch.zeros(()) if is_empty is None else is_empty.any()
        numbers = [z.to(x.device, torch.float64) for z in (size, logit_bound, has_empty)]
        total, bound, has_empty_cloud = torch.stack(numbers).tolist()
        if not math.isfinite(total + bound):
            for each, z in clouds.items():
                checks.require_finite(each, z)
            place(name, x, self.options.geometry)  # an error for tokens without a direction
            raise ValueError(f"the logits of {name} overflow; use smaller tokens, weights or beta.")
        if has_empty_cloud:
            warnings.warn("a mask hides every token of a cloud, which does not move.", stacklevel=6)
        needs_float64 = checks.working_dtype(x.dtype, torch.tensor(bound)) != x.dtype
        return needs_float64 and not torch.is_autocast_enabled(x.device.type)

    def extra_repr(self) -> str:
        beta = "learned" if self.learn_beta else "fixed"
        return f"dim={self.dim}, heads={self.heads}, head_dim={self.head_dim}, beta {beta}, {self.options}"


def parameter_groups(module: nn.Module, weight_decay: float = 0.01) -> list[dict[str, Any]]:
    """Two groups of parameters for an optimiser: all but the betas, with weight decay, and the betas without it.

    Weight decay on the logarithm of beta would pull every beta to 1, or to the trained one in a pretrained model.

    Args:
        module: any module with continuous layers or replaced attention inside; frozen parameters are left out.
        weight_decay: of the first group.

    Returns:
        The first argument of an optimiser, as in `torch.optim.AdamW(parameter_groups(model), lr=1e-3)`.

    Example:
        >>> from attn_flow.nn import ContinuousAttentionLayer
        >>> groups = parameter_groups(ContinuousAttentionLayer(8, learn_beta=True))
        >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
        [(4, 0.01), (1, 0.0)]
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    names = ("log_beta", "log_beta_factor")  # of a layer, and of replaced attention
    betas = {name: p for name, p in trained.items() if name.rpartition(".")[2] in names}
    others = [p for name, p in trained.items() if name not in betas]
    return [{"params": others, "weight_decay": weight_decay}, {"params": list(betas.values()), "weight_decay": 0.0}]


def require_input(name: str, x: Tensor, dim: int, weight: Tensor | None) -> None:
    """Raise an error unless x is a tensor of tokens (..., n, dim) that fits a weight of the layer, if there is one."""
    checks.require_tokens(name, x)
    checks.require_fit(name, x, dim, "the layer", weight)
