"""Activations of real encoders: in memory by name, as a Trajectory, and from texts as people have them."""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from encoder_zoo import (
    IMAGES,
    TEXT,
    ZOO,
    every_architecture,
    fingerprint,
    inputs,
    mask,
    output,
    tiny,
    tokenizer,
    words,
)
from torch import Tensor, nn

from attn_flow.hooks import attentions, blocks, record, recording, scale_beta, self_check, wrap

V4 = transformers.__version__.startswith("4.")

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
def test_the_residual_stream_adds_up(name: str) -> None:
    """A post-norm block is norm2(m + ffn) with m = norm1(x + attn), a pre-norm block x + attn + ffn."""
    model, x = tiny(name, torch.float64), inputs(name, torch.float64)
    is_parallel, is_post = (blocks(model)[0].norm_placement == kind for kind in ("parallel", "post"))
    points = ["hook_in", "attn.hook_out", "mlp.hook_out", "hook_out", *([] if is_parallel else ["hook_resid_mid"])]
    path = record(model, x, points=points)
    state = {point: s[path.mask] for point, s in zip(path.about["points"], path.x)}
    tolerance = 1e-6 if name == "DeBERTa" else 1e-13  # its norm works in float32
    for i, block in enumerate(blocks(model)):
        before, attn, ffn, after, *middle = (state[f"blocks.{i}.{point}"] for point in points)
        if is_parallel:
            torch.testing.assert_close(before + attn + ffn, after, rtol=0, atol=tolerance)
            continue
        norm1, norm2 = (
            block[path] if is_post else nn.Identity() for path in (block.architecture.norm1, block.architecture.norm2)
        )
        torch.testing.assert_close(norm1(before + attn), middle[0], rtol=0, atol=tolerance)
        torch.testing.assert_close(norm2(middle[0] + ffn), after, rtol=0, atol=tolerance)
        if i and (name, i) != ("DeBERTa-v3", 1):  # a convolution stands between its first two blocks
            assert torch.equal(state[f"blocks.{i - 1}.hook_out"], before)


@pytest.mark.parametrize("name", [n for n in ZOO if not n.startswith("torch")])
def test_levels_are_the_hidden_states_of_transformers(name: str) -> None:
    model, x = tiny(name), inputs(name)
    path = record(model, x)
    with torch.no_grad():
        states = model(**x, output_hidden_states=True).hidden_states
    assert len(states) == len(path) == 4
    assert all(torch.equal(path.x[level][path.mask], states[level][path.mask]) for level in range(3))
    last = path.x[3]  # transformers may have put it through the final norm
    candidates = (last, model.get_submodule(FINAL[name])(last) if name in FINAL else last)
    assert any(torch.equal(y[path.mask], states[3][path.mask]) for y in candidates)


@every_architecture
def test_the_model_is_left_as_it_was(name: str) -> None:
    model, x = tiny(name), inputs(name)
    model.train()
    next(iter(model.children())).eval()  # a mixed mode must survive
    output(model, x)  # ModernBERT settles an option of its own at the first call
    before, weights = fingerprint(model), copy.deepcopy(model.state_dict())
    record(model, x, points=["resid", "attn.hook_out", "mlp.hook_out"])
    assert fingerprint(model) == before
    handle = blocks(model)[-1].module.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
    broken = fingerprint(model)
    with pytest.raises(RuntimeError, match="stop"):
        record(model, x)
    assert fingerprint(model) == broken
    handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(weights.values(), model.state_dict().values()))


def eager_weights(model: Any, x: dict[str, Tensor]) -> tuple[Tensor, ...]:
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        return eager(**x, output_attentions=True).attentions


