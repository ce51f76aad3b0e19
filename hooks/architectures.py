"""The table of encoder layouts: where the blocks are, and where in a block its projections and norms are.

A layout is recognised by the submodule paths that exist, never by class names or versions, so that one table serves
transformers 4 and 5 and plain torch. `register(Architecture(...))` adds one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Architecture:
    """One layout of encoders.

    Paths are relative to the block, but `blocks`, `embed_norm`, `unless` and `after_norm` to the encoder. A value that
    depends on the options of a model may be a function of the `Block`.

    Args:
        name: for people.
        blocks: path of the list of blocks, or a function of the encoder that lists (path, block) in running order.
        attn: the attention module; it is called with the tokens, which a pre-norm block has normalised.
        qkv: the projections, as "attn.{q,k,v}", or one module for all three with `fused`.
        o: the output projection.
        norm1, norm2: the norms of attention and of the feed-forward part.
        ffn: the last module of the feed-forward part before its residual sum.
        norm_placement: "post" is norm(x + A x), "pre" x + A norm(x), "parallel" x + A norm(x) + FFN norm'(x).

    Other arguments:
        fused: order of the rows of a fused projection: "(c h k)" or "(h c k)" with c: query, key or value, h: head.
        emit: the last module of attention before its residual sum, if that is not `attn` itself.
        q_bias, v_bias: parameters that are added to fused queries and values.
        also_query: further projections of queries, which a change of beta scales too, where there are any.
        layer_scale: the module that scales what attention adds.
        embed_norm, unless: the norm that feeds the first block, unless the encoder has the second module.
        after_norm: the norm of a module between the blocks 0 and 1.
        beta: the inverse temperature, if it is not the `scaling` of the attention module or 1/sqrt(head_dim).
        positions: how positions enter the scores, in words; empty if they do not.
        angles, score_table: functions of the Block and n: cos and sin (n, r) of rotary positions; a bias (heads, n, n).
        score_terms: function of the Block, queries and keys (heads, n, k) that gives terms of both.
        causal: whether a token attends only to itself and earlier ones.
        refuse: submodules or attributes that make a model another architecture.

    Example:
        >>> Architecture(
        ...     name="mine", blocks="encoder.layers", attn="att", qkv="att.{q,k,v}", o="att.out",
        ...     norm1="norm_a", norm2="norm_b", ffn="ffn", norm_placement="post",
        ... ).k
        'att.k'
    """

    name: str
    blocks: str | Callable[[nn.Module], list[tuple[str, nn.Module]]]
    attn: str
    qkv: str
    o: str
    norm1: str
    norm2: str
    ffn: str = "mlp"
    norm_placement: str | Callable[[Any], str] = "pre"
    fused: str = ""
    emit: str = ""
    q_bias: str = ""
    v_bias: str = ""
    also_query: tuple[str, ...] = ()
    layer_scale: str = ""
    embed_norm: str = ""
    unless: str = ""
    after_norm: str = ""
    beta: float | Callable[[Any], float] | None = None
    positions: str | Callable[[Any], str] = ""
    angles: Callable[[Any, int], tuple[Tensor, Tensor]] | None = None
    score_table: Callable[[Any, int], Tensor] | None = None
    score_terms: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    causal: bool | Callable[[Any], bool] = False
    refuse: tuple[str, ...] = ()

    # Paths of the projections of queries, keys and values.
    q = property(lambda self: self._projection(0))
    k = property(lambda self: self._projection(1))
    v = property(lambda self: self._projection(2))

    def _projection(self, index: int) -> str:
        prefix, brace, rest = self.qkv.partition("{")
        names, _, suffix = rest.partition("}")
        return prefix + names.split(",")[index] + suffix if brace else self.qkv


def _albert_blocks(root: Any) -> list[tuple[str, nn.Module]]:
    """ALBERT runs L layers through a few groups of blocks: layer i uses group floor(i groups / L)."""
    groups = getattr(getattr(root, "encoder", None), "albert_layer_groups", None)
    if groups is None:
        return []
    depth = root.config.num_hidden_layers
    chosen = [int(i / (depth / len(groups))) for i in range(depth)]
    return [
        (f"encoder.albert_layer_groups.{g}.albert_layers.{j}", m)
        for g in chosen
        for j, m in enumerate(groups[g].albert_layers)
    ]


# The functions below take a `Block`. They have names, since a wrapped model is pickled with its architecture.


def _deberta_terms_count(block: Any) -> int:
    return 1 + sum(term in block.core.pos_att_type for term in ("c2p", "p2c"))


def _deberta_beta(block: Any) -> float:
    """DeBERTa divides the sum of its score terms by one common scale, a root in float32 whatever the dtype."""
    return 1 / float(torch.tensor(float(block.head_dim * _deberta_terms_count(block))).sqrt())


def _rotary_positions(block: Any) -> str:
    return "rotary positions (RoPE)" + ("" if block.window is None else f", window of {block.window} tokens each way")


def _rotary_angles(block: Any, n: int) -> tuple[Tensor, Tensor]:
    """cos and sin (n, r) of RoPE, from the module that makes them for all layers, or for this one."""
    rotate = getattr(sys.modules[type(block.core).__module__], "rotate_half", None)
    if rotate is not None and rotate(torch.arange(4.0)).tolist() != [-2.0, -3.0, 0.0, 1.0]:
        raise ValueError(
            f"{type(block.root).__name__} rotates pairs of neighbouring coordinates; positions are read of models that "
            "rotate the pairs (l, l + r/2). Register an architecture without angles for it."
        )
    rotary = block.root.rotary_emb if hasattr(block.root, "rotary_emb") else block.core.rotary_emb
    like = next(p for p in block.module.parameters() if p.is_floating_point())
    has_types = "layer_type" in inspect.signature(rotary.forward).parameters
    options = {"layer_type": block.root.config.layer_types[block.index]} if has_types else {}
    cos, sin = rotary(like.new_zeros(1, n, 1), position_ids=torch.arange(n, device=like.device)[None], **options)
    return cos[0], sin[0]


def _deberta_terms(block: Any, q: Tensor, k: Tensor) -> Tensor:
    core, encoder, terms = block.core, block.root.encoder, 1 + len(block.core.pos_att_type)
    far, vectors = encoder.get_rel_pos(q), encoder.get_rel_embedding()
    return core.disentangled_att_bias(_deberta_beta(block) * q[None], k[None], far, vectors, terms)[0]


def _deberta_v2_terms(block: Any, q: Tensor, k: Tensor) -> Tensor:
    encoder, terms = block.root.encoder, _deberta_terms_count(block)
    return block.core.disentangled_attention_bias(q, k, encoder.get_rel_pos(q), encoder.get_rel_embedding(), terms)


def _mpnet_table(block: Any, n: int) -> Tensor:
    return block.root.encoder.compute_position_bias(next(block.root.parameters()).new_zeros(1, n, 1))[0]


def _deberta_positions(block: Any) -> str:
    return "disentangled relative positions" if block.core.relative_attention else ""


def _t5_table(block: Any, n: int) -> Tensor:
    """The bias of the block itself (UMT5) or of the first one (T5)."""
    owners = (m for m in (block.core, *block.root.modules()) if getattr(m, "has_relative_attention_bias", False))
    return next(owners).compute_bias(n, n)[0]


def _is_causal(block: Any) -> bool:
    """Some encoders have the layout of a decoder, such as EuroBERT that of Llama, and any config may say so."""
    return getattr(block.core, "is_causal", True) and getattr(getattr(block.root, "config", None), "is_causal", True)


def _is_decoder(block: Any) -> bool:
    return getattr(getattr(block.root, "config", None), "is_decoder", False)


def _is_clip_text(block: Any) -> bool:
    """The texts of CLIP, not those of SigLIP, whose file uses no causal mask."""
    is_text = "text" in getattr(getattr(block.attn, "config", None), "model_type", "")
    return is_text and any("causal" in name for name in vars(sys.modules[type(block.core).__module__]))


def _gpt2_placement(block: Any) -> str:
    """The first GPT is post-norm, and so has no norm after its last block."""
    return "pre" if hasattr(block.root, "ln_f") else "post"


def _norm_placement(block: Any) -> str:
    if getattr(block.module, "use_parallel_residual", False):
        return "parallel"
    return "pre" if getattr(block.module, "norm_first", True) else "post"


_BERT = Architecture(
    name="BERT",
    blocks="encoder.layer",
    attn="attention.self",
    qkv="attention.self.{query,key,value}",
    o="attention.output.dense",
    emit="attention.output.dense",
    norm1="attention.output.LayerNorm",
    norm2="output.LayerNorm",
    ffn="output.dense",
    norm_placement="post",
    embed_norm="embeddings.LayerNorm",
    unless="embeddings_project",
    causal=_is_decoder,
)
_VIT = Architecture(
    name="ViT",
    blocks="layers",
    attn="attention",
    qkv="attention.{q_proj,k_proj,v_proj}",
    o="attention.o_proj",
    norm1="layernorm_before",
    norm2="layernorm_after",
)
_VIT4 = replace(
    _VIT,
    blocks="encoder.layer",
    qkv="attention.attention.{query,key,value}",
    o="attention.output.dense",
    ffn="output.dense",
)
_DINO = replace(
    _VIT,
    name="DINOv2",
    blocks="encoder.layer",
    norm1="norm1",
    norm2="norm2",
    emit="layer_scale1",
    ffn="layer_scale2",
    layer_scale="layer_scale1",
)

_NEOX = Architecture(
    name="GPT-NeoX",
    blocks="layers",
    attn="attention",
    qkv="attention.query_key_value",
    o="attention.dense",
    fused="(h c k)",
    norm1="input_layernorm",
    norm2="post_attention_layernorm",
    norm_placement=_norm_placement,
    positions=_rotary_positions,
    angles=_rotary_angles,
    causal=_is_causal,
)
_T5 = Architecture(
    name="T5 encoder",
    blocks="encoder.block",
    attn="layer.0.SelfAttention",
    qkv="layer.0.SelfAttention.{q,k,v}",
    o="layer.0.SelfAttention.o",
    norm1="layer.0.layer_norm",
    norm2="layer.1.layer_norm",
    ffn="layer.1.DenseReluDense",
    beta=1.0,
    positions="relative position bias, not scaled by beta",
    score_table=_t5_table,
)

ARCHITECTURES: list[Architecture] = [
    _BERT,
    Architecture(
        name="DistilBERT",
        blocks="transformer.layer",
        attn="attention",
        qkv="attention.{q_lin,k_lin,v_lin}",
        o="attention.out_lin",
        norm1="sa_layer_norm",
        norm2="output_layer_norm",
        ffn="ffn",
        norm_placement="post",
        embed_norm="embeddings.LayerNorm",
    ),
    Architecture(
        name="ALBERT",
        blocks=_albert_blocks,
        attn="attention",
        qkv="attention.{query,key,value}",
        o="attention.dense",
        emit="attention.dense",
        norm1="attention.LayerNorm",
        norm2="full_layer_layer_norm",
        ffn="ffn_output",
        norm_placement="post",
    ),
    replace(
        _BERT,
        name="DeBERTa",
        qkv="attention.self.in_proj",
        fused="(h c k)",
        q_bias="attention.self.q_bias",
        v_bias="attention.self.v_bias",
        also_query=("attention.self.pos_q_proj",),
        beta=_deberta_beta,
        positions=_deberta_positions,
        score_terms=_deberta_terms,
        refuse=("attention.self.head_logits_proj",),
    ),
    replace(
        _BERT,
        name="DeBERTa-v2",
        qkv="attention.self.{query_proj,key_proj,value_proj}",
        also_query=("attention.self.pos_query_proj",),
        beta=_deberta_beta,
        positions=_deberta_positions,
        score_terms=_deberta_v2_terms,
        after_norm="encoder.conv.LayerNorm",
    ),
    replace(
        _BERT,
        name="MPNet",
        attn="attention.attn",
        qkv="attention.attn.{q,k,v}",
        o="attention.attn.o",
        emit="",
        norm1="attention.LayerNorm",
        positions="relative position bias, not scaled by beta",
        score_table=_mpnet_table,
    ),
    Architecture(
        name="ModernBERT",
        blocks="layers",
        attn="attn",
        qkv="attn.Wqkv",
        o="attn.Wo",
        fused="(c h k)",
        norm1="attn_norm",
        norm2="mlp_norm",
        embed_norm="embeddings.norm",
        positions=_rotary_positions,
        angles=_rotary_angles,
    ),
    _VIT,
    _VIT4,
    _DINO,
    replace(_DINO, qkv=_VIT4.qkv, o=_VIT4.o),
    Architecture(
        name="CLIP",
        blocks="encoder.layers",
        attn="self_attn",
        qkv="self_attn.{q_proj,k_proj,v_proj}",
        o="self_attn.out_proj",
        norm1="layer_norm1",
        norm2="layer_norm2",
        causal=_is_clip_text,
    ),
    Architecture(
        name="GPT-2",
        blocks="h",
        attn="attn",
        qkv="attn.c_attn",
        o="attn.c_proj",
        fused="(c h k)",
        norm1="ln_1",
        norm2="ln_2",
        norm_placement=_gpt2_placement,
        causal=_is_causal,
        refuse=("attn.multi_query",),
    ),
    _NEOX,
    replace(
        _NEOX,
        name="Llama",
        attn="self_attn",
        qkv="self_attn.{q_proj,k_proj,v_proj}",
        o="self_attn.o_proj",
        fused="",
        norm_placement="pre",
        refuse=("self_attn.q_norm", "self_attn.query_layernorm", "pre_feedforward_layernorm"),
    ),
    _T5,
    replace(_T5, blocks="block"),  # the encoder inside a T5 model with a decoder
    Architecture(
        name="torch.nn.TransformerEncoder",
        blocks="layers",
        attn="self_attn",
        qkv="self_attn",
        o="self_attn.out_proj",
        fused="(c h k)",
        norm1="norm1",
        norm2="norm2",
        ffn="linear2",
        norm_placement=_norm_placement,
    ),
]


def register(architecture: Architecture) -> None:
    """Add a layout, which is tried before those already known.

    Args:
        architecture: its paths. `self_check` tells whether it fits a model.

    Example:
        >>> from dataclasses import replace
        >>> register(replace(ARCHITECTURES[0], name="my BERT", blocks="trunk.layer"))
        >>> ARCHITECTURES.pop(0).name
        'my BERT'
    """
    ARCHITECTURES.insert(0, architecture)
