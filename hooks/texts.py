"""Texts from files, by the suffix of their names."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Iterator
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
    is_input = str(path) == "-"
    source, kind = ("standard input", "") if is_input else (str(path), Path(path).suffix.lower())
    if kind not in ("", ".txt", ".md", ".jsonl", ".csv"):
        raise ValueError(f"{source} is of no known format ({kind}); expected .txt, .md, .jsonl or .csv.")
    try:
        content = (sys.stdin.buffer.read() if is_input else Path(path).read_bytes()).decode("utf-8-sig")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ValueError(f"no file {source}.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text (byte {error.start}); convert it first.") from None
    if is_input and content.lstrip().startswith("{"):
        kind = ".jsonl"
    texts = []
    for number, row in _rows(content, kind, source, field):
        text = row.get(field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"{source}, line {number}: no text field {field!r} (found {keys}); use --field.")
        texts.append(text.strip())
    texts = [text for text in texts if text]
    if not texts:
        raise ValueError(f"{source} holds no text.")
    return texts


def _rows(content: str, kind: str, source: str, field: str) -> Iterator[tuple[int, Any]]:
    """The number of a line, and what it holds as a dictionary."""
    if kind == ".csv":
        csv.field_size_limit(max(csv.field_size_limit(), len(content)))  # a field may be a whole document
        reader = csv.DictReader(io.StringIO(content, newline=""), strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():  # DictReader's mark of too many and too few fields
                    raise ValueError(f"{source}, line {reader.line_num}: expected as many fields as in the header.")
                yield reader.line_num, row
        except csv.Error as error:
            raise ValueError(f"{source} is not a table ({error}).") from None
        return
    lines = content.replace("\r\n", "\n").replace("\r", "\n").split("\n")  # U+2028 and form feeds end no line
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                yield number, json.loads(line) if kind == ".jsonl" else {field: line}
        except json.JSONDecodeError as error:
            raise ValueError(f"{source}, line {number} is not JSON ({error.msg}).") from None
