"""DeepStack: what it computes against a literal loop, its gradients against finite differences, its memory."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from attn_flow import Attention, Ellipsoid, Euclidean, Sphere, Trajectory, euler, flow, rk4
from attn_flow.nn.stack import DeepStack
from attn_flow.prediction.limit_map import limit


def stack(**options: object) -> DeepStack:
    torch.manual_seed(3)
    made = {"inputs": 7, "outputs": 3, "dim": 6, "heads": 2, "depth": 2, "length": 5, "dtype": torch.float64}
    return DeepStack(**{**made, **options})  # type: ignore[arg-type]


def ids(*shape: int) -> Tensor:
    return torch.randint(7, shape, generator=torch.Generator().manual_seed(1))


def literal(s: DeepStack, tokens: list[int], hidden: set[int], h: float, ffn: bool) -> list[float]:
    """A discrete post-norm stack, token by token and head by head."""
    x = [s.embedding.weight[i] + s.positions[p] for p, i in enumerate(tokens)]  # type: ignore[index]
    x = [v / v.norm() for v in x]
    seen = [j for j in range(len(x)) if j not in hidden]
    for l, layer in enumerate(s.layers):
        moved = []
        for i in seen:
            drift = torch.zeros_like(x[i])
            for head in range(layer.heads):
                q = layer.Q[head] @ x[i]
                w = torch.stack([(layer.beta[head] * (q @ (layer.K[head] @ x[j]))).exp().reshape(()) for j in seen])
                mean = sum(w[a] * (layer.V[head] @ x[j]) for a, j in enumerate(seen)) / w.sum()
                drift = drift + layer.O[head] @ mean
            y = x[i] + h * (drift - (x[i] @ drift) * x[i])
            moved.append(y / y.norm())
        for i, y in zip(seen, moved):
            if ffn:
                u = s.ffns[l](y)
                y = y + u - (y @ u) * y
                y = y / y.norm()
            x[i] = y
    return s.head(sum(x[i] for i in seen) / len(seen)).tolist()


@pytest.mark.parametrize("ffn", [0, 8])
def test_discrete_twin_is_the_literal_loop(ffn: int) -> None:
    s = stack(ffn=ffn, horizon=0.7, steps=3).discrete_twin()
    x = ids(2, 5)
    mask = torch.tensor([[True] * 5, [True, True, False, True, False]])
    with torch.no_grad():
        found = s(x, mask)
        for b, hidden in enumerate((set(), {2, 4})):
            assert found[b].tolist() == pytest.approx(literal(s, x[b].tolist(), hidden, 0.7, ffn > 0), abs=1e-12)


def test_continuous_stack_is_the_flow_of_its_attentions() -> None:
    s = stack(horizon=1.3, steps=40)
    x = ids(4, 5)
    path = s.trajectory(x)
    now = Sphere().retract(s.embed(x).detach())
    for l, attention in enumerate(s.attentions()):
        now = flow(attention, now, [0.0, 1.3], h=1.3 / 80).x[-1]
        assert torch.allclose(path.x[40 * (l + 1)], now, atol=1e-7)
    assert path.t[-1] == pytest.approx(2.6)
    assert len(path) == 81


def test_trajectory_ends_where_the_head_reads_and_includes_the_ffn() -> None:
    s = stack(ffn=8, readout="token")
    path = s.trajectory(ids(2, 5))
    assert isinstance(path, Trajectory)
    assert torch.allclose(s.head(path.x[-1]), s(ids(2, 5)), atol=1e-12)
    assert path.about["depth"] == 2


def test_twin_and_rerun_leave_the_original_alone() -> None:
    s = stack(horizon=1.0, steps=4)
    before = s(ids(2, 5)).detach()
    twin, colder = s.discrete_twin(), s.rerun(beta_factor=3.0, horizon=2.0, steps=8)
    for a, b in zip(s.state_dict().items(), twin.state_dict().items()):
        assert a[0] == b[0]
        assert torch.equal(a[1], b[1])
    assert torch.equal(s(ids(2, 5)).detach(), before)
    assert not torch.allclose(twin(ids(2, 5)), before, atol=1e-3)
    assert [layer.beta.tolist() for layer in colder.layers] == [pytest.approx([12.0] * s.layers[0].heads)] * 2
    assert colder.trajectory(ids(2, 5)).t[-1] == 4.0


def test_a_twin_with_many_euler_steps_approaches_the_continuous_stack() -> None:
    s = stack(horizon=1.0, steps=16)
    exact = s(ids(2, 5)).detach()
    errors = [(s.rerun(step=euler, steps=k)(ids(2, 5)) - exact).abs().max().item() for k in (64, 128)]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(1, abs=0.25)


def test_shared_weights_are_one_layer_run_longer() -> None:
    s = stack(shared=True, depth=3, horizon=0.5, steps=8)
    assert len(s.layers) == 1
    longer = s.rerun(depth=1, horizon=1.5, steps=24)
    assert torch.allclose(s(ids(2, 5)), longer(ids(2, 5)), atol=1e-12)
    assert len(s.attentions()) == 3
    with pytest.raises(ValueError, match="own weights has 2 layers; expected shared=True"):
        stack().rerun(depth=3)


def test_pre_norm_moves_the_radius_and_matches_flow() -> None:
    from attn_flow.dynamics.placement import pre

    s = stack(placement="pre", depth=1, heads=1, horizon=2.0, steps=32)
    path = s.trajectory(ids(1, 5))
    expected = flow(s.attentions()[0], path.x[0], [0.0, 2.0], geometry=Euclidean(), placement=pre, h=2.0 / 32, step=rk4)
    assert torch.allclose(path.x[-1], expected.x[-1], atol=1e-12)
    norms = path.x[-1].norm(dim=-1)
    assert float(norms.max() - norms.min()) > 0.1
    scaled = path.x[-1] / path.x[-1].norm(dim=-1, keepdim=True)
    assert torch.allclose(s.head(scaled.mean(-2)), s(ids(1, 5)), atol=1e-12)


def test_layer_norm_geometry_follows_the_module() -> None:
    s = stack(geometry=Ellipsoid.from_layer_norm(torch.ones(6, dtype=torch.float64)), depth=1)
    x = s.trajectory(ids(2, 5)).x[-1]
    assert torch.allclose(x.mean(-1), torch.zeros(2, 5, dtype=torch.float64), atol=1e-10)
    assert torch.allclose(x.var(-1, correction=0), torch.ones(2, 5, dtype=torch.float64), atol=1e-10)
    assert s.float()(ids(2, 5)).dtype == torch.float32
    assert s.layers[0].geometry.axes.dtype == torch.float32


def test_noise_is_for_training_only() -> None:
    s = stack(noise=0.3)
    torch.manual_seed(0)
    a, b = s(ids(2, 5)), s(ids(2, 5))
    assert not torch.allclose(a, b)
    s.eval()
    assert torch.equal(s(ids(2, 5)), s(ids(2, 5)))
    assert torch.equal(s(ids(2, 5)), stack()(ids(2, 5)))
    s.train()
    path = s.trajectory(ids(2, 5))
    assert torch.allclose(path.x[-1], stack().trajectory(ids(2, 5)).x[-1])
    assert s.training


def test_noise_survives_recomputation() -> None:
    plain, recomputed = stack(noise=0.2), stack(noise=0.2, checkpoint=True)
    gradients = []
    for s in (plain, recomputed):
        torch.manual_seed(5)
        s(ids(2, 5)).square().sum().backward()
        gradients.append(s.layers[0].Q.grad)
    assert torch.allclose(*gradients, atol=1e-13)


def test_token_permutation_permutes_answers_without_positions() -> None:
    s = stack(length=None, readout="token")
    order = torch.tensor([3, 1, 4, 0, 2])
    assert torch.allclose(s(ids(2, 5)[:, order]), s(ids(2, 5))[:, order], atol=1e-12)


def test_fields_are_summed_and_padding_is_not_seen() -> None:
    s = stack(length=None)
    pair = torch.stack([ids(2, 5), ids(2, 5).flip(0)], dim=-1)
    assert torch.allclose(s.embed(pair), s.embed(pair[..., 0]) + s.embed(pair[..., 1]))
    mask = torch.tensor([[True, True, True, False, False]])
    other = ids(1, 5)
    other[:, 3:] = (other[:, 3:] + 1) % 7
    assert torch.allclose(s(ids(1, 5), mask), s(other, mask), atol=1e-12)
    assert torch.allclose(s(ids(1, 5), mask), s(ids(1, 5)[:, :3]), atol=1e-12)


def test_attentions_are_the_core_noun_with_a_limit() -> None:
    s = stack(heads=1, learn_beta=True, beta=2.5)
    found = s.attentions()
    assert all(isinstance(a, Attention) and not a.Q.requires_grad for a in found)
    assert float(found[0].beta) == pytest.approx(2.5)
    assert limit(found[0]).case in ("fixed", "rotating", "undefined")
    s.layers[0].beta = 7.0
    assert float(s.attentions()[0].beta) == pytest.approx(7.0)


def test_gradients_through_fifty_steps_at_beta_ten() -> None:
    """Every parameter's directional derivative against central differences, float64, learned beta among them."""
    s = stack(depth=1, steps=50, horizon=5.0, beta=10.0, learn_beta=True, ffn=4, checkpoint=True)
    x, y = ids(2, 5), torch.tensor([0, 2])

    def loss() -> Tensor:
        return torch.nn.functional.cross_entropy(s(x), y)

    loss().backward()
    generator = torch.Generator().manual_seed(2)
    for name, parameter in s.named_parameters():
        v = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        assert parameter.grad is not None, name
        along, eps = float((parameter.grad * v).sum()), 1e-6
        with torch.no_grad():
            kept = parameter.clone()
            sides = [float(loss()) for sign in (1, -1) for _ in [parameter.copy_(kept + sign * eps * v)]]
            parameter.copy_(kept)
        assert along == pytest.approx((sides[0] - sides[1]) / (2 * eps), rel=2e-6, abs=2e-9), name
    assert float(s.layers[0].log_beta.grad.abs().max()) > 1e-6


