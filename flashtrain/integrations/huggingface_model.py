"""From a folder, a name of the hub or a configuration to a decoder that can be trained: model=huggingface."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch

from flashtrain.announce import say
from flashtrain.errors import UserError, first_line, one_of, unknown
from flashtrain.integrations import huggingface_folder as folders
from flashtrain.integrations.huggingface_attention import register_with_transformers
from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder
from flashtrain.integrations.huggingface_layers import decoder_layers
from flashtrain.integrations.weight_files import CONFIG
from flashtrain.models.positions import rotary_base_for
from flashtrain.settings import options

ATTENTIONS = {"flash": None, "sdpa": "sdpa", "standard": "eager"}  # transformers' own names; None is ours


def transformers_decoder(
    path: str | None = None,
    *,
    config: str | None = None,
    changes: Mapping[str, Any] | None = None,
    attention: str = "flash",
    context: int | None = None,
    residual: str = "weights",
    rope_base: float | None = None,
    rope_factor: float | None = None,
    lora: Mapping[str, Any] | None = None,
    quantize: str | None = None,
) -> HuggingFaceDecoder:
    """The model in a folder or of the hub, or one of a configuration with weights yet to be drawn; no weights are read.

    path: a folder, or a hub's name. config: in its place, a config.json, its folder, or a model type ("llama").
    changes: entries of the configuration, or experts_implementation. context: tokens of a sequence (None: any).
    rope_base, rope_factor: of rotary positions, as in GPT2Config. lora: peft's LoraConfig, to train adapters alone.
    quantize: "nf4", to keep the matrices beside adapters in 4 bits.
    UserError: no such model, or one that cannot be trained so.
    """
    import transformers

    folder = None if path is None else folders.folder_of(path)
    given, setting = (str(folder), "model.path") if folder is not None else (str(config), "model.config")
    changes = dict(changes or {})
    own = {name: changes.pop(name) for name in ("experts_implementation",) if name in changes}
    described = folders.read_config(given, changes, setting)
    if folder is not None and Path(str(path)).expanduser().is_dir():
        with folders.opened_weights(folder):  # refused, before anything is read, where there are none, or cut off ones
            pass
    if described.get_text_config() is not described:
        raise UserError(
            f"{given} is a {described.model_type}, of more than text: expected its text model by itself, with a "
            f"{CONFIG} of model_type {described.get_text_config().model_type}."
        )
    _stretch(described.get_text_config(), context, rope_base, rope_factor, given)
    name = register_with_transformers()
    if ATTENTIONS[attention] and (attention != "sdpa" or torch.cuda.is_available()):  # on a CPU ours computes by SDPA
        name = str(ATTENTIONS[attention])
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(
            described, attn_implementation=name, dtype=torch.float32, **own
        )
    folders.check_architecture(module, decoder_layers(module), given)
    if lora is not None:
        _add_adapters(module, lora, path or "")  # of a configuration alone peft has nothing to look up
    if quantize is not None:
        _check_quantize(quantize, lora)
    model = HuggingFaceDecoder(module, origin=path, residual=residual, quantize=quantize)
    _check_adapters(model)
    return model


def _check_quantize(quantize: str, lora: Mapping[str, Any] | None) -> None:
    one_of("model.quantize", quantize, get_args(options.Quantize))
    if lora is None:
        raise UserError(f"model.quantize={quantize} keeps weights that are not trained: add model.adapter=lora.")
    try:
        from torchao.quantization import to_nf4  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"model.quantize={quantize} needs the package torchao, version 0.18 or later: "
            "pip install 'flashtrain[low-bit]'."
        ) from error


def _add_adapters(module: Any, lora: Mapping[str, Any], name: str) -> None:
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UserError("model.adapter=lora needs the package peft: pip install 'flashtrain[hub]'.") from error
    module.name_or_path = name  # what the adapters say that they are for
    matrices = [name for name, one in module.named_modules() if getattr(one, "weight", torch.empty(0)).dim() > 1]
    config, refusal = LoraConfig(task_type="CAUSAL_LM", **lora), None
    try:
        module.add_adapter(config)
    except ValueError as error:
        refusal = error
    # peft passes over a name that no layer has; of the given names it has left those that are no experts'.
    for target in [] if isinstance(lora.get("target_modules"), str) else sorted(config.target_modules or ()):
        if not any(f".{name}".endswith(f".{target}") for name in matrices):
            raise unknown("layer in model.adapter_targets", target, {name.rpartition(".")[2] for name in matrices})
    if refusal is not None:
        raise UserError(f"model.adapter_targets: {first_line(refusal)}") from refusal


def _check_adapters(model: HuggingFaceDecoder) -> None:
    """UserError for an adapter of a matrix that another layer has too."""
    names: dict[int, list[str]] = {}
    for name, weight in model.module.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name.removesuffix(".weight").removesuffix(".base_layer"))
    for _, layer in model.adapters:
        for weight in layer.get_base_layer().parameters():
            if len(names[id(weight)]) > 1:
                raise UserError(
                    f"model.adapter_targets: {' and '.join(names[id(weight)])} are one matrix (tie_word_embeddings), "
                    "and an adapter of one would be merged into both: choose other layers, such as all-linear."
                )


def _stretch(config: Any, context: int | None, base: float | None, factor: float | None, where: str) -> None:
    """Make the configuration's positions serve `context` tokens. UserError: learned ones are too few."""
    trained = getattr(config, "max_position_embeddings", None)
    rotary = getattr(config, "rope_parameters", None)
    if rotary is None:
        for name, value in (("rope_base", base), ("rope_factor", factor)):
            if value is not None:
                raise UserError(f"model.{name}={value:g} is for rotary positions, and {where} has none.")
        if context is not None and trained is not None and context > trained:
            raise UserError(f"context={context} is longer than the {trained} learned positions of {where}.")
        return
    if base is not None or factor is not None:
        each = list(rotary.values()) if all(isinstance(one, dict) for one in rotary.values()) else [rotary]
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for one in each:
            one["rope_theta"] = rotary_base_for(base or one["rope_theta"], factor or 1.0, head)
    if context is None or trained is None or context <= trained:
        return
    if base is None and factor is None and rotary.get("rope_type", "default") == "default":
        _say_once(
            f"context={context} is {context / trained:g} times the {trained} that {where} was trained with; "
            f"model.rope_factor={context / trained:g} would slow its rotary angles for it."
        )
    config.max_position_embeddings = context


