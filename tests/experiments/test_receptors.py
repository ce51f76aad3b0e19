"""T-cell receptors as tokens, and the vocabulary of a pickle that is read without running it."""

import pickle
from collections import OrderedDict

import pytest
import torch

from attn_flow.experiments.encoders.receptors import FEATURES, RESIDUES, ReceptorEncoder, count_residues
from attn_flow.experiments.encoders.recipes import pickled_vocabulary

RECEPTOR = "AC DE F GH IK LMN"


@pytest.fixture
def model() -> ReceptorEncoder:
    """An encoder whose tokens are their features."""
    model = ReceptorEncoder(layers=1, dim=FEATURES + 1, heads=2).eval()
    with torch.no_grad():
        model.embedding.weight.copy_(torch.eye(FEATURES + 1, FEATURES))
    return model


def test_a_token_is_a_residue_its_place_and_its_loop(model: ReceptorEncoder) -> None:
    tokens = model.residues(RECEPTOR)[:, :FEATURES]
    assert len(tokens) == 1 + count_residues(RECEPTOR) == 13
    assert tokens[0].nonzero().flatten().tolist() == [1]  # [CLS]
    assert tokens[1:, 2:22].argmax(-1).tolist() == [RESIDUES.index(r) for r in RECEPTOR.replace(" ", "")]
    assert tokens[1:, 22].tolist() == [0, 1, 0, 1, 0.5, 0, 1, 0, 1, 0, 0.5, 1]
    assert tokens[1:, 23:].argmax(-1).tolist() == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5, 5, 5]
    assert torch.equal(tokens[1:, 23:].sum(-1), torch.ones(12))


def test_an_unknown_chain_has_no_tokens(model: ReceptorEncoder) -> None:
    alone = model.residues("- - - GH IK LMN")
    assert torch.equal(alone[1:], model.residues(RECEPTOR)[6:])


@pytest.mark.parametrize(("text", "message"), [("AC DE", "has 2 loops, expected"), ("A C D E F Z", "'Z' in")])
def test_what_is_no_receptor_is_refused(model: ReceptorEncoder, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.residues(text)


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_vocabulary_is_read_from_a_pickle_that_is_not_run(protocol: int) -> None:
    plus, last = "+", "c"
    content = {"n": 3, "used": [plus, last], "vocab": OrderedDict([("a", 0), (plus, 1), ("b", 3), (last, 2)]), "m": 9}
    assert pickled_vocabulary(pickle.dumps(content, protocol), 4) == ["a", "+", "c", "b"]
    with pytest.raises(ValueError, match="vocabulary of 5 tokens, expected 7"):
        pickled_vocabulary(pickle.dumps(content, protocol), 7)
