"""Statistics of a corpus: against all states at once, killed and resumed, in shards and in two processes."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_zoo import inputs, tiny, tokenizer, words
from safetensors import safe_open
from tolerances import rounding
from torch import nn

from attn_flow.hooks import Statistics, merge_shards, record, record_corpus, scale_beta
from attn_flow.hooks.moments import Moments, Reservoir, keys

TEXTS = words([1 + (7 * i) % 12 for i in range(60)])
OPTIONS = {"batch": 4, "points": ["resid", "attn_out.1"]}


def corpus(folder: Path | None = None, texts: Iterable[str] = TEXTS, **options) -> Statistics:
    return record_corpus(tiny("BERT"), tokenizer(), texts, folder, **{**OPTIONS, "reservoir": 40, **options})


def equal(a: Statistics, b: Statistics) -> bool:
    """To the bit."""
    same = torch.equal(a.mean, b.mean) and torch.equal(a.covariance, b.covariance)
    x, y = a.trajectory(), b.trajectory()
    return same and a.n == b.n and a.texts == b.texts and torch.equal(x.x, y.x) and x.labels == y.labels


def test_moments_and_sample_are_those_of_all_states() -> None:
    path = record(tiny("BERT"), tokenizer(), TEXTS, **OPTIONS)
    held = corpus(reservoir=50)
    sample = held.trajectory()
    tokens = path.x[:, path.mask].double()
    assert held.n == tokens.shape[1]
    assert held.texts == 60
    torch.testing.assert_close(held.mean, tokens.mean(1), rtol=0, atol=1e-13)
    longest = max(int(m.sum()) for m in path.mask.split(OPTIONS["batch"]))  # tokens of a batch, multiplied at once
    for got, x in zip(held.covariance, tokens):
        expected = torch.cov(x.T, correction=0)
        spread = expected.diagonal().sqrt()
        assert bool(((got - expected).abs() <= (longest + 2) * 2**-24 * spread[:, None] * spread).all())
    assert sample.x.shape == (5, 50, 32)
    assert sample.t.tolist() == [0, 1, 2, 3, 1]
    for i in range(50):
        text, position = sample.labels["text"][i], sample.labels["position"][i]
        j = path.labels["position"][text].index(position)
        assert torch.equal(sample.x[:, i], path.x[:, text, j])
        assert sample.labels["token"][i] == path.labels["token"][text][j]
    assert len({(a, b) for a, b in zip(sample.labels["text"], sample.labels["position"])}) == 50


def test_the_sample_is_uniform() -> None:
    text = torch.arange(1000).repeat_interleave(40)
    position = torch.arange(40).repeat(1000)
    key = keys(3, text, position)
    assert len(key.unique()) == 40000
    chosen = key.argsort()[:4000]
    for values, cells in ((text[chosen] // 100, 10), (position[chosen], 40)):
        counts = torch.bincount(values, minlength=cells).double()
        expected = 4000 / cells
        chi2 = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi2 - cells) < 5 * (2 * cells) ** 0.5
    assert not torch.equal(key, keys(4, text, position))


def test_the_sample_does_not_depend_on_the_order() -> None:
    generator = torch.Generator().manual_seed(0)
    text, position = torch.arange(300), torch.randint(9, (300,), generator=generator)
    x = torch.randn(2, 300, 3, generator=generator)
    samples = []
    for order in (torch.arange(300), torch.randperm(300, generator=generator)):
        held = Reservoir.empty(20, 0, 2, 3)
        for part in order.split(7):
            chosen, key = held.chosen(text[part], position[part])
            picked = part[chosen]
            held.add(x[:, picked], key[chosen], text[picked], position[picked], [str(int(i)) for i in picked])
        held.settle()
        samples.append(held)
    assert torch.equal(samples[0].x, samples[1].x)
    assert samples[0].token == samples[1].token
    assert [int(t) for t in samples[0].token] == samples[0].text.tolist()


def test_a_full_batch_offers_no_more_than_the_sample_holds() -> None:
    """Few of many tokens are copied, from the first batch on, and never one of the smallest keys is left out."""
    text, position = torch.arange(100), torch.zeros(100, dtype=torch.int64)
    held = Reservoir.empty(20, 0, 1, 1)
    for part in (slice(0, 8), slice(8, 100)):
        chosen, key = held.chosen(text[part], position[part])
        smallest = keys(0, text, position)[: part.stop].sort().values[:20]
        assert set(key[chosen].tolist()) == set(smallest.tolist()) & set(key.tolist())
        size = int(chosen.sum())
        held.add(torch.zeros(1, size, 1), key[chosen], text[part][chosen], position[part][chosen], ["a"] * size)
        held.settle()
    assert held.key.tolist() == smallest.tolist()


def test_moments_of_odd_sizes() -> None:
    x = torch.randn(2500, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    held = Moments.zero(1, 7)
    held.n = 2500
    held.add(0, x[:4])
    held.add(0, x[4:])
    expected = torch.cov(x.T, correction=0)
    torch.testing.assert_close(held.covariance[0], expected, rtol=0, atol=rounding(expected, 2500))


def test_products_of_float32_do_not_lose_a_small_spread_beside_a_large_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    x = 1000 + torch.randn(3000, 40, generator=generator).cumsum(-1) / 8
    held = Moments.zero(1, 40)
    held.n = len(x)
    held.add(0, x[:1500])
    held.add(0, x[1500:].contiguous())
    u = x.double() - x.double().mean(0)
    expected = u.mT @ u / len(x)
    spread = expected.diagonal().sqrt()
    error = ((held.covariance[0] - expected).abs() / (spread[:, None] * spread)).max()
    assert float(error) < (1024 + 2) * 2**-24  # proved
    naive = x.mT @ x / len(x) - x.mean(0)[:, None] * x.mean(0)
    assert float(((naive.double() - expected).abs() / (spread[:, None] * spread)).max()) > 1000 * error


def test_streams_without_a_length_and_ready_inputs() -> None:
    assert equal(corpus(), corpus(texts=(text for text in TEXTS)))
    ready = record_corpus(tiny("ViT"), inputs("ViT"), special=False)
    assert ready.n == 32
    assert ready.trajectory().labels["token"][0].startswith("patch")


@pytest.mark.parametrize("stop", [1, 7, 14])
def test_a_broken_run_resumes_to_the_same_bits(tmp_path: Path, stop: int) -> None:
    whole = corpus()

    def until_it_breaks():
        for i, text in enumerate(TEXTS):
            if i == 4 * stop:
                raise KeyboardInterrupt
            yield text

    with pytest.raises(KeyboardInterrupt):
        corpus(tmp_path, until_it_breaks(), every=0)
    assert Statistics.load(tmp_path).batches == stop
    resumed = corpus(tmp_path, every=1e9)
    assert equal(resumed, whole)
    assert equal(Statistics.load(tmp_path), whole)
    again = corpus(tmp_path)  # finished: nothing is run again
    assert equal(again, whole)


def launch(folder: Path, pause: float, states: bool, *launcher: str) -> subprocess.Popen:
    """corpus(...) in another process, which waits `pause` seconds before each text."""
    here = Path(__file__).parent
    given = {"folder": str(folder), "pause": pause, "states": states, "texts": TEXTS, "options": OPTIONS}
    given["threads"] = torch.get_num_threads()  # bits are promised for as many threads
    path = os.pathsep.join([str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    command = [sys.executable, *launcher, str(here / "worker.py"), json.dumps(given)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def test_sigkill_at_any_moment(tmp_path: Path) -> None:
    whole, folder = corpus(), tmp_path / "run"
    process = launch(folder, 0.05, True)
    deadline = time.monotonic() + 120
    while not list(folder.glob("statistics.safetensors")) and time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (folder / ".statistics.safetensors.half").write_bytes(b"what a kill in the middle of a write leaves")
    killed = Statistics.load(folder)
    assert not killed.done
    assert 0 < killed.batches < 15
    resumed = corpus(folder, every=0, states=True)
    assert equal(resumed, whole)
    # The states on disk are complete, each token once.
    manifest = json.loads((folder / "manifest.json").read_text())
    places, x = [], []
    for entry in manifest["files"]:
        with safe_open(folder / entry["file"], "pt") as file:
            places += list(zip(file.get_tensor("text").tolist(), file.get_tensor("position").tolist()))
            x.append(file.get_tensor("x"))
    assert len(places) == len(set(places)) == whole.n
    torch.testing.assert_close(torch.cat(x, 1).double().mean(1), whole.mean, rtol=0, atol=1e-13)
    assert not list(folder.glob(".*"))


def test_shards_merge_to_the_whole(tmp_path: Path) -> None:
    whole = corpus()
    parts = [corpus(tmp_path, shard=f"{i}/3") for i in range(3)]
    for merged in (merge_shards(parts), merge_shards(parts[::-1]), merge_shards(tmp_path)):
        assert merged.n == whole.n
        assert merged.texts == 60
        torch.testing.assert_close(merged.mean, whole.mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(merged.covariance, whole.covariance, rtol=0, atol=1e-12)
        assert torch.equal(merged.trajectory().x, whole.trajectory().x)
        assert merged.trajectory().labels == whole.trajectory().labels
    with pytest.raises(ValueError, match=r"missing \[1\]"):
        merge_shards([parts[0], parts[2]])
    with pytest.raises(ValueError, match="holds no statistics"):
        merge_shards(tmp_path / "nowhere")
    other = corpus(None, TEXTS[::-1], shard=(1, 3))
    with pytest.raises(ValueError, match="shard 1 has read other texts"):
        merge_shards([parts[0], other, parts[2]])


def test_two_processes_under_torchrun(tmp_path: Path) -> None:
    whole, folder = corpus(), tmp_path / "run"
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d")
    process = launch(folder, 0.0, False, *launcher, "--rdzv-endpoint=localhost:0")
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    assert out.count(f"n {whole.n}") == 2, out  # every rank holds the whole
    merged = Statistics.load(folder)
    assert merged.n == whole.n
    torch.testing.assert_close(merged.mean, whole.mean, rtol=0, atol=1e-9)
    torch.testing.assert_close(merged.covariance, whole.covariance, rtol=0, atol=1e-9)
    assert merged.trajectory().labels == whole.trajectory().labels


def test_another_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    corpus(tmp_path, TEXTS[:20])
    cases = [
        ({"batch": 5}, TEXTS, r"what differs: batch \(4 there, 5 now\)\. Use another"),
        ({"reservoir": 41}, TEXTS, r"reservoir \(40 there, 41 now\)"),
        ({"states": True}, TEXTS, r"states \(False there, True now\)"),
        ({"points": "resid"}, TEXTS, "points"),
        ({"special": False}, TEXTS, r"special \(True there, False now\)"),
        ({}, TEXTS[1:], "over other texts"),
        ({}, TEXTS[:8], "more texts than given"),
    ]
    for options, texts, message in cases:
        with pytest.raises(ValueError, match=message):
            corpus(tmp_path, texts, **options)
    # The same texts and more: the finished run goes on.
    assert equal(corpus(tmp_path), corpus())


def test_bad_arguments(tmp_path: Path) -> None:
    for options, message in (
        ({"reservoir": 0}, "reservoir = 0"),
        ({"states": True}, "needs a folder"),
        ({"shard": "3/3"}, "counted from 0"),
        ({"shard": "a"}, "expected 'i/n'"),
    ):
        with pytest.raises(ValueError, match=message):
            corpus(**options)
    with pytest.raises(ValueError, match="got no batch"):
        corpus(None, TEXTS[:8], shard="5/99")
    record(tiny("BERT"), tokenizer(), TEXTS[:2]).save(tmp_path / "path.safetensors")
    with pytest.raises(ValueError, match="holds no Statistics"):
        Statistics.load(tmp_path / "path.safetensors")
    with pytest.raises(ValueError, match=r"texts\[9\] is empty"):
        corpus(None, [*TEXTS[:9], " "])
    with pytest.warns(UserWarning, match="1 texts were longer than 32"):
        held = corpus(None, [*TEXTS[:3], *words([40])])
    assert held.truncated == 1


def test_progress_is_shown_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    corpus()
    assert capsys.readouterr().err == ""
    corpus(progress=True)
    assert "tokens/s" in capsys.readouterr().err


def test_a_run_of_another_model_or_tokenizer_is_refused_with_what_differs(tmp_path: Path) -> None:
    def run(model: nn.Module, tok: Any = None, **options) -> Statistics:
        return record_corpus(model, tok or tokenizer(), TEXTS, tmp_path, **{**OPTIONS, "reservoir": 40, **options})

    whole = run(tiny("BERT"))
    edited = tiny("BERT")
    with torch.no_grad():  # one entry of one matrix
        edited.encoder.layer[1].output.dense.weight[3, 5] += 1e-3
    other = tokenizer()
    other.add_tokens(["never used"])
    cases = [
        (edited, None, r"what differs: the weights \('BertModel \w+' there, 'BertModel \w+' now\)\. Use"),
        (tiny("BERT", torch.float64), None, r"the dtype \('float32' there, 'float64' now\)"),
        (tiny("BERT"), other, r"what differs: the tokenizer \('\w+ \w+' there, '\w+ \w+' now\)\. Use"),
    ]
    for model, tok, message in cases:
        with pytest.raises(ValueError, match=message):
            run(model, tok)
    scaled = tiny("BERT")
    with scale_beta(scaled, 2.0), pytest.raises(ValueError, match="what is wrapped or scaled"):
        run(scaled)
    assert equal(Statistics.load(tmp_path), whole)
    anew = run(edited, again=True)
    assert not equal(anew, whole)
    assert equal(Statistics.load(tmp_path), anew)


def test_other_masks_are_other_inputs(tmp_path: Path) -> None:
    x = inputs("BERT")
    record_corpus(tiny("BERT"), x, folder=tmp_path)
    mask = x["attention_mask"].clone()
    mask[0, -1] = 0
    with pytest.raises(ValueError, match="over other texts"):
        record_corpus(tiny("BERT"), {**x, "attention_mask": mask}, folder=tmp_path)


def test_states_cannot_join_halfway_but_start_over(tmp_path: Path) -> None:
    whole = corpus(tmp_path)
    with pytest.raises(ValueError, match=r"states \(False there, True now\)"):
        corpus(tmp_path, states=True)
    assert equal(corpus(tmp_path, states=True, again=True), whole)
    files = json.loads((tmp_path / "manifest.json").read_text())["files"]
    assert sum(entry["tokens"] for entry in files) == whole.n
    corpus(tmp_path, again=True)
    assert [p.name for p in tmp_path.iterdir()] == ["statistics.safetensors"]  # nothing stale is left


def test_a_finished_run_knows_its_limit(tmp_path: Path) -> None:
    texts = [*TEXTS[:3], *words([40])]
    for _ in range(2):
        with pytest.warns(UserWarning, match="1 texts were longer than 32 tokens"):
            assert corpus(tmp_path, texts).about["limit"] == 32


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    corpus(tmp_path)
    path = tmp_path / "statistics.safetensors"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-9] ^= 4
    for content in (bytes(flipped), whole[:-1], whole[:100], b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"statistics\.safetensors is damaged.*move it away"):
            corpus(tmp_path)
    assert corpus(tmp_path, again=True).done


def test_two_runs_do_not_write_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = launch(folder, 0.1, False)
    deadline = time.monotonic() + 120
    while not (folder / "statistics.safetensors").exists() and time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)
    with pytest.raises(ValueError, match="another run is writing"):
        corpus(folder)
    corpus(folder, shard="0/2")  # another shard is another run
    process.kill()
    process.wait()
    assert equal(corpus(folder), corpus())
    assert not list(folder.glob(".*"))


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    corpus(tmp_path, TEXTS[:20])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"statistics\.safetensors could not be written .*too large"):
            corpus(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert Statistics.load(tmp_path).texts == 20
    assert equal(corpus(tmp_path), corpus())


def test_a_short_repr() -> None:
    assert len(repr(corpus())) < 300
    assert "n=" in repr(corpus())
