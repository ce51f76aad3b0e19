"""One forward pass of an encoder, overheard: its states at named points, and which places are tokens.

Hooks of our own read the states where they are made: the library's `output_hidden_states` replaces the last one by
the final norm in some models, and loses count when a layer is replaced.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attn_flow.base import checks
from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.hooks.attach import Clock, given, hidden, padded
from attn_flow.hooks.inputs import TokenBatch
from attn_flow.hooks.layout import Block, blocks

Point = tuple[str, int]  # a kind of point and the layer it belongs to

POINTS = {
    "resid": "the residual stream before, between and after the blocks (levels 0 to L)",
    "resid_pre": "a block's input",
    "resid_mid": "the residual stream between attention and feed-forward part",
    "resid_post": "a block's output",
    "attn_in": "what attention sees: the block's input, normalised in pre-norm models",
    "attn_out": "what attention adds to the residual stream",
    "ffn_out": "what the feed-forward part adds to it",
}
DEPTH = {"resid_mid": 0.5, "resid_post": 1.0}


def parse_points(points: str | Sequence[str], layers: int) -> list[Point]:
    """Point names as (kind, layer): a kind alone means every layer, "blocks.3.hook_mlp_out" means ("ffn_out", 3)."""
    parsed: list[Point] = []
    checks.instance("points", points, (str, Sequence), "a name such as 'resid', or several")
    for name in [points] if isinstance(points, str) else points:
        match = re.fullmatch(r"blocks\.(\d+)\.hook_(\w+)|(\w+?)(?:\.(\d+))?", str(name))
        kind = match and (match[2] or match[3]).replace("mlp", "ffn")
        if match is None or kind not in POINTS:
            raise ValueError(
                f"point {name!r}: expected blocks.<layer>.hook_<kind>, <kind> or <kind>.<layer>, {_kinds()}."
            )
        last = layers if kind == "resid" else layers - 1
        number = match[1] or match[4]
        if number is not None and int(number) > last:
            raise ValueError(f"point {name!r}: the model has {layers} layers; expected a number from 0 to {last}.")
        parsed += [(kind, i) for i in (range(last + 1) if number is None else [int(number)])]
    if not parsed:
        raise ValueError(f"points is empty, expected at least one of: {_kinds()}.")
    return parsed


def _kinds() -> str:
    return "with kind one of " + ", ".join(POINTS)


class Tape:
    """What the last forward pass left: `state((kind, layer))` (batch, n, d), and `mask` (batch, n) of real tokens.

    Made by `recording`, which see; `trajectory()` is the pass as a path without padding.

    Example:
        >>> from attn_flow.hooks import recording
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, tokenizer = tiny_bert()
        >>> with recording(model, "resid") as tape:
        ...     output = model(**tokenizer(["a b c"], return_tensors="pt"))
        >>> tape.state(("resid", 2)).shape, tape.mask.sum().item()
        (torch.Size([1, 5, 16]), 5)
    """

    def __init__(self, model: nn.Module, points: str | Sequence[str]) -> None:
        self.blocks = blocks(model)
        self.points = parse_points(points, len(self.blocks))
        self.names = points
        self.states: dict[Point, Tensor] = {}
        self.call: dict[str, Any] = {}
        self.clock = Clock(self.blocks)

    # --- hooks --------------------------------------------------------------------------------------------------

    def attach(self, stack: ExitStack) -> None:
        root = self.blocks[0].root
        stack.callback(root.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
        self.clock.attach(stack)
        wanted = {(kind if kind != "resid" else "resid_pre", i) for kind, i in self.points}
        if ("resid", len(self.blocks)) in self.points:
            wanted.add(("resid_post", len(self.blocks) - 1))
        wanted.discard(("resid_pre", len(self.blocks)))
        for block in {id(b.module): b for b in self.blocks}.values():
            firings = [b.index for b in self.blocks if b.module is block.module]
            for kind in POINTS:
                layers = {i for i in firings if (kind, i) in wanted}
                if layers:
                    stack.callback(self._listen(block, kind, layers).remove)

    def _listen(self, block: Block, kind: str, layers: set[int]) -> Any:
        arch, norm_placement = block.architecture, block.norm_placement
        if kind == "resid_mid" and norm_placement == "parallel":
            raise ValueError("resid_mid: attention and feed-forward part run in parallel here; there is no middle.")
        if kind == "ffn_out" and getattr(getattr(block.root, "config", None), "chunk_size_feed_forward", None):
            raise ValueError("ffn_out: the model chunks its feed-forward part; set config.chunk_size_feed_forward = 0.")

        def keep(x: Tensor) -> None:
            if self.clock.awake and self.clock.layer in layers:
                self.states[kind, self.clock.layer] = x

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            keep(given(args, kwargs))

        def after(_: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            keep(hidden(out))

        path, entering = {
            "resid_pre": ("", True),
            "resid_mid": (arch.norm1, False) if norm_placement == "post" else (arch.norm2, True),
            "resid_post": ("", False),
            "attn_in": (arch.attn, True),
            "attn_out": (arch.emit or arch.attn, False),
            "ffn_out": (arch.ffn, False),
        }[kind]
        if entering:
            return block[path].register_forward_pre_hook(before, with_kwargs=True)
        return block[path].register_forward_hook(after)

    def _begin(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(root.forward).bind_partial(*args, **kwargs).arguments
        self.call = {**bound, **bound.get("kwargs", {})}
        self.states = {}

    # --- reading ------------------------------------------------------------------------------------------------

    @property
    def _batch_second(self) -> bool:
        core = self.blocks[0].core
        return isinstance(core, nn.MultiheadAttention) and not core.batch_first

    def state(self, point: Point) -> Tensor:
        """One point of the last pass, (batch, n, d)."""
        kind, i = point
        if kind == "resid":
            kind, i = ("resid_pre", i) if i < len(self.blocks) else ("resid_post", i - 1)
        if (kind, i) not in self.states:
            raise ValueError(f"{kind} of layer {i} was not seen: run the model inside the `with` first.")
        return self.batch_first(self.states[kind, i])

    def batch_first(self, x: Tensor) -> Tensor:
        """A state as the model holds it as (batch, n, d), or back: torch's own encoder may hold (n, batch, d)."""
        return x.transpose(0, 1) if self._batch_second else x

    @property
    def mask(self) -> Tensor:
        """Which places of the last pass are tokens, (batch, n) bool."""
        x = self.state(self.points[0])
        padding = self.call.get("src_key_padding_mask")
        if padding is not None:
            return (~padding if padding.dtype == torch.bool else padding == 0).to(x.device)
        mask = self.call.get("attention_mask")
        if mask is None:
            self._refuse_silent_padding()
            return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if mask.ndim != 2 or tuple(mask.shape) != tuple(x.shape[:2]):
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}, expected (batch, n) = {tuple(x.shape[:2])}."
            )
        return mask.to(x.device) > 0

    def _refuse_silent_padding(self) -> None:
        ids, pad = (
            self.call.get("input_ids"),
            getattr(getattr(self.blocks[0].root, "config", None), "pad_token_id", None),
        )
        if isinstance(ids, Tensor) and ids.ndim == 2 and isinstance(pad, int) and ids.shape[1] > 1:
            padded = (ids[:, -1] == pad) & (ids[:, 0] != pad)
            if bool(padded.any()) and not bool(padded.all()):
                raise ValueError(
                    f"input_ids end in the padding id {pad} in some rows and there is no attention_mask, so the model "
                    "attends to padding; pass attention_mask (all ones if these are tokens)."
                )

    def kept(self, batch: TokenBatch, special: bool, tokenizer: Any = None) -> tuple[Tensor, Tensor]:
        """Places to record (batch, n), and which of them hold special tokens."""
        mask = self.mask
        if not special and batch.special is None and "pixel_values" not in self.call and tokenizer is None:
            raise ValueError("special=False needs to know the special tokens; pass special_tokens_mask in the inputs.")
        marks = self._special(batch, mask, tokenizer)
        keep = mask if special else mask & ~marks
        if not bool(keep.any(-1).all()):
            row = int((~keep.any(-1)).nonzero()[0])
            raise ValueError(f"text {batch.first + row} has no token left to record; drop it, or keep special tokens.")
        return keep, marks

    def trajectory(self, batch: TokenBatch | None = None, *, special: bool = True, tokenizer: Any = None) -> Trajectory:
        """The last pass as clouds x (points, texts, n, d): padding left out, texts to the left, then zeros."""
        ids = self.call.get("input_ids")
        batch = batch or TokenBatch({})
        keep, marks = self.kept(batch, special, tokenizer)
        lengths = keep.sum(-1)
        # A stable sort puts kept places first, in their order.
        places = (~keep).to(torch.uint8).argsort(dim=-1, stable=True)[:, : int(lengths.max())]
        kept = torch.arange(places.shape[1], device=keep.device) < lengths[:, None]
        home = self.state(self.points[0]).device
        in_place = bool((places == torch.arange(places.shape[1], device=home)).all())
        clouds = [_take(self.state(p).to(home), places, in_place) for p in self.points]
        x = torch.stack(clouds)
        if int(lengths.min()) < x.shape[-2]:
            x[:, ~kept] = 0.0
        strings = self.strings(batch, tokenizer)

        where = [row[:n] for row, n in zip(places.tolist(), lengths.tolist())]

        def rows(table: Any) -> list[list[Any]]:
            if in_place:
                return [list(row[: len(js)]) for row, js in zip(table, where)]
            return [[row[j] for j in js] for row, js in zip(table, where)]

        labels: dict[str, list] = {
            "text": list(range(batch.first, batch.first + len(places))),
            "position": where,
            "token": rows(strings),
            "special": rows(marks.tolist()),
        }
        if isinstance(ids, Tensor):
            labels["id"] = rows(ids.tolist())
        t = torch.tensor([i + DEPTH.get(kind, 0.0) for kind, i in self.points], dtype=torch.float64, device=home)
        return Trajectory(t, x, mask=kept, about=self.about(), labels=labels)

    def about(self) -> dict[str, Any]:
        root = self.blocks[0].root
        return {
            "model": getattr(getattr(root, "config", None), "_name_or_path", "") or type(root).__name__,
            "architecture": self.blocks[0].architecture.name,
            "layers": len(self.blocks),
            "points": [f"{kind}.{i}" for kind, i in self.points],
            "dtype": str(next(root.parameters()).dtype).removeprefix("torch."),
        }

    def _special(self, batch: TokenBatch, mask: Tensor, tokenizer: Any) -> Tensor:
        marks = torch.zeros_like(mask)
        if batch.special is not None:
            for b, row in enumerate(batch.special):
                marks[b, : len(row)] = torch.tensor(row[: mask.shape[1]], device=mask.device)
        elif isinstance(self.call.get("pixel_values"), Tensor):
            marks[:, : mask.shape[1] - self._grid(mask.shape[1])[0]] = True
        elif tokenizer is not None and isinstance(self.call.get("input_ids"), Tensor):
            ids = self.call["input_ids"]
            marks = torch.isin(ids, torch.tensor(tokenizer.all_special_ids, device=ids.device)).to(mask.device)
        return marks

    def _grid(self, n: int) -> tuple[int, int]:
        """Patches and their columns, of n tokens of an image: class and register tokens stand before the patches."""
        patch = getattr(self.blocks[0].root.config, "patch_size", None)  # type: ignore[union-attr]
        height, width = self.call["pixel_values"].shape[-2:]
        rows, columns = height // patch, width // patch  # type: ignore[operator]
        if rows * columns > n:
            raise ValueError(f"{n} tokens for {rows} x {columns} patches of {patch} pixels; expected at least as many.")
        return rows * columns, columns

    def strings(self, batch: TokenBatch, tokenizer: Any = None) -> list[list[str]]:
        """A name for every place of the last pass."""
        if batch.tokens is not None:
            return batch.tokens
        (texts, n), ids = self.mask.shape, self.call.get("input_ids")
        if isinstance(self.call.get("pixel_values"), Tensor):
            patches, columns = self._grid(n)
            names = ["[CLS]", *(f"[REG{i}]" for i in range(1, n - patches))][: n - patches]
            return [names + [f"patch {i // columns},{i % columns}" for i in range(patches)]] * texts
        if isinstance(ids, Tensor):
            return [tokenizer.convert_ids_to_tokens(r) if tokenizer else [str(i) for i in r] for r in ids.tolist()]
        return [[str(i) for i in range(n)]] * texts


