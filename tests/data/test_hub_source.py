"""Datasets read through `datasets`: from a local folder here, since tests have no network."""

from __future__ import annotations

import sys

import pytest

from flashtrain.data import hub_source
from flashtrain.data.hub_source import HubSource
from flashtrain.errors import UserError

datasets = pytest.importorskip("datasets")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "one", "n": 1}\n{"text": "two", "n": 2}\n{"text": null, "n": 3}\n')
    return folder


@pytest.fixture
def offline(monkeypatch):
    def unreachable(*args, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr(hub_source, "_ask_hub", unreachable)
    monkeypatch.setattr(datasets, "load_dataset", unreachable)


def test_a_local_folder_is_streamed_row_by_row(folder):
    source = HubSource(str(folder))
    assert list(source.documents()) == ["one", "two"]
    assert str(folder) in source.describe()


def test_only_the_first_documents_are_read_when_asked(folder):
    assert list(HubSource(str(folder), max_documents=1).documents()) == ["one"]


def test_a_missing_or_wrong_column_is_told(folder):
    with pytest.raises(UserError, match=r"no column 'body'\. Possible: text, n"):
        list(HubSource(str(folder), text_column="body").documents())
    with pytest.raises(UserError, match="column 'n' holds int, not text"):
        list(HubSource(str(folder), text_column="n").documents())


def test_an_unknown_split_is_one_line(folder):
    with pytest.raises(UserError, match=r"cannot load dataset .*, split nosuch") as told:
        list(HubSource(str(folder), split="nosuch").documents())
    assert "\n" not in str(told.value)


def test_without_network_one_line_names_dataset_and_remedy(offline):
    source = HubSource("someone/something")
    with pytest.raises(UserError, match=r"someone/something.*no network.*data=files") as told:
        list(source.documents())
    assert "\n" not in str(told.value)
    assert source.approximate_bytes() is None


def test_a_connection_lost_midway_is_one_line(monkeypatch):
    def rows():
        yield {"text": "one"}
        raise ConnectionError("connection reset")

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: rows())
    with pytest.raises(UserError, match="failed after 1 documents: connection reset"):
        list(HubSource("someone/something").documents())


def test_without_datasets_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'flashtrain\[hub\]'"):
        list(HubSource("someone/something").documents())


def test_a_local_folders_fingerprint_follows_its_files(folder):
    first = HubSource(str(folder)).fingerprint()
    assert HubSource(str(folder)).fingerprint() == first
    assert HubSource(str(folder), split="test").fingerprint() != first
    (folder / "more.jsonl").write_text('{"text": "x"}\n')
    assert HubSource(str(folder)).fingerprint() != first


def test_the_fingerprint_follows_the_commit_and_offline_the_last_one_seen(monkeypatch):
    def unreachable(*args):
        raise ConnectionError("no network")

    fingerprints = []
    for ask in (lambda *_: "commit1", unreachable, lambda *_: "commit2", unreachable):
        monkeypatch.setattr(hub_source, "_ask_hub", ask)
        fingerprints.append(HubSource("someone/something").fingerprint())
    first, first_offline, second, second_offline = fingerprints
    assert first == first_offline
    assert first != second
    assert second == second_offline
