"""What an attention says of itself and prepares, each against its definition; fields in time and in sums."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from attn_flow import Attention, Cloud, Drift, Layers
from attn_flow.attention import drift, multihead
from attn_flow.attention.fields import Sum, View, as_field
from attn_flow.attention.projections import Projections, _norm_bound
from attn_flow.base import memory

F64 = torch.float64


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


# --- what it says ----------------------------------------------------------------------------------------------------


def test_every_word_of_an_attention() -> None:
    eye = torch.eye(3)
    assert repr(Attention(eye, self_attention=False)) == (
        "Attention(heads=1, dim=3, k=3, v=3, beta=1, softmax, no self-attention, float32)"
    )
    wide = Attention(torch.ones(2, 5, 3), torch.ones(2, 5, 3), torch.ones(2, 4, 3), torch.ones(2, 3, 4), beta=math.inf)
    assert repr(wide) == "Attention(heads=2, dim=3, k=5, v=4, beta=inf, softmax, float32)"
    assert repr(wide.to("meta")).endswith("softmax, float32, meta)")
    assert wide.summary()["beta"] == "inf"
    several = Attention(eye.expand(2, 3, 3), beta=torch.tensor([1.0, 2.0]), causal=True, self_attention=False)
    assert several.summary()["beta"] == [1.0, 2.0]
    assert several.tells_apart == ("a causal mask", "self_attention=False")
    assert Attention(eye).tells_apart == ()
    assert Attention(eye).to("meta").values.shape == (1, 3, 3)


def test_weights_that_are_not_given_are_the_identity() -> None:
    O, Q = drawn(2, 3, 3), drawn(2, 3, 3, seed=1)
    torch.testing.assert_close(Attention(Q).values, torch.eye(3, dtype=F64).expand(2, 3, 3))
    assert Attention(Q, O=O).values is O
    b = drawn(2, 3, seed=2)
    assert Attention(Q, query_bias=b).G_bias is b
    assert Attention(Q, Q).G_bias is None
    torch.testing.assert_close(Attention(Q, O, query_bias=b).G_bias, torch.einsum("hke,hk->he", O, b))


def test_orthogonal_weights_are_of_haar_law() -> None:
    """The rotation of the polar part of R with a positive diagonal: that choice alone is invariant."""
    d, heads = 6, 3
    seeded = lambda: torch.Generator().manual_seed(4)
    a = Attention.random(d, heads, law="orthogonal", generator=seeded(), dtype=F64)
    given = torch.randn(heads, d, d, generator=seeded(), dtype=F64)
    R = a.Q.mT @ given
    assert bool((torch.diagonal(R, dim1=-2, dim2=-1) > 0).all())
    assert float(R.tril(-1).abs().max()) < 1e-12


@pytest.mark.parametrize(("d", "heads", "head_dim", "k"), [(12, 4, None, 3), (2, 5, None, 1), (12, 4, 7, 7)])
def test_the_rank_of_random_heads(d: int, heads: int, head_dim: int | None, k: int) -> None:
    assert Attention.random(d, heads, head_dim).Q.shape == (heads, k, d)


def test_a_matrix_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, str]] = []
    monkeypatch.setattr(memory, "require", lambda needed, what, *_: asked.append((needed, what)))
    Attention.random(4, 3, dtype=F64).matrix(drawn(5, 7, 4))
    assert (3 * 5 * 3 * 7**2 * 8, "the attention matrix of 7 tokens and 3 heads") in asked


# --- what it prepares ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [2.0, torch.tensor([1.0, 2.0])])
def test_precision_is_chosen_by_the_largest_logit_there_may_be(beta: float | Tensor) -> None:
    """beta (|Q| r + |b|) |K| r > 200, in one dimension: 2 (3 r + 1) 5 r, of the larger beta."""
    make = lambda z: torch.full((2, 1, 1), z)
    a = Attention(make(3.0), make(-5.0), beta=beta, query_bias=torch.full((2, 1), 1.0))
    edge = (-1 + math.sqrt(1 + 4 * 3 * 20)) / 6
    assert not a.needs_float64(0.999 * edge)
    assert a.needs_float64(1.001 * edge)
    assert a.prepared(1.001 * edge).precise is True
    assert a.prepared(0.999 * edge).precise is False
    assert not a.with_beta(math.inf).needs_float64(1e9)
    assert a.with_beta(math.inf).prepared(1e9).precise is None
    assert Sum((Attention(make(0.1)), a)).needs_float64(1.001 * edge)
    assert not Sum((Attention(make(0.1)), a)).needs_float64(0.999 * edge)


def test_weights_are_prepared_again_when_tokens_grow() -> None:
    view = View(None, None, longest=1.0)  # type: ignore[arg-type]
    prepared = Attention.identity(3, 100.0).prepared_along(view)
    first = prepared()
    assert first.precise is False
    assert prepared() is first
    view.longest = 2.0
    assert prepared().precise is True
    assert prepared() is prepared()


def test_compiled_code_is_told_to_look_before(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = Attention.identity(3, 10.0)
    looked, several = Attention.identity(3, 10.0), Attention.identity(3, torch.tensor([[1.0], [2.0]]))
    for one in (looked, several):
        one.needs_float64(1.0)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert looked.prepared(1.0).precise is False
    assert looked.prepared(9.0).precise is True
    assert attention.prepared().precise is None
    assert attention.to(F64).prepared(1.0).precise is None
    for one in (attention, several):
        with pytest.raises(ValueError, match=r"call attention.needs_float64\(1.0\) once before"):
            one.prepared(1.0)


def test_a_bound_of_norms_that_do_not_overflow() -> None:
    for size in (1e-150, 1.0, 1e150):
        assert float(_norm_bound(size * torch.eye(1, dtype=F64)[None])) == pytest.approx(size)
    assert float(_norm_bound(torch.zeros(2, 3, 3, dtype=F64))) == 0


def test_one_token_alone_has_nobody_to_attend_to() -> None:
    alone = Attention.identity(3, self_attention=False, dtype=F64)
    for given in ({}, {"weights": torch.tensor([1.0, 0.0, 0.0])}, {"mask": torch.tensor([False, True, False])}):
        x = drawn(3, 3) if given else drawn(1, 3)
        with pytest.raises(ValueError, match="leaves a cloud of one token nobody to attend to"):
            alone.admit(Cloud(x, *(given.get(name) for name in ("weights", "mask"))))
    assert alone.admit(Cloud(drawn(5, 2, 3))) == (5,)


def test_padding_has_no_truncated_drift() -> None:
    x, mask = drawn(40, 3), torch.arange(40) % 3 > 0
    a = Attention.identity(3, 30.0, dtype=F64, truncation=1e-3)
    found, shown = a.truncated_drift(x, mask=mask), a.truncated_drift(x[mask])
    assert not found.drift[~mask].any()
    assert not found.error[~mask].any()
    assert bool(((found.drift[mask] - shown.drift).norm(dim=-1) <= found.error[mask] + shown.error + 1e-12).all())


def test_a_beta_keeps_its_digits_and_its_batch() -> None:
    eye = torch.eye(3)
    for dtype in (torch.float32, F64):
        assert Attention(eye, beta=0.1).to(dtype).common_beta == 0.1
    one_a_cloud = Attention(eye, beta=torch.tensor([[4.0], [4.0]]))
    assert one_a_cloud.common_beta is None
    assert one_a_cloud.drift(drawn(5, 3).float()).shape == (2, 5, 3)
    with pytest.raises(ValueError, match=r"V has shape \(3,\), expected \(heads, v, d\)"):
        Attention(eye, V=torch.ones(3), O=eye)


def test_nothing_is_hidden_from_a_drift_on_the_cpu_nor_from_sinkhorn_in_a_flow(monkeypatch) -> None:
    hidden: list[bool] = []

    @contextmanager
    def unseen(hide: bool = True) -> Iterator[None]:
        hidden.append(hide)
        yield

    monkeypatch.setattr(multihead.checks, "unseen", unseen)
    part, x = SimpleNamespace(first=0, own=lambda x, dim=-2: x, everyone=lambda x: x), drawn(4, 3)
    for kind, in_a_flow in (("softmax", True), ("linear", True), ("sinkhorn", False)):
        a = Attention.identity(3, dtype=F64, kind=kind)
        hidden.clear()
        moved = a.drift(x)
        assert hidden == [False]
        hidden.clear()
        torch.testing.assert_close(a.seen(View(None, part))(0.0, x), moved)
        assert hidden == [in_a_flow]


def test_contexts_of_a_batch() -> None:
    a, x, y = Attention.identity(3, dtype=F64), drawn(2, 5, 3), drawn(2, 4, 3, seed=1)
    torch.testing.assert_close(a.drift(x, y)[1], a.drift(x[1], y[1]))
    with pytest.raises(ValueError, match=r"batch shapes do not broadcast: tokens \(2,\), tokens \(3,\)"):
        a.drift(x, drawn(3, 4, 3))


def test_the_bound_of_the_logits_of_several_heads() -> None:
    """The largest beta, query bias, query and key of the heads, wherever each of them is."""
    beta, eye = torch.tensor([3.0, 1.0], dtype=F64), torch.eye(2, dtype=F64).expand(2, 2, 2)
    assert float(Attention(eye, beta=beta).prepared().logit_bound(2.0)) == pytest.approx(12)
    make = lambda *z: torch.tensor(z, dtype=F64).reshape(2, 1, 1)
    wide = torch.eye(1, 2, dtype=F64)
    bias = torch.tensor([[0.5], [0.25]], dtype=F64)
    p = Attention(make(3.0, 1.0) * wide, make(2.0, 5.0) * wide, beta=2.0, query_bias=bias).prepared()
    assert float(p.logit_bound(2.0)) == pytest.approx(2 * (3 * 2 + 0.5) * 5 * 2)


def test_float64_is_taken_as_it_was_chosen() -> None:
    p, q = Attention.identity(3).prepared(), torch.ones(2, 3)
    chosen = lambda precise: replace(p, precise=precise)
    assert chosen(True).loses_digits(q, q, 1.0)
    assert not chosen(False).loses_digits(q, q, 1e9)
    assert not chosen(True).loses_digits(q.double(), q.double(), 1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not chosen(True).loses_digits(q, q, 1.0)
    asked: list[float] = []
    told = chosen(lambda q, k, scale: bool(asked.append(scale)) or scale > 2)
    assert told.loses_digits(q, q, 3.0)
    assert not told.loses_digits(q, q, 1.0)
    assert asked == [3.0, 1.0]
    assert p.loses_digits(q, q, 1e9)
    assert p.double.precise is None
    assert chosen(True).double.precise is False
    assert p.double is p.double


def test_weights_that_stay_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    learned = Attention(torch.eye(3).requires_grad_())
    fixed = Attention.identity(3)
    for one in (learned, fixed):
        one.needs_float64(1.0)
    monkeypatch.setattr(Projections, "logit_terms", property(lambda self: pytest.fail("looked at again")))
    assert fixed.with_beta(1e3).needs_float64(1.0)
    with pytest.raises(pytest.fail.Exception, match="looked at again"):
        learned.needs_float64(1.0)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("k", [2, 4])
def test_tokens_that_are_strided_drift_alike(k: int, parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    a = Attention.random(4, 2, k, generator=torch.Generator().manual_seed(0), dtype=F64)
    x, y = drawn(4, 7).T, drawn(4, 5, seed=1).T
    expected = a.drift(x.contiguous()), a.drift(x.contiguous(), y.contiguous())
    if parts:
        monkeypatch.setattr(drift, "AT_ONCE", 0)
        monkeypatch.setattr(drift, "ROWS", 2)
    torch.testing.assert_close(a.drift(x), expected[0])
    torch.testing.assert_close(a.drift(x, y), expected[1])


def test_gradients_of_the_weights_of_tokens_alone_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    a, x = Attention.random(4, 2, 2, generator=torch.Generator().manual_seed(0), dtype=F64), drawn(7, 4)
    w = drawn(7, seed=1).exp().requires_grad_()
    slope = lambda: torch.autograd.grad(a.drift(x, weights=w).square().sum(), w)[0]
    expected = slope()
    monkeypatch.setattr(drift, "AT_ONCE_WITH_GRADIENT", 0)
    torch.testing.assert_close(slope(), expected)


# --- fields ----------------------------------------------------------------------------------------------------------


def test_layers_and_sums_of_them_know_their_jumps() -> None:
    make = lambda beta: Attention.identity(3, beta, dtype=F64)
    A, B, C = (make(beta) for beta in (1.0, 2.0, 3.0))
    layers = Layers([A, B, C], [0.0, 1.0, 3.0, math.inf])
    assert layers.jumps == (1.0, 3.0)
    assert len(layers) == 3
    assert list(layers) == [A, B, C]
    both = layers + Layers([A, B], [0.0, 2.0, 9.0])
    assert both.jumps == (1.0, 2.0, 3.0)
    assert Layers([both, A], [0.0, 2.5, 9.0]).jumps == (1.0, 2.0, 2.5, 3.0)
    for start, end, field in ((0.0, 1.0, A), (1.0, 1.0, B), (1.0, 3.0, B), (3.0, 7.0, C), (math.inf, math.inf, C)):
        assert layers.piece(start, end) is field
    inside = both.piece(2.0, 3.0)
    assert [field.beta.item() for field in inside.terms] == [2.0, 2.0]
    assert (A + B + C).piece(0.0, 1.0).terms == (A, B, C)
    for times in ([-math.inf, 1.0], [0.0, 0.0], [1.0, 0.0]):
        with pytest.raises(ValueError, match="expected finite times that increase strictly"):
            Layers([A], times)
    assert as_field(A) is A
    with pytest.raises(ValueError, match="asked from t = -1 to 0"):
        layers.piece(-1.0, 0.0)


def test_every_field_knows_the_batch_of_its_drift() -> None:
    """Leading axes of tokens, of weights and of what is inside, broadcast."""
    a, own = Attention.identity(3, dtype=F64), Drift(lambda t, x: x, tokenwise=True)
    many = Attention.identity(3, torch.ones(7, 1, 1, dtype=F64), dtype=F64)
    fields = {
        a: (),
        own: (),
        as_field(lambda t: a): (),
        a + own: (),
        many + own: (7,),
        Layers([own, many], [0, 1, 2]): (7,),
    }
    for field, more in fields.items():
        assert field.admit(Cloud(drawn(4, 3))) == ((7, 1) if more else ())
        assert field.admit(Cloud(drawn(5, 4, 3))) == (*more, 5)
    weights = drawn(2, 1, 4).exp()
    for field in (a, own, a + own):
        assert field.admit(Cloud(drawn(5, 4, 3), weights)) == (2, 5)


def test_a_schedule_is_the_field_of_the_moment() -> None:
    def warming(t: float) -> Attention:
        return Attention.identity(3, 1.0 + t, dtype=F64)

    field, x = as_field(warming), drawn(4, 3)
    assert field.frozen(2.0).common_beta == 3.0
    part = SimpleNamespace(first=0, own=lambda x, dim=-2: x, everyone=lambda x: x)
    torch.testing.assert_close(field.seen(View(None, part))(2.0, x), Attention.identity(3, 3.0, dtype=F64).drift(x))
    assert (field.tensors, field.tells_apart, field.summary()) == ({}, ("a schedule",), {"scheduled": "warming"})
    assert field.piece(0.0, 1.0) is field
    assert field.jumps == ()
    assert not field.needs_float64(1e9)


def test_a_sum_is_the_sum_of_its_terms() -> None:
    x = drawn(4, 3)
    terms = [Drift(lambda t, z, s=s: s * t * z, tokenwise=True) for s in (1.0, 10.0, 100.0)]
    field = terms[0] + terms[1] + terms[2]
    view = View(None, None)  # type: ignore[arg-type]
    torch.testing.assert_close(field.seen(view)(2.0, x), 222 * x)
    assert field.tells_apart == ()
    assert not field.attends
    assert (field + Attention.identity(3)).attends


@pytest.mark.parametrize(("returned", "message"), [
    (lambda x: x[None], r"\(1, 4, 3\)"),
    (lambda x: x.float(), "torch.float32"),
    (lambda x: x[:, :2], r"\(4, 2\)"),
])  # fmt: skip
def test_a_drift_returns_what_broadcasts_to_the_tokens(returned, message: str) -> None:
    seen = lambda f: Drift(lambda t, x: f(x), tokenwise=True).seen(View(None, None))  # type: ignore[arg-type]
    x = drawn(4, 3)
    with pytest.raises(ValueError, match=f"returned .*{message}.*as the tokens it was given"):
        seen(returned)(0.0, x)
    torch.testing.assert_close(seen(lambda x: x[:1])(0.0, x), x[:1].expand(4, 3))
