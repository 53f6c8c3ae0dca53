"""float32 kernels: FFMA tiles, few rows, tf32 and tf32x3, against the CPU's kernels and the executable definition."""

from __future__ import annotations

from dataclasses import replace
from itertools import product as pairs
from typing import Any

import numpy as np
import pytest
from benchmarks.draw import of_gpus
from hypothesis import given
from hypothesis import strategies as st

from isogemm.backends.cuda.driver import tensormap
from isogemm.backends.cuda.gemm.fp32 import ADD_BIAS, ADD_C, START, VECTOR, types_of
from isogemm.backends.cuda.gemm.sgemm.family import Sgemm, boxes_of
from isogemm.backends.cuda.gemm.sgemm.model import microseconds
from isogemm.backends.cuda.gemm.sgemm.tiles import CONFIGS as SGEMM
from isogemm.backends.cuda.gemm.sgemm.tiles import (
    COPIED,
    RINGS,
    SHARED,
    TILES,
    SgemmConfig,
    Shares,
    boxed,
    copies,
    loads,
    shares_of,
)
from isogemm.backends.cuda.gemm.tf32.family import CONFIGS, Tf32, cut
from isogemm.base.dtypes import CODE
from isogemm.contract import Contract
from isogemm.planner.trials import golden_products, variant_of
from isogemm.problem.product import Product, Strides

CONTRACTS = ("tf32:sm90/chain", "tf32x3:sm90/chain")


def sample(m: int, n: int, k: int, contract: str = "fma/chain", **changes: Any) -> Product:
    """A dense product of row-major A and weights [n, k]."""
    given = Product(
        m, n, k, "float32", "float32", "float32", Contract.parse(contract), Strides(k, 1), Strides(1, k), Strides(n, 1)
    )  # fmt: skip
    return replace(given, **changes)


def test_every_product_of_the_arithmetic_has_a_kernel() -> None:
    for m, n, k in ((1, 1, 1), (1, 4096, 4096), (17, 33, 5), (4096, 4096, 4096), (3, 2**24, 7)):
        for order in ("chain", "leaf32", "leaf4096"):
            assert Sgemm().configs(sample(m, n, k, f"fma/{order}"))
        for order in ("chain", "leaf32", "leaf4096", "tree2", "tree16"):
            for name in ("tf32:sm90", "tf32x3:sm90"):
                odd = sample(m, n, k, f"{name}/{order}", a=Strides(3, 2 * m + 1), align=4)
                assert Tf32().configs(odd)


def test_what_is_not_served() -> None:
    for family, contract in ((Sgemm(), "fma/chain"), (Tf32(), "tf32:sm90/chain"), (Tf32(), "tf32x3:sm90/chain")):
        good = sample(64, 64, 64, contract)
        config = family.configs(good)[0]
        assert family.supports(good, config)
        assert not family.supports(good, "nonsense")
        assert not family.supports(good, "128x128")
        for change in (
            {"dtype_a": "bfloat16"},
            {"contract": Contract.parse("tensor_core:sm90")},
            {"k": 0},
            {"m": 2**31},
            {"accumulate": True, "c": Strides(64, 1), "dtype_c": "bfloat16"},
        ):
            assert not family.supports(replace(good, **change), config)
            assert not family.configs(replace(good, **change))
    for contract in ("fma/tree2", "fma/leaf34", "fma/leaf35"):  # where such leaves begin 4 values are no one load
        assert not Sgemm().configs(sample(8, 8, 72, contract))
        assert not Sgemm().supports(sample(8, 8, 72, contract), "64x64 k16")


def test_few_rows_take_narrow_tiles_and_many_take_wide_ones() -> None:
    for change in ({}, {"align": 4}, {"b": Strides(4096, 1)}, {"b": Strides(1, 4097)}, {"a": Strides(1, 4)}):
        first, *_ = Sgemm().configs(replace(sample(4, 4096, 4096), **change))
        assert RINGS[SgemmConfig.parse(first).tile].m <= 16
    assert SgemmConfig.parse(Sgemm().configs(sample(4096, 4096, 4096))[0]).tile in TILES


