"""Statistics of a corpus: against all states at once, interrupted and resumed, in shards and in two processes."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_zoo import inputs, tiny, tokenizer, words
from torch import nn

from attn_flow.hooks import Statistics, merge_shards, record, record_corpus, scale_beta
from attn_flow.hooks.statistics import random_keys

TEXTS = words([1 + (7 * i) % 12 for i in range(60)])
OPTIONS: dict[str, Any] = {"batch": 4, "points": ["resid", "blocks.1.attn.hook_out"], "reservoir": 40}


def corpus(folder: Path | None = None, texts: Iterable[str] = TEXTS, **options: Any) -> Statistics:
    return record_corpus(tiny("BERT"), tokenizer(), texts, folder, **{**OPTIONS, **options})


def assert_equal(a: Statistics, b: Statistics) -> None:
    """To the bit."""
    assert (a.n, a.texts, a.done) == (b.n, b.texts, b.done)
    assert torch.equal(a.mean, b.mean)
    assert torch.equal(a.covariance, b.covariance)
    assert_same_sample(a, b)


def assert_same_sample(a: Statistics, b: Statistics) -> None:
    x, y = a.trajectory(), b.trajectory()
    assert torch.equal(x.x, y.x)
    assert x.labels == y.labels


def test_moments_and_sample_are_those_of_all_states() -> None:
    path = record(tiny("BERT"), tokenizer(), TEXTS, points=OPTIONS["points"])
    statistics = corpus(reservoir=50)
    sample, tokens = statistics.trajectory(), path.x[:, path.mask].double()
    assert (statistics.n, statistics.texts) == (tokens.shape[1], 60)
    torch.testing.assert_close(statistics.mean, tokens.mean(1), rtol=0, atol=1e-6)
    for covariance, x in zip(statistics.covariance, tokens):
        torch.testing.assert_close(covariance, torch.cov(x.T, correction=0), rtol=0, atol=1e-5)
    assert sample.x.shape == (5, 50, 32)
    assert sample.t.tolist() == [0, 1, 2, 3, 1]
    for i, (text, position) in enumerate(zip(sample.labels["text"], sample.labels["position"])):
        torch.testing.assert_close(sample.x[:, i], path.x[:, text, position], rtol=0, atol=1e-5)
        assert sample.labels["token"][i] == path.labels["token"][text][position]
    assert len(set(zip(sample.labels["text"], sample.labels["position"]))) == 50
    assert len(repr(statistics)) < 300


def test_without_a_sample_there_are_moments_only(tmp_path: Path) -> None:
    statistics = corpus(tmp_path, reservoir=0)
    assert torch.equal(statistics.mean, corpus().mean)
    with pytest.raises(ValueError, match="no tokens were sampled; record with reservoir=1024"):
        Statistics.load(tmp_path).trajectory()


def test_the_sample_is_uniform_and_does_not_depend_on_the_order() -> None:
    generator = torch.Generator().manual_seed(0)
    text, position = torch.arange(1000).repeat_interleave(40), torch.arange(40).repeat(1000)
    assert not torch.equal(random_keys(4, text, position), random_keys(3, text, position))
    samples = []
    for order in (torch.arange(40_000), torch.randperm(40_000, generator=generator)):
        sample = Statistics.empty({"points": [""], "reservoir": 4000, "seed": 3}, 1)
        for part in order.split(7000):
            index, key = sample.candidates(text[part], position[part])
            index = part[index]
            token = [str(int(i)) for i in index]
            sample.add_sample(index[None, :, None].float(), key, text[index], position[index], token)
        samples.append(sample)
    assert torch.equal(samples[0].x, samples[1].x)
    assert samples[0].token == samples[1].token
    assert [int(token) for token in sample.token] == (40 * sample.text + sample.position).tolist()
    for values, cells in ((sample.text // 100, 10), (sample.position, 40)):
        counts, expected = torch.bincount(values, minlength=cells).double(), 4000 / cells
        chi2 = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi2 - cells) < 5 * (2 * cells) ** 0.5


def test_products_of_float32_do_not_lose_a_small_spread_beside_a_large_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    x = 1000 + torch.randn(3000, 39, generator=generator).cumsum(-1) / 8
    statistics = Statistics.empty({"points": [""]}, 39)
    for part in (x[:4], x[4:1500], x[1500:]):
        statistics.add_moments([part])
    u = x.double() - x.double().mean(0)
    expected = u.mT @ u / len(x)
    spread = expected.diagonal().sqrt()
    error = ((statistics.covariance[0] - expected).abs() / (spread[:, None] * spread)).max()
    assert float(error) < (1024 + 2) * 2**-24  # proved
    naive = x.mT @ x / len(x) - x.mean(0)[:, None] * x.mean(0)
    assert float(((naive.double() - expected).abs() / (spread[:, None] * spread)).max()) > 1000 * error


def test_streams_without_a_length_and_ready_inputs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_equal(corpus(), corpus(texts=(text for text in TEXTS)))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    corpus(texts=(time.sleep(0.3) or text for text in TEXTS[:3]), progress=True, batch=1)
    assert "record: 1 done" in (shown := capsys.readouterr().err)
    assert "tokens/s" in shown
    images = record_corpus(tiny("ViT"), inputs("ViT"), special=False)
    assert images.n == 32


# --- interrupted and resumed ---


@pytest.mark.parametrize("stop", [1, 7, 14])
def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path: Path, stop: int) -> None:
    def until_it_breaks() -> Iterator[str]:
        for i, text in enumerate(TEXTS):
            if i == 4 * stop:
                raise KeyboardInterrupt
            yield text

    whole = corpus()
    with pytest.raises(KeyboardInterrupt):
        corpus(tmp_path, until_it_breaks(), every=0)
    assert Statistics.load(tmp_path).batches == stop
    for _ in range(2):  # the second time nothing is left to do
        assert_equal(corpus(tmp_path), whole)
        assert_equal(Statistics.load(tmp_path), whole)


def launch(folder: Path, pause: float, *launcher: str, every: float = 0.0) -> subprocess.Popen:
    """corpus(...) in another process, which waits `pause` seconds in the third batch."""
    here = Path(__file__).parent
    arguments = {"folder": str(folder), "pause": pause, "texts": TEXTS, "threads": torch.get_num_threads()}
    arguments["options"] = {**OPTIONS, "every": every}
    path = os.pathsep.join([str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    command = [sys.executable, *launcher, str(here / "worker.py"), json.dumps(arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def wait_for(process: subprocess.Popen, is_there: Any) -> None:
    deadline = time.monotonic() + 120
    while not is_there() and time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)


def test_a_second_writer_is_refused_and_sigkill_loses_nothing(tmp_path: Path) -> None:
    whole, folder = corpus(), tmp_path / "run"
    process = launch(folder, 600.0)
    wait_for(process, lambda: list(folder.glob("statistics.safetensors")))
    with pytest.raises(ValueError, match="another run is writing"):
        corpus(folder)
    corpus(folder, shard="0/2")  # another shard is another run
    (folder / "statistics-0-of-2.safetensors").unlink()
    process.send_signal(signal.SIGKILL)
    process.wait()
    (folder / ".statistics.safetensors.half").write_bytes(b"what a kill in the middle of a write leaves")
    assert not Statistics.load(folder).done
    assert_equal(corpus(folder, every=0), whole)
    assert not list(folder.glob(".*"))


def test_ctrl_c_keeps_the_finished_batches(tmp_path: Path) -> None:
    """In the third forward pass, long before the next save; the run ends before the pass would have ended."""
    process = launch(tmp_path, 600.0, every=1e9)
    for _ in range(3):
        assert process.stdout.readline() == "pass\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert "KeyboardInterrupt" in out
    assert Statistics.load(tmp_path).batches == 2
    assert_equal(corpus(tmp_path), corpus())


# --- shards ---


def test_shards_merge_to_the_whole(tmp_path: Path) -> None:
    whole = corpus()
    parts = [corpus(tmp_path, shard=f"{i}/3") for i in range(3)]
    for merged in (merge_shards(parts), merge_shards(parts[::-1]), merge_shards(tmp_path)):
        assert (merged.n, merged.texts, merged.content) == (whole.n, 60, whole.content)
        torch.testing.assert_close(merged.mean, whole.mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(merged.covariance, whole.covariance, rtol=0, atol=1e-12)
        assert_same_sample(merged, whole)
    other = corpus(None, TEXTS[::-1], shard=(1, 3))
    for shards, message in (
        ([parts[0], parts[2]], r"missing \[1\]"),
        (tmp_path / "nowhere", "holds no statistics"),
        ([parts[0], other, parts[2]], "shard 1 has read other texts"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_shards(shards)


def test_two_processes_under_torchrun(tmp_path: Path) -> None:
    whole, folder = corpus(), tmp_path / "run"
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d")
    process = launch(folder, 0.0, *launcher, "--rdzv-endpoint=localhost:0")
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    assert out.count(f"n {whole.n}") == 2, out  # every rank has the whole
    merged = Statistics.load(folder)
    torch.testing.assert_close(merged.covariance, whole.covariance, rtol=0, atol=1e-9)
    assert merged.trajectory().labels == whole.trajectory().labels


# --- refused ---


def test_another_run_in_the_same_folder_is_refused_with_what_differs(tmp_path: Path) -> None:
    corpus(tmp_path, TEXTS[:20])
    cases: list[tuple[dict[str, Any], list[str], str]] = [
        ({"batch": 5}, TEXTS, r"what differs: batch \(4 there, 5 now\)\. Use another"),
        ({"reservoir": 41}, TEXTS, r"reservoir \(40 there, 41 now\)"),
        ({"special": False}, TEXTS, r"special \(True there, False now\)"),
        ({"points": "resid"}, TEXTS, "points"),
        ({}, TEXTS[1:], "over other texts"),
        ({}, TEXTS[:8], "more texts than these"),
    ]
    for options, texts, message in cases:
        with pytest.raises(ValueError, match=message):
            corpus(tmp_path, texts, **options)
    # The same texts and more: the finished run goes on.
    assert_equal(corpus(tmp_path), corpus())
    x = inputs("BERT")
    record_corpus(tiny("BERT"), x, folder=tmp_path / "inputs")
    mask = x["attention_mask"].clone()
    mask[0, -1] = 0
    with pytest.raises(ValueError, match="over other texts"):
        record_corpus(tiny("BERT"), {**x, "attention_mask": mask}, folder=tmp_path / "inputs")


def test_a_run_of_another_model_or_tokenizer_is_refused_with_what_differs(tmp_path: Path) -> None:
    def run(model: nn.Module, tok: Any = None, **options: Any) -> Statistics:
        return record_corpus(model, tok or tokenizer(), TEXTS, tmp_path, **{**OPTIONS, **options})

    whole, edited, other = run(tiny("BERT")), tiny("BERT"), tokenizer()
    with torch.no_grad():  # one entry of one matrix
        edited.encoder.layer[1].output.dense.weight[3, 5] += 1e-3
    other.add_tokens(["never used"])
    for model, tok, message in (
        (edited, None, r"what differs: weights \('BertModel \w+' there, 'BertModel \w+' now\)\. Use"),
        (tiny("BERT", torch.float64), None, r"dtype \('float32' there, 'float64' now\)"),
        (tiny("BERT"), other, r"what differs: tokenizer \('\w+ \w+' there, '\w+ \w+' now\)\. Use"),
    ):
        with pytest.raises(ValueError, match=message):
            run(model, tok)
    scaled = tiny("BERT")
    with scale_beta(scaled, 2.0), pytest.raises(ValueError, match=r"changes \(\[\] there, \[.layer 0: beta_factor"):
        run(scaled)
    assert_equal(Statistics.load(tmp_path), whole)
    assert_equal(run(edited, again=True), Statistics.load(tmp_path))


def test_starting_over_leaves_nothing_stale(tmp_path: Path) -> None:
    assert_equal(corpus(tmp_path), corpus())
    corpus(tmp_path, again=True)
    assert [p.name for p in tmp_path.iterdir()] == ["statistics.safetensors"]


def test_bad_arguments(tmp_path: Path) -> None:
    for options, message in (
        ({"reservoir": -1}, "reservoir = -1"),
        ({"shard": "3/3"}, "counted from 0"),
        ({"shard": (-1, 3)}, "counted from 0"),
        ({"shard": "a"}, "expected 'i/n'"),
        ({"texts": TEXTS[:8], "shard": "5/99"}, "got no batch"),
        ({"texts": [*TEXTS[:9], " "]}, r"texts\[9\] is empty"),
        ({"folder": ""}, "an empty name"),
    ):
        with pytest.raises(ValueError, match=message):
            corpus(**options)  # type: ignore[arg-type]
    record(tiny("BERT"), tokenizer(), TEXTS[:2]).save(tmp_path / "path.safetensors")
    with pytest.raises(ValueError, match="holds no Statistics"):
        Statistics.load(tmp_path / "path.safetensors")
    for _ in range(2):  # also a finished run knows its limit
        with pytest.warns(UserWarning, match="1 texts were longer than 32 tokens"):
            assert corpus(tmp_path / "run", [*TEXTS[:3], *words([40])]).truncated == 1


def test_damaged_states_and_full_disks(tmp_path: Path) -> None:
    corpus(tmp_path, TEXTS[:20])
    path, before = tmp_path / "statistics.safetensors", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"statistics\.safetensors could not be written .*too large"):
            corpus(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert Statistics.load(tmp_path).texts == 20
    assert_equal(corpus(tmp_path), corpus())
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-9] ^= 4
    for content in (bytes(flipped), whole[:-1], whole[:100], b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"statistics\.safetensors is damaged.*move it away"):
            corpus(tmp_path)
    assert corpus(tmp_path, again=True).done
