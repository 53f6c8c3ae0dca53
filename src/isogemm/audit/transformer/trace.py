"""What each module and operator gave for each token, so that the first one that differs can be named.

A tensor is aligned with tokens by its shape. Several readings of a shape may be possible (16 tokens in a chunk, 16
heads): all are kept, and two runs are compared by a reading that both have in every step.

Rows of an operator that no reading aligns (those of experts, in the order of the experts) are compared by what went in:
the same rows of its operands have to give the same rows again, wherever they stand.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...operands.tensors import words
from ...torch.routing.coverage import MOVES
from .runs import STRIDE, Step

Tensor = Any  # torch is untyped to mypy
_Read = Callable[[Tensor, "_Positions"], Tensor]


@dataclass(frozen=True, order=True)
class Key:
    """What a tensor is: input or output of a module, the output of an operator inside it, or an output's gradient."""

    module: str  # its name in the model
    kind: str  # {"input", "output", "operator", "gradient"}
    operator: str = ""
    count: int = 0  # how many of the same came before in the same step
    index: int = 0  # which tensor of several


@dataclass(frozen=True)
class Difference:
    """The first output that differs."""

    key: Key
    largest: float  # largest absolute difference
    tokens: int  # tokens whose rows differ
    token: int  # the first of them; -1 where rows were compared by what went in


@dataclass
class _Positions:
    """Where the compared tokens of one step lie."""

    batch: int
    tokens: int
    keys: int
    past: int
    b: Tensor
    t: Tensor
    numbers: Tensor
    columns: Tensor  # [n, length]: index of each key of the row's own sequence, -1 where it has none or may not see it


# Readings of a shape, in order of preference: (name, whether it fits, the rows of the compared tokens).
_READINGS: tuple[tuple[str, Callable[[Sequence[int], _Positions], bool], _Read], ...] = (
    ("batch, tokens", lambda s, p: tuple(s[:2]) == (p.batch, p.tokens), lambda x, p: x[p.b, p.t]),
    (
        "batch, heads, tokens",
        lambda s, p: len(s) > 2 and (s[0], s[2]) == (p.batch, p.tokens),
        lambda x, p: x[p.b, :, p.t],
    ),
    ("rows", lambda s, p: s[0] == p.batch * p.tokens, lambda x, p: x[p.b * p.tokens + p.t]),
    ("tokens", lambda s, p: len(s) > 1 and tuple(s[:2]) == (1, p.tokens), lambda x, p: x[0, p.t]),
    (
        "batch * heads, tokens",
        lambda s, p: len(s) == 3 and s[1] == p.tokens and s[0] % p.batch == 0 and s[0] > p.batch,
        lambda x, p: x.unflatten(0, (p.batch, -1))[p.b, :, p.t],
    ),
    (
        "batch, heads, keys",
        lambda s, p: len(s) == 4 and (s[0], s[2]) == (p.batch, p.keys) and p.past > 0,
        lambda x, p: x[p.b, :, p.past + p.t],
    ),
)


