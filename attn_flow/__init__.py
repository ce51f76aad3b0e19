"""Self-attention as a flow of interacting particles: simulate it, predict where it goes, measure how far it is."""

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

__version__ = "0.1.0"
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
