"""``int32`` with leaves and trees on a device: each leaf is a chain of its own, and sums of leaves meet in order.

A record holds 64 or 256 of K and a leaf is a multiple of 256, so a leaf's weights are a range of each tile's records.
"""

from __future__ import annotations

from typing import Any

from ....base.dtypes import torch_name
from ....contract.spec import Contract
from ....errors import ContractError
from ....operands.tensors import rounded
from . import family
from .case import QuantCase
from .copy import DeviceCopy
from .layout import Packed
from .pack import settle


def integers(copy: DeviceCopy, x: Any, out: Any, bias: Any, contract: Contract) -> None:
    """out = x @ W.T + bias for matrices of tensors, under ``int32`` with any order.

    Raises
    ------
    ContractError
        No kernel here has the chain's bits.
    """
    import torch

    leaves = contract.order.leaves(x.shape[1], contract.block)
    sums = [_leaf(copy, x, *leaf) for leaf in leaves]
    if contract.order.kind == "tree":
        while len(sums) > 1:  # order-critical: neighbours meet, level by level
            sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
        total = sums[0]
    else:
        total = torch.zeros_like(sums[0]) if sums else torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        for each in sums:  # order-critical: ascending
            total = total + each
    if bias is not None:
        total = total + bias.float()
    out.copy_(rounded(total, out.dtype))


def _leaf(copy: DeviceCopy, x: Any, start: int, stop: int) -> Any:
    """The chain over K of [start, stop), in float32."""
    import torch

    packed = copy.packed
    assert packed is not None
    lay, m, n = packed.layout, x.shape[0], packed.n
    made = torch.zeros((m, n), dtype=torch.float32, device=x.device)
    if stop <= start:
        return made
    size = lay.record_bytes
    whole = packed.data.view(lay.tiles(n), lay.records(packed.k), size)
    part = whole[:, start // lay.record_k : -(-stop // lay.record_k)].contiguous().view(-1)
    leaf = settle(Packed(part, lay, n, stop - start))
    case = QuantCase("q8", copy.format, torch_name(x.dtype), "float32", None, m, n, stop - start, "int32")
    run = family.choose(case, leaf, copy.place.ordinal)
    if run is None:
        raise ContractError(
            "no kernel on this device", limit=f"one whose bits are those of int32 on {copy.format}",
            value="all were refused", nearest="activations='fp32', or the CPU, which has the same bits",
        )  # fmt: skip
    run(x[:, start:stop].contiguous(), made, None)
    return made
