"""Runs of recipe=bert-finetune: labels, classes and words' labels; weights, ours and
Hugging Face's; resuming."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from tiny_runs import ROOT, TinyRuns, last_weights

import flashtrain
from flashtrain.command.checkpoint_settings import settings_from_checkpoint
from flashtrain.command.compose import compose_settings
from flashtrain.command.modes import run_mode
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import read_summary
from flashtrain.run.machine import adapt_to_machine
from flashtrain.settings.command_line import CommandLine
from flashtrain.tasks.masked_language.trained import read_bert

pytestmark = pytest.mark.integration  # whole runs

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "ab",
    "cd",
    "abcd",
    "x",
    "y",
    "and",
    *map(str, range(40)),
]


def lines(path, rows) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture(scope="session")
def hugging_face(tmp_path_factory: pytest.TempPathFactory):
    """A folder as transformers saves a BERT, with vocab.txt."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("hf")
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    return folder


def test_the_row_reports_micro_f1_on_test_texts(tuned) -> None:
    row = read_summary(tuned)
    assert (row["status"], row["scored"], row["samples"], row["target"]) == (
        "finished",
        "test",
        32,
        "labels",
    )
    assert 0 <= row["micro_f1"] <= 1
    assert row["best_micro_f1"] is None
    assert row["validation_micro_f1"] is not None


def test_labels_that_the_text_shows_are_learned(head_runs: TinyRuns) -> None:
    status, folder = head_runs.run(
        "learned", "trainer.steps=40", "trainer.validate_every=40", "bert.family=modern"
    )
    assert status == 0
    assert read_summary(folder)["micro_f1"] > 0.95


def test_micro_batches_train_to_the_same_weights(head_runs: TinyRuns, tuned) -> None:
    status, folder = head_runs.run("pieces", "finetune.tokens_at_once=32")
    assert status == 0
    assert read_summary(folder)["micro_batch"] == 2
    found = last_weights(folder)
    for name, value in last_weights(tuned).items():
        torch.testing.assert_close(found[name], value, atol=1e-4, rtol=1e-3)


def test_one_class_a_text_is_scored_by_accuracy_and_held_out_of_one_file(
    head_runs: TinyRuns, tmp_path
) -> None:
    path = lines(
        tmp_path / "all.jsonl",
        [{"text": f"text {'xy'[n % 2]}", "labels": n % 2} for n in range(20)],
    )
    status, folder = head_runs.run(
        "class", f"finetune.path={path}", "finetune.target=class", "finetune.pooling=first"
    )
    assert status == 0
    row = read_summary(folder)
    assert row["scored"] == "validation"
    assert 0 <= row["accuracy"] <= 1


def test_a_probe_learns_on_a_frozen_encoder_of_weights_and_is_loaded_again(
    head_runs: TinyRuns, tmp_path, hugging_face
) -> None:
    rows = [{"text": f"{'xy'[n % 2]} and ab {n % 7}", "labels": n % 2} for n in range(40)]
    status, folder = head_runs.run(
        "probe",
        f"finetune.path={lines(tmp_path / 'all.jsonl', rows)}",
        f"weights={hugging_face}",
        "finetune.target=class",
        "finetune.pooling=probe",
        "finetune.queries=4",
        "finetune.frozen=true",
        "trainer.steps=40",
        "optimizer.learning_rate=0.03",
    )
    assert status == 0
    row = read_summary(folder)
    assert row["trained_parameters"] == 4 * 32 + 32 * 32 + 2 * 32 + 2
    assert row["accuracy"] > 0.95
    theirs = read_bert(str(hugging_face), compose_settings(["recipe=bert-finetune"])).model.encoder
    found = last_weights(folder)
    for name, value in theirs.state_dict().items():
        assert torch.equal(found[f"model.encoder.{name}"], value)
    scores = flashtrain.evaluate(folder / "checkpoints" / "last.ckpt")
    assert row["accuracy"] in [pytest.approx(value, rel=1e-5) for value in scores.values()]


def test_words_labels_are_learned_on_a_hugging_face_bert(
    head_runs: TinyRuns, tmp_path, hugging_face
) -> None:
    rows = [{"words": ["x", str(n), "and", "y"], "labels": ["X", "O", "O", "Y"]} for n in range(40)]
    words = (f"finetune.path={lines(tmp_path / 'words.jsonl', rows)}", "finetune.target=tokens")
    status, folder = head_runs.run(
        "words", *words, f"weights={hugging_face}", "trainer.steps=40", "optimizer.weight_decay=0"
    )
    assert status == 0, read_summary(folder)
    row = read_summary(folder)
    assert row["accuracy"] > 0.95
    assert row["validation_accuracy"] == row["accuracy"]


def test_a_vocabulary_of_more_tokens_than_the_weights_know_is_refused(
    head_runs: TinyRuns, tmp_path, hugging_face
) -> None:
    folder = shutil.copytree(hugging_face, tmp_path / "more")
    (folder / "vocab.txt").write_text("\n".join([*WORDS, *WORDS]))  # the later of two lines counts
    status, run = head_runs.run("more-tokens", f"weights={folder}")
    assert status == 2
    assert (
        f"its tokenizer makes {2 * len(WORDS)} tokens, and its weights know {len(WORDS)}"
        in read_summary(run)["error"]
    )


