"""Predictions leave their arguments alone, and refuse what they cannot predict, at once and by name."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from attn_flow.attention import Attention
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.geometry import Sphere
from attn_flow.measures import EllipsoidSupport, UniformSphere
from attn_flow.prediction import limit, phases, resolution, settle, zero_temperature_flow
from attn_flow.prediction.spectral import spectrum

F64 = torch.float64
EYE = torch.eye(2, dtype=F64)
D31, D12 = torch.diag(torch.tensor([3.0, 1.0], dtype=F64)), torch.diag(torch.tensor([1.0, 2.0], dtype=F64))
A = Attention.from_matrices(D31, D12)
ROTATING = Attention.from_matrices(torch.tensor([[1.0, -0.7], [0.7, 1.0]], dtype=F64), EYE)
BIASED = Attention.from_matrices(D31, D12, query_bias=torch.tensor([0.1, 0.0], dtype=F64))
X = Sphere().uniform(6, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
RANK_ONE = Attention.random(3, heads=2, head_dim=1, dtype=F64, generator=torch.Generator().manual_seed(0))
X3 = Sphere().uniform(6, 3, dtype=F64, generator=torch.Generator().manual_seed(0))


def path_at(t: list[float]) -> Trajectory:
    """A path whose times are looked at by nobody on the way."""
    path = Trajectory(torch.arange(3.0), X.expand(3, 6, 2))
    object.__setattr__(path, "t", torch.tensor(t))
    return path


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "unknown support": (lambda: limit(A, "token"), r"support = 'token', expected None \(the full sphere\), a measure"),
    "support of another type": (lambda: limit(A, 3.0), r"support is a float, expected None"),  # type: ignore[arg-type]
    "support of another width": (lambda: limit(A, UniformSphere(3)), r"support has dimension 3, expected d = 2"),
    "ellipsoid of another width": (
        lambda: zero_temperature_flow(A, X, 1.0, EllipsoidSupport(torch.zeros(3), torch.eye(3), 1.0)),
        r"support has dimension 3, expected d = 2",
    ),
    "tol NaN": (lambda: limit(A, tol=math.nan), r"tol = nan, expected a relative tolerance between 0 and 1"),
    "tol negative": (lambda: limit(A, tol=-1.0), r"tol = -1.0, expected a relative tolerance"),
    "tol infinite": (lambda: limit(A, tol=math.inf), r"tol = inf, expected a relative tolerance"),
    "complex M": (lambda: spectrum(np.eye(2) * 1j), r"M has dtype complex128, expected real entries"),
    "complex G": (lambda: Attention.from_matrices(EYE * 1j, EYE), r"complex128, expected real numbers"),
    "resolution of a negative beta": (lambda: resolution(A, X, beta=-5.0), r"beta = -5.0, expected 0 <= beta <= inf"),
    "resolution of a NaN beta": (lambda: resolution(A, X, beta=math.nan), r"beta = nan, expected 0 <= beta <= inf"),
    "width at beta 0": (
        lambda: limit(Attention.from_matrices(torch.diag(torch.tensor([1.0, 2.0])), -torch.eye(2))).width(0.0),
        r"beta = 0.0, expected 1 < beta < inf",
    ),
    "push_forward at inf": (
        lambda: limit(ROTATING).push_forward(X, math.inf),
        r"t = inf, expected a finite time of at least 0",
    ),
    "push_forward at NaN": (
        lambda: limit(ROTATING).push_forward(X, math.nan),
        r"t = nan, expected a finite time of at least 0",
    ),
    "push_forward before 0": (
        lambda: limit(A).push_forward(X, -1.0),
        r"t = -1.0, expected a finite time of at least 0",
    ),
    "push_forward too late": (
        lambda: limit(ROTATING).push_forward(X, 1e12),
        r"t = 1e\+12 takes at least .* panels of the time change",
    ),
    "zero temperature, NaN time": (lambda: zero_temperature_flow(A, X, [0, math.nan]), r"t has NaN or infinite times"),
    "zero temperature, one NaN": (lambda: zero_temperature_flow(A, X, math.nan), r"t = nan, expected a positive"),
    "zero temperature, unsorted": (lambda: zero_temperature_flow(A, X, [0, 2.0, 1.0]), r"t must increase strictly"),
    "rate of no distance": (lambda: limit(A).rate(0.5), r"p = 0.5, expected a number with 1 <= p < inf"),
    "heads of rank one": (
        lambda: limit(RANK_ONE).settle(X3),
        r"head 0 has G of rank 1 in d = 3: at beta = inf its drift jumps .* Run flow\(attention, x0, t\) at a finite",
    ),
    "heads of rank one pushed forward": (lambda: limit(RANK_ONE).push_forward(X3), r"head 0 has G of rank 1 in d = 3"),
    "horizon": (lambda: settle(BIASED, X, horizon=math.inf), r"horizon = inf, expected the time after which"),
    "unsorted path": (lambda: phases(path_at([0.0, 2.0, 1.0]), limit(A)), r"t must increase strictly"),
    "NaN in a path": (lambda: phases(path_at([0.0, math.nan, 1.0]), limit(A)), r"t has NaN or infinite times"),
    "attention for a limit": (
        lambda: phases(path_at([0.0, 1.0, 2.0]), A),  # type: ignore[arg-type]
        r"limit is a Attention, expected a LimitMap",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_in_these_words(case: str) -> None:
    call, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_tokens_that_run_into_the_kernel_of_a_head_are_noticed() -> None:
    """Rank 2 of 3, and both heads push towards the kernel: refused after a thousand steps, not a hundred thousand."""
    G = torch.diag(torch.tensor([1.0, 1.0, 0.0], dtype=F64)).expand(2, 3, 3)
    sinks = Attention.from_matrices(G, torch.diag(torch.tensor([-1.0, -1.0, 1.0], dtype=F64)).expand(2, 3, 3))
    with pytest.raises(ValueError, match="head 0 has G of rank 2 in d = 3, and tokens run into its kernel"):
        settle(sinks, X3)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float64": lambda x: x.clone(),
    "float32": lambda x: x.float(),
    "requires_grad": lambda x: x.clone().requires_grad_(),
    "transposed": lambda x: x.T.contiguous().T,
    "expanded": lambda x: x.expand(2, *x.shape),
}
CALLS: dict[str, Callable[[torch.Tensor], object]] = {
    "settle": lambda x: limit(BIASED.to(x.dtype)).settle(x),
    "nonlinear push_forward": lambda x: limit(BIASED.to(x.dtype)).push_forward(x),
    "push_forward": lambda x: limit(A.to(x.dtype)).push_forward(x),
    "push_forward at t": lambda x: limit(ROTATING.to(x.dtype)).push_forward(x, 2.0),
    "zero_temperature_flow": lambda x: zero_temperature_flow(A.to(x.dtype), x, [0.0, 1.0]),
    "hardmax": lambda x: zero_temperature_flow(A.to(x.dtype), x, [0.0, 0.5], "tokens"),
    "resolution": lambda x: resolution(A.to(x.dtype), x),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("call", CALLS)
def test_arguments_are_not_written_into(call: str, view: str) -> None:
    x = VIEWS[view](X)
    before = x.detach().clone()
    CALLS[call](x)
    assert torch.equal(x.detach(), before)


def test_weights_and_mask_of_an_exact_path_are_kept() -> None:
    mask = torch.arange(6) < 4
    hidden = torch.where(mask[:, None], X, 0.0)
    weights = torch.rand(6, dtype=F64, generator=torch.Generator().manual_seed(0))
    path = zero_temperature_flow(A, hidden, [0.0, 1.0], weights=weights, mask=mask)
    plain = zero_temperature_flow(A, X[:4], [0.0, 1.0])
    assert torch.equal(path.x[:, :4], plain.x)
    assert path.mask is mask
    assert path.weights is weights
