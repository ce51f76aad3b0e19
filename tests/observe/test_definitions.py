"""Each number of a cloud as its sum written out: in batches, with weights, padding and blocks; and what is refused."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.observe.quantities import (
    _rows,
    alignment,
    attention_statistics,
    close_pairs,
    clusters,
    diameter,
    effective_beta,
    effective_rank,
    energy,
    log_energy,
    pairwise_cosines,
)
from attn_flow.observe.tracking import track

F64 = torch.float64


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


X = drawn(2, 3, 6, 4)  # two by three clouds of six tokens
WEIGHTS = drawn(3, 6, seed=1).exp()
MASK = torch.ones(2, 3, 6, dtype=torch.bool)
MASK[0, 1, 4:] = False
MASK[1, :, 0] = False
SHARES = WEIGHTS * MASK / (WEIGHTS * MASK).sum(-1, keepdim=True)
CLOUDS = list(itertools.product(range(2), range(3)))


@pytest.mark.parametrize("heads", [None, (2,), (3, 2), (2, 1, 5)])
def test_the_energy_of_a_batch_is_each_double_sum(heads: tuple[int, ...] | None) -> None:
    beta = 0.4
    G = None if heads is None else drawn(*heads, 4, 4, seed=2)
    found = log_energy(X, beta, G, weights=WEIGHTS, mask=MASK)
    assert found.shape == (2, 3)
    of_each = torch.eye(4, dtype=F64).expand(2, 3, 1, 4, 4) if G is None else G.expand(2, 3, heads[-1], 4, 4)
    for b in CLOUDS:
        x, p = X[b], SHARES[b]
        total = sum(
            float(p[i] * p[j]) * math.exp(beta * float(x[i] @ A @ x[j]))
            for A in of_each[b]
            for i in range(6)
            for j in range(6)
        )
        assert float(found[b]) == pytest.approx(math.log(total / (2 * beta)), rel=1e-12)


@pytest.mark.parametrize("G", [torch.ones(4, dtype=F64), torch.ones(2, 4, 3, dtype=F64), torch.ones(3, 3, dtype=F64)])
def test_an_energy_needs_square_matrices(G: Tensor) -> None:
    with pytest.raises(ValueError, match=r"G has shape .*, expected \(d, d\) or \(..., heads, d, d\) with d = 4"):
        log_energy(X, 1.0, G)


def test_one_energy_that_overflows_is_enough() -> None:
    x = torch.stack([torch.zeros(3, 2, dtype=F64), torch.full((3, 2), 40.0, dtype=F64)])
    assert float(energy(x[:1], 1.0)) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="use log_energy"):
        energy(x, 1.0)


@pytest.mark.parametrize("entries", [1, 100, 10**6])
def test_the_diameter_of_every_cloud(entries: int) -> None:
    found = diameter(X, mask=MASK, entries=entries)
    for b in CLOUDS:
        shown = X[b][MASK[b]]
        assert float(found[b]) == pytest.approx(max(float((a - c).norm()) for a in shown for c in shown), rel=1e-15)
    assert float(diameter(X[0, 0], entries=entries)) == pytest.approx(float(torch.cdist(X[0, 0], X[0, 0]).max()))


@pytest.mark.parametrize("entries", [1, 1000, 5000])
def test_blocks_of_rows_cover_all_and_hold_no_more_than_asked(entries: int) -> None:
    x = drawn(3, 2, 17, 2)
    blocks = [list(range(17))[rows] for rows in _rows(x, 5, entries)]
    assert list(itertools.chain(*blocks)) == list(range(17))
    most = max(1, entries // (17 * 6 * 5))
    assert all(len(block) == most for block in blocks[:-1])
    assert 1 <= len(blocks[-1]) <= most


@pytest.mark.parametrize("entries", [1, 10**6])
def test_clusters_of_a_batch_their_masses_and_speeds(entries: int) -> None:
    """Chains of steps of .9, .5 and 1.1 at tol = 1; the cluster's mass at each token; speeds of tokens that count."""
    x = torch.tensor([[0.0, 0.9, 5.0, 1.4, 5.5, 9.0], [0.0, 1.1, 2.2, 3.3, 4.4, 4.9]], dtype=F64)[..., None]
    mask = torch.tensor([[True] * 5 + [False], [True] * 6])
    w = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=F64)
    velocity = torch.tensor([[1.0, -7.0, 2.0, 3.0, 0.0, 50.0], [1.0, 2.0, 3.0, -4.0, 0.5, 0.0]], dtype=F64)[..., None]
    found = clusters(x, 1.0, weights=w, mask=mask, velocity=velocity, entries=entries)
    assert found.labels.tolist() == [[0, 0, 1, 0, 1, -1], [0, 1, 2, 3, 4, 4]]
    assert found.counts.tolist() == [2, 5]
    expected = [[7 / 15, 7 / 15, 8 / 15, 7 / 15, 8 / 15, 0], [1 / 21, 2 / 21, 3 / 21, 4 / 21, 11 / 21, 11 / 21]]
    torch.testing.assert_close(found.mass, torch.tensor(expected, dtype=F64))
    assert found.speed is not None
    assert found.speed.tolist() == [7.0, 4.0]
    assert clusters(x, 1.0).speed is None


