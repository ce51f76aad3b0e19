"""The weights of a live encoder as the core's nouns: one Attention per layer, its geometry, and a check of both.

A layer adds A(z), z = x or norm(x), A(z)_i = sum_h O_h sum_j softmax_j(beta <Q z_i + b, K z_j>) (V z_j + c_h) + o:
Attention(Q, K, V, O, beta, b, value_bias = sum_h O_h c_h + o). A key bias is constant in j: softmax cancels it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from attn_flow.attention import Attention
from attn_flow.base import checks
from attn_flow.geometry import Ellipsoid, Euclidean, Geometry, Sphere
from attn_flow.hooks.architectures import has
from attn_flow.hooks.attach import evaluating
from attn_flow.hooks.layout import Block, blocks
from attn_flow.nn.stack import DeepStack


@dataclass(frozen=True)
class Norm:
    """z = gain * (x - mean) / sqrt(var + eps) + bias; without `centred`, RMSNorm: gain * x / sqrt(mean x^2 + eps).

    gain, bias: (d,), bias None if there is none. Called with x (..., d) it is the norm; `unit(x)` is x before gain and
    bias.

    Example:
        >>> Norm(torch.ones(2), None, eps=0.0, centred=True)(torch.tensor([1.0, 3.0]))
        tensor([-1.,  1.])
    """

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


def _linear(block: Block, path: str) -> tuple[Tensor, Tensor | None]:
    """Weight (out, in) and bias of a projection: Linear, GPT-2's Conv1D (in, out), or a fused MultiheadAttention.

    Parametrised weights are read as they are used, adapters (LoRA) merged; what computes something else is refused.
    """
    module: Any = block[path]
    if isinstance(module, nn.MultiheadAttention):
        if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
            raise ValueError("MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn is not self-attention.")
        return _float(module.in_proj_weight), None if module.in_proj_bias is None else _float(module.in_proj_bias)
    plain = getattr(module, "base_layer", module)
    weight = _float(plain.weight.T if hasattr(plain, "nf") else plain.weight)
    bias = None if getattr(plain, "bias", None) is None else _float(plain.bias)
    if plain is not module and not getattr(module, "merged", False) and not getattr(module, "disable_adapters", False):
        weight = weight + _low_rank(module)
    if type(module).forward is nn.Linear.forward:
        return weight, bias
    x = torch.linspace(-1, 2, weight.shape[1], dtype=plain.weight.dtype, device=weight.device)
    with evaluating(module):
        got = type(module).forward(module, x[None])[0].double()  # past hooks and replacements, which are not weights
    at_most = weight.double().abs() @ x.double().abs()
    expected = weight.double() @ x.double()
    if bias is not None:
        at_most, expected = at_most + bias.double().abs(), expected + bias.double()
    # A sum of k terms is off by at most k ulp of the sum of their sizes.
    excess = (got - expected).abs() - (len(x) + 2) * precision(x) * at_most
    if float(excess.max()) > 0:
        off = float((got - expected).norm() / got.norm())
        raise ValueError(
            f"{block.path}.{path} is a {type(module).__name__} that computes something else than its weight and bias "
            f"(off by {off:.1e}): an adapter? Merge it into the weights first (peft: model.merge_and_unload())."
        )
    return weight, bias


def _low_rank(module: Any) -> Tensor | float:
    """sum_a s_a B_a A_a over the active adapters of a LoRA layer, (out, in)."""
    down, up = (getattr(module, name, {}) for name in ("lora_A", "lora_B"))
    scaling, active = getattr(module, "scaling", {}), getattr(module, "active_adapters", list(down))
    products = [scaling.get(a, 1.0) * _float(up[a].weight) @ _float(down[a].weight) for a in active if a in down]
    return sum(products)


def precision(x: Tensor) -> float:
    """The relative rounding of products of such a tensor: its ulp, or TensorFloat-32's where torch may use it."""
    eps = torch.finfo(x.dtype).eps
    tf32 = x.is_cuda and x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return 2.0**-10 if tf32 else eps


