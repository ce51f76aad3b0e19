"""The critical beta of attention rows: against bisection, rows that attain the bounds, the Poisson-Dirichlet law."""

import math

import numpy as np
import pytest
from scipy.special import zeta
from scipy.stats import norm

from attn_flow.theory import gap_counting

RNG = np.random.default_rng(0)


def bisected(row):
    """The beta at which the largest softmax weight of one row is a half, by halving an interval."""
    low, high = 0.0, 1e6
    for _ in range(200):
        beta = (low + high) / 2
        weights = [math.exp(beta * (s - max(row))) for s in row]
        low, high = (beta, high) if max(weights) / sum(weights) < 0.5 else (low, beta)
    return low


def test_newton_finds_what_bisection_finds():
    rows = RNG.normal(size=(6, 5, 12)) * np.exp(RNG.normal(size=(6, 5, 1)))
    found = gap_counting.resolving_beta(rows)
    assert found.shape == (6, 5)
    for where in np.ndindex(6, 5):
        assert found[where] == pytest.approx(bisected(rows[where].tolist()), rel=1e-9)


def test_rows_that_attain_the_bounds():
    equal = np.append(np.zeros(40), 0.7)
    low, high = gap_counting.gap_bounds(equal)
    assert gap_counting.resolving_beta(equal) == pytest.approx(float(low), rel=1e-12)
    n = 200_000
    logarithmic = -np.log(np.arange(1, n + 1))  # e^{-beta g_k} = (k+1)^{-beta}: a sum that ends in zeta(beta) - 1
    low, high = gap_counting.gap_bounds(logarithmic)
    missing = n ** (1 - gap_counting.SHARP) / (gap_counting.SHARP - 1)  # of the sum, beyond n
    found = float(gap_counting.resolving_beta(logarithmic))
    assert found < high
    assert found == pytest.approx(float(high), abs=1.1 * missing / -derivative_of_zeta(gap_counting.SHARP))


def derivative_of_zeta(p, h=1e-5):
    return (zeta(p + h) - zeta(p - h)) / (2 * h)


def test_the_bounds_hold_and_ties_are_never_resolved():
    rows = np.concatenate([RNG.normal(size=(50, 30)), RNG.exponential(size=(50, 30)), RNG.random((50, 30)) ** 8])
    low, high = gap_counting.gap_bounds(rows)
    found = gap_counting.resolving_beta(rows)
    assert np.all(low * (1 - 1e-12) <= found)
    assert np.all(found <= high * (1 + 1e-12))
    assert gap_counting.resolving_beta([2.0, 2.0, 1.0]) == math.inf
    assert gap_counting.resolving_beta([2.0, 1.0]) == 0
    assert gap_counting.gap_bounds([2.0, 2.0, 1.0])[1] == math.inf


def test_the_share_is_that_of_the_largest_weight_of_a_poisson_dirichlet_law():
    """Gamma_1 < Gamma_2 < ..., points of a Poisson process: weights Gamma_k^{-1/a} over their sum."""
    points, draws = 4000, 3000
    gamma = RNG.exponential(size=(draws, points)).cumsum(-1)
    for a in (0.4, 0.6, 0.75):
        weight = gamma ** (-1 / a)
        tail = gamma[:, -1] ** (1 - 1 / a) / (1 / a - 1)  # the mean of the points left out
        share = float((weight[:, 0] / (weight.sum(-1) + tail) > 0.5).mean())
        expected = float(gap_counting.resolved_share(1.0, a))
        assert abs(share - expected) < 4 * math.sqrt(0.25 / draws)
        assert expected == pytest.approx(math.sin(math.pi * a) / (math.pi * a), rel=1e-12)
    assert gap_counting.resolved_share(gap_counting.MEDIAN, 1.0) == pytest.approx(0.5, abs=1e-12)
    assert gap_counting.resolved_share([0.5, 1.0], 1.0).tolist() == [0, 0]


def test_hazard_rates_are_density_over_tail():
    for n in (10, 1000):
        u = norm.isf(1 / n)
        assert gap_counting.gaussian_hazard(n) == pytest.approx(norm.pdf(u) / norm.sf(u), rel=1e-10)
        g, h = 1 / math.log(n), 1e-6  # P(gap < g) = e^{-1/g} = 1/n
        slope = (math.exp(-1 / (g + h)) - math.exp(-1 / (g - h))) / (2 * h)
        assert gap_counting.edge_hazard(n) == pytest.approx(slope * n, rel=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gap_counting.gaps([1.0]), r"logits have shape \(1,\), expected rows"),
        (lambda: gap_counting.gaps([1.0, math.nan]), "logits has 1 NaN"),
        (lambda: gap_counting.resolved_share(0.0, 1.0), "beta = 0, expected"),
        (lambda: gap_counting.resolved_share(1.0, -1.0), "hazard = -1, expected"),
        (lambda: gap_counting.gaussian_hazard(1), "n = 1, expected an integer >= 2"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
