"""The folder that a run leaves, and how a later command finds its way back into it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import hypothesis
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flashtrain.command.compose import compose_settings
from flashtrain.command.modes import settings_from_checkpoint
from flashtrain.command.words import plain_words
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import (
    BEST,
    CHECKPOINTS,
    LAST,
    find_checkpoint,
    find_same,
    find_unfinished,
    make_unique,
    new_run_folder,
    note_failure,
    read_settings,
    read_summary,
    write_config,
    write_summary,
)
from flashtrain.settings.settings import Settings


def leave_run(parent: Path, name: str, words: list[str], *, status: str | None = None, checkpoint: bool = True) -> Path:
    folder = parent / name
    (folder / CHECKPOINTS).mkdir(parents=True)
    write_config(compose_settings(["recipe=gpt2", *words]), folder)
    if checkpoint:
        (folder / CHECKPOINTS / LAST).write_bytes(b"x")
    if status is not None:
        write_summary(folder, {"status": status})
    return folder


def test_settings_survive_the_way_through_config_yaml(tmp_path) -> None:
    settings = compose_settings(["recipe=gpt2", "context=512", "+model.options.depth=3"])
    write_config(settings, tmp_path)
    assert read_settings(tmp_path) == settings


def test_a_run_of_before_pathfinder_had_two_drawings_has_the_smooth_one(tmp_path) -> None:
    settings = compose_settings(["recipe=pathx"])
    assert settings.pathfinder.drawing == "original"
    write_config(settings, tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(path.read_text().replace("  drawing: original\n", ""))
    assert read_settings(tmp_path).pathfinder.drawing == "smooth"


def test_a_config_of_an_earlier_run_may_name_settings_that_have_become_constants(tmp_path) -> None:
    write_config(compose_settings(["recipe=pathx"]), tmp_path)
    config = tmp_path / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("classifier:\n", "classifier:\n  norm: layernorm\n  ffn: null\n"))
    assert read_settings(tmp_path) == compose_settings(["recipe=pathx"])
    config.write_text(text.replace("classifier:\n", "classifier:\n  norm: rmsnorm\n"))
    with pytest.raises(UserError, match=r"classifier\.norm"):
        read_settings(tmp_path)


def test_so_may_each_stage_of_its_curriculum(tmp_path) -> None:
    settings = compose_settings(["recipe=pathx"])
    write_config(settings, tmp_path)
    config = tmp_path / "config.yaml"
    content = yaml.safe_load(config.read_text())
    content["pathfinder"]["drawn_as"] = None
    for stage in content["curriculum"]["stages"]:
        stage.update(drawn_as=None, drawn_step=None)
    config.write_text(yaml.safe_dump(content))
    assert read_settings(tmp_path) == settings
    content["curriculum"]["stages"][0]["drawn_as"] = "160"
    config.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match="drawn_as"):
        read_settings(tmp_path)


def test_two_folders_of_the_same_name_are_two_folders(tmp_path) -> None:
    assert [make_unique(tmp_path, "a").name for _ in range(3)] == ["a", "a-2", "a-3"]


def test_a_new_run_folder_is_empty_and_below_its_parent(tmp_path) -> None:
    folder = new_run_folder(tmp_path / "runs" / "gpt2")
    assert folder.parent == tmp_path / "runs" / "gpt2"
    assert not list(folder.iterdir())


def test_slurm_ranks_share_a_folder_named_by_the_job(tmp_path, monkeypatch) -> None:
    for name, value in {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    assert new_run_folder(tmp_path) == new_run_folder(tmp_path) == tmp_path / "slurm-77-0"


def test_a_run_folder_gives_its_last_checkpoint_to_go_on_and_its_best_to_use(tmp_path) -> None:
    folder = leave_run(tmp_path, "a", [])
    assert find_checkpoint(str(folder), prefer=BEST) == (folder, folder / CHECKPOINTS / LAST)
    (folder / CHECKPOINTS / BEST).write_bytes(b"x")
    assert find_checkpoint(str(folder), prefer=BEST)[1].name == BEST
    assert find_checkpoint(str(folder), prefer=LAST)[1].name == LAST
    assert find_checkpoint(str(folder / CHECKPOINTS / LAST), prefer=BEST) == (folder, folder / CHECKPOINTS / LAST)


@pytest.mark.parametrize("given", ["missing", "missing/last.ckpt"])
def test_a_checkpoint_that_is_not_there_is_named(tmp_path, given) -> None:
    with pytest.raises(UserError, match="does not exist"):
        find_checkpoint(str(tmp_path / given), prefer=LAST)
    with pytest.raises(UserError, match=r"^resume=.* or resume=auto"):
        find_checkpoint(str(tmp_path / given), prefer=LAST, setting="resume")


def test_resume_auto_takes_the_newest_unfinished_run_of_the_same_training(tmp_path) -> None:
    leave_run(tmp_path, "2026-01-01_00-00-00", [])
    newest = leave_run(tmp_path, "2026-01-02_00-00-00", ["trainer.micro_batch=8", "logger=none"], status="stopped")
    leave_run(tmp_path, "2026-01-03_00-00-00", [], status="finished")
    leave_run(tmp_path, "2026-01-04_00-00-00", ["seed=5"])
    leave_run(tmp_path, "2026-01-05_00-00-00", [], checkpoint=False)
    assert find_unfinished(tmp_path, compose_settings(["recipe=gpt2"])) == newest


def test_resume_auto_finds_nothing_where_nothing_fits(tmp_path) -> None:
    leave_run(tmp_path, "a", ["context=512"])
    assert find_unfinished(tmp_path, compose_settings(["recipe=gpt2"])) is None
    assert find_unfinished(tmp_path / "nowhere", compose_settings(["recipe=gpt2"])) is None


def test_a_summary_that_is_damaged_reads_as_none(tmp_path) -> None:
    (tmp_path / "summary.json").write_text("{")
    assert read_summary(tmp_path) == {}


def test_a_failure_is_noted_of_a_run_under_way_and_of_no_other(tmp_path) -> None:
    write_summary(tmp_path, {"recipe": "gpt2", "status": "running"})
    note_failure(tmp_path, "rank 1 of 2 has died")
    assert read_summary(tmp_path) == {"recipe": "gpt2", "status": "failed", "error": "rank 1 of 2 has died"}
    write_summary(tmp_path, {"status": "finished"})
    note_failure(tmp_path, "too late")
    assert read_summary(tmp_path) == {"status": "finished"}


def test_a_folder_that_cannot_be_made_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot make the folder"):
        new_run_folder(tmp_path / "file" / "runs")


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
    "\x1b\0\x85\ufeff\n\t\ud800😀",
]


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_comes_back_from_config_yaml_as_it_was(tmp_path, text) -> None:
    settings = with_text(text)
    write_config(settings, tmp_path)
    assert read_settings(tmp_path) == settings


@given(st.text())
@hypothesis.settings(max_examples=40)
def test_any_text_comes_back_from_config_yaml_as_it_was(tmp_path_factory, text) -> None:
    folder = tmp_path_factory.mktemp("any")
    write_config(with_text(text), folder)
    assert read_settings(folder) == with_text(text)


def with_text(text: str) -> Settings:
    settings = Settings(prompt=text, output=text, demo={"prompt": text})
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
    for mode in ("generate", "evaluate", "export"):  # the run's settings with the command line's on top
        settings = settings_from_checkpoint([f"mode={mode}", f"checkpoint={folder}"])
        assert settings is not None
        assert settings.prompt == "${oc.env:SECRET}"


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


BAD_CONFIGS = {
    "no YAML": lambda path: path.write_text("a: [1"),
    "NUL": lambda path: path.write_bytes(b"recipe: gpt2\0"),
    "no UTF-8": lambda path: path.write_bytes(b"\xff\xfe\xff"),
    "nesting": lambda path: path.write_text("a: " + "[" * 5000),
    "aliases": lambda path: path.write_text("a: &a [1]\nb: [*a, *a]"),
    "size": lambda path: path.write_bytes(b"#" * 2**21),
    "a list": lambda path: path.write_text("[1, 2]"),
    "wrong types": lambda path: path.write_text("context: [1]\nmodel: 3"),
    "other settings": lambda path: path.write_text("nonsense: 1"),
    "interpolation": lambda path: path.write_text("context: ${seed}"),
    "a folder": lambda path: path.mkdir(),
    "a pipe": make_fifo,
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a loop of links": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("attack", BAD_CONFIGS)
def test_a_bad_config_yaml_is_named_in_one_line_and_passed_over(tmp_path, caplog, attack) -> None:
    wanted = leave_run(tmp_path, "2026-01-01_00-00-00", [])
    bad = leave_run(tmp_path, "2026-01-02_00-00-00", [])
    (bad / "config.yaml").unlink()
    BAD_CONFIGS[attack](bad / "config.yaml")
    with pytest.raises(UserError, match=r"config\.yaml") as refusal:
        read_settings(bad)
    assert "\n" not in str(refusal.value)
    settings = compose_settings(["recipe=gpt2"])
    with caplog.at_level("INFO"):
        assert find_unfinished(tmp_path, settings) == wanted
        assert find_same([bad, wanted], settings) == wanted
    lines = [record.message for record in caplog.records]
    assert [line.startswith(f"passing over {bad}: ") for line in lines] == [True, True]


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        '{"status": ["finished"], "versions": {"a": 1}, "seconds": "long"}',
        '{"status": 3, "seconds": true}',
        "[1]",
        '{"status": "finished", "x": "' + "x" * 2**21 + '"}',
        '{"seconds": ' + "9" * 10_000 + "}",
        "\0",
    ],
    ids=["nested", "wrong types", "numbers", "a list", "huge", "many digits", "NUL"],
)
def test_a_bad_summary_json_holds_nothing_up(tmp_path, content) -> None:
    folder = leave_run(tmp_path, "a", [])
    (folder / "summary.json").write_text(content)
    assert read_summary(folder) == {}
    assert find_unfinished(tmp_path, compose_settings(["recipe=gpt2"])) == folder
    note_failure(folder, "killed")


def test_a_summary_that_is_a_pipe_is_not_waited_for(tmp_path) -> None:
    os.mkfifo(tmp_path / "summary.json")
    assert read_summary(tmp_path) == {}


def test_dangling_links_and_folders_that_cannot_be_entered_are_passed_over(tmp_path, monkeypatch) -> None:
    (tmp_path / "2026-01-03").symlink_to("nowhere")
    (tmp_path / "2026-01-04").symlink_to("2026-01-04")
    wanted = leave_run(tmp_path, "2026-01-01", [])
    closed = leave_run(tmp_path, "2026-01-02", [])
    stat = os.stat

    def refused(path, *args, **kwargs):
        if str(path).startswith(f"{closed}{os.sep}"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refused)
    assert find_unfinished(tmp_path, compose_settings(["recipe=gpt2"])) == wanted
    with pytest.raises(UserError):
        find_checkpoint(str(closed), prefer=LAST)


def test_a_folder_that_could_not_be_made_leaves_none_of_its_parents(tmp_path, monkeypatch) -> None:
    mkdir = Path.mkdir

    def full(self, *args, **kwargs):
        if self.name.startswith("20"):
            raise OSError(errno.ENOSPC, "No space left on device")
        mkdir(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(UserError, match=r"cannot make the folder .*: No space left on device"):
        new_run_folder(tmp_path / "runs" / "gpt2")
    assert not list(tmp_path.iterdir())
