"""transformers.Trainer: 4 micro-batches of 1 sequence and 2 of 2 train the same model, bit for bit."""

import sys
import tempfile

import torch
import transformers

import isogemm.torch

TOKENS, SEQUENCES = 16, 8
CONFIG = transformers.Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)
rows = torch.randint(64, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in rows]


def trained(sequences: int, steps: int) -> dict[str, torch.Tensor]:
    """The parameters after two steps of four sequences each."""
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(CONFIG)
    isogemm.torch.convert(model, strict=True, grad_order="leaf16")  # leaves that divide every micro-batch
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=sequences,
            gradient_accumulation_steps=steps,
            max_steps=2,
            learning_rate=1e-2,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        callback = isogemm.torch.TrainerCallback()
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
    return model.state_dict()


torch.manual_seed(0)
start = transformers.Qwen3ForCausalLM(CONFIG).state_dict()
ones, twos = trained(1, 4), trained(2, 2)
moved = sum(not torch.equal(ones[name], x) for name, x in start.items())
differ = [name for name, x in ones.items() if not torch.equal(x, twos[name])]
print(f"{moved} of {len(start)} parameters moved; {len(differ)} differ between 4 x 1 and 2 x 2")
sys.exit(bool(differ) or moved < len(start))
