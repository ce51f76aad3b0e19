"""Closures against loops over tokens and heads written from their definitions."""

import math

import pytest
import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.measures import Cloud
from attn_flow.probe.closures import CAP, LADDER, WINDOW, atoms_and_bulk, number_of_clusters, oracle, sinks
from attn_flow.probe.head_space import HeadSpace, as_heads_see
from attn_flow.probe.nulls import rotated
from attn_flow.probe.quantised import quantise

LOCAL = tuple(name for name, step in LADDER.items() if step.partial)


def small(n: int = 40, d: int = 8, heads: int = 2, causal: bool = False, beta: float = 0.7) -> HeadSpace:
    generator = torch.Generator().manual_seed(1)
    A = Attention.random(d, heads, 3, beta=beta, generator=generator, dtype=torch.float64, causal=causal)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    special = torch.zeros(n, dtype=torch.bool)
    special[0] = special[-1] = True
    return as_heads_see(A, x, special)


def scaled(space: HeadSpace) -> tuple[Tensor, Tensor, Tensor]:
    """beta q (heads, n, k), keys and values."""
    k = space.k
    return space.beta[..., None] * space.g[..., :k], space.y[..., :k], space.y[..., k:]


def test_the_cloud_itself_is_attention():
    space = small()
    assert torch.allclose(space.drift(Cloud(space.y)), space.attention.drift(space.x), atol=1e-12)


def test_atoms_alone_are_attention():
    """With all tokens but two as atoms, and those two identical, nothing is left to approximate."""
    space = small(n=12)
    x = space.x.clone()
    x[5] = x[6]
    special = torch.ones(12, dtype=torch.bool)
    special[5] = special[6] = False
    space = as_heads_see(space.attention, x, special)
    law = atoms_and_bulk(space, sinks(space, 0))
    assert torch.allclose(space.drift(law), space.attention.drift(x), atol=1e-12)


def saturated(s: float) -> float:
    return s**2 / 2 if s < CAP else s * CAP - CAP**2 / 2


@pytest.mark.parametrize("window", [(), (-1, 0, 1)])
def test_atoms_window_and_bulk_count_tokens(window):
    space = small(n=20, beta=2.0)
    atoms = sinks(space, 2)
    predicted = space.per_head(atoms_and_bulk(space, atoms, window))
    q, keys, values = scaled(space)
    for h in range(2):
        bulk = space.y[h][~atoms[h]]
        m, S = bulk.mean(0), torch.cov(bulk.T, correction=0)
        for i in range(20):
            chosen = [j for j in range(20) if atoms[h, j]]
            chosen += [i + w for w in window if 0 <= i + w < 20 and not atoms[h, i + w]]
            logits = [float(q[h, i] @ keys[h, j]) for j in chosen]
            means = [values[h, j] for j in chosen]
            g = torch.cat([q[h, i], torch.zeros_like(values[h, i])])
            s = math.sqrt(float(g @ S @ g))
            logits.append(math.log(len(bulk)) + float(g @ m) + saturated(s))
            means.append((m + min(1.0, CAP / s) * S @ g)[space.k :])
            p = torch.tensor(logits, dtype=torch.float64).softmax(0)
            assert torch.allclose(predicted[h, i], (p[:, None] * torch.stack(means)).sum(0), atol=1e-10)


def test_sinks_are_the_special_tokens_and_those_the_mean_query_scores_highest():
    space = small(n=15)
    for h in range(2):
        mean = space.g[h].mean(0)
        scores = {j: float(mean @ space.y[h, j]) for j in range(1, 14)}
        best = sorted(scores, key=lambda j: -scores[j])[:4]
        assert sinks(space)[h].nonzero()[:, 0].tolist() == sorted([0, 14, *best])


def test_the_oracle_knows_the_largest_weights_and_puts_all_others_at_the_mean():
    space = small(n=9, beta=3.0)
    predicted = space.per_head(oracle(space, 3))
    q, keys, values = scaled(space)
    for h in range(2):
        for i in range(9):
            p = torch.stack([q[h, i] @ keys[h, j] for j in range(9)]).softmax(0)
            top = sorted(range(9), key=lambda j: -float(p[j]))[:3]
            left = 1 - sum(float(p[j]) for j in top)
            average = sum(float(p[j]) * values[h, j] for j in top) + left * values[h].mean(0)
            assert torch.allclose(predicted[h, i], average, atol=1e-12)


