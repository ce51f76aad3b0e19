"""The ladder of closures: what a layer's attention does, predicted from its weights and a short account of the cloud.

Attention is sum_h O_h V_h m_beta[mu](G_h x + ...). Replacing the cloud mu by a measure of few numbers closes the
dynamics. Each closure is a function from a text, as its heads see it, to a measure of `attn_flow.measures`; each says
how many numbers it uses and how many tokens a query sees for itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_flow.measures import Cloud, Gaussian, Measure, Mixture, PerQueryCloud, PerQueryGaussian
from attn_flow.probe.head_space import HeadSpace
from attn_flow.probe.quantised import k_means, neighbours, quantise

WINDOW = (-2, -1, 0, 1, 2)  # the tokens a query sees for itself: its neighbours and itself
SINKS = 4  # tokens of a text that a head's mean query scores highest
CAP = 2.0  # standard deviations of the logits at which the pull of a Gaussian saturates
ORACLE = 11  # keys of largest true weight: as many as the first closure's exact tokens


@dataclass(frozen=True)
class Cost:
    """Numbers that all queries of a head share, and exact tokens that each query has of its own."""

    numbers: float
    own_tokens: int


@dataclass(frozen=True)
class Closure:
    """A step of the ladder: `measure(space)` is the law it puts in the place of the cloud.

    name: contains "closure"; title: in figures. cost: numbers and exact tokens it uses. after: the step that it adds an
    ingredient to, empty for the mean output. Your own goes to `propagate`.

    Example:
        >>> cost = LADDER["gaussian_closure"].cost
        >>> mean = Closure("mean_closure", "one atom", lambda space: Cloud(space.y.mean(-2, keepdim=True)), cost)
        >>> mean.name, len(LADDER)
        ('mean_closure', 7)
    """

    name: str
    title: str
    measure: Callable[[HeadSpace], Measure]
    cost: Callable[[HeadSpace], Cost]
    partial: bool = True  # whether it has a form for tokens that see only a part of the text (causal, local)
    after: str = ""


def gaussian(space: HeadSpace) -> Measure:
    """Mean and covariance of the tokens, saturating at CAP standard deviations of the logits."""
    if space.sees is not None:
        return PerQueryGaussian(space.y, space.sees.to(space.y), CAP)
    return Gaussian.fit(Cloud(space.y), shrinkage=0.0, cap=CAP)


def atoms_and_bulk(
    space: HeadSpace, atoms: Tensor, window: tuple[int, ...] = (), bulk: Callable[[Tensor], Measure] | None = None
) -> Mixture:
    """Some tokens as atoms (heads, n), each query's own window, and a law for all the rest. Masses count tokens."""
    y, rest = space.y, ~atoms
    if int(rest.sum(-1).min()) < 2:
        raise ValueError(
            f"a text of {space.n} tokens with {int(atoms.sum(-1).max())} atoms leaves no bulk; use longer texts."
        )
    seen = torch.ones(space.n, space.n, dtype=torch.bool, device=y.device) if space.sees is None else space.sees
    parts: list[Measure] = []
    masses: list[Tensor] = []

    def add(part: Measure, mass: Tensor) -> None:
        parts.append(part)
        masses.append(mass.to(y.dtype).expand(len(y)))

    one = torch.ones((), dtype=y.dtype, device=y.device)
    if space.sees is None:
        law = Gaussian.fit(Cloud(y, mask=rest), shrinkage=0.0, cap=CAP) if bulk is None else bulk(rest)
        add(law, rest.sum(-1))
        if bool(atoms.any()):
            add(Cloud(y, mask=atoms), atoms.sum(-1))
    else:
        add(PerQueryGaussian(y, (seen & rest[:, None]).to(y), CAP), one)
        if bool(atoms.any()):
            add(_own(y, atoms, seen), one)
    if window:
        own = neighbours(space, window)
        add(PerQueryCloud(y[:, own.place], (own.inside & rest[:, own.place]).to(y)), one)
    return Mixture(parts, torch.stack(masses, dim=-1))


