"""An argument of the right kind and a wrong value, of every public function, one at a time: refused in a sentence, or
taken with a meaning that stands in TAKEN, and then no NaN comes out of it. Never an error of somebody else's, and
never an answer that is waited for in vain.
"""

import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from public_calls import EXAMPLES
from wrong_values import not_numbers, trials

LONGEST = 30  # processor seconds of one call

POSITIVE, SHARE = {"0.5", "1e308", "5e-324", "10**12"}, {"0.5", "5e-324"}
EXTREME, SIGNS = {"1e-320", "1e300", "1e160", "1e-170"}, {"zeros", "negative"}
REALS, COUNTS = {"torch.float16", "torch.float32"}, {"torch.int64", "torch.uint8"}
ARRAYS, ORDER = {"two numbers", "a table"}, {"the first twice", "backwards"}
ENTRIES, NONE = {"-1 in it", "10**12 in it"}, {"an empty list", "an empty tuple"}
CLOUDS = {"one token", "all tokens at one place", "all tokens at 0"}
# Arguments, what some function takes for them, and what it means there.
MEANINGS: tuple[tuple[str, set[str], str], ...] = (
    (
        "G",
        EXTREME | SIGNS | REALS | ORDER | {"a batch of two", "a table"},
        "matrices of any size and sign; leading axes are heads or a batch; a table is a matrix",
    ),
    ("K O", EXTREME | SIGNS, "weights of any size and sign"),
    ("M alpha beta_start blur ceiling clip end horizon lr r0 radius start", POSITIVE, "any positive, finite number"),
    ("Q", EXTREME | SIGNS | REALS | {"a batch of two", "elsewhere"}, "weights of any size and dtype, and on meta"),
    ("V", EXTREME | SIGNS | ORDER, "matrices of any size and sign"),
    ("a kappa_1 kappa_slope_1 lam_p rho", POSITIVE | ARRAYS | {"-1", "0"}, "any number, or an array of them"),
    (
        "attention",
        {
            "G = 0",
            "V = 0",
            "a batch of 7",
            "at beta = 0",
            "at beta = inf",
            "causal",
            "in float32",
            "of 1e200",
            "of another width",
            "sinkhorn",
            "two heads",
            "unnormalised",
            "without itself",
        },
        "any attention that the question has an answer for",
    ),
    (
        "axes",
        {"1e-170", "1e160", "1e300", "narrower", "negative", "torch.float32"},
        "a lower dimension, either side, any size that has an inverse",
    ),
    ("axis", {"negative", "torch.float32", "wider"}, "a direction, either side, of any d >= 3"),
    (
        "b beta_factor distance gamma hazard p rise s",
        POSITIVE | ARRAYS | {"0"},
        "zero, any positive number, or an array of them",
    ),
    ("basis", EXTREME | {"narrower", "negative", "torch.float32"}, "a smaller basis, of any length"),
    (
        "batch d entries longest n_minus n_plus n_projections outputs resamples reservoir vocabulary",
        {"10**12"},
        "more than there is: all of it; sizes that nothing is made of yet",
    ),
    ("beta", POSITIVE | ARRAYS | {"-1", "0", "inf"}, "0 to inf; closed forms of both signs too"),
    ("cap h largest rtol tol", POSITIVE | {"inf"}, "inf is none, or no limit"),
    ("centre query_bias", EXTREME | SIGNS | {"torch.float32"}, "anywhere"),
    (
        "cloud",
        CLOUDS
        | {"a batch of 7", "a batch of two", "another row", "in float32", "negative", "of 1e-320", "of another width"},
        "laws of few or equal tokens, and batches",
    ),
    ("components fields paths", {"backwards"}, "in any order"),
    ("context", CLOUDS | {"a batch of 7", "of 1e-320", "of 1e200"}, "few or equal tokens, and batches"),
    ("cosine", SHARE | {"-1", "0"}, "-1 to 1"),
    ("cosines", SHARE | ARRAYS | {"-1", "0"}, "-1 to 1"),
    ("cov", EXTREME | {"a batch of two", "zeros"}, "0 is a point"),
    ("dense dense_high_dimension shortlist", POSITIVE | {"0", "10**30", "inf"}, "a limit: 0 for never, inf for always"),
    ("diffusion", SHARE | {"0", "10**12"}, "0 is none"),
    ("dropout ffn warmup", {"0"}, "0 is none"),
    ("dtype", {"torch.float16"}, "half precision, where tokens are only made"),
    ("every patience sinkhorn_seconds", POSITIVE | {"0", "inf"}, "0 for at once, inf for never"),
    ("folder", {"a word of control", "an unknown word"}, "any name that the system takes"),
    ("g", EXTREME | SIGNS | REALS | {"a batch of two", "another row", "elsewhere"}, "queries of any size"),
    ("gain", {"elsewhere", "narrower", "negative", "torch.float64", "wider"}, "of either sign and any width"),
    ("gap rho0", SHARE | ARRAYS | {"0"}, "0 to its end"),
    ("gap_end phi phi_end", SHARE | ARRAYS, "inside an open interval"),
    ("held_out tail", {"0.5"}, "a share"),
    ("index", {"-1", "0"}, "from the end, as in Python"),
    (
        "inputs",
        {"10**12", "a batch of two", "an empty batch", "another row", "narrower", "no rows", "wider"},
        "empty batches, as torch's own modules take them",
    ),
    ("k seed steps", {"0", "10**12"}, "0 is one of them"),
    ("kappa noise sigma weight_decay", POSITIVE | {"0"}, "0 is none"),
    ("labels words", NONE | {"backwards"}, "without labels the classes are characters"),
    ("lam", POSITIVE | ORDER | ENTRIES | {"0"}, "0 is the flat memory; eigenvalues in any order"),
    ("layers", ORDER | {"-1", "-1 in it", "0"}, "from the end, as in Python"),
    ("limit", {"stationary"}, "where every direction rests"),
    ("logits m0 values", ORDER | ENTRIES, "in any order"),
    ("m theta", POSITIVE | ORDER | ENTRIES | {"-1", "0"}, "any numbers, in any order"),
    (
        "mask",
        REALS | COUNTS | {"a batch of two", "one True", "torch.float64"},
        "numbers with 1 = attend, as encoders have them, in modules",
    ),
    ("mask_x mask_y", {"a batch of two", "one True"}, "one token"),
    ("mass min_mass scaling", SHARE, "a share"),
    ("masses", ORDER | {"10**12 in it"}, "of any total"),
    ("max_steps", {"10**12", "10**30", "1e308", "inf"}, "no limit"),
    ("max_unknown merge_tol shrinkage truncation", SHARE | {"0"}, "a share, or none"),
    (
        "mean",
        EXTREME | SIGNS | REALS | {"a batch of two", "elsewhere", "narrower"},
        "anywhere, where the law need not lie on a sphere",
    ),
    ("n", {"10**12", "1e308", "backwards"}, "as large as asked, where nothing is made of that size"),
    (
        "path",
        {"backwards", "in float32", "of another width", "one time", "one token", "zeros"},
        "few times and tokens, as they come",
    ),
    ("query", SIGNS | {"1e-170", "1e-320"}, "of any size that attention has logits for"),
    ("reference", CLOUDS | {"in float32", "of 1e-320", "of 1e200"}, "any law to compare with"),
    ("sees", EXTREME | {"a batch of two", "another row", "elsewhere", "zeros"}, "counts of any size, 0 for nothing"),
    (
        "t",
        POSITIVE
        | EXTREME
        | SIGNS
        | REALS
        | COUNTS
        | ORDER
        | ENTRIES
        | {"-1", "0", "a batch of two", "elsewhere", "narrower", "wider"},
        "times before 0, and arrays of arguments, in closed forms; standardised logits",
    ),
    ("texts vertices", ORDER, "in any order, repeated"),
    ("times", ENTRIES, "any that increase"),
    ("tolerance", {"0.5", "10**12", "1e308", "inf"}, "inf accepts all"),
    ("towards", POSITIVE | {"-1", "0"}, "any angle"),
    ("transient", {"0", "5e-324"}, "none"),
    ("u", ARRAYS | {"0.5"}, "inside (0, 1]"),
    ("v", SHARE | {"-1", "0", "10**12"}, "any number"),
    ("value_bias", EXTREME | SIGNS | {"a batch of two", "torch.float32"}, "anywhere"),
    ("velocity", EXTREME | SIGNS | REALS | {"a batch of two"}, "any speed"),
    (
        "weights",
        EXTREME | REALS | COUNTS | {"a batch of two", "elsewhere", "zeros"},
        "masses of any total and dtype, 0 where there is none",
    ),
    ("weights_x weights_y", EXTREME | REALS | COUNTS | {"a batch of two"}, "masses of any total and dtype"),
    ("where", {"a word of control", "an empty word", "an unknown word", "long"}, "words of errors"),
    (
        "x",
        EXTREME
        | SIGNS
        | REALS
        | ORDER
        | {"a batch of two", "an empty batch", "another row", "elsewhere", "narrower", "torch.uint8", "wider"},
        "tokens of any size where no square or logit leaves the range; ids of 8 bits",
    ),
    (
        "x0",
        {"1e160", "1e300", "a batch of two", "another row", "negative", "torch.float32"},
        "of any length, where directions move",
    ),
    (
        "y",
        EXTREME | SIGNS | REALS | {"a batch of two", "an axis less", "another row", "torch.uint8"},
        "one point; tokens of any size",
    ),
)
TAKEN = {name: labels for names, labels, _ in MEANINGS for name in names.split()}
# NaN that says so: of padding, of tokens that were never candidates, of a path that is kept as it came.
NAN = {"attention_statistics", "settle", "LimitMap.settle", "Trajectory"}


