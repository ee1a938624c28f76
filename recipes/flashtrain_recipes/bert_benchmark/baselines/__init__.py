"""The implementations of BERT whose training steps are measured, each with a way
of batching sequences."""

from __future__ import annotations

from functools import partial

from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.bert_benchmark.baselines.flashtrain import FlashtrainBert
from flashtrain_recipes.bert_benchmark.baselines.hugging_face import HuggingFaceBert
from flashtrain_recipes.bert_benchmark.batches import BUCKETS, PACKED, RANDOM
from flashtrain_recipes.step_benchmark.training_step import StepBaseline


def all_baselines(settings: Settings, hardware: Hardware, *, compiled: bool) -> list[StepBaseline]:
    """Return one instance of every implementation, in the order of the tables.

    Args:
        compiled: whether flashtrain's models are compiled by torch.compile.
    """
    ours = partial(FlashtrainBert, settings=settings, hardware=hardware, compiled=compiled)
    found: list[StepBaseline] = [ours("flashtrain", PACKED), ours("flashtrain-padded", RANDOM)]
    for ending, batching in (("", RANDOM), ("-buckets", BUCKETS)):
        theirs = partial(HuggingFaceBert, batching=batching)
        found += [
            theirs(f"hf-eager{ending}", "Hugging Face, eager", attention="eager"),
            theirs(f"hf-sdpa{ending}", "Hugging Face, SDPA", attention="sdpa"),
            theirs(
                f"hf-sdpa-compile{ending}",
                "Hugging Face, SDPA, compiled",
                attention="sdpa",
                compiled=True,
            ),
        ]
    return found
