"""Sinkhorn attention in its pieces: averages there and back, both solvers of Newton's system, and how many steps."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor

from attn_flow.averages import sinkhorn
from attn_flow.averages.sinkhorn import Scores

F64 = torch.float64


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def made(clouds: int, n: int, size: float = 1.0, hidden: bool = False) -> Scores:
    q, k = (size * drawn(clouds, n, 3, seed=s) for s in (1, 2))
    w = torch.softmax(drawn(clouds, n, seed=3), -1)
    if hidden:
        w[:, -2:] = 0.0
    return Scores(q, k, (w / w.sum(-1, keepdim=True)).log(), 0.7)


def shares(scores: Scores, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Of the columns in each row, and of the rows in each column, entry by entry."""
    s = torch.einsum("cid,cjd->cij", scores.q, scores.k) * scores.scale
    row = (s + (g + scores.log_w)[:, None, :]).exp()
    column = (s + (f + scores.log_w)[:, :, None]).exp()
    return row / row.sum(2, keepdim=True), column / column.sum(1, keepdim=True)


def balanced(scores: Scores) -> tuple[Tensor, Tensor]:
    f = torch.zeros_like(scores.log_w)
    for _ in range(500):
        f = scores.sweep(f)
    return f, scores.columns(f)


@pytest.mark.parametrize("hidden", [False, True])
def test_averages_and_potentials_are_their_sums(hidden: bool) -> None:
    scores, f, g, z = made(2, 8, hidden=hidden), drawn(2, 8, seed=4), drawn(2, 8, seed=5), drawn(2, 8, seed=6)
    s = torch.einsum("cid,cjd->cij", scores.q, scores.k) * 0.7
    torch.testing.assert_close(scores.columns(f), -(s + (f + scores.log_w)[:, :, None]).logsumexp(1))
    torch.testing.assert_close(scores.rows(g), -(s + (g + scores.log_w)[:, None, :]).logsumexp(2))
    row, column = shares(scores, f, g)
    torch.testing.assert_close(scores.there_and_back(f, g, z), torch.einsum("cij,ckj,ck->ci", row, column, z))
    seen = scores.log_w.exp() > 0
    q, k = ((u.norm(dim=-1) * seen).amax(-1) for u in (scores.q, scores.k))
    assert scores.largest == pytest.approx(float((q * k).max()))


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_both_solvers_solve_the_system(ridge: float, hidden: bool) -> None:
    """((1 + ridge) I - J) z = b, where the constant that J keeps is free without a ridge; masses m of the rows."""
    scores = made(3, 12, hidden=hidden)
    f, g = balanced(scores)
    m = scores.log_w.exp()
    b = drawn(3, 12, seed=7) * (m > 0)
    b = torch.where(m > 0, b - (m * b).sum(-1, keepdim=True), 0.0)
    row, column = shares(scores, f, g)
    J = torch.einsum("cij,ckj->cik", row, column)
    as_matrix = sinkhorn._solved_as_matrix(scores, f, g, b, m, ridge)
    conjugate, left = sinkhorn._conjugate_gradients(scores, f, g, b, m, ridge, 1e-12, 50)
    assert not left.any()
    for z in (as_matrix, conjugate, sinkhorn._solved(scores, f, g, b, m, ridge, 1e-12)):
        missing = ((1 + ridge) * z - torch.einsum("cij,cj->ci", J, z) - b) * (m > 0)
        assert float(missing.abs().max()) < 1e-9
        assert float((m * z).sum(-1).abs().max()) < 1e-9  # of the solutions the one of mean zero
    assert not as_matrix[m == 0].any()


def test_conjugate_gradients_end_where_they_are_told() -> None:
    scores = made(2, 30, 2.0)
    f, g = balanced(scores)
    m = scores.log_w.exp()
    b = drawn(2, 30, seed=7)
    b = b - (m * b).sum(-1, keepdim=True)
    weighed = lambda u: (m * u**2).sum(-1).sqrt()
    before = torch.full((2,), math.inf, dtype=F64)
    for rtol in (0.3, 1e-2, 1e-6):
        z, left = sinkhorn._conjugate_gradients(scores, f, g, b, m, 0.0, rtol, 100)
        found = weighed(b - z + scores.there_and_back(f, g, z)) / weighed(b)
        assert not left.any()
        assert bool((found <= 1.01 * rtol).all())
        assert bool((found < before).all())  # no more than was asked for
        before = found
    z, left = sinkhorn._conjugate_gradients(scores, f, g, b, m, 0.0, 1e-12, 2)
    assert left.all()
    assert bool((weighed(b - z + scores.there_and_back(f, g, z)) < weighed(b)).all())


@pytest.mark.parametrize(("size", "tol", "steps"), [(0.3, 1e-12, 8), (1.0, 1e-12, 31), (3.0, 1e-12, 24)])
def test_newton_takes_few_steps(size: float, tol: float, steps: int) -> None:
    """Sweeps while they halve the error, then quadratic convergence."""
    scores = made(2, 40, size)
    f, error, taken = sinkhorn._refined(scores, torch.zeros_like(scores.log_w), tol)
    assert error <= tol
    assert taken <= steps
    g = scores.columns(f)
    s = torch.einsum("cid,cjd->cij", scores.q, scores.k) * scores.scale
    w = scores.log_w.exp()
    rows = (s + f[:, :, None] + (g + scores.log_w)[:, None]).exp().sum(2)
    assert float((w * (rows - 1).abs()).sum(-1).max()) <= 2 * tol


