"""The folder that a run leaves, and how a later command finds its way back into it."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from flashtrain.command.checkpoint_settings import settings_from_checkpoint
from flashtrain.command.compose import compose_settings
from flashtrain.command.overrides import plain_words
from flashtrain.errors import UserError
from flashtrain.folders.new_folder import make_unique, new_folder
from flashtrain.folders.run_folder import (
    BEST,
    CHECKPOINTS,
    LAST,
    SETTINGS,
    check_config,
    find_checkpoint,
    note_failure,
    older_values,
    read_settings,
    read_summary,
    write_config,
    write_summary,
)
from flashtrain.folders.run_lock import let_go
from flashtrain.folders.same_training import find_same, find_unfinished
from flashtrain.settings.aliases import NEWER
from flashtrain.settings.schema import schema_of
from flashtrain.settings.settings import Settings


def leave_run(
    parent: Path, name: str, words: list[str], *, status: str | None = None, checkpoint: bool = True
) -> Path:
    folder = parent / name
    (folder / CHECKPOINTS).mkdir(parents=True)
    write_config(asdict(compose_settings(["recipe=gpt2", *words])), folder)
    if checkpoint:
        (folder / CHECKPOINTS / LAST).write_bytes(b"x")
    if status is not None:
        write_summary(folder, {"status": status})
    return folder


def test_settings_survive_the_way_through_config_yaml(tmp_path) -> None:
    settings = compose_settings(
        ["recipe=gpt2", "context=512", "data=hub", "data.name=a/b", "+data.options.depth=3"]
    )
    write_config(asdict(settings), tmp_path)
    assert read_settings(tmp_path) == settings


def test_groups_of_other_tasks_in_an_older_config_yaml_are_left_out(tmp_path) -> None:
    settings = compose_settings(["recipe=lra-listops"])
    write_config(asdict(settings), tmp_path)
    with (tmp_path / "config.yaml").open("a") as file:
        file.write("context: 1024\nmodel: {name: gpt2}\nbert: {size: large}\n")
    assert read_settings(tmp_path) == settings


def test_two_folders_of_the_same_name_are_two_folders(tmp_path) -> None:
    assert [make_unique(tmp_path, "a").name for _ in range(3)] == ["a", "a-2", "a-3"]


def test_a_folder_appears_when_it_is_whole_and_a_kill_leaves_none(tmp_path) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=killed_in_new_folder, args=(tmp_path,)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not [one for one in tmp_path.iterdir() if not one.name.startswith(".")]
    with new_folder(tmp_path, "export") as (made, folder):
        assert not any(made.iterdir())  # what was left is gone
        (made / "config.json").write_text("{}")
        assert not folder.exists()
    assert [one.name for one in folder.iterdir()] == ["config.json"]
    with new_folder(tmp_path, "export") as (_, another):
        pass
    assert (folder.name, another.name) == ("export", "export-2")
    assert not list(tmp_path.glob(".*.unfinished"))


def killed_in_new_folder(parent: Path) -> None:
    with new_folder(parent, "export") as (made, _):
        (made / "old.safetensors").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_folder_gives_its_last_checkpoint_to_go_on_and_its_best_to_use(tmp_path) -> None:
    folder = leave_run(tmp_path, "a", [])
    assert find_checkpoint(str(folder), prefer=BEST) == (folder, folder / CHECKPOINTS / LAST)
    (folder / CHECKPOINTS / BEST).write_bytes(b"x")
    assert find_checkpoint(str(folder), prefer=BEST)[1].name == BEST
    assert find_checkpoint(str(folder), prefer=LAST)[1].name == LAST
    assert find_checkpoint(str(folder / CHECKPOINTS / LAST), prefer=BEST) == (
        folder,
        folder / CHECKPOINTS / LAST,
    )
    with pytest.raises(UserError, match=f"The newest run in it is {folder}."):
        find_checkpoint(str(tmp_path), prefer=BEST)
    (tmp_path / "config.json").touch()
    with pytest.raises(UserError, match=f"It is an exported model: use model.path={tmp_path}."):
        find_checkpoint(str(tmp_path), prefer=BEST)


@pytest.mark.parametrize("given", ["missing", "missing/last.ckpt"])
def test_a_checkpoint_that_is_not_there_is_named(tmp_path, given) -> None:
    with pytest.raises(UserError, match="does not exist"):
        find_checkpoint(str(tmp_path / given), prefer=LAST)
    with pytest.raises(UserError, match=r"^resume=.* or resume=auto"):
        find_checkpoint(str(tmp_path / given), prefer=LAST, setting="resume")


def test_resume_auto_takes_the_newest_unfinished_run_of_the_same_training(tmp_path) -> None:
    leave_run(tmp_path, "2026-01-01_00-00-00", [])
    newest = leave_run(
        tmp_path, "2026-01-02_00-00-00", ["trainer.micro_batch=8", "logger=none"], status="stopped"
    )
    leave_run(tmp_path, "2026-01-03_00-00-00", [], status="finished")
    leave_run(tmp_path, "2026-01-04_00-00-00", ["seed=5"])
    leave_run(tmp_path, "2026-01-05_00-00-00", [], checkpoint=False)
    assert find_unfinished(tmp_path, compose_settings(["recipe=gpt2"])) == newest
    let_go(newest)
    assert find_unfinished(tmp_path, compose_settings(["recipe=gpt2", "seed=6"])) is None
    assert find_unfinished(tmp_path / "nowhere", compose_settings(["recipe=gpt2"])) is None


def test_the_nearest_unfinished_run_is_named_with_what_differs(
    tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    there = leave_run(
        tmp_path, "2026-01-01_00-00-00", ["data=files", "data.path=text", "context=512"]
    )
    leave_run(tmp_path, "2026-01-02_00-00-00", ["seed=5"])
    words = ["recipe=gpt2", "data=files", f"data.path={tmp_path}/text"]
    with caplog.at_level("INFO"):
        assert find_unfinished(tmp_path, compose_settings(words)) is None
    assert caplog.messages[-1].endswith(f"{there}, differs in context (512 there, 1024 here).")
    # However the path is written.
    assert find_unfinished(tmp_path, compose_settings([*words, "context=512"])) == there
    let_go(there)


def test_a_failure_is_noted_of_a_run_under_way_and_of_no_other(tmp_path) -> None:
    write_summary(tmp_path, {"recipe": "gpt2", "status": "running"})
    note_failure(tmp_path, "rank 1 of 2 has died")
    assert read_summary(tmp_path) == {
        "recipe": "gpt2",
        "status": "failed",
        "error": "rank 1 of 2 has died",
    }
    write_summary(tmp_path, {"status": "finished"})
    note_failure(tmp_path, "too late")
    assert read_summary(tmp_path) == {"status": "finished"}


TEXTS = [
    "${x}",
    "${oc.env:HOME}",
    "\\${x}",
    "\\\\",
    "a\\",
    "${",
    "1e-4",
    "yes",
    "null",
    " #: &a *a",
]
TEXTS += ["\x1b\x85\ufeff\n\t😀"]


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_comes_back_from_config_yaml_as_it_was(tmp_path, text) -> None:
    settings = with_text(text)
    write_config(asdict(settings), tmp_path)
    assert read_settings(tmp_path) == settings


def with_text(text: str) -> Settings:
    settings = schema_of("language_model")(prompt=text, output=text, demo={"prompt": text})
    settings.data.path = text
    settings.model.options = {"name": [text]}
    return settings


def test_a_prompt_on_the_command_line_is_the_text_that_was_typed() -> None:
    for text in TEXTS[:6]:
        assert compose_settings(plain_words(["recipe=gpt2", f"prompt={text}"])).prompt == text


def test_nothing_is_looked_up_for_a_config_yaml_from_elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    folder = leave_run(tmp_path, "a", [])
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("prompt: ''", "prompt: ${oc.env:SECRET}"))
    assert read_settings(folder).prompt == "${oc.env:SECRET}"
    # The run's settings with the command line's on top.
    for mode in ("generate", "evaluate", "export"):
        settings = settings_from_checkpoint([f"mode={mode}", f"checkpoint={folder}"])
        assert settings is not None
        assert settings.prompt == "${oc.env:SECRET}"


def test_a_run_of_other_settings_is_named_in_one_line_and_passed_over(tmp_path, caplog) -> None:
    wanted = leave_run(tmp_path, "2026-01-01_00-00-00", [])
    other = leave_run(tmp_path, "2026-01-02_00-00-00", [])
    (other / "config.yaml").write_text("nonsense: 1")  # a run of an earlier version, say
    with pytest.raises(UserError, match=r"config\.yaml"):
        read_settings(other)
    settings = compose_settings(["recipe=gpt2"])
    with caplog.at_level("INFO"):
        assert find_unfinished(tmp_path, settings) == wanted
        let_go(wanted)
        assert find_same([other, wanted], settings) == wanted
    lines = [record.message for record in caplog.records]
    assert [line.startswith(f"skipping {other}: ") for line in lines] == [True, True]


@pytest.mark.parametrize("name", ["config.yaml", "summary.json"])
@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "7", "a\0b", b"\x80\xff\0\n", "data: {path: ~no-such-user/here}", "trainer:"],
)
def test_whatever_is_in_another_runs_file_that_folder_is_skipped_with_a_line(
    tmp_path, caplog, name, content
) -> None:
    wanted = leave_run(tmp_path, "2026-01-01_00-00-00", [], status="stopped")
    other = leave_run(tmp_path, "2026-01-02_00-00-00", [], status="stopped")
    (other / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    settings = compose_settings(["recipe=gpt2"])
    with caplog.at_level("INFO"):
        assert find_unfinished(tmp_path, settings) == wanted
        let_go(wanted)
        if name == "config.yaml":
            assert find_same([other, wanted], settings) == wanted
    assert caplog.messages
    assert all(line.startswith(f"skipping {other}: ") for line in caplog.messages)


def test_an_empty_config_yaml_is_named(tmp_path) -> None:
    folder = leave_run(tmp_path, "a", [])
    (folder / "config.yaml").write_text("")
    with pytest.raises(UserError, match=rf"{folder}/config\.yaml holds no settings"):
        read_settings(folder)


@pytest.fixture
def saved(tmp_path) -> tuple[Path, dict[str, Any]]:
    """A run's last.ckpt, and what it holds of the settings."""
    folder = leave_run(tmp_path, "run", [])
    stored = write_config(asdict(compose_settings(["recipe=gpt2", "seed=3"])), folder)
    return folder / CHECKPOINTS / LAST, {SETTINGS: stored}


