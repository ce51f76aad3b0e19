"""limit, simulate, density, play and reproduce as scripts use them: JSON keys, files, exit codes, clear sentences."""

import json
import math
import shlex
import subprocess
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from attn_flow import Trajectory
from attn_flow.cli.app import app

SYMMETRIC = ["--G", "4,0;0,1", "--V", "1,0;0,2"]
SIMULATE = ["simulate", "--G", "3,0;0,1", "--V", "1,0;0,2"]


def run(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == code, done.output + repr(done.exception)
    return done.stdout if code == 0 else " ".join(done.output.split())


def test_limit_has_the_numbers_of_the_paper() -> None:
    numbers = json.loads(run("limit", "--G", "2,.5;0,1", "--V", "1,0;0,1", "--json"))
    assert (numbers["case"], numbers["dimension"]) == ("fixed", 1)
    assert np.allclose(numbers["projector"], [[1, 0.5], [0, 0]])  # oblique
    assert (numbers["leading"], numbers["gap"]) == pytest.approx((2, 1))
    numbers = json.loads(run("limit", "--G", "3,0;0,1", "--V", "1,0;0,2", "--json", "--beta", "100"))
    assert (numbers["rate_w1"], numbers["rate_w2"], numbers["g"]) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert numbers["exit_rate"] == pytest.approx(1)
    assert numbers["times"][0]["t_min"] == pytest.approx(math.log(100) / (2 / 3))
    assert {need["name"] for need in numbers["requires"]}


def test_limit_is_read_as_sentences() -> None:
    words = " ".join(run("limit", *SYMMETRIC, "--beta", "100").split())
    assert "tokens gather at two opposite points, +-(1, 0)" in words
    assert "they leave again, at rate 1, towards the leading direction of V, +-(0, 1)" in words
    assert "Assumptions that G and V meet: simple leading eigenvalue" in words
    assert "rate_w2" not in words
    oblique = " ".join(run("limit", "--G", "2,.5;0,1", "--V", "1,0;0,1").split())
    assert "Pi = [1, 0.5; 0, 0]" in oblique
    stays = " ".join(run("limit", "--G", "1,0;0,3", "--V", "3,0;0,.5", "--beta", "100").split())
    assert "They stay there" in stays
    assert "No t_min is predicted" in stays
    slow = " ".join(run("limit", "--G", "1,0;0,1", "--V", "1,1;0,1", "--beta", "10").split())
    assert "two opposite points, +-(1, 0). They approach like a power of time" in slow
    assert "No t_min is predicted" in slow
    assert "leave" not in run("limit", "--G", "1,0;0,1", "--V", "1,0;0,1")  # nothing moves


def test_matrices_from_files(tmp_path) -> None:
    G, V = torch.diag(torch.tensor([3.0, 1.0])).double(), torch.eye(2).double()
    np.save(tmp_path / "G.npy", G.numpy())
    torch.save(V, tmp_path / "V.pt")
    typed = run("limit", "--G", "3,0;0,1", "--V", "1,0;0,1", "--json")
    assert run("limit", "--G", str(tmp_path / "G.npy"), "--V", str(tmp_path / "V.pt"), "--json") == typed


def test_simulate_writes_what_it_says(tmp_path) -> None:
    words = [*SIMULATE, "--tokens", "60", "--t", "6", "--h", ".2", "--seed", "1"]
    numbers = json.loads(run(*words, "--beta", "10,inf", "--out", str(tmp_path), "--json"))
    assert [r["beta"] for r in numbers["runs"]] == [10.0, "inf"]
    for r in numbers["runs"]:
        assert len(r["t"]) == len(r["w2"]) == 31
        assert r["min_w2"] == pytest.approx(min(r["w2"]))
    path = Trajectory.load(tmp_path / "path_beta_10.safetensors")
    assert path.x.shape == (31, 60, 2)
    names = {file.name for file in tmp_path.iterdir()}
    assert {"simulate.json", "simulate.png", "simulate.html", "clouds_beta_10.png", "clouds_beta_inf.png"} <= names


def test_simulate_repeats_itself_and_takes_own_tokens(tmp_path) -> None:
    words = [*SIMULATE, "--beta", "5", "--t", "1", "--h", ".2", "--json"]
    first, second = (run(*words, "--tokens", "20", "--seed", "3") for _ in range(2))
    assert first == second
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(7, 2)))
    assert "7 tokens" in run(*words, "--x0", str(tmp_path / "x.npy"))
    assert "20 weighted nodes" in run(*words, "--tokens", "20")
    assert "20 tokens" in run(*words, "--tokens", "20", "--random")


