"""An adapter of this machine through wgpu, which is imported here alone: limits, memory, compiled kernels, launches.

Buffers have no addresses, but all code that checks a product asks for them: each buffer gets a range of numbers of its
own, and an offset into the buffer is an address less its first.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base.extras import require_extra
from ...errors import DeviceError, LimitError
from ...operands.device_array import DeviceId
from .trusted import TRUSTED, trusted_module

ALIGN = 256  # of what is bound: the most that a device may ask for
FIRST_ADDRESS = 2**32
_addresses = itertools.count(FIRST_ADDRESS, 2**34)  # further apart than any buffer is long


@dataclass(frozen=True, slots=True)
class Limits:
    """What one launch may take."""

    # binding, buffer: bytes that a kernel sees at once, and of a buffer
    binding: int
    buffer: int
    groups: int  # workgroups along one axis


class DeviceBuffer:
    """Memory on an adapter: a multiple of 4 bytes; its address is its number for its first byte."""

    def __init__(self, handle: Any, nbytes: int) -> None:
        self.handle, self.nbytes, self.address = handle, nbytes, next(_addresses)


class ReadyLaunch(NamedTuple):
    """A kernel with its operands and grid, ready to run any number of times."""

    pipeline: Any
    group: Any
    grid: tuple[int, int]


@cache
def adapters() -> tuple[Any, ...]:
    """wgpu's adapters: the preferred one first; none where wgpu is not installed or finds no driver."""
    try:
        import wgpu
    except ImportError:
        return ()
    try:
        return (wgpu.gpu.request_adapter_sync(power_preference="high-performance"),)
    except (RuntimeError, OSError):
        return ()


@cache
def open_adapter(ordinal: int = 0) -> Adapter:
    """The adapter of that number, opened once: without wgpu an OptionError, where there is none a DeviceError."""
    require_extra("webgpu", "a WebGPU device", "wgpu")
    if not 0 <= ordinal < len(adapters()):
        raise DeviceError(
            "WebGPU adapter", limit=f"one of {len(adapters())}, as wgpu finds them", value=ordinal,
            nearest="0" if adapters() else "a driver: on Debian, apt install mesa-vulkan-drivers libvulkan1",
        )  # fmt: skip
    return Adapter(adapters()[ordinal], DeviceId("webgpu", ordinal))


