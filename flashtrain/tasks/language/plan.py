"""The texts that announce a language model's training, or plan it (mode=plan)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial

import torch

from flashtrain.data.sources import StandardLibrarySource
from flashtrain.data.text_files import FilesSource
from flashtrain.models.decoder import Decoder
from flashtrain.models.trainable import Trainable
from flashtrain.settings.settings import Settings
from flashtrain.spec import Plan
from flashtrain.tasks.attention_masks import attended_context
from flashtrain.tasks.batching import Batching, fit_memory, memory_words
from flashtrain.tasks.context_run import context_columns, plan_lines
from flashtrain.tasks.decoders import make_model
from flashtrain.tasks.plan_text import FITS, last_lines, memory_plan, plan_text
from flashtrain.tasks.text_data import make_source, vocabulary_of
from flashtrain.training.float8 import check_float8, expected_gain, float8_flops, split_linears
from flashtrain.training.hardware import Hardware

WHOLE_RATE = 1e-5  # of recipe=hf and sft, for all weights
MANY_EPOCHS = 20  # from so many passes over the text on, a line says how to train for fewer
CONTEXTS = [2**power for power in range(10, 21)]  # at which a plan computes float8's gain
WORTH = 1.03  # expected speed over bf16's from which on float8 is said to pay
BYTES_PER_TOKEN = 4  # of English and of code, by tokenizers of some 50,000 tokens


def plan_language(settings: Settings, hardware: Hardware, epochs: Sequence[str] = ()) -> Plan:
    """Return mode=plan's text: parameters, tokens, estimated memory and time. Builds no
    weights, reads no text. Of stages it is the text of each. `epochs`: a line on trainer.epochs,
    which gave the steps."""
    if settings.stages:
        from flashtrain.tasks.language.stages import stages_of

        there = f"{FITS.removesuffix(':')} (context and tokens_per_step in the stage's entry):"
        texts = [(one.name, plan_language(one.settings, hardware)) for one in stages_of(settings)]
        end = "\n".join(last_lines(settings, hardware))
        joined = "".join(f"{name}:\n{text.removesuffix(end)}" for name, text in texts) + end
        return Plan(joined.replace(FITS, there), sum(text.seconds for _, text in texts))
    check_float8(settings.model.float8, hardware, plans=True)
    vocab_size = vocabulary_of(settings.data)
    build_model: Callable[..., Trainable] = partial(
        make_model, settings.model, vocab_size=vocab_size, context=settings.context
    )
    if settings.weights is not None:
        from flashtrain.tasks.language.starting_weights import weights_at_context

        config, _ = weights_at_context(settings.weights, settings.model, settings.context)
        build_model = partial(Decoder, config, residual=settings.model.residual)
    with torch.device("meta"):
        model = build_model(attention=hardware.attention)
    batching = fit_memory(settings, hardware, model)

    def again(changed: Settings) -> Batching:
        if changed.model == settings.model:
            return fit_memory(changed, hardware, model)
        with torch.device("meta"):
            other = make_model(
                changed.model,
                vocab_size=vocab_size,
                context=changed.context,
                attention=hardware.attention,
            )
        return fit_memory(changed, hardware, other)

    tokens = settings.trainer.steps * settings.trainer.tokens_per_step
    lines = [
        describe(settings, hardware, model, batching),
        f"text: {_text(settings, tokens)}; tokenizer {settings.data.tokenizer}",
        *epochs,
        (
            "tokens: "
            f"{tokens:,} ({settings.trainer.steps} steps of {settings.trainer.tokens_per_step:,})"
        ),
        *describe_mask(settings),
        *describe_unknown(model),
        *plan_lines(settings, hardware.precision, model, batching.micro_batch),
        *memory_plan(settings, hardware, batching, again),
    ]
    flops = tokens * model.flops_per_token(
        attended_context(settings.applied_mask, settings.context)
    )
    at_most, (faster,) = settings.applied_mask.documents, _gains(settings, model, settings.context)
    return plan_text(lines, settings, hardware, flops, at_most=at_most, faster=faster)


def _text(settings: Settings, tokens: int) -> str:
    """Return a line on the source; for local files also their size and how many epochs `tokens`
    tokens are. Raises UserError if the files do not exist."""
    source = make_source(settings.data)
    if (
        not isinstance(source, FilesSource | StandardLibrarySource)
        or getattr(source, "address", None) is not None
    ):
        return source.describe()
    size = source.approximate_bytes()
    each = 1 if settings.data.tokenizer == "bytes" else BYTES_PER_TOKEN
    line = f"{source.describe()}, about {size / 1e6:,.3g} MB of text"
    if settings.trainer.epochs is not None:  # counted from the data
        return line
    epochs = tokens * each / max(1, size)
    return f"{line}: {epochs:,.1f} epochs at {each} byte{'s' * (each > 1)} a token{many(epochs)}"


def many(epochs: float) -> str:
    """Return how to train for fewer epochs, after a line on many; "" for few."""
    return ". Set trainer.epochs=3, or fewer trainer.steps" if epochs >= MANY_EPOCHS else ""


def describe(settings: Settings, hardware: Hardware, model: Trainable, batching: Batching) -> str:
    """Return the lines that announce a training: model, context, steps, machine, micro-batch,
    memory; layers in float8; adapters with a rate of all weights."""
    columns = context_columns(settings.sharding, hardware.precision, model, batching.micro_batch)
    words = ", each sequence over {context_parallel} devices ({context_method})"
    if settings.trainer.context_parallel_groups == "planned":
        words = ", documents planned over {context_parallel} devices"
    shared = words.format(**columns) if columns else ""
    parameters = model.parameter_count()
    # Fewer with adapters.
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    part = f" ({trained / 1e6:.2f}M of them trained)" if trained < parameters else ""
    rate, slow = settings.optimizer.learning_rate, ""
    if model.keeps_part and rate <= WHOLE_RATE:
        slow = f"\nadapters at optimizer.learning_rate={rate:g}, that of all weights; 1e-4 is usual"
    return (
        f"{settings.named(settings.model.label)}: {parameters / 1e6:.1f}M parameters{part}, "
        f"context {settings.context}, attention {hardware.attention}; {settings.trainer.steps} "
        f"steps of {settings.samples_per_step} sample{'s' * (settings.samples_per_step > 1)} "
        f"({settings.trainer.tokens_per_step:,} tokens) on {settings.trainer.ranks} x "
        f"{hardware.name}, {hardware.precision}, micro-batch "
        f"{batching.micro_batch}{shared}{memory_words(batching)}{_float8(settings, model)}{slow}"
    )


def describe_unknown(model: Trainable) -> list[str]:
    """Return a list with a line on the kinds of layers whose FLOPs are unknown, so that no rates or
    times are estimated; [] if there are none."""
    layers = () if model.shape is None else model.shape.layers
    unknown = sorted({layer.mixer.kind for layer in layers if math.isnan(layer.mixer.flops(1))})
    if unknown:
        return [f"no TFLOP/s, MFU and time: the FLOPs of {', '.join(unknown)} are unknown"]
    return []


def _gains(settings: Settings, model: Trainable, *contexts: int) -> list[float]:
    """Return float8's expected speed over bf16's at contexts; 1 without, or of unknown FLOPs."""
    rounded, mask = float8_flops(model, settings.model.float8), settings.applied_mask
    flops = (model.flops_per_token(attended_context(mask, context)) for context in contexts)
    gains = [expected_gain(one, *rounded) for one in flops]
    return [1.0 if math.isnan(gain) else gain for gain in gains]


def _float8(settings: Settings, model: Trainable) -> str:
    """Return a line on the layers in float8, and up to which context they pay; "" without."""
    recipe = settings.model.float8
    if recipe is None:
        return ""
    chosen, others = split_linears(model, recipe)
    contexts = settings.context, *CONTEXTS
    gains = _gains(settings, model, *contexts)
    pays = (n for n, gain in zip(contexts, gains, strict=True) if gain >= WORTH)
    longest = max(pays, default=0)
    names = {re.sub(r"^.*\.\d+\.|\.base_layer$", "", name) for name in others}
    kinds = sorted({"adapters" if ".lora_" in name else name for name in names})
    return (
        f"\nfloat8 ({recipe}): {len(chosen)} linear layers in training, computed {gains[0]:.2f} "
        f"times bf16's speed at context={settings.context:,} ({WORTH} or more up to {longest:,}); "
        f"in bf16 stay {', '.join(['the head', 'embeddings', *kinds])}"
    )


def describe_mask(settings: Settings, *, read: bool = False) -> list[str]:
    """Return a list with a line on the mask and on how FLOPs are counted under it; [] for the
    causal mask.

    Args:
        read: whether this is a training, which learns the documents' lengths, and not a plan.
    """
    label = settings.mask_label
    if label == "causal":
        return []
    seen = attended_context(settings.applied_mask, settings.context)
    counted = "FLOPs count all of a row"
    if seen != settings.context:
        counted = f"FLOPs count rows as of {seen:,} tokens"
    if settings.applied_mask.documents and read:
        counted = "MFU counts each document by itself"
    elif settings.applied_mask.documents:
        counted += ", also where it holds several documents"
    return [f"mask {label}: {counted}"]
