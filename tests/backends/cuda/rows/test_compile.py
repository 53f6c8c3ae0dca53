"""Kernels along rows compile for an H200, with no GPU: what they ask of the machine, and how they are bound."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import pytest
from tests.backends.cuda.compiled import Compiled, Kernels, kernels

from isogemm.backends.cuda.rows import build
from isogemm.backends.cuda.rows import kernels as row_kernels
from isogemm.backends.cuda.rows.sides import ABSENT, Side, collapse, divider, packed, whole
from isogemm.contract.rows import OPERATIONS
from isogemm.errors import LimitError
from isogemm.planner.choose import Choice

__all__ = ["kernels"]  # the fixture

N = 1024
ROWS = Side(1, (N,), 1)
ONE = Side(1)
REDUCE = [name for name, operation in OPERATIONS.items() if operation.kernels == "reduce"]
EACH = [name for name, operation in OPERATIONS.items() if operation.kernels == "each"]


def first_bound(options: Any, case: Any, admissions: Any, *, what: str) -> Choice[Any]:
    """The likeliest kernel, not tried."""
    family, config, *_ = next(iter(options))
    return Choice(family.name, config, family.bind(case, config, 0), "", None)


@pytest.fixture(autouse=True)
def likeliest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first kernel serves, untried."""
    monkeypatch.setattr(row_kernels, "admissions", lambda device: None)
    monkeypatch.setattr(row_kernels, "choose", first_bound)


def check(kernel: Compiled, registers: int, *wanted: str, **counts: int) -> None:
    """No spills, within so many registers, with instructions that begin so, and so many of others."""
    assert kernel.resources["LOCAL"] == 0
    assert kernel.resources["REG"] <= registers
    code = kernel.machine_code
    for start in wanted:
        assert any(line.startswith(start) for line in code), start
    assert kernel.machine_counts(*counts) == tuple(counts.values())


def made(kernels: Kernels, registers: int, *wanted: str, **counts: int) -> None:
    """One kernel, which is as `check` has it."""
    (kernel,) = kernels.loaded
    kernels.loaded.clear()
    check(kernel, registers, *wanted, **counts)


def sides_of(kind: str, rows: Side = ROWS, one: Side = ONE) -> tuple[Side, Side, Side, Side]:
    two = kind.endswith("_back") or kind.startswith("add")
    weighted = "norm" in kind
    return rows, rows if two else ABSENT, one if weighted else ABSENT, one if kind == "layer_norm" else ABSENT


def test_reductions(kernels: Kernels):
    """One row and many, by turns; both of the kinds that keep most."""
    cases = [(kind, (1, 4096)[i % 2]) for i, kind in enumerate(REDUCE)]
    cases += [(kind, count) for kind in ("add_rms_norm", "layer_norm_back") for count in (1, 4096)]
    for kind, count in cases:
        second = {"add_rms_norm": 1, "rms_norm_back": 0, "layer_norm_back": 0}.get(kind, -1)
        build.reduce(kind, (count,), N, sides_of(kind), (1, second), 1e-6, 128, 0)
    for (kind, _), kernel in zip(cases, kernels.loaded, strict=True):
        check(kernel, 128, "LDG.E.64", "FADD", **({"FFMA": 0, "FMUL": 0} if kind == "sum" else {}))


def test_long_rows(kernels: Kernels):
    """Blocks of 1024 threads, or at least three of 288 on a multiprocessor."""
    lengths = itertools.product(("log_softmax", "layer_norm_back"), (151937, 500000))
    cases = [(kind, n, (3, 4088)[i in (1, 2)]) for i, (kind, n) in enumerate(lengths)]
    for kind, n, count in cases:
        second = 0 if kind.endswith("back") else -1
        build.reduce(kind, (count,), n, sides_of(kind, Side(0, (n,), 1)), (0, second), 1e-6, 128, 0)
    assert len(kernels.loaded) == len(cases)
    for (_, _, count), kernel in zip(cases, kernels.loaded, strict=True):
        check(kernel, 64 if count == 3 else 72)


def test_losses(kernels: Kernels):
    """Rows held by a warp, by several and by clusters, and long ones; of 16-bit scores, read by four and one by one."""
    cases = list(itertools.product((False, True), ((4096, 1024), (3, 8192), (3, 151936), (4088, 151937))))
    for back, (count, n) in cases:
        sides = Side(1, (n,), 1), Side(0, (1,)) if back else ABSENT, Side(0, (2,))
        build.loss(f"cross_entropy{'_back' * back}", (count,), n, sides, 1 if back else 0, -100, 128, 0)
    for (_, (_, n)), kernel in zip(cases, kernels.loaded, strict=True):
        check(kernel, 128 if n < 16384 else 64, "LDG.E.64" if n % 4 == 0 else "LDG.E.U16", "LDG.E.64")


