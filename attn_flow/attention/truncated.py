"""The drift of a cold cloud over the keys that matter, with a bound on its error: `near` for every head and cloud."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_flow.attention.projections import ALL, Projections
from attn_flow.averages import compiled, costs, dense, fourier, near
from attn_flow.averages.patches import share_seen
from attn_flow.base.words import introduce

# The share of a query's weights that may be left out where nothing else is asked: what the dtype hardly resolves.
TRUNCATION = {torch.float32: 1e-6, torch.float64: 1e-12}
LONGEST = 1e15  # tokens and, squared, logits beyond which bounds in float32 leave its range
FAINT = 50.0  # logits beyond which most weights underflow in float32


@dataclass(frozen=True, eq=False, repr=False)
class Truncated:
    """A drift (..., n, d) over the keys that matter: |drift - F| <= error (..., n), rounding to its dtype aside.

    pairs: the share looked at.
    """

    drift: Tensor
    error: Tensor
    pairs: float

    def __repr__(self) -> str:
        return introduce(self, "drift", "error", "pairs")


def over_near_keys(
    p: Projections, x: Tensor, y: Tensor, bias: Tensor | None, first: int = 0, always: bool = False
) -> Truncated | None:
    """The drift of `against_cloud` with at most `truncation` of any query's weights left out; None if all matter."""
    tolerance = p.truncation if p.truncation is not None else TRUNCATION.get(x.dtype, 0.0)
    masked = p.causal or not p.self_attention
    if tolerance == 0 or not p.shared_out or (p.cold and masked):
        return None
    if torch.is_autocast_enabled(x.device.type):  # it would round what the bounds are made of
        return None
    prices = _Prices.of(p, x, y)
    # At most: whether float32 will do was chosen before, or it is not known yet.
    double = x.dtype == torch.float64 or p.precise is not False
    if not always and prices.all_pairs(double, faint=True) < prices.least:
        return None
    clouds = [x] if x is y else [x, y]
    longest = math.sqrt(p.dim) * max(dense.largest(z) for z in clouds)
    if not (longest < LONGEST and (logits := float(p.logit_bound(longest))) < LONGEST**2):
        return None
    if logits > dense.LOGIT_RANGE:  # tokens may be shorter than that
        logits = float(p.logit_bound(max(float(dense.lengths(z).amax()) for z in clouds)))
    everything = prices.all_pairs(x.dtype == torch.float64 or logits > dense.LOGIT_RANGE, logits > FAINT)
    if not always and everything < prices.least:
        return None
    # The compiled kernel may be faster whatever share of pairs it looks at.
    always = always or (prices.kernel and prices.near(1.0) < everything)
    most = 1.0 if always else min(1.0, everything / prices.pairs(1.0))
    batch = dense.broadcast(x.shape[:-2], y.shape[:-2], p.batch, torch.Size(()) if bias is None else bias.shape[:-2])
    by_series = _ways(p, x, y, bias, tolerance, batch, prices, everything, always)
    if by_series is None:
        return None
    series = iter(by_series)
    masks: dict[str, Any] = {"causal": p.causal, "exclude_self": not p.self_attention, "first": first}
    exact = p if p.cold else p.double
    x64 = x if p.cold else x.double()
    y64 = x64 if x is y else y.to(x64.dtype)
    total, error, pairs = x.new_zeros(*batch, *x.shape[-2:]), x64.new_zeros(*batch, x.shape[-2]), 0.0
    for h in range(p.heads):
        head = slice(h, h + 1)
        found = []
        for q, k, b, v in _clouds(exact, x64, y64, bias, head, batch, p.values(y, head)):
            options: dict[str, Any] = {"key_bias": b, "most": most}
            if p.cold:
                one = near.hardmax(q, k, v, **options)
            elif next(series):
                one = fourier.softmax(q, k, v, tolerance=tolerance, key_bias=b, scale=p.scale)
            else:
                one = near.softmax(q, k, v, tolerance=tolerance, scale=p.scale, **options, **masks)
            if one is None:
                return None
            found.append(one)
        average = torch.stack([one.average for one in found]).reshape(*batch, 1, x.shape[-2], -1)
        total += p.summed(average, head)
        # The average of what was left out is no farther from that of the rest than two radii of the values.
        v = p.values(y, head)[..., 0, :, :]
        radius = (v - v.mean(-2, keepdim=True)).norm(dim=-1).amax(-1) * p.output_norm(head)
        error += 2 * torch.stack([one.left_out for one in found]).reshape(error.shape) * radius[..., None]
        pairs += sum(one.pairs for one in found) / (len(found) * p.heads)
    return Truncated(p.with_constant(total), error.to(x.dtype), pairs)


