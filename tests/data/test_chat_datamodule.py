"""Conversations in packed rows: whole, apart, each label counted once, even over devices."""

from __future__ import annotations

import json
import logging
from collections import Counter
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from chat_folders import CHATML, THINKING, save_tokenizer_folder

from flashtrain import Decoder, DecoderConfig, LanguageModel
from flashtrain.data.bpe import BPETokenizer
from flashtrain.data.chat_datamodule import ChatDataModule
from flashtrain.data.tokenizers import load_tokenizer
from flashtrain.errors import UserError
from flashtrain_kernels.loss_head import IGNORED

CONTEXT = 96


def talk(number: int) -> list[dict]:
    """Of one to three turns, all of different lengths."""
    found = []
    for turn in range(number % 3 + 1):
        answer = "yes " * (1 + (number * 7 + turn) % 9)
        found += [
            {"role": "user", "content": f"q{number}"},
            {"role": "assistant", "content": answer},
        ]
    return found


TALKS = [talk(number) for number in range(60)]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A folder with a tokenizer of 57 tokens for these words."""
    return save_tokenizer_folder(
        tmp_path_factory.mktemp("tokenizer") / "chatml", CHATML, words="yes user assistant " * 9
    )


@pytest.fixture
def make(tokenizer, tmp_path):
    def data(talks=TALKS, **options) -> ChatDataModule:
        path = tmp_path / "chats.jsonl"
        path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in talks))
        chosen = {
            "context": CONTEXT,
            "batch_size": 2,
            "total_steps": 12,
            "cache_dir": tmp_path / "cache",
            **options,
        }
        module = ChatDataModule(path, chosen.pop("tokenizer", tokenizer), **chosen)
        module.setup()
        return module

    return data


def placed(module: ChatDataModule, world_size: int, rank: int):
    return mock.patch.object(module, "_place", return_value=(world_size, rank))


def batches_of(make, world_size: int = 1, **options) -> list[list]:
    """[rank][micro-batch] of a whole run."""
    found = []
    for rank in range(world_size):
        module = make(**options)
        with placed(module, world_size, rank):
            found.append(list(module.train_dataloader()))
    return found


def documents_in(batch) -> list[tuple[int, ...]]:
    """The tokens of each document of a batch, in order, what fills rows up left out."""
    found = []
    for tokens, documents, labels in zip(
        batch["tokens"], batch["documents"], batch["labels"], strict=True
    ):
        for number in range(int(documents.max()) + 1):
            if (labels[documents == number] != IGNORED).any():
                found.append(tuple(tokens[documents == number].tolist()))
    return found


def test_rows_hold_whole_conversations_whose_answers_alone_are_labels(make):
    data = make(validation_fraction=0.0)
    (batch, *_) = data.train_dataloader()
    assert batch["tokens"].shape == (2, CONTEXT)
    talks = [data.template.tokenizer.decode(tokens) for tokens in documents_in(batch)]
    assert all(
        text.startswith("<|im_start|>user\nq") and text.endswith("<|im_end|>\n") for text in talks
    )
    for row in range(2):
        tokens, labels, documents, positions = (
            batch[name][row] for name in ("tokens", "labels", "documents", "positions")
        )
        first = torch.cat([torch.tensor([True]), documents[1:] != documents[:-1]])
        assert (positions[first] == 0).all()
        assert (positions[1:][~first[1:]] == positions[:-1][~first[1:]] + 1).all()
        learnt = labels != IGNORED
        assert torch.equal(labels[:-1][learnt[:-1]], tokens[1:][learnt[:-1]])
        assert (documents[1:][learnt[:-1]] == documents[:-1][learnt[:-1]]).all()
        said = data.template.tokenizer.decode(labels[learnt].tolist())
        assert set(said.replace("<|im_end|>\n", "").split()) == {"yes"}
    (batch, *_) = make(document_mask=False).train_dataloader()
    assert torch.equal(batch["positions"], torch.arange(CONTEXT, dtype=torch.int32).expand(2, -1))


def test_every_conversation_is_read_as_often_as_every_other_and_rows_are_well_filled(make):
    data = make(validation_fraction=0.0, total_steps=60)
    loader = data.train_dataloader()
    read: Counter = Counter()
    for batch in loader:
        read.update(documents_in(batch))
        assert ((batch["labels"] != IGNORED).any(dim=1)).all()
    offsets = data.cache.offsets
    assert set(read) == {tuple(data.cache.tokens[a:b].tolist()) for a, b in pairwise(offsets)}
    assert max(read.values()) - min(read.values()) <= 2  # of a look ahead of half an epoch
    assert data.epochs_seen == pytest.approx(read.total() / 60)
    tokens = sum(len(document) * count for document, count in read.items())
    assert tokens > 0.9 * len(loader) * batch["tokens"].numel()


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 4), (2, 2), (4, 1)])
def test_a_step_has_the_same_conversations_however_devices_and_micro_batches_share_them(
    make, world_size, accumulate
):
    one = batches_of(make, batch_size=8)[0]
    shared = batches_of(make, world_size, batch_size=2, accumulate=accumulate)
    for step, batch in enumerate(one):
        parts = [b for rank in shared for b in rank[step * accumulate : (step + 1) * accumulate]]
        assert sorted(d for part in parts for d in documents_in(part)) == sorted(
            documents_in(batch)
        )
        # The mean of the parts' means, so weighted, is the mean over the labels of the step.
        counts = [part["label_count"] for part in parts]
        weights = [part["weight"] * sum(counts) / len(parts) for part in parts]
        assert weights == pytest.approx(counts, rel=1e-12)
        assert counts == [(part["labels"] != IGNORED).sum() for part in parts]


def test_devices_have_about_as_much_to_do_in_every_micro_batch(make):
    """Some conversations fill a row, and cost many times what a row of short ones does."""
    talks = [
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "x" * (60 if n % 4 else 3)},
        ]
        for n in range(80)
    ]
    ranks = batches_of(make, 2, talks=talks, batch_size=2, accumulate=2)

    def pairs(batch) -> int:
        return sum(len(tokens) ** 2 for tokens in documents_in(batch))

    costs = np.array([[pairs(batch) for batch in rank] for rank in ranks])
    assert (costs.max(axis=0) / costs.mean(axis=0)).max() < 1.25
    assert costs.sum(axis=1).max() / costs.sum(axis=1).mean() < 1.03


def test_where_devices_share_sequences_all_count_the_labels_of_all(make):
    """There the strategy makes each mean one over the labels of all devices
    (distributed.context)."""
    modules = [make() for _ in range(2)]
    ranks = []
    for rank, module in enumerate(modules):
        samples = module._chats(module.documents[0])
        samples.shared = True
        rows = [(0, 1), (2,), (3,), (4, 5)]
        ranks.append(samples.micro_batches(rows, rank=rank, world_size=2, batch_size=1))
    for one, other in zip(*ranks, strict=True):
        assert (one.weight, one.label_count) == (other.weight, other.label_count)
    total = sum(one.label_count for one in ranks[0])
    assert [one.weight for one in ranks[0]] == pytest.approx(
        [2 * one.label_count / total for one in ranks[0]]
    )


def model_of(data) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig.of_size(
        "demo", "llama", vocab_size=data.tokenizer.vocab_size, context=CONTEXT
    )
    config = config.changed(layers=1, embed=16, heads=2, kv_heads=1, ffn=32)
    return Decoder(config, attention="standard").double()


class Gradients(pl.Callback):
    """Those of each step, before it is taken."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.found.append(
            torch.cat(
                [p.grad.flatten().clone() for p in pl_module.parameters() if p.grad is not None]
            )
        )


