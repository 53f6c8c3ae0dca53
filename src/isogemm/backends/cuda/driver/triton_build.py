"""Triton and Gluon as compilers: a @jit function and its types in, a kernel for the launcher out.

    built = build(
        dot, {"x": "*bf16", "w": "tensordesc<bf16[128,64]>", "n": "i32"}, {"BLOCK": 128}, aligned=("x",), num_warps=8
    )
    launch = built.bind(device, (tiles,), {"n": n}, descriptors={"w": ((n, k), (ldb, 1))}, pdl=True)
    encode = built.encoder("w", (n, k), (ldb, 1))
    launch(stream, x_address, encode(w_address))

A launch takes the values of the parameters that are not fixed, in the function's order; for a tensor descriptor the
128 bytes of its map. Nothing of Triton's own launcher or driver is used, so no C compiler is needed, and kernels
compile on machines without a GPU.

Everything that knows Triton's internals is in this file. It was written for 3.6; a difference in how parameters are
passed shows when a kernel is bound, where their sizes are compared with those of the loaded function.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....errors import DeviceError, DTypeError, OptionError
from ....planner.family import NotCompiledError
from .kernel import Bound, Kernel, Parameter, load
from .nvrtc import CompileError
from .tensormap import Encoder, encoder
from .waiting import waits

SCALARS = {"fp32": "f32", "f32": "f32", "fp64": "f64", "i1": "i1", "u1": "i1"} | {
    f"{sign}{bits}": f"{sign}{bits}" for sign in "iu" for bits in (8, 16, 32, 64)
}
ELEMENTS = {0: "uint8", 6: "float16", 7: "float32", 9: "float64", 10: "bfloat16"}  # by Triton's numbers
SWIZZLES = (0, 32, 64, 128)
Shape = tuple[Sequence[int], Sequence[int]]  # sizes and strides, in elements, outermost first


@dataclass(frozen=True)
class Descriptor:
    """How Triton lays a tile of a descriptor in shared memory, hence how its map is encoded."""

    dtype: str
    box: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel uses: registers a thread; bytes of stack and spilled registers a thread."""

    registers: int
    stack: int
    local: int


@dataclass(frozen=True, eq=False)
class Built:
    """A compiled kernel, not loaded yet.

    Attributes
    ----------
    name : str
    cubin : bytes
    ptx : str
    types : dict
        Of the parameters that remain after compilation, in order: "*bf16", "i32", "tensordesc<...>".
    descriptors : dict
        By parameter.
    threads, shared : int
        Threads of a block; bytes of its dynamic shared memory.
    cluster : (int, int, int)
    scratch : int
        Bytes of global memory that each block needs; where there are any a launch takes their address last.
    pdl, cooperative : bool
        As compiled.
    """

    name: str
    cubin: bytes
    ptx: str
    types: Mapping[str, str]
    descriptors: Mapping[str, Descriptor]
    threads: int
    shared: int
    cluster: tuple[int, int, int]
    scratch: int
    pdl: bool
    cooperative: bool

    def load(self, device: int) -> Kernel:
        """Load into the context of a device; once, however often it is asked for."""
        return load(self.cubin, self.name, device)

    def encoder(self, name: str, sizes: Sequence[int], strides: Sequence[int], *, promotion: int = 128) -> Encoder:
        """From an address to the map of descriptor `name` over a tensor of these sizes and strides (in elements)."""
        how = self.descriptors[name]
        return encoder(how.dtype, sizes=sizes, strides=strides, box=how.box, swizzle=how.swizzle, promotion=promotion)

    def bind(
        self,
        device: int,
        grid: Sequence[int],
        fixed: Mapping[str, Any] | None = None,
        *,
        descriptors: Mapping[str, Shape] | None = None,
        pdl: bool | None = None,
    ) -> Bound:
        """Fix the grid (in programs), some values, and the sizes and strides of descriptors.

        Raises
        ------
        OptionError
            A name that the kernel does not have, or a descriptor without its shape.
        LimitError, DeviceError
            As `driver.Kernel.bind`.
        """
        params = self._parameters(dict(fixed or {}), dict(descriptors or {}))
        blocks = [size * many for size, many in zip((*grid, 1, 1), self.cluster, strict=False)]
        return self.load(device).bind(
            params,
            grid=blocks,
            block=(self.threads,),
            shared=self.shared,
            cluster=self.cluster,
            pdl=self.pdl if pdl is None else pdl,
            cooperative=self.cooperative,
        )

    def _parameters(self, fixed: dict[str, Any], shapes: dict[str, Shape]) -> list[Parameter]:
        """The kernel's parameters in order: a descriptor is a map, its sizes and its strides."""
        params: list[Parameter] = []
        for name, kind in self.types.items():
            if name in self.descriptors:
                if name not in shapes:
                    raise OptionError(f"descriptor {name}", limit="sizes and strides", value=None, nearest="a shape")
                sizes, strides = shapes.pop(name)
                params += ["map", *(("i32", size) for size in sizes), *(("i64", step) for step in strides)]
            else:
                code = "ptr" if kind.startswith("*") else SCALARS[kind]
                params.append((code, fixed.pop(name)) if name in fixed else code)
        if self.scratch:
            params.append("ptr")
        if fixed or shapes:
            unknown = sorted({*fixed, *shapes})
            raise OptionError(
                f"parameters of {self.name}", limit=list(self.types), value=unknown, nearest=list(self.types)
            )
        return params

    def resources(self) -> Resources:
        """Ask Triton's cuobjdump; loading is not needed. `driver.Kernel` says the same of a loaded kernel."""
        from triton import knobs

        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
        return Resources(found["REG"], found["STACK"], found["LOCAL"])


