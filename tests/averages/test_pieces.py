"""The pieces the averages are made of, each against its definition: blocks, segments, patches, windows, bounds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_flow.averages import compiled, dense, fourier, near, patches, pointwise
from attn_flow.averages.patches import Patches, Selection

F64 = torch.float64
TINY = torch.finfo(torch.float32).tiny


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def on_circle(n: int, start: float = 0.0, length: float = 1.0) -> Tensor:
    angle = start + torch.arange(n, dtype=F64) * 2 * math.pi / n
    return length * torch.stack([angle.cos(), angle.sin()], -1)


# --- when float32 is too coarse --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("q", "k", "beta", "coarse"), [
    ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], 49.0, False),  # |q| |k| = 4
    ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], 51.0, True),
    ([2.0, 0.0, 0.0, 0.0], [0.0, 0.5, 0.0, 0.0], 199.0, False),  # lengths decide, not the largest entries
    ([2.0, 0.0, 0.0, 0.0], [0.0, 0.5, 0.0, 0.0], 201.0, True),
    ([-30.0, 1.0, 0.0, 0.0], [0.1, 0.0, 0.0, 0.0], 60.0, False),  # 30.02 * .1 * 60 = 180
    ([-30.0, 1.0, 0.0, 0.0], [0.1, 0.0, 0.0, 0.0], 70.0, True),
    ([1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], 0.0, False),
    ([1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], TINY / 2, True),  # few digits of beta itself
    ([1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], TINY, False),
    ([1e-30, 0.0, 0.0, 0.0], [1e-30, 0.0, 0.0, 0.0], 1e39, True),  # beta is no float32
    ([1e30, 0.0, 0.0, 0.0], [1e-38, 0.0, 0.0, 0.0], 1e9, True),  # beta q is none
    ([1e-38, 0.0, 0.0, 0.0], [1e30, 0.0, 0.0, 0.0], 1e9, False),
    ([1e25, 0.0, 0.0, 0.0], [1e25, 0.0, 0.0, 0.0], 1e-48, True),
    ([math.inf, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], 1.0, True),
    ([1.0, 0.0, 0.0, 0.0], [math.inf, 0.0, 0.0, 0.0], 1.0, True),
])  # fmt: skip
def test_float32_is_too_coarse_beyond_its_logits(q, k, beta, coarse) -> None:
    q, k = torch.tensor([q]), torch.tensor([k])
    assert dense.loses_digits(q, k, beta) is coarse
    assert dense.loses_digits(q, k, torch.tensor([beta, 0.0], dtype=F64)) is coarse  # of several the largest
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert dense.loses_digits(q, k, beta) is False
    assert dense.loses_digits(q.bfloat16(), k.bfloat16(), beta) is False


@pytest.mark.parametrize(("d", "beta", "leaves"), [
    (1, 1.0, False), (2, 1.0, True), (1, 0.5, False), (2, 0.5, True), (1, 2.0, True), (1, math.inf, False),
    (1, 1e-300, False),
])  # fmt: skip
def test_logits_beyond_float64_are_refused(d: int, beta: float, leaves: bool) -> None:
    x = torch.full((3, d), 1e154, dtype=F64)  # <x, x> = d 1e308, and the largest number is 1.8e308
    if leaves:
        with pytest.raises(FloatingPointError, match=r"tokens reach 1.0e\+154 as queries and 1.0e\+154 as keys"):
            dense.loses_digits(x, x, beta)
    else:
        assert dense.loses_digits(x, x, beta) is False


def test_lengths_and_largest_entries() -> None:
    z = torch.tensor([[3.0, -4.0], [0.0, 0.0], [3e200, -4e200], [-3e-200, 4e-200]], dtype=F64)
    torch.testing.assert_close(dense.lengths(z), torch.tensor([5.0, 0.0, 5e200, 5e-200], dtype=F64))
    assert dense.largest(z[:1]) == 4
    assert dense.largest(-z[:1]) == 4


# --- which kernel, and in which blocks -------------------------------------------------------------------------------


def test_the_fused_kernel_is_the_way_wherever_its_memory_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name where only that takes a bias under a causal mask; in blocks where masks compare pairs with a gradient."""
    taken: list[str] = []
    for module, name in ((dense.F, "scaled_dot_product_attention"), (dense, "_flash"), (dense, "in_blocks")):
        whole = getattr(module, name)
        watched = lambda *z, whole=whole, name=name, **o: taken.append(name) or whole(*z, **o)
        monkeypatch.setattr(module, name, watched)
    n = 20
    q, k, v, bias = drawn(n, 3), drawn(n, 3, seed=1), drawn(n, 3, seed=2), drawn(n, seed=3)

    def way(m: int = n, **options: object) -> set[str]:
        taken.clear()
        dense.softmax(q[:m], k, v, **options)
        return set(taken)

    fused, named, blocks = {"scaled_dot_product_attention"}, {"_flash"}, {"in_blocks"}
    assert way() == way(m=5) == way(causal=True) == way(key_bias=bias) == fused
    assert way(key_bias=bias, causal=True) == named
    assert way(m=5, causal=True) == way(m=5, causal=True, first=4) == way(m=5, exclude_self=True) == named
    assert way(exclude_self=True) == set()  # one segment, whose own keys are all there are
    learned = bias.clone().requires_grad_()
    assert way(key_bias=learned) == way(key_bias=learned, causal=True) == way(key_bias=learned, exclude_self=True)
    assert way(key_bias=learned) == blocks
    q.requires_grad_()
    assert way() == way(key_bias=bias) == way(causal=True) == fused
    assert way(key_bias=bias, causal=True) == named  # whose average has a gradient
    assert way(exclude_self=True) == way(m=5, causal=True) == blocks
    with torch.no_grad():
        assert way(m=5, exclude_self=True) == named
        taken.clear()
        dense.softmax_and_log_sum(q, k, v)
        assert set(taken) == named
    taken.clear()
    dense.softmax_and_log_sum(q, k, v)
    assert set(taken) == blocks  # the log-sum-exp of the kernel has none
    taken.clear()
    dense.softmax_and_log_sum(q.detach(), k, v, key_bias=learned)
    assert set(taken) == blocks


