"""Tiny runs of every task by `flashtrain.train`, and what such a run leaves in its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hybrid_models
import pytorch_lightning as pl
import torch
import transformers
from chat_folders import CHATML, save_tokenizer_folder

import flashtrain

Settings = dict[str, Any]

COMMON: Settings = {
    "hardware": "cpu",
    "hardware.demo": "never",
    "logger": "csv",
    "resume": None,
    "schedule.warmup_steps": 1,
    "trainer.steps": 6,
    "trainer.log_every": 1,
    "trainer.validate_every": 3,
    "trainer.checkpoint_every": 2,
    "optimizer.learning_rate": 0.003,
}

DECODER: Settings = {
    **COMMON,
    "recipe": "gpt2",
    "model.size": "demo",
    "model.vocab_rows": None,
    "model.dropout": 0.1,
    "data.tokenizer": "bytes",
    "trainer.micro_batch": 4,  # half of a step: gradients are accumulated
    "generate.max_new_tokens": 8,
}

# Of the text: three steps of 8 rows are an epoch, so that a checkpoint of step 3
# is of its last batch.
ROWS = 24
SHARDS: Settings = {"trainer.strategy": "fsdp", "trainer.checkpoint_format": "sharded"}


class Ended(Exception):
    """What a test's run ends with: an error of a user's own code, or what it does at SIGTERM."""


def fail() -> None:
    raise Ended


def language(place: Path) -> Settings:
    for name, rows in (("train", ROWS), ("held-out", 8)):
        line = f"{name}: the quick brown fox jumps over the lazy dog. "
        (place / f"{name}.txt").write_text((line * 99)[: rows * 32])
    data = {
        "data": "files",
        "data.path": place / "train.txt",
        "data.validation_path": place / "held-out.txt",
    }
    return {**DECODER, **data, "context": 32, "trainer.tokens_per_step": 256}


def chat(place: Path) -> Settings:
    save_tokenizer_folder(place / "model", CHATML, words="What is the sum? user assistant " * 9)
    pairs = [("user", f"What is {a}+{b}?", f"{a + b}") for a in range(6) for b in range(6)]
    rows = [
        {"messages": [{"role": u, "content": q}, {"role": "assistant", "content": a}]}
        for u, q, a in pairs
    ]
    (place / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data": "chat", "data.path": place / "chats.jsonl", "data.tokenizer": place / "model"}
    return {
        **DECODER,
        **data,
        "data.validation_fraction": 0.2,
        "context": 96,
        "trainer.tokens_per_step": 768,
    }


def masked_language(place: Path) -> Settings:
    for number in range(10):
        (place / f"{number}.txt").write_text(
            f"document {number} says that the quick brown fox jumps. " * 20
        )
    data = {
        "data": "files",
        "data.path": place,
        "data.tokenizer": "bytes",
        "data.validation_fraction": 0.3,
    }
    model = {"bert.size": "tiny", "bert.family": "bert", "bert.dropout": 0.1, "context": 64}
    batch = {
        "masked.token_budget": 128,
        "masked.validation_samples": 8,
        "trainer.tokens_per_step": 256,
    }
    return {**COMMON, "recipe": "bert", **data, **model, **batch, "masked.sample_unit": "sentence"}


def fine_tuning(place: Path) -> Settings:
    kinds = [("ab x", ["x"]), ("y cd", ["y"]), ("x and y", ["x", "y"]), ("abcd", [])]
    for part, count in (("train", 32), ("validation", 8), ("test", 8)):
        rows = [{"text": f"{kinds[n % 4][0]} {n}", "labels": kinds[n % 4][1]} for n in range(count)]
        (place / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = {"bert.size": "tiny", "bert.dropout": 0.1, "finetune.dropout": 0.1, "context": 16}
    batch = {"finetune.batch": 8, "trainer.micro_batch": 4}
    return {
        **COMMON,
        "recipe": "bert-finetune",
        "finetune.data": "files",
        "finetune.path": place,
        **model,
        **batch,
    }


def classification(place: Path) -> Settings:
    """Two stages, of 5 steps and of 4, whose second accumulates."""
    first = {"side": 24, "steps": 5, "batch": 4, "learning_rate": 0.003}
    stages = [first, {"side": 28, "steps": 4, "batch": 4, "micro_batch": 2}]
    sizes = {"train_images": 64, "validation_images": 8, "test_images": 8, "contour": "easy"}
    shape = {"embed": 16, "layers": 1, "heads": 1, "dropout": 0.1}
    settings = {"recipe": "pathx", "pathfinder": {**sizes, "cache_dir": place}, "classifier": shape}
    return {**COMMON, **settings, "sequence.validation_samples": 8, "curriculum.stages": stages}


def streamed(place: Path) -> Settings:
    """Five files, some of documents that are longer than the context: an epoch
    ends within the run."""
    (place / "texts").mkdir()
    for number in range(5):
        rows = [
            {"text": f"{number} {row}: the quick brown fox. " * (1 + row % 3)}
            for row in range(3 + number)
        ]
        (place / "texts" / f"{number}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {**language(place), "data.path": place / "texts", "data.streaming": True}


def mixture(place: Path) -> Settings:
    settings = language(place)
    parts = {"train": settings.pop("data.path"), "held-out": settings.pop("data.validation_path")}
    sources = {
        f"of_{number}": {"path": path, "weight": 1 + number}
        for number, path in enumerate(parts.values())
    }
    return {**settings, "data": "mixture", "data.mixture": sources, "data.validation_fraction": 0.2}


def bfloat16(place: Path) -> Settings:
    """With float32 copies of the weights in the optimizer."""
    return {**language(place), "hardware.precision": "bf16-true", "optimizer": "muon"}


def lamb(place: Path) -> Settings:
    return {**masked_language(place), "optimizer": "lamb"}


def transformers_model(place: Path) -> Settings:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = transformers.LlamaConfig(
        **sizes, vocab_size=264, max_position_embeddings=64, attention_dropout=0.1
    )
    transformers.LlamaForCausalLM(config).save_pretrained(place / "model")
    settings = {
        name: value for name, value in language(place).items() if not name.startswith("model.")
    }
    return {**settings, "recipe": "hf", "model.path": place / "model", "data.document_mask": True}


def adapters(place: Path) -> Settings:
    return {
        **transformers_model(place),
        "model.adapter": "lora",
        "model.adapter_rank": 4,
        "memory.activation_checkpointing": "selective",
    }


def hybrid(place: Path) -> Settings:
    """Mamba-2, experts and attention, which the backward computes again."""
    model = hybrid_models.hybrid("nemotron_h", torch.float32, vocab_size=264)
    model.config.attention_dropout = 0.1
    model.save_pretrained(place / "hybrid")
    again = {"memory.activation_checkpointing": "full"}
    return {**transformers_model(place), "model.path": place / "hybrid", **again}


# Of 3 steps of 8 rows, and of 4 steps of 4 rows.
STAGES = [
    {"steps": 3, "schedule": "constant"},
    {
        "context": 64,
        "steps": 4,
        "learning_rate": 0.001,
        "rope": "yarn",
        "rope_factor": 2,
        "micro_batch": 2,
        "length_weights": [{"at_least": 2, "weight": 1.5}],
    },
]


def staged(place: Path) -> Settings:
    settings = {**language(place), "model": "llama", "stages": STAGES}
    return {**settings, "data.path": texts(place), "data.validation_path": None}


def texts(place: Path) -> Path:
    """A folder with documents of some lengths."""
    (place / "texts").mkdir()
    for number in range(40):
        text = f"{number}: the quick brown fox. " * (1 + number % 4)
        (place / "texts" / f"{number}.txt").write_text(text)
    return place / "texts"


def staged_adapters(place: Path) -> Settings:
    settings = {**adapters(place), "stages": STAGES, "data.path": texts(place)}
    return {**settings, "data.validation_path": None, "data.tokenizer": "bytes"}


def sharded(place: Path) -> Settings:
    return {**language(place), **SHARDS}


TASKS: dict[str, Callable[[Path], Settings]] = {
    "language": language, "chat": chat, "masked_language": masked_language,
    "fine_tuning": fine_tuning,
    "classification": classification, "streamed": streamed, "mixture": mixture,
    "bfloat16": bfloat16, "lamb": lamb,
    "transformers_model": transformers_model, "adapters": adapters, "hybrid": hybrid,
    "sharded": sharded,
    "staged": staged, "staged_adapters": staged_adapters,
}  # fmt: skip


class Interrupt(pl.Callback):
    """Acts when the micro-batch or, counted from -1 down, the validation of this number begins,
    counted through the run; None: never."""

    def __init__(self) -> None:
        self.at: int | None = None
        self.act: Callable[[], None] = lambda: None

    def on_train_batch_start(self, *_: Any) -> None:
        self.count(down=True)

    def on_validation_batch_start(self, *given: Any) -> None:
        if given[3] == 0:  # its first batch
            self.count(down=False)

    def count(self, *, down: bool) -> None:
        if self.at is None or (self.at >= 0) != down:
            return
        self.at += -1 if down else 1
        if self.at == (-1 if down else 0):
            self.at = None
            self.act()


INTERRUPT = Interrupt()
flashtrain.register("callback", "contract_interrupt")(lambda settings: INTERRUPT)


def train(settings: Settings, output: Path, **more: Any) -> Path:
    """Train in a new folder below `output`, or in the one that resume= names; the run's folder."""
    given = {**settings, **more, "output": output}
    return flashtrain.train(given.pop("recipe"), **given).folder


