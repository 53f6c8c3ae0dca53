"""Streams, graphs and threads: products that overlap, follow each other closely or are replayed keep their bits."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.backends.cuda.device import BF16, Mode, draw, modes, same, torch

import isogemm
from isogemm.backends.cuda.gemm.choose import FAMILIES, chooser
from isogemm.contract.spec import Contract
from isogemm.errors import DeviceError
from isogemm.problem.product import Addresses, Launch, Product, Strides, alignment

pytestmark = pytest.mark.gpu

SIZES = ((1, 2560, 4096), (16, 1024, 2560), (100, 251, 333), (1000, 1024, 1024))


def captured(call: Callable[[], Any]) -> tuple[Any, Any]:
    """A graph of one call, and the tensor that each replay writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            out = call()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, out


@modes
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_replays_see_new_inputs(size: tuple[int, int, int], mode: Mode) -> None:
    m, n, k = size
    x, w = draw((m, k), mode.dtype, 1), draw((n, k), mode.dtype, 2)
    graph, y = captured(lambda: isogemm.linear(x, w, **mode.options))
    for seed in range(3, 8):
        x.copy_(draw((m, k), mode.dtype, seed, special=True))
        w.copy_(draw((n, k), mode.dtype, seed + 50))
        graph.replay()
        want = isogemm.linear(x.clone(), w.clone(), **mode.options)
        same(y, want, f"{mode} {size}")


@modes
def test_every_form_can_be_captured(mode: Mode) -> None:
    a, b = draw((5, 33, 72), mode.dtype, 1), draw((5, 72, 40), mode.dtype, 2)
    c, o = draw((5, 33, 40), "float32", 3), mode.options
    calls = {
        "stack": lambda: isogemm.matmul(a, b, **o),
        "list": lambda: torch.stack(isogemm.gemm_batched(list(a), list(b), **o)),
        "grouped": lambda: torch.stack(isogemm.gemm_grouped(list(a), list(b), **o)),
        "epilogue": lambda: isogemm.gemm(a[0], b[0], c[0], alpha=1.5, beta=0.5, out_dtype=torch.float32, **o),
        "accumulate": lambda: isogemm.matmul(a[0], b[0], out=c[1].clone(), accumulate=True, **o),
        "tree": lambda: isogemm.matmul(a[0], b[0], **mode.ordered("tree4").options),
        "leaves": lambda: isogemm.matmul(a[0], b[0], **mode.ordered("leaf32").options),
        "nothing to sum": lambda: isogemm.matmul(a[0, :, :0], b[0, :0], **o),
    }
    for name, call in calls.items():
        want = call()
        graph, got = captured(call)
        got.fill_(float("nan"))
        graph.replay()
        same(got, want, f"{mode} {name}")


def network(x: Any, weights: list[Any], between: bool, wait: bool) -> list[Any]:
    """Products that feed each other, closely; `between` puts small kernels of others among them."""
    outputs = []
    for i, w in enumerate(weights):
        x = isogemm.linear(x, w)
        if between and i % 3 == 0:
            x = x * 0.5
        if wait:
            torch.cuda.synchronize()
        outputs.append(x)
    return outputs


def deep(dtype: str) -> list[Any]:
    """Weights whose products keep their size, one layer feeding the next."""
    widths = [1024, 512, 1024, 2048, 1024, 4096, 512, 1024] * 4
    pairs = zip(widths[1:], widths, strict=False)
    return [draw((n, k), dtype, i) / k**0.5 for i, (n, k) in enumerate(pairs)]


@pytest.mark.parametrize("between", [False, True], ids=["back to back", "spaced"])
@pytest.mark.parametrize("m", [1, 8, 16, 64, 300])
def test_a_kernel_never_reads_what_its_predecessor_still_writes(m: int, between: bool) -> None:
    """Dependent launches begin before the kernel in front of them ends: only weights may be touched until then."""
    weights, x = deep(BF16.dtype), draw((m, 1024), BF16.dtype, 99)
    want = network(x, weights, between, wait=True)
    for _ in range(10):
        for got, expected in zip(network(x, weights, between, wait=False), want, strict=True):
            same(got, expected, f"m={m}")
    graph, got = captured(lambda: torch.cat([y.reshape(-1) for y in network(x, weights, between, wait=False)]))
    for _ in range(10):
        graph.replay()
        same(got, torch.cat([y.reshape(-1) for y in want]), f"m={m}, graph")


@pytest.mark.parametrize("m", [1, 16, 64])
def test_weights_written_just_before(m: int) -> None:
    """Weights that the kernel in front has just rewritten are read as they are now, though they were prefetched."""
    x, w = draw((m, 2560), BF16.dtype, 1), draw((1024, 2560), BF16.dtype, 2)
    versions = [draw((1024, 2560), BF16.dtype, seed) for seed in range(10, 14)]
    want = [isogemm.linear(x, v) for v in versions]
    torch.cuda.synchronize()

    def rounds() -> list[Any]:
        found = []
        for v in versions:
            w.copy_(v)
            found.append(isogemm.linear(x, w))
        return found

    for _ in range(20):
        for got, expected in zip(rounds(), want, strict=True):
            same(got, expected)
    graph, got = captured(lambda: torch.cat(rounds()))
    for _ in range(10):
        graph.replay()
        same(got, torch.cat(want))


