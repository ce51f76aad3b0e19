"""Coresets of keys and values: formulas beside loops, and planted clusters."""

import math

import pytest
import torch
from torch import Tensor

from attn_flow import coresets
from attn_flow.coresets import cluster_by_queries


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return (queries @ keys.mT).softmax(-1) @ values


@pytest.fixture
def planted() -> tuple[Tensor, Tensor, Tensor]:
    """Two heads with 40 tokens at 5 places each, in unequal numbers, and queries."""
    place = torch.cat([torch.full((count,), c) for c, count in enumerate((17, 11, 7, 4, 1))])
    place = torch.stack([place[torch.randperm(40, generator=torch.Generator().manual_seed(h))] for h in range(2)])
    keys, values = (draw(2, 5, f, seed=f).gather(1, place[..., None].expand(-1, -1, f)) for f in (3, 4))
    return keys, values, draw(2, 30, 3, seed=9)


def test_true_clusters_need_their_number(planted):
    keys, values, queries = planted
    others = draw(2, 50, 3, seed=11)
    truth = exact(queries, keys, values)
    error = lambda coreset: float((coreset.averages(queries) - truth).abs().amax())
    assert error(cluster_by_queries(keys, values, others, 5)) < 1e-9
    assert error(cluster_by_queries(keys, values, others, 4)) > 1e-2
    assert error(coresets.cluster_keys(keys, values, 5)) < 1e-9
    assert error(coresets.cluster_keys(keys, values, 4)) > 1e-2


def test_masses_are_what_their_formula_says():
    """log m_c = sum_i P_i(c) (log sum_{j in c} e^{q_i k_j} - q_i k_c) / sum_i P_i(c), in loops."""
    keys, values, queries = draw(1, 12, 3), draw(1, 12, 2, seed=1), draw(1, 7, 3, seed=2)
    labels = torch.tensor([[0, 1, 2, 0, 1, 2, 0, 0, 1, 2, 2, 2]])
    attention = (queries @ keys.mT).softmax(-1)
    coreset = coresets.merge(keys, values, queries, labels)
    for c in range(3):
        tokens = [j for j in range(12) if labels[0, j] == c]
        a = {j: sum(float(attention[0, i, j]) for i in range(7)) for j in tokens}
        key = sum(a[j] * keys[0, j] for j in tokens) / sum(a.values())
        value = sum(a[j] * values[0, j] for j in tokens) / sum(a.values())
        torch.testing.assert_close(coreset.keys[0, c], key, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(coreset.values[0, c], value, rtol=1e-6, atol=1e-8)
        above = below = 0.0
        for i in range(7):
            share = sum(float(attention[0, i, j]) for j in tokens)
            log_sum = math.log(sum(math.exp(float(queries[0, i] @ keys[0, j])) for j in tokens))
            above += share * (log_sum - float(queries[0, i] @ key))
            below += share
        assert float(coreset.log_masses[0, c]) == pytest.approx(above / below, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "rest"), [("cluster_by_queries", {}), ("top_tokens", {}), ("top_tokens", {"rest": True})]
)
def test_as_many_clusters_as_tokens_are_exact(name, rest):
    keys, values, queries = draw(2, 9, 3), draw(2, 9, 4, seed=1), draw(2, 6, 3, seed=2)
    coreset = getattr(coresets, name)(keys, values, draw(2, 20, 3, seed=3), 9, **rest)
    torch.testing.assert_close(coreset.averages(queries), exact(queries, keys, values))


def test_all_tokens_drawn_are_exact(generator):
    keys, values, queries = draw(2, 9, 3), draw(2, 9, 4, seed=1), draw(2, 6, 3, seed=2)
    special = torch.arange(9) < 2
    tokens = coresets.random_tokens(keys, values, special, 9, generator)
    torch.testing.assert_close(tokens.averages(queries), exact(queries, keys, values))
    tokens = coresets.leverage_sample(keys, values, 9, generator)
    torch.testing.assert_close(tokens.averages(queries), exact(queries, keys, values))
    averages = coresets.nystroem_averages(keys, values, queries, torch.full((2,), 1.7), 9)
    torch.testing.assert_close(averages, exact(queries, keys, values), rtol=1e-4, atol=1e-4)
    logits = queries @ keys.mT
    largest = coresets.top_k_averages(logits, values, 8)
    rest = logits.softmax(-1).amin(-1, keepdim=True)
    smallest = values.gather(1, logits.argmin(-1)[..., None].expand(-1, -1, 4))
    expected = exact(queries, keys, values) + rest * (values.mean(1, keepdim=True) - smallest)
    torch.testing.assert_close(largest, expected)


