"""One case of an audit: its evaluation, its outcome, and the line that replays it."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol
from urllib.parse import parse_qsl, quote, urlencode

import numpy as np

from ..backends import find
from ..base import arguments
from ..contract import compare
from ..errors import IsogemmError, OptionError, ShapeError
from ..lab.models import LinearShape
from ..lab.stamp import VARIABLES
from ..operands.device_array import HOST
from .bench import Disqualified, LinearOperands, NotApplicable, ProviderBench, ProviderFault, sampled_columns
from .data import ActivationSource, Array, WeightSource, as_dtype, portable, weight_named
from .named import load_provider
from .providers import Provider
from .relations import RELATIONS, Pair, Params, Scope, chunk_lengths

Status = Literal["held", "changed", "failed", "n/a"]
MAX_COLUMNS = 4096
_KERNELS = 4  # calls of a case whose kernels are told
NOT_A_NUMBER = int(np.iinfo(np.int64).max)

ULP_BINS = ("0", "1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "65-128", "129-256", "257-1024", "> 1024", "NaN")
"""Bins of the drift histogram; 0 is a sign of zero, NaN a number on one side only (or two NaNs)."""
_EDGES = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, NOT_A_NUMBER - 1], np.int64)


class Replayable(Protocol):
    """What a report needs of a case: its relation, and how to see it again."""

    @property
    def relation(self) -> str:
        """Its name."""

    def command(self) -> str:
        """The line that evaluates it again."""


class FirstDifference(Protocol):
    """What a report needs of a drift: a sentence, values for JSON, and its case."""

    @property
    def case(self) -> Replayable:
        """Where it was found."""

    def to_dict(self) -> dict[str, Any]:
        """The drift as JSON-ready values."""


@dataclass(frozen=True)
class Case:
    """Everything that one comparison depends on.

    Attributes
    ----------
    provider, relation : str
        Names.
    params : mapping
        The relation's own parameters.
    source : WeightSource
        The linear and where its weight comes from.
    activations : ActivationSource
    dtype : str
    seed : int
    device : str
        Where the provider computes.
    """

    provider: str
    relation: str
    params: Params
    source: WeightSource
    activations: ActivationSource
    dtype: str
    seed: int
    device: str = "cpu"

    @property
    def m(self) -> int:
        """Rows of the whole batch."""
        if "chunks" in self.params:
            return sum(chunk_lengths(str(self.params["chunks"])))
        return int(self.params["m"])

    def text(self) -> str:
        """The case on one line, as `replay` reads it."""
        linear = self.source.linear
        fields: dict[str, object] = {"provider": portable(self.provider), "relation": self.relation, **self.params}
        fields |= (
            {"tensor": linear.name, "weights": portable(self.source.path)}
            if self.source.path
            else {"n": linear.n, "k": linear.k}
        )
        fields |= {"inputs": portable(self.activations.path)} if self.activations.path else {}
        fields |= {"device": self.device} if self.device != "cpu" else {}
        return urlencode(fields | {"dtype": self.dtype, "seed": self.seed}, safe=":/+,", quote_via=quote)

    def command(self) -> str:
        """The shell command that evaluates this case alone, with the settings that reach a library's choices."""
        settings = [f"{name}={shlex.quote(os.environ[name])} " for name in VARIABLES if name in os.environ]
        return "".join(settings) + "isogemm audit --replay " + shlex.quote(self.text())

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read what `text` wrote.

        Raises
        ------
        OptionError, ShapeError, DTypeError
            A field is missing, unknown or malformed, or a file it names cannot be read.
        """
        arguments.of_type("case", text, str, "the text that a drift report printed", "isogemm audit --replay TEXT")
        fields = dict(parse_qsl(text.replace("+", "%2B"), keep_blank_values=True))  # a plus is a plus here, no space
        try:
            provider, name, dtype = fields.pop("provider"), fields.pop("relation"), fields.pop("dtype")
            seed = int(fields.pop("seed"))
            activations = ActivationSource(fields.pop("inputs", ""))
            device = fields.pop("device", "cpu")
            if "weights" in fields:
                source = weight_named(fields.pop("weights"), fields.pop("tensor"))
            else:
                n, k = int(fields.pop("n")), int(fields.pop("k"))
                source = WeightSource(LinearShape(f"{n}x{k}", n, k))
        except KeyError as error:
            raise _malformed(text, f"the field {error.args[0]} is missing") from error
        except ValueError as error:
            if isinstance(error, IsogemmError):
                raise
            raise _malformed(text, str(error)) from error
        if min(source.linear[1:]) < 1 or seed < 0:
            raise ShapeError("replay", limit="n and k of at least 1, seed of at least 0", value=text, nearest="n=1&k=1")
        params: dict[str, int | str] = {key: int(v) if v.isdecimal() else v for key, v in fields.items()}
        _check_params(name, params)
        return cls(provider, name, params, source, activations, as_dtype(dtype).name, seed, device)


def _check_params(name: str, params: Mapping[str, int | str]) -> None:
    if name not in RELATIONS:
        raise arguments.unknown("relation", name, RELATIONS, "the line as printed")
    shape = {key: type(value) for key, value in RELATIONS[name].cases(Scope.of((1, 2, 3)))[0].items()}
    if {key: type(value) for key, value in params.items()} != shape:
        limit = "the fields " + ", ".join(shape)
        raise OptionError(f"replay of {name}", limit=limit, value=sorted(params), nearest="the line as printed")


def _malformed(text: str, why: str) -> OptionError:
    limit, nearest = "the line as an audit printed it", "copy the whole line"
    return OptionError(f"malformed replay ({why})", limit=limit, value=repr(text), nearest=nearest)


@dataclass(frozen=True)
class Drift:
    """The first output of a case whose bits differ.

    Attributes
    ----------
    case : Case
    row, column : int
        Of the output: the row's number in the batch of x, the row of w.
    expected_bits, got_bits : str
        Hexadecimal bit patterns.
    expected, got : float
    ulps : int
    kernels : tuple of str
        What the library ran for the calls that disagree, where the profiler tells: those of the case, by their rows.
    """

    case: Case
    row: int
    column: int
    expected_bits: str
    got_bits: str
    expected: float
    got: float
    ulps: int
    kernels: tuple[str, ...] = ()

    def __str__(self) -> str:
        case, linear = self.case, self.case.source.linear
        params = ", ".join(f"{key} {value}" for key, value in case.params.items())
        return (
            f"{case.provider} {case.relation} ({params}) on {linear.name} [n={linear.n}, k={linear.k}] {case.dtype} "
            f"seed {case.seed}: output [{self.row}, {self.column}] is {self.got_bits} ({self.got:.9g}), "
            f"the other call gave {self.expected_bits} ({self.expected:.9g}): {ulps_text(self.ulps)}"
            + "".join(f"; {kernels}" for kernels in self.kernels)
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; numbers that are not finite are words."""
        case, linear = self.case, self.case.source.linear
        return {
            "provider": case.provider,
            "relation": case.relation,
            "params": dict(case.params),
            "shape": {"name": linear.name, "n": linear.n, "k": linear.k},
            "m": case.m,
            "dtype": case.dtype,
            "seed": case.seed,
            "row": self.row,
            "column": self.column,
            "expected_bits": self.expected_bits,
            "got_bits": self.got_bits,
            "expected": json_number(self.expected),
            "got": json_number(self.got),
            "ulps": None if self.ulps == NOT_A_NUMBER else self.ulps,
            "kernels": list(self.kernels),
            "replay": case.command(),
        }


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes
    ----------
    status : {"held", "changed", "failed", "n/a"}
    outputs, changed : int
        Outputs compared, and those whose bits differ.
    max_ulp : int
    histogram : tuple of int
        Changed outputs in each of `ULP_BINS`.
    drift : Drift, or another with the same methods, or None
    reason : str
        Why it failed or does not apply.
    fatal : bool
        Nothing more can be asked of the provider on this linear.
    """

    status: Status
    outputs: int = 0
    changed: int = 0
    max_ulp: int = 0
    histogram: tuple[int, ...] = (0,) * len(ULP_BINS)
    drift: FirstDifference | None = None
    reason: str = ""
    fatal: bool = False


def evaluate(bench: ProviderBench, case: Case) -> Outcome:
    """Evaluate a case on the bench of its provider and linear; a provider's faults become outcomes."""
    try:
        pair = RELATIONS[case.relation].evaluate(bench, case.params)
        if pair.expected.dtype != pair.got.dtype:
            raise ProviderFault(f"returned dtype {pair.got.dtype} where it returned {pair.expected.dtype} before")
    except NotApplicable as why:
        return Outcome("n/a", reason=str(why))
    except ProviderFault as fault:
        return Outcome("failed", reason=str(fault), fatal=isinstance(fault, Disqualified))
    return _compared(pair, case)


