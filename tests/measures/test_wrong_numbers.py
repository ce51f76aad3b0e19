"""What is no law of tokens is refused by name, and masses of any size are the masses they stand for."""

import math
from collections.abc import Callable

import pytest
import torch

from attn_flow.attention.multihead import Attention
from attn_flow.geometry import Ellipsoid, Sphere
from attn_flow.measures import Cloud, EllipsoidSupport, Gaussian, Mixture, UniformSphere, quadrature

F64 = torch.float64
X = Sphere().uniform(5, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
EYE = torch.eye(3, dtype=F64)
ZERO = torch.zeros(3, dtype=F64)
INDEFINITE = torch.diag(torch.tensor([1.0, 1.0, -1e-3], dtype=F64))

CASES: dict[str, tuple[Callable[[], object], str]] = {
    "narrow query of a cloud": (
        lambda: Cloud(X).tilted_mean(X[:, :2], 1.0),
        r"g has shape \(5, 2\), expected \(..., m, 3\): queries as wide as the measure",
    ),
    "narrow query of a sphere": (lambda: UniformSphere(3).log_partition(X[:, :2], 1.0), r"expected \(..., m, 3\)"),
    "narrow query of a Gaussian": (lambda: Gaussian(ZERO, EYE).tilted_mean(X[:, :1], 1.0), r"expected \(..., m, 3\)"),
    "narrow query of an ellipsoid": (
        lambda: EllipsoidSupport(ZERO, EYE, 1.0).tilted_mean(X[:, :1], 1.0),
        r"expected \(..., m, 3\)",
    ),
    "narrow query of a mixture": (
        lambda: Mixture([Cloud(X), UniformSphere(3)], torch.ones(2)).tilted_mean(X[:, :2], 1.0),
        r"expected \(..., m, 3\)",
    ),
    "one query without an axis": (
        lambda: Cloud(X).tilted_mean(X[0], 1.0),
        r"g has shape \(3,\), expected \(..., m, 3\)",
    ),
    "skew covariance": (
        lambda: Gaussian(ZERO, EYE + torch.tensor([[0, 1.0, 0], [0, 0, 0], [0, 0, 0]], dtype=F64)),
        r"cov is not symmetric, expected a covariance; symmetrise it",
    ),
    "negative covariance": (lambda: EllipsoidSupport(ZERO, -EYE, 1.0), r"cov has the eigenvalue -1 < 0"),
    "indefinite covariance": (lambda: Gaussian(ZERO, INDEFINITE), r"cov has the eigenvalue -0.001 < 0"),
    "complex covariance": (
        lambda: Gaussian(ZERO, EYE.cfloat()),
        r"cov has dtype torch.complex64, expected real numbers",
    ),
    "complex tokens": (lambda: Cloud(X.cfloat()), r"x has dtype torch.complex64, expected real numbers"),
    "complex axes": (lambda: Ellipsoid(ZERO, EYE.cfloat()), r"axes has dtype torch.complex64, expected real numbers"),
    "boolean weights": (
        lambda: Cloud(X, torch.ones(5, dtype=torch.bool)),
        r"weights have dtype torch.bool, expected real masses; a choice of tokens is a mask",
    ),
    "negative density": (lambda: quadrature.circle(8, torch.cos), r"density must be finite and nonnegative"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_in_these_words(case: str) -> None:
    call, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_covariances_to_rounding_are_covariances() -> None:
    """Low rank, tiny, zero, and computed in float32: all pass."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, F64):
        y = torch.randn(5, 40, generator=generator, dtype=dtype)
        _, S = Cloud(y).moments()  # rank 4 of 40
        for scale in (1.0, 1e-30, 1e30):
            Gaussian(torch.zeros(40, dtype=dtype), S * scale)
    Gaussian(ZERO, 0 * EYE)
    Gaussian(ZERO.expand(2, 3), torch.stack([EYE, 0 * EYE]))


@pytest.mark.parametrize(
    ("scale", "weights_dtype"), [(3e38, torch.float32), (1e-44, torch.float32), (1e308, F64), (1e-300, F64)]
)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_masses_of_any_size(scale: float, weights_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Weights whose sum over- or underflows, in a precision above or below the tokens', are the same law."""
    x = X.to(dtype)
    small = torch.tensor([1.0, 0.5, 0.25, 1.0, 0.5], dtype=weights_dtype)
    weights = small * scale
    ratio = weights.double() / weights.double().max()  # what denormal numbers left of them
    cloud, plain = Cloud(x, weights), Cloud(x, ratio.to(dtype))
    tolerance = 8 * torch.finfo(dtype).eps
    assert torch.allclose(cloud.probabilities, plain.probabilities, rtol=tolerance, atol=0)
    assert torch.allclose(cloud.log_weights, plain.log_weights, rtol=tolerance, atol=tolerance)
    assert torch.allclose(cloud.to(F64).probabilities, plain.to(F64).probabilities, rtol=tolerance, atol=0)
    A = Attention.identity(3, 4.0, dtype=dtype)
    assert torch.allclose(A.drift(x, weights=weights), A.drift(x, weights=ratio.to(dtype)), atol=tolerance)
    mixture = Mixture([Cloud(x[:1]), Cloud(x[1:])], weights[:2])
    expected = Mixture([Cloud(x[:1]), Cloud(x[1:])], ratio[:2].to(dtype))
    assert torch.allclose(mixture.tilted_mean(x, 2.0), expected.tilted_mean(x, 2.0), atol=tolerance)


def test_a_mass_below_float32_still_counts_where_beta_finds_it() -> None:
    """log w = -230 in float32: e^{beta <g,x>} with beta = 1000 outweighs it."""
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    found = Cloud(x, torch.tensor([1.0, 1e-100], dtype=F64)).tilted_mean(-x[:1], 1000.0)
    assert torch.allclose(found, x[1:])


def test_a_density_of_any_size() -> None:
    plain = quadrature.circle(16, lambda theta: 2 + theta.cos())
    huge = quadrature.circle(16, lambda theta: (2 + theta.cos()) * 5e307)
    assert torch.allclose(plain.probabilities, huge.probabilities, rtol=1e-14, atol=0)


def test_gradients_of_weights_are_those_of_probabilities() -> None:
    w = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w: Cloud(X, w).probabilities, (w,))
    assert torch.autograd.gradcheck(lambda w: Cloud(X, w).log_weights, (w,))


def test_reprs_are_short_and_hold_no_numbers() -> None:
    things = [
        Cloud(X, torch.ones(5), torch.ones(5, dtype=torch.bool)),
        Gaussian(ZERO, EYE),
        EllipsoidSupport(ZERO, EYE, 1.0),
        UniformSphere(3),
        Mixture([UniformSphere(3)] * 30, torch.ones(30)),
        Ellipsoid(ZERO, EYE),
        Sphere(),
    ]
    for thing in things:
        assert len(repr(thing)) < 300
        assert "tensor(" not in repr(thing)
    assert repr(Gaussian(ZERO, EYE, math.inf)) == "Gaussian(mean=float64 (3,), cov=float64 (3, 3), cap=inf)"
