"""LoRA by PEFT, on floats and on quantized layers: the same bits in any batch, and over micro-batches."""

import sys

import peft
import torch
import transformers

import isogemm.torch
from isogemm.torch import reductions

TOKENS, SEQUENCES = 16, 4
CONFIG = transformers.Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)


def adapted(quantize: dict[str, str] | None) -> peft.PeftModel:
    """A converted model with adapters around its projections, which are converted too."""
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(CONFIG)
    isogemm.torch.convert(model, strict=True)  # first: blocks are known by the projections that they have
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    isogemm.torch.convert(model, strict=True, grad_order="leaf16", quantize=quantize)  # what is new
    return model


def gradients(model: peft.PeftModel, sequences: int) -> dict[str, torch.Tensor]:
    """Of the adapters, for one step over all sequences."""
    ids = torch.randint(64, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    isogemm.torch.use_main_grad(model)
    for part in ids.split(sequences):
        losses = reductions.cross_entropy(model(input_ids=part).logits[:, :-1], part[:, 1:])
        (losses.sum() / (SEQUENCES * (TOKENS - 1))).backward()
    isogemm.torch.collect_main_grad(model)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


broken = 0
for quantize in (None, {"*.base_layer": "Q8_0"}):
    model = adapted(quantize)
    seen = isogemm.torch.verify(model)  # alone, in batches, padded, in chunks, token by token
    whole = gradients(model, SEQUENCES)
    cuts = [gradients(model, sequences) for sequences in (1, 2)]
    differ = {name for cut in cuts for name, x in cut.items() if not torch.equal(x, whole[name])}
    print(f"{quantize or 'floats'}: {seen}; of {len(whole)} gradients {len(differ)} differ over micro-batches")
    broken += not seen or bool(differ) or not all(x.any() for x in whole.values())
sys.exit(bool(broken))
