"""The real encoders of the zoo, where they were fetched (`make encoders`): read to rounding, with their tokenizers."""

import pytest
import torch

from attn_flow.experiments.encoders import ZOO, fetched, own_inputs, sample_inputs
from attn_flow.experiments.encoders.reactions import ReactionEncoder
from attn_flow.experiments.encoders.tables import TableEncoder, draw_table
from attn_flow.hooks import attentions, load_encoder, record, self_check
from attn_flow.hooks.inputs import tokenise

LAYERS = {
    "minilm": (6, 384),
    "sre": (6, 384),
    "mpnet": (12, 768),
    "m3e": (4, 512),
    "rxnmapper": (12, 256),
    "rxnfp-before": (12, 256),
    "rxnfp": (12, 256),
    "antiberty": (8, 512),
    "sapiens": (4, 128),
    "sapiens-light": (4, 128),
    "tabpfn": (12, 512),
    "rxnmap": (8, 1024),
    "silero": (3, 312),
    "sceptr": (3, 64),
    "smollm2": (30, 576),
}


def need(name: str) -> None:
    if fetched(name) is None:
        pytest.skip(f"{name} is not fetched: python -m attn_flow.experiments.encoders {name}")


@pytest.mark.parametrize("name", [name for name in ZOO if name not in ("tabpfn", "rxnmap", "sceptr")])
def test_weights_and_tokenizer_are_the_models_own(name: str) -> None:
    need(name)
    model, tokenizer = load_encoder(name)
    texts = sample_inputs(name)
    assert 200 <= len(texts) <= 300
    batch = tokenise(tokenizer, texts)
    assert batch.counts["unknown"] < 0.01 * batch.counts["content"]
    options = {"return_tensors": "pt", "padding": True, "truncation": True, "max_length": 64}
    inputs = {k: v for k, v in tokenizer(texts[:4], **options).items() if k in ("input_ids", "attention_mask")}
    checks = self_check(model, inputs)
    assert all(check.exact or check.omits for check in checks)
    assert [check.exact for check in checks].count(True) == (0 if name in ("mpnet", "smollm2") else len(checks))
    read = attentions(model)
    assert (len(read), read[0].dim) == LAYERS[name]


@pytest.mark.parametrize(("before", "after"), [("minilm", "sre"), ("rxnfp-before", "rxnfp")])
def test_fine_tuning_moved_the_weights_a_little(before: str, after: str) -> None:
    need(before)
    need(after)
    for a, b in zip(attentions(load_encoder(before)[0]), attentions(load_encoder(after)[0])):
        assert 0 < float((a.Q - b.Q).norm()) < 0.7 * float(a.Q.norm())


@pytest.fixture(scope="module")
def tabpfn() -> TableEncoder:
    need("tabpfn")
    model, tokenizer = load_encoder("tabpfn")
    assert tokenizer is None
    assert isinstance(model, TableEncoder)
    return model


def test_tabpfn_is_read_to_rounding(tabpfn: TableEncoder, generator: torch.Generator) -> None:
    x, y = draw_table(64, generator=generator)
    with torch.no_grad():
        src = tabpfn.rows(x, y)[None]
    assert all(check.exact for check in self_check(tabpfn, {"src": src}))
    states = record(tabpfn, {"src": src})
    assert tuple(states.x.shape)[-2:] == (64, 512)
    assert (len(attentions(tabpfn)), attentions(tabpfn)[0].dim) == LAYERS["tabpfn"]


def test_tabpfn_classifies_rows_it_has_not_seen(tabpfn: TableEncoder, generator: torch.Generator) -> None:
    """Well separated classes: a row without label that attends to labelled ones gets its class, as the nearest mean."""
    x, y = draw_table(400, generator=generator)
    seen = 300
    with torch.no_grad():
        labelled = tabpfn.rows(x, y)[:seen]
        unlabelled = tabpfn.rows(x, y)[seen:] - tabpfn.y_encoder(y[seen:, None])
        mask = torch.zeros(400, 400, dtype=torch.bool)
        mask[:, seen:] = True  # True is what torch leaves out: rows attend to labelled ones and themselves
        mask.fill_diagonal_(False)
        last = tabpfn(torch.cat([labelled, unlabelled])[None], mask=mask)[0, seen:]
        guessed = tabpfn.decoder(last)[:, :3].argmax(-1)
    centres = torch.stack([x[:seen][y[:seen] == c].mean(0) for c in range(3)])
    nearest = torch.cdist(x[seen:], centres).argmin(-1)
    assert float((guessed == y[seen:]).float().mean()) >= float((nearest == y[seen:]).float().mean()) - 0.05


