"""Kernels along rows are admitted by their bits: a trial's operands, on kernels of the host, right and wrong ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.backends.cuda.rows.host_rows import HostKernel
from tests.planner.fakes import FakeMachine

from isogemm.backends.cuda.driver import machine
from isogemm.backends.cuda.rows import build, trial
from isogemm.backends.cuda.rows.code import Code
from isogemm.backends.cuda.rows.kernels import KERNELS
from isogemm.backends.cuda.rows.sides import ABSENT, Side
from isogemm.backends.cuda.rows.trial import try_code
from isogemm.contract.rows import OPERATIONS
from isogemm.errors import ContractError, DeviceError
from isogemm.planner.admission import Admissions
from isogemm.planner.records import Records

REDUCE = [name for name, operation in OPERATIONS.items() if operation.kernels == "reduce"]
LOSS = [name for name, operation in OPERATIONS.items() if operation.kernels == "loss"]
EACH = [name for name, operation in OPERATIONS.items() if operation.kernels == "each"]


def reductions() -> Iterator[Code]:
    held = [(1, 1, 1, 1, 0), (1, 1, 4, 4, 1), (2, 3, 1, 1, 0), (16, 2, 1, 1, 0)]
    for i, kind in enumerate([*REDUCE, *LOSS]):
        t, two, norm = i % 3, kind.endswith("_back") or kind.startswith("add"), "norm" in kind
        types = {"TX": t, "TG": (t + 1) % 3 if two else -1, "TW": t if norm else -1, "OP": kind.upper()}
        types |= {"TB": 0 if kind == "layer_norm" else -1, "TO": (t + 1) % 3}
        for j, (vec, dims) in enumerate(itertools.product((1, 0), (1, 4))):
            w, h, r, teams, full = held[(i + j) % 4]
            yield Code.of("held", "rows", types, VEC=vec, DIMS=dims, W=w, H=h, EACH=r, TEAMS=teams, FULL=full)
        yield Code.of("long", "rows", types, VEC=i % 2, DIMS=1, THREADS=(992, 256)[i // 2 % 2], U=4)
        yield Code.of("cluster", "rows", types, VEC=1 - i % 2, DIMS=4, THREADS=512)


def others() -> Iterator[Code]:
    for i, (kind, vec, dims) in enumerate(itertools.product(EACH, (1, 0), (1, 4))):
        t, two, back = i % 3, kind in ("silu_mul", "add", "silu_mul_back"), kind.endswith("back")
        types = {"TX": t, "TG": (t + 1) % 3 if two else -1, "TD": 0 if back else -1, "TO": t, "OP": kind.upper()}
        yield Code.of("each", "each", types, VEC=vec, DIMS=dims)
    for i, (turn, vec, dims) in enumerate(itertools.product((0, 1), (1, 0), (1, 4))):
        types = {"TX": i % 3, "TC": 0, "TS": 1, "TW": -1, "TO": (i + 1) % 3, "NORM": 0, "INTERLEAVED": turn}
        yield Code.of("rope", "rope", types, VEC=vec, DIMS=dims)
        more = {"H": 1 + i % 3, "EACH": 4 if i % 3 == 0 else 1, "TEAMS": 4, "ANGLES": vec and not turn}
        yield Code.of("rope", "rope", types | {"NORM": 1, "TW": i % 3 - 1}, VEC=vec, DIMS=dims, **more)
    for term, vec, dims in itertools.product((0, 1, 2), (1, 0), (1, 4)):
        types = {"TERM": term, "TX": vec if term else -1, "TD": term, "TO": 0 if dims == 1 else 1}
        yield Code.of("columns", "columns", types, VEC=vec, DIMS=dims, WIDE=16 if vec else 32)
        yield Code.of("leaves", "columns", types, VEC=vec, DIMS=dims)
    for to, dims in itertools.product((0, 1), (1, 4)):
        yield Code.of("table", "table", {"TD": 1, "TO": to}, VEC=0, DIMS=dims)


@pytest.fixture(autouse=True, scope="module")
def rows_are_drawn_once() -> Iterator[None]:
    """Trials of all kernels draw the same few rows; nobody may write into them."""
    draw = trial._drawn

    @cache
    def drawn(*which: Any) -> np.ndarray:
        made = draw(*which)
        made.flags.writeable = False
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "_drawn", drawn)
        yield


class Host:
    """Loads host kernels; `faults` by file."""

    def __init__(self) -> None:
        self.faults: dict[str, Any] = {}
        self.loaded: list[tuple[Code, HostKernel]] = []
        self.admissions: Any = None

    def load(self, code: Code, ordinal: int) -> HostKernel:
        self.loaded.append((code, HostKernel(code, self.faults.get(code.file))))
        return self.loaded[-1][1]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Host:
    found = Host()
    found.admissions = Admissions(FakeMachine(), Records(tmp_path))
    monkeypatch.setattr(Code, "load", lambda code, ordinal: found.load(code, ordinal))
    monkeypatch.setattr(machine, "_admissions", {0: found.admissions})
    return found


def tried(host: Host, code: Code) -> str:
    kernel = next(kernel for kernel in KERNELS if kernel.file == code.file)
    return try_code(host.admissions.bench, kernel, code)


@pytest.mark.parametrize("code", [*reductions(), *others()], ids=lambda c: f"{c.file} {c}")
def test_right_kernels_are_admitted(host, code):
    assert tried(host, code) == ""
    assert sum(k.launches for _, k in host.loaded) >= 1


def one_bit(code: Code, values: list[np.ndarray]) -> None:
    words = values[0].reshape(-1)[:1]
    words.view(f"u{words.itemsize}")[...] ^= 1


def unwritten(code: Code, values: list[np.ndarray]) -> None:
    flat = values[0].reshape(-1)[-1:]
    flat.view(f"u{flat.itemsize}")[...] = 0x7FC1 if flat.itemsize == 2 else 0x7FC00BAD


def swapped(code: Code, values: list[np.ndarray]) -> None:
    values[0][...] = values[0][::-1].copy()


FAULTS = (one_bit, unwritten, swapped)


def faulty() -> Iterator[tuple[Code, Any]]:
    """Half of each file's codes, by fours and one by one, with faults by turns; of few codes each has every fault."""
    codes = [*reductions(), *others()]
    for kernel in KERNELS:
        own = [code for code in codes if code.file == kernel.file]
        half = [code for i, code in enumerate(own) if i % 4 in (0, 3)]
        yield from zip(half, itertools.cycle(FAULTS)) if len(half) >= 3 else itertools.product(own, FAULTS)


