"""Loading and saving decoders in Hugging Face transformers' formats (safetensors and config.json).

config, state_dict = load_decoder("path/to/gpt2")
model = Decoder(config)
model.load_state_dict(state_dict)
save_decoder(model, "for_transformers")   # AutoModelForCausalLM.from_pretrained("for_transformers")
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.integrations.decoder_formats import FORMATS, Format
from flashtrain.integrations.decoder_hybrids import transformers_format
from flashtrain.integrations.own_weights import own_config, save_weights
from flashtrain.integrations.weight_files import (
    CONFIG,
    check_architecture,
    converted,
    read_folder,
    write_folder,
)
from flashtrain.models.block import round_up
from flashtrain.models.decoder import Decoder
from flashtrain.models.decoder_config import DecoderConfig
from flashtrain.models.rope_scaling import ORIGINAL, RopeScaling


def save_decoder(model: Decoder, folder: str | Path, *, end_of_text: int | None = None) -> str:
    """Save a decoder for transformers as GPT-2, Llama, Starcoder2, Granite 4 or Qwen3.5 where
    possible, else in flashtrain's own format.

    Args:
        end_of_text: The id of the token that ends a text, for the configuration
            (None: no such token).

    Returns:
        The name of the format, in words.

    Raises:
        UserError: The model is not flashtrain's.
        OSError: The folder cannot be written.
    """
    found = transformers_format(model.config) if isinstance(model, Decoder) else None
    if found is None:
        return save_weights(model, folder)
    kind, form, config = found
    tensors = {}
    for name, tensor in model.state_dict().items():
        parts = form.parts(name, len(tensor), config)
        tensor = tensor - 1 if form.less_one and name.endswith("_norm.weight") else tensor
        split = tensor[: sum(rows for _, rows in parts)].split([rows for _, rows in parts])
        for (theirs, _), part in zip(parts, split, strict=True):
            whole = part.t() if theirs.endswith(form.transposed) else part
            tensors[theirs if theirs.startswith("lm_head.") else form.prefix + theirs] = whole
    content = _content(kind, form, config, end_of_text)
    content["dtype"] = str(model.token_embedding.weight.dtype).removeprefix("torch.")
    write_folder(folder, content, tensors, end_of_text=end_of_text)
    return (
        f"Hugging Face's {kind} format: transformers.AutoModelForCausalLM.from_pretrained reads it"
    )


def load_decoder(
    folder_or_file: str | Path, *, vocab_rows: int | None = None
) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Load the configuration and state dict of a Decoder from transformers' weights or from
    those of save_weights.

    Tensors are on the CPU in the file's dtype. For transformers' weights config.dropout is 0
    whatever the file has.

    Args:
        folder_or_file: A folder, or a safetensors file next to its config.json.
        vocab_rows: Rows of the embedding table for transformers' weights; added rows are
            zero (None: the number of tokens rounded up to a multiple of 64; GPT-2's
            50,257 become 50,304).

    Raises:
        UserError: There are no weights, or they are of another architecture, or Decoder
            cannot compute the same.
    """
    content, tensors = read_folder(folder_or_file)
    own = own_config(content, "gpt2", folder_or_file)
    if own is not None:
        return own, tensors
    form = FORMATS.get(content.get("model_type", ""), FORMATS["gpt2"])
    config = _our_config(form, content, vocab_rows, folder_or_file)
    bare = {}
    for name, tensor in tensors.items():
        name = name.removeprefix(form.prefix)
        tied = config.tie_embeddings and name == "lm_head.weight"  # a copy of the table
        if not tied and not name.endswith(form.ignored):
            bare[name] = tensor.t().contiguous() if name.endswith(form.transposed) else tensor
    make, parts = partial(Decoder, config, attention="sdpa"), partial(form.parts, config=config)
    return config, converted(bare, make, parts, folder_or_file)


def _content(
    kind: str, form: Format, config: DecoderConfig, end_of_text: int | None
) -> dict[str, Any]:
    """Return the content of transformers' config.json for a model of this configuration."""
    own = config.plain()
    head_dim = own["embed"] // own["heads"]
    content = {
        "architectures": [form.architecture],
        "model_type": kind,
        **{theirs: own[ours] for ours, theirs in form.sizes.items()},
        **{name: possible[0] for name, possible in form.computation.items()},
        **dict.fromkeys(form.biases, config.bias),
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
    }
    if config.positions == "learned":
        return content | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), config.dropout)
    entries = {"rope_type": "default", **config.rope.parameters(config.rope_base, head_dim)}
    # transformers before 5 reads rope_theta and rope_scaling.
    content["rope_theta"] = entries["rope_theta"]
    if entries["rope_type"] != "default":
        content["rope_scaling"] = {
            name: value for name, value in entries.items() if name != "rope_theta"
        }
    return content | {"rope_parameters": entries, "head_dim": head_dim}


def _our_config(
    form: Format, content: dict[str, Any], vocab_rows: int | None, where: str | Path
) -> DecoderConfig:
    content = {**form.absent, **dict.fromkeys(form.biases, False), **content}
    # The older name.
    entry = "rope_parameters" if content.get("rope_parameters") else "rope_scaling"
    rope = content.get(entry) or {}
    check_architecture(content, FORMATS, form.computation, where)
    sizes: dict[str, Any] = {ours: content.get(theirs) for ours, theirs in form.sizes.items()}
    if content.get("head_dim") not in (None, sizes["embed"] / sizes["heads"]):
        raise UserError(
            f"{where}: head_dim={content['head_dim']} in {CONFIG}: "
            "expected hidden_size / num_attention_heads."
        )
    biases = {content[entry] for entry in form.biases}
    if len(biases) > 1:
        raise UserError(
            f"{where}: {' and '.join(form.biases)} in {CONFIG}: "
            "expected biases in all layers or none."
        )
    try:
        scaling = RopeScaling.of_entries({ORIGINAL: sizes["context"], **rope})
    except UserError as error:
        raise UserError(f"{where}: {entry}={rope} in {CONFIG}: {error}") from error
    sizes["kv_heads"] = sizes.get("kv_heads") or sizes["heads"]
    sizes["ffn"] = sizes["ffn"] or 4 * sizes["embed"]
    return DecoderConfig.of_plain(
        {"bias": True in biases, **sizes, **form.ours},
        vocab_rows=round_up(sizes["vocab_size"], 64) if vocab_rows is None else vocab_rows,
        tie_embeddings=content["tie_word_embeddings"],
        rope_base=rope.get("rope_theta", content.get("rope_theta", 10000.0)),
        rope_factor=scaling.plain(),
    )
