"""Spectral selection, several heads, noise and causal attention against literal simulations (THEORY.md 5, 6, 7, 8)."""

import numpy as np
import pytest
import torch
from scipy.special import iv

from attn_flow.theory import causal, multi_head, noise, spectral_selection

RNG = np.random.default_rng(0)


# --- spectral selection ----------------------------------------------------------------------------------------------


def softmax_flow(x, V, beta):
    """P_x sum_j softmax_j(beta <x_i, V x_j>) V x_j for tokens x (n, d)."""
    m = torch.softmax(beta * x @ V @ x.T, 1) @ x @ V
    return m - (m * x).sum(1, keepdim=True) * x


def tangent_spectrum(x, V, beta):
    """Eigenvalues of the Jacobian of the flow on the product of the tangent spaces, by automatic differentiation."""
    n, d = x.shape
    J = torch.autograd.functional.jacobian(lambda y: softmax_flow(y, V, beta), x).reshape(n * d, n * d)
    basis = torch.block_diag(*[torch.linalg.svd(row[None]).Vh[1:].T for row in x])
    return np.sort(np.linalg.eigvals((basis.T @ J @ basis).numpy()).real)


@pytest.mark.parametrize("p", [0, 1, 3])
def test_homogeneous_jacobian(p):
    lam = np.array([2.0, -0.7, 0.4, -3.0])
    frame = torch.tensor(np.linalg.qr(RNG.standard_normal((4, 4)))[0])
    V = frame @ torch.diag(torch.tensor(lam)) @ frame.T
    formula = spectral_selection.homogeneous_eigenvalues(lam, p, 5)
    np.testing.assert_allclose(tangent_spectrum(frame[:, p].repeat(5, 1), V, 1.3), formula, atol=1e-8)


@pytest.mark.parametrize("p", [0, 3])
@pytest.mark.parametrize(("n_plus", "n_minus"), [(1, 1), (2, 4)])
@pytest.mark.parametrize("beta", [0.03, 3.0])
def test_sign_split_jacobian(p, n_plus, n_minus, beta):
    lam = np.array([1.5, -0.4, -1.0, -4.0])
    sign = torch.tensor([1.0] * n_plus + [-1.0] * n_minus, dtype=torch.float64)
    x = sign[:, None] * torch.eye(4, dtype=torch.float64)[p]
    formula = spectral_selection.sign_split_eigenvalues(lam, p, n_plus, n_minus, beta)
    np.testing.assert_allclose(tangent_spectrum(x, torch.diag(torch.tensor(lam)), beta), formula, atol=1e-8)


@pytest.mark.parametrize(
    ("n", "beta", "splits"), [(2, 1.0, True), (4, 1.0, True), (8, 1.0, True), (3, 2.0, True), (3, 0.03, False)]
)
def test_negative_definite_values_split_by_sign(n, beta, splits):
    lam = [-0.4, -1.0, -4.0]
    V = torch.diag(torch.tensor(lam, dtype=torch.float64))
    unit = lambda y: y / y.norm(dim=1, keepdim=True)
    for seed in range(4):
        x = unit(torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
        for _ in range(3000 if splits else 400):
            if bool((x[:, 2].abs() > 1 - 1e-6).all()):
                break
            x = unit(x + 0.1 * softmax_flow(unit(x + 0.05 * softmax_flow(x, V, beta)), V, beta))
        is_split = bool((x[:, 2].abs() > 1 - 1e-6).all()) and 0 < int((x[:, 2] > 0).sum()) < n
        assert is_split == splits
    spectra = [spectral_selection.sign_split_eigenvalues(lam, 2, k, n - k, beta) for k in range(1, n)]
    assert any(spectrum.max() < 0 for spectrum in spectra) == splits


# --- several heads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [-0.1, 0.6])
def test_scalar_heads(rho):
    n, beta, heads = 5, 1.2, [0.5, 2.0, -0.3]
    x = np.linalg.cholesky(np.full((n, n), rho) + (1 - rho) * np.eye(n))
    F = np.array(
        [sum(m * np.exp(beta * m * x[i] @ x[j]) * x[j] / n for m in heads for j in range(n)) for i in range(n)]
    )
    v = F - (F * x).sum(1, keepdims=True) * x
    assert multi_head.velocity(rho, heads, beta, n) == pytest.approx(v[0] @ x[1] + x[0] @ v[1], rel=1e-12)


def test_terminal_rate_is_superadditive():
    heads, beta, gap = np.array([0.2, 1.0, 1.8]), 1.5, 1e-7
    slope = multi_head.velocity(1 - gap, heads, beta, 9) / gap
    assert slope == pytest.approx(multi_head.terminal_rate(heads, beta), rel=1e-5)
    mean_heads = lambda m: np.repeat(m.mean(-1, keepdims=True), m.shape[-1], -1)
    draws = RNG.uniform(-2 / beta, 3, (1000, 4))
    rates = multi_head.terminal_rate(draws, beta)
    assert (rates >= multi_head.terminal_rate(mean_heads(draws), beta) * (1 - 1e-12)).all()
    negative = np.array([-3.0, -5.0])  # m e^{beta m} is concave below -2/beta
    assert multi_head.terminal_rate(negative, beta) < multi_head.terminal_rate(mean_heads(negative), beta)


# --- noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kappa", "slope"), [(lambda r: r**2, 2.0), (lambda r: np.exp(r - 1), 1.0)])
@pytest.mark.parametrize("rho", [-0.6, 0.9])
def test_two_token_diffusion_coefficients(kappa, slope, rho):
    """One layer normalise(x + sqrt(h) xi) of many pairs; xi(x) and xi(y) have covariance kappa(1) I, kappa(rho) I."""
    d, h, count, rng = 5, 1e-3, 400_000, np.random.default_rng(1)
    root = np.linalg.cholesky([[kappa(1.0), kappa(rho)], [kappa(rho), kappa(1.0)]])
    a, b = rng.standard_normal((2, count, d)) * np.sqrt(h)
    x = np.eye(d)[0] + root[0, 0] * a
    y = rho * np.eye(d)[0] + np.sqrt(1 - rho**2) * np.eye(d)[1] + root[1, 0] * a + root[1, 1] * b
    step = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1) - rho
    sigma = noise.diffusion(rho, kappa)
    assert step.std() / np.sqrt(h) == pytest.approx(sigma, rel=1e-2)
    assert abs(step.mean() / h - noise.drift(rho, kappa, d)) < 4 * sigma / np.sqrt(count * h) + 30 * h
    # Near consensus 1 - rho is a geometric Brownian motion, whose exponent is its drift minus half its variance.
    eps = 1e-6
    mu, sigma = -noise.drift(1 - eps, kappa, 7) / eps, noise.diffusion(1 - eps, kappa) / eps
    assert mu - sigma**2 / 2 == pytest.approx(noise.lyapunov(7, 1.0, slope), rel=1e-4)


