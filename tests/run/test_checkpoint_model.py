"""Where training starts from: random weights, Hugging Face's, an export of ours, a
run; and at which context."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_runs import TinyRuns

from flashtrain.command import modes
from flashtrain.command.checkpoint_settings import settings_from_checkpoint
from flashtrain.command.compose import compose_settings
from flashtrain.command.mode_settings import check_used
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import read_settings, read_summary
from flashtrain.integrations import save_decoder, save_weights
from flashtrain.models import Decoder, DecoderConfig
from flashtrain.models.longer_context import stretched
from flashtrain.run.machine import adapt_to_machine
from flashtrain.run.train import check_same_model
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.settings import Settings
from flashtrain.spec import task_of
from flashtrain.tasks.language.prepare import model_builder
from flashtrain.tasks.language.trained import load_trained
from flashtrain.training.checkpoints import read_checkpoint
from flashtrain.training.hardware import detect_hardware


def start(*words: str, vocab_size: int = 257) -> Decoder:
    model = model_builder(compose_settings(["recipe=gpt2", *words]))(
        vocab_size=vocab_size, attention="sdpa"
    )
    assert isinstance(model, Decoder)
    return model


@pytest.fixture(scope="module")
def demo() -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig.of_size("demo", vocab_size=257, context=64), attention="sdpa")


@pytest.fixture(scope="module")
def rotary() -> Decoder:
    torch.manual_seed(0)
    return Decoder(
        DecoderConfig.of_size("demo", "llama", vocab_size=257, context=64), attention="sdpa"
    )


@pytest.fixture(scope="module")
def hugging_face(demo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "gpt2"
    save_decoder(demo, folder)
    return folder


@pytest.fixture(scope="module")
def exported(rotary, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours") / "export"
    save_weights(rotary, folder)
    return folder


def test_hugging_face_weights_at_a_longer_context_are_refused_with_the_setting_that_allows_it(
    hugging_face,
) -> None:
    with pytest.raises(
        UserError, match=r"context=256 is longer than the 64 positions .*interpolate_positions=true"
    ):
        start(f"weights={hugging_face}", "context=256")


def test_hugging_face_weights_are_stretched_to_a_longer_context_when_asked(
    hugging_face, demo
) -> None:
    model = start(f"weights={hugging_face}", "context=256", "model.interpolate_positions=true")
    assert model.config.context == 256
    assert torch.equal(
        model.position_embedding.weight, stretched(demo.position_embedding.weight, 256)
    )
    assert torch.equal(model.blocks[3].attention.qkv.weight, demo.blocks[3].attention.qkv.weight)
    assert model(torch.zeros(1, 256, dtype=torch.long)).shape[1] == 256


def test_an_export_of_ours_is_a_start_too_and_a_longer_context_is_pointed_out(
    exported, rotary, caplog
) -> None:
    with caplog.at_level("INFO"):
        model = start(f"weights={exported}", "context=256")
    assert "context=256 is 4 times the 64 that the weights" in caplog.text
    assert "model.rope_factor=4 would scale their rotary positions" in caplog.text
    assert (model.config.context, model.config.rope.factor) == (256, 1.0)
    assert torch.equal(model.token_embedding.weight, rotary.token_embedding.weight)
    caplog.clear()
    assert (
        start(f"weights={exported}", "context=256", "model.rope_factor=4").config.rope.factor == 4
    )
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("pattern", "kind"), [("full", "attention"), ("kdgqa", "kdgqa"), ("window:16", "attention")]
)
def test_weights_start_with_fewer_key_heads_and_other_layers_of_attention(
    hugging_face, demo, pattern, kind
) -> None:
    words = (f"weights={hugging_face}", "model.kv_heads=2", f"model.pattern=[{pattern}]")
    check_used(compose_settings(["recipe=gpt2", *words]), CommandLine(["recipe=gpt2", *words]))
    model = start(*words, "context=64")
    mixer = model.blocks[3].mixer
    assert (mixer.kv_heads, mixer.window) == (2, (15, 0) if pattern == "window:16" else None)
    rows = demo.blocks[3].attention.qkv.weight[128:].unflatten(0, (2, 2, 2, 32)).mean(2)
    torch.testing.assert_close(mixer.qkv.weight[128:], rows.flatten(0, 2))
    assert {layer.mixer.kind for layer in model.config.layers} == {kind}


def test_a_llama_of_transformers_is_a_start_of_a_modern_model(rotary, tmp_path) -> None:
    save_decoder(rotary, tmp_path, end_of_text=256)
    model = start("model=llama", f"weights={tmp_path}", "context=256", "model.rope_factor=4")
    tokens = torch.arange(64)[None]
    same = start(f"weights={tmp_path}", "context=64", "model.vocab_rows=null")
    assert torch.equal(same(tokens), rotary(tokens))
    assert (model.config.norm, model.config.context, model.config.rope.factor) == (
        "rmsnorm",
        256,
        4,
    )


def test_a_run_and_its_checkpoint_are_starts(trained) -> None:
    saved = read_checkpoint(trained / "checkpoints" / "best.ckpt")["state_dict"]
    for path in (trained, trained / "checkpoints" / "best.ckpt"):
        words = (
            "context=48",
            "model.interpolate_positions=true",
            "model.dropout=0.1",
            "model.residual=compute",
        )
        model = start(f"weights={path}", *words)
        assert (model.config.context, model.config.dropout, model.residual) == (48, 0.1, "compute")
        assert torch.equal(model.token_embedding.weight, saved["model.token_embedding.weight"])


def test_a_trained_model_is_evaluated_past_its_context_only_when_asked(trained) -> None:
    longer = compose_settings(["recipe=gpt2", "context=100"])
    with pytest.raises(UserError, match=r"context=100 is longer than the 32 positions"):
        load_trained(str(trained), attention="sdpa", settings=longer)
    longer.model.interpolate_positions = True
    assert load_trained(str(trained), attention="sdpa", settings=longer).model.config.context == 100


def test_stretching_needs_something_trained() -> None:
    with pytest.raises(UserError, match=r"needs weights="):
        start("model.interpolate_positions=true")


@pytest.mark.parametrize("word", ["model.rope_factor=0.5", "model.rope_base=1"])
def test_settings_that_cannot_scale_are_refused_at_once(word) -> None:
    with pytest.raises(UserError, match=word):
        compose_settings(["recipe=gpt2", word])


def test_a_checkpoint_of_another_model_is_not_resumed(trained) -> None:
    path = trained / "checkpoints" / "last.ckpt"
    saved = read_checkpoint(path)
    description = {
        **saved["flashtrain"],
        "shape": {**saved["flashtrain"]["shape"], "rope_factor": 2.0},
    }
    with pytest.raises(UserError, match="rope_factor"):
        check_same_model(path, saved, description)


@pytest.fixture(scope="module")
def words_of_its_own(tiny_runs: TinyRuns) -> Path:
    """The folder of a run whose tokenizer was trained on its text."""
    status, folder = tiny_runs.run(
        "own-words", "data.tokenizer=bpe", "data.vocab_size=300", "trainer.steps=1"
    )
    assert status == 0
    return folder


def settled(*words: str) -> Settings:
    """The settings as a run on a CPU has them, its text not yet read."""
    words = (
        "recipe=gpt2",
        "hardware=cpu",
        "data=files",
        f"data.path={Path(__file__).parents[2]}/README.md",
        *words,
    )
    return adapt_to_machine(compose_settings(words), CommandLine(words))[0]


def test_a_runs_tokenizer_model_and_context_come_with_its_weights(words_of_its_own, caplog) -> None:
    with caplog.at_level("INFO"):
        found = settled(f"weights={words_of_its_own}")
    assert (found.data.tokenizer, found.data.vocab_size) == ("bpe", 300)
    assert (found.model.label, found.context, found.trainer.tokens_per_step) == (
        "gpt2-demo",
        32,
        65536,
    )
    assert f"as in {words_of_its_own}: tokenizer bpe, model gpt2-demo, context 32." in caplog.text
    assert "0.8M parameters, context 32" in task_of(found).plan(found, detect_hardware("cpu"))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("data.tokenizer=bytes",),
            r"data\.tokenizer=bytes contradicts weights=.* trained with data\.tokenizer=bpe",
        ),
        (
            ("data.vocab_size=999",),
            r"data\.vocab_size=999 contradicts weights=.* with data\.vocab_size=300",
        ),
        (("model=llama",), r"model=llama is another architecture"),
    ],
)
def test_what_contradicts_a_runs_weights_is_refused_before_any_text_is_read(
    words_of_its_own, words, line
) -> None:
    with pytest.raises(UserError, match=line):
        settled(f"weights={words_of_its_own}", *words)


def test_a_tokenizer_trained_on_this_text_is_none_of_weights_from_elsewhere(hugging_face) -> None:
    with pytest.raises(
        UserError, match=r"data\.tokenizer=bpe is trained on this text, .* Use data\.tokenizer=gpt2"
    ):
        settled(f"weights={hugging_face}")
    with pytest.raises(UserError, match=r"know 257 tokens and the tokenizer makes 50257"):
        start(f"weights={hugging_face}", "context=64", "data.tokenizer=gpt2")


@pytest.mark.integration
def test_another_text_is_read_in_the_runs_own_tokens(
    words_of_its_own, tiny_runs: TinyRuns, tmp_path, caplog
) -> None:
    """In training and in evaluation: a tokenizer trained on it would have as
    many tokens, and others."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.md").write_text(
        "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. " * 60
    )
    status, folder = tiny_runs.run(
        "more-words",
        f"weights={words_of_its_own}",
        "data.tokenizer=bpe",
        "data.vocab_size=300",
        f"data.path={other}",
    )
    assert status == 0
    own, more = (
        load_trained(str(run), attention="sdpa").tokenizer for run in (words_of_its_own, folder)
    )
    assert own.fingerprint() == more.fingerprint()
    reported = read_summary(folder)["validation_loss"]
    share = read_settings(folder).data.validation_fraction  # without it all of a path is scored
    for words in ((), ("data=files", f"data.path={other}", f"data.validation_fraction={share}")):
        caplog.clear()
        settings = settings_from_checkpoint(
            ["mode=evaluate", f"checkpoint={folder}", "hardware=cpu", *words]
        )
        with caplog.at_level("INFO"):
            assert modes.run_mode(settings) == 0
        assert f"held-out loss {reported:.4f}" in caplog.text
