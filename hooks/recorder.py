"""Activations of a forward pass by name, in the vocabulary of TransformerLens.

Own hooks read the activations where they are computed: `output_hidden_states` replaces the last one by the final norm
in some models, and loses count when a layer is replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attn_flow.dynamics.trajectory import Trajectory
from attn_flow.hooks.evaluation import read_settings
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
    those of its first evaluation. They are right where `self_check` passes. `mask` (batch, pos) is True for tokens.

    Example:
        >>> from attn_flow.hooks import recording
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> model, tokenizer = tiny_bert()  # or from_pretrained("bert-base-uncased")
        >>> with recording(model, ["blocks.0.hook_in", "blocks.1.attn.hook_pattern"]) as cache:
        ...     output = model(**tokenizer(["a b c"], return_tensors="pt"))
        >>> {name: tuple(activation.shape) for name, activation in cache.items()}
        {'blocks.0.hook_in': (1, 5, 16), 'blocks.1.attn.hook_pattern': (1, 2, 5, 5)}
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
        wanted = {
            (layer, "attn.hook_in" if point in (*PER_HEAD, *PAIRS) else point)
            for layer, point in map(split_name, self.points)
        }
        for block in distinct(self.blocks):
            for point in {point for _, point in wanted}:
                stack.callback(self._listen(block, point, wanted).remove)

    def _listen(self, block: Block, point: str, wanted: set[tuple[int, str]]) -> Any:
        arch, placement = block.architecture, block.norm_placement
        if point == "hook_resid_mid" and placement == "parallel":
            raise ValueError(f"{point}: attention and feed-forward part run in parallel here; there is no middle.")
        path, is_input = {
            "hook_in": ("", True),
            "attn.hook_in": (arch.attn, True),
            "attn.hook_out": (arch.emit or arch.attn, False),
            "hook_resid_mid": (arch.norm1, False) if placement == "post" else (arch.norm2, True),
            "mlp.hook_out": (arch.ffn, False),
            "hook_out": ("", False),
        }[point]

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
            layer = self.clock.layer
            if self.clock.is_running and (layer, point) in wanted:
                x = input_states(args, kwargs) if is_input else hidden_states(output)
                self._states[f"blocks.{layer}.{point}"] = x
                if point == "attn.hook_in":
                    self._factors[layer] = read_settings(self.blocks[layer])[1]

        if is_input:
            return block[path].register_forward_pre_hook(keep, with_kwargs=True)
        return block[path].register_forward_hook(keep, with_kwargs=True)

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
        past = self._call.get("past_key_values")
        if past is not None and past.get_seq_length() > z.shape[1]:  # by now it holds this pass too
            raise ValueError(f"{point}: keys of earlier tokens are in a cache; run whole texts, with use_cache=False.")
        q, k = project(block, z, "q"), project(block, z, "k")
        scores = attention_scores(block, q, k, self.mask, self._factors[layer])
        pairs = self.mask_of_pairs
        if pairs is not None:
            pairs = pairs if pairs.ndim == 2 else pairs.unflatten(0, scores.shape[:2])
            scores = scores.masked_fill(pairs, -torch.inf) if pairs.dtype == torch.bool else scores + pairs
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
            return padding.to(x.device) == 0  # also False, as a bool
        mask = self._call.get("attention_mask")
        if mask is None:
            return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if mask.ndim != 2 or tuple(mask.shape) != tuple(x.shape[:2]):
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}, expected (batch, n) = {tuple(x.shape[:2])}."
            )
        return mask.to(x.device) > 0

    @property
    def mask_of_pairs(self) -> Tensor | None:
        """The `mask` that torch's encoder got, which hides keys (True) or is added to the scores."""
        return self._call.get("mask")

    # --- as other objects ---

    def special_tokens(self, batch: TokenBatch) -> Tensor:
        """Which positions hold special tokens ([CLS], [SEP], class tokens), as far as it is known, (batch, pos)."""
        marks = torch.zeros_like(self.mask)
        if batch.special is not None:
            for b, row in enumerate(batch.special):
                marks[b, : len(row)] = torch.tensor(row, device=marks.device)
        elif "pixel_values" in self._call:
            config: Any = self.blocks[0].root.config
            patch = torch.tensor(config.patch_size)  # one number or two
            patches = int((torch.tensor(self._call["pixel_values"].shape[-2:]) // patch).prod())
            marks[:, : marks.shape[1] - patches] = True  # class and register tokens come before the patches
        return marks

    def strings(self, batch: TokenBatch | None = None, tokenizer: Any = None) -> list[list[str]]:
        """A name for every position of the last pass: the token, its id, or the position."""
        if batch is not None and batch.tokens is not None:
            return batch.tokens
        (texts, n), ids = self.mask.shape, self._call.get("input_ids")
        if isinstance(ids, Tensor):
            return [tokenizer.convert_ids_to_tokens(r) if tokenizer else [str(i) for i in r] for r in ids.tolist()]
        return [[str(i) for i in range(n)]] * texts

    def trajectory(self, batch: TokenBatch | None = None) -> Trajectory:
        """The last pass as clouds x (points, texts, n, d): without padding, tokens to the left, then zeros."""
        batch, is_token = batch or TokenBatch({}), self.mask
        if any(split_name(name)[1] in (*PER_HEAD, *PAIRS) for name in self.points):
            raise ValueError("a trajectory has one vector per token; read queries, keys, scores and patterns by name.")
        if not bool(is_token.any(-1).all()):
            raise ValueError(f"text {batch.first + int(is_token.any(-1).int().argmin())} has no token; drop it.")
        positions = [row.nonzero()[:, 0].tolist() for row in is_token.cpu()]
        lengths = [len(row) for row in positions]
        mask = torch.arange(max(lengths), device=is_token.device) < is_token.sum(-1, keepdim=True)
        states = [self[name].to(is_token.device) for name in self.points]
        if torch.equal(mask, is_token[:, : max(lengths)]):  # padding on the right, the usual case, needs no gathering
            x = torch.stack([state[:, : max(lengths)] for state in states])
        else:
            order = (~is_token).to(torch.uint8).argsort(dim=-1, stable=True)[..., None]
            x = torch.stack([state.take_along_dim(order, 1)[:, : max(lengths)] for state in states])
        for text, n in enumerate(lengths):
            x[:, text, n:] = 0.0
        kept = lambda table: [[row[j] for j in columns] for row, columns in zip(table, positions)]
        labels: dict[str, list] = {
            "text": list(range(batch.first, batch.first + len(positions))),
            "position": positions,
            "token": kept(self.strings(batch)),
            "special": kept(self.special_tokens(batch).tolist()),
        }
        if isinstance(self._call.get("input_ids"), Tensor):
            labels["id"] = kept(self._call["input_ids"].tolist())
        depths = [layer + DEPTH.get(point, 0.0) for layer, point in map(split_name, self.points)]
        t = torch.tensor(depths, dtype=torch.float64, device=x.device)
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
        axes, is_kept = ["text", "position"], mask
        if point in PAIRS:
            axes = ["text", "head", "query", "key"]
            is_kept = (mask[:, None, :, None] & mask[:, None, None, :]).expand(x.shape) & ~x.isneginf()
        elif point in PER_HEAD:
            axes, is_kept = ["text", "position", "head"], mask[..., None].expand(x.shape[:3])
        frame = pandas.DataFrame(is_kept.nonzero().numpy(), columns=axes)
        values = pandas.DataFrame(x[is_kept].float().numpy())
        if point in PAIRS:
            return frame.assign(value=values[0])
        strings = self.strings(None, tokenizer)
        frame.insert(2, "token", [strings[text][position] for text, position in zip(frame["text"], frame["position"])])
        return frame.join(values)

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


def parse_points(points: str | Sequence[str], layers: int) -> list[str]:
    """Full names of points: "attn.hook_out" means all layers, "resid" the residual stream at all levels 0 to L."""
    names = [points] if isinstance(points, str) else list(points)
    choices = {point: [f"blocks.{i}.{point}" for i in range(layers)] for point in POINTS}
    choices |= {name: [name] for full_names in choices.values() for name in full_names}
    choices["resid"] = [*choices["hook_in"], f"blocks.{layers - 1}.hook_out"]
    if not names or not set(names) <= set(choices):
        raise ValueError(
            f"points = {points!r}, expected 'resid', or some of {', '.join(POINTS)}, also of one layer: 'blocks.0.' to "
            f"'blocks.{layers - 1}.' before them."
        )
    return [full_name for name in names for full_name in choices[name]]


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
    # Padding may hold anything. The sum is finite if all are, in float64; it takes less time than asking each.
    if not bool(cache.last_state[cache.mask].sum(dtype=torch.float64).isfinite()):
        raise ValueError(
            f"the model gave NaN or infinite states in {cache.about()['dtype']} (texts from {batch.first}); load it "
            "with dtype=torch.float32."
        )