@pytest.mark.parametrize("name", [n for n in ZOO if not n.startswith("torch")])
def test_patterns_are_the_attention_weights_of_transformers(name: str) -> None:
    model, x = tiny(name, torch.float64), inputs(name, torch.float64)
    points = ["attn.q.hook_out", "attn.k.hook_out", "attn.hook_attn_scores", "attn.hook_pattern"]
    with recording(model, points) as cache, torch.no_grad():
        output(model, x)
    n = 17 if name in IMAGES else 7
    assert cache["blocks.1.attn.q.hook_out"].shape == (2, n, 4, 8)
    assert cache["blocks.1.attn.k.hook_out"].shape == (2, n, 2 if name == "Llama" else 4, 8)
    for i, expected in enumerate(eager_weights(model, x)):
        pattern, scores = cache[f"blocks.{i}.attn.hook_pattern"], cache[f"blocks.{i}.attn.hook_attn_scores"]
        assert pattern.shape == (2, 4, n, n)
        is_token = mask(name)[:, None, :, None].expand_as(pattern)
        torch.testing.assert_close(pattern[is_token], expected.double()[is_token], rtol=0, atol=1e-6)
        torch.testing.assert_close(scores.softmax(-1), pattern)


def test_patterns_of_unknown_positions_and_other_temperatures() -> None:
    x = {"input_ids": torch.randint(3, 60, (1, 12))}
    helium = transformers.HeliumModel(transformers.HeliumConfig(**TEXT, num_key_value_heads=2, head_dim=8)).eval()
    with recording(helium, "blocks.0.attn.hook_pattern") as cache, torch.no_grad():
        helium(**x)
    with pytest.raises(ValueError, match="HeliumModel rotates pairs of neighbouring coordinates"):
        cache["blocks.0.attn.hook_pattern"]
    t5 = tiny("T5 encoder")
    with recording(t5, "blocks.0.attn.hook_pattern") as cache, scale_beta(t5, 0.0), torch.no_grad():
        t5(**x)
    assert bool(cache["blocks.0.attn.hook_pattern"].isfinite().all())
    bert, x = tiny("BERT", torch.float64), inputs("BERT")
    with recording(bert, "attn.hook_attn_scores") as cache, torch.no_grad():
        bert(**x)
        plain = cache["blocks.0.attn.hook_attn_scores"]
        with scale_beta(bert, 2.0), wrap(bert, [0], beta_factor=1.5, steps=2):
            bert(**x)
        torch.testing.assert_close(cache["blocks.0.attn.hook_attn_scores"], 3 * plain)


T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
SPECIAL = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
OTHERS: dict[str, tuple[dict[str, Any], bool]] = {  # options, and whether they are causal
    "ModernBert": ({"local_attention": 4, **dict.fromkeys(SPECIAL, 1)}, False),
    "Mistral": ({"sliding_window": 4}, True),
    "Qwen2Moe": ({"num_experts": 4}, True),
    "EuroBert": ({}, False),  # encoders in Llama's layout
    "Ultrabert": ({}, False),
    "Llama": ({"is_causal": False}, False),
    "Bert": ({"is_decoder": True}, True),
    "Deberta": ({"relative_attention": False}, False),
    "CLIPText": ({"eos_token_id": 2}, True),
    "SiglipText": ({}, False),
    "OpenAIGPT": (GPT, True),
    "UMT5Encoder": (T5, False),  # every layer has a table of its own
}


