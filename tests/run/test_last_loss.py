"""The loss of a run's summary is the one at which its curve ends."""

from __future__ import annotations

import json

import pytest
from tiny_runs import TinyRuns

from flashtrain import LanguageModel, registry
from flashtrain.tasks.language.spec import LanguageTask
from flashtrain.tasks.optimization import optimization_options


@pytest.mark.parametrize("every", [1, 3, 4])
def test_the_curve_ends_at_the_loss_of_the_summary(tiny_runs: TinyRuns, every: int, caplog) -> None:
    caplog.set_level("INFO")
    status, folder = tiny_runs.run(
        f"every-{every}", "trainer.steps=5", f"trainer.log_every={every}"
    )
    assert status == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [(row["step"], row["train_loss"]) for row in rows if "train_loss" in row][-1]
    loss = json.loads((folder / "summary.json").read_text())["train_loss"]
    assert last == (4, pytest.approx(loss))
    assert f"training loss {loss:.3f} at the last step" in caplog.text


class OwnModule(LanguageModel):
    """A LightningModule of somebody's task, which trains as ours does."""


class Derived(LanguageTask):
    """A task that puts its own LightningModule into what the language model's task prepares."""

    def prepare(self, settings, hardware):
        setup = super().prepare(settings, hardware)
        ours, make = setup.task, optimization_options(settings)
        setup.task = OwnModule(ours.model, description=ours.description, **make)
        return setup


def test_a_derived_tasks_own_module_is_what_the_summary_reports(
    tiny_runs: TinyRuns, monkeypatch, caplog
) -> None:
    caplog.set_level("INFO")
    status, folder = tiny_runs.run("ours", "trainer.steps=2")
    monkeypatch.setitem(registry._components["task"], "derived", Derived)
    derived, other = tiny_runs.run("derived", "trainer.steps=2", "task=derived")
    assert (status, derived) == (0, 0)
    one, two = (json.loads((path / "summary.json").read_text()) for path in (folder, other))
    assert (two["train_loss_first"], two["train_loss"]) == (
        one["train_loss_first"],
        one["train_loss"],
    )
    assert caplog.text.count(f"training loss {two['train_loss']:.3f} at the last step") == 2
