"""The law carried through the whole encoder: attention replaced in every layer, so that errors compound.

Embeddings, norms and feed-forward parts stay as trained; what each layer's attention adds to the residual stream is
what a closure (or a null) predicts from the states it has itself brought about. Clouds are compared level by level,
and the mean-pooled embeddings at the end.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from attn_flow.hooks.attachment import evaluation_mode, input_states, with_hidden_states
from attn_flow.hooks.inputs import pieces
from attn_flow.hooks.layout import Block, encoder_inside
from attn_flow.hooks.recorder import ActivationCache, recording
from attn_flow.hooks.temperature import scale_beta
from attn_flow.nn.stack import DeepStack
from attn_flow.probe.closures import LADDER, ORACLE_STEP, Closure
from attn_flow.probe.clouds import Clouds, record_clouds
from attn_flow.probe.nulls import DEPTH_NULLS, Prediction, by_closure, by_null
from attn_flow.probe.stacks import own_drift, record_stack, run_stack, stack_inputs
from attn_flow.probe.transports import solver, w2


@dataclass(frozen=True, eq=False)
class Propagated:
    """One prediction carried through depth, against the encoder itself.

    w2: W2 between predicted and true cloud over W2 between different texts, (levels, texts), levels 1 to L.
    embedding_cosine (texts,): of the mean-pooled embeddings. neighbour_agreement (texts,): 1 where a text has the same
    nearest other text. rank_correlation (): Spearman's, of the similarities of all pairs of texts (NaN below 3 texts).
    """

    w2: Tensor
    embedding_cosine: Tensor
    neighbour_agreement: Tensor
    rank_correlation: Tensor


@dataclass(frozen=True, eq=False)
class Passes:
    """Texts through an encoder: states[text][level] (n, d), level 0 the input of the first block, and embeddings."""

    states: list[list[Tensor]]
    embeddings: Tensor  # (texts, d) unit vectors


@dataclass(frozen=True, eq=False)
class Bench:
    """An encoder and texts, run once as they are; `score` runs them again with a prediction in every layer."""

    model: nn.Module
    source: Any
    texts: Sequence[str] | None
    clouds: Clouds
    true: Passes
    between: Tensor  # (levels,) W2 between different texts, the unit of distances
    max_length: int | None
    beta_factor: float
    batch: int
    transport: str

    def score(self, predict: Prediction, start: Any = None) -> Propagated:
        """Carry a prediction through depth; `start(text)` gives other states (n, d) to start from."""
        return compare_passes(self.run(predict, start), self.true, self.between, self.transport)

    def run(self, predict: Prediction | None, start: Any = None) -> Passes:
        return _run(
            self.model,
            self.source,
            self.texts,
            self.clouds,
            predict,
            start,
            self.max_length,
            self.batch,
            self.beta_factor,
        )


def propagate(
    model: nn.Module,
    source: Any,
    texts: Iterable[str] | None = None,
    closure: str | Closure | Prediction = "quantised_closure",
    *,
    max_length: int | None = None,
    transport: str = "auto",
    batch: int = 16,
    seed: int = 0,
) -> Propagated:
    """Run an encoder with attention replaced in every layer, and compare it with itself.

    model, source, texts: as `probe` takes them (an encoder, its tokenizer, texts; or an encoder and ready inputs).
    closure: the name of a closure (LADDER), of a null (NULLS) or "oracle", a `Closure`, or a function
    (space, layer, text) -> output (n, d). max_length: tokens kept of each text. transport: "exact", "geomloss" or
    "auto" (geomloss on CUDA). Returns a `Propagated`; distances are in units of the distance between texts.

    >>> from attn_flow.hooks.demo import minilm, topics
    >>> texts = [text for text in topics() if len(text) > 900][:2]
    >>> found = propagate(*minilm(), texts, "quantised_closure", max_length=40)
    >>> bool(found.embedding_cosine.min() > 0.9)
    True
    """
    model = encoder_inside(model)
    texts = None if texts is None else list(texts)
    if isinstance(model, DeepStack):
        clouds = record_stack(model, source)
    else:
        clouds = record_clouds(model, source, texts, batch, max_length)
    laid = bench(model, source, texts, clouds, max_length, 1.0, batch, transport)
    with torch.no_grad():
        return laid.score(_prediction(closure, clouds, torch.Generator().manual_seed(seed)))


def bench(
    model: nn.Module,
    source: Any,
    texts: Sequence[str] | None,
    clouds: Clouds,
    max_length: int | None = None,
    beta_factor: float = 1.0,
    batch: int = 16,
    transport: str = "auto",
) -> Bench:
    """The encoder's own passes over the texts that `clouds` kept, and the distances between different texts."""
    method = solver(transport, clouds.z[0][0].device)
    source, texts = chosen_inputs(source, texts, clouds.kept)
    with torch.no_grad():
        true = _run(model, source, texts, clouds, None, None, max_length, batch, beta_factor)
        T, levels = len(true.states), len(true.states[0])
        pairs = [(i, (i + 1) % T) for i in range(T)] if T > 1 else []
        between = torch.full((levels,), torch.nan, dtype=torch.float64)
        for level in range(levels if pairs else 0):
            apart = [w2(true.states[i][level], true.states[j][level], method) for i, j in pairs]
            between[level] = sum(apart) / len(apart)
    return Bench(model, source, texts, clouds, true, between, max_length, beta_factor, batch, method)


