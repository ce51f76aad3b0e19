"""The site: what its pages promise is there and runs. Marked `docs`: `make test-docs`, with the extra `docs`."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import browser
import pytest
import typer

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
FENCE = r"(?:^|\n)```(\w*)\n(.*?)\n```(?=\n|$)"
COMMANDS = {  # lines of shell blocks that are not run as written: what is added to them, or None
    "make demo": None,
    "make test": None,
    "source .venv/bin/activate": None,
    "python -m attn_flow.experiments.encoders antiberty": None,  # the network
    "attn-flow probe bert-base-uncased": None,  # the network
}


def test_every_command_has_its_python() -> None:
    from attn_flow.cli.app import app

    table = (ROOT / "docs/commands.md").read_text()
    group = typer.main.get_command(app)
    for name in group.commands:  # type: ignore[attr-defined]
        assert re.search(rf"^\| `attn-flow {name}` \|", table, flags=re.MULTILINE), name
    for path in re.findall(r"`(attn_flow(?:\.\w+)+)", table):
        *home, last = path.split(".")
        if last == "NAME":
            continue
        assert _exists(home, last), path


def test_commands_in_the_text_have_the_options_they_name() -> None:
    from attn_flow.cli.app import app

    group = typer.main.get_command(app)
    commands = group.commands.items()  # type: ignore[attr-defined]
    known = {name: {o for p in command.params for o in (*p.opts, *p.secondary_opts)} for name, command in commands}
    known["COMMAND"] = set()
    known[""] = {"--install-completion", "--show-completion"}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    seen = 0
    for path in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "experiments/README.md"]:
        for words in re.findall(r"(?:`|\n)(attn-flow [^`\n]*)", path.read_text()):
            name = re.match(r"attn-flow (\w*)", words)[1]  # type: ignore[index]
            assert name in known, f"{path.name}: {words}"
            for option in re.findall(r" (--[\w-]+)", words):
                assert option in {*known[name], "--help"}, f"{path.name}: {words}"
            seen += 1
        for target in re.findall(r"`make ([\w-]+)`", path.read_text()):
            assert target in targets, f"{path.name}: make {target}"
    assert seen > 30


def _exists(home: list[str], name: str) -> bool:
    from importlib import import_module

    for cut in range(len(home), 0, -1):
        try:
            thing = import_module(".".join(home[:cut]))
        except ModuleNotFoundError:
            continue
        for part in [*home[cut:], name]:
            thing = getattr(thing, part)
        return True
    return False


def test_names_of_pages_are_small_letters() -> None:
    assert [path.name for path in PAGES] == [path.name.lower() for path in PAGES]


def test_links_of_the_pages_lead_somewhere_in_the_repository() -> None:
    for path in PAGES:
        for address in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
            assert address.startswith("http") or (path.parent / address).exists(), f"{path.name}: {address}"


def test_every_experiment_has_its_figure_in_the_gallery() -> None:
    from attn_flow.experiments import NAMES

    pictures = {path.stem for path in (ROOT / "docs/figures").glob("*.png")}
    assert {name for name in pictures if not name.startswith("report-")} == set(NAMES)


def test_every_figure_of_the_report_is_explained() -> None:
    from attn_flow.probe.findings import QUESTIONS

    shown = re.findall(r"\(figures/report-(\w+)\.png\)", (ROOT / "docs/report.md").read_text())
    assert shown == list(QUESTIONS)
    assert {path.stem for path in (ROOT / "docs/figures").glob("report-*.png")} == {f"report-{name}" for name in shown}


@pytest.mark.parametrize("path", sorted((ROOT / "docs/tutorials").glob("*.ipynb")), ids=lambda path: path.stem)
def test_tutorials_hold_small_outputs_without_errors(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    assert path.stat().st_size < 60_000
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert outputs
    assert all(output["output_type"] != "error" and output.get("name") != "stderr" for output in outputs)


# --- the rest needs the extra `docs` -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a broken link, an unknown name or a page outside the menu is an error."""
    pytest.importorskip("mkdocs", reason="needs the extra `docs`: make test-docs")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


