"""Reading text files and standard input, with one clear sentence for whatever is not text."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def decode_text(content: bytes, source: str) -> str:
    """UTF-8 bytes, with or without a byte order mark, as a string; `source` names them in errors.

    >>> decode_text(b"\\xff", "notes.txt")
    Traceback (most recent call last):
    ValueError: notes.txt is not UTF-8 text (byte 0); convert it first.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text (byte {error.start}); convert it first.") from None
    if "\x00" in text:
        raise ValueError(f"{source} contains NUL characters: it is a binary file, expected text.")
    return text


def read_text(path: str | Path) -> str:
    """The content of a text file. Pipes and devices, which may have no end, are refused."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ValueError(f"{path} is not a regular file; give one, or - and the texts on standard input.")
        return decode_text(path.read_bytes(), str(path))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ValueError(f"no file {path}.") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error}).") from None


def read_standard_input() -> str:
    """The content of standard input."""
    if sys.stdin is None or sys.stdin.closed:
        raise ValueError("standard input is closed; give a file.")
    buffer = getattr(sys.stdin, "buffer", None)
    try:
        return sys.stdin.read() if buffer is None else decode_text(buffer.read(), "standard input")
    except OSError as error:
        raise ValueError(f"standard input cannot be read ({error.strerror or error}); give a file.") from None


def lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1. Form feeds and U+2028 do not end a line.

    >>> list(lines("one\\n\\nthree"))
    [(1, 'one'), (3, 'three')]
    """
    for number, line in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), start=1):
        if line.strip():
            yield number, line


def parse_json(text: str, source: str) -> Any:
    """A JSON value; ValueError naming the source if the text is not JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source} is not JSON ({error.msg}).") from None
    except RecursionError:
        raise ValueError(f"{source} is JSON nested too deeply.") from None


def csv_rows(text: str, source: str, delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """The rows of a table that are not blank, with their numbers from 1. A field may be as long as the text.

    >>> list(csv_rows('a,"b, c"', "table.csv"))
    [(1, ['a', 'b, c'])]
    """
    previous_limit = csv.field_size_limit(max(len(text), 1))
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        for number, row in enumerate(reader, start=1):
            if any(field.strip() for field in row):
                yield number, row
    except csv.Error as error:
        raise ValueError(f"{source} is not a table ({error}).") from None
    finally:
        csv.field_size_limit(previous_limit)
