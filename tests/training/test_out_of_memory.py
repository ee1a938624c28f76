"""What is said when memory runs out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashtrain.models.activation_checkpointing import MemorySavings
from flashtrain.training.memory import GIB, MemoryEstimate
from flashtrain.training.memory_choice import MemoryOption
from flashtrain.training.out_of_memory import is_out_of_memory, out_of_memory_line

TORCHS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 1.25 GiB is free. Process 1 has 138.00 GiB memory in use. Of the allocated memory "
    "130.00 GiB is allocated by PyTorch.\n"
    "more"
)


def gib(size: float) -> int:
    return int(size * GIB)


def test_the_line_has_what_was_asked_for_the_estimate_by_part_and_what_to_change():
    estimate = MemoryEstimate(gib(1), gib(2), gib(4), gib(90), gib(3), gib(0.5), block=gib(20))
    less = MemoryOption(MemorySavings("selective"), 4, MemoryEstimate(0, 0, 0, gib(40), 0, 0), True)
    line = out_of_memory_line(
        torch.OutOfMemoryError(TORCHS),
        estimate,
        free_bytes=gib(139),
        alternatives=[less],
        saved=Path("runs/gpt2/1"),
    )
    assert "\n" not in line
    for part in (
        "out of memory: 2.00 GiB more were requested with 1.25 GiB of 139.80 GiB free.",
        "The estimate was 117.5 GiB (weights 1.0, gradients 2.0, optimizer 4.0, activations 90.0,",
        "139.0 GiB were free at the start",
        (
            "memory.activation_checkpointing=selective trainer.micro_batch=4 (estimated 40.0 GiB) "
            "or a shorter context="
        ),
        "resume=runs/gpt2/1",
    ):
        assert part in line


def test_a_model_without_an_estimate_gets_a_line_what_happened_and_what_always_helps():
    line = out_of_memory_line(
        RuntimeError("CUDA error: out of memory\nCompile with"), None, free_bytes=None
    )
    assert line.startswith(
        "out of memory: CUDA error: out of memory. To change: a shorter context="
    )
    assert "checkpoint" not in line
    own = out_of_memory_line(
        MemoryError(), None, free_bytes=None, advice="a smaller masked.token_budget="
    )
    assert own.endswith("a smaller masked.token_budget=.")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(TORCHS),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: "
            "you tried to allocate 5 bytes."
        ),
        MemoryError(),
    ],
)
def test_memory_runs_out_in_several_ways(error):
    assert is_out_of_memory(error)


def test_other_errors_are_not_taken_for_it():
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("out of memory"))
