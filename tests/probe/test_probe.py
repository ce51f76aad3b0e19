"""The probe on the real MiniLM: ladder and nulls in their order, goals with margin, files that are never stale."""

import json
from dataclasses import replace

import pytest
import torch
from encoder_zoo import inputs, tiny

from attn_flow.hooks import architectures
from attn_flow.hooks.demo import topics
from attn_flow.hooks.fingerprints import fingerprint
from attn_flow.probe import NULLS, Probe, probe
from attn_flow.probe import run as running
from attn_flow.probe.clouds import SHORTEST
from attn_flow.probe.nulls import untrained_twin
from attn_flow.probe.run import inquire

LADDER = ("special_closure", "sinks_closure", "clusters_closure", "quantised_closure", "quantised_window_closure")


def explained(result: Probe, name: str) -> torch.Tensor:
    return {**result.closures, **result.nulls}[name].explained.mean(-1)


# --- numbers ----------------------------------------------------------------------------------------------------


def test_every_rung_of_the_ladder_adds(result):
    for lower, higher in zip(("gaussian_closure", *LADDER), LADDER):
        assert float(explained(result, higher).mean()) > float(explained(result, lower).mean())
    assert bool((explained(result, "window_closure") > explained(result, "sinks_closure") - 0.02).all())


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("sinks_closure", (0.47, 0.35, 0.31, 0.43, 0.54, 0.66)),
        ("window_closure", (0.87, 0.77, 0.62, 0.56, 0.69, 0.70)),
        ("oracle", (0.88, 0.96, 0.95, 0.86, 0.87, 0.80)),
    ],
)
def test_the_reference_numbers_at_160_tokens(encoder, name, reference):
    """Computed elsewhere with other code, 16 texts; texts differ by about .05 in the mean of four."""
    from attn_flow.probe.clouds import record_clouds
    from attn_flow.probe.nulls import agreement_of, by_closure, steps

    texts = [text for text in topics() if len(text) > 900][:4]
    with pytest.warns(UserWarning, match="truncated"):
        clouds = record_clouds(*encoder, texts, max_length=160)
    with torch.no_grad():
        found = agreement_of(clouds, by_closure(steps(clouds)[name])).explained.mean(-1)
    assert found.tolist() == pytest.approx(reference, abs=0.1)


def test_the_closure_beats_every_null_in_every_layer(result):
    closure = result.interval(result.closures["quantised_closure"].explained)
    assert float(closure.low.min()) > 0.8
    controls = {name: result.closures[name] for name in ("text_mean_closure", "random_clusters_closure")}
    for name, null in {**result.nulls, **controls}.items():
        if name != "untrained":
            assert bool((closure.low > result.interval(null.explained).high).all()), name


def test_the_raw_cosine_flatters_and_the_explained_variance_does_not(result):
    constant, twin = result.nulls["mean_output"], result.nulls["untrained"]
    assert constant.cosine.mean(-1).tolist() == pytest.approx((0.70, 0.47, 0.52, 0.67, 0.75, 0.89), abs=0.05)
    assert float(constant.explained.abs().max()) < 1e-9
    assert float(twin.cosine.min()) > 0.99
    assert bool((result.nulls["rotated"].cosine.mean(-1) < constant.cosine.mean(-1)).all())
    assert float(result.nulls["rotated"].explained.mean(-1).max()) < 0


def test_through_depth_the_goals_are_met(result):
    """Shared numbers alone: cosine .95 and W2 .25; with a window .98 and .15; every null below .7 on four texts."""
    shared, window = result.propagation["quantised_closure"], result.propagation["quantised_window_closure"]
    assert float(shared.embedding_cosine.mean()) > 0.97
    assert float(shared.w2[-1].mean()) < 0.24
    assert float(window.embedding_cosine.mean()) > 0.99
    assert float(window.w2[-1].mean()) < 0.14
    for name in ("mean_output", "uniform", "rotated", "removed", "another_text"):
        assert float(result.propagation[name].embedding_cosine.mean()) < 0.72
    mean, mixed = (result.propagation[f"{name}_closure"] for name in ("text_mean", "random_clusters"))
    assert float(mean.w2[-1].mean()) > 2 * float(shared.w2[-1].mean())
    assert float(mixed.embedding_cosine.mean()) < float(shared.embedding_cosine.mean()) - 0.05
    assert result.propagation["window_closure"].w2.mean(-1).tolist() == pytest.approx(
        (0.07, 0.17, 0.25, 0.28, 0.28, 0.32), abs=0.05
    )


def test_atoms_found_without_a_query_still_serve_it(result):
    """A law of the text, not a table of its queries: above the best null where the atoms saw other queries only."""
    held_out = explained(result, "cross_fitted_closure")
    assert bool((held_out > explained(result, "random_clusters_closure")).all())
    assert bool((held_out < explained(result, "quantised_closure")).all())


