"""The probe: closures reproduce the reference numbers on MiniLM, nulls lose, results survive saving and kills."""

import math
import sys

import pytest
import torch

from attn_flow.attention import Attention
from attn_flow.hooks.demo import minilm, topics
from attn_flow.measures import Cloud
from attn_flow.probe.closures import SUPPORTS, OwnTokens, agreement, closure, head_space, mixture
from attn_flow.probe.clouds import SHORTEST
from attn_flow.probe.limit_law import layer_matrix
from attn_flow.probe.push import random_twin, rotated
from attn_flow.probe.result import Probe, bootstrap
from attn_flow.probe.run import probe


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [text for text in topics() if len(text) > 900][:4]


@pytest.fixture(scope="module")
def encoder():
    return minilm()


@pytest.fixture(scope="module")
def result(encoder, texts) -> Probe:
    with pytest.warns(UserWarning, match="truncated"):
        return probe(*encoder, texts, max_length=160)


def mean(result: Probe, name: str) -> list[float]:
    return result.interval(name)[0].tolist()


@pytest.mark.parametrize(
    ("support", "cosine"),
    [
        ("hardmax", (0.61, 0.68, 0.60, 0.36, 0.52, 0.49)),
        ("mean", (0.63, 0.40, 0.41, 0.49, 0.55, 0.56)),
        ("saturated", (0.82, 0.60, 0.59, 0.72, 0.77, 0.85)),
        ("mixture", (0.83, 0.67, 0.67, 0.81, 0.83, 0.87)),
    ],
)
def test_reference_cosines_of_minilm(result, support, cosine):
    # Reference: other texts of the same length; texts differ by about .03.
    assert mean(result, f"cosine/{support}") == pytest.approx(cosine, abs=0.06)


def test_theorems_own_setting_predicts_nothing(result):
    assert max(abs(c) for c in mean(result, "cosine/sphere")) < 0.2


def test_closure_reaches_the_goal_in_every_layer(result):
    assert min(mean(result, "cosine/closure")) > 0.8
    assert min(mean(result, "explained/closure")) > 0.4
    assert min(mean(result, "explained/closure")) > max(mean(result, "explained/mixture")) - 0.1


@pytest.mark.parametrize("null", ["rotated", "permuted", "shuffled"])
def test_nulls_lose(result, null):
    low = result.interval("cosine/closure")[1]
    assert bool((low > result.interval(f"null_cosine/{null}")[2]).all())


def test_random_twin_attends_almost_uniformly_and_is_easy(result):
    """An untrained encoder is no null for the closure: its attention is the plain mean, which every closure has."""
    assert min(mean(result, "null_cosine/random")) > 0.9


def test_findings_state_what_is_and_is_not_supported(result):
    words = result.findings()
    assert words[0].startswith("SUPPORTED")
    assert "Above the null in every layer" in words[0]
    assert words[1].startswith("NOT SUPPORTED")
    assert len(words) == 5


def test_heads_and_evolution_are_complete(result):
    for name in ("entropy", "largest", "logit_std", "effective_beta", "self_argmax", "closure", "leading", "gap"):
        value = result.numbers[f"head/{name}"]
        assert value.shape == (6, 12)
        assert bool(torch.isfinite(value).all())
    assert result.numbers["evolution/cosine"].shape == (7, 4)
    assert torch.allclose(result.numbers["evolution/histogram"].sum(-1), torch.ones(7, dtype=torch.float64))
    assert len(result.about["limit_cases"]) == 6


def test_save_load_round_trip(result, tmp_path):
    result.save(tmp_path)
    again = Probe.load(tmp_path)
    assert again.findings() == result.findings()
    assert all(torch.equal(again.numbers[name], value) for name, value in result.numbers.items())
    assert set(result.to_pandas().columns) >= {"quantity", "layer", "mean", "low", "high"}


def test_parts_continue_after_a_kill(encoder, texts, tmp_path, monkeypatch):
    options = {"max_length": 40, "nulls": [], "supports": ["mean", "closure"], "parts": tmp_path}
    module = sys.modules["attn_flow.probe.run"]  # the name attn_flow.hooks.probe is the function

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "head_regimes", killed)
        with pytest.raises(KeyboardInterrupt):
            probe(*encoder, texts[:2], **options)
    assert (tmp_path / "support_closure.safetensors").exists()
    with monkeypatch.context() as patch:
        patch.setattr(module, "support_agreement", killed)  # would raise if it were computed again
        first = probe(*encoder, texts[:2], **options)
    fresh = probe(*encoder, texts[:2], **{**options, "parts": None})
    assert all(torch.equal(first.numbers[name], value) for name, value in fresh.numbers.items())


def test_colder_model_is_probed_with_its_own_temperature(encoder, texts):
    """At beta = 0 attention is the plain mean, whatever the weights."""
    result = probe(*encoder, texts[:2], max_length=40, nulls=[], supports=["mean"], beta_factor=0.0)
    assert min(mean(result, "cosine/mean")) > 0.9999
    assert float(result.numbers["head/entropy"].min()) > 0.9999


def test_model_is_left_as_found(encoder, texts):
    model, _ = encoder
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    probe(*encoder, texts[:1], max_length=40, nulls=["random"], supports=["mean"])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


# --- closures by themselves -------------------------------------------------------------------------------------


