"""What is found out about a class of products while they run, and on the way there."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ..problem.numeric import NumericKey, numeric_key
from ..problem.product import Launch, Product
from .relay import Relay, Round
from .tables import Use
from .trials import variant_of


class ProductClass(NamedTuple):
    """Products that one kernel serves best: all but M are equal, and M lies between `low` and `high`."""

    key: NumericKey
    variant: str
    low: int
    high: int

    @classmethod
    def of(cls, product: Product) -> ProductClass:
        """The class of a product: one row, steps of 8 rows up to 64, then 8 steps from a power of two to the next."""
        m = product.m
        if m == 1:
            return cls(numeric_key(product), variant_of(product), 1, 1)
        step = max(8, 1 << max(0, (m - 1).bit_length() - 4))
        high = -(-m // step) * step
        return cls(numeric_key(product), variant_of(product), max(2, high - step + 1), high)

    def __str__(self) -> str:
        return f"{self.key} {self.variant} rows {self.low} to {self.high}"


@dataclass(frozen=True)
class Timed:
    """What was found for a class."""

    m: int = 0  # rows that were timed; 0 where nothing was
    us: Mapping[Use, float] = field(default_factory=dict)  # the fastest first
    # admitted, refused: mapping of Use to (int, int): algorithms of libraries with rows, from and to, for which their
    # bits were right, or some bit was not
    admitted: Mapping[Use, tuple[int, int]] = field(default_factory=dict)
    refused: Mapping[Use, tuple[int, int]] = field(default_factory=dict)
    date: str = ""

    def dump(self) -> str:
        """The timings as text, which `load` reads."""
        parts = {"admitted": self.admitted, "refused": self.refused}
        ranges = {name: [[*use, *rows] for use, rows in x.items()] for name, x in parts.items()}
        return json.dumps({"m": self.m, "us": [[*u, t] for u, t in self.us.items()], "date": self.date, **ranges})

    @classmethod
    def load(cls, text: str) -> Timed:
        """Read a text; what is no such text is nothing found."""
        try:
            x = json.loads(text)
            us = {Use(str(f), str(c)): float(t) for f, c, t in x["us"]}
            admitted, refused = (
                {Use(str(f), str(c)): (int(low), int(high)) for f, c, low, high in x[name]}
                for name in ("admitted", "refused")
            )
            return cls(int(x["m"]), us, admitted, refused, str(x["date"]))
        except (ValueError, TypeError, KeyError):
            return cls()


class Pending:
    """A class of products from its first call until its kernel is known."""

    def __init__(self, kind: ProductClass, budget: float) -> None:
        self.kind, self.lock = kind, threading.Lock()
        self.budget, self.spent = budget, 0.0  # milliseconds of the device's time
        self.left, self.prepared = 0, threading.Event()  # tasks of other threads; set when none is left
        self.settled = False
        # What is to be replaced while somebody holds it: for which product, and what serves meanwhile.
        self.relays: WeakKeyDictionary[Relay, tuple[Product, Launch]] = WeakKeyDictionary()
        self.leader: Product | None = None  # the product that is timed: the first that was called when all was prepared
        self.others = 0  # calls of other products since the leader's last one
        self.uses: dict[Launch, Use] = {}  # the launches that are timed
        self.times: dict[Launch, float] = {}  # the least of each
        self.running: list[Launch] = []  # those that are not far behind
        self.in_a_row = 1  # runs of each in a round
        self.round: Round | None = None
        self.tries, self.rounds = 0, 0

    def done(self) -> None:
        """One task less."""
        with self.lock:
            self.left -= 1
            if self.left <= 0:
                self.prepared.set()
