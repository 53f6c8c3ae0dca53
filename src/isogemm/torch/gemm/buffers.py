"""What is known of a float32 buffer for gradients: where in a leaf its sum stands, and whether it was read since.

A sum that goes on in the middle of a leaf has other bits than the whole batch, and nothing in its numbers says so. The
count of rows is kept with the tensor whose memory the buffer is, for views of it are made anew in each call. Compiled
code and captured graphs write to buffers without coming by here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd

import torch

from ...contract.spec import as_contract
from ...errors import OptionError
from ..operator import Tensor


def advance(out: Tensor, rows: int, contract: str) -> None:
    """Note that `rows` more are summed in a buffer under a contract; call it before they are.

    Raises OptionError: the sum so far ends inside of a leaf, or of a block of the arithmetic's where the order is a
    chain.
    """
    step = _step(contract)
    if step == 1 or (out.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    summed, place = _rows(out), out.storage_offset()
    before, divisor = summed.get(place, (0, 0))
    if before % step and rows:
        if bool(out.any()):
            _refuse(before, divisor, contract)
        before = divisor = 0  # somebody else has set the buffer to zero
    summed[place] = before + rows, gcd(divisor, rows)


def clear(buffers: Sequence[Tensor]) -> None:
    """Set buffers to zero, all by one call: the next rows begin a leaf."""
    if buffers:
        torch._foreach_zero_(list(buffers))
    for buffer in buffers:
        _rows(buffer).pop(buffer.storage_offset(), None)
        mark_read(buffer)


def mark_read(buffer: Tensor) -> None:
    """What the buffer holds has been taken from it."""
    buffer.isogemm_read = buffer._version


def is_unread(buffer: Tensor) -> bool:
    """Whether something was written since `mark_read`, or since the buffer was made."""
    return bool(buffer._version != getattr(buffer, "isogemm_read", 0))


def _rows(buffer: Tensor) -> dict[int, tuple[int, int]]:
    """How many rows the buffers in a tensor's memory sum, and what divides all their parts, by where they begin."""
    owner = buffer if buffer._base is None else buffer._base
    found: dict[int, tuple[int, int]] | None = getattr(owner, "isogemm_rows", None)
    if found is None:
        found = owner.isogemm_rows = {}
    return found


@lru_cache(maxsize=256)
def _step(contract: str) -> int:
    found = as_contract(contract)
    return found.order.size if found.order.kind == "leaf" else found.block


def _refuse(before: int, divisor: int, contract: str) -> None:
    found, step = as_contract(contract), _step(contract)
    end = -(-before // step) * step
    leaf = found.order.kind == "leaf"
    choices = [f'grad_order="leaf{divisor}" of the layer, or of convert'] if leaf and not divisor % found.block else []
    choices.append(f"a multiple of {step} rows, such as {end}, before this micro-batch")
    if leaf and found.block == 1:
        choices.append('grad_order="chain", which takes any number')
    what = f"{found.order}" if leaf else f"a chain of {found.arithmetic}"
    raise OptionError(
        "rows in main_grad before a micro-batch",
        limit=f"multiples of {step} rows (tokens) in every micro-batch but the step's last, for {what}",
        value=f"{before} rows, of which the last {before % step} are a part of one",
        nearest="; or ".join(choices) + "; and use_main_grad(model) again, since this step's sums are not whole",
        said=f"this micro-batch begins in the middle of {'a leaf' if leaf else 'a block'}, so its gradients would "
        "not have the bits of the whole batch",
    )  # fmt: skip
