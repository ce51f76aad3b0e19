"""Do the tests notice? The package is changed in one place at a time, and the tests that reach the place are run.

    mutation.py                                     3 mutants drawn from every file
    mutation.py --packages transport --per-file 8      more, of one package; --seed 1 for others
    mutation.py --only near.py                      of files and changes with this in their names
    mutation.py --packages probe --tests probe/test_stages.py      looked at by these tests alone, which is quicker;
                                                    what they do not notice counts as a survivor

The changed package lives beside --out. torch and pytest are imported once; each mutant is a fork that imports the
changed package and runs the tests which call the changed function, the quickest first, until one fails. A first run
in which functions note their calls says which tests those are. Results are lines of JSON in --out: what was killed is
not run again while its file stays the same, what survived not while the tests stay the same, so a broken run goes on.
It ends with 1 if more than a tenth survives.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import compileall
import contextlib
import copy
import hashlib
import json
import os
import py_compile
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# The tests of each package; those of its neighbours count where they are the ones that look at it.
PACKAGES = {
    "kernels": ("kernels", "attention"),
    "attention": ("attention", "kernels", "dynamics"),
    "dynamics": ("dynamics",),
    "prediction": ("prediction",),
    "transport": ("transport",),
    "observe": ("observe",),
    "measures": ("measures",),
    "nn": ("nn",),
    "theory": ("theory",),
    "base": ("base",),
    "probe": ("probe",),
}
ACROSS = ("base/processes.py",)  # called by processes that the tests start, which are not traced
EVERYWHERE = ("test_bad_input.py",)
CHOSEN: list[str] = []  # tests that were asked for, in the place of the package's
# Seconds of processor time that a mutant's tests may take beyond SLOWER times their own: an endless loop is noticed,
# and a busy machine is not taken for one. What waits for ever is ended after WAITING times as many on the clock.
TIMEOUT, SLOWER, WAITING = 60, 4, 10


@dataclass(frozen=True)
class Mutant:
    file: str  # below attn_flow/
    line: int
    change: str  # in words
    text: str  # of the whole changed file
    original: str

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


# Survivors that change nothing a test could see: (file below attn_flow/, pattern of the change, reason).
EQUIVALENT: list[tuple[str, str, str]] = []

OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
REVERSED = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
EXTREMES = {"amax": "amin", "amin": "amax", "max": "min", "min": "max", "maximum": "minimum", "minimum": "maximum"}
EXTREMES |= {"clamp_min": "clamp_max", "clamp_max": "clamp_min", "any": "all", "all": "any"}


def changes(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """What may stand in the place of an expression, with the change in words."""
    if isinstance(node, ast.BinOp):
        if type(node.op) in OPERATORS:
            yield "operator", ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
        if isinstance(node.op, ast.Add | ast.Sub):
            yield "term dropped", node.left
        if isinstance(node.op, ast.Mult | ast.Div | ast.Pow):
            yield "factor dropped", node.left
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in REVERSED:
        yield "comparison", ast.Compare(node.left, [REVERSED[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and/or", ast.BoolOp(other, node.values)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value not in (0, 1):
        yield "doubled", ast.Constant(2 * node.value)
        yield "halved", ast.Constant(node.value // 2 if isinstance(node.value, int) else node.value / 2)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
        yield "not dropped", node.operand
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield "sign dropped", node.operand
    elif isinstance(node, ast.IfExp):
        yield "condition negated", ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.Attribute) and node.attr in EXTREMES:
        yield "extreme", ast.Attribute(node.value, EXTREMES[node.attr], node.ctx)
    elif isinstance(node, ast.Name) and node.id in ("max", "min") and isinstance(node.ctx, ast.Load):
        yield "extreme", ast.Name(EXTREMES[node.id], node.ctx)


def edges(node: ast.Slice) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    """Off by one: (words, which end, what in its place)."""
    for end in (node.lower, node.upper):
        if end is not None and not isinstance(end, ast.UnaryOp):
            yield "slice off by one", end, ast.BinOp(end, ast.Add(), ast.Constant(1))


def drawn_from(file: str) -> list[Mutant]:
    """All mutants of a file that the rules give."""
    text = (ROOT / "attn_flow" / file).read_text()
    tree = ast.parse(text)
    found = []
    for node in _code(tree):
        options = [(words, node, new) for words, new in changes(node)]
        if isinstance(node, ast.Slice):
            options += list(edges(node))
        if isinstance(node, ast.If | ast.While):
            options.append(("condition negated", node.test, ast.UnaryOp(ast.Not(), node.test)))
        if isinstance(node, ast.FunctionDef) and getattr(node.returns, "id", "") in ("Tensor", "float", "Array"):
            ends = [z.value for z in ast.walk(node) if isinstance(z, ast.Return) and z.value is not None]
            options += [("result halved", z, ast.BinOp(z, ast.Div(), ast.Constant(2))) for z in ends]
        for words, old, new in options:
            before = ast.get_source_segment(text, old)
            after = f"({ast.unparse(ast.fix_missing_locations(copy.deepcopy(new)))})"
            if before is None:
                continue
            changed = _replaced(text, old, after)
            shown = f"{words}: {' '.join(before.split())} -> {' '.join(after.split())}"
            found.append(Mutant(file, old.lineno, shown, changed, text))
    return found


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but messages, annotations, decorators and what only names axes."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.JoinedStr | ast.Raise):
            continue
        if isinstance(node, ast.keyword) and node.arg in ("dim", "dim1", "dim2", "keepdim"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _code(child)


def _replaced(text: str, node: Any, new: str) -> str:
    lines = text.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    raw = text.encode()
    return (raw[:start] + new.encode() + raw[end:]).decode()


# --- running them ----------------------------------------------------------------------------------------------------


class Reach:
    """Which tests call which functions of the package, and how long they take."""

    def __init__(self) -> None:
        self.callers: dict[str, list[str]] = {}
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    def pytest_runtest_setup(self) -> None:
        builtins.reached = set()  # type: ignore[attr-defined]

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.add(report.nodeid)
        if report.when == "teardown" and report.nodeid not in self.failed:
            for key in builtins.reached:  # type: ignore[attr-defined]
                self.callers.setdefault(key, []).append(report.nodeid)

    def answer(self, code: int) -> dict[str, Any]:
        seconds = {name: s for name, s in self.seconds.items() if name not in self.failed}
        return {"callers": self.callers, "seconds": seconds, "failed": sorted(self.failed)}


def instrumented(text: str, file: str) -> str:
    """The same module, whose functions note that they were called."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            note = ast.parse(f"getattr(__import__('builtins'), 'reached', set()).add({key(file, node)!r})").body
            after = int(ast.get_docstring(node) is not None)
            node.body[after:after] = note
    return ast.unparse(ast.fix_missing_locations(tree))


