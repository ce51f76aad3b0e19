"""Probe an encoder: record it, check its weights, measure the four questions.

Every question is a stage with a file and a random generator of its own, so that a probe that was stopped and continued
equals one that was not.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from operator import index
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.base import checks
from attn_flow.base.files import digest, read_tensors, versions, write_tensors
from attn_flow.base.processes import ALONE, Processes, limit_threads
from attn_flow.base.progress import progress_bar
from attn_flow.hooks.corpus import fingerprint
from attn_flow.hooks.evaluation import describe_changes
from attn_flow.hooks.inputs import length_limit, row_texts
from attn_flow.hooks.layout import blocks, encoder_inside
from attn_flow.hooks.weights import encoder_facts
from attn_flow.nn.stack import DeepStack
from attn_flow.probe.averaging import Averaging, measure_averaging
from attn_flow.probe.clusters import Clusters, measure_clusters
from attn_flow.probe.encoders import record_encoder
from attn_flow.probe.findings import MIN_TEXTS, About, Reading
from attn_flow.probe.limit import LimitApproach, measure_limit
from attn_flow.probe.recording import MIN_TOKENS, Recording, exact
from attn_flow.probe.result import ProbeResult, tensors_of
from attn_flow.probe.stacks import record_stack, stack_facts
from attn_flow.probe.temperature import Temperature, measure_temperature
from attn_flow.probe.tokens import Evolution, measure_evolution, read_tokens

Progress = Callable[[float], None]
# Every stage: its typical share of the time, its record, and how it is measured. Processes take the stages in turn.
STAGES: dict[str, tuple[int, Callable[..., Any], Callable[..., Any]]] = {
    "clusters": (40, Clusters, measure_clusters),
    "limit": (45, LimitApproach, measure_limit),
    "averaging": (10, Averaging, measure_averaging),
    "temperature": (3, Temperature, lambda recording, *_, **__: measure_temperature(recording)),
    "evolution": (1, Evolution, lambda recording, *_, **__: measure_evolution(recording)),
    "reading": (1, Reading, lambda recording, *_, **__: read_tokens(recording)),
}
WORKERS = 2  # stages at a time: a stage alone leaves a second core idle most of the time
NEED_ALL_TOKENS = ("averaging", "clusters", "limit")  # questions about tokens that see all of their text
UNEXPLAINED = 0.01  # share of what attention adds that weights and positions as read may leave unexplained


def probe(
    model: nn.Module,
    source: Any,
    texts: Iterable[str] | None = None,
    *,
    max_length: int | None = 160,
    beta_factor: float = 1.0,
    max_unknown: float = 0.1,
    batch: int = 16,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: bool = False,
) -> ProbeResult:
    """Answer four questions about an encoder: `probe(model, tokenizer, texts)` or `probe(model, inputs)`.

    Args:
        model: a known encoder, something that holds one, or a `DeepStack`.
        source, texts: the tokenizer and texts (8 or more of 16 tokens for verdicts); or the model's own inputs.
        max_length: tokens kept of each text, at most what the model takes; None for as many as it takes.
        beta_factor: runs the model at this multiple of its trained inverse temperature.

    Other arguments:
        max_unknown: share of tokens unknown to the tokenizer above which the texts are refused.
        batch: texts in a forward pass.
        seed: of all random numbers.
        folder: where finished stages are kept, so that the same call continues after it was stopped.
        progress: show a progress bar.

    Returns:
        A `ProbeResult`, whose `findings` has an answer to each question.

    Example:
        >>> from attn_flow.hooks.demo import minilm, topics
        >>> texts = [text for text in topics() if len(text) > 900][:2]
        >>> result = probe(*minilm(), texts, max_length=24)
        >>> list(result.findings), result.findings["averaging"].verdict  # a verdict needs 8 texts
        (['averaging', 'clusters', 'temperature', 'limit'], None)
    """
    options: dict[str, Any] = {"max_length": max_length, "beta_factor": beta_factor, "max_unknown": max_unknown}
    return prepare(model, source, texts, batch=batch, seed=seed, **options).run(folder, progress)


@dataclass(frozen=True, eq=False)
class ProbeRun:
    """An encoder that was recorded and checked, ready to be probed; made by `prepare`.

    Args:
        recording: its tokens and attentions.
        about: what is probed; `about.key` changes with inputs, weights, options and versions.
        world: the processes that share the stages.
    """

    recording: Recording
    about: About
    world: Processes = ALONE

    def run(self, folder: str | Path | None = None, progress: bool = False) -> ProbeResult:
        """Measure every question, or read it from its file in `folder`, where finished stages are kept.

        Returns:
            The result, in every process.
        """
        own = list(STAGES)[self.world.rank :: self.world.count]
        total = sum(STAGES[name][0] for name in own)
        threads, is_stopped = torch.get_num_threads(), Event()
        # DeBERTa's positions are read from modules that are changed while the model runs at another temperature.
        reads_model = any(p is not None and p.terms is not None for p in self.recording.positions)
        workers = 1 if reads_model and self.about.beta_factor != 1 else min(WORKERS, threads)

        def measure(name: str) -> Any:
            done = 0.0

            def report(share: float) -> None:
                nonlocal done
                if is_stopped.is_set():
                    raise KeyboardInterrupt
                advance(STAGES[name][0] * (share - done), note=name)
                done = share

            with torch.no_grad():  # holds in this thread only
                record = self._read_or_measure(name, folder, report)
            report(1.0)
            return record

        with (
            progress_bar("probe", total, progress and self.world.is_first) as advance,
            limit_threads(threads // workers),
            ThreadPoolExecutor(workers) as pool,
        ):
            try:
                records = dict(zip(own, pool.map(measure, own)))
            except BaseException:  # Ctrl-C or an error: the other stages end at their next report
                is_stopped.set()
                raise
        records = {name: record for share in self.world.gather_objects(records) for name, record in share.items()}
        tokens = self.recording.tokens[: len(records["reading"].lengths)]
        return ProbeResult.of_records(self.about, records, tokens)

    def _read_or_measure(self, name: str, folder: str | Path | None, report: Progress) -> Any:
        _, make, measure = STAGES[name]
        path = None if folder is None else Path(folder) / f"{name}.safetensors"
        if path is not None and path.exists():
            fields, words = read_tensors(path)
            if words.get("key") == self.about.key:
                return make(**fields) if fields else None
        recording, record = self.recording, None
        has_foreign_queries = recording.texts > 1 and recording.inputs is not None
        if not (name in NEED_ALL_TOKENS and recording.hides) and (name != "clusters" or has_foreign_queries):
            mixed = hashlib.sha256(f"{self.about.seed}/{name}".encode()).digest()  # other numbers in every stage
            generator = torch.Generator().manual_seed(int.from_bytes(mixed[:7], "big"))
            record = measure(recording, generator, progress=report)
        if path is not None:
            write_tensors(tensors_of(record), path, {"key": self.about.key})
        return record


def prepare(
    model: nn.Module,
    source: Any,
    texts: Iterable[str] | None = None,
    *,
    max_length: int | None = 160,
    beta_factor: float = 1.0,
    max_unknown: float = 0.1,
    batch: int = 16,
    seed: int = 0,
    world: Processes = ALONE,
) -> ProbeRun:
    """Record an encoder and check that its weights were read rightly: the first step of `probe`.

    Args:
        model, source, texts, max_length, beta_factor, max_unknown, batch, seed: see `probe`.
        world: `attn_flow.base.processes.processes()`, which share the work.

    Returns:
        A `ProbeRun`. Texts that are too short are left out with a warning that names them. Weights that do not give
        what the layers compute, and texts with too many unknown tokens, are a ValueError.
    """
    checks.require_positive(beta_factor=beta_factor)
    checks.require_nonnegative(seed=seed)
    checks.require_count(batch=batch, max_length=1 if max_length is None else max_length)
    # Numbers of numpy become Python's, which JSON has. Nothing is cut off the model's own inputs.
    beta_factor, seed, batch = float(beta_factor), index(seed), index(batch)
    max_length = None if texts is None or max_length is None else index(max_length)
    model = encoder_inside(model)
    if isinstance(model, DeepStack):
        if texts is not None:
            raise ValueError("a DeepStack has no tokenizer: probe(stack, ids), ids (texts, n), or vectors.")
        recording, facts = record_stack(model, source, beta_factor), stack_facts(model)
        unexplained, inputs = [], recording.digest
    else:
        if texts is not None:
            texts, limits = list(row_texts(texts)), (max_length, length_limit(source, model))
            max_length = min((limit for limit in limits if limit is not None), default=None)
        options: dict[str, Any] = {"max_length": max_length, "beta_factor": beta_factor, "batch": batch}
        recording = record_encoder(model, source, texts, max_unknown=max_unknown, world=world, **options)
        unexplained, facts, inputs = check_weights(model, recording), encoder_facts(model), recording.digest
        if texts is None:  # token types and positions count, too
            inputs += digest({"": source} if isinstance(source, Tensor) else source)
    skipped = len(recording.skipped)
    remarks = []
    if skipped:
        numbers = ", ".join(str(i + 1) for i in recording.skipped)
        remarks.append(
            f"{skipped} of {skipped + recording.texts} texts are left out, because they have fewer than {MIN_TOKENS} "
            f"tokens, or {MIN_TOKENS // 2} that are not special: texts {numbers}, counted from 1."
        )
    if recording.texts < MIN_TEXTS:
        remarks.append(f"A verdict needs {MIN_TEXTS} texts; with {recording.texts} there are numbers only.")
    if remarks and world.is_first:
        warnings.warn(" ".join(remarks), stacklevel=2)
    about = About(
        encoder=facts,
        weights=fingerprint(model),
        inputs=inputs,
        texts=recording.texts,
        tokens=sum(len(special) for special in recording.special),
        skipped=list(recording.skipped),
        truncated=recording.truncated,
        unknown_share=recording.unknown_share,
        max_length=max_length,
        batch=batch,
        beta_factor=beta_factor,
        seed=seed,
        hides=recording.hides,
        dtype=str(recording.states[0][0].dtype).removeprefix("torch."),
        device=recording.device.type,
        versions=versions(),
    )
    key = hashlib.sha256(json.dumps(asdict(about), sort_keys=True).encode()).hexdigest()
    return ProbeRun(recording, replace(about, key=key, unexplained=unexplained), world)


def check_weights(model: nn.Module, recording: Recording) -> list[float]:
    """By layer, the share of what attention adds that its weights and positions as read do not explain.

    A layer that computes something else is a ValueError, unless its architecture has positions that cannot be read.
    """
    unexplained = (1 - recording.first(2).explained_by_layer(exact)).nan_to_num(0.0).amax(-1).clamp(min=0).tolist()
    dtype = next(model.parameters()).dtype
    for layer, (share, block) in enumerate(zip(unexplained, blocks(model))):
        if share > UNEXPLAINED and (block.knows_positions or not block.positions):
            reason = f"The architecture {block.architecture.name!r} does not fit this model; register one of its own."
            if changes := describe_changes(block):
                reason = f"It has {changes}: probe restore_attention(model), at another temperature with beta_factor=."
            elif dtype in (torch.float16, torch.bfloat16):
                reason = f"Rounding in {str(dtype).removeprefix('torch.')} may be the reason: probe model.float()."
            raise ValueError(
                f"layer {layer} of {type(model).__name__}: its weights and positions as read leave {share:.2g} of what "
                f"its attention adds unexplained. {reason}"
            )
    return unexplained
