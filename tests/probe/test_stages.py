"""Every stage of a probe on clouds drawn at random, against its definition written out; no encoder runs."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.observe import quantities
from attn_flow.observe.tracking import track
from attn_flow.probe import evolution, nulls, reading, run, transports
from attn_flow.probe.agreement import compare
from attn_flow.probe.closures import LADDER, gaussian
from attn_flow.probe.clouds import Clouds, by_text, local, reach
from attn_flow.probe.evolution import cloud_evolution, token_view
from attn_flow.probe.heads import head_regimes, head_spectra
from attn_flow.probe.law_alone import carry_law
from attn_flow.probe.limit_law import affine_drift, approach_to_limits, limit_matrix, linear_limit
from attn_flow.probe.nulls import agreement_of, by_control, by_null, cross_fitted, of_other_weights, rotated
from attn_flow.probe.propagation import Passes
from attn_flow.probe.quantised import Atoms, k_means, quantise
from attn_flow.probe.transports import transport_check

D, LAYERS = 6, 2
LENGTHS = (30, 26, 34)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def clouds() -> Clouds:
    """Three texts of random tokens before two layers of two heads, and after them; each has two special tokens."""
    attentions = [
        Attention.random(D, 2, 3, beta=1.5, generator=seeded(layer), dtype=torch.float64) for layer in range(LAYERS)
    ]
    z = [[1 + normal(n, D, seed=10 * level + t) for t, n in enumerate(LENGTHS)] for level in range(LAYERS + 1)]
    out = [[A.drift(x) for x in level] for A, level in zip(attentions, z)]
    special = [torch.arange(n) % (n - 1) == 0 for n in LENGTHS]
    tokens = [[f"{t}.{i}" for i in range(n)] for t, n in enumerate(LENGTHS)]
    return Clouds(attentions, [None] * LAYERS, [None] * LAYERS, z, out, special, tokens, [0, 1, 2])


def unit(x: Tensor) -> Tensor:
    return x / x.square().sum(-1, keepdim=True).sqrt()


def matched(x: Tensor, y: Tensor) -> float:
    """W2 of as many tokens, by an assignment."""
    cost = ((x[:, None] - y[None]) ** 2).sum(-1).numpy()
    i, j = scipy.optimize.linear_sum_assignment(cost)
    return math.sqrt(cost[i, j].mean())


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


# --- the limiting law -------------------------------------------------------------------------------------------------


def test_the_way_to_the_limit_is_measured_in_distances(clouds):
    found = approach_to_limits(clouds, seeded(5))
    random = seeded(5)
    for layer, A in enumerate(clouds.attentions):
        every = torch.cat(clouds.z[layer])
        mean, cov = every.mean(0), torch.cov(every.T, correction=0)
        M, c = affine_drift(A, mean, cov)
        turned = affine_drift(rotated(A, random), mean, cov)[0]
        for t in range(3):
            x, after = unit(clouds.z[layer][t]), unit(clouds.z[layer + 1][t])
            held = unit(clouds.z[layer][t] + clouds.z[layer][t] @ M.T)
            for name, matrix, cloud in (("real", M, after), ("if_held", M, held), ("real_rotated", turned, after)):
                end = unit(x @ limit_matrix(linear_limit(matrix), matrix).T)
                expected = matched(cloud, end) / matched(x, end)
                assert float(getattr(found, name)[layer, t]) == pytest.approx(expected, rel=1e-6), name
            pushed, linear = clouds.out[layer][t], clouds.z[layer][t] @ M.T
            tangent = lambda v, x=x: v - (v * x).sum(-1, keepdim=True) * x
            pairs = {
                "cosine": (pushed, linear + c),
                "cosine_without_c": (pushed, linear),
                "block_cosine": (after - x, linear + c),
            }
            for name, (a, b) in pairs.items():
                expected = np.mean([cosine(u, v) for u, v in zip(tangent(a), tangent(b))])
                assert float(getattr(found, name)[layer, t]) == pytest.approx(expected, rel=1e-9), name
            size = clouds.z[layer][t].norm(dim=-1)
            assert float(found.size_of_Mx[layer, t]) == pytest.approx(float((linear.norm(dim=-1) / size).mean()))
            assert float(found.size_of_c[layer, t]) == pytest.approx(float((c.norm() / size).mean()))
        halves = [torch.cat(clouds.z[layer][i::2]) for i in range(2)]
        U, W = (linear_limit(affine_drift(A, h.mean(0), torch.cov(h.T, correction=0))[0]).basis for h in halves)
        assert U is not None
        assert W is not None
        P, Q = U @ torch.linalg.pinv(U), W @ torch.linalg.pinv(W)
        expected = float((P * Q).sum()) / max(U.shape[1], W.shape[1])
        assert float(found.stability[layer]) == pytest.approx(expected, rel=1e-9)


def test_one_text_has_no_two_halves(clouds):
    found = approach_to_limits(clouds.first(1), seeded(5))
    assert found.real.shape == (LAYERS, 1)
    assert bool(found.stability.isnan().all())


# --- heads ------------------------------------------------------------------------------------------------------------


def test_the_regime_of_a_head_is_a_mean_over_queries_and_texts(clouds):
    found = head_regimes(clouds)
    for layer, head in itertools.product(range(LAYERS), range(2)):
        A = clouds.attentions[layer]
        entropy, largest, deviation, beta, explained = [], [], [], [], []
        for t in range(3):
            space = clouds.space(layer, t)
            logits = 1.5 * (clouds.z[layer][t] @ A.Q[head].T) @ (clouds.z[layer][t] @ A.K[head].T).T
            P = torch.softmax(logits, -1)
            entropy.append(float(-(P * P.log()).sum(-1).mean()) / math.log(LENGTHS[t]))
            largest.append(float(P.amax(-1).mean()))
            deviation.append(float(logits.std(-1, correction=0).mean()))
            beta.append(float(quantities.attention_statistics(A, clouds.z[layer][t]).effective_beta[head]))
            predicted = space.per_head(LADDER["quantised_closure"].measure(space))[head]
            explained.append(float(compare(predicted, P @ clouds.z[layer][t] @ A.V[head].T).explained))
        for name, values in (
            ("entropy", entropy),
            ("largest_weight", largest),
            ("logit_std", deviation),
            ("effective_beta", beta),
            ("explained", explained),
        ):
            assert float(getattr(found, name)[layer, head]) == pytest.approx(np.mean(values), rel=1e-6), name


def test_some_stages_look_at_the_first_texts_only(clouds):
    """Eight of them for the heads, four token by token, sixteen for the distances to the limit."""
    many = replace(
        clouds,
        z=[level[:1] * 2 + level[1:2] * 15 + level[2:] for level in clouds.z],
        out=[level[:1] * 2 + level[1:2] * 15 + level[2:] for level in clouds.out],
        special=clouds.special[:1] * 2 + clouds.special[1:2] * 15 + clouds.special[2:],
        tokens=clouds.tokens[:1] * 2 + clouds.tokens[1:2] * 15 + clouds.tokens[2:],
        kept=list(range(18)),
    )
    whole, eight, seven = (head_regimes(many.first(n)).entropy for n in (18, 8, 7))
    assert torch.equal(whole, eight)
    assert not torch.equal(whole, seven)
    assert reading.read_tokens(many).lengths.tolist() == [30, 30, 26, 26]
    assert approach_to_limits(many, seeded(0)).real.shape == (LAYERS, 16)


def test_spectra_are_those_of_the_matrices(clouds):
    found = head_spectra(clouds.attentions)
    assert found["layers"] == LAYERS
    assert [(h["layer"], h["head"]) for h in found["heads"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for one in found["heads"]:
        A = clouds.attentions[one["layer"]]
        G, V = (m[one["head"]].numpy() for m in (A.G, A.values))
        for name, matrix in (("G", G), ("V", V)):
            values = np.linalg.svd(matrix)[1]
            assert one[f"norm_{name}"] == pytest.approx(values[0])
            assert one[f"singular_{name}"] == pytest.approx(values[:3])
        eigenvalues = np.linalg.eigvals(V @ G)
        largest = eigenvalues[np.argsort(-abs(eigenvalues))][:3]
        seen = [complex(a, b) for a, b in zip(one["real"], one["imaginary"])]
        key = lambda z: (round(z.real, 8), round(z.imag, 8))
        assert sorted(map(key, seen)) == sorted(map(key, largest))


# --- token by token ---------------------------------------------------------------------------------------------------


def test_what_a_reader_sees_of_a_token(clouds):
    found = reading.read_tokens(clouds)
    assert found.lengths.tolist() == list(LENGTHS)
    for layer in range(LAYERS):
        missed, received = [], []
        for t, n in enumerate(LENGTHS):
            space = clouds.space(layer, t)
            predicted, computed = space.drift(LADDER["quantised_closure"].measure(space)), clouds.out[layer][t]
            spread = float((computed - computed.mean(0)).square().sum()) / n
            missed += [float((p - c).square().sum()) / spread for p, c in zip(predicted, computed)]
            P = space.logits.softmax(-1)
            received += [n * float(P[:, :, j].mean()) for j in range(n)]
        assert found.missed[layer].tolist() == pytest.approx(missed, rel=1e-4)
        assert found.received[layer].tolist() == pytest.approx(received, rel=1e-5)
        space = clouds.space(layer, 0)
        assert torch.allclose(found.true_rows[layer].double(), space.logits.softmax(-1), atol=1e-6)
        assert torch.allclose(found.closure_rows[layer].double(), quantise(space).rows(space), atol=1e-6)


def test_few_texts_are_read(clouds, monkeypatch):
    monkeypatch.setattr(reading, "TEXTS", 2)
    assert reading.read_tokens(clouds).lengths.tolist() == list(LENGTHS[:2])


# --- the cloud --------------------------------------------------------------------------------------------------------


def test_the_evolution_of_a_cloud_is_measured_text_by_text(clouds):
    found = cloud_evolution(clouds)
    histogram = torch.zeros_like(found.histogram)
    for t, n in enumerate(LENGTHS):
        levels = [unit(level[t]) for level in clouds.z]
        for level, x in enumerate(levels):
            apart = [float(x[i] @ x[j]) for i in range(n) for j in range(n) if i != j]
            assert float(found.pairwise_cosine[level, t]) == pytest.approx(np.mean(apart), rel=1e-9)
            counts = np.histogram(apart, found.edges.numpy())[0] / len(apart)
            histogram[level] += torch.from_numpy(counts) / 3
            assert float(found.effective_rank[level, t]) == pytest.approx(float(quantities.effective_rank(x)))
            assert float(found.clusters[level, t]) == float(quantities.clusters(x, 0.5).counts)
            for i, beta in enumerate(evolution.BETAS):
                assert float(found.log_energy[i, level, t]) == pytest.approx(float(quantities.log_energy(x, beta)))
        events = track(Trajectory(torch.arange(3.0), torch.stack(levels)), 0.5, min_mass=2 / n).events
        for kind, seen in (("merge", found.merges), ("split", found.splits)):
            expected = [sum(e.kind == kind and int(e.t) == level for e in events) for level in range(3)]
            assert seen[:, t].tolist() == expected
    assert torch.allclose(found.histogram, histogram, atol=1e-9)
    assert float(found.merges.sum() + found.splits.sum()) > 0  # else nothing was tested


def test_the_view_shows_tokens_in_the_leading_directions_of_all_levels(clouds, monkeypatch):
    monkeypatch.setattr(evolution, "SHOWN", 20)
    view = token_view(clouds, seeded(3))
    places = list(zip(view.text.tolist(), view.place.tolist()))
    assert len(set(places)) == 20
    assert places == sorted(places)
    x = torch.stack([torch.stack([unit(level[t][i]) for t, i in places]) for level in clouds.z]).reshape(-1, D)
    left, singular, _ = np.linalg.svd((x - x.mean(0)).numpy(), full_matrices=False)
    for axis in range(3):
        expected = left[:, axis] * singular[axis]
        seen = view.x[..., axis].reshape(-1).double().numpy()
        assert min(abs(seen - expected).max(), abs(seen + expected).max()) < 1e-5


def test_exact_and_geomloss_are_compared_at_the_ends_and_in_the_middle(clouds):
    pytest.importorskip("geomloss")
    two = replace(clouds, z=[[x[:26] for x in level] for level in clouds.z])
    found = transport_check(two)
    levels = [int(level) for level in found.level]
    assert set(levels) <= {0, 1, 2}
    assert levels
    for level, exact, other, bound in zip(levels, found.exact, found.geomloss, found.bound):
        assert float(exact) == pytest.approx(matched(*(unit(two.z[level][t]) for t in (0, 1))), rel=1e-6)
        assert abs(float(other - exact)) <= float(bound) <= transports.RTOL * float(other)
    assert len(transport_check(clouds.first(1)).level) == 0


# --- nulls and controls -----------------------------------------------------------------------------------------------


def predicted(predict: Any, clouds: Clouds, layer: int, text: int) -> Tensor:
    return predict(clouds.space(layer, text), layer, text)


def weights_of(A: Attention, x: Tensor) -> Tensor:
    return torch.softmax(1.5 * torch.einsum("hik,hjk->hij", x @ A.Q.mT, x @ A.K.mT), -1)


def assembled(A: Attention, average: Tensor) -> Tensor:
    return sum(average[h] @ A.O[h].T for h in range(2))


def test_nulls_are_what_they_are_called(clouds):
    for layer, t in itertools.product(range(LAYERS), range(3)):
        A, x, out = clouds.attentions[layer], clouds.z[layer][t], clouds.out[layer]
        space = clouds.space(layer, t)
        values = x @ A.V.mT  # (heads, n, v)
        expected = {
            "mean_output": out[t].mean(0).expand(x.shape),
            "uniform": assembled(A, values.mean(1, keepdim=True).expand(values.shape)),
            "removed": torch.zeros_like(x),
            "another_text": space.drift(LADDER["quantised_closure"].measure(clouds.space(layer, (t + 1) % 3))),
        }
        for name, value in expected.items():
            assert torch.allclose(predicted(by_null(name, clouds, seeded(0)), clouds, layer, t), value), name
        others = torch.cat([out[i] for i in range(3) if i != t]).mean(0).expand(x.shape)
        assert torch.allclose(
            predicted(by_null("mean_output", clouds, seeded(0), corpus_mean=True), clouds, layer, t), others
        )
        other = clouds.space(layer, t, clouds.attentions[1 - layer])
        elsewhere = other.drift(LADDER["quantised_closure"].measure(other))
        assert torch.allclose(predicted(by_null("another_layer", clouds, seeded(0)), clouds, layer, t), elsewhere)
        turned = clouds.space(layer, t, rotated(A, seeded(4)))
        expected_turned = turned.drift(LADDER["quantised_closure"].measure(turned))
        assert torch.allclose(predicted(by_null("rotated", clouds, seeded(4)), clouds, layer, t), expected_turned)
        mean = (weights_of(A, x) @ values).mean(1, keepdim=True).expand(values.shape)
        assert torch.allclose(
            predicted(by_control("text_mean_closure", seeded(0)), clouds, layer, t), assembled(A, mean)
        )


def test_uniform_attention_is_over_what_a_token_sees(clouds):
    near = replace(clouds, windows=[3] * LAYERS)
    A, x = clouds.attentions[0], clouds.z[0][0]
    rows = [x[max(0, i - 3) : i + 4].mean(0) for i in range(30)]
    expected = assembled(A, torch.stack(rows) @ A.V.mT)
    assert torch.allclose(predicted(by_null("uniform", near, seeded(0)), near, 0, 0), expected)


@pytest.mark.parametrize("window", [None, 3])
def test_random_tokens_beside_the_gaussian(clouds, window):
    """The Gaussian counts as all tokens that a query sees, and each of its own as one."""
    seen = replace(clouds, windows=[window] * LAYERS)
    space = seen.space(0, 0)
    draw = torch.rand(30, 30, generator=seeded(7))
    if window is not None:
        draw = draw.masked_fill(~local(30, window, draw.device), -1.0)
    own = [[int(j) for j in row.topk(11).indices if row[int(j)] >= 0] for row in draw]
    found = predicted(by_null("random_tokens", seen, seeded(7)), seen, 0, 0)
    law = gaussian(space)
    bulk, mass = space.per_head(law), space.beta * law.log_partition(space.g, space.beta)
    average = torch.zeros_like(bulk)
    for h, i in itertools.product(range(2), range(30)):
        scores = torch.stack([space.logits[h, i, j] for j in own[i]])
        values = torch.stack([space.y[h, j, space.k :] for j in own[i]])
        many = math.log(30) if window is None else 0.0  # the law of what is seen has that mass itself
        logits = torch.stack([mass[h, i] + many, scores.logsumexp(0)])
        p = logits.softmax(0)
        average[h, i] = p[0] * bulk[h, i] + p[1] * (scores.softmax(0)[:, None] * values).sum(0)
    assert torch.allclose(found, space.assembled(average), atol=1e-10)


def test_atoms_of_half_the_queries_serve_the_other_half(clouds):
    space = clouds.space(1, 0)
    even = torch.arange(30) % 2 == 0
    found = cross_fitted(space, 1, 0)
    for i in range(30):
        law = quantise(space, queries=~even if i % 2 == 0 else even).law(space)
        assert torch.allclose(found[i], space.drift(law)[i], atol=1e-12)


def test_layers_that_share_weights_are_not_other_ones(clouds):
    A, B = clouds.attentions
    four = replace(clouds, attentions=[A, B, A, B], windows=[None] * 4, places=[None] * 4)
    assert of_other_weights(four, 0) == [1, 3]
    assert of_other_weights(four, 1) == [2, 0]
    assert of_other_weights(replace(clouds, attentions=[A, A]), 0) == []


def test_nulls_that_an_encoder_cannot_have_are_left_out(clouds):
    names = list(nulls.NULLS)
    assert nulls.allowed(names, clouds) == names
    assert "another_text" not in nulls.allowed(names, clouds.first(1))
    near = replace(clouds, windows=[3] * LAYERS)
    assert "another_text" not in nulls.allowed(names, near)
    same = replace(clouds, attentions=[clouds.attentions[0]] * 2)
    assert "another_layer" not in nulls.allowed(names, same)


def test_agreement_is_by_layer_and_text(clouds):
    predict = by_null("uniform", clouds, seeded(0))
    found = agreement_of(clouds, predict)
    for layer, t in itertools.product(range(LAYERS), range(3)):
        one = compare(predicted(predict, clouds, layer, t), clouds.out[layer][t])
        for name in ("explained", "centred_cosine", "cosine"):
            assert float(getattr(found, name)[layer, t]) == float(getattr(one, name))


# --- the law alone ----------------------------------------------------------------------------------------------------


def test_the_law_alone_starts_from_two_moments_and_is_compared_with_the_next_text(clouds):
    states = [[level[t] for level in clouds.z] for t in range(3)]
    embeddings = unit(normal(3, D, seed=30))
    drawn: dict[int, Tensor] = {}

    def run_(predict: Any, start: Any) -> Passes:
        assert predict is None
        drawn.update({t: start(t) for t in range(3)})
        moved = [[*levels[:-1], 2 * levels[-1] + normal(*levels[-1].shape, seed=t)] for t, levels in enumerate(states)]
        return Passes(moved, unit(embeddings + 0.3 * normal(3, D, seed=31)))

    between = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    bench: Any = SimpleNamespace(
        true=Passes(states, embeddings), clouds=clouds, run=run_, between=between, transport="auto"
    )
    found = carry_law(bench, seeded(8))
    random = seeded(8)
    for t in range(3):
        x, special = clouds.z[0][t], clouds.special[t]
        assert torch.equal(drawn[t][special], x[special])
        words = x[~special]
        mean, cov = words.mean(0), torch.cov(words.T, correction=0)
        noise = torch.randn(x.shape, generator=random, dtype=torch.float64)
        white = drawn[t][~special] - mean
        # The draw is noise through a root of the covariance: white^T cov^-1 white is |noise|^2.
        lengths = (white @ torch.linalg.inv(cov) * white).sum(-1)
        assert torch.allclose(lengths, noise[~special].square().sum(-1), rtol=1e-9)
    covariance = lambda x: torch.cov(x.T, correction=0).flatten()
    for t in range(3):
        seen = 2 * states[t][-1] + normal(LENGTHS[t], D, seed=t)
        assert float(found.covariance_cosine[t]) == pytest.approx(cosine(covariance(seen), covariance(states[t][-1])))
        other = cosine(covariance(states[(t + 1) % 3][-1]), covariance(states[t][-1]))
        assert float(found.another_text_covariance_cosine[t]) == pytest.approx(other)
        assert float(found.another_text_embedding_cosine[t]) == pytest.approx(
            float(embeddings[t] @ embeddings[(t + 1) % 3])
        )
        assert found.w2[0, t] == 0
        assert float(found.w2[1, t]) == pytest.approx(matched(seen, states[t][-1]) / 4, rel=1e-6)


# --- clouds -----------------------------------------------------------------------------------------------------------


def test_how_far_a_token_sees():
    block = lambda **core: SimpleNamespace(core=SimpleNamespace(**core))
    assert reach(block(sliding_window=5)) == 4
    assert reach(block(sliding_window=None, local_attention=(64, 32))) == 64
    assert reach(block(local_attention=(-1, -1))) is None
    assert reach(block(local_attention=(0, 0))) == 0
    assert reach(block()) is None
    near = local(5, 1, torch.device("cpu"))
    assert near is not None
    assert near.tolist() == [[abs(i - j) <= 1 for j in range(5)] for i in range(5)]
    assert local(5, None, torch.device("cpu")) is None


def test_a_recorded_path_is_cut_into_texts(clouds):
    """Levels: attn_in of both layers, attn_out of both, and what leaves; padding and a text too short are left out."""
    lengths = [24, 21, 30]
    x = normal(5, 3, 30, D, seed=40)
    mask = torch.arange(30) < torch.tensor(lengths)[:, None]
    labels = {
        "token": [[f"{t}.{i}" for i in range(n)] for t, n in enumerate(lengths)],
        "special": [[i == 0 for i in range(n)] for n in lengths],
        "id": [list(range(n)) for n in lengths],
    }
    path = Trajectory(torch.arange(5.0), x, mask=mask, labels=labels, about={"truncated": 2, "unknown_share": 0.25})
    found = by_text(path, clouds.attentions, [None, None], [None, None])
    assert (found.kept, found.skipped, found.truncated, found.unknown) == ([0, 2], 1, 2, 0.25)
    assert found.tokens == [labels["token"][0], labels["token"][2]]
    for i, t in enumerate([0, 2]):
        for level, where in enumerate([0, 1, 4]):
            assert torch.equal(found.z[level][i], x[where, t, : lengths[t]])
        for layer in range(2):
            assert torch.equal(found.out[layer][i], x[2 + layer, t, : lengths[t]])
        assert found.special[i].tolist() == labels["special"][t]
    labels["id"][0][5] = 99
    again = Trajectory(torch.arange(5.0), x, mask=mask, labels=labels)
    assert by_text(again, clouds.attentions, [None, None], [None, None]).content != found.content


def test_the_first_texts_of_all(clouds):
    two = clouds.first(2)
    assert two.texts == 2
    assert [len(level) for level in two.z] == [2] * 3
    assert [len(level) for level in two.out] == [2] * 2
    assert two.kept == [0, 1]
    assert len(two.tokens) == 2
    assert not clouds.partial
    assert replace(clouds, windows=[None, 4]).partial


# --- atoms ------------------------------------------------------------------------------------------------------------


def grouped(z: Tensor, a: Tensor, residual: float, most: int) -> tuple[list[int], int]:
    """Weighted k-means of z (n, f), token by token: labels, and how many clusters it began with."""
    tokens = range(len(z))
    away = lambda i: min(float((z[i] - z[j]).square().sum()) for j in chosen)
    chosen = [int(a.argmax())]
    while len(chosen) < most and sum(float(a[i]) * away(i) for i in tokens) > residual:
        chosen.append(max(tokens, key=lambda i: float(a[i]) * away(i)))
    centres = [z[j] for j in chosen]
    nearest = lambda i: min(range(len(centres)), key=lambda c: float((z[i] - centres[c]).square().sum()))
    for _ in range(5):
        label = [nearest(i) for i in tokens]
        for c in range(len(centres)):
            members = [i for i in tokens if label[i] == c]
            if members:
                centres[c] = sum(a[i] * z[i] for i in members) / sum(a[i] for i in members)
    return [nearest(i) for i in tokens], len(chosen)


@pytest.mark.parametrize(("residual", "most"), [(0.3, 12), (0.3, 3), (0.0, 5)])
def test_k_means_begins_with_the_heaviest_and_goes_on_with_the_farthest(residual, most):
    z, a = normal(2, 25, 3, seed=50), torch.softmax(normal(2, 25, seed=51), -1)
    label, top = k_means(z, a, residual, most)
    expected = [grouped(*given, residual, most) for given in zip(z, a)]
    assert label.tolist() == [one for one, _ in expected]
    assert top == max(number for _, number in expected)


def test_the_metric_of_the_atoms_is_that_of_the_queries(clouds):
    """Keys through a root of the queries' covariance and values, of spreads 1 and a half, weighed by attention."""
    space = clouds.space(0, 0)
    atoms = quantise(space)
    for h in range(2):
        P = space.logits[h].softmax(-1)
        a = P.sum(0) / 30
        q = 1.5 * space.g[h, :, :3]
        S = torch.cov(q.T, correction=0)
        keys, values = space.y[h, :, :3], space.y[h, :, 3:]
        spread = lambda x, metric, a=a: float((a * ((x - a @ x) @ metric * (x - a @ x)).sum(-1)).sum())
        unit_matrix = torch.eye(3, dtype=torch.float64)
        share = {"keys": spread(keys, S), "values": spread(values, unit_matrix) / 0.5}
        distance = lambda i, j, S=S, keys=keys, values=values, share=share: (
            float((keys[i] - keys[j]) @ S @ (keys[i] - keys[j])) / share["keys"]
            + float((values[i] - values[j]).square().sum()) / share["values"]
        )
        gram = torch.tensor([[distance(i, j) for j in range(30)] for i in range(30)], dtype=torch.float64)
        centred = torch.eye(30, dtype=torch.float64) - 1 / 30
        values_, vectors = torch.linalg.eigh(-centred @ gram @ centred / 2)
        z = vectors * values_.clamp_min(0).sqrt()  # points with these distances
        label = k_means(z[None], a[None], 0.5, math.ceil(4 * math.sqrt(30)))[0][0]
        pairs = {(int(i), int(j)) for i, j in zip(label, atoms.label[h])}
        assert len(pairs) == len({i for i, _ in pairs}) == len({j for _, j in pairs})
        assert atoms.share[h].tolist() == pytest.approx(
            [float(a[i] / a[atoms.label[h] == atoms.label[h, i]].sum()) for i in range(30)], rel=1e-6
        )


