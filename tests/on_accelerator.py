"""On a simulated accelerator: results stay there, devices never mix, and the host seldom waits for a value.

Run by test_accelerator.py in a process of its own: torch counts devices once, at the first backward pass.
"""

import math
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from attn_flow import (
    Adaptive,
    Attention,
    Cloud,
    ContinuousAttentionLayer,
    Euclidean,
    Gaussian,
    Sphere,
    UniformSphere,
    VonMisesFisher,
    density_flow,
    flow,
    linearise,
    lyapunov,
    wasserstein,
)
from attn_flow.bench.reads import counted
from attn_flow.bench.simulated_device import accelerator, device_reads, forget_reads, on, values
from attn_flow.dynamics.integrator import PrecisionWarning
from attn_flow.dynamics.kicks import independent
from attn_flow.dynamics.placement import peri
from attn_flow.hooks.demo import tiny_bert, topics
from attn_flow.nn import ContinuousMultiheadAttention, DeepStack
from attn_flow.probe import probe
from attn_flow.transport import solve

sys.path.insert(0, str(Path(__file__).parent))
from public_examples import examples, made_there, run

EXAMPLES = examples()
with accelerator():
    pass  # before the first backward pass of any test, whatever their order
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


def count() -> int:
    """Reads since the last time."""
    found = sum(device_reads().values())
    forget_reads()
    return found


@pytest.mark.parametrize("kind", ["softmax", "unnormalised", "hardmax", "linear", "relu", "sigmoid"])
def test_a_drift_reads_once(x: Tensor, kind: str) -> None:
    """What is checked of the tokens and how long they are, together; the norm of the weights was read before."""
    mask, weights = torch.arange(40) < 30, torch.rand(40, generator=torch.Generator().manual_seed(1))
    with accelerator():
        attention = Attention.from_matrices(on(G), on(V), 2.0, kind=kind)
        attention.prepared(1.0)
        for options in ({}, {"mask": on(mask), "weights": on(weights)}, {"context": Cloud(on(x[:7]))}):
            there = on(x)
            forget_reads()
            attention.drift(there, **options)
            assert count() == 1, options
        with pytest.raises(ValueError, match="x has 3 NaN"):
            attention.drift(on(x.masked_fill(torch.arange(40)[:, None] == 3, math.nan)))


def test_a_drift_there_has_the_digits_of_float64_where_it_needs_them(x: Tensor) -> None:
    """Precision follows from the longest token, of the cloud or of its context."""
    for options in ({}, {"context": Cloud(30 * x[:7])}):
        beta = 300.0 / (30 if options else 1)
        expected = Attention.from_matrices(G.double(), V.double(), beta).drift(
            x.double(), Cloud((30 * x[:7]).double()) if options else None
        )
        with accelerator():
            there = {"context": Cloud(on(30 * x[:7]))} if options else {}
            found = Attention.from_matrices(on(G), on(V), beta).drift(on(x), **there)
        eps = torch.finfo(torch.float32).eps
        torch.testing.assert_close(values(found).double(), expected, rtol=4 * eps, atol=4 * eps)


def test_forward_derivatives_stay_and_agree(x: Tensor) -> None:
    expected = linearise(Attention.from_matrices(G, V, 2.0), x[:5])
    drawn = lambda: torch.Generator().manual_seed(0)
    grown = lyapunov(Attention.from_matrices(G, V, 2.0), x[:5], 1.0, generator=drawn())
    with accelerator():
        attention = Attention.from_matrices(on(G), on(V), 2.0)
        close(linearise(attention, on(x[:5])).jacobian, expected.jacobian)
        close(lyapunov(attention, on(x[:5]), 1.0, generator=drawn()).exponents, grown.exponents, 40)


