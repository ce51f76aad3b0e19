"""Spectral selection, several heads, noise and causal attention against literal simulations (THEORY 5, 6, 7, 8)."""

import numpy as np
import pytest
import torch

from attn_flow.theory import causal, equiangular, multi_head, noise, spectral_selection

RNG = np.random.default_rng(0)


# --- spectral selection ----------------------------------------------------------------------------------------------


def softmax_flow(x, V, beta):
    """P_x sum_j softmax_j(beta <x_i, V x_j>) V x_j, torch, (n, d)."""
    m = torch.softmax(beta * x @ V @ x.T, 1) @ x @ V
    return m - (m * x).sum(1, keepdim=True) * x


def tangent_spectrum(x, V, beta):
    """Eigenvalues of the flow's Jacobian restricted to the product of tangent spaces, by autograd."""
    n, d = x.shape
    J = torch.autograd.functional.jacobian(lambda y: softmax_flow(y, V, beta), x).reshape(n * d, n * d)
    basis = torch.block_diag(*[torch.linalg.svd(row[None]).Vh[1:].T for row in x])
    return np.sort(np.linalg.eigvals((basis.T @ J @ basis).numpy()).real)


@pytest.mark.parametrize("p", [0, 1, 2, 3])
def test_homogeneous_jacobian(p):
    lam, n = np.array([2.0, -0.7, 0.4, -3.0]), 5
    frame = torch.tensor(np.linalg.qr(RNG.standard_normal((4, 4)))[0])
    V = frame @ torch.diag(torch.tensor(lam)) @ frame.T
    x = frame[:, p].repeat(n, 1)
    np.testing.assert_allclose(
        tangent_spectrum(x, V, 1.3), spectral_selection.homogeneous_eigenvalues(lam, p, n), atol=1e-8
    )


@pytest.mark.parametrize("p", [0, 2, 3])
@pytest.mark.parametrize(("n_plus", "n_minus"), [(1, 1), (3, 1), (2, 4)])
@pytest.mark.parametrize("beta", [0.03, 1.0, 3.0])
def test_sign_split_jacobian(p, n_plus, n_minus, beta):
    lam = np.array([1.5, -0.4, -1.0, -4.0])
    V = torch.diag(torch.tensor(lam))
    sign = torch.cat([torch.ones(n_plus), -torch.ones(n_minus)]).double()
    x = sign[:, None] * torch.eye(4, dtype=torch.float64)[p]
    formula = spectral_selection.sign_split_eigenvalues(lam, p, n_plus, n_minus, beta)
    np.testing.assert_allclose(tangent_spectrum(x, V, beta), formula, atol=1e-8)
    assert len(formula) == (n_plus + n_minus) * 3


def test_eigenvalues_accept_the_matrix():
    V = np.diag([3.0, -1.0, 2.0])
    np.testing.assert_allclose(
        spectral_selection.homogeneous_eigenvalues(V, 2, 4),
        spectral_selection.homogeneous_eigenvalues([-1, 2, 3], 2, 4),
    )


def ends_split(n, beta, seed, t=300.0, h=0.1):
    V = torch.diag(torch.tensor([-0.4, -1.0, -4.0], dtype=torch.float64))
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    unit = lambda y: y / y.norm(dim=1, keepdim=True)
    x = unit(x)
    for _ in range(int(t / h)):
        k1 = softmax_flow(x, V, beta)
        x = unit(x + h * softmax_flow(unit(x + h / 2 * k1), V, beta))
        if bool((x[:, 2].abs() > 1 - 1e-6).all()):
            break
    signs = x[:, 2].sign()
    return bool((x[:, 2].abs() > 1 - 1e-6).all()) and 0 < int((signs > 0).sum()) < n


@pytest.mark.parametrize(
    ("n", "beta", "splits"), [(2, 1.0, True), (4, 1.0, True), (8, 1.0, True), (3, 2.0, True), (3, 0.03, False)]
)
def test_negative_definite_values_split_by_sign(n, beta, splits):
    t = 300.0 if splits else 40.0
    assert [ends_split(n, beta, seed, t) for seed in range(6)] == [splits] * 6
    # the linear theory agrees: some split is stable iff beta is above its temperature and the pair modes decay
    stable = [
        spectral_selection.sign_split_eigenvalues([-0.4, -1, -4], 2, k, n - k, beta).max() < 0 for k in range(1, n)
    ]
    assert any(stable) == splits


# --- several heads ---------------------------------------------------------------------------------------------------


def simplex(n, rho):
    return np.linalg.cholesky(np.full((n, n), rho) + (1 - rho) * np.eye(n))


