"""Texts and images from files, by the suffix of their names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from attn_flow.base.texts import csv_rows, lines, parse_json, read_text
from attn_flow.hooks.safe_loading import pretrained

PLAIN = ("", ".txt", ".text", ".md", ".rst", ".log")
TABLES = {".csv": ",", ".tsv": "\t"}
IMAGES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")


def load_texts(path: str | os.PathLike[str], field: str = "text") -> list[str]:
    """The texts of a file, known by its suffix in small or capital letters.

    Args:
        path: .txt (a text per line), .jsonl (an object per line), .json (a list of strings or objects), .csv or .tsv
            (with a header), or "-", standard input: lines, or objects if the first line begins with "{".
        field: the entry of an object, or the column of a table, that holds the text.

    Returns:
        A list of strings, stripped; blank lines are skipped. ValueError in one sentence for anything else.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "a.jsonl").write_text('{"text": "a b"}')
        ...     load_texts(Path(folder, "a.jsonl"))
        ['a b']
    """
    if str(path) == "-":
        content, where = read_text("-"), "standard input"
        kind = ".jsonl" if content.lstrip().startswith("{") else ".txt"
    else:
        file, where = Path(path), str(path)
        kind = file.suffix.lower()
        if kind not in (*PLAIN, *TABLES, ".jsonl", ".ndjson", ".json"):
            raise ValueError(f"{file} is of no known format ({kind}); expected .txt, .jsonl, .json, .csv or .tsv.")
        content = read_text(file)
    texts = [text.strip() for text in _texts(content, kind, where, field)]
    if not texts:
        raise ValueError(f"{where} holds no text.")
    return texts


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


def load_images(
    folder: str | os.PathLike[str], path: str | os.PathLike[str], *, remote_code: bool = False
) -> dict[str, Tensor]:
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