def test_a_large_operand_is_not_turned_for_a_few_rows() -> None:
    """W [k, n] of an odd n, and x along its rows: turned first it took 29.5 us on an H200, as it lies 16.6."""
    odd = sample(8, 737, 2640, a=Strides(1, 8), b=Strides(737, 1))
    assert not SgemmConfig.parse(Sgemm().configs(odd)[0]).copied
    copied = SgemmConfig.parse("2x16 k128 s5 copied")
    along = replace(odd, a=Strides(2641, 1), b=Strides(1, 2641))
    assert microseconds(odd, copied, 132) > 1.3 * microseconds(along, copied, 132)


def test_copies_are_as_wide_as_addresses_and_steps_allow() -> None:
    for change, want in (
        ({}, [(True, 4), (True, 4)]),
        ({"align": 8}, [(True, 2), (True, 2)]),
        ({"a": Strides(258, 1)}, [(True, 2), (True, 4)]),
        ({"b": Strides(1, 257)}, [(True, 4), (True, 1)]),
        ({"b": Strides(64, 1)}, [(True, 4), (False, 4)]),
        ({"a": Strides(1, 66), "b": Strides(2, 512)}, [(False, 2), (True, 1)]),
        ({"m": 1, "a": Strides(3, 1)}, [(True, 4), (True, 4)]),
    ):
        assert copies(replace(sample(66, 64, 256), **change), RINGS["32x32 k64 s4"]) == want, change


BACKWARDS = (
    {"a": Strides(0, 1)},
    {"a": Strides(-256, 1)},
    {"b": Strides(1, -256)},
    {"batch": 3, "a": Strides(256, 1, -66 * 256), "b": Strides(1, 256, 64 * 256)},
)


@pytest.mark.parametrize("change", [{}, *BACKWARDS])
def test_the_copy_engine_is_asked_for_no_lines_in_one_place_or_backwards(change: dict[str, Any]) -> None:
    product = replace(sample(66, 64, 256), **change)
    found = [SgemmConfig.parse(config) for config in Sgemm().configs(product)]
    assert any(c.tile in TILES for c in found)
    assert any(c.tile in RINGS and boxed(product, c.sizes) for c in found) == (not change)


@given(
    m=st.integers(1, 300), n=st.integers(1, 300), k=st.integers(1, 600), batch=st.integers(1, 3), one=st.booleans(),
    across=st.sampled_from(["NT", "NN", "TN", "TT"]), wider=st.integers(0, 9),
)  # fmt: skip
def test_what_the_copy_engine_is_asked_for_is_legal(m, n, k, batch, one, across, wider) -> None:
    def lying(rows: int, columns: int) -> Strides:
        step = columns + wider
        return Strides(step, 1, 0 if one else rows * step)

    a = lying(m, k) if across[0] == "N" else lying(k, m)._replace(row=1, col=m + wider)
    b = lying(k, n) if across[1] == "N" else lying(n, k)._replace(row=1, col=k + wider)
    product = sample(m, n, k, batch=batch, a=a, b=b, out=Strides(n, 1, m * n))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tensormap, "driver", object)
        for config in map(SgemmConfig.parse, Sgemm().configs(product)):
            if config.tile in RINGS and not config.copied and boxed(product, config.sizes):
                boxes_of(product, config.sizes)  # whose rules are held by `encoder`


def test_loads_of_tiles_are_as_wide_as_addresses_and_steps_allow() -> None:
    for change, want in (
        ({}, [(0, 4), (0, 4)]),
        ({"align": 8}, [(0, 2), (0, 2)]),
        ({"a": Strides(258, 1), "b": Strides(1, 257)}, [(0, 2), (0, 1)]),
        ({"b": Strides(64, 1)}, [(0, 4), (1, 4)]),
        ({"a": Strides(1, 66), "b": Strides(65, 1)}, [(2, 1), (2, 1)]),
        ({"a": Strides(1, 68), "b": Strides(2, 512)}, [(2, 1), (2, 1)]),  # 66 rows: the last load would pass them
        ({"m": 1, "a": Strides(3, 1)}, [(0, 4), (0, 4)]),
        ({"k": 1, "a": Strides(1, 7), "b": Strides(9, 1)}, [(0, 1), (0, 1)]),
        ({"batch": 3, "a": Strides(256, 1, 66 * 256 + 2), "b": Strides(1, 256, 64 * 256)}, [(0, 2), (0, 4)]),
        ({"a": Strides(0, 1), "b": Strides(0, 1)}, [(0, 4), (1, 4)]),  # one row, one line, in all places
        ({"a": Strides(-256, 1), "b": Strides(1, -257)}, [(0, 4), (0, 1)]),
        ({"a": Strides(512, 2), "b": Strides(-1, 256)}, [(2, 1), (2, 1)]),
    ):
        assert loads(replace(sample(66, 64, 256), **change)) == want, change


