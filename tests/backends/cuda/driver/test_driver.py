"""The launcher: what reaches the driver, from one thread and from many. A libcuda of Python stands in for the GPU."""

from __future__ import annotations

import contextlib
import struct
import threading
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import replace

import pytest
from tests.backends.cuda.fake import FakeCuda

from isogemm.backends.cuda.driver import facts as device
from isogemm.backends.cuda.driver import libcuda
from isogemm.backends.cuda.driver.facts import Pointer, pointer
from isogemm.backends.cuda.driver.kernel import MAX_DYNAMIC_SHARED, Kernel, load_into
from isogemm.backends.cuda.driver.libcuda import Driver, DriverError, context, relaxed
from isogemm.errors import DeviceError, LimitError


def kernel_of(fake: FakeCuda) -> Kernel:
    return load_into(Driver(fake), b"cubin", "axpy", 0)


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


PARAMS = ["ptr", ("ptr", 1 << 45), "ptr", ("f32", 2.5)]


def test_a_launch_carries_shape_stream_values_and_zero_scratch():
    fake = FakeCuda()
    launch = kernel_of(fake).bind(PARAMS, grid=(7, 2), block=(128,), shared=4096)
    for turn in range(3):
        launch((1 << 46) + turn, 1 << 44, (1 << 63) + turn)
    for turn, (shape, stream, values, attributes, function, extra) in enumerate(fake.launches):
        assert shape == (7, 2, 1, 128, 1, 1, 4096)
        assert stream == (1 << 46) + turn
        expected = [u64(1 << 44), u64(1 << 45), u64((1 << 63) + turn), struct.pack("<f", 2.5), bytes(8), bytes(8)]
        assert values == expected
        assert (attributes, function, extra) == ([], 0x400000001, None)
    assert len(fake.launches) == 3


def test_attributes_are_those_of_the_header():
    fake = FakeCuda(sizes=(8,))
    launch = kernel_of(fake).bind(["ptr"], grid=(4,), block=(64,), cluster=(2,), pdl=True)
    launch(0, 5)
    ids = [struct.unpack("<I4x3I52x", a) for a in fake.launches[0][3]]
    assert ids == [(6, 1, 0, 0), (4, 2, 1, 1)]


def test_maps_and_small_values_are_aligned_and_whole():
    fake = FakeCuda(sizes=(4, 128, 1, 8, 128, 2))
    held, given = bytes(range(128)), bytes(range(128, 256))
    params = ["i32", "map", "i8", "i64", ("map", held), "i16"]
    launch = kernel_of(fake).bind(params, grid=(1,), block=(32,))
    launch(9, -3, given, -2, -(1 << 40), 77)
    i8, i16 = struct.pack("<b", -2), struct.pack("<h", 77)
    assert fake.launches[0][2] == [struct.pack("<i", -3), given, i8, struct.pack("<q", -(1 << 40)), held, i16]


def test_threads_never_share_a_block():
    """Each thread stops inside the driver until all have arrived: a shared block would hold the last one's values."""
    fake = FakeCuda()
    launch = kernel_of(fake).bind(PARAMS, grid=(1,), block=(32,))
    count = 8
    fake.pause = threading.Barrier(count).wait

    def work(index: int) -> None:
        for turn in range(20):
            launch(1000 * index + turn, index, turn)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = sorted((stream, values[0], values[2]) for _, stream, values, *_ in fake.launches)
    expected = sorted((1000 * i + t, u64(i), u64(t)) for i in range(count) for t in range(20))
    assert seen == expected


def test_a_launch_inside_a_launch_keeps_both():
    fake = FakeCuda()
    launch = kernel_of(fake).bind(PARAMS, grid=(1,), block=(32,))

    def nested() -> None:
        fake.pause = None
        launch(2, 20, 21)

    fake.pause = nested
    launch(1, 10, 11)
    assert [(s, v[0], v[2]) for _, s, v, *_ in fake.launches] == [(2, u64(20), u64(21)), (1, u64(10), u64(11))]


def test_a_refused_value_leaves_the_launcher_usable():
    fake = FakeCuda()
    launch = kernel_of(fake).bind(PARAMS, grid=(1,), block=(32,))
    with pytest.raises(struct.error):
        launch(1, -1, 2)
    with pytest.raises(struct.error):
        launch(1, 2)
    launch(1, 2, 3)
    assert [(s, v[0]) for _, s, v, *_ in fake.launches] == [(1, u64(2))]


@pytest.mark.parametrize("device", [0, 1])
def test_a_foreign_context_is_left_as_it_was(device):
    """New threads have none, and a launch may meet another device's."""
    fake = FakeCuda()
    kernel = kernel_of(fake)
    launch = kernel.bind(PARAMS, grid=(1,), block=(32,))
    foreign = fake.contexts[1] if device else 0
    fake.stack()[:] = [foreign]
    launch(1, 2, 3)
    assert len(fake.launches) == 1
    assert fake.stack() == [foreign if device else fake.contexts[0]]


