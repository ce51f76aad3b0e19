"""Errors that users meet: one sentence that says what was received and what to do, and TypeError for wrong types."""

import math
import re
from collections.abc import Callable

import pytest
import torch

from attn_flow import Attention, Cloud, ContinuousAttentionLayer, Drift, Layers, Sphere, flow, wasserstein

X = Sphere().uniform(6, 3, generator=torch.Generator().manual_seed(0))
A = Attention.identity(3, beta=2.0)
NAN = X.clone()
NAN[2, 1] = math.nan
ZERO = X.clone()
ZERO[4] = 0.0

# name: (call, words of the error)
WRONG_VALUES: dict[str, tuple[Callable[[], object], str]] = {
    # shapes
    "tokens of another dimension": (lambda: A.drift(X[:, :2]), "3"),
    "one token without its axis": (lambda: A.drift(X[0]), r"\(3,\)"),
    "an empty cloud": (lambda: A.drift(X[:0]), r"\(0, 3\)"),
    "a flow in another dimension": (lambda: flow(A, X[:, :2], 1.0), "3"),
    "clouds of different dimensions": (lambda: wasserstein(X, X[:, :2]), "3"),
    "keys of another width": (lambda: Attention(Q=torch.eye(3), K=torch.ones(2, 4)), "shape"),
    "a matrix that is not square": (lambda: Attention.from_matrices(torch.ones(2, 3), torch.eye(3)), r"2, 3\)"),
    "different numbers of heads": (lambda: Attention(Q=torch.ones(2, 3, 3), V=torch.ones(3, 3, 3)), "heads"),
    "a layer that cannot be split": (lambda: ContinuousAttentionLayer(10, 3), "10"),
    "a layer on tokens of another width": (lambda: ContinuousAttentionLayer(8, 2)(torch.randn(2, 5, 7)), "7|8"),
    # dtypes and values
    "weights of two dtypes": (lambda: Attention(Q=torch.eye(3), V=torch.eye(3).double()), "dtype"),
    "NaN in a token": (lambda: flow(A, NAN, 1.0), "NaN|finite"),
    "NaN in a weight": (lambda: Attention(V=torch.full((3, 3), math.nan)), "NaN|finite"),
    "NaN in a cloud": (lambda: wasserstein(X, NAN), "NaN|finite"),
    "a token at zero on the sphere": (lambda: flow(A, ZERO, 1.0), "zero"),
    "a negative beta": (lambda: Attention.identity(3, beta=-1.0), "-1"),
    "beta that is NaN": (lambda: Attention.identity(3, beta=math.nan), "nan"),
    "hardmax without a normaliser": (lambda: Attention.identity(3, math.inf, kind="unnormalised"), "hardmax"),
    # masks and weights
    "a mask of the wrong shape": (lambda: Cloud(X, mask=torch.ones(5, dtype=torch.bool)), "mask"),
    "a mask that hides everything": (lambda: Cloud(X, mask=torch.zeros(6, dtype=torch.bool)), "mask"),
    "a negative weight": (lambda: Cloud(X, torch.tensor([1.0, 1, 1, 1, 1, -1])), "weights"),
    "weights that are all zero": (lambda: Cloud(X, torch.zeros(6)), "weights"),
    "weights of the wrong shape": (lambda: Cloud(X, torch.ones(5)), "weights"),
    # times and options
    "times that decrease": (lambda: flow(A, X, [0.0, 2.0, 1.0]), "increas"),
    "a time that is infinite": (lambda: flow(A, X, math.inf), "finite|inf"),
    "a step of zero": (lambda: flow(A, X, 1.0, h=0.0), "h = 0"),
    "an unknown step": (lambda: flow(A, X, 1.0, step="rk5"), "rk4"),
    "an unknown kind": (lambda: Attention.identity(3, kind="softmx"), "softmax"),
    "an unknown kernel": (lambda: Attention.identity(3, kernel="fast"), "dense"),
    "an unknown method": (lambda: wasserstein(X, X, method="sinkhrn"), "sinkhorn"),
    "layers without enough times": (lambda: Layers([A, A], [0.0, 1.0]), "times"),
    "a time outside the layers": (lambda: flow(Layers([A], [0.0, 1.0]), X, 2.0), "no field"),
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_a_wrong_value_is_a_sentence(name: str) -> None:
    call, words = WRONG_VALUES[name]
    with pytest.raises(ValueError) as error:
        call()
    assert re.search(words, str(error.value)), error.value
    assert len(str(error.value)) > 20


WRONG_TYPES: dict[str, Callable[[], object]] = {
    "a list of tokens": lambda: A.drift([[1.0, 0.0, 0.0]]),  # type: ignore[arg-type]
    "integer tokens": lambda: A.drift(torch.ones(4, 3, dtype=torch.long)),
    "a mask of numbers": lambda: Cloud(X, mask=torch.ones(6)),
    "a context as a word": lambda: A.with_context("sphere"),  # type: ignore[arg-type]
    "tokens as words": lambda: flow(A, "tokens", 1.0),  # type: ignore[arg-type]
    "a drift that is not a function": lambda: flow(Drift(3.0), X, 1.0),  # type: ignore[arg-type]
    "an attention that is a number": lambda: flow(3.0, X, 1.0),  # type: ignore[arg-type]
    "a matrix as a list": lambda: Attention(Q=[[1.0]]),  # type: ignore[arg-type]
    "a dimension that is a word": lambda: Attention.identity("three"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_a_wrong_type_is_a_type_error(name: str) -> None:
    with pytest.raises((TypeError, AttributeError)):
        WRONG_TYPES[name]()


def test_numbers_out_of_range_are_a_floating_point_error() -> None:
    with pytest.raises(FloatingPointError, match=r"range|finite|overflow"):
        flow(Drift(lambda t, x: 1e30 * x * x.norm(dim=-1, keepdim=True) ** 8), X, [0.0, 1.0], geometry=euclidean())


def euclidean() -> object:
    from attn_flow import Euclidean

    return Euclidean()


@pytest.mark.cuda
def test_tokens_and_weights_on_different_devices() -> None:
    with pytest.raises(ValueError, match="cuda"):
        Attention(V=torch.eye(3, device="cuda")).drift(X)
    with pytest.raises(ValueError, match="cuda"):
        wasserstein(X, X.cuda())
