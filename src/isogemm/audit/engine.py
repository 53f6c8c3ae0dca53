"""Runs an audit: every relation, on every linear, for every provider, one weight in memory at a time."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..base import arguments
from ..errors import DTypeError, OptionError, ShapeError
from ..lab import Progress, environment
from ..lab.models import MODELS, PROJECTION_SHAPES, LinearShape
from .bench import Disqualified, LinearOperands, ProviderBench, copied_rows, sampled_columns
from .cases import MAX_COLUMNS, Case, checked_device, evaluate, with_kernels
from .data import ActivationSource, Array, WeightSource, as_dtype, checked_seed, portable
from .named import load_provider, provider_of
from .providers import BUILTIN, Absent, Provider
from .relations import FULL_SWEEP, QUICK_SWEEP, RELATIONS, Relation, Scope
from .report import Report
from .results import ProviderResult
from .speed import measure

ProviderLike = str | Provider | Callable[[Array, Array], Array]
ShapeLike = WeightSource | LinearShape | tuple[int, int]

_SMALLEST = MODELS["Qwen2.5-0.5B"]
DEFAULT_SHAPES: tuple[LinearShape, ...] = _SMALLEST.linears()[:4]
"""Without a choice of shapes: the linears of one layer of Qwen2.5-0.5B."""
FULL_SHAPES: tuple[LinearShape, ...] = (*_SMALLEST.linears(), *PROJECTION_SHAPES)
"""With ``full`` and without a choice of shapes."""

_QUICK_SPEED, _FULL_SPEED = (1, 16, 128), (1, 4, 16, 64, 256, 1024)
_QUICK_BLOCKS, _FULL_BLOCKS = 5, 9
_MEMORY = 4 << 30
_MEMORY_SHARE = 0.4


@dataclass(frozen=True)
class AuditOptions:
    """The validated options of an audit."""

    sources: tuple[WeightSource, ...]
    relations: tuple[Relation, ...]
    scope: Scope
    dtype: str
    seed: int
    activations: ActivationSource
    speed_sizes: tuple[int, ...]
    speed_blocks: int
    memory: int
    device: str


def run(
    providers: Sequence[ProviderLike] = ("isogemm", "numpy"),
    shapes: Iterable[ShapeLike] | None = None,
    *,
    require: Sequence[str] | None = None,
    dtype: str = "float32",
    seed: int = 0,
    sweep: Sequence[int] | None = None,
    relations: Sequence[str] | None = None,
    full: bool = False,
    inputs: str | os.PathLike[str] = "",
    speed: bool = True,
    device: str = "cpu",
    memory: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Check which relations keep the bits of ``x @ w.T``, for each provider.

    Parameters
    ----------
    providers : sequence of str, Provider or callable
        Names as in `load_provider`, providers, or functions ``f(x, w)``.
    shapes : iterable of WeightSource, LinearShape or (n, k), optional
        The linears; those of one layer of Qwen2.5-0.5B by default. Weights are random but for a `WeightSource` of a
        file.
    require : sequence of str, optional
        Names of the providers that `Report.ok` asks for; audited too where they are not in `providers`. By default
        your own, that is those that are not built in, where `providers` has any, else isogemm; and then every one of
        `providers` has to have run.
    dtype : {"float32", "bfloat16", "float16"}
        Of x and w.
    seed : int
        Of weights and activations.
    sweep : sequence of int, optional
        Batch sizes of the population relation and of the agreement map.
    relations : sequence of str, optional
        Names; by default all, on a CPU without those of streams and graphs.
    full : bool
        The long sweep (1 to 4096), longer timings, and without `shapes` more of them.
    inputs : str or path
        A ``.npy`` file of activations [rows, k]; random heavy-tailed rows by default.
    speed : bool
        Time the providers against each other as well; on the CPU alone.
    device : str
        Where the providers compute: ``cpu``, or ``cuda`` or ``cuda:1``. There torch and isogemm are given tensors, and
        so is a function of yours, which returns one.
    memory : int, optional
        Bytes that operands and outputs of a call may take; larger batches are left out and noted. By default 4 GiB or
        40% of what is free.
    progress : callable, optional
        Called as ``progress(done, total, text)``.

    Returns
    -------
    Report

    Raises
    ------
    OptionError, ShapeError, DTypeError, DeviceError
        An unknown provider, relation or dtype; an empty or malformed list of shapes or sizes; a device that is not
        there.

    Examples
    --------
    >>> report = run(["isogemm", "numpy"], [(512, 384)], sweep=[1, 2, 16], speed=False)
    >>> report.held("isogemm")
    True
    """
    several = None if isinstance(providers, Provider) else arguments.items(providers)
    providers = [providers] if several is None else several  # type: ignore[list-item]
    require = None if require is None else arguments.strings("require", require, "'isogemm'")
    if not (providers or require):
        raise OptionError("providers", limit="at least one", value="none", nearest="isogemm")
    place = checked_device(device)
    settings = AuditOptions(
        sources=_sources(shapes, full),
        relations=_relations(relations, place),
        scope=Scope.of(_sizes(sweep, full)),
        dtype=as_dtype(dtype).name,
        seed=checked_seed(seed),
        activations=ActivationSource(arguments.path("inputs", inputs, "'activations.npy'")),
        speed_sizes=(_FULL_SPEED if full else _QUICK_SPEED) if speed and place == "cpu" else (),
        speed_blocks=_FULL_BLOCKS if full else _QUICK_BLOCKS,
        memory=_memory() if memory is None else arguments.extent("memory", memory),
        device=place,
    )
    named = _named(providers, place)
    own = [name for name in named if name not in BUILTIN]  # what a user brings is what a user asks about
    required = tuple(require if require is not None else own or ("isogemm",))
    wanted = () if require is not None else tuple(named)
    named |= _named([name for name in required if name not in named], place)
    found = _Audit(settings, named, required, progress or (lambda done, total, text: None)).report()
    found.wanted = wanted
    return found