def _own(y: Tensor, atoms: Tensor, seen: Tensor) -> PerQueryCloud:
    """Atoms as every query sees them: those that it may not see have no mass."""
    most = int(atoms.sum(-1).max())
    index = atoms.to(torch.uint8).topk(most, dim=-1).indices  # (heads, w); where a head has fewer, of mass zero
    there = atoms.gather(-1, index)
    x = y.gather(-2, index[..., None].expand(-1, -1, y.shape[-1]))[:, None].expand(-1, len(seen), -1, -1)
    return PerQueryCloud(x, (seen.T[index].mT & there[:, None]).to(y))


def sinks(space: HeadSpace, number: int = SINKS) -> Tensor:
    """Special tokens and the `number` others that a head's mean query scores highest, (heads, n) bool.

    Where tokens do not see the whole text, its first tokens: the score of a later one is not theirs to know.
    """
    atoms = space.special.expand(len(space.y), space.n).clone()
    free = max(0, min(number, int((~space.special).sum()) - 2))
    if space.sees is not None:
        atoms[:, :free] = True
    elif free:
        score = (space.g.mean(-2, keepdim=True) @ space.y.mT)[:, 0]
        atoms.scatter_(1, score.masked_fill(atoms, -torch.inf).topk(free).indices, True)
    return atoms


