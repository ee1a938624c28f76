"""The score of a trained model on held-out text, and whether its run was trained on that text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from filecmp import cmp
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from flashtrain.announce import say
from flashtrain.data.datamodule import TextDataModule
from flashtrain.data.mixture import MixtureSource
from flashtrain.data.sources import held_out
from flashtrain.data.split_names import SplitFiles
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import CONFIG_FILE, read_settings
from flashtrain.settings.settings import Settings
from flashtrain.spec import TrainedModel
from flashtrain.tasks.text_data import make_source, make_sources
from flashtrain.tasks.training_task import evaluating_trainer
from flashtrain.training.hardware import Hardware


def score(
    trained: TrainedModel,
    task: pl.LightningModule,
    data: TextDataModule,
    hardware: Hardware,
    *,
    words: str,
    measures: Callable[[float], Mapping[str, float]] = lambda loss: {},
) -> dict[str, Any]:
    """Validate a trained model on the data's held-out text, and print the metrics.

    Args:
        task: the LightningModule around the trained model.
        words: the text to print, a format string; its fields are the metrics' names.
        measures: returns further metrics, which follow from the loss.

    Returns:
        The metrics by name, `held_out` (whether the run was not trained on
        the text) and the counts.

    Raises:
        UserError: nothing is held out.
    """
    (found,) = evaluating_trainer(hardware).validate(task, data, verbose=False) or [{}]
    if "validation_loss" not in found:
        raise UserError(
            "nothing is held out to evaluate on. Raise data.validation_fraction, or use more text."
        )
    found = {**found, **measures(found["validation_loss"])}
    scored, why_not = data.scored(), why_not_held_out(trained.settings, trained.folder)
    numbers = ", ".join(
        f"{number:,} {name if number != 1 else name[:-1]}" for name, number in scored.items()
    )
    claim, doubt = ("held-out ", "") if why_not is None else ("", f"; {why_not}")
    step = f" (step {trained.step})" if trained.settings.checkpoint else ""
    say(
        f"{trained.checkpoint}{step}: "
        f"{claim}{words.format(**found)}, over {numbers} of {data.source.describe()}{doubt}"
    )
    return {**found, "held_out": why_not is None, **scored}


def why_not_held_out(settings: Settings, folder: Path) -> str | None:
    """Return the reason why the run in `folder` may have been trained on the text that these
    settings score; None if that text was held out."""
    if not (folder / CONFIG_FILE).is_file():
        return "what the model was trained on is not known"
    own = read_settings(folder)
    try:
        scored, apart = make_sources(settings.data)
        if settings.data.validation_fraction == 1:
            trained = _paths_and_fingerprints(make_source(own.data), scored=False)
            seen = _common(trained, _paths_and_fingerprints(scored, scored=True))
            return "the run was trained on some or all of it" if seen else None
        drawn = apart is None and held_out(scored) is None
    except UserError as error:
        return f"what the run was trained on cannot be read ({error})"
    if drawn and _draw(settings) != _draw(own):
        return (
            "context or data.validation_fraction is not the run's, "
            "which may have trained on some of it"
        )
    return None


def _draw(settings: Settings) -> tuple[Any, ...]:
    """Return the settings that decide which documents are held out at random."""
    stages = [one.context or settings.context for one in getattr(settings, "stages", ())]
    length = max(*(stages or [settings.context]), settings.data.split_context or 0)
    return settings.data.validation_fraction, 0 if settings.data.source == "chat" else length


def _paths_and_fingerprints(source: Any, *, scored: bool) -> Iterator[Path | str]:
    """Yield the files that a source reads (of a mixture, if `scored`, those that its parts hold
    out); for a source that is not of local files its fingerprint."""
    if isinstance(source, MixtureSource):
        for part in source.sources.values():
            yield from _paths_and_fingerprints((scored and held_out(part)) or part, scored=scored)
    elif isinstance(source, SplitFiles) and source.address is None:
        yield from (file.resolve() for file in source.files())
    elif hasattr(source, "fingerprint"):
        yield source.fingerprint()


def _common(trained: Iterator[Path | str], scored: Iterator[Path | str]) -> bool:
    """Return whether the two lists have a common fingerprint, or files with the same path or
    contents."""
    there, here = set(trained), set(scored)
    by_size: dict[int, list[Path]] = {}
    for one in there:
        if isinstance(one, Path):
            by_size.setdefault(one.stat().st_size, []).append(one)
    files = [one for one in here if isinstance(one, Path)]
    alike = ((file, other) for file in files for other in by_size.get(file.stat().st_size, ()))
    return bool(there & here) or any(cmp(*pair, shallow=False) for pair in alike)
