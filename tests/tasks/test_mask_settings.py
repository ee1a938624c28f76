"""mask=: which tokens a token sees, in training, scoring and writing, and which
labels are left to predict."""

from __future__ import annotations

import pytest
import torch
from quiet_trainer import quiet_trainer
from torch.utils.data import DataLoader

import flashtrain
import flashtrain.tasks.language.prepare  # what it registers is not forgotten with own_mask
from flashtrain import Decoder, DecoderConfig, LanguageModel, generate, registry
from flashtrain.command import request
from flashtrain.command.checkpoint_settings import settings_from_checkpoint
from flashtrain.command.overrides import plain_words
from flashtrain.data.packing import Batch
from flashtrain.errors import UserError
from flashtrain.settings.settings import Settings
from flashtrain.tasks.attention_masks import attended_context, make_mask
from flashtrain.tasks.language.spec import LanguageTask
from flashtrain_kernels import masks
from flashtrain_kernels.loss_head import IGNORED

SIZE = 12
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [1] * 3])  # (B, S)


def settings_of(*words: str) -> Settings:
    return request.settings_of(plain_words(["recipe=gpt2", "hardware.demo=never", *words]))


def positions_of(settings: Settings) -> torch.Tensor:
    """As packing counts them: anew from each document's first token where rows are kept apart."""
    columns = torch.arange(SIZE).expand(2, -1)
    if not settings.applied_mask.documents:
        return columns
    return columns - torch.tensor([[0] * 5 + [5] * 7, [0] * 9 + [9] * 3])


def dense(*words: str) -> torch.Tensor:
    """(B, S, S) bool: what each token sees, of the mask that these words ask for."""
    settings = settings_of(*words)
    make = make_mask(settings.applied_mask)
    assert make is not None
    mask = make(
        documents=DOCUMENTS, positions=positions_of(settings), seqlen=SIZE, device=DOCUMENTS.device
    )
    return mask.dense().expand(2, -1, -1)


QUERY, KEY = torch.arange(SIZE)[:, None], torch.arange(SIZE)[None]
CAUSAL = (KEY <= QUERY).expand(2, -1, -1)
APART = DOCUMENTS[:, :, None] == DOCUMENTS[:, None, :]
BEGIN = torch.tensor([[0] * 5 + [5] * 7, [0] * 9 + [9] * 3])  # where each token's document begins
WITHIN = "mask.documents=true"


@pytest.mark.parametrize(
    "words", [("mask=document",), (WITHIN,), ("data.document_mask=true",), ("mask=Document",)]
)
def test_documents_are_kept_apart_however_it_is_set(words: tuple[str, ...]) -> None:
    assert torch.equal(dense(*words), CAUSAL & APART)
    assert settings_of(*words).mask_label == "document"


def test_a_window_is_the_last_tokens_with_the_token_itself() -> None:
    window = CAUSAL & (KEY > QUERY - 3)
    words = ("mask=window", "mask.window=3")
    assert torch.equal(dense(*words), window)
    assert torch.equal(dense(*words, WITHIN), window & APART)


def test_chunks_are_counted_from_the_rows_or_the_documents_first_token() -> None:
    words = ("mask=chunked", "mask.chunk=4")
    assert torch.equal(dense(*words), CAUSAL & (KEY // 4 == QUERY // 4))
    place = torch.arange(SIZE) - BEGIN
    same = place[:, :, None] // 4 == place[:, None, :] // 4
    assert torch.equal(dense(*words, WITHIN), CAUSAL & APART & same)


def test_a_prefix_sees_all_of_itself() -> None:
    words = ("mask=prefix", "mask.prefix=4")
    assert torch.equal(dense(*words), CAUSAL | (KEY < 4))
    assert torch.equal(dense(*words, WITHIN), APART & (CAUSAL | (BEGIN[:, :, None] + 4 > KEY)))


def test_the_causal_mask_is_the_models_own() -> None:
    assert make_mask(settings_of().applied_mask) is None


def test_flops_count_what_a_mask_shows() -> None:
    def attended(*words: str) -> int:
        return attended_context(settings_of(*words).applied_mask, 1024)

    assert attended() == attended("mask=document") == 1024
    assert attended("mask=window", "mask.window=4096") == 1024
    assert attended("mask=chunked", "mask.chunk=64") == 64
    pairs = 128 * 1024 - 128 * 127 // 2
    assert attended("mask=window", "mask.window=128") == round(2 * pairs / 1024 - 1)
    pairs = 1024 * 1025 // 2 + 512 * 511 // 2
    assert attended("mask=prefix", "mask.prefix=512") == round(2 * pairs / 1024 - 1)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("mask=window",),
            r"mask=window needs mask\.window=\.\.\., the tokens that each token sees",
        ),
        (("mask=window", "mask.window=0"), r"mask\.window=0 must be at least 1"),
        (("mask=windw",), r"unknown mask 'windw'\. Did you mean 'window'\?"),
        (("mask=false",), r"unknown mask 'false'\."),
        (("mask.window=3",), r"mask\.window=3 is used by mask=window"),
        (("mask=document", "+mask.options.a=1"), r"mask\.options"),
    ],
)
def test_a_mistake_is_one_line(words: tuple[str, ...], line: str) -> None:
    with pytest.raises(UserError, match=line):
        settings_of(*words)


