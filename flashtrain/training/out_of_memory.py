"""Report that a run ran out of memory: what was requested and free, the estimate,
and settings to change."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from flashtrain.errors import UserError
from flashtrain.training.memory import GIB, MemoryEstimate
from flashtrain.training.memory_choice import MemoryOption, option_words

# Messages of PyTorch, CUDA and cuBLAS in errors other than torch.OutOfMemoryError.
_MESSAGES = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "cudaErrorMemoryAllocation",
)
SUGGESTIONS = 3
OTHERWISE = (
    "a shorter context=, a smaller model.size=, or trainer.strategy=fsdp (or "
    "context) on more devices"
)


class OutOfMemory(UserError):
    """The device ran out of memory. The run's last checkpoint is intact."""

    status = 3


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error means that a GPU or the host ran out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _MESSAGES)


def out_of_memory_line(
    error: BaseException,
    estimate: MemoryEstimate | None,
    *,
    free_bytes: int | None,
    micro_batch: int = 0,
    alternatives: Sequence[MemoryOption] = (),
    saved: Path | None = None,
    advice: str = OTHERWISE,
) -> str:
    """Return the line to print when a run ends because it ran out of memory.

    Args:
        error: the error of torch or the system.
        estimate: the run's estimated memory; None if its model's memory cannot be estimated.
        free_bytes: free memory when the run began; None if unknown.
        micro_batch: samples of the run's micro-batch.
        alternatives: options that need less memory, fastest first.
        saved: the run folder, if it holds a checkpoint to resume from.
        advice: other settings to change, as text.
    """
    parts = [f"out of memory: {_what_happened(str(error))}"]
    if estimate is not None:
        sizes = ", ".join(f"{name} {size / GIB:.1f}" for name, size in estimate.parts().items())
        parts.append(f"The estimate was {estimate.total / GIB:.1f} GiB ({sizes})")
    if free_bytes is not None:
        parts.append(f"{free_bytes / GIB:.1f} GiB were free at the start")
    changes = [_words(option, micro_batch) for option in alternatives[:SUGGESTIONS]]
    parts.append(f"To change: {' or '.join([*changes, advice])}")
    if saved is not None:
        parts.append(f"The last checkpoint is saved: continue from it with resume={saved}")
    return ". ".join(parts) + "."


def _words(option: MemoryOption, micro_batch: int) -> str:
    size = "" if option.micro_batch == micro_batch else f" trainer.micro_batch={option.micro_batch}"
    return f"{option_words(option.savings)}{size} (estimated {option.estimate.total / GIB:.1f} GiB)"


def _what_happened(text: str) -> str:
    """Return PyTorch's long message in short: how much memory was requested, and how much was
    free."""
    requested = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", text)
    free = re.search(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free", text)
    if requested is None:
        return text.splitlines()[0].rstrip(". ") if text else "no memory left"
    request = f"{requested[1]} more were requested"
    return request if free is None else f"{request} with {free[2]} of {free[1]} free"
