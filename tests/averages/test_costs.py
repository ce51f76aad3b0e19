"""The model of what ways cost: its counts of operations, and what it is told of a cloud; no clock is read."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import fields, replace
from itertools import pairwise, product

import pytest
import torch

from attn_flow import Attention, Sphere
from attn_flow.attention import truncated
from attn_flow.averages import costs, dense, fourier, near
from attn_flow.averages.costs import MEASURED, SECONDS, Costs
from attn_flow.averages.patches import share_seen
from attn_flow.bench.choices import ways_of

SETS = list(MEASURED)


def sphere(n, d, dtype=torch.float64):
    return Sphere().uniform(n, d, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.mark.parametrize("name", SETS)
def test_constants_are_times_of_every_part(name):
    known = MEASURED[name]
    assert set(SECONDS) == {field.name for field in fields(Costs)}
    assert all(0 <= getattr(known, part) < 1 for part in SECONDS if part != "faint")
    assert known.faint >= 1


def test_operations_are_counted():
    one = Costs(**{**dict.fromkeys(SECONDS, 0.0), "faint": 1.0})
    counted = lambda **parts: replace(one, **parts)
    assert counted(pair=1.0, entry=0.5).dense(30, 70, 6, double=False) == 30 * 70 * (1 + 3)
    assert counted(pair64=1.0, entry64=0.5).dense(30, 70, 6, double=True) == 30 * 70 * (1 + 3)
    assert counted(pair=1.0).dense(64, 64, 6, double=False, causal=True) == 64**2 / 2
    assert counted(pair=1.0, faint=3.0).dense(8, 8, 6, double=False, faint=True) == 3 * 64
    assert counted(hard=1.0).dense(30, 70, 6, double=True, hard=True) == 30 * 70
    assert counted(order=1.0).patches(256, 256) == 256 * 8  # sorted once
    assert counted(order=1.0).patches(256, 1024) == 256 * 8 + 1024 * 10
    assert counted(kernel_order=1.0, order=9.0).patches(256, 256, kernel=True) == 256 * 8
    assert counted(bound=1.0).patches(640, 320) == 640 * 320 / 64
    assert counted(near=1.0, near64=3.0).near_pair(6, double=0.25) == 1.5
    assert counted(near_entry=1.0).near_pair(16, double=0.0) == 10
    assert counted(kernel_pair=1.0, kernel_entry=1.0, near=9.0).near_pair(8, double=0.0, kernel=True) == 3
    assert counted(circle=1.0, term=2.0).series(30, 70, terms=5) == 1 + 2 * 5 * 100


@pytest.mark.parametrize("name", SETS)
def test_more_costs_more(name):
    known, sizes = MEASURED[name], [1, 2, 33, 1000, 10**6]
    grows = lambda values: all(a <= b for a, b in pairwise(values))
    for double, hard, causal, faint in product((False, True), repeat=4):
        assert grows([known.dense(n, n, 6, double, hard, causal, faint) for n in sizes])
    for kernel in (False, True):
        assert grows([known.patches(n, n, kernel) for n in sizes])
        assert grows([known.near_pair(width, 0.0, kernel=kernel) for width in (2, 6, 8, 16)])
    assert grows([known.near_pair(6, double) for double in (0.0, 0.5, 1.0)])
    assert grows([known.series(100, 100, terms) for terms in (1, 10, 100)])


@pytest.mark.parametrize("name", SETS)
def test_below_the_fewest_pairs_all_pairs_are_the_way(name):
    known = MEASURED[name]
    n = math.isqrt(int(known.fewest_pairs))
    others = min(known.patches(n, n), known.patches(n, n, kernel=True), known.series(n, n, 1))
    for double, hard in product((False, True), repeat=2):
        assert known.dense(n, n, 0, double, hard, faint=True) < others


def test_assumed_constants_end_with_their_block():
    before, other, third = costs.here(), *(replace(costs.here(), fixed=fixed) for fixed in (1.0, 2.0))
    with costs.assumed(other):
        with suppress(KeyError), costs.assumed(third):
            assert costs.here() is third
            raise KeyError
        assert costs.here() is other
    assert costs.here() is before


@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("beta", [1.0, 1e2, 1e3, 1e4])
def test_what_is_near_is_foreseen(d, beta, monkeypatch):
    """From eight queries, before anything is sorted: the share of pairs to a factor 1.5, and which need float64."""
    x, tolerance, spreads = sphere(4096, d), truncated.TRUNCATION[torch.float32], []
    select = near.select

    def watched(*of):
        found = select(*of)
        spreads.append(found.spread)
        return found

    monkeypatch.setattr(near, "select", watched)
    found = near.softmax(x, x, x.float(), tolerance=tolerance, scale=beta)
    share, precise = share_seen(x, x, None, beta, math.log(4096 / tolerance), paired=True)
    assert found.pairs / 1.5 < share < 1.5 * found.pairs
    wide = beta * torch.cat(spreads) > dense.LOGIT_RANGE
    assert abs(precise - float(wide.float().mean())) < 0.25


def test_terms_are_what_the_series_sums():
    x = sphere(2000, 2)
    for beta in (0.0, 1.0, 1e2, 1e4):
        assert fourier.fits(x, x, beta, 1e-6, x.dtype) == fourier.terms(beta * float(x.norm(dim=-1).max() ** 2))


@pytest.mark.parametrize("d", [2, 3])
def test_every_way_is_the_one_it_is_called(d, monkeypatch):
    taken = []
    for module, name in ((near, "softmax"), (near, "hardmax"), (fourier, "softmax")):
        whole = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *z, of=module, whole=whole, **o: taken.append(of) or whole(*z, **o))
    x = sphere(300, d, torch.float32)
    for beta in (1.0, 1e4, math.inf):
        expected = {"dense": [], "near": [near], **({"fourier": [fourier]} if d == 2 and beta < math.inf else {})}
        ways = ways_of(Attention.identity(d, beta), x)
        assert set(ways) == set(expected)
        for name, way in ways.items():
            way()
            assert taken == expected[name]
            taken.clear()


def test_every_kind_of_near_pair_is_counted():
    one = Costs(**{**dict.fromkeys(SECONDS, 0.0), "faint": 1.0})
    counted = lambda **parts: replace(one, **parts)
    kinds = {"near": 1.0, "near64": 3.0, "masked": 5.0, "near_hard": 7.0, "near_entry": 0.5}
    assert counted(**kinds).near_pair(8, double=0.0, masked=True) == 5 + 0.5 * 2
    assert counted(**kinds).near_pair(8, double=0.0, hard=True) == 7 + 0.5 * 2
    assert counted(**kinds).near_pair(4, double=1.0) == 3  # no narrower than it was measured
    assert counted(kernel_pair=1.0, kernel_entry=1.0).near_pair(4, double=1.0, kernel=True) == 1
    assert counted(order=1.0).patches(1, 1) == 1  # a point is looked at
    assert counted(order=1.0).patches(2, 1) == 2 + 1
    whole = {"kernel_fixed": 2.0, "kernel_order": 3.0, "kernel_bound": 5.0, "fixed": 7.0, "order": 11.0, "bound": 13.0}
    assert counted(**whole).patches(16, 64) == 7 + 11 * (16 * 4 + 64 * 6) + 13 * 16
    assert counted(**whole).patches(16, 64, kernel=True) == 2 + 3 * (16 * 4 + 64 * 6) + 5 * 16
    assert counted(hard=1.0).dense(8, 8, 6, double=False, hard=True, causal=True) == 32
    pairs = {"fixed": 5.0, "kernel_fixed": 7.0, "circle": 6.0, "pair": 0.1, "pair64": 0.2, "faint": 3.0, "hard": 0.5}
    assert counted(**pairs).fewest_pairs == 5 / (3 * 0.2)
    assert replace(one, **{**pairs, "hard": 2.0, "circle": 1.0}).fewest_pairs == 1 / 2
    assert replace(one, **{**pairs, "pair": 4.0, "kernel_fixed": 3.0}).fewest_pairs == 3 / 4


def test_constants_are_those_of_the_instruction_set(monkeypatch):
    for name in (*SETS, "SVE256"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=name: name)
        assert costs.here() == MEASURED.get(name, MEASURED["AVX2"])
