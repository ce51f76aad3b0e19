"""A corpus in files: the states of `record`, interrupted and resumed, in two processes, and refused."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_zoo import inputs, tiny, tokenizer, words

from attn_flow import Trajectory
from attn_flow.base.files import lock_for_writing
from attn_flow.hooks import corpus as module
from attn_flow.hooks import record, record_corpus, scale_beta

TEXTS = words([1 + (7 * i) % 12 for i in range(22)])
FILES = [f"batch-{b:05}.safetensors" for b in range(6)]


def corpus(folder: Path, texts: Iterable[str] = TEXTS, **options: Any) -> tuple[Path, ...]:
    options = {"points": ["resid", "blocks.1.attn.hook_out"], "batch": 4, **options}
    return record_corpus(tiny("BERT"), tokenizer(), texts, folder, **options)


def assert_complete(folder: Path) -> None:
    """The files hold the states and labels of `record`, to the bit."""
    whole = record(tiny("BERT"), tokenizer(), TEXTS, points=["resid", "blocks.1.attn.hook_out"], batch=4)
    assert sorted(path.name for path in folder.glob("batch*")) == FILES
    texts = 0
    for path in map(Trajectory.load, sorted(folder.glob("batch*"))):
        size, n = path.x.shape[1:3]
        assert torch.equal(path.x, whole.x[:, texts : texts + size, :n])
        assert torch.equal(path.mask, whole.mask[texts : texts + size, :n])
        assert path.labels == {key: rows[texts : texts + size] for key, rows in whole.labels.items()}
        texts += size
    assert texts == len(TEXTS)


def test_the_states_of_a_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert corpus(tmp_path / "a") == tuple(tmp_path / "a" / name for name in FILES)
    assert_complete(tmp_path / "a")
    corpus(tmp_path / "b", (text for text in TEXTS), progress=True)  # a stream has no length
    assert_complete(tmp_path / "b")
    files = record_corpus(tiny("ViT"), inputs("ViT"), None, tmp_path / "images", batch=1)
    assert [Trajectory.load(file).x.shape for file in files] == [(4, 1, 17, 32)] * 2


# --- interrupted and resumed ---


def test_what_is_there_is_not_recorded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def until_it_breaks() -> Iterable[str]:
        yield from TEXTS[:11]
        raise KeyboardInterrupt

    recorded: list[int] = []
    plain = module.record_batch
    monkeypatch.setattr(module, "record_batch", lambda *a: recorded.append(a[2].first) or plain(*a))
    with pytest.raises(KeyboardInterrupt):
        corpus(tmp_path, until_it_breaks())
    assert sorted(path.name for path in tmp_path.glob("batch*")) == FILES[:2]
    for expected in ([0, 4, 8, 12, 16, 20], [0, 4, 8, 12, 16, 20]):  # the third time nothing is left to do
        corpus(tmp_path)
        assert recorded == expected
    assert_complete(tmp_path)


def launch(folder: Path, pause: float, *launcher: str) -> subprocess.Popen:
    """corpus(folder) in other processes, which wait `pause` seconds in the third batch."""
    here = Path(__file__).parent
    facts = {"folder": str(folder), "pause": pause, "texts": TEXTS, "threads": torch.get_num_threads()}
    path = os.pathsep.join([str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    command = [sys.executable, *launcher, str(here / "worker.py"), json.dumps(facts)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_stopped_keeps_its_finished_batches(tmp_path: Path, number: int) -> None:
    process, deadline = launch(tmp_path, 600.0), time.monotonic() + 120
    while not (tmp_path / FILES[1]).exists() and time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)
    with pytest.raises(ValueError, match="another run is writing"):
        corpus(tmp_path)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert sorted(path.name for path in tmp_path.glob("batch*")) == FILES[:2]
    corpus(tmp_path)
    assert_complete(tmp_path)


def test_two_processes_under_torchrun(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d")
    process = launch(tmp_path, 0.0, *launcher, "--rdzv-endpoint=localhost:0")
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    assert out.count("recorded 3 of 6 files") == 2, out
    assert_complete(tmp_path)


# --- refused ---


def test_a_folder_of_another_recording_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled() -> None:
        model = tiny("BERT")
        with scale_beta(model, 2.0):
            record_corpus(model, tokenizer(), TEXTS, tmp_path, batch=4)

    def edited() -> None:
        model = tiny("BERT")
        with torch.no_grad():  # one entry of one matrix
            model.encoder.layer[1].output.dense.weight[3, 5] += 1e-3
        record_corpus(model, tokenizer(), TEXTS, tmp_path, batch=4)

    def by_other_code() -> None:
        with monkeypatch.context() as changed:
            changed.setattr(module, "versions", lambda: {"source": "another"})
            corpus(tmp_path, points="resid")

    def read_by_another_tokenizer() -> None:
        other = tokenizer()
        other.add_tokens([TEXTS[0].split()[0] + "x"])
        record_corpus(tiny("BERT"), other, [TEXTS[0] + "x", *TEXTS[1:]], tmp_path, batch=4)

    corpus(tmp_path, points="resid")
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*")}
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: corpus(tmp_path, points="resid", batch=5), "with other batch; use another folder"),
        (lambda: corpus(tmp_path, points="hook_in", max_length=9), "with other points, max_length"),
        (edited, "with other weights"),
        (scaled, "with other changes"),
        (by_other_code, "with other versions"),
        (lambda: corpus(tmp_path, TEXTS[:9] + TEXTS[10:], points="resid"), "batch-00002.safetensors holds other texts"),
        (read_by_another_tokenizer, "batch-00000.safetensors holds other texts"),
    ]
    for run, message in cases:
        with pytest.raises(ValueError, match=message):
            run()
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*")} == before


def test_bad_texts_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"texts\[9\] is ' '"):
        corpus(tmp_path / "bad", [*TEXTS[:9], " "])
    for _ in range(2):  # the second time from files
        with pytest.raises(ValueError, match=r"3 of 6 tokens are unknown .*50%, expected at most 10%"):
            corpus(tmp_path / "unknown", ["w1 w2 what is this w3"])
        with pytest.warns(UserWarning, match="1 texts were longer than 32 tokens"):
            corpus(tmp_path / "long", [*TEXTS[:3], *words([40])])
    with pytest.raises(ValueError, match=r"1\d\d\d of 1\d\d\d tokens"):  # long before the last of them
        corpus(tmp_path / "endless", ("what " * 20 for _ in iter(int, 1)), batch=50)
    file = corpus(tmp_path, TEXTS[:3])[0]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"batch-00000\.safetensors is damaged.*move it away"):
        corpus(tmp_path, TEXTS[:3])
    file.unlink()
    corpus(tmp_path)
    with lock_for_writing(tmp_path / "process-1"):  # another process of torchrun
        corpus(tmp_path)
    assert_complete(tmp_path)
