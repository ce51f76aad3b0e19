"""An encoder from what a person types: a folder, a name of the hub, or a name of the zoo."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attn_flow.hooks.demo import EMBEDDED
from attn_flow.hooks.loading import load_folder
from attn_flow.hooks.zoo import ZOO, fetched, load_fetched


def load_encoder(
    path: str | Path, *, dtype: torch.dtype = torch.float32, pickle: bool = False, remote_code: bool = False
) -> tuple[nn.Module, Any]:
    """An encoder and its tokenizer, in evaluation mode.

    path: a folder written by save_pretrained, a name of the hub, or of the zoo (`attn-flow encoders` lists it;
    "minilm" and "rxnmapper" need no fetching where their packages are installed).
    dtype: of the weights; never the checkpoint's own by accident. pickle: also read pickled weights (with
    weights_only); by default only safetensors, for a pickle can run code. remote_code: run the code that the folder
    or the hub brings along; by default such a model is refused.

    Returns (model, tokenizer); the tokenizer is None for a model of images.

    Example:
        >>> import tempfile
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for part in tiny_bert():
        ...         _ = part.save_pretrained(folder)
        ...     model, tokenizer = load_encoder(folder)
        >>> type(model).__name__, tokenizer("a b").input_ids
        ('BertModel', [2, 5, 6, 3])
    """
    if not isinstance(path, str | Path):
        raise ValueError(f"path is a {type(path).__name__}, expected a folder, or a name of the hub or the zoo.")
    name = str(path)
    if name in ZOO and (fetched(name) or name not in EMBEDDED):
        model, tokenizer = load_fetched(name)
        return model.to(dtype), tokenizer
    if name in EMBEDDED:
        model, tokenizer = EMBEDDED[name](pickle)
        return model.to(dtype), tokenizer
    try:
        return load_folder(path, dtype=dtype, pickle=pickle, remote_code=remote_code)
    except OSError as error:
        if Path(path).exists():
            raise
        why = str(error).splitlines()[0]
        raise ValueError(f"no encoder {name!r}: {_near(name)} The hub did not give it either ({why})") from None


def _near(name: str) -> str:
    """The names and folders that someone may have meant, and the names there are."""
    place = Path(name).parent
    folders = [each.name for each in place.iterdir() if each.is_dir()] if place.is_dir() else []
    near = [
        *get_close_matches(name, [*ZOO, *EMBEDDED]),
        *(str(place / f) for f in get_close_matches(Path(name).name, folders)),
    ]
    meant = f"did you mean {' or '.join(dict.fromkeys(near))}? Expected" if near else "expected"
    return f"{meant} a folder written by save_pretrained, or one of {', '.join(ZOO)}."
