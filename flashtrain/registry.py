"""The components that a configuration may name, by group.

Configuration never instantiates a dotted path. A name in a config group is looked up here, so a
YAML file can only build what a program registered:

    import flashtrain

    @flashtrain.register("callback", "beep")
    def make_beep(settings):
        return BeepCallback()

Installed packages register through the entry point group `flashtrain.components`, one entry per
component, named "group.name", for example `callback.beep = my_package.beep:make_beep`. flashtrain's
own components are listed below, the recipes' in COMPONENTS of their package. A component is
imported when it is first looked up.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from flashtrain.errors import UserError, unknown

ENTRY_POINT_GROUP = "flashtrain.components"
# The package next to the recipes: recipes/ of a checkout holds both.
EXPERIMENTS = "flashtrain_recipes"

GROUPS: dict[str, str] = {
    "model": (
        "build(settings, *, vocab_size, context, attention) -> nn.Module with .loss, "
        ".flops_per_token, .parameter_count"
    ),
    "mixer": (
        "a flashtrain.models.mixer.MixerSpec with of_pattern(value, attention): "
        "model.pattern=[NAME:value]"
    ),
    "source": "build(settings) -> flashtrain.data.sources.TextSource",
    "documents": (
        "build(settings, context) -> flashtrain.tasks.fine_tuning.splits.LabelledSource: "
        "finetune.data=NAME"
    ),
    "mask": (
        "build(settings, *, documents, positions, seqlen, device) -> flashtrain_kernels.Mask: "
        "once a batch"
    ),
    "optimizer": "build(model, settings) -> torch.optim.Optimizer",
    "schedule": "build(optimizer, settings, total_steps) -> torch.optim.lr_scheduler.LRScheduler",
    "callback": "build(settings) -> pytorch_lightning.Callback",
    "settings": (
        "a dataclass with check(): "
        "a group of settings that every task then has, named as the component"
    ),
    "task": "a flashtrain.spec.Task: what task=NAME trains",
    "mode": "a flashtrain.mode.Mode: what mode=NAME does instead of training",
    "benchmark": (
        "build(settings, hardware) with .plan() -> str and .run(folder, *, overrides, "
        "started) -> row: what mode=benchmark measures where benchmark.name=NAME"
    ),
    "study": (
        "build(settings, hardware, overrides) with .run(*, started, start) -> exit status: "
        "what mode=lengths compares of task=NAME"
    ),
    "figure": "draw(rows, path) -> path: python -m flashtrain.report --figure NAME",
}

# In the order in which settings are checked and figures are listed.
_OWN = {
    "task.language_model": "flashtrain.tasks.language.spec:LanguageTask",
    "task.masked_language_model": "flashtrain.tasks.masked_language.spec:MaskedTask",
    "task.fine_tuning": "flashtrain.tasks.fine_tuning.spec:FineTuningTask",
    "mode.check": "flashtrain.mode:Check",
    "mixer.kdgqa": "flashtrain.models.key_driven:KeyDrivenSpec",
    "mixer.mfa": "flashtrain.models.factorized:FactorizedSpec",
    "mixer.attention": "flashtrain.models.attention_spec:AttentionSpec",
    "mixer.retention": "flashtrain.models.state_spec:RetentionSpec",
    "mixer.lightning": "flashtrain.models.state_spec:LightningSpec",
    "mixer.gla": "flashtrain.models.state_spec:GatedSpec",
    "mixer.norm_attention": "flashtrain.models.state_spec:NormSpec",
    "mixer.delta": "flashtrain.models.state_spec:DeltaSpec",
    "mixer.mamba2": "flashtrain.models.state_spec:Mamba2Spec",
    "model.huggingface": "flashtrain.integrations.huggingface_model:build",
    "figure.context": "flashtrain.report.figures:sweep_figure",
}

Builder = TypeVar("Builder", bound=Callable[..., Any])

_components: dict[str, dict[str, Callable[..., Any]]] = {group: {} for group in GROUPS}


def register(group: str, name: str) -> Callable[[Builder], Builder]:
    """Return a decorator that makes a builder available to configurations as `name` in `group`.

    Args:
        group: a key of GROUPS; its value there describes how the builder is called and what it
            returns.
        name: what configurations call the component.

    Raises:
        UserError: the group is unknown, or another builder has the name.
    """
    if group not in GROUPS:
        raise unknown("component group", group, GROUPS)

    def add(builder: Builder) -> Builder:
        present = _components[group].get(name)
        if present is not None and present is not builder:
            owner = getattr(present, "func", present)  # of a partial
            raise UserError(
                f"{group} '{name}' is already registered by "
                f"{owner.__module__}.{owner.__qualname__}. Use another name."
            )
        _components[group][name] = builder
        return builder

    return add


def registered(group: str) -> list[str]:
    """Return the names that a configuration may use in `group`: flashtrain's own in
    their order, then others."""
    ours = list(_shipped(group))
    return [*ours, *sorted({*_components[group], *_entry_points(group)} - set(ours))]


def component(
    group: str, name: str, others: Iterable[str] = (), kind: str | None = None
) -> Callable[..., Any]:
    """Return the builder or class registered as `name` in `group`. Raises UserError, with similar
    names, if unknown; `others` may be given in its place, of the `kind` that it then names."""
    if name not in _components[group]:
        shipped = _shipped(group)
        if name in shipped:
            module, _, attribute = shipped[name].partition(":")
            found = getattr(importlib.import_module(module), attribute)
        else:
            from_packages = _entry_points(group)
            if name not in from_packages:
                known = unknown(kind or group, name, {*registered(group), *others})
                raise UserError(
                    f"{known} A name that a program registers is known to that program's own "
                    "command (python PROGRAM.py ...)."
                )
            found = from_packages[name].load()
        _components[group][name] = found
    return _components[group][name]


def _shipped(group: str) -> dict[str, str]:
    """Return the components that ship with flashtrain in this group: name -> "module:object"."""
    return _of_group(group, {**_OWN, **_experiments()})


@cache
def _experiments() -> dict[str, str]:
    """Return the COMPONENTS of the recipes' package; an empty dict if there is no such package."""
    recipes = Path(__file__).resolve().parents[1] / "recipes"
    if find_spec(EXPERIMENTS) is None:
        if not (recipes / EXPERIMENTS).is_dir():
            return {}
        sys.path.append(str(recipes))  # a checkout that is not installed
    return dict(importlib.import_module(EXPERIMENTS).COMPONENTS)


def _entry_points(group: str) -> dict[str, Any]:
    return _of_group(group, {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)})


def _of_group(group: str, components: dict[str, Any]) -> dict[str, Any]:
    prefix = f"{group}."
    return {
        name.removeprefix(prefix): found
        for name, found in components.items()
        if name.startswith(prefix)
    }
