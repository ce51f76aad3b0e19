"""What a reader of a probe sees, its table, sentences, figures and page, against the numbers it is made of.

The numbers are drawn at random, so that no two of them are alike; no encoder runs.
"""

import base64
import html
import json
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attn_flow.probe import Probe, figures, page
from attn_flow.probe.agreement import Agreement
from attn_flow.probe.evolution import BETAS, Evolution, View
from attn_flow.probe.findings import Finding, bootstrap
from attn_flow.probe.heads import HeadRegimes
from attn_flow.probe.law_alone import LawAlone
from attn_flow.probe.limit_law import CASES, LimitLaw
from attn_flow.probe.propagation import Propagated
from attn_flow.probe.reading import Reading
from attn_flow.probe.transports import TransportCheck

L, T, H = 3, 5, 2  # layers, texts, heads
CLOSURES = ("gaussian_closure", "quantised_closure", "quantised_window_closure", "cross_fitted_closure", "sphere")
CONTROLS = ("text_mean_closure", "random_clusters_closure")
NULLS = ("mean_output", "uniform", "rotated", "untrained")
LENGTHS = (4, 7)


@pytest.fixture(scope="module")
def made() -> Probe:
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.rand(shape, generator=generator, dtype=torch.float64)
    agreement = lambda: Agreement(*(random(L, T) for _ in range(3)))
    through = lambda: Propagated(random(L, T), random(T), (random(T) > 0.5).double(), random())
    per_text = {name: 0.3 + random(L, T) for name in ("real", "if_held", "real_rotated")}
    per_text |= {z: random(L, T) for z in ("cosine", "cosine_without_c", "block_cosine", "size_of_Mx", "size_of_c")}
    words = lambda names: {name: f"the {name}" for name in names}
    check = lambda layer: {"omits": "rotary" if layer else "", "omitted_logit_variance": 0.1 * layer, "places": ""}
    about = {
        "encoder": {
            "model": "made",
            "layers": L,
            "heads": H,
            "dim": 6,
            "architecture": "none",
            "omits": ["rotary"],
        },
        "texts": T,
        "tokens": 99,
        "seed": 3,
        "main_closure": "quantised_closure",
        "closures": words(CLOSURES),
        "controls": words(CONTROLS),
        "nulls": words(NULLS),
        "costs": {name: {"numbers": 10.0 * i + 7.4, "own_tokens": i} for i, name in enumerate(CLOSURES)},
        "self_check": [check(layer) for layer in range(L)],
        "unknown_token_share": 0.025,
        "transport": "exact",
        "order": {},
    }
    heads = {z.name: random(L, H) for z in fields(HeadRegimes)} | {
        "case": torch.randint(6, (L, H), generator=generator)
    }
    cloud = {name: random(L + 1, T) for name in ("pairwise_cosine", "effective_rank", "clusters", "merges", "splits")}
    return Probe(
        about,
        {name: agreement() for name in (*CLOSURES, *CONTROLS)},
        {name: agreement() for name in NULLS},
        {name: through() for name in (*CLOSURES[:3], *CONTROLS, "uniform", "rotated")},
        LawAlone(random(L, T), *(random(T) for _ in range(4))),
        LimitLaw(
            **per_text,
            stability=random(L),
            case=torch.tensor([0.0, 1.0, 0.0]),
            dimension=random(L),
            gap=random(L),
        ),
        HeadRegimes(**heads),
        Evolution(
            **cloud,
            log_energy=random(len(BETAS), L + 1, T),
            histogram=random(L + 1, 8),
            edges=torch.linspace(-1, 1, 9, dtype=torch.float64),
        ),
        View(random(L + 1, 5, 3).float() - 0.5, torch.tensor([0, 0, 1, 1, 1]), torch.tensor([1, 3, 0, 2, 6])),
        Reading(
            random(L, sum(LENGTHS)).float(),
            random(L, sum(LENGTHS)).float(),
            torch.tensor(LENGTHS),
            random(L, H, 4, 4).float(),
            random(L, H, 4, 4).float(),
        ),
        TransportCheck(*(random(3) for _ in range(6))),
        [["[CLS]", "word", "##ed", "."], ["a", "b", "c", "d", "e", "f", "g"], ["x"]],
    )


@pytest.fixture(autouse=True)
def figures_closed():
    from matplotlib import pyplot

    yield
    pyplot.close("all")


def mean_of(values: Tensor) -> list[float]:
    return values.mean(-1).reshape(-1).tolist()


