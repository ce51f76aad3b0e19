"""Measured orders of convergence in every geometry, stages that never leave the set, and the adaptive pair."""

import math

import pytest
import torch
from torch import Tensor

from attn_flow import Adaptive, Attention, Ellipsoid, Euclidean, Sphere, dopri5, euler, flow, push_forward, rk4
from attn_flow.dynamics.steppers import STEPS, RungeKutta
from attn_flow.geometry import Geometry

F64 = torch.float64
D, N = 4, 6


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


GEOMETRIES: dict[str, Geometry] = {
    "sphere": Sphere(),
    "sphere of radius 2": Sphere(2.0),
    "flat": Euclidean(),
    "ellipsoid": Ellipsoid(0.3 * drawn(D, seed=3), torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=F64)),
    "layer norm": Ellipsoid.from_layer_norm(0.5 + 0.1 * drawn(D, seed=1), 0.2 * drawn(D, seed=2)),
}
every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)


def system(geometry: Geometry) -> tuple[Attention, Tensor]:
    attention = Attention(0.7 * drawn(2, D, D, seed=5), V=0.7 * drawn(2, D, D, seed=6), beta=1.0)
    return attention, geometry.uniform(N, D, generator=torch.Generator().manual_seed(7), dtype=F64)


@every_geometry
@pytest.mark.parametrize(("step", "steps"), [(euler, 128), (rk4, 16), (dopri5, 12)], ids=["euler", "rk4", "dopri5"])
def test_measured_order(step: RungeKutta, steps: int, geometry: Geometry) -> None:
    """|x_h - x_{h/2}| at t = 1 falls by 2^order when h is halved, to within a quarter of an order.

    dopri5 comes down to its order from above: its steps are halved until rounding is near.
    """
    attention, x0 = system(geometry)
    at = lambda steps: push_forward(attention, x0, 1.0, geometry=geometry, step=step, h=1 / steps)
    coarse, fine, finer = at(steps), at(2 * steps), at(4 * steps)
    while step.order > 4 and float((fine - finer).norm()) > 1e-11:
        steps *= 2
        coarse, fine, finer = fine, finer, at(4 * steps)
    order = math.log2(float((coarse - fine).norm() / (fine - finer).norm()))
    assert abs(order - step.order) < 0.25
    assert float((fine - finer).norm()) > 1e-13  # rounding is not what was measured


@every_geometry
@pytest.mark.parametrize("step", [euler, rk4, dopri5], ids=lambda s: s.name)
def test_every_stage_is_a_point_of_the_geometry(step: RungeKutta, geometry: Geometry) -> None:
    attention, x0 = system(geometry)
    seen = []

    def velocity(t: float, x: Tensor) -> Tensor:
        seen.append((t, x))
        return geometry.tangent(x, attention.drift(x))

    step(velocity, 3.0, x0, 0.5, geometry)
    assert len(seen) == len(step.a) + 1
    for t, x in seen:
        assert 3.0 <= t <= 3.5 + 1e-12
        torch.testing.assert_close(geometry.retract(x), x)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_tableaus_are_consistent(step: RungeKutta) -> None:
    """sum b = 1, and quadrature of t^q is exact below the order: sum b_i c_i^q = 1/(q+1)."""
    c = [0.0] + [sum(row) for row in step.a]
    for b, order in ((step.b, step.order), (step.embedded, step.order - 1)):
        if b is None:
            continue
        for q in range(order):
            assert sum(b_i * c_i**q for b_i, c_i in zip(b, c)) == pytest.approx(1 / (q + 1), abs=1e-12)
    assert dopri5.reuses_last
    assert not rk4.reuses_last


@pytest.mark.parametrize("step", [euler, rk4, dopri5], ids=lambda s: s.name)
def test_time_dependent_velocities_are_asked_at_the_right_times(step: RungeKutta) -> None:
    """x' = e^t in R: also the order of the quadrature in time."""
    x = torch.zeros(1, 1, dtype=F64)
    errors = []
    for steps in (4, 8):
        y, h = x, 1 / steps
        for i in range(steps):
            y = step(lambda t, x: torch.full_like(x, math.exp(t)), i * h, y, h, Euclidean())
        errors.append(abs(float(y) - (math.e - 1)))
    order = math.log2(errors[0] / errors[1])
    assert order > step.order - 0.25


# --- the adaptive pair ----------------------------------------------------------------------------------------------


