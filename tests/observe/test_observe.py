"""Observables against literal loops, closed forms and laws."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_flow.attention import Attention
from attn_flow.dynamics.particles import flow
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.geometry import Sphere
from attn_flow.observe.quantities import (
    alignment,
    attention_statistics,
    close_pairs,
    clusters,
    diameter,
    effective_rank,
    energy,
    log_energy,
    pairwise_cosines,
)
from attn_flow.observe.tracking import track

f64 = torch.float64


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    return Sphere().uniform(shape[:-1], shape[-1], dtype=f64, generator=torch.Generator().manual_seed(seed))


def padded(x: torch.Tensor, extra: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x with `extra` garbage tokens, and the mask that hides them."""
    garbage = torch.full((*x.shape[:-2], extra, x.shape[-1]), 7.0, dtype=x.dtype)
    mask = torch.cat([torch.ones(x.shape[:-1]), torch.zeros(garbage.shape[:-1])], -1).bool()
    return torch.cat([x, garbage], -2), mask


# --- energy -----------------------------------------------------------------------------------------------------


def test_energy_is_the_double_sum() -> None:
    x, beta = uniform(7, 3), 2.0
    heads = torch.randn(2, 3, 3, dtype=f64, generator=torch.Generator().manual_seed(1))
    plain = sum(math.exp(beta * float(a @ b)) for a in x for b in x) / (2 * beta * 49)
    several = sum(math.exp(beta * float(a @ G @ b)) for G in heads for a in x for b in x) / (2 * beta * 49)
    assert float(energy(x, beta)) == pytest.approx(plain, rel=1e-12)
    assert float(energy(x, beta, heads)) == pytest.approx(several, rel=1e-12)
    assert float(energy(x, beta, heads[0])) == pytest.approx(
        sum(math.exp(beta * float(a @ heads[0] @ b)) for a in x for b in x) / (2 * beta * 49), rel=1e-12
    )


def test_energy_of_a_point_needs_the_log_domain() -> None:
    x = torch.zeros(5, 3, dtype=f64)
    x[:, 0] = 1
    assert float(log_energy(x, 1e6)) == pytest.approx(1e6 - math.log(2e6), rel=1e-14)
    with pytest.raises(ValueError, match=r"overflows torch\.float64; use log_energy"):
        energy(x, 1e6)
    with pytest.raises(ValueError, match="expected 0 < beta < inf"):
        energy(x, 0.0)


def test_energy_of_weights_masks_and_batches() -> None:
    x = uniform(2, 6, 3)
    weights = torch.tensor([2.0, 1, 1, 1, 1, 1], dtype=f64)
    twice = torch.cat([x[:, :1], x], dim=1)  # a token listed twice = one token of weight 2
    assert torch.allclose(log_energy(x, 3.0, weights=weights), log_energy(twice, 3.0))
    assert torch.allclose(log_energy(x, 3.0)[1], log_energy(x[1], 3.0))
    y, mask = padded(x, 3)
    assert torch.allclose(log_energy(y, 3.0, mask=mask), log_energy(x, 3.0))
    z = x[0].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: log_energy(z, 3.0), (z,))


def test_energy_derivative_along_the_flows() -> None:
    """dE/dt = (1/n) sum Z_i |x_i'|^2, Z_i = 1 (unnormalised) or (1/n) sum_k e^{beta<x_i,x_k>} (softmax)."""
    x, beta, h = uniform(9, 3), 2.0, 1e-4
    for kind in ("unnormalised", "softmax"):
        A = Attention.identity(3, beta, dtype=f64, kind=kind)
        path = flow(A, x, [0.0, h, 2 * h], h=h)
        slope = (energy(path.x[2], beta) - energy(path.x[0], beta)) / (2 * h)
        middle = path.x[1]
        speed = Sphere().tangent(middle, A.drift(middle)).square().sum(-1)
        Z = torch.exp(beta * middle @ middle.mT).mean(-1)
        expected = (speed * (Z if kind == "softmax" else 1.0)).mean()
        assert float(slope) == pytest.approx(float(expected), rel=1e-5)


def test_energy_of_symmetric_heads_never_decreases() -> None:
    A = Attention.random(4, heads=3, law="symmetric", beta=1.5, kind="unnormalised", dtype=f64)
    path = flow(A, uniform(12, 4), torch.linspace(0, 0.5, 26), h=0.002)
    E = torch.stack([log_energy(x, 1.5, A.G) for x in path.x])
    assert bool((E.diff() > -1e-12).all())


