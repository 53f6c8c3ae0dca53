"""cuBLASLt's algorithms for a call, without split-K and without reduction schemes: its heuristic's list, and more.

Where the library itself would split K, its heuristic lists few algorithms that do not. Enumeration asks the library
what an algorithm can be set to (tile, stages, cluster, options) and keeps what its own check accepts for the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from .....errors import OptionError
from .call import COMPUTE_32F, DATA_TYPE, CublasCall, Descriptors, binding, set_attribute

ALGORITHM_BYTES = 64  # cublasLtMatmulAlgo_t
PROCESSORS = 132  # of an H200; for the order of trials alone
WORKSPACES = (0, 4 << 20, 32 << 20)
CLUSTERS = (0, 2, 3, 5)  # automatic, 1x1, 2x1, 1x2: a tile that none of them suits is not looked at further
MOST_OPTIONS = 32  # values of the custom option that are tried
WORST = 2.5  # times the least cost: tiles beyond are not looked at; in 91 cells the fastest were within 1.9
# Ids whose algorithms all walked the chain, and the variants of a tile that were often the fastest: cluster and custom
# option without its lowest bit, which says whose 64 rows an instruction takes (H200, cuBLASLt 13.1.0, bfloat16).
LIKELY = (66, 41, 42, 35)
VARIANTS = ((4, 0), (5, 1), (3, 0), (2, 2), (3, 2), (2, 0), (5, 0), (5, 2))
# The library's names, with which readers know them, and the types of their values.
SETTINGS = {
    "ID": ctypes.c_int32,
    "TILE_ID": ctypes.c_uint32,
    "STAGES_ID": ctypes.c_uint32,
    "CLUSTER_SHAPE_ID": ctypes.c_uint16,
    "CUSTOM_OPTION": ctypes.c_uint32,
    "CTA_SWIZZLING": ctypes.c_uint32,
    "INNER_SHAPE_ID": ctypes.c_uint16,
    "SPLITK_NUM": ctypes.c_int32,
    "REDUCTION_SCHEME": ctypes.c_uint32,
}


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm and its configuration: 64 opaque bytes, which the same library version takes back, and a label.

    The text form is ``LABEL #HEX`` with the bytes' trailing zeros left out; the label is for readers and is not parsed.
    """

    data: bytes
    label: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.label} #{self.data.rstrip(bytes(1)).hex()}"

    @classmethod
    def parse(cls, text: str) -> Algorithm:
        """Read the text form.

        Raises
        ------
        OptionError
            Not the text of an algorithm.
        """
        label, mark, digits = text.rpartition("#")
        if not mark or not re.fullmatch(f"([0-9a-f]{{2}}){{1,{ALGORITHM_BYTES}}}", digits):
            raise OptionError(
                "cuBLASLt algorithm",
                limit=f"LABEL #HEX, at most {ALGORITHM_BYTES} bytes",
                value=repr(text),
                nearest="a text from configs()",
            )
        return cls(bytes.fromhex(digits).ljust(ALGORITHM_BYTES, bytes(1)), label.strip())


@dataclass(frozen=True, slots=True)
class Found:
    """An algorithm that the library accepts for a call, with the workspace in bytes and the waves that it takes."""

    algorithm: Algorithm
    workspace: int
    waves: float


class _Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint8 * ALGORITHM_BYTES),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int32),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int32 * 4),
    )

    def of(self, algorithm: Algorithm) -> Found:
        """What the library says of an algorithm."""
        return Found(algorithm, int(self.workspace), float(self.waves))


def settings(data: bytes) -> dict[str, int]:
    """The configuration inside an algorithm's bytes, by the library's names."""
    lt = binding()
    held = (ctypes.c_uint8 * ALGORITHM_BYTES).from_buffer_copy(data)
    return {name: _setting(lt, ctypes.addressof(held), name) for name in SETTINGS}


