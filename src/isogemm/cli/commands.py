"""The command line: ``isogemm audit``, ``plan``, ``tune``, ``study``, ``doctor``, ``program`` and others."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated, Any

import typer

from .._version import __version__
from ..base.command_line import run_app
from ..base.progress import progress_bar
from ..errors import LimitError, OptionError
from ..lab.admissions import admissions_command
from . import program, quant
from .audit import DID_NOT_RUN, audit_command
from .describe import describe_command
from .doctor import doctor_command
from .examples import examples
from .info import info_command
from .ops import ops_command
from .options import Several, element, numbers, refuse_beside
from .study import study_command
from .warm import warm_command

MOST_TRACED = 2**20  # k that one thread may walk over

app = typer.Typer(
    name="isogemm",
    help="Matrix products with the same bits whatever the batch, tile, form, layout or schedule.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command line; an audit in a process of its own, since what it calls may end the process."""
    if sys.argv[1:2] != ["audit"] or "--help" in sys.argv:
        command_line()
        return
    from ..audit.apart import AuditEnded, apart

    try:
        sys.exit(apart())
    except AuditEnded as error:
        typer.echo(f"isogemm: {error}", err=True)
        sys.exit(DID_NOT_RUN)


def command_line() -> None:
    """Run the command line in this process."""
    run_app(app, "isogemm", "isogemm")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"isogemm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Matrix products with the same bits whatever the batch, tile, form, layout or schedule."""


@app.command("version", epilog=examples("version"))
def version_command() -> None:
    """Show the version."""
    _show_version(True)


