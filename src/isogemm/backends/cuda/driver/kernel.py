"""A thin launcher over libcuda: cubin in, function out, and a launch that costs one C call.

The driver is reached through ctypes, so nothing has to be compiled where this package is installed. ::

    kernel = load(cubin, "axpy", device=0)
    launch = kernel.bind(["ptr", "ptr", ("f32", 2.0), "i32"], grid=(132,), block=(256,), pdl=True)
    launch(stream, x_address, y_address, n)      # stream: a raw handle; values: those parameters that are not fixed

A parameter is a type name, whose value each launch gives, or a pair (type name, value), which is fixed when bound.
Types: see `TYPES`; ``map`` takes the 128 bytes of a tensor map (tensormap.py).

Threads
-------
A launch writes its stream and values into a block of memory of its own (configuration, parameters and the pointers
to them) and gives the block back afterwards. Blocks lie on a list, whose pop and append are atomic: two threads, or a
finaliser that launches in the middle of a launch, never share one. No lock is held and the GIL is released during the
driver's call, which may wait for room in a full queue: a callback that the GPU waits for may need either.

Contexts and capture
--------------------
Kernels belong to the primary context of their device, which is torch's. Where another one is current, or none yet in
this thread, the driver refuses a launch without side effects, and the launch is repeated in the kernel's own context.
Loading is legal while a stream is captured into a CUDA graph, in this thread or in another one. Modules are never
unloaded: a graph or a queued launch may still use them.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Callable, Sequence
from ctypes import byref, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple

from ....errors import DeviceError, LimitError
from .libcuda import INVALID_CONTEXT, Driver, context, driver, relaxed

__all__ = ["TYPES", "Bound", "Kernel", "Parameter", "ints", "load", "longs"]

TYPES = {
    "ptr": "Q",
    "i1": "?",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
    "f32": "f",
    "f64": "d",
    "map": "128s",
}
Parameter = str | tuple[str, Any]
Bound = Callable[..., None]


def longs(*values: int) -> list[Parameter]:
    """Parameters of 64 bits that are fixed when bound."""
    return [("i64", value) for value in values]


def ints(*values: int) -> list[Parameter]:
    """Parameters of 32 bits that are fixed when bound."""
    return [("i32", value) for value in values]


INVALID_VALUE, INVALID_HANDLE = 1, 400  # CUresult
MAX_SHARED_OPTIN = 97  # CUdevice_attribute
RESERVED_SHARED, SHARED_STEP = (
    1024,
    128,
)  # bytes that the system takes of each block's; shared memory comes in such steps
# CUfunction_attribute
MAX_THREADS, STATIC_SHARED, MAX_DYNAMIC_SHARED = 0, 1, 8
CLUSTER, PROGRAMMATIC = 4, 6  # CUlaunchAttributeID
GRID_LIMITS = (2**31 - 1, 65535, 65535)
# Triton's kernels take pointers to scratch memory after their own parameters: two in 3.6, none or one in others.
SPARE = 4


@functools.cache
def load(cubin: bytes, name: str, device: int) -> Kernel:
    """Load a function of a cubin into the primary context of a device; the same arguments give the same kernel."""
    return load_into(driver(), cubin, name, device)


def load_into(on: Driver, cubin: bytes, name: str, device: int) -> Kernel:
    """`load` without memory, through a given driver."""
    doing = f"loading kernel {name} on device {device}"
    with context(device, on), relaxed(on):
        module = on.handle("cuModuleLoadData", cubin, doing=doing)
        function = on.handle("cuModuleGetFunction", module, name.encode(), doing=doing)
        if on.has("cuFuncLoad"):
            on.call("cuFuncLoad", function, doing=doing)  # now, not lazily at a launch that is captured
        threads, static = (
            on.integer("cuFuncGetAttribute", attribute, function, doing=doing)
            for attribute in (MAX_THREADS, STATIC_SHARED)
        )
        sizes = _parameter_sizes(on, function, doing)
        room = on.device_attribute(MAX_SHARED_OPTIN, device) - static
    return Kernel(on, name, device, function, threads, static, sizes, room)


def _parameter_sizes(on: Driver, function: int, doing: str) -> tuple[int, ...] | None:
    """Bytes of each parameter of a kernel; None where the driver is too old to say."""
    if not on.has("cuFuncGetParamInfo"):
        return None
    sizes: list[int] = []
    offset, size = c_size_t(), c_size_t()
    while True:
        code = on.functions["cuFuncGetParamInfo"](function, len(sizes), byref(offset), byref(size))
        if code == INVALID_VALUE:  # past the last one
            return tuple(sizes)
        if code:
            raise on.error(code, doing)
        sizes.append(size.value)


@dataclass(frozen=True, eq=False)
class Kernel:
    """A loaded kernel."""

    driver: Driver
    name: str
    device: int
    function: int  # the CUfunction
    max_threads: int  # that a block of it may have
    static_shared: int  # bytes of a block
    parameter_sizes: tuple[int, ...] | None  # as the driver reports them; None where it is too old to
    max_shared: int  # bytes of dynamic shared memory that a block may ask for

    def bind(
        self,
        params: Sequence[Parameter],
        *,
        grid: Sequence[int],
        block: Sequence[int],
        shared: int = 0,
        cluster: Sequence[int] = (1,),
        pdl: bool = False,
    ) -> Bound:
        """Fix everything about a launch but the stream and the values of those parameters that are not pairs.

        Parameters
        ----------
        params : sequence of str or (str, value)
            The kernel's parameters in order; names of `TYPES`. Scratch pointers of Triton's may be left out.
        grid, block, cluster : sequence of 1 to 3 int
            Blocks, threads, and blocks of a cluster, along x, y, z. A grid without blocks launches nothing.
        shared : int
            Bytes of dynamic shared memory.
        pdl : bool
            Let the kernel start before its predecessor in the stream ends; it has to execute griddepcontrol.wait.

        Returns
        -------
        callable
            ``launch(stream, *values)``: enqueue; `stream` is a raw handle, 0 the default stream.

        Raises
        ------
        LimitError
            Grid, block or shared memory beyond what the device or the kernel can take.
        DeviceError
            The parameters are not those of the kernel.
        """
        grid, block, cluster = _three(grid), _three(block), _three(cluster)
        self._check_shape(grid, block)
        self._check_parameters(params)
        self._allow_shared(shared)
        if 0 in grid:
            return lambda stream, *values: None
        head = struct.pack("<7I4x", *grid, *block, shared)
        return _bound(self, head, _attributes(cluster, pdl), params)

    def shared_of(self, blocks: int) -> int:
        """Bytes of dynamic shared memory at which a multiprocessor holds `blocks` blocks and no more.

        A launch that begins while the one before ends has its blocks wherever there is room then, and not evenly.
        """
        each = self.static_shared + RESERVED_SHARED  # of every block, beside what it asks for
        held = self.max_shared + each  # by a multiprocessor: one block may ask for all of it
        asked = (held // (blocks + 1) // SHARED_STEP + 1) * SHARED_STEP - each
        return min(self.max_shared, max(0, asked))

    def _check_shape(self, grid: tuple[int, ...], block: tuple[int, ...]) -> None:
        for axis, size, limit in zip("xyz", grid, GRID_LIMITS, strict=True):
            if not 0 <= size <= limit:
                raise LimitError(
                    f"grid of {self.name} along {axis}", limit=f"0 to {limit} blocks", value=size, nearest=limit
                )
        threads = math.prod(block)
        if not 0 < threads <= self.max_threads:
            raise LimitError(
                f"block of {self.name}",
                limit=f"1 to {self.max_threads} threads",
                value=threads,
                nearest=self.max_threads,
            )

    def _check_parameters(self, params: Sequence[Parameter]) -> None:
        """Compare sizes with the loaded kernel's, so that a wrong signature cannot read past its values."""
        given = tuple(struct.calcsize("<" + TYPES[_type(p)]) for p in params)
        known = self.parameter_sizes
        if known is None:
            return
        extra = known[len(given) :]
        if known[: len(given)] != given or len(extra) > SPARE or any(size != 8 for size in extra):
            raise DeviceError(
                f"parameters of {self.name}", limit=f"sizes {known}", value=f"sizes {given}", nearest=known
            )

    def _allow_shared(self, shared: int) -> None:
        if not 0 <= shared <= self.max_shared:
            raise LimitError(
                f"dynamic shared memory of {self.name}",
                limit=f"0 to {self.max_shared} bytes a block on device {self.device}",
                value=shared,
                nearest=self.max_shared,
            )
        # The attribute is a limit, not a request: setting it to the most there is once allows every launch.
        if shared + self.static_shared > 48 * 1024:
            doing = f"allowing {shared} bytes of shared memory for {self.name}"
            with context(self.device, self.driver), relaxed(self.driver):
                self.driver.call("cuFuncSetAttribute", self.function, MAX_DYNAMIC_SHARED, self.max_shared, doing=doing)


