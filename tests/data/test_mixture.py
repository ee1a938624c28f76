"""Several sources by weight: shares that are kept, an order that follows from the
seed, epochs that are said."""

from __future__ import annotations

import numpy as np
import pytest

from flashtrain.command.compose import compose_settings
from flashtrain.data.datamodule import TextDataModule
from flashtrain.data.mixture import BLOCK, MixtureSampler, MixtureSource, block_counts
from flashtrain.data.token_files import TokenFiles
from flashtrain.data.tokenizers import TokenizerSpec
from flashtrain.errors import UserError
from flashtrain.tasks.text_data import make_source


@pytest.fixture
def mixed(list_source):
    """Three parts of a and a fourth of b, told apart by their letters."""
    books = list_source(["a" * 30 + str(number) for number in range(40)])
    code = list_source(["b" * 30 + str(number) for number in range(10)])

    def module(**options):
        source = MixtureSource({"books": (books, 3), "code": (code, 1)})
        data = TextDataModule(
            source, "bytes", 16, 4, total_steps=200, validation_fraction=0.1, **options
        )
        data.setup()
        return data

    return module


def letters(batch):
    """Of each row, whether it is of a."""
    return [(row == ord("a")).sum() > (row == ord("b")).sum() for row in batch["tokens"]]


def test_every_step_draws_by_weight_and_every_sample_of_a_part_once_an_epoch():
    sampler = MixtureSampler(
        np.array([100, 7]), block_counts(np.array([0.75, 0.25])), batch_size=4, total_steps=2500
    )
    drawn = np.concatenate([sampler.sample_numbers(step) for step in range(2500)])
    small = drawn[drawn >= 100]
    assert len(small) == 2500  # of 10,000
    assert 200 < (drawn[:1000] >= 100).sum() < 300
    assert np.bincount(small - 100).max() - np.bincount(small - 100).min() <= 1
    assert sorted(small[:7]) == list(range(100, 107))
    assert small[:7].tolist() != small[7:14].tolist()


def test_a_sample_follows_from_its_number_alone():
    def sampler(**options):
        return MixtureSampler(
            np.array([100, 7]), block_counts(np.array([0.5, 0.5])), total_steps=9, **options
        )

    alone = sampler(batch_size=8, seed=3)
    ranks = [
        sampler(batch_size=2, accumulate=2, world_size=2, rank=rank, seed=3) for rank in (0, 1)
    ]
    for step in (0, 4, 3000):
        shared = [ranks[rank].sample_numbers(2 * step + half) for half in (0, 1) for rank in (0, 1)]
        assert np.concatenate(shared).tolist() == alone.sample_numbers(step).tolist()
    assert (
        sampler(batch_size=8, seed=4).sample_numbers(0).tolist() != alone.sample_numbers(0).tolist()
    )


def test_shares_of_a_block_are_whole_and_none_is_lost():
    assert block_counts(np.array([2 / 3, 1 / 3])).tolist() == [6667, 3333]
    tiny = block_counts(np.array([1 - 2e-6, 1e-6, 1e-6]))
    assert tiny.tolist() == [BLOCK - 2, 1, 1]


def test_another_weight_is_reported_when_a_run_goes_on(mixed, list_source, caplog):
    state = mixed().train_dataloader().state_dict()
    state["mixture"] += 1
    mixed().train_dataloader().load_state_dict(state)
    assert "resuming with data that has changed (mixture " in caplog.text


def test_validation_is_mixed_by_weight_and_apart_from_training(mixed):
    data = mixed(validation_samples=6)
    rows = [bool(one) for batch in data.val_dataloader() for one in letters(batch)]
    assert len(rows) == 6
    assert set(rows) == {True, False}
    assert data.train_tokens + data.validation_tokens == sum(
        len(cache.tokens) for cache in data.cache.caches
    )


def test_long_documents_are_read_more_often_in_each_part(mixed):
    plain, upsampled = mixed(), mixed(length_weights=[(33, 2)])
    for part, (own, more) in enumerate(
        zip(plain.split.training.parts, upsampled.split.training.parts, strict=True)
    ):
        longer = own.lengths >= 33
        assert (part == 0) == longer.any()  # numbers of two digits are books' alone
        assert more.tokens == own.tokens + own.lengths[longer].sum()
    rows = [one for batch in upsampled.train_dataloader() for one in letters(batch)]
    assert abs(np.mean(rows) - 0.75) < 0.05  # the sources' shares stay


