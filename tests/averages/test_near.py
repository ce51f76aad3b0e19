"""Truncated drifts: equal to the dense ones within the bound they state, and refused where nothing can be skipped."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from attn_flow import Attention, Sphere, flow
from attn_flow.attention.truncated import TRUNCATION
from attn_flow.averages import costs, fourier, near, patches
from attn_flow.base.memory import peak_memory
from attn_flow.bench.choices import ways_of

F64 = torch.float64


def sphere(n, d, seed=0, dtype=F64):
    return Sphere().uniform(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture
def patches_cost_nothing():
    """Near keys are the way wherever few pairs are near, however small the cloud; a series never is."""
    with costs.assumed(replace(costs.here(), look=0.0, fixed=0.0, order=0.0, bound=0.0, circle=math.inf)):
        yield


def literal(attention, x, weights=None, mask=None):
    """Row by row, from the definition."""
    n = x.shape[-2]
    w = torch.ones(n, dtype=x.dtype) if weights is None else weights
    w = w if mask is None else torch.where(mask, w, 0.0)
    drift = torch.zeros_like(x)
    for h in range(attention.heads):
        scores = (x @ attention.G[h].mT) @ x.mT
        for i in range(n):
            seen = w > 0
            seen = seen & (torch.arange(n) <= i) if attention.causal else seen
            seen = seen & (torch.arange(n) != i) if not attention.self_attention else seen
            if not bool(seen.any()):
                continue
            p = torch.softmax(attention.beta[h] * scores[i, seen] + w[seen].log(), dim=-1)
            drift[i] += (p @ x[seen]) @ attention.values[h].mT
    return drift if mask is None else drift.masked_fill(~mask[:, None], 0.0)


@pytest.mark.parametrize("masks", [{}, {"causal": True}, {"self_attention": False}])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("beta", [3.0, 100.0, 1e4])
def test_error_is_within_the_bound(masks, heads, beta):
    generator = torch.Generator().manual_seed(1)
    attention = Attention.random(3, heads, 3, generator=generator, dtype=F64, beta=beta, truncation=1e-3, **masks)
    x = sphere(300, 3)
    weights = torch.rand(300, generator=generator, dtype=F64)
    mask = torch.rand(300, generator=generator) > 0.2
    for options in ({}, {"weights": weights}, {"mask": mask}, {"weights": weights, "mask": mask}):
        found = attention.truncated_drift(x, **options)
        error = (found.drift - literal(attention, x, **options)).norm(dim=-1)
        assert bool((error <= found.error + 1e-12).all())
        assert float(found.error.max()) <= 2 * 1e-3 * float(torch.linalg.matrix_norm(attention.values, ord=2).sum())


def test_cold_clouds_skip_and_hot_ones_do_not():
    x = sphere(4096, 3)
    shares = [Attention.identity(3, beta, dtype=F64).truncated_drift(x).pairs for beta in (1.0, 1e3, 1e5)]
    assert shares[0] == 1
    assert shares[0] > 2 * shares[1]
    assert shares[1] > shares[2]


@pytest.mark.parametrize("beta", [1e3, 1e4, 1e6])
def test_float32_is_accurate_at_any_beta(beta):
    """Against float64 to 1e-6, where float32 logits would be wrong by beta 1e-7."""
    x = sphere(2000, 3, dtype=torch.float32)
    found = Attention.identity(3, beta).truncated_drift(x).drift
    exact = literal(Attention.identity(3, beta, dtype=F64), x.double())
    assert float((found - exact).norm(dim=-1).max()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_hardmax_is_exact(dtype):
    generator = torch.Generator().manual_seed(2)
    x = sphere(1500, 3, dtype=dtype)
    x[700:1400] = x[:700]  # ties
    mask = torch.rand(1500, generator=generator) > 0.3
    weights = torch.rand(1500, generator=generator, dtype=dtype)
    for attention in (
        Attention.identity(3, math.inf, dtype=dtype),
        Attention.random(3, 2, 3, generator=generator, dtype=dtype, beta=math.inf),
    ):
        found = attention.truncated_drift(x, weights=weights, mask=mask)
        dense = replace(attention, truncation=0.0).drift(x, weights=weights, mask=mask)
        assert found.pairs < 0.7
        assert float(found.error.max()) == 0
        assert torch.allclose(found.drift, dense, atol=4 * torch.finfo(dtype).eps)


def test_a_query_whose_reference_is_hidden_looks_at_all_keys():
    """Under a causal mask the first tokens see only far ones: the blocks near them prove nothing."""
    x = sphere(1000, 3)
    attention = Attention.identity(3, 1e4, dtype=F64, causal=True, self_attention=False, truncation=1e-6)
    found = attention.truncated_drift(x)
    assert torch.equal(found.drift[0], torch.zeros(3, dtype=F64))
    assert torch.allclose(found.drift[1], x[0])
    assert float(found.error[1]) == 0
    assert float((found.drift - literal(attention, x)).norm(dim=-1).max()) < 2e-6


def test_large_cold_drift_takes_this_path_by_itself(monkeypatch, patches_cost_nothing):
    """`drift` and `flow` use it where it pays, within the default tolerance of the dtype."""
    calls = []
    select = near.select
    monkeypatch.setattr(near, "select", lambda *args: calls.append(1) or select(*args))
    x = sphere(2048, 2)
    cold, hot = Attention.identity(2, 5e3, dtype=F64), Attention.identity(2, 1.0, dtype=F64)
    assert float((cold.drift(x) - literal(cold, x)).norm(dim=-1).max()) < 2 * TRUNCATION[F64] + 1e-13
    assert calls
    calls.clear()
    hot.drift(x)
    replace(cold, truncation=0.0).drift(x)
    cold.drift(x.clone().requires_grad_())
    assert not calls
    path = flow(cold, x, [0, 0.1], h=0.05)
    dense = flow(replace(cold, truncation=0.0), x, [0, 0.1], h=0.05)
    assert calls
    assert float((path.x - dense.x).abs().max()) < 1e-11


def test_a_way_is_taken_for_what_it_costs(monkeypatch):
    """The same cloud goes over all keys, near keys or a series as constants say: none is preferred by its size."""
    x, attention = sphere(600, 2), Attention.identity(2, 1e3, dtype=F64)
    taken = []
    for module, name in ((near, "softmax"), (fourier, "softmax")):
        whole = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *z, of=module, whole=whole, **o: taken.append(of) or whole(*z, **o))
    dear = dict.fromkeys(costs.SECONDS, 1.0)
    ways = {
        None: dict.fromkeys(("pair64", "entry64"), 1e-12),
        near: dict.fromkeys(("look", "fixed", "order", "bound", "near64"), 1e-12),
        fourier: dict.fromkeys(("circle", "term"), 1e-12),
    }
    drifts = []
    for way, cheap in ways.items():
        with costs.assumed(costs.Costs(**{**dear, **cheap})):
            drifts.append(attention.drift(x))
        assert taken == ([] if way is None else [way])
        taken.clear()
    for other in drifts[1:]:
        assert float((other - drifts[0]).abs().max()) < 4 * TRUNCATION[F64]


@pytest.mark.parametrize("d", [2, 3])
def test_every_way_of_a_drift_is_the_same(d):
    """Whichever is chosen: all within the truncation and float32's sums over 500 keys of the exact one."""
    x, attention = sphere(500, d, dtype=torch.float32), Attention.identity(d, 60.0)
    exact = literal(attention.to(F64), x.double())
    ways = ways_of(attention, x)
    assert set(ways) == ({"dense", "near", "fourier"} if d == 2 else {"dense", "near"})
    for name, way in ways.items():
        # Logits of 60 are rounded to 60 eps, which changes weights as much.
        error = float((way() - exact).norm(dim=-1).max())
        assert error < 2 * TRUNCATION[torch.float32] + 4 * 60 * torch.finfo(torch.float32).eps, name


