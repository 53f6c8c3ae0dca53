"""Kernels compiled beside the demo: what the rehearsal made is not compiled again, and a failed one only costs time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "ISOGEMM_QUIET": "1", "NUMBA_OPT": "0"}  # what, not how well
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(small_folder)], capture_output=True, text=True, env=env, timeout=300
    )
    assert done.returncode == 0, done.stderr
    beside, here = map(float, done.stdout.split())
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
