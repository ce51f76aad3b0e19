"""What continuous modules share: the options of their flow, the inverse temperature, and the check of their inputs."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from attn_flow.base import checks
from attn_flow.geometry import Ellipsoid, Geometry, place
from attn_flow.nn.options import FlowKeywords, FlowOptions

BETAS = ("log_beta", "log_beta_factor")  # the names of trained temperatures in layers and in replaced attention


class FlowModule(nn.Module):
    """A module with the options of a flow, and one inverse temperature per head, stored as `log_beta` (heads,).

    `log_beta` is a parameter if beta is learned and a buffer otherwise, so that `load_state_dict` sets it either way.
    """

    log_beta: Tensor

    def __init__(
        self, heads: int, beta: float | Tensor, factory: dict[str, Any], **options: Unpack[FlowKeywords]
    ) -> None:
        super().__init__()
        self.learn_beta = options.pop("learn_beta", False)
        self.validate = options.pop("validate", True)
        self.options = FlowOptions(**options)  # type: ignore[arg-type, misc]
        log_beta = torch.empty(heads, device=factory["device"], dtype=factory["dtype"] or torch.float32)
        if self.learn_beta:
            self.log_beta = nn.Parameter(log_beta)
        else:
            self.register_buffer("log_beta", log_beta)
        self.is_hardmax = not isinstance(beta, Tensor) and beta == math.inf
        self._initial_beta = beta.detach().clone() if isinstance(beta, Tensor) else beta
        self.beta = beta

    @property
    def geometry(self) -> Geometry:
        """The set that tokens live on."""
        return self.options.geometry

    @property
    def beta(self) -> Tensor:
        """The inverse temperature, (heads,)."""
        return self.log_beta.exp()

    @beta.setter
    def beta(self, beta: float | Tensor) -> None:
        device = None if isinstance(beta, Tensor) else "cpu"  # under torch.device("meta") it would have no value
        value = torch.as_tensor(beta, dtype=torch.float64, device=device).detach()
        checks.require_beta(value)
        heads = self.log_beta.shape[0]
        if value.ndim > 1 or (value.ndim == 1 and value.shape[0] not in (1, heads)):
            raise ValueError(f"beta has shape {tuple(value.shape)}, expected () or (heads,) = ({heads},).")
        if self.learn_beta:
            checks.require((value > 0) & value.isfinite(), f"beta = {beta} cannot be learned; expected 0 < beta < inf.")
        kinds = "infinite" if self.is_hardmax else "finite"
        message = f"beta = {beta}, expected {kinds} numbers as at the start; beta = inf makes another layer (hardmax)."
        checks.require(value.isinf() == self.is_hardmax, message)
        with torch.no_grad():
            self.log_beta.copy_(value.log().expand(heads))

    def _apply(self, *args: Any, **kwargs: Any) -> FlowModule:
        super()._apply(*args, **kwargs)
        geometry, like = self.geometry, self.log_beta
        if isinstance(geometry, Ellipsoid) and not like.is_meta:  # its tensors move along, in float32 at least
            dtype = torch.promote_types(like.dtype, torch.float32)
            centre, axes = geometry.centre.to(like.device, dtype), geometry.axes.to(like.device, dtype)
            self.options = replace(self.options, geometry=Ellipsoid(centre, axes))
        return self

    @torch.no_grad()
    def choose_dtype(
        self,
        clouds: dict[str, Tensor],
        total: Tensor,
        logit_bound: Tensor,
        is_empty: Tensor | None,
        is_padding: Tensor | None,
    ) -> torch.dtype:
        """The dtype to compute in. Values and masks are checked on the way, with one read from the device.

        Args:
            clouds: tokens (..., n, d) by their names in errors; the first is the one that flows.
            total: a number () that is not finite if one of the tokens is not, or has no image on the geometry.
            logit_bound: (), see `checks.working_dtype`.
            is_empty: whether a mask hides all tokens of a cloud, (...).
            is_padding: whether a mask of HuggingFace is nothing but padding, ().
        """
        (name, x), *_ = clouds.items()
        no = torch.zeros_like(total, dtype=torch.bool)
        has_empty = no if is_empty is None else is_empty.any()
        is_wrong = no if is_padding is None else ~is_padding
        numbers = [z.to(x.device, torch.float64) for z in (total, logit_bound, has_empty, is_wrong)]
        size, bound, has_empty_cloud, is_wrong_mask = torch.stack(numbers).tolist()
        if not math.isfinite(size) or not math.isfinite(bound):
            for each, z in clouds.items():
                checks.require_finite(each, z)
            place(name, x, self.geometry)
            raise ValueError(f"the logits of {name} overflow; use smaller tokens, weights or a finite beta.")
        if is_wrong_mask:
            raise ValueError(
                "the mask hides tokens from some queries and not from others, or has positive numbers in a mask that "
                "is added to logits; expected padding. A causal layer takes a causal mask too."
            )
        if has_empty_cloud:
            warnings.warn("a mask hides every token of a cloud, which does not move.", stacklevel=6)
        if torch.is_autocast_enabled(x.device.type):
            return x.dtype
        return checks.working_dtype(x.dtype, torch.tensor(bound))


def parameter_groups(module: nn.Module, weight_decay: float = 0.01) -> list[dict[str, Any]]:
    """Two groups of parameters for an optimiser: the trained betas without weight decay, and all others with it.

    Weight decay on the logarithm of beta would pull every beta to 1, or to the trained one in a pretrained model.

    Args:
        module: any module, with continuous layers or replaced attention somewhere inside.
        weight_decay: of all parameters but the betas.

    Returns:
        A list for `torch.optim.AdamW(parameter_groups(model), lr=1e-3)`. Frozen parameters are left out.

    Example:
        >>> from attn_flow.nn import ContinuousAttentionLayer
        >>> groups = parameter_groups(ContinuousAttentionLayer(8, learn_beta=True))
        >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
        [(4, 0.01), (1, 0.0)]
    """
    groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            groups[name.rpartition(".")[2] in BETAS].append(parameter)
    return [{"params": groups[False], "weight_decay": weight_decay}, {"params": groups[True], "weight_decay": 0.0}]


def default_beta(dim: int, head_dim: int, geometry: Geometry) -> float:
    """dim / (sqrt(head_dim) r^2) for tokens of length r.

    It is 1 / sqrt(head_dim) for layer-normalised tokens, r = sqrt(dim), which flat space is assumed to hold.
    """
    radius = geometry.max_norm
    return dim / (math.sqrt(head_dim) * (dim if radius is None else radius**2))
