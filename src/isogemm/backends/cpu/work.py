"""Plans of products that are more than one: batches, groups, quantized weights, attention; by what executes them.

Each function asks the executor's own choosers, so a plan says what a call of contiguous operands would launch. Nothing
in it reaches a bit.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...base.dtypes import NUMPY, name_of
from ...base.threads import get_num_threads
from ...contract.attention import LEAF, factor
from ...contract.spec import ContractLike
from ...errors import DTypeError, OptionError, ShapeError
from ...formats.blocks import format_of
from ...operands.views import array
from ...problem.forms import Mask, asked, operand_shapes, shape_of
from ...problem.numeric import AnyPlan, NumericPlan, integer_contract, numeric_plan, plan_data, reading, word
from ...problem.settings import Settings, check_operand
from .attention import run as attention
from .gemm import execute
from .gemm.facts import facts
from .gemm.plan import Plan, plan
from .quant import linear as quantized
from .quant.launch import ACTIVATIONS, panels_task

SCHEMA = "isogemm.work_plan.v1"
KINDS = 2**12  # of attention's blocks: a causal mask over a million tokens makes as many


@dataclass(frozen=True, slots=True)
class WorkStep:
    """A kind of launch."""

    name: str
    kernel: str  # which loops: gemv, batched gemv, tiled gemm and so on, or what is done between products
    shape: tuple[int, int, int]  # m, n and k of an item; k is 1 where nothing is multiplied
    items: int  # products, or rows, of a launch
    # threads, chunks: threads that claim so many chunks
    threads: int
    chunks: int
    launches: int = 1  # how often

    def __str__(self) -> str:
        m, n, k = self.shape
        some = f"{self.launches} x " if self.launches > 1 else ""
        return f"{some}{self.kernel}, {self.items} of {m} x {n} x {k}: {self.chunks} chunks, {self.threads} threads"


@dataclass(frozen=True, slots=True)
class WorkPlan(AnyPlan):
    """A frozen, printable plan for several products, or one of blocks, on the CPU.

    Attributes
    ----------
    m, n, k, trans_a, trans_b, numeric
        As in `isogemm.problem.numeric.AnyPlan`: of an item; m of groups is that of all, and attention's are the
        tokens, the keys and the width of a head.
    form : str
        batched, grouped, quantized or attention.
    about : tuple of (str, value)
        What else was asked: items, rows of groups, the format, heads.
    threads : int
        At most so many.
    steps : tuple of WorkStep
        In the order of the computation. Attention's blocks under a causal mask see ever more keys: where there are more
        than 4096 kinds of blocks, a step stands for several of them, with the most keys.
    alternatives : tuple of (str, str)
        What else there is, and why not.
    """

    form: str
    about: tuple[tuple[str, Any], ...]
    threads: int
    steps: tuple[WorkStep, ...]
    alternatives: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `WorkPlan.from_dict` gives the plan back."""
        return {"schema": SCHEMA, **AnyPlan.to_dict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> WorkPlan:
        """A plan from `to_dict`'s data, made anew.

        Raises
        ------
        OptionError
            Not a plan of this schema, or a damaged one, or this machine plans these products otherwise.
        """
        with reading(data, SCHEMA):
            given, about = data["numeric"], dict(data["about"])
            extents, trans = (data["m"], data["n"], data["k"]), data["trans_a"] + data["trans_b"]
            types = given["dtype_a"], given["dtype_b"], given["out_dtype"]
            found = MAKERS[data["form"]](extents, types, trans, given["contract"], data["threads"], **about)
        if json.loads(found.to_json()) != json.loads(json.dumps(data)):
            raise OptionError("plan", limit=f"what this machine plans, {found.digest}", value="another", nearest=found)
        return found

    @classmethod
    def from_json(cls, text: str) -> WorkPlan:
        """A plan from `to_json`'s text. Raises as `from_dict`."""
        return cls.from_dict(plan_data(text))

    def run(self, *operands: Any) -> Any:
        """Replay: the products of a and b, of x and a quantized w, or attention of q, k and v, as new arrays.

        Where the mask is a tensor, it comes last, [m, n].

        Raises
        ------
        ShapeError
            The operands are not the plan's.
        DTypeError, LayoutError, DeviceError
            They are of other types, or no arrays of this host, as in `isogemm.matmul`.
        OptionError
            `isogemm.get_num_threads()` is not the plan's, or w has another format.
        """
        if get_num_threads() != self.threads:
            limit = f"{self.threads}, the plan's"
            raise OptionError("threads of a replay", limit=limit, value=get_num_threads(), nearest="set_num_threads")
        wanted, found = operand_shapes(self.form, dict(self.about), (self.m, self.n, self.k)), shape_of(operands)
        if found != wanted:
            raise ShapeError("operands of a replay", limit=wanted, value=found, nearest="plan these operands anew")
        names = "qkv" if self.form == "attention" else "x" if self.form == "quantized" else "ab"
        types = self.numeric.dtype_a, self.numeric.dtype_b, self.numeric.dtype_b
        taken = [_taken(*each) for each in zip(names, operands, types, strict=False)]
        return _RUN[self.form](self, *taken, *operands[len(taken) :])

    def _title(self) -> str:
        return f"plan {self.form} {self.m} x {self.n} x {self.k}"

    def rows(self) -> list[tuple[str, str]]:
        lines = [*self.heading(), ("form", f"{self.form}: {asked(dict(self.about))}")]
        shown = self.steps if len(self.steps) <= 8 else self.steps[:7]
        lines += [("step" if step.name == self.form else step.name, str(step)) for step in shown]
        if len(shown) < len(self.steps):
            lines.append(("...", f"{len(self.steps) - len(shown)} more"))
        lines += [("not", f"{name}: {why}") for name, why in self.alternatives]
        return [*lines, ("digest", self.digest)]


def _loops(found: Plan) -> str:
    return f"{word(found.m, found.n)} ({found.strategy})"


def plan_batch(
    extents: tuple[int, int, int], types: tuple[str, str, str], trans: str, contract: ContractLike | None, threads: int,
    *, items: int,
) -> WorkPlan:  # fmt: skip
    """`items` products of one shape: whole products go to threads, several to a chunk where they are small."""
    each = plan(extents, types, trans, False, contract, 1)
    m, n, k = extents
    work = m * n * k
    some, per_chunk = execute.chunking(items, work * items, work, threads)
    chunks = -(-items // per_chunk)
    step = WorkStep("batched", _loops(each), extents, items, min(some, chunks), chunks)
    return _made("batched", trans, each.numeric, extents, {"items": items}, threads, (step,), (
        ("a loop of gemm", f"the same bits; {items} calls, each of which is cut for all threads"),
        ("one wide product", "faster where all items share A or B: `isogemm.forms.advise` sees whether they do"),
    ))  # fmt: skip


def plan_groups(
    extents: tuple[int, int, int], types: tuple[str, str, str], trans: str, contract: ContractLike | None, threads: int,
    *, rows: Sequence[int],
) -> WorkPlan:  # fmt: skip
    """Products [rows_i, n, k]: each is cut for all threads where there are few, else they are taken whole."""
    _, n, k = extents
    alone = threads if len(rows) < 4 * threads else 1
    each = [plan((m, n, k), types, trans, False, contract, alone) for m in rows]
    work, largest = sum(m * n * k for m in rows), max(m * n * k for m in rows)
    cut = len(rows) == 1 or (alone > 1 and work >= 2 * facts().serial)
    grids = [p.schedule.grid_m * p.schedule.grid_n for p in each]
    if cut:
        chunks, some = sum(grids), each[0].threads if len(rows) == 1 else threads
    else:
        some, per_chunk = execute.chunking(len(rows), work, largest, threads)
        chunks = -(-len(rows) // per_chunk)
    steps = tuple(
        WorkStep(f"group {i}", _loops(p), (p.m, n, k), 1, min(some, chunks), grids[i] if cut else 1)
        for i, p in enumerate(each)
    )
    why = "the same bits; every group would wait for the one before" if cut else "the same bits; a call for each group"
    return _made("grouped", trans, each[0].numeric, (sum(rows), n, k), {"rows": tuple(rows)}, threads, steps, (
        ("a loop of gemm", why), ("a padded batch", f"{max(rows) * len(rows)} rows for {sum(rows)}"),
    ))  # fmt: skip


def plan_quantized(
    extents: tuple[int, int, int], types: tuple[str, str, str], trans: str, contract: ContractLike | None, threads: int,
    *, format: str,
) -> WorkPlan:  # fmt: skip
    """x [m, k] in 8-bit blocks times a weight [n, k] of a format, exact integers and a float32 chain over blocks."""
    (m, n, k), fmt = extents, format_of(format)
    nbytes = fmt.row_offset(n, k)
    numeric = numeric_plan(k, dtype_a=types[0], dtype_b=types[0], out_dtype=types[2], contract="fma/chain")
    numeric = NumericPlan(integer_contract(contract), k, types[0], fmt.name, types[2], numeric.leaves)
    count = m * (k // fmt.block)
    few = m * k <= quantized.ALONE
    per_chunk = max(1, count) if few else max(1, ACTIVATIONS // fmt.block, -(-count // 2**16))
    pieces = -(-count // per_chunk)
    _, chunks, some = panels_task(fmt.name, m, n, k, threads)
    used = min(threads, pieces) if pieces >= 4 else 1
    first = WorkStep("quantize", f"quantize_{fmt.activations}".lower(), (m, k, 1), m, used, pieces)
    name = f"gemm_nt_{fmt.name}_{fmt.activations}".lower()
    product = WorkStep("product", f"{name}, {word(m, n)}", extents, 1, min(some, chunks), chunks)
    return _made("quantized", trans, numeric, extents, {"format": fmt.name}, threads, (first, product), (
        ("w.in_place()", f"the same bits without a second copy of {nbytes} bytes; slower from a few rows on"),
        ("activations='fp32'", "other numbers: float32 activations times dequantized weights, fma/chain"),
    ))  # fmt: skip


def plan_attention(
    extents: tuple[int, int, int], types: tuple[str, str, str], trans: str, contract: ContractLike | None, threads: int,
    *, sequences: int, heads: int, shared: int, mask: str = "",
) -> WorkPlan:  # fmt: skip
    """softmax(q @ k.T / sqrt(d) + mask) @ v by blocks of heads and tokens, whose products stay in a cache."""
    (tokens, keys, width), groups = extents, heads // shared
    each = plan((groups * tokens, keys, width), types, "NT", False, contract, 1)
    cut = _cut(extents, Mask.parse(mask), sequences, heads, shared)
    masked = f", {mask}" if mask else ""
    steps: list[WorkStep] = []

    def batch(name: str, shape: tuple[int, int, int], items: int, times: int) -> None:
        (m, n, k), layout = shape, "NT" if name == "scores" else "NN"
        used, per_chunk = execute.chunking(items, m * n * k * items, m * n * k, threads)
        chunks = -(-items // per_chunk)
        if items == 1:
            alone = plan(shape, types, layout, False, contract, threads)
            used, chunks = alone.threads, alone.schedule.grid_m * alone.schedule.grid_n
        kernel = _loops(plan(shape, types, layout, False, contract, 1))
        steps.append(WorkStep(name, kernel, shape, items, min(used, chunks), chunks, times))

    def between(name: str, kernel: str, columns: int, rows: int, wide: int, times: int) -> None:
        per_chunk = max(1, min(rows, attention.CHUNK // max(1, wide)))
        chunks = -(-rows // per_chunk)
        steps.append(WorkStep(name, kernel, (1, columns, 1), rows, min(threads, chunks), chunks, times))

    for (some, rows, seen), times in cut.items():
        lines, leaves, (whole, rest) = groups * rows, -(-seen // LEAF), divmod(seen, LEAF)
        batch("scores", (lines, seen, width), some, times)
        between("leaves", f"maxima and powers of leaves{masked}", seen, some * lines, seen, times)
        if whole:
            items, again = (whole, some) if some < whole else (some, whole)  # in the fewest launches
            batch("values", (lines, width, LEAF), items, times * again)
        if rest:
            batch("last leaf", (lines, width, rest), some, times)
        between("meeting", "leaves meeting", width, some * lines, leaves * width, times)
    about = {"sequences": sequences, "heads": heads, "shared": shared} | ({"mask": mask} if mask else {})
    of_block = max((4 * some * groups * rows * seen for some, rows, seen in cut), default=0)
    return _made("attention", "NT", each.numeric, extents, about, threads, tuple(steps), (
        ("all at once", f"{4 * sequences * heads * tokens * keys} bytes of scores; a block has {of_block}"),
        ("two batches and a softmax", "other numbers: its sums do not go leaf by leaf"),
    ))  # fmt: skip


def _cut(
    extents: tuple[int, int, int], mask: Mask, sequences: int, heads: int, shared: int
) -> Counter[tuple[int, int, int]]:
    """Blocks (places, tokens, keys) and how many there are of each, in the order of the executor.

    Under a causal mask each block sees more keys than the one before: of more than `KINDS`, neighbours count as the
    last of them.
    """
    tokens, keys, _ = extents
    parts = [(tokens, keys)]
    if mask.kind == "window":
        first, last = (x[None, None] for x in mask.seen(tokens, keys))
        start, stop, apart = attention.sharing(first, last, (sequences, heads, tokens))
        parts = [(len(x.tokens), x.stop - x.start) for x in apart] or [(tokens, int(stop[0] - start[0]))]
    places, found = sequences * shared, Counter[tuple[int, int, int]]()
    for rows, wide in parts:
        most, each = attention.block_of(places, heads // shared, rows, wide)
        offset = mask.offset(rows, wide)
        offset = wide if offset is None else offset
        whole, rest = divmod(rows, each)
        together = -(-whole // KINDS)
        for some, times in ((most, places // most), (places % most, 1)):
            for i in range(max(0, -offset) // each, whole, together):  # those before see no key
                end = min(i + together, whole)
                found[some, each, min(wide, end * each + offset)] += times * (end - i)
            found[some, rest, min(wide, rows + offset)] += times
    return Counter({block: count for block, count in found.items() if 0 not in block})


def _made(
    form: str, trans: str, numeric: NumericPlan, extents: tuple[int, int, int], about: dict[str, Any], threads: int,
    steps: tuple[WorkStep, ...], alternatives: tuple[tuple[str, str], ...],
) -> WorkPlan:  # fmt: skip
    some = tuple(about.items())
    return WorkPlan(*extents, trans[0], trans[1], numeric, form, some, threads, steps, alternatives)


def _taken(name: str, x: Any, dtype: str) -> Any:
    """An operand of a replay as an array, and each of a list."""
    if isinstance(x, list | tuple):
        return [_taken(name, each, dtype) for each in x]
    x = array(name, x)
    check_operand(name, x)
    if name_of(x.dtype) != dtype:
        raise DTypeError(f"{name} of a replay", limit=dtype, value=name_of(x.dtype), nearest="the plan's types")
    return x


def _batch(p: WorkPlan, a: Any, b: Any) -> Any:
    out = np.empty((*a.shape[:2], p.n), NUMPY[p.numeric.out_dtype])
    execute.gemm_batched(a, b, out, Settings(p.contract))
    return out


def _groups(p: WorkPlan, a: Any, b: Any) -> Any:
    outs = [np.empty((len(x), p.n), NUMPY[p.numeric.out_dtype]) for x in a]
    execute.gemm_items([(x, y, out, None) for x, y, out in zip(a, b, outs, strict=True)], Settings(p.contract))
    return outs


def _quantized(p: WorkPlan, x: Any, w: Any) -> Any:
    of = getattr(w, "format", type(w).__name__)
    if str(of) != dict(p.about)["format"]:
        raise OptionError("format of a replay", limit=dict(p.about)["format"], value=of, nearest="plan it anew")
    out = np.empty((p.m, p.n), NUMPY[p.numeric.out_dtype])
    quantized.gemm(x, w.panels(), w.format, out)
    return out


def _attention(p: WorkPlan, q: Any, k: Any, v: Any, shown: Any = None) -> Any:
    mask, sizes = Mask.parse(dict(p.about).get("mask", "")), (*q.shape[:3], p.n)
    if shown is not None and (shown.dtype == bool) != (mask.kind == "bool"):
        raise DTypeError("mask of a replay", limit=mask.kind, value=shown.dtype, nearest="the plan's")
    shown = mask.shown(p.m, p.n) if mask.kind == "window" else shown
    return attention.forward(
        q, k, v, c=factor(None, p.k), mask=None if shown is None else np.broadcast_to(shown, sizes),
        causal_offset=mask.offset(p.m, p.n), ranged=mask.kind == "window", arithmetic=p.contract.arithmetic,
    )[0]  # fmt: skip


MAKERS: dict[str, Callable[..., WorkPlan]] = {
    "batched": plan_batch, "grouped": plan_groups, "quantized": plan_quantized, "attention": plan_attention
}  # fmt: skip
_RUN: dict[str, Callable[..., Any]] = {
    "batched": _batch, "grouped": _groups, "quantized": _quantized, "attention": _attention
}  # fmt: skip
