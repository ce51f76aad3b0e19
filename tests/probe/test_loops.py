"""Every number of the probe, once more: loops over tokens and heads written from the definitions, on a tiny BERT."""

import math

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import torch
from torch import Tensor

from attn_flow.hooks.demo import tiny_bert
from attn_flow.probe.clouds import Clouds, record_clouds
from attn_flow.probe.evolution import BETAS, BINS, CLUSTER, cloud_evolution, token_view
from attn_flow.probe.heads import head_regimes
from attn_flow.probe.law_alone import carry_law
from attn_flow.probe.limit_law import CASES, approach_to_limits
from attn_flow.probe.nulls import agreement_of, by_closure, by_control, by_null, main_closure, rotated
from attn_flow.probe.propagation import Bench, Passes, bench
from attn_flow.probe.reading import read_tokens
from attn_flow.probe.run import _full_sphere
from attn_flow.probe.transports import transport_check

TEXTS = [
    "a b c d e f g h i j a c e g i b d f h j a d g j",
    "j i h g f e d c b a j h f d b i g e c a j g d a",
    "a a b b c c d d e e f f g g h h i i j j a b c d",
]


@pytest.fixture(scope="module")
def model():
    """With biases and norms drawn anew: at initialisation they are 0 and 1, and nothing would be seen of them."""
    found, tokenizer = tiny_bert()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in found.named_parameters():
            if p.ndim == 1:
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
            elif "attention" in name:
                p.mul_(6)
    return found.double(), tokenizer


@pytest.fixture(scope="module")
def clouds(model) -> Clouds:
    return record_clouds(*model, TEXTS)


@pytest.fixture(scope="module")
def laid(model, clouds) -> Bench:
    return bench(*model, TEXTS, clouds)


def weights_of(clouds: Clouds, layer: int, text: int) -> np.ndarray:
    """Attention weights (heads, n, n), entry by entry."""
    A, x = clouds.attentions[layer], clouds.z[layer][text]
    P = np.zeros((A.heads, len(x), len(x)))
    for h in range(A.heads):
        for i in range(len(x)):
            q = A.Q[h] @ x[i] + A.query_bias[h]
            e = [math.exp(float(A.beta[h] * (q @ (A.K[h] @ x[j])))) for j in range(len(x))]
            P[h, i] = np.array(e) / sum(e)
    return P


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def apart(x: np.ndarray, y: np.ndarray) -> float:
    """W2 of two clouds of as many tokens: the best of all pairings."""
    cost = ((x[:, None] - y[None]) ** 2).sum(-1)
    return math.sqrt(cost[scipy.optimize.linear_sum_assignment(cost)].mean())


def test_what_attention_adds_is_a_loop_over_tokens_and_heads(clouds):
    """The truth that everything is compared with; with it the recorded inputs and outputs."""
    A, x, P = clouds.attentions[1], clouds.z[1][0], weights_of(clouds, 1, 0)
    for i in (0, 7):
        out = A.value_bias.clone()
        for h in range(A.heads):
            out = out + A.O[h] @ sum(P[h, i, j] * (A.V[h] @ x[j]) for j in range(len(x)))
        assert torch.allclose(out, clouds.out[1][0][i], atol=1e-9)


@pytest.mark.parametrize("layer", [0, 1])
def test_nulls_are_what_their_words_say(clouds, layer):
    A, text = clouds.attentions[layer], 1
    x, out, space = clouds.z[layer][text], clouds.out[layer][text], clouds.space(layer, text)
    predict = lambda name: by_null(name, clouds, torch.Generator().manual_seed(0))(space, layer, text)
    value = lambda y: sum(A.O[h] @ (A.V[h] @ y) for h in range(A.heads)) + A.value_bias
    for i in (0, 5):
        assert torch.allclose(predict("uniform")[i], sum(value(x[j]) for j in range(len(x))) / len(x))
        assert torch.allclose(predict("mean_output")[i], sum(out) / len(x))
        assert torch.equal(predict("removed")[i], torch.zeros_like(x[i]))
    controlled = by_control("text_mean_closure", torch.Generator())(space, layer, text)
    assert torch.allclose(controlled, out.mean(0).expand_as(out), atol=1e-9)
    closure = main_closure(clouds)
    other = clouds.space(layer, 2)  # the next text: its law, met by this one's queries
    law = closure.measure(other)
    met = sum(A.O[h] @ law.tilted_mean(space.g, space.beta)[h, 4, space.k :] for h in range(A.heads)) + A.value_bias
    assert torch.allclose(predict("another_text")[4], met)
    stranger = clouds.seen_by(layer, x, space.special, clouds.attentions[1 - layer])
    assert torch.allclose(predict("another_layer"), stranger.drift(closure.measure(stranger)))
    turned = clouds.seen_by(layer, x, space.special, rotated(A, torch.Generator().manual_seed(0)))
    assert torch.allclose(predict("rotated"), turned.drift(closure.measure(turned)))


