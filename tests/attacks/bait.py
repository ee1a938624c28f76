"""What the files' attack reads beside the trained runs: caches, vocabularies, weights, texts, bombs, tables."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import shutil
from pathlib import Path

from tests.attacks.scene import LM, Scene, must
from tests.tiny_runs import ROOT

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "ab", "cd", "abcd", "x", "y", "and", *map(str, range(40))]
LINE = "the quick brown fox jumps over the lazy dog. "


def prepare_bait(scene: Scene) -> None:
    """Make all of it, unless it is there."""
    data = scene.root / "data"
    done = data / "bait-is-made"
    if done.exists():
        return
    (data / "bombs").mkdir(exist_ok=True)
    for make in (_texts, _bombs, _recipes, _results, _reviews):
        make(data)
    # What torch and tokenizers do in threads is done in a fork, so that this process stays without any.
    must(scene.call(lambda: _weights(data, scene.root / LM), inside=[data]))
    _caches(scene, data)
    _sweep(scene, data)
    done.touch()


def _texts(data: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet
    import zstandard

    folder = data / "texts"
    folder.mkdir()
    plain = (LINE * 60).encode()
    lines = "\n".join(json.dumps({"text": f"{number} {LINE * 5}"}) for number in range(20)).encode()
    (folder / "a.txt").write_bytes(plain)
    (folder / "b.md").write_bytes(plain)
    (folder / "c.jsonl").write_bytes(lines)
    (folder / "d.txt.gz").write_bytes(gzip.compress(plain))
    (folder / "e.jsonl.xz").write_bytes(lzma.compress(lines))
    (folder / "f.txt.zst").write_bytes(zstandard.compress(plain))
    pyarrow.parquet.write_table(pa.table({"text": [LINE * 5] * 20}), folder / "g.parquet")


def _bombs(data: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet
    import zstandard

    folder = data / "bombs"
    with zstandard.open(folder / "zeros.txt.zst", "wb") as file:
        for _ in range(3000):
            file.write(b"a" * 1_000_000)
    with lzma.open(folder / "line.jsonl.xz", "wb", preset=0) as file:
        file.write(b'{"text": "')
        for _ in range(1000):
            file.write(b"x " * 500_000)
        file.write(b'"}\n')
    (folder / "deep.jsonl").write_text('{"text": ' + "[" * 200_000 + "]" * 200_000 + "}\n")
    (folder / "depth.jsonl.gz").write_bytes(gzip.compress(b'{"a":' * 30_000_000, 1))
    text = pa.array([b"a" * 100_000_000] * 20, pa.large_binary()).cast(pa.large_string())
    pyarrow.parquet.write_table(pa.table({"text": text}), folder / "bomb.parquet", compression="zstd")


def _recipes(data: Path) -> None:
    (data / "recipes").mkdir()
    shutil.copy(ROOT / "recipes/gpt2.yaml", data / "recipes/mine.yaml")


def _results(data: Path) -> None:
    (data / "results").mkdir()
    for name in ("attention-paper-h200.json", "gpt2-long-h200.json"):
        shutil.copy(ROOT / "recipes/results" / name, data / "results" / name)


def _reviews(data: Path) -> None:
    (data / "reviews").mkdir()
    for part in ("train", "test"):
        rows = [{"text": f"film {number}", "label": number % 2} for number in range(12)]
        (data / "reviews" / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def _weights(data: Path, run: Path) -> int:
    """A GPT-2 and a BERT as transformers saves them, the first in shards; a vocabulary like GPT-2's."""
    import transformers
    from safetensors.torch import load_file, save_file

    export = run / "export"
    tensors = load_file(export / "model.safetensors")
    names = sorted(tensors)
    gpt2 = data / "hf-gpt2"
    gpt2.mkdir()
    shutil.copy(export / "config.json", gpt2)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, gpt2 / shard, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (gpt2 / "model.safetensors.index.json").write_text(json.dumps(index))
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(data / "hf-bert")
    (data / "hf-bert/vocab.txt").write_text("\n".join(WORDS))
    return 0


def _caches(scene: Scene, data: Path) -> None:
    """A token cache of bytes and one of a BPE, an unfinished run with the latter, images, sequences."""
    bpe = ["data.tokenizer=bpe", "data.vocab_size=300"]
    keys = {word.split("=")[0] for word in bpe}
    plain = [*scene.words(LM), "trainer.steps=3", f"data.cache_dir={data}/token-cache"]
    plain = [word for word in plain if word != "trainer.steps=6"]
    must(scene.command(*plain, f"hydra.run.dir={data}/first", inside=[data], seconds=300))
    words = [*(word for word in plain if word.split("=")[0] not in keys), *bpe]
    run = data / "gpt2" / "2026-01-01_00-00-00"
    run.parent.mkdir()
    must(scene.command(*words, f"hydra.run.dir={run}", inside=[data], seconds=300))
    config = run / "config.yaml"  # as though it had been killed after its third step of six
    config.write_text(config.read_text().replace("  steps: 3\n", "  steps: 6\n"))
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "status": "stopped"}))
    tokenizer = json.loads((run / "tokenizer/tokenizer.json").read_text())["model"]
    (data / "vocabulary").mkdir()
    (data / "vocabulary/vocab.json").write_text(json.dumps(tokenizer["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["merges"]]
    (data / "vocabulary/merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    (data / "images").mkdir()
    for path in (scene.root / "cache").glob("pathfinder*.bin"):
        shutil.copy(path, data / "images")
    arena = [
        "recipe=lra-text", "hardware=cpu", "hardware.demo=never", "classifier.embed=16", "classifier.layers=1",
        "classifier.heads=1", "sequence.length=32", "sequence.batch=4", "sequence.validation=4", "logger=csv",
        "trainer.steps=2", "trainer.validate_every=2", "schedule.warmup_steps=1", f"sequence.path={data}/reviews",
    ]  # fmt: skip
    must(scene.command(*arena, f"sequence.cache_dir={data}/sequences", f"hydra.run.dir={data}/arena", inside=[data],
                       seconds=300))  # fmt: skip


def _sweep(scene: Scene, data: Path) -> None:
    folder = data / "sweep"
    for number in range(3):
        job = folder / f"{number:02d}"
        job.mkdir(parents=True)
        for name in ("summary.json", "config.yaml"):
            shutil.copy(scene.root / LM / name, job / name)
        row = json.loads((job / "summary.json").read_text())
        (job / "summary.json").write_text(json.dumps({**row, "context": 32 * 2**number}))
    os.sync()
