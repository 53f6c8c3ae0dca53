"""Saving and loading: a quantized model by `save_pretrained` and `from_pretrained`, the same bits in every logit."""

import sys
import tempfile

import torch
import transformers

import isogemm.torch

CONFIG = transformers.Qwen3Config(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
)
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).eval()
isogemm.torch.convert(model, strict=True, quantize={"lm_head": "Q8_0", "*": "Q4_0"})
ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))

isogemm.torch.register_quantizer()  # in the process that loads
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
with torch.no_grad():
    differ = int((loaded(ids).logits != model(ids).logits).sum())
state = loaded.state_dict()
other = [name for name, x in model.state_dict().items() if not torch.equal(x, state[name])]
formats = sorted({layer.format for layer in loaded.modules() if isinstance(layer, isogemm.torch.QuantizedLinear)})
seen = isogemm.torch.verify(loaded)
print(f"{', '.join(formats)}: {differ} logits and {len(other)} of {len(state)} tensors differ; {seen}")
sys.exit(bool(differ or other or not seen))
