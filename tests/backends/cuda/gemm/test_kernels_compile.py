"""Every kernel compiles for an H200, with no GPU: instructions, roundings, parameters, and what does not fit."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.backends.cuda.compiled import Compiled, Kernels, kernels

import isogemm
from isogemm.backends.cuda.gemm.choose import FAMILIES
from isogemm.backends.cuda.gemm.hopper.config import HopperConfig
from isogemm.backends.cuda.gemm.lists import family as grouped
from isogemm.backends.cuda.gemm.sgemm.tiles import RINGS, SHARED, TILES, boxed, copies
from isogemm.backends.cuda.gemm.tile.family import Tile
from isogemm.contract.spec import Contract
from isogemm.problem.product import Product, Strides

__all__ = ["kernels"]  # the fixture

TABLE = Path(isogemm.__file__).parent / "planner" / "tables" / "h200.json"
LAYOUTS = ("NT", "NN", "TN", "TT", "SS")
WGMMA, MMA, COPY = r"wgmma\.mma_async", r"\bmma\.sync", r"cp\.async\.c[ag]\.shared"
# Half the inputs' products sum in blocks of 16 of K: another depth of instruction is another arithmetic.
TENSOR = (
    r"(?:wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.{0}\.{0}"
    r"|\bmma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.{0}\.{0}\.f32)"
)
# Operations that ptxas may contract, or that flush subnormals.
LOOSE = r"\b(?:mul|add|sub)\.f32\b|\.ftz\b|\.f32x2\b"


def pose(
    layout: str = "NT", dtype: str = "bfloat16", contract: str = "tensor_core:sm90/chain", out: str = "",
    m: int = 512, n: int = 768, k: int = 1024, batch: int = 1, **rest: Any,
) -> Product:  # fmt: skip
    """A product with operands laid out as by the letters of `Product.layout`."""
    a = {"N": Strides(k, 1), "T": Strides(1, m), "S": Strides(2 * k, 2)}[layout[0]]
    b = {"N": Strides(n, 1), "T": Strides(1, k), "S": Strides(2 * n, 2)}[layout[1]]
    c = Strides(n, 1)
    if batch > 1:
        a, b, c = a._replace(batch=m * k), b._replace(batch=k * n), c._replace(batch=m * n)
    return Product(m, n, k, dtype, dtype, out or dtype, Contract.parse(contract), a, b, c, batch=batch, **rest)


def full(p: Product) -> Product:
    """With every step of an epilogue: alpha * sums, + beta * C, + bias."""
    return replace(p, alpha=0.5, beta=2.0, c=Strides(p.n, 1), dtype_c="float32", dtype_bias="bfloat16")


def begun(p: Product) -> Product:
    """Walks that start from C."""
    return replace(p, accumulate=True, c=Strides(p.n, 1), dtype_c="float32")


def elements(config: str) -> int:
    """Of a thread's part of a Triton tile."""
    tile = Tile.parse(config)
    assert tile is not None
    return tile.block_m * tile.block_n // (32 * tile.warps)


def check_roundings(kernel: Compiled, products: int, sums: int) -> None:
    """So many products and sums, each rounded by itself: nothing that a compiler may contract."""
    assert kernel.count(LOOSE) == 0
    assert (kernel.count(r"\bmul\.rn\.f32\b"), kernel.count(r"\badd\.rn\.f32\b")) == (products, sums)


