"""How often question 4 says yes: to false laws, to a displacement that was planted, and to systems of the theorem.

`pytest -m slow -s tests/probe/test_calibration.py` prints the rows of docs/calibration.md.
"""

from collections import Counter

import pytest
import torch
from limit_systems import FALSE_LAWS, compressed_minilm, planted, theorem_system

from attn_flow.probe.limit import measure_limit

pytestmark = pytest.mark.slow

DRAWS, SEEDS = 100, 10


@pytest.fixture(scope="module")
def minilm_in_few_dimensions():
    return compressed_minilm()


def count_verdicts(name: str, draws: int, draw) -> Counter:
    """Verdicts over recordings draw(generator), one for every seed."""
    verdicts: Counter = Counter()
    for seed in range(draws):
        g = torch.Generator().manual_seed(1000 + seed)
        verdicts[measure_limit(draw(g), g).finding().verdict] += 1
    print(f"| {name} | {draws} | {verdicts['supported']} | {verdicts['partly']} |")
    return verdicts


@pytest.mark.parametrize("name", FALSE_LAWS)
def test_false_laws_are_rarely_found(name, minilm_in_few_dimensions):
    verdicts = count_verdicts(name, DRAWS, lambda g: FALSE_LAWS[name](minilm_in_few_dimensions, g))
    assert verdicts["supported"] + verdicts["partly"] <= 0.05 * DRAWS


def test_a_planted_displacement_is_found(minilm_in_few_dimensions):
    verdicts = count_verdicts("planted, size 0.5", DRAWS, lambda g: planted(minilm_in_few_dimensions, g, 0.5))
    assert verdicts["supported"] + verdicts["partly"] >= 0.9 * DRAWS


@pytest.mark.parametrize("horizon", [0.05, 0.25, 0.5])
@pytest.mark.parametrize("d", [3, 5, 8])
def test_systems_of_the_theorem_are_supported_for_every_seed(d, horizon):
    for seed in range(SEEDS):
        measured = measure_limit(theorem_system(seed, d, horizon), torch.Generator().manual_seed(seed))
        assert measured.finding().verdict == "supported", (seed, measured.finding())