def gradients_and_losses(data, folder):
    task = LanguageModel(model_of(data), document_mask=True, gradient_clip=0.0)
    seen = Gradients()
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        limit_val_batches=0,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
        accumulate_grad_batches=data.accumulate, callbacks=[seen],
    )  # fmt: skip
    trainer.fit(task, data)
    return seen.found, task


@pytest.mark.parametrize("accumulate", [2, 4])
def test_gradients_are_those_of_the_mean_over_the_steps_labels_however_they_are_accumulated(
    make, tmp_path, accumulate
):
    """Also those of each conversation alone, unpacked: a row's conversations see
    nothing of each other."""
    options = {"total_steps": 2, "validation_fraction": 0.0}
    whole, first = gradients_and_losses(make(batch_size=4, **options), tmp_path)
    parts, second = gradients_and_losses(
        make(batch_size=4 // accumulate, accumulate=accumulate, **options), tmp_path
    )
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert first.first_loss == pytest.approx(second.first_loss, rel=1e-10)

    data = make(batch_size=4, **options)
    (batch, *_) = data.train_dataloader()
    model, total, count = model_of(data), 0.0, 0
    for row in range(4):
        for number in range(int(batch["documents"][row].max()) + 1):
            of = batch["documents"][row] == number
            labels = batch["labels"][row, of]
            learnt = int((labels != IGNORED).sum())
            if learnt:
                total = total + learnt * model.loss(batch["tokens"][row, of][None], labels[None])
                count += learnt
    assert count == batch["label_count"]
    (total / count).backward()
    alone = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(whole[0], alone, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("how", "count", "words"), [("cut", 6, "cut"), ("drop", 5, "left out")])
def test_a_conversation_longer_than_the_context_is_cut_left_out_or_refused_and_counted(
    make, how, count, words
):
    long = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "z" * 400}]
    data = make(talks=[*TALKS[:5], long], too_long=how, validation_fraction=0.0)
    assert (
        f"1 documents are longer than context=96 (up to 413 tokens) and {words}" in data.describe()
    )
    assert len(data.documents[0].begins) == count
    assert (data.documents[0].lengths.max() == CONTEXT) == (how == "cut")
    with pytest.raises(
        UserError, match=r"1 documents are longer than context=96.*data\.too_long=cut"
    ):
        make(talks=[*TALKS[:5], long], too_long="refuse")
    with pytest.raises(UserError, match=r"unknown data\.too_long 'trim'"):
        make(too_long="trim")


