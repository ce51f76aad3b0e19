"""A stack of continuous layers is probed as an encoder is."""

import copy

import pytest
import torch
from torch import Tensor

from attn_flow.nn import DeepStack
from attn_flow.probe import probe, untrained_copy
from attn_flow.probe.stacks import record_stack, stack_facts
from attn_flow.train.recipes import Recipe
from attn_flow.train.stacks import make_stack


def stack(**options) -> DeepStack:
    torch.manual_seed(0)
    return DeepStack(12, 3, **{"depth": 2, "dim": 8, "heads": 2, "length": 24, "ffn": 16, "beta": 2.0, **options})


def ids(texts: int = 3) -> Tensor:
    return torch.randint(12, (texts, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("options", [{}, {"ffn": 0}, {"step": "euler"}])
def test_what_is_recorded_is_what_the_stack_computes(options: dict) -> None:
    model, x = stack(**options).double(), ids()
    recording = record_stack(model, x)
    for t in range(3):
        paths = model.paths(x[t : t + 1])
        torch.testing.assert_close(recording.states[-1][t], paths[-1][1][0], rtol=0, atol=1e-10)
        for layer, attention in enumerate(model.attentions()):
            seen = paths[layer][0][0, 0]
            torch.testing.assert_close(recording.states[layer][t], seen, rtol=0, atol=1e-12)
            heads = recording.heads(layer, t)
            torch.testing.assert_close(recording.outputs[layer][t], attention.drift(seen), rtol=0, atol=1e-12)
            torch.testing.assert_close(heads.combine(heads.averages), attention.drift(seen), rtol=0, atol=1e-12)


def test_another_temperature_is_that_of_the_rerun_stack() -> None:
    colder = record_stack(stack(), ids(), beta_factor=3.0)
    assert float(torch.as_tensor(colder.attentions[0].beta).mean()) == pytest.approx(6.0)
    expected = stack().rerun(beta_factor=3.0).paths(ids())[-1][1]
    torch.testing.assert_close(torch.stack(colder.states[-1]), expected)


def test_tokens_are_named_by_their_ids_and_vectors_by_their_positions() -> None:
    assert record_stack(stack(), ids()).tokens == [[str(int(i)) for i in row] for row in ids()]
    vectors = torch.randn(3, 24, 12, generator=torch.Generator().manual_seed(2))
    assert record_stack(stack(points=True), vectors).tokens == [[str(i) for i in range(24)]] * 3


def test_facts_of_a_stack() -> None:
    facts = stack_facts(stack())
    assert (facts["layers"], facts["heads"], facts["head_dim"], facts["dim"]) == (2, 2, 4, 8)
    assert facts["beta"] == [2.0, 2.0]
    assert facts["omits"] == ["feed-forward part"]
    assert stack_facts(stack(ffn=0))["omits"] == []


def test_a_stack_is_probed_and_left_as_it_was() -> None:
    model = stack().train()
    before = copy.deepcopy(model.state_dict())
    result = probe(model, ids())
    assert result.about.encoder["architecture"] == "DeepStack"
    assert len(result.findings["averaging"].numbers["exponent"]) == 2
    assert model.training
    assert result.findings["clusters"].text.startswith("Not measured")
    assert all(torch.equal(before[name], z) for name, z in model.state_dict().items())


def test_the_untrained_copy_of_a_stack_has_other_weights() -> None:
    model = stack()
    assert not torch.equal(untrained_copy(model, 5).attentions()[0].Q, model.attentions()[0].Q)
    symmetric = make_stack(Recipe("recall", dim=6, symmetric="GV"), {"inputs": 7, "outputs": 2})
    with pytest.raises(ValueError, match=r"symmetric or frozen matrices.* make_stack\(recipe, options\)"):
        untrained_copy(symmetric)


def test_wrong_inputs_are_named() -> None:
    with pytest.raises(ValueError, match="a DeepStack has no tokenizer"):
        probe(stack(), None, ["a b"])
    with pytest.raises(ValueError, match="a DeepStack is probed with its inputs"):
        probe(stack(), {"a": 1, "b": 2})
    with pytest.raises(ValueError, match="inputs have 5 tokens a text, expected at least 16"):
        probe(stack(), ids()[:, :5])
