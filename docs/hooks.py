"""For mkdocs: what a page links to outside of docs/ becomes part of the site, so that links
work there as on GitHub.

Pages of the repository (recipes/README.md, ...) come as pages, everything else (figures, result
files, recipes) as files, all under repository/. A link to nothing is left as it is, so that `mkdocs
build --strict` complains.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)\s#]+)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add what is linked to, and what that links to."""
    waiting = sorted(DOCS.rglob("*.md"))
    seen = {*waiting}
    while waiting:
        page = waiting.pop()
        for link in LINK.findall(page.read_text(encoding="utf-8")):
            target = _target(page, link[1])
            if target is None or target in seen:
                continue
            seen.add(target)
            if not target.is_relative_to(DOCS):
                files.append(File.generated(config, _uri(target), abs_src_path=str(target)))
            if target.suffix == ".md":
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at where on_files put things."""
    source = Path(str(page.file.abs_src_path))
    here = PurePosixPath(page.file.src_uri).parent

    def pointed(found: re.Match[str]) -> str:
        target = _target(source, found[2])
        return (
            found[0]
            if target is None
            else found[1] + os.path.relpath(_uri(target), here).replace(os.sep, "/")
        )

    return LINK.sub(pointed, markdown)


def _target(page: Path, link: str) -> Path | None:
    """The file that a page's link means; a folder's README. None for what does not
    exist or lies elsewhere."""
    target = (page.parent / link).resolve()
    if target.is_dir():
        target = target / "README.md"
    return target if target.is_file() and target.is_relative_to(ROOT) else None


def _uri(target: Path) -> str:
    """Where a file lies in the site's sources."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    return f"repository/{target.relative_to(ROOT).as_posix()}"
