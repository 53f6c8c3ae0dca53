"""Activations of a file: floating-point matrices are taken as they are, and nothing else is taken for one."""

from __future__ import annotations

import io
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from isogemm.audit.data import ActivationSource
from isogemm.errors import DTypeError

MATRIX = np.random.default_rng(1).integers(-9, 9, (3, 8))
F32 = np.dtype(np.float32)


def rows_of(folder: Path, x: object) -> np.ndarray:
    np.save(folder / "x.npy", x)
    return ActivationSource(str(folder / "x.npy")).rows(3, 8, F32, 0)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ">f4"])
def test_rows_of_every_float_are_read(tmp_path: Path, kind: object) -> None:
    assert rows_of(tmp_path, MATRIX.astype(kind)).tolist() == MATRIX.tolist()


@pytest.mark.parametrize("kind", ["bool", "i8", "u2", "c8", "M8[s]", "U3", "S2", "V4", "f4,f4"])
def test_rows_of_other_types_are_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(DTypeError, match=r"dtype of activations: limit: .*; nearest legal choice: float32"):
        rows_of(tmp_path, np.zeros((3, 8), kind))


def _archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, x=MATRIX)
    return file.getvalue()


def _cut() -> bytes:
    file = io.BytesIO()
    np.save(file, MATRIX)
    return file.getvalue()[:-1]


@pytest.mark.parametrize("content", [b"", b"words", _archive(), _cut()], ids=["empty", "words", "npz", "cut"])
def test_a_file_of_no_one_array_is_bad_usage(run, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    (tmp_path / "s.csv").write_text("4,8\n")
    words = ("--inputs", str(tmp_path / "x.npy"), "--shapes", str(tmp_path / "s.csv"), "-p", "numpy", "--no-speed")
    status, _, error = run("audit", *words, "--m", "1,2", "--relation", "rerun", "--require", "none")
    assert status == 2
    assert "cannot read activations: limit: a .npy file" in error
