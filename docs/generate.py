"""Write the pages that are made from the code and the result files: settings, Python names, result files.

python docs/generate.py            # write them
python docs/generate.py --check    # fail where a page is not what the code gives
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

from settings_page import cell, settings_page

from flashtrain.report.readme import anchor_of
from flashtrain.report.rows import read_result

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "recipes" / "results"
# Modules of the reference, and what a reader finds there.
MODULES = {
    "flashtrain": "The command in Python, and what a Lightning program needs",
    "flashtrain.models": "Models and layers as plain torch modules",
    "flashtrain.tasks": "LightningModules around a model",
    "flashtrain.integrations": "Hugging Face weights, tokenizers and models; torch's attention calls",
    "flashtrain_kernels": "The attention kernels, a distribution of their own",
    "flashtrain_kernels.masks": "Which keys each query sees",
}
FIRST_LINE = "<!-- Written by `python docs/generate.py`; what is changed here by hand is lost. -->"


def main() -> int:
    """Write the pages, or compare them; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python docs/generate.py", description="Write the pages made from the code.")
    parser.add_argument("--check", action="store_true", help="fail where a page is not what the code gives")
    check = parser.parse_args().check
    old = [name for name, text in pages().items() if not _same(DOCS / name, text, write=not check)]
    if check and old:
        print(f"out of date: {', '.join(old)}. Run: python docs/generate.py", file=sys.stderr)
        return 1
    print("every page is what the code gives" if not old else f"wrote {', '.join(old)}")
    return 0


def pages() -> dict[str, str]:
    """The generated pages by file name."""
    return {
        "reference/settings.md": settings_page(FIRST_LINE),
        "reference/api.md": api_page(),
        "results/files.md": results_page(),
    }


def _same(path: Path, text: str, *, write: bool) -> bool:
    same = path.is_file() and path.read_text(encoding="utf-8") == text
    if not same and write:
        path.write_text(text, encoding="utf-8")
    return same


def api_page() -> str:
    """The public names of each module, with the first line of their docstrings."""
    lines = [
        "# Python names",
        "",
        FIRST_LINE,
        "",
        "These names are public: what they take and give is kept, or told of in the changelog. `help(name)` says more:",
        "shapes, dtypes and errors. Everything else may change.",
        "",
    ]
    for module, about in MODULES.items():
        lines += [f"## `{module}`", "", f"{about}.", "", "| name | what it is |", "| :--- | :--- |"]
        owner = importlib.import_module(module)
        for name in sorted(owner.__all__, key=str.lower):
            if not name.startswith("__"):
                lines.append(f"| `{name}{_signature(getattr(owner, name))}` | {cell(_about(getattr(owner, name)))} |")
        lines.append("")
    return "\n".join(lines)


def _signature(thing: Any) -> str:
    """A function's parameters, without their types; nothing for a class or a value."""
    if not inspect.isfunction(thing):
        return ""
    words, starred = [], False
    for one in inspect.signature(thing).parameters.values():
        if one.kind is one.KEYWORD_ONLY and not starred:
            words.append("*")
        starred = starred or one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        words.append(f"{star}{one.name}{'' if one.default is one.empty else f'={_default(one.default)}'}")
    return f"({', '.join(words)})"


def _default(value: Any) -> str:
    return repr(value) if isinstance(value, (bool, int, float, str, tuple, type(None))) else "..."


def _about(thing: Any) -> str:
    """The first sentence of a docstring; of a plain value, its type or itself."""
    is_documented = inspect.isclass(thing) or inspect.isroutine(thing) or inspect.ismodule(thing)
    if not is_documented:
        return f"a constant ({type(thing).__name__})"
    first = " ".join(inspect.cleandoc(thing.__doc__ or "").split("\n\n")[0].split())
    return re.split(r"(?<=[^.]\.)\s+(?=[A-Z])", first)[0]


def results_page() -> str:
    """Every result file: what was measured when and on what, and where its table and its command stand."""
    lines = [
        "# How each published result was made",
        "",
        FIRST_LINE,
        "",
        "Every published figure is backed by a file, `recipes/results/NAME.json`: recipe, command, date, device,",
        "versions and rows. Tables and figures are drawn from those files. The command of a result stands behind a fold",
        "under its table. On such a machine it makes the result again, if the files that it names are in the repository.",
        "",
        "```bash",
        "# measure, keep the rows as a file, draw the tables again, and see whether they agree",
        "python -m flashtrain recipe=gpt2-speed benchmark.max_seconds=540",
        "python -m flashtrain.report runs/gpt2-speed/... --save recipes/results/NAME.json",
        "python -m flashtrain.report --insert recipes/results/README.md",
        "python -m flashtrain.report --check README.md --check recipes/results/README.md",
        "```",
        "",
        "| result | table and command | recipe | date | device |",
        "| :--- | :--- | :--- | :--- | :--- |",
    ]
    places = _places()
    for path in sorted(RESULTS.glob("*.json")):
        result = read_result(path)
        place = places.get(path.stem, "")
        recipe = f"`{result.recipe}`" if (RESULTS.parent / f"{result.recipe}.yaml").is_file() else result.recipe
        link = f"[{path.stem}](../../recipes/results/{path.name})"
        lines.append(f"| {link} | {place} | {recipe} | {result.date} | {cell(result.device)} |")
    return "\n".join([*lines, ""])


def _places() -> dict[str, str]:
    """A link to the heading under which a page shows each result: the page of results first."""
    found: dict[str, str] = {}
    names = [path.stem for path in RESULTS.glob("*.json")]
    for page in (
        RESULTS / "README.md",
        DOCS / "results" / "benchmarks.md",
        DOCS.parent / "kernels" / "dev" / "OPTIMISATION.md",
    ):
        heading = ""
        for line in page.read_text(encoding="utf-8").splitlines():
            if line.startswith("#"):
                heading = line.lstrip("# ")
            for name in names:
                if re.search(rf"(?<![\w-]){name}(?![\w-])", line):
                    link = os.path.relpath(page, DOCS / "results").replace(os.sep, "/")
                    found.setdefault(name, f"[{heading}]({link}#{anchor_of(heading)})")
    return found


if __name__ == "__main__":
    sys.exit(main())
