"""Dynamics piece by piece: controllers, windows, bases, clocks; each against its definition written out, or edge."""

import inspect
import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from attn_flow import (
    Adaptive,
    Attention,
    Cloud,
    Drift,
    Euclidean,
    Layers,
    Sphere,
    Trajectory,
    UniformSphere,
    VonMisesFisher,
    consensus,
    density_flow,
    dopri5,
    euler,
    flow,
    linearise,
    lyapunov,
    push_forward,
    rk4,
)
from attn_flow.dynamics import continuity, kicks, placement, stability
from attn_flow.dynamics.continuity import DensityPath, _Spectral
from attn_flow.dynamics.distributed import ALONE, Processes, RingAttention, Shard, check_shared, processes
from attn_flow.dynamics.harmonics import Harmonics, evaluated
from attn_flow.dynamics.integrator import Integrator, PrecisionWarning, StepWarning
from attn_flow.dynamics.merging import Merged
from attn_flow.dynamics.pacing import Pace
from attn_flow.dynamics.stability import _cut, tangent_basis

F64 = torch.float64
EPS = torch.finfo(F64).eps


def tokens(n: int | tuple[int, ...], d: int, seed: int = 0) -> Tensor:
    return Sphere().uniform(n, d, generator=torch.Generator().manual_seed(seed), dtype=F64)


def identity(d: int, beta: float | Tensor = 1.0, **options) -> Attention:
    return Attention.identity(d, beta, dtype=F64, **options)


# --- steps --------------------------------------------------------------------------------------------------------


