"""What is compiled of a kernel along rows, and what is bound to it: a call but for its addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..driver.kernel import Kernel
from ..driver.nvrtc import function_of


class Code(NamedTuple):
    """A file of this folder without its suffix, the function in it, and the macros that it is compiled with."""

    file: str
    function: str
    defines: tuple[tuple[str, int | str], ...]

    @classmethod
    def of(cls, file: str, function: str, defines: Mapping[str, Any], **more: Any) -> Code:
        """With macros as a mapping; an operation is named by its enumerator."""
        every = {**defines, **more}
        return cls(file, function, tuple((key, v if isinstance(v, str) else int(v)) for key, v in every.items()))

    def __getattr__(self, name: str) -> Any:
        """The value of a macro, in small letters."""
        found = dict(self.defines).get(name.upper())
        if found is None:
            raise AttributeError(name)
        return found

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.defines)

    @property
    def operation(self) -> str:
        """Its name in `isogemm.contract.rows.OPERATIONS`."""
        return str(self.op).lower()

    def load(self, device: int) -> Kernel:
        """Compile, or take from a cache, and load."""
        return function_of(f"rows/{self.file}.cu", self.function, device, dict(self.defines))


@dataclass(frozen=True)
class RowsCase:
    """A launch but for its addresses."""

    kinds: tuple[int, ...]  # element codes of the pointers; a negative one is absent, and null for good
    places: tuple[bytes, ...]  # where rows lie: see `isogemm.backends.cuda.rows.sides.packed`
    columns: tuple[int, ...]  # steps from element to element, as the function takes them
    # count, n: rows, and their elements
    count: int
    n: int
    eps: float = 0.0
    start: bool = False  # whether sums over rows go on from what their result holds
    macros: Mapping[str, Any] | None = None  # what types, layouts and the operation select
    vector: bool = False  # whether neighbours can be read at once; then there is code that does, and code that does not
