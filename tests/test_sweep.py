"""What a sweep's command line expands to, and what becomes of a job that dies without a word."""

from __future__ import annotations

import json

import pytest

from flashtrain import sweep
from flashtrain.errors import UserError
from flashtrain.run_folder import write_summary


def test_it_is_the_product_of_all_values_listed() -> None:
    jobs = sweep.expand(["recipe=gpt2", "context=512,1024", "attention=flash,sdpa"])
    assert jobs == [
        ["recipe=gpt2", f"context={context}", f"attention={attention}"]
        for context in (512, 1024)
        for attention in ("flash", "sdpa")
    ]


def test_a_range_is_a_list_of_values() -> None:
    assert sweep.expand(["seed=range(0,3)"]) == [["seed=0"], ["seed=1"], ["seed=2"]]


def test_a_list_in_brackets_is_one_value() -> None:
    assert sweep.expand(["optimizer.betas=[0.9,0.99]"]) == [["optimizer.betas=[0.9,0.99]"]]


def test_an_interval_names_no_list_and_is_refused() -> None:
    with pytest.raises(UserError, match="list the values"):
        sweep.expand(["optimizer.learning_rate=interval(0,1)"])


@pytest.mark.parametrize("before", [None, {"status": "running", "model": "gpt2-demo"}])
def test_a_killed_job_is_a_row_that_says_so(tmp_path, before) -> None:
    if before:
        write_summary(tmp_path, before)
    sweep.note_failure(tmp_path, ["context=512"], -9)
    row = json.loads((tmp_path / "summary.json").read_text())
    assert (row["status"], row["error"], row["overrides"]) == ("failed", "killed by signal 9", "context=512")


def test_a_job_that_told_how_it_ended_is_left_as_it_is(tmp_path) -> None:
    write_summary(tmp_path, {"status": "out of memory", "error": "out of memory"})
    sweep.note_failure(tmp_path, ["context=512"], 3)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "out of memory"
