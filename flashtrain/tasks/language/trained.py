"""A trained language model back from a checkpoint or Hugging Face weights, and the text that it writes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flashtrain.announce import say
from flashtrain.data.tokenizers import Tokenizer, load_tokenizer, without_begin
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import BEST, CONFIG_FILE, TOKENIZER, find_checkpoint, read_settings
from flashtrain.integrations import load_decoder
from flashtrain.integrations.huggingface_folder import folder_of, read_config
from flashtrain.models.gpt2 import GPT2
from flashtrain.models.gpt2_config import GPT2Config
from flashtrain.models.longer_context import with_context
from flashtrain.models.trainable import Trainable
from flashtrain.registry import component
from flashtrain.settings.settings import Settings
from flashtrain.tasks.components import make_model
from flashtrain.training.checkpoints import read_checkpoint, weights_in

DECODERS = ("gpt2", "modern")  # what a checkpoint calls the models that its shape alone rebuilds


@dataclass
class TrainedModel:
    """The model in a run folder, ready to evaluate, generate with or export."""

    model: Trainable
    tokenizer: Tokenizer
    folder: Path
    checkpoint: Path
    step: int


def model_of_weights(
    settings: Settings, start: tuple[GPT2Config, dict[str, torch.Tensor]], *, vocab_size: int, attention: str
) -> Trainable:
    """A model to train that starts from these weights (see weights_at_context). UserError: they know other tokens."""
    config, state = start
    check_tokens(settings, config, vocab_size)
    model = GPT2(config, attention=attention, residual=settings.model.residual)
    model.load_state_dict(state)
    return model


def check_tokens(settings: Settings, config: GPT2Config, vocab_size: int) -> None:
    """Raise UserError where the weights know other tokens than the tokenizer makes."""
    if vocab_size != config.vocab_size:
        raise UserError(
            f"the weights in {settings.weights} know {config.vocab_size} tokens and the tokenizer makes {vocab_size}: "
            "GPT-2's weights need data.tokenizer=gpt2, those of a run the tokenizer that it had."
        )


def weights_at_context(settings: Settings) -> tuple[GPT2Config, dict[str, torch.Tensor]]:
    """Configuration and weights that `weights` names, at `context`. Raises UserError where they cannot serve the
    settings, before any text is read."""
    return at_context(settings, *starting_weights(settings), where=str(settings.weights))


def check_family(settings: Settings) -> None:
    """Raise UserError where `model`, which the command names, is another family than that of `weights`."""
    config, _ = starting_weights(settings)
    family = "modern" if config.norm == "rmsnorm" else "gpt2"
    requested = settings.model.name
    if requested != family:
        raise UserError(
            f"model={requested} is another architecture than that of the weights in {settings.weights}, which are of "
            f"model={family} ({config.positions} positions, {config.norm}, {config.activation}): leave model= out, or "
            "train anew without weights=."
        )


def run_of_weights(settings: Settings) -> Path | None:
    """The folder of the run whose weights `weights` names; None where they are no run's."""
    path = Path(str(settings.weights)).expanduser()
    return find_checkpoint(str(path), prefer=BEST)[0] if is_of_run(path) else None


def is_of_run(path: Path) -> bool:
    """Whether a run's folder, or a checkpoint in one, is there."""
    return path.suffix == ".ckpt" or (path / CONFIG_FILE).is_file()


