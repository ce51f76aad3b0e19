"""What the core alone can do, for an environment without the optional dependencies (`make test-core-only`).

It runs in that environment by itself, without pytest: the layer, flow, limit, wasserstein, wrap, and the command line.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import torch
from transformers import BertConfig, BertModel

from attn_flow import Attention, ContinuousAttentionLayer, Sphere, flow, limit, wasserstein
from attn_flow.hooks import wrap

OPTIONAL = ("ot", "matplotlib", "pandas", "pytest")  # newer transformers bring typer and rich themselves


def main() -> None:
    present = [name for name in OPTIONAL if importlib.util.find_spec(name) is not None]
    assert not present, f"this environment has {', '.join(present)}: it is not the core alone"
    x = Sphere().uniform(50, 3, generator=torch.Generator().manual_seed(0))
    attention = Attention.from_matrices(torch.diag(torch.tensor([3.0, 1.0, 1.0])), torch.eye(3), beta=50.0)
    path = flow(attention, x, [0.0, 5.0])
    target = limit(attention).push_forward(x)
    assert wasserstein(path.x[-1], target) < wasserstein(path.x[0], target)
    layer = ContinuousAttentionLayer(8, 2)
    layer(torch.randn(2, 5, 8)).sum().backward()
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertModel(BertConfig(**sizes, vocab_size=50)).eval()
    ids = torch.arange(12)[None]
    before = model(ids).last_hidden_state
    with wrap(model, layers=[1], steps=2):
        assert not torch.allclose(model(ids).last_hidden_state, before)
    assert torch.equal(model(ids).last_hidden_state, before)
    command = Path(sys.executable).with_name("attn-flow")
    code = "import sys; sys.modules['typer'] = None; from attn_flow.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2, done
    assert done.stderr.startswith("attn-flow needs typer; install it with: pip install "), done.stderr
    if importlib.util.find_spec("typer") is not None:
        assert subprocess.run([command, "--help"], capture_output=True).returncode == 0
    print("the core alone: layer, flow, limit, wasserstein, wrap and the message of attn-flow work")


if __name__ == "__main__":
    main()
