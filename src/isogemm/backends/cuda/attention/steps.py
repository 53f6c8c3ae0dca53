"""What lies between the products of attention's gradients, in one pass over the scores on a CUDA device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .plans import KINDS, compiled, ints, longs

if TYPE_CHECKING:
    import torch

__all__ = ["bound", "defines_of", "steps"]

THREADS = 256


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
    want_p: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``p = exp2(t - u) * r`` and ``ds = p * (dp - delta)``, each rounded once to `dtype`.

    t is ``s * c``, plus `added`, -inf where `hidden`; u is m, or 0 where that is -inf; r is 1 / total, or 0 where that
    is 0. exp2 is that of float32 with products and sums rounded one by one.

    Parameters
    ----------
    s, dp : float32 CUDA tensors [n, rows, keys]
    m, total, delta : float32 tensors of n * rows elements
    c : float
        `contract.attention.factor` of the scale.
    dtype : torch dtype
    hidden : bool tensor that broadcasts to s, optional
    added : float32 tensor that broadcasts to s, optional
    want_p : bool

    Returns
    -------
    p : tensor [n, rows, keys], or None without `want_p`
    ds : tensor [n, rows, keys], or None without `dp`
    """
    import torch

    device = s.get_device()
    s, m, total = s.contiguous(), m.contiguous(), total.contiguous()
    dp = None if dp is None else dp.contiguous()
    delta = None if delta is None else delta.contiguous()
    p = torch.empty(s.shape, dtype=dtype, device=s.device) if want_p else None
    ds = None if dp is None else torch.empty(s.shape, dtype=dtype, device=s.device)
    if s.numel():
        seen = _steps_over(hidden, s), _steps_over(added, s)
        run = _bound(tuple(s.shape), *seen, float(c), str(dtype).removeprefix("torch."), device)
        values = (s, dp, m, total, delta, hidden, added, p, ds)
        run(torch._C._cuda_getCurrentRawStream(device), *(0 if x is None else x.data_ptr() for x in values))
    return p, ds


def _steps_over(x: Any, s: Any) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else tuple(x.expand(s.shape).stride())


@functools.lru_cache(maxsize=1024)
def _bound(
    shape: tuple[int, ...], hidden: tuple[int, ...], added: tuple[int, ...], c: float, dtype: str, device: int
) -> Callable[..., None]:
    """The launch of an admitted kernel: ``launch(stream, s, dp, m, total, delta, hidden, added, p, ds)``."""
    from ....planner.kernel_admission import Candidate
    from ..admitted import first_admitted
    from .admit import sources
    from .steps_trial import try_steps

    serve = functools.partial(bound, shape, hidden, added, c, dtype, device)
    code = " ".join(f"{key}={value}" for key, value in defines_of(dtype).items())
    trial = functools.partial(try_steps, dtype=dtype)
    one = Candidate("attention backward", code, sources(), trial, serve)
    return first_admitted(f"the gradients' steps of attention, {dtype}", [one], device)


def defines_of(dtype: str) -> dict[str, object]:
    """What selects the kernel's code."""
    return {"OUT": KINDS[dtype], "THREADS": THREADS}


def bound(
    shape: tuple[int, ...], hidden: tuple[int, ...], added: tuple[int, ...], c: float, dtype: str, device: int
) -> Callable[..., None]:
    """The launch, compiled and bound."""
    from ..driver.kernel import load

    n, rows, keys = shape
    cubin = compiled(("attention/steps.cu",), device, defines_of(dtype), "float32")
    kernel = load(cubin, "attention_backward", device)
    params = [*["ptr"] * 9, *longs(*hidden, *added), *ints(rows, keys), ("f32", c)]
    return kernel.bind(params, grid=(n * rows, -(-keys // (4 * THREADS))), block=(THREADS,), pdl=True)
