"""Which files of a folder are its weights: those that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_models as tiny
import pytest
import torch
import transformers

from flashtrain.errors import UserError
from flashtrain.integrations import load_decoder
from flashtrain.integrations.huggingface_model import transformers_decoder

SHARDS, WHOLE = {"max_shard_size": "20KB"}, {}


def llama(seed: int, **changes) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(
        tiny.KINDS["llama"](rms_norm_eps=1e-5, **changes)
    )


def saved(seed: int, folder: Path, how: dict[str, str]) -> None:
    """Save a model, beside what a save in the other form left, as copies of
    two folders into one do."""
    llama(seed).save_pretrained(folder / str(seed), **how)
    for file in (folder / str(seed)).iterdir():
        file.replace(folder / file.name)
    (folder / str(seed)).rmdir()


def read(folder: Path) -> dict[str, torch.Tensor]:
    model = transformers_decoder(str(folder))
    model.materialise(torch.device("cpu"))
    return model.state_dict()


@pytest.mark.parametrize("order", [(SHARDS, WHOLE), (WHOLE, SHARDS)])
def test_of_shards_and_one_file_transformers_choice_is_read(order: tuple, tmp_path: Path) -> None:
    for seed, how in enumerate(order):
        saved(seed, tmp_path, how)
    assert (tmp_path / "model.safetensors").is_file()
    assert (tmp_path / "model.safetensors.index.json").is_file()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    ours = read(tmp_path)
    assert all(torch.equal(one, ours[name]) for name, one in theirs.items())
    _, tensors = load_decoder(tmp_path)
    assert torch.equal(
        tensors["token_embedding.weight"][: tiny.VOCABULARY], theirs["model.embed_tokens.weight"]
    )


def test_an_index_that_names_a_missing_shard_is_refused_with_its_name(tmp_path: Path) -> None:
    saved(0, tmp_path, SHARDS)
    next(tmp_path.glob("model-00002*")).unlink()
    for reader in (read, load_decoder):
        with pytest.raises(
            UserError,
            match=r"no model-00002.*safetensors in .*model\.safetensors\.index\.json names",
        ):
            reader(tmp_path)


def test_weights_beyond_the_configuration_are_counted_in_a_line(tmp_path: Path, caplog) -> None:
    llama(0, num_hidden_layers=3).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "num_hidden_layers": 2}))
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    caplog.clear()
    with caplog.at_level("INFO", "flashtrain"):
        read(tmp_path)
    (line,) = [one for one in caplog.messages if str(tmp_path) in one]
    assert line.startswith(f"{len(info['unexpected_keys'])} weights in ")
    assert sorted(info["unexpected_keys"])[0] in line


def test_a_whole_folder_has_no_such_line(tmp_path: Path, caplog) -> None:
    llama(0).save_pretrained(tmp_path)
    with caplog.at_level("INFO", "flashtrain"):
        read(tmp_path)
    assert not [one for one in caplog.messages if str(tmp_path) in one]