class TooLong(BaseException):
    """Nothing came back."""


@contextmanager
def not_for_ever() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def outcome(call: Callable[[], object]) -> str:
    """ "refused", "taken", or what is wrong."""
    try:
        with warnings.catch_warnings(), not_for_ever():
            warnings.simplefilter("ignore")
            found = call()
    except (ValueError, FloatingPointError, MemoryError, IndexError) as refusal:
        return "refused" if str(refusal).endswith(".") else f"{type(refusal).__name__}: {refusal}"
    except OSError:  # the system's own, of a name it cannot have
        return "refused"
    except TooLong:
        return f"nothing after {LONGEST} s"
    except Exception as raw:
        return f"{type(raw).__name__}: {raw}"
    return "NaN came out" if not_numbers(found) else "taken"


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers")
@pytest.mark.parametrize("name", EXAMPLES)
def test_wrong_values_are_refused_or_mean_something(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = []
    for parameter, label, call in trials(name):
        found = outcome(call)
        if found == "refused" or (name == "Trajectory" and parameter == "x"):
            continue
        if found == "taken" or (found == "NaN came out" and name in NAN):
            found = "" if label in TAKEN.get(parameter, set()) else "was taken"
        if found:
            wrong.append(f"{parameter} = {label}: {found}")
    assert not wrong, "\n".join(wrong)