def test_the_default_simulation_meets_the_assumptions_and_colder_is_nearer() -> None:
    words = [*SIMULATE, "--tokens", "300", "--t", "9", "--h", ".2"]
    runs = json.loads(run(*words, "--json"))["runs"]
    assert [r["beta"] for r in runs] == [10, 100]
    assert not any(r["doubts"] for r in runs)
    assert runs[1]["min_w2"] < runs[0]["min_w2"] / 2
    assert runs[1]["t_min"] == pytest.approx(runs[1]["t_min_predicted"], rel=0.05)
    assert "meets every assumption" in run(*words, "--beta", "10", "--quiet")


def test_simulate_names_an_assumption_that_is_not_met() -> None:
    words = ["simulate", *SYMMETRIC, "--beta", "3,100", "--tokens", "100", "--t", "2", "--quiet", "--random"]
    assert "Beta 100 does not meet an assumption of the prediction" in " ".join(run(*words).split())


def test_simulate_says_why_no_time_is_predicted() -> None:
    words = ["simulate", "--G", "1,0;0,3", "--V", "3,0;0,.5", "--beta", "30", "--tokens", "50", "--t", "2", "--quiet"]
    output = " ".join(run(*words).split())
    assert "No time of least W2 is predicted" in output
    assert "they stay" in output


@pytest.mark.parametrize("kind", ["unnormalised", "sinkhorn"])
def test_kinds_without_a_limit_are_simulated(kind, tmp_path) -> None:
    eye = "1,0;0,1"
    words = ["simulate", "--G", eye, "--V", eye, "--beta", "1", "--tokens", "30", "--t", "3", "--kind", kind]
    numbers = json.loads(run(*words, "--json", "--out", str(tmp_path)))
    assert numbers["limit"] is None
    assert numbers["runs"][0]["mean_length"][-1] > numbers["runs"][0]["mean_length"][0]  # towards one cluster
    assert (tmp_path / "simulate.html").exists()
    assert "No limit is predicted" in run(*words, "--quiet")


def test_heads_and_noise() -> None:
    words = ["simulate", "--beta", "20", "--tokens", "40", "--t", "2", "--json"]
    two = json.loads(run(*words, "--G", "3,0;0,1 | 2,0;0,1", "--V", "1,0;0,1|1,0;0,1"))
    assert two["limit"]["case"] == "nonlinear"
    assert two["runs"][0]["w2"][-1] < two["runs"][0]["w2"][0]
    assert json.loads(run(*words, "--heads", "2", "--dim", "4"))["d"] == 4
    one = [*words, "--G", "3,0;0,1", "--V", "1,0;0,1"]
    calm, first, second = (json.loads(run(*one, *more)) for more in ((), ("--noise", ".2"), ("--noise", ".2")))
    assert first == second
    assert first["runs"][0]["w2"][-1] != calm["runs"][0]["w2"][-1]


def test_a_figure_for_papers(tmp_path) -> None:
    words = [*SIMULATE, "--tokens", "30", "--t", "2", "--quiet"]
    for name in ("w2.svg", "w2.pdf"):
        run(*words, "--figure", str(tmp_path / name))
        assert (tmp_path / name).stat().st_size > 1000
    assert "ends in .png, .svg or .pdf" in run(*words, "--figure", "w2.jpg", "--out", str(tmp_path / "run"), code=2)
    assert not (tmp_path / "run").exists()


