"""Jacobians of the flow against closed forms and difference quotients; Lyapunov exponents that are known."""

import math

import numpy as np
import pytest
import torch
from tolerances import rounding
from torch import Tensor

from attn_flow import (
    Adaptive,
    Attention,
    Cloud,
    Drift,
    Ellipsoid,
    Euclidean,
    Layers,
    Sphere,
    UniformSphere,
    flow,
    linearise,
    lyapunov,
    rk4,
)
from attn_flow.dynamics.stability import tangent_basis
from attn_flow.geometry import Geometry
from attn_flow.measures.quadrature import circle
from attn_flow.theory import metastability, spectral_selection

F64 = torch.float64


def identity(d: int, beta: float | Tensor, **options) -> Attention:
    return Attention.identity(d, beta, dtype=F64, **options)


def tokens(n: int | tuple[int, ...], d: int, seed: int = 0) -> Tensor:
    return Sphere().uniform(n, d, generator=torch.Generator().manual_seed(seed), dtype=F64)


# --- eigenvalues ----------------------------------------------------------------------------------------------------

RATES = {  # at which distances decay near consensus, THEORY 2: the weight phi(beta) of a pair that agrees
    "softmax": lambda beta: 1.0,
    "sinkhorn": lambda beta: 1.0,
    "unnormalised": math.exp,
    "linear": lambda beta: beta,
    "relu": lambda beta: beta,
    "sigmoid": lambda beta: 1 / (1 + math.exp(-beta)),
}


@pytest.mark.parametrize("kind", RATES)
def test_consensus_contracts_at_the_rate_of_its_kind(kind) -> None:
    """(n - 1)(d - 1) times -phi(beta), and d - 1 zeros: consensus may stand anywhere."""
    n, d, beta = 5, 3, 1.7
    found = linearise(identity(d, beta, kind=kind), tokens(1, d).repeat(n, 1))
    expected = torch.tensor([0.0] * (d - 1) + [-RATES[kind](beta)] * ((n - 1) * (d - 1)), dtype=F64)
    # n tokens at one place share an eigenvalue: its rounding is that of a multiple one of a normal matrix.
    atol = 1e-9 if kind == "sinkhorn" else rounding(expected, 1000)
    torch.testing.assert_close(found.eigenvalues.real, expected, atol=atol, rtol=0)
    assert float(found.speed) <= rounding(expected, 10)
    assert found.jacobian.shape == (n * (d - 1), n * (d - 1))


def test_weights_are_masses_and_padding_is_left_out() -> None:
    """2/3 of the mass at e and 1/3 at -e is stationary; a token of weight 2 moves as two tokens do together."""
    e = torch.tensor([[1.0, 0.0, 0.0]], dtype=F64)
    A = identity(3, 0.8)
    heavy = linearise(A, Cloud(torch.cat([e, -e]), torch.tensor([2.0, 1.0], dtype=F64)))
    three = linearise(A, torch.cat([e, e, -e]))
    padded = Cloud(torch.cat([e, -e, e]), torch.tensor([2.0, 1.0, 5.0], dtype=F64), torch.tensor([True, True, False]))
    torch.testing.assert_close(linearise(A, padded).eigenvalues, heavy.eigenvalues)
    distance = (three.eigenvalues.real[:, None] - heavy.eigenvalues.real).abs()
    assert float(distance.amin(0).max()) < 1e-12


@pytest.mark.parametrize(("n_plus", "n_minus"), [(1, 1), (3, 1), (2, 4)])
def test_spectral_selection(n_plus, n_minus) -> None:
    """THEORY 5: G = V symmetric, at the homogeneous state and at a split by signs."""
    lam, p, beta = np.array([1.5, -0.4, -1.0, -4.0]), 2, 1.0
    V = torch.diag(torch.tensor(lam))
    sign = torch.cat([torch.ones(n_plus), -torch.ones(n_minus)]).double()
    A, e = Attention.from_matrices(V, V, beta), torch.eye(4, dtype=F64)[p]
    split = linearise(A, sign[:, None] * e).eigenvalues.real.flip(0)
    formula = spectral_selection.sign_split_eigenvalues(lam, p, n_plus, n_minus, beta)
    np.testing.assert_allclose(split, formula, atol=1e-8)  # a double eigenvalue moves like the root of rounding
    same = linearise(A, e.repeat(n_plus + 1, 1)).eigenvalues.real.flip(0)
    np.testing.assert_allclose(same, spectral_selection.homogeneous_eigenvalues(lam, p, n_plus + 1), atol=1e-8)


