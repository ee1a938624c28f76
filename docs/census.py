"""Write reference/models.md: which of transformers' causal types are trained, how each was tested,
and why the others are refused.

python docs/census.py            # minutes: asks for every type, and runs each that is trained
python docs/census.py llama ...  # prints what is found for these types

Each type is built in small, as mode=check builds it; nothing is read from the network.
"""

from __future__ import annotations

import copy
import inspect
import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import flashtrain
from flashtrain.checks.questions import OK
from flashtrain.errors import UserError, first_line
from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder
from flashtrain.integrations.huggingface_model import transformers_decoder
from flashtrain.integrations.huggingface_shrinking import shrunk
from flashtrain.models.generation import generate

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "reference" / "models.md"
sys.path[:0] = [str(DOCS.parent / "tests"), str(DOCS.parent / "tests" / "integrations")]

from huggingface_models import DECODERS  # noqa: E402
from hybrid_models import CONFIGS, ON_ONE_DEVICE  # noqa: E402

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
FIRST_LINE = "<!-- Written by `python docs/census.py`; what is changed here by hand is lost. -->"
# What a small configuration has, if the type has such an entry.
SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
ROUTED = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_routed_experts": 4}
# Entries without which a default configuration is not whole, or not small.
ALSO: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default",
                                                                   "rope_theta": 1e4}}},
    "dbrx": {"d_model": 64, "n_heads": 4, "n_layers": 2,
             "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
             "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4}},
    "deepseek_v2": {**ROUTED, "num_experts_per_tok": 2},
    "dots1": {**ROUTED, "n_shared_experts": 1, "num_experts_per_tok": 2,
              "moe_intermediate_size": 32},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "laurel_rank": 8,
                     "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512,
                     "num_kv_shared_layers": 2, "activation_sparsity_pattern": None},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "hunyuan_v1_dense": {"head_dim": 16},
    "gemma4_unified_text": {"head_dim": 16, "global_head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "jetmoe": {"kv_channels": 16, "num_local_experts": 4},
    "ministral": {"head_dim": 16, "sliding_window": 64},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
}  # fmt: skip
# The reasons of refusals, by words of their messages.
REASONS = {
    "calls transformers' registered attention": "its attention does not go through transformers' "
    "attention interface in every layer",
    "reads more than text": "it also reads images or sound; where the text model has a type of its "
    "own, that one may be trained",
    "mixes tokens by": "its recurrences or convolutions would read packed documents as one",
    "no position_ids": "it takes no `position_ids`, so that packed documents would be read as one",
    "computes with its attention masks": "it computes with its attention masks; trained with "
    "`attention=standard`",
    "heads of": "its heads are wider than 512; trained with `attention=standard`",
    "no list of num_hidden_layers": "its layers are in no list of `num_hidden_layers`",
}
# Those of types that fail, by whatever their classes raise; any other failure is a fault.
FAILING = {
    **dict.fromkeys(
        ("blt", "musicgen", "musicgen_melody"),
        "its class has no configuration of one text model",
    ),
    "gemma4_assistant": "it drafts for another model, whose keys and values it reads",
}
# Alike for all: 9, 1 and 13 tokens.
PROMPTS = [[(7 * place + 5 * length) % 60 + 3 for place in range(length)] for length in (9, 1, 13)]


@dataclass(frozen=True)
class Found:
    """What is found for a type; of one that is refused, only the reason."""

    kind: str
    refused: str = ""
    layers: str = ""
    devices: bool = False
    gradients: bool = False
    faults: tuple[str, ...] = ()

    @property
    def cells(self) -> str:
        """The first cells of its line of the page."""
        tested = "gradients" if self.gradients else "in small"
        devices = "yes" if self.devices else "no"
        return self.refused or f"{self.layers} | {devices} | {tested}"


def sizes_of(kind: str) -> dict[str, Any]:
    """The entries of a type's small configuration."""
    if kind in CONFIGS:
        return CONFIGS[kind]
    own = CONFIG_MAPPING[kind]
    try:
        config: Any = own()
    except Exception:  # noqa: BLE001 - of a class that has no default
        return {}
    named = inspect.signature(own).parameters
    sizes = {name: size for name, size in SMALL.items() if name in named}
    sizes |= {name: size for name, size in LATENT.items() if getattr(config, name, None)}
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = 4
    if 16 < (vars(config).get("head_dim") or 0) <= 256:
        sizes["head_dim"] = 16
    return {**sizes, **ALSO.get(kind, {})}


