"""A binding of Python in place of cuBLASLt's, and small products for it.

It keeps an algorithm's settings in its bytes, as the library does.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from isogemm.backends.cuda.gemm.cublaslt import call as cublaslt_call
from isogemm.backends.cuda.gemm.cublaslt import family as cublaslt
from isogemm.backends.cuda.gemm.cublaslt import search as cublaslt_search
from isogemm.contract.spec import Contract
from isogemm.problem.product import Product, Strides

CHAIN = Contract.parse("tensor_core:sm90/chain")


class LtError(Exception):
    """The binding's error."""


class FakeLt:
    """One algorithm that has tiles, one that does not look at clusters, and one that is not to be had.

    Bytes of an algorithm: the settings in the order of `cublaslt_search.SETTINGS`, 4 bytes each.
    """

    cuBLASLtError = LtError
    NEW, PLAIN, ABSENT = 66, 21, 30
    Epilogue = enum.IntEnum("Epilogue", {"DEFAULT": 1, "BIAS": 4})
    MatmulTile = enum.IntEnum("MatmulTile", {"TILE_UNDEFINED": 0, "TILE_64x64": 1, "TILE_64x8": 2, "TILE_8x64": 3})
    MatmulStages = enum.IntEnum("MatmulStages", {"STAGES_UNDEFINED": 0, "STAGES_64xAUTO": 35})
    ClusterShape = enum.IntEnum(
        "ClusterShape", {"SHAPE_AUTO": 0, "SHAPE_1x1x1": 2, "SHAPE_2x1x1": 3, "SHAPE_1x2x1": 5, "SHAPE_4x1x1": 4}
    )
    MatmulAlgoConfigAttribute = enum.IntEnum("MatmulAlgoConfigAttribute", list(cublaslt_search.SETTINGS), start=0)
    MatmulAlgoCapAttribute = enum.IntEnum(
        "MatmulAlgoCapAttribute",
        ["TILE_IDS", "STAGES_IDS", "CUSTOM_OPTION_MAX", "CTA_SWIZZLING_SUPPORT", "STRIDED_BATCH_SUPPORT"]
        + [f"MIN_ALIGNMENT_{x}_BYTES" for x in "ABCD"],
    )
    MatmulDescAttribute = enum.IntEnum(
        "MatmulDescAttribute", ["TRANSA", "TRANSB", "EPILOGUE", "BIAS_DATA_TYPE", "BIAS_POINTER"]
    )
    MatrixLayoutAttribute = enum.IntEnum("MatrixLayoutAttribute", ["BATCH_COUNT", "STRIDED_BATCH_OFFSET"])
    MatmulPreferenceAttribute = enum.IntEnum(
        "MatmulPreferenceAttribute",
        ["MAX_WORKSPACE_BYTES", "REDUCTION_SCHEME_MASK"] + [f"MIN_ALIGNMENT_{x}_BYTES" for x in "ABCD"],
    )

    def __init__(self) -> None:
        self.alive: dict[int, dict[str, int]] = {}
        self.numbers = itertools.count(1000)
        self.calls: list[tuple[Any, ...]] = []
        self.fail = False
        self.asked: list[dict[str, int]] = []
        self.listed: list[dict[str, int]] = []

    def _new(self, **values: int) -> int:
        number = next(self.numbers)
        self.alive[number] = values
        return number

    def matmul_desc_create(self, compute: int, scale: int) -> int:
        return self._new(compute=compute, scale=scale)

    def matrix_layout_create(self, kind: int, rows: int, columns: int, ld: int) -> int:
        return self._new(type=kind, rows=rows, columns=columns, ld=ld)

    def matmul_preference_create(self) -> int:
        return self._new()

    def _destroy(self, number: int) -> None:
        del self.alive[number]

    matmul_desc_destroy = matrix_layout_destroy = matmul_preference_destroy = _destroy

    def _put(self, names: Any, number: int, attribute: int, address: int, size: int) -> None:
        self.alive[number][names(attribute).name] = int.from_bytes(ctypes.string_at(address, size), "little")

    def matmul_desc_set_attribute(self, *arguments: int) -> None:
        self._put(self.MatmulDescAttribute, *arguments)

    def matrix_layout_set_attribute(self, *arguments: int) -> None:
        self._put(self.MatrixLayoutAttribute, *arguments)

    def matmul_preference_set_attribute(self, *arguments: int) -> None:
        self._put(self.MatmulPreferenceAttribute, *arguments)

    def matmul_algo_get_ids(self, *arguments: int) -> tuple[int, ...]:
        return (self.PLAIN, self.ABSENT, self.NEW)

    def matmul_algo_init(self, *arguments: int) -> None:
        number, address = arguments[-2:]
        if number == self.ABSENT:
            raise LtError("not to be had")
        ctypes.memset(address, 0, 64)
        self.matmul_algo_config_set_attribute(address, 0, ctypes.addressof(ctypes.c_int32(number)), 4)

    def matmul_algo_config_set_attribute(self, address: int, attribute: int, value: int, size: int) -> None:
        ctypes.memmove(address + 4 * attribute, value, size)

    def matmul_algo_config_get_attribute(self, address: int, attribute: int, to: int, size: int, written: int) -> None:
        ctypes.memmove(to, address + 4 * attribute, size)

    def _settings(self, address: int) -> dict[str, int]:
        values = np.frombuffer(ctypes.string_at(address, 36), np.int32)
        return dict(zip(cublaslt_search.SETTINGS, (int(v) for v in values), strict=True))

    def matmul_algo_cap_get_attribute(self, address: int, attribute: int, to: int, size: int, written: int) -> None:
        new = self._settings(address)["ID"] == self.NEW
        values = {
            "TILE_IDS": [1, 2, 3] if new else [],
            "STAGES_IDS": [35] if new else [],
            "CUSTOM_OPTION_MAX": [3 if new else 0],
            "CTA_SWIZZLING_SUPPORT": [0 if new else 1],
        }.get(self.MatmulAlgoCapAttribute(attribute).name, [16 if new else 2])
        held = (ctypes.c_uint32 * len(values))(*values)
        assert ctypes.sizeof(held) <= size
        ctypes.memmove(to, held, ctypes.sizeof(held))
        ctypes.c_size_t.from_address(written).value = ctypes.sizeof(held)

    def matmul_algo_check(self, *arguments: int) -> None:
        address, to = arguments[-2:]
        x = self._settings(address)
        # As on Hopper: 64x8 wants an odd option, 8x64 an even one, and clusters of 4 suit 64x64 alone.
        odd = {2: (1,), 3: (0,)}.get(x["TILE_ID"], (0, 1))
        if x["ID"] == self.NEW and (
            x["CUSTOM_OPTION"] % 2 not in odd
            or x["CLUSTER_SHAPE_ID"] == 0
            or (x["CLUSTER_SHAPE_ID"] == 4 and x["TILE_ID"] != 1)
        ):
            raise LtError("refused")
        result = cublaslt_search._Result.from_address(to)
        result.state, result.workspace, result.waves = 0, 1024 if x["TILE_ID"] == 3 else 0, 1.0

    def matmul_algo_get_heuristic(self, *arguments: int) -> None:
        preference, count, results, returned = arguments[-4:]
        self.asked.append(dict(self.alive[preference]))
        for index, chosen in enumerate(self.listed):
            x = cublaslt_search._Result.from_address(results + index * ctypes.sizeof(cublaslt_search._Result))
            values = [chosen.get(name, 1 if name == "SPLITK_NUM" else 0) for name in cublaslt_search.SETTINGS]
            x.algorithm[:36] = np.array(values, np.int32).tobytes()
            x.state, x.workspace, x.waves = 0, 0, 0.5
        ctypes.c_int32.from_address(returned).value = len(self.listed)
        assert len(self.listed) <= count

    def matmul(self, *arguments: Any) -> None:
        if self.fail:
            raise LtError("an unsupported value")
        self.calls.append(arguments)

    def get_version(self) -> int:
        return 130100