def test_the_expected_time_grows_with_rounds_and_with_k_and_is_no_less_than_memory_s() -> None:
    for config in SGEMM:
        tile = config.sizes
        once = sample(tile.m, 132 * tile.n, 4096, b=Strides(1, 4098 if config.copied else 4096))
        often, deep = replace(once, n=8 * once.n), replace(once, k=8 * once.k)
        assert microseconds(once, config, 132) < min(microseconds(often, config, 132), microseconds(deep, config, 132))
        assert microseconds(often, config, 4 * 132) <= microseconds(often, config, 132)
        assert microseconds(often, config, 10**6) > 4 * often.n * often.k / 5e6
        if not config.copied:
            slower = microseconds(replace(once, align=4), config, 132) / microseconds(once, config, 132)
            assert slower > 1 or (slower == 1 and config.tile == "128x128 k8")


def test_a_few_configurations_serve_nearly_all_products_until_the_best_is_built() -> None:
    near = 0
    drawn = [x for x in of_gpus(77, 400) if x.dtype == "float32"]
    for x in drawn:
        p = sample(x.m, x.n, x.k, a=Strides(x.k, 1), b=Strides(1, x.k) if x.layout[1] == "T" else Strides(x.n, 1))
        best, *_ = Sgemm().configs(p)
        found = [microseconds(p, SgemmConfig.parse(config), 132) for config in (best, *Sgemm().palette(p))]
        near += min(found[1:]) <= 2 * found[0]
    assert len(found) == 7
    assert near >= 0.97 * len(drawn)
    assert not Sgemm().palette(sample(8, 8, 8, "tf32:sm90/chain"))


@pytest.mark.parametrize("text", ["32x32", "32x32 k64 s4 copied sk", " sk", "32x32 k64 s4  sk"])
def test_what_is_no_configuration_is_none(text: str) -> None:
    assert SgemmConfig.parse(text) is None
    assert not Sgemm().supports(sample(512, 512, 512), text)


def test_shares_are_offered_where_the_last_round_is_not_full() -> None:
    name = "32x32 k64 s4"  # three to a multiprocessor
    for rows, columns, want in (
        (1, 400, Shares(396, 1, 400)),
        (1, 396, Shares(396, 1, 396)),
        (1, 395, Shares(264, 1, 395)),
        (1, 180, Shares(132, 1, 180)),
        (1, 131, Shares(130, 1, 131)),
        (1, 2, Shares(1, 1, 2)),
        (1, 1, Shares(1, 1, 1)),
        (5, 80, Shares(79, 5, 80)),  # 400 tiles, 396 at once
        (12, 34, Shares(66, 6, 68)),
        (11, 37, Shares(396, 1, 407)),
    ):
        p = sample(rows * 32, columns * 32, 4096)
        assert shares_of(p, RINGS[name], 132) == want
        assert Sgemm().supports(p, name + SHARED) == want.uneven
    assert not Sgemm().supports(sample(512, 512, 4096, "fma/leaf512"), "32x32 k64 s4" + SHARED)
    # Copies of less than 16 bytes take a second warp, and with it the registers of a third block.
    odd = sample(32, 400 * 32, 4098)
    assert shares_of(odd, RINGS[name], 132) == Shares(264, 1, 400)
    assert shares_of(odd, RINGS["16x32 k64 s4"], 132) == Shares(264, 2, 400)


