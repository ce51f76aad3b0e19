"""The weights of a live encoder as `Attention` objects, with the norm and the geometry of every layer.

With z = x, or z = norm(x) in a pre-norm block, a layer adds

    A(z)_i = sum_h O_h sum_j softmax_j(beta <Q_h z_i + b_h, K_h z_j>) (V_h z_j + c_h) + o,

which is Attention(Q, K, V, O, beta, b, value_bias = sum_h O_h c_h + o). A bias of the keys cancels in the softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from attn_flow.attention import Attention
from attn_flow.geometry import Ellipsoid, Euclidean, Geometry
from attn_flow.hooks.architectures import has
from attn_flow.hooks.layout import Block, blocks, evaluation_mode


class UnreadableWeightsError(ValueError):
    """Weights that are not floating-point numbers in memory: quantised, or on the meta device."""


@dataclass(frozen=True)
class Norm:
    """A LayerNorm gain * (x - mean) / sqrt(var + eps) + bias, or an RMSNorm gain * x / sqrt(mean x^2 + eps).

    Args:
        gain, bias: (d,); no bias is None.
        eps: the small number under the root.
        centred: True for LayerNorm, False for RMSNorm.

    Example:
        >>> Norm(torch.ones(2), None, eps=0.0, centred=True)(torch.tensor([1.0, 3.0]))
        tensor([-1.,  1.])
    """

    gain: Tensor
    bias: Tensor | None
    eps: float
    centred: bool

    def __call__(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        z = self.gain * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return z if self.bias is None else z + self.bias


def read_norm(module: nn.Module) -> Norm:
    """The Norm of a LayerNorm or RMSNorm of any make; ValueError if the module computes something else."""
    gain = getattr(module, "weight", None)
    eps = next((getattr(module, n) for n in ("eps", "variance_epsilon") if getattr(module, n, None) is not None), None)
    name = type(module).__name__
    if not isinstance(gain, Tensor) or gain.ndim != 1 or eps is None:
        raise ValueError(f"{name} has no gain `weight` of shape (d,) and no `eps`; expected a LayerNorm or RMSNorm.")
    bias = getattr(module, "bias", None)
    norm = Norm(_float(gain), None if bias is None else _float(bias), float(eps), centred=hasattr(module, "bias"))
    x = torch.linspace(-1, 2, gain.shape[0], dtype=gain.dtype, device=gain.device)
    with torch.no_grad():
        output, expected = _float(module(x)), norm(_float(x))
    rounding = max(torch.finfo(dtype).eps for dtype in (gain.dtype, torch.float32))  # many norms work in float32
    if float((output - expected).abs().max()) > 16 * rounding * float(1 + expected.abs().max()):
        raise ValueError(f"{name} does not compute gain * normalised + bias; expected a LayerNorm or RMSNorm.")
    return norm


def _float(x: Any) -> Tensor:
    """A weight without gradient; half precision as float32, which holds it exactly."""
    if not isinstance(x, Tensor):  # torch.ao's quantised Linear has a method `weight`
        raise UnreadableWeightsError("a weight is quantised; load the model unquantised to read its weights.")
    if x.is_meta:
        raise UnreadableWeightsError("a weight is on the meta device (offloaded or not loaded); load it with weights.")
    if not x.is_floating_point():
        raise UnreadableWeightsError(f"a weight has dtype {x.dtype} (quantised?); load the model unquantised.")
    x = x.detach()
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _linear(block: Block, path: str) -> tuple[Tensor, Tensor | None]:
    """Weight (out, in) and bias of a projection: a Linear, GPT-2's Conv1D, or torch's MultiheadAttention.

    Parametrised weights are read as they are used and LoRA adapters are merged. A module that computes something else
    is refused.
    """
    module: Any = block[path]
    if isinstance(module, nn.MultiheadAttention):
        if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
            raise ValueError("MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn is not self-attention.")
        return _float(module.in_proj_weight), None if module.in_proj_bias is None else _float(module.in_proj_bias)
    base = getattr(module, "base_layer", module)
    weight = _float(base.weight.T if hasattr(base, "nf") else base.weight)  # Conv1D is (in, out)
    bias = None if getattr(base, "bias", None) is None else _float(base.bias)
    if base is not module and not getattr(module, "merged", False) and not getattr(module, "disable_adapters", False):
        weight = weight + _lora_product(module)
    if type(module).forward is not nn.Linear.forward:
        _check_projection(block, path, weight, bias, base.weight.dtype)
    return weight, bias


def _check_projection(block: Block, path: str, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
    """ValueError unless a module computes weight @ x + bias, up to rounding."""
    module = block[path]
    x = torch.linspace(-1, 2, weight.shape[1], dtype=dtype, device=weight.device)
    with evaluation_mode(module):
        output = type(module).forward(module, x[None])[0].double()  # without hooks, which are not weights
    expected, largest = weight.double() @ x.double(), weight.double().abs() @ x.double().abs()
    if bias is not None:
        expected, largest = expected + bias.double(), largest + bias.double().abs()
    # A sum of k terms is wrong by at most k rounding errors of the sum of their sizes.
    if bool(((output - expected).abs() > (len(x) + 2) * relative_rounding(x) * largest).any()):
        error = float((output - expected).norm() / output.norm())
        raise ValueError(
            f"{block.path}.{path} is a {type(module).__name__} that computes something else than its weight and bias "
            f"(error {error:.1e}): an adapter? Merge it into the weights first (peft: model.merge_and_unload())."
        )


def _lora_product(module: Any) -> Tensor | float:
    """The sum of scaling * B A over the active adapters of a LoRA layer, (out, in)."""
    A, B = getattr(module, "lora_A", {}), getattr(module, "lora_B", {})
    scaling, active = getattr(module, "scaling", {}), getattr(module, "active_adapters", list(A))
    return sum(scaling.get(name, 1.0) * _float(B[name].weight) @ _float(A[name].weight) for name in active if name in A)


def relative_rounding(x: Tensor) -> float:
    """The relative rounding error of products of such a tensor, with TensorFloat-32 where torch may use it."""
    is_tf32 = x.is_cuda and x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return 2.0**-10 if is_tf32 else torch.finfo(x.dtype).eps


def projections(block: Block) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Weights (heads, k, d) and biases (heads, k) of "q", "k" and "v"; grouped keys are repeated for their queries."""
    arch, heads = block.architecture, block.heads
    weights: dict[str, tuple[Tensor, Tensor | None]] = {}
    if arch.fused:
        weight, bias = _linear(block, arch.q)
        split = rearrange(weight, f"{arch.fused} d -> c h k d", c=3, h=heads)
        split_bias = [None] * 3 if bias is None else rearrange(bias, f"{arch.fused} -> c h k", c=3, h=heads)
        weights = dict(zip("qkv", zip(split, split_bias)))
    else:
        k = block.head_dim
        for name in "qkv":
            weight, bias = _linear(block, getattr(arch, name))
            group = heads // (weight.shape[0] // k)
            weight = rearrange(weight, "(h k) d -> h k d", k=k).repeat_interleave(group, 0)
            bias = None if bias is None else rearrange(bias, "(h k) -> h k", k=k).repeat_interleave(group, 0)
            weights[name] = (weight, bias)
    for name, path in (("q", arch.q_bias), ("v", arch.v_bias)):
        if path:
            weight, bias = weights[name]
            extra = rearrange(_float(block.module.get_parameter(path)), "(h k) -> h k", h=heads)
            weights[name] = (weight, extra if bias is None else bias + extra)
    return weights