@pytest.mark.parametrize(("a", "measured"), [(0.0, -2.04), (1.0, -4.04)])
def test_lyapunov_exponent_of_the_linear_kernel(a, measured):
    """kappa = rho is xi(x) = W x with Gaussian W. The tangent flow of a pair at distance 1e-4, d = 8, h = 0.005."""
    d, h, layers, count, rng = 8, 0.005, 400, 400, np.random.default_rng(2)
    x = np.tile(np.eye(d)[0], (count, 1))
    u, log_growth = np.tile(1e-4 * np.eye(d)[1], (count, 1)), np.zeros(count)
    for _ in range(layers):
        W = np.sqrt(h) * rng.standard_normal((count, d, d))
        layer = lambda z, mean, W=W: z + h * a * mean + np.einsum("nij,nj->ni", W, z)
        x_new, y_new = layer(x, x + u / 2), layer(x + u, x + u / 2)
        x = x_new / np.linalg.norm(x_new, axis=1, keepdims=True)
        u = y_new / np.linalg.norm(y_new, axis=1, keepdims=True) - x
        size = np.linalg.norm(u, axis=1, keepdims=True)
        log_growth += 2 * np.log(size[:, 0] / 1e-4)
        u = u / size * 1e-4
    exponent, error = log_growth.mean() / (h * layers), log_growth.std() / (h * layers) / np.sqrt(count)
    assert abs(exponent - noise.lyapunov(d, a=a)) < 4 * error + 0.1
    assert abs(exponent - measured) < 4 * error + 0.1


@pytest.mark.parametrize(("d", "beta"), [(4, 0.3), (10, 2.0)])
def test_antipodal_exponent_of_random_values(d, beta):
    """Random values give the noise covariances D I, C I, the moments of the attention means m_1, m_2 of the pair."""

    def moments(rho):
        x, y = np.array([1.0, 0.0]), np.array([rho, np.sqrt(1 - rho**2)])
        p = 1 / (1 + np.exp(-beta * (1 - rho)))
        m1, m2 = p * x + (1 - p) * y, p * y + (1 - p) * x
        return m1 @ m1, m1 @ m2

    for end, expected in ((-1, noise.antipodal_lyapunov(beta, d)), (1, 1 - d)):
        eps = 1e-6
        rho = end * (1 - eps)
        D, C = moments(rho)
        mu = -end * ((d - 2 + rho**2) * C - (d - 1) * D * rho) / eps
        variance = 2 * (1 - rho**2) * (D - rho * C) / eps**2
        assert mu - variance / 2 == pytest.approx(float(expected), rel=1e-3, abs=1e-3)


