"""What a probe found: numbers with intervals, a tidy table, and plain words about what is supported and what is not."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from attn_flow.base.files import write_json, write_tensors
from attn_flow.prediction.timeline import Phase, split

RESAMPLES = 1000


@dataclass(frozen=True, eq=False)
class Probe:
    """Numbers by name, most of them (layers, texts); `about` says what was probed, how, and with which versions.

    cosine/SUPPORT, explained/SUPPORT, null_cosine/NULL, null_explained/NULL: attention outputs against predictions.
    limit/...: distances to the limiting law. head/...: (layers, heads). evolution/...: (layers + 1, texts).
    view: a sample of tokens in three dimensions, with `labels`.
    """

    about: dict[str, Any]
    numbers: dict[str, Tensor]
    labels: list[dict[str, Any]] = field(default_factory=list)

    def interval(self, name: str, level: float = 0.95) -> tuple[Tensor, Tensor, Tensor]:
        """Mean over texts with a bootstrap interval over texts, each (layers,)."""
        return bootstrap(self.numbers[name], self.about["seed"], level)

    def approach(self, name: str = "w2") -> tuple[Tensor, Tensor, Tensor]:
        """W2(after, P before)/W2(before, P before) with its interval: below 1 the cloud came nearer."""
        after, before = {"w2": ("w2_after", "w2_before"), "input": ("w2_input_after", "w2_input")}[name]
        ratio = self.numbers[f"limit/{after}"] / self.numbers[f"limit/{before}"]
        return bootstrap(ratio, self.about["seed"])

    def rows(self) -> list[dict[str, Any]]:
        """The table: one row per quantity and layer, with mean and 95% interval over texts."""
        found = []
        for name, value in sorted(self.numbers.items()):
            if name.startswith(("view", "evolution/edges", "evolution/histogram")):
                continue
            if name.startswith("head/"):
                for layer, row in enumerate(value.tolist()):
                    found += [{"quantity": name, "layer": layer, "head": h, "mean": v} for h, v in enumerate(row)]
            elif value.ndim == 1:
                found += [{"quantity": name, "layer": layer, "mean": v} for layer, v in enumerate(value.tolist())]
            elif value.ndim == 2:
                bounds = zip(*(z.tolist() for z in self.interval(name)))
                for layer, (mean, low, high) in enumerate(bounds):
                    found.append({"quantity": name, "layer": layer, "mean": mean, "low": low, "high": high})
            else:
                for beta, rows in zip(self.about["betas"], value):
                    bounds = zip(*(z.tolist() for z in bootstrap(rows, self.about["seed"])))
                    for layer, (mean, low, high) in enumerate(bounds):
                        name_b = f"{name} beta={beta:g}"
                        found.append({"quantity": name_b, "layer": layer, "mean": mean, "low": low, "high": high})
        return found

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame (needs pandas)."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise ValueError("to_pandas needs pandas; pip install pandas, or use rows().") from None
        return pandas.DataFrame(self.rows())

    def findings(self) -> list[str]:
        """Plain words, each with its number, interval and null."""
        return [*self._about_push(), *self._about_limit(), *self._about_heads(), *self._about_cloud()]

    def _about_push(self) -> list[str]:
        words = []
        if "cosine/closure" in self.numbers:
            cosine, low, high = self.interval("cosine/closure")
            explained = self.interval("explained/closure")[0]
            null = self.numbers.get("null_cosine/rotated")
            sentence = (
                f"SUPPORTED: attention pushes tokens where the weights predict from a few moments and atoms: cosine "
                f"{_span(cosine)} over layers (95% interval {float(low.min()):.2f} to {float(high.max()):.2f}), "
                f"explained variance {_span(explained)}."
            )
            if not bool((low > 0.5).all()):
                sentence = sentence.replace("SUPPORTED", "PARTLY")
            if null is not None:
                sentence += f" With G rotated at random the cosine is {_span(null.mean(-1))}."
                beats = bool((low > bootstrap(null, self.about["seed"])[2]).all())
                sentence += " Above the null in every layer." if beats else " NOT above the null in every layer."
            words.append(sentence)
        if "cosine/sphere" in self.numbers:
            cosine, low, high = self.interval("cosine/sphere")
            verdict = "NOT SUPPORTED" if float(high.max()) < 0.3 else "PARTLY"
            words.append(
                f"{verdict}: the theorem's own setting, tokens filling the sphere at zero temperature, gives a cosine "
                f"of {_span(cosine)}: a few hundred tokens do not fill the sphere of R^{self.about['encoder']['dim']}."
            )
        return words

    def _about_limit(self) -> list[str]:
        ratio, low, high = self.approach()
        null = bootstrap(self.numbers["limit/w2_null"], self.about["seed"])
        nearer = [i for i in range(len(ratio)) if float(high[i]) < 1 and float(high[i]) < float(null[1][i])]
        away = [i for i in range(len(ratio)) if float(low[i]) > 1]
        verdict = "SUPPORTED" if len(nearer) == len(ratio) else "PARTLY" if nearer else "NOT SUPPORTED"
        return [
            f"{verdict}: does one layer bring the cloud nearer its predicted limiting law? W2 after over W2 before is "
            f"{_span(ratio)}; below 1 and below the rotated null ({_span(null[0])}) in {_layers(nearer)}, above 1 in "
            f"{_layers(away)}. The limit is that of the heads' sum under the Gaussian closure; cases: "
            f"{_counted(self.about['limit_cases'])}."
        ]

    def _about_heads(self) -> list[str]:
        entropy, largest = self.numbers["head/entropy"], self.numbers["head/largest"]
        closed = self.numbers["head/closure"]
        holds = int((closed > 0.8).sum())
        cases = _counted([case for row in self.about["head_cases"] for case in row])
        return [
            f"Regimes: heads attend with entropy {_span(entropy.flatten())} of log n and a largest weight of "
            f"{_span(largest.flatten())}; the closure holds (cosine above .8) in {holds} of {closed.numel()} heads; "
            f"spectral cases of V_h G_h: {cases}."
        ]

    def phases(self) -> tuple[Phase, ...]:
        """Phases of the path through the layers, from its distance to the push-forward under the last limit map."""
        curve = self.numbers["limit/curve"].mean(-1).numpy()
        return split(range(len(curve)), curve) if len(curve) > 2 else ()

    def _about_cloud(self) -> list[str]:
        cosine = self.interval("evolution/cosine")[0]
        rank = self.interval("evolution/effective_rank")[0]
        way = "concentrates" if float(cosine[-1]) > float(cosine[0]) else "spreads"
        merges, splits = (float(self.numbers[f"evolution/{kind}"].sum(0).mean()) for kind in ("merges", "splits"))
        curve = self.numbers["limit/curve"].mean(-1)
        phases = ", ".join(phase.phase for phase in self.phases())
        if phases in ("", "spreading"):
            phases = "none of the theory's (it would have to fall by a quarter)"
        return [
            f"The cloud {way}: mean pairwise cosine (diagonal removed) from {float(cosine[0]):.2f} at the input to "
            f"{float(cosine[-1]):.2f} at the output, effective rank from {float(rank[0]):.0f} to "
            f"{float(rank[-1]):.0f}; {merges:.1f} merges and {splits:.1f} splits of clusters a text. Through all "
            f"layers W2 to the last layer's limit goes from {float(curve[0]):.2f} to {float(curve[-1]):.2f}; phases: "
            f"{phases}."
        ]

    def plot(self) -> Any:
        """The main figure: prediction against computed attention, and the distance to the limiting law."""
        from attn_flow.probe.figures import probe_figure

        return probe_figure(self)

    def plot_heads(self) -> Any:
        """Layers x heads: entropy, effective beta, largest weight, where the closure holds."""
        from attn_flow.probe.figures import heads_figure

        return heads_figure(self)

    def plot_evolution(self) -> Any:
        """Pairwise-cosine histograms, energies, effective rank and clusters through the layers."""
        from attn_flow.probe.figures import evolution_figure

        return evolution_figure(self)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """folder/probe.json (about, findings, table) and folder/probe.safetensors (all numbers)."""
        folder = Path(folder)
        write_tensors(self.numbers, folder / "probe.safetensors", {"format": "attn_flow.Probe"})
        words = {"about": self.about, "findings": self.findings(), "table": self.rows(), "labels": self.labels}
        write_json(words, folder / "probe.json")

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Probe:
        folder = Path(folder)
        if not (folder / "probe.json").exists():
            raise ValueError(f"{folder} holds no probe.json; expected a folder written by Probe.save.")
        words = json.loads((folder / "probe.json").read_text())
        return cls(words["about"], load_file(folder / "probe.safetensors"), words["labels"])


def bootstrap(values: Tensor, seed: int, level: float = 0.95) -> tuple[Tensor, Tensor, Tensor]:
    """Mean over the last axis (texts), and the percentile interval of means over resampled texts."""
    values = values.double()
    texts = values.shape[-1]
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(texts, (RESAMPLES, texts), generator=generator)
    means = values[..., draws].mean(-1)
    tail = (1 - level) / 2
    return values.mean(-1), means.quantile(tail, dim=-1), means.quantile(1 - tail, dim=-1)


def _span(values: Tensor) -> str:
    shown = values[torch.isfinite(values)]
    if not len(shown):
        return "not defined"
    return f"{float(shown.min()):.2f} to {float(shown.max()):.2f}"


def _layers(indices: list[int]) -> str:
    return (
        "no layer"
        if not indices
        else f"layers {', '.join(map(str, indices))}"
        if len(indices) > 1
        else f"layer {indices[0]}"
    )


def _counted(cases: list[str]) -> str:
    return ", ".join(f"{cases.count(case)} {case}" for case in dict.fromkeys(cases))
