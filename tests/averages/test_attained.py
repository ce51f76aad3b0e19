"""Every proved bound is attained by some cloud: a bound that lacks a piece fails here."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from torch import Tensor

from attn_flow import Attention
from attn_flow.attention import truncated
from attn_flow.attention.projections import _norm_bound
from attn_flow.averages import compiled, dense, fourier, near, sinkhorn
from attn_flow.averages.patches import SET_ASIDE, SIZE, Patches, _highest_logits, _threshold, select

F64 = torch.float64
EPS32 = torch.finfo(torch.float32).eps


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=F64)


# --- what a patch of keys may weigh ----------------------------------------------------------------------------------


def one_patch(points: Tensor, centre: Tensor, radius: float) -> Patches:
    """Any ball that holds its points is a patch."""
    assert float((points - centre).norm(dim=-1).max()) <= radius * (1 + 1e-12)
    return Patches(torch.arange(len(points))[None], points[None], centre, torch.tensor([radius], dtype=F64))


def joined(*patches: Patches) -> Patches:
    index = torch.cat([p.index + i * p.index.shape[1] for i, p in enumerate(patches)])
    points, centre, radius = (torch.cat([getattr(p, z) for p in patches]) for z in ("points", "centre", "radius"))
    return Patches(index, points, centre, radius)


def test_the_share_of_a_patch_is_attained() -> None:
    """A query at the edge of its ball, all keys at the edge of theirs, both on the line through k*.

    Then <q - c, k - k*> = |q - c| |k - k*|, and every key of the patch has the highest logit.
    """
    scale, r, rho, away, size, tolerance = 4.0, 0.3, 0.5, 2.0, 8, 0.05
    c, e = row(-1.0, 0.0), row(1.0, 0.0)
    queries = one_patch((c + r * e).repeat(size, 1), c, r)
    near_keys = one_patch(row(0.0, 0.0).repeat(size, 1), row(0.0, 0.0), 0.0)
    far_keys = one_patch((away * e).repeat(size, 1), (away - rho) * e, rho)
    keys = joined(near_keys, far_keys)
    found = select(queries, keys, torch.zeros(2, size, dtype=F64), scale, tolerance)
    assert found.listed.tolist() == [0]
    exact = math.exp(scale * (-1.0 + r) * away)  # over the weight of as many keys at 0
    rounding = 64 * EPS32 * scale * away
    assert exact <= float(found.left_out) <= exact * math.exp(rounding) + tolerance * SET_ASIDE
    # A tolerance just below keeps the patch.
    assert select(queries, keys, torch.zeros(2, size, dtype=F64), scale, exact).listed.tolist() == [0, 1]


def test_highest_logits_are_no_lower_than_exact_ones() -> None:
    """Coordinates that float32 rounds down by nearly half a unit: the product is then too low, and is raised."""
    c, k = row(1 + 0.49 * EPS32, 1 + 0.49 * EPS32), row(1 + 0.49 * EPS32, 1 + 0.49 * EPS32).repeat(4, 1)
    scale = 1e4
    exact = scale * float((c[0] * k[0]).sum())
    found = float(_highest_logits(c, k[None], torch.zeros(1, 4, dtype=F64), scale))
    assert float((scale * c).float().double() @ k[0].float().double()) < exact
    assert exact <= found <= exact + 64 * EPS32 * exact


@pytest.mark.parametrize(
    "shares",
    [
        [0.45] * 3 + [9.0],
        [0.3] * 4 + [0.9] * 4,
        [0.24] * 4,
        [2.0, 2.0, 2.0],
        [0.25] * 4,
        [0.5 - SET_ASIDE / 4] * 2 + [9.0, 9.0],  # together more than is left beside what is set aside
    ],
)
def test_what_is_below_the_threshold_sums_to_one_or_less(shares: list[float]) -> None:
    share = torch.tensor(shares, dtype=F64)
    row = torch.zeros(len(share), dtype=torch.long)
    below = share.log() <= _threshold(share.log(), share, row, 1, len(share))
    assert float(share[below].sum()) <= 1 - SET_ASIDE


def test_the_reference_weighs_no_more_than_all_keys() -> None:
    """And for the centre of a patch as much as the patch of keys that is nearest to it."""
    x = torch.randn(8 * SIZE, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    found = Patches.of(x)
    bias = found.gather(torch.linspace(-1, 1, len(x), dtype=F64))
    for scale in (1.0, 30.0):
        chosen = select(found, found, bias, scale, 1e-6)
        of_all = torch.logsumexp(scale * x @ x.mT + torch.linspace(-1, 1, len(x), dtype=F64), -1)[found.index]
        reference = lambda q, chosen=chosen, scale=scale: scale * (q * chosen.k_star[:, None]).sum(-1)
        assert bool((reference(found.points) + chosen.bias_star[:, None] <= of_all + 1e-12 * scale * 30).all())
        own = (found.index[:, :, None] == chosen.nearest).any(1).long().argmax(0)  # the patch of each nearest key
        logits = scale * (found.points[own] @ found.centre[..., None])[..., 0] + bias[own]
        at_centre = reference(found.centre[:, None])[:, 0] + chosen.bias_star
        torch.testing.assert_close(at_centre, torch.logsumexp(logits, -1), rtol=0, atol=1e-12 * scale * 30)


# --- the error of an average and of a drift --------------------------------------------------------------------------


def two_places(log_share: float, far_patches: int = 1, near_patches: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Queries x at the ends of their ball, keys y at 0 (one seen, the others masked) and at e: y, x and a bias.

    With scale 1 the queries at one end give each far key e^log_share of the weight of the one at 0, the bound's value.
    """
    r = 0.2 * -log_share
    c = log_share - r
    x = torch.cat([row(c + r, 0.0).repeat(SIZE // 2, 1), row(c - r, 0.0).repeat(SIZE // 2, 1)])
    y = torch.cat([row(0.0, 0.0).repeat(near_patches * SIZE, 1), row(1.0, 0.0).repeat(far_patches * SIZE, 1)])
    bias = torch.zeros(len(y), dtype=F64)
    bias[1 : near_patches * SIZE] = -math.inf
    return x, y, bias


TOLERANCE = 1e-3


def exact_average(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(x @ y.mT + bias, dim=-1) @ y


@pytest.mark.parametrize("near_patches", [1, 3])
@pytest.mark.parametrize("stretch", [1.0, 3.0])
def test_the_error_of_a_truncated_drift_is_attained(near_patches: int, stretch: float) -> None:
    """Values at two places: what is left out is two radii away, and V stretches it."""
    unseen = near.UNSEEN * TOLERANCE
    share = 0.8 * (TOLERANCE - unseen)
    x, y, bias = two_places(math.log(share / SIZE), near_patches=near_patches)
    V = torch.diag(torch.tensor([stretch, 1.0], dtype=F64))
    attention = Attention(torch.eye(2, dtype=F64), V=V, truncation=TOLERANCE)
    found = truncated.over_near_keys(attention.prepared(), x, y, bias[None], always=True)
    assert found is not None
    assert found.pairs == 1 / (near_patches + 1)  # masked keys need no look
    error = (found.drift - exact_average(x, y, bias) @ V.mT).norm(dim=-1)
    assert bool((error <= found.error + 1e-12).all())
    if near_patches == 1:
        assert float((error / found.error).max()) > 0.99 * share / (share + unseen)


def test_a_patch_above_its_part_of_the_tolerance_is_kept() -> None:
    """Close to the tolerance: a tenth of it is promised to what the compiled kernel leaves out."""
    x, y, bias = two_places(math.log(0.87 * TOLERANCE / SIZE))  # patches below 0.917 of what is allowed are left out
    found = near.softmax(x, y, y, tolerance=TOLERANCE, key_bias=bias)
    assert found is not None
    assert found.pairs == 1


def test_many_patches_that_are_each_next_to_nothing_are_counted() -> None:
    """Fifteen with a sixteenth of the tolerance or less each: all are left out, and what they weigh is said."""
    allowed = (1 - near.UNSEEN) * TOLERANCE
    x, y, bias = two_places(math.log(0.6 * allowed / (15 * SIZE)), far_patches=15)
    found = near.softmax(x, y, y, tolerance=TOLERANCE, key_bias=bias)
    assert found is not None
    assert found.pairs == 1 / 16
    error = (found.average - exact_average(x, y, bias)).norm(dim=-1)
    assert bool((error <= found.left_out + 1e-15).all())
    assert float(error.max()) > 0.59 * allowed


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("part", "attained"), [(0.99, True), (0.6 * 16 * SIZE, False)])
def test_what_the_compiled_kernel_leaves_out_is_counted(part: float, attained: bool) -> None:
    """Fifteen patches just below its gap make up its part of the tolerance; one that is above, times n, is not left.

    Queries are apart where no key is: the bound does not know it, and keeps the patches.
    """
    n, unseen = 16 * SIZE, near.UNSEEN * TOLERANCE
    depth = -math.log(part * unseen / n)
    x = torch.cat([row(-depth, depth).repeat(SIZE // 2, 1), row(-depth, -depth).repeat(SIZE // 2, 1)])
    y = torch.cat([row(0.0, 0.0).repeat(SIZE, 1), row(1.0, 0.0).repeat(15 * SIZE, 1)])
    bias = torch.zeros(n, dtype=F64)
    bias[1:SIZE] = -math.inf
    with compiled.kernel():
        found = near.softmax(x, y, y.float(), tolerance=TOLERANCE, key_bias=bias)
    assert found is not None
    assert found.pairs == 1
    error = (found.average.double() - exact_average(x, y, bias)).norm(dim=-1)
    assert bool((error <= found.left_out + 4e-7).all())
    assert not attained or float(error.max()) > 0.9 * unseen


def test_the_bound_of_the_logits_is_attained() -> None:
    """One dimension, a query bias, and the token as far out as it may be: (2 r + b) 3 r, at beta."""
    numbers = {name: torch.full((1, 1, 1), z, dtype=F64) for name, z in (("Q", 2.0), ("K", 3.0))}
    attention = Attention(**numbers, query_bias=row(0.5), beta=7.0)
    assert float(attention.prepared().logit_bound(2.0)) == pytest.approx(7 * (2 * 2 + 0.5) * 3 * 2)


@pytest.mark.parametrize("shape", [(5, 5), (3, 7), (7, 3)])
def test_the_bound_of_a_norm_is_attained_by_rank_one(shape: tuple[int, int]) -> None:
    """And is too large by k^(1/16) at most, for k equal singular values; of several heads the largest counts."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = shape
    u, v = torch.randn(rows, generator=generator, dtype=F64), torch.randn(columns, generator=generator, dtype=F64)
    one = torch.outer(u, v)
    assert float(_norm_bound(one[None])) == pytest.approx(float(u.norm() * v.norm()), rel=1e-12)
    k = min(shape)
    flat = 3 * torch.eye(rows, columns, dtype=F64)
    assert float(_norm_bound(flat[None])) == pytest.approx(3 * k ** (1 / 16), rel=1e-12)
    heads = torch.randn(20, rows, columns, generator=generator, dtype=F64)
    exact = torch.linalg.matrix_norm(heads, ord=2)
    each = torch.stack([_norm_bound(head[None]) for head in heads])
    assert bool((exact <= each * (1 + 1e-12)).all())
    assert bool((each <= exact * k ** (1 / 16) * (1 + 1e-12)).all())
    assert float(_norm_bound(heads)) == pytest.approx(float(each.max()), rel=1e-12)
    assert float(_norm_bound(1e-30 * heads)) == pytest.approx(1e-30 * float(each.max()), rel=1e-12)


def test_the_norm_of_an_output_is_what_it_stretches() -> None:
    O = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
    Q = torch.ones(2, 3, 4, dtype=F64)
    p = Attention(Q, Q, Q, O).prepared()
    for h in range(2):
        longest = float(torch.linalg.svdvals(O[h])[0])
        assert float(p.output_norm(slice(h, h + 1))) == pytest.approx(longest, rel=1e-12)


# --- on the circle ---------------------------------------------------------------------------------------------------


def on_circle(angle: Tensor, radius: Tensor | float = 1.0) -> Tensor:
    return torch.stack([angle.cos(), angle.sin()], dim=-1) * radius


def lost_on_circle(q: Tensor, k: Tensor, scale: float, tolerance: float) -> tuple[Tensor, Tensor]:
    """How far the average over the series is from the exact one, and the bound, for values within one of each other."""
    v = k / k.norm(dim=-1, keepdim=True) / 2
    found = fourier.softmax(q, k, v, tolerance=tolerance, scale=scale)
    exact = torch.softmax(scale * q @ k.mT, dim=-1) @ v
    return (found.average - exact).norm(dim=-1), found.left_out


def test_the_rounding_of_a_small_sum_is_counted() -> None:
    """A query that sees 1e-7 of the largest weight has that fewer digits, and says so."""
    k = on_circle(torch.linspace(-0.2, 0.2, 400, dtype=F64))
    q = on_circle(torch.linspace(1.2, 1.8, 400, dtype=F64))
    error, bound = lost_on_circle(q, k, 12.0, 1e-6)
    assert bool((error <= bound).all())
    assert bool((bound > 0).all())  # by the series, all of them
    assert float((error / bound).max()) > 1e-3


def test_keys_of_two_lengths_cost_what_is_said() -> None:
    """All in one direction, where the series has one length for them: the query sees the longer ones too well."""
    angle, u, scale = 1.0, 1e-6, 20.0
    k = torch.cat([row(1 + u / 2, 0.0), row(1 - u / 2, 0.0)])
    v = row(0.5, -0.5).mT
    q = on_circle(torch.tensor([angle], dtype=F64))
    found = fourier.softmax(q, k, v, tolerance=1e-5, scale=scale)
    error = float((found.average - torch.softmax(scale * q @ k.mT, dim=-1) @ v).abs())
    assert 0.24 * float(found.left_out) < error <= float(found.left_out)


def test_queries_of_two_lengths_cost_what_is_said() -> None:
    """Keys where the query points and far from there, as heavy for it: one length for all queries tips the balance."""
    angle, u, scale = 1.0, 1e-6, 20.0
    k, v = on_circle(torch.tensor([0.0, angle], dtype=F64)), row(0.5, -0.5).mT
    q = torch.cat([row(1 + u / 2, 0.0), row(1 - u / 2, 0.0)])
    bias = row(0.0, scale * (1 - math.cos(angle)))[0]
    found = fourier.softmax(q, k, v, tolerance=1e-5, key_bias=bias, scale=scale)
    error = (found.average - torch.softmax(scale * q @ k.mT + bias, dim=-1) @ v).norm(dim=-1)
    assert bool((error <= found.left_out).all())
    assert float((error / found.left_out).min()) > 0.11  # an eighth, less what equal shares cost


def test_two_lengths_of_both_cost_what_is_said() -> None:
    """Everything in one direction: the lengths alone decide, corrected for queries of mean length."""
    u, scale = 1e-5, 500.0
    k = torch.cat([row(1 + u / 2, 0.0), row(1 - u / 2, 0.0)])
    v = row(0.5, -0.5).mT
    found = fourier.softmax(k, k, v, tolerance=1e-4, scale=scale)
    error = (found.average - torch.softmax(scale * k @ k.mT, dim=-1) @ v).norm(dim=-1)
    assert bool((error <= found.left_out).all())
    assert float((error / found.left_out).min()) > 0.06  # a sixteenth


# --- ties, and balance -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_ties_are_what_rounding_cannot_tell_apart(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    q = torch.ones(1, 1, dtype=dtype)
    for ulps, share in ((4, 0.5), (64, 1.0)):
        k = torch.tensor([[1.0], [1.0 - ulps * eps]], dtype=dtype)
        assert dense.winners(q, k, None)[0].tolist() == [[share, 1 - share]]


def test_rows_are_balanced_to_the_rounding_of_the_scores() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (3 * torch.randn(30, 4, generator=generator, dtype=F64) for _ in range(2))
    log_w = torch.softmax(torch.randn(30, generator=generator, dtype=F64), dim=-1).log()
    g = sinkhorn.potential(q, k, log_w)
    f = -torch.logsumexp(q @ k.mT + g + log_w, dim=-1)
    P = (q @ k.mT + f[:, None] + g + log_w).exp()
    columns = log_w.exp() @ P
    largest = float(q.norm(dim=-1).max() * k.norm(dim=-1).max())
    assert float((columns - log_w.exp()).abs().sum()) <= 16 * torch.finfo(F64).eps * (1 + largest) * 1.5


def test_a_plan_is_off_by_n_minus_one_times_its_rows() -> None:
    """On a chain of pairs r_1 c_1 r_2 c_2 ... an excess of the first row has to pass through all: the bound itself."""
    n, delta = 8, 1e-4
    off_diagonal = torch.zeros(n, n, dtype=F64)
    off_diagonal[torch.arange(1, n), torch.arange(n - 1)] = 1.0
    exact = torch.eye(n, dtype=F64) * 0.5 + off_diagonal * 0.5
    exact[0, 0] = exact[n - 1, n - 1] = 1.0
    moved = exact.clone()
    for i in range(n - 1):  # every edge of the chain carries the excess
        moved[i, i] += n * delta / 2
        moved[i + 1, i] -= n * delta / 2
    w = torch.full((n,), 1 / n, dtype=F64)
    rows = (moved.sum(-1) - exact.sum(-1)).abs() @ w
    assert torch.allclose(moved.sum(0), exact.sum(0))
    assert float(rows) == pytest.approx(delta)
    assert float((w[:, None] * (moved - exact).abs()).sum()) == pytest.approx((n - 1) * delta)
