"""Processes of one group, forked: what was imported is imported in all, so four cost what one does."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import isogemm


def report(**found: Any) -> None:
    """One line, written at once, or lines of two processes would mix."""
    os.write(1, (json.dumps(found) + "\n").encode())


def ranks(world: int, checks: list[Callable[[int], Iterator[dict[str, Any]]]], limit: float) -> int:
    """Run each check, all at once, in as many processes of a gloo group of its own; the number of those that failed."""
    torch.set_num_threads(1)
    isogemm.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        stores = [(check, f"file://{folder}/{i}") for i, check in enumerate(checks)]
        return _waited([_forked(rank, world, at, check) for check, at in stores for rank in range(world)], limit)


def _forked(rank: int, world: int, where: str, check: Callable[[int], Iterator[dict[str, Any]]]) -> int:
    child = os.fork()  # no thread has begun
    if child:
        return child
    status = 1
    try:
        timeout = timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world, timeout=timeout)
        for found in check(rank):
            report(rank=rank, **found)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _waited(children: list[int], limit: float) -> int:
    left, failed, until = set(children), 0, time.monotonic() + limit
    while left:
        for child in list(left):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                left.discard(child)
                failed += status != 0
        if time.monotonic() > until:
            for child in left:
                os.kill(child, 9)
        time.sleep(0.01)
    return failed