def small(n: int = 40, d: int = 8, heads: int = 2) -> tuple[Attention, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    A = Attention.random(d, heads, 3, beta=0.7, generator=generator, dtype=torch.float64)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    special = torch.zeros(n, dtype=torch.bool)
    special[0] = special[-1] = True
    return A, x, special


def test_head_space_with_the_cloud_itself_is_attention():
    A, x, special = small()
    space = head_space(A, x, special)
    assert torch.allclose(space.drift(Cloud(space.y)), A.drift(x), atol=1e-12)


def test_mixture_of_atoms_alone_is_attention():
    """With all tokens but two as atoms, and those two identical, nothing is left to approximate."""
    A, x, special = small(n=12)
    x[5] = x[6]
    special = torch.ones(12, dtype=torch.bool)
    special[5] = special[6] = False
    space = head_space(A, x, special)
    assert torch.allclose(space.drift(mixture(space, window=())), A.drift(x), atol=1e-12)


def test_mixture_counts_masses_literally():
    A, x, special = small(n=20)
    space = head_space(A, x, special)
    mu = mixture(space, window=(-1, 0, 1), cap=math.inf)
    predicted = space.per_head(mu)
    k = A.Q.shape[-2]
    for h in range(A.heads):
        y, g = space.y[h], space.g[h] * A.beta[h]
        bulk = y[~special]
        m, S = bulk.mean(0), torch.cov(bulk.T, correction=0)
        for i in range(20):
            logits, values = [], []
            for j in (0, 19):
                logits.append(g[i] @ y[j])
                values.append(y[j])
            for j in (i - 1, i, i + 1):
                if 0 < j < 19:
                    logits.append(g[i] @ y[j])
                    values.append(y[j])
            logits.append(math.log(18) + g[i] @ m + g[i] @ S @ g[i] / 2)
            values.append(m + S @ g[i])
            p = torch.stack(logits).softmax(0)
            literal = (p[:, None] * torch.stack(values)).sum(0)[k:]
            assert torch.allclose(predicted[h, i], literal, atol=1e-10)


def test_own_tokens_mean_is_the_gradient_of_its_log_partition():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 4, generator=generator, dtype=torch.float64)
    seen = torch.ones(5, 3, dtype=torch.bool)
    seen[0, 0] = False
    mu = OwnTokens(x, seen)
    g = torch.randn(5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    for beta in (0.5, 3.0, math.inf):
        (gradient,) = torch.autograd.grad(mu.log_partition(g, beta).sum(), g)
        assert torch.allclose(gradient, mu.tilted_mean(g, beta), atol=1e-12)


def test_rotation_keeps_the_spectrum_of_G():
    A, _, _ = small()
    B = rotated(A, torch.Generator().manual_seed(3))
    for h in range(A.heads):
        before, after = (torch.linalg.eigvals(M.G[h]).abs().sort().values for M in (A, B))
        assert torch.allclose(before, after, atol=1e-10)
    assert not torch.allclose(A.G, B.G)


def test_layer_matrix_is_the_linear_part_of_the_gaussian_closure():
    from attn_flow.measures import Gaussian

    A, x, _ = small()
    mu = Gaussian.fit(Cloud(x), shrinkage=0.0)
    M = layer_matrix(A, mu.cov)
    assert torch.allclose(A.drift(x, mu) - A.drift(0 * x, mu), x @ M.T, atol=1e-10)


def test_agreement_of_the_computed_with_itself_and_with_its_mean():
    x = torch.randn(30, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert agreement(x, x) == pytest.approx((1.0, 1.0))
    assert agreement(x.mean(0).expand_as(x), x)[1] == pytest.approx(0.0)


def test_bootstrap_covers_the_mean():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(200, 40, generator=generator, dtype=torch.float64)
    _, low, high = bootstrap(values, seed=0)
    covered = ((low < 0) & (high > 0)).double().mean()
    assert 0.88 < float(covered) < 0.98


def test_every_support_runs_on_a_random_attention():
    A, x, special = small()
    space = head_space(A, x, special)
    for _, predict in SUPPORTS.values():
        assert predict(space).shape == x.shape


# --- bad input --------------------------------------------------------------------------------------------------


def test_short_texts_are_an_error_when_nothing_is_left(encoder):
    with pytest.raises(ValueError, match=rf"no text has {SHORTEST} tokens"):
        probe(*encoder, ["two words"], nulls=[])


def test_unknown_names_are_named(encoder, texts):
    with pytest.raises(ValueError, match=r"nulls has \['rotten'\], expected some of rotated, permuted"):
        probe(*encoder, texts, nulls=["rotten"])
    with pytest.raises(ValueError, match="supports has"):
        probe(*encoder, texts, supports=["disc"])


def test_a_text_of_atoms_only_says_so():
    A, x, _ = small(n=6)
    special = torch.tensor([True, True, True, True, True, False])
    with pytest.raises(ValueError, match="leaves no bulk"):
        closure(head_space(A, x, special))


def test_random_twin_has_the_same_shape_and_other_weights(encoder):
    model, _ = encoder
    twin = random_twin(model, seed=0)
    ours, theirs = dict(model.named_parameters()), dict(twin.named_parameters())
    assert ours.keys() == theirs.keys()
    name = "encoder.layer.0.attention.self.query.weight"
    assert not torch.allclose(ours[name], theirs[name])
