"""Find the files of a folder that are not its own text: what .gitignore names, what was
installed or written there."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from pathlib import Path, PurePath

from pathspec import GitIgnoreSpec

# What is in the folder of a virtual environment, of one of conda's, of a run, of the cache,
# or of cached tokens.
MARKS = ("pyvenv.cfg", "conda-meta", "flashtrain.log", "content-hashes", "tokens.bin")


def ignored_files(found: Collection[PurePath], folder: Path | None) -> set[PurePath]:
    """Return those of the found files that git would ignore, and those of environments,
    node_modules, runs and caches.

    Args:
        found: the paths within the folder.
        folder: the local folder whose own .gitignore files count, not those above
            it; None: none are read.
    """
    parents = {parent for name in found for parent in name.parents}
    files = (
        {parent: folder / parent / ".gitignore" for parent in parents} if folder is not None else {}
    )
    texts = {
        parent: file.read_text("utf-8-sig", "surrogateescape")
        for parent, file in files.items()
        if file.is_file()
    }
    rules = {parent: GitIgnoreSpec.from_lines(text.split("\n")) for parent, text in texts.items()}
    made = {name.parent for name in (*found, *parents) if name.name in MARKS}
    made |= {
        parent
        for parent in parents
        if parent.name == "node_modules" or parent.suffix == ".building"
    }

    @cache
    def ignored(name: PurePath, end: str = "") -> bool:
        if name == PurePath():
            return False
        # What is in an ignored folder stays so, as in git.
        if ignored(name.parent, "/") or name in made:
            return True
        # The nearest one's last rule decides.
        for above in (parent for parent in name.parents if parent in rules):
            path = name.relative_to(above).as_posix()
            for rule in reversed(rules[above].patterns):
                hit = rule.match_file(path + end)
                # pathspec's rules match what is below a folder that they name, too:
                # ps_d marks its end.
                if hit and (
                    hit.match.groupdict().get("ps_d") is None
                    or hit.match.start("ps_d") == len(path)
                ):
                    return bool(rule.include)
        return False

    return {name for name in found if ignored(name)}
