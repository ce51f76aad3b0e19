"""What is checked where a user's tensors enter, and when their values may be looked at."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_hidden: ContextVar[bool] = ContextVar("hidden", default=False)  # True inside `unseen`
# What `together` is to read, and who is then told.
_awaited: ContextVar[list[tuple[Tensor, Callable[[float], None]]] | None] = ContextVar("awaited", default=None)


def is_plain(*tensors: Tensor) -> bool:
    """Whether these hold values: not while compiling or transforming, and not on the meta device."""
    if torch.compiler.is_compiling():
        return False
    return not any(t.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors)


def forward_mode() -> bool:
    """Whether derivatives are being taken forward: torch.func.jvp, jacfwd, or dual numbers.

    Fused kernels, torch's and our own, know no tangents; ordinary operations do.
    """
    return torch.autograd.forward_ad._current_level >= 0


def can_look(*tensors: Tensor) -> bool:
    """Whether values may be read: they are there, and not hidden by `unseen`."""
    return is_plain(*tensors) and not (_hidden.get() and any(t.device.type != "cpu" for t in tensors))


@contextmanager
def unseen(hidden: bool = True) -> Iterator[None]:
    """Inside, nothing is read from an accelerator, which would have to be waited for; on a CPU all is as ever."""
    if torch.compiler.is_compiling() or not hidden:
        yield
        return
    token = _hidden.set(True)
    try:
        yield
    finally:
        _hidden.reset(token)


@contextmanager
def together() -> Iterator[None]:
    """What is checked inside of tensors on an accelerator is read at the end, once; on a CPU it is read at once."""
    if torch.compiler.is_compiling() or _awaited.get() is not None:
        yield
        return
    found: list[tuple[Tensor, Callable[[float], None]]] = []
    token = _awaited.set(found)
    try:
        yield
    finally:
        _awaited.reset(token)
    if found:
        for value, (_, listener) in zip(read(*(number for number, _ in found)), found):
            listener(value)


def look_if(suspect: Tensor, look: Callable[[], None]) -> None:
    """Call look, which raises if it finds something, where suspect () is True: now, or at the end of `together`."""
    tell(suspect, lambda found: look() if found else None)


def tell(number: Tensor, listener: Callable[[float], None]) -> None:
    """Give the listener what number () is: now, or at the end of `together`, after what was asked before."""
    pending = _awaited.get()
    if pending is not None and number.device.type != "cpu":
        pending.append((number, listener))
    else:
        listener(float(number))


def read(*numbers: Tensor) -> list[float]:
    """Some numbers () of one device, in one read: an accelerator is waited for once."""
    return torch.stack([number.detach().double() for number in numbers]).cpu().tolist()


def all_finite(x: Tensor) -> bool:
    """One pass over x: a NaN or inf always shows in the sum; a finite sum that overflows is looked at again."""
    return math.isfinite(float(x.detach().sum())) or bool(torch.isfinite(x).all())


def finite(name: str, x: Tensor) -> None:
    """No NaN and no infinity, where values may be looked at."""

    def look() -> None:
        bad = int((~torch.isfinite(x)).sum())
        if bad:
            raise ValueError(f"{name} has {bad} NaN or infinite entries of {x.numel()}, expected finite numbers.")

    if can_look(x):  # a NaN or inf always shows in the sum; a finite sum may overflow
        look_if(~torch.isfinite(x.detach().sum()), look)


def in_range(name: str, x: Tensor) -> None:
    """Of a result: nothing overflowed on the way to it."""
    if can_look(x) and not all_finite(x):
        raise FloatingPointError(
            f"{name} left the range of {x.dtype}: logits beta <q, k> or values overflow. Use smaller tokens, a smaller "
            "beta, or beta=inf (hardmax)."
        )


def tensor(name: str, x: Tensor, shape: str) -> None:
    """A torch.Tensor that holds all its entries; `shape` says in words which."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}, expected a torch.Tensor of shape {shape}.")
    if x.layout is not torch.strided or x.is_nested:
        raise ValueError(f"{name} is sparse or nested ({x.layout}), expected a plain tensor; use {name}.to_dense().")


