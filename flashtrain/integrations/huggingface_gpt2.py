"""GPT-2 weights as Hugging Face transformers stores them (safetensors and config.json), both ways.

    config, state_dict = load_gpt2("path/to/gpt2")
    model = GPT2(config)
    model.load_state_dict(state_dict)
    save_gpt2(model, "for_transformers")            # GPT2LMHeadModel.from_pretrained("for_transformers")

transformers keeps GPT-2's linear layers as Conv1D, whose weight is the transpose of torch.nn.Linear's, and has exactly
as many embedding rows as tokens. Everything else differs in name only; the packed projection has q, k, v in our order.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.integrations.own_weights import save_weights
from flashtrain.integrations.weight_files import (
    CONFIG,
    Part,
    converted,
    read_architecture,
    read_folder,
    read_json,
    write_folder,
)
from flashtrain.models.block import EPSILON
from flashtrain.models.gpt2 import GPT2, GPT2Config, round_up

PREFIX = "transformer."  # before every name but lm_head.weight in a GPT2LMHeadModel; absent in a bare GPT2Model
NAMES = {
    "token_embedding": "wte",
    "position_embedding": "wpe",
    "final_norm": "ln_f",
    "attention_norm": "ln_1",
    "feed_forward_norm": "ln_2",
    "attention.qkv": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
    "head": "lm_head",
}
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
WITH_VOCABULARY = ("token_embedding.weight", "head.weight")  # our rows may be more than their tokens
MASK_BUFFERS = (".attn.bias", ".attn.masked_bias")  # constants that old checkpoints carry
# What a config.json may say of the computation, and what a GPT-2 of ours computes: absent means the same.
COMPUTATION: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "layer_norm_epsilon": (EPSILON,),
}
SIZES = ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd")


def load_gpt2(folder_or_file: str | Path, *, vocab_rows: int | None = None) -> tuple[GPT2Config, dict[str, Tensor]]:
    """Configuration and state dict for GPT2 from a transformers folder, or a safetensors file with config.json beside.

    vocab_rows: rows of the embedding table, the added ones zero (None: tokens rounded up to a multiple of 64; GPT-2's
    50,257 become 50,304). Tensors are on the CPU in the file's dtype. config.dropout is 0 whatever the file says: how
    to go on training is the trainer's choice.
    UserError: nothing there, another architecture, a computation GPT2 does not have, tensors that do not fit.
    """
    content, tensors = read_folder(folder_or_file)
    config = _our_config(content, vocab_rows, folder_or_file)
    make = partial(GPT2, config, attention="sdpa")
    return config, converted(_known(tensors, config), make, partial(_their_parts, config=config), folder_or_file)


def save_gpt2(model: GPT2, folder: str | Path, *, end_of_text: int | None = None) -> Path:
    """Writes a GPT-2 for transformers: folder/model.safetensors and folder/config.json; returns the folder.

    end_of_text: that token's id, for config.json (None: GPT-2's own 50256 when the vocabulary is GPT-2's, else none).
    UserError: a model that transformers' GPT-2 cannot hold (the modern family, rotary positions: save_llama writes
    them). OSError: an unwritable folder.
    """
    config = model.config
    differences = differences_from_gpt2(config)
    if differences:
        raise UserError(
            f"a model with {', '.join(differences)} is not one transformers' GPT-2 can hold. "
            "Possible: save_weights, which writes safetensors with flashtrain's own configuration."
        )
    tensors = {}
    for name, tensor in model.state_dict().items():
        theirs = _their_name(name)
        if theirs.endswith(CONV1D):
            tensor = tensor.t()
        elif name in WITH_VOCABULARY:
            tensor = tensor[: config.vocab_size]
        tensors[theirs if theirs == "lm_head.weight" else PREFIX + theirs] = tensor
    if end_of_text is None and config.vocab_size == 50257:
        end_of_text = 50256
    content = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "layer_norm_epsilon": EPSILON,
        "n_positions": config.context,
        "n_embd": config.embed,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.ffn,
        "vocab_size": config.vocab_size,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": str(model.token_embedding.weight.dtype).removeprefix("torch."),
    }
    return write_folder(folder, content, tensors, end_of_text=end_of_text)


def save_decoder(model: nn.Module, folder: Path, *, end_of_text: int | None = None) -> str:
    """Write a decoder as safetensors: in the layout of transformers' that can hold it (GPT-2's, Llama's, Starcoder2's),
    else in our own. Returns which, in words. UserError: a model that no layout knows."""
    if not isinstance(model, GPT2):
        raise UserError(f"{type(model).__name__} cannot be exported: only flashtrain's own models can.")
    if not differences_from_gpt2(model.config):
        save_gpt2(model, folder, end_of_text=end_of_text)
        return "Hugging Face's GPT-2 layout: transformers.GPT2LMHeadModel.from_pretrained reads it"
    from flashtrain.integrations.huggingface_llama import layout_of, save_llama  # for those who have one

    layout = layout_of(model.config)
    if layout is not None:
        save_llama(model, folder, end_of_text=end_of_text)
        return f"Hugging Face's {layout.title()} layout: transformers.AutoModelForCausalLM.from_pretrained reads it"
    save_weights(model, folder)
    return "flashtrain's own layout: flashtrain.integrations.load_weights reads it"


def load_decoder(folder_or_file: str | Path, *, vocab_rows: int | None = None) -> tuple[GPT2Config, dict[str, Tensor]]:
    """As load_gpt2, for each of transformers' layouts that save_decoder writes. UserError as there."""
    from flashtrain.integrations.huggingface_llama import LAYOUTS, load_llama

    path = Path(folder_or_file).expanduser()
    file = (path if path.is_dir() else path.parent) / CONFIG
    kind = read_json(file).get("model_type") if file.is_file() else None
    if kind not in ("gpt2", *LAYOUTS, None):
        raise UserError(
            f"{path} holds another architecture: model_type {kind} in {CONFIG}, where gpt2, {', '.join(LAYOUTS)} are "
            "read."
        )
    load = load_gpt2 if kind in ("gpt2", None) else load_llama
    return load(folder_or_file, vocab_rows=vocab_rows)


