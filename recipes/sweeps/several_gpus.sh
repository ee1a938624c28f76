#!/bin/sh
# What only several GPUs can show, as jobs, the most worth a minute first: layers, 8B decoders, DDP and FSDP2 beside one GPU, simulated nodes.
# It prints its plan with expected minutes first. Repeat the command after a stop: a job whose result is there is not run again.
#   [MINUTES=10] [PLAN=1] sh recipes/sweeps/several_gpus.sh GPUS OUT TEXT [settings of every training, such as data.tokenizer=gpt2]
# MINUTES: no job is begun that is expected to end later. PLAN=1: nothing is run. HARDWARE=cpu is for rehearsals.
gpus=$1 out=$2 text=$3 begun=$(date +%s)
shift 3
settings=$*
mkdir -p "$out"

begins() { # NAME SECONDS DONE: whether a job is to run now; else a line of the plan
  if [ "$planning" ]; then
    [ "$3" ] || total=$((total + $2))
    printf '%6.1f min  %-24s%s\n' "$(echo "$2" | awk '{print $1 / 60}')" "$1" "${3:+ is there}"
  elif [ -z "$3" ] && [ $(($(date +%s) - begun + $2)) -gt $((${MINUTES:-1000000} * 60)) ]; then
    echo "$1 is left for another time"
  else
    [ -z "$3" ] && return
  fi
  return 1
}

layer() { # NAME SECONDS SETTINGS...: one run of recipe=long-context-benchmark
  name=$1 seconds=$2
  shift 2
  begins "$name" "$seconds" "$(ls "$out/$name/result.json" 2>/dev/null)" || return 0
  python -m flashtrain recipe=long-context-benchmark hardware="${HARDWARE:-gpu}" "benchmark.degrees=[$gpus]" \
    benchmark.max_seconds="$((seconds - 10))" hydra.run.dir="$out/$name" "$@" >"$out/$name.log" 2>&1 || echo "$name failed: $out/$name.log"
}

training() { # NAME SECONDS SETTINGS...: a short training, for its speed; $nodes=2: by two simulated machines; $every: steps between checkpoints
  name=$1 seconds=$2
  shift 2
  begins "$name" "$seconds" "$(grep -s '"status": "finished"' "$out/$name/summary.json")" || return 0
  set -- "$@" data=files data.path="$text" data.validation_fraction=0 generate.max_new_tokens=1 logger=csv schedule=constant \
    schedule.warmup_steps=5 trainer.checkpoint_every="${every:-1000}" hardware="${HARDWARE:-auto}" hydra.run.dir="$out/$name" $settings
  if [ "$nodes" ]; then
    half=$((gpus / 2))
    for node in 0 1; do # GPUs of their own, and for NCCL machines of their own, which sockets connect
      CUDA_VISIBLE_DEVICES=$(seq -s, $((node * half)) $((node * half + half - 1))) NCCL_HOSTID=node$node NCCL_NET=Socket \
        NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_MNNVL_ENABLE=0 NCCL_SOCKET_NTHREADS=2 NCCL_NSOCKS_PERTHREAD=4 \
        torchrun --nnodes=2 --nproc-per-node=$half --node-rank=$node --master-addr=127.0.0.1 --master-port=29531 -m flashtrain "$@" \
        trainer.nodes=2 trainer.devices=$half >"$out/$name-$node.log" 2>&1 &
    done
    wait
  else
    python -m flashtrain "$@" >"$out/$name.log" 2>&1
  fi
  grep -qs '"status": "finished"' "$out/$name/summary.json" || echo "$name failed: $out/$name*.log"
}

few() { # MOST: whether there are at most so many GPUs
  [ "$gpus" -le "$1" ]
}

