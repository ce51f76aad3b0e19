"""The commands inspect and record of pretrained encoders, and how commands open models and texts."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from attn_flow.cli import console

DEMO_TEXTS = 32

Model = Annotated[str, typer.Argument(help="Folder or name of an encoder; 'minilm' is the packaged one.")]
Texts = Annotated[str | None, typer.Option(help="A .txt or .md (a text per line), .jsonl or .csv file; - is stdin.")]
Field = Annotated[str, typer.Option(help="The field or column of the text.")]
Tokenizer = Annotated[str | None, typer.Option(help="Folder or name of another tokenizer.")]
Unknown = Annotated[float, typer.Option(help="Share of unknown tokens that is accepted.")]
Dtype = Annotated[str, typer.Option(help="float32 or float64.")]
Pickle = Annotated[bool, typer.Option("--pickle", help="Accept pickled weights, which may run code.")]


def inspect(
    model: Model,
    device: console.Device = "auto",
    dtype: Dtype = "float32",
    pickle: Pickle = False,
    as_json: console.Json = False,
    quiet: console.Quiet = False,
) -> None:
    """Read the architecture of an encoder from its weights.

    Heads, norms and omitted parts, and a self-check of attention from these weights against the model.

    Example: attn-flow inspect minilm
    """
    from attn_flow.hooks.inputs import batches
    from attn_flow.hooks.self_check import self_check
    from attn_flow.hooks.weights import encoder_facts

    loaded, tokenizer, beta_factor = open_model(model, device, dtype, pickle, quiet=quiet or as_json)
    if beta_factor != 1:
        raise ValueError(f"{model!r}: @beta_factor changes how a model runs, not its weights; leave it out here.")
    facts, checks = encoder_facts(loaded), []
    if tokenizer is not None:
        texts = ["Tokens move like particles on a sphere.", "They meet."]
        inputs = next(batches(loaded, tokenizer, texts, size=2)).inputs
        where = next(loaded.parameters()).device
        checks = self_check(loaded, {name: value.to(where) for name, value in inputs.items()})
    if as_json:
        shown = [{"layer": c.layer, "error": c.error, "exact": c.exact, "omits": c.omits} for c in checks]
        console.print_json({**facts, "check": shown})
        return
    rows = [[name.replace("_", " "), _fact(value)] for name, value in facts.items()]
    console.print_table(f"{model}:", ["property", "value"], rows)
    if checks:
        columns = ["layer", "relative error", "verdict"]
        verdicts = [[c.layer, f"{c.error:.1e}", "exact" if c.exact else c.omits or "not exact"] for c in checks]
        console.print_table("Self-check: attention from these weights against the model", columns, verdicts)


def _fact(value: Any) -> str:
    """A fact about a model in words; a list has one entry for every layer."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (list, tuple)):
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    different = list(dict.fromkeys(map(_fact, value)))
    if len(different) == 1 and len(value) > 1:
        return f"{different[0]} in every layer"
    return ", ".join(different) or "none"


def record(
    model: Model,
    texts: Texts = None,
    field: Field = "text",
    out: Annotated[Path, typer.Option(help="Folder of the files; a stopped run continues.")] = Path("runs/record"),
    batch: Annotated[int, typer.Option(min=1, help="Texts in a file.")] = 16,
    max_length: Annotated[int | None, typer.Option(min=2, help="Tokens kept of each text; all by default.")] = None,
    tokenizer: Tokenizer = None,
    max_unknown: Unknown = 0.1,
    device: console.Device = "auto",
    dtype: Dtype = "float32",
    pickle: Pickle = False,
    as_json: console.Json = False,
    quiet: console.Quiet = False,
) -> None:
    """Record the residual stream of texts to files.

    A file for each batch, which attn_flow.Trajectory.load(file) reads, so that the corpus may have any size. The same
    command continues a run that was stopped; torchrun shares the texts.

    Example: attn-flow record minilm --texts corpus.txt --out runs/corpus
    """
    from attn_flow.base.processes import processes
    from attn_flow.hooks.corpus import record_corpus
    from attn_flow.hooks.wrapping import scale_beta

    loaded, reader, beta_factor = open_model(model, device, dtype, pickle, tokenizer, quiet=quiet or as_json)
    if reader is None:
        raise ValueError(f"{model} has no tokenizer: give --tokenizer, or its own inputs to record_corpus.")
    corpus = read_texts(texts, field, demo=False, model=model)
    console.require_writable(out)
    world, progress = processes(), not (quiet or as_json)
    options: dict[str, Any] = {"max_length": max_length, "max_unknown": max_unknown, "progress": progress}
    with nullcontext() if beta_factor == 1 else scale_beta(loaded, beta_factor):
        files = record_corpus(loaded, reader, corpus, out, batch=batch, world=world, **options)
    if world.is_first and as_json:
        console.print_json({"texts": len(corpus), "files": [str(file) for file in files]})
    elif world.is_first:
        console.echo(f"{len(corpus)} texts are in {len(files)} files, {out}/batch-*.safetensors.")


def open_model(
    name: str, device: str, dtype: str, pickle: bool, tokenizer: str | None = None, seed: int = 0, quiet: bool = False
) -> tuple[Any, Any, float]:
    """The model, its tokenizer (None for images) and beta_factor of NAME, NAME@random or NAME@beta_factor=FACTOR."""
    import torch

    import attn_flow.experiments.encoders  # noqa: F401  makes the packaged encoders known by name
    from attn_flow.base.checks import require_nonnegative
    from attn_flow.hooks.loading import load_encoder
    from attn_flow.hooks.safe_loading import load_tokenizer, without_bars
    from attn_flow.probe.untrained import untrained_copy

    path, *variant = [name] if Path(name).is_dir() else name.rsplit("@", 1)
    kinds = {"float32": torch.float32, "float64": torch.float64}
    if dtype not in kinds:
        raise ValueError(f"dtype = {dtype!r}, expected float32 or float64: half precision is too coarse to compare.")
    device = console.require_device(device)
    with without_bars() if quiet or not sys.stderr.isatty() else nullcontext():
        model, reader = load_encoder(path, pickle=pickle)
        reader = reader if tokenizer is None else load_tokenizer(tokenizer)
    beta_factor = 1.0
    if variant == ["random"]:
        model = untrained_copy(model, seed)
    elif variant:
        key, _, factor = variant[0].partition("=")
        try:
            beta_factor = {"beta_factor": float(factor)}[key]
        except (ValueError, KeyError):
            raise ValueError(f"{name!r}: expected @random or @beta_factor=FACTOR after the model.") from None
        require_nonnegative(beta_factor=beta_factor)
    return model.to(device, kinds[dtype]).eval(), reader, beta_factor


def read_texts(path: str | None, field: str, demo: bool, model: str = "") -> list[str]:
    """Texts of a file, of standard input (-), of the demo, or of a packaged encoder."""
    from attn_flow.experiments.encoders import ZOO, fetched, sample_inputs, textbook_reactions
    from attn_flow.hooks.demo import topics
    from attn_flow.hooks.texts import load_texts

    if path is not None:
        return load_texts(path, field)
    name = model.partition("@")[0]
    if demo or name == "minilm":
        return [text for text in topics() if len(text) > 900][:DEMO_TEXTS]
    if name in ZOO and fetched(name):
        return sample_inputs(name)[:DEMO_TEXTS]
    if name == "rxnmapper":
        return textbook_reactions()
    raise ValueError("which texts? Give --texts FILE: .txt, .md, .jsonl, .csv, or - for standard input.")