def projections(block: Block) -> dict[str, tuple[Tensor, Tensor | None]]:
    """q, k, v as weights (heads, k, d) and biases (heads, k), grouped keys and values repeated for their queries."""
    arch, heads = block.architecture, block.heads
    if arch.fused:
        weight, bias = _linear(block, arch.q)
        weights = rearrange(weight, f"{arch.fused} d -> c h k d", c=3, h=heads)
        biases = [None] * 3 if bias is None else rearrange(bias, f"{arch.fused} -> c h k", c=3, h=heads)
        read = dict(zip("qkv", zip(weights, biases)))
    else:
        flat = {name: _linear(block, getattr(arch, name)) for name in "qkv"}
        k = flat["q"][0].shape[0] // heads
        read = {}
        for name, (weight, bias) in flat.items():
            weight = rearrange(weight, "(h k) d -> h k d", k=k)
            bias = None if bias is None else rearrange(bias, "(h k) -> h k", k=k)
            group = heads // weight.shape[0]
            if group > 1:
                weight = weight.repeat_interleave(group, 0)
                bias = None if bias is None else bias.repeat_interleave(group, 0)
            read[name] = (weight, bias)
    for name, path in (("q", arch.q_bias), ("v", arch.v_bias)):
        if path:
            bias = rearrange(_float(block.module.get_parameter(path)), "(h k) -> h k", h=heads)
            read[name] = (read[name][0], bias if read[name][1] is None else read[name][1] + bias)
    return read


def attention(block: Block, fold: bool = False) -> Attention:
    """The Attention of one block; folded, it acts on normalised tokens before gain and bias."""
    read = projections(block)
    (Q, b), (K, _), (V, c) = read["q"], read["k"], read["v"]
    W, o = _linear(block, block.architecture.o)
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

    model: a known encoder, or what holds one, or a DeepStack; adapters (LoRA) are merged into what is read. fold:
    absorb the norm. Returns a list of Attention, float32 or float64.

    They act on what the layer's own attention sees: the residual stream after the last norm (post-norm models), or
    the block's normalised input (pre-norm). `fold=True` absorbs that norm's gain and bias: tokens are then
    x -> (x - mean)/std, on the sphere of radius sqrt(d) (see `geometries`). Positions, the feed-forward part and
    whatever else a function of token contents leaves out is listed by `encoder_facts`, and measured by `self_check`.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> attentions(tiny_bert()[0])[0]
        Attention(heads=2, dim=16, k=8, v=8, beta=0.353553, softmax, float32)
    """
    if isinstance(model, DeepStack):  # nothing to fold: what it learned is what acts
        return model.attentions()
    checks.flags(fold=fold)
    return [attention(block, fold) for block in blocks(model)]


def norms(model: nn.Module) -> list[Norm | None]:
    """The norm that feeds each layer's attention.

    model: a known encoder. Returns a Norm per layer, None where nothing normalises (ALBERT's first layer, ...).

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> [norm.gain.shape[0] for norm in norms(tiny_bert()[0])]
        [16, 16]
    """
    return [None if (module := block.norm_in) is None else norm(module) for block in blocks(model)]


def geometries(model: nn.Module, fold: bool = False) -> list[Geometry]:
    """Where each layer's tokens live.

    model: a known encoder. fold: as in `attentions`. Returns a geometry per layer: the ellipsoid of its norm, folded
    the sphere of radius sqrt(d), and R^d where nothing normalises.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> [geometry.radius for geometry in geometries(tiny_bert()[0], fold=True)]
        [4.0, 4.0]
    """
    if isinstance(model, DeepStack):
        return [model.geometry] * model.depth
    checks.flags(fold=fold)
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
    """What the encoder is, and what its Attentions leave out.

    model: a known encoder. Returns plain JSON: architecture, layers, heads, dim, beta per layer, norm, causal, omits...

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> facts = encoder_facts(tiny_bert()[0])
        >>> facts["architecture"], facts["layers"], facts["heads"], facts["omits"]
        ('BERT', 2, 2, ['feed-forward part'])
    """
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
