"""Every architecture, tiny and random, with biases and norm gains drawn anew: at initialisation they hide mistakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from attn_flow.hooks.demo import word_tokenizer

WIDE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = {**WIDE, "vocab_size": 60, "max_position_embeddings": 64, "pad_token_id": 0}
IMAGE = {**WIDE, "image_size": 16, "patch_size": 4}
POSITIONS = {"relative_attention": True, "pos_att_type": "c2p|p2c"}


def _of(name: str, **options: Any) -> Callable[[], nn.Module]:
    """<name>Model of its <name>Config."""

    def build() -> nn.Module:
        model = {"T5": "T5EncoderModel"}.get(name, f"{name}Model")
        if not hasattr(transformers, model):
            pytest.skip(f"transformers {transformers.__version__} has no {model}")
        config = getattr(transformers, f"{name}Config")(**options)
        return getattr(transformers, model)(config)

    return build


def _torch(norm_first: bool, batch_first: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(32, 4, 48, norm_first=norm_first, batch_first=batch_first)
        return nn.TransformerEncoder(layer, 3, enable_nested_tensor=not norm_first and batch_first)

    return build


ZOO: dict[str, Callable[[], nn.Module]] = {
    "BERT": _of("Bert", **TEXT),
    "RoBERTa": _of("Roberta", **{**TEXT, "pad_token_id": 1}),
    "ELECTRA": _of("Electra", **TEXT, embedding_size=16),
    "DistilBERT": _of(
        "DistilBert", dim=32, n_layers=3, n_heads=4, hidden_dim=48, vocab_size=60, max_position_embeddings=64
    ),
    "ALBERT": _of("Albert", **TEXT, embedding_size=16),
    "DeBERTa": _of("Deberta", **TEXT, **POSITIONS),
    "DeBERTa-v2": _of("DebertaV2", **TEXT, **POSITIONS),
    "DeBERTa-v3": _of("DebertaV2", **TEXT, **POSITIONS, share_att_key=True, conv_kernel_size=3, conv_act="gelu"),
    "MPNet": _of("MPNet", **{**TEXT, "pad_token_id": 1}),
    "ModernBERT": _of("ModernBert", **TEXT, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2),
    "ViT": _of("ViT", **IMAGE),
    "DINOv2": _of("Dinov2", **IMAGE),
    "CLIP vision": _of("CLIPVision", **IMAGE),
    "GPT-2": _of("GPT2", n_embd=32, n_layer=3, n_head=4, vocab_size=60, n_positions=64, bos_token_id=1, eos_token_id=2),
    "GPT-NeoX": _of("GPTNeoX", **TEXT),
    "GPT-NeoX serial": _of("GPTNeoX", **TEXT, use_parallel_residual=False),
    "Llama": _of("Llama", **TEXT, num_key_value_heads=2, attention_bias=True),
    "T5 encoder": _of("T5", d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, vocab_size=60),
    "torch": _torch(norm_first=False, batch_first=True),
    "torch pre-norm": _torch(norm_first=True, batch_first=False),
}
POSITIONAL = {"DeBERTa", "DeBERTa-v2", "DeBERTa-v3", "MPNet", "ModernBERT", "GPT-NeoX", "GPT-NeoX serial", "Llama"}
POSITIONAL |= {"T5 encoder"}
IMAGES = {"ViT", "DINOv2", "CLIP vision"}
CAUSAL = {"GPT-2", "GPT-NeoX", "GPT-NeoX serial", "Llama"}

every_architecture = pytest.mark.parametrize("name", list(ZOO))


def tiny(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A small random model in evaluation mode, every vector of parameters drawn anew."""
    torch.manual_seed(seed)
    model = ZOO[name]()
    with torch.no_grad():
        for path, p in model.named_parameters():
            if p.ndim == 1:
                p.add_(0.3 * torch.randn_like(p))
            else:
                p.normal_(0, 0.4 if "emb" in path else p.shape[-1] ** -0.5)
    return model.to(dtype).eval()


def inputs(
    name: str, dtype: torch.dtype = torch.float32, seed: int = 0, lengths: tuple[int, ...] = (7, 4)
) -> dict[str, Tensor]:
    """Inputs of so many tokens, with padding where the model knows padding; images have 17."""
    torch.manual_seed(seed)
    count, n = len(lengths), max(lengths)
    if name in IMAGES:
        return {"pixel_values": torch.randn(count, 3, 16, 16, dtype=dtype)}
    tokens = torch.arange(n) < torch.tensor(lengths)[:, None]
    if name.startswith("torch"):
        src = torch.randn(count, n, 32, dtype=dtype)
        return {"src": src if name == "torch" else src.transpose(0, 1), "src_key_padding_mask": ~tokens}
    ids = torch.where(tokens, torch.randint(3, 60, (count, n)), 1 if name in {"RoBERTa", "MPNet"} else 0)
    return {"input_ids": ids, "attention_mask": tokens.long()}


def long_inputs(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Three inputs of 20, 17 and 18 tokens; images have 17."""
    return inputs(name, dtype, lengths=(20, 17, 18))


def mask(name: str) -> Tensor:
    """True for tokens, in the layout of the model's output."""
    if name in IMAGES:
        return torch.ones(2, 17, dtype=torch.bool)
    tokens = torch.arange(7) < torch.tensor([7, 4])[:, None]
    return tokens.T if name == "torch pre-norm" else tokens


def output(model: nn.Module, x: dict[str, Tensor], **options: Any) -> Tensor:
    if getattr(getattr(model, "config", None), "model_type", "") in {"gpt2", "gpt_neox", "llama"}:
        options.setdefault("use_cache", False)
    out = model(**x, **options)
    return out if isinstance(out, Tensor) else out.last_hidden_state


def run(model: nn.Module, x: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return output(model, x)


def fingerprint(model: nn.Module) -> list:
    """All that a hook could leave behind."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    return [
        (path, m.training, "forward" in m.__dict__, *(len(getattr(m, h)) for h in hooks), sorted(m.__dict__))
        for path, m in model.named_modules()
    ] + [str(getattr(model, "config", ""))]


def without_positions(name: str, model: nn.Module, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same model made blind to positions inside its attention, and its inputs, so that contents decide alone."""
    with torch.no_grad():
        for path, p in model.named_parameters():
            if any(word in path for word in ("rel_embeddings", "pos_", "relative_attention_bias")):
                p.zero_()
    if name == "DeBERTa-v3":  # shared projections still see the (now zero) position table through their biases
        with torch.no_grad():
            for path, p in model.named_parameters():
                if path.endswith(("query_proj.bias", "key_proj.bias")):
                    p.zero_()
    if name in {"ModernBERT", "GPT-NeoX", "GPT-NeoX serial", "Llama"}:
        return {**x, "position_ids": torch.zeros_like(x["input_ids"])}
    return x


def tokenizer() -> Any:
    """A real fast tokenizer of fifty words, with [CLS] and [SEP] around a text."""
    return word_tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(50))], 32)


def words(lengths: list[int], seed: int = 0) -> list[str]:
    """Texts of so many words."""
    generator = torch.Generator().manual_seed(seed)
    return [" ".join(f"w{i}" for i in torch.randint(50, (n,), generator=generator).tolist()) for n in lengths]
