"""``isogemm ops``: the products of a model, what each has to do, and which kernel would."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DeviceError, OptionError
from .options import element, print_table

if TYPE_CHECKING:
    from ..lab.ceilings import Ceilings
    from ..lab.models import Model
    from ..lab.ops import Op


def ops_command(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="A named model, or a config.json, or its folder.")],
    phase: Annotated[str, typer.Option(help="prefill or decode.")] = "prefill",
    tokens: Annotated[int, typer.Option(help="Of each prompt; in decode, of the context.")] = 512,
    tp: Annotated[int, typer.Option("--tp", help="Devices that share the model.")] = 1,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32. Default: bf16, on a CPU fp32.")] = "",
    device: Annotated[str, typer.Option(help="cpu, or cuda; without a GPU by a shipped table.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """List every product of a model in one phase: form, shape, operations, bytes, bound, and the planned kernel.

    'at best' is the time that measured ceilings allow one call; 'expected' the one that a device's table or model has.
    """
    import json as text

    from ..lab.ops import ops

    kind = element("--dtype", dtype or ("fp32" if device == "cpu" else "bf16"))
    sizes = _model(name)
    products = ops(sizes, phase, tokens, tp=tp, batch=batch)
    ceilings = _ceilings(device, kind)  # measured, so what can be refused has been
    lines = [_line(op, kind, device, ceilings) for op in products]
    if json:
        typer.echo(text.dumps([line.facts() for line in lines], indent=1))
        return
    share = f", a part of {tp}" if tp > 1 else ""
    sequences = f", {batch} sequences" if batch > 1 else ""
    _print(lines, f"{sizes.name}, {phase} of {tokens} tokens{sequences}{share}, {kind} on {device}")


@dataclass(frozen=True, slots=True)
class _Line:
    """A product as it is printed."""

    op: Op
    flops: int
    nbytes: int
    bound: str
    best_us: float
    expected_us: float | None
    kernel: str

    def facts(self) -> dict[str, Any]:
        op = self.op
        return {
            "name": op.name, "form": op.form, "m": op.m, "n": op.n, "k": op.k, "layout": op.layout, "batch": op.batch,
            "count": op.count, "flops": self.flops, "bytes": self.nbytes, "intensity": self.flops / self.nbytes,
            "bound": self.bound, "best_us": self.best_us, "expected_us": self.expected_us, "kernel": self.kernel,
        }  # fmt: skip


def _model(name: str) -> Model:
    from ..lab.models import model, read_config

    inside = Path(name, "config.json")
    file = str(inside) if inside.is_file() else name
    return read_config(file) if file.endswith(".json") else model(name)


def _ceilings(device: str, dtype: str) -> Ceilings:
    """This machine's, measured now; without a GPU those of the shipped table."""
    from ..backends import accelerator
    from ..base.threads import get_num_threads
    from ..lab.ceilings import Ceilings, measure_ceilings
    from ..planner.tables import shipped_tables

    if device == "cpu":
        return measure_ceilings(get_num_threads())
    if device != "cuda":
        raise OptionError("device", limit="cpu or cuda", value=repr(device), nearest="cpu")
    if accelerator().usable():
        from ..lab.gpu.bench import rooflines

        return rooflines()["fp32" if dtype == "float32" else "bf16"]
    if not shipped_tables():
        raise DeviceError(
            "ceilings of cuda", limit="a GPU, or a shipped table", value="neither", nearest="--device cpu"
        )
    found = shipped_tables()[0].ceilings
    peak = found.tflops["fma" if dtype == "float32" else "tensor_core"]
    return Ceilings(1, 1e9 * found.memory_gb_per_second, 1e12 * peak)


def _line(op: Op, dtype: str, device: str, ceilings: Ceilings) -> _Line:
    work = op.work(dtype)
    arithmetic = work.flops / ceilings.flops_per_second >= work.nbytes / ceilings.bytes_per_second
    kernel, expected = _planned(op, dtype, device)
    bound = "compute" if arithmetic else "memory"
    return _Line(op, work.flops, work.nbytes, bound, 1e6 * ceilings.bound(work), expected, kernel)


def _planned(op: Op, dtype: str, device: str) -> tuple[str, float | None]:
    """The kernel of one product by its plan, and its expected time where the call is that one product."""
    from ..api.plan import plan

    found: Any = plan(op.each, op.n, op.k, dtype=dtype, trans_b=op.layout[1], device=device)
    if hasattr(found, "family"):  # of a GPU
        config = found.config.partition(" #")[0]  # what follows is a library's algorithm, word by word
        return f"{found.family} [{config}]", found.expected_us if op.form == "linear" else None
    return found.strategy, None


def _print(lines: list[_Line], title: str) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    titles = (
        "product",
        "form",
        "m x n x k",
        "calls",
        "GFLOP",
        "MB",
        "FLOP/byte",
        "bound",
        "at best",
        "expected",
        "kernel",
    )
    for each in titles:
        table.add_column(each, justify="left" if each in ("product", "form", "bound", "kernel") else "right")
    for line in lines:
        op = line.op
        items = f"{op.batch} x " if op.form != "linear" else ""
        cells = (
            op.name, op.form, f"{items}{op.each} x {op.n} x {op.k}", str(op.count),
            f"{line.flops / 1e9:.4g}", f"{line.nbytes / 1e6:.4g}", f"{line.flops / line.nbytes:.4g}", line.bound,
            _time(line.best_us), "" if line.expected_us is None else _time(line.expected_us), line.kernel,
        )  # fmt: skip
        table.add_row(*map(Text, cells))  # a kernel's name is no markup
    print_table(table)
    flops = sum(line.op.count * line.flops for line in lines)
    nbytes = sum(line.op.count * line.nbytes for line in lines)
    best = sum(line.op.count * line.best_us for line in lines)
    calls = sum(line.op.count for line in lines)
    typer.echo(
        f"{calls} calls: {flops / 1e9:.5g} GFLOP, {nbytes / 1e9:.4g} GB, {flops / nbytes:.4g} FLOP/byte, "
        f"{best / 1e3:.4g} ms at best"
    )


def _time(us: float) -> str:
    return f"{us / 1e3:.4g} ms" if us >= 1000 else f"{us:.4g} us"