def number_of_clusters(x: Tensor) -> tuple[Tensor, int]:
    """Clusters of tokens x (n, d) by k-means, and their number K: labels (n,), K.

    K is the power of two up to n/8 of least BIC, the clusters taken for round Gaussians of one variance
    v = sum |x - centre|^2 / (d (n - K)):  n d log v + d (n - K) - 2 sum_c n_c log(n_c / n) + (K (d + 1)) log n.
    """
    n, d = x.shape
    x = ((x - x.mean(0)) / (x - x.mean(0)).square().sum(-1).mean().sqrt().clamp_min(1e-30))[None]
    equal = torch.full_like(x[..., 0], 1 / n)
    best, found = math.inf, (torch.zeros(n, dtype=torch.long, device=x.device), 1)
    for K in (2**i for i in range(int(math.log2(max(1, n // 8))) + 1)):
        label = k_means(x, equal, 0.0, K)[0][0]
        member = torch.nn.functional.one_hot(label, K).to(x.dtype)
        count = member.sum(0)
        centre = member.mT @ x[0] / count.clamp_min(1)[:, None]
        v = float((x[0] - centre[label]).square().sum()) / (d * (n - K)) + 1e-30
        entropy = float((count * (count / n).clamp_min(1e-30).log()).sum())
        bic = n * d * math.log(v) + d * (n - K) - 2 * entropy + K * (d + 1) * math.log(n)
        if bic < best:
            best, found = bic, (label, K)
    return found


def clusters(space: HeadSpace) -> Mixture:
    """Special tokens and sinks, and K Gaussians for the rest: the text's clusters, the same for all heads, K by BIC."""
    label, number = number_of_clusters(space.x)
    atoms = sinks(space)

    def bulk(rest: Tensor) -> Measure:
        members = [rest & (label == c) for c in range(number)]
        counts = torch.stack([m.sum(-1) for m in members], dim=-1).to(space.y)
        laws = []
        for mask in members:
            some = mask | (~mask.any(-1, keepdim=True) & rest)  # a head may have no token left here: mass zero
            laws.append(Gaussian.fit(Cloud(space.y, mask=some), shrinkage=0.0, cap=CAP))
        return Mixture(laws, counts)

    return atoms_and_bulk(space, atoms, bulk=bulk)


def quantised(space: HeadSpace) -> Measure:
    """The text's law as a few weighted atoms for each head, shared by all queries."""
    return quantise(space).law(space)


def quantised_and_window(space: HeadSpace) -> Measure:
    """The same beside each query's own window, which is taken out of the atoms."""
    return quantise(space, window=WINDOW).law(space)


def oracle(space: HeadSpace, number: int = ORACLE) -> PerQueryCloud:
    """What no closure knows: each query's keys of largest true weight, and all the weight left at the tokens' mean.

    With s the logits and m the mean of the tokens that a query sees, that atom has the mass sum_rest e^{s_j - <q, m>}.
    """
    largest = space.logits.topk(min(number, space.n - 1), dim=-1)
    heads = torch.arange(len(space.y), device=space.y.device)[:, None, None]
    exact = space.y[heads, largest.indices]  # (heads, n, w, k + v)
    seen = space.logits.isfinite().to(space.y)
    mean = seen @ space.y / seen.sum(-1, keepdim=True)
    left = space.logits.scatter(-1, largest.indices, -torch.inf).logsumexp(-1, keepdim=True)
    log_mass = left - space.beta[..., None] * (space.g * mean).sum(-1, keepdim=True)
    top = log_mass.clamp_min(0)  # masses count up to a factor: none overflows
    weights = torch.cat([largest.values.isfinite() * (-top).exp(), (log_mass - top).exp()], dim=-1)
    return PerQueryCloud(torch.cat([exact, mean[..., None, :]], dim=-2), weights)


def _moments(space: HeadSpace) -> int:
    """Numbers of a mean (k + v) and of the parts of a covariance that a query meets: k(k + 1)/2 and k v."""
    k, v = space.k, space.y.shape[-1] - space.k
    return k + v + k * (k + 1) // 2 + k * v


def _atoms(space: HeadSpace, number: float) -> float:
    return number * space.y.shape[-1]


def _few(space: HeadSpace, extra: int = 0) -> int:
    return int(space.special.sum()) + extra


def _masses(space: HeadSpace, window: tuple[int, ...] = ()) -> Cost:
    number = float(quantise(space, window=window).counts.double().mean())
    return Cost(number * (space.y.shape[-1] + 1), len(window))


LADDER: dict[str, Closure] = {
    step.name: step
    for step in (
        Closure("gaussian_closure", "Gaussian", gaussian, lambda s: Cost(_moments(s), 0)),
        Closure(
            "special_closure",
            "+ special tokens",
            lambda s: atoms_and_bulk(s, sinks(s, 0)),
            lambda s: Cost(_moments(s) + _atoms(s, _few(s)), 0),
            after="gaussian_closure",
        ),
        Closure(
            "sinks_closure",
            "+ sinks",
            lambda s: atoms_and_bulk(s, sinks(s)),
            lambda s: Cost(_moments(s) + _atoms(s, _few(s, SINKS)), 0),
            after="special_closure",
        ),
        Closure(
            "window_closure",
            "+ window (version 0.1)",
            lambda s: atoms_and_bulk(s, sinks(s), WINDOW),
            lambda s: Cost(_moments(s) + _atoms(s, _few(s, SINKS)), len(WINDOW)),
            after="sinks_closure",
        ),
        Closure(
            "clusters_closure",
            "+ sinks, mixture of Gaussians",
            clusters,
            lambda s: Cost(number_of_clusters(s.x)[1] * (_moments(s) + 1) + _atoms(s, _few(s, SINKS)), 0),
            partial=False,
            after="sinks_closure",
        ),
        Closure("quantised_closure", "atoms of the heads", quantised, _masses, partial=False, after="clusters_closure"),
        Closure(
            "quantised_window_closure",
            "atoms of the heads + window",
            quantised_and_window,
            lambda s: _masses(s, WINDOW),
            partial=False,
            after="quantised_closure",
        ),
    )
}
ORACLE_STEP = Closure(
    "oracle", f"oracle: the {ORACLE} largest weights", oracle, lambda s: Cost(0, min(ORACLE, s.n - 1))
)
