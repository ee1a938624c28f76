#!/bin/sh
# GPT-2 124M at 1K, 4K and 16K on the same text, scored by position on the same held-out documents, each beside the shorter one.
# Repeat the command after a stop: what is done is not done again.
#   sh recipes/sweeps/longer_context.sh TRAIN.jsonl HELD_OUT.jsonl [more settings, such as data.tokenizer=gpt2]
set -e
train=$1 held_out=$2
shift 2
python -m flashtrain -m recipe=gpt2 context=1024,4096,16384 data=files data.path="$train" data.validation_path="$held_out" \
  trainer.epochs=1 resume=auto hydra.sweep.dir=runs/longer-context "$@"
against=
for job in 00 01 02; do
  run=runs/longer-context/$job
  [ -f $run/positions/result.json ] ||
    python -m flashtrain mode=positions checkpoint=$run positions.length=16384 positions.stride=512 positions.documents=100 $against
  against=positions.against=$run/positions/result.json
done