@pytest.mark.parametrize("k", [1, 4, 31, 32, 33, 100, 1000])
def test_cuts_of_k_begin_rows_of_shared_memory(k: int) -> None:
    for name, order in pairs(("tf32:sm90", "tf32x3:sm90"), ("leaf32", "leaf96", "leaf4096", "tree2", "tree16")):
        contract = Contract.parse(f"{name}/{order}")
        c = cut(sample(3, 3, k, str(contract)))
        leaves = contract.order.leaves(k, contract.block)
        assert c.padded % 32 == 0
        assert c.padded >= c.leaf
        assert [start for start, stop in leaves if start < stop] == [
            i * c.leaf for i in range(len(leaves)) if i * c.leaf < k
        ]
        assert c.pitch == c.padded * len(leaves)
        assert c.blocks * c.chunks * 32 == c.pitch
    assert cut(sample(3, 3, k, "tf32:sm90/leaf8")).padded == 32
    assert cut(sample(3, 3, k, "tf32:sm90/chain")).blocks == -(-k // 32)


@pytest.mark.gpu
class TestOnTheDevice:
    """Bits, with NaN-poisoned outputs."""

    @staticmethod
    def numbers(shape: tuple[int, ...], seed: int, special: bool = True) -> np.ndarray:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal(shape, np.float32) * np.exp2(rng.integers(-4, 5, shape)).astype(np.float32)
        if special:
            odd = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40, 3e38, -3.4028235e38], np.float32)
            hit = rng.random(shape) < 0.4 / shape[-1]
            x[hit] = rng.choice(odd, int(hit.sum()))
        return x

    @staticmethod
    def lay(x: np.ndarray, layout: str) -> Any:
        """On the GPU: rows contiguous (n), at 16 bytes too (p), columns contiguous (t), or neither, unaligned (s)."""
        import torch

        y = torch.from_numpy(x).cuda()
        if layout == "t":
            return y.transpose(-1, -2).contiguous().transpose(-1, -2)
        if layout == "n":
            return y
        if layout == "p":
            wide = torch.full((*x.shape[:-1], x.shape[-1] // 4 * 4 + 4), float("nan"), device="cuda")
            wide[..., : x.shape[-1]] = y
            return wide[..., : x.shape[-1]]
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), float("nan"), device="cuda")
        wide[..., 1::2] = y
        return wide[..., 1::2]

    def check(self, family: Any, config: str, a: np.ndarray, b: np.ndarray, contract: str, **more: Any) -> None:
        """One kernel against `reference`, with the layouts and the epilogue in `more`."""
        import torch

        from isogemm.contract import reference
        from isogemm.contract.compare import first_mismatch

        layouts, out_dtype = more.pop("layouts", "nt"), more.pop("out_dtype", "float32")
        alpha, beta, accumulate = more.pop("alpha", 1.0), more.pop("beta", 0.0), more.pop("accumulate", False)
        c, bias = more.pop("c", None), more.pop("bias", None)
        assert not more
        x, y = self.lay(a, layouts[0]), self.lay(b, layouts[1])
        shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        start, added = None if c is None else self.lay(c, "n"), None if bias is None else self.lay(bias, "n")
        out = torch.full(shape, float("nan"), device="cuda", dtype=getattr(torch, out_dtype))

        def steps(t: Any) -> Strides:
            return Strides(t.stride(-2), t.stride(-1), t.stride(0) if t.ndim == 3 else 0)

        addresses = [0 if t is None else t.data_ptr() for t in (x, y, out, start, added)]
        common = 128
        for address in addresses:
            common |= address
        given = Product(
            shape[-2], shape[-1], a.shape[-1], "float32", "float32", out_dtype, Contract.parse(contract), steps(x),
            steps(y), steps(out), batch=shape[0] if len(shape) == 3 else 1, c=None if start is None else steps(start),
            dtype_c=None if start is None else "float32", dtype_bias=None if added is None else "float32",
            alpha=float(np.float32(alpha)), beta=float(np.float32(beta)), accumulate=accumulate, align=common & -common,
        )  # fmt: skip
        if not family.supports(given, config):
            assert "leaf" in contract or config.endswith(COPIED) or (SHARED in config and given.n != 280)
            return
        from isogemm.problem.product import Addresses

        family.bind(given, config, 0)(Addresses(*addresses), torch.cuda.current_stream().cuda_stream)
        got = out.float().cpu().numpy()
        for i in range(given.batch):
            one = [z if z is None or z.ndim == 2 else z[i] for z in (a, b, c)]
            acc = reference.evaluate(one[0], one[1], contract, one[2] if accumulate else None)
            want = reference.epilogue(
                acc, alpha=alpha, beta=beta, c=None if accumulate else one[2], bias=bias, out_dtype=np.float32
            )
            if out_dtype == "float16":
                want = want.astype(np.float16).astype(np.float32)
            here = got if got.ndim == 2 else got[i]
            where = f"{family.name} [{config}] {contract} {a.shape} {b.shape} {layouts}"
            assert first_mismatch(reference.canonical(here), reference.canonical(want)) is None, where
            if out_dtype == "float32":
                assert first_mismatch(here, want) is None, where

    @pytest.mark.parametrize("config", [str(c) for c in SGEMM if c.tile in TILES or not c.copied])
    def test_fma(self, config: str) -> None:
        family = Sgemm()
        rows = 133
        shapes = (rows, 280, 260), (rows - 1, 131, 67), (rows - 2, 70, 130), (1, 70, 130)
        for (m, n, k), layouts in pairs(shapes, ("nt", "nn", "tn", "tt", "ss", "sn", "ns", "pp")):
            a, b = self.numbers((m, k), 1), self.numbers((k, n), 2)
            self.check(family, config, a, b, "fma/chain", layouts=layouts)
        a, b, c = self.numbers((rows, 520), 3), self.numbers((520, 68), 4), self.numbers((rows, 68), 5)
        bias = self.numbers((68,), 6)
        for contract in ("fma/chain", "fma/leaf128", "fma/leaf36", "fma/leaf4096"):
            self.check(family, config, a, b, contract, c=c, accumulate=True)
            self.check(family, config, a, b, contract, c=c, alpha=0.7, beta=-1.3, bias=bias)
        self.check(family, config, a, b, "fma/chain", out_dtype="float16", alpha=0.0)
        self.check(family, config, self.numbers((rows, 130), 10), b[:130], "fma/leaf36")
        stack = self.numbers((3, rows, 100), 7), self.numbers((3, 100, 36), 8)
        self.check(family, config, *stack, "fma/chain", c=self.numbers((3, rows, 36), 9), beta=1.0)
        self.check(family, config, stack[0], stack[1][0], "fma/chain")
        for k in (97, 98):
            some = self.numbers((3, rows, k), 11), self.numbers((3, k, 36), 12)
            self.check(family, config, *some, "fma/chain", layouts="nt")

    @pytest.mark.parametrize("contract", CONTRACTS)
    @pytest.mark.parametrize("config", sorted({*CONFIGS[1], *CONFIGS[3]}))
    def test_tensor_cores(self, config: str, contract: str) -> None:
        family, name = Tf32(), contract.split("/")[0]
        if not family.supports(sample(8, 8, 8, contract), config):
            return
        for (m, n, k), layouts in pairs(((300, 270, 100), (3, 5, 36), (129, 64, 67)), ("nt", "nn", "tn", "ss")):
            self.check(family, config, self.numbers((m, k), 1), self.numbers((k, n), 2), contract, layouts=layouts)
        a, b, c = self.numbers((140, 200), 3), self.numbers((200, 68), 4), self.numbers((140, 68), 5)
        bias = self.numbers((68,), 6)
        for order in ("chain", "leaf64", "leaf96", "leaf4096", "leaf8", "tree2", "tree16"):
            if order == "leaf8" and name != "tf32:sm90":
                continue
            if not family.supports(sample(140, 68, 200, f"{name}/{order}"), config):
                continue
            self.check(family, config, a, b, f"{name}/{order}", c=c, alpha=0.7, beta=-1.3, bias=bias)
            if not order.startswith("tree"):
                self.check(family, config, a, b, f"{name}/{order}", c=c, accumulate=True)
        stack = self.numbers((3, 130, 100), 7), self.numbers((3, 100, 36), 8)
        self.check(family, config, *stack, contract, c=self.numbers((3, 130, 36), 9), beta=1.0)
        self.check(family, config, stack[0], stack[1][0], contract)
        self.check(family, config, *stack, f"{name}/tree4")
        self.check(family, config, a, b, contract, out_dtype="float16", alpha=0.0)

    def test_large_products_have_the_bits_of_their_parts(self) -> None:
        """More tiles than multiprocessors, all configurations, and K long enough for the rings to turn."""
        import torch

        generator = torch.Generator("cuda").manual_seed(1)
        a, b = (torch.randn((size, 1100), generator=generator, device="cuda") for size in (2100, 2304))
        for family, contract, config in (
            *((Sgemm(), "fma/chain", name) for name in (*TILES, *RINGS)),
            *((Tf32(), CONTRACTS[0], name) for name in CONFIGS[1]),
            *((Tf32(), CONTRACTS[1], name) for name in CONFIGS[3]),
        ):
            from isogemm.problem.product import Addresses

            out = torch.full((2100, 2304), float("nan"), device="cuda")
            stream = torch.cuda.current_stream().cuda_stream
            at = Addresses(a.data_ptr(), b.data_ptr(), out.data_ptr())
            family.bind(sample(2100, 2304, 1100, contract), config, 0)(at, stream)
            rows, columns = slice(1030, 1042), slice(2256, 2304)
            corner = a[rows].cpu().numpy(), b[columns].T.cpu().numpy()
            from isogemm.contract import reference
            from isogemm.contract.compare import first_mismatch

            want = reference.evaluate(*corner, contract)
            assert first_mismatch(out[rows, columns].cpu().numpy(), want) is None, (contract, config)
            assert not torch.isnan(out).any(), (contract, config)


