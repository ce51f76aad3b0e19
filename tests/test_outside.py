"""What a user meets: explicit signatures, docstrings with an example, short reprs, one way to say each thing."""

import inspect
import math
from typing import Any

import pytest
import torch

import attn_flow
import attn_flow.hooks
import attn_flow.nn
import attn_flow.probe
import attn_flow.transport

ROOMS = (attn_flow, attn_flow.hooks, attn_flow.nn, attn_flow.probe, attn_flow.transport)
PUBLIC = {f"{room.__name__}.{name}": getattr(room, name) for room in ROOMS for name in room.__all__}
ERRORS = {name for name, thing in PUBLIC.items() if inspect.isclass(thing) and issubclass(thing, Exception)}
CALLED = {
    name: thing
    for name, thing in PUBLIC.items()
    if callable(thing) and inspect.getmodule(thing) is not None and name not in ERRORS
}
# Nobody makes one: `probe` has the example.
RETURNED = {f"attn_flow.probe.{name}" for name in ("ProbeResult", "ProbeRun", "Recording", "Heads", "prepare")}


@pytest.mark.parametrize("name", CALLED)
def test_a_docstring_with_an_example(name: str) -> None:
    words = inspect.getdoc(CALLED[name]) or ""
    assert len(words) > 60, "no docstring of its own"
    assert ">>>" in words or name in RETURNED, "no example"


def things() -> dict[str, Any]:
    from attn_flow import (
        Adaptive,
        Attention,
        Cloud,
        Ellipsoid,
        EllipsoidSupport,
        Gaussian,
        Mixture,
        Sphere,
        UniformSphere,
        flow,
        limit,
        phases,
        resolution,
    )

    x = Sphere().uniform(400, 3, generator=torch.Generator().manual_seed(0))
    big = torch.eye(300)
    G, V = torch.diag(torch.tensor([3.0, 1.0, 1.0])), torch.diag(torch.tensor([1.0, 2.0, 1.0]))
    attention = Attention.from_matrices(G, V, beta=3.0)
    path = flow(attention, x, [0.0, 1.0, 2.0])
    target = limit(attention)
    gaussian = Gaussian(torch.zeros(300), big)
    return {
        "attention": Attention.random(300, 4),
        "cloud": Cloud(torch.randn(500, 300)),
        "gaussian": gaussian,
        "ellipsoid support": EllipsoidSupport(torch.zeros(300), big, 1.0),
        "mixture": Mixture([gaussian] * 20, torch.ones(20)),
        "uniform": UniformSphere(3),
        "sphere": Sphere(),
        "ellipsoid": Ellipsoid(torch.zeros(300), big),
        "path": path,
        "limit": target,
        "phases": phases(path, target),
        "resolution": resolution(attention, x),
        "transport": attn_flow.transport.solve(x, target.push_forward(x)),
        "adaptive": Adaptive(),
        "step": attn_flow.rk4,
        "layer": attn_flow.nn.ContinuousAttentionLayer(300, 4, geometry=Ellipsoid(torch.zeros(300), big)),
    }


def test_reprs_are_short() -> None:
    lengths = {name: len(repr(thing)) for name, thing in things().items()}
    assert max(lengths.values()) < 300, {name: n for name, n in lengths.items() if n >= 300}
    assert not any("[[" in repr(thing) for thing in things().values())  # shapes, not numbers


def test_help_prints_no_tableau() -> None:
    for name, thing in CALLED.items():
        assert "embedded" not in str(inspect.signature(thing)) or name.endswith("RungeKutta"), name
        assert len(str(inspect.signature(thing))) < 1500, name


def test_beta_is_absolute_and_its_factor_is_called_so() -> None:
    """`beta` never means a multiple: whoever takes one calls it beta_factor."""
    for name, thing in CALLED.items():
        parameters = inspect.signature(thing).parameters
        if "beta_factor" in parameters:
            assert parameters["beta_factor"].default in (None, 1.0, inspect.Parameter.empty), name
    assert "beta" not in inspect.signature(attn_flow.probe.probe).parameters
    assert "beta_factor" in inspect.signature(attn_flow.probe.probe).parameters
    attention = attn_flow.Attention.identity(3, 2.0)
    assert attention.with_beta(math.inf).is_hardmax
