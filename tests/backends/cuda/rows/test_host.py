"""The table of calls along rows, on tensors of the host and launches that only take notes."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from isogemm.base import seen
from isogemm.base.seen import Seen
from isogemm.contract.compare import bits
from isogemm.contract.reference import evaluate
from isogemm.contract.spec import Contract

torch = pytest.importorskip("torch")
rows = pytest.importorskip("isogemm.backends.cuda.rows.run")
build = pytest.importorskip("isogemm.backends.cuda.rows.build")
row_kernels = pytest.importorskip("isogemm.backends.cuda.rows.kernels")
sides = pytest.importorskip("isogemm.backends.cuda.rows.sides")
sums = pytest.importorskip("isogemm.backends.cuda.rows.sums")
direct = pytest.importorskip("isogemm.torch.rows.direct")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """(what was built, addresses) of every launch, and "built" for every kernel."""
    found: list[Any] = []

    def build(kind: str, tensors: Any, codes: Any, align: int, device: int, rest: Any) -> Any:
        found.append("built")
        given = tuple(t is not None for t in tensors)
        return lambda stream, *at: found.append((kind, given, codes, align, rest, at))

    seen.forget()
    rows._learn()
    monkeypatch.setattr(rows, "_built", build)
    monkeypatch.setattr(rows, "_stream", lambda device: 7)
    yield found
    seen.forget()


def norm(x: Any, weight: Any = None, bias: Any = None, kind: str = "layer_norm", **options: Any) -> Any:
    about = {"eps": 1e-5, "out_dtype": None} | options
    return direct._on_device(kind, (x, weight, bias)[: 2 + (kind == "layer_norm")], (about["eps"], about["out_dtype"]))


def test_a_call_like_one_before_is_a_launch(notes):
    x, w = torch.ones(3, 8), torch.ones(8)
    first, second = norm(x, w), norm(x, w)
    assert notes.count("built") == 1
    (_, given, codes, _, rest, at), (*_, again) = [n for n in notes if n != "built"]
    assert given == (True, False, True, False)
    assert (codes, rest) == ([0], {"eps": 1e-5})
    assert at == (x.data_ptr(), w.data_ptr(), first.data_ptr())
    assert again == (x.data_ptr(), w.data_ptr(), second.data_ptr())
    assert rows.known_two("layer_norm", x, w, (1e-5, None)) is not None


def test_whatever_reaches_the_bits_or_the_kernel_is_another_call(notes):
    x, w = torch.ones(4, 8), torch.ones(8)
    narrow, half, moved = x.bfloat16(), w.half(), torch.ones(33)[1:].view(4, 8)
    calls: list[Any] = [
        lambda: norm(x, w), lambda: norm(x, None, w), lambda: norm(x, w, w), lambda: norm(x),
        lambda: norm(x, w, kind="rms_norm"), lambda: norm(x, w, eps=1e-4), lambda: norm(x, w, out_dtype=torch.float16),
        lambda: norm(x[:3], w), lambda: norm(narrow, w), lambda: norm(x, half), lambda: norm(x[::2], w),
        lambda: norm(x[None], w), lambda: norm(moved, w),
        lambda: direct._on_device("silu_mul", (x, x), (None,)), lambda: direct._on_device("softmax", (x,), (None,)),
        lambda: direct._on_device("sum", (x,), (True, None)), lambda: direct._on_device("sum", (x,), (False, None)),
        lambda: direct.fused("add_rms_norm", (x, x, w), (1e-5, None)),
        lambda: direct.fused("add_rms_norm", (x, x, None), (1e-5, None)),
    ]  # fmt: skip
    for _ in range(2):
        for call in calls:
            call()
    assert notes.count("built") == len(calls)
    assert len(notes) == 3 * len(calls)


def test_results_are_contiguous_and_of_their_own_dtype(notes):
    x = torch.ones(6, 4, 8).transpose(0, 1)
    for _ in range(2):
        y = norm(x)
        assert (y.shape, y.dtype, y.is_contiguous()) == (x.shape, x.dtype, True)
        assert norm(x, out_dtype=torch.bfloat16).dtype is torch.bfloat16
        h = direct.fused("add_rms_norm", (x, x.half(), None), (0.0, torch.bfloat16))
        assert [t.dtype for t in h] == [torch.bfloat16, torch.float16]
        assert direct._on_device("mean", (x,), (False, None)).shape == (4, 6)
        cos = torch.ones(6, 4)
        q, k = direct.fused("rope_pair", (x, x[:2], cos, cos), (False, None))
        assert (q.shape, k.shape, q.is_contiguous()) == (x.shape, (2, 6, 8), True)


def test_lazy_negations_and_subclasses_are_looked_at(notes):
    from isogemm.errors import LayoutError

    class Mine(torch.Tensor):
        pass

    x = torch.ones(3, 8)
    norm(x)
    with pytest.raises(LayoutError, match="lazy negation"):
        norm(torch._neg_view(x))
    assert rows.known_one("layer_norm", x.as_subclass(Mine), (1e-5, None)) is None
    norm(x.as_subclass(Mine))
    assert notes.count("built") == 1


def negated(*shape: int) -> Any:
    """Ones as autograd may give a gradient: memory that holds the opposite, and a flag."""
    found = torch.complex(torch.zeros(shape), -torch.ones(shape)).conj().imag
    assert found.is_neg()
    assert bool((found == 1).all())
    return found


def memory(address: int, count: int) -> list[float]:
    return list((ctypes.c_float * count).from_address(address))


def test_gradients_that_are_lazily_negated_are_read_as_they_are(notes, monkeypatch):
    x, dy, seen = torch.ones(3, 8), negated(3, 8), []
    built = rows._built
    monkeypatch.setattr(
        rows, "_built", lambda *about: (built(*about), lambda s, *at: seen.append(memory(at[1], 24)))[1]
    )
    for _ in range(2):
        direct.launched("softmax_back", (x, dy), (), [(x.shape, x.dtype)])
    assert set(notes) == {"built"}  # once for each alignment that the host's memory happens to give the copies
    assert seen == [[1.0] * 24] * 2


def test_the_kernel_knows_how_many_rows_a_table_has(monkeypatch):
    """An id that is none of them would be another's memory."""
    cases = []
    monkeypatch.setattr(build, "serve", lambda function, case, device: lambda stream, *at: cases.append(case))
    monkeypatch.setattr(sums, "_table", Seen(2))
    monkeypatch.setattr(sums, "current_stream", lambda device: 7)
    out = torch.zeros(7, 16)[:5, ::2]
    sums.table(torch.arange(3), torch.arange(3), torch.ones(3, 8), out, start=False)
    assert cases[0].columns == (1, 16, 2, 5)


