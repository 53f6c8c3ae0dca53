"""Masks of transformers models as attention takes them: which keys there are, and a rule, in one small tensor.

transformers asks for one mask per forward pass, and hands it through the model to the attention function; where it
prepares masks itself (`generate` with a compiled model) it lets only tensors of four dimensions through. A table of
[queries, keys] would be built and read for nothing where the rule is "keys up to my own position, of those that are no
padding". So a mask here is a uint8 tensor [batch, kind, rows, bytes]:

- kind is 1. rows is 1 without a causal rule, else ``offset + 2``: a stride of 0, no memory. bytes is 0 where all keys
  are there. Else 16 bytes hold int32 start and stop, the range of keys that are no padding; the bytes behind, if there
  are any, are one bool per key, since padding may have holes.
- kind is 2. rows are the queries, each with a header like that and a bool per key: any other rule.
- kind is 3: as 2, for a cache that has dropped keys, a sliding window's. Leaves are counted from a sequence's first
  key, so the keys that are left are put behind LEAF hidden ones, and the range starts among these where a leaf began. A
  leaf that is hidden, or the hidden part of one, gives nothing where its values are finite, so the bits are those of a
  cache that kept all keys.

All of it is computed on the device, without waiting for it. The range starts where padding ends, not where a window
begins: attention counts its leaves from there, and they must not move with the queries.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch

from ....contract.attention import LEAF
from ....errors import OptionError
from ...operator import Tensor

masking_utils: Any = None  # transformers' module, since `bind`: code that torch compiles cannot import a lazy package's
HEADER = 16  # bytes; a multiple of it keeps rows aligned


def bind() -> None:
    """Load what `mask` needs of transformers."""
    global masking_utils
    masking_utils = import_module("transformers.masking_utils")


class Visible(NamedTuple):
    """What attention is told: its arguments of these names; `causal` with `offset`."""

    mask: Tensor | None = None
    causal: bool = False
    offset: int | None = None
    start: Tensor | None = None
    stop: Tensor | None = None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    **options: Any,
) -> Tensor:
    """The mask function that transformers' interface asks for, with its arguments.

    Raises OptionError: the cache has dropped keys, and only the device knows how many.
    """
    if not isinstance(kv_offset, int) or kv_offset < 0:
        raise OptionError(
            "first key of the cache",
            limit="a number that the host knows, from which leaves of keys are counted",
            value=kv_offset,
            nearest="past_key_values=DynamicCache(config=model.config), or a StaticCache no longer than the window",
        )
    if torch._C._get_tracing_state() is not None:
        raise OptionError(
            "masks of a converted model under torch.jit.trace", limit="eager code, torch.compile or torch.export",
            value="a trace, which has no bytes of a tensor", nearest="torch.export.export(model, ...)",
        )  # fmt: skip
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "device": device}
    rule = batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask
    if kv_offset:
        return _shifted(masking_utils.sdpa_mask(*rule, **options), batch_size, kv_offset, attention_mask)
    keys = masking_utils.prepare_padding_mask(attention_mask, kv_length, 0)
    keys = None if keys is None else keys[:, :kv_length].to(device)
    if mask_function is masking_utils.bidirectional_mask_function:
        return _ranges(batch_size, kv_length, keys, None, None, device)
    if mask_function is masking_utils.causal_mask_function or mask_function is None:
        if isinstance(q_offset, int):
            causal = None if q_length == 1 and q_offset + 1 >= kv_length else q_offset
            return _ranges(batch_size, kv_length, keys, None, causal, device)
        if q_length == 1:  # one query sees the keys up to itself: that is a range
            return _ranges(batch_size, kv_length, keys, q_offset + 1, None, device)
    return _table(masking_utils.sdpa_mask(*rule, **options), batch_size, kv_length, keys)


def _ranges(batch: int, length: int, keys: Tensor | None, last: Any, causal: int | None, device: Any) -> Tensor:
    rows = 1 if causal is None else causal + 2
    if keys is None and last is None:
        return torch.empty(batch, 1, 1, 0, dtype=torch.uint8, device=device).expand(batch, 1, rows, 0)
    header = _header(batch, length, keys, last, device)
    if keys is not None:
        header = torch.cat((header, _bytes(keys)), -1)
    return header[:, None, None].expand(batch, 1, rows, header.shape[-1])


def _table(table: Tensor, batch: int, length: int, keys: Tensor | None) -> Tensor:
    return _packed(2, _header(batch, length, keys, None, table.device), table.expand(batch, 1, -1, length))


def _shifted(table: Tensor, batch: int, dropped: int, attention_mask: Tensor | None) -> Tensor:
    """The keys behind the first `dropped`, which stand behind LEAF hidden ones."""
    length = table.shape[3]
    first = torch.zeros(batch, dtype=torch.int64, device=table.device)
    if attention_mask is not None:
        place = torch.arange(attention_mask.shape[1], device=table.device)
        first = torch.where(attention_mask.to(table.device).bool(), place, len(place)).amin(-1)
    start = LEAF + (first - dropped).clamp(min=0, max=length) - (dropped - first).clamp(min=0) % LEAF
    header = _range(start, torch.full_like(start, LEAF + length))
    return _packed(3, header, torch.nn.functional.pad(table.expand(batch, 1, -1, length), (LEAF, 0)))


def _packed(kind: int, header: Tensor, shown: Tensor) -> Tensor:
    """A mask of bools [batch, 1, rows, keys] with a header [batch, 16] before each row."""
    batch, _, rows, _ = shown.shape
    packed = torch.cat((header[:, None, None].expand(batch, 1, rows, HEADER), _bytes(shown)), -1)
    return packed.expand(batch, kind, rows, packed.shape[-1])


def behind_hidden(packed: Tensor | None, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as a mask counts them: of kind 3 behind LEAF rows of zeros."""
    if packed is None or packed.shape[1] != 3:
        return key, value
    return torch.nn.functional.pad(key, (0, 0, LEAF, 0)), torch.nn.functional.pad(value, (0, 0, LEAF, 0))


