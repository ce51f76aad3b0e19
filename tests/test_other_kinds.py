"""An argument of another kind, of every public function, one at a time: refused in a sentence, never taken and never
a traceback of somebody else's.

EXAMPLES are calls that work. Each of their arguments, and each they leave out, is given what it cannot be.
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

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
    VonMisesFisher,
    consensus,
    density_flow,
    flow,
    hooks,
    limit,
    linearise,
    lyapunov,
    phases,
    push_forward,
    resolution,
    wasserstein,
    zero_temperature_flow,
)
from attn_flow.dynamics import kicks, placement
from attn_flow.hooks.demo import tiny_bert
from attn_flow.measures import LogitLaw, quadrature
from attn_flow.nn import ContinuousMultiheadAttention, DeepStack
from attn_flow.observe import quantities
from attn_flow.observe.tracking import track
from attn_flow.prediction import phases_over_seeds, propagation_of_chaos, settle
from attn_flow.probe.run import inquire
from attn_flow.transport import Limits, solve

F64 = torch.float64
X = Sphere().uniform(5, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
Y = Sphere().uniform(5, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
EYE = torch.eye(3, dtype=F64)
A = Attention.identity(3, 2.0, dtype=F64)
G = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=F64))
ZERO = torch.zeros(3, dtype=F64)
CLOUD, LAW, ELLIPSOID = Cloud(X), VonMisesFisher(EYE[0], 2.0), Ellipsoid(ZERO, EYE)
TARGET = limit(Attention.from_matrices(G, EYE, 2.0))
PATH = flow(A, X, [0.0, 0.5, 1.0])
STACK = DeepStack(5, 2, dim=4, depth=1)
LAYER = ContinuousAttentionLayer(3, dtype=F64)
MULTIHEAD = ContinuousMultiheadAttention(4, 2)
WIDE = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
IDS = torch.arange(6).reshape(2, 3) % 5
DENSITY = density_flow(Attention.identity(2, 1.0, dtype=F64), VonMisesFisher(torch.eye(2, dtype=F64)[0], 1.0), 0.02)
TWO = Trajectory(PATH.t, torch.stack([PATH.x, PATH.x], dim=1))
Call = tuple[Callable[..., object], dict[str, Any]]


def sample(n: int, generator: torch.Generator) -> torch.Tensor:
    return Sphere().uniform(n, 3, generator=generator, dtype=F64)


EXAMPLES: dict[str, Call] = {
    "Adaptive": (Adaptive, {}),
    "Attention": (Attention, {"Q": EYE}),
    "Attention.from_matrices": (Attention.from_matrices, {"G": EYE, "V": EYE}),
    "Attention.identity": (Attention.identity, {"d": 3}),
    "Attention.random": (Attention.random, {"d": 3}),
    "Attention.with_beta": (A.with_beta, {"beta": 3.0}),
    "Attention.drift": (A.drift, {"x": X}),
    "Attention.matrix": (A.matrix, {"x": X}),
    "Attention.truncated_drift": (A.truncated_drift, {"x": X}),
    "Cloud": (Cloud, {"x": X}),
    "ContinuousAttentionLayer": (ContinuousAttentionLayer, {"dim": 4}),
    "ContinuousAttentionLayer.from_attention": (ContinuousAttentionLayer.from_attention, {"attention": A}),
    "ContinuousAttentionLayer.forward": (LAYER.forward, {"x": X}),
    "ContinuousMultiheadAttention": (ContinuousMultiheadAttention, {"embed_dim": 4, "num_heads": 2}),
    "ContinuousMultiheadAttention.forward": (MULTIHEAD.forward, {"query": WIDE, "key": WIDE, "value": WIDE}),
    "DeepStack": (DeepStack, {"inputs": 5, "outputs": 2}),
    "DeepStack.forward": (STACK.forward, {"inputs": IDS}),
    "DeepStack.trajectory": (STACK.trajectory, {"inputs": IDS}),
    "DeepStack.rerun": (STACK.rerun, {}),
    "DensityPath.density": (DENSITY.density, {"x": torch.eye(2, dtype=F64)}),
    "DensityPath.cloud": (DENSITY.cloud, {"index": 0}),
    "DensityPath.growth_rates": (DENSITY.growth_rates, {"k": 1}),
    "Drift": (Drift, {"f": lambda t, x: -x}),
    "Ellipsoid": (Ellipsoid, {"centre": ZERO, "axes": EYE}),
    "Ellipsoid.from_layer_norm": (Ellipsoid.from_layer_norm, {"gain": torch.ones(3)}),
    "Ellipsoid.uniform": (ELLIPSOID.uniform, {"n": 4, "d": 3}),
    "EllipsoidSupport": (EllipsoidSupport, {"mean": ZERO, "cov": EYE, "rho": 1.0}),
    "EllipsoidSupport.fit": (EllipsoidSupport.fit, {"cloud": CLOUD}),
    "Euclidean.uniform": (Euclidean().uniform, {"n": 4, "d": 3}),
    "Gaussian": (Gaussian, {"mean": ZERO, "cov": EYE}),
    "Gaussian.bulk": (Gaussian.bulk, {"mean": ZERO, "cov": EYE, "n": 10}),
    "Gaussian.fit": (Gaussian.fit, {"cloud": CLOUD}),
    "Layers": (Layers, {"fields": [A], "times": [0.0, 1.0]}),
    "LimitMap.examine": (TARGET.examine, {"x": X}),
    "LimitMap.moving_push_forward": (TARGET.moving_push_forward, {"x": X, "t": torch.tensor([0.0, 1.0], dtype=F64)}),
    "LimitMap.push_forward": (TARGET.push_forward, {"x": X}),
    "LimitMap.rate": (TARGET.rate, {}),
    "LimitMap.settle": (TARGET.settle, {"x": X}),
    "LimitMap.t_beta": (TARGET.t_beta, {"beta": 50.0}),
    "LimitMap.t_min": (TARGET.t_min, {"beta": 50.0}),
    "Limits": (Limits, {}),
    "LogitLaw": (LogitLaw, {"mean": ZERO, "cov": EYE, "t": ZERO}),
    "Mixture": (Mixture, {"components": [CLOUD], "weights": torch.ones(1, dtype=F64)}),
    "Mixture.responsibilities": (Mixture([CLOUD], torch.ones(1, dtype=F64)).responsibilities, {"g": X, "beta": 1.0}),
    "Sphere": (Sphere, {}),
    "Sphere.uniform": (Sphere().uniform, {"n": 4, "d": 3}),
    "Trajectory": (Trajectory, {"t": PATH.t, "x": PATH.x}),
    "Trajectory.cloud": (PATH.cloud, {"index": 0}),
    "Trajectory.load": (Trajectory.load, {"path": "nowhere"}),
    "UniformSphere": (UniformSphere, {"d": 3}),
    "VonMisesFisher": (VonMisesFisher, {"mean": EYE[0], "kappa": 2.0}),
    "VonMisesFisher.density": (LAW.density, {"y": EYE}),
    "VonMisesFisher.sample": (LAW.sample, {"n": 3}),
    **{
        f"{type(law).__name__}.{method}": (getattr(law, method), {"g": X, "beta": 2.0})
        for law in (CLOUD, LAW, UniformSphere(3), Gaussian(ZERO, EYE), EllipsoidSupport(ZERO, EYE, 1.0))
        for method in ("log_partition", "tilted_mean")
    },
    "alignment": (quantities.alignment, {"x": X, "basis": EYE[:, :2]}),
    "attention_statistics": (quantities.attention_statistics, {"attention": A, "x": X}),
    "circle": (quadrature.circle, {"n": 8}),
    "close_pairs": (quantities.close_pairs, {"x": X}),
    "clusters": (quantities.clusters, {"x": X}),
    "consensus": (consensus, {}),
    "density_flow": (
        density_flow,
        {
            "attention": Attention.identity(2, 1.0, dtype=F64),
            "density": VonMisesFisher(torch.eye(2)[0], 1.0),
            "t": 0.01,
        },
    ),
    "diameter": (quantities.diameter, {"x": X}),
    "effective_beta": (quantities.effective_beta, {"attention": A, "x": X}),
    "effective_rank": (quantities.effective_rank, {"x": X}),
    "energy": (quantities.energy, {"x": X, "beta": 1.0}),
    "fibonacci": (quadrature.fibonacci, {"n": 8}),
    "flow": (flow, {"attention": A, "x0": X, "t": 0.1}),
    "graded": (quadrature.graded, {"n": 6, "across": 4, "axis": EYE[0]}),
    "kicks.independent": (kicks.independent, {"sigma": 0.1}),
    "limit": (limit, {"attention": A}),
    "linearise": (linearise, {"attention": A, "cloud": X}),
    "log_energy": (quantities.log_energy, {"x": X, "beta": 1.0}),
    "lyapunov": (lyapunov, {"attention": A, "x0": X, "t": 0.2}),
    "pairwise_cosines": (quantities.pairwise_cosines, {"x": X}),
    "phases": (phases, {"path": PATH, "limit": TARGET, "warn": False}),
    "phases_over_seeds": (phases_over_seeds, {"path": TWO, "limit": TARGET}),
    "placement.ngpt": (placement.ngpt, {}),
    "propagation_of_chaos": (
        propagation_of_chaos,
        {"attention": A, "sample": sample, "reference": CLOUD, "t": 0.1, "n": [4, 8]},
    ),
    "push_forward": (push_forward, {"attention": A, "x0": X, "t": 0.1}),
    "resolution": (resolution, {"attention": A, "x": X, "warn": False}),
    "settle": (settle, {"attention": Attention.from_matrices(G, EYE, 2.0), "x0": X, "horizon": 1.0}),
    "solve": (solve, {"x": X, "y": Y}),
    "track": (track, {"path": PATH}),
    "wasserstein": (wasserstein, {"x": X, "y": Y}),
    "zero_temperature_flow": (
        zero_temperature_flow,
        {"attention": Attention.from_matrices(G, EYE, 2.0), "x0": X, "t": 0.1},
    ),
}


MODEL, TOKENIZER = tiny_bert()
TOLD = {"model": MODEL, "source": TOKENIZER, "texts": ["a b c", "b c d"]}


def entered(attached: Callable[..., Any]) -> Callable[..., Any]:
    """What is attached to a model, and taken off again."""

    def enter(**given: object) -> None:
        with attached(**given):
            pass

    enter.__signature__ = inspect.signature(attached)  # type: ignore[attr-defined]
    return enter


EXAMPLES |= {
    "attentions": (hooks.attentions, {"model": MODEL}),
    "flows": (hooks.flows, {"model": MODEL}),
    "geometries": (hooks.geometries, {"model": MODEL}),
    "inquire": (inquire, TOLD),
    "LayerFlow": (hooks.LayerFlow, {"heads": 2}),
    "load_texts": (hooks.load_texts, {"path": __file__}),
    "merge_shards": (hooks.merge_shards, {"parts": []}),
    "norms": (hooks.norms, {"model": MODEL}),
    "record": (hooks.record, TOLD),
    "record_corpus": (hooks.record_corpus, TOLD),
    "recording": (entered(hooks.recording), {"model": MODEL}),
    "scale_beta": (entered(hooks.scale_beta), {"model": MODEL, "beta_factor": 2.0}),
    "self_check": (hooks.self_check, {"model": MODEL, "inputs": dict(TOKENIZER(["a b c"], return_tensors="pt"))}),
    "unknown_share": (hooks.unknown_share, {"tokenizer": TOKENIZER, "texts": ["a b c"]}),
    "wrap": (entered(hooks.wrap), {"model": MODEL}),
}


class Thing:
    """What nobody expects."""


STRANGERS = {"a thing": Thing(), "a word": "x", "nothing": None, "a complex number": 1j, "no list": []}
# How, not what: whether to warn, to look, to keep or to return more. Words count as True there, as in Python.
HOW = {"validate", "progress", "warn", "vectors", "return_path", "need_weights", "average_attn_weights"}
# torch's own options, which must be off: what counts as False is off.
OFF = {"add_bias_kv", "add_zero_attn", "is_causal"}


def takes(parameter: inspect.Parameter, stranger: object) -> bool:
    """Whether the annotation lets it in."""
    words = str(parameter.annotation)
    if parameter.name == "folder" and stranger == "x":
        return True
    if stranger is None:
        return "None" in words or parameter.name in HOW | OFF or parameter.annotation is Any
    return parameter.name in HOW or (not stranger and parameter.name in OFF)


@pytest.mark.parametrize("name", EXAMPLES)
def test_arguments_of_another_kind_are_refused(name: str) -> None:
    """ValueError in a sentence; what is no argument at all never gives a number."""
    call, given = EXAMPLES[name]
    wrong = []
    for parameter in inspect.signature(call).parameters.values():
        for kind, stranger in STRANGERS.items():
            if takes(parameter, stranger):
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    call(**{**given, parameter.name: stranger})
            except ValueError as refusal:
                if not str(refusal).endswith("."):
                    wrong.append(f"{parameter.name} = {kind}: {refusal}")
            except Exception as raw:
                wrong.append(f"{parameter.name} = {kind}: {type(raw).__name__}: {raw}")
            else:
                wrong.append(f"{parameter.name} = {kind} was taken")
    assert not wrong, "\n".join(wrong)
