"""What every kernel of products with quantized weights has: what it takes, its configuration, its trial, its launch.

A kernel is a file with one such object, and a row of `family`'s table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from ....base.dtypes import CODE
from ....errors import DTypeError, LayoutError, LimitError
from ....planner.bench import Bench
from ..driver import facts
from ..gemm.fp32 import LIMIT
from .case import QuantCase, case_of
from .layout import FORMATS, Packed, PackedLayout, layout
from .pack import lay_out
from .trial import HOME, try_product

Launch = Callable[[int, int, int, int, int], None]
"""``launch(stream, x, w, out, bias)``: raw handles and addresses, 0 where there is no bias."""


def filling(blocks: int, multiprocessors: int) -> int:
    """Blocks, at least so many, that are a whole share of the multiprocessors.

    Blocks of the next launch come before these have ended. Where some multiprocessors had none of these, they got two
    of those, and all waited for them: 128 blocks took 10.7 us on an H200 where 132 took 7.1.
    """
    for share in (4, 3, 2, 1):
        if blocks <= multiprocessors // share:
            return multiprocessors // share
    return blocks


def work_of(lay: PackedLayout) -> float:
    """How long weights of a format take to dequantize, against those of Q4_0."""
    if lay.format.sub == 16:
        return 1.74
    return 1.27 if lay.floats_each > 1 else 1.0 if lay.bits <= 5 else 1.12


class QuantKernel:
    """A kernel; its subclasses say how it computes."""

    name: str
    path: str  # of the cases that it computes
    home = HOME

    def takes(self, case: QuantCase) -> bool:
        """Whether it computes a case, but for how operands lie."""
        return case.format in FORMATS and case.dtype in CODE and max(case.m, case.n, case.k) <= LIMIT

    def configure(self, case: QuantCase, multiprocessors: int) -> Any:
        """The configuration that is likely the fastest."""
        raise NotImplementedError

    def microseconds(self, case: QuantCase, config: Any, device: int) -> float | None:
        """The time to expect, by a model; None where there is none."""
        return None

    def configs(self, case: QuantCase) -> list[Any]:
        """The configuration that is likely the fastest on an H200."""
        return [self.configure(case, 132)] if self.takes(case) else []

    def supports(self, case: QuantCase, config: Any) -> bool:
        """Whether it computes a case; `configure` makes no illegal configuration."""
        return case.path == self.path and self.takes(case)

    def build(self, case: QuantCase, config: Any, device: int) -> Launch | None:
        """Compile and bind; None where it runs with tensors, see `run_tensors`."""
        raise NotImplementedError

    def bind(self, case: QuantCase, config: Any, device: int) -> Launch | None:
        """`build`, or what it made before; without `config` of the likeliest one."""
        return _built(self, case, config, device)

    def tile(self, config: Any) -> int:
        """Rows of x of which one tile is made; sizes the trial."""
        raise NotImplementedError

    def counted(self, config: Any) -> int:
        """Rows of x up to which the number of their tiles of 8 selects what is compiled."""
        return 32

    def check(self, case: QuantCase) -> None:
        """Refuse what it cannot take.

        Raises
        ------
        LimitError, DTypeError, LayoutError
        """
        if not self.takes(case):
            size = max(case.m, case.n, case.k)
            raise LimitError("sizes of a quantized product", limit=f"up to {LIMIT}", value=size, nearest=LIMIT)

    def code(self, case: QuantCase, config: Any) -> str:
        """What selects compiled code; and K's size and tail, as a verdict on few blocks says little of many."""
        bias = case.dtype_bias or "no"
        alone = " alone" if case.m == 1 else ""
        types = f"{case.format} {case.dtype}>{case.dtype_out} {bias} bias"
        tiles = f"{-(-case.m // 8)} tiles" if case.m <= self.counted(config) else "many tiles"
        k = f"k of {min(case.k, 2**13 - 1).bit_length()} bits, % 256 = {case.k % 256}"
        return f"{case.arithmetic} {types}, {tiles}{alone}, {k}{', wide' if case.wide else ''}, {config}"

    def trial(self, bench: Bench, case: QuantCase, config: Any) -> str:
        """See `isogemm.planner.family.Family`."""
        return try_product(bench, case, self.tile(config), partial(self.run, config=config), lay_out)

    def run(self, x: Any, packed: Packed, out: Any, bias: Any = None, config: Any = None) -> None:
        """out[m, n] = x[m, k] @ W[n, k].T + bias[n]: accumulated and added in float32, rounded once.

        Enqueued on torch's current stream of the device, without synchronisation; may be captured.

        Parameters
        ----------
        x : torch.Tensor
            [m, k] of float32, bfloat16 or float16.
        packed : Packed
            W, on the same device.
        out : torch.Tensor
            [m, n], of any of these types.
        bias : torch.Tensor, optional
            [n], of any of these types.
        config : optional
            A configuration in place of the usual one.

        Raises
        ------
        ShapeError, DTypeError, DeviceError, LimitError, LayoutError
            Operands that the kernel does not take.
        """
        case = case_of(self.path, x, packed, out, bias)
        if not case.m or not case.n:
            return
        self.check(case)
        device = packed.data.get_device()
        launch = self.bind(case, config, device)
        if launch is None:
            self.run_tensors(x, packed, out, bias)
            return
        launch(
            facts.current_stream(device), x.data_ptr(), packed.data.data_ptr(), out.data_ptr(),
            0 if bias is None else bias.data_ptr(),
        )  # fmt: skip

    def run_tensors(self, x: Any, packed: Packed, out: Any, bias: Any) -> None:
        """The same, of a case without a launch on addresses."""
        raise NotImplementedError


class RoundedKernel(QuantKernel):
    """One of weights rounded to the type of x, bfloat16 or float16: tensor cores take x as it lies."""

    path = "same"
    most = LIMIT  # rows of x

    def takes(self, case: QuantCase) -> bool:
        sized = min(case.m, case.n, case.k) > 0 and case.m <= self.most and case.format in FORMATS
        return sized and case.dtype in ("bfloat16", "float16") and layout(case.format).tile_bytes(case.k) < 2**31

    def check(self, case: QuantCase) -> None:
        if case.m > self.most:
            raise LimitError("rows of such a product", limit=f"0 to {self.most}", value=case.m, nearest=self.most)
        if case.dtype not in ("bfloat16", "float16"):
            raise DTypeError(
                "x of a quantized product", limit="bfloat16 or float16", value=case.dtype, nearest="bfloat16"
            )
        apart = case.x[1] != 1 or (case.m > 1 and (case.x[0] % 8 or case.x[0] < case.k))
        if apart or case.x_align < 16 or (case.n > 1 and case.out[1] != 1):
            raise LayoutError(
                "rows of x and out", limit="contiguous, and those of x beginning at multiples of 16 bytes",
                value=f"strides {list(case.x)} from a multiple of {case.x_align} bytes on, and {list(case.out)}",
                nearest="contiguous tensors",
            )  # fmt: skip
        super().check(case)


@lru_cache(maxsize=4096)
def _built(kernel: QuantKernel, case: QuantCase, config: Any, device: int) -> Launch | None:
    chosen = kernel.configure(case, facts.device(device).multiprocessors) if config is None else config
    return kernel.build(case, chosen, device)
