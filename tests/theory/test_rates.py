"""Synchronisation, metastability and the equiangular ODE against literal simulations (THEORY.md 2, 3, 4)."""

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import eval_gegenbauer, iv, roots_jacobi

from attn_flow.theory import equiangular, metastability, normalisation, synchronisation

RNG = np.random.default_rng(0)
SEQUENCE = np.arange(1, 5)


def attend(x, beta, kind, w=None):
    """P_x sum_j a_ij x_j for tokens x (n, d) with weights w (n,)."""
    n = len(x)
    w = np.full(n, 1 / n) if w is None else w
    a = w * np.exp(beta * (x @ x.T))
    if kind == "softmax":
        a = a / a.sum(1, keepdims=True)
    if kind == "sinkhorn":
        for _ in range(60):
            a = a / a.sum(1, keepdims=True)
            a = a / a.sum(0, keepdims=True) * w * n
        a = a / a.sum(1, keepdims=True)
    m = a @ x
    return m - (m * x).sum(1, keepdims=True) * x


def run(x, t, beta, kind, steps, sign=1.0, w=None):
    """RK4 on the sphere."""
    h = t / steps
    unit = lambda y: y / np.linalg.norm(y, axis=1, keepdims=True)
    v = lambda y: sign * attend(y, beta, kind, w)
    for _ in range(steps):
        k1 = v(x)
        k2 = v(unit(x + h / 2 * k1))
        k3 = v(unit(x + h / 2 * k2))
        k4 = v(unit(x + h * k3))
        x = unit(x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4))
    return x


def on_circle(theta):
    return np.stack([np.cos(theta), np.sin(theta)], 1)


def fourier_coefficient(x, k):
    return np.exp(-1j * k * np.arctan2(x[:, 1], x[:, 0])).mean()


# --- synchronisation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "beta", "rate"),
    [
        ("softmax", 2.0, 1.0),
        ("sinkhorn", 2.0, 1.0),
        ("unnormalised", 0.5, 1.6487),
        ("unnormalised", 1.0, 2.7181),
        ("unnormalised", 2.0, 7.3883),
    ],
)
def test_consensus_rate(kind, beta, rate):
    x = np.eye(4)[0] + 1e-2 * RNG.standard_normal((12, 4))
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    c = synchronisation.consensus_rate(beta, kind)
    a, b = run(x, 2 / c, beta, kind, 60), run(x, 3 / c, beta, kind, 90)
    spread = lambda y: np.linalg.norm(y - y.mean(0))
    assert np.log(spread(a) / spread(b)) == pytest.approx(1.0, rel=1e-4)
    assert c == pytest.approx(rate, rel=2e-4)  # the measured numbers of THEORY.md


@pytest.mark.parametrize(("beta", "measured"), [(0.0, 0.4998), (0.25, 0.3892)])
def test_wasserstein_rate_from_a_density_on_the_circle(beta, measured):
    """W2 to the point 0 from (1 + 0.6 cos theta)/2pi: tokens on [0, pi], refined at the antipode, and mirrored."""
    edges = np.concatenate([np.linspace(0, np.pi - 0.1, 80), np.pi - np.geomspace(0.1, 1e-8, 120)[1:], [np.pi]])
    w, theta = np.diff((edges + 0.6 * np.sin(edges)) / np.pi), (edges[1:] + edges[:-1]) / 2

    def velocity(a):
        differences = (sign * a[None, :] - a[:, None] for sign in (1, -1))
        return sum((w / 2 * np.exp(beta * np.cos(b)) * np.sin(b)).sum(1) for b in differences)

    w2, h = {}, 0.1
    for step in range(1, 141):
        k1 = velocity(theta)
        k2 = velocity(theta + h / 2 * k1)
        theta = theta + h / 6 * (k1 + 4 * k2 + velocity(theta + h * (2 * k2 - k1)))
        w2[step] = np.sqrt((w * theta**2).sum())
    assert np.log(w2[100] / w2[140]) / 4 == pytest.approx(measured, abs=3e-4)
    assert synchronisation.wasserstein_rate(beta, 2, "unnormalised") == pytest.approx(measured, abs=3e-4)


