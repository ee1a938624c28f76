"""The losses of recipe=gpt2 on a CPU: the first steps, as literal values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Only the last digits are another machine's own: sums are taken there in another order.
EXACTNESS = 1e-6

TRAIN = """
import json, sys
import flashtrain

text, folder = sys.argv[1:]
for dropout in (0.0, 0.1):
    run = flashtrain.train(
        "gpt2", hardware="cpu", logger="csv", output=folder, context=64,
        data={"source": "files", "path": text, "cache_dir": folder, "tokenizer": "bytes",
              "validation_tokens": 256},
        model={"size": "demo", "vocab_rows": None, "dropout": dropout},
        trainer={"steps": 3, "tokens_per_step": 512, "micro_batch": 4, "log_every": 1,
                 "validate_every": 3},
    )
    names = ("train_loss", "validation_loss")
    print(json.dumps([row[name] for name in names for row in run.metrics if name in row]))
"""
# Without dropout, and with it: the losses of three steps, and that of the validation after them.
LOSSES = [
    [5.626861095428467, 4.929754257202148, 4.716913223266602, 4.6880974769592285],
    [5.6212077140808105, 4.960383415222168, 4.756748676300049, 4.706760406494141],
]


@pytest.mark.integration
def test_gpt2_has_the_losses_that_it_always_had(text_folder: Path, tmp_path: Path) -> None:
    # Each number adds in its own order.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    words = [sys.executable, "-c", TRAIN, str(text_folder), str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()[-2:]]
    assert found == [pytest.approx(losses, rel=EXACTNESS) for losses in LOSSES]