def test_keys_are_brought_into_the_shape_of_the_kernel() -> None:
    z = drawn(5, 4)
    assert dense._padded(z, 4) is z
    assert dense._padded(z.T, 5).stride(-1) == 1
    assert torch.equal(dense._padded(z.T, 5), z.T)
    wide = dense._padded(z, 6)
    assert torch.equal(wide[:, :4], z)
    assert wide.shape == (5, 6)
    assert not wide[:, 4:].any()


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_scale_that_may_be_flushed_is_zero(dtype: torch.dtype) -> None:
    q, tiny = drawn(3, 2).to(dtype), torch.finfo(dtype).tiny
    for scale in (0.0, tiny / 2):
        zero, one = dense._seen_scale(q, scale)
        assert not zero.any()
        assert one == 1
    assert dense._seen_scale(q, tiny) == (q, tiny)


@pytest.mark.parametrize(("block", "sizes"), [(500, [2, 2, 1]), (1000, [5]), (799, [3, 2])])
def test_blocks_of_clouds(block: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Five clouds of 20 queries and 10 keys: as many clouds at once as have `block` logits, and then all rows."""
    monkeypatch.setattr(dense, "BLOCK", block)
    q, k = drawn(5, 20, 3), drawn(5, 10, 3, seed=1)
    assert [(shape, keys, i) for shape, keys, i in blocks_of(q, k)] == [((z, 20), 10, 0) for z in sizes]


def blocks_of(q: Tensor, k: Tensor, causal_from: int | None = None) -> list[tuple[tuple[int, ...], int, int]]:
    """Clouds and rows of queries, keys, and the first row of each block."""
    seen = []

    def rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, i: int) -> tuple[Tensor, Tensor]:
        assert k.shape[1] == v.shape[1]
        seen.append((tuple(q.shape[:2]), k.shape[1], i))
        return q, q[..., 0]

    same, sums = dense.in_blocks(rows, q, k, k, None, causal_from)
    assert torch.equal(same, q)  # back in their places
    assert torch.equal(sums, q[..., 0])
    return seen


@pytest.mark.parametrize(("block", "step"), [(100, 16), (170, 17), (190, 19)])
@pytest.mark.parametrize("causal_from", [None, 0, 3])
def test_blocks_of_rows(block: int, step: int, causal_from: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never fewer than 16 rows; keys that are later than every row of a block are left out."""
    monkeypatch.setattr(dense, "BLOCK", block)
    n = 10 if causal_from is None else 40
    monkeypatch.setattr(dense, "BLOCK", block * n // 10)
    q, k = drawn(2, 40, 3), drawn(2, n, 3, seed=1)
    starts = range(0, 40, step)
    end = lambda i: n if causal_from is None else min(n, causal_from + i + step)
    expected = [((1, min(step, 40 - i)), end(i), i) for _ in range(2) for i in starts]
    assert blocks_of(q, k, causal_from) == expected


def test_blocks_are_recomputed_only_for_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    whole = dense.checkpoint
    monkeypatch.setattr(dense, "checkpoint", lambda *z, **o: taken.append(1) or whole(*z, **o))
    q, k = drawn(40, 3), drawn(40, 3, seed=1)
    learned = q.clone().requires_grad_()
    dense.hardmax(learned, k, k)
    assert not taken  # one block
    monkeypatch.setattr(dense, "BLOCK", 1)
    dense.hardmax(q, k, k)
    with torch.no_grad():
        dense.hardmax(learned, k, k)
    assert not taken
    dense.hardmax(learned, k, k)
    assert len(taken) == 3


@pytest.mark.parametrize("segment", [1, 7, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("first", "m"), [(0, 30), (0, 12), (5, 12), (18, 12)])
def test_segments_of_keys_join(segment: int, causal: bool, first: int, m: int, monkeypatch) -> None:
    """Without self-attention: keys before, beside and after each segment of queries."""
    monkeypatch.setattr(dense, "SEGMENT", segment)
    q, k, v, bias = drawn(m, 3), drawn(30, 3, seed=1), drawn(30, 2, seed=2), drawn(30, seed=3)
    hide = torch.zeros(m, 30, dtype=torch.bool)
    for i, j in itertools.product(range(m), range(30)):
        hide[i, j] = j == first + i or (causal and j > first + i)
    logits = (1.3 * q @ k.mT + bias).masked_fill(hide, -math.inf)
    options = {"key_bias": bias, "causal": causal, "exclude_self": True, "first": first, "scale": 1.3}
    average, log_sum = dense.softmax_and_log_sum(q, k, v, **options)
    torch.testing.assert_close(average, logits.softmax(-1).nan_to_num() @ v)
    torch.testing.assert_close(log_sum, logits.logsumexp(-1))


@pytest.mark.parametrize("flash", [True, False])
def test_a_bias_for_every_pair(flash: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not flash:
        monkeypatch.setattr(dense, "_has_flash", lambda *_: False)
    q, k, v, bias = drawn(2, 5, 3), drawn(2, 7, 3, seed=1), drawn(2, 7, 4, seed=2), drawn(2, 5, 7, seed=3)
    average, log_sum = dense.pairwise(q, k, v, bias, 1.7)
    logits = 1.7 * q @ k.mT + bias
    torch.testing.assert_close(average, logits.softmax(-1) @ v)
    torch.testing.assert_close(log_sum, logits.logsumexp(-1))


@pytest.mark.parametrize("block", [2**18, 40])
@pytest.mark.parametrize("kind", ["linear", "relu", "sigmoid"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize(("first", "m"), [(0, 37), (0, 20), (5, 25)])
def test_sums_of_pairs_are_their_formula(block, kind, causal, exclude_self, first, m, monkeypatch) -> None:
    monkeypatch.setattr(dense, "BLOCK", block)
    n, phi = 37, {"linear": lambda s: s, "relu": lambda s: s.clamp(min=0), "sigmoid": lambda s: 1 / (1 + (-s).exp())}
    q, k, v = drawn(2, m, 3), drawn(n, 3, seed=1), drawn(2, n, 4, seed=2)
    hide = torch.zeros(m, n, dtype=torch.bool)
    for i, j in itertools.product(range(m), range(n)):
        hide[i, j] = (exclude_self and j == first + i) or (causal and j > first + i)
    for bias in (None, drawn(n, seed=3)):
        w = torch.full((n,), 1 / n, dtype=F64) if bias is None else bias.exp()
        A = (phi[kind](1.3 * q @ k.mT) * w).masked_fill(hide, 0.0)
        options = {"key_bias": bias, "causal": causal, "exclude_self": exclude_self, "first": first, "scale": 1.3}
        torch.testing.assert_close(pointwise.weighted_sum(kind, q, k, v, **options), A @ v)
        torch.testing.assert_close(pointwise.weights(kind, 1.3 * q, k, bias, causal, exclude_self, first), A)


# --- patches ---------------------------------------------------------------------------------------------------------


def halved(x: Tensor, index: list[int], levels: int) -> list[set[int]]:
    """Across the widest axis into four parts of equal number, into two where an odd number of halvings is left."""
    if levels == 0:
        return [set(index)]
    cut = 1 if levels % 2 else 2
    z = x[index]
    axis = int((z.max(0).values - z.min(0).values).argmax())
    order = sorted(index, key=lambda i: float(x[i, axis]))
    size = len(order) // 2**cut
    parts = [order[i * size : (i + 1) * size] for i in range(2**cut)]
    return [one for part in parts for one in halved(x, part, levels - cut)]


@pytest.mark.parametrize("n", [5, 32, 33, 250, 512])
def test_patches_are_cut_across_the_widest_axis(n: int) -> None:
    x = drawn(n, 3, seed=n) * torch.tensor([1.0, 9.0, 3.0], dtype=F64)
    levels = max(0, math.ceil(math.log2(n / patches.SIZE)))
    size = math.ceil(n / 2**levels)
    rough = torch.cat([x, x[-1:].expand(size * 2**levels - n, 3)]).float()
    found = Patches.of(x)
    expected = halved(rough, list(range(len(rough))), levels)
    # Copies of the last point are at one place: which of them is where may differ.
    same = lambda i: min(int(i), n - 1)
    assert [sorted(map(same, z)) for z in found.index.tolist()] == [sorted(map(same, z)) for z in expected]
    assert found.index.shape == (2**levels, size)
    torch.testing.assert_close(found.points, rough.double()[found.index], rtol=1e-6, atol=1e-6)
    for points, centre, radius in zip(found.points, found.centre, found.radius):
        torch.testing.assert_close(centre, points.mean(0))
        assert float(radius) == pytest.approx(max(float((z - centre).norm()) for z in points))
    bias = found.gather(drawn(n, seed=1), -math.inf)
    assert int(bias.isneginf().sum()) == len(rough) - n
    two = found.paired()
    if levels:
        assert [set(z) for z in two.index.tolist()] == [
            set(a) | set(b) for a, b in zip(*(found.index[i::2].tolist() for i in (0, 1)))
        ]
    else:
        assert two is found


@pytest.mark.parametrize("entries", [1, 12 * 4, 40 * 4, 10**6])
def test_groups_are_rectangles_of_patches_alike(entries: int) -> None:
    """Every patch once, with its own keys and filling marked; rows no wider than 1.15 of the narrowest and one."""
    counts = [1, 9, 2, 3, 10, 10, 11, 40, 2, 2]
    start = torch.tensor([0, *itertools.accumulate(counts)])
    listed = torch.randperm(int(start[-1]), generator=torch.Generator().manual_seed(0))
    none = torch.zeros(len(counts))
    chosen = Selection(listed, start, none, none, none, none, none)
    seen, widths = [], []
    for group, near_keys, filling in chosen.groups(entries, 4):
        for a, keys, fill in zip(group.tolist(), near_keys, filling):
            assert keys[~fill].tolist() == listed[start[a] : start[a + 1]].tolist()
            seen.append(a)
        count = [counts[a] for a in group.tolist()]
        assert near_keys.shape == (len(group), max(count))
        assert max(count) <= 1.15 * min(count) + 1
        assert len(group) == 1 or near_keys.numel() * 4 <= entries
        widths.append((min(count), near_keys.shape))
    assert sorted(seen) == list(range(len(counts)))
    for (least, shape), (_, following) in itertools.pairwise(widths):  # the next one did not fit
        assert following[1] > 1.15 * least + 1 or (shape[0] + 1) * following[1] * 4 > entries


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("m", "n", "scale"), [(50, 300, 40.0), (300, 90, 400.0), (9, 40, 3.0), (300, 300, 2e4)])
def test_what_is_seen_is_estimated_from_some_queries(paired: bool, m: int, n: int, scale: float) -> None:
    """The estimate in words: balls of as many neighbours as a patch has, and keys that come nearer by their patch."""
    q, k = (z / z.norm(dim=-1, keepdim=True) for z in (drawn(m, 3), drawn(n, 3, seed=1)))
    bias, window = drawn(n, seed=2), 12.0
    fill = lambda size: math.ceil(size / 2 ** max(0, math.ceil(math.log2(size / patches.SIZE))))
    ball = lambda z, of, count: patches.CORNERS * sorted(float((z - w).norm()) for w in of)[min(count, len(of)) - 1]
    some = [q[i] for i in range(0, m, max(1, m // patches.SAMPLED))]

    def literal(times: int) -> tuple[float, float]:
        seen, precise = [], []
        for z in some:
            logits = [scale * float(z @ y) + float(b) for y, b in zip(k, bias)]
            top = max(logits)
            best = k[logits.index(top)]
            radius, reach, spreads = ball(z, q, times * fill(m)), ball(best, k, fill(n)), [0.0]
            for y, logit in zip(k, logits):
                away = float((y - best).norm())
                gap = (top - logit) * (max(0.0, 1 - reach / away) ** 2 if away else 0.0)
                spread = scale * radius * (away + reach)
                seen.append(gap <= window + spread)
                spreads += [spread] if seen[-1] else []
            precise.append(max(spreads) > dense.LOGIT_RANGE)
        return sum(seen) / len(seen), sum(precise) / len(precise)

    wide = sum(ball(z, q, 2 * fill(m)) for z in some) / len(some)
    joined = paired and patches.range_of_logits(wide, window, scale) <= dense.LOGIT_RANGE
    found = patches.share_seen(q, k, bias, scale, window, paired=paired)
    assert found == pytest.approx(literal(2 if joined else 1), abs=1e-6)


def test_the_range_of_logits_of_a_patch_on_a_sphere() -> None:
    """A key at distance t of k* matters up to scale t^2 / 2 = window + scale r t; its patch is wider by r."""
    r, window, scale = 0.2, 12.0, 40.0
    t = next(t / 1000 for t in range(10**4) if scale * (t / 1000) ** 2 / 2 > window + scale * r * t / 1000)
    assert patches.range_of_logits(r, window, scale) == pytest.approx(scale * r * (t + r), rel=1e-3)


def test_how_far_kept_keys_are_is_no_less_than_exact() -> None:
    """In float32, whose rounding is allowed for."""
    eps = torch.finfo(torch.float32).eps
    for seed in range(20):
        x = 1e3 + drawn(8 * patches.SIZE, 3, seed=seed)
        found = Patches.of(x)
        bias = torch.zeros(found.index.shape, dtype=F64)
        chosen = patches.select(found, found, bias, 1e-3, 1e-6)
        for a in range(len(found.index)):
            kept = chosen.listed[chosen.start[a] : chosen.start[a + 1]]
            balls = (found.centre[kept] - chosen.k_star[a]).norm(dim=-1) + found.radius[kept]
            exact, r = float(balls.max() * found.radius[a]), float(found.radius[a])
            assert exact <= float(chosen.spread[a]) <= exact + 14 * eps * r * float(x.abs().max())


def test_highest_logits_are_raised_by_all_that_may_round() -> None:
    """32 roundings of scale |c| |k| + |bias|, each the largest there is; whole numbers do not round themselves."""
    eps = torch.finfo(torch.float32).eps
    c = torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=F64)
    K = torch.tensor([[[6.0, 8.0], [0.0, -1.0]], [[1.0, 0.0], [-2.0, 1.0]]], dtype=F64)
    bias = torch.tensor([[0.0, -math.inf], [-40.0, 8.0]], dtype=F64)
    found = patches._highest_logits(c, K, bias, 2.0)
    exact = torch.tensor([[100.0, 4.0], [16.0, 10.0]])
    size = 2 * 5 * 10 + 40
    assert bool(((found - exact) / (32 * eps * size) - 1).abs().max() < 0.1)


def test_what_kept_keys_are_away_is_raised_by_what_may_round() -> None:
    """8 roundings of the longest coordinate; keys at a distance of 5 from k*, queries within 1 of 0."""
    eps = torch.finfo(torch.float32).eps
    one = lambda *points: Patches.around(torch.arange(len(points))[None], torch.tensor([points], dtype=F64))
    near_keys, far = one((0.0, 0.0), (0.0, 0.0)), one((3.0, 4.0), (3.0, 4.0))
    both = Patches(
        *(torch.cat([getattr(z, name) for z in (near_keys, far)]) for name in ("index", "points", "centre", "radius"))
    )
    found = patches.select(one((1.0, 0.0), (-1.0, 0.0)), both, torch.zeros(2, 2, dtype=F64), 1.0, 1e-6)
    assert found.listed.tolist() == [0, 1]
    assert 6.5 < (float(found.spread) - 5) / (4 * eps) < 9.5


# --- near keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("causal", "exclude_self"), [(True, False), (False, True), (True, True)])
def test_queries_that_see_nothing_of_what_was_chosen_say_so(causal: bool, exclude_self: bool) -> None:
    g, m, n = 3, 6, 5
    q, k, v, bias = drawn(g, m, 2), drawn(g, n, 2, seed=1), drawn(g, n, 3, seed=2), drawn(g, n, seed=3)
    bias[0, 1:] = bias[1, :2] = -math.inf  # one key, three, five
    i = torch.arange(m).expand(g, m).int()
    j = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(s))[:n] for s in range(g)]).int()
    j[0, 0] = 2
    hide = torch.zeros(g, m, n, dtype=torch.bool)
    for c, a, b in itertools.product(range(g), range(m), range(n)):
        hide[c, a, b] = (exclude_self and j[c, b] == a) or (causal and j[c, b] > a)
    logits = (2.0 * q @ k.mT + bias[:, None]).masked_fill(hide, -math.inf)
    mean, log_sum = near._masked(q, k, v, bias, i, j, causal, exclude_self, 2.0)
    torch.testing.assert_close(log_sum, logits.logsumexp(-1))
    sees = ~logits.isneginf().all(-1)
    assert bool(sees.any())
    assert not bool(sees.all())
    torch.testing.assert_close(mean[sees], (logits.softmax(-1) @ v)[sees])


@pytest.mark.parametrize("function", ["softmax", "hardmax"])
def test_more_pairs_than_asked_for_are_refused(function: str) -> None:
    """most: the share of pairs at which it gives up."""
    x = on_circle(600)
    call: Callable[..., near.Near | None] = getattr(near, function)
    options = {"tolerance": 1e-9, "scale": 300.0} if function == "softmax" else {}
    found = call(x, x, x, **options)
    assert found is not None
    assert 0 < found.pairs < 0.9
    same = call(x, x, x, most=found.pairs * 1.0001, **options)
    assert same is not None
    assert same.pairs == found.pairs
    assert call(x, x, x, most=found.pairs * 0.9999, **options) is None
    nobody = torch.full((600,), -math.inf, dtype=F64)
    assert call(x, x, x, key_bias=nobody, **options) is None
    nobody[7] = 0.0
    only = call(x, x, x, key_bias=nobody, **options)
    assert only is not None
    torch.testing.assert_close(only.average, x[7].expand(600, 2))


@pytest.mark.parametrize("bounds", [1, 2**21])
@pytest.mark.parametrize("entries", [1, 2**16])
def test_near_averages_in_any_portions(bounds: int, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "BOUNDS", bounds)
    monkeypatch.setattr(near, "ENTRIES", entries)
    monkeypatch.setattr(near, "MASKED_ENTRIES", entries)
    monkeypatch.setattr(dense, "BLOCK", 2**14)
    q, k = on_circle(300, 0.1), on_circle(200, length=1.5)
    v, bias = drawn(200, 3), drawn(200, seed=1)
    soft = near.softmax(q, k, v, tolerance=1e-9, key_bias=bias, scale=1e3)
    hard = near.hardmax(q, k, v, key_bias=bias)
    assert soft is not None
    assert hard is not None
    exact = torch.softmax(1e3 * q @ k.mT + bias, -1) @ v
    assert float((soft.average - exact).norm(dim=-1).max()) < 2e-9 * float(v.norm(dim=-1).max())
    assert float(soft.left_out.max()) <= 1e-9
    torch.testing.assert_close(hard.average, dense.hardmax(q, k, v, key_bias=bias)[0])
    assert soft.pairs < 0.5
    assert hard.pairs < 0.5


@pytest.mark.parametrize(("scale", "joined"), [(30.0, True), (3e5, False)])
def test_patches_of_queries_are_joined_while_float32_will_do(scale: float, joined: bool, monkeypatch) -> None:
    """Two by two, where their logits stay within its range; and so many at once as their bounds may be."""
    seen: list[tuple[int, ...]] = []
    select = near.select
    monkeypatch.setattr(near, "select", lambda part, *z: seen.append(tuple(part.index.shape)) or select(part, *z))
    monkeypatch.setattr(near, "BOUNDS", 3 * 16)
    x = on_circle(16 * patches.SIZE)
    wide = float(Patches.of(x).paired().radius.mean())
    range_ = patches.range_of_logits(wide, math.log(len(x) / 1e-6), scale)
    assert (range_ <= dense.LOGIT_RANGE) is joined
    near.softmax(x, x, x, tolerance=1e-6, scale=scale)
    size = patches.SIZE * (2 if joined else 1)
    whole, rest = divmod(len(x) // size, 3)
    assert seen == [(3, size)] * whole + [(rest, size)] * (rest > 0)
    seen.clear()
    near.hardmax(x, x, x)
    assert seen == [(3, patches.SIZE)] * 5 + [(1, patches.SIZE)]


# --- on the circle ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("b", [1e-20, 1e-3, 0.7, 30.0, 1e4, 1e8])
def test_as_many_terms_as_their_bound_asks_for(b: float) -> None:
    """The least K with e^{sqrt(b^2 + K^2) - b - K asinh(K / b)} below an eighth of a rounding."""
    b_ = max(b, fourier.EPS)
    exponent = lambda k: b_ - math.hypot(b_, k) + k * math.asinh(k / b_) + math.log(fourier.EPS / 8)
    low, high = 0, 10**6
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if exponent(middle) >= 0 else (middle, high)
    assert fourier.terms(b) in (high, high + 1)


def test_what_is_a_circle() -> None:
    """Lengths may differ by sixteen roundings of their dtype; and for queries of unequal lengths by less."""
    for dtype in (torch.float32, F64):
        eps = torch.finfo(dtype).eps
        for ulps, fits in ((15.0, True), (17.0, False)):
            k = on_circle(8)
            k[0] *= 1 + ulps * eps
            assert bool(fourier.fits(k, k, 1.0, 1e-3, dtype)) is fits
    k = on_circle(8)
    k[0] *= 1 + 1e-7
    q = 2 * on_circle(8)
    q[0] /= 2  # uncorrected: scale times both ranges
    for scale, fits in ((0.9e4, True), (1.1e4, False)):
        assert bool(fourier.fits(q, k, scale, 1e-3, torch.float32)) is fits
    assert fourier.fits(q, k, 5.0, 1e-3, torch.float32) == fourier.terms(5.0 * 2 * (1 + 1e-7))
    k3 = torch.cat([k, torch.zeros(8, 1, dtype=F64)], -1)
    assert fourier.fits(k3, k3, 1.0, 1e-3, F64) == 0


@pytest.mark.parametrize("length", [0.25, 1.0, 3.0])
def test_unequal_keys_are_corrected_for_a_query_of_mean_length(length: float) -> None:
    """In the direction of the keys nothing is lost by that: the query sees the longer one better by scale |q| u."""
    u, scale = 1e-6, 20.0
    k = torch.tensor([[1 + u / 2, 0.0], [1 - u / 2, 0.0]], dtype=F64)
    v, q = torch.tensor([[0.5], [-0.5]], dtype=F64), torch.tensor([[length, 0.0]], dtype=F64)
    found = fourier.softmax(q, k, v, tolerance=1e-5, scale=scale)
    assert float(found.average) == pytest.approx(math.tanh(scale * length * u / 2) / 2, rel=1e-4)
    assert float(found.left_out) < 1e-12


@pytest.mark.parametrize("unequal", [1e-7, 1.0])
@pytest.mark.parametrize("round_keys", [True, False])
def test_what_a_series_loses_is_said_to_the_last_piece(unequal: float, round_keys: bool) -> None:
    """Rounding of a small sum, one length for keys and queries that are unequal, and both: as derived, term by term."""
    q, k, bias, scale = on_circle(9, 0.1), on_circle(7, length=1.5), drawn(7), 3.0
    q[0] *= 1 + unequal  # within the tolerance of one length, and far from it
    if not round_keys:
        k[0] *= 1 + 1e-8
    found = fourier.softmax(q, k, k, tolerance=1e-5, key_bias=bias, scale=scale)
    lengths, norms = [float(z.norm()) for z in q], [float(z.norm()) for z in k]
    R = sum(norms) / 7
    w = torch.softmax(bias + scale * sum(lengths) / 9 * (torch.tensor(norms, dtype=F64) - R), 0)
    spread = lambda z: max(z) - min(z)
    uneven = spread(norms) / max(norms) + (spread(lengths) / max(lengths) if unequal < 1e-5 else 0.0)
    for i in range(9):
        b = scale * R * (sum(lengths) / 9 if unequal < 1e-5 else lengths[i])
        cosines = [float(q[i] @ k[j]) / lengths[i] / norms[j] for j in range(7)]
        mass = sum(float(w[j]) * math.exp(b * (cosines[j] - 1)) for j in range(7))
        lost = 4 * fourier.EPS / mass - min(math.log(mass), 0.0) * uneven + scale * spread(lengths) * spread(norms)
        assert float(found.left_out[i]) == pytest.approx(lost, rel=1e-5)


@pytest.mark.parametrize("entries", [1, 500, 2**18])
@pytest.mark.parametrize("lengths", ["one", "two", "zero"])
def test_a_series_in_any_portions(entries: int, lengths: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fourier, "ENTRIES", entries)
    q, k = on_circle(50, 0.1), on_circle(40, length=1.5)
    q[::2] *= {"one": 1.0, "two": 2.0, "zero": 0.0}[lengths]
    v, bias, scale = drawn(40, 3), drawn(40, seed=1), 3.0
    found = fourier.softmax(q, k, v, tolerance=1e-9, key_bias=bias, scale=scale)
    exact = torch.softmax(scale * q @ k.mT + bias, -1) @ v
    torch.testing.assert_close(found.average, exact, rtol=0, atol=1e-12)
    longest = float(q.norm(dim=-1).max()) * 1.5
    assert found.pairs == fourier.terms(scale * longest) / 40
    assert bool((found.left_out < 1e-12).all())


def test_queries_that_are_all_zero_see_the_mean_on_the_circle() -> None:
    k = on_circle(40)
    bias = drawn(40)
    found = fourier.softmax(torch.zeros(3, 2, dtype=F64), k, k, tolerance=1e-9, key_bias=bias)
    torch.testing.assert_close(found.average, (bias.softmax(-1) @ k).expand(3, 2))
    assert bool(found.left_out.isfinite().all())


# --- the compiled kernel ---------------------------------------------------------------------------------------------


def test_what_the_compiled_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, meta = torch.device("cpu"), torch.device("meta")
    x = torch.zeros(3, 8)
    monkeypatch.setattr(compiled, "_used", True)
    assert compiled.serves(8, torch.float32, cpu)
    assert compiled.orders(x)
    assert compiled.orders(x.double())
    for refused in ((9, torch.float32, cpu), (8, F64, cpu), (8, torch.float32, meta)):
        assert not compiled.serves(*refused)
    assert not compiled.orders(torch.zeros(3, 9))
    assert not compiled.orders(x.to("meta"))
    monkeypatch.setattr(compiled, "_used", False)
    assert not compiled.serves(8, torch.float32, cpu)
    assert not compiled.orders(x)
