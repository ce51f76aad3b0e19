"""The fields of a training run's recipe and what each means, light to import: the options of `attn-flow train`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _option(default: Any, words: str) -> Any:
    """A field of the recipe: its default, and what `attn-flow train --help` says of it."""
    return field(default=default, metadata={"help": words})


@dataclass(frozen=True)
class Fields:
    """What a Recipe holds, unchecked: `steps` are a layer's, `updates` the optimiser's."""

    task: str = field(metadata={"help": "majority, recall, clusters, parity, text or masked."})
    file: str | None = _option(None, "text: label<TAB>text lines, .csv or .jsonl; masked: any plain text.")
    tokens: int = _option(16, "Tokens of one input (the longest, for texts).")
    dim: int = _option(32, "Dimension of the tokens.")
    heads: int = _option(1, "Attention heads.")
    head_dim: int | None = _option(None, "Width of a head; dim / heads if not given.")
    depth: int = _option(1, "Layers.")
    shared: bool = _option(False, "One layer's weights for all layers.")
    horizon: float = _option(1.0, "Time of each layer's flow.")
    steps: int = _option(4, "Steps of each layer; 1 with --step euler: discrete.")
    step: str = _option("rk4", "euler, rk4 or dopri5.")
    geometry: str = _option("sphere", "sphere, euclidean or layer-norm.")
    placement: str = _option("post", "Norms: post, or pre and peri (euclidean).")
    ffn: int = _option(0, "Hidden width of the FFN after each layer; 0: none.")
    noise: float = _option(0.0, "Sigma of the kicks between steps while training.")
    beta: float = _option(4.0, "Inverse temperature.")
    beta_mode: str = _option("fixed", "fixed; learned, one log beta per head, from beta; annealed, beta-start to beta.")
    beta_start: float = _option(1.0, "Where annealing begins; it is geometric, over the first 80% of the updates.")
    checkpointing: bool = _option(False, "Recompute steps in the backward pass: less memory, more time.")
    updates: int = _option(500, "Optimiser steps.")
    batch: int = _option(64, "Inputs per update, over all processes.")
    lr: float = _option(3e-3, "Largest learning rate of the cosine.")
    weight_decay: float = _option(0.01, "AdamW's.")
    warmup: int = _option(50, "Updates until the largest learning rate.")
    clip: float = _option(1.0, "Largest norm of the gradient.")
    amp: bool = _option(True, "Mixed precision, on CUDA only.")
    seed: int = _option(0, "Seed of every random number.")
