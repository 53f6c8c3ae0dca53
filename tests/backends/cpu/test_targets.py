"""What kernels are compiled for, and the digest that other CPUs are held to (tests/targets)."""

from __future__ import annotations

import pytest

from isogemm.backends.cpu.emit.target import target

from .digest import digest


@pytest.fixture(scope="module")
def here() -> str:
    return digest()


def test_digest_depends_on_the_bits(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from . import digest as module

    whole = module._bytes
    calls = []

    def one_flipped(*args: object) -> bytes:
        calls.append(None)
        found = bytearray(whole(*args))
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
