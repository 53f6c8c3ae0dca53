"""What was found out about calls like one before, kept so that the next one is a look-up."""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakValueDictionary

V = TypeVar("V")


class Seen(dict[Any, V]):
    """At most `most` kinds of calls by their keys. One more empties the table: what is still in use comes back."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        _tables[id(self)] = self

    def keep(self, key: Any, value: V) -> V:
        """Enter a call; returns `value`."""
        if len(self) >= self.most:
            self.clear()
        self[key] = value
        return value


_tables: WeakValueDictionary[int, Seen[Any]] = WeakValueDictionary()


def forget() -> None:
    """Empty every table of this process: each call is looked at and planned anew."""
    for table in list(_tables.values()):
        table.clear()
