"""One table of encoder layouts: where the blocks are, and inside a block the projections, norms and residual sums.

An architecture is matched by the existence of its submodule paths, never by class name or library version, so one
table serves transformers 4.48 to 5.x and plain torch. A new one is added by `register(Architecture(...))`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.base import checks

NormPlacement = str  # "post": norm(x + A x), "pre": x + A norm(x), "parallel": x + A norm(x) + FFN norm'(x)


@dataclass(frozen=True)
class Architecture:
    """One layout of encoders. Paths are relative to the block; `blocks`, `embed_norm` and `after_norm` to the encoder.

    attn is called with the tokens (already normalised in a pre-norm block); q, k, v, o are its projections, one fused
    module if `fused` says how its rows are ordered (c: which of q, k, v; h: head; k: head dimension). `emit` is the
    last module before the residual sum, where it is not attn itself; `ffn` is the same for the feed-forward part.
    A value that depends on the options of a model is a function of the block.

    name: for people. blocks: the path of the list of blocks, or a function of the encoder that lists (path, block) in
    the order they fire. norm1, norm2: the norms of attention and feed-forward part; norm_placement: "post", "pre" or
    "parallel". q_bias, v_bias: parameters added to fused queries and values. layer_scale: the module that scales what
    attention adds. beta: the inverse temperature, if it is not 1/sqrt(k) or the module's own `scaling`. positions: how
    positions enter the scores, in words; empty if they do not. angles: a function of encoder, block and n that gives
    cos and sin (n, r) by which queries and keys at n places are turned; score_table: one of encoder and n that gives
    what places add to the scores, (heads, n, n); score_terms: one of encoder, block, queries and keys (heads, n, k)
    that gives what contents and places together add. causal: whether a token sees only those before it.

    Example:
        >>> Architecture(
        ...     name="mine", blocks="encoder.layers", attn="att", q="att.q", k="att.k", v="att.v", o="att.out",
        ...     norm1="norm_a", norm2="norm_b", ffn="mlp", norm_placement="pre",
        ... ).positions
        ''
    """

    name: str
    blocks: str | Callable[[nn.Module], list[tuple[str, nn.Module]]]
    attn: str
    q: str
    k: str
    v: str
    o: str
    norm1: str
    norm2: str
    ffn: str
    norm_placement: NormPlacement | Callable[[nn.Module], NormPlacement]
    emit: str = ""
    fused: str = ""
    q_bias: str = ""
    v_bias: str = ""
    layer_scale: str = ""
    embed_norm: str = ""
    unless: str = ""  # embed_norm does not feed block 0 if the encoder has this module
    after_norm: tuple[str, str] = ("", "")  # a module between blocks 0 and 1, and its norm
    beta: Callable[[nn.Module, int], float] | None = None
    positions: str | Callable[[nn.Module], str] = ""
    angles: Callable[[nn.Module, nn.Module, int], tuple[Tensor, Tensor]] | None = None
    score_table: Callable[[nn.Module, int], Tensor] | None = None
    score_terms: Callable[[nn.Module, nn.Module, Tensor, Tensor], Tensor] | None = None
    causal: bool | Callable[[nn.Module], bool] = False
    also_query: tuple[str, ...] = ()  # further query projections, scaled along with q when beta changes
    shared: bool = False
    refuse: tuple[str, ...] = ()  # submodules this layout knows nothing of


def at(module: nn.Module, path: str) -> nn.Module | None:
    """The submodule at a path, or None."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def has(module: nn.Module, path: str) -> bool:
    return at(module, path) is not None


def _albert_firings(root: Any) -> list[tuple[str, nn.Module]]:
    """ALBERT fires L times through a few groups of blocks: firing i uses group floor(i groups / L)."""
    if not has(root, "encoder.albert_layer_groups"):
        return []
    groups, depth = root.encoder.albert_layer_groups, root.config.num_hidden_layers
    firings = []
    for i in range(depth):
        g = int(i / (depth / len(groups)))
        for j, block in enumerate(groups[g].albert_layers):
            firings.append((f"encoder.albert_layer_groups.{g}.albert_layers.{j}", block))
    return firings


