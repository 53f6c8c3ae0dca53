"""Functions that kernels call, compiled as parts of the kernels.

Numba makes each function ready to run by itself: it optimizes the function together with all that it calls, emits code
for all of them, and does that again in each caller. A kernel that is six calls deep was compiled six times over. Here
what is called from compiled code is only translated and linked; the entry that it ends up in is optimized once, whole.
"""

from __future__ import annotations

from typing import Any

from numba.core import compiler, typed_passes, untyped_passes
from numba.core.ccallback import CFunc, _CFuncCompiler  # type: ignore[attr-defined]
from numba.core.codegen import JITCodeLibrary
from numba.core.dispatcher import _FunctionCompiler  # type: ignore[attr-defined]
from numba.core.registry import CPUDispatcher, cpu_target

from .collector import uncollected


class Part(JITCodeLibrary):  # type: ignore[misc]
    """A function's code as it was translated, beside that of the functions it calls; nothing that runs."""

    def finalize(self) -> None:
        """Link what is called; its callers optimize."""
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True


class Emitted(JITCodeLibrary):  # type: ignore[misc]
    """Code that was emitted in vectors: all passes once.

    Numba runs them over each function first, and some over the module, for its own loops and counts of references.
    Such loops are up to 25 % slower without; this code is as fast, after 0.8 of the time of compiling.
    """

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)


_IDLE = (
    untyped_passes.WithLifting,
    untyped_passes.InlineClosureLikes,
    untyped_passes.RewriteDynamicRaises,
    untyped_passes.MakeFunctionToJitFunction,
    untyped_passes.FindLiterallyCalls,
    untyped_passes.LiteralUnroll,
    untyped_passes.LiteralPropagationSubPipelinePass,
    typed_passes.InlineOverloads,
    typed_passes.AnnotateTypes,
)
"""Passes that no kernel has work for: those for closures, ``with``, errors that are made at run time, what is known of
lists' elements, and reports. Numba looks all code of a function through again after most of them."""


class Compiler(compiler.Compiler):  # type: ignore[misc]
    """Numba's, without `_IDLE`."""

    def define_pipelines(self) -> list[Any]:
        """One pipeline."""
        found = super().define_pipelines()
        for each in found:
            each.passes = [given for given in each.passes if given[0] not in _IDLE]
        return list(found)


class _Into(_FunctionCompiler):  # type: ignore[misc]
    """Numba's compiler into a library of a class of ours."""

    library: type[JITCodeLibrary] = JITCodeLibrary

    def _compile_core(self, args: Any, return_type: Any) -> Any:
        flags = compiler.Flags()
        self.targetdescr.options.parse_as_flags(flags, self.targetoptions)
        flags = self._customize_flags(flags)
        context = self.targetdescr.target_context
        library = self.library(context.codegen(), self.py_func.__qualname__)
        library.enable_object_caching()
        return compiler.compile_extra(
            self.targetdescr.typing_context,
            context,
            self.py_func,
            args,
            return_type,
            flags,
            self.locals,
            library,
            self.pipeline_class,
        )


class EntryCompiler(_Into, _CFuncCompiler):  # type: ignore[misc]
    """For an entry."""


class EmittedCompiler(EntryCompiler):
    """For an entry that only calls emitted code."""

    library = Emitted


class PartCompiler(_Into):
    """Up to the code of one function, without what Python or C would call it by."""

    library = Part

    def _customize_flags(self, flags: Any) -> Any:
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        return flags

    def _compile_core(self, args: Any, return_type: Any) -> Any:
        made = super()._compile_core(args, return_type)
        key = object()  # what callers find it by
        self.targetdescr.target_context.insert_user_function(key, made.fndesc, [made.library])
        return made._replace(entry_point=key)


def entry(function: Any, signature: Any, *, emitted: bool) -> Any:
    """``numba.cfunc`` that is still to be compiled."""
    made: Any = CFunc(function, signature, locals={}, options={})
    made._compiler = (EmittedCompiler if emitted else EntryCompiler)(function, cpu_target, {}, {}, Compiler)
    return made


class Called(CPUDispatcher):  # type: ignore[misc]
    """A function as other compiled functions see it; Python cannot call it."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._compiler = PartCompiler(self.py_func, self.targetdescr, self.targetoptions, self.locals, Compiler)

    def add_overload(self, cres: Any) -> None:
        """For callers that are being compiled alone."""
        self.overloads[tuple(cres.signature.args)] = cres


class CpuKernel(CPUDispatcher):  # type: ignore[misc]
    """A compiled function. Called from Python it is compiled whole, from another one as a part of that."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._compiler = _Into(self.py_func, self.targetdescr, self.targetoptions, self.locals, Compiler)
        self._called = Called(*given, **named)

    def compile(self, sig: Any) -> Any:
        """The form for a signature: from the cache, or compiled."""
        with uncollected():
            return super().compile(sig)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """The types of a call from compiled code; each constant among the arguments is a type, so a part of its own."""
        return self._called.get_call_template(args, kws)

    def get_overload(self, sig: Any) -> Any:
        """What a call from compiled code is linked to."""
        return self._called.get_overload(sig)
