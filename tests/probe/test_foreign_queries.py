"""Queries of other texts, from which the clusters of a text are found."""

from dataclasses import replace

import pytest
import torch

from attn_flow.coresets import cluster_by_queries
from attn_flow.hooks.demo import minilm, topics
from attn_flow.probe.clusters import foreign_queries
from attn_flow.probe.encoders import record_encoder
from attn_flow.probe.recording import Recording


@pytest.fixture(scope="module")
def recording() -> Recording:
    model, tokenizer = minilm()
    return record_encoder(model, tokenizer, [text[:400] for text in topics() if len(text) > 900][:4])


def test_foreign_queries_come_from_other_texts(recording):
    foreign = foreign_queries(recording, 1, 2, torch.Generator().manual_seed(0))
    for text in range(2):
        others = torch.cat([recording.heads(1, t).queries for t in range(4) if t != text], dim=1)
        for query in foreign[text].queries[0, :50]:
            assert bool((others[0] == query).all(-1).any())


def test_coresets_do_not_depend_on_the_own_queries(recording):
    """With other queries of text 0 alone its coresets stay as they are."""
    foreign = foreign_queries(recording, 1, 1, torch.Generator().manual_seed(0))[0]
    heads = recording.heads(1, 0)

    class Turned(Recording):
        def heads(self, layer: int, text: int):
            own = super().heads(layer, text)
            return replace(own, queries=-2.0 * own.queries) if text == 0 else own

    again = Turned(**vars(recording))
    assert not torch.allclose(again.heads(1, 0).averages, heads.averages, atol=0.1)
    other = foreign_queries(again, 1, 1, torch.Generator().manual_seed(0))[0]
    for make in (
        lambda h, f: cluster_by_queries(h.keys, h.values, f.queries, 8),
        lambda h, f: cluster_by_queries(h.keys, h.values, f.predicted(h.keys, h.values), 8),
    ):
        a, b = make(heads, foreign), make(again.heads(1, 0), other)
        torch.testing.assert_close(
            (a.keys, a.values, a.log_masses), (b.keys, b.values, b.log_masses), rtol=1e-4, atol=1e-4
        )


def test_predicted_queries_are_close_to_the_own_ones(recording):
    """A linear map of key and value, learned on other texts, explains most of a text's queries."""
    foreign = foreign_queries(recording, 1, 1, torch.Generator().manual_seed(0))[0]
    heads = recording.heads(1, 0)
    count = foreign.queries.shape[-2]
    own = heads.queries[:, torch.arange(count) * heads.n // count]
    error = lambda queries: float((queries - own).square().sum())
    assert error(foreign.predicted(heads.keys, heads.values)) < 0.5 * error(foreign.queries)