def floating(name: str, x: Tensor, shape: str) -> None:
    """A real tensor of a floating dtype."""
    tensor(name, x, shape)
    if x.is_complex():
        raise ValueError(f"{name} has dtype {x.dtype}, expected real numbers; its imaginary part has no meaning here.")
    if not x.is_floating_point():
        raise ValueError(f"{name} has dtype {x.dtype}, expected a floating dtype; use {name}.float().")


def precise(name: str, x: Tensor) -> None:
    """float32 or float64: what is computed of it needs decompositions, which half precision has not."""
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} has dtype {x.dtype}, expected float32 or float64; use {name}.float().")


def held(name: str, x: Tensor) -> None:
    """A tensor whose values can be read, where the answer depends on them."""
    if x.is_meta:
        raise ValueError(f"{name} is on the device meta, which holds no values; expected a tensor with values.")


def tokens(name: str, x: Tensor) -> None:
    """A cloud, or a batch of them: floating point, (..., n, d) with n, d >= 1, finite."""
    floating(name, x, "(..., n, d)")
    if x.ndim < 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected (..., n, d): n tokens of dimension d.")
    if 0 in x.shape:
        what = (
            "an empty cloud; expected at least one token"
            if 0 in x.shape[-2:]
            else "no cloud at all; expected at least one"
        )
        raise ValueError(f"{name} has shape {tuple(x.shape)}: {what}.")
    finite(name, x)


def width(name: str, x: Tensor, d: int) -> None:
    """Tokens (..., n, d) of the dimension of what they meet."""
    if x.shape[-1] != d:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected (..., n, {d}): the dimension is {d} here.")


def token_mask(mask: Tensor, x: Tensor) -> None:
    """A padding mask: bool, (..., n) to match x, at least one token in every cloud."""
    tensor("mask", mask, "(..., n)")
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}, expected torch.bool with True for tokens; use mask.bool().")
    if 0 in mask.shape or mask.shape[-1:] != x.shape[-2:-1] or not broadcasts(mask.shape[:-1], x.shape[:-2]):
        raise ValueError(f"mask has shape {tuple(mask.shape)}, expected (..., n) = {tuple(x.shape[:-1])} to match x.")
    same_device("mask", mask, "x", x)

    def look() -> None:
        raise ValueError("mask hides every token of a cloud; expected at least one token per cloud. Drop empty rows.")

    if can_look(mask):
        look_if(~mask.any(-1).all(), look)


def token_weights(weights: Tensor, x: Tensor, mask: Tensor | None = None) -> None:
    """Weights of a measure: (..., n) to match x, nonnegative, finite, some mass in every cloud."""
    tensor("weights", weights, "(..., n)")
    if 0 in weights.shape or weights.shape[-1:] != x.shape[-2:-1] or not broadcasts(weights.shape[:-1], x.shape[:-2]):
        raise ValueError(
            f"weights have shape {tuple(weights.shape)}, expected (..., n) = {tuple(x.shape[:-1])} to match x."
        )
    same_device("weights", weights, "x", x)
    masses(weights, mask)


def masses(weights: Tensor, mask: Tensor | None = None, of: str = "cloud") -> None:
    """Real, finite, nonnegative, and some of them positive (where the mask is True) in every cloud."""
    if weights.is_complex() or weights.dtype == torch.bool:
        raise ValueError(f"weights have dtype {weights.dtype}, expected real masses; a choice of tokens is a mask.")
    finite("weights", weights)
    seen = weights if mask is None else torch.where(mask, weights, 0)

    def look() -> None:
        if bool((weights < 0).any()):
            raise ValueError(f"weights reach {float(weights.min()):.3g}, expected nonnegative masses.")
        raise ValueError(f"weights of a {of} are all zero; expected some mass in every {of}.")

    if can_look(weights):
        look_if((weights < 0).any() | ~(seen > 0).any(-1).all(), look)


