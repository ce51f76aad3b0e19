"""An encoder whose attention is replaced in every layer, compared with the encoder itself.

Embeddings, norms and feed-forward parts stay as trained. What attention adds in each layer is predicted from the tokens
that the predictions themselves have produced, so that errors accumulate through depth.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from attn_flow.base.checks import require_choice
from attn_flow.hooks.inputs import pieces
from attn_flow.hooks.layout import encoder_inside, evaluation_mode, input_states, with_hidden_states
from attn_flow.hooks.recorder import ActivationCache, recording
from attn_flow.hooks.wrapping import scale_beta
from attn_flow.nn.stack import DeepStack
from attn_flow.probe.recording import Heads, Recording
from attn_flow.probe.stacks import run_stack, stack_inputs
from attn_flow.transport import CertificateError, wasserstein

Predict = Callable[[Heads, int, int], Tensor]  # (heads of a text as it is now, layer, text) -> what attention adds

GEOMLOSS_RTOL = 0.2  # what geomloss may leave unproved: in hundreds of dimensions its bound is wide, its value good


@dataclass(frozen=True, eq=False)
class Passes:
    """What an encoder makes of texts.

    Args:
        outputs: [text] (n, d), the tokens after the last block.
        embeddings: (texts, d), the mean-pooled outputs as unit vectors.
    """

    outputs: list[Tensor]
    embeddings: Tensor


@dataclass(frozen=True, eq=False)
class Replacement:
    """An encoder with the texts of a recording, run once as it is; see `prepare_replacement`.

    Args:
        recording: the texts; a `Predict` gets their indices in it.
        true: the passes of the encoder itself.
        between: the mean W2 between the outputs of different texts, the unit of distances; NaN if there is none.
    """

    model: nn.Module
    source: Any
    texts: Sequence[str] | None
    recording: Recording
    true: Passes
    between: float
    batch: int
    max_length: int | None
    beta_factor: float

    def first(self, texts: int) -> Replacement:
        """The first few texts, with the same unit of distances."""
        texts = min(texts, self.recording.texts)
        source, chosen = _select_inputs(self.model, self.source, self.texts, list(range(texts)))
        true = Passes(self.true.outputs[:texts], self.true.embeddings[:texts])
        return replace(self, source=source, texts=chosen, recording=self.recording.first(texts), true=true)

    def run(self, predict: Predict) -> Passes:
        """The passes of the encoder with `predict` in place of attention in every layer."""
        return _run(self.model, self.source, self.texts, self.recording, predict, self.batch, self.max_length)

    def compare(self, predict: Predict) -> tuple[Tensor, Tensor]:
        """W2 to the encoder's own output in units of `between`, and the cosine of the embeddings, (texts,) each."""
        passes = self.run(predict)
        distances = torch.tensor([w2(a, b) for a, b in zip(passes.outputs, self.true.outputs)], dtype=torch.float64)
        return distances / self.between, (passes.embeddings * self.true.embeddings).sum(-1).double().cpu()


def prepare_replacement(
    model: nn.Module,
    source: Any,
    texts: Sequence[str] | None,
    recording: Recording,
    *,
    batch: int = 16,
    max_length: int | None = None,
    beta_factor: float = 1.0,
) -> Replacement:
    """Run an encoder as it is on the texts of a recording, and measure the distances between different texts.

    Args:
        model: a known encoder, or something that holds one.
        source, texts: the tokenizer and all texts, or the model's own inputs and None, as they were recorded.
        recording: the recording of the model, or its first texts (`recording.first`).
        batch: number of texts in a forward pass.
        max_length, beta_factor: as they were recorded.

    Returns:
        A `Replacement`, whose `compare(predict)` runs the encoder with another attention.

    Example:
        >>> from attn_flow.hooks.demo import minilm, topics
        >>> from attn_flow.probe.recording import record_encoder
        >>> (model, tokenizer), texts = minilm(), [text[:300] for text in topics() if len(text) > 900][:2]
        >>> encoder = prepare_replacement(model, tokenizer, texts, record_encoder(model, tokenizer, texts))
        >>> distances, cosines = encoder.compare(lambda heads, layer, text: heads.combine(heads.averages))
        >>> bool(distances.max() < 1e-3), bool(cosines.min() > 0.9999)
        (True, True)
    """
    model = encoder_inside(model)
    source, texts = _select_inputs(model, source, texts, recording.indices)
    true = _run(model, source, texts, recording, None, batch, max_length, beta_factor)
    pairs = zip(true.outputs, true.outputs[1:] + true.outputs[:1])
    between = sum(w2(a, b) for a, b in pairs) / len(true.outputs) or torch.nan  # one text, or equal texts
    return Replacement(model, source, texts, recording, true, between, batch, max_length, beta_factor)


