"""Compilers: what is kept on disk and when it is read; tensor maps; Triton's parameters as the launcher sees them."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from tests.backends.cuda import samples
from tests.backends.cuda.fake import FakeCuda

from isogemm.backends.cuda.driver import nvrtc, triton_build
from isogemm.backends.cuda.driver.kernel import load_into
from isogemm.backends.cuda.driver.libcuda import Driver
from isogemm.backends.cuda.driver.tensormap import encoder
from isogemm.backends.cuda.driver.waiting import compiled_alone
from isogemm.base import disk
from isogemm.errors import DTypeError, LayoutError, LimitError, OptionError
from isogemm.planner.family import NotCompiledError


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Sources that reach the compiler, which here is a function of all its arguments; cubins go to a fresh folder."""
    calls = []

    def compile_(text, name, headers, options):
        calls.append((text, dict(headers), tuple(options)))
        return repr(calls[-1]).encode()

    monkeypatch.setattr(nvrtc, "_compile", compile_)
    monkeypatch.setattr(nvrtc, "cache_directory", lambda: tmp_path / "cubins")
    monkeypatch.setattr(nvrtc, "KERNELS", tmp_path)
    return calls


def test_a_cubin_is_compiled_once_for_each_source_option_and_compiler(compiled, monkeypatch, tmp_path):
    first = nvrtc.compile_text("a", name="a.cu", arch="sm_90a")
    assert nvrtc.compile_text("a", name="a.cu", arch="sm_90a") == first
    assert len(compiled) == 1
    for change in ({"arch": "sm_80"}, {"arch": "sm_90a", "options": ("-DX=1",)}):
        assert nvrtc.compile_text("a", name="a.cu", **change) != first
    assert nvrtc.compile_text("b", name="a.cu", arch="sm_90a") != first
    assert len(compiled) == 4
    monkeypatch.setattr(nvrtc.facts, "nvrtc_version", lambda: "99.0")
    nvrtc.compile_text("a", name="a.cu", arch="sm_90a")
    assert len(compiled) == 5
    assert len(list((tmp_path / "cubins").iterdir())) == 5


def test_a_function_is_of_its_file_with_macros_behind_a_text(compiled, monkeypatch, tmp_path):
    loaded = []
    monkeypatch.setattr(nvrtc.facts, "device", lambda ordinal: SimpleNamespace(arch="sm_90a"))
    monkeypatch.setattr(nvrtc.kernel, "load", lambda *asked: loaded.append(asked))
    (tmp_path / "one.cu").write_text("first")
    for _ in range(2):
        nvrtc.function_of("one.cu", "f", 3, {"BM": 64, "LEAF": False, "T": "float"}, before="before\n")
    ((text, headers, options),) = compiled
    assert text == 'before\n#include "one.cu"\n'
    assert headers == {"one.cu": "first"}
    assert options == ("--gpu-architecture=sm_90a", "--fmad=false", "-std=c++17", "-DBM=64", "-DLEAF=0", "-DT=float")
    assert [(name, device) for _, name, device in loaded] == [("f", 3)] * 2


def test_who_does_not_wait_gets_what_is_compiled_alone(compiled, monkeypatch, tmp_path):
    monkeypatch.setattr(nvrtc.facts, "device", lambda ordinal: SimpleNamespace(arch="sm_90a"))
    monkeypatch.setattr(nvrtc.kernel, "load", lambda *asked: asked)
    (tmp_path / "one.cu").write_text("first")
    with compiled_alone(), pytest.raises(NotCompiledError):
        nvrtc.function_of("one.cu", "f", 0)
    assert not compiled
    made = nvrtc.function_of("one.cu", "f", 0)
    nvrtc._cubins.clear()  # the disk has it
    with compiled_alone():
        assert nvrtc.function_of("one.cu", "f", 0) == made
    assert len(compiled) == 1


def test_what_another_thread_compiles_is_neither_compiled_twice_nor_waited_for(compiled, monkeypatch, tmp_path):
    began, go, slow = threading.Event(), threading.Event(), nvrtc._compile

    def compile_(*asked):
        began.set()
        assert go.wait(10)
        return slow(*asked)

    monkeypatch.setattr(nvrtc, "_compile", compile_)
    monkeypatch.setattr(nvrtc.facts, "device", lambda ordinal: SimpleNamespace(arch="sm_90a"))
    monkeypatch.setattr(nvrtc.kernel, "load", lambda *asked: asked)
    (tmp_path / "one.cu").write_text("first")
    threads = [threading.Thread(target=nvrtc.function_of, args=("one.cu", "f", 0)) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert began.wait(10)
    with compiled_alone(), pytest.raises(NotCompiledError):
        nvrtc.function_of("one.cu", "f", 0)
    go.set()
    for thread in threads:
        thread.join(10)
    assert len(compiled) == 1


def test_included_files_are_part_of_the_source(compiled, tmp_path):
    (tmp_path / "inner.cu").write_text("1")
    (tmp_path / "outer.cu").write_text('#include "inner.cu"\n#include "outer.cu"\n')
    text = ' #  include "outer.cu"\n#include <stdint.h>\n'
    nvrtc.compile_text(text, name="x", arch="sm_90a")
    assert set(compiled[0][1]) == {"outer.cu", "inner.cu"}
    (tmp_path / "inner.cu").write_text("2")
    nvrtc.compile_text(text, name="x", arch="sm_90a")
    assert compiled[1][1]["inner.cu"] == "2"


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_what_was_not_written_whole_is_compiled_again(compiled, tmp_path, damage):
    first = nvrtc.compile_text("a", name="a.cu", arch="sm_90a")
    (path,) = (tmp_path / "cubins").iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"?" if damage is None else damage)
    assert nvrtc.compile_text("a", name="a.cu", arch="sm_90a") == first
    assert len(compiled) == 2
    assert nvrtc.compile_text("a", name="a.cu", arch="sm_90a") == first
    assert len(compiled) == 2


