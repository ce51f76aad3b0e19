"""Optimal transport between small clouds of any masses: the dense linear program, by the network simplex of POT.

minimise sum_ij P_ij c_ij    subject to    P 1 = a,  P^T 1 = b,  P >= 0
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np

from attn_flow.base.checks import require_extra
from attn_flow.transport.ground_cost import GroundCost
from attn_flow.transport.plan import Array, Plan

MAX_PIVOTS = 10_000_000  # after which the network simplex stops; its error bound then shows what is missing


def has_pot() -> bool:
    """Whether POT is installed."""
    return importlib.util.find_spec("ot") is not None


def simplex(x: Array, a: Array, y: Array, b: Array, cost: GroundCost) -> Plan:
    """The optimal plan, with the gap that its own potentials prove."""
    C = cost.matrix(x, y)
    largest = float(C.max())
    unit = largest or 1.0  # the solver stops at absolute tolerances, so it gets costs of order one
    P, log = require_extra("ot").emd(a, b, C / unit, numItermax=MAX_PIVOTS, log=True)
    i, j = np.nonzero(P)
    v = log["v"] * unit
    plan = Plan(i, j, P[i, j], v=v)
    gap = max(float(plan.mass @ C[i, j] - (a @ (C - v).min(1) + b @ v)), 0.0)
    return replace(plan, gap=gap + plan.mass_error(a, b) * largest)
