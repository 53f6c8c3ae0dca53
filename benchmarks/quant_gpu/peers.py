"""GemLite's Triton kernels beside which quantized weights are timed, tuned as it tunes itself.

What comes nearest to each format, in bfloat16:

- Q4_0: 4 bits, groups of 32, one zero point for all. The same codes and scales (rounded to bfloat16).
- Q4_K: 4 bits, groups of 64 with scale and zero point, its default. As many bits a weight as Q4_K, 4.5.
- Q8_0: 8 bits, one scale a row, its own 8-bit mode. Half a bit a weight less than Q8_0.

It has no table for the H200, so it would autotune at the first call with each number of rows, over the configurations
of its setting "fast". `GemLite.prepare` does the same over the same configurations, in less time: all are compiled at
once by a pool of threads, and each is timed for a few milliseconds (with a cold cache) instead of 125, without the
copies of weights that its autotuner would time along. What it found is kept in GemLite's own file of configurations.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["GEMLITE", "GemLite", "grouped", "load_gemlite", "q4_0_codes"]

GEMLITE = "gemlite"
NEAREST = {"Q4_0": "4-bit g32", "Q4_K": "4-bit g64 zeros", "Q8_0": "8-bit a scale a row"}
TUNING_MS = 5  # that each configuration is timed for
GROUP = 64


def load_gemlite(configs: Path | None) -> tuple[GemLite | None, str]:
    """GemLite, and its version or why it is absent."""
    try:
        found = GemLite(configs)
    except Exception as error:  # its import asks the device, so it can fail in any way
        return None, f"{GEMLITE}: absent ({type(error).__name__}: {error})"
    return found, f"{GEMLITE}: {found.version}"


class GemLite:
    """The package, its modules for our formats, and its tuning.

    Parameters
    ----------
    configs : path, optional
        Configurations found earlier, which are used, and where new ones are added.
    """

    def __init__(self, configs: Path | None = None) -> None:
        self._package: Any = import_module("gemlite")
        self._configs, self.version = configs, str(self._package.__version__)
        kernels = import_module("gemlite.core").GEMLITE_TRITON_KERNELS
        self._tuners = [tuner for kernel in kernels for tuner in kernel.kernel]
        if configs is not None and configs.is_file():
            self._package.load_config(str(configs))

    def layers(self, format: str, rows: Any, weight: Any, copies: int) -> list[Any]:
        """Modules of what is nearest to a format.

        Parameters
        ----------
        format : str
        rows : uint8 tensor [n, row bytes]
            The blocks.
        weight : bfloat16 tensor [n, k]
            The same, dequantized.
        copies : int

        Raises
        ------
        NotImplementedError
            It has nothing near.
        """
        import torch

        if format not in NEAREST:
            raise NotImplementedError(f"no {format}, nor anything near")
        if format == "Q8_0":
            first = self._package.helper.A16W8_INT8(device=rows.device, dtype=torch.bfloat16).from_weights(weight)
        elif format == "Q4_0":
            codes, scales = q4_0_codes(rows)
            first = self._module(codes, 32, scales, 8)
        else:
            codes, scales, zeros = grouped(weight, GROUP)
            first = self._module(codes, GROUP, scales, zeros)
        return [first, *(deepcopy(first) for _ in range(copies - 1))]

    def _module(self, codes: Any, group: int, scales: Any, zeros: Any) -> Any:
        import torch

        n, k = codes.shape
        kind = self._package.DType.BF16
        made = self._package.GemLiteLinear(
            4, group_size=group, in_features=k, out_features=n, input_dtype=kind, output_dtype=kind
        )
        made.pack(codes, scales.to(torch.bfloat16), zeros)
        return made

    def prepare(self, layer: Any, inputs: Sequence[Any]) -> None:
        """Tune a module for each of some inputs."""
        with self._compiling():
            for x in inputs:
                layer(x)
        with self._briefly():
            for x in inputs:
                layer(x)
        if self._configs is not None:
            self._configs.parent.mkdir(parents=True, exist_ok=True)
            self._package.cache_config(str(self._configs))

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Calls compile all their configurations, in the background, and run none."""
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner

        true = Autotuner.run
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            try:
                with AsyncCompileMode(pool, ignore_errors=True):
                    Autotuner.run = _compile_all
                    yield
            finally:
                Autotuner.run = true

    @contextmanager
    def _briefly(self) -> Iterator[None]:
        """Autotuning takes milliseconds to a configuration, and copies nothing. Results are of no use meanwhile."""
        from triton.testing import do_bench

        def bench(call: Callable[[], Any], quantiles: Sequence[float]) -> Any:
            return do_bench(call, warmup=1, rep=TUNING_MS, quantiles=quantiles)

        names = ("pre_hook", "post_hook", "do_bench")
        before = [(tuner, [getattr(tuner, name) for name in names]) for tuner in self._tuners]
        try:
            for tuner in self._tuners:
                tuner.pre_hook = tuner.post_hook = lambda *_, **__: None
                tuner.do_bench = bench
            yield
        finally:
            for tuner, values in before:
                for name, value in zip(names, values, strict=True):
                    setattr(tuner, name, value)


def _compile_all(tuner: Any, *args: Any, **options: Any) -> None:
    """An autotuner's `run` that only compiles."""
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    options.pop("warmup", None)
    for config in tuner.prune_configs(options):
        tuner.fn.run(*args, warmup=True, **options, **config.all_kwargs())


def q4_0_codes(rows: Any) -> tuple[Any, Any]:
    """Blocks of Q4_0 as codes 0 to 15 [n, k] and scales [n, k / 32]."""
    import torch

    n = len(rows)
    blocks = rows.view(n, -1, 18)
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    low = blocks[..., 2:]
    return torch.cat([low & 15, low >> 4], -1).reshape(n, -1).contiguous(), scales


def grouped(weight: Any, group: int) -> tuple[Any, Any, Any]:
    """A weight in 4 bits: codes 0 to 15 [n, k], scales and zero points [n, k / group]; w is (code - zero) * scale."""
    import torch

    n, k = weight.shape
    wide = weight.float().view(n, k // group, group)
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    scales = (high - low).clamp_min(1e-8) / 15
    zeros = (-low / scales).to(torch.bfloat16)
    codes = (wide / scales + zeros.float()).round().clamp(0, 15).to(torch.uint8).view(n, k)
    return codes, scales[..., 0].to(torch.bfloat16), zeros[..., 0]