def _deberta_beta(core: Any, k: int) -> float:
    """1/sqrt(k (1 + number of position terms)): DeBERTa divides the sum of its score terms by one common scale."""
    terms = 1 + sum(term in core.pos_att_type for term in ("c2p", "p2c"))
    return 1 / float(torch.tensor(float(k * terms)).sqrt())  # it takes the root in float32, whatever the model's dtype


def _gpt2_beta(core: Any, k: int) -> float:
    if not hasattr(core, "scaling") and core.config._attn_implementation != "eager":
        return 1 / math.sqrt(k)  # transformers 4 ignores both options outside its eager attention
    beta = 1 / math.sqrt(k) if core.scale_attn_weights else 1.0
    return beta / (core.layer_idx + 1) if core.scale_attn_by_inverse_layer_idx else beta


def _bert_positions(block: nn.Module) -> str:
    kind = getattr(block.get_submodule("attention.self"), "position_embedding_type", None) or "absolute"
    return "" if kind == "absolute" else f"relative positions ({kind})"


def _disentangled(block: nn.Module) -> str:
    core = block.get_submodule("attention.self")
    return "disentangled relative positions" if core.relative_attention else ""


def _rotary(attn: str, block: nn.Module) -> str:
    core: Any = block.get_submodule(attn)
    window = getattr(core, "sliding_window", None) or max(0, *getattr(core, "local_attention", (-1, -1)))
    return "rotary positions (RoPE)" + (f", sliding window of {window} tokens" if window else "")


def _angles(attn: str, root: nn.Module, block: nn.Module, n: int) -> tuple[Tensor, Tensor]:
    """cos and sin (n, r) of RoPE, from the module that makes them for all layers, or for this one."""
    core: Any = block.get_submodule(attn)
    rotary: Any = root.rotary_emb if hasattr(root, "rotary_emb") else core.rotary_emb
    like = next(block.parameters())
    of_layer = {}
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        of_layer["layer_type"] = block.attention_type
    cos, sin = rotary(like.new_zeros(1, n, 1), position_ids=torch.arange(n, device=like.device)[None], **of_layer)
    return cos[0], sin[0]


def _deberta_terms(root: Any, block: Any, q: Tensor, k: Tensor) -> Tensor:
    core, terms = block.attention.self, 1 + len(block.attention.self.pos_att_type)
    far, vectors = root.encoder.get_rel_pos(q), root.encoder.get_rel_embedding()
    return core.disentangled_att_bias(_deberta_beta(core, q.shape[-1]) * q[None], k[None], far, vectors, terms)[0]


def _deberta_v2_terms(root: Any, block: Any, q: Tensor, k: Tensor) -> Tensor:
    core, encoder = block.attention.self, root.encoder
    terms = 1 + sum(term in core.pos_att_type for term in ("c2p", "p2c"))
    return core.disentangled_attention_bias(q, k, encoder.get_rel_pos(q), encoder.get_rel_embedding(), terms)


def _mpnet_table(root: Any, n: int) -> Tensor:
    like = next(root.parameters())
    return root.encoder.compute_position_bias(like.new_zeros(1, n, 1))[0]


def _t5_table(root: nn.Module, n: int) -> Tensor:
    """The first layer holds it for all."""
    first: Any = next(m for m in root.modules() if getattr(m, "has_relative_attention_bias", False))
    return first.compute_bias(n, n)[0]


def _is_decoder(block: Any) -> bool:
    return bool(getattr(block, "is_decoder", False))


def _is_clip_text(block: Any) -> bool:
    return "text" in getattr(getattr(block.self_attn, "config", None), "model_type", "")


def _unscaled(core: nn.Module, k: int) -> float:
    return 1.0