@pytest.mark.parametrize(
    ("code", "fault"), list(faulty()), ids=lambda x: getattr(x, "__name__", None) or f"{x.file} {x}"
)
def test_wrong_bits_are_found(host, code, fault):
    host.faults[code.file] = fault
    found = tried(host, code)
    assert "differ, first out" in found or "differ, first second" in found


@pytest.mark.parametrize("kind", [*REDUCE, "cross_entropy"])
def test_lanes_that_are_walked_backwards_are_found(host, kind, monkeypatch):
    """Roots and roundings to 16 bits hide most of what another order changes."""
    two, norm = kind.endswith("_back") or kind.startswith("add"), "norm" in kind
    out = 0 if kind in ("rms_norm", "softmax", "add_rms_norm", "log_softmax", "cross_entropy") else 1
    types = {"TX": 1, "TG": 1 if two else -1, "TW": 1 if norm else -1, "TB": -1, "TO": out, "OP": kind.upper()}
    code = Code.of("held", "rows", types, VEC=1, DIMS=1, W=4, H=2, EACH=1, TEAMS=1, FULL=1)

    def load(code: Code, ordinal: int) -> HostKernel:
        made = HostKernel(code)
        made.turned = True
        return made

    monkeypatch.setattr(host, "load", load)
    found = tried(host, code)
    assert " differ, first out" in found or (kind == "cross_entropy" and " differ, first second" in found)


def test_a_write_beside_the_result_is_found(host, monkeypatch):
    code = next(c for c in reductions() if c.file == "held")

    def wider(self: HostKernel, pointers: list[int], *rest: Any) -> Any:
        made = rows(self, pointers, *rest)
        address, index, values, kind = made[0]
        return [(address, np.append(index, index.size), np.append(values, 0), kind), *made[1:]]

    rows = HostKernel._rows
    monkeypatch.setattr(HostKernel, "_rows", wider)
    assert "1 words beside out were written" in tried(host, code)


def norm(rows: int = 5, out: int = 0) -> Any:
    sides = (Side(0, (1024,), 1), ABSENT, Side(0), ABSENT)
    return build.reduce("rms_norm", (rows,), 1024, sides, (out, -1), 1e-5, 128, 0)


def states(host: Host) -> list[tuple[str, str]]:
    return [(known.name, known.admission.state) for known in host.admissions.known()]


def test_a_refused_kernel_is_passed_over_for_the_next(host):
    host.faults["held"] = one_bit
    norm()
    assert states(host) == [("rows held", "refused"), ("rows long", "admitted")]
    assert host.loaded[-1][0].file == "long"
    host.faults["long"] = one_bit
    with pytest.raises(
        ContractError, match=r"NVIDIA H200.*rows held .*OP=RMS_NORM.*: refused .*differ, first out\[\d+\] 0x"
    ):
        norm(out=1)  # other code, which is tried anew


def test_a_kernel_that_reads_four_at_once_gives_way_to_one_that_reads_one_by_one(host, monkeypatch):
    def wrong(code: Code, values: list[np.ndarray]) -> None:
        if code.vec:
            one_bit(code, values)

    for file in ("held", "long", "each", "rope", "columns", "leaves"):
        host.faults[file] = wrong
    norm()
    build.each("silu", (3,), 64, (Side(1, (64,), 1), ABSENT, ABSENT), (1,), 128, 0)
    turned = [build.Turned((4,), Side(1, (64,), 1), Side(0, (32,), 1), Side(0, (32,), 1))]
    build.rope(turned, 64, 1, interleaved=False, normed=False, eps=0.0, align=128, device=0)
    for count in (30, 400):
        build.columns(0, (count,), 64, ABSENT, Side(1, (64,), 1), Side(0), count, False, 128, 0)
    assert [c.vec for c, _ in host.loaded if c.function != "rows"][-1] == 0
    assert {name for name, state in states(host) if state == "admitted"} == {
        "rows columns", "rows each", "rows held", "rows leaves", "rows rope",
    }  # fmt: skip


def test_a_verdict_serves_all_sizes_and_later_processes(host):
    norm()
    count = len(host.loaded)
    norm(rows=3)
    assert len(host.loaded) == count + 1  # bound, not tried
    machine._admissions[0] = Admissions(FakeMachine(captures=True), host.admissions.records)
    norm()
    assert len(host.loaded) == count + 2


def test_a_first_use_while_a_graph_is_captured_says_what_to_do(host):
    host.admissions.machine.captures = True
    with pytest.raises(DeviceError, match="call once with these shapes before capturing"):
        norm()
    host.admissions.machine.captures = False
    norm()


def test_other_sources_void_a_verdict(host, monkeypatch):
    norm()
    count = len(host.loaded)
    monkeypatch.setattr("isogemm.planner.admission.fingerprint", lambda home: f"other {home}")
    norm()
    assert len(host.loaded) > count + 1
