"""Trained stacks in use: predictions, runs that go on, data and metrics of one's own, hooks on a stack, its figure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from matplotlib.figure import Figure
from typer.testing import CliRunner

from attn_flow.cli.training import predict
from attn_flow.hooks import attentions, blocks, geometries, record, wrap
from attn_flow.nn import DeepStack
from attn_flow.train import Recipe, load, recipe, tensor_task, text_task, train_stack, what_was_learned
from attn_flow.train.figures import plane, read_log, run_figure
from attn_flow.train.observation import layer_words

SMALL = {"tokens": 6, "dim": 8, "steps": 1, "batch": 8, "updates": 12, "warmup": 2}
TEXTS = [f"{('poor', 'lovely')[i % 2]} {('film', 'song', 'book')[i % 3]} {i % 5}" for i in range(60)]
LABELS = [("no", "yes")[i % 2] for i in range(60)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    task = text_task(TEXTS, LABELS, tokens=4)
    train_stack(replace(Recipe("own"), **{**SMALL, "updates": 80, "lr": 0.02}, beta_mode="learned"), out, task=task)
    return out


def test_predictions_are_those_of_the_stack_by_hand(run: Path) -> None:
    stack = load(run)
    assert stack.recipe.updates == 80
    with pytest.warns(UserWarning, match="1 of 3 texts hold no word"):
        answers = stack.predict(["lovely thing", "poor song", "quite another"])
    assert [a.label for a in answers[:2]] == ["yes", "no"]
    assert stack.reads is not None
    ids = torch.tensor([[2 + stack.reads.words.index("poor"), 2 + stack.reads.words.index("song"), 0, 0]])
    with torch.no_grad():
        chance = stack(ids, ids > 0).softmax(-1)[0]
    assert answers[1].probability == pytest.approx(float(chance[0]), rel=1e-6)
    with pytest.raises(ValueError, match="one string"):
        stack.predict("poor song")
    with pytest.raises(ValueError, match=r"texts\[1\] is 3, expected a string"):
        stack.predict(["poor song", 3])
    assert stack.predict([]) == []


def test_predict_from_the_command_line(run: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(predict)
    (tmp_path / "t.txt").write_text("a poor book\n")
    said = CliRunner().invoke(app, [str(run), "lovely film", "--file", str(tmp_path / "t.txt"), "--json"])
    assert said.exit_code == 0, said.exception
    assert [row["label"] for row in json.loads(said.output)] == ["yes", "no"]
    assert isinstance(CliRunner().invoke(app, [str(run)]).exception, ValueError)


def test_hidden_characters_are_filled_in(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("ab" * 400)
    made = replace(recipe("masked"), **{**SMALL, "updates": 60, "lr": 0.02, "file": str(tmp_path / "t.txt")})
    train_stack(made, tmp_path / "run", tensorboard=False)
    assert [a.label for a in load(tmp_path / "run").predict(["ab_bab", "bab_"])] == ["ababab", "baba"]


def test_a_generated_task_has_no_words(tmp_path: Path) -> None:
    train_stack(replace(recipe("majority"), **SMALL), tmp_path, tensorboard=False)
    with pytest.raises(ValueError, match="'majority', not on texts"):
        load(tmp_path).predict(["a"])


def test_a_finished_run_goes_on_and_an_unfinished_one_does_not_change_its_end(tmp_path: Path) -> None:
    short = replace(recipe("majority"), **SMALL)
    train_stack(short, tmp_path, tensorboard=False)
    before = load(tmp_path).state_dict()
    trained = train_stack(replace(short, updates=20), tmp_path, tensorboard=False)
    assert trained.summary["resumed_at"] == 12
    assert [line["update"] for line in read_log(tmp_path / "log.jsonl")] == list(range(21))
    assert any(not torch.equal(p, before[name]) for name, p in load(tmp_path).state_dict().items())
    with pytest.raises(ValueError, match=r"updates 20 \(there\) and 15 \(now\)"):
        train_stack(replace(short, updates=15), tmp_path, tensorboard=False)
    annealed = replace(short, beta_mode="annealed")
    train_stack(annealed, tmp_path / "cold", tensorboard=False)
    with pytest.raises(ValueError, match="would heat it"):
        train_stack(replace(annealed, updates=20), tmp_path / "cold", tensorboard=False)


def test_data_and_metrics_of_ones_own() -> None:
    x = torch.randint(5, (50, 6), generator=torch.Generator().manual_seed(0))
    y = (x == 0).any(-1).long()
    task = tensor_task(x, y, inputs=5, outputs=2)
    held: list[torch.Tensor] = []

    def recall(logits: torch.Tensor, y: torch.Tensor) -> float:
        held.append(y)
        return float((logits.argmax(-1)[y == 1] == 1).float().mean())

    trained = train_stack(replace(Recipe("own"), **SMALL), task=task, metrics={"recall": recall})
    assert torch.equal(held[-1], y[40:])  # the last fifth
    with torch.no_grad():
        said = trained.stack(x[40:]).argmax(-1)[y[40:] == 1]
    assert trained.summary["metrics"]["recall"] == pytest.approx(float(said.float().mean()))
    with pytest.raises(ValueError, match="task="):
        train_stack(Recipe("own"))
    with pytest.raises(ValueError, match="only there"):
        train_stack(recipe("majority"), task=task)
    with pytest.raises(ValueError, match="x holds 0 to 4, expected 0 to 3"):
        tensor_task(x, y, inputs=4, outputs=2)


def test_hooks_know_a_stack() -> None:
    torch.manual_seed(0)
    stack = DeepStack(inputs=7, outputs=2, length=5, dim=6, depth=2, steps=2, step="euler", beta=3.0).eval()
    ids = torch.randint(7, (4, 5))
    read = attentions(stack)
    assert [a.common_beta for a in read] == [3.0, 3.0]
    assert geometries(stack) == [stack.geometry] * 2
    plain = record(stack, ids)
    assert torch.equal(plain.x, stack.trajectory(ids).x)
    expected = stack.rerun(beta_factor=2.0, steps=5, horizon=2.0, step="rk4")(ids)
    with wrap(stack, beta_factor=2.0, steps=5, horizon=2.0, step="rk4"):
        torch.testing.assert_close(stack(ids), expected)
    assert torch.equal(record(stack, ids).x, plain.x)
    assert stack.layers[0].step.name == "euler"
    with wrap(stack, [1], steps=3):
        assert torch.equal(record(stack, ids).x[1], plain.x[1])
    with pytest.raises(ValueError, match="no blocks of a pretrained"):
        blocks(stack)
    with pytest.raises(ValueError, match="equal steps"):
        DeepStack(inputs=7, outputs=2, step="adaptive")


def test_the_figure_and_the_words(run: Path) -> None:
    stack, task = load(run), text_task(TEXTS, LABELS, tokens=4)
    found = what_was_learned(stack, task)
    words = found.words()
    assert len(words) == 1
    assert words[0].startswith("Layer 0 (beta ")
    log = read_log(run / "log.jsonl")
    assert log[-1]["beta.0.0"] == pytest.approx(float(stack.layers[0].beta[0]))
    summary = {"task": "own", "updates": 80, "parameters": 1, "accuracy": 1.0, "chance": 0.5, "recipe": {"seed": 0}}
    summary["beta"] = [stack.layers[0].beta.tolist()]
    figure = run_figure(log, found.path, summary)
    assert isinstance(figure, Figure)
    assert [axis.get_title(loc="left") for axis in figure.axes][:3] == ["loss", "accuracy", "beta"]
    assert figure.axes[0].lines[1].get_linestyle() == "None"  # two evaluations are two points, no line between them
    low, high = figure.axes[2].get_ylim()
    assert 0 < low < float(stack.layers[0].beta[0]) < high
    layer = {"layer": 1, "beta": [2.0, 4.0], "rank": {"start": 3.0, "end": 1.5}, "limit": {"case": "fixed"}}
    layer |= {"clusters": {"start": 6.0, "end": 2.0}, "w2": {"start": 1.0, "end": 0.25}}
    assert layer_words(layer) == (
        "Layer 1 (beta 2 to 4) gathers its tokens: 6.0 groups become 2.0; they fill 1.5 directions, 3.0 before. Run "
        "for ever at zero temperature, its weights would send every token to a fixed place that its start decides: it "
        "goes 75% of the way there."
    )


def test_the_plane_keeps_the_distances_of_a_flat_cloud() -> None:
    flat = torch.randn(3, 5, 2, dtype=torch.float64)
    turned = flat @ torch.linalg.qr(torch.randn(6, 2, dtype=torch.float64)).Q.mT
    got = plane(turned).flatten(0, 1)
    torch.testing.assert_close(torch.cdist(got, got), torch.cdist(flat.flatten(0, 1), flat.flatten(0, 1)))
