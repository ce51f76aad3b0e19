"""Agreement from its definition, intervals that cover, and a verdict that can say no."""

import math

import pytest
import torch

from attn_flow.prediction import spectrum
from attn_flow.probe.agreement import compare, misses
from attn_flow.probe.findings import Finding, Interval, bootstrap, decide, ratio_of_means
from attn_flow.probe.limit_law import affine_drift, limit_matrix


@pytest.fixture
def outputs(generator) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.randn(12, 4, generator=generator, dtype=torch.float64) + 3
    return out + 0.5 * torch.randn(12, 4, generator=generator, dtype=torch.float64), out


def test_agreement_is_what_its_definition_says(outputs):
    p, o = outputs
    n = len(o)
    mean_p, mean_o = sum(p) / n, sum(o) / n
    error = sum(float((p[i] - o[i]) @ (p[i] - o[i])) for i in range(n))
    spread = sum(float((o[i] - mean_o) @ (o[i] - mean_o)) for i in range(n))
    cosine = lambda a, b: float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))
    found = compare(p, o)
    assert float(found.explained) == pytest.approx(1 - error / spread, rel=1e-12)
    centred = sum(cosine(p[i] - mean_p, o[i] - mean_o) for i in range(n)) / n
    assert float(found.centred_cosine) == pytest.approx(centred, rel=1e-12)
    assert float(found.cosine) == pytest.approx(sum(cosine(p[i], o[i]) for i in range(n)) / n, rel=1e-12)
    each = [float((p[i] - o[i]) @ (p[i] - o[i])) / (spread / n) for i in range(n)]
    assert misses(p, o).tolist() == pytest.approx(each, rel=1e-12)


def test_a_constant_explains_nothing_however_well_its_cosine_looks(outputs):
    _, o = outputs
    found = compare(o.float().mean(0).expand_as(o), o)
    assert abs(float(found.explained)) < 1e-10
    assert float(found.centred_cosine) == 0
    assert float(found.cosine) > 0.9
    assert float(compare(o, o).explained) == 1


def interval(*bounds: tuple[float, float]) -> Interval:
    low, high = (torch.tensor(side) for side in zip(*bounds))
    return Interval((low + high) / 2, low, high)


@pytest.mark.parametrize(
    ("value", "null", "verdict", "layers"),
    [
        ([(0.5, 0.6), (0.4, 0.5)], [(0.1, 0.2), (0.1, 0.2)], "supported", [0, 1]),
        ([(0.5, 0.6), (0.4, 0.5)], [(0.1, 0.2), (0.1, 0.45)], "partly", [0]),  # not above the null
        ([(0.5, 0.6), (-0.1, 0.5)], [(-2, -1), (-2, -1)], "partly", [0]),  # not above 0
        ([(-2, -1), (-0.1, 0.5)], [(-4, -3), (-4, -3)], "not supported", []),
    ],
)
def test_the_verdict_needs_an_interval_above_0_and_above_every_null(value, null, verdict, layers):
    assert decide(interval(*value), [interval(*null)]) == (verdict, layers)
    assert decide(interval(*value), [interval(*null), interval((9, 10), (9, 10))]) == ("not supported", [])


def test_one_text_gives_no_interval_and_no_verdict():
    one = bootstrap(torch.tensor([[0.9], [0.8]]))
    assert one.mean.tolist() == pytest.approx([0.9, 0.8])
    assert not one.known
    assert decide(one, []) == (None, [])
    assert str(Finding(None, "So.")) == "So."


def test_the_bootstrap_covers_the_mean_as_often_as_it_says():
    values = torch.randn(300, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for level in (0.95, 0.5):
        seen = bootstrap(values, seed=0, level=level)
        covered = float(((seen.low < 0) & (seen.high > 0)).double().mean())
        assert abs(covered - level) < 0.07  # four standard errors of 300 trials at .5, and the percentile's own bias
    assert float((seen.mean - values.mean(-1)).abs().max()) < 1e-12


def test_a_ratio_of_means_resamples_both_together():
    below = torch.rand(3, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    seen = ratio_of_means(2 * below, below)
    assert torch.allclose(seen.low, torch.full((3,), 2.0, dtype=torch.float64))
    assert torch.allclose(seen.high, seen.low)


# --- the limiting law -------------------------------------------------------------------------------------------


def test_the_affine_drift_is_the_gaussian_closure():
    from attn_flow.attention import Attention
    from attn_flow.measures import Cloud, Gaussian

    generator = torch.Generator().manual_seed(2)
    A = Attention.random(6, 2, 3, beta=0.7, generator=generator, dtype=torch.float64)
    x = torch.randn(30, 6, generator=generator, dtype=torch.float64) + 1
    mean, cov = Cloud(x).moments()
    M, c = affine_drift(A, mean, cov)
    assert torch.allclose(A.drift(x, Gaussian(mean, cov)), x @ M.T + c, atol=1e-10)


def test_the_limit_of_a_linear_flow_is_where_a_long_flow_ends():
    generator = torch.Generator().manual_seed(4)
    M = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    M = M + M.T
    x = torch.nn.functional.normalize(torch.randn(7, 5, generator=generator, dtype=torch.float64), dim=-1)
    far = torch.nn.functional.normalize(
        x @ torch.linalg.matrix_exp(40 * (M - torch.linalg.eigvalsh(M)[-1] * torch.eye(5))).T, dim=-1
    )
    assert torch.allclose(torch.nn.functional.normalize(x @ limit_matrix(spectrum(M), M).T, dim=-1), far, atol=1e-6)


@pytest.mark.slow  # 27 s of spectra
def test_the_limit_law_of_eight_pages_is_the_one_found_elsewhere(encoder):
    """By a script that shares no code with the package, to its third digit, float32's roundings apart."""
    from attn_flow.hooks.demo import topics
    from attn_flow.probe.clouds import record_clouds
    from attn_flow.probe.limit_law import approach_to_limits

    pages = [text for text in topics() if len(text) > 900][:8]
    with pytest.warns(UserWarning, match="truncated"):
        clouds = record_clouds(*encoder, pages, max_length=160)
    found = approach_to_limits(clouds, torch.Generator().manual_seed(0))
    near = lambda *row: pytest.approx(row, abs=6e-4)
    assert found.if_held.mean(1).tolist() == near(0.918, 0.951, 0.979, 0.979, 0.980, 0.949)
    assert found.real.mean(1).tolist() == near(1.003, 0.989, 0.995, 1.001, 0.978, 0.995)
    assert found.dimension.tolist() == [1, 2, 2, 1, 1, 1]
