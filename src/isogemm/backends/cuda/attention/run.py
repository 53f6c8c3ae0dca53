"""Attention on a CUDA device: the bits of contract/attention.py, by the kernel that is fastest for the shapes.

    y, m, l = forward(q, k, v, c=factor(None, 128), arithmetic="tensor_core:sm90", causal_offset=0)

A call like one before is a look-up, two allocations and one launch or two. Nothing waits for the device, but the first
call of a kernel, which is tried. `start` and `stop` are read there, so that a captured graph can be replayed with
longer caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ....base.dtypes import torch_name
from ....base.seen import Seen
from ....errors import ContractError, DTypeError, LayoutError, LimitError, ShapeError
from .case import AttentionCase, Strided
from .choose import admitted_run, ranged_run

if TYPE_CHECKING:
    import torch

MAX_HEAD = 256
MOST = 2**31 - 2**10  # queries and keys that the kernels can count
_plans: Seen[Callable[..., None]] = Seen(4096)
_torch: Any = None
_empty: Any = None
_stream: Any = None


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    c: float,
    mask: torch.Tensor | None = None,
    causal_offset: int | None = None,
    start: torch.Tensor | None = None,
    stop: torch.Tensor | None = None,
    ranged: bool = False,
    arithmetic: str,
    out_dtype: torch.dtype | None = None,
    stats: bool = True,
    kernel: str | None = None,
) -> tuple[torch.Tensor, Any, Any]:
    """``(y, m, l)`` with y = softmax(scale * q @ k.T + mask) @ v.

    Parameters
    ----------
    q, k, v : CUDA tensors [b, hq, tq, d], [b, hkv, tk, d], [b, hkv, tk, dv]
        One dtype; any strides, but 1 in the last dimension. hq is a multiple of hkv; d and dv are 1 to 256.
    c : float
        `contract.attention.factor` of the scale: a float32.
    mask : CUDA tensor that broadcasts to [b, hq, tq, tk], optional
        bool, or float32, bfloat16 or float16, which is added to the scaled scores.
    causal_offset : int, optional
        Key j is hidden from query i where ``j > i + causal_offset``.
    start, stop : int32 CUDA tensors [b], optional
        Keys outside are not read. Contiguous.
    ranged : bool
        Every query has the range of keys that `mask` shows it; without `causal_offset`, `start` and `stop`.
    arithmetic : str
        ``fma``, or the device's own ``tensor_core:...`` for bfloat16 and float16.
    out_dtype : torch dtype, optional
        Default: that of q.
    stats : bool
        Whether m and l are wanted, which only gradients need; without, they are None, and the call is shorter.
    kernel : str, optional
        One of `choose.KERNELS`, instead of the fastest; none of them reaches the bits.

    Returns
    -------
    y : tensor [b, hq, tq, dv]
        Contiguous.
    m, l : tensors [b, hq, tq] of float32

    Raises
    ------
    ShapeError, DTypeError, LayoutError, LimitError
        Operands that no kernel takes.
    ContractError
        Not the device's arithmetic, or no kernel here has shown its bits; the message says where each one differed.
    DeviceError
        A graph is captured, and the kernels of this call were never tried: call once before.
    """
    torch = _torch or _load()
    device = q.get_device()
    out = q.dtype if out_dtype is None else out_dtype
    at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    key: tuple[Any, ...] = (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype, out, device, c,
        causal_offset, start is None, stop is None, ranged, arithmetic, kernel, stats, (at_q | at_k | at_v) & 15,
        q.is_neg() or k.is_neg() or v.is_neg(),
        None if mask is None else (mask.shape, mask.stride(), mask.dtype, mask.is_neg()),
    )  # fmt: skip
    run = _plans.get(key)
    if run is None:
        run = _plan(key, q, k, v, c, mask, causal_offset, start, stop, ranged, arithmetic, out, stats, kernel)
    b, heads, tq, _ = q.shape
    dv, where = v.shape[3], q.device
    y = _empty((b, heads, tq, dv), (heads * tq * dv, tq * dv, dv, 1), dtype=out, device=where)
    saved = None
    if stats:
        saved = _empty((2, b, heads, tq), (b * heads * tq, heads * tq, tq, 1), dtype=torch.float32, device=where)
    run(
        _stream(device), at_q, at_k, at_v, 0 if mask is None else mask.data_ptr(),
        0 if start is None else start.data_ptr(), 0 if stop is None else stop.data_ptr(), y.data_ptr(),
        0 if saved is None else saved.data_ptr(),
    )  # fmt: skip
    return (y, None, None) if saved is None else (y, *saved.unbind(0))


def _load() -> Any:
    global _torch, _empty, _stream
    import torch

    _torch, _empty, _stream = torch, torch.empty_strided, torch._C._cuda_getCurrentRawStream
    return torch


def _plan(
    key: tuple[Any, ...], q: Any, k: Any, v: Any, c: float, mask: Any, offset: int | None, start: Any, stop: Any,
    ranged: bool, arithmetic: str, out: Any, stats: bool, kernel: str | None,
) -> Callable[..., None]:  # fmt: skip
    """Look at everything once, admit a kernel, and bind."""
    _check(q, k, v, mask, start, stop, out)
    device = q.get_device()
    _check_arithmetic(arithmetic, q.dtype, device)
    b, heads, tq, _ = q.shape
    case = AttentionCase(
        operands=tuple(Strided(tuple(x.shape), tuple(x.stride())) for x in (q, k, v)),
        mask=None if mask is None else tuple(mask.expand(b, heads, tq, k.shape[2]).stride()),
        dtype=_name(q),
        dtype_out=_name(out),
        dtype_mask=None if mask is None else _name(mask),
        c=float(c),
        offset=clamped(offset, tq, k.shape[2]),
        starts=start is not None,
        stops=stop is not None,
        arithmetic=arithmetic,
        aligned=not (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,
        stats=stats,
        device=device,
    )
    return _plans.keep(key, (ranged_run if ranged and mask is not None else admitted_run)(case, kernel))


def clamped(offset: int | None, queries: int, keys: int) -> int | None:
    """The same causal rule, in numbers that kernels can add to those of queries and keys."""
    return None if offset is None else max(-queries, min(offset, keys))


def _name(x: Any) -> str:
    return torch_name(getattr(x, "dtype", x))


def _check(q: Any, k: Any, v: Any, mask: Any, start: Any, stop: Any, out: Any) -> None:
    floats = ("float32", "bfloat16", "float16")
    own = _name(q) if _name(q) in floats else "float32"
    for name, x in (("q", q), ("k", k), ("v", v), ("result", out)):
        if _name(x) not in floats or (x is not out and x.dtype != q.dtype):
            limit = f"one of {floats}, the same for q, k and v"
            raise DTypeError(f"dtype of {name}", limit=limit, value=_name(x), nearest=own)
    if mask is not None and _name(mask) not in ("bool", *floats):
        raise DTypeError("dtype of mask", limit=f"bool, {floats}", value=_name(mask), nearest="bool")
    _check_shapes(q, k, v)
    (b, heads, tq, d), (hkv, tk, dv) = q.shape, v.shape[1:]
    if not (1 <= d <= MAX_HEAD and 1 <= dv <= MAX_HEAD):
        nearest = tuple(min(max(size, 1), MAX_HEAD) for size in (d, dv))
        raise LimitError("head sizes", limit=f"1 to {MAX_HEAD} on CUDA", value=(d, dv), nearest=nearest)
    rows = tq * (heads // hkv)
    counts = ("entries", b, 65535), ("heads", heads, 65535), ("queries that share keys", rows, MOST), ("keys", tk, MOST)
    for name, size, most in counts:
        if size > most:
            raise LimitError(f"{name} of attention", limit=f"at most {most}", value=size, nearest=most)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(3) != 1 and x.shape[3] > 1:
            limit = "unit stride in the last dimension"
            raise LayoutError(f"strides of {name}", limit=limit, value=x.stride(), nearest=f"{name}.contiguous()")
    for name, x in (("q", q), ("k", k), ("v", v), ("mask", mask)):
        if x is not None and x.is_neg():
            limit = "a tensor with plain memory"
            raise LayoutError(name, limit=limit, value="a lazy negation", nearest=f"{name}.resolve_neg()")
    sizes = () if mask is None else (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if mask is not None and (
        len(sizes) != 4 or any(n not in (1, m) for n, m in zip(sizes, (b, heads, tq, tk), strict=True))
    ):
        limit = "one that broadcasts"
        raise ShapeError("shape of mask", limit=limit, value=tuple(mask.shape), nearest=(b, heads, tq, tk))
    for name, x in (("start", start), ("stop", stop)):
        if x is not None and (x.shape != (b,) or _name(x) != "int32" or not x.is_contiguous()):
            found, limit = (tuple(x.shape), _name(x)), f"int32 of shape ({b},), contiguous"
            raise DTypeError(name, limit=limit, value=found, nearest=f"{name}.int().contiguous() of shape ({b},)")


def _check_shapes(q: Any, k: Any, v: Any) -> None:
    """Operands of four dimensions that fit; the nearest choice keeps q, and of k and v what can be kept."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            nearest = (1,) * (4 - x.dim()) + tuple(x.shape) if x.dim() < 4 else tuple(x.flatten(0, x.dim() - 4).shape)
            limit = "4: entries, heads, tokens, elements"
            raise ShapeError(f"dimensions of {name}", limit=limit, value=tuple(x.shape), nearest=nearest)
    (b, heads, _, d), (_, shared, tk, _), dv = q.shape, k.shape, v.shape[3]
    if not shared or heads % shared:
        legal = [n for n in range(1, max(heads, 1) + 1) if heads % n == 0]
        shared = min(legal, key=lambda n: abs(n - shared))
    of_k, of_v = (b, shared, tk, d), (b, shared, tk, dv)
    if tuple(k.shape) != of_k:
        limit = "[b, hkv, tk, d] for q [b, hq, tq, d], hq a multiple of hkv"
        raise ShapeError("shape of k", limit=limit, value=tuple(k.shape), nearest=of_k)
    if tuple(v.shape) != of_v:
        raise ShapeError("shape of v", limit="that of k but for the last", value=tuple(v.shape), nearest=of_v)


def _check_arithmetic(arithmetic: str, dtype: Any, device: int) -> None:
    if arithmetic == "fma":
        return
    from ..gemm.choose import default_contract_of

    own = default_contract_of(device, _name(dtype)).arithmetic
    if arithmetic != own:
        raise ContractError("arithmetic of attention", limit=f"fma or {own} here", value=arithmetic, nearest=own)
