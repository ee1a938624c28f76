"""Lightning trainings of transformers models on gloo ranks, for test_huggingface_training.py,
and what they must equal.

python huggingface_training.py FOLDER          two and four ranks write FOLDER/NAME/RANK.json

Those of huggingface_ranks.py, too, in FOLDER/exact: importing everything takes
longer than what they do.
"""

from __future__ import annotations

import copy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import huggingface_ranks
import pytorch_lightning as pl
import torch
from huggingface_ranks import LENGTH, VOCABULARY, model_of, quiet_and_exact
from published_commands import python_blocks
from ranks import end, fork, report
from strategy_ranks import Loaders, Losses, trainer
from torch import Tensor, nn

import flashtrain
from flashtrain.models.trainable import Trainable
from flashtrain.tasks import LanguageModel

STEPS = 20
SCRIPT = "hugging face over several GPUs"


def row(index: int) -> dict[str, Tensor]:
    """Two packed documents and a piece of a third; labels are transformers' own, of
    the first document's few."""
    generator = torch.Generator().manual_seed(index)
    text = torch.randint(2, VOCABULARY, (LENGTH,), generator=generator).cumsum(0) // 5 % VOCABULARY
    lengths = (11 + index % 7, 20, LENGTH - 31 - index % 7)
    positions = torch.cat([torch.arange(length) for length in lengths])
    labels = torch.where((torch.arange(LENGTH) < 9) | (positions == 0), -100, text)
    return {"input_ids": text, "labels": labels, "position_ids": positions}


class OfTransformers(pl.LightningModule):
    """Someone's own training of a transformers model, by the loss that the model computes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("mean", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.log("validation", self.model(**batch).loss, sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class StandIn(Trainable):
    """A transformers model as flashtrain's own language model asks for one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.blocks = model.model.layers

    def loss(
        self, tokens: Tensor, labels: Tensor, *, positions: Any = None, mask: Any = None
    ) -> Tensor:
        logits = self.model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def parameter_count(self) -> int:
        return 1

    def flops_per_token(self, context: int | None = None) -> float:
        return 1.0


def curve(folder: Path, task: pl.LightningModule, data: Loaders, **options: Any) -> dict[str, Any]:
    """The losses of twenty steps, the mean of the last that was logged, and that of
    a validation after it."""
    losses = Losses()
    fit = trainer(folder, max_steps=STEPS, callbacks=[losses], limit_val_batches=2, **options)
    fit.fit(task, data)
    logged = {
        name: float(fit.callback_metrics.get(name, 0.0))
        for name in ("mean", "validation", "validation_loss")
    }
    return {"losses": losses.found, "logged": logged}


def sinks(folder: Path, batch: int, **options: Any) -> dict[str, Any]:
    """gpt-oss, whose layers are computed again in the backward."""
    model = copy.deepcopy(model_of("gpt_oss", 4))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return curve(folder, OfTransformers(model), Loaders(2 * STEPS, batch, row=row), **options)


def adapters(folder: Path, **options: Any) -> dict[str, Any]:
    """Qwen 3, of which only LoRA's matrices are trained."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    torch.manual_seed(5)
    model = get_peft_model(copy.deepcopy(model_of("qwen3", 4)), config).double()
    return curve(folder, OfTransformers(model), Loaders(STEPS, 1, row=row), **options)


def language_model(folder: Path, masked: bool, **options: Any) -> dict[str, Any]:
    """flashtrain's own task, of whose batch a model takes tokens, labels that are
    shifted, and positions."""
    task = LanguageModel(
        StandIn(copy.deepcopy(model_of("mistral", 4))), document_mask=masked, gradient_clip=0.0
    )
    return curve(folder, task, Loaders(STEPS, 1), **options)


def script(folder: Path, weights: Path, **options: Any) -> dict[str, Any]:
    """The guide's own program, with a tiny Llama and so many devices."""
    losses = Losses()
    quick = {"max_steps": STEPS, "precision": "32-true", "callbacks": [losses], **options}
    made: dict[str, Any] = {
        "__name__": "page",
        "Trainer": lambda **asked: trainer(folder, **{**asked, **quick}),
    }
    code = python_blocks()[SCRIPT].replace("pl.Trainer(", "Trainer(").replace("lr=1e-5", "lr=1e-2")
    code = code.replace("rows.pt", str(weights / "rows.pt")).replace(
        "meta-llama/Llama-3.2-1B", str(weights)
    )
    exec(code.replace("context_parallel_size=8", "context_parallel_size=2"), made)
    return {"losses": losses.found, "logged": {}}


def save_script_inputs(folder: Path) -> None:
    model_of("llama", 4).save_pretrained(folder)
    torch.save([row(index) for index in range(STEPS)], folder / "rows.pt")


def strategy(degree: int, **options: Any) -> flashtrain.ContextParallelStrategy:
    return flashtrain.ContextParallelStrategy(degree, timeout_seconds=None, **options)


def two(folder: Path) -> None:
    quiet_and_exact()
    found = {
        "script": script(folder, folder.parent, devices=2),
        "masked": language_model(
            folder, True, devices=2, strategy=strategy(2, layout="contiguous")
        ),
        "unmasked": language_model(folder, False, devices=2, strategy=strategy(2)),
    }
    if find_spec("peft") is not None:
        found["adapters"] = adapters(folder, devices=2, strategy=strategy(2))
    report(folder, found)
    end()


def four(folder: Path) -> None:
    quiet_and_exact()
    found = {"sinks": sinks(folder, 1, devices=4, strategy=strategy(2, method="ulysses"))}
    report(folder, found)
    end()


def main(folder: Path) -> None:
    exact = folder / "exact"
    exact.mkdir()
    huggingface_ranks.main(exact)
    save_script_inputs(folder)
    for function, ranks in ((two, 2), (four, 4)):
        fork(ranks, function, folder / function.__name__)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
