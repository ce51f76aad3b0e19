"""A stack of continuous layers is probed as an encoder is."""

import copy

import pytest
import torch
from torch import Tensor

from attn_flow.attention import Transformed
from attn_flow.nn import ContinuousAttentionLayer, DeepStack
from attn_flow.probe import probe
from attn_flow.probe.nulls import untrained_twin
from attn_flow.probe.propagation import propagate
from attn_flow.probe.stacks import check_stack, record_stack, run_stack, stack_facts


def stack(**options) -> DeepStack:
    torch.manual_seed(0)
    return DeepStack(12, 3, **{"depth": 2, "dim": 8, "heads": 2, "length": 24, "ffn": 16, "beta": 2.0, **options})


def ids(texts: int = 3) -> Tensor:
    return torch.randint(12, (texts, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("options", [{}, {"shared": True, "ffn": 0}, {"norm": "pre", "step": "euler"}])
def test_what_is_recorded_is_what_the_stack_computes(options: dict) -> None:
    model, x = stack(dtype=torch.float64, **options), ids()
    clouds = record_stack(model, x)
    for t in range(3):
        own = [after[0] for _, after in model.paths(x[t : t + 1])]
        torch.testing.assert_close(clouds.z[-1][t], own[-1], rtol=0, atol=1e-10)
        for layer, attention in enumerate(model.attentions()):
            before = model.paths(x[t : t + 1])[layer][0][0, 0]  # on its geometry
            seen = before / before.norm(dim=-1, keepdim=True) if model.norm != "post" else before
            assert float((clouds.z[layer][t] / seen).std()) < 1e-12  # the placement's own radius
            torch.testing.assert_close(clouds.out[layer][t], attention.drift(clouds.z[layer][t]), rtol=0, atol=1e-12)


def test_tokens_are_named_by_their_ids_and_vectors_by_their_places() -> None:
    assert record_stack(stack(), ids()).tokens == [[str(int(i)) for i in row] for row in ids()]
    vectors = torch.randn(3, 24, 12, generator=torch.Generator().manual_seed(2))
    assert record_stack(stack(points=True), vectors).tokens == [[str(i) for i in range(24)]] * 3


def test_what_is_said_of_a_stack() -> None:
    facts = stack_facts(stack(beta=2.0))
    assert (facts["layers"], facts["heads"], facts["head_dim"], facts["dim"]) == (2, 2, 4, 8)
    assert facts["beta"] == [2.0, 2.0]
    assert facts["omits"] == ["feed-forward part"]
    assert stack_facts(stack(ffn=0))["omits"] == []


def test_the_check_of_a_stack_sees_every_layer() -> None:
    checked = check_stack(stack(dtype=torch.float64), ids())
    assert [check["layer"] for check in checked] == [0, 1]
    assert all(check["error"] < 1e-10 for check in checked)


def test_its_own_drift_carried_through_depth_is_the_stack_itself() -> None:
    found = propagate(stack(), ids(), closure=lambda space, layer, text: space.attention.drift(space.x))
    torch.testing.assert_close(found.embedding_cosine, torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-5)
    assert float(found.w2.max()) < 1e-3


def test_a_prediction_is_the_drift_of_every_step() -> None:
    """Without drift tokens stay, and only feed-forward parts move them."""
    model = stack(ffn=0)
    states = run_stack(model, ids()[0], lambda layer, text, x: torch.zeros_like(x), 0)
    for x in states[1:]:
        torch.testing.assert_close(x, states[0])


def test_a_stack_is_probed_and_left_as_it_was() -> None:
    model = stack().train()
    before = copy.deepcopy(model.state_dict())
    result = probe(model, ids(), nulls=["rotated", "another_layer", "untrained"])
    assert result.findings()[1].numbers["layers"] == [0, 1]
    assert {
        "quantised_closure",
        "cross_fitted_closure",
        "text_mean_closure",
        "sphere",
        "oracle",
    } <= result.closures.keys()
    assert result.about["encoder"]["architecture"] == "DeepStack"
    assert result.as_json()["propagation"]["oracle"]["w2"]
    assert model.training
    assert all("forward" not in layer.__dict__ for layer in model.layers)
    assert all(torch.equal(before[name], z) for name, z in model.state_dict().items())


def test_one_layer_fired_twice_has_no_other_layer() -> None:
    assert "another_layer" not in probe(stack(shared=True), ids(2), nulls=["another_layer", "rotated"]).about["nulls"]


def test_without_nulls_there_is_no_verdict() -> None:
    through_depth, by_layer, *_ = probe(stack(depth=1), ids(), nulls=[]).findings()
    assert through_depth.verdict is None
    assert by_layer.verdict is None
    assert "without nulls there is no verdict" in by_layer.text


def test_the_twin_of_a_stack_has_other_weights() -> None:
    model = stack()
    twin = untrained_twin(model, 5)
    assert not torch.equal(twin.attentions()[0].Q, model.attentions()[0].Q)


def test_inputs_of_a_stack_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="a DeepStack has no tokenizer"):
        probe(stack(), None, ["a b"])
    with pytest.raises(ValueError, match="a DeepStack is probed with its inputs"):
        probe(stack(), {"a": 1, "b": 2})
    with pytest.raises(ValueError, match="inputs have 5 tokens a text, expected at least 22"):
        propagate(stack(), ids()[:, :5])


@pytest.mark.parametrize("options", [{}, {"shared": True}, {"norm": "pre", "bias": True}, {"beta": 200.0}])
def test_what_is_read_of_a_stack_is_checked_to_its_rounding(options: dict) -> None:
    model, x = stack(**options), ids()
    before = copy.deepcopy(model.state_dict())
    checked = check_stack(model, x)
    assert [c["layer"] for c in checked] == [0, 1]
    assert max(c["error"] for c in checked) < 1e-12
    assert all(torch.equal(before[name], z) for name, z in model.state_dict().items())
    assert all("field" not in layer.__dict__ for layer in model.layers)


class Stronger(ContinuousAttentionLayer):
    """Pushes a millionth more than its weights say: less than float32 could tell from its rounding through depth."""

    def field(self):
        return Transformed(super().field(), lambda F, s, x: (1 + 1e-6) * F(s, x), "stronger")


class Still(ContinuousAttentionLayer):
    def forward(self, x, mask=None, return_path=False):
        return torch.stack([x] * (self.options.steps + 1))


@pytest.mark.parametrize(
    ("kind", "message"), [(Stronger, "differ from those of the weights read by"), (Still, "not seen")]
)
def test_a_layer_that_does_not_compute_what_its_weights_say_is_refused(kind: type, message: str) -> None:
    model = stack()
    model.layers[1].__class__ = kind
    with pytest.raises(ValueError, match=f"layer 1 of DeepStack: its drifts .*{message}"):
        check_stack(model, ids())
