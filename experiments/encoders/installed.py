"""Reaction SMILES: their tokenizer, the encoder that the installed package rxnmapper holds, and twelve reactions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from attn_flow.hooks.demo import word_tokenizer
from attn_flow.hooks.safe_loading import package_folder, pretrained_model

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


def textbook_reactions() -> list[str]:
    """Twelve textbook reactions as SMILES."""
    return list(REACTIONS)


def smiles_tokenizer(vocabulary: Path) -> Any:
    """A tokenizer that splits SMILES into atoms, bonds and rings and looks each up in a vocabulary file."""
    tokens = [token for token in vocabulary.read_text(encoding="utf-8").split("\n") if token.strip()]
    return word_tokenizer(tokens, 512, SMILES)


def load_rxnmapper(pickle: bool = True) -> tuple[nn.Module, Any]:
    """The ALBERT of the installed package rxnmapper (one shared block applied 12 times, d = 256) and its tokenizer.

    Args:
        pickle: whether pickled weights may be read; rxnmapper has no other.
    """
    from transformers import AlbertModel

    if not pickle:
        raise ValueError("the weights of rxnmapper are pickled, which can run code; pass pickle=True (--pickle).")
    inside = "models/transformers/albert_heads_8_uspto_all_1310k"
    folder = package_folder("rxnmapper", inside, "--no-deps rxnmapper")
    model = pretrained_model(AlbertModel, folder, use_safetensors=False, add_pooling_layer=False)
    return model.float().eval(), smiles_tokenizer(folder / "vocab.txt")