def test_a_conversation_with_no_answer_within_the_context_is_left_out(make, caplog):
    late = [{"role": "user", "content": "q" * 400}, {"role": "assistant", "content": "z"}]
    data = make(talks=[*TALKS[:5], late], validation_fraction=0.0)
    assert "1 have nothing to learn within it and are left out" in data.describe()
    caplog.set_level(logging.INFO)
    data.scored()  # of mode=evaluate
    assert "1 have nothing to learn within it and are left out" in caplog.text
    assert len(data.documents[0].begins) == 5
    with pytest.raises(UserError, match=r"no conversation .* within context=96"):
        make(talks=[late])


def test_whole_conversations_are_held_out_whatever_documents_they_became(make, tmp_path):
    thoughtful = [
        [
            {"role": "user", "content": f"q{n}"},
            {"role": "assistant", "content": f"<think>h</think>a{n}"},
        ]
        * 2
        for n in range(20)
    ]
    data = make(
        talks=thoughtful,
        tokenizer=save_tokenizer_folder(tmp_path / "thinking", THINKING),
        validation_fraction=0.2,
    )
    text = [
        {
            data.tokenizer.decode(data.cache.tokens[b : b + n]).split("\n")[1]
            for b, n, _ in zip(*part, strict=True)
        }
        for part in data.documents
    ]
    assert not text[0] & text[1]
    assert [len(part.begins) for part in data.documents] == [32, 8]
    assert "20 conversations in 40 documents" in data.describe()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_validation_reads_every_held_out_conversation_once(make, world_size):
    read, batches = [], []
    for rank in range(world_size):
        data = make(validation_fraction=0.1)
        with placed(data, world_size, rank):
            own = list(data.val_dataloader())
        batches.append(len(own))
        read += [d for batch in own if batch["label_count"] for d in documents_in(batch)]
        # One that has none left computes a row all the same, which counts nothing.
        assert all((batch["labels"] != IGNORED).any() for batch in own)
    assert len(set(batches)) == 1
    assert len(read) == len(data.documents[1].begins) == 6


def test_an_evaluation_reads_the_same_in_rows_of_the_longest_conversation(make):
    data = make(context=512, validation_fraction=0.5, validation_samples=100)
    read = []
    for data.short_rows in (False, True):
        batches = list(data.val_dataloader())
        read.append(sorted(one for batch in batches for one in documents_in(batch)))
    assert read[0] == read[1]
    assert all(batch["tokens"].shape[1] == max(map(len, read[0])) for batch in batches)


def test_a_single_conversation_trains_and_nothing_is_held_out(make):
    data = make(talks=TALKS[:1])
    assert data.val_dataloader() == []
    assert data.validation_tokens == 0
    (batch, *_) = data.train_dataloader()
    assert (batch["labels"] != IGNORED).any(dim=1).all()


def test_the_device_with_the_costlier_row_of_one_pair_has_the_cheaper_one_of_the_next(make):
    module = make(
        talks=[
            [*talk(1)[:1], {"role": "assistant", "content": "yes " * n}] for n in (1, 3, 5, 7, 9)
        ]
    )
    samples = module._chats(module.documents[0])
    of_lengths = dict(zip(samples.lengths.tolist(), range(len(samples)), strict=True))
    costly, dear, cheap, cheapest = rows = [
        (of_lengths[length],) for length in sorted(of_lengths, reverse=True)
    ]
    ranks = [
        samples.micro_batches(rows, rank=rank, world_size=2, batch_size=2)[0].rows
        for rank in range(2)
    ]
    assert ranks == [(costly, cheapest), (dear, cheap)]


def test_a_tokenizer_that_flashtrain_trained_takes_a_chat_template(make, tmp_path) -> None:
    own = BPETokenizer.train(["question answer"], 260)
    answer = "{% generation %}{{ one.content + eos_token }}{% endgeneration %}"
    template = (
        "{% for one in messages %}{{ one.role }}"
        "{% if one.role == 'assistant' %}"
        + answer
        + "{% else %}{{ one.content }}{% endif %}{% endfor %}"
    )
    data = make(tokenizer=own, template=template)
    data.setup()
    data.tokenizer.save(tmp_path / "run")  # as a run does, which then answers in turns
    assert load_tokenizer(tmp_path / "run").config["chat_template"] == template
    batch = next(iter(data.train_dataloader()))
    learned = own.decode(batch["labels"][batch["labels"] != IGNORED].tolist())
    assert "yes <|endoftext|>yes yes " in learned
    assert "user" not in learned
