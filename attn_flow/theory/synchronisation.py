"""Collapse to one cluster and its rate (Chen, Lin, Polyanskiy, Rigollet, arXiv 2504.14697; also arXiv 2312.10794).

Model: x_i' = P_{x_i} sum_j a_ij x_j on the sphere, with softmax, unnormalised or Sinkhorn weights a_ij.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from attn_flow.base import checks
from attn_flow.theory.domain import Array, integers, reals

KINDS = ("softmax", "unnormalised", "sinkhorn")


def consensus_rate(beta: ArrayLike, kind: str = "softmax") -> Array:
    """Rate c (...) at which distances |x_i - x_j| decay near consensus: e^beta if unnormalised, otherwise 1.

    At consensus all weights are equal, so a deviation u_i obeys u_i' = c (mean of u - u_i). The gap 1 - <x_i, x_j>
    decays at the rate 2c. arXiv 2504.14697.

    >>> consensus_rate([0.5, 1.0], "unnormalised").round(4)
    array([1.6487, 2.7183])
    """
    checks.require_choice("kind", kind, KINDS)
    beta = reals("beta", beta)
    return np.exp(beta) if kind == "unnormalised" else np.ones_like(beta)


def wasserstein_rate(beta: ArrayLike, d: ArrayLike, kind: str = "softmax") -> Array:
    """Decay rate min(c, (d-1) lambda / 2) (...) of W2 to the final cluster, from a density positive at its antipode.

    c is `consensus_rate`. A token near the antipode leaves it at the rate lambda: e^{-beta} if unnormalised, otherwise
    1. At time t a mass e^{-(d-1) lambda t} is still there, at distance O(1). Derived here; arXiv 2504.14697 proves that
    there is an exponential rate.

    >>> wasserstein_rate([0.0, 0.25], 2, "unnormalised").round(4)
    array([0.5   , 0.3894])
    """
    c = consensus_rate(beta, kind)
    escape_rate = 1 / c if kind == "unnormalised" else np.ones_like(c)
    return np.minimum(c, (integers("d", d, 2) - 1) * escape_rate / 2)


def two_atom_rates(p: ArrayLike, beta: ArrayLike, kind: str = "softmax") -> tuple[Array, Array]:
    """Growth rates of a massless token's deviation from e and from -e in the measure p delta_e + (1-p) delta_{-e}.

    The measure is stationary for every p (p = 2/3 in arXiv 2504.14697). Unnormalised: (1-p) e^{-beta} - p e^{beta} at
    e and p e^{-beta} - (1-p) e^{beta} at -e. Softmax divides each by the same expression with a plus sign.

    Args:
        p: mass at e (...), from 0 to 1.
        kind: "softmax" or "unnormalised".

    Returns:
        Rates at e and at -e, each (...); positive means unstable.

    >>> float(two_atom_rates(2 / 3, 0.0)[1].round(4))  # at beta = 0 the small atom is unstable
    0.3333
    """
    checks.require_choice("kind", kind, KINDS[:2])
    p, beta = reals("p", p, 0, 1), reals("beta", beta)
    if kind == "unnormalised":
        return (1 - p) * np.exp(-beta) - p * np.exp(beta), p * np.exp(-beta) - (1 - p) * np.exp(beta)
    with np.errstate(divide="ignore"):
        tilt = (np.log(p) - np.log1p(-p)) / 2
    return -np.tanh(beta + tilt), -np.tanh(beta - tilt)
