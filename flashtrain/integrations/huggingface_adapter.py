"""An adapter that was trained before: a folder of peft, or the weights in a checkpoint of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from flashtrain.errors import UserError, needs_package
from flashtrain.files.json_files import read_json
from flashtrain.integrations.huggingface_config import ROTARY
from flashtrain.integrations.huggingface_folder import folder_of
from flashtrain.integrations.weight_files import read_tensors
from flashtrain.settings.model import NOTE
from flashtrain.training.checkpoints import read_checkpoint, weights_in

WEIGHTS = "adapter_model.safetensors"
# peft's names of our settings. Others must have peft's defaults, but for those that do not change
# what is computed.
_NAMES = {
    "path": "base_model_name_or_path",
    "adapter_rank": "r",
    "adapter_alpha": "lora_alpha",
    "adapter_dropout": "lora_dropout",
    "adapter_targets": "target_modules",
}
_FREE = ("exclude_modules", "task_type", "fan_in_fan_out", "inference_mode", "auto_mapping",
         "peft_version", "revision", "runtime_config", "megatron_core")  # fmt: skip


def adapter_settings(path: str) -> dict[str, Any] | None:
    """Read a peft folder, or name on the hub, as settings of the group `model`; None for another
    folder, UserError for another kind of adapter than LoRA."""
    folder = folder_of(path, WEIGHTS).absolute()
    if not (folder / "adapter_config.json").is_file():
        return None
    with needs_package(f"the adapter in {path}", "peft", "hub"):
        from peft import LoraConfig, PeftConfig
    plain, found = LoraConfig().to_dict(), PeftConfig.from_pretrained(str(folder)).to_dict()
    own = {ours: found.pop(theirs, None) for ours, theirs in _NAMES.items()}
    odd = {name: one for name, one in found.items() if name not in _FREE and one != plain.get(name)}
    if odd:
        raise UserError(f"the adapter in {path} has {odd}: expected LoRA without these.")
    # The rotary positions that it was trained with, which peft's files do not have.
    note = read_json(folder / NOTE) if (folder / NOTE).is_file() else {}
    rotary = {ROTARY: note[ROTARY]} if note.get(ROTARY) else {}
    return {**own, "adapter": "lora", "adapter_path": str(folder), "options": rotary}


def adapter_weights(module: Any, path: str) -> dict[str, Tensor]:
    """Read an adapter's weights, by their names in `module`; UserError if they do not fit it."""
    if path.endswith(".ckpt"):
        found = weights_in(read_checkpoint(path), path)
    else:
        # peft leaves out the adapter's name, "default", and prefixes its own wrapper's.
        own = {name.replace(".default", ""): name for name, _ in module.named_parameters()}
        read = read_tensors(Path(path).expanduser() / WEIGHTS)
        plain = {name.removeprefix("base_model.model."): one for name, one in read.items()}
        found = {own.get(name, name): one for name, one in plain.items()}
    check_adapter(module, found, path)
    return found


def check_adapter(module: Any, weights: Mapping[str, Tensor], where: str) -> None:
    """Raise UserError unless these weights are those of all adapters in `module`."""
    own = {name: one.shape for name, one in module.named_parameters() if one.requires_grad}
    given = {name: one.shape for name, one in weights.items()}
    if odd := sorted(own.items() ^ given.items()):
        raise UserError(
            f"the adapters in {where} do not match the model's: '{odd[0][0]}' of shape "
            f"{tuple(odd[0][1])} is in only one of the two. Use the settings of their training."
        )
