"""Rotary positions of transformers' decoders at another context: transformers' own angles,
scaled once, or refused."""

from __future__ import annotations

from pathlib import Path

import huggingface_models as tiny
import pytest
import torch
import transformers
import yaml

from flashtrain.errors import UserError
from flashtrain.folders.run_folder import CONFIG_FILE, read_settings
from flashtrain.integrations.huggingface_model import transformers_decoder
from flashtrain.models.rope_scaling import RopeScaling

CPU = torch.device("cpu")
TRAINED = 64  # max_position_embeddings of the tiny models
LONG = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
SCALINGS = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0},
    "yarn by lengths": {
        "rope_type": "yarn",
        "factor": None,
        "original_max_position_embeddings": 16,
    },
    "longrope": {**LONG, "original_max_position_embeddings": 32},
    "longrope with a factor": {
        **LONG,
        "rope_type": "longrope",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


def saved(folder: Path, kind: str = "llama", **changes) -> str:
    content = {**tiny.LLAMA_LIKE, "head_dim": 8, "query_pre_attn_scalar": 4, **changes}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **content)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for one in model.parameters():
        one.data = 0.3 * torch.randn_like(one)
    model.save_pretrained(folder)
    return str(folder)


def scaling(name: str) -> dict:
    return {"rope_type": name, "rope_theta": 1e4, **SCALINGS[name]}


def theirs(folder: str, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager"
        )(ids).logits


@pytest.mark.parametrize("name", SCALINGS)
def test_a_context_beyond_the_trained_one_leaves_transformers_logits_and_so_does_the_export(
    name, tmp_path
) -> None:
    folder = saved(tmp_path / "model", rope_parameters=scaling(name))
    ours = transformers_decoder(folder, context=200)
    ours.materialise(CPU)
    ours.eval()
    ours.save(tmp_path / "export")
    assert ours.shape.context == 200
    for length in (20, 40, 60, 100, 200, 50):  # in turns: dynamic scaling grows, and goes back
        ids = tiny.tokens(1, length)
        with torch.no_grad():
            logits = ours(ids)
        torch.testing.assert_close(logits, theirs(folder, ids), rtol=0, atol=1e-5)
        torch.testing.assert_close(logits, theirs(str(tmp_path / "export"), ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["linear", "dynamic", "yarn", "longrope", "llama3"])
def test_a_factor_on_top_of_a_models_own_scaling_is_refused(name, tmp_path) -> None:
    changes = {**tiny.LLAMA_LIKE, "rope_parameters": scaling(name)}
    with pytest.raises(
        UserError, match=rf"model\.rope_factor=4 .* rope_type of llama is {name}.*rope_parameters"
    ):
        transformers_decoder(config="llama", changes=changes, rope_factor=4.0)


def test_a_factor_scales_the_layers_of_gemma_3_that_see_the_whole_context(tmp_path) -> None:
    rotary = {
        kind: {"rope_type": "default", "rope_theta": 1e4}
        for kind in ("sliding_attention", "full_attention")
    }
    own = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    folder = saved(tmp_path / "model", "gemma3_text", rope_parameters=rotary, **own)
    ours = transformers_decoder(folder, context=128, rope_factor=2.0)
    bases = {kind: one["rope_theta"] for kind, one in ours.config.rope_parameters.items()}
    assert bases == {
        "sliding_attention": 1e4,
        "full_attention": RopeScaling("ntk", 2.0).base(1e4, 8),
    }
    ours.materialise(CPU)
    ours.save(tmp_path / "export")
    ids = tiny.tokens(1, 100)
    with torch.no_grad():
        torch.testing.assert_close(
            ours.eval()(ids), theirs(str(tmp_path / "export"), ids), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_a_kind_of_scaling_by_settings_is_transformers_own(kind, tmp_path) -> None:
    folder = saved(tmp_path / "model")
    ours = transformers_decoder(folder, context=256, rope=kind, rope_factor=4.0)
    ours.materialise(CPU)
    ours.save(tmp_path / "export")
    entries = {**scaling(kind), "factor": 4.0}
    if kind != "linear":
        entries["original_max_position_embeddings"] = TRAINED
    assert ours.config.rope_parameters == entries
    config = transformers.AutoConfig.from_pretrained(
        folder, rope_parameters=entries, max_position_embeddings=256
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, attn_implementation="eager"
    )
    ids = tiny.tokens(1, 200)
    with torch.no_grad():
        logits = ours.eval()(ids)
        torch.testing.assert_close(logits, model.eval()(ids).logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits, theirs(str(tmp_path / "export"), ids), rtol=0, atol=1e-5)


def test_yarn_by_settings_leaves_the_window_layers_of_gemma_3_alone_and_needs_a_factor(
    tmp_path,
) -> None:
    rotary = {
        kind: {"rope_type": "default", "rope_theta": 1e4}
        for kind in ("sliding_attention", "full_attention")
    }
    own = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    folder = saved(tmp_path / "model", "gemma3_text", rope_parameters=rotary, **own)
    ours = transformers_decoder(folder, context=128, rope="yarn", rope_factor=2.0)
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": TRAINED}
    assert ours.config.rope_parameters == {
        "sliding_attention": rotary["sliding_attention"],
        "full_attention": {"rope_theta": 1e4, **yarn},
    }  # fmt: skip
    with pytest.raises(UserError, match=r"model\.rope=yarn needs model\.rope_factor"):
        transformers_decoder(folder, context=128, rope="yarn")


def test_an_older_run_has_its_own_angles(tmp_path) -> None:
    """Until November 2026 the context was written over what these scalings compute from, and
    every base was scaled."""
    (tmp_path / CONFIG_FILE).write_text(
        yaml.safe_dump({"recipe": "hf", "model": {"name": "huggingface"}})
    )
    assert read_settings(tmp_path).model.older_positions
    for name in ("dynamic", "longrope"):
        folder = saved(tmp_path / name, rope_parameters=scaling(name))
        older = transformers_decoder(folder, context=200, older_positions=True)
        older.materialise(CPU)
        longer = transformers.AutoConfig.from_pretrained(folder, max_position_embeddings=200)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=longer, attn_implementation="eager"
        )
        for length in (50, 100):
            ids = tiny.tokens(1, length)
            with torch.no_grad():
                torch.testing.assert_close(
                    older.eval()(ids), model.eval()(ids).logits, rtol=0, atol=1e-5
                )
    both = {"config": "llama", "changes": {**tiny.LLAMA_LIKE, "rope_parameters": scaling("yarn")}}
    twice = transformers_decoder(**both, rope_factor=4.0, older_positions=True)
    assert twice.config.rope_parameters["rope_theta"] == RopeScaling("ntk", 4.0).base(1e4, 8)