def test_an_adaptive_step_is_what_it_says_unless_told_otherwise() -> None:
    assert Adaptive() == Adaptive(tol=1e-6, merge=None, pair=dopri5, max_steps=100_000, largest=math.inf)
    assert Adaptive().name == "adaptive dopri5 tol=1e-06"
    assert (euler.reuses_last, rk4.reuses_last, dopri5.reuses_last) == (False, False, True)
    for bad in ({"largest": 0.0}, {"max_steps": 0}, {"merge": 1}, {"pair": 5}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Adaptive(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"step = 3, expected a name, a step function"):
        flow(identity(2), tokens(2, 2), 1.0, step=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [euler, rk4, dopri5], ids=lambda s: s.name)
def test_what_is_said_of_a_step_that_is_too_long(step) -> None:
    """The border u^(p+1)/(p+1)! = .1 for what carries a token, .03 for what errs; h brought to a quarter of either."""
    p, pace = step.order, Pace(step)
    border = (0.1 * math.factorial(p + 1)) ** (1 / (p + 1))
    power = {1: 2, 4: 4, 5: 5}[p]
    for farthest, error in ((0.9 * border, 0.029), (0.0, 0.0)):
        assert pace.too_long(farthest, error, 0.2, 3.0) is None
    for farthest, error in (
        (1.1 * border, 0.0),
        (1.1 * border, 0.5),
        (0.5 * border, 0.031),
        (0.0, 0.031),
        (50.0, 0.04),
    ):
        shorter = [border / farthest if farthest else math.inf, (0.03 / error) ** (1 / power) if error else math.inf]
        better = 0.2 / 4 * min(shorter)
        what = (
            f"carry tokens {farthest:.3g} times their length by t = 3: too far to be followed"
            if farthest > border
            else f"err by about {error:.2g} of a token's length by t = 3: too long for its velocity to be followed"
        )
        expected = f"steps of 0.2 {what}; use h <= {better:.2g}, or step='adaptive'."
        assert pace.too_long(farthest, error, 0.2, 3.0) == expected


def test_a_step_of_ones_own_counts_as_of_order_one() -> None:
    def own(velocity, t, x, h, geometry):  # type: ignore[no-untyped-def]
        return geometry.retract(x + h * velocity(t, x))

    pace = Pace(own)
    assert pace.seen() == []
    assert (pace.order, pace.closing) == (1, 0.0)
    x = torch.tensor([[3.0], [0.5]], dtype=F64)
    pace.take(lambda t, y: 2 * y, 0.0, x, 0.25, Euclidean())
    pace.take(lambda t, y: 0.2 * y, 0.0, x, 0.25, Euclidean())
    assert [float(z) for z in pace.seen()] == [0.5, 0.0]  # h |v| / max(1, |x|), the farthest of both; no error known


def test_noise_and_jumps_are_no_errors_of_a_step() -> None:
    """Euler's error is seen where the velocity changes between two steps; not across a layer, and not across a kick."""
    shove = lambda c: Drift(lambda t, x: c * torch.ones_like(x))
    x0 = torch.zeros(1, 1, dtype=F64)
    options = {"geometry": Euclidean(), "step": euler, "h": 0.5}

    def said(field, **more) -> int:  # type: ignore[no-untyped-def]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            flow(field, x0, [0.0, 1.0], **options, **more)
        told = [w for w in caught if issubclass(w.category, StepWarning)]
        assert all(w.filename == __file__ for w in told)  # where the flow was called
        return len(told)

    assert said(Layers([shove(0.4), shove(-0.4)], [0.0, 0.5, 1.0])) == 0
    turning = Drift(lambda t, x: (0.4 if t < 0.5 else -0.4) * torch.ones_like(x))
    assert said(turning) == 1
    assert said(turning, noise=kicks.independent(0.0)) == 0


def test_a_step_that_cannot_be_short_enough_is_told_so() -> None:
    chance = torch.Generator().manual_seed(0)
    wild = Drift(lambda t, x: 1e3 * torch.randn(x.shape, generator=chance, dtype=F64))
    with pytest.raises(FloatingPointError, match=r"the step shrank to .* at t = 1. Try a larger tol"):
        flow(wild, tokens(2, 2), [1.0, 2.0], step=Adaptive(tol=1e-20, merge=False))


@pytest.mark.parametrize("step", [euler, Adaptive(merge=False, largest=0.1)], ids=["fixed", "adaptive"])
def test_tokens_that_leave_are_noticed_at_once(step) -> None:  # type: ignore[no-untyped-def]
    """A kick that is infinite from t = .35 on: in the step after, not at the next time that is kept."""
    count = [0]

    def kick(x: Tensor, generator: torch.Generator | None) -> Tensor:
        count[0] += 1
        return torch.full_like(x, math.inf if count[0] > 3 else 0.0)

    with pytest.raises(FloatingPointError, match=r"tokens left the range of torch.float64 at t = ") as told:
        flow(identity(2), tokens(3, 2), [0.0, 5.0], step=step, h=0.1, noise=kick)
    assert count[0] == 4
    if step is euler:
        assert "at t = 0.4." in str(told.value)
        late = Drift(lambda t, x: torch.full_like(x, math.nan if t > 0.25 else 1.0))
        with pytest.raises(FloatingPointError, match=r"at t = 0.4\."):
            flow(late, tokens(3, 2), [0.0, 5.0], step=step, h=0.1)


def test_after_a_kick_the_velocity_is_asked_again() -> None:
    """Seven evaluations a step with noise, six and one without."""
    run = lambda **options: flow(
        identity(2), tokens(3, 2), [0.0, 1.0], step=Adaptive(merge=False), h=0.1, **options
    ).about["evaluations"]
    steps = (run() - 1) // 6
    assert run() == 6 * steps + 1
    assert run(noise=kicks.independent(0.0)) == 7 * steps


def test_many_steps_are_taken_and_a_slip_of_the_pen_is_refused() -> None:
    """More than 1e9 are a slip; 11,000 are not."""
    asked = []

    def stay(velocity, t, x, h, geometry):  # type: ignore[no-untyped-def]
        asked.append(t)
        assert len(asked) <= 11_000
        return x

    flow(identity(1), torch.ones(1, 1, dtype=F64), [0.0, 11.0], step=stay, h=1e-3)
    assert len(asked) == 11_000
    with pytest.raises(ValueError, match=r"t = 1.1 in steps of h = 1e-09 are more than 1e\+09 steps"):
        flow(identity(1), torch.ones(1, 1, dtype=F64), [0.0, 1.1], step=stay, h=1e-9)


def test_where_lengths_are_looked_at_and_when_float64_is_chosen() -> None:
    """On an accelerator without a bound on lengths: twice the longest until the next look, and one warning beyond."""
    cold = Attention.identity(3, 100.0)

    def run(geometry, place=placement.post) -> Integrator:  # type: ignore[no-untyped-def]
        return Integrator(cold, geometry, None, None, None, place, None, None, None, Shard(ALONE, 4))

    away, here = torch.empty(4, 3, device="meta"), torch.empty(4, 3)
    assert [run(Euclidean()).lengths_seen(x) for x in (away, here)] == [False, True]
    assert run(Sphere(2.0)).lengths_seen(away)
    assert run(Euclidean(), placement.pre).lengths_seen(away)
    assert (run(Sphere(2.0)).view.longest, run(Euclidean()).view.longest) == (2.0, None)
    assert run(Euclidean(), placement.pre).view.longest == 1.0
    short = next(r for r in np.geomspace(1e-3, 1e3, 61) if cold.needs_float64(2 * r)) / 1.2
    assert not cold.needs_float64(2 * short)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integrator = run(Euclidean())
        integrator.choose_precision(short, 0.0)
        assert integrator.view.longest == 2 * short
        integrator.choose_precision(2 * short, 1.0)  # within what was foreseen
        integrator.choose_precision(9 * short, 2.0)  # and in float64 already
        integrator = run(Euclidean())
        integrator.choose_precision(50 * short, 0.0)  # the first look
        integrator = run(Euclidean())
        integrator.choose_precision(short / 100, 0.0)
        integrator.choose_precision(short / 10, 1.0)  # longer than foreseen, and float32 will do
    integrator = run(Euclidean())
    integrator.choose_precision(short, 0.0)
    # As from arrive, fixed and flow: it points to the line that called the flow.
    arrive = lambda: integrator.choose_precision(3 * short, 2.5)
    fixed = lambda: arrive()
    run_flow = lambda: fixed()
    user = compile("run_flow()", "user.py", "eval")
    with pytest.warns(PrecisionWarning, match=f"tokens grew from {short:.3g} to {3 * short:.3g} by t = 2.5") as caught:
        eval(user, {"run_flow": run_flow})
    assert caught[0].filename == "user.py"


@pytest.mark.parametrize("step", [euler, Adaptive(merge=False)], ids=lambda s: s.name)
def test_a_stop_condition_is_asked_at_the_very_times(step) -> None:  # type: ignore[no-untyped-def]
    """Bit for bit: 49 steps of 1/49 add up to another number."""
    assert 49 * (1 / 49) != 1
    seen: list[float] = []
    flow(identity(2), tokens(3, 2), [0.0, 1.0, 1.7], step=step, h=0.0205, stop=lambda t, cloud: bool(seen.append(t)))
    assert {1.0, 1.7} <= set(seen)
    assert seen == sorted(seen)
    if step is euler:
        assert len(seen) == 49 + 35
        assert seen[:48] == pytest.approx([(i + 1) / 49 for i in range(48)], rel=1e-14)


def test_consensus_is_within_its_distance_of_the_mean_in_every_cloud() -> None:
    x = torch.tensor([[[0.0, 0.0], [0.0, 0.2]], [[3.0, 0.0], [3.0, 0.3]]], dtype=F64)
    for tol, reached in ((0.14, False), (0.16, True)):
        assert consensus(tol)(0.0, Cloud(x)) is reached
    far = torch.cat([x, torch.full((2, 1, 2), 9.0, dtype=F64)], dim=-2)
    assert consensus(0.16)(0.0, Cloud(far, mask=torch.tensor([True, True, False])))
    assert consensus(0.16)(0.0, Cloud(far, torch.tensor([1.0, 1.0, 0.0])))
    assert not consensus(0.16)(0.0, Cloud(far))


@pytest.mark.parametrize("t", [torch.tensor(2.0), np.float64(2.0), 2, torch.tensor([0.0, 2.0]), (0.0, 2.0)])
def test_times_of_every_kind(t) -> None:  # type: ignore[no-untyped-def]
    path = flow(identity(2), tokens(3, 2), t)
    assert float(path.t[-1]) == 2.0
    assert len(path) == (2 if isinstance(t, tuple) or (isinstance(t, Tensor) and t.ndim) else 101)


@pytest.mark.parametrize("t", [1j, "1", None, {0.0: 1}, {0.0, 1.0}, b"01", torch.tensor([0.0, 1.0]).cfloat()])
def test_what_is_no_time(t) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"expected a time or times|expected real times"):
        flow(identity(2), tokens(3, 2), t)


