"""Attention on the CPU: strided-batched products of leaves, and kernels between them, with the definition's bits.

Queries are taken in blocks, so that the products of a block stay in a cache; keys that no query of a causal block sees
are not read. Neither reaches the bits: a hidden key changes none (see `isogemm.contract.attention`). So queries whose
ranges begin whole leaves apart can share a block, too: those of a sliding window are taken in that way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....base.dtypes import CODE_OF
from ....contract.attention import LEAF, ranges
from ....contract.spec import Contract
from ....problem.settings import Settings
from ..emit.entries import address_of
from ..gemm.execute import gemm_batched
from ..pool import run_task
from . import loops

Array = NDArray[Any]

BLOCK = 2**20  # products of one block: 4 MiB, most of a second-level cache
TOKENS = 64  # tokens of a block before its heads are cut: enough to pack keys once for many rows
CHUNK = 2**14  # elements of a thread's chunk


@dataclass(frozen=True, slots=True)
class _Call:
    """What every block of a call needs."""

    q: Array  # [b, hkv, groups, tq, d], contiguous
    out: tuple[Array, Array, Array]
    c: np.float32
    mask: Array | None
    offset: int | None
    contract: Contract


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    c: np.float32,
    mask: Array | None = None,
    causal_offset: int | None = None,
    start: Array | None = None,
    stop: Array | None = None,
    ranged: bool = False,
    arithmetic: str = "fma",
    out: Array | None = None,
    out_dtype: Any = None,
) -> tuple[Array, Array, Array]:
    """(y, m, l) of `isogemm.contract.attention.attention` for operands of any strides.

    Parameters
    ----------
    q, k, v : array [b, hq, tq, d], [b, hkv, tk, d] and [b, hkv, tk, dv]
    c : float32
        `isogemm.contract.attention.factor` of the scale.
    mask : array [b, hq, tq, tk], optional
        bool or of a product's dtype; steps of 0 broadcast.
    causal_offset : int, optional
    start, stop : array [b] of integers, optional
        Within 0 and tk.
    ranged : bool
        Every query has the range of keys that `mask` shows it; without `start`, `stop` and `causal_offset`.
    arithmetic : str
    out : array [b, hq, tq, dv], optional
        Contiguous; becomes y.
    out_dtype : dtype, optional
        Of y where there is no `out`.
    """
    (b, hq, tq, d), (hkv, tk) = q.shape, k.shape[1:3]
    y = np.empty((b, hq, tq, v.shape[3]), q.dtype if out_dtype is None else out_dtype) if out is None else out
    y.fill(0)
    m, total = np.full((b, hq, tq), -np.inf, np.float32), np.zeros((b, hq, tq), np.float32)
    if m.size == 0:
        return y, m, total
    queries = np.ascontiguousarray(q).reshape(b, hkv, hq // hkv, tq, d)
    call = _Call(queries, (y, m, total), c, mask, causal_offset, Contract(arithmetic))
    apart: list[Sharing] = []
    if ranged and mask is not None:
        each = tuple(slice(None) if step else slice(1) for step in mask.strides[:3])
        start, stop, apart = sharing(*ranges(mask[each]), mask.shape[:3])  # once for what is broadcast
    first = [0] * b if start is None else [int(x) for x in start]
    last = [tk] * b if stop is None else [int(x) for x in stop]
    for some, heads, tokens, begin, end in apart:
        kv = slice(heads.start // (hq // hkv), -(-heads.stop // (hq // hkv)))
        shown = None if mask is None else mask[some, heads][:, :, tokens, begin:end]
        found = forward(
            q[some, heads][:, :, tokens], k[some, kv, begin:end], v[some, kv, begin:end], c=c, mask=shown,
            arithmetic=arithmetic, out_dtype=y.dtype,
        )  # fmt: skip
        for whole, part in zip((y, m, total), found, strict=True):
            whole[some, heads][:, :, tokens] = part
    ks, vs = _heads(k), _heads(v)
    if ks is not None and vs is not None and len(set(first)) == len(set(last)) == 1:
        _entries(call, 0, b, ks[:, first[0] : last[0]], vs[:, first[0] : last[0]], first[0])
        return y, m, total
    for i in range(b):
        _entries(call, i, i + 1, k[i, :, first[i] : last[i]], v[i, :, first[i] : last[i]], first[i])
    return y, m, total


class Sharing(NamedTuple):
    """Queries of batch entries whose leaves end at the same keys, and the range of keys that they see together."""

    entries: slice
    heads: slice
    tokens: NDArray[np.int64]
    start: int
    stop: int


def sharing(
    start: NDArray[np.int64], stop: NDArray[np.int64], shape: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[Sharing]]:
    """(start, stop, the rest) from ranges of keys that queries [b, hq, tq] see, with one for all that see the same:
    ranges of entries whose queries share their leaves, empty ones for other entries, and the queries of those."""
    b, heads, tokens = shape
    first, last, apart = np.zeros(b, np.int64), np.zeros(b, np.int64), []
    for i in range(len(start)):
        some, seen = slice(i, i + 1) if len(start) == b else slice(0, b), start[i] < stop[i]
        if not seen.any():
            continue
        if np.ptp(start[i][seen] % LEAF) == 0:
            first[some], last[some] = start[i][seen].min(), stop[i][seen].max()
            continue
        each_head = len(start[i]) > 1
        for h in range(len(start[i])):
            begin, end = (np.broadcast_to(x[i, h], tokens) for x in (start, stop))
            seeing = np.flatnonzero(begin < end)
            places = begin[seeing] % LEAF
            for place in np.unique(places):
                rows = seeing[places == place]
                of = slice(h, h + 1) if each_head else slice(0, heads)
                apart.append(Sharing(some, of, rows, int(begin[rows].min()), int(end[rows].max())))
    return first, last, apart


def _heads(x: Array) -> Array | None:
    """[b, h, t, d] as [b * h, t, d] where one step walks entries and heads."""
    b, h = x.shape[:2]
    if b == 1 or h == 1:
        return x[0] if b == 1 else x[:, 0]
    if x.strides[0] != h * x.strides[1]:
        return None
    return np.lib.stride_tricks.as_strided(x, (b * h, *x.shape[2:]), x.strides[1:])


def _entries(call: _Call, begin: int, end: int, k: Array, v: Array, first: int) -> None:
    """Batch entries that share their range of keys; k and v hold it, [entries * hkv, keys, d]."""
    _, hkv, groups, tq, d = call.q.shape
    keys = k.shape[1]
    if keys == 0:
        return
    q = call.q[begin:end].reshape(len(k), groups, tq, d)
    offset = None if call.offset is None else call.offset - first
    for h, heads, t, tokens, seen in blocks(len(k), groups, tq, keys, offset):
        where = (begin * hkv + h, t, first)
        _block(call, q[h : h + heads, :, t : t + tokens], k[h : h + heads, :seen], v[h : h + heads, :seen], where)


def blocks(
    places: int, groups: int, tq: int, keys: int, offset: int | None
) -> Iterator[tuple[int, int, int, int, int]]:
    """(first place, places, first token, tokens, keys that the last of them sees) of every block that sees a key.

    A place is a key head of a batch entry.
    """
    heads, tokens = block_of(places, groups, tq, keys)
    for h in range(0, places, heads):
        for t in range(0, tq, tokens):
            some = min(tokens, tq - t)
            seen = keys if offset is None else min(keys, t + some + offset)
            if seen > 0:
                yield h, min(heads, places - h), t, some, seen


def block_of(places: int, groups: int, tq: int, keys: int) -> tuple[int, int]:
    """Places and tokens of every block but the last ones, which may have fewer."""
    heads = min(places, max(1, BLOCK // (groups * min(tq, TOKENS) * keys)))
    return heads, min(tq, max(1, BLOCK // (groups * heads * keys)))


def _block(call: _Call, q: Array, k: Array, v: Array, where: tuple[int, int, int]) -> None:
    """Queries [heads, groups, tokens, d] against keys [heads, keys, d]; `where`: first head, first token, first key."""
    (heads, groups, tokens, d), (head, token, first) = q.shape, where
    keys, rows, leaves = k.shape[1], groups * tokens, -(-k.shape[1] // LEAF)
    products = np.empty((heads, rows, keys), np.float32)
    asked = Settings(call.contract)
    gemm_batched(np.ascontiguousarray(q).reshape(heads, rows, d), k.transpose(0, 2, 1), products, asked)
    powers = np.empty((heads, leaves, rows, LEAF), v.dtype)
    m, total = np.empty((2, heads, leaves, rows), np.float32)
    task = np.zeros(loops.WORDS, np.int64)  # what both kernels have
    task[loops.HEADS_ROWS], task[loops.FIRST_HEAD] = heads * rows, head
    task[loops.ROWS : loops.LEAF_L + 1] = rows, tokens, token, leaves, m.ctypes.data, total.ctypes.data
    _run_leaves(call, task.copy(), products, powers, first)
    if call.contract.arithmetic != "fma":
        ones = np.broadcast_to(np.ones((), v.dtype), (heads, keys, 1))
        _products(powers, ones, total[..., None], asked)
    parts = np.empty((heads, leaves, rows, v.shape[2]), np.float32)
    if v.shape[2]:
        _products(powers, v, parts, asked)
    _run_meeting(call, task, parts)


def _products(powers: Array, v: Array, out: Array, asked: Settings) -> None:
    """Step 3: out[h, n] = powers[h, n] @ (leaf n of v[h]), in the fewest calls that constant steps allow."""
    (heads, leaves), keys = out.shape[:2], v.shape[1]
    whole = keys // LEAF
    steps = (v.strides[0], LEAF * v.strides[1], *v.strides[1:])
    cut = np.lib.stride_tricks.as_strided(v, (heads, whole, LEAF, v.shape[2]), steps)
    if heads < whole:
        for h in range(heads):
            gemm_batched(powers[h, :whole], cut[h], out[h, :whole], asked)
    else:
        for n in range(whole):
            gemm_batched(powers[:, n], cut[:, n], out[:, n], asked)
    if whole < leaves:
        rest = keys - whole * LEAF
        gemm_batched(powers[:, whole, :, :rest], v[:, whole * LEAF :], out[:, whole], asked)


def _code(dtype: np.dtype[Any]) -> int:
    return loops.BOOLEAN if dtype.kind == "b" else CODE_OF[dtype]


def _run_leaves(call: _Call, task: Array, products: Array, powers: Array, first: int) -> None:
    keys, mask = products.shape[2], call.mask
    task[loops.PRODUCTS : loops.HEADS + 1] = (
        products.ctypes.data, keys, powers.ctypes.data, _code(powers.dtype), int(call.c.view(np.uint32)),
        2**40 if call.offset is None else call.offset + 1 - first, int(call.contract.arithmetic == "fma"),
        call.q.shape[1],
    )  # fmt: skip
    if mask is not None:
        place = mask.ctypes.data + first * mask.strides[3]
        task[loops.MASK : loops.MASK_KEY + 1] = (place, _code(mask.dtype), *mask.strides)
    _run(loops.run_leaves, task, keys, 4 * loops.LANES)


def _run_meeting(call: _Call, task: Array, parts: Array) -> None:
    _, leaves, _, columns = parts.shape
    y, out_m, out_l = call.out
    task[loops.PARTS : loops.ALL_TOKENS + 1] = (
        parts.ctypes.data, columns, y.ctypes.data, _code(y.dtype), out_m.ctypes.data, out_l.ctypes.data, y.shape[2],
    )  # fmt: skip
    _run(loops.run_meeting, task, leaves * columns, 4 * columns)


def _run(function: Any, task: Array, width: int, scratch: int) -> None:
    """Chunks of whole rows, each of `width` elements."""
    count = int(task[loops.HEADS_ROWS])
    task[loops.PER_CHUNK] = per_chunk = max(1, min(count, CHUNK // max(1, width)))
    run_task(address_of(function), task, -(-count // per_chunk), scratch)
