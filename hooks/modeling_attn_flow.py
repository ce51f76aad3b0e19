"""Loads a model whose attention is a flow; it needs `pip install attn-flow`.

`save_pretrained` copies this file beside the weights, and transformers runs it with trust_remote_code=True.
"""

from typing import Any

from attn_flow.hooks.loading import FlowConfig as FlowConfig
from attn_flow.hooks.loading import flow_auto_class


def __getattr__(name: str) -> Any:
    """The loader that stands for one of transformers' auto classes, such as AutoModelForMaskedLM."""
    return flow_auto_class(name)
