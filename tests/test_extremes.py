"""The laws of attention, flows, measures and transport at magnitudes near the ends of the floating-point range.

Each law holds to rounding, or a ValueError or FloatingPointError names the problem: no NaN, no silent wrong number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attn_flow import Attention, Cloud, Euclidean, Sphere, flow, push_forward, wasserstein

F32, F64 = torch.float32, torch.float64
NAMED = (ValueError, FloatingPointError)
BETAS = (0.0, 5e-324, 1e-310, 1e-45, 1e-40, 1e-30, 1e-3, 1.0, 30.0, 1e4, 1e30, 1e100, 1e300, math.inf)
laws = settings(max_examples=60, deadline=None)


@dataclass(frozen=True)
class System:
    """A cloud x (n, d) of size `scale` with weights, and a beta."""

    x: Tensor
    weights: Tensor
    beta: float
    scale: float

    @property
    def attention(self) -> Attention:
        return Attention.identity(self.x.shape[-1], self.beta, dtype=self.x.dtype)

    @property
    def size(self) -> float:
        return float(self.x.abs().max())

    @property
    def rounding(self) -> float:
        """What averages of tokens may be off by: a logit of size L is known to eps L, and none moves them out."""
        d, eps = self.x.shape[-1], torch.finfo(self.x.dtype).eps
        length = self.size * math.sqrt(d)
        logit = self.beta * length * length if math.isfinite(self.beta) and self.beta else 0.0
        if self.x.dtype == F32 and logit > 1:  # beyond 200 in float64, from float32 tokens
            eps = max(torch.finfo(F64).eps * logit / 200, eps) if logit > 200 else eps
        weight_digits = math.log(1e308) * 4
        return 2 * self.size * min(1.0, 32 * eps * (len(self.x) + d) * (1 + min(logit, 1e30) + weight_digits))


@st.composite
def systems(draw: st.DrawFn, cold: bool = True, scales: int = 200) -> System:
    dtype = draw(st.sampled_from([F32, F64]))
    reach = min(scales, 30) if dtype == F32 else scales
    scale = 10.0 ** draw(st.sampled_from([-reach, -reach // 2, -3, 0, 3, reach // 2, 20, reach]))
    n, d, seed = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(n, d, generator=generator, dtype=F64) * scale).to(dtype)
    exponents = 300 * (2 * torch.rand(n, generator=generator, dtype=F64) - 1) * draw(st.sampled_from([0, 0.01, 1]))
    beta = draw(st.sampled_from(BETAS if cold else BETAS[:-1]))
    return System(x, 10.0**exponents, beta, scale)


def named(call: Callable[[], Tensor]) -> Tensor | None:
    """What the call returns, finite; None if it says why it cannot."""
    try:
        found = call()
    except NAMED:
        return None
    assert bool(torch.isfinite(found).all())
    return found


def agree(one: Callable[[], Tensor], other: Callable[[], Tensor], atol: float) -> None:
    a, b = named(one), named(other)
    if a is not None and b is not None:
        assert float((a - b).abs().max()) <= atol


# --- drifts ----------------------------------------------------------------------------------------------------------


@given(systems(), st.randoms(use_true_random=False))
@laws
def test_a_permuted_cloud_has_the_permuted_drift(s: System, chance: object) -> None:
    order = torch.tensor(chance.sample(range(len(s.x)), len(s.x)))  # type: ignore[attr-defined]
    agree(
        lambda: s.attention.drift(s.x[order], weights=s.weights[order]),
        lambda: s.attention.drift(s.x, weights=s.weights)[order],
        s.rounding,
    )


@given(systems(cold=False))
@laws
def test_a_rotated_cloud_has_the_rotated_drift(s: System) -> None:
    d = s.x.shape[-1]
    R = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(0), dtype=F64))[0].to(s.x.dtype)
    drift = s.attention.drift
    agree(lambda: drift(s.x @ R, weights=s.weights), lambda: drift(s.x, weights=s.weights) @ R, s.rounding)


@given(systems())
@laws
def test_a_repeated_token_is_one_of_twice_the_weight(s: System) -> None:
    heavier = s.weights.clone()
    heavier[0] *= 2
    repeated, weights = torch.cat([s.x, s.x[:1]]), torch.cat([s.weights, s.weights[:1]])
    agree(
        lambda: s.attention.drift(s.x, weights=heavier),
        lambda: s.attention.drift(repeated, weights=weights)[: len(s.x)],
        s.rounding,
    )


@given(systems())
@laws
def test_a_batch_is_a_loop(s: System) -> None:
    batch, weights = torch.stack([s.x, -s.x.flip(0)]), torch.stack([s.weights, s.weights.flip(0)])
    agree(
        lambda: s.attention.drift(batch, weights=weights),
        lambda: torch.stack([s.attention.drift(x, weights=w) for x, w in zip(batch, weights)]),
        s.rounding,
    )


@given(systems(cold=False), st.sampled_from([1e-20, 0.5, 1e20]))
@laws
def test_scaling_the_scores_and_the_temperature_changes_nothing(s: System, c: float) -> None:
    d, dtype = s.x.shape[-1], s.x.dtype
    G = torch.eye(d, dtype=dtype)
    scaled = lambda: Attention.from_matrices(c * G, G, s.beta / c).drift(s.x, weights=s.weights)
    if s.beta / c in (0.0, math.inf) or s.beta / c < 1e-300:  # beta / c has no digits left
        return
    agree(scaled, lambda: s.attention.drift(s.x, weights=s.weights), s.rounding)


@given(systems(), st.booleans(), st.sampled_from(["softmax", "sinkhorn"]))
@laws
def test_rows_of_the_matrix_sum_to_one(s: System, causal: bool, kind: str) -> None:
    causal = causal and kind == "softmax"
    found = named(
        lambda: Attention.identity(
            s.x.shape[-1],
            s.beta,
            dtype=s.x.dtype,
            causal=causal,
            kind=kind,  # type: ignore[arg-type]
        ).matrix(s.x, weights=s.weights)
    )
    if found is not None:
        assert bool((found >= 0).all())
        assert float((found.sum(-1) - 1).abs().max()) <= 4 * len(s.x) * torch.finfo(s.x.dtype).eps


# --- flows -----------------------------------------------------------------------------------------------------------


@given(systems())
@laws
def test_tokens_stay_on_the_sphere(s: System) -> None:
    for step in ("euler", "rk4"):
        found = named(lambda step=step: push_forward(s.attention, s.x, 1.0, weights=s.weights, step=step))
        if found is not None:
            assert float((found.norm(dim=-1) - 1).abs().max()) <= 8 * torch.finfo(s.x.dtype).eps


@given(systems(cold=False))
@laws
def test_a_flow_goes_on_where_it_stopped(s: System) -> None:
    """The same steps in one call and in two."""
    for geometry in (Sphere(), Euclidean()):
        run = lambda x, t, geometry=geometry: push_forward(
            s.attention, x, t, weights=s.weights, geometry=geometry, h=0.25
        )
        start = named(lambda geometry=geometry: flow(s.attention, s.x, [0, 0.1], geometry=geometry).x[0])
        if start is None:
            continue
        unit = float(start.abs().max())
        logit = s.beta * unit * unit * s.x.shape[-1]
        if logit < 1e3:  # beyond, a difference of one rounding grows by e^{beta t}: the flow has no digits
            agree(
                lambda run=run: run(run(s.x, 0.5), 0.5), lambda run=run: run(s.x, 1.0), 1e3 * s.rounding * unit / s.size
            )


# --- measures --------------------------------------------------------------------------------------------------------


@given(systems())
@laws
def test_a_tilted_mean_is_inside_the_hull(s: System) -> None:
    g = s.x.flip(0) / s.size if s.size else s.x
    found = named(lambda: Cloud(s.x, s.weights).tilted_mean(g, s.beta))
    if found is not None:
        slack = 8 * len(s.x) * torch.finfo(s.x.dtype).eps * s.size
        assert bool((found <= s.x.amax(0) + slack).all())
        assert bool((found >= s.x.amin(0) - slack).all())


@given(systems(), st.floats(0.1, 0.9))
@laws
def test_the_log_partition_is_convex_and_between_its_limits(s: System, part: float) -> None:
    """L(part g + (1 - part) h) <= part L(g) + (1 - part) L(h), and <g, mean> <= L(g) <= max <g, x>."""
    generator = torch.Generator().manual_seed(1)
    ends = torch.randn(2, s.x.shape[-1], generator=generator, dtype=F64).to(s.x.dtype)
    between = part * ends[:1] + (1 - part) * ends[1:]
    cloud = Cloud(s.x, s.weights)
    found = named(lambda: cloud.log_partition(torch.cat([ends, between]), s.beta))
    if found is None:
        return
    size = float(ends.norm(dim=-1).max()) * s.size * math.sqrt(s.x.shape[-1])
    slack = 32 * (len(s.x) + s.x.shape[-1]) * torch.finfo(s.x.dtype).eps * size
    assert float(found[2]) <= part * float(found[0]) + (1 - part) * float(found[1]) + slack
    scores = torch.cat([ends, between]) @ s.x.mT
    assert bool((found <= scores.amax(-1) + slack).all())
    assert bool((found >= torch.cat([ends, between]) @ cloud.mean - slack).all())


# --- transport -------------------------------------------------------------------------------------------------------


def clouds(s: System) -> tuple[Tensor, Tensor, Tensor]:
    return s.x, s.x.flip(0) * 0.5 + s.scale, -s.x


@given(systems(), st.sampled_from(["euclidean", "geodesic"]))
@laws
def test_a_distance_is_a_distance(s: System, cost: str) -> None:
    """Symmetric, a triangle, and of the first degree, to the rounding of a sum of squares."""
    x, y, z = clouds(s)
    if cost == "geodesic":
        x, y, z = (torch.nn.functional.normalize(c.double(), dim=-1).to(c.dtype) * s.scale for c in (x, y, z))
    distance = lambda a, b, **more: wasserstein(a, b, cost=cost, **more)
    w = {"weights_x": s.weights}
    xy, yx = named(lambda: distance(x, y, **w)), named(lambda: distance(y, x, weights_y=s.weights))
    xz, yz = named(lambda: distance(x, z, **w, weights_y=s.weights)), named(lambda: distance(y, z, weights_y=s.weights))
    largest = 4 * s.scale * (10 + s.size / s.scale)
    slack = 1e-6 * largest if s.x.dtype == F64 else 1e-5 * largest
    if xy is not None and yx is not None:
        assert abs(float(xy) - float(yx)) <= slack
        if xz is not None and yz is not None:
            assert float(xy) <= float(xz) + float(yz) + slack
    scaled = named(lambda: distance(x * 2.0**10, y * 2.0**10, **w))
    if scaled is not None and xy is not None:
        assert abs(float(scaled) / 2.0**10 - float(xy)) <= slack
    if xy is not None and len(x) > 1 and cost == "euclidean":  # farther than the means, which a flushed cost is not
        apart = Cloud(x.double(), s.weights).mean - y.double().mean(0)
        assert float(xy) >= math.hypot(*apart.tolist()) - slack


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("beta", BETAS)
def test_the_first_row_under_a_causal_mask(beta: float, dtype: torch.dtype) -> None:
    x = Sphere().uniform(5, 3, generator=torch.Generator().manual_seed(0), dtype=dtype)
    found = named(lambda: Attention.identity(3, beta, dtype=dtype, causal=True).drift(x))
    assert found is not None
    assert float((found[0] - x[0]).abs().max()) <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("scale", [1e3, 1e15, 1e18, 1e25, 1e37, 1e100, 1e154, 1e200, 1e300])
def test_logits_that_overflow_to_minus_infinity_are_no_empty_row(scale: float, dtype: torch.dtype) -> None:
    """G = -1: all logits of a row may overflow to -inf, which must not look like a query that sees nobody. Two tokens
    +-s e attend to each other, copies of one token to that token, whatever the temperature and the path."""
    if scale > torch.finfo(dtype).max:
        return
    e = torch.tensor([scale, 0.0], dtype=dtype)
    eye = torch.eye(2, dtype=dtype)
    pair, copies = torch.stack([e, -e]), e.expand(300, 2).clone()
    for beta, kind in ((1e-3, "softmax"), (1e4, "softmax"), (1.0, "hardmax"), (math.inf, "softmax"), (1.0, "sinkhorn")):
        against = Attention.from_matrices(-eye, eye, beta, kind=kind)  # type: ignore[arg-type]
        for x, expected in ((pair, -pair),) if kind == "sinkhorn" else ((pair, -pair), (copies, copies)):
            calls = {
                "drift": lambda x=x, a=against: a.drift(x),
                "gradient": lambda x=x, a=against: a.drift(x.clone().requires_grad_()),
                "matrix": lambda x=x, a=against: a.matrix(x)[0] @ x,
            }
            if kind != "sinkhorn":
                calls["truncated"] = lambda x=x, a=against: a.truncated_drift(x).drift
                calls["context"] = lambda x=x, a=against: a.drift(x, Cloud(x))
                calls["mean"] = lambda x=x, beta=beta: Cloud(x).tilted_mean(-x, beta)
            for call in calls.values():
                found = named(call)
                if found is not None and beta > 1e-3:
                    assert float((found.detach() - expected).abs().max()) <= 1e-5 * scale
    named(lambda: Cloud(copies).log_partition(-copies, 1.0))
    named(lambda: Attention.from_matrices(-eye, eye).truncated_drift(copies).error)
