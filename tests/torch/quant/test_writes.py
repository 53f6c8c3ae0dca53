"""Bytes of quantized weights that somebody writes: no crash, no change of a file, and the next product sees them."""

from __future__ import annotations

import copy
from pathlib import Path
from pickle import dumps, loads

import numpy as np
import pytest
from tests.process import python
from tests.quant.test_damage import KINDS, gguf_file
from tests.torch.quant.test_linear import drawn, same, weight

import isogemm
from isogemm.errors import FormatError
from isogemm.quant import QuantizedMatrix, load

torch = pytest.importorskip("torch")

import isogemm.torch as iso  # noqa: E402
from isogemm.torch.quant import ops as quantized_ops  # noqa: E402


@pytest.fixture
def file(tmp_path) -> Path:
    w = weight("Q4_0", 40)
    data = gguf_file([("w", w.shape, KINDS.Q4_0, 0)], w.rows.tobytes())
    (tmp_path / "w.gguf").write_bytes(data)
    (tmp_path / "w.rows").write_bytes(w.rows.tobytes())
    return tmp_path / "w.gguf"


def layers(file: Path) -> dict[str, iso.QuantizedLinear]:
    """Over memory that nobody should write: a mapped file, a mapping of one's own, bytes, an array that is marked."""
    rows = file.with_suffix(".rows")
    marked = np.fromfile(rows, np.uint8)
    marked.flags.writeable = False
    own = {"mapped by hand": np.memmap(rows, np.uint8, "r"), "bytes": rows.read_bytes(), "marked": marked}
    found = {"a file": load(file)["w"], "rows of a file": load(file)["w"][::1]}
    found |= {name: QuantizedMatrix.from_bytes(data, shape=(40, 64), format="Q4_0") for name, data in own.items()}
    return {name: iso.QuantizedLinear(w) for name, w in found.items()}


def write_everywhere(path: str) -> None:
    """Run in a process of its own, which a write into read-only pages would end."""
    file, other, x = Path(path), weight("Q4_0", 40, seed=7), drawn(3, 64, seed=1)
    before, source = file.read_bytes(), file.with_suffix(".rows").read_bytes()
    for name, layer in layers(file).items():
        for blocks in (lambda: layer.state_dict()["weight"], lambda: layer.blocks):  # noqa: B023
            same(layer(x), isogemm.linear(x, weight("Q4_0", 40)))
            blocks().copy_(torch.from_numpy(other.rows))
            same(layer(x), isogemm.linear(x, other))
            same(layer(x.bfloat16()), isogemm.linear(x.bfloat16(), other))
            same(isogemm.linear(x, layer.weight), isogemm.linear(x, other))
            same(iso.linear(x.clone().requires_grad_(), layer.weight), isogemm.linear(x, other))
            blocks().copy_(torch.from_numpy(weight("Q4_0", 40).rows))
        print(name)
    assert file.read_bytes() == before
    assert file.with_suffix(".rows").read_bytes() == source
    assert np.frombuffer(source, np.uint8).tobytes() == weight("Q4_0", 40).rows.tobytes()


def test_writes_neither_crash_nor_reach_a_file_nor_are_lost(file):
    code = f"from tests.torch.quant.test_writes import write_everywhere as w; w({str(file)!r})"
    assert python("-c", code).split("\n")[:-1] == ["a file", "rows of a file", "mapped by hand", "bytes", "marked"]


def test_a_mapped_weight_is_not_copied(file):
    w = load(file)["w"]
    assert not w.rows.flags.writeable
    for read in (iso.QuantizedLinear(w).state_dict()["weight"], quantized_ops.blocks_of(w)):
        assert read.data_ptr() == w.rows.ctypes.data
    with pytest.raises(ValueError, match="read-only"):
        w.rows[0, 0] = 1


def test_where_memory_cannot_be_promised_a_file_is_mapped_all_the_same(file, monkeypatch):
    asked = []

    class Memmap(np.memmap):
        def __new__(cls, path, dtype=np.uint8, mode="r"):
            asked.append(mode)
            if mode == "c":
                raise OSError(12, "Cannot allocate memory")
            return super().__new__(cls, path, dtype, mode)

    monkeypatch.setattr(np, "memmap", Memmap)
    w, x = load(file)["w"], drawn(3, 64)
    assert asked[:2] == ["c", "r"]
    same(isogemm.linear(x, w), isogemm.linear(x, weight("Q4_0", 40)))
    read = iso.QuantizedLinear(w).state_dict()["weight"]
    read.zero_()  # a copy: those pages cannot be written
    assert load(file)["w"].rows.any()


