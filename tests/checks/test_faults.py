"""flashtrain.check finds faults that are planted in models, collators and processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
import transformers
from checks.model_types import model_of
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import flashtrain
from flashtrain.checks.check import Report
from flashtrain.integrations import register_with_transformers

VOCABULARY = 97


def found(report: Report) -> set[str]:
    return {row.check for row in report.faults}


def with_attention(kind: str, attend: Callable[..., Any], mask: Any = sdpa_mask) -> Any:
    """A small model of this type whose attention is `attend`."""
    AttentionInterface.register("planted", attend)
    AttentionMaskInterface.register("planted", mask)
    model = model_of(kind, "eager")
    model.set_attn_implementation("planted")
    return model


def exactly(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> Any:
    """Attention in plain torch, with masks, windows, sinks and soft caps."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * given["scaling"]
    if given.get("softcap"):
        scores = given["softcap"] * (scores / given["softcap"]).tanh()
    if mask is None:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool).tril()
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if (sinks := given.get("s_aux")) is not None:
        sinks = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), 3)
    weights = scores.softmax(3)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2), None


def changing(function: Callable[..., Any], **values: Any) -> Callable[..., Any]:
    """`function` as it is, but for these arguments by name."""
    return lambda *given, **named: function(*given, **{**named, **values})


def a_wider_window(*_: Any, **given: Any) -> Any:
    """The mask of a window of one token more, and of documents as ever."""
    length = given["q_length"]
    whole = sdpa_mask(**{**given, "allow_is_causal_skip": False})
    ahead = F.pad(whole[..., :, 1:], (0, 1))
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    real = given["attention_mask"]
    real = True if real is None else real.bool()[:, None, None]
    return whole | (ahead & causal & real)


class Carries(pl.LightningModule):
    """A recurrence over packed rows, whose state passes from document to document."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.mixer = nn.GRU(16, 16, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        states = self.mixer(self.embedding(batch["input_ids"]))[0]
        logits = self.head(states)[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=-100)


def running_on(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A collator that packs by transformers' lengths of documents; its positions run on."""
    made = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(samples)
    made["position_ids"] = torch.arange(made["input_ids"].shape[1])[None]
    return made


def labelled_across(samples: list[dict[str, Any]]) -> dict[str, Any]:
    made = transformers.DataCollatorWithFlattening()(samples)
    return {**made, "labels": made["input_ids"].clone()}


