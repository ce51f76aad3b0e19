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
def test_the_slope_of_simulated_ratios_changes_at_the_thresholds(share, atol):
    """Participation ratios fall like m^(-2b), b = 1/2 up to the first threshold and 0 from the second one on."""
    low, high = random_energy.thresholds(M // 2)
    s = share * np.sqrt(2 * np.log(M))
    small, large = simulated_ratios(s)
    slope = -np.log(large / small) / np.log(4) / 2
    assert np.interp(s, [low, high], [0.5, 0.0]) == pytest.approx(slope, abs=atol)


def test_phases_of_rows():
    low, high = random_energy.thresholds([64, 512])
    rows = [low - 0.01, low + 0.01, high - 0.01, high + 0.01]
    assert random_energy.phase(rows, [64, 512]).tolist() == [[0, 0], [1, 1], [1, 1], [2, 2]]
    with pytest.raises(ValueError, match="expected integers of at least 2"):
        random_energy.thresholds(1)