class Trace:
    """The rows of one run's compared tokens, by what gave them.

    An input that differs where no output did before comes from what the calling module computes itself. With `inside`
    the operators that this module calls are recorded, in place of inputs and outputs of modules, and with `gradients`
    the gradients of those outputs. `causal`: a token sees only those before it.
    """

    def __init__(self, model: Any, *, inside: str | None = None, causal: bool = True, gradients: bool = False) -> None:
        self.model, self.inside, self.causal, self.gradients = model, inside, causal, gradients
        self.rows: dict[Key, list[tuple[Tensor, dict[str, Tensor]]]] = {}
        self.pairs: dict[Key, dict[bytes, dict[bytes, Tensor]]] = {}  # rows of operands, and what came of each
        self.callers: dict[str, str] = {}
        self.stack: list[str] = []
        self.place: _Positions | None = None
        self.counts: dict[Key, int] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Hooks on every module, and the operators' recorder where one module is looked into."""
        handles = []
        for name, module in self.model.named_modules():
            handles.append(module.register_forward_pre_hook(self._enter(name), prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave(name), always_call=True))
        try:
            if self.inside is None:
                yield
            else:
                with _Recorder(self):
                    yield
        finally:
            for handle in handles:
                handle.remove()

    def step(self, step: Step, cache_length: int, device: Any) -> None:
        """Say which call of the model comes next; `cache_length` is what its attention sees at most."""
        b, t = np.nonzero(step.tokens >= 0)
        numbers = step.tokens[b, t]
        length = int((numbers % STRIDE).max(initial=0)) + 1
        columns = np.full((len(b), length), -1)
        for i, (row, number) in enumerate(zip(b, numbers, strict=True)):
            keys = step.keys[row]
            own = np.nonzero((keys >= 0) & (keys // STRIDE == number // STRIDE))[0]
            own = own[keys[own] <= number] if self.causal else own
            columns[i, keys[own] % STRIDE] = own
        batch, tokens = step.ids.shape
        place = [torch.as_tensor(a, device=device) for a in (b, t, numbers, columns)]
        self.place = _Positions(batch, tokens, cache_length, step.keys.shape[1] - tokens, *place)
        self.stack, self.counts = [], {}

    def add(self, key: Key, x: Tensor) -> None:
        """Keep the rows of a tensor in every reading of its shape; none where it has none."""
        self._add_at(self.place, key, x)

    def _add_at(self, place: _Positions | None, key: Key, x: Tensor) -> None:
        found = _readings(x, place)
        if found and place is not None:
            self.rows.setdefault(key, []).append((place.numbers.cpu(), found))

    def add_pairs(self, key: Key, operands: Sequence[Tensor], x: Tensor) -> None:
        """Keep the rows of a tensor that no reading aligns, by the rows of the operands that have as many.

        Weights are known by where they lie: the same for all rows, and too large to be read for every call.
        """
        if (key in self.rows and key not in self.pairs) or x.dim() < 2 or not x.numel():
            return
        given = [y for y in operands if y.dim() > 1 and len(y) == len(x)]
        if not given:
            return
        self.rows[key] = []
        weights = repr([(y.shape, y.data_ptr()) for y in operands if y.dim() > 1 and len(y) != len(x)]).encode()
        found, rows = self.pairs.setdefault(key, {}), x.detach().cpu()
        for keys, row in zip(zip(*(map(_digest, y.detach().cpu()) for y in given), strict=True), rows, strict=True):
            found.setdefault(weights + b"".join(keys), {})[_digest(row)] = row

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            self.callers[name] = self.stack[-1] if self.stack else ""
            self.stack.append(name)
            if self.inside is None:
                for index, x in enumerate(_tensors((args, kwargs))):
                    self.add(self._counted(Key(name, "input", index=index)), x)

        return hook

    def _leave(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            if self.stack and self.stack[-1] == name:
                self.stack.pop()
            if self.inside is not None:
                return
            for index, x in enumerate(_tensors(output)):
                self.add(self._counted(Key(name, "output", index=index)), x)
                if self.gradients and x.requires_grad:
                    # With this step's place: the backward pass comes when others may have begun.
                    key = self._counted(Key(name, "gradient", index=index))
                    x.register_hook(partial(self._add_at, self.place, key))

        return hook

    def _counted(self, key: Key) -> Key:
        count = self.counts.get(key, 0)
        self.counts[key] = count + 1
        return replace(key, count=count)


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Sees the operators that a trace's module calls itself, those of modules inside of it left out."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        trace = self.trace
        if trace.stack and trace.stack[-1] == trace.inside and not func.is_view:
            key = trace._counted(Key(trace.inside or "", "operator", str(func)))
            moves = func._schema.is_mutable or func._overloadpacket.__name__ in MOVES
            operands = [] if moves else list(_tensors(args))  # as they were before the call, row by row
            for index, x in enumerate(_tensors(result)):
                each = replace(key, index=index)
                trace.add(each, x)
                trace.add_pairs(each, operands, x)
        return result


def _digest(row: Tensor) -> bytes:
    return hashlib.blake2b(row.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).digest()


def _readings(x: Tensor, place: _Positions | None) -> dict[str, Tensor]:
    """Rows of the compared tokens in every reading of a shape, and again with keys in the order of their tokens."""
    found: dict[str, Tensor] = {}
    if place is None or x.dim() < 2 or not x.numel():
        return found
    x = x.detach()
    for name, fits, read in _READINGS:
        if not fits(x.shape, place):
            continue
        rows = read(x, place)
        if x.shape[-1] == rows.shape[-1] == place.keys and rows.dim() > 1:
            found[f"{name}, by key"] = _by_key(rows, place.columns).cpu()
        found[name] = rows.cpu()
    return found


def _by_key(rows: Tensor, columns: Tensor) -> Tensor:
    """The columns of the keys that a row's token sees, in the order of the sequence; 0 elsewhere."""
    shape = (len(rows), *[1] * (rows.dim() - 2), columns.shape[1])
    index = columns.view(shape).expand(*rows.shape[:-1], columns.shape[1])
    return rows.gather(-1, index.clamp(min=0)).masked_fill(index < 0, 0)


def _tensors(output: Any) -> Iterator[Tensor]:
    """Floating-point tensors of a module's output: itself, or in tuples and dictionaries; caches are no outputs."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors(value)


def first_difference(left: Trace, right: Trace, *, backward: bool = False) -> Difference | None:
    """The first tensor, in the order of the left run, whose rows of a common token have other bits.

    Of the forward pass, or of the gradients. An operator that one of the runs calls more often is passed over: which of
    its calls belong together is not known.
    """
    calls = [Counter(key.operator for key in trace.rows if key.kind == "operator") for trace in (left, right)]
    for key, steps in left.rows.items():
        if calls[0][key.operator] != calls[1][key.operator]:
            continue
        if key in right.rows and (key.kind == "gradient") is backward:
            both = left.pairs.get(key), right.pairs.get(key)
            found = _paired(key, *both) if any(both) else _compared(key, steps, right.rows[key])
            if found is not None:
                return found
    return None


def _paired(key: Key, left: Any, right: Any) -> Difference | None:
    """The difference between what the same rows of operands gave in two runs; a row may occur often."""
    unequal = [(left[x], right[x]) for x in left or {} if x in (right or {}) and left[x].keys() != right[x].keys()]
    if not unequal:
        return None
    largest = [_largest(a.values(), b.values()) for a, b in unequal]
    return Difference(key, max(largest), len(unequal), -1)


def _largest(left: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    """The largest distance of a row on the left to the nearest on the right."""
    near = [min(float((a.double() - b.double()).abs().nan_to_num(nan=float("inf")).max()) for b in right) for a in left]
    return max(near)


def called_more(left: Trace, right: Trace) -> tuple[list[str], list[str]]:
    """Names of operators that the left run, and that the right run, calls more often than the other."""
    a, b = (Counter(key.operator for key in t.rows if key.kind == "operator") for t in (left, right))
    return list(a - b), list(b - a)


def _compared(key: Key, left: list[Any], right: list[Any]) -> Difference | None:
    readings = [set(found) for _, found in (*left, *right)]
    common = set.intersection(*readings)
    ordered = [f"{name}{suffix}" for suffix in (", by key", "") for name, _, _ in _READINGS]
    for name in ordered:
        if name in common:
            a, b = _rows(left, name), _rows(right, name)
            return None if a is None or b is None else _difference(key, *a, *b)
    return None


def _rows(steps: list[Any], name: str) -> tuple[Tensor, Tensor] | None:
    """Token numbers, ascending, and their rows; None where the steps' rows have several shapes."""
    rows = [found[name] for _, found in steps]
    if len({(x.shape[1:], x.dtype) for x in rows}) > 1:
        width = max(x.shape[-1] for x in rows)
        if len({(x.shape[1:-1], x.dtype) for x in rows}) > 1 or not name.endswith("by key"):
            return None
        rows = [torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in rows]
    numbers = torch.cat([n for n, _ in steps])
    order = numbers.argsort()
    return numbers[order], torch.cat(rows)[order]


def _difference(
    key: Key, left_numbers: Tensor, left: Tensor, right_numbers: Tensor, right: Tensor
) -> Difference | None:
    common, a, b = np.intersect1d(left_numbers.numpy(), right_numbers.numpy(), return_indices=True)
    left, right = left[torch.as_tensor(a)], right[torch.as_tensor(b)]
    if left.dim() > 1 and left.shape[:-1] == right.shape[:-1] and left.shape != right.shape:
        width = min(left.shape[-1], right.shape[-1])
        if bool(left[..., width:].any()) or bool(right[..., width:].any()):
            return None
        left, right = left[..., :width], right[..., :width]
    if left.shape != right.shape or left.dtype != right.dtype or not len(common):
        return None
    elements = words(left.contiguous()) != words(right.contiguous())
    unequal = elements.flatten(1).any(1)
    if not unequal.any():
        return None
    distance = (left[elements].double() - right[elements].double()).abs().nan_to_num(nan=float("inf"))
    first = int(unequal.nonzero()[0])
    return Difference(key, float(distance.max()), int(unequal.sum()), int(common[first]))
