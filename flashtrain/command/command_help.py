"""The text of `python -m flashtrain --help`: all recipes, every mode with an
example, and common settings."""

from __future__ import annotations

from typing import get_args

from flashtrain.files.shipped import recipe_description, recipe_files
from flashtrain.mode import modes
from flashtrain.settings import options

TEXT = """\
usage: python -m flashtrain recipe=NAME [setting=value ...]

Recipes
{recipes}

Modes
{modes}
  sweep      python -m flashtrain -m recipe=gpt2 context=1024,2048,4096
             a fresh process a job, then one table and one figure

Model and text
  model.size=355m                 demo, 124m, 355m, 774m, 1.3b, 1.5b; model=llama for RMSNorm, SwiGLU, rotary, GQA
  model.path=FOLDER               recipe=hf: a transformers decoder, or a hub name; model.adapter=lora trains LoRA
  context=2048                    tokens a sample
  data=files data.path=FOLDER     your own texts, .jsonl, .parquet; data=hub data.name=... for a hub dataset
  data.tokenizer=bpe              bytes, bpe (trained on the text), gpt2
  weights=RUN                     start from a run of yours, with its tokenizer; or from a Hugging Face folder
  mask=window mask.window=1024    {masks}; mask.documents=true stays within documents

Machine and memory
  attention=flash                 flash (our kernels), sdpa (torch's), standard (stores the S x S matrix)
  memory.activation_checkpointing=auto
                                  none, selective, full: how much of a block stays for the backward; auto: what fits
  trainer.devices=8               with trainer.strategy=ddp|fsdp, trainer.nodes=2; mode=plan --slurm writes a job
  context_parallel=8              each sequence over 8 of the devices (trainer.strategy=context_parallel)
  hardware.demo=never             the recipe in full where there is no GPU; hardware=cpu leaves a GPU alone

The run
  trainer.steps=500               or trainer.epochs=1; with trainer.tokens_per_step=65536, trainer.max_minutes=60
  resume=auto                     goes on with an unfinished run; resume=RUN with that one
  logger=[tensorboard,wandb]      one or several of {loggers}
  output=runs seed=0              where run folders are made; of the weights, the order of samples and dropout

Of some recipes
  bert.size=base                  recipe=bert: with .family=bert, masked.sample_unit=sentence .layout=padded,
                                  masked.token_budget=32768, optimizer=lamb, target_accuracy=0.7
  finetune.data=files             recipe=bert-finetune weights=BERT: with .path=FOLDER .target=labels|class|tokens

Everything that can be set: python -m flashtrain recipe=NAME --cfg job, or docs/reference/settings.md.
Your own recipes: a folder of YAML files named in the environment variable FLASHTRAIN_RECIPES.\
"""  # noqa: E501 - lines as the terminal shows them

# Recipes that train language models; written down, since composing all to see takes seconds.
_FIRST = ("extend", "gpt2", "gpt2-long", "hf", "hybrid-quality", "sft")

# An example of each mode that every task has, and what it does; the others have
# theirs as Mode.example.
_TASKS_OWN = {
    "train": (
        "recipe=gpt2",
        "train; a folder below runs/ has the settings, the metrics, checkpoints and a summary",
    ),
    "plan": ("recipe=gpt2 mode=plan", "parameters, memory and time; nothing is started"),
    "evaluate": ("mode=evaluate checkpoint=RUN", "the held-out loss, or accuracy"),
    "generate": (
        'mode=generate checkpoint=RUN prompt="def main"',
        "text, with generate.max_new_tokens=120",
    ),
    "export": ("mode=export checkpoint=RUN", "weights and tokenizer that transformers reads"),
}


def examples() -> dict[str, tuple[str, str]]:
    """Return for each mode an example, as words after `python -m flashtrain`, and what the mode
    does."""
    return {**_TASKS_OWN, **{name: mode.example for name, mode in modes().items()}}


def help_text() -> str:
    """Return the text of --help, with the recipes and modes that are registered now."""
    files = recipe_files()
    width = max(len(name) for name in files) + 2 if files else 0
    recipes = "\n".join(
        f"  recipe={name:<{width}}{recipe_description(path)}"
        for name, path in sorted(files.items(), key=lambda one: (one[0] not in _FIRST, one[0]))
    )
    lines = []
    for name, (example, does) in examples().items():
        lines += [f"  {name:<10} python -m flashtrain {example or f'recipe=NAME mode={name}'}"]
        lines += [f"             {does}"] if does else []
    return TEXT.format(
        recipes=recipes or "  none found",
        modes="\n".join(lines),
        loggers=", ".join(get_args(options.Logger)),
        masks=", ".join(get_args(options.Mask)),
    )