def test_it_is_loaded_and_scored_in_python(tuned) -> None:
    last = tuned / "checkpoints" / "last.ckpt"
    loaded = flashtrain.load(last)
    assert (loaded.folder, loaded.settings.task) == (tuned, "fine_tuning")
    assert not loaded.model.training
    assert read_summary(tuned)["micro_f1"] in [
        pytest.approx(value, rel=1e-5) for value in flashtrain.evaluate(last).values()
    ]


def test_texts_of_ones_own_are_all_scored(tuned, tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    path = lines(tmp_path / "mine.jsonl", [{"text": "x y", "labels": ["x"]}] * 7)
    assert (
        run_mode(
            settings_from_checkpoint(
                ["mode=evaluate", f"checkpoint={tuned}", f"finetune.path={path}"]
            )
        )
        == 0
    )
    assert "on 7 test texts" in caplog.text


def test_an_export_is_read_by_transformers_with_the_labels_names(
    head_runs: TinyRuns, tuned
) -> None:
    transformers = pytest.importorskip("transformers")
    status, folder = head_runs.run("exported", "finetune.pooling=first", "trainer.steps=1")
    assert status == 0
    assert run_mode(settings_from_checkpoint(["mode=export", f"checkpoint={folder}"])) == 0
    (exported,) = folder.glob("export*")
    theirs = transformers.BertForSequenceClassification.from_pretrained(exported)
    assert theirs.config.id2label == {0: "x", 1: "y"}
    assert theirs.config.pad_token_id == 257
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert len(tokenizer) == theirs.config.vocab_size
    assert tokenizer("ab").input_ids == [tokenizer.cls_token_id, 97, 98, tokenizer.sep_token_id]
    labels = transformers.pipeline("text-classification", str(exported), truncation=True)
    assert labels(["ab x " * 9])[0]["label"] in ("x", "y")  # of more tokens than the context
    with pytest.raises(UserError, match="pooling=max"):
        run_mode(settings_from_checkpoint(["mode=export", f"checkpoint={tuned}"]))
    assert not list(tuned.glob("export*"))


def test_the_page_s_python_labels_new_texts(head_runs: TinyRuns, tmp_path) -> None:
    known = {"ab x": "x", "y cd": "y"}
    rows = [{"text": text, "labels": label} for text, label in known.items()] * 20
    words = ["finetune.target=class", f"finetune.path={lines(tmp_path / 'texts.jsonl', rows)}"]
    status, run = head_runs.run("modern", "bert.family=modern", *words, "trainer.steps=40")
    assert status == 0
    page = (ROOT / "docs" / "train" / "classify.md").read_text(encoding="utf-8")
    exec(page.split("<!-- label texts -->\n```python\n")[1].split("```")[0], own := {"RUN": run})
    logits = {text: own["logits"](f"{text}{' z' * 30}") for text in known}  # which is cut
    assert {text: own["run"].labels[int(one.argmax())] for text, one in logits.items()} == known


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("trainer.devices=3",), "does not divide over 3 devices"),
        (("trainer.micro_batch=3",), "Expected one of 1, 2, 4, 8"),
        (("finetune.path=null",), "finetune.data=files needs finetune.path"),
        (("finetune.data=synthetic",), "is used by finetune.data=files"),
        (("finetune.data=hub", "finetune.path=null"), "needs finetune.name"),
        (
            ("finetune.data=synthetic", "finetune.path=null", "finetune.target=class"),
            "Use finetune.target=labels",
        ),
        (("context=2",), "context=2"),
    ],
)
def test_settings_that_cannot_work_are_one_line(head_runs: TinyRuns, words, message) -> None:
    with pytest.raises(UserError, match=message):
        adapt_to_machine(
            compose_settings(head_runs.settings_words(*words)), CommandLine(["hardware.demo=never"])
        )


@pytest.mark.parametrize(
    ("words", "rows", "message"),
    [
        ((), [{"text": "a"}], "no column 'labels'"),
        (
            ("finetune.target=class",),
            [{"text": "a", "labels": ["x", "y"]}] * 4,
            "finetune.target=class needs one each",
        ),
        (
            ("finetune.target=tokens",),
            [{"words": ["a"], "labels": ["x", "y"]}],
            "1 words and 2 labels",
        ),
        (("finetune.target=tokens",), [{"words": "a", "labels": ["x"]}], "'words' holds 'a'"),
        ((), [{"text": "a", "labels": "x"}], "too few to hold out some"),
        (
            ("context=64", "weights=HF"),
            [{"text": "a", "labels": "x"}] * 4,
            "longer than the 32 positions",
        ),
    ],
)
def test_so_are_texts_that_cannot_be_read(
    head_runs, tmp_path, hugging_face, words, rows, message
) -> None:
    given = [word.replace("HF", str(hugging_face)) for word in words]
    path = lines(tmp_path / "given.jsonl", rows)
    status, folder = head_runs.run(f"mistake-{tmp_path.name}", f"finetune.path={path}", *given)
    assert status == 2
    assert message in read_summary(folder)["error"]