@pytest.mark.usefixtures("patches_cost_nothing")
def test_batches_and_betas_of_their_own():
    x = sphere((3, 600), 2)
    attention = Attention.identity(2, torch.tensor([[1e3], [3e3], [1e4]], dtype=F64), dtype=F64, truncation=1e-9)
    found = attention.drift(x)
    for one, beta, cloud in zip(found, (1e3, 3e3, 1e4), x):
        alone = replace(attention, beta=beta, truncation=0.0).drift(cloud)
        assert float((one - alone).norm(dim=-1).max()) < 1e-8


def test_blocks_partition_the_cloud():
    x = torch.randn(1003, 4, generator=torch.Generator().manual_seed(0), dtype=F64)
    found = patches.Patches.of(x)
    index = found.index.flatten()
    assert sorted(index.tolist()) == list(range(len(index)))
    assert found.index.shape[1] <= patches.SIZE
    assert len(index) - 1003 < len(found.index)
    inside = (found.points - found.centre[:, None]).norm(dim=-1)
    assert bool((inside <= found.radius[:, None]).all())
    assert float(found.radius.mean()) < 0.8 * float((x - x.mean(0)).norm(dim=-1).max())


def test_memory_is_linear():
    """Twice the tokens, about twice the memory; a dense matrix would be four times as large."""
    attention = Attention.identity(3, 1e4)
    clouds = [sphere(n, 3, dtype=torch.float32) for n in (8192, 16384)]
    peaks = [peak_memory(partial(attention.truncated_drift, x)) for x in clouds]
    assert peaks[1] < 2.6 * peaks[0]
    assert peaks[1] < 0.1 * 4 * 16384**2


@pytest.mark.usefixtures("patches_cost_nothing")
def test_autocast_would_round_the_bounds():
    x = sphere(600, 3, dtype=torch.float32)
    attention = Attention.identity(3, 100.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, dense = attention.drift(x), replace(attention, truncation=0.0).drift(x)
        assert attention.truncated_drift(x).pairs == 1
    assert torch.equal(found, dense)


@pytest.mark.parametrize("truncation", [-1e-3, 1.0, math.nan])
def test_bad_truncation(truncation):
    with pytest.raises(ValueError, match="truncation"):
        Attention.identity(3, 1.0, truncation=truncation)


def test_nobody_visible_gives_no_drift():
    x = sphere(50, 3)
    found = Attention.identity(3, 10.0, dtype=F64, self_attention=False, causal=True).truncated_drift(x[:2])
    assert torch.equal(found.drift[0], torch.zeros(3, dtype=F64))


@pytest.mark.parametrize(("n", "m"), [(3, 2000), (2000, 3), (1, 5000)])
@pytest.mark.usefixtures("patches_cost_nothing")
def test_few_keys_or_few_queries(n, m):
    attention = Attention.identity(3, 1e3, dtype=F64)
    x, y = sphere(n, 3), sphere(m, 3, seed=1)
    expected = torch.softmax(1e3 * x @ y.mT, dim=-1) @ y
    assert float((attention.drift(x, y) - expected).abs().max()) < 1e-11
