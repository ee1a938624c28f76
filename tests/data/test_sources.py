"""The source code of the standard library as text."""

from __future__ import annotations

import json

import pytest

from flashtrain.data import sources
from flashtrain.data.sources import StandardLibrarySource
from flashtrain.errors import UserError


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    folder = tmp_path / "lib"
    for name in (
        "json/tool.py",
        "test/test_json.py",
        "unittest/test/one.py",
        "site-packages/numpy.py",
        "notes.txt",
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    monkeypatch.setattr(sources.sysconfig, "get_paths", lambda: {"stdlib": str(folder)})
    return folder


def test_the_running_pythons_own_library_is_real_text():
    source = StandardLibrarySource()
    assert source.approximate_bytes() > 5_000_000
    assert any(json.__doc__.strip()[:60] in text for text in source.documents())


def test_every_python_file_but_installed_packages_is_a_document_in_order_of_paths(small_library):
    (small_library / "latin.py").write_bytes(b"# \xe9t\xe9")  # not UTF-8
    texts = list(StandardLibrarySource().documents())
    assert texts == ["# json/tool.py\n", "# test/test_json.py\n", "# unittest/test/one.py\n"]
    without = StandardLibrarySource(include_tests=False)
    assert list(without.documents()) == ["# json/tool.py\n"]
    assert "without its tests" in without.describe()


def test_the_fingerprint_follows_paths_sizes_and_python(small_library, monkeypatch):
    source = StandardLibrarySource()
    first = source.fingerprint()
    assert first == StandardLibrarySource().fingerprint()
    assert first != StandardLibrarySource(include_tests=False).fingerprint()
    (small_library / "json" / "tool.py").write_text("# longer than before\n")
    assert source.fingerprint() != first
    second = source.fingerprint()
    monkeypatch.setattr(sources.platform, "python_version", lambda: "3.99.0")
    assert source.fingerprint() != second


def test_a_python_without_its_sources_is_reported_in_one_line(small_library, monkeypatch, tmp_path):
    monkeypatch.setattr(
        sources.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "nothing")}
    )
    with pytest.raises(UserError, match="no source files of the Python standard library") as told:
        StandardLibrarySource().fingerprint()
    assert "\n" not in str(told.value)