@every_geometry
def test_the_error_is_proportional_to_the_tolerance(geometry: Geometry) -> None:
    attention, x0 = system(geometry)
    exact = push_forward(attention, x0, 1.0, geometry=geometry, step=dopri5, h=0.01)
    tolerances = (1e-4, 1e-6, 1e-8)
    runs = [flow(attention, x0, [0, 1.0], geometry=geometry, step=Adaptive(tol=tol)) for tol in tolerances]
    errors = [float((run.x[-1] - exact).norm(dim=-1).max()) for run in runs]
    for tol, error in zip(tolerances, errors):
        assert error < 10 * tol
    slope = math.log(errors[0] / errors[-1]) / math.log(tolerances[0] / tolerances[-1])
    assert 0.75 < slope < 1.25, errors
    evaluations = [run.about["evaluations"] for run in runs]
    assert evaluations == sorted(evaluations)


def plateau(seed: int) -> tuple[Attention, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return Attention.identity(3, 12.0, dtype=F64), Sphere().uniform(64, 3, generator=generator, dtype=F64)


@pytest.mark.parametrize("seed", [0, 1])
def test_plateaus_cost_few_evaluations(seed: int) -> None:
    """THEORY 10: T = 1e3 and 3e6 at beta = 12, n = 64 on S^2.

    Measured at tol 1e-4 (error 1e-5): 522 and 823; at tol 1e-6 (error 8e-8): 989 and 1362. torchdiffeq's dopri5 needs
    4,790 evaluations of all 64 tokens for T = 1e3, at an error of 2.5e-4.
    """
    attention, x0 = plateau(seed)
    short = flow(attention, x0, [0, 1e3], step=Adaptive(tol=1e-4))
    assert short.about["evaluations"] < 600
    assert 2 <= short.about["tokens_left"] <= 6
    exact = flow(attention, x0, [0, 1e3], step=Adaptive(tol=1e-9)).x[-1]
    assert float(Sphere().distance(short.x[-1], exact).max()) < 1e-4
    long = flow(attention, x0, [0, 3e6], step=Adaptive(tol=1e-6))
    assert long.about["evaluations"] < 1577
    speed = Sphere().tangent(long.x[-1], attention.drift(long.x[-1])).norm(dim=-1)
    assert float(speed.max()) < 1e-5  # what is left moves on the scale of T


def test_fewer_evaluations_than_torchdiffeq_at_a_smaller_error() -> None:
    from torchdiffeq import odeint

    attention, x0 = plateau(0)
    T, asked = 100.0, 0

    def velocity(t: Tensor, x: Tensor) -> Tensor:
        nonlocal asked
        asked += 1
        return Sphere().tangent(x, attention.drift(x))

    exact = flow(attention, x0, [0, T], step=Adaptive(tol=1e-10)).x[-1]
    theirs = odeint(velocity, x0, torch.tensor([0.0, T], dtype=F64), rtol=1e-6, atol=1e-6, method="dopri5")[-1]
    ours = flow(attention, x0, [0, T], step=Adaptive(tol=1e-6))
    error = lambda x: float((x - exact).norm(dim=-1).max())
    assert error(ours.x[-1]) < error(Sphere().retract(theirs))
    assert ours.about["evaluations"] < asked


def test_neither_growing_steps_nor_merging_alone_crosses_a_plateau() -> None:
    attention, x0 = plateau(0)
    apart = flow(attention, x0, [0, 300.0], step=Adaptive(tol=1e-4, merge=False))
    together = flow(attention, x0, [0, 300.0], step=Adaptive(tol=1e-4))
    assert together.about["evaluations"] < 0.6 * apart.about["evaluations"]
    torch.testing.assert_close(together.x[-1], apart.x[-1], rtol=0, atol=1e-3)


def test_refused_steps_cost_no_extra_first_stage() -> None:
    """Seven stages, the first reused: 6 evaluations a step, and one more after the start."""
    attention, x0 = plateau(0)
    run = flow(attention, x0[:5], [0, 1.0], step=Adaptive(tol=1e-6, merge=False))
    assert run.about["evaluations"] % 6 == 1


def test_largest_and_max_steps() -> None:
    attention, x0 = plateau(0)
    run = flow(attention, x0[:2], [0, 10.0], step=Adaptive(tol=1e-2, largest=0.1, merge=False))
    assert run.about["evaluations"] >= 6 * 100
    with pytest.raises(
        FloatingPointError, match=r"3 steps were not enough: at t = .* of 10\. Try increasing max_steps"
    ):
        flow(attention, x0, [0, 10.0], step=Adaptive(max_steps=3))
    with pytest.raises(ValueError, match=r"pair 'rk4' has no embedded result to estimate errors; use dopri5"):
        Adaptive(pair=rk4)
    with pytest.raises(ValueError, match=r"tol = 0, expected a positive number"):
        Adaptive(tol=0)
