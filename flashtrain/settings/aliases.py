"""Names of settings in other programs, and their names here, for the line about an unknown setting."""

from __future__ import annotations

OURS = {
    # transformers' TrainingArguments
    "adam_epsilon": "optimizer.epsilon",
    "attn_implementation": "attention.name",
    "eval_steps": "trainer.validate_every",
    "gradient_accumulation_steps": "trainer.tokens_per_step",
    "gradient_checkpointing": "memory.checkpointing",
    "logging_steps": "trainer.log_every",
    "lr_scheduler_type": "schedule.name",
    "max_grad_norm": "optimizer.gradient_clip",
    "max_new_tokens": "generate.tokens",
    "max_steps": "trainer.steps",
    "model_name_or_path": "model.path",
    "optim": "optimizer.name",
    "output_dir": "output",
    "per_device_train_batch_size": "trainer.micro_batch",
    "report_to": "logger.name",
    "resume_from_checkpoint": "resume",
    "save_steps": "trainer.checkpoint_every",
    "torch_compile": "trainer.compile",
    # Lightning's Trainer and others'
    "accelerator": "hardware.accelerator",
    "batch_size": "trainer.tokens_per_step",
    "block_size": "context",
    "dataset": "data.name",
    "grad_clip": "optimizer.gradient_clip",
    "gradient_clip_val": "optimizer.gradient_clip",
    "lora_alpha": "model.adapter_alpha",
    "lora_r": "model.adapter_rank",
    "lr": "optimizer.learning_rate",
    "max_iters": "trainer.steps",
    "max_seq_length": "context",
    "max_time": "trainer.max_minutes",
    "num_nodes": "trainer.nodes",
    "seq_len": "context",
    "val_check_interval": "trainer.validate_every",
}
