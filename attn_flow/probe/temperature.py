"""Question 3: how cold is each head, and which description of its output applies to it?

The temperature of a head is the standard deviation of its logits. Warm heads average over many keys, and two moments
of the keys and values may describe them; frozen heads are described by the few keys with the largest logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_flow.measures.cloud import Cloud
from attn_flow.measures.gaussian import Gaussian
from attn_flow.measures.mixture import Mixture
from attn_flow.probe.findings import DESCRIPTIONS, Finding, rank_correlation
from attn_flow.probe.recording import MEASURED_TEXTS, Heads, Recording, explained
from attn_flow.probe.sampling import head_rows, logit_sd
from attn_flow.theory.random_energy import PHASES, phase, thresholds


@dataclass(frozen=True, eq=False)
class Temperature:
    """How sharply every head attends, and the variance of its output that three descriptions explain.

    All are (layers, heads, texts) but `tokens`. Keys that a query does not see do not count.
    """

    tokens: Tensor  # (texts,), the mean number of keys that are not special and that a query sees
    logit_sd: Tensor  # standard deviation of a query's logits over those keys
    entropy: Tensor  # of the attention weights over the logarithm of the number of keys
    largest_weight: Tensor  # mean over queries
    logit_bound: Tensor  # the largest |query| times the largest |key - mean key|
    two_moments: Tensor  # R2 of mean and covariance of keys and values, special tokens apart; NaN if keys are hidden
    four_keys: Tensor  # R2 of attention to the keys with the four largest logits
    argmax: Tensor  # R2 of the key with the largest logit

    def finding(self, seed: int = 0) -> Finding:
        """How many heads are warm, middle and frozen, and which description does best in each; there is no verdict."""
        means = {name: value.nanmean(-1) for name, value in vars(self).items() if name != "tokens"}
        n = max(2, round(float(self.tokens.mean())))
        phases = torch.from_numpy(phase(means["logit_sd"].numpy(), n)).long()
        rows, medians, parts = head_rows(means), {}, []
        median = lambda values: values.nanquantile(0.5) if len(values) else torch.tensor(torch.nan)
        for row in rows:
            row["phase"] = PHASES[int(phases[row["layer"], row["head"]])]
        sizes = {name: sum(row["phase"] == name for row in rows) for name in PHASES}
        for i, (name, size) in enumerate(sizes.items()):
            medians[name] = {kind: median(means[kind][phases == i]) for kind in DESCRIPTIONS}
            kind = best_description(medians[name])
            words = f"R2 {medians[name][kind]:z.2f} by {DESCRIPTIONS[kind]}" if kind else "no description applies"
            if size:
                parts.append(f"{size} {'is' if size == 1 else 'are'} {name} ({words})")
        numbers = {
            "heads": rows,
            "tokens": n,
            "phases": sizes,
            "thresholds": [float(s) for s in thresholds(n)],
            "explained": medians,
            "best_description": {name: best_description(medians[name]) for name in PHASES},
            "rank_correlation_with_logit_sd": {
                name: rank_correlation(means["logit_sd"], mean) for name, mean in means.items() if name != "logit_sd"
            },
        }
        value = ", ".join(f"{size} {name}" for name, size in sizes.items())
        return Finding(None, f"Of {len(rows)} heads {', '.join(parts)}.", numbers, value)


@torch.no_grad()
def measure_temperature(recording: Recording) -> Temperature:
    """Measure the temperature of every head and the descriptions of its output on the first texts."""
    recording = recording.first(MEASURED_TEXTS)
    columns, tokens = [], []
    for text in range(recording.texts):
        layers = [recording.heads(layer, text) for layer in range(recording.layers)]
        columns.append([torch.stack(column) for column in zip(*map(_describe_heads, layers))])
        tokens.append((layers[0].logits[0, :, ~layers[0].special] > -torch.inf).sum(-1).double().mean().cpu())
    return Temperature(torch.stack(tokens), *(torch.stack(values, -1).double().cpu() for values in zip(*columns)))


def _describe_heads(heads: Heads) -> tuple[Tensor, ...]:
    """The columns of `Temperature` from logit_sd on, for one text in one layer, each (heads,)."""
    weights = heads.logits.softmax(-1)
    visible = (heads.logits > -torch.inf).sum(-1).clamp(min=2)
    centred = heads.keys - heads.keys.mean(-2, keepdim=True)
    two_moments = describe_by_moments(heads) if heads.visible is None else torch.full_like(heads.averages, torch.nan)
    return (
        logit_sd(heads.logits, heads.special),
        (torch.special.entr(weights).sum(-1) / visible.log()).mean(-1),
        weights.amax(-1).mean(-1),
        heads.queries.norm(dim=-1).amax(-1) * centred.norm(dim=-1).amax(-1),
        explained(two_moments, heads.averages),
        explained(describe_by_keys(heads, 4), heads.averages),
        explained(describe_by_keys(heads, 1), heads.averages),
    )


def describe_by_moments(heads: Heads) -> Tensor:
    """Every head's output if its keys and values were Gaussian, special tokens apart, (heads, n, v).

    The keys and values that are not special have their mean and covariance; beyond sqrt(2 log N) standard deviations
    of the logits the Gaussian of N tokens saturates, as a random-energy model.
    """
    tokens = torch.cat([heads.keys, heads.values], -1)
    queries = torch.cat([heads.queries, torch.zeros_like(heads.values)], -1)
    regular, special = tokens[:, ~heads.special], tokens[:, heads.special]
    measure: Gaussian | Mixture = Gaussian.of_tokens(*Cloud(regular).moments(), regular.shape[1])
    if special.shape[1]:
        measure = Mixture([Cloud(special), measure], torch.tensor([special.shape[1], regular.shape[1]]).to(tokens))
    return measure.tilted_mean(queries, 1.0)[..., heads.keys.shape[-1] :]


def describe_by_keys(heads: Heads, count: int) -> Tensor:
    """Attention of every head over the keys with the largest logits of each query only, (heads, n, v)."""
    top = heads.logits.topk(min(count, heads.n), -1)
    weights = torch.zeros_like(heads.logits).scatter_(-1, top.indices, top.values.softmax(-1))
    return weights @ heads.values


def best_description(explained: dict[str, Tensor]) -> str | None:
    """The description that explains most; None if none explains anything."""
    known = {name: float(value) for name, value in explained.items() if value > 0}
    return max(known, key=lambda name: known[name]) if known else None
