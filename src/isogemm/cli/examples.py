"""Examples for each command's ``--help``."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "admissions": ("isogemm admissions --refused", "isogemm admissions --json"),
    "audit": (
        "isogemm audit                                          # isogemm beside numpy",
        "isogemm audit -p numpy,torch --require none            # look, demand nothing",
        "isogemm audit -p mymodule:my_linear --html report.html # your own f(x, w)",
        "isogemm audit -p torch --require none --device cuda    # torch's own kernels, on a GPU",
        "isogemm audit --hf ./Qwen3-0.6B                        # a model in a local folder",
    ),
    "describe": (
        "isogemm describe 128 512 256                           # the call for rows in memory",
        "isogemm describe 64 64 64 --batch 8 --shared b --dtype fp16",
        "isogemm describe gemm_nt_q4_k_q8_k                     # a kernel's name in words",
        "isogemm describe cublasSgemmStridedBatched             # its names elsewhere",
    ),
    "doctor": (
        "isogemm doctor case.npz --steps                        # a result in hand",
        "isogemm doctor --call mine.py:matmul                   # a function f(a, b), by probes",
        "isogemm doctor --call mine.py:linear --signature 'x, w'",
        "isogemm doctor --selftest                              # how many planted mistakes it names",
    ),
    "ops": ("isogemm ops Qwen3-4B", "isogemm ops Qwen3-4B --phase prefill --tokens 512 --tp 4"),
    "info": ("isogemm info", "isogemm info --json"),
    "inspect": ("isogemm inspect model.gguf", "isogemm inspect model.safetensors --match '*mlp*' --check"),
    "plan": (
        "isogemm plan 1 4096 4096                               # one row: decoding",
        "isogemm plan 16 2560 4096 --dtype bf16 --device cuda   # needs no GPU",
        "isogemm plan 16 2560 4096 --format Q4_0                # a quantized weight",
        "isogemm plan 512 512 128 --heads 32,8                  # attention",
    ),
    "program": ("isogemm program lower config.json --out plan", "isogemm program check plan"),
    "quantize": (
        "isogemm quantize model.safetensors model.gguf --format Q4_K",
        "isogemm quantize model.safetensors small.gguf --format Q4_K --fallback Q8_0 --keep '*embed*'",
    ),
    "study": ("isogemm study --list", "isogemm study prefill --quick", "isogemm study report h100 h200 --out both"),
    "trace": ("isogemm trace gemv_simd --shape 1,4096,4096 --thread 0,3,17",),
    "tune": ("isogemm tune --model Qwen3-4B", "isogemm tune --shapes shapes.json --m 1,16,256 --budget 120"),
    "version": ("isogemm version",),
    "warm": (
        "isogemm warm                                           # everything this machine can use",
        "isogemm warm products half                             # two parts, as in an image",
        "isogemm warm --model Qwen3-4B --m 1,16,512             # a model's linears on a GPU",
    ),
}


def examples(command: str) -> str:
    """The end of a command's help; the mark keeps lines as they are."""
    lines = EXAMPLES.get(command, ())
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""