def kept_bytes(s: DeepStack, x: Tensor) -> int:
    """Bytes of all different tensors that autograd keeps for the backward pass."""
    storages: dict[int, int] = {}

    def pack(z: Tensor) -> Tensor:
        storages[z.untyped_storage().data_ptr()] = z.untyped_storage().nbytes()
        return z

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda z: z):
        out = s(x)
    del out
    return sum(storages.values())


def test_checkpointing_keeps_less_than_half() -> None:
    options = {"dim": 16, "steps": 20, "depth": 1, "length": None, "points": True, "dtype": torch.float32}
    x = torch.randn(1, 100, 7, generator=torch.Generator().manual_seed(0))
    plain, recomputed = (kept_bytes(stack(**options, checkpoint=c), x) for c in (False, True))
    assert recomputed < 0.1 * plain


MEMORY = """
import resource, sys, torch
from attn_flow.nn.stack import DeepStack
torch.set_num_threads(1)
torch.manual_seed(0)
s = DeepStack(64, 2, dim=64, depth=1, steps=200, horizon=10.0, beta=4.0, points=True, checkpoint=sys.argv[1] == "1")
x = torch.randn(1, 1000, 64)
with torch.no_grad():
    s.rerun(steps=1)(x)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
s(x).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_memory_of_200_steps_with_checkpointing_is_at_most_half() -> None:
    """n = 1,000, d = 64, rk4: growth of the peak resident memory, each in its own process."""
    plain, recomputed = (
        int(subprocess.run([sys.executable, "-c", MEMORY, c], capture_output=True, text=True, check=True).stdout)
        for c in "01"
    )
    assert recomputed <= plain / 2, (recomputed, plain)


def test_autocast_keeps_tokens_in_full_precision() -> None:
    s = stack(dtype=torch.float32, readout="token")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = s(ids(2, 5))
        assert s.embed(ids(2, 5)).dtype == torch.float32
        mixed.float().sum().backward()
    assert mixed.dtype == torch.bfloat16
    assert s.layers[0].Q.grad.dtype == torch.float32
    assert torch.allclose(mixed.float(), s(ids(2, 5)), atol=0.1)


@pytest.mark.cuda
def test_stack_on_cuda_equals_cpu() -> None:
    s = stack(dtype=torch.float32)
    expected = s(ids(2, 5)).detach()
    assert torch.allclose(s.cuda()(ids(2, 5).cuda()).cpu(), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 0}, "depth = 0, expected a whole number of at least 1"),
        ({"placement": "pre", "geometry": Sphere()}, "placement 'pre' moves the radius of tokens; expected geometry"),
        ({"placement": "sideways"}, "placement = 'sideways', expected one of 'post', 'pre', 'peri'"),
        ({"readout": "last"}, "readout = 'last', expected one of 'mean', 'token'"),
        ({"noise": -1.0}, "noise = -1.0, expected a finite number of at least 0"),
        ({"steps": 0}, "steps = 0, expected a whole number"),
        ({"beta": -1.0}, "expected 0 <= beta"),
        ({"beta": math.inf, "learn_beta": True}, "cannot be learned"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stack(**options)


def test_bad_inputs() -> None:
    with pytest.raises(ValueError, match=r"expected \(batch, n\) or \(batch, n, fields\) ids"):
        stack()(torch.randn(2, 5))
    with pytest.raises(ValueError, match="inputs have 6 tokens, expected at most length = 5"):
        stack()(ids(2, 6))
    with pytest.raises(ValueError, match="real vectors"):
        stack(points=True)(ids(2, 5))
    s = stack(geometry=Euclidean(), horizon=1e6, steps=1)
    with torch.no_grad():
        s.layers[0].O.mul_(1e300)
    with pytest.raises(FloatingPointError, match=r"tokens left the range of torch.float64"):
        s(ids(2, 5))