def key(file: str, function: ast.FunctionDef) -> str:
    return f"{file}:{function.lineno}"


class Chosen:
    """Only these tests, the quickest first; and the one that failed."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.failed = seconds, ""

    def pytest_collection(self) -> None:
        """A law that fails is enough: its smallest example, which takes long to find, is not looked for."""
        import hypothesis

        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("noticed", hypothesis.settings(), phases=phases)
        hypothesis.settings.load_profile("noticed")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted((z for z in items if z.nodeid in self.seconds), key=lambda z: self.seconds[z.nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


def forked(folder: Path, tests: list[str], plugin: Any, answer: Any, timeout: int, until: str = "-x") -> Any:
    """answer(pytest's exit code) of pytest on these tests, in a process of its own; None if it was killed."""
    told = folder / "answer.json"
    told.unlink(missing_ok=True)
    for lock in Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/lock"):
        lock.unlink()  # of a compilation that was killed
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.setitimer(signal.ITIMER_PROF, timeout)
        signal.alarm(WAITING * timeout)
        out = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(folder)
        sys.path[:] = [str(folder), *(p for p in sys.path if p not in (str(ROOT), str(ROOT / "tests")))]
        os.environ["PYTHONPATH"] = str(folder)
        code = 99
        try:
            import pytest

            words = [until, "-q", "-p", "no:xdist", "--tb=no", "-m", "not slow and not docs", *tests]
            code = int(pytest.main(words, plugins=[plugin]))
            told.write_text(json.dumps(answer(code)))
        finally:
            os._exit(code)
    os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what a test started and left
    return json.loads(told.read_text()) if told.exists() else None


def reach(folder: Path, package_name: str, known: Path, digest: str) -> tuple[dict[str, list[str]], dict[str, float]]:
    """Functions -> tests, and the seconds of every test, as found before or by a run that notes them.

    Tests that fail there (they look at the code itself, as torch.compile does) are left out.
    """
    if known.exists():
        held = json.loads(known.read_text())
        if held["digest"] == digest:
            return held["callers"], held["seconds"]
    sources = {p: p.read_text() for z in PACKAGES for p in (folder / "attn_flow" / z).glob("*.py")}
    for path, text in sources.items():
        path.write_text(instrumented(text, f"{path.parent.name}/{path.name}"))
    plugin = Reach()
    try:
        found = forked(folder, tests_of(package_name, folder), plugin, plugin.answer, 3600, "--maxfail=20")
    finally:
        for path, text in sources.items():
            path.write_text(text)
    if found is None or not found["seconds"] or len(found["failed"]) >= 20:
        print((folder / "output.txt").read_text()[-3000:])
        raise SystemExit("the tests fail or do not start without any change; mend them first.")
    known.write_text(json.dumps({"digest": digest, **found}))
    return found["callers"], found["seconds"]


def function(mutant: Mutant) -> str | None:
    """The key of the function that holds the change; None for what runs when the module is imported."""
    inner = None
    for node in ast.walk(ast.parse(mutant.original)):  # the inner functions come later
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno <= mutant.line <= (node.end_lineno or 0):
            inner = key(mutant.file, node)
    return inner


def sha(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def tests_of(package_name: str, folder: Path) -> list[str]:
    everywhere = () if package_name == "probe" else EVERYWHERE  # which do not probe
    looked = CHOSEN or (*PACKAGES[package_name], *everywhere)
    return sorted(f"tests/{z}" for z in looked if (folder / "tests" / z).exists())


def tests_digest(package_name: str, folder: Path) -> str:
    tests = [folder / z for z in tests_of(package_name, folder)]
    return sha(*(p.read_text() for z in tests for p in ([z] if z.is_file() else sorted(z.glob("*.py")))))


def judged(mutant: Mutant, folder: Path, out: Path, package: str) -> dict[str, Any]:
    """The mutant's line of the results: killed by which test, or not."""
    package_name = mutant.file.split("/")[0]
    known = out.with_name(f"reach-{sha(*tests_of(package_name, folder))}.json")
    callers, seconds = reach(folder, package_name, known, sha(package, tests_digest(package_name, folder)))
    inside = function(mutant)
    # What runs at import, or once and is kept, is looked at by any of them.
    wanted = set(seconds) if mutant.file in ACROSS else set(callers.get(inside or "", [])) or set(seconds)
    source = folder / "attn_flow" / mutant.file
    began = time.monotonic()
    source.write_text(mutant.text)
    plugin = Chosen({name: seconds[name] for name in wanted})
    try:
        files = sorted({name.split("::")[0] for name in wanted})
        timeout = int(TIMEOUT + SLOWER * sum(plugin.seconds.values()))
        found = forked(folder, files, plugin, lambda code: {"code": code, "by": plugin.failed}, timeout)
    finally:
        source.write_text(mutant.original)
    if found is None:
        outcome = {"killed": True, "by": "the timeout, or a crash"}
    else:
        outcome = {"killed": found["code"] != 0, "by": found["by"] or ("collection" if found["code"] else "")}
    return {"seconds": round(time.monotonic() - began, 1), "tests": len(wanted), **outcome}


def equivalent(mutant: Mutant) -> str | None:
    for file, pattern, why in EQUIVALENT:
        if mutant.file == file and excused(mutant, pattern):
            return why
    return None


def excused(mutant: Mutant, pattern: str) -> bool:
    """Whether the change, or the line after it, is of this pattern."""
    return re.search(pattern, f"{mutant.change}\n{mutant.original.splitlines()[mutant.line - 1]}") is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", nargs="*", default=list(PACKAGES), choices=list(PACKAGES))
    parser.add_argument("--per-file", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--tests", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutants" / "results.jsonl")
    options = parser.parse_args()
    CHOSEN.extend(options.tests)
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", MPLBACKEND="Agg")
    import hypothesis  # noqa: F401
    import ot  # noqa: F401
    import pytest  # noqa: F401
    import scipy.optimize
    import scipy.spatial  # noqa: F401
    import torch

    torch.set_num_threads(1)
    mutants: list[Mutant] = []
    for package_name in options.packages:
        for path in sorted((ROOT / "attn_flow" / package_name).glob("*.py")):
            every = drawn_from(f"{package_name}/{path.name}")
            chance = random.Random(f"{options.seed} {path.name}")
            mutants += chance.sample(every, min(options.per_file, len(every)))
    mutants = [
        m for m in mutants if m.file.split("/")[0] in options.packages and options.only in f"{m.where} {m.change}"
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    before = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    held = {z["key"]: z for z in before}
    results: list[tuple[Mutant, dict[str, Any]]] = []
    folder = options.out.parent.resolve() / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    os.environ["TORCH_EXTENSIONS_DIR"] = f"{folder}_extensions"  # compiled once, and apart from the package's own
    with options.out.open("a") as out:
        for part in ("attn_flow", "hooks", "experiments", "tests"):
            shutil.copytree(ROOT / part, folder / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        # Bytecode that is checked by content: times do not tell two mutants apart.
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folder / "attn_flow", quiet=2, invalidation_mode=mode)
        package = sha(*(p.read_text() for p in sorted((ROOT / "attn_flow").rglob("*.py"))))
        for i, mutant in enumerate(mutants):
            digest, tests = sha(mutant.file, mutant.text), tests_digest(mutant.file.split("/")[0], folder)
            found = held.get(digest)
            if found is None or not (found["killed"] or found["given"] == tests):
                found = {"key": digest, "given": tests, "where": mutant.where, "change": mutant.change}
                found |= judged(mutant, folder, options.out, package)
                held[digest] = found
                out.write(json.dumps(found) + "\n")
                out.flush()
            results.append((mutant, found))
            word = "killed  " if found["killed"] else "SURVIVED"
            print(f"{i + 1}/{len(mutants)} {word} {mutant.where} {mutant.change}  [{found['by']}]", flush=True)
    return summary(results)


def summary(results: list[tuple[Mutant, dict[str, Any]]]) -> int:
    """Print the share of survivors by package, and all survivors; 1 if more than a tenth survives."""
    print("\npackage     mutants  killed  equivalent  survived")
    alive = [m for m, found in results if not found["killed"]]
    for package_name in PACKAGES:
        some = [m for m, _ in results if m.file.startswith(f"{package_name}/")]
        if not some:
            continue
        left = [m for m in alive if m in some]
        same = [m for m in left if equivalent(m)]
        real = len(left) - len(same)
        share = real / max(1, len(some) - len(same))
        print(f"{package_name:10} {len(some):8} {len(some) - len(left):7} {len(same):11} {real:9}  {share:.1%}")
    for m in alive:
        print(f"{m.where} {m.change}  {equivalent(m) or ''}")
    survivors = [m for m in alive if not equivalent(m)]
    return int(len(survivors) > 0.1 * len(results))


if __name__ == "__main__":
    sys.exit(main())