STEPS = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 1024, 1027])


@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40), STEPS, STEPS), min_size=20, max_size=40),
    out=st.sampled_from(["float32", "bfloat16"]), batch=st.sampled_from([(1, 0), (1, 6), (3, 4096), (3, 4098)]),
    align=st.sampled_from([2, 4, 8, 16, 64, 128]), c=st.sampled_from([None, "float32", "float16"]),
)  # fmt: skip
def test_what_is_compiled_in_is_the_variant_s_and_legal_for_the_product(sizes, out, batch, align, c) -> None:
    """A verdict is about a variant, so all of its products are compiled alike; only whole pieces are stored at once."""
    items, step = batch
    found: dict[str, int] = {}
    for m, n, row, col in sizes:
        lies = Strides(row, col, step)
        p = sample(
            m, n, 64, dtype_out=out, out=lies, batch=items, align=align, dtype_bias=c, beta=0.0 if c is None else 2.0,
            c=None if c is None else lies, dtype_c=c,
        )  # fmt: skip
        types = types_of(p)
        assert found.setdefault(variant_of(p), types) == types
        assert [types >> at & 15 for at in (0, 4, 8)] == [CODE[out], CODE[c or "float32"], CODE[c or "float32"]]
        assert types >> 12 & ~VECTOR == (0 if c is None else ADD_C | ADD_BIAS)
        mixed = types_of(replace(p, dtype_bias="bfloat16"))
        assert (mixed >> 4 & 15, mixed >> 8 & 15) == (CODE[c or "float32"], CODE["bfloat16"])
        walk = replace(p, accumulate=True, c=p.out, dtype_c="float32", dtype_bias=None)
        assert types_of(walk) >> 12 & ~VECTOR == START
        if types >> 12 & VECTOR and n > 1:
            assert (align >= 16, col, step % 4 if items > 1 else 0) == (True, 1, 0)
            assert row % 4 == 0 or row == 1
        if align >= 16 and (col, row % 4, step % 4) == (1, 0, 0):
            assert types >> 12 & VECTOR