def fit_to_run(settings: Settings, given: Collection[str]) -> list[str]:
    """Take the tokenizer and the model of the run that `weights` names, and its context where it can serve no longer
    one; what to say of it. given: the settings that the command line names.

    Raises UserError where those contradict the run, or where no tokenizer of this text could be the weights' own.
    """
    folder = run_of_weights(settings)
    if folder is None:
        if settings.data.tokenizer == "bpe":
            starting_weights(settings)  # there are some
            raise UserError(
                f"data.tokenizer=bpe is trained on this text, and the weights in {settings.weights} know other tokens: "
                "choose data.tokenizer=gpt2 for GPT-2's (with data.vocab=... and data.merges=... where no hub is), or "
                "weights=RUN, which takes the run's own."
            )
        return []
    own = read_settings(folder)
    for name in ("tokenizer", "vocab_size", "vocab", "merges"):
        here, there = getattr(settings.data, name), getattr(own.data, name)
        if f"data.{name}" in given and here != there and (name != "vocab_size" or own.data.tokenizer == "bpe"):
            raise UserError(
                f"data.{name}={here} contradicts weights={settings.weights}, which was trained with "
                f"data.{name}={there}: leave it out."
            )
        setattr(settings.data, name, there)
    if "data.begin_of_text" not in given:
        settings.data.begin_of_text = own.data.begin_of_text
    for name in ("name", "size", "positions", "vocab_rows"):
        setattr(settings.model, name, getattr(own.model, name))
    taken = [f"tokenizer {own.data.tokenizer}", f"model {own.model.label}"]
    shorter = "context" not in given and settings.context > own.context and not settings.model.interpolate_positions
    if shorter and starting_weights(settings)[0].positions == "learned":
        settings.context = own.context
        if "trainer.tokens_per_step" not in given:
            step = settings.context * settings.trainer.ranks
            settings.trainer.tokens_per_step = step * max(1, settings.trainer.tokens_per_step // step)
        taken.append(f"context {own.context}")
    return [f"as in {folder}: {', '.join(taken)}."]


def fit_context(settings: Settings, given: Collection[str]) -> list[str]:
    """Of a model that is not trained here the context, where the command line leaves it open and the recipe's is longer
    than the model's own."""
    if "context" in given or settings.mode not in ("evaluate", "generate") or settings.checkpoint:
        return []
    if settings.weights is None:
        config = read_config(str(folder_of(str(settings.model.path))), settings.model.options).get_text_config()
        own = getattr(config, "max_position_embeddings", None) or settings.context
    else:
        own = starting_weights(settings)[0].context
    if settings.context <= own:
        return []
    settings.context = own
    return [f"context {own}, the longest that {settings.weights or settings.model.path} was trained with."]


def starting_weights(settings: Settings) -> tuple[GPT2Config, dict[str, torch.Tensor]]:
    """Configuration and weights that `weights` names, with the settings' dropout.

    A Hugging Face GPT-2, Llama or Starcoder2 (folder or .safetensors file), an export of ours in its own layout, or a
    run folder or checkpoint (its best weights). Raises UserError for anything else.
    """
    path = Path(str(settings.weights)).expanduser()
    if is_of_run(path):
        config, state = _checkpoint_weights(path)
    else:
        config, state = load_decoder(path, vocab_rows=settings.model.vocab_rows)
    return replace(config, dropout=settings.model.dropout), state


def at_context(
    settings: Settings, config: GPT2Config, state: dict[str, torch.Tensor], *, where: str | Path
) -> tuple[GPT2Config, dict[str, torch.Tensor]]:
    """Configuration and weights for `context`, by model.interpolate_positions, model.rope_base and model.rope_factor.

    Raises UserError for learned positions that would have to be interpolated without model.interpolate_positions.
    """
    learned = config.positions == "learned"
    if settings.context > config.context and learned and not settings.model.interpolate_positions:
        raise UserError(
            f"context={settings.context} is longer than the {config.context} positions that the weights in {where} "
            f"were trained with: choose context={config.context} or less, or let model.interpolate_positions=true "
            "stretch them (training then has to adapt the model)."
        )
    if settings.context > config.context and not learned and settings.model.rope_factor is None:
        longer = settings.context / config.context
        say(
            f"context={settings.context} is {longer:g} times the {config.context} that the weights in {where} were "
            f"trained with; model.rope_factor={longer * config.rope_factor:g} would slow their rotary angles for it."
        )
    return with_context(
        config,
        state,
        settings.context,
        interpolate=settings.model.interpolate_positions,
        rope_base=settings.model.rope_base,
        rope_factor=settings.model.rope_factor,
    )


def load_trained(given: str, *, attention: str, settings: Settings | None = None) -> TrainedModel:
    """The model in a run folder (its best checkpoint) or in a checkpoint, on the CPU, in evaluation mode.

    settings: a context longer than the model's, and how its positions are to serve it (None: as it was trained).
    """
    folder, path = find_checkpoint(given, prefer=BEST)
    saved, description = _described(path)
    state = weights_in(saved, path, prefix="model.")
    if description["name"] in DECODERS:
        config = GPT2Config(**description["shape"])
        if settings is not None:
            config, state = at_context(settings, config, state, where=path)
        residual = (settings or read_settings(folder)).model.residual
        model: Trainable = GPT2(config, attention=attention, residual=residual)
    else:
        own = read_settings(folder)
        if settings is not None:
            own = own.having(context=max(own.context, settings.context), model=settings.model)
        # A model with a configuration of its own asks for the text's tokenizer, and knows more tokens, maybe.
        sized = hasattr(component("model", own.model.name), "check")
        vocab_size = load_tokenizer(folder / TOKENIZER).vocab_size if sized else description["vocab_size"]
        model = make_model(own, vocab_size=vocab_size, attention=attention)
    model.fill(state)
    tokenizer = load_tokenizer(folder / TOKENIZER)
    if not (settings or read_settings(folder)).data.begin_of_text:
        tokenizer = without_begin(tokenizer)
    return TrainedModel(model.eval(), tokenizer, folder, path, saved["global_step"])


def move(model: Trainable, kind: str, precision: str) -> Trainable:
    """The model on the device, in the precision's own dtype where that is not a mixed one."""
    dtype = {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision)
    return model.to(device=kind, dtype=dtype)


def _checkpoint_weights(path: Path) -> tuple[GPT2Config, dict[str, torch.Tensor]]:
    _, checkpoint = find_checkpoint(str(path), prefer=BEST)
    saved, description = _described(checkpoint)
    if description["name"] not in DECODERS:
        raise UserError(
            f"{checkpoint} holds a model of kind {description['name']}. Expected one of: {', '.join(DECODERS)}."
        )
    state = weights_in(saved, checkpoint, prefix="model.")
    return GPT2Config(**description["shape"]), state


def _described(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(checkpoint, what it says of its model). Raises UserError for one that says nothing."""
    saved = read_checkpoint(path)
    description = saved.get("flashtrain")
    if not description or "name" not in description:
        raise UserError(f"{path} was not written by flashtrain: it does not say which model it holds.")
    return saved, description