def test_a_density_is_solved_where_its_attention_is() -> None:
    law = VonMisesFisher(torch.tensor([1.0, 0.0]), 2.0)
    expected = density_flow(Attention.identity(2, 3.0), law, [0.0, 0.1])
    with accelerator() as device:
        there = VonMisesFisher(on(law.mean), 2.0)
        found = density_flow(Attention.identity(2, 3.0, device=device), there, [0.0, 0.1])
        close(found.coefficients, expected.coefficients, 100)
        close(found.growth_rates(1), expected.growth_rates(1), 10_000)


@pytest.mark.parametrize("times", [2, 5])
@pytest.mark.parametrize("validate", [True, False])
def test_a_fixed_step_flow_reads_once_per_kept_time_or_never(x: Tensor, times: int, validate: bool) -> None:
    t = torch.linspace(0, 0.2, times)
    mask, weights = torch.arange(40) < 30, torch.rand(40, generator=torch.Generator().manual_seed(1))
    law = Gaussian(torch.zeros(3), torch.eye(3))
    beta = torch.tensor([[2.0], [4.0]])
    cases = [
        {},
        {"weights": weights, "mask": mask},
        {"geometry": Euclidean()},
        {"placement": peri},
        {"context": law},
        {"context": Cloud(x[:7])},
        {"step": "euler", "attention": {"causal": True}},
        {"attention": {"self_attention": False}},
        {"attention": {"kind": "hardmax"}},
        {"attention": {"kind": "unnormalised"}},
        {"attention": {"beta": beta}},
    ]
    for case in cases:
        options = {name: value for name, value in case.items() if name != "attention"}
        given = {"beta": 1.0, **case.get("attention", {})}
        expected = flow(Attention.from_matrices(G, V, **given), x, t, h=0.1, **options)
        with accelerator():
            if "beta" in case.get("attention", {}):
                given["beta"] = on(beta)
            attention = Attention.from_matrices(on(G), on(V), **given)
            moved = {name: on(z) if isinstance(z, Tensor) else z for name, z in options.items()}
            if "context" in options:
                moved["context"] = (
                    Cloud(on(x[:7])) if isinstance(options["context"], Cloud) else Gaussian(on(law.mean), on(law.cov))
                )
            forget_reads()
            path = flow(attention, on(x), t, h=0.1, validate=validate, **moved)
            found = count()
        close(path.x, expected.x, 40)
        of_the_weights = 1 + 2 * ("beta" in case.get("attention", {}))  # a norm; the largest beta, and for `about`
        at_the_start = 1 + ("geometry" in options)  # one validation; how long tokens are, where nothing bounds them
        assert found <= (of_the_weights + at_the_start + times - 1 if validate else 0), (case, found)


@pytest.mark.parametrize("merge", [True, False])
def test_an_adaptive_flow_reads_once_a_step(x: Tensor, merge: bool) -> None:
    """Accepted and refused ones, mergers included: as many reads as there were steps, and one at the start."""
    step = Adaptive(tol=1e-4, merge=merge)
    x = torch.cat([x, x[:3]])  # there is something to merge, whatever was drawn
    expected = flow(Attention.from_matrices(G, V, 4.0), x, [0.0, 1.0, 4.0], step=step)
    with accelerator():
        attention = Attention.from_matrices(on(G), on(V), 4.0)
        attention.prepared(1.0)  # which reads a norm
        forget_reads()
        path = flow(attention, on(x), [0.0, 1.0, 4.0], step=step)
        found = count()
    steps_at_most = path.about["evaluations"] // 6  # 6 evaluations a step, and the first
    assert 5 < found <= 1 + steps_at_most
    counted_by_rounding = {"evaluations", "tokens_left"}  # a step refused or a merger more, where tol is nearly met
    assert {k: v for k, v in path.about.items() if k not in counted_by_rounding} == {
        k: v for k, v in expected.about.items() if k not in counted_by_rounding
    }
    assert not merge or path.about["tokens_left"] <= 40
    torch.testing.assert_close(values(path.x), expected.x, rtol=0, atol=20 * step.tol)


