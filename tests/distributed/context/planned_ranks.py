"""What gloo ranks find of documents that are planned over them, for test_planned_documents.py.

python planned_ranks.py FOLDER  four and eight ranks write FOLDER/four and FOLDER/eight/RANK.json
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from hybrid_models import Wide, decoder
from ranks import end, fork, report
from strategy_ranks import ForeignDecoder, quiet, strategy, trainer
from torch import Tensor, nn

from flashtrain.data.datamodule import TextDataModule
from flashtrain.distributed.context.batch import shard_batch
from flashtrain.distributed.context.document_costs import costs_of
from flashtrain.distributed.context.group import ContextGroup
from flashtrain.models import Decoder, DecoderConfig
from flashtrain.models.sharded_sequence import mean_over_context, use_sharded_sequence, whole
from flashtrain.tasks import LanguageModel
from flashtrain_kernels import masks

# Of two rows of 90 tokens. On eight ranks one holds at most 29: the longest is divided over four,
# the next over two, and the others are whole.
ROWS = ((70, 3, 11, 1, 5), (40, 20, 2, 27, 1))
# One document alone: most ranks get none of it.
ALONE = ((6, 1, 1),)
PATTERNS = {
    "attention": ["full", "full"],
    "windows": ["window:9", "full"],
    **{kind: [kind, "full"] for kind in ("delta", "mamba2", "gla")},
}
METHODS = ("auto", "all-gather", "ring", "ulysses")


def batch_of(rows: tuple[tuple[int, ...], ...]) -> dict[str, Tensor]:
    """Labels of each row's second document count for nothing."""
    generator = torch.Generator().manual_seed(3)
    shape = len(rows), sum(rows[0])
    tokens, labels = torch.randint(3, 29, (2, *shape), generator=generator)
    lengths = [torch.tensor(row) for row in rows]
    ids = torch.stack([torch.arange(len(row)).repeat_interleave(row) for row in lengths])
    positions = [torch.cat([torch.arange(one) for one in row]) for row in rows]
    labels = torch.where(ids == 1, -100, labels)
    return {
        "tokens": tokens, "labels": labels, "documents": ids, "positions": torch.stack(positions)
    }  # fmt: skip


@cache
def model_of(pattern: str) -> Any:
    if pattern not in PATTERNS:
        return decoder(pattern, torch.float64)
    torch.manual_seed(0)
    sizes = {"layers": 2, "width": 16, "heads": 4, "pattern": PATTERNS[pattern]}
    config = DecoderConfig.of_size("demo", "llama", vocab_size=29, context=90, **sizes)
    return Decoder(config, residual="weights").double()


def found_by(model: Any, batch: dict[str, Any], weight: Any = 1.0) -> Tensor:
    """The loss times `weight`, then the gradients of all parameters."""
    model.zero_grad()
    own = isinstance(model, Decoder)  # transformers' find documents by positions
    mask = masks.document(whole(batch, "documents"), causal=True) if own else None
    given = batch["tokens"], batch["labels"]
    loss = weight * model.loss(*given, positions=batch["positions"], mask=mask)
    loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat([loss.detach()[None], *gradients])


def errors(group: ContextGroup, rows: Any, pattern: str, **options: Any) -> float:
    """The largest error of the loss and the gradients, meaned over the ranks, to one process."""
    model, batch = model_of(pattern), batch_of(rows)
    exact = found_by(model, batch)
    part, sequence = shard_batch(batch, group, **options)
    with use_sharded_sequence(sequence):
        found = found_by(model, part, sequence.weight)
    dist.all_reduce(found)
    return float((found / group.size - exact).abs().max())


def methods_of_the_sequence(group: ContextGroup, costs: Any) -> dict[str, float]:
    """Errors of what models call: labels that are shifted after sharding, positions that are not
    given, and sums and means over all ranks."""
    batch = batch_of(ROWS)
    del batch["positions"]
    batch["labels"] = torch.where(batch_of(ROWS)["positions"] == 0, -100, batch["tokens"])
    following = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    torch.manual_seed(1)
    model = ForeignDecoder().double().eval()

    def loss(part: dict[str, Tensor], labels: Tensor) -> Tensor:
        mask = masks.document(whole(part, "documents"), causal=True)
        logits = model(part["tokens"], mask=mask)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    exact = loss(batch, following)
    part, sequence = shard_batch(batch, group, costs=costs)
    with use_sharded_sequence(sequence):
        mean = whole(part, "tokens").double().mean()
        found = mean_over_context(loss(part, sequence.next_labels(part["labels"]))).detach()
    dist.all_reduce(found)
    return {
        "shifted": float((found / group.size - exact).abs()),
        "labels": float((sequence.label_count - (following != -100).sum()).abs()),
        "ranks": float((sequence.summed(torch.ones(1)) - group.size).abs()),
        "mean": float((sequence.batch_mean(mean) - batch["tokens"].double().mean()).abs()),
    }


