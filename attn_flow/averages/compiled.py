"""The optional compiled kernel of `near`, for widths up to 8 in float32, built on request if there is a C++ compiler.

    from attn_flow.averages import compiled

    compiled.build()   # half a minute the first time, from torch's cache afterwards

Every drift of this process that can then goes through it (those of a `with compiled.kernel():` block alone, without
`build`). Nothing needs it.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_flow.base.files import writing_in_turn

SOURCE = Path(__file__).with_name("near.cpp")
WIDTH = 8
LOWEST, FLOOR = -1e300, -1e30  # of numbers in double and in float
INSTRUCTIONS = {"AVX2": ("-mavx2", "-mfma"), "AVX512": ("-mavx512f", "-mavx512vl", "-mavx512dq", "-mfma")}
_used = False


def build(verbose: bool = False) -> None:
    """Compile near.cpp for this machine and use it from now on; OSError with what the compiler says."""
    global _used
    _load(verbose)
    _used = True


@contextmanager
def kernel(use: bool = True) -> Iterator[None]:
    """The compiled kernel used, or not, in a `with` block."""
    global _used
    if use:
        _load(False)
    before, _used = _used, use
    try:
        yield
    finally:
        _used = before


def _loaded() -> bool:
    """Whether this process has the kernel already: a second library of its name would end the process."""
    return hasattr(torch.ops.attn_flow, "near_softmax")


def _edition() -> str:
    """Of the source: torch's cache keeps a library by its name."""
    return f"{zlib.crc32(SOURCE.read_bytes()):08x}"


def _load(verbose: bool) -> None:
    if _loaded():
        return
    from torch.utils.cpp_extension import get_default_build_root, load

    capability = torch.backends.cpu.get_cpu_capability()
    # torch's cache may be shared by different machines and versions.
    name = f"attn_flow_near_{_edition()}_{capability.lower()}"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    folder = Path(root) / f"{name}_{sys.implementation.cache_tag}_torch_{torch.__version__}"
    path = os.environ.get("PATH", "")
    # ninja may be installed beside this interpreter only.
    os.environ["PATH"] = os.pathsep.join([path, str(Path(sys.executable).parent)])
    try:
        with writing_in_turn(folder / "build"):
            # Whoever holds torch's own lock now was killed while it built; torch would wait for it for ever.
            (folder / "lock").unlink(missing_ok=True)
            load(
                name,
                [str(SOURCE)],
                extra_cflags=["-O3", "-ffast-math", "-fopenmp", "-Wno-psabi", *INSTRUCTIONS.get(capability, ())],
                build_directory=str(folder),
                is_python_module=False,
                verbose=verbose,
            )
    except RuntimeError as error:
        raise OSError(f"the kernel was not built; it needs a C++ compiler and ninja. {error}") from error
    finally:
        os.environ["PATH"] = path


def serves(width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel is used, and this is what it does."""
    return _used and width <= WIDTH and dtype == torch.float32 and device.type == "cpu"


def orders(x: Tensor) -> bool:
    """Whether patches of x are made and bounded here, too."""
    return _used and x.shape[-1] <= WIDTH and x.device.type == "cpu"


def halved(x: Tensor, levels: int) -> Tensor:
    """Indices (2^levels, s) of the rows of x (n, k), float32: halved across the widest axis of each half."""
    return torch.ops.attn_flow.near_halved(x.contiguous(), levels)


def highest(rows: Tensor, points: Tensor) -> Tensor:
    """The largest <row, point> of rows (A, k + 1) over the points (B, s, k + 1) of each patch, in float32: (A, B)."""
    return torch.ops.attn_flow.near_highest(rows.contiguous(), points.clamp_min(FLOOR).contiguous())


def softmax(
    q: Tensor,
    c: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    k_star: Tensor,
    v_star: Tensor,
    bias_star: Tensor,
    start: Tensor,
    listed: Tensor,
    i: Tensor,
    j: Tensor,
    *,
    causal: bool,
    scale: float,
    gap: float,
    precise: bool,
) -> tuple[Tensor, Tensor]:
    """Averages (A, s, w), and log-sum-exps over the reference (A, s), of patches of queries over their chosen keys.

    Queries q (A, s, w) with centres c (A, w); keys k, values v (B, s, w) and biases (B, s); references k_star, v_star
    (A, w), bias_star (A,); rows of listed patches of keys (l,) that begin at start (A + 1,); tokens i (A, s), j (B, s).
    gap: how far below the highest logit so far all keys of a patch must be, for every query of a patch, to be left
    out. precise: logits in float64.
    """
    points = (F.pad(z, (0, max(q.shape[-1], v.shape[-1]) - z.shape[-1])) for z in (q, c, k, v))
    q, c, k, v = (z.contiguous() for z in points)
    k_star, v_star = (F.pad(z, (0, q.shape[-1] - z.shape[-1])).contiguous() for z in (k_star, v_star))
    finite = bias.clamp_min(LOWEST)  # the kernel is compiled for finite numbers
    of_patches = q, c, k, v, finite, k_star, v_star, bias_star.contiguous(), start, listed.contiguous(), i, j
    return torch.ops.attn_flow.near_softmax(*of_patches, causal, scale, gap, precise)
