"""Every causal language model of transformers, tiny: does `convert` change a result by more than rounding?

Weights are so large that limits, clamps and capped logits are reached, in evaluation and in training. A converted model
is held against plain torch in float64, in units of what plain torch in float32, and weights changed in their last bit,
make of it: a model that amplifies roundings proves nothing by doing so. `python -m tests.models.sweep [NAME...]` runs
all of them, or those, in a few minutes.
"""

from __future__ import annotations

import ast
import copy
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

import isogemm.torch as it
from isogemm.errors import IsogemmError, OptionError

EPS = float(torch.finfo(torch.float32).eps)
SCALES = (8.0, 1.0)  # of what a product makes of numbers of size 1
TIMES, FLOOR, TOKENS = 10.0, 100.0, 1.0  # of plain torch's error, of eps, and how many tokens have to be within
LARGEST = 3_000_000  # parameters
BLIND = 0.01  # an error of plain torch's that hides everything

# What configurations call their sizes. Those that a configuration has are set.
SIZES = {
    "vocab_size": 97, "vocab_size_per_layer_input": 97, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32,
    "n_embed": 32, "embedding_size": 32, "word_embed_proj_dim": 32, "hidden_dim": 32, "intermediate_size": 48,
    "ffn_dim": 48, "d_ff": 48, "n_inner": 48, "ffn_hidden_size": 48, "num_hidden_layers": 2, "n_layer": 2,
    "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_attention_heads": 4, "n_head": 4,
    "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64,
    "max_seq_len": 64, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "moe_topk": 2,
    "moe_k": 2, "n_group": 1, "topk_group": 1, "num_expert_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "state_size": 8, "ssm_state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 4,
    "mamba_d_head": 16, "time_step_rank": 4, "sliding_window": 6, "clip_qkv": 8.0, "lru_width": 32,
    "attention_window_size": 6, "index_n_heads": 2, "index_head_dim": 8,
    "index_topk": 4, "o_groups": 2, "o_lora_rank": 16, "decoder_start_token_id": 1, "chunk_size": 8,
    "mamba_chunk_size": 8,
}  # fmt: skip


@dataclass
class Verdict:
    """What was found of one class."""

    name: str
    outcome: str = "right"  # or left, refused, unbuilt, blind, wrong
    why: str = ""
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)  # ours and plain torch's
    converted: int = 0
    left: dict[str, str] = field(default_factory=dict)


def names() -> list[str]:
    """All classes of causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    mapped = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if name.endswith("LMHeadModel")}
    named = {name for name in dir(transformers) if name.endswith("ForCausalLM") and not name.startswith("Auto")}
    return sorted(mapped | named)


def config(cls: Any, **changes: Any) -> Any:
    """A tiny configuration of a class: sizes that it has, no dropout."""
    kind = cls.config_class
    first = kind().to_dict()
    sizes = {name: value for name, value in SIZES.items() if name in first}
    if "qk_rope_head_dim" in sizes:
        sizes.pop("head_dim", None)  # follows
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    sizes |= {name: 0.0 for name, value in first.items() if ("drop" in name or "jitter" in name) and _number(value)}
    return kind(**{**sizes, **changes})


def _number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def build(name: str) -> Any:
    """A tiny model of a class, in float32."""
    cls = getattr(transformers, name)
    made = config(cls, **CHANGES.get(name, {}))
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(copy.deepcopy(made)).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters, which is not tiny")
    return cls(made).float().eval()


HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
INDEXED = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
# What a class needs besides.
CHANGES: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "CodeGenForCausalLM": {"rotary_dim": 4},
    "CohereCompassForCausalLM": {
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "DbrxForCausalLM": {
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "DeepseekV4ForCausalLM": {
        "head_dim": 32,
        "hc_sinkhorn_iters": 3,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["hash_moe", "moe"],
    },
    "Dots1ForCausalLM": {"n_shared_experts": 1},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 64},
    "GPTJForCausalLM": {"rotary_dim": 4},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "Gemma3nForCausalLM": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.5, 0.0],
    },
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"]},
    "HYV4ForCausalLM": {"index_topk": 64},  # of scores as good as equal, a rounding decides
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "KimiLinearForCausalLM": {
        "num_experts": 8,
        "linear_attn_config": {"head_dim": 8, "num_heads": 4},
        "layer_types": ["linear_attention", "full_attention"],
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "GitForCausalLM": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "image_size": 32,
        }
    },
    "LongcatFlashForCausalLM": {
        "head_dim": 4,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
        "zero_expert_num": 2,
    },
    "Mamba2ForCausalLM": {"num_heads": 8},
    "MusicgenForCausalLM": {"num_codebooks": 1},
    "MusicgenMelodyForCausalLM": {"num_codebooks": 1},
    "NemotronHForCausalLM": {"mamba_num_heads": 8, "mamba_head_dim": 8},
    "ProphetNetForCausalLM": {
        "num_decoder_attention_heads": 4,
        "num_encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
    },
    "Qwen3NextForCausalLM": HYBRID,
    "Qwen3_5ForCausalLM": HYBRID,
    "Qwen3_5MoeForCausalLM": HYBRID,
    "Qwen4ExpForCausalLM": {**HYBRID, **INDEXED},
    "RecurrentGemmaForCausalLM": {"block_types": ["recurrent", "attention"]},
    "RoCBertForCausalLM": {"pronunciation_vocab_size": 97, "shape_vocab_size": 97},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "Zamba2ForCausalLM": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "mamba_n_heads": None,
        "n_mamba_heads": 4,
    },
    "xLSTMForCausalLM": {"num_heads": 2, "hidden_size": 64, "qk_dim_factor": 1.0},
    "ZambaForCausalLM": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}


def enlarge(model: Any, scale: float) -> Any:
    """Weights that make numbers of size `scale` of numbers of size 1; vectors that are no ones or zeros."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() > 1:
                p.copy_(noise * scale / p.shape[-1] ** 0.5)
            elif p.is_floating_point():
                p.add_(noise * 0.2)
    return model


