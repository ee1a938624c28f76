"""Files as someone else may have left them: bytes flipped, cut off, added to, and fields that say what cannot be.

    python tests/mutations.py FOLDER SEED COUNT

makes one small file of every kind that weights and tokenizers are read from, changes each COUNT times and reads it with
at most 6 GiB of address space. Anything but a result or a UserError is printed with its seed, and makes the exit
status 1.
"""

from __future__ import annotations

import io
import json
import random
import resource
import sys
import time
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from flashtrain.command.compose import compose_settings
from flashtrain.data.tokenizers import BPETokenizer, ByteTokenizer, WordPieceTokenizer, gpt2_tokenizer, load_tokenizer
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import write_config
from flashtrain.integrations import (
    load_bert,
    load_decoder,
    load_gpt2,
    load_weights,
    save_bert,
    save_gpt2,
    save_llama,
    save_weights,
)
from flashtrain.models.bert import Bert
from flashtrain.models.bert_encoder import BertConfig
from flashtrain.models.classifier import Classifier
from flashtrain.models.classifier_config import ClassifierConfig
from flashtrain.models.gpt2 import GPT2, GPT2Config
from flashtrain.tasks.language.trained import load_trained, starting_weights
from flashtrain.tasks.masked_language.build import read_bert
from flashtrain.training import sharded
from flashtrain.training.checkpoints import read_checkpoint
from flashtrain_recipes.arena.weights import SavedClassifier, read_classifier, write_classifier

ADDRESS_SPACE = 6 * 2**30
SLOWEST = 20.0  # seconds of the processor, of one reading
HOSTILE: tuple[Any, ...] = (
    10**9, 10**18, 2**64, 10**400, -1, 0, 0.5, -0.0, float("nan"), float("inf"), True, None, "", "x", "${oc.env:HOME}",
    "../x", [], {}, [[1]], {"a": 1}, "\x00", "\ud800", "9" * 5000,
)  # fmt: skip
Case = tuple[str, Path, Callable[[], object]]  # (what it is, the file to change, how it is read)