def built(kind: str, **entries: Any) -> HuggingFaceDecoder:
    """A type in small, without weights; in its default sizes where the small ones do not suit."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            described = {"model_type": kind, **sizes_of(kind), **entries}
            (Path(folder) / "config.json").write_text(json.dumps(described))
            return transformers_decoder(config=folder)
    except Exception:  # noqa: BLE001 - of any class
        return transformers_decoder(config=kind, changes=entries)


def find(kind: str) -> Found:
    """Build a type in small; one that is trained is checked, and generates."""
    try:
        try:
            model = built(kind)
        except UserError as error:
            if "is_decoder" not in str(error):
                raise
            model = built(kind, is_decoder=True)
    except Exception as error:  # noqa: BLE001 - whatever the class raises, it cannot be built
        if kind in FAILING:
            return Found(kind, FAILING[kind])
        for part, words in REASONS.items():
            if isinstance(error, UserError) and part in str(error):
                return Found(kind, words)
        return Found(kind, faults=(first_line(error),))
    entry = ", with `is_decoder: true`" if getattr(model.config, "is_decoder", False) else ""
    kinds = sorted({one.mixer.kind for one in model.shape.layers} - {"moe", "mlp"})
    tested = kind in CONFIGS or kind in {make.args[0] for make in DECODERS.values()}
    return Found(
        kind,
        layers=", ".join(one.replace("_", " ") for one in kinds) + entry,
        devices=model.unshared is None and kind not in ON_ONE_DEVICE,
        gradients=tested,
        faults=tuple(faults_of(model)),
    )


def faults_of(model: HuggingFaceDecoder) -> Iterable[str]:
    """What is wrong in a model of random weights: its packed documents, or its greedy tokens."""
    torch.manual_seed(0)
    small = shrunk(model.module)
    alone = copy.deepcopy(small)
    alone.set_attn_implementation("eager")
    decoder = HuggingFaceDecoder(small)
    try:
        yield from (row.check for row in flashtrain.check(decoder) if row.verdict != OK)
        if generate(decoder, PROMPTS, 4, temperature=0) != [greedy(alone, one) for one in PROMPTS]:
            yield "greedy tokens"
    except Exception as error:  # noqa: BLE001 - which is a fault too
        yield first_line(error)


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    """transformers' greedy tokens, of a text that is read anew for each."""
    text = list(prompt)
    for _ in range(4):
        text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text


def page(found: list[Found]) -> str:
    """The page of all types."""
    trained = [one for one in found if not one.refused]
    lines = [
        "# Types of Hugging Face models",
        "",
        FIRST_LINE,
        "",
        f"transformers {transformers.__version__} has {len(found)} types of causal language models "
        f"(`model_type` in `config.json`). {len(trained)} of them are trained by `recipe=hf`,",
        "with flashtrain's attention; encoders such as BERT with the entry "
        "`+model.options={is_decoder: true}` (X-MOD: `default_language` too).",
        "A refusal comes before anything is loaded.",
        "",
        "Each trained type was built in small, with random weights, on a CPU in float32: the loss "
        "of packed documents is that of each document alone,",
        "windows and chunks are felt ([`mode=check`](../train/check.md)), and the greedy tokens of "
        "three prompts are those of transformers' eager attention",
        'without a cache. "Gradients": logits or loss and all gradients also equal those of '
        "transformers' class, in float64, below 1e-10. The second column is",
        "what the layers declare; a run probes it in its first step.",
        "",
        "## Trained",
        "",
        "| layers | share a sequence over GPUs | tested | types |",
        "| :--- | :--- | :--- | :--- |",
    ]
    groups: dict[str, list[str]] = {}
    for one in found:
        groups.setdefault(one.cells, []).append(f"`{one.kind}`")
    reasons = dict.fromkeys([*REASONS.values(), *FAILING.values()])
    refused = [cells for cells in reasons if cells in groups]
    largest = sorted(groups.keys() - {*refused}, key=lambda cells: (-len(groups[cells]), cells))
    lines += [f"| {cells} | {', '.join(groups[cells])} |" for cells in largest]
    lines += ["", "## Refused", "", "| reason | types |", "| :--- | :--- |"]
    lines += [f"| {cells} | {', '.join(groups[cells])} |" for cells in refused]
    return "\n".join([*lines, ""])


def main(kinds: list[str]) -> int:
    """Write the page, or print what is found for some types; returns the exit status."""
    found = []
    for kind in kinds or TYPES:
        found.append(find(kind))
        print(found[-1], flush=True)
    faults = [one.kind for one in found if one.faults]
    if faults:
        print(f"with faults: {', '.join(faults)}", file=sys.stderr)
    elif not kinds:
        PAGE.write_text(page(found), encoding="utf-8")
    return bool(faults)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    sys.exit(main(sys.argv[1:]))