jobs() {
  shapes='benchmark.shapes=[16x128,32/8x128,12x64]' unchecked='benchmark.check_longest=1'
  ours="benchmark.implementations=[flashtrain] $unchecked" balanced='benchmark.layouts=[balanced]'
  nodes=
  layer layers-131072 130 $ours $balanced "$shapes" 'benchmark.methods=[ring,ulysses,all-gather]' 'benchmark.seqlens=[131072]' \
    'benchmark.masks=[causal,causal-document,window-1024]' benchmark.rounds=5
  layer layers-524288 60 $ours $balanced 'benchmark.shapes=[12x64,16x128]' 'benchmark.methods=[ring,ulysses]' 'benchmark.seqlens=[524288]' \
    'benchmark.masks=[causal]' benchmark.one_device_longest=524288 benchmark.rounds=2
  layer packed-524288 50 $ours $balanced "$shapes" 'benchmark.methods=[all-gather]' 'benchmark.seqlens=[524288]' \
    'benchmark.masks=[causal-document]' benchmark.one_device_longest=524288 benchmark.rounds=4
  layer baselines 80 $unchecked 'benchmark.implementations=[flashtrain,plain-all-gather,torch]' 'benchmark.layouts=[balanced]' \
    'benchmark.methods=[ring]' 'benchmark.seqlens=[32768,131072]' 'benchmark.masks=[causal]' 'benchmark.shapes=[16x128,32/8x128,12x64]' \
    benchmark.rounds=4
  layer planned 70 $ours 'benchmark.layouts=[balanced,zigzag,planned]' "$shapes" 'benchmark.methods=[all-gather]' 'benchmark.seqlens=[131072,524288]' \
    'benchmark.masks=[causal-document]' benchmark.median_document=2048
  layer layers-32768 40 $ours $balanced "$shapes" 'benchmark.methods=[ring,all-gather]' 'benchmark.seqlens=[32768]' \
    'benchmark.masks=[causal,causal-document]'
  # The first calls of fla's kernels tune them, for minutes where no cache of Triton has them.
  layer states 240 'benchmark.mixers=[delta,gla]' 'benchmark.shapes=[64x128]' 'benchmark.seqlens=[32768,131072,524288]' \
    benchmark.rounds=5
  layer heads-256 50 $ours $balanced 'benchmark.shapes=[16/2x256]' 'benchmark.methods=[ring,all-gather]' 'benchmark.seqlens=[131072]' \
    'benchmark.masks=[causal,causal-document]' benchmark.rounds=4

  eight='recipe=hf model.config=qwen3-8b model.rope=yarn trainer.log_every=1 optimizer.learning_rate=1e-4'
  shared="trainer.devices=$gpus context_parallel=$gpus"
  training qwen3-8b-131072 $((100 + 600 / gpus)) $eight $shared context=131072 model.rope_factor=3.2 trainer.tokens_per_step=131072 \
    trainer.steps=12
  for strategy in ddp fsdp; do
    for devices in 1 "$gpus"; do
      training gpt2-$strategy-$devices 60 recipe=gpt2 context=1024 trainer.micro_batch=64 trainer.steps=60 trainer.devices="$devices" \
        trainer.tokens_per_step=$((65536 * devices)) trainer.strategy=$strategy
      training llama-1b-$strategy-$devices 60 recipe=hf model.config=llama-1b context=8192 trainer.micro_batch=2 trainer.steps=30 \
        trainer.devices="$devices" trainer.tokens_per_step=$((16384 * devices)) trainer.strategy=$strategy
    done
  done
  # Nine of the 8B's 36 layers, whose states fit one GPU. FSDP2 gathers weights in bf16 also where products are in float8.
  layers='recipe=hf model.config=qwen3-8b +model.options={num_hidden_layers:9} context=8192 trainer.micro_batch=1 trainer.steps=20'
  for devices in 1 "$gpus"; do
    training 8b-layers-fsdp-$devices 70 $layers trainer.devices="$devices" trainer.tokens_per_step=$((8192 * devices)) trainer.strategy=fsdp
  done
  training 8b-layers-float8-$gpus 80 $layers trainer.devices="$gpus" trainer.tokens_per_step=$((8192 * gpus)) trainer.strategy=fsdp \
    model.float8=tensorwise
  # Qwen2.5-1.5B's shape at longer contexts, all weights.
  small='{hidden_size:1536,intermediate_size:8960,num_hidden_layers:28,num_attention_heads:12,num_key_value_heads:2,vocab_size:151936}'
  stages='[{context:65536,steps:6,rope:yarn,rope_factor:2},{context:131072,steps:4,rope:yarn,rope_factor:4}]'
  training stages-1.5b 160 recipe=hf model.config=qwen2 "+model.options=$small" context=65536 "stages=$stages" $shared \
    trainer.tokens_per_step=131072 trainer.log_every=1 data.document_mask=true
  layer layers-million 70 $ours $balanced 'benchmark.shapes=[16x128]' 'benchmark.methods=[ring,ulysses]' 'benchmark.seqlens=[131072,1048576]' \
    'benchmark.masks=[causal]' benchmark.rounds=1
  # Sharded checkpoints while training goes on, and on from them on one GPU.
  sharded='recipe=hf model.config=llama-1b context=8192 trainer.micro_batch=2 trainer.strategy=fsdp'
  sharded="$sharded trainer.tokens_per_step=$((16384 * gpus)) trainer.checkpoint_format=sharded"
  every=10
  training sharded 100 $sharded trainer.devices="$gpus" trainer.steps=30 trainer.log_every=1
  every=
  training sharded-resumed 90 $sharded trainer.devices=1 trainer.steps=40 trainer.log_every=1 resume="$out/sharded"
  long='recipe=gpt2 context=65536 trainer.micro_batch=1 trainer.tokens_per_step=65536 model.positions=rotary trainer.compile=false'
  for method in ulysses ring; do
    training one-node-$method 50 $long $shared trainer.context_parallel_method=$method trainer.steps=10 trainer.log_every=5
    nodes=2
    training two-nodes-$method 70 $long context_parallel="$gpus" trainer.context_parallel_method=$method trainer.steps=10 trainer.log_every=5
    nodes=
  done
  for groups in fixed planned; do
    training long-tailed-$groups 110 recipe=gpt2 model=llama model.size=1.3b context=262144 data.document_mask=true trainer.micro_batch=2 \
      trainer.tokens_per_step=524288 memory.activation_checkpointing=full $shared trainer.steps=4 trainer.log_every=1 \
      trainer.context_parallel_groups=$groups
  done
  # On two GPUs a step of 524,288 tokens takes five minutes, and 1,048,576 tokens do not fit (mode=plan).
  few 2 || training qwen3-8b-524288 $((100 + 3500 / gpus)) $eight $shared context=524288 model.rope_factor=12.8 \
    trainer.tokens_per_step=524288 trainer.steps=6
  few 2 || training qwen3-8b-1048576 $((100 + 4600 / gpus)) $eight $shared context=1048576 model.rope_factor=25.6 \
    trainer.tokens_per_step=1048576 trainer.steps=2
}

planning=1 total=0
jobs
echo "$((total / 60)) minutes are left to do"
planning=
[ "$PLAN" ] || jobs
