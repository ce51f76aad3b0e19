"""Collapse to one cluster and its rate (Chen, Lin, Polyanskiy, Rigollet, arXiv 2504.14697; arXiv 2312.10794).

Model: x_i' = P_{x_i} sum_j a_ij x_j on the sphere, V = G = I, with softmax ("softmax"), e^{beta<x,y>}/n
("unnormalised") or doubly stochastic ("sinkhorn") weights a_ij.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from attn_flow.base import checks
from attn_flow.theory.domain import Array, integers, within

KINDS = ("softmax", "unnormalised", "sinkhorn")


def consensus_rate(beta: ArrayLike, kind: str = "softmax") -> Array:
    """c with |x_i - x_j| ~ e^{-ct} near consensus (1 - <x_i,x_j> falls at 2c): 1 for softmax, e^beta unnormalised.

    At consensus every weight is 1/n (e^beta/n), so a deviation obeys u_i' = c (mean u - u_i). arXiv 2504.14697.
    """
    checks.one_of("kind", kind, KINDS)
    beta = within("beta", beta)
    return np.exp(beta) if kind == "unnormalised" else np.ones_like(beta)


def antipode_rate(beta: ArrayLike, kind: str = "softmax") -> Array:
    """lambda with which a massless token leaves the antipode of the cluster: 1 for softmax, e^{-beta} unnormalised.

    The whole mass sits at e and pulls a token at -e with weight 1 (softmax, Sinkhorn) or e^{-beta}. arXiv 2504.14697.
    """
    checks.one_of("kind", kind, KINDS)
    beta = within("beta", beta)
    return np.exp(-beta) if kind == "unnormalised" else np.ones_like(beta)


def wasserstein_rate(beta: ArrayLike, d: ArrayLike, kind: str = "softmax") -> Array:
    """min(c, (d-1) lambda / 2): decay rate of W2(mu_t, Dirac) from a density that is positive at the antipode.

    The mass still within O(1) of the antipode at time t started within e^{-lambda t} of it: e^{-(d-1) lambda t}
    of it is left, each at distance O(1), against W2 ~ e^{-ct} of the rest. arXiv 2504.14697 proves some rate.
    """
    d = integers("d", d, 2)
    return np.minimum(consensus_rate(beta, kind), (d - 1) * antipode_rate(beta, kind) / 2)


def two_atom_rates(p: ArrayLike, beta: ArrayLike, kind: str = "softmax") -> tuple[Array, Array]:
    """Growth rates of one massless token's deviation at e and at -e, for mu = p delta_e + (1-p) delta_{-e}.

    mu is stationary for every p (2/3 and 1/3 in arXiv 2504.14697). Unnormalised: (1-p) e^{-beta} - p e^{beta} at e and
    p e^{-beta} - (1-p) e^{beta} at -e; softmax divides each by the same expression with a plus sign.
    """
    checks.one_of("kind", kind, KINDS[:2])
    p, beta = within("p", p, 0.0, 1.0), within("beta", beta)
    if kind == "unnormalised":
        return (1 - p) * np.exp(-beta) - p * np.exp(beta), p * np.exp(-beta) - (1 - p) * np.exp(beta)
    with np.errstate(divide="ignore"):
        tilt = (np.log(p) - np.log1p(-p)) / 2
    return -np.tanh(beta + tilt), -np.tanh(beta - tilt)