def test_the_sphere_pulls_every_head_towards_its_own_query(clouds):
    """Zero temperature and tokens everywhere on the sphere of the text's radius: the tilted mean is r G x/|G x|."""
    A, x, space = clouds.attentions[0], clouds.z[0][0], clouds.space(0, 0)
    r = math.sqrt(sum(float(y @ y) for y in x) / len(x))
    for i in (0, 3):
        out = A.value_bias.clone()
        for h in range(A.heads):
            g = A.K[h].T @ (A.Q[h] @ x[i] + A.query_bias[h])
            out = out + A.O[h] @ (A.V[h] @ (r * g / g.norm()))
        assert torch.allclose(_full_sphere(space, 0, 0)[i], out)


def test_every_layer_and_text_is_compared_with_its_own_output(clouds):
    found = agreement_of(clouds, by_closure(main_closure(clouds)))
    for layer in range(2):
        for t in range(3):
            space, o = clouds.space(layer, t), clouds.out[layer][t]
            p = space.drift(main_closure(clouds).measure(space))
            error = sum(float((p[i] - o[i]).square().sum()) for i in range(len(o)))
            spread = sum(float((o[i] - o.mean(0)).square().sum()) for i in range(len(o)))
            assert float(found.explained[layer, t]) == pytest.approx(1 - error / spread, rel=1e-9)


def test_heads_are_what_their_definitions_say(clouds):
    found, closure = head_regimes(clouds), main_closure(clouds)
    for layer, A in enumerate(clouds.attentions):
        for h in range(A.heads):
            entropy, largest, spread, beta, explained = [], [], [], [], []
            for t in range(3):
                x, P, space = clouds.z[layer][t], weights_of(clouds, layer, t)[h], clouds.space(layer, t)
                n = len(x)
                entropy.append(np.mean([-sum(p * math.log(p) for p in row) for row in P]) / math.log(n))
                largest.append(np.mean([max(row) for row in P]))
                spread.append(np.mean([np.std(np.log(row)) for row in P]))  # logits up to a constant
                G = [A.K[h].T @ (A.Q[h] @ y + A.query_bias[h]) for y in x]
                sizes = np.mean([float(g.norm()) for g in G]), np.mean([float(y.norm()) for y in x])
                beta.append(float(A.beta[h]) * sizes[0] * sizes[1])
                true = P @ (x @ A.V[h].T).numpy()
                said = space.per_head(closure.measure(space))[h].numpy()
                explained.append(1 - ((said - true) ** 2).sum() / ((true - true.mean(0)) ** 2).sum())
            for name, values in (
                ("entropy", entropy),
                ("largest_weight", largest),
                ("logit_std", spread),
                ("effective_beta", beta),
                ("explained", explained),
            ):
                assert float(getattr(found, name)[layer, h]) == pytest.approx(np.mean(values), rel=1e-7), name


def limit_of(M: np.ndarray) -> np.ndarray:
    """Pi, the projector onto the leading eigenspace along the others; e^M after it where that space turns."""
    values, right = np.linalg.eig(M)
    left = np.linalg.inv(right)
    leading = np.abs(values.real - values.real.max()) < 1e-8
    Pi = (right[:, leading] @ left[leading]).real
    return Pi @ scipy.linalg.expm(M) if leading.sum() == 2 else Pi


