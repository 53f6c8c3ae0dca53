"""Attention whose bits depend on a query and the keys that it sees: `attention`, and torch's own signature for it.

The executable definition is `isogemm.contract.attention`; docs/attention.md is the user's page.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ...base import arguments
from ...contract.spec import ContractLike
from ...errors import DeviceError, DTypeError, LayoutError, LimitError, OptionError, ShapeError
from ..arguments import autocast, contract_text
from ..device import DTYPES
from ..operator import Tensor, is_compiling
from .dropout import attend_with_dropout
from .ops import attend
from .sinks import attend_with_sinks

# Of a scale and of a cap: float32 holds what is made of them.
LEAST, MOST = 2.0**-149, torch.finfo(torch.float32).max / 2


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    offset: int | None = None,
    start: Tensor | int | None = None,
    stop: Tensor | int | None = None,
    scale: float | None = None,
    contract: ContractLike | None = None,
    out_dtype: Any = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seeds: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q @ k.T + mask) @ v, for each head.

    Parameters
    ----------
    q : tensor [b, hq, tq, d]
        float32, bfloat16 or float16 of any strides, on the CPU or a CUDA device. Under autocast, float32 becomes
        autocast's dtype.
    k, v : tensor [b, hkv, tk, d] and [b, hkv, tk, dv]
        hq is a multiple of hkv: query head h reads head ``h // (hq // hkv)``. On a CUDA device d and dv are 1 to 256.
    mask : tensor that broadcasts to [b, hq, tq, tk], optional
        bool, where False hides a key; or float32, bfloat16 or float16, added to the scaled products. Takes no gradient.
    causal : bool
        Key j is hidden from query i where ``j > i + offset``.
    offset : int, optional
        Of `causal`; by default ``tk - tq``: the last query sees the last key.
    start, stop : tensor [b] of integers, or int, optional
        Keys before `start` and from `stop` on are not read: padding on the left, and a cache that is longer than what
        it holds. On a CUDA device values outside 0 and tk are taken for the nearer of the two.
    scale : float, optional
        Positive; by default ``1 / sqrt(d)``.
    contract : Contract or str, optional
        A chain, whose arithmetic is that of both products. By default as in `isogemm.matmul`.
    out_dtype : torch.dtype, optional
        By default that of `q`.
    sinks : tensor [hq], optional
        One more term of each head's softmax, which has no value: ``exp(sinks)`` is added to the sum of the keys'.
    softcap : float, optional
        Positive: the scaled products x become ``softcap * tanh(x / softcap)``, before the mask. No kernel has it:
        scores of some heads are held in memory.
    dropout : float
        0 to below 1: the share of probabilities that are dropped, chosen by the entry's seed, the head and the
        positions of query and key, counted from `start`; the others grow. Without a kernel, and not with `sinks`.
    seeds : tensor [b] of int64, optional
        With `dropout`, of which each sequence has its own: another one for each step and layer.

    Returns
    -------
    tensor [b, hq, tq, dv]
        Contiguous. Zeros for a query that sees no key.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, OptionError, ContractError, LimitError
        Nothing was computed.

    Determinism
    -----------
    A row of the result depends on that row of `q` and the keys and values that it sees, in their order: not on other
    batch entries, heads or queries, on how queries are cut into calls, on hidden keys behind or, with `start`, before.
    Values of hidden keys between `start` and `stop` have to be finite, and behind a mask that is added their products
    with queries, too. The gradients' orders are in docs/attention.md.
    """
    causal = arguments.flag("causal", causal)
    more = {"sinks": sinks, "softcap": softcap, "dropout": dropout, "seeds": seeds}
    return _checked(q, k, v, mask, causal, offset, start, stop, False, scale, contract, out_dtype, **more)