def test_critical_beta_of_random_values():
    d = np.array([4, 8, 100])
    np.testing.assert_allclose(noise.antipodal_lyapunov(noise.critical_beta(d), d), 0, atol=1e-12)
    assert noise.critical_beta(3) == 0.0
    with pytest.raises(ValueError, match="d = 2, expected integers of at least 3"):
        noise.critical_beta(2)


@pytest.mark.parametrize("d", [2, 3, 10])
def test_jump_beta(d):
    beta = noise.jump_beta(d)
    assert iv(d / 2 + 1, beta) / iv(d / 2, beta) == pytest.approx(1 / d, rel=1e-10)


# --- causal ----------------------------------------------------------------------------------------------------------


def test_causal_consensus_rates():
    """The Jacobian of literal causal attention at consensus has the eigenvalues -(1 - 1/j), d-1 times each."""
    n, d = 5, 3
    x = torch.eye(d, dtype=torch.float64)[0].repeat(n, 1)
    mask = torch.ones(n, n).tril().bool()

    def velocity(y):
        m = torch.softmax((2.0 * y @ y.T).masked_fill(~mask, -torch.inf), 1) @ y
        return m - (m * y).sum(1, keepdim=True) * y

    J = torch.autograd.functional.jacobian(velocity, x)[:, 1:, :, 1:].reshape(n * (d - 1), n * (d - 1))
    expected = np.sort(np.repeat(-causal.consensus_rates(n), d - 1))
    np.testing.assert_allclose(np.sort(np.linalg.eigvals(J.numpy()).real), expected, atol=1e-10)


def test_recency_times_of_the_paper():
    times = [causal.recency_time(beta, 1.0, 8) for beta in (0.5, 3.0)]
    np.testing.assert_allclose(times, [5.9116, 0.1740], atol=5.1e-5)
    assert causal.recency_time(2.0, 1.0, 8) == pytest.approx(0.600716, abs=5.1e-7)
    assert causal.recency_time(1.6, 2.0, 5) == pytest.approx(1.3714, abs=2e-4)


@pytest.mark.parametrize("lam", [0.0, 3.0])
def test_retrieval_solves_the_volterra_equation(lam):
    """h_u' = a int_0^u k(u,s) h_s ds from one excited token: the Taylor series of the literal N x N system."""
    N, a, t, source = 4000, 1.7, 1.3, 1200
    damping = np.exp(lam * np.arange(1, N + 1) / N)  # A_jk ~ e^{-lam (j-k)/N} for k < j, by cumulative sums
    total_damping = np.concatenate([[1.0], np.cumsum(damping)[:-1]])
    term = np.zeros(N)
    term[source] = N  # a delta function at s
    total = term
    for m in range(1, 40):
        term = a * t / m * np.concatenate([[0.0], np.cumsum(damping * term)[:-1]]) / total_damping
        total = total + term
    assert total[-1] == pytest.approx(float(causal.retrieval(t, (source + 1) / N, a, lam)), rel=3e-3)
    strong = (
        1000 * np.exp(-10) * np.sqrt(a * t / 10) * iv(1, 2 * np.sqrt(10 * a * t))
    )  # Y = lam (1 - s), e^lam overflows
    assert float(causal.retrieval(t, 0.99, a, 1000.0)) == pytest.approx(strong)


@pytest.mark.parametrize(("beta", "lam"), [(1.0, 0.5), (2.0, 2.0), (1.0, 9.0)])
def test_profile_is_u_shaped_and_loses_recency(beta, lam):
    s = np.concatenate([np.geomspace(1e-12, 0.01, 300), np.linspace(0.0101, 1, 400)])
    rises = np.diff(causal.retrieval_score(causal.u_shape_time(beta, lam), s, beta, lam, 8)) > 0
    assert not rises[0]
    assert rises[-1]
    assert (np.diff(rises.astype(int)) >= 0).all()  # one turn
    t = causal.recency_time(beta, lam, 8)
    slope = lambda time: float(np.diff(causal.retrieval_score(time, [1 - 1e-5, 1.0], beta, lam, 8))[0])
    assert slope(0.999 * t) > 0 > slope(1.001 * t)


def test_mode_rates_are_fourier_coefficients():
    beta, n, theta = 1.3, 3, 2 * np.pi * np.arange(2000) / 2000
    w_slope = -beta * np.sin(theta) * np.exp(beta * np.cos(theta))
    assert causal.mode_rates(beta)[n - 1] == pytest.approx(-(w_slope * n * np.sin(n * theta)).mean(), rel=1e-10)


def test_the_index_of_an_eigenvalue_that_is_not_there():
    with pytest.raises(ValueError, match="p = 2, expected the index of one of 2"):
        spectral_selection.homogeneous_eigenvalues([1.0, 2.0], 2, 3)
