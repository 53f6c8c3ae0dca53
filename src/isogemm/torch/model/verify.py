"""A short audit of one model: seconds, and the name of the first module whose bits changed.

`isogemm.audit.model` is the long one, with gradients, static caches, drift down to the operator, and a report.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...base import arguments
from ...errors import DTypeError, OptionError, ShapeError
from ...operands.tensors import words
from ..operator import Tensor

_TOKENS, _BATCH, _PAD = 21, 5, 3  # a prompt has a length that is no size of a model


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` saw.

    Attributes
    ----------
    held : tuple of str
        Relations in which no bit differed.
    broken : dict of str to str
        The others, and where: the first module whose output differs, or the error that was raised.
    """

    held: tuple[str, ...]
    broken: dict[str, str]

    def __bool__(self) -> bool:
        return not self.broken

    def __str__(self) -> str:
        lines = [f"held: {', '.join(self.held) or 'nothing'}"]
        return "\n".join(lines + [f"changed in {name}: {where}" for name, where in self.broken.items()])


def verify(model: Any, inputs: Tensor | None = None) -> Verification:
    """Compare what a model makes of one prompt alone, in a batch, padded, in chunks and token by token, bit for bit.

    A language model of transformers is given token ids at random, and its logits (without a head: its last hidden
    state) are compared for each token. Any other module is given `inputs`, and its rows are compared alone and in the
    batch. Evaluation mode, no gradients; the model is left as it was.

    Parameters
    ----------
    model : torch.nn.Module
    inputs : Tensor, shape (at least 2, ...), optional
        Rows for a module that takes one tensor; for a language model token ids.

    Returns
    -------
    Verification
        True where every relation held. A relation that holds was not seen to fail, on these inputs and this machine.

    Raises
    ------
    OptionError
        No `inputs` for a module that is no language model of transformers, fewer than 2 rows, ids that the vocabulary
        does not have, or outputs that do not have the rows of the inputs.
    DTypeError, ShapeError
        `inputs` that are no tensor, or, for a language model, no ids [rows, tokens] or too few tokens.
    """
    arguments.of_type("model", model, torch.nn.Module, "a torch.nn.Module", "the model itself")
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else None
    vocabulary = getattr(text, "vocab_size", None)
    if inputs is None and vocabulary is None:
        raise OptionError("verify", limit="inputs for a module without a vocabulary", value="None", nearest="a batch")
    if inputs is None:
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randint(vocabulary, (_BATCH, _TOKENS), generator=generator, device="cpu").to(device)
    _check_inputs(inputs, vocabulary)
    relations = _of_rows(inputs) if vocabulary is None else _of_tokens(model, inputs)
    held, broken = [], {}
    with _evaluating(model):
        want = _run(model, relations.pop("alone"))
        if "" not in want:
            limit = "a model whose output has a row, of floats, for each of the inputs'"
            raise OptionError("verify", limit=limit, value=type(model).__name__, nearest="a module of it that has")
        for name, calls in relations.items():
            where = _difference(model, calls, want)
            if where:
                broken[name] = where
            else:
                held.append(name)
    return Verification(tuple(held), broken)


