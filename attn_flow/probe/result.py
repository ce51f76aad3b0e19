"""The result of a probe: findings, tables, JSON, files and the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attn_flow.base.files import read_json, read_tensors, write_json, write_tensors
from attn_flow.base.checks import require_extra
from attn_flow.probe.averaging import Averaging
from attn_flow.probe.clusters import Clusters
from attn_flow.probe.findings import QUESTIONS, Finding
from attn_flow.probe.limit import LimitApproach
from attn_flow.probe.page import write_page
from attn_flow.probe.temperature import Temperature
from attn_flow.probe.tokens import Evolution, Reading

if TYPE_CHECKING:
    from pandas import DataFrame

RECORDS: dict[str, Callable[..., Any]] = {
    "averaging": Averaging,
    "clusters": Clusters,
    "temperature": Temperature,
    "limit": LimitApproach,
    "evolution": Evolution,
    "reading": Reading,
}

NEED_ALL_TOKENS = ("averaging", "clusters", "limit")  # questions about tokens that see all of their text


@dataclass(frozen=True)
class About:
    """What was probed."""

    encoder: dict[str, Any]  # the facts of `hooks.encoder_facts`
    weights: str  # digest
    inputs: str  # digest
    texts: int
    tokens: int
    skipped: list[int]  # the numbers of the texts that were too short
    truncated: int  # how many texts were cut to `max_length`
    unknown_share: float  # share of tokens that the tokenizer does not know
    max_length: int | None
    batch: int
    beta_factor: float
    seed: int
    dtype: str  # of the computation
    device: str
    versions: dict[str, str]  # of the packages
    hides: str = ""  # why tokens see only a part of their text; empty if they see all
    key: str = ""  # a digest of all of the above: equal keys, equal results
    unexplained: list[float] = field(default_factory=list)  # by layer, share of attention that the weights do not give


@dataclass(frozen=True, eq=False)
class ProbeResult:
    """What a probe measured. Made by `probe`, or read from a folder by `ProbeResult.load`.

    Args:
        about: what was probed.
        averaging, clusters, temperature, limit: the measurements of the four questions; None if one does not apply.
        evolution: how the cloud changes through depth.
        reading: attention token by token, of a few texts.
        tokens: the tokens of these texts.
    """

    about: About
    averaging: Averaging | None
    clusters: Clusters | None
    temperature: Temperature
    limit: LimitApproach | None
    evolution: Evolution
    reading: Reading
    tokens: list[list[str]]

    @cached_property
    def findings(self) -> dict[str, Finding]:
        """The answer to each question: averaging, clusters, temperature, limit."""
        records = {name: getattr(self, name) for name in QUESTIONS}
        reason = self.about.hides or "it takes several texts, and a model that can be run with other attention"
        return {
            name: Finding(None, f"Not measured: {reason}.") if record is None else record.finding(seed=self.about.seed)
            for name, record in records.items()
        }

    def __repr__(self) -> str:
        encoder = self.about.encoder
        answers = ", ".join(f"{name}: {finding.verdict or 'numbers'}" for name, finding in self.findings.items())
        return f"ProbeResult({encoder['model']}, {encoder['layers']} layers, {self.about.texts} texts; {answers})"

    def to_frame(self) -> DataFrame:
        """A table for pandas with one row per head: layer, head, exponent b, logit_sd, and what describes the head."""
        averaging, temperature = (self.findings[name].numbers for name in ("averaging", "temperature"))
        others = averaging.get("heads") or [{}] * len(temperature["heads"])
        rows = [{**other, **row} for other, row in zip(others, temperature["heads"])]
        return require_extra("pandas").DataFrame(rows)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values: `about`, `questions` (verdict, text, numbers), `evolution`. A missing number is None."""
        answer = lambda finding: {"verdict": finding.verdict, "text": finding.text, "numbers": finding.numbers}
        return {
            "about": asdict(self.about),
            "questions": {name: answer(finding) for name, finding in self.findings.items()},
            "evolution": answer(self.evolution.finding(self.about.seed)),
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
        content = read_json(path)
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
        return cls(about, tokens=tokens, **{name: record_of(name, parts[name]) for name in RECORDS})


def tensors_of(record: Any) -> dict[str, Tensor]:
    """Copies of the fields of a measured record, which a file wants apart; nothing for what was not measured."""
    return {} if record is None else {entry.name: getattr(record, entry.name).clone() for entry in fields(record)}


def record_of(name: str, tensors: dict[str, Tensor]) -> Any:
    """The record of a question, from its fields."""
    return RECORDS[name](**tensors) if tensors else None
