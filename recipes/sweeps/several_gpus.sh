#!/bin/sh
# What only several GPUs can show, as jobs: attention layers, an 8B decoder at 131,072 tokens, DDP and FSDP2 beside one GPU.
# Repeat the command after a stop: a job whose result is there is not run again.
#   sh recipes/sweeps/several_gpus.sh GPUS OUT TEXT [settings of every training, such as data.tokenizer=gpt2]
gpus=$1 out=$2 text=$3
shift 3
mkdir -p "$out"

layer() { # NAME SECONDS SETTINGS...: one run of recipe=long-context-benchmark
  name=$1 seconds=$2
  shift 2
  [ -f "$out/$name/result.json" ] || python -m flashtrain recipe=long-context-benchmark hardware=gpu "benchmark.degrees=[$gpus]" \
    benchmark.max_seconds="$seconds" hydra.run.dir="$out/$name" "$@" >"$out/$name.log" 2>&1 || echo "$name failed: $out/$name.log"
}

training() { # NAME SETTINGS...: a short training, for its speed
  name=$1
  shift
  grep -qs '"status": "finished"' "$out/$name/summary.json" || python -m flashtrain "$@" data=files data.path="$text" \
    data.validation_fraction=0 generate.max_new_tokens=1 logger=csv schedule=constant schedule.warmup_steps=5 trainer.checkpoint_every=1000 \
    hydra.run.dir="$out/$name" $settings >"$out/$name.log" 2>&1 || echo "$name failed: $out/$name.log"
}

ours="benchmark.implementations=[flashtrain] benchmark.layouts=[balanced] benchmark.check_longest=1"
shapes='benchmark.shapes=[16x128,32/8x128,12x64]'
layer layers-131072 130 $ours "$shapes" benchmark.methods=[ring,all-gather] benchmark.seqlens=[131072] \
  benchmark.masks=[causal,causal-document,window-1024] benchmark.rounds=5
layer layers-baselines 60 "benchmark.implementations=[flashtrain,plain-all-gather,torch]" "benchmark.layouts=[balanced,zigzag]" \
  benchmark.methods=[ring] benchmark.seqlens=[32768,131072] benchmark.masks=[causal] "benchmark.shapes=[16x128,12x64]" benchmark.rounds=4
layer layers-524288 60 $ours "benchmark.shapes=[12x64,16x128]" benchmark.methods=[ring] benchmark.seqlens=[524288] benchmark.masks=[causal] \
  benchmark.one_device_longest=524288 benchmark.rounds=2
layer packed-524288 40 $ours "$shapes" benchmark.methods=[all-gather] benchmark.seqlens=[524288] benchmark.masks=[causal-document] \
  benchmark.one_device_longest=524288 benchmark.rounds=4
layer planned 60 benchmark.implementations=[flashtrain] "benchmark.layouts=[balanced,zigzag,planned]" "$shapes" benchmark.methods=[all-gather] \
  benchmark.seqlens=[131072,524288] benchmark.masks=[causal-document] benchmark.median_document=2048 benchmark.check_longest=1
layer heads-256 40 $ours "benchmark.shapes=[16/2x256]" benchmark.methods=[ring,all-gather] benchmark.seqlens=[131072] \
  benchmark.masks=[causal,causal-document] benchmark.rounds=4
layer layers-32768 30 $ours "$shapes" benchmark.methods=[ring,all-gather] benchmark.seqlens=[32768] benchmark.masks=[causal,causal-document]
layer layers-million 60 $ours "benchmark.shapes=[16x128]" benchmark.methods=[ring] benchmark.seqlens=[131072,1048576] \
  benchmark.masks=[causal] benchmark.rounds=1

settings=$*
training qwen3-8b recipe=hf model.config=qwen3-8b context=131072 model.rope=yarn model.rope_factor=3.2 trainer.devices="$gpus" \
  context_parallel="$gpus" trainer.tokens_per_step=131072 trainer.steps=12 trainer.log_every=1 optimizer.learning_rate=1e-4
for groups in fixed planned; do
  training long-tailed-$groups recipe=gpt2 model=llama model.size=1.3b context=262144 data.document_mask=true trainer.micro_batch=2 \
    trainer.tokens_per_step=524288 memory.activation_checkpointing=full trainer.devices="$gpus" context_parallel="$gpus" trainer.steps=4 \
    trainer.log_every=1 trainer.context_parallel_groups=$groups
done
for strategy in ddp fsdp; do
  for devices in 1 "$gpus"; do
    training gpt2-$strategy-$devices recipe=gpt2 context=1024 trainer.micro_batch=64 trainer.steps=60 trainer.devices="$devices" \
      trainer.tokens_per_step=$((65536 * devices)) trainer.strategy=$strategy
    training llama-1b-$strategy-$devices recipe=hf model.config=llama-1b context=8192 trainer.micro_batch=2 trainer.steps=30 \
      trainer.devices="$devices" trainer.tokens_per_step=$((16384 * devices)) trainer.strategy=$strategy
  done
done