class Addresses(HTMLParser):
    """Where a page points to, what it loads, and the places in it that may be pointed to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.places |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if "src" in found or (tag == "link" and found.get("rel") in ("stylesheet", "icon", "preconnect", "preload")):
            self.loads.append(found.get("src") or found["href"])


@pytest.mark.docs
def test_links_lead_somewhere_and_nothing_is_fetched(site: Path) -> None:
    pages = {path: Addresses(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 25
    for path, found in pages.items():
        assert not [address for address in found.loads if re.match(r"(https?:)?//", address)], path
        for address in found.links:
            if re.match(r"https?://|mailto:|data:", address):
                continue
            file, place = urldefrag(unquote(address))
            target = (path.parent / file).resolve() if file else path
            assert target.exists(), f"{path.name}: {address}"
            if place and target.suffix == ".html" and target in pages:
                assert place in pages[target].places or place == "__nav", f"{path.name}: {address}"


@pytest.mark.docs
def test_formulas_are_drawn_and_inner_products_are_no_tags(site: Path) -> None:
    pages = {path.name: path.read_text() for path in site.glob("*.html")}
    assert pages["index.html"].count("<math") >= 4
    assert not [name for name, text in pages.items() if 'class="arithmatex"' in text]
    assert pages["theory.html"].count("<math") >= 100
    assert not [name for name, text in pages.items() if "<mo>&#x02016;</mo>" in text or 'mathvariant="script' in text]
    assert "logits beta &lt;G x, y&gt; and values" in (site / "api/attention.html").read_text()


@pytest.mark.docs
@pytest.mark.browser
@browser.needed
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_pages_open_without_errors(scheme: str, width: int, site: Path) -> None:
    """All of them, in both themes, at a desk's width and a phone's: nothing sticks out, every picture is drawn."""
    shown = {}
    for page in sorted(set(site.rglob("*.html")) - {site / "404.html"}):
        if page.name.startswith(("seen-", "page.", "frame.", "frames.")):
            continue
        text = page.read_text()
        if "md-content" not in text:  # the playground, which tests/pages opens
            continue
        turned = text.replace('data-md-color-scheme="default"', f'data-md-color-scheme="{scheme}"')
        assert turned != text or scheme == "default"
        copy = page.with_name(f"seen-{scheme}-{page.name}")
        copy.write_text(turned)
        shown[str(page.relative_to(site))] = str(copy.relative_to(site))
    frames = "".join(f'<iframe src="{copy}" title="{page}"></iframe>' for page, copy in shown.items())
    style = "<style>body { margin: 0 } iframe { border: 0; width: 100%; height: 900px }</style>"
    (site / "frames.html").write_text(f"<html><body>{style}{frames}</body></html>")
    script = """
      const frames = [...document.querySelectorAll('iframe')], seen = {};
      for (const frame of frames) {
        for (let i = 0; i < 100 && frame.contentDocument?.readyState !== 'complete'; i++)
          await new Promise(done => setTimeout(done, 100));
        const page = frame.contentDocument, words = page.querySelector('.md-content p, .md-content td');
        seen[frame.title] = {
          fits: page.documentElement.scrollWidth <= frame.contentWindow.innerWidth + 1,
          broken: [...page.images].filter(image => image.complete && !image.naturalWidth).length,
          light: +frame.contentWindow.getComputedStyle(words).color.match(/\\d+/)[0],
        };
      }
      return {seen};
    """
    seen = browser.look(site / "frames.html", script, site, width)["seen"]
    assert seen.keys() == shown.keys()
    for name, found in seen.items():
        assert found["fits"], name
        assert found["broken"] == 0, name
        assert (found["light"] > 127) == (scheme == "slate"), name  # words are light on dark, and dark on light


@pytest.mark.docs
@pytest.mark.browser
@browser.needed
def test_search_works_from_the_disk(site: Path) -> None:
    page = site / "seen-index.html"
    page.write_text(re.sub(r"\s*</body>\s*</html>\s*$", "</body></html>", (site / "index.html").read_text()))
    script = """
      const box = document.querySelector('input[name=query]');
      box.focus(); box.value = 'resolved';
      for (const kind of ['focus', 'keyup', 'input']) box.dispatchEvent(new Event(kind, {bubbles: true}));
      for (let i = 0; i < 60 && !document.querySelector('.md-search-result__item'); i++)
        await new Promise(done => setTimeout(done, 100));
      return {results: [...document.querySelectorAll('.md-search-result__item')].length};
    """
    assert browser.look(page, script, site)["results"] > 0


@pytest.mark.docs
@pytest.mark.parametrize("path", sorted((ROOT / "docs/tutorials").glob("*.ipynb")), ids=lambda path: path.stem)
def test_tutorials_run(path: Path) -> None:
    pytest.importorskip("nbclient")
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from executing import executed
    finally:
        sys.path.pop(0)
    assert executed(path).cells


def shell_lines() -> list[tuple[str, str]]:
    """(page, line) of the shell blocks."""
    fences = [(path.name, fence) for path in PAGES for fence in re.findall(FENCE, path.read_text(), flags=re.DOTALL)]
    return [(page, line) for page, (language, block) in fences if not language for line in block.splitlines()]


@pytest.mark.docs
def test_shell_blocks_run(tmp_path: Path) -> None:
    """One after another in one folder, as a reader does. (Python blocks: tests/test_doctests.py.)"""
    from attn_flow.experiments.encoders import fetched

    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    ran = 0
    for page, line in shell_lines():
        more = next((COMMANDS[start] for start in COMMANDS if line.startswith(start)), "")
        if more is None or ("antiberty" in line and fetched("antiberty") is None):
            continue
        words = re.sub("^(attn-flow|python -m attn_flow)", f"{sys.executable} -m attn_flow", line) + more
        done = subprocess.run(words, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{page}: {words}\n{done.stderr}"
        ran += 1
    assert ran >= 7