def _three(sizes: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1, 1)[:3]
    return int(x), int(y), int(z)


def _type(parameter: Parameter) -> str:
    return parameter if isinstance(parameter, str) else parameter[0]


def _attributes(cluster: tuple[int, ...], pdl: bool) -> list[bytes]:
    """The CUlaunchAttributes: an id, 4 bytes of padding and a union of 64 bytes each."""
    chosen = []
    if pdl:
        chosen.append(struct.pack("<I4xi60x", PROGRAMMATIC, 1))
    if math.prod(cluster) > 1:
        chosen.append(struct.pack("<I4x3I52x", CLUSTER, *cluster))
    return chosen


class LaunchMemory(NamedTuple):
    """Memory of one launch: a CUlaunchConfig, then the values; with the arguments that point there."""

    memory: bytearray
    at: int  # where the part that a launch writes begins
    config: Any
    pointers: Any


class ParameterLayout(NamedTuple):
    """Where the parameters of a launch lie."""

    pack: struct.Struct  # what a launch writes: the stream, the rest of the CUlaunchConfig, then the values
    offsets: list[int | None]  # of each parameter that a launch writes, from the CUlaunchConfig; None for fixed ones
    constants: Any  # attributes, zeros for parameters beyond the declared ones, and fixed values
    addresses: list[int]  # of the fixed values


