"""Experiments on the parts of a layer: their numbers against literal loops, finite differences and simulation."""

import math

import numpy as np
import pytest
import torch

from attn_flow.experiments.encoders import energy_by_layer
from attn_flow.experiments.encoders.minilm_variants import remove_parts
from attn_flow.experiments.papers import random_weights
from attn_flow.hooks import blocks, record
from attn_flow.hooks.demo import tiny_bert

F64 = torch.float64
INPUTS = {"input_ids": torch.tensor([[2, 5, 9, 6, 14, 11, 3]])}


@pytest.fixture(scope="module")
def bert():
    """A tiny BERT with biases, gains and larger weights drawn anew: at its start they are zero, one and tiny."""
    model = tiny_bert()[0].double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "encoder" in name:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator, dtype=F64))
    return model


# --- parts taken out -------------------------------------------------------------------------------------------------


def test_parts_are_removed_and_put_back(bert):
    before = record(bert, INPUTS).x
    points = ["hook_in", "attn.hook_out", "hook_resid_mid", "mlp.hook_out", "hook_out"]
    block = blocks(bert)[1]
    norm1, norm2 = block["attention.output.LayerNorm"], block["output.LayerNorm"]
    with torch.no_grad():
        with remove_parts(bert, "ffn"):
            x, a, m, f, y = record(bert, INPUTS, points=[f"blocks.1.{p}" for p in points]).x
        torch.testing.assert_close(m, norm1(x + a))
        torch.testing.assert_close(y, norm2(m))
        with remove_parts(bert, "shuffled ffn"):
            x, a, m, f, y = record(bert, INPUTS, points=[f"blocks.1.{p}" for p in points]).x
        own = block["output.dense"](block["intermediate"](m))[0]
        is_same = torch.cdist(f[0], own) < 1e-9  # every token has the part of one other
        assert (is_same.sum(0) == 1).all()
        assert (is_same.sum(1) == 1).all()
        assert not is_same.diagonal().any()
    assert torch.equal(record(bert, INPUTS).x, before)
    with pytest.raises(ValueError, match="part 'norms', expected 'ffn'"), remove_parts(bert, "norms"):
        pass
    assert torch.equal(record(bert, INPUTS).x, before)


# --- energy ----------------------------------------------------------------------------------------------------------


def test_energy_is_the_literal_sum():
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    for cloud, found in zip(x.tolist(), energy_by_layer.energy_of(x).tolist()):
        u = [np.array(token) / np.linalg.norm(token) for token in cloud]
        pairs = [math.exp(energy_by_layer.BETA * float(u[i] @ u[j])) for i in range(5) for j in range(5) if i != j]
        assert found == pytest.approx(math.log(sum(pairs) / len(pairs)) / energy_by_layer.BETA, rel=1e-6)


def test_changes_are_those_of_attention_then_ffn():
    attention, ffn = energy_by_layer.changes([[0.0], [1.0], [0.5], [2.5], [2.0]])
    assert attention.tolist() == [[1.0], [2.0]]
    assert ffn.tolist() == [[-0.5], [-0.5]]


# --- random weights --------------------------------------------------------------------------------------------------


def test_the_kernel_of_gelu_is_its_mean_over_draws():
    rng = np.random.default_rng(0)
    z = rng.standard_normal((2, 400_000))
    for rho, variance in ((0.5, 0.15), (-0.3, 2.0), (1.0, 1.0)):
        u = math.sqrt(variance) * z[0]
        v = math.sqrt(variance) * (rho * z[0] + math.sqrt(1 - rho**2) * z[1])
        product = np.asarray(torch.nn.functional.gelu(torch.tensor(u)) * torch.nn.functional.gelu(torch.tensor(v)))
        error = product.std() / math.sqrt(len(product))
        assert abs(float(random_weights.gelu_kernel(np.array(rho), variance)) - product.mean()) < 4 * error


def test_one_part_is_a_gaussian_field_and_a_norm():
    """Two tokens, kernel .04 (1 + rho)/2: mean and spread of their cosine over draws of the field."""
    d, rho, draws = random_weights.D, 0.3, 4000
    kernel = lambda r: 0.04 * (1 + np.asarray(r)) / 2
    n = random_weights.TOKENS
    C = np.full((n, n), rho) + (1 - rho) * np.eye(n)
    cosine, variance = random_weights.one_part(C, np.zeros((n, n)), kernel, common=True)
    rng = np.random.default_rng(0)
    x, y = np.zeros(d), np.zeros(d)
    x[0], y[:2] = 1.0, (rho, math.sqrt(1 - rho**2))
    root = np.linalg.cholesky(np.array([[kernel(1.0), kernel(rho)], [kernel(rho), kernel(1.0)]]) / d)
    noise = np.einsum("ab,nbd->nad", root, rng.standard_normal((draws, 2, d)))
    a, b = x + noise[:, 0], y + noise[:, 1]
    found = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    # means differ by O(kappa/d), variances by O(kappa): 4%
    assert abs(found.mean() - cosine[0, 1]) < 4 * found.std() / math.sqrt(draws) + 0.04 / d
    assert found.var() == pytest.approx(variance[0, 1], rel=0.04 + 4 * math.sqrt(2 / draws))


def test_the_baseline_has_no_common_noise():
    n = random_weights.TOKENS
    C = np.full((n, n), 0.5) + 0.5 * np.eye(n)
    together, _ = random_weights.recursion(C, 2)
    alone, _ = random_weights.recursion(C, 2, common=False)
    assert together[2, 0, 1] > 0.5 > alone[2, 0, 1]
    assert np.allclose(np.diagonal(together, axis1=1, axis2=2), 1)
