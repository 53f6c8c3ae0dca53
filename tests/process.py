"""A Python of its own, for tests of what a whole process does."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python(*words: object, timeout: float = 300, **environment: str) -> str:
    """What it prints. It has to end well and in time, and finds the tests: its folder is theirs."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
