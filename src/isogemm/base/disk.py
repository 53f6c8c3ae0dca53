"""Files: what is kept in this user's cache, and files that appear whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import OptionError
from .progress import say

_CHECK = hashlib.sha256().digest_size
# Where a name stands for something that is open already, nothing can be replaced.
_OPEN_ALREADY = ("/dev/std", "/dev/fd/", "/proc/")
_said: set[str] = set()


def cache_folder(name: str) -> Path | None:
    """This user's folder of that name for what can be made again; None where the system names no place for it."""
    import platformdirs

    return _below(platformdirs.user_cache_dir, name)


def data_folder(name: str) -> Path | None:
    """This user's folder of that name for what took long to find; None where the system names no place for it."""
    import platformdirs

    return _below(platformdirs.user_data_dir, name)


def _below(place: Callable[..., str], name: str) -> Path | None:
    try:
        base = Path(place("isogemm", appauthor=False))
    except RuntimeError:  # of a user without a home
        return None
    # By older packages such a user gets "~/.cache" as it is, which is a folder in the current one.
    return base / name if base.is_absolute() else None


@contextmanager
def replacing(path: str | Path, *, lasting: bool = True) -> Iterator[Path]:
    """A new, empty file beside `path`, which takes its name when the block ends, and is removed when it raises.

    Readers see the old content or the new one, and writers at the same time do not meet. What is no regular file (a
    pipe, a device) cannot be replaced: it is the block's own. A link is followed, and missing folders are made. With
    `lasting` the file is on the disk before it has its name, so that it is whole after a power failure too. Raises
    OSError, the system's; the file that was there is as it was.
    """
    if is_special(path):
        yield Path(path)
        return
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name[:100]}.{os.urandom(8).hex()}.tmp")
    # Readable to whom the umask lets: tempfile's are the owner's alone, and a cache may be made for others.
    os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield part
        if lasting:
            with open(part, "rb+") as file:
                os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


@contextmanager
def stoppable() -> Iterator[None]:
    """What ends a process without a word becomes an exception, so that what is half written is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    chosen = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in chosen}
    before = {number: handler for number, handler in before.items() if handler == signal.SIG_DFL}
    try:
        for number in before:
            signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write_whole(path: str | Path, content: str | bytes, *, lasting: bool = True) -> Path:
    """Write a file that is never seen half written; text as UTF-8. As `replacing`; returns the path."""
    with replacing(path, lasting=lasting) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
    return Path(path)


def check_room(path: str | Path) -> None:
    """Try whether `write_whole` could write here, and leave nothing behind.

    Raises OSError: it could not, for example where a file is there and must not be written.
    """
    if os.path.exists(path) and (os.path.isdir(path) or not os.access(path, os.W_OK)):
        kind: type[OSError] = IsADirectoryError if os.path.isdir(path) else PermissionError
        raise kind(f"not to be written: {os.fspath(path)!r}")
    if is_special(path):
        return
    folder = Path(os.path.realpath(path)).parent
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{os.urandom(8).hex()}.tmp"
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        part.unlink()
    finally:
        for parent in made:
            with suppress(OSError):
                parent.rmdir()


def cannot_write(path: str | Path, why: object, name: str) -> OptionError:
    """The error for a file that cannot be written; `name` is a file's in the folder, where `path` is one."""
    path = Path(path)
    nearest = str(path / name) if path.is_dir() else path.name
    return OptionError("cannot write", limit="a writable file", value=str(why), nearest=nearest)


@contextmanager
def writing(path: str | Path, name: str = "report.json") -> Iterator[None]:
    """What the system says of a file that is tried or written within becomes the error of `cannot_write`."""
    try:
        yield
    except BrokenPipeError:  # of a reader that has left: no fault of the path
        raise
    except OSError as error:
        raise cannot_write(path, error, name) from error


def read_object(what: str, path: str | Path, nearest: object) -> dict[str, Any]:
    """The object in a file of JSON. Raises OptionError, which names the file: it has none, or cannot be read."""
    try:
        found, why = json.loads(Path(path).read_text(encoding="utf-8")), "no object of JSON"
    except (OSError, ValueError, RecursionError) as error:
        found, why = None, str(error)
    if not isinstance(found, dict):
        raise OptionError(what, limit="a file with an object of JSON", value=f"{path} ({why})", nearest=nearest)
    return found


def keep(path: Path, data: bytes) -> None:
    """Keep data in a cache, with a checksum: `kept` gives it back, or nothing.

    Raises OSError: it cannot be written; what was there is as it was.
    """
    write_whole(path, data + hashlib.sha256(data).digest(), lasting=False)  # what a power failure cuts is made again


def kept(path: Path) -> bytes | None:
    """What `keep` wrote; None where there is nothing, or something else, or what `read_own` does not read."""
    content = read_own(path)
    if content is None:
        return None
    data, check = content[:-_CHECK], content[-_CHECK:]
    return data if hashlib.sha256(data).digest() == check else None


def read_own(path: Path) -> bytes | None:
    """A file of this user's or root's; None where there is none: what is kept decides what this process runs."""
    try:
        with open(path, "rb") as file:
            trusted = not hasattr(os, "geteuid") or os.fstat(file.fileno()).st_uid in (os.geteuid(), 0)
            return file.read() if trusted else None
    except OSError:
        return None


def say_not_kept(what: str, why: object) -> None:
    """Say once in a process, on standard error, that compiled code is not kept: that costs the time of a start."""
    if what not in _said:
        _said.add(what)
        say(f"{what} are not cached, every process compiles them anew: {why}")


def is_special(path: str | Path) -> bool:
    """Whether a path is a pipe, a device, or a name of what is open already: no file that could be replaced."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or os.fspath(path).startswith(_OPEN_ALREADY)
