"""The operations of a decoder, each with the rule of its gradient beside it.

A rule takes the graph's `Gradients`, the operation and the gradient of its result; it adds operations and says what
they contribute to the gradients of the operands. Contributions to one value are added in the order in which they
come, that of the forward operations backwards, as autograd has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..backends.cpu.quant.layout import record
from ..formats.blocks import FORMATS
from .graph import Graph, GraphNode


@dataclass(slots=True)
class Maker:
    """Adds operations of the forward pass; every method gives the name of its result."""

    graph: Graph
    rows: int  # of activations: sequences times tokens
    phase: str = "forward"
    layer: str = ""

    def result(
        self, name: str, shape: tuple[int, ...], kind: str, *reads: str, dtype: str = "float32", kept: bool = False,
        **options: object,
    ) -> str:  # fmt: skip
        """An operation with one result, both called `name`."""
        whole = f"{self.layer}{name}"
        self.graph.value(whole, shape, "activations", dtype=dtype, kept=kept)
        self.graph.add(whole, kind, self.phase, reads, (whole,), **options)
        return whole

    def linear(self, name: str, x: str, w: str) -> str:
        """x @ w.T, plus w's bias if it has one; for a quantized weight x is quantized, once for all of one format."""
        weight, bias = self.graph.values[w], tuple(b for b in (f"{w}.bias",) if b in self.graph.values)
        shape = (self.rows, weight.shape[0])
        if weight.dtype == "float32":
            return self.result(name, shape, "linear", x, w, *bias)
        fmt = FORMATS[weight.dtype]
        records = f"{x.removeprefix(self.layer)}.for.{fmt.name}"
        if f"{self.layer}{records}" not in self.graph.values:
            size = weight.shape[1] // fmt.block * record(fmt).nbytes
            self.result(records, (self.rows, size), "quantize", x, dtype="uint8", format=fmt.name)
        return self.result(name, shape, "quantized_linear", f"{self.layer}{records}", w, *bias, format=fmt.name)


@dataclass(slots=True)
class Gradients:
    """The backward pass while it is made: what every value's gradient is the sum of."""

    graph: Graph
    parts: dict[str, list[str]] = field(default_factory=dict)
    phase: str = "backward"

    def of(self, name: str) -> str:
        """The gradient of a value; several contributions are added, the first two first."""
        parts = self.parts[name]
        total = parts[0]
        for i, part in enumerate(parts[1:], 1):
            last = i == len(parts) - 1
            added = self._value(f"d.{name}" if last else f"d.{name}.sum{i}", name)
            self.graph.add(added, "add", self.phase, (total, part), (added,))
            total = added
        return total

    def add(self, op: GraphNode, kind: str, reads: tuple[str, ...], writes: tuple[str, ...], **options: object) -> None:
        """An operation of `op`'s gradient, named after the first value that it writes."""
        self.graph.add(writes[0], kind, self.phase, reads, writes, of=op.name, **options)

    def contribute(self, op: GraphNode, place: int, kind: str, *reads: str, **options: object) -> None:
        """An operation whose result is a contribution to the gradient of operand `place`."""
        self.add(op, kind, reads, (self.contribution(op, place),), **options)

    def contribution(self, op: GraphNode, place: int) -> str:
        """A new value for a contribution to the gradient of operand `place`."""
        added = self._value(f"d.{op.reads[place]}.by.{op.name}", op.reads[place])
        self.parts.setdefault(op.reads[place], []).append(added)
        return added

    def accumulate(self, op: GraphNode, name: str, kind: str, *reads: str) -> None:
        """An operation that adds to the gradient of weight `name`.

        A weight that is used twice has a buffer for each use, and the buffers are added at the end.
        """
        use = f"dw.{name}" if f"dw.{name}" not in self.graph.values else f"dw.{name}.by.{op.name}"
        dw = self.graph.value(use, self.graph.values[name].shape, "grad_weights", kept=True, given=True)
        self.add(op, kind, (*reads, dw), (dw,))

    def _value(self, name: str, like: str) -> str:
        return self.graph.value(name, self.graph.values[like].shape, "grad_activations")


