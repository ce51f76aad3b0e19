"""probe, inspect and record as scripts use them."""

import json

import pytest
import torch
from typer.testing import CliRunner

from attn_flow import Trajectory
from attn_flow.cli.app import app
from attn_flow.hooks.demo import tiny_bert, word_tokenizer


def run(*words: str, code: int = 0, text: str | None = None):
    done = CliRunner().invoke(app, list(words), input=text)
    assert done.exit_code == code, done.output + repr(done.exception)
    return done


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tiny@home")
    for part in tiny_bert():
        part.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["probe"], "which model?"),
        (["probe", "./my-bert"], "which texts?"),
        (["probe", "minilm", "--texts", "nowhere.txt"], "no file nowhere.txt"),
        (["probe", "minilm", "minilm", "--demo"], "named twice"),
        (["probe", "minilm@hot", "--demo"], "expected @random or @beta_factor=FACTOR"),
        (["probe", "minilm", "minilm@beta_factor=-1", "--demo"], "beta_factor = -1.0, expected a nonnegative"),
        (["probe", "minilm@4", "--demo"], "expected @random or @beta_factor=FACTOR"),
        (["probe", "minilm", "--demo", "--device", "cuda"], "no CUDA device"),
        (["probe", "minilm", "--demo", "--dtype", "float16"], "half precision is too coarse"),
        (["inspect", "minlm"], "did you mean minilm?"),
        (["inspect", "./nowhere"], "no folder ./nowhere; expected a folder written by save_pretrained"),
        (["inspect", "minilm@beta_factor=4"], "leave it out here"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(words, sentence) -> None:
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert sentence in " ".join(run(*words, code=2).stderr.split())


def test_inspect_minilm() -> None:
    facts = json.loads(run("inspect", "minilm", "--json").stdout)
    assert (facts["architecture"], facts["layers"], facts["heads"], facts["dim"]) == ("BERT", 6, 12, 384)
    assert [check["exact"] for check in facts["check"]] == [True] * 6
    words = " ".join(run("inspect", "minilm").stdout.split())
    assert "beta 0.1768 in every layer" in words
    assert words.split("Self-check")[1].count(" exact") == 6


def test_inspect_needs_no_padding_token_and_few_positions(tmp_path) -> None:
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    LlamaModel(LlamaConfig(**sizes, vocab_size=20, max_position_embeddings=6)).save_pretrained(tmp_path)
    tokenizer = tiny_bert()[1]
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert len(json.loads(run("inspect", str(tmp_path), "--json").stdout)["check"]) == 2


def test_probe_compares_models_and_does_not_repeat_itself(tiny, tmp_path) -> None:
    (tmp_path / "t.txt").write_text("a b c d e f g h i j " * 3 + "\n" + "j i h g f e d c b a " * 3 + "\n")
    texts = ["--texts", str(tmp_path / "t.txt"), "--out", str(tmp_path / "out")]
    words = ["probe", tiny, f"{tiny}@random", *texts]
    assert set(json.loads(run(*words, "--json").stdout)) == {tiny, f"{tiny}@random"}
    assert len(list((tmp_path / "out").glob("*/report.html"))) == 2
    assert run(*words, "--quiet").stdout.count("finished before") == 2


def test_a_second_model_that_cannot_be_opened_is_reported_before_the_first_is_probed(tiny, tmp_path) -> None:
    (tmp_path / "t.txt").write_text("a b c\n")
    out = tmp_path / "out"
    run("probe", tiny, str(tmp_path / "t.txt"), "--texts", str(tmp_path / "t.txt"), "--out", str(out), code=2)
    assert not out.exists()


def test_probe_reads_jsonl_and_standard_input(tiny, tmp_path) -> None:
    text = " ".join("abcdefgh" * 3)
    (tmp_path / "t.jsonl").write_text(json.dumps({"body": text}) + "\n" + json.dumps({"body": text + " e f"}))
    words = ["probe", tiny, "--json", "--texts"]
    file = [str(tmp_path / "t.jsonl"), "--out", str(tmp_path / "a")]
    assert json.loads(run(*words, *file, "--field", "body").stdout)["about"]["texts"] == 2
    done = run(*words, "-", "--out", str(tmp_path / "b"), text=f"{text}\n\n{text}\n")
    assert json.loads(done.stdout)["about"]["texts"] == 2
    assert "no text field 'text' (found body)" in " ".join(run(*words, *file, code=2).stderr.split())


def test_texts_that_the_tokenizer_does_not_know_are_refused(tiny, tmp_path) -> None:
    capitals = word_tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"ABCDEFGHIJ"], 32)
    capitals.save_pretrained(tmp_path / "capitals")
    (tmp_path / "t.txt").write_text("A B C D E F G H I J A C E G I B D F H J\nJ I H G F E D C B A J H F D B I G E C A")
    words = ["probe", tiny, "--texts", str(tmp_path / "t.txt"), "--out", str(tmp_path / "out"), "--json"]
    assert "unknown to the tokenizer (100%" in " ".join(run(*words, code=2).stderr.split())
    about = json.loads(run(*words, "--tokenizer", str(tmp_path / "capitals")).stdout)["about"]
    assert about["unknown_share"] == 0


def test_a_vision_model_is_refused(tmp_path) -> None:
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    ViTModel(ViTConfig(**sizes, image_size=64, patch_size=8)).save_pretrained(tmp_path / "vit")
    (tmp_path / "t.txt").write_text("a b c\n")
    for command in ("probe", "record"):
        words = [command, str(tmp_path / "vit"), "--texts", str(tmp_path / "t.txt"), "--out", str(tmp_path / "out")]
        assert "vit has no tokenizer: give --tokenizer, or its own inputs" in " ".join(
            run(*words, code=2).stderr.split()
        )


def test_record_at_another_temperature(tiny, tmp_path) -> None:
    (tmp_path / "t.txt").write_text("\n".join("abcdefgh"[i:] + " a b c d e" for i in range(8)).replace("", " "))
    common = ["--texts", str(tmp_path / "t.txt"), "--batch", "3", "--json", "--quiet", "--max-unknown", "1"]
    levels = {}
    for model in (tiny, f"{tiny}@beta_factor=4"):
        told = json.loads(run("record", model, *common, "--out", str(tmp_path / model[-1])).stdout)
        assert (told["texts"], len(told["files"])) == (8, 3)
        levels[model] = [Trajectory.load(file).x for file in told["files"]]
    for x, y in zip(*levels.values()):
        assert torch.equal(x[0], y[0])
        assert not torch.equal(x[-1], y[-1])


@pytest.mark.parametrize("quiet", ["--quiet", "--json"])
def test_no_loading_bars_if_told_to_be_quiet(quiet, tiny, capfd) -> None:
    from transformers.utils import logging

    run("inspect", tiny, quiet)
    assert "it/s" not in capfd.readouterr().err
    assert logging.is_progress_bar_enabled()  # silent only during the loading