def edit(checkpoint: Path, before: str, after: str) -> None:
    config = checkpoint.parent.parent / "config.yaml"
    assert config.read_text().count(before) == 1
    config.write_text(config.read_text().replace(before, after))


def test_a_config_yaml_as_the_checkpoint_has_it_resumes_without_a_line(saved, caplog) -> None:
    with caplog.at_level("INFO"):
        check_config(*saved)
    assert caplog.messages == []


def test_what_differs_between_config_yaml_and_the_checkpoint_is_reported(saved, caplog) -> None:
    checkpoint, content = saved
    edit(checkpoint, "\nseed: 3\n", "\nseed: 4\n")
    edit(checkpoint, "  learning_rate: 0.0006\n", "  learning_rate: 0.0005\n")
    with caplog.at_level("INFO"):
        check_config(checkpoint, content)
    line = (
        r"config\.yaml has changed since last\.ckpt was saved: .*learning_rate 0\.0006 -> 0\.0005"
    )
    assert re.search(line, caplog.messages[-1])
    assert "seed 3 -> 4" in caplog.messages[-1]
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("line", "name"),
    [("seed: 3\n", "seed=3"), ("  learning_rate: 0.0006\n", "optimizer.learning_rate=0.0006")],
)
def test_a_setting_that_config_yaml_has_lost_is_refused(saved, line, name) -> None:
    checkpoint, content = saved
    edit(checkpoint, line, "")
    with pytest.raises(UserError, match=rf"config\.yaml lacks {name}.* last\.ckpt was saved with"):
        check_config(checkpoint, content)


