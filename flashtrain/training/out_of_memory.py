"""What a run says that ran out of memory: how much was requested and free, the estimate by part, what to change."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from flashtrain.errors import UserError
from flashtrain.training.memory import GIB, MemoryEstimate
from flashtrain.training.memory_choice import MemoryOption, option_words

# How PyTorch, CUDA and cuBLAS say it where they do not raise torch.OutOfMemoryError.
_SAID = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory", "cudaErrorMemoryAllocation")
SUGGESTIONS = 3
OTHERWISE = "a shorter context=, a smaller model.size=, or trainer.strategy=fsdp (or context) on more devices"


class OutOfMemory(UserError):
    """The device's memory did not suffice. One line; the run's last checkpoint is untouched."""

    status = 3


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out, on a GPU or in main memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SAID)


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
    """The one line to end with.

    estimate: of the run, None where its model has none. free_bytes: when the run began. micro_batch: the run's.
    alternatives: ways to run that need less, the cheapest in time first. saved: the run folder, where it holds a
    checkpoint to go on from. advice: what else to change.
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
        parts.append(f"The last checkpoint is saved: resume={saved} goes on from it")
    return ". ".join(parts) + "."


def _words(option: MemoryOption, micro_batch: int) -> str:
    size = "" if option.micro_batch == micro_batch else f" trainer.micro_batch={option.micro_batch}"
    return f"{option_words(option.savings)}{size} (estimated {option.estimate.total / GIB:.1f} GiB)"


def _what_happened(text: str) -> str:
    """PyTorch's long report in a few words: how much was asked for, and how much of what was free."""
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", text)
    free = re.search(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free", text)
    if asked is None:
        return text.splitlines()[0].rstrip(". ") if text else "no memory left"
    told = f"{asked[1]} more were asked for"
    return told if free is None else f"{told} with {free[2]} of {free[1]} free"
