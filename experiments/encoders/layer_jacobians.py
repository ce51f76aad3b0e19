"""Jacobians of trained layers against random ones: how far from normal, and how much they turn instead of stretch.

arXiv 2605.14258 says that early layers of trained models are non-normal and rotational, late ones nearly symmetric;
only a digest is known to us, so quantities and nulls are ours. J = d(layer output)/d(own input) of one token, the
others held, J = cI + T with tr T = 0. Henrici's departure (|J|_F^2 - sum |lambda|^2)^{1/2}/|T|_F is 0 for normal J; the
rotational part |J - J^T|_F/(2|T|_F) is 0 for symmetric and 1 for antisymmetric T; both are near .707 for iid entries.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import bound, claim
from attn_flow.experiments.figures import COLOURS, THEORY, caption, label, not_installed, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from attn_flow.attention import Attention
    from attn_flow.hooks import Block

MODELS = ("trained", "shuffled", "untrained")


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    """Departure, rotational part and size of J by layer, over tokens of several texts."""
    texts, n, tokens = (2, 16, (4,)) if quick else (6, 48, (5, 20))
    generator = torch.Generator().manual_seed(seed)
    exact = known(generator, 128 if quick else 384)
    claims = [
        claim(f"{name}: departure", m["departure"], m["expected"][0], m["tolerance"]) for name, m in exact.items()
    ]
    claims += [
        claim(f"{name}: rotational part", m["rotation"], m["expected"][1], m["tolerance"]) for name, m in exact.items()
    ]
    runs = encoders(texts, n, tokens, quick, seed, progress)
    if runs is not None:
        claims += encoder_claims(runs)
    return {"seed": seed, "known": exact, "encoders": runs, "claims": claims}


def departure(J: Tensor) -> tuple[float, float, float]:
    """Henrici's departure from normality and the rotational part of J (d, d), over its traceless part, and tr J/d."""
    d = J.shape[-1]
    c = float(J.trace()) / d
    size = float((J - c * torch.eye(d, dtype=J.dtype)).norm())
    spectrum = float(torch.linalg.eigvals(J).abs().square().sum())
    beyond = max(float(J.square().sum()) - spectrum, 0.0)  # of a normal matrix it is 0 up to rounding
    return math.sqrt(beyond) / size, float((J - J.mT).norm()) / (2 * size), c


def known(generator: torch.Generator, d: int) -> dict[str, Any]:
    """Matrices whose numbers are known: a rotation, a shear, a symmetric one, and independent entries."""
    A = torch.randn(d, d, generator=generator, dtype=torch.float64) / math.sqrt(d)
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    shear = torch.tensor([[2.0, 3.0], [0.0, 1.0]], dtype=torch.float64)  # T = diag(.5, -.5) + 3 e1 e2^T, |T|^2 = 9.5
    half = math.sqrt(0.5)
    cases = {
        "a turn by 53 degrees": (turn, (0.0, 1.0), 1e-7),
        "a shear": (shear, (3 / math.sqrt(9.5), 3 / math.sqrt(2 * 9.5)), 1e-12),
        "a symmetric matrix": (A + A.mT, (0.0, 0.0), 1e-6),
        f"independent entries, d = {d}": (A, (half, half), 5 / d),  # both fluctuate like 1/d
    }
    found = {}
    for name, (J, expected, tolerance) in cases.items():
        henrici, rotation, _ = departure(J)
        found[name] = {"departure": henrici, "rotation": rotation, "expected": expected, "tolerance": tolerance}
    return found


def encoders(
    texts: int, n: int, tokens: tuple[int, ...], quick: bool, seed: int, progress: bool
) -> dict[str, Any] | None:
    """MiniLM, MiniLM with the entries of every weight matrix shuffled, and its untrained twin."""
    from attn_flow.experiments.encoders.minilm_variants import token_ids, trained_and_untrained
    from attn_flow.hooks import attentions, blocks, record

    found = trained_and_untrained(seed, torch.float64)
    if found is None:
        return None
    models, tokenizer = found
    models["shuffled"] = shuffled(models["trained"], seed)
    inputs = token_ids(tokenizer, texts, n)
    runs: dict[str, Any] = {"texts": texts, "n": n, "tokens": len(tokens)}
    with progress_bar("layer Jacobians", len(MODELS) * 6, progress) as advance:
        for name in MODELS:
            model, layers = models[name], []
            states = record(model, inputs, check=False).x  # (levels, texts, n, d)
            every = list(zip(blocks(model), attentions(model)))
            for i, (block, attention) in enumerate(every):
                if quick and i not in (0, len(every) - 1):
                    advance()
                    continue
                rows = [
                    jacobian_numbers(layer_of(block, attention, x, j), x[j], y[j])
                    for x, y in zip(states[i], states[i + 1])
                    for j in tokens
                ]
                by_text = np.array(rows).reshape(texts, len(tokens), -1).mean(1)  # (texts, numbers)
                layers.append({"layer": i, "by_text": by_text.T.tolist()})
                advance()
            runs[name] = layers
    return runs


