"""`python -m flashtrain` with devices that share each sequence: it trains, stops, goes on and
is used as one process.

Two gloo ranks are started twice: by torchrun, and by Lightning as plain trainer.devices=2 does.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import TinyRuns, run_mode

from flashtrain.command.compose import compose_settings
from flashtrain.folders.run_folder import read_summary
from flashtrain.folders.run_lock import let_go
from flashtrain.folders.same_training import find_unfinished
from flashtrain.training.checkpoints import read_checkpoint

pytestmark = pytest.mark.integration  # starts ranks

# Five steps: the last one is no time for a validation, so that one follows the fit. Documents
# change the layout, and what a prefix shows is not scored, whichever rank has it.
STEPS = ("trainer.steps=5", "mask=prefix", "mask.prefix=8", "mask.documents=true")
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")


@pytest.fixture(scope="module")
def one_process(tiny_runs: TinyRuns) -> dict:
    status, folder = tiny_runs.run("one-process", *STEPS)
    assert status == 0
    return read_summary(folder)


@pytest.fixture(scope="module")
def two_ranks(tiny_runs: TinyRuns, tmp_path_factory) -> tuple[Path, str]:
    """The folder of a run that torchrun started, and what it printed."""
    out = tmp_path_factory.mktemp("two-ranks")
    words = (
        "trainer.devices=2",
        "trainer.strategy=context_parallel",
        f"output={out}",
        "trainer.checkpoint_every=5",
    )
    done = tiny_runs.command(*STEPS, *words, launcher=TORCHRUN)
    assert done.returncode == 0, done.stdout + done.stderr
    (summary,) = out.glob("gpt2/*/summary.json")
    return summary.parent, done.stdout + done.stderr


def test_two_ranks_report_what_one_process_does(two_ranks, one_process) -> None:
    row = read_summary(two_ranks[0])
    for name in ("train_loss_first", "train_loss", "validation_loss"):
        # float32 sums in another order.
        assert row[name] == pytest.approx(one_process[name], rel=1e-4), name
    same = ("tokens", "steps", "batch", "micro_batch", "parameters", "epochs", "context", "status")
    assert {name: row[name] for name in same} == {name: one_process[name] for name in same}
    assert row["devices"] == 2
    # Each token is counted once.
    assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(256)


def test_the_progress_shows_the_loss_of_all_ranks_and_a_sample_is_written_at_the_end(
    two_ranks, one_process
) -> None:
    printed = two_ranks[1]
    assert f"step 1/5 loss {one_process['train_loss_first']:.3f}" in printed
    assert "each sequence over 2 devices" in printed
    assert "a sample of what it writes now" in printed


def test_its_checkpoint_is_evaluated_and_generated_with_and_exported_on_one_device(
    two_ranks, caplog, capsys
) -> None:
    folder, _ = two_ranks
    last = folder / "checkpoints" / "last.ckpt"
    with caplog.at_level("INFO"):
        assert run_mode("mode=evaluate", f"checkpoint={last}") == 0
    reported = read_summary(folder)["validation_loss"]
    assert f"held-out loss {reported:.4f}"[:-1] in caplog.text
    assert (
        run_mode(
            "mode=generate", f"checkpoint={last}", 'prompt="the quick"', "generate.max_new_tokens=5"
        )
        == 0
    )
    assert capsys.readouterr().out.startswith("the quick")
    assert run_mode("mode=export", f"checkpoint={last}") == 0
    assert (folder / "export" / "model.safetensors").is_file()


def test_ranks_stop_together_when_time_is_up_and_one_process_goes_on(
    tiny_runs: TinyRuns, one_process, tmp_path
) -> None:
    done = tiny_runs.command(
        *STEPS, f"output={tmp_path}", "trainer.devices=2", "context_parallel=2",
        "trainer.max_minutes=1e-6",
        "trainer.checkpoint_format=sharded",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1 (trainer.max_minutes)" in done.stdout + done.stderr
    (folder,) = (tmp_path / "gpt2").iterdir()
    assert json.loads((folder / "summary.json").read_text())["status"] == "stopped"
    # A folder that both ranks wrote.
    assert (folder / "checkpoints" / "last.ckpt" / "current.json").is_file()
    assert read_checkpoint(folder / "checkpoints" / "last.ckpt")["global_step"] == 1
    one_device = compose_settings(
        [*tiny_runs.settings_words(*STEPS), "trainer.strategy=context_parallel"]
    )
    assert find_unfinished(tmp_path / "gpt2", one_device) == folder  # what resume=auto goes on with
    let_go(folder)
    # At degree 1, and in a folder of its own: the run that stopped stays as it is.
    status, resumed = tiny_runs.run(
        "resumed", *STEPS, f"resume={folder}", "trainer.strategy=context_parallel"
    )
    assert status == 0
    row = read_summary(resumed)
    for name in ("train_loss_first", "validation_loss"):
        assert row[name] == pytest.approx(one_process[name], rel=1e-4), name