def compare_passes(found: Passes, true: Passes, between: Tensor, method: str = "auto") -> Propagated:
    """Distances of clouds level by level, and of embeddings."""
    levels, T = len(between), len(true.states)
    distances = torch.stack(
        [
            torch.tensor([w2(a[level], b[level], method) for a, b in zip(found.states, true.states)]) / between[level]
            for level in range(1, levels)
        ]
    )
    cosine = (found.embeddings * true.embeddings).sum(-1).double().cpu()
    similar = [(e @ e.mT).double().cpu() for e in (found.embeddings, true.embeddings)]
    nearest = [s.masked_fill(torch.eye(T, dtype=torch.bool), -torch.inf).argmax(-1) for s in similar]
    agree = (nearest[0] == nearest[1]).double() if T > 2 else torch.full((T,), torch.nan, dtype=torch.float64)
    i, j = np.triu_indices(T, 1)
    rank = spearmanr(*(s.numpy()[i, j] for s in similar))[0] if T > 2 else float("nan")
    return Propagated(distances.double(), cosine, agree, torch.tensor(float(rank), dtype=torch.float64))


def _prediction(closure: str | Closure | Prediction, clouds: Clouds, generator: torch.Generator) -> Prediction:
    if isinstance(closure, Closure):
        return by_closure(closure)
    if not isinstance(closure, str):
        return closure
    if closure in DEPTH_NULLS:
        return by_null(closure, clouds, generator, corpus_mean=True)
    steps = {**LADDER, ORACLE_STEP.name: ORACLE_STEP}
    if closure not in steps:
        raise ValueError(f"closure = {closure!r}, expected one of {', '.join([*steps, *DEPTH_NULLS])}.")
    return by_closure(steps[closure])


def chosen_inputs(source: Any, texts: Sequence[str] | None, kept: list[int]) -> tuple[Any, Sequence[str] | None]:
    """The same inputs, only the texts at these places."""
    if texts is not None:
        return source, [texts[i] for i in kept]
    if isinstance(source, Tensor):
        return source[kept], None
    if "src" in source:  # torch.nn.TransformerEncoder may carry its batch on the second axis: all texts or none
        return source, None
    n = next(iter(source.values())).shape[0]
    if len(kept) == n:
        return source, None
    return {k: t[kept] if isinstance(t, Tensor) and t.ndim and t.shape[0] == n else t for k, t in source.items()}, None


