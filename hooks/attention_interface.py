"""An attention implementation for transformers: `attn_implementation="attn_flow"`.

It serves one evaluation of attention, at another temperature or by a surrogate. It never sees the residual stream, so
the flow of several evaluations is `replace_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Surrogate = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]


def register_attention() -> None:
    """Make the attention implementation "attn_flow" known to transformers; it takes `beta_factor` and `surrogate`.

    Afterwards `from_pretrained(..., attn_implementation="attn_flow")` and `model.set_attn_implementation("attn_flow")`
    accept it. Without further arguments the model computes what it does with "sdpa". transformers warns for models that
    do not use its attention interface (DeBERTa, MPNet) and leaves them unchanged; `scale_beta` works for all. It needs
    transformers 5.

    Returns:
        Nothing. A forward pass then takes two more keyword arguments:
        beta_factor, a multiple of the trained inverse temperature: a number, one per head, or (layers, heads) where
        attention modules have a `layer_idx`;
        surrogate, a function of queries, keys, values (batch, heads, n, d), mask and beta in place of softmax
        attention, which returns the averages (batch, heads, n, d). The mask is None, or True for visible keys.

    Example:
        >>> from attn_flow.hooks.demo import tiny_bert
        >>> register_attention()
        >>> model, tokenizer = tiny_bert()  # or from_pretrained("bert-base-uncased", attn_implementation="attn_flow")
        >>> model.set_attn_implementation("attn_flow")
        >>> inputs = tokenizer(["a b c"], return_tensors="pt")
        >>> colder = model(**inputs, beta_factor=2.0).last_hidden_state
        >>> bool((colder != model(**inputs).last_hidden_state).any())
        True
    """
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5:
        raise RuntimeError(
            f"transformers {transformers.__version__} does not pass beta_factor to the attention of every model; "
            "install transformers 5, or use scale_beta and replace_attention."
        )
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register("attn_flow", flow_attention)
    AttentionMaskInterface.register("attn_flow", sdpa_mask)  # without it padding would be attended to


def flow_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    beta_factor: float | Tensor | Sequence[Any] = 1.0,
    surrogate: Surrogate | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The averages (batch, n, heads, d) of values (batch, heads, n, d), and no weights, as transformers calls it.

    Keys and values may have fewer heads. `scaling` is the trained inverse temperature, 1/sqrt(d) by default.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    factor = torch.as_tensor(beta_factor, dtype=query.dtype, device=query.device)
    if factor.ndim == 2:
        factor = factor[module.layer_idx]  # type: ignore[index]
    if factor.ndim > 0 and factor.shape != query.shape[1:2]:
        raise ValueError(f"beta_factor has {tuple(factor.shape)} numbers for {query.shape[1]} heads.")
    for name in ("s_aux",) if surrogate is None else ("s_aux", "softcap", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(f"{type(module).__name__} attends with {name}, not computed here; use scale_beta instead.")
    query = query * factor.view(-1, 1, 1)
    if surrogate is None:
        options |= {"scaling": scaling, "is_causal": is_causal}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if attention_mask is None and is_causal and query.shape[2] > 1:  # no mask, since torch has a causal kernel
        attention_mask = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    key, value = (z.repeat_interleave(query.shape[1] // z.shape[1], 1) for z in (key, value))
    beta = query.shape[-1] ** -0.5 if scaling is None else scaling
    return surrogate(query, key, value, attention_mask, beta).transpose(1, 2).contiguous(), None
