"""A folder of results beside inputs that changed in one respect only: refused with what differs, nothing lost."""

import json
from pathlib import Path

import pytest
from attack.runs import TEXTS
from typer.testing import CliRunner

from attn_flow.cli.entry import app
from attn_flow.hooks import corpus


def recorded(folder: Path, field: str) -> tuple[int, str]:
    words = ["record", "minilm", "--texts", str(folder / "texts.jsonl"), "--field", field, "--batch", "2", "--quiet"]
    done = CliRunner().invoke(app, [*words, "--out", str(folder / "out")])
    return done.exit_code, " ".join(done.stderr.split())


def written(folder: Path, first: list[str], second: list[str]) -> None:
    lines = [json.dumps({"first": a, "second": b}) for a, b in zip(first, second)]
    (folder / "texts.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize("change", ["field", "text", "source"])
def test_record_over_other_texts_or_by_other_code_is_refused(change, tmp_path, monkeypatch):
    """Only --field, only one word of one text, only the package's own code."""
    written(tmp_path, TEXTS[:6], TEXTS[6:12])
    assert recorded(tmp_path, "first")[0] == 0
    file = tmp_path / "out" / "statistics.safetensors"
    assert recorded(tmp_path, "first")[0] == 0  # nothing changed
    before = file.read_bytes()
    with monkeypatch.context() as changed:
        if change == "field":
            code, words = recorded(tmp_path, "second")
        elif change == "text":
            written(tmp_path, [*TEXTS[:5], TEXTS[5].replace("nearest", "farthest")], TEXTS[6:12])
            code, words = recorded(tmp_path, "first")
        else:
            there = corpus.versions()
            changed.setattr(corpus, "versions", lambda: there | {"source": "another"})
            code, words = recorded(tmp_path, "first")
    expected = "of this one's source ({'source'" if change == "source" else "holds a run over other texts (they differ"
    assert (code, expected in words) == (2, True), words
    assert "--again" in words
    assert file.read_bytes() == before
