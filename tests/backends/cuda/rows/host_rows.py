"""Kernels along rows on this process's memory: they read places and numbers as the compiled ones do."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from isogemm.backends.cuda.rows.code import Code
from isogemm.backends.cuda.rows.trial import dtype_of
from isogemm.contract.reference import canonical
from isogemm.contract.rows import OPERATIONS, chain

__all__ = ["HostKernel"]

Fault = Callable[[Code, list[np.ndarray]], None]


def memory(address: int, kind: Any, count: int) -> np.ndarray:
    dtype = np.dtype(kind)
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype)


def backwards(x: np.ndarray) -> np.ndarray:
    """Steps of 128 elements of the last dimension, the last one first."""
    return x.reshape(*x.shape[:-1], -1, 128)[..., ::-1, :].reshape(x.shape)


class Place:
    """Rows of up to three operands."""

    def __init__(self, content: bytes, dims: int) -> None:
        words = struct.unpack("<8I12q", content)
        self.rows, extents, steps = words[0], words[2:8:2], np.array(words[8:]).reshape(3, 4)
        row = np.arange(self.rows)
        at = np.zeros((4, self.rows), np.int64)
        if dims == 1:
            at[3] = row
        else:
            at[3], row = row % extents[2], row // extents[2]
            at[2], row = row % extents[1], row // extents[1]
            at[1], at[0] = row % extents[0], row // extents[0]
        self.offsets = steps @ at  # [operand, row]

    def read(self, which: int, address: int | None, kind: int, n: int, column: int) -> np.ndarray | None:
        """float32 [rows, n]."""
        if not address:
            return None
        offsets, dtype = self.offsets[which], dtype_of(kind)
        last = int(offsets.max(initial=0)) + (n - 1) * column + 1
        flat = memory(address, dtype, last)
        return flat[offsets[:, None] + np.arange(n) * column].astype(np.float32)


class HostKernel:
    """What `Code.load` gives: kernels that are the formulas, changed by `fault`."""

    def __init__(self, code: Code, fault: Fault | None = None) -> None:
        self.code, self.fault, self.launches = code, fault, 0
        self.turned = False  # whether lanes are walked from their end

    def bind(self, params: list[Any], **launch: Any) -> Any:
        fixed = [p[1] for p in params if isinstance(p, tuple) and p[0] != "ptr"]
        present = [p for p in params if p == "ptr" or (isinstance(p, tuple) and p[0] == "ptr")]

        def run(stream: int, *at: int) -> None:
            self.launches += 1
            left = list(at)
            pointers = [left.pop(0) if p == "ptr" else 0 for p in present]
            assert not left
            with np.errstate(all="ignore"):
                results = getattr(self, f"_{self.code.function}")(pointers, *fixed)
                values = [canonical(v.astype(k)) for _, _, v, k in results]
                if self.fault is not None:
                    self.fault(self.code, values)
            for (address, index, _, kind), v in zip(results, values, strict=True):
                flat = memory(address, kind, int(np.max(index, initial=0)) + 1)
                flat[index] = v

        return run

    def _rows(self, p: list[int], content: bytes, *rest: Any) -> list[Any]:
        code, place = self.code, Place(content, self.code.dims)
        *columns, n, eps = rest
        operation = OPERATIONS[code.operation]
        if operation.kernels == "loss":
            return self._loss(p, place, columns, n)
        x, g = place.read(0, p[0], code.tx, n, columns[0]), place.read(1, p[1], code.tg, n, columns[1])
        w, b = (
            memory(a, dtype_of(k), (n - 1) * c + 1)[::c].astype(np.float32) if a else None
            for a, k, c in zip(p[2:4], (code.tw, code.tb), columns[2:], strict=True)
        )
        assert x is not None
        if self.turned:
            x, g, w, b = (None if a is None else backwards(a) for a in (x, g, w, b))
        rows, found, operands = {"weight": w, "bias": b}, [], operation.operands
        known: dict[bytes, Any] = {}  # rows that repeat are computed once
        for i in range(place.rows):
            key = b"".join(a[i].tobytes() for a in (x, g) if a is not None)
            if key not in known:
                known[key] = operation.results_of(
                    *(x[i] if o.name == "x" else rows[o.name] if o.extent == "row" else g[i] for o in operands),
                    eps=eps, dtype=dtype_of(max(code.tg, 0)),
                )  # fmt: skip
            found.append(known[key])
        made = [(p[4], np.concatenate([backwards(y[0]) if self.turned and y[0].size == n else y[0] for y in found]),
                 dtype_of(code.to))]  # fmt: skip
        if p[5]:
            whole = operation.results[1].width is None
            second = [backwards(y[1]) if self.turned and whole else y[1] for y in found]
            made.append((p[5], np.concatenate(second), dtype_of(code.tg if whole else 0)))
        return [(a, np.arange(v.size), v, k) for a, v, k in made]

    def _loss(self, p: list[int], place: Place, columns: list[int], n: int) -> list[Any]:
        """The formulas, of a row that is read backwards where `turned`: then its class is another one's, too."""
        code, formula = self.code, OPERATIONS[self.code.operation].formula
        x, dy = place.read(0, p[0], code.tx, n, columns[0]), place.read(1, p[1], code.tg, 1, 1)
        assert x is not None
        words = memory(p[2], np.int32, int(place.offsets[2].max(initial=0)) + 2)
        classes = [int(words[at : at + 2].copy().view(np.int64)[0]) for at in place.offsets[2]]
        if dy is not None:
            sums = memory(p[3], np.float32, 2 * place.rows).reshape(-1, 2)
            found = [formula(x[i], dy[i], classes[i], sums[i], columns[3]) for i in range(place.rows)]
            return [(p[4], np.arange(x.size), np.concatenate(found), dtype_of(code.to))]
        losses, sums = zip(*(formula(x[i], classes[i], columns[3]) for i in range(place.rows)), strict=True)
        if self.turned:
            sums = [formula(backwards(row), 0)[1] for row in x]
        made = [(p[4], np.concatenate(losses), dtype_of(code.to)), (p[5], np.concatenate(sums), np.dtype(np.float32))]
        return [(a, np.arange(v.size), v, k) for a, v, k in made]

    def _each(self, p: list[int], content: bytes, *rest: Any) -> list[Any]:
        code, place = self.code, Place(content, self.code.dims)
        *columns, n, groups, threads = rest
        assert threads == place.rows * groups
        operation = OPERATIONS[code.operation]
        kinds = (code.tx, code.tg, code.td)
        x, y, dy = (place.read(i, p[i], kinds[i], n, columns[i]) for i in range(3))
        assert x is not None
        values = operation.results_of(*(x, y, dy)[: len(operation.operands)])
        outs = (code.tx, code.tg) if len(values) > 1 else (code.to,)
        return [
            (a, np.arange(x.size), np.asarray(v).reshape(-1), dtype_of(k))
            for a, v, k in zip(p[3:], values, outs, strict=False)
        ]

    def _rope(self, p: list[int], *fixed: Any) -> list[Any]:
        code, (one, two, *columns, half, eps) = self.code, fixed
        made = []
        for i, content in enumerate((one, two)):
            if not p[i]:
                continue
            place = Place(content, code.dims)
            x = place.read(0, p[i], code.tx, 2 * half, columns[i])
            cos, sin = (place.read(1 + j, p[2 + j], k, half, columns[2 + j]) for j, k in enumerate((code.tc, code.ts)))
            w = None
            if p[4 + i]:
                w = memory(p[4 + i], dtype_of(code.tw), (2 * half - 1) * columns[4 + i] + 1)[:: columns[4 + i]]
                w = w.astype(np.float32)
            assert x is not None
            assert cos is not None
            assert sin is not None
            options = {"interleaved": bool(code.interleaved), "eps": eps, "dtype": dtype_of(code.tx)}
            operation, more = OPERATIONS["norm_rope" if code.norm else "rope"], [w] if code.norm else []
            rows = [operation.results_of(x[r], cos[r], sin[r], *more, **options)[0] for r in range(len(x))]
            made.append((p[6 + i], np.arange(x.size), np.concatenate(rows), dtype_of(code.to)))
        return made

    def _columns(self, p: list[int], content: bytes, *rest: Any) -> list[Any]:
        code, place = self.code, Place(content, self.code.dims)
        *columns, leaf, n, start = rest
        x, d = place.read(0, p[0], code.tx, n, columns[0]), place.read(1, p[1], code.td, n, columns[1])
        stats = memory(p[2], np.float32, 2 * place.rows).reshape(-1, 2)
        assert d is not None
        if code.term:
            assert x is not None
            d = d * ((x - stats[:, 1:] if code.term == 2 else x) * stats[:, :1])
        index = np.arange(n) * columns[2]
        begin = memory(p[3], np.float32, index[-1] + 1)[index] if start else np.zeros(n, np.float32)
        leaves = range(0, len(d), leaf)
        index = np.concatenate([i * n + index for i in range(len(leaves))])
        return [(p[3], index, np.concatenate([chain(d[i : i + leaf], begin) for i in leaves]), dtype_of(code.to))]

    def _table(self, p: list[int], content: bytes, *rest: Any) -> list[Any]:
        code, place = self.code, Place(content, self.code.dims)
        column, out_r, out_c, height, n, start = rest
        ids, order = (memory(a, np.int64, place.rows) for a in p[:2])
        d = place.read(0, p[2], code.td, n, column)
        assert d is not None
        made = []
        for i in np.unique(ids):
            assert 0 <= i < height
            index = i * out_r + np.arange(n) * out_c
            begin = memory(p[3], np.float32, index[-1] + 1)[index] if start else np.zeros(n, np.float32)
            made.append((p[3], index, chain(d[order[ids == i]], begin), dtype_of(code.to)))
        return made
