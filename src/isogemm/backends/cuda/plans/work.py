"""Who plans for a GPU: the choosers of products, groups, quantized weights and attention, asked without a launch.

A GPU that is in this machine is asked for its facts, tables and verdicts; one that is named, as ``h200``, is described
here, with the shipped table of that device or of one alike. Nothing in a plan reaches a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

from ....base.dtypes import ITEMSIZE
from ....contract.attention import factor
from ....contract.spec import ContractLike
from ....errors import ContractError, DeviceError, OptionError, ShapeError
from ....formats.blocks import format_of
from ....planner.admission import Admission
from ....planner.family import Family
from ....planner.products import Chooser, Ranking, check_arithmetic
from ....planner.tables import DeviceLimits, Table, shipped_tables
from ....planner.tuning import Wanted, pose
from ....problem.forms import Mask
from ....problem.numeric import NumericPlan, integer_contract, numeric_plan
from ....problem.product import Product
from ..attention.case import AttentionCase, Strided
from ..driver import facts
from ..gemm import choose as products
from ..gemm.model import Gpu
from .plan import DevicePlan, explain_offline, explain_on, roofline, said

__all__ = ["DESCRIBED", "GpuPlanner", "explain_on"]

DESCRIBED = {
    "h200": facts.DeviceFacts(0, "NVIDIA H200", (9, 0), 132, 62914560, 232448, 4917.0, None),
    "h100": facts.DeviceFacts(0, "NVIDIA H100 80GB HBM3", (9, 0), 132, 52428800, 232448, 3352.0, None),
}
ARITHMETIC = "tensor_core:sm90"  # of their tensor cores

FOR = {  # whom attention's kernels are for
    "hopper": "tensor cores of Hopper, rows of whole 16 bytes, heads of up to 128", "leaf": "one leaf of keys",
    "few": "what hopper takes, and sums of leaves in memory", "split": "tensor cores, and sums of leaves in memory",
    "walk": "tensor cores", "fma": "contracts of fma",
}  # fmt: skip
Extents = tuple[int, int, int]
Types = tuple[str, str, str]


def _refuse_name(name: str) -> NoReturn:
    kind, described = name.partition(":")[0], " and ".join(DESCRIBED)
    other = f"{list(DESCRIBED)[-1]}, a plan of another GPU; on a machine with the one that you mean, cuda"
    raise OptionError(
        "device", limit=f"cpu, webgpu; cuda or cuda:N, a GPU of this machine; {described}, which need not be here",
        value=repr(name), nearest=kind if kind in ("cpu", "webgpu", "cuda", *DESCRIBED) else other,
        said=f"no device is called {name!r}, and of GPUs that are not here {described} alone are described",
    )  # fmt: skip


@dataclass(frozen=True)
class DescribedCase(AttentionCase):
    """An attention on a device whose facts are at hand."""

    gpu: facts.DeviceFacts = DESCRIBED["h200"]

    @property
    def on(self) -> facts.DeviceFacts:
        return self.gpu


class GpuPlanner:
    """Plans for one device: ``cuda`` and ``cuda:1`` in this machine, or one of `DESCRIBED`.

    Raises
    ------
    OptionError
        No such name.
    DeviceError
        No such GPU here, and no table to read instead.
    """

    def __init__(self, name: str) -> None:
        kind, _, ordinal = name.partition(":")
        described, self.number = name in DESCRIBED, int(ordinal) if ordinal.isdecimal() else 0
        if not described and (kind != "cuda" or (ordinal and not ordinal.isdecimal())):
            _refuse_name(name)
        here = not described and facts.count() > self.number
        self.chooser: Chooser | None = products.chooser(self.number) if here else None
        self.name, self.tables = name if described else next(iter(DESCRIBED)), shipped_tables()
        if not here and (self.number or not self.tables):
            raise DeviceError(
                f"plan for {kind}", limit="a GPU, or a shipped tuning table",
                value=f"neither for device {self.number}", nearest="device='cpu'",
            )  # fmt: skip

    @cached_property
    def facts(self) -> facts.DeviceFacts:
        """What the device is."""
        return DESCRIBED[self.name] if self.chooser is None else facts.device(self.number)

    def plan(
        self, extents: Extents, types: Types, trans: str, packed: bool, contract: ContractLike | None,
        threads: int | None,
    ) -> DevicePlan:  # fmt: skip
        """The plan of a product."""
        if packed:
            raise OptionError("packed and threads", limit="device='cpu'", value="cuda", nearest="leave them out")
        return self.plan_work("batched", extents, types, trans, contract, threads, items=1)

    def plan_work(
        self, form: str, extents: Extents, types: Types, trans: str, contract: ContractLike | None,
        threads: int | None, **about: Any,
    ) -> DevicePlan:  # fmt: skip
        """The plan of several products, or of one of blocks."""
        if threads is not None:
            raise OptionError("packed and threads", limit="device='cpu'", value="cuda", nearest="leave them out")
        if 0 in extents:
            raise ShapeError("plan for cuda", limit="extents of at least 1", value=extents, nearest=1)
        makers: dict[str, Callable[..., DevicePlan]] = {
            "batched": self._batch, "grouped": self._groups, "quantized": self._quantized, "attention": self._attention
        }  # fmt: skip
        return makers[form](extents, types, trans, contract, **about)

    def _numeric(self, k: int, types: Types, contract: ContractLike | None) -> NumericPlan:
        own = (self.chooser.arithmetic() if self.chooser else self._table().arithmetic) or ARITHMETIC
        found = numeric_plan(
            k, dtype_a=types[0], dtype_b=types[1], out_dtype=types[2], contract=contract, device="cuda", arithmetic=own
        )
        if self.chooser is None:
            check_arithmetic(found.contract, own, self.facts.name)
        else:
            self.chooser.check_arithmetic(found.contract)
        return found

    def _table(self) -> Table:
        """The device's shipped table, or another one's: all that are described have one capability."""
        return next((t for t in self.tables if t.stamp.get("device") == self.facts.name), self.tables[0])

    def _posed(self, extents: Extents, types: Types, trans: str, contract: ContractLike | None, batch: int) -> Product:
        m, n, k = extents
        wanted, given = Wanted("", n, k, trans, batch), self._numeric(k, types, contract).contract
        return replace(pose(wanted, m=m, dtype=types[0], contract=given, out_dtype=types[2]), dtype_b=types[1])

    def _batch(
        self, extents: Extents, types: Types, trans: str, contract: ContractLike | None, *, items: int
    ) -> DevicePlan:
        product = self._posed(extents, types, trans, contract, items)
        if self.chooser is not None:
            return explain_on(product, self.chooser)
        gpu = Gpu(self.facts.multiprocessors, self.facts.memory)
        return explain_offline(product, Ranking(products.FAMILIES.found, [self._table()], gpu), self.facts.name)

    def _groups(
        self, extents: Extents, types: Types, trans: str, contract: ContractLike | None, *, rows: Sequence[int]
    ) -> DevicePlan:
        """One launch for all products, by a tile for the mean of their rows."""
        from ..gemm.lists.family import CONFIGS, FAMILY, FMA_CONFIGS, uniform
        from ..gemm.tile.family import Tile

        (total, n, k), mean = extents, sum(rows) / len(rows)
        product = self._posed((max(1, round(mean)), n, k), types, trans, contract, 1)
        if not uniform([product]):
            raise ContractError(
                "contract of groups in one launch", limit="a chain or leaves of fma or tensor cores",
                value=product.contract, nearest=f"{product.contract.arithmetic}/chain",
            )  # fmt: skip
        configs = FMA_CONFIGS if product.contract.arithmetic == "fma" else CONFIGS
        best = next(config for most, config in configs.items() if mean <= most)
        tile: Any = Tile.parse(best)
        programs = sum(-(-m // tile.block_m) * -(-n // tile.block_n) for m in rows)
        others = [
            (f"items [{x}]", f"for a mean of {'more' if most == max(configs) else f'up to {most}'} rows")
            for most, x in configs.items()
            if x != best
        ]
        alone = ("a loop of gemm", f"the same bits; {len(rows)} launches, each prepared by a call")
        padded = ("a padded batch", f"{max(rows) * len(rows)} rows for {total}")
        why = f"one launch of {programs} programs; the tile is for a mean of {mean:.4g} rows"
        numeric = self._numeric(k, types, contract)
        sizes = ((total + len(rows) * n) * k, total * n)
        return self._made(
            "grouped", extents, trans, numeric, (FAMILY, product, best), why, {"rows": tuple(rows)}, sizes,
            (alone, padded, *others),
        )  # fmt: skip

    def _quantized(
        self, extents: Extents, types: Types, trans: str, contract: ContractLike | None, *, format: str
    ) -> DevicePlan:
        """x [m, k] in 8-bit codes times a weight [n, k] of a format, exact integers and a float32 chain over blocks."""
        from ..quant.case import QuantCase
        from ..quant.family import FAMILIES

        (m, n, k), only = extents, integer_contract(contract)
        case = QuantCase("q8", format, types[0], types[2], None, m, n, k, only.arithmetic)
        kernel = next((x for x in FAMILIES.found.values() if x.supports(case, None)), None)
        if kernel is None:
            raise DeviceError(f"kernel on {self.facts.name}", limit="one that has", value=case, nearest="the CPU")
        found, nbytes = kernel.configure(case, self.facts.multiprocessors), format_of(format).row_offset(n, k)
        numeric = NumericPlan(only, k, types[0], format, types[2], 1)
        why = f"the least by the kernels' models on {self.facts.multiprocessors} multiprocessors"
        made = self._made(
            "quantized", extents, "NT", numeric, (kernel, case, found), why, {"format": format}, (m * k, m * n), (
                ("activations='same'", "other numbers: weights rounded to the type of x, sums of tensor cores"),
                ("activations='fp32'", "other numbers: float32 activations times dequantized weights, fma/chain"),
            ))  # fmt: skip
        ceilings = self._ceilings()
        if not ceilings.memory_gb_per_second:
            return made
        read = nbytes + m * k * ITEMSIZE[types[0]] + m * n * ITEMSIZE[types[2]]
        return replace(made, bound_us=read / ceilings.memory_gb_per_second / 1e3, bound="memory")

    def _attention(
        self, extents: Extents, types: Types, trans: str, contract: ContractLike | None, *, sequences: int, heads: int,
        shared: int, mask: str = "",
    ) -> DevicePlan:  # fmt: skip
        """One kernel, or that and a second for queries whose ranges of keys begin elsewhere."""
        from ..attention.choose import KERNELS, ranked
        from ..attention.ranged import together

        numeric = self._numeric(extents[2], types, contract)
        if numeric.contract.order.kind != "chain":
            raise ContractError(
                "contract of attention", limit="a chain", value=numeric.contract,
                nearest=f"{numeric.contract.arithmetic}/chain",
            )  # fmt: skip
        parsed = Mask.parse(mask)
        case = self._case(extents, types, numeric, parsed, sequences, heads, shared)
        ranged = mask.startswith("window")
        names = ranked(together(case) if ranged else case)
        kernel, passed = KERNELS[names[0]], []
        if self.chooser is not None:
            for name in names:
                kernel = KERNELS[name]
                found = self._verdict(kernel, case, kernel.configs(case)[0])
                if found.state in ("admitted", "unknown"):
                    break
                passed.append((kernel.name, f"{found.state} {found.detail}".rstrip()))
        others = [(KERNELS[x].name, "asked next") for x in names if KERNELS[x] is not kernel][len(passed) :]
        others += [(x.name, f"not for this call: {FOR[name]}") for name, x in KERNELS.items() if name not in names]
        others.append(("products and a softmax", "other numbers: its sums do not go leaf by leaf"))
        why = f"ranked first on {self.facts.multiprocessors} multiprocessors"
        why += "; behind it attention ranged, for ranges that begin apart" if ranged else ""
        m, n, k = extents
        about = {"sequences": sequences, "heads": heads, "shared": shared} | ({"mask": mask} if mask else {})
        sizes = (sequences * (heads * m + 2 * shared * n) * k, sequences * heads * m * k)
        config = kernel.configs(together(case) if ranged else case)[0]
        return self._made(
            "attention", extents, "NN", numeric, (kernel, case, config), why, about, sizes, (*passed, *others),
            flops=4 * sequences * heads * parsed.pairs(m, n) * k,
        )  # fmt: skip

    def _case(
        self, extents: Extents, types: Types, numeric: NumericPlan, mask: Mask, sequences: int, heads: int, shared: int
    ) -> DescribedCase:
        m, n, k = extents
        shapes = ((sequences, heads, m, k), (sequences, shared, n, k), (sequences, shared, n, k))
        operands = tuple(Strided(x, (x[1] * x[2] * x[3], x[2] * x[3], x[3], 1)) for x in shapes)
        kind = {"window": "bool", "bool": "bool", "added": types[0]}.get(mask.kind)
        return DescribedCase(
            operands=operands, mask=None if kind is None else (0, 0, n, 1), dtype=types[0], dtype_out=types[2],
            dtype_mask=kind, c=float(factor(None, k)), offset=mask.offset(m, n), starts=False, stops=False,
            arithmetic=numeric.contract.arithmetic, aligned=True, stats=False, device=self.number, gpu=self.facts,
        )  # fmt: skip

    def _ceilings(self) -> DeviceLimits:
        table = next((t for t in self.tables if t.stamp.get("device") == self.facts.name), None)
        return table.ceilings if table else DeviceLimits(0.0, {})

    def _verdict(self, family: Family[Any, Any], case: Any, config: Any) -> Admission:
        if self.chooser is None:
            return Admission("unknown")
        return self.chooser.admissions.verdict(family, case, config, trial=False)

    def _made(
        self, form: str, extents: Extents, trans: str, numeric: NumericPlan, chosen: tuple[Any, Any, Any], why: str,
        about: dict[str, Any], sizes: tuple[int, int], others: tuple[tuple[str, str], ...], *, flops: int = 0,
    ) -> DevicePlan:  # fmt: skip
        """A plan of `sizes` elements that are read and written."""
        (m, n, k), (family, case, config) = extents, chosen
        item = ITEMSIZE[numeric.dtype_a]
        nbytes = sizes[0] * item + sizes[1] * ITEMSIZE[numeric.out_dtype]
        us, word = roofline(flops or 2 * m * n * k, nbytes, numeric.contract.arithmetic, self._ceilings())
        return DevicePlan(
            m, n, k, trans[0], trans[1], numeric, 1, self.facts.name, self.chooser is not None, family.name,
            str(config), why, said(self._verdict(family, case, config)), None, us, word, (), form,
            tuple(about.items()), others,
        )  # fmt: skip
