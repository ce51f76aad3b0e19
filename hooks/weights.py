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

from attn_flow.attention.attention import Attention
from attn_flow.geometry import Ellipsoid, Euclidean, Geometry
from attn_flow.hooks.layout import Block, at, blocks, distinct
from attn_flow.hooks.positions import as_float, projections, read_linear


def read_attention(block: Block) -> Attention:
    """The Attention of one block; see `attentions`."""
    (Q, b), (K, _), (V, c) = projections(block).values()
    W, o = read_linear(block, block.architecture.o)
    if W.shape[1] != V.shape[:2].numel() or Q.shape[2] != V.shape[2]:
        raise ValueError(
            f"{block.path}: values (heads, k, d) are {tuple(V.shape)}, queries {tuple(Q.shape)}, and the output "
            f"projection takes {W.shape[1]} numbers; the architecture {block.architecture.name!r} does not fit this "
            "model. Register one of its own."
        )
    O = rearrange(W, "d (h v) -> h d v", h=block.heads)
    value_bias = torch.zeros_like(W[:, 0]) if o is None else o
    if c is not None:
        value_bias = value_bias + torch.einsum("hdv,hv->d", O, c)
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
    return [Euclidean() if norm is None else _ellipsoid(norm) for norm in (block.norm_in for block in blocks(model))]


def _ellipsoid(norm: nn.Module) -> Ellipsoid:
    """The image of a norm gain * x / sqrt(mean x^2) + bias, where a LayerNorm takes the mean from x first."""
    gain, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if isinstance(gain, Tensor) and gain.ndim == 1:
        read_bias = None if bias is None else as_float(bias)
        ellipsoid = Ellipsoid.from_layer_norm(as_float(gain), read_bias, centred=hasattr(norm, "bias"))
        x = torch.linspace(-100, 200, len(gain)).to(gain)  # so large that the norm's eps does not matter
        with torch.no_grad():
            y = as_float(norm(x))[None]
        if float((ellipsoid.retract(y) - y).norm()) < 0.01 * float(y.norm()):
            return ellipsoid
    raise ValueError(
        f"{type(norm).__name__} does not compute gain * normalised + bias; expected a LayerNorm or RMSNorm."
    )


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
    omits = list(dict.fromkeys(block.positions for block in layers if block.positions))
    omits.append("feed-forward part" + (", in parallel with attention" if first.norm_placement == "parallel" else ""))
    if first.architecture.after_norm and at(first.root, first.architecture.after_norm) is not None:
        omits.append("convolution after layer 0")
    return {
        "architecture": first.architecture.name,
        "model": type(model).__name__,
        "layers": len(layers),
        "shared": len(distinct(layers)) < len(layers),
        "heads": first.heads,
        "head_dim": first.head_dim,
        # Norms are never quantised, unlike the projections.
        "dim": first[first.architecture.norm2].get_parameter("weight").numel(),
        "beta": [block.beta for block in layers],
        "norm": first.norm_placement,
        "causal": first.causal,
        "omits": omits,
    }
