"""Numbers over seeds against numbers known another way: synthetic bounds, batches against loops, sampling rates."""

import math

import numpy as np
import pytest
import torch

from attn_flow import Attention, Drift, Sphere, Trajectory, VonMisesFisher, flow, limit, phases
from attn_flow.dynamics.continuity import density_flow
from attn_flow.measures.quadrature import circle
from attn_flow.prediction import certified_over_seeds, fit_bound, over_seeds, phases_over_seeds, propagation_of_chaos

F64 = torch.float64
G, V = torch.diag(torch.tensor([3.0, 1.0], dtype=F64)), torch.diag(torch.tensor([1.0, 2.0], dtype=F64))


def test_a_batch_of_phases_is_each_of_them():
    attention = Attention.from_matrices(torch.eye(2, dtype=F64), torch.diag(torch.tensor([2.0, 1.0], dtype=F64)), 10.0)
    x0 = Sphere().uniform(160, 2, generator=torch.Generator().manual_seed(0), dtype=F64).reshape(4, 40, 2)
    target = limit(attention)
    path = flow(attention, x0, torch.linspace(0, 10, 21), h=0.25)
    found = phases_over_seeds(path, target)
    alone = [phases(Trajectory(path.t, path.x[:, i], about=path.about), target, warn=False) for i in range(4)]
    assert found.t_min.values == tuple(each.t_min for each in alone)
    assert found.min_w2.mean == pytest.approx(np.mean([each.min_w2 for each in alone]))
    assert found.min_w2.error == pytest.approx(np.std([each.min_w2 for each in alone], ddof=1) / 2)
    assert found.min_w2.low <= found.min_w2.mean <= found.min_w2.high
    rates = [phase.rate for each in alone for phase in each.phases if phase.phase == "concentrating" and phase.rate]
    assert found.rates["concentrating"].mean == pytest.approx(np.mean(rates))
    with pytest.raises(ValueError, match="two or more seeds"):
        phases_over_seeds(Trajectory(path.t, path.x[:, 0]), target)


def test_settled_batches():
    biased = Attention.from_matrices(G, V, query_bias=torch.tensor([0.1, 0.0], dtype=F64))
    x0 = Sphere().uniform(18, 2, generator=torch.Generator().manual_seed(0), dtype=F64).reshape(3, 6, 2)
    assert certified_over_seeds(limit(biased).settle(x0)).mean == 1


def test_the_interval_covers_as_often_as_it_says():
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        found = over_seeds(generator.normal(1.0, 2.0, 40).tolist())
        hits += found.low <= 1.0 <= found.high
    assert 180 <= hits <= 199  # 95% of 200, +- 3 standard deviations (and the bootstrap's own narrowness)


def test_the_constants_of_a_known_bound_are_found():
    C, c, K = 0.7, 0.4, 1.3
    t = torch.linspace(0, 6, 61, dtype=F64)
    paths, curves = [], []
    for beta in (30.0, 300.0, 3000.0):
        about = {"attention": {"beta": beta}}
        paths.append(Trajectory(t, torch.ones(61, 1, 2, dtype=F64), about=about))
        cold = math.sqrt(math.log(beta + 1) / beta)
        curves.append(K * (cold * np.exp(C * t.numpy()) + np.exp(-c * t.numpy())))
    target = limit(Attention.from_matrices(G, V))
    found = fit_bound(paths, target, w2=curves)
    assert (found.C, found.c, found.K) == pytest.approx((C, c, K), rel=1e-6)
    assert found.cover == pytest.approx(1.0, abs=1e-6)
    noise = np.random.default_rng(0)
    shaken = fit_bound(paths, target, w2=[curve * np.exp(0.05 * noise.normal(size=61)) for curve in curves])
    for name, true in (("C", C), ("c", c), ("K", K)):
        assert abs(getattr(shaken, name) - true) < 4 * getattr(shaken, f"{name}_error")
    assert shaken.cover > 1.05
    with pytest.raises(ValueError, match="two or more finite"):
        fit_bound(paths[:1], target, w2=curves[:1])
    assert "one path: too small" in repr(shaken)