@cache
def _say_once(line: str) -> None:
    """The settings are checked, and later built."""
    say(line)


def build(settings: Any, *, vocab_size: int, context: int, attention: str) -> HuggingFaceDecoder:
    """model=huggingface. vocab_size: of the text's tokenizer, which may make no more tokens than the model knows."""
    if settings.path is None and settings.config is None:
        raise UserError("model=huggingface needs model.path=..., a transformers folder or a name of the hub.")
    lora = None
    if settings.adapter is not None:
        targets = settings.target_names()
        lora = {
            "r": settings.adapter_rank,
            "lora_alpha": settings.adapter_alpha or 2 * settings.adapter_rank,
            "lora_dropout": settings.adapter_dropout,
            "target_modules": targets[0] if targets == ["all-linear"] else targets,
        }
    model = transformers_decoder(
        settings.path,
        config=settings.config,
        changes=settings.options,
        attention=attention,
        context=context,
        residual=settings.residual,
        rope_base=settings.rope_base,
        rope_factor=settings.rope_factor,
        lora=lora,
        quantize=settings.quantize,
    )
    known = model.shape.vocab_rows
    if vocab_size > known:
        raise UserError(
            f"the tokenizer makes {vocab_size:,} tokens, and {settings.path or settings.config} knows {known:,}: "
            "choose the tokenizer that it was trained with (data.tokenizer=huggingface, where that is beside it)."
        )
    return model


def check(settings: Any, *, vocab_size: int, context: int) -> None:
    """Raise what build would, before any text is read."""
    build(settings, vocab_size=vocab_size, context=context, attention="flash")


build.check = check  # type: ignore[attr-defined]
