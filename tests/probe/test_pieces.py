"""The pieces of a probe against loops from their definitions, both sides of each branch; no encoder runs."""

import inspect
import itertools
import math
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_flow.attention import Attention
from attn_flow.dynamics.distributed import ALONE, Processes
from attn_flow.measures import Cloud
from attn_flow.nn import DeepStack
from attn_flow.probe import evolution, run, stacks, transports
from attn_flow.probe.agreement import Agreement
from attn_flow.probe.closures import (
    LADDER,
    ORACLE_STEP,
    Closure,
    atoms_and_bulk,
    clusters,
    number_of_clusters,
    oracle,
    sinks,
)
from attn_flow.probe.clouds import Clouds
from attn_flow.probe.evolution import cloud_evolution, evolution_of_all, token_view
from attn_flow.probe.findings import Interval, bootstrap, by_layer, decide, layers_named, ratio_of_means, span
from attn_flow.probe.head_space import HeadSpace, as_heads_see
from attn_flow.probe.heads import _head_spectrum
from attn_flow.probe.limit_law import CASES, _overlap
from attn_flow.probe.nulls import main_closure, rotated, steps, untrained_twin
from attn_flow.probe.propagation import Passes, _prediction, chosen_inputs, compare_passes
from attn_flow.probe.quantised import Window, _outside, _root, _spread, k_means, neighbours, quantise
from attn_flow.probe.transports import TransportCheck, solver, transport_check, w2

F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def space_of(n: int = 20, beta: float = 2.0, sees: Tensor | None = None, **options: Any) -> HeadSpace:
    A = Attention.random(8, 2, 3, beta=beta, generator=torch.Generator().manual_seed(1), dtype=F64, **options)
    special = torch.zeros(n, dtype=torch.bool)
    special[0] = special[-1] = True
    return as_heads_see(A, normal(n, 8), special, sees)


def clouds_of(texts: int = 3, layers: int = 2, n: int = 24, **options: Any) -> Clouds:
    made = [
        Attention.random(6, 2, 3, generator=torch.Generator().manual_seed(s), dtype=F64, **options)
        for s in range(layers)
    ]
    z = [[1 + normal(n, 6, seed=10 * level + t) for t in range(texts)] for level in range(layers + 1)]
    out = [[A.drift(x) for x in level] for A, level in zip(made, z)]
    special = [torch.arange(n) == 0 for _ in range(texts)]
    names = [[str(i) for i in range(n)] for _ in range(texts)]
    return Clouds(made, [None] * layers, [None] * layers, z, out, special, names, list(range(texts)))


# --- a text as its heads see it --------------------------------------------------------------------------------------


def test_what_heads_see_is_their_keys_values_and_scores() -> None:
    b, c, beta = normal(2, 3), normal(8, seed=1), torch.tensor([0.5, 2.0], dtype=F64)
    A = Attention.random(8, 2, 3, beta=beta, query_bias=b, value_bias=c, causal=True, dtype=F64)
    x, near = normal(9, 8), (torch.arange(9)[:, None] - torch.arange(9)).abs() <= 3
    space = as_heads_see(A, x, sees=near)
    assert (space.n, space.k) == (9, 3)
    assert not space.special.any()
    P = torch.zeros(2, 9, 9, dtype=F64)
    for h, i, j in itertools.product(range(2), range(9), range(9)):
        expected = float(beta[h]) * float((A.Q[h] @ x[i] + b[h]) @ (A.K[h] @ x[j])) if i - 3 <= j <= i else -math.inf
        assert float(space.logits[h, i, j]) == pytest.approx(expected)
        P[h, i, j] = expected
    P = P.softmax(-1)
    average = torch.einsum("hij,hje->hie", P, torch.einsum("hve,je->hjv", A.V, x))
    torch.testing.assert_close(space.assembled(average), torch.einsum("hiv,hdv->id", average, A.O) + c)
    one = as_heads_see(replace(A, causal=False), x)
    torch.testing.assert_close(one.drift(Cloud(one.y)), replace(A, causal=False).drift(x))
    torch.testing.assert_close(one.per_head(Cloud(one.y), 1.0)[0], (one.logits[0] / 0.5).softmax(-1) @ (x @ A.V[0].T))
    for wrong in (x[None], x[:, :5]):
        with pytest.raises(ValueError, match=r"expected one text \(n, d\) = \(n, 8\)"):
            as_heads_see(A, wrong)
    bare = as_heads_see(Attention.identity(8, dtype=F64), x)
    torch.testing.assert_close(bare.y, torch.cat([x, x], -1)[None])


# --- closures --------------------------------------------------------------------------------------------------------


CAP = 2.0  # standard deviations of the logits: beyond, the pull of a Gaussian is that at two


def saturated(s: float) -> float:
    return s**2 / 2 if s < CAP else s * CAP - CAP**2 / 2


