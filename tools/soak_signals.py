"""Raise exceptions in calls at random moments, and see that nothing is written after a call has ended.

    python tools/soak_signals.py --seconds 600 --seed 1    # exit status 1 if anything was wrong
    python tools/soak_signals.py --seconds 2 --sweep 1     # first, exceptions at every step of each program once

Exceptions come from signal handlers, alone and behind faulthandler's, from tracing and profiling hooks, and, with
``PyThreadState_SetAsyncExc``, from another thread. Programs: a small, a large, a batched and two quantized products,
and a softmax, on 1 to 4 threads. Every array is a mapping of its own where glibc allocates, so that what is touched
after it was freed is a segmentation fault. It runs in child processes, because that is one way to fail.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import isogemm
from isogemm.backends.cpu import pool as pools
from isogemm.backends.cpu.rows import run as rows

BURST, AGAIN = 60.0, 2.0  # seconds of a child process, and of another where too few exceptions were raised
THREADS = 4
POISON = 0xA5
HELD = 2**27  # bytes of ended calls' results that are watched at a time


class Interrupted(BaseException):
    """What handlers and hooks raise."""


class Program:
    """One call: `make` copies its operands, which die with the call, and `call` runs it into `out`."""

    def __init__(self, name: str, operands: tuple[Any, ...], shape: tuple[int, ...], call: Callable[..., Any]) -> None:
        self.name, self.operands, self.shape, self.call = name, operands, shape, call
        self.want = self.fresh()
        isogemm.set_num_threads(1)
        self.seconds = min(self._timed() for _ in range(3))
        self.weight = self.seconds**-0.5  # long calls are drawn less often, and get more of the time

    def fresh(self) -> np.ndarray:
        return np.full(self.shape, np.nan, np.float32)

    def make(self) -> tuple[Any, ...]:
        return tuple(x.copy() if isinstance(x, np.ndarray) else x for x in self.operands)

    def _timed(self) -> float:
        started = time.perf_counter()
        self.call(*self.make(), self.want)
        return time.perf_counter() - started


def programs() -> list[Program]:
    draw = np.random.default_rng(0).standard_normal

    def x(*shape: int) -> np.ndarray:
        return draw(shape, dtype=np.float32)

    def product(a: Any, b: Any, out: Any) -> None:
        isogemm.matmul(a, b, out=out)

    def linear(a: Any, w: Any, out: Any) -> None:
        isogemm.linear(a, w, out=out)

    weight = isogemm.quantize(x(512, 512), "Q4_K")
    return [
        Program("small", (x(64, 64), x(64, 64)), (64, 64), product),
        Program("large", (x(2048, 16), x(16, 8192)), (2048, 8192), product),
        Program("batched", (x(64, 32, 64), x(64, 64, 48)), (64, 32, 48), product),
        Program("quantized", (x(3, 512), weight), (3, 512), linear),
        Program("quantized, many rows", (x(128, 512), weight), (128, 512), linear),
        Program("softmax", (x(256, 1000),), (256, 1000), lambda a, out: rows.run("softmax", a, out)),
    ]


def draw(found: list[Program], drawn: random.Random) -> Program:
    return drawn.choices(found, [program.weight for program in found])[0]


class Watch:
    """Counts, and results of calls that have ended: poison that nobody may overwrite."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.raised: Counter[str] = Counter()
        self.where: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._ended: deque[tuple[str, np.ndarray]] = deque()

    def ended(self, name: str, out: np.ndarray) -> None:
        """The call raised: from now on `out` is the caller's."""
        out.view(np.uint8).fill(POISON)
        self._ended.append((name, out))
        while sum(held.nbytes for _, held in self._ended) > HELD:
            self._look(*self._ended.popleft())

    def finish(self) -> None:
        while self._ended:
            self._look(*self._ended.popleft())

    def _look(self, name: str, out: np.ndarray) -> None:
        if (late := int((out.view(np.uint8) != POISON).sum())) > 0:
            self.wrong.append(f"{name}: {late} bytes written after the call had raised")

    def compare(self, name: str, out: np.ndarray, want: np.ndarray) -> None:
        if not np.array_equal(out.view(np.uint32), want.view(np.uint32)):
            self.wrong.append(f"{name}: a call that ended has other bits")


def place(error: BaseException) -> str:
    """The innermost function in which an exception arose."""
    entry, found = error.__traceback__, "?"
    while entry is not None:
        code = entry.tb_frame.f_code
        if "soak_signals" not in code.co_filename:
            found = f"{Path(code.co_filename).name}:{code.co_name}"
        entry = entry.tb_next
    return found


