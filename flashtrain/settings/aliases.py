"""Older names of settings and names of other programs' settings, with the name that each has here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from flashtrain.settings.options import ActivationCheckpointing

# Older names of settings ("memory" stands for a value given to the group itself), and older values. A command line or a
# recipe that has one is answered with ours; an older run's saved configuration is read with ours in their place.
RENAMED = {
    "benchmark.units": "benchmark.sample_units",
    "benchmark.updates": "benchmark.optimizer_step",
    "benchmark.ways": "benchmark.methods",
    "generate.tokens": "generate.max_new_tokens",
    "masked.share": "masked.mlm_probability",
    "masked.unit": "masked.sample_unit",
    "memory": "memory.activation_checkpointing",
    "memory.checkpointing": "memory.activation_checkpointing",
    "trainer.checkpoint": "trainer.checkpoint_format",
    "trainer.context_layout": "trainer.context_parallel_layout",
    "trainer.context_way": "trainer.context_parallel_method",
    "until": "stop_at_accuracy",  # of a stage in curriculum.stages
}
RENAMED_VALUES = {
    "benchmark.layouts": {"head-tail": "zigzag"},
    "benchmark.methods": {"all-to-all": "ulysses"},
    "benchmark.rows": {"anchors": "core"},
    "finetune.data": {"cues": "synthetic"},
    "model.name": {"modern": "llama"},
    "recipe": {"finetune": "bert-finetune"},
    "trainer.context_parallel_layout": {"head-tail": "zigzag"},
    "trainer.context_parallel_method": {"all-to-all": "ulysses"},
    "trainer.strategy": {"context": "context_parallel"},
}
# Settings of other programs.
OTHERS = {
    # transformers' TrainingArguments
    "adam_epsilon": "optimizer.epsilon",
    "attn_implementation": "attention.name",
    "eval_steps": "trainer.validate_every",
    "gradient_accumulation_steps": "trainer.tokens_per_step",
    "gradient_checkpointing": "memory.activation_checkpointing",
    "logging_steps": "trainer.log_every",
    "lr_scheduler_type": "schedule.name",
    "max_grad_norm": "optimizer.gradient_clip",
    "max_new_tokens": "generate.max_new_tokens",
    "max_steps": "trainer.steps",
    "model_name_or_path": "model.path",
    "optim": "optimizer.name",
    "output_dir": "output",
    "per_device_train_batch_size": "trainer.micro_batch",
    "report_to": "logger.name",
    "resume_from_checkpoint": "resume",
    "save_steps": "trainer.checkpoint_every",
    "torch_compile": "trainer.compile",
    # Lightning's Trainer and others'
    "accelerator": "hardware.accelerator",
    "batch_size": "trainer.tokens_per_step",
    "block_size": "context",
    "dataset": "data.name",
    "grad_clip": "optimizer.gradient_clip",
    "gradient_clip_val": "optimizer.gradient_clip",
    "lora_alpha": "model.adapter_alpha",
    "lora_r": "model.adapter_rank",
    "lr": "optimizer.learning_rate",
    "max_iters": "trainer.steps",
    "max_seq_length": "context",
    "max_time": "trainer.max_minutes",
    "num_nodes": "trainer.nodes",
    "seq_len": "context",
    "val_check_interval": "trainer.validate_every",
}


def renamed(name: str, value: Any = None) -> str | None:
    """Return a line with the present name of a renamed setting or value, "trainer.context_way is now ..."; else None.

    Args:
        name: the given name: dotted, a config group such as `model`, or a key inside a list's entry.
        value: the value that the setting is given, if known; for a config group the name of its choice.
    """
    given = [value] if isinstance(value, str) else value if isinstance(value, Sequence) else []
    texts = [one for one in given if isinstance(one, str)]
    if name in RENAMED and (name != "memory" or texts):
        choice = f"={texts[0]}" if name == "memory" and texts[0] in get_args(ActivationCheckpointing) else ""
        return f"{name}{choice} is now {RENAMED[name]}{choice}."
    values = RENAMED_VALUES.get(name) or RENAMED_VALUES.get(f"{name}.name", {})
    return next((f"{name}={text} is now {name}={values[text]}." for text in texts if text in values), None)


def updated(content: dict[str, Any], group: str = "") -> dict[str, Any]:
    """Return a saved configuration with present names and values in place of older ones.

    Args:
        content: the configuration, or one of its groups.
        group: the prefix of the group's settings with a dot at its end, such as "trainer."; "" for a whole one.
    """
    made = {}
    for key, value in content.items():
        name = f"{group}{key}"
        inner = "" if name == "demo" else f"{name}."  # a demo's names are whole
        if isinstance(value, dict):
            value = updated(value, inner)
        elif isinstance(value, list):
            value = [updated(one) if isinstance(one, dict) else current_value(name, one) for one in value]
        else:
            name = RENAMED.get(name, name)
            value = current_value(name, value)
        made[name.removeprefix(group)] = value
    return made


def current_value(setting: str, value: Any) -> Any:
    """Return the present name of a value that an older run saved for this setting; any other value unchanged."""
    return RENAMED_VALUES.get(setting, {}).get(value, value) if isinstance(value, str) else value
