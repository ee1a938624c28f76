"""recipe=bert-speed: whole training steps of BERT, flashtrain beside Hugging Face, all taking turns.

Cases: full rows of each of benchmark.contexts, and benchmark.samples sequences of the lengths that the text's
benchmark.units have, up to the longest of these; each at every benchmark.dropouts. A turn of such a case trains on all
of its sequences once, in as many optimiser steps as the implementation's batches are.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashtrain.announce import say
from flashtrain.errors import UserError
from flashtrain.settings.settings import Settings
from flashtrain.tasks.masked_language.build import make_masked_data
from flashtrain.training.hardware import Hardware
from flashtrain.training.loggers import log_table
from flashtrain_recipes.attention_benchmark.clock import clock_for
from flashtrain_recipes.attention_benchmark.measure import Row
from flashtrain_recipes.attention_benchmark.session import session
from flashtrain_recipes.bert_benchmark.case import BertCase
from flashtrain_recipes.bert_benchmark.contenders import BertContender, all_bert_contenders, contenders_of
from flashtrain_recipes.bert_benchmark.tables import bert_table, judged
from flashtrain_recipes.step_benchmark.contenders import choose_contenders
from flashtrain_recipes.step_benchmark.measure import Effort, StepMeasurement
from flashtrain_recipes.step_benchmark.run import fresh_compiler


def benchmark_bert(
    settings: Settings, hardware: Hardware, folder: Path, *, overrides: list[str], started: float
) -> dict[str, Any]:
    """Measure what the settings name, in `folder`, and return the summary row; see benchmarks.start.benchmark."""
    asked = settings.benchmark
    everything = chosen(settings, hardware)
    device = torch.device("cuda", torch.cuda.current_device()) if hardware.kind == "cuda" else torch.device("cpu")
    torch.set_float32_matmul_precision("high")
    todo = [_with_lengths(case, settings, hardware) for case in cases(settings)]
    say(plan_line(settings, hardware))
    clock = clock_for(device)
    with session(settings, hardware, folder, overrides=overrides, started=started) as run:
        results, measured = run.results, 0
        for number, case in enumerate(todo):
            left = run.seconds_left()
            if left is not None and left <= 0:
                results.note(str(case), "not measured", f"benchmark.max_seconds={asked.max_seconds:g} were over")
                continue
            batches, contenders = batches_of(settings, case), contenders_of(everything, case)
            say(f"[{number + 1}/{len(todo)}] {case}, batch {', '.join(map(str, batches))}")
            found: list[Row] = []
            # Sequences of a text's lengths are all trained on in a call: a measurement has one batch then.
            for some in [[batch] for batch in batches] if case.unit else [batches]:
                with fresh_compiler(contenders):
                    measurement = StepMeasurement(
                        case, device, clock, seed=settings.seed, note=partial(results.note, str(case))
                    )
                    share = None if left is None else left / (len(todo) - number)
                    rows = measurement.run(contenders, some, Effort(asked.rounds, asked.steps, share, run.until))
                    found += [_row(row, case, contenders, some, hardware.peak_flops) for row in rows]
                    del measurement
                gc.collect()
                clock.release()
            results.rows += found
            results.save()
            measured += 1
            told = [f"{row['title']} {row['rows_per_second']:,.1f}" for row in found if row["rows_per_second"]]
            say(f"    sequences/s: {'; '.join(told) or 'nothing could be measured'}")
        results.rows = judged(results.rows)
        if results.rows:
            bert_table(results.rows).print()
        log_table(run.loggers, "rows", results.rows)
        results.say_end(measured, len(todo))
        return run.finish({"cases": len(todo), "cases_measured": measured, **_best(results.rows)})


def plan_bert(settings: Settings, hardware: Hardware) -> str:
    """mode=plan: the cases and the implementations, and nothing started."""
    lines = [plan_line(settings, hardware)]
    lines += [f"  {case}, batch {', '.join(map(str, batches_of(settings, case)))}" for case in cases(settings)]
    return "\n".join([*lines, "nothing was started; leave out mode=plan to measure."])


def plan_line(settings: Settings, hardware: Hardware) -> str:
    """What is about to be measured, on what."""
    asked = settings.benchmark
    limit = "" if asked.max_seconds is None else f", at most {asked.max_seconds:g} s"
    names = "; ".join(one.title for one in chosen(settings, hardware))
    return (
        f"BERT's training steps: {len(cases(settings))} cases, {asked.rounds} rounds of {asked.steps} steps{limit}, "
        f"{settings.bert.activation or 'gelu'} on all sides ({_gelu(settings)}), on {hardware.name}: {names}"
    )


def cases(settings: Settings) -> list[BertCase]:
    """Every size, precision, dropout and length asked for; those of a text without its lengths yet."""
    asked = settings.benchmark
    activation = settings.bert.activation or "gelu"
    if settings.bert.family != "bert" or activation not in ("gelu", "gelu_exact"):
        raise UserError(
            f"bert.family={settings.bert.family} with {activation}: Hugging Face's BERT has neither; choose "
            "bert.family=bert, with bert.activation=gelu or gelu_exact."
        )
    longest = max(asked.contexts, default=settings.context)
    kinds = [(context, "") for context in asked.contexts] + [(longest, unit) for unit in asked.units]
    return [
        BertCase(size, context, unit, dropout, weights, activation)
        for size in asked.models
        for weights in asked.weights
        for dropout in asked.dropouts
        for context, unit in kinds
    ]


def batches_of(settings: Settings, case: BertCase) -> list[int]:
    """Rows of a padded step: as asked for, or as many as hold benchmark.tokens. A packed row holds as many tokens."""
    asked = settings.benchmark
    return sorted(set(asked.batches)) if asked.batches else [max(1, asked.tokens // case.context)]


def chosen(settings: Settings, hardware: Hardware) -> list[BertContender]:
    """The implementations that benchmark.implementations names (None: all)."""
    wanted = settings.benchmark.compile
    compiled = hardware.kind == "cuda" if wanted is None else wanted
    everything = all_bert_contenders(settings, hardware, compiled=compiled)
    return choose_contenders(everything, settings.benchmark.implementations)  # type: ignore[return-value]


def _with_lengths(case: BertCase, settings: Settings, hardware: Hardware) -> BertCase:
    """The case with lengths drawn from the text's: of its units, [CLS] and [SEP] included."""
    if not case.unit:
        return case
    told = settings.having(
        context=case.context,
        masked=replace(
            settings.masked, unit=case.unit, token_budget=max(case.context, settings.masked.token_budget or 0)
        ),
    )
    data = make_masked_data(told, hardware)
    data.setup()
    lengths = data.pieces(data.split.training).lengths + 2
    random = np.random.RandomState(settings.seed)
    drawn = random.choice(lengths, settings.benchmark.samples)
    say(
        f"{case.unit}s of {data.source.describe()} in {data.tokenizer.describe()}: {lengths.mean():.0f} tokens in the "
        f"mean, {drawn.mean():.0f} of the {len(drawn):,} drawn"
    )
    return replace(case, lengths=tuple(int(length) for length in drawn))


