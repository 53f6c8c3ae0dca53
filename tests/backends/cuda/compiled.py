"""Kernels compiled for an H200 that is not there: what compilers make of what the families really ask."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import pytest
from tests.backends.cuda.fake import FakeCuda

from isogemm.backends.cuda.driver import facts as device
from isogemm.backends.cuda.driver import kernel as driver
from isogemm.backends.cuda.driver import nvrtc, tensormap, triton_build
from isogemm.backends.cuda.driver.libcuda import Driver
from isogemm.backends.cuda.gemm.choose import FAMILIES
from isogemm.problem.product import Product

__all__ = ["Compiled", "Kernels", "kernels"]

H200 = device.DeviceFacts(0, "NVIDIA H200", (9, 0), 132, 62914560, 232448, 4917.0, None)
KERNEL_PARAMETER, SIZED = 0x17, 4  # of the kinds of facts, and of their forms, in a cubin's .nv.info
INSTRUCTION = 16  # bytes


@dataclass
class Compiled:
    """One kernel. `ptx` is empty where NVRTC went straight to a cubin; `beside` are all that its test has made."""

    name: str
    cubin: bytes
    ptx: str = ""
    beside: list[Compiled] = field(default_factory=list, repr=False, compare=False)

    def count(self, pattern: str) -> int:
        """Matches in the PTX."""
        return len(re.findall(pattern, self.ptx))

    @cached_property
    def resources(self) -> dict[str, int]:
        """REG, STACK, LOCAL, SHARED."""
        said = _said_of(self.cubin, "cuobjdump", "-res-usage")
        own = said.partition(f"Function {self.name}:")[2].partition("Function")[0]
        return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", own)}

    @property
    def spilled(self) -> int:
        """Bytes of a thread that are not in registers."""
        return self.resources["STACK"] + self.resources["LOCAL"]

    @cached_property
    def instructions(self) -> list[str]:
        """With their operands, in order; read together with those of all kernels beside that were not read before."""
        waiting = [x for x in self.beside if "instructions" not in vars(x)]
        for kernel, found in zip(waiting, _disassembled(waiting), strict=True):
            vars(kernel)["instructions"] = found
        found: list[str] = vars(self)["instructions"]
        return found

    @cached_property
    def machine_code(self) -> list[str]:
        """Mnemonics with their modifiers, in order."""
        return [re.sub(r"^@\S+\s+", "", line).split()[0] for line in self.instructions]

    def machine_counts(self, *names: str) -> tuple[int, ...]:
        """How many instructions of each name, whatever their modifiers."""
        heads = [line.split(".")[0] for line in self.machine_code]
        return tuple(map(heads.count, names))

    def hasty(self, *, ahead: bool = False) -> list[int]:
        """Arrivals at a barrier, and copies by the engine, while values of a buffer are on their way to registers.

        Such a load may wait behind others' traffic until the engine has filled the buffer again. Loads that a fence
        has passed are done; with `ahead` those after the last wait for a barrier are of the next buffer.
        """
        waiting: dict[tuple[int, ...], bool] = {}  # registers that are loaded, and whether from the buffer to be left
        found = list[int]()
        for i, line in enumerate(self.instructions):
            name, _, rest = re.sub(r"^@!?U?P\w+\s+", "", line).partition(" ")
            if name.startswith("SYNCS.PHASECHK") and "TRYWAIT" in name:
                waiting = dict.fromkeys(waiting, True)
            elif name.startswith("FENCE.VIEW.ASYNC") or line.startswith(("BRA ", "EXIT", "RET")):  # or from elsewhere
                waiting = {}
            elif name.startswith(("UBLKCP", "UTMALDG")) or (name.startswith("SYNCS.ARRIVE") and "A1T0" in name):
                found += [i] if any(waiting.values()) else []
            written, _, read = rest.partition(",") if not name.startswith(("ST", "RED", "ATOM")) else ("", "", rest)
            operands = {int(register) for register in re.findall(r"\bR(\d+)", read)}
            if re.match(r"[HIQ]G?MMA|ST\w*\.128|STSM", name):  # groups of registers
                operands = {register + j for register in operands for j in range(4)}
            waiting = {loaded: left for loaded, left in waiting.items() if not operands & set(loaded)}
            if name.startswith("LDS") and (first := re.match(r"\s*R(\d+)", written)):
                width = 4 if re.search(r"\.128|\.4$", name) else 2 if re.search(r"\.64|\.2$", name) else 1
                loaded = tuple(range(int(first[1]), int(first[1]) + width))
                waiting = {other: left for other, left in waiting.items() if not set(loaded) & set(other)}
                waiting[loaded] = not ahead
        return found

    @cached_property
    def parameters(self) -> tuple[int, ...]:
        """Bytes of each, in order: what the driver says of a loaded kernel."""
        data, at, found = self.section(f".nv.info.{self.name}"), 0, {}
        while at < len(data):
            form, kind, size = struct.unpack_from("<BBH", data, at)
            at += 4
            if form == SIZED:
                if kind == KERNEL_PARAMETER:
                    _, ordinal, _, flags = struct.unpack_from("<IHHI", data, at)
                    found[ordinal] = flags >> 18
                at += size
        return tuple(found[i] for i in range(len(found)))

    def section(self, wanted: str) -> bytes:
        """Contents of a section of the ELF file."""
        (start,) = struct.unpack_from("<Q", self.cubin, 0x28)
        each, count, names = struct.unpack_from("<HHH", self.cubin, 0x3A)
        heads = [struct.unpack_from("<IIQQQQIIQQ", self.cubin, start + each * i) for i in range(count)]
        for head in heads:
            at = heads[names][4] + head[0]
            if self.cubin[at : self.cubin.index(b"\0", at)].decode() == wanted:
                return self.cubin[head[4] : head[4] + head[5]]
        raise KeyError(wanted)


def _disassembled(kernels: list[Compiled]) -> list[list[str]]:
    """Instructions of each, by one run of nvdisasm, which takes nearly all of its time to begin."""
    codes = [kernel.section(f".text.{kernel.name}") for kernel in kernels]
    said = _said_of(b"".join(codes), "nvdisasm", "-b", "SM90a")
    lines = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", said, re.MULTILINE)
    ends = list(accumulate((len(code) // INSTRUCTION for code in codes), initial=0))
    assert len(lines) == ends[-1]
    return [lines[start:end] for start, end in pairwise(ends)]


def _said_of(code: bytes, tool: str, *options: str) -> str:
    """What a tool of Triton's says of a cubin, or of the instructions in one."""
    from triton import knobs

    path = getattr(knobs.nvidia, tool).path
    with tempfile.NamedTemporaryFile() as file:
        file.write(code)
        file.flush()
        found = {**os.environ, "PATH": f"{os.path.dirname(path)}:{os.environ.get('PATH', '')}"}
        command = [path, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=found).stdout


