"""Runs the audit of a model: every relation, in every mode."""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...base import arguments
from ...base.extras import require_extra
from ...errors import DTypeError, IsogemmError, LimitError, OptionError, ShapeError
from ...lab import Progress, environment
from ...operands.tensors import on_host
from ...quant.encode import weight_format
from ..data import checked_seed, portable
from ..providers import Absent
from ..report import Report
from ..results import ProviderResult
from ..words import plural
from .relations import RELATIONS, ModelRelation, ModelScope, not_promised
from .runs import Prompts, prompt_length

SCHEMA = "isogemm.model_audit.v1"
_TRAINING_LENGTH = 64  # tokens of a prompt whose gradients are compared; halved for a model of fewer positions
_TITLE = "Does the model keep its bits?"


@dataclass(frozen=True)
class _ModelSettings:
    """The validated options."""

    modes: tuple[str, ...]
    relations: tuple[ModelRelation, ...]
    scope: ModelScope
    seed: int
    contract: Any
    quantize: Any
    words: tuple[str, ...]


def model(
    model: Any,
    *,
    mode: str | Sequence[str] = ("plain", "convert"),
    require: Sequence[str] | None = None,
    relations: Sequence[str] | None = None,
    batches: Sequence[int] = (2, 7, 32),
    chunks: Sequence[int] = (1, 7, 16, 64),
    micro_batches: Sequence[int] = (1, 2, 4, 8),
    tokens: int = 67,
    prompts: Any = None,
    seed: int = 0,
    contract: Any = None,
    quantize: Any = None,
    progress: Progress | None = None,
    words: Sequence[str] = (),
) -> Report:
    """Check which relations keep the bits of a model's logits and gradients, and name where they first differ.

    Parameters
    ----------
    model : torch.nn.Module
        A transformers model, on the device where it is to run. Causal language models take part in all relations,
        others in those without a cache. It is left as it was; gradients it held are dropped.
    mode : str or sequence of str
        ``plain``, ``invariant`` and ``convert``: torch as it is, inside `isogemm.torch.invariant`, a copy after
        `isogemm.torch.convert` with the float32 buffers of `isogemm.torch.use_main_grad`.
    require : sequence of str, optional
        Modes that `Report.ok` asks for; by default those that are not ``plain``, or all. What a mode does not promise
        (`not_promised`) is reported and does not count.
    relations : sequence of str, optional
        Names; all by default, but ``compiled``, ``captured`` and ``load``: the first two take their time, ``captured``
        takes a GPU, and ``load`` continuous batching, which transformers does not have for every model.
    batches, chunks, micro_batches : sequence of int
        What the cases range over.
    tokens : int
        Length of a prompt; the next larger one is taken where the number is a size of the model.
    prompts : int array [sequences, at least 2 * tokens + 1, and 65], optional
        Token ids; random by default.
    seed : int
        Of random prompts.
    contract : Contract or str, optional
        Of isogemm's products.
    quantize : str or dict, optional
        In the mode ``convert``: formats of the weights of Linear modules, as in `isogemm.torch.convert`; rows that are
        no whole number of blocks stay floats.
    progress : callable, optional
        Called as ``progress(done, total, text)``.
    words : sequence of str
        Options of `isogemm audit` that load this model, for the commands in the report.

    Returns
    -------
    Report

    Raises
    ------
    OptionError, ShapeError, LimitError
        An unknown mode or relation, an empty list, too few prompts, or prompts that are too long for the model.

    Examples
    --------
    >>> report = model(transformers.AutoModelForCausalLM.from_pretrained(folder))
    >>> report.held("convert")
    True
    """
    modes, names, required = check_choices(mode, relations, require, quantize)
    import torch

    arguments.of_type("model", model, torch.nn.Module, "a torch.nn.Module", "a transformers model")
    if next(model.parameters(), None) is None:
        nearest = "a model with weights"
        raise OptionError(
            "model", limit="a transformers model", value=f"{type(model).__name__} without parameters", nearest=nearest
        )
    scope = ModelScope(
        prompt_length(_least("tokens", [tokens], 4)[0], getattr(model, "config", None)),
        _least("batches", batches, 2),
        _least("chunks", chunks, 1),
        _least("micro_batches", micro_batches, 1),
    )
    settings = _ModelSettings(
        modes, tuple(RELATIONS[name] for name in names), scope, checked_seed(seed), contract, quantize, tuple(words)
    )
    return _Audit(model, settings, required, prompts, progress or (lambda done, total, text: None)).report()


