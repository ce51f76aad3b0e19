"""In place of nn.MultiheadAttention: the same numbers at one Euler step, masks, encoders, weights there and back."""

import copy
import inspect
import math
import warnings
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn_flow import ContinuousMultiheadAttention, Euclidean, Sphere, flow
from attn_flow.attention import Attention

F64 = torch.float64


def redraw(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Random weights, biases included: zero biases would hide mistakes."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3)
    return module


def draw(*shape: int, generator: torch.Generator, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=dtype)


@pytest.fixture
def multihead(generator: torch.Generator) -> nn.MultiheadAttention:
    return redraw(nn.MultiheadAttention(12, 3, batch_first=True, dtype=F64), generator)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("mask", ["none", "padding", "numbers", "causal", "pairs", "pairs of heads", "both"])
def test_one_euler_step_is_multihead_attention(
    multihead: nn.MultiheadAttention, generator: torch.Generator, mask: str, average: bool
) -> None:
    x = draw(4, 7, 12, generator=generator)
    padding = torch.arange(7) >= torch.tensor([[7], [5], [3], [7]])
    later = torch.ones(7, 7, dtype=torch.bool).triu(1)
    options = {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "numbers": {"key_padding_mask": draw(4, 7, generator=generator)},
        "causal": {"attn_mask": later, "is_causal": True},
        "pairs": {"attn_mask": draw(7, 7, generator=generator)},
        "pairs of heads": {"attn_mask": draw(12, 7, 7, generator=generator)},
        "both": {"attn_mask": later, "key_padding_mask": padding},
    }[mask]
    ours = ContinuousMultiheadAttention.from_multihead(multihead)
    expected = multihead(x, x, x, average_attn_weights=average, **options)
    moved, weights = ours(x, x, x, average_attn_weights=average, **options)
    close(moved, expected[0])
    close(weights, expected[1])
    assert ours(x, x, x, need_weights=False)[1] is None


@pytest.mark.parametrize("shape", [(7, 4, 12), (7, 12)], ids=["sequence first", "one cloud"])
def test_other_layouts(generator: torch.Generator, shape: tuple[int, ...]) -> None:
    multihead = redraw(nn.MultiheadAttention(12, 3, dtype=F64), generator)
    x = draw(*shape, generator=generator)
    close(ContinuousMultiheadAttention.from_multihead(multihead)(x, x, x)[0], multihead(x, x, x)[0])


def test_cross_attention_to_a_context_that_stays(multihead: nn.MultiheadAttention, generator: torch.Generator) -> None:
    x, y = (draw(4, n, 12, generator=generator) for n in (5, 9))
    is_hidden = torch.arange(9).expand(4, 9) >= 6
    ours = ContinuousMultiheadAttention.from_multihead(multihead)
    for options in ({}, {"key_padding_mask": is_hidden}):
        for a, b in zip(ours(x, y, y, **options), multihead(x, y, y, **options)):
            close(a, b)
    two = ContinuousMultiheadAttention.from_multihead(multihead, steps=2)
    half = x + 0.5 * multihead(x, y, y)[0]
    close(two(x, y, y)[0], half + 0.5 * multihead(half, y, y)[0] - x)
    with pytest.raises(ValueError, match="key and value are different tensors"):
        ours(x, y, y.clone())
    with pytest.raises(ValueError, match="is_causal is for self-attention"):
        ours(x, y, y, is_causal=True)


def test_more_steps_are_the_flow(multihead: nn.MultiheadAttention, generator: torch.Generator) -> None:
    x = draw(4, 7, 12, generator=generator)
    Q, K, V = multihead.in_proj_weight.reshape(3, 3, 4, 12)
    O = multihead.out_proj.weight.reshape(12, 3, 4).transpose(0, 1)
    query_bias, _, value_bias = multihead.in_proj_bias.reshape(3, 3, 4)
    constant = torch.einsum("hdk,hk->d", O, value_bias) + multihead.out_proj.bias
    attention = Attention(Q, K, V, O, 0.5, query_bias, constant)
    for geometry in (Euclidean(), Sphere(2.0)):
        ours = ContinuousMultiheadAttention.from_multihead(
            multihead, horizon=0.7, steps=5, step="rk4", geometry=geometry, checkpoint=True
        )
        close(ours(x, x, x)[0], flow(attention, x, [0.0, 0.7], h=0.14, geometry=geometry).x[-1] - x)


def test_views_of_one_tensor_are_self_attention(multihead: nn.MultiheadAttention, generator: torch.Generator) -> None:
    ours = ContinuousMultiheadAttention.from_multihead(multihead, steps=3)
    x = draw(4, 7, 12, generator=generator).requires_grad_()
    expected = ours(x, x, x)[0]
    close(ours(x, x.view(x.shape), x.view(x.shape))[0], expected)
    close(ours(x[0], x[0], x[0])[0], expected[0])
    again = checkpoint(lambda *z: ours(*z)[0], x, x, x, use_reentrant=True)
    close(again, expected)
    (gradient,) = torch.autograd.grad(expected.square().sum(), x)
    again.square().sum().backward()
    close(x.grad, gradient)
    context = x.detach()  # a constant, though of the same storage
    assert not torch.allclose(ours(x, context, context)[0], expected)


@pytest.mark.parametrize("case", ["self", "context", "pairs"])
def test_logits_beyond_float32_are_computed_in_float64(generator: torch.Generator, case: str) -> None:
    """Logits of thousands that differ by about one, because keys share a long component."""
    multihead = redraw(nn.MultiheadAttention(12, 3, batch_first=True), generator).requires_grad_(False)
    multihead.in_proj_weight[:24, 0] = multihead.in_proj_weight[24:, 1:] = 0.0  # values see one coordinate, keys others

    def cloud(n: int, size: float) -> Tensor:
        z = size * (draw(12, generator=generator) + 1e-3 * draw(4, n, 12, generator=generator))
        z[..., 0] = 20 * draw(4, n, generator=generator)
        return z.float()

    x = draw(4, 7, 12, generator=generator).float() if case == "context" else cloud(7, 40.0)
    y = cloud(9, 1600.0) if case == "context" else x
    options = {"attn_mask": torch.zeros(7, 7)} if case == "pairs" else {}
    x64 = x.double()
    y64 = x64 if y is x else y.double()
    expected = copy.deepcopy(multihead).double()(x64, y64, y64)
    rounding = 8 * torch.finfo(x.dtype).eps * float(x.abs().max() + expected[0].abs().max())
    once, calls = ContinuousMultiheadAttention.from_multihead(multihead), []
    once.register_forward_hook(lambda *_: calls.append(1))
    moved, weights = once(x, y, y, **options)
    assert len(calls) == 1
    torch.testing.assert_close(moved.double(), expected[0], rtol=0, atol=rounding)
    torch.testing.assert_close(weights.double(), expected[1], rtol=0, atol=rounding)
    ours = ContinuousMultiheadAttention.from_multihead(multihead, steps=2)
    gradients = []
    for again in (False, True):
        ours.options = replace(ours.options, checkpoint=again)
        z = x.clone().requires_grad_()
        ours(z, *[z if y is x else y] * 2, **options)[0].square().sum().backward()
        gradients.append(z.grad)
    assert torch.equal(*gradients)  # of steps that are computed again, too
    single = ContinuousMultiheadAttention.from_multihead(multihead, validate=False)(x, y, y, **options)[0]
    assert float((single - expected[0]).abs().max()) > rounding


# --- masks ------------------------------------------------------------------------------------------------------------


def test_a_fully_padded_row_gives_zeros_with_a_warning(
    multihead: nn.MultiheadAttention, generator: torch.Generator
) -> None:
    x = draw(2, 5, 12, generator=generator).requires_grad_()
    is_hidden = torch.tensor([[False] * 5, [True] * 5])
    ours = ContinuousMultiheadAttention.from_multihead(multihead, steps=2)
    with pytest.warns(UserWarning, match="hides every token of a cloud"):
        moved, weights = ours(x, x, x, key_padding_mask=is_hidden)
    assert torch.equal(moved[1], torch.zeros(5, 12, dtype=F64))
    assert torch.equal(weights[1], torch.zeros(5, 5, dtype=F64))
    close(moved[0], ours(x[0], x[0], x[0])[0])
    moved.sum().backward()
    assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize("is_causal", [True, False])
def test_left_padding_with_a_causal_mask_has_finite_gradients(
    multihead: nn.MultiheadAttention, generator: torch.Generator, is_causal: bool
) -> None:
    ours = ContinuousMultiheadAttention.from_multihead(multihead, steps=2)
    x = draw(2, 5, 12, generator=generator).requires_grad_()
    is_hidden = torch.tensor([[True, True, False, False, False], [False] * 5])
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    moved = ours(x, x, x, key_padding_mask=is_hidden, attn_mask=later, is_causal=is_causal)[0]
    short = x[:1, 2:]
    close(moved[:1, 2:], ours(short, short, short, attn_mask=later[2:, 2:], is_causal=True)[0])
    moved.square().sum().backward()
    assert all(bool(z.grad.isfinite().all()) for z in (x, *ours.parameters()))
    low = x.detach().float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        mixed = ours.float()(low, low, low, key_padding_mask=is_hidden, attn_mask=later, is_causal=is_causal)[0]
    torch.testing.assert_close(mixed.double(), moved, rtol=0, atol=0.1)
    mixed.square().sum().backward()
    assert bool(low.grad.isfinite().all())


# --- weights there and back -------------------------------------------------------------------------------------------


def test_state_dicts(multihead: nn.MultiheadAttention, generator: torch.Generator) -> None:
    x = draw(2, 5, 12, generator=generator)
    ours = ContinuousMultiheadAttention(12, 3, batch_first=True, dtype=F64, step="euler")
    ours.load_state_dict(multihead.state_dict())
    close(ours(x, x, x)[0], multihead(x, x, x)[0])
    other = ContinuousMultiheadAttention(12, 3, batch_first=True, dtype=F64, step="euler", beta=9.0, learn_beta=True)
    other.load_state_dict(ours.state_dict())
    assert torch.equal(other(x, x, x)[0], ours(x, x, x)[0])
    ours.beta = torch.tensor([0.3, 0.5, 2.0])
    close(ours.to_multihead()(x, x, x)[0], ours(x, x, x)[0])
    encoder = nn.TransformerEncoderLayer(12, 3, 24, dtype=F64)
    state = encoder.state_dict()
    encoder.self_attn = ContinuousMultiheadAttention(12, 3, dtype=F64)
    encoder.load_state_dict(state)  # of the plain encoder
    assert torch.equal(encoder.self_attn.k_proj.weight, state["self_attn.in_proj_weight"][12:24])


def test_frozen_weights_stay_frozen(multihead: nn.MultiheadAttention) -> None:
    multihead.in_proj_weight.requires_grad_(False)
    ours = ContinuousMultiheadAttention.from_multihead(multihead, learn_beta=True)
    frozen = {name for name, p in ours.named_parameters() if not p.requires_grad}
    assert frozen == {"q_proj.weight", "k_proj.weight", "v_proj.weight"}


def test_meta_device_and_reset(generator: torch.Generator) -> None:
    with torch.device("meta"):
        ours = ContinuousMultiheadAttention(12, 3, learn_beta=True, beta=3.0)
    ours.to_empty(device="cpu")
    ours.reset_parameters()
    torch.testing.assert_close(ours.beta, torch.full((3,), 3.0))
    theirs = torch.cat([nn.MultiheadAttention(12, 3).in_proj_weight for _ in range(20)]).std()
    assert ours.q_proj.weight.std().item() == pytest.approx(theirs.item(), rel=0.2)


def test_lora_finds_the_projections_and_acts_on_every_evaluation(generator: torch.Generator) -> None:
    multihead = redraw(nn.MultiheadAttention(12, 3, batch_first=True), generator)
    ours = ContinuousMultiheadAttention.from_multihead(multihead, steps=2, beta=2.0)
    x = torch.randn(2, 5, 12, generator=generator)
    before = ours(x, x, x)[0]
    model = get_peft_model(nn.ModuleDict({"attn": ours}), LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    attn = model.base_model.model["attn"]
    for name, p in attn.named_parameters():
        if "lora" in name:
            nn.init.normal_(p, std=0.3)
    adapted = attn(x, x, x)[0]
    assert not torch.allclose(adapted, before, atol=1e-3)
    merged = model.merge_and_unload()["attn"]
    torch.testing.assert_close(merged(x, x, x)[0], adapted, rtol=1e-4, atol=1e-5)


def test_dynamic_quantisation_finds_the_projections(generator: torch.Generator) -> None:
    multihead = redraw(nn.MultiheadAttention(12, 3, batch_first=True), generator)
    ours = ContinuousMultiheadAttention.from_multihead(multihead).eval()
    x = torch.randn(2, 5, 12, generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = torch.ao.quantization.quantize_dynamic(ours, {nn.Linear}, dtype=torch.qint8)
    assert not isinstance(small.q_proj, nn.Linear)
    expected = ours(x, x, x)[0]
    error = (small(x, x, x)[0] - expected).norm() / expected.norm()
    assert 0 < float(error) < 0.1  # eight bits
    cold = 100 * x  # logits beyond float32, for which float weights are cast
    assert bool(small(cold, cold, cold)[0].isfinite().all())


# --- torch's machinery ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_inside_an_encoder(generator: torch.Generator, norm_first: bool, training: bool) -> None:
    """In evaluation torch takes a fused path around self_attn and packs padded batches for it. Here it must not."""
    layer = nn.TransformerEncoderLayer(12, 4, 24, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=F64)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
    encoder = redraw(encoder, generator).train(training)
    x = draw(4, 7, 12, generator=generator)
    padding = torch.arange(7) >= torch.tensor([[7], [5], [7], [7]])
    expected = encoder(x, src_key_padding_mask=padding)
    continuous = copy.deepcopy(encoder)
    for each in continuous.layers:
        each.self_attn = ContinuousMultiheadAttention.from_multihead(each.self_attn)
    with torch.no_grad():
        close(continuous(x, src_key_padding_mask=padding)[~padding], expected[~padding])
        for each in continuous.layers:
            each.self_attn.beta = 50.0
        assert not torch.allclose(continuous(x, src_key_padding_mask=padding)[~padding], expected[~padding], atol=1e-3)
    with pytest.warns(UserWarning, match="use_nested_tensor is False"):
        fresh = nn.TransformerEncoder(continuous.layers[0], 2)
    assert fresh(x).shape == x.shape


def test_gradients_reach_every_weight_and_agree_with_differences(generator: torch.Generator) -> None:
    ours = ContinuousMultiheadAttention(4, 2, batch_first=True, steps=2, learn_beta=True, dtype=F64)
    names = [name for name, _ in ours.named_parameters()]
    x = draw(2, 3, 4, generator=generator).requires_grad_()

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(ours, dict(zip(names, weights)), (x, x, x))[0]

    redraw(ours, generator)
    assert torch.autograd.gradcheck(run, (x, *ours.parameters()), fast_mode=True)
    run(x, *ours.parameters()).square().sum().backward()
    assert all(bool((p.grad != 0).any()) for name, p in ours.named_parameters() if name != "k_proj.bias")


def test_compile_and_export(multihead: nn.MultiheadAttention, generator: torch.Generator) -> None:
    torch._dynamo.reset()
    ours = ContinuousMultiheadAttention.from_multihead(multihead, steps=2)
    x, padding = draw(2, 5, 12, generator=generator), torch.arange(5).expand(2, 5) >= 4
    expected = ours(x, x, x, key_padding_mask=padding)

    class Itself(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = ours

        def forward(self, x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor | None]:
            return self.attn(x, x, x, key_padding_mask=padding)

    compiled = torch.compile(Itself(), fullgraph=True, backend="aot_eager")
    exported = torch.export.export(Itself(), (x, padding)).module()
    for run in (compiled, exported):
        for a, b in zip(run(x, padding), expected):
            close(a, b)


def test_it_is_called_and_made_as_torchs() -> None:
    theirs, ours = nn.MultiheadAttention, ContinuousMultiheadAttention
    called = list(inspect.signature(ours.forward).parameters)
    assert called == list(inspect.signature(theirs.forward).parameters)
    made = list(inspect.signature(theirs).parameters)
    assert list(inspect.signature(ours).parameters)[:4] == made[:4]
    assert {"batch_first", "device", "dtype"} <= set(inspect.signature(ours).parameters)


def test_errors(multihead: nn.MultiheadAttention) -> None:
    with pytest.raises(ValueError, match=r"dropout = 0.1, expected 0: a flow is deterministic"):
        ContinuousMultiheadAttention(12, 3, dropout=0.1)
    with pytest.raises(ValueError, match="beta = inf, expected positive, finite"):
        ContinuousMultiheadAttention(12, 3, beta=math.inf)
    with pytest.raises(ValueError, match="add_bias_kv"):
        ContinuousMultiheadAttention.from_multihead(nn.MultiheadAttention(12, 3, add_bias_kv=True))
    with pytest.warns(UserWarning, match=r"attention dropout 0.1 is left out"):
        ContinuousMultiheadAttention.from_multihead(nn.MultiheadAttention(12, 3, dropout=0.1))
    with pytest.raises(ValueError, match="takes equal steps"):
        ContinuousMultiheadAttention(12, 3, step="adaptive")
    x = torch.zeros(1, 2, 12, dtype=F64)
    ours = ContinuousMultiheadAttention.from_multihead(multihead)
    with pytest.raises(TypeError, match=r"key_padding_mask has dtype torch.int32, expected bool"):
        ours(x, x, x, key_padding_mask=torch.zeros(1, 2, dtype=torch.int))
    with pytest.raises(ValueError, match=r"attn_mask has shape \(1, 2\), expected \(2, 2\) or \(3, 2, 2\)"):
        ours(x, x, x, attn_mask=torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"query has NaN or infinite entries"):
        ours(*[x * math.nan] * 3)
    with pytest.raises(ValueError, match=r"query has dtype torch.float32 and the layer torch.float64; use query.to"):
        ours(*[x.float()] * 3)
    with pytest.raises(TypeError, match=r"query is a list, expected a torch\.Tensor"):
        ours(*[[1.0]] * 3)
    with pytest.raises(TypeError, match=r"value is a NoneType, expected a torch\.Tensor"):
        ours(x, x, None)
    with pytest.raises(ValueError, match=r"expected \(\[batch,\] n, 12\) with one batch"):
        ours(*[x[None]] * 3)
