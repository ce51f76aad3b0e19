"""Optimal transport between small clouds of any masses: the dense linear program.

    minimise sum_ij P_ij c_ij    subject to    P 1 = a,  P^T 1 = b,  P >= 0

The network simplex of POT solves it. POT is an optional dependency; without it the solver of scipy takes its place
for problems that it solves in about a second.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from types import ModuleType

import numpy as np
import scipy.sparse
from scipy.optimize import linprog

from attn_flow.transport.ground_cost import GroundCost
from attn_flow.transport.plan import Array, Plan, north_west_corner

# Pivots after which the network simplex stops; its error bound then shows what is missing.
MAX_PIVOTS = 10_000_000
# The most entries of the cost matrix for scipy's solver, which takes about a second at 300 x 300.
MAX_LINPROG_ENTRIES = 100_000


def has_pot() -> bool:
    """Whether POT is installed."""
    return importlib.util.find_spec("ot") is not None


def import_pot() -> ModuleType:
    """The package POT, which takes seconds to import; ImportError with the remedy if it is missing."""
    try:
        return importlib.import_module("ot")
    except ImportError:
        raise ImportError(
            "an exact distance between so many points needs the optional package POT; install it with "
            "pip install \"attn-flow[all]\", or use method='sinkhorn' or 'sliced'."
        ) from None


def simplex(x: Array, a: Array, y: Array, b: Array, cost: GroundCost) -> Plan:
    """The optimal plan, with the gap that its own potentials prove."""
    C = cost.matrix(x, y)
    largest = float(C.max())
    if largest == 0:
        return Plan(*north_west_corner(a, b), v=np.zeros(len(y)))
    # Solvers stop at absolute tolerances, so they get costs of order one.
    if C.size <= MAX_LINPROG_ENTRIES and not has_pot():
        P, v = _linear_program(a, b, C / largest)
    else:
        P, log = import_pot().emd(a, b, C / largest, numItermax=MAX_PIVOTS, log=True)
        v = log["v"]
    i, j = np.nonzero(P)
    v = v * largest
    plan = Plan(i, j, P[i, j], v=v)
    gap = max(float(plan.mass @ C[i, j] - (a @ (C - v).min(1) + b @ v)), 0.0)
    return replace(plan, gap=gap + plan.mass_error(a, b) * largest)


def _linear_program(a: Array, b: Array, C: Array) -> tuple[Array, Array]:
    """The optimal plan P (n, m) and the potential v (m,) by scipy's simplex method."""
    n, m = C.shape
    rows = scipy.sparse.kron(scipy.sparse.eye(n), np.ones((1, m)))
    columns = scipy.sparse.kron(np.ones((1, n)), scipy.sparse.eye(m))
    result = linprog(
        C.ravel(),
        A_eq=scipy.sparse.vstack([rows, columns]).tocsc(),
        b_eq=np.r_[a, b],
        method="highs-ds",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if result.x is None:
        raise ValueError(f'the linear program was not solved: {result.message} Use pip install "attn-flow[all]".')
    return result.x.reshape(n, m), result.eqlin.marginals[n:]