def test_a_checkpoint_of_before_that_stores_no_settings_resumes_with_a_line(saved, caplog) -> None:
    with caplog.at_level("INFO"):
        check_config(saved[0], {})
    assert caplog.messages[-1].startswith(f"{saved[0]} stores no settings")


def test_a_renamed_setting_is_no_difference(saved, caplog) -> None:
    checkpoint, content = saved
    trainer = dict(content[SETTINGS]["trainer"])
    trainer["checkpoint"] = trainer.pop("checkpoint_format")  # its older name
    with caplog.at_level("INFO"):
        check_config(checkpoint, {SETTINGS: {**content[SETTINGS], "trainer": trainer}})
    assert caplog.messages == []


@pytest.mark.parametrize("stores", [True, False])
def test_a_setting_newer_than_the_run_repeats_what_the_run_did(
    saved, caplog, monkeypatch, stores
) -> None:
    """As if data.text_column were newer than the run, which did as with "content", and
    "text" is today's default."""
    checkpoint, content = saved
    folder = checkpoint.parent.parent
    monkeypatch.setitem(NEWER, "data.text_column", "content")
    edit(checkpoint, "  text_column: text\n", "")
    del content[SETTINGS]["data"]["text_column"]
    content = content if stores else {}
    own = read_settings(folder)
    assert own.data.text_column == "content"
    # Of the command's own settings, which would do otherwise, those give way that it does not name.
    settings = compose_settings(["recipe=gpt2", "seed=3"])
    assert older_values(settings, own, ["seed"]) == {"data.text_column": "content"}
    assert older_values(settings, own, ["data.text_column"]) == {}
    assert find_unfinished(folder.parent, settings, ["data.text_column"]) is None
    assert find_unfinished(folder.parent, settings, ["seed"]) == folder
    let_go(folder)
    caplog.clear()
    with caplog.at_level("INFO"):
        check_config(checkpoint, content)
        # The run goes on, and its config.yaml has the setting, but no checkpoint
        # has been written since.
        write_config(asdict(own), folder)
        check_config(checkpoint, content)
    assert [
        line for line in caplog.messages if "has changed" in line or "text_column" in line
    ] == []
    assert older_values(settings, read_settings(folder), ["seed"]) == {
        "data.text_column": "content"
    }


def test_a_value_that_no_older_run_had_is_another_training(saved, monkeypatch) -> None:
    """A run of today that was given data.text_column=column is not continued
    by a command without it."""
    monkeypatch.setitem(NEWER, "data.text_column", "content")
    edit(saved[0], "  text_column: text\n", "  text_column: column\n")
    folder = saved[0].parent.parent
    assert find_unfinished(folder.parent, compose_settings(["recipe=gpt2", "seed=3"])) is None