# Named functions rather than lambdas: a wrapped model is pickled with its architecture.
def _neox_norm_placement(block: Any) -> NormPlacement:
    return "parallel" if block.use_parallel_residual else "pre"


def _torch_norm_placement(block: Any) -> NormPlacement:
    return "pre" if block.norm_first else "post"


_BERT = Architecture(
    name="BERT",
    blocks="encoder.layer",
    attn="attention.self",
    q="attention.self.query",
    k="attention.self.key",
    v="attention.self.value",
    o="attention.output.dense",
    emit="attention.output.dense",
    norm1="attention.output.LayerNorm",
    norm2="output.LayerNorm",
    ffn="output.dense",
    norm_placement="post",
    embed_norm="embeddings.LayerNorm",
    unless="embeddings_project",
    positions=_bert_positions,
    causal=_is_decoder,
)
_VIT = Architecture(
    name="ViT",
    blocks="layers",
    attn="attention",
    q="attention.q_proj",
    k="attention.k_proj",
    v="attention.v_proj",
    o="attention.o_proj",
    norm1="layernorm_before",
    norm2="layernorm_after",
    ffn="mlp",
    norm_placement="pre",
)
_VIT4 = replace(
    _VIT,
    blocks="encoder.layer",
    q="attention.attention.query",
    k="attention.attention.key",
    v="attention.attention.value",
    o="attention.output.dense",
    ffn="output.dense",
)
_DINO = {
    "name": "DINOv2",
    "blocks": "encoder.layer",
    "norm1": "norm1",
    "norm2": "norm2",
    "emit": "layer_scale1",
    "ffn": "layer_scale2",
    "layer_scale": "layer_scale1",
}

_T5 = Architecture(
    name="T5 encoder",
    blocks="encoder.block",
    attn="layer.0.SelfAttention",
    q="layer.0.SelfAttention.q",
    k="layer.0.SelfAttention.k",
    v="layer.0.SelfAttention.v",
    o="layer.0.SelfAttention.o",
    norm1="layer.0.layer_norm",
    norm2="layer.1.layer_norm",
    ffn="layer.1.DenseReluDense",
    norm_placement="pre",
    beta=_unscaled,
    positions="relative position bias, shared by all layers and not scaled by beta",
    score_table=_t5_table,
)

