"""Programs: a model lowered to a graph, a plan and a layout, which are checked, kept in a folder, and run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.arguments import extent, flag, nearest, of_type, one_of, path
from ..base.disk import check_room, read_object, write_whole
from ..base.limits import at_most
from ..base.threads import get_num_threads
from ..contract.attention import LEAF
from ..errors import IsogemmError, OptionError, ShapeError
from ..operands.tensors import on_host
from ..quant.tensor_file import TensorFile
from .build import build
from .caches import UnseenValues
from .checks import check
from .executor import AdamW, ProgramExecutor, scalars
from .graph import Graph
from .layout import make_layout
from .lowering import Lowered, lower_graph
from .model import DecoderConfig, decoder, weight_formats
from .plan import Choices, choices_of, make_plan
from .schema import validate
from .tables import frequencies, given_frequencies, rope_tables
from .weights import FREQUENCIES, file_formats, stored_weights

__all__ = ["LAYOUT_FILE", "PLAN_FILE", "Program", "Run", "load", "lower"]

PHASES = ("train", "prefill", "decode")
PLAN_FILE = {phase: f"{phase}_exec_plan.json" for phase in PHASES}
LAYOUT_FILE = {phase: f"layout_{phase}.json" for phase in PHASES}
MODES = ("deterministic", "fast")
MOST_TOKENS, MOST_THREADS = 2**24, 1023  # a plan names every sequence's attention, and each thread's part


@dataclass(frozen=True, slots=True)
class Program:
    """A model, lowered.

    Attributes
    ----------
    model : DecoderConfig
    graph : Graph
        What is computed, for one micro-batch.
    plan, layout : dict
        Who computes it and where it lies, as plain data.
    """

    model: DecoderConfig
    graph: Graph
    lowered: Lowered
    plan: dict[str, Any]
    layout: dict[str, Any]

    @property
    def phase(self) -> str:
        """train, prefill or decode."""
        return str(self.plan["isogemm"]["phase"])

    def check(self) -> None:
        """Raise the first thing that is wrong with the plan or the layout; see `isogemm.program.checks`."""
        check(self.lowered, self.plan, self.layout)

    def save(self, folder: str | Path) -> Path:
        """Write plan and layout; returns the folder.

        Raises
        ------
        OptionError
            The folder has a plan of another phase, or cannot be made or written into, as where a file has its name.
        """
        place = check_folder(folder, self.phase)
        with _writing(place):
            for name, data in ((PLAN_FILE, self.plan), (LAYOUT_FILE, self.layout)):
                write_whole(place / name[self.phase], json.dumps(data, indent=1) + "\n")
        return place

    def explain(self) -> str:
        """Tables of phases and memory; see `isogemm.program.explain`."""
        from .explain import explain

        return explain(self)

    def run(self, weights: Mapping[str, Any], inputs: tuple[Any, ...]) -> Any:
        """Once: `Run.step` of (ids, targets), `Run.logits` of (ids,), or `Run.decode` of (ids, positions)."""
        run = self.start(weights)
        once: Any = {"train": run.step, "prefill": run.logits, "decode": run.decode}[self.phase]
        return once(*inputs)

    def start(self, weights: Mapping[str, Any], *, canaries: bool = True) -> Run:
        """The program in memory with these weights, by their names in a program or in a checkpoint of transformers.

        A weight that the program has in blocks is given as a `QuantizedMatrix` of that format, or is quantized. What
        `isogemm.quant.load` gives of a GGUF file goes by that file's names, and llama's rows are brought in order.

        Raises
        ------
        OptionError, ShapeError
            A weight is missing, has another shape or format, or the file is of another model.
        """
        self.check()
        return Run(self, weights, canaries=canaries)


class Run:
    """A program in memory.

    Attributes
    ----------
    program : Program
    executor : ProgramExecutor
        What walks the plan.
    steps : int
        Of training, or calls of `logits`, so far.
    """

    def __init__(self, program: Program, weights: Mapping[str, Any], *, canaries: bool = True) -> None:
        self.program = program
        self.steps = 0
        self.executor = ProgramExecutor(program.lowered, program.plan, program.layout, canaries=canaries)
        self._about = program.plan["isogemm"]
        dtypes = {value.name: value.dtype for value in program.graph.section("weights")}
        for name, stored in stored_weights(program.model, weights, dtypes, train=program.phase == "train"):
            self.array(name)[...] = stored
        if program.phase == "decode":
            layers = range(program.model.num_hidden_layers)
            caches = [self.array(f"L{i}.v.cache") for i in layers]
            self._unseen = UnseenValues(caches, self._about["batch"], self._about["tokens"])
        if program.model.positions:
            if program.phase != "decode":
                times = self.array("positions").size // self._about["tokens"]
                self.array("positions")[...] = np.tile(np.arange(self._about["tokens"]), times)
            return
        known, width = weights.get(FREQUENCIES), program.model.head_dim
        inv_freq = frequencies(width, program.model.rope_theta) if known is None else given_frequencies(known, width)
        cos, sin = rope_tables(self._about["tokens"], inv_freq)
        self.array("cos")[...], self.array("sin")[...] = cos, sin
        if program.phase == "train":
            self.array("minus_sin")[...] = -sin

    def array(self, name: str) -> NDArray[Any]:
        """A tensor of the layout, as it is now; activations share memory and last as long as they are needed.

        Raises OptionError: the layout has none of that name.
        """
        names = self.executor.memory.names
        if name not in names:
            limit, close = "a name of the layout", nearest(str(name), names, names[0])
            raise OptionError("tensor", limit=limit, value=repr(name), nearest=close)
        return self.executor.memory.array(name)

    def step(self, ids: Any, targets: Any, rates: AdamW | None = None) -> float:
        """One training step of a program of ``train``; the mean of -log p(target) before it.

        Parameters
        ----------
        ids, targets : array of integers [batch, tokens]
        rates : AdamW, optional

        Raises
        ------
        ShapeError
            They are not of the program's shape, or out of range.
        LayoutError
            Somebody has written beside a tensor.
        """
        self._only("train", "step")
        shape = self._about["batch"], self._about["tokens"]
        both = [self._tokens(name, x, shape) for name, x in (("ids", ids), ("targets", targets))]
        chosen = of_type("rates", AdamW() if rates is None else rates, AdamW, "an AdamW", "AdamW(lr=1e-3)")
        self.steps += 1
        self.array("scalars")[...] = scalars(chosen, self.steps)
        self.executor.run("zero")
        each = self._about["batch"] // self._about["micro_batches"]
        for start in range(0, self._about["batch"], each):
            for name, x in zip(("ids", "targets"), both, strict=True):
                self.array(name)[...] = x[start : start + each].reshape(-1)
            self.executor.run("forward", "backward")
        self.executor.run("optimizer")
        return float(self.array("loss")[0])

    def logits(self, ids: Any) -> NDArray[np.float32]:
        """Logits [batch, tokens, vocabulary] of a program of ``prefill``; keys and values stay until the next call."""
        self._only("prefill", "logits")
        found = self._tokens("ids", ids, (self._about["batch"], self._about["tokens"]))
        self.array("ids")[...] = found.reshape(-1)
        self.executor.run("forward")
        self.steps += 1
        return self.array("logits").reshape(*found.shape, -1).copy()

    def decode(self, ids: Any, positions: Any) -> NDArray[np.float32]:
        """Logits [batch, vocabulary] behind one more token of each sequence, by a program of ``decode``.

        Its key and value are put into the caches; keys behind its position are not seen, so a sequence may go back.

        Parameters
        ----------
        ids, positions : array of integers [batch]
            Positions count from 0 and are below the program's tokens.

        Raises
        ------
        ShapeError
            They are not of the program's shape, or out of range.
        LayoutError
            Somebody has written beside a tensor.
        """
        self._only("decode", "decode")
        shape = (self._about["batch"],)
        found = self._tokens("ids", ids, shape)
        self.array("positions")[...] = now = self._tokens("positions", positions, shape, self._about["tokens"])
        self.array("ids")[...] = found
        with self._unseen.aside(now):
            self.executor.run("forward")
        return self.array("logits").copy()

    def fill(self, prefill: Run) -> None:
        """Take the keys and values of a prefill of the same model and batch into the caches of a program of ``decode``.

        Raises
        ------
        OptionError, ShapeError
            It is no such prefill, or has more tokens than the caches.
        """
        self._only("decode", "fill")
        of_type("prefill", prefill, Run, "what start gave of a prefill", "lower(phase='prefill').start(weights)")
        prefill._only("prefill", "keys and values to fill from")
        theirs, ours = prefill._about, self._about
        for name in ("model", "batch"):
            if theirs[name] != ours[name]:
                raise OptionError(f"{name} of a prefill", limit=ours[name], value=theirs[name], nearest=ours[name])
        if theirs["tokens"] > ours["tokens"]:
            limit = f"at most {ours['tokens']}, which the caches hold"
            raise ShapeError("tokens of a prefill", limit=limit, value=theirs["tokens"], nearest=ours["tokens"])
        if not prefill.steps:
            limit = "those of a call of logits"
            raise OptionError("keys of a prefill", limit=limit, value="none", nearest="prefill.logits(ids)")
        self._unseen.refilled()
        for i in range(self.program.model.num_hidden_layers):
            keys = "k.heads" if self.program.model.positions else "k.turned"
            for cache, name in (("k.cache", keys), ("v.cache", "v.heads")):
                self.array(f"L{i}.{cache}")[:, :, : theirs["tokens"]] = prefill.array(f"L{i}.{name}")

    def _only(self, phase: str, what: str) -> None:
        if self.program.phase != phase:
            raise OptionError(
                f"phase of {what}", limit=phase, value=self.program.phase, nearest=f"lower(phase={phase!r})"
            )

    def _tokens(self, name: str, given: Any, shape: tuple[int, ...], below: int | None = None) -> NDArray[np.int64]:
        most = below or self.program.model.vocab_size
        try:
            found = on_host(given)
        except IsogemmError:
            raise
        except ValueError as error:  # NumPy's
            value = "rows of different lengths"
            raise ShapeError(name, limit=list(shape), value=value, nearest=list(shape)) from error
        if found.shape != shape:
            raise ShapeError(name, limit=list(shape), value=list(found.shape), nearest=list(shape))
        limit = f"whole numbers from 0 to {most - 1}"
        if found.dtype.kind not in "iu":
            raise ShapeError(name, limit=limit, value=found.dtype, nearest="integers")
        for bad in found[(found < 0) | (found >= most)]:
            raise ShapeError(name, limit=limit, value=int(bad), nearest=min(max(int(bad), 0), most - 1))
        return found.astype(np.int64)


def lower(
    model: Any,
    *,
    batch: int,
    tokens: int,
    phase: str = "train",
    threads: int | None = None,
    mode: str = "deterministic",
    optimizer: str = "adamw",
    micro_batches: int = 1,
    recompute: bool = False,
    leaf: int = 4096,
    quantize: str | Mapping[str, str | None] | TensorFile | None = None,
    choices: Choices | None = None,
) -> Program:
    """Lower a model to its graph, its plan and its layout; nothing is computed.

    Parameters
    ----------
    model : DecoderConfig, dict or configuration of transformers
        Of Qwen3, Llama or GPT-2.
    batch, tokens : int
        Sequences of a step, and tokens of each; with ``decode`` those that its caches of keys and values hold.
    phase : {"train", "prefill", "decode"}
        ``decode`` computes one more token of each sequence, at positions that are its inputs.
    threads : int, optional
        Default `isogemm.get_num_threads()`.
    mode : {"deterministic", "fast"}
        Both have the same bits: `fast` computes leaves of weights' gradients side by side where there are several.
    optimizer : {"adamw"}
        Of training; its rates are arguments of a step.
    micro_batches : int
        How many parts a step's batch is computed in.
    recompute : bool
        The backward pass computes each layer's activations again, instead of keeping them.
    leaf : int
        Rows of a leaf in the gradients of weights: part of the numbers. Micro-batches of whole leaves have the bits of
        one batch.
    quantize : str, mapping of str to str, or TensorFile, optional
        A format of GGUF for the weights of products, or formats by patterns of their names, the first that fits; None
        leaves them float32. A GGUF file stands for its own formats. Activations are quantized, too
        (``int32/chain``). For prefill and decode.
    choices : Choices, optional
        Dispatch of calls by name, instead of the planner's.

    Returns
    -------
    Program

    Raises
    ------
    ShapeError, OptionError
        A value out of range, micro-batches that are no whole leaves, or rows that are no whole blocks.
    """
    made = decoder(model)
    of_type("choices", choices, (Choices, type(None)), "a Choices", "None, for the planner's")
    if choices is not None:
        choices = replace(choices, threads=extent("threads of choices", choices.threads, 0))
        one_of("mode of choices", choices.mode, MODES, MODES[0])
    count = get_num_threads() if threads is None else threads
    batch, tokens, micro_batches, leaf, count = _sizes(
        batch=batch, tokens=tokens, micro_batches=micro_batches, leaf=leaf, threads=count
    )
    for name, word, legal in (("phase", phase, PHASES), ("mode", mode, MODES), ("optimizer", optimizer, ("adamw",))):
        if word not in legal:
            raise OptionError(name, limit=" or ".join(legal), value=word, nearest=legal[0])
    if phase != "train":
        for name, value, only in (("micro_batches", micro_batches, 1), ("recompute", recompute, False)):
            if value != only:
                raise OptionError(f"{name} of phase {phase}", limit=only, value=value, nearest=only)
    recompute = flag("recompute", recompute)
    _check_model(made, phase, tokens)
    each = _micro_batch(batch, micro_batches, tokens, leaf)
    patterns = _patterns(made, quantize)
    formats = weight_formats(made, patterns, phase)
    about = {
        "model": made.to_dict(), "phase": phase, "batch": batch, "tokens": tokens, "micro_batches": micro_batches,
        "recompute": recompute, "attention_leaf": LEAF, "quantize": patterns,
    }  # fmt: skip
    graph = build(made, each, tokens, phase, count=batch * tokens, recompute=recompute, formats=formats)
    if choices is None:
        choices = Choices(count, mode, _side_by_side(graph, leaf, count) if mode == "fast" else {})
    lowered = lower_graph(graph, leaf, choices.groups)
    plan = make_plan(lowered, choices, about)
    return Program(made, graph, lowered, plan, make_layout(lowered.values, plan["ops"]))


def _sizes(**sizes: Any) -> Iterable[int]:
    """Extents. Raises ShapeError: one is none, or a plan of them would be too long."""
    sizes = {name: extent(name, size) for name, size in sizes.items()}
    positions, threads = sizes["batch"] * sizes["tokens"], sizes["threads"]
    at_most("batch * tokens", positions, MOST_TOKENS)
    at_most("threads", threads, MOST_THREADS)
    return sizes.values()


def _check_model(model: DecoderConfig, phase: str, tokens: int) -> None:
    """Raise ShapeError or OptionError: the model has no positions for so many tokens, or dropout in training."""
    if model.positions and tokens > model.positions:
        limit = f"at most {model.positions}, the learned positions"
        raise ShapeError("tokens", limit=limit, value=tokens, nearest=model.positions)
    if phase == "train" and model.dropout:
        raise OptionError("dropout of a model that is trained", limit=0.0, value=model.dropout, nearest=0.0)


def _micro_batch(batch: int, micro_batches: int, tokens: int, leaf: int) -> int:
    """Sequences of a micro-batch. Raises ShapeError: they are not whole, or their rows are no whole leaves."""
    if batch % micro_batches:
        raise ShapeError("micro_batches", limit=f"a divisor of {batch}", value=micro_batches, nearest=1)
    each = batch // micro_batches
    rows = each * tokens
    if micro_batches > 1 and rows % leaf:
        limit = f"micro-batches of whole leaves: a divisor of {rows}"
        nearest = max(n for n in range(1, min(leaf, rows) + 1) if rows % n == 0)
        raise ShapeError("leaf", limit=limit, value=leaf, nearest=nearest)
    return each


def _patterns(model: DecoderConfig, quantize: str | Mapping[str, str | None] | TensorFile | None) -> dict[str, Any]:
    """Formats by patterns of weights' names."""
    if isinstance(quantize, TensorFile):
        quantize = file_formats(model, quantize)
    known = "a format of GGUF, formats by patterns of names, a file, or None"
    patterns = of_type("quantize", {} if quantize is None else quantize, (str, Mapping), known, "'q8_0'")
    for pattern in () if isinstance(patterns, str) else patterns:
        of_type("quantize", pattern, str, "patterns of weights' names", "'*'")
    return {"*": patterns} if isinstance(patterns, str) else dict(patterns)


