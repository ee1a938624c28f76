"""Text that is streamed: packed as a token file is, dealt out to devices, gone on with at the next token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from flashtrain.command.compose import compose_settings
from flashtrain.data import text_stream
from flashtrain.data.sources import FilesSource
from flashtrain.data.streaming import StreamingDataModule
from flashtrain.data.text_stream import Place, StreamedBatches, TextStream, shards_of
from flashtrain.data.tokenizers import ByteTokenizer
from flashtrain.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Twelve files of JSON lines, of five to sixteen short documents each, some longer than a sample."""
    monkeypatch.setattr(text_stream, "GROUP_DOCUMENTS", 7)
    return write_corpus(tmp_path / "corpus")


def write_corpus(folder: Path) -> Path:
    folder.mkdir()
    for number in range(12):
        texts = [f"file {number} text {line} " + "x" * (13 * line % 40) for line in range(5 + number)]
        lines = "\n".join(json.dumps({"text": text}) for text in texts)
        (folder / f"{number:02}.jsonl").write_text(lines)
    return folder


def stream(corpus, **options):
    return TextStream(shards_of(FilesSource(corpus)), ByteTokenizer(), **{"seed": 3, **options})


def take(documents, count):
    return list(islice(documents, count))


def texts_of(documents):
    return [ByteTokenizer().decode(document.ids[:-1]) for document in documents]


TOTAL = sum(5 + number for number in range(12))


def test_an_epoch_is_every_document_once_in_an_order_of_its_own(corpus):
    documents = stream(corpus).documents(Place())
    first, second = texts_of(take(documents, TOTAL)), texts_of(take(documents, TOTAL))
    assert sorted(first) == sorted(second) == sorted(FilesSource(corpus).documents())
    assert first != second
    assert texts_of(take(stream(corpus, seed=4).documents(Place()), TOTAL)) != first


@pytest.mark.parametrize("ranks", [2, 5, 12, 20])
def test_devices_share_an_epoch(corpus, ranks):
    read = []
    for rank in range(ranks):
        for document in stream(corpus, rank=rank, world_size=ranks).documents(Place()):
            if document.place.epoch:
                break
            read += texts_of([document])
    assert sorted(read) == sorted(FilesSource(corpus).documents())
    assert len(set(read)) == len(read)


def test_a_device_opens_only_its_own_files_where_there_are_enough(corpus):
    opened = []

    def shard(number):
        opened.append(number)
        yield f"document of {number}"

    shards = [lambda number=number: shard(number) for number in range(6)]
    take(TextStream(shards, ByteTokenizer(), 0, rank=1, world_size=3).documents(Place()), 2)
    assert set(opened) == {1, 4}


def test_rows_are_cut_from_the_documents_end_to_end(corpus):
    documents = take(stream(corpus).documents(Place()), TOTAL)
    tokens = np.concatenate([document.ids for document in documents])
    batches = StreamedBatches(stream(corpus), 16, document_mask=True)(Place(), 2)
    for number, (batch, _) in zip(range(20), batches, strict=False):
        begin = 32 * number
        assert batch["tokens"].flatten().tolist() == tokens[begin : begin + 32].tolist()
        after_end = batch["tokens"] == 256
        assert (batch["labels"][after_end] == -100).all()
        starts = torch.roll(after_end, 1, 1)
        starts[:, 0] = True
        assert (batch["positions"][starts] == 0).all()
        whole = batch["labels"][~after_end]
        assert whole.tolist() == tokens[begin + 1 : begin + 33][tokens[begin : begin + 32] != 256].tolist()


@pytest.mark.parametrize("world_size", [1, 3])
def test_from_every_place_the_same_batches_follow(corpus, world_size):
    def batches(place):
        own = stream(corpus, rank=world_size - 1, world_size=world_size)
        return StreamedBatches(own, 16, document_mask=True)(place, 3)

    straight = [made for _, made in zip(range(160), batches(Place()), strict=False)]  # more than an epoch
    assert straight[-1][1].epoch >= 1
    for number in range(0, 150, 13):
        for (batch, after), (again, again_after) in zip(
            straight[number + 1 : number + 9], batches(straight[number][1]), strict=False
        ):
            assert after == again_after
            assert all(torch.equal(batch[name], again[name]) for name in batch)


@pytest.fixture
def data(corpus):
    def make(**options):
        defaults = {"context": 16, "batch_size": 2, "total_steps": 12, "validation_fraction": 0.1}
        return StreamingDataModule(FilesSource(corpus), "bytes", **{**defaults, **options})

    return make


def test_a_run_goes_on_in_other_micro_batches(data, tmp_path):
    whole = data(batch_size=4)
    whole.setup()
    straight = [batch["tokens"] for batch in whole.train_dataloader()]
    module = data(batch_size=4)
    module.setup()
    loader = module.train_dataloader()
    take(loader, 5)
    module = data(batch_size=2, accumulate=2)
    module.setup()
    again = module.train_dataloader()
    again.load_state_dict(loader.state_dict())
    halves = [batch["tokens"] for batch in again]
    assert torch.equal(torch.cat(halves), torch.cat(straight[5:]))


