"""The source code of the installed packages as text."""

from __future__ import annotations

from importlib.metadata import distributions
from types import SimpleNamespace

import pytest

from flashtrain.command.compose import compose_settings
from flashtrain.data import packages, sources
from flashtrain.data.datamodule import TextDataModule
from flashtrain.data.packages import PackagesSource
from flashtrain.run.machine import apply_demo
from flashtrain.settings.command_line import CommandLine

COMMON = "# os\n" + "z = 3\n" * 999  # more than may be held out
SMALL = [f"small{letter}{more}" for letter in "abcdefghijklmnopqrstuvwxyz" for more in ("", "2")]


def install(folder, name: str, files: dict[str, str]) -> None:
    """Put a package and its list of files where an installer would."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (info / "RECORD").write_text(
        "".join(f"{path},sha256={abs(hash(text))},9\n" for path, text in files.items())
    )


@pytest.fixture
def site(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    install(
        folder,
        "Big.One",
        {f"big/{number}.py": f"# big {number}\n" + "x = 1\n" * 2000 for number in range(9)},
    )
    others = {
        "big/a.pyi": "i",
        "other/tests/a.py": "t",
        "other/_vendor/a.py": "v",
        "other/long.py": "l" * 200_001,
    }
    install(
        folder,
        "other",
        {**others, "other/a.py": "# other\n", "../bin/a.py": "b", "other/same.py": COMMON},
    )
    for name in SMALL:
        install(folder, name, {f"{name}.py": f"# {name}\n" + "y = 2\n" * 40})
    (folder / "other" / "binary.py").write_bytes(b"\xe9")
    library = tmp_path / "lib"
    library.mkdir()
    (library / "os.py").write_text(COMMON)
    monkeypatch.setattr(
        packages, "distributions", lambda: list(distributions(path=[str(folder)]))[::-1]
    )
    monkeypatch.setattr(sources.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    return folder


def test_the_running_environment_is_much_text_of_several_packages():
    source = PackagesSource()
    found = source.fingerprint(), source.approximate_bytes()
    assert found[1] > 20_000_000
    assert found == (PackagesSource().fingerprint(), PackagesSource().approximate_bytes())
    held_out = source.held_out()
    assert 0 < held_out.approximate_bytes() < 0.03 * source.approximate_bytes()


def test_documents_are_whole_packages_in_order_of_their_names_without_copies_tests_and_giants(site):
    source = PackagesSource()
    held_out = source.held_out()
    texts, apart = list(source.documents()), list(held_out.documents())
    names = [text.split("\n")[0].removeprefix("# ") for text in texts]
    others = [name for name in names if not name.startswith("small")]
    # The library's copy is of "python".
    assert others == [*(f"big {number}" for number in range(9)), "other", "os"]
    assert names == sorted(names, key=lambda name: name.replace("os", "other 2"))
    assert len(texts) + len(apart) == len(others) + len(SMALL)
    assert len(apart) > 2
    assert all(text.startswith("# small") for text in apart)
    assert not set(apart) & set(texts)
    assert {text.split("\n")[0].rstrip("2") for text in apart}.isdisjoint(
        f"# {name}".rstrip("2") for name in names
    )
    assert held_out.held_out() is None
    assert "# tests" not in texts
    assert "t" in list(PackagesSource(include_tests=True).documents())


def test_a_copy_of_what_is_held_out_is_not_trained_on(site):
    source = PackagesSource()
    held_out = next(iter(source.held_out().documents()))
    (site / "other" / "a.py").write_text(held_out)
    assert held_out not in list(PackagesSource().documents())


def test_of_more_text_than_the_most_files_of_every_package_are_drawn(site, monkeypatch):
    monkeypatch.setattr(packages, "MAX_BYTES", 60_000)
    source = PackagesSource()
    assert source.approximate_bytes() + source.held_out().approximate_bytes() <= 60_000
    assert {file.package for file in source._files} > {"big", "other"}
    assert list(source.documents()) == list(PackagesSource().documents())


@pytest.mark.parametrize("change", ["another text", "another package", "no longer there"])
def test_the_token_cache_follows_what_is_installed(site, tmp_path, change):
    def data():
        module = TextDataModule(PackagesSource(), "bytes", 16, cache_dir=tmp_path / "cache")
        module.prepare_data()
        return module

    first = data()
    assert data().cache.files == first.cache.files
    held_out = sum(len(text) + 1 for text in PackagesSource(split="validation").documents())
    assert first.validation_tokens == held_out > 0
    if change == "another package":
        install(site, "new", {"new.py": "# new\n"})
    elif change == "another text":
        (site / "other" / "a.py").write_text("# changed\n")
    else:
        (site / "other" / "a.py").unlink()
    assert data().cache.files != first.cache.files


@pytest.mark.parametrize(
    ("words", "source"),
    [
        ([], "stdlib"),
        (["data=packages"], "packages"),
        (["data.source=packages"], "packages"),
        (["data=files", "data.path=BOOKS"], "files"),
    ],
)
def test_the_demo_reads_the_standard_library_unless_the_command_line_names_a_text(words, source):
    words = ["recipe=gpt2", *words]
    assert apply_demo(compose_settings(words), CommandLine(words).by_name).data.source == source
    assert compose_settings(words).data.source == ("files" if source == "files" else "packages")


def test_two_packages_of_one_name_are_read_once(monkeypatch):
    empty = {"files": None, "read_text": lambda name: None}
    found = [SimpleNamespace(metadata={"Name": name}, **empty) for name in ("a.b", "A_B", None)]
    monkeypatch.setattr(packages, "distributions", lambda: found)
    assert {file.package for file in PackagesSource()._files} == {"python"}


def test_python_files_are_those_that_importlib_lists_without_its_looking_for_each(
    tmp_path, monkeypatch
):
    folder = tmp_path / "site"
    files = dict.fromkeys(["a/b.py", "a/b.pyc", "a/data.txt", 'a/with,"comma.py', "b.py"], "text")
    install(folder, "listed", files)
    record = folder / "listed-1.0.dist-info" / "RECORD"
    quoted = record.read_text().replace('a/with,"comma.py', '"a/with,""comma.py"')
    record.write_text(quoted + "a/no_hash.py,,\n")
    (folder / "a" / "no_hash.py").write_text("text")
    old = folder / "old-2.0.egg-info"
    old.mkdir()
    (old / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: old\nVersion: 2.0\n")
    (old / "SOURCES.txt").write_text("b.py\nREADME\n")
    found = list(distributions(path=[str(folder)]))
    wanted = {
        one.name: {
            path.as_posix(): path.hash.value if path.hash else one.version
            for path in one.files
            if path.suffix == ".py"
        }
        for one in found
    }
    assert len(wanted["listed"]) == 4
    assert wanted["old"] == {"b.py": "2.0"}
    assert {one.name: dict(packages._python_files(one)) for one in found} == wanted
    listed = next(one for one in found if one.name == "listed")
    monkeypatch.setattr(type(listed), "files", property(lambda self: pytest.fail("looks for each")))
    assert dict(packages._python_files(listed)) == wanted["listed"]
