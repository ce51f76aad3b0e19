"""The package as published: light to import, the wheel complete, README true."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {"attn_flow": "attn_flow", "hooks": "attn_flow/hooks", "experiments": "attn_flow/experiments"}


def test_import_is_light():
    heavy = ("transformers", "matplotlib", "plotly", "typer")
    code = f"import sys, attn_flow; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_version_is_stated_once():
    import attn_flow

    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == attn_flow.__version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    copy = tmp_path_factory.mktemp("source") / "attn_flow"
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in tracked.stdout.split():
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name, follow_symlinks=False)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


def test_wheel_holds_every_module_and_nothing_else(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {"attn_flow/py.typed", "attn_flow/averages/near.cpp"}
    for folder, place in SOURCES.items():
        for path in (ROOT / folder).rglob("*.py"):  # links are not followed
            expected.add(f"{place}/{path.relative_to(ROOT / folder).as_posix()}")
    assert held == expected


def test_wheel_in_a_clean_environment(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True)
    # The dependencies of this environment, without the editable install that lives beside them.
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
    code = "import attn_flow, attn_flow.hooks, attn_flow.experiments; print(attn_flow.hooks.__file__)"
    run = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert str(site) in run.stdout
    command = tmp_path / "venv" / "bin" / "attn-flow"
    version = subprocess.run([command, "--version"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert version.stdout.strip() == "0.1.0"


def readme_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("block", range(len(readme_blocks())))
def test_readme_block_runs(block, tmp_path):
    source = readme_blocks()[block]
    if "compiled" in source and shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    check = "\nassert min(w2) < .6 * w2[0] and w2[-1] > 1.3, w2" if "w2 = " in source else ""
    code = "import torch\ntorch.set_num_threads(1)\n" + source + check
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr


def test_readme_names_only_modules_and_pictures_that_exist():
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"`(attn_flow/[\w/]+(?:\.py)?/?|hooks/|experiments/)`", text):
        assert (ROOT / name).exists(), name
    for picture in re.findall(r"\]\((docs/[\w.]+)\)", text):
        assert (ROOT / picture).exists(), picture


def test_no_foreign_paths():
    """Nothing of the machine it was written on."""
    for path in ROOT.rglob("*"):
        if path.suffix in {".py", ".md", ".toml", ".txt"} and not {".venv", ".venv-compat", "build", "runs"} & set(
            path.parts
        ):
            text = path.read_text(errors="replace")
            assert not any(place in text for place in ("/wo" + "rk/", "/tm" + "p/")), path
