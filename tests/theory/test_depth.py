"""Normalisation, long context, hardmax and Gaussian tokens against literal simulations (THEORY.md 9 and 1)."""

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.linalg import sqrtm

from attn_flow.theory import gaussian, hardmax, long_context, normalisation

RNG = np.random.default_rng(0)


def simplex(n, rho):
    """n unit vectors with all cosines equal to rho."""
    return np.linalg.cholesky(np.full((n, n), rho) + (1 - rho) * np.eye(n))


def attention(theta, beta):
    s = np.exp(beta * theta @ theta.T)
    return s / s.sum(1, keepdims=True) @ theta


# --- normalisation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", normalisation.SCHEMES)
@pytest.mark.parametrize(("n", "rho0"), [(2, -0.3), (6, 0.1)])
def test_reduced_ode_is_the_architecture(scheme, n, rho0):
    t, beta, alpha, h = 2.0, 1.5, 0.7, 1e-3
    theta, r = simplex(n, rho0), np.ones((n, 1))
    for step in range(round(t / h)):
        A = attention(theta, beta)
        unit_A = A / np.linalg.norm(A, axis=1, keepdims=True)
        x = {
            "post": theta + h * A,
            "pre": r * theta + h * A,
            "peri": r * theta + h * unit_A,
            "ngpt": theta + h * alpha * unit_A,
            "ln_scaling": theta + h * A / np.sqrt(step * h + 1),
        }[scheme]
        norm = np.linalg.norm(x, axis=1, keepdims=True)
        theta, r = x / norm, norm if scheme in ("pre", "peri") else r
    gap, norm = normalisation.solve(scheme, [t], beta, n, rho0, alpha=alpha)
    assert gap[0] == pytest.approx(np.linalg.norm(theta[0] - theta[1]) ** 2 / 2, rel=5e-3)  # Euler at h = 1e-3
    assert norm[0] == pytest.approx(r.mean(), rel=2e-3)


@pytest.mark.parametrize(
    ("scheme", "clock", "power"),
    [
        ("post", lambda t: t, 2),
        ("pre", np.log, 2),
        ("peri", np.log, 2),
        ("ngpt", lambda t: 0.7 * t, 2),
        ("ln_scaling", np.sqrt, 4),
    ],
)
def test_asymptotic_decay(scheme, clock, power):
    t = np.array([0.0, 60.0, 80.0]) if scheme in ("post", "ngpt") else np.array([0.0, 2000.0, 4000.0])
    gap, _ = normalisation.solve(scheme, t, 1.0, 4, 0.1, alpha=0.7)
    assert -np.log(gap[2] / gap[1]) / (clock(t[2]) - clock(t[1])) == pytest.approx(power, rel=1e-2)


# --- long context ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [-0.1, 0.3, 0.8])
@pytest.mark.parametrize("beta", [0.0, 9.0])
def test_output_correlation_is_one_layer(rho, beta):
    A = attention(simplex(8, rho), beta)
    cosine = A[0] @ A[1] / np.linalg.norm(A[0]) / np.linalg.norm(A[1])
    assert long_context.output_correlation(rho, beta, 8) == pytest.approx(cosine, rel=1e-12)


@pytest.mark.parametrize("rho", [0.2, 0.8])
def test_limits_below_at_and_above_the_critical_scaling(rho):
    gamma = np.array([0.5, 1.0, 2.0]) / (1 - rho)
    limit = [1.0, 4 * rho / (1 + 3 * rho), rho]
    np.testing.assert_allclose(long_context.output_correlation(rho, gamma * np.log(1e12), 1e12), limit, atol=2e-6)
    with pytest.raises(ValueError, match="no n tokens have smaller cosines"):
        long_context.output_correlation(-0.9, 1.0, 8)


@pytest.mark.parametrize(("d", "b"), [(2, 0.05), (3, 1.0), (5, 0.3), (64, 20.0)])
def test_self_weight_against_the_series_of_the_laplace_transform(d, b):
    """F(s) = -sum (-s)^m / (m! m^{(d-1)/2}) = int (1 - exp(-s e^{-x})) x^{(d-3)/2} dx / Gamma((d-1)/2)."""
    from scipy.special import gamma

    sphere = 2 * np.pi ** (d / 2) / gamma(d / 2)
    nu = (2 * np.pi / b) ** ((d - 1) / 2) / sphere

    def F(s):
        if s < 10:
            m = np.arange(1, 60)
            return -((-s) ** m / (np.cumprod(m.astype(float)) * m ** ((d - 1) / 2))).sum()
        f = lambda y: 2 * y ** (d - 2) * -np.expm1(-s * np.exp(-(y**2)))
        return quad(f, 0, np.sqrt(np.log(s) + 45 + 2 * d), limit=200)[0] / gamma((d - 1) / 2)

    exact = quad(lambda s: np.exp(-s - nu * F(s)), 0, 40, epsabs=1e-12, limit=400)[0]
    assert long_context.self_weight(b, d) == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize(("d", "b"), [(2, 0.3), (4, 0.5)])
