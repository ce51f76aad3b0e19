"""Is a trained encoder a mean-field flow? Layer by layer and through depth, with nulls and error bars.

A module for each question: closures and nulls against what a layer computes (closures, nulls, agreement), carried
through the whole encoder (propagation), from the law alone (law_alone), towards the limiting law (limit_law), head by
head (heads), cloud by cloud (evolution), token by token (reading). Everything is kept text by text, so that intervals
come from a bootstrap over texts. Every stage has its own file, generator and place, so that a probe that was killed
and continued equals one that was not.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attn_flow.base import checks
from attn_flow.base.files import read_tensors, versions, write_tensors
from attn_flow.base.processes import ALONE, Processes
from attn_flow.base.progress import progress_bar
from attn_flow.base.threads import limit_threads
from attn_flow.hooks.fingerprints import fingerprint
from attn_flow.hooks.inputs import length_limit, pieces, row_texts
from attn_flow.hooks.layout import blocks, encoder_inside
from attn_flow.hooks.self_check import self_check
from attn_flow.hooks.weights import encoder_facts
from attn_flow.measures import UniformSphere
from attn_flow.nn.stack import DeepStack
from attn_flow.probe import nulls as null_models
from attn_flow.probe.agreement import Agreement
from attn_flow.probe.closures import Closure
from attn_flow.probe.clouds import Clouds, record_clouds
from attn_flow.probe.evolution import cloud_evolution, evolution_of_all, token_view
from attn_flow.probe.head_space import HeadSpace
from attn_flow.probe.heads import head_regimes
from attn_flow.probe.law_alone import carry_law
from attn_flow.probe.limit_law import approach_to_limits
from attn_flow.probe.nulls import (
    CONTROLS,
    CROSS_FITTED,
    DEPTH_NULLS,
    LAYER_NULLS,
    NULLS,
    Prediction,
    agreement_of,
    by_closure,
    by_control,
    by_null,
    cross_fitted,
    main_closure,
    steps,
)
from attn_flow.probe.positions import omitted_shares
from attn_flow.probe.propagation import Bench, Propagated, bench, chosen_inputs
from attn_flow.probe.reading import read_tokens
from attn_flow.probe.result import BY_NAME, SINGLE, Probe
from attn_flow.probe.stacks import check_stack, chosen_rows, record_stack, stack_facts
from attn_flow.probe.transports import solver, transport_check

LAYER_TEXTS = 16  # texts on which closures and nulls are compared layer by layer
DEPTH_TEXTS = 16  # texts carried through depth
INSIDE = 0.01  # of the variance of a layer's logits: places that leave more unexplained were misread
RUNS_MODEL = ("propagation", "law_alone", "nulls/untrained")  # stages that run an encoder: one after the other
SHARED = {"evolution": evolution_of_all}  # stages that look at every text: processes share out these
EXTRA = {
    CROSS_FITTED: "atoms of the heads, found without the query",
    "sphere": "full sphere, zero temperature",
}


def probe(
    model: nn.Module,
    source: Any,
    texts: Iterable[str] | None = None,
    *,
    nulls: Sequence[str] = tuple(NULLS),
    max_length: int | None = 160,
    batch: int = 16,
    beta_factor: float = 1.0,
    seed: int = 0,
    transport: str = "auto",
    max_unknown: float = 0.1,
    progress: bool = False,
    parts: str | Path | None = None,
    world: Processes = ALONE,
) -> Probe:
    """Probe an encoder on texts: `probe(model, tokenizer, texts)`, or `probe(model, inputs)` with ready inputs.

    model: a known encoder, or what holds one, or a `DeepStack` with its ids or vectors (texts, n, ...) as inputs.
    nulls: which nulls to run (see NULLS; () for none). max_length: tokens kept of each text, at most what the model
    takes (None: as many). batch: texts in a forward pass. beta_factor: on the trained inverse temperature; the model
    itself runs colder (above 1) or warmer. seed: of every random null and of the bootstrap. transport: "exact",
    "geomloss" or "auto" (geomloss on CUDA). max_unknown: the share of tokens unknown to the tokenizer above which texts
    are refused.
    parts: a folder where finished stages are kept, so that the same call continues after a kill.
    world: `attn_flow.base.processes.processes()`, which share the work; each returns the whole answer.
    Returns a `Probe`: `findings()`, `rows()`, `as_json()`, `plot()`, `save(folder)`.

    >>> from attn_flow.hooks.demo import minilm, topics
    >>> texts = [text for text in topics() if len(text) > 900][:2]
    >>> result = probe(*minilm(), texts, max_length=40, nulls=["rotated"])
    >>> result.findings()[1].numbers["layers"]
    [0, 1, 2, 3, 4, 5]
    """
    asked = inquire(
        model,
        source,
        texts,
        nulls=nulls,
        max_length=max_length,
        batch=batch,
        beta_factor=beta_factor,
        seed=seed,
        transport=transport,
        max_unknown=max_unknown,
        world=world,
    )
    return asked.answer(parts, progress)


@dataclass(frozen=True, eq=False)
class Inquiry:
    """An encoder recorded on its texts, checked, and what is asked of it; `key` names its content, `answer` runs it."""

    model: nn.Module
    source: Any
    texts: list[str] | None
    clouds: Clouds
    about: dict[str, Any]
    world: Processes = ALONE

    @property
    def key(self) -> str:
        """Digest of the inputs, all weights, the options and the versions: equal keys, equal answers."""
        return self.about["key"]

    def answer(self, parts: str | Path | None = None, progress: bool = False) -> Probe:
        """Run every stage, or take it from its file in `parts`.

        With two threads or more on a CPU, the stages that run the encoder go beside those that do not. Several
        processes share out the stages, and in those of `SHARED`, which look at every text, the texts.
        """
        stages = self._stages()
        runs_model = [stage for stage in stages if stage.partition("/")[0] in RUNS_MODEL or stage in RUNS_MODEL]
        others = [stage for stage in stages if stage not in runs_model]
        whole = [stage for stage in runs_model + others if stage not in SHARED]  # both kinds evenly over processes
        own = {*whole[self.world.rank :: self.world.count], *SHARED}
        done: dict[str, Any] = {}
        stopped = threading.Event()
        with progress_bar("probe", len(own), progress and self.world.is_first) as advance:

            def run(lane: Iterable[str]) -> None:
                try:
                    with torch.no_grad():
                        for stage in lane:
                            if stopped.is_set():
                                return
                            if stage not in own:
                                continue
                            done[stage] = _kept(self._folder(parts, stage), stage, self.key, stages[stage])
                            advance(note=stage)
                except BaseException:
                    stopped.set()
                    raise

            threads = torch.get_num_threads()
            if self.about["device"] != "cpu" or threads < 2:
                run(stages)
            else:
                with limit_threads(threads // 2), ThreadPoolExecutor(1) as pool:
                    beside = pool.submit(run, runs_model)
                    run(others)
                    beside.result()
        if self.world.count > 1:
            done = _of_all(done, self.world)
        found: dict[str, Any] = {group: {} for group in BY_NAME}
        for stage in stages:
            group, _, name = stage.partition("/")
            if name:
                found[group][name] = done[stage]
            else:
                found[group] = done[stage]
        about = {**self.about, "order": {group: list(found[group]) for group in BY_NAME}}
        return Probe(about, **found, tokens=self.clouds.tokens)

    def _folder(self, parts: str | Path | None, stage: str) -> str | Path | None:
        """Where a stage is kept; one whose texts are shared out, apart for each process."""
        if parts is None or self.world.count == 1 or stage not in SHARED:
            return parts
        return Path(parts) / f"{self.world.rank}-of-{self.world.count}"

    @cached_property
    def _bench(self) -> Bench:
        about = self.about
        return bench(
            self.model,
            self.source,
            self.texts,
            self.clouds.first(DEPTH_TEXTS),
            about["max_length"],
            about["beta_factor"],
            about["batch"],
            about["transport"],
        )

    def _generator(self, stage: str) -> torch.Generator:
        """A stage's own randomness, whatever ran before it."""
        mixed = hashlib.sha256(f"{self.about['seed']}/{stage}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(mixed[:7], "big"))

    def _stages(self) -> dict[str, Callable[[], Any]]:
        clouds, few = self.clouds, self.clouds.first(LAYER_TEXTS)
        found: dict[str, Callable[[], Any]] = {}
        predictions = {name: by_closure(step) for name, step in steps(clouds).items()}
        if not clouds.partial:
            predictions[CROSS_FITTED] = cross_fitted
        for name, predict in predictions.items():
            found[f"closures/{name}"] = partial(agreement_of, few, predict)
            found[f"propagation/{name}"] = partial(self._through_depth, predict)
        for name in self.about["controls"]:
            for group in ("closures", "propagation"):
                found[f"{group}/{name}"] = partial(self._control, name, few if group == "closures" else None)
        found["closures/sphere"] = partial(agreement_of, few, _full_sphere)
        for name in self.about["nulls"]:
            if name in LAYER_NULLS:
                found[f"nulls/{name}"] = partial(self._null, name, few, self._generator(f"nulls/{name}"))
            if name in DEPTH_NULLS:
                found[f"propagation/{name}"] = partial(self._null_through_depth, name)
        method = solver(self.about["transport"], clouds.z[0][0].device)
        found["law_alone"] = lambda: carry_law(self._bench, self._generator("law_alone"))
        found["limits"] = lambda: approach_to_limits(clouds, self._generator("limits"), method)
        found["heads"] = lambda: head_regimes(clouds)
        found["evolution"] = lambda: cloud_evolution(clouds, self.world)
        found["view"] = lambda: token_view(clouds, self._generator("view"))
        found["transports"] = lambda: transport_check(clouds)
        found["reading"] = lambda: read_tokens(clouds)
        return found

    def _through_depth(self, predict: Prediction) -> Propagated:
        return self._bench.score(predict)

    def _control(self, name: str, few: Clouds | None) -> Agreement | Propagated:
        """A control layer by layer on a few texts, or through depth."""
        predict = by_control(name, self._generator(f"controls/{name}"))
        return self._through_depth(predict) if few is None else agreement_of(few, predict)

    def _null_through_depth(self, name: str) -> Propagated:
        generator = self._generator(f"propagation/{name}")
        return self._bench.score(by_null(name, self._bench.clouds, generator, corpus_mean=True))

    def _null(self, name: str, few: Clouds, generator: torch.Generator) -> Agreement:
        if name != "untrained":
            return agreement_of(few, by_null(name, few, generator))
        about = self.about
        twin = null_models.untrained_twin(self.model, about["seed"])
        if isinstance(twin, DeepStack):
            rows = chosen_rows(self.source, few.kept)
            return agreement_of(record_stack(twin, rows, about["beta_factor"]), by_closure(main_closure(few)))
        source, texts = chosen_inputs(self.source, self.texts, few.kept)
        recorded = record_clouds(
            twin, source, texts, about["batch"], about["max_length"], about["beta_factor"], max_unknown=1.0
        )
        return agreement_of(recorded, by_closure(main_closure(few)))


def inquire(
    model: nn.Module,
    source: Any,
    texts: Iterable[str] | None = None,
    *,
    nulls: Sequence[str] = tuple(NULLS),
    max_length: int | None = 160,
    batch: int = 16,
    beta_factor: float = 1.0,
    seed: int = 0,
    transport: str = "auto",
    max_unknown: float = 0.1,
    world: Processes = ALONE,
) -> Inquiry:
    """Record an encoder, check that its weights were read rightly, and name what is asked; arguments as `probe`'s.

    Raises if the weights read do not give what a layer computes, or if too many tokens are unknown to the tokenizer.
    """
    unknown_names = [name for name in nulls if name not in NULLS]
    if unknown_names:
        raise ValueError(f"nulls has {unknown_names}, expected some of {', '.join(NULLS)}.")
    if not isinstance(beta_factor, int | float) or not 0 < beta_factor < float("inf"):
        raise ValueError(f"beta_factor = {beta_factor}, expected a positive, finite number.")
    checks.require_nonnegative(seed=seed)
    if max_length is not None:
        checks.require_count(max_length=max_length)
    model = encoder_inside(model)
    texts = None if texts is None else list(row_texts(texts))
    if isinstance(model, DeepStack):
        if texts is not None:
            raise ValueError("a DeepStack has no tokenizer: probe(stack, ids), ids (texts, n), or vectors.")
        checked = check_stack(model, source)
        clouds, facts = record_stack(model, source, beta_factor), stack_facts(model)
    else:
        takes = None if texts is None else length_limit(source, model)
        max_length = min(max_length, takes) if max_length is not None and takes is not None else max_length
        checked = _checked(model, source, texts, max_length)
        clouds = record_clouds(model, source, texts, batch, max_length, beta_factor, max_unknown, world)
        facts = encoder_facts(model)
    solver(transport, clouds.z[0][0].device)
    ladder = steps(clouds)
    ready = texts is None and not isinstance(model, DeepStack)
    device = clouds.z[0][0].device
    about: dict[str, Any] = {
        "encoder": facts,
        "weights": fingerprint(model),
        "content": clouds.content,
        "inputs": _content(model, source, batch) if ready else None,
        "texts": clouds.texts,
        "tokens": sum(len(s) for s in clouds.special),
        "skipped_short_texts": clouds.skipped,
        "truncated_texts": clouds.truncated,
        "unknown_token_share": clouds.unknown,
        "max_length": max_length,
        "batch": batch,
        "beta_factor": beta_factor,
        "seed": seed,
        "dtype": str(clouds.z[0][0].dtype).removeprefix("torch."),
        "device": device.type,
        "transport": transport,
        "main_closure": main_closure(clouds).name,
        "closures": {name: step.title for name, step in ladder.items()} | EXTRA,
        "controls": {} if clouds.partial or not nulls else CONTROLS,
        "nulls": {name: NULLS[name] for name in null_models.allowed(nulls, clouds)},
        "versions": versions(),
    }
    # Only what was asked names the question: computed numbers may differ in their last digit from run to run.
    about["key"] = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    about["costs"] = {name: asdict(_cost(step, clouds)) for name, step in ladder.items()}
    about["self_check"] = checked
    return Inquiry(model, source, texts, clouds, about, world)


def _content(model: nn.Module, source: Any, batch: int) -> str:
    """Of ready inputs: ids and all that comes with them, such as token types and positions."""
    return hashlib.sha256(b"".join(piece.content() for piece in pieces(model, source, None, batch))).hexdigest()


def _checked(model: nn.Module, source: Any, texts: list[str] | None, max_length: int | None) -> list[dict[str, Any]]:
    """The weights read against what the layers compute, on the first texts; raises where they differ without reason."""
    device = next(model.parameters()).device
    first = next(iter(pieces(model, source, None if texts is None else texts[:2], 2, max_length))).make()
    inputs = {name: t.to(device) for name, t in first.inputs.items()}
    found = self_check(model, inputs)
    # Where contents are all there is, nothing is left out; the share is measured where something is.
    shares = omitted_shares(model, inputs) if any(c.omits for c in found) else [0.0] * len(found)
    checked = []
    for c, share, block in zip(found, shares, blocks(model)):
        known = bool(c.omits) and c.omits == block.positions and block.knows_positions
        if known and share > INSIDE:
            raise ValueError(
                f"layer {c.layer} of {type(model).__name__}: its weights and places as read leave {share:.2g} of the "
                f"variance of its logits unexplained. The architecture {block.architecture.name!r} does not fit this "
                "model; register one of its own."
            )
        inside = known and share <= INSIDE  # NaN where a model does not show its weights
        checked.append(
            {
                "layer": c.layer,
                "error": c.error,
                "exact": c.exact,
                "omits": "" if inside else c.omits,
                "places": c.omits if inside else "",
                "omitted_logit_variance": share,
            }
        )
    return checked


def _full_sphere(space: HeadSpace, layer: int, text: int) -> torch.Tensor:
    """The theorem's own setting: tokens that fill the sphere, at zero temperature."""
    radius = float(space.x.norm(dim=-1).square().mean().sqrt())
    everywhere = replace(space.attention, causal=False).with_beta(float("inf"))
    return everywhere.drift(space.x, UniformSphere(space.attention.dim, radius))


def _cost(step: Closure, clouds: Clouds) -> Any:
    """The cost of a closure on the first text, mean over layers."""
    found = [step.cost(clouds.space(layer, 0)) for layer in range(clouds.layers)]
    return type(found[0])(sum(c.numbers for c in found) / len(found), found[0].own_tokens)


def _of_all(done: dict[str, Any], world: Processes) -> dict[str, Any]:
    """The stages of all processes; those of shared texts put together."""
    home = {stage: replace(part, **{k: z.cpu() for k, z in vars(part).items()}) for stage, part in done.items()}
    shares = world.gather_objects(home)
    together = {stage: part for share in shares for stage, part in share.items()}
    return together | {stage: join([share[stage] for share in shares]) for stage, join in SHARED.items()}


def _kept(parts: str | Path | None, stage: str, key: str, compute: Callable[[], Any]) -> Any:
    """A stage's numbers, from its file if an earlier run with the same key finished it."""
    if parts is None:
        return compute()
    kinds: dict[str, Any] = {**BY_NAME, **SINGLE}
    kind = kinds[stage.partition("/")[0]]
    path = Path(parts) / f"{stage.replace('/', '.')}.safetensors"
    if path.exists():
        fields, words = read_tensors(path)
        if words.get("key") == key:
            return kind(**fields)
    part = compute()
    write_tensors(vars(part), path, {"key": key})
    return part
