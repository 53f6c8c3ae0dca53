"""Integer and float32 products with packed weights on the GPU, against the CPU's bits; their kernels compile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.backends.cuda.compiled import Kernels, kernels
from tests.quant.draws import KINDS, WEIGHTS, blocks, values

import isogemm
from isogemm.backends.cuda.driver.nvrtc import function_of
from isogemm.backends.cuda.quant import few as quant_few
from isogemm.backends.cuda.quant import floats
from isogemm.backends.cuda.quant.case import QuantCase
from isogemm.backends.cuda.quant.integers import activations, few, kernel, many, wide
from isogemm.backends.cuda.quant.integers.few import FewCodes
from isogemm.backends.cuda.quant.integers.many import ManyCodes
from isogemm.backends.cuda.quant.integers.wide import WideCodes
from isogemm.backends.cuda.quant.layout import FORMATS, Packed, layout, macros, pack
from isogemm.contract import int32, reference
from isogemm.errors import DeviceError, DTypeError, ShapeError
from isogemm.quant import QuantizedMatrix

__all__ = ["kernels"]  # the fixture

every_format = pytest.mark.parametrize("fmt", WEIGHTS, ids=str)
F32 = np.float32


def weight(fmt: Any, n: int, k: int, seed: int = 0) -> tuple[QuantizedMatrix, Packed]:
    """The same weight on the host and on the GPU."""
    import torch

    rows = blocks(fmt, n, k // fmt.block, seed)
    data = torch.from_numpy(pack(rows, fmt)).cuda()
    return QuantizedMatrix.from_bytes(rows, shape=(n, k), format=fmt), Packed(data, layout(fmt), n, k)


def product(
    x: Any, packed: Packed, bias: Any = None, *, out: Any = None, as_floats: bool = False, chosen: Any = None
) -> Any:
    """Into memory full of a NaN that no product returns."""
    import torch

    out = torch.empty((x.shape[0], packed.n), device="cuda") if out is None else out
    out.fill_(float("nan"))
    if as_floats:
        floats.KERNEL.run(x, packed, out, bias)
    else:
        kernel.KERNEL.run(x, packed, out, bias, chosen)
    return out


def draw(m: int, k: int, seed: int = 0) -> np.ndarray:
    """Rows of every kind that separates formulas, with a NaN, an infinity and a row of zeros among many."""
    x = np.concatenate([values(kind, -(-m // len(KINDS)), k, seed) for kind in KINDS])[:m]
    if m > 8:
        x[m // 2, k - 1], x[m // 3, 0], x[m // 4] = np.nan, -np.inf, 0
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 2, 8, 15, 33, 200])
@every_format
def test_products_have_the_cpus_bits(fmt: Any, m: int) -> None:
    from tests.backends.cuda.device import same, upload

    for n, k in ((200, 1536),) if m in (2, 33) else ((37, 5 * fmt.block), (200, 1536)):
        w, packed = weight(fmt, n, k, m)
        x = draw(m, k, m)
        same(product(upload(x), packed), isogemm.linear(x, w, activations="q8"), f"{fmt} {n} x {k}")
        same(product(upload(x), packed, as_floats=True), isogemm.linear(x, w, activations="fp32"), f"{fmt} {n} x {k}")


@pytest.mark.gpu
@every_format
def test_codes_of_activations_are_the_definitions(fmt: Any) -> None:
    """Sums of single codes tell each of them: a weight whose rows are unit vectors gives back codes times scales."""
    from tests.backends.cuda.device import same, upload

    block = fmt.block
    x = draw(64, 2 * block, 3)
    x[40] = np.tile((np.arange(block) * 7 % 253 - 126) / 2, 2)  # halves: codes are these numbers, rounded
    x[40, ::32] = 127
    w = isogemm.quantize(np.eye(2 * block, dtype=F32)[: min(2 * block, 96)], fmt)
    import torch

    packed = Packed(torch.from_numpy(pack(w.rows, fmt)).cuda(), layout(fmt), len(w), 2 * block)
    from isogemm.formats.reference import decode

    same(product(upload(x), packed), int32.evaluate(x, decode(w.rows, fmt)), str(fmt))


@pytest.mark.gpu
@every_format
def test_no_configuration_reaches_the_bits(fmt: Any) -> None:
    from tests.backends.cuda.device import same, upload

    k, short = 6 * 256, fmt.block == 32
    _, packed = weight(fmt, 150, k)
    x = upload(draw(40, k))
    want = product(x, packed)
    assert {kernel.config(packed.layout, m, 150, k).x for m in (1, 4, 5, 16)} == {"fused", "staged"}
    chosen = [
        FewCodes(1, 1, 2, 2),
        FewCodes(1, 5, 2, 2),
        FewCodes(2, 2, 1, 3),
        ManyCodes(1, 4, 8, 1, 2),
        ManyCodes(2, 4, 2, 2, 3),
    ]
    chosen += [FewCodes(2, 4, 1, 4, 128), ManyCodes(1, 2, 2, 4, 3, 64)] if short else []
    for c in chosen:
        same(product(x, packed, chosen=c), want, f"{fmt} {c}")
    for m, c in (
        (1, FewCodes(1, 3, 2, 2, 256, "fused")),
        (3, FewCodes(1, 1, 5, 2, 256, "fused")),
        (8, FewCodes(1, 1, 2, 2, 256, "fused")),
        (7, FewCodes(1, 2, 2, 2, 256, "staged")),
        (13, FewCodes(2, 1, 3, 2, 256, "staged")),
        (5, FewCodes(2, 1, 2, 2)),
    ):
        same(product(x[:m], packed, chosen=c), want[:m], f"{fmt} {c}")
    for row in (0, 7, 13, 39):
        same(product(x[row : row + 1], packed), want[row : row + 1], f"{fmt} row {row}")
        same(
            product(x[row : row + 1], packed, as_floats=True),
            product(x, packed, as_floats=True)[row : row + 1],
            str(fmt),
        )


WIDE = (
    WideCodes(1, 32, 3),
    WideCodes(2, 64, 3),
    WideCodes(2, 128, 4),
    WideCodes(3, 64, 2),
    WideCodes(3, 96, 3),
    WideCodes(4, 64, 5),
)


@pytest.mark.gpu
@every_format
def test_wide_tiles_have_the_cpus_bits(fmt: Any) -> None:
    """Every number of warpgroups; ragged tiles of both, several turns of a block, and K that ends inside a stage."""
    from tests.backends.cuda.device import same, upload

    short = fmt.block == 32
    for m, n, k in ((70, 200, 1536), (150, 37, 5 * fmt.block), (41, 150 * 64 + 3, fmt.block), (260, 320, 512)):
        w, packed = weight(fmt, n, k, m)
        x = draw(m, k, m)
        x[m - 1] = 1e8  # scales of blocks of 32 beyond float16
        want = isogemm.linear(x, w, activations="q8")
        used = [c for c in WIDE if wide.legal(packed.layout, c)]
        assert len(used) == (0 if fmt.name in wide.NONE else len(WIDE) if short else 4)
        for c in used:
            same(product(upload(x), packed, chosen=c), want, f"{fmt} {m} x {n} x {k} {c}")


def extremes(fmt: Any, k: int) -> np.ndarray:
    """Rows of blocks whose codes and integer scales are the largest and the smallest in every combination."""
    import itertools

    fields = [name for name in fmt.dtype.names if name not in {f.name for f in fmt.scales}]
    every = list(itertools.product((0x00, 0xFF, 0x80, 0x7F, 0x88), repeat=len(fields)))
    held = np.zeros((len(every), k // fmt.block), fmt.dtype)
    for row, bytes_of in zip(held, every, strict=True):
        for field in fmt.scales:
            row[field.name] = 1
        for name, value in zip(fields, bytes_of, strict=True):
            row[name] = np.full(1, value, np.uint8).view(np.int8)[0] if held[name].dtype == np.int8 else value
    return held.view(np.uint8).reshape(len(every), -1)


@pytest.mark.gpu
@every_format
def test_the_largest_sums_are_exact(fmt: Any) -> None:
    """Where float32 accumulators hold integers, these are their largest; odd ones in between."""
    from tests.backends.cuda.device import same, torch, upload

    k = 2 * 256
    rows = extremes(fmt, k)
    packed = Packed(torch.from_numpy(pack(rows, fmt)).cuda(), layout(fmt), len(rows), k)
    x = np.ones((40, k), F32)
    x[1], x[2] = -1, np.where(np.arange(k) % 2, 1, -1)
    for i in range(3, 40):  # single codes less than the largest, so that the last bits of sums differ
        x[i] = x[i % 3]
        x[i, i::37] *= F32((127 - i) / 127)
    from isogemm.formats.reference import decode

    want = int32.evaluate(x, decode(rows, fmt))
    for c in (None, *(c for c in WIDE if wide.legal(packed.layout, c))):
        same(product(upload(x), packed, chosen=c), want, f"{fmt} {c}")


@pytest.mark.gpu
@pytest.mark.parametrize("as_floats", [False, True])
@pytest.mark.parametrize("m", [3, 21, 40])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["Q5_1", "Q6_K"])
def test_types_strides_and_epilogues(name: str, dtype: str, m: int, as_floats: bool) -> None:
    from tests.backends.cuda.device import DTYPES, download, same, torch, upload

    fmt = next(f for f in WEIGHTS if f.name == name)
    n, k = 75, 1024
    w, packed = weight(fmt, n, k)
    x = torch.empty((m, 2 * k), device="cuda", dtype=DTYPES[dtype])[:, ::2]
    x.copy_(upload(draw(m, k) * F32(2.0**-3)))
    bias = torch.linspace(-3, 5, 2 * n, device="cuda", dtype=DTYPES[dtype])[::2]
    how = "fp32" if as_floats else "q8"
    acc = isogemm.linear(download(x).astype(F32), w, activations=how)
    for out in (torch.empty((m, n), device="cuda", dtype=DTYPES[dtype]), torch.empty((n, m), device="cuda").T):
        same(product(x, packed, out=out, as_floats=as_floats), reference.epilogue(acc, out_dtype=download(out).dtype))
        want = reference.epilogue(acc, bias=download(bias), out_dtype=download(out).dtype)
        same(product(x, packed, bias, out=out, as_floats=as_floats), want, "bias")
        same(product(x.contiguous(), packed, bias, out=out, as_floats=as_floats), want, "contiguous")


@pytest.mark.gpu
@pytest.mark.parametrize("as_floats", [False, True])
@pytest.mark.parametrize("m", [1, 40])
def test_captured_products_see_new_activations(m: int, as_floats: bool) -> None:
    """Calls one after the other, whose kernels start before their predecessors end, and share a workspace."""
    from tests.backends.cuda.device import same, torch, upload

    k = 2048
    _, packed = weight(FORMATS_BY_NAME["Q4_K"], 300, k)
    x, out = upload(draw(m, k)), [torch.empty((m, 300), device="cuda") for _ in range(4)]
    scaled = [x * (i + 1) for i in range(4)]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def call() -> None:
        for a, y in zip(scaled, out, strict=True):
            product(a, packed, out=y, as_floats=as_floats)

    call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        call()
    for seed in range(3):
        x.copy_(upload(draw(m, k, seed)))
        for i, a in enumerate(scaled):
            a.copy_(x * (i + 1))
        graph.replay()
        torch.cuda.synchronize()
        for a, y in zip(scaled, out, strict=True):
            same(y.clone(), product(a, packed, as_floats=as_floats), f"{seed}")


FORMATS_BY_NAME = {f.name: f for f in WEIGHTS}


@pytest.mark.gpu
def test_what_is_empty_and_what_is_refused() -> None:
    from tests.backends.cuda.device import torch

    _, packed = weight(FORMATS_BY_NAME["Q4_0"], 20, 64)
    nothing = Packed(packed.data[:0], packed.layout, 20, 0)
    bias = torch.arange(20.0, device="cuda")
    for m in (1, 20):
        for as_floats in (False, True):
            x = torch.empty((m, 0), device="cuda")
            assert (product(x, nothing, as_floats=as_floats).view(torch.int32) == 0).all()
            assert (product(x, nothing, bias, as_floats=as_floats) == bias).all()
            assert not product(torch.empty((0, 64), device="cuda"), packed, as_floats=as_floats).numel()
    x, out = torch.ones((2, 64), device="cuda"), torch.empty((2, 20), device="cuda")
    for run in (kernel.KERNEL.run, floats.KERNEL.run):
        for args, error in (
            ((x[:, :32], packed, out), ShapeError),
            ((x, packed, out[:, :19]), ShapeError),
            ((x, packed, out, bias[:19]), ShapeError),
            ((x.double(), packed, out), DTypeError),
            ((x, packed, out.double()), DTypeError),
            ((x.cpu(), packed, out), DeviceError),
        ):
            with pytest.raises(error):
                run(*args)


@pytest.mark.parametrize("name", FORMATS)
def test_configurations_fit(name: str) -> None:
    lay = layout(name)
    for n, k in ((16, 256), (2560, 9728), (28672, 4096), (152064, 8192)):
        for m in (1, 8, 9, 16, 17, 33, 64, 65, 500, 5000):
            c = kernel.config(lay, m, n, k)
            if isinstance(c, FewCodes):
                m = c.each or m
                assert 8 * c.tiles >= m
                assert c.group * c.teams <= 15
                ring = c.group * c.teams * c.stages * c.span // lay.record_k * lay.record_bytes
                assert ring + few.x_bytes(lay, m, k, c.x) <= 225 * 1024
            elif isinstance(c, WideCodes):
                assert wide.legal(lay, c)
            else:
                assert c.stages >= 2
                assert c.stages * many.stage_bytes(lay, c) <= 227 * 1024


ROUNDED = (("Q4_0", 100), ("Q5_1", 100), *((name, m) for name in ("Q4_K", "Q6_K") for m in (1, 12, 100)))


def test_integer_kernels_round_each_step(kernels: Kernels) -> None:
    """Dots by tensor cores; for each step of the chain a multiplication and a fused one, and a sum made a float32."""
    for name, m in ROUNDED:
        usual = kernel.config(layout(name), m, 4096, 4096)
        c = FewCodes(1, 1, 2, 2) if m == 1 else usual if m < 16 else ManyCodes(2, 8, 4, 2, 2)
        c.bind(QuantCase("q8", name, "float32", "float32", None, m, 4096, 4096), 0)
    for (name, _), made in zip(ROUNDED, kernels.loaded, strict=True):
        lay = layout(name)
        dots, fused, scaled = made.machine_counts("IMMA", "FFMA", "FMUL")
        sums = 0 if lay.format.block == 256 else scaled // (2 if lay.format.offset else 1)
        assert dots >= 8
        assert not made.hasty(), name
        assert fused == scaled + sums > 0
        assert not {line for line in made.machine_code if line.startswith(("FADD", "FMUL", "FFMA")) and "FTZ" in line}
        assert made.spilled <= 16


@pytest.mark.parametrize(("name", "m", "products"), [("Q4_0", 100, 12), ("Q5_1", 4000, 8), ("Q4_K", 600, 34)])
def test_wide_kernels_round_each_step(kernels: Kernels, name: str, m: int, products: int) -> None:
    """A multiplication and a fused one for each step, but one fused one where the other factor is exact; no product is
    waited for before the next is under way."""
    lay = layout(name)
    _, c = min(wide.options(lay, m, 8192, 4096))
    c.bind(QuantCase("q8", name, "float32", "float32", None, m, 8192, 4096), 0)
    (made,) = kernels.loaded
    tensor, fused, scaled = made.machine_counts("HGMMA", "FFMA", "FMUL")
    assert tensor == products
    assert not made.hasty()
    assert fused == (2 * scaled if name == "Q5_1" else scaled) > 0
    assert made.machine_code.count("WARPGROUP.DEPBAR.LE") <= tensor + 1
    assert not {line for line in made.machine_code if line.startswith(("FADD", "FMUL", "FFMA")) and "FTZ" in line}
    assert made.spilled <= 128


@pytest.mark.parametrize("form", ["words", "float16"])
@pytest.mark.parametrize("name", ["Q8_0", "Q2_K"])
def test_activations_are_divided_exactly(kernels: Kernels, name: str, form: str) -> None:
    activations.bind(QuantCase("q8", name, "float32", "float32", None, 5, 16, 1024), form, 0)
    (made,) = kernels.loaded
    lines = set(made.machine_code)
    assert not {line for line in lines if line.startswith(("FMUL", "FFMA")) and "FTZ" in line}
    assert {line for line in lines if line.startswith("MUFU")} <= {"MUFU.RCP", "MUFU.RSQ"}
    assert any(line.startswith("FCHK") for line in lines)  # a division's slow path: the fast one alone is not exact
    assert made.spilled == 0


def test_floats_are_one_chain(kernels: Kernels) -> None:
    about = {"NX": 4, "TYPE": 0, "VEC": 1, "WARPS": 2, "STAGES": 3, "TYPES": 0}
    function_of("quant/floats.cu", "quant_floats", 0, {**macros(layout("Q4_0")), **about})
    (made,) = kernels.loaded
    fused, scaled, tensor = made.machine_counts("FFMA", "FMUL", "HMMA")
    assert fused == 4 * scaled > 0  # one product a weight, one step a weight and row
    assert tensor == 0
    assert not made.hasty()
    assert made.spilled == 0


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K", "Q8_0"])
def test_few_rows_leave_buffers_that_are_read(kernels: Kernels, name: str) -> None:
    for m, n in ((3, 28672), (16, 4096)):
        case = QuantCase("same", name, "bfloat16", "bfloat16", None, m, n, 4096)
        quant_few.KERNEL.build(case, quant_few.KERNEL.configure(case, 132), 0)
    for made in kernels.loaded:
        assert not made.hasty()
