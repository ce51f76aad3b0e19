"""The result of a probe: findings, tables, JSON, files and the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attn_flow.base.checks import require_extra
from attn_flow.base.files import read_json, read_tensors, write_json, write_tensors
from attn_flow.probe.findings import QUESTIONS, About, Finding, Reading
from attn_flow.probe.page import write_page

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, eq=False)
class ProbeResult:
    """What a probe found. Made by `probe`, or read from a folder by `ProbeResult.load`.

    Args:
        about: what was probed.
        findings: the answer to each question: averaging, clusters, temperature, limit.
        evolution: how the cloud of tokens changes through depth.
        measurements: the tensors behind the findings, such as "averaging.head_errors"; none for a question that does
            not apply. Those of "reading" are attention token by token, of a few texts.
        tokens: the tokens of these texts.
    """

    about: About
    findings: dict[str, Finding]
    evolution: Finding
    measurements: dict[str, Tensor]
    tokens: list[list[str]]

    @classmethod
    def of_records(cls, about: About, records: Mapping[str, Any], tokens: list[list[str]]) -> ProbeResult:
        """The result of measured records, such as `Averaging`, by question; None stands for one that does not apply."""
        reason = about.hides or "it takes several texts, and a model that can be run with other attention"

        def answer(name: str) -> Finding:
            record = records[name]
            return Finding(None, f"Not measured: {reason}.") if record is None else record.finding(seed=about.seed)

        findings = {name: answer(name) for name in QUESTIONS}
        measurements = {f"{name}.{key}": z for name, record in records.items() for key, z in tensors_of(record).items()}
        return cls(about, findings, answer("evolution"), measurements, tokens)

    def __repr__(self) -> str:
        encoder = self.about.encoder
        answer = lambda finding: finding.verdict or ("numbers" if finding.numbers else "not measured")
        answers = ", ".join(f"{name}: {answer(finding)}" for name, finding in self.findings.items())
        return f"ProbeResult({encoder['model']}, {encoder['layers']} layers, {self.about.texts} texts; {answers})"

    def to_frame(self) -> DataFrame:
        """A table for pandas with one row per head: layer, head, exponent b, logit_sd, and what describes the head."""
        averaging, temperature = (self.findings[name].numbers for name in ("averaging", "temperature"))
        others = averaging.get("heads") or [{}] * len(temperature["heads"])
        rows = [{**other, **row} for other, row in zip(others, temperature["heads"])]
        return require_extra("pandas").DataFrame(rows)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values: `about`, `questions` (verdict, text, numbers), `evolution`. A missing number is None."""
        questions = {name: asdict(finding) for name, finding in self.findings.items()}
        return {"about": asdict(self.about), "questions": questions, "evolution": asdict(self.evolution)}

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
        reading = Reading(**{name: self.measurements[f"reading.{name}"] for name in Reading.__annotations__})
        page = write_page(folder, title, self.about, self.findings, self.evolution, reading, self.tokens)
        self.save(folder)
        return page

    def save(self, folder: str | Path) -> None:
        """Write probe.safetensors and then probe.json: if that is there, all is."""
        write_tensors(self.measurements, Path(folder) / "probe.safetensors", {})
        write_json({**self.as_json(), "tokens": self.tokens}, Path(folder) / "probe.json")

    @classmethod
    def load(cls, folder: str | Path) -> ProbeResult:
        """Read what `save` or `report` wrote; ValueError if a file is missing or damaged."""
        path = Path(folder) / "probe.json"
        if not path.is_file():
            raise ValueError(f"no finished probe in {folder}: {path} is missing.")
        content = read_json(path)
        tensors, _ = read_tensors(path.with_name("probe.safetensors"))
        try:
            about, evolution = About(**content["about"]), Finding(**content["evolution"])
            findings = {name: Finding(**content["questions"][name]) for name in QUESTIONS}
            return cls(about, findings, evolution, tensors, content["tokens"])
        except (KeyError, TypeError):
            raise ValueError(f"{path} is damaged or of another version of attn_flow; probe again.") from None


def tensors_of(record: Any) -> dict[str, Tensor]:
    """Copies of the fields of a measured record, which a file wants apart; nothing for what was not measured."""
    return {} if record is None else {name: tensor.clone() for name, tensor in vars(record).items()}
