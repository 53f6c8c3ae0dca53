"""Fingerprints are derived: what reaches a kernel's bits and is edited voids the verdicts on it, and on no other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from isogemm.backends.cuda.gemm.choose import FAMILIES
from isogemm.planner.fingerprint import PACKAGE, TIMES, fingerprint, made_of

FOLDERS = ("rows", "attention", "quant")
BY_WGMMA = ("gemm/hopper", "gemm/leaves", "gemm/padded", "gemm/tf32", "gemm/unaligned")
COMPILED_HERE = (*BY_WGMMA, "gemm/sgemm", *FOLDERS)  # CUDA C++
BY_TRITON = ("gemm/tile", "gemm/lists")
EVERY = (*COMPILED_HERE, *BY_TRITON, "gemm/cublaslt")


def of(package: Path) -> dict[str, str]:
    """Fingerprints of all homes in a copy of the package."""
    _clear()
    return {name: fingerprint(f"backends/cuda/{name}", package) for name in EVERY}


def _clear() -> None:
    from isogemm.planner import fingerprint as module

    module._hashed.cache_clear()
    module._named.cache_clear()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for folder in ("backends", "contract", "formats", "planner"):
        shutil.copytree(PACKAGE / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.npz"))
    return tmp_path


def edited(package: Path, file: str, old: str = "", new: str = "") -> set[str]:
    """Homes whose fingerprints change when a file does."""
    before, path = of(package), package / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new) if old else f"{text}\n")
    after = of(package)
    return {name for name in EVERY if after[name] != before[name]}


def test_homes_of_families_are_those() -> None:
    homes = {row.partition(".")[0] for row in FAMILIES.rows.values()}
    assert {f"gemm/{home}" for home in homes} | set(FOLDERS) == set(EVERY)
    for family in FAMILIES.found.values():
        assert made_of(family.home)


def test_the_compiler_s_options_are_part_of_it(package: Path) -> None:
    """Products and sums that are fused have other bits, and nothing but this option says so."""
    changed = edited(package, "backends/cuda/driver/nvrtc.py", '"--fmad=false"', '"--restrict"')
    assert changed >= set(COMPILED_HERE)


@pytest.mark.parametrize(
    ("file", "homes"),
    [
        ("gemm/hopper/hopper.cu", set(BY_WGMMA) - {"gemm/tf32"}),
        ("gemm/padded/pad.cu", {"gemm/padded", "gemm/unaligned"}),
        ("gemm/unaligned/unaligned.cu", {"gemm/unaligned"}),
        ("gemm/sgemm/ring.cu", {"gemm/sgemm", "gemm/leaves"}),
        ("gemm/meet.cu", {"gemm/tf32", "gemm/leaves"}),
        ("gemm/tf32/split.cu", {"gemm/tf32", "gemm/sgemm", "gemm/leaves"}),
        ("gemm/tile/tile.py", {"gemm/tile", "gemm/lists"}),
        ("gemm/lists/items.py", {"gemm/lists"}),
        ("gemm/cublaslt/search.py", {"gemm/cublaslt"}),
        ("include/fp32_epilogue.cu", {"gemm/sgemm", "gemm/tf32", "gemm/leaves"}),
        ("include/hopper_ptx.cu", {*BY_WGMMA, "gemm/sgemm"}),
        ("include/hopper_operand.cu", set(BY_WGMMA) - {"gemm/tf32"}),
        ("driver/wgmma.py", set(BY_WGMMA)),
        ("driver/tensormap.py", {*BY_WGMMA, "gemm/sgemm"}),
        ("driver/triton_build.py", {"gemm/tile", "gemm/lists"}),
        ("rows/ops.cu", {"rows"}),
        ("attention/common.cu", {"attention"}),
        ("quant/integers/walk.cu", {"quant"}),
        ("driver/kernel.py", set(EVERY) - {"gemm/cublaslt"}),
    ],
)
def test_what_is_included_and_imported_is_part_of_it(file: str, homes: set[str], package: Path) -> None:
    changed = edited(package, f"backends/cuda/{file}")
    products = {name for name in EVERY if name.startswith("gemm/")}
    assert changed & products == homes & products
    assert changed >= homes


@pytest.mark.parametrize(("file", "homes"), [("bench.py", set(EVERY)), ("trials.py", {x for x in EVERY if "/" in x})])
def test_the_trial_is_part_of_it(file: str, homes: set[str], package: Path) -> None:
    """What was admitted by a trial that saw less is tried again."""
    assert edited(package, f"planner/{file}") >= homes
    assert not edited(package, "planner/tuning.py")
    for model in TIMES:
        assert not edited(package, model)


def test_the_definition_is_part_of_it(package: Path) -> None:
    assert edited(package, "contract/rows.py") >= {"rows"}
    assert edited(package, "contract/attention.py") >= {"attention"}
    assert edited(package, "formats/blocks.py") >= {"quant"}
    assert not edited(package, "backends/cpu/pool.py")


def test_a_home_that_is_not_there_has_none() -> None:
    with pytest.raises(FileNotFoundError):
        fingerprint("backends/cuda/gemm/nowhere")
