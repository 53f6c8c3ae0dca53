"""Kernels compiled beside the demo: what the rehearsal made is not compiled again, and a failed one only costs time."""

from __future__ import annotations

import sys

import pytest
from tests.process import python

from isogemm.demo import ahead

# In a process of its own, with a cache of its own: it waits for the rehearsal and embeds, and says what it compiled.
CODE = """
import sys
from pathlib import Path
from isogemm.base.jit import compile_seconds
from isogemm.demo import ahead, forward, minilm
from isogemm.demo.sentences import SENTENCES

folder = Path(sys.argv[1])
with ahead.Rehearsal(folder) as rehearsal:
    rehearsal.wait()
    model, words = minilm.load(folder), minilm.tokenizer(folder)
    forward.embed(model, minilm.tokenize(words, SENTENCES[:5]), forward.ISOGEMM)
print(rehearsal.seconds, compile_seconds())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="XDG_CACHE_HOME moves the cache")
def test_what_was_rehearsed_is_not_compiled_again(small_folder, tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path), "ISOGEMM_QUIET": "1", "NUMBA_OPT": "0"}  # what, not how well
    beside, here = map(float, python("-c", CODE, small_folder, **env).split())
    assert beside > 0
    assert here == 0


def test_a_rehearsal_that_fails_is_not_waited_for(tmp_path):
    with ahead.Rehearsal(tmp_path) as rehearsal:  # no model there
        rehearsal.wait()
        rehearsal.wait()
    assert rehearsal.seconds == 0


def test_nothing_is_rehearsed_where_nothing_can_be_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "can_keep", lambda: False)
    monkeypatch.setattr(ahead.subprocess, "Popen", None)
    with ahead.Rehearsal(tmp_path) as rehearsal:
        rehearsal.wait()
    assert rehearsal.seconds == 0