def test_every_number_of_the_table_is_the_one_of_its_name_and_layer(made):
    table: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in made.rows():
        table.setdefault((row["group"], row["quantity"]), []).append(row)
    expected: dict[tuple[str, str], tuple[Tensor, int]] = {}
    for group, found in (("closure", made.closures), ("null", made.nulls)):
        for name, agreement in found.items():
            for measure in ("explained", "centred_cosine", "cosine"):
                expected[group, f"{name}: {measure}"] = getattr(agreement, measure), 0
    quantised = made.closures["quantised_closure"].explained
    expected["ladder", "gaussian_closure: gain"] = (
        made.closures["gaussian_closure"].explained,
        0,
    )  # over the mean output
    expected["ladder", "quantised_window_closure: gain"] = (
        made.closures["quantised_window_closure"].explained - quantised,
        0,
    )
    for name, through in made.propagation.items():
        expected["through depth", f"{name}: w2"] = through.w2, 1
    expected["law alone", "w2"] = made.law_alone.w2, 1
    expected["left out", "share of the logits' variance"] = torch.tensor([0.0, 0.1, 0.2], dtype=torch.float64), 0
    for name, value in vars(made.limits).items():
        if name != "case":
            expected["limit law", name] = value, 0
    for name in ("pairwise_cosine", "effective_rank", "clusters", "merges", "splits"):
        expected["cloud", name] = getattr(made.evolution, name), 0
    for i, beta in enumerate(BETAS):
        expected["cloud", f"log_energy, beta {beta:g}"] = made.evolution.log_energy[i], 0
    for where, (values, first) in expected.items():
        rows = table.pop(where)
        assert [row["layer"] for row in rows] == list(range(first, first + len(values))), where
        means = mean_of(values) if values.ndim == 2 else values.tolist()
        assert [row["mean"] for row in rows] == pytest.approx(means, rel=1e-12), where
        if values.ndim == 2:
            seen = bootstrap(values, seed=3)
            assert [row["low"] for row in rows] == pytest.approx(seen.low.tolist(), rel=1e-12)
            assert [row["high"] for row in rows] == pytest.approx(seen.high.tolist(), rel=1e-12)
        else:
            assert "low" not in rows[0]
    assert {group for group, _ in table} == {"heads"}
    assert {name for _, name in table} == {z.name for z in fields(HeadRegimes)} - {"case"}
    for (_, name), rows in table.items():
        for row in rows:
            assert row["mean"] == float(getattr(made.heads, name)[row["layer"], row["head"]])
        assert len(rows) == L * H


def test_the_json_says_the_same_numbers(made):
    words = json.loads(json.dumps(made.as_json()))
    agreements = {**made.closures, **made.nulls}
    for layer, row in enumerate(words["layers"]):
        assert row["layer"] == layer
        for measure in ("explained", "centred_cosine", "cosine"):
            for name, agreement in agreements.items():
                assert row[measure][name] == pytest.approx(float(getattr(agreement, measure)[layer].mean()))
        for name, agreement in agreements.items():
            seen = bootstrap(agreement.explained, seed=3)
            assert row["explained_interval"][name] == pytest.approx([float(seen.low[layer]), float(seen.high[layer])])
        before, after = (made.closures[f"quantised{z}_closure"].explained[layer].mean() for z in ("", "_window"))
        assert row["gain"]["quantised_window_closure"] == pytest.approx(float(after - before))
    assert len(words["layers"]) == L
    for name, p in made.propagation.items():
        row = words["propagation"][name]
        seen, cosine = bootstrap(p.w2, seed=3), bootstrap(p.embedding_cosine, seed=3)
        assert row["w2"] == pytest.approx(mean_of(p.w2))
        assert row["w2_interval"] == [pytest.approx(seen.low.tolist()), pytest.approx(seen.high.tolist())]
        assert row["embedding_cosine"] == pytest.approx(float(p.embedding_cosine.mean()))
        assert row["embedding_cosine_interval"] == pytest.approx([float(cosine.low), float(cosine.high)])
        assert row["neighbour_agreement"] == pytest.approx(float(p.neighbour_agreement.mean()))
        spread = np.std(p.neighbour_agreement.numpy(), ddof=1) / T**0.5
        assert row["neighbour_agreement_error"] == pytest.approx(spread)
        assert row["rank_correlation"] == float(p.rank_correlation)
    assert len(words["transports"]) == 3
    assert words["transports"][1] == {z: pytest.approx(float(v[1])) for z, v in vars(made.transports).items()}


def layered(values: Tensor) -> str:
    return " ".join(f"{v:.2f}".replace("0.", ".", 1) if abs(v) < 1 else f"{v:.2f}" for v in values.tolist())


def ends(values: Tensor) -> str:
    return f"{float(values.min()):.2f} to {float(values.max()):.2f}"


def interval_of(values: Tensor) -> str:
    seen = bootstrap(values, seed=3)
    return f"{float(seen.mean):.3f} ({float(seen.low):.3f} to {float(seen.high):.3f})"


