"""The loss of a run's summary is the one at which its curve ends."""

from __future__ import annotations

import json

import pytest
from tiny_runs import TinyRuns


@pytest.mark.parametrize("every", [1, 3, 4])
def test_the_curve_ends_at_the_loss_of_the_summary(tiny_runs: TinyRuns, every: int, caplog) -> None:
    caplog.set_level("INFO")
    status, folder = tiny_runs.run(f"every-{every}", "trainer.steps=5", f"trainer.log_every={every}")
    assert status == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [(row["step"], row["train_loss"]) for row in rows if "train_loss" in row][-1]
    loss = json.loads((folder / "summary.json").read_text())["train_loss"]
    assert last == (4, pytest.approx(loss))
    assert f"training loss {loss:.3f} at the last step" in caplog.text
