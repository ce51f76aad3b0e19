"""A probe whose stages are shared by two processes is the probe of one."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from encoder_zoo import tiny, tokenizer, words
from typer.testing import CliRunner

from attn_flow.cli.app import app
from attn_flow.probe import ProbeResult

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "attn_flow")


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
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    done = CliRunner().invoke(app, ["probe", *options, str(tmp_path / "one")])
    assert done.exit_code == 0, done.output
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert output.count("Report: ") == 1, output  # of the first process
    one, two = (ProbeResult.load(tmp_path / name) for name in ("one", "two"))
    assert two.about.key == one.about.key
    assert two.tokens == one.tokens
    for name, z in one.measurements.items():
        torch.testing.assert_close(two.measurements[name], z, rtol=1e-6, atol=1e-6, equal_nan=True, msg=name)