def test_errors_over_seeds_cover_the_truth_where_those_of_the_fit_do_not():
    """Whole curves that are off by a factor each: points of one curve say the same thing many times over."""
    C, c, K, seeds = 0.7, 0.4, 1.3, 12
    t = torch.linspace(0, 6, 61, dtype=F64)
    times, noise = t.numpy(), np.random.default_rng(1)
    target = limit(Attention.from_matrices(G, V))
    paths, truth = [], []
    for beta in (30.0, 300.0, 3000.0):
        paths.append(Trajectory(t, torch.ones(61, 1, 2, dtype=F64), about={"attention": {"beta": beta}}))
        truth.append(K * (math.sqrt(math.log(beta + 1) / beta) * np.exp(C * times) + np.exp(-c * times)))
    covered = {"seeds": 0, "fit": 0}
    for _ in range(20):
        factors = np.exp(0.2 * noise.normal(size=(3, seeds)))
        many = [curve[:, None] * factor for curve, factor in zip(truth, factors)]
        found = fit_bound(paths, target, w2=many, resamples=40)
        assert found.seeds == seeds
        covered["seeds"] += abs(math.log(found.K / K)) < 2 * found.K_error / found.K
        alone = fit_bound(paths, target, w2=[np.exp(np.log(curve).mean(1)) for curve in many])
        covered["fit"] += abs(math.log(alone.K / K)) < 2 * alone.K_error / alone.K
    assert covered["seeds"] >= 15  # 95% of 20 less four standard deviations
    assert covered["fit"] <= 12
    assert "over 12 seeds" in repr(found)


def test_fit_bound_says_what_it_wants_of_seeds():
    t = torch.linspace(0, 6, 61, dtype=F64)
    paths = [Trajectory(t, torch.ones(61, 1, 2, dtype=F64), about={"attention": {"beta": b}}) for b in (30.0, 300.0)]
    target = limit(Attention.from_matrices(G, V))
    w2 = [np.exp(-t.numpy())[:, None] * np.ones(k) for k in (2, 3)]
    with pytest.raises(ValueError, match=r"paths of \[2, 3\] seeds, expected as many for each beta"):
        fit_bound(paths, target, w2=w2)
    with pytest.raises(ValueError, match="resamples = 1, expected"):
        fit_bound(paths, target, w2=w2[:1] * 2, resamples=1)


def test_a_rate_of_growth_that_is_not_there_is_zero_with_an_error():
    """W2 that falls to a floor and stays: C = 0. With its sign free the two terms exchanged their parts (C = -.7)."""
    t, betas = torch.linspace(0, 10, 41, dtype=F64), (30.0, 100.0)
    paths = [Trajectory(t, torch.zeros(41, 3, 1, 2, dtype=F64), about={"attention": {"beta": beta}}) for beta in betas]
    noise = np.random.default_rng(0).normal(0, 0.05, (2, 41, 3))
    floor = [math.sqrt(math.log(1 + beta) / beta) for beta in betas]
    w2 = [(0.3 * f + np.exp(-0.4 * t.numpy()))[:, None] * np.exp(each) for f, each in zip(floor, noise)]
    found = fit_bound(paths, limit(Attention.from_matrices(G, V)), w2=w2, resamples=20)
    assert found.C == 0.0
    assert found.C_error > 1e-3
    assert found.c > 0


@pytest.mark.parametrize(
    "field",
    [
        Attention.identity(2, 1.0, kind="unnormalised", dtype=F64),
        Attention.identity(2, 1.0, kind="relu", dtype=F64),
        Attention.from_matrices(torch.diag(torch.tensor([3.0, 1.0])), torch.eye(2), 2.0).to(F64)
        + Drift(lambda t, x: torch.tanh(x), tokenwise=True),
    ],
    ids=["unnormalised", "relu", "softmax and a drift"],
)
def test_chaos_of_any_attention_is_of_order_one_half(field):
    """Against the flow of fine nodes."""
    mu = VonMisesFisher(torch.tensor([1.0, 0.0], dtype=F64), 1.0)
    nodes = circle(600, lambda theta: torch.exp(torch.cos(theta)))
    exact = flow(field, nodes.x, [0.0, 0.5], weights=nodes.weights, h=0.1).cloud(-1)
    draw = lambda n, generator: mu.sample(n, generator=generator)
    found = propagation_of_chaos(field, draw, exact, 0.5, [15, 60, 240], seeds=12, h=0.1)
    assert abs(found.exponent - 0.5) < 4 * found.error
    assert found.error < 0.1


def test_chaos_on_the_circle_is_of_order_one_half():
    """Interacting tokens against the density: the exponent of sampling, and W2 that falls with n."""
    attention, mu = Attention.identity(2, 2.0, dtype=F64), VonMisesFisher(torch.tensor([1.0, 0.0], dtype=F64), 1.0)
    exact = density_flow(attention, mu, [0.0, 0.5], bandwidth=48).cloud(-1)
    draw = lambda n, generator: mu.sample(n, generator=generator)
    found = propagation_of_chaos(attention, draw, exact, 0.5, [15, 60, 240], seeds=12, h=0.1)
    assert abs(found.exponent - 0.5) < 4 * found.error
    assert found.error < 0.1  # or the comparison would say nothing
    assert found.w2[0].mean > found.w2[1].mean > found.w2[2].mean
    with pytest.raises(ValueError, match="two or more sizes"):
        propagation_of_chaos(attention, draw, circle(20), 0.5, [15])