def test_findings_say_what_is_and_is_not_supported(result):
    found = result.findings()
    assert [f.verdict for f in found[:3]] == ["supported", "supported", "not supported"]
    assert found[1].numbers["layers"] == list(range(6))
    assert "untrained twin" in found[1].text
    assert all(f.text[0].isupper() and f.text.endswith(".") for f in found)
    assert len(result.answer()) == 3


def test_the_limit_law_has_its_line_and_its_stability(result):
    limits = result.limits
    assert bool((limits.if_held.mean(-1) < 1.05).all())
    way = (1 - limits.real.mean(-1)) / (1 - limits.if_held.mean(-1))
    assert torch.allclose(result.fraction_of_the_way().mean, way)
    assert bool((limits.cosine.mean(-1) > limits.cosine_without_c.mean(-1)).all())
    assert bool(((limits.stability >= 0) & (limits.stability <= 1 + 1e-9)).all())


def test_geomloss_agrees_with_exact_transport(result):
    seen = result.transports
    assert seen.level.tolist() == [0, 3, 6]
    assert bool(((seen.geomloss - seen.exact).abs() <= seen.bound).all())
    assert float((seen.geomloss / seen.exact - 1).abs().max()) < 0.05


def test_json_has_the_promised_schema(result):
    words = json.loads(json.dumps(result.as_json()))
    assert {"verdict", "text"} <= words["findings"][0].keys()
    assert [row["layer"] for row in words["layers"]] == list(range(6))
    for row in words["layers"]:
        for measure in ("explained", "centred_cosine", "cosine"):
            assert set(result.closures) | set(result.nulls) == row[measure].keys()
    for name in ("mean_output", "uniform", "rotated", "removed", "quantised_closure"):
        row = words["propagation"][name]
        assert len(row["w2"]) == 6
        assert {"embedding_cosine", "neighbour_agreement"} <= row.keys()
    assert words["about"]["unknown_token_share"] == 0
    assert all(layer["exact"] for layer in words["about"]["self_check"])


def test_heads_and_evolution_are_complete(result):
    for name, value in vars(result.heads).items():
        assert value.shape == (6, 12), name
        assert bool(torch.isfinite(value).all())
    assert result.evolution.pairwise_cosine.shape == (7, 4)
    assert torch.allclose(result.evolution.histogram.sum(-1), torch.ones(7, dtype=torch.float64))


def test_the_mean_pairwise_cosine_leaves_the_diagonal_out(encoder, texts):
    from attn_flow.probe.clouds import record_clouds
    from attn_flow.probe.evolution import cloud_evolution

    clouds = record_clouds(*encoder, [texts[0][:300]], max_length=30)
    x = torch.nn.functional.normalize(clouds.z[2][0].double(), dim=-1)
    pairs = [float(x[i] @ x[j]) for i in range(len(x)) for j in range(len(x)) if i != j]
    assert float(cloud_evolution(clouds).pairwise_cosine[2, 0]) == pytest.approx(sum(pairs) / len(pairs), rel=1e-9)


def test_gains_add_up_to_the_last_step(result):
    gains, before = (
        result.gains(),
        {"special": "gaussian", "sinks": "special", "window": "sinks", "quantised": "clusters"},
    )
    for step, lower in before.items():
        own, other = (result.closures[f"{name}_closure"].explained for name in (step, lower))
        assert torch.equal(gains[f"{step}_closure"], own - other)
    whole = sum(gains[f"{name}_closure"] for name in ("gaussian", "special", "sinks", "clusters", "quantised"))
    assert torch.allclose(whole, result.closures["quantised_closure"].explained)  # the mean output explains 0
    row = result.as_json()["layers"][2]["gain"]
    assert row["sinks_closure"] == pytest.approx(float(gains["sinks_closure"][2].mean()))
    assert any(row["quantity"] == "sinks_closure: gain" for row in result.rows())


# --- files ------------------------------------------------------------------------------------------------------


def test_save_load_round_trip(result, tmp_path):
    result.save(tmp_path)
    again = Probe.load(tmp_path)
    assert again.findings() == result.findings()
    assert torch.equal(again.propagation["rotated"].w2, result.propagation["rotated"].w2)
    assert list(again.closures) == list(result.closures)
    assert set(result.to_pandas().columns) >= {"group", "quantity", "layer", "mean", "low", "high"}
    assert len(repr(result)) < 300