def test_many_writers_leave_one_whole_file(compiled, tmp_path):
    def work() -> None:
        for _ in range(20):
            disk.keep(tmp_path / "cubins" / "x.cubin", b"cubin" * 1000)
            assert disk.kept(tmp_path / "cubins" / "x.cubin") == b"cubin" * 1000

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in (tmp_path / "cubins").iterdir()] == ["x.cubin"]


def test_without_a_place_to_keep_cubins_they_are_compiled_and_it_is_said(compiled, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(nvrtc, "cache_directory", lambda: tmp_path / "file" / "cubins")
    monkeypatch.setattr(disk, "_said", set())
    for _ in range(2):
        assert nvrtc.compile_text("a", name="a.cu", arch="sm_90a")
    assert len(compiled) == 2
    assert capsys.readouterr().err.count("not cached") == 1


@pytest.fixture
def cubins(monkeypatch, tmp_path):
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")
    monkeypatch.setattr(nvrtc, "cache_directory", lambda: tmp_path / "cubins")
    return tmp_path / "cubins"


@pytest.mark.parametrize("text", [samples.AXPY, samples.CLUSTER, samples.TILE], ids=["axpy", "cluster", "tile"])
def test_nvrtc_compiles_without_a_gpu(cubins, monkeypatch, text):
    cubin = nvrtc.compile_text(text, name="sample.cu", arch="sm_90a")
    assert cubin[:4] == b"\x7fELF"
    monkeypatch.setattr(nvrtc, "_compile", None)
    assert nvrtc.compile_text(text, name="sample.cu", arch="sm_90a") == cubin


def test_a_compilers_log_is_in_the_error(cubins):
    with pytest.raises(nvrtc.CompileError, match="wrong_name") as error:
        nvrtc.compile_text('extern "C" __global__ void f() { wrong_name = 1; }', name="f.cu", arch="sm_90a")
    assert "f.cu(1)" in error.value.log
    assert not cubins.exists()


def test_a_map_is_encoded_as_the_driver_wants_it_once_for_each_address():
    fake = FakeCuda()
    encode = encoder("bfloat16", sizes=(3, 40, 64), strides=(8192, 72, 1), box=(1, 16, 64), on=Driver(fake))
    first, second = encode(1 << 40), encode(1 << 41)
    assert encode(1 << 40) == first == b"\1" * 128
    assert second == b"\2" * 128
    assert fake.maps == [(9, a, [64, 40, 3], [144, 16384], [64, 16, 1], (0, 3, 0, 0)) for a in (1 << 40, 1 << 41)]


@pytest.mark.parametrize("known", [None, 0, 1])
def test_a_thread_without_a_context_encodes_in_one(known):
    """Where memory comes from torch's cache, encoding a map may be what a thread asks the driver first."""
    fake = FakeCuda()
    on = Driver(fake)
    if known is not None:
        on.primary(known)
    encode, found = encoder("bfloat16", sizes=(8, 64), strides=(64, 1), box=(8, 64), on=on), []
    thread = threading.Thread(target=lambda: found.extend((encode(1 << 40), fake.stack())))
    thread.start()
    thread.join()
    assert found == [b"\1" * 128, [0 if known else fake.contexts[0]]]  # a new thread stays in device 0's


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"dtype": "complex64"}, DTypeError, "complex64"),
        ({"strides": (64,)}, LayoutError, "1 strides"),
        ({"strides": (64, 2)}, LayoutError, "last stride"),
        ({"strides": (65, 1)}, LayoutError, "got: 130; nearest legal choice: 144"),
        ({"strides": (-64, 1)}, LayoutError, "-128"),
        ({"sizes": (0, 64)}, LimitError, "got: 0"),
        ({"box": (257, 64)}, LimitError, "got: 257"),
        ({"box": (8, 128)}, LayoutError, "at most 128; got: 256"),
        ({"box": (8, 4)}, LayoutError, "got: 8; nearest legal choice: 16"),
        ({"swizzle": 48}, LayoutError, "48"),
    ],
)
def test_what_the_copy_engine_cannot_address_is_refused(change, error, match):
    arguments = {"dtype": "bfloat16", "sizes": (8, 64), "strides": (64, 1), "box": (8, 64), **change}
    fake = FakeCuda()
    with pytest.raises(error, match=match):
        encoder(arguments.pop("dtype"), on=Driver(fake), **arguments)


