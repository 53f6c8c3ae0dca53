"""Copies that exceed the cache, and where the size of the cache comes from."""

from __future__ import annotations

import pytest

from isogemm.errors import LimitError, OptionError
from isogemm.lab import cache_sizes, last_level_cache, rotate
from isogemm.lab.rotation import _linux_caches


@pytest.mark.parametrize(("nbytes", "copies"), [(10, 30), (33, 10), (34, 9), (299, 2), (100_000, 2)])
def test_the_copies_together_are_three_caches_and_at_least_two(nbytes, copies):
    made = rotate(object, nbytes, cache_bytes=100)
    assert len(made) == copies == len(set(map(id, made)))
    assert len(made) * nbytes >= 300


def test_the_systems_cache_is_the_default():
    nbytes = last_level_cache()
    assert len(rotate(object, nbytes)) == 3


@pytest.mark.parametrize("options", [{"nbytes": 0}, {"nbytes": -4}, {"nbytes": 8, "cache_bytes": 0}])
def test_sizes_have_to_be_positive(options):
    with pytest.raises(OptionError):
        rotate(object, **options)


def test_millions_of_copies_are_refused_before_any_is_made():
    with pytest.raises(LimitError, match="nbytes of at least 96") as caught:
        rotate(lambda: pytest.fail("made a copy"), 4, cache_bytes=32 << 20)
    assert rotate(int, 96, cache_bytes=32 << 20)
    assert caught.value.value == 24 << 20


def test_linux_cache_files(tmp_path):
    for i, (level, kind, size) in enumerate(
        [(1, "Data", "32K"), (1, "Instruction", "64K"), (2, "Unified", "1024K"), (3, "Unified", "48M")]
    ):
        folder = tmp_path / f"index{i}"
        folder.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{text}\n")
    (tmp_path / "index9").mkdir()  # a level that tells nothing
    assert _linux_caches(tmp_path) == {"L1d": 32 << 10, "L2": 1 << 20, "L3": 48 << 20}
    assert _linux_caches(tmp_path / "absent") == {}


def test_this_machine():
    assert last_level_cache() >= max([1 << 16, *cache_sizes().values()])
