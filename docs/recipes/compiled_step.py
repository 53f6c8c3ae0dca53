"""A training step under torch.compile: one graph forward, one backward, no product of torch's, the eager bits."""

import sys

import torch
import transformers
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import isogemm.torch
from isogemm.torch import reductions

TOKENS, SEQUENCES = 16, 4
CONFIG = transformers.Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)
torch.manual_seed(0)
model = transformers.Qwen3ForCausalLM(CONFIG)
isogemm.torch.convert(model, strict=True, grad_order="leaf16")
ids = torch.randint(64, (SEQUENCES, TOKENS))
graphs = []


def kept(graph, inputs):
    """A compiler that runs a graph as it is; the default of torch.compile, "inductor", has the same bits."""
    graphs.append(graph)
    return make_boxed_func(graph.forward)


def loss(part: torch.Tensor) -> torch.Tensor:
    """A micro-batch's part of the step's loss."""
    losses = reductions.cross_entropy(model(part, use_cache=False).logits[:, :-1], part[:, 1:])
    return reductions.sum(losses.flatten()) / (SEQUENCES * (TOKENS - 1))


def gradients(step, sequences: int) -> dict[str, torch.Tensor]:
    """Of all parameters, for one step over all sequences."""
    model.zero_grad()
    isogemm.torch.use_main_grad(model)
    for part in ids.split(sequences):
        step(part).backward()
    isogemm.torch.collect_main_grad(model)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


backend = sys.argv[1] if sys.argv[1:] else aot_autograd(fw_compiler=kept, bw_compiler=kept)
compiled = torch.compile(loss, fullgraph=True, dynamic=False, backend=backend)
want = gradients(loss, SEQUENCES)
differ = {name for n in (SEQUENCES, 2) for name, x in gradients(compiled, n).items() if not torch.equal(x, want[name])}
called = {str(node.target) for graph in graphs for node in graph.graph.nodes}
products = {name for name in called if name.startswith(("aten.mm", "aten.bmm", "aten.addmm", "aten.sum"))}
print(f"{len(graphs)} graphs of 2 shapes; products of torch's: {products or 'none'}; {len(differ)} gradients differ")
sys.exit(bool(differ or products) or len(graphs) not in (0, 4))
