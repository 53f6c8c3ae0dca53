"""Operands from other libraries, viewed where they lie; results as the caller's kind."""

from __future__ import annotations

import array as arrays
import ctypes
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest
from tests.formats.test_blocks import same
from tests.process import python
from tests.products import BF16, DTYPES, F16, F32, assert_same, product, values

import isogemm
from isogemm.errors import DeviceError, DTypeError, LayoutError, OptionError
from isogemm.operands import dlpack, memory, views


def tensor(x: np.ndarray):
    torch = pytest.importorskip("torch")
    if x.dtype == BF16:
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)


class Producer:
    """A DLPack producer around a tensor, without the methods that only torch has."""

    def __init__(self, x, *, old: bool = False, device: tuple[int, int] = (1, 0)) -> None:
        self.x, self.old, self.device = x, old, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if self.old and options:
            raise TypeError("__dlpack__() takes no keyword arguments")
        return self.x.__dlpack__(**options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("view", [np.s_[:], np.s_[2:, 1::2], np.s_[:, :0], np.s_[3]])
def test_dlpack_is_a_view_with_the_same_bits(dtype, old, view):
    x = values((6, 8), dtype, seed=1)
    got = views.array("x", Producer(tensor(x)[view], old=old))
    want = x[view]
    assert_same(got, np.ascontiguousarray(want))
    if want.size:
        assert np.shares_memory(got, x)
        assert got.strides == want.strides


class Foreign(Producer):
    """An array of a library that takes results through DLPack, but no bfloat16."""

    dtype = "float32"

    def __array_namespace__(self):
        return Namespace

    @property
    def taken(self):
        return np.asarray(self.x)


class Namespace:
    @staticmethod
    def from_dlpack(x):
        return Foreign(np.from_dlpack(x))


def test_results_are_arrays_of_the_operands_library_where_it_takes_them():
    a, b = values((3, 4), "float32", seed=1), values((4, 5), "float32", seed=2)
    for operands in ((Foreign(a), Foreign(b)), (a, Foreign(b))):
        got = isogemm.matmul(*operands)
        assert type(got) is Foreign
        assert_same(got.taken, isogemm.matmul(a, b))
    (item,) = isogemm.gemm_batched([Foreign(a)], [Foreign(b)])
    assert_same(item.taken, isogemm.matmul(a, b))
    short = [Foreign(tensor(x.astype(BF16))) for x in (a, b)]
    assert type(isogemm.matmul(*short)) is np.ndarray


def test_float64_and_lists_are_cast_where_that_is_asked_for():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((3, 7)), rng.standard_normal((7, 2))
    want = isogemm.matmul(a.astype(np.float32), b.astype(np.float32))
    for one, other in ((a, b), (a.tolist(), b.tolist()), (a.astype(np.float32), b)):
        assert_same(isogemm.matmul(one, other, cast="float32"), want)
    assert_same(isogemm.linear(a, b.T, b[:2, 0], cast="float32"), isogemm.linear(
        a.astype(np.float32), np.ascontiguousarray(b.T.astype(np.float32)), b[:2, 0].astype(np.float32)))  # fmt: skip
    got = isogemm.matmul(torch.from_numpy(a), torch.from_numpy(b), cast="float32")
    assert isinstance(got, torch.Tensor)
    assert_same(got.numpy(), want)
    assert isogemm.matmul([[2**70]], [[1]], cast="float32") == 2.0**70
    assert isogemm.matmul([np.ones(1, BF16)], [[True]], cast="float32") == 1
    half = a.astype(np.float16)
    assert isogemm.matmul(half, b.astype(np.float16), cast="float32").dtype == np.float16


def test_what_is_cast_keeps_subnormals():
    torch = pytest.importorskip("torch")
    a, b = np.full((2, 3), 1e-40), np.ones((3, 2))
    want = isogemm.matmul(a.astype(np.float32), b.astype(np.float32))
    assert want.all()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        found = [isogemm.matmul(x, b, cast="float32") for x in (a, a.tolist())]
        found.append(isogemm.matmul(torch.from_numpy(a), torch.from_numpy(b), cast="float32").numpy())
        found.append(isogemm.matmul(torch.from_numpy(a.T.copy()).T, torch.from_numpy(b), cast="float32").numpy())
    finally:
        torch.set_flush_denormal(False)
    for got in found:
        assert_same(got, want)


@pytest.mark.parametrize(
    ("a", "cast", "error", "said"),
    [
        ([[1.0], [2.0, 3.0]], "float32", DTypeError, "numbers in rows of one length"),
        ([["one"]], "float32", DTypeError, "numbers in rows of one length"),
        ([["1.5"]], "float32", DTypeError, "numbers in rows of one length"),
        ([[None]], "float32", DTypeError, "numbers in rows of one length"),
        ([[1j]], "float32", DTypeError, "numbers in rows of one length"),
        (np.ones((1, 1)), "float16", OptionError, "float32"),
        (np.ones((1, 1)), np.ones(2), OptionError, "float32"),
        (np.ones((1, 1)), None, DTypeError, 'cast="float32"'),
        ([[1.0]], None, DTypeError, "copied silently"),
    ],
)
def test_what_cannot_be_cast_is_refused(a, cast, error, said):
    with pytest.raises(error, match=said):
        isogemm.matmul(a, np.ones((1, 1), np.float32), cast=cast)


def test_a_square_transposed_view_of_a_tensor_is_no_other_matrix():
    torch = pytest.importorskip("torch")
    x = torch.arange(4.0).reshape(2, 2).t()
    for here in (memory.view(x, F32), memory.view(x, F32).T):
        np.testing.assert_array_equal(memory.tensor_of(here).numpy(), here)


def test_dlpack_memory_lives_as_long_as_its_view():
    torch = pytest.importorskip("torch")
    x = torch.arange(1000, dtype=torch.float32).bfloat16()
    want = x.view(torch.uint16).numpy().copy()
    storage = weakref.ref(x.untyped_storage())
    producer = Producer(x)
    got = views.array("x", producer)[10:20]
    del x, producer
    junk = [torch.zeros(1000, dtype=torch.bfloat16) for _ in range(50)]  # would reuse the memory
    np.testing.assert_array_equal(got.view(np.uint16), want[10:20])
    del got, junk
    assert storage() is None


def test_dlpack_keeps_read_only():
    x = values((3, 4))
    x.flags.writeable = False
    got = views.array("x", Producer(x))
    assert np.shares_memory(got, x)
    assert not got.flags.writeable
    with pytest.raises(LayoutError, match="read-only"):
        isogemm.matmul(values((3, 4)), values((4, 4)), out=Producer(x))


def test_dlpack_refusals():
    with pytest.raises(DeviceError, match=r"\(2, 0\).*nearest"):
        isogemm.matmul(Producer(values((2, 2)), device=(2, 0)), values((2, 2)))
    with pytest.raises(DTypeError, match="code 2 with 64 bits"):
        views.array("x", Producer(np.ones(3)))

    class Broken(Producer):
        def __dlpack__(self, **options):
            raise RuntimeError("cannot export")

    with pytest.raises(LayoutError, match="cannot export"):
        views.array("x", Broken(values((2, 2))))


class Handmade:
    """A versioned capsule written field by field: a byte offset, and no strides."""

    def __init__(self, x: np.ndarray, byte_offset: int, major: int = 1) -> None:
        self.shape = (ctypes.c_int64 * 2)(2, 3)
        self.struct = dlpack._Versioned(major=major)
        tensor = self.struct.tensor
        tensor.data, tensor.byte_offset, tensor.ndim = x.ctypes.data, byte_offset, 2
        tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = 2, 32, 1
        tensor.shape = self.shape

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **_):
        new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
            ("PyCapsule_New", ctypes.pythonapi)
        )
        return new(ctypes.addressof(self.struct), b"dltensor_versioned", None)