def _checked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, offset: int | None, start: Any, stop: Any,
    ranged: bool, scale: float | None, contract: ContractLike | None, out_dtype: Any = None,
    sinks: Tensor | None = None, softcap: float | None = None, dropout: Any = 0.0, seeds: Any = None,
) -> Tensor:  # fmt: skip
    """`attention`; `ranged` is whether every query has the range of keys that its mask shows it."""
    _check_operands(q, k, v)
    q, k, v = autocast(q, k, v)
    for name, x, none in (("scale", scale, "None, for 1 / sqrt(d)"), ("softcap", softcap, "None, for no cap")):
        if x is not None and not LEAST <= arguments.number(name, x) <= MOST:
            raise OptionError(name, limit=f"a positive number up to {MOST:.3g}", value=x, nearest=none)
    b, hq, tq, _ = q.shape
    tk = k.shape[2]
    if offset is not None and not causal:
        raise OptionError("offset", limit="None without causal=True", value=offset, nearest="causal=True")
    if causal and offset is None:
        offset = tk - tq
    if offset is not None and not (is_compiling() or isinstance(offset, torch.SymInt)):  # which are kept open
        offset = arguments.whole("offset", offset)
        if abs(offset) >= 2**62:
            raise LimitError("offset", limit="within 2**62", value=offset, nearest=2**62 - 1)
    if out_dtype is not None and out_dtype not in DTYPES:
        raise DTypeError("out_dtype", limit="float32, bfloat16 or float16", value=out_dtype, nearest="torch.float32")
    if ranged and isinstance(mask, torch.Tensor) and mask.dtype is torch.float16:
        # Its least number only weighs a key down, so that others of the batch entry could still show through.
        mask = mask.masked_fill(mask <= torch.finfo(torch.float16).min, -math.inf)
    bounds = _bound("start", start, q), _bound("stop", stop, q)
    shown = _expanded(mask, (b, hq, tq, tk), q)
    options = (shown, offset, *bounds, ranged, scale, softcap, contract_text(contract))
    dropout = arguments.number("dropout", dropout)
    if dropout != 0:
        _check_dropout(dropout, seeds, sinks, q)
        return attend_with_dropout(q, k, v, seeds, *options, rate=float(dropout), out_dtype=out_dtype)
    if sinks is None:
        return attend(q, k, v, *options, out_dtype)
    if not isinstance(sinks, torch.Tensor) or sinks.dtype not in DTYPES or sinks.device != q.device:
        raise DTypeError("sinks", limit="floats beside q", value=getattr(sinks, "dtype", sinks), nearest="sinks.to(q)")
    if tuple(sinks.shape) != (hq,):
        raise ShapeError("shape of sinks", limit="[heads of q]", value=list(sinks.shape), nearest=[hq])
    return attend_with_sinks(q, k, v, sinks, *options, out_dtype=out_dtype)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    contract: ContractLike | None = None,
) -> Tensor:
    """`attention` with the signature of `torch.nn.functional.scaled_dot_product_attention`.

    From a mask, the range of each query's keys is found on its device, without waiting for it: the first key that it
    sees, from which its leaves are counted, and the one behind the last. A key is hidden by False, or by -inf or the
    least number of a mask's dtype; what has to be finite is told in `attention`. So neither padding on either side
    reaches the bits, nor where a sliding window begins, nor what the mask shows to other queries, heads and batch
    entries.

    Parameters
    ----------
    query, key, value : tensor [b, h, t, d]
        Or [h, t, d], or [t, d].
    attn_mask : tensor, optional
        As `mask` of `attention`; not with `is_causal`.
    dropout_p : float
        0: dropout is refused.
    is_causal : bool
        Key j is hidden from query i where j > i.
    scale, contract
        As in `attention`.
    enable_gqa : bool
        Whether there may be fewer heads of key and value than of query.

    Returns
    -------
    tensor

    Raises
    ------
    ShapeError, DTypeError, DeviceError, OptionError, ContractError, LimitError
        Nothing was computed.
    """
    if arguments.number("dropout_p", dropout_p) != 0:
        raise OptionError("dropout_p", limit="0: no dropout", value=dropout_p, nearest=0.0)
    if attn_mask is not None and is_causal:
        raise OptionError("attn_mask with is_causal=True", limit="one of them", value="both", nearest="is_causal=False")
    named = (("query", query), ("key", key), ("value", value), *[("attn_mask", attn_mask)] * (attn_mask is not None))
    for name, x in named:
        arguments.of_type(name, x, torch.Tensor, "a torch tensor", f"torch.as_tensor({name})")
        if x.is_nested:
            raise LayoutError(name, limit="a dense tensor", value="a nested tensor", nearest="padding and a mask")
    lead = 4 - query.dim()
    if lead not in (0, 1, 2) or not query.dim() == key.dim() == value.dim():
        dims = (query.dim(), key.dim(), value.dim())
        raise ShapeError("dimensions of query, key and value", limit="all 2, 3 or 4", value=dims, nearest=(4, 4, 4))
    whole = (None,) * lead
    q, k, v = query[whole], key[whole], value[whole]
    if not enable_gqa and k.shape[1] not in (1, q.shape[1]):  # one is broadcast
        raise ShapeError(
            "heads of key", limit="those of query, or 1, without enable_gqa", value=k.shape[1],
            nearest=f"{q.shape[1]}, or enable_gqa=True",
        )  # fmt: skip
    if lead == 1 and attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask[None]
    found = _checked(
        q, k, v, attn_mask, is_causal, 0 if is_causal else None, None, None, attn_mask is not None, scale, contract
    )  # fmt: skip
    for _ in range(lead):
        found = found.squeeze(0)
    return found