class Ring(nn.Module):
    """A model of another trainer's, whose processes share rows. Its attention gathers all keys;
    `alone`: it forgets to."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.alone = alone
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> Any:
        x = self.embedding(input_ids)
        keys, places, rank = x, x.shape[1], 0
        if dist.is_initialized() and not self.alone:
            parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, x)
            keys, rank = torch.cat(parts, 1), dist.get_rank()
        where = torch.arange(places)[:, None] + rank * places
        mask = where >= torch.arange(keys.shape[1])
        x = x + F.scaled_dot_product_attention(x, keys, keys, attn_mask=mask)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def row_of_64() -> dict[str, Tensor]:
    tokens = torch.randint(4, VOCABULARY, (1, 65), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(64)[None]
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": positions}


def one_document() -> dict[str, Tensor]:
    """As transformers takes it, which shifts labels itself."""
    made = row_of_64()
    return {**made, "labels": made["input_ids"].clone()}


def halves(batch: Any, rank: int, ranks: int) -> Any:
    return {name: x.chunk(ranks, 1)[rank] for name, x in batch.items()}


CAPPED = partial(with_attention, "gemma2")
FAULTS: dict[str, tuple[Callable[[], Report], set[str]]] = {
    "a dropped mask": (
        lambda: flashtrain.check(with_attention("llama", exactly, lambda *_, **__: None)),
        {"documents apart", "packed equals alone", "padding on the left unseen"},
    ),
    "a leak by convolution": (
        lambda: flashtrain.check(model_of("lfm2", "sdpa")),
        {"documents apart", "packed equals alone"},
    ),
    "sinks ignored": (
        lambda: flashtrain.check(
            with_attention("gpt_oss", changing(exactly, s_aux=None)), one_document()
        ),
        {"sinks felt"},
    ),
    "positions that run on": (
        lambda: flashtrain.check(
            model_of("gpt2"), collator=running_on
        ),
        {"positions restart", "packed equals alone"},
    ),
    "labels across documents": (
        lambda: flashtrain.check(model_of("llama", "sdpa"), collator=labelled_across),
        {"labels stay within documents"},
    ),
    "a window off by one": (
        lambda: flashtrain.check(
            with_attention("mistral", exactly, a_wider_window), one_document()
        ),
        {"layer 0: window 13"},
    ),
    "softcap left out": (
        lambda: flashtrain.check(CAPPED(changing(exactly, softcap=None))),
        {"attn_logit_softcapping felt"},
    ),
    "padding attended": (
        lambda: flashtrain.check(
            with_attention("llama", exactly, changing(sdpa_mask, attention_mask=None))
        ),
        {"padding on the left unseen"},
    ),
    "a state carried over": (
        lambda: flashtrain.check(
            Carries(), collator=transformers.DataCollatorWithFlattening()
        ),
        {"documents apart", "packed equals alone"},
    ),
    "a shard that sees itself alone": (
        lambda: flashtrain.check(Ring(alone=True), row_of_64(), ranks=2, shard=halves),
        {"one rank equals 2"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_no_other(fault: str) -> None:
    ask, rows = FAULTS[fault]
    report = ask()
    assert found(report) == rows, f"\n{report}"
    with pytest.raises(flashtrain.UserError, match=min(rows)):
        report.require()


WITHOUT: dict[str, Callable[[], Report]] = {
    **{
        kind: partial(lambda kind: flashtrain.check(with_attention(kind, exactly)), kind)
        for kind in ("llama", "mistral", "gemma2")
    },
    "gpt_oss": lambda: flashtrain.check(with_attention("gpt_oss", exactly), one_document()),
    "gpt2": lambda: flashtrain.check(
        model_of("gpt2"), collator=transformers.DataCollatorWithFlattening()
    ),
    "a ring": lambda: flashtrain.check(Ring(alone=False), row_of_64(), ranks=2, shard=halves),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_without_the_fault_nothing_is_found(name: str) -> None:
    report = WITHOUT[name]()
    assert found(report) == set(), f"\n{report}"


def test_a_leak_is_named_by_the_layer_that_mixes_first() -> None:
    (row, _) = flashtrain.check(model_of("qwen3_next", "sdpa")).faults
    assert "layers.0.linear_attn" in row.words


def test_two_ranks_of_our_context_parallelism_equal_one() -> None:
    from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder

    report = flashtrain.check(HuggingFaceDecoder(model_of("gemma3_text")), ranks=2)
    (row,) = (row for row in report if row.check == "one rank equals 2")
    assert (row.verdict, found(report)) == ("ok", set())


def test_a_model_whose_own_attention_sees_its_shard_alone_is_found_on_two_ranks() -> None:
    register_with_transformers()
    report = flashtrain.check(model_of("llama", "sdpa"), ranks=2)
    assert found(report) == {"one rank equals 2"}


def test_nothing_of_a_model_is_changed() -> None:
    model = with_attention("gpt_oss", exactly).train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    caps, random = dict(vars(model.config)), torch.get_rng_state()
    flashtrain.check(model)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert {name: vars(model.config)[name] for name in caps} == caps


def test_a_mask_of_pairs_and_an_embedding_before_that_of_tokens_are_no_obstacle() -> None:
    """As models that read images have one of their places."""
    model, row = model_of("llama", "sdpa"), torch.randint(4, 200, (1, 64))
    model.model._modules = {"places": nn.Embedding(3, 8), **model.model._modules}
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()
    batch = {"input_ids": row, "labels": row, "attention_mask": mask}
    assert found(flashtrain.check(model, batch)) == set()


def test_documents_without_labels_are_no_fault_and_a_batch_without_any_is_refused() -> None:
    """As prompts have none; the loss of nothing is not a number."""
    batch = one_document()
    batch["position_ids"] = torch.cat((torch.arange(40), torch.arange(24)))[None]
    batch["labels"][:, 40:] = -100
    report = flashtrain.check(model_of("llama", "sdpa"), batch)
    assert found(report) == set(), f"\n{report}"
    batch["labels"][:] = -100
    with pytest.raises(flashtrain.UserError, match="not finite"):
        flashtrain.check(model_of("llama", "sdpa"), batch)


def test_a_model_that_fails_on_the_batch_is_no_model_without_faults() -> None:
    with pytest.raises(flashtrain.UserError, match="fails on the batch"):
        flashtrain.check(
            Ring(alone=True), {"input_ids": torch.zeros(1, 8).long(), "labels": torch.zeros(1, 8)}
        )


def test_a_leak_is_found_in_a_batch_of_several_rows() -> None:
    """Of many tokens the mean loss hardly moves."""
    rows, tokens = 3, 211
    torch.manual_seed(0)
    ids = torch.randint(4, 64, (rows, tokens))
    places = torch.cat([torch.arange(one) for one in (100, 61, 50)]).expand(rows, -1)
    batch = {"input_ids": ids, "labels": ids.clone(), "position_ids": places}
    batch["labels"][places == 0] = -100
    report = flashtrain.check(model_of("lfm2", "sdpa"), batch)
    (row,) = [row for row in report if row.check == "documents apart"]
    assert (row.verdict, "conv" in row.words) == ("FAULT", True)
    assert "documents apart" not in found(flashtrain.check(model_of("llama", "sdpa"), batch))
