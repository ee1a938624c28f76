"""Weights and tokenizers from elsewhere: a changed file is refused, and takes no more memory than it has."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from flashtrain.command.compose import compose_settings, parse_overrides
from flashtrain.data.bpe import BPETokenizer
from flashtrain.errors import UserError
from flashtrain.integrations import load_bert, load_gpt2, load_weights, save_bert, save_gpt2, save_weights
from flashtrain.models import GPT2, GPT2Config
from flashtrain.models.bert import Bert
from flashtrain.models.bert_encoder import BertConfig
from flashtrain.models.classifier import Classifier
from flashtrain.models.classifier_config import ClassifierConfig
from flashtrain.tasks.language.trained import load_trained, starting_weights
from flashtrain.training.checkpoints import read_checkpoint
from flashtrain_recipes.arena.evaluate import settings_for_weights
from flashtrain_recipes.arena.weights import KEY, SavedClassifier, read_classifier, write_classifier

IMPOSSIBLE = (10**9, 10**18, 2**64, 0, -1, 2.5, "2", True, None, [2], float("nan"))
SIZES = {"layers": 2, "heads": 2, "embed": 8, "ffn": 8}


@pytest.fixture(scope="module")
def decoder() -> GPT2:
    return GPT2(GPT2Config(257, 320, 16, kv_heads=2, **SIZES), "sdpa")


@pytest.fixture(scope="module")
def encoder() -> Bert:
    return Bert(BertConfig(261, 320, 16, **SIZES), "sdpa")


@pytest.mark.parametrize("value", IMPOSSIBLE, ids=str)
@pytest.mark.parametrize("name", ["layers", "embed", "vocab_rows", "heads", "context"])
def test_a_checkpoint_that_describes_another_model_than_it_holds_is_refused(trained, tmp_path, name, value) -> None:
    saved = read_checkpoint(trained / "checkpoints" / "last.ckpt")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_bytes((trained / "config.yaml").read_bytes())
    saved["flashtrain"]["shape"][name] = value
    torch.save(saved, tmp_path / "checkpoints" / "last.ckpt")
    with pytest.raises(UserError, match=r"last\.ckpt"):
        load_trained(str(tmp_path), attention="sdpa")
    with pytest.raises(UserError, match=r"last\.ckpt"):
        starting_weights(compose_settings(["recipe=gpt2", f"weights={tmp_path}"]))


def test_a_runs_tokenizer_of_more_tokens_than_its_weights_know_is_refused(trained, tmp_path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    load_trained(str(run), attention="sdpa")
    BPETokenizer.train(["the quick brown fox jumps over the lazy dog"] * 9, 300).save(run / "tokenizer")
    with pytest.raises(UserError, match=r"its tokenizer makes \d+ tokens, and its weights know 257"):
        load_trained(str(run), attention="sdpa")


@pytest.mark.parametrize("description", [None, 3, "gpt2", [], {}, {"name": 3}, {"name": "gpt2", "shape": [1]}])
def test_a_checkpoint_whose_description_is_of_another_type_is_refused(trained, tmp_path, description) -> None:
    saved = read_checkpoint(trained / "checkpoints" / "last.ckpt")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_bytes((trained / "config.yaml").read_bytes())
    saved["flashtrain"] = description
    torch.save(saved, tmp_path / "checkpoints" / "last.ckpt")
    with pytest.raises(UserError, match=r"last\.ckpt"):
        load_trained(str(tmp_path), attention="sdpa")


@pytest.mark.parametrize("steps", ["3", -1, None, 2.5, 2**70, [1]])
def test_steps_that_are_no_count_are_refused(trained, tmp_path, steps) -> None:
    saved = read_checkpoint(trained / "checkpoints" / "last.ckpt")
    for name in ("config.yaml", "tokenizer/tokenizer_config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    (tmp_path / "checkpoints").mkdir()
    torch.save({**saved, "global_step": steps}, tmp_path / "checkpoints" / "last.ckpt")
    with pytest.raises(UserError, match="its global_step is"):
        load_trained(str(tmp_path), attention="sdpa")


def test_a_tensor_that_claims_more_than_the_file_holds_is_refused(trained, tmp_path) -> None:
    saved = read_checkpoint(trained / "checkpoints" / "last.ckpt")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_bytes((trained / "config.yaml").read_bytes())
    rows = 10**9
    saved["state_dict"]["model.token_embedding.weight"] = torch.zeros(1).expand(rows, 128)
    saved["flashtrain"]["shape"]["vocab_rows"] = rows
    torch.save(saved, tmp_path / "checkpoints" / "last.ckpt")
    with pytest.raises(UserError, match="its tensors would take"):
        load_trained(str(tmp_path), attention="sdpa")


@pytest.mark.parametrize("value", [value for value in IMPOSSIBLE if value is not None], ids=str)
@pytest.mark.parametrize("name", ["n_layer", "n_embd", "vocab_size", "n_head", "n_positions", "n_inner"])
def test_a_gpt2_configuration_that_its_tensors_do_not_bear_out_is_refused(decoder, tmp_path, name, value) -> None:
    if name == "n_inner" and value == 0:
        value = -5  # 0 stands for none: four times the width
    save_gpt2(decoder, tmp_path)
    _set(tmp_path / "config.json", name, value)
    with pytest.raises(UserError):
        load_gpt2(tmp_path)


@pytest.mark.parametrize("value", [value for value in IMPOSSIBLE if value is not None], ids=str)
@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "intermediate_size", "type_vocab_size"])
def test_a_bert_configuration_that_its_tensors_do_not_bear_out_is_refused(encoder, tmp_path, name, value) -> None:
    if name == "intermediate_size" and value == 0:
        value = -5
    save_bert(encoder, tmp_path)
    _set(tmp_path / "config.json", name, value)
    with pytest.raises(UserError):
        load_bert(tmp_path)


@pytest.mark.parametrize("value", IMPOSSIBLE, ids=str)
@pytest.mark.parametrize("name", ["layers", "embed", "vocab_rows", "rope_factor", "context"])
def test_an_export_that_its_tensors_do_not_bear_out_is_refused(decoder, tmp_path, name, value) -> None:
    save_weights(decoder, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["config"][name] = value
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError):
        load_weights(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "[" * 100_000, '{"a":' * 100_000, '{"model_type": {"a": 1}}', "\x00", "1" * 5000, '{"format": [1]}'],
    ids=lambda text: text[:12],
)
def test_a_config_json_of_anything_is_refused_in_one_line(decoder, tmp_path, content) -> None:
    save_gpt2(decoder, tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError):
        starting_weights(compose_settings(["recipe=gpt2", f"weights={tmp_path}"]))


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", 3, None, "config.json"]
)
def test_an_index_names_safetensors_files_of_its_own_folder_only(decoder, tmp_path, shard) -> None:
    folder = tmp_path / "weights"
    save_gpt2(decoder, folder)
    (folder / "model.safetensors").rename(tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"wte.weight": shard}}))
    with pytest.raises(UserError, match=r"names the shard .*Possible: a \.safetensors file of its own folder"):
        load_gpt2(folder)


def _classifier(path: Path, **notes: object) -> Path:
    config = ClassifierConfig(2, 16, **SIZES, side=4)
    write_classifier(SavedClassifier(config, Classifier(config, "sdpa").state_dict(), notes, path), path)
    return path


@pytest.mark.parametrize("value", [*IMPOSSIBLE[:-3], float("nan")], ids=str)
@pytest.mark.parametrize("name", ["layers", "embed", "length", "classes"])
def test_a_classifiers_notes_that_its_tensors_do_not_bear_out_are_refused(tmp_path, name, value) -> None:
    from safetensors.torch import save_file

    config = ClassifierConfig(2, 16, **SIZES, side=4)
    notes = {"task": "classification", "shape": {**asdict(config), name: value}}
    path = tmp_path / "classifier.safetensors"
    save_file(Classifier(config, "sdpa").state_dict(), path, metadata={KEY: json.dumps(notes)})
    with pytest.raises(UserError, match="classifier"):
        read_classifier(path)


def test_a_pattern_of_too_many_blocks_is_refused(tmp_path) -> None:
    from safetensors.torch import save_file

    config = ClassifierConfig(2, 16, **SIZES, side=None, positions="rotary")
    shape = {**asdict(config), "pattern": "butterfly", "length": 2**30}
    path = tmp_path / "classifier.safetensors"
    notes = json.dumps({"task": "classification", "shape": shape})
    save_file(Classifier(config, "sdpa").state_dict(), path, metadata={KEY: notes})
    with pytest.raises(UserError, match="blocks of attention"):
        read_classifier(path)


@pytest.mark.parametrize(
    "notes",
    [
        {"contour": "${oc.env:HOME}"},
        {"recipe": "a,b"},
        {"data": ["text"]},
        {"stage": "x"},
        {"sequence": {"cache_dir": "/tmp/elsewhere"}},
        {"sequence": {"seed=1 output": 1}},
        {"sequence": 3},
    ],
    ids=str,
)
def test_a_classifiers_notes_become_settings_only_as_names_and_counts(tmp_path, notes) -> None:
    path = _classifier(tmp_path / "classifier.safetensors", **notes)
    words = ["mode=evaluate", f"weights={path}"]
    given = {override.get_key_element(): override for override in parse_overrides(words)}
    with pytest.raises(UserError, match=r"classifier\.safetensors"):
        settings_for_weights(words, given)


def _set(path: Path, name: str, value: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
