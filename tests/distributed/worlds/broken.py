"""Groups of which a rank dies or hangs."""

from __future__ import annotations

import os
import time

import torch.distributed as dist
from tests.distributed.worlds.parts import F32, ORDER, layer, part, random

from isogemm.errors import RankError
from isogemm.torch import distributed as idist
from isogemm.torch.distributed import Ranks


def broken(how):
    """A check in which rank 2 ends, or waits for the others to end, before a sum of four ranks; what these say."""
    ready, go, told, answered = (os.pipe() for _ in range(4))

    def check(rank):
        patient = Ranks(dist.group.WORLD, ORDER)  # first sums connect and load kernels
        of, x = Ranks(dist.group.WORLD, ORDER, timeout=4.0), part(random(8, 32), patient, -1)
        layer(idist.RowParallel, patient, F32)(x)
        made = layer(idist.RowParallel, of, F32)
        if rank == 2:  # nobody is still in the first sum, and all begin the second together
            _take(ready, 3)
            os.write(go[1], b"...")
            _take(told, 3 if how == "hangs" else 0)
            os._exit(0)
        os.write(ready[1], b".")
        _take(go, 1)
        started = time.monotonic()
        try:
            made(x)
        except RankError as error:
            yield {"what": f"rank 2 {how}", "error": str(error), "seconds": time.monotonic() - started, "differ": 0}
        os.write(told[1], b".")
        if rank == 0:  # the others are not left alone before they have answered
            _take(answered, 2)
        else:
            os.write(answered[1], b".")

    return check


def _take(pipe, count):
    """Wait for so many bytes that other processes write."""
    while count:
        count -= len(os.read(pipe[0], count))
