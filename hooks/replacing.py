"""Layers that are flows for good: `replace_attention`, trained like any model, saved and loaded with their flow.

Parameters keep their names and places. A replaced attention gains one child, `attn_flow`, whose `log_beta_factor`
(heads,) is part of the state; the model's config gains an entry `attn_flow`. So a plain `from_pretrained` of the saved
folder, which knows of no flow, names the keys it left out, and `load` restores both.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.base import checks, memory
from attn_flow.dynamics.steppers import STEPS
from attn_flow.hooks.attach import padded
from attn_flow.hooks.layout import Block, blocks, inside, refuse_to_change
from attn_flow.hooks.strangers import pretrained, pretrained_model
from attn_flow.hooks.temperature import chosen_layers, factor_of, scale_queries
from attn_flow.hooks.wrapping import WrappedAttention, fixed_step

ENTRY = "attn_flow"  # of a config, and the child of a replaced attention


class LayerFlow(nn.Module):
    """How one replaced layer flows: to time `horizon` in `steps` steps, at beta_factor times the trained temperature.

    heads: of the layer. horizon, steps, step: as in `replace_attention`. train_beta: make log_beta_factor a parameter.
    `beta_factor` (heads,) can be read and set; it is exp(log_beta_factor), which is what the state dict holds.

    Example:
        >>> flow = LayerFlow(heads=2, horizon=1.0, steps=4, step="rk4", train_beta=True)
        >>> flow.beta_factor = 2.0
        >>> flow, flow.beta_factor.tolist()
        (LayerFlow(heads=2, horizon=1.0, steps=4, step=rk4, train_beta=True), [2.0, 2.0])
    """

    log_beta_factor: Tensor

    def __init__(
        self,
        heads: int,
        horizon: float = 1.0,
        steps: int = 1,
        step: str = "euler",
        train_beta: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.one_of("step", step, tuple(STEPS))
        checks.whole("heads", heads)
        checks.whole("steps", steps)
        checks.positive_finite("horizon", horizon)
        checks.flags(train_beta=train_beta)
        checks.made_with(dtype, device)
        memory.require_tensor(heads, dtype=dtype, device=device)
        self.heads, self.horizon, self.steps, self.step, self.train_beta = heads, horizon, int(steps), step, train_beta
        zero = torch.zeros(heads, device=device, dtype=dtype)
        if train_beta:
            self.log_beta_factor = nn.Parameter(zero)
        else:
            self.register_buffer("log_beta_factor", zero)

    @property
    def beta_factor(self) -> Tensor:
        """(heads,), with its gradient."""
        return self.log_beta_factor.exp()

    @beta_factor.setter
    def beta_factor(self, beta_factor: float | Tensor) -> None:
        factor = torch.as_tensor(beta_factor, dtype=torch.float64)
        if not bool((torch.isfinite(factor) & (factor >= 0)).all()) or (self.train_beta and not bool(factor.all())):
            least = "above 0" if self.train_beta else "from 0"
            raise ValueError(f"beta_factor = {factor.tolist()}, expected finite numbers {least}.")
        with torch.no_grad():
            self.log_beta_factor.copy_(factor.log().expand(self.heads))

    def at(self, layer: int | None = None) -> Tensor:
        return self.beta_factor

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, horizon={self.horizon}, steps={self.steps}, step={self.step}, "
            f"train_beta={self.train_beta}"
        )


def replace_attention(
    model: nn.Module,
    layers: int | Iterable[int] | None = None,
    *,
    beta: float | Tensor | None = None,
    beta_factor: float | Tensor | None = None,
    horizon: float = 1.0,
    steps: int = 1,
    step: str = "euler",
    train_beta: bool = False,
) -> nn.Module:
    """Makes the attention of some layers the flow of their own weights, for good: to fine-tune, save and load.

    model: a known encoder, or what holds one, such as a BertForSequenceClassification. It is changed in place.
    layers: their indices; all by default. A shared block (ALBERT) has one flow for all its firings.
    beta: inverse temperature of the scores, a number or one per head; beta_factor: the same as a multiple of the
        trained one. Neither: as trained.
    horizon, steps, step: x(horizon) of x' = A(x) in so many steps of "euler", "rk4" or "dopri5" (1, 4 or 7 attentions
        each). By default one Euler step of size one, which is the pretrained layer.
    train_beta: make beta a parameter (its logarithm, one per head).

    Returns the model itself. All weights keep their names; `model.save_pretrained(folder)` and `load(folder)` keep the
    flow. Dropout, where the model trains with it, is drawn anew in every evaluation of the attention. Caches of keys
    and values are refused where a step evaluates twice: pass use_cache=False.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model = replace_attention(tiny_bert()[0], layers=[1], steps=4, step="rk4", beta_factor=2.0, train_beta=True)
        >>> flows(model)
        {1: LayerFlow(heads=2, horizon=1.0, steps=4, step=rk4, train_beta=True)}
        >>> [name for name, _ in model.named_parameters() if "attn_flow" in name]
        ['encoder.layer.1.attention.self.attn_flow.log_beta_factor']
    """
    refuse_to_change(model)
    found = blocks(model)
    chosen = chosen_layers(found, layers)
    if beta is not None and beta_factor is not None:
        raise ValueError(f"beta = {beta} and beta_factor = {beta_factor}: expected one of them at most.")
    checks.one_of("step", step, tuple(STEPS))
    fixed_step(step, steps, horizon)
    for block in found:
        together = [b.index for b in found if b.module is block.module]
        if block.index in chosen and not set(together) <= set(chosen):
            raise ValueError(
                f"layer {block.index} shares its block with layers {together}, which has one flow for all of them; "
                "expected all or none of them in `layers`."
            )
        if block.index in chosen and has_flow(block):
            raise ValueError(f"{block.path} is a flow already; set `flows(model)[{block.index}].beta_factor`.")
    for block in {id(found[i].module): found[i] for i in chosen}.values():
        flow = _flow(block, horizon, steps, step, train_beta)
        if beta is not None or beta_factor is not None:
            flow.beta_factor = factor_of(block, beta, beta_factor)
        block.attn.add_module(ENTRY, flow)
        attach_flow(block, flow)
    _note(model, {"layers": chosen, "horizon": horizon, "steps": int(steps), "step": step, "train_beta": train_beta})
    return model


def _flow(block: Block, horizon: float, steps: int, step: str, train_beta: bool) -> LayerFlow:
    like = next(block.attn.parameters())
    return LayerFlow(block.heads, horizon, steps, step, train_beta, device=like.device, dtype=like.dtype)


def attach_flow(block: Block, flow: LayerFlow) -> None:
    """The flow at work in its block."""
    with ExitStack() as stack:
        stack.enter_context(padded(block.root))
        scale_queries(stack, block, flow)
        stepper = STEPS[flow.step]
        WrappedAttention(block, None, None, flow.steps, flow.horizon, stepper).attach(stack)
        stack.pop_all()  # nobody will remove them


def has_flow(block: Block) -> bool:
    return isinstance(getattr(block.attn, ENTRY, None), LayerFlow)


def _note(model: Any, entry: dict[str, Any]) -> None:
    """An entry in the config that save_pretrained will write; torch's own modules have none."""
    while model is not None and not hasattr(model, "save_pretrained"):
        model = inside(model)
    if model is None or getattr(model, "config", None) is None:
        return
    setattr(model.config, ENTRY, [*(getattr(model.config, ENTRY, None) or []), entry])


