"""What the attacks are made on: trained runs of every task, their files, and a folder around them that must not change.

ROOT/canary/    files that nothing may touch: mutated files name them
ROOT/cwd/       where commands are run; must stay empty
ROOT/home/      HOME; only .cache may be written
ROOT/cache/     FLASHTRAIN_CACHE
ROOT/data/      texts, samples, vocabularies
ROOT/runs/      the trained runs
ROOT/work/      copies for one attempt
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.attacks.watch import Outcome, attempt, changes, snapshot
from tests.tiny_runs import TINY

ROOT_FOLDERS = ("canary", "cwd", "home/.cache", "cache", "data", "runs", "work", "tmp", "logs")
TINY_CLASSIFIER = (
    "recipe=pathx", "hardware=cpu", "hardware.demo=never", "logger=csv", "resume=null",
    "classifier.embed=16", "classifier.layers=1", "classifier.heads=1", "classifier.grey_bins=16",
    "schedule.warmup_steps=1", "sequence.validation_samples=8", "pathfinder.contour=easy", "pathfinder.train_images=64",
    "pathfinder.validation_images=8", "pathfinder.test_images=8", "pathfinder.workers=1",
    "trainer.validate_every=3", "trainer.checkpoint_every=2", "trainer.log_every=1",
    "curriculum.stages=[{side:24,steps:4,batch:4,learning_rate:0.003},{side:28,steps:3,batch:4}]",
)  # fmt: skip
TINY_BERT = (
    "recipe=bert", "hardware=cpu", "hardware.demo=never", "logger=csv", "data=files", "data.tokenizer=bytes",
    "data.validation_fraction=0.3", "bert.size=tiny", "bert.family=bert", "context=64", "masked.unit=sentence",
    "masked.token_budget=128", "masked.validation_samples=8", "schedule.warmup_steps=1", "trainer.steps=4",
    "trainer.tokens_per_step=256", "trainer.log_every=1", "trainer.validate_every=2", "trainer.checkpoint_every=2",
)  # fmt: skip
TINY_HEAD = (
    "recipe=finetune", "hardware=cpu", "hardware.demo=never", "logger=csv", "bert.size=tiny", "context=16",
    "finetune.data=files", "finetune.pooling=max", "finetune.batch=8", "schedule.warmup_steps=1", "trainer.steps=4",
    "trainer.log_every=1", "trainer.validate_every=2", "trainer.checkpoint_every=2",
)  # fmt: skip
LM, CLASSIFIER, BERT, HEAD = "runs/gpt2/a", "runs/pathx/a", "runs/bert/a", "runs/finetune/a"


@dataclass
class Scene:
    """The folders, and commands in them."""

    root: Path

    def command(
        self,
        *words: str,
        inside: Iterable[Path] = (),
        seconds: float = 300,
        report: bool = False,
        environment: Mapping[str, str] | None = None,
        **watched: Any,
    ) -> Outcome:
        """`python -m flashtrain` (report: flashtrain.report) with these words, in a fork, in ROOT/cwd.

        inside: where it may write, beside the cache and the place for temporary files.
        """

        def action() -> int | None:
            os.environ.update(environment or {})
            return run_words(list(words), report=report)

        return self.call(action, inside=inside, seconds=seconds, **watched)

    def call(
        self, action: Callable[[], int | None], inside: Iterable[Path] = (), seconds: float = 200, **watched: Any
    ) -> Outcome:
        """Anything in a fork, in ROOT/cwd."""

        def there() -> int | None:
            tempfile.tempdir = None
            os.chdir(self.root / "cwd")
            return action()

        allowed = [self.root / "cache", self.root / "tmp", self.root / "home/.cache", *inside]
        return attempt(there, log=self.root / "logs/attempt.log", inside=allowed, seconds=seconds, **watched)

    def watched(self, *words: str, inside: Iterable[Path] = (), **options: Any) -> Outcome:
        """As `command`, with everything outside of `inside` and the cache compared before and after."""
        inside = list(inside)
        free = [self.root / name for name in ("cache", "tmp", "home/.cache", "logs", "runs", "data")]
        without = [*free, *inside]
        before = snapshot(self.root, without)
        outcome = self.command(*words, inside=inside, **options)
        outcome.outside += changes(before, snapshot(self.root, without))
        return outcome

    def words(self, task: str) -> list[str]:
        """The words that train one of the runs: LM, CLASSIFIER, BERT, HEAD."""
        data = self.root / "data"
        ours = {
            LM: [*TINY, f"data.path={data}/text"],
            CLASSIFIER: list(TINY_CLASSIFIER),
            BERT: [*TINY_BERT, f"data.path={data}/text"],
            HEAD: [*TINY_HEAD, f"finetune.path={data}/labelled"],
        }
        return [*ours[task], f"output={self.root}/work/runs"]


def run_words(words: list[str], *, report: bool = False) -> int | None:
    """What the command does with these words, in this process."""
    if report:
        from flashtrain.report.__main__ import main as report_main

        return report_main(words)
    import flashtrain.__main__ as command

    command.STARTED = time.time()
    sys.modules["__main__"] = command  # what a sweep starts its jobs from
    sys.argv = ["flashtrain", *words]
    command.main()
    return 0


def prepare(root: Path | None = None) -> Scene:
    """Make the folders and train the runs. Call it before torch is imported: it sets the environment."""
    root = Path(root or tempfile.mkdtemp(prefix="attacks-")).resolve()
    for name in ROOT_FOLDERS:
        (root / name).mkdir(parents=True, exist_ok=True)
    environment = {
        "HOME": "home", "XDG_CACHE_HOME": "home/.cache", "XDG_CONFIG_HOME": "home/.cache/config", "TMPDIR": "tmp",
        "FLASHTRAIN_CACHE": "cache", "MPLCONFIGDIR": "home/.cache/matplotlib", "HF_HOME": "home/.cache/hf",
        "TRITON_CACHE_DIR": "home/.cache/triton", "TORCHINDUCTOR_CACHE_DIR": "home/.cache/inductor",
        "NUMBA_CACHE_DIR": "home/.cache/numba", "WANDB_DIR": "home/.cache/wandb",
    }  # fmt: skip
    os.environ.update({name: str(root / place) for name, place in environment.items()})
    os.environ.update(
        OMP_NUM_THREADS="1", WANDB_MODE="offline", HF_HUB_OFFLINE="1", PYTHONDONTWRITEBYTECODE="1", CANARY="the-secret"
    )
    os.environ.pop("FLASHTRAIN_RECIPES", None)
    sys.dont_write_bytecode = True
    tempfile.tempdir = None
    _import_all()
    write_canary(root)
    _write_data(root / "data")
    return Scene(root)


def train_all(scene: Scene, tasks: Iterable[str] = (LM, CLASSIFIER, BERT, HEAD)) -> None:
    """Train the runs that are not there yet, and what is made from them: exports, a token cache, results."""
    for task in tasks:
        folder = scene.root / task
        if folder.exists():
            continue
        folder.parent.mkdir(parents=True, exist_ok=True)
        must(scene.command(*scene.words(task), f"hydra.run.dir={folder}", inside=[folder], seconds=200))
        if task != HEAD:
            must(scene.command("mode=export", f"checkpoint={folder}", inside=[folder], seconds=300))


def write_canary(root: Path) -> None:
    """The files that nothing may touch."""
    for number in range(3):
        folder = root / "canary" / f"folder-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "precious.txt").write_text(f"precious {number}\n")
    (root / "canary" / "best.ckpt").write_bytes(b"precious weights")
    (root / "canary" / "victim").write_text("precious\n")


def copy_run(run: Path, place: Path) -> Path:
    """A fresh copy of a run folder, or of a file."""
    remove(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    if run.is_dir():
        shutil.copytree(run, place, symlinks=True)
    else:
        shutil.copy(run, place)
    return place


def remove(place: Path) -> None:
    """Remove what is there: a file, a link, a folder."""
    if place.is_symlink() or place.is_file():
        place.unlink()
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(place)


def must(outcome: Outcome) -> None:
    """Raises RuntimeError where what is to be attacked could not be made."""
    failure = outcome.failure(allowed=(0,))
    if failure is not None:
        raise RuntimeError(f"what is to be attacked cannot be made ({failure}):\n{outcome.output}\n{outcome.outside}")


def _import_all() -> None:
    """Import what commands import, so that a fork need not."""
    import torch
    import transformers  # noqa: F401

    import flashtrain

    for module in pkgutil.walk_packages(flashtrain.__path__, "flashtrain."):
        with contextlib.suppress(ImportError):  # what needs a GPU's libraries
            importlib.import_module(module.name)
    torch.set_num_threads(1)


def _write_data(data: Path) -> None:
    text = data / "text"
    text.mkdir(exist_ok=True)
    for number in range(10):
        line = f"document {number} says that the quick brown fox jumps over the lazy dog. "
        (text / f"{number}.txt").write_text(line * 20)
    labelled = data / "labelled"
    labelled.mkdir(exist_ok=True)
    for part, count in (("train", 32), ("validation", 8), ("test", 8)):
        kinds = [("ab x", ["x"]), ("y cd", ["y"]), ("x and y", ["x", "y"]), ("abcd", [])]
        rows = [{"text": f"{kinds[n % 4][0]} {n}", "labels": kinds[n % 4][1]} for n in range(count)]
        (labelled / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
