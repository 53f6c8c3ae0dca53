"""Choosing while products are multiplied: what is ready serves at once, what the device's clock prefers serves next.

Nothing here can reach a bit: whatever serves was admitted, and kernels that were admitted have the same bits. So the
first call of a product takes a kernel that is compiled and admitted already, where one is that the models do not expect
to take twice as long as the best; better ones are compiled and tried by other threads. When they are there, later calls
run each of them a few times behind their own, on their own operands and stream, and the fastest takes over in the
place of the first, wherever that is held.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from ..base.progress import Tell
from ..base.tuning import get_tuning
from ..problem.numeric import numeric_key
from ..problem.product import Addresses, Launch, Product
from .candidates import MOST, Candidates
from .choose import Choice
from .preparing import Preparing
from .records import log, today
from .relay import LiveBench, Relay, Round
from .tables import Hint, Use
from .timed import Pending, ProductClass

if TYPE_CHECKING:
    from .products import Chooser

FEW = 8  # near kernels of ours that are timed at most
ROUNDS, TRIES = 5, 12  # times that each is timed, and how often that is begun
BEHIND = 1.3  # times the fastest: not timed again
# Kernels are timed behind their like, as a model calls them: what is fastest alone may not be, since a launch that
# begins early takes room from the one before. Of products that take longer it makes no difference.
IN_A_ROW, SPAN = 10, 300.0  # at most, and microseconds that they should take
# Microseconds more that a library's kernel waits behind its like in a stream than in a graph; ours begin early in both.
# What is short is called from graphs, where its time matters.
WAITS = 0.9
PATIENCE, LONGEST = 10.0, 300.0  # seconds that a capture waits for kernels that are being compiled, and `warm`
OTHERS = 64  # calls of other products of a class, after which what was timed serves, or one of them is timed


class Live:
    """Chooses among a chooser's kernels while they run."""

    def __init__(self, chooser: Chooser, bench: LiveBench) -> None:
        self.chooser, self.bench = chooser, bench
        self.candidates = Candidates(chooser, bench)
        self.preparing = Preparing(self.candidates)
        self._watches: dict[ProductClass, Pending] = {}
        self._lock = threading.RLock()

    def serve(self, product: Product, budget: float | None = None) -> Relay:
        """The launch for a product, which later calls may replace by a faster one.

        The budget is milliseconds of the device's time for timing, instead of `get_tuning`.
        """
        machine = self.chooser.admissions.machine
        found = self.candidates.at_hand(product)
        if found is None:
            self.preparing.hasten(product)
            choice = self.chooser.choose(product)
            use = Use(choice.family, choice.config)
            self.candidates.note_ready(product, use)
            found = choice, any(hint.use == use for hint in self.candidates.all_timed(product))
        choice, final = found
        relay = Relay(choice.launch)
        if not final and choice.expected_us is not None and not machine.capturing():
            self._watch(product, relay, choice, get_tuning() if budget is None else budget)
        return relay

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
            if watch is None or relay not in watch.relays or not watch.prepared.wait(LONGEST):
                continue
            held, at = self.bench.operands(product)
            while not watch.settled:  # where another product leads, some calls later than else
                relay.now(at, machine.stream())
                self.bench.synchronize()
            del held

    def _watch(self, product: Product, relay: Relay, choice: Choice[Launch], budget: float) -> None:
        """Look for something faster, and let calls of the product see to it."""
        kind, launch = ProductClass.of(product), choice.launch
        with self._lock:  # `_settle` sees all of it or nothing
            watch = self._watches.get(kind)
            if watch is None:
                if len(self._watches) >= MOST:
                    self._watches.clear()  # those in use are held by their relays
                watch = Pending(kind, budget)
                self.preparing.begin(product, watch)
                self._watches[kind] = watch
            relay.now = self._watching(watch, product, launch)
            watch.relays[relay] = product, launch

    def _watching(self, watch: Pending, product: Product, launch: Launch) -> Launch:
        """The launch, and behind it a step towards a faster one."""

        def watching(at: Addresses, stream: int) -> None:
            if self.chooser.admissions.machine.capturing():
                self._captured(product, watch, launch)(at, stream)
                return
            launch(at, stream)
            if watch.prepared.is_set() and not self.bench.busy() and watch.lock.acquire(blocking=False):
                try:
                    self._step(watch, product, at, stream)
                except Exception as error:  # the call itself is done: its caller hears nothing of what is tried behind
                    log.info("%s: %s: %s", watch.kind, type(error).__name__, error)
                    self._settle(watch)
                finally:
                    watch.lock.release()

        return watching

    def _captured(self, product: Product, watch: Pending, launch: Launch) -> Launch:
        """A graph is replayed often: the likeliest kernel goes into it, and is waited for, but nothing is timed."""
        watch.prepared.wait(PATIENCE)
        found = self.candidates.at_hand(product)
        return found[0].launch if found else launch

    # What calls do, one at a time for each class.

    def _step(self, watch: Pending, product: Product, at: Addresses, stream: int) -> None:
        """One step towards the fastest kernel, behind a call of the product; waits for nothing."""
        if watch.settled:  # meanwhile
            return
        if watch.leader is None and (self.candidates.found(watch.kind).us or not self._lead(watch, product)):
            self._settle(watch)
            return
        if watch.round is not None:
            if not watch.round.done():
                return
            self._count(watch, watch.round)
        if watch.leader != product:
            watch.others += 1
            if watch.others < OTHERS:
                return
            if watch.rounds or not self._lead(watch, product):
                self._end(watch)
                return
        watch.others = 0
        again = watch.rounds < ROUNDS and watch.tries < TRIES and len(watch.running) > 1
        if again and watch.budget - watch.spent > watch.spent / max(1, watch.tries):
            patience = 1 + min(3, watch.tries - watch.rounds)
            watch.round = self.bench.round(product, watch.running, at, stream, watch.in_a_row, patience)
            if watch.round is not None:
                return
        self._end(watch)

    def _lead(self, watch: Pending, product: Product) -> bool:
        """Take this product to time; False where there is nothing to choose from, or no budget for it."""
        (near, others), found = self.candidates.likely(product), self.candidates.found(watch.kind)
        libraries = [Hint(use, "", expected_us=near[0].expected_us) for use in found.admitted]
        own = [*self.candidates.all_bound(near, product)[:FEW], *self.candidates.all_bound(others, product)]
        served = self.candidates.all_bound(libraries, product)
        bound = [x for pair in zip_longest(own, served) for x in pair if x is not None]
        expected = [x.expected_us or 0.0 for x in bound]
        watch.in_a_row = max(1, min(IN_A_ROW, int(SPAN / max(1.0, min(expected, default=1.0)))))
        while bound and watch.in_a_row * sum(expected[: len(bound)]) > 1e3 * watch.budget:
            bound.pop()
        watch.leader = product
        watch.uses = {x.launch: Use(x.family, x.config) for x in bound}
        watch.running = list(watch.uses)
        return len(bound) > 1

    def _count(self, watch: Pending, done: Round) -> None:
        """Enter the times of a round, if it has any; what is far behind is not timed again."""
        watch.round, watch.tries, watch.spent = None, watch.tries + 1, watch.spent + done.whole()
        if not done.valid():
            return
        watch.rounds += 1
        waits = WAITS * (1 - 1 / watch.in_a_row)
        for launch, us in zip(watch.running, done.microseconds(), strict=True):
            us -= waits * self.chooser.families[watch.uses[launch].family].library
            watch.times[launch] = min(watch.times.get(launch, us), us)
        least = min(watch.times.values())
        watch.running = [launch for launch in watch.running if watch.times[launch] <= BEHIND * least]

    def _end(self, watch: Pending) -> None:
        """Keep what was timed, if anything was, in this process and for later ones; and let it serve."""
        if watch.rounds and watch.leader is not None:
            least = sorted(watch.times.items(), key=lambda item: item[1])
            us = {watch.uses[launch]: round(t, 3) for launch, t in least}
            found = replace(self.candidates.found(watch.kind), m=watch.leader.m, us=us, date=today())
            self.candidates.keep(watch.kind, found)
        self._settle(watch)

    def _settle(self, watch: Pending) -> None:
        """Let the fastest kernel take over in all products of the class."""
        with self._lock:
            if self._watches.get(watch.kind) is watch:  # who comes now is served by what was found, or watched anew
                self._watches.pop(watch.kind)
            watch.settled, held = True, list(watch.relays.items())
        watch.relays.clear()
        watch.uses, watch.times, watch.running = {}, {}, []
        for relay, (product, launch) in held:
            relay.now = launch
            try:
                found = self.candidates.at_hand(product)
            except Exception as error:  # of one: the others' are looked for all the same
                log.info("%s: %s: %s", watch.kind, type(error).__name__, error)
            else:
                relay.now = found[0].launch if found else launch
