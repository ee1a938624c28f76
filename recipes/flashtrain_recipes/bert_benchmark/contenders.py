"""The implementations of bert-speed: flashtrain packed and padded, and Hugging Face's BERT."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from flashtrain.data.masking import MaskedBatch
from flashtrain.models.bert import Bert
from flashtrain.settings.settings import Settings
from flashtrain.tasks import MaskedLanguageModel
from flashtrain.tasks.masked_language.build import make_masked_task
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.bert_benchmark.cases import (
    BUCKETS,
    FULL,
    PACKED,
    RANDOM,
    BertCase,
    Sequences,
    bucket_batches,
    masked_batches,
    packed_batches,
    padded_arguments,
    padded_batches,
)
from flashtrain_recipes.step_benchmark.contenders import NO_END, HuggingFace, precision_of
from flashtrain_recipes.step_benchmark.training_step import Batches, Contender, TrainingStep, task_step, usual_step

_HIDDEN_ACT = {"gelu": "gelu_pytorch_tanh", "gelu_exact": "gelu"}


class BertContender(Contender):
    """implementation: its name in the table; batching: PACKED, RANDOM or BUCKETS (the first two are alike where all
    rows are full)."""

    implementation: str
    batching: str

    def padding(self, case: BertCase) -> str:
        """How the case's sequences are batched, in the table's words."""
        return self.batching if case.unit or self.batching == PACKED else FULL


class OurBert(BertContender):
    """The model, optimiser, clipping and compilation of recipe=bert."""

    def __init__(self, name: str, batching: str, *, settings: Settings, hardware: Hardware, compiled: bool) -> None:
        self.name, self.batching, self.compiled = name, batching, compiled
        self.implementation = self.title = f"flashtrain, {'packed' if batching == PACKED else 'padded'}"
        self.settings, self.hardware = settings, hardware

    def build(self, case: BertCase, batch: int, device: torch.device) -> TrainingStep:
        settings = deepcopy(self.settings)
        settings.trainer.steps, settings.trainer.compile = NO_END, self.compiled
        settings.optimizer.master_weights = case.has_masters
        hardware = replace(self.hardware, precision=precision_of(case, self.hardware.kind))
        torch.manual_seed(0)
        with torch.device(device):
            model = Bert(case.config(), hardware.attention, settings.bert.residual)
        if case.is_bfloat16:
            model.to(torch.bfloat16)
        task = make_masked_task(settings, hardware, model.train(), {})
        batches = _kept(partial(self._batches, case, batch, device))
        return task_step(task, model, partial(_loss, task), case, device, batches=batches)

    def _batches(
        self, case: BertCase, batch: int, device: torch.device, tokens: Tensor, labels: Tensor
    ) -> list[tuple[Any, ...]]:
        drawn = Sequences.of_tensors(tokens, labels)
        budget = None
        if self.batching == PACKED:
            members, budget = packed_batches(drawn, batch * case.context)
        else:
            members = padded_batches(drawn, batch)
        return [(one,) for one in masked_batches(drawn, members, device, budget=budget)]


class HuggingFaceBert(BertContender, HuggingFace):
    """transformers' BertForMaskedLM, random weights. attention: "eager" or "sdpa". compiled: by torch.compile."""

    def __init__(
        self, name: str, title: str, batching: str, *, attention: str, compiled: bool = False, may_compile: bool = True
    ) -> None:
        told = title if batching == RANDOM else f"{title}, {batching}"
        HuggingFace.__init__(self, name, told, attention=attention, compiled=compiled, may_compile=may_compile)
        self.implementation, self.batching = title, batching

    def build(self, case: BertCase, batch: int, device: torch.device) -> TrainingStep:
        model = hugging_face_bert(case, device, self.attention)
        # Length buckets are batches of some sixteen shapes: compiled once for all, not once for each.
        forward = torch.compile(model, dynamic=self.batching == BUCKETS) if self.compiled else model
        batches = _kept(partial(self._batches, case, batch, device))
        return usual_step(model, partial(_hugging_face_loss, forward), case, device, batches=batches)

    def _batches(
        self, case: BertCase, batch: int, device: torch.device, tokens: Tensor, labels: Tensor
    ) -> list[tuple[Any, ...]]:
        drawn = Sequences.of_tensors(tokens, labels)
        bucketed = self.batching == BUCKETS
        members = bucket_batches(drawn, batch * case.context) if bucketed else padded_batches(drawn, batch)
        return [(_hugging_face_batch(padded_arguments(drawn, one, device)),) for one in members]


def hugging_face_bert(case: BertCase, device: torch.device, attention: str) -> Any:
    """transformers' model of the case's shape, activation and dropout."""
    from transformers import AutoModelForMaskedLM, BertConfig

    shape = case.config()
    config = BertConfig(
        vocab_size=shape.vocab_rows,
        max_position_embeddings=shape.context,
        hidden_size=shape.embed,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.ffn,
        hidden_act=_HIDDEN_ACT[case.activation],
        hidden_dropout_prob=case.dropout,
        attention_probs_dropout_prob=case.dropout,
    )
    with torch.device(device):
        model = AutoModelForMaskedLM.from_config(config, attn_implementation=attention)
    return model.train()


def all_bert_contenders(settings: Settings, hardware: Hardware, *, compiled: bool) -> list[BertContender]:
    """In the order of settings.BERT_IMPLEMENTATIONS. compiled: whether those that are compiled on a GPU are so here."""
    ours = partial(OurBert, settings=settings, hardware=hardware, compiled=compiled)
    found: list[BertContender] = [ours("flashtrain", PACKED), ours("flashtrain-padded", RANDOM)]
    for ending, batching in (("", RANDOM), ("-buckets", BUCKETS)):
        found += [
            HuggingFaceBert(f"hf-eager{ending}", "Hugging Face, eager", batching, attention="eager"),
            HuggingFaceBert(f"hf-sdpa{ending}", "Hugging Face, SDPA", batching, attention="sdpa"),
            HuggingFaceBert(
                f"hf-sdpa-compile{ending}",
                "Hugging Face, SDPA, compiled",
                batching,
                attention="sdpa",
                compiled=True,
                may_compile=compiled,
            ),
        ]
    return found


def _loss(task: MaskedLanguageModel, batch: dict[str, Any]) -> Tensor:
    return task.batch_loss(cast(MaskedBatch, batch))


def _hugging_face_batch(batch: dict[str, Any]) -> dict[str, Tensor]:
    found = {"input_ids": batch["tokens"], "labels": batch["labels"]}
    if batch["full"]:
        return found
    width = batch["tokens"].shape[1]
    index = torch.arange(width, device=batch["tokens"].device)
    return {**found, "attention_mask": (index < batch["lengths"][:, None]).long()}


def _hugging_face_loss(forward: Any, batch: dict[str, Tensor]) -> Tensor:
    return cast(Tensor, forward(**batch).loss)


def _kept(batches: Batches) -> Batches:
    """The same function, made once for the same tokens: batching is no part of a step."""
    known: dict[int, tuple[Tensor, Sequence[tuple[Any, ...]]]] = {}

    def once(tokens: Tensor, labels: Tensor) -> Sequence[tuple[Any, ...]]:
        if id(tokens) not in known:
            known[id(tokens)] = (tokens, batches(tokens, labels))  # with the tokens, so that their id stays theirs
        return known[id(tokens)][1]

    return once
