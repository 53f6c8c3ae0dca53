"""Kernels compiled by a process beside the demo's, while the demo has NumPy compute.

The process rehearses: it makes the demo's calls on a little of the work, so that whatever those compile is in the
cache when the demo comes to them. No result of it is used.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np

from ..base.jit import ANNOUNCE_AFTER, announce, can_keep, compile_seconds
from . import decode, forward, minilm, smollm, story, trials
from .sentences import SENTENCES


class Rehearsal:
    """The process for the encoder in `folder`; nothing where what it compiles could not be kept."""

    def __init__(self, folder: Path) -> None:
        self._process: subprocess.Popen[str] | None = None
        self.seconds = 0.0  # of compiling, in the parts that were waited for
        if can_keep():
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(folder)],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | {"ISOGEMM_QUIET": "1"},
            )  # fmt: skip

    def wait(self) -> None:
        """Wait for the next part: the encoder's kernels, then the language model's.

        A process that failed is not waited for: what it did not compile is compiled when it is called, and said.
        """
        if self._process is None or self._process.stdout is None:
            return
        soon = threading.Timer(ANNOUNCE_AFTER, announce)
        soon.start()
        try:
            self.seconds = float(self._process.stdout.readline() or self.seconds)
        finally:
            soon.cancel()

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(self, *error: object) -> None:
        """End the process, wherever it is."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def rehearse(folder: Path) -> None:
    """Compile what the demo needs of isogemm, and say the seconds of it so far after each part."""
    _encode(folder)
    print(compile_seconds(), flush=True)
    path = smollm.find()
    if path is not None:
        model, words = story.read(path)
        prompts = [smollm.with_question(words, question) for question in story.QUESTIONS[:2]]
        for asked in (prompts, prompts[:1]):
            decode.Decoder(model, decode.ISOGEMM).answers(asked, 2)
    print(compile_seconds(), flush=True)


def _encode(folder: Path) -> None:
    model = minilm.load(folder)
    # The linears first: their kernels take longest, and meanwhile the demo compiles the operations along rows.
    for linear in {linear.weight.shape: linear for linear in model.linears}.values():
        for m in (*trials.ROWS, 4 * max(trials.ROWS)):
            forward.ISOGEMM.linear(np.ones((m, linear.weight.shape[1]), np.float32), linear)
    forward.embed(model, minilm.tokenize(minilm.tokenizer(folder), SENTENCES[:3]), forward.ISOGEMM)


if __name__ == "__main__":
    rehearse(Path(sys.argv[1]))
