"""The weights of a live encoder as the core's nouns: one Attention per layer, its geometry, and a check of both.

A layer adds A(z), z = x or norm(x), A(z)_i = sum_h O_h sum_j softmax_j(beta <Q z_i + b, K z_j>) (V z_j + c_h) + o:
Attention(Q, K, V, O, beta, b, value_bias = sum_h O_h c_h + o). A key bias is constant in j and cancels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from attn_flow.attention import Attention
from attn_flow.geometry import Ellipsoid, Euclidean, Geometry, Sphere
from attn_flow.hooks.architectures import has
from attn_flow.hooks.layout import Block, blocks


@dataclass(frozen=True)
class Norm:
    """z = gain * (x - mean) / sqrt(var + eps) + bias; without `centred`, RMSNorm: gain * x / sqrt(mean x^2 + eps)."""

    gain: Tensor
    bias: Tensor | None
    eps: float
    centred: bool

    def unit(self, x: Tensor) -> Tensor:
        """The normalised token before gain and bias: on the sphere of radius sqrt(d), up to eps."""
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def __call__(self, x: Tensor) -> Tensor:
        z = self.gain * self.unit(x)
        return z if self.bias is None else z + self.bias


def norm(module: nn.Module) -> Norm:
    """Reads a LayerNorm or RMSNorm of any make, and checks that it computes what was read."""
    gain = getattr(module, "weight", None)
    eps = next((getattr(module, n) for n in ("eps", "variance_epsilon") if getattr(module, n, None) is not None), None)
    name = type(module).__name__
    if not isinstance(gain, Tensor) or gain.ndim != 1 or eps is None:
        raise ValueError(f"{name} has no gain `weight` of shape (d,) and no `eps`; expected a LayerNorm or RMSNorm.")
    bias = getattr(module, "bias", None)
    read = Norm(_float(gain), None if bias is None else _float(bias), float(eps), centred=hasattr(module, "bias"))
    x = torch.linspace(-1, 2, gain.shape[0], dtype=gain.dtype, device=gain.device)
    with torch.no_grad():
        got, expected = _float(module(x)), read(_float(x))
    eps = max(torch.finfo(dtype).eps for dtype in (gain.dtype, torch.float32))  # many norms work in float32
    tolerance = 16 * eps * float(1 + expected.abs().max())
    if float((got - expected).abs().max()) > tolerance:
        raise ValueError(f"{name} does not compute gain * normalised + bias from its weight and bias; cannot fold it.")
    return read


def _float(x: Tensor) -> Tensor:
    """Half precision is read as float32, which holds it exactly; softmax in half precision is not worth comparing."""
    if x.is_meta:
        raise ValueError("a weight is on the meta device (offloaded or not loaded); load the model with its weights.")
    if not x.is_floating_point():
        raise ValueError(f"a weight has dtype {x.dtype} (quantised?), expected a floating dtype; load it unquantised.")
    x = x.detach()
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _linear(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight (out, in) and bias of a projection: Linear, GPT-2's Conv1D (in, out), or a fused MultiheadAttention."""
    if isinstance(module, nn.MultiheadAttention):
        if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
            raise ValueError("MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn is not self-attention.")
        return _float(module.in_proj_weight), None if module.in_proj_bias is None else _float(module.in_proj_bias)
    projection: Any = module
    weight = projection.weight.T if hasattr(module, "nf") else projection.weight
    bias = getattr(module, "bias", None)
    return _float(weight), None if bias is None else _float(bias)


def _projections(block: Block) -> dict[str, tuple[Tensor, Tensor | None]]:
    """q, k, v as weights (heads, k, d) and biases (heads, k), grouped keys and values repeated for their queries."""
    arch, heads = block.architecture, block.heads
    if arch.fused:
        weight, bias = _linear(block[arch.q])
        weights = rearrange(weight, f"{arch.fused} d -> c h k d", c=3, h=heads)
        biases = [None] * 3 if bias is None else rearrange(bias, f"{arch.fused} -> c h k", c=3, h=heads)
        read = dict(zip("qkv", zip(weights, biases)))
    else:
        flat = {name: _linear(block[getattr(arch, name)]) for name in "qkv"}
        k = flat["q"][0].shape[0] // heads
        read = {}
        for name, (weight, bias) in flat.items():
            weight = rearrange(weight, "(h k) d -> h k d", k=k)
            bias = None if bias is None else rearrange(bias, "(h k) -> h k", k=k)
            group = heads // weight.shape[0]
            read[name] = (
                weight.repeat_interleave(group, 0),
                None if bias is None else bias.repeat_interleave(group, 0),
            )
    for name, path in (("q", arch.q_bias), ("v", arch.v_bias)):
        if path:
            bias = rearrange(_float(block.module.get_parameter(path)), "(h k) -> h k", h=heads)
            read[name] = (read[name][0], bias if read[name][1] is None else read[name][1] + bias)
    return read


def attention(block: Block, fold: bool = False) -> Attention:
    """The Attention of one block; folded, it acts on normalised tokens before gain and bias."""
    read = _projections(block)
    (Q, b), (K, _), (V, c) = read["q"], read["k"], read["v"]
    W, o = _linear(block[block.architecture.o])
    O = rearrange(W, "d (h v) -> h d v", h=block.heads)
    drift = torch.zeros_like(W[:, 0])
    if c is not None:
        drift = drift + torch.einsum("hdv,hv->d", O, c)
    if o is not None:
        drift = drift + o
    if block.architecture.layer_scale:
        scale = _float(next(block[block.architecture.layer_scale].parameters()))
        O, drift = scale[:, None] * O, scale * drift
    read_weights = Attention(
        Q, K, V, O, beta=block.beta(Q.shape[-2]), query_bias=b, value_bias=drift, causal=block.causal
    )
    before = block.norm_in if fold else None
    return read_weights if before is None else folded(read_weights, norm(before))