def test_pivots_are_different_keys():
    """Four different keys, each three times: four pivots are enough."""
    keys, values, queries = draw(2, 4, 3).repeat(1, 3, 1), draw(2, 4, 4, seed=1).repeat(1, 3, 1), draw(2, 6, 3, seed=2)
    averages = coresets.nystroem_averages(keys, values, queries, torch.full((2,), 1.7), 4)
    torch.testing.assert_close(averages, exact(queries, keys, values), rtol=1e-4, atol=1e-4)


def test_random_tokens_are_unbiased(generator):
    """Numerator and denominator of drawn tokens have the right mean; special tokens are never lost."""
    keys, values = 0.3 * draw(1, 20, 2), draw(1, 20, 1, seed=1)
    special = torch.arange(20) % 10 == 0
    sums = []
    for _ in range(4000):
        coreset = coresets.random_tokens(keys, values, special, 8, generator)
        sums.append((coreset.log_masses.exp()[..., None] * coreset.values).sum())
        assert all(bool((coreset.keys[0] == key).all(-1).any()) for key in keys[0, special])
    sums = torch.stack(sums)
    assert abs(float(sums.mean() - values.sum())) < 4 * float(sums.std()) / math.sqrt(len(sums))


def test_leverage_samples_are_unbiased_and_keep_what_no_other_key_spans(generator):
    """A single key in a direction of its own has the leverage score 1 and is drawn nearly always."""
    keys, values = 0.3 * draw(1, 20, 3), draw(1, 20, 1, seed=1)
    keys[..., 2] = 0.0
    keys[0, 7, 2] = 1.0
    sums, lonely = [], 0
    for _ in range(4000):
        coreset = coresets.leverage_sample(keys, values, 8, generator)
        assert coreset.keys.shape == (1, 8, 3)
        sums.append((coreset.log_masses.exp()[..., None] * coreset.values).sum())
        lonely += bool((coreset.keys[0, :, 2] > 0).any())
    sums = torch.stack(sums)
    assert abs(float(sums.mean() - values.sum())) < 4 * float(sums.std()) / math.sqrt(len(sums))
    assert lonely > 0.9 * len(sums)


def test_random_clusters_are_worse_than_those_found(planted, generator):
    keys, values, queries = planted
    truth = exact(queries, keys, values)
    chance = coresets.random_clusters(keys, values, queries, 5, generator).averages(queries)
    assert float((chance - truth).square().mean()) > 1e-3


def test_fits_lower_the_error_on_new_queries():
    keys, values = draw(2, 60, 4), draw(2, 60, 4, seed=1)
    seen, new = draw(2, 400, 4, seed=2), draw(2, 200, 4, seed=3)
    truth = exact(new, keys, values)
    error = lambda coreset: float((coreset.averages(new) - truth).square().mean())
    plain = cluster_by_queries(keys, values, seen, 8)
    fitted = coresets.fit(plain, keys, values, seen)
    assert error(fitted) < 0.85 * error(plain)


def test_the_low_rank_approximation_is_that_of_the_singular_values():
    logits, values = draw(2, 9, 9), draw(2, 9, 4, seed=1)
    U, S, V = torch.linalg.svd(logits.softmax(-1))
    expected = (U[..., :3] * S[:, None, :3]) @ V[:, :3] @ values
    torch.testing.assert_close(coresets.low_rank_averages(logits, values, 3), expected)


def test_predicted_queries_of_the_same_tokens_are_their_own():
    """A linear map of keys and values gives what it can, and residuals the rest."""
    keys, values, queries = draw(2, 30, 4), draw(2, 30, 4, seed=1), draw(2, 30, 4, seed=2)
    predicted = coresets.predict_queries(queries, (keys, values), keys, values)
    torch.testing.assert_close(predicted, queries)
    linear = keys + 2 * values + 0.5
    others = draw(2, 30, 4, seed=3), draw(2, 30, 4, seed=4)
    predicted = coresets.predict_queries(linear, (keys, values), *others)
    torch.testing.assert_close(predicted, others[0] + 2 * others[1] + 0.5, rtol=0, atol=0.05)  # the ridge is small