def w2(x: Tensor, y: Tensor, method: str = "auto") -> float:
    """W2 between two clouds of tokens: "exact", by "geomloss", or "auto": exact on a CPU, geomloss on other devices.

    Clouds of equally many tokens are an assignment problem, which scipy solves exactly; a proof of it costs 25 times as
    much. Where geomloss cannot prove its distance to 20%, as for clouds that are equal but for rounding, it is exact.

    Example:
        >>> w2(torch.zeros(3, 2), torch.tensor([[3.0, 4.0]]).expand(3, 2))
        5.0
    """
    require_choice("method", method, ("auto", "exact", "geomloss"))
    if method == "geomloss" or (method == "auto" and x.device.type != "cpu"):
        try:
            return float(wasserstein(x, y, method="sinkhorn", rtol=GEOMLOSS_RTOL))
        except CertificateError:
            pass
    x, y = x.cpu(), y.cpu()
    if len(x) != len(y):
        return float(wasserstein(x, y))
    cost = torch.cdist(x.double(), y.double(), compute_mode="donot_use_mm_for_euclid_dist").square().numpy()
    return float(cost[linear_sum_assignment(cost)].mean() ** 0.5)


def _select_inputs(model: nn.Module, source: Any, texts: Sequence[str] | None, indices: list[int]) -> tuple[Any, Any]:
    """The inputs of the texts at these indices."""
    if texts is not None:
        return source, [texts[i] for i in indices]
    if isinstance(model, DeepStack):
        return stack_inputs(source)[indices], None
    if isinstance(source, Tensor):
        if not isinstance(model, nn.TransformerEncoder):
            return source[indices], None
        source = {"src": source}
    layers: Any = getattr(model, "layers", None)
    axis = 1 if "src" in source and not layers[0].self_attn.batch_first else 0  # torch's encoder may take (n, texts, d)
    leading = next(iter(source.values())).shape[axis]
    select = lambda name, t: t.transpose(0, 1)[indices].transpose(0, 1) if axis and name == "src" else t[indices]
    is_by_text = lambda name, t: name != "mask" and t.ndim > 1 and (name == "src" or t.shape[0] == leading)
    return {name: select(name, t) if is_by_text(name, t) else t for name, t in source.items()}, None


@torch.no_grad()
def _run(
    model: nn.Module,
    source: Any,
    texts: Sequence[str] | None,
    recorded: Recording,
    predict: Predict | None,
    batch: int,
    max_length: int | None,
    beta_factor: float = 1.0,
) -> Passes:
    """The passes of all texts, with the model's own attention if `predict` is None."""
    outputs: list[Tensor] = []
    if isinstance(model, DeepStack):
        outputs = [run_stack(model, ids, _stack_drift(recorded, predict, text)) for text, ids in enumerate(source)]
        return Passes(outputs, nn.functional.normalize(torch.stack([x.mean(0) for x in outputs]), dim=-1))
    embeddings: list[Tensor] = []
    device = next(model.parameters()).device
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    with (
        recording(model, "resid") as cache,
        evaluation_mode(model),
        nullcontext() if beta_factor == 1 else scale_beta(model, beta_factor),
        nullcontext() if predict is None else _replace_outputs(cache, recorded, predict, outputs),
    ):
        for piece in pieces(model, source, texts, batch, max_length):
            output = model(**{name: t.to(device) for name, t in piece.make().inputs.items()}, **options)
            level, mask = cache[cache.points[-1]], cache.mask
            last = getattr(output, "last_hidden_state", None)
            last = level if last is None or last.shape != level.shape else last
            outputs += [level[row][mask[row]] for row in range(len(mask))]
            embeddings += [last[row][mask[row]].mean(0) for row in range(len(mask))]
    return Passes(outputs, nn.functional.normalize(torch.stack(embeddings), dim=-1))


@contextmanager
def _replace_outputs(
    cache: ActivationCache, recorded: Recording, predict: Predict, finished: Sequence[Any]
) -> Iterator[None]:
    """Replace what every layer's attention adds, text by text. `finished` has one entry per text of earlier batches."""
    entered: list[Tensor] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered[:] = [input_states(args, kwargs)]

    def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not cache.clock.is_running:
            return output
        x, mask, layer = cache.batch_first(entered[0]), cache.mask, cache.clock.layer
        added = torch.zeros_like(x)
        for row in range(len(x)):
            text = len(finished) + row
            heads = recorded.heads_of(layer, x[row][mask[row]], recorded.special[text])
            added[row, mask[row]] = predict(heads, layer, text).to(x.dtype)
        return with_hidden_states(output, cache.batch_first(added))

    with ExitStack() as stack:
        for block in {id(block.module): block for block in cache.blocks}.values():
            layout = block.architecture
            stack.callback(block.attn.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(block[layout.emit or layout.attn].register_forward_hook(leave).remove)
        yield


def _stack_drift(recorded: Recording, predict: Predict | None, text: int) -> Callable[[int, Tensor], Tensor]:
    """The drift of a layer of a stack at every step: attention, or what is predicted in its place."""
    if predict is None:
        return lambda layer, x: recorded.attentions[layer].drift(x)
    return lambda layer, x: predict(recorded.heads_of(layer, x, recorded.special[text]), layer, text)