@pytest.mark.filterwarnings("ignore:a layer evaluates its attention several times")
@pytest.mark.parametrize("name", list(OTHERS))
def test_patterns_of_other_models(name: str) -> None:
    options, causal = OTHERS[name]
    if not hasattr(transformers, f"{name}Model") or ("is_causal" in options and V4):
        pytest.skip(f"transformers {transformers.__version__} has no such {name}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name.removesuffix('Encoder')}Config")
    model = getattr(transformers, f"{name}Model")(config(**{**TEXT, "num_key_value_heads": 2, **options})).eval()
    for p in model.parameters():
        if p.ndim == 2:
            p.data.normal_(0, 0.4)
    x = {"input_ids": torch.randint(3, 60, (1, 12))}
    with recording(model, "attn.hook_pattern") as cache, torch.no_grad():
        model(**x)
    for i, weights in enumerate(eager_weights(model, x)):
        torch.testing.assert_close(cache[f"blocks.{i}.attn.hook_pattern"], weights, rtol=0, atol=1e-5)
    assert attentions(model)[1].causal == causal
    assert all(check.exact or "position" in check.omits for check in self_check(model, x))
    with wrap(model, [1]), torch.no_grad():
        wrapped = model(**x).last_hidden_state
    torch.testing.assert_close(wrapped, model(**x).last_hidden_state, rtol=0, atol=1e-4)
    with wrap(model, [1], steps=2), torch.no_grad():  # without a cache, which each evaluation would fill
        assert getattr(model(**x), "past_key_values", None) is None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("GPTBigCode", GPT, "of no known architecture"),
        ("HunYuanDenseV1", {"head_dim": 8}, "of no known architecture"),
        ("GptOss", {"num_local_experts": 4, "head_dim": 8}, "its softmax has sinks besides the tokens"),
        ("DiffLlama", {}, "its attention differs from the weights read"),
        ("ConvBert", {"embedding_size": 32}, r"queries \(2, 8, 32\), and the output projection takes 32 numbers"),
    ],
)
def test_models_that_compute_something_else(name: str, options: dict[str, Any], message: str) -> None:
    if not hasattr(transformers, f"{name}Model"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = getattr(transformers, f"{name}Config")(**{**TEXT, "num_key_value_heads": 4, **options})
    with pytest.raises(ValueError, match=message):
        self_check(getattr(transformers, f"{name}Model")(config).eval(), {"input_ids": torch.randint(3, 60, (1, 12))})


@pytest.mark.parametrize("name", ["torch", "torch pre-norm"])
@pytest.mark.parametrize("pairs", [torch.ones(7, 7).triu(1) == 1, torch.randn(7, 7), torch.randn(8, 7, 7)])
def test_the_mask_of_pairs_of_torch_encoders(name: str, pairs: Tensor) -> None:
    model = tiny(name)
    points = [f"blocks.1.attn.{point}" for point in ("hook_pattern", "v.hook_out", "hook_out")]
    with recording(model, points) as cache, torch.no_grad():
        model(**inputs(name), mask=pairs)
        weights, values, added = (cache[point] for point in points)
        expected = model.layers[1].self_attn.out_proj(torch.einsum("bhij,bjhk->bihk", weights, values).flatten(2))
    torch.testing.assert_close(added[cache.mask], expected[cache.mask], rtol=0, atol=1e-5)
    assert all("mask of pairs" in check.omits for check in self_check(model, {**inputs(name), "mask": pairs}))


def test_a_cache_by_name_with_gradients() -> None:
    model = tiny("GPT-2")
    before = fingerprint(model)
    with recording(model, ["hook_in", "blocks.1.attn.v.hook_out"]) as cache:
        assert list(cache) == ["blocks.0.hook_in", "blocks.1.hook_in", "blocks.2.hook_in", "blocks.1.attn.v.hook_out"]
        with pytest.raises(ValueError, match="was not computed"):
            cache["blocks.0.hook_in"]
        for seed in range(2):
            output(model, inputs("GPT-2", seed=seed))
    assert fingerprint(model) == before
    assert dict(cache)["blocks.1.hook_in"].shape == (2, 7, 32)
    assert torch.equal(
        cache["blocks.1.hook_in"],
        record(model, inputs("GPT-2", seed=1)).x[1].where(mask("GPT-2")[..., None], cache["blocks.1.hook_in"]),
    )
    cache["blocks.1.attn.v.hook_out"].square().sum().backward()
    assert model.h[1].attn.c_attn.weight.grad.abs().sum() > 0
    assert model.h[2].attn.c_attn.weight.grad is None
    with pytest.raises(KeyError, match=r"'blocks.1.hook_out' was not recorded"):
        cache["blocks.1.hook_out"]
    with pytest.raises(ValueError, match="one vector per token"):
        cache.trajectory()


def test_patterns_of_a_pass_with_cached_keys_are_refused() -> None:
    model, ids = tiny("GPT-2"), inputs("GPT-2")["input_ids"]
    with recording(model, "blocks.1.attn.hook_pattern") as cache, torch.no_grad():
        past = model(ids, past_key_values=transformers.DynamicCache()).past_key_values
        assert cache["blocks.1.attn.hook_pattern"].shape == (2, 4, 7, 7)
        model(ids[:, :1], past_key_values=past)
    with pytest.raises(ValueError, match="keys of earlier tokens are in a cache"):
        cache["blocks.1.attn.hook_pattern"]


def test_a_cache_as_a_frame() -> None:
    pytest.importorskip("pandas")
    model, tok = tiny("BERT"), tokenizer()
    names = ["blocks.1.hook_in", "blocks.0.attn.q.hook_out", "blocks.2.attn.hook_pattern"]
    with recording(model, names) as cache, torch.no_grad():
        model(**tok(["w1 w2 w3", "w4"], return_tensors="pt", padding=True, return_token_type_ids=False))
    frame = cache.to_frame("blocks.1.hook_in", tok)
    assert frame["token"].tolist() == ["[CLS]", "w1", "w2", "w3", "[SEP]", "[CLS]", "w4", "[SEP]"]
    assert frame.loc[6, [0, 31]].tolist() == cache["blocks.1.hook_in"][1, 1, [0, 31]].tolist()
    queries = cache.to_frame("blocks.0.attn.q.hook_out")
    assert len(queries) == 8 * 4
    row = queries.query("text == 1 and position == 2 and head == 3")
    assert row[list(range(8))].to_numpy().tolist() == [cache["blocks.0.attn.q.hook_out"][1, 2, 3].tolist()]
    pattern = cache.to_frame("blocks.2.attn.hook_pattern")
    assert len(pattern) == 4 * (5 * 5 + 3 * 3)
    assert pattern.groupby(["text", "head", "query"])["value"].sum().to_numpy() == pytest.approx(1.0)


def test_wrong_points() -> None:
    model, x = tiny("BERT"), inputs("BERT")
    path = record(model, x, points=["blocks.1.hook_out", "blocks.1.hook_resid_mid", "blocks.0.mlp.hook_out"])
    assert path.t.tolist() == [2, 1.5, 0]
    cases = (("hook_q", "hook_resid_mid"), ("blocks.3.hook_out", r"to .blocks\.2"), ([], r"points = \[\], expected"))
    for wrong, message in cases:
        with pytest.raises(ValueError, match=message):
            record(model, x, points=wrong)
    with pytest.raises(ValueError, match="in parallel"):
        record(tiny("GPT-NeoX"), inputs("GPT-NeoX"), points="hook_resid_mid")


@pytest.mark.parametrize("name", ["BERT", "MPNet", "ModernBERT", "T5 encoder", "ALBERT"])
def test_batches_of_different_lengths_equal_single_texts(name: str) -> None:
    model, tok, texts = tiny(name, torch.float64), tokenizer(), words([3, 9, 1, 6, 6])
    path = record(model, tok, texts, batch=3)
    assert path.x.shape == (4, 5, 11, 32)
    assert path.mask.sum(-1).tolist() == [5, 11, 3, 8, 8]
    for i, text in enumerate(texts):
        alone, n = record(model, tok, [text]), int(path.mask[i].sum())
        torch.testing.assert_close(path.x[:, i, :n], alone.x[:, 0], rtol=0, atol=1e-6)
        assert float(path.x[:, i, n:].abs().sum()) == 0
        assert path.labels["token"][i] == ["[CLS]", *text.split(), "[SEP]"]
    assert path.labels["text"] == [0, 1, 2, 3, 4]
    assert path.labels["id"][2] == [2, 5 + int(texts[2][1:]), 3]


def test_special_tokens_and_left_padding() -> None:
    model, tok, texts = tiny("BERT"), tokenizer(), words([3, 5])
    path = record(model, tok, texts)
    assert path.labels["special"] == [[True, False, False, False, True], [True, *[False] * 5, True]]
    x = dict(tok(texts, return_tensors="pt", padding=True, return_special_tokens_mask=True))
    x.pop("token_type_ids", None)
    again = record(model, x)
    assert torch.equal(again.x, path.x)
    assert again.labels["special"] == path.labels["special"]
    llama, ids = tiny("Llama", torch.float64), torch.tensor([[5, 6, 7, 8, 9], [0, 0, 7, 8, 9]])
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])
    path = record(llama, {"input_ids": ids, "attention_mask": (ids > 0).long(), "position_ids": positions})
    assert path.mask.tolist() == [[True] * 5, [True] * 3 + [False] * 2]
    assert path.labels["position"][1] == [2, 3, 4]
    torch.testing.assert_close(path.x[:, 1, :3], record(llama, {"input_ids": ids[1:, 2:]}).x[:, 0], rtol=0, atol=1e-6)