@pytest.mark.parametrize("rho", [-0.1, 0.0, 0.6])
def test_scalar_heads(rho):
    n, beta, heads = 5, 1.2, [0.5, 2.0, -0.3]
    x = simplex(n, rho)
    F = np.zeros((n, n))
    for i in range(n):
        for m in heads:
            e = np.array([np.exp(beta * m * x[i] @ x[j]) for j in range(n)]) / n
            F[i] += sum(e[j] * m * x[j] for j in range(n))
    v = F - (F * x).sum(1, keepdims=True) * x
    assert multi_head.velocity(rho, heads, beta, n) == pytest.approx(v[0] @ x[1] + x[0] @ v[1], rel=1e-12)


def test_one_head_of_strength_one_is_the_equiangular_ode():
    rho = np.linspace(-0.1, 0.99, 7)
    np.testing.assert_allclose(
        multi_head.velocity(rho, [1.0], 2.0, 6), equiangular.velocity(rho, 2.0, 6, "unnormalised")
    )


def test_terminal_rate_and_superadditivity():
    heads, beta, gap = np.array([0.2, 1.0, 1.8]), 1.5, 1e-7
    slope = multi_head.velocity(1 - gap, heads, beta, 9) / gap
    assert slope == pytest.approx(multi_head.terminal_rate(heads, beta), rel=1e-5)
    assert multi_head.averaged_rate(heads, beta) == pytest.approx(multi_head.terminal_rate([1.0] * 3, beta))
    draws = RNG.uniform(-2 / beta, 3, (1000, 4))
    assert (multi_head.terminal_rate(draws, beta) >= multi_head.averaged_rate(draws, beta)).all()
    # m e^{beta m} is concave below -2/beta: Jensen turns
    assert multi_head.terminal_rate([-3.0, -5.0], beta) < multi_head.averaged_rate([-3.0, -5.0], beta)


def test_attention_entropy():
    n, beta = 6, 3.0
    for rho in (-0.1, 0.0, 0.5, 1.0):
        w = np.exp(beta * np.array([1.0] + [rho] * (n - 1)))
        w = w / w.sum()
        assert multi_head.attention_entropy(rho, beta, n) == pytest.approx(-(w * np.log(w)).sum())
    curve = multi_head.attention_entropy(np.linspace(-0.2, 1, 50), 3.0, n)
    assert (np.diff(curve) > 0).all()
    assert curve[-1] == pytest.approx(np.log(n))
    assert multi_head.attention_entropy(0.0, 1e4, 10) == pytest.approx(0.0, abs=1e-12)


# --- noise -----------------------------------------------------------------------------------------------------------


def pairs(rho, d, count):
    x, y = np.zeros((count, d)), np.zeros((count, d))
    x[:, 0] = 1
    y[:, 0], y[:, 1] = rho, np.sqrt(1 - rho**2)
    return x, y


def kicked(x, y, D, C, h, rng):
    """rho after one layer normalise(x + sqrt(h) xi): xi(x), xi(y) with covariances D, D, C times I."""
    root = np.linalg.cholesky([[D, C], [C, D]])
    a, b = rng.standard_normal((2, *x.shape)) * np.sqrt(h)
    x, y = x + root[0, 0] * a, y + root[1, 0] * a + root[1, 1] * b
    return (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)


@pytest.mark.parametrize("name", ["quadratic", "exponential", "mixed"])
@pytest.mark.parametrize("rho", [-0.6, 0.3, 0.9])
def test_two_token_diffusion_coefficients(name, rho):
    d, h, count = 5, 1e-3, 400_000
    kappa, _ = noise.KERNELS[name]
    rng = np.random.default_rng(1)
    step = kicked(*pairs(rho, d, count), float(kappa(np.array(1.0))), float(kappa(np.array(rho))), h, rng) - rho
    sigma = noise.diffusion(rho, kappa)
    assert step.std() / np.sqrt(h) == pytest.approx(sigma, rel=1e-2)
    error = 4 * sigma / np.sqrt(count * h) + 30 * h  # sampling, and the O(h) bias of one finite layer
    assert abs(step.mean() / h - noise.drift(rho, kappa, d)) < error


def test_kernel_slopes():
    for kappa, slope in noise.KERNELS.values():
        assert (kappa(np.array(1.0)) - kappa(np.array(1 - 1e-6))) / 1e-6 == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize(("a", "expected", "measured"), [(0.0, -2.0, -2.04), (1.0, -4.0, -4.04)])