def test_every_sentence_carries_its_own_numbers(made):
    depth, layers, theorem, limit, law, heads, cloud = (f.text for f in made.findings())
    main = made.propagation["quantised_closure"]
    best = max(("uniform", "rotated"), key=lambda n: float(made.propagation[n].embedding_cosine.mean()))
    for words in (
        "(17 numbers a head that all tokens share, 1 tokens of one's own)",
        f"cosine {interval_of(main.embedding_cosine)} to its own",
        f"clouds {layered(main.w2.mean(-1))} of the distance",
        "levels 1 to 3",
        f"the best null (the {best}) reaches {interval_of(made.propagation[best].embedding_cosine)}",
        f"control, the text_mean_closure: {interval_of(made.propagation['text_mean_closure'].embedding_cosine)}",
        f"with 2 exact neighbours {interval_of(made.propagation['quantised_window_closure'].embedding_cosine)}",
        f"W2 {layered(made.propagation['quantised_window_closure'].w2.mean(-1))}",
        f"the same for {float(main.neighbour_agreement.mean()):.2f} +- "
        f"{float(main.neighbour_agreement.std()) / T**0.5:.2f} of texts",
    ):
        assert words in depth
    explained = {**{n: made.nulls[n] for n in ("uniform", "rotated")}, **{n: made.closures[n] for n in CONTROLS}}
    strongest = max(explained, key=lambda n: float(explained[n].explained.mean()))
    for words in (
        f"explains {layered(made.closures['quantised_closure'].explained.mean(-1))} of the",
        f"(the {strongest}) explains {layered(explained[strongest].explained.mean(-1))}",
        f"they explain {layered(made.closures['cross_fitted_closure'].explained.mean(-1))}",
        f"is explained {layered(made.nulls['untrained'].explained.mean(-1))} with a raw cosine of "
        f"{ends(made.nulls['untrained'].cosine.mean(-1))}",
        "Left out of every closure, rotary: .00 .10 .20 of the variance of the logits",
    ):
        assert words in layers
    assert f"explains {layered(made.closures['sphere'].explained.mean(-1))} of the variance" in theorem
    assert f"centred cosine {ends(made.closures['sphere'].centred_cosine.mean(-1))}" in theorem
    assert "R^6" in theorem
    way = (1 - made.limits.real.mean(-1)) / (1 - made.limits.if_held.mean(-1))
    for words in (
        f"its cloud {layered(way)} of the way",
        f"cosine {ends(made.limits.cosine.mean(-1))} with M x + c and {ends(made.limits.cosine_without_c.mean(-1))}",
        f"overlaps by {ends(made.limits.stability)}",
    ):
        assert words in limit
    alone = made.law_alone
    assert (
        f"cosine {interval_of(alone.embedding_cosine)}, against {interval_of(alone.another_text_embedding_cosine)}"
        in law
    )
    assert (
        f"cosine {interval_of(alone.covariance_cosine)}, against {interval_of(alone.another_text_covariance_cosine)}"
        in law
    )
    flat = made.heads.explained.flatten().tolist()
    worst, top = flat.index(min(flat)), flat.index(max(flat))
    for words in (
        f"entropy {ends(made.heads.entropy)} of log n",
        f"largest weight of {ends(made.heads.largest_weight)}",
        f"more than half of {sum(v > 0.5 for v in flat)} of 6 heads",
        f"best head {top % H} of layer {top // H} ({max(flat):.2f})",
        f"worst head {worst % H} of layer {worst // H} ({min(flat):.2f})",
    ):
        assert words in heads
    e = made.evolution
    cosine, rank = e.pairwise_cosine.mean(-1), e.effective_rank.mean(-1)
    assert ("concentrates" in cloud) == (cosine[-1] > cosine[0])
    assert f"from {cosine[0]:.2f} at the input to {cosine[-1]:.2f} at the output" in cloud
    assert f"effective rank from {rank[0]:.0f} to {rank[-1]:.0f}" in cloud
    assert f"{e.merges.sum(0).mean():.1f} merges and {e.splits.sum(0).mean():.1f} splits" in cloud


def test_the_answer_in_three_sentences(made):
    first, second, third = made.answer()
    rivals = {n: float(made.propagation[n].embedding_cosine.mean()) for n in (*CONTROLS, "uniform", "rotated")}
    best = max(rivals, key=rivals.__getitem__)
    assert "a law of 17 numbers a head" in first
    assert f"cosine {float(made.propagation['quantised_closure'].embedding_cosine.mean()):.3f} (the best null" in first
    assert f"the {best}: {rivals[best]:.2f})" in first
    assert f"explains {ends(made.closures['quantised_closure'].explained.mean(-1))} of the variance" in second
    assert f"and {ends(made.closures['cross_fitted_closure'].explained.mean(-1))} for queries" in second
    assert f"goes {ends((1 - made.limits.real.mean(-1)) / (1 - made.limits.if_held.mean(-1)))} of the way" in third


# --- figures --------------------------------------------------------------------------------------------------------


