"""Run by test_worlds.py: four processes that compare groups of 1, 2 and 4 with a process alone.

    python -m tests.distributed.worlds [layers] [models] [training] [broken] [benchmark]

Each rank prints how many elements of its part differ, comparison by comparison. All that the processes need is made
before they are forked.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import time
from functools import cache
from types import SimpleNamespace

import torch
import torch.distributed as dist
from tests.distributed.launch import ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer

import isogemm
import isogemm.torch as iso
from isogemm.audit.transformer import ranks as audit
from isogemm.errors import RankError
from isogemm.torch import distributed as idist
from isogemm.torch.distributed import GradientTree, Ranks, mapped, sums
from isogemm.torch.distributed.models import parallelise, plan_of
from isogemm.torch.distributed.tree import fixed_sum, rounded
from isogemm.torch.model.merging import Merging

ORDER = "tree4"
F32, BF16 = torch.float32, torch.bfloat16
SIZES = {
    "vocab_size": 132,  # of which a rank has no whole number of leaves
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}


def differing(x, y):
    """Elements of other bits; all of them where shapes or dtypes differ."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return max(x.numel(), y.numel(), 1)
    words = {4: torch.int32, 2: torch.int16}[x.element_size()]
    return int((x.detach().contiguous().view(words) != y.detach().contiguous().view(words)).sum())


