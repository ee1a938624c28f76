"""Trainings that are killed, at a file operation or at any moment, and resumed: they must end as if nothing had been.

A round trains with dropout, validating and writing checkpoints every few steps, and is killed one to three times:
SIGKILL just before a chosen change of a file, or SIGKILL, SIGTERM or SIGINT after a chosen time; of two ranks one, or
both; of a sweep the process that starts the jobs. After each the same command is given again, with resume=auto or the
folder's name. What the last one leaves is compared with what one uninterrupted run of the same words left: all weights
and states of both checkpoints' models, every loss of the summary, every row of metrics.csv, every file's name.
"""

from __future__ import annotations

import csv
import json
import math
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.attacks.ranks import both_ranks
from tests.attacks.record import Round
from tests.attacks.scene import BERT, CLASSIFIER, HEAD, LM, Scene, must, remove, run_words
from tests.attacks.watch import Outcome

SECONDS = 600
MOST_ATTEMPTS = 12
OVER = "nothing is left to train"
TIMED = ("second", "mfu", "tflops", "memory", "minutes", "date", "overrides", "run", "evenness_measured")
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
# 25 rounds: which training each is. The dear ones come last.
ORDER = (
    "decoder 3 3", "decoder 4 2", "decoder 5 1", "ranks 3 3", "encoder", "decoder 3 3", "decoder 2 4", "classifier",
    "ranks 4 2", "decoder 3 3", "decoder 4 2", "decoder 5 1", "head", "ranks 3 3", "decoder 2 4", "decoder 3 3",
    "decoder 4 2", "ranks 4 2", "classifier", "decoder 5 1", "encoder", "decoder 3 3", "decoder 2 4", "sweep",
    "launched",
)  # fmt: skip


@dataclass
class Training:
    """Words that train, and what they leave when nothing stops them. changes: of files in the run's folder."""

    words: list[str]
    ranks: int = 1
    programs: bool = False
    folder: Path = Path()
    changes: int = 0
    seconds: float = 0.0


def rounds(scene: Scene, seed: int, count: int, only: int | None = None) -> Iterator[Round]:
    """The outcomes of the rounds 0 to count - 1, or of one."""
    trained: dict[str, Training] = {}
    for number in range(count) if only is None else [only]:
        kind = ORDER[number % len(ORDER)]
        if kind not in trained:
            trained[kind] = _uninterrupted(scene, kind)
        chosen = random.Random(f"kills {seed} {number}")
        yield _round(scene, kind, trained[kind], chosen, f"kills:{seed}:{number}")


def _uninterrupted(scene: Scene, kind: str) -> Training:
    training = training_of(scene, kind)
    place = scene.root / "runs/whole" / kind.replace(" ", "-")
    remove(place)
    place.mkdir(parents=True)
    counted = scene.root / "logs/changes"
    outcome = _start(scene, training, [*training.words], place, on_change=_Counter(counted, str(place)))
    must(outcome)
    training.changes = int(counted.read_text() or 0)
    training.folder, training.seconds = place, outcome.seconds
    return training


class _Counter:
    """Counts changes below a folder, in a file that outlives the process."""

    def __init__(self, file: Path, place: str) -> None:
        self.place, self.count = place, 0
        file.write_text("")
        self.handle = os.open(file, os.O_WRONLY)

    def __call__(self, event: str, path: str) -> None:
        if path.startswith(self.place) and os.environ.get("LOCAL_RANK", "0") == "0":
            self.count += 1
            os.pwrite(self.handle, str(self.count).encode(), 0)


class _KilledAt:
    """Ends the process, as SIGKILL does, just before the given change of a file below a folder; or all of its ranks."""

    def __init__(self, place: str, change: int, *, all_ranks: bool) -> None:
        self.place, self.left, self.all_ranks = place, change, all_ranks

    def __call__(self, event: str, path: str) -> None:
        if path.startswith(self.place) and os.environ.get("LOCAL_RANK", "0") == "0":
            self.left -= 1
            if self.left <= 0:
                os.kill(0 if self.all_ranks else os.getpid(), signal.SIGKILL)


def training_of(scene: Scene, kind: str) -> Training:
    """The words of a kind of ORDER."""
    name, *numbers = kind.split()
    words = {
        "encoder": [*_with(scene.words(BERT), "trainer.steps=8"), "bert.dropout=0.1"],
        "head": [*_with(scene.words(HEAD), "trainer.steps=8"), "bert.dropout=0.1", "finetune.dropout=0.1"],
        "classifier": [*scene.words(CLASSIFIER), "classifier.dropout=0.1"],
    }.get(name)
    if words is None:
        validate, checkpoint = numbers or ("3", "2")
        every = [f"trainer.validate_every={validate}", f"trainer.checkpoint_every={checkpoint}"]
        words = [*_with(scene.words(LM), "trainer.steps=12", *every), "model.dropout=0.1"]
    words = _with(words, "resume=auto")
    words = [word for word in words if not word.startswith("output=")]
    if name in ("ranks", "launched"):
        return Training([*words, "trainer.devices=2", "trainer.strategy=ddp"], ranks=2, programs=name == "launched")
    if name == "sweep":
        return Training(["-m", *words, "optimizer.weight_decay=0.1,0.2"], programs=True)
    return Training(words)


