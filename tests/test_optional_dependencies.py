"""The core without its optional dependencies: what works, and what a user is told about the rest."""

import subprocess
import sys

OPTIONAL = ("ot", "matplotlib", "typer", "rich", "pandas")
BLOCK = f"""
import sys
for name in {OPTIONAL}:
    sys.modules[name] = None  # as if it was not installed
"""


def run(code: str, expected: int = 0) -> str:
    """What the code prints in a process where the optional dependencies cannot be imported."""
    done = subprocess.run([sys.executable, "-c", BLOCK + code], capture_output=True, text=True)
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_layer_flow_limit_and_wasserstein() -> None:
    code = """
import torch
from attn_flow import Attention, Cloud, ContinuousAttentionLayer, Sphere, flow, limit, wasserstein

x = Sphere().uniform(50, 3, generator=torch.Generator().manual_seed(0))
attention = Attention.from_matrices(torch.diag(torch.tensor([3.0, 1.0, 1.0])), torch.eye(3), beta=50.0)
path = flow(attention, x, [0.0, 1.0, 5.0], progress=True)
target = limit(attention)
near, far = (float(wasserstein(path.x[i], target.push_forward(x))) for i in (-1, 0))
assert near < far, (near, far)
weights = torch.arange(1.0, 51.0)
assert float(wasserstein(x[:, :1], Cloud(x[:, :1], weights))) > 0  # one dimension
layer = ContinuousAttentionLayer(8, 2)
layer(torch.randn(2, 5, 8)).sum().backward()
"""
    run(code)


def test_wrapping_a_model() -> None:
    code = """
import torch
from transformers import BertConfig, BertModel
from attn_flow.hooks import record, wrap

sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
model = BertModel(BertConfig(**sizes, vocab_size=50)).eval()
inputs = {"input_ids": torch.arange(12)[None]}
assert record(model, inputs).x.shape[0] == 3
before = model(**inputs).last_hidden_state
with wrap(model, layers=[1], steps=2):
    assert not torch.allclose(model(**inputs).last_hidden_state, before)
assert torch.equal(model(**inputs).last_hidden_state, before)
"""
    run(code)


def test_a_missing_package_is_named_with_its_remedy() -> None:
    output = run("from attn_flow.base.figures import style\nwith style(): pass", expected=1)
    assert "matplotlib is not installed" in output
    assert 'pip install "attn-flow[' in output


def test_the_command_line_says_what_to_install() -> None:
    output = run('sys.argv = ["attn-flow", "limit"]\nfrom attn_flow.__main__ import main\nmain()', expected=2)
    assert output == 'attn-flow needs typer; install it with: pip install "attn-flow[cli]"\n'
