"""What predictions assume: conditions that are checked, and no number where the theory does not hold."""

import math

import numpy as np
import pytest
import torch
from inputs import F64, diag, matrix, skewed, tokens

from attn_flow import (
    Attention,
    Cloud,
    EllipsoidSupport,
    Sphere,
    UniformSphere,
    flow,
    limit,
    phases,
    resolution,
)
from attn_flow.measures import quadrature
from attn_flow.prediction import w2_curve, zero_temperature_flow

EYE2, EYE3 = torch.eye(2, dtype=F64), torch.eye(3, dtype=F64)


def met(needs: tuple) -> dict[str, bool | None]:
    return {need.name: need.met for need in needs}


# --- no t_min where its theory does not hold --------------------------------------------------------------------

a = math.radians(40)
TURNED = matrix([math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]) @ diag(2, 1.2)
WITHOUT_T_MIN = {
    "E invariant under V": (TURNED, diag(2, 1) @ torch.linalg.inv(TURNED)),
    "clusters leave": (diag(1, 3), diag(3, 0.5)),
    "simple leading eigenvalue": (diag(2, 2, 1), EYE3),
}


@pytest.mark.parametrize("condition", WITHOUT_T_MIN)
def test_t_min_refuses_and_names_the_condition(condition: str) -> None:
    result = limit(Attention.from_matrices(*WITHOUT_T_MIN[condition]))
    assert result.t_min(30.0) is None
    assert [need.name for need in result.requires if need.met is False] == [condition]
    text = next(need.text for need in result.requires if need.name == condition)
    assert "t_min" in text
    assert result.as_dict()["requires"]


def test_clusters_do_not_leave_at_once_where_V_turns_the_limit() -> None:
    """W2 is least at t = 5.0 for beta = 15 and later for 30, where log(beta)/(2g) gives 2.7 and 3.4."""
    G, V = WITHOUT_T_MIN["E invariant under V"]
    for beta, t_min in ((15.0, 5.0), (30.0, 6.6)):
        A = Attention.from_matrices(G, V, beta=beta)
        result = phases(flow(A, skewed(600), torch.linspace(0, 10, 51), h=0.1), limit(A))
        assert float(result.t_min) == pytest.approx(t_min, abs=0.5)


def test_without_an_exit_w2_has_no_least_value() -> None:
    A = Attention.from_matrices(*WITHOUT_T_MIN["clusters leave"], beta=100.0)
    cloud = quadrature.circle(400, lambda theta: torch.exp(torch.cos(theta - 1)), towards=math.pi / 2)
    w2 = w2_curve(flow(A, cloud, [0.0, 10.0, 20.0, 30.0], h=0.2), limit(A))
    assert bool((w2[1:] <= w2[:-1] * (1 + 1e-6)).all())


def test_tokens_that_attend_to_a_fixed_context_stay() -> None:
    """W2 of G = diag(3, 1), V = diag(1, 2) has a least value near t = 5 only if tokens attend to each other."""
    for context in (UniformSphere(2), EllipsoidSupport(torch.zeros(2, dtype=F64), EYE2, 1.0)):
        A = Attention.from_matrices(diag(3, 1), diag(1, 2), beta=30.0, context=context)
        target = limit(A)
        result = phases(flow(A, skewed(100), torch.linspace(0, 16, 17), h=0.2), target)
        assert [phase.name for phase in result.intervals] == ["concentrating"]
        assert (target.exit_rate, target.t_min(30.0)) == (0.0, None)
        assert met(result.requires) == {"bounded density": None, "clusters leave": False}
        assert "They stay there: W2 has no least value" in target._repr_html_()


def test_t_min_where_the_tail_is_slow() -> None:
    result = limit(Attention.from_matrices(diag(1.1, 1), diag(1, 1.05)))
    g, c, exit_rate = 0.05 / 1.1, 0.025, 0.05
    assert (result.rates.g, result.rates.decay(), result.terminal.exit_rate) == pytest.approx((g, c, exit_rate))
    assert result.t_min(1e4) == pytest.approx(math.log(1e4) / (2 * g) * (g + exit_rate) / (c + exit_rate))


