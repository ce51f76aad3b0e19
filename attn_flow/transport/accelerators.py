"""Clouds on an accelerator: which are compared there, all pairs in one call, and one copy to the CPU for the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_flow.transport import batched
from attn_flow.transport.coupling import Ground
from attn_flow.transport.plans import Limits


def stays_on_device(x: Tensor, y: Tensor, p: float, cost: str, method: str, limits: Limits) -> bool:
    """Whether clouds on an accelerator are compared there: by Sinkhorn, also where "auto" could do nothing else."""
    many = isinstance(y, Tensor) and min(x.ndim, y.ndim) > 1 and max(x.shape[-2], y.shape[-2]) > limits.shortlist
    return method in ("sinkhorn", "geomloss") or (method == "auto" and many and p == 2 and cost == "euclidean")


def on_host(given: dict[str, Any]) -> dict[str, Any]:
    """The same tensors on the CPU by one copy, which gradients pass; what is no tensor of that device stays."""
    device = given["x"].device
    moved = {name: z for name, z in given.items() if isinstance(z, Tensor) and z.device == device}
    dtype = given["x"].dtype
    for z in moved.values():
        dtype = torch.promote_types(dtype, z.dtype)
    packed = torch.cat([z.to(dtype).flatten() for z in moved.values()]).cpu()
    parts = packed.split([z.numel() for z in moved.values()])
    return given | {name: part.reshape(z.shape).to(z.dtype) for (name, z), part in zip(moved.items(), parts)}


def batch_on_device(
    x: Tensor,
    y: Tensor,
    a: Tensor,
    b: Tensor,
    there_x: Tensor,
    there_y: Tensor,
    ground: Ground,
    rtol: float,
    blur: float | None,
    scaling: float,
    method: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Distances and errors of all pairs, (B,), in one call that stays on the accelerator."""
    ground.expect_euclidean(method)
    masses = []
    for w, there in ((a, there_x), (b, there_y)):
        w = torch.where(there, w.double(), 0.0).reshape(-1, w.shape[-1])
        w = w / w.detach().amax(-1, keepdim=True)  # whose sum may overflow
        masses.append(w / w.sum(-1, keepdim=True))
    x, y = (z.double().reshape(-1, *z.shape[-2:]) for z in (x, y))
    return batched.certified(x, masses[0], y, masses[1], rtol, blur, scaling, method, dtype)
