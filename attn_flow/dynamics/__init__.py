"""From an initial cloud to a later one: `flow`, its steps and noise, densities, and linearisation."""

from attn_flow.dynamics.densities import DensityPath, density_flow
from attn_flow.dynamics.flow import consensus, flow
from attn_flow.dynamics.linearisation import Linearisation, Lyapunov, linearise, lyapunov
from attn_flow.dynamics.steppers import Adaptive, RungeKutta, dopri5, euler, rk4
from attn_flow.dynamics.trajectory import Trajectory

__all__ = [
    "Adaptive",
    "DensityPath",
    "Linearisation",
    "Lyapunov",
    "RungeKutta",
    "Trajectory",
    "consensus",
    "density_flow",
    "dopri5",
    "euler",
    "flow",
    "linearise",
    "lyapunov",
    "rk4",
]
