"""A simulated accelerator: tensors that say they are on another device, refuse to mix with the CPU, and count reads.

Values live in an ordinary tensor inside, where every operation is done. What a real accelerator would make slow or
impossible shows: an operand on the wrong device raises, and each value that the host waits for is counted with the line
that reads it.

    with accelerator() as device:
        path = flow(attention.to(device), x0.to(device), [0.0, 1.0])
    device_reads()  # {"dynamics/integrator.py:112": 1, ...}

torch counts devices once, at the first backward pass: use it in a process that has had none.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "simulated"
_reads: Counter[str] = Counter()
_library: torch.library.Library | None = None


class Simulated(torch.Tensor):
    """A tensor of the simulated device; its values are in `inner`."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Simulated:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
            dispatch_sizes_strides_policy="sizes",  # an in-place operation may change them
        )
        tensor.inner = inner
        return tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"simulated({self.inner!r})"

    def tolist(self) -> Any:
        """Which torch refuses for such tensors, and a device allows."""
        _reads[_caller()] += 1
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(operation, args, kwargs or {})


def _on_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _bare(value: Any) -> Any:
    if isinstance(value, Simulated):
        return value.inner
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def _run(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_leaves((args, kwargs))
    simulated = [z for z in leaves if isinstance(z, Simulated)]
    ordinary = [z for z in leaves if isinstance(z, torch.Tensor) and not isinstance(z, Simulated)]
    name = str(operation)
    if name == "aten._efficientzerotensor.default":  # of forward derivatives: a tensor without memory, for torch's eyes
        operation = torch.ops.aten.zeros.default
    device = kwargs.get("device")
    if simulated and name in ("aten.size.default", "aten.sym_size.default"):
        return tuple(simulated[0].inner.size())
    if simulated and name in ("aten.stride.default", "aten.sym_stride.default"):
        return tuple(simulated[0].inner.stride())
    if simulated and name in ("aten.sym_storage_offset.default", "aten.storage_offset.default"):
        return simulated[0].inner.storage_offset()
    if simulated and name.startswith("aten.is_"):  # is_contiguous and the like
        return operation(*tree_map(_bare, args), **tree_map(_bare, kwargs))
    crosses = "copy" in name
    cpu_operands = [z for z in ordinary if z.ndim > 0]
    indexed = name.startswith("aten.index.") and isinstance(args[0], Simulated)  # torch takes indices of the CPU
    if simulated and cpu_operands and not crosses and not indexed:
        raise RuntimeError(f"{name} mixes the simulated device with the CPU: {[tuple(z.shape) for z in cpu_operands]}")
    reads_value = "_local_scalar_dense" in name or _of_unknown_shape(name, args)
    if simulated and (reads_value or (device is not None and not _on_device(device))):
        _reads[_caller()] += 1
    if simulated and crosses and args and not isinstance(args[0], Simulated) and isinstance(args[0], torch.Tensor):
        _reads[_caller()] += 1
    bare_kwargs = tree_map(_bare, kwargs)
    if _on_device(device):
        bare_kwargs["device"] = torch.device("cpu")
    out = operation(*tree_map(_bare, args), **bare_kwargs)
    if name.split(".")[1].endswith("_") and args and isinstance(args[0], Simulated):  # in place
        return args[0]
    written = kwargs.get("out")
    if written is not None:
        return written
    if device is not None:
        is_simulated = _on_device(device)
    else:
        is_simulated = bool(simulated) and not (crosses and not isinstance(args[0], Simulated))
    return tree_map(lambda z: Simulated(z) if is_simulated and isinstance(z, torch.Tensor) else z, out)


def _of_unknown_shape(name: str, args: Any) -> bool:
    """Whether the host has to wait for how large the result is: those of a mask, and different values."""
    if name in ("aten.nonzero.default", "aten.masked_select.default") or name.startswith("aten._unique"):
        return True
    masks = [z for z in tree_leaves(args[1:2]) if isinstance(z, torch.Tensor) and z.dtype == torch.bool]
    return name == "aten.index.Tensor" and bool(masks)


def _caller() -> str:
    for frame in reversed(traceback.extract_stack()):
        path = frame.filename.replace("\\", "/")
        ours = "/attn_flow/" in path or "/hooks/" in path
        if ours and not any(part in path for part in ("/site-packages/torch/", "/tests/", "bench/simulated_device.py")):
            return f"{'/'.join(path.split('/')[-2:])}:{frame.lineno}"
    return "elsewhere"


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operation, args, kwargs or {})


def _prepare() -> None:
    """The device's name, and the two operations that reach it below Python's dispatch."""
    global _library
    if _library is not None:
        return
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    torch.get_device_module(NAME).get_amp_supported_dtype = lambda: [torch.bfloat16]  # checkpoints ask
    _library = torch.library.Library("aten", "IMPL")

    def empty(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
        return Simulated(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))

    def copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if isinstance(source, Simulated) and not isinstance(target, Simulated):
            _reads[_caller()] += 1
        _bare(target).copy_(_bare(source))
        return target

    _library.impl("empty_strided", empty, "PrivateUse1")
    _library.impl("_copy_from", copy, "PrivateUse1")


@contextmanager
def accelerator() -> Iterator[torch.device]:
    """The simulated device, while tensors may be created on it; no reads counted yet."""
    _prepare()
    _reads.clear()
    with _Mode():
        yield torch.device(NAME, 0)


def on(x: torch.Tensor) -> torch.Tensor:
    """x on the simulated device, a leaf of its own."""
    return Simulated(x.detach().clone())


def values(x: torch.Tensor) -> torch.Tensor:
    """The values of a tensor of the simulated device, without counting a read."""
    if not isinstance(x, Simulated):
        raise ValueError(f"a result is on {x.device}, expected {NAME}: it left the device.")
    return x.inner


def device_reads() -> dict[str, int]:
    """How often the host waited for a value, by the line that reads it."""
    return dict(_reads)


def forget_reads() -> None:
    """Count from zero."""
    _reads.clear()