@pytest.mark.parametrize("clusters", [1, 4, 8])
def test_the_criterion_finds_clusters_that_are_there(clusters):
    generator = torch.Generator().manual_seed(6)
    centres = 5 * torch.randn(clusters, 12, generator=generator, dtype=torch.float64)
    place = torch.arange(120) % clusters
    x = centres[place] + 0.3 * torch.randn(120, 12, generator=generator, dtype=torch.float64)
    label, number = number_of_clusters(x)
    assert number == clusters
    pairs = {(int(a), int(b)) for a, b in zip(place, label)}
    assert len(pairs) == clusters  # one cluster, one label


def test_the_criterion_is_bic_of_round_gaussians():
    """The number chosen has the least -2 log likelihood + log n for every number of the model, by a loop."""
    from attn_flow.probe.quantised import k_means

    generator = torch.Generator().manual_seed(7)
    x = torch.randn(64, 3, generator=generator, dtype=torch.float64) ** 3
    unit = x - x.mean(0)
    unit = unit / unit.square().sum(-1).mean().sqrt()
    n, d = x.shape
    bic = {}
    for K in (1, 2, 4, 8):
        label = k_means(unit[None], torch.full((1, n), 1 / n, dtype=torch.float64), 0.0, K)[0][0].tolist()
        members = [[i for i in range(n) if label[i] == c] for c in range(K)]
        away = sum(float((unit[i] - unit[m].mean(0)).square().sum()) for m in members for i in m)
        v = away / (d * (n - K))
        likelihood = sum(len(m) * math.log(len(m) / n) for m in members if m)
        likelihood -= n * d / 2 * math.log(2 * math.pi * v) + away / (2 * v)
        bic[K] = -2 * likelihood + K * (d + 1) * math.log(n)
    assert number_of_clusters(x)[1] == min(bic, key=bic.__getitem__)


# --- atoms of the heads -----------------------------------------------------------------------------------------


def test_an_atom_for_every_token_is_attention():
    """Half the tokens, each twice: as many atoms as there are different tokens, and nothing is left out."""
    space = small(n=20)
    x = torch.cat([space.x[:10], space.x[:10]])
    space = as_heads_see(space.attention, x)
    atoms = quantise(space, residual=1e-12)
    assert atoms.counts.tolist() == [10, 10]
    assert torch.allclose(space.drift(atoms.law(space)), space.attention.drift(x), atol=1e-9)


@pytest.mark.parametrize("window", [(), (-1, 0, 1)])
def test_masses_of_atoms_are_what_the_definition_says(window):
    space = small(n=16, beta=2.0)
    atoms = quantise(space, window=window)
    q, keys, _ = scaled(space)
    n = space.n
    for h in range(2):
        weight = (q[h] @ keys[h].T).exp()
        P = weight / weight.sum(-1, keepdim=True)
        for i in range(n):
            for w in window:
                if 0 <= i + w < n:
                    P[i, i + w] = 0.0
        a = P.sum(0) / P.sum()
        for c in range(atoms.y.shape[1]):
            members = [j for j in range(n) if int(atoms.label[h, j]) == c]
            if not members:
                assert float(atoms.log_mass[h, c]) == -math.inf
                continue
            mean = sum(a[j] * space.y[h, j] for j in members) / sum(a[j] for j in members)
            assert torch.allclose(atoms.y[h, c], mean, atol=1e-9)
            total, paid = 0.0, 0.0
            for i in range(n):
                outside = [j for j in members if j - i not in window]
                rest = float(sum(a[j] for j in outside) / sum(a[j] for j in members))
                if rest < 1e-3:
                    continue
                attention = float(P[i, members].sum())
                log_Z = math.log(sum(float(weight[i, j]) for j in outside))
                total += attention * (log_Z - math.log(rest) - float(q[h, i] @ mean[: space.k]))
                paid += attention
            assert float(atoms.log_mass[h, c]) == pytest.approx(total / paid, abs=1e-8)


