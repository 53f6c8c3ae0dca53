"""Kernels for a product at run time: what was timed, what models expect, what is compiled and admitted already.

What was timed is kept for a class of products, among this user's records, a file each: several processes lose nothing
to each other, and one that is killed leaves nothing half written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..problem.product import Launch, Product
from .admission import Admission, relevant
from .choose import FORESEEN, Choice
from .family import NotCompiledError
from .records import log
from .relay import LiveBench
from .tables import Hint, Use
from .timed import ProductClass, Timed
from .trials import variant_of
from .tuning import pose_rows

if TYPE_CHECKING:
    from .products import Chooser

READY = 2.0  # times the best by the models: a kernel that is ready serves meanwhile
NEAR = 1.35  # times the best: as likely to be the fastest
MOST = 4096  # classes that a process knows, or watches, at once


class Candidates:
    """A chooser's kernels, with what this process and the user's records know of them."""

    def __init__(self, chooser: Chooser, bench: LiveBench) -> None:
        self.chooser, self.bench = chooser, bench
        self._found: dict[ProductClass, Timed] = {}
        self._ready: dict[str, dict[Use, None]] = {}  # by variant

    def found(self, kind: ProductClass) -> Timed:
        """What is known of a class, by this process or by the user's records."""
        known = self._found.get(kind)
        if known is None:
            text = self.chooser.admissions.ask(f"live {kind}", self._sources())
            self._make_room()
            known = self._found.setdefault(kind, Timed.load(text))
        return known

    def keep(self, kind: ProductClass, found: Timed) -> None:
        """Remember what is known of a class, here and in the user's records."""
        self._make_room()
        self._found[kind] = found
        self.chooser.admissions.answer(f"live {kind}", self._sources(), found.dump())

    def _make_room(self) -> None:
        """Forget all classes where there are too many: they are looked up anew."""
        if len(self._found) >= MOST:
            self._found.clear()

    def timed(self, product: Product) -> Iterator[Hint]:
        """Kernels that were timed for the product's class, with the time to expect: at other rows by their model."""
        found = self.found(ProductClass.of(product))
        there = replace(pose_rows(product, found.m), align=product.align) if found.m else product
        times = [(us * self._ratio(use, product, there), use) for use, us in found.us.items()]
        many = f"{len(times)} candidates"
        for us, use in sorted(times):
            yield Hint(use, f"timed live at m {found.m}, {us:.3g} us, {many}", expected_us=us)

    def all_timed(self, product: Product) -> Iterator[Hint]:
        """What was timed, in tables and here."""
        yield from self.chooser.timed(product)
        yield from self.timed(product)

    def admission(self, product: Product, use: Use) -> Admission | None:
        """What was found of a library's algorithm, for this very product or its class."""
        found = self.found(ProductClass.of(product))
        for state, ranges in (("admitted", found.admitted), ("refused", found.refused)):
            low, high = ranges.get(use, (1, 0))
            if low <= product.m <= high:
                return Admission(state, "this user's records", found.date)  # type: ignore[arg-type]
        return None

    def modelled(self, product: Product) -> list[Hint]:
        """What the models propose, with kernels that are ready for such products among them."""
        hints = list(self.chooser.modelled(product))
        known = {hint.use for hint in hints}
        for use in list(self._ready.get(variant_of(product), ())):
            family = self.chooser.families[use.family]
            if use not in known and family.supports(product, use.config):
                us = family.microseconds(product, use.config, self.device)
                hints += [Hint(use, f"{FORESEEN}, and it is ready", expected_us=us)] if us is not None else []
        return sorted(hints, key=lambda hint: hint.expected_us or 0.0)

    def likely(self, product: Product) -> tuple[list[Hint], list[Hint]]:
        """What the models put near the best; and the best of each family that is not among them, as models of other
        families are further off than one is in itself."""
        hints = self.modelled(product)
        least = min((hint.expected_us or 0.0 for hint in hints), default=0.0)
        near = [hint for hint in hints if (hint.expected_us or 0.0) <= NEAR * least]
        known = {hint.use.family for hint in near}
        others = {h.use.family: h for h in reversed(hints) if (h.expected_us or 0.0) <= READY * least}
        return near, [hint for name, hint in others.items() if name not in known]

    def at_hand(self, product: Product) -> tuple[Choice[Launch], bool] | None:
        """What is compiled and admitted: what was timed, or else by the models; and whether it was timed."""
        self.chooser.check_arithmetic(product.contract)
        for hint in self.all_timed(product):
            choice = self.bound(hint, product)
            if choice is not None:
                return choice, True
        hints = self.modelled(product)
        for hint in hints:
            if (hint.expected_us or 0.0) > READY * (hints[0].expected_us or 0.0):
                break
            choice = self.bound(hint, product)
            if choice is not None:
                return choice, False
        return None

    def bound(self, hint: Hint, product: Product) -> Choice[Launch] | None:
        """The kernel, where it may serve and nothing has to be compiled or tried for it."""
        family = self.chooser.families.get(hint.use.family)
        if family is None or not family.supports(product, hint.use.config):
            return None
        if self.chooser.verdict(family, product, hint.use.config, trial=False).state != "admitted":
            return None
        try:
            with self.bench.compiled_alone():
                launch = family.bind(product, hint.use.config, self.device)
        except NotCompiledError:
            return None
        except Exception as error:
            log.info("kernel %s [%s] cannot be bound: %s", *hint.use, error)
            return None
        self.note_ready(product, hint.use)
        return Choice(*hint.use, launch, hint.reason, hint.expected_us)

    def all_bound(self, hints: Sequence[Hint], product: Product) -> list[Choice[Launch]]:
        """The kernels of `hints` that may serve, bound."""
        return [choice for hint in hints if (choice := self.bound(hint, product))]

    def plain(self, product: Product) -> Hint | None:
        """An admitted kernel of ours: the likeliest that is ready."""
        for hint in self.modelled(product):
            family = self.chooser.families[hint.use.family]
            if self.chooser.verdict(family, product, hint.use.config, trial=False).state == "admitted":
                return hint
        return None

    def note_ready(self, product: Product, use: Use) -> None:
        """A kernel of ours is compiled and admitted for products of this variant."""
        if self.chooser.is_own(use):
            self._ready.setdefault(variant_of(product), {})[use] = None

    @property
    def device(self) -> int:
        """The device's number."""
        return self.chooser.admissions.machine.device

    def _ratio(self, use: Use, here: Product, there: Product) -> float:
        """By how much the model's time of a kernel changes from one number of rows to another."""
        family = self.chooser.families.get(use.family)
        if here.m == there.m or family is None:
            return 1.0
        times = [family.microseconds(p, use.config, self.device) for p in (here, there)]
        return times[0] / times[1] if times[0] and times[1] else 1.0

    def _sources(self) -> str:
        """All that could void what was found."""
        here = self.chooser.admissions
        made = {name: here.fingerprint(family) for name, family in self.chooser.families.items()}
        return json.dumps({**made, **relevant(here.stamp, library=True)}, sort_keys=True)