def _start(scene: Scene, training: Training, words: list[str], place: Path, **watched: Any) -> Outcome:
    """One attempt at the training, with its runs below `place`."""
    inside = [place]
    if training.ranks > 1 and not training.programs:
        folder = place / "ranks"
        folder.mkdir(exist_ok=True)
        words = [word for word in words if not word.startswith("resume=")]
        each = [*words, "resume=auto", f"output={place}", f"hydra.run.dir={folder}"]
        after = watched.pop("after", None)
        action = both_ranks(lambda: run_words(each), after=after)
        return scene.call(action, inside=inside, seconds=SECONDS, **watched)
    after = watched.pop("after", None)
    running = None if after is None else _Signaller(*after)
    return scene.command(
        *words, f"output={place}", inside=inside, seconds=SECONDS, programs=training.programs, while_running=running,
        **watched,
    )  # fmt: skip


class _Signaller:
    """Sends a signal to the process after so many seconds, once; to which of its processes: see `whom`."""

    def __init__(self, seconds: float, number: int, whom: str) -> None:
        self.seconds, self.number, self.whom, self.sent = seconds, number, whom, False

    def __call__(self, process: int, passed: float) -> None:
        if passed < self.seconds or self.sent:
            return
        self.sent = True
        children = _children(process)
        if self.whom == "all":
            targets = [process, *children]
        elif self.whom == "a child" and children:
            targets = children[:1]
        else:
            targets = [process]
        for target in targets:
            try:
                os.kill(target, self.number)
            except ProcessLookupError:
                continue