@pytest.mark.parametrize("shape", [(1,), (6, 2), (3, 6, 1)])
def test_velocities_of_other_tokens_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"velocity has shape .*, expected that of x, \(2, 6, 1\)"):
        clusters(torch.zeros(2, 6, 1, dtype=F64), 1.0, velocity=torch.zeros(shape, dtype=F64))


@pytest.mark.parametrize("entries", [1, 10**6])
def test_cosines_of_a_batch_are_counted_pair_by_pair(entries: int) -> None:
    x = X.clone()
    x[..., 5, :] = 2 * x[..., 2, :]  # cos = 1, which belongs to the last bin
    bins = 8
    histogram, edges = pairwise_cosines(x, bins, weights=WEIGHTS, mask=MASK, entries=entries)
    assert edges.tolist() == pytest.approx([-1 + i / 4 for i in range(9)], abs=1e-15)
    close = close_pairs(x, 0.3, weights=WEIGHTS, mask=MASK)
    for b in CLOUDS:
        expected, above, total = [0.0] * bins, 0.0, 0.0
        for i, j in itertools.permutations(range(6), 2):
            mass = float(SHARES[b][i] * SHARES[b][j])
            cosine = float(x[b][i] @ x[b][j] / (x[b][i].norm() * x[b][j].norm()))
            expected[min(int((cosine + 1) * 4), bins - 1)] += mass
            above, total = above + mass * (cosine > 0.3), total + mass
        assert histogram[b].tolist() == pytest.approx([m / total for m in expected], abs=1e-14)
        assert float(close[b]) == pytest.approx(above / total, abs=1e-14)


def test_pairs_are_close_from_999_on_if_nothing_else_is_said() -> None:
    pair = lambda cosine: torch.tensor([[1.0, 0.0], [cosine, math.sqrt(1 - cosine**2)]], dtype=F64)
    assert [float(close_pairs(pair(c))) for c in (0.6, 0.9985, 0.9995)] == [0.0, 0.0, 1.0]
    for cosine in (-1.01, 1.01):
        with pytest.raises(ValueError, match="expected a number from -1 to 1"):
            close_pairs(pair(0.5), cosine)
    assert pairwise_cosines(pair(0.5))[0].shape == (100,)


def test_one_cloud_without_pairs_or_directions_is_enough() -> None:
    x, mask = X[0].clone(), torch.ones(3, 6, dtype=torch.bool)
    mask[1, 1:] = False
    with pytest.raises(ValueError, match="a cloud has one token only: no pair to compare"):
        close_pairs(x, mask=mask)
    x[2, 3] = 0.0
    with pytest.raises(ValueError, match="x has a zero token, which has no direction"):
        close_pairs(x)
    shown = torch.ones(3, 6, dtype=torch.bool)
    shown[2, 3] = False
    assert bool(torch.isfinite(close_pairs(x, mask=shown)).all())  # padding needs none


@pytest.mark.parametrize("centred", [False, True])
def test_the_effective_rank_of_weighted_clouds(centred: bool) -> None:
    """A token of weight k is k tokens; entropy of the singular values, written out."""
    x, w = drawn(2, 4, 3), torch.tensor([3.0, 1.0, 2.0, 1.0], dtype=F64)
    found = effective_rank(x, weights=w, centred=centred)
    for b in range(2):
        copies = x[b].repeat_interleave(w.long(), dim=0)
        sigma = torch.linalg.svdvals(copies - copies.mean(0) if centred else copies)
        p = (sigma / sigma.sum()).tolist()
        assert float(found[b]) == pytest.approx(math.exp(-sum(q * math.log(q) for q in p)), rel=1e-12)
    x[1] = 1.0 if centred else 0.0
    with pytest.raises(ValueError, match="the cloud has no rank"):
        effective_rank(x, centred=centred)


EYE = torch.eye(5, dtype=F64)


@pytest.mark.parametrize("basis", [EYE[0, :4], EYE[None, :4, :2], EYE[:3, :2], EYE[:4], EYE[:4, :0]])
def test_what_is_no_basis(basis: Tensor) -> None:
    with pytest.raises(
        ValueError, match=r"basis has shape .*, expected \(d, k\) with d = 4 to match x and 1 <= k <= d"
    ):
        alignment(X, basis)
    torch.testing.assert_close(alignment(X, EYE[:4, :4]), torch.ones(2, 3, 6, dtype=F64))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("keys", [False, True])
