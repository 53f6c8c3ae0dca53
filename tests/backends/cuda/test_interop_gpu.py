"""CUDA operands of other libraries, streams, graphs and pointers, on a GPU. float32 has the CPU's own bits."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from tests.products import assert_same, poisoned, product, stacked, values

import isogemm
from isogemm import PointerArray, blas
from isogemm.errors import AliasError, DeviceError, DTypeError, LayoutError, LimitError, OptionError
from isogemm.forms import convert as forms

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
A, B = values((33, 40), seed=1), values((40, 20), seed=2)


def there(x: np.ndarray) -> Any:
    return torch.from_numpy(x).cuda()


def home(x: Any) -> np.ndarray:
    return x.cpu().numpy()


class Dlpack:
    """A tensor with DLPack alone."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


class Interface:
    """A tensor with ``__cuda_array_interface__`` alone."""

    def __init__(self, x: Any, **changes: Any) -> None:
        self.x, self.__cuda_array_interface__ = x, x.__cuda_array_interface__ | changes


@pytest.mark.parametrize("wrap", [lambda x: x, Dlpack, Interface], ids=["torch", "DLPack", "interface"])
@pytest.mark.parametrize("view", [np.s_[:], np.s_[::2], np.s_[:, 4:8], np.s_[:0]], ids=str)
def test_every_kind_in(wrap, view):
    a, b = A[view], B[: A[view].shape[1]]
    got = isogemm.matmul(wrap(there(A)[view]), wrap(there(B)[: a.shape[1]]))
    assert isinstance(got, torch.Tensor)
    assert_same(home(got), product(a, b))
    out = torch.full(got.shape, float("nan"), device="cuda")
    target = wrap(out)
    assert isogemm.matmul(there(a), there(b), out=target) is target
    assert_same(home(out), product(a, b))


def test_bfloat16_through_dlpack():
    a, b = there(A).bfloat16(), there(B).bfloat16()
    assert torch.equal(isogemm.matmul(Dlpack(a), Dlpack(b)), isogemm.matmul(a, b))


