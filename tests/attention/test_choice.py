"""Which way a drift takes, by what each way costs: prices as they are added up, both sides of every decision."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from attn_flow import Attention
from attn_flow.attention import drift, truncated
from attn_flow.attention.truncated import _Prices, _ways
from attn_flow.averages import compiled, costs, fourier, near
from attn_flow.averages.costs import SECONDS, Costs

F64 = torch.float64
FREE = Costs(**{**dict.fromkeys(SECONDS, 0.0), "faint": 1.0})
DEAR = Costs(**{name: 2.0 + i for i, name in enumerate(SECONDS)})  # no two alike


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


# --- prices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("compiled_kernel", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"self_attention": False}, {"kind": "hardmax"}, {"kind": "sinkhorn"}]
)
def test_prices_are_told_what_the_drift_is(dtype, compiled_kernel, options, monkeypatch) -> None:
    monkeypatch.setattr(compiled, "_used", compiled_kernel)
    for d, k in ((3, 2), (20, 16), (20, 17), (5, 5), (9, 4)):
        p = Attention.random(d, 2, k, dtype=dtype, **options).prepared()
        wide = min(d, k)  # what has full rank acts elsewhere
        cold = options.get("kind") == "hardmax"
        masked = "causal" in options or "self_attention" in options
        served = compiled_kernel and dtype == torch.float32 and wide <= 8 and "self_attention" not in options
        with costs.assumed(DEAR):
            found = _Prices.of(p, torch.zeros(7, d, dtype=dtype), torch.zeros(11, d, dtype=dtype))
        assert found == _Prices(
            known=DEAR,
            m=7,
            n=11,
            width=2 * wide,
            double=dtype == F64,
            cold=cold,
            causal="causal" in options,
            masked=masked,
            kernel=served and not cold,
            patched=wide <= 16,
            on_a_circle=wide == 2 and not cold and not masked,
        )


PLAIN = _Prices(DEAR, 7, 11, 8, False, False, False, False, False, True, False)


@pytest.mark.parametrize("changes", [
    {}, {"double": True}, {"cold": True}, {"causal": True, "masked": True}, {"kernel": True}, {"patched": False},
    {"on_a_circle": True}, {"on_a_circle": True, "patched": False},
])  # fmt: skip
def test_prices_are_added_up(changes: dict[str, bool]) -> None:
    prices = replace(PLAIN, **changes)
    kernel, masked, cold, double = prices.kernel, prices.masked, prices.cold, prices.double
    for twice in (False, True):
        for faint in (False, True):
            assert prices.all_pairs(twice, faint) == DEAR.dense(7, 11, 8, twice, cold, prices.causal, faint)
    assert prices.series(0) == math.inf
    assert prices.series(5) == DEAR.series(7, 11, 5)
    patches = DEAR.patches(7, 11, kernel) if prices.patched else math.inf
    assert prices.patches == patches
    assert prices.foreseen == patches + DEAR.look * 11
    assert prices.least == min(prices.foreseen, DEAR.series(7, 11, 1) if prices.on_a_circle else math.inf)
    for share, precise in ((1.0, 0.0), (0.3, 0.5)):
        pair = DEAR.near_pair(8, 1.0 if double else precise, masked, cold, kernel)
        assert prices.pairs(share, precise) == pytest.approx(share * 77 * pair)
        assert prices.near(share, precise) == pytest.approx(patches + share * 77 * pair)
    assert prices.near(0.5) == prices.near(0.5, 0.0)


def test_dear_ways_are_the_least_where_they_are() -> None:
    """Whichever of patches and a series is cheaper bounds what any of them takes."""
    on = replace(PLAIN, on_a_circle=True)
    assert replace(on, known=replace(DEAR, fixed=1e6)).least == DEAR.series(7, 11, 1)
    assert replace(on, known=replace(DEAR, circle=1e6)).least == on.foreseen


# --- head by head and cloud by cloud ---------------------------------------------------------------------------------


def ways(monkeypatch, shares=(), terms=(), *, known=None, always=False, circle=True, everything=1e4, **options):
    """What `_ways` chooses for as many clouds as there are terms, if a look says these shares; and what it asked."""
    asked: list[tuple[Any, ...]] = []
    shares, counts = iter(shares), iter(terms)

    def share_seen(q, k, bias, scale, window, paired):
        asked.append((tuple(q.shape), scale, window, paired))
        return next(shares), 0.0

    monkeypatch.setattr(truncated, "share_seen", share_seen)
    monkeypatch.setattr(fourier, "fits", lambda *_: next(counts))
    known = known or replace(FREE, near=1.0, near64=1.0, near_hard=1.0, term=1.0)
    prices = _Prices(known, 100, 100, 4, True, False, False, False, options.pop("kernel", False), True, circle)
    p = Attention.random(2, dtype=F64, beta=3.0, **options).prepared()
    prices = replace(prices, cold=p.cold)
    x = drawn(len(terms), 100, 2)
    found = _ways(p, x, x, None, 1e-6, x.shape[:1], prices, everything, always)
    return found, asked


def test_a_series_where_it_is_cheaper_than_near_keys(monkeypatch) -> None:
    found, asked = ways(monkeypatch, [0.4, 0.3], [10, 90])  # series 2000 and 18000, near keys 4000 and 3000
    assert found == [True, False]
    assert asked == [((100, 2), 3.0, math.log(100 / 1e-6), True)] * 2
    _, asked = ways(monkeypatch, [0.4], [90], kernel=True)
    assert asked[0][3] is False
    _, asked = ways(monkeypatch, [0.4], [90], kind="hardmax", circle=False)
    assert asked == [((100, 2), 1.0, 0.0, False)]  # beta = inf: what is maximal, and nothing below


@pytest.mark.parametrize(("second", "pays"), [(1.5, True), (1.7, False)])
def test_all_pairs_unless_the_clouds_together_gain(second: float, pays: bool, monkeypatch) -> None:
    """The first gains 6000 of 10000; the second loses 5000 or 7000."""
    found, _ = ways(monkeypatch, [0.4, second], [0, 0])
    assert found == ([False, False] if pays else None)


def test_near_keys_are_looked_for_only_where_they_may_be_cheaper(monkeypatch) -> None:
    look = replace(FREE, near64=1.0, term=1.0, look=30.0)  # 3000 before anything is known
    found, asked = ways(monkeypatch, [0.1], [10], known=look)
    assert found == [True]
    assert not asked
    found, asked = ways(monkeypatch, [0.1], [20], known=look)
    assert found == [False]
    assert len(asked) == 1
    found, asked = ways(monkeypatch, [], [0], known=replace(look, look=101.0))
    assert found is None
    assert not asked


def test_asked_for_in_any_case_it_is_a_series_below_all_pairs(monkeypatch) -> None:
    assert ways(monkeypatch, [], [10, 90, 0], always=True) == ([True, False, False], [])
    assert ways(monkeypatch, [], [10, 90, 0], always=True, circle=False) == ([False] * 3, [])


# --- the whole choice ------------------------------------------------------------------------------------------------


def taken(monkeypatch, attention: Attention, x: Tensor, known: Costs, **options: Any) -> list[float]:
    """The shares of pairs up to which near keys are tried, of every call; [] if all pairs are the way."""
    most: list[float] = []

    def softmax(q, k, v, **given):
        most.append(given["most"])
        return near.Near(v.new_zeros(len(q), v.shape[-1]), q.new_zeros(len(q)), 0.0)

    with monkeypatch.context() as patch, costs.assumed(known):
        patch.setattr(near, "softmax", softmax)
        patch.setattr(near, "hardmax", softmax)
        patch.setattr(truncated, "share_seen", lambda *_, **__: (0.0, 0.0))
        truncated.over_near_keys(attention.prepared(), x, x, None, **options)
    return most


AXES = torch.eye(3).repeat(40, 1)  # tokens of length one, whose largest entry says sqrt(3)


@pytest.mark.parametrize(("beta", "near_keys"), [(49.0, False), (51.0, True)])
def test_weights_that_underflow_make_all_pairs_dear(beta: float, near_keys: bool, monkeypatch) -> None:
    known = replace(FREE, pair=1.0, pair64=1.0, faint=9.0, near=1.0, near64=1.0, fixed=2.0 * 120**2)
    x = AXES / math.sqrt(3)  # sqrt(3) times the largest entry is 1, and the length .58
    assert bool(taken(monkeypatch, Attention.identity(3, beta), x, known)) is near_keys


@pytest.mark.parametrize(("beta", "near_keys"), [(199.0, False), (201.0, True)])
def test_logits_that_need_float64_make_all_pairs_dear(beta: float, near_keys: bool, monkeypatch) -> None:
    """Tokens as long as they are: their largest entries would say three times as much."""
    known = replace(FREE, pair=1.0, pair64=9.0, near=1.0, near64=1.0, fixed=2.0 * 120**2)
    assert bool(taken(monkeypatch, Attention.identity(3, beta), AXES, known)) is near_keys
    assert taken(monkeypatch, Attention.identity(3, 1.0, dtype=F64), AXES.double(), known)


@pytest.mark.parametrize(("near_pair", "most"), [(0.5, 1.0), (4.0, 0.25)])
def test_near_keys_are_given_up_where_they_cost_as_much_as_all(near_pair: float, most: float, monkeypatch) -> None:
    known = replace(FREE, pair=1.0, pair64=1.0, near=near_pair, near64=near_pair)
    attention = Attention.identity(3, 10.0)
    assert taken(monkeypatch, attention, AXES, known) == [most]
    assert taken(monkeypatch, attention, AXES, known, always=True) == [1.0]
    assert taken(monkeypatch, attention, torch.stack([AXES, AXES]), known) == [most, most]


@pytest.mark.parametrize(("pair", "most"), [(0.9, 1.0), (1.1, 1 / 1.1)])
def test_the_compiled_kernel_over_all_pairs(pair: float, most: float, monkeypatch) -> None:
    """Where it takes less than torch over every pair, nothing is given up."""
    monkeypatch.setattr(compiled, "_used", True)
    known = replace(FREE, pair=1.0, pair64=1.0, kernel_pair=pair)
    assert taken(monkeypatch, Attention.identity(3, 10.0), AXES, known) == [pytest.approx(most)]


@pytest.mark.parametrize("options", [
    {"truncation": 0.0}, {"kind": "unnormalised"}, {"kind": "linear"}, {"kind": "hardmax", "causal": True},
    {"kind": "hardmax", "self_attention": False},
])  # fmt: skip
def test_what_has_no_near_keys(options: dict[str, Any], monkeypatch) -> None:
    assert not taken(monkeypatch, Attention.identity(3, 10.0, **options), AXES, FREE, always=True)
    assert taken(monkeypatch, Attention.identity(3, 10.0), AXES, FREE, always=True)


def test_the_share_left_out_is_that_of_the_dtype_unless_given(monkeypatch) -> None:
    seen: list[float] = []

    def softmax(q, k, v, **given):
        seen.append(given["tolerance"])

    monkeypatch.setattr(near, "softmax", softmax)
    for options, dtype in (({}, torch.float32), ({}, F64), ({"truncation": 1e-4}, F64)):
        p = Attention.identity(3, 10.0, dtype=dtype, **options).prepared()
        assert truncated.over_near_keys(p, AXES.to(dtype), AXES.to(dtype), None, always=True) is None
    assert seen == [1e-6, 1e-12, 1e-4]


# --- at once or in parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "entries"), [
    ({}, 840), ({"causal": True}, 840), ({"kind": "hardmax"}, 1680), ({"kind": "linear"}, 1680),
    ({"self_attention": False}, 1680), ({"kind": "unnormalised"}, 1680),
])  # fmt: skip
def test_large_drifts_go_in_parts(options: dict[str, Any], entries: int, monkeypatch) -> None:
    """Queries, keys, values and averages of width 2, 3 heads, 5 clouds of 7 tokens; twice that beside the kernel."""
    took: list[str] = []
    for name in ("_attend", "_head_by_head", "_in_parts"):
        monkeypatch.setattr(drift, name, lambda p, x, *_, name=name, **__: took.append(name) or torch.zeros_like(x))
    p = Attention.random(4, 3, 2, dtype=F64, **options).prepared()
    x = drawn(5, 7, 4)

    def way(**given: bool) -> str:
        took.clear()
        drift.against_cloud(p, x, x, None, **given)
        return took[0]

    for gradient, limit, parts in ((False, "AT_ONCE", "_in_parts"), (True, "AT_ONCE_WITH_GRADIENT", "_head_by_head")):
        x.requires_grad_(gradient)
        monkeypatch.setattr(drift, "AT_ONCE", 0)
        monkeypatch.setattr(drift, "AT_ONCE_WITH_GRADIENT", 0)
        monkeypatch.setattr(drift, limit, entries)
        assert way() == "_attend"
        monkeypatch.setattr(drift, limit, entries - 1)
        assert way() == parts
        assert way(at_once=True) == "_attend"
        with torch.no_grad():
            assert way() == "_in_parts"
    x.requires_grad_(False)
    for queries, keys in ((x, x[0]), (x[0], x)):  # batches of either
        for limit, expected in ((entries, "_attend"), (entries - 1, "_in_parts")):
            monkeypatch.setattr(drift, "AT_ONCE", limit)
            took.clear()
            drift.against_cloud(p, queries, keys, None)
            assert took == [expected]
    took.clear()
    torch.func.vmap(lambda z: drift.against_cloud(p, z, z, None))(x.detach())  # nothing is looked at
    assert took == ["_attend"]


def test_near_keys_are_thought_of_from_some_pairs_on(monkeypatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(truncated, "over_near_keys", lambda p, x, *_: asked.append(len(x)))
    p = Attention.identity(3, dtype=F64).prepared()
    known = replace(FREE, fixed=42.0, circle=42.0, kernel_fixed=42.0, pair=1.0)
    with costs.assumed(known):
        for n in (5, 6, 7):
            drift.against_cloud(p, drawn(n, 3), drawn(7, 3), None)
        assert asked == [6, 7]
        asked.clear()
        x = drawn(7, 3).requires_grad_()
        drift.against_cloud(p, x, x, None)
        assert not asked
        with torch.no_grad():
            drift.against_cloud(p, x, x, None)
        assert asked == [7]
        asked.clear()
        with forward_ad.dual_level():
            drift.against_cloud(p, forward_ad.make_dual(drawn(7, 3), drawn(7, 3)), drawn(7, 3), None)
        assert not asked


def test_what_near_keys_found_is_the_drift(monkeypatch) -> None:
    found = SimpleNamespace(drift=drawn(7, 3))
    monkeypatch.setattr(truncated, "over_near_keys", lambda *_: found)
    p = Attention.identity(3, dtype=F64).prepared()
    with costs.assumed(replace(FREE, pair=1.0)):
        assert drift.against_cloud(p, drawn(7, 3), drawn(7, 3), None) is found.drift
