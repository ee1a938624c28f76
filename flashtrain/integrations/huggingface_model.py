"""Building a trainable Hugging Face decoder from a folder, a hub name or a
configuration (model=huggingface)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from flashtrain.announce import say
from flashtrain.errors import UserError, first_line, needs_package, one_of, unknown
from flashtrain.integrations import huggingface_folder as folders
from flashtrain.integrations.huggingface_adapter import adapter_weights
from flashtrain.integrations.huggingface_architectures import check_architecture
from flashtrain.integrations.huggingface_attention import register_with_transformers
from flashtrain.integrations.huggingface_config import read_config
from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder
from flashtrain.integrations.huggingface_layers import decoder_layers
from flashtrain.integrations.huggingface_mixers import READ_WEIGHTS, served
from flashtrain.integrations.huggingface_specs import head_dim_of, states_of
from flashtrain.integrations.weight_files import CONFIG
from flashtrain.models.rope_scaling import RopeScaling
from flashtrain.settings import options

_say_once = cache(say)  # settings are first checked and later built
# Of these peft (0.21) refuses adapters of out_proj, which transformers' own class may only read.
PEFT_REFUSES = ("falcon_h1", "falcon_mamba", "mamba2", "nemotron_h")
MOST_ADDED = 1.1  # a tokenizer with more tokens, relative to the model's, is of another model
# transformers' own names; None is ours.
ATTENTIONS = {"flash": None, "sdpa": "sdpa", "standard": "eager"}


def transformers_decoder(
    path: str | None = None,
    *,
    config: str | None = None,
    changes: Mapping[str, Any] | None = None,
    attention: str = "flash",
    context: int | None = None,
    residual: str = "weights",
    rope_base: float | None = None,
    rope: str | None = None,
    rope_factor: float | None = None,
    lora: Mapping[str, Any] | None = None,
    quantize: str | None = None,
    older_positions: bool = False,
) -> HuggingFaceDecoder:
    """Build a Hugging Face decoder on the meta device, without reading weights.

    Args:
        path: Folder, or name on the hub.
        config: In place of path, for random weights: a config.json, its folder, "llama-8b" or
            another name of conf/decoder_shapes.yaml, or a model type ("llama").
        changes: Entries that replace those of the configuration;
            experts_implementation may be among them.
        attention: "flash", "sdpa" or "standard".
        context: The longest sequence in tokens, which extends rotary positions where
            needed (None: the model's).
        residual: Dtype of the residual stream under autocast, "weights" or "compute": see Decoder.
        rope_base: New base of rotary positions (None: the model's).
        rope, rope_factor: Scaling of rotary positions, a kind of RopeScaling (None: ntk)
            and its factor (None: 1).
        lora: Arguments of peft's LoraConfig, to train adapters alone (None:
            train the model itself).
        quantize: "nf4" to store the base matrices of adapters in 4 bits (None: as they are).
        older_positions: Positions as before December 2026: all count from 0, rope_base and
            rope_factor change every layer's, also scaled ones, and dynamic and longrope scaling
            compute from `context`.

    Raises:
        UserError: There is no such model, or it cannot be trained with these options.
    """
    import transformers

    folder = None if path is None else folders.folder_of(path)
    given, setting = (
        (str(folder), "model.path") if folder is not None else (str(config), "model.config")
    )
    changes = dict(changes or {})
    own = {name: changes.pop(name) for name in ("experts_implementation",) if name in changes}
    described = read_config(given, changes, setting)
    local = folder.absolute() if folder and Path(str(path)).expanduser().is_dir() else None
    if local is not None:
        with folders.opened_weights(local):  # raises now if files are missing or truncated
            pass
    if described.get_text_config() is not described:
        raise UserError(
            f"{given} is a {described.model_type}, which reads more than text: expected its text "
            f"model alone, with a {CONFIG} of model_type {described.get_text_config().model_type} "
            "(docs/train/hugging-face.md, which models, saves it)."
        )
    kind: Any = transformers.AutoModelForCausalLM._model_mapping[type(described)]
    if not served(kind) and (states := states_of(kind, described)):
        raise UserError(
            f"{given}: {kind.__name__} mixes tokens by {states}, which does not support packed "
            "documents and context parallelism: expected a model whose every layer is attention."
        )
    longest = _stretch(described, context, rope_base, rope, rope_factor, given, older_positions)
    name = ours = register_with_transformers()
    # On a CPU ours calls SDPA.
    if ATTENTIONS[attention] and (attention != "sdpa" or torch.cuda.is_available()):
        name = str(ATTENTIONS[attention])
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(
            described, attn_implementation=name, dtype=torch.float32, **own
        )
    check_architecture(module, decoder_layers(module), given, ours=name == ours)
    if lora is not None:
        # Of a configuration alone peft has nothing to look up.
        _add_adapters(module, lora, str(local or path or ""))
    if quantize is not None:
        one_of("model.quantize", quantize, get_args(options.Quantize))
        if lora is None:
            raise UserError(
                f"model.quantize={quantize} is for frozen weights only: add model.adapter=lora."
            )
    model = HuggingFaceDecoder(
        module, origin=path, residual=residual, quantize=quantize, context=longest
    )
    if older_positions:
        model.first = 0
    _check_adapters(model)
    known = model.shape.context
    if context is not None and context > known:  # rotary ones were extended
        raise UserError(
            f"context={context} is longer than the {known} learned positions of {given}. "
            f"Set context={known} or less."
        )
    return model


def _add_adapters(module: Any, lora: Mapping[str, Any], base: str) -> None:
    import transformers

    with needs_package("model.adapter=lora", "peft", "hub"):
        from peft import LoraConfig, __version__
    module.name_or_path = base  # which saved adapters name
    # Phi-MoE's and Llama 4's routers are nn.Linear, but return tuples, which peft's layers do not.
    # Adapters of weights that a mixer reads, without calling their layers, would get no gradient.
    read = READ_WEIGHTS if served(type(module)) else ()
    if module.config.model_type in PEFT_REFUSES and lora.get("target_modules") == "all-linear":
        read = (*read, "out_proj")
    given, head = lora.get("target_modules"), module.get_output_embeddings()
    excluded, matrices, wanted, refusal = [], [], set(), None
    for name, one in module.named_modules():
        router = isinstance(one, nn.Linear) and "Router" in type(one).__name__
        if router or name.rpartition(".")[2] in read:
            excluded.append(name)
        elif getattr(getattr(one, "weight", None), "ndim", 0) > 1:
            matrices.append(name)
            if isinstance(one, nn.Linear) and one is not head and given == "all-linear":
                wanted.add(name)
    config = LoraConfig(task_type="CAUSAL_LM", exclude_modules=excluded or None, **lora)
    try:
        module.add_adapter(config)
    except ValueError as error:
        # Refused for peft's version, before it read the targets.
        if not module._hf_peft_config_loaded:
            raise UserError(
                f"model.adapter=lora: transformers {transformers.__version__} does not accept peft "
                f"{__version__} ({first_line(error)}). Install releases that work together: "
                "pip install 'flashtrain[hub]'."
            ) from error
        refusal = error
    # peft (0.21) takes the names of shared experts and dense layers for those of experts' matrices.
    if left := wanted - {name for name, one in module.named_modules() if hasattr(one, "lora_A")}:
        names = sorted({re.sub(r".*\.\d+\.", "", name) for name in left})
        _say_once(f"model.adapter=lora: peft {__version__} gives none to {', '.join(names)}")
    # peft ignores names that no layer has; it has removed those of experts' matrices
    # from its target_modules.
    named = not isinstance(given, str)
    for target in sorted(config.target_modules or ()) if named else ():
        if not any(f".{name}".endswith(f".{target}") for name in matrices):
            known = {name.rpartition(".")[2] for name in matrices}
            raise unknown("layer in model.adapter_targets", target, known)
    if refusal is not None:
        raise UserError(f"peft refuses model.adapter_targets: {first_line(refusal)}") from refusal


def _check_adapters(model: HuggingFaceDecoder) -> None:
    """Raise UserError for an adapter of a matrix that two layers share."""
    names: dict[int, list[str]] = {}
    for name, weight in model.module.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(
            name.removesuffix(".weight").removesuffix(".base_layer")
        )
    for _, layer in model.adapters:
        for weight in layer.get_base_layer().parameters():
            if len(names[id(weight)]) > 1:
                raise UserError(
                    f"model.adapter_targets: {' and '.join(names[id(weight)])} are one matrix "
                    "(tie_word_embeddings), so that an adapter of one would be merged into both. "
                    "Use other layers, such as all-linear."
                )


def _stretch(
    config: Any,
    context: int | None,
    base: float | None,
    kind: str | None,
    factor: float | None,
    path: str,
    older: bool,
) -> int | None:
    """Extend the configuration's rotary positions to `context` tokens; return `context` if the
    configuration's own longest context must stay as it is, else None."""
    trained = getattr(config, "max_position_embeddings", None)
    rotary = getattr(config, "rope_parameters", None)
    if rotary is None:
        for name, value in (("rope_base", base), ("rope_factor", factor)):
            if value is not None:
                raise UserError(
                    f"model.{name}={value:g} needs rotary positions, but {path} has none. "
                    "Remove the setting."
                )
        return context if served(type(config)) else None  # these hybrids have no positions at all
    kinds = [one for one in rotary.values() if isinstance(one, dict)] or [rotary]
    scaled = sorted({one.get("rope_type", "default") for one in kinds} - {"default"})
    if factor is not None and scaled and not older:
        raise UserError(
            f"model.rope_factor={factor:g} would scale positions twice: the rope_type of {path} is "
            f"{scaled[0]}. Remove model.rope_factor, or change that scaling: "
            "+model.options={rope_parameters: {factor: ...}}."
        )
    # Its distances stay those of the window.
    local = None if older else rotary.get("sliding_attention")
    changed = (
        [one for one in kinds if one is not local] if base is not None or factor is not None else []
    )
    scaling = RopeScaling().scaled(kind, factor, trained or context or 0)
    for one in changed:
        one.update(scaling.parameters(base or one["rope_theta"], head_dim_of(config)))
    if context is None or trained is None or context <= trained:
        return None
    if not changed and not scaled:
        _say_once(
            f"context={context} is {context / trained:g} times the {trained} in the configuration "
            f"of {path}. Consider model.rope=yarn model.rope_factor={context / trained:g}."
        )
    if scaled and not older:
        return context  # since some scalings compute from the entry, as dynamic and longrope do
    config.max_position_embeddings = context
    return None


def build(
    settings: Any, *, vocab_size: int, context: int, attention: str = "flash"
) -> HuggingFaceDecoder:
    """Build model=huggingface from its settings; vocab_size is the tokenizer's. For tokens that
    were added to it rows are added to trained embeddings."""
    if settings.path is None and settings.config is None:
        raise UserError("model=huggingface needs model.path=FOLDER_OR_HUB_NAME.")
    lora = None
    if settings.adapter is not None:
        lora = {
            "r": settings.adapter_rank,
            "lora_alpha": settings.adapter_alpha or 2 * settings.adapter_rank,
            "lora_dropout": settings.adapter_dropout,
            "target_modules": settings.target_names(),
        }
    make = partial(
        transformers_decoder,
        settings.path,
        config=settings.config,
        attention=attention,
        context=context,
        residual=settings.residual,
        rope_base=settings.rope_base,
        rope=settings.rope,
        rope_factor=settings.rope_factor,
        lora=lora,
        quantize=settings.quantize,
        older_positions=settings.older_positions,
    )
    model = make(changes=settings.options)
    known, trained = model.shape.vocab_rows, settings.path is not None
    if trained and lora is None and known < vocab_size <= MOST_ADDED * known:
        rows = -(-vocab_size // 64) * 64  # whole tiles of a matrix product
        model = make(changes={**settings.options, "vocab_size": rows})
        _say_once(
            f"the tokenizer has {vocab_size:,} tokens, and {settings.path} embeddings of {known:,}:"
            f" {rows - known:,} rows are added, the mean of these"
        )
    elif trained and known < vocab_size <= MOST_ADDED * known:
        raise UserError(
            f"the tokenizer has {vocab_size:,} tokens, and {settings.path} embeddings of {known:,}:"
            " model.adapter=lora would leave added rows untrained. Train all weights, or first "
            "export a run that did."
        )
    elif vocab_size > known:
        raise UserError(
            f"the tokenizer has {vocab_size:,} tokens, but {settings.path or settings.config} only "
            f"{known:,}. Use the tokenizer that it was trained with (data.tokenizer=huggingface "
            "reads it from the model's folder)."
        )
    if settings.adapter_path is not None:
        model.start = adapter_weights(model.module, settings.adapter_path)
    return model


def _check(settings: Any, **sizes: Any) -> None:
    """Raise the errors of a training's build before any text is read. A plan needs no torchao."""
    if settings.quantize is not None:
        with needs_package(f"model.quantize={settings.quantize}", "torchao", "low-bit"):
            from torchao.quantization import to_nf4  # noqa: F401
    build(settings, **sizes)


build.check = _check  # type: ignore[attr-defined]
