"""A user's first hour, at small size: data as they have it, a model and a mask of their own, a sweep, a run gone on
with, an export, Python. Each step starts from what the step before left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from as_a_reader import refused, succeeds

pytestmark = pytest.mark.slow

SMALL = (
    "recipe=gpt2",
    "context=32",
    "trainer.steps=2",
    "trainer.validate_every=2",
    "trainer.tokens_per_step=256",
    "data.validation_tokens=128",
    "data.validation_fraction=0.2",
    "generate.tokens=4",
)
OWN_MODEL = """
import torch
import flashtrain

class Tiny(torch.nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.table = torch.nn.Embedding(vocab_size, 16)
        self.out = torch.nn.Linear(16, vocab_size)

    def forward(self, tokens):
        return self.out(self.table(tokens))

@flashtrain.register("model", "tiny")
def build(settings, *, vocab_size, context, attention):
    return Tiny(vocab_size)

if __name__ == "__main__":
    flashtrain.main()
"""


def test_no_dead_end_in_the_first_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import flashtrain.command.job

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_MODE", "offline")

    # Texts in Latin-1: the line that refuses them names the setting that reads them.
    Path("essais").mkdir()
    for number in range(8):
        Path("essais", f"{number}.txt").write_text(f"Été {number}: où sont les neiges d'antan? " * 40, "latin-1")
    texts = ("data=files", "data.path=essais")
    assert "data.encoding=" in refused([*SMALL, *texts])
    succeeds([*SMALL, *texts, "data.encoding=latin-1"])

    # A data set that the library of Hugging Face saved, and a file of tokens.
    import datasets

    rows = {"text": [f"Row {number} of a table of texts. " * 20 for number in range(20)]}
    datasets.Dataset.from_dict(rows).save_to_disk("saved")
    succeeds([*SMALL, "data=files", "data.path=saved"])
    np.random.default_rng(0).integers(0, 100, 20_000).astype(np.uint16).tofile("tokens.bin")
    succeeds([*SMALL, "data=tokens", "data.path=tokens.bin", "data.dtype=uint16", "data.vocab_size=100"])

    # A model and a mask.
    Path("train.py").write_text(OWN_MODEL)
    latin = (*texts, "data.encoding=latin-1")
    command = [sys.executable, "train.py", *SMALL, *latin, "model=tiny", "trainer.micro_batch=8"]
    own = subprocess.run(command, capture_output=True, text=True)
    assert own.returncode == 0, own.stdout + own.stderr
    succeeds([*SMALL, *latin, "mask=window", "mask.window=8"])

    # A sweep, and a run gone on with.
    output = succeeds(["-m", *SMALL[:1], *SMALL[2:], *latin, "context=16,32"], several=True)
    assert "tokens/s" in output
    run = max((path for path in Path("runs/gpt2").iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    further = [word.replace("trainer.steps=2", "trainer.steps=4") for word in SMALL]
    succeeds([*further, *latin, "mask=window", "mask.window=8", f"resume={run}"])
    assert (run / "report.html").is_file()

    # Out again, and Python.
    succeeds(["mode=export", f"checkpoint={run}"])
    import transformers

    export = next(path for path in run.iterdir() if path.name.startswith("export"))
    model = transformers.AutoModelForCausalLM.from_pretrained(export)
    tokens = transformers.AutoTokenizer.from_pretrained(export)("Où sont", return_tensors="pt")["input_ids"]
    assert model(tokens).logits.shape[:2] == tokens.shape
    import flashtrain as library

    found = library.evaluate(run)
    assert found["validation_loss"] > 0
    assert library.load(run).settings.mask.window == 8
    capsys.readouterr()

    # What the caches hold, and how to be rid of it.
    assert "essais" in succeeds(["cache"])
    succeeds(["cache", "clear", "all"])
