"""Normalisation, long context, hardmax and Gaussian closed forms against literal simulations (THEORY 9 and 1)."""

import numpy as np
import pytest
from scipy.integrate import quad

from attn_flow.theory import gaussian, hardmax, long_context, normalisation

RNG = np.random.default_rng(0)


# --- normalisation ---------------------------------------------------------------------------------------------------


def simplex(n, rho):
    return np.linalg.cholesky(np.full((n, n), rho) + (1 - rho) * np.eye(n))


def literal_layers(scheme, t, beta, n, rho0, alpha, h=1e-3):
    """Tokens x_i in R^n updated as the architectures do, direction by direction; returns 1 - rho and the mean norm."""
    theta, r = simplex(n, rho0), np.ones(n)
    for step in range(round(t / h)):
        s = np.exp(beta * theta @ theta.T)
        A = s / s.sum(1, keepdims=True) @ theta
        size = np.linalg.norm(A, axis=1)
        if scheme == "post":
            x = theta + h * A
        elif scheme == "pre":
            x = r[:, None] * theta + h * A
        elif scheme == "peri":
            x = r[:, None] * theta + h * A / size[:, None]
        elif scheme == "ngpt":
            x = theta + h * alpha * A / size[:, None]
        else:
            x = theta + h * A / np.sqrt(step * h + 1)
        norm = np.linalg.norm(x, axis=1)
        theta = x / norm[:, None]
        if scheme in ("pre", "peri"):
            r = norm
    return np.linalg.norm(theta[0] - theta[1]) ** 2 / 2, r.mean()


@pytest.mark.parametrize("scheme", normalisation.SCHEMES)
@pytest.mark.parametrize(("n", "rho0"), [(2, -0.3), (6, 0.1)])
def test_reduced_ode_is_the_architecture(scheme, n, rho0):
    t, beta, alpha = 2.0, 1.5, 0.7
    gap, r = normalisation.solve(scheme, [t], beta, n, rho0, alpha=alpha)
    literal_gap, literal_r = literal_layers(scheme, t, beta, n, rho0, alpha)
    assert gap[0] == pytest.approx(literal_gap, rel=5e-3)  # Euler at h = 1e-3
    assert r[0] == pytest.approx(literal_r, rel=2e-3)


def test_peri_divides_by_the_size_of_attention():
    _, along, size = normalisation.attention_moments(0.8, 2.0, 5)
    theta = simplex(5, 0.2)
    s = np.exp(2.0 * theta @ theta.T)
    A = s / s.sum(1, keepdims=True) @ theta
    assert (along, size) == (pytest.approx(A[0] @ theta[0]), pytest.approx(np.linalg.norm(A[0])))


@pytest.mark.parametrize(
    ("scheme", "exponent"),
    [
        ("post", lambda t, gap: -np.log(gap[-1] / gap[-2]) / (t[-1] - t[-2]) / 2),  # e^{-2t}
        ("pre", lambda t, gap: -np.log(gap[-1] / gap[-2]) / np.log(t[-1] / t[-2]) / 2),  # t^{-2}
        ("peri", lambda t, gap: -np.log(gap[-1] / gap[-2]) / np.log(t[-1] / t[-2]) / 2),
        ("ngpt", lambda t, gap: -np.log(gap[-1] / gap[-2]) / (t[-1] - t[-2]) / (2 * 0.7)),  # e^{-2 alpha t}
        ("ln_scaling", lambda t, gap: -np.log(gap[-1] / gap[-2]) / (t[-1] ** 0.5 - t[-2] ** 0.5) / 4),  # e^{-4 sqrt t}
    ],
)
def test_asymptotic_laws(scheme, exponent):
    t = np.array([0.0, 60.0, 80.0]) if scheme in ("post", "ngpt") else np.array([0.0, 2000.0, 4000.0])
    gap, _ = normalisation.solve(scheme, t, 1.0, 4, 0.1, alpha=0.7)
    assert exponent(t, gap) == pytest.approx(1.0, rel=1e-2)
    ratio = gap / normalisation.law(scheme, t, alpha=0.7)
    assert ratio[2] == pytest.approx(ratio[1], rel=1e-2)


# --- long context ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [-0.1, 0.3, 0.8])
@pytest.mark.parametrize("beta", [0.0, 2.0, 9.0])
def test_output_correlation_is_one_layer(rho, beta):
    x = simplex(8, rho)
    s = np.exp(beta * x @ x.T)
    A = s / s.sum(1, keepdims=True) @ x
    cosine = A[0] @ A[1] / np.linalg.norm(A[0]) / np.linalg.norm(A[1])
    assert long_context.output_correlation(rho, beta, 8) == pytest.approx(cosine, rel=1e-12)