class _Audit:
    """One audit under way."""

    def __init__(
        self, settings: AuditOptions, named: dict[str, Provider | Absent], required: tuple[str, ...], progress: Progress
    ) -> None:
        self.settings, self.progress = settings, progress
        self.live = {name: p for name, p in named.items() if isinstance(p, Provider)}
        meanings = {r.name: r.meaning for r in settings.relations}
        self.results = {name: ProviderResult.empty(name, meanings, settings.scope.sweep) for name in named}
        for name, provider in named.items():
            if isinstance(provider, Absent):
                self.results[name].reason = str(provider)
            elif settings.dtype not in provider.dtypes:
                self.results[name].reason = f"does not take {settings.dtype}"
                del self.live[name]
        self.out = Report(self.results, required, self._options())
        cases = sum(len(r.cases(settings.scope)) for r in settings.relations)
        timings = len(settings.speed_sizes) * (settings.speed_blocks + 1)
        self.done, self.total = 0, len(settings.sources) * len(self.live) * (cases + timings)

    def report(self) -> Report:
        """Run everything."""
        for source in self.settings.sources:
            self._linear(source)
        self.out.environment = environment()
        return self.out

    def _options(self) -> dict[str, Any]:
        s = self.settings
        return {
            "dtype": s.dtype,
            "seed": s.seed,
            "sweep": list(s.scope.sweep),
            "relations": [r.name for r in s.relations],
            "inputs": portable(s.activations.path) or "random, heavy-tailed",
            "thread_counts": list(s.scope.thread_counts),
            "device": s.device,
        }

    def _linear(self, source: WeightSource) -> None:
        s, linear = self.settings, source.linear
        self._tell(0, f"{linear.name}: weight")
        operands = self._operands(source)
        self.out.shapes.append(
            {
                "name": linear.name,
                "n": linear.n,
                "k": linear.k,
                "source": portable(source.path) or "random",
                "columns_compared": len(operands.columns),
                "largest_m": min(operands.max_m, max(s.scope.sweep)),
            }
        )
        copied = copied_rows(linear.k, operands.dtype)
        if copied < linear.n:
            self.out.notes.append(
                f"{linear.name}: packing and layout used the first {copied:,} of {linear.n:,} rows of w"
            )
        fit: dict[str, Provider] = {}
        for name, provider in self.live.items():
            if self._provider(name, provider, operands, source):
                fit[name] = provider
            else:
                operands = self._operands(source)  # it may have written to the weight
        self._speeds(fit, operands)

    def _operands(self, source: WeightSource) -> LinearOperands:
        linear, dtype = source.linear, as_dtype(self.settings.dtype)
        # A call holds the rows three times (drawn, given, kept for comparison) and the output twice.
        max_m = self.settings.memory // (3 * linear.k * dtype.itemsize + 2 * linear.n * 4)
        dropped = [m for m in self.settings.scope.sweep if m > max_m]
        note = f"{linear.name}: batch sizes {', '.join(map(str, dropped))} left out: beyond the memory limit"
        if dropped and note not in self.out.notes:
            self.out.notes.append(note)
        w = source.load(dtype, self.settings.seed)
        columns = sampled_columns(linear.n, MAX_COLUMNS)
        return LinearOperands(linear, w, self.settings.activations, self.settings.seed, columns, max(1, max_m))

    def _provider(self, name: str, provider: Provider, operands: LinearOperands, source: WeightSource) -> bool:
        """Run all cases of one linear; False when the provider was given up on."""
        s, result, bench = self.settings, self.results[name], ProviderBench(provider, operands)
        before = self.done
        cases = [(r, params) for r in s.relations for params in r.cases(s.scope)]
        try:
            bench.check_garbage()
            result.relative_error = max(result.relative_error, bench.relative_error)
            for relation, params in cases:
                self._tell(1, f"{name} {relation.name} on {operands.linear.name}")
                case = Case(name, relation.name, params, source, s.activations, s.dtype, s.seed, s.device)
                outcome = evaluate(bench, case)
                if not result.relations[relation.name].drifts:
                    outcome = with_kernels(outcome, bench, case)
                result.relations[relation.name].add(outcome)
                if outcome.fatal:
                    raise Disqualified(outcome.reason)
            result.ran = True
            result.agreement.add(bench.products)
            return True
        except Disqualified as fault:
            result.reason = result.reason or f"{operands.linear.name}: {fault}"
            result.ran = True
            return False
        finally:
            self.done = before + len(cases)

    def _speeds(self, providers: dict[str, Provider], operands: LinearOperands) -> None:
        start, s = self.done, self.settings
        for m in s.speed_sizes:
            if m <= operands.max_m:
                step = partial(self._tell, 1, f"timing {operands.linear.name} at M={m}")
                self.out.speeds += measure(providers, operands, m, blocks=s.speed_blocks, step=step)
        self.done = start + len(s.speed_sizes) * (s.speed_blocks + 1) * len(self.live)

    def _tell(self, steps: int, text: str) -> None:
        self.done += steps
        self.progress(min(self.done, self.total), self.total, text)


