import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# One thread for numpy's BLAS as for torch: on a busy machine its threads wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# The same examples in every run: a failure is a change of the code. HYPOTHESIS_RANDOM=1 explores new ones.
settings.register_profile("same", derandomize=True)
settings.load_profile("default" if os.environ.get("HYPOTHESIS_RANDOM") else "same")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