def test_poisson_limit_against_uniform_keys(d, b):
    """n uniform keys and a query among them at beta = b n^{2/(d-1)}: mean self-weight and participation."""
    n, rng = 20_000, np.random.default_rng(5)
    beta, own, squares = float(long_context.critical_beta(n, d, b)), [], []
    for _ in range(10):
        x = rng.standard_normal((n, d))
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        w = np.exp(beta * (x[:100] @ x.T - 1))
        w = w / w.sum(1, keepdims=True)
        own += w[np.arange(100), np.arange(100)].tolist()
        squares += (w**2).sum(1).tolist()
    for sample, theory in [(own, long_context.self_weight(b, d)), (squares, long_context.participation(b, d))]:
        error = np.std(sample) / np.sqrt(len(sample))
        assert abs(np.mean(sample) - theory) < 4 * error + 0.01  # finite n is O(n^{-2/(d-1)}) away


def test_critical_constant():
    for d in (2, 300):
        assert long_context.self_weight(long_context.critical_constant(d), d) == pytest.approx(0.5, abs=1e-10)


# --- hardmax ---------------------------------------------------------------------------------------------------------


def test_step_is_the_definition():
    x, G = RNG.standard_normal((9, 3)), np.diag([2.0, 1.0, 0.5])
    x[4] = x[7]  # a tie
    for matrix in (None, G):
        literal = []
        for token in x:
            scores = [(token if matrix is None else matrix @ token) @ y for y in x]
            best = [y for y, score in zip(x, scores) if score >= max(scores) - 1e-13]
            literal.append((token + 0.4 * np.mean(best, axis=0)) / 1.4)
        np.testing.assert_allclose(hardmax.step(x, 0.4, matrix), literal, rtol=1e-12)


def test_leaders_rest_and_followers_stay_in_their_cell():
    x, G, alpha = RNG.standard_normal((40, 2)), np.array([[1.5, 0.2], [0.2, 0.7]]), 0.3
    start, leaders, target = x, hardmax.leaders(x, G), hardmax.argmax_matrix(x, G)
    followers = [i for i in range(40) if i not in leaders and target[i].sum() == 1 and target[i].argmax() in leaders]
    assert followers
    for _ in range(30):
        x = hardmax.step(x, alpha, G)
        np.testing.assert_array_equal(hardmax.argmax_matrix(x, G)[followers], target[followers])
    np.testing.assert_allclose(x[leaders], start[leaders], rtol=1e-13)
    goal = start[target[followers].argmax(1)]
    distance = lambda y: np.linalg.norm(y[followers] - goal, axis=1)
    np.testing.assert_allclose(distance(x), distance(start) * (1 + alpha) ** -30, rtol=1e-6)


def test_leaders_on_and_off_the_sphere():
    """All tokens lead if G = c I on a sphere, few if G is not, and vertices of a hull in flat space may move."""
    angle = 2 * np.pi * (np.arange(40) + 0.25) / 40
    x, G = np.stack([np.cos(angle), np.sin(angle)], 1), np.diag([3.0, 1.0])
    assert len(hardmax.leaders(x, 2 * np.eye(2))) == 40
    scores = [[3 * a[0] * b[0] + a[1] * b[1] for b in x] for a in x]
    expected = [i for i, row in enumerate(scores) if row[i] == max(row)]
    assert hardmax.leaders(x, G).tolist() == expected
    assert 0 < len(expected) < 12
    triangle = np.array([[1.0, 0.0], [2.0, 1.9], [-1.0, 0.3]])
    assert 0 not in hardmax.leaders(triangle)
    assert 0 not in hardmax.leaders(1e-9 * triangle)
    assert hardmax.leaders([[-1.0], [0.0], [1.0]]).tolist() == [0, 1, 2]  # at rest through ties