def with_kernels(outcome: Outcome, bench: ProviderBench, case: Case) -> Outcome:
    """The outcome of a case that changed, with the kernels that its calls ran; as it is where nobody can tell."""
    if bench.provider.watched is None or not isinstance(outcome.drift, Drift):
        return outcome
    with bench.provider.watched() as seen, contextlib.suppress(NotApplicable, ProviderFault):
        RELATIONS[case.relation].evaluate(ProviderBench(bench.provider, bench.operands), case.params)
    return replace(outcome, drift=replace(outcome.drift, kernels=tuple(dict.fromkeys(seen))[:_KERNELS]))


def _compared(pair: Pair, case: Case) -> Outcome:
    expected, got = np.ascontiguousarray(pair.expected), np.ascontiguousarray(pair.got)
    mismatch = compare.first_mismatch(expected, got)
    if mismatch is None:
        return Outcome("held" if expected.size else "n/a", expected.size, reason="" if expected.size else "no outputs")
    changed, largest, histogram = changes(expected, got)
    row, column = mismatch.index
    drift = Drift(
        case,
        int(pair.rows[row]),
        int(pair.columns[column]),
        mismatch.left_bits,
        mismatch.right_bits,
        mismatch.left,
        mismatch.right,
        mismatch.ulps,
    )
    return Outcome("changed", expected.size, changed, largest, histogram=histogram, drift=drift)


