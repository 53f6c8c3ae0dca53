"""Choosing while products are multiplied: what is ready serves at once, what the device's clock prefers serves next.

Nothing here can reach a bit: whatever serves was admitted, and kernels that were admitted have the same bits. So the
first call of a product takes a kernel that is compiled and admitted already, where one is that the models do not expect
to take twice as long as the best; better ones are compiled and tried by other threads. When they are there, later calls
run each of them a few times behind their own, on their own operands and stream, and the fastest takes over in the
place of the first, wherever that is held. What was found is kept for a class of rows, among this user's records, a file
each: several processes lose nothing to each other, and one that is killed leaves nothing half written.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

from ..base.progress import Tell
from ..base.tuning import get_tuning
from ..problem.numeric import is_packed, numeric_key
from ..problem.product import Addresses, Launch, Product
from .admission import Admission, relevant
from .ahead import ahead
from .choose import Choice
from .family import NotCompiledError
from .records import log, today
from .relay import LiveBench, Relay, Round
from .tables import Hint, Use
from .timed import Pending, ProductClass, Timed
from .trials import golden_products, variant_of
from .tuning import pose_rows

if TYPE_CHECKING:
    from .products import Chooser

Task = Callable[[], None]

READY = 2.0  # times the best by the models: a kernel that is ready serves meanwhile
NEAR, FEW, BUILT = 1.35, 8, 5  # times the best; near kernels of ours that are timed at most, and that are built for it
ALGORITHMS = 4  # of a library
ROUNDS, TRIES = 5, 12  # times that each is timed, and how often that is begun
BEHIND = 1.3  # times the fastest: not timed again
# Kernels are timed behind their like, as a model calls them: what is fastest alone may not be, since a launch that
# begins early takes room from the one before. Of products that take longer it makes no difference.
IN_A_ROW, SPAN = 10, 300.0  # at most, and microseconds that they should take
CHECKED_MS = 60.0  # of the device's time, for the comparison of a library's algorithms with one of ours
PATIENCE, LONGEST = 10.0, 300.0  # seconds that a capture waits for kernels that are being compiled, and `warm`
AT_ONCE = 8  # threads that compile for a call that waits
MOST = 4096  # classes that are watched at once


class Live:
    """Chooses among a chooser's kernels while they run."""

    def __init__(self, chooser: Chooser, bench: LiveBench) -> None:
        self.chooser, self.bench = chooser, bench
        self._found: dict[ProductClass, Timed] = {}
        self._ready: dict[str, dict[Use, None]] = {}  # by variant
        self._watches: dict[ProductClass, Pending] = {}
        self._asked: set[tuple[Use, str]] = set()  # kernels and variants of products to come
        self._lock = threading.RLock()

    def serve(self, product: Product, budget: float | None = None) -> Relay:
        """The launch for a product, which later calls may replace by a faster one.

        The budget is milliseconds of the device's time for timing, instead of `get_tuning`.
        """
        machine = self.chooser.admissions.machine
        found = self._at_hand(product)
        if found is None:
            self._hasten(product)
            choice = self.chooser.choose(product)
            use = Use(choice.family, choice.config)
            self._note_ready(product, use)
            found = choice, any(hint.use == use for hint in self._timed(product))
        choice, final = found
        relay = Relay(choice.launch)
        if not final and choice.expected_us is not None and not machine.capturing():
            self._watch(product, relay, choice, get_tuning() if budget is None else budget)
        return relay

    def timed(self, product: Product) -> Iterator[Hint]:
        """Kernels that were timed for the product's class, with the time to expect: at other rows by their model."""
        found = self.found(ProductClass.of(product))
        there = replace(pose_rows(product, found.m), align=product.align) if found.m else product
        times = [(us * self._ratio(use, product, there), use) for use, us in found.us.items()]
        many = f"{len(times)} candidates"
        for us, use in sorted(times):
            yield Hint(use, f"timed live at m {found.m}, {us:.3g} us, {many}", expected_us=us)

    def admission(self, product: Product, use: Use) -> Admission | None:
        """What was found of a library's algorithm, for this very product or its class."""
        found = self.found(ProductClass.of(product))
        for state, ranges in (("admitted", found.admitted), ("refused", found.refused)):
            low, high = ranges.get(use, (1, 0))
            if low <= product.m <= high:
                return Admission(state, "this user's records", found.date)  # type: ignore[arg-type]
        return None

    def found(self, kind: ProductClass) -> Timed:
        """What is known of a class, by this process or by the user's records."""
        known = self._found.get(kind)
        if known is None:
            text = self.chooser.admissions.ask(f"live {kind}", self._sources())
            known = self._found.setdefault(kind, Timed.load(text))
        return known

    def warm(self, products: Sequence[Product], tell: Tell, *, budget: float) -> None:
        """Settle products ahead of time: compile and try for all of them at once, then time one after the other.

        `tell` moves a bar; the budget is milliseconds of the device's time for each.
        """
        machine = self.chooser.admissions.machine
        relays = []
        for i, product in enumerate(products):
            tell(i, 2 * len(products), f"{numeric_key(product)}, m {product.m}")
            relays.append(self.serve(product, budget))
        self.bench.idle(LONGEST)
        for i, (product, relay) in enumerate(zip(products, relays, strict=True)):
            tell(len(products) + i, 2 * len(products), f"{numeric_key(product)}, m {product.m}")
            watch = self._watches.get(ProductClass.of(product))
            if watch is None or not watch.prepared.wait(LONGEST):
                continue
            held, at = self.bench.operands(product)
            while self._watches.get(watch.kind) is watch and watch.leader in (None, relay):
                relay.now(at, machine.stream())
                self.bench.synchronize()
            del held

    def _ratio(self, use: Use, here: Product, there: Product) -> float:
        """By how much the model's time of a kernel changes from one number of rows to another."""
        family = self.chooser.families.get(use.family)
        if here.m == there.m or family is None:
            return 1.0
        times = [family.microseconds(p, use.config, self._device) for p in (here, there)]
        return times[0] / times[1] if times[0] and times[1] else 1.0

    def _at_hand(self, product: Product) -> tuple[Choice[Launch], bool] | None:
        """What is compiled and admitted: what was timed, or else by the models; and whether it was timed."""
        self.chooser.check_arithmetic(product.contract)
        for hint in self._timed(product):
            choice = self._bound(hint, product)
            if choice is not None:
                return choice, True
        hints = self._modelled(product)
        for hint in hints:
            if (hint.expected_us or 0.0) > READY * (hints[0].expected_us or 0.0):
                break
            choice = self._bound(hint, product)
            if choice is not None:
                return choice, False
        return None

    def _timed(self, product: Product) -> Iterator[Hint]:
        """What was timed, in tables and here."""
        yield from self.chooser.timed(product)
        yield from self.timed(product)

    def _modelled(self, product: Product) -> list[Hint]:
        """By the models, with kernels that are ready for such products among them."""
        hints = list(self.chooser.modelled(product))
        known = {hint.use for hint in hints}
        for use in list(self._ready.get(variant_of(product), ())):
            family = self.chooser.families[use.family]
            if use not in known and family.supports(product, use.config):
                us = family.microseconds(product, use.config, self._device)
                hints += [Hint(use, "a model of its time, and it is ready", expected_us=us)] if us is not None else []
        return sorted(hints, key=lambda hint: hint.expected_us or 0.0)

    def _likely(self, product: Product) -> tuple[list[Hint], list[Hint]]:
        """What the models put near the best; and the best of each family that is not among them, as models of other
        families are further off than one is in itself."""
        hints = self._modelled(product)
        least = min((hint.expected_us or 0.0 for hint in hints), default=0.0)
        near = [hint for hint in hints if (hint.expected_us or 0.0) <= NEAR * least]
        known = {hint.use.family for hint in near}
        others = {h.use.family: h for h in reversed(hints) if (h.expected_us or 0.0) <= READY * least}
        return near, [hint for name, hint in others.items() if name not in known]

    def _bound(self, hint: Hint, product: Product) -> Choice[Launch] | None:
        """The kernel, where it may serve and nothing has to be compiled or tried for it."""
        family = self.chooser.families.get(hint.use.family)
        if family is None or not family.supports(product, hint.use.config):
            return None
        if self.chooser.verdict(family, product, hint.use.config, trial=False).state != "admitted":
            return None
        try:
            with self.bench.compiled_alone():
                launch = family.bind(product, hint.use.config, self._device)
        except NotCompiledError:
            return None
        except Exception as error:
            log.info("kernel %s [%s] cannot be bound: %s", *hint.use, error)
            return None
        self._note_ready(product, hint.use)
        return Choice(*hint.use, launch, hint.reason, hint.expected_us)

    def _all_bound(self, hints: Sequence[Hint], product: Product) -> list[Choice[Launch]]:
        return [choice for hint in hints if (choice := self._bound(hint, product))]

    def _note_ready(self, product: Product, use: Use) -> None:
        if not self.chooser.families[use.family].library:
            self._ready.setdefault(variant_of(product), {})[use] = None

    # What other threads do.

    def _hasten(self, product: Product) -> None:
        """Build what the trial of the likeliest kernel needs side by side, for a call that waits for it."""
        hint = next(iter(self._modelled(product)), None)
        if hint is None:
            return
        family = self.chooser.families[hint.use.family]

        def build(one: Product) -> None:
            with suppress(Exception):  # it is said where the kernel is tried
                if family.supports(one, hint.use.config):
                    family.bind(one, hint.use.config, self._device)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(build, (product, *golden_products(product))))

    def _watch(self, product: Product, relay: Relay, choice: Choice[Launch], budget: float) -> None:
        """Look for something faster, and let calls of the product see to it."""
        kind, launch = ProductClass.of(product), choice.launch
        with self._lock:  # `_settle` sees all of it or nothing
            watch = self._watches.get(kind)
            if watch is None:
                if len(self._watches) >= MOST:
                    self._watches.clear()  # those in use are held by their relays
                watch = self._watches[kind] = Pending(kind, budget)
                self._prepare(product, watch)
            relay.now = self._watching(watch, relay, product, launch)
            watch.relays.append((relay, product, launch))

    def _watching(self, watch: Pending, relay: Relay, product: Product, launch: Launch) -> Launch:
        """The launch, and behind it a step towards a faster one."""

        def watching(at: Addresses, stream: int) -> None:
            if self.chooser.admissions.machine.capturing():
                self._captured(product, watch, launch)(at, stream)
                return
            launch(at, stream)
            if watch.prepared.is_set() and not self.bench.busy() and watch.lock.acquire(blocking=False):
                try:
                    self._step(watch, relay, product, at, stream)
                except Exception as error:  # the call itself is done: its caller hears nothing of what is tried behind
                    log.info("%s: %s: %s", watch.kind, type(error).__name__, error)
                    self._settle(watch)
                finally:
                    watch.lock.release()

        return watching

    def _captured(self, product: Product, watch: Pending, launch: Launch) -> Launch:
        """A graph is replayed often: the likeliest kernel goes into it, and is waited for, but nothing is timed."""
        watch.prepared.wait(PATIENCE)
        found = self._at_hand(product)
        return found[0].launch if found else launch

    def _prepare(self, product: Product, watch: Pending) -> None:
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
                self._asked.add(asked)
                self.bench.submit(self._aside(partial(self._make, use, one), kind), rank)

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
        timed = {hint.use for hint in self._timed(product)}
        own = [use for use in timed if self._is_own(use)]
        if not timed:
            near, others = self._likely(product)
            own = [hint.use for hint in (*near[:BUILT], *others)]
        tasks: list[Task] = [partial(self._make, use, product) for use in own]
        if not timed and is_packed(product):
            names = [name for name, family in self.chooser.families.items() if family.library]
            tasks += [partial(self._admit, name, product, kind) for name in names]
        return tasks

    def _is_own(self, use: Use) -> bool:
        return use.family in self.chooser.families and not self.chooser.families[use.family].library

    def _make(self, use: Use, product: Product) -> None:
        """Compile a kernel of ours, and try it."""
        family = self.chooser.families[use.family]
        family.bind(product, use.config, self._device)
        if self.chooser.verdict(family, product, use.config).state == "admitted":
            self._note_ready(product, use)

    def _admit(self, name: str, product: Product, kind: ProductClass) -> None:
        """Compare what a library lists for a product with an admitted kernel of ours, at its rows and its class's ends.

        Large products are compared at their own rows alone, the largest with fewer algorithms, or not at all.
        """
        family, plain = self.chooser.families[name], self._plain(product)
        known = self.found(kind)
        done = {**known.admitted, **known.refused}
        listed = [c for c in family.shortlist(product, self._device) if Use(name, c) not in done][:ALGORITHMS]
        if plain is None or not listed:
            return
        each = 3e-3 * (plain.expected_us or 0.0)  # milliseconds: three kinds of operands
        ends = sorted({kind.low, product.m, kind.high})
        if each * len(ends) * (1 + len(listed)) > CHECKED_MS:
            ends = [product.m]
            listed = listed[: max(0, int(CHECKED_MS / each) - 1)]
        wrong = dict.fromkeys(listed, 0)
        for m in ends:
            here = product if m == product.m else replace(pose_rows(product, m), align=product.align)
            if variant_of(here) != kind.variant or not wrong:
                continue
            wrong = self._compared(family.name, here, plain.use, wrong)
        admitted = {Use(name, c): (ends[0], ends[-1]) for c, count in wrong.items() if not count}
        refused = {Use(name, c): (product.m, product.m) for c, count in wrong.items() if count}
        self._keep(kind, replace(
            self.found(kind), admitted={**known.admitted, **admitted}, refused={**known.refused, **refused},
            date=today(),
        ))  # fmt: skip

    def _compared(self, name: str, product: Product, plain: Use, wrong: Mapping[str, int]) -> dict[str, int]:
        """Of a library's algorithms, those that take the product, with the elements that differ from ours so far."""
        family, bound = self.chooser.families[name], dict[str, Launch]()
        for config in wrong:
            try:
                bound[config] = family.bind(product, config, self._device)
            except Exception as error:  # no kernel for these rows
                log.info("%s [%s]: %s", name, config, error)
        ours = self.chooser.families[plain.family].bind(product, plain.config, self._device)
        counts = self.bench.differing(product, ours, list(bound.values()))
        if counts is None:
            return {}
        return {config: wrong[config] + count for config, count in zip(bound, counts, strict=True)}

    def _plain(self, product: Product) -> Hint | None:
        """An admitted kernel of ours: the likeliest that is ready."""
        for hint in self._modelled(product):
            family = self.chooser.families[hint.use.family]
            if self.chooser.verdict(family, product, hint.use.config, trial=False).state == "admitted":
                return hint
        return None

    # What calls do, one at a time for each class.

    def _step(self, watch: Pending, relay: Relay, product: Product, at: Addresses, stream: int) -> None:
        """One step towards the fastest kernel, behind a call of the product; waits for nothing."""
        if all(held is not relay for held, _, _ in watch.relays):  # settled meanwhile
            return
        if watch.leader is None and (self.found(watch.kind).us or not self._lead(watch, relay, product)):
            self._settle(watch)
            return
        if watch.leader is not relay:
            return
        if watch.round is not None:
            if not watch.round.done():
                return
            self._count(watch, watch.round)
        again = watch.rounds < ROUNDS and watch.tries < TRIES and len(watch.running) > 1
        if again and watch.budget - watch.spent > watch.spent / max(1, watch.tries):
            patience = 1 + min(3, watch.tries - watch.rounds)
            watch.round = self.bench.round(product, watch.running, at, stream, watch.in_a_row, patience)
            if watch.round is not None:
                return
        if watch.rounds:
            self._record(watch, product)
        self._settle(watch)

    def _lead(self, watch: Pending, relay: Relay, product: Product) -> bool:
        """Take this product to time; False where there is nothing to choose from, or no budget for it."""
        (near, others), found = self._likely(product), self.found(watch.kind)
        libraries = [Hint(use, "", expected_us=near[0].expected_us) for use in found.admitted]
        own = [*self._all_bound(near, product)[:FEW], *self._all_bound(others, product)]
        served = self._all_bound(libraries, product)
        bound = [x for pair in zip_longest(own, served) for x in pair if x is not None]
        expected = [x.expected_us or 0.0 for x in bound]
        watch.in_a_row = max(1, min(IN_A_ROW, int(SPAN / max(1.0, min(expected, default=1.0)))))
        while bound and watch.in_a_row * sum(expected[: len(bound)]) > 1e3 * watch.budget:
            bound.pop()
        watch.leader = relay
        watch.uses = {x.launch: Use(x.family, x.config) for x in bound}
        watch.running = list(watch.uses)
        return len(bound) > 1

    def _count(self, watch: Pending, done: Round) -> None:
        """Enter the times of a round, if it has any; what is far behind is not timed again."""
        watch.round, watch.tries, watch.spent = None, watch.tries + 1, watch.spent + done.whole()
        if not done.valid():
            return
        watch.rounds += 1
        for launch, us in zip(watch.running, done.microseconds(), strict=True):
            watch.times[launch] = min(watch.times.get(launch, us), us)
        least = min(watch.times.values())
        watch.running = [launch for launch in watch.running if watch.times[launch] <= BEHIND * least]

    def _record(self, watch: Pending, product: Product) -> None:
        """Keep what was timed, in this process and for later ones."""
        us = {watch.uses[launch]: round(t, 3) for launch, t in sorted(watch.times.items(), key=lambda item: item[1])}
        self._keep(watch.kind, replace(self.found(watch.kind), m=product.m, us=us, date=today()))

    def _settle(self, watch: Pending) -> None:
        """Let the fastest kernel take over in all products of the class."""
        with self._lock:
            self._watches.pop(watch.kind, None)  # who comes now is served by what was found, or watched anew
            held, watch.relays = watch.relays, []
        watch.uses, watch.times, watch.running = {}, {}, []
        for relay, product, launch in held:
            found = self._at_hand(product)
            relay.now = found[0].launch if found else launch

    def _keep(self, kind: ProductClass, found: Timed) -> None:
        self._found[kind] = found
        self.chooser.admissions.answer(f"live {kind}", self._sources(), found.dump())

    def _sources(self) -> str:
        """All that could void what was found."""
        here = self.chooser.admissions
        made = {name: here.fingerprint(family) for name, family in self.chooser.families.items()}
        return json.dumps({**made, **relevant(here.stamp, library=True)}, sort_keys=True)

    @property
    def _device(self) -> int:
        return self.chooser.admissions.machine.device
