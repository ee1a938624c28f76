"""Older names of settings and names of other programs' settings, with the name
that each has here."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import yaml

from flashtrain.files.shipped import conf_folder

# Older names and values, and values that other programs have. A command line or a recipe that has
# one is answered with ours; an older run's saved configuration is read with ours in their place.
RENAMED = {
    "benchmark.units": "benchmark.sample_units",
    "benchmark.updates": "benchmark.optimizer_step",
    "benchmark.ways": "benchmark.methods",
    "generate.tokens": "generate.max_new_tokens",
    "masked.share": "masked.mlm_probability",
    "masked.unit": "masked.sample_unit",
    "memory": "memory.activation_checkpointing",  # given a name
    "memory.checkpointing": "memory.activation_checkpointing",
    "passkey.lengths": "ruler.lengths",
    "passkey.trials": "ruler.samples",
    "trainer.checkpoint": "trainer.checkpoint_format",
    "trainer.context_layout": "trainer.context_parallel_layout",
    "trainer.context_way": "trainer.context_parallel_method",
    "until": "stop_at_accuracy",  # of a stage in curriculum.stages
    "attention=eager": "attention=standard",
    "attention=flash_attention_2": "attention=flash",
    "benchmark.layouts=head-tail": "benchmark.layouts=zigzag",
    "benchmark.methods=all-to-all": "benchmark.methods=ulysses",
    "benchmark.rows=anchors": "benchmark.rows=core",
    "finetune.data=cues": "finetune.data=synthetic",
    "hardware=cuda": "hardware=gpu",
    "hardware.precision=bf16": "hardware.precision=bf16-mixed",
    "hardware.precision=fp8": "model.float8=tensorwise",
    "hardware.precision=fp16": "hardware.precision=16-mixed",
    "hardware.precision=fp32": "hardware.precision=32-true",
    "mode=chat": "mode=generate",
    "mode=passkey": "mode=ruler",
    "mode=sample": "mode=generate",
    "model=modern": "model=llama",
    "model.adapter=qlora": "model.adapter=lora model.quantize=nf4",
    "model.name=modern": "model.name=llama",
    **{f"optimizer={name}": "optimizer=adamw" for name in ("adamw_torch", "adamw_torch_fused")},
    "optimizer=adamw_8bit": "optimizer=adamw optimizer.states=8bit",
    "optimizer=adamw_bnb_8bit": "optimizer=adamw optimizer.states=8bit",
    "optimizer=paged_adamw_8bit": "optimizer=adamw optimizer.states=8bit",
    "recipe=finetune": "recipe=bert-finetune",
    "trainer.context_parallel_layout=head-tail": "trainer.context_parallel_layout=zigzag",
    "trainer.context_parallel_method=all-to-all": "trainer.context_parallel_method=ulysses",
    "trainer.strategy=context": "trainer.strategy=context_parallel",
    "trainer.strategy=deepspeed": "trainer.strategy=fsdp",
}

# Settings that are gone, and the values with which every run now works; (): no
# training depended on it.
REMOVED: dict[str, tuple[Any, ...]] = {
    "bert.residual": ("compute",),
    "classification_weight": (None,),  # of a stage in curriculum.stages
    "classifier.grey_bins": (256,),
    "classifier.pattern_globals": (1,),
    "finetune.layout": ("packed",),
    "lengths.bins": (),
    "lengths.resamples": (),
    "masked.shortest": (16,),
    "passkey": (),
    "pathfinder.workers": (),
}

_SWITCH = re.compile(r"([\w.]+=(?!VALUE)[^\s,;:]+ ?)+")
_OFF = ("false", "no", "off", "0", "none", "null", "")  # of another program's switch
_TEXTS = ("txt", "md", "jsonl")
# A setting that a run's configuration lacks since it is newer than the run, and the value that
# repeats what it did.
NEWER: dict[str, Any] = {
    "data.check_answers": False,
    "data.files": [
        "*.parquet",
        *(f"*.{name}{end}" for name in _TEXTS for end in ("", ".gz", ".xz", ".zst")),
    ],
    "data.include_ignored": True,
    "data.special_tokens": "chat",
    "model.older_positions": True,
}


@cache
def others() -> dict[str, str]:
    """Return a dict: name of a setting here, or words about one -> the names that other programs
    have for it, separated by spaces."""
    return dict(yaml.safe_load((conf_folder() / "other_names.yaml").read_text(encoding="utf-8")))


def renamed(name: str, value: Any = None) -> str | None:
    """Return a line with the present name of a renamed setting or value, "trainer.context_way: use
    ..."; None if nothing was renamed.

    Args:
        name: the given name: dotted, a config group such as `model`, or a key
            inside a list's entry.
        value: the value that the setting is given, if known; for a config group
            the name of its choice.
    """
    several = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    for one in several:
        given = f"{name}={one}" if isinstance(one, str) and one else name
        if not isinstance(one, Mapping) and _current(given) != given:
            return f"{given}: use {_current(given)}."
    return None


def _current(given: str) -> str:
    """Return "name" or "name=value" with the present name and value in place of older ones."""
    name, equals, value = given.partition("=")
    present = f"{RENAMED.get(name, name)}{equals}{value}"
    return RENAMED.get(present, present)


def answer(given: str, settings: Collection[str], value: Any = None) -> str | None:
    """Return a sentence on what to use in place of another program's name of a setting, or why
    there is nothing; None for a name that is not known.

    Args:
        given: the name, also in a group: "trainer.gpus".
        settings: the dotted names of the task's settings.
        value: the value that the name is given, if known. Some names have an answer for a value,
            "report_to=wandb"; a VALUE in an answer is this one.
    """
    short = str(value).lower() if isinstance(value, str | int | float) else None
    values = (short, "false") if short in ("no", "off", "0") else (short,)
    for part in (given, *reversed(given.split("."))):
        for one in (*(f"{part}={one}" for one in values), part):
            for ours, names in others().items():
                if one in names.split() and (" " in ours or ours.partition("=")[0] in settings):
                    if one == part and short in _OFF and (on := _SWITCH.match(ours)):
                        return f"Leave it out: {on[0].strip()} would turn it on."
                    ours = ours if short is None else ours.replace("VALUE", str(value))
                    return ours if ours.endswith(".") else f"Use {ours}."
    return None


def updated(content: dict[str, Any], group: str = "") -> dict[str, Any]:
    """Return a saved configuration with present names and values in place of older ones, and
    without removed settings.

    Args:
        content: the configuration, or one of its groups.
        group: the prefix of the group's settings with a dot at its end, such as "trainer."; "" for
            a whole configuration.
    """
    made = {}
    for key, value in content.items():
        name = f"{group}{key}"
        if name in REMOVED and (not REMOVED[name] or value in REMOVED[name]):
            continue
        inner = "" if name == "demo" else f"{name}."  # a demo's names are whole
        if isinstance(value, dict):
            value = updated(value, inner)
        elif isinstance(value, list):
            value = [
                updated(one) if isinstance(one, dict) else current_value(name, one) for one in value
            ]
        else:
            name = RENAMED.get(name, name)
            value = current_value(name, value)
        made[name.removeprefix(group)] = value
    return made


def completed(content: dict[str, Any], settings: Collection[str]) -> dict[str, Any]:
    """Return a saved configuration with the settings that it lacks because they are newer than its
    run; each gets the value that repeats what the run did.

    Args:
        content: the configuration, with present names.
        settings: the dotted names of the task's settings.
    """
    for name, value in NEWER.items():
        group, _, key = name.rpartition(".")
        if name in settings:
            (content.setdefault(group, {}) if group else content).setdefault(key, value)
    return content


def current_value(setting: str, value: Any) -> Any:
    """Return the present name of a value that an older run saved for this setting; any
    other value unchanged."""
    return _current(f"{setting}={value}").partition("=")[2] if isinstance(value, str) else value
