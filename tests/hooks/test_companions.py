"""Replaced attention with what people train and export by: Trainer, autocast, compile, DDP, FSDP2, export, ONNX."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from encoder_zoo import inputs, output, tiny
from tolerances import rounding
from torch import Tensor, nn

from attn_flow.hooks import flows, load, replace_attention

# One of each layout: the others of the zoo differ in nothing that a compiler sees.
LAYOUTS = ["BERT", "DistilBERT", "ALBERT", "DeBERTa", "DeBERTa-v3", "MPNet", "ModernBERT", "torch", "T5 encoder"]
LAYOUTS += ["ViT", "DINOv2", "CLIP vision", "GPT-2", "GPT-NeoX", "Llama"]
OPTIONS = {"steps": 2, "step": "rk4", "beta_factor": 1.3, "learn_beta": True}


def replaced(name: str = "BERT", dtype: torch.dtype = torch.float32) -> nn.Module:
    return replace_attention(tiny(name, dtype), None if name == "ALBERT" else [0, 2], **OPTIONS)


def classifier() -> nn.Module:
    config = tiny("BERT").config
    config.num_labels = 2
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        setattr(config, name, 0.0)
    torch.manual_seed(0)
    return replace_attention(transformers.BertForSequenceClassification(config), **OPTIONS)


class Letters(torch.utils.data.Dataset):
    """Ids whose first token tells the label."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.randint(10, 60, (6,), generator=torch.Generator().manual_seed(i))
        ids[0] = 3 + i % 2
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor(i % 2)}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_trains_saves_and_resumes(checkpointing: bool, tmp_path) -> None:
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=12,
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        logging_steps=1,
        save_steps=6,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        gradient_checkpointing=checkpointing,
        seed=0,
    )
    trainer = transformers.Trainer(model=classifier(), args=arguments, train_dataset=Letters())
    trainer.train()
    assert len([row for row in trainer.state.log_history if "loss" in row]) == 12
    trained = trainer.model.eval()
    ids = torch.stack([Letters()[i]["input_ids"] for i in range(32)])
    with torch.no_grad():
        expected = trained(input_ids=ids).logits
    y = torch.arange(32) % 2
    assert torch.equal(expected.argmax(-1), y)  # a guess is right in all of them once in 2^32
    assert float(nn.functional.cross_entropy(expected, y)) < math.log(2)  # what a model that is blind to its input has
    for flow in flows(trained).values():  # heads learned apart
        assert float(flow.log_beta_factor.detach().std()) > 0
    again = load(tmp_path / "checkpoint-12")
    assert all(torch.equal(p, trained.state_dict()[name]) for name, p in again.state_dict().items())
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, expected)
    other = transformers.Trainer(model=classifier(), args=arguments, train_dataset=Letters())
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert all(torch.equal(p, trained.state_dict()[name]) for name, p in other.model.state_dict().items())


@pytest.mark.parametrize("name", ["BERT", "ModernBERT", "GPT-2", "DistilBERT"])
def test_under_bfloat16_autocast(name: str) -> None:
    """Near the float32 run: bfloat16 has 8 bits, which three layers of sums amplify; and gradients are finite."""
    model, x = replaced(name), inputs(name)
    with torch.no_grad():
        expected = output(model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = output(model, x)
    tokens = x["attention_mask"].bool()
    error = float(((got.float() - expected)[tokens].norm() / expected[tokens].norm()).detach())
    assert 0 < error < 32 * torch.finfo(torch.bfloat16).eps
    got[tokens].float().sin().sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)
    assert float(flows(model)[0].log_beta_factor.grad.abs().sum()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_it_is_the_same_in_one_graph(name: str) -> None:
    model, x = replaced(name), inputs(name)
    with torch.no_grad():
        expected = output(model, x)
    torch._dynamo.reset()
    with torch.no_grad():
        got = output(torch.compile(model, backend="aot_eager", fullgraph=True), x)
    torch.testing.assert_close(got, expected, rtol=0, atol=rounding(expected, 8 * 3 * 48))


@pytest.mark.slow
def test_compiled_it_has_the_same_gradients() -> None:
    grads = []
    for compiled in (False, True):
        model, x = replaced(dtype=torch.float64), inputs("BERT")
        torch._dynamo.reset()
        output(torch.compile(model, backend="inductor") if compiled else model, x).sin().sum().backward()
        grads.append(flows(model)[0].log_beta_factor.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_make_the_update_of_one(kind: str, tmp_path) -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(here.parent), *sys.path])}
    run = [*command, str(here / "replacing_worker.py"), kind, str(tmp_path / "state.pt")]
    done = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    got = torch.load(tmp_path / "state.pt", weights_only=True)
    model = replaced()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    output(model, inputs("BERT")).sin().mean().backward()
    optimiser.step()
    expected = model.state_dict()
    assert set(got) == set(expected)
    for name, p in expected.items():  # a gradient sums over 2 x 7 tokens and three layers of at most 48 terms
        torch.testing.assert_close(got[name], p, rtol=0, atol=rounding(p, 2 * 7 * 48) + 1e-7, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BERT", "ALBERT", "GPT-2", "Llama", "T5 encoder", "ViT"])
def test_exported(name: str) -> None:
    model, x = replaced(name), inputs(name)
    with torch.no_grad():
        expected = output(model, x)
        exported = torch.export.export(_First(model), (), x)
        got = exported.module()(**x)
    torch.testing.assert_close(got, expected, rtol=0, atol=rounding(expected, 8 * 3 * 48))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BERT", "ALBERT", "GPT-2"])
def test_onnx(name: str, tmp_path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, x = replaced(name), inputs(name)
    with torch.no_grad():
        expected = output(model, x)
        torch.onnx.export(_First(model), (), kwargs=x, f=str(tmp_path / "model.onnx"), dynamo=True, verbose=False)
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {i.name: x[i.name].numpy() for i in session.get_inputs()})
    tokens = x["attention_mask"].bool()
    torch.testing.assert_close(
        torch.from_numpy(got)[tokens], expected[tokens], rtol=0, atol=rounding(expected, 64 * 3 * 48)
    )


class _First(nn.Module):
    """The hidden states alone, by the inputs' names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
    ) -> Tensor:
        x = {"input_ids": input_ids, "attention_mask": attention_mask, "pixel_values": pixel_values}
        return output(self.model, {name: t for name, t in x.items() if t is not None})
