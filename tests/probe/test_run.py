"""`probe` as a whole: stages that resume, keys, checks, and what users see of bad input."""

import os
import signal
import subprocess
import sys
import time
from inspect import signature
from pathlib import Path
from threading import get_ident

import numpy as np
import pytest
import torch
import transformers
from encoder_zoo import TEXT, long_inputs, tiny

from attn_flow.hooks import replace_attention
from attn_flow.hooks.corpus import fingerprint
from attn_flow.hooks.demo import tiny_bert
from attn_flow.probe import ProbeResult, prepare, probe, untrained_copy
from attn_flow.probe.findings import QUESTIONS, Reading
from attn_flow.probe.recording import MIN_TOKENS
from attn_flow.probe.run import STAGES, ProbeRun

WORDS = ["a b c d e f g h i j " * 2, "j i h g f e d c b a " * 2, "a c e g i b d f h j " * 2]


@pytest.fixture
def small() -> ProbeRun:
    return prepare(*tiny_bert(), WORDS)


def assert_equal(a: ProbeResult, b: ProbeResult) -> None:
    first, second = a.measurements, b.measurements
    assert first.keys() == second.keys()
    for name, z in first.items():
        torch.testing.assert_close(second[name], z, rtol=0, atol=0, equal_nan=True, msg=name)


def test_a_probe_that_was_stopped_and_continued_equals_one_that_was_not(small, tmp_path, monkeypatch) -> None:
    whole = small.run()
    with monkeypatch.context() as patch:
        patch.setitem(STAGES, "reading", (1, Reading, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)))
        with pytest.raises(KeyboardInterrupt):
            small.run(tmp_path)
    finished = {path.stem for path in tmp_path.iterdir()}
    assert {"limit", "averaging", "temperature"} <= finished  # clusters may have been stopped in another thread
    assert "reading" not in finished
    with monkeypatch.context() as patch:  # what is finished is not measured again
        for name in ("limit", "averaging", "temperature"):
            patch.setitem(STAGES, name, (*STAGES[name][:2], lambda *_, **__: 1 / 0))
        assert_equal(small.run(tmp_path), whole)


def test_stages_in_one_thread_and_in_two_give_the_same(small) -> None:
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(small.run())
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert_equal(*results)


def test_positions_are_not_read_while_the_model_runs_at_another_temperature(monkeypatch) -> None:
    """DeBERTa's positions are read from modules that are changed meanwhile, so its stages follow each other."""
    stages, workers = prepare(tiny("DeBERTa"), long_inputs("DeBERTa"), beta_factor=2.0), set()
    for name in QUESTIONS:
        measure = lambda *_, **__: time.sleep(0.05) or workers.add(get_ident())
        monkeypatch.setitem(STAGES, name, (*STAGES[name][:2], measure))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        stages.run()
    finally:
        torch.set_num_threads(threads)
    assert len(workers) == 1


def test_a_stage_of_other_inputs_is_measured_again(small, tmp_path) -> None:
    small.run(tmp_path)
    other = prepare(*tiny_bert(), [*WORDS[:2], "b b c c d d e e f f g g h h i i j j"])
    assert_equal(other.run(tmp_path), other.run())


def test_the_key_changes_with_inputs_weights_and_options() -> None:
    model, tokenizer = tiny_bert()
    key = lambda texts=WORDS, **options: prepare(model, tokenizer, texts, **options).about.key
    first = key()
    assert key(seed=np.int64(0), max_length=np.int64(160), batch=np.int64(16), beta_factor=np.float32(1)) == first
    others = {key(WORDS[:2]), key(max_length=20), key(seed=1), key(beta_factor=2.0)}
    weight = model.encoder.layer[1].output.dense.weight
    with torch.no_grad():
        before = float(weight[3, 4])
        weight[3, 4] += 1e-3
        others.add(key())
        weight[3, 4] = before
    assert key() == first
    assert len({*others, first}) == 6