def test_a_prefix_leaves_something_to_predict() -> None:
    settings = settings_of("mask=prefix", "mask.prefix=1024")
    with pytest.raises(
        UserError, match=r"leaves none of context=1024 tokens to predict.* at most 1023"
    ):
        LanguageTask().check_step(settings, ())


def batch(context: int = SIZE) -> Batch:
    tokens = torch.randint(7, (2, context), generator=torch.Generator().manual_seed(0))
    return Batch(
        tokens=tokens,
        labels=tokens.roll(-1, 1),
        documents=DOCUMENTS.int(),
        positions=torch.arange(SIZE, dtype=torch.int32).expand(2, -1),
    )


def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig.of_size("demo", vocab_size=7, context=SIZE), attention="sdpa")


def fit(task: LanguageModel) -> LanguageModel:
    quiet_trainer(1).fit(
        task, DataLoader([batch()], batch_size=None), DataLoader([batch()], batch_size=None)
    )
    return task


def test_what_a_prefix_shows_is_not_scored() -> None:
    """Of a prefix of four the labels of the first three are in it; the fourth
    predicts what follows it."""
    make = make_mask(settings_of("mask=prefix", "mask.prefix=4").applied_mask)
    whole, shown = model(), batch()
    labels = shown["labels"].clone()
    labels[:, :3] = IGNORED
    mask = masks.prefix_lm(torch.tensor([4]), seqlen=SIZE)
    expected = whole.loss(shown["tokens"], labels, mask=mask).item()
    assert fit(LanguageModel(whole, mask=make)).first_loss == pytest.approx(expected, abs=1e-5)


def test_a_mask_that_shows_everything_leaves_nothing_to_predict() -> None:
    full = LanguageModel(model(), mask=lambda seqlen, **_: masks.full(seqlen))
    shown = batch()
    shown["labels"][:, -1] = IGNORED  # whose token is in no row
    with pytest.raises(UserError, match="nothing to predict"):
        full.on_before_batch_transfer(shown, 0)


@pytest.mark.parametrize(
    "words", [("mask=window", "mask.window=4"), ("mask=chunked", "mask.chunk=4"),
        ("mask=prefix", "mask.prefix=3")],
)  # fmt: skip
def test_what_is_written_is_predicted_under_the_mask(words: tuple[str, ...]) -> None:
    """Token by token with a cache as without one."""
    make, whole = make_mask(settings_of(*words).applied_mask), model().eval()
    assert make is not None
    tokens = batch()["tokens"][:, :5]
    written = generate(whole, tokens, 6, temperature=0, mask=make)
    for length in range(5, 11):
        documents = torch.zeros(1, length, dtype=torch.int64)
        positions = torch.arange(length)[None]
        mask = make(
            documents=documents, positions=positions, seqlen=length, device=documents.device
        )
        with torch.no_grad():
            expected = whole(written[:, :length], mask=mask)[:, -1].argmax(-1)
        assert torch.equal(written[:, length], expected)


@pytest.fixture
def own_mask(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        registry, "_components", {group: dict(own) for group, own in registry._components.items()}
    )

    @flashtrain.register("mask", "last")
    def last(settings, *, documents, positions, seqlen, device):
        return masks.sliding_window(seqlen, (settings.options["tokens"] - 1, 0), device=device)


def test_a_mask_of_ones_own_trains_is_kept_evaluates_and_writes(
    own_mask, tiny_runs, caplog, capsys
) -> None:
    from flashtrain.command import modes
    from flashtrain.folders.run_folder import read_settings, read_summary

    words = plain_words(["mask=last", "+mask.options.tokens=5", "trainer.steps=2"])
    status, folder = tiny_runs.run("own-mask", *words)
    assert status == 0
    assert read_settings(folder).mask.options == {"tokens": 5}
    assert read_summary(folder)["mask"] == "last"
    for mode in ("mode=evaluate", "mode=generate"):
        settings = settings_from_checkpoint([mode, f"checkpoint={folder}", "hardware=cpu"])
        assert settings is not None
        assert settings.mask.name == "last"
        with caplog.at_level("INFO"):
            assert modes.run_mode(settings) == 0
    assert f"held-out loss {read_summary(folder)['validation_loss']:.4f}" in caplog.text
