"""Every recipe, its demo and every published command compose to the values that are written down.

`python tests/contract/composed.py` writes them anew.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from composed import FILE, ROOT, composed_commands, composed_recipe, flat, written

from flashtrain.files.shipped import recipe_files
from flashtrain.registry import registered
from flashtrain.settings.schema import schema_of

WRITTEN = json.loads(FILE.read_text(encoding="utf-8"))


def test_the_file_is_as_its_program_writes_it() -> None:
    assert FILE.read_text(encoding="utf-8") == written(WRITTEN)


def test_the_defaults_are_those_written_down() -> None:
    found = {task: flat(asdict(schema_of(task)())) for task in registered("task")}
    assert json.loads(json.dumps(found)) == WRITTEN["defaults"]
    assert sorted(recipe_files()) == list(WRITTEN["recipes"])


@pytest.mark.parametrize("recipe", WRITTEN["recipes"])
def test_a_recipe_and_its_demo_compose_to_the_values_written_down(recipe: str) -> None:
    found = composed_recipe(recipe, WRITTEN["defaults"])
    assert json.loads(json.dumps(found)) == [WRITTEN["recipes"][recipe], WRITTEN["demos"][recipe]]


@pytest.mark.integration
def test_the_published_commands_compose_to_the_values_written_down(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("FLASHTRAIN_RECIPES", raising=False)
    found = composed_commands(tmp_path)
    assert found.keys() == WRITTEN["commands"].keys()
    assert [command for command in found if found[command] != WRITTEN["commands"][command]] == []
