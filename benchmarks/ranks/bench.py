"""The candidates of one rank, isogemm's models and torch's: what is timed of them, and how logits are compared."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from isogemm.lab import Timing, row, verdict
from isogemm.study.bits import differing

from ..common import repeated, told, words_of
from ..gpu.engine import CudaEngine, HostEngine
from ..model.build import cache_of, forward, random_model
from ..model.cases import Case, Sizes
from ..model.profile import kernels
from .launch import World, interleaved

__all__ = ["Bench", "Settings"]

Call = Callable[[int], Any]
ORDER = "tree8"
ALONE = "isogemm, one GPU"
APART = ", projections apart"
FAR = 0.1  # relative difference of logits beyond which two candidates do not compute one model
STEPS = 4  # of a decode whose logits are compared
BARS = {"decode": 1.0, "prefill": 1 / 1.1}  # least speed relative to the fastest of torch's ways


@dataclass(frozen=True)
class Settings:
    """What is measured, and how long.

    Attributes
    ----------
    size : int
        Ranks.
    device : str
    transports : tuple of str
        Of isogemm's sums.
    sizes : Sizes
        Of the model.
    equal, timed : tuple of Case
    listed : tuple of sets of words
        Candidates whose kernels are printed.
    compile_until : float
        Seconds after the start from which on nothing more is compiled.
    """

    size: int
    device: str
    transports: tuple[str, ...]
    sizes: Sizes
    equal: tuple[Case, ...]
    timed: tuple[Case, ...]
    listed: tuple[frozenset[str], ...] = ()
    rounds: int = 9
    block_seconds: float = 0.03
    compile_until: float = 120.0
    quick: bool = False
    seed: int = 0
    started: float = field(default_factory=time.time)

    def command(self, case: Case) -> str:
        """The line that measures one row again."""
        words = told(only=" ".join(case.words[1:]), tp=self.size, transports=",".join(self.transports))
        return repeated("ranks", ["model", *words], quick=self.quick)

    def elapsed(self) -> float:
        """Seconds since the start, the same on all processes of a machine."""
        return time.time() - self.started


@dataclass
class Inputs:
    """Arguments of a model's call that stay where they are, so that a graph may read them."""

    ids: Any
    positions: Any
    cache: Any
    logits: int

    def words(self) -> dict[str, Any]:
        """For the model."""
        return {
            "input_ids": self.ids,
            "position_ids": self.positions[None],
            "past_key_values": self.cache,
            "attention_mask": {"full_attention": None},  # no row is padded
            "logits_to_keep": self.logits,
        }