def of_law(parts: list[tuple[float, Tensor]], bulks: list[tuple[float, Tensor]], q: Tensor, k: int) -> Tensor:
    """The average of atoms (logit, value) and of Gaussians (mass, points (m, k + v)) for a query beta q (k,)."""
    logits, means = [logit for logit, _ in parts], [value for _, value in parts]
    for mass, points in bulks:
        m, S = points.mean(0), torch.cov(points.T, correction=0).reshape(points.shape[1], -1)
        g = torch.cat([q, torch.zeros(points.shape[1] - k, dtype=F64)])
        s = math.sqrt(max(0.0, float(g @ S @ g)))
        logits.append(math.log(mass) + float(g @ m) + saturated(s))
        means.append((m + (1.0 if s < CAP else CAP / s) * S @ g)[k:])
    p = torch.tensor(logits, dtype=F64).softmax(0)
    return (p[:, None] * torch.stack(means)).sum(0)


@pytest.mark.parametrize("window", [(), (-1, 0, 1)])
@pytest.mark.parametrize("kind", ["causal", "local"])
def test_a_closure_of_what_a_token_sees_is_its_loop(window: tuple[int, ...], kind: str) -> None:
    """Special tokens and the first four are atoms; each query has the moments of what else it sees."""
    n = 14
    near = (torch.arange(n)[:, None] - torch.arange(n)).abs() <= 5
    space = space_of(n, sees=near) if kind == "local" else space_of(n, causal=True)
    atoms = sinks(space)
    assert atoms.tolist() == [[i < 4 or i == n - 1 for i in range(n)]] * 2
    predicted = space.per_head(atoms_and_bulk(space, atoms, window))
    q, k = space.beta[..., None] * space.g[..., :3], 3
    for h, i in itertools.product(range(2), range(n)):
        seen = [j for j in range(n) if (abs(i - j) <= 5 if kind == "local" else j <= i)]
        exact = [j for j in seen if atoms[h, j]] + [i + w for w in window if i + w in seen and not atoms[h, i + w]]
        bulk = [j for j in seen if not atoms[h, j]]
        parts = [(float(q[h, i] @ space.y[h, j, :k]), space.y[h, j, k:]) for j in exact]
        expected = of_law(parts, [(len(bulk), space.y[h, bulk])] if bulk else [], q[h, i], k)
        torch.testing.assert_close(predicted[h, i], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("n", "most"), [(5, 1), (4, 0), (3, 0), (9, 4)])
def test_sinks_leave_two_tokens_for_the_bulk(n: int, most: int) -> None:
    space = space_of(n)
    assert sinks(space).sum(-1).tolist() == [2 + most] * 2
    causal = space_of(n, causal=True)
    assert sinks(causal)[0].tolist() == [i < max(1, most) or i == n - 1 for i in range(n)]


@pytest.mark.parametrize("alone", [False, True])
def test_a_mixture_of_the_clusters_of_a_text_is_its_loop(alone: bool) -> None:
    """One of two clusters may have no token left for the bulk: here all of them are special."""
    n = 40
    centres = 6 * normal(2, 8, seed=5)
    x = centres[torch.arange(n) % 2] + 0.3 * normal(n, 8)
    special = torch.arange(n) % 2 == 0 if alone else torch.arange(n) == 0
    space = as_heads_see(space_of().attention, x, special)
    label, number = number_of_clusters(x)
    assert number == 2
    atoms, predicted = sinks(space), space.per_head(clusters(space))
    q = space.beta[..., None] * space.g[..., :3]
    for h, i in itertools.product(range(2), range(n)):
        parts = [(float(q[h, i] @ space.y[h, j, :3]), space.y[h, j, 3:]) for j in range(n) if atoms[h, j]]
        members = [[j for j in range(n) if not atoms[h, j] and int(label[j]) == c] for c in range(2)]
        expected = of_law(parts, [(len(m), space.y[h, m]) for m in members if m], q[h, i], 3)
        torch.testing.assert_close(predicted[h, i], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("n", "most"), [(64, 8), (63, 4), (15, 1), (7, 1)])
def test_clusters_have_eight_tokens_on_average_or_more(n: int, most: int) -> None:
    x = 50 * normal(8, 5, seed=2)[torch.arange(n) % 8] + 0.01 * normal(n, 5)
    assert number_of_clusters(x)[1] == most


def bic(x: Tensor, K: int) -> float:
    """-2 log likelihood of K round Gaussians of one variance, and log n for each of their numbers."""
    n, d = x.shape
    unit = (x - x.mean(0)) / (x - x.mean(0)).square().sum(-1).mean().sqrt()
    label = k_means(unit[None], torch.full((1, n), 1 / n, dtype=F64), 0.0, K)[0][0]
    members = [unit[label == c] for c in range(K) if bool((label == c).any())]
    away = sum(float((m - m.mean(0)).square().sum()) for m in members)
    v = away / (d * (n - K))
    likelihood = sum(len(m) * math.log(len(m) / n) for m in members)
    return -2 * (likelihood - n * d / 2 * math.log(v) - away / (2 * v)) + K * (d + 1) * math.log(n)