class Raiser:
    """Handlers and hooks that raise while `armed`."""

    def __init__(self, drawn: random.Random, log: Any) -> None:
        self.armed, self._drawn, self._log = False, drawn, log
        self.events = self.at = 0
        self.kinds: dict[str, Callable[[float], contextlib.AbstractContextManager[None]]] = {
            "trace": self.traced,
            "profile": self.profiled,
        }
        if hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, self._handle)
            self.kinds |= {"signal": self.signalled, "faulthandler": self.dumped}

    def _handle(self, number: int, frame: Any) -> None:
        self._fire()

    def _fire(self) -> None:
        if self.armed:
            self.armed = False
            raise Interrupted

    @contextlib.contextmanager
    def signalled(self, seconds: float) -> Iterator[None]:
        delay = self._drawn.uniform(1e-6, seconds)
        self.armed = True
        signal.setitimer(signal.ITIMER_REAL, delay)
        try:
            yield
        finally:
            self.armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    @contextlib.contextmanager
    def dumped(self, seconds: float) -> Iterator[None]:
        """The same handler behind faulthandler's.

        Not of all threads, and without its watchdog: those read frames that other threads are changing, and crash.
        """
        faulthandler.register(signal.SIGALRM, self._log, all_threads=False, chain=True)
        try:
            with self.signalled(seconds):
                yield
        finally:
            faulthandler.unregister(signal.SIGALRM)
            self._log.truncate(0)

    def _hook(self, frame: Any, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes = True
        self.events += 1
        if self.events == self.at:
            self._fire()
        return self._hook

    def traced(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        return self.hooked(sys.settrace, self._drawn.randint(1, 400))

    def profiled(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        return self.hooked(sys.setprofile, self._drawn.randint(1, 80))

    @contextlib.contextmanager
    def hooked(self, install: Callable[[Any], None], at: int) -> Iterator[None]:
        """Raise at event number `at`; any event, of which a tracer gets one for each bytecode."""
        self.events, self.at, self.armed = 0, at, True
        install(self._hook)
        try:
            yield
        finally:
            self.armed = False
            install(None)


def attempt(program: Program, watch: Watch, kind: str, raising: contextlib.AbstractContextManager[None]) -> bool:
    """One call under a raiser; whether it raised. Its operands are freed at once."""
    out = program.fresh()
    operands = program.make()
    watch.calls[program.name] += 1
    raised = False
    try:
        with raising:
            program.call(*operands, out)
    except Interrupted as error:
        watch.where[place(error)] += 1
        watch.raised[kind] += 1
        raised = True
    del operands
    if raised:
        watch.ended(program.name, out)
    else:
        watch.compare(program.name, out, program.want)
    return raised


def check_pool(watch: Watch) -> None:
    """Between calls the pool is free, has no more workers than were asked for, and they all can be woken."""
    workers = pools.pool()
    control = workers._control
    until = time.perf_counter() + 10
    hired = int(control[pools.HIRED])
    marks = [pools.SLEEPING + 8 * slot for slot in range(1, hired + 1)]
    while time.perf_counter() < until and not all(control[mark] for mark in marks):
        time.sleep(0.001)
    if not all(control[mark] for mark in marks):
        watch.wrong.append("a worker is neither asleep nor at work")
    if control[pools.BUSY]:
        watch.wrong.append("the pool is held by nobody")
    if hired > THREADS - 1:
        watch.wrong.append(f"{hired} workers for {THREADS} threads")


def sweep(found: list[Program], watch: Watch, raiser: Raiser, step: int) -> None:
    """Each program with an exception at every `step`-th of its events, workers asleep and awake."""
    isogemm.set_num_threads(THREADS)
    for program in found:
        for kind, install in (("trace", sys.settrace), ("profile", sys.setprofile)):
            at, raised = 1, True
            while raised:
                if at % 2:
                    time.sleep(0.001)
                raised = attempt(program, watch, kind, raiser.hooked(install, at))
                at += step
        check_pool(watch)


def in_turns(found: list[Program], watch: Watch, raiser: Raiser, drawn: random.Random, until: float) -> None:
    """Programs, kinds and thread counts as they are drawn, in the main thread."""
    while time.perf_counter() < until and not watch.wrong:
        program, kind = draw(found, drawn), drawn.choice(list(raiser.kinds))
        isogemm.set_num_threads(drawn.randint(1, THREADS))
        if drawn.random() < 0.5:
            time.sleep(0.002)  # workers fall asleep
        attempt(program, watch, kind, raiser.kinds[kind](1.3 * program.seconds))
    watch.finish()
    check_pool(watch)


def in_threads(found: list[Program], watch: Watch, drawn: random.Random, until: float) -> None:
    """A user's threads, in which the main thread raises KeyboardInterrupt."""
    inside: dict[int, bool] = {}
    isogemm.set_num_threads(THREADS)

    def work(seed: int) -> None:
        drawn, mine = random.Random(seed), Watch()
        while time.perf_counter() < until and not watch.wrong:
            program = draw(found, drawn)
            out = program.fresh()
            operands, ended, where = program.make(), False, ""
            try:
                inside[threading.get_ident()] = True
                program.call(*operands, out)
                inside[threading.get_ident()] = False
                ended = True
            except KeyboardInterrupt as error:
                inside[threading.get_ident()] = False
                where = place(error)
            del operands
            watch.calls[program.name] += 1
            if ended:
                watch.compare(program.name, out, program.want)
            else:
                watch.where[where] += 1
                watch.raised["KeyboardInterrupt in a thread"] += 1
                mine.ended(program.name, out)
            watch.wrong += mine.wrong
        mine.finish()
        watch.wrong += mine.wrong

    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    users: list[threading.Thread] = []
    while time.perf_counter() < until and not watch.wrong:
        users = [user for user in users if user.is_alive()]  # an interrupt behind its call ends a thread
        while len(users) < 2:
            users.append(threading.Thread(target=_quietly(work), args=(drawn.getrandbits(32),), daemon=True))
            users[-1].start()
        time.sleep(drawn.uniform(1e-4, 3e-3))
        user = drawn.choice(users)
        if user.ident is not None and inside.get(user.ident):
            raise_in(ctypes.c_ulong(user.ident), ctypes.py_object(KeyboardInterrupt))
    for user in users:
        user.join(60)
    if any(user.is_alive() for user in users):
        watch.wrong.append("a user's thread never ended")
    check_pool(watch)


def _quietly(work: Callable[[int], None]) -> Callable[[int], None]:
    def run(seed: int) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            work(seed)

    return run


def burst(seconds: float, seed: int, step: int) -> dict[str, Any]:
    """What a child process does."""
    drawn, watch, found = random.Random(seed), Watch(), programs()
    isogemm.set_num_threads(THREADS)
    for program in found * 2:  # workers are hired, and every kernel is compiled
        program.call(*program.make(), program.fresh())
    gc.disable()  # an exception in a collector's callback is printed and lost
    with tempfile.TemporaryFile() as log:
        raiser = Raiser(drawn, log)
        if step:
            sweep(found, watch, raiser, step)
        started = time.perf_counter()
        in_turns(found, watch, raiser, drawn, started + 0.7 * seconds)
        in_threads(found, watch, drawn, started + seconds)
    return {
        "calls": watch.calls,
        "raised": watch.raised,
        "where": watch.where,
        "wrong": watch.wrong[:5],
        "threads": len(threading.enumerate()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--least", type=int, default=0, help="exceptions to raise, however long that takes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sweep", type=int, default=0, metavar="STEP", help="first raise at every STEP-th event")
    parser.add_argument("--burst", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.burst:
        print(json.dumps(burst(options.seconds, options.seed, options.sweep)))
        return 0
    return _soak(options)


def _soak(options: argparse.Namespace) -> int:
    totals = {name: Counter() for name in ("calls", "raised", "where")}
    wrong: list[str] = []
    left, seed = options.seconds, options.seed
    while not wrong and (left > 0 or sum(totals["raised"].values()) < options.least):
        seconds = min(left, BURST) if left > 0 else AGAIN
        command = [sys.executable, "-X", "faulthandler", __file__, "--burst", "--seconds", str(seconds)]
        command += ["--seed", str(seed), "--sweep", str(options.sweep if seed == options.seed else 0)]
        env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "4096"}
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=seconds + 300)
        if done.returncode:
            wrong.append(f"seed {seed}: exit status {done.returncode}\n{done.stderr[-4000:]}")
            break
        report = json.loads(done.stdout)
        wrong += [f"seed {seed}: {text}" for text in report["wrong"]]
        for name, total in totals.items():
            total.update(report[name])
        left, seed = left - seconds, seed + 1
    for name, total in totals.items():
        print(f"{name}: {sum(total.values())}")
        for what, count in total.most_common(40):
            print(f"  {count:8} {what}")
    print("\n".join(wrong) if wrong else "nothing wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
