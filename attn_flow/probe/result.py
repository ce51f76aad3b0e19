"""What a probe found: numbers with intervals, findings with verdicts, a tidy table, files."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_flow.base.files import read_tensors, to_plain, write_json, write_tensors
from attn_flow.probe import findings
from attn_flow.probe.agreement import Agreement
from attn_flow.probe.closures import LADDER
from attn_flow.probe.evolution import BETAS, Evolution, View
from attn_flow.probe.findings import Finding, Interval, bootstrap, by_layer, layers_named, ratio_of_means, span
from attn_flow.probe.heads import HeadRegimes
from attn_flow.probe.law_alone import LawAlone
from attn_flow.probe.limit_law import LimitLaw
from attn_flow.probe.propagation import Propagated
from attn_flow.probe.reading import Reading
from attn_flow.probe.transports import TransportCheck

FORMAT = "attn_flow.Probe 2"
BY_NAME = {"closures": Agreement, "nulls": Agreement, "propagation": Propagated}
SINGLE = {
    "law_alone": LawAlone,
    "limits": LimitLaw,
    "heads": HeadRegimes,
    "evolution": Evolution,
    "view": View,
    "reading": Reading,
    "transports": TransportCheck,
}
MEASURES = ("explained", "centred_cosine", "cosine")
DISREGARDED = ("untrained", "mean_output")  # reported: another model's number; and 0 by definition


@dataclass(frozen=True, eq=False)
class Probe:
    """The answers of a probe; `about` says what was probed, how, and with which versions (plain JSON).

    closures, nulls: predictions against what each layer computes, by name. propagation: predictions carried through
    depth, by name of closure or null. tokens: the strings of the texts, for labels.
    """

    about: dict[str, Any]
    closures: dict[str, Agreement]
    nulls: dict[str, Agreement]
    propagation: dict[str, Propagated]
    law_alone: LawAlone
    limits: LimitLaw
    heads: HeadRegimes
    evolution: Evolution
    view: View
    reading: Reading
    transports: TransportCheck
    tokens: list[list[str]]

    def __repr__(self) -> str:
        about = self.about
        return (
            f"Probe({about['encoder']['model']}, {about['texts']} texts, {about['tokens']} tokens, "
            f"{len(self.closures)} closures, {len(self.nulls)} nulls)"
        )

    # --- numbers ------------------------------------------------------------------------------------------------

    @property
    def main(self) -> str:
        """The closure that findings speak of."""
        return self.about["main_closure"]

    def interval(self, values: Tensor) -> Interval:
        """Mean over texts (the last axis) with its 95% bootstrap interval over texts."""
        return bootstrap(values, self.about["seed"])

    def fraction_of_the_way(self, rotated: bool = False) -> Interval:
        """(1 - real)/(1 - if theory held), by layer; `rotated`: towards the limit of a rotated G, in the same unit."""
        limits = self.limits
        real = limits.real_rotated if rotated else limits.real
        return ratio_of_means(1 - real, 1 - limits.if_held, self.about["seed"])

    def gains(self) -> dict[str, Tensor]:
        """What each step of the ladder explains beyond the step it adds to, by name, (layers, texts)."""
        explained = {name: agreement.explained for name, agreement in self.closures.items()}
        steps = {name: step.after for name, step in LADDER.items() if name in explained}
        return {
            name: explained[name] - explained[after] if after else explained[name]
            for name, after in steps.items()
            if not after or after in explained
        }

    @property
    def omitted(self) -> Tensor | None:
        """Share of the logits' variance that closures leave out, by layer; None where that is nothing."""
        checked = self.about["self_check"]
        if not any(check["omits"] for check in checked):
            return None
        return torch.tensor([float(check["omitted_logit_variance"]) for check in checked], dtype=torch.float64)

    @property
    def omitted_words(self) -> str:
        """What positions or changes of the layers closures leave out."""
        return ", ".join(dict.fromkeys(check["omits"] for check in self.about["self_check"] if check["omits"]))

    @property
    def inside_words(self) -> str:
        """Positions that closures hold, as the places of tokens; empty where scores are of contents alone."""
        return ", ".join(dict.fromkeys(check["places"] for check in self.about["self_check"] if check["places"]))

    def rows(self) -> list[dict[str, Any]]:
        """The table: one row per group, quantity and layer (or level), with mean and 95% interval over texts."""
        found: list[dict[str, Any]] = []

        def add(group: str, quantity: str, values: Tensor, first: int = 0) -> None:
            if values.ndim == 1:
                found.extend(
                    {"group": group, "quantity": quantity, "layer": first + i, "mean": v}
                    for i, v in enumerate(values.tolist())
                )
                return
            seen = self.interval(values)
            for i, (mean, low, high) in enumerate(zip(*(z.tolist() for z in (seen.mean, seen.low, seen.high)))):
                row = {"group": group, "quantity": quantity, "layer": first + i, "mean": mean, "low": low, "high": high}
                found.append(row)

        for group, table in (("closure", self.closures), ("null", self.nulls)):
            for name, agreement in table.items():
                for measure in MEASURES:
                    add(group, f"{name}: {measure}", getattr(agreement, measure))
        for name, gain in self.gains().items():
            add("ladder", f"{name}: gain", gain)
        for name, through in self.propagation.items():
            add("through depth", f"{name}: w2", through.w2, first=1)
        add("law alone", "w2", self.law_alone.w2, first=1)
        if self.omitted is not None:
            add("left out", "share of the logits' variance", self.omitted)
        for name, value in vars(self.limits).items():
            if name != "case":
                add("limit law", name, value)
        for name in ("pairwise_cosine", "effective_rank", "clusters", "merges", "splits"):
            add("cloud", name, getattr(self.evolution, name))
        for beta, value in zip(BETAS, self.evolution.log_energy):
            add("cloud", f"log_energy, beta {beta:g}", value)
        for name, value in vars(self.heads).items():
            if name != "case":
                for layer, row in enumerate(value.tolist()):
                    found += [
                        {"group": "heads", "quantity": name, "layer": layer, "head": h, "mean": v}
                        for h, v in enumerate(row)
                    ]
        return found

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame (needs pandas)."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise ValueError("to_pandas needs pandas; pip install pandas, or use rows().") from None
        return pandas.DataFrame(self.rows())

    def as_json(self) -> dict[str, Any]:
        """findings, layers and propagation by name, and what was probed: plain JSON."""
        agreements = {**self.closures, **self.nulls}
        intervals = {m: {name: self.interval(getattr(a, m)) for name, a in agreements.items()} for m in MEASURES}
        gains = {name: self.interval(gain).mean for name, gain in self.gains().items()}
        layers = []
        for layer in range(self.about["encoder"]["layers"]):
            row: dict[str, Any] = {"layer": layer}
            for m in MEASURES:
                row[m] = {name: float(seen.mean[layer]) for name, seen in intervals[m].items()}
            row["explained_interval"] = {
                name: [float(seen.low[layer]), float(seen.high[layer])] for name, seen in intervals["explained"].items()
            }
            row["gain"] = {name: float(gain[layer]) for name, gain in gains.items()}
            layers.append(row)
        propagation = {}
        for name, p in self.propagation.items():
            cosine, agree, w2 = (self.interval(v) for v in (p.embedding_cosine, p.neighbour_agreement, p.w2))
            propagation[name] = {
                "w2": w2.mean.tolist(),
                "w2_interval": [w2.low.tolist(), w2.high.tolist()],
                "embedding_cosine": float(cosine.mean),
                "embedding_cosine_interval": [float(cosine.low), float(cosine.high)],
                "neighbour_agreement": float(agree.mean),
                "neighbour_agreement_error": _standard_error(p.neighbour_agreement),
                "rank_correlation": float(p.rank_correlation),
            }
        return to_plain(
            {
                "about": self.about,
                "findings": [{"verdict": f.verdict, "text": f.text, "numbers": f.numbers} for f in self.findings()],
                "layers": layers,
                "propagation": propagation,
                "transports": [dict(zip(vars(self.transports), row)) for row in zip(*vars(self.transports).values())],
            }
        )

    # --- words --------------------------------------------------------------------------------------------------

    def findings(self) -> list[Finding]:
        """Plain words, each with its verdict, numbers, intervals and nulls."""
        return [
            self._through_depth(),
            self._layer_by_layer(),
            self._theorem(),
            self._limit(),
            self._from_the_law(),
            self._heads(),
            self._cloud(),
        ]

    def answer(self) -> list[str]:
        """Three short sentences: through depth, layer by layer, towards the limiting law."""
        main = self.propagation[self.main]
        titles = {**self.about["nulls"], **self.about["controls"]}  # what the law has to beat
        others = {n: float(p.embedding_cosine.mean()) for n, p in self.propagation.items() if n in titles}
        explained = self.closures[self.main].explained.mean(-1)
        first = (
            f"With attention replaced in every layer by a law of {self.about['costs'][self.main]['numbers']:.0f} "
            f"numbers a head, the encoder still arrives at its own embeddings with cosine "
            f"{float(main.embedding_cosine.mean()):.3f}"
        )
        if others:
            best = max(others, key=lambda n: others[n])
            first += f" (the best null or control, {titles[best]}: {others[best]:.2f})"
        second = f"Layer by layer that law explains {span(explained)} of the variance of what attention adds"
        unseen = self.closures.get("cross_fitted_closure")
        if unseen is not None:
            second += f", and {span(unseen.explained.mean(-1))} for queries by which its numbers were not found"
        return [
            first + ".",
            second + ".",
            f"A layer goes {span(self.fraction_of_the_way().mean)} of the way to the limiting law of its weights that "
            "it would go if theory held.",
        ]

    def _through_depth(self) -> Finding:
        main, nulls = self.propagation[self.main], [n for n in self.propagation if n in self.about["nulls"]]
        cosine = self.interval(main.embedding_cosine)
        others = {n: self.interval(self.propagation[n].embedding_cosine) for n in nulls}
        controls = {n: self.interval(self.propagation[n].embedding_cosine) for n in self.about["controls"]}
        verdict, _ = findings.decide(cosine, [*others.values(), *controls.values()])
        verdict = verdict if others or controls else None  # nothing to beat is nothing beaten
        w2 = self.interval(main.w2)
        text = (
            f"the encoder run with attention replaced in every layer by the closure ({self._cost(self.main)}) ends at "
            f"embeddings with cosine {_with_interval(cosine)} to its own, clouds {by_layer(w2.mean)} of the distance "
            f"between texts apart (W2, levels 1 to {len(w2.mean)})"
        )
        if others:
            best = max(others, key=lambda n: float(others[n].mean))
            text += f"; the best null ({self.about['nulls'][best]}) reaches {_with_interval(others[best])}"
        for name, control in controls.items():
            text += f"; control, {self.about['controls'][name]}: {_with_interval(control)}"
        window = self.propagation.get("quantised_window_closure")
        if window is not None:
            text += (
                f"; with {self.about['costs']['quantised_window_closure']['own_tokens']} exact neighbours "
                f"{_with_interval(self.interval(window.embedding_cosine))} and W2 {by_layer(window.w2.mean(-1))}"
            )
        agree = main.neighbour_agreement
        text += (
            f". The nearest other text is the same for {float(agree.mean()):.2f} +- {_standard_error(agree):.2f} of "
            "texts."
        )
        numbers = {"embedding_cosine": cosine.mean, "w2": w2.mean, "nulls": {n: o.mean for n, o in others.items()}}
        numbers["controls"] = {n: o.mean for n, o in controls.items()}
        return Finding(verdict, _sentence(text), to_plain(numbers))

    def _layer_by_layer(self) -> Finding:
        explained = self.interval(self.closures[self.main].explained)
        nulls = {n: self.interval(a.explained) for n, a in self.nulls.items() if n not in DISREGARDED}
        nulls |= {n: self.interval(self.closures[n].explained) for n in self.about["controls"]}
        words = {**self.about["nulls"], **self.about["controls"]}
        verdict, holds = findings.decide(explained, list(nulls.values()))
        verdict = verdict if nulls else None  # nothing to beat is nothing beaten
        L = self.about["encoder"]["layers"]
        text = (
            f"layer by layer, on the encoder's own states, the closure explains {by_layer(explained.mean)} of the "
            f"variance of attention outputs (the mean output explains 0): above 0 "
            f"{'and above every null ' if nulls else ''}in {layers_named(holds, L)}"
        )
        if not nulls:
            text += "; without nulls there is no verdict"
        else:
            best = max(nulls, key=lambda n: float(nulls[n].mean.mean()))
            text += f"; the strongest null or control ({words[best]}) explains {by_layer(nulls[best].mean)}"
        if "cross_fitted_closure" in self.closures:
            held_out = self.closures["cross_fitted_closure"].explained.mean(-1)
            text += (
                f". The atoms are found with the text's own queries; for queries by which they were not found they "
                f"explain {by_layer(held_out)}"
            )
        if "untrained" in self.nulls:
            twin = self.nulls["untrained"]
            text += (
                f". An untrained twin, which attends almost uniformly, is explained {by_layer(twin.explained.mean(-1))}"
                f" with a raw cosine of {span(twin.cosine.mean(-1))}: easy to predict, and no evidence"
            )
        numbers = {"explained": explained.mean, "low": explained.low, "high": explained.high, "layers": holds}
        if self.omitted is not None:
            text += (
                f". Left out of every closure, {self.omitted_words}: {by_layer(self.omitted)} of the variance of the "
                "logits"
            )
            numbers["omitted_logit_variance"] = self.omitted
        if self.inside_words:
            text += f". Laws are of contents and places here: inside the closures are {self.inside_words}"
        reported = {n: self.nulls[n].explained.mean(-1) for n in DISREGARDED if n in self.nulls}
        numbers["nulls"] = {n: o.mean for n, o in nulls.items()} | reported
        return Finding(verdict, _sentence(text + "."), to_plain(numbers))

    def _theorem(self) -> Finding:
        explained = self.interval(self.closures["sphere"].explained)
        verdict, holds = findings.decide(explained, [])
        cosine = self.closures["sphere"].centred_cosine.mean(-1)
        text = (
            f"the theorem's own setting, tokens that fill the sphere at zero temperature, explains "
            f"{by_layer(explained.mean)} of the variance (centred cosine {span(cosine)}): a few hundred tokens do not "
            f"fill the sphere of R^{self.about['encoder']['dim']}."
        )
        return Finding(verdict, _sentence(text), to_plain({"explained": explained.mean, "layers": holds}))

    def _limit(self) -> Finding:
        way, null = self.fraction_of_the_way(), self.fraction_of_the_way(rotated=True)
        verdict, holds = findings.decide(way, [null])
        L = len(way.mean)
        cosine = [self.limits.cosine.mean(-1), self.limits.cosine_without_c.mean(-1)]
        text = (
            f"one layer takes its cloud {by_layer(way.mean)} of the way towards the limiting law that it would go if "
            f"theory held (0: not at all, 1: all of it; above 0 and above a rotated G in {layers_named(holds, L)}). "
            f"What attention adds has cosine {span(cosine[0])} with M x + c and {span(cosine[1])} with M x alone. The "
            f"leading subspace E of the two halves of the texts overlaps by {span(self.limits.stability)}. Not covered "
            "by the theorem: several heads, changing weights, the feed-forward part."
        )
        numbers = {"fraction": way.mean, "low": way.low, "high": way.high, "if_held": self.limits.if_held.mean(-1)}
        return Finding(verdict, _sentence(text), to_plain(numbers))

    def _from_the_law(self) -> Finding:
        law = self.law_alone
        mean, other = (self.interval(v) for v in (law.embedding_cosine, law.another_text_embedding_cosine))
        cov, cov_other = (self.interval(v) for v in (law.covariance_cosine, law.another_text_covariance_cosine))
        verdict, _ = findings.decide(mean, [other])
        text = (
            f"from the mean and covariance of its input cloud alone, without any of its words, the mean of a text's "
            f"last cloud is predicted with cosine {_with_interval(mean)}, against {_with_interval(other)} for another "
            f"text, and its covariance with cosine {_with_interval(cov)}, against {_with_interval(cov_other)}."
        )
        numbers = {"mean": mean.mean, "another_text": other.mean, "covariance": cov.mean}
        return Finding(verdict, _sentence(text), to_plain(numbers))

    def _heads(self) -> Finding:
        heads = self.heads
        flat = heads.explained.flatten()
        L, H = heads.explained.shape
        worst, best = (divmod(int(i), H) for i in (flat.argmin(), flat.argmax()))
        text = (
            f"heads attend with entropy {span(heads.entropy.flatten())} of log n and a largest weight of "
            f"{span(heads.largest_weight.flatten())}; the closure explains more than half of {int((flat > 0.5).sum())} "
            f"of {L * H} heads, best head {best[1]} of layer {best[0]} ({float(flat.max()):.2f}), worst head "
            f"{worst[1]} of layer {worst[0]} ({float(flat.min()):.2f})."
        )
        return Finding(None, _sentence(text), to_plain({"explained": heads.explained}))

    def _cloud(self) -> Finding:
        e = self.evolution
        cosine, rank = e.pairwise_cosine.mean(-1), e.effective_rank.mean(-1)
        way = "concentrates" if float(cosine[-1]) > float(cosine[0]) else "spreads"
        text = (
            f"the cloud {way}: mean pairwise cosine from {float(cosine[0]):.2f} at the input to "
            f"{float(cosine[-1]):.2f} at the output, effective rank from {float(rank[0]):.0f} to "
            f"{float(rank[-1]):.0f}; {float(e.merges.sum(0).mean()):.1f} merges and "
            f"{float(e.splits.sum(0).mean()):.1f} splits of clusters a text."
        )
        return Finding(None, _sentence(text), to_plain({"pairwise_cosine": cosine, "effective_rank": rank}))

    def _cost(self, name: str) -> str:
        cost = self.about["costs"][name]
        return f"{cost['numbers']:.0f} numbers a head that all tokens share, {cost['own_tokens']} tokens of one's own"

    # --- pictures and files -------------------------------------------------------------------------------------

    def plot(self) -> Any:
        """The first figure: the law carried through the whole encoder, against the nulls."""
        from attn_flow.probe.figures import propagation_figure

        return propagation_figure(self)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """folder/probe.safetensors (all numbers), then folder/probe.json (about, findings, layers, table): the marker
        that a run is whole."""
        folder = Path(folder)
        self.save_numbers(folder)
        self.save_marker(folder)

    def save_numbers(self, folder: Path) -> None:
        tensors: dict[str, Tensor] = {}
        for group in BY_NAME:
            for name, part in getattr(self, group).items():
                tensors |= {f"{group}/{name}/{field}": value for field, value in vars(part).items()}
        for group in SINGLE:
            tensors |= {f"{group}/{field}": value for field, value in vars(getattr(self, group)).items()}
        write_tensors(tensors, folder / "probe.safetensors", {"format": FORMAT})

    def save_marker(self, folder: Path) -> None:
        write_json(
            {"format": FORMAT, **self.as_json(), "table": self.rows(), "tokens": self.tokens}, folder / "probe.json"
        )

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Probe:
        """A probe written by `save`."""
        folder = Path(folder)
        if not (folder / "probe.json").exists():
            raise ValueError(f"{folder} holds no probe.json; expected a folder written by Probe.save.")
        try:
            words = json.loads((folder / "probe.json").read_text())
        except ValueError as error:
            raise ValueError(f"{folder}/probe.json is damaged ({error}); move it away to probe again.") from None
        if words.get("format") != FORMAT:
            raise ValueError(
                f"{folder} was written in format {words.get('format')!r}, expected {FORMAT!r}; probe again."
            )
        tensors, _ = read_tensors(folder / "probe.safetensors")
        named: dict[str, Any] = {group: {} for group in BY_NAME}
        single: dict[str, dict[str, Tensor]] = {group: {} for group in SINGLE}
        for key, value in tensors.items():
            group, *rest = key.split("/")
            if group in BY_NAME:
                named[group].setdefault(rest[0], {})[rest[1]] = value
            else:
                single[group][rest[0]] = value
        order = words["about"]["order"]
        parts: dict[str, Any] = {
            group: {name: BY_NAME[group](**named[group][name]) for name in order[group]} for group in BY_NAME
        }
        kinds: dict[str, Any] = SINGLE
        return cls(
            words["about"],
            **parts,
            **{group: kinds[group](**fields) for group, fields in single.items()},
            tokens=words["tokens"],
        )


def _standard_error(values: Tensor) -> float:
    return float(values.std() / len(values) ** 0.5) if len(values) > 1 else float("nan")


def _with_interval(seen: Interval) -> str:
    mean = f"{float(seen.mean):.3f}"
    return f"{mean} ({float(seen.low):.3f} to {float(seen.high):.3f})" if seen.known else mean


def _sentence(text: str) -> str:
    """With a capital."""
    return text[0].upper() + text[1:]
