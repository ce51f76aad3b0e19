"""Wrong arguments, sizes that are too large, and a missing POT: one clear sentence each."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from attn_flow.measures.cloud import Cloud
from attn_flow.transport import Sliced, solve, wasserstein

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SPHERE = X / X.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: solve(X * math.nan, X), r"a has .*NaN or infinite"),
    (lambda: solve(X, X[:0]), r"b has .*\(0, 3\)"),
    (lambda: solve(X[0], X), r"a has .*\(3,\), expected \(\.\.\., n, d\)"),
    (lambda: solve(X, X[:, :2]), r"shapes \(4, 3\) and \(4, 2\), expected the same dimension"),
    (lambda: solve(X.expand(2, 4, 3), X.expand(3, 4, 3)), r"do not broadcast \(a \(2,\), b \(3,\)"),
    (lambda: solve(X, X, 0.5), "p = 0.5, expected a number from 1 to 200"),
    (lambda: solve(X, X, math.inf), "p = inf"),
    (lambda: solve(X, X, cost="cosine"), "cost = 'cosine', expected one of 'euclidean', 'geodesic'"),
    (lambda: solve(X, X, method="magic"), "method = 'magic', expected one of 'auto'"),
    (lambda: solve(X, X, method="simplx"), "Did you mean 'simplex'"),
    (lambda: solve(X, X, rtol=0), "rtol = 0, expected a positive"),
    (lambda: solve(X, X, method=Sliced), r"method = <class .*Sliced'>, expected one of 'auto'"),
    (lambda: solve(X.to("meta"), X.to("meta")), "distances need values, which meta tensors"),
    (lambda: torch.func.grad(lambda x: wasserstein(x, X))(X), "torch.func transforms do not have; use autograd"),
    (lambda: Sliced(n_projections=1), "n_projections = 1, expected at least 2"),
    (lambda: solve(X, X, cost="geodesic"), r"one sphere around the origin.* use Sphere\(radius\)\.retract"),
    (lambda: solve(X, X, method="line"), "method 'line' needs d = 1 and cost 'euclidean', got d = 3"),
    (lambda: solve(X, X, method="circle"), "method 'circle' needs d = 2 and cost 'geodesic', got d = 3"),
    (lambda: solve(X, X[:3], method="assignment"), "method 'assignment' needs .* use method='simplex'"),
    (lambda: solve(X, X, 1, method="sinkhorn"), "method 'sinkhorn' needs p = 2 and cost 'euclidean', got p = 1"),
    (lambda: solve(SPHERE, SPHERE, cost="geodesic", method="sliced"), "method 'sliced' .* needs cost 'euclidean'"),
])  # fmt: skip
def test_wrong_values(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_weights_that_need_a_gradient_need_potentials() -> None:
    circle = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    weights = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="no dual potentials; use method='auto'"):
        wasserstein(Cloud(circle, weights), circle.flip(1), cost="geodesic", method="circle")


@pytest.mark.parametrize("method", ["assignment", "simplex", "sinkhorn"])
def test_matrices_have_a_size_limit(method: str) -> None:
    x = torch.arange(5001.0)[:, None]
    with pytest.raises(ValueError, match=r"5,001 x 5,001 cost matrix .* 25,000,000 entries; use method='shortlist'"):
        wasserstein(x, x, method=method)


# Without POT.


@pytest.fixture
def without_pot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ot", None)


@pytest.mark.usefixtures("without_pot")
def test_what_works_without_pot() -> None:
    """One dimension, circle, equal masses, Sinkhorn, sliced."""
    x, y = (torch.randn(1100, 2, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in (1, 2))
    angles = lambda z: z / z.norm(dim=-1, keepdim=True)
    with pytest.MonkeyPatch.context() as again:
        again.delitem(sys.modules, "ot")
        expected = [
            float(wasserstein(x[:900], y[:900])),
            float(wasserstein(x[:30], 3 + y[:30])),
        ]
    assert solve(x[:, :1], y[:, :1]).method == "line"
    assert solve(angles(x), angles(y), cost="geodesic").method == "circle"
    assert solve(x, y).method == "assignment"
    assert float(wasserstein(x[:900], y[:900])) == pytest.approx(expected[0], rel=1e-12)
    assert solve(x[:2].repeat(30, 1), y[:3].repeat(20, 1)).method == "assignment"
    assert solve(x[:30], 3 + y[:30], method="sinkhorn", rtol=0.1).value.item() == pytest.approx(expected[1], rel=0.1)
    assert solve(x, y, method=Sliced(5)).method == "sliced"


@pytest.mark.usefixtures("without_pot")
def test_what_needs_pot_says_so() -> None:
    x, y = torch.randn(2, 1100, 3, generator=torch.Generator().manual_seed(0))
    for call in (
        lambda: wasserstein(x[:20], y[:10]),
        lambda: wasserstein(x, y[:1000]),
        lambda: wasserstein(x, y, method="shortlist"),
        lambda: wasserstein(Cloud(x, torch.rand(1100)), y),
    ):
        with pytest.raises(ImportError, match=r'ot is not installed; .*pip install "attn-flow\[all\]"'):
            call()


def test_pot_is_imported_only_where_it_is_used() -> None:
    """It takes seconds to import."""
    code = """
import sys, torch
from attn_flow import wasserstein
wasserstein(torch.randn(20, 3), torch.randn(20, 3))
print("ot" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False"]
