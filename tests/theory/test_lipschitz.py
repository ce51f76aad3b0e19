"""Lipschitz constants of attention against automatic differentiation, and bounds that hold and are not idle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attn_flow import Attention
from attn_flow.theory.lipschitz import lipschitz_bound, local_lipschitz


@pytest.mark.parametrize("beta", [0.0, 0.7, 6.0])
def test_local_constant_is_the_norm_of_the_jacobian_of_the_drift(beta: float) -> None:
    rng = np.random.default_rng(int(beta))
    x, G, V = rng.normal(size=(7, 3)), rng.normal(size=(3, 3)), rng.normal(size=(3, 3))
    drift = Attention.from_matrices(torch.from_numpy(G), torch.from_numpy(V), beta=beta).drift
    jacobian = torch.autograd.functional.jacobian(drift, torch.from_numpy(x)).reshape(21, 21)
    assert local_lipschitz(x, beta, G, V) == pytest.approx(float(torch.linalg.matrix_norm(jacobian, 2)), rel=1e-9)


def test_bounds_hold_for_clouds_in_a_ball() -> None:
    rng = np.random.default_rng(0)
    for n in (1, 2, 5, 20):
        for beta in (0.1, 1.0, 5.0):
            x, G, V = rng.normal(size=(n, 3)), rng.normal(size=(3, 3)), rng.normal(size=(3, 3))
            radius = np.linalg.norm(x, axis=1).max()
            a, size = beta * np.linalg.norm(G, 2) * radius**2, np.linalg.norm(V, 2)
            measured = local_lipschitz(x, beta, G, V)
            assert measured <= lipschitz_bound(a, n, size) * (1 + 1e-12)
            assert lipschitz_bound(a, n, size) <= lipschitz_bound(a, None, size)


def test_the_constant_grows_like_the_root_of_n_as_in_the_bound() -> None:
    """All tokens look at one: a perturbation of it moves all of them."""
    for n in (10, 40, 160):
        x = np.zeros((n, 2))
        x[:, 0], x[0] = 0.5, (1.0, 0.0)
        assert local_lipschitz(x, beta=60.0) > 0.9 * np.sqrt(n)


def test_arguments() -> None:
    with pytest.raises(ValueError, match=r"expected \(n, d\)"):
        local_lipschitz(np.ones(3), 1.0)
    with pytest.raises(ValueError, match="a = -1"):
        lipschitz_bound(-1.0)
