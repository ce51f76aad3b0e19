"""One probe of the real MiniLM, shared by the tests of this folder: eight texts of 32 tokens."""

import pytest

from attn_flow.hooks.demo import minilm, topics
from attn_flow.probe import ProbeResult, probe


@pytest.fixture(scope="session")
def encoder():
    return minilm()


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return [text for text in topics() if len(text) > 900][:8]


@pytest.fixture(scope="session")
def result(encoder, texts) -> ProbeResult:
    with pytest.warns(UserWarning, match="truncated"):
        return probe(*encoder, texts, max_length=32)