def test_the_model_is_left_as_it_was() -> None:
    model, tokenizer = tiny_bert()
    before, hooks = fingerprint(model), [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    probe(model, tokenizer, WORDS)
    assert fingerprint(model) == before
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


def test_texts_that_are_too_short_are_named() -> None:
    with pytest.warns(
        UserWarning,
        match=rf"2 of 5 texts .*fewer than {MIN_TOKENS} tokens, or 8 .*: texts 1, 4, counted from 1. A verdict needs 8",
    ):
        run = prepare(*tiny_bert(), ["a b", *WORDS[:2], "c d", WORDS[2]])
    assert (run.about.skipped, run.about.texts) == ([0, 3], 3)
    with pytest.raises(ValueError, match=f"no text has {MIN_TOKENS} tokens"):
        probe(*tiny_bert(), ["a b"])
    inputs = long_inputs("BERT")
    inputs["special_tokens_mask"] = torch.arange(3)[:, None].eq(1).expand_as(inputs["input_ids"]).long()
    assert prepare(tiny("BERT"), inputs).about.skipped == [1]  # it has no tokens that are not special


def test_fewer_than_eight_texts_have_no_verdict_and_are_named_at_once(small) -> None:
    with pytest.warns(UserWarning, match=r"^A verdict needs 8 texts; with 3 there are numbers only.$"):
        prepare(*tiny_bert(), WORDS)
    assert {finding.verdict for finding in small.run().findings.values()} == {None}


def test_eight_equal_texts_have_no_distances_and_no_verdict(tmp_path) -> None:
    result = probe(*tiny_bert(), WORDS[:1] * 8)
    assert str(result.findings["clusters"]).startswith("Not measured: the texts are equal")
    assert "nan" not in result.report(tmp_path).read_text().split("<script>")[0]


def test_nothing_is_cut_off_a_models_own_inputs() -> None:
    about = prepare(tiny("BERT"), long_inputs("BERT"), max_length=17).about
    assert (about.max_length, about.truncated, about.tokens) == (None, 0, 55)


def test_weights_that_do_not_give_what_a_layer_computes_are_refused() -> None:
    model, tokenizer = tiny_bert()
    query = model.encoder.layer[1].attention.self.query
    query.register_forward_hook(lambda module, args, output: 1.1 * output)  # as an adapter does
    with pytest.raises(ValueError, match=r"layer 1.* register one of its own"):
        prepare(model, tokenizer, WORDS)
    with pytest.raises(ValueError, match=r"Rounding in bfloat16 may be the reason: probe model\.float\(\)"):
        prepare(tiny_bert()[0].bfloat16(), tokenizer, WORDS)
    with pytest.raises(ValueError, match=r"It has a flow .*: probe restore_attention\(model\), at another temperature"):
        prepare(replace_attention(tiny_bert()[0], beta_factor=4.0), tokenizer, WORDS)


def test_unknown_tokens_are_refused_unless_allowed() -> None:
    texts = ["x y z " * 8, "u v w " * 8]
    with pytest.raises(ValueError, match="tokens are unknown to"):
        prepare(*tiny_bert(), texts)
    assert prepare(*tiny_bert(), texts, max_unknown=1.0).about.unknown_share == 1


@pytest.mark.parametrize("max_length", [160, None])
def test_a_model_of_short_texts_keeps_as_many_tokens_as_it_takes(max_length) -> None:
    with pytest.warns(UserWarning, match="truncated"):
        run = prepare(*tiny_bert(), ["a b c d e f g h i j " * 4] * 2, max_length=max_length)
    assert (run.about.max_length, run.about.tokens) == (32, 64)


def test_probe_and_prepare_have_the_same_defaults() -> None:
    defaults = [{n: p.default for n, p in signature(f).parameters.items()} for f in (probe, prepare)]
    assert all(defaults[1][name] == defaults[0][name] for name in {*defaults[0]} & {*defaults[1]})


@pytest.mark.parametrize(("options", "message"), [({"beta_factor": 0.0}, "beta_factor"), ({"seed": -1}, "seed")])
def test_wrong_options_are_named(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(*tiny_bert(), WORDS, **options)
    with pytest.raises(TypeError, match="as an integer"):
        prepare(*tiny_bert(), WORDS, seed=1.5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("GPT-2", "Not measured: its tokens see only those before them."),
        (
            "local",
            "Not measured: layers see a window of 17 tokens each way; shorter texts (--max-length 18) can be asked.",
        ),
    ],
)
def test_a_model_whose_tokens_see_a_part_of_the_text_is_probed(name, reason, tmp_path) -> None:
    """Causal and local attention: what does not apply says so, and the report is written without its figure."""
    result = probe(local_encoder() if name == "local" else tiny(name), rows(40), max_length=None)
    for question in ("averaging", "clusters", "limit"):
        assert str(result.findings[question]) == reason
    assert len(result.to_frame()) == len(result.findings["temperature"].numbers["heads"])
    page = result.report(tmp_path).read_text()
    assert page.count("This does not say") == 1
    assert "<span>Not measured.</span></h1>" in page
    assert page.count(reason) == 6  # the cards and the sections
    assert page.count(">numbers</span>") == 1  # of the temperature
    assert "averaging: not measured" in repr(result)
    assert all(page.count(f">{words}</text>") == 2 for words in ("four largest logits", "warm", "middle", "frozen"))
    assert page.count('"sd": ') == len(result.to_frame())  # the map of heads is there without exponents
    assert ProbeResult.load(tmp_path).as_json() == result.as_json()


def test_a_window_as_wide_as_the_longest_text_hides_nothing() -> None:
    assert "window of 17" in prepare(local_encoder(), rows(19), max_length=None).recording.hides
    recording = prepare(local_encoder(), rows(18), max_length=None).recording
    assert recording.hides == ""
    assert recording.heads(1, 0).visible is None


def rows(n: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 60, (3, n), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def local_encoder() -> torch.nn.Module:
    """A ModernBERT with a window of 17 tokens each way."""
    ids = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = transformers.ModernBertConfig(**TEXT, **ids, local_attention=34)
    return transformers.ModernBertModel(config).eval()


def test_an_untrained_copy_has_the_same_shape_and_other_weights() -> None:
    model, _ = tiny_bert()
    own, other = (dict(m.named_parameters()) for m in (model, untrained_copy(model, seed=3)))
    assert own.keys() == other.keys()
    name = "encoder.layer.0.attention.self.query.weight"
    assert own[name].shape == other[name].shape
    assert not torch.allclose(own[name], other[name])


def test_ctrl_c_ends_a_probe_at_once_and_the_next_one_continues(tmp_path: Path) -> None:
    """The command is told to stop in the middle of its work: finished parts stay, the exit code is that of Ctrl-C."""
    command = [sys.executable, "-m", "attn_flow", "probe", "minilm", "--demo", "--first", "4", "--max-length", "32"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("parts/*.safetensors")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "the same command continues" in " ".join(errors.split())
    assert list(tmp_path.glob("parts/*.safetensors"))
    assert not (tmp_path / "probe.json").exists()