def test_rxnmap_maps_the_atoms_of_a_reaction() -> None:
    """A Diels-Alder reaction, whose atom mapping the package's own page gives: the mean attention of the last firing.

    Product atoms look at the reactant atoms they were, and these at them; their own choice of an atom of the same
    element is right for ten or eleven. By chance it would be for about two.
    """
    need("rxnmap")
    model = load_encoder("rxnmap")[0]
    assert isinstance(model, ReactionEncoder)
    left, right = "OC(=O)C(=C)C=C.C=CC#N", "OC(=O)C1=CCCC(C1)C#N"
    with torch.no_grad():
        src = model.atoms(f"{left}>>{right}")[None]
        assert all(check.exact for check in self_check(model, {"src": src}))
        assert (len(attentions(model)), attentions(model)[0].dim) == LAYERS["rxnmap"]
        x = src
        for layer in list(model.layers)[:-1]:
            x = layer(x)
        weights = model.layers[-1].self_attn(x, x, x)[1][0]
    elements = [[{"C": 6, "N": 7, "O": 8}[s] for s in side if s in "CNO"] for side in (left, right)]
    same = torch.tensor(elements[1])[:, None] == torch.tensor(elements[0])
    mutual = weights[12:, 1:12] + weights[1:12, 12:].T
    found = mutual.masked_fill(~same, 0).argmax(-1).tolist()
    true = [0, 1, 2, 3, 5, 6, 7, 8, 4, 9, 10]
    assert sum(a == b for a, b in zip(found, true)) >= 10


def test_the_russian_encoder_tells_homographs_apart() -> None:
    """Two castles and two locks, spelled alike: the embeddings of the word are nearer to their own kind."""
    need("silero")
    model, tokenizer = load_encoder("silero")
    assert tokenizer.convert_ids_to_tokens([2, 15, 83828, 83829]) == ["[CLS]", "+", "[HOMO]", "[/HOMO]"]
    before = ("Старинный", "Рыцарь построил каменный", "На двери висел тяжёлый", "Он потерял ключ и сломал")
    after = ("стоит на холме.", "на берегу озера.", "с ключом.", "на воротах.")
    words = []
    for text in (f"{a} [HOMO] замок [/HOMO] {b}" for a, b in zip(before, after)):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        assert (ids == 83828).sum() == 1
        with torch.no_grad():
            words.append(model(ids).last_hidden_state[0, int((ids[0] == 83828).nonzero())])
    cosine = torch.nn.functional.normalize(torch.stack(words), dim=-1)
    cosine = cosine @ cosine.mT
    assert min(cosine[0, 1], cosine[2, 3]) > cosine[:2, 2:].max() + 0.2


def test_sceptr_is_read_to_rounding_and_knows_amino_acids() -> None:
    need("sceptr")
    model, tokenizer = load_encoder("sceptr")
    assert tokenizer is None
    source, texts = own_inputs("sceptr", None, model, 8, 64)
    assert texts is None
    assert source["src"].shape[0] == 8
    assert all(check.exact for check in self_check(model, source))
    assert (len(attentions(model)), attentions(model)[0].dim) == LAYERS["sceptr"]
    receptor, other = sample_inputs("sceptr")[:2]
    loops = receptor.split()
    similar = " ".join([*loops[:5], loops[5].replace("S", "T", 1)])
    with torch.no_grad():
        a, b, c = (model(model.residues(text)[None])[0, 0] for text in (receptor, similar, other))
    assert (a - b).norm() < 0.7 * (a - c).norm()
