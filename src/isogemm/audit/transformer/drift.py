"""One case of a model's audit: its evaluation, and the first module and operator that gave other bits."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from ...contract.compare import bits
from ...operands.tensors import memory
from ..bench import NotApplicable
from ..cases import Outcome, changes, json_number
from ..data import Array
from ..providers import first_line
from .relations import ModelRelation, ModelScope, Params
from .runs import STRIDE, ModelRun, Prompts
from .subject import Rows, Subject
from .trace import Difference, Trace, called_more, first_difference


@dataclass(frozen=True)
class ModelCase:
    """Everything that one comparison depends on."""

    # mode, relation: names
    mode: str
    relation: str
    params: Params  # the relation's own parameters
    model: str  # its class and dtype
    # the options of `isogemm audit` that set up the same model and prompts; empty for a model without a path
    words: tuple[str, ...] = ()

    def command(self) -> str:
        """A shell command, or a line of Python for a model that has no path, that evaluates the relation again."""
        if not self.words:
            return f"isogemm.audit.model(model, mode={self.mode!r}, relations=[{self.relation!r}])"
        return shlex.join(["isogemm", "audit", *self.words, "--mode", self.mode, "--relation", self.relation])


@dataclass(frozen=True)
class ModelDrift:
    """The first outputs whose bits differ between two runs of a model."""

    case: ModelCase
    runs: tuple[str, str]  # what was compared
    # module, kind, operator: the first module whose output (or what it hands to a module in it) differs, its class, and
    # the first such operator in it; empty where it is none that torch dispatches. For gradients the first on the way
    # back.
    module: str
    kind: str
    operator: str
    what: str  # ``output``, ``gradient`` (of the module's output) or ``parameter`` (the gradient of one)
    largest: float  # largest absolute difference there
    outputs_largest: float  # largest absolute difference of the logits, or of the parameters' gradients
    # tokens, tokens_changed, argmax_changed: tokens compared, those whose outputs differ, those whose most likely next
    # token does (None without logits)
    tokens: int = 0
    tokens_changed: int = 0
    argmax_changed: int | None = None
    # sequence, token: the first token that differs; -1 where none does
    sequence: int = -1
    token: int = -1
    note: str = ""  # what else is known, such as operators that only one of the runs calls

    def __str__(self) -> str:
        params = ", ".join(f"{key} {value}" for key, value in self.case.params.items())
        where = f"{self.module or 'the model'} ({self.kind})" + (f", {self.operator}" if self.operator else "")
        what = {"output": "in", "gradient": "in the gradient of", "parameter": "in the gradient of"}
        parts = [f"first difference {what[self.what]} {where}, by {self.largest:.3g}"]
        if self.tokens:
            at = f", first sequence {self.sequence}, token {self.token}" if self.token >= 0 else ""
            parts.append(
                f"outputs of {self.tokens_changed} of {self.tokens} tokens differ by up to "
                f"{self.outputs_largest:.3g}{at}"
            )
            if self.argmax_changed is not None:
                parts.append(f"argmax differs at {self.argmax_changed}" if self.argmax_changed else "no argmax differs")
        else:
            parts.append(f"gradients differ by up to {self.outputs_largest:.3g}")
        note = f" ({self.note})" if self.note else ""
        return f"{self.case.mode} {self.case.relation} ({params}) of {self.case.model}: {'; '.join(parts)}{note}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; numbers that are not finite are words."""
        numbers = {"largest": json_number(self.largest), "outputs_largest": json_number(self.outputs_largest)}
        own = {key: value for key, value in vars(self).items() if key not in ("case", "runs")}
        return {
            "mode": self.case.mode,
            "relation": self.case.relation,
            "params": dict(self.case.params),
            "model": self.case.model,
            "runs": list(self.runs),
            **own,
            **numbers,
            "replay": self.case.command(),
        }