def test_wasserstein_rate_has_two_regimes():
    assert synchronisation.wasserstein_rate(0.0, [2, 3, 4]).tolist() == [0.5, 1.0, 1.0]
    rates = synchronisation.wasserstein_rate(1.0, [2, 20], "unnormalised")
    np.testing.assert_allclose(rates, [np.exp(-1) / 2, np.exp(1.0)])


@pytest.mark.parametrize("kind", ["softmax", "unnormalised"])
def test_two_atoms_are_stationary_and_their_rates_are_the_jacobian(kind):
    for p, beta in [(2 / 3, 0.2), (0.9, 0.5), (0.5, 0.3)]:
        x = np.array([[1, 0], [-1, 0], [np.cos(1e-6), np.sin(1e-6)], [-np.cos(1e-6), np.sin(1e-6)]])
        v = attend(x, beta, kind, np.array([p, 1 - p, 0, 0]))
        np.testing.assert_allclose(v[:2], 0, atol=1e-16)
        np.testing.assert_allclose(v[2:, 1] / 1e-6, synchronisation.two_atom_rates(p, beta, kind), rtol=1e-8)
    # For p = 2/3 the small atom is unstable below beta = log(2)/2.
    _, rate = synchronisation.two_atom_rates(2 / 3, [0.9 * np.log(2) / 2, 1.1 * np.log(2) / 2], kind)
    assert rate[0] > 0 > rate[1]


# --- metastability ---------------------------------------------------------------------------------------------------


def test_growth_rates_and_switch_points_of_the_paper():
    unnormalised = metastability.growth_rate(SEQUENCE, 5.0, kind="unnormalised")
    np.testing.assert_allclose(unnormalised, [4.8671, 14.0045, 18.5961, 16.3464], atol=5.1e-5)
    np.testing.assert_allclose(unnormalised, SEQUENCE**2 * iv(SEQUENCE, 5.0) / 5.0)
    np.testing.assert_allclose(metastability.growth_rate(SEQUENCE, 5.0), [0.1787, 0.5141, 0.6827, 0.6001], atol=5.1e-5)
    assert metastability.k_max(5.0) == 3
    assert metastability.k_max(5.0, kind="sinkhorn") == 4
    assert metastability.k_max([5.0, 7.0], kind="unnormalised").tolist() == [3, 4]  # the paper's two runs
    points = [metastability.switch_point(k) for k in range(1, 6)]
    np.testing.assert_allclose(points, [1.0445, 3.1654, 6.2113, 10.2285, 15.2363], atol=5.1e-5)


@pytest.mark.parametrize("kind", synchronisation.KINDS)
@pytest.mark.parametrize("d", [2, 3, 64])
def test_k_max_is_the_largest_rate_and_steps_at_the_switch_points(kind, d):
    beta = np.geomspace(0.1, 300, 25)
    rates = metastability.growth_rate(np.arange(1, 120)[:, None], beta, d, kind)
    np.testing.assert_array_equal(metastability.k_max(beta, d, kind), 1 + np.argmax(rates, axis=0))
    for k in (1, 7):
        switch = metastability.switch_point(k, d, kind)
        assert metastability.k_max(np.array([1 - 1e-9, 1 + 1e-9]) * switch, d, kind).tolist() == [k, k + 1]


@pytest.mark.parametrize("d", [2, 3, 1024])
def test_large_beta(d):
    beta = 1e5
    k = metastability.k_max(beta, d)
    assert k * (k + d - 2) == pytest.approx(2 * beta, rel=1e-2)
    assert metastability.growth_rate(k, beta, d) == pytest.approx(2 / np.e, rel=1e-2)
    assert metastability.growth_rate(3, beta, d) == pytest.approx(3 * (d + 1) / beta, rel=3e-2)  # heat equation


