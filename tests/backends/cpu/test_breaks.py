"""The tests' own test: kernels whose order was broken on purpose are seen, each by the check that looks at it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import break_kernels


def test_every_break_of_an_order_is_seen() -> None:
    found = break_kernels.run_broken()
    unseen = [b.name for b in break_kernels.BREAKS if not found[b.check]]
    assert unseen == []
    assert set(found) == {b.check for b in break_kernels.BREAKS}


def test_the_kernels_as_they_are_pass_every_check() -> None:
    assert set(break_kernels.check().values()) == {0}


def test_an_edit_that_no_longer_fits_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text("twice twice")
    for old in ("twice", "never"):
        with pytest.raises(LookupError, match="not once"):
            break_kernels._edit(file, old, "new")
    assert file.read_text() == "twice twice"
