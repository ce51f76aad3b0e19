"""Arguments of the right kind and a wrong value, made from calls that work: tensors, numbers, words and lists."""

import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from public_calls import CLOUD, EXAMPLES, EYE, A, X
from torch import Tensor, nn

from attn_flow import Attention, Cloud, LimitMap, Trajectory, limit
from attn_flow.measures import UniformSphere

NUMBERS: dict[str, float] = {
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "-1": -1,
    "0": 0,
    "0.5": 0.5,
    "1e308": 1e308,
    "5e-324": 5e-324,
    "10**12": 10**12,
}
# What an argument that may be left out is when it is given.
FILLED: dict[str, Any] = {
    "weights": torch.ones(5, dtype=torch.float64),
    "weights_x": torch.ones(5, dtype=torch.float64),
    "weights_y": torch.ones(5, dtype=torch.float64),
    "mask": torch.ones(5, dtype=torch.bool),
    "mask_x": torch.ones(5, dtype=torch.bool),
    "mask_y": torch.ones(5, dtype=torch.bool),
    "K": EYE,
    "V": EYE,
    "O": EYE,
    "G": EYE,
    "query_bias": EYE[0],
    "value_bias": EYE[0],
    "velocity": X,
    "context": CLOUD,
    "support": UniformSphere(3),
    "dtype": torch.float64,
    "device": "cpu",
    "points": ["resid"],
    "layers": [0],
}


def spoiled(x: Tensor, value: float) -> Tensor:
    """One entry is something else."""
    x = x.clone()
    x.flatten()[-1:] = value
    return x


def tensors(x: Tensor) -> dict[str, Tensor]:
    """What may be wrong with a tensor's entries, shape, dtype and place."""
    found: dict[str, Tensor] = {
        "no axes": x.flatten()[0].clone(),
        "a batch of two": torch.stack([x, x]),
        "an empty batch": torch.stack([x, x])[:0],
        "elsewhere": x.to("meta"),
        "sparse": x.to_sparse(),
    }
    if x.ndim:
        found |= {
            "wider": torch.cat([x, x[..., :1]], -1),
            "narrower": x[..., :-1],
            "no columns": x[..., :0],
            "an axis less": x[0],
        }
    if x.ndim > 1:
        found |= {"no rows": x[..., :0, :], "another row": torch.cat([x, x[..., :1, :]], -2)}
    kinds = (torch.bool, torch.int64, torch.uint8, torch.complex128, torch.float16, torch.float32, torch.float64)
    found |= {str(kind): x.to(kind) for kind in kinds if kind != x.dtype}
    if x.dtype.is_floating_point:
        found |= {str(value): spoiled(x, value) for value in (math.nan, math.inf, -math.inf)}
        found |= {"zeros": torch.zeros_like(x), "negative": -x.abs(), "1e-320": x * 1e-320, "1e300": x.sign() * 1e300}
        found |= {"1e160": x * 1e160, "1e-170": x * 1e-170}
    elif x.dtype == torch.bool:
        found |= {"all False": torch.zeros_like(x), "one True": torch.arange(x.numel()).reshape(x.shape) == 0}
    else:
        found |= {str(value): torch.full_like(x, value) for value in (-1, 10**12)}
    return found


def others(thing: Any) -> dict[str, Any]:
    """Attentions, clouds, paths and limits of another width, dtype or batch."""
    if isinstance(thing, Attention):
        return {
            "of another width": Attention.identity(2, dtype=torch.float64),
            "in float32": thing.to(torch.float32),
            "a batch of 7": Attention(torch.eye(3, dtype=torch.float64).expand(7, 1, 3, 3)),
            "at beta = inf": thing.with_beta(math.inf),
            "at beta = 0": thing.with_beta(0.0),
            "two heads": Attention.random(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
            "causal": replace_flags(thing, causal=True),
            "without itself": replace_flags(thing, self_attention=False),
            "sinkhorn": Attention.identity(3, dtype=torch.float64, kind="sinkhorn"),
            "unnormalised": Attention.identity(3, dtype=torch.float64, kind="unnormalised"),
            "G = 0": Attention.from_matrices(0 * EYE, EYE),
            "V = 0": Attention.from_matrices(EYE, 0 * EYE),
            "of 1e200": Attention.from_matrices(1e200 * EYE, 1e200 * EYE),
        }
    if isinstance(thing, Cloud):
        return {
            "of another width": Cloud(thing.x[..., :2]),
            "in float32": Cloud(thing.x.float()),
            "one token": Cloud(thing.x[:1]),
            "all tokens at one place": Cloud(thing.x[:1].expand(5, -1).clone()),
            "all tokens at 0": Cloud(0 * thing.x),
            "a batch of 7": Cloud(thing.x.expand(7, *thing.x.shape)),
            "of 1e200": Cloud(1e200 * thing.x),
            "of 1e-320": Cloud(1e-320 * thing.x),
        }
    if isinstance(thing, Trajectory):
        return {
            "of another width": Trajectory(thing.t, thing.x[..., :2]),
            "in float32": Trajectory(thing.t, thing.x.float()),
            "one time": thing[:1],
            "no times": thing[:0],
            "backwards": Trajectory(thing.t.flip(0), thing.x),
            "NaN": Trajectory(thing.t, spoiled(thing.x, math.nan)),
            "one token": Trajectory(thing.t, thing.x[..., :1, :]),
            "zeros": Trajectory(thing.t, 0 * thing.x),
        }
    if isinstance(thing, LimitMap):
        eye = torch.eye(2, dtype=torch.float64)
        return {
            "of another width": limit(Attention.from_matrices(torch.diag(torch.tensor([2.0, 1.0])).double(), eye)),
            "nonlinear": limit(Attention.random(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))),
            "stationary": limit(A),
            "undefined": limit(Attention.from_matrices(0 * EYE, EYE)),
        }
    if isinstance(thing, UniformSphere):
        return {"of another width": UniformSphere(2), "a cloud of another width": Cloud(X[:, :2])}
    return {}


