"""Which files of a folder are its text: git's own answer is the oracle for
nested .gitignore files."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path, PurePath

import pytest

from flashtrain.data.ignored_files import ignored_files
from flashtrain.data.text_files import FilesSource
from flashtrain.errors import UserError

NAMES = (
    "a",
    "b",
    "build",
    "x.py",
    "y.log",
    "keep.log",
    "two words",
    "doc",
    "Z.TXT",
    "[x]",
    "é.txt",
    "#c",
    "!d",
)
PATTERNS = (
    "a", "b/", "/a", "/b/", "*.log", "!keep.log", "build", "build/", "!build/", "a/*", "!a/b",
    "**/doc", "doc/**",
    "a/**/b", "*.py", "!x.py", "/*", "!/a/", "!/a", r"two\ words", "two words ", "*", "!*/",
    "!*.py", "[ab]", "?",
    r"\#c", r"\!d", "# comment", "", "a/b/", "x.*", "**/a/**", "*/a", "[!a]", "é.txt", "**", "a**",
    "b/\r", "doc/*/x.py",
)  # fmt: skip


def kept_by_git(folder: Path) -> set[PurePath]:
    subprocess.run(["git", "init", "-q", folder], check=True)
    words = [
        "git",
        "-c",
        "core.excludesFile=/dev/null",
        "-C",
        folder,
        "ls-files",
        "-oz",
        "--exclude-standard",
    ]
    listed = subprocess.run(words, check=True, capture_output=True).stdout.decode().split("\0")
    return {PurePath(name) for name in listed if name and not name.endswith(".gitignore")}


@pytest.mark.parametrize("seed", range(40))
def test_what_is_ignored_is_what_git_ignores(tmp_path: Path, seed: int) -> None:
    draw, folders = random.Random(seed), [tmp_path / "root"]
    folders[0].mkdir()
    for _ in range(draw.randint(3, 9)):
        folder = draw.choice(folders) / draw.choice(NAMES)
        folders += [] if folder.exists() else [folder]
        folder.mkdir(exist_ok=True)
    for folder in folders:
        for name in draw.choices(NAMES, k=4):
            if not (folder / name).exists():
                (folder / name).touch()
        if folder == folders[0] or draw.random() < 0.5:
            (folder / ".gitignore").write_text("\n".join(draw.choices(PATTERNS, k=3)), newline="")
    found = {path.relative_to(folders[0]) for path in folders[0].rglob("*") if path.is_file()}
    found = {name for name in found if name.name != ".gitignore"}
    assert found - ignored_files(found, folders[0]) == kept_by_git(folders[0])


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of Python with what lies about in one."""
    texts = {
        "README.md": "readme", "setup.py": "setup", "src/train.py": "train",
        "src/deep/eval.py": "eval",
        "src/Makefile": "all:", "tests/test_it.py": "test", "build/lib.py": "built",
        "notes.log": "log",
        ".gitignore": "build/\n*.log\n", ".github/ci.yml": "hidden",
        ".git/config": "hidden", "env/pyvenv.cfg": "home", "env/lib/pip.py": "pip",
        "conda/conda-meta/history": "1",
        "conda/lib/x.py": "x", "web/node_modules/left/pad.js": "pad", "web/a.js": "js",
        "runs/gpt2/1/flashtrain.log": "log", "runs/gpt2/1/config.yaml": "seed: 1",
    }  # fmt: skip
    for name, text in texts.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "project" / "logo.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (tmp_path / "project" / "old.c").write_bytes("// für".encode("latin-1"))
    return tmp_path / "project"


def test_a_folder_of_code_is_read_whole_whatever_the_endings_and_what_is_left_out_is_counted(
    project: Path,
) -> None:
    source = FilesSource(project)
    assert list(source.documents()) == ["readme", "setup", "all:", "eval", "train", "test", "js"]
    assert source.held_out() is None  # train.py, eval.py and tests are programs
    read, left = source.describe().split(" (left out, as no text, ignored or not data.files: ")
    assert read == f"files in {project}: 4 .py, 1 .md, 1 without ending, 1 .js"
    assert "4 .py" not in left
    for counted in ("3 .py", "1 .png", "1 .c", "2 .log", "1 .yaml", "1 .js"):
        assert counted in left
    moved = project.rename(project.with_name("moved"))
    assert FilesSource(moved).fingerprint() == source.__class__(moved).fingerprint()


@pytest.mark.parametrize(
    ("patterns", "texts"),
    [
        ("*.py", ["setup", "eval", "train", "test"]),
        (["SRC/**/*.PY"], ["eval", "train"]),  # case is no matter
        (["*.py", "!tests/**"], ["setup", "eval", "train"]),
        (["src", "*.js"], ["all:", "eval", "train", "js"]),
    ],
)
def test_patterns_choose_among_what_is_not_ignored(
    project: Path, patterns: object, texts: list[str]
) -> None:
    assert list(FilesSource(project, patterns=patterns).documents()) == texts


def test_ignored_files_are_read_on_request_and_with_another_encoding_other_text_is(
    project: Path,
) -> None:
    texts = list(FilesSource(project, include_ignored=True).documents())
    assert {"built", "log", "pip", "pad", "seed: 1"} <= set(texts)
    assert "hidden" not in texts
    assert "// für" in FilesSource(project, encoding="latin-1").documents()
    assert "// f\ufffdr" in FilesSource(project, encoding_errors="replace").documents()


def test_a_file_that_is_named_is_read_though_it_is_ignored_and_an_ignored_folder_too(
    project: Path,
) -> None:
    assert list(FilesSource(project / "notes.log", patterns="*.py").documents()) == ["log"]
    assert list(FilesSource(project / "build").documents()) == ["built"]
    with pytest.raises(UserError, match=r"data\.path=.*\(left out, .* 1 \.png"):
        FilesSource(project, patterns="*.png").files()


def test_a_cache_of_tokens_that_lies_in_the_folder_is_none_of_its_text(tmp_path: Path) -> None:
    for name in (
        "a.txt",
        "bytes-1/meta.json",
        "bytes-1/tokens.bin",
        "bytes-2.building/tokenizer/kind.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "bytes-2.lock").touch()
    assert list(FilesSource(tmp_path).documents()) == ["text"]
