"""Whether the calling thread has IEEE defaults, told by sums and products: what has them needs no compiler to set them.

`isogemm.base.floating` sets them by machine code, for which it loads Numba and compiles for half a second or more. A
first call on a GPU, which rounds some golden results on the host, does not wait for that.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np

_ONE, _STEP, _TINY = np.float32(1), np.float32(2.0**-23), np.float32(2.0**-149)
_SMALL, _HALF = np.float32(2.0**-126), np.float32(0.5)


def has_defaults() -> bool:
    """To nearest, ties to even; subnormals are read as they are, and made."""
    with np.errstate(all="ignore"):
        nearest = _ONE + _STEP * _HALF == _ONE and -_ONE - _STEP * _HALF == -_ONE  # neither upwards nor downwards
        nearest = nearest and (_ONE + _STEP) + _STEP * _HALF == _ONE + _STEP + _STEP  # nor towards zero
        return bool(nearest and _TINY * _ONE != 0 and _SMALL * _HALF != 0)


def ieee_defaults() -> AbstractContextManager[None]:
    """IEEE defaults in the calling thread alone, inside the block."""
    if has_defaults():
        return nullcontext()
    from .floating import ieee_defaults as by_machine_code

    return by_machine_code()
