"""What gloo ranks find of transformers' hybrids under context parallelism, for
test_hybrid_ranks.py.

    python hybrid_ranks.py FOLDER

Two and four ranks write FOLDER/two/RANK.json and FOLDER/four/RANK.json: {case: {what: relative
error}}, where an error is of the mean over the ranks to one process.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from hybrid_models import CONFIGS, LENGTHS, ON_ONE_DEVICE, Wide, decoder
from ranks import end, fork, report
from torch import Tensor

from flashtrain.distributed.context import sequence as context_sequence
from flashtrain.distributed.context.batch import shard_batch
from flashtrain.distributed.context.group import ContextGroup
from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder
from flashtrain.models.activation_checkpointing import MemorySavings
from flashtrain.models.decoder import Decoder
from flashtrain.models.decoder_config import DecoderConfig
from flashtrain.models.sharded_sequence import use_sharded_sequence

# Of flashtrain's own decoders: each mixer with states beside exact attention, and all of them.
STATES = ("retention", "lightning", "gla", "norm_attention", "delta", "mamba2")
OWN = {f"own {kind}": [kind, "full"] for kind in STATES} | {"own": [*STATES, "chunk:6", "full"]}
KINDS = [*(kind for kind in CONFIGS if kind not in ON_ONE_DEVICE), *OWN]
MORE_LENGTHS = ("qwen3_5_text", "nemotron_h", "lfm3", *OWN)
RECOMPUTED = ("qwen3_next", "kimi_linear", "bamba", "lfm2")
LONG = sum(LENGTHS)  # odd; documents cross every border, in one row or the other
SHORT = 9  # four ranks hold runs of 2, 1 and 0 tokens, shorter than a convolution


class Case(NamedTuple):
    kind: str
    layout: str = "zigzag"
    length: int = LONG
    # Other than none: of adapters in float32, since autograd computes again without Wide.
    checkpointing: str = "none"

    def __str__(self) -> str:
        return ", ".join(map(str, self))

    @property
    def adapted(self) -> bool:
        return self.checkpointing != "none"

    @property
    def mode(self) -> Any:
        return nullcontext() if self.adapted else Wide()


def cases() -> Iterator[Case]:
    for number, kind in enumerate(KINDS):
        yield Case(kind)
        yield Case(kind, "contiguous" if kind in OWN else ("contiguous", "balanced")[number % 2])
    for kind in MORE_LENGTHS:
        yield Case(kind, length=SHORT)
        yield Case(kind, length=2 * LONG)
    for number, kind in enumerate(RECOMPUTED):
        yield Case(kind, checkpointing=("full", "selective")[number % 2])


def batch_of(length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(3, 64, (2, 2, length), generator=generator)
    lengths = LENGTHS if length == LONG else [length // 2, length - length // 2]
    packed = torch.cat([torch.arange(one) for one in lengths])
    return {
        "tokens": tokens,
        "labels": labels,
        "positions": torch.stack((packed, torch.arange(length))),
    }


@cache
def model_of(kind: str, adapted: bool) -> Any:
    if kind in OWN:
        torch.manual_seed(0)
        sizes = {"layers": len(OWN[kind]), "width": 16, "heads": 2, "pattern": OWN[kind]}
        config = DecoderConfig.of_size("demo", "llama", vocab_size=64, context=LONG, **sizes)
        return Decoder(config, residual="weights").double()
    model = decoder(kind, torch.float32 if adapted else torch.float64)
    if adapted:
        from peft import LoraConfig, inject_adapter_in_model

        targets = ["q_proj", "k_proj", "in_proj", "in_proj_qkvz", "out_proj"]
        lora = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        torch.manual_seed(1)
        inject_adapter_in_model(lora, model.module)
        model = HuggingFaceDecoder(model.module)
    return model


def found_by(model: Any, part: dict[str, Any], weight: Any = 1.0) -> dict[str, Any]:
    """Logits, and the gradient of each parameter of `weight` times the loss."""
    model.zero_grad()
    loss = weight * model.loss(part["tokens"], part["labels"], positions=part["positions"])
    loss.backward()
    gradients = {
        name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
    }
    with torch.no_grad():
        logits = model(part["tokens"], positions=part["positions"])
    return {"logits": logits, "loss": loss.detach()[None], **gradients}


@cache
def one_process(kind: str, length: int, adapted: bool) -> dict[str, Tensor]:
    model = model_of(kind, adapted)
    model.save_memory(MemorySavings())
    return found_by(model, batch_of(length))


@contextmanager
def counted() -> Iterator[dict[str, list[int]]]:
    """The bytes that this rank gives to each collective on states and halos."""
    calls: dict[str, list[int]] = {"gather": [], "scatter": []}
    names, before = ("all_gather_single", "reduce_scatter_single"), vars(context_sequence).copy()

    def noted(found: Tensor, given: Tensor, *, group: Any, name: str, bytes_of: list[int]) -> Any:
        bytes_of.append(min(found.nbytes, given.nbytes))
        return before[name](found, given, group=group)

    for name, bytes_of in zip(names, calls.values(), strict=True):
        setattr(context_sequence, name, partial(noted, name=name, bytes_of=bytes_of))
    yield calls
    for name in names:
        setattr(context_sequence, name, before[name])


def errors(case: Case, group: ContextGroup) -> dict[str, Any]:
    exact = dict(one_process(case.kind, case.length, case.adapted))
    model = model_of(case.kind, case.adapted)
    model.save_memory(MemorySavings(case.checkpointing))
    part, sequence = shard_batch(
        {**batch_of(case.length), "logits": exact.pop("logits")}, group, layout=case.layout
    )
    with counted() as calls, use_sharded_sequence(sequence):
        found = found_by(model, part, sequence.weight)
    here = (sequence.layout.tokens[:, group.rank] >= 0)[..., None]  # not padding
    wrong = ((found.pop("logits") - part["logits"]) * here).norm().square()
    sums = torch.cat([found[name].flatten() for name in exact] + [wrong[None]])
    dist.all_reduce(sums)
    of = [x.numel() for x in exact.values()]
    off = {"logits": float(sums[-1].sqrt() / part["logits"].norm()), "calls": calls}
    largest = max(float(x.norm()) for x in exact.values())
    for (name, x), total in zip(exact.items(), sums[:-1].split(of), strict=True):
        error = (total.view_as(x) / group.size - x).norm()
        off[name] = float(error / max(float(x.norm()), 1e-6 * largest))
    return off


def rank(folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = ContextGroup()
    found = {}
    for case in cases():
        with case.mode:
            found[str(case)] = errors(case, group)
    report(folder, found)
    end()


def main(folder: Path) -> None:
    # What every rank would do again.
    for case in cases():
        with case.mode:
            one_process(case.kind, case.length, case.adapted)
    for name, degree in (("two", 2), ("four", 4)):
        fork(degree, rank, folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