def cases(folder: Path) -> list[Case]:
    """One small file of each kind, and its reader."""
    torch.manual_seed(0)
    sizes = {"layers": 2, "heads": 2, "embed": 8, "ffn": 8}
    decoder = GPT2(GPT2Config(257, 320, 16, kv_heads=2, **sizes), "sdpa")
    encoder = Bert(BertConfig(261, 320, 16, **sizes, next_sentence=True, pooler=True), "sdpa")
    classifier = Classifier(ClassifierConfig(2, 16, **sizes, side=4, grey_bins=16), "sdpa")
    settings = compose_settings(["recipe=gpt2", "model.size=demo", "data.tokenizer=bytes", "hardware=cpu"])
    found: list[Case] = []

    def run(name: str, model: torch.nn.Module, notes: dict[str, Any], read: Callable[[str], object]) -> None:
        (folder / name / "checkpoints").mkdir(parents=True)
        write_config(settings, folder / name)
        ByteTokenizer().save(folder / name / "tokenizer")
        state = {f"model.{key}": value for key, value in model.state_dict().items()}
        path = folder / name / "checkpoints" / "best.ckpt"
        torch.save({"state_dict": state, "global_step": 3, "flashtrain": notes}, path)
        found.append((f"checkpoint of a {name}", path, lambda: read(str(path))))

    shape = {"shape": asdict(decoder.config)}
    run("decoder", decoder, {"name": "gpt2", "vocab_size": 257, **shape}, lambda p: load_trained(p, attention="sdpa"))
    run("bert", encoder, {"name": "bert", "shape": asdict(encoder.config)}, read_bert)
    notes = {"task": "classification", "stage": 0, "recipe": "pathx", "shape": asdict(classifier.config)}
    run("classifier", classifier, notes, read_classifier)
    file = folder / "classifier.safetensors"
    write_classifier(SavedClassifier(classifier.config, classifier.state_dict(), {"step": 3}, file), file)
    found.append(("classifier's weights", file, lambda: read_classifier(file)))

    def export(name: str, save: Callable[[Path], object], read: Callable[[Path], object]) -> None:
        save(folder / name)
        for part in sorted((folder / name).iterdir()):
            found.append((f"{part.name} of {name}", part, lambda: read(folder / name)))

    export("gpt2", lambda p: save_gpt2(decoder, p), load_gpt2)
    modern = GPT2(GPT2Config.of_size("demo", "modern", vocab_size=61, context=16), "sdpa")
    export("llama", lambda p: save_llama(modern, p), load_decoder)
    export("bert-weights", lambda p: save_bert(encoder, p), load_bert)
    export("ours", lambda p: save_weights(decoder, p), load_weights)
    index = {"weight_map": dict.fromkeys(["a", "b"], "model.safetensors")}
    save_gpt2(decoder, folder / "shards")
    (folder / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    path = folder / "shards" / "model.safetensors.index.json"
    settings.weights = str(folder / "shards")
    found.append(("index of shards", path, lambda: starting_weights(settings)))
    parts, writer = folder / "parts.ckpt", sharded.ShardWriter()
    states = [{"state": {"weight": {"step": torch.ones(())}}, "param_groups": [{"lr": 0.1, "params": ["weight"]}]}]
    whole = {
        "state_dict": {"weight": torch.ones(64, 4)},
        "optimizer_states": states,
        "global_step": 3,
        "flashtrain": {"name": "x"},
    }
    writer.start(*sharded.split(whole), parts, "3-0")
    writer.finish()
    for part in (parts / "current.json", *sorted((parts / "3-0").iterdir())):
        found.append((f"{part.name} of shards", part, lambda: read_checkpoint(parts, optimizers=True)))
    bpe = BPETokenizer.train(["the quick brown fox "] * 9, 290)
    export("bytes-tokenizer", ByteTokenizer().save, load_tokenizer)
    export("bpe-tokenizer", bpe.save, load_tokenizer)
    words = folder / "words"
    words.mkdir()
    (words / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "##y"]))
    (words / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    for part in sorted(words.iterdir()):
        found.append((f"{part.name} of words", part, lambda: WordPieceTokenizer.beside(words)))
    made = WordPieceTokenizer.beside(words)
    assert made is not None
    export("wordpiece-tokenizer", made.save, load_tokenizer)
    pair = folder / "pair"
    pair.mkdir()
    model = json.loads((folder / "bpe-tokenizer" / "tokenizer.json").read_text())["model"]
    (pair / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(merge) for merge in model["merges"]]
    (pair / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    for part in sorted(pair.iterdir()):
        found.append((part.name, part, lambda: gpt2_tokenizer(pair / "vocab.json", pair / "merges.txt")))
    return found


def changed(content: bytes, path: Path, chance: random.Random) -> bytes:
    """The file's content with one kind of change."""
    kinds = [_flipped, _flipped, _cut, _extended, _repeated]
    if path.suffix == ".json":
        kinds += [_json_field] * 6
    elif path.suffix == ".ckpt":
        kinds += [_saved_field] * 8 + [_entry] * 2
    elif path.suffix == ".safetensors":
        kinds += [_header_field] * 6
    return chance.choice(kinds)(content, chance)


def _flipped(content: bytes, chance: random.Random) -> bytes:
    result = bytearray(content)
    # Descriptions stand at both ends, and weights, whose values may be anything, between them.
    span = min(len(result), chance.choice((64, 1024, 8192, len(result))))
    begin = chance.choice((0, len(result) - span))
    for _ in range(chance.choice((1, 3, 20))):
        result[begin + chance.randrange(span)] = chance.randrange(256)
    return bytes(result)


def _cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def _extended(content: bytes, chance: random.Random) -> bytes:
    return content + chance.choice((b"\0" * 1000, b"[" * 100_000, content, chance.randbytes(100)))


def _repeated(content: bytes, chance: random.Random) -> bytes:
    begin = chance.randrange(len(content))
    return content[:begin] + content[begin : begin + 200] * 3 + content[begin:]


def _json_field(content: bytes, chance: random.Random) -> bytes:
    return json.dumps(_with_field(json.loads(content), chance)).encode()


def _header_field(content: bytes, chance: random.Random) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    notes = header.get("__metadata__", {})
    if "flashtrain" in notes and chance.random() < 0.7:
        notes["flashtrain"] = json.dumps(_with_field(json.loads(notes["flashtrain"]), chance))
    else:
        header = _with_field(header, chance)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def _saved_field(content: bytes, chance: random.Random) -> bytes:
    """A checkpoint that torch.save wrote, of which one field says something else."""
    saved = torch.load(io.BytesIO(content), weights_only=True)
    part = chance.choice(("flashtrain", "flashtrain", "flashtrain", "state_dict", None))
    if part is None:
        saved = _with_field(saved, chance, deep=False)
    elif part == "state_dict":
        name = chance.choice(list(saved[part]))
        views = [torch.zeros(1).expand(10**6, 10**6), torch.zeros(1), torch.zeros(2, dtype=torch.int64)]
        saved[part][name] = chance.choice([*views, torch.zeros(2, 2).to_sparse(), *HOSTILE[:-2]])
    else:
        saved[part] = _with_field(saved[part], chance)
    file = io.BytesIO()
    torch.save(saved, file)
    return file.getvalue()


def _entry(content: bytes, chance: random.Random) -> bytes:
    """A checkpoint of which one entry is compressed, shorter, or gone."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(result, "w") as target:
        entries = source.infolist()
        unlucky, how = chance.choice(entries).filename, chance.choice(("deflated", "short", "gone", "long"))
        for entry in entries:
            data = source.read(entry)
            if entry.filename != unlucky:
                target.writestr(entry.filename, data)
            elif how != "gone":
                data = {"short": data[: len(data) // 2], "long": data * 3}.get(how, data)
                packed = zipfile.ZIP_DEFLATED if how == "deflated" else zipfile.ZIP_STORED
                target.writestr(entry.filename, data, packed)
    return result.getvalue()


def _with_field(value: Any, chance: random.Random, *, deep: bool = True) -> Any:
    """The same value, of which one field at any depth is hostile, gone or of another name."""
    if not isinstance(value, dict | list) or not value:
        return chance.choice(HOSTILE)
    value = value.copy()
    key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if deep and isinstance(value[key], dict | list) and chance.random() < 0.8:
        value[key] = _with_field(value[key], chance)
        return value
    how = chance.random()
    if how < 0.1:
        del value[key]
    elif how < 0.2 and isinstance(value, dict):
        value[chance.choice(("x", "\x1b[31m", "a" * 500))] = value.pop(key)
    else:
        value[key] = chance.choice(HOSTILE)
    return value


def main(folder: Path, seed: int, count: int) -> int:
    torch.set_num_threads(1)
    made = cases(folder)
    for _, _, read in made:
        read()  # as it is, it can be read
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    failed = refused = total = 0
    for what, path, read in made:
        content = path.read_bytes()
        for number in range(count):
            total += 1
            path.write_bytes(changed(content, path, random.Random(f"{seed} {what} {number}")))
            started = time.process_time()
            try:
                read()
            except UserError as error:
                refused += 1
                bad = "\n" in str(error)
            except BaseException:  # noqa: BLE001 - this is what is looked for; a panic of a library is no Exception
                bad = True
                traceback.print_exc()
            else:
                bad = False
            if bad or time.process_time() - started > SLOWEST:
                failed += 1
                print(
                    f"FAILED: {what}, seed {seed}, change {number}, {time.process_time() - started:.1f} s", flush=True
                )
        path.write_bytes(content)
    print(f"{total} changed files of {len(made)} kinds, seed {seed}: {refused} refused in a line, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