def _run(
    model: nn.Module,
    source: Any,
    texts: Sequence[str] | None,
    clouds: Clouds,
    predict: Prediction | None,
    start: Any,
    max_length: int | None,
    batch: int,
    beta_factor: float,
) -> Passes:
    if isinstance(model, DeepStack):
        return _run_through(model, stack_inputs(source), clouds, predict, start)
    states: list[list[Tensor]] = []
    pooled = []
    tokenizer = source if texts is not None else None
    with (
        recording(model, "resid") as cache,
        evaluation_mode(model),
        _temperature(model, beta_factor),
        ExitStack() as stack,
    ):
        now: dict[str, Any] = {"first": 0}
        if predict is not None:
            stack.enter_context(_replaced(cache, clouds, predict, now))
        if start is not None:
            stack.enter_context(_restarted(cache, start, now))
        device = next(model.parameters()).device
        options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
        for piece in pieces(model, source, texts, batch, max_length):
            part = piece.make()
            now["batch"], now["tokenizer"] = part, tokenizer
            out = model(**{name: t.to(device) for name, t in part.inputs.items()}, **options)
            mask = cache.mask
            levels = [cache[name] for name in cache.points]
            last = getattr(out, "last_hidden_state", None)
            last = levels[-1] if last is None or last.shape != levels[-1].shape else last
            for b in range(len(mask)):
                states.append([x[b][mask[b]] for x in levels])
                mean = last[b][mask[b]].mean(0)
                pooled.append(mean / mean.norm())
            now["first"] += len(mask)
    return Passes(states, torch.stack(pooled))


def _run_through(stack: DeepStack, ids: Tensor, clouds: Clouds, predict: Prediction | None, start: Any) -> Passes:
    """A stack's passes: what a prediction says is the drift at every step of every layer."""

    def drift(layer: int, text: int, x: Tensor) -> Tensor:
        assert predict is not None  # else the stack's own drift is used
        return predict(clouds.seen_by(layer, x, clouds.special[text]), layer, text)

    used = own_drift(clouds.attentions) if predict is None else drift
    begin = lambda text: None if start is None else start(text)
    states = [run_stack(stack, ids[text], used, text, begin(text)) for text in range(len(ids))]
    means = torch.stack([levels[-1].mean(0) for levels in states])
    return Passes(states, means / means.norm(dim=-1, keepdim=True))


def _temperature(model: nn.Module, factor: float) -> Any:
    return nullcontext() if factor == 1 else scale_beta(model, factor)


@contextmanager
def _replaced(cache: ActivationCache, clouds: Clouds, predict: Prediction, now: dict[str, Any]) -> Iterator[None]:
    """What every layer's attention adds to the residual stream is what `predict` says, text by text."""
    entered: dict[str, Tensor] = {}

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered["z"] = input_states(args, kwargs)

    def leave(_: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        if not cache.clock.is_running:
            return out
        z, layer = cache.batch_first(entered["z"]), cache.clock.layer
        mask, special = cache.kept_tokens(now["batch"], True, now["tokenizer"])
        drift = torch.zeros_like(z)
        for b in range(len(z)):
            space = clouds.seen_by(layer, z[b][mask[b]], special[b][mask[b]])
            drift[b, mask[b]] = predict(space, layer, now["first"] + b).to(z.dtype)
        return with_hidden_states(out, cache.batch_first(drift))

    with ExitStack() as stack:
        for block in _distinct(cache.blocks):
            layout = block.architecture
            stack.callback(block.attn.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(block[layout.emit or layout.attn].register_forward_hook(leave).remove)
        yield


@contextmanager
def _restarted(cache: ActivationCache, start: Any, now: dict[str, Any]) -> Iterator[None]:
    """Other tokens at the input of the first block."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not cache.clock.is_running or cache.clock.layer != 0:
            return None
        x = input_states(args, kwargs)
        fresh, mask = cache.batch_first(x).clone(), cache.mask
        for b in range(len(fresh)):
            fresh[b, mask[b]] = start(now["first"] + b).to(x.dtype)
        fresh = cache.batch_first(fresh)
        cache["blocks.0.hook_in"] = cache.batch_first(fresh)
        return tuple(fresh if a is x else a for a in args), {k: fresh if v is x else v for k, v in kwargs.items()}

    with ExitStack() as stack:
        stack.callback(cache.blocks[0].module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        yield


def _distinct(found: list[Block]) -> list[Block]:
    return list({id(block.module): block for block in found}.values())
