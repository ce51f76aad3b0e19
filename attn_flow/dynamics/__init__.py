"""From mu_0 to mu_t: `flow` and its steps, kicks, mergers and processes, and the `Trajectory` that comes out."""

from attn_flow.dynamics.continuity import DensityPath, density_flow
from attn_flow.dynamics.particles import consensus, flow, push_forward
from attn_flow.dynamics.stability import Linearisation, Lyapunov, linearise, lyapunov
from attn_flow.dynamics.steppers import Adaptive, dopri5, euler, rk4
from attn_flow.dynamics.trajectory import Trajectory

__all__ = [
    "Adaptive",
    "DensityPath",
    "Linearisation",
    "Lyapunov",
    "Trajectory",
    "consensus",
    "density_flow",
    "dopri5",
    "euler",
    "flow",
    "linearise",
    "lyapunov",
    "push_forward",
    "rk4",
]