def drawn(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    """label -> x and y of every labelled line."""
    return {
        str(line.get_label()): (list(map(float, line.get_xdata())), list(map(float, line.get_ydata())))
        for line in axes.get_lines()
        if not str(line.get_label()).startswith("_")
    }


def bands(axes: Any) -> list[tuple[float, float]]:
    """Lowest and highest y of every band."""
    spans = [c.get_paths()[0].vertices[:, 1] for c in axes.collections]
    return [(float(v.min()), float(v.max())) for v in spans]


def titled(made: Probe, name: str) -> str:
    if name not in made.about["costs"]:
        return f"the {name}"
    cost = made.about["costs"][name]
    return f"the {name} ({cost['numbers']:.0f} + {cost['own_tokens']})"


def rows_of_dots(axes: Any) -> dict[str, float]:
    labels = [z.get_text() for z in axes.get_yticklabels()]
    points = {float(l.get_ydata()[0]): float(l.get_xdata()[0]) for l in axes.get_lines() if len(l.get_xdata()) == 1}
    return {labels[round(y)]: x for y, x in points.items()}


def test_the_figure_through_depth_draws_its_numbers(made):
    figure = made.plot()
    a, b = figure.axes[:2]
    lines = drawn(a)
    for name, p in made.propagation.items():
        x, y = lines[titled(made, name)]
        assert x == [1, 2, 3]
        assert y == pytest.approx(mean_of(p.w2))
    seen = [bootstrap(p.w2, seed=3) for p in made.propagation.values()]
    assert bands(a) == [pytest.approx((float(s.low.min()), float(s.high.max()))) for s in seen]
    dots = rows_of_dots(b)
    expected = {titled(made, n): float(p.embedding_cosine.mean()) for n, p in made.propagation.items()}
    assert dots == {n: pytest.approx(v) for n, v in expected.items()}
    order = [z.get_text() for z in b.get_yticklabels()]
    assert order == sorted(expected, key=expected.__getitem__)  # the best on top


def test_the_figure_of_the_ladder_draws_its_numbers(made):
    a, b = figures.ladder_figure(made).axes[:2]
    lines = drawn(a)
    shown = [name for name in made.closures if name in figures.COLOURS]
    assert set(lines) == {titled(made, name) for name in shown}
    for name in shown:
        x, y = lines[titled(made, name)]
        assert x == [0, 1, 2]
        assert y == pytest.approx(mean_of(made.closures[name].explained))
    gains = {z.get_text() for z in b.texts}
    assert gains == {f"{float(gain.mean()):+.2f}" for gain in made.gains().values()}
    every = {n: made.closures[n] for n in (*shown, *CONTROLS)} | made.nulls
    assert rows_of_dots(b) == {titled(made, n): pytest.approx(float(g.explained.mean())) for n, g in every.items()}


def test_the_figure_of_the_limit_draws_its_numbers(made):
    a, b, c = figures.limit_figure(made).axes[:3]
    limits = made.limits
    expected = {
        "the layer": limits.real,
        "if theory held": limits.if_held,
        "to the limit of a rotated G": limits.real_rotated,
    }
    assert {n: y for n, (_, y) in drawn(a).items()} == {n: pytest.approx(mean_of(v)) for n, v in expected.items()}
    unit = 1 - limits.if_held.mean(-1)
    way = {
        "the layer": (1 - limits.real.mean(-1)) / unit,
        "to the limit of a rotated G": (1 - limits.real_rotated.mean(-1)) / unit,
    }
    assert {n: y for n, (_, y) in drawn(b).items()} == {n: pytest.approx(v.tolist()) for n, v in way.items()}
    cosines = {
        "attention with M x + c": mean_of(limits.cosine),
        "attention with M x": mean_of(limits.cosine_without_c),
        "whole block with M x + c": mean_of(limits.block_cosine),
        "E of two halves: overlap": limits.stability.tolist(),
    }
    assert {n: y for n, (_, y) in drawn(c).items()} == {n: pytest.approx(v) for n, v in cosines.items()}
    assert figures._cases(made) == "2 fixed, 1 rotating."


def test_the_figure_of_the_heads_draws_its_numbers(made):
    axes = figures.heads_figure(made).axes
    for panel, (name, (title, _)) in zip(axes, figures.HEAD_MAPS.items()):
        value = getattr(made.heads, name).numpy()
        assert panel.get_title(loc="left") == title
        np.testing.assert_array_equal(panel.images[0].get_array(), value)
        assert panel.images[0].get_clim() == pytest.approx(np.quantile(value, (0.05, 0.95)))


def test_the_figure_of_the_cloud_draws_its_numbers(made):
    a, b, c, d = figures.evolution_figure(made).axes
    e = made.evolution
    for level in range(L + 1):
        x, y = drawn(a)[str(level)]
        assert x == pytest.approx((np.arange(8) - 3.5) / 4)
        assert y == pytest.approx((e.histogram[level] * 4).tolist())
    for i, beta in enumerate(BETAS):
        energy = e.log_energy[i].mean(-1)
        x, y = drawn(b)[rf"$\beta$ = {beta:g}"]
        assert x == [0, 1, 2, 3]
        assert y == pytest.approx((energy - energy[0]).tolist(), abs=1e-12)
    for axes, values in ((c, e.effective_rank), (d, e.clusters)):
        (line,) = axes.get_lines()
        assert line.get_ydata() == pytest.approx(mean_of(values))


def test_models_side_by_side_are_drawn_each_with_its_own_numbers(made):
    a, b, c, d = figures.comparison_figure({"one": made}).axes
    for axes, values, first in (
        (a, made.propagation["quantised_closure"].w2, 1),
        (b, made.closures["quantised_closure"].explained, 0),
        (c, made.evolution.pairwise_cosine, 0),
        (d, made.evolution.effective_rank, 0),
    ):
        x, y = drawn(axes)["one"]
        assert x == list(range(first, first + len(values)))
        assert y == pytest.approx(mean_of(values))


def test_spectra_are_drawn_layer_by_layer():
    head = lambda layer, h: {"layer": layer, "head": h, "real": [layer + 0.1 * h, 2.0], "imaginary": [h, -1.0]}
    found = {"layers": 5, "heads": [head(layer, h) for layer in range(5) for h in range(H)]}
    figure = figures.spectra_figure(found, "made")
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in shown] == [f"layer {i}" for i in range(5)]
    assert len(figure.axes) == 8
    for layer, axes in enumerate(shown):
        points = [(list(l.get_xdata()), list(l.get_ydata())) for l in axes.get_lines()[:H]]
        assert points == [([layer + 0.1 * h, 2.0], [h, -1.0]) for h in range(H)]
        assert axes.get_ylabel() == ("Im" if layer in (0, 4) else "")


