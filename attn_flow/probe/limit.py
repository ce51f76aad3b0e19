"""Question 4: does a layer move its tokens towards the limit that its weights predict?

In the Gaussian description with the covariance S of all texts the heads of a layer add M x and a constant to a token,
M = sum_h beta_h O_h V_h S G_h, and the flow x' = P_x M x on the sphere has the limit map P(x) = Pi x/|Pi x|, with the
spectral projector Pi of M on its leading subspace (arXiv 2605.10931). The progress of a token is what it gains in
<x, P(x)>, half of what its squared distance to its limit loses. The statistic of a text is its agreement: the cosine,
over tokens, between the progress through the layer and the progress that the flow would make. It is 1 where the layer
is the flow. Its mean over texts and layers is ranked among those of weights with randomly rotated G.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention import Attention
from attn_flow.measures import Cloud
from attn_flow.prediction.spectrum import Spectrum, spectrum
from attn_flow.probe.findings import Finding, layers_named
from attn_flow.probe.leading_subspace import SMALL, leading_subspace
from attn_flow.probe.recording import Recording, directions
from attn_flow.probe.replacement import w2

CASES = ("fixed", "rotating", "jordan", "stationary")
LEVEL = 0.05  # of every test
MIN_TEXTS = 8  # for a verdict
MAX_TEXTS = 16  # whose tokens are followed; the covariance is that of all texts
MAX_TOKENS = 1024  # followed in a layer
MAX_TRANSPORT_TOKENS = 256  # of a text, in W2
EXCEEDANCES = 10  # rotations that do as well as the weights, after which no more are drawn
RIVAL_DRAWS = 19  # permutations that must all be beaten, which has probability 1/20 for a permutation itself
SAME_SUBSPACE = 0.95  # squared cosine from which two leading subspaces count as one
MARGIN = 0.02  # of agreement over a rival that is no permutation


@dataclass(frozen=True, eq=False)
class LimitApproach:
    """Progress of tokens towards the limits of their layers; no texts if tokens see only a part of their text.

    Args:
        agreement: (layers, texts), cosine between the progress of tokens and the progress of the flow.
        rotated: (layers, rotations), its mean over texts for rotated weights; NaN where a layer needed no more.
        permuted_heads: (draws,), its mean over texts and layers if G_h stands with the values of another head; no draws
            if there is one head.
        other_layers: (draws,), the same with the weights of the layers permuted; no draws if all layers share them.
        principal_component: (layers, texts), agreement with the flow to the leading principal component of the tokens.
        value_direction: (layers, texts), agreement with the flow of sum_h O_h V_h alone; NaN where it has the same
            leading subspace as M, and is the same prediction.
        reduction: (layers, texts), 1 - W2(after, limit) / W2(before, limit) of the layer.
        flow_reduction: (layers, texts), the same of x + h M x, saturated.
        case: (layers,), index in CASES of the limit map.
        dimension: (layers,), of the leading subspace.
        gap: (layers,), between the two largest real parts of eigenvalues of M.
        rank: (layers,), bound on the rank of G of a head.
        heads: (layers,), number of heads.
        width: (), dimension of the tokens.
        max_rotations: (), the number after which a test ends.
    """

    agreement: Tensor
    rotated: Tensor
    permuted_heads: Tensor
    other_layers: Tensor
    principal_component: Tensor
    value_direction: Tensor
    reduction: Tensor
    flow_reduction: Tensor
    case: Tensor
    dimension: Tensor
    gap: Tensor
    rank: Tensor
    heads: Tensor
    width: Tensor
    max_rotations: Tensor

    @property
    def applies(self) -> bool:
        """Whether the encoder was measured: every token sees every token."""
        return self.agreement.shape[-1] > 0

    @cached_property
    def global_p(self) -> float:
        """p value of the mean agreement of all layers among joint rotations."""
        joint = self.rotated[:, ~self.rotated.isnan().any(0)].mean(0)
        return sequential_p(float(self.agreement.mean()), joint, int(self.max_rotations))

    @cached_property
    def p_values(self) -> list[float]:
        """p value of every layer by itself."""
        own = self.agreement.mean(-1).tolist()
        rows = [row[~row.isnan()] for row in self.rotated]
        return [sequential_p(value, row, int(self.max_rotations)) for value, row in zip(own, rows)]

    @property
    def named_layers(self) -> list[int]:
        """Layers that pass by themselves after Holm's correction."""
        return holm(self.p_values)

    def rivals(self) -> dict[str, dict[str, Any]]:
        """Mean agreement of every rival and whether the weights beat it; None if there is no such rival.

        Permutations are beaten if every one is. The two flows without G are beaten if the agreement is larger by at
        least 0.02, and by at least twice the standard error over texts.
        """
        own = self.agreement.mean(0)
        rows: dict[str, dict[str, Any]] = {}
        for name in ("permuted_heads", "other_layers"):
            draws = getattr(self, name)
            known = len(draws) > 0
            rows[name] = {
                "agreement": float(draws.mean()) if known else None,
                "beaten": bool(own.mean() > draws.max()) if known else None,
            }
        for name in ("principal_component", "value_direction"):
            rival = getattr(self, name)
            layers = ~rival.isnan().any(-1)
            lead = (self.agreement - rival)[layers].mean(0)
            error = float(lead.std() / math.sqrt(len(lead))) if len(lead) > 1 else math.inf
            rows[name] = {
                "agreement": float(rival[layers].mean()) if layers.any() else None,
                "beaten": bool(lead.mean() >= max(MARGIN, 2 * error)) if layers.any() else None,
            }
        return rows

    def finding(self, seed: int = 0) -> Finding:
        """The verdict and its numbers.

        "supported": the global p value is at most 0.05, every rival is beaten, and at least half of the layers pass by
        themselves after Holm's correction. "partly": fewer layers do. Otherwise "not supported".
        """
        if not self.applies:
            return Finding(
                None,
                "Not measured: tokens of this encoder see only a part of their text, and the covariance of the text "
                "does not describe what they see.",
            )
        rivals, named, L = self.rivals(), self.named_layers, len(self.agreement)
        numbers = self._numbers(rivals, named)
        percent = 100 * float(self.reduction.mean())
        texts = self.agreement.shape[-1]
        distance = f"W2 to the limit shrinks by {percent:.1f}% a layer"
        if texts < MIN_TEXTS:
            return Finding(None, f"No verdict from {texts} texts, which takes {MIN_TEXTS}: {distance}.", numbers)
        unbeaten = [name for name, rival in rivals.items() if rival["beaten"] is False]
        compared = f"p = {self.global_p:.2g} against rotated weights"
        if self.global_p > LEVEL:
            text = f"Layers do not follow the limit of their weights more than that of rotated weights: {distance}"
            return Finding("not supported", f"{text} ({compared}).", numbers)
        if unbeaten:
            names = " and ".join(name.replace("_", " ") for name in unbeaten)
            text = f"Rotated weights predict less ({compared}), but {names} as much as the weights: {distance}."
            return Finding("not supported", text, numbers)
        fraction = numbers["mean_fraction"]
        share = "" if fraction is None else f", {fraction:.2f} of what the flow would do"
        where = f"{layers_named(named, L)} by {'itself' if len(named) == 1 else 'themselves'}"
        text = f"Layers move their tokens towards the limit of their weights ({compared}), {where}: {distance}{share}."
        return Finding("supported" if 2 * len(named) >= L else "partly", text, numbers)

    def _numbers(self, rivals: dict[str, dict[str, Any]], named: list[int]) -> dict[str, Any]:
        made, expected = self.reduction.mean(-1), self.flow_reduction.mean(-1)
        fractions = [float(a / b) if b > 0 else None for a, b in zip(made, expected)]
        return {
            "p_value": self.p_values,
            "fraction": fractions,
            "global_p": self.global_p,
            "named_layers": named,
            "percent_of_distance": (100 * made).tolist(),
            "percent_of_flow": (100 * expected).tolist(),
            "mean_fraction": float(made.mean() / expected.mean()) if expected.mean() > 0 else None,
            "agreement": self.agreement.mean(-1).tolist(),
            "rivals": {name: rival["agreement"] for name, rival in rivals.items()},
            "rivals_beaten": {name: rival["beaten"] for name, rival in rivals.items()},
            "rotations": (~self.rotated.isnan()).sum(-1).tolist(),
            "case": [CASES[i] for i in self.case.tolist()],
            "dimension": self.dimension.tolist(),
            "gap": [gap if math.isfinite(gap) else None for gap in self.gap.tolist()],
            "not_covered": self.not_covered,
        }

    @property
    def not_covered(self) -> str:
        """What the theorem does not cover in this model, in one sentence."""
        rank, heads, d = int(self.rank.min()), int(self.heads.max()), int(self.width)
        parts = []
        if rank < d:
            parts.append(f"G of rank at most {rank} in dimension {d}")
        if heads > 1:
            parts.append(f"{heads} heads that are summed")
        if len(self.agreement) > 1 and len(self.other_layers):
            parts.append("weights that change from layer to layer")
        parts.append("biases, feed-forward parts and norms")
        return f"The theorem speaks of one head with invertible, constant weights, not of {', '.join(parts)}."