@pytest.mark.parametrize("config", ["w64 x16 k64 s3 n4", "x64 w64 k64 s4 n4 p0"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensor_cores_take_blocks_of_16_in_every_layout(kernels: Kernels, layout, config):
    (kernel,) = kernels.build("chain", config, pose(layout))
    assert kernel.name == "chain"
    assert kernel.count(WGMMA) == kernel.count(TENSOR.format("bf16")) > 0
    assert kernel.count(r"fma\.rn") == kernel.count(MMA) == kernel.spilled == 0
    assert (kernel.count(COPY) > 0) == (layout != "SS")
    assert kernel.count(r"griddepcontrol\.wait") == ("p" in config)
    check_roundings(kernel, 0, 0)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [("w16 x8 k512 s4 n2 p4", "float16"), ("w32 x16 k512 s4 n2 p8", "bfloat16"), ("w64 x16 k64 s10 n4 p0", "float16")],
)
def test_few_rows_take_the_same_blocks(kernels: Kernels, config, dtype):
    (kernel,) = kernels.build("chain", config, pose(dtype=dtype, m=8, k=2560))
    kind = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    assert kernel.count(WGMMA) + kernel.count(MMA) == kernel.count(TENSOR.format(kind)) > 0
    assert (kernel.count(MMA) > 0) == (not config.startswith("w64"))
    assert (kernel.count(r"prefetch\.global\.L2") > 0) == ("p0" not in config)
    assert kernel.count(COPY) > 0
    assert kernel.spilled == 0


@pytest.mark.parametrize(
    ("family", "config", "arithmetic", "dtype"),
    [("chain", "w64 x16 k64 s3 n4", "tensor_core:sm90", "bfloat16"), ("ieee", "x64 w64 k16 s3 n4", "fma", "float32")],
)
def test_epilogues_leaves_and_starts_round_each_step(kernels: Kernels, family, config, arithmetic, dtype):
    each, p = elements(config), pose(dtype=dtype, contract=f"{arithmetic}/chain")
    leaves = replace(p, contract=Contract.parse(f"{arithmetic}/leaf256"))
    for product, products, sums in ((begun(p), 0, 0), (begun(leaves), 0, each), (full(leaves), 2 * each, 3 * each)):
        (kernel,) = kernels.build(family, config, product)
        check_roundings(kernel, products, sums)
        assert (kernel.count(r"\bfma\.rn\.f32\b") > 0) == (family == "ieee")
        assert kernel.spilled == 0


@pytest.mark.parametrize("config", ["128x192x64 s5 pp", "256x144x64 s4"])
def test_a_bias_of_columns_leaves_two_blocks_their_registers(kernels: Kernels, config):
    (kernel,) = kernels.build("hopper", config, pose(m=5084, n=24768, k=576, dtype_bias="bfloat16"))
    assert kernel.spilled == 0


@pytest.mark.parametrize(("family", "config"), [("chain", "w64 x16 k64 s3 n4"), ("ieee", "x64 w64 k16 s3 n4")])
def test_a_tree_is_its_leaves_and_their_meeting(kernels: Kernels, family, config):
    kind = ("fma/tree8", "float32") if family == "ieee" else ("tensor_core:sm90/tree8", "bfloat16")
    walk, meet = kernels.build(family, config, full(pose(dtype=kind[1], contract=kind[0])))
    assert (walk.name, meet.name) == ("chain", "tree")
    check_roundings(walk, 0, 0)
    # 4 x 256 elements to 128 threads: 8 of each, which 7 sums join before the epilogue's 2.
    check_roundings(meet, 8 * 2, 8 * (7 + 2))
    assert walk.spilled == meet.spilled == meet.count(r"fma\.rn") == 0


@pytest.mark.parametrize("config", ["x32 w32 k16 s2 n4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_is_fused_multiply_adds_alone(kernels: Kernels, layout, config):
    (kernel,) = kernels.build("ieee", config, pose(layout, "float32", "fma/chain"))
    tile = Tile.parse(config)
    assert kernel.count(r"\bfma\.rn\.f32\b") == elements(config) * tile.block_k
    assert kernel.count(WGMMA) == kernel.count(MMA) == kernel.count(r"tf32") == kernel.spilled == 0
    assert kernel.count(COPY) > 0
    check_roundings(kernel, 0, 0)


@pytest.mark.parametrize(
    ("family", "config", "product"),
    [
        ("chain", "w64 x16 k64 s3 n4", pose(n=767, k=999, align=2)),
        ("chain", "x64 w64 k32 s3 n4", pose("NN", n=767, k=999, align=2)),
        ("ieee", "x64 w64 k16 s3 n4", pose(dtype="float32", contract="fma/chain", n=767, k=999, align=4)),
    ],
)
def test_unaligned_operands_are_read_by_elements(kernels: Kernels, family, config, product):
    (kernel,) = kernels.build(family, config, product)
    assert kernel.count(r"cp\.async\.cg|(?:ld|st)\.global[\w:.]*\.v[248]") == 0
    (aligned,) = kernels.build(family, config, replace(product, n=768, k=1024, a=Strides(1024, 1), align=128,
                                                       b=Strides(1, 1024), out=Strides(768, 1)))  # fmt: skip
    assert aligned.count(r"cp\.async\.cg|(?:ld|st)\.global[\w:.]*\.v[248]") > 0


@pytest.mark.parametrize(
    ("family", "products", "copies"),
    [
        ("chain", (pose(), pose(m=17, k=256)), True),
        ("chain", (pose(), pose("NN")), None),
        ("chain", (pose(), pose(m=17, k=255, align=2)), False),
        ("ieee", (pose(dtype="float32", contract="fma/chain"),) * 2, True),
    ],
)
def test_lists_walk_as_products_do(kernels: Kernels, family, products, copies):
    """In the smallest and the largest of their tiles, which differ in sizes alone."""
    *_, largest = table = [*(grouped.FMA_CONFIGS if family == "ieee" else grouped.CONFIGS).values()]
    for config in (table[0], largest):
        kernels.loaded.clear()
        grouped._bound(tuple(map(full, products)), Tile.parse(config), 0, 7)
        (kernel,) = kernels.loaded
        check_roundings(kernel, 2 * elements(config), 2 * elements(config))
        assert kernel.name == "items"
        assert (kernel.count(r"\bfma\.rn\.f32\b") > 0) == (family == "ieee")
        assert (kernel.count(TENSOR.format("bf16")) > 0) == (family == "chain")
        assert copies is None or (kernel.count(r"cp\.async\.cg") > 0) == copies
        assert kernel.spilled == 0 or copies is False


HOPPER = {
    "128x192x64 s5 c2x1": pose(),
    "w64x16x128 s8": full(pose(m=8)),
    "128x64x64 s4 pp": full(pose("TN", out="float32")),
    "256x64x64 s5 c1x2": begun(pose("NN")),
    "192x128x64 s4": pose("TT", "float16"),
    "64x48x128 s4 c1x2 g4": full(pose(dtype="float16", batch=3)),
    "16x24x256 s6 c1x2": full(pose()),
    "w32x48x128 s4 c2x4": begun(pose("TT")),
}


def test_hopper_sums_blocks_of_16_and_rounds_each_step(kernels: Kernels):
    made = {config: kernels.build("hopper", config, product) for config, product in HOPPER.items()}
    for config, (kernel,) in made.items():
        product = HOPPER[config]
        products = [line for line in kernel.machine_code if line.startswith("HGMMA")]
        columns = config.split("x")[1]
        kind = ".BF16" * (product.dtype_a == "bfloat16")
        assert {line.split("_")[0].rstrip(".") for line in products} == {f"HGMMA.64x{columns}x16.F32{kind}"}
        fused, multiplied, added = kernel.machine_counts("FFMA", "FMUL", "FADD")
        assert fused == kernel.spilled == 0
        # Two products and two sums of each accumulator; few more products are part of integer division.
        each = HopperConfig.parse(config).accumulators
        assert (multiplied >= 2 * each, added >= 2 * each) == (product.alpha != 1, product.alpha != 1)
        assert product.alpha != 1 or added == 0


CLUSTERS = {("hopper", c): HOPPER[c] for c in ("128x192x64 s5 c2x1", "256x64x64 s5 c1x2", "w32x48x128 s4 c2x4")}
CLUSTERS["tf32", "128x32 s5 c2"] = pose("TN", "float32", "tf32x3:sm90/chain")


def test_a_producer_of_a_cluster_leaves_when_all_buffers_are_free(kernels: Kernels):
    """Behind the successor's release: blocks that only met once more left while arrivals were under way to them."""
    made = {asked: kernels.build(*asked, product)[-1] for asked, product in CLUSTERS.items()}
    for (_, config), kernel in made.items():
        words = [line.split(".")[0].split()[0] for line in kernel.machine_code]
        behind = words[words.index("PREEXIT") :]
        stages = int(config.partition(" s")[2].split()[0])
        assert sum(word == "SYNCS" for word in behind[: behind.index("EXIT")]) == stages
        assert words.count("UCGABAR_ARV") == 1


@pytest.mark.parametrize("config", ["64x64 k16", "16x32 k64 s4"])
def test_sgemm_rounds_each_step_of_an_epilogue(kernels: Kernels, config):
    (kernel,) = kernels.build("sgemm", config, full(pose(dtype="float32", contract="fma/chain", m=16)))
    tile = (TILES | RINGS)[config]
    each = tile.thread_m * tile.thread_n
    fused, multiplied, added = kernel.machine_counts("FFMA", "FMUL", "FADD")
    # An epilogue with all there is: two products and two sums of an element, or copies of them.
    assert fused > each
    assert min(multiplied, added) >= 2 * each
    assert kernel.spilled == 0


RING_LAYOUTS = ("NT", "NN", "SS", "TN", "NT")  # in turns; tiles for few rows are there for b across K as well
# Every other one, and so every layout; the last has most sums of a thread, others most blocks and most read ahead.
TRIED = list(RINGS)[1::2]


def test_rings_are_filled_past_registers_and_spill_nothing(kernels: Kernels):
    layouts = dict(zip(RINGS, itertools.cycle(RING_LAYOUTS), strict=False))
    posed = {ring: pose(layouts[ring], "float32", "fma/chain", n=840) for ring in RINGS}  # no tile's last round is full
    configs = [*TRIED, *(ring + SHARED for ring in TRIED[::4])]
    made = {config: kernels.build("sgemm", config, posed[config.removesuffix(SHARED)]) for config in configs}
    for config, (kernel,) in made.items():
        ring = config.removesuffix(SHARED)
        tile = RINGS[ring]
        fused, engine, copied, stored = kernel.machine_counts("FFMA", "UTMALDG", "LDGSTS", "STS")
        deep = [deep for deep, _ in copies(posed[ring], tile)]
        assert fused > 0, ring
        # Boxes of 32 of K, or of all lines of a panel where rows are contiguous.
        assert engine == boxed(posed[ring], tile) * sum(tile.k // 32 if along else 1 for along in deep), ring
        assert (copied > 0) == (engine == 0), ring
        assert kernel.spilled == 0, ring
        assert engine == 0 or not kernel.hasty(), ring
        assert stored <= 1, ring  # of the parts that warps take
        copiers = 1 if {v for _, v in copies(posed[ring], tile)} == {4} else 2
        even = (tile.m * tile.n // (tile.thread_m * tile.thread_n) // 32 + copiers) % 2 == 0
        # Warps of an even number look at the place that they got, and take turns at the quarters of a multiprocessor.
        assert any("SR_VIRTID" in line for line in kernel.instructions) == even, ring
        # Copies of a variable size cost ten instructions each: those of whole panels have none.
        whole = any(line.startswith("LDGSTS") and "ZFILL" not in line for line in kernel.machine_code)
        assert whole == (engine == 0), ring


@pytest.mark.parametrize(
    ("config", "k", "wide"),
    [
        ("64x64 k16", 1028, {"128"}),
        ("64x128 k8", 1026, {"64"}),
        ("64x64 k16", 1025, set()),
        ("128x128 k8", 1025, set()),
    ],
)
def test_tiles_load_as_much_at_once_as_lines_allow(kernels: Kernels, config, k, wide):
    (kernel,) = kernels.build("sgemm", config, pose(dtype="float32", contract="fma/chain", k=k))
    loads = [line.split(".") for line in kernel.machine_code if line.startswith("LDG")]
    found = [part for line in loads for part in line if part.isdigit()]
    tile = TILES[config]
    panels = 3  # of the walk: before it, and two in a turn
    values = (tile.m + tile.n) * tile.k * tile.thread_m * tile.thread_n // (tile.m * tile.n)  # of a panel, of a thread
    assert set(found) == wide  # tails are single values
    assert not wide or len(found) == panels * values * 32 // int(*wide)
    assert kernel.spilled == 0


@pytest.mark.parametrize(
    ("config", "contract"),
    [("128x64 s8", "tf32:sm90/chain"), ("128x32 s5 t", "tf32x3:sm90/leaf256"), ("128x32 s5", "tf32x3:sm90/tree4")],
)
def test_tf32_splits_multiplies_and_joins(kernels: Kernels, config, contract):
    made = kernels.build("tf32", config, full(pose("TN", "float32", contract)))
    assert [kernel.name for kernel in made] == ["split", "split", "tf32"] + ["meet"] * ("tree" in contract)
    products = [line for line in made[2].machine_code if line.startswith("HGMMA")]
    columns = config.split(" ")[0].split("x")[1]
    assert {line.split("_")[0].rstrip(".") for line in products} == {f"HGMMA.64x{columns}x8.F32.TF32"}
    for kernel in made:
        assert kernel.machine_counts("FFMA")[0] == kernel.spilled == 0
    # Alpha and beta, C and bias; of a tree where its 4 leaves have met in 3 sums.
    multiplied, added = made[-1].machine_counts("FMUL", "FADD")
    assert multiplied >= 2
    assert added >= 2 + 3 * ("tree" in contract)


def kind_and_sums(family: str, config: str) -> tuple[object, int]:
    """What a thread keeps beside its sums depends on, of a configuration, and how many sums it has."""
    tile, *rest = config.split()
    if family == "chain":
        return tile[0], elements(config)
    kind = [word for word in rest if word in ("pp", "e", "t")], any(word.startswith("c") for word in rest)
    if family == "tf32":
        return kind, int(tile.split("x")[1])
    hopper = HopperConfig.parse(config)
    return (kind, tile.startswith("w"), hopper.warpgroups), hopper.accumulators


def chosen() -> list[Any]:
    """(family, configuration, product) that the H200's table prefers: of each kind the one with most sums of a thread.

    Stages take no registers.
    """
    most: dict[str, tuple[int, Any]] = {}
    for row in json.loads(TABLE.read_text())["rows"]:
        operands, out = row["types"].split(">")
        for m, candidates in row["buckets"]:
            family, config = candidates[0][:2]
            if family == "cublaslt":
                continue
            kind, sums = kind_and_sums(family, config)
            key = str((family, kind, row["contract"], row["types"], row["layout"]))
            sizes = {"m": m, "n": row["n"], "k": row["k"], "batch": row["batch"]}
            product = pose(row["layout"][:2], operands.split("*")[0], row["contract"], out, **sizes)
            found = pytest.param(family, config, product, id=f"{family} {config} {row['contract']}")
            most[key] = max(most.get(key, (0, None)), (sums, found), key=lambda pair: pair[0])
    return [found for _, found in most.values()]


# Of leaves, 128 accumulators and 64 totals: what is left over lies in memory, outside the walk over K. The most bytes
# are those of the fastest kernel for weight gradients into float32.
SPILLED_BY_LEAVES = 232


@pytest.mark.parametrize(("family", "config", "product"), chosen())
def test_what_the_table_prefers_stays_in_registers(kernels: Kernels, family, config, product):
    leaves = family == "hopper" and product.contract.order.kind == "leaf"
    for kernel in kernels.build(family, config, product):
        assert kernel.spilled <= (SPILLED_BY_LEAVES if leaves else 0)


@pytest.mark.parametrize("n", [50256, 50257])
@pytest.mark.parametrize("config", ["w128x192x64 s5 pp", "w256x160x64 s4", "w64x256x64 s4"])
def test_turning_results_takes_no_more_registers_than_there_are(kernels: Kernels, config, n):
    """Whether a line of the result is whole stores of 16 bytes, or with an odd N one value after another."""
    (kernel,) = kernels.build("hopper", config, pose(m=333, n=n, k=768))
    assert kernel.spilled == 0


@pytest.mark.parametrize("layout", ["NT", "NN", "TN", "SS"])
def test_operands_out_of_step_are_copied_first(kernels: Kernels, layout):
    """Odd sizes leave lines at odd multiples of 2 bytes; what multiplies them afterwards is the kernel of even ones."""
    odd = pose(layout, m=65, n=129, k=1025)
    config = FAMILIES.found["padded"].configs(odd)[0]
    copy, multiply = kernels.build("padded", config, odd)
    assert (copy.name, multiply.name) == ("pad", "hopper")
    assert copy.spilled == multiply.spilled == 0
