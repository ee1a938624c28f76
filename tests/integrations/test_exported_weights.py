from __future__ import annotations

import json

import pytest
import torch

from flashtrain.errors import UserError
from flashtrain.integrations import load_weights, save_weights
from flashtrain.models import GPT2, Bert, BertConfig, GPT2Config

TOKENS = torch.arange(12)[None]


def demo(family: str = "modern") -> GPT2:
    torch.manual_seed(0)
    return GPT2(GPT2Config.of_size("demo", family, vocab_size=61, context=16), attention="sdpa")


def change_config(folder, **changes) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["config"].update(changes)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("family", ["gpt2", "modern"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_comes_back_as_it_was(tmp_path, family, dtype):
    model = demo(family).to(dtype)
    save_weights(model, tmp_path / "exported")
    config, state_dict = load_weights(tmp_path / "exported")
    assert config == model.config
    again = GPT2(config, attention="sdpa").to(dtype)
    again.load_state_dict(state_dict)
    assert torch.equal(again(TOKENS), model(TOKENS))


def test_saving_again_replaces_what_was_there_and_leaves_nothing_else(tmp_path):
    save_weights(demo("gpt2"), tmp_path)
    save_weights(demo("modern"), tmp_path)
    assert load_weights(tmp_path)[0].norm == "rmsnorm"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_another_programs_weights_are_refused(tmp_path):
    save_weights(demo(), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match=r"was not exported by flashtrain .* read by load_gpt2"):
        load_weights(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embeds": 128}, "unknown entry of .*config.json 'embeds'. Did you mean 'embed'"),
        ({"layers": 5}, "has no tensor 'blocks.4.attention_norm.weight'"),
        ({"layers": 3}, "tensors that its config.json does not call for: 'blocks.3"),
        ({"ffn": 256}, r"'blocks.0.feed_forward.up.weight' has shape \(768, 128\) where"),
    ],
)
def test_a_configuration_that_does_not_fit_its_weights_is_refused(tmp_path, changes, message):
    save_weights(demo(), tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        load_weights(tmp_path)


def test_a_configuration_that_lacks_an_entry_is_refused(tmp_path):
    save_weights(demo(), tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["config"]["embed"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"does not describe a model: .*embed"):
        load_weights(tmp_path)


def test_a_configuration_that_is_no_json_is_refused(tmp_path):
    save_weights(demo(), tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json is not valid JSON"):
        load_weights(tmp_path)


def test_something_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"unknown kind of model to export 'Linear'. Possible: Bert, GPT2"):
        save_weights(torch.nn.Linear(2, 2), tmp_path)


def test_a_bert_is_written_and_read_and_not_taken_for_a_gpt2(tmp_path):
    model = Bert(BertConfig.of_size("tiny", "modern", vocab_size=61, context=16), "sdpa")
    save_weights(model, tmp_path)
    config, state = load_weights(tmp_path, "bert")
    assert config == model.config
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(UserError, match=r"holds a bert\. Possible: a gpt2"):
        load_weights(tmp_path)
