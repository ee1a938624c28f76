"""Text that is streamed: packed as a token file is, shared out to devices, gone on
with at the next token."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from flashtrain.command.compose import compose_settings
from flashtrain.data import text_stream
from flashtrain.data.hub_source import HubSource
from flashtrain.data.streaming import StreamingDataModule
from flashtrain.data.text_files import FilesSource
from flashtrain.data.text_stream import Place, TextStream, packed_batches, shards_of
from flashtrain.data.tokenizers import ByteTokenizer
from flashtrain.errors import UserError

datasets = pytest.importorskip("datasets")


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> Path:
    """Twelve files of JSON lines, of five to sixteen short documents each,
    some longer than a sample."""
    monkeypatch.setattr(text_stream, "GROUP_DOCUMENTS", 7)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(12):
        texts = [
            f"file {number} text {line} " + "x" * (13 * line % 40) for line in range(5 + number)
        ]
        lines = "\n".join(json.dumps({"text": text}) for text in texts)
        (folder / f"{number:02}.jsonl").write_text(lines)
    return folder


def stream(corpus, **options) -> TextStream:
    return TextStream(shards_of(FilesSource(corpus)), ByteTokenizer(), **{"seed": 3, **options})


def texts_of(stream: TextStream, count: int) -> list[str]:
    return [ByteTokenizer().decode(ids[:-1]) for ids, _ in islice(stream.documents(Place()), count)]


TOTAL = sum(5 + number for number in range(12))


def test_an_epoch_is_every_document_once_in_an_order_of_its_own(corpus):
    both = texts_of(stream(corpus), 2 * TOTAL)
    first, second = both[:TOTAL], both[TOTAL:]
    assert sorted(first) == sorted(second) == sorted(FilesSource(corpus).documents())
    assert first != second
    assert texts_of(stream(corpus, seed=4), TOTAL) != first


@pytest.mark.parametrize("ranks", [5, 12, 20])
def test_devices_share_an_epoch(corpus, ranks):
    read = []
    for rank in range(ranks):
        own = stream(corpus, rank=rank, world_size=ranks)
        read += texts_of(
            own, sum(place.epoch == 0 for _, place in islice(own.documents(Place()), TOTAL))
        )
    assert sorted(read) == sorted(FilesSource(corpus).documents())


def test_a_device_opens_only_its_own_files_where_there_are_enough():
    opened = []

    def shard(number):
        opened.append(number)
        yield f"document of {number}"

    shards = [lambda number=number: shard(number) for number in range(6)]
    texts_of(TextStream(shards, ByteTokenizer(), 0, rank=1, world_size=3), 2)
    assert set(opened) == {1, 4}


def test_rows_are_cut_from_the_documents_end_to_end(corpus):
    tokens = np.concatenate([ids for ids, _ in islice(stream(corpus).documents(Place()), TOTAL)])
    batches = packed_batches(stream(corpus), Place(), 16, 2, document_mask=True)
    for number, (batch, _) in zip(range(20), batches, strict=False):
        begin = 32 * number
        assert batch["tokens"].flatten().tolist() == tokens[begin : begin + 32].tolist()
        after_end = batch["tokens"] == 256
        assert (batch["labels"][after_end] == -100).all()
        starts = torch.roll(after_end, 1, 1)
        starts[:, 0] = True
        assert (batch["positions"][starts] == 0).all()
        whole = batch["labels"][~after_end]
        assert (
            whole.tolist()
            == tokens[begin + 1 : begin + 33][tokens[begin : begin + 32] != 256].tolist()
        )


@pytest.mark.parametrize("world_size", [1, 3, 20])
def test_from_every_place_the_same_batches_follow(corpus, world_size):
    def batches(place):
        own = stream(corpus, rank=world_size - 1, world_size=world_size)
        return packed_batches(own, place, 16, 3, document_mask=True)

    straight = list(islice(batches(Place()), 160))  # more than an epoch
    assert straight[-1][1].epoch >= 1
    for number in range(0, 150, 13):
        place = Place(*json.loads(json.dumps(straight[number][1])))  # as a checkpoint holds it
        following = straight[number + 1 : number + 9]
        for (batch, after), (again, again_after) in zip(following, batches(place), strict=False):
            assert after == again_after
            assert all(torch.equal(batch[name], again[name]) for name in batch)


@pytest.fixture
def data(corpus):
    def make(**options):
        defaults = {"context": 16, "batch_size": 2, "total_steps": 12, "validation_fraction": 0.1}
        module = StreamingDataModule(FilesSource(corpus), "bytes", **{**defaults, **options})
        module.setup()
        return module

    return make


def test_a_run_goes_on_in_other_micro_batches(data):
    straight = [batch["tokens"] for batch in data(batch_size=4).train_dataloader()]
    loader = data(batch_size=4).train_dataloader()
    list(islice(loader, 5))
    again = data(batch_size=2, accumulate=2).train_dataloader()
    again.load_state_dict(loader.state_dict())
    halves = [batch["tokens"] for batch in again]
    assert torch.equal(torch.cat(halves), torch.cat(straight[5:]))


def test_the_first_documents_are_held_out_and_never_trained_on(data):
    module = data(total_steps=400, validation_samples=3)
    tokens, offsets = module.cache.tokens, module.cache.offsets
    held_out = {ByteTokenizer().decode(ids[:-1]) for ids in np.split(tokens, offsets[1:-1])}
    assert held_out == set(list(FilesSource(module.source.path).documents())[: len(held_out)])
    assert 0 < module.validation_tokens <= 3 * 16 + 1 + 60
    # A row without any fills up.
    labels = torch.cat([batch["labels"] for batch in module.val_dataloader()])
    assert int((labels >= 0).any(1).sum()) == module.held_out_samples == 3
    loader = module.train_dataloader()
    trained = set(texts_of(loader.stream, 2 * TOTAL))
    assert len(trained) == TOTAL - len(held_out)
    assert not trained & held_out
    assert sum(1 for _ in loader) == 400
    assert module.epochs_seen >= 1


def test_a_state_that_is_of_something_else_is_one_line(data):
    loader = data().train_dataloader()
    state = loader.state_dict()
    with pytest.raises(UserError, match=r"data\.streaming=false"):
        loader.load_state_dict({"step": 1, "samples_read": 4})
    with pytest.raises(UserError, match=r"streamed its text to 2 devices, .* on 2 devices, not 1"):
        loader.load_state_dict({**state, "streams": [state["streams"][0]] * 2})


def test_what_needs_a_trained_tokenizer_or_more_text_reports_it(tmp_path):
    with pytest.raises(UserError, match=r"data\.tokenizer=bytes"):
        StreamingDataModule(FilesSource(tmp_path), "bpe")
    files = ["recipe=gpt2", "data=files", "data.path=x", "data.streaming=true"]
    with pytest.raises(
        UserError, match=r"data\.streaming=true .* data\.tokenizer=bpe .* Set data\.tokenizer=gpt2"
    ):
        compose_settings(files)
    (tmp_path / "one.txt").write_text("one document")
    alone = StreamingDataModule(
        FilesSource(tmp_path / "one.txt"), "bytes", 4, 2, validation_fraction=0.1
    )
    alone.setup()
    with pytest.raises(UserError, match="no document for device 1 of 1"):
        next(iter(alone.train_dataloader()))


def test_shards_of_a_dataset_are_read_apart(tmp_path):
    datasets.Dataset.from_dict({"text": [str(n) for n in range(10)]}).save_to_disk(
        tmp_path / "saved", num_shards=2
    )
    source = HubSource(str(tmp_path / "saved"))
    assert [text for shard in shards_of(source) for text in shard()] == list(source.documents())


def test_the_documents_of_one_group_come_in_another_order_in_each_epoch(tmp_path):
    (tmp_path / "one.jsonl").write_text(
        "".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(20))
    )
    both = texts_of(stream(tmp_path), 40)
    assert sorted(both[:20]) == sorted(both[20:])
    assert both[:20] != both[20:]
