"""Launches on a GPU: kernels from both compilers, in streams, threads, captured graphs and foreign contexts."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
from tests.backends.cuda import samples

from isogemm.backends.cuda.driver import facts as device
from isogemm.backends.cuda.driver import kernel as driver
from isogemm.backends.cuda.driver import nvrtc, triton_build
from isogemm.backends.cuda.driver.libcuda import DriverError
from isogemm.backends.cuda.driver.tensormap import encoder
from isogemm.backends.cuda.driver.workspace import workspace
from isogemm.errors import DeviceError, LimitError

pytestmark = pytest.mark.gpu

N = 100_003
PARAMS = ["ptr", "ptr", "f32", ("i32", N)]


@pytest.fixture(scope="module")
def torch():
    import torch

    torch.cuda.init()
    return torch


def cuda_kernel(text: str, name: str) -> driver.Kernel:
    return driver.load(nvrtc.compile_text(text, name=f"{name}.cu", arch=device.device(0).arch), name, 0)


@pytest.fixture(scope="module")
def axpy(torch):
    return cuda_kernel(samples.AXPY, "axpy")


def bits(x):
    return x.cpu().numpy().view(np.uint32)


def expected(x, y, a):
    """Two roundings, as the kernel is written."""
    with np.errstate(invalid="ignore"):
        return (np.float32(a) * x.cpu().numpy() + y.cpu().numpy()).view(np.uint32)


def operands(torch, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return [torch.randn(N, device="cuda", generator=generator) for _ in range(2)]


@pytest.mark.parametrize("pdl", [False, True])
def test_a_kernel_of_nvrtc(torch, axpy, pdl):
    x, y = operands(torch)
    want = expected(x, y, -1.5)
    launch = axpy.bind(PARAMS, grid=(-(-N // 256),), block=(256,), pdl=pdl)
    launch(device.current_stream(0), x.data_ptr(), y.data_ptr(), -1.5)
    np.testing.assert_array_equal(bits(y), want)
    assert axpy.parameter_sizes in (None, (8, 8, 4, 4))


def test_dependent_launches_keep_their_order(torch, axpy):
    """Each waits for the one before it, so 50 of them add up as one after the other does."""
    x, y = torch.ones(N, device="cuda"), torch.zeros(N, device="cuda")
    launch = axpy.bind(PARAMS, grid=(-(-N // 256),), block=(256,), pdl=True)
    for _ in range(50):
        launch(device.current_stream(0), x.data_ptr(), y.data_ptr(), 1.0)
    assert torch.equal(y, torch.full_like(y, 50))


def test_blocks_of_a_cluster_know_their_rank(torch):
    out = torch.full((8,), -1, dtype=torch.int32, device="cuda")
    kernel = cuda_kernel(samples.CLUSTER, "rank")
    kernel.bind(["ptr"], grid=(8,), block=(32,), cluster=(4,))(device.current_stream(0), out.data_ptr())
    assert out.tolist() == [400, 401, 402, 403] * 2


@pytest.mark.parametrize("fixed", [False, True])
def test_a_tile_arrives_through_a_tensor_map(torch, fixed):
    """Rows 36 to 43 of 40, columns 8 to 71 of 72: what lies outside is zero."""
    x = torch.randn(40, 80, device="cuda").bfloat16()[:, :72]
    out = torch.full((8, 64), float("nan"), dtype=torch.bfloat16, device="cuda")
    encode = encoder("bfloat16", sizes=x.shape, strides=x.stride(), box=(8, 64), swizzle=0)
    kernel = cuda_kernel(samples.TILE, "tile")
    kind = ("map", encode(x.data_ptr())) if fixed else "map"
    launch = kernel.bind([kind, "ptr", "i32", "i32"], grid=(1,), block=(64,), shared=1024)
    launch(device.current_stream(0), *([] if fixed else [encode(x.data_ptr())]), out.data_ptr(), 36, 8)
    want = torch.zeros_like(out)
    want[:4] = x[36:40, 8:]
    assert torch.equal(out.view(torch.int16), want.view(torch.int16))


ADD = {"x": "*fp32", "out": "*fp32", "n": "i32", "value": "fp32"}


@pytest.mark.parametrize("pdl", [False, True])
def test_a_kernel_of_triton(torch, pdl):
    pytest.importorskip("triton")
    x, out = torch.randn(1000, device="cuda"), torch.full((1000,), float("nan"), device="cuda")
    built = triton_build.build(samples.add, ADD, {"BLOCK": 256}, launch_pdl=pdl)
    built.bind(0, (4,), {"n": 1000})(device.current_stream(0), x.data_ptr(), out.data_ptr(), 0.25)
    assert torch.equal(out, x + 0.25)


def test_a_kernel_of_triton_that_needs_scratch(torch):
    pytest.importorskip("triton")
    n, k, tall = 60, 192, 16
    x = torch.randn(n, k, device="cuda").bfloat16()
    out = torch.full((64, 64), float("nan"), dtype=torch.bfloat16, device="cuda")
    types = {"x": "*bf16", "out": "*bf16", "n": "i32", "k": "i32"}
    built = triton_build.build(samples.rows, types, {"ROWS": tall}, aligned=("x", "k"))
    assert built.scratch
    scratch = workspace(4 * built.scratch, 0)
    launch = built.bind(0, (4,), {"n": n, "k": k})
    launch(device.current_stream(0), x.data_ptr(), out.data_ptr(), scratch.data_ptr())
    want = torch.zeros_like(out)
    want[:n] = x[:, :64]
    assert torch.equal(out.view(torch.int16), want.view(torch.int16))


def test_a_captured_graph_replays_kernels_loaded_during_its_capture(torch):
    """Compiled, loaded and given scratch memory while the stream is captured; the graph then follows its inputs."""
    x, y = operands(torch)
    text = samples.AXPY.replace("axpy(", "captured(")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert device.is_capturing()
        kernel = cuda_kernel(text, "captured")
        memory = workspace(4 * N, 0)
        launch = kernel.bind(PARAMS, grid=(-(-N // 256),), block=(256,), pdl=True, shared=100_000)
        stream = device.current_stream(0)
        launch(stream, x.data_ptr(), y.data_ptr(), 2.0)
        launch(stream, x.data_ptr(), y.data_ptr(), -0.5)
        del memory
    assert not device.is_capturing()
    for turn in range(3):
        x.normal_()
        y.normal_()
        first = torch.from_numpy(expected(x, y, 2.0).view(np.float32))
        graph.replay()
        np.testing.assert_array_equal(bits(y), expected(x, first, -0.5), err_msg=f"replay {turn}")


def test_a_side_stream_is_the_one_that_runs(torch, axpy):
    x, y = operands(torch)
    want = expected(x, y, 3.0)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    launch = axpy.bind(PARAMS, grid=(-(-N // 256),), block=(256,))
    with torch.cuda.stream(side):
        assert device.current_stream(0) == side.cuda_stream != 0
        torch.cuda._sleep(20_000_000)
        launch(device.current_stream(0), x.data_ptr(), y.data_ptr(), 3.0)
        ended = torch.cuda.Event()
        ended.record()
    assert not ended.query()  # behind the sleep
    torch.cuda.current_stream().wait_stream(side)
    np.testing.assert_array_equal(bits(y), want)


def test_threads_launch_at_once(torch, axpy):
    """Each has tensors and a stream of its own, and no context before its first launch."""
    launch = axpy.bind(PARAMS, grid=(-(-N // 256),), block=(256,))
    xs = [torch.full((N,), float(i + 1), device="cuda") for i in range(4)]
    ys = [torch.zeros(N, device="cuda") for _ in range(4)]
    streams = [torch.cuda.Stream().cuda_stream for _ in range(4)]
    torch.cuda.synchronize()
    failed: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(1000):
                launch(streams[i], xs[i].data_ptr(), ys[i].data_ptr(), 1.0)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not failed
    for i, y in enumerate(ys):
        assert torch.equal(y, torch.full_like(y, 1000.0 * (i + 1)))


def test_another_devices_context_may_be_current(torch):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    cubin = nvrtc.compile_text(samples.AXPY, name="axpy.cu", arch=device.device(1).arch)
    launch = driver.load(cubin, "axpy", 1).bind(PARAMS, grid=(-(-N // 256),), block=(256,))
    x, y = torch.ones(N, device="cuda:1"), torch.zeros(N, device="cuda:1")
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0
    for stream in (0, torch.cuda.Stream(1).cuda_stream):
        launch(stream, x.data_ptr(), y.data_ptr(), 1.0)
        torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0
    assert torch.equal(y, torch.full_like(y, 2))
    assert device.pointer(y.data_ptr()).ordinal == 1


def test_what_the_device_cannot_take_is_refused_before_the_launch(torch, axpy):
    most = device.device(0).max_shared
    axpy.bind(PARAMS, grid=(1,), block=(32,), shared=most)
    with pytest.raises(LimitError, match=f"0 to {most} bytes"):
        axpy.bind(PARAMS, grid=(1,), block=(32,), shared=most + 1)
    with pytest.raises(DeviceError, match="parameters of axpy"):
        axpy.bind(["ptr", "ptr", "f32", "i64"], grid=(1,), block=(32,))


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 8])
def test_shared_memory_keeps_another_block_out(axpy, blocks):
    library, shared, found = driver.driver().library, axpy.shared_of(blocks), ctypes.c_int()
    axpy.bind(PARAMS, grid=(1,), block=(32,), shared=shared)  # allows so much
    library.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(found), ctypes.c_void_p(axpy.function), 32, ctypes.c_size_t(shared)
    )
    assert found.value == blocks


def test_the_drivers_own_errors_have_its_words(torch, axpy):
    launch = axpy.bind(PARAMS, grid=(3,), block=(32,), cluster=(2,))  # three blocks do not make clusters of two
    x, y = operands(torch)
    with pytest.raises(DriverError, match=r"launching axpy on device 0.*CUDA_ERROR_INVALID"):
        launch(0, x.data_ptr(), y.data_ptr(), 1.0)
    with pytest.raises(DriverError, match="loading kernel nothing"):
        driver.load(nvrtc.compile_text(samples.AXPY, name="axpy.cu", arch=device.device(0).arch), "nothing", 0)
    with pytest.raises(DriverError, match="CUDA_ERROR_"):
        driver.load(b"not a cubin" * 10, "nothing", 0)
    torch.cuda.synchronize()


def test_addresses_are_told_apart(torch):
    x = torch.empty(1000, device="cuda")
    found = device.pointer(x.data_ptr() + 40)
    assert (found.kind, found.ordinal) == ("device", 0)
    assert found.start <= x.data_ptr() < found.start + found.nbytes
    assert device.pointer(0).kind == "unknown"
    assert device.pointer(np.zeros(10).ctypes.data).kind == "unknown"
    assert device.pointer(torch.empty(10).pin_memory().data_ptr()).kind == "host"


def test_the_stamp_says_what_could_change_bits(torch):
    stamp = device.stamp(0)
    assert stamp["device"] == torch.cuda.get_device_name(0)
    assert stamp["capability"] == "{}.{}".format(*torch.cuda.get_device_capability(0))
    assert stamp["multiprocessors"] == torch.cuda.get_device_properties(0).multi_processor_count
    assert stamp["torch"] == torch.__version__
    assert stamp["driver"]
    assert all(isinstance(value, str | int) for key, value in stamp.items() if key not in ("nvrtc", "cublaslt"))
