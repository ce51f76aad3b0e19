"""Names of torch, POT and transformers that are not promised to stay: each in use is here, and works as we use it."""

import ast
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
FOREIGN = {"torch", "ot", "transformers", "scipy", "geomloss", "numpy", "np", "dist", "F", "nn", "safetensors"}


def flash_attention() -> None:
    """Softmax averages and their log-sum-exp in one pass: averages/dense.py, transport/entropic.py."""
    q = torch.tensor([[[[1.0, 0.0], [0.0, 2.0]]]])
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, q, q, 0.0, False, attn_mask=torch.zeros(1, 1, 2, 2), scale=0.5
    )
    assert torch.allclose(log_sum[0, 0], (0.5 * q[0, 0] @ q[0, 0].T).logsumexp(-1))
    assert torch.allclose(out[0, 0], (0.5 * q[0, 0] @ q[0, 0].T).softmax(-1) @ q[0, 0])


def wrapped_by_functorch() -> None:
    """Whether values may be looked at: base/checks.py."""
    asked = torch._C._functorch.is_functorch_wrapped_tensor
    seen = []
    torch.func.vmap(lambda x: seen.append(asked(x)) or x)(torch.ones(2, 3))
    assert seen == [True]
    assert not asked(torch.ones(2))


def forward_level() -> None:
    """Whether derivatives are taken forward, by torch.func too: base/checks.py."""
    asked = lambda: torch.autograd.forward_ad._current_level >= 0
    seen = []
    torch.func.jvp(lambda x: seen.append(asked()) or x, (torch.ones(2),), (torch.ones(2),))
    torch.func.grad(lambda x: seen.append(asked()) or x.sum())(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        seen.append(asked())
    assert seen == [True, False, True]
    assert not asked()


def memory_events() -> None:
    """Every allocation of a run: base/memory.py."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        torch.ones(1000, dtype=torch.float64)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert max(event.nbytes() for event in events) >= 8000
    assert all(event.start_ns() > 0 for event in events)


def sparse_network_simplex() -> None:
    """Exact transport over some pairs with a warm start: transport/candidates.py."""
    from ot.lp.emd_wrap import emd_c_sparse

    half = np.full(2, 0.5)
    i, j = np.array([0, 0, 1, 1], dtype=np.uint64), np.array([0, 1, 0, 1], dtype=np.uint64)
    costs = np.array([1.0, 0.0, 0.0, 1.0])
    i, j, mass, _, u, v, _ = emd_c_sparse(half, half, i, j, costs, 100, np.zeros(2), np.zeros(2))
    assert sorted(zip(i.tolist(), j.tolist(), mass.tolist())) == [(0, 1, 0.5), (1, 0, 0.5)]
    assert math.isclose(half @ u + half @ v, 0, abs_tol=1e-12)


def parameters_of_a_module() -> None:
    """A fused projection scaled for one forward pass: hooks/temperature.py."""
    module = torch.nn.MultiheadAttention(4, 2)
    kept = module._parameters["in_proj_weight"]
    module._parameters["in_proj_weight"] = 2 * kept
    assert torch.equal(module.in_proj_weight, 2 * kept)


def attention_implementation() -> None:
    """Which of GPT-2's attentions runs: hooks/architectures.py."""
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(n_layer=1, n_head=2, n_embd=4, vocab_size=10, bos_token_id=0, eos_token_id=0)
    model = GPT2Model._from_config(config, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


def simulated_device() -> None:
    """attn_flow.bench.simulated_device, on which host reads are counted."""
    script = (
        "from attn_flow.bench.simulated_device import *\nwith accelerator(): assert float(on(torch.ones(2)).sum()) == 2"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


GUARDS = {
    "torch._C._disabled_torch_function_impl": simulated_device,
    "torch.Tensor._make_wrapper_subclass": simulated_device,
    "torch.utils._python_dispatch.TorchDispatchMode": simulated_device,
    "torch.utils._pytree.tree_leaves.tree_map": simulated_device,
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": flash_attention,
    "torch._C._functorch.is_functorch_wrapped_tensor": wrapped_by_functorch,
    "torch.autograd.forward_ad._current_level": forward_level,
    "torch.profiler.profile().profiler.kineto_results": memory_events,
    "ot.lp.emd_wrap.emd_c_sparse": sparse_network_simplex,
    "torch.nn.Module()._parameters": parameters_of_a_module,
    "transformers: config._attn_implementation": attention_implementation,
}


@pytest.mark.parametrize("name", GUARDS)
def test_a_private_name_still_works(name: str) -> None:
    try:
        GUARDS[name]()
    except Exception as error:
        where = GUARDS[name].__doc__
        pytest.fail(f"{name} has gone or changed ({type(error).__name__}: {error}). It serves: {where}")


def private(path: Path) -> set[str]:
    """Underscored names a file reaches from a foreign module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FOREIGN:
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if any(part.startswith("_") and not part.startswith("__") for part in parts):
                found.add(".".join(parts))
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            parts = dotted.split(".")
            hidden = [part for part in parts[1:] if part.startswith("_") and not part.startswith("__")]
            if parts[0] in FOREIGN and hidden and all(part.isidentifier() for part in parts):
                found.add(dotted)
    return found


def test_no_other_private_name_is_reached() -> None:
    files = [p for folder in ("attn_flow", "hooks", "experiments") for p in (ROOT / folder).rglob("*.py")]
    reached = {name for path in files for name in private(path)}
    unguarded = [name for name in reached if not any(known.startswith(name) for known in GUARDS)]
    assert unguarded == [], "guard these in GUARDS, or do without"