def check_choices(
    mode: str | Sequence[str], relations: Sequence[str] | None, require: Sequence[str] | None, quantize: Any
) -> tuple[tuple[str, ...], ...]:
    """Modes, relations, and the modes that are required, as in `model`, which raises what this does."""
    require_extra("hf", "the audit of a model", "torch", "transformers")
    from .subject import MODES

    modes = tuple(dict.fromkeys(arguments.strings("mode", mode, "'convert'")))
    usual = [name for name, relation in RELATIONS.items() if not relation.asked]
    names = tuple(dict.fromkeys(arguments.strings("relations", usual if relations is None else relations, "'prefill'")))
    for what, chosen, known in (("mode", modes, list(MODES)), ("relation", names, list(RELATIONS))):
        for name in chosen or [""]:
            if name not in known:
                raise arguments.unknown(what, name, known, known[0])
    if quantize is not None and "convert" not in modes:
        raise OptionError("quantize", limit="with the mode convert", value=", ".join(modes), nearest="mode='convert'")
    if isinstance(quantize, str):
        weight_format("quantize", quantize)
    asked = None if require is None else arguments.strings("require", require, f"{modes[0]!r}")
    required = asked if asked is not None else tuple(m for m in modes if m != "plain") or modes
    for name in required:
        if name not in modes:
            raise OptionError("require", limit="modes that are audited", value=repr(name), nearest=modes[0])
    return modes, names, required


class _Audit:
    """One audit under way."""

    def __init__(
        self, model: Any, settings: _ModelSettings, required: tuple[str, ...], prompts: Any, progress: Progress
    ) -> None:
        self.model, self.settings, self.progress = model, settings, progress
        p = next(model.parameters())
        self.title = f"{type(model).__name__} {p.dtype}".replace("torch.", "")
        self.attention = str(getattr(getattr(model, "config", None), "_attn_implementation", "") or "")
        self.prompts, self.training = _prompts(model, settings, prompts)
        self.cases = [(r, params) for r in settings.relations for params in r.cases(settings.scope)]
        meanings, sweep = {r.name: r.meaning for r in settings.relations}, (1, *sorted(settings.scope.batches))
        results = {name: ProviderResult.empty(name, meanings, sweep) for name in settings.modes}
        self.out = Report(
            results, required, self._options(str(p.device)), schema=SCHEMA, title=_TITLE, described=self._described()
        )
        self.done, self.total = 0, len(self.cases) * len(results)

    def report(self) -> Report:
        """Run everything."""
        for mode in self.settings.modes:
            self._mode(mode)
        self.out.environment = environment()
        return self.out

    def _options(self, device: str) -> dict[str, Any]:
        s = self.settings
        return {
            "model": self.title,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "device": device,
            "device_name": _device_name(device),
            "transformers": importlib.metadata.version("transformers"),
            "modes": list(s.modes),
            "relations": [r.name for r in s.relations],
            "tokens": s.scope.length,
            "batches": list(s.scope.batches),
            "chunks": list(s.scope.chunks),
            "micro_batches": list(s.scope.micro_batches),
            "seed": s.seed,
            "contract": str(s.contract or "default"),
            "quantize": None if s.quantize is None else str(s.quantize),
            "attention": self.attention,
            "words": [portable(word) for word in s.words],
        }

    def _described(self) -> str:
        s = self.settings
        size = sum(p.numel() for p in self.model.parameters()) / 1e6
        device = str(next(self.model.parameters()).device)
        device = _device_name(device) or device
        return (
            f"{self.title}, {size:,.1f}M parameters, on {device}: {plural(len(s.relations), 'relation')} in "
            f"{plural(len(self.cases), 'case')}, prompts of {s.scope.length} tokens, seed {s.seed}. Bits were compared."
        )

    def _mode(self, mode: str) -> None:
        from .drift import Evaluation, ModelCase, evaluate
        from .subject import Subject

        result = self.out.providers[mode]
        self.progress(self.done, self.total, f"{mode}: preparing")
        try:
            order = f"leaf{self.training.length}"
            subject = Subject(mode, self.model, self.settings.contract, order, self.settings.quantize)
        except Absent as why:
            result.reason = str(why)
            self.done += len(self.cases)
            return
        self.out.quantized = self.out.quantized or subject.quantized
        evaluation = Evaluation(subject, self.settings.scope, self.prompts, self.training)
        words = tuple(portable(word) for word in self.settings.words)
        for relation, params in self.cases:
            text = ", ".join(f"{key} {value}" for key, value in params.items())
            self.progress(self.done, self.total, f"{mode} {relation.name} ({text})")
            self.done += 1
            with warnings.catch_warnings(action="ignore"):
                case = ModelCase(mode, relation.name, params, self.title, words)
                outcome = evaluate(evaluation, relation, case)
            result.relations[relation.name].add(outcome, not_promised(mode, relation.name, params, self.attention))
        result.ran = True
        result.agreement.add(evaluation.kept)


