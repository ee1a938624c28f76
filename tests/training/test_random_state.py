"""The random numbers of a training's ranks: each its own, and the first rank's
those of one device."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flashtrain.training.random_state import KEY, RandomState


def drawn() -> tuple[int, int, int]:
    """A number of each generator."""
    return (
        random.getrandbits(32),
        int(np.random.randint(2**32, dtype=np.uint32)),
        int(torch.randint(2**32, (1,))),
    )


def first_numbers(
    rank: int, *, step: int = 0, ranks: int = 2, checkpoint: dict | None = None
) -> tuple[int, int, int]:
    """What a rank draws in its first batch, if all begin with the run's seed, or with a
    checkpoint of another place."""
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer = SimpleNamespace(
        global_rank=rank, world_size=ranks, global_step=step, strategy=strategy
    )
    callback = RandomState(7)
    if checkpoint is not None:
        callback.on_load_checkpoint(trainer, None, checkpoint)
    callback.on_train_start(trainer, None)
    callback.on_train_batch_start(trainer, None, None, 0)
    return drawn()


def all_differ(found: list[tuple[int, int, int]]) -> bool:
    return all(len(set(numbers)) == len(numbers) for numbers in zip(*found, strict=True))


@pytest.mark.parametrize(
    "checkpoint", [None, {KEY: [{}]}], ids=["a new run", "resumed on other devices"]
)
def test_ranks_drop_different_weights(checkpoint: dict | None) -> None:
    """With the run's seed on all of them, all would drop the same
    (huggingface/transformers issue 31412)."""
    found = [first_numbers(rank, step=4, ranks=4, checkpoint=checkpoint) for rank in range(4)]
    assert all_differ(found)
    assert found == [
        first_numbers(rank, step=4, ranks=4, checkpoint=checkpoint) for rank in range(4)
    ]


def test_the_first_rank_draws_what_one_device_does() -> None:
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    alone = drawn()
    assert first_numbers(0) == first_numbers(0, ranks=1) == alone
