"""The critical beta of attention rows: bisection, rows that attain the bounds, the Poisson-Dirichlet distribution."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from attn_flow.theory import gap_counting

RNG = np.random.default_rng(0)


def bisect(row):
    """The beta at which the largest softmax weight of one row is 1/2."""
    low, high = 0.0, 1e6
    for _ in range(200):
        beta = (low + high) / 2
        weights = [math.exp(beta * (s - max(row))) for s in row]
        low, high = (beta, high) if max(weights) / sum(weights) < 0.5 else (low, beta)
    return low


def test_newton_agrees_with_bisection():
    rows = RNG.normal(size=(3, 5, 12)) * np.exp(RNG.normal(size=(3, 5, 1)))
    beta = gap_counting.resolving_beta(rows)
    for index in np.ndindex(3, 5):
        assert beta[index] == pytest.approx(bisect(rows[index].tolist()), rel=1e-9)


def test_the_bounds_hold_and_the_lower_one_is_attained():
    rows = np.concatenate([RNG.normal(size=(50, 30)), RNG.exponential(size=(50, 30)), RNG.random((50, 30)) ** 8])
    low, high = gap_counting.gap_bounds(rows)
    beta = gap_counting.resolving_beta(rows)
    assert np.all(low * (1 - 1e-12) <= beta)
    assert np.all(beta <= high * (1 + 1e-12))
    equal_gaps = np.append(np.zeros(40), 0.7)
    assert gap_counting.resolving_beta(equal_gaps) == pytest.approx(float(gap_counting.gap_bounds(equal_gaps)[0]))


def test_the_upper_bound_is_nearly_attained():
    """Gaps log(k+1): S is a partial sum of zeta(beta) - 1."""
    logits = -np.log(np.arange(1, 200_001))
    high = float(gap_counting.gap_bounds(logits)[1])
    assert 0.999 * high < float(gap_counting.resolving_beta(logits)) < high


def test_ties_are_never_resolved():
    assert gap_counting.resolving_beta([2.0, 2.0, 1.0]) == math.inf
    assert gap_counting.gap_bounds([2.0, 2.0, 1.0])[1] == math.inf
    assert gap_counting.resolving_beta([2.0, 1.0]) == 0
    with pytest.raises(ValueError, match=r"logits have shape \(1,\), expected rows"):
        gap_counting.resolving_beta([1.0])


@pytest.mark.parametrize("a", [0.4, 0.75])
def test_resolved_share_of_poisson_dirichlet_weights(a):
    """Points Gamma_1 < Gamma_2 < ... of a Poisson process have the weights Gamma_k^{-1/a} over their sum."""
    points, draws = 4000, 2000
    gamma = RNG.exponential(size=(draws, points)).cumsum(-1)
    weight = gamma ** (-1 / a)
    tail = gamma[:, -1] ** (1 - 1 / a) / (1 / a - 1)  # the mean of the points left out
    share = float((weight[:, 0] / (weight.sum(-1) + tail) > 0.5).mean())
    expected = float(gap_counting.resolved_share(1.0, a))
    assert expected == pytest.approx(math.sin(math.pi * a) / (math.pi * a), rel=1e-12)
    assert abs(share - expected) < 4 * math.sqrt(0.25 / draws)


def test_median_row_and_hazard_rate():
    assert gap_counting.resolved_share(gap_counting.MEDIAN_RATIO, 1.0) == pytest.approx(0.5, abs=1e-12)
    assert gap_counting.resolved_share([0.5, 1.0], 1.0).tolist() == [0, 0]
    for n in (10, 1000):
        u = norm.isf(1 / n)
        assert gap_counting.gaussian_hazard(n) == pytest.approx(norm.pdf(u) / norm.sf(u), rel=1e-10)