def _setting(lt: Any, address: int, name: str) -> int:
    value, written = SETTINGS[name](), ctypes.c_size_t()
    attribute = int(lt.MatmulAlgoConfigAttribute[name])
    lt.matmul_algo_config_get_attribute(
        address, attribute, ctypes.addressof(value), ctypes.sizeof(value), ctypes.addressof(written)
    )
    return int(value.value)


def walks_whole_k(chosen: dict[str, int]) -> bool:
    """Whether a configuration leaves K in one piece."""
    return chosen["SPLITK_NUM"] in (0, 1) and chosen["REDUCTION_SCHEME"] == 0


def labelled(data: bytes) -> Algorithm:
    """An algorithm with a label made of its settings."""
    lt, x = binding(), settings(data)
    tile = _name(lt.MatmulTile, x["TILE_ID"], "TILE_")
    stages = _name(lt.MatmulStages, x["STAGES_ID"], "STAGES_").lower()
    cluster = _name(lt.ClusterShape, x["CLUSTER_SHAPE_ID"], "SHAPE_").lower().removesuffix("x1")
    rest = f"o{x['CUSTOM_OPTION']} z{x['CTA_SWIZZLING']} i{x['INNER_SHAPE_ID']}"
    return Algorithm(data, f"{x['ID']} t{tile} s{stages} c{cluster} {rest}")


def _name(names: Any, value: int, prefix: str) -> str:
    try:
        return str(names(value).name).removeprefix(prefix)
    except ValueError:  # a library newer than its binding
        return f"?{value}"


def heuristic(handle: int, desc: Descriptors, align: int, *, count: int = 128) -> list[Found]:
    """The library's own list, in its order: least workspace first, then the likeliest."""
    lt = binding()
    found: dict[bytes, Found] = {}
    for workspace in WORKSPACES:
        preference = lt.matmul_preference_create()
        try:
            _prefer(lt, preference, workspace, align)
            for x in _ask(lt, handle, desc, preference, count):
                found.setdefault(x.algorithm.data, x)
        finally:
            lt.matmul_preference_destroy(preference)
    kept = (x for x in found.values() if walks_whole_k(settings(x.algorithm.data)))
    return [replace(x, algorithm=labelled(x.algorithm.data)) for x in kept]


def _prefer(lt: Any, preference: int, workspace: int, align: int) -> None:
    name, put = lt.MatmulPreferenceAttribute, lt.matmul_preference_set_attribute
    set_attribute(put, preference, name.MAX_WORKSPACE_BYTES, workspace, ctypes.c_uint64)
    set_attribute(put, preference, name.REDUCTION_SCHEME_MASK, 0, ctypes.c_uint32)  # NONE alone: no split-K
    for operand in "ABCD":
        set_attribute(put, preference, name[f"MIN_ALIGNMENT_{operand}_BYTES"], align, ctypes.c_uint32)


def _ask(lt: Any, handle: int, desc: Descriptors, preference: int, count: int) -> Iterator[Found]:
    results, returned = (_Result * count)(), ctypes.c_int32()
    try:
        lt.matmul_algo_get_heuristic(
            handle, *desc.handles, preference, count, ctypes.addressof(results), ctypes.addressof(returned)
        )
    except lt.cuBLASLtError:  # it has nothing for this call
        return
    for x in results[: returned.value]:
        if x.state == 0:
            yield x.of(Algorithm(bytes(x.algorithm)))


def check(handle: int, desc: Descriptors, algorithm: Algorithm) -> Found | None:
    """What the library says of an algorithm for a call; None where it refuses."""
    held = (ctypes.c_uint8 * ALGORITHM_BYTES).from_buffer_copy(algorithm.data)
    result = _Result()
    return result.of(algorithm) if _accepted(binding(), handle, desc, ctypes.addressof(held), result) else None


def _accepted(lt: Any, handle: int, desc: Descriptors, address: int, result: _Result) -> bool:
    try:
        lt.matmul_algo_check(handle, *desc.handles, address, ctypes.addressof(result))
    except lt.cuBLASLtError:
        return False
    return bool(result.state == 0)


