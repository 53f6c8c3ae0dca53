"""Every product of a model in one phase, as form and shape: what `isogemm ops` prints and the roofline shows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..base.arguments import nearest
from ..base.dtypes import ITEMSIZE
from ..errors import OptionError, ShapeError
from .ceilings import Work
from .models import LinearShape, Model

__all__ = ["PHASES", "Op", "ops", "sharded"]

PHASES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Op:
    """One kind of product of a model: C[m, n] = A[m, k] @ op(B), `batch` of them a call, `count` calls a pass."""

    name: str  # what it is in its model
    form: str  # how it is called: ``linear``, ``strided batch``, ``pointer array`` or ``grouped``
    # m, n, k: of one product; of a grouped one, m is the rows of all groups together
    m: int
    n: int
    k: int
    layout: str = "NT"  # ``NT`` or ``NN``: how B is stored
    batch: int = 1  # products of one call
    distinct: int = 1  # different B among them: query heads that share a key head read the same one
    count: int = 1  # calls in one pass through the model

    def work(self, dtype: str) -> Work:
        """Operations, and bytes that one call has to move: 2 m n k and every operand once, for the batch."""
        items = 1 if self.form == "grouped" else self.batch
        own = items * (self.m * self.k + self.m * self.n) + self.distinct * self.n * self.k
        return Work(2 * items * self.m * self.n * self.k, ITEMSIZE[dtype] * own)

    @property
    def each(self) -> int:
        """Rows of one product: those of an even share where they are grouped."""
        return -(-self.m // self.batch) if self.form == "grouped" else self.m


def ops(model: Model, phase: str, tokens: int, *, tp: int = 1, batch: int = 1) -> list[Op]:
    """The products of one pass through a model, on one of `tp` devices.

    Parameters
    ----------
    model : Model
    phase : {"prefill", "decode"}
        Prefill computes `tokens` tokens of each sequence, decode one token after a context of `tokens`.
    tokens : int
    tp : int
        Devices that share the heads and the width of the feed-forward block.
    batch : int
        Sequences.

    Returns
    -------
    list of Op
        In the order in which a layer runs them; the LM head computes one token of each sequence.

    Raises
    ------
    OptionError
        No such phase; `tp` does not divide the model, and the error names the next smaller that does.
    ShapeError
        `tokens` or `batch` is less than 1.
    """
    if phase not in PHASES:
        raise OptionError(
            "phase", limit=" or ".join(PHASES), value=repr(phase), nearest=nearest(str(phase), PHASES, PHASES[0])
        )
    for name, value in (("tokens", tokens), ("batch", batch)):
        if value < 1:
            raise ShapeError(name, limit="at least 1", value=value, nearest=1)
    part = sharded(model, tp)
    rows = batch * (tokens if phase == "prefill" else 1)
    qkv, output, gate_up, down, head = part.linears()
    attention = _attention(part, phase, tokens, batch)
    layer = [_linear(qkv, rows), *attention, _linear(output, rows), *_feed_forward(part, gate_up, down, rows)]
    return [*(replace(op, count=part.layers) for op in layer), _linear(head, batch)]


def sharded(model: Model, tp: int) -> Model:
    """One device's part of a model: heads, feed-forward width and vocabulary divided, key heads at least one.

    Raises
    ------
    OptionError
        `tp` does not divide them.
    """
    width = model.expert_intermediate or model.intermediate
    fits = math.gcd(model.heads, width, model.vocabulary)
    shares_keys = tp >= 1 and (model.kv_heads % tp == 0 or tp % model.kv_heads == 0)
    if tp < 1 or fits % tp or not shares_keys:
        legal = [d for d in range(1, fits + 1) if fits % d == 0 and d <= max(1, tp) and model.kv_heads % d == 0]
        raise OptionError("tp", limit=f"a divisor of {model.name}'s heads and widths", value=tp, nearest=legal[-1])
    return replace(
        model,
        heads=model.heads // tp,
        kv_heads=max(1, model.kv_heads // tp),
        intermediate=model.intermediate // tp,
        expert_intermediate=model.expert_intermediate // tp,
        vocabulary=model.vocabulary // tp,
    )


def _linear(shape: LinearShape, rows: int) -> Op:
    return Op(shape.name, "linear", rows, shape.n, shape.k)


def _attention(model: Model, phase: str, tokens: int, batch: int) -> list[Op]:
    """Scores Q K^T and values P V.

    Query heads that share a key head have no constant stride between their keys. Decode packs them, as rows of one
    product for each key head; prefill points at the keys, head by head.
    """
    heads, keys, width = model.heads, model.kv_heads, model.head_dim
    if phase == "decode":
        form, rows, items = "strided batch", heads // keys, batch * keys
    else:
        form, rows, items = ("strided batch" if heads == keys else "pointer array"), tokens, batch * heads
    shared = batch * keys
    return [
        Op("scores", form, rows, tokens, width, "NT", items, shared),
        Op("values", form, rows, width, tokens, "NN", items, shared),
    ]


def _feed_forward(model: Model, gate_up: LinearShape, down: LinearShape, rows: int) -> list[Op]:
    """Two products; of a mixture of experts, the router's and one for each expert that a token visits."""
    if not model.experts:
        return [_linear(gate_up, rows), _linear(down, rows)]
    visits = rows * model.experts_used
    visited = min(model.experts, visits)
    router = Op("router", "linear", rows, model.experts, model.hidden)
    return [router, *(Op(x.name, "grouped", visits, x.n, x.k, "NT", visited, visited) for x in (gate_up, down))]
