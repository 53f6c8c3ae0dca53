"""Memory in which ranks leave partial sums for one another, and the kernels that do it: ranks/exchange.cu.

One allocation per rank, which all the others map, in this order: counts of calls and flags; the boxes of `one_shot` and
of `two_shot`, and its results, whose words are all ones before they arrive; the boxes of `gather`; and a place for
partial sums that were copied. Calls of one group follow one another on one stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ....base.dtypes import CODE, torch_name
from ..driver.facts import current_stream
from ..driver.kernel import Bound, ints, longs
from ..driver.nvrtc import function_of

WORD = 8  # floats that a thread takes at once; rows of results are whole words
BLOCKS, FEW_THREADS = 128, 128  # of every rank alike: a block hears from the same block of the others
COUNTS = {"ONE_SHOT": 0, "TWO_SHOT": 128, "GATHER": 256}
FLAGS, BOXES = 4096, 4096 + 2 * 16 * BLOCKS * 4
ONE_SHOT_BYTES, GATHER_BYTES = 4 << 20, 1 << 20  # most that one rank sends another in one call
TWO_SHOT_BYTES = 16 << 20  # most that all ranks send one; more is copied
NOTHING = 3  # the type of a bias that is not there


@dataclass(frozen=True)
class Mailbox:
    """The memory of all ranks.

    Attributes
    ----------
    addresses : tuple of int
        Of each rank's allocation, as this process maps it.
    rank : int
        This one.
    device : int
        Its GPU.
    share, results : int
        Bytes of partial sums that one rank may copy to another for `two_shot`, and of a whole result.
    timeout : float
        Seconds that a kernel waits for another rank before it stops with an error of the device.
    """

    addresses: tuple[int, ...]
    rank: int
    device: int
    share: int
    results: int
    timeout: float

    @staticmethod
    def nbytes(world: int, share: int, results: int) -> int:
        """Bytes of one rank's allocation."""
        return _ones(world) + results + 4 * world * GATHER_BYTES + world * share

    def prepare(self, memory: Any) -> None:
        """Set this rank's new allocation, a tensor of bytes, to what it holds before the first call."""
        memory.zero_()
        memory[BOXES : self._gathers].fill_(0xFF)

    @property
    def world(self) -> int:
        """Ranks."""
        return len(self.addresses)

    @property
    def _results(self) -> int:
        return _ones(self.world)

    @property
    def _gathers(self) -> int:
        return self._results + self.results

    def copied(self, source: int) -> int:
        """The offset, in the memory of every rank, of what rank `source` copies there for `two_shot`."""
        return self._gathers + 4 * self.world * GATHER_BYTES + source * self.share

    def one_shot(self, partial: Any, out: Any, bias: Any) -> None:
        """``out = round(tree(partial of every rank) + bias)``; all partial sums travel to all ranks.

        Parameters
        ----------
        partial : float32 tensor [rows, n]
            Contiguous; n is a multiple of 8, and it has at most `ONE_SHOT_BYTES`.
        out : tensor [rows, n]
            Contiguous.
        bias : tensor [n] or None
        """
        launch = _one_shot(self, *partial.shape, *_types(out, bias))
        launch(current_stream(self.device), partial.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr())

    def two_shot(self, partial: Any, out: Any, bias: Any, rows: int, *, there: bool, scatter: bool) -> None:
        """The same sum; each rank adds its share of the `rows`, and sends the result.

        Parameters
        ----------
        partial, bias
            As in `one_shot`. With `there`, this rank's share of the rows alone: the others' were copied to `copied`.
            Else a share has at most `TWO_SHOT_BYTES` over the number of ranks.
        out : tensor
            All rows, or with `scatter` this rank's share of them.
        """
        launch = _two_shot(self, rows, partial.shape[1], *_types(out, bias), there, scatter)
        launch(current_stream(self.device), partial.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr())

    def gather(self, x: Any, out: Any) -> None:
        """``out[r]`` is the contiguous `x` of rank r, bit for bit: whole words of 8 bytes, at most `GATHER_BYTES`."""
        _gather(self, x.numel() * x.element_size() // 8)(current_stream(self.device), x.data_ptr(), out.data_ptr())


def _ones(world: int) -> int:
    """The end of the boxes, of which a rank has two from each."""
    return BOXES + 2 * (world * ONE_SHOT_BYTES + TWO_SHOT_BYTES)


def _types(out: Any, bias: Any) -> tuple[int, int]:
    return CODE[torch_name(out.dtype)], NOTHING if bias is None else CODE[torch_name(bias.dtype)]


def _bind(box: Mailbox, name: str, types: tuple[int, int], words: int, params: list[Any]) -> Bound:
    most = 512 if box.world <= 8 else 256  # a thread holds a word of every rank
    macros = {"WORLD": box.world, "OUT": types[0], "BIAS": types[1], "BLOCKS": BLOCKS, "FLAGS": FLAGS, "THREADS": most}
    peers = b"".join(address.to_bytes(8, "little") for address in box.addresses).ljust(128, b"\0")
    threads = FEW_THREADS if words <= BLOCKS * FEW_THREADS else most
    return function_of("ranks/exchange.cu", name, box.device, {**macros, **COUNTS}).bind(
        [("map", peers), *params, ("u64", int(box.timeout * 1e9))],
        grid=(min(-(-words // threads), BLOCKS),), block=(threads,), pdl=True,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _one_shot(box: Mailbox, rows: int, n: int, out: int, bias: int) -> Bound:
    """``launch(stream, partial, out, bias)``."""
    words, across = rows * n // WORD, n // WORD
    rest = [*ints(words, across, box.rank), *longs(BOXES, ONE_SHOT_BYTES)]
    return _bind(box, "one_shot", (out, bias), words, ["ptr", "ptr", "ptr", *rest])


@lru_cache(maxsize=1024)
def _two_shot(box: Mailbox, rows: int, n: int, out: int, bias: int, there: bool, scatter: bool) -> Bound:
    """``launch(stream, partial, out, bias)``."""
    across = n // WORD
    share = -(-rows // box.world) * across
    boxes = (
        (box.copied(0), box.share) if there else (BOXES + 2 * box.world * ONE_SHOT_BYTES, TWO_SHOT_BYTES // box.world)
    )
    rest = [*ints(rows * across, share, across, box.rank), *longs(*boxes, box._results)]
    flags = ints(int(there), int(scatter))
    return _bind(box, "two_shot", (out, bias), share, ["ptr", "ptr", "ptr", *rest, *flags])


@lru_cache(maxsize=1024)
def _gather(box: Mailbox, words: int) -> Bound:
    """``launch(stream, x, out)``."""
    rest = [*ints(words, box.rank), *longs(box._gathers, 2 * GATHER_BYTES)]
    return _bind(box, "gather", (1, NOTHING), words, ["ptr", "ptr", *rest])