def read_attention(block: Block) -> Attention:
    """The Attention of one block; see `attentions`."""
    weights = projections(block)
    (Q, b), (K, _), (V, c) = weights["q"], weights["k"], weights["v"]
    W, o = _linear(block, block.architecture.o)
    O = rearrange(W, "d (h v) -> h d v", h=block.heads)
    value_bias = torch.zeros_like(W[:, 0])
    if c is not None:
        value_bias = value_bias + torch.einsum("hdv,hv->d", O, c)
    if o is not None:
        value_bias = value_bias + o
    if block.architecture.layer_scale:
        scale = _float(next(block[block.architecture.layer_scale].parameters()))
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


def norms(model: nn.Module) -> list[Norm | None]:
    """The norm that feeds the attention of each layer.

    Args:
        model: a known encoder, or something that holds one.

    Returns:
        A Norm per layer; None where nothing normalises (ALBERT's first layer).

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> [norm.gain.shape[0] for norm in norms(tiny_bert()[0])]
        [16, 16]
    """
    modules = [block.norm_in for block in blocks(model)]
    return [None if module is None else read_norm(module) for module in modules]


def geometries(model: nn.Module) -> list[Geometry]:
    """The set that the tokens of each layer live on.

    Args:
        model: a known encoder, or something that holds one.

    Returns:
        A geometry per layer: the ellipsoid of its norm, and flat space where nothing normalises.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> [type(geometry).__name__ for geometry in geometries(tiny_bert()[0])]
        ['Ellipsoid', 'Ellipsoid']
    """
    return [
        Euclidean() if norm is None else Ellipsoid.from_layer_norm(norm.gain, norm.bias, centred=norm.centred)
        for norm in norms(model)
    ]


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
        "dim": _token_width(first),
        "beta": [block.beta for block in layers],
        "norm": first.norm_placement,
        "causal": first.causal,
        "layer_scale": "absorbed in O" if first.architecture.layer_scale else "none",
        "omits": omits,
    }


def _token_width(block: Block) -> int:
    """d, from a norm of the block, which is never quantised, or from the block itself."""
    gain = getattr(block[block.architecture.norm2], "weight", None)
    return gain.shape[0] if isinstance(gain, Tensor) else read_attention(block).dim
