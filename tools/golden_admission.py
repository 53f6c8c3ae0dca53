"""Write the bits that kernels are admitted by: the reference's, for the operands of `isogemm.contract.golden`.

    python tools/golden_admission.py

Run it when a contract is added or a case changes; the file is part of the package. About a minute on two cores.
"""

from __future__ import annotations

import numpy as np
import typer

from isogemm.base.disk import replacing
from isogemm.base.dtypes import NUMPY
from isogemm.contract import golden, reference
from isogemm.contract.spec import Contract


def bits(arithmetic: str, dtype_a: str, dtype_b: str, case: golden.GoldenCase) -> np.ndarray:
    """float32 bits of one case, by the reference."""
    a, b = golden.operands(case, dtype_a, dtype_b)
    x, y = a.view(NUMPY[dtype_a]), b.view(NUMPY[dtype_b])
    if dtype_a != dtype_b:
        x, y = x.astype(np.float32), y.astype(np.float32)
    c = golden.start(case).view(np.float32) if case.started else None
    return reference.evaluate(x, y, Contract(arithmetic, case.order), c).view(np.uint32)


def main() -> None:
    """Write the file of the package."""
    vectors = {}
    for names in golden.combinations():
        listed = golden.cases(names[0], small=golden.is_small(*names))
        vectors[" ".join(names)] = np.concatenate([bits(*names, case).ravel() for case in listed])
    with replacing(golden.data_path()) as path, path.open("wb") as file:
        np.savez_compressed(file, **vectors)
    print(golden.data_path(), golden.data_path().stat().st_size, "bytes")


if __name__ == "__main__":
    typer.run(main)
