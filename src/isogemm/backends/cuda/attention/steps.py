"""What lies between the products of attention's gradients, in one pass over the scores on a CUDA device.

The kernel's trial compares small operands with the definition: one row saw no key, one holds what is no number.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ....base.dtypes import CODE, NUMPY, torch_name
from ....contract.attention import gradient_steps
from ....contract.reference import canonical
from ....planner.bench import Bench, beside, difference
from ....planner.choose import Option, choose
from ..driver.kernel import Bound, ints, longs
from ..driver.machine import admissions
from .family import compiled, macros

if TYPE_CHECKING:
    import torch

THREADS = 256
SHAPES = ((2, 3, 1), (3, 5, 1300))  # of trials: items, rows, keys; a block owns 1024 keys
C = 0.18033688


def steps(
    s: torch.Tensor,
    m: torch.Tensor,
    total: torch.Tensor,
    *,
    c: float,
    dtype: torch.dtype,
    hidden: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
    dp: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(p, ds) of `isogemm.contract.attention.gradient_steps`.

    Parameters
    ----------
    s, dp : float32 CUDA tensors [n, rows, keys]
    m, total, delta : float32 tensors of n * rows elements
    c : float
        `contract.attention.factor` of the scale.
    dtype : torch dtype
    hidden : bool tensor that broadcasts to s, optional
    added : float32 tensor that broadcasts to s, optional

    Returns
    -------
    p : tensor [n, rows, keys]
    ds : tensor [n, rows, keys], or None without `dp`
    """
    import torch

    device = s.get_device()
    s, m, total = s.contiguous(), m.contiguous(), total.contiguous()
    dp = None if dp is None else dp.contiguous()
    delta = None if delta is None else delta.contiguous()
    p = torch.empty(s.shape, dtype=dtype, device=s.device)
    ds = None if dp is None else torch.empty(s.shape, dtype=dtype, device=s.device)
    if s.numel():
        seen = _steps_over(hidden, s), _steps_over(added, s)
        run = launch(StepsCase(tuple(s.shape), *seen, float(c), torch_name(dtype), device))
        values = (s, dp, m, total, delta, hidden, added, p, ds)
        run(torch._C._cuda_getCurrentRawStream(device), *(0 if x is None else x.data_ptr() for x in values))
    return p, ds


def _steps_over(x: Any, s: Any) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else tuple(x.expand(s.shape).stride())


class StepsCase(NamedTuple):
    """A launch but for its addresses: [n, rows, keys], steps of `hidden` and `added` over them, and numbers."""

    shape: tuple[int, ...]
    hidden: tuple[int, ...]
    added: tuple[int, ...]
    c: float
    dtype: str
    device: int


class Steps:
    """The family of one kernel: attention/steps.cu."""

    name = "attention backward"
    home = "backends/cuda/attention"

    def configs(self, case: StepsCase) -> Sequence[str]:
        """The text of its macros."""
        return [macros(self._defines(case))]

    def supports(self, case: StepsCase, config: str) -> bool:
        """Every case."""
        return True

    def code(self, case: StepsCase, config: str) -> str:
        """The configuration itself."""
        return config

    def _defines(self, case: StepsCase) -> dict[str, Any]:
        return {"OUT": CODE[case.dtype], "THREADS": THREADS}

    def bind(self, case: StepsCase, config: str, device: int) -> Bound:
        """``launch(stream, s, dp, m, total, delta, hidden, added, p, ds)``; what is absent has the address 0."""
        n, rows, keys = case.shape
        kernel = compiled("steps", "float32", device, self._defines(case), function="attention_backward")
        params = [*["ptr"] * 9, *longs(*case.hidden, *case.added), *ints(rows, keys), ("f32", case.c)]
        return kernel.bind(params, grid=(n * rows, -(-keys // (4 * THREADS))), block=(THREADS,), pdl=True)

    def trial(self, bench: Bench, case: StepsCase, config: str) -> str:
        """Empty where every bit of p and ds was right, else the first difference."""
        for shape in SHAPES:
            for masked, back, want_p in ((True, True, True), (False, True, False), (True, False, True)):
                absent = (() if masked else ("hidden", "added")) + (() if back else ("dp", "delta"))
                found = self._differs(bench, case, _drawn(shape) | dict.fromkeys(absent), want_p)
                if found:
                    return f"{list(shape)}{' masked' if masked else ''}: {found}"
        return ""

    def _differs(self, bench: Bench, case: StepsCase, held: dict[str, Any], want_p: bool) -> str:
        shape, keys, itemsize = held["s"].shape, held["s"].shape[-1], NUMPY[case.dtype].itemsize
        want = gradient_steps(**held, c=C, dtype=NUMPY[case.dtype])
        outs = [bench.output(shape, itemsize) if w else None for w in (want_p, held["dp"] is not None)]
        steps = (
            (0, 0, 0) if held["hidden"] is None else (0, keys, 1),
            (0, 0, 0) if held["added"] is None else (keys, 0, 1),
        )
        run = self.bind(StepsCase(shape, *steps, C, case.dtype, bench.device), "", bench.device)
        places = [bench.put(held[name]) for name in ("s", "dp", "m", "total", "delta", "hidden", "added")]
        run(bench.stream(), *[0 if x is None else x.address for x in (*places, *outs)])
        stray = 0
        for name, out, x in zip(("p", "ds"), outs, want, strict=True):
            if out is not None and x is not None:
                got, more = out.read()
                found, stray = difference(name, canonical(got.view(x.dtype)).view(got.dtype), x), stray + more
                if found:
                    return found
        return beside("the results", stray)


def _drawn(shape: tuple[int, ...]) -> dict[str, Any]:
    """Scores and what the forward pass kept of them."""
    random = np.random.default_rng(list(shape))
    n, rows, keys = shape
    s, dp = (random.standard_normal(shape).astype(np.float32) * size for size in (60, 1))
    m, total, delta = random.standard_normal((3, n, rows)).astype(np.float32)
    m, total = np.ceil(m * 10 + 30), np.abs(total)
    m[0, 1], total[0, 1] = -np.inf, 0
    s[1, 2, keys // 2], s[-1, 0, 0], dp[-1, 1, keys // 3] = np.nan, -np.inf, np.inf
    hidden = random.random((rows, keys)) < 0.3
    added = random.standard_normal((n, 1, keys)).astype(np.float32)
    return {"s": s, "dp": dp, "m": m, "total": total, "delta": delta, "hidden": hidden, "added": added}


KERNEL = Steps()


@lru_cache(maxsize=1024)
def launch(case: StepsCase) -> Bound:
    """The launch of the admitted kernel."""
    options = [Option(KERNEL, config) for config in KERNEL.configs(case)]
    what = f"the gradients' steps of attention, {case.dtype}"
    return choose(options, case, admissions(case.device), what=what).launch
