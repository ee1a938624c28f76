"""What a configuration may name: registered builders only."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

import flashtrain
from flashtrain import registry
from flashtrain.errors import UserError


@pytest.fixture(autouse=True)
def _forget_registrations(monkeypatch) -> None:
    monkeypatch.setattr(registry, "_components", {group: dict(own) for group, own in registry._components.items()})


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
    with pytest.raises(UserError, match=r"unknown component group 'modle'\. Did you mean 'mode' or 'model'"):
        flashtrain.register("modle", "mine")


def test_a_name_that_is_taken_is_refused() -> None:
    flashtrain.register("callback", "beep")(lambda settings: None)
    with pytest.raises(UserError, match="callback 'beep' is registered already"):
        flashtrain.register("callback", "beep")(lambda settings: None)


def test_an_installed_packages_entry_point_is_found(monkeypatch) -> None:
    entry = EntryPoint(name="callback.from_package", value="collections:OrderedDict", group="flashtrain.components")
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    assert registry.component("callback", "from_package").__name__ == "OrderedDict"