@pytest.mark.parametrize("kind", synchronisation.KINDS)
def test_growth_on_the_circle_against_a_noisy_lattice(kind):
    n, beta = 120, 5.0
    x = on_circle(2 * np.pi * np.arange(n) / n + 1e-5 * RNG.standard_normal(n))
    fastest = metastability.growth_rate(metastability.k_max(beta, kind=kind), beta, kind=kind)
    later = run(x, 1 / fastest, beta, kind, 25)
    for k in range(1, 7):
        gain = fourier_coefficient(later, k) / fourier_coefficient(x, k)
        expected = np.exp(metastability.growth_rate(k, beta, kind=kind) / fastest)
        assert abs(gain - expected) < 1e-3 * expected  # complex: the position of the clusters is kept too


@pytest.mark.parametrize("kind", synchronisation.KINDS)
@pytest.mark.parametrize("d", [3, 9])
def test_growth_in_higher_dimension_against_quadrature(kind, d):
    """A zonal harmonic of size eps on S^{d-1}: d/dt int Z_k dmu / int Z_k dmu, by quadrature of the literal flow."""
    beta, k, eps = 4.0, 3, 1e-5
    # <x, e> has density (1-t^2)^{(d-3)/2}; given it, the component of y along the tangent of x has (1-s^2)^{(d-4)/2}.
    t, wt = roots_jacobi(60, (d - 3) / 2, (d - 3) / 2)
    s, ws = roots_jacobi(60, (d - 4) / 2, (d - 4) / 2)
    wt, ws = wt / wt.sum(), ws / ws.sum()
    harmonic = lambda u: eval_gegenbauer(k, (d - 2) / 2, u)
    slope = (harmonic(t + 1e-6) - harmonic(t - 1e-6)) / 2e-6
    mass = wt * (1 + eps * harmonic(t) / np.abs(harmonic(t)).max())
    side = np.sqrt(1 - t**2)
    inner = t[:, None, None] * t[None, :, None] + side[:, None, None] * side[None, :, None] * s  # <x, y>
    kernel = np.exp(beta * inner) * mass[None, :, None] * ws
    if kind == "sinkhorn":
        phi = np.ones_like(t)
        for _ in range(400):
            phi = np.sqrt(phi / (kernel * phi[None, :, None]).sum((1, 2)))
        kernel = kernel * phi[:, None, None] * phi[None, :, None]
    if kind == "softmax":
        kernel = kernel / kernel.sum((1, 2), keepdims=True)
    speed = (kernel * (t[None, :, None] - inner * t[:, None, None])).sum((1, 2))  # along e - <x, e> x
    rate = (mass * slope * speed).sum() / (mass * harmonic(t)).sum()
    assert rate == pytest.approx(metastability.growth_rate(k, beta, d, kind), rel=1e-4)


def test_repulsion_is_a_forward_heat_equation():
    n, beta, k = 240, 60.0, 2
    theta = 2 * np.pi * np.arange(n) / n
    x = on_circle(theta + 1e-3 * np.sin(k * theta))
    later = run(x, 10.0, beta, "softmax", 40, sign=-1.0)
    rate = np.log(abs(fourier_coefficient(x, k) / fourier_coefficient(later, k))) / 10
    assert rate == pytest.approx(metastability.growth_rate(k, beta), rel=1e-3)
    assert rate == pytest.approx(k**2 / beta, rel=0.1)


@pytest.mark.parametrize(("beta", "phi", "phi_end", "mass"), [(4.0, np.pi / 2, 0.1, 0.5), (3.0, 1.3, 0.5, 0.8)])
def test_merge_time_against_two_weighted_tokens(beta, phi, phi_end, mass):
    x, h, t, w = on_circle(np.array([0.0, phi])), 0.01, 0.0, np.array([mass, 1 - mass])
    angle = lambda y: 2 * np.arctan2(np.linalg.norm(y[0] - y[1]), np.linalg.norm(y[0] + y[1]))
    while angle(x) > phi_end:
        before, x, t = x, run(x, h, beta, "softmax", 1, w=w), t + h
    t = t - h * (phi_end - angle(x)) / (angle(before) - angle(x))
    assert metastability.merge_time(beta, phi, phi_end, mass) == pytest.approx(t, rel=1e-4)