def _check_dropout(rate: Any, seeds: Any, sinks: Any, q: Tensor) -> None:
    if not 0 <= arguments.number("dropout", rate) < 1:
        raise OptionError("dropout", limit="0 to below 1", value=rate, nearest=0.0)
    if sinks is not None:
        raise OptionError("dropout of attention with sinks", limit="0", value=rate, nearest=0.0)
    if not isinstance(seeds, torch.Tensor) or seeds.dtype is not torch.int64 or seeds.device != q.device:
        value = seeds.dtype if isinstance(seeds, torch.Tensor) else type(seeds).__name__
        raise DTypeError("seeds", limit="with dropout a tensor of int64 beside q", value=value, nearest="torch.int64")
    if tuple(seeds.shape) != (q.shape[0],):
        raise ShapeError("shape of seeds", limit="[batch]", value=list(seeds.shape), nearest=[q.shape[0]])


def _check_operands(q: Any, k: Any, v: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise DTypeError(name, limit="a torch tensor", value=type(x).__name__, nearest=f"torch.as_tensor({name})")
    if not (
        (q.is_cpu or q.is_cuda or q.is_meta)
        and q.device == k.device == v.device
        and q.dtype is k.dtype is v.dtype
        and q.dtype in DTYPES
        and q.dim() == k.dim() == v.dim() == 4
    ):
        for name, x in (("q", q), ("k", k), ("v", v)):
            _check_operand(name, x, q)
    (b, hq, _, d), (hkv, tk) = q.shape, k.shape[1:3]
    if hkv == 0 or hq % hkv:
        nearest = max(1, math.gcd(hq, hkv))
        raise ShapeError("heads of q", limit=f"a multiple of k's, {hkv}", value=hq, nearest=f"k with {nearest} heads")
    if tuple(k.shape) != (b, hkv, tk, d):
        raise ShapeError(
            "shape of k", limit="q's batch and last dimension", value=list(k.shape), nearest=[b, hkv, tk, d]
        )
    if tuple(v.shape[:3]) != (b, hkv, tk):
        raise ShapeError("shape of v", limit="that of k but for the last", value=list(v.shape), nearest=[b, hkv, tk, d])


def _check_operand(name: str, x: Tensor, q: Tensor) -> None:
    if x.dim() != 4:
        raise ShapeError(
            f"dimensions of {name}", limit="4: batch, heads, tokens, head's elements", value=x.dim(),
            nearest="scaled_dot_product_attention, or unsqueeze(0)",
        )  # fmt: skip
    if x.dtype not in DTYPES or x.dtype != q.dtype:
        raise DTypeError(
            f"dtype of {name}", limit="float32, bfloat16 or float16, the same for q, k and v", value=x.dtype,
            nearest=q.dtype if q.dtype in DTYPES else "torch.float32",
        )  # fmt: skip
    if x.device != q.device or not (x.is_cpu or x.is_cuda or x.is_meta):
        raise DeviceError(f"device of {name}", limit="one CPU or CUDA device", value=x.device, nearest=q.device)


def _expanded(mask: Tensor | None, shape: tuple[int, ...], q: Tensor) -> Tensor | None:
    """The mask with the shape of the products, as a view."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.dtype not in (torch.bool, *DTYPES):
        value = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise DTypeError("mask", limit="a tensor of bool or of floating point", value=value, nearest="torch.bool")
    if mask.device != q.device:
        raise DeviceError("device of mask", limit="that of q", value=mask.device, nearest=q.device)
    if mask.requires_grad:
        raise OptionError("mask", limit="a constant", value="requires_grad=True", nearest="mask.detach()")
    lead = 4 - mask.dim()
    sizes = (1,) * max(lead, 0) + tuple(mask.shape)
    if lead < 0 or any(x != y and x != 1 for x, y in zip(sizes, shape, strict=True)):
        raise ShapeError("shape of mask", limit="one that broadcasts", value=list(mask.shape), nearest=list(shape))
    return mask.expand(shape)


def _bound(name: str, x: Any, q: Tensor) -> Tensor | None:
    """[b] of integers on q's device."""
    if x is None:
        return None
    if isinstance(x, int):
        x = arguments.whole(name, x)
        if abs(x) >= 2**31:
            raise LimitError(name, limit="within 2**31", value=x, nearest=2**31 - 1)
        return torch.full((q.shape[0],), x, dtype=torch.int32, device=q.device)
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.int32, torch.int64):
        value = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise DTypeError(name, limit="an int, or a tensor of int32 or int64", value=value, nearest="torch.int32")
    if tuple(x.shape) != (q.shape[0],):
        raise ShapeError(f"shape of {name}", limit="[batch]", value=list(x.shape), nearest=[q.shape[0]])
    if x.device != q.device:
        raise DeviceError(f"device of {name}", limit="that of q", value=x.device, nearest=q.device)
    return x