def test_the_number_of_clusters_has_the_least_bic() -> None:
    """From clouds without clusters to clear ones; each number is chosen somewhere."""
    chosen = set()
    for seed in range(60):
        n, d = 32 + 16 * (seed % 3), 1 + seed % 4
        centres = 0.5 * (1 + seed % 7) * normal(1 + seed % 6, d, seed=seed)
        x = centres[torch.arange(n) % len(centres)] + normal(n, d, seed=100 + seed)
        numbers = [2**i for i in range(4) if 2**i <= n // 8]
        expected = min(numbers, key=lambda K, x=x: bic(x, K))
        assert number_of_clusters(x)[1] == expected
        chosen.add(expected)
    assert chosen == {1, 2, 4, 8}
    label, number = number_of_clusters(torch.ones(20, 3, dtype=F64))
    assert (number, set(label.tolist())) == (1, {0})


def test_windows_reach_two_tokens_to_each_side() -> None:
    space, offsets = space_of(20), (-2, -1, 0, 1, 2)
    for name, law in (
        ("window_closure", atoms_and_bulk(space, sinks(space), offsets)),
        ("quantised_window_closure", quantise(space, window=offsets).law(space)),
    ):
        torch.testing.assert_close(space.drift(LADDER[name].measure(space)), space.drift(law))


@pytest.mark.parametrize("causal", [False, True])
def test_the_oracle_of_what_a_token_sees(causal: bool) -> None:
    n, number = 12, 3
    space = space_of(n, causal=causal)
    predicted = space.per_head(oracle(space, number))
    q = space.beta[..., None] * space.g[..., :3]
    for h, i in itertools.product(range(2), range(n)):
        seen = list(range(i + 1 if causal else n))
        p = torch.stack([q[h, i] @ space.y[h, j, :3] for j in seen]).softmax(0).tolist()
        top = sorted(seen, key=lambda j: -p[j])[:number]
        left = 1 - sum(p[j] for j in top)
        mean = space.y[h, seen, 3:].mean(0)
        expected = sum(p[j] * space.y[h, j, 3:] for j in top) + max(0.0, left) * mean
        torch.testing.assert_close(predicted[h, i], expected, rtol=0, atol=1e-9)
    assert ORACLE_STEP.cost(space).own_tokens == 11
    assert ORACLE_STEP.cost(space_of(5)).own_tokens == 4


def test_what_every_step_costs() -> None:
    space, k, v = space_of(20), 3, 3
    moments, atom = k + v + 6 + k * v, k + v
    number = number_of_clusters(space.x)[1]
    expected = {
        "gaussian_closure": (moments, 0),
        "special_closure": (moments + 2 * atom, 0),
        "sinks_closure": (moments + 6 * atom, 0),
        "window_closure": (moments + 6 * atom, 5),
        "logits_closure": (moments + 6 * atom + 14, 0),
        "clusters_closure": (number * (moments + 1) + 6 * atom, 0),
    }
    for name, (numbers, own) in expected.items():
        cost = LADDER[name].cost(space)
        assert (cost.numbers, cost.own_tokens) == (numbers, own)
    assert LADDER["quantised_closure"].cost(space).own_tokens == 0
    assert LADDER["quantised_window_closure"].cost(space).own_tokens == 5


def test_a_causal_encoder_has_the_steps_that_it_can_have() -> None:
    whole, part = clouds_of(), clouds_of(causal=True)
    assert list(steps(whole)) == [*LADDER, "oracle"]
    assert list(steps(part)) == [*(name for name in LADDER if LADDER[name].partial), "oracle"]
    assert main_closure(whole).name == "quantised_closure"
    assert main_closure(part).name == "window_closure"


# --- atoms of the heads ----------------------------------------------------------------------------------------------


def test_neighbours_are_inside_the_text_and_seen() -> None:
    space = space_of(5, causal=True)
    found = neighbours(space, (-1, 0, 2))
    assert found.place.tolist() == [[max(0, min(4, i + w)) for w in (-1, 0, 2)] for i in range(5)]
    assert found.inside.tolist() == [[0 <= i + w < 5 and w <= 0 for w in (-1, 0, 2)] for i in range(5)]
    assert neighbours(space_of(5), (-1, 0, 2)).inside.tolist() == [
        [0 <= i + w < 5 for w in (-1, 0, 2)] for i in range(5)
    ]


@pytest.mark.parametrize(("left", "rest"), [(0.9e-3, 0.0), (1.1e-3, 1.1e-3)])
def test_a_thousandth_of_a_cluster_is_none(left: float, rest: float) -> None:
    label, share = torch.tensor([[0, 0, 1]]), torch.tensor([[1 - left, left, 1.0]], dtype=F64)
    window = Window(torch.tensor([[0, 2]] * 3), torch.tensor([[True, False]] * 3))
    taken, outside = _outside(label, share, window, 2)
    assert outside[0, 0].tolist() == pytest.approx([rest, 1.0])
    assert taken[0, 0].tolist() == [[pytest.approx(1 - left), 0.0], [0.0, 0.0]]


def test_spreads_and_roots() -> None:
    x, a = normal(2, 9, 3), torch.softmax(normal(2, 9, seed=1), -1)
    for h in range(2):
        mean = sum(a[h, j] * x[h, j] for j in range(9))
        expected = sum(float(a[h, j]) * float((x[h, j] - mean).square().sum()) for j in range(9))
        assert float(_spread(x, a)[h]) == pytest.approx(expected)
    constant = torch.full((1, 4, 2), 3.0, dtype=F64)
    eps = torch.finfo(F64).eps
    assert float(_spread(constant, torch.full((1, 4), 0.25, dtype=F64))) == pytest.approx(18 * eps)
    S = normal(4, 2, seed=2) @ normal(4, 2, seed=2).mT
    torch.testing.assert_close(_root(S) @ _root(S).mT, S)


# --- the cloud -------------------------------------------------------------------------------------------------------


def test_processes_share_out_the_texts() -> None:
    clouds = clouds_of(texts=3, n=10)
    whole = cloud_evolution(clouds)
    device = torch.device("cpu")
    shares = [cloud_evolution(clouds, Processes(rank, 2, device)) for rank in range(2)]
    assert not shares[0].pairwise_cosine[:, 1].any()
    assert not shares[1].pairwise_cosine[:, ::2].any()
    together = evolution_of_all(shares)
    for name, value in vars(whole).items():
        torch.testing.assert_close(getattr(together, name), value)
    assert whole.histogram.shape == (3, 80)
    assert whole.edges.shape == (81,)
    assert whole.log_energy.shape == (4, 3, 3)
    assert evolution.BETAS == (1.0, 4.0, 16.0, 64.0)


def test_the_view_has_four_hundred_tokens_or_all() -> None:
    assert token_view(clouds_of(texts=3, n=10), torch.Generator()).x.shape == (3, 30, 3)
    assert token_view(clouds_of(texts=5, n=100), torch.Generator()).x.shape == (3, 400, 3)


@pytest.mark.parametrize(("layers", "levels"), [(2, [0, 1, 2]), (5, [0, 2, 5]), (1, [0, 1])])
def test_transport_is_compared_at_three_levels(layers: int, levels: list[int], monkeypatch) -> None:
    monkeypatch.setattr(transports, "find_spec", lambda name: True)
    answer = SimpleNamespace(distance=torch.tensor(2.0), error=torch.tensor(0.5))
    monkeypatch.setattr(transports, "solve", lambda *_, **__: answer)
    found = transport_check(clouds_of(texts=2, layers=layers, n=5))
    assert isinstance(found, TransportCheck)
    assert found.level.tolist() == levels
    assert found.exact.tolist() == found.geomloss.tolist() == [2.0] * len(levels)
    assert found.bound.tolist() == [0.5] * len(levels)
    monkeypatch.setattr(transports, "find_spec", lambda name: None)
    assert len(transport_check(clouds_of(texts=2, n=5)).level) == 0
    monkeypatch.setattr(transports, "find_spec", lambda name: True)
    answer.distance = torch.tensor(0.0)
    assert len(transport_check(clouds_of(texts=2, n=5)).level) == 0


def test_solvers_by_name_and_by_device(monkeypatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [solver(name, cpu) for name in ("auto", "exact", "geomloss")] == ["auto", "auto", "geomloss"]
    assert [solver(name, cuda) for name in ("auto", "exact")] == ["geomloss", "auto"]
    with pytest.raises(ValueError, match="transport = 'sinkhorn', expected exact, geomloss or auto"):
        solver("sinkhorn", cpu)
    asked: list[tuple[str, float]] = []

    def solve(x, y, *, method, rtol=0.01):
        asked.append((method, rtol))
        return SimpleNamespace(distance=torch.tensor(1.0))

    monkeypatch.setattr(transports, "solve", solve)
    for shapes, method in (((3, 3), "auto"), ((3, 4), "auto"), ((3, 3), "geomloss"), ((3, 3), "simplex")):
        w2(torch.zeros(shapes[0], 2), torch.zeros(shapes[1], 2), method)
    assert asked == [("assignment", 0.01), ("auto", 0.01), ("geomloss", 0.2), ("simplex", 0.01)]


# --- heads and limits ------------------------------------------------------------------------------------------------


def test_the_spectrum_of_a_head_of_full_rank_is_its_own() -> None:
    V = torch.diag(torch.tensor([-1.0, -3.0], dtype=F64))
    assert _head_spectrum(Attention.from_matrices(torch.eye(2, dtype=F64), V), 0) == (-1.0, 2.0, CASES.index("fixed"))
    eye = torch.eye(2, dtype=F64)[None]
    assert _head_spectrum(Attention(eye, eye, V[None], eye), 0) == (-1.0, 2.0, CASES.index("fixed"))
    row, column = torch.eye(3, dtype=F64)[None, :2], torch.eye(3, dtype=F64)[None, :, :2]
    same = Attention(row, row, row, 2 * column)  # all of its plane leads alike, and 0 beside it is slower
    assert _head_spectrum(same, 0) == (2.0, 2.0, CASES.index("fixed"))


def test_the_overlap_of_subspaces() -> None:
    U = torch.eye(4, dtype=F64)
    assert _overlap([U[:, :2], U[:, :2]]) == 1
    assert _overlap([U[:, :2], U[:, 1:3]]) == 0.5
    assert _overlap([U[:, :1], U[:, :3]]) == pytest.approx(1 / 3)
    assert _overlap([U[:, :3], U[:, :1]]) == pytest.approx(1 / 3)
    assert all(math.isnan(_overlap(bases)) for bases in ([], [U], [None, U], [U, None]))


# --- nulls -----------------------------------------------------------------------------------------------------------


def test_a_rotated_G_is_seen_from_another_side() -> None:
    A = Attention.from_matrices(normal(2, 4, 4), normal(2, 4, 4, seed=1))
    B = rotated(A, torch.Generator().manual_seed(3))
    R = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(3)).double())[0]
    torch.testing.assert_close(B.G, R.mT @ A.G @ R)
    torch.testing.assert_close(B.values, A.values)


