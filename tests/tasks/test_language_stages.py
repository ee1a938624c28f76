"""A language model's training in stages: what each trains, what it starts from, what it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import transformers

import flashtrain
from flashtrain.command.compose import compose_settings
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import settings_at, write_config
from flashtrain.run.machine import adapt_to_machine
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.settings import Settings
from flashtrain.spec import task_of
from flashtrain.tasks.language.stages import stages_of
from flashtrain.training.hardware import detect_hardware

COMMON = ["recipe=gpt2", "hardware=cpu", "hardware.demo=never", "model.size=demo"]
COMMON += ["data.tokenizer=bytes", "model.vocab_rows=null", "trainer.tokens_per_step=256"]
GROWING = (
    "stages=[{context:32,steps:3,learning_rate:1e-3},{context:64,steps:2,rope:yarn,rope_factor:2},"
    "{context:128,rope_factor:4,schedule:constant,length_weights:[{at_least:50,weight:3}]}]"
)


def adapted(*words: str) -> Settings:
    line = CommandLine([*COMMON, *words])
    return adapt_to_machine(compose_settings(line), line)[0]


def test_a_stage_has_the_runs_settings_changed_by_its_entry() -> None:
    run = adapted("model=llama", "trainer.steps=9", "seed=5", GROWING)
    one, two, three = (stage.settings for stage in stages_of(run))
    assert [stage.steps for stage in stages_of(run)] == [3, 2, 9]
    assert [own.context for own in (one, two, three)] == [32, 64, 128]
    assert one.optimizer.learning_rate == 1e-3
    assert two.optimizer.learning_rate == run.optimizer.learning_rate
    assert (two.schedule.name, three.schedule.name) == ("cosine", "constant")
    assert [len(own.data.length_weights) for own in (one, two, three)] == [0, 0, 1]
    assert [stage.folder for stage in stages_of(run)][2] == "stage-3-context-128"


def test_positions_stay_scaled_and_all_stages_hold_out_the_same_documents() -> None:
    run = adapted("model=llama", GROWING)
    one, two, three = (stage.settings for stage in stages_of(run))
    assert [(own.model.rope, own.model.rope_factor) for own in (one, two, three)] == [
        (None, None),
        ("yarn", 2),
        ("yarn", 4),
    ]
    assert {own.data.split_context for own in (one, two, three)} == {128}


def test_stages_read_their_samples_in_different_orders(tmp_path: Path) -> None:
    stages = stages_of(adapted("seed=5", "context=32", "stages=[{steps:2},{steps:2}]"))
    assert [stage.begin(tmp_path).seed for stage in stages] == [5, 6]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stages=[{steps:2},{steps:0}]"], r"stages\[1\]: trainer.steps=0"),
        (["stages=[{step:2}]"], r"list's entry 'step'. Did you mean 'steps'\?"),
        (["stages=[{trainer.steps:2}]"], r"entry 'trainer.steps'. Expected one of: .*, steps,"),
        (["data.length_weights=[{at_leas:2}]"], r"'at_leas'. Did you mean 'at_least'\?"),
        (["stages=[{context:32},{context:48}]"], r"stages\[1\]: trainer.tokens_per_step=256"),
        (["stages=[{context:32},{context:64}]"], r"stages\[1\]: context=64 .* 32 learned"),
        (["model=llama", "stages=[{rope:spiral,rope_factor:2}]"], r"stages\[0\]: .*model.rope"),
        (
            ["model=llama", "stages=[{rope:linear,rope_factor:2},{rope:yarn,rope_factor:4}]"],
            r"stages\[1\]: model.rope=yarn would scale positions twice: .* linear",
        ),
        (["stages=[{schedule:sine}]"], r"stages\[0\]: .*sine"),
        (["stages=[{steps:2}]", "trainer.epochs=3"], "trainer.epochs=3"),
        (
            ["data.source=files", "data.path=.", "data.streaming=true",
             "stages=[{length_weights:[{at_least:9,weight:2}]}]"],
            r"stages\[0\]: data.length_weights",
        ),
    ],
)  # fmt: skip
def test_what_a_stage_cannot_do_is_said_before_any_is_trained(words, message) -> None:
    with pytest.raises(UserError, match=message):
        adapted("context=32", *words)


def test_a_setting_that_each_stage_of_a_recipe_has_itself_is_refused() -> None:
    settings = adapted("model=llama", GROWING)
    with pytest.raises(UserError, match="context changes nothing: each of stages has its own"):
        task_of(settings).check_step(settings, ["context"])
    task_of(settings).check_step(settings, ["trainer.steps"])  # the third has none


def test_the_plan_has_memory_and_time_of_each_stage() -> None:
    text = task_of(run := adapted("model=llama", GROWING)).plan(run, detect_hardware("cpu"))
    for number, context in enumerate((32, 64, 128), 1):
        assert f"stage {number} of 3, context {context}:\nllama-demo: " in text
    assert text.count("\nmemory: ") == text.count("\ntime: ") == 3
    assert text.count("nothing was started") == 1
    assert text.endswith("nothing was started; leave out mode=plan to train.")


def test_a_checkpoint_is_used_with_the_settings_of_its_own_stage(tmp_path: Path) -> None:
    import dataclasses

    write_config(dataclasses.asdict(adapted("model=llama", GROWING)), tmp_path)
    contexts = []
    for stage in range(3):
        torch.save({"flashtrain": {"stage": stage}}, tmp_path / "last.ckpt")
        own = settings_at(tmp_path, tmp_path / "last.ckpt")
        contexts.append((own.context, own.model.rope_factor, own.stages))
    assert contexts == [(32, None, []), (64, 2, []), (128, 4, [])]


class Watch(pl.Callback):
    """The weights with which each fit began and ended, and the moments that it began with."""

    def __init__(self) -> None:
        self.began: list[dict[str, torch.Tensor]] = []
        self.ended: list[dict[str, torch.Tensor]] = []
        self.moments: list[int] = []
        self.frozen: list[list[torch.Tensor]] = []
        self.unread: list[bool] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.unread.append(all(one.is_meta for one in pl_module.parameters()))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.began.append({k: v.clone() for k, v in pl_module.state_dict().items()})
        self.moments.append(sum(len(one.state) for one in trainer.optimizers))
        frozen = [one for one in pl_module.parameters() if not one.requires_grad]
        self.frozen.append([one.clone() for one in frozen])

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.ended.append({k: v.clone() for k, v in pl_module.state_dict().items()})


WATCH = Watch()
flashtrain.register("callback", "watch_stages")(lambda settings: WATCH)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A text of documents of some lengths, and a Llama of 32 positions."""
    folder = tmp_path_factory.mktemp("stages")
    (folder / "texts").mkdir()
    for number in range(60):
        text = f"{number} the quick brown fox. " * (1 + number % 5)
        (folder / "texts" / f"{number}.txt").write_text(text)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES, vocab_size=264, num_attention_heads=2, max_position_embeddings=32
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "llama")
    return folder


