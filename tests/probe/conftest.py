"""One probe of the real MiniLM, shared by the tests of this folder: four texts of 100 tokens, every stage and null."""

import pytest

from attn_flow.hooks.demo import minilm, topics
from attn_flow.probe import Probe, probe


@pytest.fixture(scope="session")
def encoder():
    return minilm()


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return [text for text in topics() if len(text) > 900][:5]


@pytest.fixture(scope="session")
def result(encoder, texts) -> Probe:
    with pytest.warns(UserWarning, match="truncated"):
        return probe(*encoder, texts[:4], max_length=100)