def tokens() -> Any:
    """Two sequences of twelve."""
    return torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(1))


def run(model: Any, masked: bool = True) -> Any:
    """Logits of each token in float64: two sequences, and again with one of them padded."""
    torch.manual_seed(0)
    ids, mask = tokens(), torch.ones(2, 12, dtype=torch.int64)
    mask[0, :3] = 0
    with torch.no_grad():
        logits = [model(ids, use_cache=False).logits.double()]
        if masked:
            logits.append(model(ids, attention_mask=mask, use_cache=False).logits.double())
    return torch.cat([logits[0].flatten(0, -2), *(y[mask.bool()] for y in logits[1:])])


def masks(model: Any) -> bool:
    """Whether a model takes padding, and there is one row of logits for each token."""
    try:
        return bool(run(model).isfinite().all(-1).any())
    except Exception:
        return False


def changed(model: Any, seed: int) -> Any:
    """The same model with weights that differ by roundings."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + EPS / 2 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype))
    return model


def errors(y: Any, want: Any) -> Any:
    """Of each token: the distance from what is right, where 1 is all of it."""
    found = (y - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30)
    return torch.where(found.isfinite(), found, torch.inf)


def exact(model: Any, masked: bool) -> Any:
    """Plain torch in float64; in float32 where a model cannot do that."""
    try:
        return run(copy.deepcopy(model).double(), masked)
    except RuntimeError:
        return run(model, masked)


def compare(model: Any, ours: Any, masked: bool) -> tuple[str, float, float]:
    """Whether right, wrong or blind, and the errors of most tokens: ours and plain torch's."""
    want = exact(model, masked)
    plain = torch.stack([errors(run(x, masked), want) for x in (model, changed(model, 1), changed(model, 2))]).amax(0)
    seen = want.isfinite().all(-1) & plain.isfinite()
    if seen.double().mean() < 0.5 or plain[seen].median() > BLIND:
        return "blind", float("nan"), float(plain.median())
    found, plain = errors(run(ours, masked), want)[seen], plain[seen]
    # A router or an argument of a step may fall on the other side for some tokens, and for those behind them.
    within = found <= TIMES * plain.maximum(plain.median()) + FLOOR * EPS
    count = float(within.double().mean())
    return "right" if count >= TOKENS else "wrong", float(found.median()), float(plain.median())


def converted(model: Any) -> Any:
    """A converted model's report; what `convert` refuses by name is left as it is."""
    try:
        return it.convert(model)
    except OptionError as error:
        return it.convert(model, leave=ast.literal_eval(error.nearest.removeprefix("leave=")))


def judge(name: str, scales: tuple[float, ...] = SCALES) -> Verdict:
    """All scales, in evaluation and in training."""
    verdict = Verdict(name)
    try:
        model = build(name)
        if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
            model.set_attn_implementation("eager")  # transformers' sdpa drops the cap
        run(model, False)
    except Exception as error:
        return Verdict(name, "unbuilt", f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
    seen, masked = False, masks(model)
    for scale in scales:
        enlarge(model, scale)
        ours = copy.deepcopy(model)
        try:
            report = converted(ours)
        except IsogemmError as error:
            return Verdict(name, "refused", str(error).splitlines()[0])
        verdict.converted, verdict.left = len(report.converted), report.left
        masked = masked and masks(ours)  # one that takes padding for tokens refuses it once it is converted
        for training in (False, True):
            case = f"{'training' if training else 'evaluation'}, weights {scale:g}"
            try:
                outcome, mine, plain = compare(model.train(training), ours.train(training), masked)
            except IsogemmError as error:
                return Verdict(name, "refused", f"{case}: {str(error).splitlines()[0]}")
            except Exception as error:
                return Verdict(name, "wrong", f"{case}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
            verdict.errors[case] = mine, plain
            seen |= outcome != "blind"
            if outcome == "wrong":
                return Verdict(name, "wrong", f"{case}: off by {mine:.1e}, plain torch by {plain:.1e}", verdict.errors)
    if not seen:
        verdict.outcome, verdict.why = "blind", f"plain torch is off by {plain:.1e}"
    return verdict


def main(chosen: list[str]) -> int:
    """Print a line for each class, and counts."""
    from collections import Counter

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    counts = Counter[str]()
    for name in chosen or names():
        verdict = judge(name)
        kind = " with all converted" if verdict.converted and not verdict.left else ""
        counts[verdict.outcome + kind] += 1
        left = sorted(set(verdict.left.values()))
        print(f"{verdict.outcome:8} {name} {verdict.why or f'{verdict.converted} modules'}", flush=True)
        for why in left:
            print(f"           left: {why}")
    print(", ".join(f"{n} {outcome}" for outcome, n in counts.most_common()))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
