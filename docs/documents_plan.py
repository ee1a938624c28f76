"""Compute recipes/results/documents-plan.json: the expected seconds of a step of packed documents,
each row over a fixed number of GPUs, and documents planned over all of them.

python docs/documents_plan.py books-train.jsonl.xz    # ten minutes on a CPU; nothing is measured
"""

from __future__ import annotations

import json
import lzma
import random
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashtrain.data.packages import PackagesSource
from flashtrain.distributed.context.cost import expected_seconds
from flashtrain.distributed.context.document_costs import DocumentCosts
from flashtrain.distributed.context.document_plan import plan_documents
from flashtrain.distributed.context.layouts import balanced
from flashtrain.distributed.context.methods import ALL_GATHER, choose_method, gather_needed
from flashtrain.distributed.context.traffic import Sizes, near_ranks
from flashtrain.distributed.context.work import attention_work, imbalance, visible_keys
from flashtrain.models.layer_spec import layers_alike
from flashtrain.report.rows import write_result
from flashtrain_kernels import masks

RESULT = Path(__file__).resolve().parents[1] / "recipes" / "results" / "documents-plan.json"
GPUS, MACHINE = (8, 16, 32, 64, 128, 256, 512), 8
CONTEXT, HELD = 262144, 65536  # tokens of a row, and of a GPU in a micro-batch
STEPS = 3  # of which the mean is taken
ROWS = 24  # whose cost over each degree is computed; longer steps repeat them in another order
BYTES_OF_TOKEN = 4
LAYERS, HEADS, KV_HEADS, HEAD_DIM, PARAMETERS = 36, 32, 8, 128, 7.57e9  # Qwen3-8B's, no embedding
MEDIAN, SPREAD = 2048, 1.6  # of the long-tailed set's lengths, log-normal up to CONTEXT


def costs_on(gpus: int) -> DocumentCosts:
    layers = layers_alike(LAYERS, HEADS * HEAD_DIM, HEADS, KV_HEADS, 12288, "swiglu")
    return DocumentCosts(layers, 6 * PARAMETERS, near_ranks(gpus, MACHINE))


def long_tailed() -> list[int]:
    draw = random.Random(0)
    lengths = (round(draw.lognormvariate(float(np.log(MEDIAN)), SPREAD)) for _ in range(40_000))
    return [min(CONTEXT, max(16, length)) for length in lengths]


def books(path: str) -> list[int]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        texts = (json.loads(line)["text"] for line in lines)
        return [len(text.encode()) // BYTES_OF_TOKEN for text in texts]


def code() -> list[int]:
    return [len(text.encode()) // BYTES_OF_TOKEN for text in PackagesSource().documents()]


def rows_of(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Documents in random order, end to end, cut into ROWS rows."""
    rows: list[tuple[int, ...]] = []
    mixed, draw = [one for one in lengths if one], random.Random(1)
    draw.shuffle(mixed)
    row: list[int] = []
    while len(rows) < ROWS:
        for length in mixed:
            while length:
                part = min(length, CONTEXT - sum(row))
                row, length = [*row, part], length - part
                if sum(row) == CONTEXT:
                    rows.append(tuple(row))
                    row = []
    return rows[:ROWS]


@cache
def row_seconds(row: tuple[int, ...], degree: int, near: int) -> float:
    """The seconds of one row over `degree` GPUs in the layout `balanced`, by the method that auto
    takes for it."""
    ids = torch.from_numpy(np.repeat(np.arange(len(row)), row))[None]
    mask = masks.document(ids, causal=True)
    layout, seen = balanced(mask, degree), visible_keys(mask)
    sizes = Sizes(degree, HEADS, KV_HEADS, HEAD_DIM, layout.held, 2, near)
    choice, _ = gather_needed(choose_method("auto", sizes), "auto", mask, layout)
    uneven = imbalance(attention_work(layout, seen)) if choice.method == ALL_GATHER else 1.0
    sizes = sizes._replace(visible=uneven * float(seen.double().mean()))
    if "of other ranks" in choice.why:
        share = choice.traffic.forward / (2 * (degree - 1) * KV_HEADS * HEAD_DIM * 2 * layout.held)
        seconds = expected_seconds(sizes, 1, gathers=True, share=share)
    else:
        gathers = choice.method == ALL_GATHER
        seconds = expected_seconds(sizes, choice.heads_degree, gathers=gathers)
    return LAYERS * seconds + layout.held * costs_on(degree).token


def row_of(name: str, rows: Sequence[tuple[int, ...]], gpus: int) -> dict[str, Any]:
    count, costs, draw = gpus * HELD // CONTEXT, costs_on(gpus), random.Random(gpus)
    fixed: dict[int, float] = {}
    planned, ideal, shared = 0.0, 0.0, 0.0
    for _ in range(STEPS):
        step = [rows[number % ROWS] for number in range(count)]
        draw.shuffle(step)
        lengths = [length for row in step for length in row]
        plan = plan_documents(lengths, gpus, costs)
        planned += float(max(plan.seconds_of(costs))) / STEPS
        ideal += sum(costs.seconds(length, 1) for length in lengths) / gpus / STEPS
        shared += sum(place.ranks > 1 for place in plan.places.values()) / STEPS
        degree = CONTEXT // HELD
        while degree <= gpus:
            each = degree * HELD // CONTEXT  # rows of a group
            groups = [step[first : first + each] for first in range(0, count, each)]
            near = near_ranks(degree, MACHINE)
            took = max(sum(row_seconds(row, degree, near) for row in of) for of in groups)
            fixed[degree] = fixed.get(degree, 0.0) + took / STEPS
            degree *= 2
    best = min(fixed, key=fixed.__getitem__)
    return {
        "documents": name, "gpus": gpus,
        "step": f"{best}: {fixed[best]:.1f} s, {planned:.1f} s: {fixed[best] / planned:.2f} x",
        "best_degree": best, "fixed_seconds": round(fixed[best], 3),
        "planned_seconds": round(planned, 3), "gain": round(fixed[best] / planned, 3),
        "even": round(ideal / planned, 3), "divided_documents": round(shared, 1),
        **{f"degree_{degree}_seconds": round(one, 3) for degree, one in fixed.items()},
    }  # fmt: skip


def main() -> None:
    """Compute every row and write the file."""
    sets: dict[str, Callable[[], list[int]]] = {
        "long-tailed": long_tailed, "books": partial(books, sys.argv[1]), "code": code
    }  # fmt: skip
    found = []
    for name, lengths in sets.items():
        rows = rows_of(lengths())
        for gpus in GPUS:
            found.append(row_of(name, rows, gpus))
    command = "python docs/documents_plan.py books-train.jsonl.xz"
    write_result(RESULT, "documents-plan", command, found, device="computed")


if __name__ == "__main__":
    main()
