"""Save models with replaced attention so that they load anywhere.

`save_pretrained` writes a model_type of its own ("attn_flow_bert"), an attention implementation that transformers does
not have, the options of the flows, and the file modeling_attn_flow.py. So AutoModel, pipeline and SentenceTransformer
load the flows with trust_remote_code=True, and refuse without it, and `attn_flow.hooks.load` loads them without running
code of the folder. `BertModel.from_pretrained(folder)` refuses as well; if it is given another attn_implementation, it
runs ordinary layers, and transformers warns of another model type and of weights that are not used.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from attn_flow.base.files import write_json
from attn_flow.hooks.layer_flow import flows
from attn_flow.hooks.layout import ENTRY, inside

PREFIX = "attn_flow_"  # of the model_type of a saved model with flows
CODE = Path(__file__).with_name("modeling_attn_flow.py")
IMPLEMENTATION = "a flow, use attn_flow.hooks.load"  # shown by transformers, which does not know it
HEADING = "## Attention as a flow"


def update_config(model: nn.Module) -> None:
    """Give the model a config of its own whose entry says which layers flow and how; torch's modules have none."""
    hub_model = pretrained_inside(model)
    if hub_model is None:
        return
    before, own = hub_model.config, copy.deepcopy(hub_model.config)
    for module in hub_model.modules():
        if module.__dict__.get("config") is before:
            module.config = own
    entry = describe_flows(hub_model)
    if entry:
        setattr(own, ENTRY, entry)
        hub_model.save_pretrained = partial(save_flows, hub_model)
    else:
        for name in (ENTRY, "auto_map"):
            vars(own).pop(name, None)
        vars(hub_model).pop("save_pretrained", None)


def describe_flows(model: nn.Module) -> list[dict[str, Any]]:
    """The options of all flows, one entry for the layers that have the same: plain JSON."""
    names = ("horizon", "steps", "step", "learn_beta")
    layers: dict[tuple[Any, ...], list[int]] = {}
    for i, flow in flows(model).items():
        layers.setdefault(tuple(getattr(flow, name) for name in names), []).append(i)
    return [{"layers": indices, **dict(zip(names, values))} for values, indices in layers.items()]


def pretrained_inside(model: Any) -> Any:
    """The outermost model of transformers, which has a config and `save_pretrained`; None if there is none."""
    while model is not None:
        if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            model = model.get_base_model()
        if hasattr(type(model), "base_model_prefix"):  # every PreTrainedModel has one
            return model
        model = inside(model)
    return None


def save_flows(model: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
    """The `save_pretrained` of a model with flows."""
    if kwargs.pop("push_to_hub", False):
        raise ValueError("push_to_hub=True would leave out files of a flow; use model.push_to_hub(name).")
    update_config(model)  # the options of a flow may have been set since it was made
    type(model).save_pretrained(model, save_directory, *args, **kwargs)
    if kwargs.get("is_main_process", True):
        _write_beside_weights(model, Path(save_directory))


def _write_beside_weights(model: Any, folder: Path) -> None:
    """The config with its own model_type, the code that loads it, and the model card."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not config["model_type"].startswith(PREFIX):
        config["model_type"] = PREFIX + config["model_type"]
    config["_attn_implementation"] = IMPLEMENTATION
    config["auto_map"] = {name: f"{CODE.stem}.{name}" for name in _auto_classes(model.config)}
    config["auto_map"]["AutoConfig"] = f"{CODE.stem}.FlowConfig"
    write_json(config, folder / "config.json")
    shutil.copyfile(CODE, folder / CODE.name)
    card = folder / "README.md"
    title = f"---\nlibrary_name: transformers\ntags:\n- attn-flow\n---\n\n# {type(model).__name__}\n\n"
    text = card.read_text(encoding="utf-8") if card.exists() else title
    card.write_text(text.split(HEADING)[0] + _card_section(model), encoding="utf-8")


def _auto_classes(config: Any) -> list[str]:
    """The auto classes of transformers that know models of this config."""
    from transformers.models.auto import modeling_auto

    candidates = {name: getattr(modeling_auto, name) for name in dir(modeling_auto) if name.startswith("AutoModel")}
    return [name for name, auto in candidates.items() if type(config) in (getattr(auto, "_model_mapping", None) or ())]


def _card_section(model: Any) -> str:
    """What was replaced and how to load it, for the model card."""
    return f"""{HEADING}

attn_flow replaced the attention of these layers by the flow x' = A(x) of its own weights, from time 0 to `horizon`:

```json
{json.dumps(describe_flows(model), indent=1)}
```

All other weights keep their names and places. To load it (`pip install attn-flow`):

```python
from attn_flow.hooks import load

model = load(folder)  # a folder or a name of the hub
# or AutoModel.from_pretrained(folder, trust_remote_code=True)
```
"""