# --- spread and clusters ----------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(1, 12), st.floats(0.05, 1.5))
@settings(max_examples=60, deadline=None)
def test_clusters_are_connected_components(seed: int, n: int, tol: float) -> None:
    from scipy.sparse.csgraph import connected_components

    x = uniform(n, 2, seed=seed)
    near = (x[:, None] - x[None]).norm(dim=-1) <= tol
    count, expected = connected_components(near.numpy())
    found = clusters(x, tol)
    assert int(found.counts) == count
    same = found.labels[:, None] == found.labels[None]
    assert bool((same == torch.from_numpy(expected[:, None] == expected[None])).all())
    assert torch.allclose(found.mass, same.double().sum(-1) / n)


def test_clusters_follow_long_chains_in_blocks() -> None:
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    chain = torch.stack([torch.arange(200.0), torch.zeros(200)], -1)[order]
    whole = clusters(chain, 1.0)
    assert int(clusters(chain, 1.0, entries=1000).counts) == int(whole.counts) == 1
    assert int(clusters(chain, 0.5).counts) == 200


def test_clusters_of_batches_masks_and_weights() -> None:
    x = torch.tensor([[[0.0, 0], [0, 0.1], [5, 0]], [[0.0, 0], [3, 0], [6, 0]]], dtype=f64)
    found = clusters(x, 0.2, velocity=torch.ones_like(x))
    assert found.labels.tolist() == [[0, 0, 1], [0, 1, 2]]
    assert found.counts.tolist() == [2, 3]
    assert torch.allclose(found.speed, torch.full((2,), math.sqrt(2), dtype=f64))
    y, mask = padded(x, 2)
    hidden = clusters(y, 0.2, mask=mask)
    assert hidden.labels.tolist() == [[0, 0, 1, -1, -1], [0, 1, 2, -1, -1]]
    heavy = clusters(x[0], 0.2, weights=torch.tensor([1.0, 1, 2], dtype=f64))
    assert torch.allclose(heavy.mass, torch.tensor([0.5, 0.5, 0.5], dtype=f64))
    with pytest.raises(ValueError, match="tol = 0"):
        clusters(x, 0.0)


def test_diameter() -> None:
    x = uniform(3, 11, 4)
    distance = (x[:, :, None] - x[:, None]).norm(dim=-1)
    assert torch.allclose(diameter(x), distance.amax((-2, -1)))
    assert torch.allclose(diameter(x, geometry=Sphere()), 2 * torch.asin(distance / 2).amax((-2, -1)))
    y, mask = padded(x, 2)
    assert torch.allclose(diameter(y, mask=mask, entries=50), distance.amax((-2, -1)))
    assert float(diameter(x[:, :1]).max()) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: diameter(x, mask=torch.zeros(5, dtype=torch.bool)), "mask hides every token of a cloud"),
        (lambda x: diameter(x, mask=torch.ones(4, dtype=torch.bool)), r"mask has shape \(4,\)"),
        (lambda x: diameter(x * math.nan), "x has 15 NaN or infinite entries"),
        (lambda x: clusters(x, math.nan), "tol = nan, expected a positive number"),
        (lambda x: log_energy(x, math.nan), "beta = nan, expected 0 < beta < inf"),
        (lambda x: close_pairs(x, mask=torch.zeros(5, dtype=torch.bool)), "mask hides every token of a cloud"),
        (lambda x: alignment(x, torch.ones(3, 4, dtype=f64)), r"basis has shape \(3, 4\)"),
        (lambda x: alignment(x, torch.ones(3, 1).cfloat()), "basis has dtype torch.complex64, expected real numbers"),
    ],
)
def test_refused_in_these_words(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call(uniform(5, 3))


# --- pairs ------------------------------------------------------------------------------------------------------


def test_pairwise_cosines_leave_out_the_diagonal() -> None:
    x = 3 * uniform(2, 30, 3)
    u = x / 3
    off = ~torch.eye(30, dtype=torch.bool)
    histogram, edges = pairwise_cosines(x, 20, entries=500)
    for b in range(2):
        expected = torch.histogram((u[b] @ u[b].mT)[off].clamp(-1, 1), edges).hist / (30 * 29)
        assert torch.allclose(histogram[b], expected, atol=1e-12)
    orthonormal = torch.eye(4, dtype=f64)
    assert float(close_pairs(orthonormal)) == 0.0  # with the diagonal it would be 1/4
    assert float(close_pairs(torch.ones(4, 3, dtype=f64))) == pytest.approx(1.0)


def test_pairs_of_weights_and_masks() -> None:
    x = uniform(6, 3)
    y, mask = padded(x, 3)
    assert torch.allclose(pairwise_cosines(y, 10, mask=mask)[0], pairwise_cosines(x, 10)[0])
    weights = torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=f64)
    assert torch.allclose(pairwise_cosines(x, 10, weights=weights)[0], pairwise_cosines(x[:4], 10)[0])
    with pytest.raises(ValueError, match="no pair to compare"):
        close_pairs(x[:1])
    with pytest.raises(ValueError, match="zero token"):
        close_pairs(torch.zeros(3, 2))


