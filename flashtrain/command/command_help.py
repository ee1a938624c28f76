"""What `python -m flashtrain --help` prints: the recipes with a line each, and how settings are given."""

from __future__ import annotations

from flashtrain.files.disk import recipe_description, recipe_files
from flashtrain.settings.groups import LOGGERS
from flashtrain.settings.settings import mode_names

TEXT = """\
usage: python -m flashtrain recipe=NAME [setting=value ...]

Recipes:
{recipes}

Often used settings:
  context=2048                    tokens a sample
  model.size=355m                 demo, 124m, 355m, 774m, 1.3b, 1.5b; model=modern for RMSNorm, SwiGLU, rotary, GQA
  model.path=FOLDER               recipe=hf: a transformers decoder, or a hub name; model.adapter=lora trains LoRA
  attention=flash                 flash (our kernels), sdpa (torch's), standard (stores the S x S matrix)
  memory=auto                     none, selective, full: how much of a block stays for the backward; auto: what fits
  data=files data.path=FOLDER     your own .txt, .md, .jsonl, .parquet; data=hub data.name=... for a hub dataset
  trainer.steps=500               with trainer.tokens_per_step=65536, trainer.devices=8, trainer.strategy=ddp|fsdp
  context_parallel=8              each sequence over 8 of the devices (trainer.strategy=context)
  logger={loggers}         resume=auto goes on with an unfinished run
  mode={modes}
  benchmark.rows=anchors          recipe=attention-benchmark: grid, anchors, paper, features, block-sparse; with
                                  benchmark.seqlens=[1024,4096] .masks=[causal,window-1024] .max_seconds=420 ...
  benchmark.shapes=[16x128]       recipe=long-context-benchmark: with .degrees=[2,8] .ways=[ring] .layouts=[balanced]
  lengths.contexts=[1024,4096]    recipe=gpt2-long: trains each, scores all on the same held-out tokens
  passkey.lengths=[1024,4096]     mode=passkey checkpoint=RUN: is a number hidden in a long text found again?
  benchmark.models=[124m]         recipe=gpt2-speed and context-speed, with .contexts=[1024,4096] .batches=[16,32]
                                  .weights=[fp32,bf16] .implementations=[flashtrain,pytorch,hf-eager] .max_seconds=540
  bert.size=base                  recipe=bert: with .family=bert, masked.unit=sentence .layout=padded,
                                  masked.token_budget=32768, optimizer=lamb, target_accuracy=0.7
  finetune.data=files             recipe=finetune weights=BERT: with .path=FOLDER .target=labels|class|tokens
  pathfinder.side=256             recipe=pathfinder-preview: also .seed=1 .contour=easy .preview=24 (images drawn)
  -m context=1024,2048,4096       a sweep: one fresh process a job, then one table and one figure

Everything that can be set: python -m flashtrain recipe=NAME --cfg job, or flashtrain/settings/settings.py.
Your own recipes: a folder of YAML files named in the environment variable FLASHTRAIN_RECIPES.\
"""


def help_text() -> str:
    """The help, with the recipes found now."""
    files = recipe_files()
    width = max(len(name) for name in files) + 2 if files else 0
    recipes = "\n".join(f"  recipe={name:<{width}}{recipe_description(path)}" for name, path in sorted(files.items()))
    return TEXT.format(recipes=recipes or "  none found", loggers="|".join(LOGGERS), modes="|".join(mode_names()))
