"""In the place of nn.MultiheadAttention: the same numbers at one Euler step, masks, encoders, gradients."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attn_flow import Attention, Euclidean, Sphere, push_forward
from attn_flow.nn import ContinuousAttentionLayer, ContinuousMultiheadAttention
from attn_flow.nn.schedules import Geometric, Linear

F64 = torch.float64


@pytest.fixture
def theirs(generator: torch.Generator) -> nn.MultiheadAttention:
    """With biases re-drawn: at initialisation they are zero, and a test is blind to them."""
    return redrawn(nn.MultiheadAttention(12, 3, batch_first=True, dtype=F64), generator)


def redrawn(module: nn.Module, generator: torch.Generator) -> nn.Module:
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3)
    return module


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)  # float64, sums of a few dozen terms of order one


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(
    "mask", ["none", "padding", "float padding", "added", "causal", "pairs", "pairs of heads", "all"]
)
def test_one_euler_step_is_multihead_attention(
    theirs: nn.MultiheadAttention, generator: torch.Generator, mask: str, average: bool, need_weights: bool
) -> None:
    x = torch.randn(4, 7, 12, generator=generator, dtype=F64)
    padding = torch.zeros(4, 7, dtype=torch.bool)
    padding[1, 5:] = padding[2, 3:] = True
    later = torch.ones(7, 7, dtype=torch.bool).triu(1)
    some = torch.randn(7, 7, generator=generator, dtype=F64)
    options = {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": torch.zeros(4, 7, dtype=F64).masked_fill(padding, -torch.inf)},
        "added": {"key_padding_mask": torch.randn(4, 7, generator=generator, dtype=F64)},
        "causal": {"attn_mask": later, "is_causal": True},
        "pairs": {"attn_mask": some},
        "pairs of heads": {"attn_mask": torch.randn(12, 7, 7, generator=generator, dtype=F64)},
        "all": {"attn_mask": later, "key_padding_mask": padding},
    }[mask]
    ours = ContinuousMultiheadAttention.from_multihead(theirs)
    found, weights = ours(x, x, x, need_weights=need_weights, average_attn_weights=average, **options)
    expected, their_weights = theirs(x, x, x, need_weights=True, average_attn_weights=average, **options)
    close(found, expected)
    if need_weights:
        close(weights, their_weights)
    else:
        assert weights is None


def test_it_is_called_and_made_as_torchs() -> None:
    theirs, ours = nn.MultiheadAttention, ContinuousMultiheadAttention
    assert list(inspect.signature(theirs.forward).parameters) == list(inspect.signature(ours.forward).parameters)
    made = [name for name, p in inspect.signature(ours).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert made == list(inspect.signature(theirs).parameters)
    assert ours(12, 3, 0.0, True, False, False, 12, None, True).batch_first


@pytest.mark.parametrize("mask", ["none", "pairs"])
def test_the_look_at_the_logits_costs_no_product(generator: torch.Generator, mask: str) -> None:
    theirs = redrawn(nn.MultiheadAttention(12, 3, batch_first=True), generator)
    x = torch.randn(4, 7, 12, generator=generator)
    counts = []
    for module in (theirs, *(ContinuousMultiheadAttention.from_multihead(theirs, validate=v) for v in (True, False))):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module(x, x, x, need_weights=False, attn_mask=torch.zeros(7, 7) if mask == "pairs" else None)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == counts[2] > 0


@torch.no_grad()
@pytest.mark.parametrize("case", ["itself", "context", "pairs"])
def test_logits_beyond_float32_are_computed_in_float64(generator: torch.Generator, case: str) -> None:
    """Keys that share a long component and values that do not: logits of thousands that differ by about one."""
    theirs = redrawn(nn.MultiheadAttention(12, 3, batch_first=True), generator).requires_grad_(False)
    theirs.in_proj_weight[:24, 0] = theirs.in_proj_weight[24:, 1:] = 0.0  # values see the first coordinate, keys others

    def cloud(n: int, size: float) -> torch.Tensor:
        z = size * (torch.randn(12, generator=generator) + 1e-3 * torch.randn(4, n, 12, generator=generator))
        z[..., 0] = 20 * torch.randn(4, n, generator=generator)
        return z

    x = torch.randn(4, 7, 12, generator=generator) if case == "context" else cloud(7, 40.0)
    y = cloud(9, 1600.0) if case == "context" else x
    options = {"attn_mask": torch.zeros(7, 7)} if case == "pairs" else {}
    ours, exact = (ContinuousMultiheadAttention.from_multihead(m) for m in (theirs, copy.deepcopy(theirs).double()))
    x64 = x.double()
    y64 = x64 if y is x else y.double()
    expected, weights = exact(x64, y64, y64, **{name: mask.double() for name, mask in options.items()})
    found, seen = ours(x, y, y, **options)
    assert ours.flow._precise
    size = float((x.abs().max() + expected.abs().max()).detach())  # the displacement is a difference of such tokens
    eps = 8 * torch.finfo(x.dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=eps * size)
    torch.testing.assert_close(seen.double(), weights, rtol=0, atol=eps)
    blind = ContinuousMultiheadAttention.from_multihead(theirs, validate=False)(x, y, y, **options)[0]
    assert float((blind - expected).abs().max()) > eps * size  # what float32 would say


def test_a_schedule_that_grows_cold_is_looked_at_where_it_is_coldest() -> None:
    for geometry in (Euclidean(), Sphere()):
        layer = ContinuousAttentionLayer(4, 2, beta=1.0, beta_schedule=Linear(1.0, 1e5), geometry=geometry)
        layer(torch.ones(3, 4))
        assert layer._precise
        layer.beta_schedule = Linear(1.0, 1.1)
        layer(torch.ones(3, 4))
        assert not layer._precise


def test_zero_temperature(theirs: nn.MultiheadAttention, generator: torch.Generator) -> None:
    x = torch.randn(4, 7, 12, generator=generator, dtype=F64)
    ours = ContinuousMultiheadAttention.from_multihead(theirs)
    ours.flow.beta = float("inf")
    moved, weights = ours(x, x, x, average_attn_weights=False)
    assert torch.equal(weights.sum(-1), torch.ones(4, 3, 7, dtype=F64))
    assert torch.equal(weights.amax(-1), torch.ones(4, 3, 7, dtype=F64))
    close(moved, ours.flow.attention().drift(x))
    with pytest.raises(ValueError, match="attn_mask with beta = inf"):
        ours(x, x, x, attn_mask=torch.zeros(7, 7, dtype=F64))


@pytest.mark.parametrize("shape", ["sequence first", "one cloud"])
def test_other_layouts(generator: torch.Generator, shape: str) -> None:
    theirs = redrawn(nn.MultiheadAttention(12, 3, dtype=F64), generator)
    x = torch.randn(*((7, 4, 12) if shape == "sequence first" else (7, 12)), generator=generator, dtype=F64)
    close(ContinuousMultiheadAttention.from_multihead(theirs)(x, x, x)[0], theirs(x, x, x)[0])


def test_cross_attention_is_a_context_that_stays(theirs: nn.MultiheadAttention, generator: torch.Generator) -> None:
    x, y = (torch.randn(4, n, 12, generator=generator, dtype=F64) for n in (5, 9))
    ours = ContinuousMultiheadAttention.from_multihead(theirs)
    close(ours(x, y, y)[0], theirs(x, y, y)[0])
    close(ours(x, y, y)[1], theirs(x, y, y)[1])
    hidden = torch.arange(9).expand(4, 9) >= 6
    close(ours(x, y, y, key_padding_mask=hidden)[0], theirs(x, y, y, key_padding_mask=hidden)[0])
    with pytest.raises(ValueError, match="key and value are different tensors"):
        ours(x, y, y.clone())


def test_more_steps_are_the_flow(theirs: nn.MultiheadAttention, generator: torch.Generator) -> None:
    x = torch.randn(4, 7, 12, generator=generator, dtype=F64)
    ours = ContinuousMultiheadAttention.from_multihead(theirs, horizon=0.7, steps=5, step="rk4")
    flowed = push_forward(ours.flow.attention(), x, 0.7, h=0.14, geometry=Euclidean())
    close(ours(x, x, x)[0], flowed - x)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_inside_torchs_encoder(generator: torch.Generator, norm_first: bool, training: bool) -> None:
    """In evaluation torch's own layers take a fused path around self_attn, and encoders of an even number of heads

    pack padded batches into nested tensors for it; here they must not.
    """
    layer = nn.TransformerEncoderLayer(12, 4, 24, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=F64)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
    assert encoder.use_nested_tensor is not norm_first
    encoder = redrawn(encoder, generator).train(training)
    x = torch.randn(4, 7, 12, generator=generator, dtype=F64)
    padding = torch.zeros(4, 7, dtype=torch.bool)
    padding[1, 5:] = True
    expected = encoder(x, src_key_padding_mask=padding)
    continuous = copy.deepcopy(encoder)
    for each in continuous.layers:
        each.self_attn = ContinuousMultiheadAttention.from_multihead(each.self_attn)
    with torch.no_grad():
        close(continuous(x, src_key_padding_mask=padding)[~padding], expected[~padding])
        for each in continuous.layers:
            each.self_attn.flow.beta = 50.0
        assert not torch.allclose(continuous(x, src_key_padding_mask=padding)[~padding], expected[~padding], atol=1e-3)
    fresh = nn.TransformerEncoder(continuous.layers[0], 2)  # torch asks the layer about its fused path here
    assert fresh(x).shape == x.shape


def test_gradients_reach_every_weight(generator: torch.Generator) -> None:
    module = ContinuousMultiheadAttention(12, 3, batch_first=True, steps=2, learn_beta=True, dtype=F64)
    x = torch.randn(2, 5, 12, generator=generator, dtype=F64, requires_grad=True)
    module(x, x, x)[0].square().sum().backward()
    assert all(p.grad is not None and bool((p.grad != 0).any()) for p in module.parameters())


def test_refused_by_name(theirs: nn.MultiheadAttention) -> None:
    with pytest.raises(ValueError, match=r"dropout = 0.1, expected 0: a flow is deterministic"):
        ContinuousMultiheadAttention(12, 3, dropout=0.1)
    with pytest.raises(ValueError, match="add_bias_kv"):
        ContinuousMultiheadAttention.from_multihead(nn.MultiheadAttention(12, 3, add_bias_kv=True))
    with pytest.raises(ValueError, match="kdim or vdim"):
        ContinuousMultiheadAttention.from_multihead(nn.MultiheadAttention(12, 3, kdim=5))
    with pytest.warns(UserWarning, match=r"attention dropout 0.1 is left out"):
        ContinuousMultiheadAttention.from_multihead(nn.MultiheadAttention(12, 3, dropout=0.1))
    x, numbers = torch.zeros(1, 2, 12, dtype=F64), torch.zeros(1, 2, dtype=torch.int)
    ours = ContinuousMultiheadAttention.from_multihead(theirs)
    with pytest.raises(ValueError, match=r"key_padding_mask has dtype torch.int32, expected bool"):
        ours(x, x, x, key_padding_mask=numbers)
    with pytest.raises(ValueError, match=r"attn_mask has dtype torch.int32, expected bool"):
        ours(x, x, x, attn_mask=torch.zeros(2, 2, dtype=torch.int))
    with pytest.raises(ValueError, match=r"attn_mask has shape \(1, 2\), expected \(n, m\) = \(2, 2\)"):
        ours(x, x, x, attn_mask=torch.zeros(1, 2))
    with pytest.raises(ValueError, match="mask has shape"):
        ours(x, x, x, key_padding_mask=torch.zeros(1, 3, dtype=torch.bool), attn_mask=torch.zeros(2, 2))
    with pytest.raises(ValueError, match="is_causal without attn_mask"):
        ours(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match="kdim = 5"):
        ContinuousMultiheadAttention(12, 3, kdim=5)


def test_schedules_pickle_and_multiply_beta() -> None:
    for schedule, middle in ((Linear(0.5, 2.0), 1.25), (Geometric(0.5, 2.0), 1.0)):
        layer = ContinuousAttentionLayer(4, 2, beta=3.0, beta_schedule=schedule, horizon=2.0, dtype=F64)
        again = pickle.loads(pickle.dumps(layer))
        x = torch.randn(5, 4, dtype=F64)
        assert torch.equal(again(x), layer(x))
        assert again.attention(0.5).beta.tolist() == pytest.approx([3 * middle] * 2)
    with pytest.raises(ValueError, match="end = 0"):
        Linear(1.0, 0.0)


def test_beta_is_read_set_saved_and_loaded() -> None:
    layer = ContinuousAttentionLayer(4, 2, beta=3.0, dtype=F64)
    layer.beta = 8.0
    assert layer.beta.tolist() == pytest.approx([8.0, 8.0])
    other = ContinuousAttentionLayer(4, 2, beta=1.0, learn_beta=True, dtype=F64)
    other.load_state_dict(layer.state_dict())
    assert other.beta.tolist() == pytest.approx([8.0, 8.0])
    layer.beta = float("inf")
    x = torch.randn(5, 4, dtype=F64)
    torch.testing.assert_close(layer(x), push_forward(layer.attention(), x, 1.0, h=1.0))
    assert layer.attention().cold
    with pytest.raises(ValueError, match=r"beta has shape \(3,\), expected \(\) or \(heads,\) = \(2,\)"):
        layer.beta = torch.ones(3)


def test_the_pretrained_layer_is_the_default(generator: torch.Generator) -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 24, 0.0, batch_first=True)
    encoder = redrawn(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), generator).eval()
    x = 10 * torch.randn(2, 5, 12, generator=generator)
    for l, block in enumerate(encoder.layers):
        expected = x + block.self_attn(x, x, x)[0]
        found = ContinuousAttentionLayer.from_pretrained(encoder, l)(x)
        size = float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=64 * torch.finfo(x.dtype).eps * size)
    colder = ContinuousAttentionLayer.from_pretrained(encoder, 0, beta=8.0, steps=3, step="rk4", geometry=Sphere())
    assert colder.beta.tolist() == pytest.approx([8.0] * 3)
    assert isinstance(colder.attention(), Attention)
