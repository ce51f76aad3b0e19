"""Self-attention as a flow of interacting particles: simulate it, predict where it goes, measure how far it is."""

from typing import TYPE_CHECKING

from attn_flow.base.lazy import lazily

if TYPE_CHECKING:
    from attn_flow.attention import Attention, Drift, Layers
    from attn_flow.dynamics.continuity import DensityPath, density_flow
    from attn_flow.dynamics.particles import consensus, flow, push_forward
    from attn_flow.dynamics.stability import linearise, lyapunov
    from attn_flow.dynamics.steppers import Adaptive, dopri5, euler, rk4
    from attn_flow.dynamics.trajectory import Trajectory
    from attn_flow.geometry import Ellipsoid, Euclidean, Sphere
    from attn_flow.measures import Cloud, EllipsoidSupport, Gaussian, Mixture, UniformSphere, VonMisesFisher
    from attn_flow.nn.layer import ContinuousAttentionLayer
    from attn_flow.prediction import LimitMap, limit, phases, resolution, zero_temperature_flow
    from attn_flow.transport.distances import wasserstein
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "attn_flow.attention": ("Attention", "Drift", "Layers"),
            "attn_flow.dynamics.continuity": ("DensityPath", "density_flow"),
            "attn_flow.dynamics.particles": ("consensus", "flow", "push_forward"),
            "attn_flow.dynamics.stability": ("linearise", "lyapunov"),
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
            "attn_flow.nn.layer": ("ContinuousAttentionLayer",),
            "attn_flow.prediction": ("LimitMap", "limit", "phases", "resolution", "zero_temperature_flow"),
            "attn_flow.transport.distances": ("wasserstein",),
        },
    )

__version__ = "0.2.0.dev0"
__all__ = [
    "Adaptive",
    "Attention",
    "Cloud",
    "ContinuousAttentionLayer",
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
    "push_forward",
    "resolution",
    "rk4",
    "wasserstein",
    "zero_temperature_flow",
]