def test_dlpack_fields_that_few_producers_use():
    x = values((10,), seed=1)
    assert_same(views.array("x", Handmade(x, 8)), x[2:8].reshape(2, 3))
    with pytest.raises(LayoutError, match=r"version 2\.0"):
        views.array("x", Handmade(x, 8, major=2))


class Interface:
    def __init__(self, x):
        self.x, self.__array_interface__ = x, x.__array_interface__


class Dunder:
    def __init__(self, x):
        self.x = x

    def __array__(self, dtype=None, copy=None):
        return self.x.copy() if copy else self.x


@pytest.mark.parametrize("wrap", [memoryview, Interface, Dunder, lambda x: x.view(np.matrix)])
def test_protocols_are_views(wrap, recwarn):
    x = values((3, 4))
    recwarn.clear()
    got = views.array("x", wrap(x))
    assert type(got) is np.ndarray
    assert_same(got, x)
    assert np.shares_memory(got, x)


def test_the_buffer_protocol():
    x, w = arrays.array("f", [1, 2, 3]), values((4, 3))
    got = isogemm.matmul(x, w.T)
    assert_same(got, product(np.array([[1, 2, 3]], F32), w.T)[0])


class Copies:
    def __array__(self, dtype=None, copy=None):
        if copy is False:
            raise ValueError("needs a copy")
        return np.ones((2, 2), F32)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ([[1.0]], DTypeError),
        ((1.0,), DTypeError),
        (1.0, DTypeError),
        (np.float32(1), DTypeError),
        (None, DTypeError),
        ("text", DTypeError),
        (object(), (DTypeError, LayoutError)),
        (np.ma.masked_array(np.ones((2, 2), F32), mask=np.eye(2)), DTypeError),
        (Copies(), LayoutError),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_is_no_array_is_refused(bad, error):
    with pytest.raises(error, match=r"limit: .*; got: .*; nearest"):
        isogemm.matmul(bad, values((2, 2)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_in_torch_out(dtype):
    torch = pytest.importorskip("torch")
    x, w, bias = values((2, 3, 40), dtype, seed=1), values((5, 40), dtype, seed=2), values((5,), dtype, seed=3)
    want = product(x.reshape(6, 40), w.T, bias=bias).reshape(2, 3, 5)
    got = isogemm.linear(tensor(x), tensor(w), tensor(bias))
    assert isinstance(got, torch.Tensor)
    assert got.dtype == tensor(x).dtype
    assert_same(views.array("got", got), want)
    assert_same(
        views.array("got", isogemm.matmul(tensor(x), tensor(w).T)), product(x.reshape(6, 40), w.T).reshape(2, 3, 5)
    )
    for form in (isogemm.gemm_batched, isogemm.gemm_grouped):
        pair = form([tensor(x[0]), tensor(x[1])], [tensor(w)] * 2, trans_b="T")
        assert all(isinstance(y, torch.Tensor) for y in pair)
        assert_same(views.array("y", pair[1]), product(x[1], w.T))
    scalar = isogemm.matmul(tensor(x[0, 0]), tensor(w[0]))
    assert isinstance(scalar, torch.Tensor)
    assert scalar.shape == ()


def test_a_thread_that_allocates_first_shows_others_no_half_of_what_it_learns(monkeypatch):
    torch, seen = pytest.importorskip("torch"), []

    class Watched:
        def __getattr__(self, name):
            seen.append(len(memory._KINDS))
            return getattr(torch, name)

    monkeypatch.setattr(memory, "_KINDS", {})
    monkeypatch.setattr(memory, "_strided", memory._strided)
    monkeypatch.setitem(sys.modules, "torch", Watched())
    memory._learn()
    assert not any(seen)
    assert len(memory._KINDS) == 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_as_out(dtype):
    torch = pytest.importorskip("torch")
    a, b = values((4, 20), dtype, seed=1), values((20, 3), dtype, seed=2)
    out = torch.full((8, 6), float("nan"), dtype=tensor(a).dtype)[::2, ::2]
    assert isogemm.matmul(a, tensor(b), out=out) is out
    assert_same(views.array("out", out).copy(), product(a, b))
    with pytest.raises(isogemm.errors.AliasError):
        isogemm.matmul(a, b, out=torch.zeros(1, 3, dtype=out.dtype).expand(4, 3))


def test_what_is_written_to_a_tensor_is_no_more_what_autograd_saved():
    """Gradients of older numbers would be those of newer ones."""
    torch = pytest.importorskip("torch")
    a, q = torch.ones(2, 32), isogemm.quantize(np.ones((2, 32), np.float32), "Q8_0")
    writes = (
        lambda out: isogemm.matmul(a, a.T, out=out),
        lambda out: isogemm.matmul(a, a.T, out=out, accumulate=True),  # by the short path
        lambda out: isogemm.gemm(a, a.T, out, beta=1.0, out=out),
        lambda out: isogemm.linear(a, q, out=out),
        lambda out: isogemm.gemm_batched([a], [a.T], out=[out]),
    )
    for write in writes:
        saved, x = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
        y = (saved * x).sum()
        write(saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
    with torch.inference_mode():
        isogemm.matmul(a, a.T, out=torch.ones(2, 2))


def test_results_share_no_hidden_copy():
    torch = pytest.importorskip("torch")
    got = isogemm.matmul(torch.ones(3, 4), torch.ones(4, 2))
    got[0, 0] = 7
    assert views.array("got", got)[0, 0] == 7
    assert type(isogemm.matmul(np.ones((3, 4), F32), np.ones((4, 2), F32))) is np.ndarray


def test_out_dtype_by_any_name():
    torch = pytest.importorskip("torch")
    a, b = values((3, 8)), values((8, 2))
    for name in ("bfloat16", torch.bfloat16, ml_dtypes.bfloat16, BF16):
        assert isogemm.matmul(a, b, out_dtype=name).dtype == BF16
    for name in (torch.float16, "float16", np.float16, F16):
        assert isogemm.matmul(a, b, out_dtype=name).dtype == F16


def test_tensors_that_are_refused():
    torch = pytest.importorskip("torch")
    b = torch.ones(3, 2)
    grad = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(OptionError, match=r"requires_grad.*detach\(\)"):
        isogemm.matmul(grad, b)
    with pytest.raises(OptionError, match=r"isogemm\.torch\.linear, which records gradients"):
        isogemm.linear(torch.ones(4, 3), grad)
    with torch.no_grad():
        assert isogemm.matmul(grad, b).shape == (2, 2)
    with pytest.raises(DTypeError, match=r"torch\.float64.*torch\.float32"):
        isogemm.matmul(torch.ones(2, 3, dtype=torch.float64), b)
    with pytest.raises(DeviceError, match=r"meta.*\.cpu\(\)"):
        isogemm.matmul(torch.ones(2, 3, device="meta"), b)
    with pytest.raises(LayoutError, match="to_dense"):
        isogemm.matmul(torch.ones(2, 3).to_sparse(), b)


def test_arrays_never_import_torch():
    code = (
        "import sys, array, numpy as np, isogemm\n"
        "a = np.ones((2, 2), np.float32)\n"
        "isogemm.matmul(a, memoryview(a)); isogemm.linear(a, a); isogemm.gemm_batched([a], [a])\n"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'torch']\n"
    )
    python("-c", code)


def test_arrays_are_multiplied_while_another_thread_imports_torch():
    """Which has none of its names until then."""
    code = (
        "import sys, types, numpy as np\n"
        "import isogemm\n"
        "sys.modules['torch'] = types.ModuleType('torch')\n"
        "a = np.ones((2, 2), np.float32)\n"
        "isogemm.matmul(a, a, contract='fma/leaf8', out_dtype='bfloat16'); isogemm.gemm_batched([a], [a])\n"
    )
    python("-c", code)


@pytest.mark.parametrize("view", [np.s_[:], np.s_[2:, ::-1], np.s_[:, :0], np.s_[::2]])
@pytest.mark.parametrize("old", [False, True])
def test_dlpack_has_the_integers_of_exact_products(view, old):
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-128, 128, (6, 6), np.int8) for _ in range(2))
    a, b = a[view], b[: a[view].shape[1]]
    want, out = isogemm.matmul(a, b), np.zeros((len(a), 6), np.int32)
    for x in (a, Producer(a, old=old)):
        for y in (b, Producer(b, old=old)):
            same(isogemm.matmul(x, y), want)
            isogemm.matmul(x, y, out=Producer(out, old=old))
            same(out, want)
            out[...] = 0
    with pytest.raises(DTypeError, match=r"int8 and float32"):
        isogemm.matmul(Producer(a, old=old), b.astype(F32))
