"""recipe=bert-speed: whole training steps of BERT, flashtrain beside Hugging Face, all taking turns.

Cases: full rows of each of benchmark.contexts, and benchmark.samples sequences of the lengths that the text's
benchmark.units have, up to the longest of these; each at every benchmark.dropouts. A turn of such a case trains on all
of its sequences once, in as many optimiser steps as the implementation's batches are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from flashtrain.data.masking import MaskedBatch
from flashtrain.models.bert import Bert
from flashtrain.report.rows import values_of
from flashtrain.report.table import Table, make_table
from flashtrain.settings.settings import Settings
from flashtrain.tasks import MaskedLanguageModel
from flashtrain.tasks.masked_language.build import make_masked_task
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.benchmark_runner.measuring import Row
from flashtrain_recipes.benchmark_runner.run import Run
from flashtrain_recipes.bert_benchmark.cases import (
    BUCKETS,
    FULL,
    PACKED,
    RANDOM,
    BertCase,
    Sequences,
    bucket_batches,
    cases,
    masked_batches,
    packed_batches,
    padded_arguments,
    padded_batches,
    with_lengths,
)
from flashtrain_recipes.step_benchmark.contenders import NO_END, HuggingFace, precision_of
from flashtrain_recipes.step_benchmark.run import StepBenchmark
from flashtrain_recipes.step_benchmark.training_step import Batches, Contender, TrainingStep, task_step, usual_step

OURS = "flashtrain"
_CASE = ("model", "length", "longest", "dropout", "weights")
_COLUMNS = (
    "model", "length", "dropout", "weights", "implementation", "padding", "batch", "rows_per_second",
    "real_tokens_per_second", "mfu", "peak_memory_gib", "over_random_batches", "over_length_buckets",
    "without_dropout", "compile_seconds", "status",
)  # fmt: skip

Rows = Sequence[Mapping[str, Any]]


class BertSteps(StepBenchmark):
    """Every model, precision of weights, dropout, context and unit of the text asked for."""

    def __init__(self, settings: Settings, hardware: Hardware) -> None:
        super().__init__(settings, hardware)
        self.todo: list[BertCase] = cases(settings)

    def everyone(self, compiled: bool) -> list[BertContender]:
        return all_bert_contenders(self.settings, self.hardware, compiled=compiled)

    def line(self) -> str:
        asked, activation = self.asked, self.settings.bert.activation
        form = "the exact form" if activation == "gelu_exact" else "the tanh form"
        names = "; ".join(one.title for one in self.contenders)
        return (
            f"BERT's training steps: {len(self.todo)} cases, {asked.rounds} rounds of {asked.steps} steps"
            f"{self.limit()}, {activation or 'gelu'} on all sides ({form}), on {self.hardware.name}: {names}"
        )

    def case_line(self, case: BertCase) -> str:
        return f"{case}, batch {', '.join(map(str, self.batches_of(case)))}"

    def prepared(self) -> list[BertCase]:
        return [with_lengths(case, self.settings, self.hardware) for case in super().prepared()]

    def taking_part(self, case: BertCase) -> list[BertContender]:
        """Full rows have no length buckets."""
        return [one for one in self.contenders if case.unit or one.batching != BUCKETS]

    def together(self, case: BertCase) -> list[list[int]]:
        # Sequences of a text's lengths are all trained on in a call: a measurement has one batch then.
        batches = self.batches_of(case)
        return [[batch] for batch in batches] if case.unit else [batches]

    def row(self, row: Row, case: BertCase, batches: Sequence[int]) -> Row:
        """A row of StepMeasurement in this table's words. batch: rows of a padded step, whatever a call trained on."""
        contender = next(one for one in self.contenders if one.title == row["implementation"])
        batch = batches[0] if case.unit else row["batch"]
        peak = self.hardware.peak_flops
        seconds = None if not row.get("milliseconds") else row["milliseconds"] / 1e3
        lengths = None if batch is None else case.lengths_of(batch)
        rates: Row = dict.fromkeys(("rows_per_second", "real_tokens_per_second", "mfu"))
        if seconds is not None and lengths is not None:
            rates = {
                "rows_per_second": round(len(lengths) / seconds, 2),
                "real_tokens_per_second": round(float(lengths.sum()) / seconds, 1),
                "mfu": None if peak is None else round(case.flops_of(batch) / seconds / peak, 4),
            }
        left_out = ("implementation", "model", "context", "batch", "tokens_per_second", "mfu")
        return {
            "implementation": contender.implementation,
            "model": case.model,
            "length": case.unit or case.context,
            "longest": case.context,
            "padding": contender.padding(case),
            "dropout": case.dropout,
            "batch": batch,
            **rates,
            **{key: value for key, value in row.items() if key not in left_out},
            "activation": case.activation,
            "title": contender.title,
        }

    def told(self, rows: Sequence[Row]) -> str:
        told = [f"{row['title']} {row['rows_per_second']:,.1f}" for row in rows if row["rows_per_second"]]
        return f"sequences/s: {'; '.join(told) or 'nothing could be measured'}"

    def completed(self, run: Run) -> list[Row]:
        return judged(run.rows)

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        return [bert_table(rows)]

    def best(self, rows: Sequence[Row]) -> dict[str, float]:
        """Packed flashtrain's sequences/s in each case."""
        return {
            f"rows_per_second_{row['model']}_{row['length']}_dropout_{row['dropout']:g}": row["rows_per_second"]
            for row in rows
            if row["implementation"] == "flashtrain, packed" and row.get("rows_per_second")
        }


def judged(rows: Rows) -> list[Row]:
    """The rows; flashtrain's with over_random_batches and over_length_buckets, real tokens/s over those of the fastest
    Hugging Face row of its case that is batched so (full rows count as random batches). Rows with dropout have
    without_dropout: the time over that of the same implementation and batch without. None where there is no figure."""
    found = []
    for row in rows:
        told: Row = {key: value for key, value in row.items() if key != "title"}
        rate = _rate(row)
        if rate and row["implementation"].startswith(OURS):
            peers = [one for one in rows if _case(one) == _case(row) and not one["implementation"].startswith(OURS)]
            for name, buckets in (("over_random_batches", False), ("over_length_buckets", True)):
                best = max((_rate(one) for one in peers if (one["padding"] == BUCKETS) == buckets), default=0.0)
                told[name] = round(rate / best, 3) if best else None
        if rate and row["dropout"]:
            without = [one for one in rows if _alike(one, row) and not one["dropout"]]
            told["without_dropout"] = round(_rate(without[0]) / rate, 3) if without else None
        found.append(told)
    return found


def bert_table(rows: Rows) -> Table:
    """All rows, case by case."""
    columns = [key for key in _COLUMNS if values_of(rows, key)]
    return make_table(rows, columns, "BERT's training steps; real tokens are those that are no padding")


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    keys = ("model", "length", "longest", "weights", "implementation", "padding", "batch")
    return bool(_rate(one)) and all(one[key] == other[key] for key in keys)


def _case(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in _CASE)


def _rate(row: Mapping[str, Any]) -> float:
    return float(row.get("real_tokens_per_second") or 0.0)


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