def test_noise_is_looked_at_with_the_next_step(x: Tensor) -> None:
    with accelerator():
        attention = Attention.from_matrices(on(G), on(V), 4.0)
        attention.prepared(1.0)
        noise = independent(0.01)
        forget_reads()
        path = flow(attention, on(x), [0.0, 1.0], step=Adaptive(tol=1e-3), noise=noise)
        assert count() <= 2 + path.about["evaluations"] // 6
        with pytest.raises(FloatingPointError, match=r"tokens left the range of torch.float32 at t = 0\."):
            flow(attention, on(x), [0.0, 1.0], step=Adaptive(tol=1e-3), noise=lambda x, _: x / 0)


def test_what_is_wrong_is_said_once_all_is_read(x: Tensor) -> None:
    with accelerator():
        attention = Attention.from_matrices(on(G), on(V), 4.0)
        spoilt = x.clone()
        spoilt[3, 1] = torch.nan
        for bad, message, options in (
            (spoilt, r"x0 has 1 NaN or infinite entries of 120", {}),
            (torch.zeros_like(x), "x0 has a row that Sphere cannot place", {}),
            (x, "mask hides every token", {"mask": on(torch.zeros(40, dtype=torch.bool))}),
            (x, "weights reach -1, expected nonnegative", {"weights": on(-torch.ones(40))}),
        ):
            with pytest.raises(ValueError, match=message):
                flow(attention, on(bad), [0.0, 1.0], **options)
            forget_reads()
            flow(attention, on(bad), [0.0, 1.0], **options, validate=False)
            assert count() == 0
        for options in ({"step": "adaptive"}, {"stop": lambda t, cloud: False}):
            with pytest.raises(ValueError, match=r"validate=False with .* reads values after every step"):
                flow(attention, on(x), [0.0, 1.0], validate=False, **options)


@pytest.mark.parametrize("beta", [1.0, 500.0])
def test_the_precision_rule_holds_on_the_device(x: Tensor, beta: float) -> None:
    """beta = 500 needs float64; float32 logits would be wrong by 500 x 6e-8 x |G| each, 1e-4 in the drift."""
    expected = flow(Attention.from_matrices(G.double(), V.double(), beta), x.double(), [0.0, 0.2])
    with accelerator():
        path = flow(Attention.from_matrices(on(G), on(V), beta), on(x), [0.0, 0.2])
        scheduled = flow(lambda t: Attention.from_matrices(on(G), on(V), beta), on(x), [0.0, 0.2])
    for found in (path, scheduled):
        torch.testing.assert_close(values(found.x).double(), expected.x, rtol=0, atol=40 * 6e-8 * 4)


