"""The graph of a decoder: the forward pass, and for training the gradients and AdamW behind it."""

from __future__ import annotations

from .graph import Graph, GraphNode, Value
from .model import DecoderConfig
from .operations import GRADIENTS, Gradients, Maker

__all__ = ["build"]


def build(
    model: DecoderConfig, sequences: int, tokens: int, phase: str, *, count: int, recompute: bool = False
) -> Graph:
    """The graph of one micro-batch.

    Parameters
    ----------
    model : DecoderConfig
    sequences, tokens : int
        Of the micro-batch.
    phase : {"train", "prefill"}
    count : int
        Tokens of the whole batch, of which the loss is the mean.
    recompute : bool
        The backward pass computes each layer's activations again, from what went into the layer.
    """
    graph = Graph()
    for name, _, shape in model.weights():
        graph.value(name, shape, "weights", given=True, kept=True)
    rows, half = sequences * tokens, model.head_dim // 2
    graph.value("ids", (rows,), "activations", dtype="int64", given=True)
    for name in ("cos", "sin", "minus_sin")[: 3 if phase == "train" else 2]:
        graph.value(name, (tokens, half), "activations", given=True)
    logits = _forward(graph, model, sequences, tokens)
    if phase == "train":
        graph.value("targets", (rows,), "activations", dtype="int64", given=True)
        graph.value("loss", (1,), "activations", given=True, kept=True)
        graph.add("loss", "loss", "forward", (logits, "targets", "loss"), ("loss",), count=count)
        _backward(graph)
        if recompute:
            _recompute(graph)
        _optimizer(graph)
    else:
        value = graph.values[logits]
        graph.values[logits] = Value(logits, value.shape, value.section, kept=True)
    graph.check()
    return graph


def _forward(graph: Graph, model: DecoderConfig, sequences: int, tokens: int) -> str:
    rows, hidden, inner, width = sequences * tokens, model.hidden_size, model.intermediate_size, model.head_dim
    make, shared, groups = Maker(graph, rows), model.num_key_value_heads, model.groups
    eps = model.rms_norm_eps
    x = make.result("x", (rows, hidden), "embedding", "ids", "embed")
    for i in range(model.num_hidden_layers):
        make.layer = at = f"L{i}."
        make.phase = f"forward.L{i}"
        y = make.result("normed", (rows, hidden), "rms_norm", x, f"{at}norm1", eps=eps)
        found = {}
        heads = {"q": shared * groups, "k": shared, "v": shared}
        for name, some in heads.items():
            found[name] = make.result(name, (rows, some * width), "linear", y, f"{at}w{name}")
        for name in ("q", "k"):
            if model.head_norms:
                norm = make.result(
                    f"{name}.normed", (rows * heads[name], width), "head_norm", found[name], f"{at}{name}norm", eps=eps
                )
                found[name] = norm
            order = {"sequences": sequences, "tokens": tokens, "heads": heads[name]}
            shape = (sequences, heads[name], tokens, width)
            found[name] = make.result(f"{name}.turned", shape, "rope", found[name], "cos", "sin", **order)
        order = {"sequences": sequences, "tokens": tokens, "heads": shared}
        found["v"] = make.result("v.heads", (sequences, shared, tokens, width), "heads", found["v"], **order)
        y = _attention(make, found, (sequences, shared, groups, tokens, width))
        y = make.result("o", (rows, hidden), "linear", y, f"{at}wo")
        x = make.result("x1", (rows, hidden), "add", x, y)
        y = make.result("normed2", (rows, hidden), "rms_norm", x, f"{at}norm2", eps=eps)
        gate = make.result("g", (rows, inner), "linear", y, f"{at}gate")
        up = make.result("u", (rows, inner), "linear", y, f"{at}up")
        y = make.result("gated", (rows, inner), "silu_mul", gate, up)
        y = make.result("d", (rows, hidden), "linear", y, f"{at}down")
        x = make.result("x2", (rows, hidden), "add", x, y)
    make.layer, make.phase = "", "forward.head"
    y = make.result("final", (rows, hidden), "rms_norm", x, "norm", eps=eps)
    return make.result(
        "logits", (rows, model.vocab_size), "linear", y, "embed" if model.tie_word_embeddings else "head"
    )


def _attention(make: Maker, found: dict[str, str], sizes: tuple[int, ...]) -> str:
    """Causal attention; besides its result the largest exponent and the sum of powers of each query are kept."""
    sequences, shared, groups, tokens, width = sizes
    names = tuple(f"{make.layer}attention{end}" for end in ("", ".m", ".l"))
    make.graph.value(names[0], (sequences * tokens, shared * groups * width), "activations")
    for name in names[1:]:
        make.graph.value(name, (sequences, shared * groups, tokens), "activations")
    reads = (found["q"], found["k"], found["v"])
    make.graph.add(names[0], "attention", make.phase, reads, names, sizes=sizes)
    return names[0]


def _backward(graph: Graph) -> None:
    to = Gradients(graph)
    for op in reversed(list(graph.operations)):
        to.phase = op.phase.replace("forward", "backward")
        if op.kind == "loss":
            GRADIENTS[op.kind](to, op, "loss")
        else:
            GRADIENTS[op.kind](to, op, to.of(op.writes[0]))


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