def _named(providers: Sequence[ProviderLike], device: str) -> dict[str, Provider | Absent]:
    named: dict[str, Provider | Absent] = {}
    for provider in providers:
        if isinstance(provider, str):
            try:
                named.setdefault(provider, load_provider(provider, device))
            except Absent as why:
                named[provider] = why
        elif isinstance(provider, Provider):
            named[provider.name] = provider
        else:
            if not callable(provider):
                value, limit = arguments.shown(provider), "a name, a Provider or a function f(x, w)"
                raise DTypeError("provider", limit=limit, value=value, nearest="'isogemm'")
            name = _name(provider)
            named[name] = provider_of(name, provider, device)
    return named


def _name(function: Callable[..., Any]) -> str:
    """``module:function``, or ``file.py:function`` for a script's own, so that a replay finds it again."""
    place = function.__module__
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if place == "__main__" and script:
        place = os.path.relpath(script)
    return f"{place}:{getattr(function, '__qualname__', type(function).__name__)}"


def _sources(shapes: Iterable[ShapeLike] | None, full: bool) -> tuple[WeightSource, ...]:
    if shapes is None:
        shapes = FULL_SHAPES if full else DEFAULT_SHAPES
    listed = arguments.items(shapes)
    if listed is None:
        raise ShapeError("shapes", limit="a list of (n, k)", value=arguments.shown(shapes), nearest=[(4096, 2560)])
    if len(listed) == 2 and all(isinstance(size, int | np.integer) for size in listed):
        raise ShapeError("shapes", limit="a list of (n, k)", value=arguments.shown(shapes), nearest=[tuple(listed)])
    sources = [shape if isinstance(shape, WeightSource) else _source(shape) for shape in listed]
    if not sources:
        raise ShapeError("shapes", limit="at least one", value="none", nearest=(4096, 2560))
    return tuple(sources)


def _source(shape: Any) -> WeightSource:
    try:
        n, k = (operator.index(x) for x in shape[-2:])
    except (TypeError, ValueError, IndexError, KeyError, RuntimeError):  # RuntimeError: of torch's
        n, k = 0, 0
    if min(n, k) < 1:
        value = shape if isinstance(shape, tuple | list) else arguments.shown(shape)
        raise ShapeError("shape of a linear", limit="(n, k) of at least 1", value=value, nearest=(1, 1))
    return WeightSource(shape if isinstance(shape, LinearShape) else LinearShape(f"{n}x{k}", n, k))


def _relations(names: Sequence[str] | None, device: str) -> tuple[Relation, ...]:
    usual = tuple(name for name, relation in RELATIONS.items() if device != "cpu" or not relation.of_devices)
    chosen = arguments.strings("relations", names, "'population'") if names is not None else usual
    for name in chosen:
        if name not in RELATIONS:
            raise arguments.unknown("relation", name, RELATIONS, "none named, for all")
    if not chosen:
        raise OptionError("relations", limit="at least one", value="none", nearest="population")
    return tuple(RELATIONS[name] for name in dict.fromkeys(chosen))


def _sizes(sweep: Sequence[int] | None, full: bool) -> tuple[int, ...]:
    if sweep is None:
        return FULL_SWEEP if full else QUICK_SWEEP
    found = arguments.items(sweep)
    if not found or not all(isinstance(m, int | np.integer) and 1 <= m <= 1 << 20 for m in found):
        limit = "whole numbers from 1 to 2**20"
        raise OptionError("sweep of M", limit=limit, value=found or arguments.shown(sweep), nearest=[1, 2, 16])
    return tuple(int(m) for m in found)


def _memory() -> int:
    import psutil

    return int(min(_MEMORY, _MEMORY_SHARE * psutil.virtual_memory().available))
