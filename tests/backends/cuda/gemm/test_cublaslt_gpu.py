"""cuBLASLt on the GPU: products whose bits are the contract's, on padded layouts, in batches, with C and bias."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from isogemm.backends.cuda.gemm.cublaslt.family import CublasLt
from isogemm.contract.reference import epilogue, evaluate
from isogemm.contract.spec import Contract
from isogemm.errors import DeviceError
from isogemm.problem.product import Addresses, Launch, Product, Strides

pytestmark = pytest.mark.gpu

TYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
CHAIN, LEAF = "tensor_core:sm90/chain", "tensor_core:sm90/leaf4096"
PAD = 8  # elements between rows: leading dimensions stay multiples of 16 bytes
POISON = {2: 0x7FC1, 4: 0x7FC00BAD}
TRIED = 16  # configurations among which one has to have the contract's bits


@dataclass
class Placed:
    """Matrices [items, rows, columns] in a NaN-filled buffer on the GPU, rows ("N") or columns ("T") contiguous."""

    memory: Any
    items: int
    rows: int
    columns: int
    letter: str

    @classmethod
    def of(cls, values: np.ndarray[Any, Any], letter: str) -> Placed:
        import torch

        items, rows, columns = values.shape
        inner, outer = (columns, rows) if letter == "N" else (rows, columns)
        base = np.full((items, outer, inner + PAD), np.nan, values.dtype)
        base[:, :, :inner] = values if letter == "N" else values.transpose(0, 2, 1)
        words = base.view(f"i{values.itemsize}")
        return cls(torch.from_numpy(words).cuda(), items, rows, columns, letter)

    @property
    def address(self) -> int:
        return int(self.memory.data_ptr())

    @property
    def strides(self) -> Strides:
        batch, ld, _ = self.memory.stride()
        batch = batch if self.items > 1 else 0
        return Strides(ld, 1, batch) if self.letter == "N" else Strides(1, ld, batch)

    def poison(self) -> None:
        """Fill everything with a NaN that no product returns."""
        self.memory.fill_(POISON[self.memory.element_size()])

    def read(self) -> np.ndarray[Any, Any]:
        """The bits of poisoned matrices, after checking that nothing beside them was written."""
        words: np.ndarray[Any, Any] = self.memory.cpu().numpy()
        inner = self.columns if self.letter == "N" else self.rows
        assert (words[:, :, inner:] == POISON[words.itemsize]).all()
        kept = words[:, :, :inner]
        return kept if self.letter == "N" else kept.transpose(0, 2, 1)


@dataclass
class Case:
    """A product on the GPU, and what it has to be."""

    product: Product
    a: Placed
    b: Placed
    out: Placed
    expected: np.ndarray[Any, Any]
    c: Any = None
    bias: Any = None

    @property
    def at(self) -> Addresses:
        bias = 0 if self.bias is None else int(self.bias.data_ptr())
        return Addresses(
            self.a.address, self.b.address, self.out.address, 0 if self.c is None else self.c.address, bias
        )

    def wrong(self) -> int:
        """Elements of out that differ from the definition."""
        return int((self.out.read() != self.expected.view(f"i{self.expected.itemsize}")).sum())


def case(
    sizes: tuple[int, int, int, int] = (1, 40, 136, 328),
    layout: str = "NT",
    dtype: str = "bfloat16",
    out_dtype: str = "bfloat16",
    order: str = CHAIN,
    **more: Any,
) -> Case:
    items, m, n, k = sizes
    rng = np.random.default_rng(7)
    a = rng.standard_normal((items, m, k), np.float32).astype(TYPES[dtype])
    b = rng.standard_normal((items, k, n), np.float32).astype(TYPES[dtype])
    beta, accumulate, with_bias = more.get("beta", 0.0), more.get("accumulate", False), more.pop("bias", False)
    c = (20 * rng.standard_normal((items, m, n), np.float32)).astype(TYPES[out_dtype])
    bias = (20 * rng.standard_normal(n, np.float32)).astype(TYPES[out_dtype]) if with_bias else None
    sums = [evaluate(a[i], b[i], order, c[i] if accumulate else None) for i in range(items)]
    expected = np.stack(
        [
            epilogue(
                acc, alpha=more.get("alpha", 1.0), beta=beta, c=c[i] if beta else None, bias=bias,
                out_dtype=TYPES[out_dtype],
            )
            for i, acc in enumerate(sums)
        ]
    )  # fmt: skip
    places = [Placed.of(a, layout[0]), Placed.of(b, layout[1]), Placed.of(np.full_like(c, np.nan), "N")]
    held = Placed.of(c, "N") if beta or accumulate else None
    strides = {name: x.strides for name, x in zip(("a", "b", "out"), places, strict=True)}
    product = Product(
        m, n, k, dtype, dtype, out_dtype, Contract.parse(order), **strides, batch=items,
        c=None if held is None else held.strides, dtype_c=None if held is None else out_dtype,
        dtype_bias=out_dtype if with_bias else None, **more,
    )  # fmt: skip
    return Case(product, *places, expected, held, _on_gpu(bias))


def _on_gpu(x: np.ndarray[Any, Any] | None) -> Any:
    import torch

    return None if x is None else torch.from_numpy(x.view(f"i{x.itemsize}")).cuda()


def stream() -> int:
    import torch

    return int(torch.cuda.current_stream().cuda_stream)


def admitted(case: Case) -> tuple[str, Launch]:
    """The first configuration with the definition's bits."""
    pytest.importorskip("nvmath")
    family = CublasLt()
    configs = family.configs(case.product)
    assert configs
    for config in configs[:TRIED]:
        assert family.supports(case.product, config)
        launch = family.bind(case.product, config, 0)
        case.out.poison()
        launch(case.at, stream())
        if not case.wrong():
            return config, launch
    pytest.fail(f"none of {min(TRIED, len(configs))} configurations has the contract's bits, of {configs[0]} and on")


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize(("dtype", "out_dtype"), [("bfloat16",) * 2, ("bfloat16", "float32"), ("float16",) * 2])
@pytest.mark.parametrize("items", [1, 3])
def test_products_have_the_chain_s_bits(layout: str, dtype: str, out_dtype: str, items: int) -> None:
    admitted(case((items, 40, 136, 328), layout, dtype, out_dtype))