@pytest.mark.parametrize(
    ("values", "expected"),
    [([0.2], (-1, 1.5)), ([-2.0, 3.0], (-2.1, 3.1)), ([-9.0, 9.0], (-3, 4)), ([float("nan")], (-1, 1.5))],
)
def test_limits_of_an_axis_hold_what_is_usual(values, expected):
    assert figures._robust(torch.tensor(values), (-1, 1.5)) == pytest.approx(expected)


# --- the page -------------------------------------------------------------------------------------------------------


def test_the_data_of_the_page_are_the_numbers(made):
    found = page._data(made)
    assert (found["layers"], found["heads"]) == (L, H)
    assert [len(text["tokens"]) for text in found["texts"]] == list(LENGTHS)
    missed = made.reading.missed.tolist()
    assert found["texts"][1]["missed"] == [[round(v, 4) for v in row[4:11]] for row in missed]
    assert found["explained"] == [[round(v, 3) for v in row] for row in made.heads.explained.tolist()]
    assert found["rows"]["n"] == 4
    code = np.frombuffer(base64.b64decode(found["rows"]["true"]), dtype=np.uint8).reshape(L, H, 4, 4)
    np.testing.assert_allclose((code / 255.0) ** 2, made.reading.true_rows.numpy(), atol=1 / 255)
    other = np.frombuffer(base64.b64decode(found["rows"]["closure"]), dtype=np.uint8).reshape(L, H, 4, 4)
    np.testing.assert_allclose((other / 255.0) ** 2, made.reading.closure_rows.numpy(), atol=1 / 255)
    table = [row for row in made.rows() if "head" not in row]
    assert [row["mean"] for row in found["table"]] == [float(f"{row['mean']:.3g}") for row in table]
    assert [row["layer"] for row in found["table"]] == [row["layer"] for row in table]
    named = {row["quantity"] for row in found["table"]}
    assert {"the rotated: explained", "the uniform: W2 over W2 between texts", "effective rank"} <= named


def test_the_page_says_what_was_probed_and_compared(made):
    text = page._page(made, dict.fromkeys(page.FIGURES, b""), "made")
    assert "none, 3 layers of 2 heads, d = 6; 5 texts, 99 tokens, 2.5% unknown; left out by theory: rotary" in text
    assert "(positions hold 0.00 to 0.20 of the variance of the logits)" in text
    seen = made.transports
    for i in range(3):
        row = [float(v[i]) for v in vars(seen).values()]
        cells = [
            f"{int(row[0])}",
            f"{row[1]:.4f}",
            f"{row[2]:.4f}",
            f"{abs(row[2] / row[1] - 1):.1%}",
            f"{row[3]:.4f}",
            f"{1000 * row[4]:.0f}",
            f"{1000 * row[5]:.0f}",
        ]
        assert "<tr>" + "".join(f"<td>{z}</td>" for z in cells) + "</tr>" in text
    assert all(f"{name}.png" in text for name in page.FIGURES)
    shown = [text.index(f'<img alt="{html.escape(question)}"') for _, question, _ in page.FIGURES.values()]
    assert text.count("<img alt=") == len(set(shown)) == len(page.FIGURES)  # each once
    first = [text.index(f'<img alt="{html.escape(page.FIGURES[name][1])}"') for name in page.FIRST]
    assert max(first) < text.index('id="findings"') < min(place for place in shown if place not in first)