@pytest.mark.parametrize("rho", [0.2, 0.5, 0.8])
def test_limits_below_at_and_above_critical_scaling(rho):
    critical = long_context.critical_gamma(rho)
    gamma = critical * np.array([0.5, 1.0, 2.0])
    limit = long_context.output_correlation_limit(rho, gamma)
    np.testing.assert_allclose(limit, [1.0, 4 * rho / (1 + 3 * rho), rho])
    finite = long_context.output_correlation(rho, gamma * np.log(1e12), 1e12)
    np.testing.assert_allclose(finite, limit, atol=2e-6)
    with pytest.raises(ValueError, match="no n tokens have such a cosine"):
        long_context.output_correlation(-0.9, 1.0, 8)


@pytest.mark.parametrize("d", [2, 3, 6])
def test_shot_noise_series(d):
    """F(s) = -sum (-s)^m/(m! m^{(d-1)/2}) for s where the series does not cancel."""
    b = 1.7
    for s in (0.01, 1.0, 6.0):
        F, factorial = 0.0, 1.0
        for m in range(1, 80):
            factorial *= m
            F -= (-s) ** m / (factorial * m ** ((d - 1) / 2))
        assert -np.log(long_context.laplace(s, b, d)) == pytest.approx(long_context.crowd(b, d) * F, rel=1e-10)


@pytest.mark.parametrize(("d", "b"), [(2, 0.05), (2, 2.0), (3, 1.0), (5, 0.3)])
def test_poisson_integrals(d, b):
    exact = quad(lambda s: np.exp(-s) * long_context.laplace(s, b, d), 0, np.inf, epsabs=1e-13, limit=500)[0]
    assert long_context.self_weight(b, d) == pytest.approx(exact, rel=1e-8)
    assert 0 < long_context.participation(b, d) <= 1


