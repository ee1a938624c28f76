"""recipe=gpt2-long: train at each context, score all on the same held-out tokens; the
table and the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashtrain.announce import say
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import CHECKPOINTS, FINISHED, LAST, read_summary
from flashtrain.report.figures import line_figure
from flashtrain.report.rows import Row, values_of
from flashtrain.report.table import Table, make_table
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.settings import Settings
from flashtrain.tasks.language.prepare import make_data
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.context_study import ContextStudy, run_of, trained_contexts
from flashtrain_recipes.long_context.compare import (
    LENGTHS,
    PAPER,
    PAPER_TABLE_4,
    length_rows,
    meets_the_paper,
    paper_columns,
)
from flashtrain_recipes.long_context.evaluate import Windows, held_out_windows, score_run

COLUMNS = (
    "context", "tokens", "perplexity", "perplexity_low", "perplexity_high", "against_shorter",
    "perplexity_sliding",
    "against_shorter_sliding", "tokens_per_second", "train_seconds", "time_ratio",
    "peak_memory_gib",
    "paper_perplexity", "paper_days", "paper_time_ratio",
)  # fmt: skip
_PAPER = "FlashAttention's paper, A100"
_HEIGHT = 4.2  # inches


def lengths_table(rows: Sequence[Row]) -> Table:
    """Return the table that is printed at the end of a comparison of contexts."""
    lengths = [row for row in rows if row["part"] == LENGTHS]
    first = next((row for row in lengths if row.get("scored_tokens")), None)
    scored = (
        ""
        if first is None
        else f"{first['scored_tokens']:,} held-out tokens in {first['units']} {first['unit']}"
    )
    columns = [key for key in COLUMNS if values_of(lengths, key)]
    if meets_the_paper(lengths):
        scored += f"; paper: {PAPER}"
    else:
        columns = [key for key in columns if not key.startswith("paper_")]
    return make_table(lengths, columns, scored)


def lengths_figure(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Draw perplexity with 95% intervals, and training time a token relative to the shortest
    context, against context.

    The paper's times are a separate line. Its perplexities, which are of
    another text, are left out.

    Raises:
        UserError: the rows are of another recipe.
    """
    own = [row for row in rows if row.get("part") == LENGTHS]
    if not own:
        raise UserError(
            "no row compares context lengths: "
            "draw this figure from the result.json of recipe=gpt2-long."
        )
    drawn: list[Row] = [{**row, "series": "flashtrain"} for row in own]
    counts = [row["scored_tokens"] for row in own if row.get("scored_tokens")]
    title = (
        f"The same {counts[0]:,} held-out tokens at every context, with 95% intervals"
        if counts
        else ""
    )
    if meets_the_paper(own):
        drawn += [{"context": context, "series": _PAPER,
                  "time_ratio": paper_columns(context)["paper_time_ratio"]}
                  for context in PAPER_TABLE_4]  # fmt: skip
        title += f"\nPaper: {PAPER}"
    return line_figure(
        drawn, "context", ["perplexity", "time_ratio"], "series", path, title=title, height=_HEIGHT
    )


class LengthsStudy(ContextStudy):
    """The comparison of language models trained at several contexts, on the
    same split and tokens."""

    many_values = ("context", "batch")

    def __init__(self, settings: Settings, hardware: Hardware, overrides: CommandLine) -> None:
        super().__init__(settings, hardware, overrides)
        settings.lengths.check_together()
        for context in self.contexts:
            settings.having(context=context).check_step()
        self.settings = settings.having(
            data=replace(settings.data, split_context=settings.lengths.longest)
        )
        self.words = [f"data.split_context={settings.lengths.longest}"]
        self.windows = self._windows()  # before hours of training

    def rows(self, folder: Path) -> list[Row]:
        options = self.settings.lengths
        contexts = [
            context
            for context in trained_contexts(folder)
            if options.scored <= context <= options.longest
        ]
        trained = {context: read_summary(run_of(folder, context)) for context in contexts}
        scores = {
            context: score_run(
                run_of(folder, context) / CHECKPOINTS / LAST, self.windows.tokens, self.hardware,
                context=context,
                scored=options.scored, stride=options.stride,
            )
            for context in contexts
            if trained[context].get("status") == FINISHED
        }  # fmt: skip
        return length_rows(trained, scores, self.windows, seed=self.settings.seed)

    def show(self, rows: list[Row], folder: Path) -> list[Path]:
        if not any(row.get("perplexity") is not None for row in rows):
            return []
        lengths_table(rows).print()
        return [lengths_figure(rows, folder / "lengths.png")]

    def best(self, rows: Sequence[Row]) -> dict[str, Any]:
        scored = [
            row for row in rows if row["part"] == LENGTHS and row.get("perplexity") is not None
        ]
        if not scored:
            return {}
        best = min(scored, key=lambda row: row["perplexity"])
        return {
            "best_context": best["context"],
            "perplexity": best["perplexity"],
            "lengths_scored": len(scored),
        }

    def _windows(self) -> Windows:
        data = make_data(self.settings.having(context=min(self.contexts)), self.hardware)
        data.prepare_data()
        data.setup()
        say(data.describe())
        options = self.settings.lengths
        held_out = data.split.validation
        if held_out is None:
            raise UserError(
                f"no text can be held out for windows of {options.longest} tokens: use more text, "
                "raise data.validation_fraction, or lower lengths.window and lengths.contexts."
            )
        windows = held_out_windows(
            data.cache, held_out, window=options.longest, most=options.windows
        )
        how = f"of {windows.count} documents" if windows.unit == "documents" else "of one text"
        what = (
            f"the last {options.scored:,} of {options.longest:,} held-out tokens, "
            f"{len(windows.tokens)} times"
        )
        say(f"scored: {what}, {how}")
        return windows
