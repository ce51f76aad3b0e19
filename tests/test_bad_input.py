"""What is refused, and in which words: what was got, what is expected, what to do."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_flow import (
    Adaptive,
    Attention,
    Cloud,
    Drift,
    Ellipsoid,
    EllipsoidSupport,
    Euclidean,
    Gaussian,
    Layers,
    Mixture,
    Sphere,
    UniformSphere,
    VonMisesFisher,
    consensus,
    density_flow,
    euler,
    flow,
    linearise,
    lyapunov,
    push_forward,
)

F64 = torch.float64
X = Sphere().uniform(5, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
A = Attention.identity(3, 2.0, dtype=F64)
EYE = torch.eye(3, dtype=F64)


def spoiled(value: float) -> Tensor:
    x = X.clone()
    x[2, 1] = value
    return x


def zero_row() -> Tensor:
    x = X.clone()
    x[3] = 0
    return x


ones = torch.ones(5, dtype=torch.bool)

TOKENS: dict[str, tuple[Callable[[], object], str]] = {
    "NaN": (lambda: A.drift(spoiled(math.nan)), r"x has 1 NaN or infinite entries of 15, expected finite numbers"),
    "inf": (lambda: A.drift(spoiled(math.inf)), r"x has 1 NaN or infinite entries of 15, expected finite numbers"),
    "NaN in a flow": (lambda: flow(A, spoiled(math.nan), 1.0), r"x0 has 1 NaN or infinite entries of 15"),
    "NaN in a context": (lambda: A.drift(X, Cloud(spoiled(math.nan))), r"x has 1 NaN or infinite entries of 15"),
    "zero row": (
        lambda: flow(A, zero_row(), 1.0),
        r"x0 has a row that Sphere cannot place \(a zero row has no direction\); remove it, hide it with mask, or use "
        r"geometry=Euclidean\(\)",
    ),
    "no tensor": (lambda: A.drift([[1.0, 0, 0]]), r"x is a list, expected a torch.Tensor of shape \(..., n, d\)"),  # type: ignore[arg-type]
    "whole numbers": (
        lambda: A.drift(torch.ones(5, 3).long()),
        r"x has dtype torch.int64, expected a floating dtype; use x.float\(\)",
    ),
    "other precision": (
        lambda: A.drift(X.float()),
        r"x has dtype torch.float32 and the weights torch.float64; use attention.to\(torch.float32\)",
    ),
    "other precision of a context": (lambda: A.drift(X, X.float()), r"context has dtype torch.float32 and the weights"),
    "one axis": (lambda: A.drift(X[0]), r"x has shape \(3,\), expected \(..., n, d\): n tokens of dimension d"),
    "other dimension": (
        lambda: A.drift(X[:, :2]),
        r"x has shape \(5, 2\), expected \(..., n, 3\) to match Q \(1, 3, 3\)",
    ),
    "other dimension in a flow": (lambda: flow(A, X[:, :2], 1.0), r"x has shape \(5, 2\), expected \(..., n, 3\)"),
    "empty": (lambda: A.drift(X[:0]), r"x has shape \(0, 3\): an empty cloud; expected at least one token"),
    "empty flow": (lambda: flow(A, X[:0], 1.0), r"x0 has shape \(0, 3\): an empty cloud"),
    "empty cloud": (lambda: Cloud(X[:0]), r"x has shape \(0, 3\): an empty cloud"),
    "other device": (lambda: A.drift(X.to("meta")), r"x is on meta and Q on cpu; move one with .to\(device\)"),
    "other device in a flow": (lambda: flow(A, X.to("meta"), 1.0), r"x is on meta and Q on cpu; move one with"),
    "one token without self": (
        lambda: Attention(EYE, self_attention=False).drift(X[:1]),
        r"self_attention=False leaves a cloud of one token nobody to attend to; expected two or more",
    ),
}
CLOUDS: dict[str, tuple[Callable[[], object], str]] = {
    "all hidden": (
        lambda: A.drift(X, mask=~ones),
        r"mask hides every token of a cloud; expected at least one token per cloud. Drop empty rows",
    ),
    "one of a batch hidden": (
        lambda: flow(A, X.expand(2, 5, 3), 1.0, mask=torch.stack([ones, ~ones])),
        r"mask hides every token of a cloud",
    ),
    "mask of numbers": (
        lambda: A.drift(X, mask=torch.ones(5)),
        r"mask has dtype torch.float32, expected torch.bool with True for tokens; use mask.bool\(\)",
    ),
    "mask of other length": (
        lambda: A.drift(X, mask=ones[:4]),
        r"mask has shape \(4,\), expected \(..., n\) = \(5,\) to match x",
    ),
    "mask elsewhere": (lambda: A.drift(X, mask=ones.to("meta")), r"mask is on meta and x on cpu; move one with"),
    "no mask": (lambda: A.drift(X, mask=[True] * 5), r"mask is a list, expected a torch.Tensor of shape \(..., n\)"),  # type: ignore[arg-type]
    "weights of other length": (
        lambda: Cloud(X, torch.ones(4)),
        r"weights have shape \(4,\), expected \(..., n\) = \(5,\) to match x",
    ),
    "negative weights": (
        lambda: Cloud(X, torch.tensor([1.0, 1, 1, -0.5, 1])),
        r"weights reach -0.5, expected nonnegative masses",
    ),
    "NaN weights": (lambda: Cloud(X, torch.full((5,), math.nan)), r"weights has 5 NaN or infinite entries of 5"),
    "no mass": (lambda: Cloud(X, torch.zeros(5)), r"weights of a cloud are all zero; expected some mass"),
    "no mass but behind the mask": (
        lambda: Cloud(X, torch.eye(5)[0], torch.arange(5) > 0),
        r"weights of a cloud are all zero; expected some mass in every cloud",
    ),
    "weights elsewhere": (lambda: Cloud(X, torch.ones(5, device="meta")), r"weights is on meta and x on cpu"),
}
ATTENTION: dict[str, tuple[Callable[[], object], str]] = {
    "beta negative": (
        lambda: Attention(EYE, beta=-1.0),
        r"beta = -1.0, expected 0 <= beta <= inf; for repulsion negate V",
    ),
    "beta NaN": (lambda: Attention(EYE, beta=math.nan), r"beta = nan, expected 0 <= beta <= inf"),
    "beta no number": (lambda: Attention(EYE, beta="3"), r"beta is a str, expected a number or a torch.Tensor"),  # type: ignore[arg-type]
    "beta tensor": (
        lambda: Attention(EYE, beta=torch.tensor([-2.0])),
        r"beta = \[-2.0\], expected 0 <= beta <= inf \(NaN and negative are not\)",
    ),
    "beta shape": (
        lambda: Attention(EYE, beta=torch.ones(4)),
        r"beta has shape \(4,\), expected \(\) or \(..., heads\) = \(..., 1\); for one beta per batch",
    ),
    "beta mixed": (
        lambda: Attention(EYE.expand(2, 3, 3), beta=torch.tensor([1.0, math.inf])),
        r"beta mixes finite and infinite entries; run beta = inf \(hardmax\) as a call of its own",
    ),
    "beta of a measure": (lambda: UniformSphere(3).tilted_mean(X, -1.0), r"beta = -1.0, expected 0 <= beta <= inf"),
    "batch of betas": (
        lambda: Attention.identity(3, torch.ones(4, 1), dtype=F64).drift(X.expand(2, 5, 3)),
        r"batch shapes do not broadcast: tokens \(2,\), beta \(4,\); for one beta per batch element pass",
    ),
    "batch of a flow": (
        lambda: flow(Attention(EYE.expand(4, 1, 3, 3)), X.expand(2, 5, 3), 1.0),
        r"batch shapes do not broadcast: tokens \(2,\), Q \(4,\)",
    ),
    "batch of a context": (
        lambda: A.drift(X.expand(2, 5, 3), Cloud(X.expand(3, 5, 3))),
        r"batch shapes do not broadcast: tokens \(2,\), tokens \(3,\)",
    ),
    "Q no tensor": (
        lambda: Attention([[1.0]]),
        r"Q is a list, expected a torch.Tensor of shape \(heads, k, d\) or \(k, d\)",
    ),  # type: ignore[arg-type]
    "Q of whole numbers": (lambda: Attention(torch.ones(3, 3).long()), r"Q has dtype torch.int64, expected a floating"),
    "Q of one axis": (lambda: Attention(torch.ones(3)), r"Q has shape \(3,\), expected \(heads, k, d\) or \(k, d\)"),
    "Q NaN": (lambda: Attention(EYE * math.nan), r"Q has 9 NaN or infinite entries of 9"),
    "V shape": (
        lambda: Attention(torch.ones(1, 2, 3), torch.ones(1, 2, 3), torch.ones(1, 3, 2)),
        r"V has shape \(1, 3, 2\), expected \(heads, d, d\) = \(1, 3, 3\) to match Q of shape \(1, 2, 3\)",
    ),
    "K shape": (
        lambda: Attention(torch.ones(1, 2, 3), torch.ones(1, 3, 3)),
        r"K has shape \(1, 3, 3\), expected \(heads, k, d\) = \(1, 2, 3\) to match Q",
    ),
    "O shape": (
        lambda: Attention(EYE.float(), V=torch.ones(1, 2, 3), O=torch.ones(1, 3, 3)),
        r"O has shape \(1, 3, 3\), expected \(heads, d, v\) = \(1, 3, 2\) to match Q",
    ),
    "no K": (
        lambda: Attention(torch.ones(2, 3)),
        r"K is None \(the identity\) but Q has shape \(1, 2, 3\); expected k = d = 3",
    ),
    "query bias shape": (
        lambda: Attention(EYE, query_bias=torch.ones(2, dtype=F64)),
        r"query_bias has shape \(1, 2\), expected \(heads, k\) = \(1, 3\) to match Q",
    ),
    "value bias shape": (
        lambda: Attention(EYE, value_bias=torch.ones(2, dtype=F64)),
        r"value_bias has shape \(2,\), expected \(d,\) = \(3,\) to match Q",
    ),
    "mixed dtypes": (
        lambda: Attention(EYE, V=EYE.float()),
        r"V has dtype torch.float32 and Q torch.float64; use one dtype for all weights",
    ),
    "mixed devices": (
        lambda: Attention(EYE, V=EYE.to("meta")),
        r"V is on meta and Q on cpu; move one with .to\(device\)",
    ),
    "G shape": (
        lambda: Attention.from_matrices(torch.ones(2, 3), EYE),
        r"G has shape \(2, 3\), expected \(d, d\) or \(heads, d, d\)",
    ),
    "kind": (
        lambda: Attention(EYE, kind="cosine"),  # type: ignore[arg-type]
        r"kind = 'cosine', expected one of 'softmax', 'unnormalised', 'hardmax', 'sinkhorn'",
    ),
    "law": (
        lambda: Attention.random(3, law="uniform"),  # type: ignore[arg-type]
        r"law = 'uniform', expected one of 'gaussian', 'symmetric', 'orthogonal', 'goe'",
    ),
    "no heads": (lambda: Attention.random(3, 0), r"heads = 0, d = 3: expected at least one of each"),
    "cold and unnormalised": (
        lambda: Attention(EYE, kind="unnormalised", beta=math.inf),
        r"beta = inf with kind = 'unnormalised'; only softmax has a zero-temperature limit \(hardmax\)",
    ),
    "causal Sinkhorn": (
        lambda: Attention(EYE, kind="sinkhorn", causal=True),
        r"kind = 'sinkhorn' needs every pair; expected causal=False and self_attention=True",
    ),
    "context and weights": (
        lambda: A.drift(X, UniformSphere(3), weights=torch.ones(5)),
        r"weights and mask describe the cloud x; with context= put them into Cloud\(y, weights, mask\)",
    ),
    "context and causal": (
        lambda: Attention(EYE, causal=True).drift(X, UniformSphere(3)),
        r"causal and self_attention=False compare tokens of one cloud; with context= use neither",
    ),
    "context and Sinkhorn": (
        lambda: Attention(EYE, kind="sinkhorn").drift(X, UniformSphere(3)),
        r"kind = 'sinkhorn' balances a cloud with itself; it has no drift against a context",
    ),
}
FLOWS: dict[str, tuple[Callable[[], object], str]] = {
    "no step": (lambda: flow(A, X, 1.0, h=0.0), r"h = 0.0, expected a positive number"),
    "negative step": (lambda: flow(A, X, 1.0, h=-0.1), r"h = -0.1, expected a positive number"),
    "NaN step": (lambda: flow(A, X, 1.0, h=math.nan), r"h = nan, expected a positive number"),
    "no time": (lambda: flow(A, X, 0.0), r"t = 0.0, expected a positive, finite time"),
    "negative time": (lambda: flow(A, X, -1.0), r"t = -1.0, expected a positive, finite time"),
    "endless": (lambda: flow(A, X, math.inf), r"t = inf, expected a positive, finite time"),
    "backwards": (lambda: push_forward(A, X, -1.0), r"t = -1.0, expected a finite time of at least 0"),
    "unsorted": (lambda: flow(A, X, [0, 2.0, 1.0]), r"t must increase strictly, got \[0.0, 2.0, 1.0\]...; sort it"),
    "repeated": (lambda: flow(A, X, [0, 1.0, 1.0]), r"t must increase strictly"),
    "NaN time": (lambda: flow(A, X, [0, math.nan]), r"t has NaN or infinite times, expected finite ones"),
    "no times": (lambda: flow(A, X, []), r"t has shape \(0,\), expected \(T,\) with at least one time"),
    "table of times": (lambda: flow(A, X, torch.ones(2, 2)), r"t has shape \(2, 2\), expected \(T,\)"),
    "consensus": (lambda: consensus(-1.0), r"tol = -1.0, expected a positive number"),
    "not a step": (
        lambda: flow(A, X, 1.0, step=4),  # type: ignore[arg-type]
        r"step = 4, expected a name, a step function \(euler, rk4, your own\) or Adaptive\(\)",
    ),
}
GEOMETRY: dict[str, tuple[Callable[[], object], str]] = {
    "radius": (lambda: Sphere(0.0), r"radius = 0.0, expected a positive number"),
    "no tokens": (
        lambda: Euclidean().uniform(0, 3),
        r"n = 0, d = 3: expected at least one token of dimension at least",
    ),
    "axes shape": (
        lambda: Ellipsoid(torch.zeros(3), torch.ones(2, 3)),
        r"axes have shape \(2, 3\) and centre \(3,\), expected axes \(d,\) or \(d, k\) with k <= d, and centre \(d,\)",
    ),
    "flat axis": (
        lambda: Ellipsoid(torch.zeros(3), torch.tensor([1.0, 0.0, 1.0])),
        r"axes are linearly dependent \(a semi-axis is zero\); drop the flat directions",
    ),
    "NaN axis": (lambda: Ellipsoid(torch.zeros(3), torch.full((3,), math.nan)), r"axes has 3 NaN or infinite entries"),
    "ellipsoid dimension": (
        lambda: Ellipsoid(torch.zeros(3), torch.ones(3)).uniform(5, 4),
        r"d = 4, expected 3, the dimension of this ellipsoid",
    ),
}
MEASURES: dict[str, tuple[Callable[[], object], str]] = {
    "dimension": (lambda: UniformSphere(0), r"d = 0, expected a dimension of at least 1"),
    "cov shape": (
        lambda: Gaussian(torch.zeros(3), torch.eye(2)),
        r"cov has shape \(2, 2\), expected \(..., d, d\) to match a mean of shape \(3,\)",
    ),
    "NaN cov": (
        lambda: EllipsoidSupport(torch.zeros(1), torch.full((1, 1), math.nan), 1.0),
        r"cov has 1 NaN or infinite",
    ),
    "rho": (lambda: EllipsoidSupport(torch.zeros(1), torch.ones(1, 1), 0.0), r"rho = 0.0, expected a positive number"),
    "cap": (lambda: Gaussian(torch.zeros(1), torch.ones(1, 1), 0.0), r"cap = 0.0, expected a positive number"),
    "bulk": (
        lambda: Gaussian.bulk(torch.zeros(1), torch.ones(1, 1), 1),
        r"n = 1, expected at least 2 tokens in the bulk",
    ),
    "mixture count": (
        lambda: Mixture([UniformSphere(3)], torch.ones(2)),
        r"weights have shape \(2,\) for 1 components, expected one weight per component and at least one component",
    ),
    "mixture mass": (
        lambda: Mixture([UniformSphere(3)], torch.zeros(1)),
        r"weights of a mixture are all zero; expected some mass in every mixture",
    ),
}
PLANE = Attention.identity(2, 3.0, dtype=F64)
EAST = torch.tensor([1.0, 0.0])
LAW = VonMisesFisher(EAST, 2.0)


def solved(density: object = LAW, t: object = (0.0, 0.1), attention: object = PLANE, **options: object) -> object:
    return density_flow(attention, density, t, **options)  # type: ignore[arg-type]


DENSITIES: dict[str, tuple[Callable[[], object], str]] = {
    "kappa a word": (lambda: VonMisesFisher(EAST, "2"), r"kappa is a str, expected a number"),  # type: ignore[arg-type]
    "kappa a tensor": (lambda: VonMisesFisher(EAST, torch.ones(3)), r"kappa is a Tensor, expected a number"),  # type: ignore[arg-type]
    "kappa negative": (lambda: VonMisesFisher(EAST, -1.0), r"kappa = -1.0, expected a finite concentration"),
    "mean no unit vector": (lambda: VonMisesFisher(2 * EAST, 1.0), r"expected unit vectors; use mean/\|mean\|"),
    "width of a query": (lambda: LAW.tilted_mean(torch.ones(1, 3), 1.0), r"shape \(1, 3\)"),
    "width of a point": (lambda: LAW.density(torch.ones(4, 1)), r"y has shape \(4, 1\), expected \(..., 2\)"),
    "no unit point": (lambda: LAW.density(torch.ones(4, 2)), r"y has rows that are no unit vectors"),
    "half a sample": (lambda: LAW.sample(2.5), r"n = 2.5, expected at least one token, a whole number"),  # type: ignore[arg-type]
    "a sample of an atom": (lambda: VonMisesFisher(EAST, 1e300).sample(3), r"kappa = 1e\+300, expected at most 1e\+09"),
    "no attention": (lambda: solved(attention=None), r"density_flow has no theory for None"),
    "no density": (lambda: solved([1.0]), r"density is a list, expected a VonMisesFisher or a function"),
    "density of nothing": (lambda: solved(lambda x: None), r"density returned a NoneType, expected a tensor"),
    "density of another sphere": (
        lambda: solved(VonMisesFisher(torch.eye(3)[0], 1.0)),
        r"density has a mean of shape \(3,\), expected \(2,\)",
    ),
    "batch of attentions": (
        lambda: solved(attention=Attention(torch.eye(2, dtype=F64).expand(3, 1, 2, 2))),
        r"attention has a batch \(3,\); expected one",
    ),
    **{
        f"{name} = {value}": (
            lambda name=name, value=value: solved(**{name: value}),
            r"expected tol and tail between 0 and 1",
        )
        for name in ("tol", "tail")
        for value in (math.nan, -1.0, math.inf)
    },
    "half a degree": (lambda: solved(bandwidth=8.5), r"bandwidth = 8.5, expected at least 4 degrees"),
    "diffusion NaN": (lambda: solved(diffusion=math.nan), r"diffusion = nan, expected a finite D >= 0"),
    "time a word": (lambda: solved(t="x"), r"t is a str, expected a time or times"),
    "growth of degree -1": (lambda: solved().growth_rates(-1), r"k = -1, expected a degree from 0 to 64"),  # type: ignore[attr-defined]
    "growth beyond": (lambda: solved().growth_rates(100), r"k = 100, expected a degree from 0 to 64"),  # type: ignore[attr-defined]
    "density off the sphere": (lambda: solved().density(torch.ones(3, 2)), r"x has rows that are no unit vectors"),  # type: ignore[attr-defined]
}
FIELDS: dict[str, tuple[Callable[[], object], str]] = {
    "no function": (lambda: Drift(None), r"f is a NoneType, expected a function of \(t, x\)"),
    "a list": (lambda: flow(Drift(lambda t, x: [1.0]), X, 1.0), r"returned is a list, expected a torch.Tensor"),
    "a shape": (lambda: flow(Drift(lambda t, x: x[:2]), X, 1.0), r"returned torch.float64 \(2, 3\) at t = 0"),
    "NaN times": (lambda: Layers([A], [0.0, math.nan]), "expected finite times that increase strictly"),
    "beyond its layers": (lambda: flow(Layers([A], [0.0, 1.0]), X, 2.0), "expected times between its own"),
    "a field that is none": (lambda: Layers([A, 1.0], [0.0, 1.0, 2.0]), "field 1 is a float, expected Attention"),
    "a width": (lambda: linearise(A, X[:, :2]), r"x has shape \(5, 2\), expected \(..., n, 3\)"),
    "a moment": (lambda: linearise(A, X, t=math.nan), "t = nan, expected a finite time"),
    "no exponents": (lambda: lyapunov(A, X, 1.0, k=0), "k = 0, expected a whole number, 1 to 10"),
    "half an exponent": (lambda: lyapunov(A, X, 1.0, k=1.5), "k = 1.5, expected a whole number"),
    "no time": (lambda: lyapunov(A, X, math.nan), "t = nan, expected a positive, finite time"),
    "no step": (lambda: lyapunov(A, X, 1.0, h=0.0), "h = 0.0, expected a positive"),
    "all transient": (lambda: lyapunov(A, X, 1.0, transient=1.0), "transient = 1.0, expected 0 <= transient < t"),
}
CASES = {
    f"{group}: {name}": case
    for group, cases in (
        ("tokens", TOKENS),
        ("cloud", CLOUDS),
        ("attention", ATTENTION),
        ("flow", FLOWS),
        ("geometry", GEOMETRY),
        ("measure", MEASURES),
        ("density", DENSITIES),
        ("field", FIELDS),
    )
    for name, case in cases.items()
}


def test_there_are_a_hundred_wrong_calls() -> None:
    """With those of the command line, tests/attack, three hundred."""
    assert len(CASES) >= 100


@pytest.mark.parametrize("case", CASES)
def test_refused_in_these_words(case: str) -> None:
    call, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        call()


# --- flows that leave the range -------------------------------------------------------------------------------------


def test_leaving_the_range_names_the_time_and_the_remedy() -> None:
    growing = Attention.from_matrices(EYE, 100 * EYE, 1.0)
    with pytest.raises(
        FloatingPointError, match=r"tokens left the range of torch.float64 at t = \d.*Use a smaller h \(unnormalised"
    ):
        flow(growing, X, 1000.0, geometry=Euclidean(), step=euler, h=1.0)


def test_overflowing_scores_are_found_at_the_first_step() -> None:
    hot = Attention.identity(3, 1e4, dtype=F64, kind="unnormalised")
    with pytest.raises(FloatingPointError, match=r"tokens left the range of torch.float64 at t = 0.01"):
        flow(hot, X, 1.0)
    with pytest.raises(FloatingPointError, match=r"the step shrank to .* at t = 0. Try a larger tol"):
        flow(hot, X, 1.0, step=Adaptive())


def test_a_token_without_direction_under_a_placement() -> None:
    """Two opposite tokens at beta = 0: the drift is exactly zero, and a unit vector along it does not exist."""
    from attn_flow.dynamics import placement

    x = torch.tensor([[1.0, 0, 0], [-1.0, 0, 0]], dtype=F64)
    with pytest.raises(FloatingPointError, match=r"left the range of torch.float64 at t = 0.01"):
        flow(Attention.identity(3, 0.0, dtype=F64), x, 1.0, placement=placement.ngpt())


def test_messages_look_at_values_only_where_they_may() -> None:
    """Under vmap and on the meta device the same calls do not read values, so they raise nothing."""
    assert torch.func.vmap(lambda x: A.drift(x))(X.expand(2, 5, 3)).shape == (2, 5, 3)
    meta = Attention.identity(3, 2.0, device="meta")
    assert meta.drift(torch.empty(5, 3, device="meta")).shape == (5, 3)
    assert flow(meta, torch.empty(5, 3, device="meta"), [0, 0.1]).x.is_meta