def test_large_scores_are_doubled_from_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores up to 4 first, to a hundredth; then twice, from twice the potential."""
    asked: list[tuple[float, float]] = []
    starts, found = [], []
    refined = sinkhorn._refined

    def watched(scores: Scores, f: Tensor, tol: float) -> tuple[Tensor, float, int]:
        asked.append((scores.scale, tol))
        starts.append(f)
        found.append(refined(scores, f, tol))
        return found[-1]

    monkeypatch.setattr(sinkhorn, "_refined", watched)
    scores = Scores(*(torch.full((1, 1, 1), z, dtype=F64) for z in (5.0, 6.0)), torch.zeros(1, 1, dtype=F64))
    eps = torch.finfo(F64).eps
    sinkhorn._balanced(scores, F64)
    assert asked == [(2.0**-s, sinkhorn.WARM_ERROR) for s in (3, 2, 1)] + [(1.0, 16 * eps * 31)]  # 30 / 8 < 4
    assert not starts[0].any()
    for start, before in zip(starts[1:], found[:3]):
        torch.testing.assert_close(start, 2 * before[0])
    asked.clear()
    sinkhorn._balanced(Scores(scores.q, scores.k / 8, scores.log_w), torch.float32)
    assert asked == [(1.0, torch.finfo(torch.float32).eps * 4.75)]


def test_a_step_of_newton_is_damped_and_solved_as_well_as_it_has_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for the clouds that are not balanced: z with ((1 + ridge) I - J) z = 1/s - 1, times log(1 + width)/width."""
    tol, calls = 1e-9, []
    solved = sinkhorn._solved

    def watched(scores: Scores, f: Tensor, g: Tensor, b: Tensor, m: Tensor, ridge: float, rtol: float) -> Tensor:
        z = solved(scores, f, g, b, m, ridge, rtol)
        calls.append((scores, f, g, b, m, ridge, rtol, z))
        return z

    monkeypatch.setattr(sinkhorn, "_solved", watched)
    easy, hard = made(1, 12, 0.1), made(1, 12, 3.0)
    scores = Scores(*(torch.cat([getattr(one, name) for one in (easy, hard)]) for name in ("q", "k", "log_w")), 0.7)
    _, error, _ = sinkhorn._refined(scores, torch.zeros_like(scores.log_w), tol)
    assert error <= tol
    assert len(calls) > 2
    for n, (open_, f, g, b, m, ridge, rtol, z) in enumerate(calls):
        torch.testing.assert_close(g, open_.columns(f))
        w = open_.log_w.exp()
        row = (0.7 * open_.q @ open_.k.mT + f[..., None] + (g + open_.log_w)[:, None]).exp().sum(-1)
        torch.testing.assert_close(b, 1 / row - 1, rtol=0, atol=1e-10)
        torch.testing.assert_close(m, w * row)
        delta = (w * (row - 1).abs()).sum(-1)
        assert bool((delta > tol).all())
        assert ridge == pytest.approx(sinkhorn.RIDGE * float(delta.max()), rel=1e-4, abs=1e-14)
        assert rtol == pytest.approx(max(min(0.1, float(delta.max())), 0.3 * tol / float(delta.max())), rel=1e-3)
        if n + 1 < len(calls) and len(calls[n + 1][1]) == len(f):
            width = z.amax(-1, keepdim=True) - z.amin(-1, keepdim=True)
            torch.testing.assert_close(calls[n + 1][1], f + z * width.log1p() / width)
    assert len(calls[-1][1]) == 1  # the easy cloud is done long before


def test_a_standstill_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newton's steps that lead nowhere: after twenty in which the error has not halved there are no more."""
    monkeypatch.setattr(sinkhorn, "_solved", lambda scores, f, *_: torch.zeros_like(f))
    scores = made(1, 12, 2.0)
    _, error, taken = sinkhorn._refined(scores, torch.zeros_like(scores.log_w), 1e-9)
    assert error > 1e-9
    assert sinkhorn.PATIENCE <= taken <= sinkhorn.PATIENCE + 4
    with pytest.raises(sinkhorn.NotBalanced, match="row sums are off by"):
        sinkhorn._balanced(scores, F64)


def test_large_systems_are_solved_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few conjugate steps first, n / 32; then as many matrices at once as are as large as the largest one."""
    monkeypatch.setattr(sinkhorn, "DENSE", 128)
    steps, sizes = [], []
    monkeypatch.setattr(
        sinkhorn, "_conjugate_gradients", lambda *z: (steps.append(z[-1]), (z[3], torch.ones(len(z[3])).bool()))[1]
    )
    monkeypatch.setattr(sinkhorn, "_solved_as_matrix", lambda scores, f, *_: sizes.append(len(f)) or f)
    for n, expected in ((64, [4, 2]), (128, [1] * 6), (129, [])):
        scores = made(6, n)
        zero = torch.zeros_like(scores.log_w)
        steps.clear()
        sizes.clear()
        sinkhorn._solved(scores, zero, zero, zero.clone(), zero, 0.0, 0.1)
        assert sizes == expected
        assert steps == [n // 32 if n <= 128 else sinkhorn.CONJUGATE_STEPS]


def test_sweeps_that_nobody_looks_at_are_a_hundred(monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[int] = []
    sweep = Scores.sweep
    monkeypatch.setattr(Scores, "sweep", lambda self, f: swept.append(1) or sweep(self, f))
    scores = made(2, 5)
    with pytest.warns(UserWarning, match="100 sweeps"):
        found = torch.func.vmap(sinkhorn.potential)(scores.q, scores.k, scores.log_w)
    assert len(swept) == 100
    shift = found - sinkhorn.potential(scores.q, scores.k, scores.log_w)  # a constant changes no plan
    assert float((shift - shift[:, :1]).abs().max()) < 1e-9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sinkhorn.potential(*(z.to("meta") for z in (scores.q, scores.k, scores.log_w))).shape == (2, 5)