def test_lyapunov_exponent_of_the_linear_kernel(a, expected, measured):
    """kappa = rho: xi(x) = W x, W iid Gaussian. d = 8, layers of h = .005, distances renormalised by hand."""
    d, h, layers, count = 8, 0.005, 400, 400
    assert noise.lyapunov(d, 1.0, 1.0, a) == expected
    rng = np.random.default_rng(2)
    x, y = pairs(np.cos(1e-4), d, count)
    u = y - x  # y = x + u with u tiny: the tangent flow, so that nothing reaches the last digit
    log_growth = np.zeros(count)
    for _ in range(layers):
        W = np.sqrt(h) * rng.standard_normal((count, d, d))
        x2 = x + h * a * x + np.einsum("nij,nj->ni", W, x)  # the pair's attention mean is (x+y)/2
        y2 = x + u + h * a * (x + u / 2) + np.einsum("nij,nj->ni", W, x + u)
        x2 = x2 + h * a * u / 2
        x = x2 / np.linalg.norm(x2, axis=1, keepdims=True)
        u = y2 / np.linalg.norm(y2, axis=1, keepdims=True) - x
        size = np.linalg.norm(u, axis=1, keepdims=True)
        log_growth += 2 * np.log(size[:, 0] / 1e-4)
        u = u / size * 1e-4
    exponent = log_growth.mean() / (h * layers)
    error = log_growth.std() / (h * layers) / np.sqrt(count)
    assert abs(exponent - expected) < 4 * error + 0.1
    assert abs(exponent - measured) < 4 * error + 0.1


@pytest.mark.parametrize("rho", [-0.8, 0.2])
def test_random_values(rho):
    d, beta, h, count = 6, 0.7, 1e-3, 400_000
    x, y = pairs(rho, d, 1)
    p = 1 / (1 + np.exp(-beta * (1 - rho)))
    m1, m2 = p * x[0] + (1 - p) * y[0], p * y[0] + (1 - p) * x[0]
    D, C = noise.value_moments(rho, beta)
    assert (m1 @ m1, m1 @ m2) == (pytest.approx(D), pytest.approx(C))
    rng = np.random.default_rng(3)
    step = kicked(*pairs(rho, d, count), D, C, h, rng) - rho
    sigma = noise.value_diffusion(rho, beta)
    assert step.std() / np.sqrt(h) == pytest.approx(sigma, rel=1e-2)
    assert abs(step.mean() / h - noise.value_drift(rho, beta, d)) < 4 * sigma / np.sqrt(count * h) + 30 * h


@pytest.mark.parametrize(("d", "beta"), [(4, 0.3), (4, 1.5), (10, 1.0), (10, 2.0)])
def test_antipodal_exponent_from_the_sde(d, beta):
    """For eps = 1 + rho -> 0 the SDE is d eps = eps (mu dt + sigma dB), whose exponent is mu - sigma^2/2."""
    eps = 1e-7
    mu = noise.value_drift(-1 + eps, beta, d) / eps
    sigma = noise.value_diffusion(-1 + eps, beta) / eps
    assert mu - sigma**2 / 2 == pytest.approx(noise.antipodal_lyapunov(beta, d), rel=1e-5)
    mu, sigma = -noise.value_drift(1 - eps, beta, d) / eps, noise.value_diffusion(1 - eps, beta) / eps
    assert mu - sigma**2 / 2 == pytest.approx(noise.consensus_lyapunov(d), rel=1e-5)


def test_critical_beta_of_random_values():
    d = np.array([4, 8, 100])
    b = noise.critical_beta(d)
    np.testing.assert_allclose(np.tanh(b) ** 2, (d - 3) / (d - 1))
    np.testing.assert_allclose(noise.antipodal_lyapunov(b, d), 0, atol=1e-12)
    assert (noise.antipodal_lyapunov(b * 1.01, d) < 0).all()
    assert noise.critical_beta(3) == 0.0


def test_lyapunov_from_the_sde_for_every_kernel():
    eps = 1e-6
    for kappa, slope in noise.KERNELS.values():
        mu, sigma = -noise.drift(1 - eps, kappa, 7) / eps, noise.diffusion(1 - eps, kappa) / eps
        assert mu - sigma**2 / 2 == pytest.approx(noise.lyapunov(7, 1.0, slope), rel=1e-4)
    assert noise.attention_drift(1 - eps, 2.0) / eps == pytest.approx(2.0, rel=1e-4)


# --- causal ----------------------------------------------------------------------------------------------------------


