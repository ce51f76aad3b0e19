"""from_pretrained of a folder that a stranger wrote: no code of it is run, what is damaged or not whole is refused."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from safetensors import SafetensorError


def pretrained(kind: Any, path: str | Path, remote_code: bool = False, **options: Any) -> Any:
    """kind.from_pretrained(path), which never asks on the terminal whether to run a stranger's code.

    kind: an Auto class, or a class of models. remote_code: run the code that the folder or the hub brings along.
    """
    try:
        return kind.from_pretrained(path, trust_remote_code=remote_code, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{path} brings Python code of its own, which was not run; if you trust it, pass remote_code=True to "
            "attn_flow.hooks.load_encoder."
        ) from None
    except (SafetensorError, UnpicklingError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"{path}: its weights cannot be read ({why}); the file is damaged, fetch it again.") from None


def pretrained_model(kind: Any, path: str | Path, remote_code: bool = False, **options: Any) -> Any:
    """The model of `pretrained`, all of whose weights come from the file; a pooler, which no layer sees, may be new."""
    model, report = pretrained(kind, path, remote_code, output_loading_info=True, **options)
    missing = sorted(key for key in report["missing_keys"] if "pooler" not in key)
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ValueError(
            f"{path} lacks {shown}: {len(missing)} weights of a {type(model).__name__}, which would be random numbers; "
            "expected all of them."
        )
    return model