def _linear(to: Gradients, op: GraphNode, dy: str) -> None:
    """``dx = dy @ w``, ``dw += dy.T @ x`` in leaves of rows, and the bias's the sum of ``dy``."""
    x, w, *bias = op.reads
    to.contribute(op, 0, "linear_dx", dy, w)
    to.accumulate(op, w, "linear_dw", dy, x)
    for name in bias:
        to.accumulate(op, name, "sum_rows", dy)


def _rms_norm(to: Gradients, op: GraphNode, dy: str) -> None:
    """``dx = (g - h * mean(g * h)) * r`` with ``h = x * r`` and ``g = dy * w``; ``dw`` is the sum of ``dy * h``.

    For a layer norm x is ``x - mean(x)`` and the first g ``g - mean(g)``; the bias's is the sum of dy.
    """
    x, w, *bias = op.reads
    terms = to.graph.value(f"d.{op.name}.terms", to.graph.values[x].shape, "grad_activations")
    dx = to.contribution(op, 0)
    kind = "layer_norm_back" if bias else "rms_norm_back"
    to.add(op, kind, (dy, x, w), (dx, terms), **op.options)
    for name, some in ((w, terms), *((name, dy) for name in bias)):
        to.accumulate(op, name, "sum_rows", some)


def _add(to: Gradients, op: GraphNode, dy: str) -> None:
    """The gradient itself, for both."""
    for name in op.reads:
        to.parts.setdefault(name, []).append(dy)


def _silu_mul(to: Gradients, op: GraphNode, dy: str) -> None:
    """``s = sigmoid(x)``, ``dx = (dy * y) * (s * (1 + x * (1 - s)))``, ``dy * (x * s)`` for y."""
    to.add(op, "silu_mul_back", (dy, *op.reads), tuple(to.contribution(op, place) for place in (0, 1)))


def _gelu(to: Gradients, op: GraphNode, dy: str) -> None:
    """``s = sigmoid(2 * u)``, ``dy * (s + (x * (s * (1 - s))) * (2 * du/dx))``."""
    to.contribute(op, 0, "gelu_back", dy, *op.reads)


def _rope(to: Gradients, op: GraphNode, dy: str) -> None:
    """Turned back, and heads behind tokens again."""
    to.contribute(op, 0, "rope_back", dy, *op.reads[1:], **op.options)


def _heads(to: Gradients, op: GraphNode, dy: str) -> None:
    """Heads behind tokens again."""
    to.contribute(op, 0, "tokens", dy, **op.options)


def _split(to: Gradients, op: GraphNode, dy: str) -> None:
    """Heads behind tokens again, beside each other."""
    to.contribute(op, 0, "join", dy, *map(to.of, op.writes[1:]), **op.options)


def _attention(to: Gradients, op: GraphNode, dy: str) -> None:
    """The steps of `isogemm.torch.attention.gradients`."""
    found = tuple(to.contribution(op, place) for place in range(3))
    to.add(op, "attention_back", (dy, *op.reads, *op.writes), found, **op.options)


def _embedding(to: Gradients, op: GraphNode, dy: str) -> None:
    """Rows of dy added in order to those of their ids."""
    ids, w = op.reads
    to.accumulate(op, w, "scatter", dy, ids)


def _loss(to: Gradients, op: GraphNode, dy: str) -> None:
    """``(softmax(x) - 1 at the target) / count``: the gradient of the loss itself is 1."""
    to.contribute(op, 0, "loss_back", *op.reads[:2], **op.options)


GRADIENTS: dict[str, Callable[[Gradients, GraphNode, str], None]] = {
    "linear": _linear, "rms_norm": _rms_norm, "head_norm": _rms_norm, "add": _add, "silu_mul": _silu_mul,
    "layer_norm": _rms_norm, "gelu": _gelu, "split": _split,
    "rope": _rope, "heads": _heads, "attention": _attention, "embedding": _embedding, "loss": _loss,
}  # fmt: skip
