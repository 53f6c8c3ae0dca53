"""How a command line ends: typed errors are bad usage, and a pipe that nobody reads any more is no verdict."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import Any

from ..errors import IsogemmError

BAD_USAGE = 2
UNREAD = 141
"""As a shell has it of a command that a closed pipe ended."""


def run_app(app: Callable[..., Any], prog_name: str, name: str) -> None:
    """Run a command line in this process; of a typed error it says a line and its notes, and ends with `BAD_USAGE`."""
    try:
        app(prog_name=prog_name)
    except IsogemmError as error:
        for line in (f"{name}: {error}", *getattr(error, "__notes__", ())):
            print(line, file=sys.stderr)
        sys.exit(BAD_USAGE)
    except SystemExit as end:
        if getattr(end.__context__, "errno", None) != errno.EPIPE:
            raise
        # Click and rich made it status 1, which means that something does not hold. What buffers still have goes away.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(UNREAD)
