"""The settings of a language model that follow from the weights it starts from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from flashtrain.errors import UserError
from flashtrain.folders.run_folder import BEST, find_checkpoint, settings_at
from flashtrain.integrations.huggingface_adapter import adapter_settings
from flashtrain.integrations.huggingface_config import ROTARY, read_config
from flashtrain.integrations.huggingface_folder import folder_of
from flashtrain.settings.settings import Settings
from flashtrain.tasks.language.exports import take_export
from flashtrain.tasks.language.starting_weights import is_of_run, run_of_weights, starting_weights

_OF_ADAPTER = ("adapter", "adapter_rank", "adapter_alpha", "adapter_targets")
_OF_TOKENS = ("tokenizer", "vocab_size", "vocab", "merges", "chat_template")


def suit_to_weights(settings: Settings, given: Collection[str]) -> list[str]:
    """Change the settings to suit the model that `weights` or model.path names,
    except for those in `given`.

    Args:
        settings: changed in place: tokenizer, model, context, and model.path if it names a run.
        given: the names of the settings on the command line.

    Returns:
        The lines to print about the changes.

    Raises:
        UserError: `given` contradicts the weights, or data.tokenizer=bpe could not be
            the weights' tokenizer.
    """
    adapter = _suit_to_adapter(settings, given)
    # A training makes it once it has its folder.
    take_export(settings, make=settings.mode != "train")
    if (path := settings.model.path) is not None and Path(path).expanduser().is_dir():
        settings.model.path = str(Path(path).expanduser().absolute())  # for other working folders
    if settings.weights is None:
        return [*adapter, *_suit_context(settings, given)]
    if not {"model", "model.name"}.isdisjoint(given):
        _check_family(settings)
    return [*_suit_to_run(settings, given), *_suit_context(settings, given)]


def _suit_to_adapter(settings: Settings, given: Collection[str]) -> list[str]:
    """Set the model to the adapter that model.adapter_path, `weights` or model.path names, a run or
    a peft folder, and to its base; return a line on that, [] if it is none."""
    model = settings.model
    where = model.adapter_path or settings.weights or model.path
    of_run = model.adapter_path is not None and "model.adapter_path" not in given
    if model.name != "huggingface" or where is None or of_run:
        return []
    own = {name: one for name, one in vars(model).items() if f"model.{name}" in given}
    if "adapter_targets" in own:
        own["adapter_targets"] = model.target_names()
    if is_of_run(Path(where).expanduser()):
        folder, checkpoint = find_checkpoint(where, prefer=BEST, setting="model.path")
        run = settings_at(folder, checkpoint)
        found = replace(run.model, adapter_path=str(checkpoint.absolute()))
        if own.get("adapter", "lora") is None or found.adapter is None or found.path is None:
            return []  # they are merged, if there are any
        for name in _OF_TOKENS:
            if f"data.{name}" not in given:
                setattr(settings.data, name, getattr(run.data, name))
    elif (taken := adapter_settings(where)) is not None:
        found = replace(model, **taken)
    else:
        return []
    scaling = {"rope", "rope_base", "rope_factor"}
    staged = any(getattr(one, name) for one in settings.stages for name in scaling)
    if staged or not scaling.isdisjoint(own):
        found.options.pop(ROTARY, None)
    found.adapter_alpha = found.adapter_alpha or 2.0 * found.adapter_rank
    found.adapter_targets = found.target_names()
    for name in _OF_ADAPTER:
        here, there = own.get(name, getattr(found, name)), getattr(found, name)
        if here != there:
            raise UserError(
                f"model.{name}={here} contradicts the adapter in {where}, which has {there}. "
                f"Remove model.{name}, or export the adapter merged and train another one."
            )
    own |= {"options": {**found.options, **model.options}, "adapter_path": found.adapter_path}
    own["path"] = model.path if model.adapter_path else found.path
    settings.model, settings.weights = replace(found, **own), None
    anew = "; the optimizer starts anew" if settings.mode == "train" else ""
    return [f"the adapter in {where} goes on, rank {found.adapter_rank} on {own['path']}{anew}."]


def _check_family(settings: Settings) -> None:
    """Raise UserError unless model.name is the family (gpt2, llama) of the weights that `weights`
    names."""
    config, _ = starting_weights(str(settings.weights), settings.model)
    inner = config.layers[0].feed_forward
    family = "llama" if inner.gated else "gpt2"
    llamas = ("llama", "transnormer")  # of one block
    if settings.model.name != family and not (inner.gated and settings.model.name in llamas):
        raise UserError(
            f"model={settings.model.name} is another architecture than that of the weights "
            f"in {settings.weights}, which are of model={family} ({config.positions} "
            f"positions, {config.norm}, {inner.activation}). Remove model=, or weights= to "
            "train from random weights."
        )


def _suit_to_run(settings: Settings, given: Collection[str]) -> list[str]:
    """Set tokenizer and model to those of the run that `weights` names, and the context if the
    run's learned positions are too few; return a line on that, [] without a run."""
    folder = run_of_weights(settings.weights)
    if folder is None:
        if settings.data.tokenizer == "bpe":
            starting_weights(str(settings.weights), settings.model)  # there are some
            raise UserError(
                "data.tokenizer=bpe is trained on this text, and the weights in "
                f"{settings.weights} know other tokens. Use data.tokenizer=gpt2 for GPT-2's "
                "(with data.vocab=... and data.merges=... if offline), or weights=RUN, which "
                "takes the run's own."
            )
        return []
    own = settings_at(*find_checkpoint(str(settings.weights), prefer=BEST))
    for name in ("tokenizer", "vocab_size", "vocab", "merges"):
        here, there = getattr(settings.data, name), getattr(own.data, name)
        if (
            f"data.{name}" in given
            and here != there
            and (name != "vocab_size" or own.data.tokenizer == "bpe")
        ):
            raise UserError(
                f"data.{name}={here} contradicts weights={settings.weights}, "
                f"which was trained with data.{name}={there}. Remove data.{name}."
            )
        setattr(settings.data, name, there)
    if "data.begin_of_text" not in given:
        settings.data.begin_of_text = own.data.begin_of_text
    for name in ("name", "size", "positions", "vocab_rows"):
        setattr(settings.model, name, getattr(own.model, name))
    taken = [f"tokenizer {own.data.tokenizer}", f"model {own.model.label}"]
    shorter = (
        "context" not in given
        and settings.context > own.context
        and not settings.model.interpolate_positions
    )
    if (
        shorter
        and starting_weights(str(settings.weights), settings.model)[0].positions == "learned"
    ):
        settings.context = own.context
        if "trainer.tokens_per_step" not in given:
            step = settings.context * settings.trainer.ranks
            settings.trainer.tokens_per_step = step * max(
                1, settings.trainer.tokens_per_step // step
            )
        taken.append(f"context {own.context}")
    return [f"as in {folder}: {', '.join(taken)}."]


def _suit_context(settings: Settings, given: Collection[str]) -> list[str]:
    """For mode=evaluate or generate of a model without a checkpoint, shorten the context to the
    model's longest; return a line on that, [] if nothing changed."""
    if "context" in given or settings.mode not in ("evaluate", "generate") or settings.checkpoint:
        return []
    if settings.weights is None:
        config = read_config(
            str(folder_of(str(settings.model.path))), settings.model.options
        ).get_text_config()
        own = getattr(config, "max_position_embeddings", None) or settings.context
    else:
        own = starting_weights(str(settings.weights), settings.model)[0].context
    if settings.context <= own:
        return []
    settings.context = own
    return [
        f"context {own}, the longest that "
        f"{settings.weights or settings.model.path} was trained with."
    ]
