"""The three phases of Gaussian logits against a literal simulation at large m."""

import numpy as np
import pytest

from attn_flow.theory import random_energy

M = 2**14


def simulated_ratios(s, rows=256):
    """Mean participation ratios of M/4 and M Gaussian logits."""
    rng = np.random.default_rng(0)
    ratios = np.zeros((rows, 2))
    for row in range(rows):
        z = rng.normal(size=M)
        weights = np.exp(s * (z - z.max()))
        for k, m in enumerate((M // 4, M)):
            p = weights[:m] / weights[:m].sum()
            ratios[row, k] = (p**2).sum()
    return ratios.mean(0)


@pytest.mark.parametrize(("share", "atol"), [(0.25, 0.01), (0.4, 0.04), (0.75, 0.06), (1.5, 0.06), (3.0, 0.04)])
def test_the_exponent_is_the_slope_of_simulated_participation_ratios(share, atol):
    s = share * np.sqrt(2 * np.log(M))
    small, large = simulated_ratios(s)
    slope = -np.log(large / small) / np.log(4) / 2
    assert random_energy.sampling_exponent(s, M // 2) == pytest.approx(slope, abs=atol)


def test_the_participation_ratio_in_the_warm_and_the_frozen_phase():
    assert random_energy.participation_ratio(1.0, M) == pytest.approx(simulated_ratios(1.0)[1], rel=0.02)
    s = 4 * np.sqrt(2 * np.log(M))
    assert random_energy.participation_ratio(s, M) == pytest.approx(simulated_ratios(s)[1], rel=0.1)


def test_the_exponent_is_the_derivative_of_the_ratio():
    for s in (0.5, 1.5, 3.0, 3.8):
        ratios = np.log(random_energy.participation_ratio(s, [M, M + 16]))
        slope = -(ratios[1] - ratios[0]) / np.log((M + 16) / M) / 2
        assert random_energy.sampling_exponent(s, M) == pytest.approx(slope, abs=1e-3)


def test_thresholds_are_where_the_exponent_leaves_one_half_and_reaches_zero():
    low, high = random_energy.thresholds([64, 512])
    assert random_energy.sampling_exponent(low, [64, 512]) == pytest.approx([0.5, 0.5])
    assert random_energy.sampling_exponent(high, [64, 512]) == pytest.approx([0.0, 0.0])
    assert random_energy.phase([low - 0.01, low + 0.01, high - 0.01, high + 0.01], [64, 512]).tolist() == [
        [0, 0],
        [1, 1],
        [1, 1],
        [2, 2],
    ]
    with pytest.raises(ValueError, match="expected integers of at least 2"):
        random_energy.thresholds(1)
