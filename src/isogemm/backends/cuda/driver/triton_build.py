"""Triton as a compiler: a @jit function and its types in, a kernel for the launcher out.

    built = build(dot, {"x": "*bf16", "w": "*bf16", "n": "i32"}, {"BLOCK": 128}, aligned=("x",), launch_pdl=True)
    launch = built.bind(device, (tiles,), {"n": n})
    launch(stream, x_address, w_address)

A launch takes the values of the parameters that are not fixed, in the function's order. Nothing of Triton's own
launcher or driver is used, so no C compiler is needed, and kernels compile on machines without a GPU.

Everything that knows Triton's internals is in this file. It was written for 3.6; a difference in how parameters are
passed shows when a kernel is bound, where their sizes are compared with those of the loaded function.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....errors import DTypeError, OptionError
from ....planner.family import NotCompiledError
from .kernel import Bound, Kernel, Parameter, load
from .nvrtc import CompileError
from .waiting import waits

SCALARS = {"fp32": "f32", "f32": "f32", "fp64": "f64", "i1": "i1", "u1": "i1"} | {
    f"{sign}{bits}": f"{sign}{bits}" for sign in "iu" for bits in (8, 16, 32, 64)
}


@dataclass(frozen=True, eq=False)
class Built:
    """A compiled kernel, not loaded yet."""

    name: str
    cubin: bytes
    ptx: str
    types: Mapping[str, str]  # of the parameters that remain after compilation, in order: "*bf16", "i32"
    threads: int  # of a block
    shared: int  # bytes of a block's dynamic shared memory
    cluster: tuple[int, int, int]
    scratch: int  # bytes of global memory that each block needs; where there are any a launch takes their address last
    pdl: bool  # as compiled

    def load(self, device: int) -> Kernel:
        """Load into the context of a device; once, however often it is asked for."""
        return load(self.cubin, self.name, device)

    def bind(self, device: int, grid: Sequence[int], fixed: Mapping[str, Any] | None = None) -> Bound:
        """Fix the grid (in programs) and some values.

        Raises
        ------
        OptionError
            A name that the kernel does not have.
        LimitError, DeviceError
            As `driver.Kernel.bind`.
        """
        params = self._parameters(fixed or {})
        blocks = [size * many for size, many in zip((*grid, 1, 1), self.cluster, strict=False)]
        return self.load(device).bind(
            params, grid=blocks, block=(self.threads,), shared=self.shared, cluster=self.cluster, pdl=self.pdl
        )

    def _parameters(self, fixed: Mapping[str, Any]) -> list[Parameter]:
        """The kernel's parameters in order."""
        unknown = sorted(set(fixed) - set(self.types))
        if unknown:
            names = list(self.types)
            raise OptionError(f"parameters of {self.name}", limit=names, value=unknown, nearest=names)
        params: list[Parameter] = []
        for name, kind in self.types.items():
            code = "ptr" if kind.startswith("*") else SCALARS[kind]
            params.append((code, fixed[name]) if name in fixed else code)
        return [*params, "ptr"] if self.scratch else params


def build(
    function: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Hashable] | None = None,
    *,
    aligned: Sequence[str] = (),
    capability: tuple[int, int] = (9, 0),
    **options: Any,
) -> Built:
    """Compile a @triton.jit function; from memory or Triton's cache on disk where possible.

    Parameters
    ----------
    function : JITFunction
    types : mapping
        Triton's type of each parameter that is not constant: "*bf16", "i32", "fp32".
    constants : mapping
        Values of the tl.constexpr parameters, and of others that are known now.
    aligned : sequence of str
        Addresses and numbers that are multiples of 16, as Triton would find for itself.
    capability : (int, int)
        The device's.
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
        10 * capability[0] + capability[1],
        tuple(sorted(({"enable_fp_fusion": False} | options).items())),
    )


Items = tuple[tuple[Any, ...], ...]


@functools.cache
def _build(function: Any, types: Items, constants: Items, aligned: tuple[str, ...], arch: int, options: Items) -> Built:
    if not waits():  # Triton's own cache on disk does not say what it has
        raise NotCompiledError(getattr(function, "__name__", "a Triton kernel"))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = GPUTarget("cuda", arch, 32)
    chosen: dict[str, Any] = dict(options)
    values = {name: value for name, _, value in constants}
    _check_options(target, chosen)
    signature = _signature(function.arg_names, dict(types), values)
    hints = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    try:
        source = ASTSource(function, signature, values, hints)
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
        if kind not in SCALARS and kind != "constexpr" and not kind.startswith("*"):
            raise DTypeError(f"type of parameter {name}", limit=sorted(SCALARS), value=kind, nearest="fp32")
        signature[name] = kind
    extra = sorted({*types, *constants} - set(names))
    if extra:
        raise OptionError("parameters", limit=list(names), value=extra, nearest=list(names))
    return signature


def _described(compiled: Any, types: Mapping[str, str]) -> Built:
    facts = compiled.metadata
    return Built(
        name=facts.name,
        cubin=compiled.asm["cubin"],
        ptx=compiled.asm["ptx"],
        types=dict(types),
        threads=32 * facts.num_warps,
        shared=facts.shared,
        cluster=tuple(getattr(facts, "cluster_dims", None) or (facts.num_ctas, 1, 1)),
        scratch=getattr(facts, "global_scratch_size", 0) or 0,
        pdl=bool(getattr(facts, "launch_pdl", False)),
    )
