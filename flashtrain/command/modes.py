"""mode=evaluate, generate, export and passkey: what can be done with a run folder or a checkpoint.

Their settings are the run's own (its config.yaml) with the command line's on top, so no recipe needs to be named.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf

from flashtrain.command.announce import say
from flashtrain.command.compose import checked_settings, parse_overrides, readable_errors
from flashtrain.command.quiet import quieten
from flashtrain.errors import UserError
from flashtrain.integrations import differences_from_gpt2, save_gpt2, save_tokenizer, save_weights
from flashtrain.models.gpt2 import GPT2
from flashtrain.run.checkpoint_model import TrainedModel, load_trained, move
from flashtrain.run.export_folder import new_folder
from flashtrain.run.machine import settle
from flashtrain.run.run import make_data
from flashtrain.run.run_folder import BEST, find_checkpoint, read_settings
from flashtrain.run.sample import continue_text, default_prompt
from flashtrain.settings.settings import Settings, forget_unheeded
from flashtrain.settings.typed_settings import settings_config
from flashtrain.tasks import LanguageModel
from flashtrain.tasks.fine_tuning.evaluate import run_fine_tuning_mode
from flashtrain.tasks.masked_language.evaluate import run_masked_mode
from flashtrain_recipes.arena.evaluate import of_last_stage, run_classifier_mode, settings_for_weights
from flashtrain_recipes.long_context.passkey_run import evaluate_passkey

# Groups of conf/ that the command line may name here too, and the setting that each name stands for. Hydra composes
# nothing in these modes: the run's own settings are the ground.
GROUPS = {
    "attention": "name",
    "data": "source",
    "hardware": "accelerator",
    "logger": "name",
    "memory": "checkpointing",
}


def settings_from_checkpoint(words: Sequence[str]) -> Settings | None:
    """The settings for a mode that works on a checkpoint; None where the command line asks for another mode.

    Raises UserError when no checkpoint is given.
    """
    given = {override.get_key_element().lstrip("+~"): override for override in parse_overrides(words)}
    mode = str(given["mode"].value()) if "mode" in given else "train"
    if mode not in ("evaluate", "generate", "export", "passkey"):
        return None
    if mode == "evaluate" and "weights" in given and "checkpoint" not in given:
        return settings_for_weights(words, given)
    if "checkpoint" not in given:
        raise UserError(f"mode={mode} needs checkpoint=..., a run folder or a checkpoint in one.")
    folder, _ = find_checkpoint(str(given["checkpoint"].value()), prefer=BEST)
    own = read_settings(folder)
    config = settings_config(of_last_stage(own) if own.task == "classification" else own)
    OmegaConf.set_struct(config, True)
    if "recipe" in given and str(given["recipe"].value()) != own.recipe:
        raise UserError(
            f"recipe={given['recipe'].value()}: the run in {folder} is of recipe={own.recipe}, whose settings "
            f"mode={mode} takes: leave recipe= out."
        )
    for key, override in given.items():
        if key == "recipe" or key.startswith("hydra"):
            continue
        own_name = GROUPS.get(key)
        value = override.value() if own_name is None else {own_name: override.value()}
        with readable_errors():
            replaces = isinstance(value, str) and OmegaConf.is_dict(OmegaConf.select(config, key))
        if replaces:
            raise UserError(
                f"{key}={value} replaces all {key} settings, and mode={mode} takes the checkpoint's own: leave it out, "
                f"or change single ones ({key}.NAME=VALUE)."
            )
        with readable_errors():
            OmegaConf.update(config, key, value)
    forget_unheeded(config.data, given)  # what the run was told of another source, or by a demo
    return checked_settings(config)


def run_mode(settings: Settings) -> int:
    """Evaluate, generate, export or ask for passkeys. Returns the exit status."""
    quieten()
    settings.hardware.demo = "never"  # the model is the checkpoint's, on whatever machine
    settings, hardware = settle(settings, ())
    if settings.task == "classification" and settings.mode != "preview":
        return run_classifier_mode(settings, hardware)
    if settings.task == "masked_language_model":
        return run_masked_mode(settings, hardware)
    if settings.task == "fine_tuning":
        return run_fine_tuning_mode(settings, hardware)
    if settings.mode == "passkey":
        evaluate_passkey(settings, hardware)
        return 0
    trained = load_trained(str(settings.checkpoint), attention=hardware.attention, settings=settings)
    if settings.mode == "export":
        return _export(trained)
    trained.model = move(trained.model, hardware.kind, hardware.precision)
    if settings.mode == "generate":
        prompt = settings.prompt or default_prompt(settings.data.source)
        print(continue_text(trained.model, trained.tokenizer, prompt, settings.generate, seed=settings.seed))
        return 0
    data = make_data(settings, hardware)
    trainer = pl.Trainer(
        accelerator="gpu" if hardware.kind == "cuda" else "cpu",
        devices=1,
        precision=hardware.precision,  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    data.batch_size = min(data.batch_size, 8)
    task = LanguageModel(trained.model, document_mask=settings.data.document_mask)
    loss = trainer.validate(task, data, verbose=False)[0]["validation_loss"]
    perplexity = float(torch.exp(torch.tensor(loss)))
    say(f"{trained.checkpoint} (step {trained.step}): held-out loss {loss:.4f}, perplexity {perplexity:.2f}")
    return 0


def _export(trained: TrainedModel) -> int:
    """Write the weights as safetensors: in Hugging Face's GPT-2 layout where the model is one, else in our own."""
    if not isinstance(trained.model, GPT2):
        raise UserError(f"{type(trained.model).__name__} cannot be exported: only flashtrain's own models can.")
    config = trained.model.config
    with new_folder(trained.folder, "export") as folder:
        if not differences_from_gpt2(config):
            save_gpt2(trained.model, folder, end_of_text=trained.tokenizer.end_of_text)
            how = "Hugging Face's GPT-2 layout: transformers.GPT2LMHeadModel.from_pretrained reads it"
        else:
            save_weights(trained.model, folder)
            how = "flashtrain's own layout: flashtrain.integrations.load_weights reads it"
        context = config.context if config.positions == "learned" else None
        tokenizer = save_tokenizer(trained.tokenizer, folder, context=context)
    say(f"exported step {trained.step} to {folder} ({how}; {tokenizer})")
    return 0