class Task(LanguageModel):
    """Our language model, in float64."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        config = DecoderConfig.of_size("demo", "llama", vocab_size=258, context=64)
        changed = config.changed(layers=1, embed=16, ffn=24)
        super().__init__(Decoder(changed).double(), document_mask=True)


class Logged(pl.Callback):
    """The loss and the gradients' norm of each step."""

    def __init__(self) -> None:
        self.found: list[list[float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        logged = trainer.callback_metrics
        self.found.append([float(logged[name]) for name in ("train_loss", "gradient_norm")])


def fitted(folder: Path, text: Path, steps: int, degree: int, groups: str, **options: Any) -> Any:
    """What a training on four devices logs, each step of four rows whatever their degree."""
    rows, logged = degree, Logged()  # a data rank's, of the four
    data = TextDataModule(
        text, "bytes", 64, rows, total_steps=6, document_mask=True, validation_fraction=0,
        cache_dir=folder.parent / "cache",
    )  # fmt: skip
    own = strategy(degree, groups=groups)
    given = {"devices": 4, "strategy": own, "callbacks": [logged]}
    fit = trainer(folder, max_steps=steps, log_every_n_steps=1, **given)
    fit.fit(Task(), data, **options)
    fit.save_checkpoint(folder / f"{groups}-{degree}-{steps}.ckpt")
    return logged.found


def text_of(folder: Path) -> Path:
    """Documents from 3 to 120 bytes."""
    generator = torch.Generator().manual_seed(5)
    path = folder / "text"
    path.mkdir()
    for number in range(60):
        length = int(3 * 40 ** torch.rand((), generator=generator))
        letters = torch.randint(97, 123, (length,), generator=generator)
        (path / f"{number:02}.txt").write_text("".join(map(chr, letters)))
    return path


def rank(folder: Path, text: Path) -> None:
    quiet()
    dist.init_process_group("gloo")
    group = ContextGroup(planned=True)
    found: dict[str, float] = {}
    more: dict[str, Any] = {}
    for pattern in PATTERNS:
        costs = costs_of(model_of(pattern))
        found[f"fixed, {pattern}"] = errors(group, ROWS, pattern)
        for layout in ("zigzag", "contiguous"):
            options = {"layout": layout, "costs": costs}
            found[f"{pattern}, {layout}"] = errors(group, ROWS, pattern, **options)
    costs = costs_of(model_of("attention"))
    _, sequence = shard_batch(batch_of(ROWS), group, costs=costs)
    shared = sequence.group.size  # how many ranks share this one's documents
    for method in METHODS[: 4 if group.size == 4 else 3]:  # four heads
        found[f"attention, {method}"] = errors(group, ROWS, "attention", costs=costs, method=method)
    found["few documents"] = errors(group, ALONE, "attention", costs=costs)
    found["few documents, states"] = errors(group, ALONE, "delta", costs=costs)
    found |= methods_of_the_sequence(group, costs)
    for kind in ("qwen3_next", "lfm2"):
        with Wide():
            found[f"transformers' {kind}"] = errors(group, ROWS, kind, costs=costs)
    if group.size == 4:
        more = trained(folder, text)
    report(folder, {"errors": found, "shared": shared, **more})
    end()


def trained(folder: Path, text: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        "logged": {
            f"{groups} {degree}": fitted(folder, text, 4, degree, groups)
            for groups, degree in (("fixed", 2), ("fixed", 4), ("planned", 2), ("planned", 4))
        }
    }
    fitted(folder, text, 2, 4, "planned")
    path = folder / "planned-4-2.ckpt"
    found["resumed"] = fitted(folder, text, 4, 4, "planned", ckpt_path=path)
    return found


def main(folder: Path) -> None:
    import safetensors.torch  # noqa: F401
    import torch.distributed.checkpoint  # noqa: F401

    text = text_of(folder)
    for name, ranks in (("four", 4), ("eight", 8)):
        fork(ranks, rank, folder / name, text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
