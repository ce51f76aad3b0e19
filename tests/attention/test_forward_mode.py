"""Derivatives taken forward: equal to those taken backward and to difference quotients, in memory linear in n."""

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from tolerances import rounding
from torch import Tensor
from torch.autograd import forward_ad

from attn_flow import Attention, Cloud, EllipsoidSupport, Gaussian, Mixture, Sphere, UniformSphere
from attn_flow.attention.projections import Kind
from attn_flow.averages import fourier
from attn_flow.base.memory import peak_memory
from attn_flow.measures.quadrature import circle

F64 = torch.float64
CASES = [
    (kind, causal, self_attention)
    for kind in get_args(Kind)
    for causal in (False, True)
    for self_attention in (True, False)
    if kind != "sinkhorn" or (self_attention and not causal)
]


def jvp(f: Callable[[Tensor], Tensor], x: Tensor, u: Tensor) -> Tensor:
    return torch.func.jvp(f, (x,), (u,))[1]


def dual(f: Callable[[Tensor], Tensor], x: Tensor, u: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, u))).tangent


def backward(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The Jacobian (n d, n d), row by row."""
    return torch.autograd.functional.jacobian(f, x).reshape(x.numel(), x.numel())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("kind", "causal", "self_attention"), CASES)
def test_forward_is_backward_and_a_difference_quotient(kind, causal, self_attention, weighted, generator):
    n, d = 7, 4
    x, u = (Sphere().uniform(n, d, generator=generator, dtype=F64) for _ in range(2))
    w = torch.rand(n, generator=generator, dtype=F64) if weighted else None
    mask = torch.arange(n) != 3 if weighted else None
    options = {"kind": kind, "causal": causal, "self_attention": self_attention}
    attention = Attention.random(d, heads=2, beta=2.0, generator=generator, dtype=F64, **options)

    def f(x: Tensor) -> Tensor:
        return attention.drift(x, weights=w, mask=mask)

    J = backward(f, x)
    along = (J @ u.flatten()).reshape(n, d)
    # Sinkhorn's iterations stop at 16 eps (1 + largest score), and (I - J)^{-1} of its gradient at 1e-10.
    atol = 1e-9 if kind == "sinkhorn" else rounding(J, 100 * n * d)
    torch.testing.assert_close(jvp(f, x, u), along, atol=atol, rtol=0)
    torch.testing.assert_close(dual(f, x, u), along, atol=atol, rtol=0)
    torch.testing.assert_close(torch.func.jacfwd(f)(x).reshape(J.shape), J, atol=atol, rtol=0)
    h = 1e-4
    coarse, fine = ((f(x + s * u) - f(x - s * u)) / (2 * s) for s in (h, h / 2))
    # Their errors are h^2 C and h^2 C/4, and what rounding the drifts does.
    assert (fine - along).abs().max() <= (coarse - fine).abs().max() + rounding(f(x), 1000) / h


MEASURES = {
    "cloud": lambda g: Cloud(torch.randn(6, 3, generator=g, dtype=F64), torch.rand(6, generator=g, dtype=F64)),
    "sphere": lambda g: UniformSphere(3),
    "gaussian": lambda g: Gaussian(torch.randn(3, generator=g, dtype=F64), torch.eye(3, dtype=F64)),
    "ellipsoid": lambda g: EllipsoidSupport(torch.zeros(3, dtype=F64), torch.eye(3, dtype=F64), 1.0),
    "mixture": lambda g: Mixture([UniformSphere(3), Cloud(torch.randn(4, 3, generator=g, dtype=F64))], torch.ones(2)),
}


@pytest.mark.parametrize("kind", ["softmax", "unnormalised"])
@pytest.mark.parametrize("name", MEASURES)
def test_against_a_measure(name, kind, generator):
    mu = MEASURES[name](generator)
    attention = Attention.random(3, beta=1.5, kind=kind, generator=generator, dtype=F64)
    x = torch.randn(5, 3, generator=generator, dtype=F64)
    J = backward(lambda x: attention.drift(x, mu), x)
    found = torch.func.jacfwd(lambda x: attention.drift(x, mu))(x).reshape(J.shape)
    torch.testing.assert_close(found, J, atol=rounding(J, 1000), rtol=0)


def test_where_the_drift_itself_would_be_a_fourier_series(generator):
    """Large clouds are averaged by other means, which have no tangents; forward mode goes around them."""
    n = 1500
    x, attention = circle(n).x, Attention.identity(2, 30.0, dtype=F64)
    assert fourier.fits(x, x, 30.0, 1e-12, F64)
    u = torch.randn(n, 2, generator=generator, dtype=F64)
    A = attention.matrix(x)[0]
    scores = 30.0 * (u @ x.T + x @ u.T)
    expected = A @ u + (A * (scores - (A * scores).sum(-1, keepdim=True))) @ x
    for found in (jvp(attention.drift, x, u), dual(attention.drift, x, u)):
        torch.testing.assert_close(found, expected, atol=rounding(scores, n), rtol=0)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"kind": "unnormalised"}, {"kind": "sigmoid"}, {"self_attention": False}]
)
def test_memory_is_linear_in_n(options, generator):
    attention = Attention.identity(4, 2.0, **options)

    def peak(n: int) -> int:
        x, u = (Sphere().uniform(n, 4, generator=generator) for _ in range(2))
        return peak_memory(lambda: jvp(attention.drift, x, u))

    small, large = peak(1000), peak(4000)
    assert large < 4 * small
    assert large < 4 * 4000**2  # one matrix of logits


def test_second_derivatives_forward_over_backward(generator):
    """The Hessian of a scalar of the drift is symmetric, and the derivative of its gradient."""
    attention = Attention.random(3, heads=2, beta=1.5, generator=generator, dtype=F64)
    x, u = (torch.randn(4, 3, generator=generator, dtype=F64) for _ in range(2))
    energy = lambda x: attention.drift(x).square().sum()
    H = torch.func.hessian(energy)(x).reshape(12, 12)
    torch.testing.assert_close(H, H.T, atol=rounding(H, 1000), rtol=0)
    gradient = torch.func.grad(energy)
    coarse, fine = ((gradient(x + s * u) - gradient(x - s * u)).flatten() / (2 * s) for s in (1e-4, 5e-5))
    assert (fine - H @ u.flatten()).abs().max() <= (coarse - fine).abs().max() + rounding(H, 1000) / 1e-4


def test_tangents_of_weights_beta_and_masses(generator):
    """Not of the tokens alone: d/ds of the drift as Q, V, beta and the masses move."""
    x = torch.randn(5, 3, generator=generator, dtype=F64)
    Q, V, w = (torch.rand(*s, generator=generator, dtype=F64) for s in ((3, 3), (3, 3), (5,)))

    def f(s: Tensor) -> Tensor:
        return Attention(s * Q, V=s * V, beta=s * torch.ones(1, dtype=F64)).drift(x, weights=w + s)

    s = torch.tensor(1.3, dtype=F64)
    expected = torch.autograd.functional.jacobian(f, s)
    torch.testing.assert_close(jvp(f, s, torch.ones_like(s)), expected, atol=rounding(expected, 1000), rtol=0)
