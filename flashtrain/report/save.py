"""Result files from runs: a run's or a sweep's rows, saved with what made them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError
from flashtrain.report.rows import RESULT, ResultFile, collect_summaries, read_result, values_of, write_result
from flashtrain.report.sweep import override_texts, varied_keys, with_overrides

# Said once for the whole file, not in each row; paths of this machine say nothing to a reader.
_LEFT_OUT = ("run", "versions", "overrides", "command", "recipe")


def save_result(path: str | Path, folder: str | Path, command: str | None = None) -> ResultFile:
    """Write the result file of the runs in `folder`, with the device and versions that the runs themselves recorded.

    command: what reproduces them; by default put together from the recipe and the runs' overrides, those with several
    values as a sweep. A run that measures (a benchmark) has made its result file already, which is then taken as it is.
    Raises UserError when the folder has no finished row to take recipe and device from.
    """
    if (Path(folder) / RESULT).is_file():
        return join_results(path, [folder], command)
    collected = collect_summaries(folder)
    # a killed job tells its context by its overrides only, and a swept learning rate is in no summary at all
    rows = with_overrides(collected)
    told = varied_keys(rows)
    rows = [{k: v for k, v in row.items() if k in own or k in told} for row, own in zip(rows, collected, strict=True)]
    recipes, devices, versions = (values_of(rows, key) for key in ("recipe", "device", "versions"))
    if not recipes or not devices:
        raise UserError(f"no run in '{folder}' tells its recipe and device: there is nothing to save.")
    if len(versions) > 1:
        raise UserError(f"the runs in '{folder}' were made with different versions: save runs of one environment.")
    left_out = {*_LEFT_OUT, *(["device"] if len(devices) == 1 else [])} - ({"recipe"} if len(recipes) > 1 else set())
    return write_result(
        path,
        recipe=", ".join(map(str, recipes)),
        command=command or reproducing_command(rows),
        rows=[{key: value for key, value in row.items() if key not in left_out} for row in rows],
        device="; ".join(map(str, devices)),
        versions=dict(part.split(" ", 1) for part in versions[0].split(", ")) if versions else None,
    )


def join_results(path: str | Path, sources: Sequence[str | Path], command: str | None = None) -> ResultFile:
    """Write one result file of several runs that measured, as a benchmark that was done in parts.

    sources: their folders, or result files. command: None: theirs, one after the other. Raises UserError where device,
    versions or recipe differ, FileNotFoundError for a folder of a run that did not measure.
    """
    parts = [read_result(source / RESULT if source.is_dir() else source) for source in map(Path, sources)]
    first = parts[0]
    for key in ("recipe", "device", "versions"):
        different = [part for part in parts if getattr(part, key) != getattr(first, key)]
        if different:
            raise UserError(
                f"--save joins runs of one {key}, not {getattr(first, key)} and {getattr(different[0], key)}."
            )
    return write_result(
        path,
        first.recipe,
        command or "; ".join(dict.fromkeys(part.command for part in parts)),
        [row for part in parts for row in part.rows],
        first.device,
        first.versions,
        max(part.date for part in parts),
    )


def reproducing_command(rows: Sequence[Mapping[str, Any]]) -> str:
    """The command that starts these runs again: a key's different values become a comma-separated sweep."""
    words: dict[str, list[str]] = {"recipe": [str(value) for value in values_of(rows, "recipe")]}
    for row in rows:
        for key, value in override_texts(row).items():
            given = words.setdefault(key, [])
            if value not in given:
                given.append(value)
    settings = [shlex.quote(f"{key}={','.join(values)}") for key, values in words.items()]
    several = any(len(values) > 1 for values in words.values())
    return " ".join(["python -m flashtrain", *(["-m"] if several else []), *settings])
