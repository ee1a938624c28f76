"""Every file that a command reads, changed by chance, and read by that command.

A target is a copy of something that was trained or prepared, one of its files, the ways to change it, and the commands
that read it. Whatever the file became: the command works, or refuses it in one line; it prints no secret, and writes
nowhere but in the run's folder and the cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.attacks import mutate
from tests.attacks.bait import prepare_bait
from tests.attacks.mutate import Lures
from tests.attacks.record import Round
from tests.attacks.scene import BERT, CLASSIFIER, HEAD, LM, Scene, copy_run, remove
from tests.attacks.watch import Outcome

SECONDS = 300
MANY = 100  # rounds before which every command is tried on what was not changed
SECRET = "the-secret"
Change = Callable[[random.Random, Path, Lures], str]
# By what a file's name ends with. Each has bytes changed and something else put in its place, too.
CHANGES: dict[str, Change] = {
    ".ckpt": mutate.checkpoint,
    ".json": mutate.json_file,
    ".jsonl": mutate.json_lines,
    ".yaml": mutate.yaml_file,
    ".csv": mutate.csv_file,
    ".npy": mutate.npy_file,
    ".safetensors": mutate.safetensors,
    ".parquet": mutate.parquet,
}


@dataclass(frozen=True)
class Target:
    """base: what is copied to work/NAME (its own name where `named`), below the root. files: patterns in it.

    commands: name -> the words after which the copy is read; {at} is the copy, {root} the root, {new} a folder for a
    run. report: they are of flashtrain.report. repaired: called with the changed copy, for sums that fit.
    """

    name: str
    base: str
    files: tuple[str, ...]
    commands: dict[str, Sequence[str]]
    report: bool = False
    repaired: Callable[[Path], None] | None = None
    recipes: bool = False


def rounds(scene: Scene, seed: int, count: int, only: int | None = None) -> Iterator[Round]:
    """The outcomes of the cases 0 to count - 1, or of one; before many, of the commands on unchanged files."""
    prepare_bait(scene)
    targets = all_targets(scene)
    if only is None and count >= MANY:
        yield from _unchanged(scene, targets)
    for number in range(count) if only is None else [only]:
        chosen = random.Random(f"files {seed} {number}")
        yield _round(scene, chosen.choice(targets), chosen, f"files:{seed}:{number}")


def _unchanged(scene: Scene, targets: Sequence[Target]) -> Iterator[Round]:
    """A failure for each command that refuses what nobody changed: its rounds would attack nothing."""
    for target in {target.name: target for target in targets if target.name != "bomb"}.values():
        for command in target.commands:
            work = scene.root / "work"
            remove(work)
            at = copy_run(scene.root / target.base, work / "copies/of" / Path(target.base).name)
            if target.base in (LM, BERT, HEAD, CLASSIFIER):
                remove(at / "export")
            outcome = _read(scene, target, command, at)
            failure = outcome.failure(allowed=(0,))
            told = outcome.output.strip().splitlines()[-1:] or [""]
            yield Round.of(f"{target.name} {command}", "files:unchanged", outcome, failure, told[0])


def _read(scene: Scene, target: Target, command: str, at: Path) -> Outcome:
    """The command on the copy, which it may write to, as to the new run's folder."""
    work = scene.root / "work"
    places = {"at": at, "root": scene.root, "new": work / "new", "recipes": at}
    words = [word.format(**places) for word in target.commands[command]]
    environment = {"FLASHTRAIN_RECIPES": str(at)} if target.recipes else {}
    inside = [at if at.is_dir() else at.parent, work / "new"]
    return scene.watched(*words, inside=inside, seconds=SECONDS, report=target.report, environment=environment)


def _round(scene: Scene, target: Target, chosen: random.Random, name: str) -> Round:
    work = scene.root / "work"
    remove(work)
    at = copy_run(scene.root / target.base, work / "copies/of" / Path(target.base).name)
    if target.base in (LM, BERT, HEAD, CLASSIFIER):
        remove(at / "export")
    # Going on from a checkpoint believes most of it: half of the rounds that can are that.
    resumes = "resume" in target.commands and chosen.random() < 0.5
    command = "resume" if resumes else chosen.choice(sorted(target.commands))
    found = sorted({path for pattern in target.files for path in at.glob(pattern) if path.is_file()})
    if at.is_file():
        found = [at]
    file = chosen.choice([path for path in found if resumes and path.name == "last.ckpt"] or found)
    if target.name == "bomb":
        at = file
    lures = Lures(scene.root / "canary", file.parent)
    fitting = CHANGES.get(file.suffix)
    changes = [fitting] * 6 if fitting else []
    change = chosen.choice([*changes, mutate.some_bytes, mutate.some_bytes, mutate.some_bytes, mutate.whole])
    how = "as it is" if target.name == "bomb" and chosen.random() < 0.8 else _changed(change, chosen, file, lures)
    if target.repaired is not None and chosen.random() < 0.8:
        target.repaired(at)
    outcome = _read(scene, target, command, at)
    failure = outcome.failure()
    if failure is None and SECRET in outcome.output:
        failure = "secret: it was printed"
    shown = f"{target.name}: {file.relative_to(at if at.is_dir() else at.parent)} ({how}) read by {command}"
    return Round.of(f"{target.name} {command}", name, outcome, failure, shown)