def check_folder(folder: str | Path, phase: str) -> Path:
    """The folder, where `Program.save` can write a program of that phase; raises what that does, and leaves nothing."""
    place = Path(path("folder of a program", folder, "'plan'"))
    if set(_phases(place)) - {phase}:
        raise _several(place, f"{place}-{phase}")
    with _writing(place):
        check_room(place / "plan")
    return place


@contextmanager
def _writing(place: Path) -> Iterator[None]:
    """What the system says of a folder within becomes an OptionError."""
    try:
        yield
    except OSError as error:
        limit, value = "a folder to write into", f"{place} ({error})"
        raise OptionError("folder of a program", limit=limit, value=value, nearest="plan") from error


def _phases(place: Path) -> list[str]:
    """The phases that a folder has plans of."""
    return [phase for phase, name in PLAN_FILE.items() if (place / name).is_file()]


def _several(place: Path, nearest: str) -> OptionError:
    """The error for a folder of which nobody could say which plan is meant."""
    there = ", ".join(PLAN_FILE[phase] for phase in _phases(place))
    return OptionError(
        "folder of a program", limit="a plan of one phase", value=f"{place}, which has {there}", nearest=nearest
    )


def load(folder: str | Path) -> Program:
    """A program that `Program.save` wrote, or somebody else did, after all checks.

    Raises
    ------
    OptionError
        A field is not what the schemas, the graph or the other fields say; the message names it and the reason. Or
        the folder has no plan, or plans of several phases.
    """
    place = Path(path("folder of a program", folder, "'plan'"))
    phases = _phases(place)
    if not phases:
        raise OptionError(
            "folder of a program", limit=" or ".join(PLAN_FILE.values()), value=place, nearest="the --out of lower"
        )
    if len(phases) > 1:
        raise _several(place, "a folder for each")
    (phase,) = phases
    plan, layout = (read_object("file of a program", place / name[phase], "lower") for name in (PLAN_FILE, LAYOUT_FILE))
    return from_data(plan, layout)


def from_data(plan: dict[str, Any], layout: dict[str, Any]) -> Program:
    """A program from the plain data of its plan and its layout, checked as `load` does."""
    validate("plan", plan)
    validate("layout", layout)
    made = relowered(plan, choices_of(plan))  # the graph again, which the files do not have
    found = Program(made.model, made.graph, made.lowered, plan, layout)
    found.check()
    return found


def relowered(plan: Mapping[str, Any], choices: Choices) -> Program:
    """What `plan` is a plan of, lowered by other choices."""
    about, names = plan["isogemm"], ("batch", "tokens", "phase", "micro_batches", "recompute", "leaf", "quantize")
    return lower(about["model"], **{name: about[name] for name in names}, **plan["runtime"], choices=choices)


def _side_by_side(graph: Graph, leaf: int, threads: int) -> dict[str, int]:
    """Leaves of each weight's gradient that are computed at once: as many as threads, where there are so many."""
    rows = graph.values["ids"].shape[0]
    return {op.writes[0]: max(1, min(threads, rows // leaf)) for op in graph.operations if op.kind == "linear_dw"}