def test_images() -> None:
    path = record(tiny("DINOv2"), inputs("DINOv2"))
    assert path.x.shape == (4, 2, 17, 32)
    assert path.labels["special"][1] == [True] + 16 * [False]
    model = tiny("ViT")
    model.config.patch_size = (4, 4)
    assert record(model, inputs("ViT")["pixel_values"]).labels["special"][1] == [True] + 16 * [False]


def test_a_shared_block_beyond_its_depth() -> None:
    model, x = tiny("ALBERT", torch.float64), inputs("ALBERT")
    plain = record(model, x)
    model.config.num_hidden_layers = 9
    deep = record(model, x)
    assert len(deep) == 10
    assert torch.equal(deep.x[:4], plain.x)
    block, state = blocks(model)[0].module, deep.x[3][:1]  # the first text has no padding
    for level in range(4, 10):
        result = block(state, None)
        state = result[0] if isinstance(result, tuple) else result
        torch.testing.assert_close(deep.x[level][:1], state, rtol=0, atol=1e-12)


def test_long_texts_are_truncated_with_a_warning() -> None:
    model, tok = tiny("BERT"), tokenizer()
    with pytest.warns(UserWarning, match="2 texts were longer than 32 tokens"):
        path = record(model, tok, words([40, 3, 50]), batch=2)
    assert path.mask.sum(-1).tolist() == [32, 5, 32]
    assert path.labels["token"][0][-1] == "[SEP]"
    with pytest.warns(UserWarning, match="1 texts were longer than 8 tokens"):
        record(model, tok, words([9]), max_length=8)
    cases = ((99, "takes at most 32"), (0, "max_length = 0, expected an integer of at least 1"), (1, "special tokens"))
    for length, message in cases:
        with pytest.raises(ValueError, match=message):
            record(model, tok, words([9]), max_length=length)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert record(model, tok, words([5])).about["truncated"] == 0


