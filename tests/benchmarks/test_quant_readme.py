"""The page's figures of quantized products on a CPU: the faster peer counts, and the text is that of the files."""

from __future__ import annotations

from benchmarks.quant.readme import quant_section


def row(name, m, threads, ratios, differing=0):
    verdicts = [{"peer": peer, "ratio": ratio} for peer, ratio in ratios.items()]
    correctness = {"checked": 10, "differing": differing}
    return {"name": name, "format": name.split()[0], "m": m, "threads": threads, "verdicts": verdicts,
            "correctness": correctness}  # fmt: skip


def test_the_faster_peer_counts_and_later_files_replace_rows():
    stamp = {"environment": {"cpu": {"model": "A CPU", "core": "fast"}}, "llama": {"ggml": "1.2"}}
    first = {**stamp, "rows": [
        row("Q4_0 a", 1, 2, {"plain": 3.0, "repacked": 2.0, "read": 0.5}),
        row("Q4_0 b", 1, 2, {"plain": 8.0, "repacked": 9.0}),
        row("Q8_0 a", 16, 2, {"plain": 0.5}, differing=7),
    ]}  # fmt: skip
    second = {**stamp, "rows": [row("Q8_0 a", 16, 2, {"plain": 1.5})]}
    text = quant_section([first, second], ["one.json", "two.json"])
    assert "| Q4_0 | 4.00 (2.00 to 8.00) | not measured | not measured |" in text
    assert "| Q8_0 | not measured | 1.50 (1.50 to 1.50) | not measured |" in text
    assert "Of 30 output elements compared with the definition in these runs, 0 differed" in text
    for words in ("ggml 1.2", "A CPU (fast)", "M = 1, 2 threads", "`one.json`, `two.json`."):
        assert words in " ".join(text.split())
    assert ", 7 differed" in quant_section([first], ["one.json"])
