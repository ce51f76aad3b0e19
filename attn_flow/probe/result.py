"""The result of a probe: findings, tables, JSON, files and the report."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attn_flow.base.files import read_tensors, write_json, write_tensors
from attn_flow.base.imports import require_extra
from attn_flow.base.texts import parse_json
from attn_flow.probe.measurements import RECORDS, About, Measurements
from attn_flow.probe.page import write_page

if TYPE_CHECKING:
    from pandas import DataFrame


class ProbeResult(Measurements):
    """What a probe measured. Made by `probe`, or read from a folder by `ProbeResult.load`; see `Measurements`."""

    def __repr__(self) -> str:
        encoder = self.about.encoder
        answers = ", ".join(f"{name}: {finding.verdict or 'numbers'}" for name, finding in self.findings.items())
        return f"ProbeResult({encoder['model']}, {encoder['layers']} layers, {self.about.texts} texts; {answers})"

    def to_frame(self, rows: str = "heads") -> DataFrame:
        """A table for pandas.

        Args:
            rows: "heads" for one row per head (layer, head, exponent b, logit_sd, its two predictions, and what
                describes the head), or "layers" for one row per layer (exponent, p_value and fraction of the limit).
        """
        numbers = {name: finding.numbers for name, finding in self.findings.items()}
        if rows == "heads":
            table: dict[tuple[int, int], dict[str, Any]] = {}
            for name in ("averaging", "temperature"):
                for row in numbers[name].get("heads") or []:
                    table.setdefault((row["layer"], row["head"]), {}).update(row)
            return require_extra("pandas").DataFrame([table[place] for place in sorted(table)])
        if rows != "layers":
            raise ValueError(f"rows = {rows!r}, expected 'heads' or 'layers'.")
        layers = list(range(self.about.encoder["layers"]))
        columns = {"exponent": "averaging", "p_value": "limit", "fraction": "limit"}
        by_layer = {column: numbers[name].get(column) or [None] * len(layers) for column, name in columns.items()}
        return require_extra("pandas").DataFrame({"layer": layers, **by_layer})

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values: `about`, `questions` (verdict, text, numbers), `evolution`. A missing number is None."""
        questions = {name: asdict(finding) for name, finding in self.findings.items()}
        return {
            "about": asdict(self.about),
            "questions": questions,
            "evolution": asdict(self.evolution.finding(self.about.seed)),
        }

    def report(self, folder: str | Path, title: str = "") -> Path:
        """Write report.html, its figures and the numbers into a folder.

        Args:
            folder: is made if it does not exist.
            title: the name of the encoder on the page.

        Returns:
            The path of the page.
        """
        folder = Path(folder)
        (folder / "probe.json").unlink(missing_ok=True)
        page = write_page(self, folder, title)
        self.save(folder)
        return page

    def save(self, folder: str | Path) -> None:
        """Write probe.safetensors and then probe.json: if that is there, all is."""
        folder = Path(folder)
        tensors = {f"{name}.{key}": z for name in RECORDS for key, z in tensors_of(getattr(self, name)).items()}
        write_tensors(tensors, folder / "probe.safetensors", {"key": self.about.key})
        write_json({**self.as_json(), "tokens": self.tokens}, folder / "probe.json")

    @classmethod
    def load(cls, folder: str | Path) -> ProbeResult:
        """Read what `save` or `report` wrote; ValueError if a file is missing or damaged."""
        path = Path(folder) / "probe.json"
        if not path.is_file():
            raise ValueError(f"no finished probe in {folder}: {path} is missing.")
        content = parse_json(path.read_text(encoding="utf-8"), str(path))
        tensors, words = read_tensors(path.with_name("probe.safetensors"))
        try:
            about, tokens = About(**content["about"]), content["tokens"]
        except (KeyError, TypeError):
            raise ValueError(f"{path} is damaged or of another version of attn_flow; probe again.") from None
        if words.get("key") != about.key:
            raise ValueError(f"{path} and probe.safetensors are of different runs; probe again.")
        parts: dict[str, dict[str, Tensor]] = {name: {} for name in RECORDS}
        for name, tensor in tensors.items():
            record, _, key = name.partition(".")
            parts[record][key] = tensor
        return cls(about, tokens=tokens, **{name: RECORDS[name](**parts[name]) for name in RECORDS})


def tensors_of(record: Any) -> dict[str, Tensor]:
    """Copies of the fields of a measured record, which a file wants apart."""
    return {entry.name: getattr(record, entry.name).clone() for entry in fields(record)}
