"""What other threads do for a product that is called: compile and try kernels, and compare a library's with one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ..problem.numeric import is_packed
from ..problem.product import Launch, Product
from .ahead import ahead
from .candidates import Candidates
from .records import log, today
from .tables import Use
from .timed import Pending, ProductClass
from .trials import golden_products, variant_of
from .tuning import pose_rows

Task = Callable[[], None]

BUILT = 5  # kernels of ours near the best that are built for a product
ALGORITHMS = 4  # of a library
CHECKED_MS = 60.0  # of the device's time, for the comparison of a library's algorithms with one of ours
AT_ONCE = 8  # threads that compile for a call that waits
MOST = 65536  # kernels and variants that are known to have been asked for


class Preparing:
    """Makes kernels ready for candidates, in the background."""

    def __init__(self, candidates: Candidates) -> None:
        self.candidates = candidates
        self.chooser, self.bench = candidates.chooser, candidates.bench
        self._asked: set[tuple[Use, str]] = set()  # kernels and variants of products to come

    def hasten(self, product: Product) -> None:
        """Build what the trial of the likeliest kernel needs side by side, for a call that waits for it."""
        hint = next(iter(self.candidates.modelled(product)), None)
        if hint is None:
            return
        family = self.chooser.families[hint.use.family]

        def build(one: Product) -> None:
            with suppress(Exception):  # it is said where the kernel is tried
                if family.supports(one, hint.use.config):
                    family.bind(one, hint.use.config, self.candidates.device)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(build, (product, *golden_products(product))))

    def begin(self, product: Product, watch: Pending) -> None:
        """Ask for what is to be timed for a product, which sets `watch.prepared`, and then for what may come."""
        tasks = self._tasks(product, watch.kind)
        watch.left = len(tasks)
        for task in tasks:
            self.bench.submit(self._aside(task, watch.kind, watch.done), 0)
        if not tasks:
            watch.prepared.set()
        self.bench.submit(self._aside(partial(self._build_ahead, product, watch.kind), watch.kind), 1)

    def _build_ahead(self, product: Product, kind: ProductClass) -> None:
        """Ask for kernels that products to come may want, each once for its variant."""
        for rank, use, one in ahead(self.chooser.families, product):
            asked = use, variant_of(one)
            if asked not in self._asked:
                if len(self._asked) >= MOST:
                    self._asked.clear()
                self._asked.add(asked)
                self.bench.submit(self._aside(partial(self.make, use, one), kind), rank)

    def _aside(self, task: Task, kind: ProductClass, after: Task = lambda: None) -> Task:
        """The task as other threads do it: what goes wrong there is not timed."""

        def run() -> None:
            try:
                with self.bench.aside():
                    task()
            except Exception as error:
                log.info("%s: %s: %s", kind, type(error).__name__, error)
            finally:
                after()

        return run

    def _tasks(self, product: Product, kind: ProductClass) -> list[Task]:
        """Compile and try kernels of ours that may be the fastest; compare a library's algorithms with one."""
        timed = {hint.use for hint in self.candidates.all_timed(product)}
        own = [use for use in timed if self.chooser.is_own(use)]
        if not timed:
            near, others = self.candidates.likely(product)
            own = [hint.use for hint in (*near[:BUILT], *others)]
        tasks: list[Task] = [partial(self.make, use, product) for use in own]
        if not timed and is_packed(product):
            names = [name for name, family in self.chooser.families.items() if family.library]
            tasks += [partial(self._admit, name, product, kind) for name in names]
        return tasks

    def make(self, use: Use, product: Product) -> None:
        """Compile a kernel of ours, and try it."""
        family = self.chooser.families[use.family]
        family.bind(product, use.config, self.candidates.device)
        if self.chooser.verdict(family, product, use.config).state == "admitted":
            self.candidates.note_ready(product, use)

    def _admit(self, name: str, product: Product, kind: ProductClass) -> None:
        """Compare what a library lists for a product with an admitted kernel of ours, at its rows and its class's ends.

        Large products are compared at their own rows alone, the largest with fewer algorithms, or not at all.
        """
        family, plain = self.chooser.families[name], self.candidates.plain(product)
        known = self.candidates.found(kind)
        done = {**known.admitted, **known.refused}
        listed = [c for c in family.shortlist(product, self.candidates.device) if Use(name, c) not in done][:ALGORITHMS]
        if plain is None or not listed:
            return
        each = 4e-3 * (plain.expected_us or 0.0)  # milliseconds: four kinds of operands
        ends = sorted({kind.low, product.m, kind.high})
        if each * len(ends) * (1 + len(listed)) > CHECKED_MS:
            ends = [product.m]
            listed = listed[: max(0, int(CHECKED_MS / each) - 1)]
        wrong = dict.fromkeys(listed, 0)
        posed = (product if m == product.m else replace(pose_rows(product, m), align=product.align) for m in ends)
        compared = [here for here in posed if variant_of(here) == kind.variant]
        for here in compared:
            wrong = self._compared(family.name, here, plain.use, wrong) if wrong else wrong
        rows = compared[0].m, compared[-1].m
        admitted = {Use(name, c): rows for c, count in wrong.items() if not count}
        refused = {Use(name, c): (product.m, product.m) for c, count in wrong.items() if count}
        self.candidates.keep(kind, replace(
            self.candidates.found(kind), admitted={**known.admitted, **admitted}, refused={**known.refused, **refused},
            date=today(),
        ))  # fmt: skip

    def _compared(self, name: str, product: Product, plain: Use, wrong: Mapping[str, int]) -> dict[str, int]:
        """The algorithms of a library that take the product, with the elements that differ from ours so far."""
        family, bound = self.chooser.families[name], dict[str, Launch]()
        for config in wrong:
            try:
                bound[config] = family.bind(product, config, self.candidates.device)
            except Exception as error:  # no kernel for these rows
                log.info("%s [%s]: %s", name, config, error)
        ours = self.chooser.families[plain.family].bind(product, plain.config, self.candidates.device)
        counts = self.bench.differing(product, ours, list(bound.values()))
        if counts is None:
            return {}
        return {config: wrong[config] + count for config, count in zip(bound, counts, strict=True)}