def ratio(x: np.ndarray, cloud: np.ndarray, end: np.ndarray) -> float:
    """How far a cloud is from where `end` takes the tokens x, over how far x is."""
    return apart(cloud, unit(x @ end.T)) / apart(x, unit(x @ end.T))


def cosine(x: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """Of what is tangential at x, mean over tokens."""
    a, b = (unit(v - (v * x).sum(-1, keepdims=True) * x) for v in (a, b))
    return float((a * b).sum(-1).mean())


def drift_of(A, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """M and c of the Gaussian closure, head by head."""
    mean, cov = x.mean(0), torch.from_numpy(np.cov(x.numpy().T, bias=True))
    M, c = torch.zeros_like(cov), A.value_bias.clone()
    for h in range(A.heads):
        M = M + A.beta[h] * A.O[h] @ A.V[h] @ cov @ A.K[h].T @ A.Q[h]
        c = c + A.O[h] @ A.V[h] @ (mean + A.beta[h] * cov @ A.K[h].T @ A.query_bias[h])
    return M.numpy(), c.numpy()


def test_the_limit_law_is_what_its_definition_says(clouds):
    found = approach_to_limits(clouds, torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    for layer, A in enumerate(clouds.attentions):
        pool = torch.cat(clouds.z[layer])
        M, c = drift_of(A, pool)
        ends = limit_of(M), limit_of(drift_of(rotated(A, generator), pool)[0])
        assert CASES[int(found.case[layer])] in ("fixed", "rotating")
        for t in range(3):
            before, after, pushed = (z[t].numpy() for z in (clouds.z[layer], clouds.z[layer + 1], clouds.out[layer]))
            x = unit(before)
            size = np.linalg.norm(before, axis=-1)
            expected = {
                "real": ratio(x, unit(after), ends[0]),
                "if_held": ratio(x, unit(before + before @ M.T), ends[0]),
                "real_rotated": ratio(x, unit(after), ends[1]),
                "cosine": cosine(x, pushed, before @ M.T + c),
                "cosine_without_c": cosine(x, pushed, before @ M.T),
                "block_cosine": cosine(x, unit(after) - x, before @ M.T + c),
                "size_of_Mx": float((np.linalg.norm(before @ M.T, axis=-1) / size).mean()),
                "size_of_c": float((np.linalg.norm(c) / size).mean()),
            }
            for name, value in expected.items():
                assert float(getattr(found, name)[layer, t]) == pytest.approx(value, rel=1e-6, abs=1e-9), name
        bases = []
        for half in (clouds.z[layer][0::2], clouds.z[layer][1::2]):
            values, vectors = np.linalg.eig(drift_of(A, torch.cat(half))[0])
            space = vectors[:, np.abs(values.real - values.real.max()) < 1e-8]
            bases.append(scipy.linalg.orth(np.concatenate([space.real, space.imag], axis=1)))
        overlap = np.sum((bases[0].T @ bases[1]) ** 2) / max(bases[0].shape[1], bases[1].shape[1])
        assert float(found.stability[layer]) == pytest.approx(overlap, rel=1e-6)


def test_the_evolution_is_what_its_definitions_say(clouds):
    found = cloud_evolution(clouds)
    for level in range(3):
        shares = np.zeros(BINS)
        for t in range(3):
            x = unit(clouds.z[level][t].numpy())
            n = len(x)
            pairs = [float(x[i] @ x[j]) for i in range(n) for j in range(n) if i != j]
            shares += np.histogram(pairs, BINS, (-1, 1))[0] / len(pairs) / 3
            sigma = np.linalg.svd(x, compute_uv=False)
            rank = math.exp(-sum(s * math.log(s) for s in sigma / sigma.sum()))
            assert float(found.effective_rank[level, t]) == pytest.approx(rank, rel=1e-9)
            near = [{j for j in range(n) if np.linalg.norm(x[i] - x[j]) <= CLUSTER} for i in range(n)]
            groups: list[set[int]] = []
            for i in range(n):
                touched = [g for g in groups if g & near[i]]
                groups = [g for g in groups if not g & near[i]] + [near[i].union(*touched)]
            assert float(found.clusters[level, t]) == len(groups)
            for b, beta in enumerate(BETAS):
                energy = sum(math.exp(beta * float(x[i] @ x[j])) for i in range(n) for j in range(n)) / (
                    2 * beta * n * n
                )
                assert float(found.log_energy[b, level, t]) == pytest.approx(math.log(energy), rel=1e-9)
        assert np.abs(found.histogram[level].numpy() - shares).sum() < 2e-3  # a pair on an edge goes either way
    assert found.edges.tolist() == pytest.approx(np.linspace(-1, 1, BINS + 1).tolist())


def test_merges_and_splits_are_counted_at_the_level_where_they_happen(clouds):
    """Two pairs of tokens, apart, then one cluster, then apart again; a token alone is no cluster."""
    turn = lambda *angles: torch.tensor([[math.cos(a), math.sin(a)] for a in angles], dtype=torch.float64)
    levels = [turn(0, 0.1, 1.5, 1.6, 4), turn(0, 0.3, 0.6, 0.9, 4), turn(0, 0.1, 2.5, 2.6, 4)]
    made = Clouds(
        clouds.attentions, [None] * 2, [[x] for x in levels], [], [torch.zeros(5, dtype=torch.bool)], [[]], [0]
    )
    found = cloud_evolution(made)
    assert found.merges[:, 0].tolist() == [0, 1, 0]
    assert found.splits[:, 0].tolist() == [0, 0, 1]
    assert found.clusters[:, 0].tolist() == [3, 2, 3]


def test_the_view_shows_the_three_directions_of_largest_variance(clouds):
    found = token_view(clouds, torch.Generator().manual_seed(0))
    x = np.stack([[unit(level[t].numpy())[i] for t, i in zip(found.text, found.place)] for level in clouds.z])
    flat = x.reshape(-1, x.shape[-1]) - x.reshape(-1, x.shape[-1]).mean(0)
    sigma = np.linalg.svd(flat, compute_uv=False)[:3]
    shown = found.x.numpy().reshape(-1, 3)
    assert np.linalg.norm(shown, axis=0) == pytest.approx(sigma, rel=1e-5)
    for axis in range(3):  # a direction of the space, not only as much variance
        direction = flat.T @ shown[:, axis]
        assert flat @ direction / np.linalg.norm(direction) == pytest.approx(shown[:, axis], abs=1e-4 * sigma[0])


def test_the_reading_is_what_its_definition_says(clouds):
    found, closure = read_tokens(clouds), main_closure(clouds)
    assert found.lengths.tolist() == [len(x) for x in clouds.z[0]]
    for layer in range(2):
        first = 0
        for t, n in enumerate(found.lengths.tolist()):
            P, space, o = weights_of(clouds, layer, t), clouds.space(layer, t), clouds.out[layer][t].numpy()
            received = [n * np.mean([P[h, i, j] for h in range(len(P)) for i in range(n)]) for j in range(n)]
            assert found.received[layer, first : first + n].tolist() == pytest.approx(received, rel=1e-5)
            p = space.drift(closure.measure(space)).numpy()
            spread = np.mean([((o[i] - o.mean(0)) ** 2).sum() for i in range(n)])
            missed = [((p[i] - o[i]) ** 2).sum() / spread for i in range(n)]
            assert found.missed[layer, first : first + n].tolist() == pytest.approx(missed, rel=1e-5, abs=1e-7)
            first += n
            if t == 0:
                assert np.abs(found.true_rows[layer].numpy() - P).max() < 1e-6
                # Weights of the closure: what they average is what it predicts.
                averaged = found.closure_rows[layer].double() @ space.y[..., space.k :]
                assert torch.allclose(averaged, space.per_head(closure.measure(space)), atol=1e-5)


def test_distances_of_both_solvers_are_of_the_first_two_texts(clouds):
    pytest.importorskip("geomloss")
    found = transport_check(clouds)
    assert found.level.tolist() == [0, 1, 2]
    for level, exact, other, bound in zip(*(v.tolist() for v in list(vars(found).values())[:4])):
        x, y = (unit(clouds.z[int(level)][t].numpy()) for t in (0, 1))
        assert exact == pytest.approx(apart(x, y), rel=1e-9)
        assert abs(other - exact) <= bound


# --- through depth ----------------------------------------------------------------------------------------------


def uniform_by_hand(model, ids: Tensor) -> list[Tensor]:
    """BERT with uniform attention in every layer, part by part: the states before every block and after the last."""
    x = model.embeddings(ids[None])[0]
    states = [x]
    for block in model.encoder.layer:
        value = torch.stack([block.attention.self.value(y) for y in x]).mean(0)
        x = block.attention.output.LayerNorm(x + block.attention.output.dense(value))
        x = block.output.LayerNorm(x + block.output.dense(block.intermediate(x)))
        states.append(x)
    return states


def test_a_null_through_depth_is_the_encoder_computed_by_hand(model, clouds, laid):
    bert, tokenizer = model
    with torch.no_grad():
        scored = laid.score(by_null("uniform", clouds, torch.Generator()))
        by_hand = [uniform_by_hand(bert, torch.tensor(tokenizer(text)["input_ids"])) for text in TEXTS]
        true = [
            [h[0] for h in bert(torch.tensor([tokenizer(text)["input_ids"]]), output_hidden_states=True).hidden_states]
            for text in TEXTS
        ]
    between = [np.mean([apart(true[i][l].numpy(), true[(i + 1) % 3][l].numpy()) for i in range(3)]) for l in range(3)]
    assert laid.between.tolist() == pytest.approx(between, rel=1e-9)
    for t in range(3):
        for level in (1, 2):
            w2 = apart(by_hand[t][level].numpy(), true[t][level].numpy()) / between[level]
            assert float(scored.w2[level - 1, t]) == pytest.approx(w2, rel=1e-6)
        a, b = (sum(states[t][-1]) / len(states[t][-1]) for states in (by_hand, true))
        assert float(scored.embedding_cosine[t]) == pytest.approx(float(a @ b / (a.norm() * b.norm())), rel=1e-9)


def test_tokens_of_the_law_alone_have_the_moments_of_the_texts_first_cloud(clouds):
    """A text of 40,000 tokens in the plane; special tokens stay, the rest is drawn with their mean and covariance."""
    generator = torch.Generator().manual_seed(0)
    n = 40_000
    x = (
        torch.randn(n, 2, generator=generator, dtype=torch.float64) @ torch.tensor([[2.0, 1.0], [0.0, 0.5]]).double()
        + 3
    )
    special = torch.zeros(n, dtype=torch.bool)
    special[0] = special[-1] = True
    drawn: list[Tensor] = []

    class Asked(Bench):
        def run(self, predict, start=None):
            assert predict is None
            drawn.append(start(0))
            raise StopIteration

    true = Passes([[x, x]], torch.ones(1, 2).double())
    made = Clouds([], [], [], [], [special], [[]], [0])
    asked = Asked(torch.nn.Identity(), None, None, made, true, torch.ones(2), None, 1.0, 1, "auto")
    with pytest.raises(StopIteration):
        carry_law(asked, generator)
    y = drawn[0]
    assert torch.equal(y[special], x[special])
    words, said = x[~special].numpy(), y[~special].numpy()
    spread = np.cov(words.T, bias=True)
    assert np.abs(said.mean(0) - words.mean(0)).max() < 5 * math.sqrt(spread.max() / n)
    assert np.abs(np.cov(said.T) - spread).max() < 5 * math.sqrt(2 / n) * spread.max()
    assert np.abs(said - words).max() > 1  # other tokens


def test_the_law_alone_is_compared_with_the_text_and_with_the_next_one(laid):
    found = carry_law(laid, torch.Generator().manual_seed(0))
    again = carry_law(laid, torch.Generator().manual_seed(0))
    assert torch.equal(found.w2, again.w2)
    last = [states[-1].numpy() for states in laid.true.states]
    for t in range(3):
        other = last[(t + 1) % 3]
        a, b = last[t].mean(0), other.mean(0)
        assert float(found.another_text_embedding_cosine[t]) == pytest.approx(
            a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-9
        )
        C, D = np.cov(last[t].T, bias=True), np.cov(other.T, bias=True)
        expected = (C * D).sum() / np.linalg.norm(C) / np.linalg.norm(D)
        assert float(found.another_text_covariance_cosine[t]) == pytest.approx(expected, rel=1e-9)
