"""Numbers of the probe computed another way, on models so small that this is quick."""

import itertools
import math
import time

import numpy as np
import pytest
import scipy.stats
import torch
from encoder_zoo import tiny
from torch import nn

from attn_flow.attention import Attention
from attn_flow.hooks.demo import tiny_bert
from attn_flow.hooks.layout import blocks
from attn_flow.hooks.places import read_places
from attn_flow.prediction.spectral import spectrum
from attn_flow.probe import clouds as clouds_module
from attn_flow.probe import reading
from attn_flow.probe.closures import atoms_and_bulk
from attn_flow.probe.clouds import Clouds, record_clouds
from attn_flow.probe.head_space import as_heads_see
from attn_flow.probe.heads import _head_spectrum
from attn_flow.probe.law_alone import _covariance_cosine
from attn_flow.probe.limit_law import CASES, affine_drift, approach_to_limits
from attn_flow.probe.positions import omitted_shares
from attn_flow.probe.result import _standard_error
from attn_flow.probe.run import inquire
from attn_flow.probe.transports import RTOL, transport_check, w2
from attn_flow.transport import solve
from attn_flow.transport.entropic import Unproved

TEXTS = ["a b c d e f g h i j a c e g i b d f h j a d g j", "j i h g f e d c b a j h f d b i g e c a j g d a"]


def recorded(beta_factor: float = 1.0) -> Clouds:
    model, tokenizer = tiny_bert()
    return record_clouds(model.double(), tokenizer, TEXTS, beta_factor=beta_factor)


@pytest.mark.parametrize("beta_factor", [1.0, 3.0])
def test_what_was_recorded_is_attention_at_that_temperature(beta_factor):
    clouds = recorded(beta_factor)
    trained = recorded()
    for layer, text in itertools.product(range(2), range(2)):
        A = trained.attentions[layer].with_beta(beta_factor * trained.attentions[layer].beta)
        assert torch.allclose(A.drift(clouds.z[layer][text]), clouds.out[layer][text], atol=1e-10)


