"""The house does not grow unseen: each of its rooms has a ceiling of lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Lines of Python in a folder and below, with 2% of slack when an issue begins. Whoever needs more
# takes as much out, or raises the ceiling and says why. Raised on 28 November for trainings in
# stages, RULER, loss by position and recipe=extend (recipe=gpt2-long is to go once they replace
# it), for hybrids over devices, and for mode=check; on 29 November for hybrids' kernels and their
# tuning, heads of 256 and 512, models of several contexts and micro-batches that are measured, then
# for AdamW in one pass, float8, layers that save less, mixers that keep states, documents that are
# planned over devices, and benchmarks of wide heads and of layers with states over devices.
CEILINGS = {
    "flashtrain": 42_400,
    "flashtrain/checks": 780,
    "flashtrain/command": 1_482,
    "flashtrain/data": 7_180,
    "flashtrain/distributed": 4_430,
    "flashtrain/files": 480,
    "flashtrain/folders": 745,
    "flashtrain/integrations": 5_480,
    "flashtrain/models": 5_600,
    "flashtrain/report": 2_070,
    "flashtrain/run": 1_100,
    "flashtrain/settings": 1_660,
    "flashtrain/tasks": 5_770,
    "flashtrain/training": 4_530,
    "kernels/flashtrain_kernels": 18_130,
    "recipes/flashtrain_recipes": 15_190,
    "tests": 59_040,
}
# Of flashtrain: no new guard without a user's report. 369 before the silent faults that strangers
# found on 28 November; two more for layers that were made as others, nine for stages and adapters
# whose settings contradict what they start from, four more of their faults, six for mode=check, one
# for values wider than queries, which were cut, and twelve for words of model.pattern, float8 where
# it cannot be computed, what two fresh users gave, and documents planned without their mask.
RAISES = 444


def rooms() -> set[str]:
    """The folders of flashtrain, and what stands beside it."""
    own = {f"flashtrain/{path.parent.name}" for path in ROOT.glob("flashtrain/*/__init__.py")}
    return own | {"flashtrain", "kernels/flashtrain_kernels", "recipes/flashtrain_recipes", "tests"}


def lines_in(room: str) -> int:
    return sum(
        len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / room).rglob("*.py")
    )


def test_every_room_has_a_ceiling() -> None:
    assert rooms() == set(CEILINGS)


@pytest.mark.parametrize("room", CEILINGS)
def test_no_room_is_above_its_ceiling(room: str) -> None:
    assert lines_in(room) <= CEILINGS[room]


def test_no_more_is_refused_than_users_reported() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "flashtrain").rglob("*.py")]
    assert sum(len(re.findall(r"^\s+raise ", text, re.MULTILINE)) for text in texts) <= RAISES