def meshes():
    """Groups of every shape that four processes have: (data-parallel, tensor-parallel), and their names."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    two, four, alone = Ranks(both["tp"], ORDER), Ranks(dist.group.WORLD, ORDER), Ranks(None, ORDER)
    halves = Ranks(both["dp"], ORDER)
    return {
        "tp1": (alone, alone),
        "tp2": (alone, two),
        "tp4": (alone, four),
        "dp2": (halves, alone),
        "dp4": (four, alone),
        "dp2 tp2": (halves, two),
    }


def random(*shape, seed=0, dtype=F32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(kind, of, dtype, bias=True, **options):
    """A layer of the kind, with the same weights everywhere, cut between ranks."""
    made = iso.Linear(32, 48, bias, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(random(48, 32, seed=1))
        if bias:
            made.bias.copy_(random(48, seed=2))
    kind.adopt(made, of, "layer", set())
    for name, value in options.items():
        setattr(made, name, value)
    return made


def part(x, of, dim):
    size = x.shape[dim] // of.size
    return x.narrow(dim, of.rank * size, size)


def parallel_layers(rank):
    """Columns, rows, sequences, the vocabulary and losses, forward and backward."""
    shapes = {name: tp for name, (dp, tp) in meshes().items() if dp.size == 1}
    for dtype in (F32, BF16):
        for rows in (1, 40):
            x, dy = random(rows, 32, seed=3, dtype=dtype), random(rows, 48, seed=4, dtype=dtype)
            want = iso.linear(x, *whole(dtype), contract=f"fma/{ORDER}")
            for name, tp in shapes.items():
                what = f"{name} {dtype} {rows} rows"
                yield {"what": f"rows {what}", "differ": _rows(x, dy, tp, dtype, want)}
                yield {"what": f"columns {what}", "differ": _columns(x, dy, tp, dtype)}
                if rows % tp.size == 0:
                    yield {"what": f"sequence {what}", "differ": _sequence(x, dy, tp, dtype, want)}
    for name, tp in shapes.items():
        yield {"what": f"table {name}", "differ": _table(tp)}
        yield {"what": f"losses {name}", "differ": _losses(tp)}
    yield _swapped(shapes["tp4"])


def whole(dtype):
    return random(48, 32, seed=1, dtype=dtype), random(48, seed=2, dtype=dtype)


def _rows(x, dy, tp, dtype, want):
    made, own = layer(idist.RowParallel, tp, dtype), part(x, tp, -1).clone().requires_grad_()
    y = made(own)
    y.backward(dy)
    w, bias = (p.requires_grad_() for p in whole(dtype))
    there = x.clone().requires_grad_()
    iso.linear(there, w, bias).backward(dy)  # its gradients are those of a plain product
    found = differing(y, want) + differing(own.grad, part(there.grad, tp, -1)) + differing(made.bias.grad, bias.grad)
    return found + differing(made.weight.grad, part(w.grad, tp, 1))


def _columns(x, dy, tp, dtype):
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


def _sequence(x, dy, tp, dtype, want):
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
    there, own = logits.clone().requires_grad_(), part(logits, tp, -1).clone().requires_grad_()
    want = -iso.reductions.log_softmax(there, out_dtype=F32).gather(1, targets.unsqueeze(1)).squeeze(1)
    want.sum().backward()
    found = idist.token_losses(own, targets, tp)
    found.sum().backward()
    return differing(found, want) + differing(own.grad, part(there.grad, tp, -1))


class Swapped(Ranks):
    """Two ranks change places."""

    def gather(self, x, what):
        first, second, third, fourth = super().gather(x, what)
        return [first, third, second, fourth]


class Mapped:
    """Memory that the ranks map, as far as sums see it: what kernels write there travels by gloo."""

    def __init__(self, of, right=True):
        self.of, self.right, self.box, self.sent, self.gathers = of, right, self, {}, False

    def send(self, to, partial):
        self.sent[to] = partial.clone()

    def wait(self):
        pass

    def _total(self, parts, bias, dtype):
        first, *rest = parts
        return rounded(fixed_sum([first, *rest] if self.right else [*rest, first]), bias, dtype)

    def one_shot(self, partial, out, bias):
        out.copy_(self._total(self.of.gather(partial, "one shot"), bias, out.dtype))

    def two_shot(self, partial, out, bias, rows, *, there, scatter):
        size, share = self.of.size, -(-rows // self.of.size)
        parts = dict(enumerate(partial.split(share))) if not there else {**self.sent, self.of.rank: partial}
        room = partial.new_zeros(size, share, partial.shape[1])
        for to, part in parts.items():
            room[to, : len(part)] = part
        self.sent = {}
        own = self._total(list(self.of.exchange(room, "two shot")), bias, out.dtype)
        out.copy_(own if scatter else torch.cat(self.of.gather(own, "results"))[:rows])


def _noted(way, call, calls):
    """The call, of which the list hears."""

    def noted(*operands, there=None, **options):
        calls.append({None: way, False: f"{way}, sent", True: f"{way}, copied"}[there])
        return call(*operands, **options, **({} if there is None else {"there": there}))

    return noted


def through_memory(rank):
    """Sums through memory that ranks map: every way, and a kernel whose tree is another one, which is not taken."""
    dist.barrier()
    sums.OVERLAP_ROWS, maps = 8, Ranks.maps
    kernels = SimpleNamespace(ONE_SHOT_BYTES=3 * 4 * 48 * 4, TWO_SHOT_BYTES=4 * 5 * 48 * 4)  # of 4 and of 20 rows
    mapped.column, Ranks.maps = (lambda *_: kernels), lambda self, *_: self.size > 1
    four, calls = Ranks(dist.group.WORLD, ORDER), []
    for right in (True, False):
        made = Mapped(four, right)
        for way in ("one_shot", "two_shot"):
            call = getattr(made, way)
            setattr(made, way, _noted(way, call, calls))
        Ranks.shared = lambda self, *_, made=made: made
        mapped._wrong.clear()
        for dtype in (F32, BF16):
            for rows in (1, 4, 17, 24, 40):
                x, dy = random(rows, 32, seed=3, dtype=dtype), random(rows, 48, seed=4, dtype=dtype)
                want = iso.linear(x, *whole(dtype), contract=f"fma/{ORDER}")
                del calls[:]
                differ = _rows(x, dy, four, dtype, want) + _columns(x, dy, four, dtype)
                if rows % 4 == 0:
                    differ += _sequence(x, dy, four, dtype, want)
                said = {"ways": sorted(set(calls)), "tried": list(mapped._wrong.values())}
                yield {"what": f"through memory {right} {dtype} {rows} rows", "differ": differ, **said}
    Ranks.maps = maps


def _swapped(tp):
    """A wrong tree must be seen, or the comparisons above are worth nothing."""
    x, of = random(8, 32, seed=3), Swapped(tp.group, ORDER)
    found = layer(idist.RowParallel, of, F32)(part(x, tp, -1))
    return {"what": "swapped ranks", "differ": differing(found, iso.linear(x, *whole(F32), contract=f"fma/{ORDER}"))}


def build(family, dtype, **options):
    import transformers

    torch.manual_seed(0)
    tied = {"tie_word_embeddings": family == "Qwen3"}
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **tied, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for p in model.parameters():  # norms of ones and small weights hide mistakes
            p.add_(torch.randn_like(p) * 0.1)
    return model.eval().to(dtype)


@cache
def plain(family, dtype):
    """Converted and whole: made once, before there are processes."""
    model = build(family, dtype)
    iso.convert(model, grad_order="chain")
    return model


def converted(family, dtype, tp):
    model = copy.deepcopy(plain(family, dtype))
    parallelise(model, plan_of(model), tp)
    return model


def models(rank):
    """Logits alone, batched, in chunks and decoded, with projections apart and as one product."""
    ids = torch.randint(1, 128, (3, 11), generator=torch.Generator().manual_seed(1))
    shapes = {name: tp for name, (dp, tp) in meshes().items() if dp.size == 1}
    for family in ("Qwen3", "Llama"):
        for dtype in (F32, BF16):
            with torch.no_grad():
                want = converted(family, dtype, shapes["tp1"])(ids).logits
                for name, tp in shapes.items():
                    model = converted(family, dtype, tp)
                    for how, found in _ways(model, ids):
                        same = differing(found, want[: len(found), -found.shape[1] :])
                        yield {"what": f"{family} {dtype} {name} {how}", "differ": same}
                    merged = sum(
                        child.merge() and child.is_merged() for child in model.modules() if isinstance(child, Merging)
                    )
                    same = differing(model(ids).logits, want)
                    yield {"what": f"{family} {dtype} {name} fused", "of": merged, "differ": same}


def _ways(model, ids):
    yield "batched", model(ids).logits
    yield "alone", model(ids[:1]).logits
    first = model(ids[:, :8], use_cache=True)
    yield "in chunks", model(ids[:, 8:], past_key_values=first.past_key_values).logits
    cache, steps = model(ids[:, :8], use_cache=True).past_key_values, []
    for i in range(8, 11):
        steps.append(model(ids[:, i : i + 1], past_key_values=cache).logits)
    yield "decoded", torch.cat(steps, 1)


def audited(rank):
    """The audit's own comparison: of four ranks, and of ranks that changed places in sums of layers alone."""
    ids, right = torch.arange(18).reshape(2, 9), Ranks(dist.group.WORLD, ORDER)
    want = audit.outputs(converted("Llama", F32, Ranks(None, ORDER)), ids)
    model = converted("Llama", F32, right)
    yield _audit("audit of right ranks", want, model, right, ids)
    for child in model.modules():
        if isinstance(child, idist.RowParallel):
            child.ranks = Swapped(dist.group.WORLD, ORDER)
    yield _audit("audit of swapped ranks", want, model, right, ids)


