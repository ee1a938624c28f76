"""BERT's and classifiers' micro-batches on GPUs of different memory, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashtrain.command.compose import compose_settings
from flashtrain.data.sequences import SequenceShape
from flashtrain.models import Bert, Classifier
from flashtrain.spec import task_of
from flashtrain.tasks.batching import Batching, memory_words
from flashtrain.tasks.fine_tuning.prepare import choose_head_batching, encoder_config, make_head
from flashtrain.tasks.masked_language.batching import check_masked_step, choose_masked_batching
from flashtrain.tasks.masked_language.plan import bert_config
from flashtrain.tasks.plan_text import memory_plan
from flashtrain.training.hardware import Hardware, detect_hardware
from flashtrain.training.memory import GIB
from flashtrain_recipes.arena.build import choose_stage_batching, classifier_config
from flashtrain_recipes.arena.stages import stages_of


def gpu(gib: float) -> Hardware:
    """A GPU with so much free memory."""
    free = round(gib * GIB)
    return replace(
        detect_hardware("cpu"), kind="cuda", name="a GPU", precision="bf16-mixed",
        attention="flash",
        free_memory_bytes=free, total_memory_bytes=free, peak_flops=1e15,
    )  # fmt: skip


def pathx(hardware: Hardware, *words: str, stage: int = -1) -> Batching:
    settings = stages_of(compose_settings(["recipe=pathx", *words]))[stage].settings
    side = settings.pathfinder.side
    with torch.device("meta"):
        model = Classifier(
            classifier_config(settings.classifier, SequenceShape(2, side * side, side=side))
        )
    return choose_stage_batching(settings, hardware, model)


def bert(hardware: Hardware, *words: str, padding: float | None = None) -> Batching:
    settings = compose_settings(["recipe=bert", *words])
    check_masked_step(settings)
    with torch.device("meta"):
        model = Bert(bert_config(settings, 30522))
    return choose_masked_batching(settings, hardware, model, padding)


def test_a_large_gpu_takes_all_of_a_step_at_once_and_a_small_one_a_part_of_it() -> None:
    found = [pathx(gpu(gib)) for gib in (140, 10)]
    assert [one.micro_batch * one.accumulate for one in found] == [96, 96]
    assert found[0].micro_batch == 96
    assert found[1].micro_batch < 96
    assert all(one.fits and one.savings.checkpointing == "none" for one in found)


def test_what_is_asked_for_stays_and_takes_the_savings_that_it_needs() -> None:
    assert pathx(gpu(140), "trainer.micro_batch=4").micro_batch == 4
    small = bert(gpu(24))
    assert (small.micro_batch, small.savings.checkpointing) == (32768, "selective")
    assert bert(gpu(140)).savings.checkpointing == "none"
    assert (
        bert(gpu(140), "memory.activation_checkpointing=selective").savings.checkpointing
        == "selective"
    )


def test_padded_rows_need_memory_for_their_padding() -> None:
    packed, unread, read = (
        bert(
            gpu(140),
            "memory.activation_checkpointing=none",
            f"masked.layout={layout}",
            padding=padding,
        ).estimate.activations
        for layout, padding in (("packed", None), ("padded", None), ("padded", 1.0))
    )
    assert unread > 4 * packed
    assert read < 1.5 * packed  # more than 1: padded rows are not compiled


def test_without_a_budget_bert_takes_as_many_tokens_as_fit() -> None:
    budgets = [bert(gpu(gib), "masked.token_budget=null").micro_batch for gib in (140, 40, 12)]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] == 65536
    assert all(65536 % budget == 0 and budget >= 512 for budget in budgets)
    assert budgets[2] < 32768
    roomy = replace(detect_hardware("cpu"), free_memory_bytes=None)
    assert bert(roomy, "masked.token_budget=null").micro_batch == 16384


def test_fine_tuning_takes_no_more_texts_than_tokens_at_once_holds() -> None:
    settings = compose_settings(
        ["recipe=bert-finetune", "context=4096", "finetune.tokens_at_once=32768"]
    )

    def chosen(gib: float) -> Batching:
        with torch.device("meta"):
            model = make_head(settings, gpu(gib), encoder_config(settings, 30522), 4)
        return choose_head_batching(settings, gpu(gib), model)

    assert chosen(140).micro_batch == 8
    assert chosen(8).micro_batch < 8


def test_a_cpu_is_chosen_for_by_its_memory_too() -> None:
    poor = replace(detect_hardware("cpu"), free_memory_bytes=2 * GIB)
    assert pathx(poor).micro_batch < 96
    assert pathx(replace(poor, free_memory_bytes=None)).micro_batch == 96


def test_the_announcement_and_the_plan_name_the_estimate() -> None:
    batching = bert(gpu(20), "memory.activation_checkpointing=none")
    assert not batching.fits
    assert "GiB, more than 90% of what is free)" in memory_words(batching)
    settings = compose_settings(["recipe=bert"])
    lines = memory_plan(settings, gpu(20), batching, lambda _: batching)
    assert lines[0].startswith("memory: ")


@pytest.mark.parametrize(
    "recipe", ["bert", "pathx", "path256", "lra-listops", "lra-text", "lra-image", "bert-finetune"]
)
def test_every_plan_prints_it(recipe: str) -> None:
    settings = compose_settings([f"recipe={recipe}", "mode=plan"])
    text = task_of(settings).plan(settings, gpu(80))
    # Once for each length and batch.
    assert text.count("memory: ") == {"pathx": 6, "path256": 9}.get(recipe, 1)
    assert "activations" in text