@pytest.mark.parametrize(("d", "b"), [(2, 0.3), (3, 0.4), (4, 0.5)])
def test_poisson_law_against_uniform_keys(d, b):
    """n uniform keys and a query among them, beta = b n^{2/(d-1)}: mean self-weight and participation."""
    n, queries = 20000, 1500
    beta = float(long_context.critical_beta(n, d, b))
    own, part = [], []
    rng = np.random.default_rng(5)
    for _ in range(queries // 100):
        x = rng.standard_normal((n, d))
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        logits = beta * (x[:100] @ x.T - 1)
        w = np.exp(logits)
        w = w / w.sum(1, keepdims=True)
        own += w[np.arange(100), np.arange(100)].tolist()
        part += (w**2).sum(1).tolist()
    for sample, theory in [(own, long_context.self_weight(b, d)), (part, long_context.participation(b, d))]:
        error = np.std(sample) / np.sqrt(len(sample))
        assert abs(np.mean(sample) - theory) < 4 * error + 0.01  # finite n is O(n^{-2/(d-1)}) away


def test_crowd_is_the_mean_of_the_neighbours_weights():
    # mean of sum_j e^{beta(<x,y_j> - 1)}: n int e^{beta(cos-1)} / |S| exactly on the circle
    n, b = 10**6, 0.7
    beta = float(long_context.critical_beta(n, 2, b))
    width = 40 / np.sqrt(beta)
    exact = 2 * n * quad(lambda a: np.exp(-2 * beta * np.sin(a / 2) ** 2), 0, width, limit=500)[0] / (2 * np.pi)
    assert long_context.crowd(b, 2) == pytest.approx(exact, rel=1e-6)


def test_balance():
    for d in (2, 3, 10):
        assert long_context.self_weight(long_context.balance(d), d) == pytest.approx(0.5, abs=1e-10)


# --- hardmax ---------------------------------------------------------------------------------------------------------


def literal_hardmax(x, alpha, G):
    out = []
    for i in range(len(x)):
        scores = [(G @ x[i]) @ y for y in x]
        best = [x[j] for j in range(len(x)) if scores[j] >= max(scores) - 1e-13]
        out.append((x[i] + alpha * np.mean(best, axis=0)) / (1 + alpha))
    return np.array(out)


def test_step_is_the_definition():
    x, G = RNG.standard_normal((9, 3)), np.diag([2.0, 1.0, 0.5])
    x[4] = x[7]  # a tie
    np.testing.assert_allclose(hardmax.step(x, 0.4, G), literal_hardmax(x, 0.4, G), rtol=1e-12)
    np.testing.assert_allclose(hardmax.step(x, 0.4), literal_hardmax(x, 0.4, np.eye(3)), rtol=1e-12)


def test_leaders_never_move_and_followers_stay_in_their_cell():
    x = RNG.standard_normal((40, 2))
    G = np.array([[1.5, 0.2], [0.2, 0.7]])
    heads = hardmax.leaders(x, G)
    assert len(heads) > 0
    start, target = x.copy(), hardmax.followed(x, G)
    followers = [i for i in range(40) if i not in heads and target[i].sum() == 1 and target[i].argmax() in heads]
    assert len(followers) > 0
    distance = {i: np.linalg.norm(x[i] - x[target[i].argmax()]) for i in followers}
    for _ in range(30):
        x = hardmax.step(x, 0.3, G)
        np.testing.assert_array_equal(hardmax.followed(x, G)[followers], target[followers])
    np.testing.assert_allclose(x[heads], start[heads], rtol=1e-13)
    for i in followers:
        left = np.linalg.norm(x[i] - start[target[i].argmax()])
        assert left == pytest.approx(float(hardmax.distance_to_leader(distance[i], 0.3, 30)), rel=1e-6)


def test_vertices_of_the_hull_may_move_in_flat_space():
    """THEORY 1 says "G positive semidefinite -> vertices of the hull stationary". In R^d a short vertex is not its own
    argmax and moves: (1, 0) attends to (2, 1.9). It holds for leaders, and for every token when all norms are equal.
    """
    x = np.array([[1.0, 0.0], [2.0, 1.9], [-1.0, 0.3]])  # a triangle: all three are vertices
    assert 0 not in hardmax.leaders(x)
    assert np.linalg.norm(hardmax.step(x, 0.5)[0] - x[0]) > 0.1
    on_sphere = x / np.linalg.norm(x, axis=1, keepdims=True)
    assert hardmax.leaders(on_sphere).tolist() == [0, 1, 2]


def test_leaders_on_a_sphere_need_a_multiple_of_the_identity():
    """G = c I: all of 40 tokens; G = diag(3, 1): few, counted by a loop. And a token may rest through ties."""
    angle = 2 * np.pi * (np.arange(40) + 0.25) / 40
    x = np.stack([np.cos(angle), np.sin(angle)], 1)
    assert len(hardmax.leaders(x, 2 * np.eye(2))) == 40
    few = hardmax.leaders(x, np.diag([3.0, 1.0]))
    scores = [[3 * a[0] * b[0] + a[1] * b[1] for b in x] for a in x]
    assert few.tolist() == [i for i, row in enumerate(scores) if row[i] == max(row)]
    assert 0 < len(few) < 12
    np.testing.assert_allclose(hardmax.step(x, 0.3, np.diag([3.0, 1.0]))[few], x[few], atol=1e-13)
    assert hardmax.leaders([[-1.0], [0.0], [1.0]]).tolist() == [0, 1, 2]
    for bad, words in (([[np.nan]], "1 NaN or infinite"), ([[1j]], "dtype complex128, expected real")):
        with pytest.raises(ValueError, match=words):
            hardmax.leaders(bad)


def test_frank_wolfe_gap_and_its_rate():
    vertices = RNG.standard_normal((12, 3))
    root = RNG.standard_normal((3, 3))
    G, alpha = root @ root.T, 0.2
    f = lambda y: 0.5 * (y @ G * y).sum(-1)
    x = RNG.dirichlet(np.ones(12), 50) @ vertices
    rise, best = f(vertices).max() - f(x), np.full(50, np.inf)
    for k in range(1, 60):
        gap = hardmax.frank_wolfe_gap(x, vertices, G)
        assert (gap >= -1e-12).all()
        best = np.minimum(best, gap)
        assert (best <= hardmax.gap_bound(rise, alpha, k) + 1e-12).all()
        target = vertices[((x @ G) @ vertices.T).argmax(1)]
        before, x = f(x), (x + alpha * target) / (1 + alpha)
        assert (f(x) - before >= alpha / (1 + alpha) * gap - 1e-12).all()


@pytest.mark.parametrize(("alpha", "steps"), [(1e4, 1), (1.0, 1), (1.0, 2), (0.5, 3)])
def test_a_token_that_attains_the_rate_of_the_gap(alpha, steps):
    """Far from 0 and near its leader f is linear: gap_k = rise (1+alpha)^-k, alpha K (1+alpha)^-K of the bound."""
    far, near = 1e6, np.array([[1e6 - 1.0]])
    rise = (far**2 - float(near[0, 0]) ** 2) / 2
    gaps = []
    for _ in range(steps):
        gaps.append(float(hardmax.frank_wolfe_gap(near, [[far]])[0]))
        near = (near + alpha * far) / (1 + alpha)
    bound = float(hardmax.gap_bound(rise, alpha, steps))
    assert min(gaps) <= bound
    assert min(gaps) / bound == pytest.approx(alpha * steps * (1 + alpha) ** -steps, rel=1e-5)


# --- gaussian --------------------------------------------------------------------------------------------------------


def test_gaussian_velocity_is_the_affine_flow_of_particles():
    """Finite differences of the empirical mean and covariance of tokens moved by x' = V(m + beta S G x)."""
    d, beta, h = 3, 0.4, 1e-6
    V, G = RNG.standard_normal((2, d, d))
    x = RNG.standard_normal((50, d)) @ RNG.standard_normal((d, d)) + 1.0
    m, S = x.mean(0), np.cov(x.T, bias=True)
    moved = x + h * (m + beta * x @ G.T @ S) @ V.T
    dm, dS = gaussian.velocity(m, S, V, G, beta)
    np.testing.assert_allclose((moved.mean(0) - m) / h, dm, rtol=1e-6)
    np.testing.assert_allclose((np.cov(moved.T, bias=True) - S) / h, dS, rtol=1e-3, atol=1e-4)


def test_softmax_of_a_gaussian_is_the_affine_drift():
    # the tilted mean of N(m, s) in one dimension by quadrature
    m, s, g, beta = 0.3, 0.8, -1.2, 1.5
    density = lambda y: np.exp(beta * g * y - (y - m) ** 2 / (2 * s))
    tilted = quad(lambda y: y * density(y), -12, 12)[0] / quad(density, -12, 12)[0]
    assert tilted == pytest.approx(m + beta * s * g)


@pytest.mark.parametrize("v", [1.0, -0.8])
def test_closed_form_for_scalar_values(v):
    d, beta = 3, 0.7
    root, S0 = RNG.standard_normal((2, d, d))
    G, S0, m0 = root + root.T, S0 @ S0.T + 0.1 * np.eye(d), RNG.standard_normal(d)
    end = min(gaussian.blow_up_time(S0, v, G, beta), 5.0)
    t = np.array([0.0, 0.3, 0.8]) * end
    reached, m, S = gaussian.solve(t, m0, S0, v * np.eye(d), G, beta)
    closed_m, closed_S = gaussian.scalar_value(t, m0, S0, v, G, beta)
    np.testing.assert_array_equal(reached, t)
    np.testing.assert_allclose(m, closed_m, rtol=1e-7)
    np.testing.assert_allclose(S, closed_S, rtol=1e-7)


def test_blow_up_time():
    assert gaussian.blow_up_time([[0.5]], 2.0, [[3.0]], 0.25) == pytest.approx(1 / (2 * 0.25 * 2 * 3 * 0.5))
    assert gaussian.blow_up_time([[0.5]], -2.0, [[3.0]], 0.25) == np.inf
    # any G, symmetric or not: the integrator stops within 1e-6 of the predicted time
    G, S0 = np.array([[1.0, 4.0], [-2.0, 0.3]]), np.array([[0.7, 0.2], [0.2, 0.4]])
    end = gaussian.blow_up_time(S0, 1.0, G, 0.5)
    t, _, S = gaussian.solve(np.linspace(0, 2 * end, 2001), np.zeros(2), S0, np.eye(2), G, 0.5)
    assert end * (1 - 2e-3) < t[-1] < end * (1 + 1e-6)
    assert np.linalg.norm(S[-1]) > 100 * np.linalg.norm(S0)
    # an antisymmetric G never changes the covariance
    assert gaussian.blow_up_time(S0, 1.0, [[0.0, 1.0], [-1.0, 0.0]], 0.5) == np.inf


def test_stable_law_decays_like_one_over_t():
    _, S = gaussian.scalar_value([1e4], [0.0, 0.0], np.eye(2), -1.0, np.diag([1.0, 2.0]), 1.0)
    np.testing.assert_allclose(S[0], np.diag([1 / 2e4, 1 / 4e4]), rtol=1e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: normalisation.solve("sandwich", [1.0], 1.0), "scheme = 'sandwich', expected one of 'post'"),
        (lambda: normalisation.law("pre", -1.0), "t = -1"),
        (lambda: long_context.critical_beta(10, 1), "d = 1, expected an integer >= 2"),
        (lambda: long_context.crowd(0.0, 3), "b = 0"),
        (lambda: hardmax.step(np.ones(3), 0.1), r"x has shape \(3,\), expected \(n, d\)"),
        (lambda: hardmax.step(np.ones((2, 3)), 0.1, np.eye(2)), r"G has shape \(2, 2\)"),
        (lambda: hardmax.step(np.ones((2, 3)), 0.0), "alpha = 0"),
        (lambda: gaussian.velocity([0.0], np.eye(2), 1, 1, 1), r"mean has shape \(1,\)"),
        (lambda: gaussian.velocity([0.0, 0], [[1, 2], [0, 1]], 1, 1, 1), "covariance is not symmetric"),
        (lambda: gaussian.scalar_value([1.0], [0.0], [[1.0]], 1.0, [[1.0]], 1.0), "expected t < 0.5, the blow-up time"),
        (lambda: gaussian.scalar_value([0.1], [0.0, 0], np.eye(2), 1.0, [[1.0, 1], [0, 1]], 1.0), "G is not symmetric"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
