"""Self-attention as a flow of interacting particles: simulate it, predict where it goes, measure how far it is.

    from attn_flow import Attention, flow, limit, wasserstein

    attention = Attention.from_matrices(G, V, beta=100.0)  # of scores <G x, y> and values V y
    path = flow(attention, x0, t=20.0)  # the tokens x0 (n, d) at 101 times, path.x (101, n, d)
    target = limit(attention)  # where they go at low temperature
    wasserstein(path.x[-1], target.push_forward(x0))  # how far they still are

`ContinuousAttentionLayer` and `ContinuousMultiheadAttention` are layers for models of your own. `attn_flow.hooks` has
pretrained HuggingFace models in the same terms, `attn_flow.probe` a report on one of them.
"""

from typing import TYPE_CHECKING

from attn_flow.base.imports import lazy_names

if TYPE_CHECKING:
    from attn_flow.attention import Attention, Drift, Layers
    from attn_flow.dynamics.densities import DensityPath, density_flow
    from attn_flow.dynamics.flow import consensus, flow
    from attn_flow.dynamics.linearisation import linearise, lyapunov
    from attn_flow.dynamics.steppers import Adaptive, dopri5, euler, rk4
    from attn_flow.dynamics.trajectory import Trajectory
    from attn_flow.geometry import Ellipsoid, Euclidean, Sphere
    from attn_flow.measures import Cloud, EllipsoidSupport, Gaussian, Mixture, UniformSphere, VonMisesFisher
    from attn_flow.nn import ContinuousAttentionLayer, ContinuousMultiheadAttention
    from attn_flow.prediction import LimitMap, Sweep, limit, phases, resolution, sweep, zero_temperature_flow
    from attn_flow.transport.distances import wasserstein
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "attn_flow.attention": ("Attention", "Drift", "Layers"),
            "attn_flow.dynamics.densities": ("DensityPath", "density_flow"),
            "attn_flow.dynamics.flow": ("consensus", "flow"),
            "attn_flow.dynamics.linearisation": ("linearise", "lyapunov"),
            "attn_flow.dynamics.steppers": ("Adaptive", "dopri5", "euler", "rk4"),
            "attn_flow.dynamics.trajectory": ("Trajectory",),
            "attn_flow.geometry": ("Ellipsoid", "Euclidean", "Sphere"),
            "attn_flow.measures": (
                "Cloud",
                "EllipsoidSupport",
                "Gaussian",
                "Mixture",
                "UniformSphere",
                "VonMisesFisher",
            ),
            "attn_flow.nn": ("ContinuousAttentionLayer", "ContinuousMultiheadAttention"),
            "attn_flow.prediction": (
                "LimitMap",
                "Sweep",
                "limit",
                "phases",
                "resolution",
                "sweep",
                "zero_temperature_flow",
            ),
            "attn_flow.transport.distances": ("wasserstein",),
        },
    )

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