BAD_TEXTS: list[tuple[Any, str]] = [
    (["w1", " \n"], r"texts\[1\] is ' .n', expected a string with at least one word"),
    (["w1", b"w2"], r"texts\[1\] is b'w2'"),
    ([], "texts is empty"),
    ("w1 w2", "one str, expected several"),
    ([{"body": "w1"}], r"texts\[0\] is {'body': 'w1'}, expected a string .* or a row with 'text'"),
    ({"a": [0], "text": ["w1"]}, r"one dict, expected several strings.* table\['text'\]"),
    (["what is this language"], r"4 of 4 tokens are unknown .*100%, expected at most 10%.*max_unknown=1"),
]


@pytest.mark.parametrize(("texts", "message"), BAD_TEXTS)
def test_bad_texts(texts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        record(tiny("BERT"), tokenizer(), texts)


def test_bad_inputs() -> None:
    model = tiny("BERT")
    ids = torch.tensor([[5, 6, 7], [5, 6, 0]])
    cases: list[tuple[Any, str]] = [
        (tokenizer(), r"inputs are a \w+, expected a dict of tensors"),
        ({"input_ids": [[1, 2]]}, "inputs input_ids hold no tensors"),
        ({}, "inputs are empty"),
        ({"special_tokens_mask": torch.ones(1, 2)}, "inputs are empty"),
        (torch.zeros(0, 3, dtype=torch.long), "inputs are empty"),
        (torch.tensor([2, 5]), r"input_ids has shape \(2,\), expected \(batch, n\)"),
        ({"input_ids": torch.tensor([[1, 60]])}, "input_ids go from 1 to 60, but this model embeds ids 0 to 59"),
        ({"input_ids": torch.tensor([[1, -1]])}, "input_ids go from -1 to 1"),
        ({"input_ids": ids, "attention_mask": torch.ones(2, 3, 3)}, r"attention_mask has shape \(2, 3, 3\)"),
    ]
    for source, message in cases:
        for run in (record, self_check):
            with pytest.raises(ValueError, match=message):
                run(model, source)
    with pytest.raises(TypeError, match="source is a str, expected the tokenizer"):
        record(model, "bert-base-uncased", ["w1"])
    with pytest.raises(ValueError, match="batch = 0"):
        record(model, tokenizer(), ["w1"], batch=0)
    assert record(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}).mask.all()
    small = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=20)
    with pytest.raises(ValueError, match=r"input_ids go from 2 to 5\d, but this model embeds ids 0 to 19"):
        record(transformers.BertModel(small), tokenizer(), ["w46 w47"])


