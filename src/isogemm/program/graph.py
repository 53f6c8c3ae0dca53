"""What is computed: values and operations, every value defined once, and gradients by the rule of each operation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import OptionError
from ..formats.blocks import FORMATS

SECTIONS = ("weights", "activations", "grad_activations", "grad_weights", "optimizer", "temporaries")
ITEMSIZE = {"float32": 4, "int64": 8, "uint8": 1}


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: its name, shape and dtype, and the section of memory that holds it.

    The dtype of a quantized weight is its format. `given` values are there before the first operation, and `kept` ones
    after the last.
    """

    name: str
    shape: tuple[int, ...]
    section: str
    dtype: str = "float32"
    given: bool = False
    kept: bool = False

    @property
    def size(self) -> int:
        """Bytes."""
        if self.dtype in ITEMSIZE:
            return math.prod(self.shape) * ITEMSIZE[self.dtype]
        n, k = self.shape
        return FORMATS[self.dtype].row_offset(n, k)


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One operation. Of `writes`, those that are among `reads` too are changed in place."""

    name: str
    kind: str
    phase: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Graph:
    """Values by name and operations in the order of the computation."""

    values: dict[str, Value] = field(default_factory=dict)
    operations: list[GraphNode] = field(default_factory=list)

    def value(self, name: str, shape: tuple[int, ...], section: str, **options: Any) -> str:
        """Add a value. Raises OptionError: there is one of this name."""
        if name in self.values:
            raise OptionError("value", limit="one definition of each name", value=name, nearest=f"{name}.1")
        self.values[name] = Value(name, shape, section, **options)
        return name

    def add(
        self, name: str, kind: str, phase: str, reads: tuple[str, ...], writes: tuple[str, ...], **options: Any
    ) -> None:
        """Add an operation."""
        self.operations.append(GraphNode(name, kind, phase, reads, writes, options))

    def section(self, name: str) -> Iterator[Value]:
        """The values of one section."""
        return (value for value in self.values.values() if value.section == name)

    def check(self) -> None:
        """Every value is defined once, before it is read; every operation of a gradient has its forward.

        Raises OptionError: the first value or operation that is not as it should be.
        """
        defined = {name for name, value in self.values.items() if value.given}
        seen = set()
        for op in self.operations:
            for name in (*op.reads, *op.writes):
                if name not in self.values:
                    raise OptionError(f"{op.name}", limit="values of the graph", value=name, nearest="define it")
            for name in op.reads:
                if name not in defined:
                    raise OptionError(
                        f"{op.name} reads", limit="what was defined before", value=name, nearest="reorder"
                    )
            for name in op.writes:
                if name in defined and name not in op.reads:
                    raise OptionError(f"{op.name} writes", limit="one definition", value=name, nearest=f"{name}.1")
            defined.update(op.writes)
            forward = op.options.get("of")
            if forward is not None and forward not in seen:
                raise OptionError(f"{op.name}", limit="a forward operation before it", value=forward, nearest="reorder")
            seen.add(op.name)
        if missing := sorted(set(self.values) - defined):
            raise OptionError("values", limit="each is defined by an operation", value=missing[0], nearest="drop it")