def test_the_first_documents_are_held_out_and_never_trained_on(data):
    module = data(total_steps=400, validation_samples=3)
    module.setup()
    held_out = {ByteTokenizer().decode(ids[:-1]) for ids in module._held_out}
    assert held_out == set(list(FilesSource(module.source.path).documents())[: len(held_out)])
    assert 0 < module.validation_tokens <= 3 * 16 + 1 + 60
    rows = torch.cat([batch["tokens"] for batch in module.val_dataloader()])
    assert len(rows) == module.held_out_samples == 3
    loader = module.train_dataloader()
    trained = set(texts_of(take(loader.batches.stream.documents(Place()), 2 * TOTAL)))
    assert len(trained) == TOTAL - len(held_out)
    assert not trained & held_out
    assert sum(1 for _ in loader) == 400
    assert module.epochs_seen >= 1


TWO_RANKS = """
import json, sys
sys.path[:0] = sys.argv[1:3]
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from test_datamodule import Recorder, trainer
from flashtrain.data import text_stream
from flashtrain.data.sources import FilesSource
from flashtrain.data.streaming import StreamingDataModule

text_stream.GROUP_DOCUMENTS = 7
folder = sys.argv[3]

def fit(resume=None, callbacks=()):
    data = StreamingDataModule(FilesSource(folder + "/corpus"), "bytes", 16, 2, total_steps=8)
    run = trainer(folder, devices=2, strategy="ddp", callbacks=callbacks, limit_val_batches=0)
    model = Recorder()
    run.fit(model, data, ckpt_path=resume)
    return run, model.seen

saving = ModelCheckpoint(folder + "/saved", every_n_train_steps=3, save_top_k=-1, filename="{step}")
run, whole = fit(callbacks=[saving])
_, resumed = fit(folder + "/saved/step=3.ckpt")
with open(f"{folder}/rank{run.global_rank}.json", "w") as file:
    json.dump({"whole": whole, "resumed": resumed}, file)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow  # two processes, two runs
def test_two_devices_read_apart_and_each_goes_on_where_it_was(tmp_path):
    write_corpus(tmp_path / "corpus")
    (tmp_path / "two_ranks.py").write_text(TWO_RANKS)
    words = [sys.executable, str(tmp_path / "two_ranks.py"), str(ROOT), str(Path(__file__).parent), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for rank in ranks:
        assert len(rank["whole"]) == 8
        assert rank["resumed"] == rank["whole"][3:]
    assert ranks[0]["whole"] != ranks[1]["whole"]


def test_a_state_that_is_of_something_else_is_one_line(data):
    module = data()
    module.setup()
    loader = module.train_dataloader()
    state = loader.state_dict()
    with pytest.raises(UserError, match="of another kind of data"):
        loader.load_state_dict({"step": 1, "samples_read": 4})
    with pytest.raises(UserError, match=r"streamed its text to 2 devices, .* go on with as many, not 1"):
        loader.load_state_dict({**state, "places": [state["places"][0]] * 2})


def test_mistakes_of_the_text_are_raised_where_batches_are_taken(tmp_path, corpus):
    (corpus / "99.jsonl").write_text('{"body": "x"}')
    module = StreamingDataModule(FilesSource(corpus), "bytes", 16, 2, total_steps=500)
    module.setup()
    with pytest.raises(UserError, match="no column 'text'"):
        list(module.train_dataloader())


def test_what_needs_a_token_file_or_a_trained_tokenizer_says_so(data, tmp_path):
    with pytest.raises(UserError, match="has no token file, which this needs"):
        _ = data().cache
    with pytest.raises(UserError, match="streamed trains no tokenizer"):
        StreamingDataModule(FilesSource(tmp_path), "bpe")
    files = ["recipe=gpt2", "data=files", "data.path=x", "data.streaming=true"]
    with pytest.raises(UserError, match=r"data\.streaming=true .* data\.tokenizer=bpe .* choose gpt2, bytes"):
        compose_settings(files)
    compose_settings([*files, "data.tokenizer=bytes"])
    with pytest.raises(UserError, match=r"data\.streaming=True is for data=files or data=hub"):
        compose_settings(["recipe=gpt2", "data.streaming=true", "data.tokenizer=bytes"])
    (tmp_path / "one.txt").write_text("one document")
    alone = StreamingDataModule(FilesSource(tmp_path / "one.txt"), "bytes", 4, 2, validation_fraction=0.1)
    alone.setup()
    with pytest.raises(UserError, match="no document for device 1 of 1"):
        next(iter(alone.train_dataloader()))


def test_shards_of_a_dataset_are_read_apart(tmp_path):
    datasets = pytest.importorskip("datasets")
    from flashtrain.data.hub_source import SavedDataset

    datasets.Dataset.from_dict({"text": [str(n) for n in range(10)]}).save_to_disk(tmp_path / "saved", num_shards=2)
    source = SavedDataset(tmp_path / "saved")
    assert [text for shard in shards_of(source) for text in shard()] == list(source.documents())
