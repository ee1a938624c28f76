"""Datasets read through `datasets`: from a local folder here, since tests have no network."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import huggingface_hub
import pytest

from flashtrain.data.hub_source import HubSource
from flashtrain.errors import UserError
from flashtrain.settings.data import DataSettings
from flashtrain.settings.text import TextSettings
from flashtrain.tasks.text_data import make_source

datasets = pytest.importorskip("datasets")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "train.jsonl").write_text(
        '{"text": "one", "n": 1}\n{"text": "two", "n": 2}\n{"text": null, "n": 3}\n'
    )
    return folder


def test_a_local_folder_is_streamed_row_by_row(folder):
    source = HubSource(str(folder))
    assert list(source.documents()) == ["one", "two"]
    assert str(folder) in source.describe()


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
    def unreachable(*args, **options):
        raise ConnectionError("no network")

    def at(commit):
        return lambda *args, **options: SimpleNamespace(sha=commit)

    fingerprints = []
    for answer in (at("commit1"), unreachable, at("commit2"), unreachable):
        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", answer)
        fingerprints.append(HubSource("someone/something").fingerprint())
    first, first_offline, second, second_offline = fingerprints
    assert first == first_offline
    assert first != second
    assert second == second_offline


def files(path, split="train", **settings):
    return make_source(DataSettings(source="files", path=str(path), split=split, **settings))


def test_a_folder_of_save_to_disk_is_read_as_files_are(tmp_path):
    datasets.Dataset.from_dict({"text": ["one", None, "two"], "n": [1, 2, 3]}).save_to_disk(
        tmp_path / "saved"
    )
    source = files(tmp_path / "saved")
    assert list(source.documents()) == ["one", "two"]
    assert source.approximate_bytes() > 0
    before = source.fingerprint()
    (tmp_path / "saved").rename(tmp_path / "moved")
    assert files(tmp_path / "moved").fingerprint() == before


def test_of_a_saved_dataset_dict_a_split_is_read(tmp_path):
    parts = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path)
    assert list(files(tmp_path).documents()) == ["train"]
    assert list(files(tmp_path, "test").documents()) == ["test"]
    assert files(tmp_path).fingerprint() != files(tmp_path, "test").fingerprint()
    with pytest.raises(UserError, match=r"data\.split 'dev'"):
        files(tmp_path, "dev")


def test_plain_files_have_no_split(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(
        UserError, match=r"data\.split=test is for datasets that save_to_disk wrote"
    ):
        files(tmp_path, "test")


def test_options_reach_load_dataset_and_the_fingerprint(folder, monkeypatch):
    (folder / "other.csv").write_text("text\nfrom csv\n")
    options = {"data_files": "other.csv"}
    settings = TextSettings(data=DataSettings(source="hub", name=str(folder), options=options))
    assert list(make_source(settings.data).documents()) == ["from csv"]
    assert make_source(settings.data).fingerprint() != HubSource(str(folder)).fingerprint()
