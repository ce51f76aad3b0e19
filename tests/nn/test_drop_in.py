"""In the place of nn.MultiheadAttention: the same numbers at one Euler step, masks, encoders, gradients."""

import copy
import pickle

import pytest
import torch
from torch import nn

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
@pytest.mark.parametrize("mask", ["none", "padding", "float padding", "causal", "pairs", "pairs of heads", "all"])
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
    with pytest.raises(ValueError, match="expected bool"):
        ContinuousMultiheadAttention.from_multihead(theirs)(x, x, x, key_padding_mask=numbers)


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
