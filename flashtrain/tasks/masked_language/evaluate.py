"""mode=evaluate and mode=export of a BERT that was trained on masked text."""

from __future__ import annotations

from typing import cast

from flashtrain.announce import say
from flashtrain.errors import UserError
from flashtrain.folders.export_folder import new_folder
from flashtrain.integrations import differences_from_bert, save_bert, save_weights
from flashtrain.models.bert import Bert
from flashtrain.models.trainable import Trainable
from flashtrain.settings.settings import Settings
from flashtrain.tasks import MaskedLanguageModel
from flashtrain.tasks.language.trained import move
from flashtrain.tasks.masked_language.build import check_context, make_masked_data
from flashtrain.tasks.masked_language.weights import SavedBert, read_bert, save_encoder_tokenizer
from flashtrain.tasks.training_task import evaluating_trainer
from flashtrain.training.hardware import Hardware


def run_masked_mode(settings: Settings, hardware: Hardware) -> int:
    """Evaluate or export. Returns the exit status. UserError: a mode that BERT has not."""
    if settings.mode not in ("evaluate", "export"):
        raise UserError(f"mode={settings.mode} is for language models: BERT has train, plan, evaluate and export.")
    saved = read_bert(str(settings.checkpoint))
    return _export(saved) if settings.mode == "export" else _evaluate(saved, settings, hardware)


def _evaluate(saved: SavedBert, settings: Settings, hardware: Hardware) -> int:
    """Loss and masked-language accuracy on the held-out samples."""
    check_context(saved.config, settings.context, str(saved.path))
    data = make_masked_data(settings, hardware)
    data.accumulate = 1  # the Trainer below takes no steps
    data.setup()
    if data.vocab_size != saved.config.vocab_size:
        raise UserError(
            f"{saved.path} knows {saved.config.vocab_size} tokens, and this text is made of {data.vocab_size}: "
            "evaluate with the tokenizer that it was trained with."
        )
    model = Bert(saved.config, hardware.attention, settings.bert.residual)
    model.load_state_dict(saved.state)
    model = cast(Bert, move(cast(Trainable, model.eval()), hardware.kind, hardware.precision))
    trainer = evaluating_trainer(hardware)
    (found,) = trainer.validate(MaskedLanguageModel(model), data, verbose=False) or [{}]
    if "validation_accuracy" not in found:
        raise UserError("no text is held out to evaluate on: raise data.validation_fraction.")
    say(
        f"{saved.path} (step {saved.step}): held-out loss {found['validation_loss']:.4f}, masked-language accuracy "
        f"{found['validation_accuracy']:.2%}"
    )
    return 0


def _export(saved: SavedBert) -> int:
    """Write the weights as safetensors: in Hugging Face's layout where the model is a BERT of theirs, else in ours."""
    model = Bert(saved.config, "sdpa")
    model.load_state_dict(saved.state)
    with new_folder(saved.folder, "export") as folder:
        if not differences_from_bert(saved.config):
            save_bert(model, folder, pad_token=saved.special.pad)
            which = "BertForPreTraining" if saved.config.next_sentence else "BertForMaskedLM"
            how = f"Hugging Face's BERT layout: transformers.{which}.from_pretrained reads it"
        else:
            save_weights(model, folder)
            how = "flashtrain's own layout: flashtrain.integrations.load_weights reads it"
        tokenizer = save_encoder_tokenizer(saved.needed_tokenizer(), folder, saved.config)
    say(f"exported step {saved.step} to {folder} ({how}; {tokenizer})")
    return 0
