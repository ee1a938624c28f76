"""The one place where the measured steps of flashtrain get their memory settings: checkpointing, chunks, offload.

A case of a million tokens trains with what the command would choose for it, and its row says what that was.
"""

from __future__ import annotations

from flashtrain.settings import Settings
from flashtrain.training.hardware import Hardware


def with_memory(settings: Settings, hardware: Hardware) -> tuple[Settings, str]:
    """(the settings to train this case with, what they do for memory in a word or two: the row's column `memory`).

    settings: of one case, with context and trainer.micro_batch; hardware: with its attention and precision. "" says
    that nothing is recomputed or moved, which is all that this version can.
    """
    return settings, ""