@contextlib.contextmanager
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLt]:
    """The family on top of a fake binding, with nothing remembered before or after."""
    fake = FakeLt()
    for module in (cublaslt, cublaslt_call, cublaslt_search):
        monkeypatch.setattr(module, "binding", lambda: fake)
    for module in (cublaslt, cublaslt_call):
        monkeypatch.setattr(module, "handle", lambda device: 7 + device)
    monkeypatch.setattr(cublaslt, "_installed", lambda: True)
    caches = (cublaslt_search.capabilities, cublaslt_search.extents, cublaslt._search)
    for cache in caches:
        cache.cache_clear()
    yield fake
    for cache in caches:
        cache.cache_clear()


def stored(rows: int, columns: int, letter: str, pad: int = 0, items: int = 1) -> np.ndarray[Any, Any]:
    """A view [rows, columns] (or [items, ...]) with rows ("N") or columns ("T") contiguous and `pad` more between."""
    shape = (rows, columns + pad) if letter == "N" else (columns, rows + pad)
    base = np.arange(items * shape[0] * shape[1], dtype=np.float32).reshape(items, *shape)
    view = base[:, :, :columns] if letter == "N" else base[:, :, :rows].transpose(0, 2, 1)
    return view if items > 1 else view[0]


def strides(x: np.ndarray[Any, Any]) -> Strides:
    steps = [s // x.itemsize for s in x.strides]
    return Strides(steps[-2], steps[-1], steps[0] if x.ndim == 3 else 0)


def product_of(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], out: np.ndarray[Any, Any], **more: Any) -> Product:
    m, k = a.shape[-2:]
    n, items = b.shape[-1], a.shape[0] if a.ndim == 3 else 1
    types = {"dtype_a": "bfloat16", "dtype_b": "bfloat16", "dtype_out": "bfloat16", "contract": CHAIN} | more
    return Product(m, n, k, a=strides(a), b=strides(b), out=strides(out), batch=items, **types)


def layout_product(m: int = 48, n: int = 64, k: int = 96, layout: str = "NT", **more: Any) -> Product:
    return product_of(stored(m, k, layout[0]), stored(k, n, layout[1]), stored(m, n, more.pop("out", "N")), **more)


def config(**chosen: int) -> str:
    """The text of an algorithm with these settings."""
    values = [chosen.get(name, 1 if name == "SPLITK_NUM" else 0) for name in cublaslt_search.SETTINGS]
    return f"x #{np.array(values, np.int32).tobytes().rstrip(bytes(1)).hex()}"


NEW = {"ID": 66, "TILE_ID": 1, "STAGES_ID": 35, "CLUSTER_SHAPE_ID": 3}
