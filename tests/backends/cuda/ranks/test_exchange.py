"""Sums over ranks through memory that all map. Ranks are streams of one GPU here, with memory of their own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.backends.cuda.compiled import Kernels, kernels  # noqa: F401

from isogemm.backends.cuda.ranks import mailbox
from isogemm.backends.cuda.ranks.mailbox import Mailbox

WORLDS = (2, 4, 8, 16)


@pytest.mark.parametrize("world", WORLDS)
def test_kernels_compile_without_spilling(kernels: Kernels, world: int) -> None:  # noqa: F811
    box = Mailbox(tuple(4096 * (i + 1) for i in range(world)), 1, 0, 1 << 20, 1 << 20, 1.0)
    mailbox._one_shot.__wrapped__(box, 3, 64, 1, mailbox.NOTHING)
    mailbox._two_shot.__wrapped__(box, 64, 64, 1, mailbox.NOTHING, False, True)
    mailbox._gather.__wrapped__(box, 8)
    assert [made.name for made in kernels.loaded] == ["one_shot", "two_shot", "gather"]
    assert not any(made.spilled for made in kernels.loaded)


def test_boxes_do_not_overlap() -> None:
    world, share, results = 4, 1 << 20, 1 << 19
    box = Mailbox((0,) * world, 0, 0, share, results, 1.0)
    assert max(mailbox.COUNTS.values()) + 8 <= mailbox.FLAGS
    assert mailbox.FLAGS + 2 * 16 * mailbox.BLOCKS * 4 <= mailbox.BOXES
    assert box._results == mailbox.BOXES + 2 * (world * mailbox.ONE_SHOT_BYTES + mailbox.TWO_SHOT_BYTES)
    assert box.copied(0) == box._gathers + 2 * world * 2 * mailbox.GATHER_BYTES  # with its number
    assert box.copied(world) == Mailbox.nbytes(world, share, results)


class Group:
    """Ranks on one GPU: a stream and an allocation each."""

    def __init__(self, world: int) -> None:
        import torch

        share, results = 1 << 20, 1 << 21
        self.memory = [
            torch.empty(Mailbox.nbytes(world, share, results), dtype=torch.uint8, device="cuda") for _ in range(world)
        ]
        at = tuple(memory.data_ptr() for memory in self.memory)
        self.boxes = [Mailbox(at, rank, 0, share, results, 20.0) for rank in range(world)]
        for box, memory in zip(self.boxes, self.memory, strict=True):
            box.prepare(memory)
        self.streams = [torch.cuda.Stream() for _ in range(world)]
        torch.cuda.synchronize()

    def each(self, call: Any) -> None:
        """``call(rank, box)`` on every rank's stream."""
        import torch

        for rank, box in enumerate(self.boxes):
            with torch.cuda.stream(self.streams[rank]):
                call(rank, box)

    def sum(self, how: str, parts: list[Any], outs: list[Any], bias: Any) -> None:
        rows = len(parts[0])
        share = -(-rows // len(parts))

        def call(rank: int, box: Mailbox) -> None:
            own = parts[rank]
            if how == "one shot":
                return box.one_shot(own, outs[rank], bias)
            if "there" in how:
                n = own.shape[1]
                for to, there in enumerate(own.split(share)):
                    if to != rank:
                        at = box.copied(rank)
                        self.memory[to][at : at + there.nbytes].view(own.dtype).view(-1, n).copy_(there)
                own = own.split(share)[rank]
            return box.two_shot(own, outs[rank], bias, rows, there="there" in how, scatter="scatter" in how)

        self.each(call)


def numbers(world: int, rows: int, n: int, seed: int) -> list[Any]:
    import torch

    torch.manual_seed(seed)
    parts = [torch.randn(rows, n, device="cuda") * 3 for _ in range(world)]
    parts[1][0, :3] = torch.tensor([-0.0, float("inf"), 3e38], device="cuda")
    parts[0].view(torch.int32)[0, 3] = -1  # the NaN that stands for a word that is not there
    return parts


def wrong(found: Any, want: Any) -> int:
    import torch

    words = torch.int32 if want.dtype is torch.float32 else torch.int16
    return int((found.view(words) != want.view(words)).sum())


CASES = [
    ("one shot", 2, 1, 1024), ("one shot", 2, 64, 4096), ("one shot", 4, 5, 1000), ("one shot", 8, 16, 512),
    ("two shot", 2, 300, 1024), ("two shot", 2, 3, 40), ("two shot", 4, 65, 512), ("two shot", 8, 9, 64),
    ("scatter", 2, 256, 1024), ("scatter", 4, 64, 256), ("there", 2, 257, 1024), ("there", 4, 128, 256),
    ("there, scatter", 2, 128, 1024), ("there, scatter", 4, 64, 256),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("how", "world", "rows", "n"), CASES)
def test_sums_have_the_bits_of_the_tree(how: str, world: int, rows: int, n: int) -> None:
    """Call after call in the same memory; results are poisoned before each."""
    torch = pytest.importorskip("torch")
    from isogemm.torch.distributed.tree import finished, fixed_sum

    group, share = Group(world), rows // world if "scatter" in how else rows
    types = itertools.product((torch.float32, torch.bfloat16, torch.float16), (None, torch.float32, torch.bfloat16))
    for call, (dtype, bias_dtype) in enumerate(types):
        parts = numbers(world, rows, n, call)
        bias = None if bias_dtype is None else torch.randn(n, device="cuda").to(bias_dtype)
        outs = [torch.full((share, n), float("nan"), device="cuda").to(dtype) for _ in parts]
        torch.cuda.synchronize()
        group.sum(how, parts, outs, bias)
        torch.cuda.synchronize()
        want = finished(fixed_sum(parts), bias, dtype)
        for rank, out in enumerate(outs):
            own = want[rank * share : (rank + 1) * share] if "scatter" in how else want
            assert wrong(out, own) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["one shot", "two shot", "scatter"])
