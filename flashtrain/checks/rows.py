"""The rows of a check, and the losses that they compare."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from flashtrain.checks.packed import Batch
from flashtrain.distributed.context.attention_check import silent_twin
from flashtrain.errors import UserError
from flashtrain.models.trainable import Trainable
from flashtrain.tasks.language.task import LanguageModel

# Of a loss: sums of other sizes are rounded otherwise, in 32 and in 16 bits.
ROUNDING, ROUNDING_16 = 1e-4, 2e-2
OK, FAULT, NONE = "ok", "FAULT", "-"


class Row(NamedTuple):
    """The answer to one question: OK, FAULT, or NONE where it could not be asked."""

    check: str
    verdict: str
    words: str = ""
    figure: float | None = None  # how far two losses are apart, relative to them


class Report(list[Row]):
    """The rows of a check; as text, their table."""

    @property
    def faults(self) -> list[Row]:
        """The rows whose verdict is FAULT."""
        return [row for row in self if row.verdict == FAULT]

    def __str__(self) -> str:
        figures = ("" if one.figure is None else f"{one.figure:.1e}" for one in self)
        rows = (f"{row.verdict:<6}{row.check:<30}{next(figures):>9}  {row.words}" for row in self)
        return "\n".join(map(str.rstrip, rows))

    def require(self) -> None:
        """Raise UserError, which names every fault, if there is one."""
        if found := "; ".join(f"{row.check}: {row.words}" for row in self.faults):
            raise UserError(f"flashtrain.check found faults: {found}.")


@torch.no_grad()
def loss_of(model: Any, batch: Batch) -> Tensor:
    """Return a model's mean loss of the labels in a batch."""
    device = next(model.parameters()).device
    batch = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items()}
    if isinstance(model, LanguageModel):
        found: Any = model.batch_loss(batch)  # type: ignore[arg-type]
    elif isinstance(model, pl.LightningModule):
        found = silent_twin(model).training_step(batch, 0)
    else:
        names = inspect.signature(model.forward).parameters
        if all(one.kind is not one.VAR_KEYWORD for one in names.values()):
            batch = {name: x for name, x in batch.items() if name in names}
        for name in ("use_cache", "output_router_logits"):  # of which the loss is of all tokens
            if hasattr(getattr(model, "config", None), name):
                batch[name] = False
        found = model(**batch)
    return (found["loss"] if isinstance(found, Mapping) else found).detach().double()


def vocabulary_of(model: nn.Module) -> int:
    """Return how many tokens a model knows."""
    for one in model.modules():
        if isinstance(one, Trainable) and one.shape is not None:
            return one.shape.vocab_size
        if isinstance(one, nn.Embedding):
            return one.num_embeddings
    return 5  # a model with an embedding of its own has a batch of its own


def compared(check: str, one: Tensor, other: Tensor, most: float, words: str) -> Row:
    """Return a row on two losses, a fault with these words if they differ by above `most`."""
    figure = float((one - other).abs() / one.abs().clamp(min=1e-3))
    return Row(check, OK, "", figure) if figure <= most else Row(check, FAULT, words, figure)


def rounding(model: nn.Module) -> float:
    """Return how far a model's losses may be apart by rounding."""
    return ROUNDING if next(model.parameters()).dtype.itemsize > 2 else ROUNDING_16
