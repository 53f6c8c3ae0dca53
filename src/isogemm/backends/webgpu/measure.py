"""Crossovers of a device: kernels that could serve a shape, timed against each other; what was found is kept."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from hashlib import sha256
from pathlib import Path

import numpy as np

from ...base.disk import cache_folder, keep, kept
from ...base.dtypes import FLOAT16, FLOAT32
from .admission import AdapterAdmissions
from .array import empty
from .choose import Crossovers
from .launch import KernelCall, run

ROWS, COLUMNS = (8, 16, 32, 64, 128), (512, 2048, 8192, 32768)
DEPTH, BESIDE = 512, 1024  # K of all products, and N of those whose M is looked for
REPEATS = 5
NEVER = 2**30
Timer = Callable[[AdapterAdmissions, str, int, int], float]


def seconds(admissions: AdapterAdmissions, name: str, m: int, n: int) -> float:
    """The median time of a kernel on [m, DEPTH] x [DEPTH, n] of float16, its launch included."""
    adapter, place = admissions.adapter, admissions.adapter.place
    a, b = empty((m, DEPTH), FLOAT16, place), empty((n, DEPTH), FLOAT16, place)
    out = empty((m, n), FLOAT32, place)
    code = admissions.code(name, ("float16", "float16"), across=False)
    times = []
    for _ in range(REPEATS + 1):
        adapter.wait()
        begun = time.perf_counter()
        run(adapter, name, code, KernelCall(a, b.T, out))
        adapter.wait()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def measured(admissions: AdapterAdmissions, timer: Timer = seconds) -> Crossovers:
    """Time the kernels on either side of each crossover; the least extent from which the later one stays faster."""

    def rows(later: str, before: str) -> int:
        return _from(ROWS, lambda m: timer(admissions, later, m, BESIDE) < timer(admissions, before, m, BESIDE))

    def columns(later: str, before: str) -> int:
        return _from(COLUMNS, lambda n: timer(admissions, later, 1, n) < timer(admissions, before, 1, n))

    found = Crossovers(
        tiles=rows("gemm_tiled", "gemv_naive"), large=rows("gemm_vector", "gemm_narrow"),
        several=columns("gemv_simd_multi", "gemv_simd"), wide=columns("gemv_wide", "gemv_simd_multi"),
        source=f"measured on {np.datetime64('today')} with float16, K = {DEPTH}",
    )  # fmt: skip
    place = _file(admissions.adapter.name)
    if place is not None:
        keep(place, json.dumps(asdict(found)).encode())
    return found


def recalled(name: str) -> Crossovers:
    """What was measured on an adapter before; the defaults where nothing was."""
    place = _file(name)
    data = None if place is None else kept(place)
    try:
        found = json.loads(data) if data else {}
    except (ValueError, RecursionError):
        found = {}
    known = {field.name: type(field.default) for field in fields(Crossovers)}
    is_one = isinstance(found, dict) and {key: type(value) for key, value in found.items()} == known
    return Crossovers(**found) if is_one else Crossovers()


def _from(extents: Sequence[int], faster: Callable[[int], bool]) -> int:
    """The least extent from which on `faster` holds throughout; never, where it does not hold at the last."""
    found = NEVER
    for extent in reversed(extents):
        if not faster(extent):
            break
        found = extent
    return found


def _file(name: str) -> Path | None:
    folder = cache_folder("webgpu")
    return None if folder is None else folder / f"{sha256(name.encode()).hexdigest()[:16]}.json"
