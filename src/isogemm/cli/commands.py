"""The command line: ``isogemm audit``, ``plan``, ``tune``, ``study``, ``doctor``, ``program`` and others."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from .._version import __version__
from ..base.disk import check_room
from ..base.progress import progress_bar
from ..errors import IsogemmError, OptionError
from ..lab.admissions import admissions_command
from . import program, quant
from .describe import describe_command
from .doctor import doctor_command
from .examples import examples
from .info import info_command
from .ops import ops_command
from .study import study_command
from .unused import refuse_unused
from .warm import warm_command

if TYPE_CHECKING:
    from ..audit import Report, WeightSource
    from ..lab.models import LinearShape

DID_NOT_RUN = 3

app = typer.Typer(
    name="isogemm",
    help="Matrix products with the same bits whatever the batch, tile, form, layout or schedule.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)

Several = list[str] | None


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
    """Run the command line in this process; a typed error is bad usage: a line, its notes and exit status 2."""
    try:
        app(prog_name="isogemm")
    except IsogemmError as error:
        for line in (f"isogemm: {error}", *getattr(error, "__notes__", ())):
            typer.echo(line, err=True)
        sys.exit(2)


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


@app.command("audit", epilog=examples("audit"))
def audit_command(
    provider: Annotated[
        Several,
        typer.Option(
            "--provider",
            "-p",
            help="isogemm, numpy, torch, module:function or file.py:function; repeat or "
            "separate by commas. Default: isogemm,numpy; on a GPU isogemm,torch.",
        ),
    ] = None,
    require: Annotated[
        Several,
        typer.Option(
            help="Providers that must hold for exit status 0; 'none' for none. Default: your own "
            "(module:function or file.py:function) where any is named, else isogemm."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="The linears of a named model, for example Qwen3-4B.")] = "",
    shapes: Annotated[str, typer.Option(help="A JSON or CSV file of n,k[,name].")] = "",
    weights: Annotated[str, typer.Option(help="A .safetensors file; its 2-D weights are the linears.")] = "",
    match: Annotated[Several, typer.Option(help="With --weights: globs of tensor names.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="With --weights: at most so many; 0 for all.")] = 4,
    inputs: Annotated[str, typer.Option(help="A .npy file of activations [rows, k]; default random.")] = "",
    hf: Annotated[
        str, typer.Option(help="A folder with a transformers model: audit the whole model (needs isogemm[hf]).")
    ] = "",
    random: Annotated[
        bool, typer.Option("--random", help="With --hf: random weights; the folder needs only config.json.")
    ] = False,
    mode: Annotated[
        Several,
        typer.Option(help="With --hf: plain, invariant, convert; in place of providers. Default: plain,convert."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda: where providers compute, or the model of --hf.")] = "",
    quantize: Annotated[
        str, typer.Option(help="With --hf and the mode convert: a format of weights, for example Q4_K.")
    ] = "",
    tokens: Annotated[int, typer.Option(min=4, help="With --hf: length of a prompt.")] = 67,
    tp: Annotated[
        Several, typer.Option(help="With --hf: launch so many ranks, for example 1,2,4, and compare with one process.")
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="float32, bfloat16 or float16; fp32, bf16 or fp16 for short. Default: float32, or the model's own."
        ),
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Of random weights and activations.")] = 0,
    m: Annotated[Several, typer.Option("--m", help="Batch sizes of the sweep, for example 1,2,16.")] = None,
    relation: Annotated[Several, typer.Option(help="Only these relations.")] = None,
    full: Annotated[
        bool, typer.Option(help="The long sweep, M = 1 to 4096; more shapes where none are given.")
    ] = False,
    speed: Annotated[bool, typer.Option(help="Time the providers against each other.")] = True,
    json: Annotated[str, typer.Option("--json", "--out", help="Write the report as JSON.")] = "",
    html: Annotated[
        str, typer.Option(help="Write the report as one page that opens offline (needs isogemm[report]).")
    ] = "",
    replay: Annotated[str, typer.Option(help="Evaluate one case, as a drift report printed it.")] = "",
) -> None:
    """Check which calls of a matrix product, or of a whole model, keep their bits, for isogemm and for yours.

    Exit status: 0 when the required providers hold, 1 when not, 2 for bad usage, 3 when one did not run: without
    --require, any that is named. With --replay: 0 when that case holds, 1 when it does not, 3 when it cannot run.
    """
    from ..audit import run

    if replay:
        _replay(replay)
    if (random or mode or quantize) and not hf:
        named = "--random, --mode, --quantize"
        raise OptionError(named, limit="with --hf", value="alone", nearest="--hf FOLDER")
    _check_outputs(json, html, shapes, weights, inputs)
    if tp:
        if not hf or mode or quantize or html:
            others = "--mode, --quantize and --html"
            raise OptionError(
                "--tp", limit=f"with --hf, without {others}", value="both", nearest="--hf FOLDER --tp 1,2"
            )
        unused = {"--provider": provider, "--require": require, "--m": m, "--relation": relation, "--full": full}
        refuse_unused(f"--tp {','.join(tp)}", unused | {"--model": model, "--shapes": shapes, "--weights": weights,
                                                         "--match": match, "--inputs": inputs})  # fmt: skip
        options = {"random": random, "dtype": dtype, "device": device, "seed": seed, "tokens": tokens}
        _audit_ranks(hf, _sizes(tp) or [], json, options)
    if hf:
        if provider or model or shapes or weights or inputs:
            raise OptionError("--hf", limit="--mode instead of providers, no shapes", value="both", nearest="--mode")
        if full or match:
            nearest = "--m 2,7,32, the batches of a model"
            raise OptionError("--full, --match", limit="without --hf", value=f"--hf {hf}", nearest=nearest)
        found = _audit_model(hf, random, mode, require, relation, m, dtype, device, quantize, seed, tokens)
        _finish(found, json, html)
    with progress_bar() as progress:
        report = run(
            _split(provider, "isogemm,torch" if device.startswith("cuda") else "isogemm,numpy"),
            _sources(model, shapes, weights, match, limit),
            require=[name for name in _split(require, "") if name != "none"] if require else None,
            dtype=dtype or "float32",
            seed=seed,
            sweep=_sizes(m),
            relations=_split(relation, "") or None,
            full=full,
            inputs=inputs,
            speed=speed,
            device=device or "cpu",
            progress=progress,
        )
    _finish(report, json, html)


@app.command("plan", epilog=examples("plan"))
def plan_command(
    m: Annotated[int, typer.Argument(help="Rows of op(A).")],
    n: Annotated[int, typer.Argument(help="Columns of op(B).")],
    k: Annotated[int, typer.Argument(help="Length of the sum.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
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
    from ..base.dtypes import SHORT_NAMES

    if len(trans) != 2:
        raise OptionError("trans", limit="two letters of N, T, C", value=repr(trans), nearest="NT")
    if tp:
        unused = {"--trans": trans.upper() != "NT", "--threads": threads, "--batch": batch > 1, "--groups": groups,
                  "--format": format, "--heads": heads, "--mask": mask}  # fmt: skip
        refuse_unused(f"--tp {tp}", unused)
        _print_traffic((m, n, k, tp), SHORT_NAMES.get(dtype, dtype), contract, device, json=json)
        return
    options: dict[str, Any] = {"threads": threads} if threads else {}
    if contract:
        options["contract"] = contract
    options |= {name: _numbers(f"--{name}", text) for name, text in (("groups", groups), ("heads", heads)) if text}
    options |= {name: text for name, text in (("format", format), ("mask", mask)) if text}
    options |= {"batch": batch} if batch > 1 else {}
    plan: Any = planned(
        m,
        n,
        k,
        dtype=SHORT_NAMES.get(dtype, dtype),
        trans_a=trans[0].upper(),
        trans_b=trans[1].upper(),
        device=device,
        **options,
    )
    if json:
        typer.echo(plan.to_json())
    else:
        Console().print(plan)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise OptionError(option, limit="whole numbers with commas", value=text, nearest="32,8")
    return tuple(int(part) for part in parts)


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
    dtype: Annotated[str, typer.Option(help="Of w: float16, bfloat16 or float32.")] = "float16",
) -> None:
    """Show what one thread of a kernel does: which outputs, which k, which bytes, what it writes. Needs no GPU."""
    from ..backends import backend
    from ..base.dtypes import ITEMSIZE, SHORT_NAMES

    dtype = SHORT_NAMES.get(dtype, dtype)
    if dtype not in ITEMSIZE:
        raise OptionError("--dtype", limit=", ".join(ITEMSIZE), value=dtype, nearest="float16")
    found = backend("webgpu").trace(kernel, _three("--shape", shape), _three("--thread", thread), dtype)
    typer.echo(str(found))


def _three(name: str, text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts):
        raise OptionError(name, limit="three whole numbers with commas", value=text, nearest="1,4096,4096")
    return int(parts[0]), int(parts[1]), int(parts[2])


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
    from ..audit.data import as_dtype
    from ..lab.models import model as named
    from ..lab.tune import attention as of_attention
    from ..lab.tune import linears, read_wanted, tune_device

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
            dtype=as_dtype(dtype).name,
            contract=contract or None,
            ms=_sizes(m) or (),
            device=device,
            out=out,
            budget=budget or float("inf"),
            progress=progress,
        )
    typer.echo(f"{len(table.rows)} products, {len(table.admitted)} groups of admitted kernels: {path}")
    if left:
        typer.echo(f"{left} products are left: run the same command again to go on")


def _audit_model(
    path: str,
    random: bool,
    mode: Several,
    require: Several,
    relation: Several,
    m: Several,
    dtype: str,
    device: str,
    quantize: str,
    seed: int,
    tokens: int,
) -> Report:
    from ..audit import load
    from ..audit import model as run

    words = ["--hf", path, *["--random"] * random, "--seed", str(seed), "--tokens", str(tokens)]
    words += ["--dtype", dtype] * bool(dtype) + ["--device", device] * bool(device)
    words += ["--quantize", quantize] * bool(quantize)
    sizes = [size for size in _sizes(m) or (2, 7, 32) if size > 1]
    with progress_bar() as progress:
        progress(0, None, f"loading {path}")
        return run(
            load(path, random=random, dtype=dtype, device=device, seed=seed),
            mode=_split(mode, "plain,convert"),
            require=[name for name in _split(require, "") if name != "none"] if require else None,
            relations=_split(relation, "") or None,
            batches=sizes,
            tokens=tokens,
            seed=seed,
            quantize=quantize or None,
            progress=progress,
            words=[*words, *(["--m", ",".join(map(str, sizes))] if m else [])],
        )


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


def _audit_ranks(path: str, sizes: list[int], json: str, options: Mapping[str, Any]) -> NoReturn:
    from dataclasses import asdict

    from ..audit import compare_ranks
    from ..lab import environment, write_json

    found = compare_ranks(path, sizes, **options)
    for outcome in found:
        typer.echo(str(outcome))
    if json:
        write_json(Path(json), [asdict(outcome) for outcome in found], environment=environment(), options=options)
    raise typer.Exit(1 if any(outcome.first for outcome in found) else 0)


def _replay(text: str) -> NoReturn:
    from rich.console import Console

    from ..audit import Absent, replay
    from ..audit.console import print_outcome

    try:
        case, outcome = replay(text)
    except Absent as why:
        typer.echo(f"isogemm: cannot replay: {why}", err=True)
        raise typer.Exit(DID_NOT_RUN) from why
    print_outcome(case, outcome, Console())
    raise typer.Exit(0 if outcome.status == "held" else 1)


def _sources(
    model: str, shapes: str, weights: str, match: Several, limit: int
) -> Sequence[WeightSource | LinearShape] | None:
    from ..audit import read_shapes, weights_of_file
    from ..lab.models import model as named

    if (bool(model) + bool(shapes) + bool(weights)) > 1:
        raise OptionError("shapes", limit="one of --model, --shapes, --weights", value="several", nearest="one")
    if match and not weights:
        raise OptionError("--match", limit="with --weights", value="alone", nearest="--weights FILE")
    if model:
        return named(model).linears()
    if shapes:
        return read_shapes(shapes)
    return weights_of_file(weights, match=_split(match, ""), limit=limit) if weights else None


def _split(values: Several, default: str) -> list[str]:
    return [part.strip() for value in (values or [default]) for part in value.split(",") if part.strip()]


def _sizes(values: Several) -> list[int] | None:
    texts = _split(values, "")
    if not all(text.isdecimal() for text in texts):
        raise OptionError("--m", limit="whole numbers of at least 1", value=texts, nearest="1,2,16")
    return [int(text) for text in texts] or None


def _check_outputs(json: str, html: str, *read: str) -> None:
    """Refuse before the work what could not be written after it."""
    if json and html and Path(json).resolve() == Path(html).resolve():
        raise OptionError("--json and --html", limit="two files", value=json, nearest=f"--html {json}.html")
    for path in filter(None, (json, html)):
        if any(file and Path(file).resolve() == Path(path).resolve() for file in read):
            raise OptionError("cannot write", limit="another file than what is read", value=path, nearest="report.json")
    for path in filter(None, (json, html)):
        try:
            check_room(path)
        except OSError as error:
            raise _cannot_write(path, error) from error
    if html:
        from ..lab.page import require_packages

        require_packages()


def _cannot_write(path: str, error: OSError) -> OptionError:
    return OptionError("cannot write", limit="a writable file", value=str(error), nearest=Path(path).name)


def _finish(report: Report, json: str, html: str) -> NoReturn:
    from rich.console import Console

    from ..audit.console import print_report

    print_report(report, Console())
    for what, path, write in (("JSON", json, report.write_json), ("Page", html, report.write_html)):
        if path:
            try:
                typer.echo(f"{what}: {write(path)}")
            except OSError as error:
                raise _cannot_write(path, error) from error
    raise typer.Exit(report.exit_status)