@pytest.mark.parametrize("term", [0, 1])
def test_sums_over_rows_of_more_dimensions_than_a_kernel_counts_are_of_a_copy(monkeypatch, term):
    cases, launched = [], []
    monkeypatch.setattr(build, "serve", lambda function, case, device: cases.append(case) or launch)
    monkeypatch.setattr(sums, "_columns", Seen(2))
    monkeypatch.setattr(sums, "current_stream", lambda device: 7)

    def launch(stream: int, x: int, d: int, stats: int, out: int) -> None:
        launched.append(memory(d, 32 * 5))

    wide = torch.arange(32 * 5, dtype=torch.float32).view(2, 2, 2, 2, 2, 5).permute(4, 2, 0, 3, 1, 5)
    sums.columns(term, wide if term else None, wide, torch.zeros(32, 2), torch.zeros(5), start=False)
    assert [case.count for case in cases] == [32]
    assert launched == [wide.flatten().tolist()]


@pytest.mark.parametrize(
    ("count", "n", "leaf", "first"),
    [
        (65536, 1024, 8, "leaves"), (65536, 1024, 512, "leaves"), (65536, 1024, 2048, "columns"),
        (65536, 1024, 65536, "columns"), (65536, 128, 512, "columns"), (65536, 128, 128, "leaves"),
        (36, 1024, 36, "leaves"), (37, 1024, 37, "columns"), (0, 1024, 1, "leaves"),
    ],
)  # fmt: skip
def test_short_leaves_and_many_have_a_thread_for_four_columns(monkeypatch, count, n, leaf, first):
    """The other kernel stands behind, for where the first one's bits are not right."""
    cases = []
    monkeypatch.setattr(build, "serve", lambda function, case, device: cases.append(case))
    x, out = sides.Side(1, (n,), 1), sides.Side(0)
    build.columns(0, (count,), n, sides.ABSENT, x, out, leaf, False, 128, 0)
    names = [option.family.file for option in row_kernels._options("columns", cases[0])]
    assert names[0] == first
    assert names[-1] == "columns"


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 24, 100])
def test_sums_over_rows_are_walks_of_leaves(monkeypatch, count, start):
    """The walks are torch's here: each row of their result is the sum of a leaf of rows, one after the other."""

    def walked(term: int, x: Any, dy: Any, stats: Any, out: Any, leaf: int, *, start: bool) -> None:
        sums = out.view(-1, out.shape[-1])
        assert len(sums) >= -(-len(dy) // max(leaf, 1))
        for number, total in enumerate(sums):
            total.copy_(total if start else torch.zeros_like(total))
            for row in dy[number * leaf : (number + 1) * leaf]:
                total += row

    monkeypatch.setattr(sums, "_walked", walked)
    random = torch.Generator().manual_seed(count)
    dy, held = torch.randn(count, 5, generator=random), torch.randn(5, generator=random)
    ones = np.ones((1, count), np.float32)
    for order in ("chain", "leaf1", "leaf8", "leaf24", "tree4", "tree16")[: 4 if start else 6]:
        contract, out = Contract.parse(f"fma/{order}"), held.clone()
        sums.columns(0, None, dy, None, out, order=contract.order, start=start)
        want = evaluate(ones, dy.numpy(), contract, held.numpy()[None] if start else None)[0]
        assert np.array_equal(bits(out.numpy()), bits(want)), order
