"""Compute recipes/results/context-plan.json: the context-parallel method and its expected
efficiency on many GPUs.

python docs/context_plan.py    # seconds on a CPU; nothing is measured
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashtrain.distributed.context.cost import expected_seconds, linear_seconds
from flashtrain.distributed.context.methods import ALL_GATHER, HYBRID, choose_method
from flashtrain.distributed.context.traffic import Sizes, near_ranks
from flashtrain.report.rows import write_result

RESULT = Path(__file__).resolve().parents[1] / "recipes" / "results" / "context-plan.json"
SHAPES = {"GPT-2 124M (12 x 64)": (12, 12, 64), "Llama-8B, Qwen3-8B (32/8 x 128)": (32, 8, 128)}
TOKENS = (131072, 524288, 1048576, 4194304)
GPUS = (8, 16, 32, 64, 128, 256, 512)
MACHINE = 8  # GPUs


def row_of(model: str, tokens: int, gpus: int) -> dict[str, Any]:
    """The method that `auto` takes for a causal mask, and one GPU's time over `gpus` times
    the expected time of all."""
    sizes = Sizes(gpus, *SHAPES[model], held=tokens // gpus, near=near_ranks(gpus, MACHINE))
    choice = choose_method("auto", sizes)
    seconds = expected_seconds(sizes, choice.heads_degree, gathers=choice.method == ALL_GATHER)
    efficiency = linear_seconds(sizes) / seconds
    name = f"{choice.method} {choice.heads_degree} x {gpus // choice.heads_degree}"
    name = name if choice.method == HYBRID else choice.method
    return {
        "model": model, "seqlen": tokens, "gpus": gpus, "method": f"{name}: {efficiency:.2f}",
        "efficiency": round(efficiency, 4), "attention_ms": round(seconds * 1e3, 3),
    }  # fmt: skip


def main() -> None:
    """Compute every row and write the file."""
    rows = [row_of(model, tokens, gpus) for model in SHAPES for tokens in TOKENS for gpus in GPUS]
    write_result(RESULT, "context-plan", "python docs/context_plan.py", rows, device="computed")


if __name__ == "__main__":
    main()