def _audit(what, want, model, of, ids):
    places = of.gather(audit.compared(want, audit.outputs(model, ids), of.rank), "places")
    found = audit.joined(4, ORDER, list(want), places)
    return {"what": what, "first": found.first, "of": found.logits, "differ": found.differing}


def loaded(rank):
    """A model that no process holds whole: read by parts from a file that rank 0 wrote."""
    from safetensors.torch import save_file

    tp, ids = Ranks(dist.group.WORLD, ORDER), torch.arange(9).reshape(1, 9)
    for family in ("Qwen3", "Llama"):
        folder = tempfile.TemporaryDirectory() if rank == 0 else None
        whole = [folder.name if folder else None]
        dist.broadcast_object_list(whole)
        if rank == 0:
            state = plain(family, BF16).state_dict()
            tied = {"lm_head.weight"} if family == "Qwen3" else set()
            save_file({k: v for k, v in state.items() if k not in tied}, f"{whole[0]}/model.safetensors")
        dist.barrier()
        config = copy.deepcopy(plain(family, BF16).config)
        config._attn_implementation = "sdpa"
        with idist.without_weights():
            model = type(plain(family, BF16))(config).eval().to(BF16)
        iso.convert(model, tp=tp, grad_order="chain", fuse=True)
        read = idist.load_shards(model, whole[0])
        dist.barrier()
        if folder:
            folder.cleanup()
        with torch.no_grad():
            same = differing(model(ids).logits, converted(family, BF16, Ranks(None, ORDER))(ids).logits)
        merged = sum(child._buffers.get("merged_weight") is not None for child in model.modules())
        yield {"what": f"loaded {family}", "of": len(read), "merged": merged, "differ": same}


