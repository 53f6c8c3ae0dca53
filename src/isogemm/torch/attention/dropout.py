"""Attention with dropout whose choices belong to tokens: not to the batch, its order, padding, or a generator's state.

Whether the probability of a key for a query stays is a bit of threefry2x32 (20 rounds), a generator without a state:

- key: the two halves of the batch entry's seed, of 64 bits
- counter: the query's position; and half the key's, rounded down, plus the query's head times 2**24
- result: two words, for an even and an odd position of the key; it is dropped where its word is below rate * 2**32

Positions are counted from `start`, and the last query stands at the last key. What stays is multiplied by
``1 / (1 - rate)``, in float32: ``y = factor * (sum of what stays, over l)``, l being the sum of all. In the gradients p
and dp are multiplied by it, and are 0 where the probability was dropped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from ...errors import DTypeError, OptionError
from ..operator import Tensor, define_call, define_gradient, refuse_vmap
from ..routing.elementwise import subnormals_kept
from . import capped
from .gradients import Forward, gradients
from .ops import chosen, empty_pair, fake_gradients, needed, remember, remembered

_MASK, _TURNS = 0xFFFFFFFF, ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two words of 32 bits, in int64 as all that is given."""
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    a, b = (counter[0] + keys[0]) & _MASK, (counter[1] + keys[1]) & _MASK
    for i in range(5):
        for turn in _TURNS[i % 2]:
            a = (a + b) & _MASK
            b = ((b << turn) | (b >> (32 - turn))) & _MASK ^ a
        a, b = (a + keys[(i + 1) % 3]) & _MASK, (b + keys[(i + 2) % 3] + i + 1) & _MASK
    return a, b


def _kept(call: Forward, seeds: Tensor, rate: float) -> Any:
    """What `Forward.kept` is: of rows of some entries and heads, [n, tq * groups, tk]."""
    (hq, tq), (hkv, tk) = call.q.shape[1:3], call.k.shape[1:3]
    groups, device = hq // hkv, call.q.device
    factor, least = float(np.float32(1 / (1 - rate))), round(rate * 2**32)
    start = torch.zeros_like(seeds) if call.start is None else call.start.to(torch.int64)

    def kept(entries: slice, heads: slice) -> tuple[Tensor, float]:
        own = range(hkv)[heads]
        first, seed = start[entries].view(-1, 1, 1, 1), seeds[entries].view(-1, 1, 1, 1)
        row = torch.arange(tq * groups, device=device).view(1, 1, -1, 1)
        head = torch.arange(own.start, own.stop, device=device).view(1, -1, 1, 1) * groups + row % groups
        place = torch.arange(tk, device=device) - first  # of each key, as it is counted
        pair = torch.arange((tk + 3) // 2, device=device) + torch.div(-first, 2, rounding_mode="floor")
        query = (row // groups + (tk - tq) - first) & _MASK
        words = threefry((seed & _MASK, (seed >> 32) & _MASK), (query, (pair + (head << 24)) & _MASK))
        both = torch.stack(torch.broadcast_tensors(*words), -1).flatten(-2)
        at = (place - 2 * pair[..., :1]).expand(*both.shape[:-1], tk)
        return (both.gather(-1, at) >= least).flatten(0, 1), factor

    return kept


def _call(seeds: Tensor, rate: float, *given: Any) -> Forward:
    """A call of what `Forward` holds, with dropout."""
    call = Forward(*given)
    return replace(call, kept=_kept(call, seeds, rate))


def _body(q: Tensor, k: Tensor, v: Tensor, seeds: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    *told, contract, rate = options
    with torch.no_grad(), subnormals_kept(q):
        y, m, total = capped.forward(_call(seeds, rate, q, k, v, *told, str(chosen(contract, q, k))))
        return y, torch.stack((m, total))


def _fake(q: Tensor, k: Tensor, v: Tensor, seeds: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return empty_pair(q, k, v, options[-2], torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    remember(ctx, inputs[:4], inputs[4:12], output)
    ctx.rate = inputs[12]


def _body_back(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, seeds: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *told, rate, y, stats, needs = rest
    call = _call(seeds, rate, q, k, v, *told, y, *stats.unbind(0))
    with torch.no_grad(), subnormals_kept(q):
        return gradients(dy, call, needs)


def _back(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 13
    operands, options, results = remembered(ctx)
    found = _gradient(dy, *operands, *options, ctx.rate, *results, list(ctx.needs_input_grad[:3]))
    return *needed(ctx, found), *[None] * 10


class sequence_seeds:
    """A scope in which the attention of converted transformers models has dropout: a number for each sequence.

    ``with isogemm.torch.sequence_seeds(seeds): model(ids).loss.backward()``, forward and backward: layers whose
    activations are recomputed ask again. Layers make seeds of their own from these. For all threads.

    Parameters
    ----------
    seeds : tensor [batch] of int64
        On the model's device. What a sequence drops depends on its own number, wherever it is in a batch: count
        sequences over the whole training, or mix their index with the step's.
    """

    _open: ClassVar[list[Tensor]] = []

    def __init__(self, seeds: Tensor) -> None:
        if not isinstance(seeds, torch.Tensor) or seeds.dtype is not torch.int64 or seeds.dim() != 1:
            value = f"{seeds.dtype} {list(seeds.shape)}" if isinstance(seeds, torch.Tensor) else type(seeds).__name__
            raise DTypeError("seeds", limit="an int64 tensor [batch]", value=value, nearest="torch.arange(batch)")
        self.seeds = seeds

    def __enter__(self) -> Tensor:
        self._open.append(self.seeds)
        return self.seeds

    def __exit__(self, *_: Any) -> None:
        places = [i for i, open_one in enumerate(self._open) if open_one is self.seeds]
        if not places:
            raise OptionError("sequence_seeds", limit="as many ends as beginnings", value="one more", nearest="none")
        del self._open[places[-1]]  # threads and generators may end in another order than they begin in


def seeds_of(layer: int, rate: float) -> Tensor:
    """Seeds of a layer. Raises OptionError: outside of `sequence_seeds`."""
    if not sequence_seeds._open:
        raise OptionError(
            "attention's dropout", limit="0 outside of isogemm.torch.sequence_seeds(...)", value=rate,
            nearest="sequence_seeds(torch.arange(batch)), model.eval(), or dropout 0",
        )  # fmt: skip
    return sequence_seeds._open[-1] * 0x5851F42D4C957F2D + layer


_VMAP = refuse_vmap("attention with dropout", "a longer batch")
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor seeds, Tensor? mask, SymInt? causal_offset, Tensor? start, Tensor? stop, "
    "bool ranged, float? scale, float? softcap, str contract, float rate"
)
_attention = define_call(
    "attention_with_dropout", f"({_ARGUMENTS}) -> (Tensor, Tensor)", slice(4), _body, _fake,
    setup=_setup, backward=_back, vmap=_VMAP,
)  # fmt: skip
_gradient = define_gradient(
    "attention_with_dropout_backward",
    f"(Tensor dy, {_ARGUMENTS}, Tensor y, Tensor stats, bool[] needs) -> (Tensor, Tensor, Tensor)",
    slice(5), _body_back, fake_gradients, of="attention", vmap=_VMAP,
)  # fmt: skip


def attend_with_dropout(
    q: Tensor, k: Tensor, v: Tensor, seeds: Tensor, *options: Any, rate: float, out_dtype: Any
) -> Tensor:
    """y with dropout; `options` are those of `ops.forward` from the mask to the contract."""
    y: Tensor = _attention(q, k, v, seeds, *options, rate)[0]
    return y.to(out_dtype or q.dtype)
