"""Score a language model on held-out documents by position, beside a control: the same tokens
behind the first half of another document.

N documents, S scored tokens of a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from flashtrain.announce import say
from flashtrain.data.packing import Spans
from flashtrain.errors import UserError
from flashtrain.folders.new_folder import make_unique
from flashtrain.report.figures import Rows, line_figure
from flashtrain.report.rows import RESULT, Row, read_result, write_result
from flashtrain.report.table import make_table
from flashtrain.settings.settings import Settings
from flashtrain.tasks.attention_masks import make_mask
from flashtrain.tasks.held_out import why_not_held_out
from flashtrain.tasks.language.evaluate import held_out_data, read_model
from flashtrain.training.hardware import Hardware
from flashtrain.training.memory_measure import AUTOCAST
from flashtrain_recipes.long_context.evaluate import document_losses
from flashtrain_recipes.long_context.intervals import draws, mean_interval
from flashtrain_recipes.scored_command import scored_command

FIRST_EDGE = 256  # tokens of the first range of positions; each later range is twice as long
_OF_TEXT = (
    "data.source", "data.path", "data.validation_path", "data.validation_fraction",
    "data.split_context",
)  # fmt: skip
COLUMNS = (
    "position", "loss", "loss_low", "loss_high", "other_document", "gain", "gain_low", "gain_high",
    "documents",
)  # fmt: skip
COMPARED = ("difference", "difference_low", "difference_high")


def score_positions(settings: Settings, hardware: Hardware) -> dict[str, Any]:
    """Score the model of settings.checkpoint, `weights` or model.path, print the table, write
    positions/result.json in the run's folder (without one in the output folder), and return
    {"rows": the rows}.

    Raises:
        UserError: fewer than two documents are long enough, or positions.against is of others.
    """
    options = settings.positions
    try:
        others = read_result(options.against).rows if options.against else None
    except (OSError, UserError) as error:
        raise UserError(f"positions.against: {error}") from error
    length = options.length or settings.context
    context = settings.context if options.stride else max(settings.context, length)
    trained = read_model(settings.having(context=context), hardware)
    data = held_out_data(trained, settings, hardware)
    data.prepare_data()
    data.setup()
    documents = whole_documents(
        data.cache.tokens,
        data.split.validation,
        length=length,
        at_least=max(options.at_least or 0, length + 1),
        most=options.documents,
    )
    text = crc32(documents.numpy().tobytes())
    if others is not None:
        check_same(others, text, length)
    mask, dtype = make_mask(settings.applied_mask, packed=False), AUTOCAST.get(hardware.precision)
    reads = {"context": context, "stride": options.stride, "mask": mask}
    with torch.autocast(hardware.kind, dtype=dtype, enabled=dtype is not None):
        losses = document_losses(trained.model, documents, **reads)
        control = document_losses(trained.model, behind_another(documents), **reads)
    model = {
        "model": settings.named(settings.model.label),
        "context": settings.context,
        "step": trained.step,
        "length": length,
        "text": text,
    }
    rows = [{**model, **row} for row in position_rows(losses, control, seed=settings.seed)]
    if others is not None:
        rows = differences(rows, others, seed=settings.seed)
    doubt = why_not_held_out(trained.settings, trained.folder)
    say(
        f"{trained.checkpoint}: {len(documents)} documents of {data.source.describe()}, "
        f"{length:,} tokens of each, loss in nats a token" + (f"; {doubt}" if doubt else "")
    )
    shown = COLUMNS if others is None else COLUMNS[:5] + COMPARED
    make_table(rows, shown, "other_document: behind another document's first half").print()
    own = settings.checkpoint is not None
    parent = trained.folder if own else Path(settings.output) / trained.folder.name
    folder = make_unique(parent, "positions")
    given = settings.having(positions=replace(options, length=length))
    command = scored_command(given, "positions", *_OF_TEXT)
    write_result(folder / RESULT, settings.recipe, command, rows)
    positions_figure(rows, folder / "positions.png")
    say(f"the result's rows and its figure are in {folder}")
    return {"rows": rows}


def whole_documents(
    tokens: Any, held_out: Spans | None, *, length: int, at_least: int, most: int
) -> Tensor:
    """Return the beginnings of up to `most` held-out documents of `at_least` tokens, (N, length +
    1) int64: length inputs, and the label of the last. Raises UserError for fewer than two."""
    spans = held_out or Spans(np.empty(0, int), np.empty(0, int))
    chosen = np.flatnonzero(spans.lengths >= at_least)[:most]
    if len(chosen) < 2:
        raise UserError(
            f"{len(chosen)} held-out documents have {at_least} tokens or more, expected 2: lower "
            "positions.length (recipe=extend's is the longest stage's context), or hold out more "
            "and longer text, such as data.path=OTHER_TEXT."
        )
    begins = spans.begins[chosen].tolist()
    return torch.from_numpy(
        np.stack([tokens[begin : begin + length + 1] for begin in begins]).astype(np.int64)
    )


def behind_another(documents: Tensor) -> Tensor:
    """Return the documents, each with its first half replaced by the next document's first half."""
    half = documents.shape[1] // 2
    return torch.cat((documents.roll(-1, dims=0)[:, :half], documents[:, half:]), dim=1)


