"""What was learned: the numbers of each layer, and its sentences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attn_flow.train import Recipe, recipe, tensor_task, train_stack, what_was_learned
from attn_flow.train.observation import Learned
from attn_flow.train.tasks import generator_of


def test_numbers_and_sentences(tmp_path: Path) -> None:
    small = {"tokens": 6, "dim": 8, "depth": 2, "batch": 8, "updates": 6, "warmup": 2, "learn_beta": True}
    trained = train_stack(replace(recipe("majority"), **small), tmp_path)
    learned = what_was_learned(trained.stack, trained.task)
    inputs = trained.task.held_out(16, generator_of(0, "learned")).x
    assert torch.equal(learned.path.x, trained.stack.trajectory(inputs).x)
    for l, layer in enumerate(learned.layers):
        assert layer["beta"] == pytest.approx(trained.summary["beta"][l])
        assert 1 <= layer["clusters"]["end"] <= 6
    assert [text[:14] for text in learned.sentences()] == ["Layer 0 (beta ", "Layer 1 (beta "]


def test_vectors_padded_with_zeros() -> None:
    x = torch.randn(10, 5, 2, generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(5) < torch.arange(10)[:, None] % 3 + 2).long()  # as tokenizers make it
    task = tensor_task(x * mask[..., None], torch.arange(10) % 2, inputs=2, outputs=2, mask=mask)
    trained = train_stack(Recipe("own", dim=2, batch=4, updates=2), task=task)
    (layer,) = what_was_learned(trained.stack, task).layers
    assert 1 <= layer["clusters"]["start"] <= 4


def test_a_sentence_says_what_the_numbers_say() -> None:
    layer = {"layer": 1, "beta": [2.0, 4.0], "limit": {"case": "fixed"}}
    layer |= {"clusters": {"start": 6.0, "end": 2.0}, "w2": {"start": 1.0, "end": 0.25}}
    path = torch.zeros(0)
    text = Learned(path, [layer]).sentences()[0]  # type: ignore[arg-type]
    assert "Layer 1 (beta 2, 4): 6.0 clusters become 2.0." in text
    assert "goes 75% of the way" in text
    assert "moves away" in Learned(path, [layer | {"w2": {"start": 1.0, "end": 2.0}}]).sentences()[0]  # type: ignore
