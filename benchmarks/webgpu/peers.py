"""Public matmuls in WGSL, from a folder, on the operands of ours."""

from __future__ import annotations

import json as json_of
import struct
from pathlib import Path
from typing import Any

import numpy as np

from isogemm.backends.webgpu.adapter import ReadyLaunch
from isogemm.backends.webgpu.array import buffer_of
from isogemm.backends.webgpu.trusted import TRUSTED

from ..common import words_of
from .products import Operands
from .rounds import Bench, Make, Timed, bound_launch


def peers_of(bench: Bench, held: Operands, product: str, folder: Path) -> list[tuple[Timed, Make]]:
    """Those on the same operands, without wgpu's checks, with which they are 40 times slower and more."""
    size, adapter, candidates = held.n, bench.adapter, list[tuple[Timed, Make]]()
    for peer in json_of.loads((folder / "peers.json").read_text()):
        if peer.get("sizes") and size not in peer["sizes"]:
            continue
        code = (folder / peer["file"]).read_text()
        for text in sorted(peer.get("fill", {}), key=len, reverse=True):
            code = code.replace(text, str(size))
        name = f"{peer['name']} {peer['version']}"
        row = Timed(product, name, size, size, size, held.nbytes, checked=False)
        try:
            make, out = peer_make(adapter, peer, TRUSTED + code, held, size)
            adapter.submit(make(0))
            got = np.frombuffer(adapter.read(out, 0, 4 * 8 * size), np.float32).reshape(8, size)
            want = held.x[:8].astype(np.float64) @ held.w.T.astype(np.float64)
            wrong = float(np.abs(got - want).max() / np.sqrt(size))
            if not wrong < 1e-3:
                raise ValueError(f"the product is wrong by {wrong:.3g} sqrt(k)")
            candidates.append((row, make))
        except Exception as error:
            row.error = words_of(error)
            bench.rows.append(row)
            bench.say(f"{name}: {row.error}")
    return candidates


def peer_make(adapter: Any, peer: dict[str, Any], code: str, held: Operands, size: int) -> tuple[Make, Any]:
    """Launches of a peer, and its result's buffer."""
    import wgpu

    out = adapter.allocate(4 * size * size)
    uniform = adapter._device.create_buffer_with_data(
        data=struct.pack("<4I", *[size] * 4), usage=wgpu.BufferUsage.UNIFORM
    )
    grid = [-(-size // by) for _, by in peer["workgroups"]]

    def make(i: int) -> list[ReadyLaunch]:
        weight = held.weights[i % len(held.weights)]
        named = {"a": buffer_of(held.there.__isogemm_view__("a")), "b": buffer_of(weight.__isogemm_view__("b")),
                 "out": out, "uniform": uniform}  # fmt: skip
        bound = {at: named[name] for at, name in enumerate(peer["bindings"])}
        return [bound_launch(adapter, code, bound, (grid[0], grid[1]))]

    return make, out
