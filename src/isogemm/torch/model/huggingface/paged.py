"""Attention over transformers' paged cache, as its continuous batching calls it: requests side by side in one row.

Each request is a call of `attention` of its own, over its own keys in their order, so a request's bits do not depend on
which others are served with it, on how its prompt is cut into chunks, or on the pages that its keys lie in.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from ....contract.attention import LEAF
from ....errors import OptionError
from ...attention.calls import attention
from ...operator import Tensor

PAGED = "paged|isogemm"  # transformers before 5.19 puts its prefix before the name that a model has


def attend_paged(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function of continuous batching: [1, queries, heads, width] of all requests, no weights.

    Raises OptionError: a call outside of continuous batching, a table of blocks, or something that is not part of the
    definition.
    """
    cache = options.get("cache")
    if cache is None and options.get("read_index") is None:
        raise OptionError(
            "attention over pages", limit="calls of continuous batching", value="a call without its cache",
            nearest='model.set_attn_implementation("isogemm")',
        )  # fmt: skip
    if dropout:
        raise OptionError("attention's dropout", limit="0", value=dropout, nearest="model.eval(), or dropout 0")
    if options.get("block_table") is not None:
        raise OptionError("block_table of attention over pages", limit="none", value="one", nearest="paged|eager")
    told: dict[str, Any] = {"scale": scaling, "contract": getattr(module, "contract", None)}
    told |= {"sinks": sinks_of(module, options), "softcap": options.get("softcap")}
    told_window = options.get("window", options.get("sliding_window"))
    window = (told_window or 0) if cache is None else window_of(cache, module)
    key, value, ends = _gathered(module, cache, key, value, options)
    last = options["position_ids"][0].tolist() if window else None
    y = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device=query.device)
    queries, keys = options["cu_seq_lens_q"].tolist(), ends.tolist()
    for i, j, a, b in zip(queries, queries[1:], keys, keys[1:], strict=False):
        if i < j:
            q, k, v = query[:, :, i:j], key[:, :, a:b], value[:, :, a:b]
            limits: dict[str, Any] = {"causal": True}
            if last is not None:
                k, v, limits = _windowed(k, v, j - i, last[j - 1] + 1, window)
            y[:, :, i:j] = attention(q, k, v, **told, **limits)
    return y.transpose(1, 2).contiguous(), None


def window_of(cache: Any, module: Any) -> int:
    """Keys that a layer's queries see at most, by a cache of pages; 0 where that is all of them."""
    if hasattr(cache, "sliding_windows"):  # transformers before 5.18, in which 1 stands for none
        window: int = cache.sliding_windows[module.layer_idx]
        return window if window > 1 else 0
    return getattr(cache.layer_to_allocator[module.layer_idx], "sliding_window", 0)


def _gathered(
    module: Any, cache: Any, key: Tensor, value: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of all requests [1, heads, keys, width], and where each request's end.

    They come with what pages hold from 5.24 on, and before that the attention function gets them: from 5.19 on as they
    are here, with `options` changed to this layer's, and before that with heads behind keys.
    """
    if cache is None:
        return key, value, options["cu_seq_lens_k"]
    if "kwargs" in inspect.signature(cache.update).parameters:
        return *cache.update(key, value, module.layer_idx, kwargs=options), options["cu_seq_lens_k"]
    found = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=options["read_index"],
        write_index=options["write_index"],
    )
    key, value = (x.transpose(0, 1).unsqueeze(0) for x in found)
    ends = options["cu_seq_lens_k"]
    kind = "sliding_attention" if window_of(cache, module) else "full_attention"
    return key, value, ends[kind] if isinstance(ends, dict) else ends


def let_through(name: str) -> None:
    """Let transformers batch requests of models with the attention function of this name.

    From 5.19 on it takes the names of its own alone, where it switches others to what batches, as this one does.
    """
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    check: Any = getattr(ContinuousBatchingManager, "switch_to_cb_friendly_attn", None)
    if check is None or hasattr(check, "__wrapped__"):
        return
    if "auto_switch_to_flash" not in inspect.signature(check).parameters:  # before 5.19
        return

    @functools.wraps(check)
    def checked(self: Any, model: Any, *args: Any, **options: Any) -> Any:
        if model.config._attn_implementation != name:
            check(self, model, *args, **options)

    ContinuousBatchingManager.switch_to_cb_friendly_attn = checked


def sinks_of(module: Any, options: dict[str, Any]) -> Tensor | None:
    """The sinks that an attention module hands over, which have to be its own.

    Raises OptionError of others, of which `convert` has seen nothing.
    """
    sinks: Tensor | None = options.get("s_aux")
    if sinks is not None and sinks is not getattr(module, "sinks", None):
        raise OptionError("s_aux of attention", limit="the module's sinks", value="others", nearest="eager attention")
    return sinks


def _windowed(key: Tensor, value: Tensor, queries: int, length: int, window: int) -> tuple[Tensor, Tensor, Any]:
    """A request's keys, of which the cache has dropped those before its window, and what its queries see.

    Leaves are counted from the first key of the request, dropped or not: the keys stand behind LEAF hidden ones, as in
    `masks`.
    """
    dropped = length - key.shape[2]
    place = torch.arange(dropped, length, device=key.device)
    own = torch.arange(length - queries, length, device=key.device)[:, None]
    shown = (place <= own) & (place > own - window)
    if not dropped:
        return key, value, {"mask": shown}
    front = (0, 0, LEAF, 0)
    key, value = torch.nn.functional.pad(key, front), torch.nn.functional.pad(value, front)
    return key, value, {"mask": torch.nn.functional.pad(shown, (LEAF, 0)), "start": LEAF - dropped % LEAF}
