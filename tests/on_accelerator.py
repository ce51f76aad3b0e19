"""On a simulated accelerator: results stay there, devices never mix, and the host seldom waits for a value.

Run by test_accelerator.py in a process of its own: torch counts devices once, at the first backward pass.
"""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attn_flow import (
    Adaptive,
    Attention,
    Cloud,
    ContinuousAttentionLayer,
    Gaussian,
    Sphere,
    UniformSphere,
    flow,
    wasserstein,
)
from attn_flow.dynamics.noise import independent
from attn_flow.nn import ContinuousMultiheadAttention, DeepStack

sys.path.insert(0, str(Path(__file__).parent))
from simulated_device import accelerator, device_reads, forget_reads, on, values

with accelerator():
    pass  # before the first backward pass of any test, whatever their order
G, V = torch.diag(torch.tensor([3.0, 1.0, 1.0])), torch.diag(torch.tensor([1.0, 2.0, 1.0]))


@pytest.fixture
def x() -> Tensor:
    return Sphere().uniform(40, 3, generator=torch.Generator().manual_seed(0))


def close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(values(result), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def reads(call) -> int:
    forget_reads()
    call()
    return sum(device_reads().values())


@pytest.mark.parametrize(
    ("kind", "beta"), [("softmax", 2.0), ("softmax", math.inf), ("unnormalised", 2.0), ("sinkhorn", 2.0)]
)
def test_drifts_stay_and_agree(x: Tensor, kind: str, beta: float) -> None:
    attention = Attention.from_matrices(G, V, beta, kind=kind)
    w, mask = torch.rand(40) + 0.1, torch.arange(40) < 30
    with accelerator() as device:
        there = attention.to(device)
        close(there.drift(on(x)), attention.drift(x))
        close(there.drift(Cloud(on(x), on(w), on(mask))), attention.drift(Cloud(x, w, mask)))
        with pytest.raises(ValueError, match="device"):
            there.drift(x)


@pytest.mark.parametrize("measure", [UniformSphere(3), Gaussian(torch.zeros(3), torch.eye(3))])
def test_measures_as_context(x: Tensor, measure) -> None:
    attention = Attention.from_matrices(G, V, 2.0)
    with accelerator() as device:
        there = attention.to(device).with_context(measure.to(device))
        close(there.drift(on(x)), attention.with_context(measure).drift(x))


def test_fixed_steps_read_only_at_saved_times(x: Tensor) -> None:
    attention, times = Attention.from_matrices(G, V, 2.0), [0.0, 0.25, 0.5]
    with accelerator() as device:
        there, start = attention.to(device), on(x)
        close(flow(there, start, times).x, flow(attention, x, times).x)
        few = reads(lambda: flow(there, start, times, h=0.125))
        many = reads(lambda: flow(there, start, times, h=0.005))  # 25 times as many steps
        assert few == many
        longer = reads(lambda: flow(there, start, [0.0, 0.125, 0.25, 0.375, 0.5], h=0.125))
        assert longer == few + 2  # one read for each further time
        assert reads(lambda: flow(there, start, times, validate=False)) == 0


def test_adaptive_steps_read_once_a_step(x: Tensor) -> None:
    attention = Attention.identity(3, 4.0)
    with accelerator():
        forget_reads()
        path = flow(attention, on(x), [0.0, 4.0], step=Adaptive(tol=1e-4))
        steps = path.about["evaluations"] / 6  # Dormand and Prince
        assert sum(device_reads().values()) <= steps + 12
        close(path.x[-1], flow(attention, x, [0.0, 4.0], step=Adaptive(tol=1e-4)).x[-1])


def test_noise_and_batches_stay(x: Tensor) -> None:
    with accelerator() as device:
        path = flow(Attention.identity(3), on(torch.stack([x, -x])), [0.0, 0.2], noise=independent(0.1))
        assert path.x.device.type == device.type


def test_layers_read_at_most_once(x: Tensor) -> None:
    batch = torch.stack([x, x.flip(0)])
    mask = torch.arange(40).expand(2, 40) < torch.tensor([[40], [30]])
    with accelerator() as device:
        for options in ({}, {"learn_beta": True, "steps": 3}):
            layer = ContinuousAttentionLayer(3, 1, beta=2.0, **options)
            expected = layer(batch, mask=mask)
            there = ContinuousAttentionLayer(3, 1, beta=2.0, device=device, **options)
            with torch.no_grad():
                for a, b in zip(there.parameters(), layer.parameters()):
                    a.copy_(on(b.detach()))
            close(there(on(batch), mask=on(mask)), expected)
            assert reads(lambda layer=there: layer(on(batch), mask=on(mask))) <= 1
            there.validate = False
            assert reads(lambda layer=there: layer(on(batch), mask=on(mask))) == 0


def test_drop_in_and_stack_run_there(x: Tensor) -> None:
    with accelerator() as device:
        drop_in = ContinuousMultiheadAttention(4, 2, batch_first=True, device=device)
        z = on(torch.randn(2, 5, 4))
        assert drop_in(z, z, z)[0].device.type == device.type
        stack = DeepStack(inputs=9, outputs=2, length=6, depth=2, dim=4).to(device)
        assert stack(on(torch.randint(9, (3, 6)))).device.type == device.type


def test_distances_of_clouds_there(x: Tensor) -> None:
    with accelerator():
        close(wasserstein(on(x), on(x.flip(-1))), wasserstein(x, x.flip(-1)))