def test_what_reads_values_needs_them() -> None:
    for options, words in (({"step": "adaptive"}, "step='adaptive'"), ({"stop": consensus()}, "stop=")):
        with pytest.raises(ValueError, match=f"validate=False with {words}, which reads values after every step"):
            flow(identity(2), tokens(3, 2), 1.0, validate=False, **options)  # type: ignore[arg-type]
    plain = flow(identity(2), tokens(3, 2), 1.0)
    assert torch.equal(flow(identity(2), tokens(3, 2), 1.0, validate=False).x, plain.x)


# --- kicks --------------------------------------------------------------------------------------------------------


def test_kicks_of_a_field_have_its_root() -> None:
    """xi = sigma R z, R = U sqrt(lambda) of the kernel between the tokens of each cloud; a negative one is refused."""
    x, sigma = tokens((2, 4), 3), 0.6
    kernel = lambda rho: torch.exp(rho)
    xi = kicks.field(kernel, sigma)(x, torch.Generator().manual_seed(0))
    z = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=F64)
    K = kernel(x @ x.mT)
    for b in range(2):
        values, vectors = torch.linalg.eigh(K[b])
        torch.testing.assert_close(xi[b], sigma * (vectors * values.sqrt()) @ z[b], rtol=0, atol=1e-13)
    one = lambda rho: torch.where(rho > 0.999, 1.0, -0.5)  # eigenvalue 1 - 3/2 of four tokens
    with pytest.raises(ValueError, match=r"kernel is not positive semidefinite: eigenvalue -0.5"):
        kicks.field(one)(torch.stack([tokens(4, 3), tokens(1, 3).repeat(4, 1)]), None)


