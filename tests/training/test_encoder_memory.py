"""What an encoder's training step is estimated to keep, against what autograd
saves, tensor by tensor.

Without dropout: on a CPU its masks are of the activations' type and attention with it stores
scores, on a GPU neither.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flashtrain.models import Bert, BertConfig, Classifier, ClassifierConfig
from flashtrain.models.activation_checkpointing import MemorySavings
from flashtrain.models.layer_spec import layers_alike
from flashtrain.training.encoder_memory import PredictingHead, estimate_encoder_memory
from flashtrain.training.memory import Blocks

ROWS, LENGTH = 4, 128


def saved_bytes(model: nn.Module, loss: Callable[[], Tensor]) -> int:
    """Of the tensors that the loss keeps for its backward, each storage once; the
    parameters' own are left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage  # held, so that its place is not given to another
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss()
    return sum(storage.nbytes() for storage in found.values())


def bert(family: str) -> Bert:
    modern = family == "modern"
    config = BertConfig(
        vocab_size=64, vocab_rows=64, context=LENGTH, layers=3, heads=2, embed=64,
        ffn=192 if modern else 256,
        segments=0 if modern else 2, positions="rotary" if modern else "learned",
        norm_place="pre" if modern else "post", activation="geglu" if modern else "gelu",
        bias=not modern,
    )  # fmt: skip
    return Bert(config, "sdpa")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
# What selective keeps, it keeps outside of these hooks.
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(("family", "packed"), [("bert", False), ("modern", True)])
def test_berts_kept_tensors_are_those_that_autograd_saves(
    family, packed, checkpointing, precision
) -> None:
    model, savings = bert(family), MemorySavings(checkpointing)
    model.save_memory(savings)
    tokens = torch.randint(0, 64, (ROWS * LENGTH,))
    masked = torch.arange(0, ROWS * LENGTH, 7)
    labels = tokens[masked]
    layout = (
        {"cu_seqlens": torch.arange(0, ROWS * LENGTH + 1, LENGTH, dtype=torch.int32)}
        if packed
        else {}
    )
    given = tokens if packed else tokens.view(ROWS, LENGTH)
    half = precision == "bf16-mixed"
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        saved = saved_bytes(model, lambda: model.loss(given, masked, labels, **layout))
    config = model.config
    estimate = estimate_encoder_memory(
        model.parameter_count(),
        Blocks(64, config.layer_specs, residual="compute"),
        tokens=ROWS * LENGTH,
        max_seqlen=LENGTH,
        head=PredictingHead(config.vocab_rows, len(masked)),
        precision=precision,
        savings=savings,
        attention="sdpa",
    )
    # else made again in the backward.
    copies = model.parameter_count() * 2 if half and checkpointing == "none" else 0
    assert saved == pytest.approx(estimate.activations + copies, rel=0.25)


@pytest.mark.parametrize("copies", [0, 1])
@pytest.mark.parametrize(
    ("kind", "precision"), [("pixels", "32-true"), ("pixels", "bf16-mixed"), ("tokens", "32-true")]
)
def test_so_are_a_classifiers_with_the_rows_that_are_read_masked(kind, precision, copies) -> None:
    pixels = kind == "pixels"
    side, length = (16, 256) if pixels else (None, LENGTH)
    config = ClassifierConfig(
        classes=2, length=length, embed=64, layers=3, heads=2, ffn=256, vocab_size=32, side=side,
        inputs="grey" if pixels else "tokens", positions="axial" if pixels else "rotary",
        grey_bins=256 if pixels else 0,
    )  # fmt: skip
    model = Classifier(config, "sdpa")
    tokens = torch.randint(0, 32, (ROWS, length))
    masked = torch.arange(0, length, 8).expand(copies * ROWS, -1) if pixels and copies else None
    half = precision == "bf16-mixed"
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        saved = saved_bytes(
            model,
            lambda: sum(
                model.losses(tokens, torch.zeros(ROWS, dtype=torch.long), masked=masked)[:2]
            ),
        )
    estimate = estimate_encoder_memory(
        model.parameter_count(),
        Blocks(64, config.layer_specs),
        tokens=ROWS * length * (1 if masked is None else 2),
        max_seqlen=length,
        head=None if masked is None else PredictingHead(256, masked.numel()),
        precision=precision,
        attention="sdpa",
    )
    assert saved == pytest.approx(
        estimate.activations + half * 2 * model.parameter_count(), rel=0.25
    )


def test_every_saving_needs_less_and_every_token_more() -> None:
    shape = Blocks(1024, layers_alike(24, 1024, 16, 16, 4096), residual="compute")

    def needs(tokens: int, **savings) -> int:
        return estimate_encoder_memory(
            335_000_000, shape, tokens=tokens, max_seqlen=512,
            head=PredictingHead(30528, tokens // 7),
            savings=MemorySavings(**savings),
        ).total  # fmt: skip

    kinds = [needs(32768, checkpointing=kind) for kind in ("none", "selective", "full")]
    assert kinds == sorted(kinds, reverse=True)
    assert needs(32768) > needs(16384)
    assert needs(65536, checkpointing="full", ffn_chunk=8192) < needs(65536, checkpointing="full")