def test_a_twin_without_a_config_is_initialised_anew() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.MultiheadAttention(4, 2)).train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    state = torch.random.get_rng_state()
    twin, again, other = (untrained_twin(model, seed) for seed in (5, 5, 6))
    assert torch.equal(state, torch.random.get_rng_state())
    assert not twin.training
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    for name in ("0.weight", "1.in_proj_weight"):
        found, same, third = (dict(z.named_parameters())[name] for z in (twin, again, other))
        assert torch.equal(found, same)
        assert not torch.equal(found, before[name])
        assert not torch.equal(found, third)


# --- through depth ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("texts", [1, 2, 3])
def test_neighbours_need_three_texts(texts: int) -> None:
    states = [[normal(3, 2, seed=9 * t + l) for l in range(2)] for t in range(texts)]
    e = nn.functional.normalize(normal(texts, 4), dim=-1)
    found = compare_passes(Passes(states, e), Passes(states, e), torch.ones(2, dtype=F64))
    assert found.w2.tolist() == [[0.0] * texts]
    if texts > 2:
        assert found.neighbour_agreement.tolist() == [1.0] * texts
        assert float(found.rank_correlation) == pytest.approx(1)
    else:
        assert bool(found.neighbour_agreement.isnan().all())
        assert bool(found.rank_correlation.isnan())


