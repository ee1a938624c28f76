"""What every recipe, its demo and every published command compose to, by dotted name:
composed.json holds it.

`python tests/contract/composed.py` writes that file anew: what a meant change does to the
values is then its diff.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("composed.json")
sys.path[:0] = [str(ROOT / folder) for folder in ("", "recipes", "kernels", "tests")]

from published_commands import jobs_of, published_commands, saved_runs, words_of  # noqa: E402

from flashtrain.command.compose import compose_settings  # noqa: E402
from flashtrain.command.overrides import plain_words  # noqa: E402
from flashtrain.command.request import settings_of  # noqa: E402
from flashtrain.files.shipped import recipe_files  # noqa: E402
from flashtrain.registry import registered  # noqa: E402
from flashtrain.run.machine import apply_demo  # noqa: E402
from flashtrain.settings.command_line import CommandLine  # noqa: E402
from flashtrain.settings.schema import schema_of  # noqa: E402
from flashtrain.settings.settings import Settings  # noqa: E402

Values = dict[str, Any]


def flat(values: Any, prefix: str = "") -> Values:
    """Settings by dotted name, those of groups too; a list is one value, in whose
    mappings null says nothing."""
    found: Values = {}
    for name, value in values.items():
        inner = flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {}
        if isinstance(value, list):
            value = [flat(one) if isinstance(one, dict) else one for one in value]
            value = [
                {k: v for k, v in one.items() if v is not None} if isinstance(one, dict) else one
                for one in value
            ]
        found.update(inner or {f"{prefix}{name}": value})
    return found


def other_than(base: Values, settings: Settings) -> Values:
    """The settings that have another value than `base`, or are not in it; null for
    one that is in it alone."""
    own = flat(asdict(settings))
    # What a demo is, "demos" holds.
    names = sorted(name for name in {*own, *base} if not name.startswith("demo"))
    return {
        name: own.get(name) for name in names if name not in base or own.get(name) != base[name]
    }


def composed_recipe(name: str, defaults: dict[str, Values]) -> tuple[Values, Values]:
    """A recipe's task and what it has otherwise than that one's dataclass; what its demo
    has otherwise than it."""
    words = [f"recipe={name}"]
    settings = compose_settings(words)
    return {"task": settings.task, **other_than(defaults[settings.task], settings)}, other_than(
        flat(asdict(settings)), apply_demo(settings, CommandLine(words).by_name)
    )


def composed_recipes() -> dict[str, Any]:
    """The defaults of each task's settings, and composed_recipe of each recipe, by name."""
    defaults = {task: flat(asdict(schema_of(task)())) for task in sorted(registered("task"))}
    made = {name: composed_recipe(name, defaults) for name in sorted(recipe_files())}
    recipes, demos = ({name: both[place] for name, both in made.items()} for place in (0, 1))
    return {"defaults": defaults, "recipes": recipes, "demos": demos}


def composed_commands(folder: Path) -> dict[str, list[Values]]:
    """Of each published command, for each job of it: what it has otherwise than its recipe.

    folder: an empty one, for run folders that a command may name; it stands as RUNS in the values,
    and the repository's folder as HERE.
    """
    runs = saved_runs(folder)
    base = cache(lambda recipe: flat(asdict(compose_settings([f"recipe={recipe}"]))))
    found: dict[str, list[Values]] = {}
    for command in published_commands():
        if "recipe=mine" in command:
            os.environ["FLASHTRAIN_RECIPES"] = str(runs["mine"])
        else:  # recipes are composed once then: see quick_settings.py
            os.environ.pop("FLASHTRAIN_RECIPES", None)
        for words in jobs_of(command, runs) if words_of(command) else ():
            words = plain_words(words)
            settings = settings_of(words)
            own = other_than(base(settings.recipe), settings)
            text = json.dumps(own).replace(str(folder), "RUNS").replace(str(ROOT), "HERE")
            found.setdefault(command, []).append(json.loads(text))
    return found


def written(values: dict[str, Any]) -> str:
    """As the file has it: a setting of a recipe a line, and a job of a command a line."""
    commands = {
        command: [json.dumps(job) for job in jobs] for command, jobs in values["commands"].items()
    }
    jobs = [
        f"  {json.dumps(command)}: [\n   " + ",\n   ".join(made) + "\n  ]"
        for command, made in commands.items()
    ]
    rest = json.dumps(
        {name: value for name, value in values.items() if name != "commands"}, indent=1
    )
    return rest.removesuffix("\n}") + ',\n "commands": {\n' + ",\n".join(jobs) + "\n }\n}\n"


if __name__ == "__main__":
    from quick_settings import QuickHydra

    os.chdir(ROOT)
    QuickHydra().serve()
    with tempfile.TemporaryDirectory() as made:
        FILE.write_text(
            written({**composed_recipes(), "commands": composed_commands(Path(made))}),
            encoding="utf-8",
        )
