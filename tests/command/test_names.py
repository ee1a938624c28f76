"""Names that people type from other programs are answered with ours, in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tiny_runs import checkout_environment

from flashtrain.command.overrides import plain_words
from flashtrain.command.request import settings_of
from flashtrain.errors import UserError


def refused(*words: str) -> str:
    with pytest.raises(UserError) as mistake:
        settings_of(plain_words(words))
    assert "\n" not in str(mistake.value)
    return str(mistake.value)


ANSWERS = {
    "accelerator": "Use hardware.accelerator.",
    "activation_checkpoint.mode": "Use memory.activation_checkpointing=full (or auto).",
    "adapter": "Use model.adapter.",
    "attn_implementation": "Use attention=flash or attention=sdpa.",
    "batch_size": "Use trainer.micro_batch (",
    "bf16": "Use hardware.precision=bf16-mixed.",
    "block_size": "Use context.",
    "chat_template": "Use data.chat_template=FILE (Jinja)",
    "cp": "Use context_parallel.",
    "data.seq_len": "Use context.",
    "dataset": "Use data=files data.path=",
    "deepspeed": "Use trainer.strategy=fsdp.",
    "devices": "Use trainer.devices.",
    "dtype": "Use hardware.precision=",
    "eval": "Use mode=evaluate.",
    "eval_dataset": "Use data.validation_path.",
    "eval_steps": "Use trainer.validate_every.",
    "fp16": "Use hardware.precision=16-mixed.",
    "fsdp": "Use trainer.strategy=fsdp.",
    "gradient_accumulation_steps": "Use trainer.tokens_per_step: gradient accumulation follows",
    "gradient_checkpointing": "Use memory.activation_checkpointing=full (or auto).",
    "learning_rate": "Use optimizer.learning_rate.",
    "load_in_4bit": "Use model.quantize=nf4.",
    "logging_steps": "Use trainer.log_every.",
    "lora_alpha": "Use model.adapter_alpha.",
    "lora_dropout": "Use model.adapter_dropout.",
    "lora_r": "Use model.adapter_rank.",
    "lr": "Use optimizer.learning_rate.",
    "lr_scheduler_type": "Use schedule.",
    "lora_target": "Use model.adapter_targets.",
    "max_grad_norm": "Use optimizer.gradient_clip.",
    "max_length": "Use context.",
    "early_stopping_steps": "Use trainer.early_stopping_patience.",
    "max_seq_length": "Use context.",
    "metric_for_best_model": "Use trainer.early_stopping_monitor.",
    "max_steps": "Use trainer.steps.",
    "micro_batch_size": "Use trainer.micro_batch.",
    "model.sizes": "Did you mean 'model.size'?",
    "model_name_or_path": "Use model.path.",
    "optim": "Use optimizer=adamw, lamb or muon",
    "optimizer.grad_clip": "Use optimizer.gradient_clip.",
    "optimizer.lr": "Use optimizer.learning_rate.",
    "output_dir": "Use output.",
    "packing": "Samples are always packed;",
    "path": "Use data.path or model.path.",
    "per_device_train_batch_size": "Use trainer.micro_batch.",
    "precision": "Use hardware.precision.",
    "push_to_hub": "Use export.push=NAME with mode=export, after the training;",
    "hub_model_id": "Use export.push=1 with mode=export.",
    "report_to": "Use logger=none, tensorboard or wandb.",
    "resume_from_checkpoint": "Use resume=auto or resume=RUN.",
    "rope_scaling": "Use model.rope=yarn (or ntk, linear, llama3) and model.rope_factor=4.",
    "save_steps": "Use trainer.checkpoint_every.",
    "save_total_limit": "Use trainer.keep_checkpoints=1.",
    "sequence_len": "Use context.",
    "cutoff_len": "Use context.",
    "n_layer": "Use model.layers=1.",
    "n_embd": "Use model.width=1.",
    "num_train_epochs": "Use trainer.epochs.",
    "something_else": (
        "unknown setting 'something_else'. `python -m flashtrain --help` lists settings."
    ),
    "strategy": "Use trainer.strategy.",
    "target_modules": "Use model.adapter_targets.",
    "tp": "tensor and pipeline parallelism are not supported.",
    "train_on_inputs": "Use data.train_on=all.",
    "trainer.accumulate_grad_batches": "Use trainer.tokens_per_step: gradient accumulation follows",
    "trainer.batch_size": "Use trainer.micro_batch (",
    "trainer.gpus": "Use trainer.devices.",
    "trainer.gradient_clip_val": "Use optimizer.gradient_clip.",
    "trainer.max_steps": "Use trainer.steps.",
    "trainer.precision": "Use hardware.precision.",
    "training.local_batch_size": "Use trainer.micro_batch.",
    "use_peft": "Use model.adapter=lora.",
    "warmup_ratio": "Use schedule.warmup_steps=1 (below 1: a share of the steps).",
    "warmup_steps": "Use schedule.warmup_steps.",
    "weight_decay": "Use optimizer.weight_decay.",
}


@pytest.mark.parametrize(("name", "answer"), ANSWERS.items(), ids=list(ANSWERS))
def test_a_name_of_another_program_is_answered_with_ours(name: str, answer: str) -> None:
    said = refused("recipe=gpt2", f"{name}=1")
    assert answer in said
    assert said.startswith(f"unknown setting '{name}'. ")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("recipe=bert-finetune batch_size=8", "Use finetune.batch."),
        ("recipe=bert-finetune dataset=x", "Use finetune.data."),
        ("recipe=bert packing=true", "Use masked.layout=packed."),
        ("recipe=gpt2 hardware.precision=bf16", "use hardware.precision=bf16-mixed."),
        ("recipe=gpt2 optimizer=adamw_8bit", "use optimizer=adamw optimizer.states=8bit."),
        ("recipe=sft report_to=tensorboard", "Use logger=tensorboard."),
        ("recipe=sft trainer.report_to=wandb", "Use logger=wandb."),
        ("recipe=sft report_to=none", "Use logger=none."),
        ("recipe=sft --report_to=all", "Use logger=[tensorboard,wandb]."),
        ("recipe=sft report_to=mlflow", "Use logger=none, tensorboard or wandb."),
        ("recipe=gpt2 init_from=resume", "Use weights=FOLDER, resume=auto, or neither"),
        ("recipe=gpt2 eval_only=true", "Use mode=evaluate."),
        ("recipe=sft warmup_ratio=0.03", "Use schedule.warmup_steps=0.03 (below 1: a share"),
        ("recipe=sft save_total_limit=3", "Use trainer.keep_checkpoints=3."),
        ("recipe=sft lr_scheduler_type=linear", "Use schedule=linear."),
        ("recipe=sft lr_scheduler=polynomial", "Use schedule."),
        ("recipe=sft optim=paged_adamw_8bit", "Use optimizer=adamw optimizer.states=8bit."),
        ("recipe=sft gradient_checkpointing=false", "Use memory.activation_checkpointing=none."),
        ("recipe=sft lora_target=all", "Use model.adapter_targets=all-linear."),
        ("recipe=sft train_on_inputs=false", "Use data.train_on=assistant, the default of"),
        ("recipe=sft train_on_inputs=no", "Use data.train_on=assistant, the default of"),
        ("recipe=sft train_on_inputs=true", "Use data.train_on=all."),
        ("recipe=sft assistant_only_loss=false", "Use data.train_on=all."),
        ("recipe=sft load_in_4bit=false", "Leave it out: model.quantize=nf4 would turn it on."),
        ("recipe=gpt2 bias=false", "Use model=llama, which has no biases"),
        ("recipe=gpt2 decay_lr=false", "Use schedule=constant."),
        ("recipe=sft push_to_hub=false", "Leave it out: export.push=NAME would turn it on."),
        ("recipe=sft use_peft=off", "Leave it out: model.adapter=lora would turn it on."),
        ("recipe=sft fsdp=none", "Leave it out: trainer.strategy=fsdp would turn it on."),
        ("recipe=sft save_total_limit=0", "Use trainer.keep_checkpoints=0."),
        ("recipe=sft quantization_bit=4", "Use model.quantize=nf4."),
        ("recipe=sft quantization_bit=8", "8-bit weights are not supported."),
        ("recipe=sft stage=sft", "'stage'. Use recipe=sft."),
        ("recipe=sft stage=dpo", "preference tuning and reinforcement learning are not available."),
        ("recipe=sft special_tokens.pad_token=x", "Not needed for padding"),
        ("recipe=sft optimizer=paged_adamw_8bit", "use optimizer=adamw optimizer.states=8bit."),
        (
            "recipe=sft modules_to_save=[lm_head]",
            "'modules_to_save'. Not available: embeddings and",
        ),
        ("recipe=hf model.adapter=qlora", "use model.adapter=lora model.quantize=nf4."),
        ("recipe=gpt2 attention=flash_attention_2", "use attention=flash."),
        ("recipe=gpt2 generate.tokens=3 benchmark.ways=x", "max_new_tokens. benchmark.ways=x: use"),
    ],
)
def test_so_is_one_whose_answer_depends_on_the_task_or_on_the_value(
    words: str, answer: str
) -> None:
    assert answer in refused(*words.split())


@pytest.mark.parametrize(
    "words", ["recipe=gpt2", "mode=evaluate checkpoint={}"], ids=["recipe", "checkpoint"]
)
def test_several_unknown_names_are_answered_at_once(words: str, trained) -> None:
    said = refused(
        *words.format(trained).split(), "contxt=8", "context=8", "trainer.lr=1", "model.options.x=1"
    )
    assert [said.count(name) for name in ("unknown setting", "'contxt'", "'trainer.lr'")] == [
        2,
        1,
        1,
    ]


def test_sft_asks_for_its_model_and_its_data_at_once() -> None:
    assert refused("recipe=sft").startswith(
        "recipe=sft needs model.path=FOLDER_OR_HUB_NAME and data.path="
    )
    assert "model.path" not in refused("recipe=sft", "model.path=x")
    assert "data.path" not in refused("recipe=sft", "data.path=x")


def test_a_plan_of_sft_takes_a_model_without_weights() -> None:
    words = ("recipe=sft", "mode=plan", "data.path=x")
    assert "(or, for a plan, model.config=NAME)" in refused(*words)
    assert settings_of(plain_words((*words, "model.config=llama"))).model.config == "llama"
    needed = refused(*words, "model.config=llama", "trainer.epochs=1")
    assert needed == "recipe=sft needs data.tokenizer=FOLDER beside model.config=llama."


def test_a_setting_of_adapters_beside_a_model_names_both_remedies() -> None:
    said = refused("recipe=sft", "model.path=x", "data.path=x", "model.adapter_rank=8")
    assert "Set model.adapter=lora; an adapter in model.path goes on with its own." in said


def test_the_versions_are_reported_without_importing_torch() -> None:
    watch = (
        "import sys; from flashtrain.__main__ import main; sys.argv[1:] = ['--version']\n"
        "try: main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{watch}except SystemExit: print('torch' in sys.modules)"],
        env=checkout_environment(), capture_output=True, text=True,
    )  # fmt: skip
    line, imported = done.stdout.splitlines()
    assert [one.split()[0] for one in line.split(", ")] == [
        "flashtrain",
        "flashtrain-kernels",
        "torch",
        "triton",
    ]
    assert imported == "False"


ANSWERED = """
import sys
import flashtrain
heavy = {"torch", "triton", "numpy", "transformers", "pytorch_lightning"}
print("import flashtrain:", *heavy & set(sys.modules))
for words in sys.argv[1:]:
    sys.argv[1:] = words.split()
    try:
        flashtrain.main()
    except SystemExit as end:
        print(f"{words}:", end.code, *sorted(heavy & set(sys.modules)))
"""


def test_help_and_a_refused_setting_need_neither_torch_nor_transformers() -> None:
    """They are imported in seconds; a mistake is answered before."""
    refusals = [
        "recipe=gpt2 foo=1",
        "recipe=sft report_to=tensorboard",
        "recipe=nothing",
        "recipe=hf data=nothing",
        "recipe=bert optimizer.learning_rate=-1",
        "recipe=pathx context=long",
        "recipe=attention-benchmark benchmark.presets=1",
    ]
    done = subprocess.run(
        [sys.executable, "-c", ANSWERED, *refusals, "--help"],
        env=checkout_environment(), capture_output=True, text=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert "import flashtrain:" in lines
    assert [f"{words}: 2" for words in refusals if f"{words}: 2" not in lines] == []
    assert lines[-1] == "--help: 0"
