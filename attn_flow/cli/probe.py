"""The command probe: four questions about pretrained encoders, answered on one page."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from attn_flow.cli import console
from attn_flow.cli.encoders import Dtype, Field, Pickle, Texts, Tokenizer, Unknown, open_model, read_texts

if TYPE_CHECKING:
    from attn_flow.probe.result import ProbeResult
    from attn_flow.probe.run import ProbeRun

PROBE_OUT = Path("runs/probe")
WITHOUT_TEXTS = ("tabpfn", "rxnmap", "sceptr")  # encoders whose tokens are rows of tables, atoms or residues
DEMO_INPUTS = 8  # tables or reactions for those
Models = Annotated[list[str] | None, typer.Argument(help="Folders or names; 'minilm' is the packaged one.")]


def probe(
    context: typer.Context,
    models: Models = None,
    texts: Texts = None,
    field: Field = "text",
    demo: Annotated[bool, typer.Option("--demo", help="Probe MiniLM on Python's own help pages.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the report, or of one for each model.")] = PROBE_OUT,
    max_length: Annotated[int, typer.Option(min=2, help="Tokens kept of each text.")] = 160,
    first: Annotated[int | None, typer.Option(min=1, help="Use the first so many texts only.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Start again, whatever the folder holds.")] = False,
    tokenizer: Tokenizer = None,
    max_unknown: Unknown = 0.1,
    device: console.Device = "auto",
    dtype: Dtype = "float32",
    pickle: Pickle = False,
    seed: console.Seed = 0,
    as_json: console.Json = False,
    quiet: console.Quiet = False,
) -> None:
    """Answer four questions about a trained encoder in a report.

    The same command continues after Ctrl-C; torchrun shares the work. MODEL@random is an untrained copy of an encoder,
    MODEL@beta_factor=2 runs it twice as cold; each of several models has a report of its own.

    Examples:

      attn-flow probe bert-base-uncased --texts corpus.txt --out runs/mine

      attn-flow probe minilm minilm@random minilm@beta_factor=4 --demo
    """
    from attn_flow.base.processes import processes
    from attn_flow.experiments.encoders.zoo import own_inputs
    from attn_flow.probe.run import prepare

    names = ["minilm"] if demo and not models else list(models or [])
    if not names:
        raise ValueError("which model? Give a folder or a name, or --demo for the packaged one.")
    if len(set(names)) < len(names):
        raise ValueError(f"{', '.join(names)}: a model is named twice; name each of them once.")
    if texts is not None:
        console.refuse_options(context, "--texts gives the texts", "demo")
    world = processes()
    shows, progress = world.is_first and not as_json, not (quiet or as_json)
    has_own_inputs = texts is None and names[0].partition("@")[0] in WITHOUT_TEXTS
    source = read_texts(texts, field, demo, names[0])[:first] if not has_own_inputs else None
    if shows and source and texts is None and not demo:
        console.echo(f"No --texts: the {len(source)} sample texts of {names[0]} are taken.")
    for name in names[1:]:  # a model that cannot be opened is reported before the first one is probed
        open_model(name, device, dtype, pickle, tokenizer, seed, quiet=True)
    limit = max_length if source else None
    options: dict[str, Any] = {"max_length": limit, "max_unknown": max_unknown, "seed": seed, "world": world}
    results = {}
    for name in names:
        folder = out if len(names) == 1 else out / folder_name(name)
        console.require_writable(folder)
        model, reader, beta_factor = open_model(name, device, dtype, pickle, tokenizer, seed, quiet=not progress)
        if source is None:
            inputs = own_inputs(name.partition("@")[0], reader, model, first or DEMO_INPUTS, max_length)
        elif reader is None:
            raise ValueError(f"{name} has no tokenizer: give --tokenizer, or its own inputs to probe(model, inputs).")
        else:
            inputs = reader, source
        run = prepare(model, *inputs, beta_factor=beta_factor, **options)
        results[name] = _run_or_load(run, name, folder, again, shows, progress)
        if shows:
            findings = results[name].findings
            rows = [[key, f.verdict or "-", f.value, f.baseline] for key, f in findings.items()]
            console.print_table(name, ["question", "answer", "value (95% interval)", "compare with"], rows)
            for text in dict.fromkeys(f.text for f in findings.values() if f.value == "not measured"):
                console.paragraph(text)
            console.echo(f"Report: {folder / 'report.html'}")
    if not world.is_first:
        return
    if as_json:
        answers = {name: result.as_json() for name, result in results.items()}
        console.print_json(answers[names[0]] if len(names) == 1 else answers)


def _run_or_load(run: ProbeRun, name: str, folder: Path, again: bool, shows: bool, progress: bool) -> ProbeResult:
    """Run a probe and write its report, or read a finished one; a run that is stopped keeps what is finished."""
    from attn_flow.base.files import lock_for_writing
    from attn_flow.probe.result import ProbeResult

    world = run.world
    try:
        is_finished = not again and ProbeResult.load(folder).about.key == run.about.key
    except (OSError, ValueError):  # missing, damaged, or of another version
        is_finished = False
    if world.gather_objects(is_finished)[0]:
        if shows:
            console.echo(f"{name}: finished before (--again computes it again).")
        return ProbeResult.load(folder)
    with lock_for_writing(folder / "probe.json") if world.is_first else nullcontext():
        result = run.run(None if again else folder / "parts", progress=progress)
        if world.is_first:
            result.report(folder, title=name)
    return result


def folder_name(model: str) -> str:
    """The name of a folder for a model: different for every model, and never outside its parent.

    >>> folder_name("c/x"), folder_name("c_x"), folder_name("..")
    ('c%2Fx', 'c_x', '%2E%2E')
    """
    return quote(model, safe=" @=+,") if model.strip(".") else "%2E" * len(model)