@dataclass(frozen=True)
class _Prices:
    """What the ways cost for one head and cloud of m queries and n keys, and which there are."""

    known: costs.Costs
    m: int
    n: int
    width: int
    double: bool
    cold: bool
    causal: bool
    masked: bool
    kernel: bool
    patched: bool
    on_a_circle: bool

    @classmethod
    def of(cls, p: Projections, x: Tensor, y: Tensor) -> _Prices:
        masked = p.causal or not p.self_attention
        return cls(
            known=costs.here(),
            m=x.shape[-2],
            n=y.shape[-2],
            width=p.key_width + p.value_width,
            double=x.dtype == torch.float64,
            cold=p.cold,
            causal=p.causal,
            masked=masked,
            kernel=not p.cold
            and p.self_attention
            and compiled.serves(max(p.key_width, p.value_width), x.dtype, x.device),
            patched=p.key_width <= near.WIDTH,
            on_a_circle=p.key_width == 2 and not (p.cold or masked),
        )

    def all_pairs(self, double: bool, faint: bool) -> float:
        return self.known.dense(self.m, self.n, self.width, double, self.cold, self.causal, faint)

    def series(self, terms: int) -> float:
        return self.known.series(self.m, self.n, terms) if terms else math.inf

    @property
    def patches(self) -> float:
        return self.known.patches(self.m, self.n, self.kernel) if self.patched else math.inf

    @property
    def foreseen(self) -> float:
        """Patches, and before them a look at what is near."""
        return self.patches + self.known.look * self.n

    @property
    def least(self) -> float:
        """What any way but all pairs takes at least."""
        return min(self.foreseen, self.series(1) if self.on_a_circle else math.inf)

    def pairs(self, share: float, precise: float = 0.0) -> float:
        """A share of the pairs, once patches are there; precise: how much of it is in float64 whatever the dtype."""
        double = 1.0 if self.double else precise
        return share * self.m * self.n * self.known.near_pair(self.width, double, self.masked, self.cold, self.kernel)

    def near(self, share: float, precise: float = 0.0) -> float:
        return self.patches + self.pairs(share, precise)


def _ways(
    p: Projections,
    x: Tensor,
    y: Tensor,
    bias: Tensor | None,
    tolerance: float,
    batch: torch.Size,
    prices: _Prices,
    everything: float,
    always: bool,
) -> list[bool] | None:
    """Head by head and cloud by cloud, whether a Fourier series is the way rather than near keys, by what each costs.

    None where all pairs take less time, unless `always`. everything: what these cost.
    """
    if always and not prices.on_a_circle:
        return [False] * (p.heads * math.prod(batch))
    window = 0.0 if p.cold else math.log(prices.n / tolerance)
    by_series, gained = [], 0.0
    for h in range(p.heads):
        for q, k, b, _ in _clouds(p, x, y, bias, slice(h, h + 1), batch):
            terms = fourier.fits(q, k, p.scale, tolerance, x.dtype) if prices.on_a_circle else 0
            series = prices.series(terms)
            if always:
                by_series.append(series < everything)
                continue
            skipping = math.inf
            if prices.foreseen < min(series, everything):
                skipping = prices.near(*share_seen(q, k, b, p.scale, window, paired=not (prices.kernel or p.cold)))
            if min(series, skipping) == math.inf:
                return None
            by_series.append(series < skipping)
            gained += everything - min(series, skipping)
    return by_series if always or gained > 0 else None


def _clouds(
    p: Projections,
    x: Tensor,
    y: Tensor,
    bias: Tensor | None,
    head: slice,
    batch: torch.Size,
    v: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
    """Queries (n, k), keys, key bias (n,) and what v (..., 1, n, v) is given, of one head, cloud by cloud.

    Queries that are the keys are the same tensor.
    """

    def each(z: Tensor) -> Tensor:
        return z.expand(*batch, 1, *z.shape[-2:]).reshape(-1, *z.shape[-2:])

    k = each(p.keys(y, head))
    same = x is y and p.same_queries_and_keys
    q = k if same else each(p.queries(x, head))
    b = None if bias is None else each(bias[..., head if bias.shape[-2] > 1 else ALL, :, None])[..., 0]
    v = k if v is None else each(v)
    for i in range(len(k)):
        one = k[i]
        yield one if same else q[i], one, None if b is None else b[i], v[i]