# --- rank, alignment, attention ---------------------------------------------------------------------------------


def test_effective_rank() -> None:
    assert float(effective_rank(torch.eye(5, dtype=f64))) == pytest.approx(5.0)
    assert float(effective_rank(torch.ones(9, 4, dtype=f64))) == pytest.approx(1.0)
    x = torch.diag(torch.tensor([3.0, 1.0], dtype=f64))
    p = torch.tensor([0.75, 0.25], dtype=f64)
    assert float(effective_rank(x)) == pytest.approx(float(torch.exp(-(p * p.log()).sum())))
    y, mask = padded(uniform(2, 8, 3), 4)
    assert torch.allclose(effective_rank(y, mask=mask), effective_rank(uniform(2, 8, 3)))
    assert torch.allclose(
        effective_rank(uniform(8, 3) + 100, centred=True), effective_rank(uniform(8, 3), centred=True)
    )
    with pytest.raises(ValueError, match="no rank"):
        effective_rank(torch.ones(3, 2), centred=True)


def test_alignment_does_not_depend_on_the_basis() -> None:
    x = 2 * uniform(4, 6, 3)
    skew = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]], dtype=f64)
    assert torch.allclose(alignment(x, skew), 1 - x[..., 2] ** 2 / 4)
    with pytest.raises(ValueError, match=r"expected \(d, k\) with d = 3"):
        alignment(x, torch.ones(2, 1))
    with pytest.raises(ValueError, match="dependent columns, expected a basis of E"):
        alignment(x, torch.ones(3, 2, dtype=f64))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"self_attention": False}])
def test_attention_statistics_from_the_dense_matrix(options: dict) -> None:
    A = Attention.random(4, heads=2, head_dim=3, beta=torch.tensor([1.0, 5.0], dtype=f64), dtype=f64, **options)
    A = Attention(A.Q, A.K, A.V, A.O, A.beta, query_bias=torch.randn(2, 3, dtype=f64), **options)
    x = uniform(3, 10, 4)
    weights = torch.rand(3, 10, dtype=f64) + 0.1
    found = attention_statistics(A, x, weights=weights, entries=100)
    dense = A.matrix(x, weights=weights)
    first = 1 if options.get("self_attention") is False and options.get("causal") else 0
    assert torch.allclose(found.entropy[..., first:], torch.special.entr(dense).sum(-1)[..., first:])
    assert torch.allclose(found.largest_weight, dense.amax(-1))
    g = (A.G[None] @ x[:, None].mT).mT + A.G_bias[None, :, None]
    logits = A.beta[:, None, None] * (g @ x[:, None].mT)
    p = (weights / weights.sum(-1, keepdim=True))[:, None, None]
    std = ((p * logits**2).sum(-1) - (p * logits).sum(-1) ** 2).sqrt()
    assert torch.allclose(found.logit_std, std)
    own = (dense.argmax(-1) == torch.arange(10)).double()
    assert torch.equal(found.self_argmax[..., first:], own[..., first:])
    assert 0 <= float(own.mean()) < 1
    size = A.beta * (p[:, :, 0] * g.norm(dim=-1)).sum(-1) * (p[:, 0, 0] * x.norm(dim=-1)).sum(-1)[:, None]
    assert torch.allclose(found.effective_beta, size)
    assert len(repr(found)) < 300


