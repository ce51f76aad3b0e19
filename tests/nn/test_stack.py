"""DeepStack: a literal loop, the flows of its attentions, memory, errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_flow import Ellipsoid, Trajectory, flow
from attn_flow.nn import DeepStack

F64 = torch.float64


def make(**options: object) -> DeepStack:
    torch.manual_seed(3)
    defaults = {"inputs": 7, "outputs": 3, "dim": 6, "heads": 2, "depth": 2, "length": 5, "beta": 4.0}
    return DeepStack(**{**defaults, **options}).double()  # type: ignore[arg-type]


def ids(*shape: int) -> Tensor:
    return torch.randint(7, shape, generator=torch.Generator().manual_seed(1))


def literal(stack: DeepStack, tokens: list[int], hidden: set[int], h: float) -> list[float]:
    """A discrete post-norm stack, token by token and head by head."""
    x = [stack.embedding.weight[i] + stack.positions[p] for p, i in enumerate(tokens)]  # type: ignore[index]
    x = [v / v.norm() for v in x]
    seen = [j for j in range(len(x)) if j not in hidden]
    for l, layer in enumerate(stack.layers):
        moved = []
        for i in seen:
            drift = torch.zeros_like(x[i])
            for head in range(layer.heads):
                q = layer.Q[head] @ x[i]
                w = torch.stack([(layer.beta[head] * (q @ (layer.K[head] @ x[j]))).exp() for j in seen])
                drift = drift + layer.O[head] @ sum(w[a] * (layer.V[head] @ x[j]) for a, j in enumerate(seen)) / w.sum()
            y = x[i] + h * (drift - (x[i] @ drift) * x[i])
            moved.append(y / y.norm())
        for i, y in zip(seen, moved):
            if len(stack.ffns):
                u = stack.ffns[l](y)
                y = y + u - (y @ u) * y
            x[i] = y / y.norm()
    return stack.head(sum(x[i] for i in seen) / len(seen)).tolist()


@pytest.mark.parametrize("ffn", [0, 8])
def test_a_stack_of_euler_steps_is_the_literal_loop(ffn: int) -> None:
    stack = make(ffn=ffn, horizon=0.7, steps=3).rerun(step="euler", steps=1)
    x = ids(2, 5)
    mask = torch.tensor([[True] * 5, [True, True, False, True, False]])
    with torch.no_grad():
        logits = stack(x, mask)
        for b, hidden in enumerate((set(), {2, 4})):
            assert logits[b].tolist() == pytest.approx(literal(stack, x[b].tolist(), hidden, 0.7), abs=1e-12)


def test_the_trajectory_is_the_flow_of_the_attentions() -> None:
    stack = make(horizon=1.3, steps=10)
    path = stack.trajectory(ids(4, 5))
    x = stack.options.geometry.retract(stack.embed(ids(4, 5)).detach())
    for l, attention in enumerate(stack.attentions()):
        assert not attention.Q.requires_grad
        x = flow(attention, x, [0.0, 1.3], h=0.13, geometry=stack.options.geometry).x[-1]
        torch.testing.assert_close(path.x[10 * (l + 1)], x)
    assert isinstance(path, Trajectory)
    assert (len(path), float(path.t[-1])) == (21, pytest.approx(2.6))
    torch.testing.assert_close(stack.head(x.mean(-2)), stack(ids(4, 5)))
    mask = torch.tensor([[1, 1, 1, 0, 0]]).expand(4, 5)
    assert torch.equal(stack.trajectory(ids(4, 5), mask).cloud(-1).mask, mask > 0)


def test_rerun_changes_a_copy() -> None:
    stack = make(horizon=1.0, steps=16)
    before = stack(ids(2, 5)).detach()
    colder = stack.rerun(beta_factor=3.0, horizon=2.0, steps=8)
    assert torch.equal(stack(ids(2, 5)).detach(), before)
    assert [layer.beta.tolist() for layer in colder.layers] == [pytest.approx([12.0, 12.0])] * 2
    assert float(colder.trajectory(ids(2, 5)).t[-1]) == 4.0
    errors = [float((stack.rerun(step="euler", steps=k)(ids(2, 5)) - before).abs().max().detach()) for k in (64, 128)]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(1, abs=0.25)


def test_symmetries() -> None:
    stack, order = make(length=None, readout="token"), torch.tensor([3, 1, 4, 0, 2])
    torch.testing.assert_close(stack(ids(2, 5)[:, order]), stack(ids(2, 5))[:, order])
    pair = torch.stack([ids(2, 5), ids(2, 5).flip(0)], dim=-1)
    torch.testing.assert_close(stack.embed(pair), stack.embed(pair[..., 0]) + stack.embed(pair[..., 1]))
    mask, other = torch.arange(5)[None] < 3, ids(1, 5)
    other[:, 3:] = (other[:, 3:] + 1) % 7  # padding is not seen
    mean = make(length=None)
    torch.testing.assert_close(mean(ids(1, 5), mask), mean(other, mask))
    torch.testing.assert_close(mean(ids(1, 5), mask), mean(ids(1, 5)[:, :3]))


def test_dtype_geometry_and_autocast_follow_the_module() -> None:
    stack = make(geometry=Ellipsoid.from_layer_norm(torch.ones(6, dtype=F64)), depth=1, readout="token")
    x = stack.trajectory(ids(2, 5)).x[-1]
    torch.testing.assert_close(x.mean(-1), torch.zeros(2, 5, dtype=F64))
    torch.testing.assert_close(x.var(-1, correction=0), torch.ones(2, 5, dtype=F64))
    exact = stack.float()(ids(2, 5))
    assert exact.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = stack(ids(2, 5))
        assert stack.embed(ids(2, 5)).dtype == torch.float32
    torch.testing.assert_close(mixed.float(), exact, rtol=0, atol=0.2)


@pytest.mark.cuda
def test_stack_on_cuda_equals_cpu() -> None:
    stack = make().float()
    expected = stack(ids(2, 5)).detach()
    torch.testing.assert_close(stack.cuda()(ids(2, 5).cuda()).cpu(), expected, rtol=0, atol=1e-4)


def test_errors() -> None:
    for options, message in (
        ({"depth": 0}, "depth = 0, expected an integer of at least 1"),
        ({"readout": "last"}, "readout = 'last', expected one of 'mean', 'token'"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**options)
    with pytest.raises(ValueError, match=r"expected \(batch, n\) or \(batch, n, fields\) ids"):
        make()(torch.randn(2, 5))
    with pytest.raises(ValueError, match="inputs have 6 tokens, expected at most length = 5"):
        make()(ids(2, 6))
    with pytest.raises(IndexError):
        make()(ids(2, 5) + 7)
    with pytest.raises(ValueError, match="real vectors"):
        make(points=True)(ids(2, 5))
    with pytest.raises(ValueError, match=r"inputs has dtype torch.float32 and the layer torch.float64"):
        make(points=True)(torch.randn(2, 5, 7))
