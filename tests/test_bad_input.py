"""What is refused, and in which words: what was got, what is expected, what to do."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
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
    Trajectory,
    UniformSphere,
    VonMisesFisher,
    consensus,
    density_flow,
    euler,
    flow,
    limit,
    linearise,
    lyapunov,
    phases,
    push_forward,
    zero_temperature_flow,
)
from attn_flow.dynamics import kicks, placement
from attn_flow.hooks import flows, load, load_encoder, record, register, replace_attention
from attn_flow.hooks.demo import tiny_bert
from attn_flow.measures import LogitLaw
from attn_flow.measures.quadrature import circle, fibonacci
from attn_flow.nn import ContinuousAttentionLayer, DeepStack
from attn_flow.observe.quantities import close_pairs, clusters, energy, pairwise_cosines
from attn_flow.observe.tracking import track
from attn_flow.prediction import fit_bound, phases_over_seeds, propagation_of_chaos, settle
from attn_flow.probe import probe

F64 = torch.float64
X = Sphere().uniform(5, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
A = Attention.identity(3, 2.0, dtype=F64)
EYE = torch.eye(3, dtype=F64)
LAWS = (
    Cloud(X),
    UniformSphere(3),
    Gaussian(EYE[0], EYE),
    EllipsoidSupport(EYE[0], EYE, 1.0),
    VonMisesFisher(EYE[0], 2.0),
    LogitLaw(EYE[0], EYE, EYE[0]),
    Mixture([UniformSphere(3)], EYE[0, :1]),
)


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
    "no heads": (lambda: Attention.random(3, 0), r"heads = 0, expected a whole number of at least 1"),
    "cold and unnormalised": (
        lambda: Attention(EYE, kind="unnormalised", beta=math.inf),
        r"beta = inf with kind = 'unnormalised'; only softmax has a zero-temperature limit \(hardmax\)",
    ),
    "causal Sinkhorn": (
        lambda: Attention(EYE, kind="sinkhorn", causal=True),
        r"kind = 'sinkhorn' needs every pair; expected causal=False and self_attention=True",
    ),
    "beta complex": (
        lambda: Attention(EYE, beta=torch.tensor(1j)),
        r"beta is torch.complex64 of shape \(\), expected real",
    ),
    "no betas": (lambda: Attention(EYE, beta=torch.ones(0)), r"beta is torch.float32 of shape \(0,\), expected real"),
    "causal a word": (lambda: Attention(EYE, causal="no"), r"causal = no, expected True or False"),  # type: ignore[arg-type]
    "half a dimension": (lambda: Attention.identity(1.5), r"d = 1.5, expected a whole number of at least 1"),  # type: ignore[arg-type]
    "no dimension": (lambda: Attention.identity(0), r"d = 0, expected a whole number of at least 1"),
    "head of width -1": (
        lambda: Attention.random(3, head_dim=-1),
        r"head_dim = -1, expected a whole number of at least 1",
    ),
    "context a number": (
        lambda: A.drift(X, 3.0),
        r"context is a float, expected a measure, such as Cloud\(y\), or tokens",
    ),  # type: ignore[arg-type]
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
    "a word for a step": (lambda: flow(A, X, 1.0, h="x"), r"h is a str, expected a positive number"),  # type: ignore[arg-type]
    "endless steps": (
        lambda: flow(A, X, 1e300),
        r"t = 1e\+300 in steps of h = 0.05 are more than 1e\+09 steps; use a larger h",
    ),
    "a word for a time": (lambda: flow(A, X, "x"), r"t is a str, expected a time or times"),  # type: ignore[arg-type]
    "complex times": (lambda: flow(A, X, torch.tensor([0, 1j])), r"t has dtype torch.complex64, expected real times"),
    "geometry a number": (
        lambda: flow(A, X, 1.0, geometry=2.0),
        r"geometry is a float, expected Sphere\(\), Euclidean\(\)",
    ),  # type: ignore[arg-type]
    "path of a list": (lambda: Trajectory([0.0], X[None]), r"t is a list, expected a torch.Tensor of shape \(T,\)"),  # type: ignore[arg-type]
    "path of NaN times": (
        lambda: Trajectory(torch.tensor([math.nan]), X[None]),
        r"t has 1 NaN or infinite entries of 1",
    ),
    "path of whole numbers": (
        lambda: Trajectory(torch.zeros(1), X[None].long()),
        r"x has dtype torch.int64, expected a floating",
    ),
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
# Arguments of another kind altogether: mypy would say so, and not everyone asks it.
KINDS: dict[str, tuple[Callable[[], object], str]] = {
    "a word for a placement": (
        lambda: flow(A, X, 1.0, placement="pre"),  # type: ignore[arg-type]
        r"placement is a str, expected one of attn_flow.dynamics.placement",
    ),
    "no placement": (lambda: flow(A, X, 1.0, placement=None), r"placement is a NoneType, expected one of"),  # type: ignore[arg-type]
    "a number for noise": (
        lambda: flow(A, X, 1.0, noise=0.1),  # type: ignore[arg-type]
        r"noise is a float, expected a function \(x, generator\) -> kicks, such as kicks.independent\(sigma\)",
    ),
    "a number for a stop": (
        lambda: flow(A, X, 1.0, stop=1e-3),  # type: ignore[arg-type]
        r"stop is a float, expected a function \(t, cloud\) -> bool, such as consensus\(tol\)",
    ),
    "a seed for a generator": (lambda: flow(A, X, 1.0, generator=0), r"generator is a int, expected a torch.Generator"),  # type: ignore[arg-type]
    "a seed for tokens": (lambda: Sphere().uniform(3, 3, generator=0), r"generator is a int, expected a torch"),  # type: ignore[arg-type]
    "a number for a world": (lambda: flow(A, X, 1.0, world=2), r"world is a int, expected processes\(\)"),  # type: ignore[arg-type]
    "a geometry's class": (
        lambda: flow(A, X, 1.0, geometry=Sphere),  # type: ignore[arg-type]
        r"geometry is a type, expected Sphere\(\), Euclidean\(\) or an Ellipsoid",
    ),
    "a table for times": (lambda: flow(A, X, {0: 1}), r"t is a dict, expected a time or times"),  # type: ignore[arg-type]
    "a word for a push's time": (
        lambda: push_forward(A, X, "1"),  # type: ignore[arg-type]
        r"t is a str, expected a finite time of at least 0",
    ),
    "a word for a limit's time": (
        lambda: limit(A).push_forward(X, "1"),  # type: ignore[arg-type]
        r"t is a str, expected a finite time of at least 0; push_forward\(x\) without one is the limit itself",
    ),
    "a word for a dtype": (
        lambda: Sphere().uniform(3, 3, dtype="float64"),
        r"dtype = float64, expected a real floating",
    ),  # type: ignore[arg-type]
    "complex tokens": (lambda: Sphere().uniform(3, 3, dtype=torch.complex128), r"dtype = torch.complex128, expected a"),
    "whole tokens": (lambda: Euclidean().uniform(3, 3, dtype=torch.int64), r"dtype = torch.int64, expected a real"),
    "whole weights": (lambda: Attention.random(3, dtype=torch.int64), r"dtype = torch.int64, expected a real floating"),
    "a number for a dtype": (lambda: Attention.identity(3, dtype=64), r"dtype = 64, expected a real floating dtype"),  # type: ignore[arg-type]
    "whole nodes": (lambda: circle(8, dtype=torch.int64), r"dtype = torch.int64, expected a real floating dtype"),
    "complex nodes": (lambda: fibonacci(8, dtype=torch.complex64), r"dtype = torch.complex64, expected a real"),
    "an unknown device": (
        lambda: Attention.random(3, device="nowhere"),
        r"device = nowhere, which torch does not have here; use 'cpu'",
    ),
    "a number for a device": (lambda: Sphere().uniform(3, 3, device=3.5), r"device = 3.5, which torch does not have"),  # type: ignore[arg-type]
    "a kick of a word": (lambda: kicks.independent("a"), r"sigma is a str, expected a finite number of at least 0"),  # type: ignore[arg-type]
    "a negative kick": (lambda: kicks.common(-1.0), r"sigma = -1.0, expected a finite number of at least 0"),
    "a kick of NaN": (lambda: kicks.linear(math.nan), r"sigma = nan, expected a finite number of at least 0"),
    "a field without a kernel": (lambda: kicks.field(1.0), r"kernel is a float, expected a function of <x,y>"),  # type: ignore[arg-type]
    "a mixture of a number": (lambda: Mixture(3, EYE[0]), r"components is a int, expected a list of measures"),  # type: ignore[arg-type]
    "no steps": (lambda: Adaptive(max_steps=-1), r"max_steps = -1, expected a whole number of at least 1"),
    "a layer of whole numbers": (
        lambda: ContinuousAttentionLayer(8, 2, dtype=torch.int64),
        r"dtype = torch.int64, expec",
    ),
    "a layer nowhere": (
        lambda: ContinuousAttentionLayer(8, 2, device="nowhere"),
        r"device = nowhere, which torch does",
    ),
    "a word for a horizon": (
        lambda: ContinuousAttentionLayer(8, 2, horizon="long"),  # type: ignore[arg-type]
        r"horizon = long, expected a positive, finite number",
    ),
    "a stack of whole numbers": (lambda: DeepStack(5, 3, dtype=torch.int64), r"dtype = torch.int64, expected a real"),
    "a number for a folder": (lambda: load_encoder(3), r"path is a int, expected a folder, or a name"),  # type: ignore[arg-type]
    **{
        f"{type(law).__name__} to {word}": (
            lambda law=law, to=to: law.to(to),
            rf"to\({word}.*\), expected a real floating dtype such as torch.float64, a device that torch has here",
        )
        for law in (A, *LAWS)
        for word, to in (
            ("torch.int64", torch.int64),
            ("real", "real"),
            ("torch.complex64", torch.complex64),
        )
    },
    "points a number": (
        lambda: record(*tiny_bert(), ["a b c"], points=3),  # type: ignore[arg-type]
        r"points is a int, expected a name such as 'resid', or several",
    ),
    "nulls a number": (
        lambda: probe(*tiny_bert(), ["a b c"], nulls=3),  # type: ignore[arg-type]
        r"nulls is a int, expected some of mean_output, .*, as a list",
    ),
    "nulls a word": (lambda: probe(*tiny_bert(), ["a b c"], nulls="uniform"), r"nulls is a str, expected some of"),
    "no architecture": (lambda: register("BERT"), r"architecture is a str, expected an Architecture"),  # type: ignore[arg-type]
    "a word for a width": (lambda: ContinuousAttentionLayer("8"), r"dim = 8, expected a whole number of at least 1"),  # type: ignore[arg-type]
    "a word for noise": (
        lambda: DeepStack(5, 3, noise="loud"),
        r"noise is a str, expected a finite number of at least",
    ),  # type: ignore[arg-type]
    "a step of length NaN": (lambda: placement.ngpt(math.nan), r"alpha = nan, expected a positive number"),
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
    "half a token": (lambda: Sphere().uniform(1.5, 3), r"n = 1.5, d = 3: expected at least one token"),  # type: ignore[arg-type]
    "radius a word": (lambda: Sphere("x"), r"radius is a str, expected a positive number"),  # type: ignore[arg-type]
    "ellipsoid dimension": (
        lambda: Ellipsoid(torch.zeros(3), torch.ones(3)).uniform(5, 4),
        r"d = 4, expected 3, the dimension of this ellipsoid",
    ),
}
MEASURES: dict[str, tuple[Callable[[], object], str]] = {
    "dimension": (lambda: UniformSphere(0), r"d = 0, expected a whole number of at least 1"),
    "dimension NaN": (lambda: UniformSphere(math.nan), r"d = nan, expected a whole number of at least 1"),  # type: ignore[arg-type]
    "fit of tokens": (lambda: Gaussian.fit(X), r"cloud is a Tensor, expected a Cloud; use Cloud\(x\)"),  # type: ignore[arg-type]
    "mixture of words": (lambda: Mixture("x", torch.ones(1)), r"components hold a str, expected measures"),  # type: ignore[arg-type]
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
    "steps NaN": (lambda: solved(max_steps=math.nan), r"max_steps = nan, expected .* at least one step"),
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
    "no exponents": (lambda: lyapunov(A, X, 1.0, k=0), "k = 0, expected a whole number of at least 1"),
    "half an exponent": (lambda: lyapunov(A, X, 1.0, k=1.5), "k = 1.5, expected a whole number"),
    "no time": (lambda: lyapunov(A, X, math.nan), "t = nan, expected a positive, finite time"),
    "no step": (lambda: lyapunov(A, X, 1.0, h=0.0), "h = 0.0, expected a positive"),
    "all transient": (lambda: lyapunov(A, X, 1.0, transient=1.0), "transient = 1.0, expected 0 <= transient < t"),
}
OBSERVED: dict[str, tuple[Callable[[], object], str]] = {
    "energy of G complex": (lambda: energy(X, 2.0, EYE * 1j), r"G has dtype torch.complex128, expected real numbers"),
    "energy of G NaN": (lambda: energy(X, 2.0, EYE * math.nan), r"G has 9 NaN or infinite entries of 9"),
    "energy of a narrow G": (lambda: energy(X, 2.0, EYE[:2, :2]), r"G has shape \(2, 2\), expected \(d, d\) or"),
    "energy at a word": (lambda: energy(X, "2"), r"beta = '2', expected 0 < beta < inf"),  # type: ignore[arg-type]
    "cosine NaN": (lambda: close_pairs(X, math.nan), r"cosine = nan, expected a number from -1 to 1"),
    "cosine 2": (lambda: close_pairs(X, 2.0), r"cosine = 2.0, expected a number from -1 to 1"),
    "half a bin": (lambda: pairwise_cosines(X, 1.5), r"bins = 1.5, expected a whole number of at least 1"),  # type: ignore[arg-type]
    "cosines of a list": (lambda: pairwise_cosines([[1.0]]), r"x is a list, expected a torch.Tensor"),  # type: ignore[arg-type]
    "velocity of others": (
        lambda: clusters(X, velocity=X[:2]),
        r"velocity has shape \(2, 3\), expected that of x, \(5, 3\)",
    ),
    "a track of nothing": (lambda: track(None, 0.5), r"path is a NoneType, expected a Trajectory"),  # type: ignore[arg-type]
}
PATH = flow(A, X, [0.0, 0.5, 1.0])
TARGET = limit(Attention.from_matrices(torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=F64)), EYE, 2.0))


def chaos(**changed: object) -> object:
    sample = lambda n, generator: Sphere().uniform(n, 3, generator=generator, dtype=F64)
    given: dict[str, object] = {"attention": A, "sample": sample, "reference": Cloud(X), "t": 0.1, "n": [4, 8]}
    return propagation_of_chaos(**(given | changed))  # type: ignore[arg-type]


PREDICTIONS: dict[str, tuple[Callable[[], object], str]] = {
    "settle on a number": (lambda: settle(A, X, 3), r"support is a int, expected None \(the full sphere\), a measure"),  # type: ignore[arg-type]
    "cold flow of a list": (lambda: zero_temperature_flow(A, [1.0], 1.0), r"x0 is a list, expected a torch.Tensor"),  # type: ignore[arg-type]
    "cold flow without a step": (lambda: zero_temperature_flow(A, X, 1.0, h=math.nan), r"h = nan, expected a positive"),
    "phases of a path backwards": (lambda: phases(PATH[[2, 1, 0]], TARGET), r"t must increase strictly, got"),  # type: ignore[index]
    "phases of nothing": (lambda: phases(None, TARGET), r"path is a NoneType, expected a Trajectory, as flow gives it"),  # type: ignore[arg-type]
    "one seed": (
        lambda: phases_over_seeds(PATH, TARGET),
        r"path.x has shape \(3, 5, 3\), expected \(T, seeds, n, d\) with two",
    ),
    "seeds of no path": (lambda: phases_over_seeds(X, TARGET), r"path is a Tensor, expected a Trajectory"),  # type: ignore[arg-type]
    "a bound of one beta": (
        lambda: fit_bound([PATH], TARGET),
        r"paths of beta \[2.0\]; expected two or more finite inverse",
    ),
    "a bound of tensors": (lambda: fit_bound([X], TARGET), r"path is a Tensor, expected a Trajectory"),  # type: ignore[list-item]
    "one size": (lambda: chaos(n=[4]), r"n = \[4\], seeds = 10: expected two or more sizes"),
    "one draw": (lambda: chaos(seeds=1), r"seeds = 1, expected a whole number of at least 2"),
    "half a seed": (lambda: chaos(seed=1.5), r"seed = 1.5, expected a whole number of at least 0"),
    "a reference that is none": (lambda: chaos(reference=X), r"reference is a Tensor, expected a Cloud"),
    "a sample of nothing": (lambda: chaos(sample=lambda n, generator: None), r"sample\(n, generator\) is a NoneType"),
    "a sample that ignores n": (
        lambda: chaos(sample=lambda n, generator: X),
        r"sample\(4, generator\) gave 5 tokens, expected 4",
    ),
    "chaos backwards": (lambda: chaos(t=-1.0), r"t = -1.0, expected a finite time of at least 0"),
    "tokens of nothing": (lambda: lyapunov(A, None, 1.0), r"x0 is a NoneType, expected a torch.Tensor"),  # type: ignore[arg-type]
}


def model() -> object:
    return tiny_bert()[0]


def saved(folder: Path, **entries: object) -> Path:
    """A folder of a model with a flow, whose config was edited."""
    replace_attention(model(), layers=[1], steps=2).save_pretrained(folder)  # type: ignore[arg-type, operator]
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return folder


def replaced(**options: object) -> Callable[[], object]:
    return lambda: replace_attention(model(), **options)  # type: ignore[arg-type]


ENCODERS: dict[str, tuple[Callable[[], object], str]] = {
    "no model": (lambda: replace_attention(None), r"model is a NoneType, expected a torch.nn.Module"),  # type: ignore[arg-type]
    "no encoder": (lambda: flows(torch.nn.Linear(2, 2)), r"Linear has no list of blocks; expected an encoder"),
    "flows of nothing": (lambda: flows(None), r"model is a NoneType, expected a torch.nn.Module"),  # type: ignore[arg-type]
    "layer 5": (replaced(layers=[5]), r"layer 5: the model has 2 layers, expected 0 to 1"),
    "layer of a word": (replaced(layers="x"), r"layer 'x': the model has 2 layers"),
    "no layers": (replaced(layers=[]), r"layers is empty, expected at least one; leave it out for all of them"),
    "no steps": (replaced(steps=0), r"steps = 0, expected a whole number of at least 1"),
    "NaN steps": (replaced(steps=math.nan), r"steps = nan, expected a whole number of at least 1"),
    "no horizon": (replaced(horizon=0.0), r"horizon = 0.0, expected a positive number"),
    "horizon inf": (replaced(horizon=math.inf), r"horizon = inf, expected a positive, finite time"),
    "horizon a word": (replaced(horizon="x"), r"horizon is a str, expected a positive number"),
    "step of a layer": (replaced(step="rk9"), r"step = 'rk9', expected one of 'euler', 'rk4', 'dopri5'"),
    "two betas": (
        replaced(beta=1.0, beta_factor=1.0),
        r"beta = 1.0 and beta_factor = 1.0: expected one of them at most",
    ),
    "a word for beta": (replaced(beta="x"), r"beta is a str, expected numbers"),
    "negative factor": (replaced(beta_factor=-1.0), r"beta_factor = -1.0, expected finite numbers from 0"),
    "factors of 3 heads": (replaced(beta_factor=torch.ones(3)), r"shape \(3,\), expected \(\) or \(heads,\) = \(2,\)"),
    "trained from 0": (replaced(beta_factor=0.0, train_beta=True), r"expected finite numbers above 0"),
    "replaced twice": (
        lambda: replace_attention(replace_attention(model())),
        r"encoder.layer.0 is a flow already; set",
    ),  # type: ignore[arg-type]
}
STEP = {"layers": [1], "horizon": 1.0, "steps": 2, "step": "euler", "train_beta": False}
FOLDERS: dict[str, tuple[dict[str, object], str]] = {
    "no model of transformers": (
        {"architectures": ["pipeline"]},
        r"holds a pipeline, which is no model that transformers",
    ),
    "an Auto class, which would drop the flow": (
        {"architectures": ["AutoModel"]},
        r"holds a AutoModel, which is no model",
    ),
    "no class": ({"architectures": []}, r"holds a model of no name, which is no model"),
    "a number for a class": ({"architectures": [3]}, r"holds a 3, which is no model"),
    "another config": (
        {"architectures": ["GPT2Model"]},
        r"holds a GPT2Model with a BertConfig, which do not go together",
    ),
    "a word for an entry": (
        {"attn_flow": "x"},
        r"the entry 'attn_flow' of its config is not one that replace_attention",
    ),
    "one entry": ({"attn_flow": STEP}, r"the entry 'attn_flow' of its config is not one"),
    "an entry more": ({"attn_flow": [STEP | {"speed": 3}]}, r"the entry 'attn_flow' of its config is not one"),
    "an entry of steps": ({"attn_flow": [STEP | {"steps": -1}]}, r"steps = -1, expected a whole number of at least 1"),
    "an entry of layers": ({"attn_flow": [STEP | {"layers": [9]}]}, r"layer 9: the model has 2 layers"),
    "a layer that was not replaced": (
        {"attn_flow": [STEP | {"layers": [0]}]},
        r"lacks encoder.layer.0.*log_beta_factor",
    ),
    "code": (
        {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}},
        r"brings Python code of its own, which was not run",
    ),
}
CASES = {
    f"{group}: {name}": case
    for group, cases in (
        ("tokens", TOKENS),
        ("cloud", CLOUDS),
        ("attention", ATTENTION),
        ("flow", FLOWS),
        ("kind", KINDS),
        ("geometry", GEOMETRY),
        ("measure", MEASURES),
        ("density", DENSITIES),
        ("field", FIELDS),
        ("observed", OBSERVED),
        ("prediction", PREDICTIONS),
        ("encoder", ENCODERS),
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


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_that_load_refuses(case: str, tmp_path: Path) -> None:
    entries, message = FOLDERS[case]
    with pytest.raises(ValueError, match=message):
        load(saved(tmp_path, **entries))


def test_weights_that_are_damaged_missing_or_pickled_are_refused(tmp_path: Path) -> None:
    """By `load` and by `load_encoder`; a weight that is not there would be drawn at random."""
    for name, read in (("load", load), ("load_encoder", load_encoder)):
        folder = saved(tmp_path / name)
        for part in tiny_bert()[1:]:
            part.save_pretrained(folder)
        file = folder / "model.safetensors"
        whole, tensors = file.read_bytes(), load_file(file)
        save_file({k: v for k, v in tensors.items() if "layer.0.attention.self.query" not in k}, file, {"format": "pt"})
        with pytest.raises(
            ValueError, match=r"lacks encoder.layer.0.*query.bias.*: 2 weights of a BertModel, which would"
        ):
            read(folder)
        for damaged in (whole[:-100], b"", b"no weights"):
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match=r"its weights cannot be read \(.*\); the file is damaged"):
                read(folder)
        file.unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
        with pytest.raises((ValueError, OSError), match=r"no .*safetensors"):
            read(folder)
    with pytest.raises(ValueError, match=r"nowhere has no config.json; expected a folder written by save_pretrained"):
        load(tmp_path / "nowhere")


LARGE: dict[str, Callable[[], object]] = {
    "tokens": lambda: Sphere().uniform(10**12, 3),
    "tokens of flat space": lambda: Euclidean().uniform((10**6, 10**6), 3),
    "weights": lambda: Attention.identity(10**7),
    "random weights": lambda: Attention.random(10**7, 4),
    "nodes": lambda: fibonacci(10**12),
    "nodes of a circle": lambda: circle(10**12),
    "samples": lambda: VonMisesFisher(EYE[0], 2.0).sample(10**12),
}


@pytest.mark.parametrize("case", LARGE)
def test_what_no_memory_holds_is_refused_before_it_is_made(case: str) -> None:
    with pytest.raises(
        MemoryError, match=r"a tensor of \d+.* numbers needs about \d+\.\d GB, .* ask for fewer of them"
    ):
        LARGE[case]()


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
    x = torch.tensor([[1.0, 0, 0], [-1.0, 0, 0]], dtype=F64)
    with pytest.raises(FloatingPointError, match=r"left the range of torch.float64 at t = 0.01"):
        flow(Attention.identity(3, 0.0, dtype=F64), x, 1.0, placement=placement.ngpt())


def test_messages_look_at_values_only_where_they_may() -> None:
    """Under vmap and on the meta device the same calls do not read values, so they raise nothing."""
    assert torch.func.vmap(lambda x: A.drift(x))(X.expand(2, 5, 3)).shape == (2, 5, 3)
    meta = Attention.identity(3, 2.0, device="meta")
    assert meta.drift(torch.empty(5, 3, device="meta")).shape == (5, 3)
    assert flow(meta, torch.empty(5, 3, device="meta"), [0, 0.1]).x.is_meta
