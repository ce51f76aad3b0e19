"""Merging tokens: exact bookkeeping, the right flow afterwards, and nothing joined that should stay apart."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attn_flow import Adaptive, Attention, Euclidean, Sphere, flow
from attn_flow.dynamics.merging import Merged
from attn_flow.measures.quadrature import circle

F64 = torch.float64


def shrinking(x: Tensor) -> Tensor:
    return -x


@given(seed=st.integers(0, 2**32), n=st.integers(1, 12), batch=st.integers(1, 3), places=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_bookkeeping(seed: int, n: int, batch: int, places: int) -> None:
    """Tokens at a few places, weights partly zero: mass, mean and positions are kept, whatever is joined."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(batch, places, 3, generator=generator, dtype=F64)
    at = torch.randint(places, (batch, n), generator=generator)
    x = torch.gather(centres, 1, at[..., None].expand(batch, n, 3)).clone()
    x = x + 1e-8 * torch.randn(x.shape, generator=generator, dtype=F64)
    w = torch.rand(batch, n, generator=generator, dtype=F64) * (torch.rand(batch, n, generator=generator) < 0.7)
    w[:, 0] += 0.1
    w = w / w.sum(-1, keepdim=True)
    held, y = Merged.start(x, w), x
    for sweep in range(4):
        held = held.merge(y, shrinking(y), 1e-3, Euclidean(), sweep)
        y = held.x
        assert torch.allclose(held.everyone(y), x, atol=1e-7)  # nobody moved further than the cell of its place
        torch.testing.assert_close(held.weights.sum(-1), torch.ones(batch, dtype=F64))
        total = torch.einsum("bm,bmd->bd", held.weights, y)
        torch.testing.assert_close(total, torch.einsum("bn,bnd->bd", w, x), rtol=0, atol=1e-7)
    distinct = [len(set(at[b].tolist())) for b in range(batch)]
    assert held.alive.sum(-1).tolist() == distinct
    assert held.x.shape[-2] == max(distinct)


def test_nothing_to_join_returns_the_same_object() -> None:
    x = torch.randn(2, 9, 3, dtype=F64)
    held = Merged.start(x, torch.full((2, 9), 1 / 9, dtype=F64))
    assert held.merge(x, shrinking(x), 1e-6, Euclidean(), 0) is held


def test_distinct_cells_have_distinct_keys() -> None:
    """Cells that differ by (1, -2, 1): a key that is linear in the cell number with regular factors confuses them."""
    steps = torch.arange(50, dtype=F64)[:, None] * torch.tensor([1.0, -2.0, 1.0], dtype=F64)
    x = 1e-5 * (steps + 0.5)
    held = Merged.start(x, torch.full((50,), 0.02, dtype=F64))
    for sweep in range(5):
        assert held.merge(x, shrinking(x), 1e-5, Euclidean(), sweep) is held


def test_a_pair_on_two_sides_of_a_wall_is_joined_by_a_later_grid() -> None:
    x = torch.tensor([[1.0 - 1e-9, 0.0, 0.0], [1.0 + 1e-9, 0.0, 0.0]], dtype=F64)
    held = Merged.start(x, torch.full((2,), 0.5, dtype=F64))
    joined = [held.merge(x, shrinking(x), 1e-3, Euclidean(), sweep).x.shape[0] == 1 for sweep in range(30)]
    assert sum(joined) >= 28


def test_tokens_that_move_apart_are_not_joined() -> None:
    x = torch.tensor([[1.0, 1e-7, 0.0], [1.0, -1e-7, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]], dtype=F64)
    held = Merged.start(x, torch.full((4,), 0.25, dtype=F64))
    spreading = held.merge(x, +x, 1e-3, Euclidean(), 0)
    assert spreading.x.shape[0] == 3  # the coincident two are one, the close two are not
    assert held.merge(x, -x, 1e-3, Euclidean(), 0).x.shape[0] == 2


def test_a_flow_that_expands_separates_what_started_close() -> None:
    """V = -I on the circle: two tokens 1e-6 apart, far below the merging distance of 1e-4, end far from each other."""
    attention = Attention.from_matrices(torch.eye(2, dtype=F64), -torch.eye(2, dtype=F64), 4.0)
    theta = torch.tensor([0.0, 1e-6, 1.0, 2.5, 4.0], dtype=F64)
    x0 = torch.stack([theta.cos(), theta.sin()], dim=-1)
    run = flow(attention, x0, [0, 40.0], step=Adaptive(tol=1e-5))
    assert run.about["tokens_left"] == 5
    assert float(Sphere().distance(run.x[-1, 0], run.x[-1, 1])) > 0.5


