"""A real encoder with continuous layers, fine-tuned: quality and gradients against beta, steps and horizon.

The recipe a user follows: MiniLM with a head, `replace_attention` on all its layers with a beta of their own,
HuggingFace's `Trainer`, a few dozen labelled sentences. The sentences are of Python's own help pages, the label is the
page; others are held out. One Euler step of size one is ordinary fine-tuning, which the others are compared with, seed
by seed. The norm of the gradient is taken before clipping, at the first update (what the flow does to it) and at the
largest; a longer horizon multiplies factors of the same layer, so that it may grow with the horizon and not with the
number of steps.
"""

from __future__ import annotations

import re
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_least, at_most
from attn_flow.experiments.figures import caption, label, panels
from attn_flow.experiments.parts import kept_part

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGES = ("formatstrings", "specialnames", "compound", "debugger")  # long pages of different subjects
TRAINING, HELD_OUT, WORDS = 96, 160, (7, 16)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"steps": 1, "step": "euler", "horizon": 1.0, "beta_factor": 1.0},  # the ordinary layer
    {"steps": 1, "step": "euler", "horizon": 1.0, "beta_factor": 0.25},
    {"steps": 1, "step": "euler", "horizon": 1.0, "beta_factor": 4.0},
    {"steps": 4, "step": "euler", "horizon": 1.0, "beta_factor": 1.0},
    {"steps": 1, "step": "rk4", "horizon": 1.0, "beta_factor": 1.0},
    {"steps": 2, "step": "euler", "horizon": 2.0, "beta_factor": 1.0},
    {"steps": 4, "step": "euler", "horizon": 4.0, "beta_factor": 1.0},
)


def sentences(seed: int) -> tuple[list[str], list[int], list[str], list[int]]:
    """Training and held-out sentences of the help pages, as many of each page, with the number of their page."""
    from pydoc_data.topics import topics

    generator = torch.Generator().manual_seed(seed)
    parts: tuple[list[str], list[int], list[str], list[int]] = ([], [], [], [])
    for y, page in enumerate(PAGES):
        text = re.sub(r"\s+", " ", topics[page])
        candidates = sorted({s for s in re.split(r"(?<=[.:]) ", text) if WORDS[0] <= len(s.split()) <= WORDS[1]})
        order = torch.randperm(len(candidates), generator=generator).tolist()
        train, held_out = TRAINING // len(PAGES), HELD_OUT // len(PAGES)
        for i in order[:train]:
            parts[0].append(candidates[i])
            parts[1].append(y)
        for i in order[train : train + held_out]:
            parts[2].append(candidates[i])
            parts[3].append(y)
    return parts


class Classifier(nn.Module):
    """The mean token of an encoder, and a linear head: what Trainer calls."""

    def __init__(self, encoder: nn.Module, labels: int, seed: int) -> None:
        super().__init__()
        self.encoder = encoder
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = nn.Linear(encoder.config.hidden_size, labels)  # type: ignore[union-attr, arg-type]

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        shown = attention_mask[..., None].to(x.dtype)
        logits = self.head((x * shown).sum(-2) / shown.sum(-2))
        loss = torch.zeros(()) if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def fine_tune(options: dict[str, Any], seed: int, updates: int) -> dict[str, Any]:
    """One run: accuracy on held-out sentences, gradient norms, and the beta factors the layers end with."""
    import transformers

    from attn_flow.hooks import flows, replace_attention
    from attn_flow.hooks.demo import minilm

    encoder, tokenizer = minilm()
    replace_attention(encoder, **options, learn_beta=True)
    encoder.embeddings.requires_grad_(False)  # type: ignore[operator, union-attr]
    model = Classifier(encoder, len(PAGES), seed)
    texts, y, held_texts, held_y = sentences(seed)

    def rows(texts: list[str], y: list[int]) -> list[dict[str, Any]]:
        ids = tokenizer(texts, truncation=True, max_length=24, return_token_type_ids=False)
        return [{**{k: ids[k][i] for k in ids}, "labels": y[i]} for i in range(len(texts))]

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=updates,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=32,
            learning_rate=1e-4,
            warmup_steps=max(1, updates // 10),
            max_grad_norm=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=seed,
        )
        collate = transformers.DataCollatorWithPadding(tokenizer)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows(texts, y), data_collator=collate)  # type: ignore[arg-type]
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        predicted = trainer.predict(rows(held_texts, held_y)).predictions.argmax(-1)  # type: ignore[arg-type, union-attr]
    history = trainer.state.log_history
    norms = [row["grad_norm"] for row in history if "grad_norm" in row]
    losses = [row["loss"] for row in history if "loss" in row]
    factors = [flow.beta_factor.tolist() for flow in flows(encoder).values()]
    return {
        **options,
        "seed": seed,
        "accuracy": float((torch.tensor(predicted) == torch.tensor(held_y)).double().mean()),
        "first_gradient": norms[0],
        "largest_gradient": max(norms),
        "first_loss": losses[0],
        "last_loss": sum(losses[-5:]) / len(losses[-5:]),
        "beta_factors": factors,
    }