def test_the_scene_has_every_token_at_every_level(made):
    scene = json.loads(page._scene(made))
    names = ["word", ".", "a", "c", "g"]
    assert [frame["name"] for frame in scene["frames"]] == ["0", "1", "2", "3"]
    assert [trace["name"] for trace in scene["data"]] == ["words", "punctuation and special"]
    for level, frame in enumerate(scene["frames"]):
        for trace, chosen in zip(frame["data"], ([0, 2, 3, 4], [1])):
            assert [z.split("<br>")[0] for z in trace["hovertext"]] == [names[i] for i in chosen]
            for axis, letter in enumerate("xyz"):
                values = trace[letter]
                if isinstance(values, dict):  # plotly's packed arrays
                    values = np.frombuffer(base64.b64decode(values["bdata"]), dtype=values["dtype"])
                np.testing.assert_allclose(values, made.view.x[level][chosen, axis].numpy(), rtol=1e-6)
    assert scene["data"][0]["hovertext"][0] == "word<br>text 0, place 1"
    bound = 1.05 * float(made.view.x.abs().max())
    assert scene["layout"]["scene"]["zaxis"]["range"] == pytest.approx([-bound, bound])


@pytest.mark.parametrize(
    ("token", "kind"),
    [
        ("##ing", "pieces of words"),
        ("Ġword", "words"),
        ("▁", "punctuation and special"),
        ("[CLS]", "punctuation and special"),
        (",", "punctuation and special"),
        ("a1", "words"),
    ],
)
def test_kinds_of_tokens(token, kind):
    assert page._kind(token) == kind


def test_numbers_of_the_page_are_short_and_finite():
    assert page._short(0.123456) == 0.123
    assert [page._short(v) for v in (float("nan"), float("inf"), -float("inf"))] == ["nan", "inf", "-inf"]


def test_cases_are_named(made):
    assert made.limits.cases == ["fixed", "rotating", "fixed"]
    assert made.heads.cases == [[CASES[int(c)] for c in row] for row in made.heads.case]


# --- what is not there, or out of sight -------------------------------------------------------------------------------


def with_about(made: Probe, **changes: Any) -> Probe:
    return replace(made, about={**made.about, **changes})


def first_text(part: Any) -> Any:
    return replace(part, **{name: value[..., :1] if value.ndim else value for name, value in vars(part).items()})


def test_one_text_is_shown_without_intervals(made):
    each = {name: {n: first_text(p) for n, p in getattr(made, name).items()} for name in ("closures", "nulls")}
    alone = replace(
        made,
        **each,
        propagation={n: first_text(p) for n, p in made.propagation.items()},
        law_alone=first_text(made.law_alone),
    )
    depth, layers, *_ = alone.findings()
    assert depth.verdict is None
    assert layers.verdict is None
    cosine = float(alone.propagation["quantised_closure"].embedding_cosine)
    assert f"cosine {cosine:.3f} to its own" in depth.text
    figure = alone.plot()
    assert not bands(figure.axes[0])
    assert rows_of_dots(figure.axes[1])[titled(made, "quantised_closure")] == pytest.approx(cosine)
    assert all(len(line.get_xdata()) == 1 for line in figure.axes[1].get_lines())
    at = {z.get_text(): z.xy[0] for z in figures.ladder_figure(alone).axes[1].texts}
    gain = float(alone.gains()["gaussian_closure"].mean())
    assert at[f"{gain:+.2f}"] == pytest.approx(float(alone.closures["gaussian_closure"].explained.mean()))


def test_sentences_without_nulls_controls_or_more_closures(made):
    bare = replace(
        with_about(made, nulls={}, controls={}),
        nulls={},
        closures={n: made.closures[n] for n in ("quantised_closure", "sphere")},
        propagation={"quantised_closure": made.propagation["quantised_closure"]},
    )
    depth, layers, *_ = bare.findings()
    assert depth.verdict is layers.verdict is None
    for words in ("best null", "control,", "exact neighbours"):
        assert words not in depth.text
    for words in ("above every null", "strongest null", "untrained", "for queries by which"):
        assert words not in layers.text
    assert "without nulls there is no verdict" in layers.text
    first, second, _ = bare.answer()
    assert "best null or control" not in first
    assert "were not found" not in second
    assert bare.gains().keys() == set()


def test_what_is_left_out_and_what_is_inside(made):
    check = {"omits": "", "omitted_logit_variance": 0.0, "places": "rotary"}
    inside = with_about(made, self_check=[check, {**check, "places": ""}, check])
    assert inside.omitted is None
    assert inside.omitted_words == ""
    assert inside.inside_words == "rotary"
    assert "inside the closures are rotary" in inside.findings()[1].text
    assert "Left out of every closure" not in inside.findings()[1].text
    assert "inside the closures" not in made.findings()[1].text
    assert not [row for row in inside.rows() if row["group"] == "left out"]
    images = dict.fromkeys(page.FIGURES, b"")
    assert "(closures hold the rotary)" in page._page(inside, images, "made")
    assert "closures hold" not in page._page(made, images, "made")