def replace_flags(attention: Attention, **flags: bool) -> Attention:
    return replace(attention, **flags)


def wrong(parameter: inspect.Parameter, value: Any) -> dict[str, Any]:
    """By the value that works, and by what the annotation says else."""
    words = str(parameter.annotation)
    found: dict[str, Any] = {}
    if isinstance(value, Tensor):
        found |= tensors(value)
    found |= others(value)
    if isinstance(value, bool) or words in ("bool", "<class 'bool'>"):
        return found
    if re.search(r"\b(float|int|ArrayLike)\b", words) or isinstance(value, (int, float)):
        found |= NUMBERS if "float" in words or "ArrayLike" in words else NUMBERS | {"10**30": 10**30}
    if isinstance(value, torch.dtype):
        found |= {str(kind): kind for kind in (torch.int64, torch.bool, torch.complex64, torch.float16, torch.uint8)}
    if re.search(r"\bstr\b|Literal|Kind", words) or isinstance(value, str):
        found |= {
            "an unknown word": "nonsense",
            "an empty word": "",
            "a word of control": "\x1b[2J\n",
            "long": "x" * 5000,
        }
    if isinstance(value, (list, tuple)) and value:
        found |= {
            "an empty list": type(value)(),
            "an empty tuple": (),
            "the first twice": [value[0], value[0]],
            "backwards": list(value)[::-1],
            "nan in it": [math.nan, *list(value)[1:]],
            "-1 in it": [-1, *list(value)[1:]],
            "10**12 in it": [*list(value)[:-1], 10**12],
        }
    elif "Sequence" in words or "ArrayLike" in words:
        found |= {
            "no numbers": [],
            "ragged": [[1.0], [1.0, 2.0]],
            "words": ["a", "b"],
            "two numbers": [0.5, 0.5],
            "a table": [[0.5, 0.5], [0.5, 0.5]],
            "nan among them": [0.0, math.nan],
        }
    return found


def trials(name: str) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """(parameter, what is wrong with it, the call) of an example."""
    call, given = EXAMPLES[name]
    for parameter in inspect.signature(call).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        value = given.get(parameter.name, parameter.default)
        if value is None or value is inspect.Parameter.empty:
            value = FILLED.get(parameter.name)
        for label, strange in wrong(parameter, value).items():
            yield parameter.name, label, lambda strange=strange, p=parameter.name: call(**{**given, p: strange})


def not_numbers(found: object, depth: int = 0) -> bool:
    """Whether a NaN is in a result."""
    if isinstance(found, Tensor):
        return not found.is_meta and found.is_floating_point() and bool(found.isnan().any())
    if isinstance(found, np.ndarray):
        return found.dtype.kind in "fc" and bool(np.isnan(found).any())
    if isinstance(found, float):
        return math.isnan(found)
    if depth > 3 or isinstance(found, (str, nn.Module)):
        return False
    if isinstance(found, dict):
        return any(not_numbers(value, depth + 1) for value in found.values())
    if isinstance(found, (list, tuple)):
        return any(not_numbers(value, depth + 1) for value in found)
    if is_dataclass(found) and not isinstance(found, type):
        return any(not_numbers(getattr(found, field.name, None), depth + 1) for field in fields(found))
    return False
