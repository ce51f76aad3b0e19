"""Self-attention as a flow of interacting particles: simulate it, predict where it goes, measure how far it is."""

from attn_flow.attention import Attention
from attn_flow.flow import consensus, flow, push_forward
from attn_flow.geometry import Ellipsoid, Euclidean, Sphere
from attn_flow.measures import Cloud, EllipsoidSupport, Gaussian, Mixture, UniformSphere
from attn_flow.steppers import Adaptive, dopri5, euler, rk4
from attn_flow.trajectory import Trajectory

__version__ = "0.1.0"
__all__ = [
    "Adaptive",
    "Attention",
    "Cloud",
    "Ellipsoid",
    "EllipsoidSupport",
    "Euclidean",
    "Gaussian",
    "Mixture",
    "Sphere",
    "Trajectory",
    "UniformSphere",
    "consensus",
    "dopri5",
    "euler",
    "flow",
    "push_forward",
    "rk4",
]
