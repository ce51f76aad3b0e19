"""Bad input of every command and option: one sentence that names it, exit code 2, no traceback."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from attn_flow.cli.entry import app

EYE = "1,0;0,1"
GV = ["--G", "3,0;0,1", "--V", "1,0;0,2"]
SIMULATE = ["simulate", *GV, "--tokens", "5", "--t", "1", "--quiet"]
OWN = ["simulate", *GV, "--t", "1", "--quiet"]
DENSITY = [*OWN, "--density"]
TRAIN = [
    "train",
    "majority",
    "--updates",
    "2",
    "--dim",
    "4",
    "--batch",
    "4",
    "--tokens",
    "4",
    "--quiet",
    "--out",
    "run",
]
PROBE = ["probe", "minilm", "--demo", "--first", "1", "--no-nulls", "--quiet", "--out", "run"]
RECORD = ["record", "minilm", "--texts", "two.txt", "--quiet", "--out", "run"]

NO_FILE = "is no {} file of numbers, or it is damaged"
MATRICES = {
    "text.npy": NO_FILE.format(".npy"),
    "text.pt": NO_FILE.format(".pt"),
    "text.safetensors": NO_FILE.format(".safetensors"),
    "empty.npy": NO_FILE.format(".npy"),
    "empty.pt": NO_FILE.format(".pt"),
    "empty.safetensors": NO_FILE.format(".safetensors"),
    "cut.npy": NO_FILE.format(".npy"),
    "cut.pt": NO_FILE.format(".pt"),
    "cut.safetensors": NO_FILE.format(".safetensors"),
    "folder.npy": "no file folder.npy",
    "folder.pt": "no file folder.pt",
    "folder.safetensors": "no file folder.safetensors",
    "none.npy": "holds an array of shape (0, 2)",
    "cube.npy": "holds an array of shape (2, 2, 2)",
    "number.npy": "holds an array of shape ()",
    "words.npy": "holds a matrix of <U1, expected plain real numbers",
    "dates.npy": "holds a matrix of datetime64[D]",
    "complex.npy": "holds a matrix of complex128",
    "bool.npy": "holds a matrix of bool",
    "object.npy": NO_FILE.format(".npy"),
    "nan.npy": "G has NaN or infinite entries",
    "complex.pt": "holds a matrix of torch.complex64",
    "bool.pt": "holds a matrix of torch.bool",
    "list.pt": "holds a list, expected one matrix",
    "none.pt": "holds a NoneType",
    "dict.pt": "holds a dict",
    "sparse.pt": "holds a matrix of torch.sparse_coo",
    "module.pt": NO_FILE.format(".pt"),
    "two.safetensors": "holds ['a', 'b'], expected one tensor, or one named 'G'",
    "nothing.safetensors": "holds [], expected one tensor",
    "complex.safetensors": "holds a matrix of torch.complex64",
}


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory):
    """A folder of wrong files, which the commands run in."""
    home, before = tmp_path_factory.mktemp("attack"), Path.cwd()
    os.chdir(home)
    for kind in ("npy", "pt", "safetensors"):
        Path(f"text.{kind}").write_text("3,0;0,1\n")
        Path(f"empty.{kind}").touch()
        Path(f"folder.{kind}").mkdir()
    arrays = {
        "none": np.zeros((0, 2)),
        "cube": np.zeros((2, 2, 2)),
        "number": np.array(3.0),
        "words": np.array([["a", "b"], ["c", "d"]]),
        "dates": np.array([["2020-01-01"]], dtype="datetime64[D]"),
        "complex": 1j * np.eye(2),
        "bool": np.eye(2) > 0,
        "object": np.array([[1, None], [2, 3]], dtype=object),
        "nan": np.full((2, 2), np.nan),
        "good": np.eye(2),
    }
    for name, array in arrays.items():
        np.save(f"{name}.npy", array)
    eye = torch.eye(2)
    stored = {"complex": eye * 1j, "bool": eye > 0, "list": [[1.0]], "none": None, "dict": {"G": eye}, "good": eye}
    for name, thing in {**stored, "sparse": eye.to_sparse(), "module": torch.nn.Linear(2, 2)}.items():
        torch.save(thing, f"{name}.pt")
    save_file({"a": eye, "b": 2 * eye}, "two.safetensors")
    save_file({}, "nothing.safetensors")
    save_file({"G": eye * 1j}, "complex.safetensors")
    for whole, cut in (("good.npy", "cut.npy"), ("good.pt", "cut.pt"), ("two.safetensors", "cut.safetensors")):
        Path(cut).write_bytes(Path(whole).read_bytes()[:-9])
    Path("two.txt").write_text("Tokens move.\nThey meet.\n")
    Path("none.txt").write_text("\n\n")
    Path("latin.txt").write_bytes("caf\xe9\n".encode("latin-1"))
    Path("no.jsonl").write_text("{\n")
    Path("deep.jsonl").write_text("[" * 100_000 + "\n")
    Path("field.jsonl").write_text('{"a": 1}\n')
    Path("table.tsv").write_text("only a label\n")
    Path("binary.txt").write_bytes(b"\x00\x01\x02")
    if hasattr(os, "mkfifo"):
        os.mkfifo("pipe.txt")
    yield home
    os.chdir(before)


def refused(words: list[str], says: str) -> None:
    done = CliRunner().invoke(app, words)
    said = " ".join(done.stderr.replace("│", " ").split())
    assert done.exit_code == 2, (done.exit_code, said, done.stdout, done.exception)
    assert isinstance(done.exception, SystemExit)
    assert says in said
    assert "Traceback" not in said


@pytest.mark.parametrize("name", MATRICES)
def test_a_file_that_is_no_matrix(name):
    refused(["limit", "--G", name, "--V", EYE], MATRICES[name])


SMALL, WHOLE = "Input should be greater than or equal to", "Input should be a valid integer"
NUMBER = "Input should be a valid number"
BETAS = "expected numbers separated by commas"
TIMES = "expected one positive, finite end, or times that increase"
COMMANDS = [
    (["nonsense"], "No such command 'nonsense'"),
    (["--nonsense"], "No such option: --nonsense"),
    # limit
    *[(["limit", "--G", G, "--V", EYE], "expected numbers as") for G in ("", ";", ",", "None", "[[1,0],[0,1]]", "a,b")],
    *[(["limit", "--G", G, "--V", EYE], "NaN or infinite") for G in ("nan,0;0,1", "inf,0;0,1", "1e999,0;0,1")],
    (["limit", "--G", "1;2", "--V", EYE], "G has shape (2, 1), expected a square matrix"),
    (["limit", "--G", EYE, "--V", "1,2;3"], "V = '1,2;3' has rows of lengths [2, 1]"),
    (["limit", "--G", "1", "--V", EYE], "V has shape (1, 2, 2)"),
    (["limit", "--G", EYE], "Missing option '--V'"),
    (["limit", *GV, "--beta", "x"], BETAS),
    (["limit", *GV, "--beta", "nan"], BETAS),
    *[(["limit", *GV, "--beta", beta], "beta = ") for beta in ("0", "-1")],
    *[(["limit", *GV, "--tol", tol], "tol = ") for tol in ("nan", "-1", "inf")],
    (["limit", *GV, "--tol", "x"], NUMBER),
    # simulate
    *[([*SIMULATE, "--t", t], TIMES) for t in ("0", "-1", "inf", "2,1", "0,1,1")],
    *[([*SIMULATE, "--t", t], "t = ") for t in ("nan", "x", "")],
    *[([*SIMULATE, "--h", h], "expected a positive, finite step") for h in ("0", "-1", "nan", "inf")],
    ([*SIMULATE, "--h", "1e-12"], "are more than 1e+09 steps; use a larger h"),
    ([*SIMULATE, "--t", "1e12"], "are more than 1e+09 steps; use a larger h"),
    ([*SIMULATE, "--h", "x"], NUMBER),
    *[([*SIMULATE, "--tokens", n], SMALL) for n in ("0", "-3")],
    ([*SIMULATE, "--tokens", "1e3"], WHOLE),
    ([*SIMULATE, "--tokens", "1000000000000"], "GB are free: ask for fewer --tokens"),
    *[([*SIMULATE, "--beta", beta], BETAS) for beta in ("", "x", "nan", "10,,x")],
    ([*SIMULATE, "--beta", "-1"], "beta = -1.0, expected 0 <= beta <= inf"),
    *[([*SIMULATE, "--step", step], "expected one of") for step in ("", "rk5", "RK4")],
    ([*SIMULATE, "--seed", "-1"], SMALL),
    ([*SIMULATE, "--seed", "x"], WHOLE),
    ([*SIMULATE, "--seed", "99999999999999999999"], "Input should be less than or equal to"),
    *[([*SIMULATE, "--dim", d], f"--dim {d} but G is (2, 2)") for d in ("0", "3")],
    ([*OWN, "--x0", "1,2,3"], "x0 has shape (1, 3), expected (n, 2) to match G"),
    ([*OWN, "--x0", "text.npy"], "text.npy is no .npy file"),
    ([*OWN, "--x0", "nan,1"], "x0 has NaN or infinite"),
    ([*OWN, "--x0", "0,0"], "a zero row has no direction"),
    *[([*DENSITY, kappa], "expected a finite concentration") for kappa in ("nan", "-1", "inf")],
    *[([*DENSITY, "2", "--diffusion", D], "expected a finite D >= 0") for D in ("nan", "-1", "inf")],
    *[([*DENSITY, "2", "--bandwidth", L], "expected at least 4 degrees") for L in ("0", "-3")],
    ([*DENSITY, "2", "--bandwidth", "1000000000"], "lower the bandwidth"),
    ([*DENSITY, "2", "--beta", "inf"], "beta = inf: a density fills the sphere"),
    *[
        (
            [*DENSITY, "2", *words],
            f"--density starts from a law, has no tokens and chooses its own steps; leave out {words[0]}.",
        )
        for words in (["--x0", "1,0"], ["--quadrature"], ["--tokens", "9"], ["--h", "0.1"], ["--step", "rk4"])
    ],
    *[
        ([*OWN, "--x0", "1,0", *words], f"--x0 gives the tokens; leave out {words[0]}.")
        for words in (["--tokens", "9"], ["--quadrature"])
    ],
    *[([*SIMULATE, *words], "are of --density KAPPA") for words in (["--diffusion", "1"], ["--bandwidth", "9"])],
    # play, encoders, predict
    (["play", "--no-open", "--out", "two.txt/x.html"], "could not be written"),
    *[(["play", "--no-open", "--out", name], "expected a page to write") for name in (".", "page")],
    (["encoders", "get"], "Missing argument 'names'"),
    (["encoders", "get", "nothing"], "no encoder 'nothing' in the zoo"),
    *[(["predict", name, "x"], "no checkpoint") for name in ("nowhere", "folder.pt")],
    (["predict", "two.txt", "x"], "is damaged or no safetensors file"),
    (["predict", "nowhere"], "no text to predict"),
    ([*SIMULATE, "--out", "text.npy"], "--out text.npy cannot be written (Not a directory); give another folder"),
    (["simulate", *GV, "--tokens", "5", "--t", "0.5,1"], "t = 0.5, 1: expected one end, or three times or more"),
    (["simulate", "--G", "1", "--V", "1", "--quadrature"], "quadrature nodes exist for d = 2 and 3"),
    # reproduce, bench
    (["reproduce"], "which experiment?"),
    *[(["reproduce", name], "no experiment") for name in ("", "nothing", "../x", "claims")],
    (["reproduce", "hardmax", "--quick", "--seed", "-1"], SMALL),
    (["reproduce", "hardmax", "--quick", "--out", "text.npy"], "--out text.npy cannot be written"),
    *[(["bench", name], "no bench") for name in ("", "nothing", "../x")],
    *[(["bench", "drift", "--quick", "--threads", n], SMALL) for n in ("0", "-1")],
    (["bench", "drift", "--quick", "--threads", "x"], WHOLE),
    (["bench", "drift", "--quick", "--threads", "100000"], "Input should be less than or equal to"),
    (["bench", "drift", "--quick", "--out", "text.npy"], "--out text.npy cannot be written"),
    # train
    (["train"], "Missing argument 'task'"),
    *[(["train", task], "expected one of 'majority'") for task in ("", "nothing", "../x")],
    (["train", "text", "--out", "run"], "task 'text' needs a file of label<TAB>text lines"),
    (["train", "text", "--file", "nowhere.txt", "--out", "run"], "no file nowhere.txt"),
    (["train", "text", "--file", "table.tsv", "--out", "run"], "line 1 has 1 field(s), expected label<TAB>text"),
    (["train", "masked", "--file", "two.txt", "--out", "run"], "characters, expected at least 20 * tokens"),
    (["train", "masked", "--file", "latin.txt", "--out", "run"], "is no UTF-8 text"),
    (["train", "masked", "--file", "binary.txt", "--out", "run"], "this is no text but a binary file"),
    (["train", "majority", "--file", "two.txt", "--out", "run"], "is generated and reads no file"),
    *[
        ([*TRAIN, f"--{name}", value], f"{name.replace('-', '_')} = {value}, expected a whole number from")
        for name in ("tokens", "dim", "heads", "head-dim", "depth", "steps", "updates", "batch")
        for value in ("0", "-1", "1000000000000")
    ],
    *[
        ([*TRAIN, f"--{name}", "-1"], f"{name} = -1, expected a whole number from 0")
        for name in ("ffn", "warmup", "seed")
    ],
    *[
        ([*TRAIN, f"--{name}", "1.5"], WHOLE)
        for name in ("tokens", "dim", "heads", "head-dim", "depth", "steps", "ffn")
    ],
    *[([*TRAIN, f"--{name}", "x"], WHOLE) for name in ("updates", "batch", "warmup", "seed", "save-every")],
    *[
        ([*TRAIN, f"--{name}", value], f"{name} = {float(value)}, expected a positive, finite number")
        for name in ("horizon", "lr", "clip")
        for value in ("0", "-1", "nan", "inf")
    ],
    *[
        ([*TRAIN, f"--{name}", value], "expected 0 or more, and finite")
        for name in ("weight-decay", "noise")
        for value in ("-1", "nan", "inf")
    ],
    *[([*TRAIN, f"--{name}", "x"], NUMBER) for name in ("horizon", "lr", "clip", "noise", "beta", "beta-start")],
    *[([*TRAIN, "--beta", beta], "expected 0 <= beta <= inf") for beta in ("-1", "nan")],
    *[([*TRAIN, "--beta-mode", "learned", "--beta", beta], "cannot be learned") for beta in ("0", "inf")],
    *[
        ([*TRAIN, "--beta-mode", "annealed", "--beta-start", beta], f"beta_start = {float(beta)} cannot be annealed")
        for beta in ("0", "-1", "nan", "inf")
    ],
    ([*TRAIN, "--beta-mode", "hot"], "beta_mode = 'hot', expected one of"),
    ([*TRAIN, "--heads", "3"], "dim = 4 is no multiple of heads = 3; give head_dim"),
    ([*TRAIN, "--step", "rk9"], "step = 'rk9', expected one of"),
    ([*TRAIN, "--geometry", "torus"], "geometry = 'torus', expected one of"),
    ([*TRAIN, "--placement", "x"], "placement = 'x', expected one of"),
    ([*TRAIN, "--placement", "pre"], "moves the radius of tokens; expected geometry"),
    ([*TRAIN, "--save-every", "0"], "save_every = 0, expected at least 1 update"),
    ([*TRAIN, "--evaluate-every", "-1"], "evaluate_every = -1, expected at least 1 update"),
    ([*TRAIN, "--out", "text.npy"], "--out text.npy cannot be written"),
    ([*TRAIN, "--depth", "100000000"], "a stack of 100000000 layers of width 4 needs about"),
    ([*TRAIN, "--dim", "10000000"], "a stack of 1 layers of width 10000000 needs about"),
    # encoders
    (["probe"], "which model?"),
    (["probe", "./my-bert"], "which texts?"),
    (["probe", "minilm", "--texts", "nowhere.txt"], "nowhere.txt"),
    (["probe", "minilm", "--images", "folder.npy"], "folder.npy holds no image"),
    *[([*PROBE, "--first", n], SMALL) for n in ("0", "-1")],
    *[([*PROBE, "--max-length", n], SMALL) for n in ("0", "1", "-5")],
    *[([*PROBE, f"--{name}", "x"], WHOLE) for name in ("first", "max-length", "seed")],
    ([*PROBE, "--out", "text.npy"], "--out text.npy cannot be written"),
    *[(["probe", f"minilm@{what}", "--demo"], "minilm@") for what in ("hot", "beta_factor=x", "beta=2", "random=1")],
    *[(["probe", f"minilm@beta_factor={beta}", "--demo", "--quiet"], "beta") for beta in ("-1", "nan", "inf")],
    *[
        ([command, name, *texts], "config.json")
        for name in ("folder.pt", "..")
        for command, texts in (("probe", ["--demo"]), ("encoder", []), ("spectra", []), ("record", []))
    ],
    *[([*RECORD, "--batch", n], SMALL) for n in ("0", "-1")],
    *[([*RECORD, "--shard", shard], "shard = ") for shard in ("x", "2/2", "0/0", "-1/2", "1/2/3")],
    ([*RECORD, "--out", "text.npy"], "--out text.npy cannot be written"),
    (["record", "minilm", "--out", "run", "--texts", "none.txt"], "none.txt"),
    (["record", "minilm", "--out", "run", "--texts", "latin.txt"], "UTF-8"),
    (["record", "minilm", "--out", "run", "--texts", "no.jsonl"], "no.jsonl, line 1"),
    (["record", "minilm", "--out", "run", "--texts", "deep.jsonl"], "nested too deeply"),
    (["record", "minilm", "--out", "run", "--texts", "field.jsonl"], "no text field 'text' (found a)"),
    (["record", "minilm", "--out", "run", "--texts", "folder.pt"], "folder.pt"),
    *[
        ([*command, name], f"{name} is no regular file; give one, or - and the texts on standard input.")
        for command in (
            ["record", "minilm", "--out", "run", "--texts"],
            ["probe", "minilm", "--out", "run", "--texts"],
            ["train", "masked", "--out", "run", "--file"],
            ["predict", "run", "--file"],
        )
        for name in ("pipe.txt", "/dev/zero", "/dev/null")
    ],
    *[
        (["probe", "minilm", "--images", "folder.npy", *words], f"and no texts; leave out {words[0]}.")
        for words in (["--texts", "two.txt"], ["--demo"], ["--first", "1"], ["--max-length", "9"], ["--field", "x"])
    ],
    (["probe", "minilm", "--texts", "two.txt", "--demo"], "--texts are the texts to take; leave out --demo."),
    (["probe", "--demo", "--field", "x"], "without --texts there is no field to read; leave out --field."),
    (["record", "minilm", "--field", "x"], "without --texts there is no field to read; leave out --field."),
    (["probe", "minilm", "minilm", "--demo"], "minilm, minilm: a model is named twice; name each once."),
    (["merge"], "Missing argument 'folders'"),
    *[(["merge", name], "no statistics") for name in ("nowhere", "folder.pt", "two.txt")],
    *[
        ([*command, "--device", device], f"device = '{device}'")
        for command in (TRAIN, PROBE, RECORD, ["encoder", "minilm"], ["spectra", "minilm"])
        for device in ("gpu", "meta", "", "cuda:99")
    ],
    *[
        ([*command, "--dtype", dtype], f"dtype = '{dtype}', expected float32 or float64")
        for command in (PROBE, RECORD, ["encoder", "minilm"])
        for dtype in ("float16", "int8", "")
    ],
]


@pytest.mark.parametrize(("words", "says"), COMMANDS, ids=[" ".join(words)[:100] for words, _ in COMMANDS])
def test_a_wrong_option(words, says):
    refused(words, says)


def test_there_are_two_hundred_wrong_command_lines():
    assert len(MATRICES) + len(COMMANDS) >= 200


# --- strangers' words ------------------------------------------------------------------------------------------------

STEERING = "\x1b[2J\x1b]0;owned\x07[red]not red[/red]\u202e\r\n"


def test_names_cannot_steer_the_terminal():
    name = f"{STEERING}.npy"
    said = CliRunner().invoke(app, ["limit", "--G", name, "--V", EYE]).stderr
    assert not any(code in said for code in "\x1b\x07\u202e\r")
    assert "[red]not red[/red]" in said
    assert len(said.splitlines()) == 1


def test_tables_print_words_as_they_are(capsys):
    from attn_flow.cli.console import echo, table

    table(STEERING, ["what"], [[STEERING], ["[bold]x[/bold]"]])
    echo(STEERING)
    shown = capsys.readouterr().out
    assert not any(code in shown for code in "\x1b\x07\u202e\r")
    assert "[bold]x[/bold]" in shown
    assert "\\x1b" in shown


def test_progress_prints_words_as_they_are(capsys):
    from attn_flow.base.progress import progress_bar

    with progress_bar("[red]x", 1) as advance:
        advance(1, note=STEERING)
    shown = capsys.readouterr().err
    assert "[red]x" in shown
    assert not any(code in shown for code in "\x07\u202e")
    assert "\x1b]0" not in shown


def test_warnings_are_one_line(capsys):
    import warnings

    import typer

    from attn_flow.cli.console import reporting

    reporting(lambda: warnings.warn(f"a name {STEERING}", stacklevel=1))()
    assert "warning: a name \\x1b" in capsys.readouterr().err
    for size in (2**50, 2**62):
        with pytest.raises(typer.Exit) as left:
            reporting(lambda size=size: torch.empty(size))()
        assert left.value.exit_code == 2
        assert "not enough memory" in capsys.readouterr().err


# --- names that collide ----------------------------------------------------------------------------------------------


def test_every_model_has_its_own_folder_inside_out():
    from attn_flow.cli.console import folder_name

    names = ["c/x", "c_x", "c%2Fx", "..", ".", "...", "../x", "/", "a\x00b", "a b", "a@random", "a@beta_factor=2", "Ä"]
    folders = [folder_name(name) for name in names]
    assert len(set(folders)) == len(names)
    for folder in folders:
        assert (Path("out") / folder).resolve().parent == Path("out").resolve()


def test_every_beta_has_its_own_files(tmp_path):
    betas = ["1000000", "1000001", "0.1", "0.10000001"]
    words = [
        "simulate",
        *GV,
        "--tokens",
        "5",
        "--t",
        ".01",
        "--beta",
        ",".join(betas),
        "--out",
        str(tmp_path),
        "--json",
    ]
    found = json.loads(CliRunner().invoke(app, words).stdout)
    assert [run["beta"] for run in found["runs"]] == [float(beta) for beta in betas]
    assert len(list(tmp_path.glob("path_beta_*.safetensors"))) == 4
    assert len(list(tmp_path.glob("clouds_beta_*.png"))) == 4
