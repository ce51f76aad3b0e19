"""Do the tests notice? The package is changed in one place at a time, and the tests that reach the place are run.

    mutation.py                                     the mutants named below, and 3 drawn from every file
    mutation.py --rooms transport --per-file 8      more, of one room; --named none, --seed 1 for others
    mutation.py --only near.py                      of files and named mutants with this in their names
    mutation.py --rooms probe --tests probe/test_stages.py      looked at by these tests alone, which is quicker;
                                                    what they do not notice counts as a survivor

The changed package lives beside --out. torch and pytest are imported once; each mutant is a fork that imports the
changed package and runs the tests which call the changed function, the quickest first, until one fails. A first run
in which functions note their calls says which tests those are. Results are lines of JSON in --out: what was killed is
not run again while its file stays the same, what survived not while the tests stay the same, so a broken run goes on.
It ends with 1 if a named mutant survives.
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
# The tests of each room; those of its neighbours count where they are the ones that look at it.
ROOMS = {
    "averages": ("averages", "attention"),
    "attention": ("attention", "averages", "dynamics/test_fields.py"),
    "dynamics": ("dynamics",),
    "prediction": ("prediction",),
    "transport": ("transport",),
    "observe": ("observe",),
    "measures": ("measures",),
    "probe": ("probe",),
}
ACROSS = ("dynamics/distributed.py",)  # called by processes that the tests start, which nobody notes
EVERYWHERE = ("test_extremes.py", "test_bad_input.py")
CHOSEN: list[str] = []  # tests that were asked for, in the place of the room's
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
    named: bool = False

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


# --- mutants with a name: pieces of proved bounds, each (file, old text, new text) -----------------------------------

NAMED = [
    ("averages/patches.py", "norm(dim=-1).amax(1))", "norm(dim=-1).amax(1) / 2)"),
    ("averages/patches.py", "compute_mode=EXACT) + keys.radius.float()", "compute_mode=EXACT)"),
    ("averages/patches.py", "away, scale * r[:, None])", "away, scale * r[:, None] / 2)"),
    ("averages/patches.py", "+ math.log(bias.shape[1] / tolerance)", "+ math.log(1 / tolerance)"),
    ("averages/patches.py", "found.add_(32 * EPS * size)", "found"),
    ("averages/patches.py", "left_out = tolerance * (left_out", "left_out = tolerance * (0.5 * left_out"),
    ("averages/patches.py", "below.double()) <= 1", "below.double()) <= 2"),
    ("averages/near.py", "math.log(len(k) / (UNSEEN * tolerance))", "math.log(1 / (UNSEEN * tolerance))"),
    ("averages/near.py", "B, scale, (1 - UNSEEN) * tolerance)", "B, scale, tolerance)"),
    ("averages/near.py", "* (-log_sum).exp()).flatten() + UNSEEN * tolerance", "* (-log_sum).exp()).flatten()"),
    ("averages/near.py", "(chosen.left_out[:, None] * (-log_sum).exp())", "(0 * log_sum)"),
    ("averages/fourier.py", "ROUNDING / mass - mass.log()", "-mass.log()"),
    ("averages/fourier.py", "- mass.log().clamp_max(0.0) * uneven", ""),
    ("averages/fourier.py", "_unevenness(norm) + (_unevenness(b) if same else 0.0)", "_unevenness(norm)"),
    ("averages/fourier.py", "    lost += scale * _range(length) * _range(norm)\n", ""),
    ("averages/sinkhorn.py", "tol = eps * (1 + largest)", "tol = 100 * eps * (1 + largest)"),
    ("averages/sinkhorn.py", "delta = (w * (sums - 1).abs()).sum(-1)", "delta = (w * (sums - 1)).sum(-1).abs()"),
    ("averages/sinkhorn.py", "if not error <= tol:", "if not error <= 1e9:"),
    ("averages/dense.py", "ulp = 16 * torch", "ulp = 0 * torch"),
    ("averages/dense.py", "ulp = 16 * torch", "ulp = 1e6 * torch"),
    ("attention/truncated.py", "error += 2 * torch", "error += torch"),
    ("attention/truncated.py", "amax(-1) * p.output_norm(head)", "amax(-1)"),
    ("attention/truncated.py", "amax(-1) * p.output_norm(head)", "mean(-1) * p.output_norm(head)"),
    ("attention/projections.py", "return self.scale * q * k", "return self.scale * q * k / 4"),
    ("dynamics/integrator.py", "velocities, 10 * step.tol", "velocities, 100 * step.tol"),
    ("dynamics/integrator.py", "velocities, 10 * step.tol", "velocities, step.tol"),
    ("dynamics/integrator.py", "taken, size = times[0], 0, min(h, step.largest)", "taken, size = times[0], 0, 1.0"),
    ("dynamics/integrator.py", "taken, size = times[0], 0, min(h, step.largest)", "taken, size = times[0], 0, h"),
    ("dynamics/integrator.py", "size = max(size, grown) if last else grown", "size = grown"),
    ("dynamics/merging.py", "(100 * torch.finfo(x.dtype).eps) ** 2", "0"),
    ("dynamics/merging.py", "(summed(dx * dv) > 0) & (summed", "(summed"),
    ("dynamics/steppers.py", "(self.tol * scale)).amax()", "(self.tol * scale)).mean()"),
    ("dynamics/steppers.py", "norm(dim=-1).clamp_min(1.0)", "norm(dim=-1)"),
    ("dynamics/steppers.py", "(error_before, 1e-30) / error**2)", "(error_before, 1e-30) / error)"),
    ("transport/feasible.py", "lowered = torch.minimum(g, exact)", "lowered = g"),
    ("transport/feasible.py", "(rows * (x * mean).sum(-1)).sum(-1) - product)", "(rows * (x * mean).sum(-1)).sum(-1))"),
    ("transport/feasible.py", " - rounding[:, None]", ""),
    ("transport/entropic.py", "max(high - distance, distance - low)", "min(high - distance, distance - low)"),
    ("transport/candidates.py", "gap=proved + leak(plan, a, b) * _largest(x, y, ground)", "gap=proved"),
    ("transport/candidates.py", "np.minimum(floor, last - rounding)", "np.minimum(floor, last)"),
    ("transport/candidates.py", "np.minimum(floor, last - rounding)", "floor"),
    ("transport/candidates.py", "cost - float(a @ floor + b @ v)", "cost - float(a @ u + b @ v)"),
    ("transport/coupling.py", "gap=gap + leak(plan, a, b) * float(unit)", "gap=gap"),
    ("transport/coupling.py", "gap = max(least - (c_low + k_low * (theta - low)), 0.0)", "gap = 0.0"),
    ("transport/plans.py", "return error <= max(rtol * distance.item()", "return error <= max(error"),
    ("transport/atoms.py", "return X, A, Y, B, moved_x + moved_y", "return X, A, Y, B, moved_x"),
    ("transport/plans.py", "share < 1 else gap ** (1 / p)", "share < 1 else gap"),
    ("transport/plans.py", "-math.expm1(math.log1p(-share) / p)", "share / (2 * p)"),
]  # fmt: skip

# Survivors that change nothing a test could see: (file, pattern of the change, a line's end, and the old line, why).
PATH = "it chooses how the average is computed, not what it is"
SPEED = "it sets how fast or in how much memory, not what"
MARGIN = "a margin or a size to compare with, far from both sides of what it tells apart"
LOOKS = "how a figure looks; what it draws is tested"
TRIES = "how long it tries before it goes on otherwise or refuses; what is returned is proved or converged"
EQUIVALENT: list[tuple[str, str, str]] = [
    ("attention/truncated.py", r"(halved|doubled): (1e15|2) .*\n.*LONGEST", PATH),
    ("attention/drift.py", r"y.stride\(-1\)", SPEED),
    ("attention/multihead.py", r"operator: rotation \* torch.diagonal", "signs are their own inverses"),
    ("averages/sinkhorn.py", r"slice off by one: .*\n.*\[\.\.\., :1\]\)\[1\]", "values whose average is not read"),
    ("attention/drift.py", r"\nAT_ONCE, AT_ONCE_WITH_GRADIENT = ", PATH),
    ("averages/bessel.py", r"doubled: (20|40|400) |halved: 400 ", "more orders than enough; fewer are noticed"),
    ("averages/compiled.py", r"\nLOWEST, FLOOR = ", "finite numbers in the place of -inf, far below all others"),
    ("averages/costs.py", r"(halved|doubled): .*\n    \"\w+\": \(", "a time that was measured: " + PATH),
    ("averages/dense.py", r"\n(BLOCK|SEGMENT) = ", SPEED),
    ("averages/fourier.py", r"\nENTRIES = |doubled: 4 .*\nNEWTON = ", SPEED),
    ("averages/near.py", r"\n(BOUNDS|ENTRIES, MASKED_ENTRIES) = ", SPEED),
    ("averages/near.py", r"\nUNSEEN = ", "how a tolerance is split in two, both of which are counted"),
    ("averages/patches.py", r"\n(SIZE|SAMPLED|CORNERS|UNCOUNTED|HALVINGS) = ", SPEED),
    ("averages/sinkhorn.py", r"\n(STEPS, PATIENCE|WARM_RANGE, WARM_ERROR|SLOW|RIDGE|CONJUGATE_STEPS.*) = ", TRIES),
    ("averages/sinkhorn.py", r"\nDENSE = ", SPEED),
    (
        "dynamics/merging.py",
        r"result halved: .*scatter_add\(-1, group, z.sum",
        "both sides of every comparison are halved",
    ),
    ("dynamics/continuity.py", r"(halved|doubled): 0\.01 ", "the first step tried; errors are held to tol either way"),
    ("dynamics/kicks.py", r"(halved|doubled): 100 ", MARGIN),
    (
        "dynamics/merging.py",
        r"(halved|doubled): .*\n.*form = torch\.randint",
        "another random form tells cells apart too",
    ),
    ("dynamics/particles.py", r"max\(2 \* times", "an estimate of memory"),
    ("measures/von_mises_fisher.py", r"(halved|doubled): .*\n.*close = \(b", "both formulas hold where one takes over"),
    ("measures/mixture.py", r"names\[:6\]", "the length of a repr"),
    ("observe/quantities.py", r"x\[\.\.\., None, :, :1\]", "values whose average is not read"),
    ("prediction/certificate.py", r"JOINT", SPEED),
    ("prediction/certificate.py", r"size = float\(torch.linalg.matrix_norm\(cold.values", MARGIN),
    ("prediction/certificate.py", r"(halved|doubled): 10 ->", MARGIN),
    ("prediction/certificate.py", r"(halved|doubled): 1e-12 ", MARGIN),
    ("prediction/finite_n.py", r"(halved|doubled): 16 ", MARGIN),
    ("prediction/rates.py", r"halved: 2 -> \(1\)\n.*tol.* \* np\.linalg\.norm\(", "another norm to compare with"),
    ("prediction/requirements.py", r"(halved|doubled): 1e-9 ", MARGIN),
    ("prediction/spectral.py", r"halved: 2 -> \(1\)\n.*size.*np\.linalg\.norm\(M, 2\)", "another norm to compare with"),
    ("prediction/spectral.py", r"distance <= max\(tol \* size, _rounding", MARGIN),
    ("probe/figures.py", r"set_yticks|set_xticks", "where a figure has its ticks"),
    ("probe/figures.py", r"(halved|doubled): .*\n.*(figsize|lw=|alpha=|ms=|lim=|set_ylim|fontsize|shrink)", LOOKS),
    ("probe/figures.py", r"figsize=|set_ylim\(|xticks=range|ncols=2|linspace\(0, 0.85", LOOKS),
    ("probe/figures.py", r"TYPE_CHECKING", "names for annotations alone"),
    ("probe/page.py", r"TYPE_CHECKING", "names for annotations alone"),
    ("probe/page.py", r"(halved|doubled): .*\n.*(dpi=|\"size\":|\"duration\":|\"x\": 0.02|\"eye\":)", LOOKS),
    ("probe/nulls.py", r"% 2 == 0", "the two halves of the queries change their names"),
    ("probe/nulls.py", r"text \+ 1 -> \(text - 1", "another text is another one, before or after"),
    ("probe/quantised.py", r"(halved|doubled): 1e-20 ", MARGIN),
    ("probe/quantised.py", r"(halved|doubled): 1e-30 ", "it keeps 0 out of a logarithm; what is there is masked or 0"),
    ("transport/atoms.py", r"\nLEADERS = ", SPEED),
    ("transport/batched.py", r"\nENTRIES = ", SPEED),
    ("transport/candidates.py", r"\n(DENSE|BLOCK|CANDIDATES|ENTRIES) = ", SPEED),
    ("transport/candidates.py", r"\n(ROUNDS|COOLINGS, SWEEPS, COOLER) = ", TRIES),
    ("transport/candidates.py", r"(factor dropped|halved|doubled): .*\n.*< -allowed / 8", TRIES),
    ("transport/coupling.py", r"\n(PIVOTS|CUTS) = ", TRIES),
    ("transport/entropic.py", r"\n(ENTRIES|BLOCK) = ", SPEED),
    ("transport/entropic.py", r"\nBLURS = ", TRIES),
    ("transport/feasible.py", r"\nTIGHTEN = ", TRIES),
    ("transport/candidates.py", r"(halved|doubled): 1e-6 ", "what is proved is returned, whatever was aimed at"),
    ("transport/scales.py", r"(halved|doubled): 1e3 ", PATH),
]


# --- mutants drawn by rule -------------------------------------------------------------------------------------------

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


def named_mutants() -> list[Mutant]:
    found = []
    for file, old, new in NAMED:
        text = (ROOT / "attn_flow" / file).read_text()
        if text.count(old) != 1:
            raise SystemExit(f"{file} has {text.count(old)} times {old!r}, expected one: mend the list of mutants.")
        line = text[: text.index(old)].count("\n") + 1
        change = f"{' '.join(old.split())} -> {' '.join(new.split()) or 'nothing'}"
        found.append(Mutant(file, line, change, text.replace(old, new), text, named=True))
    return found


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

            words = [until, "-q", "-p", "no:xdist", "--tb=no", "-m", "not slow and not bench and not docs", *tests]
            code = int(pytest.main(words, plugins=[plugin]))
            told.write_text(json.dumps(answer(code)))
        finally:
            os._exit(code)
    os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what a test started and left
    return json.loads(told.read_text()) if told.exists() else None


def reach(folder: Path, room: str, known: Path, digest: str) -> tuple[dict[str, list[str]], dict[str, float]]:
    """Functions -> tests, and the seconds of every test, as found before or by a run that notes them.

    Tests that fail there (they look at the code itself, as torch.compile does) are left out.
    """
    if known.exists():
        held = json.loads(known.read_text())
        if held["digest"] == digest:
            return held["callers"], held["seconds"]
    sources = {p: p.read_text() for z in ROOMS for p in (folder / "attn_flow" / z).glob("*.py")}
    for path, text in sources.items():
        path.write_text(instrumented(text, f"{path.parent.name}/{path.name}"))
    plugin = Reach()
    try:
        found = forked(folder, tests_of(room, folder), plugin, plugin.answer, 3600, "--maxfail=20")
    finally:
        for path, text in sources.items():
            path.write_text(text)
    if found is None or len(found["failed"]) >= 20:
        print((folder / "output.txt").read_text()[-3000:])
        raise SystemExit("the tests fail without any change; mend them first.")
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


def tests_of(room: str, folder: Path) -> list[str]:
    everywhere = () if room == "probe" else EVERYWHERE  # which do not probe
    looked = CHOSEN or (*ROOMS[room], *everywhere)
    return sorted(f"tests/{z}" for z in looked if (folder / "tests" / z).exists())


def tests_digest(room: str, folder: Path) -> str:
    tests = [folder / z for z in tests_of(room, folder)]
    return sha(*(p.read_text() for z in tests for p in ([z] if z.is_file() else sorted(z.glob("*.py")))))


def judged(mutant: Mutant, folder: Path, out: Path, package: str) -> dict[str, Any]:
    """The mutant's line of the results: killed by which test, or not."""
    room = mutant.file.split("/")[0]
    known = out.with_name(f"reach-{sha(*tests_of(room, folder))}.json")
    callers, seconds = reach(folder, room, known, sha(package, tests_digest(room, folder)))
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
    parser.add_argument("--rooms", nargs="*", default=list(ROOMS), choices=list(ROOMS))
    parser.add_argument("--per-file", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--named", choices=["all", "none"], default="all")
    parser.add_argument("--only", default="")
    parser.add_argument("--tests", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutants" / "results.jsonl")
    asked = parser.parse_args()
    CHOSEN.extend(asked.tests)
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", MPLBACKEND="Agg")
    import hypothesis  # noqa: F401
    import ot  # noqa: F401
    import pytest  # noqa: F401
    import scipy.optimize
    import scipy.spatial  # noqa: F401
    import torch

    torch.set_num_threads(1)
    mutants = named_mutants() if asked.named == "all" else []
    for room in asked.rooms:
        for path in sorted((ROOT / "attn_flow" / room).glob("*.py")):
            every = drawn_from(f"{room}/{path.name}")
            chance = random.Random(f"{asked.seed} {path.name}")
            mutants += chance.sample(every, min(asked.per_file, len(every)))
    mutants = [m for m in mutants if m.file.split("/")[0] in asked.rooms and asked.only in f"{m.where} {m.change}"]
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    before = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    held = {z["key"]: z for z in before}
    results: list[tuple[Mutant, dict[str, Any]]] = []
    folder = asked.out.parent.resolve() / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    os.environ["TORCH_EXTENSIONS_DIR"] = f"{folder}_extensions"  # compiled once, and apart from the package's own
    with asked.out.open("a") as out:
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
                found |= judged(mutant, folder, asked.out, package)
                held[digest] = found
                out.write(json.dumps(found) + "\n")
                out.flush()
            results.append((mutant, found))
            word = "killed  " if found["killed"] else "SURVIVED"
            print(f"{i + 1}/{len(mutants)} {word} {mutant.where} {mutant.change}  [{found['by']}]", flush=True)
    return summary(results)


def summary(results: list[tuple[Mutant, dict[str, Any]]]) -> int:
    """Per room the share that survives, and who; 1 if one with a name does."""
    print("\nroom        mutants  killed  equivalent  survived")
    alive = [m for m, found in results if not found["killed"]]
    for room in ROOMS:
        some = [m for m, _ in results if m.file.startswith(f"{room}/")]
        if not some:
            continue
        left = [m for m in alive if m in some]
        same = [m for m in left if equivalent(m)]
        real = len(left) - len(same)
        share = real / max(1, len(some) - len(same))
        print(f"{room:10} {len(some):8} {len(some) - len(left):7} {len(same):11} {real:9}  {share:.1%}")
    for m in alive:
        print(f"{'named ' if m.named else ''}{m.where} {m.change}  {equivalent(m) or ''}")
    return int(any(m.named and not equivalent(m) for m in alive))


if __name__ == "__main__":
    sys.exit(main())