def _changed(change: Change, chosen: random.Random, file: Path, lures: Lures) -> str:
    try:
        return f"{change.__name__}: {change(chosen, file, lures)}"
    except (ValueError, TypeError, RecursionError, OverflowError):  # it has no values that can be changed so
        return f"some_bytes: {mutate.some_bytes(chosen, file, lures)}"


def all_targets(scene: Scene) -> list[Target]:
    """What is attacked. A target that is more often here is chosen more often."""
    lm, bert, head, classifier = (_train_words(scene, task) for task in (LM, BERT, HEAD, CLASSIFIER))
    new = "hydra.run.dir={new}"
    uses = {
        "evaluate": ["mode=evaluate", "checkpoint={at}"],
        "export": ["mode=export", "checkpoint={at}"],
        "report": ["{at}"],
    }
    lm_uses = {
        **{name: uses[name] for name in ("evaluate", "export")},
        "generate": ["mode=generate", "checkpoint={at}", "generate.tokens=8"],
        "resume": [*_with(lm, "trainer.steps=9"), "resume={at}"],
        "weights": [*_with(lm, "trainer.steps=2", "trainer.validate_every=2"), "weights={at}", new],
    }
    stages = "curriculum.stages=[{{side:24,steps:4,batch:4,learning_rate:0.003}},{{side:28,steps:6,batch:4}}]"
    run_files = ("config.yaml", "config.yaml", "summary.json", "metrics.csv", "tokenizer/*")
    checkpoints = ("checkpoints/*.ckpt",)
    bert_start = [*head, "weights={at}", new]
    bert_uses = {
        **{name: uses[name] for name in ("evaluate", "export")},
        "resume": [*_with(bert, "trainer.steps=6"), "resume={at}"],
        "fine-tune": bert_start,
    }
    classifier_uses = {
        "export": uses["export"],
        # A config.yaml that lost a part is one of fewer settings, and the default is 20,000 images.
        "evaluate": [*uses["evaluate"], "pathfinder.test_images=8"],
        "resume": _with(classifier, stages, "resume={at}"),
    }
    text = _with(lm, "trainer.steps=2", "trainer.validate_every=2", "data.cache_dir={new}/cache")
    cached = _with(text, "data.cache_dir={at}")
    arena = [
        "recipe=lra-text", "hardware=cpu", "hardware.demo=never", "mode=train", "classifier.embed=16",
        "classifier.layers=1", "classifier.heads=1", "sequence.length=32", "sequence.batch=4", "sequence.validation=4",
        "logger=csv", "trainer.steps=2", "trainer.validate_every=2", "schedule.warmup_steps=1", new,
        "sequence.cache_dir={new}/cache",
    ]  # fmt: skip
    results = {
        "print": ["{at}"],
        "markdown": ["{at}", "--markdown"],
        "csv": ["{at}", "--csv"],
        "out": ["{at}", "--out", "{new}"],
        "figure": ["{at}", "--y", "seconds", "--x", "context", "--out", "{new}"],
        "save": ["{at}", "--save", "{new}/result.json"],
    }
    unfinished = {
        "auto": _with(lm, "output={root}/work/copies/of", "data.tokenizer=bpe", "data.vocab_size=300", "resume=auto"),
        "generate": ["mode=generate", "checkpoint={at}/2026-01-01_00-00-00", "generate.tokens=8"],
    }
    of_file = {name: words for name, words in results.items() if name != "save"}  # which is of runs
    return [
        *[Target("language model's checkpoint", LM, checkpoints, lm_uses)] * 6,
        *[Target("language model's run", LM, run_files, lm_uses)] * 3,
        *[Target("unfinished run", "data/gpt2", ("*/*", "*/checkpoints/*", "*/tokenizer/*"), unfinished)] * 2,
        *[Target("BERT's checkpoint", BERT, checkpoints, bert_uses)] * 3,
        Target("BERT's run", BERT, run_files, bert_uses),
        *[Target("fine-tuned run", HEAD, (*checkpoints, *run_files), {
            "evaluate": uses["evaluate"], "resume": [*_with(head, "trainer.steps=6"), "resume={at}"]})] * 2,
        *[Target("classifier's checkpoint", CLASSIFIER, checkpoints, classifier_uses)] * 3,
        Target("carried checkpoint", f"{CLASSIFIER}/checkpoints/last.ckpt", (), {
            "resume": [*_with(classifier, stages, "resume={at}"), new]}),
        Target("classifier's run", CLASSIFIER, (*run_files, "learning_curve.csv", "stage-*/metrics.csv", "result.json"),
               classifier_uses),
        *[Target("classifier's weights", f"{CLASSIFIER}/export/classifier.safetensors", (), {
            "evaluate": ["mode=evaluate", "weights={at}", "hardware=cpu", "pathfinder.test_images=8", "output={new}"],
            "start": [*classifier, "weights={at}", new]})] * 3,
        *[Target("Hugging Face's GPT-2", "data/hf-gpt2", ("*.json", "*.safetensors"), {
            "weights": lm_uses["weights"]})] * 2,
        *[Target("Hugging Face's BERT", "data/hf-bert", ("*.json", "*.safetensors", "vocab.txt"), {
            "fine-tune": bert_start})] * 2,
        *[Target("BERT's export", f"{BERT}/export", ("*.json", "*.safetensors", "tokenizer/*"), {
            "fine-tune": bert_start})],
        *[Target("token cache", "data/token-cache", ("*/meta.json", "*/documents.npy", "*/tokens.bin"), {
            "train": [*cached, new]}, repaired=repair_token_cache)] * 3,
        Target("token cache's tokenizer", "data/token-cache", ("*/tokenizer/*",), {
            "train": [*_with(cached, "data.tokenizer=bpe", "data.vocab_size=300"), new]}, repaired=repair_token_cache),
        Target("vocabulary", "data/vocabulary", ("*",), {"train": [
            *_with(text, "data.tokenizer=gpt2", "data.vocab={at}/vocab.json", "data.merges={at}/merges.txt"), new]}),
        *[Target("images", "data/images", ("*.bin",), {
            "train": [*classifier, "pathfinder.cache_dir={at}", new]})] * 2,
        Target("sequences", "data/sequences", ("*/*.npy",), {
            "train": [*_with(arena, "sequence.cache_dir={at}"), "sequence.path={root}/data/reviews"]}),
        *[Target("text", "data/texts", ("*",), {"train": [*_with(text, "data.path={at}"), new]})] * 4,
        Target("bomb", "data/bombs", ("*",), {"train": [*_with(text, "data.path={at}"), new]}),
        Target("labelled texts", "data/labelled", ("*.jsonl",), {
            "train": [*_with(head, "finetune.path={at}"), new]}),
        Target("reviews", "data/reviews", ("*.jsonl",), {"train": [*arena, "sequence.path={at}"]}),
        Target("recipes", "data/recipes", ("*.yaml",), {
            "plan": ["recipe=mine", "mode=plan"], "other": ["recipe=gpt2", "mode=plan"]}, recipes=True),
        *[Target("results", "data/results/attention-paper-h200.json", (), of_file, report=True),
          Target("results", "data/results/gpt2-long-h200.json", (), of_file, report=True)],
        *[Target("sweep", "data/sweep", ("*/summary.json", "*/config.yaml"), results, report=True)] * 2,
    ]  # fmt: skip


def repair_token_cache(at: Path) -> None:
    """Let meta.json's sizes and sums fit the files beside it, as who made them would."""
    import json

    from flashtrain.data.token_cache import checksum

    for meta in at.glob("*/meta.json"):
        try:
            if not _is_small(meta):
                continue
            told = json.loads(meta.read_text())
            for name in told["files"]:
                path = meta.parent / name
                if not _is_small(path):
                    continue
                told["files"][name] = {"bytes": path.stat().st_size, "checksum": checksum(path)}
            meta.write_text(json.dumps(told))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError):
            continue  # what was changed is not to be repaired


def _is_small(path: Path) -> bool:
    """Whether it is a file that this process may read whole, and no link to an endless one."""
    return path.is_file() and path.stat().st_size < 2**26


def _train_words(scene: Scene, task: str) -> list[str]:
    """The words of a training, with braces as str.format wants them."""
    return [word.replace("{", "{{").replace("}", "}}") for word in scene.words(task)]


def _with(words: Sequence[str], *others: str) -> list[str]:
    keys = {word.split("=")[0] for word in others}
    return [*(word for word in words if word.split("=")[0] not in keys), *others]
