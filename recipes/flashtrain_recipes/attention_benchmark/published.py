"""What others have published, to stand beside what is measured here."""

from __future__ import annotations

from typing import Any

# FlashAttention (Dao et al. 2022, arXiv 2205.14135), appendix: forward + backward in milliseconds on an A100-40GB,
# batch 16, 8 heads of 64, by sequence length. "PyTorch" is standard attention, which ran out of memory at 16K.
PAPER = "FlashAttention (Dao et al. 2022), appendix, A100-40GB"
PAPER_MILLISECONDS: dict[str, dict[int, float]] = {
    "PyTorch": {512: 1.18, 1024: 3.67, 2048: 13.22, 4096: 50.44},
    "FlashAttention": {512: 0.73, 1024: 2.29, 2048: 7.64, 4096: 30.09, 16384: 470.5, 65536: 7493.0},
    "block-sparse FlashAttention": {512: 0.82, 1024: 0.88, 2048: 1.71, 4096: 3.21, 16384: 12.6, 65536: 50.4},
}
PAPER_SHAPE = {"batch": 16, "heads": 8, "kv_heads": 8, "head_dim": 64, "mask": "full", "dropout": 0.0}


def paper_rows(lengths: list[int]) -> list[dict[str, Any]]:
    """The paper's values at these lengths as rows: implementation, seqlen_q, forward_backward_milliseconds."""
    return [
        {"implementation": f"{name} (paper)", "seqlen_q": length, "forward_backward_milliseconds": value}
        for name, values in PAPER_MILLISECONDS.items()
        for length, value in values.items()
        if length in lengths
    ]


# The same paper, Table 2: days to train GPT-2 on OpenWebText on 8 A100, to the same perplexity for every
# implementation, and the speed-up over Hugging Face as printed there.
PAPER_GPT2 = "FlashAttention (Dao et al. 2022), Table 2: days on 8 A100"
PAPER_CONTEXT = 1024
PAPER_DAYS: dict[str, dict[str, float]] = {
    "124m": {"Hugging Face": 9.5, "Megatron-LM": 4.7, "FlashAttention": 2.7},
    "355m": {"Hugging Face": 21.0, "Megatron-LM": 11.5, "FlashAttention": 6.9},
}
PAPER_SPEEDUPS: dict[str, dict[str, float]] = {
    "124m": {"Hugging Face": 1.0, "Megatron-LM": 2.0, "FlashAttention": 3.5},
    "355m": {"Hugging Face": 1.0, "Megatron-LM": 1.8, "FlashAttention": 3.0},
}
