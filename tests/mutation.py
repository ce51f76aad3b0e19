"""Measure whether the tests notice a wrong program: change one expression at a time and run the tests that reach it.

    mutation.py                      100 mutants over attn_flow and hooks
    mutation.py --count 20 --only transport --seed 7

A first run of the suite under coverage.py records which tests execute which line; it is kept in --out as long as no
source or test file changes. Every mutant is then tried in a copy of the project by those tests, the quickest first.
A mutant that they do not notice within LONGEST seconds of tests counts as a survivor. The exit code is 1 if more than
a tenth of the mutants survive.
"""

import argparse
import ast
import copy
import hashlib
import os
import queue
import random
import shutil
import sqlite3
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from coverage.numbits import numbits_to_nums

ROOT = Path(__file__).parent.parent
COPIED = ("attn_flow", "hooks", "experiments", "tests", "pyproject.toml", "README.md")
SELECTED = ["-m", "not slow and not docs and not browser", "-p", "no:randomly", "-W", "ignore"]
WORKERS, LONGEST = 2, 90.0
# Files whose lines run in processes that coverage.py does not see, or whose output is text or a picture.
SKIPPED = ("cli", "pages", "figures", "drawing", "page.py", "progress", "__main__")

OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
COMPARISONS = {ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
OPPOSITES = {"amax": "amin", "max": "min", "maximum": "minimum", "clamp_min": "clamp_max", "any": "all"}
OPPOSITES |= {value: key for key, value in OPPOSITES.items()}


@dataclass(frozen=True)
class Mutant:
    """One changed expression: its file and line, the change in words, the changed text, and the lines to be tested."""

    file: str
    line: int
    change: str
    text: str
    reached_by: range  # tests that execute one of these lines

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.change}"


def replacements(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions that may take the place of this one."""
    if isinstance(node, ast.BinOp):
        if type(node.op) in OPERATORS:
            yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
        yield node.left
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value not in (0, 1):
        yield ast.Constant(2 * node.value)
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Attribute) and node.attr in OPPOSITES:
        yield ast.Attribute(node.value, OPPOSITES[node.attr], node.ctx)


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes except messages, annotations, decorators and the names of axes."""
    if isinstance(node, ast.Raise | ast.JoinedStr) or (
        isinstance(node, ast.keyword) and node.arg in ("dim", "keepdim")
    ):
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from expressions(child)


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of a file. Constants and defaults are computed at import: all tests of their file are tried."""
    raw = path.read_bytes()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree, mutants = ast.parse(raw), []
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    bodies = {line for f in functions for line in range(f.body[0].lineno, f.end_lineno + 1)}
    for node in expressions(tree):
        for new in replacements(node):
            first, last = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            after = f"({ast.unparse(ast.fix_missing_locations(copy.deepcopy(new)))})"
            change = f"{' '.join(raw[first:last].decode().split())} -> {after}"
            text = (raw[:first] + after.encode() + raw[last:]).decode()
            is_in_function = node.lineno in bodies
            lines = range(node.lineno, node.end_lineno + 1) if is_in_function else range(1, len(starts))
            mutants.append(Mutant(path.relative_to(ROOT).as_posix(), node.lineno, change, text, lines))
    return mutants


def copy_project(target: Path) -> Path:
    """A copy of the project that mutants may change."""
    shutil.rmtree(target, ignore_errors=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target / name)
    return target


def run_tests(folder: Path, *arguments: str, seconds: float | None = None) -> int | None:
    """The exit code of pytest in this copy; None if it took too long."""
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", *SELECTED, *arguments]
    with (folder / "output.txt").open("w") as out:
        try:
            return subprocess.run(command, cwd=folder, env=env, stdout=out, stderr=out, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            return None


def record_coverage(out: Path) -> tuple[dict[tuple[str, int], set[str]], dict[str, float]]:
    """The tests that execute each line, and the seconds each test takes."""
    sources = [p for name in COPIED for p in sorted((ROOT / name).rglob("*.py"))]
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()[:16]
    data, times = out / f"coverage-{digest}", out / f"times-{digest}.xml"
    if not times.exists():
        folder = copy_project(out / "coverage")
        print("recording which tests reach which lines (some minutes, once)", flush=True)
        options = ["-n", str(WORKERS), "--cov=attn_flow", "--cov=hooks", "--cov-context=test", "--cov-report="]
        run_tests(folder, *options, f"--junitxml={folder / 'times.xml'}")
        print((folder / "output.txt").read_text().splitlines()[-1])
        shutil.copy(folder / ".coverage", data)
        shutil.copy(folder / "times.xml", times)
    reached: dict[tuple[str, int], set[str]] = {}
    query = "select f.path, c.context, l.numbits from line_bits l join file f on f.id = l.file_id "
    with closing(sqlite3.connect(data)) as database:
        for path, context, bits in database.execute(query + "join context c on c.id = l.context_id"):
            test = context.removesuffix("|run")
            file = Path(path).resolve().relative_to((out / "coverage").resolve()).as_posix()
            if context.endswith("|run"):
                for line in numbits_to_nums(bits):
                    reached.setdefault((file, line), set()).add(test)
    cases = ElementTree.parse(times).iter("testcase")
    seconds = {
        f"{z.get('classname', '').replace('.', '/')}.py::{z.get('name')}": float(z.get("time", 0)) for z in cases
    }
    return reached, seconds


def quickest(tests: set[str], seconds: dict[str, float]) -> list[str]:
    """The quickest tests, as many as run in LONGEST seconds."""
    chosen, total = [], 0.0
    for test in sorted(tests, key=lambda test: seconds.get(test, LONGEST)):
        total += seconds.get(test, LONGEST)
        if chosen and total > LONGEST:
            break
        chosen.append(test)
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of the names of the files")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutants")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", MPLBACKEND="Agg")
    reached, seconds = record_coverage(options.out.resolve())

    files = [p for name in ("attn_flow", "hooks") for p in sorted((ROOT / name).rglob("*.py"))]  # follows no links
    files = [p for p in files if options.only in p.as_posix() and not any(s in p.as_posix() for s in SKIPPED)]
    every = [mutant for path in files for mutant in mutants_of(path)]
    drawn = random.Random(options.seed).sample(every, min(options.count, len(every)))
    folders: queue.Queue[Path] = queue.Queue()
    for k in range(WORKERS):
        folders.put(copy_project(options.out.resolve() / f"copy-{k}"))

    def killed_by_tests(mutant: Mutant) -> bool:
        tests = set().union(*(reached.get((mutant.file, line), set()) for line in mutant.reached_by))
        if not tests:
            return False
        folder = folders.get()
        target = folder / mutant.file
        original = target.read_text()
        target.write_text(mutant.text)
        code = run_tests(folder, "-x", "--tb=no", *quickest(tests, seconds), seconds=5 * LONGEST)
        target.write_text(original)
        folders.put(folder)
        return code != 0

    survivors = []
    with ThreadPoolExecutor(WORKERS) as pool:
        for k, (mutant, killed) in enumerate(zip(drawn, pool.map(killed_by_tests, drawn)), 1):
            print(f"{k}/{len(drawn)} {'killed  ' if killed else 'SURVIVED'} {mutant}", flush=True)
            survivors += [] if killed else [mutant]
    print(f"\n{len(survivors)} of {len(drawn)} mutants survived (seed {options.seed})")
    for mutant in survivors:
        print(f"  {mutant}")
    return int(len(survivors) > 0.1 * len(drawn))


if __name__ == "__main__":
    sys.exit(main())