def train(place: Path, name: str, **settings: Any) -> Any:
    WATCH.__init__()  # type: ignore[misc]
    given = {
        "hardware": "cpu", "hardware.demo": "never", "data": "files", "data.path": place / "texts",
        "data.tokenizer": "bytes", "data.validation_fraction": 0.3, "data.cache_dir": place,
        "trainer.tokens_per_step": 256, "trainer.log_every": 1, "logger": "none",
        "output": place / name, "trainer.callbacks": ["watch_stages"],
        "optimizer.learning_rate": 0.01, "generate.max_new_tokens": 4,
    }  # fmt: skip
    return flashtrain.train(**{**given, **settings})


ADAPTER = {"model.adapter": "lora", "model.adapter_rank": 4}
STAGES = [
    {"context": 32, "steps": 3},
    {"context": 64, "steps": 2, "rope": "yarn", "rope_factor": 2},
    {"context": 128, "steps": 4, "rope_factor": 4},
]


@pytest.fixture(scope="module")
def run(place: Path) -> Any:
    """A run of three stages, with what each fit began and ended with."""
    own = {"recipe": "hf", "model.path": place / "llama", "stages": STAGES}
    found = train(place, "runs", **own)
    return found, None, dict(vars(WATCH))


@pytest.mark.integration
def test_a_stage_starts_from_the_weights_of_the_one_before_and_its_optimizer_anew(run) -> None:
    watched = run[2]
    assert watched["unread"] == [True] * 3  # each rank reads its own shards
    assert watched["moments"] == [0, 0, 0]
    for ended, began in zip(watched["ended"][:-1], watched["began"][1:], strict=True):
        assert [name for name in ended if not torch.equal(ended[name], began[name])] == []
    first, last = watched["began"][0], watched["ended"][-1]
    assert all(not torch.equal(first[name], last[name]) for name in first)