def test_a_sweep_writes_its_table_and_continues(tmp_path) -> None:
    grid = ["--sweep", "beta=10,100 seed=0,1", "--random", "--tokens", "60", "--t", "4", "--out", str(tmp_path)]
    words = [*SIMULATE, *grid]
    rows = json.loads(run(*words, "--json"))["rows"]
    assert [(row["beta"], row["seed"]) for row in rows] == [(10, 0), (10, 1), (100, 0), (100, 1)]
    assert rows[0]["w2_min"] != rows[1]["w2_min"]
    assert {"sweep.json", "sweep.csv", "sweep.png"} <= {file.name for file in tmp_path.iterdir()}
    assert "4 runs up to t = 4" in run(*words, "--quiet")
    assert "leave out --beta" in run(*words, "--beta", "3", code=2)


def test_density_goes_to_the_limit(tmp_path) -> None:
    words = ["density", "--G", "1,0;0,1", "--V", "1,0;0,.5", "--beta", "1,2", "--t", ".4"]
    numbers = json.loads(run(*words, "--bandwidth", "48", "--out", str(tmp_path), "--json"))
    assert [r["beta"] for r in numbers["runs"]] == [1.0, 2.0]
    for r in numbers["runs"]:
        assert r["w2"][-1] < r["w2"][0]  # towards +-e_1
        assert len(r["amplitudes"]) == len(r["t"]) == 41
    assert {"density.json", "density.png"} <= {file.name for file in tmp_path.iterdir()}
    assert "size of the modes" in " ".join(run(*words, "--bandwidth", "48").split())
    plane = ["--G", "1,0,0;0,1,0;0,0,1", "--V", ".5,0,0;0,.5,0;0,0,1", "--t", ".1", "--beta", "1"]
    words = " ".join(run("density", *plane).split())  # nodes on the equator have no limit
    assert "size of the modes" in words
    assert "W2 is not measured" in words


def test_play_writes_a_page_and_opens_it_unless_told_not_to(tmp_path, monkeypatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: bool(opened.append(url)))
    page = tmp_path / "new" / "play.html"
    run("play", "--out", str(page), "--no-open")
    assert "<canvas" in page.read_text()
    assert not opened
    assert "No browser" in run("play", "--out", str(page))
    assert opened == [page.as_uri()]


def test_reproduce_lists_every_experiment() -> None:
    from attn_flow.experiments import NAMES

    titles = json.loads(run("reproduce", "--list", "--json"))
    assert list(titles) == list(NAMES)
    assert all(len(claim) > 20 for claim in titles.values())


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--strict",), 1)])
def test_a_claim_that_does_not_hold_is_no_error_unless_strict(options, code, monkeypatch, tmp_path) -> None:
    from attn_flow.experiments.papers import long_context

    refuted = {"claim": "pigs fly", "value": 0.0, "expected": 1.0, "tolerance": 0.1, "holds": False}
    plot = __import__("matplotlib.figure").figure.Figure
    monkeypatch.setattr(long_context, "compute", lambda **options: {"claims": [refuted]})
    monkeypatch.setattr(long_context, "plot", lambda numbers: plot())
    done = CliRunner().invoke(app, ["reproduce", "long_context", "--out", str(tmp_path), *options])
    assert done.exit_code == code
    assert "1 claim does not hold" in done.output
    assert json.loads((tmp_path / "long_context.json").read_text())["claims"] == [refuted]