def folded(attention: Attention, norm: Norm) -> Attention:
    """Gain g and bias c absorbed: Q(gu + c) + b = (Q diag g) u + (Qc + b), and Kc cancels in the softmax."""
    d = attention.dim
    eye = torch.eye(d, dtype=attention.Q.dtype, device=attention.Q.device).expand(attention.heads, d, d)
    Q, K, V = ((eye if w is None else w) * norm.gain for w in (attention.Q, attention.K, attention.V))
    if norm.bias is None:
        return replace(attention, Q=Q, K=K, V=V)
    b = attention.Q @ norm.bias
    drift = (attention.values @ norm.bias).sum(0)
    return replace(
        attention,
        Q=Q,
        K=K,
        V=V,
        query_bias=b if attention.query_bias is None else attention.query_bias + b,
        value_bias=drift if attention.value_bias is None else attention.value_bias + drift,
    )


def attentions(model: nn.Module, fold: bool = False) -> list[Attention]:
    """One Attention per layer, in the order they fire, from the live weights of any known encoder.

    They act on what the layer's own attention sees: the residual stream after the last norm (post-norm models), or
    the block's normalised input (pre-norm). `fold=True` absorbs that norm's gain and bias: tokens are then
    x -> (x - mean)/std, on the sphere of radius sqrt(d) (see `geometries`). Positions, the feed-forward part and
    whatever else a function of token contents leaves out is listed by `encoder_facts`, and measured by `self_check`.
    """
    return [attention(block, fold) for block in blocks(model)]


def norms(model: nn.Module) -> list[Norm | None]:
    """The norm that feeds each layer's attention, None where nothing normalises (ALBERT's first layer, ...)."""
    return [None if (module := block.norm_in) is None else norm(module) for block in blocks(model)]


def geometries(model: nn.Module, fold: bool = False) -> list[Geometry]:
    """Where each layer's tokens live: the ellipsoid of its norm, folded the sphere of radius sqrt(d), else R^d."""
    found: list[Geometry] = []
    for read in norms(model):
        if read is None:
            found.append(Euclidean())
        elif fold:
            found.append(Sphere(read.gain.shape[0] ** 0.5))
        else:
            found.append(Ellipsoid.from_layer_norm(read.gain, read.bias, centred=read.centred))
    return found


def encoder_facts(model: nn.Module) -> dict[str, Any]:
    """What the encoder is, and what its Attentions leave out, as a JSON-able dict."""
    found = blocks(model)
    first, attention_0 = found[0], attention(found[0])
    omits = [f"{block.positions} (layer {block.index})" for block in found if block.positions]
    if len({block.positions for block in found}) == 1 and omits:
        omits = [first.positions]
    omits.append("feed-forward part" + (", in parallel with attention" if first.norm_placement == "parallel" else ""))
    if first.architecture.after_norm[0] and has(first.root, first.architecture.after_norm[0]):
        omits.append("convolution after layer 0")
    return {
        "architecture": first.architecture.name,
        "model": type(model).__name__,
        "layers": len(found),
        "shared": first.architecture.shared,
        "heads": attention_0.heads,
        "head_dim": attention_0.Q.shape[-2],
        "dim": attention_0.dim,
        "beta": [block.beta(attention_0.Q.shape[-2]) for block in found],
        "norm": first.norm_placement,
        "causal": first.causal,
        "layer_scale": "absorbed in O" if first.architecture.layer_scale else "none",
        "omits": omits,
    }


@dataclass(frozen=True)
class Check:
    """One layer's comparison: |A(z) from the read weights - A(z) computed| / |A(z)|, and what explains it."""

    layer: int
    error: float
    tolerance: float
    omits: str

    @property
    def exact(self) -> bool:
        return self.error <= self.tolerance


def self_check(model: nn.Module, inputs: Mapping[str, Tensor], tolerance: float | None = None) -> list[Check]:
    """Compares every layer's Attention with what the layer computes on `inputs` (as the model takes them).

    The error is relative, in the Frobenius norm over tokens, padding left out. Where positions enter the scores the
    content-only Attention cannot agree, and the Check says by name what is left out. Elsewhere it must agree to
    `tolerance` (16 ulp by default: 1.9e-6 in float32, the layer's own rounding), or this raises.
    """
    from attn_flow.hooks.attach import evaluating
    from attn_flow.hooks.capture import recording

    with recording(model, points=("attn_in", "attn_out")) as tape, evaluating(model):
        model(**inputs)
    mask = tape.mask
    found = []
    for block in blocks(model):
        z, out = (tape.state((kind, block.index)) for kind in ("attn_in", "attn_out"))
        allowed = 16 * torch.finfo(z.dtype).eps if tolerance is None else tolerance
        # In float64, so that what remains is the layer's own rounding.
        read = attention(block).to(torch.float64).drift(z.double(), mask=mask.to(z.device))
        error = float((read - out)[mask].norm() / out[mask].norm())
        found.append(Check(block.index, error, allowed, block.positions))
    wrong = [c for c in found if not c.exact and not c.omits]
    if wrong:
        worst = max(wrong, key=lambda c: c.error)
        raise ValueError(
            f"layer {worst.layer} of {type(model).__name__}: its attention differs from the weights read by "
            f"{worst.error:.1e} (expected {worst.tolerance:.0e}). The architecture "
            f"{blocks(model)[0].architecture.name!r} does not fit this model; register one of its own."
        )
    return found
