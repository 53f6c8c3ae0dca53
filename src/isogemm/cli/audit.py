"""``isogemm audit``: of products, of a whole model, of ranks, or of one case again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ..base.disk import writing
from ..base.progress import progress_bar
from ..errors import OptionError
from .options import Several, check_out, numbers, refuse_given, was_given, words

if TYPE_CHECKING:
    from ..audit import Report, WeightSource
    from ..lab.models import LinearShape

DID_NOT_RUN = 3
# What an audit reads, by the option that says of what it is; none is of products.
AUDITED = {
    "--replay": ("replay",),
    "--tp": ("hf", "tp", "random", "device", "tokens", "dtype", "seed", "json"),
    "--hf": (
        *("hf", "random", "mode", "device", "quantize", "tokens", "dtype", "seed", "m", "relation", "require"),
        *("json", "html"),
    ),
    "": (
        *("provider", "require", "model", "shapes", "weights", "match", "limit", "inputs", "device", "dtype", "seed"),
        *("m", "relation", "full", "speed", "json", "html"),
    ),
}


def audit_command(
    here: typer.Context,
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

    way = _refuse_unread(here)
    if way == "--replay":
        _replay(replay)
    _check_outputs(json, html, shapes, weights, inputs)
    subject = {"random": random, "dtype": dtype, "device": device, "seed": seed}
    if way == "--tp":
        _audit_ranks(hf, numbers("--tp", tp, nearest="1,2"), json, subject | {"tokens": tokens})
    if way == "--hf":
        _finish(_audit_model(hf, subject, mode, require, relation, m, quantize, tokens), json, html)
    with progress_bar() as progress:
        report = run(
            words(provider, "isogemm,torch" if device.startswith("cuda") else "isogemm,numpy"),
            _sources(model, shapes, weights, match, limit),
            require=_required(require),
            dtype=dtype or "float32",
            seed=seed,
            sweep=numbers("--m", m, nearest="1,2,16") or None,
            relations=words(relation, "") or None,
            full=full,
            inputs=inputs,
            speed=speed,
            device=device or "cpu",
            progress=progress,
        )
    _finish(report, json, html)


def _audit_model(
    path: str,
    subject: Mapping[str, Any],
    mode: Several,
    require: Several,
    relation: Several,
    m: Several,
    quantize: str,
    tokens: int,
) -> Report:
    """Audit the model in a folder, which is loaded as `subject` says."""
    from ..audit import load
    from ..audit import model as run
    from ..audit.transformer.engine import check_choices

    seed, named = subject["seed"], {**subject, "quantize": quantize}
    said = ["--hf", path, *["--random"] * subject["random"], "--seed", str(seed), "--tokens", str(tokens)]
    for name in ("dtype", "device", "quantize"):
        said += [f"--{name}", named[name]] * bool(named[name])
    sizes = numbers("--m", m, nearest="2,7,32") or [2, 7, 32]
    if min(sizes) < 2:
        limit = "batches of at least 2, which a model's alone is compared with"
        raise OptionError("--m", limit=limit, value=",".join(map(str, sizes)), nearest="2,7,32")
    asked: dict[str, Any] = {
        "mode": words(mode, "plain,convert"),
        "require": _required(require),
        "relations": words(relation, "") or None,
    }
    check_choices(**asked, quantize=quantize or None)  # a model takes its time to load
    with progress_bar() as progress:
        progress(0, None, f"loading {path}")
        return run(
            load(path, **subject),
            **asked,
            batches=sizes,
            tokens=tokens,
            seed=seed,
            quantize=quantize or None,
            progress=progress,
            words=[*said, *(["--m", ",".join(map(str, sizes))] if m else [])],
        )


def _required(given: Several) -> list[str] | None:
    """Who has to hold: with 'none' nobody; None where nothing is said."""
    return [name for name in words(given, "") if name != "none"] if given else None


def _audit_ranks(path: str, sizes: list[int], json: str, options: Mapping[str, Any]) -> NoReturn:
    from dataclasses import asdict

    from ..audit import compare_ranks
    from ..lab import environment, write_json

    found = compare_ranks(path, sizes, **options)
    if json:
        with writing(json):
            write_json(json, [asdict(outcome) for outcome in found], environment=environment(), options=options)
    for outcome in found:
        typer.echo(str(outcome))
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
    raise typer.Exit({"held": 0, "n/a": DID_NOT_RUN}.get(outcome.status, 1))


def _refuse_unread(here: typer.Context) -> str:
    """What is audited, as `AUDITED` names it; raises where an option was given that it would not read."""
    way = next((name for name in AUDITED if name and was_given(here, name.removeprefix("--"))), "")
    unread = {x.name or "" for x in here.command.params} - {*AUDITED[way]}
    if way and not (way == "--tp" and not here.params["hf"]):
        value = here.params[way.removeprefix("--")]
        said = f"{way} {value if isinstance(value, str) else ','.join(value)}"
        nearest = "--mode in the place of providers" if way == "--hf" else "one of both"
        refuse_given(here, unread, limit=f"without {way}", value=said, nearest=nearest)
    else:
        refuse_given(here, unread | {"tp"}, limit="with --hf", value="alone", nearest="--hf FOLDER")
    if not here.params["weights"]:
        refuse_given(here, ("match", "limit"), limit="with --weights", value="alone", nearest="--weights FILE")
    return way


def _sources(
    model: str, shapes: str, weights: str, match: Several, limit: int
) -> Sequence[WeightSource | LinearShape] | None:
    from ..audit import read_shapes, weights_of_file
    from ..lab.models import model as named

    if (bool(model) + bool(shapes) + bool(weights)) > 1:
        raise OptionError("shapes", limit="one of --model, --shapes, --weights", value="several", nearest="one")
    if model:
        return named(model).linears()
    if shapes:
        return read_shapes(shapes)
    return weights_of_file(weights, match=words(match, ""), limit=limit) if weights else None


def _check_outputs(json: str, html: str, *read: str) -> None:
    """Refuse before the work what could not be written after it."""
    if json and html and Path(json).resolve() == Path(html).resolve():
        raise OptionError("--json and --html", limit="two files", value=json, nearest=f"--html {json}.html")
    for path in filter(None, (json, html)):
        if any(file and Path(file).resolve() == Path(path).resolve() for file in read):
            raise OptionError("cannot write", limit="another file than what is read", value=path, nearest="report.json")
    for path, name in ((json, "report.json"), (html, "report.html")):
        if path:
            check_out(path, name)
    if html:
        from ..lab.page import require_packages

        require_packages()


def _finish(report: Report, json: str, html: str) -> NoReturn:
    from rich.console import Console

    from ..audit.console import print_report

    written = []
    try:  # files first: who reads standard output may leave before its end
        for what, path, write in (("JSON", json, report.write_json), ("Page", html, report.write_html)):
            with writing(path):
                if path:
                    written.append(f"{what}: {write(path)}")
    finally:
        print_report(report, Console())
    for line in written:
        typer.echo(line)
    raise typer.Exit(report.exit_status)