def test_graphs_are_replayed(how: str) -> None:
    """A graph with one sum: replays follow one another in the same memory, and count as calls of their own."""
    torch = pytest.importorskip("torch")
    from isogemm.torch.distributed.tree import finished, fixed_sum

    rows, n, world = 64, 1024, 2
    share = rows // world if how == "scatter" else rows
    group, parts = Group(world), numbers(world, rows, n, 0)
    outs = [torch.zeros(share, n, device="cuda", dtype=torch.bfloat16) for _ in parts]
    group.sum(how, parts, outs, None)
    torch.cuda.synchronize()
    graphs = [torch.cuda.CUDAGraph() for _ in parts]
    for rank, graph in enumerate(graphs):
        alone = [parts[rank]] * world
        with torch.cuda.graph(graph, stream=group.streams[rank]):
            box = group.boxes[rank]
            if how == "one shot":
                box.one_shot(alone[rank], outs[rank], None)
            else:
                box.two_shot(alone[rank], outs[rank], None, rows, there=False, scatter=how == "scatter")
    for seed in range(1, 6):
        for own, new in zip(parts, numbers(world, rows, n, seed), strict=True):
            own.copy_(new)
        for out in outs:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        group.each(lambda rank, box: graphs[rank].replay())
        torch.cuda.synchronize()
        want = finished(fixed_sum(parts), None, torch.bfloat16)
        for rank, out in enumerate(outs):
            assert wrong(out, want[rank * share : (rank + 1) * share] if how == "scatter" else want) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("world", "words"), [(2, 1), (2, 1000), (4, 4096), (8, 333)])
def test_rows_are_gathered_bit_for_bit(world: int, words: int) -> None:
    torch = pytest.importorskip("torch")
    group = Group(world)
    for call in range(5):
        torch.manual_seed(call)
        own = [torch.randint(-(2**62), 2**62, (words,), device="cuda") for _ in range(world)]
        own[0][0] = -1
        outs = [torch.zeros(world, words, dtype=torch.int64, device="cuda") for _ in own]
        torch.cuda.synchronize()
        group.each(lambda rank, box, own=own, outs=outs: box.gather(own[rank], outs[rank]))
        torch.cuda.synchronize()
        assert all(torch.equal(out, torch.stack(own)) for out in outs)
