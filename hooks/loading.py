"""Encoders, tokenizers, texts and images from names and files. No stranger's code is run, and nothing is guessed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.base import checks
from attn_flow.base.texts import csv_rows, lines, parse_json, read_standard_input, read_text
from attn_flow.hooks.replacing import ENTRY, restored
from attn_flow.hooks.strangers import pretrained, pretrained_model

PLAIN = ("", ".txt", ".text", ".md", ".rst", ".log")
TABLES = {".csv": ",", ".tsv": "\t"}
IMAGES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")


def load_folder(
    path: str | Path, *, dtype: torch.dtype = torch.float32, pickle: bool = False, remote_code: bool = False
) -> tuple[nn.Module, Any]:
    """`load_encoder` of a folder or of the hub; names of the zoo are not known here."""
    from transformers import MODEL_MAPPING, AutoConfig, AutoModel

    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise ValueError(f"{folder} has no config.json; expected a folder written by save_pretrained.")
        if not pickle and not list(folder.glob("*.safetensors")):
            found = ", ".join(sorted(p.name for p in folder.glob("*.bin"))) or "no weights at all"
            raise ValueError(
                f"{folder} holds no .safetensors file ({found}). A pickle can run code when it is read; if you trust "
                "this folder, pass pickle=True (--pickle), or save the model again with safe_serialization."
            )
    # from_pretrained renamed torch_dtype to dtype in 4.56; a cast after loading means the same in every version.
    config = pretrained(AutoConfig, path, remote_code)
    if getattr(config, ENTRY, None):
        model = restored(MODEL_MAPPING[type(config)], config, path, use_safetensors=not pickle).to(dtype)
    else:
        model = pretrained_model(AutoModel, path, remote_code, use_safetensors=not pickle).to(dtype).eval()
    sees = getattr(model, "main_input_name", "input_ids") == "pixel_values"
    return model, None if sees else load_tokenizer(path, remote_code=remote_code)


def load_tokenizer(path: str | Path, *, remote_code: bool = False) -> Any:
    """The tokenizer of a folder or name; `remote_code` as in `load_encoder`."""
    from transformers import AutoTokenizer

    return pretrained(AutoTokenizer, path, remote_code)


@contextmanager
def without_bars() -> Iterator[None]:
    """No progress bars of transformers during the `with`; afterwards as before."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_images(folder: str | Path, path: str | Path, *, remote_code: bool = False) -> dict[str, Tensor]:
    """All images of a folder as the preprocessor of the model at `path` makes them, sorted by name.

    Returns the model's inputs: pixel_values (images, channels, height, width).
    """
    from PIL import Image
    from transformers import AutoImageProcessor

    folder = Path(folder)
    files = sorted(p for p in folder.glob("*") if p.suffix.lower() in IMAGES)
    if not files:
        raise ValueError(f"{folder} holds no image ({', '.join(IMAGES)}).")
    processor = pretrained(AutoImageProcessor, path, remote_code)
    pictures = []
    for file in files:
        try:
            with Image.open(file) as picture:
                pictures.append(picture.convert("RGB"))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ValueError(f"{file} is no image that can be read ({error}); move it away.") from None
    return dict(processor(pictures, return_tensors="pt"))


def load_texts(path: str | Path, field: str = "text") -> list[str]:
    """The texts of a file, known by its suffix in small or capital letters.

    path: .txt (a text per line), .jsonl (an object per line), .json (a list of strings or objects), .csv or .tsv (with
    a header), or "-", standard input: lines, or objects if the first line begins with "{". field: the entry of an
    object, or the column of a table, that holds the text.

    Returns a list of strings, stripped; blank lines are skipped. ValueError in one sentence for anything else.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "a.jsonl").write_text('{"text": "a b"}')
        ...     load_texts(Path(folder, "a.jsonl"))
        ['a b']
    """
    checks.instance("path", path, (str, os.PathLike), "the name of a file")
    checks.instance("field", field, str, "the name of an entry or column")
    if str(path) == "-":
        content, where = read_standard_input(), "standard input"
        kind = ".jsonl" if content.lstrip().startswith("{") else ".txt"
    else:
        file, where = Path(path), str(path)
        kind = file.suffix.lower()
        if kind not in (*PLAIN, *TABLES, ".jsonl", ".ndjson", ".json"):
            raise ValueError(f"{file} is of no known format ({kind}); expected .txt, .jsonl, .json, .csv or .tsv.")
        content = read_text(file)
    found = [text.strip() for text in _texts(content, kind, where, field)]
    if not found:
        raise ValueError(f"{where} holds no text.")
    return found


def _texts(content: str, kind: str, where: str, field: str) -> Iterator[str]:
    if kind in PLAIN:
        yield from (line for _, line in lines(content))
    elif kind in TABLES:
        rows = csv_rows(content, where, TABLES[kind])
        names = [name.strip() for name in next(rows, (0, []))[1]]
        if field not in names:
            raise ValueError(f"{where} has no column {field!r} (found {', '.join(names)}); use --field.")
        column = names.index(field)
        for number, row in rows:
            if len(row) != len(names):
                raise ValueError(f"{where}, row {number} has {len(row)} fields, its header {len(names)}.")
            if row[column].strip():
                yield row[column]
    elif kind == ".json":
        entries = parse_json(content, where)
        if not isinstance(entries, list):
            raise ValueError(f"{where} holds a {type(entries).__name__}, expected a list of strings or objects.")
        for number, entry in enumerate(entries, start=1):
            yield entry if isinstance(entry, str) else _entry(entry, f"{where}, entry {number}", field)
    else:
        for number, line in lines(content):
            yield _entry(parse_json(line, f"{where}, line {number}"), f"{where}, line {number}", field)


def _entry(row: Any, where: str, field: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where}: no text field {field!r} (found {keys}); use --field.")
    return row[field]