def test_unknown_tokens() -> None:
    tok, tenth = tokenizer(), ["w1 w2 w3 w4 w5 w6 w7 w8 w9 what"]
    assert record(tiny("BERT"), tok, tenth).about["unknown_share"] == 0.1
    with pytest.raises(ValueError, match=r"1 of 9 tokens are unknown .*11%, expected at most 10%"):
        record(tiny("BERT"), tok, ["w1 w2 w3 w4 w5 w6 w7 w8 what"])
    assert record(tiny("BERT"), tok, ["what is w1 w2"], max_unknown=1).about["unknown_share"] == 0.5
    with pytest.raises(ValueError, match="max_unknown = 2"):
        record(tiny("BERT"), tok, tenth, max_unknown=2)


def test_half_precision() -> None:
    model, x = tiny("BERT", torch.bfloat16), inputs("BERT")
    path = record(model, x)
    assert (path.x.dtype, path.about["dtype"]) == (torch.float32, "bfloat16")
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight.fill_(float("inf"))
    with pytest.raises(ValueError, match=r"NaN or infinite states in bfloat16.*float32"):
        record(model, x)
    for name in ("MPNet", "DeBERTa", "Llama"):
        patterns = []
        for dtype in (torch.float16, torch.float32):
            with recording(tiny(name, dtype), "blocks.0.attn.hook_pattern") as cache, torch.no_grad():
                cache.blocks[0].root(**inputs(name))
                patterns.append(cache["blocks.0.attn.hook_pattern"].float()[mask(name)[:, None].expand(-1, 4, -1)])
        torch.testing.assert_close(*patterns, rtol=0, atol=0.02)


class Rows:
    """Iterates as a datasets.Dataset does: rows are dictionaries."""

    def __iter__(self) -> Iterator[dict[str, object]]:
        return ({"label": i, "text": text} for i, text in enumerate(words([3, 2, 4])))


def test_rows_streams_and_columns_are_texts() -> None:
    pandas = pytest.importorskip("pandas")
    model, tok, texts = tiny("BERT"), tokenizer(), words([3, 2, 4])
    path = record(model, tok, texts, batch=2)
    sources: list[Any] = [Rows, lambda: iter(Rows()), lambda: (text for text in texts), lambda: tuple(texts)]
    sources.append(lambda: pandas.DataFrame({"text": texts}, index=[7, 3, 3])["text"])
    for make in sources:
        assert torch.equal(record(model, tok, make(), batch=2).x, path.x)
    with pytest.raises(ValueError, match=r"texts\[1\] is (nan|None), expected a string"):
        record(model, tok, pandas.Series(["w1", None]))