def sequential_p(own: float, draws: Tensor, max_draws: int) -> float:
    """p value of a rank test that ends with the tenth draw that is at least as large (Besag and Clifford, 1991).

    Args:
        own: the observed statistic.
        draws: those under the null hypothesis, in the order in which they were drawn.
        max_draws: the number of draws after which the test ends in any case.

    Returns:
        10/k if the tenth exceedance is draw k, else (1 + exceedances)/(1 + draws).

    Example:
        >>> sequential_p(1.0, torch.tensor([2.0, 0.0, 0.0]), 3), sequential_p(0.0, torch.ones(20), 99)
        (0.5, 1.0)
    """
    draws = draws[:max_draws]
    exceeding = (draws >= own).nonzero()[:, 0]
    if len(exceeding) >= EXCEEDANCES:
        return EXCEEDANCES / (int(exceeding[EXCEEDANCES - 1]) + 1)
    return (1 + len(exceeding)) / (1 + len(draws))


def holm(p_values: Sequence[float], level: float = LEVEL) -> list[int]:
    """Indices of the hypotheses that Holm's procedure rejects.

    Example:
        >>> holm([0.01, 0.2, 0.02, 0.04]), holm([0.01, 0.015, 0.02, 0.04])
        ([0], [0, 1, 2, 3])
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    passed = 0
    while passed < len(order) and p_values[order[passed]] * (len(order) - passed) <= level:
        passed += 1
    return sorted(order[:passed])


@dataclass(frozen=True, eq=False)
class Weights:
    """The matrices of all heads of a layer, (heads, k or v, d) but O (heads, d, v), and beta (heads, 1, 1)."""

    Q: Tensor
    K: Tensor
    V: Tensor
    O: Tensor
    beta: Tensor

    @cached_property
    def is_isotropic(self) -> bool:
        """Whether every G_h is a multiple of the identity, which no rotation changes."""
        d = self.Q.shape[-1]
        if self.Q.shape[-2] < d:
            return False
        G = self.K.mT @ self.Q
        scale = G.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        rest = G - scale * torch.eye(d, dtype=G.dtype, device=G.device)
        return bool(rest.norm() <= 1e-6 * G.norm())

    def rotate(self, R: Tensor) -> Weights:
        """G_h -> R^T G_h R for all heads: the same spectrum in other directions; O_h V_h if G_h has no directions."""
        turn = lambda matrix: (matrix.reshape(-1, len(R)) @ R).view(matrix.shape)
        if self.is_isotropic:
            return replace(self, V=turn(self.V), O=R.mT @ self.O)
        return replace(self, Q=turn(self.Q), K=turn(self.K))

    def permute(self, order: Tensor) -> Weights:
        """G_h stands with the values of another head."""
        return replace(self, Q=self.Q[order], K=self.K[order], beta=self.beta[order])


def read_weights(attention: Attention, dtype: torch.dtype, device: torch.device) -> Weights:
    """The matrices of an attention; those that are None are identities, and an infinite beta is a large one."""
    H, d = attention.heads, attention.dim
    identity = torch.eye(d, dtype=dtype, device=device)
    matrices = [getattr(attention, name) for name in ("Q", "K", "V", "O")]
    Q, K, V, O = (identity.expand(H, d, d) if m is None else m.to(device, dtype).expand(H, -1, -1) for m in matrices)
    beta = torch.as_tensor(attention.beta, dtype=dtype, device=device).expand(H)[:, None, None].clamp(max=1e6)
    return Weights(Q, K, V, O, beta)


class GaussianFlow:
    """What the heads of a layer add to a token if the other tokens are Gaussian, without the constant part.

    A head adds beta O V S g with g = G x, which in a cold head leaves the range of the tokens: the shift of their mean
    is s standard deviations, s^2 = beta^2 <g, S g>. It is divided by sqrt(1 + s^2/max_shift^2).

    Args:
        weights: of the heads.
        cov: S (d, d).
        max_shift: the largest shift of the mean in standard deviations.
    """

    def __init__(self, weights: Weights, cov: Tensor, max_shift: float) -> None:
        H, k, d = weights.Q.shape
        self.Q, self.O = weights.Q.reshape(H * k, d), weights.O.transpose(0, 1).reshape(d, -1)
        key_cov = ((weights.K.reshape(H * k, d) @ cov).view(H, k, d)).mT  # S K^T
        self.values = weights.beta * (weights.V @ key_cov)  # (H, v, k)
        self.spread = weights.beta.square() * (weights.K @ key_cov) / max_shift**2  # (H, k, k)
        self.shape = H, k

    @property
    def M(self) -> Tensor:
        """The matrix (d, d) of the flow without saturation."""
        H, k = self.shape
        O = self.O.view(len(self.O), H, -1).transpose(0, 1)
        return (O @ self.values).transpose(0, 1).reshape(len(self.O), H * k) @ self.Q

    def drift(self, x: Tensor) -> Tensor:
        """What is added to tokens x (n, d)."""
        H, k = self.shape
        q = (x @ self.Q.mT).view(-1, H, k).transpose(0, 1)  # (H, n, k)
        shift = ((q @ self.spread) * q).sum(-1, keepdim=True).clamp(min=0)
        averages = (q * (1 + shift).rsqrt()) @ self.values.mT  # (H, n, v)
        return averages.transpose(0, 1).reshape(len(x), -1) @ self.O.mT


@dataclass(frozen=True, eq=False)
class Passage:
    """The tokens that a layer is followed on, all texts one after the other.

    Args:
        start: (n, d), directions of the tokens whose limits are the targets.
        before, after: (n, d), tokens before the layer, and their directions after it.
        start_cov, cov: (d, d), covariance of the tokens of all texts at the start, and before the layer.
        text: (n,), the text of every token.
        max_shift: see `GaussianFlow`.
        horizon: the time h that the layer lasts.
        steps: the number of steps of the flow.
    """

    start: Tensor
    before: Tensor
    after: Tensor
    start_cov: Tensor
    cov: Tensor
    text: Tensor
    max_shift: float
    horizon: float
    steps: int

    def flow(self, weights: Weights) -> GaussianFlow:
        """The flow of these weights, whose limits are the targets."""
        return GaussianFlow(weights, self.start_cov, self.max_shift)

    def agreement(self, weights: Weights) -> Tensor:
        """The agreement of every text with the flow of these weights, (texts,)."""
        flow = self.flow(weights)
        return self._agreement(flow.M, self.move(self.before, flow.drift))

    def move(self, x: Tensor, drift: Callable[[Tensor], Tensor]) -> Tensor:
        """Tokens x (n, d) after the flow of a drift, each with its own norm."""
        norms = x.norm(dim=-1, keepdim=True)
        for _ in range(self.steps):
            x = norms * _unit(x + self.horizon / self.steps * drift(x))
        return x

    def linear_agreement(self, M: Tensor, like: Weights) -> Tensor:
        """The same with the flow of a matrix, as fast as that of some weights; the better of linear and saturated."""
        size = _rms(self.flow(like).drift(self.before))
        linear = lambda x: x @ M.mT
        saturated = lambda x: _unit(linear(x))
        both = []
        for drift in (linear, saturated):
            speed = size / _rms(drift(self.before)).clamp(min=torch.finfo(size.dtype).tiny)
            both.append(self._agreement(M, self.move(self.before, lambda x: speed * drift(x))))  # noqa: B023
        return max(both, key=lambda a: float(a.mean()))

    def _agreement(self, M: Tensor, moved: Tensor) -> Tensor:
        U, W = (z.to(self.start) for z in leading_subspace(M))
        target = _unit(self.start @ W.mT)  # in coordinates of the leading subspace
        along = lambda x: ((x @ U) * target).sum(-1)
        here = along(_unit(self.before))
        made, expected = along(self.after) - here, along(_unit(moved)) - here
        sums = torch.zeros(3, int(self.text[-1]) + 1, dtype=torch.float64, device=self.text.device)
        products = torch.stack([made * expected, made.square(), expected.square()]).double()
        product, a, b = sums.index_add(1, self.text, products)
        return (product / (a * b).sqrt().clamp(min=1e-30)).cpu()


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)


def measure_limit(
    recording: Recording,
    generator: torch.Generator,
    *,
    horizon: float = 1.0,
    steps: int = 1,
    rotations: int | None = None,
    method: str = "auto",
    progress: Callable[[float], None] | None = None,
) -> LimitApproach:
    """Progress of the tokens of a recording towards the limits of its layers, beside rotated weights and rivals.

    Layers that follow each other with the same weights are one flow: their targets are the limits of the tokens before
    the first of them.

    Args:
        recording: of at most a few dozen texts; the first 16 are followed.
        generator: of rotations and permutations, on the CPU.

    Other arguments:
        horizon: the time that a layer lasts, 1 in an encoder.
        steps: the number of steps in which the flow is followed, 1 for x + h M x as in an encoder.
        rotations: the largest number of joint rotations; by default 199, or 20 times the number of layers if that is
            more, so that a single layer can pass Holm's correction.
        method: "exact" or "geomloss" for W2; "auto" takes geomloss on CUDA.
        progress: is called with the share of the work that is done.

    Returns:
        A `LimitApproach`.
    """
    L, report = recording.layers, progress or (lambda share: None)
    rotations = max(199, 20 * L - 1) if rotations is None else rotations
    if recording.hides_tokens:
        return _nothing(recording, rotations)
    d, device = recording.attentions[0].dim, recording.device
    dtype = torch.float64 if d <= SMALL else torch.float32
    weights = [read_weights(A, dtype, device) for A in recording.attentions]
    groups = [next(j for j in range(L) if _same(weights[i], weights[j])) for i in range(L)]
    first = [next(j for j in range(i + 1) if len(set(groups[j : i + 1])) == 1) for i in range(L)]
    passages = [_read_passage(recording, l, first[l], horizon, steps, dtype) for l in range(L)]

    own = torch.stack([p.agreement(w) for p, w in zip(passages, weights)])
    facts = [spectrum(p.flow(w).M) for p, w in zip(passages, weights)]
    reductions = []
    for l in range(L):
        reductions.append(_reductions(recording, l, first[l], passages[l], weights[l], facts[l].direction, method))
        report(0.1 * (l + 1) / L)
    made, expected = torch.tensor(reductions, dtype=torch.float64).permute(2, 0, 1)

    def mean_agreement(laws: list[Weights]) -> Tensor:
        return torch.stack([p.agreement(law).mean() for p, law in zip(passages, laws)]).mean()

    head_draws = []
    for i in range(RIVAL_DRAWS if any(len(w.Q) > 1 for w in weights) else 0):
        orders = {g: _permutation(len(weights[g].Q), generator).to(device) for g in sorted(set(groups))}
        head_draws.append(mean_agreement([weights[l].permute(orders[groups[l]]) for l in range(L)]))
        report(0.1 + 0.1 * (i + 1) / RIVAL_DRAWS)
    layer_draws, known = [], {}
    for i in range(RIVAL_DRAWS if len(set(groups)) > 1 else 0):
        order = groups
        while [groups[j] for j in order] == groups:
            order = torch.randperm(L, generator=generator).tolist()
        for l, j in enumerate(order):
            if (l, groups[j]) not in known:
                known[l, groups[j]] = passages[l].agreement(weights[j]).mean()
        layer_draws.append(torch.stack([known[l, groups[j]] for l, j in enumerate(order)]).mean())
        report(0.2 + 0.1 * (i + 1) / RIVAL_DRAWS)
    components = [torch.linalg.eigh(p.start_cov)[1][:, -1:] for p in passages]
    return LimitApproach(
        agreement=own,
        rotated=_rotate(passages, weights, groups, own.mean(-1), rotations, generator, report),
        permuted_heads=torch.tensor(head_draws, dtype=torch.float64),
        other_layers=torch.tensor(layer_draws, dtype=torch.float64),
        principal_component=torch.stack(
            [p.linear_agreement(v @ v.mT, w) for p, v, w in zip(passages, components, weights)]
        ),
        value_direction=torch.stack([_value_agreement(*row) for row in zip(passages, weights, facts)]),
        reduction=made,
        flow_reduction=expected,
        case=torch.tensor([CASES.index(f.case) for f in facts]),
        dimension=torch.tensor([f.dimension for f in facts]),
        gap=torch.tensor([f.gap for f in facts], dtype=torch.float64),
        **_shapes(recording, rotations),
    )


def _value_agreement(passage: Passage, weights: Weights, limit: Spectrum) -> Tensor:
    """Agreement with the flow of sum_h O_h V_h; NaN if its leading subspace is that of M."""
    values = (weights.O @ weights.V).sum(0)
    U = leading_subspace(values)[0]
    overlap = float((U.mT @ limit.basis).square().sum()) / max(U.shape[1], limit.dimension)
    agreement = passage.linear_agreement(values, weights)
    return agreement if overlap < SAME_SUBSPACE else torch.full_like(agreement, torch.nan)


def _rotate(
    passages: list[Passage],
    weights: list[Weights],
    groups: list[int],
    own: Tensor,
    rotations: int,
    generator: torch.Generator,
    report: Callable[[float], None],
) -> Tensor:
    """Agreement (layers, draws) of jointly rotated weights; NaN where neither layer nor global test needs the draw."""
    L, d = len(passages), passages[0].start.shape[1]
    drawn = torch.full((L, rotations), torch.nan, dtype=torch.float64)
    exceedances, joint_exceedances = torch.zeros(L), 0
    for k in range(rotations):
        is_joint = joint_exceedances < EXCEEDANCES
        layers = [l for l in range(L) if is_joint or exceedances[l] < EXCEEDANCES]
        if not layers:
            break
        turned = {g: _rotation(d, generator).to(passages[0].start) for g in sorted({groups[l] for l in layers})}
        for l in layers:
            drawn[l, k] = passages[l].agreement(weights[l].rotate(turned[groups[l]])).mean()
        exceedances += drawn[:, k] >= own  # NaN exceeds nothing
        joint_exceedances += bool(is_joint and drawn[:, k].mean() >= own.mean())
        report(0.3 + 0.7 * (k + 1) / rotations)
    report(1.0)
    return drawn


def _rotation(d: int, generator: torch.Generator) -> Tensor:
    """An orthogonal matrix drawn uniformly."""
    Q, R = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64 if d <= SMALL else torch.float32))
    return Q * R.diagonal().sign()


def _permutation(n: int, generator: torch.Generator) -> Tensor:
    """A random permutation of n >= 2 heads that is not the identity; of one head, the identity."""
    while True:
        order = torch.randperm(n, generator=generator)
        if n < 2 or not torch.equal(order, torch.arange(n)):
            return order


def _same(a: Weights, b: Weights) -> bool:
    pairs = [(getattr(a, name), getattr(b, name)) for name in ("Q", "K", "V", "O", "beta")]
    return all(x.shape == y.shape and torch.equal(x, y) for x, y in pairs)


def _read_passage(
    recording: Recording, layer: int, first: int, horizon: float, steps: int, dtype: torch.dtype
) -> Passage:
    """The tokens that are followed through a layer: at most MAX_TOKENS, evenly spaced in every text."""
    T = min(MAX_TEXTS, recording.texts)
    lengths = [len(x) for x in recording.states[layer][:T]]
    rows = [_evenly(n, MAX_TOKENS // T).to(recording.device) for n in lengths]
    pick = lambda level: torch.cat([recording.states[level][t][rows[t]] for t in range(T)])
    cov = Cloud(torch.cat(recording.states[layer]).double()).moments()[1].to(dtype)
    start_cov = cov if layer == first else Cloud(torch.cat(recording.states[first]).double()).moments()[1].to(dtype)
    text = torch.repeat_interleave(torch.arange(T), torch.tensor([len(r) for r in rows])).to(recording.device)
    n = sum(lengths) / T
    max_shift = math.sqrt(min(cov.shape[0], 2 * math.log(n)))
    return Passage(
        directions(pick(first)).to(dtype),
        pick(layer).to(dtype),
        directions(pick(layer + 1)).to(dtype),
        start_cov,
        cov,
        text,
        max_shift,
        horizon,
        steps,
    )


def _evenly(n: int, count: int) -> Tensor:
    """At most `count` indices below n at equal distances."""
    return torch.arange(n) if n <= count else (torch.arange(count) * n) // count


def _reductions(
    recording: Recording, layer: int, first: int, passage: Passage, weights: Weights, Pi: Tensor, method: str
) -> list[tuple[float, float]]:
    """By how much W2 to the limit shrinks in every text, of itself: through the layer, and through its flow."""
    rows, flow = [], GaussianFlow(weights, passage.cov, passage.max_shift)  # in the tokens as they are now
    for t in range(min(MAX_TEXTS, recording.texts)):
        keep = _evenly(len(recording.special[t]), MAX_TRANSPORT_TOKENS).to(recording.device)
        start, x, after = (recording.states[level][t][keep].double() for level in (first, layer, layer + 1))
        target = directions(start @ Pi.mT)
        moved = passage.move(x.to(passage.start), flow.drift)
        distance, *ends = (w2(directions(cloud), target, method) for cloud in (x, after, moved))
        rows.append((1 - ends[0] / distance, 1 - ends[1] / distance) if distance > 1e-9 else (0.0, 0.0))
    return rows


def _shapes(recording: Recording, rotations: int) -> dict[str, Tensor]:
    A = recording.attentions
    k = [a.dim if a.Q is None else min(a.Q.shape[-2], a.dim) for a in A]
    return {
        "rank": torch.tensor(k),
        "heads": torch.tensor([a.heads for a in A]),
        "width": torch.tensor(A[0].dim),
        "max_rotations": torch.tensor(rotations),
    }


def _nothing(recording: Recording, rotations: int) -> LimitApproach:
    """The record of an encoder that the question does not apply to."""
    L = recording.layers
    texts, none, whole = torch.zeros(L, 0).double(), torch.zeros(0).double(), torch.zeros(L, dtype=torch.int64)
    gap = torch.zeros(L).double()
    return LimitApproach(
        texts, texts, none, none, texts, texts, texts, texts, whole, whole, gap, **_shapes(recording, rotations)
    )
