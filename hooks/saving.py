"""Save models with replaced attention so that they load anywhere.

`save_pretrained` writes a model_type of its own ("attn_flow_bert"), the options of the flows, and the file
modeling_attn_flow.py beside the weights. The width in the config has a note on how to load it, so that it is no number.
So a plain load refuses instead of running ordinary layers, also `BertModel.from_pretrained`, and

    AutoModel.from_pretrained(folder, trust_remote_code=True)
    pipeline("fill-mask", model=folder, trust_remote_code=True)
    SentenceTransformer(folder, trust_remote_code=True)

load the flows. `attn_flow.hooks.load(folder)` does so too, without running code of the folder.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

from torch import nn

from attn_flow.base.files import write_json
from attn_flow.hooks.layer_flow import ENTRY, flows
from attn_flow.hooks.layout import inside

PREFIX = "attn_flow_"  # of the model_type of a saved model with flows
CODE = Path(__file__).with_name("modeling_attn_flow.py")
LOAD_NOTE = ", but attention is a flow: use attn_flow.hooks.load, or AutoModel with trust_remote_code=True"
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
        hub_model.save_pretrained = FlowSaver(hub_model)
    else:
        for name in (ENTRY, "auto_map"):
            vars(own).pop(name, None)
        vars(hub_model).pop("save_pretrained", None)


def describe_flows(model: nn.Module) -> list[dict[str, Any]]:
    """The options of all flows, one entry for the layers that have the same: plain JSON."""
    entries: list[dict[str, Any]] = []
    for i, flow in flows(model).items():
        options = {name: getattr(flow, name) for name in ("horizon", "steps", "step", "learn_beta")}
        entry = next((e for e in entries if all(e[name] == value for name, value in options.items())), None)
        if entry is None:
            entries.append({"layers": [i], **options})
        else:
            entry["layers"].append(i)
    return entries


def pretrained_inside(model: Any) -> Any:
    """The outermost model of transformers, which has a config and `save_pretrained`; None if there is none."""
    while model is not None:
        if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            model = model.get_base_model()
        if hasattr(type(model), "base_model_prefix"):  # every PreTrainedModel has one
            return model
        model = inside(model)
    return None


class FlowSaver:
    """The `save_pretrained` of a model with flows."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        push_to_hub = kwargs.pop("push_to_hub", False)
        hub_options = {name: kwargs.pop(name) for name in ("repo_id", "commit_message", "create_pr") if name in kwargs}
        update_config(self.model)  # the options of a flow may have been set since it was made
        type(self.model).save_pretrained(self.model, save_directory, *args, **kwargs)
        folder = Path(save_directory)
        if kwargs.get("is_main_process", True) and (folder / "config.json").is_file():
            _write_beside_weights(self.model, folder)
        if push_to_hub:
            hub_options.setdefault("repo_id", folder.name)
            self.model.push_to_hub(**hub_options)


def _write_beside_weights(model: Any, folder: Path) -> None:
    """The config with its own model_type, the code that loads it, and the model card."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not config["model_type"].startswith(PREFIX):
        config["model_type"] = PREFIX + config["model_type"]
    width = model.config.attribute_map.get("hidden_size", "hidden_size")
    if width in config:
        config[width] = f"{config[width]}{LOAD_NOTE}"
    names = ["AutoConfig", *_auto_classes(model.config)]
    classes = {"AutoConfig": "FlowConfig"}
    config["auto_map"] = {name: f"{CODE.stem}.{classes.get(name, name)}" for name in names}
    write_json(config, folder / "config.json")
    shutil.copyfile(CODE, folder / CODE.name)
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8") if card.exists() else _new_card(model)
    card.write_text(text.split(HEADING)[0] + _card_section(model), encoding="utf-8")


def _auto_classes(config: Any) -> list[str]:
    """The auto classes of transformers that know models of this config."""
    from transformers.models.auto import modeling_auto

    candidates = {name: getattr(modeling_auto, name) for name in dir(modeling_auto) if name.startswith("AutoModel")}
    return [name for name, auto in candidates.items() if type(config) in (getattr(auto, "_model_mapping", None) or ())]


def _new_card(model: Any) -> str:
    name = getattr(model.config, "_name_or_path", "")
    name = type(model).__name__ if not name or Path(name).exists() else name
    return f"---\nlibrary_name: transformers\ntags:\n- attn-flow\n---\n\n# {name} with attention as a flow\n\n"


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
