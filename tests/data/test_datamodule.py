"""The data module: on its own, and under Lightning."""

from __future__ import annotations

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from flashtrain.data.bpe import BPETokenizer
from flashtrain.data.datamodule import TextDataModule
from flashtrain.data.masked_datamodule import MaskedTextDataModule
from flashtrain.data.mixture import MixtureSource
from flashtrain.data.text_files import FilesSource
from flashtrain.data.token_files import TokenFiles
from flashtrain.data.tokenizers import ByteTokenizer, TokenizerSpec
from flashtrain.errors import UserError

TEXTS = [
    f"This is document {number}, and it says something about {number * 7}.\n"
    for number in range(60)
]


class Recorder(pl.LightningModule):
    """Learns nothing worth having; records the samples of every micro-batch by
    their first tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[list[int]]] = []
        self.validated: list[list[list[int]]] = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["tokens"][:, :8].tolist())
        return self.weight * batch["tokens"].float().mean()

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch["tokens"][:, :8].tolist())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.fixture
def data(list_source, tmp_path):
    def make(texts=TEXTS, **options):
        defaults = {
            "context": 16,
            "batch_size": 2,
            "total_steps": 12,
            "cache_dir": tmp_path / "cache",
        }
        return TextDataModule(list_source(texts), "bytes", **{**defaults, **options})

    return make


def trainer(folder, *, callbacks=(), **options):
    defaults = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
    }
    defaults |= {
        "enable_model_summary": False,
        "enable_checkpointing": bool(callbacks),
        "default_root_dir": folder,
    }
    return pl.Trainer(callbacks=list(callbacks), **{**defaults, **options})


def fit(data, folder, *, resume=None, **options):
    model = Recorder()
    options.setdefault("limit_val_batches", 0)
    trainer(folder, accumulate_grad_batches=data.accumulate, **options).fit(
        model, data, ckpt_path=resume
    )
    return model


def test_without_a_trainer_it_knows_its_tokens_and_makes_batches_of_the_sizes_set_by_then(data):
    module = data(accumulate=1)
    assert isinstance(module.tokenizer, ByteTokenizer)
    assert module.train_tokens + module.validation_tokens == sum(len(text) + 1 for text in TEXTS)
    assert module.validation_tokens >= 17
    for part in ("a list of texts", "257 tokens", "60 documents", str(module.cache.folder)):
        assert part in module.describe()
    module.batch_size, module.accumulate, module.total_steps = 3, 2, 4
    batches = list(module.train_dataloader())
    assert len(batches) == len(module.train_dataloader()) == 8
    assert batches[0]["tokens"].shape == (3, 16)


def test_source_and_tokenizer_have_short_forms(tmp_path):
    (tmp_path / "corpus.txt").write_text("some words\n" * 100)
    module = TextDataModule(
        tmp_path / "corpus.txt", TokenizerSpec("bpe", vocab_size=270), context=8
    )
    assert isinstance(module.tokenizer, BPETokenizer)
    own = TextDataModule(str(tmp_path / "corpus.txt"), module.tokenizer, context=8)
    assert own.cache.tokens[:].tolist() == module.cache.tokens[:].tolist()
    assert "Python" in TextDataModule().source.describe()


def test_the_held_out_documents_do_not_depend_on_the_seed(data):
    modules = [data(seed=seed, validation_fraction=0.3) for seed in (0, 1)]
    training, validation = (set(part.begins.tolist()) for part in modules[0].split)
    assert len(validation) == 18
    assert not training & validation
    held_out = [next(iter(module.val_dataloader()))["tokens"] for module in modules]
    trained_on = [next(iter(module.train_dataloader()))["tokens"] for module in modules]
    assert torch.equal(*held_out)
    assert not torch.equal(*trained_on)


def test_runs_of_several_contexts_can_hold_out_the_same_documents(data):
    def held_out(context, split_context=None):
        return set(
            data(context=context, split_context=split_context).split.validation.begins.tolist()
        )

    assert held_out(16) != held_out(200)  # more documents, for a sample of 200 tokens to fit
    assert held_out(16, 200) == held_out(64, 200) == held_out(200)
    assert held_out(200, 16) == held_out(200)  # its own samples must fit all the same


def test_length_weights_must_leave_a_sample(data):
    found = data(["a" * 9, "b" * 99] * 4, context=32, length_weights=[(50, 0)])
    with pytest.raises(UserError, match=r"data.length_weights=.* expected at least 33"):
        found.setup()
    whole = data(["a" * 9, "b" * 99] * 4, validation_fraction=1, length_weights=[(1, 0)])
    whole.setup()  # nothing is trained on


def test_long_documents_are_read_more_often_in_training_alone(data):
    texts = [letter * length for letter, length in zip("abcdefgh", [9, 99] * 4, strict=True)]
    plain, upsampled = (
        data(texts, validation_fraction=0.3, length_weights=weights) for weights in ((), [(50, 3)])
    )
    short, long = (
        sum(one for one in plain.split.training.lengths.tolist() if (one > 50) == longer)
        for longer in (False, True)
    )
    assert plain.train_tokens == short + long
    assert upsampled.train_tokens == short + 3 * long
    assert torch.equal(*(next(iter(one.val_dataloader()))["tokens"] for one in (plain, upsampled)))
    assert "8 documents, of 50 tokens and more 3 times" in upsampled.describe()
    # An epoch: each token of the stream is a label once.
    samples = upsampled._samples(upsampled.split.training)
    counts = np.bincount(samples[range(len(samples))]["labels"].flatten())
    training = upsampled.split.training
    read = upsampled.cache.tokens[int(training.begins[-1]) : int(training.ends[-1])]
    assert abs(counts[read[0]] - 3 * 99) <= upsampled.context


def test_repeated_documents_are_cut_into_the_samples_of_masked_training_too(list_source, tmp_path):
    def pieces(**options):
        module = MaskedTextDataModule(
            list_source(TEXTS), context=32, unit="document", cache_dir=tmp_path, **options
        )
        module.setup()
        return module.pieces(module.split.training)

    once, twice = pieces(), pieces(length_weights=[(1, 2)])
    assert twice.begins.tolist() == 2 * once.begins.tolist()
    assert twice.ends.tolist() == 2 * once.ends.tolist()


def test_what_could_not_be_held_out_is_reported_once(data, caplog):
    module = data(["a" * 600], context=16)
    module.setup()  # as Lightning does again
    module.setup()
    assert caplog.text.count("no whole document can be held out") == 1
    module.validation_fraction = 0.2
    module.setup()
    assert caplog.text.count("no whole document can be held out") == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, 0)
            for name in ("context", "batch_size", "total_steps", "accumulate", "validation_samples")
        ),
        *(("num_workers", -1), ("seed", -1), ("validation_fraction", 1.5)),
    ],
)
def test_impossible_arguments_are_reported(data, name, value):
    with pytest.raises(UserError, match=f"{name}={value}"):
        data(**{name: value})


def test_a_tokenizer_that_is_none_and_a_text_that_is_too_short_are_reported(data):
    with pytest.raises(UserError, match=r"unknown tokenizer 'bpee'\. Did you mean 'bpe'"):
        TextDataModule("stdlib", "bpee")
    with pytest.raises(UserError, match="fewer than"):
        data(["short"], context=100).setup()


def test_a_run_is_one_epoch_of_all_its_steps(data, tmp_path):
    module = data(accumulate=3)
    model = Recorder()
    run = trainer(tmp_path, accumulate_grad_batches=3, limit_val_batches=0)
    run.fit(model, module)
    assert run.global_step == 12
    assert len(model.seen) == 36
    samples_an_epoch = (module.train_tokens - 1) // 16
    assert module.epochs_seen == pytest.approx(12 * 3 * 2 / samples_an_epoch)


def test_validation_runs_with_it_and_none_held_out_is_no_error(data, tmp_path):
    assert fit(data(), tmp_path, limit_val_batches=1.0).validated
    assert fit(data(validation_fraction=0.0), tmp_path, limit_val_batches=1.0).validated == []


def test_accumulation_that_the_trainer_does_not_share_is_reported(data, tmp_path):
    with pytest.raises(UserError, match=r"accumulate=1.*accumulate_grad_batches=4"):
        trainer(tmp_path, accumulate_grad_batches=4).fit(Recorder(), data())


def test_overfit_batches_is_refused(data, tmp_path):
    with pytest.raises(UserError, match="limit_train_batches"):
        trainer(tmp_path, overfit_batches=2).fit(Recorder(), data())


def test_resuming_prints_nothing_about_unreliable_results(data, tmp_path, recwarn):
    saving = ModelCheckpoint(
        tmp_path / "saved", every_n_train_steps=5, save_top_k=-1, filename="{step}"
    )
    fit(data(), tmp_path, callbacks=[saving])
    fit(data(), tmp_path, resume=tmp_path / "saved" / "step=5.ckpt")
    assert not [warning for warning in recwarn if "resum" in str(warning.message)]


@pytest.mark.parametrize("name", ["seed", "context", "samples", "tokens"])
def test_each_number_that_says_what_was_read_is_reported_where_it_differs(data, caplog, name):
    module = data()
    module.setup()
    state = module.train_dataloader().state_dict()
    module.train_dataloader().load_state_dict(state)
    assert "has changed" not in caplog.text
    module.train_dataloader().load_state_dict({**state, name: state[name] + 1})
    assert f"data that has changed ({name} {state[name] + 1} -> {state[name]})" in caplog.text


def of_text(text: str, folder) -> TextDataModule:
    (folder / "text.txt").write_text(text)
    return TextDataModule(folder / "text.txt", "bytes")


def of_tokens(text: str, folder) -> TextDataModule:
    np.save(folder / "tokens.npy", np.frombuffer(text.encode(), np.uint8).astype("uint16"))
    return TextDataModule(TokenFiles(folder / "tokens.npy"), "bytes")


def of_a_mixture(text: str, folder) -> TextDataModule:
    (folder / "text.txt").write_text(text)
    (folder / "other.txt").write_text("another text " * 30)
    parts = {name: (FilesSource(folder / f"{name}.txt"), 1.0) for name in ("text", "other")}
    return TextDataModule(MixtureSource(parts), "bytes")


def masked(text: str, folder) -> TextDataModule:
    (folder / "text.txt").write_text(text)
    return MaskedTextDataModule(folder / "text.txt", "bytes", token_budget=64)


@pytest.mark.parametrize("made", [of_text, of_tokens, of_a_mixture, masked])
def test_another_text_of_the_same_length_is_reported_when_a_run_resumes(made, tmp_path, caplog):
    def loader(text: str):
        data = made(text, tmp_path)
        data.context, data.batch_size, data.validation_fraction = 16, 1, 0
        data.setup()
        return data.train_dataloader()

    text = "the quick brown fox jumps. " * 20
    state = loader(text).state_dict()
    loader(text).load_state_dict(state)
    assert "has changed" not in caplog.text
    loader(text.replace("quick", "kciuq")).load_state_dict(state)
    assert "resuming with data that has changed (text " in caplog.text
    caplog.clear()
    del state["text"]  # a checkpoint of an older version
    loader(text.replace("quick", "kciuq")).load_state_dict(state)
    assert "has changed" not in caplog.text
