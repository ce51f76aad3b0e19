"""Texts from files: lines are lines, formats are known by their names, and what is no text is refused in a sentence."""

from __future__ import annotations

import csv
import io
import json
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attn_flow.base import memory

COPIES = 3  # of a text at least: its bytes, its characters, its lines
PIECE = 2**26  # bytes read of standard input at once


def decoded(content: bytes, where: str) -> str:
    """UTF-8, with or without a byte order mark."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is no UTF-8 text (byte {error.start}); convert it first.") from None
    if "\x00" in text:
        raise ValueError(f"{where} holds NUL characters: this is no text but a binary file.")
    return text


def read_text(path: str | Path) -> str:
    """All of a text file; a pipe or a device, which may have no end, is none."""
    path = Path(path)
    try:
        found = path.stat()
        if not stat.S_ISDIR(found.st_mode) and not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is no regular file; give one, or - and the texts on standard input.")
        memory.require(COPIES * found.st_size, f"the text of {path}", "split the file")
        content = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ValueError(f"no file {path}.") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error}).") from None
    return decoded(content, str(path))


def read_standard_input() -> str:
    """All of standard input."""
    if sys.stdin is None or sys.stdin.closed:
        raise ValueError("standard input is closed; give a file.")
    raw = getattr(sys.stdin, "buffer", None)
    try:
        if raw is None:
            return sys.stdin.read()
        content = b""
        while part := raw.read(PIECE):
            content += part
            memory.require(COPIES * len(content), "what came on standard input", "give less of it, or a file")
        return decoded(content, "standard input")
    except OSError as error:
        raise ValueError(f"standard input cannot be read ({error.strerror or error}); give a file.") from None


def lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers from 1. Only a newline ends a line: no form feed, U+0085, U+2028."""
    for number, line in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), start=1):
        if line.strip():
            yield number, line


def parse_json(text: str, where: str) -> Any:
    """A JSON value."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no JSON ({error.msg}).") from None
    except RecursionError:
        raise ValueError(f"{where} is JSON nested too deeply.") from None


def csv_rows(text: str, where: str, delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """Rows of a table that are not blank, with their numbers from 1; a field may be as long as the text."""
    before = csv.field_size_limit(max(len(text), 1))
    try:
        # A quoted field keeps its own newlines.
        table = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        for number, row in enumerate(table, start=1):
            if any(field.strip() for field in row):
                yield number, row
    except csv.Error as error:
        raise ValueError(f"{where} is no table ({error}).") from None
    finally:
        csv.field_size_limit(before)