def test_tokens_that_grow_in_flat_space_are_noticed(x: Tensor) -> None:
    attention = Attention.identity(3, beta=2.0)
    with accelerator() as device, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        there = attention.to(device)
        for t in (
            [0.0, 4.0],
            [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
        ):  # grown e^4-fold at once, and seen to grow
            flow(there, on(x + 1), t, geometry=Euclidean())
    assert [w.category for w in said] == [PrecisionWarning]
    assert "tokens grew from" in str(said[0].message)


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


def test_a_stack_moves(generator: torch.Generator) -> None:
    stack = DeepStack(inputs=20, outputs=4, length=8, depth=2, horizon=1.0, beta=4.0)
    ids = torch.randint(20, (3, 8), generator=generator)
    expected = stack(ids).detach()
    with accelerator() as device:
        close(stack.to(device)(on(ids)).detach(), expected, 16)


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


@pytest.mark.parametrize("method", ["sinkhorn", "geomloss"])
@pytest.mark.parametrize("blur", [None, 0.1])
def test_sinkhorn_distances_of_a_batch_stay(x: Tensor, method: str, blur: float | None) -> None:
    """Two texts by two layers, one padded: one call, as many reads for one as for all, the CPU's numbers."""
    x = torch.stack([x, 2 * x]) + torch.tensor([[[0.0, 0.0, 0.0]], [[1.0, 0.0, 0.0]]])
    y = Sphere().retract(x + torch.tensor([1.0, 0.5, 0.0]))[:, None] * torch.tensor([1.0, 3.0])[:, None, None]
    mask = torch.arange(40) < torch.tensor([[[40]], [[30]]])
    options = {"method": method, "rtol": 0.2, "blur": blur}
    expected = solve(x[:, None], y, mask_x=mask, mask_y=mask, **options)
    seen = []
    for texts in (1, 2):
        with accelerator():
            there = [on(z[:texts]) for z in (x[:, None], y, mask)]
            forget_reads()
            found = solve(there[0], there[1], mask_x=there[2], mask_y=there[2], **options)
            seen.append(count())
        # The schedule is in float32; both are within what was proved.
        torch.testing.assert_close(values(found.distance), expected.distance[:texts], rtol=1e-3, atol=0)
        assert bool((values(found.error) <= 0.2 * values(found.distance)).all())
    assert max(seen) <= 2 + 5 * 6  # a validation, the widest pair, and for every blur five looks at the interval


def test_sinkhorn_gradients_stay(x: Tensor) -> None:
    y = Sphere().retract(x + 1)
    here = x.clone().requires_grad_()
    wasserstein(here, y, method="sinkhorn", rtol=0.2).backward()
    with accelerator():
        there = on(x).requires_grad_()
        wasserstein(there, on(y), method="sinkhorn", rtol=0.2).backward()
        torch.testing.assert_close(values(there.grad), here.grad, rtol=0, atol=1e-3 * float(here.grad.abs().max()))


@pytest.mark.parametrize("method", ["auto", "assignment", "simplex", "shortlist", "sliced"])
def test_exact_distances_move_once(x: Tensor, method: str) -> None:
    y = Sphere().retract(x + torch.tensor([0.3, 0.0, 0.0]))
    generator = torch.Generator()
    options = {"method": method, "n_projections": 5, "generator": generator.manual_seed(0)}
    here = x.clone().requires_grad_()
    expected = wasserstein(here, y, **options)
    expected.backward()
    generator.manual_seed(0)
    with accelerator():
        there = on(x).requires_grad_()
        forget_reads()
        found = wasserstein(there, on(y), **options)
        assert count() == 1
        assert torch.equal(values(found.detach()), expected.detach())
        found.backward()
        assert torch.equal(values(there.grad), here.grad)


def test_the_bench_counts_no_more_reads_than_are_allowed() -> None:
    rows = list(counted(n=12))
    assert all(row["ratio"] <= 1 for row in rows), rows
    assert [row["reads"] for row in rows if row["against"] == "none"] == [0, 0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_of_public_functions_mix_no_devices(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with accelerator() as device, made_there(device):
        run(name, EXAMPLES[name])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_probe_of_a_tiny_encoder_is_that_of_the_cpu() -> None:
    """All rungs, two nulls and the path through depth. 1 - explained is |error|^2 over the spread of the outputs.

    Outputs of this untrained encoder are float32 and spread by about a thousandth of their length: to 2 eps / 1e-3.
    """
    model, tokenizer = tiny_bert()
    texts = [text for text in topics() if len(text) > 200][:2]
    options = {"max_length": 24, "nulls": ["rotated", "uniform"], "max_unknown": 1.0, "transport": "exact"}
    expected = probe(model, tokenizer, texts, **options)
    with accelerator() as device:
        found = probe(model.to(device), tokenizer, texts, **options)
        verdicts = [finding.verdict for finding in found.findings()]
    for name, here in {**expected.closures, **expected.nulls}.items():
        there = {**found.closures, **found.nulls}[name].explained
        there = values(there) if there.device.type != "cpu" else there
        error = (there - here.explained).abs() / (1 + (1 - here.explained).abs())
        assert float(error.max()) < 2 * 1.2e-7 / 1e-3, name
    assert verdicts == [finding.verdict for finding in expected.findings()]