def test_a_window_is_taken_out_of_the_atoms_again():
    """The law of query i: clusters without the tokens of its window, and those tokens themselves."""
    space = small(n=16, beta=2.0)
    atoms = quantise(space, window=(-1, 0, 1))
    predicted = space.per_head(atoms.law(space))
    q, keys, values = scaled(space)
    for h in range(2):
        for i in range(16):
            logits, means = [], []
            for c in range(atoms.y.shape[1]):
                members = [j for j in range(16) if int(atoms.label[h, j]) == c]
                left = [j for j in members if abs(j - i) > 1]
                rest = float(sum(atoms.share[h, j] for j in left))
                if rest < 1e-3:
                    continue
                logits.append(float(q[h, i] @ atoms.y[h, c, : space.k] + atoms.log_mass[h, c]) + math.log(rest))
                means.append(sum(atoms.share[h, j] * values[h, j] for j in left) / rest)
            for j in range(max(0, i - 1), min(16, i + 2)):
                logits.append(float(q[h, i] @ keys[h, j]))
                means.append(values[h, j])
            p = torch.tensor(logits, dtype=torch.float64).softmax(0)
            assert torch.allclose(predicted[h, i], (p[:, None] * torch.stack(means)).sum(0), atol=1e-8)


def test_rows_of_atoms_are_distributions_and_exact_where_nothing_is_merged():
    space = small(n=20)
    x = torch.cat([space.x[:10], space.x[:10]])
    space = as_heads_see(space.attention, x)
    rows = quantise(space, residual=1e-12).rows(space)
    assert torch.allclose(rows, space.logits.softmax(-1), atol=1e-9)
    assert torch.allclose(quantise(small()).rows(small()).sum(-1), torch.ones(2, 40, dtype=torch.float64))


def test_more_atoms_where_less_residual_is_allowed():
    space = small(n=40, beta=3.0)
    numbers = [int(quantise(space, residual=r).counts.sum()) for r in (1.0, 0.5, 0.2)]
    assert numbers[0] < numbers[1] < numbers[2]


# --- tokens that see a part of the text -------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOCAL)
def test_a_causal_prediction_does_not_know_the_future(name):
    space = small(causal=True)
    changed = space.x.clone()
    changed[20:] += torch.randn(20, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    other = as_heads_see(space.attention, changed, space.special)
    before, after = (s.drift(LADDER[name].measure(s)) for s in (space, other))
    assert torch.allclose(before[:20], after[:20], atol=1e-12)
    assert not torch.allclose(before[20:], after[20:])


@pytest.mark.parametrize("name", LOCAL)
def test_a_local_prediction_does_not_know_what_is_far(name):
    space = small()
    i = torch.arange(40)
    near = (i[:, None] - i).abs() <= 6
    changed = space.x.clone()
    changed[30:] += 1.0
    before, after = (
        s.drift(LADDER[name].measure(s))
        for s in (as_heads_see(space.attention, x, space.special, near) for x in (space.x, changed))
    )
    assert torch.allclose(before[:24], after[:24], atol=1e-12)


def test_atoms_for_all_queries_are_refused_where_tokens_are_hidden():
    with pytest.raises(ValueError, match="this attention hides some"):
        quantise(small(causal=True))


# --- costs and errors -------------------------------------------------------------------------------------------


def test_costs_count_numbers_and_exact_tokens():
    space = small()
    k, v = 3, 3
    moments = k + v + k * (k + 1) // 2 + k * v
    assert LADDER["gaussian_closure"].cost(space).numbers == moments
    window = LADDER["window_closure"].cost(space)
    assert (window.numbers, window.own_tokens) == (moments + 6 * (k + v), len(WINDOW))
    atoms = quantise(space).counts.double().mean()
    assert LADDER["quantised_closure"].cost(space).numbers == pytest.approx(float(atoms) * (k + v + 1))


def test_every_closure_runs_on_a_random_attention():
    space = small()
    for name, step in LADDER.items():
        assert space.drift(step.measure(space)).shape == space.x.shape
        assert "closure" in name


def test_a_text_of_atoms_only_says_so():
    space = small(n=6)
    with pytest.raises(ValueError, match="leaves no bulk"):
        atoms_and_bulk(space, torch.tensor([True] * 5 + [False]).expand(2, 6))


def test_rotation_keeps_the_spectrum_of_G():
    A = small().attention
    B = rotated(A, torch.Generator().manual_seed(3))
    for h in range(A.heads):
        before, after = (torch.linalg.eigvals(M.G[h]).abs().sort().values for M in (A, B))
        assert torch.allclose(before, after, atol=1e-5)  # the rotation is drawn in float32
    assert not torch.allclose(A.G, B.G, atol=1e-2)
