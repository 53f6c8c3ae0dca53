"""The page's figures of quantized products on a GPU: later files replace rows, and the text is that of the files."""

from __future__ import annotations

from benchmarks.quant_gpu.readme import quant_gpu_section


def row(name, m, ratios, differing=0):
    verdicts = [{"ours": ours, "peer": peer, "ratio": ratio} for (ours, peer), ratio in ratios.items()]
    q8 = {"checked": 5, "differing": 0, "batch_checked": 3, "batch_differing": differing}
    correctness = {"checked": 10, "differing": 0, "plain_checked": 2, "plain_differing": 0, "q8": q8}
    return {"name": f"{name} {m}", "format": name, "m": m, "n": 32, "k": 64, "verdicts": verdicts, "timings": {"a": 1},
            "correctness": correctness}  # fmt: skip


def test_cells_ranges_and_bits():
    same, q8, plain = "isogemm", "isogemm q8", "isogemm bf16"
    stamp = {"device": {"before": {"name": "A GPU"}}}
    first = {**stamp, "rows": [
        row("Q4_0", 1, {(same, plain): 2.0, (q8, plain): 3.0, (same, "llama.cpp"): 0.5, (q8, "llama.cpp"): 4.0}),
        row("Q4_0", 16, {(same, plain): 9.0}, differing=7),
    ]}  # fmt: skip
    second = {**stamp, "rows": [row("Q4_0", 16, {(same, plain): 1.5, (same, "llama.cpp"): 2.5})]}
    third = {**stamp, "rows": [row("Q4_0", 1, {(same, plain): 2.2, (same, "llama.cpp"): 0.6})]}
    text = " ".join(quant_gpu_section([first, second, third], ["one.json"]).split())
    assert "`same` is 0.60 to 2.50, that of `q8` 4.00 to 4.00; relative to GemLite" in text
    text = " ".join(quant_gpu_section([first, second], ["one.json", "two.json"]).split())
    assert "| 32, 64 | Q4_0 | 2.00 / 3.00 | 1.50 / – |" in text
    assert "`same` is 0.50 to 2.50, that of `q8` 4.00 to 4.00; relative to GemLite" in text
    assert "`same` not measured." in text
    assert "Of 40 elements" in text
    assert " 0 differed" in text
    assert " 7 differed" in quant_gpu_section([first], ["one.json"]).replace("\n", " ")


def test_float32_activations_are_said_where_they_were_measured():
    fp32, plain = "isogemm fp32", "isogemm plain fp32"
    rows = [row("Q4_0", m, {(fp32, plain): ratio}) for m, ratio in ((32, 0.0), (16, 1.5), (1, 2.5))]
    rows[2]["correctness"]["fp32"] = {"checked": 4, "differing": 0, "plain_checked": 3, "plain_differing": 1}
    run = {"device": {"before": {"name": "A GPU"}}, "rows": rows}
    text = " ".join(quant_gpu_section([run], ["one.json"]).split())
    assert "| M = 1 | M = 16 | M = 32 |" in text
    assert "dequantized weights is 2.50 to 2.50 at M = 1, 1.50 to 1.50 at M = 16. Of 67 elements" in text
    assert "bfloat16 or float32 product of dequantized weights, 1 differed" in text
