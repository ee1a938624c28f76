"""Random command lines, right and wrong: each is obeyed, or refused in one printable line.

A case is made of its seed and number alone: a recipe, a mode, and a few settings or groups with values of every kind.
What plans composes, settles and plans on any recipe; what trains has the tiny settings of a task beneath it, and no
value that would be a long training rightly asked for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

from tests.attacks.record import Round
from tests.attacks.scene import BERT, CLASSIFIER, HEAD, LM, Scene, copy_run, remove

SECONDS = 300
MODES = ("train", "plan", "evaluate", "generate", "export", "benchmark", "lengths", "passkey", "preview")
SMALL = ("0", "1", "2", "3", "8", "16", "64", "0.1", "0.5", "1.0", "1e-3", "10")
LARGE = ("1024", "1000000", "1000000000", "2147483648", "9223372036854775808", "1" + "0" * 30, "1e300")
WORDS = (
    "true", "false", "null", "none", "auto", "all", "bytes", "bpe", "flash", "gpt2", "demo", "tiny", "large", "hard",
    "modern", "selective", "context", "ddp", "fsdp", "wandb", "cpu", "gpu", "butterfly", "document", "padded", "hub",
)  # fmt: skip
STRANGE = (
    "-1", "-1000000000", "1.5", "nan", "inf", "-inf", "1e400", "-0.0", "0x10", "1_000", "1" * 5000, "", "''", '""',
    "' '", "é日本語", "'\u202egnp.exe'", "'\x1b[31mred\x1b]0;title\x07'", "'a\nb'", "'a\tb'", "'\x00'", "'\ud800'",
    "'", '"', "a'b", "\\", "'\\'", "a=b", "a b", "a,b", "1,2", "range(1,3)", "range(0,1e9,1e-9)", "choice(1,2)",
    "glob(*)", "sort(3,1)", "shuffle(1,2)", "int(x)", "float(1)", "json_str({a:1})", "extend_list(1)", "???", "~", "@",
    "[]", "[null]", "[1,2,3]", "[1,[2,[3]]]", "[a,b]", "[-1]", "[0]", "[nan]", "[1e9]", "[1,2", "]", "{}", "{a:1}",
    "{a:{b:1}}", "{side:24,steps:1}", "[{side:24,steps:1}]", "[{side:-24,steps:nan}]", "[{nope:1}]", "[{}]", "{1:2}",
    "{a:1", "[" * 40 + "]" * 40, "[" * 2000 + "]" * 2000, "[" + ",".join(map(str, range(2000))) + "]", "x" * 20000,
    "${context}", "${nope}", "${oc.env:NOPE}", "${oc.env:HOME}", "${oc.decode:'[1'}", "${oc.create:{a:1}}",
    "${hydra:runtime.cwd}", "${model}", "${", "$", "\\${context}", "${${context}}", "${oc.env:${oc.env:HOME}}",
    "../../canary", "/nowhere/at/all", "~/x", "~nobody/x", "/dev/null", "/dev/zero", "/", ".", "file:///etc/passwd",
    "*", "&x", "!!python/object:os.system", "%s%n", "{0}", "2026-01-01", "12:30:45", "yes", "Infinity", "1e-400",
)  # fmt: skip
PREFIXES = ("", "", "", "", "", "", "", "+", "++", "~")
# What writes where the user says, starts processes, or reads what never ends, is the user's own wish.
LEFT_OUT = ("output", "hydra", "cache_dir")
PROCESSES = ("trainer.devices", "trainer.nodes", "workers")
TRAINED = (LM, LM, CLASSIFIER, BERT, HEAD)


def rounds(scene: Scene, seed: int, count: int, only: int | None = None) -> Iterator[Round]:
    """The outcomes of the cases 0 to count - 1, or of one."""
    for number in range(count) if only is None else [only]:
        chosen = random.Random(f"settings {seed} {number}")
        words, kind = case(scene, chosen)
        inside = [scene.root / "work"]
        # A mode that works on a checkpoint writes into its run: a copy of it.
        for word in words:
            if word.startswith("checkpoint=runs/"):
                inside.append(copy_run(scene.root / _task_of(word), scene.root / "work/checkpoint"))
        words = [
            f"checkpoint={scene.root}/work/checkpoint" if word.startswith("checkpoint=runs/") else word
            for word in words
        ]
        outcome = scene.watched(*words, inside=inside, seconds=SECONDS)
        yield Round.of(kind, f"settings:{seed}:{number}", outcome, outcome.failure(), _shown(words))
        remove(scene.root / "work")


def case(scene: Scene, chosen: random.Random) -> tuple[list[str], str]:
    """(the words of a command line, what kind of case it is)."""
    kind = chosen.choices(("plan", "train", "checkpoint", "any mode"), (50, 25, 20, 5))[0]
    changed = [_word(chosen, kind) for _ in range(chosen.choices((0, 1, 2, 3, 5), (5, 40, 30, 15, 10))[0])]
    if kind == "plan":
        words = [f"recipe={_recipe(chosen)}", "mode=plan", *changed]
    elif kind == "checkpoint":
        task, mode = chosen.choice(TRAINED), chosen.choice(("evaluate", "generate", "export", "passkey"))
        words = [f"mode={mode}", f"checkpoint={task}", "generate.tokens=4", "hardware=cpu", *changed]
    elif kind == "train":
        small = ["trainer.max_minutes=0.1", "trainer.steps=2", "trainer.validate_every=2", "generate.tokens=4"]
        tiny = [word for word in scene.words(chosen.choice(TRAINED)) if word.split("=")[0] not in _keys(small)]
        words = [*tiny, *small, *changed]
        if chosen.random() < 0.9:  # a value given twice is a mistake of its own
            words = list({word.split("=")[0].lstrip("+~"): word for word in words}.values())
    else:
        modes = [mode for mode in MODES if mode not in ("train", "benchmark", "lengths", "preview")]
        words = [f"recipe={_recipe(chosen)}", f"mode={chosen.choice([*modes, 'paln', ''])}", *changed]
    if chosen.random() < 0.1:
        chosen.shuffle(words)
    return words, kind


def _word(chosen: random.Random, kind: str) -> str:
    names = [name for name in _names() if not any(part in name for part in LEFT_OUT)]
    if chosen.random() < 0.12:
        group = chosen.choice(sorted(_groups()))
        return f"{chosen.choice(PREFIXES)}{group}={chosen.choice([*_groups()[group], *STRANGE, *WORDS])}"
    name = chosen.choice(names)
    if chosen.random() < 0.08:
        place = chosen.randrange(len(name) + 1)
        name = name[:place] + chosen.choice(("x", ".", "é", "/", "@", "", "..", "[0]", " ")) + name[place + 1 :]
    kinds = [SMALL, WORDS, STRANGE, STRANGE]
    if kind != "train":
        kinds.append(LARGE)
    elif any(part in name for part in PROCESSES) or name == "trainer":
        kinds = [STRANGE]
    value = chosen.choice(chosen.choice(kinds))
    if kind != "plan" and value in ("/dev/zero", "/", "."):
        value = "/dev/null"  # the whole disk as text is read for long, and rightly
    prefix = chosen.choice(PREFIXES)
    if prefix == "~" and chosen.random() < 0.5:
        return f"~{name}"
    return f"{prefix}{name}={value}"


def _recipe(chosen: random.Random) -> str:
    from flashtrain.files.shipped import recipe_files

    if chosen.random() < 0.05:
        return chosen.choice(STRANGE)
    return chosen.choice(sorted(recipe_files()))


@cache
def _names() -> list[str]:
    from flashtrain.settings.settings import setting_names

    return setting_names()


@cache
def _groups() -> dict[str, list[str]]:
    from flashtrain.files.shipped import conf_folder

    folders = [path for path in conf_folder().iterdir() if path.is_dir() and path.name != "hydra"]
    return {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in folders}


def _keys(words: list[str]) -> set[str]:
    return {word.split("=")[0] for word in words}


def _task_of(word: str) -> str:
    return word.split("=", 1)[1]


def _shown(words: list[str]) -> str:
    return " ".join(repr(word) if len(word) < 120 else f"{word[:100]!r}...({len(word)} characters)" for word in words)