@pytest.mark.parametrize(("beta", "t_min", "least"), [(1000.0, 10.5, 0.058), (10_000.0, 14.0, 0.019)])
def test_t_min_where_its_theory_holds(beta: float, t_min: float, least: float) -> None:
    A = Attention.from_matrices(diag(3, 1), diag(1, 2), beta=beta)
    assert limit(A).t_min(beta) == pytest.approx(1.5 * math.log(beta))
    result = phases(flow(A, skewed(800), torch.linspace(0, 16, 65), h=0.1), limit(A))
    assert (float(result.t_min), float(result.min_w2)) == (
        pytest.approx(t_min, abs=0.3),
        pytest.approx(least, abs=1e-3),
    )


# --- what a cloud must be ---------------------------------------------------------------------------------------


def test_a_cloud_that_meets_everything() -> None:
    result = limit(Attention.from_matrices(diag(4, 1), diag(1, 2)))
    needs = met(result.examine(skewed(200), beta=100.0))
    assert set(needs.values()) <= {True, None}
    assert needs["asymmetric distribution"] is needs["enough tokens"] is True
    assert needs["little sampling noise"] is None  # nodes of a quadrature have none


def test_symmetric_distributions() -> None:
    result = limit(Attention.from_matrices(diag(4, 1), diag(1, 2)))
    x = tokens(1000, 2)
    assert met(result.examine(quadrature.circle(100)))["asymmetric distribution"] is False
    assert met(result.examine(x))["asymmetric distribution"] is False  # asymmetric by chance alone
    assert "by chance; use a quadrature" in str(result.examine(x)[-1])
    assert met(result.examine(Sphere().retract(x + matrix([0.3, 0.3]))))["asymmetric distribution"] is True
    assert met(result.examine(Cloud(x, torch.ones(1000, dtype=F64))))["asymmetric distribution"] is True
    # Clusters leave along the largest V_i: an asymmetry along another axis does not count.
    leaving = limit(Attention.from_matrices(diag(9, 1, 1), diag(1, 3, 2)))
    signs = torch.tensor([[1.0, b, c] for b in (-1, 1) for c in (-1, 1)], dtype=F64)
    even = (tokens(20, 3)[:, None] * signs).flatten(0, 1)
    for axis in (1, 2):
        cloud = Cloud(even, 1 + 0.3 * even[:, axis])
        assert met(leaving.examine(cloud))["asymmetric distribution"] is (axis == 1)
    shear = limit(Attention.from_matrices(matrix([9, 0, 0], [0, 1, 0.01], [0, 0, 1]), diag(1, 3, 2)))
    assert met(shear.examine(Cloud(even, torch.ones(80, dtype=F64))))["asymmetric distribution"] is True


def test_mass_where_tokens_linger() -> None:
    """c_2 = kappa/2 is the rate of tokens near +-e_2; a distribution that has none there falls at g."""
    result = limit(Attention.from_matrices(diag(1, 3), diag(3, 0.5)))
    nodes = quadrature.circle(4000)
    for threshold, rate in ((0.0, 0.25), (0.7, 1.5)):
        x = nodes.x[nodes.x[:, 0].abs() > threshold]
        w2 = w2_curve(zero_temperature_flow(result.attention, x, [0.0, 8.0, 9.0]), result)
        assert float(torch.log(w2[1] / w2[2])) == pytest.approx(rate, rel=0.02)
    assert met(result.requires)["bounded density"] is None


def test_requirements_of_other_cases() -> None:
    few = limit(Attention.from_matrices(diag(3, *[1] * 9), torch.eye(10, dtype=F64)))
    assert met(few.examine(tokens(20, 10), beta=100.0))["enough tokens"] is False
    assert "unequal crossing masses" in met(limit(Attention.from_matrices(EYE2, matrix([1, 1], [0, 1]))).requires)
    assert met(limit(Attention.identity(3)).requires) == {"enough tokens": None}
    with pytest.raises(ValueError, match=r"expected one cloud \(n, 10\)"):
        few.examine(tokens(20, 3))


