"""What attention on CUDA refuses, and the nearest legal choice that it names; no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest

from isogemm.backends.cuda.attention import run
from isogemm.backends.cuda.attention.run import _check, clamped
from isogemm.base.seen import Seen
from isogemm.errors import DTypeError, IsogemmError, LayoutError, LimitError, ShapeError

torch = pytest.importorskip("torch")


def tensors(q: tuple[int, ...] = (2, 6, 5, 8), k: Any = None, v: Any = None, dtype: str = "bfloat16") -> list[Any]:
    k = k or (2, 3, 7, 8)
    return [torch.zeros(s, dtype=getattr(torch, dtype)) for s in (q, k, v or (*k[:3], 16))]


def refused(q: Any, k: Any, v: Any, mask: Any = None, start: Any = None, stop: Any = None, out: Any = None) -> Any:
    with pytest.raises(IsogemmError) as caught:
        _check(q, k, v, mask, start, stop, q.dtype if out is None else out)
    return caught.value


def test_what_fits_is_taken():
    _check(*tensors(), torch.zeros(5, 7), torch.zeros(2, dtype=torch.int32), None, torch.float16)
    _check(*tensors(q=(2, 6, 0, 8)), None, None, None, torch.float32)
    _check(*tensors(q=(2, 0, 5, 8)), None, None, None, torch.float32)


@pytest.mark.parametrize(
    ("shapes", "what", "nearest"),
    [
        ({"k": (2, 4, 7, 8)}, "shape of k", (2, 3, 7, 8)),  # 4 does not divide 6 heads
        ({"k": (2, 5, 7, 8)}, "shape of k", (2, 6, 7, 8)),
        ({"k": (2, 0, 7, 8)}, "shape of k", (2, 1, 7, 8)),
        ({"k": (2, 12, 7, 8)}, "shape of k", (2, 6, 7, 8)),
        ({"k": (3, 2, 7, 8)}, "shape of k", (2, 2, 7, 8)),
        ({"k": (2, 2, 7, 9)}, "shape of k", (2, 2, 7, 8)),
        ({"v": (2, 3, 9, 16)}, "shape of v", (2, 3, 7, 16)),
        ({"v": (2, 6, 7, 16)}, "shape of v", (2, 3, 7, 16)),
        ({"q": (6, 5, 8)}, "dimensions of q", (1, 6, 5, 8)),
        ({"k": (1, 2, 3, 7, 8), "v": (2, 3, 7, 8)}, "dimensions of k", (2, 3, 7, 8)),
    ],
)
def test_shapes(shapes, what, nearest):
    error = refused(*tensors(**shapes))
    assert isinstance(error, ShapeError)
    assert str(error).startswith(what)
    assert error.nearest == nearest
    if what.startswith("shape of"):  # the choice is legal
        given = {"q": (2, 6, 5, 8), "k": (2, 3, 7, 8), **shapes, what[-1]: nearest}
        _check(
            *tensors(given["q"], given["k"], given.get("v") if what[-1] == "v" else None), *[None] * 3, torch.float16
        )


def test_dtypes():
    q, k, v = tensors()
    for error, nearest in (
        (refused(q, k.half(), v), "bfloat16"), (refused(q.double(), k, v), "float32"),
        (refused(q, k, v, out=torch.float64), "bfloat16"), (refused(q, k, v, torch.zeros(5, 7).double()), "bool"),
    ):  # fmt: skip
        assert isinstance(error, DTypeError)
        assert error.nearest == nearest


def test_sizes_and_strides():
    error = refused(*tensors((2, 6, 5, 300), (2, 3, 7, 300), (2, 3, 7, 16)))
    assert isinstance(error, LimitError)
    assert error.nearest == (256, 16)
    q, k, v = (x.expand(65536, -1, -1, -1) for x in tensors((1, 1, 1, 1), (1, 1, 1, 1)))
    assert refused(q, k, v).nearest == 65535
    q, k, v = tensors()
    error = refused(q, k.mT.contiguous().mT, v)
    assert isinstance(error, LayoutError)
    assert error.nearest == "k.contiguous()"


def test_masks_and_bounds():
    q, k, v = tensors()
    for shape in ((5, 8), (1, 2, 6, 5, 7), (4, 5, 7)):
        assert refused(q, k, v, torch.zeros(shape)).nearest == (2, 6, 5, 7)
    assert refused(q, k, v, start=torch.zeros(2, dtype=torch.int64)).nearest == "start.int().contiguous() of shape (2,)"
    assert refused(q, k, v, stop=torch.zeros(3, dtype=torch.int32)).nearest == "stop.int().contiguous() of shape (2,)"


def test_queries_that_share_keys_are_counted_together():
    q, k, v = tensors((1, 4, 1, 8), (1, 1, 7, 8))
    assert refused(q.expand(1, 4, 2**29, 8), k, v).nearest == 2**31 - 1024
    _check(q.expand(1, 4, 2**28, 8), k, v, None, None, None, q.dtype)


def test_lazy_negations_are_refused():
    q, k, v = tensors(dtype="float32")
    error = refused(q, k, v, torch.zeros(5, 7, dtype=torch.complex64).conj().imag)
    assert isinstance(error, LayoutError)
    assert error.nearest == "mask.resolve_neg()"
    assert refused(q, torch._neg_view(k), v).nearest == "k.resolve_neg()"


@pytest.mark.parametrize("offset", [-(2**70), -(2**31), -6, -5, 0, 6, 7, 8, 2**31 - 1, 2**70])
def test_a_rule_s_offset_can_be_added_to_a_query_s_number(offset):
    tq, tk = 5, 7
    shown = clamped(offset, tq, tk)
    assert -tq <= shown <= tk
    assert all((j > i + offset) == (j > i + shown) for i in range(tq) for j in range(tk))
    assert clamped(None, tq, tk) is None


def test_kernels_get_such_an_offset(monkeypatch):
    monkeypatch.setattr(run, "_plans", Seen(4))
    monkeypatch.setattr(run, "admitted_run", lambda case, kernel: case)
    monkeypatch.setattr(run, "_check_arithmetic", lambda *about: None)
    for offset, shown in ((2**31 - 1, 7), (2, 2), (None, None)):
        case = run._plan((offset,), *tensors(), 1.0, None, offset, None, None, False, "fma", torch.float32, True, None)
        assert case.offset == shown
