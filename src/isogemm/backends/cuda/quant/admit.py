"""Packing and dequantizing on a device, by kernels whose bits were compared with the definition, else by the host.

Where a kernel was refused, the host does its work: slowly, with the right bits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ....errors import DeviceError
from ....planner.kernel_admission import Candidate
from .. import admitted
from ..driver.facts import current_stream
from . import dequantize as quant_dequantize
from . import pack as quant_pack
from .layout import Packed, layout
from .layout import pack as packed_by_host

__all__ = ["dequantize", "pack", "settle"]


def pack(raw: Any, fmt: str, n: int, k: int) -> Packed:
    """Bytes of rows on a device, laid out for the kernels."""
    if _serves("quant pack", fmt, raw.get_device(), _try_pack):
        return quant_pack.pack(raw, fmt, n, k)
    import torch

    data = torch.from_numpy(packed_by_host(raw.cpu().numpy(), fmt)).to(raw.device)
    return settle(Packed(data, layout(fmt), n, k))


def settle(packed: Packed) -> Packed:
    """Packed weights that another kernel has just written, made ready for kernels that read before that has ended."""
    device = packed.data.get_device()
    quant_pack._kernels(packed.layout, 1, device)[1](current_stream(device))
    return packed


def dequantize(packed: Packed, out: Any, first: int, rows: Any) -> None:
    """Rows of the weights from `first` on, a multiple of 16, into a contiguous tensor [rows, k].

    Parameters
    ----------
    rows : callable
        Those floats from the host, in the type of `out`, where no kernel serves.

    Raises
    ------
    DeviceError
        While a graph is captured: the kernel was not tried before.
    """
    if not out.numel():
        return
    dtype = str(out.dtype).removeprefix("torch.")
    if _serves(
        "quant dequantize", f"{packed.format} > {dtype}", out.get_device(), partial(_try_dequantize, dtype=dtype)
    ):
        quant_dequantize.run(packed, out, first)
    else:
        import torch

        host = np.ascontiguousarray(rows())
        word = host.view(f"i{host.itemsize}")
        out.copy_(torch.from_numpy(word).to(out.device).view(out.dtype))


def _try_pack(machine: Any, code: str) -> str:
    from .trial import try_pack

    return try_pack(machine, code, quant_pack.pack)


def _try_dequantize(machine: Any, code: str, dtype: str) -> str:
    from .trial import try_dequantize

    return try_dequantize(machine, code.partition(" ")[0], dtype, quant_dequantize.run, quant_pack.pack)


def _serves(name: str, code: str, device: int, trial: Any) -> bool:
    from .family import sources

    candidate: Candidate[None] = Candidate(name, code, sources(), partial(trial, code=code), _nothing)
    verdict = admitted.admissions(device).verdict(candidate)
    if verdict.state == "unknown":
        raise DeviceError(
            "graph capture",
            limit="kernels that were admitted before: a trial cannot run while a stream is captured",
            value=f"{name} of {code}", nearest="call once with these weights before capturing",
        )  # fmt: skip
    return verdict.state == "admitted"


def _nothing() -> None:
    """Nothing is bound before it is called."""
