"""The weights that a language model starts from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from flashtrain.announce import say
from flashtrain.data.tokenizers import Tokenizer, load_tokenizer, without_begin
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import (
    BEST,
    CONFIG_FILE,
    TOKENIZER,
    find_checkpoint,
    settings_at,
)
from flashtrain.integrations import load_decoder
from flashtrain.models.changed_layers import with_layers
from flashtrain.models.decoder import Decoder
from flashtrain.models.decoder_config import FAMILIES, DecoderConfig
from flashtrain.models.longer_context import with_context
from flashtrain.models.trainable import Trainable
from flashtrain.settings.aliases import current_value
from flashtrain.settings.model import ModelSettings
from flashtrain.training.checkpoints import read_checkpoint, weights_in

Weights = tuple[DecoderConfig, dict[str, Tensor]]


def starting_weights(weights: str, model: ModelSettings) -> Weights:
    """Read the configuration and the weights that `weights` names; the dropout is
    that of the group `model`.

    `weights` is a Hugging Face GPT-2, Llama or Starcoder2 (a folder or a .safetensors file), an
    export in flashtrain's own format, or a run folder or checkpoint (its best weights).

    Raises:
        UserError: `weights` is none of these.
    """
    path = Path(weights).expanduser()
    if not is_of_run(path):
        config, state = load_decoder(path, vocab_rows=model.vocab_rows)
        return replace(config, dropout=model.dropout), state
    _, checkpoint = find_checkpoint(str(path), prefer=BEST)
    saved = read_checkpoint(checkpoint)
    description = saved["flashtrain"]
    if current_value("model.name", description["name"]) not in FAMILIES:
        raise UserError(
            f"{checkpoint} holds a model of kind {description['name']}. "
            f"Expected one of: {', '.join(FAMILIES)}."
        )
    config = DecoderConfig.of_plain(description["shape"])
    return replace(config, dropout=model.dropout), weights_in(saved, checkpoint)


def weights_at_context(weights: str, model: ModelSettings, context: int) -> Weights:
    """Read what `weights` names, adapted to this context, model.kv_heads and model.pattern."""
    start, path = starting_weights(weights, model), Path(weights).expanduser()
    run = settings_at(*find_checkpoint(str(path), prefer=BEST)).model if is_of_run(path) else None
    # Those of a run with these layers, such as the stage before, have them.
    if run is None or (run.kv_heads, run.pattern) != (model.kv_heads, model.pattern):
        start = with_layers(*start, model.kv_heads, model.pattern)
    return at_context(model, context, *start, where=weights)


def at_context(
    model: ModelSettings,
    context: int,
    config: DecoderConfig,
    state: dict[str, Tensor],
    *,
    where: str | Path,
) -> Weights:
    """Adapt weights to this context, by model.interpolate_positions,
    rope_base, rope and rope_factor.

    Args:
        config, state: the weights' configuration, and the weights.
        where: the weights' place, for messages.

    Raises:
        UserError: learned positions would have to be stretched, and
            model.interpolate_positions is false.
    """
    learned = config.positions == "learned"
    if context > config.context and learned and not model.interpolate_positions:
        raise UserError(
            f"context={context} is longer than the {config.context} positions that the "
            f"weights in {where} were trained with. Use context={config.context} or "
            "less, or model.interpolate_positions=true to stretch them (training then "
            "has to adapt the model)."
        )
    if context > config.context and not learned and model.rope_factor is None:
        longer = context / config.context
        how = ", with model.rope=yarn by YaRN" if config.rope.factor == 1 else ""
        say(
            f"context={context} is {longer:g} times the {config.context} that the weights in "
            f"{where} were trained with; model.rope_factor={longer * config.rope.factor:g} would "
            f"scale their rotary positions to it{how}."
        )
    return with_context(
        config,
        state,
        context,
        interpolate=model.interpolate_positions,
        rope_base=model.rope_base,
        rope=model.rope,
        rope_factor=model.rope_factor,
    )


def model_of_weights(
    where: str, start: Weights, *, residual: str, vocab_size: int, attention: str
) -> Trainable:
    """Build the model that `start` describes, with its weights.

    Args:
        where: the weights' file or folder, named in errors.
        start: the result of weights_at_context(where, ...).
        residual: dtype of the residual stream: "compute" or "weights", as model.residual.
        vocab_size: the tokenizer's.
        attention: "flash" or "sdpa", as attention.name.

    Raises:
        UserError: vocab_size is not that of the weights.
    """
    config, state = start
    check_tokens(where, config, vocab_size)
    model = Decoder(config, attention=attention, residual=residual)
    model.load_state_dict(state)
    return model


def check_tokens(where: str, config: DecoderConfig, vocab_size: int) -> None:
    """Raise UserError unless vocab_size, the tokenizer's, is that of the weights in `where`."""
    if vocab_size != config.vocab_size:
        raise UserError(
            f"the weights in {where} know {config.vocab_size} tokens and the tokenizer makes "
            f"{vocab_size}. Use data.tokenizer=gpt2 with GPT-2's weights, and the run's own "
            "tokenizer with those of a run."
        )


def is_of_run(path: Path) -> bool:
    """Return whether a path is a run's folder, or a checkpoint in one."""
    return path.suffix == ".ckpt" or (path / CONFIG_FILE).is_file()


def run_of_weights(weights: str | None) -> Path | None:
    """Return the folder of the run that `weights` names; None if `weights` names
    something else, such as a file."""
    path = Path(weights or "").expanduser()
    return find_checkpoint(str(path), prefer=BEST)[0] if weights and is_of_run(path) else None


def tokenizer_of_weights(weights: str | None, *, begin_of_text: bool) -> Tokenizer | None:
    """Load the tokenizer of the run that `weights` names; None if `weights` names
    something other than a run."""
    run = run_of_weights(weights)
    if run is None:
        return None
    found = load_tokenizer(run / TOKENIZER)
    return found if begin_of_text else without_begin(found)
