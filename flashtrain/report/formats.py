"""Format keys and values of rows for tables and figures: headings with units, and
numbers with sensible digits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

MISSING = "-"


def grouped(value: float) -> str:
    """Format a number as an integer with thousands separators: 412,345."""
    return f"{value:,.0f}"


def short(value: float) -> str:
    """Format a number with three significant digits and a letter for thousands, millions,
    ...: 987, 1.23k, 124M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # 999,600 would round to 1000k: it gets the next letter
        if abs(value) >= size * 0.9995:
            return significant(value / size) + letter
    return grouped(value) if float(value).is_integer() else significant(value)


def significant(value: float, digits: int = 3) -> str:
    """Format a number with `digits` significant digits: 0.571, 12.3, 1,234; below
    0.0001 with an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = int(f"{value:.{digits - 1}e}".split("e")[1])
    if exponent < -4:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


loss = partial(significant, digits=4)  # half a percent must be visible


def plain(value: float) -> str:
    """Format a number whose key is not in COLUMNS: 8, 4,096, 0.0003, 0.571."""
    if float(value).is_integer():
        return grouped(value)
    return grouped(value) if abs(value) >= 1000 else f"{value:.3g}"


@dataclass(frozen=True)
class Column:
    """A column's heading, with its unit, and the function that formats its numbers."""

    heading: str
    number: Callable[[float], str] = plain


# In the order in which a table has them by default. A key without an entry
# appears under its own name.
COLUMNS: dict[str, Column] = {
    "run": Column("run"),
    "recipe": Column("recipe"),
    "implementation": Column("implementation"),
    "model": Column("model"),
    "parameters": Column("parameters", short),
    "weights": Column("weights"),
    "attention": Column("attention"),
    "direction": Column("direction"),
    "mask": Column("mask"),
    "dtype": Column("dtype"),
    "features": Column("features"),
    "density": Column("density", significant),
    "dropout": Column("dropout"),
    "context": Column("context", grouped),
    "batch": Column("batch", grouped),
    "micro_batch": Column("micro-batch", grouped),
    "devices": Column("devices", grouped),
    "precision": Column("precision"),
    "seqlen_q": Column("query length", grouped),
    "seqlen_k": Column("key length", grouped),
    "heads": Column("heads", grouped),
    "kv_heads": Column("key/value heads", grouped),
    "head_dim": Column("head dimension", grouped),
    "seqlen": Column("tokens of the sequence", grouped),
    "degree": Column("devices", grouped),
    "steps": Column("steps", grouped),
    "tokens": Column("tokens", short),
    "epochs": Column("epochs", significant),
    "train_loss_first": Column("first training loss", loss),
    "train_loss": Column("training loss", loss),
    "validation_loss": Column("validation loss", loss),
    "held_out_samples": Column("held-out samples", grouped),
    "perplexity": Column("perplexity", loss),
    "perplexity_low": Column("95% from", loss),
    "perplexity_high": Column("95% to", loss),
    "perplexity_sliding": Column("perplexity, full context", loss),
    "against_shorter": Column("than next shorter"),
    "against_shorter_sliding": Column("than next shorter, full context"),
    "train_seconds": Column("training (s)", grouped),
    "time_ratio": Column("time per token / shortest", significant),
    "paper_perplexity": Column("paper: perplexity", significant),
    "paper_days": Column("the paper's days on 8 A100", significant),
    "paper_time_ratio": Column("paper: time / 1K", significant),
    "length": Column("length", grouped),
    "accuracy": Column("accuracy", significant),
    "micro_f1": Column("micro-F1", significant),
    "best_micro_f1": Column("at most, expected", significant),
    "padding": Column("padding"),
    "rows_per_second": Column("sequences/s", significant),
    "real_tokens_per_second": Column("real tokens/s", grouped),
    "over_random_batches": Column("times the best peer, random batches", significant),
    "over_length_buckets": Column("times the best peer, length buckets", significant),
    "milliseconds": Column("time (ms)", significant),
    "host_us": Column("processor (us)", significant),
    "host_milliseconds": Column("time with launching (ms)", significant),
    "gpu_milliseconds": Column("time, queued (ms)", significant),
    "gb_per_second": Column("GB/s of keys and values, queued", significant),
    "bandwidth_share": Column("share of 4.2 TB/s", significant),
    "of_plain": Column("speed / without features", significant),
    "forward_backward_tflops": Column("forward + backward (TFLOP/s)", significant),
    "tflops": Column("TFLOP/s", significant),
    "forward_ms": Column("forward (ms)", significant),
    "backward_ms": Column("backward (ms)", significant),
    "one_device_ms": Column("one device, both (ms)", significant),
    "one_device": Column("one device's time is"),
    "efficiency": Column("efficiency", significant),
    "tflops_per_device": Column("TFLOP/s a device", significant),
    "communication_ms": Column("communication alone (ms)", significant),
    "communication_share": Column("communication / time", significant),
    "sent_mib": Column("sent by a device (MiB)", significant),
    "imbalance": Column("work, max / mean", significant),
    "one_device_memory_gib": Column("peak memory of one device (GiB)", significant),
    "gradient_error": Column("error of gradients", significant),
    "error_ratio": Column("errors over one device's", significant),
    "step_seconds": Column("time per step (s)", significant),
    "tokens_per_second": Column("tokens/s", grouped),
    "mfu": Column("MFU", significant),
    "peak_memory_gib": Column("peak memory (GiB)", significant),
    "memory_estimate_gib": Column("estimated memory (GiB)", significant),
    "host_estimate_gib": Column("in host memory (GiB)", significant),
    "speedup": Column("speed-up over Hugging Face, eager", significant),
    "paper_speedup": Column("the paper's speed-up", significant),
    "command_cost": Column("the command's cost over the bare loop (%)", significant),
    "compile_seconds": Column("compilation (s)", significant),
    "peak_memory_mib": Column("peak memory (MiB)", grouped),
    "error": Column("error", significant),
    "seconds": Column("time (s)", significant),
    "status": Column("status"),
}

# Keys of the whole table, which are in its caption, or too long for a cell: texts of
# errors are listed below the table. (An error that is a number, a distance from a
# reference, is an ordinary column.)
NOT_SHOWN = ("device", "versions", "overrides", "command", "error", "measured", "scores", "prompts")


def heading(key: str) -> str:
    """Return a key's heading, with its unit. The heading of a setting, such as
    optimizer.learning_rate, is the setting's name."""
    if key in COLUMNS:
        return COLUMNS[key].heading
    return one_line(key if "." in key else key.replace("_", " "))


def cell(key: str, value: Any) -> str:
    """Format a key's value as one line of text: a number in the key's format (see
    COLUMNS), None and "" as "-"."""
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        if not math.isfinite(value):
            return str(value)
        return COLUMNS[key].number(value) if key in COLUMNS else plain(value)
    return one_line(str(value))


def one_line(text: str) -> str:
    """Return the text in one line, with single spaces between words."""
    return " ".join(text.split())


def figure_text(text: str) -> str:
    """Return the text as a label for matplotlib: in one line, with dollar signs escaped."""
    return one_line(text).replace("$", r"\$")
