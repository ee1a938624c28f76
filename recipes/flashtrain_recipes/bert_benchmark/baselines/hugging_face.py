"""transformers' BertForMaskedLM, random weights, padded."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

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

_HIDDEN_ACT = {"gelu": "gelu_pytorch_tanh", "gelu_exact": "gelu"}


class HuggingFaceBert(HuggingFace):
    """batching: RANDOM or BUCKETS. may_compile: see StepBaseline."""

    def __init__(self, name: str, implementation: str, *, batching: str, may_compile: bool, **options: Any) -> None:
        title = implementation if batching == RANDOM else f"{implementation}, {batching}"
        super().__init__(name, title, **options)
        self.implementation, self.batching, self.may_compile = implementation, batching, may_compile

    def applies(self, case: BertCase) -> bool:
        """Full rows have no length buckets."""
        return bool(case.unit) or self.batching != BUCKETS

    def columns(self, case: BertCase | None) -> Row:
        full = case is not None and not case.unit
        own = {"implementation": self.implementation, "padding": FULL if full else self.batching}
        return {**super().columns(case), **own}

    def build(self, case: BertCase, device: torch.device) -> TrainingStep:
        model = hugging_face_bert(case, device, self.attention)
        # Length buckets are batches of some sixteen shapes: compiled once for all, not once for each.
        forward = torch.compile(model, dynamic=self.batching == BUCKETS) if self.compiled else model
        return usual_step(model, partial(_loss, forward), case, device)

    def batches(self, case: BertCase, drawn: Sequences, device: torch.device) -> list[tuple[Any, ...]]:  # type: ignore[override]
        lengths, tokens = drawn.lengths, case.batch * case.context
        members = bucket_batches(lengths, tokens) if self.batching == BUCKETS else random_batches(lengths, case.batch)
        return [(_arguments(padded(drawn, one, device)),) for one in members]


def hugging_face_bert(case: BertCase, device: torch.device, attention: str) -> Any:
    """transformers' model of the case's shape, activation and dropout."""
    from transformers import AutoModelForMaskedLM, BertConfig

    shape = case.config()
    config = BertConfig(
        vocab_size=shape.vocab_rows, max_position_embeddings=shape.context, hidden_size=shape.embed,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, intermediate_size=shape.ffn,
        hidden_act=_HIDDEN_ACT[case.activation], hidden_dropout_prob=case.dropout,
        attention_probs_dropout_prob=case.dropout,
    )  # fmt: skip
    with torch.device(device):
        model = AutoModelForMaskedLM.from_config(config, attn_implementation=attention)
    return model.train()


def _arguments(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {"input_ids": batch["tokens"], "labels": batch["labels"]}
    if "lengths" in batch:
        index = torch.arange(batch["tokens"].shape[1], device=batch["tokens"].device)
        found["attention_mask"] = (index < batch["lengths"][:, None]).long()
    return found


def _loss(forward: Any, batch: dict[str, Tensor]) -> Tensor:
    return cast(Tensor, forward(**batch).loss)
