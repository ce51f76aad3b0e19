"""The names of torch that are not public. A version of torch without one of them uses what stands behind it."""

from __future__ import annotations

from typing import Any

import torch

# The operation behind torch's fused attention on CPUs, which also returns the log-sum-exp. None: ordinary operations.
fused_with_log_sum: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)

# Whether a tensor stands for others inside torch.func (vmap, jvp, grad). Without it, none is taken to.
is_transformed: Any = getattr(
    getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", lambda tensor: False
)


def uses_forward_mode() -> bool:
    """Whether forward-mode derivatives are being computed (torch.func.jvp, jacfwd, dual numbers)."""
    return getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0