@pytest.mark.integration
def test_the_run_is_used_and_exported_as_of_its_last_stage(run, place: Path) -> None:
    folder = run[0].folder
    loaded = flashtrain.load(folder, hardware="cpu")
    assert (loaded.settings.context, loaded.model.shape.context, loaded.step) == (128, 128, 4)
    exported = Path(flashtrain.export(folder, hardware="cpu"))
    config = json.loads((exported / "config.json").read_text())
    assert config["max_position_embeddings"] == 128
    assert {name: config["rope_parameters"][name] for name in YARN} == YARN
    theirs = transformers.LlamaForCausalLM.from_pretrained(exported).eval()
    # Angles: transformers' own yarn at this stage's factor, made from the untouched model.
    plain = transformers.AutoConfig.from_pretrained(place / "llama")
    plain.max_position_embeddings = 128
    plain.rope_parameters = {**plain.rope_parameters, **YARN}
    angles = transformers.LlamaForCausalLM(plain).model.rotary_emb.inv_freq
    assert torch.equal(loaded.model.module.model.rotary_emb.inv_freq, angles)
    assert torch.equal(theirs.model.rotary_emb.inv_freq, angles)
    tokens = torch.arange(128)[None] % 256
    with torch.no_grad():
        assert torch.allclose(loaded.model(tokens), theirs(tokens).logits, atol=1e-5)
    assert flashtrain.evaluate(folder, hardware="cpu")["held_out"] is True


@pytest.mark.integration
def test_the_summary_adds_the_stages_up_and_each_has_a_row_of_what_it_cost(run) -> None:
    folder, row = run[0].folder, run[0].summary
    rows = [
        json.loads((folder / f"stage-{number}-context-{context}" / "summary.json").read_text())
        for number, context in enumerate((32, 64, 128), 1)
    ]
    assert [one["steps"] for one in rows] == [3, 2, 4]
    assert (row["steps"], row["tokens"], row["stages"]) == (9, 9 * 256, 3)
    assert row["context"] == rows[-1]["context"] == 128
    assert row["train_loss_first"] == rows[0]["train_loss_first"]
    assert row["train_loss"] == rows[-1]["train_loss"]
    for one in rows:
        assert {"train_seconds", "tokens_per_second", "peak_memory_gib"} <= one.keys()
        assert one["validation_loss"] < 6
    log = (folder / "flashtrain.log").read_text()
    assert "stage 2 of 3, context 64: optimizer and schedule begin anew" in log
    assert "stage 3 of 3, context 128: 4 steps, 1,024 tokens in " in log
    assert "stage-2-context-64" in (folder / "report.html").read_text()


@pytest.mark.integration
def test_a_finished_run_goes_on_with_a_stage_more(run, place: Path) -> None:
    longer = [*STAGES, {"context": 256, "steps": 1, "rope_factor": 8}]
    own = {"recipe": "hf", "model.path": place / "llama", "resume": run[0].folder}
    found = train(place, "runs", **own, stages=longer)
    assert (found.folder, found.summary["steps"]) == (run[0].folder, 10)
    assert len(WATCH.began) == 1
    before = run[2]["ended"][-1]
    assert [name for name in before if not torch.equal(before[name], WATCH.began[0][name])] == []


def test_a_finished_run_without_stages_goes_on_with_a_second_one(place: Path) -> None:
    own = {"recipe": "gpt2", "model": "llama", "model.size": "demo", "data.split_context": 64}
    own |= {"model.vocab_rows": None, "context": 32}
    first = train(place, "one-stage", **own, **{"trainer.steps": 2})
    weights = WATCH.ended[0]
    stages = [{"steps": 2}, {"context": 64, "steps": 1, "rope": "yarn", "rope_factor": 2}]
    with pytest.raises(UserError, match="its own stages come first"):  # only the new ones are given
        train(place, "one-stage", **own, stages=[*stages[1:], stages[1]], resume=first.folder)
    found = train(place, "one-stage", **own, stages=stages, resume=first.folder)
    assert len(WATCH.began) == 1
    assert all(torch.equal(weights[name], WATCH.began[0][name]) for name in weights)
    assert (found.folder, found.summary["steps"], found.summary["stages"]) == (first.folder, 3, 2)
    assert found.summary["train_loss_first"] == first.summary["train_loss_first"]
    kept = json.loads((first.folder / "stage-1-context-32" / "summary.json").read_text())
    assert kept == first.summary
    for given, message in ((stages, "the last stage's steps=1"), (stages[:1], "is of stage 2")):
        with pytest.raises(UserError, match=message):  # nothing is left of these
            train(place, "one-stage", **own, stages=given, resume=first.folder)


