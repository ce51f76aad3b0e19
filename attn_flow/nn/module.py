"""What continuous modules share: the options of their flow, and a fixed or trained inverse temperature."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from attn_flow.base import checks
from attn_flow.geometry import Geometry
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
        is_hardmax = _is_infinite(value)
        with torch.no_grad():
            self.log_beta.copy_(value.log().expand(heads))
        self._is_hardmax = is_hardmax

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._is_hardmax = _is_infinite(self.log_beta)

    def _apply(self, *args: Any, **kwargs: Any) -> FlowModule:
        super()._apply(*args, **kwargs)
        self.options = self.options.to(self.log_beta)  # a geometry with tensors moves along
        return self


def _is_infinite(values: Tensor) -> bool:
    """Whether the entries of beta, or of log_beta, are infinite; ValueError if only some of them are."""
    is_infinite = values.detach() == math.inf
    if not checks.can_read(is_infinite) or not bool(is_infinite.any()):
        return False
    checks.require(is_infinite, "beta mixes finite and infinite entries; expected one or the other for all heads.")
    return True


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
