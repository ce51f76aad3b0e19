"""Names of models and tokenizers that change with their content, to tell whether two runs belong together."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import Tensor, nn

from attn_flow.base.files import digest

# Letters, accents, digits, spaces and signs, where tokenizers of one vocabulary differ.
SAMPLE = ["The quick brown fox; naïve Œuvre, 12.5% of\tÅ\N{COMBINING RING ABOVE}  x_y-Z(=O)c1ccccc1 QVQLVESGG"]


def fingerprint(model: nn.Module) -> str:
    """A name of a model that changes with any of its weights and saved buffers."""
    state = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    if any(t.is_meta for t in state.values()):
        raise ValueError("a weight is on the meta device (offloaded or not loaded); load it with weights.")
    return f"{type(model).__name__} {digest(state)[:16]}"


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A name of a tokenizer that changes with its vocabulary, its rules, and what it makes of a sample."""
    total = hashlib.sha256()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        # How the last call truncated and padded is not part of the tokenizer.
        rules = {name: rule for name, rule in rules.items() if name not in ("truncation", "padding")}
        total.update(json.dumps(rules, sort_keys=True).encode())
    elif hasattr(tokenizer, "get_vocab"):
        total.update(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode())
    total.update(json.dumps([list(ids) for ids in tokenizer(SAMPLE)["input_ids"]]).encode())
    return f"{type(tokenizer).__name__} {total.hexdigest()[:16]}"
