"""What a change of the house's structure must leave alone: weights' names and shapes, FLOPs,
memory estimates, losses.

`python tests/contract/pins.py` writes pins.json anew: what a meant change does to the
numbers is then its diff.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("pins.json")
sys.path[:0] = [str(ROOT / folder) for folder in ("", "recipes", "kernels", "tests")]

from flashtrain.command.compose import compose_settings  # noqa: E402
from flashtrain.models import SIZES, Decoder, DecoderConfig  # noqa: E402
from flashtrain.tasks.batching import estimator  # noqa: E402
from flashtrain.tasks.decoders import make_model  # noqa: E402
from flashtrain.training.hardware import Hardware  # noqa: E402
from flashtrain.training.memory import GIB  # noqa: E402
from flashtrain.training.memory_choice import candidates  # noqa: E402

FAMILIES = ("gpt2", "llama")
H200 = Hardware(
    "cuda", "NVIDIA H200", 1, (9, 0), 139 * GIB, 139 * GIB, 989e12, "bf16-mixed", "flash", 120 * GIB
)
CPU = Hardware("cpu", "CPU", 2, None, 8 * GIB, 8 * GIB, None, "32-true", "sdpa", 8 * GIB)
MACHINES = {"bf16-mixed": H200, "bf16-true": replace(H200, precision="bf16-true"), "cpu": CPU}
OWN = [
    [f"model={family}", f"model.size={size}"]
    for family in FAMILIES
    for size in ("demo", "124m", "1.3b")
]
# Decoders whose layers are all alike: estimates of those that mix kinds of feed-forwards or layers
# are known to be off.
HUGGING_FACE = [
    ["model.config=llama-1b"],
    ["model.config=qwen3-8b"],
    ["model.config=tiny", "model.adapter=lora"],
    ["model.config=gemma2", "+model.options={num_hidden_layers: 4}"],
    ["model.config=mixtral", "+model.options={num_hidden_layers: 2}"],
    ["model.config=gpt2", "+model.options={n_positions: 8192}"],
]
PLACES = [
    [],
    ["trainer.strategy=fsdp", "trainer.devices=4"],
    ["context_parallel=4", "trainer.devices=4"],
    ["trainer.strategy=ddp", "trainer.devices=2"],
]


def short(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def weights_and_flops() -> dict[str, Any]:
    """Of each family and size: a hash of its weights' names and shapes, and
    FLOPs of a token at 32,768."""
    found: dict[str, Any] = {}
    for family in FAMILIES:
        for size in SIZES:
            with torch.device("meta"):
                model = Decoder(
                    DecoderConfig.of_size(size, family, vocab_size=50257, context=4096),
                    attention="sdpa",
                )
            weights = [(name, list(weight.shape)) for name, weight in model.state_dict().items()]
            found[f"{family} {size}"] = [short(weights), model.flops_per_token(32768)]
    return found


def plans() -> Iterator[tuple[str, list[str], Hardware]]:
    """(name, command line, machine) of every plan whose memory is pinned."""
    models = [["recipe=gpt2", *words] for words in OWN] + [
        ["recipe=hf", *words] for words in HUGGING_FACE
    ]
    for model in models:
        for place in PLACES:
            for name, machine in MACHINES.items():
                if machine.kind == "cuda" or not place:
                    words = [*model, "context=8192", "trainer.tokens_per_step=65536", *place]
                    if "recipe=hf" in words:
                        words.append("data.tokenizer=bytes")
                    yield " ".join([*model, *place, name]), words, machine


def memory_of(words: list[str], machine: Hardware) -> str:
    """A hash of FLOPs and of ten memory estimates, each with its parts: five ways to save,
    micro-batches 1 and 2."""
    settings = compose_settings(words)
    rows = 50257 if settings.recipe == "gpt2" else 257
    with torch.device("meta"):
        model = make_model(
            settings.model, vocab_size=rows, context=8192, attention=machine.attention
        )
    estimate = estimator(settings, machine, model, model.shape)
    made = [estimate(batch, savings) for savings in candidates() for batch in (1, 2)]
    return short(
        [
            model.flops_per_token(8192),
            [[one.total, one.host, *one.parts().values(), one.exchange] for one in made],
        ]
    )


def losses_and_gradients() -> dict[str, list[float]]:
    """Of each family's demo with dropout: its loss, and the sum and the sum of squares of
    all gradients in float64."""
    found = {}
    for family in FAMILIES:
        torch.manual_seed(1)
        shape = DecoderConfig.of_size("demo", family, vocab_size=257, context=64, dropout=0.1)
        model = Decoder(shape, attention="sdpa")
        tokens = torch.randint(0, 257, (2, 65))
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        gradients = torch.cat([weight.grad.double().flatten() for weight in model.parameters()])
        found[family] = [loss.item(), gradients.sum().item(), gradients.square().sum().item()]
    return found


def pins() -> dict[str, Any]:
    memory = {name: memory_of(words, machine) for name, words, machine in plans()}
    return {
        "weights and FLOPs": weights_and_flops(),
        "losses": losses_and_gradients(),
        "memory": memory,
    }


if __name__ == "__main__":
    from quick_settings import QuickHydra

    torch.set_num_threads(1)
    QuickHydra().serve()
    FILE.write_text(json.dumps(pins(), indent=1) + "\n", encoding="utf-8")