@pytest.mark.integration
def test_learned_positions_are_stretched_and_another_run_starts_from_the_last_stage(place) -> None:
    stages = [
        {"context": 32, "steps": 1},
        {"context": 64, "steps": 1, "interpolate_positions": True},
    ]
    own = {"recipe": "gpt2", "model.size": "demo", "model.vocab_rows": None, "context": 16}
    found = train(place, "learned", **own, stages=stages)
    before, after = (
        one["model.position_embedding.weight"] for one in (WATCH.ended[0], WATCH.began[1])
    )
    assert (len(before), len(after)) == (32, 64)
    assert torch.equal(after[[0, -1]], before[[0, -1]])
    own = {"recipe": "gpt2", "context": 64, "trainer.steps": 1, "weights": found.folder}
    following = train(place, "following", **own)
    assert torch.isfinite(torch.tensor(following.summary["train_loss"]))
    assert len(WATCH.began[0]["model.position_embedding.weight"]) == 64


@pytest.mark.integration
def test_the_row_of_a_stage_that_ended_early_stays_when_the_next_one_is_begun_again(place: Path):
    class Fails(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if pl_module.description["stage"] == 1:
                raise ValueError("the second stage fails")

    flashtrain.register("callback", "fails_in_stage_2")(lambda settings: Fails())
    own = {"recipe": "gpt2", "model": "llama", "model.size": "demo", "model.vocab_rows": None}
    own |= {"trainer.early_stopping_patience": 1, "trainer.validate_every": 1}
    own["optimizer.learning_rate"] = 1e-30
    stages = [{"context": 32, "steps": 20}, {"context": 64, "steps": 1}]
    with pytest.raises(ValueError, match="second stage"):
        train(place, "early", **own, stages=stages, **{"trainer.callbacks": ["fails_in_stage_2"]})
    (folder,) = (place / "early" / "gpt2").iterdir()
    row = (folder / "stage-1-context-32" / "summary.json").read_text()
    assert json.loads(row)["steps"] == 2
    train(place, "early", **own, stages=stages, resume=folder)
    assert (folder / "stage-1-context-32" / "summary.json").read_text() == row


def test_layers_of_a_pattern_go_on_through_the_stages(place: Path) -> None:
    own = {"recipe": "gpt2", "model": "llama", "model.size": "demo", "model.vocab_rows": None}
    stages = [{"context": 32, "steps": 1}, {"context": 64, "steps": 1}]
    train(place, "pattern", **own, **{"model.pattern": ["gla", "window:8"]}, stages=stages)
    before, after = WATCH.ended[0], WATCH.began[1]
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@pytest.mark.integration
def test_an_adapter_goes_on_through_the_stages_and_from_the_last_one(place: Path) -> None:
    first = train(
        place, "adapter", recipe="hf", context=32, **ADAPTER, **{"model.path": place / "llama"},
        **{"trainer.steps": 1},
    )  # fmt: skip
    began = WATCH.ended[-1]
    own = {"recipe": "hf", "model.path": first.folder}
    staged = train(place, "adapter-stages", **own, stages=STAGES[:2])
    assert {name for name in began if not torch.equal(began[name], WATCH.began[0][name])} == set()
    ended = WATCH.ended
    assert all(torch.equal(ended[0][name], WATCH.began[1][name]) for name in began)
    following = {"recipe": "hf", "model.path": staged.folder, "context": 64, "trainer.steps": 1}
    train(place, "adapter-following", **following)
    assert all(torch.equal(ended[-1][name], WATCH.began[0][name]) for name in began)
    going_on = flashtrain.load(staged.folder, hardware="cpu")
    assert going_on.settings.model.rope_factor == 2


def test_the_random_base_of_an_adapter_stays_the_same_in_each_stage_and_use(place: Path) -> None:
    sizes = {**SIZES, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 264}
    own = {"recipe": "hf", "model.config": "llama", "model.options": sizes, "seed": 5, **ADAPTER}
    stages = [{"context": 32, "steps": 1}, {"context": 64, "steps": 1}]
    found = train(place, "random-base", **own, stages=stages)
    torch.manual_seed(9)
    loaded = flashtrain.load(found.folder, hardware="cpu").model
    assert WATCH.unread == [True, True]
    bases = [*WATCH.frozen, [one for one in loaded.parameters() if not one.requires_grad]]
    assert len(bases) == 3
    assert all(torch.equal(*pair) for one in bases for pair in zip(bases[0], one, strict=True))