def test_attention_statistics_of_a_batch_query_by_query(causal: bool, own: bool, keys: bool) -> None:
    """Padding is NaN and counts for nobody; blocks of rows; a beta for every head; no keys are the tokens."""
    options = {"causal": causal, "self_attention": own}
    beta = torch.tensor([0.7, 2.0], dtype=F64)
    Q, K = drawn(2, 4, 4, seed=5) / 2, drawn(2, 4, 4, seed=6) if keys else None
    bias = drawn(2, 4, seed=7)
    A = Attention(Q, K, None, None, beta, query_bias=bias, **options)
    found = attention_statistics(A, X, weights=WEIGHTS, mask=MASK, entries=50)
    assert found.entropy.shape == (2, 3, 2, 6)
    for b in CLOUDS:
        x, p = X[b], SHARES[b]
        for h in range(2):
            k = x if K is None else x @ K[h].T
            g = (x @ Q[h].T + bias[h]) if K is None else (x @ Q[h].T + bias[h]) @ K[h]
            size = float((p * g.norm(dim=-1)).sum() * (p * x.norm(dim=-1)).sum() * beta[h])
            assert float(found.effective_beta[b][h]) == pytest.approx(size, rel=1e-12)
            assert float(effective_beta(A, X, weights=WEIGHTS, mask=MASK)[b][h]) == pytest.approx(size, rel=1e-12)
            for i in range(6):
                got = [z[b][h, i] for z in (found.entropy, found.largest_weight, found.logit_std, found.self_argmax)]
                if not MASK[b][i]:
                    assert all(math.isnan(z) for z in got)
                    continue
                logits = [float(beta[h] * (Q[h] @ x[i] + bias[h]) @ k[j]) for j in range(6)]
                mean = math.fsum(float(p[j]) * logits[j] for j in range(6))
                spread = math.fsum(float(p[j]) * (logits[j] - mean) ** 2 for j in range(6))
                assert float(got[2]) == pytest.approx(math.sqrt(spread), rel=1e-10)
                seen = [j for j in range(6) if p[j] > 0 and (j <= i or not causal) and (j != i or own)]
                if not seen:
                    continue
                e = {j: float(p[j]) * math.exp(logits[j]) for j in seen}
                a = {j: e[j] / math.fsum(e.values()) for j in seen}
                assert float(got[0]) == pytest.approx(-sum(v * math.log(v) for v in a.values() if v > 0), abs=1e-11)
                assert float(got[1]) == pytest.approx(max(a.values()), rel=1e-11)
                assert float(got[3]) == (max(a, key=lambda j: a[j]) == i)


def test_a_split_comes_from_the_heavier_of_its_origins() -> None:
    """Clusters A (10 tokens) and B (9) exchange: 6 of A stay, 4 of B stay, 2 of A and 5 of B meet, 2 leave A."""
    before = [0.0] * 10 + [5.0] * 9
    after = [0.0] * 6 + [2.5] * 2 + [9.0] * 2 + [5.0] * 4 + [2.5] * 5
    path = Trajectory(torch.tensor([0.0, 1.0]), torch.tensor([before, after], dtype=F64)[..., None])
    found = track(path, tol=0.1, min_mass=0.15)
    # The third cluster shares 5 with B, more than the 4 that stay: it is B, and what stays is new.
    assert found.labels[1].tolist() == [0] * 6 + [1] * 2 + [-1] * 2 + [2] * 4 + [1] * 5
    assert [(e.kind, e.clusters) for e in found.events] == [("split", (1, 2))]
    third = [0.0] * 6 + [2.5] * 2 + [9.0] * 2 + [5.0] * 5 + [2.5] * 4
    path = Trajectory(torch.tensor([0.0, 1.0]), torch.tensor([before, third], dtype=F64)[..., None])
    found = track(path, tol=0.1, min_mass=0.1)
    assert found.labels[1].tolist() == [0] * 6 + [2] * 2 + [3] * 2 + [1] * 5 + [2] * 4
    assert [(e.kind, e.clusters) for e in found.events] == [("split", (1, 2)), ("split", (0, 3))]


def test_a_cluster_counts_from_its_least_mass_on() -> None:
    x = torch.tensor([[0.0] * 4 + [5.0] * 3 + [9.0]], dtype=F64)[..., None]
    counts = [int(track(Trajectory(torch.zeros(1), x), 0.1, m).counts[0]) for m in (0.1, 0.125, 0.13, 0.375, 0.38, 1.0)]
    assert counts == [3, 3, 2, 2, 1, 0]
    weighted = Trajectory(torch.zeros(1), x, weights=torch.tensor([0.0] * 4 + [1.0] * 3 + [9.0]))
    assert int(track(weighted, 0.1, 0.5).counts[0]) == 1
    for bad in (0.0, 1.01):
        with pytest.raises(ValueError, match=r"expected a mass in \(0, 1\]"):
            track(weighted, min_mass=bad)


def test_clusters_are_within_a_thousandth_and_tracked_within_a_hundredth_unless_told_otherwise() -> None:
    pair = lambda distance: torch.tensor([[0.0], [distance]], dtype=F64)
    assert [int(clusters(pair(z)).counts) for z in (0.9e-3, 1.1e-3)] == [1, 2]
    path = lambda x: Trajectory(torch.zeros(1), x[None])
    assert [int(track(path(pair(z))).counts[0]) for z in (0.9e-2, 1.1e-2)] == [1, 2]
    # of a hundred tokens two are a cluster, and one is none
    far = torch.cat([torch.zeros(97, 1, dtype=F64), torch.tensor([[5.0], [5.0], [9.0]], dtype=F64)])
    assert int(track(path(far)).counts[0]) == 2
