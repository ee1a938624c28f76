#!/bin/sh
# GPT-2 124M at 1K, 4K and 16K on the same text, scored by position on the same held-out documents, each beside the shorter one.
# Repeat the command after a stop: it goes on where it was.
#   sh recipes/sweeps/longer_context.sh TRAIN HELD_OUT trainer.epochs=1 [more settings, such as data.tokenizer=gpt2]
# What results/README.md has of 300M tokens: trainer.steps=2289 trainer.tokens_per_step=131072 data.tokenizer=gpt2
set -e
train=$1 held_out=$2 against=
shift 2
for context in ${CONTEXTS:-1024 4096 16384}; do
  run=runs/longer-context/$context
  grep -qs '"status": "finished"' $run/summary.json ||
    python -m flashtrain recipe=gpt2 model.positions=rotary context=$context data=files data.path="$train" \
      data.validation_path="$held_out" resume=auto hydra.run.dir=$run "$@"
  [ -f $run/positions/result.json ] ||
    python -m flashtrain mode=positions checkpoint=$run positions.length=16384 positions.stride=512 positions.documents=100 $against
  against=positions.against=$run/positions/result.json
done
