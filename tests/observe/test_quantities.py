"""Numbers of a cloud against their definitions as loops, for batches with weights and padding; laws."""

import itertools
import math

import pytest
import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from attn_flow import Attention, Cloud, Sphere, flow
from attn_flow.observe.quantities import (
    close_pairs,
    clusters,
    effective_rank,
    log_energy,
    pairwise_cosines,
)

F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


# Two by three clouds of six tokens, with weights for each of the three and padding.
X = draw(2, 3, 6, 4)
WEIGHTS = draw(3, 6, seed=1).exp()
MASK = torch.ones(2, 3, 6, dtype=torch.bool)
MASK[0, 1, 4:] = False
MASK[1, :, 0] = False
CLOUD = Cloud(X, WEIGHTS, MASK)
P = WEIGHTS * MASK / (WEIGHTS * MASK).sum(-1, keepdim=True)
BATCH = list(itertools.product(range(2), range(3)))


# --- energy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [None, (), (2,), (3, 2), (2, 1, 5)])
def test_energy_is_the_double_sum(heads: tuple[int, ...] | None) -> None:
    beta = 0.4
    G = None if heads is None else draw(*heads, 4, 4, seed=2)
    energy = log_energy(CLOUD, beta, G)
    assert energy.shape == (2, 3)
    matrices = torch.eye(4, dtype=F64) if G is None else G
    matrices = matrices.expand(2, 3, heads[-1] if heads else 1, 4, 4)
    for b in BATCH:
        pairs = itertools.product(matrices[b], range(6), range(6))
        total = sum(float(P[b][i] * P[b][j]) * math.exp(beta * float(X[b][i] @ A @ X[b][j])) for A, i, j in pairs)
        assert float(energy[b]) == pytest.approx(math.log(total / (2 * beta)), rel=1e-12)


def test_energy_of_a_point_at_large_beta() -> None:
    x = torch.tensor([[1.0, 0.0]] * 5, dtype=F64)
    assert float(log_energy(x, 1e6)) == pytest.approx(1e6 - math.log(2e6), rel=1e-14)
    with pytest.raises(ValueError, match=r"beta = 0\.0, expected a positive, finite number"):
        log_energy(x, 0.0)
    with pytest.raises(ValueError, match=r"G has shape \(3, 3\), expected \(..., 2, 2\)"):
        log_energy(x, 1.0, torch.eye(3, dtype=F64))


def test_energy_is_differentiable() -> None:
    x = draw(5, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: log_energy(Cloud(z, WEIGHTS[0, :5]), 1.5), (x,))


@pytest.mark.parametrize("kind", ["unnormalised", "softmax"])
def test_energy_derivative_along_the_flow(kind: str) -> None:
    """dE/dt = (1/n) sum Z_i |x_i'|^2, Z_i = 1 (unnormalised) or (1/n) sum_k e^{beta <x_i, x_k>} (softmax)."""
    beta, h = 2.0, 1e-4
    attention = Attention.identity(3, beta, kind=kind).to(F64)
    x = flow(attention, draw(9, 3), [0.0, h, 2 * h], h=h).x
    slope = (log_energy(x[2], beta).exp() - log_energy(x[0], beta).exp()) / (2 * h)
    speed = Sphere().tangent(x[1], attention.drift(x[1])).square().sum(-1)
    Z = torch.exp(beta * x[1] @ x[1].mT).mean(-1) if kind == "softmax" else torch.ones(9, dtype=F64)
    assert float(slope) == pytest.approx(float((Z * speed).mean()), rel=1e-5)


def test_energy_of_symmetric_heads_never_decreases() -> None:
    G = draw(3, 4, 4, seed=3)
    attention = Attention.from_matrices(G + G.mT, G + G.mT, 0.5, kind="unnormalised")
    path = flow(attention, draw(12, 4), torch.linspace(0, 0.5, 26), h=0.002)
    assert bool((torch.stack([log_energy(x, 0.5, attention.G) for x in path.x]).diff() > -1e-12).all())


# --- clusters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "tol"), [(1, 0.1), (12, 0.3), (200, 0.1), (3000, 0.03)])
def test_clusters_are_connected_components(n: int, tol: float) -> None:
    """3,000 tokens take several blocks of rows."""
    x = Sphere().retract(draw(n, 3))
    distance = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    count, expected = connected_components((distance <= tol).numpy())
    result = clusters(x, tol)
    assert int(result.counts) == count
    is_same = result.labels[:, None] == result.labels[None]
    assert torch.equal(is_same, torch.from_numpy(expected[:, None] == expected[None]))
    torch.testing.assert_close(result.mass, is_same.double().sum(-1) / n)


def test_clusters_follow_long_chains() -> None:
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    chain = torch.stack([torch.arange(500.0), torch.zeros(500)], -1)[order]
    assert int(clusters(chain, 1.0).counts) == 1
    assert int(clusters(chain, 0.5).counts) == 500