def interrupted(
    settings: Settings, output: Path, at: int, act: Callable[[], None], raised: Any
) -> Path:
    """Train until the micro-batch `at` of the run, where `act` ends it with an
    exception of the type `raised`."""
    INTERRUPT.at, INTERRUPT.act = at, act
    try:
        train(settings, output, **{"trainer.callbacks": ["contract_interrupt"]})
    except raised:
        return only_run(output)
    raise AssertionError("the run was not interrupted")


def only_run(output: Path) -> Path:
    """The folder of the one run below `output`."""
    (folder,) = {path.parent for path in output.glob("*/*/config.yaml")}
    return folder


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def last_step(folder: Path) -> int:
    """The optimizer step of last.ckpt, where it is a file."""
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of last.ckpt and best.ckpt, by their place, and last.ckpt's optimizer
    states. Folders: weights."""
    last, best = (folder / "checkpoints" / f"{name}.ckpt" for name in ("last", "best"))
    if last.is_dir():
        return dict(flashtrain.load(last, hardware="cpu").model.state_dict())
    checkpoint = torch.load(last, weights_only=True)
    found: dict[str, torch.Tensor] = {}

    def collect(value: Any, place: str) -> None:
        if isinstance(value, torch.Tensor):
            found[place] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                collect(inner, f"{place}/{key}")

    collect(checkpoint["state_dict"], "")
    collect(torch.load(best, weights_only=True)["state_dict"] if best.exists() else {}, "best")
    collect(dict(enumerate(checkpoint["optimizer_states"])), "optimizer")
    return found


MEASURES = ("loss", "accuracy", "gradient_norm", "lr-", "fill", "f1")


def logged(folder: Path) -> dict[tuple[str, int], dict[str, float]]:
    """What was measured, by file and step: metrics.jsonl of the run and of its stages. No times."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for file in sorted(folder.rglob("metrics.jsonl")):
        for row in map(json.loads, file.read_text().splitlines()):
            known = {
                name: value for name, value in row.items() if any(part in name for part in MEASURES)
            }
            found.setdefault((str(file.parent.relative_to(folder)), row["step"]), {}).update(known)
    return {place: values for place, values in found.items() if values}


def assert_same_run(one: Path, other: Path) -> None:
    """Bit for bit the same weights and optimizer states, the same losses at
    every step, the same end."""
    mine, theirs = saved(one), saved(other)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    assert logged(one) == logged(other) != {}
    mine, theirs = summary(one), summary(other)
    names = {name for name in mine if any(part in name for part in MEASURES)} | {
        "status",
        "steps",
        "epochs",
    }
    assert [n for n in names if not _same(mine.get(n), theirs.get(n))] == []


def _same(one: Any, other: Any) -> bool:
    both = (
        isinstance(one, float)
        and isinstance(other, float)
        and math.isnan(one)
        and math.isnan(other)
    )
    return both or one == other
