"""The projections of a layer, and how the positions of tokens enter its scores.

With R_i a rotation by the angles of position i (RoPE), b a table (T5, MPNet), and c, p linear in a query and in a key
(DeBERTa), a token at i with q = Q x + b_Q scores a token at j with k = K y + b_K by

    beta (<R_i q, R_j k> + c(q; i, j) + p(k; i, j)) + b(i, j).

So queries and keys are rotated, or get one or two more coordinates for every position. A bias of the keys cancels in
the softmax, except where keys are rotated or multiplied with positions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from attn_flow.hooks.layout import Block, evaluation_mode

Projections = dict[str, tuple[Tensor, Tensor | None]]  # weight (heads, k, d) and bias (heads, k) of "q", "k" and "v"


class UnreadableWeightsError(ValueError):
    """Weights that are not floating-point numbers in memory: quantised, or on the meta device."""


# --- weights of the projections ---


def as_float(x: Any) -> Tensor:
    """A weight without gradient; half precision as float32, which holds it exactly."""
    # The method `weight` of torch.ao's quantised Linear is no tensor.
    if not isinstance(x, Tensor) or x.is_meta or not x.is_floating_point():
        raise UnreadableWeightsError(
            "a weight is quantised or on the meta device; load the model with its weights, unquantised."
        )
    x = x.detach()
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def read_linear(block: Block, path: str) -> tuple[Tensor, Tensor | None]:
    """Weight (out, in) and bias of a projection: a Linear, torch's MultiheadAttention, or a linear function.

    Modules other than Linear, such as GPT-2's Conv1D and LoRA adapters, are evaluated on unit vectors. One that
    computes something else than a weight and a bias is refused.
    """
    module: Any = block[path]
    if isinstance(module, nn.MultiheadAttention):
        if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
            raise ValueError("MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn is not self-attention.")
        return as_float(module.in_proj_weight), None if module.in_proj_bias is None else as_float(module.in_proj_bias)
    base = getattr(module, "base_layer", module)  # inside an adapter
    weight = as_float(getattr(base, "weight", None))  # quantised modules may have none
    if type(module).forward is nn.Linear.forward:
        return weight, None if module.bias is None else as_float(module.bias)
    inputs = base.nx if hasattr(base, "nx") else weight.shape[1]  # the weight of a Conv1D is transposed
    evaluated = copy.deepcopy(module).double()
    function = partial(type(module).forward, evaluated)  # without hooks, which are not weights
    unit_vectors = torch.eye(inputs, dtype=torch.float64, device=weight.device)
    x = torch.linspace(-1, 2, inputs, dtype=torch.float64, device=weight.device)[None]
    with evaluation_mode(evaluated):
        bias = function(torch.zeros_like(x))
        exact, output = function(unit_vectors) - bias, function(x)
    error = float((x @ exact + bias - output).norm() / output.norm())
    if error > 1e-5:
        raise ValueError(
            f"{block.path}.{path} is a {type(module).__name__} that computes something else than a weight and a bias "
            f"(error {error:.1e}): an adapter? Merge it into the weights first (peft: model.merge_and_unload())."
        )
    return exact.T.to(weight), bias[0].to(weight)


def relative_rounding(x: Tensor) -> float:
    """The relative rounding error of products of such a tensor, with TensorFloat-32 where torch may use it."""
    is_tf32 = x.is_cuda and x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return 2.0**-10 if is_tf32 else torch.finfo(x.dtype).eps


def require_tokens_only(block: Block) -> None:
    """ValueError for attention that shares its weights out among tokens and a learned sink, as GPT-OSS."""
    if hasattr(block.core, "sinks"):
        raise ValueError(f"{block.path}: its softmax has sinks besides the tokens, which Attention has not.")


def projections(block: Block) -> Projections:
    """The weights and biases of queries, keys and values; grouped keys are repeated for their queries."""
    require_tokens_only(block)
    arch, heads = block.architecture, block.heads

    def by_head(x: Tensor, name: str) -> Tensor:
        if arch.fused:
            return rearrange(x, f"{arch.fused} ... -> c h k ...", c=3, h=heads)["qkv".index(name)]
        x = x.unflatten(0, (-1, block.head_dim))
        return x if len(x) == heads else x.repeat_interleave(heads // len(x), 0)

    weights: Projections = {}
    for name, extra in (("q", arch.q_bias), ("k", ""), ("v", arch.v_bias)):
        weight, bias = read_linear(block, getattr(arch, name))
        head_bias = None if bias is None else by_head(bias, name)
        if extra:  # of DeBERTa, whose fused projection has no bias
            head_bias = as_float(block.module.get_parameter(extra)).view(heads, -1)
        weights[name] = (by_head(weight, name), head_bias)
    return weights


# --- positions ---


@dataclass(frozen=True, eq=False)
class Positions:
    """The positions 0 to count - 1 of one layer: what each does to the query and the key of a token there.

    Args:
        count: number of positions.
        angles: cos and sin (count, r) of the angles that rotate the first r coordinates, in pairs (l, l + r/2).
        key_bias: b_K, (heads, k).
        table: b, (heads, count, count), which is not multiplied by beta.
        terms: c(q; i, j) + p(k; i, j), (heads, count, count), as a function of queries and keys (heads, count, k).
    """

    count: int
    angles: tuple[Tensor, Tensor] | None = None
    key_bias: Tensor | None = None
    table: Tensor | None = None
    terms: Callable[[Tensor, Tensor], Tensor] | None = None

    def queries(self, q: Tensor, beta: Tensor) -> Tensor:
        """Queries (heads, n, k + more) with their positions, for scores that are multiplied by beta (heads, 1)."""
        n, parts = q.shape[-2], [self._rotate(q)]
        if self.table is not None:
            parts.append(self.table[:, :n] / beta[..., None])
        if self.terms is not None:
            q = pad(q, (0, 0, 0, self.count - n))
            parts += [self.terms(q, torch.zeros_like(q))[:, :n], self._unit_vectors(q[:, :n])]
        return torch.cat(parts, dim=-1)

    def keys(self, k: Tensor) -> Tensor:
        """Keys (heads, n, k + more) with their positions, from keys (heads, n, k) without bias."""
        k = k if self.key_bias is None else k + self.key_bias[:, None]
        n, parts = k.shape[-2], [self._rotate(k)]
        if self.table is not None:
            parts.append(self._unit_vectors(k).to(self.table))  # float32 for keys in half precision
        if self.terms is not None:
            k = pad(k, (0, 0, 0, self.count - n))
            parts += [self._unit_vectors(k[:, :n]), self.terms(torch.zeros_like(k), k).mT[:, :n]]
        return torch.cat(parts, dim=-1)

    def _unit_vectors(self, z: Tensor) -> Tensor:
        """A unit vector for every position, (heads, n, count)."""
        return torch.eye(z.shape[-2], self.count, dtype=z.dtype, device=z.device).expand(len(z), -1, -1)

    def _rotate(self, z: Tensor) -> Tensor:
        if self.angles is None:
            return z
        cos, sin = (angle[: z.shape[-2]] for angle in self.angles)
        r = cos.shape[-1]
        a, b = z[..., : r // 2], z[..., r // 2 : r]
        return torch.cat([z[..., :r] * cos + torch.cat([-b, a], dim=-1) * sin, z[..., r:]], dim=-1)


def read_positions(layers: Sequence[Block], n: int, keys: Tensor | None = None) -> list[Positions | None]:
    """The positions of n tokens, layer by layer; None where they do not enter the scores or it is not known how.

    Layers that add the same table share it. If `keys` with their bias are given, they set the dtype and no weights are
    read, so that they may be quantised.
    """
    positions: list[Positions | None] = []
    table: Tensor | None = None
    for block in layers:
        arch = block.architecture
        if not block.knows_positions:
            positions.append(None)
            continue
        weight, bias = projections(block)["k"] if keys is None else (as_float(keys), None)
        with torch.no_grad():
            if arch.angles is not None:
                cos, sin = (angle.to(weight) for angle in arch.angles(block, n))
                positions.append(Positions(n, (cos, sin), bias))
            elif arch.score_table is not None:
                own = arch.score_table(block, n).to(weight)
                table = own if table is None or not torch.equal(own, table) else table
                positions.append(Positions(n, table=table))
            else:
                positions.append(Positions(n, key_bias=bias, terms=partial(_score_terms, block)))
    return positions


@torch.no_grad()
def _score_terms(block: Block, q: Tensor, k: Tensor) -> Tensor:
    """The terms of the scores that depend on positions, before they are multiplied by beta."""
    assert block.architecture.score_terms is not None  # `Block.knows_positions` has neither angles nor a table
    dtype = next(p.dtype for p in block.module.parameters() if p.is_floating_point())
    return block.architecture.score_terms(block, q.to(dtype), k.to(dtype)).to(q) / block.beta


# --- queries, keys and scores of a pass ---


def project(block: Block, z: Tensor, name: str) -> Tensor:
    """The queries "q", keys "k" or values "v" (batch, n, heads, k) of tokens z, by the projections of the block itself.

    They are before any rotation. Grouped keys and values have fewer heads.
    """
    arch, module = block.architecture, block[getattr(block.architecture, name)]
    if isinstance(module, nn.MultiheadAttention):
        output = linear(z, module.in_proj_weight, module.in_proj_bias)
    else:
        output = module(z)
    if not arch.fused:
        return output.unflatten(-1, (-1, block.head_dim))
    heads = rearrange(output, f"b n {arch.fused} -> c b n h k", c=3, h=block.heads)["qkv".index(name)]
    extra = {"q": arch.q_bias, "v": arch.v_bias}.get(name, "")
    return heads + block.module.get_parameter(extra).view(block.heads, -1) if extra else heads


def attention_scores(block: Block, q: Tensor, k: Tensor, mask: Tensor, beta_factor: Tensor | None = None) -> Tensor:
    """The logits (batch, heads, n, n) of queries and keys (batch, n, heads, k), with positions; -inf where hidden.

    Args:
        mask: True for tokens, (batch, n).
        beta_factor: multiple (heads,) of the trained inverse temperature.
    """
    n, heads = q.shape[1], block.heads
    if block.positions and not block.knows_positions:
        raise ValueError(f"{block.path}: its scores have {block.positions}, which are not known here.")
    require_tokens_only(block)
    q, k = (z.transpose(1, 2) for z in (q, k.repeat_interleave(heads // k.shape[2], 2)))  # (batch, heads, n, k)
    beta = torch.full((heads, 1), block.beta, dtype=q.dtype, device=q.device)
    beta = beta if beta_factor is None else beta * beta_factor.to(q)[:, None]
    positions = read_positions([block], n, k)[0]
    if positions is not None:
        beta = beta.clamp_min(1e-30)  # a table is divided by it
        q = torch.stack([positions.queries(each, beta) for each in q])
        k = torch.stack([positions.keys(each) for each in k])
    scores = (beta[..., None] * q) @ k.mT
    i = torch.arange(n, device=q.device)
    is_visible = mask[:, None, None, :]
    if block.causal:
        is_visible = is_visible & (i <= i[:, None])
    if block.window is not None:
        is_visible = is_visible & ((i - i[:, None]).abs() <= block.window)
    return scores.masked_fill(~is_visible, -torch.inf)