def enumerate_algorithms(handle: int, desc: Descriptors, align: int, *, seconds: float = 2.0) -> list[Found]:
    """Configurations that the check accepts with K in one piece, tiles that suit the call first, until the time is up.

    Parameters
    ----------
    align : int
        Bytes that divide all addresses: algorithms that want more are left out.
    seconds : float
        Budget for the whole enumeration; each algorithm id has an equal share of what is left.
    """
    ids = _algorithm_ids(handle, desc)
    end = time.monotonic() + seconds
    found: list[tuple[float, Found]] = []
    for index, number in enumerate(ids):
        now = time.monotonic()
        share = now + max(0.0, end - now) / (len(ids) - index)
        # An id may be listed and still not be had with these types.
        with contextlib.suppress(binding().cuBLASLtError):
            enumeration = _Enumeration(handle, desc, number, align)
            found.extend(enumeration.run(share))
    found.sort(key=lambda pair: pair[0])
    return [replace(x, algorithm=labelled(x.algorithm.data)) for _, x in found]


def shortlist(listed: list[Found], more: list[Found], most: int) -> list[Found]:
    """The heuristic's algorithms and, up to `most`, some of every likely tile among the others.

    `more` has the likeliest tiles first. Ids that were found to walk the chain go before those that were not, which a
    trial would refuse more often than not.
    """
    known = {x.algorithm.data for x in listed}
    others: dict[tuple[int, ...], list[tuple[int, Found]]] = {}
    for x in more:
        if x.algorithm.data not in known:
            chosen = settings(x.algorithm.data)
            kind = (chosen["CLUSTER_SHAPE_ID"], chosen["CUSTOM_OPTION"] >> 1)
            tile = (chosen["ID"], chosen["TILE_ID"], chosen["STAGES_ID"], chosen["CUSTOM_OPTION"] & 1)
            others.setdefault(tile, []).append((VARIANTS.index(kind) if kind in VARIANTS else len(VARIANTS), x))
    picked = [x for tile in others.values() for _, x in sorted(tile, key=lambda pair: pair[0])[:4]]
    both = listed + picked
    both.sort(key=lambda x: settings(x.algorithm.data)["ID"] not in LIKELY)  # stable
    return both[:most]


def cost(tile: tuple[int, int] | None, call: CublasCall) -> float:
    """A guess at the time that a tile takes, in clocks for each element of K: for the order of trials alone.

    Waves of tiles, each bound by the tensor cores (2048 multiply-adds a clock on Hopper) or by its operands' way
    through the second-level cache (some 40 bytes a clock).
    """
    if tile is None:
        return math.inf
    rows, columns = tile
    tiles = call.batch * math.ceil(call.out.rows / rows) * math.ceil(call.out.columns / columns)
    return math.ceil(tiles / PROCESSORS) * max(rows * columns / 2048, (rows + columns) * 2 / 40)


@cache
def extents(tile: int) -> tuple[int, int] | None:
    """Rows and columns of a tile, from the library's name for it."""
    match = re.fullmatch(r"(\d+)x(\d+)", _name(binding().MatmulTile, tile, "TILE_"))
    return (int(match[1]), int(match[2])) if match else None


def _algorithm_ids(handle: int, desc: Descriptors) -> tuple[int, ...]:
    found = binding().matmul_algo_get_ids(handle, COMPUTE_32F, DATA_TYPE["float32"], *desc.call.types, 256)
    return tuple(int(i) for i in found)


@cache
def capabilities(handle: int, types: tuple[int, ...], number: int) -> dict[str, tuple[int, ...]]:
    """What an algorithm id can be set to."""
    lt = binding()
    held = (ctypes.c_uint8 * ALGORITHM_BYTES)()
    lt.matmul_algo_init(handle, COMPUTE_32F, DATA_TYPE["float32"], *types, number, ctypes.addressof(held))
    names = ["TILE_IDS", "STAGES_IDS", "CUSTOM_OPTION_MAX", "CTA_SWIZZLING_SUPPORT", "STRIDED_BATCH_SUPPORT"]
    names += [f"MIN_ALIGNMENT_{x}_BYTES" for x in "ABCD"]
    return {name: _capability(lt, ctypes.addressof(held), name) for name in names}