def queries(g: Tensor, d: int, like: Tensor | None = None) -> None:
    """Directions in which a measure of dimension d is tilted: (..., m, d), finite, of the dtype of its own `like`."""
    floating("g", g, f"(..., m, {d})")
    if g.ndim < 2 or 0 in g.shape or g.shape[-1] != d:
        raise ValueError(f"g has shape {tuple(g.shape)}, expected (..., m, {d}): queries as wide as the measure.")
    if like is not None:
        same_device("g", g, "the measure", like)
        if g.dtype != like.dtype:
            raise ValueError(f"g has dtype {g.dtype} and the measure {like.dtype}; use measure.to({g.dtype}).")
    finite("g", g)


def covariance(name: str, cov: Tensor) -> None:
    """(..., d, d), finite, symmetric and nonnegative to rounding."""
    floating(name, cov, "(..., d, d)")
    if cov.ndim < 2 or 0 in cov.shape or cov.shape[-1] != cov.shape[-2]:
        raise ValueError(f"{name} has shape {tuple(cov.shape)}, expected (..., d, d).")
    finite(name, cov)
    if not can_look(cov):
        return
    S = cov.detach()
    spread = S.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
    # One computed in float32 may arrive in float64.
    rounding = 100 * S.shape[-1] * max(torch.finfo(S.dtype).eps, torch.finfo(torch.float32).eps)
    if bool(((S - S.mT).abs() > rounding * S.abs().amax((-2, -1), keepdim=True)).any()):
        raise ValueError(f"{name} is not symmetric, expected a covariance; symmetrise it, ({name} + {name}.mT)/2.")
    # A Cholesky factor of S + rounding exists unless an eigenvalue is negative; S = 0 is a point.
    unit = torch.where(spread > 0, spread, 1.0)
    eye = torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
    shifted = S / unit + rounding * eye
    if bool(torch.linalg.cholesky_ex(shifted if S.dtype.itemsize > 2 else shifted.float())[1].any()):
        least = float(torch.linalg.eigvalsh(S.double()).min())
        raise ValueError(f"{name} has the eigenvalue {least:.3g} < 0, expected a covariance.")


def real_times(t: Tensor) -> None:
    """Numbers, and real ones."""
    if t.is_complex() or t.dtype == torch.bool:
        raise ValueError(f"t has dtype {t.dtype}, expected real times.")


def times(t: Tensor) -> None:
    """Times of a path: (T,), at least one, finite, increasing strictly."""
    tensor("t", t, "(T,)")
    real_times(t)
    if t.ndim != 1 or len(t) == 0:
        raise ValueError(f"t has shape {tuple(t.shape)}, expected (T,) with at least one time.")
    if not can_look(t):
        return
    if not all_finite(t):
        raise ValueError("t has NaN or infinite times, expected finite ones.")
    if bool((t[1:] <= t[:-1]).any()):
        raise ValueError(f"t must increase strictly, got {[round(v, 6) for v in t.tolist()[:6]]}...; sort it.")


def inverse_temperature(beta: float | Tensor) -> None:
    """0 <= beta <= inf, a number or a tensor of them."""
    if isinstance(beta, Tensor):
        if beta.is_complex() or beta.numel() == 0:
            raise ValueError(f"beta is {beta.dtype} of shape {tuple(beta.shape)}, expected real numbers.")
        if can_look(beta) and bool((torch.isnan(beta) | (beta < 0)).any()):
            raise ValueError(f"beta = {beta.tolist()}, expected 0 <= beta <= inf (NaN and negative are not).")
    elif not isinstance(beta, numbers.Real):
        raise ValueError(f"beta is a {type(beta).__name__}, expected a number or a torch.Tensor.")
    elif math.isnan(beta) or beta < 0:
        raise ValueError(f"beta = {beta}, expected 0 <= beta <= inf; for repulsion negate V instead.")


def same_device(name: str, a: Tensor, other: str, b: Tensor) -> None:
    """Two tensors that are to meet."""
    if a.device != b.device:
        raise ValueError(f"{name} is on {a.device} and {other} on {b.device}; move one with .to(device).")


def positive(name: str, value: float) -> None:
    """A number > 0; inf is one."""
    try:
        fine = bool(value > 0)
    except (TypeError, RuntimeError):  # of a word, nothing, a complex number, or several
        raise ValueError(f"{name} is a {type(value).__name__}, expected a positive number.") from None
    if not fine:
        raise ValueError(f"{name} = {value}, expected a positive number.")