class Adapter:
    """One adapter and its device, queue and compiled kernels."""

    def __init__(self, adapter: Any, place: DeviceId) -> None:
        self.place = place
        info, features, limits = adapter.info, adapter.features, adapter.limits
        self.name = f"{info.get('device', '')} ({info.get('description', '')}, {info.get('backend_type', '')})"
        self.software = info.get("adapter_type") == "CPU"
        wanted = {name for name in ("subgroup", "timestamp-query") if name in features}
        asked = {name: limits[name] for name in _ASKED}
        self._device = adapter.request_device_sync(required_features=sorted(wanted), required_limits=asked)
        self.limits = Limits(
            limits["max-storage-buffer-binding-size"] // ALIGN * ALIGN, limits["max-buffer-size"] // 4 * 4,
            limits["max-compute-workgroups-per-dimension"],
        )  # fmt: skip
        self._subgroups = "subgroup" in wanted
        self.timestamps = "timestamp-query" in wanted  # it says when work began and ended
        self._pipelines: dict[str, Any] = {}
        self._recorded: list[ReadyLaunch] | None = None

    @cached_property
    def subgroup(self) -> int:
        """Threads that exchange values without memory; 0 where the adapter has no such operations.

        As a small kernel finds it: wgpu reports the least that any adapter may have. Where a device compiles another
        kernel for fewer, that one's bits are wrong, and its admission finds so.
        """
        if not self._subgroups:
            return 0
        least = self.upload(np.full(1, 2**32 - 1, np.uint32))
        pipeline = self.pipeline(_SUBGROUP)
        entries = [{"binding": 0, "resource": {"buffer": least.handle}}]
        group = self._device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
        self.submit([ReadyLaunch(pipeline, group, (1, 1))])
        return int(self.read(least, 0, 4).view(np.uint32)[0])

    # Memory.

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """New memory. Raises LimitError: more than the adapter's buffers hold."""
        import wgpu

        size = max(4, -(-nbytes // 4) * 4)
        if size > self.limits.buffer:
            raise LimitError(
                f"bytes of an array on {self.name}", limit=self.limits.buffer, value=nbytes,
                nearest=f"several arrays of at most {self.limits.buffer} bytes",
            )  # fmt: skip
        usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
        try:
            return DeviceBuffer(self._device.create_buffer(size=size, usage=usage), size)
        except wgpu.GPUOutOfMemoryError as error:
            raise LimitError(
                f"memory on {self.name}", limit="what is free", value=nbytes, nearest="smaller arrays"
            ) from error

    def upload(self, data: NDArray[Any]) -> DeviceBuffer:
        """A host's contiguous array in memory of its own."""
        whole = np.zeros(max(4, -(-data.nbytes // 4) * 4), np.uint8)
        whole[: data.nbytes] = np.frombuffer(data, np.uint8) if data.nbytes else ()
        made = self.allocate(data.nbytes)
        self._device.queue.write_buffer(made.handle, 0, whole)
        return made

    def read(self, buffer: DeviceBuffer, start: int, stop: int) -> NDArray[np.uint8]:
        """Bytes of a buffer on the host; waits for what was launched before."""
        low, high = start // 4 * 4, -(-stop // 4) * 4
        if high <= low:
            return np.empty(0, np.uint8)
        found = np.frombuffer(self._device.queue.read_buffer(buffer.handle, low, high - low), np.uint8)
        return found[start - low : stop - low]

    # Kernels.

    def launch(
        self,
        code: str,
        numbers: Sequence[int | float],
        bound: Mapping[int, tuple[DeviceBuffer, int, int]],
        grid: tuple[int, int],
    ) -> None:
        """Run a kernel on a grid of workgroups, without waiting for it.

        `numbers` are its parameters, `bound` the ranges (buffer, offset, bytes) by the numbers of their bindings.
        """
        import wgpu

        pipeline = self.pipeline(code)
        words = b"".join(struct.pack("<f" if isinstance(x, float) else "<I", _word(x)) for x in numbers)
        parameters = self._device.create_buffer_with_data(
            data=words.ljust(-(-len(words) // 16) * 16, b"\0"), usage=wgpu.BufferUsage.UNIFORM
        )
        entries: list[dict[str, Any]] = [{"binding": 0, "resource": {"buffer": parameters}}]
        for place, (buffer, offset, size) in bound.items():
            range_of = {"buffer": buffer.handle, "offset": offset, "size": size}
            entries.append({"binding": place, "resource": range_of})
        group = self._device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
        ready = ReadyLaunch(pipeline, group, grid)
        if self._recorded is not None:
            self._recorded.append(ready)
        else:
            self.submit([ready])

    def submit(self, launches: Sequence[ReadyLaunch]) -> None:
        """Launches one after another in one pass, without waiting for them."""
        self._device.queue.submit([self._encoded(launches)])

    def _encoded(self, launches: Sequence[ReadyLaunch], stamps: Mapping[str, Any] | None = None) -> Any:
        encoder = self._device.create_command_encoder()
        work = encoder.begin_compute_pass(timestamp_writes=stamps)
        for pipeline, group, grid in launches:
            work.set_pipeline(pipeline)
            work.set_bind_group(0, group)
            work.dispatch_workgroups(*grid, 1)
        work.end()
        if stamps is not None:
            encoder.resolve_query_set(stamps["query_set"], 0, 2, self._ticks, 0)
        return encoder.finish()

    @contextmanager
    def recording(self) -> Iterator[list[ReadyLaunch]]:
        """Within it launches are kept in a list, and nothing runs."""
        before, self._recorded = self._recorded, []
        try:
            yield self._recorded
        finally:
            self._recorded = before

    def seconds(self, launches: Sequence[ReadyLaunch], behind: Sequence[ReadyLaunch] = ()) -> float:
        """The time of launches in a row: by the adapter's clock, or where it has none, their submission included.

        Those of `behind` run just before and are not counted: a device that had nothing to do is slow at first.
        """
        if not self.timestamps:
            self.wait()
            begun = time.perf_counter()
            self.submit(launches)
            self.wait()
            return time.perf_counter() - begun
        timed = self._encoded(launches, self._stamps)
        self._device.queue.submit([self._encoded(behind), timed] if behind else [timed])
        first, last = np.frombuffer(self._device.queue.read_buffer(self._ticks, 0, 16), np.uint64)
        return float(int(last) - int(first)) * self._tick * 1e-9

    @cached_property
    def _stamps(self) -> dict[str, Any]:
        made = self._device.create_query_set(type="timestamp", count=2)
        return {"query_set": made, "beginning_of_pass_write_index": 0, "end_of_pass_write_index": 1}

    @cached_property
    def _ticks(self) -> Any:
        import wgpu

        return self._device.create_buffer(size=16, usage=wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC)

    @cached_property
    def _tick(self) -> float:
        """Nanoseconds of one tick of the adapter's clock."""
        from wgpu.backends.wgpu_native import _api as native

        return float(native.libf.wgpuQueueGetTimestampPeriod(self._device.queue._internal))

    def pipeline(self, code: str) -> Any:
        """WGSL with an entry point `main`, compiled once. Raises DeviceError: the driver does not compile it."""
        import wgpu

        made = self._pipelines.get(code)
        if made is None:
            trusted = code.startswith(TRUSTED)
            try:
                module = trusted_module(self._device, code) if trusted else self._device.create_shader_module(code=code)
                made = self._device.create_compute_pipeline(
                    layout="auto", compute={"module": module, "entry_point": "main"}
                )
            except (wgpu.GPUError, wgpu.GPUPipelineError, RuntimeError) as error:
                raise DeviceError(
                    f"kernel on {self.name}", limit="what its driver compiles", value=error, nearest="the CPU"
                ) from error
            self._pipelines[code] = made
        return made

    def wait(self) -> None:
        """Until all that was launched is done."""
        self.read(self._mark, 0, 4)

    @cached_property
    def _mark(self) -> DeviceBuffer:
        return self.allocate(4)


_ASKED = (
    "max-buffer-size",
    "max-storage-buffer-binding-size",
    "max-compute-workgroup-storage-size",
    "max-compute-invocations-per-workgroup",
    "max-compute-workgroup-size-x",
)
_SUBGROUP = """
@group(0) @binding(0) var<storage, read_write> least: atomic<u32>;
@compute @workgroup_size(128) fn main(@builtin(subgroup_size) size: u32) { atomicMin(&least, size); }
"""


def _word(x: int | float) -> int | float:
    return x if isinstance(x, float) else x & 0xFFFFFFFF