class Cut(torch.nn.Module):
    """Every kind of layer that is cut, one behind the other; rows are shared in the middle."""

    def __init__(self, of):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            iso.Embedding(128, 16), iso.Linear(16, 32), iso.Linear(32, 16), iso.Linear(16, 32), iso.Linear(32, 128)
        )
        styles = ("embedding_rowwise", "colwise", "rowwise", "colwise", "rowwise")
        parallelise(self.layers, {str(i): style for i, style in enumerate(styles)}, of)
        self.layers[1].gathered = self.layers[2].sequence = self.layers[3].sequence = True
        self.width = 32 // of.size

    def forward(self, ids):
        rows = self.layers[0](ids).flatten(0, 1)
        wide = self.layers[1](rows).chunk(32 // self.width, -1)[self.layers[1].ranks.rank]
        return self.layers[4](self.layers[3](self.layers[2](wide)))


def compiled(rank):
    """A graph without a break where no gradient is recorded; a copy of a model is compiled with layers of its own."""
    ids, four = torch.arange(24).reshape(3, 8) * 5, Ranks(dist.group.WORLD, ORDER)
    with torch.no_grad():
        want = Cut(Ranks(None, ORDER))(ids)
        model = copy.deepcopy(Cut(four))
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(ids)
    yield {"what": "compiled", "of": found.numel(), "differ": differing(found, want) + differing(model(ids), want)}


def wrapped(rank):
    """DistributedDataParallel with the tree as its hook: gradients of four ranks, and of one process."""
    of, x = Ranks(dist.group.WORLD, ORDER), random(8, 32, seed=8)
    want = []
    for rows in x.chunk(4):
        alone = _small()
        alone(rows).square().sum().backward()
        want.append([p.grad.float() for p in alone.parameters()])
    total = [(first + second) + (third + fourth) for first, second, third, fourth in zip(*want, strict=True)]
    model = torch.nn.parallel.DistributedDataParallel(_small())
    model.register_comm_hook(of, idist.tree_hook)
    model(part(x, of, 0)).square().sum().backward()
    pairs = zip(model.parameters(), total, strict=True)
    yield {"what": "DDP", "differ": sum(differing(p.grad, (t / 4).to(p.dtype)) for p, t in pairs)}


def _small():
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.SiLU(), torch.nn.Linear(48, 8))
    iso.convert(made)
    return made


@cache
def alone(family, dtype):
    """What a process alone trains: made once, before there are others, which find the kernels loaded too."""
    one = Ranks(None, ORDER)
    return _steps(family, dtype, one, one)


def training(rank):
    """Losses, gradients and weights of two steps of AdamW; micro-batches within a leaf."""
    shapes = meshes()
    for family, dtype in TRAINED:
        want = alone(family, dtype)
        for name, (dp, tp) in shapes.items():
            if name != "tp1":
                found = _steps(family, dtype, dp, tp, micro=2 if name == "dp2 tp2" else 1)
                yield from _compared(f"training {family} {dtype} {name}", found, want, tp)
    found = _steps(family, dtype, *shapes["dp4"], zero=True)  # of the last one
    yield from _compared("ZeRO-1", found, want, shapes["tp1"][1])


class _Branches(torch.nn.Module):
    """Parameters of one shape that torch's functions use, each for some rows alone."""

    def __init__(self):
        super().__init__()
        self.linear = iso.Linear(8, 8)
        self.even, self.odd, self.never = (torch.nn.Parameter(torch.ones(8)) for _ in range(3))
        self.linear.load_state_dict({"weight": random(8, 8, seed=1), "bias": random(8, seed=2)})

    def forward(self, x):
        return self.linear(x) * (self.even if int(x[0, 0]) % 2 == 0 else self.odd)


def _branch_gradients(ranks):
    model, x = _Branches(), random(ranks.leaves, 8, seed=3)
    x[:, 0] = torch.arange(ranks.leaves) >= ranks.leaves // 2  # the first ranks have the even rows, the last the odd
    tree = GradientTree(model, ranks)
    for leaf in tree.parts(x):
        model(leaf).sum().backward()
        tree.push()
    named = tree.collect()
    return {name: p.grad for name, p in model.named_parameters() if name in named}


def branches(rank):
    """Ranks that have gradients of other parameters than each other."""
    want = _branch_gradients(Ranks(None, ORDER))
    for name, (dp, _) in meshes().items():
        if name.startswith("dp"):
            found = _branch_gradients(dp)
            assert list(found) == list(want)
            yield from _compared(f"branches {name}", found, want, Ranks(None, ORDER))


def _compared(what, found, want, tp):
    """Gradients and weights with this rank's part of what a process alone has, and the first that differs."""
    differ, first = 0, ""
    for name, x in found.items():
        y = want[name]
        dim = next((d for d in range(x.dim()) if x.shape[d] != y.shape[d]), None)
        here = differing(x, y if dim is None else part(y, tp, dim))
        differ, first = differ + here, first or (name if here else "")
    yield {"what": what, "of": len(found), "first": first, "differ": differ}


