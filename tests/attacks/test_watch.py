"""The watch sees what it is there to see; it is tested here without any training."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import pytest

from tests.attacks.watch import Outcome, attempt, changes, snapshot

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, limits and counts as Linux does")


@pytest.fixture
def watched(tmp_path) -> Callable[..., Outcome]:
    """watched(action): it may write to tmp_path/inside."""
    (tmp_path / "inside").mkdir()
    (tmp_path / "precious").write_text("precious")

    def run(action: Callable[[], int | None], seconds: float = 600) -> Outcome:
        return attempt(action, log=tmp_path / "log", inside=[tmp_path / "inside"], seconds=seconds)

    return run


def told(*lines: str, status: int) -> Callable[[], int]:
    def action() -> int:
        print(*lines, sep="\n")
        return status

    return action


def test_what_works_and_what_is_refused_in_one_line_is_no_failure(watched) -> None:
    assert watched(told("done", status=0)).failure() is None
    assert watched(told("flashtrain: no such thing.", status=2)).failure() is None


@pytest.mark.parametrize(
    ("lines", "status", "failure"),
    [
        (["flashtrain: no", "such thing."], 2, "not one line"),
        (["usage: ..."], 2, "not one line"),
        (["flashtrain: \x1b[31mred"], 2, "terminal codes"),
        (["flashtrain: " + "x" * 3000], 2, "long line"),
        (["it crashed"], 1, "status 1"),
    ],
)
def test_a_refusal_of_another_form_is_a_failure(watched, lines, status, failure) -> None:
    assert str(watched(told(*lines, status=status)).failure()).startswith(failure)


def test_a_traceback_is_a_failure_that_names_the_exception(watched) -> None:
    assert watched(lambda: int("x")).failure() == "traceback: ValueError: invalid literal for int() with base 10: 'x'"


def test_what_never_ends_is_ended(watched) -> None:
    outcome = watched(lambda: time.sleep(3600), seconds=0.3)
    assert outcome.seconds < 600
    assert str(outcome.failure()).startswith("hang")


def test_a_process_that_dies_is_a_failure(watched) -> None:
    assert str(watched(lambda: os.kill(os.getpid(), signal.SIGKILL)).failure()).startswith("crash: SIGKILL")


def test_writing_removing_and_renaming_outside_is_stopped_before_it_happens(watched, tmp_path) -> None:
    precious, inside = tmp_path / "precious", tmp_path / "inside"
    attacks = {
        "write": lambda: precious.write_text("gone"),
        "append": lambda: precious.open("a").close(),
        "remove": precious.unlink,
        "rename": lambda: precious.rename(inside / "mine"),
        "onto": lambda: (inside / "mine").write_text("x") and (inside / "mine").rename(precious),
        "climb": lambda: (inside / ".." / "precious").unlink(),
        "link": lambda: ((inside / "link").symlink_to(precious), (inside / "link").write_text("gone")),
        "make": lambda: (tmp_path / "made").mkdir(),
        "program": lambda: os.system("true"),
    }
    before = snapshot(tmp_path, [inside, tmp_path / "log", tmp_path / "log.outside"])
    for name, attack in attacks.items():
        assert str(watched(attack).failure()).startswith("outside"), name
    assert changes(before, snapshot(tmp_path, [inside, tmp_path / "log", tmp_path / "log.outside"])) == []


def test_writing_inside_is_no_failure(watched, tmp_path) -> None:
    def action() -> None:
        (tmp_path / "inside/deep").mkdir()
        (tmp_path / "inside/deep/file").write_text("x")
        (tmp_path / "inside/deep/file").rename(tmp_path / "inside/other")
        (tmp_path / "inside/other").unlink()

    assert watched(action).failure() is None


def test_a_snapshot_sees_what_libraries_in_c_change(tmp_path) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("1")
    before = snapshot(tmp_path)
    (tmp_path / "a").write_text("2")
    (tmp_path / "b").unlink()
    (tmp_path / "c").mkdir()
    assert [line.split()[0] for line in changes(before, snapshot(tmp_path))] == ["removed", "made", "changed"]