def test_a_head_without_a_bulk_is_refused_whatever_the_others_have():
    A = Attention.random(4, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    atoms = torch.zeros(2, 9, dtype=torch.bool)
    atoms[0, :8] = True
    with pytest.raises(ValueError, match="a text of 9 tokens with 8 atoms leaves no bulk"):
        atoms_and_bulk(as_heads_see(A, x, atoms[1]), atoms)


def test_a_narrow_head_that_pulls_inward_leads_into_its_kernel():
    """V K^T Q O = -2 in d = 3: M has the eigenvalues -2, 0, 0, so that ker M leads and no limit is defined there."""
    row, column = torch.eye(3, dtype=torch.float64)[:1], torch.eye(3, dtype=torch.float64)[:, :1]
    A = Attention(row[None], row[None], row[None], -2 * column[None])
    assert _head_spectrum(A, 0) == (0.0, 2.0, CASES.index("undefined"))
    outward = Attention(row[None], row[None], row[None], 2 * column[None])
    assert _head_spectrum(outward, 0) == (2.0, 2.0, CASES.index("fixed"))


@pytest.mark.parametrize("seed", range(20))
def test_the_spectrum_of_a_narrow_head_is_that_of_the_whole_matrix(seed):
    """Its kernel counts: with eigenvalues 2 and -3 beside it the gap is 2, not 5."""
    A = Attention.random(6, 1, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    whole = spectrum(A.M[0].numpy())
    leading, gap, case = _head_spectrum(A, 0)
    assert leading == pytest.approx(max(whole.leading, 0.0), abs=1e-12)
    if leading > 0:
        assert gap == pytest.approx(whole.gap, rel=1e-9)
        assert CASES[case] == whole.case


def test_the_cosine_of_covariances_is_that_of_their_entries():
    x, y = np.random.default_rng(0).normal(size=(2, 30, 4))
    C, D = np.cov(x.T, bias=True).ravel(), np.cov(y.T, bias=True).ravel()
    expected = C @ D / np.sqrt(C @ C * (D @ D))
    assert _covariance_cosine(torch.from_numpy(x), torch.from_numpy(y)) == pytest.approx(expected, rel=1e-12)
    assert _covariance_cosine(torch.from_numpy(x), torch.from_numpy(3 * x)) == pytest.approx(1.0, rel=1e-12)


def test_the_dimension_and_the_gap_of_a_limit_are_those_of_the_eigenvalues():
    clouds = recorded()
    found = approach_to_limits(clouds, torch.Generator().manual_seed(0))
    for layer, A in enumerate(clouds.attentions):
        x = torch.cat(clouds.z[layer]).numpy()
        M = affine_drift(A, torch.from_numpy(x.mean(0)), torch.from_numpy(np.cov(x.T, bias=True)))[0].numpy()
        real = np.sort(np.linalg.eigvals(M).real)[::-1]
        leading = int((real > real[0] - 1e-6 * np.abs(real).max()).sum())
        assert float(found.dimension[layer]) == leading >= 1
        assert float(found.gap[layer]) == pytest.approx(real[0] - real[leading], rel=1e-6)


def test_a_model_that_shows_no_weights_has_a_share_for_every_layer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    shares = omitted_shares(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval(), {})
    assert len(shares) == 3
    assert all(math.isnan(share) for share in shares)


@pytest.mark.parametrize("entries", [400, 1000, 10**6])
def test_rows_of_attention_are_kept_within_their_number(entries, monkeypatch):
    monkeypatch.setattr(reading, "ENTRIES", entries)
    clouds = recorded()
    rows = reading.read_tokens(clouds).true_rows
    n = len(clouds.special[0])
    m = next(m for m in range(n, 0, -1) if 2 * 2 * m * m <= entries)  # two layers of two heads
    assert rows.shape == (2, 2, m, m)


def test_the_standard_error_of_the_mean():
    values = np.random.default_rng(0).normal(size=7)
    assert _standard_error(torch.from_numpy(values)) == pytest.approx(scipy.stats.sem(values), rel=1e-12)


def test_where_geomloss_proves_nothing_the_distance_is_exact(generator):
    pytest.importorskip("geomloss")
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    moved = x + 1e-7 * torch.randn(30, 4, generator=generator, dtype=torch.float64)
    with pytest.raises(Unproved, match="proves only"):
        solve(x, moved, method="geomloss", rtol=RTOL)
    assert (
        w2(x, moved, "geomloss")
        == w2(x, moved, "auto")
        == pytest.approx(float((x - moved).square().sum(-1).mean().sqrt()))
    )


def test_what_geomloss_refuses_for_another_reason_is_not_hidden(monkeypatch):
    def refuse(x, y, *, method, rtol=0.0):
        raise ValueError(f"{method} is out of order")

    monkeypatch.setattr("attn_flow.probe.transports.solve", refuse)
    with pytest.raises(ValueError, match="geomloss is out of order"):
        w2(torch.zeros(2, 2), torch.ones(2, 2), "geomloss")


def test_the_seconds_of_both_solvers_are_their_own(monkeypatch):
    pytest.importorskip("geomloss")
    clouds = recorded()
    clock = itertools.count(100)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    found = transport_check(clouds)
    assert len(found.level) > 0
    assert found.exact_seconds.unique().tolist() == [1.0]
    assert found.geomloss_seconds.unique().tolist() == [1.0]


@pytest.mark.parametrize(("unknown", "refused"), [(2, False), (5, True)])
def test_a_tenth_of_the_tokens_may_be_unknown(unknown, refused):
    """Of 28 words."""
    model, tokenizer = tiny_bert()
    text = " ".join([*"abcdefghij" * 2, *"abcdefgh"][: 28 - unknown] + ["what"] * unknown)
    if refused:
        with pytest.raises(ValueError, match="tokens are unknown"):
            inquire(model, tokenizer, [text, text], max_length=32)
    else:
        share = inquire(model, tokenizer, [text, text], max_length=32).about["unknown_token_share"]
        assert share == pytest.approx(unknown / 28)


@pytest.mark.filterwarnings("ignore:.*truncated")
@pytest.mark.parametrize(("asked", "takes", "kept"), [(40, 25, 25), (24, 25, 24), (None, 25, None), (24, None, 24)])
def test_no_more_tokens_are_kept_than_the_model_takes(asked, takes, kept, monkeypatch):
    monkeypatch.setattr("attn_flow.probe.run.length_limit", lambda *_: takes)
    found = inquire(*tiny_bert(), TEXTS, max_length=asked)
    assert found.about["max_length"] == kept
    assert found.about["tokens"] == 2 * (26 if kept is None else kept)


def test_places_are_read_for_the_longest_text(monkeypatch):
    lengths = []
    monkeypatch.setattr(clouds_module, "read_places", lambda found, length: lengths.append((len(found), length)))
    recorded()
    assert lengths == [(2, 26)]  # both layers; 24 words and two special tokens


@pytest.mark.parametrize("name", ["MPNet", "T5 encoder"])
def test_a_table_that_all_layers_add_is_held_once(name):
    places = read_places(blocks(tiny(name)), 6)
    assert len(places) > 1
    assert len({p.table.data_ptr() for p in places}) == 1