def test_contexts_of_other_devices_come_and_go():
    fake = FakeCuda()
    on = Driver(fake)
    with context(1, on):
        assert fake.stack() == [0, fake.contexts[1]]
    assert fake.stack() == [0]


def test_the_capture_mode_comes_back():
    fake = FakeCuda()
    with contextlib.suppress(KeyError), relaxed(Driver(fake)):
        assert fake.modes == [2]
        raise KeyError
    assert fake.modes == [2, 0]


def test_errors_name_the_result_and_what_was_being_done():
    fake = FakeCuda()
    launch = kernel_of(fake).bind(PARAMS, grid=(1,), block=(32,))
    fake.result = 700
    with pytest.raises(
        DriverError, match=r"launching axpy on device 0.*text of 700.*CUDA_ERROR_ILLEGAL \(700\)"
    ) as error:
        launch(1, 2, 3)
    assert error.value.code == 700
    assert isinstance(error.value, DeviceError)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"shared": 231425}, LimitError, "231424"),
        ({"shared": -1}, LimitError, "dynamic shared memory"),
        ({"block": (1025,)}, LimitError, "1 to 1024 threads"),
        ({"block": (0,)}, LimitError, "1 to 1024 threads"),
        ({"grid": (1, 65536)}, LimitError, "along y"),
        ({"grid": (2**31,)}, LimitError, "along x"),
        ({"params": ["ptr", "ptr", "ptr"]}, DeviceError, "parameters of axpy"),
        ({"params": ["ptr", "ptr", "ptr", "i64"]}, DeviceError, "parameters of axpy"),
        ({"params": [*PARAMS, "ptr", "ptr", "ptr"]}, DeviceError, "parameters of axpy"),
    ],
)
def test_what_cannot_run_is_refused_when_bound(change, error, match):
    kernel = kernel_of(FakeCuda())
    arguments = {"params": PARAMS, "grid": (1,), "block": (32,), **change}
    with pytest.raises(error, match=match):
        kernel.bind(arguments.pop("params"), **arguments)


def test_the_limit_of_shared_memory_is_raised_only_where_needed():
    fake = FakeCuda()
    kernel = kernel_of(fake)
    kernel.bind(PARAMS, grid=(1,), block=(32,), shared=47 * 1024)
    assert fake.attributes == {}
    kernel.bind(PARAMS, grid=(1,), block=(32,), shared=231424)
    assert fake.attributes == {MAX_DYNAMIC_SHARED: 231424}


@pytest.mark.parametrize("static", [0, 144])
@pytest.mark.parametrize("blocks", range(1, 9))
def test_shared_memory_keeps_one_more_block_out(static, blocks):
    """Of 228 KB of an H200's multiprocessor, each block takes what it asks for, its own and 1 KB of the system's."""
    kernel = replace(kernel_of(FakeCuda()), static_shared=static, max_shared=227 * 1024 - static)
    each = kernel.shared_of(blocks) + static + 1024
    assert blocks * each <= 228 * 1024 < (blocks + 1) * each


def test_an_empty_grid_launches_nothing():
    fake = FakeCuda()
    kernel_of(fake).bind(PARAMS, grid=(0,), block=(32,))(1, 2, 3)
    assert fake.launches == []


def test_an_older_driver_that_knows_less_still_launches():
    fake = FakeCuda(cuFuncGetParamInfo=None, cuFuncLoad=None, cuPointerGetAttributes=None)
    kernel = kernel_of(fake)
    assert kernel.parameter_sizes is None
    kernel.bind(PARAMS, grid=(1,), block=(32,))(1, 2, 3)
    assert len(fake.launches) == 1
    with pytest.raises(DeviceError, match="newer driver"):
        pointer(0x7F00, Driver(fake))


def test_the_table_matches_ctypes_widths():
    """Handles and sizes are 64 bits: a plain int without a declared type would lose its upper half."""
    wide = {c_void_p, c_size_t, c_uint64}
    narrow = {c_int, c_uint}
    for name, argtypes in libcuda.SIGNATURES.items():
        for kind in argtypes:
            assert kind in wide | narrow | {c_char_p} or hasattr(kind, "contents"), name


def test_pointers_of_others_are_unknown():
    fake = FakeCuda()
    fake.known[0x7F00] = (2, 1, 0x7000, 4096)
    on = Driver(fake)
    assert pointer(0x7F00, on) == Pointer("device", 1, 0x7000, 4096)
    assert pointer(0, on) == pointer(0x1234, on) == Pointer("unknown", -1, 0, 0)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build", "580.159.04"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("GCC version: 12.3.0", None),
    ],
)
def test_the_kernel_driver_states_its_version(monkeypatch, text, version):
    monkeypatch.setattr(device.Path, "read_text", lambda self: text)
    monkeypatch.setattr(device, "_asked_of_tool", lambda: None)
    assert device.kernel_driver.__wrapped__() == version