def _steps(family, dtype, dp, tp, micro=1, zero=False):
    model = converted(family, dtype, tp)
    model.lm_head.gathered = False  # losses take the columns as they are
    tree = GradientTree(model, dp)
    named, options = list(model.named_parameters()), {"lr": 0.01, "foreach": False}
    parameters = [p for _, p in named]
    if zero:
        optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, process_group=dp.group, **options)
    else:
        optimizer = torch.optim.AdamW(parameters, **options)
    found = {}
    for step in range(2):
        ids = torch.randint(0, 128, (8, 7), generator=torch.Generator().manual_seed(step))
        for leaf in tree.parts(ids):
            for rows in leaf.chunk(micro):
                logits = model(rows[:, :-1]).logits.flatten(0, 1)
                (idist.token_losses(logits, rows[:, 1:].flatten(), tp).sum() / 48).backward()
            tree.push()
        tree.collect()
        found |= {f"gradient {step} of {name}": p.grad.clone() for name, p in named}
        optimizer.step()
        found |= {f"step {step} of {name}": p.detach().clone() for name, p in named}
        optimizer.zero_grad()
    return found


def broken(how):
    """A check in which rank 2 ends, or waits for the others to end, before a sum of four ranks; what these say."""
    ready, go, told, answered = (os.pipe() for _ in range(4))

    def check(rank):
        patient = Ranks(dist.group.WORLD, ORDER)  # first sums connect and load kernels
        of, x = Ranks(dist.group.WORLD, ORDER, timeout=4.0), part(random(8, 32), patient, -1)
        layer(idist.RowParallel, patient, F32)(x)
        made = layer(idist.RowParallel, of, F32)
        if rank == 2:  # nobody is still in the first sum, and all begin the second together
            _take(ready, 3)
            os.write(go[1], b"...")
            _take(told, 3 if how == "hangs" else 0)
            os._exit(0)
        os.write(ready[1], b".")
        _take(go, 1)
        started = time.monotonic()
        try:
            made(x)
        except RankError as error:
            yield {"what": f"rank 2 {how}", "error": str(error), "seconds": time.monotonic() - started, "differ": 0}
        os.write(told[1], b".")
        if rank == 0:  # the others are not left alone before they have answered
            _take(answered, 2)
        else:
            os.write(answered[1], b".")

    return check


def _take(pipe, count):
    """Wait for so many bytes that other processes write."""
    while count:
        count -= len(os.read(pipe[0], count))


def benchmarked(rank):
    """benchmarks.ranks of two processes: its equality, and times of isogemm's and torch's ways."""
    from benchmarks.model.cases import Sizes, tiny
    from benchmarks.ranks.bench import Bench, Settings
    from benchmarks.ranks.launch import World
    from benchmarks.ranks.model import CASES, EQUAL
    from benchmarks.ranks.show import lines, table

    world, short = World(rank, 2, "cpu", dist.group.WORLD), {"rounds": 5, "block_seconds": 1e-3}
    bench = Bench(world, Settings(2, "cpu", ("collective",), Sizes.of_tests(), (), (), **short))
    rows = [row for case in EQUAL for row in bench.compared(tiny(case))]
    rows.append(bench.timed(tiny(CASES[0])))
    for row in rows:
        of = len(row["timings"]) if "timings" in row else row["compared"]
        said = {"error": row["error"], "said": lines(row)}
        yield {"what": f"benchmark {row['name']}", "of": of, "differ": row["differing"], **said}
    yield {"what": "benchmark table", "rows": table(rows).row_count}


TRAINED = (("Qwen3", BF16), ("Llama", F32))
CHECKS = {
    "layers": [parallel_layers, through_memory],
    "models": [models, loaded, audited, compiled],
    "training": [training, wrapped],
    "branches": [branches],
    "broken": [broken("dies"), broken("hangs")],
    "benchmark": [benchmarked],
}


def together(names):
    """The checks of these names, one after another in the same processes: each process loads a kernel once."""

    def check(rank):
        for name in names:
            for each in CHECKS[name]:
                yield from each(rank)

    return check


if __name__ == "__main__":
    torch.set_num_threads(1)
    isogemm.set_num_threads(1)
    wanted = sys.argv[1:] or list(CHECKS)
    for family in ("Qwen3", "Llama") if {"models", "training"} & set(wanted) else ():
        for dtype in (F32, BF16):
            plain(family, dtype)
    for family, dtype in TRAINED if {"models", "training"} & set(wanted) else ():
        alone(family, dtype)
    if "models" in wanted:
        import torch._dynamo.backends.debugging  # torch's compiler: each process would import it
        import torch._inductor.compile_fx
    lasting = together([name for name in wanted if name not in ("broken", "benchmark")])
    waiting = CHECKS["broken"] if "broken" in wanted else []  # together: they do nothing but wait
    two = CHECKS["benchmark"] if "benchmark" in wanted else []
    sys.exit(sum(ranks(*each, 240) for each in ((4, [lasting]), (4, waiting), (2, two))))
