"""Providers of tensors: what is placed on a device, and what the kernels' names tell. Without a GPU, on torch's CPU."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from isogemm import audit
from isogemm.audit.bench import LinearOperands, ProviderBench
from isogemm.audit.data import LAYOUTS, ActivationSource, WeightSource, arrange, as_dtype
from isogemm.audit.named import load_provider, provider_of
from isogemm.audit.providers import CallableProvider, isogemm_calls, torch_calls
from isogemm.cli import app
from isogemm.errors import DeviceError
from isogemm.lab.models import LinearShape
from isogemm.lab.profiler import KernelLaunch

torch = pytest.importorskip("torch")

from isogemm.audit.tensors import TensorProvider, kernels_text, split_k  # noqa: E402

SHAPE = LinearShape("small", 24, 72)
HAS_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_has_the_strides_values_and_alignment_of_its_array(dtype: str, layout: str) -> None:
    rng = np.random.default_rng(0)
    a = arrange(rng.standard_normal((5, 9)).astype(as_dtype(dtype)), layout)
    provider = TensorProvider("torch", "cpu", torch_calls())
    t = provider._in(a)
    assert t.stride() == tuple(step // a.itemsize for step in a.strides)
    assert t.data_ptr() % 64 == a.ctypes.data % 64
    assert t.data_ptr() != a.ctypes.data
    back = np.ascontiguousarray(provider._out(t))
    assert back.tobytes() == np.ascontiguousarray(a).tobytes()


@pytest.mark.parametrize("make", [torch_calls, isogemm_calls])
def test_every_relation_runs_on_tensors_as_it_does_on_arrays(make: object) -> None:
    name = make.__name__.removesuffix("_calls")
    tensors = TensorProvider("tensors", "cpu", make())
    relations = list(audit.RELATIONS)
    report = audit.run([tensors, name], [SHAPE], require=[], sweep=[1, 2, 16], relations=relations, speed=False)
    there, here = report.providers["tensors"], report.providers[name]
    assert not there.reason
    for relation, result in there.relations.items():
        assert result.status != "failed", result.reason
        if name == "isogemm":
            assert result.status in ("held", "n/a"), relation
    assert there.relations["accumulation"].outputs == here.relations["accumulation"].outputs > 0
    assert {r for r, x in there.relations.items() if x.status == "n/a"} <= {"packing", "stream", "graph"}


def test_a_weight_is_placed_once_and_again_when_it_is_another_array() -> None:
    provider = TensorProvider("torch", "cpu", torch_calls())
    x, w = np.ones((2, 4), np.float32), np.ones((3, 4), np.float32)
    first = provider._weight(w)
    assert provider._weight(w) is first
    assert provider.linear(x, w + 1)[0, 0] == 8
    assert provider.linear(x, w)[0, 0] == 4


def test_own_functions_are_given_tensors_on_a_device_and_arrays_on_the_cpu() -> None:
    def mine(x: object, w: object) -> object:
        assert isinstance(x, torch.Tensor)
        assert isinstance(w, torch.Tensor)
        return x @ w.T

    provider = provider_of("mine", mine, "cpu:0")
    assert isinstance(provider, TensorProvider)
    assert provider.linear(np.ones((2, 4), np.float32), np.ones((3, 4), np.float32)).tolist() == [[4.0] * 3] * 2
    assert isinstance(provider_of("mine", mine, "cpu"), CallableProvider)
    assert provider.accumulate is None


def test_numpy_is_absent_from_a_device() -> None:
    with pytest.raises(audit.Absent, match="numpy computes on the CPU"):
        load_provider("numpy", "cuda:0")


def launch(name: str, *grid: int) -> KernelLaunch:
    return KernelLaunch(name, grid, (128, 1, 1), 64, 0, 1e-6, 0.5)


@pytest.mark.parametrize(
    ("found", "parts", "says"),
    [
        ([launch("ampere_sgemm_32x128_tn", 20, 1, 1)], 1, "ampere_sgemm_32x128_tn 20x1x1"),
        (
            [launch("sm80_xmma_gemm_f32f32_splitk_tn", 4, 8, 6), launch("splitKreduce_kernel<32, 16>", 40, 1, 1)],
            6,
            "(split-K, 6 parts)",
        ),
        (
            [launch("nvjet_sm90_tst_64x8_2x1_v_bz_splitK_TNT", 132, 1, 1), launch("splitKreduce_kernel", 4, 1, 9)],
            None,
            "(split-K, an untold number of parts)",
        ),
        ([launch("cutlass_80_simt_sgemm_execute_split_k_kernel", 4, 8, 3)], 3, "3 parts"),
        ([launch("batched_gemm", 4, 4, 16)], 1, "4x4x16"),
        ([], 1, "tells no kernels"),
    ],
)  # fmt: skip
def test_kernels_tell_into_how_many_parts_k_was_cut(found: list[KernelLaunch], parts: int | None, says: str) -> None:
    assert split_k(found) == parts
    text = kernels_text(found)
    assert says in text
    assert ("split-K" in text) is (parts != 1)


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_without_a_gpu_the_device_is_refused_by_name() -> None:
    result = CliRunner().invoke(app, ["audit", "-p", "torch", "--device", "cuda"])
    assert isinstance(result.exception, DeviceError)
    with pytest.raises(DeviceError, match="CUDA"):
        audit.run(["torch"], [SHAPE], device="cuda")
    with pytest.raises(DeviceError):
        audit.replay("provider=torch&relation=graph&m=1&n=8&k=8&device=cuda&dtype=float32&seed=0")


def test_a_case_says_its_device_where_it_is_not_the_cpu() -> None:
    from isogemm.audit import Case

    source = WeightSource(SHAPE)
    for device in ("cpu", "cuda:1"):
        case = Case("torch", "graph", {"m": 1}, source, ActivationSource(), "float32", 0, device)
        assert ("device" in case.text()) is (device != "cpu")
        assert Case.parse(case.text()).device == device


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_isogemm_holds_and_torch_s_kernels_are_named(dtype: str) -> None:
    report = audit.run(["isogemm", "torch"], [(512, 4096)], dtype=dtype, sweep=[1, 2, 16, 128], device="cuda")
    assert report.held("isogemm")
    ours, theirs = report.providers["isogemm"].relations, report.providers["torch"].relations
    for name in ("stream", "graph", "backward", "accumulation"):
        assert ours[name].status == "held"
        assert theirs[name].outputs > 0
    first = next(iter(report.drifts("torch")))
    assert len(first.kernels) > 1
    assert all(text.startswith("M=") for text in first.kernels)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_on_a_gpu_layouts_and_graphs_are_what_they_say() -> None:
    provider = TensorProvider("torch", "cuda:0", torch_calls())
    w = WeightSource(SHAPE).load(as_dtype("float32"), 0)
    operands = LinearOperands(SHAPE, w, ActivationSource(), 0, np.arange(SHAPE.n), 64)
    bench = ProviderBench(provider, operands)
    x = bench.x(16)
    assert provider.captured is not None
    assert provider.streamed is not None
    for run in (provider.captured, provider.streamed):
        assert np.allclose(run(x, w), x @ w.T, atol=1e-2)
    for layout in LAYOUTS:
        t = provider._in(arrange(x, layout))
        assert t.is_cuda
        assert t.data_ptr() % 64 == arrange(x, layout).ctypes.data % 64