def test_inputs_of_the_texts_that_were_kept() -> None:
    ids = torch.arange(12).reshape(4, 3)
    assert chosen_inputs("tokenizer", ["a", "b", "c"], [0, 2]) == ("tokenizer", ["a", "c"])
    assert torch.equal(chosen_inputs(ids, None, [1, 3])[0], ids[[1, 3]])
    source = {"src": ids}
    assert chosen_inputs(source, None, [1])[0] is source
    source = {"input_ids": ids, "scale": torch.tensor(3.0), "table": torch.zeros(7, 2), "word": "x"}
    assert chosen_inputs(source, None, [0, 1, 2, 3])[0] is source
    found, texts = chosen_inputs(source, None, [1, 3])
    assert texts is None
    assert torch.equal(found["input_ids"], ids[[1, 3]])
    assert all(found[name] is source[name] for name in ("scale", "table", "word"))


def test_predictions_by_name_by_closure_and_by_function() -> None:
    clouds, generator = clouds_of(), torch.Generator()
    space = clouds.space(0, 0)
    mean = Closure("mean_closure", "", lambda s: Cloud(s.y.mean(-2, keepdim=True)), LADDER["gaussian_closure"].cost)
    others = torch.cat(clouds.out[0][1:]).mean(0)
    own = lambda space, layer, text: space.x
    for given, expected in (
        (mean, space.drift(Cloud(space.y.mean(-2, keepdim=True)))),
        ("gaussian_closure", space.drift(LADDER["gaussian_closure"].measure(space))),
        ("oracle", space.drift(oracle(space))),
        ("mean_output", others.expand(space.x.shape)),
        (own, space.x),
    ):
        torch.testing.assert_close(_prediction(given, clouds, generator)(space, 0, 0), expected)


# --- words -----------------------------------------------------------------------------------------------------------


