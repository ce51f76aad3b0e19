"""The sizes of an untrained encoder alone predict how similar its tokens are in every layer; training breaks this.

arXiv 2604.01978, 2601.21942 (random weights, drawn anew in every layer); what follows for BERT's layer is derived here.
BERT of MiniLM's sizes with 24 layers, 24 tokens and 24 draws of all weights. Tokens after a norm have |x|^2 = d; C_ij
are their cosines. With weights of variance s^2 the parts of a layer add Gaussian fields with a kernel kappa: attention,
nearly uniform, one noise vector for all tokens, kappa = (s^2 d)^2 mean(C); the FFN d_ff s^2 E[phi(u) phi(v)], (u, v)
normal of variance s^2 d and correlation rho. The norm gives C <- (C + kappa(C))/(1 + kappa(1)), dashed in (a). Around
this a cosine spreads over draws of the weights (b), by the variance 2 (1-rho^2) (kappa(1) - rho kappa(rho))/d a part.
The dotted baseline gives every token a noise of its own, as large.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.special import erf

from attn_flow.base.progress import progress_bar
from attn_flow.experiments.claims import at_least, claim
from attn_flow.experiments.figures import COLOURS, THEORY, label, not_installed, panels
from attn_flow.theory import noise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

D, HEADS, WIDE, S = 384, 12, 1536, 0.02  # MiniLM's sizes, and the standard deviation its weights are drawn with
TOKENS = 24
HERMITE = np.polynomial.hermite_e.hermegauss(40)
OFF = ~np.eye(TOKENS, dtype=bool)
Kernel = Callable[[np.ndarray], np.ndarray]


def compute(quick: bool = False, seed: int = 0, progress: bool = False) -> dict[str, Any]:
    """Cosines of untrained encoders at every level, over draws of all weights, against the recursion and its spread."""
    depth, draws = (6, 8) if quick else (24, 24)
    measured, expected, alone, square, variance = [], [], [], [], []
    with progress_bar("random weights", draws, progress) as advance:
        for draw in range(draws):
            path = untrained_cosines(depth, seed + draw)
            C, V = recursion(path[0], depth)
            measured.append(path[:, OFF].mean(-1))
            expected.append(C[:, OFF].mean(-1))
            alone.append(recursion(path[0], depth, common=False)[0][:, OFF].mean(-1))
            square.append(np.square(path - C)[:, OFF].mean(-1))
            variance.append(V[:, OFF].mean(-1))
            advance()
    away, moved = np.array(measured) - np.array(expected), float(np.mean(expected, 0)[-1] - np.mean(expected, 0)[0])
    error = float(away[:, -1].std(ddof=1)) / math.sqrt(draws)
    ratio = np.array(square)[:, -1] / np.array(variance)[:, -1]
    missed = float(np.mean(alone, 0)[-1] - np.mean(measured, 0)[-1])
    claims = [
        claim(
            f"{depth} layers: mean cosine of untrained encoders less the recursion's, over what that moved",
            float(away[:, -1].mean()) / moved,
            0.0,
            3 * error / moved,
        ),
        claim(
            f"{depth} layers: mean square of cosines around it, over the diffusion's variance",
            float(ratio.mean()),
            1.0,
            3 * float(ratio.std(ddof=1)) / math.sqrt(draws),
        ),
        at_least(
            "baseline, noise of each token's own: its error over what the recursion moved", abs(missed / moved), 1
        ),
    ]
    trained = trained_cosines()
    if trained is not None:
        gap = abs(trained["mean"][-1] - trained["recursion"][-1])
        spread = math.sqrt(float(np.mean(variance, 0)[len(trained["mean"]) - 1]))
        claims.append(at_least("MiniLM: last mean cosine off the recursion, in spreads of a pair", gap / spread, 3))
    return {
        "seed": seed,
        "depth": depth,
        "draws": draws,
        "measured": np.array(measured).tolist(),
        "expected": np.mean(expected, 0).tolist(),
        "alone": np.mean(alone, 0).tolist(),
        "spread": np.sqrt(np.mean(square, 0)).tolist(),
        "expected_spread": np.sqrt(np.mean(variance, 0)).tolist(),
        "trained": trained,
        "claims": claims,
    }


def untrained_cosines(depth: int, seed: int) -> np.ndarray:
    """Cosines (depth + 1, n, n) of n words at every level of a BERT of MiniLM's sizes with fresh weights."""
    from transformers import BertConfig, BertModel

    from attn_flow.hooks import record

    config = BertConfig(
        vocab_size=1000,
        hidden_size=D,
        num_attention_heads=HEADS,
        intermediate_size=WIDE,
        num_hidden_layers=depth,
        initializer_range=S,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = BertModel(config, add_pooling_layer=False).eval()
    ids = torch.arange(10, 10 + TOKENS)[None]
    return cosines(record(model, {"input_ids": ids}).x[:, 0])


def cosines(x: torch.Tensor) -> np.ndarray:
    """(levels, n, n) of clouds (levels, n, d)."""
    u = torch.nn.functional.normalize(x.double(), dim=-1)
    return np.asarray(u @ u.mT)


def trained_cosines() -> dict[str, Any] | None:
    """Mean cosine of MiniLM's tokens by level, and the recursion from its embeddings; None where it is missing."""
    from attn_flow.experiments.encoders.minilm_variants import trained_and_untrained
    from attn_flow.hooks import record

    variants = trained_and_untrained(1, TOKENS)
    if variants is None:
        return None
    path = cosines(record(variants[0]["trained"], variants[1]).x[:, 0])
    C = recursion(path[0], len(path) - 1)[0]
    return {"mean": path[:, OFF].mean(-1).tolist(), "recursion": C[:, OFF].mean(-1).tolist()}


def gelu(u: np.ndarray) -> np.ndarray:
    return u * (1 + erf(u / math.sqrt(2))) / 2


def gelu_kernel(rho: np.ndarray, variance: float) -> np.ndarray:
    """E[phi(u) phi(v)], phi = gelu, (u, v) normal of this variance and correlation rho; by quadrature.

    >>> bool(abs(gelu_kernel(np.zeros(1), 1.0)[0] - 1 / (4 * math.pi)) < 1e-6)  # (E phi)^2, E phi(u) = 1/(2 sqrt pi)
    True
    """
    nodes, weights = HERMITE
    weights = weights / math.sqrt(2 * math.pi)
    rho = np.asarray(rho, dtype=np.float64)[..., None, None]
    u = math.sqrt(variance) * nodes[:, None]
    v = math.sqrt(variance) * (rho * nodes[:, None] + np.sqrt(1 - rho**2) * nodes)
    return np.asarray((gelu(u) * gelu(v) * weights[:, None] * weights).sum((-1, -2)))


def recursion(C: np.ndarray, depth: int, common: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Cosines (depth + 1, n, n) from C on, and the variance of each over draws of the weights.

    common = False is the baseline: every token gets noise of its own, as large.
    """
    grid = np.linspace(-1, 1, 401)
    table = WIDE * S**2 * gelu_kernel(grid, S**2 * D)
    ffn: Kernel = lambda rho: np.asarray(np.interp(rho, grid, table))
    V = np.zeros_like(C)
    path, variance = [C], [V]
    for _ in range(depth):
        size = (S**2 * D) ** 2 * float(C.mean())
        C, V = one_part(C, V, partial(np.full_like, fill_value=size), common)  # one vector for all tokens
        C, V = one_part(C, V, ffn, common)
        path.append(C)
        variance.append(V)
    return np.array(path), np.array(variance)


def one_part(C: np.ndarray, V: np.ndarray, kernel: Kernel, common: bool) -> tuple[np.ndarray, np.ndarray]:
    """A Gaussian field of this kernel added to the tokens, then the norm: cosines and their variance."""
    rho = np.clip(C, -1.0, 1.0)
    top, h = 1 + float(kernel(np.ones(1))[0]), 1e-3
    slope = (kernel(np.minimum(rho + h, 1)) - kernel(np.maximum(rho - h, -1))) / (2 * h)
    V = (((1 + slope) / top) ** 2 * V + noise.diffusion(rho, kernel) ** 2 / (D * top**2)) * OFF
    return np.where(OFF, (rho + common * kernel(rho)) / top, 1.0), V


def plot(numbers: dict[str, Any]) -> Figure:
    """Mean cosines by level, their spread, and the trained encoder beside them."""
    figure, (a, b, c) = panels(3)
    levels = np.arange(numbers["depth"] + 1)
    for i, path in enumerate(numbers["measured"]):
        words = None if i else "one draw of the weights each"
        a.plot(levels, path, color=COLOURS[0], alpha=0.4, linewidth=0.9, label=words)
    a.plot(levels, numbers["expected"], label="predicted", **THEORY)
    a.plot(levels, numbers["alone"], color=COLOURS[1], linestyle=":", label="each token with its own noise")
    a.set_ylim(0, 1)
    label(a, "untrained encoders", "layer", "mean cosine of two tokens")
    b.plot(levels, numbers["spread"], "o", markersize=4, color=COLOURS[0], label="measured")
    b.plot(levels, numbers["expected_spread"], label="predicted", **THEORY)
    b.set_ylim(bottom=0)
    label(b, "spread of a cosine over draws", "layer", "standard deviation")
    trained = numbers["trained"]
    if trained is None:
        not_installed(c)
    else:
        some = np.arange(len(trained["mean"]))
        c.plot(some, trained["mean"], "o-", color=COLOURS[2], label="MiniLM, trained")
        c.plot(some, trained["recursion"], label="predicted if untrained", **THEORY)
        c.set_ylim(0, 1)
    label(c, "a trained encoder", "layer", "mean cosine", legend=trained is not None)
    return figure
