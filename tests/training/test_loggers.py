"""Which loggers a run gets, and Weights & Biases without network or key."""

from __future__ import annotations

import pytest
from pytorch_lightning.loggers import TensorBoardLogger, WandbLogger

from flashtrain.command.compose import compose_settings
from flashtrain.command.overrides import plain_words
from flashtrain.errors import UserError
from flashtrain.run.machine import adapt_to_machine
from flashtrain.settings import logger
from flashtrain.settings.command_line import CommandLine
from flashtrain.training import loggers as loggers_module
from flashtrain.training.loggers import (
    close_loggers,
    has_wandb_key,
    log_summary,
    log_table,
    make_loggers,
)
from flashtrain.training.metrics_file import MetricsFile


@pytest.fixture(autouse=True)
def no_wandb_settings(monkeypatch, tmp_path):
    """No key, no mode and no sweep, whatever the machine has; and never the network."""
    for name in (
        "WANDB_API_KEY",
        "WANDB_IDENTITY_TOKEN_FILE",
        "WANDB_MODE",
        "WANDB_SWEEP_ID",
        "WANDB_BASE_URL",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.mark.parametrize("kind", ["none", "csv"])
def test_the_runs_own_files_alone(tmp_path, kind):
    assert [type(logger) for logger in make_loggers([kind], tmp_path)] == [MetricsFile]


def init_options(tmp_path, **options):
    return make_loggers(["wandb"], tmp_path, **options)[1]._wandb_init


@pytest.mark.parametrize("mode", ["auto", "offline"])
def test_offline_one_line_says_how_to_sync(mode, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(loggers_module, "say", said.append)
    assert init_options(tmp_path, mode=mode)["mode"] == "offline"
    assert len(said) == 1
    assert f"wandb sync {tmp_path}/wandb/offline-run-*" in said[0]
    assert ("no key configured" in said[0]) == (mode == "auto")


@pytest.mark.parametrize(
    ("environment", "asked", "mode"),
    [
        (None, "auto", "online"),
        ("disabled", "auto", "disabled"),
        ("disabled", "offline", "offline"),
    ],
)
def test_with_a_key_it_is_online_but_for_what_the_setting_and_then_wandb_mode_say(
    tmp_path, monkeypatch, environment, asked, mode
):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    if environment is not None:
        monkeypatch.setenv("WANDB_MODE", environment)
    assert init_options(tmp_path, mode=asked)["mode"] == mode


def test_a_key_that_wandb_login_left_for_this_server_is_found(tmp_path, monkeypatch):
    assert not has_wandb_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    assert has_wandb_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")  # another server
    assert not has_wandb_key()


def test_resuming_in_the_folder_continues_the_same_wandb_run(tmp_path):
    first = init_options(tmp_path, mode="offline")["id"]
    again = init_options(tmp_path, mode="offline")
    assert again["id"] == first
    assert again["resume"] == "allow"


def test_under_a_sweep_agent_the_id_is_the_agents(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")
    assert init_options(tmp_path, mode="offline")["id"] is None
    assert not (tmp_path / "wandb_id.txt").exists()


def test_a_table_may_have_numbers_and_words_in_a_column() -> None:
    class Kept(WandbLogger):
        def __init__(self) -> None:
            """Starts no run."""

        def log_table(self, key, columns=None, data=None, **_) -> None:
            self.table = wandb.Table(columns=columns, data=data)

    wandb = pytest.importorskip("wandb")
    logger = Kept()
    log_table(
        [logger],
        "rows",
        [{"length": 128, "rate": 2.5}, {"length": "paragraph"}, {"length": None, "rate": 1.0}],
    )
    assert logger.table.data == [["128", 2.5], ["paragraph", None], [None, 1.0]]


def test_an_id_that_names_a_path_writes_nowhere_else(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "wandb_id.txt").write_text("/../../other")
    with pytest.raises(Exception, match="Run ID cannot contain"):
        _ = make_loggers(["wandb"], tmp_path / "run", mode="offline")[1].experiment
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_wandb_prints_nothing_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WANDB_SILENT", raising=False)
    made = make_loggers(["wandb"], tmp_path, mode="offline", config={"context": 8})
    made[1].log_metrics({"loss": 1.0}, step=0)
    log_summary(made, {"loss": 1.0})
    close_loggers(made)
    assert "".join(capsys.readouterr()) == ""


def test_several_loggers_at_once_get_the_same(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = make_loggers(["none", "tensorboard", "wandb"], tmp_path, mode="offline")
    kinds = (MetricsFile, TensorBoardLogger, WandbLogger)
    assert [isinstance(one, kind) for one, kind in zip(made, kinds, strict=True)] == [True] * 3
    made[1].log_metrics({"loss": 1.5}, step=3)
    close_loggers(made)
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(3, 1.5)]


def test_what_is_not_installed_is_reported_before_anything_is_built(monkeypatch):
    words = plain_words(["recipe=gpt2", "hardware=cpu", "logger=[NONE,tensorboard]"])
    settings = compose_settings(words)
    assert settings.logger.kinds == ["none", "tensorboard"]
    monkeypatch.setattr(logger, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"logger=tensorboard needs the package .*: pip install tensorboard"
    ):
        adapt_to_machine(settings, CommandLine(words))