def differences_from_gpt2(config: GPT2Config) -> list[str]:
    """What of a model transformers' GPT-2 cannot hold, in words; empty when save_gpt2 can write it."""
    differences = {
        f"positions={config.positions}": config.positions != "learned",
        f"norm={config.norm}": config.norm != "layernorm",
        f"activation={config.activation}": config.activation != "gelu",
        f"kv_heads={config.kv_heads} of {config.heads} heads": config.kv_heads != config.heads,
        "no biases": not config.bias,
    }
    return [name for name, differs in differences.items() if differs]


def _our_config(content: dict[str, Any], vocab_rows: int | None, where: str | Path) -> GPT2Config:
    sizes = read_architecture(content, "gpt2", COMPUTATION, SIZES, where)
    return GPT2Config(
        vocab_size=sizes["vocab_size"],
        vocab_rows=round_up(sizes["vocab_size"], 64) if vocab_rows is None else vocab_rows,
        context=sizes["n_positions"],
        layers=sizes["n_layer"],
        heads=sizes["n_head"],
        kv_heads=sizes["n_head"],
        embed=sizes["n_embd"],
        ffn=content.get("n_inner") or 4 * sizes["n_embd"],
        tie_embeddings=content.get("tie_word_embeddings", True),
    )


def _known(tensors: dict[str, Tensor], config: GPT2Config) -> dict[str, Tensor]:
    """The tensors without prefix, without old mask constants and without a second copy of a tied table, as Linear has
    them."""
    bare = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    return {
        name: tensor.t().contiguous() if name.endswith(CONV1D) else tensor
        for name, tensor in bare.items()
        if not name.endswith(MASK_BUFFERS) and not (config.tie_embeddings and name == "lm_head.weight")
    }


def _their_name(name: str) -> str:
    """Our parameter's name in transformers, without prefix: blocks.0.attention.qkv.weight -> h.0.attn.c_attn.weight."""
    module, kind = name.rsplit(".", 1)
    if module.startswith("blocks."):
        _, layer, rest = module.split(".", 2)
        return f"h.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[module]}.{kind}"


def _their_parts(name: str, rows: int, config: GPT2Config) -> list[Part]:
    return [(_their_name(name), config.vocab_size if name in WITH_VOCABULARY else rows)]
