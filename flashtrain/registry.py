"""The classes that a configuration may name: flashtrain's own, the user's, and those of installed packages.

Configuration never instantiates a dotted path. A name in a config group is looked up here, so a YAML file can only
build what a program registered:

    import flashtrain

    @flashtrain.register("callback", "beep")
    def make_beep(settings):
        return BeepCallback()

Installed packages register through the entry point group `flashtrain.components`, one entry per component, named
"group.name", for example `callback.beep = my_package.beep:make_beep`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, TypeVar

from flashtrain.errors import UserError, unknown

ENTRY_POINT_GROUP = "flashtrain.components"

GROUPS: dict[str, str] = {
    "model": "build(settings, *, vocab_size, context, attention) -> nn.Module with .loss, .flops_per_token, "
    ".parameter_count",
    "source": "build(settings) -> flashtrain.data.sources.TextSource",
    "optimizer": "build(model, settings) -> torch.optim.Optimizer",
    "schedule": "build(optimizer, settings, total_steps) -> torch.optim.lr_scheduler.LRScheduler",
    "callback": "build(settings) -> pytorch_lightning.Callback",
}

Builder = TypeVar("Builder", bound=Callable[..., Any])

_components: dict[str, dict[str, Callable[..., Any]]] = {group: {} for group in GROUPS}


def register(group: str, name: str) -> Callable[[Builder], Builder]:
    """Decorator that makes a builder available to configurations as `name` in `group`.

    group: one of GROUPS, whose values say what the builder is called with and returns.
    Raises UserError for an unknown group or a name that is taken by another builder.
    """
    if group not in GROUPS:
        raise unknown("component group", group, GROUPS)

    def add(builder: Builder) -> Builder:
        present = _components[group].get(name)
        if present is not None and present is not builder:
            raise UserError(f"{group} '{name}' is registered already, by {present.__module__}.{present.__qualname__}.")
        _components[group][name] = builder
        return builder

    return add


def registered(group: str) -> list[str]:
    """The names that a configuration may use in `group`, those of installed packages included."""
    return sorted({*_components[group], *_entry_points(group)})


def component(group: str, name: str) -> Callable[..., Any]:
    """The builder registered as `name` in `group`. Raises UserError with the near match for an unknown name."""
    if name not in _components[group]:
        from_packages = _entry_points(group)
        if name not in from_packages:
            raise unknown(group, name, registered(group))
        register(group, name)(from_packages[name].load())
    return _components[group][name]


def _entry_points(group: str) -> dict[str, Any]:
    prefix = f"{group}."
    found = entry_points(group=ENTRY_POINT_GROUP)
    return {entry.name.removeprefix(prefix): entry for entry in found if entry.name.startswith(prefix)}
