"""``isogemm doctor``: which mistake made a result; exit status 0 right, 1 wrong, 2 bad usage."""

from __future__ import annotations

import zipfile
from typing import Annotated, Any

import typer

from ..base.progress import progress_bar
from ..errors import OptionError
from .options import refuse_beside


def doctor_command(
    here: typer.Context,
    case: Annotated[
        str, typer.Argument(help="A .npz file with observed, a, b and the other arguments of `diagnose`.")
    ] = "",
    call: Annotated[str, typer.Option(help="module:function or file.py:function, to be examined with probes.")] = "",
    signature: Annotated[str, typer.Option(help="With --call: 'a, b', 'x, w' or another of docs/doctor.md.")] = "a, b",
    format: Annotated[str, typer.Option(help="With --signature 'x, blocks': of the blocks, Q4_0 for example.")] = "",
    m: Annotated[int | None, typer.Option("--m", min=1, help="With --call: the only m that it takes.")] = None,
    n: Annotated[int | None, typer.Option("--n", min=1, help="With --call: the only n that it takes.")] = None,
    k: Annotated[int | None, typer.Option("--k", min=1, help="With --call: the only k that it takes.")] = None,
    torch: Annotated[bool, typer.Option("--torch", help="With --call: it takes torch tensors.")] = False,
    steps: Annotated[
        bool, typer.Option("--steps", help="With CASE: the eight steps of the recipe, one by one.")
    ] = False,
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Plant every mistake in drawn calls, and count.")
    ] = False,
    count: Annotated[int, typer.Option(min=1, help="With --selftest: calls for each mistake.")] = 20,
) -> None:
    """Name the mistake that made a matrix product wrong."""
    asked = [case] * bool(case) + ["--call"] * bool(call) + ["--selftest"] * selftest
    if len(asked) != 1:
        value = " and ".join(asked) or "none"
        raise OptionError("doctor", limit="one of CASE, --call, --selftest", value=value, nearest="CASE.npz")
    if steps and not case:
        raise OptionError("--steps", limit="with CASE", value="alone", nearest="CASE.npz --steps")
    if not call:
        refuse_beside(here, case or "--selftest", "signature", "format", "m", "n", "k", "torch")
    if not selftest:
        refuse_beside(here, case or "--call", "count")
    if selftest:
        raise typer.Exit(_selftest(count))
    with progress_bar() as tell:
        if call:
            from ..doctor import examine

            function = _function(call)
            found = examine(function, signature, format=format, m=m, n=n, k=k, torch=torch, tell=tell)
        else:
            found = _case(case, steps, tell)
    typer.echo(found)
    raise typer.Exit(found.exit_status)


def _function(call: str) -> Any:
    """What is to be examined. Raises OptionError: there is none of that name, or its module cannot be imported."""
    from ..audit.providers import Absent, function_of

    try:
        return function_of(call, known=())
    except Absent as why:
        limit, nearest = "a module that can be imported", "what it lacks, or a mended module"
        raise OptionError("--call", limit=limit, value=why, nearest=nearest) from why


def _case(path: str, steps: bool, tell: Any) -> Any:
    import numpy as np

    from ..doctor import diagnose
    from ..doctor.steps import recipe

    saved = "numpy.savez(path, observed=..., a=..., b=...)"
    try:
        with open(path, "rb") as opened:
            if not zipfile.is_zipfile(opened):  # numpy would take it for an array alone, or for a pickle
                raise ValueError("it is none")
            with np.load(opened, allow_pickle=False) as file:
                given = {name: np.asarray(file[name]) for name in file.files}
    except Exception as error:  # numpy's and those of what unpacks
        nearest = f"--call {path}" if ":" in path else saved
        raise OptionError("a case", limit="a .npz file of arrays", value=f"{path}: {error}", nearest=nearest) from error
    if missing := {"observed", "a", "b"} - set(given):
        value = f"without {', '.join(sorted(missing))}"
        raise OptionError("a case", limit="observed, a and b", value=value, nearest=saved)
    if "tell" in given:  # an argument of diagnose, which is this command's
        raise OptionError("a case", limit="arguments that describe the call", value="tell", nearest="leave it out")
    options: dict[str, Any] = {name: x.item() if x.ndim == 0 else x for name, x in given.items()}
    if steps:
        for line in recipe(**options):
            typer.echo(line)
    return diagnose(options.pop("observed"), options.pop("a"), options.pop("b"), **options, tell=tell)


def _selftest(count: int) -> int:
    """Print the counts; 1 where a bar is missed."""
    from ..doctor.faulty import INSISTS, examined
    from ..doctor.selftest import alarms, chances, scores

    with progress_bar() as tell:
        single = scores(count, tell=tell) | chances(count, tell=tell)
        pairs = scores(4 * count, pairs=True, tell=tell)
        right = alarms(50 * count, tell=tell)
        functions = [x for insists in INSISTS for x in examined(insists=insists, tell=tell)]
    for name, score in (single | pairs).items():
        alike = f"; {score.alike} more are like one mistake" if score.alike else ""
        typer.echo(
            f"{name:<20} {score.planted:>5} planted  {score.first:>5} named first  {score.found:7.1%} found{alike}"
        )
    drawn, wrong = (sum(x[i] for x in right.values()) for i in (0, 1))
    typer.echo(f"{drawn} right results of {len(right)} providers: {wrong} called wrong")
    slowest = max(x.seconds for x in functions)
    unseen = [f"{x.name} in a function that insists on {x.insists}" for x in functions if not x.found]
    typer.echo(f"{len(functions) - len(unseen)} of {len(functions)} functions, each in at most {slowest:.1f} s")
    for words in unseen:
        typer.echo(f"not found: {words}")
    missed = (
        unseen
        + [name for name, score in single.items() if score.found < 0.99]
        + [name for name, score in pairs.items() if score.found < 0.9]
    )
    return int(bool(missed) or wrong > 0)