def test_nulls_beyond_the_edge_are_drawn_at_it(made):
    low = replace(made.nulls["uniform"], explained=made.nulls["uniform"].explained - 9)
    deep = replace(made.closures["gaussian_closure"], explained=made.closures["gaussian_closure"].explained - 7)
    far = replace(made, nulls={**made.nulls, "uniform": low}, closures={**made.closures, "gaussian_closure": deep})
    a, b = figures.ladder_figure(far).axes[:2]
    assert rows_of_dots(b)["the uniform"] == -1
    assert rows_of_dots(b)[titled(made, "gaussian_closure")] == -1
    assert a.get_ylim()[0] == -1
    gain = float(far.gains()["gaussian_closure"].mean())
    assert {z.get_text(): z.xy[0] for z in b.texts}[f"{gain:+.2f}"] == -1
    a, b = figures.ladder_figure(made).axes[:2]
    shown = [made.closures[n] for n in made.closures if n in figures.COLOURS]
    lowest = min(float(one.explained.mean(-1).min()) for one in shown)
    assert a.get_ylim()[0] == pytest.approx(lowest - 0.05)
    seen = bootstrap(made.closures["gaussian_closure"].explained.mean(0), seed=3)
    gain = float(made.gains()["gaussian_closure"].mean())
    words = {z.get_text(): z.xy for z in b.texts}
    order = [z.get_text() for z in b.get_yticklabels()]
    assert words[f"{gain:+.2f}"] == pytest.approx((float(seen.low), order.index(titled(made, "gaussian_closure"))))
    level = [l for l in b.get_lines() if len(l.get_xdata()) == 2 and len(set(l.get_ydata())) == 1]
    spans = {float(l.get_ydata()[0]): list(l.get_xdata()) for l in level}
    assert spans[order.index(titled(made, "gaussian_closure"))] == pytest.approx([float(seen.low), float(seen.high)])


def test_closures_are_coloured_and_nulls_are_marked(made):
    a = made.plot().axes[0]
    lines = {str(line.get_label()): line for line in a.get_lines()}
    for name in made.propagation:
        line = lines[titled(made, name)]
        null = name in figures.NULL_MARKS
        assert line.get_linestyle() == ("--" if null else "-")
        assert line.get_marker() == (figures.NULL_MARKS[name] if null else "o")
        assert line.get_color() == (figures.NULL if null else figures.COLOURS[name])
    a, b, c = figures.limit_figure(made).axes[:3]
    dashed = {str(z.get_label()) for axes in (a, b, c) for z in axes.get_lines() if z.get_linestyle() == "--"}
    assert dashed == {"if theory held", "to the limit of a rotated G"}


def test_the_data_of_the_page_to_their_last_digit(made):
    found = page._data(made)
    received = made.reading.received.tolist()
    assert found["texts"][0]["received"] == [[round(v, 3) for v in row[:4]] for row in received]
    assert found["texts"][1]["received"] == [[round(v, 3) for v in row[4:11]] for row in received]
    assert found["texts"][0]["tokens"] == made.tokens[0]
    assert (found["sinks"], found["named"]) == (6, 3)
    none = replace(made.reading, closure_rows=torch.zeros(0))
    assert page._data(replace(made, reading=none))["rows"]["closure"] == ""
    assert all(len(row) >= 4 for row in found["table"])
    levels = [step["label"] for step in json.loads(page._scene(made))["layout"]["sliders"][0]["steps"]]
    assert levels == ["0", "1", "2", "3"]


def test_the_page_describes_what_was_probed():
    shown = page._described({"a_b": {"x": [1, 2], "y": [{"z": 3}]}, "order": 1, "none": []})
    assert shown == (
        "<dl><dt>a b</dt><dd><ul><li>x: 1, 2</li><li>y: <ul><li><ul><li>z: 3</li></ul></li></ul></li></ul></dd>"
        "<dt>none</dt><dd></dd></dl>"
    )
    assert page._below("ladder") == ""
    assert page._below("heads").count("<li>") == len(figures.HEAD_MAPS)


def test_a_page_without_a_comparison_of_transports_says_so(made):
    none = TransportCheck(*(torch.zeros(0) for _ in range(6)))
    assert "Not compared." in page._transports(replace(made, transports=none))
    assert "Not compared." not in page._transports(made)


