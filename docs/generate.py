"""Write the pages that are made from the code and other files: settings, Python names,
notebook, other trainers' names, result files.

python docs/generate.py            # write them
python docs/generate.py --check    # fail where a page is not what the code gives
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from coming_pages import coming_pages
from settings_page import cell, settings_page

from flashtrain.report.readme import anchor_of
from flashtrain.report.rows import read_result

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "recipes" / "results"
# Modules of the reference, the page of each, and what a reader finds there.
MODULES = {
    "flashtrain": ("flashtrain.md", "The command in Python, and what a Lightning program needs"),
    "flashtrain.models": ("models.md", "Models and layers as plain torch modules"),
    "flashtrain.tasks": ("tasks.md", "LightningModules around a model"),
    "flashtrain.integrations": (
        "integrations.md",
        "Hugging Face weights, tokenizers and models; torch's attention calls",
    ),
    "flashtrain_kernels": ("kernels.md", "The attention kernels, a distribution of their own"),
    "flashtrain_kernels.masks": ("masks.md", "Which keys each query sees"),
}
FIRST_LINE = "<!-- Written by `python docs/generate.py`; what is changed here by hand is lost. -->"


def main() -> int:
    """Write the pages, or compare them; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python docs/generate.py", description="Write the pages made from the code."
    )
    parser.add_argument(
        "--check", action="store_true", help="fail where a page is not what the code gives"
    )
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
        **{f"reference/api/{page}": module_page(module) for module, (page, _) in MODULES.items()},
        "start/notebook.md": notebook_page(),
        **coming_pages(FIRST_LINE),
        "results/files.md": results_page(),
    }


def _same(path: Path, text: str, *, write: bool) -> bool:
    same = path.is_file() and path.read_text(encoding="utf-8") == text
    if not same and write:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return same


def api_page() -> str:
    """The public names of each module, with the first sentence of their docstrings."""
    lines = [
        "# Python names",
        "",
        FIRST_LINE,
        "",
        (
            "These names are public: "
            "what they take and give does not change without a line in the changelog."
        ),
        "Everything else may change. A name leads to its parameters; `help(name)` prints the same.",
        "",
    ]
    homes = _homes()
    for module, (_, about) in MODULES.items():
        lines += [f"## `{module}`", "", f"{about}.", "", "| name | what it is |", "| :--- | :--- |"]
        for name, thing in _public(module):
            link = (
                f"[`{name}`](api/{homes[_path(thing)]}#{_path(thing)})"
                if _is_documented(thing)
                else f"`{name}`"
            )
            lines.append(f"| {link} | {cell(_about(thing))} |")
        lines.append("")
    lines += [
        "## For what you add",
        "",
        "Imported by the programs of the pages on extending, and public as well.",
        "",
        "| name | module | page |",
        "| :--- | :--- | :--- |",
    ]
    lines += [
        f"| `{name}` | `{module}` | [{page}](../extend/{page}) |"
        for name, module, page in _of_programs()
    ]
    return "\n".join([*lines, ""])


def _of_programs() -> list[tuple[str, str, str]]:
    """Names that programs of docs/extend import from modules that are not in MODULES: (name,
    module, page)."""
    found = []
    for page in sorted(DOCS.glob("extend/*.md")):
        for module, names in re.findall(
            r"^from (flashtrain[\w.]+) import (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE
        ):
            if module not in MODULES:
                found += [(name, module, page.name) for name in names.split(", ")]
    return sorted(found)


def module_page(module: str) -> str:
    """The docstrings of a module's public functions and classes, which mkdocstrings puts in on the
    site; a link to those that a page further down has."""
    lines = [
        f"# {module}",
        "",
        FIRST_LINE,
        "",
        f"{MODULES[module][1]}. `help(NAME)` prints what the site shows here.",
        "",
    ]
    homes, page = _homes(), MODULES[module][0]
    # A name and its older one mean the same thing.
    for thing in dict.fromkeys(one for _, one in _public(module) if _is_documented(one)):
        home, path = homes[_path(thing)], _path(thing)
        link = f"`{thing.__name__}` stands [on another page]({home}#{path})."
        lines += [f"::: {path}" if home == page else link, ""]
    return "\n".join(lines)


def notebook_page() -> str:
    """The notebook with the outputs that are saved in it."""
    lines = []
    for one in json.loads((DOCS / "start" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]:
        source = "".join(one["source"])
        lines += [f"```py\n{source}\n```" if one["cell_type"] == "code" else source, ""]
        for output in one.get("outputs", []):
            lines += [f"```text\n{''.join(output.get('text', [])).rstrip()}\n```", ""]
    title, *rest = lines
    heading, text = title.split("\n", 1)
    return "\n".join([heading, "", FIRST_LINE, text, *rest])


def _public(module: str) -> list[tuple[str, Any]]:
    owner = importlib.import_module(module)
    names = sorted((name for name in owner.__all__ if not name.startswith("__")), key=str.lower)
    return [(name, getattr(owner, name)) for name in names]


def _path(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


@functools.cache
def _homes() -> dict[str, str]:
    """The one page that shows each function and class: the last of those that could."""
    return {
        _path(thing): page
        for module, (page, _) in MODULES.items()
        for _, thing in _public(module)
        if _is_documented(thing)
    }


def _is_documented(thing: Any) -> bool:
    return inspect.isclass(thing) or inspect.isfunction(thing)


def _about(thing: Any) -> str:
    """The first sentence of a docstring; of a plain value, its type or itself."""
    if not (inspect.isclass(thing) or inspect.isroutine(thing) or inspect.ismodule(thing)):
        return f"a constant ({type(thing).__name__})"
    first = " ".join(inspect.cleandoc(thing.__doc__ or "").split("\n\n")[0].split())
    return re.split(r"(?<=[^.]\.)\s+(?=[A-Z])", first)[0]


def results_page() -> str:
    """Every result file: what was measured when and on what, and where its table
    and its command stand."""
    lines = [
        "# How each published result was made",
        "",
        FIRST_LINE,
        "",
        (
            "Every published figure is backed by a file, `recipes/results/NAME.json`: "
            "recipe, command, date, device,"
        ),
        (
            "versions and rows. Tables and figures are drawn from those files. "
            "The command of a result stands behind a"
        ),
        (
            "fold under its table. "
            "On such a machine it makes the result again, if the files that it names are in the"
        ),
        "repository.",
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
        recipe = (
            f"`{result.recipe}`"
            if (RESULTS.parent / f"{result.recipe}.yaml").is_file()
            else result.recipe
        )
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
        DOCS / "train" / "memory.md",
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
