"""AVX-512, AVX2 and generic code give the same bits: each is compiled, run in a process of its own and hashed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from isogemm.backends.cpu.target import target

from .digest import digest

ROOT = Path(__file__).parents[3]
TARGETS = {
    "avx2": ("haswell", "+avx2,+fma,+f16c,+bmi,+bmi2"),
    "generic": ("generic", ""),
}
X86 = pytest.mark.skipif(not target().x86, reason="the names are those of x86 processors")


@pytest.fixture(scope="module")
def here() -> str:
    return digest()


@X86
@pytest.mark.parametrize("isa", TARGETS)
def test_digest(isa: str, here: str) -> None:
    if isa == "avx2" and target().isa == "generic":
        pytest.skip("this processor has no AVX2")
    name, features = TARGETS[isa]
    env = os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "ISOGEMM_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.backends.cpu.digest"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [isa, here]


def test_digest_depends_on_the_bits(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from . import digest as module

    whole = module._bytes
    calls = []

    def one_flipped(*args: object) -> bytes:
        calls.append(None)
        found = bytearray(whole(*args))  # type: ignore[arg-type]
        found[0] ^= len(calls) == 100
        return bytes(found)

    monkeypatch.setattr(module, "_bytes", one_flipped)
    assert module.digest() != here
    assert len(calls) == len(module.MIXES) * len(module.SHAPES) * 6


def test_target_describes_a_tile_that_fits() -> None:
    cpu = target()
    assert cpu.isa in ("avx512", "avx2", "generic")
    assert cpu.nr % cpu.width == 0
    vectors = cpu.nr // cpu.width
    registers = 32 if cpu.isa == "avx512" or not cpu.x86 else 16
    assert cpu.mr * vectors + vectors < registers
    assert 1 <= cpu.mr_direct <= cpu.mr
