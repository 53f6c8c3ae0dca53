"""Tables of calls: what they keep, when they forget, and that they keep nothing alive."""

from __future__ import annotations

import gc
import weakref

from isogemm.base import seen
from isogemm.base.seen import Seen


def test_one_more_than_fits_empties_the_table() -> None:
    table: Seen[str] = Seen(2)
    assert table.keep("a", "A") == "A"
    table.keep("b", "B")
    assert dict(table) == {"a": "A", "b": "B"}
    table.keep("c", "C")
    assert dict(table) == {"c": "C"}


def test_every_table_is_forgotten() -> None:
    one: Seen[int] = Seen(9)
    other: Seen[int] = Seen(9)
    one.keep("k", 1)
    other.keep("k", 2)
    seen.forget()
    assert not one
    assert not other


def test_a_table_lives_as_long_as_who_has_it() -> None:
    table: Seen[int] = Seen(9)
    known = weakref.ref(table)
    del table
    gc.collect()
    assert known() is None
