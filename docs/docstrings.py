"""Docstrings as Markdown: their examples are code, and their brackets, stars and <x, y> are what they are."""

from __future__ import annotations

import re
from typing import Any

from griffe import Docstring, Extension, Object


class Plain(Extension):
    """Rewrites every docstring before it is read as Markdown."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if isinstance(obj.docstring, Docstring):
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(words: str) -> str:
    """Examples under the heading griffe knows, bare ones in fences, everything else escaped outside code."""
    lines, out = words.splitlines(), []
    i = 0
    inside = False  # a section of examples, where griffe itself tells code from words
    while i < len(lines):
        line = lines[i]
        if re.fullmatch(r"\s*Examples?:", line):
            out.append(line.replace("Example:", "Examples:"))
            inside = True
        elif line.lstrip().startswith(">>>"):
            end = next((j for j in range(i, len(lines)) if not lines[j].strip()), len(lines))
            block, indent = lines[i:end], re.match(r"\s*", line)[0]  # type: ignore[index]
            out += block if inside else [f"{indent}```pycon", *block, f"{indent}```"]
            i = end - 1
        else:
            inside = inside and (not line.strip() or line.startswith(" "))
            out.append(line if line.startswith("|") else escaped(line))
        i += 1
    return "\n".join(out)


def escaped(line: str) -> str:
    """A line of prose whose brackets make no links and no tags; code spans stay."""
    parts = re.split(r"(`[^`]*`)", line)
    plain = (re.sub(r"([\[\]*])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2])
    return "".join(a + b for a, b in zip(plain, [*parts[1::2], ""]))
