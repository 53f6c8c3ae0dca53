"""How a command line ends: typed errors are bad usage, and output that cannot be written or that nobody reads is no
verdict."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from ..errors import IsogemmError

BAD_USAGE = 2
UNWRITTEN = 3
UNREAD = 141
"""As a shell has it of a command that a closed pipe ended."""


def run_app(app: Callable[..., Any], prog_name: str, name: str) -> None:
    """Run a command line in this process; of a typed error it says a line and its notes, and ends with `BAD_USAGE`."""
    open_streams()
    try:
        app(prog_name=prog_name)
    except IsogemmError as error:
        for line in (f"{name}: {error}", *getattr(error, "__notes__", ())):
            _say(line)
        sys.exit(BAD_USAGE)
    except OSError as error:
        if error.errno is None or error.filename is not None:  # of a library, or of a file
            raise
        _discard(sys.stdout)
        _say(f"{name}: the output cannot be written: {error}")
        sys.exit(UNWRITTEN)
    except SystemExit as end:
        if getattr(end.__context__, "errno", None) != errno.EPIPE:
            raise
        _discard(sys.stdout)  # Click and rich made it status 1, which means that something does not hold
        sys.exit(UNREAD)


def open_streams() -> None:
    """Make standard streams take every text, and those that were closed take it nowhere.

    A file or a pipe would get the number of one that is closed, and a process that is started would write into it.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout, sys.stderr = (x or open(os.devnull, "w") for x in (sys.stdout, sys.stderr))  # noqa: SIM115 (to the end)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _say(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """What the buffers of a stream still have goes away."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