def test_numbers_in_words() -> None:
    nan = math.nan
    assert span(torch.tensor([0.5, nan, 0.25, 1.5])) == "0.25 to 1.50"
    assert span(torch.tensor([0.5, 0.501])) == "0.50"
    assert span(torch.tensor([nan])) == "not defined"
    assert by_layer(torch.tensor([0.5, -0.25, 1.0, -2.5, 10.25, 0.0])) == ".50 -.25 1.00 -2.50 10.25 .00"
    assert [layers_named(z, 3) for z in ([], [1], [0, 2], [0, 1, 2])] == [
        "no layer", "layer 1", "layers 0, 2", "every layer",
    ]  # fmt: skip


def test_the_verdict_of_one_number() -> None:
    one = lambda low, high: Interval(*(torch.tensor(z) for z in ((low + high) / 2, low, high)))
    assert decide(one(0.5, 0.6), [one(0.1, 0.2)]) == ("supported", [0])
    assert decide(one(0.5, 0.6), [one(0.1, 0.5)]) == ("not supported", [])
    assert decide(one(0.0, 0.6), []) == ("not supported", [])
    assert decide(one(0.5, 0.6), [one(math.nan, math.nan)]) == (None, [])


def test_an_interval_is_that_of_resampled_texts() -> None:
    above, below = normal(2, 6).abs(), 1 + normal(2, 6, seed=1).abs()
    found = ratio_of_means(above, below, seed=4, level=0.8)
    draws = torch.randint(6, (1000, 6), generator=torch.Generator().manual_seed(4))
    for row in range(2):
        ratios = sorted(float(above[row][d].mean() / below[row][d].mean()) for d in draws)
        place = lambda share, ratios=ratios: ratios[math.floor(999 * share)]
        assert place(0.1) <= float(found.low[row]) <= place(0.1 + 2e-3)
        assert place(0.9 - 2e-3) <= float(found.high[row]) <= place(0.9 + 2e-3)
        assert float(found.mean[row]) == pytest.approx(float(above[row].mean() / below[row].mean()))


def test_intervals_are_of_ninety_five_percent() -> None:
    values, below = normal(3, 8), 1 + normal(3, 8, seed=1).abs()
    for plain, given in (
        (bootstrap(values), bootstrap(values, 0, 0.95)),
        (ratio_of_means(values, below), ratio_of_means(values, below, 0, 0.95)),
    ):
        assert torch.equal(plain.low, given.low)
        assert torch.equal(plain.high, given.high)


# --- the run ---------------------------------------------------------------------------------------------------------


def asked(clouds: Clouds, **about: Any) -> run.Inquiry:
    words = {"seed": 3, "transport": "exact", "controls": {}, "nulls": {}, "max_length": 9, "beta_factor": 2.0}
    words |= {"batch": 5, "key": "k", "device": "cpu"}
    return run.Inquiry(nn.Identity(), None, None, clouds, words | about)


def test_stages_look_at_sixteen_texts(monkeypatch) -> None:
    clouds = clouds_of(texts=18, layers=1, n=3)
    inquiry = asked(clouds, nulls=dict.fromkeys(("uniform", "removed")), controls=run.CONTROLS)
    stages = inquiry._stages()
    assert stages["closures/gaussian_closure"].args[0].texts == 16
    assert stages["nulls/uniform"].args[1].texts == 16
    assert stages["closures/text_mean_closure"].args[1].texts == 16
    assert stages["propagation/text_mean_closure"].args[1] is None
    laid: list[tuple[Any, ...]] = []
    monkeypatch.setattr(run, "bench", lambda *z: laid.append(z))
    assert inquiry._bench is None
    assert laid[0][3].texts == 16
    assert laid[0][4:] == (9, 2.0, 5, "exact")
    assert "propagation/removed" in stages
    assert "nulls/removed" not in stages
    assert "closures/cross_fitted_closure" in stages
    assert "closures/cross_fitted_closure" not in asked(clouds_of(causal=True, texts=1, n=3))._stages()
    assert [name for name in stages if "/" not in name] == [
        "law_alone", "limits", "heads", "evolution", "view", "transports", "reading",
    ]  # fmt: skip


def test_every_stage_has_its_own_randomness() -> None:
    inquiry = asked(clouds_of(texts=1, layers=1, n=3))
    draw = lambda of, stage: of._generator(stage).initial_seed()
    assert draw(inquiry, "view") == draw(inquiry, "view")
    seeds = {draw(inquiry, "view"), draw(inquiry, "limits"), draw(asked(inquiry.clouds, seed=4), "view")}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**56 for seed in seeds)
    assert max(seeds) > 2**48


