"""How the tests run, whatever the machine. Three variables change it; `make test-anywhere` sets them all.

ATTN_FLOW_TEST_THREADS=2   torch's threads, else one
ATTN_FLOW_TEST_SEED=7      files and the tests in them in another order, and other numbers from the `generator` fixture
HYPOTHESIS_RANDOM=1        new examples for the laws, else the same in every run
"""

import os
import random
import signal
import tempfile
from importlib.metadata import version

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# One thread for numpy's BLAS as for torch: on a busy machine its threads wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# torch.compile keeps its kernels in one folder for all instruction sets, and a kernel of another set may give NaN.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    os.path.join(
        tempfile.gettempdir(),
        f"attn-flow-tests-{os.getuid()}-torch-{version('torch')}-{os.environ.get('ATEN_CPU_CAPABILITY', 'own')}",
    ),
)

import pytest
import torch
from hypothesis import settings

THREADS = int(os.environ.get("ATTN_FLOW_TEST_THREADS", "1"))
SEED = int(os.environ.get("ATTN_FLOW_TEST_SEED", "0"))

torch.set_num_threads(THREADS)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a suite in the background: its processes would ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same examples in every run: a failure is a change of the code. HYPOTHESIS_RANDOM=1 explores new ones.
settings.register_profile("same", derandomize=True)
settings.load_profile("default" if os.environ.get("HYPOTHESIS_RANDOM") else "same")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What it takes to repeat a run that differs from the plain one."""
    kind = "new examples" if os.environ.get("HYPOTHESIS_RANDOM") else "the same examples"
    if SEED or THREADS != 1 or kind == "new examples":
        own = torch.backends.cpu.get_cpu_capability()
        terminalreporter.write_line(f"{own}, {THREADS} thread(s), ATTN_FLOW_TEST_SEED={SEED}, {kind}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if SEED:  # all workers of xdist shuffle alike; a file stays together, as its fixtures are made once
        chance = random.Random(SEED)
        place = {path: chance.random() for path in sorted({item.path for item in items})}
        chance.shuffle(items)
        items.sort(key=lambda item: place[item.path])
    if torch.cuda.is_available():
        return
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
