"""The optional compiled kernel equals the PyTorch path; skipped by name where there is no C++ compiler."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tolerances import rounding

from attn_flow import Attention, Sphere, flow
from attn_flow.attention import truncated
from attn_flow.averages import compiled, near, patches

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module", autouse=True)
def used():
    with compiled.kernel():
        yield


def sphere(n, d, seed=0):
    return Sphere().uniform(n, d, generator=torch.Generator().manual_seed(seed))


def both(attention, x, **options):
    """The truncated drift by the kernel and by PyTorch, and the exact one."""
    ours = attention.truncated_drift(x, **options)
    with compiled.kernel(False):
        theirs = attention.truncated_drift(x, **options)
    options = {name: z.double() if z.is_floating_point() else z for name, z in options.items()}
    exact = replace(attention.to(torch.float64), truncation=0.0).drift(x.double(), **options)
    return ours, theirs, exact


@pytest.mark.parametrize("masks", [{}, {"causal": True}, {"self_attention": False}])
@pytest.mark.parametrize("beta", [1.0, 100.0, 1e4, 1e6])
def test_equals_the_other_path(masks, beta):
    generator = torch.Generator().manual_seed(1)
    attention = Attention.random(3, 2, 3, generator=generator, beta=beta, **masks)
    weights = torch.rand(700, generator=generator) + 0.1
    mask = torch.rand(700, generator=generator) > 0.2
    for options in ({}, {"weights": weights}, {"mask": mask}):
        ours, theirs, exact = both(attention, sphere(700, 3), **options)
        # Rounding of either sign in sums of 700: four times their square root.
        slack = rounding(exact, 4 * 26, torch.float32)
        assert bool(((ours.drift - exact).norm(dim=-1) <= ours.error + slack).all())
        assert float((ours.drift - theirs.drift).abs().max()) < slack


@pytest.mark.parametrize(("d", "k"), [(1, 1), (2, 2), (5, 3), (8, 8), (8, 2), (7, 4)])
def test_every_width(d, k):
    attention = Attention.random(d, 2, k, generator=torch.Generator().manual_seed(2), beta=30.0)
    x = torch.randn(400, d, generator=torch.Generator().manual_seed(3))
    ours, theirs, exact = both(attention, x)
    slack = rounding(exact, 4 * 20, torch.float32)  # of either sign in sums of 400
    assert float((ours.drift - exact).abs().max()) < slack
    assert float((ours.drift - theirs.drift).abs().max()) < slack


@pytest.mark.parametrize(("k", "v"), [(2, 5), (5, 2), (1, 8)])
def test_keys_and_values_of_different_widths(k, v):
    generator = torch.Generator().manual_seed(4)
    weights = [torch.randn(2, *shape, generator=generator) / 3 for shape in ((k, 8), (k, 8), (v, 8), (8, v))]
    ours, theirs, exact = both(Attention(*weights, beta=30.0), torch.randn(400, 8, generator=generator))
    slack = rounding(exact, 4 * 20, torch.float32)  # of either sign in sums of 400
    assert bool(((ours.drift - exact).norm(dim=-1) <= ours.error + slack).all())
    assert float((ours.drift - theirs.drift).abs().max()) < slack


def test_some_rows_of_a_causal_cloud():
    """The tokens from 100 on, as a process of its own would move them: each sees those before it."""
    x = sphere(300, 3)
    p = Attention.identity(3, 20.0, causal=True).prepared()
    found = truncated.over_near_keys(p, x[100:], x, None, first=100, always=True)
    exact = Attention.identity(3, 20.0, causal=True, dtype=torch.float64).drift(x.double())[100:]
    assert float((found.drift - exact).norm(dim=-1).max()) < 2e-6 + float(found.error.max())


def test_drifts_and_flows_go_through_it(monkeypatch):
    calls = []
    kernel = compiled.softmax
    monkeypatch.setattr(compiled, "softmax", lambda *args, **more: calls.append(1) or kernel(*args, **more))
    x, attention = sphere(2100, 3), Attention.identity(3, 4.0)
    path = flow(attention, x, [0, 0.1], h=0.05)
    assert calls
    exact = flow(replace(attention, truncation=0.0), x, [0, 0.1], h=0.05)
    assert float((path.x - exact.x).abs().max()) < 2e-6
    calls.clear()
    attention.drift(x.clone().requires_grad_())
    attention.to(torch.float64).drift(x.double())
    Attention.identity(9, 4.0).drift(sphere(2100, 9))
    assert not calls


def test_build_uses_it_for_good():
    with compiled.kernel(False):
        assert not compiled.serves(3, torch.float32, torch.device("cpu"))
        compiled.build()
        assert compiled.serves(3, torch.float32, torch.device("cpu"))
    assert not compiled.serves(3, torch.float64, torch.device("cpu"))


def test_queries_of_their_own():
    """Keys elsewhere than the queries, in clouds too small to fill a block."""
    q, k = sphere(130, 3).double(), sphere(70, 3, seed=5).double()
    v = k.float()
    found = near.softmax(q, k, v, tolerance=1e-6, scale=50.0)
    exact = torch.softmax(50.0 * q @ k.mT, dim=-1) @ k
    assert float((found.average - exact).abs().max()) < 1e-6 + rounding(exact, 70, torch.float32)


def test_highest_logits_are_raised_by_all_that_may_round():
    """As those of PyTorch: 32 roundings of scale |c| |k| + |bias|."""
    c, K = (
        torch.tensor([[3.0, 4.0]], dtype=torch.float64),
        torch.tensor([[[6.0, 8.0], [0.0, -1.0]]], dtype=torch.float64),
    )
    found = patches._highest_logits(c, K, torch.tensor([[0.0, -40.0]], dtype=torch.float64), 2.0)
    eps = torch.finfo(torch.float32).eps
    assert (float(found) - 100) / (32 * eps * 140) == pytest.approx(1, abs=0.1)


def test_no_compiler_is_said(monkeypatch, tmp_path):
    """Nothing to build with: what the user reads, and drifts go on without it."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(compiled, "_loaded", lambda: False)
    with compiled.kernel(False):
        with pytest.raises(OSError, match=r"needs a C\+\+ compiler and ninja"):
            compiled.build()
        assert not compiled.serves(3, torch.float32, torch.device("cpu"))


def test_the_lock_of_a_build_that_was_killed_is_not_waited_for(tmp_path, monkeypatch):
    """torch waits for its lock file for ever, whoever made it; another process that builds now is waited for."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "_loaded", lambda: False)
    locks = []

    def load(name, sources, *, build_directory, **options):
        locks.append((Path(build_directory) / "lock").exists())
        (Path(build_directory) / "lock").touch()  # and is killed here

    monkeypatch.setattr("torch.utils.cpp_extension.load", load)
    for _ in range(2):
        with compiled.kernel():
            pass
    assert locks == [False, False]