def flows(model: nn.Module) -> dict[int, LayerFlow]:
    """The flows of a model's replaced layers.

    model: a known encoder, or what holds one. Returns layer: LayerFlow; empty if none was replaced. A shared block's
    layers have one flow.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model = replace_attention(tiny_bert()[0], beta_factor=2.0)
        >>> [flow.beta_factor.tolist() for flow in flows(model).values()]
        [[2.0, 2.0], [2.0, 2.0]]
    """
    return {block.index: getattr(block.attn, ENTRY) for block in blocks(model) if has_flow(block)}


def load(path: str | Path, *, dtype: torch.dtype | str = "auto", remote_code: bool = False) -> Any:
    """A model whose attention was replaced, from the folder that `save_pretrained` wrote: model and flow exactly.

    path: the folder. dtype: of the weights, the saved one by default. remote_code: as in `load_encoder`.

    Returns the model in evaluation mode, of the class that was saved. ValueError for a folder without a flow.

    Example:
        >>> import tempfile
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model = replace_attention(tiny_bert()[0], layers=[1], steps=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     again = load(folder)
        >>> flows(again)
        {1: LayerFlow(heads=2, horizon=1.0, steps=4, step=euler, train_beta=False)}
    """
    import transformers

    checks.instance("path", path, (str, os.PathLike), "the name of a folder")
    if not (Path(path) / "config.json").is_file():
        raise ValueError(f"{path} has no config.json; expected a folder written by save_pretrained.")
    config = pretrained(transformers.AutoConfig, path, remote_code)
    if not getattr(config, ENTRY, None):
        raise ValueError(f"{path}: its config has no entry {ENTRY!r}; it is a plain model, load it by from_pretrained.")
    name = str((config.architectures or [""])[0])
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(f"{path} holds a {name or 'model of no name'}, which is no model that transformers knows.")
    if kind.config_class is not type(config):
        raise ValueError(f"{path} holds a {name} with a {type(config).__name__}, which do not go together.")
    return restored(kind, config, path, dtype=dtype)


def restored(kind: Any, config: Any, path: str | Path, **options: Any) -> Any:
    """kind.from_pretrained(path) with the flows of the config in place before the weights are read."""
    entries = getattr(config, ENTRY)
    known = {"layers", "horizon", "steps", "step", "train_beta"}
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and set(entry) <= known for entry in entries):
        raise ValueError(f"{path}: the entry {ENTRY!r} of its config is not one that replace_attention wrote.")

    class WithFlows(kind):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            setattr(config, ENTRY, None)
            setattr(self.config, ENTRY, None)
            for entry in entries:
                replace_attention(self, **entry)
            self.__class__ = kind  # how weights are renamed on loading depends on it

    WithFlows.__name__ = kind.__name__
    model = pretrained_model(WithFlows, path, config=config, **{"use_safetensors": True, **options})
    # Weights mapped from a file begin at any address, and matrix products then round otherwise: another last bit.
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model.eval()