def _prompts(model: Any, settings: _ModelSettings, given: Any) -> tuple[Prompts, Prompts]:
    config, scope = getattr(model, "config", None), settings.scope
    positions, training = getattr(config, "max_position_embeddings", None), _TRAINING_LENGTH
    if positions is not None:
        most = (positions - 1) // 2
        if scope.length > most:
            raise LimitError("tokens", limit=f"{most} for this model", value=scope.length, nearest=most)
        while training >= positions:
            training //= 2
    longest = max(2 * scope.length, training) + 1
    pad = getattr(config, "pad_token_id", None) or 0
    if given is None:
        vocabulary = int(getattr(config, "vocab_size", 0) or 2)
        drawn = Prompts.draw(scope.sequences, max(scope.length, training), vocabulary, settings.seed, pad)
        given = drawn.ids
    ids = _ids(given, int(getattr(config, "vocab_size", 0) or 0))
    if ids.ndim != 2 or len(ids) < scope.sequences or ids.shape[1] < longest:
        need = [scope.sequences, longest]
        raise ShapeError("prompts", limit=f"at least {need}", value=list(ids.shape), nearest=need)
    return Prompts(ids, scope.length, pad), Prompts(ids, training, pad)


def _ids(given: Any, vocabulary: int) -> Any:
    """Token ids, which are below the size of a vocabulary where that is known."""
    nearest = "input_ids of one length, a row for each sequence"
    try:
        found = on_host(given)
    except IsogemmError:
        raise
    except ValueError as error:  # NumPy's
        raise ShapeError("prompts", limit="rows of one length", value="rows of several", nearest=nearest) from error
    if found.dtype.kind not in "iu":
        raise DTypeError("prompts", limit="token ids, integers", value=found.dtype.name, nearest=nearest)
    for bad in found[(found < 0) | (found >= vocabulary)][:1] if vocabulary else ():
        limit = f"0 to {vocabulary - 1}, the model's vocabulary"
        raise OptionError("ids of prompts", limit=limit, value=int(bad), nearest=min(max(int(bad), 0), vocabulary - 1))
    return found.astype(np.int64)


def _device_name(device: str) -> str:
    """The name of a GPU; empty for a CPU, which the report's environment names."""
    import torch

    return str(torch.cuda.get_device_name(device)) if device.startswith("cuda") else ""


def _least(what: str, values: Sequence[int], least: int) -> tuple[int, ...]:
    listed = arguments.items(values)
    found = tuple(dict.fromkeys(listed or ()))
    if not found or not all(isinstance(v, int) and not isinstance(v, bool) and v >= least for v in found):
        value = values if listed is None else listed
        raise OptionError(what, limit=f"whole numbers of at least {least}", value=value, nearest=[least])
    return found