@dataclass
class Kernels:
    """Compiles, and keeps what was loaded since it was last asked, and all."""

    loaded: list[Compiled] = field(default_factory=list)
    every: list[Compiled] = field(default_factory=list)

    def load(self, cubin: bytes, name: str, ordinal: int, ptx: str = "") -> Any:
        """The launcher's own kernel, over a driver that knows what the cubin says of its parameters."""
        self.loaded.append(Compiled(name, cubin, ptx, self.every))
        self.every.append(self.loaded[-1])
        return driver.load_into(Driver(FakeCuda(sizes=self.loaded[-1].parameters)), cubin, name, ordinal)

    def build(self, family: str, config: str, product: Product) -> list[Compiled]:
        """Every kernel of a launch: compiled, and bound with the parameters that it is launched with."""
        assert FAMILIES.found[family].supports(product, config), f"{family} [{config}] does not serve {product}"
        self.loaded.clear()
        FAMILIES.found[family].bind(product, config, 0)
        return list(self.loaded)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Kernels:
    """Everything between the families and the device; caches on disk are empty, so that compilers run."""
    pytest.importorskip("triton", reason="Triton, which brings the tools that read a cubin, is not installed")
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")
    made = Kernels()
    fake = Driver(FakeCuda())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(nvrtc, "cache_directory", lambda: tmp_path / "cubins")
    monkeypatch.setattr(device, "device", lambda ordinal: H200)
    monkeypatch.setattr(driver, "load", made.load)
    monkeypatch.setattr(
        triton_build.Built, "load", lambda built, ordinal: made.load(built.cubin, built.name, ordinal, built.ptx)
    )
    monkeypatch.setattr(tensormap, "driver", lambda: fake)
    triton_build._build.cache_clear()
    return made
