"""An encoder whose attention is replaced in every layer, compared with the encoder itself.

Embeddings, norms and feed-forward parts stay as trained. What attention adds in each layer is predicted from the tokens
that the predictions themselves have produced, so that errors accumulate through depth.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from attn_flow.hooks.layout import distinct, evaluation_mode, input_states, with_hidden_states
from attn_flow.hooks.recorder import ActivationCache, recording
from attn_flow.transport.distances import CertificateError, wasserstein

if TYPE_CHECKING:
    from attn_flow.probe.recording import Predict, Recording

GEOMLOSS_RTOL = 0.2  # what geomloss may leave unproved: in hundreds of dimensions its bound is wide, its value good


@dataclass(frozen=True, eq=False)
class Passes:
    """What an encoder makes of the texts of a recording, as it is or with its attention replaced."""

    recording: Recording
    outputs: list[Tensor]  # tokens after the last block, [text] (n, d)
    embeddings: Tensor  # (texts, d), unit vectors

    @cached_property
    def between(self) -> float:
        """The mean W2 between the outputs of different texts, the unit of distances; NaN if there is none."""
        pairs = zip(self.outputs, self.outputs[1:] + self.outputs[:1])
        return sum(w2(a, b) for a, b in pairs) / len(self.outputs) or torch.nan  # one text, or equal texts

    def compare(self, predict: Predict) -> tuple[Tensor, Tensor]:
        """W2 of replaced attention to these outputs, in units of `between`, and cosine of embeddings, (texts,) each."""
        passes = run(self.recording, predict)
        distances = torch.tensor([w2(a, b) for a, b in zip(passes.outputs, self.outputs)], dtype=torch.float64)
        return distances / self.between, (passes.embeddings * self.embeddings).sum(-1).double().cpu()


def prepare_replacement(recording: Recording) -> Passes:
    """A recorded encoder, run as it is to be compared with replaced attention."""
    return run(recording, None)


def w2(x: Tensor, y: Tensor, method: str = "auto") -> float:
    """W2 between two clouds of tokens: "exact", by "geomloss", or "auto": exact on a CPU, geomloss on other devices.

    Where geomloss cannot prove its distance to 20%, as for clouds that are equal but for rounding, it is exact.

    Example:
        >>> w2(torch.zeros(3, 2), torch.tensor([[3.0, 4.0]]).expand(3, 2))
        5.0
    """
    if method == "geomloss" or (method == "auto" and x.device.type != "cpu"):
        try:
            return float(wasserstein(x, y, method="sinkhorn", rtol=GEOMLOSS_RTOL))
        except CertificateError:
            pass
    x, y = x.cpu(), y.cpu()
    if len(x) != len(y):
        return float(wasserstein(x, y))
    # `wasserstein` proves its error, which takes 20 times longer.
    cost = torch.cdist(x.double(), y.double()).square().numpy()
    return float(cost[linear_sum_assignment(cost)].mean() ** 0.5)


@torch.no_grad()
def run(recorded: Recording, predict: Predict | None) -> Passes:
    """The encoder on the texts of a recording, with `predict` in place of attention in every layer if it is given."""
    inputs = recorded.inputs
    assert inputs is not None  # of every recording that was made from a model
    dtype = recorded.states[0][0].dtype  # float32 of a model in half precision
    options = {"use_cache": False} if "use_cache" in inspect.signature(inputs.model.forward).parameters else {}
    outputs: list[Tensor] = []
    embeddings: list[Tensor] = []
    with recording(inputs.model, "resid") as cache, evaluation_mode(inputs.model):
        for batch, rows in recorded.batches:
            with inputs.scaled() if predict is None else _replace_outputs(cache, recorded, predict, rows):
                output = inputs.model(**batch, **options)
            level, mask = cache[cache.points[-1]], cache.mask
            last = getattr(output, "last_hidden_state", None)
            last = level if last is None or last.shape != level.shape else last
            outputs += [level[row][mask[row]].to(dtype) for row in rows]
            embeddings += [last[row][mask[row]].to(dtype).mean(0) for row in rows]
    return Passes(recorded, outputs, nn.functional.normalize(torch.stack(embeddings), dim=-1))


@contextmanager
def _replace_outputs(
    cache: ActivationCache, recorded: Recording, predict: Predict, rows: dict[int, int]
) -> Iterator[None]:
    """Replace what every layer's attention adds to some rows of a batch: row -> text of the recording."""
    entered: list[Tensor] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered[:] = [input_states(args, kwargs)]

    def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not cache.clock.is_running:
            return output
        x, mask, layer = cache.batch_first(entered[0]), cache.mask, cache.clock.layer
        added = torch.zeros_like(x)
        for row, text in rows.items():
            heads = recorded.heads(layer, text, x[row][mask[row]].to(recorded.states[layer][text].dtype))
            added[row, mask[row]] = predict(heads, layer, text).to(x.dtype)
        return with_hidden_states(output, cache.batch_first(added))

    with ExitStack() as stack:
        for block in distinct(cache.blocks):
            layout = block.architecture
            stack.callback(block.attn.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(block[layout.emit or layout.attn].register_forward_hook(leave).remove)
            for linear in {block[path] for path in (layout.q, layout.k, layout.v, layout.o)}:
                # What it would compute is thrown away, unless positions are read from it or accelerate loads it.
                if type(linear) is nn.Linear and layout.score_terms is None and "forward" not in vars(linear):
                    zeros = lambda x, width=linear.out_features: x.new_zeros(*x.shape[:-1], width)
                    vars(linear)["forward"] = zeros
                    stack.callback(delattr, linear, "forward")
        yield
