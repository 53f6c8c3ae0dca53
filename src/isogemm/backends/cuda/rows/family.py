"""What a kernel along rows is: a class for the `.cu` file beside this one, and a row of `kernels.KERNELS`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....planner.bench import Bench
from ..driver.kernel import Bound, Parameter, longs
from .code import Code, RowsCase
from .trial import try_code


class RowsKernel:
    """A family: one file of device code. What is here fits most of them."""

    name: str
    file: str  # its name, without ``.cu``
    # rows, each, rope, columns or table: in that file. It fixes the parameters (pointers, places, columns, `numbers`)
    # and which trial runs: those of the other kernels with a function of that name
    function: str
    home = "backends/cuda/rows"
    # leading dimensions of operands in trials: of code that counts one of them, and of code that counts four
    rows: tuple[tuple[int, ...], tuple[int, ...]] = (31,), (2, 3, 2, 3)

    def __init_subclass__(cls) -> None:
        cls.name = f"rows {cls.file}"

    def macros(self, case: RowsCase, *, vector: bool) -> Mapping[str, Any] | None:
        """What the kernel's own cut selects; None where it does not serve."""
        return {}

    def launch(self, code: Code, case: RowsCase) -> Mapping[str, Any]:
        """Grid, block, and bytes of shared memory."""
        raise NotImplementedError

    def numbers(self, code: Code, case: RowsCase) -> list[Parameter]:
        """The last parameters."""
        return [("i32", case.n), ("f32", case.eps)]

    def lengths(self, code: Code) -> tuple[int, ...]:
        """Of rows, in trials: what fills the code, and what just needs it."""
        raise NotImplementedError

    def configs(self, case: RowsCase) -> Sequence[Code]:
        """Code that reads as many neighbours as operands allow, then code that reads one by one."""
        found = []
        for vector in (True, False) if case.vector else (False,):
            own = self.macros(case, vector=vector)
            if own is not None:
                found.append(Code.of(self.file, self.function, {**(case.macros or {}), "VEC": vector, **own}))
        return found

    def supports(self, case: RowsCase, config: Code) -> bool:
        """Every code of `configs` is legal."""
        return True

    def code(self, case: RowsCase, config: Code) -> str:
        """The macros."""
        return str(config)

    def trial(self, bench: Bench, case: RowsCase, config: Code) -> str:
        """See `isogemm.backends.cuda.rows.trial`."""
        return try_code(bench, self, config)

    def bind(self, case: RowsCase, config: Code, device: int) -> Bound:
        """``launch(stream, addresses...)`` of pointers that are not absent, inputs first."""
        params: list[Parameter] = ["ptr" if kind >= 0 else ("ptr", 0) for kind in case.kinds]
        params += [("map", place) for place in case.places] + longs(*case.columns)
        params += self.numbers(config, case)
        return config.load(device).bind(params, pdl=True, **self.launch(config, case))
