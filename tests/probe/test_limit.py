"""Question 4 against literal code, its laws, and small systems in which the answer is known."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from limit_systems import recording_of, theorem_system
from scipy.linalg import eig
from scipy.optimize import linear_sum_assignment

from attn_flow import Attention
from attn_flow.prediction import spectrum
from attn_flow.probe.limit import LimitApproach, holm, measure_limit, sequential_p
from attn_flow.probe.limit_flow import leading_subspace
from attn_flow.probe.replacement import w2
from attn_flow.transport import solve


def small_recording(generator: torch.Generator, tied: bool = False, texts: int = 3, n: int = 12, d: int = 4):
    """Random tokens of three levels and two layers of two heads."""
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    layers = [Attention(draw(2, 2, d), draw(2, 2, d), draw(2, 3, d), draw(2, d, 3), beta=0.3) for _ in range(2)]
    states = [[draw(n + t, d) + 0.5 for t in range(texts)] for _ in range(3)]
    return recording_of([layers[0], layers[0 if tied else 1]], states)


def measure(recording, seed: int = 0, horizon: float = 1.0, steps: int = 1, **options) -> LimitApproach:
    recording = replace(recording, horizon=horizon, steps=steps)
    return measure_limit(recording, torch.Generator().manual_seed(seed), **options)


def literal(recording, layer: int, first: int, text: int, horizon: float) -> tuple[float, float]:
    """Agreement and reduction of W2 of one text, token by token in numpy."""
    A = recording.attentions[layer]
    Q, K, V, O = (getattr(A, name).numpy() for name in "QKVO")
    d, beta = A.dim, float(A.beta)
    start_cloud = np.concatenate([x.numpy() for x in recording.states[first]])
    S = sum(np.outer(x - start_cloud.mean(0), x - start_cloud.mean(0)) for x in start_cloud) / len(start_cloud)
    M = sum(beta * O[h] @ V[h] @ S @ K[h].T @ Q[h] for h in range(2))
    values, left, right = eig(M, left=True, right=True)
    top = np.abs(values.real - values.real.max()) < 1e-9
    Pi = sum(np.outer(right[:, i], left[:, i].conj()) / (left[:, i].conj() @ right[:, i]) for i in np.flatnonzero(top))
    mean_length = sum(len(x) for x in recording.states[0]) / recording.texts
    max_shift = math.sqrt(min(d, 2 * math.log(mean_length)))
    made, expected, targets = [], [], []
    unit = lambda v: v / np.linalg.norm(v)
    start, before, after = (recording.states[level][text].numpy() for level in (first, layer, layer + 1))
    for x0, x, y in zip(start, before, after):
        drift = np.zeros(d)
        for h in range(2):
            g = K[h].T @ Q[h] @ x
            s = beta * math.sqrt(g @ S @ g)
            drift += beta * O[h] @ V[h] @ S @ g / math.sqrt(1 + (s / max_shift) ** 2)
        target = unit((Pi @ x0).real)
        targets.append(target)
        made.append(unit(y) @ target - unit(x) @ target)
        expected.append(unit(x + horizon * drift) @ target - unit(x) @ target)
    made, expected = np.array(made), np.array(expected)

    def transport(cloud):
        cost = [[np.sum((unit(x) - t) ** 2) for t in targets] for x in cloud]
        rows, columns = linear_sum_assignment(cost)
        return math.sqrt(np.mean([cost[i][j] for i, j in zip(rows, columns)]))

    agreement = made @ expected / np.linalg.norm(made) / np.linalg.norm(expected)
    return float(agreement), 1 - transport(after) / transport(before)


@pytest.mark.parametrize("tied", [False, True])
def test_agreement_and_reduction_are_what_their_definitions_say(generator, tied):
    recording = small_recording(generator, tied)
    measured = measure(recording, horizon=0.7, rotations=1)
    for layer in range(2):
        for text in range(3):
            agreement, reduction = literal(recording, layer, 0 if tied else layer, text, 0.7)
            assert float(measured.agreement[layer, text]) == pytest.approx(agreement, abs=1e-8)
            assert float(measured.reduction[layer, text]) == pytest.approx(reduction, abs=1e-8)


def test_a_rotation_of_tokens_and_weights_changes_nothing(generator):
    recording = small_recording(generator)
    R = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64))[0]
    turned = recording_of(
        [Attention(A.Q @ R.mT, A.K @ R.mT, A.V @ R.mT, R @ A.O, beta=A.beta) for A in recording.attentions],
        [[x @ R.mT for x in level] for level in recording.states],
    )
    one, other = measure(recording, rotations=1), measure(turned, rotations=1)
    for name in ("agreement", "reduction", "flow_reduction", "permuted_heads", "other_layers"):
        assert torch.allclose(getattr(one, name), getattr(other, name), atol=1e-8), name


@pytest.mark.parametrize("kind", ["real", "complex"])
def test_the_leading_subspace_of_a_large_matrix_is_that_of_the_schur_form(generator, kind):
    d = 90
    M = torch.randn(d, d, generator=generator, dtype=torch.float64) / d**0.5
    M[:2, :2] = torch.tensor([[2.0, 0.5], [0.0, 1.0]]) if kind == "real" else torch.tensor([[2.0, 0.6], [-0.6, 2.0]])
    U, W = leading_subspace(M)
    assert U.shape == (d, 1 if kind == "real" else 2)
    assert torch.allclose(U @ W, spectrum(M).projector, atol=1e-4)


def test_a_matrix_of_low_rank_without_positive_eigenvalues_has_the_limit_of_the_schur_form(generator):
    a = torch.randn(80, 2, generator=generator, dtype=torch.float64)
    U, W = leading_subspace(-a @ a.mT)
    assert U.shape == (80, 78)
    assert torch.allclose(U @ W @ a, torch.zeros_like(a), atol=1e-8)


def test_sequential_p_values_are_valid(generator):
    """Under the null hypothesis p <= a has probability at most a, and the test ends early."""
    draws, own = torch.rand(4000, 199, generator=generator), torch.rand(4000, generator=generator)
    p = torch.tensor([sequential_p(float(t), row) for t, row in zip(own, draws)])
    for a in (0.01, 0.05, 0.2, 0.5):
        assert (p <= a).double().mean() <= a + 3 * (a * (1 - a) / 4000) ** 0.5
    assert (p <= 0.5).double().mean() >= 0.45


def test_holm_is_its_definition():
    p = [0.04, 0.001, 0.03, 0.011]
    assert holm(p) == [1, 3]  # 0.001 * 4 and 0.011 * 3 pass, 0.03 * 2 does not


@pytest.mark.parametrize(("d", "horizon"), [(3, 0.25), (5, 0.05), (5, 0.5)])
def test_a_system_of_the_theorem_is_supported(d, horizon):
    finding = measure(theorem_system(1, d, horizon, n=200), horizon=horizon, steps=8).finding()
    assert finding.verdict == "supported"
    assert finding.numbers["global_p"] <= 0.015
    layer, flow = (sum(finding.numbers[f"percent_of_{name}"]) for name in ("distance", "flow"))
    assert 0.35 <= layer / flow <= 1.5  # the horizon is part of the unit; the flow never rests
    assert finding.numbers["rivals"]["permuted_heads"] is None  # one head
    assert finding.numbers["rivals"]["other_layers"] is None  # the layers share their weights


def test_weights_of_something_else_are_not_supported():
    """The same tokens under 20 random weights; 3 or more of 20 have probability 0.02 at a rate of 0.05."""
    system = theorem_system(0, 5, 0.25, n=100)
    verdicts = []
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        one = replace(system, attentions=system.attentions[:1], states=system.states[:2])
        attention = Attention.from_matrices(*torch.randn(2, 5, 5, generator=g, dtype=torch.float64), beta=2.0)
        verdicts.append(measure(replace(one, attentions=[attention]), seed, rotations=59).finding().verdict)
    assert verdicts.count("not supported") >= 18


def test_a_reversed_flow_is_not_supported():
    system = theorem_system(2, 5, 0.25, n=200)
    back = replace(system, states=system.states[::-1])
    finding = measure(back, horizon=0.25).finding()
    assert finding.verdict == "not supported"
    assert finding.numbers["global_p"] > 0.3


@pytest.mark.parametrize(
    ("own", "rival", "verdict", "words"),
    [
        ([0.5, 0.5, 0.5], 0.1, "supported", "every layer"),
        ([0.5, 0.0, 0.0], 0.1, "partly", "layer 0"),
        ([0.0, 0.0, 0.0], -0.1, "not supported", "no more than of rotated weights"),
        ([0.5, 0.5, 0.5], 0.6, "not supported", "The limit of permuted heads"),
    ],
)
def test_the_rule_of_the_verdict(generator, own, rival, verdict, words):
    """Agreements made by hand, 199 rotations around 0: the global p, then the rivals, then the number of layers."""
    agreement = torch.tensor(own, dtype=torch.float64)[:, None].expand(3, 8)
    rotated = 0.05 * torch.randn(3, 199, generator=generator, dtype=torch.float64)
    shrinks = torch.full((3, 8), 0.01, dtype=torch.float64)
    rivals = torch.tensor([rival], dtype=torch.float64)
    finding = LimitApproach(agreement, rotated, rivals, torch.zeros(0), shrinks, 2 * shrinks).finding()
    assert finding.verdict == verdict
    assert words in finding.text
    assert "shrinks by 1.0% a layer" in finding.text
    assert ("0.50 of what the flow would do" in finding.text) == (verdict != "not supported")
    assert f"p = {finding.numbers['global_p']:.2g} against rotated weights" in finding.text
    assert finding.numbers["fraction"] == pytest.approx([0.5] * 3)
    few = LimitApproach(agreement[:, :7], rotated, rivals, torch.zeros(0), shrinks[:, :7], shrinks[:, :7]).finding()
    assert few.verdict is None
    assert "7 of 8 texts" in few.text


def test_the_answer_follows_from_the_seed(generator):
    recording, shares = small_recording(generator), []
    one = measure(recording, rotations=19, progress=shares.append).rotated
    two, other = (measure(recording, seed, rotations=19).rotated for seed in (0, 1))
    assert torch.equal(one.nan_to_num(), two.nan_to_num())
    assert not torch.equal(one.nan_to_num(), other.nan_to_num())
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_geomloss_agrees_with_exact_transport_within_its_bound(generator):
    x, y = (torch.nn.functional.normalize(torch.randn(60, 8, generator=generator), dim=-1) for _ in range(2))
    y = y + 0.5
    bound = float(solve(x, y, method="sinkhorn", rtol=0.2).error)
    assert abs(w2(x, y, "geomloss") - w2(x, y, "exact")) <= bound + 1e-6
    assert w2(x, y, "auto") == w2(x, y, "exact")
    assert w2(x, x, "geomloss") == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
def test_minilm_moves_towards_its_limits_as_measured_elsewhere(encoder):
    """W2 to the limit on 16 help pages, in percent, and the layers that rotated weights do not reach."""
    from attn_flow.hooks.demo import topics
    from attn_flow.probe.encoders import record_encoder

    pages = [text for text in topics() if len(text) > 900][:16]
    numbers = measure(record_encoder(*encoder, pages, max_length=160)).finding().numbers
    assert numbers["percent_of_distance"][:5] == pytest.approx([-0.4, 1.0, 0.4, -0.6, 2.9], abs=0.25)
    assert numbers["fraction"][4] == pytest.approx(1.17, abs=0.1)
    assert numbers["p_value"][4] <= 0.02
    assert min(numbers["p_value"][i] for i in (0, 1, 3, 5)) > 0.1
    assert numbers["global_p"] > 0.05
