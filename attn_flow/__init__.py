"""Self-attention as a flow of interacting particles: simulate it, predict where it goes, measure how far it is.

    from attn_flow import Attention, flow, limit, wasserstein

    attention = Attention.from_matrices(G, V, beta=100.0)  # of scores <G x, y> and values V y
    path = flow(attention, x0, t=20.0)  # the tokens x0 (n, d) at 101 times, path.x (101, n, d)
    target = limit(attention)  # where they go at low temperature
    wasserstein(path.x[-1], target.push_forward(x0))  # how far they still are

`ContinuousAttentionLayer` and `ContinuousMultiheadAttention` are layers for models of your own. `attn_flow.hooks` has
pretrained HuggingFace models in the same terms, `attn_flow.probe` a report on one of them.
"""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attn_flow.attention.attention import Attention
    from attn_flow.attention.fields import Drift, Layers
    from attn_flow.dynamics.densities import DensityPath, density_flow
    from attn_flow.dynamics.flow import consensus, flow
    from attn_flow.dynamics.linearisation import linearise, lyapunov
    from attn_flow.dynamics.steppers import Adaptive, dopri5, euler, rk4
    from attn_flow.dynamics.trajectory import Trajectory
    from attn_flow.geometry import Ellipsoid, Euclidean, Sphere
    from attn_flow.measures.cloud import Cloud
    from attn_flow.measures.gaussian import EllipsoidSupport, Gaussian
    from attn_flow.measures.mixture import Mixture
    from attn_flow.measures.sphere import UniformSphere
    from attn_flow.measures.von_mises_fisher import VonMisesFisher
    from attn_flow.nn.layer import ContinuousAttentionLayer
    from attn_flow.nn.multihead import ContinuousMultiheadAttention
    from attn_flow.prediction.limit_map import LimitMap, limit
    from attn_flow.prediction.phases import phases
    from attn_flow.prediction.requirements import resolution
    from attn_flow.prediction.sweep import Sweep, sweep
    from attn_flow.prediction.zero_temperature import zero_temperature_flow
    from attn_flow.transport.distances import wasserstein
else:
    _NAMES = {  # imported on first use (PEP 562), so that `import attn_flow` and the help of commands need no torch
        "attention.attention": ("Attention",),
        "attention.fields": ("Drift", "Layers"),
        "dynamics.densities": ("DensityPath", "density_flow"),
        "dynamics.flow": ("consensus", "flow"),
        "dynamics.linearisation": ("linearise", "lyapunov"),
        "dynamics.steppers": ("Adaptive", "dopri5", "euler", "rk4"),
        "dynamics.trajectory": ("Trajectory",),
        "geometry": ("Ellipsoid", "Euclidean", "Sphere"),
        "measures.cloud": ("Cloud",),
        "measures.gaussian": ("EllipsoidSupport", "Gaussian"),
        "measures.mixture": ("Mixture",),
        "measures.sphere": ("UniformSphere",),
        "measures.von_mises_fisher": ("VonMisesFisher",),
        "nn.layer": ("ContinuousAttentionLayer",),
        "nn.multihead": ("ContinuousMultiheadAttention",),
        "prediction.requirements": ("resolution",),
        "prediction.limit_map": ("LimitMap", "limit"),
        "prediction.phases": ("phases",),
        "prediction.sweep": ("Sweep", "sweep"),
        "prediction.zero_temperature": ("zero_temperature_flow",),
        "transport.distances": ("wasserstein",),
    }
    _MODULES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}

    def __getattr__(name):
        if name in _MODULES:
            return globals().setdefault(name, getattr(importlib.import_module(_MODULES[name]), name))
        if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *_MODULES})


__version__ = "0.3.0.dev0"
__all__ = [
    "Adaptive",
    "Attention",
    "Cloud",
    "ContinuousAttentionLayer",
    "ContinuousMultiheadAttention",
    "DensityPath",
    "Drift",
    "Ellipsoid",
    "EllipsoidSupport",
    "Euclidean",
    "Gaussian",
    "Layers",
    "LimitMap",
    "Mixture",
    "Sphere",
    "Sweep",
    "Trajectory",
    "UniformSphere",
    "VonMisesFisher",
    "consensus",
    "density_flow",
    "dopri5",
    "euler",
    "flow",
    "limit",
    "linearise",
    "lyapunov",
    "phases",
    "resolution",
    "rk4",
    "sweep",
    "wasserstein",
    "zero_temperature_flow",
]
