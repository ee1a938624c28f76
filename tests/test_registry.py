"""What a configuration may name: registered builders only."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

import flashtrain
import flashtrain.tasks.language.prepare  # what it registers is not forgotten with a test's own
from flashtrain import registry
from flashtrain.errors import UserError


@pytest.fixture(autouse=True)
def _forget_registrations(monkeypatch) -> None:
    monkeypatch.setattr(
        registry, "_components", {group: dict(own) for group, own in registry._components.items()}
    )


def test_a_registered_builder_is_found_by_its_name() -> None:
    @flashtrain.register("callback", "beep")
    def make_beep(settings):
        return "beep"

    assert registry.component("callback", "beep") is make_beep
    assert "beep" in registry.registered("callback")


def test_a_dotted_path_is_not_imported() -> None:
    with pytest.raises(UserError, match=r"unknown callback 'os\.system'"):
        registry.component("callback", "os.system")


def test_an_unknown_group_is_refused_with_the_groups_there_are() -> None:
    with pytest.raises(
        UserError, match=r"unknown component group 'modle'\. Did you mean 'mode' or 'model'"
    ):
        flashtrain.register("modle", "mine")


def test_a_name_that_is_taken_is_refused() -> None:
    flashtrain.register("callback", "beep")(lambda settings: None)
    with pytest.raises(UserError, match="callback 'beep' is already registered"):
        flashtrain.register("callback", "beep")(lambda settings: None)


def test_an_installed_packages_entry_point_is_found(monkeypatch) -> None:
    entry = EntryPoint(
        name="callback.from_package", value="collections:OrderedDict", group="flashtrain.components"
    )
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    assert registry.component("callback", "from_package").__name__ == "OrderedDict"


LOADED = """
import runpy, sys
sys.argv = ["flashtrain", "recipe=gpt2", "mode=plan"]
try:
    runpy.run_module("flashtrain", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
print(sum(name.partition(".")[0] == "flashtrain" for name in sys.modules))
print(*sorted({name.partition(".")[0] for name in sys.modules}))
print(*(name.rpartition(".")[2] for name in sys.modules if name.startswith("flashtrain_recipes.")))
"""
MAX_FILES = 90  # of flashtrain that recipe=gpt2 reads, its packages' own included


@pytest.mark.integration
def test_gpt2_is_planned_without_the_experiments_beyond_what_they_register() -> None:
    """Their settings with the names and sizes in them, their rules, and what they offer a run."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", LOADED], env=environment, capture_output=True, text=True, check=True
    )
    *_, files, packages, names = done.stdout.splitlines()
    assert int(files) <= MAX_FILES
    # Each takes a good part of a second, which a command that has no use for it waits for.
    assert not {"wandb", "datasets", "tensorboard", "peft", "torchao", "pandas", "pyarrow"} & set(
        packages.split()
    )
    loaded = set(names.split())
    benchmarks = {"attention_benchmark", "context_benchmark", "step_benchmark", "harness"}
    scores = {"extend", "hybrid_quality", "long_context", "loss_by_position", "ruler"}
    rooms = {"arena", "pathfinder"} | scores | benchmarks
    assert loaded <= rooms | {
        "settings",
        "benchmark_settings",
        "names",
        "parameters",
        "rules",
        "spec",
    }
