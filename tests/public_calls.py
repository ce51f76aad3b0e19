"""EXAMPLES: a call that works of every public function, which the tests of wrong arguments change one at a time."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

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
    theory,
    wasserstein,
    zero_temperature_flow,
)
from attn_flow.dynamics import kicks, placement
from attn_flow.hooks.demo import tiny_bert
from attn_flow.measures import LogitLaw, OwnTokens, SeenGaussian, quadrature
from attn_flow.nn import ContinuousMultiheadAttention, DeepStack, schedules
from attn_flow.observe import quantities
from attn_flow.observe.tracking import track
from attn_flow.prediction import (
    certified_over_seeds,
    fit_bound,
    over_seeds,
    phases_over_seeds,
    propagation_of_chaos,
    settle,
)
from attn_flow.probe.run import inquire
from attn_flow.theory.noise import KERNELS
from attn_flow.train import Recipe, Vocabulary, recipe, tensor_task, text_task
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
MANY = torch.arange(120).reshape(20, 6) % 5
PATHS = [flow(Attention.from_matrices(G, EYE, beta), X, torch.linspace(0, 4, 17)) for beta in (20.0, 80.0)]
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
    "OwnTokens": (OwnTokens, {"x": X[:, None], "weights": torch.ones(5, 1, dtype=F64)}),
    "SeenGaussian": (SeenGaussian, {"x": X, "sees": torch.ones(5, 5, dtype=F64)}),
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
        for law in (
            CLOUD,
            LAW,
            UniformSphere(3),
            Gaussian(ZERO, EYE),
            EllipsoidSupport(ZERO, EYE, 1.0),
            LogitLaw(ZERO, EYE, EYE[0]),
            Mixture([CLOUD, LAW], torch.ones(2, dtype=F64)),
            OwnTokens(X[:, None], torch.ones(5, 1, dtype=F64)),
            SeenGaussian(X, torch.ones(5, 5, dtype=F64)),
        )
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
            "t": [0.0, 0.01],
        },
    ),
    "diameter": (quantities.diameter, {"x": X}),
    "effective_beta": (quantities.effective_beta, {"attention": A, "x": X}),
    "effective_rank": (quantities.effective_rank, {"x": X}),
    "energy": (quantities.energy, {"x": X, "beta": 1.0}),
    "fibonacci": (quadrature.fibonacci, {"n": 8}),
    "flow": (flow, {"attention": A, "x0": X, "t": [0.0, 0.1]}),
    "graded": (quadrature.graded, {"n": 6, "across": 4, "axis": EYE[0]}),
    "certified_over_seeds": (certified_over_seeds, {"settled": TARGET.settle(torch.stack([X, Y]))}),
    "fit_bound": (fit_bound, {"paths": PATHS, "limit": TARGET, "resamples": 5}),
    "kicks.common": (kicks.common, {"sigma": 0.1}),
    "kicks.field": (kicks.field, {"kernel": torch.exp}),
    "kicks.independent": (kicks.independent, {"sigma": 0.1}),
    "kicks.linear": (kicks.linear, {"sigma": 0.1}),
    "limit": (limit, {"attention": A}),
    "linearise": (linearise, {"attention": A, "cloud": X}),
    "log_energy": (quantities.log_energy, {"x": X, "beta": 1.0}),
    "lyapunov": (lyapunov, {"attention": A, "x0": X, "t": 0.2}),
    "over_seeds": (over_seeds, {"values": [1.0, 2.0, 3.0]}),
    "pairwise_cosines": (quantities.pairwise_cosines, {"x": X}),
    "phases": (phases, {"path": PATH, "limit": TARGET, "warn": False}),
    "phases_over_seeds": (phases_over_seeds, {"path": TWO, "limit": TARGET}),
    "placement.ngpt": (placement.ngpt, {}),
    "propagation_of_chaos": (
        propagation_of_chaos,
        {"attention": A, "sample": sample, "reference": CLOUD, "t": 0.1, "n": [4, 8], "seeds": 2},
    ),
    "push_forward": (push_forward, {"attention": A, "x0": X, "t": 0.1}),
    "resolution": (resolution, {"attention": A, "x": X, "warn": False}),
    "settle": (settle, {"attention": Attention.from_matrices(G, EYE, 2.0), "x0": X, "horizon": 1.0}),
    "schedules.Geometric": (schedules.Geometric, {"start": 1.0, "end": 2.0}),
    "schedules.Linear": (schedules.Linear, {"start": 1.0, "end": 2.0}),
    "solve": (solve, {"x": X, "y": Y}),
    "Recipe": (Recipe, {"task": "majority"}),
    "recipe": (recipe, {"task": "majority"}),
    "tensor_task": (tensor_task, {"x": MANY, "y": MANY[:, 0] % 2, "inputs": 5, "outputs": 2}),
    "text_task": (text_task, {"texts": ["good day", "bad day"] * 10, "labels": ["yes", "no"] * 10}),
    "Vocabulary": (Vocabulary, {"words": ("good", "bad"), "labels": ("no", "yes"), "longest": 3}),
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


def replaced(**given: Any) -> object:
    """`replace_attention` of a model of its own."""
    return hooks.replace_attention(tiny_bert()[0], **given)


whole = inspect.signature(hooks.replace_attention)
replaced.__signature__ = whole.replace(parameters=list(whole.parameters.values())[1:])  # type: ignore[attr-defined]


EXAMPLES |= {
    "attentions": (hooks.attentions, {"model": MODEL}),
    "blocks": (hooks.blocks, {"model": MODEL}),
    "encoder_facts": (hooks.encoder_facts, {"model": MODEL}),
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
    "replace_attention": (replaced, {}),
    "scale_beta": (entered(hooks.scale_beta), {"model": MODEL, "beta_factor": 2.0}),
    "self_check": (hooks.self_check, {"model": MODEL, "inputs": dict(TOKENIZER(["a b c"], return_tensors="pt"))}),
    "unknown_share": (hooks.unknown_share, {"tokenizer": TOKENIZER, "texts": ["a b c"]}),
    "wrap": (entered(hooks.wrap), {"model": MODEL}),
}

# The closed forms of the papers: what their arguments are called decides what they are given.
PLAIN: dict[str, Any] = {
    "n": 5,
    "modes": 20,
    "steps": 3,
    "d": 3,
    "k": 2,
    "p": 0,
    "n_plus": 2,
    "n_minus": 3,
    "beta": 2.0,
    "u": 0.5,
    "s": 0.25,
    "lam": 1.0,
    "a": 1.0,
    "M": 4.0,
    "gap": 0.5,
    "gap_end": 0.1,
    "rho": 0.5,
    "hazard": 1.0,
    "v": 1.0,
    "alpha": 0.5,
    "distance": 1.0,
    "rise": 1.0,
    "gamma": 0.5,
    "b": 1.0,
    "phi": 0.5,
    "lam_p": 1.0,
    "t": [0.1, 0.2],
    "logits": [3.0, 1.0, 2.5],
    "theta": [0.1, 0.2],
    "masses": [0.5, 0.5],
    "m": [1.0, 0.5],
    "S": [[1.0, 0.0], [0.0, 1.0]],
    "V": [[1.0, 0.0], [0.0, 1.0]],
    "G": [[1.0, 0.0], [0.0, 0.5]],
    "m0": [1.0, 0.0],
    "S0": [[0.1, 0.0], [0.0, 0.1]],
    "x": [[1.0, 0.0], [0.0, 1.0]],
    "vertices": [[1.0, 0.0]],
    "kappa": KERNELS["linear"][0],
    "scheme": "pre",
    "spectral_selection.lam": [2.0, 1.0],
    "synchronisation.p": 0.5,
}


def closed_forms() -> dict[str, Call]:
    """Every public function of attn_flow.theory."""
    found: dict[str, Call] = {}
    for _, module, _ in pkgutil.iter_modules(theory.__path__):
        room = importlib.import_module(f"attn_flow.theory.{module}")
        for name, call in inspect.getmembers(room, inspect.isfunction):
            if name.startswith("_") or call.__module__ != room.__name__ or module == "domain":
                continue
            needed = [p.name for p in inspect.signature(call).parameters.values() if p.default is p.empty]
            given = {each: PLAIN.get(f"{module}.{each}", PLAIN.get(each)) for each in needed}
            found[f"{module}.{name}"] = (call, given)
    return found


EXAMPLES |= closed_forms()
