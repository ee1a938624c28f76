"""What each of two gloo ranks does for test_huggingface_strategies.py; run as a
script, which forks them.

    python huggingface_strategies.py FOLDER

FOLDER/origin gets a tiny Llama's weights. Each rank writes FOLDER/NAME/RANK.json for the
scenarios of SCENARIOS.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
import transformers
from huggingface_fitting import SIZES, STEPS, Reads, fit
from ranks import end, fork, full_state_dict, report

from flashtrain.distributed.strategies import make_strategy
from flashtrain.training.checkpoint_callbacks import SaveLast

# Strategy, whether adapters are trained, whether the weights come from the folder.
SCENARIOS = {
    "ddp": ("ddp", False, True),
    "fsdp": ("fsdp", False, True),
    "random": ("fsdp", False, False),
    "lora": ("fsdp", True, True),
    "lora-ddp": ("ddp", True, True),
}


def scenario(folder: Path, name: str) -> None:
    warnings.filterwarnings("ignore")
    strategy, lora, read = SCENARIOS[name]
    origin = folder.parent / "origin" if read else None
    reads = Reads()
    reads.watch()

    def train(*callbacks, steps: int, **given: Path):
        chosen = make_strategy(strategy)
        options = {"devices": 2, "strategy": chosen, "max_steps": steps}
        return fit(folder, origin, *callbacks, lora=lora, **given, **options)

    whole = train(SaveLast(folder / "whole"), steps=STEPS)
    weights = full_state_dict(whole.model)
    if os.environ["RANK"] == "0":
        torch.save(weights, folder / "weights.pt")
    begun = train(SaveLast(folder / "part"), steps=3)
    resumed = train(SaveLast(folder / "part"), steps=STEPS, resume=folder / "part" / "last.ckpt")
    last = folder / "whole" / "last.ckpt"
    anew = train(steps=3, start=last).losses if lora else []  # from its adapters, a new training
    kept = sorted(weights)
    parts = begun.losses + resumed.losses
    found = {"losses": whole.losses, "parts": parts, "reads": reads.sizes, "kept": kept}
    report(folder, {**found, "anew": anew})
    end()


def main(folder: Path) -> None:
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model.save_pretrained(folder / "origin", max_shard_size="20KB")
    for name in SCENARIOS:
        fork(2, scenario, folder / name, name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