def compute(quick: bool = False, seed: int = 0, progress: bool = False, parts: Path | None = None) -> dict[str, Any]:
    """parts: see `kept_part`. The claims on beta and on T = 4 were written after the runs they are about."""
    options, seeds, updates = (OPTIONS[:1] + OPTIONS[5:6], 1, 8) if quick else (OPTIONS, 2, 40)
    runs = []
    with progress_bar("fine_tuning", len(options) * seeds, progress) as advance:
        for one in options:
            for s in range(seed, seed + seeds):
                name = "_".join(f"{value}" for value in (*one.values(), s))
                runs.append(
                    kept_part(parts, name, {**one, "seed": s, "updates": updates}, partial(fine_tune, one, s, updates))
                )
                advance()
    table = [mean_over_seeds(runs, one) for one in options]
    return {
        "seed": seed,
        "seeds": seeds,
        "updates": updates,
        "runs": runs,
        "table": table,
        "claims": _claims(table, runs),
    }


def _claims(table: list[dict[str, Any]], runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    plain, rest = table[0], table[1:]
    short = [row for row in rest if row["horizon"] <= 2]
    claims = [
        at_least("ordinary layers: held-out accuracy, twice that of a guess", plain["accuracy"], 2 / len(PAGES)),
        at_most(
            "horizon at most 2: largest norm of a gradient",
            max(run["largest_gradient"] for run in runs if run["horizon"] <= 2),
            100,
        ),
        at_most(
            "horizon at most 2, beta as trained or colder: held-out accuracy below that of ordinary layers by at most",
            max(plain["accuracy"] - row["accuracy"] for row in short if row["beta_factor"] >= 1),
            0.05,
        ),
    ]
    for row in rest:
        if row["beta_factor"] < 1:
            lost = plain["accuracy"] - row["accuracy"]
            claims.append(at_least(f"beta x {row['beta_factor']:g}: accuracy lost to ordinary layers", lost, 0.05))
        if row["horizon"] > 2:
            claims.append(at_least(f"horizon {row['horizon']:g}: largest norm", row["largest_gradient"], 100))
    return claims


def mean_over_seeds(runs: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
    mine = [run for run in runs if all(run[name] == value for name, value in options.items())]
    numbers = ("accuracy", "first_gradient", "largest_gradient", "last_loss")
    means = {name: sum(run[name] for run in mine) / len(mine) for name in numbers}
    spread = torch.tensor([run["accuracy"] for run in mine]).std(correction=0)
    moved = torch.tensor([run["beta_factors"] for run in mine]).log() - torch.tensor(options["beta_factor"]).log()
    return {**options, **means, "spread": float(spread), "beta_moved": float(moved.abs().mean())}


def words(row: dict[str, Any]) -> str:
    return f"{row['steps']} {row['step']}, T={row['horizon']:g}, beta x {row['beta_factor']:g}"


def plot(numbers: dict[str, Any]) -> Figure:
    figure, axes = panels(2, title="MiniLM with continuous layers, fine-tuned on a few sentences")
    table = numbers["table"]
    names, places = [words(row) for row in table], range(len(table))
    axes[0].barh(places, [row["accuracy"] for row in table], xerr=[row["spread"] for row in table], color="0.6")
    axes[1].barh(places, [row["largest_gradient"] for row in table], color="0.8", label="largest")
    axes[1].barh(places, [row["first_gradient"] for row in table], height=0.4, color="0.3", label="first")
    for axis in axes:
        axis.set_yticks(list(places), names)
        axis.invert_yaxis()
    axes[1].set_yticks([])
    axes[1].set_xscale("log")
    axes[0].axvline(1 / len(PAGES), color="k", linestyle=":", label="a guess")
    axes[0].legend(loc="lower right")
    label(axes[0], "held-out accuracy", "share right", "")
    label(axes[1], "norm of the gradient before clipping", "norm", "")
    count = sum(c["holds"] for c in numbers["claims"])
    caption(
        figure,
        f"{TRAINING} training and {HELD_OUT} held-out sentences of {len(PAGES)} help pages, {numbers['updates']} "
        f"updates, seeds: {numbers['seeds']}. {count} of {len(numbers['claims'])} claims hold.",
    )
    return figure