@pytest.mark.parametrize("address", [0, 24])
def test_null_and_unaligned_addresses_have_no_map(address):
    encode = encoder("bfloat16", sizes=(8, 64), strides=(64, 1), box=(8, 64), on=Driver(FakeCuda()))
    with pytest.raises(LayoutError, match="multiple of 16"):
        encode(address)


@pytest.fixture
def triton():
    return pytest.importorskip("triton", reason="Triton is not installed")


ADD = {"x": "*fp32", "out": "*fp32", "n": "i32", "value": "fp32"}


def test_triton_pointers_and_numbers_bind(triton, monkeypatch):
    fake = FakeCuda(sizes=(8, 8, 4, 4, 8, 8))
    monkeypatch.setattr(triton_build, "load", lambda cubin, name, device: load_into(Driver(fake), cubin, name, device))
    built = triton_build.build(
        samples.add, ADD, {"BLOCK": 128}, aligned=("x", "out", "n"), num_warps=2, launch_pdl=True
    )
    assert (built.name, built.threads, built.pdl, built.cluster, built.scratch) == ("add", 64, True, (1, 1, 1), 0)
    assert ".v2.b32" in built.ptx
    assert ".v2.b32" not in triton_build.build(samples.add, ADD, {"BLOCK": 128}, num_warps=2).ptx
    assert built.cubin[:4] == b"\x7fELF"
    assert (
        triton_build.build(samples.add, ADD, {"BLOCK": 128}, aligned=("x", "out", "n"), num_warps=2, launch_pdl=True)
        is built
    )
    built.bind(0, (3,), {"n": 5})(7, 1, 2, 0.5)
    ((shape, stream, values, attributes, *_),) = fake.launches
    assert (shape[:6], stream) == ((3, 1, 1, 64, 1, 1), 7)
    assert [v[0] for v in values[:3]] == [1, 2, 5]
    assert len(attributes) == 1


def test_triton_products_and_sums_are_not_fused(triton):
    ptx = triton_build.build(samples.scale, {"x": "*fp32", "out": "*fp32", "a": "fp32"}).ptx
    assert "fma.rn" not in ptx
    assert (
        "fma.rn"
        in triton_build.build(samples.scale, {"x": "*fp32", "out": "*fp32", "a": "fp32"}, enable_fp_fusion=True).ptx
    )


def test_equal_constants_of_other_types_are_other_kernels(triton):
    types = {"x": "*fp32", "out": "*fp32"}
    built = [triton_build.build(samples.scale, types, {"a": a}) for a in (0.0, -0.0, 0, False, 0.0)]
    assert len(set(map(id, built))) == 4
    assert built[0] is built[4]


def test_a_kernel_that_needs_scratch_takes_its_address_last(triton, monkeypatch):
    fake = FakeCuda(sizes=(8, 8, 4, 4, 8, 8))
    monkeypatch.setattr(triton_build, "load", lambda cubin, name, device: load_into(Driver(fake), cubin, name, device))
    types = {"x": "*bf16", "out": "*bf16", "n": "i32", "k": "i32"}
    built = triton_build.build(samples.rows, types, {"ROWS": 16}, aligned=("x", "k"))
    assert built.scratch >= 128
    built.bind(0, (4,), {"n": 60, "k": 192})(0, 1, 2, 99)
    assert [int.from_bytes(v, "little") for v in fake.launches[0][2]] == [1, 2, 60, 192, 99, 0]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"types": {**ADD, "n": "bf16"}}, DTypeError, "bf16"),
        ({"types": {"x": "*fp32"}}, OptionError, "parameter out"),
        ({"types": {**ADD, "y": "i32"}}, OptionError, "y"),
        ({"num_warp": 4}, OptionError, "num_warp"),
        ({"constants": {"BLOCK": 100}}, nvrtc.CompileError, "power of 2"),
    ],
)
def test_what_triton_cannot_build_is_refused(triton, change, error, match):
    arguments = {"types": ADD, "constants": {"BLOCK": 128}, **change}
    with pytest.raises(error, match=match):
        triton_build.build(samples.add, arguments.pop("types"), arguments.pop("constants"), **arguments)


def test_names_that_a_kernel_does_not_have_are_refused(triton):
    built = triton_build.build(samples.add, ADD, {"BLOCK": 128})
    with pytest.raises(OptionError, match=r"\['m'\]"):
        built.bind(0, (1,), {"m": 1})