def _children(process: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except OSError:
            continue
    return found


def _round(scene: Scene, kind: str, training: Training, chosen: random.Random, name: str) -> Round:
    place = scene.root / "work/killed"
    remove(place)
    place.mkdir(parents=True)
    told: list[str] = []
    began, peak, failure = time.monotonic(), 0, None
    kills = chosen.choice((1, 1, 2, 3))
    for attempt in range(MOST_ATTEMPTS):
        words, how = _resuming(training, place, chosen)
        killed: dict[str, Any] = {}
        if attempt < kills:
            killed, said = _kill(training, place, chosen)
            how = f"{how}, {said}"
        outcome = _start(scene, training, words, place, **killed)
        told.append(f"{how} -> {outcome.status}")
        peak = max(peak, outcome.peak)
        failure = _wrong(outcome, bool(killed), training.ranks)
        if _has_ended(place) and OVER in outcome.output:  # the one before was killed when all was written
            failure = None
            break
        if failure is not None or outcome.status == 0:
            break
    else:
        failure = f"unfinished after {MOST_ATTEMPTS} attempts"
    if failure is None:
        failure = difference(training.folder, place)
    shown = f"{kind}: {'; '.join(told)}"
    return Round(kind.split()[0], name, failure, shown, time.monotonic() - began, peak)


def _has_ended(place: Path) -> bool:
    return any(_told(path.parent).get("status") == "finished" for path in place.rglob("summary.json"))


def _kill(training: Training, place: Path, chosen: random.Random) -> tuple[dict[str, Any], str]:
    """(what _start is to do, in words)."""
    if training.changes and chosen.random() < 0.5:
        change = chosen.randrange(1, training.changes + 1)
        all_ranks = training.ranks > 1 and chosen.random() < 0.5
        hook = _KilledAt(str(place), change, all_ranks=all_ranks)
        whom = "both ranks" if all_ranks else "rank 0" if training.ranks > 1 else "it"
        return {"on_change": hook}, f"SIGKILL to {whom} before change {change} of {training.changes}"
    seconds = chosen.uniform(0.3, training.seconds)
    number = chosen.choice(SIGNALS)
    whom = "the process" if training.ranks == 1 else chosen.choice(("the process", "a child", "all"))
    return {"after": (seconds, number, whom)}, f"{number.name} to {whom} after {seconds:.2f} s"


def _resuming(training: Training, place: Path, chosen: random.Random) -> tuple[list[str], str]:
    """The words of the next attempt."""
    if training.programs or training.ranks > 1 or chosen.random() < 0.5:
        return training.words, "auto"
    runs = sorted(place.glob("*/*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
    if not runs:
        return training.words, "auto"
    return _with(training.words, f"resume={runs[-1].parent.parent}"), "named"


def _wrong(outcome: Outcome, killed: bool, ranks: int) -> str | None:
    """What is wrong with an attempt; None where it ended as its kill or its words would have it."""
    if not killed:
        return outcome.failure(allowed=(0,))
    if outcome.left:  # looked at first: whatever ended the parent, nothing may go on
        return f"orphans: {outcome.left} processes lived on"
    if outcome.status in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT):
        return None  # before it trains it has no handlers
    if outcome.status in (1, 130) and "KeyboardInterrupt" in outcome.output:
        return None
    if ranks > 1 and not outcome.hung and not outcome.outside:
        return None  # the rank that is left loses its connection, wherever it is, and says so in its own way
    return outcome.failure(allowed=(0, 1, 130, 143, *(128 + n for n in (2, 9, 15))))


def difference(whole: Path, place: Path) -> str | None:
    """What the interrupted runs below `place` left that differs from what one run left; None for nothing."""
    for there in sorted(path.parent for path in whole.rglob("config.yaml") if ".hydra" not in path.parts):
        alike = [path.parent for path in place.rglob("summary.json") if _told(path.parent).get("status") == "finished"]
        alike = [path for path in alike if _key(path) == _key(there)]
        if not alike:
            return f"no finished run: {[str(path.relative_to(place)) for path in place.rglob('summary.json')]}"
        here = max(alike, key=lambda path: path.stat().st_mtime)
        for compare in (_weights, _losses, _metrics, _names):
            found = compare(there, here)
            if found is not None:
                return found
    return None


def _weights(there: Path, here: Path) -> str | None:
    from flashtrain.training.checkpoints import read_checkpoint

    for name in ("last.ckpt", "best.ckpt"):
        if not (there / "checkpoints" / name).exists():
            continue
        if not (here / "checkpoints" / name).exists():
            return f"{name}: missing"
        one, two = (read_checkpoint(folder / "checkpoints" / name, mmap=True) for folder in (there, here))
        if one["global_step"] != two["global_step"]:
            return f"{name}: of step {two['global_step']} and not {one['global_step']}"
        differing = _first_difference(one["state_dict"], two["state_dict"], "state_dict")
        if name == "last.ckpt":  # best.ckpt has none
            differing = differing or _first_difference(one["optimizer_states"], two["optimizer_states"], "optimizer")
        if differing:
            return f"{name}: {differing}"
    return None


def _first_difference(one: Any, two: Any, where: str) -> str | None:
    import torch

    if isinstance(one, torch.Tensor):
        return None if isinstance(two, torch.Tensor) and torch.equal(one, two) else where
    if isinstance(one, dict):
        if not isinstance(two, dict) or one.keys() != two.keys():
            return f"{where} keys"
        return next((found for key in one if (found := _first_difference(one[key], two[key], f"{where}.{key}"))), None)
    if isinstance(one, list | tuple):
        pairs = enumerate(zip(one, two, strict=True))
        return next((found for n, (a, b) in pairs if (found := _first_difference(a, b, f"{where}.{n}"))), None)
    return None if one == two else where


def _losses(there: Path, here: Path) -> str | None:
    one, two = _told(there), _told(here)
    for key, value in one.items():
        if not any(part in key for part in TIMED) and not _same(value, two.get(key)):
            return f"summary: {key} is {two.get(key)} and not {value}"
    return None


def _metrics(there: Path, here: Path) -> str | None:
    for file in sorted(there.rglob("*.csv")):
        one, two = _rows(file), _rows(here / file.relative_to(there))
        if len(one) != len(two):
            return f"{file.name}: {len(two)} rows and not {len(one)}"
        for number, (expected, found) in enumerate(zip(one, two, strict=True)):
            for key in expected:
                if expected[key] != found.get(key):
                    return f"{file.name}: row {number} has {key}={found.get(key)} and not {expected[key]}"
    return None


def _names(there: Path, here: Path) -> str | None:
    one, two = ({path.relative_to(folder).as_posix() for path in folder.rglob("*")} for folder in (there, here))
    surplus = sorted(name for name in two - one if not name.startswith((".hydra", "wandb")))
    if surplus:
        return f"left behind: {surplus[0]}"
    missing = sorted(one - two)
    return f"missing: {missing[0]}" if missing else None


def _rows(file: Path) -> list[dict[str, str]]:
    if not file.exists():
        return []
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    return [{key: value for key, value in row.items() if not any(part in str(key) for part in TIMED)} for row in rows]


def _told(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "summary.json").read_text()))
    except (OSError, ValueError):
        return {}


def _key(folder: Path) -> str:
    """What tells the jobs of a sweep apart."""
    line = [line for line in (folder / "config.yaml").read_text().splitlines() if "weight_decay" in line]
    return "".join(line)


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, float) and isinstance(two, float):
        return one == two or (math.isnan(one) and math.isnan(two))
    return bool(one == two)


def _with(words: list[str], *others: str) -> list[str]:
    keys = {word.split("=")[0] for word in others}
    return [*(word for word in words if word.split("=")[0] not in keys), *others]
