"""Load what `save_pretrained` wrote without running code that comes along with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from safetensors import SafetensorError


def pretrained(kind: Any, path: str | os.PathLike[str], **options: Any) -> Any:
    """kind.from_pretrained(path) of an Auto class or a class of models, which neither runs nor asks to run its code."""
    try:
        return kind.from_pretrained(os.fspath(path), trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{path} brings Python code of its own, which was not run; if you trust it, load it by transformers with "
            "trust_remote_code=True."
        ) from None
    except UnpicklingError:
        raise ValueError(f"{path}: its pickled weights are damaged or may run code; expected .safetensors.") from None
    except SafetensorError as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"{path}: its weights cannot be read ({why}); the file is damaged, fetch it again.") from None


def pretrained_model(kind: Any, path: str | os.PathLike[str], **options: Any) -> Any:
    """The model of `pretrained`, all of whose weights come from the file; a pooler, which no layer sees, may be new."""
    model, report = pretrained(kind, path, output_loading_info=True, **options)
    missing = sorted(key for key in report["missing_keys"] if "pooler" not in key)
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ValueError(
            f"{path} lacks {shown}: {len(missing)} weights of a {type(model).__name__}, which would be random numbers; "
            "expected all of them."
        )
    return model


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """The tokenizer of a folder or a name of the hub."""
    from transformers import AutoTokenizer

    return pretrained(AutoTokenizer, path)


def package_folder(package: str, subfolder: str, install: str) -> Path:
    """A folder inside an installed package, which is located without importing (and so running) the package."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"package {package} is not installed; run `pip install {install}`.")
    return Path(spec.submodule_search_locations[0]) / subfolder


@contextmanager
def without_bars() -> Iterator[None]:
    """No progress bars of transformers during the `with`; afterwards as before."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
