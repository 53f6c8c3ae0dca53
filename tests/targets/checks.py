"""The library compiled for another CPU than this one, in a process of its own: it has the same bits.

Kernels are cached under the CPU they are for, so all tests of one CPU name it with the same words, and are in one file:
files are what processes of tests share between them, and two at once would compile the same kernels twice.
"""

from __future__ import annotations

import pytest
from tests.backends.cpu.digest import digest as of_products
from tests.process import python
from tests.torch.digest import digest as of_rows

from isogemm.backends.cpu.emit.target import target

CPUS = {"avx2": ("haswell", "+avx2,+fma,+f16c,+bmi,+bmi2"), "generic": ("x86-64", "")}


def answer(isa: str, module: str, **environment: str) -> list[str]:
    """The words that `module` prints when it is run on such a CPU."""
    if not target().x86:
        pytest.skip("the names are those of x86 processors")
    if isa == "avx2" and target().isa == "generic":
        pytest.skip("this processor has no AVX2")
    name, features = CPUS[isa]
    processor = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    return python("-m", module, timeout=1200, **processor, **environment).split()


def quantized(isa: str) -> None:
    """One format of each shape of blocks against the definition, which is NumPy's."""
    assert answer(isa, "tests.targets.quantized") == [isa]


def products(isa: str) -> None:
    assert answer(isa, "tests.backends.cpu.digest", ISOGEMM_NUM_THREADS="1") == [isa, of_products()]


def rows(isa: str) -> None:
    assert answer(isa, "tests.torch.digest", ISOGEMM_NUM_THREADS="1") == [isa, of_rows()]