# --- inside a flow --------------------------------------------------------------------------------------------------


def tokens(*seeds: int, n: int = 20) -> Tensor:
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return torch.stack([Sphere().uniform(n, 3, generator=g, dtype=F64) for g in generators])


def test_batched_merging_is_unbatched_merging() -> None:
    """Clouds of a batch merge at different times and keep different numbers of tokens."""
    x0 = tokens(0, 1, 2, 3)
    beta = torch.tensor([2.0, 6.0, 9.0, 12.0], dtype=F64)
    times, step = [0, 1.0, 5.0, 20.0, 60.0], Adaptive(tol=1e-7)
    together = flow(Attention.identity(3, beta[:, None], dtype=F64), x0, times, step=step)
    for i in range(4):
        alone = flow(Attention.identity(3, float(beta[i]), dtype=F64), x0[i], times, step=step)
        torch.testing.assert_close(together.x[:, i], alone.x, rtol=0, atol=1e-5)


def test_merged_flow_is_the_flow() -> None:
    x0 = tokens(0)[0]
    w = torch.linspace(0, 1, 20, dtype=F64)  # a token of weight zero among them: it looks on and moves
    attention = Attention.identity(3, 8.0, dtype=F64)
    plain = flow(attention, x0, [0, 1, 5, 40.0], weights=w, step=Adaptive(tol=1e-8, merge=False))
    merged = flow(attention, x0, [0, 1, 5, 40.0], weights=w, step=Adaptive(tol=1e-8))
    assert merged.about["tokens_left"] < 20
    assert "tokens_left" not in plain.about
    torch.testing.assert_close(merged.x, plain.x, rtol=0, atol=1e-5)


def test_repeated_tokens_merge_at_once_and_stay_equal() -> None:
    x0 = tokens(0)[0, :5]
    twice = torch.cat([x0, x0, x0[:1]])
    attention = Attention.identity(3, 4.0, dtype=F64)
    run = flow(attention, twice, [0, 0.01, 2.0], step=Adaptive(tol=1e-9))
    assert run.about["tokens_left"] <= 5
    assert torch.equal(run.x[-1, :5], run.x[-1, 5:10])
    w = torch.tensor([3.0, 2, 2, 2, 2], dtype=F64)
    weighted = flow(attention, x0, [0, 0.01, 2.0], weights=w, step=Adaptive(tol=1e-9))
    torch.testing.assert_close(run.x[-1, :5], weighted.x[-1], rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("why", "attention", "options"),
    [
        ("a causal mask", {"causal": True}, {}),
        ("self_attention=False", {"self_attention": False}, {}),
        ("noise", {}, {"noise": lambda x, generator: 0 * x}),
        ("padding", {}, {"mask": torch.ones(5, dtype=torch.bool)}),
        ("a context", {}, {"context": circle(10)}),
    ],
)
def test_merging_is_off_where_tokens_are_not_exchangeable(why: str, attention: dict, options: dict) -> None:
    x0 = torch.nn.functional.normalize(torch.randn(5, 2, dtype=F64), dim=-1)
    a = Attention.identity(2, 2.0, dtype=F64, **attention)
    assert "tokens_left" not in flow(a, x0, [0, 0.5], step=Adaptive(), **options).about
    with pytest.raises(ValueError, match=f"merge=True with {why}: merged tokens would not move alike; use merge=False"):
        flow(a, x0, [0, 0.5], step=Adaptive(merge=True), **options)


def test_gradients_pass_through_a_merge() -> None:
    """Two coincident tokens: the gradient of the merged flow is shared by both, and finite."""
    x0 = torch.cat([tokens(0)[0, :4], tokens(0)[0, :1]]).requires_grad_()
    attention = Attention.identity(3, 2.0, dtype=F64)
    grads = []
    for merge in (True, False):
        end = flow(attention, x0, [0, 1.0], step=Adaptive(tol=1e-8, merge=merge)).x[-1]
        grads.append(torch.autograd.grad((end * torch.arange(15, dtype=F64).reshape(5, 3)).sum(), x0)[0])
    assert bool(torch.isfinite(grads[0]).all())
    torch.testing.assert_close(grads[0][1:4], grads[1][1:4], rtol=0, atol=1e-5)
    torch.testing.assert_close(grads[0][[0, 4]].sum(0), grads[1][[0, 4]].sum(0), rtol=0, atol=1e-5)
