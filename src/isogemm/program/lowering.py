"""From operations to kernels' calls: what each reads and writes, temporaries by name, and the axis that may be cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..backends.cpu.quant.layout import COLUMNS
from ..contract.attention import LEAF
from ..formats.blocks import FORMATS
from .graph import Graph, GraphNode, Value


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a kernel sees it: shape, strides and offset in elements."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call of a kernel; chunks are cut along `axis`: ``m n k head``, or ``mn`` for tiles of a product."""

    name: str
    kernel: str
    phase: str
    of: str
    operands: tuple[View, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    shape: tuple[int, int, int]
    axis: str
    extent: int
    options: Mapping[str, Any] = field(default_factory=dict)
    reduction: tuple[str, str, str] | None = None

    @property
    def flops(self) -> int:
        """Of all products of the call; 0 where it makes none."""
        m, n, k = self.shape
        if not self.kernel.startswith("gemm"):
            return 0
        return 2 * m * n * k * (self.extent if self.kernel == "gemm_batched" else 1)


@dataclass(slots=True)
class Lowered:
    """Calls in order, and every value with its temporaries."""

    values: dict[str, Value]
    leaf: int
    groups: Mapping[str, int]
    calls: list[PlannedCall] = field(default_factory=list)

    def view(self, name: str, *shape: int) -> View:
        """The whole tensor, contiguous, in its own shape or another one."""
        return of_shape(name, shape or self.values[name].shape)

    def temporary(self, name: str, *shape: int) -> View:
        """A new tensor that one operation's calls share."""
        self.values[name] = Value(name, shape, "temporaries")
        return of_shape(name, shape)

    def call(
        self, op: GraphNode, kernel: str, reads: tuple[View, ...], writes: tuple[View, ...],
        shape: tuple[int, int, int], axis: str, extent: int, part: str = "", **options: Any,
    ) -> None:  # fmt: skip
        """Add a call; a tensor that is written and read before is among both."""
        reduction = options.pop("reduction", None)
        before, after = (tuple(dict.fromkeys(view.name for view in some)) for some in (reads, writes))
        name = f"{op.name}/{part}" if part else op.name
        made = PlannedCall(
            name, kernel, op.phase, op.name, (*reads, *writes), before, after, shape, axis, extent, options, reduction
        )  # fmt: skip
        self.calls.append(made)


def of_shape(name: str, shape: tuple[int, ...]) -> View:
    """A contiguous view."""
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return View(name, shape, strides)


def turned(view: View, *order: int) -> View:
    """The view with its dimensions in another order."""
    shape, strides = (tuple(x[i] for i in order) for x in (view.shape, view.strides))
    return View(view.name, shape, strides, view.offset)


def lower_graph(graph: Graph, leaf: int, groups: Mapping[str, int]) -> Lowered:
    """Every call of the graph's operations.

    `leaf` is the rows of a leaf in the gradients of weights, which is part of the numbers. `groups` says how many
    leaves of a gradient are computed side by side, in as many partial buffers; by default one.
    """
    to = Lowered(dict(graph.values), leaf, groups)
    for value in graph.section("grad_weights"):
        _zero(to, value.name)
    if "loss" in graph.values:
        _zero(to, "loss")
    for op in graph.operations:
        LOWERING[op.kind](to, op)
    return to


def _zero(to: Lowered, name: str) -> None:
    size = math.prod(to.values[name].shape)
    op = GraphNode(f"zero.{name}", "zero", "zero", (), (name,))
    to.call(op, "zero", (), (to.view(name, size),), (1, size, 1), "n", size)


def _product(
    to: Lowered, op: GraphNode, a: View, b: View, out: View, part: str = "", axis: str = "head",
    bias: tuple[View, ...] = (), **options: Any,
) -> None:  # fmt: skip
    """One product, or a batch of them, whose items go to threads along `axis`."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    if len(out.shape) == 2:
        to.call(op, "gemm", (a, b, *bias), (out,), (m, n, k), "mn", m, part, **options)
    else:
        to.call(op, "gemm_batched", (a, b), (out,), (m, n, k), axis, out.shape[0], part, **options)


def _linear(to: Lowered, op: GraphNode) -> None:
    x, w, *bias = op.reads
    _product(to, op, to.view(x), turned(to.view(w), 1, 0), to.view(op.writes[0]), bias=tuple(map(to.view, bias)))


def _linear_dx(to: Lowered, op: GraphNode) -> None:
    dy, w = op.reads
    _product(to, op, to.view(dy), to.view(w), to.view(op.writes[0]))


def _linear_dw(to: Lowered, op: GraphNode) -> None:
    """Leaves of rows into partial buffers, which meet in ascending order."""
    dy, x, dw = op.reads
    rows, n = to.values[dy].shape
    k, size = to.values[x].shape[1], math.prod(to.values[dw].shape)
    for i, (start, count, length) in enumerate(_groups(rows, to.leaf, to.groups.get(dw, 1))):
        name = f"tmp.partial.{dw}" + (f".{i}" if i else "")
        partial = to.temporary(name, count, n, k)
        a = View(dy, (count, n, length), (length * n, 1, n), start * n)
        b = View(x, (count, length, k), (length * k, k, 1), start * k)
        if count == 1:
            a, b, out = (View(v.name, v.shape[1:], v.strides[1:], v.offset) for v in (a, b, partial))
        else:
            out = partial
        how = ("leaves", name, "ascending")
        _product(to, op, a, b, out, f"leaves{i}", axis="k", reduction=how)
        to.call(
            op, "columns", (of_shape(name, (count * size,)), to.view(dw, size)), (to.view(dw, size),), (1, size, count),
            "n", size, f"meet{i}", reduction=how, first=count,
        )  # fmt: skip


def _sum_rows(to: Lowered, op: GraphNode) -> None:
    """Sums of leaves of rows, which meet in ascending order."""
    terms, dw = op.reads
    n = to.values[dw].shape[0]
    rows = math.prod(to.values[terms].shape) // n
    leaves, name = -(-rows // to.leaf), f"tmp.partial.{dw}"
    partial, how = to.temporary(name, leaves, n), ("leaves", name, "ascending")
    to.call(
        op, "leaf_columns", (to.view(terms, rows, n),), (partial,), (rows, n, 1), "n", n, "leaves", reduction=how,
        first=rows, second=to.leaf,
    )  # fmt: skip
    to.call(
        op, "columns", (partial, to.view(dw)), (to.view(dw),), (leaves, n, 1), "n", n, "meet", reduction=how,
        first=leaves,
    )  # fmt: skip


def _groups(rows: int, leaf: int, group: int) -> Iterator[tuple[int, int, int]]:
    """(first row, leaves, rows of each): whole leaves side by side, then what is left."""
    whole = rows // leaf
    for start in range(0, whole, group):
        yield start * leaf, min(group, whole - start), leaf
    if rows % leaf:
        yield whole * leaf, 1, rows % leaf


def _by_rows(kernel: str) -> Callable[[Lowered, GraphNode], None]:
    """An operation along rows of the first operand, as wide as the last one; vectors stand as they are."""

    def lower(to: Lowered, op: GraphNode) -> None:
        n = to.values[op.reads[-1]].shape[-1]
        rows = math.prod(to.values[op.reads[0]].shape) // n

        def seen(name: str) -> View:
            return to.view(name) if len(to.values[name].shape) == 1 else to.view(name, rows, n)

        reads, writes = (tuple(map(seen, names)) for names in (op.reads, op.writes))
        to.call(op, kernel, reads, writes, (rows, n, 1), "m", rows, **op.options)

    return lower


def _by_elements(kernel: str) -> Callable[[Lowered, GraphNode], None]:
    """An operation on elements."""

    def lower(to: Lowered, op: GraphNode) -> None:
        size = math.prod(to.values[op.writes[0]].shape)
        reads, writes = (
            tuple(to.view(name, math.prod(to.values[name].shape)) for name in names) for names in (op.reads, op.writes)
        )
        to.call(op, kernel, reads, writes, (1, size, 1), "n", size)

    return lower


def _embedding(to: Lowered, op: GraphNode) -> None:
    (ids, w), (y,) = op.reads, op.writes
    rows, n = to.values[y].shape
    to.call(op, "take", (to.view(w), to.view(ids)), (to.view(y),), (rows, n, 1), "m", rows)


def _put(to: Lowered, op: GraphNode) -> None:
    """Rows of keys or values into the places of their positions."""
    (x, positions, cache), (b, shared, keys, d) = op.reads, to.values[op.reads[2]].shape
    reads = (of_shape(x, (b * shared, d)), to.view(positions), to.view(cache))
    to.call(op, "put", reads, (to.view(cache),), (b * shared, d, 1), "m", b * shared, first=shared, second=keys)


def _visible(to: Lowered, op: GraphNode) -> None:
    rows, n = to.values[op.writes[0]].shape
    to.call(op, "visible", (to.view(op.reads[0]),), (to.view(op.writes[0]),), (rows, n, 1), "m", rows)


def _quantize(to: Lowered, op: GraphNode) -> None:
    """Activations to blocks of 8-bit integers, as the product with weights of a format takes them."""
    rows, k = to.values[op.reads[0]].shape
    fmt = FORMATS[op.options["format"]]
    reads, writes = (to.view(op.reads[0]),), (to.view(op.writes[0]),)
    kernel = f"quantize_{fmt.activations.lower()}"
    to.call(op, kernel, reads, writes, (rows, k, 1), "m", rows, format=fmt.name)


def _quantized_linear(to: Lowered, op: GraphNode) -> None:
    w = op.reads[1]
    (rows, n), k, fmt = to.values[op.writes[0]].shape, to.values[w].shape[1], FORMATS[op.options["format"]]
    reads, kernel = tuple(map(to.view, op.reads)), f"gemm_nt_{fmt.name}_{fmt.activations}".lower()
    to.call(op, kernel, reads, (to.view(op.writes[0]),), (rows, n, k), "n", n, format=fmt.name, unit=COLUMNS)


def _scatter(to: Lowered, op: GraphNode) -> None:
    dy, ids, dw = op.reads
    rows, n = to.values[dy].shape
    to.call(op, "scatter", (to.view(dy), to.view(ids), to.view(dw)), (to.view(dw),), (rows, n, 1), "n", n, first=rows)


def _tokens_heads(op: GraphNode) -> tuple[int, int, int]:
    return op.options["sequences"], op.options["tokens"], op.options["heads"]


def _rope(to: Lowered, op: GraphNode) -> None:
    """[tokens, heads] to [heads, tokens], turned."""
    (x, *angles), (y,) = op.reads, op.writes
    b, t, h = _tokens_heads(op)
    out = to.view(y)
    half = out.shape[-1] // 2
    source = turned(of_shape(x, (b, t, h, out.shape[-1])), 0, 2, 1, 3)
    each = t * half if to.values[angles[0]].shape[0] == b * t else 0  # a table of every sequence, or one of all
    tables = tuple(View(name, (b, h, t, half), (each, 0, half, 1)) for name in angles)
    to.call(op, "rows.rope", (source, *tables), (out,), (b * h * t, 2 * half, 1), "m", b * h * t)


def _rope_back(to: Lowered, op: GraphNode) -> None:
    (dy, cos, _), (dx,) = op.reads, op.writes
    b, t, h = _tokens_heads(op)
    n = to.values[dy].shape[-1]
    source = turned(to.view(dy), 0, 2, 1, 3)
    tables = tuple(View(name, (b, t, h, n // 2), (0, n // 2, 0, 1)) for name in (cos, "minus_sin"))
    to.call(op, "rows.rope", (source, *tables), (of_shape(dx, (b, t, h, n)),), (b * t * h, n, 1), "m", b * t * h)


def _moved(to: Lowered, op: GraphNode, source: View, out: View, part: str = "") -> None:
    """A copy of rows in the order of `source`'s dimensions."""
    rows = math.prod(source.shape[:-1])
    to.call(op, "move", (source,), (out,), (rows, source.shape[-1], 1), "m", rows, part)


def _heads(to: Lowered, op: GraphNode) -> None:
    b, t, h = _tokens_heads(op)
    out = to.view(op.writes[0])
    _moved(to, op, turned(of_shape(op.reads[0], (b, t, h, out.shape[-1])), 0, 2, 1, 3), out)


def _side_by_side(to: Lowered, op: GraphNode, joined: str) -> Iterator[View]:
    """Queries, keys and values in rows that hold all three, in the order [sequences, heads, tokens, width]."""
    b, t, d = (op.options[name] for name in ("sequences", "tokens", "width"))
    whole, first = to.values[joined].shape[1], 0
    for heads in op.options["heads"]:
        yield View(joined, (b, heads, t, d), (t * whole, d, whole, 1), first * d)
        first += heads


def _split(to: Lowered, op: GraphNode) -> None:
    for part, columns, name in zip("qkv", _side_by_side(to, op, op.reads[0]), op.writes, strict=True):
        _moved(to, op, columns, to.view(name), part)


def _join(to: Lowered, op: GraphNode) -> None:
    for part, columns, name in zip("qkv", _side_by_side(to, op, op.writes[0]), op.reads, strict=True):
        _moved(to, op, to.view(name), columns, part)


def _tokens(to: Lowered, op: GraphNode) -> None:
    _moved(to, op, turned(to.view(op.reads[0]), 0, 2, 1, 3), to.view(op.writes[0]))


def _attention(to: Lowered, op: GraphNode) -> None:
    """The steps of `isogemm.contract.attention`, leaf by leaf of the keys."""
    (b, shared, groups, t, d), seen, (q, k, v, *mask) = op.options["sizes"], op.options["keys"], op.reads
    heads, rows, leaves = b * shared, groups * t, -(-seen // LEAF)
    scores = to.temporary(f"tmp.scores.{op.name}", heads, rows, seen)
    powers = to.temporary(f"tmp.powers.{op.name}", heads, leaves, rows, LEAF)
    m, total = (to.temporary(f"tmp.{x}.{op.name}", heads, leaves, rows) for x in ("maxima", "sums"))
    parts = to.temporary(f"tmp.parts.{op.name}", heads, leaves, rows, d)
    whole = (b, shared * groups, t, d)
    y = to.temporary(f"tmp.heads.{op.name}", *whole) if t > 1 else of_shape(op.writes[0], whole)
    keys, values = (of_shape(name, (heads, seen, d)) for name in (k, v))
    _product(to, op, of_shape(q, (heads, rows, d)), turned(keys, 0, 2, 1), scores, "scores")
    to.call(
        op, "attention.leaves", (scores, *map(to.view, mask)), (scores, powers, m, total), (heads * rows, seen, 1),
        "head", heads * rows, "leaves", sizes=op.options["sizes"],
    )  # fmt: skip
    for n in range(leaves):
        count = min(LEAF, seen - n * LEAF)
        a = View(powers.name, (heads, rows, count), (leaves * rows * LEAF, LEAF, 1), n * rows * LEAF)
        some = View(v, (heads, count, d), values.strides, n * LEAF * d)
        out = View(parts.name, (heads, rows, d), (leaves * rows * d, d, 1), n * rows * d)
        _product(to, op, a, some, out, f"parts{n}")
    writes = (y, *(to.view(name) for name in op.writes[1:]))
    to.call(
        op, "attention.meeting", (parts, m, total), writes, (heads * rows, d, leaves), "head", heads * rows, "meeting",
        sizes=op.options["sizes"],
    )  # fmt: skip
    if t > 1:
        _moved(to, op, turned(y, 0, 2, 1, 3), to.view(op.writes[0]), "tokens")


def _attention_back(to: Lowered, op: GraphNode) -> None:
    """The steps of `isogemm.torch.attention.gradients`; queries of one token, head after head, stand together."""
    b, shared, groups, t, d = op.options["sizes"]
    dy, q, k, v, y, m, total = op.reads
    heads, rows, scale = b * shared, t * groups, d**-0.5

    def rows_of(part: str, source: View) -> View:
        found = to.temporary(f"tmp.{part}.{op.name}", b, shared, t, groups, source.shape[-1])
        _moved(to, op, source, found, part)
        return of_shape(found.name, (heads, rows, source.shape[-1]))

    dys, ys = (
        rows_of(part, turned(of_shape(x, (b, t, shared, groups, d)), 0, 2, 1, 3, 4))
        for part, x in (("dy", dy), ("y", y))
    )
    queries, largest, sums = (
        rows_of(part, turned(of_shape(x, (b, shared, groups, t, width)), 0, 1, 3, 2, 4))
        for part, x, width in (("q", q, d), ("m", m, 1), ("l", total, 1))
    )
    delta = to.temporary(f"tmp.delta.{op.name}", heads * rows)
    flat = tuple(of_shape(x.name, (heads * rows, d)) for x in (dys, ys))
    to.call(op, "row_dot", flat, (delta,), (heads * rows, d, 1), "m", heads * rows, "delta")
    p, ds = (to.temporary(f"tmp.{x}.{op.name}", heads, rows, t) for x in ("p", "ds"))
    keys, values = (of_shape(name, (heads, t, d)) for name in (k, v))
    _product(to, op, queries, turned(keys, 0, 2, 1), p, "scores")
    _product(to, op, dys, turned(values, 0, 2, 1), ds, "dp")
    to.call(
        op, "attention_steps", (p, ds, largest, sums, delta), (p, ds), (heads * rows, t, 1), "m", heads * rows, "steps",
        first=rows, second=groups, width=d,
    )  # fmt: skip
    dq = to.temporary(f"tmp.dq.{op.name}", heads, rows, d)
    _product(to, op, ds, keys, dq, "dq", alpha=scale)
    outs = [of_shape(name, (heads, t, d)) for name in op.writes[1:]]
    _product(to, op, turned(ds, 0, 2, 1), queries, outs[0], "dk", alpha=scale)
    _product(to, op, turned(p, 0, 2, 1), dys, outs[1], "dv")
    back = turned(of_shape(dq.name, (b, shared, t, groups, d)), 0, 1, 3, 2, 4)
    _moved(to, op, back, of_shape(op.writes[0], (b, shared, groups, t, d)), "heads")


def _loss(to: Lowered, op: GraphNode) -> None:
    logits, targets, loss = op.reads
    rows, n = to.values[logits].shape
    log_p = to.temporary("tmp.log_p", rows, n)
    to.call(op, "rows.log_softmax", (to.view(logits),), (log_p,), (rows, n, 1), "m", rows, "log_p")
    reads = (log_p, to.view(targets), to.view(loss))
    count = op.options["count"]
    to.call(op, "loss", reads, (to.view(loss),), (rows, n, 1), "none", rows, "mean", number=float(count))


def _loss_back(to: Lowered, op: GraphNode) -> None:
    (logits, targets), (dx,) = op.reads, op.writes
    rows, n = to.values[logits].shape
    to.call(op, "rows.softmax", (to.view(logits),), (to.view(dx),), (rows, n, 1), "m", rows, "p")
    reads = (to.view(dx), to.view(targets))
    number = float(op.options["count"])
    to.call(op, "loss_back", reads, (to.view(dx),), (rows, n, 1), "m", rows, number=number)


LOWERING: dict[str, Callable[[Lowered, GraphNode], None]] = {
    "embedding": _embedding, "linear": _linear, "rms_norm": _by_rows("rows.rms_norm"),
    "head_norm": _by_rows("rows.rms_norm"), "rope": _rope, "heads": _heads, "attention": _attention,
    "add": _by_elements("add"), "silu_mul": _by_rows("rows.silu_mul"), "loss": _loss,
    "linear_dx": _linear_dx, "linear_dw": _linear_dw, "rms_norm_back": _by_rows("rms_norm_back"),
    "layer_norm_back": _by_rows("layer_norm_back"),
    "sum_rows": _sum_rows, "rope_back": _rope_back, "tokens": _tokens, "attention_back": _attention_back,
    "silu_mul_back": _by_elements("silu_mul_back"), "scatter": _scatter, "loss_back": _loss_back,
    "adamw": _by_elements("adamw"), "put": _put, "visible": _visible, "quantize": _quantize,
    "quantized_linear": _quantized_linear, "layer_norm": _by_rows("rows.layer_norm"), "gelu": _by_elements("gelu"),
    "gelu_back": _by_elements("gelu_back"), "split": _split, "join": _join,
}  # fmt: skip
