"""A probe whose texts and stages are shared by two processes is the probe of one."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from encoder_zoo import tiny, tokenizer, words
from typer.testing import CliRunner

from attn_flow.cli.app import app
from attn_flow.probe import Probe
from attn_flow.probe.result import BY_NAME, SINGLE

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "attn_flow")
MEASURED = ("exact_seconds", "geomloss_seconds")  # what a clock said


def parts_of(found: Probe) -> dict[str, torch.Tensor]:
    by_name = {f"{group}/{name}": part for group in BY_NAME for name, part in getattr(found, group).items()}
    parts = {**by_name, **{group: getattr(found, group) for group in SINGLE}}
    return {f"{name}.{k}": z for name, part in parts.items() for k, z in vars(part).items() if k not in MEASURED}


def test_two_processes_probe_as_one(tmp_path: Path) -> None:
    """In float64, whose rounding, enlarged by whatever is divided by on the way, stays below a millionth."""
    tiny("BERT").save_pretrained(tmp_path / "bert")
    tokenizer().save_pretrained(tmp_path / "bert")
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(words([24 + i % 7 for i in range(17)])))  # batches of 16: both processes have one
    options = [str(tmp_path / "bert"), "--texts", str(texts), "--max-length", "32", "--dtype", "float64"]
    options += ["--quiet", "--out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *TORCHRUN, "probe", *options, str(tmp_path / "two")]
    started = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    done = CliRunner().invoke(app, ["probe", *options, str(tmp_path / "one")])
    assert done.exit_code == 0, done.output
    said, _ = started.communicate(timeout=240)
    assert started.returncode == 0, said
    assert said.count("Report: ") == 1, said  # of the first process
    one, two = Probe.load(tmp_path / "one"), Probe.load(tmp_path / "two")
    assert [check.pop("error") < 1e-12 for found in (one, two) for check in found.about["self_check"]] == [True] * 6
    assert two.about == one.about
    assert two.tokens == one.tokens
    alone, shared = parts_of(one), parts_of(two)
    assert shared.keys() == alone.keys()
    for name, z in alone.items():
        torch.testing.assert_close(shared[name], z, rtol=1e-6, atol=1e-6, equal_nan=True, msg=name)
    folders = sorted(p.name for p in (tmp_path / "two" / "parts").iterdir() if p.is_dir())
    assert folders == ["0-of-2", "1-of-2"]
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert again.stdout.count("finished before") == 1, again.stderr
