"""Make result files from run folders and sweep folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError
from flashtrain.report.rows import (
    RESULT,
    ResultFile,
    collect_summaries,
    command_line,
    read_result,
    values_of,
    write_result,
)
from flashtrain.report.sweep import override_texts, varied_keys, with_overrides

# Once in the file, not in each row; or of no use to a reader, as paths of this machine.
_LEFT_OUT = ("run", "versions", "overrides", "command", "recipe")


def save_result(path: str | Path, *sources: str | Path) -> ResultFile:
    """Write the result file of runs, with their command, and the device and
    versions that they recorded.

    Args:
        path: the result file to write.
        sources: the folder of a run or a sweep, or several folders or result
            files of benchmark runs.

    Raises:
        UserError: no run recorded its recipe and device, or their versions of packages differ.
    """
    folder = Path(sources[0])
    if len(sources) > 1 or (folder / RESULT).is_file():
        return join_results(path, sources)
    collected = collect_summaries(folder)
    # a killed job's context is in its overrides only, and a swept learning rate is
    # in no summary at all
    rows = with_overrides(collected)
    varied = varied_keys(rows)
    rows = [
        {k: v for k, v in row.items() if k in own or k in varied}
        for row, own in zip(rows, collected, strict=True)
    ]
    recipes, devices, versions = (values_of(rows, key) for key in ("recipe", "device", "versions"))
    if not recipes or not devices:
        raise UserError(
            f"no run in '{folder}' has a recorded recipe and device (in summary.json), which a "
            "result file needs. Give the folder of a finished run or sweep."
        )
    if len(versions) > 1:
        raise UserError(
            f"the runs in '{folder}' used different versions of packages. "
            "Save the runs of each version to a file of their own."
        )
    left_out = {*_LEFT_OUT, *(["device"] if len(devices) == 1 else [])} - (
        {"recipe"} if len(recipes) > 1 else set()
    )
    return write_result(
        path,
        recipe=", ".join(map(str, recipes)),
        command=reproducing_command(rows),
        rows=[{key: value for key, value in row.items() if key not in left_out} for row in rows],
        device="; ".join(map(str, devices)),
        versions=dict(part.split(" ", 1) for part in versions[0].split(", ")) if versions else None,
    )


def join_results(path: str | Path, sources: Sequence[str | Path]) -> ResultFile:
    """Write one result file of several benchmark runs, with their commands one after the other.

    Args:
        path: the result file to write.
        sources: folders of benchmark runs, or result files.

    Raises:
        UserError: the recipes, devices or versions of the runs differ.
        FileNotFoundError: a folder is not that of a benchmark run.
    """
    parts = [
        read_result(source / RESULT if source.is_dir() else source) for source in map(Path, sources)
    ]
    first = parts[0]
    for key in ("recipe", "device", "versions"):
        different = [part for part in parts if getattr(part, key) != getattr(first, key)]
        if different:
            raise UserError(
                f"--save joins runs of the same {key}: "
                f"got {getattr(first, key)} and {getattr(different[0], key)}. "
                "Save them to different files."
            )
    return write_result(
        path,
        first.recipe,
        "; ".join(dict.fromkeys(part.command for part in parts)),
        [row for part in parts for row in part.rows],
        first.device,
        first.versions,
        max(part.date for part in parts),
    )


def reproducing_command(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the command that repeats the runs of these rows; a setting with several values becomes
    a comma-separated sweep."""
    words: dict[str, list[str]] = {"recipe": [str(value) for value in values_of(rows, "recipe")]}
    for row in rows:
        for key, value in override_texts(row).items():
            given = words.setdefault(key, [])
            if value not in given:
                given.append(value)
    several = ["-m"] if any(len(values) > 1 for values in words.values()) else []
    return command_line([*several, *(f"{key}={','.join(values)}" for key, values in words.items())])