@dataclass
class Evaluation:
    """Cases of one model in one mode; reference runs are computed once."""

    subject: Subject
    scope: ModelScope
    # prompts, training: for outputs, and for gradients
    prompts: Prompts
    training: Prompts
    # outputs of the batches of the population, for the agreement map
    kept: dict[int, Array] = field(default_factory=dict)
    # relations whose first difference was looked for: the first changed case of each
    located: set[str] = field(default_factory=set)
    _last: tuple[ModelRun, Any] | None = None

    def outcome(self, relation: ModelRelation, case: ModelCase) -> Outcome:
        """What came of a case. Raises NotApplicable: the model has no such case."""
        if relation.decoder and not self.subject.causal:
            raise NotApplicable("needs a causal language model")
        if relation.cuda and self.subject.device.type != "cuda":
            raise NotApplicable("needs a model on a CUDA device")
        if relation.not_inside and self.subject.mode == "invariant":
            raise NotApplicable(relation.not_inside)
        if relation.gradients:
            return self._gradients(relation, case)
        runs = relation.runs(self.prompts, self.scope, case.params)
        expected, got = self._reference(runs[0], self.subject.outputs), self.subject.outputs(runs[1])
        if relation.name == "population":
            alone, beside = (memory("outputs", rows).reshape(1, -1) for _, rows in (expected, got))
            self.kept |= {1: alone, int(case.params["batch"]): beside}
        a, b, tokens = _common(expected, got)
        if a.dtype != b.dtype or a.shape != b.shape or not a.size:
            return Outcome("failed", reason=f"outputs {a.dtype}{list(a.shape)} against {b.dtype}{list(b.shape)}")
        changed, largest, histogram = changes(a, b)
        if not changed:
            return Outcome("held", a.size)
        drift = self._drift(case, runs, a, b, tokens) if self._locate(relation) else None
        return Outcome("changed", a.size, changed, largest, histogram=histogram, drift=drift)

    def _locate(self, relation: ModelRelation) -> bool:
        first = relation.name not in self.located
        self.located.add(relation.name)
        return first

    def _reference(self, run: ModelRun, compute: Callable[[ModelRun], Any]) -> Any:
        """What the first of two runs gives; that of the case before, where it is the same run."""
        if self._last is None or self._last[0] != run:
            self._last = (run, compute(run))
        return self._last[1]

    def _drift(self, case: ModelCase, runs: tuple[ModelRun, ModelRun], a: Array, b: Array, tokens: Array) -> ModelDrift:
        place, module, operator, note = self._location(runs)
        rows = (bits(a) != bits(b)).any(axis=1)
        first = int(tokens[rows][0])
        found = operator or module
        return ModelDrift(
            case=case,
            runs=(runs[0].text, runs[1].text),
            module=place,
            kind=_kind(self.subject.model, place),
            operator=operator.key.operator if operator else "",
            what="output",
            largest=found.largest if found else _largest(a, b),
            outputs_largest=_largest(a, b),
            tokens=len(tokens),
            tokens_changed=int(rows.sum()),
            argmax_changed=int((a.argmax(axis=1) != b.argmax(axis=1)).sum()) if self.subject.causal else None,
            sequence=first // STRIDE,
            token=first % STRIDE,
            note=note,
        )

    def _location(self, runs: tuple[ModelRun, ModelRun]) -> tuple[str, Difference | None, Difference | None, str]:
        """The module, its difference, that of the operator in it, and a note; a failed search is only a note."""
        if any(run.how for run in runs):
            return "", None, None, "modules of a compiled, captured or served run cannot be watched"
        try:
            traces = self._traces(runs, None)
            module = first_difference(*traces)
            if module is None:
                return "", None, None, "no module's output differs when all are watched"
            place = _module_of(module, traces[0])
            return place, module, *self._operator(runs, place)
        except Exception as error:
            return "", None, None, f"the place was not found: {type(error).__name__}: {first_line(error)}"

    def _traces(self, runs: tuple[ModelRun, ModelRun], inside: str | None) -> list[Trace]:
        traces = []
        for run in runs:
            trace = Trace(self.subject.model, inside=inside, causal=self.subject.causal)
            self.subject.outputs(run, trace)
            traces.append(trace)
        return traces

    def _operator(self, runs: tuple[ModelRun, ModelRun], module: str) -> tuple[Difference | None, str]:
        left, right = self._traces(runs, module)
        found = first_difference(left, right)
        both = zip(called_more(left, right), ("first", "second"), strict=True)
        return found, "; ".join(f"the {which} run calls {', '.join(n[:3])} more often" for n, which in both if n)

    def _gradients(self, relation: ModelRelation, case: ModelCase) -> Outcome:
        runs = relation.runs(self.training, self.scope, case.params)
        gradients = partial(self.subject.gradients, prompts=self.training)
        expected, got = self._reference(runs[0], gradients), gradients(runs[1])
        differ: dict[str, float] = {}
        outputs, found = 0, []
        for name, left in expected.items():
            a, b = (memory("gradient", x).reshape(1, -1) for x in (left, got[name]))
            outputs += a.size
            found.append(changes(a, b))
            if found[-1][0]:
                differ[name] = _largest(a, b)
        if not differ:
            return Outcome("held", outputs)
        drift = self._gradient_drift(case, runs, differ) if self._locate(relation) else None
        changed, largest, histograms = zip(*found, strict=True)
        bins = tuple(map(sum, zip(*histograms, strict=True)))
        return Outcome("changed", outputs, sum(changed), max(largest), bins, drift)

    def _gradient_drift(self, case: ModelCase, runs: tuple[ModelRun, ModelRun], differ: dict[str, float]) -> ModelDrift:
        traces = []
        for run in runs:
            trace = Trace(self.subject.model, causal=True, gradients=True)
            self.subject.gradients(run, self.training, trace)
            traces.append(trace)
        found = first_difference(*traces) or first_difference(*traces, backward=True)
        last = list(differ)[-1]  # parameters are in the order of the forward pass
        module = _module_of(found, traces[0]) if found else last.rpartition(".")[0]
        note = f"gradients of {len(differ)} parameters differ" + ("" if found else f", from {last} back")
        return ModelDrift(
            case=case,
            runs=(runs[0].text, runs[1].text),
            module=module if found else last,
            kind=_kind(self.subject.model, module),
            operator="",
            what=found.key.kind.replace("input", "output") if found else "parameter",
            largest=found.largest if found else differ[last],
            outputs_largest=max(differ.values()),
            note=note,
        )


def evaluate(evaluation: Evaluation, relation: ModelRelation, case: ModelCase) -> Outcome:
    """Evaluate a case; errors of the model become outcomes."""
    try:
        return evaluation.outcome(relation, case)
    except NotApplicable as why:
        return Outcome("n/a", reason=str(why))
    except (Exception, SystemExit) as error:
        return Outcome("failed", reason=f"{type(error).__name__}: {first_line(error)}"[:300])


def _common(left: Rows, right: Rows) -> tuple[Array, Array, Array]:
    tokens, i, j = np.intersect1d(left[0], right[0], return_indices=True)
    a, b = (memory("outputs", x[torch.as_tensor(at)]) for (_, x), at in ((left, i), (right, j)))
    return a, b, tokens


def _largest(a: Array, b: Array) -> float:
    with np.errstate(all="ignore"):
        return float(np.nan_to_num(np.abs(a.astype(np.float64) - b.astype(np.float64)), nan=np.inf).max())


def _module_of(found: Difference, trace: Trace) -> str:
    """The module that computed what differs: an input is its caller's."""
    name = found.key.module
    return trace.callers.get(name, "") if found.key.kind == "input" else name


def _kind(model: Any, name: str) -> str:
    return type(model.get_submodule(name)).__name__