def test_a_report_is_its_files_and_the_marker_last(made, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(page, "_png", lambda figure: b"png")
    monkeypatch.setattr(page, "_scripts", lambda result: "")
    monkeypatch.setattr(Probe, "save_numbers", lambda self, folder: written.append("numbers"))
    monkeypatch.setattr(
        Probe, "save_marker", lambda self, folder: written.append(sorted(p.name for p in folder.iterdir()))
    )
    (tmp_path / "probe.json").write_text("of another run")
    path = page.write_report(made, tmp_path)
    images = sorted(f"{name}.png" for name in page.FIGURES)
    assert written == ["numbers", sorted([*images, "report.html"])]
    assert path == tmp_path / "report.html"
    text = path.read_text()
    assert "<title>Is made a mean-field flow?</title>" in text
    assert all((tmp_path / name).read_bytes() == b"png" for name in images)
    assert "<title>mine</title>" in page.write_report(made, tmp_path, "mine").read_text()
    answer = "".join(f"<p>{html.escape(words)}</p>" for words in made.answer())
    assert f'<div id="answer">{answer}</div>' in text
    links = "".join(f', <a href="{name}.png">{name}.png</a>' for name in page.FIGURES)
    assert f'<a href="probe.safetensors">probe.safetensors</a>{links}.</p>' in text
    findings = "".join(page._finding(z) for z in made.findings())
    assert findings in text.replace("\n", "")
    assert '<span class="tag note">note</span>So.' in page._finding(Finding(None, "So."))
    assert '<span class="tag no">not supported</span>So.' in page._finding(Finding("not supported", "So."))
    plain = with_about(made, encoder={**made.about["encoder"], "omits": []}, self_check=[])
    assert "left out by theory: nothing." in page._page(plain, dict.fromkeys(page.FIGURES, b""), "made")


def test_models_side_by_side_have_a_page(made, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "_png", lambda figure: b"png")
    path = page.write_comparison({"a<b": made}, tmp_path, {"a<b": "there"})
    assert path == tmp_path / "comparison.html"
    assert (tmp_path / "comparison.png").read_bytes() == b"png"
    text = path.read_text()
    assert '<h2>a&lt;b (<a href="there/report.html">report</a>)</h2>' in text
    assert all(page._finding(z) in text for z in made.findings())


def test_heads_that_are_all_alike_have_a_colour(made):
    alike = replace(made, heads=replace(made.heads, entropy=torch.full((L, H), 0.5, dtype=torch.float64)))
    low, high = figures.heads_figure(alike).axes[0].images[0].get_clim()
    assert low == 0.5
    assert low < high < low + 1e-6


def test_every_head_has_a_colour_of_its_own():
    from matplotlib import pyplot

    head = lambda h: {"layer": 0, "head": h, "real": [h], "imaginary": [0.0]}
    lines = figures.spectra_figure({"layers": 1, "heads": [head(h) for h in range(5)]}, "made").axes[0].get_lines()[:5]
    turbo = pyplot.get_cmap("turbo")
    assert [line.get_color() for line in lines] == [turbo(h / 4) for h in range(5)]
    alone = figures.spectra_figure({"layers": 1, "heads": [head(0)]}, "made").axes[0].get_lines()[0]
    assert alone.get_color() == turbo(0.0)


def test_a_saved_probe_is_the_same_probe(made, tmp_path):
    order = {group: list(getattr(made, group)) for group in ("closures", "nulls", "propagation")}
    whole = with_about(made, order=order)
    whole.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["probe.json", "probe.safetensors"]
    found = Probe.load(tmp_path)
    assert found.as_json() == whole.as_json()
    assert found.rows() == whole.rows()
    assert found.tokens == made.tokens
    for name, value in vars(made.reading).items():
        assert torch.equal(getattr(found.reading, name), value)
    words = json.loads((tmp_path / "probe.json").read_text())
    assert words["table"] == json.loads(json.dumps(whole.rows()))
    (tmp_path / "probe.json").write_text(json.dumps({**words, "format": "old"}))
    with pytest.raises(ValueError, match=r"was written in format 'old', expected 'attn_flow\.Probe 2'"):
        Probe.load(tmp_path)
    (tmp_path / "probe.json").write_text("{")
    with pytest.raises(ValueError, match=r"probe\.json is damaged"):
        Probe.load(tmp_path)
    (tmp_path / "probe.json").unlink()
    with pytest.raises(ValueError, match=r"holds no probe\.json"):
        Probe.load(tmp_path)


def test_controls_alone_are_enough_to_beat_and_sentences_are_whole(made):
    controls = replace(with_about(made, nulls={}), nulls={})
    depth, layers, *_ = controls.findings()
    assert depth.verdict is not None
    assert layers.verdict is not None
    nulls = replace(with_about(made, controls={}), closures={n: made.closures[n] for n in CLOSURES})
    assert all(finding.verdict is not None for finding in nulls.findings()[:2])
    starts = (
        "The encoder run",
        "Layer by layer",
        "The theorem's",
        "One layer",
        "From the mean",
        "Heads attend",
        "The cl",
    )
    for finding, words in zip(made.findings(), starts, strict=True):
        assert finding.text.startswith(words)
        assert finding.text.endswith(".")
    assert all(words.endswith(".") for words in made.answer())
    assert made.findings()[0].numbers["controls"].keys() == set(CONTROLS)
    assert made.findings()[1].numbers["nulls"].keys() == {*CONTROLS, *NULLS}
    rises = torch.linspace(0, 1, L + 1, dtype=torch.float64)[:, None].expand(L + 1, T)
    for cosine, words in ((rises, "concentrates"), (rises.flip(0), "spreads"), (0 * rises, "spreads")):
        moved = replace(made, evolution=replace(made.evolution, pairwise_cosine=cosine))
        assert f"The cloud {words}: " in moved.findings()[-1].text
