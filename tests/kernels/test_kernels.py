"""Every kernel beside the softmax written out, its derivatives, its memory, and its proved error."""

import math

import pytest
import torch
from scipy import special

from attn_flow import Attention, Cloud
from attn_flow.kernels import bessel, dense, near, series, sinkhorn

f64 = torch.float64


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=f64)


def sphere(generator, n, d):
    return torch.nn.functional.normalize(draw(generator, n, d), dim=-1)


def literal(q, k, v, log_w, scale, causal=False, hard=False):
    """The average and log-sum of one cloud by two loops."""
    rows, sums = [], []
    for i in range(len(q)):
        seen = [j for j in range(len(k)) if log_w[j] > -math.inf and not (causal and j > i)]
        if not seen:
            rows.append(torch.zeros(v.shape[-1], dtype=v.dtype))
            sums.append(torch.tensor(-math.inf, dtype=v.dtype))
            continue
        logits = torch.stack([scale * q[i] @ k[j] + log_w[j] for j in seen])
        if hard:
            scores = torch.stack([q[i] @ k[j] for j in seen])
            logits = torch.where(scores >= scores.max() - 1e-12, log_w[seen], -math.inf)
        rows.append(logits.softmax(0) @ v[seen])
        sums.append(logits.logsumexp(0))
    return torch.stack(rows), torch.stack(sums)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.0, 1.5])
def test_dense_kernels_are_the_two_loops(generator, causal, scale):
    q, k, v = draw(generator, 7, 3), draw(generator, 7, 3), draw(generator, 7, 5)
    log_w = draw(generator, 7)
    log_w[[0, 4]] = -math.inf  # under a causal mask the first query sees nothing
    options = {"scale": scale, "causal": causal}
    expected, log_sum = literal(q, k, v, log_w, **options)
    torch.testing.assert_close(dense.softmax_average(q, k, v, log_w, **options), expected)
    average, sums = dense.average_and_log_sum(q, k, v, log_w, **options)
    torch.testing.assert_close(average, expected)
    torch.testing.assert_close(sums, log_sum)
    hard = literal(q, k, v, log_w, hard=True, **options)[0]
    options["scale"] = math.inf
    torch.testing.assert_close(dense.softmax_average(q, k, v, log_w, **options), hard)


def test_far_keys_that_a_query_does_not_see_make_no_ties():
    x = torch.tensor([[1.0, 0.0], [0.5, 0.0], [1e7, 0.0]])  # 1e7 times the rounding of float32 is above 0.5
    hardmax = Attention.identity(2, beta=math.inf)
    for cloud in (Cloud(x, torch.tensor([1.0, 1.0, 0.0])), Cloud(x, mask=torch.tensor([True, True, False]))):
        assert hardmax.drift(cloud)[1].tolist() == [1.0, 0.0]
    assert Attention.identity(2, beta=math.inf, causal=True).drift(x)[1].tolist() == [1.0, 0.0]


def test_leading_axes_broadcast_and_equal_a_loop(generator):
    q, k, v = draw(generator, 4, 1, 6, 3), draw(generator, 3, 6, 3), draw(generator, 1, 6, 2)
    scale = torch.rand(4, 1, 1, 1, generator=generator, dtype=f64)
    log_w = draw(generator, 3, 6)
    result = dense.softmax_average(q, k, v, log_w, scale=scale)
    assert result.shape == (4, 3, 6, 2)
    for a in range(4):
        for b in range(3):
            one = literal(q[a, 0], k[b], v[0], log_w[b], float(scale[a]))[0]
            torch.testing.assert_close(result[a, b], one)


def test_derivatives_of_every_kind(generator):
    q, k, v, log_w = draw(generator, 3, 2), draw(generator, 4, 2), draw(generator, 4, 2), draw(generator, 4)
    inputs = tuple(z.requires_grad_() for z in (q, k, v, log_w))
    assert torch.autograd.gradcheck(lambda *z: dense.softmax_average(*z, scale=2.0), inputs, check_forward_ad=True)
    assert torch.autograd.gradcheck(lambda *z: dense.average_and_log_sum(*z, scale=2.0), inputs)
    x, y, v, log_w = (z.detach()[:3].requires_grad_() for z in (k, k.flip(0), v, log_w))
    for keys in (x, y):  # the same tensor, and another one

        def balanced(x, keys, v, log_w, is_same=keys is x):
            return sinkhorn.softmax_average(x, x if is_same else keys, v, log_w.log_softmax(-1), scale=2.0)

        assert torch.autograd.gradcheck(balanced, (x, keys, v, log_w))


def test_padding_before_a_causal_mask_has_finite_gradients(generator):
    x = draw(generator, 5, 3).requires_grad_()
    log_w = torch.tensor([-math.inf, -math.inf, 0.0, 0.0, 0.0], dtype=f64)
    dense.softmax_average(x, x, x, log_w, causal=True)[2:].square().sum().backward()
    assert bool(x.grad.isfinite().all())


def test_row_blocks_change_nothing(generator):
    n = 1200  # n^2 is several blocks
    x, log_w = sphere(generator, n, 3), draw(generator, n)
    expected = dense.softmax_average(x, x, x, log_w, scale=7.0)
    by_rows, _ = dense.average_by_rows(x, x, x, log_w, scale=7.0)
    torch.testing.assert_close(by_rows, expected)
    y = x.clone().requires_grad_()
    dense.average_by_rows(y, y, y, log_w, scale=7.0)[0].square().sum().backward()
    z = x.clone().requires_grad_()
    dense.softmax_average(z, z, z, log_w, scale=7.0).square().sum().backward()
    torch.testing.assert_close(y.grad, z.grad)