def _take(x: Tensor, places: Tensor, in_place: bool) -> Tensor:
    return x[:, : places.shape[1]] if in_place else torch.take_along_dim(x, places[..., None], dim=1)


@contextmanager
def recording(model: nn.Module, points: str | Sequence[str] = "resid") -> Iterator[Tape]:
    """Listens to every forward pass of yours inside the `with`: the model runs as ever, gradients and all.

    model: a known encoder. points: what to keep, as in `record`. Yields a Tape: `tape.trajectory()` is the last pass.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, tokenizer = tiny_bert()
        >>> with recording(model, "attn_out.1") as tape:
        ...     output = model(**tokenizer(["a b c"], return_tensors="pt"))
        >>> tape.trajectory().x.shape, tape.trajectory().x.requires_grad
        (torch.Size([1, 1, 5, 16]), True)
    """
    with ExitStack() as stack:
        tape = Tape(model, points)
        stack.enter_context(padded(tape.blocks[0].root))
        tape.attach(stack)
        yield tape


def forward(model: nn.Module, tape: Tape, batch: TokenBatch) -> None:
    """One pass for the tape to hear."""
    device = next(model.parameters()).device
    # A cache of keys and values is of no use here, and a wrapped decoder refuses it.
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    model(**{name: t.to(device) for name, t in batch.inputs.items()}, **options)
    last = tape.state(tape.points[-1])
    # One number tells of most passes; padding may hold anything, and a sum may overflow.
    if not math.isfinite(float(last.sum())) and not bool(torch.isfinite(last[tape.mask]).all()):
        raise ValueError(
            f"the model gave NaN or infinite states in {tape.about()['dtype']} (texts from {batch.first}); load it "
            "with dtype=torch.float32."
        )