@pytest.mark.parametrize(
    ("rows", "n", "vector"),
    [(Side(1, (N,), 1), N, True), (Side(1, (1,), N), N, False), (Side(1, (1001,), 1), 1001, False)],
)
def test_places_that_are_not_dense_take_the_other_kernel(kernels: Kernels, rows, n, vector):
    build.reduce("softmax", (8,), n, (rows, ABSENT, ABSENT, ABSENT), (1, -1), 0.0, 128, 0)
    made(kernels, 128, "LDG.E.64" if vector else "LDG.E.U16")


def test_elements(kernels: Kernels):
    x = Side(1, (4 * N, N), 1)
    for kind in EACH:
        two, back = kind in ("silu_mul", "add", "silu_mul_back"), kind.endswith("back")
        three = (x, x if two else ABSENT, x if back else ABSENT)
        build.each(kind, (3, 4), N, three, (1, 1) if back else (1,), 128, 0)
    for kind, kernel in zip(EACH, kernels.loaded, strict=True):
        check(kernel, 64, "LDG.E.128", "STG.E.128", **({"FFMA": 0, "FMUL": 0} if kind == "add" else {}))


def test_rotations(kernels: Kernels):
    x = Side(1, (7 * 4 * 128, 128, 4 * 128), 1)
    angles = Side(0, (0, 0, 64), 1)
    cases = list(itertools.product((False, True), (False, True)))
    for interleaved, normed in cases:
        turned = [build.Turned((2, 4, 7), x, angles, angles, ONE if normed else ABSENT)] * 2
        launch = build.rope(turned, 128, 1, interleaved=interleaved, normed=normed, eps=1e-6, align=128, device=0)
        assert launch is not None
    for (_, normed), kernel in zip(cases, kernels.loaded, strict=True):
        check(kernel, 64, *([] if normed else ["LDG.E.128", "STG.E.128"]), **({} if normed else {"FFMA": 0}))


def test_columns_walk_rows_in_order(kernels: Kernels):
    for term in (0, 1, 2):
        build.columns(term, (8192,), N, ROWS, ROWS, Side(0), 8192, True, 128, 0)
    assert len(kernels.loaded) == 3
    for kernel in kernels.loaded:
        check(kernel, 64, "LDG.E.64", "FADD", FFMA=0)


def test_short_leaves_are_added_without_shared_memory(kernels: Kernels):
    for term, leaf in ((0, 8), (1, 128), (2, 512)):
        build.columns(term, (65536,), N, ROWS, ROWS, Side(0), leaf, False, 128, 0)
    assert len(kernels.loaded) == 3
    for kernel in kernels.loaded:
        check(kernel, 128, "LDG.E.64", "FADD", FFMA=0, BAR=0)


def test_tables(kernels: Kernels):
    build.table((3, 5), N, Side(1, (5 * N, N), 1), Side(0, (N,), 1), 7, True, 0)
    made(kernels, 64, "FADD", FFMA=0, FMUL=0)


def test_too_many_dimensions_are_launched_one_by_one(kernels: Kernels):
    shape, steps = (2, 3, 2, 3, 2), (1000, 7, 300, 31, 3)
    x = Side(0, steps, 1)
    launch = build.reduce("sum", shape, 2, (x, ABSENT, ABSENT, ABSENT), (0, -1), 0.0, 4, 0)
    launch(0, 4096, 8192)
    made(kernels, 128)


def test_places():
    assert collapse((2, 3, 4), [(12, 4, 1)]) == ([24], [[1]])
    assert collapse((2, 3, 4), [(12, 4, 1), (0, 4, 1)]) == ([2, 12], [[12, 1], [0, 1]])
    assert collapse((1, 1), [(5, 7)]) == ([], [[]])
    words = struct.unpack("<8I12q", packed(24, [2, 12], [[12, 1], [0, 1]]))
    assert (words[0], words[2], words[4], words[6]) == (24, 1, 2, 12)
    assert words[8:] == (0, 0, 12, 1, 0, 0, 0, 1, 0, 0, 0, 0)
    assert whole([Side(1, (N,), 1)], (4,), N, 4, 8)
    assert not whole([Side(1, (N,), 1)], (4,), N, 4, 4)
    assert not whole([Side(0, (N,), 1)], (4,), N, 4, 8)
    assert not whole([Side(1, (N + 2,), 1)], (4,), N, 4, 128)
    assert whole([Side(1, (N + 2,), 1)], (1,), N, 4, 128)


def test_dividers():
    for extent in (*range(1, 70), 127, 128, 129, 1000, 4095, 65535, 65537, 2**30 - 1, 2**30, 2**31 - 2, 2**31 - 1):
        factor, shift = divider(extent)
        assert 0 <= factor < 2**32
        assert shift < 32
        for n in (0, 1, extent - 1, extent, extent + 1, 7 * extent - 1, 7 * extent, 2**30, 2**31 - 2, 2**31 - 1):
            if n < 2**31:
                assert n // extent == (n + (n * factor >> 32)) >> shift


