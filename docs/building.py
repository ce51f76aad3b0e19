"""What the site makes itself: formulas as MathML, a page for every notebook and experiment, the list of public names.

mkdocs calls the functions `on_...` (mkdocs.yml, `hooks`). Nothing here imports torch.
"""

from __future__ import annotations

import ast
import html
import json
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
ROWS = 8  # of a table on a page
PLAYGROUND = '<iframe src="playground.html" title="playground" loading="lazy" class="playground"></iframe>'
REPLACED = {  # what the repository shows, and the site in its place
    "<!-- playground -->": PLAYGROUND,
    "(../experiments/README.md)": "(papers.md)",
    "(../attn_flow/__init__.py)": "(api.md)",
}
TAGS = r"(?!/?(?:br|kbd|sub|sup|a|img|div|span|details|summary|figure|figcaption|iframe)\b|https?:|!--)"
PACKAGES = {
    "attention": "Who attends to whom",
    "geometry": "Where tokens live",
    "measures": "Distributions of tokens",
    "dynamics": "How tokens move",
    "prediction": "Where they end",
    "transport": "How far two clouds are",
    "nn": "Trainable modules",
    "hooks": "HuggingFace models",
    "probe": "Four questions about a trained encoder",
    "train": "Small deep stacks",
    "observe": "Quantities of a cloud, events of a path",
    "theory": "Closed forms of the papers",
    "coresets": "Few clusters in place of all keys",
}
INNER_MODULES = ("harmonics", "integrator", "merging")  # of packages that are shown module by module
GROUPS = {  # of the page of the papers
    "Low temperature": "concentration trained_limit hardmax long_context",
    "Clusters": "synchronisation spectral_selection metastability multiscale phase_diagram staircase multi_head",
    "Noise, norms, masks": "noise noisy_threshold random_weights normalisation lost_in_the_middle gaussian",
    "Trained encoders, as a whole": "questions long_inputs mean_field cold_heads temperature_and_length fine_tuning",
    "Trained encoders, layer by layer": "histograms energy_by_layer",
}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are made of something else."""
    from attn_flow.pages.playground import assembled

    pages = {**papers(), **api(), "playground.html": assembled("play.html", "play.js")}
    for notebook in sorted((ROOT / "docs/tutorials").glob("*.ipynb")):
        pages[f"tutorials/{notebook.stem}.md"] = notebook_page(notebook)
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """REPLACED; inner products <x, y> that are no tags; lists and bold headings of a line after one without a blank."""
    for shown, replacement in REPLACED.items():
        markdown = markdown.replace(shown, replacement)

    def change(text: str) -> str:
        text = re.sub(r"^(?![-|>#\s])(.+)\n(?=- |\*\*[^*\n]+\.\*\* )", r"\1\n\n", text, flags=re.MULTILINE)
        return re.sub(rf"<{TAGS}(?=[/A-Za-z|])", "&lt;", text)

    return label_shell(outside_code(markdown, change))


def label_shell(markdown: str) -> str:
    """Fences without a language hold commands: they get a language, so that they look different from output."""
    fence = r"^```(\w*)\n(.*?)^```$"
    return re.sub(fence, lambda m: f"```{m[1] or 'bash'}\n{m[2]}```", markdown, flags=re.DOTALL | re.MULTILINE)


def on_page_content(content: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """TeX to MathML, which browsers draw by themselves; figures open by a click; in tables names may break."""

    def draw(match: re.Match[str]) -> str:
        block = match[1] == "div"
        tex = html.unescape(match[2]).strip().removeprefix("\\[").removeprefix("\\(")
        tex = tex.removesuffix("\\]").removesuffix("\\)")
        drawn = convert(tex, display="block" if block else "inline")
        drawn = drawn.replace("<mo>&#x02016;</mo>", '<mo stretchy="false">&#x02016;</mo>')  # bars as high as letters
        return re.sub(r"(<m[io]>(?:log|dim)</m[io]>)(?=<mi)", r'\1<mspace width="0.17em"></mspace>', drawn)

    content = re.sub(r'<(div|span) class="arithmatex">(.*?)</\1>', draw, content, flags=re.DOTALL)
    figure = r'<p>(<img [^>]*src="(?!data:)([^"]+)"[^>]*>)</p>'
    content = re.sub(figure, r'<p class="figure"><a href="\2">\1</a></p>', content)
    return re.sub(r"<td[ >].*?</td>", lambda cell: breakable(cell[0]), content, flags=re.DOTALL)


def breakable(cell: str) -> str:
    """A cell whose code may break after _ . ( / and commas: on a phone the other columns keep their width."""
    parts = re.split(r"(<code>[^<]*</code>)", cell)
    parts[1::2] = [re.sub(r"(?<=[\w)])([_.(,/])(?=\w)", r"\1<wbr>", code) for code in parts[1::2]]
    return "".join(parts)


def outside_code(markdown: str, change: Any) -> str:
    """`change` applied to what stands neither in a fence, nor in a code span, nor in a formula."""
    kept = r"(^```.*?^```[^\n]*$|`+[^`\n](?:[^`]*?[^`])?`+|\$\$.*?\$\$)"
    parts = re.split(kept, markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))


def experiments() -> dict[str, str]:
    """The docstring of every experiment by its name, in the order of the registry."""
    tree = ast.parse((ROOT / "experiments/__init__.py").read_text())
    lists = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    docstrings = {}
    folders = {"PAPERS": "experiments/papers", "ENCODERS": "experiments/encoders", "MODELS": "experiments"}
    for variable, folder in ((name, folders[name]) for name in folders if name in lists):
        for name in ast.literal_eval(lists[variable]):
            docstrings[name] = ast.get_docstring(ast.parse((ROOT / folder / f"{name}.py").read_text())) or name
    return docstrings


def papers() -> dict[str, str]:
    """A page for every experiment, and one that lists them."""
    pages, rows = {}, {}
    for name, docstring in experiments().items():
        claim, _, rest = docstring.partition("\n")
        text = [f"# {claim.rstrip('.')}\n"]
        if (ROOT / f"docs/figures/{name}.png").exists():
            text.append(f"![Figure of the experiment {name}](../figures/{name}.png)\n")
        text.append(linked(rest.strip().replace("](", "] (")) + "\n")
        text.append(f"Run it yourself:\n\n```\nattn-flow reproduce {name}\n```\n")
        text += claims_table(name)
        pages[f"papers/{name}.md"] = "\n".join(text)
        rows[name] = f"| [{name}](papers/{name}.md) | {linked(claim)} |"
    text = [(ROOT / "experiments/README.md").read_text().partition("\n| ")[0].strip()]
    others = set(rows).difference(*(names.split() for names in GROUPS.values()))
    for title, names in {**GROUPS, "Others": " ".join(sorted(others))}.items():
        listed = [rows[name] for name in names.split() if name in rows]
        if listed:
            text.append("\n".join([f"## {title}\n", "| experiment | result |", "|---|---|", *listed]))
    pages["papers.md"] = "\n\n".join(text) + "\n"
    return pages


def claims_table(name: str) -> list[str]:
    """The first claims of the full run in docs/papers: measured, expected, and where the expected number comes from."""
    path = ROOT / f"docs/papers/{name}.json"
    if not path.exists():
        return []
    claims = json.loads(path.read_text())["claims"]
    rows = ["| claim | measured | expected | source | holds |", "|---|---|---|---|---|"]
    for claim in claims[:ROWS]:
        expected = "" if claim["expected"] is None else f"{claim['expected']:.4g}"
        cells = [claim["claim"].replace("|", "\\|"), f"{claim['value']:.4g}", expected, claim["source"]]
        rows.append(f"| {' | '.join(cells)} | {'yes' if claim['holds'] else 'no'} |")
    more = f"\n[All {len(claims)} claims]({name}.json)." if len(claims) > ROWS else ""
    return ["\n".join(rows) + "\n" + more]


def linked(words: str) -> str:
    """arXiv numbers and pages as links; a page is called by its title."""
    words = re.sub(r"\b(?:arXiv )?(2[3-6]\d\d\.\d{5})\b", r"[arXiv \1](https://arxiv.org/abs/\1)", words)
    return re.sub(r"\bdocs/(\w+\.md)\b", lambda page: f"[{title(page[1])}](../{page[1]})", words)


def title(page: str) -> str:
    return (ROOT / "docs" / page).read_text().partition("\n")[0].lstrip("# ")


def notebook_page(path: Path) -> str:
    """A notebook as a page: its words, its code, and what it printed and drew."""
    text = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            text.append(source)
            continue
        if source.startswith("assert "):  # a check for `make test-docs`
            continue
        text.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            said = output.get("text") or output.get("data", {}).get("text/plain")
            picture = output.get("data", {}).get("image/png")
            if picture:
                text.append(f"![drawn by the code above](data:image/png;base64,{''.join(picture).strip()})")
            elif said and "text/html" not in output.get("data", {}):  # a frame needs the notebook
                text.append(f"```text\n{''.join(said).rstrip()}\n```")
    text.append(f"[This page as a notebook]({path.name}).")
    return "\n\n".join(text) + "\n"


def public_names(path: Path) -> list[str]:
    """`__all__` of a module, or what it defines without an underscore."""
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    kinds = (ast.FunctionDef, ast.ClassDef)
    constants = [ast.unparse(node.targets[0]) for node in tree.body if isinstance(node, ast.Assign)]
    names = [node.name for node in tree.body if isinstance(node, kinds)]
    return [name for name in (*names, *filter(str.islower, constants)) if name.isidentifier() and name[0] != "_"]


def api() -> dict[str, str]:
    """A page for every package, and one that lists them with the names `import attn_flow` gives."""
    pages, listed, links = {}, [], {}
    for package, words in PACKAGES.items():
        place = ROOT / ("hooks" if package == "hooks" else f"attn_flow/{package}")
        text = [f"# attn_flow.{package}: {words[0].lower()}{words[1:]}\n"]
        shown = {}
        source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        for name in public_names(source):
            if not name.isupper():
                text.append(f"::: attn_flow.{package}.{name}\n    options:\n      heading_level: 2\n")
                shown[name] = links[name] = f"api/{package}.md#attn_flow.{package}.{name}"
        for module in [] if shown else sorted(place.glob("[a-z]*.py")):
            names, path = public_names(module), f"attn_flow.{package}.{module.stem}"
            if module.stem not in INNER_MODULES:
                members = "".join(f"        - {name}\n" for name in names)
                text.append(f"::: {path}\n    options:\n      heading_level: 2\n      members:\n{members}")
                shown[module.stem] = f"api/{package}.md#{path}"
                links |= {name: f"api/{package}.md#{path}.{name}" for name in names}
        pages[f"api/{package}.md"] = "\n".join(text)
        addresses = ", ".join(f"[`{name}`]({address})" for name, address in shown.items())
        listed.append(f"## [{words}](api/{package}.md)\n\n`attn_flow.{package}`: {addresses}.")
    names = public_names(ROOT / "attn_flow/__init__.py")
    core = ", ".join(f"[`{name}`]({links[name]})" if name in links else f"`{name}`" for name in names)
    head = "# API\n\nFrom the docstrings; every example in them runs in the tests. `from attn_flow import ...` gives:"
    pages["api.md"] = "\n\n".join([head, core + ".", *listed]) + "\n"
    return pages
