"""A step whose attention the devices do not share is refused, before its
gradients change a weight."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from unshared_models import UNSHARED

import flashtrain
from flashtrain.distributed.context.layouts import contiguous
from flashtrain.distributed.context.sequence import ContextSequence
from flashtrain.errors import UserError
from flashtrain.models.sharded_sequence import use_sharded_sequence
from flashtrain_kernels import masks

HELD, SEQUENCE, ROWS = 12, 24, 3


@pytest.mark.parametrize("name", UNSHARED)
def test_a_model_whose_attention_is_its_own_is_refused_at_its_first_step(two, name):
    """On both ranks: no step is taken."""
    for said in (rank[name] for rank in two["unshared"]):
        assert said.startswith("0 steps: ")
        assert "own device's part" in said
    if name == "a layer of a Llama on our attention":
        assert "in FSDPMixing.mixer.attention)" in said


def test_one_without_attention_is_refused_in_validation_too_and_trains_where_reported_so(two):
    for rank in two["unshared"]:
        assert (
            "a validation step in which no attention is shared by the 2 devices"
            in rank["validated"]
        )
        assert all(map(math.isfinite, rank["unchecked"]))


def test_a_step_that_steps_its_optimizer_itself_is_refused_before_it_does(two):
    for refused, steps, shared in two["unshared_by_hand"]:
        assert "0 steps: a training step in which no attention is shared" in refused
        assert steps == 0
        assert shared == "2 steps"


MORE = "tokens see each other by more than shared attention"


def test_a_registered_model_with_a_recurrence_is_refused_and_reports_how_to_declare_it(two):
    for rank in two["mixing"]:
        assert rank["recurrence"].startswith(
            f"0 steps: a training step in which {MORE} (stack in the step itself)"
        )
        assert "declare shares_sequences = True in the class of the model" in rank["recurrence"]
        assert rank["without"] == rank["declared"] == "2 steps"


def test_more_than_attention_is_refused_before_an_optimizer_steps_and_in_validation(two):
    for rank in two["mixing"]:
        refused, steps = rank["by hand"]
        assert f"0 steps: a training step in which {MORE}" in refused
        assert steps == 0
        assert (
            f"a validation step in which {MORE} (cumsum in FSDPMixing.mixer)" in rank["validated"]
        )


def test_the_probe_leaves_no_trace(two):
    """Losses with dropout and noise, counts, lists, metrics, logs and frozen parts: as
    where nothing is probed."""
    for rank in two["mixing"]:
        probed, known = rank["watched"]
        assert probed == known
        assert probed[1] == len(probed[2]) == 2
        assert probed[5] == ["decoder.embedding"]


def sequence(degree: int = 2) -> ContextSequence:
    group: Any = SimpleNamespace(size=degree, rank=0, data_group=None)
    return ContextSequence(
        contiguous(masks.causal(SEQUENCE), degree), group, tokens=ROWS * SEQUENCE
    )


class Task(pl.LightningModule):
    """A step that is passed over, one that mixes tokens by the attention that devices
    share, or one that does not."""

    def __init__(self, *, attention: bool = True, passes: bool = False) -> None:
        super().__init__()
        self.embedding, self.attention, self.passes = torch.nn.Embedding(29, 16), attention, passes
        self.shared = flashtrain.Attention(16, 2)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor | None:
        LENGTHS.append(batch["tokens"].shape[1])
        x = self.embedding(batch["tokens"])
        return None if self.passes else (self.shared(x) if self.attention else x).sum()

    validation_step = training_step


LENGTHS: list[int] = []
BATCH = {"tokens": torch.arange(HELD)[None]}


def strategy(
    degree: int, task: pl.LightningModule, **options: Any
) -> flashtrain.ContextParallelStrategy:
    own = flashtrain.ContextParallelStrategy(degree, timeout_seconds=None, **options)
    own.sequence = sequence(degree)
    own._lightning_module = task
    LENGTHS.clear()
    return own


def step(own: flashtrain.ContextParallelStrategy, kind: str) -> str:
    """A step as Lightning takes it, of which here only what comes before it matters."""

    def taken(batch: Any, index: int) -> str:
        return "taken"

    taken.__name__ = f"{kind}_step"
    return own._step(kind, taken, BATCH, 0)


def test_only_the_first_step_of_a_kind_is_probed():
    own = strategy(2, Task())
    for kind, probed in (("validation", 2), ("training", 4), ("training", 4), ("validation", 4)):
        assert step(own, kind) == "taken"
        assert (len(LENGTHS), set(LENGTHS)) == (probed, {13})


def test_a_training_step_that_is_passed_over_leaves_the_next_to_be_probed():
    task = Task(attention=False, passes=True)
    own = strategy(2, task)
    assert step(own, "training") == "taken"
    task.passes = False
    with pytest.raises(UserError, match="a training step in which no attention is shared"):
        step(own, "training")


@pytest.mark.parametrize(("degree", "options"), [(1, {}), (2, {"check_attention": False})])
def test_one_device_and_whoever_reports_it_are_not_probed(degree, options):
    assert step(strategy(degree, Task(attention=False), **options), "training") == "taken"
    assert LENGTHS == []


def test_what_fails_on_a_few_tokens_says_how_to_declare_it():
    class Patches(Task):
        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> Any:
            return super().training_step({"tokens": batch["tokens"].view(-1, 4)}, index)

    with pytest.raises(
        UserError, match=r"Patches.training_step fails on 13 tokens \(.*declare shares_sequences"
    ):
        step(strategy(2, Patches()), "training")
    Patches.shares_sequences = True
    assert step(strategy(2, Patches()), "training") == "taken"


def test_an_own_part_is_refused_in_later_steps_too_where_our_own_code_is_asked():
    from flashtrain.integrations.huggingface_attention import attention

    q = torch.randn(1, 2, HELD, 8)
    with (
        use_sharded_sequence(sequence()),
        pytest.raises(UserError, match="Identity: attention of 12 keys"),
    ):
        attention(torch.nn.Identity(), q, q, q, None)
    with use_sharded_sequence(sequence(degree=1)):
        attention(torch.nn.Identity(), q, q, q, None)