ALIGN = 64
CONFIG_STREAM = 32  # offset of hStream; then attrs, numAttrs and padding, up to 56


def _lay_out(params: Sequence[Parameter], attributes: bytes) -> ParameterLayout:
    """Values that a launch writes follow the CUlaunchConfig; fixed ones lie together in memory that never changes."""
    text, end = "<Q16s", CONFIG_STREAM + 24
    fixed = bytearray(attributes + bytes(ALIGN))
    offsets: list[int | None] = []
    places = []
    for parameter in params:
        code = TYPES[_type(parameter)]
        size = struct.calcsize("<" + code)
        step = min(size, ALIGN)
        if isinstance(parameter, str):
            gap = -end % step
            text += f"{gap}x{code}"
            offsets.append(end + gap)
            end += gap + size
        else:
            fixed += bytes(-len(fixed) % step)
            places.append(len(fixed))
            fixed += struct.pack("<" + code, parameter[1])
            offsets.append(None)
    constants = (ctypes.c_char * (len(fixed) + ALIGN))()
    start = -ctypes.addressof(constants) % ALIGN
    ctypes.memmove(ctypes.addressof(constants) + start, bytes(fixed), len(fixed))
    return ParameterLayout(
        struct.Struct(text), offsets, constants, [ctypes.addressof(constants) + start + p for p in places]
    )


def _bound(kernel: Kernel, head: bytes, attributes: list[bytes], params: Sequence[Parameter]) -> Bound:
    """The launch itself, as a closure: what it needs is looked up once."""
    layout = _lay_out(params, b"".join(attributes))
    first = ctypes.addressof(layout.constants)
    first += -first % ALIGN
    tail = struct.pack("<QI4x", first, len(attributes))
    zeros = first + sum(map(len, attributes))

    def new() -> LaunchMemory:
        memory = bytearray(CONFIG_STREAM + layout.pack.size + ALIGN)
        array = (ctypes.c_char * len(memory)).from_buffer(memory)
        start = -ctypes.addressof(array) % ALIGN
        base = ctypes.addressof(array) + start
        memory[start : start + len(head)] = head
        fixed = iter(layout.addresses)
        places = [next(fixed) if offset is None else base + offset for offset in layout.offsets]
        pointers = (c_void_p * (len(places) + SPARE))(*places, *[zeros] * SPARE)
        return LaunchMemory(memory, start + CONFIG_STREAM, byref(array, start), byref(pointers))

    blocks = [new()]
    take, give = blocks.pop, blocks.append
    call, pack = kernel.driver.launch, layout.pack.pack_into
    function = c_void_p.from_param(kernel.function)

    def launch(stream: int, *values: Any) -> None:
        try:
            block = take()
        except IndexError:  # another thread is in the middle of a launch
            block = new()
        memory, at, config, pointers = block
        pack(memory, at, stream, tail, *values)
        code = call(config, function, pointers, None)
        give(block)
        if code:
            again(code, stream, values)

    def again(code: int, stream: int, values: tuple[Any, ...]) -> None:
        """Launch in the kernel's own context if another one was current; else say what is wrong."""
        if code in (INVALID_CONTEXT, INVALID_HANDLE):
            memory, at, config, pointers = new()
            with context(kernel.device, kernel.driver):
                pack(memory, at, stream, tail, *values)
                code = call(config, function, pointers, None)
        if code:
            raise kernel.driver.error(code, f"launching {kernel.name} on device {kernel.device}")

    return launch