@pytest.mark.parametrize(("n", "most"), [(30, math.ceil(4 * math.sqrt(30))), (200, math.ceil(200 / 3))])
def test_there_are_at_most_four_times_the_root_of_n_atoms_or_a_third_of_the_tokens(clouds, generator, n, most):
    x = torch.randn(n, clouds.attentions[0].dim, generator=generator, dtype=torch.float64)
    space = clouds.seen_by(0, x, torch.zeros(n, dtype=torch.bool))
    assert quantise(space, residual=0.0).counts.tolist() == [most] * 2
    assert quantise(space, residual=0.0, most=2.0).counts.tolist() == [math.ceil(2 * math.sqrt(n))] * 2


def test_masses_of_a_law_are_the_exponentials_of_their_logarithms(clouds):
    space = clouds.space(0, 0)
    y, log_mass = space.y[:, :3], torch.tensor([[0.0, 900.0, -math.inf]] * 2, dtype=torch.float64)
    atoms = Atoms(y, log_mass, torch.zeros(2, 30, dtype=torch.long), torch.ones(2, 30, dtype=torch.float64) / 30)
    assert atoms.counts.tolist() == [2, 2]
    one = space.per_head(atoms.law(space))
    assert torch.allclose(one, y[:, 1:2, space.k :].expand_as(one))


# --- costs, and the theorem's setting ---------------------------------------------------------------------------------


def test_the_cost_of_a_closure_is_its_mean_over_layers(clouds):
    for name in ("quantised_closure", "window_closure", "clusters_closure"):
        found = run._cost(LADDER[name], clouds)
        each = [LADDER[name].cost(clouds.space(layer, 0)) for layer in range(LAYERS)]
        assert found.numbers == pytest.approx(np.mean([c.numbers for c in each]))
        assert found.own_tokens == each[0].own_tokens


def test_tokens_that_fill_the_sphere_pull_along_G_x(clouds):
    A, x = clouds.attentions[0], clouds.z[0][0]
    radius = math.sqrt(float(x.square().sum(-1).mean()))
    expected = sum(radius * unit(x @ A.G[h].T) @ A.values[h].T for h in range(2))
    assert torch.allclose(run._full_sphere(clouds.space(0, 0), 0, 0), expected)