def test_causal_consensus_rates():
    """Autograd Jacobian of literal causal attention at consensus; eigenvalues -(1 - 1/j), d-1 fold."""
    n, d = 5, 3
    x = torch.eye(d, dtype=torch.float64)[0].repeat(n, 1)
    mask = torch.ones(n, n).tril().bool()

    def flow(y):
        m = torch.softmax((2.0 * y @ y.T).masked_fill(~mask, -torch.inf), 1) @ y
        return m - (m * y).sum(1, keepdim=True) * y

    J = torch.autograd.functional.jacobian(flow, x)[:, 1:, :, 1:].reshape(n * (d - 1), n * (d - 1))
    expected = np.sort(np.repeat(-causal.consensus_rates(n), d - 1))
    np.testing.assert_allclose(np.sort(np.linalg.eigvals(J.numpy()).real), expected, atol=1e-10)


def test_recency_times_of_the_specification():
    assert causal.recency_time(1.0, 1.0, 8) == pytest.approx(2.457489, abs=5.1e-7)
    assert causal.recency_time(2.0, 1.0, 8) == pytest.approx(0.600716, abs=5.1e-7)


@pytest.mark.parametrize("lam", [0.0, 1.0, 3.0])
def test_retrieval_solves_the_volterra_equation(lam):
    """h_u' = a int_0^u k(u,s) h_s ds from one excited token: Taylor series of the literal N x N system."""
    N, a, t = 4000, 1.7, 1.3
    j = np.arange(1, N + 1)
    source = 1200
    excited = np.zeros(N)
    excited[source] = N  # h = delta at s
    # A_jk ~ e^{-lam (j-k)/N} for k < j: cumulative sums apply it in O(N)
    damp = np.exp(lam * j / N)
    norm = np.concatenate([[1.0], np.cumsum(damp)[:-1]])

    def apply(h):
        out = np.concatenate([[0.0], np.cumsum(damp * h)[:-1]]) / norm
        return out

    term, total = excited.copy(), excited.copy()
    for m in range(1, 40):
        term = a * t / m * apply(term)
        total = total + term
    s = (source + 1) / N
    assert total[-1] == pytest.approx(float(causal.retrieval(t, s, a, lam)), rel=3e-3)


@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("lam", [0.5, 2.0])
def test_u_shape(beta, lam):
    s = np.concatenate([np.geomspace(1e-12, 0.01, 300), np.linspace(0.0101, 1, 400)])
    t = causal.u_shape_time(beta, lam)
    rises = np.diff(causal.retrieval_score(t, s, beta, lam, 8)) > 0
    assert not rises[0]
    assert rises[-1]
    assert np.diff(rises.astype(int)).sum() == 1  # one turn
    assert (np.diff(rises.astype(int)) >= 0).all()


def test_recency_is_lost_beyond_the_critical_time():
    t = causal.recency_time(1.0, 1.0, 8)
    slope = lambda time: float(np.diff(causal.retrieval_score(time, [1 - 1e-5, 1.0], 1.0, 1.0, 8))[0])
    assert slope(0.999 * t) > 0 > slope(1.001 * t)


def test_mode_rates_are_fourier_coefficients():
    """w' * h on the n-th mode: a_n = n^2 I_n(beta), from a direct sum over the circle."""
    beta, n, theta = 1.3, 3, 2 * np.pi * np.arange(2000) / 2000
    w_slope = -beta * np.sin(theta) * np.exp(beta * np.cos(theta))
    # f' = -(w' * cos n .)' / 2pi at theta = 0, with cos n theta as the excited mode
    literal = -(w_slope * n * np.sin(n * theta)).mean()
    assert causal.mode_rates(beta)[n - 1] == pytest.approx(literal, rel=1e-10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: spectral_selection.homogeneous_eigenvalues([1.0, 2.0], 2, 3),
            "p = 2, expected an integer >= 0 and <= 1",
        ),
        (lambda: spectral_selection.homogeneous_eigenvalues([[1.0, 2.0], [0, 1]], 0, 3), "not symmetric"),
        (lambda: spectral_selection.sign_split_eigenvalues([1.0, 2.0], 0, 0, 3, 1.0), "n_plus = 0"),
        (lambda: noise.critical_beta(2), "d = 2, expected an integer >= 3"),
        (lambda: noise.drift(1.1, np.abs, 3), "rho = 1.1"),
        (lambda: causal.retrieval(-1.0, 0.5, 1.0, 1.0), "t = -1"),
        (lambda: causal.u_shape_time(1.0, 0.0), "lam = 0"),
        (lambda: multi_head.attention_entropy(0.0, 1.0, 1), "n = 1"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