def _check_inputs(inputs: Any, vocabulary: int | None) -> None:
    """Raise unless there are rows, and, where there is a vocabulary, prompts of its ids."""
    arguments.of_type("inputs", inputs, torch.Tensor, "a tensor of rows", "torch.as_tensor(inputs)")
    rows = len(inputs) if inputs.dim() else 0
    if rows < 2:
        raise OptionError("rows of inputs", limit="at least 2", value=rows, nearest=2)
    if vocabulary is None:
        return
    if inputs.dtype not in (torch.int32, torch.int64):
        raise DTypeError("inputs", limit="token ids, int64 or int32", value=inputs.dtype, nearest="torch.int64")
    if inputs.dim() != 2 or not inputs.shape[1]:
        limit, nearest = "[rows, tokens] with at least 1 token", [rows, _TOKENS]
        raise ShapeError("inputs", limit=limit, value=list(inputs.shape), nearest=nearest)
    least, most = int(inputs.min()), int(inputs.max())
    if least < 0 or most >= vocabulary:
        bad = least if least < 0 else most
        raise OptionError(
            "ids of inputs", limit=f"0 to {vocabulary - 1}", value=bad, nearest=min(max(bad, 0), vocabulary - 1)
        )


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a model, and where in its output the prompt is: a row, and its first token there."""

    rows: Tensor
    row: int = 0
    first: int | None = None  # None where outputs have no tokens
    options: Callable[[], dict[str, Any]] = dict


_Calls = Callable[[], list[_Call]]  # made anew for each run: a cache is filled once


def _of_rows(inputs: Tensor) -> dict[str, _Calls]:
    alone = _Call(inputs[1:2])
    return {
        "alone": lambda: [alone],
        "rerun": lambda: [alone],
        "batch": lambda: [_Call(inputs, 1)],
        "position": lambda: [_Call(inputs.roll(len(inputs) - 2, 0), len(inputs) - 1)],
    }


def _of_tokens(model: Any, ids: Tensor) -> dict[str, _Calls]:
    caches = getattr(model, "can_generate", bool)()
    plain: Callable[[], dict[str, Any]] = lambda: {"use_cache": False} if caches else {}  # noqa: E731
    positions = caches or "position_ids" in inspect.signature(model.forward).parameters
    one, last = ids[1:2], len(ids) - 1
    relations: dict[str, _Calls] = {
        "alone": lambda: [_Call(one, 0, 0, plain)],
        "rerun": lambda: [_Call(one, 0, 0, plain)],
        "batch": lambda: [_Call(ids, 1, 0, plain)],
        "position": lambda: [_Call(ids.roll(last - 1, 0), last, 0, plain)],
        "left-padding": lambda: [_padded(ids, plain, positions, left=True)],
        "right-padding": lambda: [_padded(ids, plain, positions, left=False)],
    }
    if caches:
        tokens = ids.shape[1]
        few, singles = tokens // 3, min(4, tokens - 1)
        relations["chunks"] = lambda: _pieces(model, one, [few, tokens - few] if few else [tokens])
        relations["tokens"] = lambda: _pieces(model, one, [tokens - singles, *[1] * singles])
    return relations


def _padded(ids: Tensor, plain: Callable[[], dict[str, Any]], positions: bool, *, left: bool) -> _Call:
    rows = torch.nn.functional.pad(ids, (_PAD, 0) if left else (0, _PAD))
    mask = torch.ones_like(rows)
    shown = slice(0, _PAD) if left else slice(ids.shape[1], None)
    rows[0], mask[1, shown] = ids[0, 0], 0  # the row beside it is longer
    options = {"attention_mask": mask, **plain()}
    if positions and left:
        options["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return _Call(rows, 1, _PAD if left else 0, lambda: options)


def _pieces(model: Any, ids: Tensor, sizes: list[int]) -> list[_Call]:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    return [_Call(part, 0, 0, lambda: {"past_key_values": cache, "use_cache": True}) for part in ids.split(sizes, 1)]


def _run(model: Any, calls: _Calls) -> dict[str, Tensor]:
    """The prompt's part of every module's output, in the order in which modules returned; "" is the model.

    Without those whose outputs have as many columns as there are keys.
    """
    seen: dict[str, list[Tensor]] = {}
    made = calls()
    place: list[_Call] = []

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            if (part := _part(output, place[0])) is not None:
                seen.setdefault(name, []).append(part)

        return hook

    with ExitStack() as stack:
        for name, child in model.named_modules():
            stack.callback(child.register_forward_hook(keep(name)).remove)
        for call in made:
            place[:] = [call]
            model(call.rows, **call.options())
    tokens = made[0].first is not None
    whole = sum(call.rows.shape[1] - call.first for call in made if call.first is not None)
    alike = {name: parts for name, parts in seen.items() if len({x.shape[1:] for x in parts}) == 1}
    return {name: torch.cat(parts)[: whole or None] if tokens else parts[0] for name, parts in alike.items()}


def _part(output: Any, call: _Call) -> Tensor | None:
    """A prompt's rows in an output: [tokens, ...], or all that one row has; None where it is not found."""
    for name in ("logits", "last_hidden_state"):
        output = getattr(output, name, output)
    while isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, torch.Tensor) or not output.is_floating_point():
        return None
    if output.dim() < 2 or len(output) != len(call.rows):
        return None
    if call.first is None:
        return output[call.row].clone()
    if output.dim() != 3 or output.shape[1] != call.rows.shape[1]:
        return None
    return output[call.row, call.first :].clone()


def _difference(model: Any, calls: _Calls, want: dict[str, Tensor]) -> str:
    """Where a run's bits are others; empty where they are not."""
    try:
        got = _run(model, calls)
    except Exception as error:  # whatever a model of another library raises: it is what the caller wants to know
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if "" in got and _same(got[""], want[""]):
        return ""
    for name, x in got.items():
        if name in want and x.shape[1:] == want[name].shape[1:] and not _same(x, want[name]):
            return f"{name or 'the model'} ({type(model.get_submodule(name)).__name__})"
    return "the model"


def _same(x: Tensor, y: Tensor) -> bool:
    """Bits, for as many tokens as both have: padding behind a prompt is none of it."""
    n = min(len(x), len(y)) if x.dim() else 0
    x, y = x[:n].contiguous(), y[:n].contiguous()
    return x.dtype == y.dtype and x.shape == y.shape and bool(torch.equal(words(x), words(y)))


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    modes = [(child, child.training) for child in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for child, mode in modes:
            child.training = mode