def test_frank_wolfe_gap_and_its_rate():
    vertices, root, alpha = RNG.standard_normal((12, 3)), RNG.standard_normal((3, 3)), 0.2
    G = root @ root.T
    f = lambda y: 0.5 * (y @ G * y).sum(-1)
    x = RNG.dirichlet(np.ones(12), 50) @ vertices
    rise, best = f(vertices).max() - f(x), np.full(50, np.inf)
    for k in range(1, 60):
        gap = hardmax.frank_wolfe_gap(x, vertices, G)
        assert (gap >= -1e-12).all()
        best = np.minimum(best, gap)
        assert (best <= rise * (1 + alpha) / (alpha * k) + 1e-12).all()
        target = vertices[((x @ G) @ vertices.T).argmax(1)]
        before, x = f(x), (x + alpha * target) / (1 + alpha)
        assert (f(x) - before >= alpha / (1 + alpha) * gap - 1e-12).all()


# --- gaussian --------------------------------------------------------------------------------------------------------


def test_gaussian_solution_is_the_affine_flow_of_particles():
    """The mean and covariance of tokens moved by x' = V (m + beta S G x), in RK4 steps."""
    d, beta, h = 3, 0.2, 0.01
    V, G = RNG.standard_normal((2, d, d))
    x = RNG.standard_normal((50, d)) / 2 + 1.0

    def drift(y):
        m, S = y.mean(0), np.cov(y.T, bias=True)
        return (m + beta * y @ G.T @ S) @ V.T

    start = x
    for _ in range(20):
        k1 = drift(x)
        k2 = drift(x + h / 2 * k1)
        k3 = drift(x + h / 2 * k2)
        x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + drift(x + h * k3))
    _, m, S = gaussian.solve([0.2], start.mean(0), np.cov(start.T, bias=True), V, G, beta)
    np.testing.assert_allclose(m[0], x.mean(0), rtol=1e-7)
    np.testing.assert_allclose(S[0], np.cov(x.T, bias=True), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("v", [1.0, -0.8])
def test_closed_form_for_scalar_values(v):
    d, beta = 3, 0.7
    root, S0 = RNG.standard_normal((2, d, d))
    G, S0, m0 = root + root.T, S0 @ S0.T + 0.1 * np.eye(d), RNG.standard_normal(d)
    t = np.array([0.0, 0.3, 0.8]) * min(gaussian.blow_up_time(S0, v, G, beta), 5.0)
    reached, m, S = gaussian.solve(t, m0, S0, v * np.eye(d), G, beta)
    np.testing.assert_array_equal(reached, t)
    for k, time in enumerate(t):
        shrink = np.eye(d) - 2 * beta * v * time * S0 @ G
        np.testing.assert_allclose(m[k], np.exp(v * time) * np.linalg.inv(sqrtm(shrink)) @ m0, rtol=1e-7)
        np.testing.assert_allclose(S[k], np.linalg.inv(np.linalg.inv(S0) - beta * v * time * (G + G.T)), rtol=1e-7)


def test_blow_up_time():
    assert gaussian.blow_up_time([[0.5]], -2.0, [[3.0]], 0.25) == np.inf
    assert gaussian.blow_up_time([[0.5, 0.0], [0.0, 0.0]], 1.0, np.eye(2), 0.25) == pytest.approx(4.0)  # on a line
    G, S0 = np.array([[1.0, 4.0], [-2.0, 0.3]]), np.array([[0.7, 0.2], [0.2, 0.4]])
    end = gaussian.blow_up_time(S0, 1.0, G, 0.5)
    t, _, S = gaussian.solve(np.linspace(0, 2 * end, 2001), np.zeros(2), S0, np.eye(2), G, 0.5)
    assert end * (1 - 2e-3) < t[-1] < end * (1 + 1e-6)
    assert np.linalg.norm(S[-1]) > 100 * np.linalg.norm(S0)
    assert gaussian.blow_up_time(S0, 1.0, [[0.0, 1.0], [-1.0, 0.0]], 0.5) == np.inf  # antisymmetric: S rests


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: normalisation.solve("sandwich", [1.0], 1.0), "scheme = 'sandwich', expected one of 'post'"),
        (lambda: long_context.critical_beta(10, 1), "d = 1, expected integers of at least 2"),
        (lambda: hardmax.step(np.ones(3), 0.1), r"x has shape \(3,\), expected \(n, d\)"),
        (lambda: gaussian.solve([1.0], [0.0, 0], [[1, 2], [0, 1]], 1, 1, 1), "covariance is not symmetric"),
    ],
)
def test_arguments_outside_the_domain(call, message):
    with pytest.raises(ValueError, match=message):
        call()
