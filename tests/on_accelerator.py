"""On a simulated accelerator: results stay there, devices never mix, and the host seldom waits for a value.

Run by test_accelerator.py in a process of its own: torch counts devices once, at the first backward pass.
"""

import pytest
import torch
from accelerator import accelerator, device_reads, forget_reads, on, values
from torch import Tensor, nn

from attn_flow import Attention, ContinuousAttentionLayer, Euclidean, Gaussian, Sphere, UniformSphere, flow, wasserstein
from attn_flow.nn import ContinuousMultiheadAttention

G, V = torch.diag(torch.tensor([3.0, 1.0, 1.0])), torch.diag(torch.tensor([1.0, 2.0, 1.0]))


@pytest.fixture
def x(generator: torch.Generator) -> Tensor:
    return Sphere().uniform(40, 3, generator=generator)


def close(found: Tensor, expected: Tensor, steps: int = 1) -> None:
    """To the rounding of sums over 40 tokens in every step: torch takes another kernel there."""
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(values(found), expected, rtol=0, atol=40 * steps * eps * float(expected.abs().max()))


@pytest.mark.parametrize("kind", ["softmax", "unnormalised", "hardmax", "sinkhorn", "linear", "relu", "sigmoid"])
def test_drifts_stay_and_agree(x: Tensor, kind: str) -> None:
    expected = Attention.from_matrices(G, V, 2.0, kind=kind).drift(x)
    with accelerator():
        attention = Attention.from_matrices(on(G), on(V), 2.0, kind=kind)
        close(attention.drift(on(x)), expected, 20)
        with pytest.raises(ValueError, match=r"x is on cpu and Q on simulated:0; move one with .to\(device\)"):
            attention.drift(x)


def test_measures_stay_and_agree(x: Tensor) -> None:
    attention = Attention.from_matrices(G, V, 2.0)
    for law in (UniformSphere(3), Gaussian(torch.zeros(3), torch.eye(3))):
        expected = attention.drift(x, law)
        with accelerator():
            there = UniformSphere(3) if isinstance(law, UniformSphere) else Gaussian(on(law.mean), on(law.cov))
            close(Attention.from_matrices(on(G), on(V), 2.0).drift(on(x), there), expected)


@pytest.mark.parametrize("times", [2, 5])
def test_a_fixed_step_flow_reads_once_per_kept_time(x: Tensor, times: int) -> None:
    t = torch.linspace(0, 2, times)
    expected = flow(Attention.from_matrices(G, V, 4.0), x, t)
    with accelerator():
        attention = Attention.from_matrices(on(G), on(V), 4.0)
        forget_reads()
        path = flow(attention, on(x), t)
        found = device_reads()
        close(path.x, expected.x, 40)
    checks_at_the_start = 5  # finite, on the geometry, precision
    assert sum(found.values()) <= checks_at_the_start + times - 1, found


def test_a_layer_reads_once_per_forward_and_never_backward(x: Tensor) -> None:
    for options in ({}, {"geometry": Euclidean()}, {"learn_beta": True, "checkpoint": True}, {"validate": False}):
        layer = ContinuousAttentionLayer(3, 1, beta=2.0, steps=3, **options)
        expected = layer(x)
        expected[..., 0].exp().sum().backward()
        gradient = layer.Q.grad
        with accelerator() as device:
            layer.zero_grad()
            there = layer.to(device)
            forget_reads()
            y = there(on(x))
            assert sum(device_reads().values()) == int(there.validate), device_reads()
            close(y.detach(), expected.detach(), 12)
            forget_reads()
            y[..., 0].exp().sum().backward()
            assert not device_reads()
            close(there.Q.grad, gradient, 100)


def test_the_drop_in_reads_once(generator: torch.Generator) -> None:
    theirs = nn.MultiheadAttention(12, 3, batch_first=True)
    x = torch.randn(2, 7, 12, generator=generator)
    expected = theirs(x, x, x)[0].detach()
    with accelerator() as device:
        ours = ContinuousMultiheadAttention.from_multihead(theirs).to(device)
        forget_reads()
        y = on(x)
        found = ours(y, y, y, need_weights=False)[0]
        assert sum(device_reads().values()) == 1, device_reads()
        close(found.detach(), expected, 4)


@pytest.mark.parametrize("method", ["auto", "sinkhorn", "geomloss"])
def test_distances_stay(x: Tensor, method: str) -> None:
    y = Sphere().retract(x + torch.tensor([0.3, 0.0, 0.0]))
    expected = wasserstein(x, y, method=method, rtol=0.5)
    with accelerator():
        found = wasserstein(on(x), on(y), method=method, rtol=0.5)
        torch.testing.assert_close(values(found), expected, rtol=1e-4, atol=0)
