"""Baselines of the same model: their losses and gradients agree on the same weights, and so do
their updates; and model=plain, which starts as model=gpt2 does.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch

from flashtrain.command.compose import compose_settings
from flashtrain.errors import UserError
from flashtrain.models.decoder import Decoder
from flashtrain.models.decoder_config import SIZES
from flashtrain.tasks.decoders import make_model
from flashtrain.training.hardware import detect_hardware
from flashtrain_recipes.step_benchmark.baselines import all_baselines
from flashtrain_recipes.step_benchmark.baselines.hugging_face import (
    hugging_face_gpt2,
    hugging_face_loss,
)
from flashtrain_recipes.step_benchmark.cases import GPT2Case
from flashtrain_recipes.step_benchmark.plain_training import PlainGPT
from flashtrain_recipes.step_benchmark.settings import STEP_MODELS
from flashtrain_recipes.step_benchmark.training_step import usual_step

CPU = torch.device("cpu")
# as many rows as tokens: transformers' GPT-2 and the plain one know no rows that stand for nothing
CASE = GPT2Case("demo", 24, 3, "fp32", vocab_size=64, vocab_rows=64)


def our_model() -> Decoder:
    torch.manual_seed(0)
    model = Decoder(CASE.config(), attention="standard").double()
    # Biases start at zero, where a forgotten one would not show.
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return model


def plain(ours: Decoder, attention: str, _: Path) -> tuple:
    model = PlainGPT(ours.config, attention).double()
    model.load_state_dict(ours.state_dict())
    return model.loss, model.token_embedding.weight


def hugging_face(ours: Decoder, attention: str, folder: Path) -> tuple:
    transformers = pytest.importorskip("transformers")
    from flashtrain.integrations import save_decoder

    save_decoder(ours, folder / "saved")
    saved = transformers.GPT2LMHeadModel.from_pretrained(folder / "saved", dtype=torch.float64)
    model = hugging_face_gpt2(CASE, CPU, attention).double()
    model.load_state_dict(saved.state_dict())
    return partial(hugging_face_loss, model), model.transformer.wte.weight


@pytest.mark.parametrize(
    ("build", "attention", "atol", "rtol"),
    [
        (plain, "sdpa", 1e-12, 1e-9),
        (plain, "standard", 1e-12, 1e-9),
        (hugging_face, "eager", 1e-6, 1e-5),  # transformers' loss is of float32 logits
        (hugging_face, "sdpa", 1e-6, 1e-5),
    ],
)
def test_others_compute_what_flashtrain_does(
    build, attention: str, atol: float, rtol: float, tmp_path
) -> None:
    ours = our_model()
    tokens, labels = CASE.draw(CPU, seed=1)
    found = []
    for loss_of, embedding in (
        (ours.loss, ours.token_embedding.weight),
        build(ours, attention, tmp_path),
    ):
        loss = loss_of(tokens, labels)
        found.append((loss.detach(), torch.autograd.grad(loss, embedding)[0]))
    torch.testing.assert_close(found[1], found[0], atol=atol, rtol=rtol, check_dtype=False)


def test_a_step_of_ours_updates_the_weights_as_the_peers_step_does() -> None:
    settings = compose_settings(
        ["recipe=gpt2-speed", "schedule=constant", "schedule.warmup_steps=0"]
    )
    step = all_baselines(settings, detect_hardware("cpu"), compiled=False)[0].build(CASE, CPU)
    theirs = copy.deepcopy(step.model)
    other = usual_step(theirs, theirs.loss, CASE, CPU)
    tokens, labels = CASE.draw(CPU, seed=2)
    for _ in range(3):
        torch.testing.assert_close(step(tokens, labels), other(tokens, labels))
    for one, two in zip(step.model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize(
    ("weights", "states"), [("bf16", torch.bfloat16), ("bf16-master", torch.float32)]
)
def test_weights_in_bfloat16_have_optimizer_states_in_it_or_in_float32(
    weights: str, states: torch.dtype
) -> None:
    case = GPT2Case("demo", 16, 1, weights, vocab_size=64)
    settings = compose_settings(["recipe=gpt2-speed"])
    for baseline in all_baselines(settings, detect_hardware("cpu"), compiled=False):
        if baseline.name in ("flashtrain", "pytorch"):
            step = baseline.build(case, CPU)
            loss = step(*case.draw(CPU, seed=0))
            assert torch.isfinite(loss)
            assert {parameter.dtype for parameter in step.model.parameters()} == {torch.bfloat16}
            assert {state["exp_avg"].dtype for state in step.optimizer.state.values()} == {states}
            updated = {
                parameter.dtype
                for group in step.optimizer.param_groups
                for parameter in group["params"]
            }
            assert updated == {states}


def test_the_names_of_the_settings_are_the_models() -> None:
    assert set(STEP_MODELS) == set(SIZES)


def test_the_flops_of_a_token_are_6n_and_half_the_square_of_attention() -> None:
    case = GPT2Case("124m", 1024, 1, "fp32", vocab_size=50257, vocab_rows=50304)
    multiplied = 124_475_904 - 1024 * 768  # the position table is looked up; 50,304 rows
    assert case.flops_per_token() == 6 * multiplied + 12 * 12 * 768 * 1024 / 2


DEMO = ["recipe=gpt2", "model.size=demo", "model.vocab_rows=null", "context=32"]


def built(name: str, seed: int = 3, **options):
    settings = compose_settings(
        [*DEMO, f"model.name={name}", *(f"model.{key}={value}" for key, value in options.items())]
    )
    torch.manual_seed(seed)
    return make_model(
        settings.model, vocab_size=320, context=settings.context, attention="sdpa"
    ).double()


def test_it_starts_from_the_weights_of_gpt2_and_counts_as_it_does():
    plain, ours = built("plain"), built("gpt2")
    assert isinstance(plain, PlainGPT)
    torch.testing.assert_close(plain.state_dict(), ours.state_dict(), rtol=0, atol=0)
    assert plain.parameter_count() == ours.parameter_count()
    assert plain.flops_per_token(32) == ours.flops_per_token(32)


def test_parts_it_has_not_are_refused_in_a_line():
    with pytest.raises(UserError, match="learned positions and no dropout"):
        built("plain", positions="rotary")
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(UserError, match="document_mask"):
        built("plain").loss(tokens, tokens, positions=tokens)
