"""flashtrain's own export, and the folders of weights that every export is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flashtrain.errors import UserError
from flashtrain.integrations import load_bert, load_decoder, save_weights, weight_files
from flashtrain.models import Bert, BertConfig, Decoder, DecoderConfig

TOKENS = torch.arange(12)[None]


def demo(family: str = "llama") -> Decoder:
    torch.manual_seed(0)
    return Decoder(
        DecoderConfig.of_size("demo", family, vocab_size=61, context=16), attention="sdpa"
    )


@pytest.mark.parametrize(("family", "dtype"), [("gpt2", torch.float32), ("llama", torch.bfloat16)])
def test_a_model_comes_back_as_it_was(tmp_path, family, dtype):
    model = demo(family).to(dtype)
    save_weights(model, tmp_path / "exported")
    config, state_dict = load_decoder(tmp_path / "exported")
    assert config == model.config
    again = Decoder(config, attention="sdpa").to(dtype)
    again.load_state_dict(state_dict)
    assert torch.equal(again(TOKENS), model(TOKENS))


def test_saving_again_replaces_what_was_there_and_leaves_nothing_else(tmp_path):
    save_weights(demo("gpt2"), tmp_path)
    save_weights(demo("llama"), tmp_path)
    assert load_decoder(tmp_path)[0].norm == "rmsnorm"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_save_that_ends_midway_leaves_the_earlier_weights(tmp_path, monkeypatch):
    save_weights(demo("gpt2"), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def half(shard: dict, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(weight_files, "save_file", half)
    with pytest.raises(OSError, match="No space left"):
        save_weights(demo("llama"), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_index_names_files_of_its_own_folder_alone(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({"a": torch.zeros(1)}, folder / "x.safetensors")
    index = {"weight_map": {"a": "../x.safetensors", "b": str(tmp_path / "x.safetensors")}}
    (folder / weight_files.INDEX).write_text(json.dumps(index))
    assert weight_files.files_of_weights(folder) == [folder / "x.safetensors"]


def test_another_programs_models_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"kind of model to export 'Linear'.* Bert, Decoder.* save"):
        save_weights(torch.nn.Linear(2, 2), tmp_path)


def test_a_bert_is_written_and_read_and_not_taken_for_a_gpt2(tmp_path):
    model = Bert(BertConfig.of_size("tiny", "modern", vocab_size=61, context=16), "sdpa")
    save_weights(model, tmp_path)
    config, state = load_bert(tmp_path)
    assert config == model.config
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(UserError, match=r"bert: expected a gpt2"):
        load_decoder(tmp_path)