def test_a_random_sample_goes_elsewhere_if_it_is_noisy() -> None:
    """At beta = 300 nodes come to W2 = 0.10; 300 random tokens stop above twice that, though n resolves the argmax."""
    G, V = diag(3, 1), diag(1, 2)
    many = skewed(60_000)
    chosen = torch.multinomial(many.weights, 300, True, generator=torch.Generator().manual_seed(0))
    for beta, is_noisy in ((3.0, False), (300.0, True)):
        A, t = Attention.from_matrices(G, V, beta=beta), torch.linspace(0, 10, 41)
        smooth = phases(flow(A, skewed(300), t, h=0.1), limit(A))
        sample = phases(flow(A, many.x[chosen], t, h=0.1), limit(A))
        assert (float(sample.min_w2) > 2 * float(smooth.min_w2)) is is_noisy
        assert met(sample.requires)["little sampling noise"] is not is_noisy
        assert any("use a quadrature" in doubt for doubt in sample.doubts) is is_noisy


# --- resolution -------------------------------------------------------------------------------------------------


def test_resolution_against_loops() -> None:
    """Two heads with biases, a batch of clouds with weights and padding."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=F64)
    Q, bias, x, w = draw(2, 3, 3), draw(2, 3), draw(2, 7, 3), draw(7).exp()
    beta, mask = torch.tensor([1.3, 0.2], dtype=F64), torch.ones(2, 7, dtype=torch.bool)
    mask[1, 5:] = False
    result = resolution(Attention(Q, beta=beta, query_bias=bias), Cloud(x, w, mask))
    for b, h in np.ndindex(2, 2):
        p = w * mask[b] / (w * mask[b]).sum()
        n = 1 / float(p.square().sum())
        g = x[b] @ Q[h].T + bias[h]
        reach = float((p * g.norm(dim=-1) * x[b].norm(dim=-1)).sum() * beta[h])
        assert float(result.n[b]) == pytest.approx(n)
        assert float(result.number[b, h]) == pytest.approx(reach / n)  # n^{-2/(d-1)} in d = 3
        assert float(result.noise[b, h]) == pytest.approx(reach**2 / n)
        scores = (g @ x[b].T).masked_fill(~mask[b], -math.inf)
        own = float((p * (scores.argmax(-1) == torch.arange(7))).sum())
        assert float(result.self_argmax[b, h]) == pytest.approx(own)


def test_resolution_of_the_specification() -> None:
    """d = 10, n = 1000, G = diag(3,1,...): 94% of tokens are their own argmax."""
    A = Attention.from_matrices(diag(3, *[1] * 9), torch.eye(10, dtype=F64), beta=100.0)
    result = resolution(A, tokens(1000, 10))
    assert result.verdict == "unresolved"
    assert float(result.self_argmax) == pytest.approx(0.94, abs=0.02)
    for radius in (1e-3, 1e3):  # on any sphere every token is its own argmax of <x, y>
        x = (radius * tokens(400, 60)).float()
        assert float(resolution(Attention.identity(60, 1e-9), x).self_argmax) == pytest.approx(1.0)


def test_verdicts_go_by_the_numbers() -> None:
    x = tokens(1000, 3)
    unit = resolution(Attention.identity(3, 1.0), x)
    nodes = Cloud(x, torch.ones(1000, dtype=F64))
    for number, verdict in ((0.099, "resolved"), (0.101, "marginal"), (0.99, "marginal"), (1.01, "unresolved")):
        beta = number / float(unit.number)
        assert resolution(Attention.identity(3, beta), nodes).verdict == verdict
    for noise, verdict in ((0.9, "resolved"), (1.1, "noisy")):
        beta = math.sqrt(noise / float(unit.noise))
        assert resolution(Attention.identity(3, beta), x).verdict == verdict