def test_a_damaged_result_is_refused_in_a_sentence(result, tmp_path):
    result.save(tmp_path)
    path = tmp_path / "probe.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-5] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="is damaged"):
        Probe.load(tmp_path)
    (tmp_path / "probe.json").write_text("{")
    with pytest.raises(ValueError, match=r"probe.json is damaged"):
        Probe.load(tmp_path)


@pytest.fixture
def few_stages(monkeypatch):
    """A probe of some quick stages: random nulls and the view draw, the reading does not."""
    whole = running.Inquiry._stages
    kept = ("closures/sphere", "nulls/rotated", "propagation/rotated", "nulls/random_tokens", "view")
    monkeypatch.setattr(running.Inquiry, "_stages", lambda self: {k: v for k, v in whole(self).items() if k in kept})
    monkeypatch.setattr(running, "Probe", lambda about, **found: found)


def test_a_continued_probe_equals_an_uninterrupted_one(encoder, texts, tmp_path, few_stages, monkeypatch):
    asked = inquire(*encoder, texts[:2], max_length=40)
    fresh = asked.answer()
    with monkeypatch.context() as patch:
        patch.setattr(running, "token_view", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            asked.answer(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir())[0] == "closures.sphere.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(running, "agreement_of", lambda *_: 1 / 0)  # would be computed again
        continued = inquire(*encoder, texts[:2], max_length=40).answer(tmp_path)
    assert torch.equal(fresh["view"].x, continued["view"].x)
    for group in ("nulls", "propagation"):
        for name, part in fresh[group].items():
            for field, value in vars(part).items():
                assert torch.equal(value.nan_to_num(-1), getattr(continued[group][name], field).nan_to_num(-1))


def test_the_key_changes_with_inputs_weights_and_options(encoder, texts):
    model, tokenizer = encoder
    ask = lambda texts=texts[:1], **options: inquire(model, tokenizer, texts, **{"max_length": 40, **options}).key
    key = ask()
    assert ask() == key
    others = {ask(texts[1:2]), ask(max_length=41), ask(seed=1), ask(nulls=[]), ask(beta_factor=2.0), ask(texts[:2])}
    weight = model.encoder.layer[3].output.dense.weight
    with torch.no_grad():
        before = float(weight[7, 11])
        weight[7, 11] += 1e-3  # one entry of millions
        others.add(ask())
        weight[7, 11] = before
    others.add(inquire(model.double(), tokenizer, texts[:1], max_length=40).key)
    model.float()
    assert ask() == key
    assert len(others) == 8
    assert key not in others


def test_a_part_of_another_question_is_not_taken(encoder, texts, tmp_path, few_stages):
    first = inquire(*encoder, texts[:2], max_length=40).answer(tmp_path)
    other = inquire(*encoder, texts[2:4], max_length=40).answer(tmp_path)
    assert not torch.equal(first["nulls"]["rotated"].explained, other["nulls"]["rotated"].explained)


def test_stages_side_by_side_are_stages_one_after_the_other(encoder, texts, few_stages):
    alone = inquire(*encoder, texts[:2], max_length=40).answer()
    torch.set_num_threads(2)
    try:
        beside = inquire(*encoder, texts[:2], max_length=40).answer()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    for group in ("nulls", "propagation"):
        assert list(alone[group]) == list(beside[group])
        for name, part in alone[group].items():
            for field, value in vars(part).items():
                seen = getattr(beside[group][name], field)
                assert torch.allclose(value.nan_to_num(-1), seen.nan_to_num(-1), atol=1e-4), (name, field)


def test_a_stage_that_fails_ends_the_probe_with_its_error(encoder, texts, few_stages, monkeypatch):
    asked = inquire(*encoder, texts[:2], max_length=40)
    torch.set_num_threads(2)
    try:
        for stage in ("nulls/rotated", "propagation/rotated"):

            def fail(parts, name, key, compute, stage=stage):
                if name == stage:
                    raise ValueError(f"no {name}")
                return compute()

            monkeypatch.setattr(running, "_kept", fail)
            with pytest.raises(ValueError, match=f"no {stage}"):
                asked.answer()
    finally:
        torch.set_num_threads(1)


# --- the model and its inputs -----------------------------------------------------------------------------------


def test_the_model_is_left_as_found(encoder, texts, few_stages):
    model, _ = encoder
    before = fingerprint(model)
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    inquire(*encoder, texts[:2], max_length=40).answer()
    assert fingerprint(model) == before
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_weights_that_do_not_give_what_the_layer_computes_are_refused(encoder, texts):
    """As an adapter would: the projection computes more than its weight."""
    model, tokenizer = encoder
    query = model.encoder.layer[2].attention.self.query
    handle = query.register_forward_hook(lambda module, args, out: 1.1 * out)
    try:
        with pytest.raises(ValueError, match="layer 2"):
            inquire(model, tokenizer, texts[:1], max_length=40)
    finally:
        handle.remove()


def test_a_strangers_tokenizer_is_refused_unless_asked_for(encoder):
    model, tokenizer = encoder
    texts = ["𓀀 𓀁 𓀂 𓀃 " * 10, "𓀀 𓀁 " * 20]
    with pytest.raises(ValueError, match=r"tokens are unknown to \w+"):
        inquire(model, tokenizer, texts, max_length=40)
    assert inquire(model, tokenizer, texts, max_length=40, max_unknown=1.0).about["unknown_token_share"] > 0.9


def test_a_model_of_short_texts_keeps_as_many_tokens_as_it_takes():
    from attn_flow.hooks.demo import tiny_bert

    texts = ["a b c d e f g h i j " * 4, "j i h g f e d c b a " * 4]
    with pytest.warns(UserWarning, match="truncated"):
        asked = inquire(*tiny_bert(), texts)  # 160 by default, and 32 is all it takes
    assert asked.about["max_length"] == 32
    assert asked.about["tokens"] == 64


def test_short_texts_are_an_error_when_nothing_is_left(encoder):
    with pytest.raises(ValueError, match=rf"no text has {SHORTEST} tokens"):
        probe(*encoder, ["two words"], nulls=[])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nulls": ["rotten"]}, r"nulls has \['rotten'\], expected some of mean_output, uniform"),
        ({"beta_factor": 0.0}, "beta_factor = 0.0, expected a positive"),
        ({"transport": "cart"}, "transport = 'cart', expected exact, geomloss or auto"),
    ],
)
def test_wrong_options_are_named(encoder, texts, options, message):
    with pytest.raises(ValueError, match=message):
        inquire(*encoder, texts[:1], **{"max_length": 40, **options})