def test_the_epochs_of_each_are_reported(mixed):
    data = mixed()
    small = len(data._samples(data.split.training).parts[1])
    assert f"code {800 / 4 / small:.2g}" in data.epochs_of_parts(800)
    assert data.epochs_of_parts(800).startswith("epochs of each source: books ")
    assert "mixture of books 75% (a list of texts), code 25%" in data.describe()


def test_a_bpe_is_trained_once_on_all(list_source, cache_home):
    parts = {"a": (list_source(["eins zwei " * 9]), 1), "b": (list_source(["one two " * 9]), 1)}
    spec = TokenizerSpec("bpe", vocab_size=270)
    first = MixtureSource(parts).open_tokens(spec, None)
    assert len(first.tokenizer.encode("eins")) < 4
    assert len(first.tokenizer.encode("two")) < 3
    (folder,) = [path for path in (cache_home / "mixture-tokenizers").iterdir() if path.is_dir()]
    before = (folder / "tokenizer.json").stat().st_mtime_ns
    assert (
        MixtureSource(parts).open_tokens(spec, None).tokenizer.fingerprint()
        == first.tokenizer.fingerprint()
    )
    assert (folder / "tokenizer.json").stat().st_mtime_ns == before


def test_token_files_mix_with_text(list_source, tmp_path):
    np.save(tmp_path / "a.npy", np.full(400, 98, "uint16"))
    source = MixtureSource(
        {"text": (list_source(["a" * 400]), 1), "tokens": (TokenFiles(tmp_path / "a.npy"), 1)}
    )
    data = TextDataModule(source, "bytes", 16, 8, validation_fraction=0)
    data.setup()
    batch = next(iter(data.train_dataloader()))
    assert set(batch["tokens"].unique().tolist()) <= {97, 98, 256}
    with pytest.raises(UserError, match=r"data\.mixture\.tokens is tokens already"):
        source.open_tokens(TokenizerSpec("bpe", vocab_size=300), None)


def test_settings_name_sources_and_weights(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    words = (
        f"data.mixture={{books: {{path: {tmp_path}, weight: 2}}, library: {{include_tests: "
        f"false}}}}"
    )
    settings = compose_settings(["recipe=gpt2", "data=mixture", words])
    source = make_source(settings.data)
    assert (list(source.sources), source.shares.tolist()) == (["books", "library"], [2 / 3, 1 / 3])
    assert "books 67% (files in" in source.describe()
    assert "without its tests" in source.describe()


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        ("null", r"data=mixture needs data\.mixture=\{NAME"),
        ("{a: 1}", r"data\.mixture\.a=1 must be the settings of a source: "),
        ("{a: {path: x, weight: 0}}", r"data\.mixture\.a\.weight=0 must be a number above 0"),
        ("{a: {pth: x}}", r"unknown setting of data\.mixture\.a 'pth'\. Did you mean 'path'"),
        ("{a: {path: 3}}", r"data\.mixture\.a\.path=3 must be of type str"),
        ("{a: {source: hub}}", r"data\.mixture\.a: data=hub needs data\.name"),
        ("{a: {path: x, name: y}}", r"data\.mixture\.a: data\.name=y is used by data=hub"),
    ],
)
def test_mistakes_in_a_mixture_are_one_line(mixture, message):
    with pytest.raises(UserError, match=message) as told:
        compose_settings(["recipe=gpt2", "data=mixture", f"data.mixture={mixture}"])
    assert "\n" not in str(told.value)


def test_a_part_that_is_too_short_is_named(list_source):
    source = MixtureSource(
        {"long": (list_source(["a" * 400]), 1), "short": (list_source(["b"]), 1)}
    )
    with pytest.raises(UserError, match=r"data\.mixture\.short: the corpus has 2 tokens"):
        TextDataModule(source, "bytes", 16, 8).setup()


def test_beyond_ten_thousand_samples_a_mixture_goes_on_in_each_part():
    """Three blocks of draws: what a block drew of a part is not drawn again
    before the part is through."""
    sampler = MixtureSampler(
        np.array([2 * BLOCK, 7]),
        block_counts(np.array([0.5, 0.5])),
        batch_size=BLOCK // 2,
        total_steps=6,
    )
    drawn = np.concatenate([sampler.sample_numbers(step) for step in range(6)])
    large, small = drawn[drawn < 2 * BLOCK], drawn[drawn >= 2 * BLOCK] - 2 * BLOCK
    assert len(large) == len(set(large)) == 3 * BLOCK // 2
    assert np.ptp(np.bincount(small)) <= 1
