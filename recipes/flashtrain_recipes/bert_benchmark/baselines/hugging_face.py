"""transformers' BertForMaskedLM with random weights, on padded batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtrain.integrations.huggingface_bert import bert_content
from flashtrain_recipes.bert_benchmark.batches import (
    BUCKETS,
    FULL,
    RANDOM,
    Sequences,
    bucket_batches,
    padded,
    random_batches,
)
from flashtrain_recipes.bert_benchmark.cases import BertCase
from flashtrain_recipes.harness.rows import Row
from flashtrain_recipes.step_benchmark.baselines.hugging_face import HuggingFace
from flashtrain_recipes.step_benchmark.training_step import TrainingStep, usual_step


class HuggingFaceBert(HuggingFace):
    """transformers' BertForMaskedLM as a baseline.

    Args:
        implementation: what its rows have in the column `implementation`.
        batching: RANDOM, or BUCKETS for batches of sequences of like length.
    """

    def __init__(self, name: str, implementation: str, *, batching: str, **options: Any) -> None:
        title = implementation if batching == RANDOM else f"{implementation}, {batching}"
        super().__init__(name, title, **options)
        self.implementation, self.batching = implementation, batching

    def applies(self, case: BertCase) -> bool:
        return bool(case.unit) or self.batching != BUCKETS

    def columns(self, case: BertCase | None) -> Row:
        full = case is not None and not case.unit
        own = {"implementation": self.implementation, "padding": FULL if full else self.batching}
        return {**super().columns(case), **own}

    def build(self, case: BertCase, device: torch.device) -> TrainingStep:
        from transformers import AutoModelForMaskedLM, BertConfig

        config = BertConfig(**bert_content(case.config(), "BertForMaskedLM", 0, torch.float32))
        with torch.device(device):
            model = AutoModelForMaskedLM.from_config(
                config, attn_implementation=self.attention
            ).train()
        # Length buckets are batches of some sixteen shapes: compiled once for
        # all, not once for each.
        forward = torch.compile(model, dynamic=self.batching == BUCKETS) if self.compiled else model
        return usual_step(model, lambda batch: forward(**batch).loss, case, device)

    def batches(
        self,
        case: BertCase,
        drawn: Sequences,  # type: ignore[override]
        device: torch.device,
    ) -> list[tuple[Any, ...]]:
        lengths, tokens = drawn.lengths, case.batch * case.context
        members = (
            bucket_batches(lengths, tokens)
            if self.batching == BUCKETS
            else random_batches(lengths, case.batch)
        )
        return [(_arguments(padded(drawn, one, device)),) for one in members]


def _arguments(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {"input_ids": batch["tokens"], "labels": batch["labels"]}
    if "lengths" in batch:
        index = torch.arange(batch["tokens"].shape[1], device=batch["tokens"].device)
        found["attention_mask"] = (index < batch["lengths"][:, None]).long()
    return found