# --- merging ------------------------------------------------------------------------------------------------------


def test_groups_that_part_stay_and_others_join_in_one_sweep() -> None:
    """Two clouds; in the first a pair approaches and a pair parts; in the second three approach, one without mass."""
    x = torch.tensor([[0.01, 0.02, 5.01, 5.02], [0.01, 0.02, 0.03, 9.01]], dtype=F64)[..., None]
    v = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, -1.0, 0.0]], dtype=F64)[..., None]
    w = torch.tensor([[0.1, 0.3, 0.2, 0.4], [0.5, 0.25, 0.0, 0.25]], dtype=F64)
    held = Merged.start(x, w)
    joined = held.merge(x, v, 1.0, Euclidean(), 0)
    assert joined.x.shape == (2, 3, 1)
    assert joined.alive.sum(-1).tolist() == [3, 2]
    everyone = joined.everyone(joined.x)[..., 0]
    middle = (0.5 * 0.01 + 0.25 * 0.02) / 0.75
    expected = [[0.0175, 0.0175, 5.01, 5.02], [middle, middle, middle, 9.01]]
    torch.testing.assert_close(everyone, torch.tensor(expected, dtype=F64), rtol=0, atol=1e-15)
    masses = joined.weights.gather(-1, joined.owner)
    torch.testing.assert_close(masses, torch.tensor([[0.4, 0.4, 0.2, 0.4], [0.75, 0.75, 0.75, 0.25]], dtype=F64))
    # Tokens that only look on are joined at their plain mean.
    nobody = Merged.start(x[1], torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=F64)).merge(x[1], v[1], 1.0, Euclidean(), 0)
    torch.testing.assert_close(nobody.everyone(nobody.x)[:3, 0], torch.full((3,), 0.02, dtype=F64))


# --- the equation of a density ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "L"), [(2, 5), (3, 4)])
def test_nodes_of_harmonics_and_products_of_three(d: int, L: int) -> None:
    basis = Harmonics.of(d, L)
    rings = 3 * L + 1
    assert len(basis.x) == (rings if d == 2 else rings * (rings // 2 + 1))
    turn = torch.atan2(basis.x[:, 1], basis.x[:, 0])[:rings].remainder(2 * math.pi)
    expected = 2 * math.pi * (torch.arange(rings, dtype=F64) + 0.5) / rings
    torch.testing.assert_close(turn, expected, rtol=0, atol=1e-14)
    fine = Harmonics.of(d, 3 * L)  # many more nodes
    Y, Z = basis.values, evaluated(fine.x, L)
    exact = torch.einsum("n,na,nb,nc->abc", fine.weights, Z, Z, Z)
    torch.testing.assert_close(torch.einsum("n,na,nb,nc->abc", basis.weights, Y, Y, Y), exact, rtol=0, atol=1e-12)
    assert basis.degree.tolist() == sorted(basis.degree.tolist()) or d == 2
    # A pole is a point like others.
    if d == 3:
        poles = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]], dtype=F64)
        near = Sphere().retract(poles + 1e-9)
        torch.testing.assert_close(evaluated(poles, L), evaluated(near, L), rtol=0, atol=1e-7)


@pytest.mark.parametrize("diffusion", [0.0, 0.3])
def test_a_step_in_time_is_dormand_and_princes_of_what_the_heat_is_taken_out_of(diffusion: float) -> None:
    """z = e^{Lt} c has z' = e^{Lt} slope(e^{-Lt} z): its step, and the norm of its embedded error."""
    basis = Harmonics.of(2, 8)
    run = _Spectral(identity(2, 3.0), basis, diffusion, 1e-3)
    c = run.start(lambda x: 1 + 0.4 * x[:, 0] + 0.2 * x[:, 1] * x[:, 0])
    h, decay = 0.3, diffusion * basis.degree**2
    ahead, error = run.step(c, h)
    assert run.evaluations == 7
    velocity = lambda t, z: (torch.exp(decay * t) * run.slope(torch.exp(-decay * t) * z[:, 0]))[:, None]
    z, off, _ = dopri5.with_error(velocity, 0.0, c[:, None], h, Euclidean())
    end = torch.exp(-decay * h) * z[:, 0]
    torch.testing.assert_close(ahead, end, rtol=0, atol=1e-14)
    assert off is not None
    expected = float((torch.exp(-decay * h) * off[:, 0]).norm()) / max(1.0, float(end.norm()))
    assert error == pytest.approx(expected, rel=1e-6)
    # and the slope is the integral against gradients: int <grad Y_j, F> rho
    rho = basis.values @ c
    F = identity(2, 3.0).drift(basis.x, weights=basis.weights * rho)
    literal = [float((basis.weights * rho * (basis.gradients[:, j] * F).sum(-1)).sum()) for j in range(17)]
    assert run.slope(c).tolist() == pytest.approx(literal, abs=1e-14)


