"""export.push: the export with its card on a hub that is a folder here."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

import flashtrain
from flashtrain.errors import UserError
from flashtrain.version import __version__


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that gets what would be uploaded."""

    class Api:
        def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> SimpleNamespace:
            assert private
            assert exist_ok
            owned = name if "/" in name else f"me/{name}"
            (tmp_path / "hub" / owned).mkdir(parents=True, exist_ok=True)
            return SimpleNamespace(repo_id=owned)

        def upload_folder(self, *, repo_id: str, folder_path: Path) -> str:
            shutil.copytree(folder_path, tmp_path / "hub" / repo_id, dirs_exist_ok=True)
            return f"https://hub/{repo_id}"

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    return tmp_path / "hub"


def test_a_pushed_export_is_read_from_the_hub_and_its_card_says_how_it_was_made(
    lora: Path, base: Path, hub: Path
) -> None:
    folder = flashtrain.export(lora, export={"push": "sums"})
    there = hub / "me" / "sums"
    assert {one.name for one in there.iterdir()} == {one.name for one in folder.iterdir()}
    AutoModelForCausalLM.from_pretrained(there)
    card = ModelCard.load(there / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.license is None
    assert card.data.base_model is None  # a folder of this machine is no name on the hub
    for line in (
        f"| base model | {base.name} |", "| adapter | lora of rank 16, merged |",
        "| data | chats.jsonl (chat) |", "| tokens | 1,536 |", "| context | 96 |",
        f"| flashtrain | {__version__} |",
    ):  # fmt: skip
        assert line in card.text
    assert "validation loss" in card.text
    assert "`python -m flashtrain recipe=sft" in card.text
    assert f"model.path={base.name} " in card.text
    assert str(base.parent) not in card.text


def test_a_missing_token_is_said_before_anything_is_written(
    lora: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    before = {one.name for one in lora.iterdir()}
    with pytest.raises(UserError, match=r"export\.push=me/sums needs a token"):
        flashtrain.export(lora, export={"push": "me/sums"})
    assert {one.name for one in lora.iterdir()} == before
    assert not hub.exists()


@pytest.mark.parametrize("name", ["/tmp/sums", "../sums", "a/b/c", "my sums", "~/sums", "."])
def test_a_folder_is_no_name_on_the_hub_with_or_without_a_token(
    name: str, lora: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(UserError, match=r"Expected OWNER/NAME, or NAME; .* in the run's folder"):
        flashtrain.export(lora, export={"push": name})


def test_so_is_what_the_hub_refuses(lora: Path, hub: Path) -> None:
    before = {one.name for one in lora.iterdir()}
    (hub / "me").mkdir(parents=True)
    (hub / "me" / "sums").write_text("no folder")
    with pytest.raises(UserError, match=r"export\.push=sums: the hub reports: "):
        flashtrain.export(lora, export={"push": "sums"})
    assert {one.name for one in lora.iterdir()} == before