@pytest.mark.parametrize("name", ["GPT-2", "ModernBERT"])
def test_where_tokens_are_hidden_only_closures_that_see_what_a_token_sees(name, tmp_path):
    from attn_flow.probe.page import write_report

    ids = torch.randint(3, 60, (3, 40), generator=torch.Generator().manual_seed(0))
    found = probe(tiny(name), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, max_length=None)
    assert found.main == "window_closure"
    assert found.omitted is None
    assert ("inside the closures are rotary positions" in found.findings()[1].text) == (name == "ModernBERT")
    assert not any("quantised" in closure for closure in found.closures)
    assert {"mean_output", "uniform", "rotated", "removed"} <= found.propagation.keys()
    assert write_report(found, tmp_path).exists()


def test_a_finished_run_is_known_by_its_key_alone(tmp_path):
    from attn_flow.cli.encoders import finished_before

    assert not finished_before(tmp_path, "a")
    marker = tmp_path / "probe.json"
    marker.write_text(json.dumps({"about": {"key": "a"}}))
    assert finished_before(tmp_path, "a")
    assert not finished_before(tmp_path, "b")
    for damaged in ("{", "[]", '{"about": {}}'):
        marker.write_text(damaged)
        assert not finished_before(tmp_path, "a")


def test_the_untrained_twin_has_the_same_shape_and_other_weights(encoder):
    model, _ = encoder
    twin = untrained_twin(model, seed=0)
    ours, theirs = dict(model.named_parameters()), dict(twin.named_parameters())
    assert ours.keys() == theirs.keys()
    name = "encoder.layer.0.attention.self.query.weight"
    assert not torch.allclose(ours[name], theirs[name])


def test_every_null_has_words():
    assert {"mean_output", "uniform", "rotated", "removed"} <= NULLS.keys()


def of_mpnet(**changes):
    """The table of architectures with another row of MPNet."""
    return [replace(a, **changes) if a.name == "MPNet" else a for a in architectures.ARCHITECTURES]


def test_what_closures_leave_out_is_named_with_its_share(monkeypatch):
    monkeypatch.setattr("attn_flow.hooks.layout.ARCHITECTURES", of_mpnet(score_table=None))
    ids = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    found = probe(tiny("MPNet"), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, max_length=None)
    assert [row["quantity"] for row in found.rows() if row["group"] == "left out"]
    assert "relative position bias" in found.findings()[1].text
    assert len(found.findings()[1].numbers["omitted_logit_variance"]) == len(found.limits.cases)


def test_places_misread_are_refused(monkeypatch):
    """A table of biases that is not the model's own must not pass for it."""
    wrong = lambda root, n: -root.encoder.compute_position_bias(torch.zeros(1, n, 1))[0]
    monkeypatch.setattr("attn_flow.hooks.layout.ARCHITECTURES", of_mpnet(score_table=wrong))
    with pytest.raises(ValueError, match="its weights and places as read leave"):
        inquire(tiny("MPNet"), inputs("MPNet"))
