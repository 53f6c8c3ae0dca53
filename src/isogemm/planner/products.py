"""Which kernel serves a product on this device: tables first, then their nearest rows, then plain kernels.

What the numbers are was settled before, without M (`isogemm.problem.numeric`). Here M picks among kernels that have
those numbers: a candidate serves only where it is supported and admitted, whatever a table says about its speed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..base.tuning import get_tuning
from ..contract import golden
from ..contract.spec import Contract, Order
from ..errors import ContractError
from ..problem.numeric import is_packed, numeric_key
from ..problem.product import Launch, Product, Strides
from .admission import Admission, Admissions, cannot_run, same_stamp
from .choose import FORESEEN, Choice, Option, choose
from .records import notice
from .relay import Relay
from .tables import Hint, Table, Use, hints_of, recommended
from .trials import NATIVE, ProductFamily, code_of, try_config, variant_of

if TYPE_CHECKING:
    from .family import Family

MODELS = ("tensor_core:sm90", "tensor_core:sm80")
ALIKE = 0.97  # of a time: kernels that were timed for some more rows serve where these are expected to take as long
PROBES = 3  # kernels of a family that are asked for the device's arithmetic


class Ranking:
    """The order in which kernels are asked for products on a device, which need not be here.

    Families come with the plain ones first, tables with those that are asked first. `device` is what the families'
    models take for it: its number, or what they need to know of one that is not here.
    """

    def __init__(self, families: Mapping[str, ProductFamily], tables: Sequence[Table], device: Any) -> None:
        self.families, self.tables, self.device = families, tables, device
        self.live: Any = None  # an isogemm.planner.live.Live, which needs the chooser

    def own(self) -> list[ProductFamily]:
        """The families that trials can admit."""
        return [family for family in self.families.values() if not family.library]

    def is_own(self, use: Use) -> bool:
        """Whether a kernel is of a family that is here and that trials can admit."""
        return use.family in self.families and not self.families[use.family].library

    def hints(self, product: Product) -> Iterator[Hint]:
        """Kernels to consider, the likeliest first; the schedule is the only place that looks at M.

        What was timed for this product and its M comes first, in tables, then at run time; then the families' models,
        the least time first; what tables say of products nearby is left to kernels that no model speaks of.
        """
        seen: set[Use] = set()
        live = self.live.candidates.timed(product) if self.live is not None else ()
        for hint in chain(
            self.timed(product), live, self.modelled(product), recommended(self.tables, product), self._safe(product)
        ):
            if hint.use not in seen:
                seen.add(hint.use)
                yield hint

    def timed(self, product: Product) -> Iterator[Hint]:
        """From rows of exactly this product, where M was timed, or is expected to take as long as the M that was."""
        key = numeric_key(product)
        for table in self.tables:
            row = table.row(key)
            if row is None:
                continue
            m = row.bucket(product.m).m
            if m == product.m or self._alike(product, m):
                yield from hints_of(table, row, product.m)

    def _alike(self, product: Product, m: int) -> bool:
        """Whether the models expect as long for `m` rows, so that what was the fastest there is so here."""
        if m < product.m:
            return False
        here, there = (next((h.expected_us for h in self.modelled(p)), None) for p in (product, product.with_m(m)))
        return here is None or there is None or here >= ALIKE * there

    def modelled(self, product: Product) -> Iterator[Hint]:
        """Kernels of families that have a model, the least time first."""
        found = [
            Hint(Use(family.name, config), FORESEEN, expected_us=us)
            for family in self.own()
            for config in family.configs(product)
            if (us := family.microseconds(product, config, self.device)) is not None
        ]
        yield from sorted(found, key=lambda hint: hint.expected_us or 0.0)

    def _safe(self, product: Product) -> Iterator[Hint]:
        for family in self.own():
            for config in family.configs(product):
                yield Hint(Use(family.name, config), "safe: no table has a kernel for it")


class Chooser(Ranking):
    """Chooses kernels for products on one device.

    Families come with the plain ones first, and tables with the user's; those of other devices give hints on speed
    alone. `absent` says why families that could be here are not.
    """

    def __init__(
        self,
        admissions: Admissions,
        families: Mapping[str, ProductFamily],
        tables: Sequence[Table] = (),
        absent: Mapping[str, str] | None = None,
    ) -> None:
        stamp = admissions.stamp
        alike = [t for t in tables if t.stamp.get("capability") == stamp.get("capability")]
        alike.sort(key=lambda t: t.stamp.get("device") != stamp.get("device"))  # stable: user's first
        super().__init__(families, alike, admissions.machine.device)
        self.admissions, self.absent = admissions, absent or {}
        self.shipped, self._arithmetic = tuple(tables), ""
        admissions.bench.plain = next(iter(self.own()), None)
        for table in tables:
            if same_stamp(table.stamp, stamp, library=False):
                self._trust(table)
        if not any(t.stamp.get("device") == stamp.get("device") for t in alike):
            name = stamp.get("device", "this device")
            notice(
                f"no tuning table for {name}: kernels are chosen by models, and timed in first uses unless "
                "ISOGEMM_TUNING=off; `isogemm.warm` and `isogemm tune` do that ahead"
            )

    def judged(self, product: Product) -> Iterator[tuple[Hint, Admission]]:
        """Supported kernels with what is known of them; nothing is run, and those that are not here are passed over."""
        for hint in self.hints(product):
            family = self.families.get(hint.use.family)
            if family is not None and family.supports(product, hint.use.config):
                yield hint, self.verdict(family, product, hint.use.config, trial=False)

    def serve(self, product: Product) -> Relay:
        """The launch for calls of a product: `choose`'s, or, while choosing at run time is on, `Live.serve`'s.

        Raises ContractError or DeviceError: as `choose`.
        """
        if self.live is None or not get_tuning():
            return Relay(self.choose(product).launch)
        served: Relay = self.live.serve(product)
        return served

    def choose(self, product: Product) -> Choice[Launch]:
        """The first supported and admitted kernel, bound.

        Raises ContractError: no kernel here has the contract's bits; the message names what was refused. Raises
        DeviceError: while a graph is captured: kernels that could serve have not been admitted yet.
        """
        self.check_arithmetic(product.contract)
        options = (
            Option(self.families[hint.use.family], hint.use.config, hint.reason, hint.expected_us)
            for hint in self.hints(product)
            if hint.use.family in self.families
        )
        missing = [f"{name} ({why})" for name, why in self.absent.items()]
        return choose(
            options, product, self.admissions, what=str(numeric_key(product)), judge=self.verdict,
            nearest=("" if product.contract == Contract() else "fma/chain, or ") + "the CPU, which has every contract",
            none=f"none supports it; families that do not load: {', '.join(missing) or 'none'}",
        )  # fmt: skip

    def verdict(self, family: Family[Product, Any], product: Product, config: str, *, trial: bool = True) -> Admission:
        """Whether the kernel may serve `product`; ours without a record are tried now, except in a capture.

        How leaves meet moves float32 sums by a unit in the last place, which one in thousands of 16-bit results shows:
        a kernel of such results has to be admitted for the sums as well.
        """
        if not getattr(family, "library", False):
            if product.contract.order.kind in ("leaf", "tree") and product.dtype_out != "float32":
                sums = replace(product.sums(product.batch), accumulate=False)
                found = self.admissions.verdict(family, sums, config, trial=trial)
                if found.state != "admitted":
                    return found
            return self.admissions.verdict(family, product, config, trial=trial)
        found = self._of_library(family, product, config)
        if found.state == "stale":
            self._say_stale(family.name)
        return found

    def arithmetic(self) -> str:
        """What this device's tensor cores compute: a model's name, or ``tensor_core:native`` where none has its bits.

        Found once by running a plain kernel; empty where none is at hand or a capture is under way.
        """
        self._arithmetic = self._arithmetic or self._find_arithmetic()
        return self._arithmetic

    def check_arithmetic(self, contract: Contract) -> None:
        """Raise `ContractError` for a tensor-core arithmetic that is not this device's."""
        if not contract.arithmetic.startswith("tensor_core:"):
            return
        check_arithmetic(contract, self.arithmetic(), self.admissions.stamp.get("device", "this device"))

    def _trust(self, table: Table) -> None:
        """What a table of this device and software says was admitted, where it was made from the same sources."""
        self._arithmetic = self._arithmetic or table.arithmetic
        for entry in table.admitted:
            found = Admission("admitted", f"table {table.name}", entry.date)
            for config in entry.configs:
                self.admissions.trust(entry.family, code_of(config, entry.variant), entry.fingerprint, found)

    def _of_library(self, family: Family[Product, Any], product: Product, config: str) -> Admission:
        """A library's algorithm serves the exact product, packed, and the rows that it was admitted for."""
        stale = False
        if is_packed(product):
            wanted = family.name, config, variant_of(product)
            for table in self.shipped:
                for entry in table.library_of(numeric_key(product)):
                    same = (entry.family, entry.config, entry.variant) == wanted
                    if not same or not entry.low <= product.m <= entry.high:
                        continue
                    fresh = same_stamp(table.stamp, self.admissions.stamp, library=True)
                    if fresh and entry.fingerprint == self.admissions.fingerprint(family):
                        return Admission("admitted", f"table {table.name}", entry.date)
                    stale = True
            use = Use(family.name, config)
            found: Admission | None = self.live.candidates.admission(product, use) if self.live is not None else None
            if found is not None:
                return found
        return Admission("stale" if stale else "absent")

    def _say_stale(self, family: str) -> None:
        stamp = self.admissions.stamp
        olds = (t.stamp for t in self.tables if t.library and not same_stamp(t.stamp, stamp, library=True))
        old = next(olds, {})
        changed = [
            f"{name} {old[name]}, now {stamp.get(name, 'absent')}"
            for name in ("driver", "cublaslt")
            if name in old and old[name] != stamp.get(name)
        ]
        notice(
            f"algorithms of {family} were admitted with other software ({'; '.join(changed) or 'other sources'}) and "
            "are left out; other kernels serve. `isogemm tune` admits them anew"
        )

    def _find_arithmetic(self) -> str:
        """A model that some plain kernel has the bits of. One broken kernel must not make a device a stranger."""
        here, probe = self.admissions, _probe()
        plain = [
            (family, config)
            for family in self.own()
            for config in [c for c in family.configs(probe) if family.supports(probe, c)][:PROBES]
        ]
        if not plain:
            return ""
        if here.stamp.get("capability") == "9.0":  # those that will serve first: Triton's take over a second to build
            plain.sort(key=lambda use: use[0].microseconds(probe, use[1], here.machine.device) or math.inf)
        sources = json.dumps({family.name: here.fingerprint(family) for family, _ in plain}, sort_keys=True)
        found = here.ask("arithmetic of tensor cores", sources)
        if found in (*MODELS, NATIVE):
            return found
        if here.machine.capturing():
            return ""
        value = next(filter(None, (self._model_of(*use, probe) for use in plain)), NATIVE)
        if value == NATIVE:
            notice(
                f"the tensor cores of {here.stamp.get('device', 'this device')} have the bits of no known model: "
                f"products of bfloat16 and float16 are {NATIVE} there, which has no executable definition; kernels "
                "are compared with one plain kernel"
            )
        here.answer("arithmetic of tensor cores", sources, value)
        return value

    def _model_of(self, family: ProductFamily, config: str, probe: Product) -> str:
        """The model whose bits a kernel has; the kernel asks the device's own tensor cores, whatever `probe` says."""
        for model in MODELS:

            def bits(
                arithmetic: str, dtype_a: str, dtype_b: str, case: golden.GoldenCase, model: str = model
            ) -> golden.Array | None:
                return golden.expected(model, dtype_a, dtype_b, case)

            try:
                if not try_config(self.admissions.bench, family, probe, config, bits):
                    return model
            except Exception as error:
                cannot_run(family.name, config, error)
                break
        return ""


def check_arithmetic(contract: Contract, own: str, device: str) -> None:
    """Raise `ContractError` for a tensor-core arithmetic that is not a device's `own`, where that is known."""
    if own and contract.arithmetic.startswith("tensor_core:") and contract.arithmetic != own:
        raise ContractError(
            f"contract on {device}", limit=f"{own}, the arithmetic of its tensor cores", value=str(contract),
            nearest=f"{own}/{contract.order}",
        )  # fmt: skip


def _probe() -> Product:
    """The product that tells arithmetics apart: bfloat16, float32 out, one weight row to a column."""
    return Product(
        16, 64, 2568, "bfloat16", "bfloat16", "float32", Contract(MODELS[0], Order()),
        Strides(2568, 1), Strides(1, 2568), Strides(64, 1),
    )  # fmt: skip
