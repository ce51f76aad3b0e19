"""Tasks: their answers by literal loops; files of texts; recipes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from attn_flow.train import Recipe, recipe, tensor_task


def draw(task: str, size: int = 200, **options: object):
    made = replace(recipe(task), **options).make_task()  # type: ignore[arg-type]
    return made, made.draw(size, torch.Generator().manual_seed(0))


def test_majority() -> None:
    task, batch = draw("majority", tokens=7)
    for x, y in zip(batch.x.tolist(), batch.y.tolist()):
        (winner, most), *others = Counter(x).most_common()
        assert winner == y
        assert all(count < most for _, count in others)
    assert batch.y.bincount().min() > 20
    assert task.chance == 0.25


def test_recall() -> None:
    _, batch = draw("recall", tokens=5)
    for x, y in zip(batch.x.tolist(), batch.y.tolist()):
        *pairs, (key, blank) = x
        assert len({k for k, _ in pairs}) == 4
        assert blank == 24
        assert y == [-100] * 4 + [dict(pairs)[key] - 16]


def test_side() -> None:
    """The majority decides; the mean of the points says little, and so does any magnitude."""
    task, batch = draw("side", size=2000, tokens=100)
    torch.testing.assert_close(batch.x.norm(dim=-1), torch.ones(2000, 100))
    height = batch.x @ torch.tensor([2.0, -1.0, 2.0]) / 3
    share = (height > 0).double().mean(-1)
    assert torch.equal((share > 0.5).long(), batch.y)
    assert float(torch.maximum(share, 1 - share).min()) >= 0.549
    with pytest.raises(ValueError, match="tokens = 19, expected at least 20"):
        draw("side", tokens=19)
    with pytest.raises(ValueError, match="tokens = 18, expected 2 to 17"):
        draw("recall", tokens=18)
    assert 0.5 < float(((height.mean(-1) > 0).long() == batch.y).double().mean()) < 0.66
    assert task.chance == 0.5
    assert abs(float(batch.y.double().mean()) - 0.5) < 0.05


def test_tensor_task() -> None:
    x = torch.randint(5, (50, 6), generator=torch.Generator().manual_seed(0))
    y = (x == 0).any(-1)
    task = tensor_task(x, y, inputs=5, outputs=2)
    assert task.held_out(1, torch.Generator()).y.dtype == torch.int64  # which cross-entropy takes
    assert torch.equal(task.held_out(100, torch.Generator()).x, x[40:])
    rows = {tuple(row) for row in task.draw(300, torch.Generator()).x.tolist()}
    assert rows <= {tuple(row) for row in x[:40].tolist()}
    for arguments, message in (
        ((x, y, 4, 2), "x has values outside of 0 to 3"),
        ((x, y + 1, 5, 2), "y has values outside of 0 to 1"),
        ((x, y[:9], 5, 2), "expected .* ids or .* vectors, and their answers"),
        ((x, y, 5, 2, torch.ones(9, 6)), r"mask \(9, 6\), expected"),
        ((x, y.float(), 5, 2), "y has dtype torch.float32, expected integers"),
        ((x.numpy(), y, 5, 2), "x is a ndarray, expected a torch.Tensor"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            tensor_task(*arguments[:2], **dict(zip(("inputs", "outputs", "mask"), arguments[2:])))


def test_recipes() -> None:
    r = replace(recipe("recall"), beta=3.0)
    assert (r.beta, r.depth, r.tokens, r.updates) == (3.0, 1, 9, 300)
    r = replace(recipe("majority"), updates=100, warmup=10, lr=1.0)
    assert [r.lr_at(k) for k in (0, 10, 55, 100)] == pytest.approx([0.1, 1.0, 0.505, 0.01])
    for options, message in (
        ({"task": "addition"}, "task = 'addition', expected one of 'majority', 'recall'"),
        ({"task": "majority", "lr": 0.0}, "lr = 0.0, expected a positive, finite number"),
        ({"task": "majority", "updates": 0}, "updates = 0, expected an integer"),
        ({"task": "side", "symmetric": "G"}, "symmetric = 'G', expected one of 'none', 'GV'"),
        ({"task": "side", "symmetric": "GV", "heads": 2}, "symmetric = 'GV' with 2 heads, expected one"),
    ):
        with pytest.raises(ValueError, match=message):
            Recipe(**options)