def shuffled(model: nn.Module, seed: int) -> nn.Module:
    """Random weights of the trained size: the entries of every weight matrix of the blocks in another order."""
    from attn_flow.hooks import blocks

    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for block in blocks(other):
        for part in block.module.modules():
            if isinstance(part, nn.Linear):
                w = part.weight.data
                part.weight.data = w.flatten()[torch.randperm(w.numel(), generator=generator)].reshape(w.shape)
    return other


def layer_of(block: Block, attention: Attention, x: Tensor, i: int) -> Callable[[Tensor], Tensor]:
    """z -> output of a BERT layer at token i, where token i of x (n, d) is z, attention written out."""
    Q, K, V, O = (attention.tensors[name] for name in "QKVO")
    beta = float(torch.as_tensor(attention.beta, dtype=torch.float64).max())  # one for all heads
    others = torch.arange(len(x)) != i
    keys, values = x @ K.mT, x @ V.mT  # (heads, n, k), constants but for token i

    def layer(z: Tensor) -> Tensor:
        q = Q @ z if attention.query_bias is None else Q @ z + attention.query_bias  # (heads, k)
        scores = torch.where(others, (keys @ q[..., None])[..., 0], (q * (K @ z)).sum(-1, keepdim=True))
        p = (beta * scores).softmax(-1)  # (heads, n)
        mean = (torch.where(others, p, 0.0)[:, None] @ values)[:, 0] + p[:, i, None] * (V @ z)
        out = torch.einsum("hdk,hk->d", O, mean)
        out = out if attention.value_bias is None else out + attention.value_bias
        middle = block[block.architecture.norm1](z + out)
        return block[block.architecture.norm2](middle + block["output.dense"](block["intermediate"](middle)))

    return layer


def jacobian_numbers(layer: Callable[[Tensor], Tensor], z: Tensor, output: Tensor) -> tuple[float, ...]:
    """Departure, rotational part, tr J/d, |T|_F/sqrt(d), and how far the written layer is from the encoder's own."""
    J = torch.func.jacrev(layer)(z).detach()
    henrici, rotation, c = departure(J)
    size = float((J - c * torch.eye(len(J), dtype=J.dtype)).norm()) / math.sqrt(len(J))
    with torch.no_grad():
        off = float((layer(z) - output).norm() / output.norm())
    return henrici, rotation, c, size, off


def mean_and_error(layer: dict[str, Any], which: int) -> tuple[float, float]:
    """Mean over texts and its standard error, of the departure (0), rotation (1), c (2) or size (3)."""
    values = np.array(layer["by_text"][which])
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def encoder_claims(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """Late layers turn as much as early ones (a last one below half of the first would refute it), less than chance."""
    off = max(max(layer["by_text"][4]) for name in MODELS for layer in runs[name])
    mean = {name: np.array([[mean_and_error(layer, i)[0] for i in (0, 1)] for layer in runs[name]]) for name in MODELS}
    turn = {name: values[:, 1] for name, values in mean.items()}
    return [
        bound("a layer as written out against the encoder's own, relative", off, at_most=1e-5),
        bound(
            "MiniLM: rotational part of the last layer over the first one's (not nearly symmetric)",
            turn["trained"][-1] / turn["trained"][0],
            at_least=0.5,
        ),
        bound("MiniLM: departure from normality, smallest of its layers", mean["trained"][:, 0].min(), at_least=0.6),
        bound(
            "rotational part with shuffled weights less trained, smallest of the layers",
            (turn["shuffled"] - turn["trained"]).min(),
            at_least=0,
        ),
        claim(
            "untrained twin: departure, the layer farthest from independent entries",
            max(mean["untrained"][:, 0], key=lambda value: abs(value - math.sqrt(0.5))),
            math.sqrt(0.5),
            0.05,
        ),
    ]


def plot(numbers: dict[str, Any]) -> Figure:
    """Departure, rotation, and the sizes of the parts, by layer."""
    runs = numbers["encoders"]
    figure, axes = panels(3, title="Jacobians of a layer with respect to its own token")
    titles = ("departure from normality", "rotational part", "size of the traceless part")
    ylabels = (
        r"$(\|J\|_F^2-\sum|\lambda|^2)^{1/2}\,/\,\|T\|_F$",
        r"$\|J-J^\top\|_F\,/\,2\|T\|_F$",
        r"$\|T\|_F/\sqrt{d}$",
    )
    for axis, which, words, y in zip(axes, (0, 1, 3), titles, ylabels):
        if runs is None:
            not_installed(axis)
        else:
            for name, colour in zip(MODELS, COLOURS):
                layers = [layer["layer"] for layer in runs[name]]
                mean, error = np.transpose([mean_and_error(layer, which) for layer in runs[name]])
                axis.errorbar(layers, mean, 2 * error, marker="o", capsize=2, color=colour, label=f"MiniLM, {name}")
            if which < 2:
                axis.axhline(math.sqrt(0.5), label="independent entries", **THEORY)
                axis.set_ylim(0, 1.15)
        label(axis, words, "layer", y, legend=runs is not None)
    words = (
        "" if runs is None else f"{runs['texts']} texts of {runs['n']} tokens, {runs['tokens']} tokens of each; bars: "
    )
    caption(
        figure,
        f"J = cI + T of one token's output by its own input, other tokens held. {words}two standard errors over texts. "
        f"Shuffled: trained entries in another order. Seed {numbers['seed']}.",
    )
    return figure
