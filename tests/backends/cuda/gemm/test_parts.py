"""What blocks of a float32 product walk, by the device code compiled for the CPU: all of K once, nobody waiting."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import isogemm
from isogemm.backends.cuda.gemm.sgemm.tiles import RingTile, shares_of
from isogemm.contract import Contract
from isogemm.problem.product import Product, Strides

INCLUDE = Path(isogemm.__file__).parent / "backends/cuda/include/fp32_parts.cu"
TILE = RingTile(4, 8, 1, 1, 4, 16, 3, 1, 3, False)
MOST = 512  # parts of a block
HARNESS = """
#include <algorithm>
using std::min; using std::max;
typedef long long i64; typedef unsigned u32;
#define __device__
#define __forceinline__ inline
constexpr int BM = {m}, BN = {n}, BK = {k}, TM = 1, TN = 1;
constexpr bool SHARED = {shared}, LEAF = false;
struct {{ int x, y, z; }} blockIdx, gridDim;
void __stcg(float* to, float v) {{ *to = v; }}
float __ldcg(const float* from) {{ return *from; }}
#include "{include}"
extern "C" int parts(int block, int blocks, int m, int n, int k, int batch, int team, i64 (*found)[6]) {{
  int count = 0;
  blockIdx = {{block, 0, 0}}, gridDim = {{blocks, 1, 1}};
  each_part(m, n, k, batch, team, [&](int m0, int n0, i64 item, int start, int stop, bool last) {{
    const i64 part[6] = {{m0, n0, item, start, stop, last}};
    std::copy(part, part + 6, found[count++]);
  }});
  return count;
}}
"""


class Part(NamedTuple):
    m0: int
    n0: int
    item: int
    start: int
    stop: int
    last: int


@pytest.fixture(scope="module", params=["true", "false"])
def walked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``walked(product, blocks, team)``: the parts of each block, in its order; and whether blocks share tiles."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++, to compile device code as C++")
    folder = tmp_path_factory.mktemp("parts")
    source = folder / "parts.cpp"
    source.write_text(HARNESS.format(m=TILE.m, n=TILE.n, k=TILE.k, shared=request.param, include=INCLUDE))
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-w", str(source), "-o", str(folder / "parts.so")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    library = ctypes.CDLL(str(folder / "parts.so"))

    def blocks_of(p: Product, blocks: int, team: int) -> list[list[Part]]:
        made = []
        for block in range(blocks):
            found = (ctypes.c_longlong * 6 * MOST)()
            count = library.parts(block, blocks, p.m, p.n, p.k, p.batch, team, found)
            made.append([Part(*found[i]) for i in range(count)])
        return made

    return blocks_of, request.param == "true"


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 70), st.integers(1, 90), st.integers(1, 100), st.integers(1, 4), st.sampled_from([1, 2, 7, 132]))
def test_every_chain_is_walked_once_and_goes_on_where_it_was_left(
    walked: Any, m: int, n: int, k: int, batch: int, multiprocessors: int
) -> None:
    blocks_of, shared = walked
    p = Product(
        m, n, k, "float32", "float32", "float32", Contract(), Strides(k, 1, m * k), Strides(1, k, n * k),
        Strides(n, 1, m * n), batch=batch if shared else 1,
    )  # fmt: skip
    tiles = -(-m // TILE.m) * -(-n // TILE.n)
    shares = shares_of(p, TILE, multiprocessors)
    blocks, team = (shares.blocks, shares.size) if shared else (tiles, 0)
    made = blocks_of(p, blocks, team)
    of_tile = defaultdict(list)
    for block, parts in enumerate(made):
        assert [part.last for part in parts] == [0] * (len(parts) - 1) + [1]
        for place, part in enumerate(parts):
            of_tile[part.m0, part.n0, part.item].append((part.start, part.stop, block, place, len(parts)))
    assert len(of_tile) == tiles * p.batch
    assert {key[:2] for key in of_tile} == {(i, j) for i in range(0, m, TILE.m) for j in range(0, n, TILE.n)}
    for parts in of_tile.values():
        first, *rest = sorted(parts)
        assert (first[0], (rest or [first])[-1][1]) == (0, k)
        if rest:
            ((start, _, block, place, count),) = rest
            assert start == first[1]
            assert start % TILE.k == 0
            assert block == first[2] + team  # begun after the one that it waits for
            assert first[3] == 0
            assert place == count - 1