def position_rows(losses: np.ndarray, control: np.ndarray, *, seed: int) -> list[Row]:
    """Return a row for each range of positions: the mean loss, the control's in the second half
    of the documents, and what the own first half gains, each with its 95% interval.

    Args:
        losses, control: (N, S) nats: position i is the label of token i of the input.
        seed: of the resampling of whole documents.
    """
    documents, length = losses.shape
    drawn, half = draws(documents, seed), (length + 1) // 2
    rows: list[Row] = []
    for begin, end in zip(edges := _edges(length), edges[1:], strict=False):
        counts = np.full(documents, end - begin)
        measured = {"loss": losses[:, begin:end]}
        if begin >= half:  # the control's first label of the second half is at `half`
            measured["other_document"] = control[:, begin:end]
            measured["gain"] = control[:, begin:end] - losses[:, begin:end]
        row: Row = {"position": f"{begin:,} to {end:,}", "begin": begin, "end": end}
        for name, values in measured.items():
            found = mean_interval(values.sum(axis=1), counts, drawn)
            row |= {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
        means = " ".join(f"{mean:.5f}" for mean in measured["loss"].mean(axis=1))
        rows.append({**row, "documents": documents, "losses": means})
    return rows


def differences(rows: Sequence[Row], others: Rows, *, seed: int) -> list[Row]:
    """Return the rows with their loss less that of `others`, another result's rows of the same
    documents (check_same), and its 95% interval, resampled in pairs."""
    found = []
    for both in zip(rows, others, strict=True):
        ours, theirs = (np.array(row["losses"].split(), dtype=float) for row in both)
        drawn = draws(len(ours), seed)
        less = mean_interval(ours - theirs, np.ones(len(ours)), drawn)
        found.append({**both[0], **dict(zip(COMPARED, less, strict=True))})
    return found


def check_same(others: Rows, text: int, length: int) -> None:
    """Raise UserError unless `others` are rows of these documents, by `text` and `length`."""
    found = [(row.get("text"), row.get("end")) for row in others]
    if found != [(text, end) for end in _edges(length)[1:]]:
        raise UserError(
            "positions.against is of other documents: expected a result.json of mode=positions "
            "with the same tokenizer, text, positions.length and positions.documents."
        )


def _edges(length: int) -> list[int]:
    doubled = [FIRST_EDGE << power for power in range(length.bit_length())]
    return [0, *sorted({*(edge for edge in doubled if edge < length), (length + 1) // 2, length})]


def positions_figure(rows: Rows, path: str | Path) -> Path:
    """Draw the loss by position, with 95% intervals, beside the loss behind another document."""
    drawn = [{**row, "series": "own document"} for row in rows] + [
        {**row, "series": "another document before", "loss": row["other_document"],
         "loss_low": row["other_document_low"], "loss_high": row["other_document_high"]}
        for row in rows if row.get("other_document") is not None
    ]  # fmt: skip
    differ = [name for name in ("model", "context") if len({row.get(name) for row in rows}) > 1]
    groups = (*differ, "series")
    return line_figure(drawn, "end", "loss", groups, path, title="Loss by position")
