#!/usr/bin/env bash
# Draws every figure of this folder from its result files: bash recipes/results/draw.sh
set -e
cd "$(dirname "$0")"

draw() { # FIGURE FILE.json...: writes FILE.png
    python -m flashtrain.report "${@:2}" --figure "$1" 2>&1 >/dev/null | grep -v "^$"
}

draw landing context-speed-h200.json gpt2-million-h200.json
draw attention-lengths attention-paper-h200.json
draw attention-shapes attention-as-called-h200.json --only part:calls
draw attention-shapes attention-as-called-h100.json --only run:1
draw longest hf-long-h200.json hf-long-h100.json hf-long-two-gpus-h200.json hf-long-four-gpus-h200.json hf-long-four-gpus-h100.json
draw lengths gpt2-long-h200.json
draw training bert-training-h200.json
draw documents long-document-h200.json
draw accuracy lra-h200.json pathfinder-original-h200.json pathx-original-h200.json path256-original-h200.json
draw curriculum pathx-original-training-h200.json
draw ruler ruler-qwen2.5-coder-h200.json
draw extend extend-smollm2-h200.json
draw extend extend-qwen2.5-coder-h200.json