def _row(
    row: Row, case: BertCase, contenders: Sequence[BertContender], batches: Sequence[int], peak_flops: float | None
) -> Row:
    """A row of StepMeasurement in this table's words. batch: rows of a padded step, whatever a call trained on."""
    contender = next(one for one in contenders if one.title == row["implementation"])
    batch = batches[0] if case.unit else row["batch"]
    seconds = None if not row.get("milliseconds") else row["milliseconds"] / 1e3
    lengths = None if batch is None else case.lengths_of(batch)
    rates: Row = dict.fromkeys(("rows_per_second", "real_tokens_per_second", "mfu"))
    if seconds is not None and lengths is not None:
        rates = {
            "rows_per_second": round(len(lengths) / seconds, 2),
            "real_tokens_per_second": round(float(lengths.sum()) / seconds, 1),
            "mfu": None if peak_flops is None else round(case.flops_of(batch) / seconds / peak_flops, 4),
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


def _gelu(settings: Settings) -> str:
    return "the exact form" if settings.bert.activation == "gelu_exact" else "the tanh form"


def _best(rows: Sequence[Row]) -> dict[str, float]:
    """The summary's figures: packed flashtrain's sequences/s in each case."""
    return {
        f"rows_per_second_{row['model']}_{row['length']}_dropout_{row['dropout']:g}": row["rows_per_second"]
        for row in rows
        if row["implementation"] == "flashtrain, packed" and row.get("rows_per_second")
    }
