"""Statements of lectures and chapters that are wrong, with what is so instead, worked out when they are asked for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ..contract.compare import error_units
from ..errors import ShapeError
from ..formats.blocks import FORMATS
from ..lab import Work
from ..lab.models import MODELS
from ..quant.encode import quantize


def mended_facts() -> list[dict[str, str]]:
    """Each statement, what is so, and the value that was computed here."""
    return [
        _fact(
            "cublasGemmAlgo_t pins the algorithm",
            "ALGO0 to ALGO23 select nothing from sm_80 on; an algorithm is pinned through cublasLt",
            "a cublasLt plan names its algorithm: isogemm plan 512 2560 4096 --dtype bf16 --device cuda",
        ),
        _fact(
            "grouped heads are one strided batch",
            "32 query heads on 8 key heads have no constant stride; packed queries, pointers or a broadcast do it",
            f"steps between the keys of neighbours: {_steps(32, 8)}",
        ),
        _fact(
            "results are compared by elementwise relative error",
            "where terms cancel any order is far off; the bound is eps sqrt(K) (|A| |B|)",
            _cancelled(),
        ),
        _fact(
            "byte j of a Q4_0 block holds elements 2 j and 2 j + 1",
            "its low nibble holds element j, its high nibble element j + 16",
            f"elements {_nibbles()} are in byte 3",
        ),
        _fact("a row may end in a part of a super-block", "K has to be whole blocks; there are no parts", _refused()),
        _fact(
            "alignment to blocks shows a wrong row stride",
            "a stride off by one block is aligned too; only the producer's stride shows it",
            f"952 = {952 // 34} x 34, 986 = {986 // 34} x 34, remainders {952 % 34} and {986 % 34}",
        ),
        _fact(
            "tile_m = 4 keeps 12 threads busy at m = 16",
            "M is split into m / tile_m pieces, and a thread without a piece waits",
            f"{-(-16 // 4)} of 12 threads have work",
        ),
        _fact(
            "attention's training products do 128 T / (256 + T) operations a byte",
            "with 2 bytes an element; with 4 it is half of that",
            f"T = 1024: {_intensity(2):.1f} and {_intensity(4):.1f}",
        ),
        _fact(
            "a wrong type of alpha shows as noise",
            "float32 1.0 read as float16 is one of its halves; float16 1.0 read as float32 is next to nothing",
            f"{_halves()} and {np.array([1.0, 0.0], np.float16).view(np.float32)[0]:.3g}",
        ),
        _fact("head_dim = hidden / heads", "a model's configuration names it", _heads()),
    ]


def _fact(said: str, so: str, value: str) -> dict[str, str]:
    return {"the sources say": said, "what is so": so, "worked out here": value}


def _steps(heads: int, keys: int) -> str:
    of = [head * keys // heads for head in range(heads)]
    return ", ".join(map(str, sorted({after - before for before, after in pairwise(of)})))


def _cancelled() -> str:
    row, column = np.array([[1e8, 1.0, -1e8]], np.float32), np.ones((3, 1), np.float32)
    got = row[:, :1] + row[:, 1:2] + row[:, 2:]
    units = float(error_units(got, row, column).max())
    return f"1e8 + 1 - 1e8 is {float(got[0, 0]):g} in float32: relative error 1, {units:.2g} units of the bound"


def _nibbles() -> str:
    """Which elements of a block byte 3 of its codes follows."""
    zero = np.zeros((1, 32), np.float32)
    zero[0, 31] = -8.0  # the scale, the same for every block
    plain = quantize(zero, "Q4_0").rows[0]
    found = []
    for j in range(31):
        one = zero.copy()
        one[0, j] = 4.0
        if quantize(one, "Q4_0").rows[0][2 + 3] != plain[2 + 3]:
            found.append(j)
    return " and ".join(map(str, found))


def _refused() -> str:
    try:
        FORMATS["Q4_K"].row_bytes(896)
    except ShapeError as error:
        return str(error)
    return "896 is accepted"


def _intensity(itemsize: int) -> float:
    work = Work.gemm(1024, 1024, 128, itemsize=itemsize)
    return work.flops / work.nbytes


def _halves() -> str:
    return " or ".join(f"{x:g}" for x in np.array([1.0], np.float32).view(np.float16))


def _heads() -> str:
    one = MODELS["Qwen3-4B"]
    return f"{one.name}: {one.head_dim}, and {one.hidden} / {one.heads} = {one.hidden // one.heads}"
