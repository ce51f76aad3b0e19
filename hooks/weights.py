"""The weights of a live encoder as `Attention` objects, with the geometry of every layer.

With z = x, or z = norm(x) in a pre-norm block, a layer adds

    A(z)_i = sum_h O_h sum_j softmax_j(beta <Q_h z_i + b_h, K_h z_j>) (V_h z_j + c_h) + o,

which is Attention(Q, K, V, O, beta, b, value_bias = sum_h O_h c_h + o). A bias of the keys cancels in the softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from attn_flow.attention import Attention
from attn_flow.geometry import Ellipsoid, Euclidean, Geometry
from attn_flow.hooks.layout import Block, blocks, has
from attn_flow.hooks.positions import Projections, as_float, projections, read_linear


def read_attention(block: Block, weights: Projections | None = None) -> Attention:
    """The Attention of one block; see `attentions`. `weights` are its projections, if they have been read already."""
    weights = projections(block) if weights is None else weights
    (Q, b), (K, _), (V, c) = weights["q"], weights["k"], weights["v"]
    W, o = read_linear(block, block.architecture.o)
    O = rearrange(W, "d (h v) -> h d v", h=block.heads)
    value_bias = torch.zeros_like(W[:, 0])
    if c is not None:
        value_bias = value_bias + torch.einsum("hdv,hv->d", O, c)
    if o is not None:
        value_bias = value_bias + o
    if block.architecture.layer_scale:
        scale = as_float(next(block[block.architecture.layer_scale].parameters()))
        O, value_bias = scale[:, None] * O, scale * value_bias
    return Attention(Q, K, V, O, beta=block.beta, query_bias=b, value_bias=value_bias, causal=block.causal)


def attentions(model: nn.Module) -> list[Attention]:
    """One Attention per layer, from the live weights of a known encoder.

    They act on what the attention of the layer sees: the residual stream after the last norm in post-norm models, the
    block's normalised input in pre-norm ones. `encoder_facts` lists what they leave out (positions, the feed-forward
    part), and `self_check` measures it.

    Args:
        model: a known encoder, or something that holds one. LoRA adapters are merged in what is read.

    Returns:
        A list of Attention in float32 or float64.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model = tiny_bert()[0]  # or AutoModel.from_pretrained("bert-base-uncased")
        >>> attentions(model)[0]
        Attention(heads=2, dim=16, beta=0.353553, softmax)
    """
    return [read_attention(block) for block in blocks(model)]


def geometries(model: nn.Module) -> list[Geometry]:
    """The set that the tokens of each layer live on.

    Args:
        model: a known encoder, or something that holds one.

    Returns:
        A geometry per layer: the ellipsoid of the LayerNorm or RMSNorm that feeds its attention, and flat space where
        nothing normalises (ALBERT's first layer). ValueError for a norm that computes something else.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> [type(geometry).__name__ for geometry in geometries(tiny_bert()[0])]
        ['Ellipsoid', 'Ellipsoid']
    """
    modules = [block.norm_in for block in blocks(model)]
    return [Euclidean() if module is None else _ellipsoid(module) for module in modules]


def _ellipsoid(module: nn.Module) -> Ellipsoid:
    """The image of a norm gain * x / sqrt(mean x^2 + eps) + bias, where a LayerNorm takes the mean from x first."""
    gain, bias, name = getattr(module, "weight", None), getattr(module, "bias", None), type(module).__name__
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    if not isinstance(gain, Tensor) or gain.ndim != 1 or eps is None:
        raise ValueError(f"{name} has no gain `weight` of shape (d,) and no `eps`; expected a LayerNorm or RMSNorm.")
    is_centred, read = hasattr(module, "bias"), as_float(gain)
    read_bias = None if bias is None else as_float(bias)
    x = torch.linspace(-1, 2, gain.shape[0], dtype=gain.dtype, device=gain.device)
    with torch.no_grad():
        output, z = as_float(module(x)), as_float(x)
    z = z - z.mean() if is_centred else z
    expected = read * z / (z.square().mean() + eps).sqrt() + (0 if read_bias is None else read_bias)
    rounding = max(torch.finfo(dtype).eps for dtype in (gain.dtype, torch.float32))  # many norms work in float32
    if float((output - expected).abs().max()) > 16 * rounding * float(1 + expected.abs().max()):
        raise ValueError(f"{name} does not compute gain * normalised + bias; expected a LayerNorm or RMSNorm.")
    return Ellipsoid.from_layer_norm(read, read_bias, centred=is_centred)


def encoder_facts(model: nn.Module) -> dict[str, Any]:
    """What an encoder is, and what its Attentions leave out.

    Args:
        model: a known encoder, or something that holds one.

    Returns:
        Plain JSON: architecture, layers, heads, dim, beta per layer, norm, causal, omits, ...

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> facts = encoder_facts(tiny_bert()[0])
        >>> facts["architecture"], facts["layers"], facts["heads"], facts["omits"]
        ('BERT', 2, 2, ['feed-forward part'])
    """
    layers = blocks(model)
    first = layers[0]
    gain = getattr(first[first.architecture.norm2], "weight", None)  # never quantised, unlike the projections
    omits = [f"{block.positions} (layer {block.index})" for block in layers if block.positions]
    if len({block.positions for block in layers}) == 1 and omits:
        omits = [first.positions]
    omits.append("feed-forward part" + (", in parallel with attention" if first.norm_placement == "parallel" else ""))
    if first.architecture.after_norm[0] and has(first.root, first.architecture.after_norm[0]):
        omits.append("convolution after layer 0")
    return {
        "architecture": first.architecture.name,
        "model": type(model).__name__,
        "layers": len(layers),
        "shared": first.architecture.shared,
        "heads": first.heads,
        "head_dim": first.head_dim,
        "dim": read_attention(first).dim if gain is None else gain.shape[0],
        "beta": [block.beta for block in layers],
        "norm": first.norm_placement,
        "causal": first.causal,
        "layer_scale": "absorbed in O" if first.architecture.layer_scale else "none",
        "omits": omits,
    }
