"""Layers that are cut, against plain products: columns, rows, sequences, the vocabulary and losses."""

from __future__ import annotations

import torch
from tests.distributed.worlds.parts import BF16, F32, ORDER, Swapped, differing, layer, meshes, part, random, whole

import isogemm.torch as iso
from isogemm.errors import OptionError
from isogemm.torch import distributed as idist


def parallel_layers(rank):
    """Columns, rows, sequences, the vocabulary and losses, forward and backward."""
    shapes = {name: tp for name, (dp, tp) in meshes().items() if dp.size == 1}
    for dtype in (F32, BF16):
        for rows in (1, 40):
            x, dy = random(rows, 32, seed=3, dtype=dtype), random(rows, 48, seed=4, dtype=dtype)
            want = iso.linear(x, *whole(dtype), contract=f"fma/{ORDER}")
            for name, tp in shapes.items():
                what = f"{name} {dtype} {rows} rows"
                yield {"what": f"rows {what}", "differ": by_rows(x, dy, tp, dtype, want)}
                yield {"what": f"columns {what}", "differ": by_columns(x, dy, tp, dtype)}
                if rows % tp.size == 0:
                    yield {"what": f"sequence {what}", "differ": by_sequence(x, dy, tp, dtype, want)}
    for name, tp in shapes.items():
        yield {"what": f"table {name}", "differ": _table(tp)}
        yield {"what": f"losses {name}", "differ": _losses(tp)}
    yield _swapped(shapes["tp4"])


def by_rows(x, dy, tp, dtype, want):
    made, own = layer(idist.RowParallel, tp, dtype), part(x, tp, -1).clone().requires_grad_()
    y = made(own)
    y.backward(dy)
    w, bias = (p.requires_grad_() for p in whole(dtype))
    there = x.clone().requires_grad_()
    iso.linear(there, w, bias).backward(dy)  # its gradients are those of a plain product
    found = differing(y, want) + differing(own.grad, part(there.grad, tp, -1)) + differing(made.bias.grad, bias.grad)
    return found + differing(made.weight.grad, part(w.grad, tp, 1))


def by_columns(x, dy, tp, dtype):
    made, there = layer(idist.ColumnParallel, tp, dtype), x.clone().requires_grad_()
    y = made(there)
    y.backward(part(dy, tp, -1))
    w, bias = (p.requires_grad_() for p in whole(dtype))
    want = iso.linear(x, w, bias)
    want.backward(dy)
    dx = iso.mm(dy, w.detach(), contract=f"fma/{ORDER}")
    found = (
        differing(y, part(want, tp, -1)) + differing(there.grad, dx) + differing(made.bias.grad, part(bias.grad, tp, 0))
    )
    return found + differing(made.weight.grad, part(w.grad, tp, 0))


def by_sequence(x, dy, tp, dtype, want):
    """Columns that gather their rows, rows that scatter theirs: what is between tokens is on one rank."""
    up, down = layer(idist.ColumnParallel, tp, dtype, sequence=True), layer(idist.RowParallel, tp, dtype, sequence=True)
    own, wide = part(x, tp, 0).clone().requires_grad_(), part(x, tp, -1).clone().requires_grad_()
    y, z = up(own), down(wide)
    y.backward(part(dy, tp, -1))
    z.backward(part(dy, tp, 0))
    w, bias = whole(dtype)
    found = differing(y, part(iso.linear(x, w, bias), tp, -1)) + differing(z, part(want, tp, 0))
    found += differing(own.grad, part(iso.mm(dy, w, contract=f"fma/{ORDER}"), tp, 0))
    return found + differing(wide.grad, part(iso.mm(dy, w), tp, -1))


def _table(tp):
    ids, table = torch.tensor([[3, 0, 127], [64, 3, 31]]), iso.Embedding(128, 16)
    with torch.no_grad():
        table.weight.copy_(random(128, 16, seed=5)).masked_fill_(table.weight.abs() < 0.1, -0.0)
    want = iso.reductions.embedding(ids, there := table.weight.detach().clone().requires_grad_())
    want.backward(random(2, 3, 16, seed=6))
    idist.VocabularyEmbedding.adopt(table, tp, "table", set())
    found = table(ids)
    found.backward(random(2, 3, 16, seed=6))
    return differing(found, want) + differing(table.weight.grad, part(there.grad, tp, 0))


def _losses(tp):
    logits, targets = random(11, 128, seed=7, dtype=BF16), torch.arange(11) * 11
    targets[4] = -100
    there, own = logits.clone().requires_grad_(), part(logits, tp, -1).clone().requires_grad_()
    want = iso.reductions.cross_entropy(there, targets, out_dtype=F32)
    want.sum().backward()
    found = idist.token_losses(own, targets, tp)
    found.sum().backward()
    targets[0] = 128
    try:  # by every rank, also by those that have other rows
        idist.token_losses(own, targets, tp)
    except OptionError:
        return differing(found, want) + differing(own.grad, part(there.grad, tp, -1))
    return 1


def _swapped(tp):
    """A wrong tree must be seen, or the comparisons above are worth nothing."""
    x, of = random(8, 32, seed=3), Swapped(tp.group, ORDER)
    found = layer(idist.RowParallel, of, F32)(part(x, tp, -1))
    return {"what": "swapped ranks", "differ": differing(found, iso.linear(x, *whole(F32), contract=f"fma/{ORDER}"))}