@pytest.mark.parametrize(("L", "decay", "tail"), [(20, 0.6, 1e-7), (30, 0.8, 1e-7), (12, 0.97, 1e-6), (30, 0.5, 1e-7)])
def test_the_bandwidth_that_would_do(L: int, decay: float, tail: float) -> None:
    """Of coefficients that fall like decay^k the highest tenth, and where they come down to the tail."""
    run = _Spectral(identity(2), Harmonics.of(2, L), 0.0, tail)
    size = decay ** np.arange(L + 1.0)
    c = torch.zeros(2 * L + 1, dtype=F64)
    c[0] = 1.0
    c[1 : L + 1] = torch.from_numpy(0.2 * size[1:])
    amplitude = np.concatenate([[1.0], 0.2 * size[1:]])
    first = L + 1 - max(2, L // 10)
    share = lambda a, b: np.linalg.norm(amplitude[a:b]) / np.linalg.norm(amplitude)
    held = share(first, None)
    if held <= tail:
        run.check(c, 1.0)
        return
    rate = math.log(share(L // 2 - 1, L // 2 + 2) / held) / (first - L // 2)
    needed = max(2 * L, min(16 * L, math.ceil(first + math.log(held / tail) / rate)))
    with pytest.raises(ValueError, match=rf"not resolved at t = 1: degrees {first} to {L} hold .*") as told:
        run.check(c, 1.0)
    assert f"Use bandwidth = {needed} or more" in str(told.value)
    assert f"hold {held:.2g} of it" in str(told.value)


def test_a_density_below_zero_is_not_resolved() -> None:
    run = _Spectral(identity(2), Harmonics.of(2, 20), 0.0, 1e-7)
    for below, fine in ((0.5e-6, True), (3e-6, False)):
        c = torch.zeros(41, dtype=F64)
        c[0], c[1] = 1.0, (1 + below) / math.sqrt(2)
        lowest = float((run.basis.values @ c).min() / (run.basis.values @ c).max())
        if fine:
            run.check(c, None)
        else:
            assert lowest < -1e-6
            with pytest.raises(ValueError, match=r"its lowest value is -1.*e-06 of the highest"):
                run.check(c, None)


def test_what_a_path_of_densities_answers() -> None:
    """Coefficients made by hand: sizes of degrees, growth, the density at points, the cloud without what is below 0."""
    for d, L in ((2, 4), (3, 4)):
        basis = Harmonics.of(d, L)
        M = len(basis.degree)
        c = torch.randn(3, M, generator=torch.Generator().manual_seed(0), dtype=F64)
        path = DensityPath(torch.tensor([0.0, 0.5, 2.0], dtype=F64), c, basis)
        for i, k in itertools.product(range(3), range(L + 1)):
            size = math.sqrt(sum(float(c[i, j]) ** 2 for j in range(M) if basis.degree[j] == k))
            assert float(path.amplitudes()[i, k]) == pytest.approx(size, rel=1e-14)
        a = path.amplitudes()[:, L]
        assert path.growth_rates(L).tolist() == pytest.approx(
            [math.log(a[1] / a[0]) / 0.5, math.log(a[2] / a[1]) / 1.5], rel=1e-12
        )
        for bad in (-1, L + 1, 1.0):
            with pytest.raises(ValueError, match=f"expected a degree from 0 to {L}"):
                path.growth_rates(bad)  # type: ignore[arg-type]
        rho = path.density(basis.x)
        torch.testing.assert_close(rho, c @ basis.values.mT, rtol=0, atol=1e-12)
        cut = rho[1].clamp(min=0) * basis.weights
        torch.testing.assert_close(path.cloud(1).probabilities, cut / cut.sum(), rtol=0, atol=1e-14)
        x = basis.x[:5]
        for off, fine in ((3, True), (-3, True), (5, False), (-5, False)):
            if fine:
                path.density((1 + off * EPS**0.5) * x)
                continue
            with pytest.raises(ValueError, match="x has rows that are no unit vectors"):
                path.density((1 + off * EPS**0.5) * x)
        for bad in (x[None], tokens(3, 5 - d)):
            with pytest.raises(ValueError, match=rf"expected \(P, {d}\) unit vectors"):
                path.density(bad)


REFUSED = {
    "no density": ({"density": 3.0}, "density is a float, expected a VonMisesFisher or a function"),
    "a law in space": (
        {"density": VonMisesFisher(torch.tensor([0.0, 0.0, 1.0], dtype=F64), 1.0)},
        r"density has a mean of shape \(3,\), expected \(2,\)",
    ),
    "a batch": ({"attention": identity(2, torch.ones(3, 1, dtype=F64))}, r"attention has a batch \(3,\)"),
    "no self": ({"attention": identity(2, self_attention=False)}, "compare tokens by place"),
    "causal": ({"attention": identity(2, causal=True)}, "compare tokens by place"),
    "tol": ({"tol": 1.0}, "tol = 1.0, tail = 1e-07, max_steps = 100000, expected tol and tail between 0 and 1"),
    "tail": ({"tail": 0.0}, "expected tol and tail between 0 and 1, tol above rounding, at least one step"),
    "max_steps": ({"max_steps": 0}, "expected tol and tail between 0 and 1, tol above rounding, at least one step"),
    "too few steps": (
        {"max_steps": 2, "error": FloatingPointError},
        "2 steps took t to .* only; raise tol or max_steps",
    ),
    "diffusion": ({"diffusion": math.inf}, "diffusion = inf, expected a finite D >= 0"),
    "bandwidth": ({"bandwidth": 3}, "bandwidth = 3, expected at least 4 degrees"),
    "half a bandwidth": ({"bandwidth": 8.0}, "bandwidth = 8.0, expected at least 4 degrees"),
    "time": ({"t": "late"}, "t is a str, expected a time or times"),
    "a list": ({"density": lambda x: [1.0] * len(x)}, "density returned a list, expected a tensor of shape"),
    "one NaN": ({"density": lambda x: torch.where(x[:, 0] > 0.99, math.nan, 1.0)}, "expected finite numbers >= 0"),
    "one inf": ({"density": lambda x: torch.where(x[:, 0] > 0.99, math.inf, 1.0)}, "expected finite numbers >= 0"),
    "one below 0": ({"density": lambda x: torch.where(x[:, 0] > 0.99, -1.0, 1.0)}, "values from -1 to 1, expected"),
    "nothing": (
        {"density": lambda x: 0 * x[:, 0]},
        "values from 0 to 0, expected finite numbers >= 0, not all of them 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_densities_that_are_refused(name: str) -> None:
    options, message = REFUSED[name]
    given = {
        "attention": identity(2),
        "density": lambda x: 1 + 0.1 * x[:, 0],
        "t": [0.0, 1.0],
        "bandwidth": 8,
        **options,
    }
    error = given.pop("error", ValueError)
    with pytest.raises(error, match=message):
        density_flow(given.pop("attention"), given.pop("density"), given.pop("t"), **given)


def test_a_density_flow_says_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(continuity.memory, "require", lambda needed, *words: asked.append(needed))
    for d, L in ((2, 8), (3, 4)):
        path = density_flow(identity(d, 0.5), lambda x: 1 + 0.1 * x[:, 0], 0.5, bandwidth=L, diffusion=0.2, tail=0.1)
        assert len(path) == 101
        assert {k: path.about[k] for k in ("diffusion", "bandwidth", "tol")} == {
            "diffusion": 0.2,
            "bandwidth": L,
            "tol": 1e-9,
        }
        assert path.about["evaluations"] == 7 * path.about["steps"]
        assert path.about["steps"] < 130  # a step cut short by a time is no reason to slow down
        numbers = sum(z.numel() for z in (path.harmonics.values, path.harmonics.gradients))
        assert asked[-1] == pytest.approx(8 * (numbers * 2 + path.harmonics.values.numel()), rel=1e-12)
    assert density_flow(identity(2), lambda x: 1 + 0 * x[:, 0], [0.0, 0.1]).harmonics.bandwidth == 64
    assert repr(path) == "DensityPath(101 times from 0 to 0.5, S^2, bandwidth 4, float64 (101, 25))"


# --- stability ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "every", "ends"),
    [
        (0.0, 1.0, 0.5, [0.5, 1.0]),
        (0.0, 1.0, 0.4, [1 / 3, 2 / 3, 1.0]),
        (1.0, 1.5, 0.5 - 1e-12, [1.5]),
        (1.0, 1.5, 9.0, [1.5]),
        (2.0, 2.0, 0.1, []),
    ],
)
def test_equal_parts_of_a_time(a: float, b: float, every: float, ends: list[float]) -> None:
    assert _cut(a, b, every) == pytest.approx(ends, rel=1e-15)


@pytest.mark.parametrize(("transient", "every"), [(None, None), (1.0, 0.3), (0.0, 4.0)])
def test_exponents_of_a_rate_that_changes(transient: float | None, every: float | None) -> None:
    """x' = t x: growth t^2/2; between s and T on average (s + T)/2, in its halves (T - s)/4 below and above.

    Steps of rk4 are off by h^5 t^5/120 each, h^4 T^6/720 in all.
    """
    T, h = 4.0, 0.05
    off = h**4 * T**6 / 720
    found = lyapunov(
        Drift(lambda t, x: t * x),
        torch.ones(1, 1, dtype=F64),
        T,
        transient=transient,
        every=every,
        h=h,
        geometry=Euclidean(),
    )
    s = T / 2 if transient is None else transient
    assert float(found.exponents) == pytest.approx((s + T) / 2, abs=off)
    assert float(found.error) == pytest.approx((T - s) / 4, abs=off)
    assert found.growth[:, 0].tolist() == pytest.approx((found.t**2 / 2).tolist(), abs=off)
    longest = 10 * h if every is None else every
    assert float(found.t.diff().max()) <= longest + 1e-12
    for moment in (s, (s + T) / 2, T):
        assert float((found.t - moment).abs().min()) < 1e-12
    parts = [math.ceil((b - a) / longest - 1e-9) for a, b in ((0.0, s), (s, (s + T) / 2), ((s + T) / 2, T))]
    assert len(found.t) == 1 + sum(parts)


def test_exponents_of_a_batch_with_padding() -> None:
    x0, mask = tokens((2, 4), 3), torch.tensor([[True] * 4, [True] * 3 + [False]])
    found = lyapunov(identity(3, 2.0), x0, 1.0, 6, mask=mask, transient=0.0, generator=torch.Generator().manual_seed(0))
    assert (found.exponents.shape, found.growth.shape[1:]) == ((2, 6), (2, 6))
    alone = lyapunov(identity(3, 2.0), x0[1, :3], 1.0, 6, transient=0.0, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(found.exponents[1].sum(), alone.exponents.sum(), rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="k = 7, expected a whole number, 1 to 6"):
        lyapunov(identity(3, 2.0), x0, 1.0, 7, mask=mask)
    for bad in ({"t": math.inf}, {"t": "1"}, {"transient": -0.1}, {"transient": 1.0}, {"every": 0.0}, {"h": 0.0}):
        with pytest.raises(ValueError, match=r"expected"):
            lyapunov(identity(3), x0, **{"t": 1.0, **bad})  # type: ignore[arg-type]


def test_a_linearisation_in_blocks_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    x = tokens((2, 4), 3)
    A = Attention.random(3, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    asked = []
    monkeypatch.setattr(stability.memory, "require", lambda needed, *words: asked.append(needed))
    whole = linearise(A, x, vectors=True)
    assert asked == [4 * whole.jacobian.numel() * 8]
    monkeypatch.setattr(stability, "ENTRIES", 60)
    parts = linearise(A, x, vectors=True)
    torch.testing.assert_close(parts.jacobian, whole.jacobian, rtol=0, atol=1e-13)
    for b in range(2):
        torch.testing.assert_close(whole.jacobian[b], linearise(A, x[b]).jacobian, rtol=0, atol=1e-12)
        # Its eigenvectors, as displacements of tokens, are tangent and mapped to multiples of themselves.
        B, found = whole.basis[b], whole.vectors
        assert found is not None
        flat = torch.einsum("ida,mid->mia", B.to(found.dtype), found[b]).flatten(1)
        image = flat @ whole.jacobian[b].T.to(found.dtype)
        torch.testing.assert_close(image, whole.eigenvalues[b][:, None] * flat, rtol=0, atol=1e-12)
        assert float((found[b] * x[b]).sum(-1).abs().max()) < 1e-13
    assert bool((whole.eigenvalues.real.diff(dim=-1) <= 0).all())
    torch.testing.assert_close(whole.growth, whole.eigenvalues.real.amax(-1))
    speed = Sphere().tangent(x, A.drift(x)).norm(dim=-1).amax(-1)
    torch.testing.assert_close(whole.speed, speed)
    for t in (math.nan, math.inf):
        with pytest.raises(ValueError, match="expected a finite time"):
            linearise(A, x, t=t)


def test_the_linearisation_of_a_placement_and_of_what_does_not_move() -> None:
    x = tokens(3, 3)
    flat = linearise(identity(3), 2 * x, placement=placement.pre)
    assert flat.jacobian.shape == (9, 9)
    still = linearise(Drift(lambda t, x: torch.ones_like(x)), x, geometry=Euclidean())
    assert torch.equal(still.jacobian, torch.zeros(9, 9, dtype=F64))
    assert float(still.speed) == pytest.approx(math.sqrt(3))
    assert tangent_basis(Sphere(), x).shape == (3, 3, 2)


# --- paths and processes ------------------------------------------------------------------------------------------


def test_paths_in_words() -> None:
    x = torch.zeros(2, 3, 4)
    path = Trajectory(torch.tensor([0.0, 2.5]), x, torch.ones(3), torch.ones(3, dtype=torch.bool))
    assert repr(path) == "Trajectory(2 times from 0 to 2.5, x float32 (2, 3, 4), weights, mask)"
    assert repr(Trajectory(path.t, x)) == "Trajectory(2 times from 0 to 2.5, x float32 (2, 3, 4))"
    assert repr(path[:0]) == "Trajectory(no times, x float32 (0, 3, 4), weights, mask)"
    assert [len(path[i]) for i in (0, 1, -1, -2)] == [1] * 4
    assert [float(path[i].t) for i in (0, 1, -1, -2)] == [0.0, 2.5, 2.5, 0.0]
    for t, y in ((torch.zeros(2, 1), x), (torch.zeros(2), x[0]), (torch.zeros(3), x)):
        with pytest.raises(ValueError, match=r"expected \(T,\) and \(T, ..., n, d\)"):
            Trajectory(t, y)


def test_processes_alone() -> None:
    here = torch.device("cpu")
    assert (ALONE.first, Processes(1, 2, here).first) == (True, False)
    module = torch.nn.Linear(1, 1)
    assert ALONE.shared(module) is module
    ALONE.wait()
    ALONE.same({"x": torch.ones(2), "mask": None})
    shard = Shard(Processes(1, 3, here), 8)
    assert shard.bounds == [0, 2, 5, 8]
    assert shard.first == 2
    assert Shard(Processes(2, 3, here), 2).first == 0
    assert torch.equal(Shard(ALONE, 3).everyone(torch.ones(3, 2)), torch.ones(3, 2))
    assert repr(RingAttention(identity(2), Processes(0, 2, here))).endswith(", 2 processes)")
    ring = RingAttention(identity(2), ALONE)
    assert ring.tells_apart == ("tokens of other processes",)
    assert ring.needs_float64(1.0) == identity(2).needs_float64(1.0)
    assert set(ring.tensors) == set(identity(2).tensors)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"self_attention": False}, {"kind": "unnormalised"}])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_ring_of_one_in_both_precisions(options, dtype) -> None:  # type: ignore[no-untyped-def]
    """Logits that float32 has no digits of are taken in float64, as the attention does."""
    x = tokens(6, 3).to(dtype)
    A = Attention.random(
        3, 2, beta=300.0 if not options else 2.0, generator=torch.Generator().manual_seed(1), dtype=dtype, **options
    )
    path, alone = (push_forward(field, x, 0.2, h=0.1) for field in (RingAttention(A, ALONE), A))
    assert path.dtype == dtype
    torch.testing.assert_close(path, alone, rtol=0, atol=200 * torch.finfo(dtype).eps)


def test_a_mean_field_run_moves_each_token_by_itself_in_every_placement() -> None:
    x = tokens(4, 3)
    for place in (placement.post, placement.ln_scaling, placement.ngpt(0.5)):
        together = push_forward(identity(3, 2.0), x, 0.5, context=UniformSphere(3), placement=place, h=0.1)
        alone = push_forward(identity(3, 2.0), x[2:3], 0.5, context=UniformSphere(3), placement=place, h=0.1)
        torch.testing.assert_close(together[2:3], alone, rtol=0, atol=1e-14)


def test_what_processes_cannot_do_is_refused_before_they_speak() -> None:
    two = Processes(0, 2, torch.device("cpu"))
    x, weight = torch.ones(4, 2), torch.ones(2, 2)
    for tensors, cloud in (
        ({"Q": weight.clone().requires_grad_()}, {"x0": x}),
        ({}, {"x0": x.clone().requires_grad_()}),
    ):
        with pytest.raises(ValueError, match="gradients do not pass between processes"):
            check_shared(two, tensors, cloud, False, None)
    with pytest.raises(ValueError, match=r"x0 is on meta and this process works on cpu; use x0.to\(world.device\)"):
        check_shared(two, {"Q": weight}, {"x0": x.to("meta"), "mask": None}, False, None)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="but torch sees no CUDA device; use --device cpu"):
            processes("cuda")
    assert processes() == ALONE


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (flow, {"h": 0.05, "step": rk4}),
        (push_forward, {"h": 0.05, "step": rk4}),
        (consensus, {"tol": 1e-3}),
        (density_flow, {"tol": 1e-9, "tail": 1e-7, "max_steps": 100_000, "diffusion": 0.0}),
        (lyapunov, {"k": 1, "h": 0.05, "step": rk4}),
        (linearise, {"t": 0.0}),
        (placement.ngpt, {"alpha": 1.0}),
    ],
)
def test_what_a_call_means_that_says_no_more(call, expected) -> None:  # type: ignore[no-untyped-def]
    """Numbers of reports and papers are those of the defaults: they do not change unseen."""
    given = inspect.signature(call).parameters
    assert {name: given[name].default for name in expected} == expected


@pytest.mark.parametrize("shape", [(3,), (3, 2), (2, 4, 2), (3, 0, 2)])
def test_a_path_is_of_clouds_one_for_each_time(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected \(T,\) and \(T, \.\.\., n, d\)"):
        Trajectory(torch.arange(3.0), torch.zeros(shape))
