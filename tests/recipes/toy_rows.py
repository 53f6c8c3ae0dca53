"""A kernel along rows, as CONTRIBUTING tells to add one: this file (its .cu is the tests' host kernel), and its row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isogemm.backends.cuda.rows.code import Code, RowsCase
from isogemm.backends.cuda.rows.family import RowsKernel


class Toy(RowsKernel):
    """Rows of any length, a block each."""

    file, function = "toy", "rows"

    def launch(self, code: Code, case: RowsCase) -> Mapping[str, Any]:
        return {"grid": (case.count,), "block": (128,)}

    def lengths(self, code: Code) -> tuple[int, ...]:
        return (128, 260)