@pytest.mark.parametrize(("d", "scale"), [(2, 300.0), (3, 100.0), (3, 5e4), (5, 400.0)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (f64, 1e-12)])
def test_near_keys_err_by_less_than_their_bound(generator, d, scale, dtype, tolerance):
    x, values = sphere(generator, 3000, d), draw(generator, 3000, 2)
    log_w = draw(generator, 3000)
    log_w[::7] = -math.inf
    x, values = x.to(dtype), values.to(dtype)  # the reference has the same rounded tokens
    exact = dense.softmax_average(x.double(), x.double(), values.double(), log_w, scale=scale)
    radius = float((values - values.mean(0)).norm(dim=-1).max())
    # the logits of the reference are rounded too
    rounding = (100 * torch.finfo(dtype).eps + 8 * scale * torch.finfo(f64).eps) * radius
    result = near.softmax_average(x, x, values, log_w, scale=scale)
    assert result.dtype == dtype
    assert float((result - exact).norm(dim=-1).max()) <= 2 * tolerance * radius + rounding


def test_near_keys_leave_out_up_to_the_tolerance_and_not_more(generator):
    x = sphere(generator, 4000, 3)
    exact = dense.softmax_average(x, x, x, scale=200.0)
    errors = [
        float((near.softmax_average(x, x, x, scale=200.0, tolerance=tol) - exact).norm(dim=-1).max())
        for tol in (1e-2, 1e-4)
    ]
    assert errors[0] <= 2e-2
    assert errors[1] <= 2e-4
    assert errors[0] > 1e-12  # something was left out


def test_near_keys_of_queries_that_are_not_the_keys(generator):
    q, k, v = 2 * sphere(generator, 700, 3), sphere(generator, 900, 3), draw(generator, 900, 4)
    batch = torch.stack([k, k.flip(0)])
    result = near.softmax_average(q, batch, v, scale=torch.tensor(300.0, dtype=f64))
    for i in range(2):
        torch.testing.assert_close(result[i], dense.softmax_average(q, batch[i], v, scale=300.0), rtol=0, atol=1e-10)


def test_every_patch_of_neighbours_is_small(generator):
    n = 16384
    patches = near.cut_into_patches(sphere(generator, n, 3), near.PATCH_SIZE)
    disc = 2 * math.sqrt(near.PATCH_SIZE / n)  # the radius of a disc with an even share of the sphere
    assert float(patches.radius.max()) < 4 * disc
    assert sorted(patches.index.flatten().tolist()) == list(range(n))


@pytest.mark.parametrize("scale", [0.1, 20.0, 700.0])
def test_series_on_the_circle(generator, scale):
    x, values = sphere(generator, 500, 2), draw(generator, 500, 3)
    q = x * (1 + torch.rand(500, 1, generator=generator, dtype=f64))  # queries of unequal length
    log_w = draw(generator, 500)
    expected = dense.softmax_average(q, 3 * x, values, log_w, scale=scale)
    torch.testing.assert_close(series.softmax_average(q, 3 * x, values, log_w, scale=scale), expected)


def test_series_of_a_query_far_from_every_key(generator):
    angle = torch.rand(300, generator=generator, dtype=f64)  # keys on a sixth of the circle
    x = torch.stack([angle.cos(), angle.sin()], dim=-1)
    torch.testing.assert_close(
        series.softmax_average(-x, x, x, scale=80.0), dense.softmax_average(-x, x, x, scale=80.0)
    )


def test_series_refuses_keys_off_the_circle(generator):
    x = draw(generator, 50, 2)
    with pytest.raises(ValueError, match="equal length"):
        series.softmax_average(x, x, x)


@pytest.mark.parametrize(("scale", "is_symmetric"), [(1.0, False), (30.0, False), (30.0, True), (400.0, True)])
def test_sinkhorn_weights_are_doubly_stochastic(generator, scale, is_symmetric):
    x, w = sphere(generator, 60, 3), torch.rand(60, generator=generator, dtype=f64) + 0.1
    y, w = x if is_symmetric else x.flip(-1), w / w.sum()
    A = sinkhorn.softmax_average(x, y, torch.eye(60, dtype=f64), w.log(), scale=scale)
    torch.testing.assert_close(A.sum(-1), torch.ones(60, dtype=f64))
    torch.testing.assert_close(w @ A, w, rtol=0, atol=1e-10)
    # P = diag(e^f) e^S diag(e^g w): its log minus the scores is a sum of a row and a column vector
    if scale < 100:  # no weight underflows
        rest = A.log() - scale * x @ y.T
        assert float((rest - rest[:1] - rest[:, :1] + rest[0, 0]).abs().max()) < 1e-8


def test_sinkhorn_weights_that_are_not_balanced_are_an_error(generator):
    x = sphere(generator, 60, 3)
    with pytest.raises(FloatingPointError, match="use a smaller beta"):
        sinkhorn.softmax_average(x, x.flip(-1), x, scale=1e4)


def test_bessel_functions_against_scipy():
    for nu in (-0.5, 0.0, 0.5, 3.0, 80.0):
        for z in (1e-3, 0.3, 2.0, 50.0, 500.0):
            if special.ive(nu + 1, z) == 0:  # scipy underflows, the ratio does not
                continue
            expected = special.ive(nu + 1, z) / special.ive(nu, z)
            assert float(bessel.ratio(nu, torch.tensor(z, dtype=f64))) == pytest.approx(expected, rel=1e-11)
    assert bessel.ratios(1.0, 3) == pytest.approx([special.iv(k, 1) / special.iv(k - 1, 1) for k in (1, 2, 3)])
    z = torch.tensor(3.0, dtype=f64, requires_grad=True)
    (slope,) = torch.autograd.grad(bessel.log_i(1.5, z), z)
    assert float(slope) == pytest.approx(float(bessel.ratio(1.5, z.detach())), rel=1e-12)