def test_an_experiment_whose_package_is_missing_does_not_stop_the_others(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("attn_flow.experiments.NAMES", ("histograms", "hardmax"))
    monkeypatch.setitem(sys.modules, "rxnmapper", None)
    run("reproduce", "histograms", "--out", str(tmp_path), code=2)
    done = CliRunner().invoke(app, ["reproduce", "all", "--quick", "--out", str(tmp_path)])
    assert "histograms is left out: " in done.stderr
    assert "hardmax.png" in done.stdout


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    code = "from attn_flow.__main__ import main; main()"
    listing = subprocess.Popen([sys.executable, "-c", code, "reproduce", "--list"], stdout=-1, stderr=-1, text=True)
    listing.stdout.close()
    assert listing.communicate()[1] == ""


@pytest.mark.parametrize("command", ["limit", "density"])
def test_the_example_of_the_help_runs(command) -> None:
    example = " ".join(run(command, "--help").split("Example:")[1].split("Options:")[0].split())
    assert len(run(*shlex.split(example)[1:]).splitlines()) > 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["limit", "--G", "1,2;3", "--V", "1,0;0,1"], "in rows of one length"),
        (["limit", "--G", "1,a;3,4", "--V", "1,0;0,1"], "expected numbers as"),
        (["limit", "--G", "1,2,3;4,5,6", "--V", "1,0;0,1"], "expected a square matrix"),
        (["limit", "--G", "nowhere.npy", "--V", "1,0;0,1"], "no file nowhere.npy"),
        (["simulate", "--G", "1,0;0,1|1,0;0,1", "--V", "1,0;0,1"], "heads of G and V differ"),
        (["density", *SYMMETRIC, "--t", "0"], "t = 0.0, expected a positive, finite number"),
        (["simulate"], "give --G and --V, or --heads and --dim"),
        (["simulate", "--G", "1|2", "--V", "1|1"], "d at least 2"),
        (["simulate", "--heads", "2", "--dim", "1"], "Invalid value for '--dim'"),
        (["simulate", "--G", "1,0;0,1"], "--G alone: expected --G and --V together"),
        (["simulate", *SYMMETRIC, "--heads", "2"], "--G and --V give the heads; leave out --heads"),
        (["simulate", *SYMMETRIC, "--beta", "x"], "expected numbers separated by commas"),
        (["simulate", *SYMMETRIC, "--step", "rk5"], "rk4"),
        (["simulate", *SYMMETRIC, "--noise", "-1"], "noise = -1.0, expected a nonnegative"),
        (["simulate", *SYMMETRIC, "--kind", "hardmax", "--beta", "3"], "kind = 'hardmax', expected one of 'softmax'"),
        (["simulate", *SYMMETRIC, "--sweep", "n=9", "--step", "rk4"], "takes the default step; leave out --step"),
        (["simulate", *SYMMETRIC, "--sweep", "colour=1"], "expected beta, n, noise, seed"),
        (["simulate", *SYMMETRIC, "--sweep", "beta=1 beta=2"], "each at most once"),
        (["simulate", *SYMMETRIC, "--sweep", "n=9", "--tokens", "5"], "leave out --tokens"),
        (["simulate", *SYMMETRIC, "--sweep", "n=0"], "expected integers of at least 1 for n"),
        (["simulate", *SYMMETRIC, "--sweep", "seed=1.5"], "expected integers of at least 0"),
        (["simulate", *SYMMETRIC, "--t", "1,2"], "at least three times"),
        (["simulate", *SYMMETRIC, "--x0", "1,0", "--tokens", "5"], "--x0 gives the tokens; leave out --tokens"),
        (["density", *SYMMETRIC, "--t", "9", "--bandwidth", "16"], "bandwidth"),
        (["reproduce"], "which experiment?"),
        (["reproduce", "hardmx"], "no experiment 'hardmx': did you mean hardmax?"),
        (["play", "--out", "folder"], "expected the name of a page"),
        (["encoder", "minilm"], "`attn-flow encoder` is now `attn-flow inspect`"),
        (["predict", "runs"], "`attn-flow limit` predicts where tokens go"),
        (["bench"], "make bench"),
        (["simulte"], "simulate"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(words, sentence) -> None:
    output = run(*words, code=2).replace("│ ", "").replace(" │", "")
    assert sentence in output
    assert "Traceback" not in output
