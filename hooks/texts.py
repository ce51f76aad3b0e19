"""Texts from files, by the suffix of their names."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from pathlib import Path
from typing import Any


def load_texts(path: str | os.PathLike[str], field: str = "text") -> list[str]:
    """The texts of a file, known by its suffix in small or capital letters.

    Args:
        path: .txt or .md (a text per line), .jsonl (an object per line), .csv (with a header), or "-", standard input:
            lines, or objects if the first line begins with "{".
        field: the entry of an object, or the column of a table, that holds the text.

    Returns:
        A list of strings, stripped; blank ones are skipped. ValueError in one sentence for anything else.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "a.jsonl").write_text('{"text": "a b"}')
        ...     load_texts(Path(folder, "a.jsonl"))
        ['a b']
    """
    source, kind = str(path), Path(path).suffix.lower()
    if kind not in ("", ".txt", ".md", ".jsonl", ".csv"):
        raise ValueError(f"{source} is of no known format ({kind}); expected .txt, .md, .jsonl or .csv.")
    content = _read(path)
    if source == "-":
        source, kind = "standard input", ".jsonl" * content.lstrip().startswith("{")
    lines = content.replace("\r\n", "\n").replace("\r", "\n").split("\n")  # U+2028 and form feeds end no line
    if kind == ".jsonl":
        texts = [_object(line, field, source, i) for i, line in enumerate(lines, start=1) if line.strip()]
    elif kind == ".csv":
        texts = _table(content, field, source)
    else:
        texts = lines
    texts = [text.strip() for text in texts if text.strip()]
    if not texts:
        raise ValueError(f"{source} holds no text.")
    return texts


def _read(path: str | os.PathLike[str]) -> str:
    """The content of a UTF-8 file, or of standard input for "-"."""
    source = "standard input" if str(path) == "-" else str(path)
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
        return content.decode("utf-8-sig")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ValueError(f"no file {source}.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text (byte {error.start}); convert it first.") from None


def _object(text: str, field: str, source: str, line: int) -> str:
    try:
        return _entry(json.loads(text), field, source, line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}, line {line} is not JSON ({error.msg}).") from None


def _table(content: str, field: str, source: str) -> list[str]:
    csv.field_size_limit(max(csv.field_size_limit(), len(content)))  # a field may be a whole document
    reader = csv.DictReader(io.StringIO(content, newline=""), strict=True)
    texts = []
    try:
        for row in reader:
            if None in row or None in row.values():  # DictReader's mark of too many and too few fields
                raise ValueError(f"{source}, line {reader.line_num}: expected as many fields as in the header.")
            texts.append(_entry(row, field, source, reader.line_num))
    except csv.Error as error:
        raise ValueError(f"{source} is not a table ({error}).") from None
    return texts


def _entry(row: Any, field: str, source: str, line: int) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{source}, line {line}: no text field {field!r} (found {keys}); use --field.")
    return row[field]