def _header(batch: int, length: int, keys: Tensor | None, last: Any, device: Any) -> Tensor:
    """[batch, 16] bytes of int32 start, stop, 0, 0: the keys from the first to the last that is no padding."""
    if keys is None:
        start = torch.zeros(1, dtype=torch.int32, device=device)
        stop = start + length
    else:
        place = torch.arange(length, dtype=torch.int32, device=device)
        stop = torch.where(keys, place + 1, 0).amax(-1)
        start = torch.minimum(torch.where(keys, place, length).amin(-1), stop)
    if last is not None:
        stop = torch.minimum(stop, last.to(torch.int32))
        start = torch.minimum(start, stop)
    return _range(start, stop).expand(batch, HEADER).contiguous()


def _range(start: Tensor, stop: Tensor) -> Tensor:
    """[batch, 16] bytes of int32 start, stop, 0, 0."""
    none = torch.zeros_like(stop)
    return torch.stack((start, stop, none, none), -1).to(torch.int32).view(torch.uint8)


def _bytes(keys: Tensor) -> Tensor:
    """Bools as bytes, up to a multiple of HEADER."""
    return torch.nn.functional.pad(keys.to(torch.uint8), (0, -keys.shape[-1] % HEADER))


def visible(packed: Tensor | None, length: int, queries: int, is_causal: bool) -> Visible:
    """What a mask says, for so many keys and queries.

    Without a mask, `is_causal` counts as in transformers' own functions: the first query sees the first key.
    """
    if packed is None:
        return Visible(causal=is_causal and queries > 1, offset=0 if is_causal and queries > 1 else None)
    _, kind, rows, size = packed.shape
    offset = rows - 2 if kind == 1 and rows > 1 else None
    if size == 0:
        return Visible(causal=offset is not None, offset=offset)
    bounds = packed[:, 0, 0, :HEADER].view(torch.int32)[:, :2]
    start, stop = bounds.t().contiguous().unbind(0)  # side by side, as kernels read them: one copy for both
    table = None
    if size > HEADER:
        shown = packed[:, :1] if kind > 1 else packed[:, :1, :1]
        table = shown[..., HEADER : HEADER + length]
        # Inductor of torch 2.11 cannot lower the view; outside of a compiler a copy would be a kernel a layer.
        table = table.bool() if torch.compiler.is_compiling() else table.view(torch.bool)
    return Visible(table, offset is not None, offset, start, stop)
