"""The audit in a process of its own, because a provider can end the one that it runs in.

What counts is the verdict that the process leaves in a file when it has come to its end, not its exit status: one whose
provider called ``os._exit(0)`` has that status too, and nothing was checked.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..base.command_line import open_streams
from ..base.disk import stoppable, write_whole
from ..errors import IsogemmError

_CODE = """import sys
sys.path[:], sys.argv[:], sys.orig_argv[:] = {path!r}, {argv!r}, {orig!r}
from isogemm.audit.apart import judged
from isogemm.cli.commands import command_line
judged(command_line, {verdict!r}, {parent!r})
"""
_PATIENCE = 2.0  # seconds that an interrupted audit has to end by itself


class AuditEnded(IsogemmError):
    """The process of an audit ended before there was a verdict: nothing is known."""


def apart() -> int:
    """Run the command line of this process again in one of its own; its exit status.

    Raises AuditEnded: it came to no end of its own: a provider ended the process, or the system did.
    """
    open_streams()
    with tempfile.TemporaryDirectory(prefix="isogemm-audit-") as folder, stoppable():
        verdict = Path(folder) / "verdict"
        ended = _run(str(verdict))
        if verdict.exists():
            return int(verdict.read_text())
    if ended == -signal.SIGINT:
        return 128 + signal.SIGINT
    raise AuditEnded(
        "the audit ended before its verdict",
        limit="providers that return or raise",
        value=f"exit status {ended}" if ended >= 0 else f"signal {-ended} ({signal.strsignal(-ended)})",
        nearest="one provider at a time, to see which",
    )


def _run(verdict: str) -> int:
    """The exit status of the process; it does not outlive this one."""
    alive, mine = os.pipe()
    pipes = () if os.name == "nt" else (alive,)
    code = _CODE.format(
        path=sys.path, argv=sys.argv, orig=sys.orig_argv, verdict=verdict, parent=alive if pipes else -1
    )
    process = subprocess.Popen([sys.executable, *(f"-W{w}" for w in sys.warnoptions), "-c", code], pass_fds=pipes)
    os.close(alive)
    try:
        return _wait(process)
    finally:
        process.kill()
        process.wait()
        os.close(mine)


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait()
    except KeyboardInterrupt:
        pass  # a terminal interrupts both, and the other one says so and ends
    with suppress(subprocess.TimeoutExpired):
        return process.wait(_PATIENCE)
    process.send_signal(signal.SIGINT)
    return process.wait()


def judged(command: Callable[[], None], verdict: str, parent: int) -> None:
    """Run `command` and leave its exit status in a file; in a process that `apart` started."""
    if parent >= 0:
        threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    status = 0
    try:
        command()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1 if end.code else 0
    write_whole(verdict, str(status), lasting=False)
    sys.exit(status)


def _leave_with(parent: int) -> None:
    """End this process when the one that waits for it has ended, however that was."""
    os.read(parent, 1)
    os._exit(3)