@pytest.mark.parametrize("kind", ["softmax", "unnormalised"])
def test_growth_rates_of_the_uniform_law(kind) -> None:
    """THEORY 3 read off n points on the circle: gamma_k = k^2 I_k/(beta I_0), twice each, and the mode it selects."""
    n, beta = 64, 5.0
    found = linearise(identity(2, beta, kind=kind), circle(n).x, vectors=True)
    k = np.arange(1, n // 2)
    rates = metastability.growth_rate(k, beta, kind=kind)
    expected = np.sort(np.concatenate([[0.0], rates, rates, metastability.growth_rate([n // 2], beta, kind=kind)]))
    # Aliases of the modes are I_{n/2}(5) ~ 1e-24; J is symmetric, so rounding is that of its sums.
    np.testing.assert_allclose(np.sort(found.eigenvalues.real), expected, atol=rounding(found.jacobian, 10 * n))
    if kind == "softmax":
        np.testing.assert_allclose(np.sort(rates)[-1], 0.6827, atol=5e-5)
    assert found.vectors is not None
    along = (found.vectors[0] * torch.stack([-circle(n).x[:, 1], circle(n).x[:, 0]], -1)).sum(-1)
    modes = torch.fft.fft(along).abs()
    assert int(modes[: n // 2].argmax()) == int(metastability.k_max(beta, kind=kind)) == 3


GEOMETRIES: dict[str, Geometry] = {
    "sphere": Sphere(1.5),
    "flat": Euclidean(),
    "ellipsoid": Ellipsoid(torch.ones(3, dtype=F64), torch.tensor([1.0, 2.0, 0.5], dtype=F64)),
    "layer norm": Ellipsoid.from_layer_norm(torch.tensor([1.0, 1.5, 0.7], dtype=F64)),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_jacobian_is_a_difference_quotient_along_the_geometry(name, generator) -> None:
    """B^T (v(retract(x + h u)) - v(retract(x - h u))) / 2h, for a field with everything in it, and its eigenvectors."""
    geometry = GEOMETRIES[name]
    x = geometry.uniform(4, 3, generator=generator, dtype=F64)
    field = Attention.random(3, 2, generator=generator, dtype=F64, causal=True) + Drift(lambda t, x: t * x.sin())
    found = linearise(field, x, t=0.7, geometry=geometry, vectors=True)
    B = found.basis
    dim = B.shape[-1]
    assert dim == {"sphere": 2, "flat": 3, "ellipsoid": 2, "layer norm": 1}[name]

    def velocity(x: Tensor) -> Tensor:
        h = 1e-6  # of the flow itself: what its first Euler step is
        return (flow(field, x, [0.7, 0.7 + h], step="euler", geometry=Euclidean()).x[-1] - x) / h

    exact = lambda y: geometry.tangent(y, field.fields[0].drift(y) + 0.7 * y.sin())
    torch.testing.assert_close(geometry.tangent(x, velocity(x)), exact(x), atol=1e-8, rtol=0)

    def quotient(h: float) -> Tensor:
        columns = []
        for i in range(4):
            for a in range(dim):
                u = torch.zeros_like(x)
                u[i] = B[i, :, a]
                dv = (exact(geometry.retract(x + h * u)) - exact(geometry.retract(x - h * u))) / (2 * h)
                columns.append(torch.einsum("ida,id->ia", B, dv).flatten())
        return torch.stack(columns, -1)

    coarse, fine = quotient(1e-4), quotient(5e-5)
    assert (found.jacobian - fine).abs().max() <= (coarse - fine).abs().max() + rounding(fine, 1000) / 1e-4
    assert found.vectors is not None
    flat = torch.einsum("ida,mid->mia", B.to(found.vectors.dtype), found.vectors).flatten(1)
    image = flat @ found.jacobian.to(flat.dtype).T
    torch.testing.assert_close(image, found.eigenvalues[:, None] * flat, atol=rounding(found.jacobian, 1000), rtol=0)


def test_a_batch_of_betas_and_a_context() -> None:
    betas, x = torch.tensor([[0.5], [2.0]], dtype=F64), tokens(4, 3)
    found = linearise(identity(3, betas), x)
    for i, beta in enumerate((0.5, 2.0)):
        torch.testing.assert_close(found.jacobian[i], linearise(identity(3, beta), x).jacobian)
    alone = linearise(identity(3, 2.0), x, context=UniformSphere(3)).jacobian
    off = alone.unflatten(0, (4, 2)).unflatten(-1, (4, 2))[0, :, 1]
    assert torch.equal(off, torch.zeros_like(off))  # tokens do not interact
    early, late = (linearise(Layers([identity(3, 0.5), identity(3, 2.0)], [0, 1, 2]), x, t=t) for t in (0.5, 1.0))
    torch.testing.assert_close(torch.stack([early.jacobian, late.jacobian]), found.jacobian)


# --- exponents ------------------------------------------------------------------------------------------------------


def test_exponents_of_a_linear_flow_are_the_real_parts_of_its_spectrum(generator) -> None:
    """Non-normal with real eigenvalues: an Euler step multiplies an axis by 1 + h lambda; its log over h."""
    S = torch.randn(4, 4, generator=generator, dtype=F64) + 2 * torch.eye(4, dtype=F64)
    rates = torch.tensor([1.0, 0.2, -0.7, -2.0], dtype=F64)
    A = S @ torch.diag(rates) @ torch.linalg.inv(S)
    h = 0.1
    x0 = torch.randn(1, 4, generator=generator, dtype=F64)
    options = {"step": "euler", "h": h, "geometry": Euclidean(), "generator": generator}
    found = lyapunov(Drift(lambda t, x: x @ A.T), x0, 60.0, 4, **options)
    # Axes settle like e^{-gap t}: by t = 30, with the smallest gap .8, below 1e-10.
    torch.testing.assert_close(found.exponents, (1 + h * rates).log() / h, atol=1e-9, rtol=0)
    assert bool(((found.exponents - rates).abs() <= h * rates**2).all())
    assert float(found.error.max()) < 1e-9
    assert found.growth.shape == (len(found.t), 4)


def test_exponents_of_a_rotation_with_growth(generator) -> None:
    """Complex pairs .3 +- 2i: both exponents .3, the error told; their sum is the trace at any time (Liouville)."""
    A = torch.tensor([[0.3, -4.0], [1.0, 0.3]], dtype=F64)
    h = 0.05
    found = lyapunov(Drift(lambda t, x: x @ A.T), torch.ones(1, 2, dtype=F64), 10.0, 2, geometry=Euclidean(), h=h)
    # The circle becomes an ellipse of axes 2 and 1: log 2 of growth comes and goes, over the 5 that count.
    assert float((found.exponents - 0.3).abs().max()) <= math.log(2) / 5
    z = complex(0.3, 2.0) * h
    per_step = math.log(abs(1 + z + z**2 / 2 + z**3 / 6 + z**4 / 24))  # rk4's own growth of a mode
    torch.testing.assert_close(found.growth.sum(-1), 2 * per_step / h * found.t, atol=1e-10, rtol=0)
    assert per_step / h == pytest.approx(0.3, abs=1e-4)


def test_exponents_at_an_equilibrium_are_those_of_its_linearisation() -> None:
    A, x = identity(3, 1.5), tokens(1, 3).repeat(3, 1)
    h = 0.1
    found = lyapunov(A, x, 24.0, 6, step="euler", h=h, generator=torch.Generator().manual_seed(0))
    expected = (1 + h * linearise(A, x).eigenvalues.real).log() / h
    torch.testing.assert_close(found.exponents, expected, atol=1e-6, rtol=0)  # e^{-12} / 12 of the first axes is left
    torch.testing.assert_close(found.x, x, atol=1e-14, rtol=0)


def test_exponents_with_padding_and_any_step() -> None:
    x0, mask = tokens(4, 3), torch.tensor([True, True, True, False])
    A = identity(3, 1.0)
    options = {"t": 1.0, "k": 6, "transient": 0.0}
    alone = lyapunov(A, x0[:3], **options, generator=torch.Generator().manual_seed(1))
    padded = lyapunov(A, x0, **options, mask=mask, generator=torch.Generator().manual_seed(1))
    # The sum over all six axes is the volume's, whatever the first displacements.
    torch.testing.assert_close(padded.exponents.sum(), alone.exponents.sum(), atol=1e-10, rtol=0)
    adaptive = lyapunov(A, x0[:3], **options, step=Adaptive(tol=1e-10), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(adaptive.exponents.sum(), alone.exponents.sum(), atol=1e-6, rtol=0)


def test_a_displacement_is_the_difference_of_two_paths() -> None:
    """The largest growth of one displacement, against a second cloud that starts 1e-7 beside it."""
    A, x0 = identity(3, 4.0), tokens(6, 3)
    found = lyapunov(A, x0, 2.0, 12, transient=0.0, every=2.0, h=0.1, step=rk4)
    total = found.growth[-1].sum()
    B0, B1 = (tangent_basis(Sphere(), x) for x in (x0, found.x))
    columns = []
    for i in range(6):
        for a in range(2):
            u = torch.zeros_like(x0)
            u[i] = B0[i, :, a]
            ends = [flow(A, x0 + s * 1e-6 * u, [0, 1.0, 2.0], h=0.1).x[-1] for s in (1, -1)]
            columns.append(torch.einsum("ida,id->ia", B1, (ends[0] - ends[1]) / 2e-6).flatten())
    expected = torch.linalg.slogdet(torch.stack(columns, -1))[1]
    assert float(total) == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lyapunov(identity(3, 1.0), tokens(2, 3), 1.0, 5), "k = 5, expected a whole number, 1 to 4: the"),
        (lambda: lyapunov(identity(3, 1.0), tokens(2, 3), 0.0), r"t = 0.0, expected a positive, finite time"),
        (lambda: lyapunov(identity(3, 1.0), tokens(2, 3), 1.0, transient=1.0), "expected 0 <= transient < t"),
        (lambda: linearise(identity(3, 1.0), tokens(2, 2)), r"x has shape \(2, 2\), expected \(..., n, 3\)"),
        (
            lambda: linearise(identity(3, 1.0), Cloud(tokens((2, 4), 3), mask=torch.ones(2, 4, dtype=torch.bool))),
            r"expected one cloud \(n, d\) with a mask",
        ),
    ],
)
def test_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()
