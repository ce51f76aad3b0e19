"""Does a trained encoder go where the theory says? Layer by layer, with nulls and error bars.

Four questions, a module each: where does a layer's attention push tokens, and is it where its weights predict (push)?
does the cloud approach the predicted limiting law (law)? in which regime is each head (regimes)? how does the cloud
evolve (evolution)? Everything is kept per text, so that intervals come from a bootstrap over texts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from attn_flow.base.files import versions, write_tensors
from attn_flow.base.progress import progress_bar
from attn_flow.hooks.trust import fingerprint
from attn_flow.hooks.weights import encoder_facts
from attn_flow.probe.closures import SUPPORTS
from attn_flow.probe.clouds import record_clouds
from attn_flow.probe.evolution import BETAS, cloud_evolution, token_view
from attn_flow.probe.heads import head_regimes
from attn_flow.probe.limit_law import approach_to_limits, case_names
from attn_flow.probe.push import NULLS, null_agreement, support_agreement
from attn_flow.probe.result import Probe


def probe(
    model: nn.Module,
    source: Any,
    texts: Iterable[str] | None = None,
    *,
    supports: Sequence[str] = tuple(SUPPORTS),
    nulls: Sequence[str] = tuple(NULLS),
    max_length: int | None = 160,
    batch: int = 16,
    beta_factor: float = 1.0,
    seed: int = 0,
    progress: bool = False,
    parts: str | Path | None = None,
) -> Probe:
    """Probe an encoder on texts: `probe(model, tokenizer, texts)`, or `probe(model, inputs)` with ready inputs.

    supports: which closures to compare (see closure.SUPPORTS). nulls: which nulls to run (see NULLS; () for none).
    max_length: tokens kept of each text (None: what the model takes). beta_factor: on the trained inverse
    temperature: the model itself runs colder (above 1) or warmer. parts: a folder where finished parts are kept, so
    that the same call continues after a kill.
    """
    _known("supports", supports, SUPPORTS)
    _known("nulls", nulls, NULLS)
    generator = torch.Generator().manual_seed(seed)
    texts = None if texts is None else list(texts)
    clouds, skipped, truncated = record_clouds(model, source, texts, batch, max_length, beta_factor)
    about = {
        "encoder": encoder_facts(model),
        "model_hash": fingerprint(model),
        "texts": clouds.texts,
        "tokens": sum(len(s) for s in clouds.special),
        "skipped_short_texts": skipped,
        "truncated_texts": truncated,
        "max_length": max_length,
        "beta_factor": beta_factor,
        "seed": seed,
        "supports": {name: SUPPORTS[name][0] for name in supports},
        "nulls": {name: NULLS[name] for name in nulls},
        "betas": list(BETAS),
        "text_hash": hashlib.sha256("\0".join("".join(t) for t in clouds.tokens).encode()).hexdigest()[:16],
        "versions": versions(),
    }
    stages: dict[str, Callable[[], dict[str, Tensor]]] = {
        f"support_{name}": partial(support_agreement, clouds, name)
        for name in supports
        for name in supports  # type: ignore[misc]
    }
    stages["heads"] = partial(head_regimes, clouds)
    stages["limits"] = partial(approach_to_limits, clouds, generator)
    stages["evolution"] = partial(cloud_evolution, clouds)
    stages["view"] = partial(token_view, clouds, generator)
    for name in nulls:
        stages[f"null_{name}"] = partial(
            null_agreement, clouds, name, model, source, texts, batch, max_length, beta_factor, seed
        )
    asked = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    numbers: dict[str, Tensor] = {}
    with progress_bar("probe", len(stages), progress) as advance, torch.no_grad():
        for stage, compute in stages.items():
            numbers |= _kept(parts, stage, asked, compute)
            advance(note=stage)
    shown = [[t, i] for t, i in numbers["view_place"].tolist()]
    labels = [{"token": clouds.tokens[t][i], "text": t, "position": i} for t, i in shown]
    about["limit_cases"] = case_names(numbers.pop("limit_case"))
    about["head_cases"] = [case_names(row) for row in numbers.pop("head_case")]
    return Probe(about, numbers, labels)


def _known(name: str, asked: Sequence[str], table: dict[str, Any]) -> None:
    unknown = [each for each in asked if each not in table]
    if unknown:
        raise ValueError(f"{name} has {unknown}, expected some of {', '.join(table)}.")


def _kept(
    parts: str | Path | None, stage: str, asked: str, compute: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """A stage's numbers, from its file if an earlier run with the same inputs finished it."""
    if parts is None:
        return compute()
    path = Path(parts) / f"{stage}.safetensors"
    if path.exists():
        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("asked") == asked:
                return load_file(path)
    numbers = compute()
    write_tensors(numbers, path, {"asked": asked})
    return numbers