def positive_finite(name: str, value: float, most: float = math.inf) -> None:
    """A finite number > 0; with `most`, one of 1/most to most."""
    positive(name, value)
    if value == math.inf or not 1 / most <= value <= most:
        what = "a positive, finite number" if most == math.inf else f"a number from {1 / most:g} to {most:g}"
        raise ValueError(f"{name} = {value}, expected {what}.")


def nonnegative(name: str, value: float, what: str = "number", remedy: str = "") -> None:
    """A finite number >= 0; `what` says of what kind, `remedy` what else to do."""
    expected = f"expected a finite {what} of at least 0{remedy}."
    try:
        fine = bool(0 <= value < math.inf)
    except (TypeError, RuntimeError):  # of a word, nothing, a complex number, or several
        raise ValueError(f"{name} is a {type(value).__name__}, {expected}") from None
    if not fine:
        raise ValueError(f"{name} = {value}, {expected}")


def number(name: str, value: float, expected: str = "a number") -> None:
    """One real number, inf and NaN among them; `expected` says in words which."""
    one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    if not (one or isinstance(value, numbers.Real)):
        raise ValueError(f"{name} is a {type(value).__name__}, expected {expected}.")


def flags(**given: bool) -> None:
    """True or False, each by its name: a word would count as True."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} = {str(value)[:80]}, expected True or False.")


def instance(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Something of a kind; `expected` says in words which."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} is a {type(value).__name__}, expected {expected}.")


def function(name: str, value: object, arguments: str) -> None:
    """Something to call; `arguments` says in words with what, and what it returns."""
    if not callable(value):
        raise ValueError(f"{name} is a {type(value).__name__}, expected a function {arguments}.")


def made_with(
    dtype: torch.dtype | None, device: torch.device | str | None, generator: torch.Generator | None = None
) -> None:
    """What new tokens or weights are made with: a real floating dtype and a device that is there; None: torch's own."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype = {dtype}, expected a real floating dtype such as torch.float64.")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator is a {type(generator).__name__}, expected a torch.Generator.")
    if device is not None and not torch.compiler.is_compiling():
        try:
            torch.empty(0, device=device)
        except (RuntimeError, TypeError, AssertionError):
            raise ValueError(f"device = {device}, which torch does not have here; use 'cpu'.") from None


def moves(*args: Any, **kwargs: Any) -> None:
    """Arguments of `Tensor.to` that keep real numbers real: a floating dtype, a device that is there."""
    if torch.compiler.is_compiling():
        return
    try:
        real = torch.empty(0).to(*args, **kwargs).is_floating_point()
    except (TypeError, RuntimeError, AssertionError):
        real = False
    if not real:
        given = [*map(str, args), *(f"{name}={value}" for name, value in kwargs.items())]
        raise ValueError(
            f"to({', '.join(given)[:80]}), expected a real floating dtype such as torch.float64, a device that torch "
            "has here such as 'cpu', or both."
        )


def whole(name: str, value: int, least: int = 1) -> None:
    """A whole number of at least `least`, of 63 bits, as torch has them."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= value < 2**63:
        most = "" if not isinstance(value, numbers.Integral) or value < 2**63 else " and below 2**63"
        raise ValueError(f"{name} = {str(value)[:80]}, expected a whole number of at least {least}{most}.")


def index(value: int, times: int) -> None:
    """Of a path: a whole number, negative from its end; IndexError beyond, which ends a loop over it."""
    if not isinstance(value, numbers.Integral) and not (isinstance(value, Tensor) and value.numel() == 1):
        raise ValueError(f"time index {str(value)[:80]}, expected a whole number.")
    if not -times <= value < times:
        raise IndexError(f"time index {value} of a path of {times} times.")


def broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    """Whether `shape` broadcasts against `to` (either may be the larger)."""
    return all(a == b or a == 1 or b == 1 for a, b in zip(reversed(shape), reversed(to)))


def one_of(name: str, value: str, known: tuple[str, ...] | dict[str, Callable]) -> None:
    """A word out of a list of known ones."""
    if value not in known:
        raise ValueError(f"{name} = {value!r}, expected one of {', '.join(map(repr, known))}.")