def changes(expected: Array, got: Array) -> tuple[int, int, tuple[int, ...]]:
    """Elements whose bits differ, the largest distance in ULPs, and how many fall into each of `ULP_BINS`."""
    unequal = compare.bits(expected) != compare.bits(got)
    ulps = compare.ulp_distance(expected[unequal], got[unequal])
    nan = np.isnan(expected[unequal]) | np.isnan(got[unequal])
    counts = np.bincount(np.searchsorted(_EDGES, ulps[~nan]), minlength=len(ULP_BINS))
    counts[-1] += int(nan.sum())
    return ulps.size, int(ulps.max(initial=0)), tuple(int(c) for c in counts)


def replay(text: str, provider: Provider | None = None) -> tuple[Case, Outcome]:
    """Evaluate the one case of a replay line.

    Parameters
    ----------
    text : str
        As in a drift report.
    provider : Provider, optional
        The provider itself, where its name alone cannot find it.

    Returns
    -------
    case, outcome

    Raises
    ------
    OptionError, ShapeError, DTypeError
        The line is malformed, or names something that is not there.
    LimitError
        There is no memory for the weight.
    """
    case = Case.parse(text)
    found = provider or load_provider(case.provider, checked_device(case.device))
    w = case.source.load(as_dtype(case.dtype), case.seed)
    columns = sampled_columns(len(w), MAX_COLUMNS)
    operands = LinearOperands(case.source.linear, w, case.activations, case.seed, columns, max_m=1 << 31)
    try:
        if case.m < 1:
            raise ValueError("no rows")
        bench = ProviderBench(found, operands)
        return case, with_kernels(evaluate(bench, case), bench, case)
    except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, IsogemmError):
            raise
        raise _malformed(text, f"{type(error).__name__}: {error}") from error


def checked_device(device: str) -> str:
    """``cpu``, or torch's name of an accelerator that is there; else a DeviceError."""
    place = find(device)
    return place.kind if place is HOST else f"{place.kind}:{place.ordinal}"


def ulps_text(ulps: int) -> str:
    """ULPs in words."""
    return "NaN on one side" if ulps == NOT_A_NUMBER else f"{ulps:,} ULP"


def median_ulps(histogram: Sequence[int]) -> str:
    """The bin of `ULP_BINS` that the median of the changed outputs lies in; empty where none changed."""
    below, half = 0, (sum(histogram) + 1) // 2
    for label, count in zip(ULP_BINS, histogram, strict=True):
        below += count
        if count and below >= half:
            return label
    return ""


def json_number(value: float) -> float | str:
    """The value, or a word where it is not finite."""
    return value if np.isfinite(value) else str(value)