def test_merge_time_of_equal_clusters():
    phi = np.array([0.7, np.pi / 2])
    times = equiangular.time_between(1 - np.cos(phi), 1 - np.cos(0.1), 4.0, 2)
    np.testing.assert_allclose(metastability.merge_time(4.0, phi), times, rtol=1e-9)
    with np.errstate(over="raise"):
        assert np.isinf(metastability.merge_time(1000.0, np.pi / 2))


# --- equiangular -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [-0.1, 0.0, 0.9])
def test_equiangular_velocity_is_the_flow(rho):
    x = np.linalg.cholesky(np.full((6, 6), rho) + (1 - rho) * np.eye(6))
    v = attend(x, 2.5, "softmax")
    assert equiangular.velocity(rho, 2.5, 6) == pytest.approx(v[0] @ x[1] + x[0] @ v[1], rel=1e-12)


@pytest.mark.parametrize("beta", [0.0, 1e-9, 5.0, 60.0])
@pytest.mark.parametrize(("gap", "gap_end"), [(1.1, 0.8), (1.0, 1e-3), (0.3, 1e-9)])
def test_time_between_is_its_quadrature(beta, gap, gap_end):
    slowness = lambda y: np.exp(-y) / float(equiangular.velocity(1 - np.exp(-y), beta, 7))
    exact = quad(slowness, -np.log(gap), -np.log(gap_end), epsrel=1e-12, limit=400)[0]
    assert equiangular.time_between(gap, gap_end, beta, 7) == pytest.approx(exact, rel=1e-6)


def test_times_at_large_beta():
    # Near rho = 1 the time is a logarithm at any beta; from rho = 0 it exceeds float64.
    assert equiangular.time_between(1e-6, 1e-7, 1e4, 32) == pytest.approx(np.log(10) / 2, rel=1e-2)
    assert np.isinf(equiangular.time_between(1.0, 0.001, 1e4, 32))


def test_solution_inverts_the_time():
    t = np.array([0.0, 0.5, 2.0])
    gap, _ = normalisation.solve("post", t, 1.5, 10, rho0=0.05)
    np.testing.assert_allclose(equiangular.time_between(0.95, gap, 1.5, 10), t, atol=1e-8)


def test_high_dimensional_tokens_follow_the_equiangular_ode():
    n, d, beta = 16, 1024, 2.0
    x = RNG.standard_normal((n, d))
    x = run(x / np.linalg.norm(x, axis=1, keepdims=True), 2.0, beta, "softmax", 40)
    cosines = (x @ x.T)[~np.eye(n, dtype=bool)]
    rho = 1 - normalisation.solve("post", [2.0], beta, n)[0][0]
    assert np.abs(cosines - rho).max() < 2 * np.sqrt(np.log(d) / d)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: equiangular.velocity(1.5, 1.0, 4), r"rho = 1.5, expected finite numbers in \[-1, 1\]"),
        (lambda: equiangular.velocity(0.5, 1.0, 2.5), "n = 2.5, expected integers of at least 2"),
        (lambda: synchronisation.consensus_rate(1.0, "relu"), "kind = 'relu', expected one of"),
        (lambda: equiangular.time_between([0.5, 1.4], 0.2, 1.0, 4), "rho only increases"),
        (lambda: equiangular.time_between(0.1, [0.05, 0.2], 1.0, 4), "rho only increases"),
        (lambda: metastability.growth_rate(1, np.nan), "beta = nan, expected finite numbers"),
        (lambda: metastability.merge_time(1.0, [1.0, 4.0]), "phi = 4, expected"),
        (lambda: metastability.merge_time(1.0, 0.5, 0.6), "the clusters only approach"),
        (lambda: equiangular.velocity(-0.9, 1.0, 4), "no n tokens have smaller cosines"),
    ],
)
def test_arguments_outside_the_domain(call, message):
    with pytest.raises(ValueError, match=message):
        call()