ARCHITECTURES: list[Architecture] = [
    _BERT,
    Architecture(
        name="DistilBERT",
        blocks="transformer.layer",
        attn="attention",
        q="attention.q_lin",
        k="attention.k_lin",
        v="attention.v_lin",
        o="attention.out_lin",
        norm1="sa_layer_norm",
        norm2="output_layer_norm",
        ffn="ffn",
        norm_placement="post",
        embed_norm="embeddings.LayerNorm",
    ),
    Architecture(
        name="ALBERT",
        blocks=_albert_firings,
        attn="attention",
        q="attention.query",
        k="attention.key",
        v="attention.value",
        o="attention.dense",
        emit="attention.dense",
        norm1="attention.LayerNorm",
        norm2="full_layer_layer_norm",
        ffn="ffn_output",
        norm_placement="post",
        shared=True,
    ),
    replace(
        _BERT,
        name="DeBERTa",
        q="attention.self.in_proj",
        k="attention.self.in_proj",
        v="attention.self.in_proj",
        fused="(h c k)",
        q_bias="attention.self.q_bias",
        v_bias="attention.self.v_bias",
        also_query=("attention.self.pos_q_proj",),
        beta=_deberta_beta,
        positions=_disentangled,
        score_terms=_deberta_terms,
        refuse=("attention.self.head_logits_proj",),
    ),
    replace(
        _BERT,
        name="DeBERTa-v2",
        q="attention.self.query_proj",
        k="attention.self.key_proj",
        v="attention.self.value_proj",
        also_query=("attention.self.pos_query_proj",),
        beta=_deberta_beta,
        positions=_disentangled,
        score_terms=_deberta_v2_terms,
        after_norm=("encoder.conv", "encoder.conv.LayerNorm"),
    ),
    replace(
        _BERT,
        name="MPNet",
        attn="attention.attn",
        q="attention.attn.q",
        k="attention.attn.k",
        v="attention.attn.v",
        o="attention.attn.o",
        emit="",
        norm1="attention.LayerNorm",
        positions="relative position bias, shared by all layers and not scaled by beta",
        score_table=_mpnet_table,
    ),
    Architecture(
        name="ModernBERT",
        blocks="layers",
        attn="attn",
        q="attn.Wqkv",
        k="attn.Wqkv",
        v="attn.Wqkv",
        o="attn.Wo",
        fused="(c h k)",
        norm1="attn_norm",
        norm2="mlp_norm",
        ffn="mlp",
        norm_placement="pre",
        embed_norm="embeddings.norm",
        positions=partial(_rotary, "attn"),
        angles=partial(_angles, "attn"),
    ),
    _VIT,
    _VIT4,
    replace(_VIT, **_DINO),  # type: ignore[arg-type]
    replace(_VIT4, **_DINO),  # type: ignore[arg-type]
    Architecture(
        name="CLIP",
        blocks="encoder.layers",
        attn="self_attn",
        q="self_attn.q_proj",
        k="self_attn.k_proj",
        v="self_attn.v_proj",
        o="self_attn.out_proj",
        norm1="layer_norm1",
        norm2="layer_norm2",
        ffn="mlp",
        norm_placement="pre",
        causal=_is_clip_text,
    ),
    Architecture(
        name="GPT-2",
        blocks="h",
        attn="attn",
        q="attn.c_attn",
        k="attn.c_attn",
        v="attn.c_attn",
        o="attn.c_proj",
        fused="(c h k)",
        norm1="ln_1",
        norm2="ln_2",
        ffn="mlp",
        norm_placement="pre",
        beta=_gpt2_beta,
        causal=True,
    ),
    Architecture(
        name="GPT-NeoX",
        blocks="layers",
        attn="attention",
        q="attention.query_key_value",
        k="attention.query_key_value",
        v="attention.query_key_value",
        o="attention.dense",
        fused="(h c k)",
        norm1="input_layernorm",
        norm2="post_attention_layernorm",
        ffn="mlp",
        norm_placement=_neox_norm_placement,
        positions=partial(_rotary, "attention"),
        angles=partial(_angles, "attention"),
        causal=True,
    ),
    Architecture(
        name="Llama",
        blocks="layers",
        attn="self_attn",
        q="self_attn.q_proj",
        k="self_attn.k_proj",
        v="self_attn.v_proj",
        o="self_attn.o_proj",
        norm1="input_layernorm",
        norm2="post_attention_layernorm",
        ffn="mlp",
        norm_placement="pre",
        positions=partial(_rotary, "self_attn"),
        angles=partial(_angles, "self_attn"),
        causal=True,
        refuse=("self_attn.q_norm", "pre_feedforward_layernorm"),
    ),
    _T5,
    replace(_T5, blocks="block"),  # the encoder inside a T5 model with a decoder
    Architecture(
        name="torch.nn.TransformerEncoder",
        blocks="layers",
        attn="self_attn",
        q="self_attn",
        k="self_attn",
        v="self_attn",
        o="self_attn.out_proj",
        fused="(c h k)",
        norm1="norm1",
        norm2="norm2",
        ffn="linear2",
        norm_placement=_torch_norm_placement,
    ),
]


def register(architecture: Architecture) -> None:
    """Adds a layout, tried before those already known.

    architecture: its paths. `self_check` tells whether it fits.

    Example:
        >>> from dataclasses import replace
        >>> mine = replace(ARCHITECTURES[0], name="my BERT", blocks="trunk.layer")
        >>> register(mine)
        >>> ARCHITECTURES.pop(0).name
        'my BERT'
    """
    checks.instance("architecture", architecture, Architecture, "an Architecture")
    ARCHITECTURES.insert(0, architecture)