@app.command("plan", epilog=examples("plan"))
def plan_command(
    here: typer.Context,
    m: Annotated[int, typer.Argument(help="Rows of op(A).")],
    n: Annotated[int, typer.Argument(help="Columns of op(B).")],
    k: Annotated[int, typer.Argument(help="Length of the sum.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or int8 on a CPU.")] = "float32",
    trans: Annotated[str, typer.Option(help="NN, NT, TN or TT: op(A) and op(B).")] = "NT",
    threads: Annotated[int, typer.Option(min=0, help="Threads to plan for; 0 for the current count.")] = 0,
    device: Annotated[
        str,
        typer.Option(
            help="cpu; webgpu; cuda or cuda:1, a GPU of this machine; h200 or h100, which need not be here. "
            "Without a GPU cuda is h200."
        ),
    ] = "cpu",
    contract: Annotated[
        str, typer.Option(help="For example fma/chain; the device's default where none is given.")
    ] = "",
    tp: Annotated[
        int, typer.Option(min=0, help="Show instead what each of so many ranks computes and sends (needs torch).")
    ] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Items of a batch; with --heads sequences.")] = 1,
    groups: Annotated[str, typer.Option(help="Rows of each product of a group, as 3,100,0,57; M is their sum.")] = "",
    format: Annotated[str, typer.Option(help="A quantized weight's format, as Q4_0.")] = "",
    heads: Annotated[
        str, typer.Option(help="Heads of queries and of keys, as 32,8: attention of M tokens over N keys of width K.")
    ] = "",
    mask: Annotated[str, typer.Option(help="With --heads: causal, window:W, bool or added.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show how a product, a batch, a group, or attention would be computed, without computing it."""
    from rich.console import Console

    from ..api.plan import plan as planned

    dtype = element("--dtype", dtype, *([] if tp else ["int8"]))
    if len(trans) != 2:
        raise OptionError("trans", limit="two letters of N, T, C", value=repr(trans), nearest="NT")
    if tp:
        refuse_beside(here, f"--tp {tp}", "trans", "threads", "batch", "groups", "format", "heads", "mask")
        _print_traffic((m, n, k, tp), dtype, contract, device, json=json)
        return
    asked: dict[str, Any] = {
        "groups": numbers("--groups", groups or None, nearest="3,100") or None,
        "heads": numbers("--heads", heads or None, nearest="32,8") or None,
        "trans_a": trans[0].upper(),
        "trans_b": trans[1].upper(),
        "contract": contract or None,
        "threads": threads or None,
        "format": format or None,
    }
    plan: Any = planned(m, n, k, dtype=dtype, device=device, batch=batch, mask=mask, **asked)
    if json:
        typer.echo(plan.to_json())
    else:
        Console().print(plan)


def _print_traffic(sizes: tuple[int, int, int, int], dtype: str, contract: str, device: str, *, json: bool) -> None:
    from dataclasses import asdict
    from json import dumps

    from ..base.extras import require_extra

    require_extra("torch", "a plan of ranks", "torch")
    from ..torch.distributed import traffic

    found = traffic(*sizes, contract=contract or None, dtype=dtype, device=device)
    typer.echo(dumps([asdict(row) for row in found]) if json else "\n".join(map(str, found)))


@app.command("trace", epilog=examples("trace"))
def trace_command(
    kernel: Annotated[str, typer.Argument(help="A kernel of the WebGPU backend, for example gemv_simd.")],
    shape: Annotated[str, typer.Option(help="M,N,K of y[M, N] = x[M, K] @ w[N, K].T.")],
    thread: Annotated[str, typer.Option(help="ROW,GROUP,LANE: row of workgroups, group of 32 threads, lane.")],
    dtype: Annotated[
        str, typer.Option(help="Of w: float16, bfloat16 or float32; of kernels for blocks Q4_0, Q8_0, Q4_K or Q6_K.")
    ] = "",
) -> None:
    """Show what one thread of a kernel does: which outputs, which k, which bytes, what it writes. Needs no GPU."""
    from ..backends import backend
    from ..base.dtypes import SHORT_NAMES

    dtype = SHORT_NAMES.get(dtype, dtype)
    three = partial(numbers, count=3, nearest="1,4096,4096")
    sizes, place = tuple(three("--shape", shape)), tuple(three("--thread", thread))
    if sizes[2] > MOST_TRACED:
        limit = f"at most {MOST_TRACED}, of which each k is listed"
        raise LimitError("K to trace", limit=limit, value=sizes[2], nearest=MOST_TRACED)
    typer.echo(str(backend("webgpu").trace(kernel, sizes, place, dtype)))


@app.command("tune", epilog=examples("tune"))
def tune_command(
    model: Annotated[str, typer.Option(help="The linears of a named model, for example Qwen3-4B.")] = "",
    shapes: Annotated[
        str, typer.Option(help="A JSON or CSV file of n,k[,name]; in JSON also batch, trans and m.")
    ] = "",
    attention: Annotated[int, typer.Option(min=0, help="With --model: also its attention over so many tokens.")] = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32; bf16, fp16 or fp32 for short.")] = "bf16",
    contract: Annotated[str, typer.Option(help="For example tf32x3:sm90/chain; default: the device's.")] = "",
    m: Annotated[Several, typer.Option("--m", help="Rows to time, for example 1,16,4096. Default: 1 to 4096.")] = None,
    device: Annotated[int, typer.Option(min=0, help="Which GPU.")] = 0,
    budget: Annotated[float, typer.Option(min=0, help="Seconds to spend; 0 for no limit. Run again to go on.")] = 0,
    out: Annotated[str, typer.Option(help="Write the table here instead of into your own.")] = "",
) -> None:
    """Time the kernels that this GPU admits for a model's products, and keep the fastest in a table.

    Products that the table already holds for the same software are not timed again, so an interrupted run goes on.
    """
    from ..lab.models import model as named
    from ..lab.tune import attention as of_attention
    from ..lab.tune import linears, read_wanted, tune_device

    dtype = element("--dtype", dtype, nearest="bfloat16")
    if bool(model) == bool(shapes):
        raise OptionError(
            "products", limit="one of --model, --shapes", value="both" if model else "none", nearest="--model"
        )
    if attention and not model:
        raise OptionError("--attention", limit="with --model", value="alone", nearest="--model NAME")
    wanted = linears(named(model)) if model else read_wanted(shapes)
    if attention:
        wanted += of_attention(named(model), attention)
    with progress_bar() as progress:
        table, path, left = tune_device(
            wanted,
            dtype=dtype,
            contract=contract or None,
            ms=numbers("--m", m, nearest="1,16,4096"),
            device=device,
            out=out,
            budget=budget or float("inf"),
            progress=progress,
        )
    typer.echo(f"{len(table.rows)} products, {len(table.admitted)} groups of admitted kernels: {path}")
    if left:
        typer.echo(f"{left} products are left: run the same command again to go on")


app.command("audit", epilog=examples("audit"))(audit_command)
app.command("admissions", epilog=examples("admissions"))(admissions_command)
app.command("study", epilog=examples("study"))(study_command)
app.command("describe", epilog=examples("describe"))(describe_command)
app.command("doctor", epilog=examples("doctor"))(doctor_command)
app.command("ops", epilog=examples("ops"))(ops_command)
app.command("info", epilog=examples("info"))(info_command)
app.command("warm", epilog=examples("warm"))(warm_command)
app.command("quantize", epilog=examples("quantize"))(quant.quantize_command)
app.command("inspect", epilog=examples("inspect"))(quant.inspect_command)
app.add_typer(program.app, name="program", epilog=examples("program"))