def _capability(lt: Any, address: int, name: str) -> tuple[int, ...]:
    values, written = (ctypes.c_uint32 * 1024)(), ctypes.c_size_t()
    size = ctypes.sizeof(values) if name.endswith("_IDS") else 4
    lt.matmul_algo_cap_get_attribute(
        address, int(lt.MatmulAlgoCapAttribute[name]), ctypes.addressof(values), size, ctypes.addressof(written)
    )
    return tuple(values[: written.value // 4]) or ((0,) if size == 4 else ())


class _Enumeration:
    """The configurations of one algorithm id, tiles that suit the call first."""

    def __init__(self, handle: int, desc: Descriptors, number: int, align: int) -> None:
        self.lt, self.handle, self.desc = binding(), handle, desc
        self.can = capabilities(handle, desc.call.types, number)
        self.held = (ctypes.c_uint8 * ALGORITHM_BYTES)()
        self.address = ctypes.addressof(self.held)
        self.lt.matmul_algo_init(handle, COMPUTE_32F, DATA_TYPE["float32"], *desc.call.types, number, self.address)
        self.suits = all(self.can[f"MIN_ALIGNMENT_{o}_BYTES"][0] <= align for o in "ABCD")
        self.options = range(min(self.can["CUSTOM_OPTION_MAX"][0] + 1, MOST_OPTIONS))
        self.swizzles = range(2 if self.can["CTA_SWIZZLING_SUPPORT"][0] else 1)
        self.clusters = [int(c) for c in self.lt.ClusterShape]
        self.result = _Result()
        self._set(SPLITK_NUM=1, REDUCTION_SCHEME=0)

    def run(self, end: float) -> Iterator[tuple[float, Found]]:
        """All that is found until `end` (of the monotonic clock), each with its tile's cost."""
        if not self.suits:
            return
        costs = {tile: cost(extents(tile), self.desc.call) for tile in self.can["TILE_IDS"] or (0,)}
        least = math.inf
        for tile, guess in sorted(costs.items(), key=lambda item: item[1]):
            if guess > WORST * least:
                return
            self._set(TILE_ID=tile)
            for stages in self.can["STAGES_IDS"] or (0,):
                self._set(STAGES_ID=stages)
                for found in self._vary():
                    least = min(least, guess)
                    yield guess, found
            if time.monotonic() > end:
                return

    def _vary(self) -> Iterator[Found]:
        """What the tile and stages that are set work with.

        Options come first, because tiles whose rows are a multiple of 64 may want an odd one, and others an even one.
        """
        for option in self.options:
            self._set(CUSTOM_OPTION=option)
            if not any(self._try(CLUSTER_SHAPE_ID=c) for c in CLUSTERS):
                continue
            found = [x for c in self.clusters if (x := self._try(CLUSTER_SHAPE_ID=c))]
            if len(found) == len(self.clusters):  # it accepts everything: it does not look at clusters
                found = found[:1]
            yield from found
            for swizzle in self.swizzles[1:]:
                yield from (x for x in (self._try(CLUSTER_SHAPE_ID=CLUSTERS[1], CTA_SWIZZLING=swizzle),) if x)
            self._set(CTA_SWIZZLING=0)

    def _set(self, **values: int) -> None:
        put, names = self.lt.matmul_algo_config_set_attribute, self.lt.MatmulAlgoConfigAttribute
        for name, value in values.items():
            set_attribute(put, self.address, names[name], value, SETTINGS[name])

    def _try(self, **values: int) -> Found | None:
        try:
            self._set(**values)
        except self.lt.cuBLASLtError:  # not a value for this algorithm
            return None
        accepted = _accepted(self.lt, self.handle, self.desc, self.address, self.result)
        return self.result.of(Algorithm(bytes(self.held))) if accepted else None