def test_clusters_of_a_batch_with_weights_and_padding() -> None:
    """Chains of steps of 0.9, 0.5 and 1.1 at tol = 1."""
    x = torch.tensor([[0.0, 0.9, 5.0, 1.4, 5.5, 9.0], [0.0, 1.1, 2.2, 3.3, 4.4, 4.9]], dtype=F64)[..., None]
    mask = torch.tensor([[True] * 5 + [False], [True] * 6])
    result = clusters(Cloud(x, torch.arange(1.0, 7.0, dtype=F64), mask), 1.0)
    assert result.labels.tolist() == [[0, 0, 1, 0, 1, -1], [0, 1, 2, 3, 4, 4]]
    assert result.counts.tolist() == [2, 5]
    expected = [[7 / 15, 7 / 15, 8 / 15, 7 / 15, 8 / 15, 0], [1 / 21, 2 / 21, 3 / 21, 4 / 21, 11 / 21, 11 / 21]]
    torch.testing.assert_close(result.mass, torch.tensor(expected, dtype=F64))
    with pytest.raises(ValueError, match="tol = 0"):
        clusters(x, 0.0)


# --- pairs -----------------------------------------------------------------------------------------------------------


def test_cosines_are_counted_pair_by_pair() -> None:
    x = X.clone()
    x[..., 5, :] = 2 * x[..., 2, :]  # cosine 1 belongs to the last bin
    cloud = Cloud(x, WEIGHTS, MASK)
    histogram, edges = pairwise_cosines(cloud, 8)
    assert edges.tolist() == pytest.approx([-1 + i / 4 for i in range(9)], abs=1e-15)
    for b in BATCH:
        masses, close, total = [0.0] * 8, 0.0, 0.0
        for i, j in itertools.permutations(range(6), 2):
            mass = float(P[b][i] * P[b][j])
            cosine = float(x[b][i] @ x[b][j] / (x[b][i].norm() * x[b][j].norm()))
            masses[min(int((cosine + 1) * 4), 7)] += mass
            close, total = close + mass * (cosine > 0.3), total + mass
        assert histogram[b].tolist() == pytest.approx([m / total for m in masses], abs=1e-14)
        assert float(close_pairs(cloud, 0.3)[b]) == pytest.approx(close / total, abs=1e-14)


def test_pairs_leave_out_the_diagonal() -> None:
    assert float(close_pairs(torch.eye(4))) == 0.0  # with the diagonal it would be 1/4
    assert float(close_pairs(1e-30 * torch.ones(4, 3))) == pytest.approx(1.0)  # tokens of any size
    assert float(close_pairs(torch.ones(1, 3))) != float(close_pairs(torch.ones(1, 3)))  # NaN: no pair
    pair = lambda cosine: torch.tensor([[1.0, 0.0], [cosine, math.sqrt(1 - cosine**2)]], dtype=F64)
    assert [float(close_pairs(pair(c))) for c in (0.9985, 0.9995)] == [0.0, 1.0]


def test_pairs_in_blocks_of_rows() -> None:
    x = draw(3000, 3)
    u = x / x.norm(dim=-1, keepdim=True)
    cosines = (u @ u.mT)[~torch.eye(3000, dtype=torch.bool)]
    assert float(close_pairs(x, 0.5)) == pytest.approx(float((cosines > 0.5).double().mean()), rel=1e-9)
    histogram, edges = pairwise_cosines(x, 20)
    expected = torch.histogram(cosines.clamp(-1, 1), edges).hist / len(cosines)
    torch.testing.assert_close(histogram, expected, atol=1e-6, rtol=0)
    assert float(pairwise_cosines(x.float(), 2)[0].sum()) == pytest.approx(1.0, rel=1e-6)  # in any precision


def test_half_precision() -> None:
    x = torch.eye(4).repeat(2, 1)
    for dtype in (torch.float16, torch.bfloat16):
        assert clusters(x.to(dtype), 0.5).labels.tolist() == [0, 1, 2, 3] * 2
        assert float(effective_rank(x.to(dtype))) == pytest.approx(4.0, rel=0.01)


# --- rank -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("centred", [False, True])
def test_effective_rank(centred: bool) -> None:
    """A token of weight k is k tokens; the entropy of the singular values."""
    x, w = draw(2, 4, 3), torch.tensor([3.0, 1.0, 2.0, 1.0], dtype=F64)
    rank = effective_rank(Cloud(x, w), centred=centred)
    for b in range(2):
        copies = x[b].repeat_interleave(w.long(), dim=0)
        sigma = torch.linalg.svdvals(copies - copies.mean(0) if centred else copies)
        p = (sigma / sigma.sum()).tolist()
        assert float(rank[b]) == pytest.approx(math.exp(-sum(q * math.log(q) for q in p)), rel=1e-12)
    padded = torch.cat([x, torch.full((2, 2, 3), 7.0, dtype=F64)], dim=-2)
    mask = torch.tensor([True] * 4 + [False] * 2)
    torch.testing.assert_close(effective_rank(Cloud(padded, mask=mask), centred), effective_rank(x, centred))
    assert float(effective_rank(torch.ones(9, 4, dtype=F64))) == pytest.approx(1.0)