@pytest.mark.parametrize("two", [False, True])
def test_teams_cover_their_rows(two):
    for count in (1, 3, 64, 500, 4096, 10**6):
        for n in (0, 1, 127, 128, 129, 1000, 4096, 8192, 16384):
            found = row_kernels.team(count, n, two)
            assert found is not None
            assert 128 * found.warps * found.groups >= n
            assert 128 * found.warps * (found.groups - 1) < max(n, 1)
            assert 32 * found.warps * found.teams <= 1024
            assert found.warps == 1 or found.rows == found.teams == 1
    assert row_kernels.team(1, 16385, two) is None


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `build` asks for: cases, then the addresses of their launches."""
    seen: list[Any] = []

    def serve(function: str, case: Any, device: int) -> Any:
        seen.append(case)
        return lambda stream, *at: seen.append(at)

    monkeypatch.setattr(build, "serve", serve)
    return seen


def test_losses_say_where_their_operands_lie(served: list[Any]):
    x, target = Side(1, (2 * N,), 2), Side(0, (6,))
    build.loss("cross_entropy", (3,), N, (x, ABSENT, target), 0, 7, 128, 0)
    build.loss("cross_entropy_back", (3,), N, (Side(1, (N,), 1), Side(2, (0,)), target), 1, -100, 8, 0)
    build.loss("cross_entropy_back", (3,), N, (Side(1, (N,), 1), Side(2, (0,)), target), 0, -100, 8, 0)
    forward, back, narrow = served
    assert (forward.kinds, forward.columns, forward.vector) == ((1, -1, 0, -1, 0, 0), (2, 1, 1, 7), False)
    assert (back.kinds, back.columns, back.vector) == ((1, 2, 0, 0, 1, -1), (1, 1, 1, -100), True)
    assert not narrow.vector  # four float32 are 16 bytes
    with pytest.raises(LimitError):
        build.loss("cross_entropy", (3,), 2**31 - 1, (x, ABSENT, target), 0, 7, 128, 0)


def test_losses_of_many_dimensions_are_launched_one_by_one(served: list[Any]):
    shape, steps = (2, 3, 2, 3, 2), (1000, 7, 300, 31, 3)
    x, dy, target = Side(1, steps, 1), Side(0, (5, 9, 80, 1, 500)), Side(0, (4, 1000, 14, 300, 62))
    part, n = 36, 2
    build.loss("cross_entropy", shape, n, (x, ABSENT, target), 0, -100, 4, 0)(0, 0, 0, 0, 0)
    build.loss("cross_entropy_back", shape, n, (x, dy, target), 1, -100, 4, 0)(0, 0, 0, 0, 0, 0)
    forward, back = ([at for at in served if isinstance(at, tuple) and len(at) == count] for count in (4, 5))
    assert forward == [(0, 0, 0, 0), (2000, 16, 4 * part, 8 * part)]  # x, classes, losses, sums
    assert back == [(0, 0, 0, 0, 0), (2000, 20, 16, 8 * part, 2 * n * part)]  # x, dy, classes, sums, dx


def test_no_rows_are_no_launches_of_many_dimensions(served: list[Any]):
    steps = (1000, 7, 300, 31, 3)
    build.reduce("sum", (0, 3, 2, 3, 2), 2, (Side(0, steps, 1), ABSENT, ABSENT, ABSENT), (0, -1), 0.0, 4, 0)
    assert [case.count for case in served] == [0]


def test_a_loss_of_tensors_takes_their_strides(monkeypatch: pytest.MonkeyPatch):
    torch = pytest.importorskip("torch")
    from isogemm.backends.cuda.rows import run

    asked: list[Any] = []
    monkeypatch.setattr(run, "loss", lambda *given: asked.append(given))
    x = torch.zeros(3, 4, 8, dtype=torch.bfloat16).transpose(0, 1)
    dy, target = torch.zeros(1).expand(4, 3), torch.zeros(3, 4, dtype=torch.int64).mT
    run._built("cross_entropy_back", (x, dy, target, torch.zeros(4, 3, 2)), [1], 128, 0, {"ignore_index": 7})
    run._built("cross_entropy", (x, None, target, None), [0, 0], 128, 0, {"ignore_index": 7})
    (kind, shape, n, sides, out, ignored, *_), forward = asked
    assert (kind, shape, n, out, ignored) == ("cross_entropy_back", (4, 3), 8, 1, 7)
    assert sides == (Side(1, (8, 32), 1), Side(0, (0, 0)), Side(0, (2, 8)))
    assert forward[3][1] == ABSENT
