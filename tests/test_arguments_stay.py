"""No public function writes into its arguments: after a call tensors of every form are what they were, bit for bit."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from attn_flow import (
    Adaptive,
    Attention,
    Cloud,
    ContinuousAttentionLayer,
    Drift,
    Ellipsoid,
    EllipsoidSupport,
    Euclidean,
    Gaussian,
    Layers,
    Mixture,
    Sphere,
    Trajectory,
    UniformSphere,
    dopri5,
    euler,
    flow,
    limit,
    phases,
    push_forward,
    resolution,
    rk4,
    wasserstein,
    zero_temperature_flow,
)
from attn_flow.dynamics import density_flow, linearise, lyapunov
from attn_flow.geometry import angle, check_placed, placed
from attn_flow.measures import LogitLaw, OwnTokens, SeenGaussian, VonMisesFisher
from attn_flow.nn import ContinuousMultiheadAttention, DeepStack
from attn_flow.observe import quantities
from attn_flow.observe.tracking import track
from attn_flow.prediction import fit_bound, phases_over_seeds, propagation_of_chaos, settle
from attn_flow.transport import solve

F32, F64 = torch.float32, torch.float64
N, D = 6, 3
FORMS = ("float32", "float64", "requires_grad", "strided", "expanded")


@dataclass
class Watch:
    """Makes tensors of one form, and afterwards looks whether they, or what they are views of, were written into."""

    form: str
    held: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        return F32 if self.form == "float32" else F64

    def __call__(self, x: Tensor, *, batch: bool = True) -> Tensor:
        """x in the form; where `batch`, an expanded view is a batch of two clouds that share their memory."""
        x = x.to(self.dtype) if x.is_floating_point() else x.clone()
        base, view = x, x
        if self.form == "requires_grad" and x.is_floating_point():
            view = x.requires_grad_()
        elif self.form == "strided":
            base = torch.stack([x, x], dim=-1)
            view = base[..., 0]
        elif self.form == "expanded" and batch:
            view = x[None].expand(2, *x.shape)
        self.held.append((base, base.detach().clone(), base._version))
        return view

    # What the examples are made of.

    def tokens(self, seed: int = 0, *, batch: bool = True) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return self(Sphere().uniform(N, D, generator=generator, dtype=F64), batch=batch)

    def weights(self, *, batch: bool = True) -> Tensor:
        return self(torch.linspace(0.5, 1.5, N, dtype=F64), batch=batch)

    def mask(self, *, batch: bool = True) -> Tensor:
        return self(torch.arange(N) < N - 1, batch=batch)

    def matrix(self, *diagonal: float) -> Tensor:
        return self(torch.diag(torch.tensor(diagonal or (3.0, 2.0, 1.0), dtype=F64)), batch=False)

    def vector(self, *numbers: float) -> Tensor:
        return self(torch.tensor(numbers or (0.1, 0.2, 0.3), dtype=F64), batch=False)

    def number(self, value: float) -> Tensor:
        return self(torch.tensor([value], dtype=F64), batch=False)

    def attention(self, beta: float = 2.0) -> Attention:
        G, V = self.matrix(), self.matrix(2.0, 1.0, 0.5)
        return Attention(G, None, V, None, beta, self.vector()[None], self.vector())

    def plain(self) -> Attention:
        return Attention.from_matrices(self.matrix(), self.matrix(2.0, 1.0, 0.5), 2.0)

    def path(self) -> Trajectory:
        x = torch.stack([Sphere().uniform(N, D, generator=torch.Generator().manual_seed(i)) for i in range(4)])
        t = self(torch.arange(4, dtype=F64), batch=False)
        return Trajectory(t.detach(), self(x, batch=False).detach(), self.weights(batch=False).detach())

    def changed(self) -> list[int]:
        """Which of the tensors are not what they were."""
        same = [torch.equal(base, before) and base._version == version for base, before, version in self.held]
        return [i for i, kept in enumerate(same) if not kept]


def measure(name: str) -> Callable[[Watch], object]:
    return {
        "Cloud": lambda w: Cloud(w.tokens(), w.weights(), w.mask()),
        "Gaussian": lambda w: Gaussian(w.vector(), w.matrix(), 2.0),
        "EllipsoidSupport": lambda w: EllipsoidSupport(w.vector(), w.matrix(), 1.5),
        "LogitLaw": lambda w: LogitLaw(w.vector(), w.matrix(), w.vector(-1.0, 0.0, 1.0)),
        "VonMisesFisher": lambda w: VonMisesFisher(w.vector(0.0, 0.6, 0.8), 2.0),
        "Mixture": lambda w: Mixture([Cloud(w.tokens(batch=False)), UniformSphere(D)], w.vector(1.0, 2.0)),
        "UniformSphere": lambda w: UniformSphere(D, 2.0),
        "OwnTokens": lambda w: OwnTokens(w.tokens()[..., None, :], w.weights()[..., None]),
        "SeenGaussian": lambda w: SeenGaussian(w.tokens(batch=False), w(torch.ones(N, N, dtype=F64), batch=False), 2.0),
    }[name]


def ellipsoid(w: Watch) -> Ellipsoid:
    return Ellipsoid(w.vector().detach(), w.matrix().detach())


def layer(w: Watch) -> ContinuousAttentionLayer:
    return ContinuousAttentionLayer(D, 1, steps=2, geometry=Sphere()).to(w.dtype)


def multihead(w: Watch) -> ContinuousMultiheadAttention:
    return ContinuousMultiheadAttention(4, 2, batch_first=True, steps=2).to(w.dtype)


def wide(w: Watch) -> Tensor:
    return w(torch.linspace(-1, 1, 2 * N * 4, dtype=F64).reshape(2, N, 4), batch=False)


def stack(w: Watch) -> DeepStack:
    return DeepStack(5, 2, dim=4, depth=2, ffn=8).to(w.dtype)


def ids(w: Watch) -> Tensor:
    return w(torch.arange(2 * N).reshape(2, N) % 5, batch=False)


def stepped(step: Callable[..., Tensor]) -> Callable[[Watch], object]:
    return lambda w: step(lambda t, x: -x, 0.0, w.tokens(), 0.1, Euclidean())


def density(w: Watch) -> object:
    law = VonMisesFisher(w.vector(0.6, 0.8).double(), 1.0)
    path = density_flow(Attention.identity(2, 1.0, dtype=F64), law, 0.05, bandwidth=24)
    return path.density(w(torch.eye(2, dtype=F64), batch=False))


def bounded(w: Watch) -> object:
    x0, t = w.tokens(batch=False).detach(), torch.linspace(0, 2, 6, dtype=F64)
    cold = lambda beta: Attention.from_matrices(w.matrix(), w.matrix(1.0, 2.0, 1.0), beta)
    w2 = [w(torch.linspace(1, last, 6, dtype=F64), batch=False) for last in (0.5, 0.3, 0.2)]
    return fit_bound([flow(cold(beta), x0, t) for beta in (10.0, 30.0, 100.0)], limit(w.plain()), w2=w2)


def chaos(w: Watch) -> object:
    sample = lambda n, generator: Sphere().uniform(n, D, generator=generator, dtype=w.dtype)
    return propagation_of_chaos(w.plain(), sample, Cloud(w.tokens(batch=False)), 0.1, [4, 8])


def evolved(w: Watch) -> object:
    return layer(w).evolve(w.tokens(), lambda p, x: -x, w.mask())


CALLS: dict[str, Callable[[Watch], object]] = {
    "Adaptive.scaled_error": lambda w: Adaptive().scaled_error(w.tokens(1), w.tokens()),
    "Attention": lambda w: w.attention(),
    "Attention.from_matrices": lambda w: Attention.from_matrices(w.matrix(), w.matrix(), w.number(2.0)),
    "Attention.identity": lambda w: Attention.identity(D, w.number(2.0), value_bias=w.vector(), dtype=w.dtype),
    "Attention.random": lambda w: Attention.random(D, beta=w.number(2.0), dtype=w.dtype),
    "Attention.with_beta": lambda w: w.attention().with_beta(w.number(3.0)),
    "Attention.drift": lambda w: w.attention().drift(w.tokens(), weights=w.weights(), mask=w.mask()),
    "Attention.matrix": lambda w: w.attention().matrix(w.tokens(), weights=w.weights(), mask=w.mask()),
    "Attention.truncated_drift": lambda w: w.attention(50.0).truncated_drift(w.tokens(), weights=w.weights()),
    "Attention.check_tokens": lambda w: w.attention().check_tokens(w.tokens()),
    "Attention.admit": lambda w: w.attention().admit(Cloud(w.tokens(), w.weights(), w.mask())),
    "Attention.checked_context": lambda w: w.attention().checked_context(w.tokens(), w.tokens(1)),
    "Attention.cloud": lambda w: w.attention().cloud(w.tokens(), w.weights(), w.mask()),
    "Cloud": lambda w: Cloud(w.tokens(), w.weights(), w.mask()).probabilities,
    "ContinuousAttentionLayer": lambda w: ContinuousAttentionLayer(D, 1, beta=w.number(2.0), dtype=w.dtype),
    "ContinuousAttentionLayer.from_attention": lambda w: ContinuousAttentionLayer.from_attention(w.attention()),
    "ContinuousAttentionLayer.forward": lambda w: layer(w)(w.tokens(), w.mask()),
    "ContinuousAttentionLayer.evolve": evolved,
    "ContinuousMultiheadAttention": lambda w: ContinuousMultiheadAttention(4, 2, beta=w.number(2.0), dtype=w.dtype),
    "ContinuousMultiheadAttention.from_multihead": lambda w: ContinuousMultiheadAttention.from_multihead(
        nn.MultiheadAttention(4, 2), beta=w.number(2.0)
    ),
    "ContinuousMultiheadAttention.forward": lambda w: multihead(w)(*[wide(w)] * 3),
    "DeepStack.forward": lambda w: stack(w)(ids(w)),
    "DeepStack.embed": lambda w: stack(w).embed(ids(w)),
    "DeepStack.paths": lambda w: stack(w).paths(ids(w)),
    "DeepStack.trajectory": lambda w: stack(w).trajectory(ids(w)),
    "DensityPath": density,
    "DensityPath.density": density,
    "Drift.admit": lambda w: Drift(lambda t, x: -x).admit(Cloud(w.tokens())),
    "Field.admit": lambda w: (w.attention() + Drift(lambda t, x: -x)).admit(Cloud(w.tokens())),
    "Ellipsoid": ellipsoid,
    "Ellipsoid.from_layer_norm": lambda w: Ellipsoid.from_layer_norm(w.vector(1.0, 2.0, 3.0), w.vector()),
    "Ellipsoid.sphere_coordinates": lambda w: ellipsoid(w).sphere_coordinates(w.tokens()),
    "Ellipsoid.tangent": lambda w: ellipsoid(w).tangent(w.tokens(), w.tokens(1)),
    "Ellipsoid.retract": lambda w: ellipsoid(w).retract(w.tokens()),
    "Ellipsoid.distance": lambda w: ellipsoid(w).distance(w.tokens(), w.tokens(1)),
    "EllipsoidSupport": measure("EllipsoidSupport"),
    "EllipsoidSupport.fit": lambda w: EllipsoidSupport.fit(Cloud(w.tokens(), w.weights()), shrinkage=0.1),
    "Euclidean.tangent": lambda w: Euclidean().tangent(w.tokens(), w.tokens(1)),
    "Euclidean.retract": lambda w: Euclidean().retract(w.tokens()),
    "Euclidean.distance": lambda w: Euclidean().distance(w.tokens(), w.tokens(1)),
    "Gaussian": measure("Gaussian"),
    "Gaussian.bulk": lambda w: Gaussian.bulk(w.vector(), w.matrix(), 100),
    "Gaussian.fit": lambda w: Gaussian.fit(Cloud(w.tokens(), w.weights())),
    "Layers": lambda w: flow(Layers([w.attention(), w.plain()], w.vector(0.0, 0.5, 1.0)), w.tokens(), 1.0),
    "LimitMap.moving_push_forward": lambda w: limit(w.plain()).moving_push_forward(w.tokens(), w.vector(0.0, 0.5)),
    "LimitMap.examine": lambda w: limit(w.plain()).examine(w.tokens(batch=False), weights=w.weights(batch=False)),
    "LimitMap.push_forward": lambda w: limit(w.plain()).push_forward(w.tokens(), 1.0),
    "LimitMap.settle": lambda w: limit(w.plain()).settle(w.tokens(batch=False)),
    "LogitLaw": measure("LogitLaw"),
    "VonMisesFisher": measure("VonMisesFisher"),
    "VonMisesFisher.density": lambda w: measure("VonMisesFisher")(w).density(w.tokens(1)),
    "Mixture": measure("Mixture"),
    "OwnTokens": measure("OwnTokens"),
    "SeenGaussian": measure("SeenGaussian"),
    "Mixture.responsibilities": lambda w: measure("Mixture")(w).responsibilities(w.tokens(1, batch=False), 2.0),
    "Sphere.tangent": lambda w: Sphere().tangent(w.tokens(), w.tokens(1)),
    "Sphere.retract": lambda w: Sphere(2.0).retract(w.tokens()),
    "Sphere.distance": lambda w: Sphere().distance(w.tokens(), w.tokens(1)),
    "Trajectory": lambda w: w.path().cloud(1),
    "UniformSphere.log_partition_along": lambda w: UniformSphere(D).log_partition_along(
        w.weights(), w.tokens(), w.number(2.0)
    ),
    "UniformSphere.pull": lambda w: UniformSphere(D).pull(w.weights()[..., None], w.tokens(), w.number(2.0)),
    "alignment": lambda w: quantities.alignment(w.tokens(), w.matrix()[:, :2]),
    "angle": lambda w: angle(w.tokens(), w.tokens(1)),
    "effective_beta": lambda w: quantities.effective_beta(w.attention(), w.tokens(), weights=w.weights()),
    "attention_statistics": lambda w: quantities.attention_statistics(w.attention(), w.tokens(), weights=w.weights()),
    "check_placed": lambda w: check_placed("x", w.tokens(), Sphere()),
    "close_pairs": lambda w: quantities.close_pairs(w.tokens(), weights=w.weights(), mask=w.mask()),
    "clusters": lambda w: quantities.clusters(w.tokens(), 0.5, weights=w.weights(), velocity=w.tokens(1)),
    "diameter": lambda w: quantities.diameter(w.tokens(), mask=w.mask()),
    "density_flow": density,
    "dopri5": stepped(dopri5),
    "effective_rank": lambda w: quantities.effective_rank(w.tokens(), weights=w.weights(), centred=True),
    "energy": lambda w: quantities.energy(w.tokens(), 2.0, w.matrix(), weights=w.weights()),
    "euler": stepped(euler),
    "fit_bound": bounded,
    "flow": lambda w: (
        flow(w.attention(), w.tokens(), w.vector(0.0, 0.5, 1.0), weights=w.weights(), mask=w.mask()),
        flow(w.attention(), w.tokens(), [0, 0.5], weights=w.weights(), step="adaptive"),
    ),
    "limit": lambda w: limit(w.plain(), Gaussian(w.vector(), w.matrix(), 2.0)),
    "linearise": lambda w: linearise(w.attention(), Cloud(w.tokens(), w.weights())),
    "log_energy": lambda w: quantities.log_energy(w.tokens(), 2.0, w.matrix(), mask=w.mask()),
    "lyapunov": lambda w: lyapunov(w.attention(), w.tokens(batch=False), 0.2, weights=w.weights(batch=False)),
    "pairwise_cosines": lambda w: quantities.pairwise_cosines(w.tokens(), 10, weights=w.weights()),
    "phases": lambda w: phases(w.path(), limit(w.plain()), w2=w.vector(1.0, 0.5, 0.2, 0.4), warn=False),
    "phases_over_seeds": lambda w: phases_over_seeds(
        Trajectory(w.path().t, torch.stack([w.path().x] * 2, dim=1)), limit(w.plain())
    ),
    "placed": lambda w: placed("x", w.tokens(), w.mask(), Sphere()),
    "propagation_of_chaos": chaos,
    "push_forward": lambda w: push_forward(w.attention(), w.tokens(), 0.5, context=Cloud(w.tokens(1))),
    "resolution": lambda w: resolution(w.attention(), w.tokens(), weights=w.weights(), warn=False),
    "rk4": stepped(rk4),
    "settle": lambda w: settle(w.plain(), w.tokens(batch=False), "tokens", horizon=5.0),
    "solve": lambda w: [
        solve(w.tokens(), w.tokens(1), weights_x=w.weights(), mask_y=w.mask(), method=method, rtol=2.0)
        for method in ("auto", "simplex", "shortlist", "sinkhorn", "sliced")
    ],
    "track": lambda w: track(w.path(), 0.5),
    "wasserstein": lambda w: wasserstein(w.tokens(), w.tokens(1)),
    "zero_temperature_flow": lambda w: [
        zero_temperature_flow(w.plain(), w.tokens(), w.vector(0.0, 0.5), support=support)
        for support in (None, "tokens", Cloud(w.tokens(1, batch=False)))
    ],
}
for name in (
    "Cloud",
    "Gaussian",
    "EllipsoidSupport",
    "Mixture",
    "UniformSphere",
    "OwnTokens",
    "SeenGaussian",
    "LogitLaw",
    "VonMisesFisher",
):
    made = measure(name)
    for method in ("log_partition", "tilted_mean"):
        CALLS[f"{name}.{method}"] = lambda w, made=made, method=method: [
            getattr(made(w), method)(w.tokens(2), beta) for beta in (0.0, 2.0, 200.0)
        ]

# They keep what they are given, and compute nothing.
HOLDERS = {"AttentionStatistics", "Clusters", "LimitMap", "Linearisation", "Lyapunov", "Resolution", "Settled"}
HOLDERS |= {"Track", "Transport"}
# It reads a model, whose tensors `tests/hooks` compares before and after.
ELSEWHERE = {"ContinuousAttentionLayer.from_pretrained"}

ROOMS = ("", ".attention", ".dynamics", ".geometry", ".measures", ".nn", ".prediction", ".transport")
ROOMS += (".observe.quantities", ".observe.tracking")


def takes_tensors(function: Callable[..., object]) -> bool:
    words = ("Tensor", "Trajectory", "Cloud", "Measure")
    return any(word in str(p.annotation) for p in inspect.signature(function).parameters.values() for word in words)


def public() -> set[str]:
    """Functions, constructors and methods that take tensors, of the package and its rooms."""
    found = set()
    for room in (importlib.import_module(f"attn_flow{name}") for name in ROOMS):
        own = [name for name, z in vars(room).items() if getattr(z, "__module__", "") == room.__name__]
        for name in getattr(room, "__all__", own):
            z = getattr(room, name)
            if name.startswith("_") or getattr(z, "_is_protocol", False):
                continue
            if inspect.isclass(z) and issubclass(z, BaseException):
                continue
            if inspect.isclass(z):
                methods = {
                    f"{name}.{k}": getattr(f, "__func__", f)
                    for k, f in vars(z).items()
                    if k[0] != "_" and hasattr(f, "__qualname__")
                }
                found |= {k for k, f in {name: z, **methods}.items() if callable(f) and takes_tensors(f)}
            elif callable(z) and takes_tensors(z):
                found.add(name)
    return found


def test_every_public_function_of_tensors_is_here() -> None:
    assert public() == set(CALLS) | HOLDERS | ELSEWHERE


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CALLS)
def test_arguments_stay(name: str, form: str) -> None:
    watch = Watch(form)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        CALLS[name](watch)
    assert watch.held
    assert watch.changed() == []


def test_a_write_is_seen() -> None:
    """In every form, also one that writes back what was there."""
    for form in FORMS:
        for write in (lambda x: x.detach().mul_(1.0), lambda x: x.detach()[..., 0].add_(1.0)):
            watch = Watch(form)
            write(watch.tokens()[0] if form == "expanded" else watch.tokens())
            assert watch.changed() == [0]