def test_entropy_of_the_equiangular_cloud_and_the_effective_beta() -> None:
    n, beta = 6, 3.0
    x = torch.eye(n, dtype=f64)  # equiangular, rho = 0
    found = attention_statistics(Attention.identity(n, beta, dtype=f64), x)
    p = 1 / (1 + (n - 1) * math.exp(-beta))
    q = (1 - p) / (n - 1)
    assert torch.allclose(found.entropy, torch.full((1, n), -p * math.log(p) - (n - 1) * q * math.log(q), dtype=f64))
    assert float(found.effective_beta) == pytest.approx(beta)
    scaled = attention_statistics(Attention(Q=4 * torch.eye(n, dtype=f64), beta=beta / 4), x)
    assert float(scaled.effective_beta) == pytest.approx(beta)
    with pytest.raises(ValueError, match="finite beta"):
        attention_statistics(Attention.identity(n, math.inf, dtype=f64), x)
    with pytest.raises(ValueError, match="kind 'unnormalised'; expected a softmax at finite beta"):
        attention_statistics(Attention.identity(n, beta, dtype=f64, kind="unnormalised"), x)


# --- tracking ---------------------------------------------------------------------------------------------------


def line(*clouds: list[float]) -> Trajectory:
    x = torch.tensor(clouds, dtype=f64)[..., None]
    return Trajectory(torch.arange(float(len(clouds)), dtype=f64), x)


def test_track_sees_births_merges_splits_and_deaths() -> None:
    path = line(
        [0.0, 0.0, 5.0, 5.0, 9.0, 12.0],  # two clusters, two loose tokens
        [0.0, 0.0, 5.0, 5.0, 9.0, 9.0],  # a birth
        [0.0, 0.0, 5.0, 5.0, 5.0, 5.0],  # a merge
        [0.0, 3.0, 5.0, 5.0, 7.0, 7.0],  # a death and a split
    )
    found = track(path, tol=0.1, min_mass=0.3)
    assert found.counts.tolist() == [2, 3, 2, 2]
    assert [(e.kind, e.t) for e in found.events] == [("birth", 1.0), ("merge", 2.0), ("split", 3.0), ("death", 3.0)]
    assert found.labels[0].tolist() == [0, 0, 1, 1, -1, -1]
    assert found.labels[1].tolist() == [0, 0, 1, 1, 2, 2]
    assert found.events[1].clusters[-1] in (1, 2)
    assert set(found.events[1].clusters) == {1, 2}


def test_the_heavier_part_keeps_its_identity() -> None:
    """By mass, not by number: of a merge the identity of the heavier cluster, of a split the heavier part."""
    merged = [0.0, 0.0, 0.0, 0.0, 0.0]
    for heavy, kept in (([1, 1, 1, 9, 9], 1), ([9, 9, 9, 1, 1], 0)):
        path = line([0.0, 0.0, 0.0, 5.0, 5.0], merged, [0.0, 0.0, 0.0, 5.0, 5.0])
        path = Trajectory(path.t, path.x, torch.tensor(heavy, dtype=f64))
        found = track(path, tol=0.1, min_mass=0.05)
        assert found.labels[0].tolist() == [0, 0, 0, 1, 1]
        assert found.labels[1].tolist() == [kept] * 5
        assert found.labels[2].tolist() == ([2, 2, 2, 1, 1] if kept else [0, 0, 0, 2, 2])
        assert [(e.kind, e.clusters) for e in found.events] == [("merge", (0, 1, kept)), ("split", (kept, 2))]


def test_track_batches_like_a_loop() -> None:
    A = Attention.identity(2, 9.0, dtype=f64)
    path = flow(A, uniform(2, 30, 2), torch.linspace(0, 12, 7), h=0.1)
    both = track(path, tol=0.05, min_mass=0.1)
    for b in range(2):
        one = track(Trajectory(path.t, path.x[:, b]), tol=0.05, min_mass=0.1)
        assert torch.equal(both.labels[:, b], one.labels)
        assert [(e.kind, e.t, e.clusters) for e in both.events if e.cloud == (b,)] == [
            (e.kind, e.t, e.clusters) for e in one.events
        ]
    with pytest.raises(ValueError, match="min_mass = 0"):
        track(path, min_mass=0.0)