@pytest.mark.parametrize(
    "changes", [{}, {"dtype_bias": "float32"}, {"dtype_out": "bfloat16"}, {"batch": 2}, {"align": 4}]
)
def test_golden_products_compile_what_they_speak_for(changes: dict[str, Any]) -> None:
    product = sample(5, 64, 128, **changes)
    if product.batch > 1:
        a, b, out = (x._replace(batch=size) for x, size in ((product.a, 640), (product.b, 8192), (product.out, 320)))
        product = replace(product, a=a, b=b, out=out)
    own = [x for x in golden_products(product) if variant_of(x) == variant_of(product)]
    assert own
    assert {types_of(x) for x in own} == {types_of(product)}


@pytest.mark.parametrize("contract", ["fma/chain", "fma/leaf36"])
@pytest.mark.parametrize("k", [1028, 1026, 1025])
@pytest.mark.parametrize("changes", [{}, {"b": Strides(64, 1)}, {"a": Strides(1, 66)}, {"a": Strides(0, 1)}])
def test_what_is_chosen_loads_and_copies_as_what_was_tried(contract: str, k: int, changes: dict[str, Any]) -> None:
    product = sample(66, 64, k, contract, **changes)
    own = [x for x in golden_products(product) if variant_of(x) == variant_of(product)]
    for config in Sgemm().configs(product):
        tile = SgemmConfig.parse(config).tile
        if tile in TILES:
            assert loads(product) in [loads(x) for x in own], config
        else:
            assert copies(product, RINGS[tile]) in [copies(x, RINGS[tile]) for x in own], config