def test_damage_that_is_written_is_found_by_the_next_product():
    layer, x = iso.QuantizedLinear(weight("Q4_0", 40)), drawn(3, 64)
    layer(x)
    layer.blocks[3, 18:20] = 255
    for call in (lambda: layer(x), lambda: layer(x.bfloat16()), lambda: isogemm.linear(x, layer.weight)):
        with pytest.raises(FormatError, match="scale d of block 1 of row 3"):
            call()


@pytest.mark.parametrize("taken", [lambda w: w[2:5], lambda w: w.in_place(), copy.deepcopy, lambda w: loads(dumps(w))])
def test_damage_that_is_written_is_found_in_what_is_taken_of_a_matrix(taken):
    """Nobody has looked at the matrix between the write and the slice, or the copy."""
    layer, x = iso.QuantizedLinear(weight("Q4_0", 40)), drawn(3, 64)
    layer(x)
    layer.blocks[3, 18:20] = 255
    with pytest.raises(FormatError, match="scale d of block 1"):
        isogemm.linear(x, taken(layer.weight))


@pytest.mark.filterwarnings("ignore")  # torch's own, about itself
def test_compiled_layers_see_what_is_written():
    layer, other, x = iso.QuantizedLinear(weight("Q4_0", 40)), weight("Q4_0", 40, seed=7), drawn(3, 64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        same(compiled(x), layer(x))
        layer.state_dict()["weight"].copy_(torch.from_numpy(other.rows))
        same(compiled(x), isogemm.linear(x, other))
        same(layer(x), isogemm.linear(x, other))


def test_writes_through_several_tensors_of_one_memory_are_seen():
    """Each has a count of its own, and these counts may meet."""
    memory, x = np.array(weight("Q4_0", 40).rows), drawn(3, 64, seed=1)
    one, other = torch.from_numpy(memory), torch.from_numpy(memory)
    for turn, blocks in enumerate((one, other, one, other, other, one)):
        want = weight("Q4_0", 40, seed=turn)
        blocks.copy_(torch.from_numpy(want.rows))
        same(quantized_ops.linear_forward_op(x, blocks, None, "Q4_0", 40, 64, "", "", None), isogemm.linear(x, want))


@pytest.mark.parametrize("n", [40, 7])
def test_writes_in_inference_mode_are_seen(n):
    """torch does not count them."""
    x = drawn(3, 64, seed=1)
    with torch.inference_mode():
        blocks = torch.from_numpy(weight("Q4_0", n).rows).clone()
        for seed in range(3):
            want = weight("Q4_0", n, seed=seed)
            blocks.copy_(torch.from_numpy(want.rows))
            for x_ in (x, x.bfloat16()):
                got = quantized_ops.linear_forward_op(x_, blocks, None, "Q4_0", n, 64, "", "", None)
                same(got, isogemm.linear(x_, want))


def test_what_is_made_while_another_thread_writes_is_not_kept(monkeypatch):
    """The product that is under way may have either weight; those after it have the new one."""
    from isogemm.backends.cpu.quant import products

    layer, other, x = iso.QuantizedLinear(weight("Q4_0", 40)), weight("Q4_0", 40, seed=7), drawn(3, 64)
    prepare = products.prepare

    def slowly(*given):
        made = prepare(*given)
        monkeypatch.setattr(products, "prepare", prepare)
        layer.blocks.copy_(torch.from_numpy(other.rows))  # and another product
        same(layer(x), isogemm.linear(x, other))
        return made

    monkeypatch.setattr(products, "prepare", slowly)
    layer(x)
    same(layer(x), isogemm.linear(x, other))


def test_weights_in_place_and_slices_of_them():
    """What is read from the blocks themselves needs no copy anew."""
    w, other, x = weight("Q4_0", 40), weight("Q4_0", 40, seed=7), drawn(3, 64)
    native = QuantizedMatrix.from_bytes(w.rows.tobytes(), shape=w.shape, format="Q4_0").in_place()
    layer = iso.QuantizedLinear(native)
    same(layer(x), isogemm.linear(x, w))
    layer.blocks.copy_(torch.from_numpy(other.rows))
    same(layer(x), isogemm.linear(x, other))
    same(isogemm.linear(x, native[:20]), isogemm.linear(x, other[:20]))