def build(
    function: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Hashable] | None = None,
    *,
    aligned: Sequence[str] = (),
    capability: int = 90,
    **options: Any,
) -> Built:
    """Compile a @triton.jit or @gluon.jit function; from memory or Triton's cache on disk where possible.

    Parameters
    ----------
    function : JITFunction
    types : mapping
        Triton's type of each parameter that is not constant: "*bf16", "i32", "fp32", "tensordesc<bf16[128,64]>" (for
        Gluon with its layout).
    constants : mapping
        Values of the tl.constexpr parameters, and of others that are known now.
    aligned : sequence of str
        Addresses and numbers that are multiples of 16, as Triton would find for itself.
    capability : int
        10 * major + minor of the device's.
    **options
        Triton's: num_warps, num_stages, num_ctas, maxnreg, launch_pdl, ... ``enable_fp_fusion`` is False unless asked
        for: a product and a sum have two roundings.

    Raises
    ------
    OptionError
        A parameter without a type or value, or an option that this Triton does not have.
    DTypeError
        A type that the launcher cannot pass.
    CompileError
        What Triton or ptxas says.
    """
    return _build(
        function,
        tuple(types.items()),
        # With what they look like: 1, 1.0 and True are equal, as are 0.0 and -0.0, but not the same kernel.
        tuple((name, repr(value), value) for name, value in (constants or {}).items()),
        tuple(aligned),
        capability,
        tuple(sorted(({"enable_fp_fusion": False} | options).items())),
    )


Items = tuple[tuple[Any, ...], ...]


@functools.cache
def _build(function: Any, types: Items, constants: Items, aligned: tuple[str, ...], arch: int, options: Items) -> Built:
    if not waits():  # Triton's own cache on disk does not say what it has
        raise NotCompiledError(getattr(function, "__name__", "a Triton kernel"))
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", arch, 32)
    chosen: dict[str, Any] = dict(options)
    values = {name: value for name, _, value in constants}
    _check_options(target, chosen)
    signature = _signature(function.arg_names, dict(types), values)
    hints = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    try:
        source = _source_class(function)(function, signature, values, hints)
        compiled = triton.compile(source, target=target, options=chosen)
    except Exception as error:  # the compilers raise many kinds, of their own and of C++
        raise CompileError(function.__name__, [str(values), str(chosen)], str(error)) from error
    return _described(compiled, {name: kind for name, kind in signature.items() if kind != "constexpr"})


def _check_options(target: Any, options: Mapping[str, Any]) -> None:
    """Triton drops options that it does not know."""
    from triton.compiler.compiler import make_backend

    known = vars(make_backend(target).parse_options({}))
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise OptionError("options of this Triton", limit=sorted(known), value=unknown, nearest=sorted(known))


def _signature(names: Sequence[str], types: Mapping[str, str], constants: Mapping[str, Any]) -> dict[str, str]:
    signature = {}
    for name in names:
        if name not in constants and name not in types:
            raise OptionError(f"parameter {name}", limit="a type or a value", value=None, nearest="i32")
        kind = "constexpr" if name in constants else types[name]
        if kind not in SCALARS and kind != "constexpr" and not kind.startswith(("*", "tensordesc")):
            raise DTypeError(f"type of parameter {name}", limit=sorted(SCALARS), value=kind, nearest="fp32")
        signature[name] = kind
    extra = sorted({*types, *constants} - set(names))
    if extra:
        raise OptionError("parameters", limit=list(names), value=extra, nearest=list(names))
    return signature


def _source_class(function: Any) -> Any:
    if getattr(function, "is_gluon", lambda: False)():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def _described(compiled: Any, types: Mapping[str, str]) -> Built:
    facts = compiled.metadata
    named = [name for name, kind in types.items() if kind.startswith("tensordesc")]
    metas = list(getattr(facts, "tensordesc_meta", None) or [])
    if len(metas) != len(named):
        raise DeviceError(
            f"tensor descriptors of {facts.name}",
            limit="a device with a tensor copy engine",
            value=metas,
            nearest="sm_90",
        )
    count = facts.num_ctas
    x, y, z = getattr(facts, "cluster_dims", None) or (count, 1, 1)
    return Built(
        name=facts.name,
        cubin=compiled.asm["cubin"],
        ptx=compiled.asm["ptx"],
        types=dict(types),
        descriptors={name: _descriptor(meta) for name, meta in zip(named, metas, strict=True)},
        threads=32 * facts.num_warps,
        shared=facts.shared,
        cluster=(x, y, z),
        scratch=getattr(facts, "global_scratch_size", 0) or 0,
        pdl=bool(getattr(facts, "launch_pdl", False)),
        cooperative=bool(getattr(facts, "launch_cooperative_grid", False)),
    )


def _descriptor(meta: Mapping[str, Any]) -> Descriptor:
    if meta["elem_type"] not in ELEMENTS or meta.get("fp4_padded"):
        raise DTypeError(
            "elements of a tensor descriptor", limit=list(ELEMENTS.values()), value=dict(meta), nearest="uint8"
        )
    return Descriptor(ELEMENTS[meta["elem_type"]], tuple(meta["block_size"]), SWIZZLES[meta["swizzle"]])