def test_shared_stages_are_kept_apart_for_each_process(tmp_path) -> None:
    inquiry = asked(clouds_of(texts=1, layers=1, n=3))
    assert inquiry._folder(tmp_path, "evolution") == tmp_path
    several = replace(inquiry, world=Processes(1, 3, torch.device("cpu")))
    assert several._folder(tmp_path, "evolution") == tmp_path / "1-of-3"
    assert several._folder(tmp_path, "heads") == tmp_path
    assert several._folder(None, "evolution") is None
    assert inquiry.world is ALONE


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_stage_is_run_once_whatever_the_threads(threads: int, monkeypatch) -> None:
    """The encoder's stages beside the others on half of the threads; and each process its own part of them."""
    used: dict[str, int] = {}
    held = {"threads": threads}
    monkeypatch.setattr(torch, "get_num_threads", lambda: held["threads"])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: held.update(threads=n))
    names = ["propagation/a", "closures/a", "law_alone", "nulls/untrained", "evolution", "heads", "nulls/b"]

    def stages(self):
        return {name: lambda name=name: used.update({name: held["threads"]}) for name in names}

    monkeypatch.setattr(run.Inquiry, "_stages", stages)
    monkeypatch.setattr(run, "Probe", lambda about, **found: found)
    found = asked(clouds_of(texts=1, layers=1, n=3)).answer()
    assert sorted(used) == sorted(names)
    assert set(used.values()) == {max(1, threads // 2)}
    assert held["threads"] == threads
    assert set(found["nulls"]) == {"untrained", "b"}
    assert "law_alone" in found
    monkeypatch.setattr(run, "_of_all", lambda done, world: dict.fromkeys(names))
    parts = []
    for rank in range(2):
        used.clear()
        replace(asked(clouds_of(texts=1, layers=1, n=3)), world=Processes(rank, 2, torch.device("cpu"))).answer()
        parts.append(set(used))
    assert parts[0] & parts[1] == {"evolution"}
    assert parts[0] | parts[1] == set(names)
    assert parts[0] == {"propagation/a", "nulls/untrained", "heads", "evolution"}  # in turn, the encoder's first


@pytest.mark.parametrize(("share", "known", "omits", "places"), [
    (0.0099, True, "", "rotary"), (0.0101, True, None, None), (0.5, False, "rotary", ""),
    (math.nan, True, "rotary", ""),
])  # fmt: skip
def test_places_that_leave_a_hundredth_unexplained_were_misread(share, known, omits, places, monkeypatch) -> None:
    piece = SimpleNamespace(make=lambda: SimpleNamespace(inputs={}))
    taken: list[Any] = []
    monkeypatch.setattr(run, "pieces", lambda *given: taken.append(given[2:]) or [piece])
    check = SimpleNamespace(layer=0, error=0.25, exact=True, omits="rotary")
    monkeypatch.setattr(run, "self_check", lambda *_: [check])
    monkeypatch.setattr(run, "omitted_shares", lambda *_: [share])
    block = SimpleNamespace(positions="rotary", knows_places=known, architecture=SimpleNamespace(name="made"))
    monkeypatch.setattr(run, "blocks", lambda _: [block])
    checked = lambda: run._checked(nn.Linear(1, 1), None, ["a", "b", "c"], 7)
    if omits is None:
        with pytest.raises(ValueError, match=r"leave 0\.01 of the variance of its logits unexplained"):
            checked()
        return
    (found,) = checked()
    assert (found["omits"], found["places"]) == (omits, places)
    assert (found["layer"], found["error"], found["exact"]) == (0, 0.25, True)
    assert taken == [(["a", "b"], 2, 7)]
    check.omits = ""
    assert checked()[0]["omitted_logit_variance"] == 0


# --- stacks ----------------------------------------------------------------------------------------------------------


def test_the_rounding_allowed_to_a_stack_is_counted() -> None:
    torch.manual_seed(0)
    made = DeepStack(12, 3, depth=1, dim=8, heads=2, length=24, ffn=0, beta=2.0, bias=True, dtype=F64)
    (A,), x = made.attentions(), normal(24, 8)
    with torch.no_grad():
        longest = max(float(z.norm()) for z in x)
        bias = 0.0 if A.value_bias is None else float(A.value_bias.norm())
        values = sum(float(A.tensors["O"][h].norm()) * float(A.tensors["V"][h].norm()) for h in range(2))
        assert float(stacks._size_of_terms(A, x)) == pytest.approx((values * longest + bias) * math.sqrt(24))
        logits = []
        for h in range(2):
            own = 0.0 if A.query_bias is None else float(A.query_bias[h].norm())
            query = float(A.Q[h].norm()) * longest + own
            logits.append(float(A.beta[h]) * query * float(A.tensors["K"][h].norm()) * longest)
        expected = 2 * (3 * 8 + 4) * max(logits) + 2 * 24 + 2 * 8 + 2 + 4
        assert stacks._length_of_sums(A, x) == pytest.approx(expected)


def test_inputs_of_a_stack() -> None:
    ids = torch.arange(6).reshape(2, 3)
    assert stacks.stack_inputs(ids) is ids
    assert stacks.stack_inputs({"ids": ids}) is ids
    assert stacks.chosen_rows(ids, [1]).tolist() == [[3, 4, 5]]
    for wrong in ({"a": ids, "b": ids}, ids[0], ids[:0], "x"):
        with pytest.raises(ValueError, match="a DeepStack is probed with its inputs"):
            stacks.stack_inputs(wrong)


def test_shorter_texts_than_a_bulk_needs() -> None:
    from attn_flow.probe.clouds import SHORTEST

    assert SHORTEST == 2 * (4 + 5) + 4
    torch.manual_seed(0)
    made = DeepStack(12, 3, depth=1, dim=8, heads=2, length=SHORTEST, ffn=0)
    ids = torch.zeros(1, SHORTEST, dtype=torch.long)
    assert stacks.record_stack(made, ids, 3.0).attentions[0].beta.tolist() == pytest.approx(
        (3 * made.attentions()[0].beta).tolist()
    )
    with pytest.raises(ValueError, match=f"have {SHORTEST - 1} tokens a text, expected at least {SHORTEST}"):
        stacks.record_stack(made, ids[:, 1:])


def test_another_start_is_taken_by_the_first_layer_alone() -> None:
    torch.manual_seed(0)
    made = DeepStack(12, 3, depth=2, dim=8, heads=2, length=24, ffn=0, placement="pre", dtype=F64)
    ids, begin = torch.arange(24) % 12, normal(24, 8)
    still = lambda layer, text, x: torch.zeros_like(x)
    plain, other = (stacks.run_stack(made, ids, still, 0, start) for start in (None, begin))
    torch.testing.assert_close(other[0] / other[0].norm(dim=-1, keepdim=True), begin / begin.norm(dim=-1, keepdim=True))
    assert not torch.allclose(plain[0], other[0])
    for x in other[1:]:
        torch.testing.assert_close(x, other[0])


def test_a_stack_of_vectors_is_checked_in_float64() -> None:
    torch.manual_seed(0)
    made = DeepStack(12, 3, depth=1, dim=8, heads=2, length=24, ffn=0, points=True)
    checked = stacks.check_stack(made, normal(2, 24, 12).float())
    assert checked[0]["error"] < 1e-12


def test_probe_and_inquire_have_the_same_defaults() -> None:
    defaults = [
        {name: z.default for name, z in inspect.signature(function).parameters.items()}
        for function in (run.probe, run.inquire)
    ]
    assert {name: defaults[0][name] for name in defaults[1]} == defaults[1]
    assert (defaults[0]["max_length"], defaults[0]["batch"], defaults[0]["max_unknown"]) == (160, 16, 0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta_factor": 0.0}, "beta_factor = 0.0, expected a positive, finite number"),
        ({"beta_factor": math.inf}, "beta_factor = inf"),
        ({"beta_factor": math.nan}, "beta_factor = nan"),
        ({"beta_factor": "2"}, "beta_factor = 2"),
        ({"nulls": ["rotated", "magic"]}, r"nulls has \['magic'\], expected some of mean_output"),
        ({"nulls": "rotated"}, "nulls is a str"),
        ({"max_length": 0}, "max_length = 0"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_options_are_refused_before_anything_runs(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run.inquire(nn.Identity(), None, **options)


def test_a_stage_is_kept_under_its_question(tmp_path) -> None:
    runs: list[int] = []

    def compute() -> Agreement:
        runs.append(1)
        return Agreement(*(normal(2, 3, seed=len(runs)) for _ in range(3)))

    first = run._kept(tmp_path, "closures/a", "key", compute)
    again = run._kept(tmp_path, "closures/a", "key", compute)
    assert len(runs) == 1
    assert torch.equal(first.explained, again.explained)
    assert [p.name for p in tmp_path.iterdir()] == ["closures.a.safetensors"]
    other = run._kept(tmp_path, "closures/a", "another", compute)
    assert len(runs) == 2
    assert not torch.equal(first.explained, other.explained)
    run._kept(None, "closures/a", "another", compute)
    assert len(runs) == 3


@pytest.mark.parametrize(("progress", "rank", "shown"), [(False, 0, False), (True, 0, True), (True, 1, False)])
def test_a_bar_is_shown_by_the_first_process_if_asked_for(progress, rank, shown, monkeypatch) -> None:
    bars: list[tuple[int, bool]] = []

    @contextmanager
    def bar(name, total, show):
        bars.append((total, show))
        yield lambda note: None

    monkeypatch.setattr(run, "progress_bar", bar)
    monkeypatch.setattr(
        run.Inquiry, "_stages", lambda self: {"heads": lambda: 1, "view": lambda: 2, "limits": lambda: 3}
    )
    monkeypatch.setattr(run, "SHARED", {})
    monkeypatch.setattr(run, "Probe", lambda about, **found: found)
    monkeypatch.setattr(run, "_of_all", lambda done, world: dict.fromkeys(("heads", "view", "limits")))
    inquiry = replace(asked(clouds_of(texts=1, layers=1, n=3)), world=Processes(rank, 2, torch.device("cpu")))
    inquiry.answer(progress=progress)
    assert bars == [(2 if rank == 0 else 1, shown)]