def test_cupy_in_cupy_out():
    cupy = pytest.importorskip("cupy")
    a, b = cupy.asarray(A), cupy.asarray(B)
    got = isogemm.matmul(a, b)
    assert isinstance(got, cupy.ndarray)
    assert_same(cupy.asnumpy(got), product(A, B))
    assert_same(cupy.asnumpy(isogemm.matmul(a[::2, ::3], b[: -(-40 // 3)])), product(A[::2, ::3], B[:14]))
    out = cupy.full((33, 20), cupy.nan, np.float32)
    assert isogemm.matmul(a, b, out=out) is out
    assert_same(cupy.asnumpy(out), product(A, B))
    with pytest.raises(LayoutError, match="not negative"):
        isogemm.matmul(a[::-1], b)
    with pytest.raises(DTypeError, match="float64"):
        isogemm.matmul(a.astype(np.float64), b)


def test_numba_in_torch_out():
    cuda = pytest.importorskip("numba.cuda")
    got = isogemm.matmul(cuda.to_device(A), cuda.to_device(B))
    assert_same(home(got), product(A, B))


@pytest.mark.parametrize("form", ["new", "out"])
def test_another_librarys_stream_is_waited_for_and_waits(form):
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.Stream(non_blocking=True):
        x, out = cupy.ones((8, 4096), np.float32), cupy.zeros((8, 4096), np.float32)
        w = cupy.zeros((4096, 4096), np.float32)
        for _ in range(100):
            w += 1  # long enough that a product which did not wait would see less
        got = isogemm.matmul(x, w) if form == "new" else isogemm.matmul(x, w, out=out)
        copied = got * 1  # on CuPy's stream: before the product ends, if nobody waits
        assert (copied == 409600).all()


def test_current_streams_and_threads():
    a, b, want = there(A), there(B), product(A, B)
    found: list[Any] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            mine = [isogemm.matmul(a, b) for _ in range(50)]
        stream.synchronize()
        found.extend(mine)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200
    for got in found:
        assert_same(home(got), want)


@pytest.mark.parametrize("call", ["matmul", "linear", "gemm_strided_batched", "gemm_grouped", "K = 0"])
def test_graphs(call):
    a, b = torch.zeros(3, 33, 40, device="cuda"), there(values((3, 40, 20), seed=2))
    run = {
        "matmul": lambda: isogemm.matmul(a[0], b[0]),
        "linear": lambda: isogemm.linear(a, b[0].T),
        "gemm_strided_batched": lambda: isogemm.gemm_strided_batched(a, b, alpha=0.5),
        "gemm_grouped": lambda: isogemm.gemm_grouped(list(a), list(b))[2],
        "K = 0": lambda: isogemm.gemm(a[0, :, :0], b[0, :0], b[0, :33], beta=2.0),
    }[call]
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    a.copy_(there(values((3, 33, 40), seed=1)))
    graph.replay()
    assert_same(home(got), home(run()))
    assert float(got.abs().sum()) > 0


def test_tensors_that_are_refused():
    a, b = there(A), there(B)
    isogemm.matmul(a, b)
    with pytest.raises(OptionError, match="requires_grad"):
        isogemm.matmul(a, b.clone().requires_grad_())
    with torch.no_grad():
        assert_same(home(isogemm.matmul(a, b.clone().requires_grad_())), product(A, B))
    for other in (B, torch.from_numpy(B), b.cpu()):
        with pytest.raises(DeviceError, match="cuda:0 and cpu"):
            isogemm.matmul(a, other)
    negated = torch.imag(torch.complex(torch.zeros_like(b), b).conj())
    assert negated.is_neg()
    freed = a.clone()
    freed.untyped_storage().resize_(0)
    for bad in (
        lambda: isogemm.matmul(a, negated),
        lambda: isogemm.matmul(freed, b),
        lambda: isogemm.matmul(a.to_sparse(), b),
        lambda: torch.func.vmap(lambda row: isogemm.matmul(row, b))(a),
    ):
        with pytest.raises(LayoutError):
            bad()


def test_memory_that_is_not_there():
    one = torch.ones(1, 1, device="cuda")
    torch.cuda.set_per_process_memory_fraction(0.01)
    try:
        with pytest.raises(LimitError, match="memory for the result on cuda:0"):
            isogemm.matmul(one.expand(2**16, 1), one.expand(1, 2**16))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    with pytest.raises(LimitError, match="bytes of the result"):
        isogemm.matmul(one.expand(2**22, 1), one.expand(1, 2**22))


def test_pointer_arrays():
    a, b = values((6, 4, 8), seed=1), values((6, 8, 5), seed=2)
    ta, tb, out = there(a), there(b), there(poisoned((6, 4, 5)))
    pa = PointerArray(torch.tensor([x.data_ptr() for x in ta], device="cuda"), (4, 8))
    pb, po = PointerArray.of(list(tb)), PointerArray([x.data_ptr() for x in out], (4, 5))
    for _ in range(3):  # the long way, then the short one
        out.fill_(float("nan"))
        assert isogemm.gemm_batched(pa, pb, out=po) is po
        assert_same(home(out), stacked(a, b))
    for got, want in zip(isogemm.gemm_batched(pa, list(tb)), stacked(a, b), strict=True):
        assert_same(home(got), want)
    with pytest.raises(AliasError):
        isogemm.gemm_batched(pa, pb, out=PointerArray([out.data_ptr()] * 6, (4, 5)))


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_groups_by_the_short_path(given, biased):
    rows, bias = (3, 1, 17, 64), values((20,), seed=9) if biased else None
    for turn in range(3):
        a = [values((m, 48), seed=m + turn) for m in rows]
        b = [values((48, 20), seed=m + 7 * turn) for m in rows]
        out = [there(poisoned((m, 20))) for m in rows] if given else None
        got = isogemm.gemm_grouped(
            [there(x) for x in a], [there(x) for x in b], bias=None if bias is None else there(bias), out=out
        )
        for x, y, z in zip(a, b, got, strict=True):
            assert_same(home(z), product(x, y, bias=bias))


def test_pointers_that_are_refused():
    x, host, pinned = torch.zeros(64, device="cuda"), torch.zeros(64), torch.zeros(64).pin_memory()
    good = x.data_ptr()
    for bad, error, words in (
        (0, LayoutError, "null"),
        (good + 2, LayoutError, "multiple of 4"),
        (host.data_ptr(), DeviceError, "unknown"),
        (pinned.data_ptr(), DeviceError, "host"),
        (0x1230, DeviceError, "unknown"),
    ):
        with pytest.raises(error, match=f"item 1.*{words}"):
            PointerArray([good, bad], (4, 8))
    with pytest.raises(LayoutError, match=r"matrix of item 0.*inside its allocation"):
        PointerArray([good], (2**22, 2**10))


def test_the_blas_view_and_forms():
    a, b = values((3, 4, 7), seed=1), values((3, 7, 5), seed=2)
    ta, tb = there(a), there(b)
    got = blas.describe(ta.mT.contiguous().mT, tb).run()
    assert isinstance(got, torch.Tensor)
    assert_same(home(got), stacked(a, b))
    assert_same(home(blas.describe(ta.flip(0)[:, ::2], tb).run()), stacked(a[::-1, ::2], b))
    assert isinstance(forms.strided(list(ta)), torch.Tensor)
    assert forms.advise(list(ta), [tb[0]] * 3).form == "wide"
    for got, want in zip(forms.advise(list(ta), [tb[0]] * 3).run(), stacked(a, b[0]), strict=True):
        assert isinstance(got, torch.Tensor)
        assert_same(home(got), want)


def test_a_packed_weight():
    x, w = there(values((2, 3, 16), seed=1)).half(), there(values((8, 16), seed=2)).half()
    packed = isogemm.pack(w)
    for _ in range(2):
        assert torch.equal(isogemm.linear(x, packed), isogemm.linear(x, w))
    w.zero_()
    assert float(isogemm.linear(x, packed).abs().max()) == 0
