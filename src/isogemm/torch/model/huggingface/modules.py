"""transformers models: attention through their interface, rotary embeddings from exact tables, attention's forward.

Nothing of transformers is replaced but a check of names (`paged.let_through`). `isogemm` is one more name in the
registries of attention and mask functions, and a model gets it in a configuration of its own; modules change their
classes, as everywhere in `convert`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch

from ....contract.spec import Contract
from ....errors import OptionError
from ... import reductions
from ...attention.calls import attention, scaled_dot_product_attention
from ...attention.dropout import seeds_of
from ...operator import Tensor
from ..layers import Converted, RowNorm, is_awaited
from ..merging import Merging
from . import masks as masks
from .paged import PAGED, attend_paged, let_through, sinks_of, window_of

NAME = "isogemm"
BLOCK = 4096  # positions that are computed at once, always as many: a row's bits cannot depend on the table's length


def register() -> None:
    """Make ``attn_implementation="isogemm"`` known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    masks.bind()
    AttentionInterface.register(NAME, attend)
    AttentionInterface.register(PAGED, attend_paged)
    AttentionMaskInterface.register(NAME, masks.mask)
    let_through(NAME)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers' interface asks for: [batch, queries, heads, width], no weights.

    Raises OptionError: dropout outside of `sequence_seeds`, or something that changes the result and is not part of the
    definition.
    """
    if options.get("read_index") is not None:  # of continuous batching, from 5.19 on
        return attend_paged(module, query, key, value, attention_mask, dropout, scaling, **options)
    refuse_weights(options.get("output_attentions"))
    if options.get("position_bias") is not None:
        raise OptionError(
            "position_bias of attention", limit="none", value="one", nearest='attn_implementation="eager"'
        )
    contract = getattr(module, "contract", None)
    more: dict[str, Any] = {"sinks": sinks_of(module, options), "softcap": options.get("softcap")}
    if dropout:
        more |= {"dropout": dropout, "seeds": seeds_of(module.layer_idx, dropout)}
    if attention_mask is not None and attention_mask.dtype != torch.uint8:  # a user's own table: its range is found
        for name in [name for name, x in more.items() if x is not None]:
            raise OptionError(f"mask of attention with {name}", limit="[batch, keys]", value="a table", nearest="None")
        table = attention_mask[..., : key.shape[2]]
        y = scaled_dot_product_attention(query, key, value, table, scale=scaling, enable_gqa=True, contract=contract)
        return y.transpose(1, 2).contiguous(), None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    key, value = masks.behind_hidden(attention_mask, key, value)
    shown, rule, offset, start, stop = masks.visible(attention_mask, key.shape[2], query.shape[2], causal)
    limits: dict[str, Any] = {"mask": shown, "causal": rule, "offset": offset, "start": start, "stop": stop}
    y = attention(query, key, value, **limits, scale=scaling, contract=contract, **more)
    return y.transpose(1, 2).contiguous(), None


def refuse_weights(asked: Any) -> None:
    """Raise OptionError where a call asks for the weights of attention, which would come back as an empty tuple."""
    if asked:
        raise OptionError(
            "output_attentions of a converted model", limit="no weights of attention, which are never in memory",
            value=asked, nearest='the model with attn_implementation="eager", and convert without its part "attention"',
        )  # fmt: skip


class RotaryAttention(Merging):
    """An attention module of transformers with rotary embeddings: mixed into its class.

    ``o_proj(attention(rope(q_norm(q_proj(x))), rope(k_norm(k_proj(x))), v_proj(x)))``, with or without the two norms.
    """

    merges = ("q_proj", "k_proj", "v_proj")
    contract: Contract | None = None
    o_proj: Any
    config: Any
    training: bool
    head_dim: int
    layer_idx: int
    scaling: float
    attention_dropout: float

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """As transformers' own, with one rounding where it has several."""
        update = None if past_key_values is None else past_key_values.update
        return self._attended(hidden_states, position_embeddings, attention_mask, update, kwargs)

    def _attended(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        attention_mask: Tensor | None,
        update: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        assert position_embeddings is not None
        shape, width = hidden_states.shape[:-1], self.head_dim
        heads = (*shape, -1, width)
        cos, sin = (t[..., : width // 2].unsqueeze(2) for t in position_embeddings)
        query, key, value = (y.view(heads) for y in self._products(hidden_states))
        modules = vars(self)["_modules"]
        query, key = turned(query, key, modules.get("q_norm"), modules.get("k_norm"), cos, sin)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if update is not None:
            key, value = update(key, value, self.layer_idx)
        dropout = self.attention_dropout if self.training else 0.0
        call = _function(type(self), self.config._attn_implementation)
        if (cap := vars(self).get("attn_logit_softcapping")) is not None:
            kwargs["softcap"] = cap
        y, weights = call(self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(y.reshape(*shape, -1)), weights

    def __setstate__(self, state: Any) -> None:
        """Loaded, perhaps by a process that has converted nothing."""
        register()
        super().__setstate__(state)


class CachedAttention(RotaryAttention):
    """The same for transformers from 5.24 on, where a cache is called that, and is handed what attention is told."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """As transformers' own, which still takes the cache by its former name, too."""
        former = kwargs.pop("past_key_values", None)
        cache = former if cache is None else cache
        update = None if cache is None else partial(cache.update, kwargs=kwargs)  # one of pages changes them
        if hasattr(cache, "layer_to_allocator"):
            kwargs["window"] = window_of(cache, self)
        return self._attended(hidden_states, position_embeddings, attention_mask, update, kwargs)


def _function(cls: type, name: str) -> Any:
    """transformers' attention function of that name; its eager one stands in the module of the model."""
    if name == NAME:
        return attend
    if "flash" in name:
        raise OptionError("attention function", limit="one that takes masks", value=name, nearest='"sdpa"')
    modeling = sys.modules[cls.__module__]  # every model's module has both
    return modeling.ALL_ATTENTION_FUNCTIONS.get_interface(name, modeling.eager_attention_forward)


def turned(query: Tensor, key: Tensor, q_norm: Any, k_norm: Any, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Heads [batch, tokens, heads, width], normed if there are norms, then turned; the same bits in each way."""
    if q_norm is None and k_norm is None:
        return reductions.rope_pair(query, key, cos, sin)
    if _is_row_norm(q_norm, query) and _is_row_norm(k_norm, key):
        (eps, order), other = ((getattr(x, x.eps_name), x.grad_order) for x in (q_norm, k_norm))
        if (eps, order) == other:
            weights = q_norm._operand("weight"), k_norm._operand("weight")
            return reductions.norm_rope_pair(query, key, *weights, cos, sin, eps, grad_order=order)
    query, key = (x if norm is None else norm(x) for x, norm in ((query, q_norm), (key, k_norm)))
    return reductions.rope_pair(query, key, cos, sin)


def _is_row_norm(norm: Any, x: Tensor) -> bool:
    """Whether a norm is one of ours whose result has the dtype of x, and nothing waits for its call."""
    if not isinstance(norm, RowNorm) or not norm.is_whole():
        return False
    known: Any = norm
    weight = known._operand("weight")
    return not is_awaited(known) and (weight is None or weight.dtype == x.dtype)


class Rotary(Converted):
    """A rotary embedding of transformers: mixed into its class. Rows of a table, one for each position.

    `table` is [positions, width] float32: the cosines, then the sines, of half a head. `halves` is whether those are
    handed out as they are, which `RotaryAttention` takes, or doubled and in the model's dtype, as in transformers; with
    `once`, not doubled, as in gpt-oss; with `joined`, as complex numbers, as in Llama 4.
    """

    table: Tensor
    halves: bool = False
    once: ClassVar[bool] = False
    joined: ClassVar[bool] = False
    inv_freq: Tensor

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        """Cosines and sines for [batch, tokens] positions.

        Raises OptionError: a position that the table has no row for; on a CUDA device torch's own error about an index.
        """
        if position_ids.device.type == "cpu" and not torch.compiler.is_compiling() and position_ids.numel():
            last = int(position_ids.max())
            if last >= len(self.table):
                limit = f"below max_position_embeddings, {len(self.table)}"
                raise OptionError("position", limit=limit, value=last, nearest=len(self.table) - 1)
        cos, sin = torch.nn.functional.embedding(position_ids, self.table).chunk(2, -1)
        if self.joined:
            return torch.complex(cos, sin)
        if self.halves:
            return cos, sin
        if self.once:
            return cos.to(x.dtype), sin.to(x.dtype)
        return torch.cat((cos, cos), -1).to(x.dtype), torch.cat((sin, sin), -1).to(x.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moved with the module, but never to another dtype."""
        table = vars(self)["_buffers"].pop("table")
        found = super()._apply(fn, recurse)  # type: ignore[misc]
        vars(self)["_buffers"]["table"] = table.to(self.inv_freq.device)
        return found


def tables(inv_freq: Tensor, scaling: float, positions: int) -> Tensor:
    """[positions, 2 * n] float32 of cos and sin of position * inv_freq, times `scaling`; float64 until then."""
    import numpy as np

    w = inv_freq.detach().cpu().double().numpy()
    rows = []
    for first in range(0, positions, BLOCK):
        angles = np.arange(first, first + BLOCK, dtype=np.float64)[:, None] * w
        rows.append((np.concatenate((np.cos(angles), np.sin(angles)), 1) * scaling).astype(np.float32))
    return torch.from_numpy(np.concatenate(rows)[:positions].copy()).to(inv_freq.device)
