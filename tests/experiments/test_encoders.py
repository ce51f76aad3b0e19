"""Fetching encoders: what pip brings is checked, never run, whole or absent, and refused in a sentence otherwise."""

import json
import shutil
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

from attn_flow.cli.console import reporting
from attn_flow.experiments.encoders import packages, zoo
from attn_flow.experiments.encoders.__main__ import encoders
from attn_flow.experiments.encoders.inputs import HEAVY, LIGHT
from attn_flow.experiments.encoders.packages import Archive, download, extract, reason, sha256
from attn_flow.experiments.encoders.tables import TableEncoder, draw_table
from attn_flow.hooks import load_encoder, self_check


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of pip's index: a wheel, and an sdist that leaves a mark if any of its code is run."""
    folder = tmp_path / "shop"
    folder.mkdir()
    with zipfile.ZipFile(folder / "ware-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("ware/weights", "of the wheel")
        wheel.writestr("ware-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: ware\nVersion: 1.0\n")
        wheel.writestr("ware-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("ware-1.0.dist-info/RECORD", "")
    for backend in ("setuptools.build_meta", "hatchling.build"):
        name = backend.partition(".")[0]
        source = tmp_path / f"ore_{name}-2.0"
        (source / "data").mkdir(parents=True)
        (source / "data" / "weights").write_text("of the sdist")
        (source / "setup.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w').close()\n")
        (source / "pyproject.toml").write_text(f"[build-system]\nrequires = []\nbuild-backend = '{backend}'\n")
        (source / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: ore_{name}\nVersion: 2.0\n")
        with tarfile.open(folder / f"{source.name}.tar.gz", "w:gz") as sdist:
            sdist.add(source, source.name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def wheel(shop: Path) -> Archive:
    return Archive("ware", "1.0", sha256(shop / "ware-1.0-py3-none-any.whl"), 1)


def test_a_wheel_is_fetched_once(shop: Path, tmp_path: Path) -> None:
    file = download(wheel(shop), tmp_path / "got", progress=False)
    extract(file, {"ware/weights": "w"}, tmp_path)
    assert (tmp_path / "w").read_text() == "of the wheel"
    archive = wheel(shop)
    shutil.rmtree(shop)
    assert download(archive, tmp_path / "got", progress=False) == file
    file.write_text("damaged")
    with pytest.raises(OSError, match="does not have it"):  # and so it was not taken for whole
        download(archive, tmp_path / "got", progress=False)


@pytest.mark.parametrize("backend", ["setuptools.build_meta", "hatchling.build"])
def test_an_sdist_is_fetched_and_nothing_of_it_is_run(shop: Path, tmp_path: Path, backend: str) -> None:
    name = f"ore_{backend.partition('.')[0]}"
    archive = Archive(name.replace("_", "-"), "2.0", sha256(shop / f"{name}-2.0.tar.gz"), 1, backend)
    file = download(archive, tmp_path / "got", progress=False)
    extract(file, {"data/weights": "w"}, tmp_path)
    assert (tmp_path / "w").read_text() == "of the sdist"
    assert not (tmp_path / "mark").exists()


def test_another_file_under_the_name_is_refused(shop: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has SHA-256 \w{16}\.\.\., expected 0000.*thrown away"):
        download(Archive("ware", "1.0", "0" * 64, 1), tmp_path / "got", progress=False)
    assert not list((tmp_path / "got").iterdir())


def test_an_index_out_of_reach(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    for name, value in {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1", "no_proxy": "*"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OSError, match="index cannot be reached; are you online"):
        download(Archive("ware", "1.0", "0" * 64, 1), tmp_path / "got", progress=False)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2e6))
    with pytest.raises(OSError, match=r"has 2 MB free, ware==1\.0 needs about 3 MB"):
        download(Archive("ware", "1.0", "0" * 64, 1), tmp_path)
    assert "disk is full" in reason("ERROR: [Errno 28] No space left on device")
    assert "ensurepip" in reason("python: No module named pip")
    assert reason("WARNING: x\nERROR: odd\n") == "ERROR: odd"
    assert reason("ERROR: Exception:\nTraceback\nModuleNotFoundError: x\n\n") == "ModuleNotFoundError: x"
    assert reason("") == "pip failed without a word."


def test_members_that_are_missing_are_named(shop: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ware-1\.0-py3-none-any\.whl has no ware/other"):
        extract(shop / "ware-1.0-py3-none-any.whl", {"ware/other": "w"}, tmp_path)


def test_a_fetch_that_was_killed_goes_on(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(archives: Sequence[Path], out: Path) -> None:
        (out / "half").touch()
        if not (tmp_path / "calm").exists():
            raise KeyboardInterrupt
        extract(archives[0], {"ware/weights": "weights"}, out)

    cache = tmp_path / "cache"
    entry = zoo.Entry("ware", "a test", "MIT", (wheel(shop),), write, lambda folder: (torch.nn.Identity(), None))
    monkeypatch.setattr(zoo, "ZOO", {"ware": entry})
    with pytest.raises(KeyboardInterrupt):
        zoo.fetch("ware", cache, progress=False)
    assert zoo.fetched("ware", cache) is None
    assert [p.name for p in cache.iterdir()] == ["downloads"]
    (cache / ".building-ware").mkdir()  # as SIGKILL leaves it
    (cache / "downloads" / ".partial-x").mkdir()
    shutil.rmtree(shop)
    (tmp_path / "calm").touch()
    folder = zoo.fetch("ware", cache, progress=False)  # the archive is there already
    assert (folder / "weights").read_text() == "of the wheel"
    assert json.loads((folder / "card.json").read_text())["sha256"] == {"ware==1.0": entry.archives[0].sha256}
    assert not list((cache / "downloads").iterdir())
    assert zoo.fetched("ware", cache) == folder
    newer = zoo.Entry("ware", "", "MIT", (Archive("ware", "1.1", "0" * 64, 1),), write, entry.load)
    monkeypatch.setattr(zoo, "ZOO", {"ware": newer})
    assert zoo.fetched("ware", cache) is None  # of another version of the table


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.delenv("ATTN_FLOW_CACHE", raising=False)
    assert zoo.cache_folder() == Path("/x/attn_flow/encoders")
    monkeypatch.setenv("ATTN_FLOW_CACHE", "/y")
    assert zoo.cache_folder() == Path("/y")
    assert zoo.cache_folder("/z") == Path("/z")


def test_an_encoder_not_fetched_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_FLOW_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"run `python -m attn_flow.experiments.encoders antiberty` \(99 MB\)"):
        load_encoder("antiberty")
    with pytest.raises(ValueError, match="no encoder 'bert' in the zoo; expected one of minilm"):
        zoo.fetch("bert")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_FLOW_CACHE", str(tmp_path))
    app = typer.Typer()
    app.command()(reporting(encoders))
    rows = json.loads(CliRunner().invoke(app, ["--json"]).stdout)
    assert [row["name"] for row in rows] == list(zoo.ZOO)
    assert all(row["folder"] is None and row["megabytes"] > 0 and row["licence"] for row in rows)
    refused = CliRunner().invoke(app, ["minilm", "bert"])
    assert refused.exit_code == 2
    assert "no encoder 'bert'" in refused.stderr
    assert not list(tmp_path.iterdir())


def test_the_table_pins_every_archive() -> None:
    archives = {archive for entry in zoo.ZOO.values() for archive in entry.archives}
    assert all(len(a.sha256) == 64 and int(a.sha256, 16) >= 0 for a in archives)
    assert len({a.sha256 for a in archives}) == len({a.kept_name for a in archives}) == len(archives)


def test_variable_domains_end_where_the_constant_ones_begin() -> None:
    heavy = "EVQLVESGGGLVQPGGSLRLSCAASGFTFSRYTMSWVRQAPGKGLEWVATISGGGHTYYLDSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYC"
    heavy += "TRGFGDGGYFDVWGQGTLVTVSS"
    light = "IQLTQSPSSLSASVGDRVTITCSASSSVNHMFWYQQKPGKAPKPWIYLTSNLASGVPSRFSGSGSGTDYTLTISSLQPEDFATYYCQQWSGNPWTFGQGTKVEIK"
    found = HEAVY.match(heavy + "ASTKGPSVFPLAPSSKSTSGGTAALGCLV"), LIGHT.match(light + "RTVAAPSVFIFPPSDEQLKSG")
    assert [match and match.group() for match in found] == [heavy, light]
    assert HEAVY.match(light) is None
    assert LIGHT.match(heavy) is None


def test_rows_of_tables_are_tokens_without_order(generator: torch.Generator) -> None:
    model = TableEncoder(layers=2, dim=16, hidden=32).double().eval()
    x, y = draw_table(12, features=4, generator=generator)
    rows = model.rows(x.double(), y).detach()
    z = (x.double() - x.double().mean(0)) / x.double().std(0)
    first = model.encoder.weight[:, :4] @ z[0] * 25 + model.encoder.bias + model.y_encoder.weight[:, 0] * y[0]
    # z is divided by std + 1e-6: off by that share of the features' part
    torch.testing.assert_close(rows[0], first + model.y_encoder.bias, rtol=0, atol=1e-4)
    order = torch.randperm(12, generator=generator)
    torch.testing.assert_close(model(rows[None, order])[0], model(rows[None])[0, order])
    assert all(check.exact for check in self_check(model, {"src": rows[None]}))
    for shape in ((12, 101), (1, 4)):  # too many features, and one row, which has no spread
        with pytest.raises(ValueError, match=rf"x has shape \({shape[0]}, {shape[1]}\).*at least 2 rows and 1 to 100"):
            model.rows(torch.zeros(shape), y[: shape[0]])


def test_a_law_of_tables_is_one_law(generator: torch.Generator) -> None:
    """The means of two large samples by class agree to 6 standard errors; those of another distribution do not."""
    n, features = 4000, 10
    means = []
    for centres in (0, 0, 1):
        x, y = draw_table(n, features, centres=centres, generator=generator)
        means.append(torch.stack([x[y == c].mean(0) for c in range(3)]))
    within = 6 * (2 / (n / 4)) ** 0.5
    assert float((means[0] - means[1]).abs().max()) < within < float((means[0] - means[2]).abs().max())
