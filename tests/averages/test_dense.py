"""The averaging kernels against dense formulas, over every option, with gradients, in one block or many."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from attn_flow.averages import dense

F64 = torch.float64
N = 37  # tokens: more than the 16 rows a block has at least


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def dense_logits(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, exclude_self: bool, first: int) -> Tensor:
    """Entry by entry."""
    logits = torch.einsum("...id,...jd->...ij", q, k).clone()
    if bias is not None:
        logits = logits + bias[..., None, :]
    hidden = torch.zeros(logits.shape[-2:], dtype=torch.bool)
    for i, j in itertools.product(range(q.shape[-2]), range(k.shape[-2])):
        hidden[i, j] = (causal and j > i + first) or (exclude_self and j == i + first)
    return logits.masked_fill(hidden, -math.inf)


CASES = [
    (bias, causal, exclude_self, first, m)
    for bias in (False, True)
    for causal in (False, True)
    for exclude_self in (False, True)
    for first, m in ((0, N), (0, 20), (5, 25))
]


@pytest.fixture(params=[2**18, 40], ids=["one block", "many blocks"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "BLOCK", request.param)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize(("bias", "causal", "exclude_self", "first", "m"), CASES)
@pytest.mark.parametrize("v_width", [3, 2, 5])
def test_softmax_and_hardmax(bias: bool, causal: bool, exclude_self: bool, first: int, m: int, v_width: int) -> None:
    n = N
    q, k, v = drawn(2, 3, m, 3, seed=1), drawn(2, 1, n, 3, seed=2), drawn(1, 3, n, v_width, seed=3)
    key_bias = drawn(2, 1, n, seed=4) if bias else None
    if key_bias is not None:
        key_bias[..., 5] = -math.inf
    options = {"causal": causal, "exclude_self": exclude_self, "first": first}
    logits = dense_logits(1.7 * q, k, key_bias, **options)
    nobody = logits.isneginf().all(-1)
    shares = logits.softmax(-1).masked_fill(nobody[..., None], 0.0)
    exact = shares @ v
    torch.testing.assert_close(dense.softmax(q, k, v, key_bias=key_bias, scale=1.7, **options), exact)
    average, log_sum = dense.softmax_and_log_sum(q, k, v, key_bias=key_bias, scale=1.7, **options)
    torch.testing.assert_close(average, exact)
    torch.testing.assert_close(log_sum, logits.logsumexp(-1))
    # hardmax: rounded scores tie
    q, k = q.round(), k.round()
    weightless = None if key_bias is None else torch.where(key_bias.isneginf(), key_bias, 0.0)
    scores = dense_logits(q, k, weightless, **options)
    top = scores.amax(-1, keepdim=True)
    won = ((scores == top) & ~scores.isneginf()).to(F64)
    won = won if key_bias is None else won * key_bias.exp()[..., None, :]
    mass = won.sum(-1, keepdim=True)
    exact = torch.where(mass > 0, won / mass, 0.0).nan_to_num() @ v
    mean, best = dense.hardmax(q, k, v, key_bias=key_bias, **options)
    torch.testing.assert_close(mean, exact)
    torch.testing.assert_close(best, top[..., 0].expand(best.shape))


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize(("bias", "causal", "exclude_self", "first", "m"), CASES)
def test_gradients(bias: bool, causal: bool, exclude_self: bool, first: int, m: int) -> None:
    """Against autograd of the dense formula; rows that see nobody (causal left padding) send back zero, not NaN."""
    n, options = N, {"causal": causal, "exclude_self": exclude_self, "first": first}
    key_bias = drawn(2, n, seed=4) if bias else None
    if key_bias is not None:
        key_bias[..., :2] = -math.inf
    inputs = [z.requires_grad_() for z in (drawn(2, m, 3, seed=1), drawn(2, n, 3, seed=2), drawn(2, n, 3, seed=3))]
    q, k, v = inputs
    logits = dense_logits(q, k, key_bias, **options)
    nobody = logits.isneginf().all(-1, keepdim=True)
    exact = logits.masked_fill(nobody, 0.0).softmax(-1).masked_fill(nobody, 0.0) @ v
    weight = drawn(*exact.shape, seed=5)
    expected = torch.autograd.grad((weight * exact).sum(), inputs)
    for function in (dense.softmax, lambda *z, **o: dense.softmax_and_log_sum(*z, **o)[0]):
        value = function(q, k, v, key_bias=key_bias, **options)
        for got, want in zip(torch.autograd.grad((weight * value).sum(), inputs), expected):
            torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("block")
def test_gradients_of_a_learned_key_bias_and_of_the_log_sum() -> None:
    q, k, v, b = (drawn(6, 3, seed=1), drawn(6, 3, seed=2), drawn(6, 3, seed=3), drawn(6, seed=4))
    inputs = tuple(z.requires_grad_() for z in (q, k, v, b))
    assert torch.autograd.gradcheck(lambda q, k, v, b: dense.softmax(q, k, v, key_bias=b), inputs)
    assert torch.autograd.gradcheck(lambda q, k, v, b: dense.softmax_and_log_sum(q, k, v, key_bias=b), inputs)
    w = torch.full((6,), 1 / 6, dtype=F64)
    centred = k.detach() - k.detach().mean(0)
    for size in (0.1, 1.0, 10.0):  # both branches of log1p and logsumexp
        assert torch.autograd.gradcheck(lambda q, s=size: dense.log_mean_exp(s * q, centred, w), (q,))


def test_log_mean_exp_keeps_the_digits_of_small_arguments() -> None:
    t = torch.tensor([1.0, -1.0], dtype=F64)
    w = torch.tensor([0.5, 0.5], dtype=F64)
    for size in (1e-12, 1e-6, 1e-2, 0.999, 1.001, 700.0, 1e5):  # log cosh
        exact = math.log1p(2 * math.sinh(size / 2) ** 2) if size < 300 else size - math.log(2)
        assert float(dense.log_mean_of_exp(size * t, w)) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("beta", [1.0, 60.0, 150.0, 199.0])
@pytest.mark.parametrize("d", [3, 64])
def test_float32_is_enough_where_it_is_kept(beta: float, d: int) -> None:
    """Up to LOGIT_RANGE the fused float32 average is right to 1e-5 of its length."""
    x = torch.nn.functional.normalize(drawn(500, d), dim=-1).float()
    assert not dense.loses_digits(x, x, beta)
    assert dense.loses_digits(x, x, 1.01 * dense.LOGIT_RANGE)
    average = dense.softmax(x, x, x, scale=beta).double()
    exact = dense.softmax(x.double(), x.double(), x.double(), scale=beta)
    assert float(((average - exact).norm(dim=-1) / exact.norm(dim=-1)).max()) < 1e-5
