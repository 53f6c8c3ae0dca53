"""Vectors recorded on an H200, through the public calls and through every configuration of every family."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.backends.cuda import forced
from tests.backends.cuda.device import BF16, FP16, IEEE, TF32, Mode, same, torch, upload
from tests.contract.test_golden import FACTS, load

import isogemm

pytestmark = pytest.mark.gpu

FORMATS = {"bfloat16": BF16, "float16": FP16, "tf32": TF32, "float32": IEEE}
PARTS = 6
LENGTHS = {
    "bfloat16": (7, 16, 333, 2568),
    "float16": (7, 16, 333, 2568),
    "tf32": (7, 100, 2568),
    "float32": (16, 96, 336),
}


def names(fmt: str, k: int | None = None, started: bool | None = None) -> list[str]:
    """Cases of a format; of one K, with a start or without."""
    found = [name for name in FACTS["cases"] if name.split("-")[0] == fmt]
    if k is not None:
        found = [name for name in found if name.split("-k")[1].split("-")[0] == str(k)]
    return [name for name in found if started is None or name.endswith("-c") == started]


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_vector_through_the_public_calls(fmt: str) -> None:
    mode = FORMATS[fmt]
    for name in names(fmt):
        a, b, c, recorded, _ = load(name)
        start = None if c is None else upload(c)
        got = isogemm.gemm(
            upload(a), upload(b), start, accumulate=c is not None, out_dtype=torch.float32, **mode.options
        )
        same(got, recorded.view(np.float32), name)
        turned = isogemm.gemm(
            upload(b.T), upload(a.T), None if start is None else start.T.contiguous(),
            accumulate=c is not None, out_dtype=torch.float32, **mode.options,
        )  # fmt: skip
        same(turned.T, recorded.view(np.float32), f"{name}, transposed")


@cache
def stack(fmt: str, k: int, started: bool) -> tuple[Any, Any, Any, list[tuple[str, Any, Any, Any]]]:
    """All cases of one K as one product: their rows and columns one after the other; each case is a diagonal block."""
    cases = [(name, *load(name)[:4]) for name in names(fmt, k, started)]
    a = np.concatenate([case[1] for case in cases])
    b = np.concatenate([case[2] for case in cases], axis=1)
    c = np.zeros((a.shape[0], b.shape[1]), np.float32)
    blocks, row, column = [], 0, 0
    for name, x, y, start, recorded in cases:
        rows, columns = slice(row, row + x.shape[0]), slice(column, column + y.shape[1])
        if start is not None:
            c[rows, columns] = start
        blocks.append((name, rows, columns, upload(recorded.view(np.float32))))
        row, column = rows.stop, columns.stop
    return upload(a), upload(b), upload(c) if started else None, blocks


def wrong_blocks(name: str, config: str, mode: Mode, held: tuple[Any, ...], weights_first: bool) -> list[str] | None:
    """Cases that one kernel has other bits for; None where it does not support the product.

    Stages that fit beside few rows alone get the first rows alone: they have the bits that they have among all.
    """
    whole, b, start, blocks = held
    if weights_first:
        b = b.T.contiguous().T
    for m in (whole.shape[0], 32, 8, 1):
        a, c = whole[:m], None if start is None else start[:m]
        out = torch.full((m, b.shape[1]), float("nan"), device="cuda")
        product, at = forced.pose(a, b, out, mode, c)
        if forced.family(name).supports(product, config):
            break
    else:
        return None
    forced.run(name, config, product, at)
    found = []
    for case, rows, columns, want in blocks:
        got = out[rows, columns].view(torch.int32)
        if not torch.equal(got, want[: got.shape[0]].view(torch.int32)):
            found.append(f"{name} [{config}]: {case}")
    return found


def kernels(fmt: str) -> list[tuple[str, str]]:
    """Every configuration that any of the stacked products, or one row of them, lists."""
    mode, found = FORMATS[fmt], dict[tuple[str, str], None]()
    for k in LENGTHS[fmt]:
        a, b, _, _ = stack(fmt, k, False)
        for m in (1, 16, 32, 64, a.shape[0]):
            out = torch.empty((m, b.shape[1]), device="cuda")
            product, _ = forced.pose(a[:m], b.T.contiguous().T, out, mode)
            found |= dict.fromkeys(forced.candidates(product))
    return list(found)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_vector_through_every_configuration(fmt: str, part: int) -> None:
    wrong: list[str] = []
    for name, config in kernels(fmt)[part::PARTS]:
        tried = 0
        for k in LENGTHS[fmt]:
            for started in (False, True):
                if not names(fmt, k, started):
                    continue
                found = wrong_blocks(name, config, FORMATS[fmt], stack(fmt, k, started), weights_first=True)
                tried += found is not None
                wrong += found or []
        if not tried:
            wrong.append(f"{name} [{config}] supports none of the vectors")
    assert not wrong, "\n".join(wrong)


def test_nan_is_the_one_nan() -> None:
    """Every NaN that goes in, of either sign and any payload, comes out as 0x7fffffff, or 0x7fff in 16 bits."""
    for mode in (BF16, FP16, IEEE, TF32):
        size = 2 if mode.dtype != "float32" else 4
        payloads = [0x7FC1, 0xFFC0, 0xFFFF, 0x7F81] if mode is BF16 else [0x7E01, 0xFE00, 0xFFFF, 0x7C01]
        bits = np.array(payloads, np.uint16) if size == 2 else np.array([0x7FC00001, 0xFFC00000, 0x7F800001], np.uint32)
        a = np.ones((len(bits), 40), np.float32).astype(np.uint16 if size == 2 else np.uint32)
        a[:] = {"bfloat16": 0x3F80, "float16": 0x3C00, "float32": 0x3F800000}[mode.dtype]
        a[np.arange(len(bits)), np.arange(len(bits))] = bits
        x = upload(a.view({"bfloat16": "uint16"}.get(mode.dtype, mode.dtype))) if size == 4 else None
        if x is None:
            x = torch.from_numpy(a.view(np.int16)).cuda().view(getattr(torch, mode.dtype))
        w = torch.ones((72, 40), dtype=x.dtype, device="cuda")
        y = isogemm.linear(x, w, **mode.options).view(torch.int16 if size == 2 else torch.int32)
        assert (y == (0x7FFF if size == 2 else 0x7FFFFFFF)).all(), mode
        wide = isogemm.linear(x, w, out_dtype=torch.float32, **mode.options).view(torch.int32)
        assert (wide == 0x7FFFFFFF).all(), mode
