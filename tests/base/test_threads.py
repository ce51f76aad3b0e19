"""Threads are given back."""

import pytest
import torch

from attn_flow.base.threads import at_most
from attn_flow.observe.quantities import effective_rank


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("asked", "inside"), [(1, 1), (2, 2), (5, 2)])
def test_never_more_than_before_and_given_back(two_threads, asked, inside):
    with at_most(asked):
        assert torch.get_num_threads() == inside
    assert torch.get_num_threads() == 2


def test_given_back_after_an_error(two_threads):
    with pytest.raises(KeyError), at_most(1):
        raise KeyError
    assert torch.get_num_threads() == 2


def test_singular_values_by_one_thread(two_threads, monkeypatch):
    """With two, they took most of the time of all metrics."""
    seen, real = [], torch.linalg.svdvals

    def svdvals(y):
        seen.append(torch.get_num_threads())
        return real(y)

    monkeypatch.setattr(torch.linalg, "svdvals", svdvals)
    effective_rank(torch.eye(3))
    assert (seen, torch.get_num_threads()) == ([1], 2)