class Bench:
    """One rank's models, of one set of weights, and its engine."""

    def __init__(self, world: World, settings: Settings) -> None:
        from . import peers

        self.world, self.settings, self.sizes = world, settings, settings.sizes
        self.engine = CudaEngine() if world.device == "cuda" else HostEngine()
        base = random_model(self.sizes, 0, world.device, settings.seed)
        self.ours = self._converted(base)
        self.ways = peers.WAYS if world.device == "cuda" else peers.WAYS[:1]
        self.torch = peers.cut(base)
        self.compiled: Any = None

    def _converted(self, base: Any) -> dict[str, Any]:
        """isogemm's models by name, and one process' own."""
        import torch.distributed as dist

        from isogemm.torch import convert
        from isogemm.torch.distributed import Ranks

        group, transports = dist.group.WORLD, self.settings.transports
        ways = {ALONE: (None, "collective", True)}
        ways |= {f"isogemm, {transport}": (group, transport, True) for transport in transports}
        ways[f"isogemm, {transports[-1]}{APART}"] = (group, transports[-1], False)
        found = {}
        for name, (group, transport, fuse) in ways.items():
            found[name] = copy.deepcopy(base)
            convert(found[name], tp=Ranks(group, ORDER, transport, timeout=60.0), fuse=fuse)
        return found

    def inputs(self, case: Case, name: str, logits: int = 1) -> Inputs:
        """Tokens, positions, and a cache of the candidate's heads; the same numbers whenever they are made."""
        import torch

        device, model, rank = self.world.device, self.sizes.model, self.world.rank
        generator = torch.Generator(device).manual_seed(self.settings.seed)
        ids = torch.randint(int(model["vocab_size"]), (case.batch, case.tokens), generator=generator, device=device)
        positions = torch.arange(case.context - case.tokens, case.context, device=device)
        heads, width, depth = (int(model[key]) for key in ("num_key_value_heads", "head_dim", "num_hidden_layers"))
        own = 0, heads
        if name != ALONE:
            own = rank * heads // self.world.size, (rank + 1) * heads // self.world.size
        whole = torch.empty(
            case.batch, heads, case.context, width, dtype=getattr(torch, self.sizes.dtype), device=device
        )
        made = [whole.normal_(generator=generator)[:, slice(*own)].clone() for _ in range(2 * depth)]
        return Inputs(ids, positions, cache_of(made[:depth], made[depth:], positions), logits)

    def steps(self, case: Case) -> dict[str, tuple[Call, str]]:
        """What is timed, by name: a step, and the way of torch's sums while it is captured.

        torch's model is compiled where there is time for it, else eager.
        """
        alone, cut = (self.inputs(case, name).words() for name in (ALONE, ""))
        found = {n: (forward(model, alone if n == ALONE else cut), self.ways[0]) for n, model in self.ours.items()}
        kind, model = ("torch compiled", self.compiled) if self._may_compile() else ("torch", self.torch)
        return found | {f"{kind}, {way}": (forward(model, cut), way) for way in self.ways}

    def _may_compile(self) -> bool:
        import torch

        early = self.settings.elapsed() < self.settings.compile_until
        if self.world.device == "cpu" or not self.world.agree(early):
            return False
        if self.compiled is None:
            self.compiled = torch.compile(self.torch, dynamic=False)
        return True

    def timed(self, case: Case) -> dict[str, Any]:
        """The row of a case: times of all candidates in graphs, and what they launch."""
        from . import peers

        settings, steps = self.settings, self.steps(case)
        runs, absent, first, logits = {}, {}, {}, {}
        for name, (step, way) in steps.items():
            begin = time.perf_counter()
            with peers.by(way):
                run, held = self._captured(name, step, absent)
            first[name] = time.perf_counter() - begin
            if run is not None:
                run(0)
                runs[name], logits[name] = run, held.pop("y").clone()
        wrong, far = self._judged(logits)
        timings = interleaved(self.world, runs, rounds=settings.rounds, block_seconds=settings.block_seconds)
        launches = self._launches(runs, timings) if self.world.device == "cuda" else {}
        peer = _fastest(timings)
        return row(
            case.name, command=settings.command(case),
            timings=timings, verdicts=[verdict(t, peer) for t in timings.values() if t is not peer],
            tokens_per_second={name: case.count / t.median for name, t in timings.items()},
            bars=_bars(case, timings, peer), launches=launches, absent=absent, first_call_seconds=first,
            differing=wrong, error=f"logits too far from isogemm's: {far}" if far else None,
            seed=settings.seed, tp=self.world.size, **case.facts,
        )  # fmt: skip

    def _judged(self, logits: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
        """Logits of isogemm's replays whose bits are not one process', and torch's that are far from them."""
        want, far = logits[ALONE], {}
        for name, found in logits.items():
            if name.startswith("torch") and not (distance := _distance(found, want)) < FAR:
                far[name] = distance
        own = sum(differing(found, want) for name, found in logits.items() if name.startswith("isogemm"))
        said = self.world.together((own, far))
        return sum(wrong for wrong, _ in said), {name: x for _, each in said for name, x in each.items()}

    def _captured(self, name: str, step: Call, absent: dict[str, str]) -> tuple[Any, dict[str, Any]]:
        """What replays a step, and where its result is; no run, and a reason, where a rank could not."""
        held: dict[str, Any] = {}
        why, run = "", None
        try:
            step(0)  # may compile, and makes what no graph may
            self.engine.synchronize()
            run = self.engine.capture([lambda: held.update(y=step(0))])
        except Exception as error:
            why = words_of(error)
        if reasons := list(filter(None, self.world.together(why))):
            absent[name], run = reasons[0], None
        return run, held

    def _launches(self, runs: Mapping[str, Any], timings: Mapping[str, Timing]) -> dict[str, Any]:
        """Launches of one step and their microseconds, of isogemm's ways and of torch's fastest."""
        found = {}
        for name in [name for name in runs if name.startswith("isogemm")] + [_fastest(timings).name]:
            self.world.agree(True)
            (_, count, us), *each = kernels(runs[name], self.engine.synchronize)
            found[name] = {"launches": count, "busy_us": us}
            asked = any(words <= set(name.replace(",", "").split()) for words in self.settings.listed)
            if self.world.rank == 0 and asked:
                listed = [f"{us:9.1f} us {n:5d}  {kernel[:110]}" for kernel, n, us in each]
                print(f"  {name}", *listed, sep="\n    ", flush=True)
        return found

    def compared(self, case: Case) -> Iterator[dict[str, Any]]:
        """Logits of each of isogemm's ways, eager and replayed, against one process' own; and whether torch is near."""
        from . import peers

        want = list(self._logits(case, ALONE, replayed=False))
        ways = [(name, replayed) for name in self.ours for replayed in (False, True)]
        for name, replayed in ways[1:]:
            wrong, why = 0, ""
            try:
                pairs = zip(self._logits(case, name, replayed=replayed), want, strict=True)
                wrong = sum(differing(x, y) for x, y in pairs)
            except Exception as error:
                why = words_of(error)
            count = 0 if why else sum(x.numel() for x in want)
            yield self._outcome(f"{case.phase} {'graph' if replayed else 'eager'}: {name}", count, wrong, why)
        for way in self.ways:
            with peers.by(way):
                found = list(self._logits(case, f"torch, {way}", replayed=False))
            far = max(map(_distance, found, want))
            why = "" if far < FAR else f"{far:.3g} of isogemm's logits away, limit {FAR}"
            yield self._outcome(f"{case.phase} near: torch, {way}", 0, 0, why) | {"relative": far}

    def _outcome(self, name: str, count: int, wrong: int, why: str) -> dict[str, Any]:
        """A row of all ranks."""
        counts, wrongs, reasons = zip(*self.world.together((count, wrong, why)), strict=True)
        return {
            "name": name, "tp": self.world.size, "order": ORDER, "compared": sum(counts), "differing": sum(wrongs),
            "error": next(filter(None, reasons), None),
        }  # fmt: skip

    def _logits(self, case: Case, name: str, *, replayed: bool) -> Iterator[Any]:
        """Logits of a decode's steps one after the other, or of a whole prompt."""
        import torch

        decodes = case.phase == "decode"
        inputs = self.inputs(case, name, 1 if decodes else 0)
        step, held = forward(self.ours.get(name, self.torch), inputs.words()), {}
        if replayed:
            step, held = self._captured(name, step, absent := {})
            if step is None:
                raise RuntimeError(absent[name])
            for layer, new in zip(inputs.cache.layers, self.inputs(case, name).cache.layers, strict=True):
                layer.keys.copy_(new.keys)
                layer.values.copy_(new.values)
        generator = torch.Generator(self.world.device).manual_seed(self.settings.seed + 1)
        for i in range(STEPS if decodes else 1):
            inputs.ids.random_(0, int(self.sizes.model["vocab_size"]), generator=generator)
            if decodes:
                inputs.positions.fill_(case.context - STEPS + i)
            found = step(0)
            yield held["y"].clone() if replayed else found


def _distance(x: Any, y: Any) -> float:
    """Root of the mean square of the difference, relative to that of y; 1e9 where JSON has no word for it."""
    found = float((x - y).float().norm() / y.float().norm())
    return found if isfinite(found) else 1e9


def _fastest(timings: Mapping[str, Timing]) -> Timing:
    """Of torch's ways."""
    return min((t for name, t in timings.items() if name.startswith("torch")), key=lambda t: t.median)


def _bars(case: Case, timings: Mapping[str, Timing], peer: Timing) -> list[dict[str, str]]:
    least = BARS[case.phase]
    ours = [name for name in timings if name.startswith("isogemm") and name != ALONE and not name.endswith(APART)]
    return [
        {"bar": f"{name} ≥ {least:.3g} {peer.name}", "result": verdict(timings[name], peer).against(least)}
        for name in ours
    ]
