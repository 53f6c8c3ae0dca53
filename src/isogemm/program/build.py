"""The graph of a decoder: the forward pass, by caches where tokens are decoded; for training gradients and AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .graph import Graph, GraphNode
from .model import DecoderConfig
from .operations import GRADIENTS, Gradients, Maker


@dataclass(frozen=True, slots=True)
class _Extent:
    """How much a pass computes: sequences, the tokens of each that are computed, and the keys that they see at most."""

    sequences: int
    tokens: int
    keys: int
    phase: str

    @property
    def rows(self) -> int:
        """Rows of activations."""
        return self.sequences * self.tokens


def build(
    model: DecoderConfig, sequences: int, tokens: int, phase: str, *, count: int, recompute: bool = False,
    formats: Mapping[str, str] | None = None,
) -> Graph:  # fmt: skip
    """The graph of one micro-batch.

    Parameters
    ----------
    model : DecoderConfig
    sequences, tokens : int
        Of the micro-batch; with ``decode`` one token of each sequence is computed, and its caches hold `tokens` keys.
    phase : {"train", "prefill", "decode"}
    count : int
        Tokens of the whole batch, of which the loss is the mean.
    recompute : bool
        The backward pass computes each layer's activations again, from what went into the layer.
    formats : mapping of str to str, optional
        Of quantized weights, by name.
    """
    graph = Graph()
    for name, _, shape in model.weights():
        dtype = (formats or {}).get(name, "float32")
        graph.value(name, shape, "weights", dtype=dtype, given=True, kept=True)
    extent = _Extent(sequences, 1 if phase == "decode" else tokens, tokens, phase)
    graph.value("ids", (extent.rows,), "activations", dtype="int64", given=True)
    if model.positions or phase == "decode":
        graph.value("positions", (extent.rows,), "activations", dtype="int64", given=True)
    for name in () if model.positions else ("cos", "sin", "minus_sin")[: 3 if phase == "train" else 2]:
        graph.value(name, (tokens, model.head_dim // 2), "activations", given=True)
    logits = _forward(graph, model, extent)
    if phase == "train":
        graph.value("targets", (extent.rows,), "activations", dtype="int64", given=True)
        graph.value("loss", (1,), "activations", given=True, kept=True)
        graph.add("loss", "loss", "forward", (logits, "targets", "loss"), ("loss",), count=count)
        _backward(graph)
        if recompute:
            _recompute(graph)
        _optimizer(graph)
    graph.check()
    return graph


def _forward(graph: Graph, model: DecoderConfig, extent: _Extent) -> str:
    rows, hidden, inner = extent.rows, model.hidden_size, model.intermediate_size
    make = Maker(graph, rows)
    x = make.result("x", (rows, hidden), "embedding", "ids", "embed")
    if model.positions:
        place = make.result("x.positions", (rows, hidden), "embedding", "positions", "embed.positions")
        x = make.result("x0", (rows, hidden), "add", x, place)
    angles = _angles(make, model, extent)
    for i in range(model.num_hidden_layers):
        make.layer = at = f"L{i}."
        make.phase = f"forward.L{i}"
        y = _norm(make, model, "normed", x, f"{at}norm1")
        y = make.linear("o", _attention(make, _heads(make, model, extent, y, angles), model, extent), f"{at}wo")
        x = make.result("x1", (rows, hidden), "add", x, y)
        y = _norm(make, model, "normed2", x, f"{at}norm2")
        names = (("g", "gate"), ("u", "up"))[model.mlp == "gelu" :]
        sides = [make.linear(name, y, f"{at}{w}") for name, w in names]
        y = make.result("gated", (rows, inner), model.mlp, *sides)
        y = make.linear("d", y, f"{at}down")
        x = make.result("x2", (rows, hidden), "add", x, y)
    make.layer, make.phase = "", "forward.head"
    y = _norm(make, model, "final", x, "norm")
    logits = make.linear("logits", y, "embed" if model.tie_word_embeddings else "head")
    if extent.phase != "train":
        graph.values[logits] = replace(graph.values[logits], kept=True)
    return logits


def _norm(make: Maker, model: DecoderConfig, name: str, x: str, w: str) -> str:
    bias = (f"{w}.bias",) if model.norm == "layer_norm" else ()
    return make.result(name, (make.rows, model.hidden_size), model.norm, x, w, *bias, eps=model.rms_norm_eps)


def _angles(make: Maker, model: DecoderConfig, extent: _Extent) -> tuple[str, ...]:
    """Cosines and sines of every token, or of the one that is decoded; then also which keys it sees."""
    rows, half = extent.rows, model.head_dim // 2
    if extent.phase == "decode":
        make.result("visible", (rows, extent.keys), "visible", "positions", dtype="uint8")
    if model.positions:
        return ()
    if extent.phase != "decode":
        return ("cos", "sin")
    return tuple(make.result(f"{name}.now", (rows, half), "embedding", "positions", name) for name in ("cos", "sin"))


def _heads(make: Maker, model: DecoderConfig, extent: _Extent, y: str, angles: tuple[str, ...]) -> tuple[str, str, str]:
    """Queries, keys and values, head by head; keys and values of a prefill are kept, and those of a decoded token put
    into caches, which are what attention reads."""
    at, shared, width = make.layer, model.num_key_value_heads, model.head_dim
    found = {}
    if model.fused_qkv:
        found = _split(make, model, extent, make.linear("qkv", y, f"{at}wqkv"))
    for name, heads in (("q", shared * model.groups), ("k", shared), ("v", shared)):
        order: dict[str, Any] = {"sequences": extent.sequences, "tokens": extent.tokens, "heads": heads}
        shape = (extent.sequences, heads, extent.tokens, width)
        kept = extent.phase == "prefill" and name != "q"
        x = found.get(name) or make.linear(name, y, f"{at}w{name}")
        if model.head_norms and name != "v":
            norm = (extent.rows * heads, width)
            x = make.result(f"{name}.normed", norm, "head_norm", x, f"{at}{name}norm", eps=model.rms_norm_eps)
        if model.fused_qkv:
            pass
        elif (name == "v" or model.positions) and extent.phase != "decode":
            x = make.result(f"{name}.heads", shape, "heads", x, kept=kept, **order)
        elif name != "v" and not model.positions:
            x = make.result(f"{name}.turned", shape, "rope", x, *angles, kept=kept, **order)
        if name != "q" and extent.phase == "decode":
            whole = (extent.sequences, shared, extent.keys, width)
            cache = make.graph.value(f"{at}{name}.cache", whole, "activations", given=True, kept=True)
            make.graph.add(f"{at}{name}.put", "put", make.phase, (x, "positions", cache), (cache,))
            x = cache
        found[name] = x
    return found["q"], found["k"], found["v"]


def _split(make: Maker, model: DecoderConfig, extent: _Extent, joined: str) -> dict[str, str]:
    """Queries, keys and values of one product, head by head."""
    shared, width = model.num_key_value_heads, model.head_dim
    each = {"q": shared * model.groups, "k": shared, "v": shared}
    found = {name: f"{make.layer}{name}.heads" for name in each}
    for name, heads in each.items():
        shape = (extent.sequences, heads, extent.tokens, width)
        make.graph.value(found[name], shape, "activations", kept=extent.phase == "prefill" and name != "q")
    options = {"sequences": extent.sequences, "tokens": extent.tokens, "heads": tuple(each.values()), "width": width}
    make.graph.add(f"{make.layer}split", "split", make.phase, (joined,), tuple(found.values()), **options)
    return found


def _attention(make: Maker, found: tuple[str, str, str], model: DecoderConfig, extent: _Extent) -> str:
    """Causal attention; besides its result the largest exponent and the sum of powers of each query are kept."""
    sequences, tokens, shared, groups = extent.sequences, extent.tokens, model.num_key_value_heads, model.groups
    names = tuple(f"{make.layer}attention{end}" for end in ("", ".m", ".l"))
    make.graph.value(names[0], (extent.rows, shared * groups * model.head_dim), "activations")
    for name in names[1:]:
        make.graph.value(name, (sequences, shared * groups, tokens), "activations")
    reads = (*found, "visible") if extent.phase == "decode" else found
    sizes = (sequences, shared, groups, tokens, model.head_dim)
    make.graph.add(names[0], "attention", make.phase, reads, names, sizes=sizes, keys=extent.keys)
    return names[0]


def _backward(graph: Graph) -> None:
    to = Gradients(graph)
    for op in reversed(list(graph.operations)):
        to.phase = op.phase.replace("forward", "backward")
        GRADIENTS[op.kind](to, op, "loss" if op.kind == "loss" else to.of(op.writes[0]))


def _recompute(graph: Graph) -> None:
    """Each layer's forward operations again, before its gradients, which then read the copies.

    What a layer reads from outside stays, and so do results of its last operation, which are the next layer's.
    """
    done: list[GraphNode] = []
    copies: dict[str, str] = {}
    forward: dict[str, list[GraphNode]] = {}
    for op in graph.operations:
        layer = op.phase.partition(".")[2]
        if op.phase.startswith("forward.L"):
            forward.setdefault(layer, []).append(op)
        elif op.phase.startswith("backward.L") and layer in forward:
            wanted = forward.pop(layer)[:-1]
            for again in wanted:
                for name in again.writes:
                    value = graph.values[name]
                    copies[name] = graph.value(f"{name}.again", value.shape, value.section)
                done.append(_renamed(again, copies, f"{again.name}.again", op.phase))
        done.append(_renamed(op, copies, op.name, op.phase) if op.phase.startswith("backward") else op)
    graph.operations[:] = done


def _renamed(op: GraphNode, names: dict[str, str], name: str, phase: str) -> GraphNode:
    reads, writes = (tuple(names.get(x, x) for x in some) for some in (op.reads, op.writes))
    return GraphNode(name, op.kind, phase, reads, writes, op.options)


def _optimizer(graph: Graph) -> None:
    graph.value("scalars", (8,), "optimizer", given=True, kept=True)
    for weight in list(graph.section("weights")):
        first = f"dw.{weight.name}"
        total = first
        for other in [v.name for v in graph.section("grad_weights") if v.name.startswith(f"{first}.by.")]:
            total = graph.value(f"{first}.total", weight.shape, "grad_activations")
            graph.add(total, "add", "optimizer", (first, other), (total,))
        m, v = (
            graph.value(f"{part}.{weight.name}", weight.shape, "optimizer", given=True, kept=True)
            for part in ("m", "v")
        )
        state = (weight.name, m, v)
        graph.add(f"adamw.{weight.name}", "adamw", "optimizer", (total, "scalars", *state), state)