@pytest.mark.parametrize("sizes", [(1, 1, 136, 328), (1, 40, 1, 328), (1, 257, 136, 16), (1, 3, 8, 8)])
def test_thin_products(sizes: tuple[int, int, int, int]) -> None:
    admitted(case(sizes))


@pytest.mark.parametrize(
    "more",
    [
        {"bias": True},
        {"alpha": -1.5},
        {"beta": 1.0},
        {"beta": float(np.float32(0.3))},
        {"beta": 1.0, "bias": True},
        {"alpha": float(np.float32(0.7)), "bias": True},
    ],
)
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_epilogues_round_as_the_contract_says(more: dict[str, Any], out_dtype: str) -> None:
    admitted(case(out_dtype=out_dtype, **more))


def test_one_leaf_accumulates_into_float32() -> None:
    admitted(case(out_dtype="float32", order=LEAF, accumulate=True))


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_leaves_in_turn(layout: str, accumulate: bool) -> None:
    order = "tensor_core:sm90/leaf128"  # of 328: two, and a shorter one
    admitted(case((1, 40, 136, 328), layout, out_dtype="float32", order=order, accumulate=accumulate))


def test_bits_and_configurations_survive_their_text_and_a_graph() -> None:
    import torch

    one = case((1, 64, 256, 512))
    config, launch = admitted(one)
    again = CublasLt().bind(one.product, config, 0)
    one.out.poison()
    again(one.at, stream())
    assert not one.wrong()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(one.at, stream())
    one.out.poison()
    graph.replay()
    assert not one.wrong()


def test_another_number_of_rows_keeps_the_bits() -> None:
    one = case((1, 96, 256, 512))
    config, _ = admitted(one)
    for m in (1, 7, 64, 95):
        launch = CublasLt().bind(one.product.with_m(m), config, 0)
        one.out.poison()
        launch(one.at, stream())
        assert np.array_equal(one.out.read()[:, :m], one.expected.view("i2")[:, :m])
        assert (one.out.read()[:, m:] == POISON[2]).all()


def test_threads_share_a_launch_on_streams_of_their_own() -> None:
    import torch

    one = case((1, 64, 256, 512), bias=True)
    _, launch = admitted(one)
    torch.cuda.synchronize()
    wrong: list[int] = []

    def run() -> None:
        mine = replace_out(one)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                mine.out.poison()
                launch(mine.at, stream())
                torch.cuda.current_stream().synchronize()
                wrong.append(mine.wrong())

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0] * 200


def replace_out(one: Case) -> Case:
    return replace(one, out=replace(one.out, memory=one.out.memory.clone()), bias=one.bias.clone())


def test_a_launch_finds_its_device() -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    one = case((1, 64, 256, 512), bias=True)
    config, _ = admitted(one)
    launch = CublasLt().bind(one.product, config, 1)
    moved = [replace(x, memory=x.memory.to("cuda:1")) for x in (one.a, one.b, one.out)]
    there = replace(one, a=moved[0], b=moved[1], out=moved[2], bias=one.bias.to("cuda:1"))
    there.out.poison()
    torch.cuda.synchronize(1)
    launch(there.at, int(torch.cuda.current_stream(1).cuda_stream))
    assert torch.cuda.current_device() == 0
    assert not there.wrong()


def test_unaligned_addresses_are_refused_before_anything_runs() -> None:
    one = case((1, 64, 256, 512))
    _, launch = admitted(one)
    one.out.poison()
    at = one.at
    with pytest.raises(DeviceError, match="aligned"):
        launch(at._replace(a=at.a + 2), stream())
    assert (one.out.read() == POISON[2]).all()
