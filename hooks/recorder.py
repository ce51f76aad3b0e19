"""Activations of a forward pass by name, in the vocabulary of TransformerLens.

Own hooks read the activations where they are computed: `output_hidden_states` replaces the last one by the final norm
in some models, and loses count when a layer is replaced.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.hooks.evaluation import active_factor
from attn_flow.hooks.inputs import TokenBatch
from attn_flow.hooks.layout import Block, LayerClock, blocks, distinct, hidden_states, input_states
from attn_flow.hooks.positions import attention_scores, project

if TYPE_CHECKING:
    import pandas

POINTS = {
    "hook_in": "residual stream before the block (batch, pos, d)",
    "attn.hook_in": "input of attention, normalised in pre-norm models (batch, pos, d)",
    "attn.q.hook_out": "queries, before any rotation (batch, pos, head, d_head)",
    "attn.k.hook_out": "keys, before any rotation (batch, pos, head, d_head); grouped keys have fewer heads",
    "attn.v.hook_out": "values (batch, pos, head, d_head)",
    "attn.hook_attn_scores": "logits, -inf where a token is hidden (batch, head, query pos, key pos)",
    "attn.hook_pattern": "attention weights (batch, head, query pos, key pos)",
    "attn.hook_out": "what attention adds to the residual stream (batch, pos, d)",
    "hook_resid_mid": "residual stream between attention and feed-forward part (batch, pos, d)",
    "mlp.hook_out": "what the feed-forward part adds to it (batch, pos, d)",
    "hook_out": "residual stream after the block (batch, pos, d)",
}
PER_HEAD = ("attn.q.hook_out", "attn.k.hook_out", "attn.v.hook_out")
PAIRS = ("attn.hook_attn_scores", "attn.hook_pattern")
DEPTH = {"hook_resid_mid": 0.5, "hook_out": 1.0}  # after the start of the block, which is at its index


class ActivationCache(Mapping[str, Tensor]):
    """The activations of the last forward pass by name, such as cache["blocks.0.attn.hook_pattern"].

    `recording` makes one. `POINTS` lists the names with their shapes. Queries, keys, values, scores and patterns are
    computed when they are read, from the input of attention and the modules of the model; in a wrapped layer they are
    those of its first evaluation. `mask` (batch, pos) is True for tokens.

    Example:
        >>> from attn_flow.hooks import recording
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, tokenizer = tiny_bert()  # or from_pretrained("bert-base-uncased")
        >>> with recording(model, ["hook_in", "attn.hook_pattern"]) as cache:
        ...     output = model(**tokenizer(["a b c"], return_tensors="pt"))
        >>> list(cache)
        ['blocks.0.hook_in', 'blocks.1.hook_in', 'blocks.0.attn.hook_pattern', 'blocks.1.attn.hook_pattern']
        >>> cache["blocks.1.hook_in"].shape, cache["blocks.0.attn.hook_pattern"].shape
        (torch.Size([1, 5, 16]), torch.Size([1, 2, 5, 5]))
    """

    def __init__(self, model: nn.Module, points: str | Sequence[str]) -> None:
        self.blocks = blocks(model)
        self.points = parse_points(points, len(self.blocks))
        self.clock = LayerClock(self.blocks)
        self._states: dict[str, Tensor] = {}
        self._factors: dict[int, Tensor | None] = {}
        self._call: dict[str, Any] = {}

    # --- hooks ---

    def attach(self, stack: ExitStack) -> None:
        """Listen to every forward pass until the stack is closed."""
        root = self.blocks[0].root
        if isinstance(root, nn.TransformerEncoder):  # it would pack padded batches into nested tensors
            stack.callback(setattr, root, "use_nested_tensor", root.use_nested_tensor)
            root.use_nested_tensor = False
        stack.callback(root.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
        self.clock.attach(stack)
        derived = (*PER_HEAD, *PAIRS)
        wanted = {
            (layer, "attn.hook_in" if point in derived else point) for layer, point in map(split_name, self.points)
        }
        for block in distinct(self.blocks):
            indices = [b.index for b in self.blocks if b.module is block.module]
            for point in POINTS:
                layers = {i for i in indices if (i, point) in wanted}
                if layers:
                    stack.callback(self._listen(block, point, layers).remove)

    def _listen(self, block: Block, point: str, layers: set[int]) -> Any:
        arch, placement = block.architecture, block.norm_placement
        if point == "hook_resid_mid" and placement == "parallel":
            raise ValueError(f"{point}: attention and feed-forward part run in parallel here; there is no middle.")
        if point == "mlp.hook_out" and getattr(getattr(block.root, "config", None), "chunk_size_feed_forward", None):
            raise ValueError(f"{point}: the feed-forward part is chunked; set config.chunk_size_feed_forward = 0.")

        def keep(x: Tensor) -> None:
            layer = self.clock.layer
            if self.clock.is_running and layer in layers:
                self._states[f"blocks.{layer}.{point}"] = x
                if point == "attn.hook_in":
                    self._factors[layer] = active_factor(block, layer)

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            keep(input_states(args, kwargs))

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            keep(hidden_states(output))

        path, is_input = {
            "hook_in": ("", True),
            "attn.hook_in": (arch.attn, True),
            "attn.hook_out": (arch.emit or arch.attn, False),
            "hook_resid_mid": (arch.norm1, False) if placement == "post" else (arch.norm2, True),
            "mlp.hook_out": (arch.ffn, False),
            "hook_out": ("", False),
        }[point]
        if is_input:
            return block[path].register_forward_pre_hook(before, with_kwargs=True)
        return block[path].register_forward_hook(after)

    def _begin(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = inspect.signature(root.forward).bind_partial(*args, **kwargs).arguments
        self._call = {**arguments, **arguments.get("kwargs", {})}
        self._states, self._factors = {}, {}

    # --- the cache ---

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.points:
            raise KeyError(f"{name!r} was not recorded; the cache has {', '.join(self.points[:4])}, ...")
        layer, point = split_name(name)
        if point in PER_HEAD:
            return project(self.blocks[layer], self._state(f"blocks.{layer}.attn.hook_in"), point.split(".")[1])
        if point in PAIRS:
            return self._pairs(layer, point)
        return self._state(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def __repr__(self) -> str:
        return f"ActivationCache({len(self)} activations of {self.blocks[0].architecture.name}: {self.points[0]}, ...)"

    @property
    def last_state(self) -> Tensor:
        """The activation that was recorded last, (batch, pos, d)."""
        return self._state(next(reversed(self._states), self.points[-1]))

    def _state(self, name: str) -> Tensor:
        if name not in self._states:
            raise ValueError(f"{name} was not computed: run the model inside the `with` first.")
        return self.batch_first(self._states[name])

    def _pairs(self, layer: int, point: str) -> Tensor:
        """Scores or weights of attention, (batch, head, query pos, key pos)."""
        block, z = self.blocks[layer], self._state(f"blocks.{layer}.attn.hook_in")
        if block.positions and self._call.get("position_ids") is not None:
            raise ValueError(f"{point}: the model was called with position_ids; expected its own positions 0, 1, ...")
        q, k = project(block, z, "q"), project(block, z, "k")
        scores = attention_scores(block, q, k, self.mask, self._factors[layer])
        return scores if point == "attn.hook_attn_scores" else scores.softmax(-1)

    def batch_first(self, x: Tensor) -> Tensor:
        """(batch, pos, d) from the model's own order, or back: torch's encoder may have (pos, batch, d)."""
        core = self.blocks[0].core
        is_second = isinstance(core, nn.MultiheadAttention) and not core.batch_first
        return x.transpose(0, 1) if is_second else x

    @property
    def mask(self) -> Tensor:
        """True for tokens of the last pass, (batch, pos)."""
        x = self.last_state
        padding = self._call.get("src_key_padding_mask")
        if padding is not None:
            return (~padding if padding.dtype == torch.bool else padding == 0).to(x.device)
        mask = self._call.get("attention_mask")
        if mask is None:
            return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if mask.ndim != 2 or tuple(mask.shape) != tuple(x.shape[:2]):
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}, expected (batch, n) = {tuple(x.shape[:2])}."
            )
        return mask.to(x.device) > 0

    # --- as other objects ---

    def kept_tokens(self, batch: TokenBatch, special: bool) -> tuple[Tensor, Tensor]:
        """Which positions to record (batch, pos), and which hold special tokens ([CLS], [SEP], class tokens)."""
        mask = self.mask
        marks = torch.zeros_like(mask)
        if batch.special is not None:
            for b, row in enumerate(batch.special):
                marks[b, : len(row)] = torch.tensor(row, device=mask.device)
        elif "pixel_values" in self._call:
            config: Any = self.blocks[0].root.config
            rows, columns = (size // config.patch_size for size in self._call["pixel_values"].shape[-2:])
            marks[:, : mask.shape[1] - rows * columns] = True  # class and register tokens come before the patches
        elif not special:
            raise ValueError("special=False needs to know the special tokens; pass special_tokens_mask in the inputs.")
        is_kept = mask if special else mask & ~marks
        if not bool(is_kept.any(-1).all()):
            empty = batch.first + int((~is_kept.any(-1)).nonzero()[0])
            raise ValueError(f"text {empty} has no token left to record; drop it, or keep special tokens.")
        return is_kept, marks

    def strings(self, batch: TokenBatch | None = None, tokenizer: Any = None) -> list[list[str]]:
        """A name for every position of the last pass: the token, its id, or the position."""
        if batch is not None and batch.tokens is not None:
            return batch.tokens
        (texts, n), ids = self.mask.shape, self._call.get("input_ids")
        if isinstance(ids, Tensor):
            return [tokenizer.convert_ids_to_tokens(r) if tokenizer else [str(i) for i in r] for r in ids.tolist()]
        return [[str(i) for i in range(n)]] * texts

    def trajectory(self, batch: TokenBatch | None = None, *, special: bool = True) -> Trajectory:
        """The last pass as clouds x (points, texts, n, d): without padding, tokens to the left, then zeros."""
        batch = batch or TokenBatch({})
        is_kept, marks = self.kept_tokens(batch, special)
        lengths = is_kept.sum(-1)
        order = (~is_kept).to(torch.uint8).argsort(dim=-1, stable=True)[:, : int(lengths.max())]
        columns = torch.arange(order.shape[1], device=order.device)
        mask, is_in_place = columns < lengths[:, None], bool((order == columns).all())
        states = [self[name].to(order.device) for name in self.points]
        if any(state.ndim != 3 for state in states):
            raise ValueError("a trajectory has one vector per token; read queries, keys, scores and patterns by name.")
        take = lambda x: x[:, : order.shape[1]] if is_in_place else torch.take_along_dim(x, order[..., None], dim=1)
        x = torch.stack([take(state) for state in states])
        if int(lengths.min()) < x.shape[-2]:
            x[:, ~mask] = 0.0
        positions = [row[:n] for row, n in zip(order.tolist(), lengths.tolist())]
        rows = lambda table: [[row[j] for j in kept] for row, kept in zip(table, positions)]
        labels: dict[str, list] = {
            "text": list(range(batch.first, batch.first + len(order))),
            "position": positions,
            "token": rows(self.strings(batch)),
            "special": rows(marks.tolist()),
        }
        if isinstance(self._call.get("input_ids"), Tensor):
            labels["id"] = rows(self._call["input_ids"].tolist())
        t = torch.tensor([depth_of(name) for name in self.points], dtype=torch.float64, device=x.device)
        return Trajectory(t, x, mask=mask, about=self.about(), labels=labels)

    def to_frame(self, name: str, tokenizer: Any = None) -> pandas.DataFrame:
        """One activation as a table of pandas, without padding.

        Args:
            name: of the activation.
            tokenizer: names the tokens; without it they have their ids.

        Returns:
            A row per token with the columns text, position, token and one for each coordinate; a row per token and head
            for queries, keys and values; a row per text, head, query and key position with the column value for scores
            and patterns.
        """
        import pandas

        x, mask, point = self[name].detach().cpu(), self.mask.cpu(), split_name(name)[1]
        if point in PAIRS:
            is_kept = (mask[:, None, :, None] & mask[:, None, None, :]).expand(x.shape) & ~x.isneginf()
            index = dict(zip(("text", "head", "query", "key"), is_kept.nonzero().T.numpy()))
            return pandas.DataFrame({**index, "value": x[is_kept].float().numpy()})
        where = mask.nonzero()
        strings = self.strings(None, tokenizer)
        tokens = [strings[text][position] for text, position in where.tolist()]
        frame = pandas.DataFrame({"text": where[:, 0].numpy(), "position": where[:, 1].numpy(), "token": tokens})
        values = x[mask]  # (tokens, d) or (tokens, heads, d_head)
        if values.ndim == 3:
            frame = frame.loc[frame.index.repeat(values.shape[1])].reset_index(drop=True)
            frame["head"] = list(range(values.shape[1])) * len(values)
            values = values.flatten(0, 1)
        return frame.join(pandas.DataFrame(values.float().numpy()))

    def about(self) -> dict[str, Any]:
        """The model and what was recorded, as plain JSON."""
        root = self.blocks[0].root
        dtype = next(p.dtype for p in root.parameters() if p.is_floating_point())
        return {
            "model": getattr(getattr(root, "config", None), "_name_or_path", "") or type(root).__name__,
            "architecture": self.blocks[0].architecture.name,
            "layers": len(self.blocks),
            "points": list(self.points),
            "dtype": str(dtype).removeprefix("torch."),
        }


def split_name(name: str) -> tuple[int, str]:
    """The layer and the point of a full name: "blocks.3.attn.hook_out" is (3, "attn.hook_out")."""
    _, layer, point = name.split(".", 2)
    return int(layer), point


def depth_of(name: str) -> float:
    """Where in the encoder an activation is, counted in layers."""
    layer, point = split_name(name)
    return layer + DEPTH.get(point, 0.0)


def parse_points(points: str | Sequence[str], layers: int) -> list[str]:
    """Full names of points: "attn.hook_out" means all layers, "resid" the residual stream at all levels 0 to L."""
    names: list[str] = []
    for name in [points] if isinstance(points, str) else points:
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        point = match[2] if match else name
        if point == "resid" and not match:
            names += [f"blocks.{i}.hook_in" for i in range(layers)] + [f"blocks.{layers - 1}.hook_out"]
        elif point not in POINTS:
            raise ValueError(
                f"point {name!r}, expected 'resid', or one of {', '.join(POINTS)}, also after 'blocks.0.'."
            )
        elif match and int(match[1]) >= layers:
            raise ValueError(f"point {name!r}: the model has {layers} layers, expected 0 to {layers - 1}.")
        else:
            names += [name] if match else [f"blocks.{i}.{point}" for i in range(layers)]
    if not names:
        raise ValueError(f"points is empty, expected at least one of: resid, {', '.join(POINTS)}.")
    return names


@contextmanager
def recording(model: nn.Module, points: str | Sequence[str] = "resid") -> Iterator[ActivationCache]:
    """Record your own forward passes inside a `with` block; the model runs as usual, with gradients.

    Args:
        model: a known encoder, or something that holds one.
        points: what to keep: names of POINTS for all layers, or with "blocks.0." before them for one; "resid" is the
            residual stream at all levels.

    Yields:
        An ActivationCache of the last pass.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, tokenizer = tiny_bert()  # or from_pretrained("bert-base-uncased")
        >>> with recording(model, "attn.q.hook_out") as cache:
        ...     output = model(**tokenizer(["a b c"], return_tensors="pt"))
        >>> cache["blocks.1.attn.q.hook_out"].shape  # batch, position, head, width
        torch.Size([1, 5, 2, 8])
        >>> frame = cache.to_frame("blocks.1.attn.q.hook_out", tokenizer)
        >>> frame.iloc[2, :4].astype(str).tolist()  # text, position, token, head
        ['0', '1', 'a', '0']
    """
    with ExitStack() as stack:
        cache = ActivationCache(model, points)
        cache.attach(stack)
        yield cache


def run_batch(model: nn.Module, cache: ActivationCache, batch: TokenBatch) -> None:
    """One forward pass of a batch, on the device of the model; ValueError if its states are not finite."""
    device = next(model.parameters()).device
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    model(**{name: t.to(device) for name, t in batch.inputs.items()}, **options)
    last = cache.last_state
    # The sum is a cheap first test. Padding may hold anything, and a sum may overflow.
    if not math.isfinite(float(last.sum())) and not bool(torch.isfinite(last[cache.mask]).all()):
        raise ValueError(
            f"the model gave NaN or infinite states in {cache.about()['dtype']} (texts from {batch.first}); load it "
            "with dtype=torch.float32."
        )
