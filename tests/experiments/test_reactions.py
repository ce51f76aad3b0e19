"""Reactions as graphs, and the encoder of their atoms: against counts by hand and torch's own layers."""

import pytest
import torch

from attn_flow.base.processes import Processes
from attn_flow.experiments.encoders import of_one_size
from attn_flow.experiments.encoders.reactions import FARTHEST, ReactionEncoder, count_atoms, molecule
from attn_flow.hooks import attentions, record, self_check
from attn_flow.hooks.inputs import batches

REACTION = "OC(=O)C(=C)C=C.C=CC#N>>OC(=O)C1=CCCC(C1)C#N"


@pytest.fixture
def model() -> ReactionEncoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        found = ReactionEncoder(firings=3, dim=16, heads=2, molecule_heads=4, hidden=24).double().eval()
        for p in found.parameters():  # biases are zero at first
            torch.nn.init.normal_(p, std=0.4)
    return found.requires_grad_(False)


@pytest.mark.parametrize(
    ("smiles", "atoms", "neighbours"),
    [
        ("CC=O", [6, 6, 8], [4, 3, 1]),
        ("c1ccncc1", [6, 6, 6, 7, 6, 6], [3, 3, 3, 2, 3, 3]),  # pyridine: no hydrogen at the nitrogen
        ("c1cc[nH]c1", [6, 6, 6, 7, 6], [3, 3, 3, 3, 3]),  # pyrrole has one
        ("Cn1ccnc1", [6, 7, 6, 6, 7, 6], [4, 3, 3, 3, 2, 3]),
        ("O=c1cc[nH]cc1", [8, 6, 6, 6, 7, 6, 6], [1, 3, 3, 3, 3, 3, 3]),
        ("CS(=O)(=O)N", [6, 16, 8, 8, 7], [4, 4, 1, 1, 3]),
        ("C[N+](=O)[O-]", [6, 7, 8, 8], [4, 3, 1, 1]),
        ("F/C=C\\Br", [9, 6, 6, 35], [1, 3, 3, 1]),
        ("[Na+]", [11], [0]),
        ("[13C@@H](Cl)(Br)I", [6, 17, 35, 53], [4, 1, 1, 1]),
        ("C%10CC%10", [6, 6, 6], [4, 4, 4]),
    ],
)
def test_atoms_and_their_neighbours(smiles: str, atoms: list[int], neighbours: list[int]) -> None:
    found = molecule(smiles)
    assert found.atoms.tolist() == atoms
    assert found.neighbours.tolist() == neighbours


def test_distances_are_shortest_paths() -> None:
    assert molecule("C1CCCCC1O").distance[0].tolist() == [0, 1, 2, 3, 2, 1, 2]
    assert molecule("CC(C)O").distance.tolist() == [[0, 1, 2, 2], [1, 0, 1, 1], [2, 1, 0, 2], [2, 1, 2, 0]]


@pytest.mark.parametrize(
    "smiles", ["", "C.C", "C1CC", "C(C", "CC)", "[Xx]", "[C", "hello", "1CC1", "(C)C", "=CC", "CC="]
)
def test_what_is_no_molecule_is_refused(smiles: str) -> None:
    with pytest.raises(ValueError, match=r"no SMILES|open|no chemical element|no atom|begins with"):
        molecule(smiles)


def test_reactions_of_one_size_are_the_largest_that_so_many_have() -> None:
    reactions = ["C>>C", "CC>>CO", "CN>>CC", "CCC>>CCC"]  # with their own token 3, 5, 5 and 7
    assert of_one_size(reactions, count_atoms, 2, 9) == ["CC>>CO", "CN>>CC"]
    assert of_one_size(reactions, count_atoms, 1, 9) == ["CCC>>CCC"]
    assert of_one_size(reactions, count_atoms, 1, 4) == ["C>>C"]
    with pytest.raises(ValueError, match="no 2 of 4 inputs have one size, of at most 4 tokens"):
        of_one_size(reactions, count_atoms, 2, 4)


@pytest.mark.parametrize("smiles", ["CC", "CC>>", ">>CC", "C>C"])
def test_what_is_no_reaction_is_refused(model: ReactionEncoder, smiles: str) -> None:
    with pytest.raises(ValueError, match="is no reaction, expected reactants>>products"):
        model.atoms(smiles)


def test_molecules_are_moved_by_torchs_layer_with_a_bias_by_distance(model: ReactionEncoder) -> None:
    """The first block by hand against torch's own layer with gradients on, which takes a mask as it should."""
    smiles = "CCCCCCCCCCCCO"  # farther apart than distances are counted
    graph = molecule(smiles)
    assert int(graph.distance.max()) > FARTHEST
    n = len(graph.atoms) + 1
    bias = torch.zeros(4, n, n).double()
    for i in range(n):
        for j in range(n):
            kind = 0 if 0 in (i, j) else 1 + min(FARTHEST, int(graph.distance[i - 1, j - 1]))
            bias[:, i, j] = model.distances.weight[kind]
    x = torch.stack(
        [model.elements.weight[1] + model.neighbours.weight[0]]
        + [model.elements.weight[a + 2] + model.neighbours.weight[b + 2] for a, b in zip(graph.atoms, graph.neighbours)]
    )
    with torch.enable_grad():
        x.requires_grad_(True)
        for _ in range(3):
            x = model.molecule_layer(x[None], src_mask=bias)[0]
    found = model.atoms(f"{smiles}>>C")[1:n]
    torch.testing.assert_close(found, x[1:].detach() + model.roles.weight[2], rtol=0, atol=1e-12)


def test_atoms_of_a_reaction_have_no_order(model: ReactionEncoder) -> None:
    left, right = (model(model.atoms(r)[None])[0] for r in ("CO.CCl>>COC", "CCl.CO>>COC"))
    torch.testing.assert_close(right, left[[0, 3, 4, 1, 2, 5, 6, 7]], rtol=0, atol=1e-12)


def test_one_block_fired_again_and_again(model: ReactionEncoder) -> None:
    src = model.atoms(REACTION)[None]
    assert src.shape == (1, 1 + 11 + 11, 16)
    assert all(check.exact for check in self_check(model, {"src": src}))
    assert len(attentions(model)) == 3
    assert len({id(layer) for layer in model.layers}) == 1
    x = src
    for _ in range(5):
        x = model.layers[0](x)
    model.layers = torch.nn.ModuleList([model.layers[0]] * 5)
    torch.testing.assert_close(record(model, {"src": src}).x[-1], x, rtol=0, atol=1e-12)


def test_an_encoder_with_the_batch_first_is_read_in_batches(model: ReactionEncoder) -> None:
    src = torch.stack([model.atoms(r) for r in ("CO.CCl>>COC", "CN.CCl>>CNC", "CO.CBr>>COC")])
    sizes = lambda encoder, inputs: [batch.size for batch in batches(encoder, inputs, None, 2)]
    assert sizes(model, {"src": src}) == [2, 1]
    assert sizes(model, {"src": src, "mask": torch.zeros(8, 8)}) == [3]  # a mask of tokens has no texts to cut
    layer = torch.nn.TransformerEncoderLayer(16, 2, 24)
    second = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)  # the batch on the second axis
    assert sizes(second, {"src": src}) == [3]
    shares = [batches(model, {"src": src}, None, 1, world=Processes(rank, 2, src.device)) for rank in (0, 1)]
    assert [[batch.first for batch in share] for share in shares] == [[0, 2], [1]]
    whole, parts = (record(model, {"src": src}, batch=batch).x for batch in (3, 1))
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)