@modes
def test_two_streams_at_once(mode: Mode) -> None:
    """Products of two streams, interleaved many times: memory of one call is never another's."""
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    jobs = []
    for i, (m, n, k) in enumerate(((1, 2560, 4096), (100, 251, 333), (64, 1024, 2560), (300, 512, 1024))):
        x, w = draw((m, k), mode.dtype, i), draw((n, k), mode.dtype, i + 10)
        tree = mode.ordered("tree8").options
        jobs += [(x, w, mode.options), (x, w, tree)]
    want = [isogemm.linear(x, w, **o) for x, w, o in jobs]
    torch.cuda.synchronize()
    results: list[tuple[Any, Any]] = []
    for r in range(40):
        for s, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                i = (3 * r + 5 * s) % len(jobs)
                x, w, options = jobs[i]
                results.append((isogemm.linear(x, w, **options), want[i]))
    torch.cuda.synchronize()
    for got, expected in results:
        same(got, expected, mode)


def beside_others(call: Callable[[], Any], want: Any, rounds: int) -> int:
    """Results that differ, of calls on four streams at once, with other work between some of them."""
    streams, other, differing = [torch.cuda.Stream() for _ in range(4)], torch.ones((256, 2048), device="cuda"), 0
    for _ in range(rounds):
        got = []
        for i in range(32):
            with torch.cuda.stream(streams[i % 4]):
                got.append(call())
                if i % 3 == 0:
                    (other * 2).sum()
        torch.cuda.synchronize()
        differing += sum(not torch.equal(x, want) for x in got)
    return differing


@pytest.mark.parametrize(("m", "n", "k"), [(976, 512, 8192), (141, 4096, 4096), (97, 1000, 2049)], ids=str)
def test_float32_kernels_beside_others(m: int, n: int, k: int) -> None:
    """Loads from shared memory wait behind others' traffic; buffers are not filled again before they are done."""
    family, x, w = FAMILIES.found["sgemm"], draw((m, k), "float32", 1), draw((n, k), "float32", 2)
    align = alignment(x.data_ptr(), w.data_ptr(), most=128)
    product = Product(
        m, n, k, "float32", "float32", "float32", Contract.parse("fma/chain"), Strides(k, 1), Strides(1, k),
        Strides(n, 1), align=align,
    )  # fmt: skip
    want = isogemm.linear(x, w)
    torch.cuda.synchronize()
    for config in family.configs(product)[:16]:
        launch = family.bind(product, config, 0)

        def call(launch: Launch = launch) -> Any:
            y = torch.full((m, n), float("nan"), device="cuda")
            at = Addresses(x.data_ptr(), w.data_ptr(), y.data_ptr())
            launch(at, torch.cuda.current_stream().cuda_stream)
            return y

        assert beside_others(call, want, 6) == 0, config


@pytest.mark.parametrize("activations", ["same", "q8"])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K"])
def test_quantized_products_beside_others(name: str, activations: str) -> None:
    w = isogemm.quantize(np.random.default_rng(1).standard_normal((1536, 4096), np.float32), name).to("cuda")
    for m in (3, 40, 100, 300):
        x = draw((m, 4096), BF16.dtype, m)
        want = isogemm.linear(x, w, activations=activations)
        call = functools.partial(isogemm.linear, x, w, activations=activations)
        assert beside_others(call, want, 6) == 0, m


def test_graphs_replayed_on_two_streams_at_once() -> None:
    x, w = draw((16, 4096), BF16.dtype, 1), draw((1024, 4096), BF16.dtype, 2)
    options = BF16.ordered("tree8").options
    want = isogemm.linear(x, w), isogemm.linear(x, w, **options)
    graphs = [captured(lambda o=o: isogemm.linear(x, w, **o)) for o in ({}, options)]
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (_, got), expected in zip(graphs, want, strict=True):
        same(got, expected)


def test_threads() -> None:
    """Threads with streams of their own call at once; each first call of a shape is some thread's."""
    sizes = [(m, 320 + 8 * i, 512 + 8 * i) for i, m in enumerate((1, 3, 16, 33, 100, 257))]
    data = [(draw((m, k), BF16.dtype, m), draw((n, k), BF16.dtype, n)) for m, n, k in sizes]
    results: dict[int, list[Any]] = {}
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                results[number] = [
                    isogemm.linear(*data[(i + number) % len(data)]) for _ in range(10) for i in range(len(data))
                ]
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    want = [isogemm.linear(x, w) for x, w in data]
    for number, found in results.items():
        for i, got in enumerate(found):
            same(got, want[(i + number) % len(data)], f"thread {number}")


def test_a_first_call_under_capture() -> None:
    """It captures, with the right bits, or says that it has to be called once before: never wrong bits."""
    x, w = draw((7, 392), BF16.dtype, 1), draw((184, 392), BF16.dtype, 2)
    stream, graph, got, refused = torch.cuda.Stream(), torch.cuda.CUDAGraph(), None, ""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device="cuda")  # torch warns of graphs with nothing in them
        try:
            got = isogemm.gemm(x, w, trans_b="T", alpha=0.37)
        except DeviceError as error:
            refused = str(error)
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    want = isogemm.gemm(x, w, trans_b="T", alpha=0.37)
    if got is None:
        assert "capture" in refused
    else:
        graph.replay()
        same(got, want)


def test_choices_do_not_change_bits() -> None:
    """A chooser made anew, with no memory of this process, gives the same bits."""
    from isogemm.backends.cuda.device import reload

    x, w = draw((33, 1024), BF16.dtype, 1), draw((512, 1024), BF16.dtype, 2)
    before = isogemm.linear(x, w)
    assert chooser(0)
    reload()
    same(isogemm.linear(x, w), before)
